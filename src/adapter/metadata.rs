//! The scales that PEFT keeps beside its tensors: in the metadata of the file, or in `adapter_config.json` in its folder.

use crate::checkpoint::Shard;
use crate::error::{Error, Result};
use crate::files;
use crate::text;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// The metadata entry in which diffusers stores PEFT's settings.
const ENTRY: &str = "lora_adapter_metadata";
/// The file in which PEFT itself does.
const FILE: &str = "adapter_config.json";
/// The largest such file, in bytes.
const LIMIT: u64 = 1 << 20;

/// PEFT's settings, as far as they decide a scale.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Settings {
    lora_alpha: Option<f32>,
    alpha_pattern: BTreeMap<String, f32>,
    use_rslora: bool,
}

impl Settings {
    /// PEFT takes its patterns for regular expressions. Names of layers, which is what diffusers and trainers write, are understood here, and
    /// others are an error, because they would change scales.
    fn check(self) -> std::result::Result<Self, String> {
        let is_name = |pattern: &String| pattern.chars().all(|c| c.is_alphanumeric() || "._-".contains(c));
        match self.alpha_pattern.keys().find(|pattern| !is_name(pattern)) {
            Some(pattern) => Err(format!("`{}` in alpha_pattern is not the name of a layer", text::shown(pattern))),
            None => Ok(self),
        }
    }

    /// Alpha of a layer and what it is divided by.
    fn of(&self, layer: &str, rank: usize) -> Option<(f32, f32)> {
        // A pattern is the end of a layer's name, or all of it.
        let matches = |pattern: &str| {
            let before = layer.strip_suffix(pattern);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let own = self.alpha_pattern.iter().find(|(pattern, _)| matches(pattern)).map(|(_, alpha)| *alpha);
        // The rank of a layer may differ from that of the settings, and is the true one.
        let divisor = if self.use_rslora { (rank as f32).sqrt() } else { rank as f32 };
        Some((own.or(self.lora_alpha)?, divisor))
    }
}

/// What diffusers puts in front of every setting, and of the names of layers.
const TRANSFORMER: &str = "transformer.";
const TEXT_ENCODER: &str = "text_encoder.";

/// The scales of a file's layers.
#[derive(Debug, Default)]
pub struct PeftScales {
    transformer: Option<Settings>,
    /// Those of layers whose names begin with `text_encoder.`.
    text_encoder: Option<Settings>,
}

impl PeftScales {
    /// Reads what there is.
    pub fn read(shard: &Shard) -> Result<Self> {
        let bad = |path: &Path, error: String| Error::bad_file(path, "the settings of this adapter are not readable", error);
        if let Some(text) = shard.metadata().get(ENTRY) {
            let all: BTreeMap<String, Value> =
                serde_json::from_str(text).map_err(|error| bad(shard.path(), error.to_string()))?;
            let own = |prefix: &str| {
                let own: Map<_, _> =
                    all.iter().filter_map(|(key, value)| Some((key.strip_prefix(prefix)?.into(), value.clone()))).collect();
                let settings = (!own.is_empty()).then(|| settings_of(Value::Object(own))).transpose();
                settings.map_err(|error| bad(shard.path(), error))
            };
            return Ok(Self { transformer: own(TRANSFORMER)?, text_encoder: own(TEXT_ENCODER)? });
        }
        let beside = shard.path().with_file_name(FILE);
        let text = match files::read(&beside, LIMIT) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Self::default()),
            Err(error) => return Err(bad(&beside, error.to_string())),
        };
        let value = serde_json::from_slice(&text).map_err(|error| error.to_string());
        let settings = value.and_then(settings_of).map_err(|error| bad(&beside, error))?;
        Ok(Self { transformer: Some(settings), text_encoder: None })
    }

    /// Alpha of a layer and what it is divided by.
    pub fn of(&self, layer: &str, rank: usize) -> Option<(f32, f32)> {
        let text = self.text_encoder.as_ref().filter(|_| layer.starts_with(TEXT_ENCODER));
        text.or(self.transformer.as_ref())?.of(layer, rank)
    }
}

fn settings_of(value: Value) -> std::result::Result<Settings, String> {
    // A list would be taken for the settings in their order.
    if !value.is_object() {
        return Err("they are not a JSON object".into());
    }
    let settings: Settings = serde_json::from_value(value).map_err(|error| error.to_string())?;
    settings.check()
}
