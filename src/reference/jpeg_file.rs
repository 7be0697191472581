//! JPEG files: the segments are checked here, the samples decoded by the `zune-jpeg` crate, colours converted here again.
//!
//! The walk over the segments finds out three things the library would only after reserving memory, or never: how large the
//! image is, whether the file holds enough data for it, and whether it ends with the end mark. The library then gets a copy
//! with only the segments that make pixels. It is built without its vector code: no `unsafe`, and the same pixels everywhere.

use super::orientation::Orientation;
use super::{Fault, buffer, check_size, compact, ends_early, grey_to_rgb};
use crate::image::Image;
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// The most scans of a progressive image. Encoders write about ten; each costs a pass over the whole image.
const MAX_SCANS: usize = 100;

/// What stands in for missing data at the end of a scan: ones, because no code consists of ones alone. At the end mark itself
/// the library would go on with zeros, which are a code, and half an image would look whole.
/// A 0 behind FF says that it is data.
const NO_MORE_CODES: [[u8; 2]; 16] = [[0xFF, 0]; 16];

/// Decodes the first image of the file.
pub(super) fn decode(bytes: &[u8]) -> Result<(Image, Orientation), Fault> {
    let container = Container::read(bytes)?;
    let Frame { width, height, .. } = container.frame;
    let pixels = pixels(&container.core, width, height)?;
    Ok((Image { width, height, pixels }, Orientation::from_metadata(container.exif, container.xmp)))
}

/// What of a file matters.
struct Container<'a> {
    frame: Frame,
    /// The file up to its end mark, without the segments that do not.
    core: Vec<u8>,
    exif: Option<&'a [u8]>,
    xmp: Option<&'a [u8]>,
}

/// The size of an image, and how many blocks of 8 x 8 samples it is coded as.
struct Frame {
    width: usize,
    height: usize,
    blocks: usize,
}

impl<'a> Container<'a> {
    /// Walks the segments from the start mark to the end mark.
    fn read(bytes: &'a [u8]) -> Result<Self, Fault> {
        let mut walk = Walk { bytes, at: 2 };
        let mut core = bytes[..2].to_vec();
        let (mut exif, mut xmp, mut frame) = (None, None, None::<Frame>);
        let (mut scans, mut coded, mut progressive) = (0, 0, false);
        loop {
            let marker = walk.marker()?;
            let start = walk.at;
            let mut keep = false;
            match marker {
                // End of the image. What follows it (a video, more images) is no business of ours.
                0xD9 => break,
                // Start of a frame: Huffman-coded, in one pass or progressive.
                0xC0..=0xC2 if frame.is_some() => return Err(damaged("it has two headers")),
                0xC0..=0xC2 => {
                    frame = Some(Frame::read(walk.segment()?)?);
                    (keep, progressive) = (true, marker == 0xC2);
                }
                // Other processes; C4, C8 and CC are not frames.
                0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF => {
                    return Err(Fault::Unreadable(
                        "content is a rare kind of JPEG (lossless, hierarchical or arithmetic)".into(),
                    ));
                }
                // Start of a scan, with its coded data.
                0xDA if frame.is_none() => return Err(damaged("its image data comes before its header")),
                0xDA if scans == MAX_SCANS => return Err(damaged(format!("it has more than {MAX_SCANS} scans"))),
                0xDA => {
                    walk.segment()?;
                    coded += walk.coded_data()?;
                    scans += 1;
                    keep = true;
                }
                // Tables of codes and quanta, and the distance of restart marks.
                0xC4 | 0xDB | 0xDD => {
                    walk.segment()?;
                    keep = true;
                }
                // Application data: the first Exif, and the last XMP, as other readers do.
                0xE1 => {
                    let data = walk.segment()?;
                    if exif.is_none() && data.starts_with(b"Exif\0\0") {
                        exif = Some(data);
                    } else if data.starts_with(b"http://ns.adobe.com/xap/1.0/\0") {
                        xmp = Some(data);
                    }
                }
                // What the colours mean.
                0xEE => keep = walk.segment()?.starts_with(b"Adobe"),
                // Marks without a segment, which have no place outside of coded data.
                0x01 | 0xD0..=0xD8 => return Err(damaged(format!("its mark FF{marker:02X} is out of place"))),
                _ => drop(walk.segment()?),
            }
            if keep {
                core.extend([0xFF, marker]);
                core.extend_from_slice(&bytes[start..walk.at]);
            }
        }
        let frame = frame.filter(|_| scans > 0).ok_or_else(|| damaged("it has no image data"))?;
        // The shortest code is one bit, and a block has one code at least. So memory is bounded by the length of the file.
        if coded.saturating_mul(8) < frame.blocks {
            let Frame { width, height, .. } = frame;
            return Err(damaged(format!(
                "its header says {width}x{height} pixels, its {coded} bytes of image data cannot hold them"
            )));
        }
        // After the first of progressive scans the library insists on a mark.
        if !progressive || scans > 1 {
            core.extend(NO_MORE_CODES.as_flattened());
        }
        core.extend([0xFF, 0xD9]);
        Ok(Self { frame, core, exif, xmp })
    }
}

impl Frame {
    /// Reads the header of a frame and refuses sizes that will not be decoded.
    fn read(segment: &[u8]) -> Result<Self, Fault> {
        let (&[depth, h0, h1, w0, w1, count], components) =
            segment.split_first_chunk().ok_or_else(|| damaged("its header is too short"))?;
        if depth != 8 {
            return Err(Fault::Unreadable(format!("content is a JPEG of {depth} bits a sample, not 8")));
        }
        let (width, height) = (usize::from(u16::from_be_bytes([w0, w1])), usize::from(u16::from_be_bytes([h0, h1])));
        check_size(width, height)?;
        if !matches!(count, 1 | 3 | 4) || components.len() != usize::from(count) * 3 {
            return Err(damaged(format!("its header has {count} components in {} bytes", components.len())));
        }
        // Each component may be stored smaller by the ratio of its factor to the largest one.
        let factors = components.chunks_exact(3).map(|c| (usize::from(c[1] >> 4), usize::from(c[1] & 15)));
        let (h_max, v_max) = factors.clone().fold((0, 0), |max, f| (max.0.max(f.0), max.1.max(f.1)));
        if factors.clone().any(|(h, v)| h == 0 || v == 0 || h > 4 || v > 4) {
            return Err(damaged("its header has impossible sampling factors"));
        }
        let blocks = |side: usize, factor: usize, max: usize| (side * factor).div_ceil(max).div_ceil(8);
        let blocks = factors.map(|(h, v)| blocks(width, h, h_max) * blocks(height, v, v_max)).sum();
        Ok(Self { width, height, blocks })
    }
}

/// A position in a file.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Walk<'a> {
    fn ends_early(&self) -> Fault {
        ends_early(self.bytes.len())
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        let byte = *self.bytes.get(self.at).ok_or_else(|| self.ends_early())?;
        self.at += 1;
        Ok(byte)
    }

    /// Reads a marker: FF, perhaps repeated, and its code.
    fn marker(&mut self) -> Result<u8, Fault> {
        if self.byte()? != 0xFF {
            return Err(damaged(format!("there is no mark at byte {}", self.at - 1)));
        }
        loop {
            match self.byte()? {
                0xFF => {}
                0 => return Err(damaged(format!("there is no mark at byte {}", self.at - 2))),
                code => return Ok(code),
            }
        }
    }

    /// Reads a segment's data; its length counts its own two bytes.
    fn segment(&mut self) -> Result<&'a [u8], Fault> {
        let length = usize::from(u16::from_be_bytes([self.byte()?, self.byte()?]));
        let length = length.checked_sub(2).ok_or_else(|| damaged("a segment has an impossible length"))?;
        let data = self.bytes[self.at..].get(..length).ok_or_else(|| self.ends_early())?;
        self.at += length;
        Ok(data)
    }

    /// Passes over coded data, up to the next marker that is not part of it, and returns its length.
    fn coded_data(&mut self) -> Result<usize, Fault> {
        let data = &self.bytes[self.at..];
        // FF is data when a 0 follows it, and a restart mark or filling belongs to the data.
        let is_marker = |pair: &[u8]| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF | 0xD0..=0xD7);
        let length = data.windows(2).position(is_marker).ok_or_else(|| self.ends_early())?;
        self.at += length;
        Ok(length)
    }
}

fn pixels(bytes: &[u8], width: usize, height: usize) -> Result<Vec<u8>, Fault> {
    // Strict, because otherwise the library fills in what is missing.
    let options = DecoderOptions::default().set_strict_mode(true).jpeg_set_max_scans(MAX_SCANS);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(library)?;
    let colours = decoder.input_colorspace().ok_or_else(|| damaged("it has no colour space"))?;
    decoder.set_options(options.jpeg_set_out_colorspace(colours));
    let expected = width * height * colours.num_components();
    if decoder.output_buffer_size() != Some(expected) {
        return Err(damaged("its headers contradict each other"));
    }
    let mut samples = buffer(expected)?;
    decoder.decode_into(&mut samples).map_err(library)?;

    match colours {
        ColorSpace::RGB => {}
        ColorSpace::Luma => return grey_to_rgb(&samples),
        ColorSpace::YCbCr => compact(&mut samples, ycc_to_rgb),
        // Inks are stored inverted: 255 is none.
        ColorSpace::CMYK => compact(&mut samples, |[c, m, y, k]| ink_to_rgb([255 - c, 255 - m, 255 - y], 255 - k)),
        // Taken as a colour, the first three are the inks themselves.
        ColorSpace::YCCK => compact(&mut samples, |[y, cb, cr, k]| ink_to_rgb(ycc_to_rgb([y, cb, cr]), 255 - k)),
        other => return Err(Fault::Unreadable(format!("content is a JPEG of the colour space {other:?}"))),
    }
    Ok(samples)
}

/// The conversion of JFIF in 16-bit fixed point, rounded as libjpeg does.
fn ycc_to_rgb([y, cb, cr]: [u8; 3]) -> [u8; 3] {
    const HALF: i32 = 1 << 15;
    let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
    let [r, g, b] = [91_881 * cr + HALF, -22_554 * cb - 46_802 * cr + HALF, 116_130 * cb + HALF];
    [r, g, b].map(|chroma| (y + (chroma >> 16)).clamp(0, 255) as u8)
}

/// Ink on white paper, without a colour profile: what Pillow makes of it.
fn ink_to_rgb(inks: [u8; 3], black: u8) -> [u8; 3] {
    let paper = i32::from(255 - black);
    inks.map(|ink| {
        // ink / 255 of what the black leaves, rounded.
        let product = i32::from(ink) * paper + 128;
        (paper - ((product + (product >> 8)) >> 8)) as u8
    })
}

fn damaged(what: impl Into<String>) -> Fault {
    Fault::Damaged(what.into())
}

fn library(error: DecodeErrors) -> Fault {
    damaged(error.to_string())
}
