//! The table of cases: every op at awkward sizes. Sizes are one, primes, powers of two and their neighbors, and sizes that cross the blocks
//! of a backend (more than 1,024 rows, 512 columns, 256 queries, 512 keys, 512 pixels). Cases run in f32 and bf16, contiguous and strided.
//! Further cases have the widths of the real models; their names contain `klein`.

use super::attention::{self, Heads, Scores, attend};
use super::convolutions::{self, Beside};
use super::{Case, Expected, Fit, Mat, PADDING, Rig, fp8_gemms, gemms, lora_gemms, nvfp4_gemms, quantized, want};
use kiln::internals::backend::{GroupNorm, LatentStats, Modulated, Op, RopeStyle, Sampling, Seam};
use kiln::internals::tensor::DType::{self, Bf16, F16, F32, U8};
use kiln::internals::tensor::Stored;
use std::cell::Cell;

pub const EPS: f32 = 1e-6;

/// Rows and columns of element-wise and row-wise ops.
const SHAPES: [(usize, usize); 6] = [(1, 1), (7, 113), (113, 128), (129, 7), (1, 3072), (1031, 521)];

/// The dtype of a weight in the file and in the backend.
pub const WEIGHT_TYPES: [(DType, DType); 7] =
    [(Bf16, Bf16), (F32, F32), (F16, F16), (F16, Bf16), (F32, Bf16), (Bf16, F32), (F16, F32)];

/// The dtypes and layouts that a case runs in.
pub type Variants = &'static [(DType, Fit)];
pub const ALL: Variants = &[(F32, Fit::Whole), (F32, Fit::Slice), (Bf16, Fit::Whole), (Bf16, Fit::Slice)];
/// For cases in which the error of naive f32 arithmetic is small by chance.
pub const BF16: Variants = &[(Bf16, Fit::Whole), (Bf16, Fit::Slice)];
/// For cases with ten million values and more.
pub const TWO: Variants = &[(F32, Fit::Slice), (Bf16, Fit::Whole)];

pub struct Table {
    pub cases: Vec<Case>,
    /// Appended to the names of cases.
    label: &'static str,
    pub variants: Variants,
}

impl Table {
    pub fn new(variants: Variants) -> Self {
        Self { cases: Vec::new(), label: "", variants }
    }

    pub fn add(&mut self, name: String, body: impl Fn(&mut Rig<'_>) + Clone + 'static) {
        for &(storage, fit) in self.variants {
            let name = format!("{name}{} {storage:?} {fit:?}", self.label).to_lowercase();
            self.cases.push(Case { name, storage, fit, body: Box::new(body.clone()) });
        }
    }
}

/// The whole table.
pub fn all() -> Vec<Case> {
    let mut table = Table::new(ALL);
    awkward(&mut table);
    klein(&mut table);
    table.cases.extend(quantized::all().into_iter().filter(|case| quantized::has_kernels(&case.name)));
    table.cases
}

fn awkward(table: &mut Table) {
    row_wise(table);
    gemms::all(table);
    gemms::expanded(table);
    gemms::projections(table);
    fp8_gemms::all(table);
    nvfp4_gemms::all(table);
    lora_gemms::all(table);
    attention::all(table);
    convolutions::all(table);
    group_norms(table);
    latents(table);
}

/// The widths of the real models (4B: 3072 with a text encoder of 2560, 9B: 4096 and 4096, and their VAE). There are few rows, which keeps
/// naive loops quick. Kernels are selected by width.
fn klein(table: &mut Table) {
    table.label = " klein";
    for cols in [2560, 3072, 4096, 12288] {
        rms_norm(table, 5, cols);
        layer_norm_modulate(table, 5, cols, (4.0, 1.0));
    }
    table.variants = TWO;
    for (rows, side) in [(5, 3072), (3, 4096)] {
        gemms::linear(table, rows, side, side, false);
        gemms::gate_residual(table, rows, side, side, true, false);
    }
    gemms::swiglu(table, 3, 3072, 9216);
    gemms::qkv(table, (2, 3072, 24, 24, 128, RopeStyle::Interleaved, Some(9216)), true);
    table.variants = ALL;
    gemms::qkv(table, (5, 2560, 32, 8, 128, RopeStyle::HalfSplit, None), true);
    for heads in [Heads::Plain, Heads::UNSCALED] {
        attend(table, (130, &[200], 24, 24, 128, false), Scores::Bounded, heads);
    }
    attend(table, (70, &[70], 32, 8, 128, true), Scores::Usual, Heads::Plain);
    for (from, to) in [(512, 512), (256, 128), (128, 3)] {
        convolutions::conv(table, (5, 3, from, to, Sampling::Same, Beside::Nothing, (to == 128).then_some(32)));
    }
    convolutions::conv(table, (5, 3, 128, 128, Sampling::Same, Beside::Shortcut(256), Some(32)));
    for channels in [128, 96] {
        convolutions::norm_conv(table, (5, 3, channels, 3, 32), true);
    }
    for channels in [512, 384, 256, 128, 96] {
        group_norm(table, 37, channels, 32, false, true);
    }
}

fn blend(table: &mut Table, rows: usize, cols: usize, seam: Seam, what: &str) {
    table.add(format!("blend {rows}x{cols} at the {what}"), move |rig| {
        let (into, from) = (rig.updated(rows, cols), rig.input(rows, cols, |v| v));
        let op = Op::Blend { into: into.t, from: from.t, seam };
        rig.run(op, &[(into.t, want!(blend(&into.host, &from.host, seam)))]);
    });
}

fn row_wise(table: &mut Table) {
    for (rows, cols) in SHAPES {
        table.add(format!("copy {rows}x{cols}"), move |rig| {
            let (x, out) = (rig.input(rows, cols, |v| v), rig.output(rows, cols));
            rig.run(Op::Copy { out, x: x.t }, &[(out, want!(copy(&x.host)))]);
        });
        for (from, to) in [(F32, Bf16), (Bf16, F32)] {
            table.add(format!("copy {rows}x{cols} from {from:?} to {to:?}"), move |rig| {
                let (x, out) = (rig.input_as(from, rows, cols, |v| v), rig.output_as(to, rows, cols));
                rig.run(Op::Copy { out, x: x.t }, &[(out, want!(copy(&x.host)))]);
            });
        }
        table.add(format!("silu {rows}x{cols}"), move |rig| {
            let (x, out) = (rig.input(rows, cols, |v| 20.0 * v), rig.output(rows, cols));
            rig.run(Op::Silu { out, x: x.t }, &[(out, want!(silu(&x.host)))]);
        });
        rms_norm(table, rows, cols);
        layer_norm_modulate(table, rows, cols, (4.0, 1.0));
        table.add(format!("guidance {rows}x{cols}"), move |rig| {
            let (cond, uncond) = (rig.input(rows, cols, |v| v), rig.input(rows, cols, |v| v));
            let out = rig.output(rows, cols);
            let op = Op::Guidance { out, cond: cond.t, uncond: uncond.t, scale: 3.5 };
            rig.run(op, &[(out, want!(guidance(&cond.host, &uncond.host, 3.5)))]);
        });
        table.add(format!("euler {rows}x{cols}"), move |rig| {
            let (x, v) = (rig.updated_as(F32, rows, cols), rig.input(rows, cols, |v| v));
            let op = Op::Euler { latents: x.t, velocity: v.t, dt: -0.37 };
            rig.run(op, &[(x.t, want!(euler(&x.host, &v.host, -0.37)))]);
        });
        renoise(table, rows, cols);
        for (seam, what) in [(Seam::Top, "top"), (Seam::Left { channels: 1 }, "left")] {
            blend(table, rows, cols, seam, what);
        }
        non_finite(table, rows, cols);
        largest_magnitude(table, rows, cols, 0.0, "");
        largest_magnitude(table, rows, cols, 1e30, " and a larger one before");
        table.add(format!("pixels {rows}x{cols}"), move |rig| {
            let (x, out) = (rig.input(rows, cols, |v| 1.25 * v), rig.output_as(U8, rows, cols));
            rig.run(Op::Pixels { out, x: x.t }, &[(out, want!(pixels(&x.host)))]);
        });
    }
    // Overlaps of images have three channels, overlaps of latents 32.
    blend(table, 11, 3 * 9, Seam::Left { channels: 3 }, "left, 3 channels");
    blend(table, 5, 32 * 4, Seam::Left { channels: 32 }, "left, 32 channels");
    largest_magnitude(table, 0, 128, 0.25, "");
    for (rows, cols) in [(7, 113), (113, 128)] {
        let infinite = |v| if v < -0.9 { f32::NEG_INFINITY } else { v };
        largest_of(table, format!("{rows}x{cols} with infinities"), rows, cols, 0.0, infinite);
        let nan = |v| match v {
            0.9.. => -f32::NAN,
            ..-0.9 => f32::INFINITY,
            v => v,
        };
        largest_of(table, format!("{rows}x{cols} with nan"), rows, cols, 0.0, nan);
        largest_of(table, format!("{rows}x{cols} and nan before"), rows, cols, f32::NAN, |v| v);
    }
    // Widths at which another kernel is selected, and their neighbors. Some threads have a vector less than others, or none.
    for cols in [8, 264, 1024, 1032, 2040, 3064, 3080, 4104, 6144, 6152, 8192, 8200] {
        rms_norm(table, 2, cols);
        layer_norm_modulate(table, 1, cols, (4.0, 1.0));
    }
    // The mean is a hundred times the deviation, or the deviation is zero.
    table.variants = BF16;
    for cols in [67, 2560, 3072, 8192] {
        layer_norm_modulate(table, 4, cols, (100.0, 1.0));
        layer_norm_modulate(table, 4, cols, (100.0, 0.0));
    }
    // More than one wave of CTAs on a GPU.
    table.variants = TWO;
    non_finite(table, 3001, 3000);
    largest_magnitude(table, 3001, 3000, 0.0, "");
    table.variants = ALL;
}

/// An image at three noise levels. What the op must not read is NaN: the latents that it replaces, image and noise of the others.
fn renoise(table: &mut Table, rows: usize, cols: usize) {
    let but_nan = move |is_nan: Vec<bool>| {
        let at = Cell::new(0);
        move |v: f32| if is_nan[at.replace(at.get() + 1) / cols] { f32::NAN } else { v }
    };
    for (sigma, some) in [(1.0, false), (0.6, true), (0.0, true)] {
        let what = if some { "in some rows" } else { "in all rows" };
        table.add(format!("renoise {rows}x{cols} to {sigma} {what}"), move |rig| {
            let keep = some.then(|| rig.input_as(F32, rows, 1, |v| f32::from(v > 0.0)));
            let stays: Vec<bool> = (0..rows).map(|r| keep.as_ref().is_some_and(|k| k.host.at::<f32>(r, 0) == 0.0)).collect();
            let init = rig.input(rows, cols, but_nan(stays.clone()));
            let noise = rig.input_as(F32, rows, cols, but_nan(stays.clone()));
            let x = rig.updated_with(F32, rows, cols, but_nan(stays.iter().map(|stays| !stays).collect()));
            let op = Op::Renoise { latents: x.t, init: init.t, noise: noise.t, keep: keep.map(|keep| keep.t), sigma };
            rig.run(op, &[(x.t, want!(renoise(&x.host, [&init.host, &noise.host], &stays, sigma)))]);
        });
    }
}

fn non_finite(table: &mut Table, rows: usize, cols: usize) {
    table.add(format!("non_finite {rows}x{cols}"), move |rig| {
        let x = rig.input(rows, cols, |v| match v {
            0.6.. => f32::INFINITY,
            ..-0.9 => f32::NAN,
            -0.8..-0.7 => f32::NEG_INFINITY,
            v => v * f32::MAX / 2.0,
        });
        let found = x.host.row::<f32>(0).len() * rows - finite(&x.host);
        let count = rig.output_as(F32, 1, 1);
        let want = |_| Expected::naive_f32(vec![found as f64], vec![found as f32]);
        rig.run(Op::NonFinite { count, x: x.t }, &[(count, Box::new(want))]);
    });
}

/// `before` is the result of an earlier op.
fn largest_magnitude(table: &mut Table, rows: usize, cols: usize, before: f32, label: &str) {
    largest_of(table, format!("{rows}x{cols}{label}"), rows, cols, before, |v| v * 1e20);
}

fn largest_of(table: &mut Table, label: String, rows: usize, cols: usize, before: f32, value: fn(f32) -> f32) {
    table.add(format!("largest_magnitude {label}"), move |rig| {
        let x = rig.input(rows, cols, value);
        let largest = rig.operand(1, 1, F32, PADDING, |_| before);
        let most = x.host.data.iter().map(|v| v.abs()).fold(before, |a, b| if a.total_cmp(&b).is_lt() { b } else { a });
        let want = |_| Expected::naive_f32(vec![f64::from(most)], vec![most]);
        rig.run(Op::LargestMagnitude { largest: largest.t, x: x.t }, &[(largest.t, Box::new(want))]);
    });
}

fn rms_norm(table: &mut Table, rows: usize, cols: usize) {
    table.add(format!("rms_norm {rows} rows of {cols}"), move |rig| {
        let (x, out, w) = (rig.input(rows, cols, |v| 8.0 * v), rig.output(rows, cols), rig.vector(cols));
        let op = Op::RmsNorm { out, x: x.t, weight: w.t, eps: EPS };
        rig.run(op, &[(out, want!(rms_norm(&x.host, &w.host, EPS)))]);
    });
}

/// The mean is several standard deviations from zero, as in late blocks.
fn layer_norm_modulate(table: &mut Table, rows: usize, cols: usize, (mean, spread): (f32, f32)) {
    table.add(format!("layer_norm_modulate {rows} and 3 rows of {cols} around {mean} by {spread}"), move |rig| {
        let format = rig.plain();
        two_layer_norms(rig, cols, |v| spread * v + mean, [(rows, format), (3, format)]);
    });
}

/// The layer norms of two streams, each with a number of rows and a result format. Inputs are `f` of values in -1..1.
pub fn two_layer_norms(rig: &mut Rig<'_>, cols: usize, f: impl Fn(f32) -> f32, streams: [(usize, Stored); 2]) {
    let streams = streams.map(|(rows, format)| {
        let (x, out) = (rig.input(rows, cols, &f), rig.output_stored(format, rows, cols));
        (x, out, rig.input(1, cols, |v| v), rig.input(1, cols, |v| v))
    });
    let [a, b] = &streams;
    let ops = [a, b].map(|(x, out, shift, scale)| Modulated { out: *out, x: x.t, shift: shift.t, scale: scale.t });
    rig.run(
        Op::LayerNormModulate { streams: &ops, eps: EPS },
        &[
            (a.1, want!(layer_norm_modulate(&a.0.host, &a.2.host, &a.3.host, EPS))),
            (b.1, want!(layer_norm_modulate(&b.0.host, &b.2.host, &b.3.host, EPS))),
        ],
    );
}

fn finite(m: &Mat) -> usize {
    (0..m.rows).map(|r| m.row::<f32>(r).iter().filter(|v| v.is_finite()).count()).sum()
}

fn group_norms(table: &mut Table) {
    let shapes = [
        (1, 32, 32),
        (1, 40, 8),
        (1, 128, 32),
        (1, 512, 32),
        (5, 64, 64),
        (7, 96, 32),
        (67, 64, 16),
        (129, 128, 8),
        (129, 256, 32),
        (113, 40, 5),
        (129, 32, 1),
        (1031, 128, 32),
        // More channels than a CTA handles at once, so that groups cross its boundaries.
        (3, 2304, 3),
    ];
    for (pixels, channels, groups) in shapes {
        for (given, silu) in [(false, false), (false, true), (true, true)] {
            group_norm(table, pixels, channels, groups, given, silu);
        }
    }
    for (pixels, channels, groups) in [(1, 40, 8), (129, 256, 32), (1031, 128, 32), (113, 40, 5)] {
        group_norm_in_place(table, pixels, channels, groups);
    }
    // More than one wave of CTAs on a GPU.
    table.variants = TWO;
    group_norm(table, 20_011, 256, 32, false, true);
    table.variants = ALL;
}

fn group_norm(table: &mut Table, pixels: usize, channels: usize, groups: usize, given: bool, silu: bool) {
    let name = format!("group_norm {pixels}x{channels} groups {groups} stats given {given} silu {silu}");
    table.add(name, move |rig| {
        let (w, bias) = (rig.vector(channels), rig.vector(channels));
        let (x, out) = (rig.input(pixels, channels, |v| v + 4.0), rig.output(pixels, channels));
        let stats = given.then(|| rig.input_as(F32, groups, 2, |v| v.abs() + 0.1));
        let norm = GroupNorm { weight: w.t, bias: bias.t, groups, eps: EPS };
        let host = stats.as_ref().map(|s| &s.host);
        let op = Op::GroupNorm { out, x: x.t, norm: &norm, stats: stats.as_ref().map(|s| s.t), silu };
        let want = want!(group_norm(&x.host, (&w.host, &bias.host), host, groups, EPS, silu));
        rig.run(op, &[(out, want)]);
    });
}

/// A group norm that overwrites its input, as in the VAE.
fn group_norm_in_place(table: &mut Table, pixels: usize, channels: usize, groups: usize) {
    table.add(format!("group_norm {pixels}x{channels} groups {groups} in place"), move |rig| {
        let (w, bias, x) = (rig.vector(channels), rig.vector(channels), rig.updated(pixels, channels));
        let stats = rig.input_as(F32, groups, 2, |v| v.abs() + 0.1);
        let norm = GroupNorm { weight: w.t, bias: bias.t, groups, eps: EPS };
        let op = Op::GroupNorm { out: x.t, x: x.t, norm: &norm, stats: Some(stats.t), silu: true };
        let want = want!(group_norm(&x.host, (&w.host, &bias.host), Some(&stats.host), groups, EPS, true));
        rig.run(op, &[(x.t, want)]);
    });
}

/// The factors of a table's channels add up to some 1 for unit latents, so few colors are clamped.
fn preview(table: &mut Table, width: usize, height: usize, channels: usize) {
    table.add(format!("preview {width}x{height} tokens {channels} channels"), move |rig| {
        let latents = rig.input_as(F32, width * height, 4 * channels, |v| 4.0 * v);
        let factors = rig.input_as(F32, channels + 1, 3, |v| 0.3 * v);
        let out = rig.output_as(U8, 4 * width * height, 3);
        let op = Op::Preview { out, latents: latents.t, table: factors.t, width };
        rig.run(op, &[(out, want!(preview(&latents.host, &factors.host, width)))]);
    });
}

fn latents(table: &mut Table) {
    // The last one has as many tokens as a sequence may have.
    for (width, height, channels) in [(1, 1, 1), (3, 7, 32), (17, 15, 32), (13, 11, 3), (250, 208, 32)] {
        preview(table, width, height, channels);
    }
    for (width, height, channels) in [(1, 1, 1), (3, 7, 4), (13, 11, 32), (37, 29, 3)] {
        for inverse in [false, true] {
            let name = format!("{}patchify {width}x{height} tokens {channels} channels", if inverse { "un" } else { "" });
            table.add(name, move |rig| {
                let (tokens, packed) = (width * height, 4 * channels);
                let mean = rig.vector(packed);
                // The rig's weights may be negative and a variance is not, so the variance is an activation here.
                let var = rig.input_as(F32, 1, packed, |v| v.abs() + 0.1);
                let stats = LatentStats { mean: mean.t, var: var.t, eps: EPS };
                let host = (&mean.host, &var.host);
                if inverse {
                    let (x, out) = (rig.input(tokens, packed, |v| v), rig.output(4 * tokens, channels));
                    let op = Op::Unpatchify { out, x: x.t, stats: &stats, width };
                    rig.run(op, &[(out, want!(unpatchify(&x.host, host, EPS, width)))]);
                } else {
                    let (x, out) = (rig.input(4 * tokens, channels, |v| v), rig.output(tokens, packed));
                    let op = Op::Patchify { out, x: x.t, stats: &stats, width };
                    rig.run(op, &[(out, want!(patchify(&x.host, host, EPS, width)))]);
                }
            });
        }
    }
}
