//! GEMMs with e4m3 weights, which keep their codes, by bf16 inputs (W8A16) and e4m3 inputs (W8A8). They cover every epilogue, every kind of
//! scale, weights whose matrices have formats of their own, and e4m3 results. Sizes leave tiles and k-blocks partly empty.

use super::cases::{Table, Variants};
use super::formats::Filed;
use super::quantized::{FP8, FP8_ROWS, Fused, PLAIN, input, inputs, layer, project, results, with_lora};
use super::{Fit, Mat, Rig, Sums, want};
use kiln::internals::backend::{GatedGemm, Gemm, Linear, Op, RopeStyle};
use kiln::internals::tensor::DType::{Bf16, E2m1, E4m3};
use kiln::internals::tensor::{Scale, Stored};

/// Tensor cores take aligned operands, and bf16 inputs unless these are e4m3.
pub const ALIGNED: Variants = &[(Bf16, Fit::Whole)];

const UNSCALED: Filed = Filed::Fp8(E4m3);

/// A kind of GEMM: its name in case names, by which `tiles.rs` chooses kernels, and its input format.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    pub input: Option<Stored>,
    pub sums: Sums,
    /// Columns of the weight, in cases that do not choose them.
    pub inner: usize,
    /// Columns of SwiGLU: alone, and in the fused projection.
    pub widths: [usize; 2],
    /// The rank of the weight's LoRA branch.
    pub rank: Option<usize>,
}

impl Kind {
    /// A layer, with its LoRA branch if it has one.
    fn layer(self, rig: &mut Rig<'_>, parts: &[(usize, Filed)], inner: usize, input: Stored) -> (Linear, Mat) {
        let layer = layer(rig, parts, inner, input);
        match self.rank {
            Some(rank) => with_lora(rig, layer, rank),
            None => layer,
        }
    }
}

/// All cases.
pub fn all(table: &mut Table) {
    let variants = std::mem::replace(&mut table.variants, ALIGNED);
    let [(_, bf16), (_, e4m3), _] = inputs();
    let [(_, e4m3_out), (_, clipped), ..] = results();
    let w8a16 = Kind { name: "w8a16", input: bf16, sums: Sums::F32, inner: 528, widths: [208, 80], rank: None };
    let w8a8 = Kind { name: "w8a8", input: e4m3, sums: Sums::Fp8, inner: 528, widths: [208, 80], rank: None };
    for kind in [w8a16, w8a8] {
        // A handful of rows; more than one tile in both directions; more k-blocks than pipeline stages, the last one partly filled.
        for (shape, bias) in [([3, 592, 136], true), ([130, 528, 168], false), ([67, 784, 392], true)] {
            linear(table, kind, shape, "e4m3", &[(shape[2], FP8)], bias);
        }
        linear(table, kind, [67, 528, 168], "e4m3 by rows", &[(168, FP8_ROWS)], true);
        linear(table, kind, [67, 208, 168], "e4m3 unscaled", &[(168, UNSCALED)], false);
        linear(table, kind, [67, 528, 424], "e4m3, e4m3 by rows, e4m3", &[(136, FP8), (64, FP8_ROWS), (224, FP8)], true);
        two_streams(table, kind, [FP8, FP8_ROWS]);
        for (name, formats) in [("e4m3", [FP8, FP8]), ("e4m3 and e4m3 by rows", [FP8, FP8_ROWS])] {
            swiglu(table, kind, name, &formats);
        }
        for (name, format, gated, bias) in [("e4m3", FP8, true, true), ("e4m3 by rows", FP8_ROWS, true, false)] {
            gate_residual(table, kind, [130, 528, 168], name, &[(168, format)], (gated, bias));
        }
        gate_residual(table, kind, [3, 784, 392], "e4m3", &[(392, FP8)], (false, true));
        for (name, parts, heads, mlp) in [
            ("e4m3", [FP8; 4], None, None),
            ("e4m3 by rows", [FP8_ROWS; 4], Some(Stored::fp8(Scale::ONE)), Some(e4m3_out)),
            ("e4m3", [FP8; 4], Some(e4m3_out), Some(clipped)),
        ] {
            qkv(table, kind, name, &Fused { parts, heads, mlp, ..Fused::default() });
        }
    }
    // Matrices of both formats in one launch. A bf16 layer alone takes the same kernels if its result is e4m3.
    linear(table, w8a16, [67, 528, 424], "e4m3, bf16, e4m3 by rows", &[(136, FP8), (64, PLAIN), (224, FP8_ROWS)], true);
    linear(table, w8a16, [3, 592, 136], "bf16, e4m3", &[(64, PLAIN), (72, FP8)], false);
    for (name, formats) in
        [("e4m3 and bf16", [FP8, PLAIN]), ("bf16 and e4m3 by rows", [PLAIN, FP8_ROWS]), ("bf16 alone", [PLAIN, PLAIN])]
    {
        swiglu(table, w8a16, name, &formats);
    }
    for (name, parts, mlp) in [
        ("e4m3, bf16, e4m3, bf16", [FP8, PLAIN, FP8, PLAIN], Some(e4m3_out)),
        ("bf16, e4m3 by rows, bf16, e4m3", [PLAIN, FP8_ROWS, PLAIN, FP8], None),
    ] {
        qkv(table, w8a16, name, &Fused { parts, mlp, ..Fused::default() });
    }
    table.variants = variants;
}

pub fn linear(
    table: &mut Table,
    kind: Kind,
    [rows, inner, cols]: [usize; 3],
    weight: &str,
    parts: &[(usize, Filed)],
    bias: bool,
) {
    let parts = parts.to_vec();
    let name = format!("linear {} {rows} rows of {inner} to {cols}, {weight}, bias {bias}", kind.name);
    table.add(name, move |rig| {
        let (format, x) = input(rig, kind.input, rows, inner);
        let ((w, host), bias, out) =
            (kind.layer(rig, &parts, inner, format), bias.then(|| rig.vector(cols)), rig.output(rows, cols));
        let w = Linear { bias: bias.as_ref().map(|bias| bias.t), ..w };
        let bias = bias.as_ref().map(|bias| &bias.host);
        let op = Op::Linear(&[Gemm { out, x: x.t, w: &w }]);
        rig.run(op, &[(out, want!(kind.sums, linear(&x.host, &host, bias)))]);
    });
}

/// Adds a case of two streams in one launch, whose inputs and weights have different scales.
pub fn two_streams(table: &mut Table, kind: Kind, [first, second]: [Filed; 2]) {
    let inner = kind.inner;
    let rank = kind.rank.map_or_else(String::new, |rank| format!(", ranks {rank} and {}", rank + 32));
    table.add(format!("linear {} 65 and 67 rows of {inner} to 72 and 136, two streams{rank}", kind.name), move |rig| {
        let streams = [(65, 72, first, 1.0), (67, 136, second, 3.0)].map(|(rows, cols, weight, larger)| {
            let format = kind.input.map(|format| match format.dtype {
                E2m1 => Stored::nvfp4(Scale::new(0.000_41 * larger).unwrap()),
                _ => Stored::fp8(Scale::new(0.0029 * larger).unwrap()),
            });
            let (format, x) = input(rig, format, rows, inner);
            // The second stream's branch takes more stages.
            let kind = Kind { rank: kind.rank.map(|rank| if larger > 1.0 { rank + 32 } else { rank }), ..kind };
            (x, kind.layer(rig, &[(cols, weight)], inner, format), rig.output(rows, cols))
        });
        let gemms = streams.each_ref().map(|(x, (w, _), out)| Gemm { out: *out, x: x.t, w });
        let checks = streams
            .each_ref()
            .map(|(x, (_, host), out)| -> super::Check<'_> { (*out, want!(kind.sums, linear(&x.host, host, None))) });
        rig.run(Op::Linear(&gemms), &checks);
    });
}

/// Gate and up rows, each in its own matrix or both in one. Results are quantized to 8 bits, or to NVFP4 if inputs are NVFP4.
pub fn swiglu(table: &mut Table, kind: Kind, weight: &str, formats: &[Filed]) {
    // Wider than a tile.
    let (rows, inner, [width, _]) = (67, kind.inner, kind.widths);
    let parts: Vec<_> = formats.iter().map(|&format| (2 * width / formats.len(), format)).collect();
    let to_nvfp4 = kind.input.is_some_and(|format| format.dtype == E2m1);
    let quantized = results().into_iter().filter(|(_, format)| format.dtype == E4m3 || to_nvfp4);
    for (name, result) in [("bf16", None)].into_iter().chain(quantized.map(|(name, format)| (name, Some(format)))) {
        let parts = parts.clone();
        table.add(format!("linear_swiglu {} {rows} rows of {inner} to {width}, {weight} into {name}", kind.name), move |rig| {
            let (format, x) = input(rig, kind.input, rows, inner);
            let (w, host) = kind.layer(rig, &parts, inner, format);
            let out = rig.output_stored(result.unwrap_or(rig.plain()), rows, width);
            let op = Op::LinearSwiglu(&[Gemm { out, x: x.t, w: &w }]);
            rig.run(op, &[(out, want!(kind.sums, swiglu(&x.host, &host, 0, width)))]);
        });
    }
}

pub fn gate_residual(
    table: &mut Table,
    kind: Kind,
    [rows, inner, cols]: [usize; 3],
    weight: &str,
    parts: &[(usize, Filed)],
    (gated, bias): (bool, bool),
) {
    let parts = parts.to_vec();
    let name = format!("linear_gate_residual {} {rows} rows of {inner} to {cols}, {weight}, gate {gated} bias {bias}", kind.name);
    table.add(name, move |rig| {
        let (stored, x) = input(rig, kind.input, rows, inner);
        let (w, host) = kind.layer(rig, &parts, inner, stored);
        let (bias, gate) = (bias.then(|| rig.vector(cols)), gated.then(|| rig.input(1, cols, |v| v)));
        let into = rig.updated(rows, cols);
        let w = Linear { bias: bias.as_ref().map(|bias| bias.t), ..w };
        let stream = GatedGemm { into: into.t, x: x.t, w: &w, gate: gate.as_ref().map(|gate| gate.t) };
        let (bias, gate) = (bias.as_ref().map(|bias| &bias.host), gate.as_ref().map(|gate| &gate.host));
        let want = want!(kind.sums, gate_residual(&into.host, &x.host, &host, bias, gate));
        rig.run(Op::LinearGateResidual(&[stream]), &[(into.t, want)]);
    });
}

/// Adds cases of the fused projection, with each kind of RoPE.
pub fn qkv(table: &mut Table, kind: Kind, weight: &str, case: &Fused) {
    let stored = |format: Option<Stored>| format.map_or("bf16", |format| format.dtype.name());
    let shape @ [rows, inner, width] = [131, kind.inner, kind.widths[1]];
    for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
        let case = Fused { input: kind.input, shape, style, sums: kind.sums, rank: kind.rank, ..case.clone() };
        let into = format!("{} and {}", stored(case.heads), stored(case.mlp));
        let name = format!("qkv {} {rows} rows of {inner} {style:?} mlp {width}, {weight} into {into}", kind.name);
        table.add(name, move |rig| project(rig, &case, 128));
    }
}
