//! The arithmetic of the transformer's ops, in f32, in the plainest form that is still fast: matrix products through the `gemm`
//! crate on operands decoded block by block, everything else as loops over rows. Scratch memory is bounded whatever the
//! operands' size, and how work is cut depends on shapes alone, so results do not depend on the number of threads.

use super::super::RopeStyle;
use super::math::{exp, maximum, silu, sum};
use super::view::{In, Out, Strided, matmul};
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows one thread takes at a time in row-wise ops.
const ROWS_PER_TASK: usize = 16;

/// Runs tasks on all threads, each with one scratch for all the tasks it takes: scratch is large enough here for fresh pages to
/// cost as much as the arithmetic on them.
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

/// Calls `body(row, buffer, out)` for every row of `out`, in parallel; `buffer` is scratch of `width` values.
pub fn for_rows(out: Out<'_>, width: usize, body: impl Fn(usize, &mut [f32], &mut Out<'_>, usize) + Sync) {
    out.split_rows(ROWS_PER_TASK).into_par_iter().for_each_init(
        || vec![0.0; width],
        |buffer, (first, mut piece)| {
            for local in 0..piece.rows {
                body(first + local, buffer, &mut piece, local);
            }
        },
    );
}

pub fn embed(out: Out<'_>, ids: In<'_>, table: In<'_>) -> Result<()> {
    if let Some(id) = (0..ids.rows).map(|r| ids.id(r)).find(|&id| id as usize >= table.rows) {
        return Err(Error::Op { op: "embed", what: format!("token id {id} in a vocabulary of {}", table.rows) });
    }
    for_rows(out, table.cols, |r, buffer, out, local| {
        table.load(ids.id(r) as usize, 0, buffer);
        out.store(local, 0, buffer);
    });
    Ok(())
}

pub fn map(out: Out<'_>, x: In<'_>, f: impl Fn(f32) -> f32 + Sync) {
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        buffer.iter_mut().for_each(|v| *v = f(*v));
        out.store(local, 0, buffer);
    });
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

pub fn guidance(out: Out<'_>, cond: In<'_>, uncond: In<'_>, scale: f32) {
    for_rows(out, 2 * cond.cols, |r, buffer, out, local| {
        let (c, u) = buffer.split_at_mut(cond.cols);
        cond.load(r, 0, c);
        uncond.load(r, 0, u);
        c.iter_mut().zip(u).for_each(|(c, u)| *c = *u + scale * (*c - *u));
        out.store(local, 0, c);
    });
}

pub fn non_finite(mut count: Out<'_>, x: In<'_>) {
    let rows = (0..x.rows).into_par_iter().with_min_len(ROWS_PER_TASK);
    let found = rows.map_init(
        || vec![0.0; x.cols],
        |buffer, r| {
            x.load(r, 0, buffer);
            buffer.iter().filter(|v| !v.is_finite()).count()
        },
    );
    count.store(0, 0, &[found.sum::<usize>() as f32]);
}

// ------------------------------------------------------------------------------------------------------------- products

/// Most rows of the left operand in one block: enough to pay for decoding the weight anew for each.
const BLOCK_ROWS: usize = 1024;
/// Most weight rows in one block: few enough that their decoded values stay close to the core that multiplies them, and a multiple
/// of the 64 that the library takes at once.
const BLOCK_COLS: usize = 192;
/// Most decoded values of the left operand that exist at once, 64 MiB of them.
const LEFT_VALUES: usize = 16 << 20;

/// Which rows of a weight make an output.
#[derive(Clone, Copy)]
struct Columns {
    /// The weight row of the output's first column.
    first: usize,
    /// For gated outputs: how many rows after a column's gate its up row lies.
    up: Option<usize>,
    /// Columns that must stay in one block.
    unit: usize,
}

/// One block of a product, as it is handed to whatever finishes it.
struct Block<'a> {
    /// Rows of the left operand.
    rows: Range<usize>,
    /// Columns of the output.
    cols: Range<usize>,
    /// The product.
    values: &'a mut [f32],
    /// The product with the up rows, of the same shape; empty if there are none.
    up: &'a [f32],
}

impl Block<'_> {
    /// The rows of the product, numbered from the start of the block.
    fn rows(&mut self) -> impl Iterator<Item = (usize, &mut [f32])> {
        self.values.chunks_exact_mut(self.cols.len()).enumerate()
    }
}

#[derive(Default)]
struct ProductScratch {
    right: Vec<f32>,
    values: Vec<f32>,
    up: Vec<f32>,
}

/// Decodes rows of a matrix.
fn decode(m: &In<'_>, rows: Range<usize>, to: &mut [f32]) {
    to.chunks_exact_mut(m.cols.max(1)).zip(rows).for_each(|(to, r)| m.load(r, 0, to));
}

/// `left` times some rows of `w`, transposed.
fn multiply(left: Strided<'_>, w: &In<'_>, range: Range<usize>, right: &mut Vec<f32>, out: &mut Vec<f32>) {
    let direct = w.strided(range.clone(), 0..w.cols);
    if direct.is_none() {
        right.resize(range.len() * w.cols, 0.0);
        decode(w, range.clone(), right);
    }
    let b = direct.unwrap_or_else(|| Strided::new(right, range.len(), w.cols));
    out.resize(left.rows() * range.len(), 0.0);
    matmul(out, left, b.transposed(), false);
}

/// Computes `x w^T` block by block and hands each block to `finish` with the part of `out` it belongs to. Each block is one
/// thread's work from decoding the weight to storing the result, so threads never wait for each other inside a product.
fn products(mut out: Out<'_>, x: &In<'_>, w: &In<'_>, columns: Columns, finish: impl Fn(Block<'_>, Out<'_>) + Sync) {
    let Columns { first, up, unit } = columns;
    let step = (BLOCK_COLS / unit).max(1) * unit;
    let chunk = (LEFT_VALUES / x.cols.max(1) / BLOCK_ROWS).max(1) * BLOCK_ROWS;
    let mut left = Vec::new();
    for start in (0..x.rows).step_by(chunk) {
        let rows = start..(start + chunk).min(x.rows);
        if x.strided(rows.clone(), 0..x.cols).is_none() {
            left.resize(rows.len() * x.cols, 0.0);
            left.par_chunks_mut(ROWS_PER_TASK * x.cols.max(1)).enumerate().for_each(|(i, to)| {
                decode(x, rows.start + i * ROWS_PER_TASK..rows.end, to);
            });
        }
        // Blocks of equal height, so that the last is not a sliver.
        let height = rows.len().div_ceil(rows.len().div_ceil(BLOCK_ROWS));
        let pieces = out.part(rows.clone(), 0..out.cols).split_rows(height);
        let tasks = pieces.into_iter().flat_map(|(r, piece)| piece.split_cols(step).into_iter().map(move |(c, p)| (r, c, p)));
        for_tasks(tasks.collect(), |s: &mut ProductScratch, (r, c, out): (usize, usize, Out<'_>)| {
            let block = rows.start + r..rows.start + r + out.rows;
            let a = match x.strided(block.clone(), 0..x.cols) {
                Some(direct) => direct,
                None => Strided::new(&left[r * x.cols..], out.rows, x.cols),
            };
            let range = first + c..first + c + out.cols;
            multiply(a, w, range.clone(), &mut s.right, &mut s.values);
            match up {
                Some(up) => multiply(a, w, range.start + up..range.end + up, &mut s.right, &mut s.up),
                None => s.up.clear(),
            }
            finish(Block { rows: block, cols: c..c + out.cols, values: &mut s.values, up: &s.up }, out);
        });
    }
}

pub fn linear(out: Out<'_>, x: In<'_>, w: In<'_>, bias: Option<In<'_>>) {
    let bias = bias.map(|b| b.row_vec(0));
    products(out, &x, &w, Columns { first: 0, up: None, unit: 1 }, |mut block, mut out| {
        let cols = block.cols.clone();
        for (r, row) in block.rows() {
            if let Some(bias) = &bias {
                row.iter_mut().zip(&bias[cols.clone()]).for_each(|(v, b)| *v += b);
            }
            out.store(r, 0, row);
        }
    });
}

pub fn linear_gate_residual(into: Out<'_>, x: In<'_>, w: In<'_>, bias: Option<In<'_>>, gate: Option<In<'_>>) {
    let bias = bias.map_or_else(|| vec![0.0; w.rows], |b| b.row_vec(0));
    let gate = gate.map_or_else(|| vec![1.0; w.rows], |g| g.row_vec(0));
    products(into, &x, &w, Columns { first: 0, up: None, unit: 1 }, |mut block, mut out| {
        let (bias, gate) = (&bias[block.cols.clone()], &gate[block.cols.clone()]);
        let mut residual = [0.0; BLOCK_COLS];
        for (r, row) in block.rows() {
            let residual = &mut residual[..row.len()];
            out.load(r, 0, residual);
            for (((v, r), g), b) in row.iter_mut().zip(residual).zip(gate).zip(bias) {
                *v = *r + g * (*v + b);
            }
            out.store(r, 0, row);
        }
    });
}

fn swiglu(out: Out<'_>, x: &In<'_>, w: &In<'_>, first: usize) {
    let columns = Columns { first, up: Some(out.cols), unit: 1 };
    products(out, x, w, columns, |mut block, mut out| {
        let (up, width) = (block.up, block.cols.len());
        for (r, gate) in block.rows() {
            gate.iter_mut().zip(&up[r * width..]).for_each(|(g, u)| *g = silu(*g) * u);
            out.store(r, 0, gate);
        }
    });
}

pub fn linear_swiglu(out: Out<'_>, x: In<'_>, w: In<'_>) {
    swiglu(out, &x, &w, 0);
}

/// What is done to query and key heads.
pub struct Heads<'a> {
    pub q_norm: In<'a>,
    pub k_norm: In<'a>,
    pub eps: f32,
    pub q_scale: f32,
    pub table: In<'a>,
    pub style: RopeStyle,
}

pub fn qkv(out: [Option<Out<'_>>; 3], mlp: Option<Out<'_>>, x: In<'_>, w: In<'_>, heads: &Heads<'_>) {
    let head_dim = heads.table.cols;
    let scaled = |norm: &In<'_>, by: f32| norm.row_vec(0).into_iter().map(|w| w * by).collect::<Vec<_>>();
    let norms = [Some(scaled(&heads.q_norm, heads.q_scale)), Some(scaled(&heads.k_norm, 1.0)), None];
    let mut first = 0;
    for (out, norm) in out.into_iter().zip(&norms) {
        let Some(out) = out else { continue };
        let (columns, width) = (Columns { first, up: None, unit: head_dim }, out.cols);
        products(out, &x, &w, columns, |mut block, mut out| {
            let (rows, mut angles) = (block.rows.clone(), vec![0.0; head_dim]);
            for (r, row) in block.rows() {
                if let Some(weight) = norm {
                    heads.table.load(rows.start + r, 0, &mut angles);
                    row.chunks_exact_mut(head_dim)
                        .for_each(|head| norm_and_rotate(head, weight, heads.eps, &angles, heads.style));
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

fn norm_and_rotate(head: &mut [f32], weight: &[f32], eps: f32, angles: &[f32], style: RopeStyle) {
    let scale = rms_scale(head, eps);
    head.iter_mut().zip(weight).for_each(|(v, w)| *v = *v * scale * w);
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

/// Queries and keys of one block of scores. Keys and values are decoded anew for every block of queries.
const QUERY_BLOCK: usize = 256;
const KEY_BLOCK: usize = 512;

#[derive(Default)]
struct AttentionScratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    maxima: Vec<f32>,
    out: Vec<f32>,
}

/// What becomes of scores.
#[derive(Clone, Copy)]
pub struct Scores {
    pub causal: bool,
    pub scale: f32,
}

/// Attention with a running maximum: scores exist one block at a time, never as a whole.
pub fn attention(out: Out<'_>, q: In<'_>, kv: &[(In<'_>, In<'_>)], head_dim: usize, scores: Scores) {
    let group = q.cols / kv[0].0.cols;
    let tasks: Vec<_> = out
        .split_rows(QUERY_BLOCK)
        .into_iter()
        .flat_map(|(row, piece)| piece.split_cols(head_dim).into_iter().map(move |(col, piece)| (row, col, piece)))
        .collect();
    for_tasks(tasks, |scratch: &mut AttentionScratch, (row, col, piece)| {
        let kv_col = col / head_dim / group * head_dim;
        attend(piece, &q, kv, (row, col, kv_col), scores, scratch);
    });
}

fn attend(
    mut out: Out<'_>,
    q: &In<'_>,
    kv: &[(In<'_>, In<'_>)],
    (row, col, kv_col): (usize, usize, usize),
    Scores { causal, scale }: Scores,
    scratch: &mut AttentionScratch,
) {
    let (n, d) = (out.rows, out.cols);
    let s = scratch;
    s.q.resize(n * d, 0.0);
    for (i, q_row) in s.q.chunks_exact_mut(d).enumerate() {
        q.load(row + i, col, q_row);
        q_row.iter_mut().for_each(|v| *v *= scale);
    }
    for (buffer, len, value) in [(&mut s.out, n * d, 0.0), (&mut s.sums, n, 0.0), (&mut s.maxima, n, f32::NEG_INFINITY)] {
        buffer.clear();
        buffer.resize(len, value);
    }
    for (keys, values) in kv {
        // With a causal mask no query of this block sees a key past its last row.
        let end = if causal { keys.rows.min(row + n) } else { keys.rows };
        for start in (0..end).step_by(KEY_BLOCK) {
            let m = KEY_BLOCK.min(end - start);
            for (view, buffer) in [(keys, &mut s.k), (values, &mut s.v)] {
                buffer.resize(KEY_BLOCK * d, 0.0);
                buffer.chunks_exact_mut(d).take(m).enumerate().for_each(|(j, to)| view.load(start + j, kv_col, to));
            }
            s.scores.resize(n * m, 0.0);
            matmul(&mut s.scores, Strided::new(&s.q, n, d), Strided::new(&s.k, m, d).transposed(), false);
            for i in 0..n {
                let scores = &mut s.scores[i * m..(i + 1) * m];
                let visible = if causal { (row + i + 1).saturating_sub(start).min(m) } else { m };
                let (seen, hidden) = scores.split_at_mut(visible);
                hidden.fill(0.0);
                if visible == 0 {
                    continue;
                }
                let maximum = maximum(seen, s.maxima[i]);
                let correction = exp(s.maxima[i] - maximum);
                seen.iter_mut().for_each(|v| *v = exp(*v - maximum));
                s.sums[i] = s.sums[i] * correction + sum(seen, |v| v);
                if s.maxima[i] != maximum {
                    s.out[i * d..(i + 1) * d].iter_mut().for_each(|v| *v *= correction);
                    s.maxima[i] = maximum;
                }
            }
            matmul(&mut s.out, Strided::new(&s.scores, n, m), Strided::new(&s.v, m, d), true);
        }
    }
    for (i, values) in s.out.chunks_exact_mut(d).enumerate() {
        let scale = 1.0 / s.sums[i];
        values.iter_mut().for_each(|v| *v *= scale);
        out.store(i, 0, values);
    }
}
