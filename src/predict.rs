//! Predicts how long the stages of an image take on a GPU, which kiln may never have run on. Every op of the dry run takes the time that a
//! roofline gives, with shares of the peaks that were measured elsewhere or are assumed. docs/kernels.md names all assumptions, and how far
//! the predictions are from measurements. No predicted figure is ever called measured.

mod gpu_spec;
mod time;

pub use gpu_spec::{GPU_SPECS, GpuSpec};
pub use time::Predictor;

use crate::pipeline::{Estimate, OpTime};
use crate::progress::Phase;
use std::rc::Rc;

/// The predicted seconds of an image's stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    stages: Vec<(Phase, f64)>,
    steps: usize,
}

impl Predictor {
    /// The time function of an op, for an estimate.
    pub fn op_time(&self) -> OpTime {
        let predictor = self.clone();
        Rc::new(move |op| predictor.seconds(op))
    }
}

impl Prediction {
    /// The prediction of an estimate that was made with op times. Without op times it has no stages.
    pub fn of(estimate: &Estimate) -> Self {
        Self { stages: estimate.seconds.clone(), steps: estimate.sigmas.len() }
    }

    /// The seconds of a stage. `None` if the image does not have it.
    pub fn stage(&self, phase: Phase) -> Option<f64> {
        self.stages.iter().filter(|(p, _)| *p == phase).map(|(_, seconds)| *seconds).reduce(|a, b| a + b)
    }

    /// The seconds of a denoising step.
    pub fn step(&self) -> Option<f64> {
        Some(self.stage(Phase::Denoise)? / self.steps.max(1) as f64)
    }
}
