//! Convolutions: with a residual or a shortcut, at every change of resolution, with statistics of their results, and after a group norm.

use super::cases::{EPS, Table};
use super::oracle::{self, Filter};
use super::{Check, Expected, stored};
use kiln::internals::backend::{Conv, GroupNorm, Linear, Op, Role, Sampling, Shortcut};
use kiln::internals::tensor::DType::{Bf16, F32};
use kiln::internals::tensor::Stored;

/// What is added to the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Beside {
    Nothing,
    Residual,
    /// A 1x1 convolution of an image with this many channels.
    Shortcut(usize),
}

/// Width, height, input and output channels, resampling, what is added, groups of the statistics.
pub type ConvShape = (usize, usize, usize, usize, Sampling, Beside, Option<usize>);

/// Width, height, input and output channels, groups.
pub type NormConvShape = (usize, usize, usize, usize, usize);

pub fn all(table: &mut Table) {
    use Beside::{Nothing, Residual, Shortcut};
    use Sampling::{Down, Same, Up};
    let shapes = [
        (1, 1, 3, 40, Same, Nothing, None),
        (1, 1, 40, 3, Up, Residual, None),
        (2, 2, 32, 32, Down, Nothing, Some(32)),
        (5, 7, 3, 32, Same, Residual, Some(8)),
        (7, 3, 40, 32, Up, Nothing, Some(8)),
        (6, 10, 32, 40, Down, Residual, None),
        (17, 9, 40, 40, Same, Nothing, Some(5)),
        (19, 31, 32, 40, Same, Residual, Some(4)),
        (13, 11, 32, 3, Up, Nothing, None),
        (62, 38, 3, 32, Down, Nothing, Some(16)),
        (31, 37, 3, 32, Same, Nothing, Some(32)),
        (17, 9, 40, 24, Same, Shortcut(3), None),
        (5, 7, 3, 32, Same, Shortcut(40), Some(8)),
        // Whole tiles of channels, in groups of 2 to 128.
        (17, 9, 8, 128, Same, Nothing, Some(64)),
        (19, 31, 32, 128, Same, Residual, Some(32)),
        (7, 3, 40, 128, Up, Nothing, Some(16)),
        (19, 23, 8, 128, Up, Nothing, Some(32)),
        (62, 38, 8, 256, Down, Nothing, Some(16)),
        (33, 35, 8, 256, Same, Residual, Some(4)),
        (9, 9, 8, 128, Same, Nothing, Some(1)),
        (19, 31, 16, 128, Same, Shortcut(72), Some(32)),
        // Input channels of a k-block and a part of one: up to half of it, and more than half.
        (17, 9, 96, 96, Same, Nothing, Some(32)),
        (5, 3, 72, 96, Up, Nothing, None),
        (5, 3, 104, 96, Same, Shortcut(96), None),
        (5, 3, 96, 96, Same, Shortcut(120), None),
        // Pixels to channels.
        (1, 1, 3, 128, Same, Nothing, Some(32)),
        (33, 17, 3, 128, Same, Nothing, Some(32)),
        (67, 35, 2, 96, Same, Nothing, Some(32)),
        (300, 3, 1, 32, Same, Nothing, None),
        (18, 20, 3, 8, Same, Nothing, None),
    ];
    shapes.into_iter().for_each(|shape| conv(table, shape));
    let shapes = [
        (1, 1, 32, 3, 32),
        (3, 2, 40, 5, 8),
        (5, 7, 16, 8, 1),
        (17, 9, 32, 3, 32),
        (16, 16, 128, 3, 32),
        (33, 19, 96, 3, 32),
        (47, 35, 128, 3, 32),
        (46, 62, 32, 2, 8),
        (95, 3, 64, 1, 16),
        (3, 131, 32, 3, 32),
        (9, 9, 24, 17, 3),
    ];
    for shape in shapes {
        [false, true].into_iter().for_each(|given| norm_conv(table, shape, given));
    }
}

pub fn conv(table: &mut Table, (width, height, from, to, sampling, beside, groups): ConvShape) {
    use Sampling::{Down, Same, Up};
    let added = match beside {
        Beside::Nothing => "residual false".into(),
        Beside::Residual => "residual true".into(),
        Beside::Shortcut(channels) => format!("shortcut of {channels}"),
    };
    table.add(format!("conv {width}x{height} {from} to {to} {sampling:?} {added} stats {groups:?}"), move |rig| {
        let pixels = match sampling {
            Same => width * height,
            Up => 4 * width * height,
            Down => width * height / 4,
        };
        let storage = rig.plain().dtype;
        // Sums of taps are as precise as activations.
        let w = match sampling {
            Up => rig.up_filters(to, from, storage),
            Same | Down => rig.weight(Role::Conv, &[to], 9 * from, Bf16, Bf16),
        };
        let bias = rig.vector(to);
        let x = rig.input(width * height, from, |v| v + 0.5);
        let residual = (beside == Beside::Residual).then(|| rig.input(pixels, to, |v| v));
        let shortcut = match beside {
            Beside::Shortcut(channels) => {
                let (weight, bias) = (rig.weight(Role::Linear, &[to], channels, Bf16, Bf16), rig.vector(to));
                let x = rig.input(pixels, channels, |v| v - 0.25);
                Some((x, Linear { input: rig.plain(), ..Linear::new(weight.t, Some(bias.t)) }, weight, bias))
            }
            Beside::Nothing | Beside::Residual => None,
        };
        let out = rig.output(pixels, to);
        let stats = groups.map(|g| rig.output_as(F32, g, 2));
        let conv = Conv { weight: w.t, bias: bias.t };
        let filter = Filter { w: &w.host, bias: &bias.host, size: (width, height), sampling };
        let host = residual.as_ref().map(|r| &r.host);
        let beside = shortcut.as_ref().map(|(x, _, w, bias)| (&x.host, &w.host, &bias.host));
        let exact = || oracle::conv::<f64>(&x.host, filter, |v| v, host, beside);
        // In f32 naive arithmetic is the same loop. In bf16 it rounds sums of taps when they are stored, and also the shortcut, which a
        // separate GEMM may compute.
        let naive = || -> Vec<f64> {
            match storage {
                F32 => oracle::conv::<f32>(&x.host, filter, |v| v, host, beside).into_iter().map(f64::from).collect(),
                _ => oracle::conv::<f64>(&x.host, filter, |v| f64::from(stored(v as f32, storage)), host, beside),
            }
        };
        let want = |format: Stored| Expected::with_naive(format, exact(), naive());
        // Statistics may be computed before or after the result is rounded. A naive implementation computes them after.
        let want_stats = |_| {
            let groups = groups.unwrap_or(1);
            let rounded: Vec<f32> = naive().iter().map(|&v| stored(v as f32, storage)).collect();
            Expected::naive_f32(oracle::group_stats(&exact(), to, groups), oracle::group_stats(&rounded, to, groups))
        };
        let mut checks: Vec<Check<'_>> = vec![(out, Box::new(want))];
        if let Some(stats) = stats {
            checks.push((stats, Box::new(want_stats)));
        }
        let residual = residual.as_ref().map(|r| r.t);
        let shortcut = shortcut.as_ref().map(|(x, w, ..)| Shortcut { x: x.t, w });
        rig.run(Op::Conv { out, x: x.t, w: &conv, width, height, sampling, residual, shortcut, stats }, &checks);
    });
}

pub fn norm_conv(table: &mut Table, (width, height, from, to, groups): NormConvShape, given: bool) {
    // An image is stored in f32, whatever the dtype of activations.
    for image in if given { vec![None] } else { vec![None, Some(F32)] } {
        let into = if image.is_some() { " into f32" } else { "" };
        let name = format!("norm_conv {width}x{height} {from} to {to} groups {groups} stats given {given}{into}");
        table.add(name, move |rig| {
            let (gain, shift) = (rig.vector(from), rig.vector(from));
            let (w, bias) = (rig.weight(Role::Conv, &[to], 9 * from, Bf16, Bf16), rig.vector(to));
            let x = rig.input(width * height, from, |v| v + 4.0);
            let stats = given.then(|| rig.input_as(F32, groups, 2, |v| v.abs() + 3.5));
            let storage = rig.plain().dtype;
            let out = rig.output_as(image.unwrap_or(storage), width * height, to);
            let norm = GroupNorm { weight: gain.t, bias: shift.t, groups, eps: EPS };
            let conv = Conv { weight: w.t, bias: bias.t };
            let filter = Filter { w: &w.host, bias: &bias.host, size: (width, height), sampling: Sampling::Same };
            let (scales, host) = ((&gain.host, &shift.host), stats.as_ref().map(|s| &s.host));
            let exact = || oracle::norm_conv::<f64>(&x.host, scales, host, (groups, EPS), filter, |v| v);
            // In bf16 naive arithmetic stores the normalized image.
            let naive = || -> Vec<f64> {
                match storage {
                    F32 => {
                        let values = oracle::norm_conv::<f32>(&x.host, scales, host, (groups, EPS), filter, |v| v);
                        values.into_iter().map(f64::from).collect()
                    }
                    _ => {
                        let round = |v| f64::from(stored(v as f32, storage));
                        oracle::norm_conv::<f64>(&x.host, scales, host, (groups, EPS), filter, round)
                    }
                }
            };
            let want = |format: Stored| Expected::with_naive(format, exact(), naive());
            let stats = stats.as_ref().map(|s| s.t);
            rig.run(Op::NormConv { out, x: x.t, norm: &norm, stats, w: &conv, width, height }, &[(out, Box::new(want))]);
        });
    }
}
