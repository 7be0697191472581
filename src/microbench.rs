//! Benchmarks single ops on any backend: the shared part of `kiln bench --kernels` and `bench/kernels.rs`.
//!
//! A [`Row`] is an op at a shape. Its rate is computed from the op itself: from [`Op::flops`] if the op is compute-bound, or else
//! from the bytes that it has to move. Operands hold pseudo-random values, in several sets that are used in rotation, so that
//! caches are cold. All sets together are one step, which a GPU captures as a CUDA graph and replays, so that host overhead is
//! not timed. The protocol is described in `bench/README.md`.

mod rows;

pub use rows::{Scale, rows};

use crate::backend::{Access, Backend, Linear, Op, Role, StepKey, repeat_rows};
use crate::error::Result;
use crate::tensor::{Arena, Bytes, DType, Region, Tensor, WeightPart};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The measurement protocol.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    /// Number of timed batches of a row, each followed by a batch of its ceiling.
    pub rounds: usize,
    /// Minimum duration of a batch.
    pub batch: Duration,
    /// Minimum size of all sets of operands together, in bytes; there are at least three and at most 64 sets.
    pub rotated: u64,
}

impl Protocol {
    /// The protocol for published figures. The operands are several times as large as any cache.
    pub const FULL: Self = Self { rounds: 15, batch: Duration::from_millis(5), rotated: 256 << 20 };
    /// A quick check that everything runs.
    pub const QUICK: Self = Self { rounds: 3, batch: Duration::ZERO, rotated: 0 };

    fn sets(&self, bytes: u64) -> usize {
        self.rotated.div_ceil(bytes.max(1)).clamp(3, 64) as usize
    }
}

/// Runs an op.
type Runner<'a> = dyn FnMut(Op<'_>) -> Result<()> + 'a;
/// Passes its op to a runner.
type Call = Box<dyn Fn(&mut Runner<'_>) -> Result<()>>;
/// Creates an op with its own operands.
type Maker = Box<dyn Fn(&mut Operands) -> Result<Call>>;

fn call(with: impl Fn(&mut Runner<'_>) -> Result<()> + 'static) -> Result<Call> {
    Ok(Box::new(with))
}

/// An op at a shape.
pub struct Row {
    /// The op's name.
    pub name: &'static str,
    /// The shape, for display.
    pub shape: String,
    /// The work of the op.
    pub work: Work,
    activations: DType,
    make: Maker,
}

/// The work of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations of its GEMMs, convolutions or attention.
    pub flops: u64,
    /// Bytes that it must read and write, each operand once.
    pub bytes: u64,
}

/// Arithmetic intensity in FLOP per byte below which an op is memory-bound (the ridge point of the roofline model, Williams et
/// al. 2009). GPUs that kiln runs on have ridge points of 100 to 300.
const BALANCE: u64 = 160;

impl Work {
    fn of(op: &Op<'_>) -> Self {
        let mut bytes = 0;
        op.operands(&mut |t, access| bytes += t.bytes() * if access == Access::Update { 2 } else { 1 });
        // The statistics take a pass over the whole input before the first value can be written.
        if let Op::GroupNorm { x, stats: None, .. } = *op {
            bytes += x.bytes();
        }
        Self { flops: op.flops(), bytes }
    }

    /// Whether the op is memory-bound rather than compute-bound.
    pub const fn bound_by_memory(self) -> bool {
        self.flops < BALANCE * self.bytes
    }

    /// FLOP per second or bytes per second, with the unit.
    pub fn rate(self, seconds: f64) -> (f64, &'static str) {
        match self.bound_by_memory() {
            true => (self.bytes as f64 / seconds, "B/s"),
            false => (self.flops as f64 / seconds, "FLOP/s"),
        }
    }
}

impl Row {
    fn new(shape: String, activations: DType, make: impl Fn(&mut Operands) -> Result<Call> + 'static) -> Result<Self> {
        let mut found = None;
        make(&mut Operands::new(activations))?(&mut |op| {
            op.check()?;
            found = Some((op.name(), Work::of(&op)));
            Ok(())
        })?;
        let (name, work) = found.unwrap_or(("", Work { flops: 0, bytes: 0 }));
        Ok(Self { name, shape, work, activations, make: Box::new(make) })
    }

    /// Allocates `sets` sets of operands, or as many as fit in memory.
    pub fn prepare(&self, be: &mut dyn Backend, sets: usize) -> Result<Prepared> {
        // The memory of the previous row is freed first, so that it counts as available.
        be.reserve_weights(0)?;
        be.reserve(0)?;
        let mut sets = sets.max(1);
        loop {
            let mut operands = Operands::new(self.activations);
            let calls = (0..sets).map(|_| (self.make)(&mut operands)).collect::<Result<Vec<_>>>()?;
            let (mut copies, mut copied) = (Vec::new(), 0);
            if self.work.bound_by_memory() {
                let (rows, cols) = copy_shape(self.work.bytes);
                copied = (4 * rows * cols) as u64;
                for _ in 0..sets {
                    let (x, out) = (operands.input(rows, cols, DType::Bf16)?, operands.output(rows, cols, DType::Bf16)?);
                    copies.push(call(move |run| run(Op::Copy { out, x }))?);
                }
            }
            if sets > 1 && be.available()?.is_some_and(|have| operands.weights.peak() + operands.arena.peak() > have) {
                sets -= 1;
                continue;
            }
            operands.fill(be)?;
            return Ok(Prepared { calls, copies, copied });
        }
    }

    /// Times the row and, if it is memory-bound, in alternation with it a copy of as many bytes.
    pub fn measure(&self, be: &mut dyn Backend, protocol: &Protocol) -> Result<Figure> {
        let prepared = self.prepare(be, protocol.sets(self.work.bytes))?;
        let launches = |be: &dyn Backend| be.launches().into_iter().collect::<HashMap<_, _>>();
        let before = launches(be);
        prepared.warm_up(be)?;
        let mut kernels: Vec<&str> =
            launches(be).into_iter().filter(|(name, times)| before.get(name) != Some(times)).map(|(name, _)| name).collect();
        kernels.sort_unstable();
        let passes = |pass: f64| (protocol.batch.as_secs_f64() / pass.max(1e-9)).ceil().clamp(1.0, 1e6) as usize;
        let calls = prepared.calls.len();
        let row_passes = passes(prepared.seconds(be, 1)? * calls as f64);
        let mut copy_passes = 0;
        if !prepared.copies.is_empty() {
            prepared.copy_seconds(be, 2)?;
            copy_passes = passes(prepared.copy_seconds(be, 1)? * calls as f64);
        }
        let (mut seconds, mut copy_seconds) = (Vec::new(), Vec::new());
        for _ in 0..protocol.rounds {
            seconds.push(prepared.seconds(be, row_passes)?);
            if copy_passes > 0 {
                copy_seconds.push(prepared.copy_seconds(be, copy_passes)?);
            }
        }
        let Work { flops, bytes } = self.work;
        let scale = prepared.copied as f64 / bytes.max(1) as f64;
        let ratios: Vec<f64> = seconds.iter().zip(&copy_seconds).map(|(row, copy)| copy / row / scale).collect();
        Ok(Figure {
            op: self.name,
            shape: self.shape.clone(),
            kernels,
            flops,
            bytes,
            sets: calls,
            calls: row_passes * calls,
            median_s: median(&seconds),
            spread: spread(&seconds),
            of_copy: (!ratios.is_empty()).then(|| median(&ratios)),
            of_tensor_cores: None,
            seconds,
            copy_seconds,
        })
    }
}

/// The shape of a bf16 matrix whose copy moves about this number of bytes.
fn copy_shape(bytes: u64) -> (usize, usize) {
    let values = (bytes as usize / 4).max(1);
    let cols = values.min(3072);
    (values.div_ceil(cols), cols)
}

/// A row with its operands in memory.
pub struct Prepared {
    calls: Vec<Call>,
    copies: Vec<Call>,
    /// Number of bytes that one copy moves.
    copied: u64,
}

impl Prepared {
    /// Runs the row without timing: pages are touched, threads wake up, CUDA graphs are captured.
    pub fn warm_up(&self, be: &mut dyn Backend) -> Result<()> {
        self.seconds(be, 2).map(drop)
    }

    /// Mean seconds of one call, over a number of passes through all sets.
    pub fn seconds(&self, be: &mut dyn Backend, passes: usize) -> Result<f64> {
        batch(be, StepKey("row"), &self.calls, passes)
    }

    fn copy_seconds(&self, be: &mut dyn Backend, passes: usize) -> Result<f64> {
        batch(be, StepKey("copy"), &self.copies, passes)
    }
}

fn batch(be: &mut dyn Backend, key: StepKey, calls: &[Call], passes: usize) -> Result<f64> {
    be.synchronize()?;
    let start = Instant::now();
    for _ in 0..passes {
        be.step(key, &mut |be| calls.iter().try_for_each(|call| call(&mut |op| be.run(op))))?;
    }
    be.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / (passes * calls.len()).max(1) as f64)
}

/// The measurement of a row. These are the fields of the JSON output.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The op.
    pub op: &'static str,
    /// Its shape.
    pub shape: String,
    /// Kernels that it launched.
    pub kernels: Vec<&'static str>,
    /// Floating-point operations per call.
    pub flops: u64,
    /// Bytes that a call must move.
    pub bytes: u64,
    /// Number of sets of operands.
    pub sets: usize,
    /// Number of calls per batch.
    pub calls: usize,
    /// Median of `seconds`.
    pub median_s: f64,
    /// Larger distance of the quartiles from the median, relative to the median.
    pub spread: f64,
    /// Speed relative to a copy of as many bytes, for memory-bound rows.
    pub of_copy: Option<f64>,
    /// Speed relative to the peak of the tensor cores, for compute-bound rows if the peak is known.
    pub of_tensor_cores: Option<f64>,
    /// Seconds per call, one value for each batch.
    pub seconds: Vec<f64>,
    /// Seconds per copy, one value for each batch.
    pub copy_seconds: Vec<f64>,
}

impl Figure {
    /// Adds the speed relative to a peak in FLOP per second, if the row is compute-bound.
    pub fn held_to(mut self, flops_per_second: Option<f64>) -> Self {
        let work = Work { flops: self.flops, bytes: self.bytes };
        if !work.bound_by_memory() {
            self.of_tensor_cores = flops_per_second.map(|most| self.flops as f64 / self.median_s / most);
        }
        self
    }

    /// The line of the printed table.
    pub fn line(&self) -> String {
        let (rate, unit) = Work { flops: self.flops, bytes: self.bytes }.rate(self.median_s);
        let (rate, prefix) = if rate >= 1e12 { (rate / 1e12, "T") } else { (rate / 1e9, "G") };
        let share = match (self.of_copy, self.of_tensor_cores) {
            (Some(share), _) => format!("{:>3.0} % of copy", 100.0 * share),
            (_, Some(share)) => format!("{:>3.0} % of peak", 100.0 * share),
            _ => String::new(),
        };
        let line = format!(
            "{:<21} {:<40} {:>11.1} us ±{:>4.1} % {rate:>7.1} {:<7} {share:<13} {}",
            self.op,
            self.shape,
            1e6 * self.median_s,
            100.0 * self.spread,
            format!("{prefix}{unit}"),
            self.kernels.join(" ")
        );
        line.trim_end().to_owned()
    }
}

/// The median; zero if there are no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The larger distance of the quartiles from the median, relative to the median.
fn spread(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |q: f64| sorted[((sorted.len() - 1) as f64 * q).round() as usize];
    let median = median(values);
    (at(0.75) - median).max(median - at(0.25)) / median
}

/// The operands of all sets of a row. Descriptors are collected first; memory is allocated when all are known.
struct Operands {
    activations: DType,
    weights: Arena,
    arena: Arena,
    placed: Vec<(Tensor, Role)>,
    inputs: Vec<Tensor>,
}

/// Period of the random values, a prime, so that rows differ.
const PERIOD: usize = 1_000_003;

impl Operands {
    fn new(activations: DType) -> Self {
        let (weights, arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        Self { activations, weights, arena, placed: Vec::new(), inputs: Vec::new() }
    }

    /// Allocates a result.
    fn output(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        self.arena.alloc(rows, cols, dtype)
    }

    fn input(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        let tensor = self.arena.alloc(rows, cols, dtype)?;
        self.inputs.push(tensor);
        Ok(tensor)
    }

    fn activations(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.input(rows, cols, self.activations)
    }

    /// Allocates a result with the dtype of activations.
    fn results(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.output(rows, cols, self.activations)
    }

    fn weight(&mut self, rows: usize, cols: usize, dtype: DType, role: Role) -> Result<Tensor> {
        let tensor = self.weights.alloc(rows, cols, dtype)?;
        self.placed.push((tensor, role));
        Ok(tensor)
    }

    fn linear(&mut self, rows: usize, cols: usize) -> Result<Linear> {
        Ok(Linear::new(self.weight(rows, cols, DType::Bf16, Role::Linear)?, None))
    }

    /// Allocates a norm weight, a bias or a variance, with values around one.
    fn vector(&mut self, cols: usize) -> Result<Tensor> {
        self.weight(1, cols, DType::F32, Role::Vector)
    }

    /// Reserves memory and initialises the operands that ops read.
    fn fill(&self, be: &mut dyn Backend) -> Result<()> {
        let noise = noise();
        let weights = DType::Bf16.encoded(&noise.iter().map(|v| 0.1 * v).collect::<Vec<_>>());
        let vectors = DType::F32.encoded(&noise.iter().map(|v| 1.0 + 0.5 * v).collect::<Vec<_>>());
        be.reserve_weights(self.weights.peak())?;
        for &(to, role) in &self.placed {
            // Each weight has its own bytes, because the CPU backend reads them in place.
            let block = if to.dtype == DType::F32 { &vectors } else { &weights };
            let bytes = Bytes::new(Arc::new(repeated(block, to.dtype.bytes(to.len()))));
            be.upload(to, role, &[WeightPart::plain(bytes, to.dtype, to.rows)])?;
        }
        be.reserve(self.arena.peak())?;
        for &to in &self.inputs {
            // Only some rows are uploaded from the host.
            let filled = (PERIOD / to.cols).clamp(1, to.rows);
            be.write(to.rows(0..filled), &repeated(&noise, filled * to.cols))?;
            repeat_rows(be, to, filled)?;
        }
        be.synchronize()
    }
}

/// `len` values that repeat a block.
fn repeated<T: Copy>(block: &[T], len: usize) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    while values.len() < len {
        values.extend_from_slice(&block[..block.len().min(len - values.len())]);
    }
    values
}

/// Values in -1..1 from a linear congruential generator.
fn noise() -> Vec<f32> {
    let mut state = 1u32;
    (0..PERIOD)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::tensor::Precision;

    #[test]
    fn work_counts_flops_and_minimal_bytes() {
        let all = rows(Scale::Klein, Precision::Bf16).unwrap();
        let of = |name: &str, shape: &str| {
            all.iter().find(|r| r.name == name && r.shape == shape).unwrap_or_else(|| panic!("{name} {shape}")).work
        };
        assert_eq!(of("qkv_mlp", "4608x27648x3072").flops, 2 * 4608 * 27_648 * 3072);
        assert_eq!(of("attention", "4608 tokens, 24 heads of 128").flops, 4 * 4608 * 4608 * 3072);
        // Operands are read and written once; euler updates in place; group norm reads its input twice if the statistics are not
        // given.
        assert_eq!(of("rms_norm", "512x2560").bytes, 2 * 2 * 512 * 2560 + 4 * 2560);
        assert_eq!(of("euler", "4096x128").bytes, 3 * 4 * 4096 * 128);
        assert_eq!(of("group_norm", "128x128, 512 channels").bytes, 3 * 2 * 128 * 128 * 512 + 2 * 4 * 512);
        for (name, memory) in [("linear_swiglu", false), ("conv", false), ("layer_norm_modulate", true), ("pixels", true)] {
            assert_eq!(all.iter().find(|r| r.name == name).unwrap().work.bound_by_memory(), memory, "{name}");
        }
        assert!(of("linear", "1x18432x3072").bound_by_memory() && of("linear", "4096x128x3072").bound_by_memory());
        assert!(of("conv", "1024x1024, 128 to 3").bound_by_memory());
    }

    /// Every op has a row, and every row runs.
    #[test]
    fn every_op_has_a_row_that_runs() {
        let mut cpu = Cpu::new(0, Arc::default()).unwrap();
        for precision in [Precision::Bf16, Precision::F32] {
            let all = rows(Scale::Quick, precision).unwrap();
            for op in crate::backend::OP_NAMES {
                assert!(all.iter().any(|row| row.name == *op), "{op}");
            }
            let klein = rows(Scale::Klein, precision).unwrap();
            assert!(klein.iter().map(|r| r.name).eq(all.iter().map(|r| r.name)), "the same ops at other sizes");
            for row in &all {
                let figure = row.measure(&mut cpu, &Protocol::QUICK).unwrap().held_to(Some(1e12));
                assert_eq!((figure.sets, figure.seconds.len()), (3, 3), "{}", row.name);
                assert!(figure.median_s > 0.0 && figure.of_copy.or(figure.of_tensor_cores).unwrap() > 0.0, "{figure:?}");
                assert_eq!(figure.of_copy.is_some(), row.work.bound_by_memory(), "{figure:?}");
            }
        }
    }

    #[test]
    fn enough_sets_to_keep_caches_cold() {
        assert_eq!([1 << 30, 64 << 20, 32 << 20, 1 << 10].map(|bytes| Protocol::FULL.sets(bytes)), [3, 4, 8, 64]);
        assert_eq!(copy_shape(4 * 3072 * 100), (100, 3072));
        assert_eq!(copy_shape(40), (1, 10));
        assert_eq!((median(&[3.0, 1.0]), median(&[3.0, 1.0, 2.0]), median(&[])), (2.0, 2.0, 0.0));
        assert!((spread(&[1.0, 2.0, 2.0, 2.0, 3.0])).abs() < 1e-9);
    }
}
