//! Masks: which pixels of an init image are repainted.

use crate::error::{Error, Result};
use crate::files::sha256_of;
use crate::image::Image;
use crate::reference::{DecodedReference, decoded_with_alpha, read};
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// The most that red, green and blue of a gray pixel differ. JPEG shifts them.
const GRAY: u8 = 16;

/// Values within this distance of black or white are black or white. JPEG rings.
const RING: u8 = 8;

/// Pixels that a thread looks at together; the sums over them are vectorized.
const PIECE: usize = 1 << 14;

/// A mask as its file shows it: 255 is repainted, 0 is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    origin: PathBuf,
    width: usize,
    height: usize,
    values: Vec<u8>,
    sha256: String,
}

impl Mask {
    /// Reads a PNG, JPEG or WebP file. If a pixel of it is not opaque, transparency is the mask: what is transparent is repainted.
    /// Otherwise what is white is repainted.
    pub fn open(path: &Path) -> Result<Self> {
        Self::from_bytes(&read(path)?, path)
    }

    /// Reads a mask in memory. `origin` is its display name.
    pub fn from_bytes(bytes: &[u8], origin: &Path) -> Result<Self> {
        let (decoded, sha256) = rayon::join(|| decoded_with_alpha(bytes, origin), || sha256_of(bytes));
        let (image, alpha) = decoded?;
        Ok(Self { sha256, ..Self::of_image(&image, alpha, origin)? })
    }

    /// The SHA-256 of the file, as hexadecimal digits; empty for a mask without a file.
    pub fn digest(&self) -> &str {
        &self.sha256
    }

    /// The mask that a decoded image shows, with the opacity of its pixels if it has one. `origin` is its display name.
    pub fn of_image(image: &Image, alpha: Option<Vec<u8>>, origin: &Path) -> Result<Self> {
        let values: Vec<u8> = match alpha.filter(|alpha| alpha.iter().any(|value| *value < u8::MAX)) {
            Some(alpha) => alpha.par_iter().map(|value| cleaned(u8::MAX - value)).collect(),
            None => {
                let pixels = image.pixels.as_chunks::<3>().0;
                let color = |most: u8, [r, g, b]: &[u8; 3]| most.max(r.max(g).max(b) - r.min(g).min(b));
                if pixels.par_chunks(PIECE).any(|pixels| pixels.iter().fold(0, color) > GRAY) {
                    let error = Error::bad_file(origin, "cannot use the mask", "it has colors, so it is an image and no mask");
                    return Err(error.with_hint(RULES));
                }
                // Green is the nearest to the lightness where JPEG shifted a channel.
                pixels.par_iter().map(|[_, green, _]| cleaned(*green)).collect()
            }
        };
        if values.par_chunks(PIECE).all(|values| values.iter().fold(0, |all, value| all | value) == 0) {
            let error = Error::bad_file(origin, "cannot use the mask", "nothing of it is white or transparent");
            return Err(error.with_hint(RULES));
        }
        Ok(Self { origin: origin.into(), width: image.width, height: image.height, values, sha256: String::new() })
    }

    /// The value of each pixel, row by row.
    pub fn values(&self) -> &[u8] {
        &self.values
    }

    /// The value of each pixel, row by row.
    pub(super) fn into_values(self) -> Vec<u8> {
        self.values
    }

    /// Refuses a mask of another size than its image's.
    pub(super) fn matching(self, init: &DecodedReference) -> Result<Self> {
        let image = init.image();
        if (self.width, self.height) != (image.width, image.height) {
            let (width, height) = (self.width, self.height);
            let what = format!("it is {width}x{height}, the init image {}x{}", image.width, image.height);
            let error = Error::bad_file(&self.origin, "cannot use the mask", what);
            return Err(error.with_hint("both sizes count after EXIF rotation"));
        }
        Ok(self)
    }
}

/// Both ways to say what is repainted.
const RULES: &str = "paint white on black, or make transparent, what is to be repainted";

/// A value without what compression adds to black and white.
fn cleaned(value: u8) -> u8 {
    match value {
        ..RING => 0,
        _ if value > u8::MAX - RING => u8::MAX,
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_of_black_and_white_are_removed() {
        assert_eq!([0, 7, 8, 128, 247, 248, 255].map(cleaned), [0, 0, 8, 128, 247, 255, 255]);
    }
}
