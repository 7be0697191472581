//! Dispatches an op to the kernel family that computes it.

use super::abi;
use super::attention::{self, AttentionArgs};
use super::context::OpContext;
use super::conv::{self, ConvArgs, conv};
use super::conv_narrow::{self, NormConvArgs};
use super::gemm::{self, EpilogueGemm};
use super::launch::Kernel;
use super::params::{NO_CODE, dtype_code};
use super::{norm, pointwise};
use crate::backend::{Access, GatedGemm, Gemm, Op, OpKind};
use crate::error::{Error, Result};
use crate::tensor::{DType, Region, Tensor};

/// The kernels that an op may launch, for display: the fast kernels first, then those for other dtypes and unaligned addresses.
pub fn kernels_of(op: OpKind) -> Vec<Kernel> {
    match op {
        OpKind::Copy | OpKind::Silu => vec![Kernel::Map],
        OpKind::RmsNorm => norm::rms_norms(),
        OpKind::LayerNormModulate => norm::layer_norms(),
        OpKind::Linear | OpKind::LinearSwiglu | OpKind::LinearGateResidual => gemm::kernels(),
        OpKind::Qkv | OpKind::QkvMlp => gemm::projection_kernels(),
        OpKind::Attention | OpKind::AttentionCausal => attention::kernels(),
        OpKind::Conv => conv::kernels(),
        OpKind::GroupNorm => norm::GROUP_NORMS.to_vec(),
        OpKind::NormConv => conv_narrow::NORM_CONVS.to_vec(),
        OpKind::Patchify => vec![Kernel::Patchify],
        OpKind::Unpatchify => vec![Kernel::Unpatchify],
        OpKind::Euler => vec![Kernel::Euler],
        OpKind::Renoise => vec![Kernel::Renoise],
        OpKind::Guidance => vec![Kernel::Guidance],
        OpKind::Blend => vec![Kernel::Blend],
        OpKind::NonFinite => vec![Kernel::CountNonFinite],
        OpKind::LargestMagnitude => vec![Kernel::LargestMagnitude],
        OpKind::Preview => vec![Kernel::Preview],
        OpKind::Pixels => vec![Kernel::Pixels],
    }
}

/// Refuses operands that have no kernels: a weight to write (other than to merge adapters), f16 in working memory, quantized attention
/// values, or a type without a code in `abi.h`. Which operands may be quantized at all is a rule of ops.
fn check_operands(op: &Op<'_>) -> Result<()> {
    let mut usable = Ok(());
    let mut refuse = |t: Tensor, why: &str| {
        usable = Err(Error::Op { op: op.name(), what: format!("{t:?} cannot be used like this on the GPU: {why}") });
    };
    op.operands(&mut |t, access| {
        // Adapters may be merged into weights that were just uploaded, and copied to their region, before any op that reads either.
        let replaces = match op {
            Op::LinearGateResidual(_) => t.region == Region::Weights,
            Op::Copy { .. } => t.region == Region::Adapters,
            _ => false,
        };
        if access != Access::Read && t.region.is_read_only() && !replaces {
            refuse(t, "weights are not written");
        }
        if t.dtype == DType::F16 && t.region != Region::Weights {
            refuse(t, "only weights are stored in f16");
        }
        if dtype_code(t.dtype) == NO_CODE {
            refuse(t, "the only quantized formats with kernels are e4m3 and NVFP4");
        }
    });
    let mut plain_values = |values: Tensor| {
        if values.dtype.is_quantized() {
            refuse(values, "the values of attention are not quantized");
        }
    };
    match *op {
        Op::Qkv(streams) => streams.iter().for_each(|s| plain_values(s.v)),
        Op::Attention { kv, .. } => kv.iter().for_each(|s| plain_values(s.v)),
        _ => {}
    }
    usable
}

/// Launches the kernels of an op that has passed its checks.
pub fn dispatch(cx: &OpContext, op: Op<'_>) -> Result<()> {
    check_operands(&op)?;
    let name = op.name();
    let mat = |t: Tensor| cx.mat(t, name);
    match op {
        Op::Copy { out, x } => pointwise::map(cx, abi::KL_COPY, mat(out)?, mat(x)?),
        Op::Silu { out, x } => pointwise::map(cx, abi::KL_SILU, mat(out)?, mat(x)?),
        Op::RmsNorm { out, x, weight, eps } => norm::rms_norm(cx, mat(out)?, mat(x)?, mat(weight)?, eps),
        Op::LayerNormModulate { streams, eps } => norm::layer_norm_modulate(cx, name, streams, eps),
        Op::Linear(streams) => {
            let gemm = |s: &Gemm<'_>| EpilogueGemm { out: s.out, x: s.x, w: *s.w, epilogue: abi::KL_STORE, gate: None };
            gemm::linear(cx, name, streams.iter().map(gemm))
        }
        Op::LinearSwiglu(streams) => {
            let gemm = |s: &Gemm<'_>| EpilogueGemm { out: s.out, x: s.x, w: *s.w, epilogue: abi::KL_SWIGLU, gate: None };
            gemm::linear(cx, name, streams.iter().map(gemm))
        }
        Op::LinearGateResidual(streams) => {
            let epilogue = abi::KL_GATE_RESIDUAL;
            let gemm = |s: &GatedGemm<'_>| EpilogueGemm { out: s.into, x: s.x, w: *s.w, epilogue, gate: s.gate };
            gemm::linear(cx, name, streams.iter().map(gemm))
        }
        Op::Qkv(streams) => gemm::projection(cx, name, streams),
        Op::Attention { out, q, kv, head_dim, causal, softmax } => {
            attention::attention(cx, name, out, q, &AttentionArgs { kv, head_dim, causal, softmax })
        }
        Op::Conv { out, x, w, width, height, sampling, residual, shortcut, stats } => {
            conv(cx, name, &ConvArgs { out, x, w, width, height, sampling, residual, shortcut, stats })
        }
        Op::GroupNorm { out, x, norm, stats, silu } => {
            norm::group_norm(cx, name, mat(out)?, mat(x)?, norm, stats.map(mat).transpose()?, silu)
        }
        Op::NormConv { out, x, norm, stats, w, width, height } => {
            conv_narrow::norm_conv(cx, name, &NormConvArgs { out, x, norm, stats, w, width, height })
        }
        Op::Patchify { out, x, stats, width } => pointwise::patchify(cx, Kernel::Patchify, mat(out)?, mat(x)?, stats, width),
        Op::Unpatchify { out, x, stats, width } => pointwise::patchify(cx, Kernel::Unpatchify, mat(x)?, mat(out)?, stats, width),
        Op::Euler { latents, velocity, dt } => pointwise::euler(cx, mat(latents)?, mat(velocity)?, dt),
        Op::Renoise { latents, init, noise, keep, sigma } => {
            pointwise::renoise(cx, [mat(latents)?, mat(init)?, mat(noise)?], keep.map(mat).transpose()?, sigma)
        }
        Op::Guidance { out, cond, uncond, scale } => pointwise::guidance(cx, mat(out)?, mat(cond)?, mat(uncond)?, scale),
        Op::Blend { into, from, seam } => pointwise::blend(cx, mat(into)?, mat(from)?, seam),
        Op::NonFinite { count, x } => pointwise::non_finite(cx, mat(count)?, mat(x)?),
        Op::LargestMagnitude { largest, x } => pointwise::largest_magnitude(cx, mat(largest)?, mat(x)?),
        Op::Preview { out, latents, table, width } => pointwise::preview(cx, mat(out)?, mat(latents)?, mat(table)?, width),
        Op::Pixels { out, x } => pointwise::pixels(cx, mat(out)?, mat(x)?),
    }
}
