//! The bytes of a quantized file that do not depend on values: its tensors, their order, and its header, equal to the official
//! files' to the byte.
//!
//! An FP8 layer has an F8_E4M3 weight and its scale. An NVFP4 layer has a U8 weight with two elements per byte, e4m3 block scales
//! in tiles, and a scale for the whole weight. Transformers list their quantized layers in the header's metadata. Text encoders
//! have a companion tensor for each quantized layer.
//!
//! For diffusers, FP8 has row scales, and NVFP4 has another order. diffusers reads the tensors alone, so these files have none of
//! ComfyUI's declarations: ComfyUI would mistake one order for the other.

use super::policy::Policy;
use crate::component::Component;
use crate::names::{LayerId, NVFP4_LAYOUT_METADATA, QUANTIZATION_METADATA};
use crate::tensor::nvfp4::{BLOCK, TILE_ROWS};
use crate::tensor::{DType, Nvfp4Layout, ScaleKind};
use std::ops::Range;

/// The programs, in addition to kiln, that a file is laid out for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightLayout {
    /// ComfyUI, like the official files: one scale per FP8 layer, NVFP4 in the order of [`Nvfp4Layout::COMFY`].
    #[default]
    Comfy,
    /// diffusers: row scales for FP8 layers, NVFP4 in the order of [`Nvfp4Layout::MODELOPT`].
    Diffusers,
}

impl WeightLayout {
    /// The order of NVFP4 in this layout.
    pub(super) const fn nvfp4(self) -> Nvfp4Layout {
        match self {
            Self::Comfy => Nvfp4Layout::COMFY,
            Self::Diffusers => Nvfp4Layout::MODELOPT,
        }
    }

    /// Shape and dtype of a layer's row or block scales, if it has any.
    fn scales(self, format: DType, [rows, cols]: [usize; 2]) -> Option<(&'static str, Vec<usize>)> {
        let blocks = cols.div_ceil(BLOCK);
        match (format.format().scales, self) {
            (ScaleKind::None, _) | (ScaleKind::TensorOrRows, Self::Comfy) => None,
            (ScaleKind::TensorOrRows, Self::Diffusers) => Some(("F32", vec![rows])),
            (ScaleKind::Blocks, Self::Comfy) => {
                Some(("F8_E4M3", vec![rows.next_multiple_of(TILE_ROWS), blocks.next_multiple_of(4)]))
            }
            (ScaleKind::Blocks, Self::Diffusers) => Some(("F8_E4M3", vec![rows, blocks])),
        }
    }

    /// Bytes of the row or block scales of so many rows and columns.
    pub(super) fn scale_bytes(self, format: DType, size: [usize; 2]) -> u64 {
        self.scales(format, size).map_or(0, |(dtype, shape)| bytes(dtype, &shape))
    }
}

/// A layer of the file, or a tensor that is stored in BF16 or copied as it is.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// The name of the weight in the file.
    pub weight: String,
    /// The model layer that the weight is, or is a piece of.
    pub layer: Option<LayerId>,
    /// The shape of the values.
    pub shape: Vec<usize>,
    /// The quantization format; `None` for BF16.
    pub format: Option<DType>,
    /// Whether the file has a scale for the layer's input.
    pub has_input_scale: bool,
    /// Whether this is no layer, but bytes that are copied as they are.
    pub is_verbatim: bool,
}

impl LayerSpec {
    /// A layer in the policy's format.
    pub fn new(weight: String, layer: Option<LayerId>, shape: Vec<usize>, policy: &Policy) -> Self {
        let mut spec = Self { weight, layer, shape, format: None, has_input_scale: false, is_verbatim: false };
        spec.format = policy.format_of(&spec);
        spec
    }

    /// A tensor of so many bytes that are copied as they are.
    pub fn verbatim(name: String, bytes: usize) -> Self {
        Self { weight: name, layer: None, shape: vec![bytes], format: None, has_input_scale: false, is_verbatim: true }
    }

    /// The layer's name: the weight's name without `.weight`.
    pub fn name(&self) -> &str {
        self.weight.strip_suffix(".weight").unwrap_or(&self.weight)
    }
}

/// The content of a layer's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The weight's elements.
    Elements,
    /// The row or block scales.
    Scales,
    /// The scale of the whole weight.
    WeightScale,
    /// The scale of the layer's input.
    InputScale,
    /// The name of the format, as JSON.
    Declaration,
}

/// A tensor of the file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The index of the tensor's layer.
    pub layer: usize,
    /// The tensor's content.
    pub content: Content,
    /// The tensor's name.
    pub name: String,
    /// The tensor's dtype, as the header spells it.
    pub dtype: &'static str,
    /// The tensor's shape, as the header states it.
    pub shape: Vec<usize>,
    /// The tensor's byte range in the file.
    pub range: Range<u64>,
}

/// The order of dtypes in a file, widest first, with the bytes of an element. Tensors of one dtype are sorted by name.
const DTYPES: [(&str, u64); 4] = [("F32", 4), ("BF16", 2), ("F8_E4M3", 1), ("U8", 1)];

/// The size of a tensor in bytes.
fn bytes(dtype: &str, shape: &[usize]) -> u64 {
    let size = DTYPES.iter().find(|(name, _)| *name == dtype).map_or(0, |(_, size)| *size);
    size * shape.iter().product::<usize>() as u64
}

/// The layout of a file.
#[derive(Clone, Debug)]
pub struct FileLayout {
    /// The storage layout of quantized layers.
    pub weights: WeightLayout,
    /// The header and the length in front of it.
    pub header: Vec<u8>,
    /// The tensors in storage order.
    pub tensors: Vec<Tensor>,
}

impl FileLayout {
    /// The layout of a part with these layers. A text encoder always gets ComfyUI's layout: diffusers does not read quantized ones.
    pub fn new(part: Component, weights: WeightLayout, layers: &[LayerSpec]) -> Self {
        let weights = if part == Component::TextEncoder { WeightLayout::Comfy } else { weights };
        let each = layers.iter().enumerate();
        let mut tensors: Vec<Tensor> = each.flat_map(|(i, layer)| tensors_of(part, weights, i, layer)).collect();
        let rank = |dtype: &str| DTYPES.iter().position(|(name, _)| *name == dtype);
        tensors.sort_by(|a, b| (rank(a.dtype), &a.name).cmp(&(rank(b.dtype), &b.name)));
        let mut offset = 0;
        for tensor in &mut tensors {
            tensor.range = offset..offset + bytes(tensor.dtype, &tensor.shape);
            offset = tensor.range.end;
        }
        let header = header(part, weights, layers, &tensors);
        let start = header.len() as u64;
        tensors.iter_mut().for_each(|tensor| tensor.range = tensor.range.start + start..tensor.range.end + start);
        Self { weights, header, tensors }
    }

    /// The size of the whole file in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.last().map_or(self.header.len() as u64, |tensor| tensor.range.end)
    }
}

/// The tensors of one layer, without byte ranges yet.
fn tensors_of(part: Component, weights: WeightLayout, layer: usize, spec: &LayerSpec) -> Vec<Tensor> {
    let tensor = |content, suffix: &str, dtype, shape: &[usize]| {
        let name = if content == Content::Elements { spec.weight.clone() } else { format!("{}.{suffix}", spec.name()) };
        Tensor { layer, content, name, dtype, shape: shape.to_vec(), range: 0..0 }
    };
    let elements = |dtype, shape: &[usize]| tensor(Content::Elements, "", dtype, shape);
    let plain = if spec.is_verbatim { "U8" } else { "BF16" };
    let Some(format) = spec.format else { return vec![elements(plain, &spec.shape)] };
    let (rows, cols, dtype) = (spec.shape[0], spec.shape[1], format);
    // Each dtype that stores elements of these formats has one byte.
    let mut tensors = vec![elements(dtype.format().stored_as, &[rows, dtype.bytes(cols)])];
    if dtype.format().scales == ScaleKind::Blocks {
        tensors.push(tensor(Content::WeightScale, "weight_scale_2", "F32", &[]));
    }
    match weights.scales(format, [rows, cols]) {
        Some((dtype, shape)) => tensors.push(tensor(Content::Scales, "weight_scale", dtype, &shape)),
        None if dtype.format().scales == ScaleKind::None => {}
        None => tensors.push(tensor(Content::WeightScale, "weight_scale", "F32", &[])),
    }
    if spec.has_input_scale {
        tensors.push(tensor(Content::InputScale, "input_scale", "F32", &[]));
    }
    if part == Component::TextEncoder {
        tensors.push(tensor(Content::Declaration, "comfy_quant", "U8", &[declaration(format).len()]));
    }
    tensors
}

/// The declaration of this format, as the official files spell it.
pub fn declaration(format: DType) -> String {
    format!(r#"{{"format": "{}"}}"#, format.format().declared)
}

/// The header with its length, padded to a multiple of eight bytes.
fn header(part: Component, weights: WeightLayout, layers: &[LayerSpec], tensors: &[Tensor]) -> Vec<u8> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut entries = Vec::new();
    let metadata = |key: &str, value: &str| format!(r#""__metadata__":{{"{key}":{}}}"#, quoted(value));
    if weights == WeightLayout::Diffusers {
        // Nothing else in such a file shows its order, which diffusers assumes.
        if layers.iter().any(|layer| layer.format == Some(DType::E2m1)) {
            entries.push(metadata(NVFP4_LAYOUT_METADATA, "modelopt"));
        }
    } else if part == Component::Transformer {
        let mut quantized: Vec<(&str, DType)> = layers.iter().filter_map(|layer| Some((layer.name(), layer.format?))).collect();
        quantized.sort_by_key(|(name, _)| *name);
        let list: Vec<String> =
            quantized.iter().map(|(name, format)| format!("{}: {}", quoted(name), declaration(*format))).collect();
        if !list.is_empty() {
            let text = format!(r#"{{"format_version": "1.0", "layers": {{{}}}}}"#, list.join(", "));
            entries.push(metadata(QUANTIZATION_METADATA, &text));
        }
    }
    for Tensor { name, dtype, shape, range, .. } in tensors {
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let (name, shape, start, end) = (quoted(name), shape.join(","), range.start, range.end);
        entries.push(format!(r#"{name}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#));
    }
    let mut text = format!("{{{}}}", entries.join(","));
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
