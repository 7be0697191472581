//! Guesses which model an adapter was made for, from the widths and block numbers of its layers.

use crate::config::{Configs, ModelSize, SIZES};
use std::collections::BTreeSet;

/// FLUX.1 has the same width as klein 4B, and many of its layer names.
const FLUX1: &str = "FLUX.1";

/// Models other than [`SIZES`] that adapters are made for, each with the width of its transformer and its block counts.
const OTHERS: [(&str, usize, [usize; 2]); 2] = [(FLUX1, 3072, [19, 38]), ("kiln's built-in model", 256, [1, 4])];

/// Block names, with underscores. A name that ends with another one comes before it. A converter cut off the beginning of
/// `transformer_blocks`.
const BLOCKS: [(&str, usize); 4] =
    [("single_transformer_blocks_", 1), ("single_blocks_", 1), ("sformer_blocks_", 0), ("double_blocks_", 0)];

/// Layers whose output has the width of the model. Most other layers have that width as input.
const TO_HIDDEN: [&str; 7] = ["mlp_2", "linear_out", "net_2", "linear2", "proj_out", "img_in", "x_embedder"];

/// Layers of FLUX.1 that FLUX.2 does not have.
const ONLY_FLUX1: [&str; 6] = ["img_mod_", "txt_mod_", "norm1_", "norm_linear", "modulation_lin", "ff_net_"];

/// The name of the model that layers of these names and shapes were made for; `None` if they do not show it.
pub(super) fn likely<'a>(layers: impl IntoIterator<Item = (&'a str, [usize; 2])>) -> Option<String> {
    let mut found = Evidence::default();
    layers.into_iter().for_each(|(name, shape)| found.add(&name.replace('.', "_"), shape));
    found.base()
}

/// Sizes that the layers of an adapter show.
#[derive(Default)]
struct Evidence {
    /// Widths of the transformer. A sound file has one.
    hidden: BTreeSet<usize>,
    /// Widths of the text encoder.
    text: BTreeSet<usize>,
    /// Blocks of each kind: one more than the highest block number.
    blocks: [usize; 2],
    flux1: bool,
}

impl Evidence {
    fn add(&mut self, name: &str, [rows, cols]: [usize; 2]) {
        if name.contains("layers_") && (name.contains("_self_attn_") || name.contains("_mlp_")) {
            let outward = ["o_proj", "down_proj"].iter().any(|end| name.ends_with(end));
            // The input of an output projection has the width of all heads, which may differ.
            self.text.insert(if outward { rows } else { cols });
            return;
        }
        let block = BLOCKS.iter().find_map(|(word, kind)| Some((name.split_once(word)?.1, *kind)));
        let rest = match block.and_then(|(rest, kind)| Some((rest.split_once('_')?, kind))) {
            Some(((number, rest), kind)) => {
                let Ok(number) = number.parse::<usize>() else { return };
                self.blocks[kind] = self.blocks[kind].max(number.saturating_add(1));
                self.flux1 |= ONLY_FLUX1.iter().any(|word| rest.starts_with(word)) || rest.starts_with("ff_context_net_");
                // FLUX.1's MLPs are four times as wide as the model. FLUX.2's have two halves of three times the width.
                let wide = match rest {
                    "linear1" => 7,
                    "img_mlp_0" | "txt_mlp_0" | "proj_mlp" => 4,
                    _ => 0,
                };
                self.flux1 |= wide > 0 && cols.checked_mul(wide) == Some(rows);
                // In single-stream blocks this layer is the whole output. In the others it follows attention.
                if kind == 1 && rest == "attn_to_out" {
                    self.hidden.insert(rows);
                    return;
                }
                rest
            }
            None if ["img_in", "x_embedder", "final_layer_linear", "_lin", "modulation_img_linear", "modulation_txt_linear"]
                .iter()
                .any(|end| name.ends_with(end)) =>
            {
                name
            }
            None => return,
        };
        self.hidden.insert(if TO_HIDDEN.iter().any(|end| rest.ends_with(end)) { rows } else { cols });
    }

    fn base(&self) -> Option<String> {
        let Some(hidden) = only(&self.hidden) else {
            let text = only(&self.text).filter(|_| self.hidden.is_empty())?;
            let size = SIZES.iter().find(|size| size.configs.text_encoder.hidden == text)?;
            return Some(format!("{}, the text encoder of {}", size.encoder, size.name));
        };
        let known = SIZES.iter().map(|ModelSize { name, configs: Configs { transformer, .. }, .. }| {
            (*name, transformer.hidden, [transformer.double_blocks, transformer.single_blocks])
        });
        let fits =
            |(_, width, blocks): &(_, _, [usize; 2])| *width == hidden && (0..2).all(|kind| self.blocks[kind] <= blocks[kind]);
        let mut names: Vec<&str> = known.chain(OTHERS).filter(fits).map(|(name, ..)| name).collect();
        if self.flux1 {
            names.retain(|name| *name == FLUX1);
        } else if names.len() > 1 {
            // Without a sign of FLUX.1, a file is taken as FLUX.2.
            names.retain(|name| *name != FLUX1);
        }
        (!names.is_empty()).then(|| names.join(" or "))
    }
}

/// The element of a set that has exactly one.
fn only(set: &BTreeSet<usize>) -> Option<usize> {
    set.first().copied().filter(|_| set.len() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_and_blocks_tell_the_base() {
        let h = 3072;
        for (layers, base) in [
            (&[("diffusion_model.double_blocks.0.img_attn.qkv", [3 * h, h])][..], Some("FLUX.2 [klein] 4B")),
            (&[("lora_unet_single_blocks_19_linear1", [9 * h, h])], Some("FLUX.2 [klein] 4B")),
            (&[("lora_unet_single_blocks_20_linear2", [h, 5 * h])], Some(FLUX1)),
            (&[("transformer.transformer_blocks.5.attn.to_out.0", [h, h])], Some(FLUX1)),
            (&[("sformer_blocks.0.attn.to_k", [h, h])], Some("FLUX.2 [klein] 4B")),
            (&[("lora_unet_single_blocks_0_linear1", [7 * h, h])], Some(FLUX1)),
            (&[("transformer.single_transformer_blocks.0.proj_mlp", [4 * h, h])], Some(FLUX1)),
            (&[("transformer.transformer_blocks.0.norm1.linear", [6 * h, h])], Some(FLUX1)),
            (&[("lora_unet_double_blocks_0_img_mod_lin", [6 * h, h])], Some(FLUX1)),
            (&[("lora_unet_single_blocks_3_modulation_lin", [3 * h, h])], Some(FLUX1)),
            (&[("transformer.transformer_blocks.2.ff.net.0.proj", [4 * h, h])], Some(FLUX1)),
            (&[("lora_unet_single_stream_modulation_lin", [3 * h, h])], Some("FLUX.2 [klein] 4B")),
            (&[("transformer.single_transformer_blocks.3.attn.to_out", [4096, 4 * 4096])], Some("FLUX.2 [klein] 9B")),
            (&[("x.double_blocks.1.img_mlp.2", [6144, 3 * 6144])], Some("FLUX.2 [dev]")),
            (&[("x_embedder", [4096, 128])], Some("FLUX.2 [klein] 9B")),
            (
                &[("transformer.single_transformer_blocks.1.attn.to_q", [256, 256])],
                Some("kiln's tiny model or kiln's built-in model"),
            ),
            (&[("transformer.single_transformer_blocks.3.attn.to_q", [256, 256])], Some("kiln's built-in model")),
            (
                &[
                    ("lora_te_model_layers_3_mlp_up_proj", [9728, 2560]),
                    ("text_encoder.model.layers.3.self_attn.o_proj", [2560, 4096]),
                ],
                Some("Qwen3-4B, the text encoder of FLUX.2 [klein] 4B"),
            ),
            (&[("double_blocks.0.img_attn.qkv", [300, 100])], None),
            (&[("double_blocks.0.img_attn.qkv", [3 * h, h]), ("double_blocks.1.img_attn.qkv", [300, 100])], None),
            (&[("double_blocks.99999999999999999999.img_attn.qkv", [300, 100]), ("down.3", [1, 1])], None),
        ] {
            assert_eq!(likely(layers.iter().copied()).as_deref(), base, "{layers:?}");
        }
    }
}
