//! Checkpoints from the outside: hostile and damaged files, both layouts, manifests of the real models, and finding models.

mod detection;
mod faults;
mod files;
mod fingerprints;
mod headers;
mod locating;
mod manifests;
mod mutations;
mod quantised;
mod quantised_faults;
mod real;
mod unwritten;
mod written;

use kiln::checkpoint::Shard;
use kiln::error::{Error, Result};
use kiln::tensor::Bytes;
use std::sync::Arc;

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
