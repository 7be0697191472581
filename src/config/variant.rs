//! The variant of a model: distilled, base or KV of klein, or \[dev\]. Checkpoints of klein of one size have the same tensors, so only file
//! names and the pipeline's index tell them apart.

use super::TransformerConfig;
use super::json::ConfigFile;
use crate::error::{Error, Result};
use crate::tokenizer::Padding;
use std::fmt;
use std::str::FromStr;

/// How a model was trained, and so how it has to be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Sampled in few steps, without guidance.
    Distilled,
    /// Sampled in many steps, with classifier-free guidance.
    Base,
    /// Distilled, with reference tokens that attend only to themselves, so that their keys and values can be cached.
    Kv,
    /// Sampled in many steps, with the guidance scale as an input: FLUX.2 \[dev\].
    Dev,
}

impl Variant {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Distilled, Self::Base, Self::Kv, Self::Dev];

    /// The variant of a transformer: \[dev\] if guidance is one of its inputs. Otherwise it is found from a pipeline's `model_index.json`,
    /// or, without one, from the names of its file, folder or repository.
    pub fn detect(config: &TransformerConfig, index: Option<&ConfigFile>, names: &[&str]) -> Result<Self> {
        let (mut distilled, mut class) = (None, None);
        if let Some(index) = index {
            (distilled, class) = (index.flag("is_distilled")?, index.text("_class_name")?);
            if class.is_some_and(|class| !class.starts_with("Flux2")) {
                return Err(index.unsupported("_class_name", "a pipeline of FLUX.2"));
            }
        }
        if config.guidance_embed {
            return Ok(Self::Dev);
        }
        if index.is_some() {
            if class.is_some_and(|class| class.to_ascii_lowercase().contains("kv")) {
                return Ok(Self::Kv);
            }
            // The key is left out where it would be false.
            return Ok(if distilled.unwrap_or(false) { Self::Distilled } else { Self::Base });
        }
        // Of a path only the last component is the model's name; the folders above it may be called anything.
        let last = |name: &&str| name.trim_end_matches(['/', '\\']).rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
        let names: Vec<String> = names.iter().map(last).collect();
        let has = |word: &str| {
            let mut words = names.iter().flat_map(|name| name.split(|c: char| !c.is_ascii_alphanumeric()));
            words.any(|found| found.eq_ignore_ascii_case(word))
        };
        Ok(if has("kv") {
            Self::Kv
        } else if has("base") {
            Self::Base
        } else {
            Self::Distilled
        })
    }

    /// The default number of steps.
    pub const fn default_steps(self) -> usize {
        match self {
            Self::Distilled | Self::Kv => 4,
            Self::Base | Self::Dev => 50,
        }
    }

    /// Whether classifier-free guidance (CFG) is on at this scale, so that every step runs once with the prompt and once with the
    /// negative prompt. This is the one place where that is decided.
    pub fn uses_cfg(self, scale: f32) -> bool {
        self == Self::Base && scale > 1.0
    }

    /// The default guidance scale; 1 turns guidance off.
    pub const fn default_guidance(self) -> f32 {
        match self {
            Self::Distilled | Self::Kv => 1.0,
            Self::Base | Self::Dev => 4.0,
        }
    }

    /// Where prompts are padded, and with what.
    pub const fn default_padding(self) -> Padding {
        match self {
            Self::Distilled | Self::Base | Self::Kv => Padding::Right,
            Self::Dev => Padding::Left,
        }
    }

    /// Whether a guidance scale makes a difference.
    pub const fn has_guidance(self) -> bool {
        matches!(self, Self::Base | Self::Dev)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Distilled => "distilled",
            Self::Base => "base",
            Self::Kv => "kv",
            Self::Dev => "dev",
        })
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|variant| variant.to_string() == text);
        found.ok_or_else(|| Error::usage(format!("unknown variant `{text}`"), "use distilled, base, kv or dev"))
    }
}

/// A model's display name, such as `FLUX.2 [klein] 4B (distilled)`, or `FLUX.2 [dev] 32B`.
pub fn display_name(config: &TransformerConfig, variant: Variant) -> String {
    if variant == Variant::Dev {
        return format!("FLUX.2 [dev] {}", config.size());
    }
    format!("FLUX.2 [klein] {} ({variant})", config.size())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_detected_from_whole_words() {
        for (name, variant) in [
            ("flux-2-klein-4b.safetensors", Variant::Distilled),
            ("flux-2-klein-base-9b.safetensors", Variant::Base),
            ("flux-2-klein-9b-kv.safetensors", Variant::Kv),
            ("black-forest-labs/FLUX.2-klein-base-4B", Variant::Base),
            ("models/klein-base-4b/", Variant::Base),
            ("/srv/kv/base/klein-4b", Variant::Distilled),
            ("database", Variant::Distilled),
        ] {
            assert_eq!(Variant::detect(&TransformerConfig::klein_4b(), None, &[name]).unwrap(), variant, "{name}");
            assert_eq!(Variant::detect(&TransformerConfig::dev(), None, &[name]).unwrap(), Variant::Dev, "{name}");
        }
    }

    #[test]
    fn variants_round_trip_through_text() {
        for variant in Variant::ALL {
            assert_eq!(variant.to_string().parse::<Variant>().unwrap(), variant);
        }
        assert_eq!("turbo".parse::<Variant>().unwrap_err().exit_code(), 2);
        assert_eq!((Variant::Base.default_steps(), Variant::Base.default_guidance()), (50, 4.0));
        assert!(Variant::Base.uses_cfg(1.5) && !Variant::Base.uses_cfg(1.0) && !Variant::Base.uses_cfg(0.5));
        assert!(!Variant::Distilled.uses_cfg(4.0) && !Variant::Kv.uses_cfg(4.0) && !Variant::Dev.uses_cfg(4.0));
        assert_eq!((Variant::Dev.default_steps(), Variant::Dev.default_guidance()), (50, 4.0));
        assert_eq!((Variant::Kv.default_steps(), Variant::Distilled.default_guidance()), (4, 1.0));
        assert_eq!(display_name(&TransformerConfig::klein_4b(), Variant::Distilled), "FLUX.2 [klein] 4B (distilled)");
        assert_eq!(display_name(&TransformerConfig::klein_9b(), Variant::Kv), "FLUX.2 [klein] 9B (kv)");
        assert_eq!(display_name(&TransformerConfig::dev(), Variant::Dev), "FLUX.2 [dev] 32B");
    }
}
