//! Recognises quantised checkpoints, so that they are refused with the name of their format instead of an error about a shape.
//!
//! A format is declared for all layers in the file's metadata, or per layer in a small JSON tensor; otherwise it is inferred from
//! the dtypes.

use super::shard::Shard;
use crate::error::{Error, Result};
use crate::names::{self, Place, QUANTISATION_METADATA, QUANTISATION_TENSOR, QUANTISERS};
use crate::part::Part;
use crate::text::shown;
use serde::Deserialize;
use std::collections::BTreeMap;

const UNKNOWN: &str = "in an unknown quantised format";

#[derive(Deserialize)]
struct Declaration {
    #[serde(default)]
    layers: BTreeMap<String, Layer>,
}

#[derive(Deserialize)]
struct Layer {
    #[serde(default)]
    format: String,
}

/// Fails if the file holds a quantised weight of `part`, naming the first one.
pub(super) fn refuse(part: Part, shard: &Shard) -> Result<()> {
    let refused = |name: String, format| Err(Error::Quantised { path: shard.path().into(), name, format });
    if let Some(text) = shard.metadata().get(QUANTISATION_METADATA) {
        // The file is declared as quantised, but the declaration cannot be parsed, so no layer can be named.
        let Ok(declared) = serde_json::from_str::<Declaration>(text) else {
            return refused(QUANTISATION_METADATA.into(), UNKNOWN);
        };
        // In an all-in-one checkpoint only another part may be quantised.
        let ours = |layer: &str| names::resolve(part, &format!("{layer}.weight")) != Place::OtherPart;
        if let Some((layer, settings)) = declared.layers.iter().find(|(layer, _)| ours(layer)) {
            return refused(format!("{}.weight", shown(layer)), format_name(&settings.format));
        }
    }
    for (name, entry) in shard.tensors() {
        match names::resolve(part, name) {
            Place::Quantisation(layer) if layer.is_empty() => return refused(name.into(), "FP8 (E4M3)"),
            Place::Quantisation(layer) => {
                let weight = format!("{layer}.weight");
                let format = declared_format(shard, &layer).or_else(|| quantiser(shard, &layer));
                let format = format.or_else(|| stored_format(shard, &weight)).unwrap_or(UNKNOWN);
                let name = if shard.entry(&weight).is_some() { weight } else { name.into() };
                return refused(name, format);
            }
            Place::Weight(_) if is_packed(entry.dtype.name) => {
                let format = name.strip_suffix(".weight").and_then(|layer| quantiser(shard, layer));
                return refused(name.into(), format.or_else(|| stored_format(shard, name)).unwrap_or(UNKNOWN));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The format that a layer's JSON tensor declares.
fn declared_format(shard: &Shard, layer: &str) -> Option<&'static str> {
    let bytes = shard.bytes(&format!("{layer}.{QUANTISATION_TENSOR}"))?;
    let settings: Layer = serde_json::from_slice(&bytes).ok()?;
    Some(format_name(&settings.format))
}

/// The format of a quantiser that stores characteristic tensors beside a layer.
fn quantiser(shard: &Shard, layer: &str) -> Option<&'static str> {
    let beside = |suffix: &str| shard.entry(&format!("{layer}{suffix}")).is_some();
    QUANTISERS.iter().find(|(suffix, _)| beside(suffix)).map(|(_, format)| *format)
}

/// The format inferred from the dtype of a weight and from the tensors beside it.
fn stored_format(shard: &Shard, weight: &str) -> Option<&'static str> {
    let beside = |suffix: &str| shard.entry(&format!("{weight}{suffix}")).is_some();
    Some(match shard.entry(weight)?.dtype.name {
        "U8" if beside("_scale_2") => "NVFP4",
        "U8" => "packed in U8",
        "I8" => "INT8",
        "F4" => "FP4",
        "F6_E2M3" | "F6_E3M2" => "FP6",
        "F8_E5M2" | "F8_E5M2FNUZ" => "FP8 (E5M2)",
        "F8_E4M3" | "F8_E4M3FNUZ" => "FP8 (E4M3)",
        _ => return None,
    })
}

fn is_packed(element: &str) -> bool {
    matches!(element, "U8" | "I8" | "F4") || element.starts_with("F6_") || element.starts_with("F8_")
}

fn format_name(declared: &str) -> &'static str {
    match declared {
        "float8_e4m3fn" => "FP8 (E4M3)",
        "float8_e5m2" => "FP8 (E5M2)",
        "nvfp4" => "NVFP4",
        "mxfp8" => "MXFP8",
        "int8_tensorwise" => "INT8",
        "convrot_w4a4" | "asym_w4a8_int8" | "awq_w4a16" => "INT4",
        _ => UNKNOWN,
    }
}
