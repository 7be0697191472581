//! Tensor names. Only this module knows how checkpoints spell them.
//!
//! The engine requests weights by canonical name: the transformer's in the spelling of the original single files, the VAE's in diffusers'
//! spelling, and the text encoder's in Hugging Face's, with q, k, v and gate, up stacked. [`LayerId::canonical`] spells them. [`resolve`]
//! maps the name in a file to the canonical one and to its layer. [`spell`] is the inverse, for messages and for writing. All of them read
//! the same tables.

mod layer;
mod tables;

pub use layer::{LayerId, LayerRole, Stream};

use crate::component::Component;
use crate::config::MODELS;
use tables::{Row, TEXT_ENCODER, TRANSFORMER, VAE, fill, matches};

impl Component {
    fn rows(self) -> &'static [Row] {
        match self {
            Self::Transformer => TRANSFORMER,
            Self::TextEncoder => TEXT_ENCODER,
            Self::Vae => VAE,
        }
    }

    /// The layout whose spelling is canonical. The text encoder has only one layout, and separate canonical names.
    fn canonical_layout(self) -> Option<Layout> {
        match self {
            Self::Transformer => Some(Layout::Bfl),
            Self::TextEncoder => None,
            Self::Vae => Some(Layout::Diffusers),
        }
    }
}

/// The two families of spellings of tensor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Folders written by diffusers.
    Diffusers,
    /// Single files as Black Forest Labs first published them.
    Bfl,
}

/// Rows of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// All rows.
    All,
    /// The first half.
    FirstHalf,
    /// The second half.
    SecondHalf,
}

/// The meaning of a tensor in a file for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A weight, or rows of one.
    Weight(Spelling),
    /// A known tensor that no run reads.
    Unused,
    /// A tensor of another part of an all-in-one checkpoint.
    OtherPart,
    /// A tensor that describes how the weight of this layer is quantized.
    Quantization(String, Companion),
    /// A tensor whose presence means that layers with scales are FP8.
    Fp8Marker,
    /// A tensor that no model of this architecture has.
    Unknown,
}

/// The content of a quantized weight's companion tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Companion {
    /// The scales of the weight: a single one, one for each row, or one for each block.
    WeightScale,
    /// The scale of a whole weight that also has block scales.
    TensorScale,
    /// The scale of the layer's input.
    InputScale,
    /// The quantization settings of the layer as JSON.
    Settings,
    /// Data of an unsupported format.
    Unsupported,
}

/// How a tensor in a file maps to a canonical one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spelling {
    /// The canonical name.
    pub canonical: String,
    /// The layer of a transformer or a text encoder.
    pub layer: Option<LayerId>,
    /// The number of pieces that this spelling splits the canonical tensor into.
    pub pieces: usize,
    /// The pieces that this tensor holds, and in which of its rows.
    pub holds: Vec<(usize, Rows)>,
    /// The layout that uses this spelling; `None` if both do.
    pub layout: Option<Layout>,
    /// The prefix in front of the name in this file.
    pub prefix: &'static str,
}

/// A tensor that a model needs, under its canonical name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Canonical name.
    pub name: String,
    /// The layer of a transformer or a text encoder.
    pub layer: Option<LayerId>,
    /// The tensor's shape.
    pub shape: Vec<usize>,
    /// The row counts of the matrices stacked in the tensor. Another layout may store them as separate tensors. A single matrix has one
    /// entry.
    pub stack: Vec<usize>,
}

impl TensorSpec {
    /// A tensor that is a single matrix, vector or convolution kernel.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), layer: None, shape: shape.to_vec(), stack: shape.iter().take(1).copied().collect() }
    }

    /// The gain of a norm.
    pub fn norm(layer: LayerId, n: usize) -> Self {
        Self { layer: Some(layer), ..Self::new(layer.canonical(), &[n]) }
    }

    /// The weight of a linear layer: stacked matrices with `columns` columns and the row counts `stack`.
    pub fn linear(layer: LayerId, stack: &[usize], columns: usize) -> Self {
        Self { layer: Some(layer), ..Self::stacked(layer.canonical(), stack, columns) }
    }

    /// Stacked matrices with `columns` columns and the row counts `stack`.
    pub fn stacked(name: impl Into<String>, stack: &[usize], columns: usize) -> Self {
        Self { stack: stack.to_vec(), ..Self::new(name, &[stack.iter().sum(), columns]) }
    }
}

/// Prefixes in checkpoints that hold several parts, or that were saved from inside a wrapper. More specific ones come first.
const PREFIXES: [(&str, Component); 6] = [
    ("model.diffusion_model.", Component::Transformer),
    ("model.model.", Component::Transformer),
    ("net.", Component::Transformer),
    ("vae.", Component::Vae),
    // The language model in a vision-language model, as stored and as named in memory.
    ("language_model.", Component::TextEncoder),
    (IN_MEMORY, Component::TextEncoder),
];

/// In this prefix `model.` is included.
const IN_MEMORY: &str = "model.language_model.";

/// Text encoder tensors not used as weights: head, final norm, vocabulary; for vision-language models, vision tower and projector.
const UNUSED_TEXT: [&str; 7] = [
    "lm_head.",
    "model.norm.",
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    VOCABULARY,
];

/// The tensor of bytes in which ComfyUI's encoders of \[dev\] carry their vocabulary.
pub const VOCABULARY: &str = "tekken_model";

/// Suffixes of companion tensors of a quantized weight. The rest of the name is the layer's.
const QUANTIZATION_SUFFIXES: [(&str, Companion); 6] = [
    (".weight_scale", Companion::WeightScale),
    (".weight_scale_2", Companion::TensorScale),
    (".input_scale", Companion::InputScale),
    (".comfy_quant", Companion::Settings),
    // Files with an FP8 marker spell the scales like this.
    (".scale_weight", Companion::WeightScale),
    (".scale_input", Companion::InputScale),
];

/// Names of unsupported quantization formats, by the suffix of a companion tensor that only they store. More specific ones come first.
pub const UNSUPPORTED_QUANTIZERS: [(&str, &str); 11] = [
    (".weight.quant_state.bitsandbytes__nf4", "NF4 (bitsandbytes)"),
    (".weight.quant_state.bitsandbytes__fp4", "FP4 (bitsandbytes)"),
    (".weight.quant_map", "4-bit (bitsandbytes)"),
    (".weight.absmax", "4-bit (bitsandbytes)"),
    (".SCB", "INT8 (bitsandbytes)"),
    (".g_idx", "GPTQ"),
    (".qweight", "AWQ or GPTQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_global_scale", "compressed-tensors"),
    (".weight_scale_inv", "FP8 with scales of square blocks"),
    (".pre_quant_scale", "smoothed by AWQ (pre_quant_scale)"),
];

/// Suffixes of further companion tensors of bitsandbytes, AWQ and GPTQ.
const UNSUPPORTED_SUFFIXES: [&str; 4] = [".weight.nested_absmax", ".weight.nested_quant_map", ".qzeros", ".scales"];

/// Marks of adapters (LoRA and its relatives) in tensor names, as trainers spell them.
const ADAPTER_MARKS: [&str; 15] = [
    ".lora_A",
    ".lora_B",
    ".lora_down.",
    ".lora_up.",
    ".lora_mid.",
    "_lora.down.",
    "_lora.up.",
    ".lora.down.",
    ".lora.up.",
    ".lora_linear_layer.",
    ".lora_magnitude_vector",
    ".dora_scale",
    ".lokr_",
    ".hada_w",
    ".oft_",
];

/// The metadata entry holding the quantization settings of all layers as JSON.
pub const QUANTIZATION_METADATA: &str = "_quantization_metadata";
/// The metadata entry that only ModelOpt writes.
pub const MODELOPT_METADATA: &str = "quantization_config";
/// The metadata entry that names the order in which a file stores NVFP4.
pub const NVFP4_LAYOUT_METADATA: &str = "nvfp4_layout";
/// The tensor that marks a whole file as FP8.
const FP8_MARKER: &str = "scaled_fp8";

/// True for tensors of an adapter, such as a LoRA: a file that modifies a model but is not one.
pub fn is_adapter(name: &str) -> bool {
    ADAPTER_MARKS.iter().any(|mark| name.contains(mark))
}

/// Splits a name into its prefix and the rest, and returns the prefix's part. Without a prefix, any part may own the name.
fn split_prefix(name: &str) -> (&'static str, &str, Option<Component>) {
    let encoders = MODELS.iter().map(|model| (model.size.encoder_prefix, Component::TextEncoder));
    let mut prefixes = PREFIXES.iter().copied().chain(encoders);
    let found = prefixes.find_map(|(prefix, owner)| Some((prefix, name.strip_prefix(prefix)?, Some(owner))));
    found.unwrap_or(("", name, None))
}

/// A name without its prefix.
pub fn without_prefix(name: &str) -> &str {
    split_prefix(name).1
}

/// Whether a tensor is the table of token embeddings, in a file or by its canonical name. Rows that no token uses may be zero.
pub fn is_table(name: &str) -> bool {
    name.contains("embed_tokens")
}

/// Determines the meaning of the tensor `name` of a file for `part`.
pub fn resolve(part: Component, name: &str) -> TensorRole {
    let (prefix, bare, owner) = split_prefix(name);
    if owner.is_some_and(|owner| owner != part) {
        return TensorRole::OtherPart;
    }
    let whole = (prefix == IN_MEMORY).then(|| format!("model.{bare}"));
    let bare = whole.as_deref().unwrap_or(bare);
    if is_unused(part, bare) {
        return TensorRole::Unused;
    }
    if bare == FP8_MARKER {
        return TensorRole::Fp8Marker;
    }
    let unsupported = UNSUPPORTED_QUANTIZERS.map(|(suffix, _)| suffix).into_iter().chain(UNSUPPORTED_SUFFIXES);
    let mut suffixes = QUANTIZATION_SUFFIXES.into_iter().chain(unsupported.map(|suffix| (suffix, Companion::Unsupported)));
    if let Some((layer, kind)) = suffixes.find_map(|(suffix, kind)| Some((name.strip_suffix(suffix)?, kind))) {
        return TensorRole::Quantization(layer.into(), kind);
    }
    // Some files call the learned scale of a query or key norm its weight. kiln renames it.
    let renamed = match bare.strip_suffix("_norm.weight") {
        Some(stem) if part == Component::Transformer => Some(format!("{stem}_norm.scale")),
        _ => None,
    };
    let bare = renamed.as_deref().unwrap_or(bare);
    part.rows().iter().find_map(|row| spelling(part, row, prefix, bare)).map_or(TensorRole::Unknown, TensorRole::Weight)
}

fn spelling(part: Component, row: &Row, prefix: &'static str, name: &str) -> Option<Spelling> {
    let shared = row.other.is_empty();
    let canonical_layout = part.canonical_layout().filter(|_| !shared);
    if let Some(captured) = matches(row.canonical, name) {
        let (layer, holds) = (LayerId::captured(row, &captured), vec![(0, Rows::All)]);
        return Some(Spelling { canonical: name.into(), layer, pieces: 1, holds, layout: canonical_layout, prefix });
    }
    let (piece, captured) =
        row.other.iter().enumerate().find_map(|(i, pattern)| matches(pattern, name).map(|captured| (i, captured)))?;
    let (pieces, holds) = if row.swapped {
        (2, vec![(0, Rows::SecondHalf), (1, Rows::FirstHalf)])
    } else {
        (row.other.len(), vec![(piece, Rows::All)])
    };
    let layout = canonical_layout.map(|canonical| match canonical {
        Layout::Bfl => Layout::Diffusers,
        Layout::Diffusers => Layout::Bfl,
    });
    let layer = LayerId::captured(row, &captured);
    Some(Spelling { canonical: fill(row.canonical, &captured), layer, pieces, holds, layout, prefix })
}

/// The names under which `layout` stores a canonical tensor, in row order. A name that no table lists is returned unchanged.
pub fn spell(part: Component, layout: Layout, canonical: &str) -> Vec<String> {
    let found = part.rows().iter().find_map(|row| matches(row.canonical, canonical).map(|captured| (row, captured)));
    match found {
        Some((row, captured)) if !row.other.is_empty() && part.canonical_layout() != Some(layout) => {
            row.other.iter().map(|pattern| fill(pattern, &captured)).collect()
        }
        _ => vec![canonical.into()],
    }
}

/// The tensors that a file in `layout` holds for a canonical one.
pub fn file_tensors(part: Component, layout: Layout, spec: &TensorSpec) -> Vec<TensorSpec> {
    let names = spell(part, layout, &spec.name);
    if names.len() == 1 {
        let mut shape = spec.shape.clone();
        // The original VAE stores its attention projections as 1x1 convolutions.
        if part == Component::Vae && layout == Layout::Bfl && shape.len() == 2 {
            shape.extend([1, 1]);
        }
        return names.into_iter().map(|name| TensorSpec::new(name, &shape)).collect();
    }
    let rows = spec.stack.iter().copied();
    names.into_iter().zip(rows).map(|(name, rows)| TensorSpec::new(name, &[&[rows], &spec.shape[1..]].concat())).collect()
}

/// True for tensors that every checkpoint may have and no run reads.
pub fn is_unused(part: Component, name: &str) -> bool {
    match part {
        Component::Transformer => false,
        Component::TextEncoder => UNUSED_TEXT.iter().any(|unused| name.starts_with(unused)),
        Component::Vae => name == "bn.num_batches_tracked",
    }
}

/// The text encoder layer that a tensor belongs to, with any prefix. The model's defaults decide which layers are used, and a checkpoint
/// may have more.
pub fn text_layer(name: &str) -> Option<usize> {
    let prefix = ".layers.";
    block_index(&name[name.find(prefix)?..], prefix)
}

/// The number after `prefix` in a name such as `double_blocks.3.img_mlp.0.weight`.
pub fn block_index(name: &str, prefix: &str) -> Option<usize> {
    let (index, _) = name.strip_prefix(prefix)?.split_once('.')?;
    tables::number(index)
}

#[cfg(test)]
mod tests {
    use super::tables::Captured;
    use super::*;

    fn weight(part: Component, name: &str) -> Spelling {
        match resolve(part, name) {
            TensorRole::Weight(spelling) => spelling,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn split_projections_are_rows_of_one_tensor() {
        let key = weight(Component::Transformer, "transformer_blocks.3.attn.to_k.weight");
        assert_eq!(key.canonical, "double_blocks.3.img_attn.qkv.weight");
        assert_eq!((key.pieces, key.holds, key.layout), (3, vec![(1, Rows::All)], Some(Layout::Diffusers)));
        for prefix in ["language_model.model", "model.language_model", "text_encoders.mistral3_24b.transformer.model", "model"] {
            let value = weight(Component::TextEncoder, &format!("{prefix}.layers.3.self_attn.v_proj.weight"));
            assert_eq!(
                (value.canonical.as_str(), value.holds),
                ("model.layers.3.self_attn.qkv_proj.weight", vec![(2, Rows::All)])
            );
            let scale = resolve(Component::TextEncoder, &format!("{prefix}.layers.3.mlp.up_proj.weight_scale"));
            assert_eq!(scale, TensorRole::Quantization(format!("{prefix}.layers.3.mlp.up_proj"), Companion::WeightScale));
            assert_eq!(text_layer(&format!("{prefix}.layers.31.mlp.up_proj.weight")), Some(31));
        }
        let up = weight(Component::TextEncoder, "text_encoders.qwen3_8b.transformer.model.layers.26.mlp.up_proj.weight");
        assert_eq!((up.canonical.as_str(), up.holds), ("model.layers.26.mlp.gate_up_proj.weight", vec![(1, Rows::All)]));
    }

    #[test]
    fn the_final_modulation_swaps_its_halves_in_one_layout_only() {
        let swapped = weight(Component::Transformer, "norm_out.linear.weight");
        assert_eq!(swapped.canonical, "final_layer.adaLN_modulation.1.weight");
        assert_eq!(swapped.holds, [(0, Rows::SecondHalf), (1, Rows::FirstHalf)]);
        let plain = weight(Component::Transformer, "model.diffusion_model.final_layer.adaLN_modulation.1.weight");
        assert_eq!((plain.canonical, plain.holds), (swapped.canonical, vec![(0, Rows::All)]));
        assert_eq!(plain.prefix, "model.diffusion_model.");
    }

    #[test]
    fn decoder_levels_run_backwards_in_the_original_files() {
        for (file, canonical) in [
            ("decoder.up.3.block.2.conv1.bias", "decoder.up_blocks.0.resnets.2.conv1.bias"),
            ("decoder.up.0.block.0.nin_shortcut.weight", "decoder.up_blocks.3.resnets.0.conv_shortcut.weight"),
            ("vae.decoder.up.1.upsample.conv.weight", "decoder.up_blocks.2.upsamplers.0.conv.weight"),
            ("encoder.down.1.block.0.norm2.weight", "encoder.down_blocks.1.resnets.0.norm2.weight"),
            ("decoder.mid.block_2.conv2.bias", "decoder.mid_block.resnets.1.conv2.bias"),
            ("encoder.mid.attn_1.proj_out.weight", "encoder.mid_block.attentions.0.to_out.0.weight"),
            ("encoder.quant_conv.bias", "quant_conv.bias"),
            ("decoder.post_quant_conv.weight", "post_quant_conv.weight"),
            ("decoder.norm_out.weight", "decoder.conv_norm_out.weight"),
        ] {
            let found = weight(Component::Vae, file);
            assert_eq!((found.canonical.as_str(), found.layout), (canonical, Some(Layout::Bfl)));
            assert_eq!(spell(Component::Vae, Layout::Bfl, canonical), [file.trim_start_matches("vae.")]);
        }
        assert_eq!(weight(Component::Vae, "decoder.conv_in.weight").layout, None);
    }

    #[test]
    fn query_norms_may_be_called_scale_or_weight() {
        for suffix in ["scale", "weight"] {
            let name = format!("single_blocks.7.norm.key_norm.{suffix}");
            assert_eq!(weight(Component::Transformer, &name).canonical, "single_blocks.7.norm.key_norm.scale");
        }
    }

    #[test]
    fn other_tensors_are_classified() {
        let companion = |layer: &str, kind| TensorRole::Quantization(layer.into(), kind);
        for (part, name, place) in [
            (Component::TextEncoder, "lm_head.weight", TensorRole::Unused),
            (Component::TextEncoder, "model.norm.weight", TensorRole::Unused),
            (Component::TextEncoder, "language_model.lm_head.weight", TensorRole::Unused),
            (Component::TextEncoder, "model.language_model.norm.weight", TensorRole::Unused),
            (Component::TextEncoder, "vision_tower.transformer.layers.0.attention.q_proj.weight", TensorRole::Unused),
            (Component::TextEncoder, "model.multi_modal_projector.norm.weight", TensorRole::Unused),
            (Component::TextEncoder, "tekken_model", TensorRole::Unused),
            (Component::Vae, "bn.num_batches_tracked", TensorRole::Unused),
            (Component::Vae, "model.diffusion_model.img_in.weight", TensorRole::OtherPart),
            (Component::Transformer, "vae.decoder.conv_in.weight", TensorRole::OtherPart),
            (Component::TextEncoder, "lm_head.weight_scale", TensorRole::Unused),
            (Component::Transformer, "img_in.weight_scale", companion("img_in", Companion::WeightScale)),
            (Component::Transformer, "img_in.weight_scale_2", companion("img_in", Companion::TensorScale)),
            (Component::Transformer, "img_in.scale_input", companion("img_in", Companion::InputScale)),
            (Component::Transformer, "img_in.weight_packed", companion("img_in", Companion::Unsupported)),
            (Component::Transformer, "net.img_in.comfy_quant", companion("net.img_in", Companion::Settings)),
            (Component::TextEncoder, "net.img_in.comfy_quant", TensorRole::OtherPart),
            (Component::Transformer, "scaled_fp8", TensorRole::Fp8Marker),
            (Component::Transformer, "model.diffusion_model.scaled_fp8", TensorRole::Fp8Marker),
            (Component::Transformer, "double_blocks.0.img_mod.lin.weight", TensorRole::Unknown),
            (Component::Transformer, "double_blocks.00.img_mlp.0.weight", TensorRole::Unknown),
            (Component::Transformer, "double_blocks.99999.img_mlp.0.weight", TensorRole::Unknown),
            (Component::Transformer, "double_blocks..img_mlp.0.weight", TensorRole::Unknown),
            (Component::Vae, "decoder.up.4.block.0.conv1.weight", TensorRole::Unknown),
            (Component::Transformer, "", TensorRole::Unknown),
        ] {
            assert_eq!(resolve(part, name), place, "{name}");
        }
    }

    #[test]
    fn adapters_are_recognized() {
        for name in [
            "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",
            "base_model.model.double_blocks.0.img_attn.qkv.lora_B.default.weight",
            "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
            "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
            "transformer.double_blocks.0.img_attn.qkv.0.lora_up.weight",
            "unet.attn.to_q_lora.down.weight",
            "attn.to_q.lora_linear_layer.up.weight",
            "lycoris_transformer_blocks_0_attn_to_q.lokr_w1",
            "lycoris_transformer_blocks_0_attn_to_q.hada_w1_a",
            "x.lora_A",
        ] {
            assert!(is_adapter(name), "{name}");
        }
        for part in [Component::Transformer, Component::TextEncoder, Component::Vae] {
            assert!(part.rows().iter().all(|row| !is_adapter(row.canonical) && !row.other.iter().any(|name| is_adapter(name))));
        }
    }

    #[test]
    fn layer_numbers_are_parsed_from_names() {
        for (name, layer) in [
            ("model.layers.27.mlp.up_proj.weight", Some(27)),
            ("text_encoders.qwen3_4b.transformer.model.layers.0.x", Some(0)),
            ("model.layers.01.x", None),
            ("model.layers.7", None),
            ("model.norm.weight", None),
        ] {
            assert_eq!(text_layer(name), layer, "{name}");
        }
    }

    #[test]
    fn every_spelling_resolves_to_its_canonical_name() {
        for part in [Component::Transformer, Component::TextEncoder, Component::Vae] {
            for row in part.rows() {
                let captured = Captured { number: 2, block: 1, side: "encoder", op: "norm2", leaf: "bias" };
                let canonical = fill(row.canonical, &captured);
                for layout in [Layout::Diffusers, Layout::Bfl] {
                    let names = spell(part, layout, &canonical);
                    for (i, name) in names.iter().enumerate() {
                        let found = weight(part, name);
                        assert_eq!(found.canonical, canonical);
                        assert_eq!(found.layer.map(LayerId::canonical), row.role.map(|_| canonical.clone()));
                        assert!(row.swapped && i == 0 || found.holds == [(i, Rows::All)]);
                    }
                }
            }
        }
    }
}
