//! Reference images: decoding, EXIF orientation and resizing.
//!
//! A reference can come from anywhere, so it is the least trusted input of the engine. Before [`DecodedReference::open`]
//! allocates memory for pixels, it detects the format by content and walks the container to find the image size. It rejects a
//! file that is too large, too small, damaged or not an image. A damaged image is never completed by guessing: a partial image
//! would be edited as if it were whole.
//!
//! [`DecodedReference::prepare`] then matches the reference pipeline bit for bit: `diffusers.utils.load_image` (apply the EXIF
//! orientation, convert to RGB, drop alpha) followed by the preprocessing of its klein pipeline (cap the area, crop to whole
//! patches). The decoding matches as well: the JPEG standard leaves roundings to the decoder, and these are Pillow's roundings.
//! There are two deliberate differences:
//!
//! - Pillow clips 16-bit gray at 255, which makes such an image white. kiln keeps the upper byte of all 16-bit images, as Pillow
//!   does for color images.
//! - Pillow fills in missing data inside a JPEG. kiln treats such a file as damaged.
//!
//! An image passed to that pipeline without `load_image` is resized in its own color mode (palettes even without interpolation)
//! and converted afterwards. For an RGB image, as `load_image` returns it, both orders are equivalent.

mod jpeg;
mod jpeg_file;
mod kind;
mod orientation;
mod png_file;
mod webp_file;

use crate::error::{Error, Result};
use crate::files::{self, sha256_of};
use crate::image::Image;
use crate::memory;
use crate::sequence::{Grid, PATCH};
pub use kiln_numerics::resample;
pub(crate) use kind::Kind;
use orientation::Orientation;
use rayon::prelude::*;
use resample::Filter;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Limit on the size of a file, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// Limit on the longer side, in pixels.
const MAX_SIDE: usize = 16_384;

/// Limit on the number of pixels; twice the resolution of the largest phone cameras.
const MAX_PIXELS: usize = 100_000_000;

/// Limit on the size of metadata that is searched for an orientation. An orientation takes only a few bytes.
const MAX_METADATA: usize = 256 << 10;

/// The shortest side that the model accepts.
const MIN_SIDE: usize = 64;

/// The largest aspect ratio that the model accepts.
const MAX_RATIO: usize = 8;

/// Area in pixels to which larger images are downscaled for klein.
pub const AREA_CAP: usize = 1024 * 1024;

/// A decoded reference image: upright, RGB, and of a size that [`DecodedReference::prepare`] accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodedReference {
    origin: PathBuf,
    image: Image,
    sha256: String,
}

impl DecodedReference {
    /// Reads a PNG, JPEG or WebP file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::from_bytes(&read(path)?, path)
    }

    /// The bytes of an image file, if it is not too long for one.
    pub fn read(path: &Path) -> Result<Vec<u8>> {
        read(path)
    }

    /// The SHA-256 of an image file, as hexadecimal digits. The file is not decoded.
    pub fn digest_of(path: &Path) -> Result<String> {
        Ok(sha256_of(&read(path)?))
    }

    /// The SHA-256 of the bytes that were decoded, as hexadecimal digits.
    pub fn digest(&self) -> &str {
        &self.sha256
    }

    /// Decodes a file in memory. `origin` is its display name.
    pub fn from_bytes(bytes: &[u8], origin: &Path) -> Result<Self> {
        let (decoded, sha256) = rayon::join(|| decode(bytes, origin, Alpha::Dropped), || sha256_of(bytes));
        let (image, _) = decoded.map_err(|fault| fault.into_error(origin))?;
        Ok(Self { origin: origin.into(), image, sha256 })
    }

    /// An image that is already decoded.
    pub(crate) fn from_image(image: Image) -> Self {
        Self { origin: PathBuf::new(), image, sha256: String::new() }
    }

    /// The decoded, upright image.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The decoded, upright image.
    pub(crate) fn into_image(self) -> Image {
        self.image
    }

    /// Resizes the image for the model: downscales it to at most `area` pixels (`AREA_CAP` for klein), then crops it to the
    /// largest centered part of whole patches. It never enlarges an image.
    pub fn prepare(self, area: usize) -> PreparedReference {
        let Self { origin, image, sha256 } = self;
        let original = (image.width, image.height);
        let resized = capped(original, area);
        let (width, height) = resized.unwrap_or(original);
        let pixels = if resized.is_some() {
            resample::resize::<3>(&image.pixels, original, (width, height), Filter::Lanczos)
        } else {
            image.pixels
        };
        let whole = (width - width % PATCH, height - height % PATCH);
        let pixels = centered::<3>(pixels, (width, height), whole);
        PreparedReference { origin, sha256, width: whole.0, height: whole.1, pixels, original, resized }
    }
}

/// An image and the opacity of its pixels, if the file has one. `origin` is its display name.
pub(crate) fn decoded_with_alpha(bytes: &[u8], origin: &Path) -> Result<(Image, Option<Vec<u8>>)> {
    decode(bytes, origin, Alpha::Kept).map_err(|fault| fault.into_error(origin))
}

/// A part of an image file that holds text, as it is in the file.
#[derive(Clone, Copy)]
pub(crate) enum RawText<'a> {
    /// PNG's tEXt: a key and text in Latin-1.
    Latin1(&'a [u8]),
    /// PNG's zTXt, a compressed tEXt.
    Compressed(&'a [u8]),
    /// PNG's iTXt: UTF-8, perhaps compressed.
    International(&'a [u8]),
    /// A TIFF structure.
    Exif(&'a [u8]),
    /// XML.
    Xmp(&'a [u8]),
}

/// Hands the parts of a file that hold text to `each`. `origin` is its display name. The pixels are not decoded.
pub(crate) fn texts<'a>(bytes: &'a [u8], origin: &Path, each: &mut dyn FnMut(RawText<'a>)) -> Result<Kind> {
    let mut walk = |kind| match kind {
        Kind::Png => png_file::texts(bytes, each),
        Kind::Jpeg => jpeg_file::texts(bytes, each),
        Kind::WebP => webp_file::texts(bytes, each),
    };
    kind::of(bytes, origin).and_then(|kind| walk(kind).map(|()| kind)).map_err(|fault| fault.into_error(origin))
}

/// The bytes of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    files::read(path, MAX_FILE).map_err(|error| match error.kind() {
        // The file is not an image, so there is no hint to convert it to another format.
        ErrorKind::InvalidInput => Error::bad_file(path, "cannot read image", error.to_string()),
        ErrorKind::FileTooLarge => Fault::too_long().into_error(path),
        _ => Error::read(path, error),
    })
}

/// A reference image as an input of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedReference {
    /// The file that the image came from, for display.
    pub origin: PathBuf,
    /// The SHA-256 of the file, as hexadecimal digits.
    pub sha256: String,
    /// Width in pixels, a multiple of `PATCH`.
    pub width: usize,
    /// Height in pixels, a multiple of `PATCH`.
    pub height: usize,
    /// Red, green, blue of each pixel, row by row.
    pub pixels: Vec<u8>,
    /// Width and height of the upright original.
    pub original: (usize, usize),
    /// Width and height after downscaling and before cropping, if the image was downscaled.
    pub resized: Option<(usize, usize)>,
}

impl PreparedReference {
    /// The size in tokens.
    pub fn grid(&self) -> Grid {
        Grid { width: self.width / PATCH, height: self.height / PATCH }
    }

    /// The pixels as the input of the VAE, within -1..1, in the order of [`PreparedReference::pixels`].
    pub fn values(&self) -> Vec<f32> {
        vae_input(&self.pixels)
    }
}

/// Pixels as the input of the VAE, within -1..1.
pub(crate) fn vae_input(pixels: &[u8]) -> Vec<f32> {
    // The reference implementation rounds twice: the division and the scaling are both in f32.
    let table: [f32; 256] = std::array::from_fn(|v| 2.0 * (v as f32 / 255.0) - 1.0);
    pixels.par_iter().with_min_len(1 << 14).map(|&v| table[usize::from(v)]).collect()
}

/// The size to which an image is downscaled, or `None` if its area does not exceed the cap.
pub(crate) fn capped((width, height): (usize, usize), cap: usize) -> Option<(usize, usize)> {
    let area = width * height;
    // An area is at most MAX_PIXELS, so it is exact in f64. The steps match the reference implementation, including the truncation.
    let scale = (cap as f64 / area as f64).sqrt();
    let shrunk = |side: usize| (side as f64 * scale) as usize;
    (area > cap).then(|| (shrunk(width), shrunk(height)))
}

/// Crops the center of an image of `C` bytes per pixel; if the margin is odd, the larger half is on the right and at the bottom.
pub(crate) fn centered<const C: usize>(mut pixels: Vec<u8>, from: (usize, usize), to: (usize, usize)) -> Vec<u8> {
    if from == to {
        return pixels;
    }
    let (left, top) = ((from.0 - to.0) / 2, (from.1 - to.1) / 2);
    for row in 0..to.1 {
        let start = ((top + row) * from.0 + left) * C;
        // Rows only move toward the start, so no row is overwritten before it is copied.
        pixels.copy_within(start..start + to.0 * C, row * to.0 * C);
    }
    pixels.truncate(to.0 * to.1 * C);
    pixels
}

/// Whether transparency is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alpha {
    Dropped,
    Kept,
}

/// An image as a decoder returns it.
struct Decoded {
    image: Image,
    /// The opacity of each pixel, if it is kept and the file has one.
    alpha: Option<Vec<u8>>,
    orientation: Orientation,
}

/// Decodes an image and turns it upright. Also returns the opacity of its pixels, if it is kept and the file has one.
fn decode(bytes: &[u8], origin: &Path, alpha: Alpha) -> Result<(Image, Option<Vec<u8>>), Fault> {
    if bytes.len() as u64 > MAX_FILE {
        return Err(Fault::too_long());
    }
    let kind = kind::of(bytes, origin)?;
    let Decoded { image: Image { width, height, pixels }, alpha: opacity, orientation } = isolated(|| match kind {
        Kind::Png => png_file::decode(bytes, alpha),
        Kind::Jpeg => jpeg_file::decode(bytes),
        Kind::WebP => webp_file::decode(bytes, alpha),
    })?;
    let opacity = opacity.map(|opacity| orientation.apply::<1>((width, height), opacity)).transpose()?;
    let ((width, height), pixels) = orientation.apply::<3>((width, height), pixels)?;
    Ok((Image { width, height, pixels }, opacity.map(|(_, opacity)| opacity)))
}

/// Runs a decoder. All decoders are fuzzed. If one panics nevertheless, the panic becomes an error instead of ending the process.
fn isolated<T>(decoder: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    // The decoder has no state that outlives a panic, so no broken invariant can be observed.
    catch_unwind(AssertUnwindSafe(decoder)).unwrap_or_else(|_| Err(Fault::Damaged("the decoder gave up on it".into())))
}

/// Rejects sizes before memory is allocated for them.
fn check_size(width: usize, height: usize) -> Result<(), Fault> {
    if width == 0 || height == 0 {
        return Err(Fault::Damaged(format!("its header says {width}x{height} pixels")));
    }
    // Sides come from untrusted 32-bit fields. A saturated product is too large in any case.
    let (pixels, mega) = (width.saturating_mul(height), 1_000_000);
    if pixels > MAX_PIXELS {
        return Err(Fault::TooLarge(format!("{width}x{height} = {} MP, limit {} MP", pixels / mega, MAX_PIXELS / mega)));
    }
    if width.max(height) > MAX_SIDE {
        return Err(Fault::TooLarge(format!("{width}x{height}, limit {MAX_SIDE} a side")));
    }
    if width.min(height) < MIN_SIDE || width.max(height) > MAX_RATIO * width.min(height) {
        return Err(Fault::TooSmall(format!(
            "{width}x{height}; sides must be at least {MIN_SIDE} and the ratio at most {MAX_RATIO}:1"
        )));
    }
    Ok(())
}

/// Allocates memory for pixels, or returns an error if there is not enough: an image can take hundreds of megabytes.
fn buffer<T: Copy + Default>(count: usize) -> Result<Vec<T>, Fault> {
    let mut buffer = Vec::new();
    let reserved = memory::fallible(|| buffer.try_reserve_exact(count));
    reserved.map_err(|_| Fault::Memory((count * size_of::<T>()) as u64))?;
    buffer.resize(count, T::default());
    Ok(buffer)
}

/// Fails if there is no memory for this many bytes. A library that is about to allocate them could not report it.
fn reservable(bytes: usize) -> Result<(), Fault> {
    let reserved = memory::fallible(|| Vec::<u8>::new().try_reserve_exact(bytes));
    reserved.map_err(|_| Fault::Memory(bytes as u64))
}

/// Converts gray samples to RGB.
fn gray_to_rgb(gray: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut rgb = buffer(gray.len() * 3)?;
    rgb.chunks_exact_mut(3).zip(gray).for_each(|(pixel, &v)| pixel.fill(v));
    Ok(rgb)
}

/// Converts each pixel of `N` samples to RGB, in place.
fn compact<const N: usize>(samples: &mut Vec<u8>, convert: impl Fn([u8; N]) -> [u8; 3]) {
    const { assert!(N >= 3, "a pixel must not grow") };
    let pixels = samples.len() / N;
    for i in 0..pixels {
        let mut pixel = [0; N];
        pixel.copy_from_slice(&samples[i * N..][..N]);
        samples[i * 3..][..3].copy_from_slice(&convert(pixel));
    }
    samples.truncate(pixels * 3);
}

/// Why an image is rejected. The error adds the path.
#[derive(Debug)]
enum Fault {
    /// Not an image, or not of a supported format.
    Unreadable(String),
    /// An image with missing or invalid data.
    Damaged(String),
    /// An image or file over a limit.
    TooLarge(String),
    /// An image below the minimum that the model accepts.
    TooSmall(String),
    /// An allocation of this number of bytes failed.
    Memory(u64),
}

/// The fault of a truncated file.
fn ends_early(length: usize) -> Fault {
    Fault::Damaged(format!("the file ends after {length} bytes, before the image does"))
}

impl Fault {
    fn too_long() -> Self {
        Self::TooLarge(format!("the file is over {} MiB, which is the limit", MAX_FILE >> 20))
    }

    fn into_error(self, origin: &Path) -> Error {
        match self {
            Self::Unreadable(detail) => {
                Error::bad_file(origin, "cannot read image", detail).with_hint("convert to PNG, JPEG or WebP")
            }
            Self::Damaged(detail) => Error::bad_file(origin, "damaged image", detail),
            Self::TooLarge(detail) => Error::bad_file(origin, "image too large", detail),
            Self::TooSmall(detail) => Error::bad_file(origin, "image too small or too narrow", detail),
            Self::Memory(need) => Error::Memory { need },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_over_the_cap_shrink_to_truncated_sides() {
        assert_eq!(capped((1500, 1000), AREA_CAP), Some((1254, 836)));
        assert_eq!(capped((605, 807), AREA_CAP), None);
        assert_eq!(capped((1024, 1024), AREA_CAP), None);
        assert_eq!(capped((1025, 1024), AREA_CAP), Some((1024, 1023)));
        assert_eq!(capped((16_384, 2048), AREA_CAP), Some((2896, 362)));
        // A model for small images. The narrowest strip is still at least one patch high.
        assert_eq!(capped((1024, 768), 256 * 256), Some((295, 221)));
        assert_eq!(capped((512, 64), 64 * 64), Some((181, 22)));
    }

    #[test]
    fn the_center_is_cut_out() {
        // 3 x 3 pixels whose values are their indices, cropped to 2 x 1 and 1 x 2.
        let pixels: Vec<u8> = (0..9).flat_map(|i| [i; 3]).collect();
        assert_eq!(centered::<3>(pixels.clone(), (3, 3), (2, 1)), [[3; 3], [4; 3]].concat());
        assert_eq!(centered::<3>(pixels, (3, 3), (1, 2)), [[1; 3], [4; 3]].concat());
    }

    #[test]
    fn sizes_are_refused_by_name() {
        let refusal = |width, height| match check_size(width, height) {
            Ok(()) => String::new(),
            Err(fault) => fault.into_error(Path::new("x.png")).to_string(),
        };
        assert_eq!(refusal(20_000, 20_000), "image too large (x.png): 20000x20000 = 400 MP, limit 100 MP");
        assert_eq!(refusal(16_385, 4000), "image too large (x.png): 16385x4000, limit 16384 a side");
        let small = "image too small or too narrow (x.png): 1x1; sides must be at least 64 and the ratio at most 8:1";
        assert_eq!(refusal(1, 1), small);
        assert!(refusal(usize::MAX, usize::MAX).contains("too large"));
        assert!(refusal(0, 100).contains("damaged"));
        for (width, height, fine) in [(64, 64, true), (63, 64, false), (64, 512, true), (64, 513, false), (10_000, 10_000, true)]
        {
            assert_eq!(check_size(width, height).is_ok(), fine, "{width}x{height}");
        }
    }

    #[test]
    fn a_panic_of_a_decoder_is_a_damaged_image() {
        let fault = isolated(|| -> Result<(), Fault> { panic!("a planted panic") }).unwrap_err();
        assert_eq!(fault.into_error(Path::new("x")).to_string(), "damaged image (x): the decoder gave up on it");
    }
}
