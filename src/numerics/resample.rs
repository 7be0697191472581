//! Image resampling, bit-identical to Pillow 13 on 8-bit images.
//!
//! This takes exactly the steps of Pillow: two passes with an 8-bit intermediate image, weights computed in f64, normalized, and
//! rounded to 22 fractional bits. A pass that would not change the size is skipped. The horizontal pass comes first unless the
//! height is reduced much more than the width; since the intermediate image is rounded, the order affects the result.

use rayon::prelude::*;
use std::borrow::Cow;
use std::f64::consts::PI;

/// Fractional bits of a weight.
const PRECISION: u32 = 22;

/// The window by which input samples are weighted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Lanczos with three lobes, for images. It overshoots at edges.
    Lanczos,
    /// A triangle, for masks: flat areas stay flat up to their edges. Pillow calls it bilinear.
    Triangle,
}

impl Filter {
    /// Half the width of the window, in samples.
    fn support(self) -> f64 {
        match self {
            Self::Lanczos => 3.0,
            Self::Triangle => 1.0,
        }
    }

    /// The weight at a distance from the center.
    fn weight(self, x: f64) -> f64 {
        match self {
            Self::Lanczos => {
                let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
                if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 }
            }
            Self::Triangle => (1.0 - x.abs()).max(0.0),
        }
    }
}

/// Resamples an image, stored row by row with `C` bytes per pixel, from one width and height to another.
///
/// # Panics
/// If a side is zero or `pixels` is not `from` pixels long: a bug in the caller.
pub fn resize<const C: usize>(pixels: &[u8], from: (usize, usize), to: (usize, usize), filter: Filter) -> Vec<u8> {
    assert!(from.0 > 0 && from.1 > 0 && to.0 > 0 && to.1 > 0, "{from:?} to {to:?}: no side may be zero");
    assert_eq!(pixels.len(), from.0 * from.1 * C, "the image is not {from:?}");
    let pixels = Cow::Borrowed(pixels);
    let (less_width, less_height) = (from.0.saturating_sub(to.0), from.1.saturating_sub(to.1));
    let wide = |pixels, filter| horizontal::<C>(pixels, from.0, to.0, filter);
    let resized = if less_height > 2 * less_width {
        wide(vertical(pixels, C * from.0, from.1, to.1, filter), filter)
    } else {
        vertical(wide(pixels, filter), C * to.0, from.1, to.1, filter)
    };
    resized.into_owned()
}

/// The filter taps of one output sample: `weights[k]` belongs to input sample `first + k`.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The taps of every output sample when `from` samples are resampled to `to`.
fn taps(from: usize, to: usize, filter: Filter) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    // Downscaling widens the window, so that every input sample contributes; upscaling does not narrow it.
    let filter_scale = scale.max(1.0);
    let (support, inverse_scale) = (filter.support() * filter_scale, 1.0 / filter_scale);
    (0..to)
        .map(|i| {
            let center = (i as f64 + 0.5) * scale;
            // The cast truncates and saturates, which clamps at zero.
            let first = (center - support + 0.5) as usize;
            let last = ((center + support + 0.5) as usize).min(from);
            let weights: Vec<f64> = (first..last).map(|x| filter.weight((x as f64 - center + 0.5) * inverse_scale)).collect();
            let sum: f64 = weights.iter().sum();
            // Rounds half away from zero. `round` would differ where the addition itself is inexact.
            let fixed = |w: &f64| (w / sum * f64::from(1 << PRECISION) + 0.5_f64.copysign(*w)) as i32;
            Taps { first, weights: weights.iter().map(fixed).collect() }
        })
        .collect()
}

/// The initial value of an accumulator. It is one half, so that truncating the fraction rounds to nearest.
const HALF: i32 = 1 << (PRECISION - 1);

/// Accumulates a tap. The weights of an output sum to one and the negative ones are small, so 255 times their absolute sum fits
/// in `i32`; wrapping arithmetic only spares the overflow checks, which would prevent vectorization.
fn add(sum: &mut i32, weight: i32, sample: u8) {
    *sum = sum.wrapping_add(weight.wrapping_mul(i32::from(sample)));
}

fn to_byte(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// Resamples every row.
fn horizontal<const C: usize>(pixels: Cow<'_, [u8]>, from: usize, to: usize, filter: Filter) -> Cow<'_, [u8]> {
    if from == to {
        return pixels;
    }
    let taps = taps(from, to, filter);
    let mut out = vec![0; pixels.len() / from * to];
    out.par_chunks_exact_mut(to * C).zip(pixels.par_chunks_exact(from * C)).for_each(|(out, row)| {
        for (out, taps) in out.chunks_exact_mut(C).zip(&taps) {
            let mut sums = [HALF; C];
            for (pixel, &weight) in row[taps.first * C..].chunks_exact(C).zip(&taps.weights) {
                sums.iter_mut().zip(pixel).for_each(|(sum, &sample)| add(sum, weight, sample));
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = to_byte(sum));
        }
    });
    out.into()
}

/// Resamples every column of rows of `stride` bytes. The accumulators of a whole row are updated together, so that memory is read sequentially.
fn vertical(pixels: Cow<'_, [u8]>, stride: usize, from: usize, to: usize, filter: Filter) -> Cow<'_, [u8]> {
    if from == to {
        return pixels;
    }
    let taps = taps(from, to, filter);
    let mut out = vec![0; to * stride];
    out.par_chunks_exact_mut(stride).zip(&taps).for_each_init(
        || vec![0; stride],
        |sums, (out, taps)| {
            sums.fill(HALF);
            for (row, &weight) in pixels[taps.first * stride..].chunks_exact(stride).zip(&taps.weights) {
                sums.iter_mut().zip(row).for_each(|(sum, &sample)| add(sum, weight, sample));
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = to_byte(*sum));
        },
    );
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_every_sample_sum_to_one() {
        let sizes = [(1, 1), (1, 7), (7, 1), (100, 99), (99, 100), (16_384, 362), (64, 512)];
        for ((from, to), filter) in sizes.into_iter().flat_map(|size| [(size, Filter::Lanczos), (size, Filter::Triangle)]) {
            for taps in taps(from, to, filter) {
                assert!(!taps.weights.is_empty() && taps.first + taps.weights.len() <= from, "{from} to {to}");
                let sum: i64 = taps.weights.iter().map(|&w| i64::from(w)).sum();
                // Each weight is rounded independently.
                assert!((sum - (1 << PRECISION)).unsigned_abs() <= taps.weights.len() as u64, "{from} to {to}: {sum}");
                // The accumulators fit in `i32`.
                let size: i64 = taps.weights.iter().map(|&w| i64::from(w).abs()).sum();
                assert!(size * 255 + i64::from(HALF) <= i64::from(i32::MAX), "{from} to {to}: {size}");
            }
        }
    }

    #[test]
    fn a_flat_image_stays_flat() {
        for value in [0, 1, 127, 254, 255] {
            for filter in [Filter::Lanczos, Filter::Triangle] {
                assert_eq!(resize::<3>(&[value; 40 * 30 * 3], (40, 30), (17, 41), filter), [value; 17 * 41 * 3]);
                assert_eq!(resize::<1>(&[value; 40 * 30], (40, 30), (17, 41), filter), [value; 17 * 41]);
            }
        }
        let pixels: Vec<u8> = (0..60).collect();
        assert_eq!(resize::<3>(&pixels, (5, 4), (5, 4), Filter::Lanczos), pixels, "no pass, no change");
    }
}
