//! The cases of quantized operands, which not every backend takes: results in e4m3 and NVFP4, and GEMMs of quantized weights by plain and
//! quantized inputs. Weights have several slices, each in its own format, and LoRA branches.

use super::attention::{Heads, Ranges, into_ranges};
use super::cases::{ALL, EPS, TWO, Table, two_layer_norms};
use super::formats::Filed;
use super::gemms::{run_gated, run_linear};
use super::oracle;
use super::{Case, Check, Mat, Operand, Rig, Sums, want};
use kiln::internals::backend::{Gemm, Linear, LoraBranch, Op, Projection, QkNorm, Role, Rope, RopeStyle};
use kiln::internals::tensor::DType::{Bf16, E4m3, E5m2, F32};
use kiln::internals::tensor::{Nvfp4Layout, Scale, Stored};
use std::ops::Range;

pub const NVFP4: Filed = Filed::Nvfp4(Nvfp4Layout::COMFY);
pub const FP8: Filed = Filed::Fp8Tensor(E4m3);
pub const FP8_ROWS: Filed = Filed::Fp8Rows(E4m3);
pub const PLAIN: Filed = Filed::Plain(Bf16);

fn scale(value: f32) -> Scale {
    Scale::new(value).unwrap()
}

/// Formats for results of magnitude one: some hold them, for the others they are far out of range.
pub fn results() -> [(&'static str, Stored); 4] {
    [
        ("e4m3", Stored::fp8(scale(0.0123))),
        ("clipped e4m3", Stored::fp8(scale(0.000_31))),
        ("nvfp4", Stored::nvfp4(scale(0.0011))),
        ("clipped nvfp4", Stored::nvfp4(scale(0.000_02))),
    ]
}

/// Formats for inputs of at most one; `None` is the format of the case.
pub fn inputs() -> [(&'static str, Option<Stored>); 3] {
    [("plain", None), ("e4m3", Some(Stored::fp8(scale(0.0029)))), ("nvfp4", Some(Stored::nvfp4(scale(0.000_41))))]
}

/// The whole table.
pub fn all() -> Vec<Case> {
    let mut table = Table::new(ALL);
    norms(&mut table);
    attention(&mut table);
    table.variants = TWO;
    linear(&mut table);
    swiglu(&mut table);
    swiglu_in_one(&mut table);
    gate_residual(&mut table);
    qkv(&mut table);
    lora(&mut table);
    table.cases
}

/// Whether GPUs have kernels for a case: for e4m3 and NVFP4, and for NVFP4 inputs if the whole weight is NVFP4. Of GEMMs this covers only
/// what tensor cores do not take. Tensor cores add in their own way, so their GEMMs have separate cases.
pub fn has_kernels(name: &str) -> bool {
    let is = |ops: &[&str]| ops.iter().any(|op| name.starts_with(op));
    let weight = name.split_once(" by nvfp4").map_or("", |(before, _)| before);
    let mixed = ["e4m3", "bf16"].iter().any(|other| weight.contains(other));
    let missing = ["e5m2", "heads in e4m3"].iter().any(|missing| name.contains(missing));
    let here = is(&["rms_norm", "layer_norm", "attention"]) || is(&["linear", "qkv"]) && name.ends_with(" f32 slice");
    here && !mixed && !missing
}

fn norms(table: &mut Table) {
    let [(_, fp8), (_, clipped), (_, nvfp4), (_, clipped_nvfp4)] = results();
    // Rows for every kernel, and streams whose results have different dtypes.
    for cols in [1024, 2032, 3056, 3088, 4112, 6160, 8208] {
        table.add(format!("layer_norm_modulate 5 and 3 rows of {cols} into nvfp4 and clipped nvfp4"), move |rig| {
            two_layer_norms(rig, cols, |v| v + 4.0, [(5, nvfp4), (3, clipped_nvfp4)]);
        });
    }
    for cols in [1024, 2040, 3064, 3080, 4104, 6152, 8200] {
        table.add(format!("layer_norm_modulate 5 and 3 rows of {cols} into e4m3 and clipped e4m3"), move |rig| {
            two_layer_norms(rig, cols, |v| v + 4.0, [(5, fp8), (3, clipped)]);
        });
    }
    table.add("layer_norm_modulate 5 and 3 rows of 1024 into plain and e4m3".into(), move |rig| {
        let plain = rig.plain();
        two_layer_norms(rig, 1024, |v| v + 4.0, [(5, plain), (3, fp8)]);
    });
    // One block, a partial row of scale tiles, several tiles in both directions, the width of a real model.
    for (rows, cols) in [(1, 16), (7, 112), (130, 192), (2, 2560)] {
        for (i, (name, format)) in results().into_iter().enumerate() {
            table.add(format!("rms_norm {rows} rows of {cols} into {name}"), move |rig| {
                let (x, w) = (rig.input(rows, cols, |v| 8.0 * v), rig.vector(cols));
                let out = rig.output_stored(format, rows, cols);
                let op = Op::RmsNorm { out, x: x.t, weight: w.t, eps: EPS };
                rig.run(op, &[(out, want!(rms_norm(&x.host, &w.host, EPS)))]);
            });
            let (other_name, other) = results()[(i + 1) % results().len()];
            table.add(format!("layer_norm_modulate {rows} and 3 rows of {cols} into {name} and {other_name}"), move |rig| {
                two_layer_norms(rig, cols, |v| v + 4.0, [(rows, format), (3, other)]);
            });
        }
    }
}

fn attention(table: &mut Table) {
    let [fp8, _, nvfp4, _] = results().map(|(_, format)| Some(format));
    let all: [(&str, Ranges); 3] = [
        ("nvfp4", vec![(130, nvfp4)]),
        ("nvfp4 with two scales", vec![(129, nvfp4), (7, Some(Stored::nvfp4(scale(0.0007))))]),
        ("e4m3 and nvfp4", vec![(5, fp8), (131, nvfp4)]),
    ];
    for (name, ranges) in all {
        for (heads, d) in [(Heads::Plain, 64), (Heads::Plain, 128), (Heads::UNSCALED, 128)] {
            into_ranges(table, name, ranges.clone(), d, heads, false);
        }
    }
}

/// e4m3 with a scale of one.
fn one() -> Stored {
    Stored::fp8(Scale::ONE)
}

/// A layer whose weight keeps its formats, for inputs in this format.
pub fn layer(rig: &mut Rig<'_>, parts: &[(usize, Filed)], cols: usize, input: Stored) -> (Linear, Mat) {
    let (weight, host) = rig.kept(parts, cols);
    (Linear { id: None, weight, bias: None, input, lora: None }, host)
}

/// Adds a LoRA branch to a layer. Tensor cores multiply it if the rank is a multiple of sixteen.
pub fn with_lora(rig: &mut Rig<'_>, (linear, host): (Linear, Mat), rank: usize) -> (Linear, Mat) {
    let down = rig.weight(Role::Linear, &[rank], host.cols, Bf16, Bf16);
    let dtype = if rank.is_multiple_of(16) { Bf16 } else { F32 };
    let up = rig.weight(Role::Linear, &[host.rows], rank, dtype, dtype);
    let linear = Linear { lora: Some(LoraBranch { down: down.t, up: up.t }), ..linear };
    (linear, Mat { lora: Some(Box::new((down.host, up.host))), ..host })
}

/// The rows of a weight and of its LoRA branch.
fn host_rows(host: &Mat, rows: Range<usize>) -> Mat {
    let lora = host.lora.as_deref().map(|(down, up)| Box::new((down.clone(), host_rows(up, rows.clone()))));
    Mat { rows: rows.len(), cols: host.cols, data: host.data[rows.start * host.cols..rows.end * host.cols].to_vec(), lora }
}

pub fn input(rig: &mut Rig<'_>, format: Option<Stored>, rows: usize, cols: usize) -> (Stored, Operand) {
    let format = format.unwrap_or(rig.plain());
    (format, rig.input_stored(format, rows, cols, |v| v))
}

fn linear(table: &mut Table) {
    let all: [(&str, Vec<(usize, Filed)>); 10] = [
        ("e4m3", vec![(131, FP8)]),
        ("e4m3 by rows", vec![(131, FP8_ROWS)]),
        ("e4m3 unscaled", vec![(131, Filed::Fp8(E4m3))]),
        ("e5m2", vec![(131, Filed::Fp8Tensor(E5m2))]),
        ("nvfp4", vec![(131, NVFP4)]),
        ("nvfp4 of modelopt", vec![(131, Filed::Nvfp4(Nvfp4Layout::MODELOPT))]),
        ("nvfp4 of modelopt's single files", vec![(131, Filed::Nvfp4(Nvfp4Layout::MODELOPT_SINGLE))]),
        // One GEMM tile has rows of all slices.
        ("e4m3, bf16, e4m3 by rows", vec![(67, FP8), (35, PLAIN), (30, FP8_ROWS)]),
        ("e4m3, nvfp4, bf16", vec![(67, FP8), (129, NVFP4), (35, PLAIN)]),
        ("e4m3, nvfp4, nvfp4, e4m3 by rows", vec![(100, FP8), (150, NVFP4), (30, NVFP4), (121, FP8_ROWS)]),
    ];
    for (name, parts) in all {
        for (input_name, format) in inputs() {
            let parts = parts.clone();
            table.add(format!("linear of {name} by {input_name}"), move |rig| {
                let (inner, cols) = (208, parts.iter().map(|part| part.0).sum());
                let (format, x) = input(rig, format, 37, inner);
                let (w, host) = layer(rig, &parts, inner, format);
                let (bias, out) = (rig.vector(cols), rig.output(37, cols));
                let w = Linear { bias: Some(bias.t), ..w };
                let op = Op::Linear(&[Gemm { out, x: x.t, w: &w }]);
                rig.run(op, &[(out, want!(linear(&x.host, &host, Some(&bias.host))))]);
            });
        }
    }
    // More rows than a task or a tile has, and weight rows that begin in one slice and end in another.
    for (input_name, format) in inputs() {
        table.add(format!("linear 1031 rows of nvfp4 by {input_name}"), move |rig| {
            let (format, x) = input(rig, format, 1031, 64);
            let (w, host) = layer(rig, &[(70, NVFP4)], 64, format);
            run_linear(rig, &x, &w, &host);
        });
    }
    // NVFP4 is sliced at whole block-scale tiles.
    for rows in [40..350, 67..195, 195..200, 195..347, 347..348, 0..350] {
        table.add(format!("linear with rows {rows:?} of three parts"), move |rig| {
            let (format, x) = input(rig, None, 9, 112);
            let (all, host) = layer(rig, &[(67, FP8_ROWS), (280, NVFP4), (105, FP8)], 112, format);
            run_linear(rig, &x, &all.rows(rows.clone()), &host_rows(&host, rows.clone()));
        });
    }
}

fn swiglu(table: &mut Table) {
    // Wider than a GEMM tile.
    const WIDTH: usize = 208;
    let gates = [
        ("e4m3", [FP8, FP8]),
        ("nvfp4", [NVFP4, NVFP4]),
        ("e4m3 and bf16", [FP8, PLAIN]),
        ("bf16 and e4m3 by rows", [PLAIN, FP8_ROWS]),
        ("nvfp4 and e4m3", [NVFP4, FP8_ROWS]),
    ];
    for (weight_name, formats) in gates {
        for (input_name, format) in inputs() {
            for (name, result) in results().map(|(name, format)| (name, Some(format))).into_iter().chain([("plain", None)]) {
                table.add(format!("linear_swiglu of {weight_name} by {input_name} into {name}"), move |rig| {
                    let (format, x) = input(rig, format, 21, 112);
                    let (w, host) = layer(rig, &formats.map(|format| (WIDTH, format)), 112, format);
                    let out = rig.output_stored(result.unwrap_or(rig.plain()), 21, WIDTH);
                    let op = Op::LinearSwiglu(&[Gemm { out, x: x.t, w: &w }]);
                    rig.run(op, &[(out, want!(swiglu(&x.host, &host, 0, WIDTH)))]);
                });
            }
        }
    }
}

/// Gate and up rows in one matrix, as files have them. A tile that is wider than the remaining gate rows also has up rows.
fn swiglu_in_one(table: &mut Table) {
    const WIDTH: usize = 208;
    let [_, (_, format), _] = inputs();
    let [_, (_, clipped), ..] = results();
    table.add("linear_swiglu of e4m3 in one matrix by e4m3 into clipped e4m3".into(), move |rig| {
        let (format, x) = input(rig, format, 21, 112);
        let (w, host) = layer(rig, &[(2 * WIDTH, FP8)], 112, format);
        let out = rig.output_stored(clipped, 21, WIDTH);
        let op = Op::LinearSwiglu(&[Gemm { out, x: x.t, w: &w }]);
        rig.run(op, &[(out, want!(swiglu(&x.host, &host, 0, WIDTH)))]);
    });
}

fn gate_residual(table: &mut Table) {
    for (weight_name, format) in [("e4m3", FP8), ("e4m3 by rows", FP8_ROWS), ("nvfp4", NVFP4)] {
        for (input_name, input_format) in inputs() {
            table.add(format!("linear_gate_residual of {weight_name} by {input_name}"), move |rig| {
                let (input_format, x) = input(rig, input_format, 19, 112);
                let (w, host) = layer(rig, &[(131, format)], 112, input_format);
                run_gated(rig, &x, &w, &host);
            });
        }
    }
}

/// The properties in which cases of the fused projection differ.
#[derive(Clone)]
pub struct Fused {
    /// The formats of queries, keys, values, and of gates and ups.
    pub parts: [Filed; 4],
    /// Whether all are one matrix, in the first format.
    pub joined: bool,
    pub input: Option<Stored>,
    /// The formats of queries and keys, and of the SwiGLU half.
    pub heads: Option<Stored>,
    pub mlp: Option<Stored>,
    pub normed: bool,
    pub rank: Option<usize>,
    /// Whether a slice of the layer computes only keys and values.
    pub sliced: bool,
    /// Rows, inner size, width of the SwiGLU half.
    pub shape: [usize; 3],
    pub style: RopeStyle,
    pub sums: Sums,
}

impl Default for Fused {
    fn default() -> Self {
        Self {
            parts: [FP8, NVFP4, PLAIN, FP8_ROWS],
            joined: false,
            input: None,
            heads: None,
            mlp: None,
            normed: true,
            rank: None,
            sliced: false,
            shape: [23, 112, 208],
            style: RopeStyle::Interleaved,
            sums: Sums::F32,
        }
    }
}

fn qkv(table: &mut Table) {
    let plain = Fused::default();
    let [_, (_, fp8), (_, nvfp4)] = inputs();
    let [(_, fp8_out), _, (_, nvfp4_out), _] = results();
    let cases = [
        ("mixed by plain", plain.clone()),
        ("mixed by plain without norm", Fused { normed: false, ..plain.clone() }),
        ("mixed by plain into e4m3", Fused { mlp: Some(fp8_out), ..plain.clone() }),
        ("mixed by plain into nvfp4", Fused { mlp: Some(nvfp4_out), ..plain.clone() }),
        (
            "e4m3, e4m3 by rows, bf16 by plain into e4m3",
            Fused { parts: [FP8, FP8_ROWS, PLAIN, FP8], mlp: Some(fp8_out), ..plain.clone() },
        ),
        ("e4m3 by e4m3 into e4m3", Fused { parts: [FP8; 4], input: fp8, mlp: Some(fp8_out), ..plain.clone() }),
        ("e4m3 by e4m3 with heads in e4m3", Fused { parts: [FP8; 4], input: fp8, heads: Some(one()), ..plain.clone() }),
        ("nvfp4 by nvfp4 into nvfp4", Fused { parts: [NVFP4; 4], input: nvfp4, mlp: Some(nvfp4_out), ..plain.clone() }),
        ("mixed with low rank", Fused { rank: Some(5), mlp: Some(nvfp4_out), ..plain.clone() }),
        ("keys and values of mixed", Fused { sliced: true, ..plain.clone() }),
        ("keys and values of mixed with low rank", Fused { sliced: true, rank: Some(5), ..plain }),
    ];
    for (name, case) in cases {
        for d in [64, 128] {
            let case = case.clone();
            table.add(format!("qkv of {name}, 2:1 heads of {d}"), move |rig| project(rig, &case, d));
        }
    }
}

/// Runs the fused projection, with two query heads and one KV head of `d` columns.
pub fn project(rig: &mut Rig<'_>, case: &Fused, d: usize) {
    let ([rows, inner, width], q_cols, sums) = (case.shape, 2 * d, case.sums);
    let (format, x) = input(rig, case.input, rows, inner);
    let sizes = [q_cols, d, d, 2 * width];
    let parts: Vec<_> = match case.joined {
        true => vec![(sizes.iter().sum(), case.parts[0])],
        false => sizes.into_iter().zip(case.parts).collect(),
    };
    let mut all = layer(rig, &parts, inner, format);
    if let Some(rank) = case.rank {
        all = with_lora(rig, all, rank);
    }
    let kept = if case.sliced { q_cols..q_cols + 2 * d } else { 0..all.1.rows };
    let (w, host) = (all.0.rows(kept.clone()), host_rows(&all.1, kept));
    let (q_gain, k_gain) = (rig.vector(d), rig.vector(d));
    let (angles, plain) = (rig.input_as(F32, rows, d, |v| v), rig.plain());
    let heads = |rig: &mut Rig<'_>, cols| rig.output_stored(case.heads.unwrap_or(plain), rows, cols);
    let (q, k) = ((!case.sliced).then(|| heads(rig, q_cols)), heads(rig, d));
    let v = rig.output(rows, d);
    let mlp = (!case.sliced).then(|| rig.output_stored(case.mlp.unwrap_or(plain), rows, width));
    let (q_scale, k_scale) = (0.3, 0.7);
    let norm = case.normed.then_some(QkNorm { q: q_gain.t, k: k_gain.t, eps: EPS });
    let (style, table) = (case.style, &angles.host);
    let stream = Projection { x: x.t, w: &w, norm, q_scale, k_scale, rope: Rope { table: angles.t, style }, q, k, v, mlp };
    let [q_heads, k_heads] = [(&q_gain, q_scale), (&k_gain, k_scale)].map(|(gain, scale)| {
        let norm = case.normed.then_some((&gain.host, EPS));
        oracle::Heads { norm, scale, table, style }
    });
    let first = if case.sliced { 0 } else { q_cols };
    let (x, host) = (&x.host, &host);
    let mut checks: Vec<Check<'_>> = vec![
        (k, want!(sums, heads(x, host, first..first + d, k_heads))),
        (v, want!(sums, values(x, host, first + d..first + 2 * d))),
    ];
    if let (Some(q), Some(mlp)) = (q, mlp) {
        checks.push((q, want!(sums, heads(x, host, 0..q_cols, q_heads))));
        checks.push((mlp, want!(sums, swiglu(x, host, first + 2 * d, width))));
    }
    rig.run(Op::Qkv(&[stream]), &checks);
}

/// LoRA branches, also on plain weights. LoRA branches of the fused projection are among its own cases.
fn lora(table: &mut Table) {
    for (name, format, input_format) in [("bf16", PLAIN, None), ("e4m3", FP8, inputs()[1].1), ("nvfp4", NVFP4, inputs()[2].1)] {
        let layer = move |rig: &mut Rig<'_>, rows: usize| {
            let (format_of_x, x) = input(rig, input_format, 21, 112);
            let layer = layer(rig, &[(96, format), (rows - 96, format)], 112, format_of_x);
            (x, with_lora(rig, layer, 7))
        };
        table.add(format!("linear of {name} with low rank"), move |rig| {
            let (x, (w, host)) = layer(rig, 131);
            run_linear(rig, &x, &w, &host);
        });
        // NVFP4 is sliced at whole block-scale tiles, as at the end of the first slice.
        let rows = if format == NVFP4 { 96..130 } else { 40..130 };
        table.add(format!("linear of {name} with low rank, some rows"), move |rig| {
            let (x, (all, host)) = layer(rig, 131);
            run_linear(rig, &x, &all.rows(rows.clone()), &host_rows(&host, rows.clone()));
        });
        table.add(format!("linear_swiglu of {name} with low rank"), move |rig| {
            let ((x, (w, host)), out) = (layer(rig, 192), rig.output(21, 96));
            let op = Op::LinearSwiglu(&[Gemm { out, x: x.t, w: &w }]);
            rig.run(op, &[(out, want!(swiglu(&x.host, &host, 0, 96)))]);
        });
        table.add(format!("linear_gate_residual of {name} with low rank"), move |rig| {
            let (x, (w, host)) = layer(rig, 131);
            run_gated(rig, &x, &w, &host);
        });
    }
}
