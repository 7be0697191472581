//! Every op of a backend against a naive f64 loop: [`cases`] is the table, [`oracle`] has the loops, and this file has the rig
//! that places operands, runs a case and checks its results. It works on any `&mut dyn Backend`.
//!
//! A result has to satisfy two conditions:
//! - Its relative L2 error against the f64 oracle, on the inputs as stored, is at most twice that of naive arithmetic at the same
//!   precision, plus [`FLOOR`]. For f32 this is the same loop in f32, for bf16 the oracle rounded once.
//! - Every element was written (results start as NaN), and nothing else in the arena changed: padding columns of strided buffers,
//!   gaps and inputs are read back. Padding of inputs is NaN, so that reading it shows.

pub mod cases;
mod gemms;
pub mod oracle;
#[allow(dead_code)] // only some tests run on GPUs or emulate one
pub mod outputs;
#[allow(dead_code)]
pub mod tiles;

use half::{bf16, f16};
use kiln::backend::{Backend, Op, Role};
use kiln::tensor::{Arena, Bytes, DType, Region, Tensor, WeightPart};
use oracle::Real;
use std::sync::Arc;

/// Added to every limit, because naive arithmetic may be exact by chance.
const FLOOR: f64 = 1e-6;
/// The value of padding columns of results; exact in every dtype.
const PADDING: f32 = 1280.0;
/// Padding columns to the left and right of a strided operand.
const LEFT: usize = 3;
const RIGHT: usize = 2;

/// A matrix on the host, with values that its stored dtype can represent.
#[derive(Clone, Debug)]
pub struct Mat {
    pub rows: usize,
    pub cols: usize,
    data: Vec<f32>,
}

impl Mat {
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
        DType::E4m3 | DType::E5m2 | DType::E2m1 => panic!("these have scales"),
    }
}

/// The exact result of an op, and that of naive arithmetic.
pub struct Expected {
    pub exact: Vec<f64>,
    pub naive: Vec<f64>,
}

impl Expected {
    /// The oracle, and the oracle rounded to `dtype` once.
    pub fn rounded(exact: Vec<f64>, dtype: DType) -> Self {
        let naive = exact.iter().map(|&v| f64::from(stored(v as f32, dtype))).collect();
        Self { exact, naive }
    }

    /// The oracle and the same loop in f32.
    pub fn naive_f32(exact: Vec<f64>, naive: Vec<f32>) -> Self {
        Self { exact, naive: naive.into_iter().map(f64::from).collect() }
    }
}

/// A result, and a function that computes its expectation from its dtype.
pub type Check<'a> = (Tensor, Box<dyn Fn(DType) -> Expected + 'a>);

/// The expected values by an oracle function and its arguments.
macro_rules! want {
    ($f:ident($($arg:expr),* $(,)?)) => {
        Box::new(|dtype: kiln::tensor::DType| match dtype {
            kiln::tensor::DType::F32 => $crate::ops::Expected::naive_f32(
                $crate::ops::oracle::$f::<f64>($($arg),*),
                $crate::ops::oracle::$f::<f32>($($arg),*),
            ),
            _ => $crate::ops::Expected::rounded($crate::ops::oracle::$f::<f64>($($arg),*), dtype),
        })
    };
}
pub(crate) use want;

/// The layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Contiguous, in a buffer of its own.
    Whole,
    /// Strided: some columns of a wider buffer, at an odd offset and with an odd padding.
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
    /// All of the arena: the whole buffer of each operand, and its content before the op.
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
        // There is no NaN in U8, so a result that was not written shows by this value.
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
        Operand { t, host: Mat { rows, cols, data } }
    }

    /// Input activations: `f` of values in -1..1.
    pub fn input(&mut self, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, self.storage, f32::NAN, f)
    }

    /// The same in another dtype.
    pub fn input_as(&mut self, dtype: DType, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, dtype, f32::NAN, f)
    }

    /// Activations that the op updates in place.
    pub fn updated(&mut self, rows: usize, cols: usize) -> Operand {
        self.updated_as(self.storage, rows, cols)
    }

    /// The same in another dtype.
    pub fn updated_as(&mut self, dtype: DType, rows: usize, cols: usize) -> Operand {
        self.operand(rows, cols, dtype, PADDING, |v| 2.0 * v)
    }

    /// A result in the dtype of the case, NaN until written.
    pub fn output(&mut self, rows: usize, cols: usize) -> Tensor {
        self.output_as(self.storage, rows, cols)
    }

    /// The same in another dtype.
    pub fn output_as(&mut self, dtype: DType, rows: usize, cols: usize) -> Tensor {
        self.place(rows, cols, dtype, PADDING, |_| f32::NAN)
    }

    /// A weight of dtype `to` whose rows a file stores as `from`, in parts of so many rows. Parts of a file may be at any
    /// address, so every second one is misaligned here.
    pub fn weight(&mut self, role: Role, parts: &[usize], cols: usize, from: DType, to: DType) -> Operand {
        let rows = parts.iter().sum();
        // The scale keeps the result of a GEMM near one.
        let scale = if role == Role::Vector { 1.0 } else { 1.5 / (cols as f32).sqrt() };
        let file: Vec<f32> = self.noise(rows * cols).into_iter().map(|v| stored(scale * v, from)).collect();
        let t = self.weights.alloc(rows, cols, to).unwrap();
        let mut rest = &file[..];
        let parts: Vec<WeightPart> = parts
            .iter()
            .enumerate()
            .map(|(i, &rows)| {
                let (part, after) = rest.split_at(rows * cols);
                rest = after;
                let shift = i % 2;
                let bytes = Bytes::new(Arc::new([vec![0; shift], from.encoded(part)].concat()));
                WeightPart::plain(bytes.slice(shift..bytes.len()).unwrap(), from, rows)
            })
            .collect();
        self.backend.upload(t, role, &parts).unwrap();
        // Rounding to the same dtype again changes nothing.
        let data = if from == to { file } else { file.into_iter().map(|v| stored(v, to)).collect() };
        Operand { t, host: Mat { rows, cols, data } }
    }

    /// A norm weight, bias or statistic.
    pub fn vector(&mut self, cols: usize) -> Operand {
        self.weight(Role::Vector, &[1], cols, DType::F32, DType::F32)
    }

    /// Runs the op and checks its results.
    pub fn run(&mut self, op: Op<'_>, checks: &[Check<'_>]) {
        self.backend.reserve(self.arena.peak()).unwrap();
        for (t, held) in &self.buffers {
            self.backend.write(*t, held).unwrap();
        }
        self.backend.run(op).unwrap();
        for (out, want) in checks {
            let out = *out;
            let mut got = vec![0.0; out.len()];
            self.backend.read(out, &mut got).unwrap();
            if self.verify {
                self.faults.extend(judge(out, &got, &want(out.dtype)));
            }
            self.results.push(got);
        }
        if self.verify {
            let written: Vec<Tensor> = checks.iter().map(|c| c.0).collect();
            self.check_surroundings(&written);
        }
    }

    /// Checks that nothing but the results changed.
    fn check_surroundings(&mut self, written: &[Tensor]) {
        for (whole, before) in &self.buffers {
            let mut after = vec![0.0; whole.len()];
            self.backend.read(*whole, &mut after).unwrap();
            let changed = |i: usize| before[i].to_bits() != after[i].to_bits() && !(before[i].is_nan() && after[i].is_nan());
            let element = |i: usize| whole.rows(i / whole.cols..i / whole.cols + 1).cols(i % whole.cols..i % whole.cols + 1);
            let stray = (0..after.len()).filter(|&i| changed(i)).find(|&i| written.iter().all(|w| !w.overlaps(element(i))));
            if let Some(i) = stray {
                let (r, c) = (i / whole.cols, i % whole.cols);
                self.faults.push(format!("[{r}, {c}] of {whole:?} is no result and went from {} to {}", before[i], after[i]));
            }
        }
    }
}

/// Relative L2 distance; infinite if any value is NaN.
fn distance(got: impl Iterator<Item = f64>, want: &[f64]) -> f64 {
    let norm: f64 = want.iter().map(|w| w * w).sum();
    let difference: f64 = got.zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let relative = (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
    if difference == 0.0 {
        0.0
    } else if relative.is_nan() {
        f64::INFINITY
    } else {
        relative
    }
}

fn judge(out: Tensor, got: &[f32], want: &Expected) -> Option<String> {
    assert_eq!(got.len(), want.exact.len(), "the oracle has another shape");
    let place = |i: usize| format!("[{}, {}] of [{}, {}]", i / out.cols, i % out.cols, out.rows, out.cols);
    if let Some(i) = got.iter().position(|v| v.is_nan()) {
        return Some(format!("{} was not written, or is NaN", place(i)));
    }
    let error = distance(got.iter().copied().map(f64::from), &want.exact);
    let naive = distance(want.naive.iter().copied(), &want.exact);
    if error <= 2.0 * naive + FLOOR {
        return None;
    }
    let off = |i: usize| (f64::from(got[i]) - want.exact[i]).abs();
    let worst = (0..got.len()).max_by(|&a, &b| off(a).total_cmp(&off(b)))?;
    let (place, got, exact) = (place(worst), got[worst], want.exact[worst]);
    Some(format!("relative error {error:.2e}, naive arithmetic has {naive:.2e}; worst at {place}: {got}, oracle {exact}"))
}

/// The weights of the cases that a backend has run so far: placed one after the other until half of the memory is used, so that few
/// cases allocate.
pub struct Weights {
    arena: Arena,
    bytes: u64,
}

impl Default for Weights {
    /// Enough for every case.
    fn default() -> Self {
        Self::with_bytes(512 << 20)
    }
}

impl Weights {
    /// Room for cases that need no more than half of it.
    pub fn with_bytes(bytes: u64) -> Self {
        Self { arena: Arena::new(Region::Weights), bytes }
    }

    fn prepare(&mut self, backend: &mut dyn Backend) -> &mut Arena {
        if self.arena.peak() == 0 || self.arena.peak() > self.bytes / 2 {
            self.arena = Arena::new(Region::Weights);
            backend.reserve_weights(self.bytes).unwrap();
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

/// Checks the cases that `wanted` selects by name.
pub fn check_some(backend: &mut dyn Backend, wanted: impl Fn(&str) -> bool) {
    let (mut weights, mut faults, mut count) = (Weights::default(), Vec::new(), 0);
    for case in cases::all().iter().filter(|c| wanted(&c.name)) {
        run(backend, &mut weights, case, true, &mut faults);
        count += 1;
    }
    assert!(count > 0, "no case has such a name");
    let name = backend.name();
    assert!(faults.is_empty(), "{} of {count} cases fail on {name}:\n{}", faults.len(), faults.join("\n"));
}

/// The largest number in the names of cases that run under compute-sanitizer, which slows kernels down a hundredfold.
pub const SMALL: usize = 256;

/// Whether no number in the name of a case is above `limit`, except for the head dimension, which is that of the model, and the
/// length of rows, by which their kernels are selected.
pub fn is_within(limit: usize, name: &str) -> bool {
    let name = [" heads of ", " rows of "].iter().find_map(|of| name.split_once(of)).map_or(name, |(shape, _)| shape);
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<usize>().ok()).all(|n| n <= limit)
}
