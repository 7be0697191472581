//! Typed views of raw memory, and the one call into the `gemm` crate. All unsafe code of the arithmetic is here, behind functions
//! that check their bounds.
#![allow(unsafe_code)]

use crate::tensor::{DType, Tensor};
use std::marker::PhantomData;
use std::ops::Range;

/// A matrix to read from. Its rows may lie in several spans of memory: a checkpoint may store a weight in several parts.
#[derive(Clone)]
pub struct In<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Elements in a row.
    pub cols: usize,
    dtype: DType,
    pitch: usize,
    /// First row of each span and its address.
    spans: Vec<(usize, *const u8)>,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: an `In` only reads, and nothing writes to the memory it covers while it lives (the contract of `In::new`).
unsafe impl Send for In<'_> {}
// SAFETY: as above.
unsafe impl Sync for In<'_> {}

impl<'a> In<'a> {
    /// # Safety
    /// Every row of `tensor` must lie inside one of `spans`, aligned to its type, valid and unwritten for `'a`.
    pub unsafe fn new(tensor: Tensor, spans: Vec<(usize, *const u8)>) -> Self {
        let pitch = tensor.stride * tensor.dtype.size();
        Self { rows: tensor.rows, cols: tensor.cols, dtype: tensor.dtype, pitch, spans, lifetime: PhantomData }
    }

    /// A view of a tensor without elements.
    pub fn empty(tensor: Tensor) -> Self {
        let Tensor { rows, cols, dtype, .. } = tensor;
        debug_assert!(tensor.is_empty());
        Self { rows, cols, dtype, pitch: 0, spans: Vec::new(), lifetime: PhantomData }
    }

    fn row(&self, r: usize, first: usize, len: usize) -> *const u8 {
        assert!(r < self.rows && first + len <= self.cols, "row {r}, columns {first}..+{len} of {}x{}", self.rows, self.cols);
        let span = self.spans.partition_point(|&(start, _)| start <= r) - 1;
        let (start, ptr) = self.spans[span];
        // SAFETY: the row lies inside the span and the columns inside the row.
        unsafe { ptr.add((r - start) * self.pitch + first * self.dtype.size()) }
    }

    /// Decodes part of a row.
    pub fn load(&self, r: usize, first: usize, to: &mut [f32]) {
        if !to.is_empty() {
            let from = self.row(r, first, to.len());
            // SAFETY: `row` has checked that `to.len()` elements follow, and nothing writes to them.
            self.dtype.decode(unsafe { std::slice::from_raw_parts(from, to.len() * self.dtype.size()) }, to);
        }
    }

    /// Copies the bytes of part of a row.
    pub fn bytes(&self, r: usize, first: usize, to: &mut [u8]) {
        assert_eq!(self.dtype, DType::U8);
        if !to.is_empty() {
            let from = self.row(r, first, to.len());
            // SAFETY: `row` has checked that `to.len()` bytes follow.
            to.copy_from_slice(unsafe { std::slice::from_raw_parts(from, to.len()) });
        }
    }

    /// One decoded row.
    pub fn row_vec(&self, r: usize) -> Vec<f32> {
        let mut v = vec![0.0; self.cols];
        self.load(r, 0, &mut v);
        v
    }

    /// A token id.
    pub fn id(&self, r: usize) -> u32 {
        assert_eq!(self.dtype, DType::U32);
        let ptr = self.row(r, 0, 1);
        // SAFETY: `row` has checked the bounds, and the type is u32.
        unsafe { ptr.cast::<u32>().read() }
    }

    /// A part of the matrix as a GEMM operand, if it is f32 and lies in one span.
    pub fn strided(&self, rows: Range<usize>, cols: Range<usize>) -> Option<Strided<'_>> {
        if self.dtype != DType::F32 || self.spans.len() != 1 || rows.is_empty() || cols.is_empty() {
            return None;
        }
        self.row(rows.end - 1, cols.start, cols.len());
        let ptr = self.row(rows.start, cols.start, cols.len()).cast();
        let pitch = (self.pitch / 4) as isize;
        Some(Strided { ptr, rows: rows.len(), cols: cols.len(), row: pitch, col: 1, lifetime: PhantomData })
    }
}

/// A matrix to write to. It can be split into disjoint parts, so that threads can share one output.
pub struct Out<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Elements in a row.
    pub cols: usize,
    dtype: DType,
    pitch: usize,
    ptr: *mut u8,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: an `Out` is the only view of the memory it covers (the contract of `Out::new`), so it may move to another thread.
unsafe impl Send for Out<'_> {}

impl<'a> Out<'a> {
    /// # Safety
    /// `ptr` must point at the tensor's first element, aligned; the tensor must be valid and no other view used for `'a`.
    pub unsafe fn new(tensor: Tensor, ptr: *mut u8) -> Self {
        let Tensor { rows, cols, dtype, stride, .. } = tensor;
        Self { rows, cols, dtype, pitch: stride * dtype.size(), ptr, lifetime: PhantomData }
    }

    fn at(&self, r: usize, first: usize, len: usize) -> *mut u8 {
        assert!(r < self.rows && first + len <= self.cols, "row {r}, columns {first}..+{len} of {}x{}", self.rows, self.cols);
        // SAFETY: the row lies inside the tensor and the column inside the row.
        unsafe { self.ptr.add(r * self.pitch + first * self.dtype.size()) }
    }

    /// Rounds values to the stored type and writes them.
    pub fn store(&mut self, r: usize, first: usize, from: &[f32]) {
        if !from.is_empty() {
            let to = self.at(r, first, from.len());
            // SAFETY: `at` has checked that `from.len()` elements follow, and `&mut self` is the only view of them.
            self.dtype.encode(from, unsafe { std::slice::from_raw_parts_mut(to, from.len() * self.dtype.size()) });
        }
    }

    /// Writes a token id.
    pub fn store_id(&mut self, r: usize, id: u32) {
        assert_eq!(self.dtype, DType::U32);
        let ptr = self.at(r, 0, 1);
        // SAFETY: as in `store`.
        unsafe { ptr.cast::<u32>().write(id) }
    }

    /// Decodes part of a row, for outputs that are updated.
    pub fn load(&self, r: usize, first: usize, to: &mut [f32]) {
        if !to.is_empty() {
            let from = self.at(r, first, to.len());
            // SAFETY: `at` has checked that `to.len()` elements follow, and this is the only view of them.
            self.dtype.decode(unsafe { std::slice::from_raw_parts(from, to.len() * self.dtype.size()) }, to);
        }
    }

    /// Borrows a sub-matrix.
    pub fn part(&mut self, rows: Range<usize>, cols: Range<usize>) -> Out<'_> {
        let ptr = if rows.is_empty() || cols.is_empty() { self.ptr } else { self.at(rows.start, cols.start, cols.len()) };
        assert!(rows.end <= self.rows && cols.end <= self.cols);
        Out { rows: rows.len(), cols: cols.len(), ptr, lifetime: PhantomData, ..*self }
    }

    /// Splits the matrix into parts of `step` rows (the last may have fewer), each with its first row.
    pub fn split_rows(self, step: usize) -> Vec<(usize, Out<'a>)> {
        let Self { rows, cols, dtype, pitch, ptr, .. } = self;
        (0..rows)
            .step_by(step)
            .map(|first| {
                // SAFETY: the parts are disjoint rows of a view that is consumed here.
                let ptr = unsafe { ptr.add(first * pitch) };
                (first, Out { rows: step.min(rows - first), cols, dtype, pitch, ptr, lifetime: PhantomData })
            })
            .collect()
    }

    /// Splits the matrix into parts of `step` columns (the last may have fewer), each with its first column.
    pub fn split_cols(self, step: usize) -> Vec<(usize, Out<'a>)> {
        let Self { rows, cols, dtype, pitch, ptr, .. } = self;
        (0..cols)
            .step_by(step)
            .map(|first| {
                // SAFETY: the parts are disjoint columns of a view that is consumed here.
                let ptr = unsafe { ptr.add(first * dtype.size()) };
                (first, Out { rows, cols: step.min(cols - first), dtype, pitch, ptr, lifetime: PhantomData })
            })
            .collect()
    }
}

/// An f32 operand of a GEMM.
#[derive(Clone, Copy)]
pub struct Strided<'a> {
    ptr: *const f32,
    rows: usize,
    cols: usize,
    row: isize,
    col: isize,
    lifetime: PhantomData<&'a [f32]>,
}

// SAFETY: a `Strided` only reads memory that is borrowed for its lifetime.
unsafe impl Sync for Strided<'_> {}
// SAFETY: as above.
unsafe impl Send for Strided<'_> {}

impl<'a> Strided<'a> {
    /// A contiguous row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert!(rows * cols <= data.len());
        Self { ptr: data.as_ptr(), rows, cols, row: cols as isize, col: 1, lifetime: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The transposed matrix.
    pub fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row: self.col, col: self.row, ..self }
    }
}

/// `out = a b`, or `out += a b`; `out` is row-major and contiguous. Runs on the calling thread only: callers split the work.
pub fn matmul(out: &mut [f32], a: Strided<'_>, b: Strided<'_>, accumulate: bool) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert!(b.rows == k && out.len() >= m * n, "{m}x{k} by {}x{n} into {}", b.rows, out.len());
    let (alpha, beta) = (1.0, 1.0); // out = alpha * out (if accumulating) + beta * a b
    // SAFETY: the operands' constructors and the assertion above have checked every address that the GEMM accesses; `out` is
    // borrowed mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a.ptr,
            a.col,
            a.row,
            b.ptr,
            b.col,
            b.row,
            alpha,
            beta,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matmul_takes_transposed_operands_and_accumulates() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, -1.0, 1.0, 1.0]);
        let mut out = [0.0; 4];
        matmul(&mut out, Strided::new(&a, 2, 3), Strided::new(&b, 2, 3).transposed(), false);
        assert_eq!(out, [7.0, 4.0, 16.0, 7.0]);
        matmul(&mut out, Strided::new(&a, 2, 3), Strided::new(&b, 3, 2), true);
        assert_eq!(out, [15.0, 5.0, 36.0, 8.0]);
    }
}
