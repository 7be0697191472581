//! One safetensors file: mapped into memory, with a header that was validated.

use super::guard::Mapped;
use super::header::{Entry, Header};
use crate::error::{Error, Result};
use crate::files;
use crate::tensor::Bytes;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One safetensors file. Cloning it copies no data.
#[derive(Clone, Debug)]
pub struct Shard {
    path: PathBuf,
    bytes: Bytes,
    header: Arc<Header>,
    /// The file behind the bytes, if there is one.
    mapped: Option<Arc<Mapped>>,
}

impl Shard {
    /// Maps a file and validates its header.
    pub fn open(path: &Path) -> Result<Self> {
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

    /// A file that is already in memory; `name` stands for its path in messages.
    pub fn from_bytes(name: &str, bytes: Bytes) -> Result<Self> {
        Self::new(name.into(), bytes, None)
    }

    fn new(path: PathBuf, bytes: Bytes, mapped: Option<Arc<Mapped>>) -> Result<Self> {
        let header = Header::parse(&path, &bytes).map_err(|error| {
            // A file that is still being written can fail validation in many ways; then the error says that it changed.
            let changed = mapped.as_ref().and_then(|mapped| mapped.verify(&path).err());
            changed.unwrap_or(error)
        })?;
        Ok(Self { path, bytes, header: Arc::new(header), mapped })
    }

    /// Fails if the file changed since it was opened, so that anything read from it may be wrong. Bytes in memory never change.
    pub fn verify(&self) -> Result<()> {
        self.mapped.as_ref().map_or(Ok(()), |mapped| mapped.verify(&self.path))
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors in order of name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.header.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// The header's entry of one tensor.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.header.tensors.get(name)
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
