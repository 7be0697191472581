//! Every op as the most naive loop that its documentation allows, generic over the precision. In f64 it is the oracle; in f32 it shows the
//! error of straightforward arithmetic. There are no fused passes and no helpers shared with the backends, and every sum adds its terms in
//! order.

use super::Mat;
use super::fp8_sums::STEP;
use kiln::internals::backend::{RopeStyle, Sampling, Seam};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Range, Sub};

/// A precision to compute in.
pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + Sum
{
    fn of(value: f32) -> Self;
    fn exp(self) -> Self;
    fn sqrt(self) -> Self;

    /// The value rounded to bf16, unless arithmetic is exact.
    fn through_bf16(self) -> Self;

    /// Adds the products of a row and the columns of a matrix `[row.len(), sums.len()]` to `sums`.
    fn add_products(sums: &mut [Self], row: &[Self], columns: &[Self]) {
        row.iter().zip(columns.chunks_exact(sums.len())).for_each(|(&scale, terms)| add_scaled(sums, scale, terms));
    }
}

/// Rounds to bf16, ties to even.
pub fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

macro_rules! real {
    ($t:ty, $through_bf16:expr) => {
        impl Real for $t {
            fn of(value: f32) -> Self {
                value.into()
            }
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            fn through_bf16(self) -> Self {
                $through_bf16(self)
            }
        }
    };
}
real!(f32, bf16);
real!(f64, std::convert::identity);

fn one<R: Real>() -> R {
    R::of(1.0)
}

fn sigmoid<R: Real>(x: R) -> R {
    one::<R>() / (one::<R>() + (-x).exp())
}

fn count<R: Real>(n: usize) -> R {
    R::of(n as f32)
}

/// Computes one value per element of a `rows x cols` result.
fn each<R: Real>(rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> R) -> Vec<R> {
    (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| f(r, c)).collect()
}

pub fn copy<R: Real>(x: &Mat) -> Vec<R> {
    each(x.rows, x.cols, |r, c| x.at(r, c))
}

pub fn silu<R: Real>(x: &Mat) -> Vec<R> {
    each(x.rows, x.cols, |r, c| x.at::<R>(r, c) * sigmoid(x.at::<R>(r, c)))
}

fn root_mean_square<R: Real>(row: &[R], eps: f32) -> R {
    (row.iter().map(|&v| v * v).sum::<R>() / count(row.len()) + R::of(eps)).sqrt()
}

pub fn rms_norm<R: Real>(x: &Mat, weight: &Mat, eps: f32) -> Vec<R> {
    let root: Vec<R> = (0..x.rows).map(|r| root_mean_square(&x.row(r), eps)).collect();
    each(x.rows, x.cols, |r, c| x.at::<R>(r, c) / root[r] * weight.at(0, c))
}

fn mean_and_variance<R: Real>(values: &[R]) -> (R, R) {
    let mean = values.iter().copied().sum::<R>() / count(values.len());
    (mean, values.iter().map(|&v| (v - mean) * (v - mean)).sum::<R>() / count(values.len()))
}

pub fn layer_norm_modulate<R: Real>(x: &Mat, shift: &Mat, scale: &Mat, eps: f32) -> Vec<R> {
    let stats: Vec<(R, R)> = (0..x.rows).map(|r| mean_and_variance(&x.row(r))).collect();
    each(x.rows, x.cols, |r, c| {
        let normal = (x.at::<R>(r, c) - stats[r].0) / (stats[r].1 + R::of(eps)).sqrt();
        (one::<R>() + scale.at(0, c)) * normal + shift.at(0, c)
    })
}

/// `acc[i] += scale * row[i]` (axpy): adds one term to many independent dot products. Each dot product still adds its terms in order.
fn add_scaled<R: Real>(acc: &mut [R], scale: R, row: &[R]) {
    acc.iter_mut().zip(row).for_each(|(acc, &v)| *acc += scale * v);
}

/// The transpose of some rows of a matrix.
fn transposed<R: Real>(m: &Mat, rows: Range<usize>) -> Vec<R> {
    (0..m.cols).flat_map(|c| rows.clone().map(move |r| m.at(r, c))).collect()
}

/// `x w^T` for a range of the rows of `w`, with the LoRA branch if it has one: `x (w + up down)^T`.
fn gemm_nt<R: Real>(x: &Mat, w: &Mat, rows: Range<usize>) -> Vec<R> {
    let x: Vec<Vec<R>> = (0..x.rows).map(|r| x.row(r)).collect();
    let mut out = product_nt(&x, w, rows.clone());
    if let Some((down, up)) = w.lora.as_deref() {
        let mut down_out: Vec<R> = product_nt(&x, down, 0..down.rows);
        // Tensor cores multiply what the kernel before them has stored.
        if down.rows.is_multiple_of(16) {
            down_out.iter_mut().for_each(|value| *value = value.through_bf16());
        }
        let down_out: Vec<Vec<R>> = down_out.chunks_exact(down.rows).map(<[R]>::to_vec).collect();
        let added: Vec<R> = product_nt(&down_out, up, rows);
        out.iter_mut().zip(added).for_each(|(sum, term)| *sum += term);
    }
    out
}

/// `x w^T` for a range of the rows of `w`, in blocks of rows that fit in a cache.
fn product_nt<R: Real>(x: &[Vec<R>], w: &Mat, rows: Range<usize>) -> Vec<R> {
    const BLOCK: usize = 64;
    let cols = rows.len();
    let mut out = vec![R::of(0.0); x.len() * cols];
    for first in (0..cols).step_by(BLOCK) {
        let width = BLOCK.min(cols - first);
        let w = transposed::<R>(w, rows.start + first..rows.start + first + width);
        for (x, out) in x.iter().zip(out.chunks_exact_mut(cols)) {
            R::add_products(&mut out[first..first + width], x, &w);
        }
    }
    out
}

pub fn linear<R: Real>(x: &Mat, w: &Mat, bias: Option<&Mat>) -> Vec<R> {
    let projected = gemm_nt::<R>(x, w, 0..w.rows);
    each(x.rows, w.rows, |r, c| projected[r * w.rows + c] + bias.map_or(R::of(0.0), |b| b.at(0, c)))
}

/// SwiGLU, `silu(gate) * up`. The gate is `width` rows of `w` from `first` on, and up is the next `width` rows.
pub fn swiglu<R: Real>(x: &Mat, w: &Mat, first: usize, width: usize) -> Vec<R> {
    let gate = gemm_nt::<R>(x, w, first..first + width);
    let up = gemm_nt::<R>(x, w, first + width..first + 2 * width);
    gate.iter().zip(&up).map(|(&g, &u)| g * sigmoid(g) * u).collect()
}

pub fn gate_residual<R: Real>(into: &Mat, x: &Mat, w: &Mat, bias: Option<&Mat>, gate: Option<&Mat>) -> Vec<R> {
    let projected = linear::<R>(x, w, bias);
    each(into.rows, into.cols, |r, c| {
        let gate = gate.map_or(one::<R>(), |g| g.at(0, c));
        into.at::<R>(r, c) + gate * projected[r * into.cols + c]
    })
}

/// qk-norm, scale and RoPE of query or key heads.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// The gain of the norm, and the epsilon added to the mean square.
    pub norm: Option<(&'a Mat, f32)>,
    pub scale: f32,
    pub table: &'a Mat,
    pub style: RopeStyle,
}

/// Queries or keys: columns of the GEMM, with RMS norm for each head if there is one, then RoPE.
pub fn heads<R: Real>(x: &Mat, w: &Mat, rows: Range<usize>, heads: Heads<'_>) -> Vec<R> {
    let (cols, d) = (rows.len(), heads.table.cols);
    let projected = gemm_nt::<R>(x, w, rows);
    let mut out = projected.clone();
    for r in 0..x.rows {
        for first in (0..cols).step_by(d) {
            let head = &projected[r * cols + first..][..d];
            let root = heads.norm.map(|(_, eps)| root_mean_square(head, eps));
            let gain = |i: usize| heads.norm.map_or(one::<R>(), |(gain, _)| gain.at(0, i));
            let normal = |i: usize| head[i] / root.unwrap_or(one()) * gain(i) * R::of(heads.scale);
            for pair in 0..d / 2 {
                let (i, j) = match heads.style {
                    RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    RopeStyle::HalfSplit => (pair, pair + d / 2),
                };
                let (cos, sin) = (heads.table.at::<R>(r, pair), heads.table.at::<R>(r, d / 2 + pair));
                out[r * cols + first + i] = normal(i) * cos - normal(j) * sin;
                out[r * cols + first + j] = normal(i) * sin + normal(j) * cos;
            }
        }
    }
    out
}

/// Values: columns of the GEMM.
pub fn values<R: Real>(x: &Mat, w: &Mat, rows: Range<usize>) -> Vec<R> {
    gemm_nt(x, w, rows)
}

/// The roundings of tensor core kernels within attention.
#[derive(Clone, Copy)]
pub struct Rounding<R> {
    /// P before the second GEMM.
    pub p: fn(R) -> R,
    /// How [`STEP`] products are added to a score, if not exactly.
    pub score: Option<fn(R, &[R]) -> R>,
}

impl<R> Rounding<R> {
    /// Rounds nothing.
    pub fn none() -> Self {
        Self { p: |p| p, score: None }
    }
}

/// Softmax over the keys of all KV segments; masked logits are minus infinity.
pub fn attention<R: Real>(q: &Mat, kv: &[(Mat, Mat)], (d, scale): (usize, f32), causal: bool, rounding: Rounding<R>) -> Vec<R> {
    let group = q.cols / kv[0].0.cols;
    let length = kv.iter().map(|(k, _)| k.rows).sum();
    // The transpose of the keys of all segments.
    let channel = |c: usize| kv.iter().flat_map(move |(k, _)| (0..k.rows).map(move |j| k.at::<R>(j, c))).collect();
    let keys: Vec<Vec<R>> = (0..kv[0].0.cols).map(channel).collect();
    let values: Vec<Vec<R>> = kv.iter().flat_map(|(_, v)| (0..v.rows).map(|j| v.row(j))).collect();
    let scale = R::of(scale);
    let mut out = vec![R::of(0.0); q.rows * q.cols];
    for i in 0..q.rows {
        let query: Vec<R> = q.row(i);
        for head in 0..q.cols / d {
            let (from, shared) = (head * d, head / group * d);
            let mut scores = vec![R::of(0.0); length];
            match rounding.score {
                None => (0..d).for_each(|c| add_scaled(&mut scores, query[from + c], &keys[shared + c])),
                Some(add) => {
                    for step in (0..d).step_by(STEP).map(|first| first..d.min(first + STEP)) {
                        for (j, score) in scores.iter_mut().enumerate() {
                            let products: Vec<R> = step.clone().map(|c| query[from + c] * keys[shared + c][j]).collect();
                            *score = add(*score, &products);
                        }
                    }
                }
            }
            for (j, score) in scores.iter_mut().enumerate() {
                *score = if causal && j > i { R::of(f32::NEG_INFINITY) } else { *score * scale };
            }
            let maximum = scores.iter().copied().fold(R::of(f32::NEG_INFINITY), |a, b| if b > a { b } else { a });
            let weights: Vec<R> = scores.iter().map(|&s| (s - maximum).exp()).collect();
            let total = weights.iter().copied().sum::<R>();
            let result = &mut out[i * q.cols + from..][..d];
            values.iter().zip(&weights).for_each(|(value, &weight)| add_scaled(result, (rounding.p)(weight), &value[shared..]));
            result.iter_mut().for_each(|o| *o = *o / total);
        }
    }
    out
}

/// A 3x3 convolution.
#[derive(Clone, Copy)]
pub struct Filter<'a> {
    /// `[out, 9 * in]`, by channel, then tap.
    pub w: &'a Mat,
    pub bias: &'a Mat,
    /// Width and height of the input.
    pub size: (usize, usize),
    pub sampling: Sampling,
}

/// A 3x3 convolution by its definition, of an image that is upsampled if `filter` says so. Its result is added to a residual, or to the 1x1
/// convolution of another image (`shortcut`: image, weight, bias). `rounded` is applied to sums of taps that see the same pixel of the
/// image before upsampling, and to values of the 1x1 convolution.
pub fn conv<R: Real>(
    x: &Mat,
    filter: Filter<'_>,
    rounded: impl Fn(R) -> R,
    residual: Option<&Mat>,
    shortcut: Option<(&Mat, &Mat, &Mat)>,
) -> Vec<R> {
    let image: Vec<R> = copy(x);
    let beside = shortcut.map(|(x, w, bias)| linear::<R>(x, w, Some(bias)));
    let mut out = convolved(&image, filter, &rounded);
    let channels = filter.w.rows;
    for (i, sum) in out.iter_mut().enumerate() {
        let added = beside.as_ref().map_or(R::of(0.0), |values| rounded(values[i]));
        *sum += residual.map_or(added, |r| r.at(i / channels, i % channels));
    }
    out
}

/// A 3x3 convolution of an image `[pixels, channels]`, with nothing added.
fn convolved<R: Real>(
    image: &[R],
    Filter { w, bias, size: (width, height), sampling }: Filter<'_>,
    rounded: impl Fn(R) -> R,
) -> Vec<R> {
    // The upsampling factor of the input, the stride, and the padding on the left and at the top.
    let (factor, step, before) = match sampling {
        Sampling::Same => (1, 1, 1),
        Sampling::Up => (2, 1, 1),
        Sampling::Down => (1, 2, 0),
    };
    let (wide, high, channels) = (width * factor, height * factor, w.cols / 9);
    let (out_width, filter) = (wide / step, transposed::<R>(w, 0..w.rows));
    let mut out = vec![R::of(0.0); out_width * (high / step) * w.rows];
    for (pixel, sums) in out.chunks_exact_mut(w.rows).enumerate() {
        let (top, left) = (pixel / out_width * step, pixel % out_width * step);
        // The taps of each pixel of the image, in the order in which the filter first sees the pixels.
        let mut seen: Vec<(usize, Vec<usize>)> = Vec::new();
        for (ky, kx) in (0..9).map(|i| (i / 3, i % 3)) {
            let (y, x) = (top + ky, left + kx);
            if !(before..before + high).contains(&y) || !(before..before + wide).contains(&x) {
                continue;
            }
            let source = (y - before) / factor * width + (x - before) / factor;
            match seen.iter_mut().find(|(pixel, _)| *pixel == source) {
                Some((_, taps)) => taps.push(ky * 3 + kx),
                None => seen.push((source, vec![ky * 3 + kx])),
            }
        }
        for c in 0..channels {
            for (source, taps) in &seen {
                let of = |tap: usize| &filter[(c * 9 + tap) * w.rows..][..w.rows];
                match taps[..] {
                    [tap] => add_scaled(sums, image[source * channels + c], of(tap)),
                    _ => {
                        let sum = |o: usize| rounded(taps.iter().map(|&tap| of(tap)[o]).sum());
                        let summed: Vec<R> = (0..w.rows).map(sum).collect();
                        add_scaled(sums, image[source * channels + c], &summed);
                    }
                }
            }
        }
        sums.iter_mut().enumerate().for_each(|(o, sum)| *sum += bias.at(0, o));
    }
    out
}

/// Group norm, SiLU and a convolution. `rounded` is applied to each normalized value.
pub fn norm_conv<R: Real>(
    x: &Mat,
    scales: (&Mat, &Mat),
    stats: Option<&Mat>,
    (groups, eps): (usize, f32),
    filter: Filter<'_>,
    rounded: impl Fn(R) -> R,
) -> Vec<R> {
    let image: Vec<R> = group_norm::<R>(x, scales, stats, groups, eps, true).into_iter().map(rounded).collect();
    convolved(&image, filter, |v| v)
}

/// Mean and variance of each group of channels of a `[pixels, channels]` matrix.
pub fn group_stats<R: Real>(x: &[R], channels: usize, groups: usize) -> Vec<R> {
    let width = channels / groups;
    let of_group = |g: usize| -> Vec<R> {
        x.chunks_exact(channels).flat_map(|pixel| pixel[g * width..(g + 1) * width].iter().copied()).collect()
    };
    (0..groups).map(|g| mean_and_variance(&of_group(g))).flat_map(|(mean, var)| [mean, var]).collect()
}

pub fn group_norm<R: Real>(x: &Mat, (w, bias): (&Mat, &Mat), stats: Option<&Mat>, groups: usize, eps: f32, act: bool) -> Vec<R> {
    let all: Vec<R> = copy(x);
    let stats: Vec<R> = stats.map_or_else(|| group_stats(&all, x.cols, groups), copy);
    each(x.rows, x.cols, |r, c| {
        let g = c / (x.cols / groups);
        let normal = (x.at::<R>(r, c) - stats[2 * g]) / (stats[2 * g + 1] + R::of(eps)).sqrt();
        let y = normal * w.at(0, c) + bias.at(0, c);
        if act { y * sigmoid(y) } else { y }
    })
}

/// The pixel and the channel of packed channel `packed` of token `t`: each channel has a patch of 2x2 pixels, row by row.
fn unpacked(t: usize, packed: usize, width: usize) -> (usize, usize) {
    let (channel, dy, dx) = (packed / 4, packed % 4 / 2, packed % 2);
    ((t / width * 2 + dy) * 2 * width + t % width * 2 + dx, channel)
}

pub fn patchify<R: Real>(x: &Mat, (mean, var): (&Mat, &Mat), eps: f32, width: usize) -> Vec<R> {
    each(x.rows / 4, 4 * x.cols, |t, p| {
        let (pixel, c) = unpacked(t, p, width);
        (x.at::<R>(pixel, c) - mean.at(0, p)) / (var.at::<R>(0, p) + R::of(eps)).sqrt()
    })
}

pub fn unpatchify<R: Real>(x: &Mat, (mean, var): (&Mat, &Mat), eps: f32, width: usize) -> Vec<R> {
    let channels = x.cols / 4;
    let mut out = vec![R::of(0.0); 4 * x.rows * channels];
    for t in 0..x.rows {
        for p in 0..x.cols {
            let (pixel, c) = unpacked(t, p, width);
            out[pixel * channels + c] = x.at::<R>(t, p) * (var.at::<R>(0, p) + R::of(eps)).sqrt() + mean.at(0, p);
        }
    }
    out
}

pub fn euler<R: Real>(latents: &Mat, velocity: &Mat, dt: f32) -> Vec<R> {
    each(latents.rows, latents.cols, |r, c| latents.at::<R>(r, c) + R::of(dt) * velocity.at(r, c))
}

pub fn renoise<R: Real>(latents: &Mat, [init, noise]: [&Mat; 2], stays: &[bool], sigma: f32) -> Vec<R> {
    each(latents.rows, latents.cols, |r, c| match stays[r] {
        true => latents.at(r, c),
        false => (one::<R>() - R::of(sigma)) * init.at(r, c) + R::of(sigma) * noise.at(r, c),
    })
}

/// A value within -1..1 as a byte that is not rounded yet.
fn byte<R: Real>(v: R) -> R {
    let unit = R::of(0.5) * v + R::of(0.5);
    if unit < R::of(0.0) {
        R::of(0.0)
    } else if unit > one() {
        R::of(255.0)
    } else {
        R::of(255.0) * unit
    }
}

pub fn pixels<R: Real>(x: &Mat) -> Vec<R> {
    each(x.rows, x.cols, |r, c| byte(x.at(r, c)))
}

/// The colors of latents. The pixel at (2x + b, 2y + a) has channel c in column 4c + 2a + b of token (x, y).
pub fn preview<R: Real>(latents: &Mat, table: &Mat, width: usize) -> Vec<R> {
    let channels = table.rows - 1;
    each(4 * latents.rows, 3, |pixel, k| {
        let (row, col) = (pixel / (2 * width), pixel % (2 * width));
        let (token, at) = (row / 2 * width + col / 2, 2 * (row % 2) + col % 2);
        byte((0..channels).fold(table.at(channels, k), |sum, c| sum + table.at::<R>(c, k) * latents.at::<R>(token, 4 * c + at)))
    })
}

pub fn guidance<R: Real>(cond: &Mat, uncond: &Mat, scale: f32) -> Vec<R> {
    each(cond.rows, cond.cols, |r, c| uncond.at::<R>(r, c) + R::of(scale) * (cond.at::<R>(r, c) - uncond.at::<R>(r, c)))
}

pub fn blend<R: Real>(into: &Mat, from: &Mat, seam: Seam) -> Vec<R> {
    each(into.rows, into.cols, |r, c| {
        let (step, steps) = match seam {
            Seam::Top => (r, into.rows),
            Seam::Left { channels } => (c / channels, into.cols / channels),
        };
        let weight = R::of(step as f32) / R::of(steps as f32);
        (one::<R>() - weight) * from.at::<R>(r, c) + weight * into.at::<R>(r, c)
    })
}
