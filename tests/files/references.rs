//! Reference images from outside: results equal Pillow's and the diffusers pipeline's, and hostile files are refused.
//!
//! `tools/goldens references` writes the fixtures.

mod bombs;
mod equality;
mod faults;
mod layouts;

use kiln::error::Result;
use kiln::internals::reference::DecodedReference;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    common::root().join("tests/fixtures")
}

fn fixture(name: &str) -> Vec<u8> {
    let path = fixtures().join("references").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn decode(bytes: &[u8]) -> Result<DecodedReference> {
    DecodedReference::from_bytes(bytes, Path::new("x"))
}

/// The message of a refusal.
fn refusal(bytes: &[u8]) -> String {
    let error = decode(bytes).map(|_| "an image").expect_err("this must be refused");
    assert_eq!(error.exit_code(), 3, "{error}");
    error.to_string()
}

/// Name and data of a PNG chunk.
type Chunk<'a> = (&'a [u8; 4], &'a [u8]);

/// A PNG of some chunks, each with the right length and checksum.
fn png(chunks: &[Chunk<'_>]) -> Vec<u8> {
    let mut out = b"\x89PNG\r\n\x1A\n".to_vec();
    for (name, data) in chunks {
        let mut crc = flate2::Crc::new();
        crc.update(*name);
        crc.update(data);
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(name.iter().chain(*data));
        out.extend(crc.sum().to_be_bytes());
    }
    out
}

/// The header of an 8-bit RGB image.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat()
}

/// The offset of the height in a JPEG; the width follows it.
fn jpeg_height_at(jpeg: &[u8]) -> usize {
    let is_frame = |w: &[u8]| w[0] == 0xFF && matches!(w[1], 0xC0 | 0xC2) && w[2] == 0;
    jpeg.windows(3).position(is_frame).expect("a frame header") + 5
}

/// A JPEG with another size in its header.
fn jpeg_claiming(jpeg: &[u8], width: u16, height: u16) -> Vec<u8> {
    let mut out = jpeg.to_vec();
    let at = jpeg_height_at(jpeg);
    out[at..at + 2].copy_from_slice(&height.to_be_bytes());
    out[at + 2..at + 4].copy_from_slice(&width.to_be_bytes());
    out
}
