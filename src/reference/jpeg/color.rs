//! The color space of an image, and its conversion to RGB as in libjpeg and Pillow.

use super::frame::Frame;

/// Facts about the color space from the markers before the first scan.
#[derive(Clone, Copy, Default)]
pub(in crate::reference) struct Notes {
    /// Whether there is a JFIF header.
    pub(in crate::reference) jfif: bool,
    /// The color transform of the Adobe marker.
    pub(in crate::reference) adobe: Option<u8>,
}

impl Notes {
    /// Reads the data of an APP0 segment.
    pub(in crate::reference) fn read_app0(&mut self, data: &[u8]) {
        // 14 bytes is the length of a JFIF header.
        self.jfif |= data.len() >= 14 && data.starts_with(b"JFIF\0");
    }

    /// Reads the data of an APP14 segment.
    pub(in crate::reference) fn read_app14(&mut self, data: &[u8]) {
        if let (Some(&transform), true) = (data.get(11), data.starts_with(b"Adobe")) {
            self.adobe = Some(transform);
        }
    }
}

/// The color space of the components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colors {
    Gray,
    Rgb,
    YCbCr,
    Cmyk,
    Ycck,
}

impl Colors {
    /// The rules of libjpeg: JFIF has no RGB, the Adobe marker is explicit, and otherwise the component ids are a hint.
    pub(super) fn of(frame: &Frame, notes: Notes) -> Self {
        let ids: Vec<u8> = frame.components.iter().map(|c| c.id).collect();
        match (ids.as_slice(), notes.jfif, notes.adobe) {
            ([_], ..) => Self::Gray,
            ([_, _, _], true, _) => Self::YCbCr,
            ([_, _, _], false, Some(0)) | ([b'R', b'G', b'B'], false, None) => Self::Rgb,
            ([_, _, _], false, _) => Self::YCbCr,
            (_, _, None | Some(0)) => Self::Cmyk,
            (_, _, Some(_)) => Self::Ycck,
        }
    }

    /// Converts a row of samples, one slice per component. Slices may be longer than the row.
    pub(super) fn convert(self, rows: &[&[u8]], out: &mut [u8]) {
        let pixels = out.as_chunks_mut::<3>().0;
        match (self, rows) {
            (Self::Gray, [gray]) => pixels.iter_mut().zip(*gray).for_each(|(pixel, &v)| *pixel = [v; 3]),
            (Self::Rgb, [r, g, b]) => each(pixels, [r, g, b], |rgb| rgb),
            (Self::YCbCr, [y, cb, cr]) => each(pixels, [y, cb, cr], ycc_to_rgb),
            // Inks are stored inverted: 255 is no ink.
            (Self::Cmyk, [c, m, y, k]) => {
                each(pixels, [c, m, y, k], |[c, m, y, k]| ink_to_rgb([255 - c, 255 - m, 255 - y], 255 - k))
            }
            // Converted to RGB, the first three components are the inks themselves.
            (Self::Ycck, [y, cb, cr, k]) => {
                each(pixels, [y, cb, cr, k], |[y, cb, cr, k]| ink_to_rgb(ycc_to_rgb([y, cb, cr]), 255 - k))
            }
            _ => unreachable!("{self:?} of {} components", rows.len()),
        }
    }
}

#[inline(always)]
fn each<const N: usize>(pixels: &mut [[u8; 3]], rows: [&&[u8]; N], convert: impl Fn([u8; N]) -> [u8; 3]) {
    // Slices of equal length avoid a bounds check per sample.
    let rows = rows.map(|row| &row[..pixels.len()]);
    for (i, pixel) in pixels.iter_mut().enumerate() {
        *pixel = convert(rows.map(|row| row[i]));
    }
}

/// The JFIF conversion in fixed point with 16 fractional bits, rounded as in libjpeg.
#[inline(always)]
fn ycc_to_rgb([y, cb, cr]: [u8; 3]) -> [u8; 3] {
    const HALF: i32 = 1 << 15;
    let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
    let [r, g, b] = [91_881 * cr + HALF, -22_554 * cb - 46_802 * cr + HALF, 116_130 * cb + HALF];
    [r, g, b].map(|chroma| (y + (chroma >> 16)).clamp(0, 255) as u8)
}

/// The conversion of CMYK without a color profile, as in Pillow.
#[inline(always)]
fn ink_to_rgb(inks: [u8; 3], black: u8) -> [u8; 3] {
    let paper = i32::from(255 - black);
    inks.map(|ink| {
        // ink / 255 of the brightness that black leaves, rounded.
        let product = i32::from(ink) * paper + 128;
        (paper - ((product + (product >> 8)) >> 8)) as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(ids: &[u8]) -> Frame {
        let components = ids.iter().flat_map(|&id| [id, 0x11, 0]);
        Frame::read(&[8, 0, 64, 0, 64, ids.len() as u8].into_iter().chain(components).collect::<Vec<_>>(), false).unwrap()
    }

    #[test]
    fn markers_take_precedence_over_ids() {
        let of = |ids: &[u8], jfif, adobe| Colors::of(&frame(ids), Notes { jfif, adobe });
        for adobe in [None, Some(0), Some(1), Some(2)] {
            assert_eq!(of(&[1], false, adobe), Colors::Gray);
            assert_eq!(of(b"RGB", true, adobe), Colors::YCbCr);
        }
        assert_eq!(of(&[1, 2, 3], false, Some(0)), Colors::Rgb);
        assert_eq!(of(b"RGB", false, Some(1)), Colors::YCbCr);
        assert_eq!(of(b"RGB", false, None), Colors::Rgb);
        assert_eq!(of(&[0, 1, 2], false, None), Colors::YCbCr);
        assert_eq!(of(&[1, 2, 3, 4], true, None), Colors::Cmyk);
        assert_eq!(of(&[1, 2, 3, 4], false, Some(0)), Colors::Cmyk);
        assert_eq!(of(&[1, 2, 3, 4], false, Some(2)), Colors::Ycck);
    }

    #[test]
    fn short_markers_are_ignored() {
        let mut notes = Notes::default();
        notes.read_app0(b"JFIF\0");
        notes.read_app14(b"Adobe\0\x64\0\0\0\0");
        assert!(!notes.jfif && notes.adobe.is_none());
        notes.read_app0(b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0");
        notes.read_app14(b"Adobe\0\x64\0\0\0\0\x01");
        assert!(notes.jfif && notes.adobe == Some(1));
    }
}
