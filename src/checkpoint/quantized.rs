//! Recognizes quantized weights: the format of each one, and where its scales are. A layer's declaration comes first. Without one, the
//! format follows from the weight's dtype and its companion tensors.
//!
//! Unsupported formats are refused by name when a checkpoint is opened. Scales are read together with their weight, so layers that no run
//! reads may have any scales.

use super::declared::{Declarations, Declared, Settings, UNKNOWN, invalid};
use super::header::Entry;
use super::scales::ScaleTensor;
use super::shard::Shard;
use crate::component::Component;
use crate::error::{Error, Result};
use crate::names::{self, Companion, MODELOPT_METADATA, NVFP4_LAYOUT_METADATA, TensorRole, UNSUPPORTED_QUANTIZERS};
use crate::tensor::formats::Format;
use crate::tensor::{DType, Nvfp4Layout, Scale, ScaleKind, SliceScaling, Stored};
use crate::text::shown;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of elements that one thread checks at a time.
const CHUNK: usize = 1 << 20;

/// The quantized layers of one part.
#[derive(Clone, Debug)]
pub(super) struct Quantization {
    part: Component,
    /// Declarations, by layer without prefix.
    declared: BTreeMap<String, Declared>,
    /// Companion tensors, by layer with prefix.
    layers: BTreeMap<String, Layer>,
    /// Whether an FP8 weight has a scale. All others then need one, too.
    scales_fp8: bool,
    /// Whether the files declare their layers as ComfyUI needs.
    for_comfy: bool,
    /// Whether the files were written by ModelOpt.
    from_modelopt: bool,
    /// The NVFP4 order that the files state.
    stated_layout: Option<Nvfp4Layout>,
}

/// The companion tensors of one weight.
#[derive(Clone, Debug, Default)]
struct Layer {
    weight_scale: Option<Located>,
    tensor_scale: Option<Located>,
    input_scale: Option<Located>,
    settings: Option<Located>,
}

impl Layer {
    fn scales(&self) -> impl Iterator<Item = &Located> {
        [&self.weight_scale, &self.tensor_scale, &self.input_scale].into_iter().flatten()
    }
}

/// A tensor of one of the files.
#[derive(Clone, Debug)]
struct Located {
    shard: usize,
    name: String,
}

/// A weight of one of the files.
#[derive(Clone, Copy)]
pub(super) struct FileWeight<'a> {
    pub shards: &'a [Shard],
    pub shard: usize,
    pub name: &'a str,
    pub entry: &'a Entry,
}

impl FileWeight<'_> {
    /// The error for a weight that does not fit its companions.
    pub fn invalid(self, what: impl std::fmt::Display) -> Error {
        invalid(&self.shards[self.shard], format!("tensor `{}` {what}", shown(self.name)))
    }
}

impl Quantization {
    /// Reads what the files say about quantized layers. Fails if a layer's format is not supported.
    pub fn read(part: Component, shards: &[Shard]) -> Result<Self> {
        let mut layers: BTreeMap<String, Layer> = BTreeMap::new();
        let mut declarations = Declarations::read(part, shards)?;
        let mut marker = None;
        for (index, shard) in shards.iter().enumerate() {
            for (name, entry) in shard.tensors() {
                match names::resolve(part, name) {
                    TensorRole::Quantization(layer, kind) => {
                        let companions = layers.entry(layer.clone()).or_default();
                        let place = match kind {
                            Companion::WeightScale => &mut companions.weight_scale,
                            Companion::TensorScale => &mut companions.tensor_scale,
                            Companion::InputScale => &mut companions.input_scale,
                            Companion::Settings => &mut companions.settings,
                            Companion::Unsupported => return Err(unsupported(shards, index, &layer, name)),
                        };
                        if let Some(other) = place.replace(Located { shard: index, name: name.into() }) {
                            let detail = format!("`{}` and `{}` belong to one weight", shown(&other.name), shown(name));
                            return Err(Error::bad_file(shard.path(), "duplicate tensor", detail));
                        }
                        if kind == Companion::Settings {
                            declarations.add(shards, index, &layer, Settings::parse(shard, name)?)?;
                        }
                    }
                    // The marker holds no values. Two elements mean that inputs are never quantized.
                    TensorRole::Fp8Marker => marker = Some(entry.shape.iter().product::<usize>() == 2),
                    _ => {}
                }
            }
        }
        if let Some(full_precision) = marker.filter(|_| !declarations.in_metadata) {
            for (name, layer) in &layers {
                if let Some(scale) = &layer.weight_scale {
                    declarations.add_marked(scale.shard, name, full_precision);
                }
            }
        }
        let for_comfy = declarations.in_metadata || layers.values().any(|layer| layer.settings.is_some());
        let from_modelopt = shards.iter().any(|shard| shard.metadata().contains_key(MODELOPT_METADATA));
        let stated_layout = stated_layout(shards)?;
        let scales_fp8 = layers.iter().any(|(name, layer)| {
            let mut weights = shards.iter().filter_map(|shard| shard.entry(&format!("{name}.weight")));
            let format = weights.next().and_then(|weight| format_of(weight.dtype.name));
            layer.weight_scale.is_some() && format.is_some_and(|format| format.format().scales == ScaleKind::TensorOrRows)
        });
        let all = Self { part, declared: declarations.layers, layers, scales_fp8, for_comfy, from_modelopt, stated_layout };
        all.refuse(shards)?;
        Ok(all)
    }

    /// Fails if a weight is stored in a format that is not supported, naming the first one.
    fn refuse(&self, shards: &[Shard]) -> Result<()> {
        for shard in shards {
            for (name, entry) in shard.tensors() {
                if !matches!(names::resolve(self.part, name), TensorRole::Weight(_)) {
                    continue;
                }
                let (layer, _) = self.layer(name);
                let scale = layer.weight_scale.as_ref().and_then(|s| shards[s.shard].entry(&s.name)).map(|e| e.dtype.name);
                let format = match (entry.dtype.name, scale) {
                    ("F8_E4M3" | "F8_E5M2", Some("F8_E8M0" | "U8")) => "MXFP8",
                    ("U8", None) if layer.tensor_scale.is_none() && !self.is_declared(name) => "packed in U8",
                    _ => match unsupported_dtype(entry.dtype.name) {
                        Some(format) => format,
                        None => continue,
                    },
                };
                return Err(Error::Quantized { path: shard.path().into(), name: name.into(), format });
            }
        }
        Ok(())
    }

    /// The companions and the declaration of a weight's layer.
    fn layer(&self, weight: &str) -> (&Layer, Option<&Declared>) {
        static NONE: Layer = Layer { weight_scale: None, tensor_scale: None, input_scale: None, settings: None };
        let Some(name) = weight.strip_suffix(".weight") else { return (&NONE, None) };
        (self.layers.get(name).unwrap_or(&NONE), self.declared.get(names::without_prefix(name)))
    }

    fn is_declared(&self, weight: &str) -> bool {
        self.layer(weight).1.is_some()
    }

    /// The order in which the files store NVFP4: the stated one, or else a guess. `fused` says whether the layers have BFL's names. Files
    /// of both orders look alike: ComfyUI's have the first element of a pair in the high nibble and tiled scales. ModelOpt's have it in the
    /// low nibble, also when written for ComfyUI.
    pub fn nvfp4_layout(&self, fused: bool) -> Nvfp4Layout {
        self.stated_layout.unwrap_or(match (self.for_comfy || fused, self.from_modelopt) {
            (true, false) => Nvfp4Layout::COMFY,
            (true, true) => Nvfp4Layout::MODELOPT_SINGLE,
            (false, _) => Nvfp4Layout::MODELOPT,
        })
    }

    /// Fails if a declared layer has no weight, or if scales belong to no quantized weight. Layers for which `unread` is true may be
    /// incomplete.
    pub fn check(&self, shards: &[Shard], unread: &dyn Fn(&str) -> bool) -> Result<()> {
        let weights: BTreeSet<&str> = if self.declared.is_empty() {
            BTreeSet::new()
        } else {
            shards.iter().flat_map(|shard| shard.tensors().map(|(name, _)| names::without_prefix(name))).collect()
        };
        for (key, declared) in self.declared.iter().filter(|(key, _)| !unread(key)) {
            if !weights.contains(&*format!("{key}.weight")) {
                let layer = shown(&declared.layer);
                let format = title(declared.format);
                let detail = format!("layer `{layer}` is declared as {format}, but has no weight");
                return Err(invalid(&shards[declared.shard], detail));
            }
        }
        for (name, layer) in self.layers.iter().filter(|(name, _)| !unread(name)) {
            let weight = format!("{name}.weight");
            let dtype = shards.iter().find_map(|shard| shard.entry(&weight)).map(|entry| entry.dtype.name);
            if dtype.is_some_and(|dtype| format_of(dtype).is_some()) {
                continue;
            }
            if let Some(scale) = layer.scales().next() {
                let what = dtype.map_or("is not there".into(), |dtype| format!("is {dtype}"));
                let detail = format!("tensor `{}` scales `{}`, which {what}", shown(&scale.name), shown(&weight));
                return Err(invalid(&shards[scale.shard], detail));
            }
        }
        Ok(())
    }

    /// The quantized format of a weight, or `None` if it holds plain values.
    pub fn format(&self, weight: FileWeight<'_>) -> Result<Option<DType>> {
        let stored = format_of(weight.entry.dtype.name);
        let (_, declared) = self.layer(weight.name);
        let Some(declared) = declared else { return Ok(stored) };
        match declared.format.or(stored) {
            Some(format) if weight.entry.dtype.name == format.format().stored_as => Ok(Some(format)),
            wanted => Err(weight.invalid(format_args!("is {}, but declared as {}", weight.entry.dtype.name, title(wanted)))),
        }
    }

    /// The shape of a weight's values. One element of the file may pack several values.
    pub fn shape(&self, name: &str, entry: &Entry) -> Vec<usize> {
        let stored_as = entry.dtype.name;
        let declared = self.layer(name).1.and_then(|declared| declared.format);
        let format = declared.filter(|format| format.format().stored_as == stored_as).or(format_of(stored_as)).map(DType::format);
        let mut shape = entry.shape.clone();
        if let (Some(Format { block, block_bytes, .. }), [_, bytes]) = (format.filter(|format| format.block > 1), &mut *shape) {
            let values = *bytes as u128 * *block as u128 / *block_bytes as u128;
            *bytes = usize::try_from(values).unwrap_or(usize::MAX);
        }
        shape
    }

    /// Rows and columns of a weight with block scales. Fails unless its rows divide into whole blocks.
    pub fn block_matrix(&self, weight: FileWeight<'_>, format: &Format) -> Result<[usize; 2]> {
        let Format { title, block, .. } = format;
        match *self.shape(weight.name, weight.entry) {
            [rows, cols] if cols.is_multiple_of(*block) => Ok([rows, cols]),
            [_, cols] => Err(weight.invalid(format_args!("has {cols} columns, {title} needs a multiple of {block}"))),
            _ => Err(weight.invalid(format_args!("is {title}, but not a matrix"))),
        }
    }

    /// The scales of a weight, and the storage format of its layer's input.
    pub fn scaling(&self, weight: FileWeight<'_>, dtype: DType, layout: Nvfp4Layout) -> Result<(SliceScaling, Option<Stored>)> {
        let (layer, declared) = self.layer(weight.name);
        let (format, title) = (dtype.format(), dtype.format().title);
        let scaling = match format.scales {
            ScaleKind::None => SliceScaling::Unscaled,
            ScaleKind::TensorOrRows => {
                if let Some(extra) = &layer.tensor_scale {
                    return Err(weight.invalid(format_args!("is {title}, but has a scale `{}`", shown(&extra.name))));
                }
                match find(weight.shards, layer.weight_scale.as_ref()) {
                    Some(scale) => scale.fp8(if let [rows, _, ..] = *weight.entry.shape { rows } else { 1 })?,
                    None if self.needs_scale(weight) => {
                        return Err(weight.invalid("is FP8, but has no tensor with its scale"));
                    }
                    // The values were converted to FP8 without scales.
                    None => SliceScaling::Unscaled,
                }
            }
            ScaleKind::Blocks => {
                let missing = |what| weight.invalid(format_args!("is {title}, but has no tensor with {what}"));
                let scales = find(weight.shards, layer.weight_scale.as_ref()).ok_or_else(|| missing("block scales"))?;
                let tensor = find(weight.shards, layer.tensor_scale.as_ref()).ok_or_else(|| missing("the scale of the whole"))?;
                let size = self.block_matrix(weight, format)?;
                SliceScaling::Blocks16 { scales: scales.blocks(size, layout)?, tensor: tensor.single()?, layout }
            }
        };
        // Text encoders compute with unquantized activations, as in ComfyUI. So do layers whose declaration demands it.
        let quantizes = self.part == Component::Transformer && !declared.is_some_and(|declared| declared.full_precision);
        if !quantizes || !format.holds_results {
            return Ok((scaling, None));
        }
        let scale = find(weight.shards, layer.input_scale.as_ref()).map(ScaleTensor::single).transpose()?;
        // Without an input scale, the input of a layer that is declared as FP8 is converted unscaled. Older files state this as a scale of
        // one.
        let as_it_is = declared.filter(|_| format.scales == ScaleKind::TensorOrRows).map(|_| Scale::ONE);
        Ok((scaling, scale.or(as_it_is).map(|scale| Stored::scaled(dtype, scale))))
    }

    /// Whether an FP8 weight cannot do without a scale: it is declared, its layer has another scale, or other weights have theirs. A
    /// lookup table may be the only weight that was converted without a scale, and so may vectors.
    fn needs_scale(&self, weight: FileWeight<'_>) -> bool {
        let (layer, declared) = self.layer(weight.name);
        let is_matrix = weight.entry.shape.len() > 1 && !names::is_table(weight.name);
        declared.is_some() || layer.input_scale.is_some() || (is_matrix && self.scales_fp8)
    }

    /// Fails if an FP8 matrix has no scale, but elements that only a scaled one has: its file lost all scales.
    pub fn check_unscaled(&self, weight: FileWeight<'_>, format: DType, codes: &[u8]) -> Result<()> {
        let is_unscaled = format.format().scales == ScaleKind::TensorOrRows && self.scale_tensor(weight).is_none();
        if !is_unscaled || weight.entry.shape.len() < 2 || !codes.par_chunks(CHUNK).any(|codes| format.has_largest(codes)) {
            return Ok(());
        }
        let largest = format.format().largest;
        Err(weight.invalid(format_args!("is FP8 and has elements of {largest}, but no tensor with its scale")))
    }

    /// The tensor with a weight's row or block scales, if it has one.
    pub fn scale_tensor<'a>(&'a self, weight: FileWeight<'a>) -> Option<ScaleTensor<'a>> {
        find(weight.shards, self.layer(weight.name).0.weight_scale.as_ref())
    }
}

/// The NVFP4 order that the files' metadata states.
fn stated_layout(shards: &[Shard]) -> Result<Option<Nvfp4Layout>> {
    let mut stated = None;
    for shard in shards {
        let Some(name) = shard.metadata().get(NVFP4_LAYOUT_METADATA) else { continue };
        let Some((_, layout)) = Nvfp4Layout::NAMED.iter().find(|(known, _)| known == name) else {
            return Err(invalid(shard, format!("metadata `{NVFP4_LAYOUT_METADATA}` is `{}`, an unknown layout", shown(name))));
        };
        if stated.replace(*layout).is_some_and(|other| other != *layout) {
            return Err(invalid(shard, format!("metadata `{NVFP4_LAYOUT_METADATA}` differs between files")));
        }
    }
    Ok(stated)
}

fn find<'a>(shards: &'a [Shard], tensor: Option<&'a Located>) -> Option<ScaleTensor<'a>> {
    let Located { shard, name } = tensor?;
    let shard = shards.get(*shard)?;
    Some(ScaleTensor { shard, name, entry: shard.entry(name)? })
}

/// The supported quantization format with this storage dtype.
fn format_of(dtype: &str) -> Option<DType> {
    DType::stored_as(dtype).filter(|dtype| dtype.is_quantized())
}

/// The name of a declared format. A marker names no format and means FP8.
fn title(format: Option<DType>) -> &'static str {
    format.unwrap_or(DType::E4m3).format().title
}

/// The name of an unsupported quantized format, by the dtype of its weights.
fn unsupported_dtype(dtype: &str) -> Option<&'static str> {
    Some(match dtype {
        "I8" => "INT8",
        "F4" => "FP4",
        "F6_E2M3" | "F6_E3M2" => "FP6",
        "F8_E8M0" => UNKNOWN,
        "F8_E4M3FNUZ" => "FP8 (E4M3 FNUZ)",
        "F8_E5M2FNUZ" => "FP8 (E5M2 FNUZ)",
        _ => return None,
    })
}

/// The error for a layer whose companion tensor `name` belongs to an unsupported format.
fn unsupported(shards: &[Shard], index: usize, layer: &str, name: &str) -> Error {
    let shard = &shards[index];
    let has = |suffix: &str| shard.entry(&format!("{layer}{suffix}")).is_some();
    let weight = format!("{layer}.weight");
    let stored = || match shard.entry(&weight)?.dtype.name {
        "U8" => None,
        dtype => format_of(dtype).map(|format| format.format().title).or_else(|| unsupported_dtype(dtype)),
    };
    let format = UNSUPPORTED_QUANTIZERS.iter().find(|(suffix, _)| has(suffix)).map(|(_, format)| *format);
    let format = format.or_else(stored).unwrap_or(UNKNOWN);
    let name = if shard.entry(&weight).is_some() { weight } else { name.into() };
    Error::Quantized { path: shard.path().into(), name, format }
}
