//! Generates images through the library.

use crate::quantized::{QuantizedFiles, content};
use crate::render::Image;
use crate::settings::choice;
use crate::world::SIDE;
use common::cpu;
use common::quantized::Content;
use kiln::internals::adapter::{Adapter, AdapterMode, Adapters};
use kiln::internals::backend::cuda::Cuda;
use kiln::internals::backend::{Backend, Fp8Accumulate, GemmFormats};
use kiln::internals::config::Variant;
use kiln::internals::model::{AttentionFormat, Nvfp4Math};
use kiln::internals::noise::NoiseKind;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, Noise, OpenModel, ReferenceInput, Start};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{DType, Precision};
use kiln::internals::tokenizer::Padding;
use kiln::locate::{Found, LocateRequest, ModelFiles, locate};
use kiln::progress::Silent;
use kiln_program::cli::formats::format_lines;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const STEPS: usize = 4;

/// The repository: the build folder or, on another machine, the working directory.
pub fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    if built.is_dir() { built.into() } else { ".".into() }
}

/// The folder of the model that is scored.
pub fn model_folder() -> PathBuf {
    std::env::var_os("KILN_SCORE_MODEL").map_or_else(|| root().join("models/builtin"), PathBuf::from)
}

/// The files of a model in a folder.
pub fn files_of(folder: &Path) -> ModelFiles {
    match located(folder) {
        Found::Files(files) => *files,
        other => panic!("{} is {other:?} and has no files", folder.display()),
    }
}

fn located(folder: &Path) -> Found {
    locate(&LocateRequest { model: Some(folder.into()), ..LocateRequest::default() }).unwrap()
}

/// The formats in which a model computes.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub name: &'static str,
    /// The format of the file's quantized weights: the linear layers of the transformer's blocks.
    weights: Option<DType>,
    /// The format to which the same weights of the plain model, and the text encoder's, are quantized at load, without calibration.
    at_load: Option<DType>,
    /// The type in which NVFP4 weights are multiplied.
    nvfp4_math: Nvfp4Math,
    /// Whether a device has the GEMM. Without it the device would expand the weights and multiply in bf16.
    is_multiplied_by: fn(GemmFormats) -> bool,
}

impl Format {
    pub const F32: Self =
        Self { name: "f32", weights: None, at_load: None, nvfp4_math: Nvfp4Math::Auto, is_multiplied_by: |_| true };
    pub const BF16: Self = Self { name: "bf16", ..Self::F32 };
    /// Weights and inputs in e4m3, the rest in bf16.
    pub const FP8: Self = Self { name: "fp8", weights: Some(DType::E4m3), is_multiplied_by: |gemms| gemms.w8a8, ..Self::F32 };
    /// Weights in NVFP4, inputs in bf16.
    pub const NVFP4: Self = Self {
        name: "nvfp4",
        weights: Some(DType::E2m1),
        nvfp4_math: Nvfp4Math::Bf16,
        is_multiplied_by: |gemms| gemms.w4a16,
        ..Self::F32
    };
    /// Weights and inputs in NVFP4.
    pub const W4A4: Self =
        Self { name: "w4a4", nvfp4_math: Nvfp4Math::Auto, is_multiplied_by: |gemms| gemms.w4a4, ..Self::NVFP4 };
    /// NVFP4 weights in the file, re-encoded as e4m3, and e4m3 inputs.
    pub const NVFP4_AS_FP8: Self =
        Self { name: "nvfp4-as-fp8", nvfp4_math: Nvfp4Math::Fp8, is_multiplied_by: |gemms| gemms.w8a8, ..Self::NVFP4 };
    pub const FP8_AT_LOAD: Self = Self { name: "fp8-at-load", ..Self::FP8.at_load() };
    pub const NVFP4_AT_LOAD: Self = Self { name: "nvfp4-at-load", ..Self::NVFP4.at_load() };
    pub const W4A4_AT_LOAD: Self = Self { name: "w4a4-at-load", ..Self::W4A4.at_load() };

    const ALL: [Self; 9] = [
        Self::F32,
        Self::BF16,
        Self::FP8,
        Self::NVFP4,
        Self::W4A4,
        Self::NVFP4_AS_FP8,
        Self::FP8_AT_LOAD,
        Self::NVFP4_AT_LOAD,
        Self::W4A4_AT_LOAD,
    ];

    /// Sets the format to which weights are quantized at load.
    const fn at_load(self) -> Self {
        Self { weights: None, at_load: self.weights, ..self }
    }

    /// The format that `KILN_SCORE_FORMAT` names; by default bf16 on a GPU and f32 on the CPU.
    pub fn of_score() -> Self {
        let default = if on_gpu() { Self::BF16 } else { Self::F32 };
        choice("KILN_SCORE_FORMAT", &Self::ALL.map(|format| (format.name, format))).unwrap_or(default)
    }

    /// The precision of everything that is not quantized.
    pub fn precision(self) -> Precision {
        if self.name == Self::F32.name { Precision::F32 } else { Precision::Bf16 }
    }
}

/// Whether `KILN_SCORE_DEVICE` asks for the GPU.
fn on_gpu() -> bool {
    choice("KILN_SCORE_DEVICE", &[("cpu", false), ("cuda", true)]).unwrap_or(false)
}

/// The accumulation that `KILN_SCORE_ACCUMULATE` names.
fn accumulate() -> Fp8Accumulate {
    let named = [Fp8Accumulate::Auto, Fp8Accumulate::Exact, Fp8Accumulate::Fast].map(|way| (way.name(), way));
    choice("KILN_SCORE_ACCUMULATE", &named).unwrap_or_default()
}

/// The format of queries and keys of quantized models, which `KILN_SCORE_ATTENTION` names.
fn attention() -> AttentionFormat {
    let named = [("auto", AttentionFormat::Auto), ("bf16", AttentionFormat::Bf16), ("fp8", AttentionFormat::Fp8)];
    choice("KILN_SCORE_ATTENTION", &named).unwrap_or_default()
}

/// The device that is scored.
fn backend() -> Box<dyn Backend> {
    if on_gpu() {
        let mut gpu = Cuda::open(0, Arc::new(AtomicBool::new(false))).unwrap();
        gpu.set_fp8_accumulate(accumulate());
        return Box::new(gpu);
    }
    assert!(
        std::env::var_os("KILN_SCORE_ACCUMULATE").is_none(),
        "the CPU accumulates in f32, KILN_SCORE_ACCUMULATE says nothing"
    );
    Box::new(cpu())
}

/// Loads models in bf16, with the VAE's encoder.
const OPTIONS: LoadOptions = LoadOptions { references: true, ..LoadOptions::DEFAULT };

/// A model ready to draw.
pub struct Model {
    engine: Engine,
    /// Name, precision, variant and formats, for display.
    pub what: String,
    /// How many activations did not fit into FP8, in all images so far.
    pub saturated: u64,
    /// The adapters in use.
    pub adapters: Option<Arc<Adapters>>,
    /// The files in use, if they are temporary.
    _files: Option<QuantizedFiles>,
}

impl Model {
    /// The model that is scored.
    pub fn of_score(format: Format) -> Self {
        match format.weights {
            Some(weights) => Self::quantized(format, content(weights)),
            None => {
                let backend = backend();
                assert!((format.is_multiplied_by)(backend.gemm_formats()), "this device has no GEMM of {}", format.name);
                let (precision, quantize) = (format.precision(), format.at_load);
                let attention = quantize.map_or(AttentionFormat::Auto, |_| attention());
                Self::load(backend, &located(&model_folder()), LoadOptions { attention, precision, quantize, ..OPTIONS })
            }
        }
    }

    /// Opens a folder, or the tiny model by its name.
    pub fn open(folder: &Path, precision: Precision) -> Self {
        Self::load(backend(), &located(folder), LoadOptions { precision, ..OPTIONS })
    }

    /// The model that is scored, with this transformer.
    pub fn quantized(format: Format, content: &Content) -> Self {
        let (backend, files) = (backend(), QuantizedFiles::write(content));
        assert!((format.is_multiplied_by)(backend.gemm_formats()), "this device has no GEMM of {}", format.name);
        let options = LoadOptions { attention: attention(), nvfp4_math: format.nvfp4_math, ..OPTIONS };
        let model = Self::load(backend, &files.found(), options);
        Self { _files: Some(files), ..model }
    }

    /// The scored model with unmerged adapters, and an adapter for it.
    pub fn and_adapter(file: &Path) -> (Self, Adapter) {
        let (found, precision) = (located(&model_folder()), Format::of_score().precision());
        let targets = OpenModel::open(&found, None).unwrap().layer_targets();
        let adapter = Adapter::open(file, &targets).unwrap();
        let options = LoadOptions { precision, adapters: AdapterMode::Branch, ..OPTIONS };
        (Self::load(backend(), &found, options), adapter)
    }

    /// A model in bf16 on this backend.
    pub fn on(backend: Box<dyn Backend>, folder: &Path) -> Self {
        Self::load(backend, &located(folder), OPTIONS)
    }

    /// `KILN_SCORE_VARIANT=kv` keeps the keys and values of references.
    fn load(backend: Box<dyn Backend>, found: &Found, options: LoadOptions) -> Self {
        let model = OpenModel::open(found, choice("KILN_SCORE_VARIANT", &[("kv", Variant::Kv)])).unwrap();
        let mut formats = model.formats(options, backend.gemm_formats()).unwrap();
        formats.accumulate = on_gpu().then(accumulate);
        let engine = Engine::load(backend, model, options, &Silent).unwrap();
        let parts = [engine.name(), options.precision.name(), &format!("{:?}", engine.variant())];
        let what = format!("{} ({})", parts.join(", "), format_lines(&formats).join("; "));
        Self { engine, what, saturated: 0, adapters: None, _files: None }
    }

    /// The image of a prompt, with references or without.
    pub fn draw(&mut self, prompt: &str, references: &[Image], seed: u64) -> Image {
        self.run(prompt, references, seed, STEPS, Noise::Drawn(NoiseKind::HOPPER)).0
    }

    /// The image of an edit.
    pub fn edit(&mut self, prompt: &str, start: Start, seed: u64) -> Image {
        let noise = Noise::Drawn(NoiseKind::HOPPER);
        self.run_job(prompt, Some(start), &[], seed, STEPS, noise).0
    }

    /// An image after a round trip through the VAE. A run of zero steps encodes its references and decodes its noise. Here the noise is
    /// the encoded image.
    pub fn round_trip(&mut self, image: &Image) -> Image {
        let noise = Noise::Drawn(NoiseKind::HOPPER);
        let tokens = self.run("", std::slice::from_ref(image), 0, 0, noise).1.remove(0);
        self.run("", &[], 0, 0, Noise::Given(tokens)).0
    }

    /// The image, and the tokens of the references.
    fn run(&mut self, prompt: &str, references: &[Image], seed: u64, steps: usize, noise: Noise) -> (Image, Vec<Vec<f32>>) {
        self.run_job(prompt, None, references, seed, steps, noise)
    }

    fn run_job(
        &mut self,
        prompt: &str,
        start: Option<Start>,
        references: &[Image],
        seed: u64,
        steps: usize,
        noise: Noise,
    ) -> (Image, Vec<Vec<f32>>) {
        let size = Pixels::new(SIDE, SIDE).unwrap();
        let values = |p: &Image| p.bytes().iter().map(|v| f32::from(*v) / 127.5 - 1.0).collect::<Vec<f32>>();
        let job = Job {
            prompt: prompt.into(),
            size,
            start,
            steps,
            sigmas: None,
            padding: Padding::Right,
            negative: String::new(),
            references: references.iter().map(|p| ReferenceInput { grid: size.grid(), pixels: values(p).into() }).collect(),
            guidance: 1.0,
            seeds: vec![seed],
            noise,
            record: true,
            adapters: self.adapters.clone(),
        };
        let mut made = None;
        let mut keep = |output: kiln::internals::pipeline::GeneratedImage| {
            self.saturated += output.saturated;
            made = Some((Image::from_bytes(&output.image.pixels), output.record.unwrap().references));
            Ok(())
        };
        self.engine.generate(&job, &Silent, &mut keep).unwrap();
        made.unwrap()
    }
}
