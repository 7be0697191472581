//! Benchmarks single ops on any backend, for the program's kernel benchmark and for `bench/kernels.rs`.
//!
//! A [`Row`] is an op at a shape. Its rate is computed from the op itself: from [`Op::flops`] if the op is compute-bound, or else from the
//! bytes that it has to move. Operands hold pseudo-random values. Several sets of operands are used in rotation, so caches are cold. All
//! sets together are one step, which a GPU captures as a CUDA graph and replays: host overhead is not timed. `bench/README.md` describes
//! the protocol.

mod operands;
mod rows;

pub use rows::{Scale, rows};

use crate::backend::{Access, Backend, Op, OpKind, StepKey};
use crate::error::{Error, Result};
use crate::tensor::{DType, Region};
use operands::{Operands, RowFormat};
use serde::Serialize;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The measurement protocol.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    /// Number of timed batches of a row, each followed by a batch of its ceiling.
    pub rounds: usize,
    /// Minimum duration of a batch.
    pub batch: Duration,
    /// Minimum total size of all operand sets, in bytes. There are at least three and at most 64 sets.
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
    /// The kind of the op.
    pub op: OpKind,
    /// The shape, for display.
    pub shape: String,
    /// The format of what it multiplies or stores: plain values in the precision of activations, `W8A8` (e4m3 weights and inputs), `W8A16`
    /// (e4m3 weights), `W4A4` (NVFP4 weights and inputs), `W4A16` (NVFP4 weights), `e4m3` or `NVFP4`.
    pub format: &'static str,
    /// The work of the op.
    pub work: Work,
    formats: RowFormat,
    make: Maker,
}

/// The work of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Floating-point operations of its GEMMs, convolutions or attention.
    pub flops: u64,
    /// The part of `flops` that multiplies e4m3 by e4m3.
    pub flops_e4m3: u64,
    /// The part of `flops` that multiplies e2m1 by e2m1.
    pub flops_e2m1: u64,
    /// Bytes that it must read and write, each operand once.
    pub bytes: u64,
}

/// The format name of an op with quantized operands.
fn format_of(op: &Op<'_>) -> Option<&'static str> {
    let (mut weights, mut inputs, mut results) = (None, None, None);
    op.operands(&mut |t, access| {
        let to = match (t.region, access) {
            _ if !t.dtype.is_quantized() => return,
            (Region::Weights | Region::Adapters, _) => &mut weights,
            (Region::Arena | Region::Cache, Access::Read) => &mut inputs,
            (Region::Arena | Region::Cache, _) => &mut results,
        };
        *to = Some(t.dtype);
    });
    match (weights, inputs) {
        (Some(DType::E2m1), Some(_)) => Some("W4A4"),
        (Some(DType::E2m1), None) => Some("W4A16"),
        (Some(_), Some(_)) => Some("W8A8"),
        (Some(_), None) => Some("W8A16"),
        (None, _) => inputs.or(results).map(|dtype| if dtype == DType::E2m1 { "NVFP4" } else { "e4m3" }),
    }
}

/// The peak rates of a machine's tensor cores, in FLOP per second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Peaks {
    /// bf16 by bf16.
    #[serde(rename = "tensor_flops")]
    pub bf16: Option<f64>,
    /// e4m3 by e4m3.
    #[serde(rename = "tensor_flops_e4m3")]
    pub e4m3: Option<f64>,
    /// e2m1 by e2m1.
    #[serde(rename = "tensor_flops_e2m1")]
    pub e2m1: Option<f64>,
}

impl Peaks {
    /// The peak rate of work that mixes types, if the peaks of these types are known.
    fn of(self, work: Work) -> Option<f64> {
        let seconds = |flops: u64, peak: Option<f64>| if flops == 0 { Some(0.0) } else { Some(flops as f64 / peak?) };
        let quantized = seconds(work.flops_e4m3, self.e4m3)? + seconds(work.flops_e2m1, self.e2m1)?;
        let least = seconds(work.flops - work.flops_e4m3 - work.flops_e2m1, self.bf16)? + quantized;
        (least > 0.0).then(|| work.flops as f64 / least)
    }
}

/// Arithmetic intensity in FLOP per byte below which an op is memory-bound (the ridge point of the roofline model, Williams et
/// al. 2009). GPUs that kiln runs on have ridge points of 100 to 300.
const BALANCE: u64 = 160;

impl Work {
    fn of(op: &Op<'_>) -> Self {
        let mut bytes = 0;
        op.operands(&mut |t, access| bytes += t.bytes() * if access == Access::Update { 2 } else { 1 });
        // Computing statistics takes a pass over the whole input before the first value can be written.
        if let Op::GroupNorm { x, stats: None, .. } = *op {
            bytes += x.bytes();
        }
        let flops = op.flops();
        let (flops_e4m3, flops_e2m1) = match (*op, format_of(op)) {
            // Scores are half of the operations. The other half, probabilities by values, is not quantized.
            (Op::Attention { q, .. }, _) if q.dtype == DType::E4m3 => (flops / 2, 0),
            (_, Some("W8A8")) => (flops, 0),
            (_, Some("W4A4")) => (0, flops),
            _ => (0, 0),
        };
        Self { flops, flops_e4m3, flops_e2m1, bytes }
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
    fn new(shape: String, formats: RowFormat, make: impl Fn(&mut Operands) -> Result<Call> + 'static) -> Result<Self> {
        let plain = formats.activations.name();
        let mut found = None;
        make(&mut Operands::new(formats))?(&mut |op| {
            op.check()?;
            found = Some((op.kind(), format_of(&op).unwrap_or(plain), Work::of(&op)));
            Ok(())
        })?;
        let (op, format, work) = found.ok_or_else(|| Error::Op { op: "bench", what: format!("no op of {shape}") })?;
        Ok(Self { op, shape, format, work, formats, make: Box::new(make) })
    }

    /// Allocates `sets` operand sets, or as many as fit in memory.
    pub fn prepare(&self, be: &mut dyn Backend, sets: usize) -> Result<Prepared> {
        // The previous row's memory is freed first, so that it counts as available.
        be.reserve(Region::Weights, 0)?;
        be.reserve(Region::Arena, 0)?;
        let mut sets = sets.max(1);
        loop {
            let mut operands = Operands::new(self.formats);
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
            if sets > 1 && be.available()?.is_some_and(|have| operands.bytes() > have) {
                sets -= 1;
                continue;
            }
            operands.fill(be)?;
            return Ok(Prepared { calls, copies, copied });
        }
    }

    /// Times the row. A memory-bound row alternates with a copy of as many bytes.
    pub fn measure(&self, be: &mut dyn Backend, protocol: &Protocol) -> Result<Figure> {
        let prepared = self.prepare(be, protocol.sets(self.work.bytes))?;
        let launches =
            |be: &mut dyn Backend| -> HashMap<_, _> { be.cuda().into_iter().flat_map(|cuda| cuda.launches()).collect() };
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
        let scale = prepared.copied as f64 / self.work.bytes.max(1) as f64;
        let ratios: Vec<f64> = seconds.iter().zip(&copy_seconds).map(|(row, copy)| copy / row / scale).collect();
        Ok(Figure {
            op: self.op.name(),
            shape: self.shape.clone(),
            format: self.format,
            kernels,
            work: self.work,
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

/// The measurement of a row, with the fields of the JSON output.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The op.
    pub op: &'static str,
    /// Its shape.
    pub shape: String,
    /// The format of what it multiplies or stores, see [`Row::format`].
    pub format: &'static str,
    /// The kernels that it launched.
    pub kernels: Vec<&'static str>,
    /// The work of a call.
    #[serde(flatten)]
    pub work: Work,
    /// Number of operand sets.
    pub sets: usize,
    /// Number of calls per batch.
    pub calls: usize,
    /// Median of `seconds`.
    pub median_s: f64,
    /// The larger distance between a quartile and the median, relative to the median.
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
    /// Adds the speed relative to the peak rates of the operand types, if the row is compute-bound.
    pub fn held_to(mut self, peaks: Peaks) -> Self {
        let work = self.work;
        if !work.bound_by_memory() {
            self.of_tensor_cores = peaks.of(work).map(|most| work.flops as f64 / self.median_s / most);
        }
        self
    }

    /// The row's line in the printed table.
    pub fn line(&self) -> String {
        let (rate, unit) = self.work.rate(self.median_s);
        let (rate, prefix) = if rate >= 1e12 { (rate / 1e12, "T") } else { (rate / 1e9, "G") };
        let share = match (self.of_copy, self.of_tensor_cores) {
            (Some(share), _) => format!("{:>3.0} % of copy", 100.0 * share),
            (_, Some(share)) => format!("{:>3.0} % of peak", 100.0 * share),
            _ => String::new(),
        };
        let line = format!(
            "{:<21} {:<40} {:<5} {:>11.1} us ±{:>4.1} % {rate:>7.1} {:<7} {share:<13} {}",
            self.op,
            self.shape,
            self.format,
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

/// The larger distance between a quartile and the median, relative to the median.
fn spread(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |q: f64| sorted[((sorted.len() - 1) as f64 * q).round() as usize];
    let median = median(values);
    (at(0.75) - median).max(median - at(0.25)) / median
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::GemmFormats;
    use crate::backend::cpu::Cpu;
    use crate::tensor::Precision;
    use std::sync::Arc;

    #[test]
    fn work_counts_flops_and_minimal_bytes() {
        let all = rows(Scale::Klein, Precision::Bf16, GemmFormats::ALL).unwrap();
        let in_format = |name: &str, shape: &str, format: &str| {
            let found = all.iter().find(|r| (r.op.name(), r.shape.as_str(), r.format) == (name, shape, format));
            found.unwrap_or_else(|| panic!("{name} {shape} {format}")).work
        };
        let of = |name: &str, shape: &str| in_format(name, shape, "bf16");
        assert_eq!(of("qkv_mlp", "4608x27648x3072").flops, 2 * 4608 * 27_648 * 3072);
        assert_eq!(of("attention", "4608 tokens, 24 heads of 128").flops, 4 * 4608 * 4608 * 3072);
        // Operands are read and written once. Euler updates in place. Group norm reads its input twice without given statistics.
        assert_eq!(of("rms_norm", "512x2560").bytes, 2 * 2 * 512 * 2560 + 4 * 2560);
        assert_eq!(of("euler", "4096x128").bytes, 3 * 4 * 4096 * 128);
        assert_eq!(of("group_norm", "128x128, 512 channels").bytes, 3 * 2 * 128 * 128 * 512 + 2 * 4 * 512);
        for (name, memory) in [("linear_swiglu", false), ("conv", false), ("layer_norm_modulate", true), ("pixels", true)] {
            assert_eq!(all.iter().find(|r| r.op.name() == name).unwrap().work.bound_by_memory(), memory, "{name}");
        }
        assert!(of("linear", "1x18432x3072").bound_by_memory() && of("linear", "4096x128x3072").bound_by_memory());
        assert!(of("norm_conv", "1024x1024, 128 to 3, stats given").bound_by_memory());
        // Every output pixel of an upsampling convolution has four taps. A shortcut counts as one more.
        assert_eq!(of("conv", "128x128, 512 to 512, up, stats").flops, 2 * 256 * 256 * 4 * 512 * 512);
        let shortcut = of("conv", "1024x1024, 128 to 128, shortcut of 256, stats");
        assert_eq!(shortcut.flops, 2 * 1024 * 1024 * (9 * 128 + 256) * 128);
        // e4m3 has half the bytes of bf16. Products are counted by their type: half of attention's are e4m3.
        let norm = in_format("layer_norm_modulate", "4608x3072", "e4m3");
        assert_eq!((norm.flops, norm.bytes), (0, 3 * 4608 * 3072 + 4 * 3072));
        let attention = in_format("attention", "4608 tokens, 24 heads of 128", "e4m3");
        assert_eq!((attention.flops, attention.bytes), (4 * 4608 * 4608 * 3072, 5 * 4608 * 3072));
        assert_eq!(attention.flops_e4m3, attention.flops / 2);
        let gated = in_format("linear_gate_residual", "4608x3072x12288", "W8A8");
        assert_eq!(gated.flops_e4m3, gated.flops);
        assert_eq!(gated.bytes, 4608 * 12_288 + 3072 * 12_288 + 2 * 2 * 4608 * 3072 + 2 * 3072);
        let text = in_format("linear_swiglu", "512x19456x2560", "W8A16");
        assert_eq!((text.flops, text.flops_e4m3), (2 * 512 * 19_456 * 2560, 0));
        assert_eq!(text.bytes, 19_456 * 2560 + 2 * 512 * 2560 + 2 * 512 * 9728);
        let both = in_format("linear_gate_residual", "4608x3072x12288", "W4A4");
        assert_eq!((both.flops_e2m1, both.flops_e4m3), (both.flops, 0));
        assert_eq!(both.bytes, (4608 + 3072) * 12_288 / 16 * 9 + 2 * 2 * 4608 * 3072 + 2 * 3072);
        // NVFP4 weights have four and a half bits each. Products with bf16 inputs count as bf16.
        for (width, mlp) in [(3072, 9216), (4096, 12_288)] {
            let inner = width + mlp;
            let gated = in_format("linear_gate_residual", &format!("4608x{width}x{inner}"), "W4A16");
            assert_eq!((gated.flops, gated.flops_e4m3), (2 * 4608 * width * inner, 0));
            assert_eq!(gated.bytes, width * inner / 16 * 9 + 2 * 4608 * inner + 2 * 2 * 4608 * width + 2 * width);
            assert!(!in_format("qkv_mlp", &format!("4608x{}x{width}", 3 * width + 2 * mlp), "W4A16").bound_by_memory());
        }
    }

    #[test]
    fn a_rate_is_held_to_the_peak_of_its_types() {
        let peaks = Peaks { bf16: Some(1e15), e4m3: Some(2e15), e2m1: Some(4e15) };
        let of = |flops_e4m3| peaks.of(Work { flops: 100, flops_e4m3, flops_e2m1: 0, bytes: 0 }).map(|most| most / 1e12);
        assert_eq!(peaks.of(Work { flops: 100, flops_e4m3: 0, flops_e2m1: 100, bytes: 0 }), Some(4e15));
        assert_eq!([of(0), of(100)], [Some(1000.0), Some(2000.0)]);
        // Half of the work at twice the rate takes three quarters of the time.
        assert!((of(50).unwrap() - 4000.0 / 3.0).abs() < 1e-6);
        let unknown = Peaks { e4m3: None, ..peaks };
        let work = |flops_e4m3| Work { flops: 100, flops_e4m3, flops_e2m1: 0, bytes: 0 };
        assert_eq!([unknown.of(work(50)), Peaks::default().of(work(0))], [None; 2]);
        assert_eq!(unknown.of(work(0)), Some(1e15));
    }

    /// Every op has a row, and every row runs.
    #[test]
    fn every_op_has_a_row_that_runs() {
        let mut cpu = Cpu::new(0, Arc::default()).unwrap();
        for precision in [Precision::Bf16, Precision::F32] {
            let formats = cpu.gemm_formats();
            let all = rows(Scale::Quick, precision, formats).unwrap();
            let in_format = |format: &str| all.iter().filter(|row| row.format == format).count();
            let counts = ["W8A8", "W8A16", "e4m3", "W4A4", "W4A16", "NVFP4"].map(in_format);
            assert_eq!(counts, if precision == Precision::Bf16 { [7, 4, 3, 7, 8, 2] } else { [0; 6] });
            let quantized: usize = counts.iter().sum();
            for op in OpKind::ALL {
                assert!(all.iter().any(|row| row.op == *op), "{op:?}");
            }
            let klein = rows(Scale::Klein, precision, formats).unwrap();
            let ops = |rows: &[Row]| rows.iter().map(|row| (row.op, row.format)).collect::<Vec<_>>();
            assert_eq!(ops(&klein), ops(&all), "the same ops at other sizes");
            let plain = rows(Scale::Quick, precision, GemmFormats::NONE).unwrap();
            assert_eq!(plain.len(), all.len() - quantized);
            for row in &all {
                let figure = row.measure(&mut cpu, &Protocol::QUICK).unwrap().held_to(Peaks {
                    bf16: Some(1e12),
                    e4m3: Some(2e12),
                    e2m1: Some(4e12),
                });
                assert_eq!((figure.sets, figure.seconds.len()), (3, 3), "{:?}", row.op);
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
