//! Checkpoint files from outside: hostile and damaged ones, both layouts, manifests of the real models, finding models.

mod detection;
mod faults;
mod files;
mod fingerprints;
mod headers;
mod locating;
mod manifests;
mod mutations;
mod quantized;
mod quantized_faults;
mod real;
mod unwritten;
mod written;

use common::header::{Described, header_of, safetensors};
use kiln::error::{Error, Result};
use kiln::internals::checkpoint::Shard;
use kiln::internals::tensor::Bytes;
use std::sync::Arc;

fn described(name: &str, element: &'static str, shape: &[usize]) -> Described {
    (name.into(), element, shape.to_vec())
}

/// A safetensors file whose tensors are zero.
fn zeros(tensors: &[Described]) -> Vec<u8> {
    let (header, data) = header_of(tensors, "");
    raw(&header, data)
}

/// A file with this header and `data` zero bytes.
fn raw(header: &str, data: usize) -> Vec<u8> {
    safetensors(header, &vec![0; data])
}

fn shard(bytes: Vec<u8>) -> Result<Shard> {
    Shard::from_bytes("x.safetensors", Bytes::new(Arc::new(bytes)))
}

/// The error and its hint in one line.
pub fn message(error: &Error) -> String {
    assert_eq!(error.exit_code(), 3, "{error}");
    match kiln_program::cli::hint(error) {
        Some(hint) => format!("{} / {hint}", kiln_program::cli::message(error)),
        None => kiln_program::cli::message(error),
    }
}
