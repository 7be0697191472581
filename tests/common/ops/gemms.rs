//! The cases of GEMMs and of the fused projection.

use super::cases::{EPS, Table, WEIGHT_TYPES};
use super::formats::Filed;
use super::oracle::{Filter, Heads};
use super::{Check, Mat, Operand, Rig, SMALL, want};
use kiln::internals::backend::{Conv, GatedGemm, Gemm, Linear, Op, Projection, QkNorm, Role, Rope, RopeStyle, Sampling};
use kiln::internals::tensor::DType::{self, Bf16, E4m3, E5m2, F32};
use kiln::internals::tensor::{Nvfp4Layout, Stored};

fn linear_of(weight: &Operand, bias: Option<&Operand>) -> Linear {
    Linear::new(weight.t, bias.map(|b| b.t))
}

/// Runs a linear layer without bias on an input.
pub fn run_linear(rig: &mut Rig<'_>, x: &Operand, w: &Linear, host: &Mat) {
    let out = rig.output(x.t.rows, host.rows);
    rig.run(Op::Linear(&[Gemm { out, x: x.t, w }]), &[(out, want!(linear(&x.host, host, None)))]);
}

/// Runs a gated layer that is added to its output.
pub fn run_gated(rig: &mut Rig<'_>, x: &Operand, w: &Linear, host: &Mat) {
    let (gate, into) = (rig.input(1, host.rows, |v| v), rig.updated(x.t.rows, host.rows));
    let stream = GatedGemm { into: into.t, x: x.t, w, gate: Some(gate.t) };
    let want = want!(gate_residual(&into.host, &x.host, host, None, Some(&gate.host)));
    rig.run(Op::LinearGateResidual(&[stream]), &[(into.t, want)]);
}

/// M, K and N of GEMMs.
const GEMMS: [(usize, usize, usize); 7] =
    [(1, 7, 1), (1, 128, 129), (7, 113, 128), (113, 129, 7), (129, 1, 113), (2, 2, 600), (1031, 67, 523)];
/// Tile sizes of 64, one less and one more, in each dimension and in all.
const TILES: [(usize, usize, usize); 9] = [
    (64, 64, 64),
    (63, 64, 64),
    (65, 64, 64),
    (64, 63, 64),
    (64, 65, 64),
    (64, 64, 63),
    (64, 64, 65),
    (63, 63, 63),
    (65, 65, 65),
];

/// GEMMs whose K is long enough for split-K.
const LONG: [(usize, usize, usize); 2] = [(66, 584, 64), (130, 520, 168)];

/// Names a GEMM. A long K is named as the length of rows, which `is_within` ignores.
fn shape(rows: usize, inner: usize, cols: usize) -> String {
    if inner > SMALL { format!("{rows}x{cols}, rows of {inner}") } else { format!("{rows}x{inner}x{cols}") }
}

/// All GEMM epilogues at all sizes, then weights of several slices and dtypes.
pub fn all(table: &mut Table) {
    for (rows, inner, cols) in GEMMS.into_iter().chain(TILES).chain(LONG) {
        for with_bias in [false, true] {
            linear(table, rows, inner, cols, with_bias);
        }
        swiglu(table, rows, inner, cols);
        for (gated, with_bias) in [(true, false), (false, false), (true, true)] {
            gate_residual(table, rows, inner, cols, gated, with_bias);
        }
    }
    for (rows, inner, cols) in [(65, 64, 72), (130, 520, 168)] {
        for with_bias in [false, true] {
            grouped(table, rows, inner, cols, with_bias);
        }
    }
    for (rows, rank, cols) in [(65, 16, 131), (129, 48, 200)] {
        merged(table, rows, rank, cols);
    }
    // Many long rows: operand A is too large to decode at once.
    table.add("linear 1031x8209x3".into(), |rig| {
        let w = rig.weight(Role::Linear, &[3], 8209, Bf16, Bf16);
        let x = rig.input(1031, 8209, |v| v);
        run_linear(rig, &x, &linear_of(&w, None), &w.host);
    });
    // Weight storage: one slice, or three as for q, k and v with the second one misaligned, in every pair of dtypes.
    for (from, to) in WEIGHT_TYPES {
        for parts in [&[131][..], &[64, 1, 66]] {
            table.add(format!("linear with weight {from:?} as {to:?} in {} parts", parts.len()), move |rig| {
                let w = rig.weight(Role::Linear, parts, 129, from, to);
                let x = rig.input(113, 129, |v| v);
                run_linear(rig, &x, &linear_of(&w, None), &w.host);
            });
        }
    }
}

pub fn linear(table: &mut Table, rows: usize, inner: usize, cols: usize, with_bias: bool) {
    let shape = shape(rows, inner, cols);
    table.add(format!("linear {shape} bias {with_bias}, two streams"), move |rig| {
        let w = [rig.weight(Role::Linear, &[cols], inner, Bf16, Bf16), rig.weight(Role::Linear, &[5], inner, F32, F32)];
        let bias = [cols, 5].map(|n| with_bias.then(|| rig.vector(n)));
        let (x, y) = (rig.input(rows, inner, |v| v), rig.input(3, inner, |v| v));
        let out = [rig.output(rows, cols), rig.output(3, 5)];
        let linear = [linear_of(&w[0], bias[0].as_ref()), linear_of(&w[1], bias[1].as_ref())];
        let streams = [Gemm { out: out[0], x: x.t, w: &linear[0] }, Gemm { out: out[1], x: y.t, w: &linear[1] }];
        let host = bias.each_ref().map(|b| b.as_ref().map(|b| &b.host));
        rig.run(
            Op::Linear(&streams),
            &[(out[0], want!(linear(&x.host, &w[0].host, host[0]))), (out[1], want!(linear(&y.host, &w[1].host, host[1])))],
        );
    });
}

/// Adds a case of two bf16 streams, which tensor cores compute in one launch.
fn grouped(table: &mut Table, rows: usize, inner: usize, cols: usize, with_bias: bool) {
    let shape = shape(rows, inner, cols);
    table.add(format!("linear {shape} bias {with_bias}, grouped with 67 rows"), move |rig| {
        let w = [cols, 131].map(|n| rig.weight(Role::Linear, &[n], inner, Bf16, Bf16));
        let bias = [cols, 131].map(|n| with_bias.then(|| rig.vector(n)));
        let x = [rows, 67].map(|m| rig.input(m, inner, |v| v));
        let out = [rig.output(rows, cols), rig.output(67, 131)];
        let linear = [0, 1].map(|i| linear_of(&w[i], bias[i].as_ref()));
        let streams = [0, 1].map(|i| Gemm { out: out[i], x: x[i].t, w: &linear[i] });
        let host = bias.each_ref().map(|b| b.as_ref().map(|b| &b.host));
        let [first, second] = [0, 1].map(|i| (&x[i].host, &w[i].host, host[i]));
        rig.run(
            Op::Linear(&streams),
            &[(out[0], want!(linear(first.0, first.1, first.2))), (out[1], want!(linear(second.0, second.1, second.2)))],
        );
    });
}

pub fn swiglu(table: &mut Table, rows: usize, inner: usize, cols: usize) {
    table.add(format!("linear_swiglu {}", shape(rows, inner, cols)), move |rig| {
        let w = rig.weight(Role::Linear, &[cols, cols], inner, Bf16, Bf16);
        let (x, out) = (rig.input(rows, inner, |v| 3.0 * v), rig.output(rows, cols));
        let linear = linear_of(&w, None);
        let op = Op::LinearSwiglu(&[Gemm { out, x: x.t, w: &linear }]);
        rig.run(op, &[(out, want!(swiglu(&x.host, &w.host, 0, cols)))]);
    });
}

pub fn gate_residual(table: &mut Table, rows: usize, inner: usize, cols: usize, gated: bool, with_bias: bool) {
    let shape = shape(rows, inner, cols);
    table.add(format!("linear_gate_residual {shape} gate {gated} bias {with_bias}"), move |rig| {
        let w = rig.weight(Role::Linear, &[cols], inner, Bf16, Bf16);
        let bias = with_bias.then(|| rig.vector(cols));
        let gate = gated.then(|| rig.input(1, cols, |v| v));
        let (x, into) = (rig.input(rows, inner, |v| v), rig.updated(rows, cols));
        let linear = linear_of(&w, bias.as_ref());
        let stream = GatedGemm { into: into.t, x: x.t, w: &linear, gate: gate.as_ref().map(|g| g.t) };
        let host = (bias.as_ref().map(|b| &b.host), gate.as_ref().map(|g| &g.host));
        rig.run(
            Op::LinearGateResidual(&[stream]),
            &[(into.t, want!(gate_residual(&into.host, &x.host, &w.host, host.0, host.1)))],
        );
    });
}

/// Adds a case of merging an adapter with a bf16 weight, in f32 until the sum is rounded.
fn merged(table: &mut Table, rows: usize, rank: usize, cols: usize) {
    table.add(format!("linear_gate_residual {rows}x{rank}x{cols} of f32 into bf16"), move |rig| {
        let down = rig.weight(Role::Linear, &[cols], rank, F32, F32);
        let (up, into) = (rig.input_as(F32, rows, rank, |v| v), rig.updated_as(Bf16, rows, cols));
        let linear = Linear { input: Stored::plain(F32), ..linear_of(&down, None) };
        let stream = GatedGemm { into: into.t, x: up.t, w: &linear, gate: None };
        let want = want!(gate_residual(&into.host, &up.host, &down.host, None, None));
        rig.run(Op::LinearGateResidual(&[stream]), &[(into.t, want)]);
    });
}

/// Weights that the backend expands during upload: every format in one slice, and several formats in one weight.
pub fn expanded(table: &mut Table) {
    let (tensor, rows) = (Filed::Fp8Tensor, Filed::Fp8Rows);
    let formats = [Filed::Fp8(E4m3), tensor(E4m3), rows(E4m3), Filed::Fp8(E5m2), tensor(E5m2), rows(E5m2)];
    let layouts = [Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE];
    for to in [Bf16, F32] {
        for format in formats.into_iter().chain(layouts.map(Filed::Nvfp4)) {
            linear_expanded(table, format!("{} as {to:?}", format.name()), vec![(131, format)], to);
        }
        let mixed = vec![(67, tensor(E4m3)), (130, Filed::Nvfp4(Nvfp4Layout::COMFY)), (35, Filed::Plain(Bf16)), (3, rows(E4m3))];
        linear_expanded(table, format!("mixed as {to:?}"), mixed, to);
    }
    table.add("conv 5x7 with 32 filters of e4m3".into(), move |rig| {
        let w = rig.expanded(Role::Conv, &[(20, tensor(E4m3)), (12, rows(E4m3))], 9 * 40, Bf16);
        let (x, bias, out) = (rig.input(35, 40, |v| v + 0.5), rig.vector(32), rig.output(35, 32));
        let conv = Conv { weight: w.t, bias: bias.t };
        let (residual, shortcut, stats, sampling) = (None, None, None, Sampling::Same);
        let op = Op::Conv { out, x: x.t, w: &conv, width: 5, height: 7, sampling, residual, shortcut, stats };
        let filter = Filter { w: &w.host, bias: &bias.host, size: (5, 7), sampling };
        rig.run(op, &[(out, want!(conv(&x.host, filter, |v| v, None, None)))]);
    });
}

fn linear_expanded(table: &mut Table, name: String, parts: Vec<(usize, Filed)>, to: DType) {
    table.add(format!("linear with weight {name}"), move |rig| {
        // Whole blocks that are not whole block-scale tiles.
        let w = rig.expanded(Role::Linear, &parts, 112, to);
        let x = rig.input(19, 112, |v| v);
        run_linear(rig, &x, &linear_of(&w, None), &w.host);
    });
}

/// Rows, inner size, query heads, KV heads, head dimension, RoPE style, width of the SwiGLU MLP.
pub type QkvShape = (usize, usize, usize, usize, usize, RopeStyle, Option<usize>);

/// Fused projections.
pub fn projections(table: &mut Table) {
    use RopeStyle::{HalfSplit, Interleaved};
    let shapes = [
        (1, 31, 1, 1, 2, Interleaved, None),
        (7, 113, 4, 2, 64, HalfSplit, None),
        (113, 64, 3, 3, 128, Interleaved, Some(129)),
        (129, 67, 3, 3, 128, HalfSplit, Some(7)),
        (113, 64, 0, 3, 128, Interleaved, None),
        (3, 17, 2, 1, 512, HalfSplit, None),
        (1031, 17, 5, 5, 128, Interleaved, Some(523)),
    ];
    shapes.into_iter().for_each(|shape| qkv(table, shape, true));
    for shape in [(7, 113, 4, 2, 64, HalfSplit, None), (65, 64, 2, 2, 128, Interleaved, Some(72))] {
        qkv(table, shape, false);
    }
}

pub fn qkv(table: &mut Table, (rows, inner, q_heads, k_heads, d, style, mlp): QkvShape, normed: bool) {
    let (k_start, v_start, mlp_start) = (q_heads * d, (q_heads + k_heads) * d, (q_heads + 2 * k_heads) * d);
    let name = format!("qkv {rows}x{inner} {q_heads}:{k_heads} heads of {d} {style:?} mlp {mlp:?}");
    let name = if normed { name } else { format!("{name} without norm") };
    table.add(name, move |rig| {
        let tail = 2 * mlp.unwrap_or(0);
        let parts = [k_start, v_start - k_start, mlp_start - v_start, tail].into_iter().filter(|rows| *rows > 0);
        let w = rig.weight(Role::Linear, &parts.collect::<Vec<_>>(), inner, Bf16, Bf16);
        let (q_norm, k_norm) = (rig.vector(d), rig.vector(d));
        let angles = rig.input_as(F32, rows, d, |v| v);
        let x = rig.input(rows, inner, |v| 2.0 * v);
        let q = (q_heads > 0).then(|| rig.output(rows, k_start));
        let (k, v) = (rig.output(rows, k_heads * d), rig.output(rows, k_heads * d));
        let mlp = mlp.map(|width| rig.output(rows, width));
        let linear = linear_of(&w, None);
        let (q_scale, k_scale) = (0.3, 0.6);
        let norm = normed.then_some(QkNorm { q: q_norm.t, k: k_norm.t, eps: EPS });
        let rope = Rope { table: angles.t, style };
        let stream = Projection { x: x.t, w: &linear, norm, q_scale, k_scale, rope, q, k, v, mlp };
        let (x, w, table) = (&x.host, &w.host, &angles.host);
        let [q_norm, k_norm] = [(&q_norm, q_scale), (&k_norm, k_scale)].map(|(gain, scale)| {
            let norm = normed.then_some((&gain.host, EPS));
            Heads { norm, scale, table, style }
        });
        let mut checks: Vec<Check<'_>> =
            vec![(k, want!(heads(x, w, k_start..v_start, k_norm))), (v, want!(values(x, w, v_start..mlp_start)))];
        if let Some(q) = q {
            checks.push((q, want!(heads(x, w, 0..k_start, q_norm))));
        }
        if let Some(mlp) = mlp {
            checks.push((mlp, want!(swiglu(x, w, mlp_start, tail / 2))));
        }
        rig.run(Op::Qkv(&[stream]), &checks);
    });
}
