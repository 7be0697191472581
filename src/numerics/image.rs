//! The arithmetic of the image ops: convolution, group normalization, and packing of latents into tokens.

use crate::kernels::{Layer, for_rows, for_tasks};
use crate::math::{silu, to_byte};
use crate::view::{In, Out, Strided, Watch, matmul};
use crate::{Sampling, Seam};
use rayon::prelude::*;

/// The size of a convolution's input, and how the resolution changes.
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

    /// The phase of an output pixel, which decides its filters.
    fn phase(self, pixel: usize) -> usize {
        match self.sampling {
            Sampling::Up => pixel / self.out_width() % 2 * 2 + pixel % self.out_width() % 2,
            Sampling::Same | Sampling::Down => 0,
        }
    }

    /// The input pixel under a filter tap for an output pixel; `None` stands for zero padding.
    #[inline]
    fn source(self, pixel: usize, tap: usize) -> Option<usize> {
        let side = self.sampling.taps().isqrt();
        let at = |o: usize, k: usize, size: usize| match self.sampling {
            Sampling::Same => (o + k).checked_sub(1).filter(|&i| i < size),
            Sampling::Up => (o / 2 + o % 2 + k).checked_sub(1).filter(|&i| i < size),
            Sampling::Down => Some(2 * o + k).filter(|&i| i < size),
        };
        let (y, x) = (pixel / self.out_width(), pixel % self.out_width());
        Some(at(y, tap / side, self.height)? * self.width + at(x, tap % side, self.width)?)
    }
}

/// The filters of a convolution, by tap, then channel, as patches are gathered, and its bias.
pub struct Filters {
    geometry: Geometry,
    channels: usize,
    /// `[out channels, taps * channels]` for each phase.
    phases: Vec<Vec<f32>>,
    bias: Vec<f32>,
}

impl Filters {
    /// The phase form is stored in this order. The checkpoint stores 3x3 filters by channel, then tap.
    pub fn new(w: &In<'_>, bias: &In<'_>, geometry: Geometry) -> Self {
        let (phases, taps) = (geometry.sampling.phases(), geometry.sampling.taps());
        let (k, channels) = (w.cols / phases, w.cols / phases / taps);
        let of_phase = |phase: usize| {
            let mut filters = vec![0.0; w.rows * k];
            filters.par_chunks_mut(k.max(1)).enumerate().for_each_init(
                || vec![0.0; k],
                |row, (o, filter)| {
                    if geometry.sampling == Sampling::Up {
                        return w.load(o, phase * k, filter);
                    }
                    w.load(o, 0, row);
                    for (c, of_channel) in row.chunks_exact(taps).enumerate() {
                        of_channel.iter().enumerate().for_each(|(tap, &v)| filter[tap * channels + c] = v);
                    }
                },
            );
            filters
        };
        Self { geometry, channels, phases: (0..phases).map(of_phase).collect(), bias: bias.row_vec(0) }
    }
}

/// Output pixels per gathered block of a phase: enough to amortize packing the filters again for each block.
const PIXEL_BLOCK: usize = 512;

#[derive(Default)]
struct ConvScratch {
    /// The positions of a phase's pixels in the block.
    pixels: Vec<usize>,
    patches: Vec<f32>,
    result: Vec<f32>,
    added: Vec<f32>,
}

/// Computes the output pixels from `first` on of a 3x3 convolution as im2col and GEMM. The input patches of each phase are
/// gathered into a matrix, which is multiplied by the filters. `load` reads an input pixel. `finish` gets the results of a phase
/// before they are stored: its pixels, scratch memory and one row per pixel.
fn convolve(
    s: &mut ConvScratch,
    (first, mut piece): (usize, Out<'_>),
    filters: &Filters,
    load: impl Fn(usize, &mut [f32]),
    finish: impl Fn(&[usize], &mut Vec<f32>, &mut [f32]),
) {
    let Filters { geometry, channels, .. } = *filters;
    let (k, n) = (geometry.sampling.taps() * channels, piece.cols);
    for (phase, filter) in filters.phases.iter().enumerate() {
        if piece.watch().is_stopped() {
            return;
        }
        s.pixels.clear();
        s.pixels.extend((first..first + piece.rows).filter(|&pixel| geometry.phase(pixel) == phase));
        s.patches.resize(s.pixels.len() * k, 0.0);
        s.result.resize(s.pixels.len() * n, 0.0);
        for (&pixel, patch) in s.pixels.iter().zip(s.patches.chunks_exact_mut(k.max(1))) {
            for (tap, to) in patch.chunks_exact_mut(channels).enumerate() {
                match geometry.source(pixel, tap) {
                    Some(source) => load(source, to),
                    None => to.fill(0.0),
                }
            }
        }
        let patches = Strided::new(&s.patches, s.pixels.len(), k);
        matmul(&mut s.result, patches, Strided::new(filter, n, k).transposed(), false);
        for values in s.result.chunks_exact_mut(n.max(1)) {
            values.iter_mut().zip(&filters.bias).for_each(|(v, b)| *v += b);
        }
        finish(&s.pixels, &mut s.added, &mut s.result);
        for (&pixel, values) in s.pixels.iter().zip(s.result.chunks_exact(n.max(1))) {
            piece.store(pixel - first, 0, values);
        }
    }
}

/// A 3x3 convolution. A residual, or the 1x1 convolution of another image, is added to its result.
pub fn conv(out: Out<'_>, x: In<'_>, filters: &Filters, residual: Option<In<'_>>, shortcut: Option<(In<'_>, Layer<'_>)>) {
    let n = out.cols;
    let shortcut = shortcut.map(|(x, w)| {
        let weight: Vec<f32> = (0..n).flat_map(|o| w.weight.row_vec(o)).collect();
        (x, weight, w.bias.map_or_else(|| vec![0.0; n], |b| b.row_vec(0)))
    });
    let tasks = out.split_rows(PIXEL_BLOCK * filters.phases.len());
    for_tasks(tasks, |s: &mut ConvScratch, task: (usize, Out<'_>)| {
        convolve(
            s,
            task,
            filters,
            |pixel, to| x.load(pixel, 0, to),
            |pixels, added, result| {
                if let Some(residual) = &residual {
                    added.resize(n, 0.0);
                    for (&pixel, values) in pixels.iter().zip(result.chunks_exact_mut(n.max(1))) {
                        residual.load(pixel, 0, added);
                        values.iter_mut().zip(&*added).for_each(|(v, r)| *v += r);
                    }
                }
                if let Some((x, weight, bias)) = &shortcut {
                    added.resize(pixels.len() * x.cols, 0.0);
                    pixels.iter().zip(added.chunks_exact_mut(x.cols.max(1))).for_each(|(&pixel, to)| x.load(pixel, 0, to));
                    let images = Strided::new(added, pixels.len(), x.cols);
                    matmul(result, images, Strided::new(weight, n, x.cols).transposed(), true);
                    for values in result.chunks_exact_mut(n.max(1)) {
                        values.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
                    }
                }
            },
        );
    });
}

/// Mean and variance of each channel group, from sums and sums of squares in f64, where the cancellation between them is
/// harmless. Partial sums cover fixed blocks and are added in order, so the result does not depend on the number of threads.
fn group_stats(x: &In<'_>, groups: usize, watch: &Watch) -> Vec<(f32, f32)> {
    const PIXELS: usize = 1024;
    let width = x.cols / groups;
    let partial: Vec<Vec<(f64, f64)>> = (0..x.rows.div_ceil(PIXELS))
        .into_par_iter()
        .map(|block| {
            // One accumulator per channel, which vectorizes; groups are only a few channels wide.
            let (mut sums, mut squares, mut row) = (vec![0.0; x.cols], vec![0.0; x.cols], vec![0.0; x.cols]);
            let rows = if watch.is_stopped() { 0..0 } else { block * PIXELS..((block + 1) * PIXELS).min(x.rows) };
            for r in rows {
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
    for (g, (mean, var)) in group_stats(&x, stats.rows, stats.watch()).into_iter().enumerate() {
        stats.store(g, 0, &[mean, var]);
    }
}

/// Parameters of a group normalization.
pub struct GroupParams<'a> {
    pub weight: In<'a>,
    pub bias: In<'a>,
    pub groups: usize,
    pub eps: f32,
}

/// A group normalization as scales and shifts of channels.
struct ChannelNorm {
    mean: Vec<f32>,
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl ChannelNorm {
    fn new(x: &In<'_>, norm: &GroupParams<'_>, stats: Option<In<'_>>, watch: &Watch) -> Self {
        let stats: Vec<(f32, f32)> = match stats {
            Some(stats) => (0..stats.rows).map(|g| stats.row_vec(g)).map(|s| (s[0], s[1])).collect(),
            None => group_stats(x, norm.groups, watch),
        };
        let (mut scale, width) = (norm.weight.row_vec(0), x.cols / norm.groups);
        scale.iter_mut().enumerate().for_each(|(c, scale)| *scale /= (stats[c / width].1 + norm.eps).sqrt());
        Self { mean: (0..x.cols).map(|c| stats[c / width].0).collect(), scale, shift: norm.bias.row_vec(0) }
    }

    /// Normalizes the channels of a pixel.
    fn apply(&self, pixel: &mut [f32], apply_silu: bool) {
        // The mean is subtracted first: folded into the shift, it would cancel against a term much larger than the result.
        for (((v, mean), scale), shift) in pixel.iter_mut().zip(&self.mean).zip(&self.scale).zip(&self.shift) {
            *v = (*v - mean) * scale + shift;
        }
        if apply_silu {
            pixel.iter_mut().for_each(|v| *v = silu(*v));
        }
    }
}

pub fn group_norm(out: Out<'_>, x: In<'_>, norm: &GroupParams<'_>, stats: Option<In<'_>>, apply_silu: bool) {
    let norm = ChannelNorm::new(&x, norm, stats, out.watch());
    for_rows(out, x.cols, |r, buffer, out, local| {
        x.load(r, 0, buffer);
        norm.apply(buffer, apply_silu);
        out.store(local, 0, buffer);
    });
}

/// Group normalization, `silu` and a convolution of the same size. Only a few rows of the normalized image exist at a time, in f32.
pub fn norm_conv(out: Out<'_>, x: In<'_>, norm: &GroupParams<'_>, stats: Option<In<'_>>, filters: &Filters) {
    /// Image rows per task. The rows above and below are normalized twice.
    const ROWS: usize = 8;
    let (norm, width, n) = (ChannelNorm::new(&x, norm, stats, out.watch()), filters.geometry.width, out.cols);
    let tasks = out.split_rows((ROWS * width).max(1));
    for_tasks(tasks, |(image, s): &mut (Vec<f32>, ConvScratch), (first, mut piece): (usize, Out<'_>)| {
        if piece.watch().is_stopped() {
            return;
        }
        let pixels = first.saturating_sub(width)..(first + piece.rows + width).min(x.rows);
        image.resize(pixels.len() * x.cols, 0.0);
        for (pixel, to) in pixels.clone().zip(image.chunks_exact_mut(x.cols)) {
            x.load(pixel, 0, to);
            norm.apply(to, true);
        }
        let load = |pixel: usize, to: &mut [f32]| to.copy_from_slice(&image[(pixel - pixels.start) * x.cols..][..x.cols]);
        for start in (0..piece.rows).step_by(PIXEL_BLOCK) {
            let block = piece.part(start..(start + PIXEL_BLOCK).min(piece.rows), 0..n);
            convolve(s, (first + start, block), filters, load, |_, _, _| {});
        }
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

/// The colors of latents as bytes: the sum of the channels of a pixel times their rows of `table`, plus its last row. Products and sums
/// are rounded one by one, in the order of the channels.
pub fn preview(out: Out<'_>, latents: In<'_>, table: In<'_>, width: usize) {
    let mut rows: Vec<Vec<f32>> = (0..table.rows).map(|row| table.row_vec(row)).collect();
    let bias = rows.pop().unwrap_or_default();
    for_rows(out, latents.cols + bias.len(), |pixel, buffer, out, local| {
        let (packed, color) = buffer.split_at_mut(latents.cols);
        let (y, x) = (pixel / (2 * width), pixel % (2 * width));
        latents.load((y / 2) * width + x / 2, 0, packed);
        color.copy_from_slice(&bias);
        for (value, factors) in packed.iter().skip((y % 2) * 2 + x % 2).step_by(4).zip(&rows) {
            color.iter_mut().zip(factors).for_each(|(sum, factor)| *sum += factor * value);
        }
        color.iter_mut().for_each(|v| *v = to_byte(*v));
        out.store(local, 0, color);
    });
}

/// A linear blend over the rows or columns of pixels that two tiles share. Products and sum are rounded separately.
pub fn blend(into: Out<'_>, from: In<'_>, seam: Seam) {
    let (rows, cols) = (from.rows, from.cols);
    let weight = |step: usize, steps: usize| step as f32 / steps as f32;
    for_rows(into, 2 * cols, |r, buffer, out, local| {
        let (new, old) = buffer.split_at_mut(cols);
        out.load(local, 0, new);
        from.load(r, 0, old);
        for (c, (new, old)) in new.iter_mut().zip(old).enumerate() {
            let weight = match seam {
                Seam::Top => weight(r, rows),
                Seam::Left { channels } => weight(c / channels, cols / channels),
            };
            *new = (1.0 - weight) * *old + weight * *new;
        }
        out.store(local, 0, new);
    });
}
