//! The quantized files of the tiny model, rebuilt from its weights by the formulas of `tools/goldens/quantized.py`, in every form that such
//! files are published in.

pub mod goldens;

use super::fnv::fnv1a;
use super::{fixture, opened};
use kiln::internals::backend::Backend;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::{Component, PerComponent};
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, LoadOptions, OpenModel};
use kiln::internals::tensor::formats::to_e4m3;
use kiln::internals::tensor::nvfp4::{BLOCK, TILE_ROWS, encode_block, scale_bytes, scale_offset, tiles_along};
use kiln::internals::tensor::{Bytes, DType, Nvfp4Layout};
use kiln::internals::tiny::{self, TinyModel};
use kiln::progress::Silent;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, json};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// `tests/fixtures/quantized.json`.
#[derive(serde::Deserialize)]
pub struct Recorded {
    pub models: Vec<RecordedModel>,
    pub cases: Vec<RecordedCase>,
    layers: BTreeMap<String, BTreeMap<String, RecordedLayer>>,
    pub samples: BTreeMap<String, BTreeMap<String, RecordedSample>>,
}

#[derive(serde::Deserialize)]
pub struct RecordedModel {
    pub name: String,
    pub transformer: String,
    pub text_encoder: Option<String>,
    pub quantizes_activations: bool,
}

#[derive(serde::Deserialize)]
pub struct RecordedCase {
    pub name: String,
    pub model: String,
    pub case: String,
    pub bf16_relative_l2: BTreeMap<String, f64>,
    pub bf16_exact_time_relative_l2: BTreeMap<String, f64>,
}

/// A recorded layer. Scales are the bits of an f32.
#[derive(serde::Deserialize)]
struct RecordedLayer {
    format: String,
    weight_scale: Option<String>,
    weight_scale_2: Option<String>,
    input_scale: Option<String>,
}

#[derive(serde::Deserialize)]
pub struct RecordedSample {
    weight_shape: [usize; 2],
    weight_fnv1a: String,
    weight_scale_fnv1a: Option<String>,
    pub input_fnv1a: Option<String>,
    pub input_block_scale_fnv1a: Option<String>,
}

pub static RECORDED: LazyLock<Recorded> =
    LazyLock::new(|| serde_json::from_str(&std::fs::read_to_string(fixture("quantized.json")).unwrap()).unwrap());

pub fn hash(bytes: &[u8]) -> String {
    format!("{:016x}", fnv1a(bytes.iter().copied()))
}

fn from_bits(bits: &str) -> f32 {
    f32::from_bits(u32::from_str_radix(bits.strip_prefix("0x").unwrap(), 16).unwrap())
}

/// A tensor of a file.
#[derive(Clone)]
pub struct Plain {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Plain {
    pub fn scalar(name: String, value: f32) -> Self {
        Self { name, dtype: Dtype::F32, shape: Vec::new(), bytes: value.to_le_bytes().to_vec() }
    }

    pub fn values(&self) -> Vec<f32> {
        DType::Bf16.decoded(&self.bytes)
    }

    /// This tensor in FP8 without a scale.
    pub fn in_fp8(&self, dtype: DType) -> Self {
        let name = match dtype {
            DType::E4m3 => Dtype::F8_E4M3,
            DType::E5m2 => Dtype::F8_E5M2,
            _ => panic!("{dtype:?} is not FP8"),
        };
        Self { dtype: name, bytes: dtype.encoded(&self.values()), ..self.clone() }
    }
}

/// The tiny model in bf16. It is generated once.
fn tiny_model(layout: Layout) -> &'static TinyModel {
    static ORIGINAL: LazyLock<TinyModel> = LazyLock::new(|| tiny::model(Layout::Bfl, DType::Bf16).unwrap());
    static DIFFUSERS: LazyLock<TinyModel> = LazyLock::new(|| tiny::model(Layout::Diffusers, DType::Bf16).unwrap());
    if layout == Layout::Bfl { &ORIGINAL } else { &DIFFUSERS }
}

/// The tensors of one component of the tiny model in bf16.
pub fn plain_tensors(part: Component, layout: Layout) -> Vec<Plain> {
    let shard = Shard::from_bytes("tiny", tiny_model(layout).file(part).clone()).unwrap();
    let tensor = |(name, entry): (&str, &kiln::internals::checkpoint::Entry)| {
        assert_eq!(entry.dtype.name, "BF16", "{name}");
        let bytes = shard.bytes(name).unwrap().to_vec();
        Plain { name: name.into(), dtype: Dtype::BF16, shape: entry.shape.clone(), bytes }
    };
    shard.tensors().map(tensor).collect()
}

/// A quantized layer.
#[derive(Clone)]
pub struct Layer {
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    /// The elements. NVFP4 has two in each byte, the even column in the high nibble.
    pub codes: Vec<u8>,
    /// The block scales of NVFP4, row by row.
    pub blocks: Option<Vec<u8>>,
    /// `weight_scale` of FP8, `weight_scale_2` of NVFP4.
    pub scale: f32,
    pub input_scale: Option<f32>,
}

impl Layer {
    /// Quantizes a weight.
    fn new(weight: &Plain, recorded: &RecordedLayer) -> Self {
        let (name, &[rows, cols]) = (weight.name.strip_suffix(".weight").unwrap(), &weight.shape[..]) else { unreachable!() };
        let values = weight.values();
        let largest = values.iter().fold(0.0, |most: f32, v| most.max(v.abs()));
        // Factors of 1, 4 and 16, so that layers have different scales.
        let headroom = |suffix: &str| 4_f32.powi((fnv1a(format!("{name}.{suffix}").bytes()) % 3) as i32);
        let (codes, blocks, scale, right) = if recorded.format == "nvfp4" {
            let scale = largest / 2688.0 * headroom("weight_scale_2");
            let mut codes = vec![0; values.len() / 2];
            let pairs = values.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(BLOCK / 2));
            let blocks = pairs.map(|(values, codes)| encode_block(values, scale, codes)).collect();
            (codes, Some(blocks), scale, &recorded.weight_scale_2)
        } else {
            assert_eq!(recorded.format, "float8_e4m3fn");
            let scale = largest / 448.0 * headroom("weight_scale");
            (values.iter().map(|v| to_e4m3(v / scale)).collect(), None, scale, &recorded.weight_scale)
        };
        assert_eq!(scale.to_bits(), from_bits(right.as_ref().unwrap()).to_bits(), "the scale of {name}");
        let input_scale = recorded.input_scale.as_deref().map(from_bits);
        Self { name: name.into(), rows, cols, codes, blocks, scale, input_scale }
    }

    /// The name of the format in settings.
    fn format(&self) -> &'static str {
        if self.blocks.is_some() { "nvfp4" } else { "float8_e4m3fn" }
    }

    /// Some of the rows, as a layer with another name.
    fn part(&self, name: String, rows: Range<usize>) -> Self {
        let slice = |bytes: &[u8]| bytes[bytes.len() / self.rows * rows.start..bytes.len() / self.rows * rows.end].to_vec();
        let (codes, blocks) = (slice(&self.codes), self.blocks.as_deref().map(slice));
        Self { name, rows: rows.len(), codes, blocks, ..self.clone() }
    }

    /// The block scales in tiles.
    fn tiles(&self) -> Vec<u8> {
        let mut tiles = vec![0; scale_bytes(self.rows, self.cols)];
        for (i, scale) in self.blocks.iter().flatten().enumerate() {
            let (row, block) = (i / (self.cols / BLOCK), i % (self.cols / BLOCK));
            tiles[scale_offset(row, block, tiles_along(self.cols))] = *scale;
        }
        tiles
    }

    /// The layer's tensors in a file.
    fn tensors(&self, form: &Form) -> Vec<Plain> {
        let named = |suffix: &str| format!("{}{}.{suffix}", form.prefix, self.name);
        let [scale, input_scale] = if form.marker { ["scale_weight", "scale_input"] } else { ["weight_scale", "input_scale"] };
        let (name, shape, dtype) = (named("weight"), vec![self.rows, self.cols], Dtype::F8_E4M3);
        let mut tensors = match &self.blocks {
            None => vec![Plain { name, dtype, shape, bytes: self.codes.clone() }, Plain::scalar(named(scale), self.scale)],
            Some(blocks) => {
                let turned = || self.codes.iter().map(|byte| byte.rotate_left(4)).collect();
                let bytes = if form.nvfp4.high_first { self.codes.clone() } else { turned() };
                let [rows, along] = [self.rows, self.cols / BLOCK];
                let (shape, scales) = match form.nvfp4.tiled {
                    true => (vec![rows.next_multiple_of(TILE_ROWS), along.next_multiple_of(4)], self.tiles()),
                    false => (vec![rows, along], blocks.clone()),
                };
                vec![
                    Plain { name, dtype: Dtype::U8, shape: vec![self.rows, self.cols / 2], bytes },
                    Plain { name: named(scale), dtype, shape, bytes: scales },
                    Plain::scalar(named("weight_scale_2"), self.scale),
                ]
            }
        };
        tensors.extend(self.input_scale.map(|value| Plain::scalar(named(input_scale), value)));
        if form.settings {
            // 19 or 27 bytes, as Python writes them, so the tensors after them start at odd addresses.
            let bytes = format!("{{\"format\": \"{}\"}}", self.format()).into_bytes();
            tensors.push(Plain { name: named("comfy_quant"), dtype: Dtype::U8, shape: vec![bytes.len()], bytes });
        }
        tensors
    }
}

/// The form in which a program writes a file.
#[derive(Clone, Copy)]
pub struct Form {
    /// The prefix of every name.
    pub prefix: &'static str,
    /// Declare quantized layers in the metadata.
    pub metadata: bool,
    /// Declare each quantized layer by a tensor next to it.
    pub settings: bool,
    /// Declare all quantized layers by the tensor `scaled_fp8`, and name scales as such files do.
    pub marker: bool,
    /// Add ModelOpt's entry to the metadata.
    pub modelopt: bool,
    /// The NVFP4 layout.
    pub nvfp4: Nvfp4Layout,
}

impl Form {
    /// No declaration at all.
    pub const BARE: Self =
        Self { prefix: "", metadata: false, settings: false, marker: false, modelopt: false, nvfp4: Nvfp4Layout::COMFY };
    /// As Black Forest Labs write it.
    pub const BFL: Self = Self { metadata: true, ..Self::BARE };
    /// As ComfyUI writes it.
    pub const COMFY: Self = Self { settings: true, ..Self::BARE };
    /// As ComfyUI wrote files before they declared layers.
    pub const LEGACY: Self = Self { marker: true, ..Self::BARE };
    /// ModelOpt's export for diffusers.
    pub const MODELOPT: Self = Self { modelopt: true, nvfp4: Nvfp4Layout::MODELOPT, ..Self::BARE };
    /// ModelOpt's single file for ComfyUI.
    pub const MODELOPT_SINGLE: Self = Self { modelopt: true, nvfp4: Nvfp4Layout::MODELOPT_SINGLE, ..Self::BFL };
}

/// Changes a layer, given all layers before any change.
pub type Change = fn(&mut Layer, &[Layer]);

/// The content of a file.
#[derive(Clone)]
pub struct Content {
    pub layers: Vec<Layer>,
    pub plain: Vec<Plain>,
}

impl Content {
    /// The content of the file with this name in `quantized.json`.
    pub fn of(file: &str) -> &'static Self {
        static ALL: LazyLock<BTreeMap<&str, Content>> =
            LazyLock::new(|| ["fp8", "nvfp4", "fp8mixed"].into_iter().map(|file| (file, Content::build(file))).collect());
        &ALL[file]
    }

    /// Quantizes the tiny model, and checks that scales and bytes equal the recorded ones.
    fn build(file: &str) -> Self {
        let recorded = &RECORDED.layers[file];
        let part = if file == "fp8mixed" { Component::TextEncoder } else { Component::Transformer };
        let (mut layers, mut plain) = (Vec::new(), Vec::new());
        for tensor in plain_tensors(part, Layout::Bfl) {
            let layer = tensor.name.strip_suffix(".weight").and_then(|name| recorded.get(name));
            match layer.filter(|layer| layer.format != "bf16") {
                Some(layer) => layers.push(Layer::new(&tensor, layer)),
                None => plain.push(tensor),
            }
        }
        assert_eq!(layers.len(), recorded.values().filter(|layer| layer.format != "bf16").count(), "{file}");
        for (name, sample) in &RECORDED.samples[file] {
            let layer = layers.iter().find(|layer| layer.name == *name).unwrap();
            let packed = if layer.blocks.is_some() { 2 } else { 1 };
            assert_eq!([layer.rows, layer.cols / packed], sample.weight_shape, "{file}: {name}");
            assert_eq!(hash(&layer.codes), sample.weight_fnv1a, "{file}: elements of {name}");
            assert_eq!(
                layer.blocks.as_ref().map(|_| hash(&layer.tiles())),
                sample.weight_scale_fnv1a,
                "{file}: scales of {name}"
            );
        }
        Self { layers, plain }
    }

    /// This transformer under the names of diffusers, which has separate layers for queries, keys and values.
    pub fn with_names_of_diffusers(&self) -> Self {
        let split = |layer: &Layer| {
            let names = names_of_diffusers(&layer.name);
            let rows = layer.rows / names.len();
            names.into_iter().enumerate().map(move |(i, name)| layer.part(name, i * rows..(i + 1) * rows)).collect::<Vec<_>>()
        };
        let layers: Vec<Layer> = self.layers.iter().flat_map(split).collect();
        let mut plain = plain_tensors(Component::Transformer, Layout::Diffusers);
        plain.retain(|tensor| !layers.iter().any(|layer| format!("{}.weight", layer.name) == tensor.name));
        Self { layers, plain }
    }

    /// This content with some transformer layers in bf16.
    pub fn with_plain_layers(&self, is_plain: impl Fn(&str) -> bool) -> Self {
        let layers: Vec<Layer> = self.layers.iter().filter(|layer| !is_plain(&layer.name)).cloned().collect();
        let mut plain = plain_tensors(Component::Transformer, Layout::Bfl);
        plain.retain(|tensor| !layers.iter().any(|layer| format!("{}.weight", layer.name) == tensor.name));
        Self { layers, plain }
    }

    /// This content with every layer changed.
    pub fn changed(&self, change: Change) -> Self {
        let mut content = self.clone();
        content.layers.iter_mut().for_each(|layer| change(layer, &self.layers));
        content
    }

    /// The bytes of the file.
    pub fn file(&self, form: Form) -> Vec<u8> {
        let prefixed = |tensor: &Plain| Plain { name: format!("{}{}", form.prefix, tensor.name), ..tensor.clone() };
        let mut tensors: Vec<Plain> = self.plain.iter().map(prefixed).collect();
        tensors.extend(self.layers.iter().flat_map(|layer| layer.tensors(&form)));
        if form.marker {
            let name = format!("{}scaled_fp8", form.prefix);
            tensors.push(Plain { name, dtype: Dtype::F8_E4M3, shape: vec![0], bytes: Vec::new() });
        }
        let mut metadata = HashMap::new();
        if form.metadata {
            let settings = |layer: &Layer| (format!("{}{}", form.prefix, layer.name), json!({ "format": layer.format() }));
            let layers: Map<_, _> = self.layers.iter().map(settings).collect();
            metadata.insert("_quantization_metadata".into(), json!({ "format_version": "1.0", "layers": layers }).to_string());
        }
        if form.modelopt {
            let config = json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" });
            metadata.insert("quantization_config".into(), config.to_string());
        }
        written(&tensors, metadata)
    }
}

/// The bytes of a file with these tensors. `metadata` may be empty.
pub fn written(tensors: &[Plain], metadata: HashMap<String, String>) -> Vec<u8> {
    let views = tensors.iter().map(|t| (&t.name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize(views, (!metadata.is_empty()).then_some(metadata)).unwrap()
}

/// The diffusers layers that hold the rows of a layer of the original layout, in order. Written out here, independent of the tables under
/// test.
fn names_of_diffusers(layer: &str) -> Vec<String> {
    let parts: Vec<&str> = layer.split('.').collect();
    let block = match parts[0] {
        "double_blocks" => format!("transformer_blocks.{}", parts[1]),
        _ => format!("single_transformer_blocks.{}", parts[1]),
    };
    let names: &[&str] = match parts[2..] {
        ["img_attn", "qkv"] => &["attn.to_q", "attn.to_k", "attn.to_v"],
        ["txt_attn", "qkv"] => &["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
        ["img_attn", "proj"] => &["attn.to_out.0"],
        ["txt_attn", "proj"] => &["attn.to_add_out"],
        ["img_mlp", "0"] => &["ff.linear_in"],
        ["img_mlp", "2"] => &["ff.linear_out"],
        ["txt_mlp", "0"] => &["ff_context.linear_in"],
        ["txt_mlp", "2"] => &["ff_context.linear_out"],
        ["linear1"] => &["attn.to_qkv_mlp_proj"],
        ["linear2"] => &["attn.to_out"],
        _ => panic!("no name for {layer}"),
    };
    names.iter().map(|name| format!("{block}.{name}")).collect()
}

/// The weights of a component, from a file in memory.
pub fn weights(part: Component, file: Vec<u8>) -> Weights {
    let shard = Shard::from_bytes(&format!("quantized {part}"), Bytes::new(Arc::new(file))).unwrap();
    Weights::from_shards(part, vec![shard]).unwrap()
}

/// Prompt tokens for tests that compare runs with each other, which saves most of the text encoder's work. Recorded outputs have 512.
pub const SHORT: usize = 16;

/// The tiny model with this transformer and, if given, this text encoder.
pub fn model(transformer: Weights, text_encoder: Option<Weights>, max_text_tokens: usize) -> OpenModel {
    let [own, vae] = [Component::TextEncoder, Component::Vae].map(|part| tiny_model(Layout::Bfl).weights(part).unwrap());
    let weights = PerComponent { transformer, text_encoder: text_encoder.unwrap_or(own), vae };
    opened(weights, Variant::Distilled, ModelDefaults { max_text_tokens, ..ModelDefaults::klein() })
}

/// An engine of this model on a backend.
pub fn engine(backend: Box<dyn Backend>, model: OpenModel, options: LoadOptions) -> Engine {
    Engine::load(backend, model, options, &Silent).unwrap()
}
