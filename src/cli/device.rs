//! Where a request is computed: choosing the backend.

use super::args::BackendArg;
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::DeviceInfo;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A backend and what to say about it.
pub struct Chosen {
    pub backend: Box<dyn Backend>,
    /// As the command line spells it.
    pub name: &'static str,
    /// The machine, for people.
    pub machine: String,
    /// The GPU, if it is one.
    pub device: Option<DeviceInfo>,
    /// Why it is not the one that `auto` would rather have.
    pub note: Option<String>,
}

/// Takes the backend that was asked for.
pub fn choose(backend: BackendArg, device: usize, stop: &Arc<AtomicBool>) -> Result<Chosen> {
    let cpu = |note| -> Result<Chosen> {
        let cpu = Cpu::shared(stop.clone());
        let machine = format!("{} threads", cpu.threads());
        Ok(Chosen { backend: Box::new(cpu), name: "cpu", machine, device: None, note })
    };
    let gpu = || -> Result<Chosen> {
        let cuda = Cuda::open(device, stop.clone())?;
        let device = cuda.device().clone();
        let machine = format!("GPU {} ({})", device.index, device.name);
        Ok(Chosen { backend: Box::new(cuda), name: "cuda", machine, device: Some(device), note: None })
    };
    match backend {
        BackendArg::Cpu => cpu(None),
        BackendArg::Cuda => gpu(),
        BackendArg::Auto => match gpu() {
            Err(error @ (Error::NoGpu { .. } | Error::Device { .. })) => cpu(Some(format!("{error}; running on the CPU"))),
            chosen => chosen,
        },
    }
}
