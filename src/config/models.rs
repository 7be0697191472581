//! The models that kiln knows. Each is a row of [`MODELS`] with a size from [`SIZES`]; CONTRIBUTING.md says how to add one. Models
//! of other sizes run too, but have no name, no official file names and no list of layers to keep in BF16.

use super::{Configs, TextConfig, TextFamily, TransformerConfig, VaeConfig, Variant};
use crate::tensor::DType::{self, E2m1 as Nvfp4, E4m3 as Fp8};
use Variant::{Base, Dev, Distilled, Kv};

/// A published model.
#[derive(Debug)]
pub struct ModelSpec {
    /// The model's name for `plan`.
    pub name: &'static str,
    /// The model's repository on Hugging Face.
    pub repository: &'static str,
    /// The model's sizes, which other models may share.
    pub size: &'static ModelSize,
    /// How the model was trained, which decides its default settings.
    pub variant: Variant,
    /// Layers that the official quantized files leave in BF16 although others of their kind are quantized, by format and pattern.
    pub kept: &'static [(DType, &'static str)],
}

/// A model size, and the names that depend on it.
#[derive(Debug, PartialEq)]
pub struct ModelSize {
    /// The name that variants of this size share, for display.
    pub name: &'static str,
    /// The short name, for sentences about FLUX.2.
    pub short: &'static str,
    /// The number of parameters in display names.
    pub parameters: &'static str,
    /// The part of official file names that shows this size.
    pub in_file_name: &'static str,
    /// The sizes of the parts.
    pub configs: Configs,
    /// The text encoder's name, for display.
    pub encoder: &'static str,
    /// The beginning of quantized text encoders' file names.
    pub encoder_file: &'static str,
    /// The prefix of text encoder tensors in checkpoints with several parts.
    pub encoder_prefix: &'static str,
}

/// The first one has precedence if several are in the Hugging Face cache.
pub static MODELS: [ModelSpec; 6] = [
    model("klein-4b", "black-forest-labs/FLUX.2-klein-4B", &KLEIN_4B, Distilled, &[]),
    model("klein-9b", "black-forest-labs/FLUX.2-klein-9B", &KLEIN_9B, Distilled, &[(Nvfp4, FIRST_QKV)]),
    model("klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B", &KLEIN_4B, Base, &[(Fp8, FIRST_PROJ), (Nvfp4, FIRST_PROJ)]),
    model(
        "klein-base-9b",
        "black-forest-labs/FLUX.2-klein-base-9B",
        &KLEIN_9B,
        Base,
        &[(Fp8, FIRST_QKV), (Fp8, FIRST_PROJ), (Nvfp4, FIRST_QKV), (Nvfp4, FIRST_PROJ)],
    ),
    // The layers that its official files keep are unknown, so kiln uses the distilled model's.
    model("klein-9b-kv", "black-forest-labs/FLUX.2-klein-9b-kv", &KLEIN_9B, Kv, &[(Nvfp4, FIRST_QKV)]),
    model(
        "dev",
        "black-forest-labs/FLUX.2-dev",
        &DEV,
        Dev,
        &[(Nvfp4, "double_blocks.*.txt_attn.*"), (Fp8, "double_blocks.*_attn.*")],
    ),
];

/// Attention layers of the first block.
const FIRST_QKV: &str = "double_blocks.0.*_attn.qkv";
const FIRST_PROJ: &str = "double_blocks.0.*_attn.proj";

/// All sizes with a name: first the sizes of [`MODELS`], last the tiny model's.
pub static SIZES: [&ModelSize; 4] = [&KLEIN_4B, &KLEIN_9B, &DEV, &TINY];

static KLEIN_4B: ModelSize = ModelSize {
    name: "FLUX.2 [klein] 4B",
    short: "klein 4B",
    parameters: "4B",
    in_file_name: "-4b",
    configs: Configs::KLEIN_4B,
    encoder: "Qwen3-4B",
    encoder_file: "qwen_3_4b",
    encoder_prefix: "text_encoders.qwen3_4b.transformer.",
};

static KLEIN_9B: ModelSize = ModelSize {
    name: "FLUX.2 [klein] 9B",
    short: "klein 9B",
    parameters: "9B",
    in_file_name: "-9b",
    configs: Configs::KLEIN_9B,
    encoder: "Qwen3-8B",
    encoder_file: "qwen_3_8b",
    encoder_prefix: "text_encoders.qwen3_8b.transformer.",
};

static DEV: ModelSize = ModelSize {
    name: "FLUX.2 [dev]",
    short: "[dev]",
    parameters: "32B",
    in_file_name: "",
    configs: Configs::DEV,
    encoder: "Mistral Small 3",
    encoder_file: "mistral_3_small_flux2",
    encoder_prefix: "text_encoders.mistral3_24b.transformer.",
};

static TINY: ModelSize = ModelSize {
    name: "kiln's tiny model",
    short: "the tiny model",
    parameters: "tiny",
    in_file_name: "",
    configs: Configs::TINY,
    encoder: "its own text encoder",
    encoder_file: "qwen_3",
    encoder_prefix: "",
};

impl Configs {
    /// FLUX.2 klein 4B with Qwen3-4B.
    pub const KLEIN_4B: Self = Self::new(3072, [5, 20], TextConfig::sized(TextFamily::Qwen3, 2560, 36, [32, 8], 9728, 151_936));

    /// FLUX.2 klein 9B with Qwen3-8B.
    pub const KLEIN_9B: Self = Self::new(4096, [8, 24], TextConfig::sized(TextFamily::Qwen3, 4096, 36, [32, 8], 12288, 151_936));

    /// FLUX.2 \[dev\] with Mistral Small 3.2 24B.
    pub const DEV: Self =
        Self::new(6144, [8, 48], TextConfig::sized(TextFamily::Mistral3, 5120, 40, [32, 8], 32768, 131_072)).with_guidance();

    /// The architecture of klein, small enough for tests.
    pub const TINY: Self = Self {
        vae: VaeConfig::sized([32, 64, 64, 64], [32, 64, 64, 64]),
        ..Self::new(256, [2, 2], TextConfig::sized(TextFamily::Qwen3, 128, 28, [4, 2], 384, 320))
    };

    /// The architecture of \[dev\], small enough for tests.
    pub const TINY_DEV: Self = Self {
        vae: Self::TINY.vae,
        ..Self::new(256, [2, 2], TextConfig::sized(TextFamily::Mistral3, 128, 31, [8, 2], 384, 1280)).with_guidance()
    };

    const fn new(hidden: usize, blocks: [usize; 2], text_encoder: TextConfig) -> Self {
        Self {
            transformer: TransformerConfig::sized(hidden, blocks, text_encoder.features()),
            text_encoder,
            vae: VaeConfig::FLUX2,
        }
    }

    const fn with_guidance(self) -> Self {
        Self { transformer: TransformerConfig { guidance_embed: true, ..self.transformer }, ..self }
    }
}

impl ModelSpec {
    /// Finds a model by name.
    pub fn named(name: &str) -> Option<&'static Self> {
        MODELS.iter().find(|model| model.name == name)
    }

    /// Finds the model with these sizes and this variant, or else another variant with these sizes.
    pub fn of(config: &TransformerConfig, variant: Variant) -> Option<&'static Self> {
        let sized = || MODELS.iter().filter(|model| model.size.is_of(config));
        sized().find(|model| model.variant == variant).or(sized().next())
    }
}

impl ModelSize {
    /// Finds the named size that matches a transformer.
    pub fn of(config: &TransformerConfig) -> Option<&'static Self> {
        SIZES.into_iter().find(|size| size.is_of(config))
    }

    fn is_of(&self, config: &TransformerConfig) -> bool {
        let sizes = |config: &TransformerConfig| [config.hidden, config.double_blocks, config.single_blocks];
        sizes(&self.configs.transformer) == sizes(config)
    }
}

/// A model's display name, such as `FLUX.2 [klein] 4B (distilled)`, or `FLUX.2 [dev] 32B`.
pub fn display_name(config: &TransformerConfig, variant: Variant) -> String {
    let size = ModelSize::of(config).map_or("of unknown size", |size| size.parameters);
    if variant == Variant::Dev { format!("FLUX.2 [dev] {size}") } else { format!("FLUX.2 [klein] {size} ({variant})") }
}

/// The models that kiln runs, for messages.
pub fn supported() -> String {
    let klein: Vec<&str> = SIZES.iter().filter_map(|size| size.short.strip_prefix("klein ")).collect();
    format!("FLUX.2 [klein] {}, and {}", klein.join(" and "), DEV.name)
}

/// The text encoders of these models, for messages.
pub fn supported_encoders() -> String {
    let published = &SIZES[..SIZES.len() - 1];
    let each = published.iter().enumerate().map(|(i, ModelSize { short, encoder, .. })| match i {
        0 => format!("{short} needs {encoder}"),
        _ if i + 1 == published.len() => format!("and {short} {encoder}"),
        _ => format!("{short} {encoder}"),
    });
    each.collect::<Vec<_>>().join(", ")
}

const fn model(
    name: &'static str,
    repository: &'static str,
    size: &'static ModelSize,
    variant: Variant,
    kept: &'static [(DType, &'static str)],
) -> ModelSpec {
    ModelSpec { name, repository, size, variant, kept }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_found_by_name_and_by_sizes() {
        for model in &MODELS {
            let found = ModelSpec::of(&model.size.configs.transformer, model.variant).map(|found| found.name);
            assert_eq!((found, ModelSpec::named(model.name).map(|found| found.name)), (Some(model.name), Some(model.name)));
            assert!(SIZES.contains(&model.size), "{}", model.name);
        }
        assert!(ModelSpec::named("klein").is_none());
        for (sizes, variant, name) in [
            (Configs::KLEIN_4B, Distilled, "FLUX.2 [klein] 4B (distilled)"),
            (Configs::KLEIN_9B, Kv, "FLUX.2 [klein] 9B (kv)"),
            (Configs::DEV, Dev, "FLUX.2 [dev] 32B"),
        ] {
            assert_eq!(display_name(&sizes.transformer, variant), name);
        }
        assert_eq!(supported(), "FLUX.2 [klein] 4B and 9B, and FLUX.2 [dev]");
        assert_eq!(supported_encoders(), "klein 4B needs Qwen3-4B, klein 9B Qwen3-8B, and [dev] Mistral Small 3");
    }
}
