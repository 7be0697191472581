//! The defaults of jobs and of load options.

use super::{Job, LoadOptions, Noise};
use crate::config::{Conventions, Variant};
use crate::error::Result;
use crate::noise::NoiseKind;
use crate::sequence::Pixels;
use crate::tensor::Precision;

impl Job {
    /// One image of a prompt, with the default size, steps and guidance scale of a model and its variant, and with the noise that
    /// PyTorch draws on an H100 or H200.
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
    /// bf16, without the VAE's encoder, and with all weights in memory at once.
    fn default() -> Self {
        Self { precision: Precision::Bf16, references: false, low_memory: false }
    }
}
