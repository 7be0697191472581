//! Whether a job fits into a backend's memory, answered before anything is loaded.

use super::{Job, LoadOptions, OpenModel};
use crate::backend::Backend;
use crate::error::{Error, Result, gib};
use crate::sequence::{PATCH, Pixels};

impl OpenModel {
    /// Refuses a job that is too large for the backend, and says how it could be made to fit. `machine` is whose memory it is.
    pub fn check_memory(&self, backend: &dyn Backend, machine: &str, options: LoadOptions, job: &Job) -> Result<()> {
        let Some(have) = backend.available()? else { return Ok(()) };
        let need = |job: &Job| self.estimate(options, job).map(|e| e.weight_bytes + e.arena_bytes);
        let total = need(job)?;
        if total <= have {
            return Ok(());
        }
        // The largest picture of about the same shape that fits.
        let scaled = |eighths: usize| {
            let side = |pixels: usize| (pixels * eighths / 8 / PATCH * PATCH).max(4 * PATCH);
            Pixels::new(side(job.size.width()), side(job.size.height())).ok()
        };
        let smaller = (1..8).rev().filter_map(scaled).find_map(|size| {
            let bytes = need(&Job { size, ..job.clone() }).ok()?;
            (bytes <= have).then(|| format!("use --width {} --height {} ({})", size.width(), size.height(), gib(bytes)))
        });
        let mut ways: Vec<String> = smaller.into_iter().collect();
        if job.references.len() > 1 {
            ways.push("give fewer --reference".into());
        }
        ways.push("close other programs that use the GPU".into());
        let ways = format!("{}, or use --backend cpu", ways.join(", "));
        Err(Error::DeviceMemory { need: total, have, device: machine.into(), ways })
    }
}
