//! The variant of a model: klein's distilled, base or KV, or \[dev\]. All klein checkpoints of one size have the same tensors, so only file
//! names and the pipeline's index tell them apart.

use super::TransformerConfig;
use super::json::ConfigFile;
use crate::error::{Error, Remedy, Result};
use crate::tokenizer::Padding;
use std::fmt;
use std::str::FromStr;

/// How a model was trained, which decides how it has to be sampled.
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

/// Properties that depend on how a model was trained.
#[derive(Debug)]
pub struct VariantSpec {
    /// The variant's name.
    pub name: &'static str,
    /// The default number of steps.
    pub steps: usize,
    /// The default guidance scale; 1 turns guidance off.
    pub guidance: f32,
    /// How the guidance scale affects the image, if it does.
    pub guided_by: Option<GuidedBy>,
    /// Where prompts are padded, and with what.
    pub padding: Padding,
    /// The parts of official transformer file names before and after the size.
    pub file_name: [&'static str; 2],
}

/// How a guidance scale affects the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuidedBy {
    /// The scale weighs a pass with the prompt against a pass with the negative prompt.
    Cfg,
    /// The scale is an input of the model.
    Input,
}

/// Specs in the order of [`Variant`].
const SPECS: [VariantSpec; 4] = {
    use GuidedBy::{Cfg, Input};
    use Padding::{Left, Right};
    [
        VariantSpec {
            name: "distilled",
            steps: 4,
            guidance: 1.0,
            guided_by: None,
            padding: Right,
            file_name: ["flux-2-klein", ""],
        },
        VariantSpec {
            name: "base",
            steps: 50,
            guidance: 4.0,
            guided_by: Some(Cfg),
            padding: Right,
            file_name: ["flux-2-klein-base", ""],
        },
        VariantSpec { name: "kv", steps: 4, guidance: 1.0, guided_by: None, padding: Right, file_name: ["flux-2-klein", "-kv"] },
        VariantSpec {
            name: "dev",
            steps: 50,
            guidance: 4.0,
            guided_by: Some(Input),
            padding: Left,
            file_name: ["flux2-dev", ""],
        },
    ]
};

impl Variant {
    /// All variants.
    pub const ALL: [Self; 4] = [Self::Distilled, Self::Base, Self::Kv, Self::Dev];

    /// Detects the variant of a transformer: \[dev\] if guidance is one of its inputs. Otherwise a pipeline's `model_index.json` decides,
    /// or, without one, the names of the file, folder or repository.
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
            // The key is left out if it would be false.
            return Ok(if distilled.unwrap_or(false) { Self::Distilled } else { Self::Base });
        }
        // Only a path's last component is the model's name; the folders above it may have any name.
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

    /// Fails if a transformer contradicts the variant: guidance is an input of \[dev\] alone.
    pub fn check(self, config: &TransformerConfig) -> Result<()> {
        let detail = match (self.spec().guided_by == Some(GuidedBy::Input), config.guidance_embed) {
            (true, false) => format!("guidance is an input of `{self}`, and not of these weights"),
            (false, true) => format!("guidance is an input of these weights, and not of `{self}`"),
            _ => return Ok(()),
        };
        Err(Error::Mismatch { part: "variant", detail, hint: Some(Remedy::AnyVariant) })
    }

    /// Whether classifier-free guidance (CFG) is on at this scale. If so, every step runs twice: with the prompt and with the negative
    /// prompt. Only this function decides it.
    pub fn uses_cfg(self, scale: f32) -> bool {
        self.spec().guided_by == Some(GuidedBy::Cfg) && scale > 1.0
    }

    /// The properties of the variant.
    pub const fn spec(self) -> &'static VariantSpec {
        &SPECS[self as usize]
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().name)
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|variant| variant.spec().name == text);
        found.ok_or_else(|| Error::usage(format!("unknown variant `{text}`"), "use distilled, base, kv or dev"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Configs;

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
            assert_eq!(Variant::detect(&Configs::KLEIN_4B.transformer, None, &[name]).unwrap(), variant, "{name}");
            assert_eq!(Variant::detect(&Configs::DEV.transformer, None, &[name]).unwrap(), Variant::Dev, "{name}");
        }
    }

    /// The tensors of all klein variants are the same, and \[dev\] has its own.
    #[test]
    fn a_variant_that_contradicts_the_tensors_is_refused() {
        for (config, is_dev) in [(&Configs::KLEIN_9B.transformer, false), (&Configs::DEV.transformer, true)] {
            for variant in Variant::ALL {
                assert_eq!(variant.check(config).is_ok(), is_dev == (variant == Variant::Dev), "{variant}");
            }
        }
    }

    #[test]
    fn variants_round_trip_through_text() {
        for variant in Variant::ALL {
            assert_eq!(variant.to_string().parse::<Variant>().unwrap(), variant);
        }
        assert_eq!("turbo".parse::<Variant>().unwrap_err().exit_code(), 2);
        assert_eq!((Variant::Base.spec().steps, Variant::Base.spec().guidance), (50, 4.0));
        assert!(Variant::Base.uses_cfg(1.5) && !Variant::Base.uses_cfg(1.0) && !Variant::Base.uses_cfg(0.5));
        assert!(!Variant::Distilled.uses_cfg(4.0) && !Variant::Kv.uses_cfg(4.0) && !Variant::Dev.uses_cfg(4.0));
        assert_eq!((Variant::Dev.spec().steps, Variant::Dev.spec().guidance), (50, 4.0));
        assert_eq!((Variant::Kv.spec().steps, Variant::Distilled.spec().guidance), (4, 1.0));
    }
}
