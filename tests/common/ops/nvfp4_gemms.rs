//! GEMMs with NVFP4 weights, which keep their codes and block scales, by bf16 inputs (W4A16) and NVFP4 inputs (W4A4). They cover every
//! epilogue, matrices that begin and end within a scale tile, and weights whose matrices have formats of their own.

use super::Sums;
use super::cases::Table;
use super::formats::Filed;
use super::fp8_gemms::{ALIGNED, Kind, gate_residual, linear, qkv, swiglu, two_streams};
use super::quantized::{FP8, FP8_ROWS, Fused, NVFP4, PLAIN, inputs, results};
use kiln::internals::tensor::{Nvfp4Layout, Scale, Stored};

/// All cases.
pub fn all(table: &mut Table) {
    let variants = std::mem::replace(&mut table.variants, ALIGNED);
    w4a16(table);
    w4a4(table);
    table.variants = variants;
}

fn w4a16(table: &mut Table) {
    let ([(_, bf16), ..], [(_, e4m3), (_, clipped), ..]) = (inputs(), results());
    // The inner size is whole scale tiles: nine k-blocks, more than a pipeline has stages.
    let kind = Kind { name: "w4a16", input: bf16, sums: Sums::F32, inner: 576, widths: [208, 80], rank: None };
    for (shape, bias) in [([3, 640, 136], true), ([130, 576, 168], false), ([67, 832, 392], true), ([257, 64, 136], false)] {
        linear(table, kind, shape, "nvfp4", &[(shape[2], NVFP4)], bias);
    }
    // Tensor cores do not take rows of partial scale tiles, or results that TMA does not store.
    linear(table, kind, [67, 208, 168], "nvfp4", &[(168, NVFP4)], true);
    linear(table, kind, [67, 576, 131], "nvfp4", &[(131, NVFP4)], true);
    for (name, layout) in [("modelopt", Nvfp4Layout::MODELOPT), ("modelopt's single files", Nvfp4Layout::MODELOPT_SINGLE)] {
        linear(table, kind, [67, 576, 168], &format!("nvfp4 of {name}"), &[(168, Filed::Nvfp4(layout))], false);
    }
    let mixes = [
        ("nvfp4, nvfp4", vec![(200, NVFP4), (64, NVFP4)]),
        ("nvfp4, bf16, nvfp4", vec![(136, NVFP4), (64, PLAIN), (224, NVFP4)]),
        ("e4m3 by rows, nvfp4, e4m3, bf16", vec![(72, FP8_ROWS), (200, NVFP4), (64, FP8), (88, PLAIN)]),
    ];
    for (name, parts) in &mixes {
        let cols = parts.iter().map(|part| part.0).sum();
        linear(table, kind, [67, 576, cols], name, parts, true);
        gate_residual(table, kind, [67, 576, cols], name, parts, (true, true));
    }
    gate_residual(table, kind, [130, 576, 168], "nvfp4", &[(168, NVFP4)], (true, false));
    gate_residual(table, kind, [3, 832, 392], "nvfp4", &[(392, NVFP4)], (false, true));
    two_streams(table, kind, [NVFP4, NVFP4]);
    for (name, formats) in [
        ("nvfp4", &[NVFP4, NVFP4][..]),
        // The up rows begin within a scale tile.
        ("nvfp4 in one matrix", &[NVFP4]),
        ("nvfp4 and bf16", &[NVFP4, PLAIN]),
        ("bf16 and nvfp4", &[PLAIN, NVFP4]),
        ("nvfp4 and e4m3 by rows", &[NVFP4, FP8_ROWS]),
        ("e4m3 and nvfp4", &[FP8, NVFP4]),
    ] {
        swiglu(table, kind, name, formats);
    }
    let (heads, plain) = (Some(Stored::fp8(Scale::ONE)), Fused { parts: [NVFP4; 4], ..Fused::default() });
    for (name, case) in [
        ("nvfp4", plain.clone()),
        ("nvfp4", Fused { heads, mlp: Some(clipped), ..plain.clone() }),
        ("nvfp4 in one matrix", Fused { joined: true, mlp: Some(e4m3), ..plain.clone() }),
        ("nvfp4, e4m3 by rows, bf16, nvfp4", Fused { parts: [NVFP4, FP8_ROWS, PLAIN, NVFP4], ..plain.clone() }),
        ("bf16, nvfp4, e4m3, bf16", Fused { parts: [PLAIN, NVFP4, FP8, PLAIN], heads, mlp: Some(e4m3), ..plain }),
    ] {
        qkv(table, kind, name, &case);
    }
}

fn w4a4(table: &mut Table) {
    let ([.., (_, nvfp4)], [(_, e4m3), _, (_, nvfp4_out), (_, clipped)]) = (inputs(), results());
    // Whole k-blocks, more than a pipeline has stages, and whole words of scales. Gates and ups begin with either half of a scale tile.
    let kind = Kind { name: "w4a4", input: nvfp4, sums: Sums::F32, inner: 640, widths: [192, 64], rank: None };
    // K of whole scale tiles and of whole blocks alone, a handful of rows, more rows than a tile in both directions.
    for (shape, bias) in [
        ([3, 640, 136], true),
        ([130, 640, 168], false),
        ([130, 576, 168], false),
        ([67, 832, 392], true),
        ([257, 64, 136], false),
        ([67, 208, 168], true),
        ([67, 16, 131], false),
    ] {
        linear(table, kind, shape, "nvfp4", &[(shape[2], NVFP4)], bias);
    }
    let both = [(200, NVFP4), (64, NVFP4)];
    linear(table, kind, [300, 384, 264], "nvfp4", &[(264, NVFP4)], false);
    linear(table, kind, [67, 640, 264], "nvfp4, nvfp4", &both, true);
    gate_residual(table, kind, [67, 640, 264], "nvfp4, nvfp4", &both, (true, true));
    gate_residual(table, kind, [130, 640, 168], "nvfp4", &[(168, NVFP4)], (true, false));
    gate_residual(table, kind, [3, 848, 392], "nvfp4", &[(392, NVFP4)], (false, true));
    two_streams(table, kind, [NVFP4, NVFP4]);
    for (name, formats) in [("nvfp4", &[NVFP4, NVFP4][..]), ("nvfp4 in one matrix", &[NVFP4])] {
        swiglu(table, kind, name, formats);
    }
    let plain = Fused { parts: [NVFP4; 4], ..Fused::default() };
    for (name, case) in [
        ("nvfp4", Fused { mlp: Some(nvfp4_out), ..plain.clone() }),
        ("nvfp4 in one matrix", Fused { joined: true, mlp: Some(clipped), ..plain.clone() }),
        ("nvfp4", Fused { mlp: Some(e4m3), ..plain }),
    ] {
        qkv(table, kind, name, &case);
    }
}
