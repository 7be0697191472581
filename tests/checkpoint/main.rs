//! Checkpoints from the outside: hostile and damaged files, both layouts, manifests of the real models, and finding models.

mod detection;
mod faults;
mod files;
mod fingerprints;
#[allow(dead_code)] // only what decodes is used here
#[path = "../common/ops/formats.rs"]
mod formats;
mod headers;
mod locating;
mod manifests;
mod mutations;
mod quantised;
mod quantised_faults;
#[path = "../common/random.rs"]
mod random;
mod real;
#[path = "../common/sha256.rs"]
mod sha256;
mod unwritten;
mod written;

use kiln::checkpoint::Shard;
use kiln::error::{Error, Result};
use kiln::tensor::Bytes;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A tensor to be written: name, element type, shape.
type Described = (String, &'static str, Vec<usize>);

fn described(name: &str, element: &'static str, shape: &[usize]) -> Described {
    (name.into(), element, shape.to_vec())
}

/// A safetensors file of zeros.
fn zeros(tensors: &[Described]) -> Vec<u8> {
    let (header, data) = header_of(tensors, "");
    raw(&header, data)
}

/// The header of a file of these tensors, with more text at its start, and how many bytes of data follow it.
fn header_of(tensors: &[Described], more: &str) -> (String, usize) {
    let mut offset = 0;
    let mut entries = Vec::new();
    for (name, element, shape) in tensors {
        let size = match *element {
            "I64" => 8,
            "F32" => 4,
            "BF16" | "F16" | "I16" => 2,
            _ => 1,
        };
        let end = offset + shape.iter().product::<usize>() * size;
        entries.push(format!("{name:?}:{{\"dtype\":\"{element}\",\"shape\":{shape:?},\"data_offsets\":[{offset},{end}]}}"));
        offset = end;
    }
    (format!("{{{more}{}}}", entries.join(",")), offset)
}

/// A file of this header, followed by `data` zero bytes.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut file = vec![0; 8 + header.len() + data];
    file[..8].copy_from_slice(&(header.len() as u64).to_le_bytes());
    file[8..8 + header.len()].copy_from_slice(header.as_bytes());
    file
}

fn shard(bytes: Vec<u8>) -> Result<Shard> {
    Shard::from_bytes("x.safetensors", Bytes::new(Arc::new(bytes)))
}

/// The error and its hint in one line.
fn message(error: &Error) -> String {
    assert_eq!(error.exit_code(), 3, "{error}");
    match kiln::cli::hint(error) {
        Some(hint) => format!("{} / {hint}", kiln::cli::message(error)),
        None => kiln::cli::message(error),
    }
}

/// A temporary folder.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kiln-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
