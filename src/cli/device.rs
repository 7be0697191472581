//! Selects and opens the backend of a request.

use super::args::BackendArg;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::DeviceInfo;
use crate::backend::{Backend, Fp8Accumulate};
use crate::error::{Error, Result};
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
        Ok(SelectedBackend { backend: Box::new(cpu), name: "cpu", machine, device: None, note })
    };
    let gpu = || -> Result<SelectedBackend> {
        let mut cuda = Cuda::open(device, stop.clone())?;
        cuda.set_fp8_accumulate(accumulate);
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
