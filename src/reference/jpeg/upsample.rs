//! Upsampling of subsampled components to the size of the image, with the filters of libjpeg's "fancy upsampling".
//!
//! A triangle filter upsamples a component at half the width or height: the new sample is 3/4 of the nearer sample and 1/4 of the
//! farther one. Roundings alternate between up and down to avoid a bias. Any other ratio repeats samples.

use super::frame::{Component, Frame};
use crate::reference::{Fault, buffer};

/// Computes the rows of a component at the size of the image.
pub(super) struct Upsampler<'a> {
    samples: &'a [u8],
    stride: usize,
    size: (usize, usize),
    filter: Filter,
    /// The last computed row.
    row: Vec<u8>,
    /// Weighted sums of two rows.
    sums: Vec<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filter {
    /// A horizontal triangle filter.
    Across,
    /// A vertical triangle filter.
    Down,
    /// Triangle filters in both directions.
    Both,
    /// Samples are repeated this number of times, horizontally and vertically.
    Repeat(usize, usize),
}

impl Filter {
    fn of(component: &Component, frame: &Frame) -> Self {
        let ratio = (frame.sampling.0 / component.sampling.0, frame.sampling.1 / component.sampling.1);
        match ratio {
            // libjpeg uses its filter only for more than two columns.
            (2, 1) if component.size.0 > 2 => Self::Across,
            (2, 2) if component.size.0 > 2 => Self::Both,
            (1, 2) => Self::Down,
            (h, v) => Self::Repeat(h, v),
        }
    }
}

impl<'a> Upsampler<'a> {
    /// Creates the upsampler of a component. `samples` holds the samples of its whole blocks, row by row.
    pub(super) fn new(frame: &Frame, component: &Component, samples: &'a [u8]) -> Result<Self, Fault> {
        let filter = Filter::of(component, frame);
        let stride = component.blocks.0 * 8;
        // The ratio is at most four.
        let row = buffer(if filter == Filter::Repeat(1, 1) { 0 } else { component.size.0 * 4 })?;
        let sums = buffer(if filter == Filter::Both { component.size.0 } else { 0 })?;
        Ok(Self { samples, stride, size: component.size, filter, row, sums })
    }

    fn stored(&self, y: usize) -> &'a [u8] {
        &self.samples[y * self.stride..][..self.size.0]
    }

    /// The nearer and the farther stored row for row `y` at twice the height. Beyond the edges the outermost row is repeated.
    fn neighbors(&self, y: usize) -> (&'a [u8], &'a [u8]) {
        let near = y / 2;
        let far = if y.is_multiple_of(2) { near.saturating_sub(1) } else { (near + 1).min(self.size.1 - 1) };
        (self.stored(near), self.stored(far))
    }

    /// Row `y`, at least as long as the image is wide.
    pub(super) fn row(&mut self, y: usize) -> &[u8] {
        match self.filter {
            Filter::Repeat(1, down) => return self.stored(y / down),
            Filter::Repeat(across, down) => repeat(self.stored(y / down), across, &mut self.row),
            Filter::Across => widen(self.stored(y), &mut self.row),
            Filter::Down => {
                let (near, far) = self.neighbors(y);
                let bias = 1 + (y % 2) as u16;
                for (to, (&near, &far)) in self.row.iter_mut().zip(near.iter().zip(far)) {
                    *to = ((u16::from(near) * 3 + u16::from(far) + bias) >> 2) as u8;
                }
            }
            Filter::Both => {
                let (near, far) = self.neighbors(y);
                for (to, (&near, &far)) in self.sums.iter_mut().zip(near.iter().zip(far)) {
                    *to = u16::from(near) * 3 + u16::from(far);
                }
                widen_sums(&self.sums, &mut self.row);
            }
        }
        &self.row
    }
}

fn repeat(from: &[u8], times: usize, to: &mut [u8]) {
    for (to, &sample) in to.chunks_exact_mut(times).zip(from) {
        to.fill(sample);
    }
}

/// Doubles the number of samples; the outermost ones are kept.
fn widen(from: &[u8], to: &mut [u8]) {
    let (first, last) = (from[0], from[from.len() - 1]);
    let inner = from.windows(2).map(|pair| (u16::from(pair[0]), u16::from(pair[1])));
    to[0] = first;
    for (to, (left, right)) in to[1..].chunks_exact_mut(2).zip(inner) {
        to[0] = ((left * 3 + right + 2) >> 2) as u8;
        to[1] = ((right * 3 + left + 1) >> 2) as u8;
    }
    to[from.len() * 2 - 1] = last;
}

/// Doubles the number of samples from weighted sums of two rows. The sums are four times as large as samples.
fn widen_sums(from: &[u16], to: &mut [u8]) {
    let (first, last) = (from[0], from[from.len() - 1]);
    to[0] = ((first * 4 + 8) >> 4) as u8;
    for (to, pair) in to[1..].chunks_exact_mut(2).zip(from.windows(2)) {
        let (left, right) = (pair[0], pair[1]);
        to[0] = ((left * 3 + right + 7) >> 4) as u8;
        to[1] = ((right * 3 + left + 8) >> 4) as u8;
    }
    to[from.len() * 2 - 1] = ((last * 4 + 7) >> 4) as u8;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of a subsampled component of a 67 x 66 image. The sample at (x, y) is `value`.
    fn rows(sampling: u8, value: fn(usize, usize) -> u8) -> Vec<Vec<u8>> {
        let frame = Frame::read(&[8, 0, 66, 0, 67, 3, 1, 0x44, 0, 2, sampling, 0, 3, 0x44, 0], false).unwrap();
        let component = &frame.components[1];
        let stride = component.blocks.0 * 8;
        let samples: Vec<u8> = (0..component.count() * 64).map(|i| value(i % stride, i / stride)).collect();
        let mut upsampler = Upsampler::new(&frame, component, &samples).unwrap();
        (0..frame.height).map(|y| upsampler.row(y)[..frame.width].to_vec()).collect()
    }

    #[test]
    fn a_slope_stays_a_slope() {
        // A slope of 8 levels per sample becomes 4 at twice the size. The outermost samples are kept.
        let across = rows(0x24, |x, _| 8 * (x.min(31)) as u8);
        assert_eq!(across[0][..7], [0, 2, 6, 10, 14, 18, 22]);
        assert_eq!(across[65], across[0]);
        let down: Vec<u8> = rows(0x42, |_, y| 8 * (y.min(31)) as u8).iter().map(|row| row[5]).collect();
        assert_eq!(down[..7], [0, 2, 6, 10, 14, 18, 22]);
        let both = rows(0x22, |x, y| 2 * x as u8 + 2 * y as u8);
        assert_eq!(both[0][..4], [0, 0, 2, 2]);
        assert_eq!(both[1][..4], [1, 1, 2, 3]);
    }

    #[test]
    fn samples_outside_the_component_are_not_used() {
        // 67 x 66 at half the size is 34 x 33. The padding of the blocks is bright.
        for sampling in [0x24, 0x42, 0x22, 0x11, 0x14, 0x41, 0x12] {
            let image = rows(sampling, |x, y| if x >= 34 || y >= 33 { 255 } else { 10 });
            let (wide, high) = (sampling & 0x40 != 0, sampling & 0x04 != 0);
            let inside = image
                .iter()
                .take(if high { 33 } else { 66 })
                .all(|row| row[..if wide { 34 } else { 67 }].iter().all(|&v| v == 10));
            assert!(inside, "{sampling:x}");
        }
    }

    #[test]
    fn other_ratios_repeat() {
        let image = rows(0x11, |x, y| (10 * y + x) as u8);
        for (y, row) in image.iter().enumerate() {
            assert!(row.iter().enumerate().all(|(x, &v)| usize::from(v) == 10 * (y / 4) + x / 4), "{y}: {row:?}");
        }
    }
}
