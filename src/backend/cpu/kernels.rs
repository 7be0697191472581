//! The arithmetic of every op, in f32, in the plainest form that is still fast: matrix products through the `gemm` crate on
//! operands decoded block by block, everything else as loops over rows. Scratch memory is bounded whatever the operands' size.

use super::super::{RopeStyle, Sampling};
use super::view::{In, Out, Strided, matmul};
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;

/// Rows of the left operand that are multiplied at once. Enough to pay for decoding the weight anew for each block.
const BLOCK_ROWS: usize = 1024;
/// Weight rows that are decoded and multiplied at once.
const BLOCK_COLS: usize = 512;
/// Rows one thread takes at a time in row-wise ops.
const ROWS_PER_TASK: usize = 16;

// ---------------------------------------------------------------------------------------------------------------- scalars

/// `e^x` to about one unit in the last place, without branches or calls, so that loops over it become vector code.
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = n.mul_add_if_fast(-0.693_359_4, x);
    let r = n.mul_add_if_fast(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    y * f32::from_bits((((n as i32) + 127) << 23) as u32)
}

/// Multiply-add, fused only where that is one instruction (it is a slow call elsewhere).
trait MulAddIfFast {
    fn mul_add_if_fast(self, a: Self, b: Self) -> Self;
}

impl MulAddIfFast for f32 {
    fn mul_add_if_fast(self, a: f32, b: f32) -> f32 {
        if cfg!(target_feature = "fma") { self.mul_add(a, b) } else { self * a + b }
    }
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

// ---------------------------------------------------------------------------------------------------------------- row-wise

/// Calls `body(row, buffer, out)` for every row of `out`, in parallel; `buffer` is scratch of `width` values.
fn for_rows(out: Out<'_>, width: usize, body: impl Fn(usize, &mut [f32], &mut Out<'_>, usize) + Sync) {
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
    let square: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
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
        let mean = buffer.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let var = buffer.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
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

// ------------------------------------------------------------------------------------------------------------- products

/// One block of a product: weight rows, and for gated outputs a second range of as many.
type Columns = (Range<usize>, Option<Range<usize>>);

/// Cuts `range` into blocks that are multiples of `unit`.
fn blocks(range: Range<usize>, unit: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (BLOCK_COLS / unit).max(1) * unit;
    range.clone().step_by(step).map(move |start| start..(start + step).min(range.end))
}

/// Decodes rows of a matrix.
fn decode(m: &In<'_>, rows: Range<usize>, to: &mut Vec<f32>) {
    let cols = m.cols;
    to.resize(rows.len() * cols, 0.0);
    to.par_chunks_mut(cols.max(1)).enumerate().for_each(|(i, row)| m.load(rows.start + i, 0, row));
}

/// Computes `x w^T` block by block and hands each block to `sink(rows, columns, product, second product)`.
fn products(x: &In<'_>, w: &In<'_>, columns: &[Columns], mut sink: impl FnMut(Range<usize>, &Columns, &mut [f32], &[f32])) {
    let threads = rayon::current_num_threads();
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for start in (0..x.rows).step_by(BLOCK_ROWS) {
        let rows = start..(start + BLOCK_ROWS).min(x.rows);
        let direct = x.strided(rows.clone(), 0..x.cols);
        if direct.is_none() {
            decode(x, rows.clone(), &mut left);
        }
        let a = direct.unwrap_or_else(|| Strided::new(&left, rows.len(), x.cols));
        let mut multiply = |columns: &Range<usize>, out: &mut Vec<f32>| {
            let direct = w.strided(columns.clone(), 0..w.cols);
            if direct.is_none() {
                decode(w, columns.clone(), &mut right);
            }
            let b = direct.unwrap_or_else(|| Strided::new(&right, columns.len(), w.cols));
            out.resize(rows.len() * columns.len(), 0.0);
            matmul(out, a, b.transposed(), false, threads);
        };
        for block in columns {
            multiply(&block.0, &mut first);
            match &block.1 {
                Some(range) => multiply(range, &mut second),
                None => second.clear(),
            }
            sink(rows.clone(), block, &mut first, &second);
        }
    }
}

/// Finishes a block of a product row by row, in parallel: `body(row, values, out row)`.
fn finish(out: Out<'_>, values: &mut [f32], body: impl Fn(usize, &mut [f32], &mut Out<'_>) + Sync) {
    let cols = out.cols;
    let rows = out.split_rows(1);
    rows.into_par_iter()
        .zip(values.par_chunks_mut(cols))
        .with_min_len(ROWS_PER_TASK)
        .for_each(|((r, mut out), values)| body(r, values, &mut out));
}

pub fn linear(mut out: Out<'_>, x: In<'_>, w: In<'_>, bias: Option<In<'_>>) {
    let bias = bias.map(|b| b.row_vec(0));
    let columns: Vec<Columns> = blocks(0..w.rows, 1).map(|r| (r, None)).collect();
    products(&x, &w, &columns, |rows, (cols, _), values, _| {
        finish(out.part(rows, cols.clone()), values, |_, row, out| {
            if let Some(bias) = &bias {
                row.iter_mut().zip(&bias[cols.clone()]).for_each(|(v, b)| *v += b);
            }
            out.store(0, 0, row);
        });
    });
}

pub fn linear_gate_residual(mut into: Out<'_>, x: In<'_>, w: In<'_>, bias: Option<In<'_>>, gate: Option<In<'_>>) {
    let bias = bias.map_or_else(|| vec![0.0; w.rows], |b| b.row_vec(0));
    let gate = gate.map_or_else(|| vec![1.0; w.rows], |g| g.row_vec(0));
    let columns: Vec<Columns> = blocks(0..w.rows, 1).map(|r| (r, None)).collect();
    products(&x, &w, &columns, |rows, (cols, _), values, _| {
        finish(into.part(rows, cols.clone()), values, |_, row, out| {
            let mut residual = [0.0; BLOCK_COLS];
            let residual = &mut residual[..row.len()];
            out.load(0, 0, residual);
            for (((v, r), g), b) in row.iter_mut().zip(residual).zip(&gate[cols.clone()]).zip(&bias[cols.clone()]) {
                *v = *r + g * (*v + b);
            }
            out.store(0, 0, row);
        });
    });
}

/// Blocks of gate rows paired with their up rows; `first` is where the gates begin.
fn gated(first: usize, width: usize) -> impl Iterator<Item = Columns> {
    blocks(first..first + width, 1).map(move |gate| {
        let up = gate.start + width..gate.end + width;
        (gate, Some(up))
    })
}

fn store_swiglu(out: Out<'_>, gate: &mut [f32], up: &[f32]) {
    let width = out.cols;
    finish(out, gate, |r, gate, out| {
        gate.iter_mut().zip(&up[r * width..]).for_each(|(g, u)| *g = silu(*g) * u);
        out.store(0, 0, gate);
    });
}

pub fn linear_swiglu(mut out: Out<'_>, x: In<'_>, w: In<'_>) {
    let columns: Vec<Columns> = gated(0, out.cols).collect();
    products(&x, &w, &columns, |rows, (cols, _), gate, up| store_swiglu(out.part(rows, cols.clone()), gate, up));
}

/// What is done to query and key heads.
pub struct Heads<'a> {
    pub q_norm: In<'a>,
    pub k_norm: In<'a>,
    pub eps: f32,
    pub table: In<'a>,
    pub style: RopeStyle,
}

pub fn qkv(out: [Option<Out<'_>>; 3], mut mlp: Option<Out<'_>>, x: In<'_>, w: In<'_>, heads: &Heads<'_>) {
    let head_dim = heads.table.cols;
    let norms = [Some(heads.q_norm.row_vec(0)), Some(heads.k_norm.row_vec(0)), None];
    let mut first = 0;
    for (out, norm) in out.into_iter().zip(&norms) {
        let Some(mut out) = out else { continue };
        let columns: Vec<Columns> = blocks(first..first + out.cols, head_dim).map(|r| (r, None)).collect();
        products(&x, &w, &columns, |rows, (cols, _), values, _| {
            let part = out.part(rows.clone(), cols.start - first..cols.end - first);
            finish(part, values, |r, row, out| {
                if let Some(weight) = norm {
                    let mut angles = [0.0; 256];
                    let angles = &mut angles[..head_dim];
                    heads.table.load(rows.start + r, 0, angles);
                    row.chunks_exact_mut(head_dim).for_each(|head| norm_and_rotate(head, weight, heads.eps, angles, heads.style));
                }
                out.store(0, 0, row);
            });
        });
        first += out.cols;
    }
    if let Some(mlp) = &mut mlp {
        let columns: Vec<Columns> = gated(first, mlp.cols).collect();
        products(&x, &w, &columns, |rows, (cols, _), gate, up| {
            store_swiglu(mlp.part(rows, cols.start - first..cols.end - first), gate, up);
        });
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

/// Queries and keys of one block of scores.
const QUERY_BLOCK: usize = 128;
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

/// Attention with a running maximum: scores exist one block at a time, never as a whole.
pub fn attention(out: Out<'_>, q: In<'_>, kv: &[(In<'_>, In<'_>)], head_dim: usize, causal: bool) {
    let group = q.cols / kv[0].0.cols;
    let tasks: Vec<_> = out
        .split_rows(QUERY_BLOCK)
        .into_iter()
        .flat_map(|(row, piece)| piece.split_cols(head_dim).into_iter().map(move |(col, piece)| (row, col, piece)))
        .collect();
    tasks.into_par_iter().for_each_init(AttentionScratch::default, |scratch, (row, col, piece)| {
        let kv_col = col / head_dim / group * head_dim;
        attend(piece, &q, kv, (row, col, kv_col), causal, scratch);
    });
}

fn attend(
    mut out: Out<'_>,
    q: &In<'_>,
    kv: &[(In<'_>, In<'_>)],
    (row, col, kv_col): (usize, usize, usize),
    causal: bool,
    scratch: &mut AttentionScratch,
) {
    let (n, d) = (out.rows, out.cols);
    let scale = 1.0 / (d as f32).sqrt();
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
            matmul(&mut s.scores, Strided::new(&s.q, n, d), Strided::new(&s.k, m, d).transposed(), false, 1);
            for i in 0..n {
                let scores = &mut s.scores[i * m..(i + 1) * m];
                let visible = if causal { (row + i + 1).saturating_sub(start).min(m) } else { m };
                let (seen, hidden) = scores.split_at_mut(visible);
                hidden.fill(0.0);
                let maximum = seen.iter().copied().fold(s.maxima[i], f32::max);
                if visible == 0 {
                    continue;
                }
                let correction = exp(s.maxima[i] - maximum);
                seen.iter_mut().for_each(|v| *v = exp(*v - maximum));
                s.sums[i] = s.sums[i] * correction + seen.iter().sum::<f32>();
                if s.maxima[i] != maximum {
                    s.out[i * d..(i + 1) * d].iter_mut().for_each(|v| *v *= correction);
                    s.maxima[i] = maximum;
                }
            }
            matmul(&mut s.out, Strided::new(&s.scores, n, m), Strided::new(&s.v, m, d), true, 1);
        }
    }
    for (i, values) in s.out.chunks_exact_mut(d).enumerate() {
        let scale = 1.0 / s.sums[i];
        values.iter_mut().for_each(|v| *v *= scale);
        out.store(i, 0, values);
    }
}

// ----------------------------------------------------------------------------------------------------------------- images

/// Size of a convolution's input and what happens to the resolution.
#[derive(Clone, Copy)]
pub struct Geometry {
    pub width: usize,
    pub height: usize,
    pub sampling: Sampling,
}

impl Geometry {
    fn out_width(self) -> usize {
        match self.sampling {
            Sampling::Same => self.width,
            Sampling::Up => 2 * self.width,
            Sampling::Down => self.width / 2,
        }
    }

    /// The input pixel under kernel position (`ky`, `kx`) for output pixel (`y`, `x`); `None` is a padded zero.
    fn source(self, y: usize, x: usize, ky: usize, kx: usize) -> Option<usize> {
        let at = |o: usize, k: usize, size: usize| match self.sampling {
            Sampling::Same => (o + k).checked_sub(1).filter(|&i| i < size),
            Sampling::Up => (o + k).checked_sub(1).map(|i| i / 2).filter(|&i| i < size),
            Sampling::Down => Some(2 * o + k).filter(|&i| i < size),
        };
        Some(at(y, ky, self.height)? * self.width + at(x, kx, self.width)?)
    }
}

/// Output pixels whose input patches are gathered at once.
const PIXEL_BLOCK: usize = 128;

/// 3x3 convolution: the input patches of a block of pixels are gathered into a matrix and multiplied.
pub fn conv(out: Out<'_>, x: In<'_>, w: In<'_>, bias: In<'_>, geometry: Geometry, residual: Option<In<'_>>) {
    let (channels, width) = (x.cols, geometry.out_width());
    let (k, n) = (9 * channels, out.cols);
    let bias = bias.row_vec(0);
    // The file orders a filter by channel, then position; patches are gathered position by position.
    let mut filters = vec![0.0; n * k];
    filters.par_chunks_mut(k).enumerate().for_each_init(
        || vec![0.0; k],
        |row, (o, filter)| {
            w.load(o, 0, row);
            for (c, taps) in row.chunks_exact(9).enumerate() {
                taps.iter().enumerate().for_each(|(p, &v)| filter[p * channels + c] = v);
            }
        },
    );
    out.split_rows(PIXEL_BLOCK).into_par_iter().for_each_init(
        || (vec![0.0; PIXEL_BLOCK * k], vec![0.0; PIXEL_BLOCK * n], vec![0.0; n]),
        |(patches, result, other), (first, mut piece)| {
            for (local, patch) in patches.chunks_exact_mut(k).take(piece.rows).enumerate() {
                let (y, px) = ((first + local) / width, (first + local) % width);
                for (p, to) in patch.chunks_exact_mut(channels).enumerate() {
                    match geometry.source(y, px, p / 3, p % 3) {
                        Some(pixel) => x.load(pixel, 0, to),
                        None => to.fill(0.0),
                    }
                }
            }
            matmul(result, Strided::new(patches, piece.rows, k), Strided::new(&filters, n, k).transposed(), false, 1);
            for (local, values) in result.chunks_exact_mut(n).take(piece.rows).enumerate() {
                values.iter_mut().zip(&bias).for_each(|(v, b)| *v += b);
                if let Some(residual) = &residual {
                    residual.load(first + local, 0, other);
                    values.iter_mut().zip(other.iter()).for_each(|(v, r)| *v += r);
                }
                piece.store(local, 0, values);
            }
        },
    );
}

/// Mean and variance of each group of channels. Partial sums are made over fixed blocks and added in order, so the result does
/// not depend on the number of threads.
fn group_stats(x: &In<'_>, groups: usize) -> Vec<(f32, f32)> {
    const PIXELS: usize = 1024;
    let width = x.cols / groups;
    let partial: Vec<Vec<(f64, f64)>> = (0..x.rows.div_ceil(PIXELS))
        .into_par_iter()
        .map(|block| {
            let (mut sums, mut row) = (vec![(0.0, 0.0); groups], vec![0.0; x.cols]);
            for r in block * PIXELS..((block + 1) * PIXELS).min(x.rows) {
                x.load(r, 0, &mut row);
                for (sum, values) in sums.iter_mut().zip(row.chunks_exact(width)) {
                    for &v in values {
                        sum.0 += f64::from(v);
                        sum.1 += f64::from(v) * f64::from(v);
                    }
                }
            }
            sums
        })
        .collect();
    let count = (x.rows * width) as f64;
    (0..groups)
        .map(|g| {
            let (sum, square) = partial.iter().fold((0.0, 0.0), |a, p| (a.0 + p[g].0, a.1 + p[g].1));
            let mean = sum / count;
            (mean as f32, (square / count - mean * mean).max(0.0) as f32)
        })
        .collect()
}

pub fn group_stats_into(mut stats: Out<'_>, x: In<'_>) {
    for (g, (mean, var)) in group_stats(&x, stats.rows).into_iter().enumerate() {
        stats.store(g, 0, &[mean, var]);
    }
}

/// Weights of a group normalisation.
pub struct GroupParams<'a> {
    pub weight: In<'a>,
    pub bias: In<'a>,
    pub groups: usize,
    pub eps: f32,
}

pub fn group_norm(out: Out<'_>, x: In<'_>, norm: &GroupParams<'_>, stats: Option<In<'_>>, apply_silu: bool) {
    let stats: Vec<(f32, f32)> = match stats {
        Some(stats) => (0..stats.rows).map(|g| stats.row_vec(g)).map(|s| (s[0], s[1])).collect(),
        None => group_stats(&x, norm.groups),
    };
    let (mut scale, mut shift) = (norm.weight.row_vec(0), norm.bias.row_vec(0));
    let width = x.cols / norm.groups;
    for (c, (scale, shift)) in scale.iter_mut().zip(&mut shift).enumerate() {
        let (mean, var) = stats[c / width];
        *scale *= 1.0 / (var + norm.eps).sqrt();
        *shift -= mean * *scale;
    }
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        for ((v, scale), shift) in buffer.iter_mut().zip(&scale).zip(&shift) {
            *v = *v * scale + shift;
        }
        if apply_silu {
            buffer.iter_mut().for_each(|v| *v = silu(*v));
        }
        out.store(local, 0, buffer);
    });
}

/// The four pixels of token `t` in a latent image of `2 * width` columns, in the order of the packed channels.
fn patch(t: usize, width: usize) -> [usize; 4] {
    let top_left = (t / width) * 4 * width + (t % width) * 2;
    [top_left, top_left + 1, top_left + 2 * width, top_left + 2 * width + 1]
}

fn deviations(var: &In<'_>, eps: f32) -> Vec<f32> {
    var.row_vec(0).iter().map(|v| (v + eps).sqrt()).collect()
}

pub fn patchify(out: Out<'_>, x: In<'_>, mean: In<'_>, var: In<'_>, eps: f32, width: usize) {
    let (mean, deviation, channels) = (mean.row_vec(0), deviations(&var, eps), x.cols);
    for_rows(out, 5 * channels, |t, buffer, out, local| {
        let (packed, pixel) = buffer.split_at_mut(4 * channels);
        for (p, source) in patch(t, width).into_iter().enumerate() {
            x.load(source, 0, pixel);
            pixel.iter().enumerate().for_each(|(c, &v)| packed[c * 4 + p] = (v - mean[c * 4 + p]) / deviation[c * 4 + p]);
        }
        out.store(local, 0, packed);
    });
}

pub fn unpatchify(out: Out<'_>, x: In<'_>, mean: In<'_>, var: In<'_>, eps: f32, width: usize) {
    let (mean, deviation, channels) = (mean.row_vec(0), deviations(&var, eps), out.cols);
    for_rows(out, 5 * channels, |pixel, buffer, out, local| {
        let (packed, values) = buffer.split_at_mut(4 * channels);
        let (y, px) = (pixel / (2 * width), pixel % (2 * width));
        x.load((y / 2) * width + px / 2, 0, packed);
        let p = (y % 2) * 2 + px % 2;
        for (c, v) in values.iter_mut().enumerate() {
            *v = packed[c * 4 + p] * deviation[c * 4 + p] + mean[c * 4 + p];
        }
        out.store(local, 0, values);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -8_700..8_800 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= want * 2.4e-7, "exp({x})");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
        assert!(exp(f32::NAN).is_nan(), "a fault must stay visible");
    }
}
