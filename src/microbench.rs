//! Times single ops on any backend: what `kiln bench --kernels` and `bench/kernels.rs` share.
//!
//! A [`Row`] is an op at a shape. What its rate counts comes from the op itself: [`Op::flops`] where it multiplies matrices, else the
//! bytes it has to move. Operands hold pseudo-random values, in several sets that take turns, so that no cache holds them. All sets
//! together are one step, which a GPU records and replays: the host's own work is not timed. `bench/README.md` tells the protocol.

mod rows;

pub use rows::{Scale, rows};

use crate::backend::{Access, Backend, HostData, Linear, Op, Role, StepKey, WeightPart};
use crate::error::Result;
use crate::tensor::{Arena, Bytes, DType, Region, Tensor};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    /// Batches of a row, each followed by one of its ceiling.
    pub rounds: usize,
    /// A batch lasts at least as long.
    pub batch: Duration,
    /// All sets of operands together have at least as many bytes, with at least three sets and at most 64.
    pub rotated: u64,
}

impl Protocol {
    /// For figures. The bytes are several times any cache.
    pub const FULL: Self = Self { rounds: 15, batch: Duration::from_millis(5), rotated: 256 << 20 };
    /// To see that everything runs.
    pub const QUICK: Self = Self { rounds: 3, batch: Duration::ZERO, rotated: 0 };

    fn sets(&self, bytes: u64) -> usize {
        self.rotated.div_ceil(bytes.max(1)).clamp(3, 64) as usize
    }
}

/// Takes an op to run.
type Runner<'a> = dyn FnMut(Op<'_>) -> Result<()> + 'a;
/// Hands its op to whom it is given.
type Call = Box<dyn Fn(&mut Runner<'_>) -> Result<()>>;
/// Makes an op on operands of its own.
type Maker = Box<dyn Fn(&mut Operands) -> Result<Call>>;

fn call(with: impl Fn(&mut Runner<'_>) -> Result<()> + 'static) -> Result<Call> {
    Ok(Box::new(with))
}

/// An op at a shape.
pub struct Row {
    /// The op's name.
    pub name: &'static str,
    /// The shape, for people.
    pub shape: String,
    /// What it has to do.
    pub work: Work,
    activations: DType,
    make: Maker,
}

/// What an op has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations of its products.
    pub flops: u64,
    /// Bytes it reads and writes, if it does either once.
    pub bytes: u64,
}

/// Operations for each byte below which memory is the limit. GPUs that kiln runs on can do 100 to 300 while a byte is moved.
const BALANCE: u64 = 160;

impl Work {
    fn of(op: &Op<'_>) -> Self {
        let size = |t: Tensor| (t.len() * t.dtype.size()) as u64;
        let mut bytes = 0;
        op.operands(&mut |t, access| bytes += size(t) * if access == Access::Update { 2 } else { 1 });
        match *op {
            // Of a table it reads as many rows as it writes.
            Op::Embed { out, table, .. } => bytes = bytes - size(table) + size(out),
            // All of it has to be seen before the first value can be written.
            Op::GroupNorm { x, stats: None, .. } => bytes += size(x),
            _ => {}
        }
        Self { flops: op.flops(), bytes }
    }

    /// Whether memory is the limit, not arithmetic.
    pub const fn bound_by_memory(self) -> bool {
        self.flops < BALANCE * self.bytes
    }

    /// Operations or bytes a second, and which.
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

    /// Places `sets` sets of operands, or as many as there is room for.
    pub fn prepare(&self, be: &mut dyn Backend, sets: usize) -> Result<Prepared> {
        // What the row before had is given back first, so that it does not count.
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

    /// Times the row, and in turn with it a copy of as many bytes if those are its limit.
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

/// A matrix of bf16 that is copied by moving about as many bytes.
fn copy_shape(bytes: u64) -> (usize, usize) {
    let values = (bytes as usize / 4).max(1);
    let cols = values.min(3072);
    (values.div_ceil(cols), cols)
}

/// A row with its operands in place.
pub struct Prepared {
    calls: Vec<Call>,
    copies: Vec<Call>,
    /// Bytes that one copy moves.
    copied: u64,
}

impl Prepared {
    /// Runs before the clock counts: caches fill, pages are touched, threads wake up, steps are recorded.
    pub fn warm_up(&self, be: &mut dyn Backend) -> Result<()> {
        self.seconds(be, 2).map(drop)
    }

    /// Seconds of one call, over as many passes through all sets.
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

/// What a row took. These are the fields of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The op.
    pub op: &'static str,
    /// Its shape.
    pub shape: String,
    /// Kernels it launched.
    pub kernels: Vec<&'static str>,
    /// Floating-point operations of a call.
    pub flops: u64,
    /// Bytes a call has to move.
    pub bytes: u64,
    /// Sets of operands.
    pub sets: usize,
    /// Calls of a batch.
    pub calls: usize,
    /// Median of `seconds`.
    pub median_s: f64,
    /// How far its quartiles lie from it at most, as a share of it.
    pub spread: f64,
    /// Speed relative to a copy of as many bytes, where memory is the limit.
    pub of_copy: Option<f64>,
    /// Speed relative to the tensor cores' highest, where products are the limit and that is known.
    pub of_tensor_cores: Option<f64>,
    /// Seconds of a call, one for each batch.
    pub seconds: Vec<f64>,
    /// The same for the copy.
    pub copy_seconds: Vec<f64>,
}

impl Figure {
    /// The share of a ceiling of so many operations a second, where products are the limit.
    pub fn held_to(mut self, flops_per_second: Option<f64>) -> Self {
        let work = Work { flops: self.flops, bytes: self.bytes };
        if !work.bound_by_memory() {
            self.of_tensor_cores = flops_per_second.map(|most| self.flops as f64 / self.median_s / most);
        }
        self
    }

    /// A line of the table.
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

/// The middle of some numbers; zero if there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// How far the quartiles lie from the median on either side, at most, as a share of it.
fn spread(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |q: f64| sorted[((sorted.len() - 1) as f64 * q).round() as usize];
    let median = median(values);
    (at(0.75) - median).max(median - at(0.25)) / median
}

/// The operands of all sets of a row: descriptors first, memory when all are known.
struct Operands {
    activations: DType,
    weights: Arena,
    arena: Arena,
    placed: Vec<(Tensor, Role)>,
    inputs: Vec<Tensor>,
    ids: Vec<(Tensor, usize)>,
    /// The one table for all sets, of which each reads other rows.
    table: Option<Tensor>,
}

/// Random values repeat after so many, a prime, so that rows differ.
const PERIOD: usize = 1_000_003;

impl Operands {
    fn new(activations: DType) -> Self {
        let (weights, arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        Self { activations, weights, arena, placed: Vec::new(), inputs: Vec::new(), ids: Vec::new(), table: None }
    }

    /// Room for a result.
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

    /// Room for results of the same type.
    fn results(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.output(rows, cols, self.activations)
    }

    fn weight(&mut self, rows: usize, cols: usize, dtype: DType, role: Role) -> Result<Tensor> {
        let tensor = self.weights.alloc(rows, cols, dtype)?;
        self.placed.push((tensor, role));
        Ok(tensor)
    }

    fn linear(&mut self, rows: usize, cols: usize, role: Role) -> Result<Linear> {
        Ok(Linear { weight: self.weight(rows, cols, DType::Bf16, role)?, bias: None })
    }

    /// A norm's weight, a bias or a variance: values around one.
    fn vector(&mut self, cols: usize) -> Result<Tensor> {
        self.weight(1, cols, DType::F32, Role::Vector)
    }

    fn table(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        if let Some(table) = self.table {
            return Ok(table);
        }
        let table = self.weight(rows, cols, DType::Bf16, Role::Table)?;
        self.table = Some(table);
        Ok(table)
    }

    /// Token ids below a limit.
    fn ids(&mut self, count: usize, below: usize) -> Result<Tensor> {
        let tensor = self.arena.alloc(count, 1, DType::U32)?;
        self.ids.push((tensor, below));
        Ok(tensor)
    }

    /// Takes the memory, and puts values into what ops read.
    fn fill(&self, be: &mut dyn Backend) -> Result<()> {
        let noise = noise();
        let weights = DType::Bf16.encoded(&noise.iter().map(|v| 0.1 * v).collect::<Vec<_>>());
        let vectors = DType::F32.encoded(&noise.iter().map(|v| 1.0 + 0.5 * v).collect::<Vec<_>>());
        be.reserve_weights(self.weights.peak())?;
        for &(to, role) in &self.placed {
            // Each has bytes of its own: the processor reads them where they are.
            let block = if to.dtype == DType::F32 { &vectors } else { &weights };
            let bytes = Bytes::new(Arc::new(repeated(block, to.len() * to.dtype.size())));
            be.upload(to, role, &[WeightPart { bytes, dtype: to.dtype }])?;
        }
        be.reserve(self.arena.peak())?;
        for &to in &self.inputs {
            // Only some rows come from the host; the device doubles them until all are there.
            let mut filled = (PERIOD / to.cols).clamp(1, to.rows);
            be.write(to.rows(0..filled), HostData::F32(&repeated(&noise, filled * to.cols)))?;
            while filled < to.rows {
                let more = filled.min(to.rows - filled);
                be.run(Op::Copy { out: to.rows(filled..filled + more), x: to.rows(0..more) })?;
                filled += more;
            }
        }
        for (set, &(to, below)) in self.ids.iter().enumerate() {
            let ids: Vec<u32> = (0..to.len()).map(|i| ((set * to.len() + i) * 7919 % below) as u32).collect();
            be.write(to, HostData::U32(&ids))?;
        }
        be.synchronize()
    }
}

/// As many values as asked for, from a block that starts anew at its end.
fn repeated<T: Copy>(block: &[T], len: usize) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    while values.len() < len {
        values.extend_from_slice(&block[..block.len().min(len - values.len())]);
    }
    values
}

/// Values in -1..1 from a small generator.
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
    fn work_is_what_has_to_be_done() {
        let all = rows(Scale::Klein, Precision::Bf16).unwrap();
        let of = |name: &str, shape: &str| {
            all.iter().find(|r| r.name == name && r.shape == shape).unwrap_or_else(|| panic!("{name} {shape}")).work
        };
        assert_eq!(of("qkv_mlp", "4608x27648x3072").flops, 2 * 4608 * 27_648 * 3072);
        assert_eq!(of("attention", "4608 tokens, 24 heads of 128").flops, 4 * 4608 * 4608 * 3072);
        // Read and written once, with a weight; rows of the table, not the table; in place; twice where statistics are not given.
        assert_eq!(of("rms_norm", "512x2560").bytes, 2 * 2 * 512 * 2560 + 4 * 2560);
        assert_eq!(of("embed", "512x2560 of 151936").bytes, 2 * 2 * 512 * 2560 + 4 * 512);
        assert_eq!(of("euler", "4096x128").bytes, 3 * 4 * 4096 * 128);
        assert_eq!(of("group_norm", "128x128, 512 channels").bytes, 3 * 2 * 128 * 128 * 512 + 2 * 4 * 512);
        for (name, memory) in [("linear_swiglu", false), ("conv", false), ("layer_norm_modulate", true), ("pixels", true)] {
            assert_eq!(all.iter().find(|r| r.name == name).unwrap().work.bound_by_memory(), memory, "{name}");
        }
        assert!(of("linear", "1x18432x3072").bound_by_memory() && of("linear", "4096x128x3072").bound_by_memory());
        assert!(of("conv", "1024x1024, 128 to 3").bound_by_memory());
    }

    /// Rows, not just descriptors: every one of them runs.
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
    fn enough_sets_to_be_cold() {
        assert_eq!([1 << 30, 64 << 20, 32 << 20, 1 << 10].map(|bytes| Protocol::FULL.sets(bytes)), [3, 4, 8, 64]);
        assert_eq!(copy_shape(4 * 3072 * 100), (100, 3072));
        assert_eq!(copy_shape(40), (1, 10));
        assert_eq!((median(&[3.0, 1.0]), median(&[3.0, 1.0, 2.0]), median(&[])), (2.0, 2.0, 0.0));
        assert!((spread(&[1.0, 2.0, 2.0, 2.0, 3.0])).abs() < 1e-9);
    }
}
