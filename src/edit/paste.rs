//! Lays the repainted part over the untouched image, in integers.

use crate::image::Image;
use crate::reference::resample::{Filter, resize};
use rayon::prelude::*;
use std::borrow::Cow;

/// A part of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Columns to its left.
    pub left: usize,
    /// Rows above it.
    pub top: usize,
    /// Its width.
    pub width: usize,
    /// Its height.
    pub height: usize,
}

impl Area {
    /// The smallest area that holds all values above zero, or a pixel if there is none.
    pub(super) fn around(values: &[u8], width: usize) -> Self {
        let (rows, cols) = super::feather::extent(values, width).unwrap_or(((0, 1), (0, 1)));
        Self { left: cols.0, top: rows.0, width: cols.1 - cols.0, height: rows.1 - rows.0 }
    }

    /// The area with a margin, within an image of this size.
    pub(super) fn grown(self, margin: usize, (width, height): (usize, usize)) -> Self {
        let (left, top) = (self.left.saturating_sub(margin), self.top.saturating_sub(margin));
        let (right, bottom) = ((self.left + self.width + margin).min(width), (self.top + self.height + margin).min(height));
        Self { left, top, width: right - left, height: bottom - top }
    }

    /// This part of an image of `C` bytes per pixel.
    pub(super) fn of<const C: usize>(self, pixels: &[u8], width: usize) -> Vec<u8> {
        let mut part = Vec::with_capacity(self.width * self.height * C);
        let rows = pixels.chunks_exact(width * C).skip(self.top).take(self.height);
        rows.for_each(|row| part.extend_from_slice(&row[self.left * C..][..self.width * C]));
        part
    }
}

/// What a generated image is laid over.
#[derive(Clone, Debug, PartialEq)]
pub struct Paste {
    /// The image below.
    under: Image,
    /// Where the generated image goes. It is resized to that size.
    area: Area,
    /// The opacity of the generated image there.
    opacity: Vec<u8>,
}

impl Paste {
    /// Lays generated images over a part of `under`.
    ///
    /// # Panics
    /// If the part is not within the image, or `opacity` is not its size: a bug in the caller.
    pub fn new(under: Image, area: Area, opacity: Vec<u8>) -> Self {
        assert!(area.left + area.width <= under.width && area.top + area.height <= under.height, "{area:?}");
        assert_eq!(opacity.len(), area.width * area.height);
        Self { under, area, opacity }
    }

    /// Width and height of the finished image.
    pub fn size(&self) -> (usize, usize) {
        (self.under.width, self.under.height)
    }

    /// Where generated images go.
    pub fn area(&self) -> Area {
        self.area
    }

    /// The number of pixels that a generated image can change.
    pub fn changed(&self) -> usize {
        self.opacity.par_iter().filter(|opacity| **opacity > 0).count()
    }

    /// Lays an image over the one below. Pixels without opacity stay, to the byte.
    pub fn over(&self, image: Image) -> Image {
        let Area { left, top, width, height } = self.area;
        let over = match (image.width, image.height) == (width, height) {
            true => Cow::Owned(image.pixels),
            false => resize::<3>(&image.pixels, (image.width, image.height), (width, height), Filter::Lanczos).into(),
        };
        let stride = 3 * self.under.width;
        let mut pixels = vec![0; self.under.pixels.len()];
        // Copying an image takes longer than mixing a part of it, so every row is copied here, too.
        let rows = pixels.par_chunks_exact_mut(stride).zip(self.under.pixels.par_chunks_exact(stride)).enumerate();
        rows.for_each(|(y, (row, below))| {
            row.copy_from_slice(below);
            let Some(y) = y.checked_sub(top).filter(|y| *y < height) else { return };
            let row = row[3 * left..3 * (left + width)].as_chunks_mut::<3>().0;
            let over = over[3 * width * y..][..3 * width].as_chunks::<3>().0;
            for ((below, above), opacity) in row.iter_mut().zip(over).zip(&self.opacity[width * y..]) {
                below.iter_mut().zip(above).for_each(|(below, above)| *below = mixed(*below, *above, *opacity));
            }
        });
        Image { pixels, ..self.under }
    }
}

/// A value over another one, rounded to nearest.
fn mixed(below: u8, above: u8, opacity: u8) -> u8 {
    let [below, above, opacity] = [below, above, opacity].map(u32::from);
    ((2 * (opacity * above + (255 - opacity) * below) + 255) / 510) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pillow's `Image.composite`, whose arithmetic is `MULDIV255` on the sum.
    fn pillow(below: u8, above: u8, opacity: u8) -> u8 {
        let [below, above, opacity] = [below, above, opacity].map(u32::from);
        let sum = opacity * above + (255 - opacity) * below + 128;
        ((sum + (sum >> 8)) >> 8) as u8
    }

    #[test]
    fn values_are_mixed_as_pillow_mixes_them() {
        for opacity in 0..=255 {
            for above in 0..=255 {
                for below in [0, 1, 2, 77, 127, 128, 129, 200, 253, 254, 255] {
                    assert_eq!(mixed(below, above, opacity), pillow(below, above, opacity), "{below} {above} {opacity}");
                }
            }
        }
    }

    #[test]
    fn only_the_area_changes() {
        let under = Image { width: 5, height: 4, pixels: (0..60).collect() };
        let area = Area { left: 1, top: 2, width: 3, height: 2 };
        let paste = Paste::new(under.clone(), area, vec![0, 255, 128, 255, 0, 0]);
        assert_eq!((paste.size(), paste.changed(), paste.area()), ((5, 4), 3, area));
        let out = paste.over(Image { width: 3, height: 2, pixels: vec![100; 18] });
        let changed: Vec<usize> = (0..20).filter(|i| out.pixels[3 * i..][..3] != under.pixels[3 * i..][..3]).collect();
        assert_eq!(changed, [12, 13, 16]);
        assert_eq!(out.pixels[36..39], [100; 3]);
        // A smaller image is enlarged to the area.
        assert_eq!(paste.over(Image { width: 1, height: 1, pixels: vec![100; 3] }), out);
        assert_eq!(Area::around(&[0, 0, 0, 0, 3, 0, 0, 0, 1], 3), Area { left: 1, top: 1, width: 2, height: 2 });
        assert_eq!(area.grown(1, (5, 4)), Area { left: 0, top: 1, width: 5, height: 3 });
        assert_eq!(area.of::<3>(&under.pixels, 5)[..9], [33, 34, 35, 36, 37, 38, 39, 40, 41]);
    }
}
