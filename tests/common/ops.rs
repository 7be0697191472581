//! Every op of a backend against a naive f64 loop: [`cases`] is the table, [`oracle`] has the loops, and this file has the rig
//! that places operands, runs a case and checks its results. It works on any `&mut dyn Backend`.
//!
//! A result has to satisfy these conditions:
//! - Its relative L2 error against the f64 oracle, on the inputs as stored, is at most twice the error of naive arithmetic at the same
//!   precision, plus a floor. For f32, naive arithmetic is the same loop in f32; for bf16, the oracle rounded once. For quantized results
//!   it is the oracle rounded once by the format's own rule. Each of their codes equals the exact result's code, unless that result is so
//!   close to a tie that f32 arithmetic may take the other side.
//! - The backend's count of values beyond the range of e4m3 is right.
//! - Every element was written (results start as NaN), and nothing else in the arena changed. Padding columns of strided buffers, gaps and
//!   inputs are read back to check. Padding of inputs is NaN, so reading it shows.

mod attention;
pub mod cases;
mod convolutions;
pub mod formats;
mod fp8_gemms;
pub mod fp8_sums;
mod gemms;
mod judge;
mod lora_gemms;
pub mod mistakes;
mod nvfp4_gemms;
pub mod oracle;
pub mod outputs;
pub mod quantized;
pub mod tiles;

use crate::random::one_in;
use formats::{BLOCK, Filed, NAN, Quantized};
use half::{bf16, f16};
pub use judge::Expected;
use judge::{judge, judge_codes, judge_saturated};
use kiln::internals::backend::Weight;
use kiln::internals::backend::{Backend, Op, Role};
use kiln::internals::tensor::{Arena, DType, Region, Scaling, Stored, Tensor, WeightSlice, nvfp4};
use oracle::Real;
use std::collections::HashSet;

/// The value of padding columns of results; exact in every dtype.
const PADDING: f32 = 1280.0;
/// Padding columns to the left and right of a strided operand.
const LEFT: usize = 3;
const RIGHT: usize = 2;

/// A matrix on the host, with values that its stored format can represent.
#[derive(Clone, Debug)]
pub struct Mat {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f32>,
    /// The LoRA branch of a weight: matrices `[rank, cols]` and `[rows, rank]`, whose product is added to the weight.
    pub lora: Option<Box<(Mat, Mat)>>,
}

impl Mat {
    fn new(rows: usize, cols: usize, data: Vec<f32>) -> Self {
        Self { rows, cols, data, lora: None }
    }

    pub fn at<R: Real>(&self, r: usize, c: usize) -> R {
        R::of(self.data[r * self.cols + c])
    }

    pub fn row<R: Real>(&self, r: usize) -> Vec<R> {
        self.data[r * self.cols..(r + 1) * self.cols].iter().map(|&v| R::of(v)).collect()
    }
}

/// A value rounded to `dtype`.
#[inline]
pub fn stored(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::U8 => value.clamp(0.0, 255.0).round_ties_even(),
        _ => panic!("{dtype:?} is rounded with its scales"),
    }
}

/// A result, and a function that computes its expected values for a format.
pub type Check<'a> = (Tensor, Box<dyn Fn(Stored) -> Expected + 'a>);

/// How naive arithmetic adds the products of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sums {
    /// One after the other, in f32.
    F32,
    /// As tensor cores add e4m3 products.
    Fp8,
}

/// Computes expected values from an oracle function and its arguments. The first argument may choose how naive arithmetic adds products.
macro_rules! want {
    ($f:ident($($arg:expr),* $(,)?)) => {
        $crate::ops::want!($crate::ops::Sums::F32, $f($($arg),*))
    };
    ($sums:expr, $f:ident($($arg:expr),* $(,)?)) => {
        Box::new(|format: kiln::internals::tensor::Stored| {
            let exact = $crate::ops::oracle::$f::<f64>($($arg),*);
            $crate::ops::Expected::new(format, exact, || match $sums {
                $crate::ops::Sums::F32 => $crate::ops::oracle::$f::<f32>($($arg),*),
                $crate::ops::Sums::Fp8 => {
                    let values = $crate::ops::oracle::$f::<$crate::ops::fp8_sums::Fp8Sums>($($arg),*);
                    values.into_iter().map(|value| value.0 as f32).collect()
                }
            })
        })
    };
}
pub(crate) use want;

/// The layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Contiguous, in a buffer of its own.
    Whole,
    /// Strided: some columns of a wider buffer, at an odd offset and with odd padding; for NVFP4, whole scale tiles.
    Slice,
}

/// One entry of the table.
pub struct Case {
    pub name: String,
    /// Dtype of activations.
    pub storage: DType,
    pub fit: Fit,
    pub body: Box<dyn Fn(&mut Rig<'_>)>,
}

/// A tensor and its values on the host.
pub struct Operand {
    pub t: Tensor,
    pub host: Mat,
}

/// Places the operands of one case, runs its op and checks the results.
pub struct Rig<'a> {
    backend: &'a mut dyn Backend,
    weights: &'a mut Arena,
    arena: Arena,
    storage: DType,
    fit: Fit,
    seed: u32,
    /// The whole arena: each operand's buffer, and its content before the op. Buffers of quantized operands are bytes.
    buffers: Vec<(Tensor, Vec<f32>)>,
    verify: bool,
    /// The results of the op.
    results: Vec<Vec<f32>>,
    faults: Vec<String>,
}

impl Rig<'_> {
    /// Values in -1..1, different for every operand.
    fn noise(&mut self, len: usize) -> Vec<f32> {
        self.seed += 1;
        let mut state = self.seed.wrapping_mul(0x9e37_79b9);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn place(&mut self, rows: usize, cols: usize, dtype: DType, padding: f32, mut value: impl FnMut(usize) -> f32) -> Tensor {
        let (left, right) = if self.fit == Fit::Slice { (LEFT, RIGHT) } else { (0, 0) };
        let whole = self.arena.alloc(rows, left + cols + right, dtype).unwrap();
        // U8 has no NaN, so this value marks a result that was not written.
        let kept = |v: f32| if dtype == DType::U8 { stored(if v.is_nan() { 77.0 } else { v }, dtype) } else { v };
        let mut held = vec![kept(padding); whole.len()];
        for r in 0..rows {
            (0..cols).for_each(|c| held[r * whole.cols + left + c] = kept(value(r * cols + c)));
        }
        self.buffers.push((whole, held));
        whole.cols(left..left + cols)
    }

    fn operand(&mut self, rows: usize, cols: usize, dtype: DType, padding: f32, f: impl Fn(f32) -> f32) -> Operand {
        let data: Vec<f32> = self.noise(rows * cols).into_iter().map(|v| stored(f(v), dtype)).collect();
        let t = self.place(rows, cols, dtype, padding, |i| data[i]);
        Operand { t, host: Mat::new(rows, cols, data) }
    }

    /// A quantized matrix: its elements and scales, or NaN without `data`. The padding is NaN as well.
    fn place_codes(&mut self, rows: usize, cols: usize, format: Stored, data: Option<&Quantized>) -> Tensor {
        let (left, right) = match (self.fit, format.dtype) {
            (Fit::Whole, _) => (0, 0),
            (Fit::Slice, DType::E2m1) => (nvfp4::TILE_COLS, 2 * nvfp4::TILE_COLS),
            (Fit::Slice, _) => (LEFT, RIGHT),
        };
        let whole = self.arena.alloc_stored(rows, left + cols + right, format).unwrap();
        let t = whole.cols(left..left + cols);
        let first = self.buffers.len();
        self.buffers.extend(whole.as_bytes().map(|view| (view, vec![f32::from(NAN); view.len()])));
        if let Some(data) = data {
            let width = t.dtype.bytes(cols);
            let bytes = if t.dtype == DType::E2m1 { formats::pack(&data.codes, true) } else { data.codes.clone() };
            let (view, held) = &mut self.buffers[first];
            for (row, bytes) in bytes.chunks_exact(width).enumerate() {
                let at = row * view.cols + (t.offset - view.offset) as usize;
                held[at..at + width].iter_mut().zip(bytes).for_each(|(to, byte)| *to = f32::from(*byte));
            }
            for (place, &scale) in scale_bytes(t).zip(&data.scales) {
                let (view, held) = &mut self.buffers[first + 1];
                held[(place - view.offset) as usize] = f32::from(scale);
            }
        }
        t
    }

    /// Input activations in this format: `f` applied to values in -1..1.
    pub fn input_stored(&mut self, format: Stored, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        if !format.dtype.is_quantized() {
            return self.input_as(format.dtype, rows, cols, f);
        }
        let values = self.noise(rows * cols).into_iter().map(|v| f64::from(f(v)));
        let data = formats::quantize(values, format);
        let t = self.place_codes(rows, cols, format, Some(&data));
        Operand { t, host: Mat::new(rows, cols, formats::dequantize(&data, format)) }
    }

    /// A result in this format, NaN until written.
    pub fn output_stored(&mut self, format: Stored, rows: usize, cols: usize) -> Tensor {
        match format.dtype.is_quantized() {
            true => self.place_codes(rows, cols, format, None),
            false => self.output_as(format.dtype, rows, cols),
        }
    }

    /// The format of activations in this case.
    pub fn plain(&self) -> Stored {
        Stored::plain(self.storage)
    }

    /// Input activations in the dtype of the case: `f` applied to values in -1..1.
    pub fn input(&mut self, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, self.storage, f32::NAN, f)
    }

    /// Input activations in this dtype.
    pub fn input_as(&mut self, dtype: DType, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, dtype, f32::NAN, f)
    }

    /// Activations in the dtype of the case that the op updates in place.
    pub fn updated(&mut self, rows: usize, cols: usize) -> Operand {
        self.updated_as(self.storage, rows, cols)
    }

    /// Activations in this dtype that the op updates in place.
    pub fn updated_as(&mut self, dtype: DType, rows: usize, cols: usize) -> Operand {
        self.updated_with(dtype, rows, cols, |v| 2.0 * v)
    }

    /// Activations in this dtype that the op updates in place: `f` applied to values in -1..1.
    pub fn updated_with(&mut self, dtype: DType, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, dtype, PADDING, f)
    }

    /// A result in the dtype of the case, NaN until written.
    pub fn output(&mut self, rows: usize, cols: usize) -> Tensor {
        self.output_as(self.storage, rows, cols)
    }

    /// A result in this dtype, NaN until written.
    pub fn output_as(&mut self, dtype: DType, rows: usize, cols: usize) -> Tensor {
        self.place(rows, cols, dtype, PADDING, |_| f32::NAN)
    }

    /// Weight slices as a file stores them, and their values. A file may place slices at any address, so every second one is misaligned
    /// here.
    fn parts(&mut self, parts: &[(usize, Filed)], cols: usize, scale: f32) -> (Vec<WeightSlice>, Vec<f32>) {
        let mut values = Vec::new();
        let store = |(i, &(rows, format)): (usize, &(usize, Filed))| {
            let mut noise = self.noise(rows * cols);
            noise.iter_mut().for_each(|v| *v *= scale);
            if !matches!(format, Filed::Plain(_)) {
                // Slices, rows and blocks have different magnitudes, so their scales differ. The first slice is larger than the second:
                // where SiLU is almost linear, exchanging the scales of a gate and its up would hardly change their product.
                let of_part = if i % 2 == 0 { 2.0 } else { 0.25 };
                let of_row = |row: usize| [1.0, 0.375, 0.75][row % 3];
                let of_block = |block: usize| [1.0, 0.5, 0.125, 0.75, 0.0625][block * 7 / 3 % 5];
                for (row, values) in noise.chunks_mut(cols).enumerate() {
                    for (block, values) in values.chunks_mut(BLOCK).enumerate() {
                        values.iter_mut().for_each(|v| *v *= of_part * of_row(row) * of_block(block));
                    }
                }
            }
            let (part, decoded) = format.store(&noise, cols, i % 2);
            values.extend(decoded);
            part
        };
        (parts.iter().enumerate().map(store).collect(), values)
    }

    /// A weight of dtype `to` whose rows a file stores as slices in these formats.
    pub fn expanded(&mut self, role: Role, parts: &[(usize, Filed)], cols: usize, to: DType) -> Operand {
        let rows = parts.iter().map(|part| part.0).sum();
        // The scale keeps the result of a GEMM near one.
        let scale = if role == Role::Vector { 1.0 } else { 1.5 / (cols as f32).sqrt() };
        let (parts, values) = self.parts(parts, cols, scale);
        let t = self.weights.alloc(rows, cols, to).unwrap();
        self.backend.upload(t, role, &parts).unwrap();
        // Rounding to the same dtype again changes nothing.
        Operand { t, host: Mat::new(rows, cols, values.into_iter().map(|v| stored(v, to)).collect()) }
    }

    /// A weight of dtype `to` that a file stores as `from`, in slices of these numbers of rows.
    pub fn weight(&mut self, role: Role, parts: &[usize], cols: usize, from: DType, to: DType) -> Operand {
        let parts: Vec<_> = parts.iter().map(|&rows| (rows, Filed::Plain(from))).collect();
        self.expanded(role, &parts, cols, to)
    }

    /// 3x3 filters of a convolution that follows an upsampling by two. The file stores them in bf16.
    pub fn up_filters(&mut self, rows: usize, channels: usize, to: DType) -> Operand {
        // Taps are added up here, and sums are larger than taps. This factor keeps the result near one.
        let (parts, values) = self.parts(&[(rows, Filed::Plain(DType::Bf16))], 9 * channels, 0.5 / (channels as f32).sqrt());
        let t = self.weights.alloc(rows, 16 * channels, to).unwrap();
        self.backend.upload(t, Role::UpConv, &parts).unwrap();
        Operand { t, host: Mat::new(rows, 9 * channels, values) }
    }

    /// A weight whose slices keep the formats of the file.
    pub fn kept(&mut self, parts: &[(usize, Filed)], cols: usize) -> (Weight, Mat) {
        let (parts, values) = self.parts(parts, cols, 1.5 / (cols as f32).sqrt());
        let upload = |part: &WeightSlice| {
            let t = self.weights.alloc_stored(part.rows, cols, part.stored()).unwrap();
            self.backend.upload(t, Role::Linear, std::slice::from_ref(part)).unwrap();
            t
        };
        let tensors: Vec<Tensor> = parts.iter().map(upload).collect();
        let weight = Weight::stack(&tensors).unwrap();
        (weight, Mat::new(weight.rows(), cols, values))
    }

    /// A norm weight, bias or statistic.
    pub fn vector(&mut self, cols: usize) -> Operand {
        self.weight(Role::Vector, &[1], cols, DType::F32, DType::F32)
    }

    /// Runs the op and checks its results.
    pub fn run(&mut self, op: Op<'_>, checks: &[Check<'_>]) {
        // Catches writes past the end of the last operand.
        let behind = self.arena.alloc(1, 4096, DType::F32).unwrap();
        self.buffers.push((behind, vec![PADDING; behind.len()]));
        self.backend.reserve(Region::Arena, self.arena.peak()).unwrap();
        for (t, held) in &self.buffers {
            self.backend.write(*t, held).unwrap();
        }
        self.backend.take_saturated().unwrap();
        self.backend.run(op).unwrap();
        let saturated = self.backend.take_saturated().unwrap();
        let mut quantized = Vec::new();
        for (out, want) in checks {
            let out = *out;
            let mut got = vec![0.0; out.len()];
            self.backend.read(out, &mut got).unwrap();
            if self.verify {
                let want = want(out.stored());
                self.faults.extend(judge(out, &got, &want));
                if out.dtype.is_quantized() {
                    let codes = self.codes(out);
                    self.faults.extend(judge_codes(out, &got, &codes, &want));
                    quantized.push((out, want));
                }
            }
            self.results.push(got);
        }
        if self.verify {
            self.faults.extend(judge_saturated(saturated, &quantized));
            let written: Vec<Tensor> = checks.iter().map(|c| c.0).collect();
            self.check_surroundings(&written);
        }
    }

    /// The elements and the block scales of a quantized result.
    fn codes(&mut self, t: Tensor) -> Quantized {
        let mut views = t.as_bytes().map(|view| {
            let mut bytes = vec![0; view.len()];
            self.backend.read_bytes(view, &mut bytes).unwrap();
            bytes
        });
        let bytes = views.next().unwrap();
        let codes = match t.dtype {
            DType::E2m1 => bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).collect(),
            _ => bytes,
        };
        let tiles = views.next();
        // The view holds the tiles of a row without the gap between rows of tiles.
        let blocks = t.cols / BLOCK;
        let scale = |tiles: &Vec<u8>, i: usize| tiles[formats::tiled(i / blocks, i % blocks, blocks)];
        let scales = tiles.map_or_else(Vec::new, |tiles| (0..t.rows * blocks).map(|i| scale(&tiles, i)).collect());
        Quantized { codes, scales }
    }

    /// Checks that nothing but the results changed.
    fn check_surroundings(&mut self, written: &[Tensor]) {
        // In the block-scale tiles, only the scales of blocks are results. The padding is not.
        let scales: HashSet<u64> = written.iter().copied().flat_map(scale_bytes).collect();
        let elements: Vec<Tensor> = written.iter().map(|&w| Tensor { scaling: Scaling::Unscaled, ..w }).collect();
        for (whole, before) in &self.buffers {
            let mut after = vec![0.0; whole.len()];
            self.backend.read(*whole, &mut after).unwrap();
            let changed = |i: usize| before[i].to_bits() != after[i].to_bits() && !(before[i].is_nan() && after[i].is_nan());
            let element = |i: usize| whole.rows(i / whole.cols..i / whole.cols + 1).cols(i % whole.cols..i % whole.cols + 1);
            let expected = |e: Tensor| elements.iter().any(|w| w.overlaps(e)) || scales.contains(&e.offset);
            if let Some(i) = (0..after.len()).filter(|&i| changed(i)).find(|&i| !expected(element(i))) {
                let (r, c) = (i / whole.cols, i % whole.cols);
                self.faults.push(format!("[{r}, {c}] of {whole:?} is no result and went from {} to {}", before[i], after[i]));
            }
        }
    }
}

/// The addresses of a tensor's block scales, in row-major order.
fn scale_bytes(t: Tensor) -> impl Iterator<Item = u64> {
    let Tensor { rows, cols, stride, .. } = t;
    let (first, rows) = if let Scaling::Blocks16 { scales, .. } = t.scaling { (scales, rows) } else { (0, 0) };
    let place = move |row, block| first + formats::tiled(row, block, stride / BLOCK) as u64;
    (0..rows).flat_map(move |row| (0..cols / BLOCK).map(move |block| place(row, block)))
}

/// The weights of the cases that a backend has run so far. They are placed one after another until half of the memory is used, so few cases
/// allocate.
pub struct Weights {
    arena: Arena,
    bytes: u64,
}

impl Default for Weights {
    /// Has room for every case.
    fn default() -> Self {
        Self::with_bytes(512 << 20)
    }
}

impl Weights {
    /// Has room for cases that need at most half of `bytes`.
    pub fn with_bytes(bytes: u64) -> Self {
        Self { arena: Arena::new(Region::Weights), bytes }
    }

    fn prepare(&mut self, backend: &mut dyn Backend) -> &mut Arena {
        if self.arena.peak() == 0 || self.arena.peak() > self.bytes / 2 {
            self.arena = Arena::new(Region::Weights);
            backend.reserve(Region::Weights, self.bytes).unwrap();
        }
        &mut self.arena
    }
}

/// Runs one case and returns its results. `verify` compares them with the oracle; failures are added to `faults`.
pub fn run(be: &mut dyn Backend, weights: &mut Weights, case: &Case, verify: bool, faults: &mut Vec<String>) -> Vec<Vec<f32>> {
    let weights = weights.prepare(be);
    let mut rig = Rig {
        backend: be,
        weights,
        arena: Arena::new(Region::Arena),
        storage: case.storage,
        fit: case.fit,
        seed: 0,
        buffers: Vec::new(),
        verify,
        results: Vec::new(),
        faults: Vec::new(),
    };
    (case.body)(&mut rig);
    faults.extend(rig.faults.iter().map(|fault| format!("{}: {fault}", case.name)));
    rig.results
}

/// Checks the table's cases whose names `wanted` selects.
pub fn check_some(backend: &mut dyn Backend, wanted: impl Fn(&str) -> bool) {
    check(backend, cases::all().into_iter().filter(|case| wanted(&case.name)));
}

/// The cases that a short run takes: the first of each op in each dtype and layout, and one in `n` of the others.
pub fn drawn(n: u64, what: &str, cases: impl IntoIterator<Item = Case>) -> impl Iterator<Item = Case> {
    first_and_drawn(n, what, cases, |case| (op_of(case).to_owned(), case.storage, case.fit))
}

/// The large cases that a short run takes: the first of each op, and one in `n` of the others.
pub fn drawn_of_each_op(n: u64, what: &str, cases: impl IntoIterator<Item = Case>) -> impl Iterator<Item = Case> {
    first_and_drawn(n, what, cases, |case| op_of(case).to_owned())
}

fn op_of(case: &Case) -> &str {
    case.name.split(' ').next().unwrap_or_default()
}

fn first_and_drawn<K: PartialEq>(
    n: u64,
    what: &str,
    cases: impl IntoIterator<Item = Case>,
    kind: impl Fn(&Case) -> K,
) -> impl Iterator<Item = Case> {
    let mut seen = Vec::new();
    let (first, others): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(|case| {
        let kind = kind(case);
        let is_new = !seen.contains(&kind);
        if is_new {
            seen.push(kind);
        }
        is_new
    });
    first.into_iter().chain(one_in(n, what, others))
}

/// Checks these cases.
pub fn check(backend: &mut dyn Backend, cases: impl Iterator<Item = Case>) {
    let (mut weights, mut faults, mut count) = (Weights::default(), Vec::new(), 0);
    for case in cases {
        run(backend, &mut weights, &case, true, &mut faults);
        count += 1;
    }
    assert!(count > 0, "no case has such a name");
    let name = backend.name();
    assert!(faults.is_empty(), "{} of {count} cases fail on {name}:\n{}", faults.len(), faults.join("\n"));
}

/// The largest number in the names of cases that run under compute-sanitizer, which makes kernels a hundred times slower.
pub const SMALL: usize = 256;

/// Whether no number in the name of a case is above `limit`. The head dimension, which is the model's, and the length of rows do not count,
/// because they select the kernel. Ranks count half. racecheck takes seconds for ranks up to 96. It had not ended after 200 seconds for a
/// rank of 400, because the second product of a LoRA branch goes through shared memory without a barrier of the whole CTA.
pub fn is_within(limit: usize, name: &str) -> bool {
    let ranks = name.split([' ', ',']).skip_while(|word| !word.starts_with("rank")).filter_map(|word| word.parse::<usize>().ok());
    if ranks.into_iter().any(|rank| rank > 2 * limit) {
        return false;
    }
    let name = [" heads of ", " rows of "].iter().find_map(|of| name.split_once(of)).map_or(name, |(shape, _)| shape);
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<usize>().ok()).all(|n| n <= limit)
}
