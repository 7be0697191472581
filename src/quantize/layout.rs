//! The bytes of a quantized file that do not depend on any value: which tensors it holds, their order, and its header, to the byte
//! as the official files have it.
//!
//! A layer in FP8 has an F8_E4M3 weight and its scale; one in NVFP4 a U8 weight of two elements to a byte, e4m3 scales of blocks in
//! tiles, and the scale of the whole. Transformers list their quantized layers in the metadata of the header, text encoders have
//! a tensor beside each.
//!
//! For diffusers FP8 has a scale for each row, and NVFP4 another order. It goes by the tensors alone, so nothing is declared as for
//! ComfyUI, which would take one order for the other.

use super::policy::Policy;
use crate::component::Component;
use crate::names::{LayerId, NVFP4_LAYOUT_METADATA, QUANTIZATION_METADATA};
use crate::tensor::nvfp4::{BLOCK, TILE_ROWS};
use crate::tensor::{DType, Nvfp4Layout, ScaleKind};
use std::ops::Range;

/// The programs that a file is laid out for, besides kiln.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightLayout {
    /// ComfyUI, as the official files: one scale for an FP8 layer, NVFP4 in the order of [`Nvfp4Layout::COMFY`].
    #[default]
    Comfy,
    /// diffusers: a scale for each row of an FP8 layer, NVFP4 in the order of [`Nvfp4Layout::MODELOPT`].
    Diffusers,
}

impl WeightLayout {
    /// The order of NVFP4.
    pub(super) const fn nvfp4(self) -> Nvfp4Layout {
        match self {
            Self::Comfy => Nvfp4Layout::COMFY,
            Self::Diffusers => Nvfp4Layout::MODELOPT,
        }
    }

    /// Shape and dtype of the scales of a layer's rows or blocks, if it has any.
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

    /// Bytes of the scales of so many rows or their blocks.
    pub(super) fn scale_bytes(self, format: DType, size: [usize; 2]) -> u64 {
        self.scales(format, size).map_or(0, |(dtype, shape)| bytes(dtype, &shape))
    }
}

/// A layer of the file, or a tensor that stays as it is.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// The name of its weight in the file.
    pub weight: String,
    /// The layer that it is, or that it is a piece of.
    pub layer: Option<LayerId>,
    /// The shape of its values.
    pub shape: Vec<usize>,
    /// The format that it is quantized to; `None` for BF16.
    pub format: Option<DType>,
    /// Whether the file has a scale of the layer's input.
    pub has_input_scale: bool,
}

impl LayerSpec {
    /// A layer in the format that the policy chooses for it.
    pub fn new(weight: String, layer: Option<LayerId>, shape: Vec<usize>, policy: &Policy) -> Self {
        let mut spec = Self { weight, layer, shape, format: None, has_input_scale: false };
        spec.format = policy.format_of(&spec);
        spec
    }

    /// Its name: that of the weight without `.weight`.
    pub fn name(&self) -> &str {
        self.weight.strip_suffix(".weight").unwrap_or(&self.weight)
    }
}

/// What a tensor of a layer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The elements.
    Elements,
    /// The scales of rows or of blocks.
    Scales,
    /// The scale of the weight as a whole.
    WeightScale,
    /// The scale of the layer's input.
    InputScale,
    /// The name of the format, as JSON.
    Declaration,
}

/// A tensor of the file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The index of its layer.
    pub layer: usize,
    /// What it holds.
    pub content: Content,
    /// Its name.
    pub name: String,
    /// Its dtype, as the header spells it.
    pub dtype: &'static str,
    /// Its shape, as the header has it.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub range: Range<u64>,
}

/// The order of dtypes in a file, the widest first, with the bytes of an element. Tensors of one dtype are in order of name.
const DTYPES: [(&str, u64); 4] = [("F32", 4), ("BF16", 2), ("F8_E4M3", 1), ("U8", 1)];

/// Bytes of a tensor.
fn bytes(dtype: &str, shape: &[usize]) -> u64 {
    let size = DTYPES.iter().find(|(name, _)| *name == dtype).map_or(0, |(_, size)| *size);
    size * shape.iter().product::<usize>() as u64
}

/// The layout of a file.
#[derive(Clone, Debug)]
pub struct FileLayout {
    /// How quantized layers are stored.
    pub weights: WeightLayout,
    /// The length in front of the header, and the header.
    pub header: Vec<u8>,
    /// The tensors in the order in which they are stored.
    pub tensors: Vec<Tensor>,
}

impl FileLayout {
    /// The layout of a part with these layers. A text encoder is always laid out for ComfyUI: diffusers reads none that is
    /// quantized.
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

    /// Bytes of the whole file.
    pub fn bytes(&self) -> u64 {
        self.tensors.last().map_or(self.header.len() as u64, |tensor| tensor.range.end)
    }
}

/// The tensors of one layer, whose places are not known yet.
fn tensors_of(part: Component, weights: WeightLayout, layer: usize, spec: &LayerSpec) -> Vec<Tensor> {
    let tensor = |content, suffix: &str, dtype, shape: &[usize]| {
        let name = if content == Content::Elements { spec.weight.clone() } else { format!("{}.{suffix}", spec.name()) };
        Tensor { layer, content, name, dtype, shape: shape.to_vec(), range: 0..0 }
    };
    let elements = |dtype, shape: &[usize]| tensor(Content::Elements, "", dtype, shape);
    let Some(format) = spec.format else { return vec![elements("BF16", &spec.shape)] };
    let (rows, cols, dtype) = (spec.shape[0], spec.shape[1], format);
    // Each dtype that elements of these formats are stored as is of one byte.
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

/// The settings of a layer in this format, as the official files spell them.
pub fn declaration(format: DType) -> String {
    format!(r#"{{"format": "{}"}}"#, format.format().declared)
}

/// The length and the header of a file, padded to a multiple of eight bytes.
fn header(part: Component, weights: WeightLayout, layers: &[LayerSpec], tensors: &[Tensor]) -> Vec<u8> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut entries = Vec::new();
    let metadata = |key: &str, value: &str| format!(r#""__metadata__":{{"{key}":{}}}"#, quoted(value));
    if weights == WeightLayout::Diffusers {
        // Nothing else about such a file tells its order, which diffusers assumes.
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
