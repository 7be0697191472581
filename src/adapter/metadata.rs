//! The scales that PEFT keeps beside its tensors: in the metadata of the file, or in `adapter_config.json` in its folder.

use crate::checkpoint::Shard;
use crate::error::{Error, Result};
use crate::files;
use serde::Deserialize;
use std::collections::BTreeMap;

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
    r: Option<f32>,
    lora_alpha: Option<f32>,
    alpha_pattern: BTreeMap<String, f32>,
    use_rslora: bool,
}

/// The scales of a file's layers.
#[derive(Debug, Default)]
pub struct PeftScales(Option<Settings>);

impl PeftScales {
    /// Reads what there is.
    pub fn read(shard: &Shard) -> Result<Self> {
        let bad = |error: serde_json::Error| {
            Error::bad_file(shard.path(), "the settings of this adapter are not readable", error.to_string())
        };
        if let Some(text) = shard.metadata().get(ENTRY) {
            // diffusers puts the name of the part in front of every key.
            let all: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).map_err(bad)?;
            let own = all
                .into_iter()
                .filter_map(|(key, value)| Some((key.strip_prefix("transformer.").unwrap_or(&key).to_owned(), value)));
            let settings = serde_json::from_value(serde_json::Value::Object(own.collect())).map_err(bad)?;
            return Ok(Self(Some(settings)));
        }
        let beside = shard.path().with_file_name(FILE);
        match files::read(&beside, LIMIT) {
            Ok(text) => Ok(Self(Some(serde_json::from_slice(&text).map_err(bad)?))),
            Err(_) => Ok(Self(None)),
        }
    }

    /// Alpha of a layer and what it is divided by.
    pub fn of(&self, layer: &str, rank: usize) -> Option<(f32, f32)> {
        let settings = self.0.as_ref()?;
        // A pattern is the end of a layer's name, or all of it.
        let matches = |pattern: &&String| layer == pattern.as_str() || layer.ends_with(&format!(".{pattern}"));
        let own = settings.alpha_pattern.iter().find(|(pattern, _)| matches(pattern)).map(|(_, alpha)| *alpha);
        let alpha = own.or(settings.lora_alpha)?;
        // The rank of a layer may differ from that of the settings, and is the true one.
        let rank = if settings.r == Some(0.0) { return None } else { rank as f32 };
        Some((alpha, if settings.use_rslora { rank.sqrt() } else { rank }))
    }
}
