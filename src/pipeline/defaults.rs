//! What a job and the way a model is loaded are where nothing else is asked for.

use super::{Job, LoadOptions, Noise};
use crate::config::{Conventions, Variant};
use crate::error::Result;
use crate::noise::NoiseKind;
use crate::sequence::Pixels;
use crate::tensor::Precision;

impl Job {
    /// One image of a prompt, with the size, the steps and the guidance scale that a model's conventions name for its variant, from
    /// noise as a CUDA generator of PyTorch draws it.
    pub fn new(prompt: &str, seed: u64, conventions: &Conventions, variant: Variant) -> Result<Self> {
        Ok(Self {
            prompt: prompt.into(),
            size: Pixels::new(conventions.width, conventions.height)?,
            steps: conventions.steps(variant),
            negative: String::new(),
            references: Vec::new(),
            guidance: conventions.guide(variant, None).scale,
            seeds: vec![seed],
            noise: Noise::Drawn(NoiseKind::HOPPER),
            record: false,
        })
    }
}

impl Default for LoadOptions {
    /// bf16, without what only reference images need, all weights in memory at once.
    fn default() -> Self {
        Self { precision: Precision::Bf16, references: false, low_memory: false }
    }
}
