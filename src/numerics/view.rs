//! Typed views of raw memory, and the one call into the `gemm` crate. All unsafe code of the arithmetic is here, behind functions
//! that check their bounds.
#![allow(unsafe_code)]

use crate::tensor::{DType, Scaling, Tensor, nvfp4};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Elements that are scaled at a time before they are encoded.
const CHUNK: usize = 512;

/// Counts elements beyond the range of a type that activations may exceed. Without a branch, the loop is vectorized.
fn count_saturated(dtype: DType, elements: &[f32]) -> u64 {
    dtype.format().saturates_at.map_or(0, |limit| elements.iter().map(|v| u64::from(v.abs() >= limit)).sum())
}

/// The scales of a matrix in memory.
#[derive(Clone, Copy)]
enum ViewScaling {
    Unscaled,
    Tensor(f32),
    /// One f32 per row, at any address.
    Rows(*const u8),
    /// The tiled block scales of NVFP4, with the number of tiles along a row.
    Blocks16 {
        scales: *mut u8,
        tiles_along: usize,
        tensor: f32,
    },
}

impl ViewScaling {
    /// Creates the scales of a tensor. `address` is their address, if they are in memory.
    fn new(tensor: Tensor, address: *mut u8) -> Self {
        match tensor.scaling {
            Scaling::Unscaled => Self::Unscaled,
            Scaling::Tensor(scale) => Self::Tensor(scale.get()),
            Scaling::Rows(_) => Self::Rows(address),
            Scaling::Blocks16 { tensor: factor, .. } => {
                Self::Blocks16 { scales: address, tiles_along: nvfp4::tiles_along(tensor.stride), tensor: factor.get() }
            }
        }
    }

    /// Decodes elements of one row, from column `first` on.
    ///
    /// # Safety
    /// The scales of the row and the columns must be valid, and nothing may write to them.
    unsafe fn decode(self, dtype: DType, bytes: &[u8], (row, first): (usize, usize), to: &mut [f32]) {
        match self {
            Self::Unscaled => dtype.decode(bytes, to),
            Self::Tensor(scale) => {
                dtype.decode(bytes, to);
                to.iter_mut().for_each(|v| *v *= scale);
            }
            Self::Rows(scales) => {
                dtype.decode(bytes, to);
                // SAFETY: the caller's guarantee.
                let scale = f32::from_le_bytes(unsafe { scales.add(4 * row).cast::<[u8; 4]>().read() });
                to.iter_mut().for_each(|v| *v *= scale);
            }
            Self::Blocks16 { scales, tiles_along, tensor } => {
                assert!(first.is_multiple_of(nvfp4::BLOCK), "column {first} is inside a block");
                let blocks = to.chunks_mut(nvfp4::BLOCK).zip(bytes.chunks(nvfp4::BLOCK / 2));
                for (block, (to, codes)) in blocks.enumerate() {
                    let at = nvfp4::scale_offset(row, first / nvfp4::BLOCK + block, tiles_along);
                    // SAFETY: the caller's guarantee.
                    let scale = unsafe { scales.add(at).read() };
                    nvfp4::decode_block(codes, nvfp4::unit(tensor, scale), to);
                }
            }
        }
    }

    /// Rounds values to elements of one row, from column `first` on. Also computes and writes block scales. Returns how many
    /// values did not fit.
    ///
    /// # Safety
    /// The scales of the row and the columns must be valid, and this must be the only access to them.
    unsafe fn encode(self, dtype: DType, values: &[f32], (row, first): (usize, usize), bytes: &mut [u8]) -> u64 {
        match self {
            Self::Unscaled => {
                dtype.encode(values, bytes);
                count_saturated(dtype, values)
            }
            Self::Tensor(scale) => {
                let (mut scaled, mut saturated) = ([0.0; CHUNK], 0);
                for (values, bytes) in values.chunks(scaled.len()).zip(bytes.chunks_mut(dtype.bytes(scaled.len()))) {
                    let scaled = &mut scaled[..values.len()];
                    scaled.iter_mut().zip(values).for_each(|(s, v)| *s = v / scale);
                    dtype.encode(scaled, bytes);
                    saturated += count_saturated(dtype, scaled);
                }
                saturated
            }
            Self::Rows(_) => unreachable!("only weights have row scales, and they are not written"),
            Self::Blocks16 { scales, tiles_along, tensor } => {
                let whole = first.is_multiple_of(nvfp4::BLOCK) && values.len().is_multiple_of(nvfp4::BLOCK);
                assert!(whole, "columns {first}..+{} are not whole blocks", values.len());
                let blocks = values.chunks(nvfp4::BLOCK).zip(bytes.chunks_mut(nvfp4::BLOCK / 2));
                for (block, (values, codes)) in blocks.enumerate() {
                    let at = nvfp4::scale_offset(row, first / nvfp4::BLOCK + block, tiles_along);
                    let scale = nvfp4::encode_block(values, tensor, codes);
                    // SAFETY: the caller's guarantee.
                    unsafe { scales.add(at).write(scale) };
                }
                0
            }
        }
    }
}

/// What the threads of an op share with its caller.
#[derive(Debug, Default)]
pub struct Watch {
    /// Counts the values that do not fit into the FP8 tensor they are stored in.
    pub saturated: AtomicU64,
    /// Flags that end an op early. Its outputs are then unspecified.
    pub stop: Vec<Arc<AtomicBool>>,
}

impl Watch {
    /// Whether the op is to end. Loops check this between pieces of work that take at most a few tens of milliseconds.
    pub fn is_stopped(&self) -> bool {
        self.stop.iter().any(|flag| flag.load(Ordering::Relaxed))
    }
}

/// A matrix to read from. Its rows may lie in several spans of memory with different formats: a checkpoint may store a weight in
/// several parts.
#[derive(Clone)]
pub struct In<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Elements in a row.
    pub cols: usize,
    spans: Vec<Span>,
    lifetime: PhantomData<&'a [u8]>,
}

/// Consecutive rows that lie in one piece of memory.
#[derive(Clone)]
struct Span {
    /// The first row of the span.
    first: usize,
    ptr: *const u8,
    /// Bytes from row to row.
    pitch: usize,
    dtype: DType,
    scaling: ViewScaling,
}

// SAFETY: an `In` only reads, and nothing writes to the memory it covers while it lives (the contract of `In::new`).
unsafe impl Send for In<'_> {}
// SAFETY: as above.
unsafe impl Sync for In<'_> {}

impl<'a> In<'a> {
    /// A view of a tensor whose rows lie in `spans`, each given by its first row and its address. `scales` is the address of the
    /// tensor's scales, if they are in memory. Then there is only one span.
    ///
    /// # Safety
    /// Every row of `tensor` must lie inside one of `spans`, aligned to its type. Rows and scales must be valid and unwritten for
    /// `'a`.
    pub unsafe fn new(tensor: Tensor, spans: &[(usize, *const u8)], scales: *const u8) -> Self {
        let (pitch, dtype) = (tensor.dtype.bytes(tensor.stride), tensor.dtype);
        let scaling = ViewScaling::new(tensor, scales.cast_mut());
        let spans = spans.iter().map(|&(first, ptr)| Span { first, ptr, pitch, dtype, scaling }).collect();
        Self { rows: tensor.rows, cols: tensor.cols, spans, lifetime: PhantomData }
    }

    /// A view of a tensor without elements.
    pub fn empty(tensor: Tensor) -> Self {
        debug_assert!(tensor.is_empty());
        Self { rows: tensor.rows, cols: tensor.cols, spans: Vec::new(), lifetime: PhantomData }
    }

    /// Stacks the rows of several matrices.
    pub fn stack(parts: Vec<Self>) -> Self {
        let mut stacked =
            Self { rows: 0, cols: parts.first().map_or(0, |part| part.cols), spans: Vec::new(), lifetime: PhantomData };
        for part in parts {
            assert_eq!(part.cols, stacked.cols, "matrices of one width");
            stacked.spans.extend(part.spans.into_iter().map(|span| Span { first: stacked.rows + span.first, ..span }));
            stacked.rows += part.rows;
        }
        stacked
    }

    /// The span of a row, and the address of part of that row.
    fn row(&self, r: usize, first: usize, len: usize) -> (&Span, *const u8) {
        assert!(r < self.rows && first + len <= self.cols, "row {r}, columns {first}..+{len} of {}x{}", self.rows, self.cols);
        let span = &self.spans[self.spans.partition_point(|span| span.first <= r) - 1];
        // SAFETY: the row lies inside the span and the columns inside the row.
        (span, unsafe { span.ptr.add((r - span.first) * span.pitch + span.dtype.bytes(first)) })
    }

    /// Decodes part of a row.
    pub fn load(&self, r: usize, first: usize, to: &mut [f32]) {
        if !to.is_empty() {
            let (span, from) = self.row(r, first, to.len());
            // SAFETY: `row` has checked that `to.len()` elements follow, and nothing writes to them or their scales.
            unsafe {
                let bytes = std::slice::from_raw_parts(from, span.dtype.bytes(to.len()));
                span.scaling.decode(span.dtype, bytes, (r - span.first, first), to);
            }
        }
    }

    /// Copies the bytes of part of a row.
    pub fn bytes(&self, r: usize, first: usize, to: &mut [u8]) {
        if !to.is_empty() {
            let (span, from) = self.row(r, first, to.len());
            assert_eq!(span.dtype, DType::U8);
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

    /// A part of the matrix as a GEMM operand, if it is f32 and lies in one span.
    pub fn strided(&self, rows: Range<usize>, cols: Range<usize>) -> Option<Strided<'_>> {
        let [Span { dtype: DType::F32, scaling: ViewScaling::Unscaled, pitch, .. }] = &self.spans[..] else { return None };
        if rows.is_empty() || cols.is_empty() {
            return None;
        }
        self.row(rows.end - 1, cols.start, cols.len());
        let ptr = self.row(rows.start, cols.start, cols.len()).1.cast();
        Some(Strided { ptr, rows: rows.len(), cols: cols.len(), row: (pitch / 4) as isize, col: 1, lifetime: PhantomData })
    }
}

/// A matrix to write to. It can be split into disjoint parts, so that threads can share one output.
pub struct Out<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Elements in a row.
    pub cols: usize,
    /// The row and column of the tensor at which this view begins.
    origin: (usize, usize),
    dtype: DType,
    pitch: usize,
    /// The tensor's first element.
    ptr: *mut u8,
    scaling: ViewScaling,
    watch: &'a Watch,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: an `Out` is the only view of the memory it covers (the contract of `Out::new`), so it may move to another thread.
unsafe impl Send for Out<'_> {}

impl<'a> Out<'a> {
    /// # Safety
    /// `ptr` must point at the tensor's first element, aligned, and `scales` at its scales, if it has any in memory; the tensor
    /// must be valid and no other view used for `'a`.
    pub unsafe fn new(tensor: Tensor, ptr: *mut u8, scales: *mut u8, watch: &'a Watch) -> Self {
        let Tensor { rows, cols, dtype, stride, .. } = tensor;
        let (pitch, scaling) = (dtype.bytes(stride), ViewScaling::new(tensor, scales));
        Self { rows, cols, origin: (0, 0), dtype, pitch, ptr, scaling, watch, lifetime: PhantomData }
    }

    /// What the threads of the op share.
    pub fn watch(&self) -> &'a Watch {
        self.watch
    }

    /// The position of part of a row in the tensor, and its address.
    fn at(&self, r: usize, first: usize, len: usize) -> ((usize, usize), *mut u8) {
        assert!(r < self.rows && first + len <= self.cols, "row {r}, columns {first}..+{len} of {}x{}", self.rows, self.cols);
        let place = (self.origin.0 + r, self.origin.1 + first);
        // SAFETY: the row lies inside the tensor and the column inside the row.
        (place, unsafe { self.ptr.add(place.0 * self.pitch + self.dtype.bytes(place.1)) })
    }

    /// Rounds values to the stored format and writes them.
    pub fn store(&mut self, r: usize, first: usize, from: &[f32]) {
        if !from.is_empty() {
            let (place, to) = self.at(r, first, from.len());
            // SAFETY: `at` has checked that `from.len()` elements follow, and `&mut self` is the only view of them and their
            // scales.
            let saturated = unsafe {
                let bytes = std::slice::from_raw_parts_mut(to, self.dtype.bytes(from.len()));
                self.scaling.encode(self.dtype, from, place, bytes)
            };
            // Threads share the counter, so it is only touched if there is something to count.
            if saturated > 0 {
                self.watch.saturated.fetch_add(saturated, Ordering::Relaxed);
            }
        }
    }

    /// Decodes part of a row, for outputs that are updated.
    pub fn load(&self, r: usize, first: usize, to: &mut [f32]) {
        if !to.is_empty() {
            let (place, from) = self.at(r, first, to.len());
            // SAFETY: `at` has checked that `to.len()` elements follow, and this is the only view of them and their scales.
            unsafe {
                let bytes = std::slice::from_raw_parts(from, self.dtype.bytes(to.len()));
                self.scaling.decode(self.dtype, bytes, place, to);
            }
        }
    }

    /// Borrows a sub-matrix.
    pub fn part(&mut self, rows: Range<usize>, cols: Range<usize>) -> Out<'_> {
        assert!(rows.start <= rows.end && cols.start <= cols.end && rows.end <= self.rows && cols.end <= self.cols);
        let origin = (self.origin.0 + rows.start, self.origin.1 + cols.start);
        Out { rows: rows.len(), cols: cols.len(), origin, lifetime: PhantomData, ..*self }
    }

    /// Splits the matrix into parts of `step` rows (the last may have fewer), each with its first row.
    pub fn split_rows(self, step: usize) -> Vec<(usize, Out<'a>)> {
        let split = |first: usize| {
            let (origin, rows) = ((self.origin.0 + first, self.origin.1), step.min(self.rows - first));
            // The parts are disjoint rows of a view that is consumed here.
            (first, Out { origin, rows, ..self })
        };
        (0..self.rows).step_by(step).map(split).collect()
    }

    /// Splits the matrix into parts of `step` columns (the last may have fewer), each with its first column.
    pub fn split_cols(self, step: usize) -> Vec<(usize, Out<'a>)> {
        let split = |first: usize| {
            let (origin, cols) = ((self.origin.0, self.origin.1 + first), step.min(self.cols - first));
            // The parts are disjoint columns of a view that is consumed here.
            (first, Out { origin, cols, ..self })
        };
        (0..self.cols).step_by(step).map(split).collect()
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
    // The microkernels write columns, so they compute the transposed product, whose columns are the rows of `out`. A single
    // column needs no transposition.
    let ((m, n), (lhs, rhs), (column, row)) = match n {
        0 | 1 => ((m, n), (a, b), (1, n as isize)),
        _ => ((n, m), (b.transposed(), a.transposed()), (n as isize, 1)),
    };
    let multiply = gemm_f32::gemm::f32::get_gemm_fn();
    let (none, out) = (gemm_common::Parallelism::None, out.as_mut_ptr());
    // SAFETY: the operands' constructors and the assertion above have checked every address that the GEMM accesses; `out` is
    // borrowed mutably, so it overlaps neither operand.
    unsafe {
        multiply(
            m, n, k, out, column, row, accumulate, lhs.ptr, lhs.col, lhs.row, rhs.ptr, rhs.col, rhs.row, alpha, beta, false,
            false, false, none,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{Filters, Geometry, GroupParams, conv, group_norm, norm_conv};
    use crate::kernels::{Layer, LogitParams, attention, copy, linear};
    use crate::tensor::Region;
    use crate::{Sampling, image};

    fn tensor(rows: usize, cols: usize) -> Tensor {
        let (region, dtype, scaling) = (Region::Arena, DType::F32, Scaling::Unscaled);
        Tensor { region, dtype, offset: 0, rows, cols, stride: cols, scaling }
    }

    fn input(values: &[f32], rows: usize, cols: usize) -> In<'_> {
        assert!(values.len() >= rows * cols);
        // SAFETY: the rows lie inside the slice, which is borrowed for the life of the view.
        unsafe { In::new(tensor(rows, cols), &[(0, values.as_ptr().cast())], std::ptr::null()) }
    }

    /// A long op must not keep a user waiting who wants to end it: no loop computes anything once the flag is set.
    #[test]
    fn no_loop_goes_on_once_it_is_stopped() {
        const N: usize = 16;
        let flag = Arc::new(AtomicBool::new(false));
        let watch = Watch { stop: vec![Arc::default(), flag.clone()], ..Watch::default() };
        let ones = vec![1.0; 64 * N * N];
        let matrix = |rows: usize, cols: usize| input(&ones, rows, cols);
        let layer = || Layer { weight: matrix(N, N), bias: None, lora: None };
        let norm = || GroupParams { weight: matrix(1, N), bias: matrix(1, N), groups: 2, eps: 1e-5 };
        let filters = |sampling: Sampling| {
            let geometry = Geometry { width: 8, height: N / 8, sampling };
            Filters::new(&matrix(N, sampling.phases() * sampling.taps() * N), &matrix(1, N), geometry)
        };
        let keys = || [(matrix(N, N), matrix(N, N))];
        type Loop<'a> = (&'a str, usize, &'a dyn Fn(Out<'_>));
        let loops: [Loop<'_>; 7] = [
            ("copy", N, &|out| copy(out, matrix(N, N))),
            ("linear", N, &|out| linear(out, matrix(N, N), layer())),
            ("attention", N, &|out| attention(out, matrix(N, N), &keys(), N, LogitParams { causal: false, scale: 1.0 })),
            ("conv", N, &|out| conv(out, matrix(N, N), &filters(Sampling::Same), None, None)),
            ("up-conv", 4 * N, &|out| conv(out, matrix(N, N), &filters(Sampling::Up), None, None)),
            ("group norm", N, &|out| group_norm(out, matrix(N, N), &norm(), None, false)),
            ("norm and conv", N, &|out| norm_conv(out, matrix(N, N), &norm(), None, &filters(Sampling::Same))),
        ];
        for (name, rows, run) in loops {
            for stopped in [true, false] {
                flag.store(stopped, Ordering::Relaxed);
                let mut values = vec![f32::MAX; rows * N];
                // SAFETY: the rows lie inside the vector, and this is the only view of it.
                run(unsafe { Out::new(tensor(rows, N), values.as_mut_ptr().cast(), std::ptr::null_mut(), &watch) });
                assert!(values.iter().all(|value| (*value == f32::MAX) == stopped), "{name}, stopped: {stopped}");
            }
        }
        flag.store(true, Ordering::Relaxed);
        let mut stats = [f32::MAX; 4];
        // SAFETY: the rows lie inside the array, and this is the only view of it.
        let out = unsafe { Out::new(tensor(2, 2), stats.as_mut_ptr().cast(), std::ptr::null_mut(), &watch) };
        image::group_stats_into(out, matrix(N, N));
        assert_eq!(stats, [0.0; 4], "sums of no row");
    }

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
