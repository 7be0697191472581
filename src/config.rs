//! The configuration of a model: the sizes of its three parts, its variant and its display name.
//!
//! Sizes are detected from the shapes of the tensors themselves. A `config.json` beside them is compared with what was found and
//! supplies the numbers that no shape shows. Properties that are in neither of them are [`ModelDefaults`].

mod defaults;
mod detect;
mod json;
mod variant;

pub use defaults::{Guidance, ModelDefaults};
pub use detect::check_scheduler;
pub use json::ConfigFile;
pub use variant::{Variant, display_name};

use crate::error::{Error, Result};

/// Width of an attention head, in the transformer and in the text encoder alike.
pub const HEAD_DIM: usize = 128;

/// Layers of Qwen3 whose output klein takes as prompt embeddings, and layers of Mistral Small whose output \[dev\] takes.
const QWEN3_TAPS: [usize; 3] = [9, 18, 27];
const MISTRAL_TAPS: [usize; 3] = [10, 20, 30];

/// Number of tokens that prompts are padded to.
const TEXT_TOKENS: usize = 512;

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
    const fn sized(hidden: usize, double_blocks: usize, single_blocks: usize, context: usize) -> Self {
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

    /// FLUX.2 klein 4B.
    pub const fn klein_4b() -> Self {
        Self::sized(3072, 5, 20, 7680)
    }

    /// FLUX.2 klein 9B.
    pub const fn klein_9b() -> Self {
        Self::sized(4096, 8, 24, 12288)
    }

    /// FLUX.2 \[dev\].
    pub const fn dev() -> Self {
        Self { guidance_embed: true, ..Self::sized(6144, 8, 48, 15360) }
    }

    /// The same architecture, small enough for tests.
    pub const fn tiny() -> Self {
        Self::sized(256, 2, 2, 384)
    }

    /// The same with the guidance scale as an input, as \[dev\] has it.
    pub const fn tiny_dev() -> Self {
        Self { guidance_embed: true, ..Self::tiny() }
    }

    /// Width of the MLP between its two projections.
    pub const fn mlp(&self) -> usize {
        3 * self.hidden
    }

    /// The size in the display name.
    pub fn size(&self) -> &'static str {
        match (self.hidden, self.double_blocks, self.single_blocks) {
            (3072, 5, 20) => "4B",
            (4096, 8, 24) => "9B",
            (6144, 8, 48) => "32B",
            (256, 2, 2) => "tiny",
            _ => "of unknown size",
        }
    }
}

/// The language models that serve as text encoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFamily {
    /// Qwen3, the encoder of klein: it normalises queries and keys.
    Qwen3,
    /// Mistral Small 3, the encoder of \[dev\].
    Mistral3,
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
    /// The name of its models.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qwen3 => "Qwen3",
            Self::Mistral3 => "Mistral Small 3",
        }
    }

    /// Whether queries and keys are normalised before they are rotated.
    pub const fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3)
    }

    /// The layers whose output a FLUX.2 model takes as prompt embeddings, by convention.
    pub const fn text_layers(self) -> [usize; 3] {
        match self {
            Self::Qwen3 => QWEN3_TAPS,
            Self::Mistral3 => MISTRAL_TAPS,
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
        let (rope_theta, eps) = match family {
            TextFamily::Qwen3 => (1e6, 1e-6),
            TextFamily::Mistral3 => (1e9, 1e-5),
        };
        Self {
            family,
            hidden,
            layers,
            heads: heads[0],
            kv_heads: heads[1],
            intermediate,
            vocab,
            rope_theta,
            eps,
            text_layers: family.text_layers(),
            max_tokens: TEXT_TOKENS,
        }
    }

    /// Qwen3-4B.
    pub const fn klein_4b() -> Self {
        Self::sized(TextFamily::Qwen3, 2560, 36, [32, 8], 9728, 151_936)
    }

    /// Qwen3-8B.
    pub const fn klein_9b() -> Self {
        Self::sized(TextFamily::Qwen3, 4096, 36, [32, 8], 12288, 151_936)
    }

    /// Mistral Small 3.2 24B.
    pub const fn dev() -> Self {
        Self::sized(TextFamily::Mistral3, 5120, 40, [32, 8], 32768, 131_072)
    }

    /// The same architecture, small enough for tests.
    pub const fn tiny() -> Self {
        Self::sized(TextFamily::Qwen3, 128, 28, [4, 2], 384, 320)
    }

    /// That of \[dev\], small enough for tests.
    pub const fn tiny_dev() -> Self {
        Self::sized(TextFamily::Mistral3, 128, 31, [8, 2], 384, 1280)
    }

    /// Number of layers that are run: up to the last tap.
    pub const fn used_layers(&self) -> usize {
        self.text_layers[2]
    }

    /// Width of a prompt embedding: the text_layers concatenated.
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
    /// The longest side of a tile in pixels, where images are decoded and encoded in tiles; a multiple of 32.
    pub tile: usize,
}

impl VaeConfig {
    const fn sized(encoder: [usize; 4], decoder: [usize; 4]) -> Self {
        Self { encoder, decoder, latent: 32, groups: 32, eps: 1e-6, stats_eps: 1e-4, tile: 1024 }
    }

    /// The VAE of klein and of \[dev\].
    pub const fn klein_4b() -> Self {
        Self::sized([128, 256, 512, 512], [128, 256, 512, 512])
    }

    /// The same architecture, small enough for tests.
    pub const fn tiny() -> Self {
        Self::sized([32, 64, 64, 64], [32, 64, 64, 64])
    }

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
    let known = [
        ("klein 4B", "Qwen3-4B", TextConfig::klein_4b().hidden),
        ("klein 9B", "Qwen3-8B", TextConfig::klein_9b().hidden),
        ("[dev]", "Mistral Small 3", TextConfig::dev().hidden),
        ("the tiny model", "its own text encoder", TextConfig::tiny().hidden),
    ];
    let needs = known.iter().find(|(.., hidden)| hidden * text.text_layers.len() == transformer.context);
    let detail = match needs {
        Some((model, encoder, hidden)) => format!("{model} needs {encoder} (hidden {hidden}), found hidden {}", text.hidden),
        None => format!(
            "it needs features of width {}, found hidden {} x {}",
            transformer.context,
            text.hidden,
            text.text_layers.len()
        ),
    };
    let found = known.iter().find(|(.., hidden)| *hidden == text.hidden);
    let hint = found.map(|(model, ..)| format!("this looks like the encoder of {model}").into());
    Err(Error::Mismatch { part: "text encoder", detail, hint })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_encoder_of_another_size_is_reported() {
        assert!(check_fit(&TransformerConfig::klein_4b(), &TextConfig::klein_4b()).is_ok());
        assert!(check_fit(&TransformerConfig::klein_9b(), &TextConfig::klein_9b()).is_ok());
        assert!(check_fit(&TransformerConfig::tiny(), &TextConfig::tiny()).is_ok());
        let error = check_fit(&TransformerConfig::klein_4b(), &TextConfig::klein_9b()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "text encoder does not fit the transformer: klein 4B needs Qwen3-4B (hidden 2560), found hidden 4096"
        );
        assert_eq!(error.hint().unwrap(), "this looks like the encoder of klein 9B");
        let odd = TextConfig { hidden: 1024, ..TextConfig::klein_4b() };
        let error = check_fit(&TransformerConfig::klein_9b(), &odd).unwrap_err();
        assert!(error.to_string().contains("klein 9B needs Qwen3-8B (hidden 4096), found hidden 1024"));
        assert_eq!(error.hint(), None);
    }
}
