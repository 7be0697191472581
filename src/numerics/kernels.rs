//! The arithmetic of the transformer's ops in f32, in the simplest form that is still fast. GEMMs run through the `gemm` crate,
//! on operands that are decoded tile by tile. Everything else loops over rows. Scratch memory is bounded for operands of any
//! size. Work is split by shapes alone, so results do not depend on the number of threads.

use crate::RopeStyle;
use crate::math::{self, exp, maximum, sum};
use crate::view::{In, Out, Strided, matmul};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows of one task in row-wise ops.
const ROWS_PER_TASK: usize = 16;

/// Runs tasks on all threads. Each thread reuses one scratch buffer for its tasks: the buffers are so large that page faults on a
/// new one would cost as much as the arithmetic.
pub fn for_tasks<T: Send, S: Default>(tasks: Vec<T>, body: impl Fn(&mut S, T) + Sync) {
    let threads = rayon::current_num_threads().min(tasks.len());
    let queue = Mutex::new(tasks.into_iter());
    (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
        let mut scratch = S::default();
        loop {
            let task = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(task) = task else { break };
            body(&mut scratch, task);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------- row-wise

/// Calls `body(row, buffer, part, local_row)` for every row of `out`, in parallel. `part` is the part of `out` that holds the
/// row, as its row `local_row`; `buffer` is scratch of `width` values.
pub fn for_rows(out: Out<'_>, width: usize, body: impl Fn(usize, &mut [f32], &mut Out<'_>, usize) + Sync) {
    out.split_rows(ROWS_PER_TASK).into_par_iter().for_each_init(
        || vec![0.0; width],
        |buffer, (first, mut piece)| {
            if piece.watch().is_stopped() {
                return;
            }
            for local in 0..piece.rows {
                body(first + local, buffer, &mut piece, local);
            }
        },
    );
}

fn map(out: Out<'_>, x: In<'_>, f: impl Fn(f32) -> f32 + Sync) {
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        buffer.iter_mut().for_each(|v| *v = f(*v));
        out.store(local, 0, buffer);
    });
}

pub fn copy(out: Out<'_>, x: In<'_>) {
    map(out, x, |v| v);
}

pub fn silu(out: Out<'_>, x: In<'_>) {
    map(out, x, math::silu);
}

pub fn pixels(out: Out<'_>, x: In<'_>) {
    map(out, x, math::to_byte);
}

fn rms_scale(row: &[f32], eps: f32) -> f32 {
    let square = sum(row, |v| f64::from(v) * f64::from(v));
    (1.0 / (square / row.len() as f64 + f64::from(eps)).sqrt()) as f32
}

pub fn rms_norm(out: Out<'_>, x: In<'_>, weight: In<'_>, eps: f32) {
    let weight = weight.row_vec(0);
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        let scale = rms_scale(buffer, eps);
        buffer.iter_mut().zip(&weight).for_each(|(v, w)| *v = *v * scale * w);
        out.store(local, 0, buffer);
    });
}

pub fn layer_norm_modulate(out: Out<'_>, x: In<'_>, shift: In<'_>, scale: In<'_>, eps: f32) {
    let (shift, scale) = (shift.row_vec(0), scale.row_vec(0));
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        let n = buffer.len() as f64;
        let mean = sum(buffer, f64::from) / n;
        let var = sum(buffer, |v| (f64::from(v) - mean).powi(2)) / n;
        let (mean, rstd) = (mean as f32, (1.0 / (var + f64::from(eps)).sqrt()) as f32);
        for ((v, scale), shift) in buffer.iter_mut().zip(&scale).zip(&shift) {
            *v = (1.0 + scale) * ((*v - mean) * rstd) + shift;
        }
        out.store(local, 0, buffer);
    });
}

pub fn euler(latents: Out<'_>, velocity: In<'_>, dt: f32) {
    for_rows(latents, 2 * velocity.cols, |r, buffer, out, local| {
        let (x, v) = buffer.split_at_mut(velocity.cols);
        out.load(local, 0, x);
        velocity.load(r, 0, v);
        x.iter_mut().zip(v).for_each(|(x, v)| *x += dt * *v);
        out.store(local, 0, x);
    });
}

pub fn renoise(latents: Out<'_>, init: In<'_>, noise: In<'_>, keep: Option<In<'_>>, sigma: f32) {
    for_rows(latents, 2 * init.cols, |r, buffer, out, local| {
        let mut flag = [1.0];
        if let Some(keep) = &keep {
            keep.load(r, 0, &mut flag);
        }
        if flag[0] == 0.0 {
            return;
        }
        let (x, z) = buffer.split_at_mut(init.cols);
        init.load(r, 0, x);
        noise.load(r, 0, z);
        x.iter_mut().zip(z).for_each(|(x, z)| *x = (1.0 - sigma) * *x + sigma * *z);
        out.store(local, 0, x);
    });
}

pub fn guidance(out: Out<'_>, cond: In<'_>, uncond: In<'_>, scale: f32) {
    for_rows(out, 2 * cond.cols, |r, buffer, out, local| {
        let (c, u) = buffer.split_at_mut(cond.cols);
        cond.load(r, 0, c);
        uncond.load(r, 0, u);
        c.iter_mut().zip(u).for_each(|(c, u)| *c = *u + scale * (*c - *u));
        out.store(local, 0, c);
    });
}

/// The results of `find` on each row.
fn of_rows<'a, T: Send>(x: In<'a>, find: impl Fn(&[f32]) -> T + Send + Sync + 'a) -> impl ParallelIterator<Item = T> {
    let (rows, cols) = ((0..x.rows).into_par_iter().with_min_len(ROWS_PER_TASK), x.cols);
    rows.map_init(
        move || vec![0.0; cols],
        move |buffer, r| {
            x.load(r, 0, buffer);
            find(buffer)
        },
    )
}

pub fn non_finite(mut count: Out<'_>, x: In<'_>) {
    let found = of_rows(x, |row| row.iter().filter(|v| !v.is_finite()).count());
    count.store(0, 0, &[found.sum::<usize>() as f32]);
}

pub fn largest_magnitude(mut largest: Out<'_>, x: In<'_>) {
    let found = of_rows(x, |row| row.iter().map(|v| v.abs().to_bits()).fold(0, u32::max));
    let mut before = [0.0];
    largest.load(0, 0, &mut before);
    let most = found.reduce(|| 0, u32::max).max(before[0].to_bits());
    largest.store(0, 0, &[f32::from_bits(most)]);
}

// ----------------------------------------------------------------------------------------------------------------- GEMM

/// Largest M of an output tile: large enough to amortize decoding the weight again for each tile.
const TILE_M: usize = 1024;
/// Largest N of an output tile: small enough that the decoded weight rows stay in the core's cache, and a multiple of the 64
/// columns that the `gemm` crate processes at once.
const TILE_N: usize = 192;
/// Most values of operand A that are decoded at once, which take 64 MiB.
const MAX_DECODED_A: usize = 16 << 20;

/// Selects the weight rows that the columns of an output are computed from.
#[derive(Clone, Copy)]
struct WeightRows {
    /// The weight row of the output's first column.
    first: usize,
    /// For SwiGLU outputs: the distance in rows from the gate row of a column to its up row.
    up: Option<usize>,
    /// Number of consecutive columns that must stay in one tile, such as the columns of a head.
    unit: usize,
}

/// One tile of a GEMM, for the epilogue.
struct Tile<'a> {
    /// Rows of operand A.
    rows: Range<usize>,
    /// Columns of the output.
    cols: Range<usize>,
    /// The accumulated values.
    values: &'a mut [f32],
    /// The accumulated values of the up rows, in the same shape; empty if there are no up rows.
    up: &'a [f32],
}

impl Tile<'_> {
    /// The rows of the tile, counted from its first.
    fn rows(&mut self) -> impl Iterator<Item = (usize, &mut [f32])> {
        self.values.chunks_exact_mut(self.cols.len()).enumerate()
    }
}

#[derive(Default)]
struct GemmScratch {
    b: Vec<f32>,
    values: Vec<f32>,
    up: Vec<f32>,
}

/// Decodes rows of a matrix.
fn decode(m: &In<'_>, rows: Range<usize>, to: &mut [f32]) {
    to.chunks_exact_mut(m.cols.max(1)).zip(rows).for_each(|(to, r)| m.load(r, 0, to));
}

/// The weights of a linear layer.
pub struct Layer<'a> {
    /// `[out, in]`.
    pub weight: In<'a>,
    /// `[1, out]`.
    pub bias: Option<In<'a>>,
    /// The matrices `[rank, in]` and `[out, rank]` of a LoRA branch.
    pub lora: Option<(In<'a>, In<'a>)>,
}

/// Operand A of a tile, and its product with the first matrix of the LoRA branch.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    a: Strided<'a>,
    down_out: Option<Strided<'a>>,
}

/// Computes one tile: `a` times the transpose of a range of weight rows. The rows are decoded into `b` unless they can be read in
/// place.
fn tile_nt(inputs: Inputs<'_>, layer: &Layer<'_>, range: Range<usize>, b: &mut Vec<f32>, out: &mut Vec<f32>) {
    out.resize(inputs.a.rows() * range.len(), 0.0);
    let mut add = |a: Strided<'_>, w: &In<'_>, accumulate: bool| {
        let direct = w.strided(range.clone(), 0..w.cols);
        if direct.is_none() {
            b.resize(range.len() * w.cols, 0.0);
            decode(w, range.clone(), b);
        }
        let b = direct.unwrap_or_else(|| Strided::new(b, range.len(), w.cols));
        matmul(out, a, b.transposed(), accumulate);
    };
    add(inputs.a, &layer.weight, false);
    if let (Some(down_out), Some((_, up))) = (inputs.down_out, &layer.lora) {
        add(down_out, up, true);
    }
}

/// Computes `x w^T` tile by tile and passes each tile to `epilogue` with the part of `out` it belongs to. One thread does all the
/// work of a tile, from decoding the weight to storing the result, so threads never wait for each other inside a GEMM.
fn gemm_nt(mut out: Out<'_>, x: &In<'_>, w: &Layer<'_>, weight_rows: WeightRows, epilogue: impl Fn(Tile<'_>, Out<'_>) + Sync) {
    let WeightRows { first, up, unit } = weight_rows;
    let step = (TILE_N / unit).max(1) * unit;
    let chunk = (MAX_DECODED_A / x.cols.max(1) / TILE_M).max(1) * TILE_M;
    let (mut decoded, mut down_out) = (Vec::new(), Vec::new());
    for start in (0..x.rows).step_by(chunk) {
        if out.watch().is_stopped() {
            return;
        }
        let rows = start..(start + chunk).min(x.rows);
        if x.strided(rows.clone(), 0..x.cols).is_none() {
            decoded.resize(rows.len() * x.cols, 0.0);
            decoded.par_chunks_mut(ROWS_PER_TASK * x.cols.max(1)).enumerate().for_each(|(i, to)| {
                decode(x, rows.start + i * ROWS_PER_TASK..rows.end, to);
            });
        }
        if let Some((down, _)) = &w.lora {
            let mut b = vec![0.0; down.rows * down.cols];
            decode(down, 0..down.rows, &mut b);
            let b = Strided::new(&b, down.rows, down.cols).transposed();
            let a = x.strided(rows.clone(), 0..x.cols);
            down_out.resize(rows.len() * down.rows, 0.0);
            matmul(&mut down_out, a.unwrap_or_else(|| Strided::new(&decoded, rows.len(), x.cols)), b, false);
        }
        // Tiles of equal height, so that the last one is not much smaller than the others.
        let height = rows.len().div_ceil(rows.len().div_ceil(TILE_M));
        let pieces = out.part(rows.clone(), 0..out.cols).split_rows(height);
        let tasks = pieces.into_iter().flat_map(|(r, piece)| piece.split_cols(step).into_iter().map(move |(c, p)| (r, c, p)));
        for_tasks(tasks.collect(), |s: &mut GemmScratch, (r, c, out): (usize, usize, Out<'_>)| {
            if out.watch().is_stopped() {
                return;
            }
            let block = rows.start + r..rows.start + r + out.rows;
            let a = match x.strided(block.clone(), 0..x.cols) {
                Some(direct) => direct,
                None => Strided::new(&decoded[r * x.cols..], out.rows, x.cols),
            };
            let rank = w.lora.as_ref().map(|(down, _)| down.rows);
            let inputs = Inputs { a, down_out: rank.map(|rank| Strided::new(&down_out[r * rank..], out.rows, rank)) };
            let range = first + c..first + c + out.cols;
            tile_nt(inputs, w, range.clone(), &mut s.b, &mut s.values);
            match up {
                Some(up) => tile_nt(inputs, w, range.start + up..range.end + up, &mut s.b, &mut s.up),
                None => s.up.clear(),
            }
            epilogue(Tile { rows: block, cols: c..c + out.cols, values: &mut s.values, up: &s.up }, out);
        });
    }
}

pub fn linear(out: Out<'_>, x: In<'_>, w: Layer<'_>) {
    let bias = w.bias.as_ref().map(|b| b.row_vec(0));
    gemm_nt(out, &x, &w, WeightRows { first: 0, up: None, unit: 1 }, |mut tile, mut out| {
        let cols = tile.cols.clone();
        for (r, row) in tile.rows() {
            if let Some(bias) = &bias {
                row.iter_mut().zip(&bias[cols.clone()]).for_each(|(v, b)| *v += b);
            }
            out.store(r, 0, row);
        }
    });
}

pub fn linear_gate_residual(into: Out<'_>, x: In<'_>, w: Layer<'_>, gate: Option<In<'_>>) {
    let bias = w.bias.as_ref().map_or_else(|| vec![0.0; w.weight.rows], |b| b.row_vec(0));
    let gate = gate.map_or_else(|| vec![1.0; w.weight.rows], |g| g.row_vec(0));
    gemm_nt(into, &x, &w, WeightRows { first: 0, up: None, unit: 1 }, |mut tile, mut out| {
        let (bias, gate) = (&bias[tile.cols.clone()], &gate[tile.cols.clone()]);
        let mut residual = [0.0; TILE_N];
        for (r, row) in tile.rows() {
            let residual = &mut residual[..row.len()];
            out.load(r, 0, residual);
            for (((v, r), g), b) in row.iter_mut().zip(residual).zip(gate).zip(bias) {
                *v = *r + g * (*v + b);
            }
            out.store(r, 0, row);
        }
    });
}

fn swiglu(out: Out<'_>, x: &In<'_>, w: &Layer<'_>, first: usize) {
    let weight_rows = WeightRows { first, up: Some(out.cols), unit: 1 };
    gemm_nt(out, x, w, weight_rows, |mut tile, mut out| {
        let (up, width) = (tile.up, tile.cols.len());
        for (r, gate) in tile.rows() {
            gate.iter_mut().zip(&up[r * width..]).for_each(|(g, u)| *g = math::silu(*g) * u);
            out.store(r, 0, gate);
        }
    });
}

pub fn linear_swiglu(out: Out<'_>, x: In<'_>, w: Layer<'_>) {
    swiglu(out, &x, &w, 0);
}

/// Parameters of the epilogue of query and key heads: qk-norm, scale and RoPE.
pub struct Heads<'a> {
    pub q: HeadGain,
    pub k: HeadGain,
    pub table: In<'a>,
    pub style: RopeStyle,
}

/// The factors of a head's elements: gains, and with an epsilon also the reciprocal of the head's RMS.
pub struct HeadGain {
    gains: Vec<f32>,
    eps: Option<f32>,
}

impl HeadGain {
    /// Creates the factors for heads of `head_dim` elements. `norm` is the weight and epsilon of their norm, if there is one.
    pub fn new(norm: Option<(In<'_>, f32)>, scale: f32, head_dim: usize) -> Self {
        let (weight, eps) = norm.map_or_else(|| (vec![1.0; head_dim], None), |(weight, eps)| (weight.row_vec(0), Some(eps)));
        Self { gains: weight.into_iter().map(|w| w * scale).collect(), eps }
    }
}

pub fn qkv(out: [Option<Out<'_>>; 3], mlp: Option<Out<'_>>, x: In<'_>, w: Layer<'_>, heads: &Heads<'_>) {
    let head_dim = heads.table.cols;
    let mut first = 0;
    for (out, gain) in out.into_iter().zip([Some(&heads.q), Some(&heads.k), None]) {
        let Some(out) = out else { continue };
        let (weight_rows, width) = (WeightRows { first, up: None, unit: head_dim }, out.cols);
        gemm_nt(out, &x, &w, weight_rows, |mut tile, mut out| {
            let (rows, mut angles) = (tile.rows.clone(), vec![0.0; head_dim]);
            for (r, row) in tile.rows() {
                if let Some(gain) = gain {
                    heads.table.load(rows.start + r, 0, &mut angles);
                    row.chunks_exact_mut(head_dim).for_each(|head| qk_norm_rope(head, gain, &angles, heads.style));
                }
                out.store(r, 0, row);
            }
        });
        first += width;
    }
    if let Some(mlp) = mlp {
        swiglu(mlp, &x, &w, first);
    }
}

fn qk_norm_rope(head: &mut [f32], gain: &HeadGain, angles: &[f32], style: RopeStyle) {
    let scale = gain.eps.map_or(1.0, |eps| rms_scale(head, eps));
    head.iter_mut().zip(&gain.gains).for_each(|(v, w)| *v = *v * scale * w);
    let half = head.len() / 2;
    let (cos, sin) = angles.split_at(half);
    for p in 0..half {
        let (i, j) = match style {
            RopeStyle::Interleaved => (2 * p, 2 * p + 1),
            RopeStyle::HalfSplit => (p, p + half),
        };
        let (a, b) = (head[i], head[j]);
        head[i] = a * cos[p] - b * sin[p];
        head[j] = a * sin[p] + b * cos[p];
    }
}

// ------------------------------------------------------------------------------------------------------------- attention

/// Queries and keys per block of attention scores. Keys and values are decoded again for every block of queries.
const BLOCK_Q: usize = 256;
const BLOCK_KV: usize = 512;

#[derive(Default)]
struct AttentionScratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    scores: Vec<f32>,
    row_sum: Vec<f32>,
    row_max: Vec<f32>,
    acc: Vec<f32>,
}

/// How attention scores become softmax logits.
#[derive(Clone, Copy)]
pub struct LogitParams {
    pub causal: bool,
    pub scale: f32,
}

/// Attention with an online softmax (Milakov and Gimelshein 2018), as in FlashAttention: scores exist one block at a time and the
/// full score matrix is never stored.
pub fn attention(out: Out<'_>, q: In<'_>, kv: &[(In<'_>, In<'_>)], head_dim: usize, params: LogitParams) {
    let group = q.cols / kv[0].0.cols;
    let tasks: Vec<_> = out
        .split_rows(BLOCK_Q)
        .into_iter()
        .flat_map(|(row, piece)| piece.split_cols(head_dim).into_iter().map(move |(col, piece)| (row, col, piece)))
        .collect();
    for_tasks(tasks, |scratch: &mut AttentionScratch, (row, col, piece)| {
        let kv_col = col / head_dim / group * head_dim;
        attend(piece, &q, kv, (row, col, kv_col), params, scratch);
    });
}

fn attend(
    mut out: Out<'_>,
    q: &In<'_>,
    kv: &[(In<'_>, In<'_>)],
    (row, col, kv_col): (usize, usize, usize),
    LogitParams { causal, scale }: LogitParams,
    scratch: &mut AttentionScratch,
) {
    let (n, d) = (out.rows, out.cols);
    let s = scratch;
    s.q.resize(n * d, 0.0);
    for (i, q_row) in s.q.chunks_exact_mut(d).enumerate() {
        q.load(row + i, col, q_row);
        q_row.iter_mut().for_each(|v| *v *= scale);
    }
    for (buffer, len, value) in [(&mut s.acc, n * d, 0.0), (&mut s.row_sum, n, 0.0), (&mut s.row_max, n, f32::NEG_INFINITY)] {
        buffer.clear();
        buffer.resize(len, value);
    }
    for (keys, values) in kv {
        // With a causal mask no query of this block attends to a key past the block's last row.
        let end = if causal { keys.rows.min(row + n) } else { keys.rows };
        for start in (0..end).step_by(BLOCK_KV) {
            if out.watch().is_stopped() {
                return;
            }
            let m = BLOCK_KV.min(end - start);
            for (view, buffer) in [(keys, &mut s.k), (values, &mut s.v)] {
                buffer.resize(BLOCK_KV * d, 0.0);
                buffer.chunks_exact_mut(d).take(m).enumerate().for_each(|(j, to)| view.load(start + j, kv_col, to));
            }
            s.scores.resize(n * m, 0.0);
            matmul(&mut s.scores, Strided::new(&s.q, n, d), Strided::new(&s.k, m, d).transposed(), false);
            for i in 0..n {
                let scores = &mut s.scores[i * m..(i + 1) * m];
                let count = if causal { (row + i + 1).saturating_sub(start).min(m) } else { m };
                let (visible, masked) = scores.split_at_mut(count);
                masked.fill(0.0);
                if count == 0 {
                    continue;
                }
                let row_max = maximum(visible, s.row_max[i]);
                let correction = exp(s.row_max[i] - row_max);
                visible.iter_mut().for_each(|v| *v = exp(*v - row_max));
                s.row_sum[i] = s.row_sum[i] * correction + sum(visible, |v| v);
                if s.row_max[i] != row_max {
                    s.acc[i * d..(i + 1) * d].iter_mut().for_each(|v| *v *= correction);
                    s.row_max[i] = row_max;
                }
            }
            matmul(&mut s.acc, Strided::new(&s.scores, n, m), Strided::new(&s.v, m, d), true);
        }
    }
    for (i, values) in s.acc.chunks_exact_mut(d).enumerate() {
        let scale = 1.0 / s.row_sum[i];
        values.iter_mut().for_each(|v| *v *= scale);
        out.store(i, 0, values);
    }
}
