//! Times the CPU ops at the shapes of klein 4B: `cargo bench --bench kernels -- [FILTER] [--json FILE]`.
//!
//! A row gives the shape, the median time, the spread, the rate and the number of runs. What a rate counts comes from the op
//! itself: [`Op::flops`] where it multiplies matrices, else the bytes of its operands. No model is needed; operands hold
//! pseudo-random values. How a run is recorded is in `bench/README.md`.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use clap::Parser;
use kiln::backend::cpu::Cpu;
use kiln::backend::{
    Backend, Conv, GroupNorm, HostData, KeyValues, Linear, Modulated, Op, Product, Projection, QkNorm, Role, Rope, RopeStyle,
    Sampling, WeightPart,
};
use kiln::error::{Error, Result};
use kiln::tensor::{Arena, Bytes, DType, Region, Tensor};
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Times the CPU ops at the shapes of klein 4B.
#[derive(Parser)]
#[command(bin_name = "cargo bench --bench kernels --")]
struct Args {
    /// Only rows whose name contains this.
    filter: Option<String>,
    /// Also write one JSON object per row, with every run's seconds.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Worker threads (0: one per core).
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Time one run of the row with exactly this name for every line on stdin, and answer with its seconds. For
    /// comparisons that alternate with another program.
    #[arg(long, value_name = "ROW", conflicts_with_all = ["filter", "json"])]
    serve: Option<String>,
    /// Passed by `cargo bench`; means nothing here.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Runs before the clock counts: caches fill, pages are touched, threads wake up.
const WARM_UP: usize = 2;
/// A row is run until both are reached, or `MOST_RUNS`.
const FEWEST_RUNS: usize = 5;
const LEAST_TIME: Duration = Duration::from_millis(600);
const MOST_RUNS: usize = 30;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let json = args.json.map(|path| std::fs::File::create(&path).map(|file| (path, file))).transpose()?;
    let mode = match &args.serve {
        Some(row) => Mode::Serve(row.clone()),
        None => Mode::Table(args.filter.clone().unwrap_or_default()),
    };
    let mut bench = Bench { mode, json, threads: args.threads, rows: 0 };
    rows(&mut bench)?;
    if bench.rows == 0 {
        return Err("no row has that name".into());
    }
    Ok(())
}

// ------------------------------------------------------------------------------------------------------------------- rows

/// Width of the 4B transformer, its heads, and the SwiGLU half of a single block.
const WIDTH: usize = 3072;
const HEAD_DIM: usize = 128;
const MLP: usize = 9216;

fn rows(bench: &mut Bench) -> Result<()> {
    // Several blocks of the product in both directions, so that their seams are measured too.
    bench.row("linear", |m| {
        let (x, out, w) = (m.activations(1536, WIDTH)?, m.activations(1536, WIDTH)?, m.linear(WIDTH, WIDTH)?);
        m.time("1536x3072 by 3072x3072", Op::Linear(&[Product { out, x, w: &w }]))
    })?;
    // The modulation: one row, bound by reading the weight.
    bench.row("linear_row", |m| {
        let (x, out, w) = (m.activations(1, WIDTH)?, m.activations(1, 6 * WIDTH)?, m.linear(6 * WIDTH, WIDTH)?);
        m.time("1x3072 by 3072x18432", Op::Linear(&[Product { out, x, w: &w }]))
    })?;
    bench.row("qkv_mlp", |m| {
        let tokens = 512;
        let w = m.linear(3 * WIDTH + 2 * MLP, WIDTH)?;
        let norm = QkNorm { q: m.vector(HEAD_DIM)?, k: m.vector(HEAD_DIM)?, eps: 1e-6 };
        let rope = Rope { table: m.working(tokens, HEAD_DIM, DType::F32)?, style: RopeStyle::Interleaved };
        let (x, mlp) = (m.activations(tokens, WIDTH)?, Some(m.activations(tokens, MLP)?));
        let (q, k, v) = (m.activations(tokens, WIDTH)?, m.activations(tokens, WIDTH)?, m.activations(tokens, WIDTH)?);
        m.time("512x3072 by 3072x27648", Op::Qkv(&[Projection { x, w: &w, norm, rope, q: Some(q), k, v, mlp }]))
    })?;
    bench.row("attention", |m| {
        let mut t = || m.activations(1024, WIDTH);
        let (out, q, k, v) = (t()?, t()?, t()?, t()?);
        let kv = [KeyValues { k, v }];
        m.time("24 heads, 1024 tokens", Op::Attention { out, q, kv: &kv, head_dim: HEAD_DIM, causal: false })
    })?;
    bench.row("conv", |m| {
        let (side, channels) = (64, 512);
        let w = Conv { weight: m.weight(channels, 9 * channels, Role::Conv)?, bias: m.vector(channels)? };
        let (x, out) = (m.activations(side * side, channels)?, m.activations(side * side, channels)?);
        let sampling = Sampling::Same;
        let op = Op::Conv { out, x, w: &w, width: side, height: side, sampling, residual: None, stats: None };
        m.time("512 to 512 channels at 64x64", op)
    })?;
    bench.row("rms_norm", |m| {
        let (x, out, weight) = (m.activations(4096, WIDTH)?, m.activations(4096, WIDTH)?, m.vector(WIDTH)?);
        m.time("4096x3072", Op::RmsNorm { out, x, weight, eps: 1e-6 })
    })?;
    bench.row("layer_norm_modulate", |m| {
        let (x, out) = (m.activations(4096, WIDTH)?, m.activations(4096, WIDTH)?);
        let (shift, scale) = (m.activations(1, WIDTH)?, m.activations(1, WIDTH)?);
        m.time("4096x3072", Op::LayerNormModulate { streams: &[Modulated { out, x, shift, scale }], eps: 1e-6 })
    })?;
    bench.row("group_norm", |m| {
        let norm = GroupNorm { weight: m.vector(512)?, bias: m.vector(512)?, groups: 32, eps: 1e-6 };
        let (x, out) = (m.activations(128 * 128, 512)?, m.activations(128 * 128, 512)?);
        m.time("512 channels at 128x128, silu", Op::GroupNorm { out, x, norm: &norm, stats: None, silu: true })
    })
}

// ---------------------------------------------------------------------------------------------------------------- operands

/// A backend with the operands of one row: descriptors first, memory when the row is timed.
struct Machine<'a> {
    bench: &'a mut Bench,
    name: &'static str,
    cpu: Cpu,
    weights: Arena,
    arena: Arena,
    working: Vec<Tensor>,
}

impl Machine<'_> {
    fn working(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        let tensor = self.arena.alloc(rows, cols, dtype)?;
        self.working.push(tensor);
        Ok(tensor)
    }

    fn activations(&mut self, rows: usize, cols: usize) -> Result<Tensor> {
        self.working(rows, cols, DType::Bf16)
    }

    fn weight(&mut self, rows: usize, cols: usize, role: Role) -> Result<Tensor> {
        let to = self.weights.alloc(rows, cols, DType::Bf16)?;
        let bytes: Vec<u8> = noise(to.len()).iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        self.cpu.upload(to, role, &[WeightPart { bytes: Bytes::new(Arc::new(bytes)), dtype: DType::Bf16 }])?;
        Ok(to)
    }

    fn linear(&mut self, rows: usize, cols: usize) -> Result<Linear> {
        Ok(Linear { weight: self.weight(rows, cols, Role::Linear)?, bias: None })
    }

    fn vector(&mut self, cols: usize) -> Result<Tensor> {
        let to = self.weights.alloc(1, cols, DType::F32)?;
        let bytes: Vec<u8> = noise(cols).iter().flat_map(|v| v.to_le_bytes()).collect();
        self.cpu.upload(to, Role::Vector, &[WeightPart { bytes: Bytes::new(Arc::new(bytes)), dtype: DType::F32 }])?;
        Ok(to)
    }

    /// Fills working memory, then times the op as the mode asks.
    fn time(&mut self, shape: &str, op: Op<'_>) -> Result<()> {
        self.cpu.reserve(self.arena.peak())?;
        for &tensor in &self.working {
            self.cpu.write(tensor, HostData::F32(&noise(tensor.len())))?;
        }
        for _ in 0..WARM_UP {
            self.cpu.run(op)?;
        }
        let cpu = &mut self.cpu;
        let mut once = || {
            let start = Instant::now();
            cpu.run(op)?;
            Ok(start.elapsed().as_secs_f64())
        };
        self.bench.measure(self.name, shape, Work::of(&op), &mut once)
    }
}

/// Values in -1..1 from a small generator.
fn noise(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

// ------------------------------------------------------------------------------------------------------------------ timing

/// What a row's rate counts.
#[derive(Clone, Copy)]
enum Work {
    Flops(u64),
    Bytes(u64),
}

impl Work {
    /// Arithmetic where the op has enough of it for each byte it moves to be bound by it, else bytes.
    fn of(op: &Op<'_>) -> Self {
        let mut bytes = 0;
        op.operands(&mut |t, _| bytes += (t.len() * t.dtype.size()) as u64);
        if op.flops() > 8 * bytes { Self::Flops(op.flops()) } else { Self::Bytes(bytes) }
    }

    fn rate(self, seconds: f64) -> (f64, &'static str) {
        match self {
            Self::Flops(n) => (n as f64 / seconds / 1e9, "GFLOP/s"),
            Self::Bytes(n) => (n as f64 / seconds / 1e9, "GB/s"),
        }
    }
}

enum Mode {
    /// Print the rows whose name contains this.
    Table(String),
    /// Time one row on request.
    Serve(String),
}

struct Bench {
    mode: Mode,
    json: Option<(PathBuf, std::fs::File)>,
    threads: usize,
    rows: usize,
}

impl Bench {
    /// Sets a row up and times it, if it is wanted.
    fn row(&mut self, name: &'static str, body: impl FnOnce(&mut Machine<'_>) -> Result<()>) -> Result<()> {
        let wanted = match &self.mode {
            Mode::Table(filter) => name.contains(filter.as_str()),
            Mode::Serve(row) => name == row,
        };
        if !wanted {
            return Ok(());
        }
        self.rows += 1;
        let cpu = Cpu::new(self.threads, Arc::new(AtomicBool::new(false)))?;
        let (weights, arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        body(&mut Machine { bench: self, name, cpu, weights, arena, working: Vec::new() })
    }

    fn measure(&mut self, name: &str, shape: &str, work: Work, once: &mut dyn FnMut() -> Result<f64>) -> Result<()> {
        if matches!(self.mode, Mode::Serve(_)) {
            println!("ready {}", work.rate(1e-9).0);
            for _line in std::io::stdin().lock().lines() {
                println!("{}", once()?);
            }
            return Ok(());
        }
        let (mut runs, start) = (Vec::new(), Instant::now());
        while runs.len() < FEWEST_RUNS || (start.elapsed() < LEAST_TIME && runs.len() < MOST_RUNS) {
            runs.push(once()?);
        }
        let (median, spread) = summary(&runs);
        let (rate, unit) = work.rate(median);
        println!(
            "{name:<20} {shape:<29} | {:>8.2} ms ±{:>4.1}% | {rate:>6.1} {unit:<7} | {:>2} runs",
            median * 1e3,
            spread * 100.0,
            runs.len()
        );
        if let Some((path, file)) = &mut self.json {
            let row = serde_json::json!({
                "name": name, "shape": shape, "threads": self.threads, "median_s": median, "spread": spread,
                "rate": rate, "unit": unit, "runs_s": runs,
            });
            writeln!(file, "{row}").map_err(|source| Error::Write { path: path.clone(), source })?;
        }
        Ok(())
    }
}

/// The median, and how far the quartiles lie from it on either side, at most, as a share of it.
fn summary(runs: &[f64]) -> (f64, f64) {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |q: f64| sorted[((sorted.len() - 1) as f64 * q).round() as usize];
    let median = at(0.5);
    (median, (at(0.75) - median).max(median - at(0.25)) / median)
}
