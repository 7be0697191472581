//! The arithmetic of the image ops: convolution, group normalisation, and packing of latents into tokens.

use super::super::Sampling;
use super::kernels::{for_rows, for_tasks};
use super::math::silu;
use super::view::{In, Out, Strided, matmul};
use rayon::prelude::*;

/// Size of a convolution's input and how the resolution changes.
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

    /// The input pixel under filter tap (`ky`, `kx`) for output pixel (`y`, `x`); `None` stands for zero padding.
    fn source(self, y: usize, x: usize, ky: usize, kx: usize) -> Option<usize> {
        let at = |o: usize, k: usize, size: usize| match self.sampling {
            Sampling::Same => (o + k).checked_sub(1).filter(|&i| i < size),
            Sampling::Up => (o + k).checked_sub(1).map(|i| i / 2).filter(|&i| i < size),
            Sampling::Down => Some(2 * o + k).filter(|&i| i < size),
        };
        Some(at(y, ky, self.height)? * self.width + at(x, kx, self.width)?)
    }
}

/// Output pixels whose input patches are gathered at once: enough to amortise packing the filters again for each block.
const PIXEL_BLOCK: usize = 512;

#[derive(Default)]
struct ConvScratch {
    patches: Vec<f32>,
    result: Vec<f32>,
    residual: Vec<f32>,
}

/// The filters in the order in which patches are gathered: by tap, then channel. The checkpoint stores them by channel, then tap.
fn filters(w: &In<'_>, channels: usize) -> Vec<f32> {
    let mut filters = vec![0.0; w.rows * w.cols];
    filters.par_chunks_mut(w.cols).enumerate().for_each_init(
        || vec![0.0; w.cols],
        |row, (o, filter)| {
            w.load(o, 0, row);
            for (c, taps) in row.chunks_exact(9).enumerate() {
                taps.iter().enumerate().for_each(|(p, &v)| filter[p * channels + c] = v);
            }
        },
    );
    filters
}

/// 3x3 convolution as im2col and GEMM: the input patches of a block of pixels are gathered into a matrix, which is multiplied by
/// the filters.
pub fn conv(out: Out<'_>, x: In<'_>, w: In<'_>, bias: In<'_>, geometry: Geometry, residual: Option<In<'_>>) {
    let (channels, width) = (x.cols, geometry.out_width());
    let (k, n) = (9 * channels, out.cols);
    let (bias, filters) = (bias.row_vec(0), filters(&w, channels));
    for_tasks(out.split_rows(PIXEL_BLOCK), |s: &mut ConvScratch, (first, mut piece): (usize, Out<'_>)| {
        s.patches.resize(PIXEL_BLOCK * k, 0.0);
        s.result.resize(PIXEL_BLOCK * n, 0.0);
        s.residual.resize(n, 0.0);
        for (local, patch) in s.patches.chunks_exact_mut(k).take(piece.rows).enumerate() {
            let (y, px) = ((first + local) / width, (first + local) % width);
            for (p, to) in patch.chunks_exact_mut(channels).enumerate() {
                match geometry.source(y, px, p / 3, p % 3) {
                    Some(pixel) => x.load(pixel, 0, to),
                    None => to.fill(0.0),
                }
            }
        }
        matmul(&mut s.result, Strided::new(&s.patches, piece.rows, k), Strided::new(&filters, n, k).transposed(), false);
        for (local, values) in s.result.chunks_exact_mut(n).take(piece.rows).enumerate() {
            values.iter_mut().zip(&bias).for_each(|(v, b)| *v += b);
            if let Some(residual) = &residual {
                residual.load(first + local, 0, &mut s.residual);
                values.iter_mut().zip(&s.residual).for_each(|(v, r)| *v += r);
            }
            piece.store(local, 0, values);
        }
    });
}

/// Mean and variance of each group of channels, from sums and sums of squares in f64, where the cancellation between them is
/// harmless. Partial sums are computed over fixed blocks and added in order, so the result does not depend on the number of
/// threads.
fn group_stats(x: &In<'_>, groups: usize) -> Vec<(f32, f32)> {
    const PIXELS: usize = 1024;
    let width = x.cols / groups;
    let partial: Vec<Vec<(f64, f64)>> = (0..x.rows.div_ceil(PIXELS))
        .into_par_iter()
        .map(|block| {
            // One accumulator per channel, which vectorises; groups are only a few channels wide.
            let (mut sums, mut squares, mut row) = (vec![0.0; x.cols], vec![0.0; x.cols], vec![0.0; x.cols]);
            for r in block * PIXELS..((block + 1) * PIXELS).min(x.rows) {
                x.load(r, 0, &mut row);
                for ((sum, square), &v) in sums.iter_mut().zip(&mut squares).zip(&row) {
                    let v = f64::from(v);
                    *sum += v;
                    *square += v * v;
                }
            }
            sums.chunks_exact(width).zip(squares.chunks_exact(width)).map(|(a, b)| (a.iter().sum(), b.iter().sum())).collect()
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

/// Parameters of a group normalisation.
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
    let (mut scale, shift, width) = (norm.weight.row_vec(0), norm.bias.row_vec(0), x.cols / norm.groups);
    let mean: Vec<f32> = (0..x.cols).map(|c| stats[c / width].0).collect();
    scale.iter_mut().enumerate().for_each(|(c, scale)| *scale /= (stats[c / width].1 + norm.eps).sqrt());
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        // The mean is subtracted first: folded into the shift, it would cancel against a term much larger than the result.
        for (((v, mean), scale), shift) in buffer.iter_mut().zip(&mean).zip(&scale).zip(&shift) {
            *v = (*v - mean) * scale + shift;
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
