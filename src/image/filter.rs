//! The filters of PNG rows: each byte minus a prediction from its neighbors.

/// Bytes of an RGB pixel: the distance to the left neighbor.
const PIXEL: usize = 3;

/// Filters rows. Each row gets the filter whose output has the smallest sum of absolute values, the heuristic of the PNG
/// specification.
pub(super) struct RowFilter {
    /// The output of each filter for the current row.
    candidates: [Vec<u8>; 5],
}

impl RowFilter {
    /// A filter for rows of `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Self {
        Self { candidates: std::array::from_fn(|_| vec![0; bytes]) }
    }

    /// Appends the number of a filter and the filtered row to `out`. `above` is the previous row; for the first row it is zeros.
    pub(super) fn append(&mut self, row: &[u8], above: &[u8], out: &mut Vec<u8>) {
        let [none, sub, up, average, paeth] = &mut self.candidates;
        none.copy_from_slice(row);
        each(sub, row, above, |_, a, _, _| a);
        each(up, row, above, |_, _, b, _| b);
        each(average, row, above, |_, a, b, _| ((u16::from(a).wrapping_add(u16::from(b))) / 2) as u8);
        each(paeth, row, above, |_, a, b, c| predict_paeth(a, b, c));
        let costs = self.candidates.each_ref().map(|row| cost(row));
        let best = (0..5).min_by_key(|i| costs[*i]).unwrap_or(0);
        out.push(best as u8);
        out.extend_from_slice(&self.candidates[best]);
    }
}

/// Subtracts a prediction from every byte of a row, given the byte, its left neighbor, the one above and the one left above.
fn each(out: &mut [u8], row: &[u8], above: &[u8], predict: impl Fn(u8, u8, u8, u8) -> u8) {
    for i in 0..PIXEL.min(row.len()) {
        out[i] = row[i].wrapping_sub(predict(row[i], 0, above[i], 0));
    }
    let rest = row.len().saturating_sub(PIXEL);
    // Slices of equal length, so that no index is checked and the loop becomes vector instructions.
    let (out, x, a) = (&mut out[row.len() - rest..], &row[row.len() - rest..], &row[..rest]);
    let (b, c) = (&above[row.len() - rest..], &above[..rest]);
    for i in 0..rest {
        out[i] = x[i].wrapping_sub(predict(x[i], a[i], b[i], c[i]));
    }
}

/// The neighbor (left, above or left above) that is nearest to left + above - left above.
fn predict_paeth(a: u8, b: u8, c: u8) -> u8 {
    let (wide_a, wide_b, wide_c) = (i16::from(a), i16::from(b), i16::from(c));
    let (from_a, from_b) = (wide_b.wrapping_sub(wide_c), wide_a.wrapping_sub(wide_c));
    let (pa, pb, pc) = (from_a.wrapping_abs(), from_b.wrapping_abs(), from_a.wrapping_add(from_b).wrapping_abs());
    let nearer = if pb <= pc { b } else { c };
    if pa <= pb && pa <= pc { a } else { nearer }
}

/// The sum of the absolute values of a filtered row, as signed bytes.
fn cost(row: &[u8]) -> u64 {
    // Blocks whose sum fits into 32 bits.
    let block = |block: &[u8]| block.iter().fold(0u32, |sum, v| sum.wrapping_add(u32::from((*v as i8).unsigned_abs())));
    row.chunks(1 << 16).map(|part| u64::from(block(part))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The filters of the specification, byte by byte.
    fn unfilter(kind: u8, filtered: &[u8], above: &[u8]) -> Vec<u8> {
        let mut row: Vec<u8> = Vec::new();
        for (i, x) in filtered.iter().enumerate() {
            let a = if i < PIXEL { 0 } else { i32::from(row[i - PIXEL]) };
            let (b, c) = (i32::from(above[i]), if i < PIXEL { 0 } else { i32::from(above[i - PIXEL]) });
            let p = a + b - c;
            let (pa, pb, pc) = ((p - a).abs(), (p - b).abs(), (p - c).abs());
            let paeth = match () {
                () if pa <= pb && pa <= pc => a,
                () if pb <= pc => b,
                () => c,
            };
            row.push((i32::from(*x) + [0, a, b, (a + b) / 2, paeth][usize::from(kind)]) as u8);
        }
        row
    }

    #[test]
    fn every_filter_can_be_undone_and_the_cheapest_is_taken() {
        let mut state = 5u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let mut taken = [0; 5];
        for case in 0..500 {
            let pixels = 1 + case % 70;
            let above: Vec<u8> = (0..3 * pixels).map(|_| next()).collect();
            // Rows that one of the filters predicts up to a little noise.
            let noise: Vec<u8> = (0..3 * pixels).map(|_| next() % 4).collect();
            let row = unfilter((case % 5) as u8, &noise, &above);
            let (mut filter, mut out) = (RowFilter::new(3 * pixels), Vec::new());
            filter.append(&row, &above, &mut out);
            assert_eq!(unfilter(out[0], &out[1..], &above), row, "{case}");
            assert!(cost(&out[1..]) <= cost(&noise), "{case}");
            taken[usize::from(out[0])] += 1;
        }
        assert!(taken.iter().all(|count| *count > 5), "{taken:?}");
    }
}
