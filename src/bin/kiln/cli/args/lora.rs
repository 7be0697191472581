//! The flags for adapters.

use super::LoraModeArg;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use serde::{Deserialize, Deserializer, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The flags for adapters.
#[derive(Args, Clone, Debug)]
pub struct LoraArgs {
    /// Apply a LoRA or LoKr adapter; may be given several times
    ///
    /// FILE is a safetensors file with any common spelling of layer names, a folder with one such file, or `owner/name` or
    /// `owner/name/file` in the Hugging Face cache. A colon and a number at the end set the scale, as in `style.safetensors:0.8`.
    /// The default scale is 1. If there is a file `a:0.5`, kiln takes no scale from that name. To set a scale, write `a:0.5:1`.
    /// Adapters are added in the order given.
    #[arg(long, value_name = "FILE[:SCALE]", value_parser = OsStringValueParser::new().try_map(LoraArg::parse), help_heading = "Model")]
    pub lora: Vec<LoraArg>,

    /// Allow adapters with layers that the model does not have
    ///
    /// Without this flag such a file is an error, because it is most likely for another model. -v lists the layers that are left out.
    #[arg(long, help_heading = "Model")]
    pub lora_partial: bool,

    /// Choose how adapters are applied
    #[arg(long, value_enum, value_name = "HOW", default_value = "auto", help_heading = "Model")]
    pub lora_mode: LoraModeArg,
}

/// The largest scale. A hundredth of it leaves nothing of the model in the image.
const MOST: f32 = 1000.0;

/// A requested adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoraArg {
    /// A file, a folder, or a name in the Hugging Face cache.
    pub file: PathBuf,
    /// Its scale.
    pub scale: f32,
}

impl LoraArg {
    /// Splits `FILE:SCALE`. A name that is not Unicode has no scale, nor has the name of a file that exists: `a:0.5` is a good name.
    fn parse(text: OsString) -> Result<Self, String> {
        let is_file = Path::new(&text).symlink_metadata().is_ok();
        let split = text.to_str().filter(|_| !is_file).and_then(|text| {
            let (file, scale) = text.rsplit_once(':')?;
            Some((PathBuf::from(file), scale.parse::<f32>().ok()?))
        });
        let (file, scale) = split.unwrap_or_else(|| (text.into(), 1.0));
        let lora = Self { file, scale };
        lora.check().map(|()| lora)
    }

    fn check(&self) -> Result<(), String> {
        if self.file.as_os_str().is_empty() {
            return Err("expected a file, as in style.safetensors or style.safetensors:0.8".into());
        }
        if !(-MOST..=MOST).contains(&self.scale) {
            return Err(format!("expected a scale from -{MOST} to {MOST}, as in style.safetensors:0.8"));
        }
        Ok(())
    }
}

/// Both forms of an adapter in a line of JSON.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected \"FILE\", \"FILE:SCALE\" or {\"file\": \"FILE\", \"scale\": SCALE}")]
enum Spelled {
    Text(String),
    Object(Object),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Object {
    file: PathBuf,
    #[serde(default = "full")]
    scale: f32,
}

/// The scale of an adapter without one.
const fn full() -> f32 {
    1.0
}

impl<'de> Deserialize<'de> for LoraArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let lora = match Spelled::deserialize(deserializer)? {
            Spelled::Text(text) => Self::parse(text.into()),
            Spelled::Object(Object { file, scale }) => {
                let lora = Self { file, scale };
                lora.check().map(|()| lora)
            }
        };
        lora.map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_behind_a_colon_is_the_scale() {
        for (text, file, scale) in [
            ("a.safetensors", "a.safetensors", 1.0),
            ("a.safetensors:0.8", "a.safetensors", 0.8),
            ("a:b.safetensors", "a:b.safetensors", 1.0),
            ("a:2:-0.5", "a:2", -0.5),
            ("owner/name:1e-3", "owner/name", 1e-3),
            ("a:", "a:", 1.0),
            ("a:0", "a", 0.0),
            ("a: 1", "a: 1", 1.0),
        ] {
            assert_eq!(LoraArg::parse(text.into()), Ok(LoraArg { file: file.into(), scale }), "{text}");
        }
        let file = std::env::temp_dir().join(format!("kiln-lora-{}:0.5", std::process::id()));
        std::fs::write(&file, "").unwrap();
        let with_scale = format!("{}:2", file.display());
        assert_eq!(LoraArg::parse(file.clone().into()), Ok(LoraArg { file: file.clone(), scale: 1.0 }));
        assert_eq!(LoraArg::parse(with_scale.into()), Ok(LoraArg { file: file.clone(), scale: 2.0 }));
        std::fs::remove_file(file).unwrap();
        for text in ["", ":1", "a:nan", "a:inf", "a:-Infinity", "a:1e39", "a:1e38", "a:-1001"] {
            assert!(LoraArg::parse(text.into()).unwrap_err().starts_with("expected a "), "{text}");
        }
    }

    #[test]
    fn lines_have_texts_and_objects() {
        let of = |text: &str| serde_json::from_str::<Vec<LoraArg>>(text).map_err(|error| error.to_string());
        let lora = |file: &str, scale| LoraArg { file: file.into(), scale };
        let all = of(r#"["a", "b:0.5", {"file": "c:2"}, {"file": "d", "scale": -1}]"#).unwrap();
        assert_eq!(all, [lora("a", 1.0), lora("b", 0.5), lora("c:2", 1.0), lora("d", -1.0)]);
        assert_eq!(of("[]").unwrap(), []);
        for (wrong, why) in [
            (r#"[""]"#, "expected a file"),
            (r#"["a:nan"]"#, "a scale from -1000 to 1000"),
            (r#"[{"file": "a", "scale": 1e30}]"#, "a scale from -1000 to 1000"),
            (r#"[{"file": "a", "strength": 1}]"#, "FILE:SCALE"),
            ("[3]", "FILE:SCALE"),
            (r#""a""#, "a sequence"),
        ] {
            assert!(of(wrong).unwrap_err().contains(why), "{wrong}: {:?}", of(wrong));
        }
    }
}
