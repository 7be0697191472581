//! Checks every op of a backend against a naive f64 loop: [`cases`] is the table of cases, [`oracle`] has the loops, and this
//! file is the test harness that allocates operands, runs a case and verifies its results. It works on any `&mut dyn Backend`.
//!
//! Requirements for a result:
//! - Its relative L2 error against the f64 oracle, on the inputs as stored, is at most twice that of naive arithmetic at the
//!   same precision, plus [`FLOOR`]. Naive means: for f32 the same loop in f32; for bf16 the oracle rounded once.
//! - Every element was written (results start as NaN), and nothing else in working memory changed: adjacent columns of a wider
//!   buffer, gaps and inputs are read back. Columns next to an input hold NaN, so that reading them shows up in the result.

pub mod cases;
pub mod oracle;

use half::{bf16, f16};
use kiln::backend::{Backend, HostData, Op, Role, WeightPart};
use kiln::tensor::{Arena, Bytes, DType, Region, Tensor};
use oracle::Real;
use std::sync::Arc;

/// Added to every limit, for results whose naive arithmetic happens to be exact.
const FLOOR: f64 = 1e-6;
/// Bytes reserved for weights; no case needs more than half.
const WEIGHTS: u64 = 512 << 20;
/// Value of the columns next to a result; exact in every dtype.
const BESIDE: f32 = 1280.0;
/// Columns to the left and right of a sliced operand.
const LEFT: usize = 3;
const RIGHT: usize = 2;

/// A matrix on the host, whose values are rounded to its stored dtype.
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
        DType::U32 => panic!("ids are not values"),
    }
}

/// The exact result of an op and that of naive arithmetic.
pub struct Expected {
    pub exact: Vec<f64>,
    pub plain: Vec<f64>,
}

impl Expected {
    /// The oracle, and the oracle rounded to `dtype` once.
    pub fn rounded(exact: Vec<f64>, dtype: DType) -> Self {
        let plain = exact.iter().map(|&v| f64::from(stored(v as f32, dtype))).collect();
        Self { exact, plain }
    }

    /// The oracle and the same loop in f32.
    pub fn plain_f32(exact: Vec<f64>, plain: Vec<f32>) -> Self {
        Self { exact, plain: plain.into_iter().map(f64::from).collect() }
    }
}

/// A result and a function that computes the expected values for the dtype it is stored in.
pub type Check<'a> = (Tensor, Box<dyn Fn(DType) -> Expected + 'a>);

/// The expected values by an oracle function and its arguments.
macro_rules! want {
    ($f:ident($($arg:expr),* $(,)?)) => {
        Box::new(|dtype: kiln::tensor::DType| match dtype {
            kiln::tensor::DType::F32 => $crate::ops::Expected::plain_f32(
                $crate::ops::oracle::$f::<f64>($($arg),*),
                $crate::ops::oracle::$f::<f32>($($arg),*),
            ),
            _ => $crate::ops::Expected::rounded($crate::ops::oracle::$f::<f64>($($arg),*), dtype),
        })
    };
}
pub(crate) use want;

/// The memory layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// A separate, contiguous buffer.
    Whole,
    /// A range of columns of a wider buffer, at an odd offset and with an odd gap.
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

/// The test harness: allocates the operands of one case, runs its op and verifies the results.
pub struct Rig<'a> {
    backend: &'a mut dyn Backend,
    weights: &'a mut Arena,
    arena: Arena,
    storage: DType,
    fit: Fit,
    seed: u32,
    /// All buffers in working memory: the whole buffer of each operand, and its content before the op.
    buffers: Vec<(Tensor, Vec<f32>)>,
    ids: Vec<(Tensor, Vec<u32>)>,
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

    fn place(&mut self, rows: usize, cols: usize, dtype: DType, beside: f32, mut value: impl FnMut(usize) -> f32) -> Tensor {
        let (left, right) = if self.fit == Fit::Slice { (LEFT, RIGHT) } else { (0, 0) };
        let whole = self.arena.alloc(rows, left + cols + right, dtype).unwrap();
        // Bytes cannot be NaN, so there a result that was not written is detected by its value.
        let kept = |v: f32| if dtype == DType::U8 { stored(if v.is_nan() { 77.0 } else { v }, dtype) } else { v };
        let mut held = vec![kept(beside); whole.len()];
        for r in 0..rows {
            (0..cols).for_each(|c| held[r * whole.cols + left + c] = kept(value(r * cols + c)));
        }
        self.buffers.push((whole, held));
        whole.cols(left..left + cols)
    }

    fn operand(&mut self, rows: usize, cols: usize, dtype: DType, beside: f32, f: impl Fn(f32) -> f32) -> Operand {
        let data: Vec<f32> = self.noise(rows * cols).into_iter().map(|v| stored(f(v), dtype)).collect();
        let t = self.place(rows, cols, dtype, beside, |i| data[i]);
        Operand { t, host: Mat { rows, cols, data } }
    }

    /// Input activations: `f` of values in -1..1.
    pub fn input(&mut self, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, self.storage, f32::NAN, f)
    }

    /// Input values in a given dtype.
    pub fn input_as(&mut self, dtype: DType, rows: usize, cols: usize, f: impl Fn(f32) -> f32) -> Operand {
        self.operand(rows, cols, dtype, f32::NAN, f)
    }

    /// Activations that the op updates.
    pub fn updated(&mut self, rows: usize, cols: usize) -> Operand {
        self.updated_as(self.storage, rows, cols)
    }

    /// Values in a given dtype that the op updates.
    pub fn updated_as(&mut self, dtype: DType, rows: usize, cols: usize) -> Operand {
        self.operand(rows, cols, dtype, BESIDE, |v| 2.0 * v)
    }

    /// Input token ids.
    pub fn ids(&mut self, ids: Vec<u32>) -> Tensor {
        let t = self.arena.alloc(ids.len(), 1, DType::U32).unwrap();
        self.ids.push((t, ids));
        t
    }

    /// A result in the case's dtype, NaN until written.
    pub fn output(&mut self, rows: usize, cols: usize) -> Tensor {
        self.output_as(self.storage, rows, cols)
    }

    /// A result in a given dtype, NaN until written.
    pub fn output_as(&mut self, dtype: DType, rows: usize, cols: usize) -> Tensor {
        self.place(rows, cols, dtype, BESIDE, |_| f32::NAN)
    }

    /// A weight of dtype `to` that a checkpoint stores as `from`, in parts of the given numbers of rows. In a checkpoint parts
    /// can be at any address, so every second one is misaligned here.
    pub fn weight(&mut self, role: Role, parts: &[usize], cols: usize, from: DType, to: DType) -> Operand {
        let rows = parts.iter().sum();
        // Values are so small that a dot product with a row stays near one.
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
                let mut bytes = vec![0; shift + part.len() * from.size()];
                let places = bytes[shift..].chunks_exact_mut(from.size()).zip(part);
                match from {
                    DType::F32 => places.for_each(|(to, v)| to.copy_from_slice(&v.to_le_bytes())),
                    DType::Bf16 => places.for_each(|(to, v)| to.copy_from_slice(&bf16::from_f32(*v).to_le_bytes())),
                    DType::F16 => places.for_each(|(to, v)| to.copy_from_slice(&f16::from_f32(*v).to_le_bytes())),
                    DType::U32 | DType::U8 => panic!("not a weight's type"),
                }
                let bytes = Bytes::new(Arc::new(bytes));
                WeightPart { bytes: bytes.slice(shift..bytes.len()).unwrap(), dtype: from }
            })
            .collect();
        self.backend.upload(t, role, &parts).unwrap();
        // A value that was stored in a type once is that type's own.
        let data = if from == to { file } else { file.into_iter().map(|v| stored(v, to)).collect() };
        Operand { t, host: Mat { rows, cols, data } }
    }

    /// A norm weight, bias or statistic.
    pub fn vector(&mut self, cols: usize) -> Operand {
        self.weight(Role::Vector, &[1], cols, DType::F32, DType::F32)
    }

    /// Runs the op and verifies its results.
    pub fn run(&mut self, op: Op<'_>, checks: &[Check<'_>]) {
        self.backend.reserve(self.arena.peak()).unwrap();
        for (t, held) in &self.buffers {
            self.backend.write(*t, HostData::F32(held)).unwrap();
        }
        for (t, ids) in &self.ids {
            self.backend.write(*t, HostData::U32(ids)).unwrap();
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

/// Relative L2 distance; infinite if either has a NaN.
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
    let plain = distance(want.plain.iter().copied(), &want.exact);
    if error <= 2.0 * plain + FLOOR {
        return None;
    }
    let off = |i: usize| (f64::from(got[i]) - want.exact[i]).abs();
    let worst = (0..got.len()).max_by(|&a, &b| off(a).total_cmp(&off(b)))?;
    let (place, got, exact) = (place(worst), got[worst], want.exact[worst]);
    Some(format!("relative error {error:.2e}, plain arithmetic has {plain:.2e}; worst at {place}: {got}, oracle {exact}"))
}

/// Runs one case and returns its results. With `verify` they are compared with the oracle, and faults are added to `faults`.
pub fn run(be: &mut dyn Backend, weights: &mut Arena, case: &Case, verify: bool, faults: &mut Vec<String>) -> Vec<Vec<f32>> {
    // Weights are allocated one after the other until half of the memory is used, so that few cases have to reserve memory.
    if weights.peak() == 0 || weights.peak() > WEIGHTS / 2 {
        *weights = Arena::new(Region::Weights);
        be.reserve_weights(WEIGHTS).unwrap();
    }
    let mut rig = Rig {
        backend: be,
        weights,
        arena: Arena::new(Region::Arena),
        storage: case.storage,
        fit: case.fit,
        seed: 0,
        buffers: Vec::new(),
        ids: Vec::new(),
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
    let (mut weights, mut faults, mut count) = (Arena::new(Region::Weights), Vec::new(), 0);
    for case in cases::all().iter().filter(|c| wanted(&c.name)) {
        run(backend, &mut weights, case, true, &mut faults);
        count += 1;
    }
    assert!(count > 0, "no case has such a name");
    let name = backend.name();
    assert!(faults.is_empty(), "{} of {count} cases fail on {name}:\n{}", faults.len(), faults.join("\n"));
}

/// Limit on the sizes of cases for tools such as compute-sanitizer, which slow kernels down a hundredfold.
pub const SMALL: usize = 256;

/// Whether no number in the name of a case exceeds `limit`, except for the head size, which is given by the model, and the length
/// of rows, by which kernels are selected.
pub fn is_within(limit: usize, name: &str) -> bool {
    let name = [" heads of ", " rows of "].iter().find_map(|of| name.split_once(of)).map_or(name, |(shape, _)| shape);
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<usize>().ok()).all(|n| n <= limit)
}
