//! The configuration of a model: the sizes of its three parts, its variant and its display name.
//!
//! Sizes are detected from the tensor shapes. A `config.json` next to the weights is checked against them and supplies the
//! numbers that no shape shows. [`ModelDefaults`] are properties that neither of them has.

mod defaults;
mod detect;
mod json;
mod models;
mod preview;
mod variant;

pub use defaults::{Guidance, ModelDefaults};
pub use detect::check_scheduler;
pub use json::ConfigFile;
pub use models::{MODELS, ModelSize, ModelSpec, SIZES, display_name, supported, supported_encoders};
pub use preview::PreviewTable;
pub use variant::{GuidedBy, Variant, VariantSpec};

use crate::error::{Error, Result};

/// Width of an attention head, in the transformer and in the text encoder.
pub const HEAD_DIM: usize = 128;

/// Number of tokens that prompts are padded to.
const TEXT_TOKENS: usize = 512;

/// Sizes of a model's parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Configs {
    /// Sizes of the transformer.
    pub transformer: TransformerConfig,
    /// Sizes of the text encoder.
    pub text_encoder: TextConfig,
    /// Sizes of the VAE.
    pub vae: VaeConfig,
}

/// Sizes of the transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct TransformerConfig {
    /// Hidden size: the width of a token.
    pub hidden: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of double-stream blocks, which have separate weights for text and image.
    pub double_blocks: usize,
    /// Number of single-stream blocks, which have one set of weights.
    pub single_blocks: usize,
    /// Width of a prompt embedding.
    pub context: usize,
    /// Channels of an image token, in and out.
    pub channels: usize,
    /// Epsilon of every norm, added to the variance.
    pub eps: f32,
    /// Base of the RoPE frequencies.
    pub rope_theta: f64,
    /// How many elements of a head are rotated by each of the four position axes.
    pub rope_axes: [usize; 4],
    /// Whether the guidance scale is an input of the model.
    pub guidance_embed: bool,
}

impl TransformerConfig {
    const fn sized(hidden: usize, [double_blocks, single_blocks]: [usize; 2], context: usize) -> Self {
        Self {
            hidden,
            heads: hidden / HEAD_DIM,
            double_blocks,
            single_blocks,
            context,
            channels: 128,
            eps: 1e-6,
            rope_theta: 2000.0,
            rope_axes: [32; 4],
            guidance_embed: false,
        }
    }

    /// Width of the MLP between its two projections.
    pub const fn mlp(&self) -> usize {
        3 * self.hidden
    }
}

/// The language models that serve as text encoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFamily {
    /// Qwen3, the encoder of klein.
    Qwen3,
    /// Mistral Small 3, the encoder of \[dev\].
    Mistral3,
}

/// Properties that the text encoders of a family share.
#[derive(Debug)]
pub struct FamilySpec {
    /// The name of the family's models.
    pub name: &'static str,
    /// Whether queries and keys are normalized before they are rotated.
    pub has_qk_norm: bool,
    /// The layers whose output a FLUX.2 model takes as prompt embeddings, by convention.
    pub text_layers: [usize; 3],
    rope_theta: f64,
    eps: f32,
    /// Model types and classes of Hugging Face's `transformers` library that have the layers of the text encoder.
    model_types: &'static [&'static str],
    classes: &'static [&'static str],
    /// Beginnings of the names of the family's files.
    pub files: &'static [&'static str],
    /// Beginnings of the names of transformer files that need this family.
    pub transformer_files: &'static [&'static str],
}

/// Sizes of the text encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// The family of language models.
    pub family: TextFamily,
    /// Hidden size: the width of a token.
    pub hidden: usize,
    /// Number of layers in the checkpoint, not all of which are run.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Width of the MLP between its projections.
    pub intermediate: usize,
    /// Size of the vocabulary: the rows of the token embedding.
    pub vocab: usize,
    /// Base of the RoPE frequencies.
    pub rope_theta: f64,
    /// Epsilon of every RMS norm, added to the mean square.
    pub eps: f32,
    /// The prompt embeddings are the residual stream after each of these numbers of layers.
    pub text_layers: [usize; 3],
    /// Number of tokens of a padded prompt.
    pub max_tokens: usize,
}

impl TextFamily {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::Qwen3, Self::Mistral3];

    /// The properties that the family's models share.
    pub const fn spec(self) -> &'static FamilySpec {
        match self {
            Self::Qwen3 => &FamilySpec {
                name: "Qwen3",
                has_qk_norm: true,
                text_layers: [9, 18, 27],
                rope_theta: 1e6,
                eps: 1e-6,
                model_types: &["qwen3"],
                classes: &["Qwen3ForCausalLM", "Qwen3Model"],
                files: &["qwen"],
                transformer_files: &["flux-2-klein", "flux2-klein"],
            },
            Self::Mistral3 => &FamilySpec {
                name: "Mistral Small 3",
                has_qk_norm: false,
                text_layers: [10, 20, 30],
                rope_theta: 1e9,
                eps: 1e-5,
                model_types: &["mistral3", "mistral"],
                classes: &["Mistral3ForConditionalGeneration", "Mistral3Model", "MistralForCausalLM", "MistralModel"],
                files: &["mistral"],
                transformer_files: &["flux-2-dev", "flux2-dev", "flux2_dev"],
            },
        }
    }
}

impl TextConfig {
    const fn sized(
        family: TextFamily,
        hidden: usize,
        layers: usize,
        heads: [usize; 2],
        intermediate: usize,
        vocab: usize,
    ) -> Self {
        let FamilySpec { rope_theta, eps, text_layers, .. } = *family.spec();
        let [heads, kv_heads] = heads;
        let max_tokens = TEXT_TOKENS;
        Self { family, hidden, layers, heads, kv_heads, intermediate, vocab, rope_theta, eps, text_layers, max_tokens }
    }

    /// Number of layers that are run: up to the last text layer.
    pub const fn used_layers(&self) -> usize {
        self.text_layers[2]
    }

    /// Width of a prompt embedding: all text layers concatenated.
    pub const fn features(&self) -> usize {
        self.text_layers.len() * self.hidden
    }
}

/// Sizes of the VAE.
#[derive(Clone, Debug, PartialEq)]
pub struct VaeConfig {
    /// Channels of the encoder's levels, finest first.
    pub encoder: [usize; 4],
    /// Channels of the decoder's levels, finest first.
    pub decoder: [usize; 4],
    /// Channels of a latent.
    pub latent: usize,
    /// Number of groups of every group norm.
    pub groups: usize,
    /// Epsilon of every group norm, added to the variance.
    pub eps: f32,
    /// Epsilon of the latents' batch norm, added to their variance.
    pub stats_eps: f32,
    /// The longest side of a tile in pixels, if images are decoded and encoded in tiles; a multiple of 32.
    pub tile: usize,
    /// The colors of latents, if they are known.
    pub preview: Option<PreviewTable>,
}

impl VaeConfig {
    const fn sized(encoder: [usize; 4], decoder: [usize; 4]) -> Self {
        let preview = PreviewTable::of_encoder(encoder);
        Self { encoder, decoder, latent: 32, groups: 32, eps: 1e-6, stats_eps: 1e-4, tile: 1024, preview }
    }

    /// The VAE of all FLUX.2 models.
    const FLUX2: Self = Self::sized([128, 256, 512, 512], [128, 256, 512, 512]);

    /// Channels of a 2x2 patch of latents, which is one image token.
    pub const fn patched(&self) -> usize {
        4 * self.latent
    }
}

/// Checks that the text encoder's prompt embeddings have the width that the transformer reads.
pub fn check_fit(transformer: &TransformerConfig, text: &TextConfig) -> Result<()> {
    if transformer.context == text.features() {
        return Ok(());
    }
    let needs = SIZES.iter().find(|size| size.configs.transformer.context == transformer.context);
    let detail = match needs {
        Some(ModelSize { short, encoder, configs, .. }) => {
            format!("{short} needs {encoder} (hidden {}), found hidden {}", configs.text_encoder.hidden, text.hidden)
        }
        None => {
            let (width, layers) = (transformer.context, text.text_layers.len());
            format!("it needs features of width {width}, found hidden {} x {layers}", text.hidden)
        }
    };
    let found = SIZES.iter().find(|size| size.configs.text_encoder.hidden == text.hidden);
    let hint = found.map(|size| format!("this looks like the encoder of {}", size.short).into());
    Err(Error::Mismatch { part: "text encoder", detail, hint })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_encoder_of_another_size_is_reported() {
        assert!(check_fit(&Configs::KLEIN_4B.transformer, &Configs::KLEIN_4B.text_encoder).is_ok());
        assert!(check_fit(&Configs::KLEIN_9B.transformer, &Configs::KLEIN_9B.text_encoder).is_ok());
        assert!(check_fit(&Configs::TINY.transformer, &Configs::TINY.text_encoder).is_ok());
        let error = check_fit(&Configs::KLEIN_4B.transformer, &Configs::KLEIN_9B.text_encoder).unwrap_err();
        assert_eq!(
            error.to_string(),
            "text encoder does not fit the transformer: klein 4B needs Qwen3-4B (hidden 2560), found hidden 4096"
        );
        assert_eq!(error.hint().unwrap(), "this looks like the encoder of klein 9B");
        let odd = TextConfig { hidden: 1024, ..Configs::KLEIN_4B.text_encoder };
        let error = check_fit(&Configs::KLEIN_9B.transformer, &odd).unwrap_err();
        assert!(error.to_string().contains("klein 9B needs Qwen3-8B (hidden 4096), found hidden 1024"));
        assert_eq!(error.hint(), None);
    }
}
