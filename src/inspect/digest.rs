//! SHA-256 of whole files, which publishers state. Only this shows whether the values of two files are equal.

use super::finite::files;
use crate::checkpoint::{Shard, Weights, digits};
use crate::component::{Component, PerComponent};
use crate::error::{Error, Result};
use crate::progress::{Phase, Progress};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a file that are hashed between two progress reports.
const CHUNK: usize = 64 << 20;

/// The SHA-256 of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileDigest {
    /// The part that the file holds; the first one if it holds several.
    pub part: Component,
    /// The file's name without its folder, or its path if it has no name.
    pub name: String,
    /// The digest as hexadecimal digits.
    pub sha256: String,
}

/// Hashes the files of a model, several at a time if there are several. Fails if a file changes meanwhile, or if `stop` is set.
pub fn digests(weights: &PerComponent<Weights>, stop: &AtomicBool, progress: &dyn Progress) -> Result<Vec<FileDigest>> {
    let mut states: Vec<(Component, &Shard, Sha256)> =
        files(weights).into_iter().map(|(part, shard)| (part, shard, Sha256::new())).collect();
    let longest = states.iter().map(|(_, shard, _)| shard.contents().len()).max().unwrap_or(0);
    progress.begin(Phase::Hash, states.iter().map(|(_, shard, _)| shard.contents().len() as u64).sum());
    for start in (0..longest).step_by(CHUNK) {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let next = |shard: &Shard| {
            let length = shard.contents().len();
            start.min(length)..(start + CHUNK).min(length)
        };
        states.par_iter_mut().for_each(|(_, shard, hash)| hash.update(&shard.contents()[next(shard)]));
        progress.advance(states.iter().map(|(_, shard, _)| next(shard).len() as u64).sum());
    }
    weights.values().try_for_each(Weights::verify)?;
    progress.end();
    let name = |shard: &Shard| shard.path().file_name().unwrap_or(shard.path().as_os_str()).to_string_lossy().into_owned();
    Ok(states.into_iter().map(|(part, shard, hash)| FileDigest { part, name: name(shard), sha256: digits(hash) }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Layout;
    use crate::progress::Silent;
    use crate::tensor::DType;
    use crate::tiny;

    #[test]
    fn digests_are_those_of_the_standard() {
        assert_eq!(crate::files::sha256_of(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn files_are_hashed_whole_and_once() {
        let model = tiny::model(Layout::Bfl, DType::Bf16).unwrap();
        let weights = PerComponent::try_from_fn(|part| model.weights(part)).unwrap();
        let found = digests(&weights, &AtomicBool::new(false), &Silent).unwrap();
        let want: Vec<String> = weights.values().flat_map(Weights::shards).map(Shard::sha256).collect();
        assert_eq!(found.iter().map(|file| file.sha256.clone()).collect::<Vec<_>>(), want);
        assert_eq!(found.len(), 3);
        assert!(matches!(digests(&weights, &AtomicBool::new(true), &Silent), Err(Error::Interrupted)));
    }
}
