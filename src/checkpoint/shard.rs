//! One safetensors file: mapped into memory, with a validated header.

use super::guard::Mapped;
use super::header::{Entry, Header};
use crate::error::{Error, Result};
use crate::files;
use crate::tensor::Bytes;
use crate::trace;
use flate2::Crc;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Identifies a version of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The path with links resolved. Bytes that are not text are replaced, so that it can be displayed.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The modification time in nanoseconds since 1970, if it is known.
    pub modified_ns: Option<u64>,
    /// The CRC-32 of the header. For a file without one it covers the beginning, and for a file in memory all bytes.
    pub checksum: u32,
}

/// How much of a file's beginning the checksum covers: all of a settings file.
const BEGINNING: u64 = 1 << 20;

impl Identity {
    /// Identifies the current version of any file.
    pub fn of_file(path: &Path) -> Result<Self> {
        let error = |source| Error::read(path, source);
        let file = files::open(path).map_err(error)?;
        let meta = file.metadata().map_err(error)?;
        let mut beginning = Vec::new();
        file.take(BEGINNING).read_to_end(&mut beginning).map_err(error)?;
        Ok(Self::new(&resolved(path), meta.len(), meta.modified().ok(), &beginning))
    }

    /// Identifies a file in memory.
    pub fn of_bytes(name: &Path, bytes: &[u8]) -> Self {
        Self::new(name, bytes.len() as u64, None, bytes)
    }

    fn new(path: &Path, bytes: u64, modified: Option<SystemTime>, told_by: &[u8]) -> Self {
        let since = modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let modified_ns = since.and_then(|since| u64::try_from(since.as_nanos()).ok());
        let mut checksum = Crc::new();
        checksum.update(told_by);
        Self { path: path.to_string_lossy().into_owned(), bytes, modified_ns, checksum: checksum.sum() }
    }
}

/// The path of a file with links resolved, because one file may have several paths.
fn resolved(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.into())
}

/// A digest as hexadecimal digits.
pub fn digits(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One safetensors file. Cloning it copies no data.
#[derive(Clone, Debug)]
pub struct Shard {
    path: PathBuf,
    bytes: Bytes,
    header: Arc<Header>,
    /// The mapped file, unless the bytes are in memory.
    mapped: Option<Arc<Mapped>>,
}

impl Shard {
    /// Maps a file and validates its header.
    pub fn open(path: &Path) -> Result<Self> {
        let name = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let _span = trace::span_of("open file", name);
        let file = files::open(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => Error::bad_file(path, "not a safetensors file", error.to_string()),
            _ => Error::read(path, error),
        })?;
        if file.metadata().map_err(|e| Error::read(path, e))?.len() == 0 {
            return Self::new(path.into(), Bytes::new(Arc::new([])), None);
        }
        let mapped = Arc::new(Mapped::new(path, file)?);
        Self::new(path.into(), Bytes::new(mapped.clone()), Some(mapped))
    }

    /// Opens a file that is already in memory. `name` stands for its path in messages.
    pub fn from_bytes(name: &str, bytes: Bytes) -> Result<Self> {
        Self::new(name.into(), bytes, None)
    }

    fn new(path: PathBuf, bytes: Bytes, mapped: Option<Arc<Mapped>>) -> Result<Self> {
        let _span = trace::span("parse header");
        let header = Header::parse(&path, &bytes).map_err(|error| {
            // A file that is still being written can fail validation in many ways. Then the error says that it changed.
            let changed = mapped.as_ref().and_then(|mapped| mapped.verify(&path).err());
            changed.unwrap_or(error)
        })?;
        Ok(Self { path, bytes, header: Arc::new(header), mapped })
    }

    /// Fails if the file changed since it was opened, because anything read from it may be wrong. Bytes in memory never change.
    pub fn verify(&self) -> Result<()> {
        self.mapped.as_ref().map_or(Ok(()), |mapped| mapped.verify(&self.path))
    }

    /// Frees the memory of the pages that were read so far; see [`Weights::release`](super::Weights::release).
    pub fn release(&self) {
        self.mapped.iter().for_each(|mapped| mapped.release());
    }

    /// Identifies this version of the file.
    pub fn identity(&self) -> Identity {
        // Bytes in memory have no modification time, and there are few.
        let Some(mapped) = &self.mapped else { return Identity::of_bytes(&self.path, &self.bytes) };
        let header = self.header.tensors.values().map(|entry| entry.range.start).min().unwrap_or(self.bytes.len());
        Identity::new(&resolved(&self.path), self.bytes.len() as u64, mapped.modified(), &self.bytes[..header])
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors in order of name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.header.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// The header's entry of one tensor.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.header.tensors.get(name)
    }

    /// All bytes of the file.
    pub fn contents(&self) -> &[u8] {
        &self.bytes
    }

    /// The SHA-256 of the file, as hexadecimal digits.
    pub fn sha256(&self) -> String {
        digits(Sha256::new_with_prefix(self.contents()))
    }

    /// The bytes of one tensor.
    pub fn bytes(&self, name: &str) -> Option<Bytes> {
        self.bytes.slice(self.entry(name)?.range.clone())
    }

    /// The file's metadata: a free-form map of strings.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }
}
