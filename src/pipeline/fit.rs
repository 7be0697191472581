//! Checks before loading whether a job fits into a backend's memory, and whether it needs low-memory mode to fit.

use super::estimate::{Estimate, EstimateRequest, estimate};
use super::job::{Job, LoadOptions};
use super::open::OpenModel;
use crate::backend::Backend;
use crate::error::{Error, Remedy, Result};
use crate::sequence::{PATCH, Pixels};

impl Estimate {
    /// Total bytes of weights and arena. Files read in place do not count: the system drops their pages when memory is short, and
    /// reads them again.
    fn bytes(&self, in_place: bool, low_memory: bool) -> u64 {
        let weights = match (in_place, low_memory) {
            (false, false) => self.weight_bytes,
            (false, true) => self.low_memory_weight_bytes,
            (true, false) => self.copied_bytes,
            (true, true) => self.low_memory_copied_bytes,
        };
        self.arena_bytes.saturating_add(weights)
    }

    /// Whether low-memory mode is requested, or needed to fit into `have` bytes; `None` if the job does not fit at all.
    fn fit(&self, have: u64, in_place: bool, asked: bool) -> Option<bool> {
        [asked, true].into_iter().find(|&low_memory| self.bytes(in_place, low_memory) <= have)
    }
}

impl OpenModel {
    /// The options with which a job fits into the backend's memory: the given ones, or low-memory mode. Refuses a job that is too
    /// large, and suggests the largest size that fits. `machine` names the device in the error.
    pub fn check_memory(&self, backend: &dyn Backend, machine: &str, options: LoadOptions, job: &Job) -> Result<LoadOptions> {
        let Some(have) = backend.available()? else { return Ok(options) };
        let request = self.estimate_request(options, backend.gemm_formats());
        let planned = estimate(request.clone(), job)?;
        let in_place = backend.reads_files();
        if let Some(low_memory) = planned.fit(have, in_place, options.low_memory) {
            return Ok(LoadOptions { low_memory, ..options });
        }
        // The search for the largest image that fits tries sides of 7/8 to 1/8 of those requested.
        let scaled = |eighths: usize| {
            let side = |pixels: usize| (pixels * eighths / 8 / PATCH * PATCH).max(4 * PATCH);
            Pixels::new(side(job.size.width()), side(job.size.height())).ok()
        };
        let smaller = (1..8).rev().filter_map(scaled).find_map(|size| {
            let bytes = estimate(request.clone(), &Job { size, ..job.clone() }).ok()?.bytes(in_place, true);
            (bytes <= have).then_some(Remedy::SizeThatFits { width: size.width(), height: size.height(), bytes })
        });
        let mut ways: Vec<Remedy> = smaller.into_iter().collect();
        if !options.vae_tiling {
            let tiled = LoadOptions { vae_tiling: true, ..options };
            let bytes = estimate(EstimateRequest { options: tiled, ..request }, job)?.bytes(in_place, true);
            ways.extend((bytes <= have).then_some(Remedy::VaeTiling { bytes }));
        }
        if job.references.len() > 1 {
            ways.push(Remedy::FewerReferences);
        }
        let need = planned.bytes(in_place, true);
        if in_place {
            ways.extend([Remedy::ClosePrograms, Remedy::AllowMemory]);
            return Err(Error::HostMemory { need, have, ways });
        }
        ways.extend([Remedy::CloseGpuPrograms, Remedy::CpuBackend]);
        Err(Error::DeviceMemory { need, have, device: machine.into(), ways })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::Formats;

    #[test]
    fn low_memory_mode_is_used_only_if_needed() {
        // A tenth of the weights has to be copied even if files are read in place.
        let estimate = |weight_bytes, low_memory_weight_bytes, arena_bytes| Estimate {
            copied_bytes: weight_bytes / 10,
            low_memory_copied_bytes: low_memory_weight_bytes / 10,
            text_tokens: 0,
            canvas_tokens: 0,
            reference_tokens: Vec::new(),
            mu: 0.0,
            sigmas: Vec::new(),
            stages: Vec::new(),
            seconds: Vec::new(),
            ops: 0,
            weight_bytes,
            low_memory_weight_bytes,
            adapter_bytes: 0,
            table_bytes: 0,
            arena_bytes,
            formats: Formats::default(),
        };
        // Each case is (weights, weights in low-memory mode, arena), free memory, whether low-memory mode is requested, and the
        // result.
        for (of, have, asked, want) in [
            ((13, 8, 2), 100, false, Some(false)),
            ((13, 8, 2), 15, false, Some(false)),
            ((13, 8, 2), 14, false, Some(true)),
            ((13, 8, 2), 10, false, Some(true)),
            ((13, 8, 2), 9, false, None),
            ((13, 8, 2), 0, false, None),
            ((13, 8, 2), 100, true, Some(true)),
            ((13, 8, 2), 10, true, Some(true)),
            ((13, 8, 2), 9, true, None),
            ((0, 0, 0), 0, false, Some(false)),
            ((13, 8, u64::MAX), u64::MAX - 1, false, None),
        ] {
            assert_eq!(estimate(of.0, of.1, of.2).fit(have, false, asked), want, "{of:?} {have} {asked}");
        }
        // With files that are read in place, only the copied tenth of the weights counts.
        for (of, have, want) in [
            ((130, 80, 2), 100, Some(false)),
            ((130, 80, 2), 15, Some(false)),
            ((130, 80, 2), 14, Some(true)),
            ((130, 80, 2), 10, Some(true)),
            ((130, 80, 2), 9, None),
        ] {
            assert_eq!(estimate(of.0, of.1, of.2).fit(have, true, false), want, "{of:?} {have}");
        }
    }
}
