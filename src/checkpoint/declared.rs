//! Reads which layers a checkpoint declares as quantized. There are three ways: the metadata of a file lists all layers, a
//! companion tensor of each layer holds its settings as JSON, or a marker tensor declares every layer with a scale as FP8.

use super::header::UniqueMap;
use super::shard::Shard;
use crate::component::Component;
use crate::error::{Error, Result};
use crate::names::{self, QUANTIZATION_METADATA};
use crate::tensor::DType;
use crate::text::shown;
use serde::Deserialize;
use std::collections::BTreeMap;

pub(super) const UNKNOWN: &str = "in an unknown quantized format";

/// The error for quantized layers that are not described consistently.
pub(super) fn invalid(shard: &Shard, detail: String) -> Error {
    let error = Error::bad_file(shard.path(), "invalid quantization", detail);
    error.with_hint("the file is damaged, or quantized in a nonstandard way; download it again, or use another one")
}

/// The maximum size of a layer's settings in bytes.
const MAX_SETTINGS: usize = 4096;

/// A checkpoint's declaration of one layer.
#[derive(Clone, Debug)]
pub(super) struct Declared {
    /// The format; `None` if it follows from the weight's dtype.
    pub format: Option<DType>,
    /// Whether the layer's input must stay unquantized.
    pub full_precision: bool,
    /// The name of the layer, and the index of the file that declares it.
    pub layer: String,
    pub shard: usize,
}

/// A layer's settings. Keys that do not change the meaning of its tensors are ignored.
#[derive(Debug, Deserialize)]
pub(super) struct Settings {
    format: Option<String>,
    full_precision_matrix_mult: Option<bool>,
    convrot: Option<bool>,
    params: Option<Params>,
}

#[derive(Debug, Deserialize)]
struct Params {
    convrot: Option<bool>,
}

impl Settings {
    /// Reads the settings that a tensor holds.
    pub fn parse(shard: &Shard, name: &str) -> Result<Self> {
        let invalid = |detail: String| invalid(shard, format!("tensor `{}`: {detail}", shown(name)));
        let bytes = shard.bytes(name);
        let bytes = bytes.as_deref().unwrap_or_default();
        if bytes.len() > MAX_SETTINGS {
            return Err(invalid(format!("settings of {} bytes, limit {MAX_SETTINGS}", bytes.len())));
        }
        serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))
    }

    /// The format, or the name of an unsupported one as an error.
    fn format(&self) -> Result<DType, &'static str> {
        let nested = self.params.as_ref().and_then(|params| params.convrot);
        if self.convrot == Some(true) || nested == Some(true) {
            return Err("rotated (ConvRot)");
        }
        let name = self.format.as_deref().unwrap_or_default();
        DType::quantized().find(|dtype| dtype.format().declared == name).ok_or(match name {
            "mxfp8" => "MXFP8",
            "int8_tensorwise" => "INT8",
            "convrot_w4a4" | "asym_w4a8_int8" | "awq_w4a16" => "INT4",
            _ => UNKNOWN,
        })
    }

    /// Interprets the settings for a layer.
    fn declare(&self, shards: &[Shard], shard: usize, layer: &str) -> Result<Declared> {
        let path = shards[shard].path();
        let refused = |format| Error::Quantized { path: path.into(), name: format!("{layer}.weight"), format };
        Ok(Declared {
            format: Some(self.format().map_err(refused)?),
            full_precision: self.full_precision_matrix_mult.unwrap_or(false),
            layer: layer.into(),
            shard,
        })
    }
}

#[derive(Deserialize)]
struct Metadata {
    layers: UniqueMap<Settings>,
}

/// The declarations of a checkpoint, by the name of the layer without prefix.
#[derive(Default)]
pub(super) struct Declarations {
    pub layers: BTreeMap<String, Declared>,
    /// Whether the metadata declare layers.
    pub in_metadata: bool,
}

impl Declarations {
    /// Reads the metadata of all files. In an all-in-one checkpoint layers of other parts are ignored.
    pub fn read(part: Component, shards: &[Shard]) -> Result<Self> {
        let mut all = Self::default();
        for (index, shard) in shards.iter().enumerate() {
            let Some(text) = shard.metadata().get(QUANTIZATION_METADATA) else { continue };
            all.in_metadata = true;
            let metadata: Metadata = serde_json::from_str(text)
                .map_err(|error| invalid(shard, format!("metadata `{QUANTIZATION_METADATA}`: {error}")))?;
            for (layer, settings) in metadata.layers.0 {
                if names::resolve(part, &format!("{layer}.weight")) != names::TensorRole::OtherPart {
                    all.add(shards, index, &layer, settings)?;
                }
            }
        }
        Ok(all)
    }

    /// Adds the settings of a layer. Two declarations of a layer are an error unless they mean the same, because programs differ
    /// in which one they follow.
    pub fn add(&mut self, shards: &[Shard], shard: usize, layer: &str, settings: Settings) -> Result<()> {
        let key = names::without_prefix(layer);
        let declared = settings.declare(shards, shard, layer)?;
        let meaning = |declared: &Declared| (declared.format, declared.full_precision);
        match self.layers.get(key) {
            Some(other) if meaning(other) != meaning(&declared) => {
                Err(invalid(&shards[shard], format!("layer `{}` is declared twice, with different settings", shown(layer))))
            }
            Some(_) => Ok(()),
            None => {
                self.layers.insert(key.into(), declared);
                Ok(())
            }
        }
    }

    /// Adds a layer that a marker declares.
    pub fn add_marked(&mut self, shard: usize, layer: &str, full_precision: bool) {
        let declared = Declared { format: None, full_precision, layer: layer.into(), shard };
        self.layers.entry(names::without_prefix(layer).into()).or_insert(declared);
    }
}
