//! A model that is part of the program. The library carries none: whoever links it may hand one in.

use super::BUILT_IN;
use crate::checkpoint::{Part, Shard, Weights};
use crate::config::{ConfigFile, Conventions};
use crate::error::{Error, Result};
use crate::tensor::Bytes;
use crate::tokenizer::Tokenizer;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a model's folder in the diffusers layout, by their paths in it. Weights are read where they lie; only those that
/// are not aligned for their type would be copied.
#[derive(Clone, Copy)]
pub struct Embedded {
    /// Path with `/`, and content.
    pub files: &'static [(&'static str, &'static [u8])],
}

impl Embedded {
    /// What stands for the path of a file in messages.
    fn path(name: &str) -> PathBuf {
        Path::new(BUILT_IN).join(name)
    }

    fn file(self, name: &str) -> Result<&'static [u8]> {
        let found = self.files.iter().find(|(path, _)| *path == name);
        found.map(|(_, bytes)| *bytes).ok_or_else(|| Error::NoModel {
            path: Self::path(name),
            what: "this program was built without it".into(),
            hint: None,
        })
    }

    /// One of its configuration files.
    pub fn config(self, name: &str) -> Result<ConfigFile> {
        ConfigFile::parse(&Self::path(name), self.file(name)?)
    }

    /// What its `kiln.json` says.
    pub fn conventions(self) -> Result<Conventions> {
        Conventions::parse(&Self::path("kiln.json"), self.file("kiln.json")?)
    }

    /// Its tokenizer.
    pub fn tokenizer(self) -> Result<Tokenizer> {
        let name = "tokenizer/tokenizer.json";
        Tokenizer::from_json(self.file(name)?, &Self::path(name))
    }

    /// The weights of a part, which are one file.
    pub fn weights(self, part: Part, name: &str) -> Result<Weights> {
        let bytes = Bytes::new(Arc::new(self.file(name)?));
        Weights::from_shards(part, vec![Shard::from_bytes(&Self::path(name).to_string_lossy(), bytes)?])
    }
}

/// Without the content, which is megabytes.
impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.files.iter().map(|(path, _)| path)).finish()
    }
}

/// The same place in the program.
impl PartialEq for Embedded {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.files, other.files)
    }
}
