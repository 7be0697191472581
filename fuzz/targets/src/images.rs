//! JPEG files.

use crate::check_file_error;
use common::cost::peak_of;
use jpeg_decoder::{ColorTransform, Decoder, PixelFormat};
use kiln::DecodedReference;
use kiln::error::Result;
use kiln::image::Image;
use std::path::Path;

/// Decodes a file in memory that is bounded by its length.
pub(crate) fn decode(file: &[u8]) -> Result<Image> {
    let (image, peak) = peak_of(|| DecodedReference::from_bytes(file, Path::new("x")).map(|decoded| decoded.image().clone()));
    // A bit of a file can be a block of 64 coefficients, and deflate makes 1032 bytes of one.
    assert!(peak <= (8 << 20) + 8 * 64 * 12 * file.len() as isize, "{peak} bytes for a file of {}", file.len());
    image
}

/// How far a channel may be from the reference decoder's. It rounds its inverse DCT and its upsampling of chroma to other sides, and one
/// level of chroma is almost two of blue.
const TOLERANCE: u8 = 5;

/// Pixels along a tile, whose values are compared if no pixel in or next to it can have left the range of samples: from there on decoders
/// do as they like, and kiln does as the SIMD code of libjpeg-turbo.
const TILE: usize = 16;

/// The largest quantizer of the files that are compared. Larger ones can overflow 32 bits in the reference decoder.
const QUANTIZER: u8 = 15;

/// A JPEG. An accepted file is the image that another decoder reads from it, if that one accepts it, too, and data behind its end does not
/// matter.
pub fn jpeg(data: &[u8]) {
    // With a JPEG's first bytes in front, any input is one. Orientations are for another target.
    let start: &[u8] = if data.starts_with(b"\xFF\xD8\xFF") { b"" } else { b"\xFF\xD8" };
    let file = upright([start, data].concat());
    let image = match decode(&file) {
        Ok(image) => image,
        Err(error) => return check_file_error(&error),
    };
    assert_eq!(image.pixels.len(), image.width * image.height * 3);
    let longer = decode(&[&file[..], b"\xFF\xD8\xFF\xFF"].concat());
    assert!(longer.is_ok_and(|longer| longer == image), "data after the image changes it");
    compare(&file, &image);
}

/// The file without names of metadata that could turn it.
fn upright(mut file: Vec<u8>) -> Vec<u8> {
    for name in [&b"Exif\0\0"[..], b"http://ns.adobe.com/xap"] {
        while let Some(at) = file.windows(name.len()).position(|window| window == name) {
            file[at] = b'_';
        }
    }
    file
}

/// Compares an image with what the reference decoder reads from its file, where the two have to agree.
pub(crate) fn compare(file: &[u8], image: &Image) {
    if quantizers(file).is_none_or(|largest| largest > QUANTIZER) {
        return;
    }
    let mut reference = Decoder::new(file);
    // Three components as they are stored, as if they were RGB. Whether they are is a guess where no marker tells.
    reference.set_color_transform(ColorTransform::RGB);
    let Ok(samples) = reference.decode() else { return };
    let info = reference.info().expect("it was decoded");
    assert_eq!((usize::from(info.width), usize::from(info.height)), (image.width, image.height));
    let channels = match info.pixel_format {
        PixelFormat::L8 => 1,
        PixelFormat::RGB24 => 3,
        _ => return,
    };
    let tame = Tame::of(&samples, channels, image);
    let differs = |convert: fn([u8; 3]) -> [u8; 3]| {
        let pixels = samples.chunks_exact(channels).zip(image.pixels.as_chunks::<3>().0).enumerate();
        let mut far = pixels.filter(|(_, (stored, pixel))| {
            let want = convert([stored[0], stored[channels / 2], stored[channels - 1]]);
            want.iter().zip(*pixel).any(|(a, b)| a.abs_diff(*b) > TOLERANCE)
        });
        far.find(|(at, _)| tame.holds(at % image.width, at / image.width)).map(|(at, _)| at)
    };
    let plain = differs(|pixel| pixel);
    let converted = if channels == 3 { differs(rgb) } else { plain };
    if let (Some(at), Some(_)) = (converted, plain) {
        let (x, y) = (at % image.width, at / image.width);
        panic!(
            "pixel {x},{y} is {:?}, and not what is stored as {:?}",
            &image.pixels[3 * at..][..3],
            &samples[channels * at..][..channels]
        );
    }
}

/// The RGB of a pixel in YCbCr, by the definition in JFIF.
fn rgb([y, cb, cr]: [u8; 3]) -> [u8; 3] {
    let [y, cb, cr] = [f64::from(y), f64::from(cb) - 128.0, f64::from(cr) - 128.0];
    [y + 1.402 * cr, y - 0.344_136 * cb - 0.714_136 * cr, y + 1.772 * cb].map(|value| value.round().clamp(0.0, 255.0) as u8)
}

/// The largest step from a sample of chroma to the next in tiles that are compared. Subsampled chroma is interpolated, so where it left its
/// range only steep steps show.
const STEP: u8 = 48;

/// The tiles of an image in which no sample is at the end of its range, for either decoder. Where a coefficient overflows, one may wrap and
/// the other clip.
struct Tame {
    across: usize,
    wild: Vec<bool>,
}

impl Tame {
    fn of(samples: &[u8], channels: usize, image: &Image) -> Self {
        let width = image.width;
        let across = width.div_ceil(TILE);
        let rows = samples.len() / channels / width;
        let mut wild = vec![false; across * rows.div_ceil(TILE)];
        let steep = |at: usize, before: usize| {
            (1..channels).any(|c| samples[at * channels + c].abs_diff(samples[before * channels + c]) > STEP)
        };
        for (at, (pixel, own)) in samples.chunks_exact(channels).zip(image.pixels.as_chunks::<3>().0).enumerate() {
            let is_end = pixel.iter().chain(own).any(|sample| matches!(sample, 0..=1 | 254..=255));
            if is_end || at % width > 0 && steep(at, at - 1) || at >= width && steep(at, at - width) {
                wild[at / width / TILE * across + at % width / TILE] = true;
            }
        }
        Self { across, wild }
    }

    /// Whether the tile of a pixel and those around it are tame. A block of chroma covers at most two by two tiles.
    fn holds(&self, x: usize, y: usize) -> bool {
        let (x, y, down) = (x / TILE, y / TILE, self.wild.len() / self.across);
        let near = |at: usize, end: usize| at.saturating_sub(1)..(at + 2).min(end);
        near(y, down).all(|y| near(x, self.across).all(|x| !self.wild[y * self.across + x]))
    }
}

/// The largest quantizer of all tables of 8 bits; `None` if there is a table of 16 bits, or none.
fn quantizers(file: &[u8]) -> Option<u8> {
    let mut largest = None;
    let mut rest = file;
    while let Some(at) = rest.windows(2).position(|pair| pair == [0xFF, 0xDB]) {
        rest = &rest[at + 2..];
        let Some((length, tables)) = rest.split_first_chunk() else { break };
        let tables = &tables[..usize::from(u16::from_be_bytes(*length)).saturating_sub(2).min(tables.len())];
        for table in tables.chunks(65) {
            if table[0] > 15 {
                return None;
            }
            largest = largest.max(table[1..].iter().copied().max());
        }
    }
    largest
}
