//! Finds the model layer that an adapter's layer changes. Names with underscores in place of dots cannot be parsed, so all spellings are
//! generated from the model's own layer names and looked up.

use crate::component::Component;
use crate::config::MODELS;
use crate::names::{self, LayerId, LayerRole, Layout, Rows, TensorSpec};
use crate::text::nearest;
use std::collections::HashMap;
use std::ops::Range;

/// A layer of a model, or some of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTarget {
    /// The model's layer.
    pub id: LayerId,
    /// The rows of that weight that the delta's rows are added to, in order.
    pub rows: Vec<Range<usize>>,
    /// The columns of the weight.
    pub cols: usize,
}

impl LayerTarget {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Prefixes that trainers put in front of transformer names, with dots or underscores.
const TRANSFORMER_PREFIXES: [&str; 6] =
    ["diffusion_model.", "transformer.", "base_model.model.", "model.diffusion_model.", "unet.", "model."];
const FLAT_TRANSFORMER_PREFIXES: [&str; 5] = ["lora_unet_", "lora_transformer_", "lycoris_", "lora_", ""];
/// Prefixes that trainers put in front of text encoder names, which begin with `model.`.
const TEXT_PREFIXES: [&str; 4] = ["text_encoder.", "base_model.model.", "qwen3.transformer.", "transformer."];
const FLAT_TEXT_PREFIXES: [&str; 4] = ["lora_te_", "lora_te1_", "lora_text_encoder_", "lycoris_text_encoder_"];

/// All layers of a model by their spellings.
#[derive(Debug, Default)]
pub struct LayerTargets {
    /// Layers by dotted name without a prefix.
    dotted: HashMap<(Component, String), LayerTarget>,
    /// Layers by name with underscores, without a prefix.
    flat: HashMap<(Component, String), LayerTarget>,
}

impl LayerTargets {
    /// The linear layers among the tensors of these manifests.
    pub fn new<'a>(manifests: impl IntoIterator<Item = &'a TensorSpec>) -> Self {
        let mut targets = Self::default();
        manifests.into_iter().for_each(|spec| targets.add(spec));
        targets
    }

    fn add(&mut self, spec: &TensorSpec) {
        let ([rows, cols], Some(id)) = (&spec.shape[..], spec.layer) else { return };
        let layer = spec.name.trim_end_matches(".weight");
        let target = |rows: Vec<Range<usize>>| LayerTarget { id, rows, cols: *cols };
        let all = || std::iter::once(0..*rows).collect();
        self.spell(layer, target(all()));
        for layout in [Layout::Diffusers, Layout::Bfl] {
            let names = names::spell(id.component(), layout, &spec.name);
            for (piece, name) in names.iter().enumerate() {
                let names::TensorRole::Weight(spelling) = names::resolve(id.component(), name) else { continue };
                let rows = match spelling.holds[..] {
                    // This spelling stores the halves in reverse order.
                    [(0, Rows::SecondHalf), (1, Rows::FirstHalf)] => vec![rows / 2..*rows, 0..rows / 2],
                    _ if names.len() == 1 => all(),
                    _ => vec![piece_of(&spec.stack, piece)],
                };
                self.spell(name.trim_end_matches(".weight"), target(rows));
            }
        }
        // Some trainers give the last layer of a single block its FLUX.1 name.
        if let (LayerRole::Linear2, Some(block)) = (id.role, id.block) {
            self.spell(&format!("single_transformer_blocks.{block}.proj_out"), target(all()));
        }
        // Some trainers store queries, keys and values separately; the model has one layer for all three.
        let stack: Vec<usize> = match id.role {
            LayerRole::Qkv(_) => spec.stack.clone(),
            LayerRole::Linear1 => vec![*cols, *cols, *cols, rows.saturating_sub(3 * cols)],
            _ => return,
        };
        for piece in 0..stack.len() {
            let rows = target(vec![piece_of(&stack, piece)]);
            self.spell(&format!("{layer}.{piece}"), rows.clone());
            if let (LayerRole::Linear1, Some(block)) = (id.role, id.block) {
                let name = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"][piece];
                self.spell(&format!("single_transformer_blocks.{block}.{name}"), rows);
            }
        }
    }

    fn spell(&mut self, layer: &str, target: LayerTarget) {
        let part = target.id.component();
        self.flat.insert((part, layer.replace('.', "_")), target.clone());
        self.dotted.insert((part, layer.to_owned()), target);
    }

    /// Finds the target of an adapter's layer in any spelling.
    pub fn find(&self, layer: &str) -> Option<&LayerTarget> {
        let of = |part: Component, prefixes: &[&str], flat: &[&str]| {
            let bare = without(layer, prefixes);
            // One converter cut off the beginning of this word. Another wrote an underscore in place of a dot.
            let whole = if bare.starts_with("sformer_blocks.") { format!("tran{bare}") } else { bare.to_owned() };
            let dotted = self.dotted.get(&(part, whole.clone()));
            let mut names =
                flat.iter().filter_map(|prefix| layer.strip_prefix(prefix)).map(str::to_owned).chain([whole.replace('.', "_")]);
            dotted.or_else(|| names.find_map(|name| self.flat.get(&(part, name))))
        };
        let encoders = MODELS.iter().map(|model| model.size.encoder_prefix);
        let text_prefixes: Vec<&str> = encoders.chain(TEXT_PREFIXES).collect();
        let text = || of(Component::TextEncoder, &text_prefixes, &FLAT_TEXT_PREFIXES);
        of(Component::Transformer, &TRANSFORMER_PREFIXES, &FLAT_TRANSFORMER_PREFIXES).or_else(text)
    }

    /// The layer with the most similar name, for messages.
    pub fn nearest(&self, layer: &str) -> String {
        let bare = without(without(layer, &TRANSFORMER_PREFIXES), &FLAT_TRANSFORMER_PREFIXES[..4]);
        let names = self.dotted.keys().map(|(_, name)| name.as_str());
        nearest(bare, names).first().map_or_else(String::new, |name| format!("`{name}`"))
    }
}

/// The rows of one matrix in a stack.
fn piece_of(stack: &[usize], piece: usize) -> Range<usize> {
    let first: usize = stack[..piece].iter().sum();
    first..first + stack[piece]
}

/// A name without its prefixes; there may be several.
fn without<'a>(name: &'a str, prefixes: &[&str]) -> &'a str {
    match prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)) {
        Some(rest) => without(rest, prefixes),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Configs;

    #[test]
    fn every_spelling_is_found() {
        let targets = Configs::KLEIN_4B.layer_targets();
        let h = 3072;
        let qkv = "double_blocks.0.img_attn.qkv.weight";
        let linear1 = "single_blocks.7.linear1.weight";
        for (layer, name, rows) in [
            ("diffusion_model.double_blocks.0.img_attn.qkv", qkv, 0..3 * h),
            ("base_model.model.double_blocks.0.img_attn.qkv", qkv, 0..3 * h),
            ("lora_unet_double_blocks_0_img_attn_qkv", qkv, 0..3 * h),
            ("diffusion_model.double_blocks.0.img_attn_qkv", qkv, 0..3 * h),
            ("transformer.transformer_blocks.0.attn.to_q", qkv, 0..h),
            ("transformer_blocks.0.attn.to_v", qkv, 2 * h..3 * h),
            ("diffusion_model.transformer_blocks.0.attn.to_k", qkv, h..2 * h),
            ("sformer_blocks.0.attn.to_k", qkv, h..2 * h),
            ("lycoris_transformer_blocks_0_attn_to_q", qkv, 0..h),
            ("lora_transformer_transformer_blocks_0_attn_to_q", qkv, 0..h),
            ("transformer.double_blocks.0.img_attn.qkv.1", qkv, h..2 * h),
            ("transformer.single_blocks.7.linear1.3", linear1, 3 * h..9 * h),
            ("single_transformer_blocks.7.attn.to_qkv_mlp_proj", linear1, 0..9 * h),
            ("transformer.single_transformer_blocks.7.attn.to_v", linear1, 2 * h..3 * h),
            ("transformer.single_transformer_blocks.7.proj_mlp", linear1, 3 * h..9 * h),
            ("transformer.single_transformer_blocks.7.proj_out", "single_blocks.7.linear2.weight", 0..h),
            ("transformer.single_transformer_blocks.7.attn.to_out", "single_blocks.7.linear2.weight", 0..h),
            ("lora_unet_single_blocks_7_linear2", "single_blocks.7.linear2.weight", 0..h),
            ("diffusion_model.img_in", "img_in.weight", 0..h),
            ("transformer.x_embedder", "img_in.weight", 0..h),
            ("transformer.transformer_blocks.0.ff_context.linear_in", "double_blocks.0.txt_mlp.0.weight", 0..6 * h),
            ("diffusion_model.final_layer.adaLN_modulation.1", "final_layer.adaLN_modulation.1.weight", 0..2 * h),
            ("text_encoder.model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.qkv_proj.weight", 0..4096),
            ("lora_te_model_layers_3_mlp_up_proj", "model.layers.3.mlp.gate_up_proj.weight", 9728..2 * 9728),
        ] {
            let target = targets.find(layer).unwrap_or_else(|| panic!("{layer}"));
            assert_eq!((target.id.canonical().as_str(), &target.rows[..]), (name, &[rows][..]), "{layer}");
        }
        // Here diffusers stores scale before shift.
        let swapped = targets.find("transformer.norm_out.linear").unwrap();
        assert_eq!(swapped.rows, [h..2 * h, 0..h]);
        for layer in [
            "double_blocks.5.img_attn.qkv",
            "diffusion_model.double_blocks.0.img_mod.lin",
            "lora_unet_single_blocks_20_linear1",
            "",
        ] {
            assert_eq!(targets.find(layer), None, "{layer}");
        }
    }

    #[test]
    fn underscored_names_are_unambiguous() {
        let targets = Configs::KLEIN_4B.layer_targets();
        for ((part, name), target) in &targets.dotted {
            assert_eq!(targets.flat.get(&(*part, name.replace('.', "_"))), Some(target), "{name}");
        }
    }
}
