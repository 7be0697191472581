//! Chooses the layers to quantize, and their formats: the official files' choice, without the layers that a user keeps.

use super::layout::LayerSpec;
use super::pattern;
use crate::config::{ModelSpec, TransformerConfig, Variant};
use crate::error::{Error, Result};
use crate::names::{LayerId, LayerRole};
use crate::tensor::{DType, Scale, ScaleKind};
use crate::text::nearest;

/// The choice of layers for one part of a model.
#[derive(Clone, Debug)]
pub struct Policy {
    format: DType,
    /// Patterns of layers that stay in BF16.
    wider: Vec<String>,
}

impl Policy {
    /// The policy for a transformer: the layers that the official files of this size and variant quantize, without those that match `keep`.
    pub fn transformer(config: &TransformerConfig, variant: Variant, format: DType, keep: &[String]) -> Self {
        let kept = ModelSpec::of(config, variant).map_or(&[][..], |model| model.kept).iter();
        let official = kept.filter(|(kept, _)| *kept == format).map(|(_, pattern)| (*pattern).to_owned());
        Self { format, wider: official.chain(keep.iter().cloned()).collect() }
    }

    /// The policy for a text encoder: all linear layers that do not match `keep`. The official files mix formats layer by layer, by no
    /// rule. kiln uses NVFP4 for the MLPs, two thirds of the weights, and FP8 for attention.
    pub fn text_encoder(format: DType, keep: &[String]) -> Self {
        Self { format, wider: keep.to_vec() }
    }

    /// The format of a layer, or `None` if it stays in BF16. Layers in blocks can be quantized. Embedders, modulations and the last
    /// layers cannot.
    pub fn format_of(&self, layer: &LayerSpec) -> Option<DType> {
        let [_, cols] = layer.shape[..] else { return None };
        let id = layer.layer.filter(|id| id.block.is_some())?;
        if self.wider.iter().any(|pattern| pattern::matches(pattern, layer.name())) {
            return None;
        }
        // A row has to divide into whole blocks.
        let in_blocks = cols.is_multiple_of(self.format.format().block)
            && (self.format.bits() >= 8 || !matches!(id.role, LayerRole::EncoderQkv | LayerRole::EncoderOut));
        Some(if in_blocks { self.format } else { DType::E4m3 })
    }
}

/// Fails if a pattern matches no layer, and names the most similar layers.
pub fn check_patterns<'a>(patterns: &[String], layers: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
    for wanted in patterns {
        if layers.clone().any(|layer| pattern::matches(wanted, layer)) {
            continue;
        }
        let near: Vec<String> = nearest(wanted, layers.clone()).iter().map(|layer| format!("`{layer}`")).collect();
        let hint = format!("the nearest are {}; `*` stands for anything, `?` for one character", near.join(", "));
        return Err(Error::usage(format!("no layer matches `{wanted}`"), hint));
    }
    Ok(())
}

/// The scale of an input that was not measured: a constant, by the op that makes the input. Without a scale, NVFP4 uses the input's
/// current largest value, which no constant can replace.
pub fn constant_scale(layer: LayerId, format: DType) -> Option<f32> {
    let scale = layer.producer()?.input_scale(format).filter(|_| format.format().scales != ScaleKind::Blocks);
    scale.map(Scale::get)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Stream::{Image, Text};
    use DType::{E2m1 as Nvfp4, E4m3 as Fp8};

    #[test]
    fn text_encoders_follow_a_simple_rule() {
        let of = |policy: &Policy, name: &str, id: LayerId, shape: &[usize]| {
            LayerSpec::new(format!("{name}.weight"), Some(id), shape.to_vec(), policy).format
        };
        let down = LayerRole::EncoderDown.of_block(7);
        for (layer, id, fp8, nvfp4) in [
            ("model.layers.0.self_attn.q_proj", LayerRole::EncoderQkv.of_block(0), Some(Fp8), Some(Fp8)),
            ("model.layers.35.self_attn.o_proj", LayerRole::EncoderOut.of_block(35), Some(Fp8), Some(Fp8)),
            ("model.layers.7.mlp.down_proj", down, Some(Fp8), Some(Nvfp4)),
            ("model.layers.7.mlp.gate_proj", LayerRole::EncoderGateUp.of_block(7), Some(Fp8), Some(Nvfp4)),
            ("model.embed_tokens", LayerRole::TokenTable.only(), None, None),
        ] {
            assert_eq!(of(&Policy::text_encoder(Fp8, &[]), layer, id, &[256, 128]), fp8, "{layer}");
            assert_eq!(of(&Policy::text_encoder(Nvfp4, &[]), layer, id, &[256, 128]), nvfp4, "{layer}");
        }
        let kept = Policy::text_encoder(Nvfp4, &["*.mlp.*".into()]);
        assert_eq!(of(&kept, "model.layers.7.mlp.down_proj", down, &[256, 128]), None);
        // Rows that do not divide into whole blocks.
        let whole = Policy::text_encoder(Nvfp4, &[]);
        assert_eq!(of(&whole, "model.layers.7.mlp.down_proj", down, &[256, 24]), Some(Fp8));
        assert_eq!(of(&whole, "model.layers.7.self_attn.q_norm", LayerRole::EncoderQueryNorm.of_block(7), &[256]), None);
    }

    #[test]
    fn a_pattern_that_matches_nothing_names_near_layers() {
        let layers = ["single_blocks.0.linear1", "single_blocks.0.linear2", "double_blocks.0.img_attn.qkv", "img_in"];
        assert!(check_patterns(&["*.linear?".into(), "img_in".into()], layers.into_iter()).is_ok());
        let error = check_patterns(&["single_blocks.0.liner1".into()], layers.into_iter()).unwrap_err();
        assert_eq!(error.to_string(), "no layer matches `single_blocks.0.liner1`");
        assert!(error.hint().unwrap().starts_with("the nearest are `single_blocks.0.linear1`, `single_blocks.0.linear2`, "));
    }

    #[test]
    fn constants_follow_the_producer_of_the_input() {
        for (layer, scale) in [
            (LayerRole::Qkv(Image).of_block(0), 1.0),
            (LayerRole::AttentionOut(Text).of_block(0), 1.0),
            (LayerRole::MlpIn(Text).of_block(0), 1.0),
            (LayerRole::MlpOut(Image).of_block(4), 8.0),
            (LayerRole::Linear1.of_block(0), 1.0),
            (LayerRole::Linear2.of_block(19), 8.0),
        ] {
            assert_eq!(constant_scale(layer, Fp8), Some(scale), "{layer}");
            assert_eq!(constant_scale(layer, Nvfp4), None);
        }
    }
}
