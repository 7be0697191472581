//! Resolves what a request leaves open and the model decides: steps, guidance, names for display. This is the one place that turns
//! flags into a [`Job`], for `generate`, `bench` and `plan` alike.

use super::adapters::applied;
use super::edit::{Facts, PreparedEdit};
use super::request::ImageRequest;
use kiln::lora::AdapterMode;
use kiln::metadata::{AdapterMetadata, NoiseMetadata};
use kiln::{
    Formats, Guidance, Job, ModelDefaults, Noise, NoiseKind, Precision, PreparedReference, ReferenceInput, Sigmas, Variant,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The properties of a model that settings depend on.
pub struct ModelProfile {
    /// Display name.
    pub name: String,
    pub variant: Variant,
    pub defaults: ModelDefaults,
    pub precision: Precision,
    /// The arithmetic of FP8 and NVFP4 as flags and their values; empty if the model does not use these formats.
    pub quantized_flags: Vec<(&'static str, String)>,
    /// The adapters that it is loaded with, and the mode.
    pub adapters: Vec<AdapterMetadata>,
    pub adapter_mode: AdapterMode,
}

/// How the images of a request are generated.
pub struct Settings {
    /// The job for the engine.
    pub job: Job,
    /// The model's display name.
    pub model: String,
    pub variant: Variant,
    pub precision: Precision,
    pub guidance: Guidance,
    /// Whether classifier-free guidance runs each step twice.
    pub guided: bool,
    /// The negative prompt, if one was given.
    pub negative: Option<String>,
    /// Where the noise comes from.
    pub noise: NoiseMetadata,
    /// The arithmetic of FP8 and NVFP4 as flags and their values.
    pub quantized_flags: Vec<(&'static str, String)>,
    /// The adapters of the images, and how they are applied.
    pub adapters: Vec<AdapterMetadata>,
    pub adapter_mode: AdapterMode,
    /// Whether the VAE works in tiles.
    pub vae_tiling: bool,
    /// The edit, if there is one.
    pub edit: Option<Facts>,
    /// The files that are read, other than the model's.
    pub inputs: Vec<PathBuf>,
    /// A description of each reference image: its file, its sizes and its tokens.
    pub references: Vec<String>,
    /// The SHA-256 of each reference image's file.
    pub reference_digests: Vec<String>,
}

impl Settings {
    /// Combines a request with the defaults of a model.
    pub fn resolve(request: ImageRequest, model: &ModelProfile) -> Self {
        let inputs = request.files().map(Path::to_owned).collect();
        let facts = request.edit.as_ref().map(PreparedEdit::facts);
        let (start, bare) = request.edit.map_or((None, None), |edit| (Some(edit.edit.start), edit.edit.reference));
        let options = request.options;
        let guidance = model.defaults.guide(model.variant, options.guidance);
        let references = request.references.iter().map(describe_reference).collect();
        let reference_digests = request.references.iter().map(|reference| reference.sha256.clone()).collect();
        let noise = noise_metadata(&request.noise, request.noise_sha256);
        let adapters = request.adapters.as_deref().map_or_else(|| model.adapters.clone(), applied);
        let input =
            |reference: &PreparedReference| ReferenceInput { grid: reference.grid(), pixels: Arc::new(reference.values()) };
        let job = Job {
            prompt: request.prompt,
            size: request.size,
            steps: options.sigmas.as_ref().map(Sigmas::steps).or(options.steps).unwrap_or(model.defaults.steps(model.variant)),
            sigmas: options.sigmas,
            padding: options.padding.map_or(model.variant.spec().padding, Into::into),
            negative: request.negative.clone().unwrap_or_default(),
            start,
            references: bare.into_iter().chain(request.references.iter().map(input)).collect(),
            guidance: guidance.scale,
            seeds: request.seeds,
            noise: request.noise,
            record: request.record,
            adapters: request.adapters,
        };
        Self {
            job,
            model: model.name.clone(),
            variant: model.variant,
            precision: model.precision,
            guidance,
            guided: model.variant.uses_cfg(guidance.scale),
            negative: request.negative,
            noise,
            quantized_flags: model.quantized_flags.clone(),
            adapters,
            adapter_mode: model.adapter_mode,
            vae_tiling: options.vae_tiling,
            edit: facts,
            inputs,
            references,
            reference_digests,
        }
    }

    /// The number of prompts to encode; classifier-free guidance adds the negative prompt.
    pub fn prompts(&self) -> usize {
        1 + usize::from(self.guided)
    }

    /// The format that weights were quantized to when they were loaded, if they were.
    pub fn quantize(&self) -> Option<&str> {
        self.quantized_flags.iter().find(|(flag, _)| *flag == QUANTIZE).map(|(_, format)| format.as_str())
    }

    /// Width and height of the finished images.
    pub fn size(&self) -> (usize, usize) {
        self.edit.as_ref().map_or((self.job.size.width(), self.job.size.height()), Facts::size)
    }
}

/// Describes a reference image: its file, its sizes before and after resizing and cropping, and its tokens.
fn describe_reference(reference: &PreparedReference) -> String {
    let mut sizes = vec![reference.original];
    sizes.extend(reference.resized);
    sizes.push((reference.width, reference.height));
    sizes.dedup();
    let sizes: Vec<String> = sizes.iter().map(|(w, h)| format!("{w}x{h}")).collect();
    format!("{}, {}, {} tokens", reference.origin.display(), sizes.join(" -> "), reference.grid().tokens())
}

/// The flag that quantizes weights when they are loaded.
const QUANTIZE: &str = "quantize";

/// The flags that reproduce a model's FP8 and NVFP4 arithmetic, and their values; empty if it uses neither.
pub fn quantized_flags(formats: &Formats) -> Vec<(&'static str, String)> {
    let mut list = Vec::new();
    list.extend(formats.quantized_at_load().map(|format| (QUANTIZE, format.label().into())));
    if formats.multiplies_fp8() {
        // Blocks differ only with `auto`.
        let attention = match formats.fp8_attention() {
            (_, true) => "fp8",
            (true, false) => "auto",
            (false, false) => "bf16",
        };
        list.push(("attention", attention.into()));
    }
    let accumulate = formats.accumulate.filter(|_| formats.accumulates_fp8());
    list.extend(accumulate.map(|accumulate| ("fp8-accumulate", accumulate.name().into())));
    list.extend(formats.nvfp4_math().map(|math| ("nvfp4-math", math.name().into())));
    list
}

/// What reproduces this noise.
fn noise_metadata(noise: &Noise, sha256: Option<String>) -> NoiseMetadata {
    match noise {
        Noise::Given(_) => NoiseMetadata { kind: "file".into(), sha256, ..NoiseMetadata::default() },
        Noise::Drawn(kind) => {
            let (sms, threads) = match kind {
                NoiseKind::TorchCuda { sms, threads } => (Some(*sms), Some(*threads)),
                _ => (None, None),
            };
            NoiseMetadata { kind: kind.to_string(), sms, threads, sha256: None }
        }
    }
}
