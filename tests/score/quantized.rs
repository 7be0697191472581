//! The built-in model in FP8 and NVFP4, in the form that Black Forest Labs publish: the linear layers of the transformer's
//! blocks have quantized weights and a static input scale, everything else is in bf16.

use crate::calibration::{Largest, block_linears, calibrate, layer_name, values};
use crate::engine::{files_of, model_folder};
use common::quantized::{Content, Form, Layer, Plain};
use common::sandbox::Sandbox;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::names::TensorSpec;
use kiln::internals::tensor::DType;
use kiln::internals::tensor::formats::to_e4m3;
use kiln::internals::tensor::nvfp4::{BLOCK, encode_block};
use kiln::locate::{Found, ModelFiles};
use safetensors::tensor::Dtype;
use std::sync::LazyLock;

/// Inputs may be this much larger than in the calibration before they saturate. This costs no accuracy: over 15 octaves e4m3
/// numbers are relatively as dense, and NVFP4's block scales are e4m3 numbers.
const HEAD_ROOM: f32 = 4.0;

/// The formats of quantized weights and their inputs: e4m3 with one scale per tensor, and NVFP4.
pub const FORMATS: [DType; 2] = [DType::E4m3, DType::E2m1];

/// The scale of a layer's input: a power of two.
fn input_scale(format: DType, largest: f32) -> f32 {
    assert!(largest.is_finite() && largest > 0.0, "the largest input is {largest}");
    2.0_f32.powi((HEAD_ROOM * largest / format.format().largest).log2().ceil() as i32)
}

/// The elements of a weight with this scale, and its block scales, row by row.
fn encode(format: DType, values: &[f32], scale: f32) -> (Vec<u8>, Option<Vec<u8>>) {
    if format == DType::E4m3 {
        return (values.iter().map(|value| to_e4m3(value / scale)).collect(), None);
    }
    let mut codes = vec![0; values.len() / 2];
    let blocks = values.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(BLOCK / 2));
    let scales = blocks.map(|(values, codes)| encode_block(values, scale, codes)).collect();
    (codes, Some(scales))
}

/// The transformer in this format, calibrated by the largest inputs of its layers.
fn quantize(format: DType, weights: &Weights, inputs: &Largest) -> Content {
    let (linears, rest) = block_linears(weights);
    let layer = |spec: &TensorSpec| {
        let (name, values) = (layer_name(spec).to_owned(), values(weights, spec));
        let scale = values.iter().fold(0.0, |most: f32, value| most.max(value.abs())) / format.format().largest;
        let (codes, blocks) = encode(format, &values, scale);
        let input = *inputs.get(&name).unwrap_or_else(|| panic!("{name} was not calibrated"));
        let (rows, cols, input_scale) = (spec.shape[0], spec.shape[1], Some(input_scale(format, input)));
        Layer { name, rows, cols, codes, blocks, scale, input_scale }
    };
    let plain = |spec: &TensorSpec| {
        let bytes = DType::Bf16.encoded(&values(weights, spec));
        Plain { name: spec.name.clone(), dtype: Dtype::BF16, shape: spec.shape.clone(), bytes }
    };
    Content { layers: linears.iter().map(layer).collect(), plain: rest.iter().map(plain).collect() }
}

/// The scored model's transformer in one of the formats. It is calibrated once.
pub fn content(format: DType) -> &'static Content {
    static CONTENTS: LazyLock<[Content; 2]> = LazyLock::new(|| {
        let (folder, weights) = (model_folder(), open(&files_of(&model_folder())));
        let inputs = calibrate(&folder, &weights);
        FORMATS.map(|format| quantize(format, &weights, &inputs))
    });
    FORMATS.iter().zip(&*CONTENTS).find(|(known, _)| **known == format).unwrap().1
}

/// The transformer of a model.
pub fn open(files: &ModelFiles) -> Weights {
    Weights::open(Component::Transformer, &files.parts.transformer).unwrap()
}

/// Model files with a transformer in a temporary folder, which is deleted on drop.
pub struct QuantizedFiles {
    pub files: ModelFiles,
    _sandbox: Sandbox,
}

impl QuantizedFiles {
    /// Writes this transformer for the scored model.
    pub fn write(content: &Content) -> Self {
        let (mut files, sandbox) = (files_of(&model_folder()), Sandbox::new());
        files.parts.transformer = sandbox.path("flux-2-klein-quantized.safetensors");
        std::fs::write(&files.parts.transformer, content.file(Form::BFL)).unwrap();
        Self { files, _sandbox: sandbox }
    }

    /// The model, as if it had been located.
    pub fn found(&self) -> Found {
        Found::Files(Box::new(self.files.clone()))
    }
}
