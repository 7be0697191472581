//! An embedded model. The library embeds none; a program that links it may pass one in.

use super::BUILT_IN;
use crate::checkpoint::{Shard, Weights};
use crate::component::Component;
use crate::config::{ConfigFile, ModelDefaults};
use crate::error::{Error, Result};
use crate::tensor::Bytes;
use crate::tokenizer::Tokenizer;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files of the model that are read by name.
const DEFAULTS: &str = "kiln.json";
const TOKENIZER: &str = "tokenizer/tokenizer.json";

/// The files of a model folder in the diffusers layout, by path. Weights are read in place; only tensors that are misaligned for
/// their dtype are copied.
#[derive(Clone, Copy)]
pub struct Embedded {
    /// Path with `/` as separator, and content.
    pub files: &'static [(&'static str, &'static [u8])],
}

impl Embedded {
    /// The path of a file in messages.
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

    /// Parses a configuration file.
    pub fn config(self, name: &str) -> Result<ConfigFile> {
        ConfigFile::parse(&Self::path(name), self.file(name)?)
    }

    /// The defaults of `kiln.json`.
    pub fn defaults(self) -> Result<ModelDefaults> {
        ModelDefaults::parse(&Self::path(DEFAULTS), self.defaults_file()?)
    }

    /// The content of `kiln.json`.
    pub(crate) fn defaults_file(self) -> Result<&'static [u8]> {
        self.file(DEFAULTS)
    }

    /// The tokenizer.
    pub fn tokenizer(self) -> Result<Tokenizer> {
        Tokenizer::from_json(self.tokenizer_file()?, &Self::path(TOKENIZER))
    }

    /// The content of `tokenizer.json`.
    pub(crate) fn tokenizer_file(self) -> Result<&'static [u8]> {
        self.file(TOKENIZER)
    }

    /// The weights of a part, from its single file.
    pub fn weights(self, part: Component, name: &str) -> Result<Weights> {
        let bytes = Bytes::new(Arc::new(self.file(name)?));
        Weights::from_shards(part, vec![Shard::from_bytes(&Self::path(name).to_string_lossy(), bytes)?])
    }
}

/// Lists the paths without the content, which is megabytes.
impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.files.iter().map(|(path, _)| path)).finish()
    }
}

/// Two models are equal if they are the same static data.
impl PartialEq for Embedded {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.files, other.files)
    }
}
