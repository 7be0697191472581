//! Finds the safetensors files of a folder: one file, or the shards that an index names.

use super::header::UniqueMap;
use super::shard::Shard;
use crate::error::{Error, Result};
use crate::files;
use crate::text::shown;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The maximum size of an index in bytes.
const MAX_INDEX: u64 = 4 << 20;

/// File stems that the libraries diffusers and transformers use for a single-file checkpoint and for an index.
const USUAL: [&str; 2] = ["diffusion_pytorch_model", "model"];

/// Opens the checkpoint in a folder.
pub(super) fn open(folder: &Path) -> Result<Vec<Shard>> {
    let (mut single, mut sharded, mut indexes) = (Vec::new(), Vec::new(), Vec::new());
    for entry in std::fs::read_dir(folder).map_err(|e| Error::read(folder, e))? {
        let path = entry.map_err(|e| Error::read(folder, e))?.path();
        // A name that is not valid Unicode cannot match.
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.ends_with(".safetensors.index.json") {
            indexes.push(path);
        } else if let Some(stem) = name.strip_suffix(".safetensors") {
            if shard_count(stem).is_some() { sharded.push(path) } else { single.push(path) }
        }
    }
    single.sort();
    sharded.sort();
    let index = one_of(folder, indexes, ".safetensors.index.json")?;
    // With an index of shards, a single file next to it is ignored as unrelated. Without an index, or if the single file has a
    // usual name, either could be meant, and the folder is ambiguous.
    let usual = usual(folder, &single, ".safetensors").into_iter().next();
    let rival = usual.or(if index.is_none() { single.first().cloned() } else { None });
    match (index, rival) {
        (Some(index), None) => open_index(folder, &index),
        (Some(index), Some(rival)) => Err(several(folder, &[rival, index])),
        (None, Some(rival)) => match sharded.first() {
            Some(shard) => Err(several(folder, &[rival, shard.clone()])),
            None => one_of(folder, single, ".safetensors")?.map_or(Ok(Vec::new()), |path| Ok(vec![Shard::open(&path)?])),
        },
        (None, None) if sharded.is_empty() => {
            let what = "the folder holds no .safetensors file".into();
            Err(Error::NoModel { path: folder.into(), what, hint: None })
        }
        (None, None) => open_shards(folder, &sharded),
    }
}

/// The files with one of the usual names.
fn usual(folder: &Path, files: &[PathBuf], suffix: &str) -> Vec<PathBuf> {
    USUAL.iter().map(|stem| folder.join(format!("{stem}{suffix}"))).filter(|path| files.contains(path)).collect()
}

/// The only file, or the only one with a usual name.
fn one_of(folder: &Path, mut files: Vec<PathBuf>, suffix: &str) -> Result<Option<PathBuf>> {
    if files.len() < 2 {
        return Ok(files.pop());
    }
    let mut usual = usual(folder, &files, suffix);
    match usual.len() {
        1 => return Ok(usual.pop()),
        0 => {}
        _ => files = usual,
    }
    files.sort();
    Err(several(folder, &files))
}

/// The error for a folder that holds several checkpoints.
fn several(folder: &Path, files: &[PathBuf]) -> Error {
    let list: Vec<String> = files.iter().filter_map(|f| Some(f.file_name()?.to_str()?.to_owned())).collect();
    let error = Error::bad_file(folder, "several checkpoints in one folder", list.join(", "));
    error.with_hint("name the file itself, or move what is not meant elsewhere")
}

/// The number of shards in a stem such as `model-00001-of-00002`.
fn shard_count(stem: &str) -> Option<usize> {
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (_, index) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if digits(index) && digits(total) { total.parse().ok() } else { None }
}

/// Opens shards without an index. Their names contain the number of shards, which has to match.
fn open_shards(folder: &Path, files: &[PathBuf]) -> Result<Vec<Shard>> {
    for file in files {
        let total = file.file_stem().and_then(|stem| stem.to_str()).and_then(shard_count);
        if total != Some(files.len()) {
            let detail = format!("{} of {} shards are there", files.len(), total.unwrap_or(0));
            return Err(incomplete(folder, detail));
        }
    }
    files.iter().map(|file| Shard::open(file)).collect()
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// Opens the shards that an index names. Each has to exist and to hold the tensors that the index lists for it.
fn open_index(folder: &Path, path: &Path) -> Result<Vec<Shard>> {
    let invalid = |detail: String| Error::bad_file(path, "invalid shard index", detail);
    let text = files::read(path, MAX_INDEX).map_err(|e| Error::read(path, e))?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| invalid(e.to_string()))?;
    let mut shards: BTreeMap<&str, Shard> = BTreeMap::new();
    for (tensor, file) in &index.weight_map.0 {
        // Only a plain name is accepted, so that an index cannot refer to files outside its folder.
        if file.contains(['/', '\\', ':', '\0']) || !file.ends_with(".safetensors") {
            return Err(invalid(format!("tensor `{}` is said to be in `{}`, not a file name", shown(tensor), shown(file))));
        }
        if !shards.contains_key(file.as_str()) {
            let shard = folder.join(file);
            if !shard.exists() {
                return Err(incomplete(path, format!("shard `{}` is not there", shown(file))));
            }
            shards.insert(file, Shard::open(&shard)?);
        }
        if shards.get(file.as_str()).is_none_or(|shard| shard.entry(tensor).is_none()) {
            let detail = format!("shard `{}` does not hold tensor `{}`", shown(file), shown(tensor));
            return Err(incomplete(path, detail));
        }
    }
    if shards.is_empty() {
        return Err(invalid("names no tensor".into()));
    }
    Ok(shards.into_values().collect())
}

fn incomplete(path: &Path, detail: String) -> Error {
    Error::bad_file(path, "incomplete checkpoint", detail).with_hint("download the missing files")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_counts_are_parsed_from_names() {
        assert_eq!(shard_count("model-00001-of-00002"), Some(2));
        assert_eq!(shard_count("diffusion_pytorch_model-00002-of-00017"), Some(17));
        for other in ["model", "model-1-of-2", "model-0000a-of-00002", "00001-of-00002", "model-00001-of-"] {
            assert_eq!(shard_count(other), None, "{other}");
        }
    }
}
