//! Detects zeros where weights should be. A download that allocates its file first, or fetches pieces out of order, leaves a file
//! of full length whose missing bytes read as zeros: the header is right, every tensor has its shape, and the image is gray or
//! noise.
//!
//! A matrix counts as missing if all of it is zero, or one of eight equal chunks of it, which is hundreds of a layer's outputs or
//! a whole head. Single rows of zeros are accepted, since training can produce dead outputs. Zero chunks are accepted in lookup
//! tables, whose rows after the last token are never trained, and in matrices so small that a chunk would be only a few rows.
//! Norm weights and variances are checked too, since zeros there make all outputs zero. Biases and means are not, since training
//! can make them zero.
//!
//! The first nonzero value ends the search in a chunk, so a valid matrix costs eight reads.

use super::header::Entry;
use crate::error::{Error, Result};
use kiln_numerics::scan::all_zero;
use std::path::Path;

/// Number of chunks of a matrix that are checked one by one.
const CHUNKS: usize = 8;

/// The shortest chunk that is checked by itself, in bytes.
const MIN_CHUNK: usize = 64 << 10;

/// Tensors with fewer elements are not checked, because they can be zero by chance.
const MIN_ELEMENTS: usize = 8;

/// Whether training can make all of this tensor zero: a bias or a mean, which is only added or subtracted.
pub fn may_be_zero(name: &str) -> bool {
    ["bias", "mean"].iter().any(|end| name.ends_with(end))
}

/// Fails if a matrix is zero where no trained matrix is. `bytes` is the content of the tensor `name`.
pub(super) fn refuse(path: &Path, name: &str, entry: &Entry, bytes: &[u8], table: bool) -> Result<()> {
    if entry.shape.iter().product::<usize>() < MIN_ELEMENTS {
        return Ok(());
    }
    let chunk = bytes.len().div_ceil(CHUNKS);
    let chunk = if table || chunk < MIN_CHUNK { bytes.len() } else { chunk };
    let Some(empty) = bytes.chunks(chunk).position(all_zero) else { return Ok(()) };
    let detail = if all_zero(bytes) {
        format!("tensor `{name}` is all zeros")
    } else {
        let start = entry.range.start + empty * chunk;
        format!("tensor `{name}` is zeros from byte {start} of the file on")
    };
    Err(Error::bad_file(path, "incomplete file", detail)
        .with_hint("what is not downloaded yet reads as zeros; download it again"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::StoredDtype;

    fn found(shape: &[usize], bytes: &[u8], table: bool) -> Option<String> {
        static BF16: StoredDtype = StoredDtype { name: "BF16", bits: 16 };
        let entry = Entry { dtype: &BF16, shape: shape.to_vec(), range: 1000..1000 + bytes.len() };
        refuse(Path::new("x"), "w", &entry, bytes, table).err().map(|error| error.to_string())
    }

    #[test]
    fn only_zeros_that_training_does_not_produce_are_refused() {
        let (shape, length) = ([1024, 512], 1024 * 512 * 2);
        let filled = |range: std::ops::Range<usize>| {
            let mut bytes = vec![0x3F; length];
            bytes[range].fill(0);
            bytes
        };
        assert_eq!(found(&shape, &filled(0..0), false), None);
        assert_eq!(found(&shape, &filled(0..length), false).unwrap(), "incomplete file (x): tensor `w` is all zeros");
        assert_eq!(found(&shape, &filled(0..length), true).unwrap(), "incomplete file (x): tensor `w` is all zeros");
        // A hole of a quarter covers one of the chunks, wherever it begins.
        for start in (0..length * 3 / 4).step_by(length / 32 + 1) {
            let text = found(&shape, &filled(start..start + length / 4), false).unwrap();
            assert!(text.starts_with("incomplete file (x): tensor `w` is zeros from byte "), "{text}");
        }
        let tail = filled(length / 8 * 7..length);
        let text = found(&shape, &tail, false).unwrap();
        assert_eq!(text, format!("incomplete file (x): tensor `w` is zeros from byte {} of the file on", 1000 + length / 8 * 7));
        // The last rows of a table and a few dead rows are accepted; a vector and a small matrix of zeros are not.
        assert_eq!(found(&shape, &tail, true), None);
        assert_eq!(found(&shape, &filled(4096..4096 + 20 * 1024), false), None);
        assert!(found(&[1024 * 512], &filled(0..length), false).is_some(), "all of a vector");
        assert_eq!(found(&[7], &[0; 14], false), None, "too few to tell");
        let mut small = vec![0; 64 * 64 * 2];
        assert!(found(&[64, 64], &small, false).is_some());
        small[8191] = 1;
        assert_eq!(found(&[64, 64], &small, false), None);
        // The bytes of negative zeros are not zero, so they were written.
        assert_eq!(found(&[2, 1], &[0, 0x80, 0, 0x80], false), None);
        assert_eq!(found(&[0, 4], &[], false), None);
    }
}
