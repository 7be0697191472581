//! WebP files: this module walks the chunks, and the `image-webp` crate decodes the pixels.
//!
//! The library never sees the file itself. It gets a copy with only the chunks that pixels are decoded from. So profiles, metadata and
//! unknown chunks are neither parsed nor copied, whatever size they claim.

use super::orientation::Orientation;
use super::{Alpha, Decoded, Fault, RawText, buffer, check_size, compact, ends_early, reservable};
use crate::image::Image;
use image_webp::WebPDecoder;
use std::io::Cursor;

/// Bytes of a chunk header: name and length.
const HEADER: usize = 8;

/// The flag of an animation in the extended header.
const ANIMATED: u8 = 0x02;

/// The flag of transparency in the extended header.
const TRANSPARENT: u8 = 0x10;

/// The most pixels that a byte of lossless and of lossy data holds. libwebp's densest files, which are flat images, have 26,000 and 560.
const MAX_DENSITY: [usize; 2] = [1 << 15, 1 << 10];

/// Decodes a still image.
pub(super) fn decode(bytes: &[u8], alpha: Alpha) -> Result<Decoded, Fault> {
    let container = Container::read(bytes)?;
    let (width, height) = container.size()?;
    check_size(width, height)?;
    container.check_density(width, height)?;
    let core = container.core(width, height, alpha);
    let mut decoder = WebPDecoder::new(Cursor::new(&core)).map_err(library)?;
    if decoder.dimensions() != (width as u32, height as u32) {
        return Err(damaged("its headers disagree about its size"));
    }
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    // The library holds another copy of the pixels, and cannot report that memory is short.
    reservable(2 * 4 * width * height)?;
    let mut samples = buffer(channels * width * height)?;
    decoder.read_image(&mut samples).map_err(library)?;
    let mut opacity = None;
    if channels == 4 {
        opacity = (alpha == Alpha::Kept).then(|| samples.iter().skip(3).step_by(4).copied().collect());
        compact(&mut samples, |[r, g, b, _]| [r, g, b]);
    }
    let orientation = Orientation::from_metadata(container.exif, container.xmp);
    Ok(Decoded { image: Image { width, height, pixels: samples }, alpha: opacity, orientation })
}

/// Hands the chunks that hold text to `each`.
pub(super) fn texts<'a>(bytes: &'a [u8], each: &mut dyn FnMut(RawText<'a>)) -> Result<(), Fault> {
    let Container { exif, xmp, .. } = Container::read(bytes)?;
    exif.map(RawText::Exif).into_iter().chain(xmp.map(RawText::Xmp)).for_each(each);
    Ok(())
}

/// The relevant chunks of a file.
#[derive(Default)]
struct Container<'a> {
    /// The pixels, lossy or lossless.
    lossy: Option<&'a [u8]>,
    lossless: Option<&'a [u8]>,
    /// The transparency of a lossy image.
    alpha: Option<&'a [u8]>,
    /// The size in the extended header, if there is one.
    canvas: Option<(usize, usize)>,
    exif: Option<&'a [u8]>,
    xmp: Option<&'a [u8]>,
}

impl<'a> Container<'a> {
    /// Walks the chunks to the end that the file's header states. Bytes behind it are ignored.
    fn read(bytes: &'a [u8]) -> Result<Self, Fault> {
        let stated =
            bytes.get(4..HEADER).and_then(|length| length.first_chunk()).map(|length| u32::from_le_bytes(*length) as usize);
        let end = stated.and_then(|length| length.checked_add(HEADER));
        let mut rest = end.and_then(|end| bytes.get(12..end)).ok_or_else(|| ends_early(bytes.len()))?;
        let mut found = Self::default();
        while !rest.is_empty() {
            let (header, after) = rest.split_first_chunk::<HEADER>().ok_or_else(|| damaged("a chunk ends early"))?;
            let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
            let data = after.get(..length).ok_or_else(|| damaged("a chunk ends early"))?;
            // Chunks have an even length. Some writers leave out the last byte of padding.
            rest = after.get(length.next_multiple_of(2)..).unwrap_or_default();
            match &header[..4] {
                b"VP8X" => {
                    let [flags, _, _, _, w0, w1, w2, h0, h1, h2] =
                        *data.first_chunk().ok_or_else(|| damaged("its header is too short"))?;
                    if flags & ANIMATED != 0 {
                        return Err(animated());
                    }
                    let side = |bytes: [u8; 3]| 1 + u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]) as usize;
                    found.canvas = Some((side([w0, w1, w2]), side([h0, h1, h2])));
                }
                b"ANIM" | b"ANMF" => return Err(animated()),
                b"VP8 " if found.lossy.is_none() => found.lossy = Some(data),
                b"VP8L" if found.lossless.is_none() => found.lossless = Some(data),
                b"ALPH" if found.alpha.is_none() => found.alpha = Some(data),
                b"EXIF" if found.exif.is_none() => found.exif = Some(data),
                b"XMP " if found.xmp.is_none() => found.xmp = Some(data),
                _ => {}
            }
        }
        match (found.lossy, found.lossless) {
            (Some(_), None) | (None, Some(_)) => Ok(found),
            (None, None) => Err(damaged("it has no image data")),
            (Some(_), Some(_)) => Err(damaged("it has two images")),
        }
    }

    /// The size in the header of the pixels. The extended header has to agree.
    fn size(&self) -> Result<(usize, usize), Fault> {
        let short = || damaged("its image data is too short");
        let size = match (self.lossy, self.lossless) {
            (Some(data), _) => {
                let [_, _, _, 0x9D, 0x01, 0x2A, w0, w1, h0, h1] = *data.first_chunk().ok_or_else(short)? else {
                    return Err(damaged("its image data does not begin with a key frame"));
                };
                let side = |bytes| usize::from(u16::from_le_bytes(bytes) & 0x3FFF);
                (side([w0, w1]), side([h0, h1]))
            }
            (None, data) => {
                let [0x2F, bits @ ..] = *data.and_then(|data| data.first_chunk::<5>()).ok_or_else(short)? else {
                    return Err(damaged("its lossless image data has no signature"));
                };
                let bits = u32::from_le_bytes(bits);
                (1 + (bits & 0x3FFF) as usize, 1 + (bits >> 14 & 0x3FFF) as usize)
            }
        };
        match self.canvas {
            Some(canvas) if canvas != size => Err(damaged("its headers disagree about its size")),
            _ => Ok(size),
        }
    }

    /// Rejects a size that the data cannot hold, before memory is allocated for it.
    fn check_density(&self, width: usize, height: usize) -> Result<(), Fault> {
        let [lossless, lossy] = MAX_DENSITY;
        let (data, density) = self.lossy.map_or((self.lossless, lossless), |data| (Some(data), lossy));
        let bytes = data.map_or(0, <[u8]>::len);
        if width * height > bytes.saturating_mul(density) {
            let what = format!("its header says {width}x{height} pixels, its {bytes} bytes of image data cannot hold them");
            return Err(damaged(what));
        }
        Ok(())
    }

    /// A file with only the chunks that pixels are decoded from.
    fn core(&self, width: usize, height: usize, alpha: Alpha) -> Vec<u8> {
        let mut chunks = Vec::new();
        let mut push = |name: &[u8; 4], data: &[u8]| {
            chunks.extend_from_slice(name);
            chunks.extend_from_slice(&(data.len() as u32).to_le_bytes());
            chunks.extend_from_slice(data);
            chunks.resize(chunks.len().next_multiple_of(2), 0);
        };
        if let Some(opacity) = self.alpha.filter(|_| self.lossy.is_some() && alpha == Alpha::Kept) {
            let [[w0, w1, w2, _], [h0, h1, h2, _]] = [width, height].map(|side| (side as u32 - 1).to_le_bytes());
            push(b"VP8X", &[TRANSPARENT, 0, 0, 0, w0, w1, w2, h0, h1, h2]);
            push(b"ALPH", opacity);
        }
        if let Some(data) = self.lossy {
            push(b"VP8 ", data);
        }
        if let Some(data) = self.lossless {
            push(b"VP8L", data);
        }
        let length = (4 + chunks.len() as u32).to_le_bytes();
        [b"RIFF", &length[..], b"WEBP", &chunks].concat()
    }
}

fn animated() -> Fault {
    Fault::Unreadable("content is an animated WebP, and only still images are read".into())
}

fn damaged(what: impl Into<String>) -> Fault {
    Fault::Damaged(what.into())
}

fn library(error: image_webp::DecodingError) -> Fault {
    damaged(error.to_string())
}
