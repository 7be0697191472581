//! `kiln doctor`: lists what kiln can use on this machine, and checks a model that flags name.

mod checks;

use super::args::{ModelArgs, gpu};
use super::formats::format_lines;
use super::hint::{describe, hint, message};
use super::stdout::print;
use super::support::{speed_class, support};
use super::{Process, Subcommand};
use crate::terminal::Verbosity;
use checks::{Checks, Device, check};
use clap::Args;
use kiln::device::{self as cuda, Backend, Cpu, Cuda, Fp8Accumulate, GemmFormats, OpKind, fp8_accumulate};
use kiln::error::{Error, Result};
use kiln::locate::{BUILT_IN, Environment, Found, TINY, locate};
use kiln::predict::GpuSpec;
use kiln::selftest::{Key, Line, Outcome, Records, Verdict, run_launches};
use kiln::text::{gib, shown_line, shown_text};
use kiln::{Formats, LoadOptions, OpenModel, Variant, threads};
use std::fmt::Write as _;

/// Print the GPU, driver and model that kiln uses, and what runs fast
///
/// With --model, or a flag that names a part, kiln also checks the model and reads its files once. It compares the names, dtypes
/// and shapes of all tensors with known files. It checks that every value is finite, and that no part of a matrix is all zeros,
/// as in an unfinished download. If the text encoder is Qwen3-4B, its results are compared with published values.
///
/// If a check fails, the exit code is 1, and kiln prints a block to paste into an issue. An unknown file is no failure.
#[derive(Args, Debug)]
#[command(override_usage = "kiln doctor [OPTIONS]")]
pub struct DoctorArgs {
    /// Which model to look for
    #[command(flatten)]
    pub model: ModelArgs,

    /// Report for a GPU that is not installed
    ///
    /// The names are RTX 3090, RTX 4090, RTX 5090, RTX PRO 6000 and H200. With this option kiln does not check the model.
    #[arg(long, value_name = "NAME", value_parser = gpu)]
    pub gpu: Option<GpuSpec>,

    /// Also hash the model's files, and look up their SHA-256
    ///
    /// For a model that a flag names, kiln prints whether the SHA-256 of each file was published.
    #[arg(long, conflicts_with = "gpu")]
    pub full: bool,

    /// Also list the kernels of each op
    #[arg(short, long)]
    pub verbose: bool,
}

impl Subcommand for DoctorArgs {
    /// Writes what this program can use on this machine to `out`. If a model is named by flags it is checked, and it is an error if it
    /// cannot be opened or fails a check.
    fn run(self: Box<Self>, Process { environment, signals, out }: Process<'_>) -> Result<()> {
        let (terminal, stop) = (&signals.terminal(Verbosity::Normal), &signals.stop);
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
        let records = Records::below(environment.caches().as_deref());
        // The first usable GPU, or the one that --gpu names: its name, its GEMMs, and how these accumulate FP8 products.
        let mut device: Option<(String, GemmFormats, Option<Fp8Accumulate>)> = None;
        let mut gpu: Option<Device> = None;
        let accumulate = |capability| Some(fp8_accumulate(capability, Fp8Accumulate::Auto));
        let how = |formats, capability, arch| {
            support(formats, capability, arch).map(|(what, how)| format!("{what}: {how}")).into_iter()
        };
        match (&self.gpu, cuda::devices()) {
            (Some(gpu), _) => {
                let GpuSpec { name, capability: (major, minor), multiprocessors, memory, .. } = gpu;
                let what = format!("{name}, compute {major}.{minor}, {multiprocessors} multiprocessors, {}", gib(*memory));
                row("card", format!("{what}; asked for, and not looked for on this machine"));
                if *major == 12 {
                    row(
                        "",
                        "self-test: once it has passed on the GPU, kiln uses the GPU's own kernels, which the lines below describe"
                            .into(),
                    );
                }
                how(gpu.gemm_formats(), gpu.capability, gpu.arch()).for_each(|line| row("", line));
                device = Some((gpu.name.to_string(), gpu.gemm_formats(), accumulate(gpu.capability)));
            }
            (None, Err(error)) => {
                row("driver", error.to_string());
                // The full hint would name `--backend`, which `kiln doctor` does not have.
                let advice = match &error {
                    Error::NoGpu { hint, .. } => Some(shown_text(&describe(hint))),
                    other => hint(other),
                };
                row("", advice.unwrap_or_default());
            }
            (None, Ok(devices)) => {
                for (i, d) in devices.iter().enumerate() {
                    if i == 0 {
                        row("driver", format!("CUDA {}.{}", d.driver.0, d.driver.1));
                    }
                    let ((major, minor), memory) = (d.capability, gib(d.memory));
                    let what = format!("{}, compute {major}.{minor}, {} multiprocessors, {memory}", d.name, d.multiprocessors);
                    row(&format!("gpu {}", d.index), what);
                    let state = Cuda::open(d.index, stop.clone()).and_then(|mut cuda| {
                        let free = cuda.available()?.unwrap_or(0);
                        let tried = tried(&run_launches(&mut cuda)?)?;
                        let record = records.find(&Key::of(&cuda));
                        cuda.enable_gated(record == Some(Verdict::Passed));
                        let formats = cuda.gemm_formats();
                        let name = format!("GPU {}", d.index);
                        device.get_or_insert_with(|| (name.clone(), formats, accumulate(d.capability)));
                        let usable = format!("usable, {} free; tried: {tried}", gib(free));
                        let recorded = recorded(record.as_ref(), cuda.has_gated_kernels());
                        let how = how(formats, d.capability, cuda.arch());
                        gpu.get_or_insert_with(|| (name, Box::new(cuda)));
                        Ok([usable, recorded].into_iter().chain(how).collect::<Vec<_>>())
                    });
                    state.unwrap_or_else(|error| vec![error.to_string()]).into_iter().for_each(|line| row("", line));
                }
            }
        }
        // Only tensor cores have a choice how to accumulate.
        let cpu = || Cpu::shared(stop.clone());
        let on_gpu = device.is_some();
        let (device, gemms, accumulate) = device.unwrap_or_else(|| ("the CPU".into(), cpu().gemm_formats(), None));
        // With --gpu the model's values are not read.
        let is_checked = self.model.names_files() && self.gpu.is_none();
        let (mut checks, mut failure) = (Checks::default(), None);
        let (lines, formats) = match model_lines(&self, environment, gemms) {
            Ok((lines, formats, model)) => {
                match model.filter(|_| is_checked) {
                    Some(model) => {
                        let device = gpu.unwrap_or_else(|| ("the CPU".into(), Box::new(cpu())));
                        checks = check(&model, device, self.full, stop, terminal)?;
                    }
                    None if formats.is_some() => checks.rows.push(("values", UNCHECKED.into())),
                    None => {}
                }
                (lines, formats.unwrap_or_default())
            }
            Err(error) => {
                let lines = [message(&error)].into_iter().chain(hint(&error)).collect();
                failure = is_checked.then_some(error);
                (lines, Formats::default())
            }
        };
        let mut formats = format_lines(&Formats { accumulate, ..formats });
        match &mut *formats {
            [] => {}
            [only] => *only += &format!(" on {device}"),
            _ => formats.insert(0, format!("on {device}:")),
        }
        for (name, lines) in [("model", lines), ("formats", formats)] {
            for (i, line) in lines.into_iter().enumerate() {
                row(if i == 0 { name } else { "" }, line);
            }
        }
        row("speed", speed_class(on_gpu.then_some(gemms)).into());
        checks.rows.iter().for_each(|(name, line)| row(name, line.clone()));
        if self.verbose {
            let _ = writeln!(text, "\n{:<21} kernels", "op");
            for &op in OpKind::ALL {
                let _ = writeln!(text, "{:<21} {}", op.name(), kernel_symbols(op));
            }
        }
        if let Some((block, error)) = checks.failure() {
            let _ = write!(text, "\n{block}");
            failure = Some(error);
        }
        print(out, text.as_bytes())?;
        failure.map_or(Ok(()), Err)
    }
}

/// The text for a model that was found and not named.
const UNCHECKED: &str = "not checked; `kiln doctor --model PATH` reads all of them, and says whether the files are known";

/// The names of the checks that passed, or the first fault.
fn tried(lines: &[Line]) -> Result<String> {
    let mut names = Vec::new();
    for Line { name, outcome } in lines {
        match outcome {
            Outcome::Passed(_) => names.push(name.as_str()),
            Outcome::Failed(what) => return Err(Error::Device { call: "self-test", status: format!("{name}: {what}") }),
            Outcome::NotHere => {}
        }
    }
    Ok(names.join(", "))
}

/// Describes the recorded self-test, and its effect on a GPU whose own kernels need one.
fn recorded(verdict: Option<&Verdict>, needed: bool) -> String {
    let portable = if needed { ": the portable kernels are used in place of this GPU's own" } else { "" };
    match verdict {
        Some(Verdict::Passed) => "self-test: passed, on record".into(),
        Some(Verdict::Begun) => format!("self-test: begun and not ended, on record{portable}; `kiln selftest` repeats it"),
        Some(Verdict::Failed(what)) => {
            format!("self-test: FAILED, on record ({what}){portable}; `kiln selftest` shows all checks")
        }
        None if needed => {
            "self-test: not on record; it runs before this GPU's own kernels are used for the first time, or by `kiln selftest`"
                .into()
        }
        None => "self-test: not on record; `kiln selftest` runs it".into(),
    }
}

/// Every kernel that an op may launch.
fn kernel_symbols(op: OpKind) -> String {
    cuda::kernels_of(op).iter().map(|kernel| kernel.symbol()).collect::<Vec<_>>().join(" ")
}

/// Lines on the model that `kiln generate` would use, and its files. They are opened, so that faults in them are reported. Also
/// returns the formats of its layers on a device with these GEMMs, and the model, unless it is one of the program's own.
fn model_lines(
    args: &DoctorArgs,
    environment: Environment,
    gemms: GemmFormats,
) -> Result<(Vec<String>, Option<Formats>, Option<OpenModel>)> {
    let none = if args.model.is_named(&environment) { "" } else { "; no FLUX.2 model was found" };
    let found = locate(&args.model.request(environment))?;
    let own = |what: String| Ok((vec![what + none], None, None));
    let files = match &found {
        Found::BuiltIn(_) => return own(format!("{BUILT_IN}, part of this program, draws colored shapes")),
        Found::Tiny => return own(format!("{TINY}, made by this program, random and untrained")),
        Found::Files(files) => files,
    };
    let model = OpenModel::open(&found, args.model.variant.map(Variant::from))?;
    // The display name of a model need not contain its variant.
    let mut lines = vec![format!("{}, {}, {}", model.name, model.variant, shown_text(&files.origin))];
    lines.extend(model.files_in_use().iter().map(|(part, files)| format!("{part} {files}")));
    lines.extend(model.warnings.iter().map(|warning| format!("warning: {}", shown_text(warning))));
    let options = LoadOptions { references: true, ..LoadOptions::DEFAULT };
    Ok((lines, Some(model.formats(options, gemms)?), Some(model)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_is_told_with_what_follows_from_it() {
        let failed = Verdict::Failed("mma nvf4: lane 3".into());
        assert_eq!(recorded(Some(&Verdict::Passed), true), "self-test: passed, on record");
        let line = recorded(Some(&failed), true);
        assert!(line.contains("(mma nvf4: lane 3): the portable kernels are used"), "{line}");
        assert!(!recorded(Some(&failed), false).contains("portable"));
        assert!(recorded(None, true).contains("before this GPU's own kernels are used for the first time"));
        assert!(recorded(Some(&Verdict::Begun), true).contains("begun and not ended"));
    }

    #[test]
    fn what_was_tried_is_what_passed() {
        let line = |name: &str, outcome| Line { name: name.into(), outcome };
        let lines = [line("copy", Outcome::Passed(String::new())), line("cluster", Outcome::NotHere)];
        assert_eq!(tried(&lines).unwrap(), "copy");
        let failed = [line("copy", Outcome::Failed("[0, 1] is 3".into()))];
        assert!(tried(&failed).unwrap_err().to_string().contains("self-test: copy: [0, 1] is 3"));
    }
}
