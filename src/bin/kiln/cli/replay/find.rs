//! Files by their digests, next to an image and in the current folder.

use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Limit on the bytes that are hashed. A folder may hold thousands of photos, and a model is larger than this.
const BUDGET: u64 = 2 << 30;

/// Limit on the files of a folder.
const FILES: usize = 10_000;

/// The folders, and the digests of their files so far.
pub struct Searched {
    files: Vec<PathBuf>,
    digests: HashMap<PathBuf, Option<String>>,
    /// Bytes that may still be hashed.
    left: u64,
}

impl Searched {
    /// The folder of an image, and the current one.
    pub fn new(image: &Path) -> Self {
        let folder = image.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut folders = vec![folder.to_owned()];
        if fs::canonicalize(folder).ok() != fs::canonicalize(".").ok() {
            folders.push(".".into());
        }
        let list = |folder: &PathBuf| {
            let entries = fs::read_dir(folder).into_iter().flatten().take(FILES).flatten();
            let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
            files.sort_unstable();
            files
        };
        Self { files: folders.iter().flat_map(list).collect(), digests: HashMap::new(), left: BUDGET }
    }

    /// A file with one of these extensions and this digest. A file of this `name` is tried first.
    pub fn find(&mut self, digest: &str, extensions: &[&str], name: Option<&str>) -> Option<PathBuf> {
        let is_kind = |path: &Path| {
            let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
            extension.is_some_and(|extension| extensions.contains(&&*extension))
        };
        let mut candidates: Vec<PathBuf> = self.files.iter().filter(|path| is_kind(path)).cloned().collect();
        // The sort is stable: files next to the image stay first.
        candidates.sort_by_key(|path| path.file_name().and_then(|own| own.to_str()) != name);
        candidates.into_iter().find(|path| self.digest(path).as_deref() == Some(digest))
    }

    /// The digest of a file; `None` if it cannot be read, or if enough was hashed.
    pub fn digest(&mut self, path: &Path) -> Option<String> {
        if let Some(known) = self.digests.get(path) {
            return known.clone();
        }
        // A flag may name a pipe, and opening one waits for its writer.
        let bytes = path.metadata().ok().filter(|there| there.is_file())?.len();
        if bytes > self.left {
            return None;
        }
        self.left -= bytes;
        let digest = sha256_of(path).ok();
        self.digests.insert(path.to_owned(), digest.clone());
        digest
    }
}

/// The SHA-256 of a regular file, as hexadecimal digits.
fn sha256_of(path: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut piece) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            length => hash.update(&piece[..length]),
        }
    }
}
