//! The built-in model in FP8, as Black Forest Labs publish theirs: the linear layers of the transformer's blocks in e4m3 with one
//! scale per tensor and a static scale of their inputs, everything else in bf16.

use crate::calibration::{Largest, block_linears, calibrate, layer_name, values};
use crate::common::quantised::{Content, Form, Layer, Plain};
use crate::engine::{files_of, model_folder};
use crate::sandbox::Sandbox;
use kiln::checkpoint::Weights;
use kiln::locate::{Found, ModelFiles};
use kiln::names::TensorSpec;
use kiln::part::Part;
use kiln::tensor::DType;
use kiln::tensor::minifloat::to_e4m3;
use safetensors::tensor::Dtype;
use std::sync::LazyLock;

/// The largest e4m3 number.
pub const LARGEST: f32 = 448.0;

/// Inputs may be this much larger than in the calibration before they saturate. It costs nothing: over 15 octaves the numbers of
/// e4m3 are relatively as dense.
const HEAD_ROOM: f32 = 4.0;

/// The transformer of a model.
pub fn open(files: &ModelFiles) -> Weights {
    Weights::open(Part::Transformer, &files.parts.transformer).unwrap()
}

/// The scale of a layer's input: a power of two.
fn input_scale(largest: f32) -> f32 {
    assert!(largest.is_finite() && largest > 0.0, "the largest input is {largest}");
    2.0_f32.powi((HEAD_ROOM * largest / LARGEST).log2().ceil() as i32)
}

/// The transformer in FP8, calibrated by the largest inputs of its layers.
fn quantise(weights: &Weights, inputs: &Largest) -> Content {
    let (linears, rest) = block_linears(weights);
    let layer = |spec: &TensorSpec| {
        let (name, values) = (layer_name(spec).to_owned(), values(weights, spec));
        let scale = values.iter().fold(0.0, |most: f32, value| most.max(value.abs())) / LARGEST;
        let codes = values.iter().map(|value| to_e4m3(value / scale)).collect();
        let input = *inputs.get(&name).unwrap_or_else(|| panic!("{name} was not calibrated"));
        let (rows, cols, input_scale) = (spec.shape[0], spec.shape[1], Some(input_scale(input)));
        Layer { name, rows, cols, codes, blocks: None, scale, input_scale }
    };
    let plain = |spec: &TensorSpec| {
        let bytes = DType::Bf16.encoded(&values(weights, spec));
        Plain { name: spec.name.clone(), dtype: Dtype::BF16, shape: spec.shape.clone(), bytes }
    };
    Content { layers: linears.iter().map(layer).collect(), plain: rest.iter().map(plain).collect() }
}

/// The transformer of the model that is scored, which is calibrated once.
pub fn content() -> &'static Content {
    static CONTENT: LazyLock<Content> = LazyLock::new(|| {
        let (folder, weights) = (model_folder(), open(&files_of(&model_folder())));
        quantise(&weights, &calibrate(&folder, &weights))
    });
    &CONTENT
}

/// The files of a model whose transformer is in a temporary folder, which is deleted with this.
pub struct Fp8Files {
    pub files: ModelFiles,
    _sandbox: Sandbox,
}

impl Fp8Files {
    /// Writes this transformer for the model that is scored.
    pub fn write(content: &Content) -> Self {
        let (mut files, sandbox) = (files_of(&model_folder()), Sandbox::new());
        files.parts.transformer = sandbox.path("flux-2-klein-fp8.safetensors");
        std::fs::write(&files.parts.transformer, content.file(Form::BFL)).unwrap();
        Self { files, _sandbox: sandbox }
    }

    /// The model, as if it had been located.
    pub fn found(&self) -> Found {
        Found::Files(Box::new(self.files.clone()))
    }
}
