//! Shared by the integration tests: the tiny model, the recorded reference outputs, error measures, and runs of the program.

pub mod adapter_files;
pub mod alone;
pub mod cost;
pub mod dev;
pub mod editing;
pub mod english;
pub mod fnv;
pub mod goldens;
pub mod header;
#[cfg(unix)]
pub mod http;
pub mod lora;
pub mod merging;
#[cfg(unix)]
pub mod mistake;
pub mod modes;
pub mod moments;
pub mod ops;
pub mod order;
pub mod photo_like;
pub mod quantized;
pub mod random;
pub mod sandbox;
pub mod scratch;
pub mod sha256;
pub mod stand_in;
#[cfg(unix)]
pub mod terminal;
pub mod tiling;
pub mod wrapped;

use kiln::internals::backend::Backend;
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::PerComponent;
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::names::Layout;
use kiln::internals::noise::NoiseKind;
use kiln::internals::pipeline::{Engine, GeneratedImage, Job, LoadOptions, Noise, OpenModel};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{DType, Precision};
use kiln::internals::tiny::{self, TinyModel};
use kiln::internals::tokenizer::Tokenizer;
use kiln::locate::Found;
use kiln::progress::Silent;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A case of `tests/fixtures/goldens.json`.
#[derive(Debug, serde::Deserialize)]
pub struct Case {
    pub name: String,
    pub prompt: String,
    pub width: usize,
    pub height: usize,
    pub steps: usize,
    pub guidance: f32,
    pub seed: u64,
    pub distilled: bool,
    /// The error of the reference in bf16 against itself in f32.
    pub bf16_relative_l2: Errors,
    /// The bf16 error of the reference with exact timesteps. The reference rounds timesteps to bf16.
    pub bf16_exact_time_relative_l2: Errors,
}

/// Relative errors of the stages.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Errors {
    pub prompt_embeds: f64,
    pub velocity: f64,
    pub latents: f64,
    pub image: f64,
}

impl Case {
    pub fn variant(&self) -> Variant {
        if self.distilled { Variant::Distilled } else { Variant::Base }
    }

    pub fn job(&self) -> Job {
        Job {
            prompt: self.prompt.clone(),
            size: Pixels::new(self.width, self.height).unwrap(),
            steps: self.steps,
            guidance: self.guidance,
            seeds: vec![self.seed],
            record: true,
            ..small_job()
        }
    }
}

/// The smallest job: an image of 64x64 in one step, without CFG.
pub fn small_job() -> Job {
    Job {
        size: Pixels::new(64, 64).unwrap(),
        steps: 1,
        guidance: 1.0,
        noise: Noise::Drawn(NoiseKind::TorchCpu),
        ..Job::new("x", 5, &ModelDefaults::klein(), Variant::Distilled).unwrap()
    }
}

/// Makes the backend of a test.
pub type Make<'a> = &'a dyn Fn() -> Box<dyn Backend>;

/// The folder of the project.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The path of a recorded file. `KILN_FIXTURES` names the folder on a machine without the sources.
pub fn fixture(name: &str) -> PathBuf {
    let sources = || root().join("tests/fixtures");
    std::env::var_os("KILN_FIXTURES").map_or_else(sources, PathBuf::from).join(name)
}

pub fn cases() -> Vec<Case> {
    #[derive(serde::Deserialize)]
    struct Goldens {
        cases: Vec<Case>,
    }
    let text = std::fs::read_to_string(fixture("goldens.json")).unwrap();
    serde_json::from_str::<Goldens>(&text).unwrap().cases
}

/// The recorded outputs.
pub struct Goldens(Shard);

impl Goldens {
    pub fn open() -> Self {
        Self::named("goldens.safetensors")
    }

    pub fn named(file: &str) -> Self {
        Self(Shard::open(&fixture(file)).unwrap())
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.0.bytes(name).unwrap_or_else(|| panic!("no golden `{name}`"));
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.0.bytes(name).unwrap().to_vec()
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.0.bytes(name).unwrap().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// An image with values in 0..1, three channels per pixel.
    pub fn image(&self, name: &str) -> Vec<f32> {
        let bytes = self.0.bytes(name).unwrap();
        bytes.chunks_exact(2).map(|b| f32::from(u16::from_le_bytes(b.try_into().unwrap())) / 65535.0).collect()
    }
}

pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&g, &w) in got.iter().zip(want) {
        difference += (f64::from(g) - f64::from(w)).powi(2);
        norm += f64::from(w).powi(2);
    }
    (difference / norm).sqrt()
}

pub fn cpu() -> Cpu {
    Cpu::new(0, Arc::new(AtomicBool::new(false))).unwrap()
}

/// The tiny model on a backend.
pub fn engine_on(backend: Box<dyn Backend>, variant: Variant, precision: Precision) -> Engine {
    let model = OpenModel::open(&Found::Tiny, Some(variant)).unwrap();
    Engine::load(backend, model, LoadOptions { precision, references: true, ..LoadOptions::DEFAULT }, &Silent).unwrap()
}

/// The tokenizer of the tiny model.
pub fn tiny_tokenizer() -> Tokenizer {
    Tokenizer::from_json(tiny::TOKENIZER, Path::new("tiny")).unwrap()
}

/// The weights of a tiny model.
pub fn tiny_weights(model: &TinyModel) -> PerComponent<Weights> {
    PerComponent::from_fn(|part| model.weights(part).unwrap())
}

/// A model with these weights and the tokenizer of the tiny model.
pub fn opened(weights: PerComponent<Weights>, variant: Variant, defaults: ModelDefaults) -> OpenModel {
    OpenModel::check(weights, PerComponent::default(), tiny_tokenizer(), variant, defaults).unwrap()
}

/// The tiny model with prompts of 64 tokens instead of 512, which is an eighth of the text encoder's work. It is for tests that compare
/// runs with each other. Recorded outputs have 512 tokens.
pub fn short_model(variant: Variant) -> OpenModel {
    let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
    opened(tiny_weights(&model), variant, ModelDefaults { max_text_tokens: 64, ..ModelDefaults::klein() })
}

/// An engine of [`short_model`] on a backend.
pub fn short_engine(backend: Box<dyn Backend>, variant: Variant, options: LoadOptions) -> Engine {
    Engine::load(backend, short_model(variant), options, &Silent).unwrap()
}

/// Checks that `low_memory`, which loads the transformer over the text encoder, leaves the first and later images of an engine unchanged.
pub fn saving_memory_changes_nothing(make: Make<'_>) {
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            // Without a record, the upload of the other weights overlaps with the text encoder.
            let job = Job { size: Pixels::new(64, 64).unwrap(), steps: 2, record: false, ..case.job() };
            let prompts = [&job.prompt, "something else", &job.prompt];
            let images = |low_memory| {
                let options = LoadOptions { precision, references: true, low_memory, ..LoadOptions::DEFAULT };
                let mut engine = short_engine(make(), case.variant(), options);
                prompts.map(|prompt| run(&mut engine, &Job { prompt: prompt.into(), ..job.clone() }).unwrap().image)
            };
            let (saved, plain) = (images(true), images(false));
            assert!(saved == plain, "{} {}", case.name, precision.name());
            assert!(plain[0] == plain[2] && plain[0] != plain[1], "{} {}", case.name, precision.name());
        }
    }
}

/// Runs a job that generates one image.
pub fn run(engine: &mut Engine, job: &Job) -> kiln::error::Result<GeneratedImage> {
    let mut outputs = Vec::new();
    engine.generate(job, &Silent, &mut |output| {
        outputs.push(output);
        Ok(())
    })?;
    assert_eq!(outputs.len(), 1);
    Ok(outputs.remove(0))
}

/// The raw image of a record with values in 0..1, three channels per pixel.
pub fn unit_image(raw: &[f32]) -> Vec<f32> {
    let pixels = raw.len() / 3;
    (0..pixels).flat_map(|p| [0, 1, 2].map(|c| (0.5 * raw[c * pixels + p] + 0.5).clamp(0.0, 1.0))).collect()
}
