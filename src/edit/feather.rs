//! The feather of a mask: it grows by half the feather and is then smoothed, so that it reaches outwards and never thins the mask itself.

use rayon::prelude::*;

/// Rows that a thread works on at a time.
const BAND: usize = 128;

/// The opacity of what is repainted: the mask, fading out over `feather` pixels around it.
///
/// With `r` half the feather and a square of `2 r + 1` pixels around each pixel: the maximum of the mask, with zeros beyond the edge, then
/// the mean of the maxima, with the edge repeated and halves rounded up; at least the mask.
pub fn feathered(mut mask: Vec<u8>, width: usize, height: usize, feather: usize) -> Vec<u8> {
    let r = feather / 2;
    if r == 0 || width == 0 {
        return mask;
    }
    // Farther away than the feather reaches everything is zero. Most masks are small.
    let Some((rows, cols)) = extent(&mask, width) else { return mask };
    let around = |range: (usize, usize), end: usize| (range.0.saturating_sub(2 * r), (range.1 + 2 * r).min(end));
    let ((top, bottom), (left, right)) = (around(rows, height), around(cols, width));
    let (w, h) = (right - left, bottom - top);
    let mut part = Vec::with_capacity(w * h);
    (top..bottom).for_each(|y| part.extend_from_slice(&mask[y * width + left..y * width + right]));
    let grown = grown(&part, w, r);
    let smooth = smoothed(&grown, w, r);
    for (y, row) in smooth.chunks_exact(w).enumerate() {
        let to = &mut mask[(top + y) * width + left..][..w];
        to.iter_mut().zip(row).for_each(|(to, value)| *to = (*to).max(*value));
    }
    mask
}

/// The rows and the columns with values above zero.
pub fn extent(values: &[u8], width: usize) -> Option<((usize, usize), (usize, usize))> {
    let of_row = |(y, row): (usize, &[u8])| {
        // Most rows are empty. This sum is vectorized, a search is not.
        if row.iter().fold(0, |all, value| all | value) == 0 {
            return None;
        }
        let (first, last) = (row.iter().position(|value| *value > 0)?, row.iter().rposition(|value| *value > 0)?);
        Some(((y, y + 1), (first, last + 1)))
    };
    let union = |a: (usize, usize), b: (usize, usize)| (a.0.min(b.0), a.1.max(b.1));
    let found = values.par_chunks_exact(width).enumerate().filter_map(of_row);
    found.reduce_with(|a, b| (union(a.0, b.0), union(a.1, b.1)))
}

/// The maximum of the square around each pixel, with zeros beyond the edge.
fn grown(mask: &[u8], width: usize, r: usize) -> Vec<u8> {
    let height = mask.len() / width;
    let mut out = vec![0; mask.len()];
    out.par_chunks_mut(BAND * width).enumerate().for_each(|(band, out)| {
        let (first, rows) = (band * BAND, out.len() / width);
        // The rows that the band depends on; zeros stand for those beyond the edge.
        let mut window = vec![0; (rows + 2 * r) * width];
        let (start, end) = (first.saturating_sub(r), (first + rows + r).min(height));
        let at = (start + r - first) * width;
        window[at..at + (end - start) * width].copy_from_slice(&mask[start * width..end * width]);
        maxima(&mut window, width, 2 * r + 1);
        // Rows take the same steps as columns.
        let mut line = vec![0; width + 2 * r];
        for (out, row) in out.chunks_exact_mut(width).zip(window.chunks_exact(width)) {
            line.fill(0);
            line[r..r + width].copy_from_slice(row);
            maxima(&mut line, 1, 2 * r + 1);
            out.copy_from_slice(&line[..width]);
        }
    });
    out
}

/// Replaces each value by the maximum of `count` values, from itself on and `stride` apart. Windows double in length.
fn maxima(values: &mut [u8], stride: usize, count: usize) {
    let mut has = 1;
    while has < count {
        let step = has.min(count - has);
        let ahead = step * stride;
        // Values ahead are not replaced yet.
        for i in 0..values.len().saturating_sub(ahead) {
            values[i] = values[i].max(values[i + ahead]);
        }
        has += step;
    }
}

/// The mean of the square around each pixel, with the edge repeated.
fn smoothed(values: &[u8], width: usize, r: usize) -> Vec<u8> {
    let (height, count) = (values.len() / width, 2 * r as u32 + 1);
    // A square has at most 257 x 257 pixels, so twice their sum fits in 32 bits.
    let area = count * count;
    let row = |y: isize| &values[y.clamp(0, height as isize - 1) as usize * width..][..width];
    let mut out = vec![0; values.len()];
    out.par_chunks_mut(BAND * width).enumerate().for_each(|(band, out)| {
        let first = (band * BAND) as isize;
        let mut sums = vec![0_u32; width];
        for y in first - r as isize..=first + r as isize {
            sums.iter_mut().zip(row(y)).for_each(|(sum, value)| *sum += u32::from(*value));
        }
        for (y, out) in (first..).zip(out.chunks_exact_mut(width)) {
            let column = |x: isize| sums[x.clamp(0, width as isize - 1) as usize];
            let mut sum: u32 = (-(r as isize)..=r as isize).map(column).sum();
            for (x, out) in (0_isize..).zip(out.iter_mut()) {
                *out = ((2 * sum + area) / (2 * area)) as u8;
                sum = sum + column(x + r as isize + 1) - column(x - r as isize);
            }
            let (leaves, enters) = (row(y - r as isize), row(y + r as isize + 1));
            for ((sum, leaves), enters) in sums.iter_mut().zip(leaves).zip(enters) {
                *sum = *sum + u32::from(*enters) - u32::from(*leaves);
            }
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, pixel by pixel.
    fn plain(mask: &[u8], width: usize, height: usize, feather: usize) -> Vec<u8> {
        let r = (feather / 2) as isize;
        let (w, h) = (width as isize, height as isize);
        let square = |x: isize, y: isize| (-r..=r).flat_map(move |dy| (-r..=r).map(move |dx| (x + dx, y + dy)));
        let inside = |x: isize, y: isize| (0..w).contains(&x) && (0..h).contains(&y);
        let at = |values: &[u8], x: isize, y: isize| u32::from(values[(y * w + x) as usize]);
        let all = || (0..h).flat_map(|y| (0..w).map(move |x| (x, y)));
        let most = |(x, y)| square(x, y).filter(|&(x, y)| inside(x, y)).map(|(x, y)| at(mask, x, y)).max().unwrap() as u8;
        let grown: Vec<u8> = all().map(most).collect();
        let area = ((2 * r + 1) * (2 * r + 1)) as u32;
        let mean = |(x, y)| {
            let sum: u32 = square(x, y).map(|(x, y)| at(&grown, x.clamp(0, w - 1), y.clamp(0, h - 1))).sum();
            ((2 * sum + area) / (2 * area)).max(at(mask, x, y)) as u8
        };
        all().map(mean).collect()
    }

    #[test]
    fn a_feather_equals_its_definition() {
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let small = [0, 1, 2, 3, 8, 15].as_slice();
        for (width, height, one_in, feathers) in [
            (1, 1, 1, &[0, 1, 2, 256][..]),
            (40, 30, 200, small),
            (33, 150, 900, &[4, 9]),
            (64, 20, 1, small),
            (5, 300, 300, &[6, 16]),
            (200, 3, 90, small),
            (9, 7, 30, &[31, 256]),
        ] {
            let mask: Vec<u8> = (0..width * height).map(|_| if next() % one_in == 0 { next() as u8 } else { 0 }).collect();
            for &feather in feathers {
                let equal = feathered(mask.clone(), width, height, feather) == plain(&mask, width, height, feather);
                assert!(equal, "{width}x{height}, feather {feather}");
            }
        }
        assert_eq!(feathered(vec![0; 12], 4, 3, 16), [0; 12]);
    }

    /// Pixels across a straight edge, from two pixels inside on.
    #[test]
    fn a_feather_falls_outwards_from_a_straight_edge() {
        let mask: Vec<u8> = (0..64 * 64).map(|i| if i % 64 < 32 { 255 } else { 0 }).collect();
        let of = |feather: usize, count: usize| feathered(mask.clone(), 64, 64, feather)[32 * 64 + 30..][..count].to_vec();
        assert_eq!(of(8, 12), [255, 255, 227, 198, 170, 142, 113, 85, 57, 28, 0, 0]);
        let sixteen = [255, 255, 240, 225, 210, 195, 180, 165, 150, 135, 120, 105, 90, 75, 60, 45, 30, 15, 0, 0];
        assert_eq!(of(16, 20), sixteen);
    }
}
