//! Lists the unmodified files that a folder needs, together with quantized weights, to be a model.

use crate::checkpoint::{Identity, Shard, Weights};
use crate::component::{Component, PerComponent};
use crate::config::Variant;
use crate::error::{Error, Result};
use crate::files;
use crate::locate::{Found, ModelFiles};
use crate::names::Layout;
use crate::tensor::{Bytes, DType};
use crate::tiny;
use serde_json::json;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The largest settings file that is read, in bytes.
const MAX_SETTINGS: u64 = 4 << 20;

/// A file that is copied.
#[derive(Clone, Debug)]
pub struct Copied {
    /// The file's path in the output folder.
    pub to: PathBuf,
    /// Identifies the original and its version.
    pub identity: Identity,
    from: Contents,
    /// The open file and its part, if it holds weights.
    weights: Option<(Component, Shard)>,
}

#[derive(Clone, Debug)]
enum Contents {
    File(PathBuf),
    Memory(Bytes),
}

impl Copied {
    fn file(to: impl Into<PathBuf>, path: &Path) -> Result<Self> {
        Ok(Self { to: to.into(), identity: Identity::of_file(path)?, from: Contents::File(path.into()), weights: None })
    }

    fn memory(to: impl Into<PathBuf>, bytes: Bytes) -> Self {
        let to = to.into();
        Self { identity: Identity::of_bytes(&to, &bytes), to, from: Contents::Memory(bytes), weights: None }
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    /// The path of the original, unless it is in memory.
    pub fn path(&self) -> Option<&Path> {
        if let Contents::File(path) = &self.from { Some(path) } else { None }
    }

    /// Fails if weights have parts that were never written, or values that are not finite: kiln would refuse them in use.
    pub fn check(&self, stop: &AtomicBool) -> Result<()> {
        let Some((part, shard)) = &self.weights else { return Ok(()) };
        shard.check_written(*part)?;
        shard.check_finite(stop)
    }

    /// Fails if the original has changed since it was listed.
    pub fn verify(&self) -> Result<()> {
        match &self.from {
            Contents::File(path) if Identity::of_file(path)? != self.identity => {
                let error = Error::bad_file(path, "the file changed while it was being copied", "it was written to");
                Err(error.with_hint("start again when the file is complete"))
            }
            _ => Ok(()),
        }
    }

    /// Opens the content. Also returns its path if it is a file.
    pub fn open(&self) -> Result<(Box<dyn Read + '_>, &Path)> {
        match &self.from {
            Contents::File(path) => {
                let file = files::open(path).map_err(|error| Error::read(path, error))?;
                Ok((Box::new(file), path))
            }
            Contents::Memory(bytes) => Ok((Box::new(&bytes[..]), &self.to)),
        }
    }
}

/// A part's folder.
pub fn folder(part: Component) -> &'static str {
    match part {
        Component::Transformer => "transformer",
        Component::TextEncoder => "text_encoder",
        Component::Vae => "vae",
    }
}

/// The files of a model folder in the diffusers layout, without the weights of the `quantized` parts.
pub fn copies(found: &Found, weights: &PerComponent<Weights>, quantized: &[Component], variant: Variant) -> Result<Vec<Copied>> {
    let memory = |files: Vec<(&'static str, Bytes)>| -> Vec<Copied> {
        let is_replaced = |name: &str| {
            quantized.iter().any(|part| name.strip_prefix(folder(*part)).is_some_and(|name| name.ends_with(".safetensors")))
        };
        files.into_iter().filter(|(name, _)| !is_replaced(name)).map(|(name, bytes)| Copied::memory(name, bytes)).collect()
    };
    let mut copies = match found {
        Found::Files(files) => of_files(files, weights, quantized)?,
        Found::BuiltIn(model) => memory(model.files.iter().map(|(name, bytes)| (*name, Bytes::new(Arc::new(*bytes)))).collect()),
        Found::Tiny => memory(tiny::contents(Layout::Diffusers, DType::Bf16)?),
    };
    // A single file's name may be all that shows its variant, so the defaults state it.
    let own = copies.iter().position(|copied| copied.to == Path::new(KILN_JSON)).map(|i| copies.remove(i));
    copies.push(defaults(own.as_ref(), variant)?);
    Ok(copies)
}

/// The files that calibration reads in addition to the weights of the `quantized` parts: the rest of the model without the VAE,
/// because the inputs of the transformer's layers do not depend on the VAE.
pub fn calibration_inputs(
    found: &Found,
    weights: &PerComponent<Weights>,
    quantized: &[Component],
    variant: Variant,
) -> Result<Vec<Identity>> {
    let copies = copies(found, weights, quantized, variant)?.into_iter();
    Ok(copies.filter(|copied| !copied.to.starts_with(folder(Component::Vae))).map(|copied| copied.identity).collect())
}

/// The name of the file with a model's defaults.
const KILN_JSON: &str = "kiln.json";

fn of_files(model: &ModelFiles, weights: &PerComponent<Weights>, quantized: &[Component]) -> Result<Vec<Copied>> {
    let mut copies = Vec::new();
    let mut copy =
        |to: PathBuf, path: &Path, weights| Copied::file(to, path).map(|copied| copies.push(Copied { weights, ..copied }));
    for (part, weights) in weights.iter() {
        let folder = Path::new(folder(part));
        if let Some(config) = ModelFiles::config_of(&model.parts[part]) {
            copy(folder.join("config.json"), &config, None)?;
        }
        if quantized.contains(&part) {
            continue;
        }
        for shard in weights.shards() {
            let name = shard.path().file_name().unwrap_or_default();
            copy(folder.join(name), shard.path(), Some((part, shard.clone())))?;
        }
        if weights.shards().len() > 1
            && let Some(index) = index_of(weights.path())?
        {
            copy(folder.join(index.file_name().unwrap_or_default()), &index, None)?;
        }
    }
    let (scheduler, defaults) = (model.scheduler(), model.defaults.path.clone());
    for (to, path) in [
        ("tokenizer/tokenizer.json", &model.tokenizer),
        ("scheduler/scheduler_config.json", &scheduler),
        ("model_index.json", &model.index),
        (KILN_JSON, &defaults),
    ] {
        path.as_deref().map_or(Ok(()), |path| copy(to.into(), path, None))?;
    }
    Ok(copies)
}

/// The index of a folder's shards.
fn index_of(folder: &Path) -> Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|error| Error::read(folder, error))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter(|path| path.to_string_lossy().ends_with(".safetensors.index.json")).min())
}

/// A model's defaults, with the variant added.
fn defaults(own: Option<&Copied>, variant: Variant) -> Result<Copied> {
    let mut defaults = json!({});
    if let Some(own) = own {
        let (reader, path) = own.open()?;
        let mut text = Vec::new();
        reader.take(MAX_SETTINGS).read_to_end(&mut text).map_err(|error| Error::read(path, error))?;
        defaults = serde_json::from_slice(&text).map_err(|error| Error::bad_file(path, "invalid JSON", error.to_string()))?;
    }
    defaults["variant"] = variant.to_string().into();
    Ok(Copied::memory(KILN_JSON, Bytes::new(Arc::new(format!("{defaults:#}\n").into_bytes()))))
}
