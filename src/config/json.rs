//! Configuration files: JSON with a size limit, and getters whose errors name the file and the key.

use crate::error::{Error, Result};
use crate::files;
use crate::json::Unique;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The maximum size of a configuration file in bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// A JSON object from a file.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    object: Map<String, Value>,
}

impl ConfigFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = files::read(path, MAX_CONFIG).map_err(|e| Error::read(path, e))?;
        Self::parse(path, &text)
    }

    /// Parses the content of a file; `path` is where it came from, for messages.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let invalid = |detail: String| Error::bad_file(path, "invalid configuration", detail);
        match serde_json::from_slice(text).map_err(|e| invalid(e.to_string()))? {
            Unique(Value::Object(object)) => Ok(Self { path: path.into(), object }),
            Unique(_) => Err(invalid("not an object".into())),
        }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys of the object.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.object.keys().map(String::as_str)
    }

    /// The value of a key, unless it is missing or null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// An object inside this one, if the key is there.
    pub fn inner(&self, key: &str) -> Result<Option<Self>> {
        self.take(key, "an object", |value| Some(Self { path: self.path.clone(), object: value.as_object()?.clone() }))
    }

    /// A string, if the key is there.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(key).map(|value| value.as_str().ok_or_else(|| self.unsupported(key, "a text"))).transpose()
    }

    /// A whole number, if the key is there.
    pub fn whole(&self, key: &str) -> Result<Option<usize>> {
        self.take(key, "a whole number", |value| usize::try_from(value.as_u64()?).ok())
    }

    /// A finite number above zero, if the key is there.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        self.take(key, "a number above 0", |value| value.as_f64().filter(|n| n.is_finite() && *n > 0.0))
    }

    /// The epsilon of a norm, if the key is there. It has to be small, and above zero even when rounded to f32.
    pub fn small(&self, key: &str) -> Result<Option<f32>> {
        self.take(key, "a number above 0 and at most 0.01", |value| {
            let number = value.as_f64()? as f32;
            (number > 0.0 && number <= 0.01).then_some(number)
        })
    }

    /// The side of an image tile, if the key is there. Tiles overlap by a quarter, which has to be whole latents.
    pub fn tile(&self, key: &str) -> Result<Option<usize>> {
        self.take(key, "a multiple of 32, at most 65536", |value| {
            let side = usize::try_from(value.as_u64()?).ok()?;
            (side > 0 && side <= 1 << 16 && side.is_multiple_of(32)).then_some(side)
        })
    }

    /// The base of RoPE frequencies, if the key is there.
    pub fn rope_base(&self, key: &str) -> Result<Option<f64>> {
        self.take(key, "a number from 1 to 1e12", |value| value.as_f64().filter(|base| (1.0..=1e12).contains(base)))
    }

    /// Fails if the key is there and is not the one string that this engine supports.
    pub fn require_text(&self, key: &str, only: &str) -> Result<()> {
        match self.get(key) {
            Some(value) if value.as_str() != Some(only) => Err(self.unsupported(key, only)),
            _ => Ok(()),
        }
    }

    /// Fails if the key is there and is not a list with only the one string that this engine supports.
    pub fn require_all(&self, key: &str, only: &str) -> Result<()> {
        match self.get(key) {
            Some(Value::Array(list)) if list.iter().all(|value| value.as_str() == Some(only)) => Ok(()),
            Some(_) => Err(self.unsupported(key, &format!("a list of {only}"))),
            None => Ok(()),
        }
    }

    /// Fails if the key is there and does not have the one value that this engine supports.
    pub fn require_flag(&self, key: &str, only: bool) -> Result<()> {
        match self.flag(key)? {
            Some(flag) if flag != only => Err(self.unsupported(key, &only.to_string())),
            _ => Ok(()),
        }
    }

    /// Fails if the key is there at all, because it would require a computation that this engine does not support.
    pub fn require_none(&self, key: &str) -> Result<()> {
        if self.get(key).is_some() { Err(self.unsupported(key, "none")) } else { Ok(()) }
    }

    /// A list of `N` whole numbers, if the key is there.
    pub fn list<const N: usize>(&self, key: &str) -> Result<Option<[usize; N]>> {
        self.take(key, &format!("{N} whole numbers"), |value| {
            let list: Option<Vec<usize>> = value.as_array()?.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect();
            list?.try_into().ok()
        })
    }

    /// True or false, if the key is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.take(key, "true or false", Value::as_bool)
    }

    /// Fails if the key is there and differs from what the weights show.
    pub fn expect(&self, key: &str, found: usize) -> Result<()> {
        match self.whole(key)? {
            Some(number) if number != found => Err(self.mismatch(key, &number, &found)),
            _ => Ok(()),
        }
    }

    /// Fails if the key is there and is not the one number that this engine supports.
    pub fn require(&self, key: &str, only: usize) -> Result<()> {
        match self.whole(key)? {
            Some(number) if number != only => Err(self.unsupported(key, &only.to_string())),
            _ => Ok(()),
        }
    }

    /// The error for a configuration that describes other weights.
    pub fn mismatch(&self, key: &str, says: &dyn std::fmt::Debug, found: &dyn std::fmt::Debug) -> Error {
        let detail = format!("`{key}` is {says:?}, the weights have {found:?}");
        Error::bad_file(&self.path, "configuration does not fit the weights", detail)
            .with_hint("the two files belong to different models")
    }

    /// The error for a setting that this engine does not support, or that has the wrong type.
    pub fn unsupported(&self, key: &str, need: &str) -> Error {
        let value: String = self.get(key).map_or_else(String::new, Value::to_string).chars().take(64).collect();
        Error::bad_file(&self.path, "unsupported configuration", format!("`{key}` is {value}, needed is {need}"))
    }

    /// A value converted by `read`, if the key is there; `need` describes valid values in the error.
    pub fn take<T>(&self, key: &str, need: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.unsupported(key, need))).transpose()
    }
}
