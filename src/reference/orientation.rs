//! The EXIF orientation of an image, and its application to the pixels.

use super::{Fault, MAX_METADATA, buffer};
use crate::image::Tiff;
use rayon::prelude::*;

/// The TIFF tag of the orientation.
const TAG: u16 = 0x0112;

/// How stored pixels relate to the upright image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Orientation {
    /// Rows and columns are swapped.
    swap: bool,
    /// Stored columns run from right to left.
    mirror_x: bool,
    /// Stored rows run from bottom to top.
    mirror_y: bool,
}

impl Orientation {
    /// The orientation for one of the eight TIFF values. All other values mean upright.
    fn from_tiff(value: u32) -> Self {
        let [swap, mirror_x, mirror_y] = match value {
            2 => [false, true, false],
            3 => [false, true, true],
            4 => [false, false, true],
            5 => [true, false, false],
            6 => [true, false, true],
            7 => [true, true, true],
            8 => [true, true, false],
            _ => [false, false, false],
        };
        Self { swap, mirror_x, mirror_y }
    }

    /// Reads the orientation from image metadata: from Exif (a TIFF file), or if Exif has none, from XMP (an XML text). Ignores
    /// invalid metadata, because the pixels are still valid.
    pub(super) fn from_metadata(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Self {
        let small = |bytes: &&[u8]| bytes.len() <= MAX_METADATA;
        let exif = exif.filter(small).and_then(from_exif);
        Self::from_tiff(exif.or_else(|| xmp.filter(small).and_then(from_xmp)).unwrap_or(1))
    }

    /// Rotates and mirrors an image of `C` bytes per pixel so that it is upright. Also returns its size then.
    pub(super) fn apply<const C: usize>(
        self,
        (width, height): (usize, usize),
        pixels: Vec<u8>,
    ) -> Result<((usize, usize), Vec<u8>), Fault> {
        if self == Self::from_tiff(1) {
            return Ok(((width, height), pixels));
        }
        let size = if self.swap { (height, width) } else { (width, height) };
        let mut upright = buffer(pixels.len())?;
        // Copies one band of rows at a time, column by column. If rows and columns are swapped, the pixels of one column of the
        // band are adjacent in the source and share cache lines.
        const BAND: usize = 32;
        upright.par_chunks_mut(BAND * size.0 * C).enumerate().for_each(|(band, out)| {
            let rows = out.len() / (size.0 * C);
            for (x, row) in (0..size.0).flat_map(|x| (0..rows).map(move |row| (x, row))) {
                let y = band * BAND + row;
                let (mut from_x, mut from_y) = if self.swap { (y, x) } else { (x, y) };
                if self.mirror_x {
                    from_x = width - 1 - from_x;
                }
                if self.mirror_y {
                    from_y = height - 1 - from_y;
                }
                let from = (from_y * width + from_x) * C;
                out[(row * size.0 + x) * C..][..C].copy_from_slice(&pixels[from..from + C]);
            }
        });
        Ok((size, upright))
    }
}

/// Looks up the tag in the first folder of a TIFF structure.
fn from_exif(bytes: &[u8]) -> Option<u32> {
    Tiff::new(bytes)?.number(TAG)
}

/// Finds `tiff:Orientation="6"` or `<tiff:Orientation>6` without parsing the XML around it.
fn from_xmp(text: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = text;
    while let Some(at) = rest.windows(NAME.len()).position(|word| word == NAME) {
        rest = &rest[at + NAME.len()..];
        let value = rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">"));
        if let Some(digit) = value.and_then(|value| value.first()).filter(|byte| byte.is_ascii_digit()) {
            return Some(u32::from(digit - b'0'));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A TIFF file with a directory of one foreign entry and the orientation.
    fn tiff(little: bool, kind: u16, value: u32) -> Vec<u8> {
        let u16s = |v: u16| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let u32s = |v: u32| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let mut out = if little { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
        out.extend(u32s(10));
        out.extend([0xAA; 2]); // the directory need not follow the header
        out.extend(u16s(2));
        for (tag, kind, value) in [(0x0100, 4, u32s(77)), (TAG, kind, u32s(value))] {
            out.extend(u16s(tag).into_iter().chain(u16s(kind)).chain(u32s(1)));
            // A 16-bit value is stored at the start of its field.
            out.extend(if kind == 3 && !little { [value[2], value[3], 0, 0] } else { value });
        }
        out
    }

    #[test]
    fn exif_is_read_in_both_byte_orders() {
        for (little, kind) in [(true, 3), (false, 3), (true, 4), (false, 4)] {
            assert_eq!(from_exif(&tiff(little, kind, 6)), Some(6));
            assert_eq!(from_exif(&[b"Exif\0\0".as_slice(), &tiff(little, kind, 6)].concat()), Some(6));
        }
        assert_eq!(from_exif(&tiff(true, 2, 6)), None, "text is not an orientation");
    }

    #[test]
    fn truncated_exif_and_invalid_offsets_are_ignored() {
        let whole = tiff(true, 3, 6);
        let entry_end = whole.len() - 2; // the upper half of the field is not part of a 16-bit value
        for cut in 0..entry_end {
            assert_eq!(from_exif(&whole[..cut]), None, "{cut}");
        }
        for offset in [0u32, 7, whole.len() as u32, u32::MAX - 1, u32::MAX] {
            let mut bad = whole.clone();
            bad[4..8].copy_from_slice(&offset.to_le_bytes());
            assert_eq!(from_exif(&bad), None, "{offset}");
        }
    }

    #[test]
    fn xmp_is_read_if_exif_has_no_orientation() {
        let of = |exif: Option<&[u8]>, xmp: &str| Orientation::from_metadata(exif, Some(xmp.as_bytes()));
        let eight = Orientation::from_tiff(8);
        assert_eq!(of(None, r#"<x tiff:Orientation="8"/>"#), eight);
        assert_eq!(of(None, "tiff:Orientation tiff:Orientation> <tiff:Orientation>8</tiff:Orientation>"), eight);
        assert_eq!(of(Some(b"nonsense"), r#"tiff:Orientation="8""#), eight);
        assert_eq!(of(Some(&tiff(true, 3, 6)), r#"tiff:Orientation="8""#), Orientation::from_tiff(6));
        assert_eq!(of(None, r#"tiff:Orientation="9""#), Orientation::from_tiff(1));
        let large = format!("{}tiff:Orientation=\"8\"", " ".repeat(MAX_METADATA));
        assert_eq!(of(None, &large), Orientation::from_tiff(1));
    }

    #[test]
    fn all_eight_orientations() {
        // Upright is  a b   The value tells which corner the first stored row and column belong to.
        //             c d
        //             e f
        let stored = |value| match value {
            1 => (2, "abcdef"),
            2 => (2, "badcfe"),
            3 => (2, "fedcba"),
            4 => (2, "efcdab"),
            5 => (3, "acebdf"),
            6 => (3, "bdface"),
            7 => (3, "fdbeca"),
            _ => (3, "ecafdb"),
        };
        let pixels = |letters: &str| letters.bytes().flat_map(|letter| [letter, 0, letter]).collect::<Vec<_>>();
        for value in 1..=8 {
            let (width, letters) = stored(value);
            let (size, orientation) = ((width, 6 / width), Orientation::from_tiff(value));
            let upright = orientation.apply::<3>(size, pixels(letters)).unwrap();
            assert_eq!(upright, ((2, 3), pixels("abcdef")), "orientation {value}");
            assert_eq!(orientation.apply::<1>(size, letters.into()).unwrap(), ((2, 3), b"abcdef".into()), "orientation {value}");
        }
    }
}
