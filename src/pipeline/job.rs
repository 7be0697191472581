//! The inputs and results of the engine.

use crate::adapter::{AdapterMode, Adapters};
use crate::config::{ModelDefaults, Variant};
use crate::dump::Record;
use crate::edit::{Paste, Strength};
use crate::error::Result;
use crate::image::Image;
use crate::model::{AttentionFormat, Nvfp4Math};
use crate::noise::NoiseKind;
use crate::sampler::{Schedule, Sigmas};
use crate::sequence::{Grid, Pixels};
use crate::tensor::{DType, Precision};
use crate::tokenizer::Padding;
use std::sync::Arc;

/// Images to generate with one prompt.
#[derive(Clone, Debug)]
pub struct Job {
    /// The prompt.
    pub prompt: String,
    /// Size of the images.
    pub size: Pixels,
    /// Denoising steps.
    pub steps: usize,
    /// The noise level of each step. Replaces the even schedule.
    pub sigmas: Option<Sigmas>,
    /// The negative prompt, which only classifier-free guidance uses.
    pub negative: String,
    /// Where denoising starts, if not from pure noise.
    pub start: Option<Start>,
    /// Reference images, in the order in which the prompt numbers them.
    pub references: Vec<ReferenceInput>,
    /// Where the prompt is padded, and with what.
    pub padding: Padding,
    /// Guidance scale. Base models use classifier-free guidance if it is above 1, \[dev\] has it as an input; other models ignore it.
    pub guidance: f32,
    /// One image is generated for each seed.
    pub seeds: Vec<u64>,
    /// Where the initial noise comes from.
    pub noise: Noise,
    /// Whether images come with a `Record`.
    pub record: bool,
    /// Adapters of this job. They replace the adapters that the model was loaded with.
    pub adapters: Option<Arc<Adapters>>,
}

impl Job {
    /// One image of a prompt, with the model's and variant's default size, steps and guidance scale, and with the noise that
    /// PyTorch draws on an H100 or H200.
    pub fn new(prompt: &str, seed: u64, defaults: &ModelDefaults, variant: Variant) -> Result<Self> {
        Ok(Self {
            prompt: prompt.into(),
            size: Pixels::new(defaults.width, defaults.height)?,
            steps: defaults.steps(variant),
            sigmas: None,
            negative: String::new(),
            start: None,
            references: Vec::new(),
            padding: variant.spec().padding,
            guidance: defaults.guide(variant, None).scale,
            seeds: vec![seed],
            noise: Noise::Drawn(NoiseKind::HOPPER),
            record: false,
            adapters: None,
        })
    }
}

impl Job {
    /// The sigmas of the steps that run.
    pub(crate) fn schedule(&self) -> Schedule {
        let tokens = self.size.grid().tokens();
        let whole = match &self.sigmas {
            Some(sigmas) => Schedule::of(sigmas, tokens),
            None => Schedule::new(self.steps, tokens),
        };
        match &self.start {
            Some(start) => whole.begin(start.strength.share()),
            None => whole,
        }
    }

    /// The noise level (sigma) before each step that runs.
    pub fn noise_levels(&self) -> Vec<f32> {
        let schedule = self.schedule();
        (0..schedule.steps()).map(|step| schedule.sigma(step)).collect()
    }
}

/// An init image, and what of it is repainted. [`Edit`](crate::edit::Edit) makes it from files and flags.
#[derive(Clone, Debug)]
pub struct Start {
    /// The init image on the canvas.
    pub init: ReferenceInput,
    /// The share of the schedule that runs.
    pub strength: Strength,
    /// For each token of the canvas whether it keeps the init image. Without it every token is repainted.
    pub keep: Option<Vec<bool>>,
    /// Whether the init image is also the first reference.
    pub is_reference: bool,
    /// What the image is laid over once it is decoded.
    pub paste: Option<Arc<Paste>>,
}

impl Start {
    /// Whether denoising needs the init image. Pure noise without anything to keep has nothing of it.
    pub fn uses_init(&self) -> bool {
        self.strength < Strength::WHOLE || self.keep.is_some()
    }
}

/// Where the initial noise comes from.
#[derive(Clone, Debug)]
pub enum Noise {
    /// Drawn from the seed.
    Drawn(NoiseKind),
    /// Given as one row of 128 values per token.
    Given(Vec<f32>),
}

impl Noise {
    /// The seed to report for an image, or `None` if the noise was given and so does not depend on the seed.
    pub fn seed(&self, seed: u64) -> Option<u64> {
        matches!(self, Self::Drawn(_)).then_some(seed)
    }
}

/// A reference image as an input of the VAE.
#[derive(Clone, Debug)]
pub struct ReferenceInput {
    /// The size of the image in tokens.
    pub grid: Grid,
    /// The pixels within -1..1, row by row, with three channels each. Copies of a job share them.
    pub pixels: Arc<Vec<f32>>,
}

/// How a model is loaded.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The precision of activations and weights.
    pub precision: Precision,
    /// Whether to load the VAE's encoder, which reference images and init images need.
    pub references: bool,
    /// Whether the transformer replaces the text encoder in memory once a prompt is encoded.
    pub low_memory: bool,
    /// The format of queries and keys in the transformer's attention.
    pub attention: AttentionFormat,
    /// How the transformer's NVFP4 weights are multiplied.
    pub nvfp4_math: Nvfp4Math,
    /// Whether the VAE decodes and encodes images with a side longer than a tile in tiles.
    pub vae_tiling: bool,
    /// The format that plain weights of transformer blocks and of the text encoder are quantized to, if any.
    pub quantize: Option<DType>,
    /// How adapters are applied.
    pub adapters: AdapterMode,
}

impl LoadOptions {
    /// bf16, without the VAE's encoder and without tiles. All weights are in memory at once and unmodified. FP8 attention and
    /// NVFP4 inputs are used where the model and the backend allow them.
    pub const DEFAULT: Self = Self {
        precision: Precision::Bf16,
        references: false,
        low_memory: false,
        attention: AttentionFormat::Auto,
        nvfp4_math: Nvfp4Math::Auto,
        vae_tiling: false,
        quantize: None,
        adapters: AdapterMode::Auto,
    };
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A finished image.
#[derive(Debug)]
pub struct GeneratedImage {
    /// The seed of the image.
    pub seed: u64,
    /// The pixels of the image.
    pub image: Image,
    /// Intermediate values, if the job asked for them.
    pub record: Option<Record>,
    /// How many activations were clamped to the largest FP8 value. Work that the images of a job share, such as cached
    /// references, counts with the first image.
    pub saturated: u64,
}
