//! JPEG files: the walk over the marker segments. [`super::jpeg`] decodes their content.
//!
//! Before memory is allocated, the walk checks the size of the image, whether the file holds enough data for it, and whether it
//! ends with an EOI marker. It also collects the scans, each with the tables in force.

use super::jpeg::{self, Frame, Notes, Scan, Tables};
use super::orientation::Orientation;
use super::{Decoded, Fault, RawText, ends_early};
use crate::image::Image;

/// Limit on the scans of a progressive image. Encoders write about ten, and each takes a pass over the whole image.
const MAX_SCANS: usize = 100;

/// What begins an APP1 segment with XMP.
const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

/// Decodes the first image of the file.
pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, Fault> {
    let Container { frame, notes, scans, exif, xmp } = Container::read(bytes)?;
    let pixels = jpeg::decode(&frame, &scans, notes)?;
    let image = Image { width: frame.width, height: frame.height, pixels };
    Ok(Decoded { image, alpha: None, orientation: Orientation::from_metadata(exif, xmp) })
}

/// Hands the segments that hold text to `each`.
pub(super) fn texts<'a>(bytes: &'a [u8], each: &mut dyn FnMut(RawText<'a>)) -> Result<(), Fault> {
    let Container { exif, xmp, .. } = Container::read(bytes)?;
    exif.map(RawText::Exif).into_iter().chain(xmp.map(|xmp| RawText::Xmp(&xmp[XMP.len()..]))).for_each(each);
    Ok(())
}

/// The relevant parts of a file.
struct Container<'a> {
    frame: Frame,
    notes: Notes,
    scans: Vec<Scan<'a>>,
    exif: Option<&'a [u8]>,
    xmp: Option<&'a [u8]>,
}

impl<'a> Container<'a> {
    /// Walks the segments from the SOI to the EOI marker.
    fn read(bytes: &'a [u8]) -> Result<Self, Fault> {
        let mut walk = Walk { bytes, at: 2 };
        let (mut exif, mut xmp, mut frame) = (None, None, None::<Frame>);
        let (mut scans, mut coded) = (Vec::new(), 0);
        let (mut tables, mut notes) = (Tables::default(), Notes::default());
        loop {
            let marker = walk.marker()?;
            match marker {
                // EOI, the end of the image. Data after it (a video, more images) is ignored.
                0xD9 => break,
                // SOF0 to SOF2, the start of a Huffman-coded frame, sequential or progressive.
                0xC0..=0xC2 if frame.is_some() => return Err(damaged("it has two headers")),
                0xC0..=0xC2 => frame = Some(Frame::read(walk.segment()?, marker == 0xC2)?),
                // SOF of other coding processes; C4, C8 and CC are not frames.
                0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF | 0xDE | 0xDF => {
                    return Err(Fault::Unreadable(
                        "content is a rare kind of JPEG (lossless, hierarchical or arithmetic)".into(),
                    ));
                }
                // SOS, the start of a scan, followed by its entropy-coded data.
                0xDA if frame.is_none() => return Err(damaged("its image data comes before its header")),
                0xDA if scans.len() == MAX_SCANS => return Err(damaged(format!("it has more than {MAX_SCANS} scans"))),
                0xDA => {
                    let header = walk.segment()?;
                    let data = walk.coded_data()?;
                    coded += data.len();
                    scans.push(Scan { header, data, tables });
                }
                0xC4 => tables.read_codes(walk.segment()?)?,
                0xDB => tables.read_quantizers(walk.segment()?)?,
                0xDD => tables.read_restart(walk.segment()?)?,
                // APP1: the first Exif and the last XMP segment count, as in other decoders.
                0xE1 => {
                    let data = walk.segment()?;
                    if exif.is_none() && data.starts_with(b"Exif\0\0") {
                        exif = Some(data);
                    } else if data.starts_with(XMP) {
                        xmp = Some(data);
                    }
                }
                // APP0 and APP14 tell the color space, which must be known when the first scan begins.
                0xE0 if scans.is_empty() => notes.read_app0(walk.segment()?),
                0xEE if scans.is_empty() => notes.read_app14(walk.segment()?),
                // Markers without a segment. They are invalid outside of entropy-coded data.
                0x01 | 0xD0..=0xD8 => return Err(damaged(format!("its marker FF{marker:02X} is out of place"))),
                _ => drop(walk.segment()?),
            }
        }
        let frame = frame.filter(|_| !scans.is_empty()).ok_or_else(|| damaged("it has no image data"))?;
        // A code has at least one bit, and a block at least one code. So memory use is bounded by the length of the file.
        if coded.saturating_mul(8) < frame.blocks() {
            let Frame { width, height, .. } = frame;
            return Err(damaged(format!(
                "its header says {width}x{height} pixels, its {coded} bytes of image data cannot hold them"
            )));
        }
        Ok(Self { frame, notes, scans, exif, xmp })
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

    /// Reads a marker: one or more FF bytes and its code.
    fn marker(&mut self) -> Result<u8, Fault> {
        if self.byte()? != 0xFF {
            return Err(damaged(format!("there is no marker at byte {}", self.at - 1)));
        }
        loop {
            match self.byte()? {
                0xFF => {}
                0 => return Err(damaged(format!("there is no marker at byte {}", self.at - 2))),
                code => return Ok(code),
            }
        }
    }

    /// Reads a segment's data. The stored length includes its own two bytes.
    fn segment(&mut self) -> Result<&'a [u8], Fault> {
        let length = usize::from(u16::from_be_bytes([self.byte()?, self.byte()?]));
        let length = length.checked_sub(2).ok_or_else(|| damaged("a segment has an impossible length"))?;
        let data = self.bytes[self.at..].get(..length).ok_or_else(|| self.ends_early())?;
        self.at += length;
        Ok(data)
    }

    /// Reads entropy-coded data up to the next marker that does not belong to it.
    fn coded_data(&mut self) -> Result<&'a [u8], Fault> {
        let data = &self.bytes[self.at..];
        // FF followed by 0 is data, and restart markers and fill bytes belong to the data.
        let is_marker = |pair: &[u8]| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF | 0xD0..=0xD7);
        let length = data.windows(2).position(is_marker).ok_or_else(|| self.ends_early())?;
        self.at += length;
        Ok(&data[..length])
    }
}

fn damaged(what: impl Into<String>) -> Fault {
    Fault::Damaged(what.into())
}
