//! GEMMs of every kind with a LoRA branch: every epilogue, ranks that fill a pipeline stage in part, exactly and several times, and
//! matrices that begin within a tile.

use super::Sums;
use super::cases::Table;
use super::fp8_gemms::{ALIGNED, Kind, gate_residual, linear, qkv, swiglu, two_streams};
use super::quantized::{FP8, FP8_ROWS, Fused, NVFP4, PLAIN, inputs, results};
use kiln::internals::tensor::{Scale, Stored};

/// All cases.
pub fn all(table: &mut Table) {
    let variants = std::mem::replace(&mut table.variants, ALIGNED);
    let ([(_, bf16), (_, e4m3), (_, nvfp4)], [(_, e4m3_out), _, (_, nvfp4_out), _]) = (inputs(), results());
    let fp8_heads = Some(Stored::fp8(Scale::ONE));
    // For each kind: two weight formats, and the formats of queries and keys and of the SwiGLU half of the projection.
    for (name, input, sums, widths, [first, second], heads, mlp) in [
        ("bf16", bf16, Sums::F32, [208, 80], [PLAIN, PLAIN], None, None),
        ("w8a16", bf16, Sums::F32, [208, 80], [FP8, FP8_ROWS], None, Some(e4m3_out)),
        ("w8a8", e4m3, Sums::Fp8, [208, 80], [FP8_ROWS, FP8], fp8_heads, Some(e4m3_out)),
        ("w4a16", bf16, Sums::F32, [208, 80], [NVFP4, PLAIN], None, None),
        ("w4a4", nvfp4, Sums::F32, [192, 64], [NVFP4, NVFP4], None, Some(nvfp4_out)),
    ] {
        let kind = |rank: usize| Kind { name, input, sums, inner: 640, widths, rank: Some(rank) };
        linear(table, kind(48), [130, 640, 168], "rank 48", &[(168, first)], true);
        linear(table, kind(16), [3, 640, 264], "rank 16", &[(200, first), (64, second)], true);
        two_streams(table, kind(64), [first, second]);
        swiglu(table, kind(16), "rank 16", &[first, second]);
        gate_residual(table, kind(400), [67, 640, 264], "rank 400", &[(200, second), (64, first)], (true, true));
        let parts = [first, second, first, second];
        qkv(table, kind(48), "rank 48", &Fused { parts, heads, mlp, ..Fused::default() });
    }
    table.variants = variants;
}
