//! Recognizes files of other formats by their first bytes, if a user passes one as weights by mistake.

use crate::error::Error;
use crate::files::{Magic, format_name};
use crate::text::grouped;
use std::path::Path;

/// The error for a file that cannot be a safetensors file.
pub(super) const FOREIGN: &str = "not a safetensors file";
const UNSUPPORTED: &str = "unsupported weight format";
const USE_SAFETENSORS: &str = "use a .safetensors file";

/// Bytes at the beginning of a file that are examined.
const START: usize = 512;

/// Formats of weights that are not supported.
const WEIGHTS: [Magic; 7] = [
    (0, b"PK\x03\x04", "a zip archive, probably a PyTorch checkpoint: Python pickle, which can run code and is never loaded"),
    (0, b"GGUF", "GGUF"),
    (0, b"GGML", "GGML"),
    (0, b"\x89HDF\r\n\x1A\n", "HDF5, as Keras writes it"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (4, b"TFL3", "TensorFlow Lite"),
    (4, b"ORTM", "ONNX Runtime"),
];

/// Formats that do not hold weights, and archives and compressed files.
const OTHERS: [Magic; 14] = [
    (0, b"\x7FELF", "a program or library (ELF)"),
    (0, b"MZ\x90\0", "a program or library for Windows"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xFF\xD8\xFF", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WebP image"),
    (0, b"%PDF", "a PDF document"),
    (0, b"\x1F\x8B", "packed with gzip"),
    (0, b"\xFD7zXZ\0", "packed with xz"),
    (0, b"\x28\xB5\x2F\xFD", "packed with zstd"),
    (4, b"1AY&SY", "packed with bzip2"),
    (0, b"7z\xBC\xAF\x27\x1C", "a 7-Zip archive"),
    (0, b"Rar!\x1A\x07", "a RAR archive"),
    (257, b"ustar", "a tar archive"),
];

/// The error that names the format of a file that is not a safetensors file, if the format is known.
pub(super) fn format(path: &Path, file: &[u8]) -> Option<Error> {
    let start = &file[..file.len().min(START)];
    let foreign = |detail: String, hint: &str| Some(Error::bad_file(path, FOREIGN, detail).with_hint(hint));
    if start.starts_with(b"version https://git-lfs") {
        // The pointer contains the size of the actual file.
        let size = start.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"size "));
        let size: Option<u64> = size.and_then(|digits| str::from_utf8(digits).ok()?.trim().parse().ok());
        let whole = size.map_or_else(String::new, |size| format!("{}-byte ", grouped(size)));
        let hint = format!("run git lfs pull, or download the {whole}file itself");
        return foreign(format!("it is a {}-byte Git LFS pointer", grouped(file.len() as u64)), &hint);
    }
    if let Some(name) = format_name(&WEIGHTS, start) {
        return Some(Error::bad_file(path, UNSUPPORTED, name).with_hint(USE_SAFETENSORS));
    }
    if start.len() > 2 && start[0] == 0x80 && (2..=5).contains(&start[1]) {
        let pickle = "Python pickle, which can run code and is never loaded";
        return Some(Error::bad_file(path, UNSUPPORTED, pickle).with_hint(USE_SAFETENSORS));
    }
    if is_onnx(start) {
        return Some(Error::bad_file(path, UNSUPPORTED, "ONNX").with_hint(USE_SAFETENSORS));
    }
    if let Some(name) = format_name(&OTHERS, start) {
        let hint = if name.starts_with("packed") { "unpack it first" } else { USE_SAFETENSORS };
        return foreign(format!("it is {name}"), hint);
    }
    // A file this short may be a truncated safetensors file, which begins with the length of its header.
    if start.len() < size_of::<u64>() {
        return None;
    }
    if start.iter().all(|&byte| byte == 0) {
        return foreign(
            "it begins with zeros, like a file whose download is incomplete".into(),
            "wait for the download, or download the file again",
        );
    }
    let text = readable(start)?.trim_start().to_ascii_lowercase();
    if ["<!doctype", "<html", "<head", "<?xml"].iter().any(|tag| text.starts_with(tag)) {
        return foreign("it is a web page".into(), "the server sent a page, perhaps a login; download the file itself");
    }
    if !text.starts_with(['{', '[']) {
        return foreign("it is text".into(), USE_SAFETENSORS);
    }
    // The index of shards is the one JSON file that is often mistaken for the weights.
    let index = text.contains("\"weight_map\"") || path.to_string_lossy().ends_with(".safetensors.index.json");
    if index {
        return foreign("it is the index of a checkpoint in several files".into(), "give the folder that holds it");
    }
    foreign("it is JSON".into(), USE_SAFETENSORS)
}

/// The beginning of a file as text, if it is text. The last character may be cut in two.
fn readable(start: &[u8]) -> Option<&str> {
    let text = match str::from_utf8(start) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => str::from_utf8(&start[..error.valid_up_to()]).ok()?,
        Err(_) => return None,
    };
    (!text.contains(|c: char| c.is_control() && !c.is_ascii_whitespace())).then_some(text)
}

/// ONNX has no magic number: it is a protobuf message whose first field is a small version and whose second is its producer.
fn is_onnx(start: &[u8]) -> bool {
    let [0x08, 1..=32, 0x12, length, rest @ ..] = start else { return false };
    let producer = rest.get(..usize::from(*length));
    producer.is_some_and(|name| !name.is_empty() && name.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' '))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_text(file: &[u8]) -> Option<String> {
        format(Path::new("x"), file).map(|error| error.to_string())
    }

    #[test]
    fn formats_are_recognized() {
        let mut tar = vec![b'a'; 600];
        tar[3] = 0;
        tar[257..262].copy_from_slice(b"ustar");
        let cases: [(&[u8], &str); 14] = [
            (b"\x7FELF\x02\x01", "not a safetensors file (x): it is a program or library (ELF)"),
            (b"\x1F\x8B\x08\0", "not a safetensors file (x): it is packed with gzip"),
            (b"\x28\xB5\x2F\xFD\0", "not a safetensors file (x): it is packed with zstd"),
            (b"\xFD7zXZ\0\0", "not a safetensors file (x): it is packed with xz"),
            (&tar, "not a safetensors file (x): it is a tar archive"),
            (b"\x89HDF\r\n\x1A\n\0", "unsupported weight format (x): HDF5, as Keras writes it"),
            (b"\x08\x08\x12\x07pytorch\x1A\x05", "unsupported weight format (x): ONNX"),
            (b"\x80\x04\x95", "unsupported weight format (x): Python pickle, which can run code and is never loaded"),
            (b"# FLUX.2\n", "not a safetensors file (x): it is text"),
            ("狐 in the snow".as_bytes(), "not a safetensors file (x): it is text"),
            (b" {\"a\": 1}", "not a safetensors file (x): it is JSON"),
            (b"[1, 2, 3]", "not a safetensors file (x): it is JSON"),
            (b"{\"weight_map\": {}}", "not a safetensors file (x): it is the index of a checkpoint in several files"),
            (&[0; 700], "not a safetensors file (x): it begins with zeros, like a file whose download is incomplete"),
        ];
        for (file, message) in cases {
            assert_eq!(error_text(file).as_deref(), Some(message));
        }
        // The examined bytes of a text may end within a character; the other cases are of no known format.
        assert!(error_text(format!("x{}", "é".repeat(400)).as_bytes()).unwrap().ends_with("it is text"));
        for unknown in
            [&b"\x01\x02\x03"[..], b"text", b"\0\0", b"\x08\x08\x12\x00", b"\x08\x08\x12\x07pyt", b"\xE9t\xE9 in Latin-1"]
        {
            assert_eq!(error_text(unknown), None, "{unknown:?}");
        }
    }
}
