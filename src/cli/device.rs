//! Where a request is computed: choosing the backend, and `kiln doctor`.

use super::args::{BackendArg, DoctorArgs};
use super::stdout::print;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::driver::DeviceInfo;
use crate::backend::cuda::{self, Cuda};
use crate::backend::{Backend, OP_NAMES};
use crate::config::Variant;
use crate::error::{Error, Result};
use crate::locate::{BUILT_IN, Environment, Found, TINY, locate};
use crate::pipeline::OpenModel;
use crate::text::{gib, shown_line, shown_text};
use crate::threads;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A backend that is open, and what to say about it.
pub struct SelectedBackend {
    pub backend: Box<dyn Backend>,
    /// Its name, as the command line spells it.
    pub name: &'static str,
    /// The machine, for display.
    pub machine: String,
    /// The GPU, if it is one.
    pub device: Option<DeviceInfo>,
    /// Why `auto` did not select a GPU.
    pub note: Option<String>,
}

/// Opens the backend that was asked for.
pub fn select_backend(backend: BackendArg, device: usize, stop: &Arc<AtomicBool>) -> Result<SelectedBackend> {
    let cpu = |note| -> Result<SelectedBackend> {
        let cpu = Cpu::shared(stop.clone());
        let machine = format!("{} threads", cpu.threads());
        Ok(SelectedBackend { backend: Box::new(cpu), name: "cpu", machine, device: None, note })
    };
    let gpu = || -> Result<SelectedBackend> {
        let cuda = Cuda::open(device, stop.clone())?;
        let device = cuda.device().clone();
        let machine = format!("GPU {} ({})", device.index, device.name);
        Ok(SelectedBackend { backend: Box::new(cuda), name: "cuda", machine, device: Some(device), note: None })
    };
    match backend {
        BackendArg::Cpu => cpu(None),
        BackendArg::Cuda => gpu(),
        BackendArg::Auto => match gpu() {
            Err(error @ (Error::NoGpu { .. } | Error::Device { .. })) => cpu(Some(format!("{error}; running on the CPU"))),
            selected => selected,
        },
    }
}

/// Writes what this program can use on this machine to `out`.
pub fn doctor(args: DoctorArgs, environment: Environment, out: &mut dyn Write) -> Result<()> {
    let mut text = format!("kiln      {}\n", env!("CARGO_PKG_VERSION"));
    let mut row = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<9} {}", shown_line(&value));
    };
    let kernels = match cuda::NVCC {
        "" => "none: built without nvcc".into(),
        nvcc => format!("{} (nvcc {nvcc})", cuda::ARCHS.join(" ")),
    };
    row("kernels", kernels);
    row("cpu", format!("{} threads", threads::cores()));
    let stop = Arc::new(AtomicBool::new(false));
    match cuda::devices() {
        Err(error) => {
            row("driver", error.to_string());
            // What else could be done on another command line is no matter here.
            let hint = match &error {
                Error::NoGpu { hint, .. } => Some(shown_text(hint)),
                other => other.hint(),
            };
            row("", hint.unwrap_or_default());
        }
        Ok(devices) => {
            for (i, d) in devices.iter().enumerate() {
                if i == 0 {
                    row("driver", format!("CUDA {}.{}", d.driver.0, d.driver.1));
                }
                let ((major, minor), memory) = (d.capability, gib(d.memory));
                let what = format!("{}, compute {major}.{minor}, {} multiprocessors, {memory}", d.name, d.multiprocessors);
                row(&format!("gpu {}", d.index), what);
                let state = Cuda::open(d.index, stop.clone()).and_then(|mut cuda| {
                    let free = cuda.available()?.unwrap_or(0);
                    Ok(format!("usable, {} free; tried: {}", gib(free), cuda.self_test()?.join(", ")))
                });
                row("", state.unwrap_or_else(|error| error.to_string()));
            }
        }
    }
    let lines =
        model_lines(&args, environment).unwrap_or_else(|error| [error.to_string()].into_iter().chain(error.hint()).collect());
    for (i, line) in lines.into_iter().enumerate() {
        row(if i == 0 { "model" } else { "" }, line);
    }
    row("\nop", "kernels".into());
    for op in OP_NAMES {
        let kernels: Vec<&str> = cuda::kernels_of(op).iter().map(|k| k.symbol()).collect();
        let _ = writeln!(text, "{op:<21} {}", kernels.join(" "));
    }
    print(out, text.as_bytes())
}

/// Which model would be used, and which files of it. They are opened, so that what is wrong with them is found.
fn model_lines(args: &DoctorArgs, environment: Environment) -> Result<Vec<String>> {
    let none = if args.model.is_named(&environment) { "" } else { "; no FLUX.2 model was found" };
    let found = locate(&args.model.request(environment))?;
    let files = match &found {
        Found::BuiltIn(_) => return Ok(vec![format!("{BUILT_IN}, part of this program, draws coloured shapes{none}")]),
        Found::Tiny => return Ok(vec![format!("{TINY}, made by this program, random and untrained{none}")]),
        Found::Files(files) => files,
    };
    let model = OpenModel::open(&found, args.model.variant.map(Variant::from))?;
    // A name that a model gives itself need not tell the variant.
    let mut lines = vec![format!("{}, {}, {}", model.name, model.variant, shown_text(&files.origin))];
    lines.extend(model.files_in_use().iter().map(|(part, files)| format!("{part} {files}")));
    lines.extend(model.warnings.iter().map(|warning| format!("warning: {}", shown_text(warning))));
    Ok(lines)
}
