//! Reads the layers of a part under the names of the file to write. A transformer has the names of the original single files,
//! whatever its layout. A text encoder has Hugging Face's names, with separate projections.

use super::layout::LayerSpec;
use super::policy::Policy;
use crate::checkpoint::{Entry, Shard, Weights};
use crate::component::Component;
use crate::config::{ConfigFile, ModelDefaults, TextConfig, TransformerConfig, Variant};
use crate::error::{Error, Result};
use crate::files;
use crate::locate::ModelFiles;
use crate::model::{text_manifest, transformer_manifest};
use crate::names::{self, TensorRole, TensorSpec};
use crate::tensor::{Bytes, DType, WeightSlice};
use std::path::{Path, PathBuf};

/// A part to quantize.
#[derive(Clone, Debug)]
pub enum ComponentSource {
    /// A transformer, with its sizes and variant.
    Transformer(Weights, TransformerConfig, Variant),
    /// A text encoder.
    TextEncoder(Weights),
}

impl ComponentSource {
    /// Opens a part without the rest of its model: a safetensors file, or a folder of shards. `variant` overrides the variant
    /// that the names and the pipeline's index imply.
    pub fn open(part: Component, path: &Path, variant: Option<Variant>) -> Result<Self> {
        let weights = Weights::open(part, path)?;
        let read = |path: PathBuf| ConfigFile::read(&path);
        let config = ModelFiles::config_of(path).map(read).transpose()?;
        if part != Component::Transformer {
            let config = TextConfig::detect(&weights, config.as_ref(), &ModelDefaults::klein())?;
            weights.check(&text_manifest(&config))?;
            return Ok(Self::TextEncoder(weights));
        }
        let config = TransformerConfig::detect(&weights, config.as_ref())?;
        weights.check(&transformer_manifest(&config))?;
        let index = path.parent().filter(|_| path.is_dir()).map(|folder| folder.join("model_index.json"));
        let index = index.filter(|index| files::is_there(index)).map(read).transpose()?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let variant = variant.map_or_else(|| Variant::detect(&config, index.as_ref(), &[&name]), Ok)?;
        variant.check(&config)?;
        Ok(Self::Transformer(weights, config, variant))
    }
}

/// A layer, or another tensor, of the source files.
#[derive(Clone, Debug)]
pub struct SourceLayer {
    /// The specification of the layer in the new file.
    pub spec: LayerSpec,
    /// The layer's rows in order. A vector is one row.
    pub parts: Vec<WeightSlice>,
    /// The bytes of a tensor that is copied as it is.
    pub verbatim: Bytes,
}

impl SourceLayer {
    fn new(path: &Path, spec: LayerSpec, parts: Vec<WeightSlice>) -> Result<Self> {
        if let Some(part) = parts.iter().find(|part| part.dtype.is_quantized()) {
            return Err(quantized_already(path, &spec.weight, part.dtype.name()));
        }
        Ok(Self { spec, parts, verbatim: none() })
    }

    /// A tensor of bytes that are copied as they are.
    fn verbatim(name: &str, verbatim: Bytes) -> Self {
        Self { spec: LayerSpec::verbatim(name.into(), verbatim.len()), parts: Vec::new(), verbatim }
    }

    /// Bytes of one row in the widest of the layer's parts.
    pub fn row_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.dtype.bytes(part.cols())).max().unwrap_or(0)
    }

    /// Whether values are rounded although the layer is not quantized: such a file holds only BF16.
    pub fn is_narrowed(&self) -> bool {
        self.spec.format.is_none() && self.parts.iter().any(|part| part.dtype != DType::Bf16)
    }
}

/// The layers of a transformer with the tensors of `manifest`.
pub fn transformer_layers(weights: &Weights, manifest: &[TensorSpec], policy: &Policy) -> Result<Vec<SourceLayer>> {
    let layer = |spec: &TensorSpec| {
        let layer = LayerSpec::new(spec.name.clone(), spec.layer, spec.shape.clone(), policy);
        SourceLayer::new(weights.path(), layer, weights.weight(spec)?.parts)
    };
    manifest.iter().map(layer).collect()
}

/// The layers of a text encoder: all layers in its files, including those that no image needs, and its vocabulary if the files carry it.
/// The head that predicts tokens is left out, as in ComfyUI's files.
pub fn text_encoder_layers(weights: &Weights, policy: &Policy) -> Result<Vec<SourceLayer>> {
    let mut layers = Vec::new();
    for shard in weights.shards() {
        for (name, entry) in shard.tensors() {
            let bare = names::without_prefix(name);
            let layer = match names::resolve(Component::TextEncoder, name) {
                TensorRole::Weight(spelling) => spelling.layer,
                TensorRole::Unused if bare.starts_with("model.norm.") => None,
                TensorRole::Unused if bare == names::VOCABULARY => {
                    layers.push(SourceLayer::verbatim(bare, shard.bytes(name).unwrap_or_else(none)));
                    continue;
                }
                TensorRole::Quantization(..) | TensorRole::Fp8Marker => {
                    return Err(quantized_already(shard.path(), name, "a scale"));
                }
                TensorRole::Unused | TensorRole::OtherPart | TensorRole::Unknown => continue,
            };
            let spec = LayerSpec::new(bare.into(), layer, entry.shape.clone(), policy);
            layers.push(SourceLayer::new(shard.path(), spec, vec![whole(shard, name, entry)?])?);
        }
    }
    Ok(layers)
}

/// Reads a tensor of a file as one part.
fn whole(shard: &Shard, name: &str, entry: &Entry) -> Result<WeightSlice> {
    let dtype = match DType::stored_as(entry.dtype.name) {
        Some(dtype) if dtype.is_quantized() => return Err(quantized_already(shard.path(), name, entry.dtype.name)),
        Some(plain) => plain,
        None => return Err(Error::TensorType { path: shard.path().into(), name: name.into(), got: entry.dtype.name.into() }),
    };
    let rows = if let [rows, _, ..] = *entry.shape { rows } else { 1 };
    let bytes = shard.bytes(name).unwrap_or_else(none);
    Ok(WeightSlice::plain(bytes, dtype, rows))
}

fn none() -> Bytes {
    Bytes::new(std::sync::Arc::new([]))
}

fn quantized_already(path: &Path, name: &str, what: &str) -> Error {
    let error = Error::bad_file(path, "quantized already", format!("tensor `{name}` is {what}"));
    error.with_hint("quantizing twice adds up both errors; use the BF16 checkpoint of the same model")
}
