//! Nearest-neighbor upsampling by two and a 3x3 convolution, as four 2x2 convolutions of the input image.
//!
//! Output pixel (2i + a, 2j + b) has phase (a, b). Two of the three rows of its filter fall on the same image row: for a = 0 row 0 is on
//! image row i - 1 and rows 1 and 2 are on i; for a = 1 rows 0 and 1 are on i and row 2 is on i + 1. The same holds for columns. So taps on
//! the same pixel are summed once for all pixels, 4 of 9 products remain, and the upsampled image is never stored.

use crate::tensor::{Bytes, DType, WeightSlice};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Rows (or columns) of the 3x3 filter that are summed in tap `tap` of an output row (or column) of this parity.
const fn summed(parity: usize, tap: usize) -> Range<usize> {
    match (parity, tap) {
        (0, 0) => 0..1,
        (0, _) => 1..3,
        (_, 0) => 0..2,
        _ => 2..3,
    }
}

/// One filter in phase form: 3x3 taps of each input channel become `[phase][tap row][tap column][input channel]`.
fn fold(filter: &[f32], folded: &mut [f32]) {
    let channels = filter.len() / 9;
    for (place, sums) in folded.chunks_exact_mut(channels).enumerate() {
        let [a, b, row, column] = [place / 8, place / 4 % 2, place / 2 % 2, place % 2];
        for (sum, taps) in sums.iter_mut().zip(filter.chunks_exact(9)) {
            *sum = summed(a, row).map(|y| summed(b, column).map(|x| taps[3 * y + x]).sum::<f32>()).sum();
        }
    }
}

/// Converts rows of stored 3x3 filters to phase form in this plain type. `None` if they are not such rows.
pub fn folded(part: &WeightSlice, dtype: DType) -> Option<WeightSlice> {
    let cols = part.cols();
    if !part.is_complete() || cols == 0 || !cols.is_multiple_of(9) || dtype.is_quantized() {
        return None;
    }
    let mut bytes = vec![0; dtype.bytes(part.rows * cols / 9 * 16)];
    let rows = bytes.par_chunks_exact_mut(dtype.bytes(cols / 9 * 16)).enumerate();
    rows.for_each_init(
        || (vec![0.0; cols], vec![0.0; cols / 9 * 16]),
        |(filter, folded), (row, out)| {
            part.decode(row, filter);
            fold(filter, folded);
            dtype.encode(folded, out);
        },
    );
    Some(WeightSlice::plain(Bytes::new(Arc::new(bytes)), dtype, part.rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_sums_the_taps_that_see_one_pixel() {
        // Two channels whose taps are powers of two, so that a sum shows what was added.
        let filter: Vec<f32> = (0..18).map(|i| (1 << i) as f32).collect();
        let mut folded = [0.0; 32];
        fold(&filter, &mut folded);
        let bits = |places: &[u32]| places.iter().map(|p| 1 << p).sum::<u32>() as f32;
        let of = |place: usize| [folded[2 * place], folded[2 * place + 1] / 512.0];
        // Phase (0, 0): the corner, the rest of its row, the rest of its column, the other four.
        let first = [bits(&[0]), bits(&[1, 2]), bits(&[3, 6]), bits(&[4, 5, 7, 8])];
        assert_eq!([0, 1, 2, 3].map(of), first.map(|sum| [sum; 2]));
        // Phase (0, 1), with columns summed the other way round, and phase (1, 0).
        assert_eq!([4, 5, 6, 7].map(of), [bits(&[0, 1]), bits(&[2]), bits(&[3, 4, 6, 7]), bits(&[5, 8])].map(|sum| [sum; 2]));
        assert_eq!([8, 9, 10, 11].map(of), [bits(&[0, 3]), bits(&[1, 2, 4, 5]), bits(&[6]), bits(&[7, 8])].map(|sum| [sum; 2]));
        assert_eq!([12, 15].map(of), [bits(&[0, 1, 3, 4]), bits(&[8])].map(|sum| [sum; 2]));
        // Every tap is in one place of each phase.
        (0..4).for_each(|phase| assert_eq!((0..4).map(|tap| of(4 * phase + tap)[0]).sum::<f32>(), 511.0));
    }

    #[test]
    fn sums_are_rounded_once() {
        // In bf16 each of these is exact, but 256 + 1 is not: 256 + 1 + 1 would be lost tap by tap.
        let values: [f32; 9] = [0.0, 0.0, 0.0, 0.0, 256.0, 1.0, 0.0, 1.0, 0.0];
        let mut bytes = vec![0; 18];
        DType::Bf16.encode(&values, &mut bytes);
        let part = WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::Bf16, 1);
        let folded = folded(&part, DType::Bf16).unwrap();
        let mut row = [0.0; 16];
        folded.decode(0, &mut row);
        assert_eq!(row[3], 258.0);
        let short = WeightSlice::plain(Bytes::new(Arc::new(vec![0_u8; 16])), DType::Bf16, 1);
        assert!(super::folded(&short, DType::Bf16).is_none());
    }
}
