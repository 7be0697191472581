//! Reference images: read, oriented, brought to size.
//!
//! A reference is a file from anywhere, so it is the least trusted thing the engine reads. [`DecodedReference::open`] decides by content
//! what the file is, walks its container to learn the size, and refuses what is too large, too small, damaged or not an image
//! before it reserves any memory for pixels. A damaged image is never guessed at: half a picture would be edited as if it were
//! the whole.
//!
//! [`DecodedReference::prepare`] then does what the reference pipeline does, to the bit: `diffusers.utils.load_image` (turn as EXIF
//! says, convert to RGB, drop alpha) followed by the preprocessing of its klein pipeline (cap the area, crop to whole patches).
//! That includes the decoding, where JPEG leaves roundings to the decoder: ours has those of the one in Pillow. Two differences
//! are meant:
//!
//! - Pillow clips 16-bit grey at 255, which turns such an image white. Here all 16-bit images keep their upper byte, as Pillow
//!   does with colour.
//! - Pillow fills in what is missing inside of a JPEG. Here it is damaged.
//!
//! An image handed to that pipeline without `load_image` is resized in its own colour mode (palettes even without
//! interpolation) and converted afterwards; for an RGB image, which is what `load_image` returns, the two orders are the same.

mod jpeg;
mod jpeg_file;
mod kind;
pub mod lanczos;
mod orientation;
mod png_file;

use crate::error::{Error, Result};
use crate::files;
use crate::image::Image;
use crate::memory;
use crate::sequence::{Grid, PATCH};
use kind::Kind;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The largest file read.
const MAX_FILE: u64 = 64 << 20;

/// The longest side decoded.
const MAX_SIDE: usize = 16_384;

/// The most pixels decoded; twice what the largest phone cameras make.
const MAX_PIXELS: usize = 100_000_000;

/// The largest metadata looked into. Orientation is a matter of bytes; whoever sends more sends something else.
const MAX_METADATA: usize = 256 << 10;

/// The shortest side the model takes.
const MIN_SIDE: usize = 64;

/// The largest ratio of the sides the model takes.
const MAX_RATIO: usize = 8;

/// Images of more pixels than this are shrunk to it, for klein.
pub const AREA_CAP: usize = 1024 * 1024;

/// A decoded reference image: upright, RGB, and of a size that [`DecodedReference::prepare`] can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodedReference {
    origin: PathBuf,
    image: Image,
}

impl DecodedReference {
    /// Reads a PNG or JPEG file.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = files::read(path, MAX_FILE).map_err(|error| match error.kind() {
            // No image, so nothing that could be converted to another kind of image.
            ErrorKind::InvalidInput => Error::bad_file(path, "cannot read image", error.to_string()),
            ErrorKind::FileTooLarge => Fault::too_long().into_error(path),
            _ => Error::read(path, error),
        })?;
        Self::from_bytes(&bytes, path)
    }

    /// Decodes a file that is in memory; `origin` is its name for display.
    pub fn from_bytes(bytes: &[u8], origin: &Path) -> Result<Self> {
        decode(bytes, origin).map(|image| Self { origin: origin.into(), image }).map_err(|fault| fault.into_error(origin))
    }

    /// The image as decoded and turned upright.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Brings the image to the size the model takes: at most `area` pixels ([`AREA_CAP`] for klein), then the largest centred part
    /// that divides into whole patches. Nothing is ever enlarged.
    pub fn prepare(self, area: usize) -> PreparedReference {
        let Self { origin, image } = self;
        let original = (image.width, image.height);
        let resized = capped(original, area);
        let (width, height) = resized.unwrap_or(original);
        let pixels = if resized.is_some() { lanczos::resize(&image.pixels, original, (width, height)) } else { image.pixels };
        let whole = (width - width % PATCH, height - height % PATCH);
        let pixels = centre(pixels, (width, height), whole);
        PreparedReference { origin, width: whole.0, height: whole.1, pixels, original, resized }
    }
}

/// A reference image as the model sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedReference {
    /// The file it came from, for display.
    pub origin: PathBuf,
    /// Pixels in a row, a multiple of [`PATCH`].
    pub width: usize,
    /// Rows, a multiple of [`PATCH`].
    pub height: usize,
    /// Red, green, blue of each pixel, row by row.
    pub pixels: Vec<u8>,
    /// Width and height of the upright original.
    pub original: (usize, usize),
    /// Width and height after shrinking and before cropping, if the image was shrunk.
    pub resized: Option<(usize, usize)>,
}

impl PreparedReference {
    /// Its size in tokens.
    pub fn grid(&self) -> Grid {
        Grid { width: self.width / PATCH, height: self.height / PATCH }
    }

    /// The pixels as the autoencoder takes them, -1 to 1, in the order of [`PreparedReference::pixels`].
    pub fn values(&self) -> Vec<f32> {
        // The roundings of the reference: a division in f32, then the scaling in f32.
        let table: [f32; 256] = std::array::from_fn(|v| 2.0 * (v as f32 / 255.0) - 1.0);
        self.pixels.iter().map(|&v| table[usize::from(v)]).collect()
    }
}

/// The size an image is shrunk to, or `None` if it may stay as it is.
fn capped((width, height): (usize, usize), cap: usize) -> Option<(usize, usize)> {
    let area = width * height;
    // An area is at most MAX_PIXELS, so f64 holds it exactly and these are the steps of the reference: truncation included.
    let scale = (cap as f64 / area as f64).sqrt();
    let shrunk = |side: usize| (side as f64 * scale) as usize;
    (area > cap).then(|| (shrunk(width), shrunk(height)))
}

/// Cuts the middle out of an image; an odd rest is one pixel larger on the right and at the bottom.
fn centre(mut pixels: Vec<u8>, from: (usize, usize), to: (usize, usize)) -> Vec<u8> {
    if from == to {
        return pixels;
    }
    let (left, top) = ((from.0 - to.0) / 2, (from.1 - to.1) / 2);
    for row in 0..to.1 {
        let start = ((top + row) * from.0 + left) * 3;
        // Rows only move towards the start, so none is overwritten before its turn.
        pixels.copy_within(start..start + to.0 * 3, row * to.0 * 3);
    }
    pixels.truncate(to.0 * to.1 * 3);
    pixels
}

fn decode(bytes: &[u8], origin: &Path) -> Result<Image, Fault> {
    if bytes.len() as u64 > MAX_FILE {
        return Err(Fault::too_long());
    }
    let kind = kind::of(bytes, origin)?;
    let (image, orientation) = isolated(|| match kind {
        Kind::Png => png_file::decode(bytes),
        Kind::Jpeg => jpeg_file::decode(bytes),
    })?;
    orientation.apply(image)
}

/// Runs a decoder. Ours and the libraries' are fuzzed, and still: a panic on a strange file must not take the process with it.
fn isolated<T>(decoder: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    // Nothing the decoder touches outlives a panic, so nothing broken can be seen.
    catch_unwind(AssertUnwindSafe(decoder)).unwrap_or_else(|_| Err(Fault::Damaged("the decoder gave up on it".into())))
}

/// Refuses sizes before memory is reserved for them.
fn check_size(width: usize, height: usize) -> Result<(), Fault> {
    if width == 0 || height == 0 {
        return Err(Fault::Damaged(format!("its header says {width}x{height} pixels")));
    }
    // Sides come from 32-bit fields and may be anything: saturating, because whatever saturates is too large.
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

/// Memory for pixels, or the news that there is none: an image can ask for hundreds of megabytes.
fn buffer<T: Copy + Default>(count: usize) -> Result<Vec<T>, Fault> {
    let mut buffer = Vec::new();
    let reserved = memory::fallible(|| buffer.try_reserve_exact(count));
    reserved.map_err(|_| Fault::Memory((count * size_of::<T>()) as u64))?;
    buffer.resize(count, T::default());
    Ok(buffer)
}

/// Repeats each sample of a grey image for red, green and blue.
fn grey_to_rgb(grey: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut rgb = buffer(grey.len() * 3)?;
    rgb.chunks_exact_mut(3).zip(grey).for_each(|(pixel, &v)| pixel.fill(v));
    Ok(rgb)
}

/// Replaces each pixel of `N` samples by `convert` of it, in place.
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

/// Why an image is refused, before it is known what to call it.
#[derive(Debug)]
enum Fault {
    /// Not an image, or not of a kind that is read here.
    Unreadable(String),
    /// An image with something missing or wrong.
    Damaged(String),
    /// Over a limit.
    TooLarge(String),
    /// Under what the model takes.
    TooSmall(String),
    /// So many bytes could not be had.
    Memory(u64),
}

/// The fault of a file that was cut short.
fn ends_early(length: usize) -> Fault {
    Fault::Damaged(format!("the file ends after {length} bytes, before the image does"))
}

impl Fault {
    fn too_long() -> Self {
        Self::TooLarge(format!("the file is over {} MiB, which is the limit", MAX_FILE >> 20))
    }

    fn into_error(self, origin: &Path) -> Error {
        match self {
            Self::Unreadable(detail) => Error::bad_file(origin, "cannot read image", detail).with_hint("convert to PNG or JPEG"),
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
        // A model of small pictures; the narrowest strip still has a patch of height.
        assert_eq!(capped((1024, 768), 256 * 256), Some((295, 221)));
        assert_eq!(capped((512, 64), 64 * 64), Some((181, 22)));
    }

    #[test]
    fn the_centre_is_cut_out() {
        // 3 x 3 pixels, each of the value of its index, to 2 x 1 and 1 x 2.
        let pixels: Vec<u8> = (0..9).flat_map(|i| [i; 3]).collect();
        assert_eq!(centre(pixels.clone(), (3, 3), (2, 1)), [[3; 3], [4; 3]].concat());
        assert_eq!(centre(pixels, (3, 3), (1, 2)), [[1; 3], [4; 3]].concat());
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
