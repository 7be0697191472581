//! PNG files: this module checks the chunks, and the `png` crate decodes the pixels.
//!
//! The library never sees the file itself. It gets a copy with only the chunks that pixels are decoded from. So profiles, texts
//! and animation frames are neither parsed nor decompressed, whatever size they claim. Without [`Alpha::Kept`], transparency chunks are
//! left out as well: alpha is dropped, not blended.

use super::orientation::Orientation;
use super::{Alpha, Decoded, Fault, RawText, buffer, check_size, compact, ends_early, gray_to_rgb};
use crate::image::Image;
use std::io::Cursor;

const SIGNATURE: &[u8; 8] = b"\x89PNG\r\n\x1A\n";

/// Bytes of a chunk in addition to its data: length and name before, a checksum after.
const FRAME: usize = 12;

/// The largest compression ratio of deflate: 2 bits decode to at most 258 bytes.
const MAX_RATIO: u64 = 1032;

/// Memory limit of the library, not counting the pixels. It holds two rows of at most 128 KiB.
const LIBRARY_BYTES: usize = 4 << 20;

/// Decodes the image, or the default image of an animation.
pub(super) fn decode(bytes: &[u8], alpha: Alpha) -> Result<Decoded, Fault> {
    let container = Container::read(bytes, alpha)?;
    let (image, opacity) = pixels(&container, alpha)?;
    Ok(Decoded { image, alpha: opacity, orientation: Orientation::from_metadata(container.exif, container.xmp) })
}

/// The relevant parts of a file.
struct Container<'a> {
    header: Header,
    /// The file without the other chunks.
    core: Vec<u8>,
    exif: Option<&'a [u8]>,
    xmp: Option<&'a [u8]>,
}

impl<'a> Container<'a> {
    /// Walks the chunks from the signature to IEND. Every length and checksum must be correct.
    fn read(bytes: &'a [u8], alpha: Alpha) -> Result<Self, Fault> {
        let mut rest = bytes.strip_prefix(SIGNATURE).ok_or_else(|| damaged("its signature was altered on the way"))?;
        let (first, after) = Chunk::split(rest, bytes.len())?;
        if &first.name != b"IHDR" {
            return Err(damaged("it does not begin with a header"));
        }
        rest = after;
        let header = Header::read(first.data)?;
        // The size is checked before the walk, which takes longer: a large image is rejected by its first bytes.
        check_size(header.width, header.height)?;

        let mut core = SIGNATURE.to_vec();
        core.extend_from_slice(first.whole);
        let (mut exif, mut xmp) = (None, None);
        let mut packed = 0;
        let mut last = first.name;
        while &last != b"IEND" {
            let (chunk, after) = Chunk::split(rest, bytes.len())?;
            match &chunk.name {
                b"IDAT" if packed > 0 && &last != b"IDAT" => return Err(damaged("its image data is interrupted")),
                b"IDAT" => packed += chunk.data.len() as u64,
                b"PLTE" | b"IEND" => {}
                b"IHDR" => return Err(damaged("it has two headers")),
                b"eXIf" => exif = Some(chunk.data),
                b"iTXt" if chunk.data.starts_with(b"XML:com.adobe.xmp\0\0") => xmp = Some(chunk.data),
                [b'A'..=b'Z', ..] => return Err(damaged(format!("its chunk `{}` is unknown", chunk.printable_name()))),
                _ => {}
            }
            let is_opacity = &chunk.name == b"tRNS" && alpha == Alpha::Kept;
            if chunk.name[0].is_ascii_uppercase() || is_opacity {
                core.extend_from_slice(chunk.whole);
            }
            (last, rest) = (chunk.name, after);
        }
        let unpacked = header.unpacked_bytes()?;
        if packed.saturating_mul(MAX_RATIO) < unpacked {
            return Err(damaged(format!(
                "its header says {}x{} pixels, its {packed} bytes of image data cannot hold them",
                header.width, header.height
            )));
        }
        Ok(Self { header, core, exif, xmp })
    }
}

/// Hands the chunks that hold text to `each`, in order.
pub(super) fn texts<'a>(bytes: &'a [u8], each: &mut dyn FnMut(RawText<'a>)) -> Result<(), Fault> {
    let mut rest = bytes.strip_prefix(SIGNATURE).ok_or_else(|| damaged("its signature was altered on the way"))?;
    loop {
        let (chunk, after) = Chunk::split(rest, bytes.len())?;
        match &chunk.name {
            b"tEXt" => each(RawText::Latin1(chunk.data)),
            b"zTXt" => each(RawText::Compressed(chunk.data)),
            b"iTXt" => each(RawText::International(chunk.data)),
            b"eXIf" => each(RawText::Exif(chunk.data)),
            b"IEND" => return Ok(()),
            _ => {}
        }
        rest = after;
    }
}

/// A chunk whose length and checksum are correct.
struct Chunk<'a> {
    name: [u8; 4],
    data: &'a [u8],
    /// The bytes of the chunk including length, name and checksum.
    whole: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Splits off the first chunk of `bytes`, the remainder of a file of `length` bytes.
    fn split(bytes: &'a [u8], length: usize) -> Result<(Self, &'a [u8]), Fault> {
        let ends_early = || ends_early(length);
        let (length, rest) = bytes.split_first_chunk().ok_or_else(ends_early)?;
        let name = *rest.first_chunk().ok_or_else(ends_early)?;
        let chunk = usize::try_from(u32::from_be_bytes(*length)).ok().and_then(|length| length.checked_add(FRAME));
        let (whole, after) = chunk.and_then(|length| bytes.split_at_checked(length)).ok_or_else(ends_early)?;
        let (body, stored) = whole.split_last_chunk().ok_or_else(ends_early)?;
        let chunk = Self { name, data: &body[8..], whole };
        let mut crc = flate2::Crc::new();
        crc.update(&body[4..]);
        if crc.sum() != u32::from_be_bytes(*stored) {
            return Err(damaged(format!("the checksum of its chunk `{}` is wrong", chunk.printable_name())));
        }
        Ok((chunk, after))
    }

    fn printable_name(&self) -> std::slice::EscapeAscii<'_> {
        self.name.escape_ascii()
    }
}

/// The fields of IHDR that determine the size of the image data. The library checks the other fields.
struct Header {
    width: usize,
    height: usize,
    bits: u64,
}

impl Header {
    fn read(data: &[u8]) -> Result<Self, Fault> {
        let &[w0, w1, w2, w3, h0, h1, h2, h3, depth, color, _, _, _] = data else {
            return Err(damaged("its header has the wrong length"));
        };
        let samples = match color {
            0 | 3 => 1,
            2 => 3,
            4 => 2,
            6 => 4,
            _ => return Err(damaged(format!("its header names the unknown color type {color}"))),
        };
        let side = |bytes| usize::try_from(u32::from_be_bytes(bytes)).unwrap_or(usize::MAX);
        Ok(Self { width: side([w0, w1, w2, w3]), height: side([h0, h1, h2, h3]), bits: samples * u64::from(depth) })
    }

    /// The least number of bytes that the image data decompresses to. Interlacing adds a few bytes.
    fn unpacked_bytes(&self) -> Result<u64, Fault> {
        let row = (self.width as u64).checked_mul(self.bits).map(|bits| bits.div_ceil(8) + 1);
        row.and_then(|row| row.checked_mul(self.height as u64)).ok_or_else(|| damaged("its header is invalid"))
    }
}

/// The pixels, and the opacity if it is kept and there is one.
fn pixels(container: &Container<'_>, alpha: Alpha) -> Result<(Image, Option<Vec<u8>>), Fault> {
    let mut options = png::DecodeOptions::default();
    options.set_ignore_adler32(false);
    // The walk has already verified the checksums.
    options.set_ignore_crc(true);
    let mut decoder = png::Decoder::new_with_options(Cursor::new(&container.core), options);
    decoder.set_limits(png::Limits { bytes: LIBRARY_BYTES });
    // Palettes and low bit depths are expanded to bytes, and 16-bit samples keep their upper byte.
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    let mut reader = decoder.read_info().map_err(library)?;
    let mut samples = buffer(reader.output_buffer_size().ok_or_else(|| damaged("its header is invalid"))?)?;
    let found = reader.next_frame(&mut samples).map_err(library)?;

    let Header { width, height, .. } = container.header;
    let every = |n: usize, samples: &[u8]| -> Option<Vec<u8>> {
        (alpha == Alpha::Kept).then(|| samples.iter().skip(n - 1).step_by(n).copied().collect())
    };
    let mut opacity = None;
    let pixels = match (found.color_type, found.bit_depth) {
        (png::ColorType::Rgb, png::BitDepth::Eight) => samples,
        (png::ColorType::Rgba, png::BitDepth::Eight) => {
            opacity = every(4, &samples);
            compact(&mut samples, |[r, g, b, _]| [r, g, b]);
            samples
        }
        (png::ColorType::Grayscale, png::BitDepth::Eight) => gray_to_rgb(&samples)?,
        (png::ColorType::GrayscaleAlpha, png::BitDepth::Eight) => {
            opacity = every(2, &samples);
            let gray: Vec<u8> = samples.chunks_exact(2).map(|pixel| pixel[0]).collect();
            drop(samples);
            gray_to_rgb(&gray)?
        }
        other => return Err(damaged(format!("it decodes to {other:?}"))),
    };
    Ok((Image { width, height, pixels }, opacity))
}

fn damaged(what: impl Into<String>) -> Fault {
    Fault::Damaged(what.into())
}

fn library(error: png::DecodingError) -> Fault {
    damaged(error.to_string())
}
