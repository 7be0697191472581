//! Reads the scales that PEFT keeps outside of the tensors: in the file's metadata, or in `adapter_config.json` in its folder.

use crate::checkpoint::Shard;
use crate::error::{Error, Result};
use crate::files;
use crate::json::Unique;
use crate::text;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// The metadata entry in which diffusers stores PEFT's settings.
const ENTRY: &str = "lora_adapter_metadata";
/// The file in which PEFT stores its settings.
const FILE: &str = "adapter_config.json";
/// The largest settings file, in bytes.
const LIMIT: u64 = 1 << 20;

const NO_OBJECT: &str = "they are not a JSON object";

/// The settings of PEFT that decide a scale.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Settings {
    lora_alpha: Option<f32>,
    alpha_pattern: BTreeMap<String, f32>,
    use_rslora: bool,
}

impl Settings {
    /// Checks that every pattern is a layer name, which is what diffusers and trainers write. PEFT reads patterns as regular expressions.
    /// Other expressions are an error, because ignoring them would change scales.
    fn check(self) -> std::result::Result<Self, String> {
        let is_name = |pattern: &String| pattern.chars().all(|c| c.is_alphanumeric() || "._-".contains(c));
        match self.alpha_pattern.keys().find(|pattern| !is_name(pattern)) {
            Some(pattern) => Err(format!("`{}` in alpha_pattern is not the name of a layer", text::shown(pattern))),
            None => Ok(self),
        }
    }

    /// A layer's alpha and its divisor.
    fn of(&self, layer: &str, rank: usize) -> Option<(f32, f32)> {
        // A pattern is a layer's full name, or the end of one.
        let matches = |pattern: &str| {
            let before = layer.strip_suffix(pattern);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let own = self.alpha_pattern.iter().find(|(pattern, _)| matches(pattern)).map(|(_, alpha)| *alpha);
        // The tensors' rank may differ from the settings' rank. The tensors are right.
        let divisor = if self.use_rslora { (rank as f32).sqrt() } else { rank as f32 };
        Some((own.or(self.lora_alpha)?, divisor))
    }
}

/// The prefix that diffusers puts in front of every setting and every layer name.
const TRANSFORMER: &str = "transformer.";
const TEXT_ENCODER: &str = "text_encoder.";

/// The scales of a file's layers.
#[derive(Debug, Default)]
pub struct PeftScales {
    transformer: Option<Settings>,
    /// Settings of layers whose names begin with `text_encoder.`.
    text_encoder: Option<Settings>,
}

impl PeftScales {
    /// Reads the settings, if there are any.
    pub fn read(shard: &Shard) -> Result<Self> {
        let bad = |path: &Path, error: String| Error::bad_file(path, "the settings of this adapter are not readable", error);
        if let Some(text) = shard.metadata().get(ENTRY) {
            let all: Unique = serde_json::from_str(text).map_err(|error| bad(shard.path(), error.to_string()))?;
            let all = all.0.as_object().ok_or_else(|| bad(shard.path(), NO_OBJECT.into()))?;
            let own = |prefix: &str| {
                let own: Map<_, _> =
                    all.iter().filter_map(|(key, value)| Some((key.strip_prefix(prefix)?.into(), value.clone()))).collect();
                let settings = (!own.is_empty()).then(|| settings_of(Value::Object(own))).transpose();
                settings.map_err(|error| bad(shard.path(), error))
            };
            return Ok(Self { transformer: own(TRANSFORMER)?, text_encoder: own(TEXT_ENCODER)? });
        }
        let settings_file = shard.path().with_file_name(FILE);
        let text = match files::read(&settings_file, LIMIT) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Self::default()),
            Err(error) => return Err(bad(&settings_file, error.to_string())),
        };
        let value = serde_json::from_slice(&text).map_err(|error| error.to_string());
        let settings = value.and_then(|Unique(value)| settings_of(value)).map_err(|error| bad(&settings_file, error))?;
        Ok(Self { transformer: Some(settings), text_encoder: None })
    }

    /// A layer's alpha and its divisor.
    pub fn of(&self, layer: &str, rank: usize) -> Option<(f32, f32)> {
        let text = self.text_encoder.as_ref().filter(|_| layer.starts_with(TEXT_ENCODER));
        text.or(self.transformer.as_ref())?.of(layer, rank)
    }
}

fn settings_of(value: Value) -> std::result::Result<Settings, String> {
    // serde would accept a list as the settings in order.
    if !value.is_object() {
        return Err(NO_OBJECT.into());
    }
    let settings: Settings = serde_json::from_value(value).map_err(|error| error.to_string())?;
    settings.check()
}
