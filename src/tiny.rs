//! A tiny random model with the true architecture. The program generates it for tests, and as a fallback if no other model is
//! found.
//!
//! Every value comes from an integer hash of the tensor's name and the element's index, and is exact in bfloat16. Any other
//! program can repeat it bit for bit, and all dtypes and both layouts hold the same numbers.

mod files;

pub use files::{contents, write_to};

use crate::checkpoint::{Shard, Weights};
use crate::component::Component;
use crate::config::Configs;
use crate::error::{Error, Result};
use crate::model::text_file_manifest;
use crate::names::{self, Layout, TensorSpec};
use crate::tensor::{Bytes, DType};
use kiln_numerics::hashed::values;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use std::sync::Arc;

/// The tokenizer of the tiny model's vocabulary.
pub const TOKENIZER: &[u8] = include_bytes!("../models/tiny/tokenizer.json");

/// The three parts as safetensors files in memory.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// The transformer.
    pub transformer: Bytes,
    /// The text encoder, whose names are the same in both layouts.
    pub text_encoder: Bytes,
    /// The VAE.
    pub vae: Bytes,
}

impl TinyModel {
    /// The file of one part.
    pub fn file(&self, part: Component) -> &Bytes {
        match part {
            Component::Transformer => &self.transformer,
            Component::TextEncoder => &self.text_encoder,
            Component::Vae => &self.vae,
        }
    }

    /// The weights of one part.
    pub fn weights(&self, part: Component) -> Result<Weights> {
        let shard = Shard::from_bytes(&format!("built-in tiny {part}"), self.file(part).clone())?;
        Weights::from_shards(part, vec![shard])
    }
}

/// Generates the model with weights in `dtype`, which has to be a floating-point type.
pub fn model(layout: Layout, dtype: DType) -> Result<TinyModel> {
    let written = |part| file(part, &manifest(part), dtype);
    let diffusers = TinyModel {
        transformer: written(Component::Transformer)?,
        text_encoder: written(Component::TextEncoder)?,
        vae: written(Component::Vae)?,
    };
    match layout {
        Layout::Diffusers => Ok(diffusers),
        Layout::Bfl => Ok(TinyModel {
            transformer: respelled(&diffusers, Component::Transformer, dtype)?,
            vae: respelled(&diffusers, Component::Vae, dtype)?,
            text_encoder: diffusers.text_encoder,
        }),
    }
}

/// All canonical tensors in the files.
fn manifest(part: Component) -> Vec<TensorSpec> {
    match part {
        // Writes all layers, as real checkpoints do; the last one's output is not used.
        Component::TextEncoder => text_file_manifest(&Configs::TINY.text_encoder),
        _ => Configs::TINY.manifest(part),
    }
}

/// Generates a part with the tensors of `manifest` instead of the tiny model's. Values follow the same rule.
#[cfg(feature = "internals")]
pub fn weights_of(part: Component, manifest: &[TensorSpec], dtype: DType) -> Result<Weights> {
    Weights::from_shards(part, vec![Shard::from_bytes(&format!("built-in {part}"), file(part, manifest, dtype)?)?])
}

/// Generates the diffusers file of one part. The values of both layouts are hashed from the names in this file.
fn file(part: Component, manifest: &[TensorSpec], dtype: DType) -> Result<Bytes> {
    let kind = float_type(dtype)?;
    let specs: Vec<TensorSpec> = manifest.iter().flat_map(|spec| names::file_tensors(part, Layout::Diffusers, spec)).collect();
    let valued = |spec: TensorSpec| {
        let bytes = values(&spec.name, &spec.shape, dtype);
        (spec, bytes)
    };
    serialize(part, kind, &specs.into_par_iter().map(valued).collect::<Vec<_>>())
}

/// Rewrites a part in the original layout, with equal weights.
fn respelled(model: &TinyModel, part: Component, dtype: DType) -> Result<Bytes> {
    let weights = model.weights(part)?;
    let mut tensors = Vec::new();
    for spec in manifest(part) {
        let weight = weights.weight(&spec)?;
        let rows: Vec<&[u8]> = weight.parts.iter().map(|part| &part.bytes[..]).collect();
        // In this layout each canonical tensor of a transformer or a VAE is one tensor.
        let named = names::file_tensors(part, Layout::Bfl, &spec).into_iter().next().unwrap_or(spec);
        tensors.push((named, rows.concat()));
    }
    serialize(part, float_type(dtype)?, &tensors)
}

/// The name of a floating-point type in a safetensors file.
fn float_type(dtype: DType) -> Result<Dtype> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::F16 => Ok(Dtype::F16),
        DType::Bf16 => Ok(Dtype::BF16),
        _ => Err(Error::Op { op: "tiny", what: format!("no weights in {}", dtype.name()) }),
    }
}

fn serialize(part: Component, kind: Dtype, tensors: &[(TensorSpec, Vec<u8>)]) -> Result<Bytes> {
    let broken = |e: safetensors::SafeTensorError| Error::Op { op: "serialize", what: e.to_string() };
    let mut views = Vec::with_capacity(tensors.len() + 1);
    for (spec, bytes) in tensors {
        views.push((spec.name.as_str(), TensorView::new(kind, spec.shape.clone(), bytes).map_err(broken)?));
    }
    // Every PyTorch batch norm stores this counter; loaders have to ignore it.
    let counter = 0i64.to_le_bytes();
    if part == Component::Vae {
        views.push(("bn.num_batches_tracked", TensorView::new(Dtype::I64, Vec::new(), &counter).map_err(broken)?));
    }
    Ok(Bytes::new(Arc::new(safetensors::serialize(views, None).map_err(broken)?)))
}
