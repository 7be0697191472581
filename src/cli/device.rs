//! Selects and opens the backend of a request.

use super::args::BackendArg;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::DeviceInfo;
use crate::backend::{Backend, Fp8Accumulate};
use crate::error::{Error, Result};
use crate::predict::{Card, KernelFamily, Predictor};
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
    /// What predicts times on it, or why nothing does.
    pub predictor: Result<Predictor, String>,
    /// Why `auto` did not select a GPU.
    pub note: Option<String>,
}

/// Opens the backend that was asked for. A GPU adds up products of FP8 as `accumulate` says.
pub fn select_backend(
    backend: BackendArg,
    device: usize,
    accumulate: Fp8Accumulate,
    stop: &Arc<AtomicBool>,
) -> Result<SelectedBackend> {
    let cpu = |note| -> Result<SelectedBackend> {
        let cpu = Cpu::shared(stop.clone());
        let machine = format!("{} threads", cpu.threads());
        let predictor = Err("the CPU has none".into());
        Ok(SelectedBackend { backend: Box::new(cpu), name: "cpu", machine, device: None, predictor, note })
    };
    let gpu = || -> Result<SelectedBackend> {
        let mut cuda = Cuda::open(device, stop.clone())?;
        cuda.set_fp8_accumulate(accumulate);
        let (device, predictor) = (cuda.device().clone(), predictor(&cuda));
        let machine = format!("GPU {} ({})", device.index, device.name);
        Ok(SelectedBackend { backend: Box::new(cuda), name: "cuda", machine, device: Some(device), predictor, note: None })
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

/// What predicts times on a GPU, from its row in the table of cards or one made from what the driver tells; or why nothing does.
fn predictor(cuda: &Cuda) -> Result<Predictor, String> {
    let device = cuda.device();
    let from_driver = || Card::of_device(device, cuda.memory_bandwidth().ok()?);
    let Some(card) = Card::named(&device.name).cloned().or_else(from_driver) else {
        return Err("the driver does not tell the bandwidth of its memory".into());
    };
    let (major, minor) = device.capability;
    let unknown = || format!("it is not known how fast the portable kernels can be on compute capability {major}.{minor}");
    Predictor::new(&card, KernelFamily::of(cuda)).ok_or_else(unknown)
}
