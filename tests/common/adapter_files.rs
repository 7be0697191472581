//! Adapter files made up by tests. Values are derived from tensor names, which are spelled as PEFT or kohya spells them.

use kiln::error::Result;
use kiln::internals::adapter::{Adapter, Adapters, LayerTargets};
use kiln::internals::checkpoint::Shard;
use kiln::internals::names::TensorSpec;
use kiln::internals::pipeline::OpenModel;
use kiln::internals::tensor::{Bytes, DType};
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// A tensor of an adapter.
#[derive(Clone, Debug)]
pub struct Factor {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// PEFT's name endings: of the matrix `[rank, in]`, then of the matrix `[out, rank]`.
pub const PEFT: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
/// kohya's name endings, in the same order.
pub const KOHYA: [&str; 2] = [".lora_down.weight", ".lora_up.weight"];

/// A tensor with values in -0.5..0.5 that are derived from its name. bf16 and f16 hold them exactly.
pub fn factor(name: impl Into<String>, shape: &[usize]) -> Factor {
    let name = name.into();
    let mut state = super::fnv::fnv1a(name.bytes()) | 1;
    let values = (0..shape.iter().product()).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as f32 / 256.0 - 0.5
    });
    Factor { values: values.collect(), name, shape: shape.to_vec() }
}

/// A tensor of one value.
pub fn number(name: impl Into<String>, value: f32) -> Factor {
    Factor { name: name.into(), shape: Vec::new(), values: vec![value] }
}

impl Factor {
    /// Multiplies every value by `by`.
    pub fn times(mut self, by: f32) -> Self {
        self.values.iter_mut().for_each(|value| *value *= by);
        self
    }
}

/// Both LoRA factors of a layer `[out, in]`, with these name endings.
pub fn lora(layer: &str, [down, up]: [&str; 2], [rows, cols]: [usize; 2], rank: usize) -> Vec<Factor> {
    vec![factor(format!("{layer}{down}"), &[rank, cols]), factor(format!("{layer}{up}"), &[rows, rank])]
}

/// The LoKr factors of a layer, each with a shape. A factor with a rank is stored as a product of that rank.
pub fn lokr(layer: &str, w1: ([usize; 2], Option<usize>), w2: ([usize; 2], Option<usize>)) -> Vec<Factor> {
    let mut factors = Vec::new();
    for (name, ([rows, cols], rank)) in [("w1", w1), ("w2", w2)] {
        let named = |ending: &str, shape: [usize; 2]| factor(format!("{layer}.lokr_{name}{ending}"), &shape);
        match rank {
            None => factors.push(named("", [rows, cols])),
            Some(rank) => factors.extend([named("_a", [rows, rank]), named("_b", [rank, cols])]),
        }
    }
    factors
}

/// LoRA factors of all linear layers of a manifest, under canonical names.
pub fn lora_of_all(manifest: &[TensorSpec], rank: usize) -> Vec<Factor> {
    let layer = |spec: &TensorSpec| {
        let (&[rows, cols], Some(name)) = (&spec.shape[..], spec.name.strip_suffix(".weight")) else { return Vec::new() };
        if name.ends_with("embed_tokens") { Vec::new() } else { lora(name, PEFT, [rows, cols], rank) }
    };
    manifest.iter().flat_map(layer).collect()
}

/// The bytes of an adapter file. `metadata` may be empty.
pub fn file(factors: &[Factor], dtype: DType, metadata: &[(&str, &str)]) -> Vec<u8> {
    let kind = match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        other => panic!("adapters are not stored as {other:?}"),
    };
    let bytes: Vec<Vec<u8>> = factors.iter().map(|factor| dtype.encoded(&factor.values)).collect();
    let views = factors
        .iter()
        .zip(&bytes)
        .map(|(factor, bytes)| (&factor.name, TensorView::new(kind, factor.shape.clone(), bytes).unwrap()));
    let metadata: HashMap<String, String> = metadata.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    serialize(views, (!metadata.is_empty()).then_some(metadata)).unwrap()
}

/// Reads an adapter file for a model with these layers.
pub fn read(file: Vec<u8>, targets: &LayerTargets) -> Result<Adapter> {
    Adapter::read(&Shard::from_bytes("x.safetensors", Bytes::new(Arc::new(file)))?, targets)
}

/// Adapters in bf16 with their strengths, for a model.
pub fn adapters<'a>(model: &OpenModel, given: impl IntoIterator<Item = (&'a [Factor], f32)>) -> Adapters {
    let targets = model.layer_targets();
    let one = |(factors, strength): (&[Factor], f32)| (read(file(factors, DType::Bf16, &[]), &targets).unwrap(), strength);
    Adapters(given.into_iter().map(one).collect())
}
