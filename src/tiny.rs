//! A tiny random model of the true architecture, made by the program itself: for tests, and where there is no other.
//!
//! Every value comes from an integer hash of the tensor's name and the element's index, and is exact in bfloat16. Any other
//! program can repeat it bit for bit, and all element types and both layouts hold the same numbers.

mod files;

pub use files::write_to;

use crate::checkpoint::{Part, Shard, Weights};
use crate::config::{TextConfig, TransformerConfig, VaeConfig};
use crate::error::{Error, Result};
use crate::model::{text_manifest, transformer_manifest, vae_manifest};
use crate::names::{self, Layout, TensorSpec};
use crate::tensor::{Bytes, DType};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use std::sync::Arc;

/// The tokenizer that goes with the tiny model's vocabulary.
pub const TOKENIZER: &[u8] = include_bytes!("../models/tiny/tokenizer.json");

/// The three parts as safetensors files in memory.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// The transformer.
    pub transformer: Bytes,
    /// The text encoder; spelled alike in both layouts.
    pub text_encoder: Bytes,
    /// The autoencoder.
    pub vae: Bytes,
}

impl TinyModel {
    /// The file of one part.
    pub fn file(&self, part: Part) -> &Bytes {
        match part {
            Part::Transformer => &self.transformer,
            Part::TextEncoder => &self.text_encoder,
            Part::Vae => &self.vae,
        }
    }

    /// The weights of one part.
    pub fn weights(&self, part: Part) -> Result<Weights> {
        let shard = Shard::from_bytes(&format!("built-in tiny {part}"), self.file(part).clone())?;
        Weights::from_shards(part, vec![shard])
    }
}

/// Makes the model. Weights are stored as `dtype`, which has to be a floating-point type.
pub fn model(layout: Layout, dtype: DType) -> Result<TinyModel> {
    let diffusers = TinyModel {
        transformer: file(Part::Transformer, &manifest(Part::Transformer), dtype)?,
        text_encoder: file(Part::TextEncoder, &manifest(Part::TextEncoder), dtype)?,
        vae: file(Part::Vae, &manifest(Part::Vae), dtype)?,
    };
    match layout {
        Layout::Diffusers => Ok(diffusers),
        Layout::Bfl => Ok(TinyModel {
            transformer: respelled(&diffusers, Part::Transformer, dtype)?,
            vae: respelled(&diffusers, Part::Vae, dtype)?,
            text_encoder: diffusers.text_encoder,
        }),
    }
}

/// Every canonical tensor that the files hold.
fn manifest(part: Part) -> Vec<TensorSpec> {
    match part {
        Part::Transformer => transformer_manifest(&TransformerConfig::tiny()),
        // All layers, as in a real checkpoint; the last one feeds nothing.
        Part::TextEncoder => {
            let config = TextConfig::tiny();
            let [first, second, _] = config.taps;
            let mut list = text_manifest(&TextConfig { taps: [first, second, config.layers], ..config });
            list.push(TensorSpec::new("model.norm.weight", &[config.hidden]));
            list
        }
        Part::Vae => vae_manifest(&VaeConfig::tiny()),
    }
}

/// Weights of a part with other tensors than the tiny model's, by the same rule.
pub fn weights_of(part: Part, manifest: &[TensorSpec], dtype: DType) -> Result<Weights> {
    Weights::from_shards(part, vec![Shard::from_bytes(&format!("built-in {part}"), file(part, manifest, dtype)?)?])
}

/// The diffusers file of one part, whose names the hash is over.
fn file(part: Part, manifest: &[TensorSpec], dtype: DType) -> Result<Bytes> {
    let kind = float_type(dtype)?;
    let specs: Vec<TensorSpec> = manifest.iter().flat_map(|spec| names::file_tensors(part, Layout::Diffusers, spec)).collect();
    let valued = |spec: TensorSpec| {
        let bytes = values(&spec.name, &spec.shape, dtype);
        (spec, bytes)
    };
    serialise(part, kind, &specs.into_par_iter().map(valued).collect::<Vec<_>>())
}

/// The same weights under the other layout's names.
fn respelled(model: &TinyModel, part: Part, dtype: DType) -> Result<Bytes> {
    let weights = model.weights(part)?;
    let mut tensors = Vec::new();
    for spec in manifest(part) {
        let weight = weights.weight(&spec)?;
        let rows: Vec<&[u8]> = weight.parts.iter().map(|part| &part.bytes[..]).collect();
        // The canonical spelling of a transformer, and the other one of a VAE, are one tensor each.
        let named = names::file_tensors(part, Layout::Bfl, &spec).into_iter().next().unwrap_or(spec);
        tensors.push((named, rows.concat()));
    }
    serialise(part, float_type(dtype)?, &tensors)
}

/// The name of a floating-point type in a safetensors file.
fn float_type(dtype: DType) -> Result<Dtype> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::F16 => Ok(Dtype::F16),
        DType::Bf16 => Ok(Dtype::BF16),
        DType::U32 | DType::U8 => Err(Error::Op { op: "tiny", what: "weights are floating-point".into() }),
    }
}

fn serialise(part: Part, kind: Dtype, tensors: &[(TensorSpec, Vec<u8>)]) -> Result<Bytes> {
    let broken = |e: safetensors::SafeTensorError| Error::Op { op: "serialise", what: e.to_string() };
    let mut views = Vec::with_capacity(tensors.len() + 1);
    for (spec, bytes) in tensors {
        views.push((spec.name.as_str(), TensorView::new(kind, spec.shape.clone(), bytes).map_err(broken)?));
    }
    // What a batch norm that has seen no batch says; loaders have to pass over it.
    let counter = 0i64.to_le_bytes();
    if part == Part::Vae {
        views.push(("bn.num_batches_tracked", TensorView::new(Dtype::I64, Vec::new(), &counter).map_err(broken)?));
    }
    Ok(Bytes::new(Arc::new(safetensors::serialize(views, None).map_err(broken)?)))
}

/// The values of one tensor as little-endian bytes.
fn values(name: &str, shape: &[usize], dtype: DType) -> Vec<u8> {
    let hash = fnv1a(name);
    let rule = Rule::of(name, shape);
    let value = |index: usize| rule.value((mixed(hash, index as u64) >> 56) as u32);
    // In turn, not in parallel: the tensors themselves are made in parallel.
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    dtype.encoded(&values)
}

/// How a byte of the hash becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    /// Around 1: scales of norms, and variances.
    Scale,
    /// Around 2: scales of the transformer's queries and keys, so that attention is sharp and a wrong position shows.
    SharpScale,
    /// Small, around 0: biases and means.
    Bias,
    /// Around 0, with a spread that keeps the size of what a matrix is applied to.
    Matrix { step: f32 },
}

impl Rule {
    fn of(name: &str, shape: &[usize]) -> Self {
        if shape.len() < 2 {
            let sharp = [".norm_q.weight", ".norm_k.weight", ".norm_added_q.weight", ".norm_added_k.weight"];
            if sharp.iter().any(|end| name.ends_with(end)) {
                return Self::SharpScale;
            }
            let scale = name.ends_with(".weight") || name.ends_with(".running_var");
            return if scale { Self::Scale } else { Self::Bias };
        }
        // Values are uniform in (-1, 1) times a power of two, so their variance is a third of its square: a power for which a
        // sum over all inputs keeps about the size of one.
        let inputs: usize = shape[1..].iter().product();
        let mut step = 1.0 / 256.0;
        let mut reach = 4;
        while reach < inputs {
            reach *= 4;
            step /= 2.0;
        }
        Self::Matrix { step }
    }

    fn value(self, byte: u32) -> f32 {
        let odd = (2 * byte) as f32 - 255.0;
        match self {
            Self::Scale => 1.0 + ((byte & 127) as f32 - 64.0) / 128.0,
            Self::SharpScale => 2.0 * Self::Scale.value(byte),
            Self::Bias => odd / 2048.0,
            Self::Matrix { step } => odd * step,
        }
    }
}

/// The FNV-1a hash of a name.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// The `index`-th output of the SplitMix64 generator that starts at `hash`.
fn mixed(hash: u64, index: u64) -> u64 {
    let mut z = hash.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a("a"), 0xAF63_DC4C_8601_EC8C);
        assert_eq!(mixed(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(mixed(0, 1), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn spread_follows_the_number_of_inputs() {
        for (inputs, exponent) in [(1, 0), (4, 0), (5, 1), (16, 1), (17, 2), (256, 3), (576, 4), (1024, 4)] {
            let step = 2f32.powi(-8 - exponent);
            assert_eq!(Rule::of("x.weight", &[7, inputs]), Rule::Matrix { step }, "{inputs}");
        }
        assert_eq!(Rule::of("conv.weight", &[8, 64, 3, 3]), Rule::of("x.weight", &[8, 576]));
        assert_eq!(Rule::of("norm.weight", &[8]), Rule::Scale);
        assert_eq!(Rule::of("attn.norm_added_q.weight", &[8]), Rule::SharpScale);
        assert_eq!(Rule::of("self_attn.q_norm.weight", &[8]), Rule::Scale);
        assert_eq!(Rule::of("bn.running_var", &[8]), Rule::Scale);
        assert_eq!(Rule::of("bn.running_mean", &[8]), Rule::Bias);
    }

    #[test]
    fn every_value_is_exact_in_both_half_types() {
        let widest = Rule::of("x.weight", &[1, 4608]);
        for rule in [Rule::Scale, Rule::SharpScale, Rule::Bias, Rule::of("x.weight", &[1, 1]), widest] {
            for byte in 0..256 {
                let value = rule.value(byte);
                assert_eq!(half::bf16::from_f32(value).to_f32(), value);
                assert_eq!(half::f16::from_f32(value).to_f32(), value);
            }
        }
    }
}
