//! Writes safetensors files from tensor descriptions.

use std::fs::File;
use std::io::Write;
use std::path::Path;

/// A tensor to be written: name, element type, shape.
pub type Described = (String, &'static str, Vec<usize>);

/// The header of a file of these tensors, and its number of data bytes. `more` is inserted at the start of the header.
pub fn header_of(tensors: &[Described], more: &str) -> (String, usize) {
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

/// The bytes of a file with this header and data.
pub fn safetensors(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

/// Writes a sparse file of these tensors: a header, and perhaps gigabytes of data that take no disk space.
pub fn write_sparse(path: &Path, tensors: &[Described]) {
    let (header, data) = header_of(tensors, "");
    let mut file = File::create(path).unwrap();
    file.write_all(&safetensors(&header, &[])).unwrap();
    file.set_len((8 + header.len() + data) as u64).unwrap();
}
