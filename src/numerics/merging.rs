//! The inner loops of merging: while a block of weight rows is in the cache, it is decoded, deltas are added, and it is rounded.
//! The loops are compiled for each instruction set that a processor may have.

use crate::tensor::{DType, SliceScaling, WeightSlice, decode_bf16, encode_bf16};
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// Rows per block. Each has two vectors of sums. Together these fill the registers of AVX2, and the block stays in the second-level cache.
pub const BLOCK: usize = 6;
/// Columns of a panel: two vectors of AVX-512.
const WIDTH: usize = 32;

/// A matrix `[rank, cols]` in zero-padded panels of a few columns each, so that values multiplied together lie together.
pub struct Panels {
    values: Vec<f32>,
    rank: usize,
    cols: usize,
}

impl Panels {
    /// Cuts a row-major matrix into panels.
    pub fn new(values: &[f32], rank: usize, cols: usize) -> Self {
        let mut panels = vec![0.0; cols.div_ceil(WIDTH) * WIDTH * rank];
        for (panel, first) in panels.chunks_exact_mut((WIDTH * rank).max(1)).zip((0..cols).step_by(WIDTH)) {
            let width = WIDTH.min(cols - first);
            for (to, row) in panel.chunks_exact_mut(WIDTH).zip(values.chunks_exact(cols)) {
                to[..width].copy_from_slice(&row[first..first + width]);
            }
        }
        Self { values: panels, rank, cols }
    }
}

/// A delta with factors in f32. The first factor includes the scale.
pub enum ScaledDelta {
    /// `up down`.
    Lora {
        /// `[out, rank]`, row by row.
        up: Vec<f32>,
        /// `[rank, in]`.
        down: Panels,
    },
    /// Each element of `w1` times all of `w2`.
    Kronecker {
        /// The first factor, with `j` columns.
        w1: Vec<f32>,
        /// The second factor, `[p, q]`.
        w2: Vec<f32>,
        /// Columns of `w1`.
        j: usize,
        /// Rows of `w2`.
        p: usize,
        /// Columns of `w2`.
        q: usize,
    },
}

impl ScaledDelta {
    /// Adds the rows from `first` on to the rows of `to`, on the calling thread.
    pub fn add_rows(&self, first: usize, to: &mut [f32]) {
        Arch::new().dispatch(AddRows { delta: self, first, to });
    }

    #[inline(always)]
    fn add<S: Simd>(&self, simd: S, first: usize, to: &mut [f32]) {
        match self {
            Self::Lora { up, down } => add_lora(simd, &up[first * down.rank..], down, to),
            Self::Kronecker { w1, w2, j, p, q } => {
                for (row, to) in (first..).zip(to.chunks_exact_mut((j * q).max(1))) {
                    let (w1, w2) = (&w1[row / p * j..][..*j], &w2[row % p * q..][..*q]);
                    for (to, factor) in to.chunks_exact_mut(*q).zip(w1) {
                        to.iter_mut().zip(w2).for_each(|(to, w2)| *to += factor * w2);
                    }
                }
            }
        }
    }
}

struct AddRows<'a> {
    delta: &'a ScaledDelta,
    first: usize,
    to: &'a mut [f32],
}

impl WithSimd for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.delta.add(simd, self.first, self.to);
    }
}

/// Adds rows of the product to rows of `to`. `up` starts at the first of these rows.
#[inline(always)]
fn add_lora<S: Simd>(simd: S, up: &[f32], down: &Panels, to: &mut [f32]) {
    let &Panels { ref values, rank, cols } = down;
    if rank == 0 || cols == 0 {
        return;
    }
    let mut factors = vec![[0.0; BLOCK]; rank];
    for (to, up) in to.chunks_mut(BLOCK * cols).zip(up.chunks(BLOCK * rank)) {
        // The last block may have fewer rows. The factors of missing rows are zero.
        factors.fill([0.0; BLOCK]);
        for (row, up) in up.chunks_exact(rank).enumerate() {
            factors.iter_mut().zip(up).for_each(|(factors, up)| factors[row] = *up);
        }
        for (panel, first) in values.chunks_exact(WIDTH * rank).zip((0..cols).step_by(WIDTH)) {
            for from in (0..WIDTH).step_by(2 * S::F32_LANES) {
                let sums = panel_sums(simd, &factors, panel, from);
                let columns = first + from..first + from + 2 * S::F32_LANES;
                for (to, sums) in to.chunks_exact_mut(cols).zip(&sums) {
                    if columns.end <= cols {
                        let (to, _) = S::as_mut_simd_f32s(&mut to[columns.clone()]);
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = simd.add_f32s(*to, *sum));
                        continue;
                    }
                    let mut padded = [0.0; WIDTH];
                    S::as_mut_simd_f32s(&mut padded[..columns.len()]).0.copy_from_slice(sums);
                    to[columns.start.min(cols)..].iter_mut().zip(padded).for_each(|(to, sum)| *to += sum);
                }
            }
        }
    }
}

/// The products of rows with two vectors of a panel's columns.
#[inline(always)]
fn panel_sums<S: Simd>(simd: S, factors: &[[f32; BLOCK]], panel: &[f32], from: usize) -> [[S::f32s; 2]; BLOCK] {
    let mut sums = [[simd.splat_f32s(0.0); 2]; BLOCK];
    for (panel, factors) in panel.as_chunks::<WIDTH>().0.iter().zip(factors) {
        let &[left, right] = S::as_simd_f32s(&panel[from..from + 2 * S::F32_LANES]).0 else { continue };
        for (sums, factor) in sums.iter_mut().zip(factors) {
            let factor = simd.splat_f32s(*factor);
            *sums = [simd.mul_add_f32s(factor, left, sums[0]), simd.mul_add_f32s(factor, right, sums[1])];
        }
    }
    sums
}

/// A block of weight rows to merge.
pub struct Block<'a> {
    /// The parts of the weight, each with its first row.
    pub parts: &'a [(usize, &'a WeightSlice)],
    /// The deltas to add, each with the weight rows that it applies to.
    pub deltas: &'a [(ScaledDelta, &'a [Range<usize>])],
    /// The rows of the block.
    pub rows: Range<usize>,
    /// The columns of the weight.
    pub cols: usize,
    /// Scratch memory for the values.
    pub values: &'a mut Vec<f32>,
    /// The type of the result.
    pub to: DType,
    /// The result.
    pub out: &'a mut [u8],
}

impl Block<'_> {
    /// Merges the block, on the calling thread.
    pub fn merge(self) {
        Arch::new().dispatch(self);
    }
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { parts, deltas, rows, cols, values, to, out } = self;
        values.resize(rows.len() * cols, 0.0);
        for &(first, part) in parts {
            let own = rows.start.max(first)..rows.end.min(first + part.rows);
            if own.is_empty() {
                continue;
            }
            let values = &mut values[(own.start - rows.start) * cols..(own.end - rows.start) * cols];
            match (part.dtype, &part.scaling) {
                (DType::Bf16, SliceScaling::Unscaled) => {
                    decode_bf16(&part.bytes[2 * (own.start - first) * cols..2 * (own.end - first) * cols], values);
                }
                _ => own.zip(values.chunks_exact_mut(cols)).for_each(|(row, values)| part.decode(row - first, values)),
            }
        }
        for (delta, ranges) in deltas {
            let mut of_delta = 0;
            for range in *ranges {
                let common = rows.start.max(range.start)..rows.end.min(range.end);
                if !common.is_empty() {
                    let values = &mut values[(common.start - rows.start) * cols..(common.end - rows.start) * cols];
                    delta.add(simd, of_delta + common.start - range.start, values);
                }
                of_delta += range.len();
            }
        }
        match to {
            DType::Bf16 => encode_bf16(values, out),
            other => other.encode(values, out),
        }
    }
}
