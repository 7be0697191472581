//! Selects and opens the backend of a request.

use super::args::BackendArg;
use crate::terminal::Terminal;
use kiln::device::{ARCHS, Backend, Cpu, Cuda, DeviceInfo, Fp8Accumulate, NVCC};
use kiln::error::{Error, Result};
use kiln::predict::{GpuSpec, Predictor};
use kiln::progress::Progress;
use kiln::selftest::{self, Gate, Records, Verdict};
use kiln::text::gib;
use kiln::trace;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// An open backend, and its description for the user.
pub struct SelectedBackend {
    pub backend: Box<dyn Backend>,
    /// The name of the backend, as the command line spells it.
    pub name: &'static str,
    /// The machine, for display.
    pub machine: String,
    /// The GPU, if the backend is one.
    pub device: Option<DeviceInfo>,
    /// The predictor of times on it, or why there is none.
    pub predictor: Result<Predictor, String>,
    /// Why `auto` did not select a GPU.
    pub note: Option<String>,
    /// The state of the gate for native kernels.
    pub gate: Gate,
}

impl SelectedBackend {
    /// Prints notes and warnings about the selection.
    pub fn announce(&self, terminal: &Terminal) {
        self.note.iter().for_each(|note| terminal.say(&format!("note: {note}")));
        match gate_note(&self.gate) {
            Some(Ok(note)) => terminal.say(&format!("note: {note}")),
            Some(Err(warning)) => terminal.warn(&warning),
            None => {}
        }
    }
}

/// The message about the gate for native kernels: they have just passed, or why kiln does not use them.
fn gate_note(gate: &Gate) -> Option<Result<String, String>> {
    let portable = |why: &str| Err(format!("the portable kernels are used, {why}; see `kiln selftest`"));
    Some(match gate {
        Gate::Open | Gate::Recorded(Verdict::Passed) => return None,
        Gate::Ran(Verdict::Passed, seconds) => {
            Ok(format!("this GPU passed the self-test of its own kernels in {seconds:.1} s; kiln remembers this"))
        }
        Gate::Recorded(Verdict::Begun) | Gate::Ran(Verdict::Begun, _) => {
            portable("because a self-test of this GPU's own kernels has begun and not ended")
        }
        Gate::Recorded(Verdict::Failed(what)) | Gate::Ran(Verdict::Failed(what), _) => {
            portable(&format!("because this GPU's own kernels failed the self-test ({what})"))
        }
    })
}

/// Opens the requested backend. A GPU sums FP8 products as `accumulate` says. It uses kernels that need a self-test if one is on
/// record, or passes now.
pub fn select_backend(
    backend: BackendArg,
    device: usize,
    accumulate: Fp8Accumulate,
    records: &Records,
    stop: &Arc<AtomicBool>,
) -> Result<SelectedBackend> {
    let cpu = |note| -> Result<SelectedBackend> {
        let cpu = Cpu::shared(stop.clone());
        let machine = format!("{} threads", cpu.threads());
        let predictor = Err("the CPU has none".into());
        Ok(SelectedBackend { backend: Box::new(cpu), name: "cpu", machine, device: None, predictor, note, gate: Gate::Open })
    };
    let gpu = || -> Result<SelectedBackend> {
        let _span = trace::span("open the GPU");
        let (mut cuda, gate) = selftest::open(device, stop.clone(), records)?;
        cuda.set_fp8_accumulate(accumulate);
        let (device, predictor) = (cuda.device().clone(), predictor(&cuda));
        let machine = format!("GPU {} ({})", device.index, device.name);
        let (backend, device) = (Box::new(cuda), Some(device));
        Ok(SelectedBackend { backend, name: "cuda", machine, device, predictor, note: None, gate })
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

/// Describes a GPU, its driver and this program's kernels in rows of a name and a value, for bug reports.
pub fn describe_gpu(device: &DeviceInfo, release: Option<&str>, row: &mut dyn FnMut(&str, &str)) {
    let DeviceInfo { name, capability: (major, minor), multiprocessors, shared, clock, memory, driver, .. } = device;
    row("card", name);
    row("", &format!("compute capability {major}.{minor}, {multiprocessors} SMs, {:.3} GHz at most", f64::from(*clock) / 1e6));
    row("", &format!("{} of memory, {} KiB of shared memory", gib(*memory), shared >> 10));
    row("driver", &format!("{}, CUDA {}.{}", release.unwrap_or("release unknown"), driver.0, driver.1));
    row("built for", &format!("{} (nvcc {NVCC})", ARCHS.join(" ")));
    row("clock, power", "not reported by the driver; while it runs, use nvidia-smi --query-gpu=clocks.sm,power.draw,power.limit");
}

/// Predicts times on a GPU, from its row in the table of cards or from the driver's figures; or says why nothing does.
fn predictor(cuda: &Cuda) -> Result<Predictor, String> {
    let device = cuda.device();
    let from_driver = || GpuSpec::of_device(device, cuda.memory_bandwidth().ok()?);
    let Some(gpu) = GpuSpec::named(&device.name).cloned().or_else(from_driver) else {
        return Err("the driver does not report the memory bandwidth".into());
    };
    let (major, minor) = device.capability;
    let unknown = || format!("the speed of the portable kernels on compute capability {major}.{minor} is unknown");
    Predictor::new(&gpu, cuda.arch()).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_is_one_line_that_says_what_to_do() {
        assert_eq!(gate_note(&Gate::Open), None);
        assert_eq!(gate_note(&Gate::Recorded(Verdict::Passed)), None);
        let passed = gate_note(&Gate::Ran(Verdict::Passed, 0.44)).unwrap().unwrap();
        assert!(passed.contains("in 0.4 s"), "{passed}");
        let failed = Verdict::Failed("mma nvf4: lane 3".into());
        for gate in [Gate::Ran(failed.clone(), 0.4), Gate::Recorded(failed)] {
            let line = gate_note(&gate).unwrap().unwrap_err();
            assert!(
                line.contains("(mma nvf4: lane 3)") && line.ends_with("see `kiln selftest`") && !line.contains('\n'),
                "{line}"
            );
        }
        assert!(gate_note(&Gate::Recorded(Verdict::Begun)).unwrap().unwrap_err().contains("has begun and not ended"));
    }
}
