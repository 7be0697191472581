//! Lists what an adapter's file holds, whichever model it is for and whether or not kiln can use it.

use super::key::Factor;
use super::notes::Notes;
use super::spelling::Spelling;
use super::{AdapterFile, base};
use crate::checkpoint::Shard;
use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The contents of an adapter's file.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The path of the file.
    pub path: PathBuf,
    /// The file's size.
    pub bytes: u64,
    /// The file's SHA-256 as hexadecimal digits.
    pub digest: String,
    /// The dtypes of the tensors, as the file names them.
    pub dtypes: Vec<&'static str>,
    /// The layers by name.
    pub layers: Vec<LayerContents>,
    /// Tensors that belong to no layer.
    pub others: Vec<String>,
    /// The model that the adapter seems to be for.
    pub base: Option<String>,
    /// The notes of the trainer in the metadata.
    pub notes: Notes,
    /// All metadata.
    pub metadata: BTreeMap<String, String>,
}

/// A layer of an adapter's file.
#[derive(Clone, Debug)]
pub struct LayerContents {
    /// The layer's name in the file.
    pub name: String,
    /// Which trainer's spelling the name has.
    pub spelling: Spelling,
    /// LoRA, LoKr, or a method that is not supported.
    pub method: &'static str,
    /// Whether the method is supported.
    pub supported: bool,
    /// The layer's rank, if it has one.
    pub rank: Option<usize>,
    /// Rows and columns of the weight that it changes.
    pub shape: Option<[usize; 2]>,
    /// The layer's alpha, if the file has one.
    pub alpha: Option<f32>,
    /// The factor of the layer's product, not including the strength that the user sets.
    pub scale: Option<f32>,
    /// Why kiln cannot use the layer, if it cannot.
    pub fault: Option<String>,
}

impl Contents {
    /// Reads the contents of a file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(&Shard::open(path)?)
    }

    /// Reads the contents of an open file.
    pub fn read(shard: &Shard) -> Result<Self> {
        let file = AdapterFile::new(shard)?;
        let names: BTreeSet<&str> = file.layers.keys().chain(file.unsupported.keys()).copied().collect();
        if names.is_empty() {
            return Err(file.refused("it has no factors of LoRA or LoKr".into()));
        }
        let layers: Vec<LayerContents> = names.into_iter().map(|name| LayerContents::new(&file, name)).collect();
        let dtypes: BTreeSet<&'static str> = shard.tensors().map(|(_, entry)| entry.dtype.name).collect();
        let contents = Self {
            path: shard.path().into(),
            bytes: shard.contents().len() as u64,
            digest: shard.sha256(),
            dtypes: dtypes.into_iter().collect(),
            others: file.unrecognized.clone(),
            base: base::likely(layers.iter().filter_map(|layer| Some((layer.name.as_str(), layer.shape?)))),
            notes: Notes::read(shard.metadata()),
            metadata: shard.metadata().clone(),
            layers,
        };
        shard.verify()?;
        Ok(contents)
    }
}

impl LayerContents {
    fn new(file: &AdapterFile<'_>, name: &str) -> Self {
        let (group, unsupported) = (file.layers.get(name), file.unsupported.get(name));
        let delta = group.map(|group| file.delta(name, group));
        let has = |factor| group.is_some_and(|group| group.0.contains_key(&factor));
        let is_lora = has(Factor::Down) || has(Factor::Up);
        let alpha = group.and_then(|group| group.0.get(&Factor::Alpha)).and_then(|found| file.alpha(*found).ok());
        let mut layer = Self {
            name: name.into(),
            spelling: Spelling::of(name),
            method: unsupported.map_or(if is_lora { "LoRA" } else { "LoKr" }, |(method, _)| method),
            supported: unsupported.is_none(),
            rank: None,
            shape: None,
            alpha,
            scale: None,
            fault: None,
        };
        match delta {
            Some(Ok(delta)) => {
                (layer.rank, layer.shape, layer.scale) = (delta.rank(), Some(delta.shape()), Some(delta.scale));
                if !delta.is_finite() {
                    layer.fault = Some("it has values that are not finite".into());
                }
            }
            // If the method is not supported, a missing LoRA factor is not a fault: the rest belongs to that method.
            Some(Err(_)) | None if unsupported.is_some() => {}
            Some(Err(Error::BadFile { detail, .. })) => layer.fault = Some(detail),
            Some(Err(error)) => layer.fault = Some(error.to_string()),
            None => {}
        }
        layer
    }
}
