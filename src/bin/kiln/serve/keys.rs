//! API keys. Only their digests are kept, and they are compared in constant time.

use kiln::error::{Error, Result};
use kiln::read_file;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Limit on the size of a file of keys.
const MAX_FILE: u64 = 1 << 20;

/// The shortest key. A shorter one could be guessed.
const MIN_LENGTH: usize = 16;

/// The keys that clients may present.
#[derive(Default)]
pub struct Keys(Vec<Key>);

struct Key {
    name: String,
    digest: [u8; 32],
}

impl Keys {
    /// Reads the keys of a file and of the environment.
    pub fn new(file: Option<&Path>, environment: Option<&str>) -> Result<Self> {
        let mut keys = Self::default();
        if let Some(path) = file {
            let bytes = read_file(path, MAX_FILE).map_err(|error| Error::read(path, error))?;
            let text = String::from_utf8(bytes).map_err(|_| Error::bad_file(path, "bad API keys", "the file is not UTF-8"))?;
            for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line.trim())) {
                if !line.is_empty() && !line.starts_with('#') {
                    keys.add(line).map_err(|why| Error::bad_file(path, "bad API keys", format!("line {number}: {why}")))?;
                }
            }
            if keys.0.is_empty() {
                return Err(Error::bad_file(path, "bad API keys", "there is no key; a line is `name:key`"));
            }
        }
        if let Some(key) = environment {
            keys.add(key).map_err(|why| Error::usage(format!("KILN_API_KEY: {why}"), "make one with `openssl rand -hex 32`"))?;
        }
        Ok(keys)
    }

    /// Adds a line: `name:key`, or a key alone.
    fn add(&mut self, line: &str) -> Result<(), String> {
        let (name, key) = line.split_once(':').unwrap_or(("default", line));
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if !is_name {
            return Err("a name has letters, digits, `-`, `_` and `.`".into());
        }
        if key.len() < MIN_LENGTH || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("a key has at least {MIN_LENGTH} characters, and no spaces"));
        }
        self.0.push(Key { name: name.into(), digest: Sha256::digest(key).into() });
        Ok(())
    }

    /// Whether requests need a key.
    pub fn are_required(&self) -> bool {
        !self.0.is_empty()
    }

    /// The name of a key. Takes the same time for every wrong key.
    pub fn name_of(&self, key: &[u8]) -> Option<&str> {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let mut found = None;
        for key in &self.0 {
            let difference = key.digest.iter().zip(&digest).fold(0, |all, (a, b)| std::hint::black_box(all | (a ^ b)));
            if difference == 0 {
                found = Some(key.name.as_str());
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_matched_whole() {
        let mut keys = Keys::default();
        assert!(!keys.are_required());
        keys.add("team-a:0123456789abcdefKEY").unwrap();
        keys.add("fedcba9876543210").unwrap();
        assert_eq!(keys.name_of(b"0123456789abcdefKEY"), Some("team-a"));
        assert_eq!(keys.name_of(b"fedcba9876543210"), Some("default"));
        for wrong in ["", "0123456789abcdefkey", "0123456789abcdefKE", "0123456789abcdefKEYx", "0123456789abcdefKEY ", "é"] {
            assert_eq!(keys.name_of(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(keys.name_of(&[b'x'; 1 << 20]), None);
        for line in ["short", "a b:0123456789abcdef", ":0123456789abcdef", "a:0123456789 abcdef"] {
            assert!(keys.add(line).is_err(), "{line}");
        }
    }
}
