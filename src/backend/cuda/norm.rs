//! Norms over rows of activations, over heads of queries and keys, and over the channel groups of an image. All are bound by memory
//! bandwidth.

use super::abi::{self, KlMat};
use super::context::OpContext;
use super::launch::{Kernel, templates};
use super::params::{NONE, VECTOR, is_vectorizable};
use crate::backend::{GroupNorm, Modulated, RopeStyle};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The RMS norm kernels. The last takes any number of columns, any dtype and any address.
pub fn rms_norms() -> Vec<Kernel> {
    [templates::RMS_NORM, &[Kernel::RmsNormAny]].concat()
}

/// The kernels of a modulated layer norm. The last takes any number of columns, any dtype and any address.
pub fn layer_norms() -> Vec<Kernel> {
    [templates::LAYER_NORM, templates::LAYER_NORM_E4M3, templates::LAYER_NORM_E2M1, &[Kernel::LayerNormAny]].concat()
}

/// The kernels of a group norm.
pub const GROUP_NORMS: [Kernel; 4] = [Kernel::GroupStats8, Kernel::GroupNorm8, Kernel::GroupStatsAny, Kernel::GroupNormAny];

/// The kernel for rows of this many columns, and the rows that a CTA takes: the narrowest kernel that keeps rows in registers, or `any`.
fn row_norm(cols: u32, vectorizable: bool, kernels: &[Kernel], any: Kernel) -> (Kernel, u32) {
    let fitting = kernels.iter().find(|kernel| vectorizable && cols <= kernel.tile()[1]);
    fitting.map_or((any, 1), |kernel| (*kernel, abi::KL_NORM_ROWS))
}

fn rms_norm_kernel(cols: u32, vectorizable: bool) -> (Kernel, u32) {
    row_norm(cols, vectorizable, templates::RMS_NORM, Kernel::RmsNormAny)
}

/// The layer norm kernel for rows of this many columns and results of this type, and the rows that a CTA takes.
fn layer_norm_kernel(cols: u32, vectorizable: bool, result: DType) -> (Kernel, u32) {
    let kernels = match result {
        DType::E4m3 => templates::LAYER_NORM_E4M3,
        DType::E2m1 => templates::LAYER_NORM_E2M1,
        _ => templates::LAYER_NORM,
    };
    row_norm(cols, vectorizable, kernels, Kernel::LayerNormAny)
}

/// RMS norm of every row. Results in e4m3 and e2m1 are rare, so they use the kernel that takes anything.
pub fn rms_norm(cx: &OpContext, out: KlMat, x: KlMat, weight: KlMat, eps: f32) -> Result<()> {
    let p = abi::KlRmsNorm { out, x, weight, saturated: cx.memory.saturated(), eps, unused: 0 };
    let vectorizable = [out, x].iter().all(|m| is_vectorizable(m, abi::KL_BF16)) && is_vectorizable(&weight, abi::KL_F32);
    let (kernel, rows) = rms_norm_kernel(x.cols, vectorizable);
    cx.kernels.launch(kernel, [x.rows.div_ceil(rows), 1, 1], &p)
}

/// Layer norm of every row with AdaLN modulation. A launch takes as many streams with results of one type as the kernel allows.
pub fn layer_norm_modulate(cx: &OpContext, op: &'static str, streams: &[Modulated], eps: f32) -> Result<()> {
    const ABSENT: abi::KlModulated = abi::KlModulated { out: NONE, x: NONE, shift: NONE, scale: NONE };
    let (mat, saturated) = (|t| cx.mat(t, op), cx.memory.saturated());
    let alike = streams.chunk_by(|a, b| a.out.dtype == b.out.dtype);
    for group in alike.flat_map(|streams| streams.chunks(abi::KL_STREAMS as usize)) {
        let mut p = abi::KlLayerNorm { stream: [ABSENT; abi::KL_STREAMS as usize], saturated, eps, unused: 0 };
        for (to, s) in p.stream.iter_mut().zip(group) {
            *to = abi::KlModulated { out: mat(s.out)?, x: mat(s.x)?, shift: mat(s.shift)?, scale: mat(s.scale)? };
        }
        let (cols, result) = (p.stream[0].x.cols, group[0].out.dtype);
        let types = [abi::KL_BF16, abi::KL_E4M3, abi::KL_E2M1];
        let storable = |out: &KlMat| types.iter().any(|&dtype| is_vectorizable(out, dtype));
        let vectorizable = p.stream[..group.len()].iter().all(|s| {
            let inputs = [s.x, s.shift, s.scale];
            s.x.cols == cols && inputs.iter().all(|m| is_vectorizable(m, abi::KL_BF16)) && storable(&s.out)
        });
        let (kernel, rows) = layer_norm_kernel(cols, vectorizable, result);
        let ctas = p.stream.iter().map(|s| s.x.rows.div_ceil(rows)).sum();
        cx.kernels.launch(kernel, [ctas, 1, 1], &p)?;
    }
    Ok(())
}

/// The heads of one query or key matrix, with the parameters of [`qk_norm_rope`].
pub struct QkHeads {
    /// The matrix, its norm weight, its rotations and its scale.
    pub heads: abi::KlQkHeads,
    /// Columns of a head.
    pub head_dim: usize,
    /// How elements are paired for the rotation.
    pub style: RopeStyle,
    /// Added to the mean square.
    pub eps: f32,
}

/// The number of a style in `abi.h`.
pub const fn rope_code(style: RopeStyle) -> u32 {
    match style {
        RopeStyle::Interleaved => abi::KL_ROPE_INTERLEAVED,
        RopeStyle::HalfSplit => abi::KL_ROPE_HALF_SPLIT,
    }
}

/// RMS norm and rotation of all query and key heads, in place.
pub fn qk_norm_rope(cx: &OpContext, op: &'static str, parts: &[QkHeads]) -> Result<()> {
    let Some(&QkHeads { head_dim, style, eps, .. }) = parts.first() else { return Ok(()) };
    if parts.iter().any(|part| (part.head_dim, part.style, part.eps) != (head_dim, style, eps)) {
        return Err(Error::Op { op, what: "streams differ in heads, rotations or epsilon".into() });
    }
    const ABSENT: abi::KlQkHeads = abi::KlQkHeads { x: NONE, weight: NONE, table: NONE, scale: 1.0, unused: 0 };
    let mut p = abi::KlQkNormRope {
        part: [ABSENT; abi::KL_QK_PARTS as usize],
        head_dim: head_dim as u32,
        style: rope_code(style),
        eps,
        unused: 0,
    };
    p.part.iter_mut().zip(parts).for_each(|(to, part)| *to = part.heads);
    let rows: u32 = p.part.iter().map(|h| h.x.rows).sum();
    let most_heads = p.part.iter().map(|h| h.x.cols / p.head_dim).max().unwrap_or(0);
    let grid = [rows.div_ceil(abi::KL_NORM_THREADS / 32), most_heads.div_ceil(abi::KL_HEADS_PER_WARP), 1];
    cx.kernels.launch(Kernel::QkNormRope, grid, &p)
}

/// Iterations that a single CTA of a group kernel would need for the pixels of `x`. In each it takes the pixels that its threads cover.
fn group_iterations(x: &KlMat, vectorizable: bool) -> u32 {
    let threads_per_pixel = if vectorizable { x.cols / VECTOR } else { x.cols };
    x.rows.div_ceil((abi::KL_GROUP_THREADS / threads_per_pixel.max(1)).max(1))
}

fn check_groups(op: &'static str, groups: u32) -> Result<()> {
    if groups > abi::KL_GROUPS {
        return Err(Error::Op { op, what: format!("{groups} groups, at most {}", abi::KL_GROUPS) });
    }
    Ok(())
}

/// Group norm. Uses the statistics that the producer of `x` computed, if it did.
pub fn group_norm(
    cx: &OpContext,
    op: &'static str,
    out: KlMat,
    x: KlMat,
    norm: &GroupNorm,
    stats: Option<KlMat>,
    silu: bool,
) -> Result<()> {
    /// CTAs that are resident on an SM at the same time.
    const CTAS_PER_SM: u32 = 3;
    /// Fewest iterations for which a CTA is worth starting.
    const ITERATIONS: u32 = 4;
    let groups = norm.groups as u32;
    check_groups(op, groups)?;
    let p = abi::KlGroupNorm {
        out,
        x,
        weight: cx.mat(norm.weight, op)?,
        bias: cx.mat(norm.bias, op)?,
        stats: stats.unwrap_or(NONE),
        partials: cx.memory.reduction_partials(),
        blocks: if stats.is_none() { group_partials(cx, x, groups)? } else { 0 },
        groups,
        eps: norm.eps,
        silu: u32::from(silu),
    };
    let vectorizable = [out, x].iter().all(|m| is_vectorizable(m, abi::KL_BF16))
        && [p.weight, p.bias].iter().all(|m| is_vectorizable(m, abi::KL_F32));
    // CTAs begin by reading the statistics, so no more are launched than run at once.
    let ctas = group_iterations(&x, vectorizable).div_ceil(ITERATIONS).min(CTAS_PER_SM * cx.sms);
    cx.kernels.launch(if vectorizable { Kernel::GroupNorm8 } else { Kernel::GroupNormAny }, [ctas, 1, 1], &p)
}

/// Mean and variance of each group of channels of `x`.
pub fn group_stats(cx: &OpContext, op: &'static str, x: KlMat, stats: KlMat) -> Result<()> {
    let groups = stats.rows;
    check_groups(op, groups)?;
    let blocks = u64::from(group_partials(cx, x, groups)?);
    let p = abi::KlGroupStats { x, stats, partials: cx.memory.reduction_partials(), blocks, groups, unused: 0 };
    cx.kernels.launch(Kernel::GroupStatsFinish, [1, 1, 1], &p)
}

/// Computes the moments that the statistics are combined from, and returns how many CTAs did. The number depends only on the shape and the
/// GPU, so the order of the additions is always the same.
fn group_partials(cx: &OpContext, x: KlMat, groups: u32) -> Result<u32> {
    /// CTAs for each SM. They are few, since the combining kernel reads the moments of all of them.
    const CTAS_PER_SM: u32 = 2;
    /// Fewest iterations for which a CTA is worth starting.
    const ITERATIONS: u32 = 8;
    let vectorizable = is_vectorizable(&x, abi::KL_BF16);
    let most = (CTAS_PER_SM * cx.sms).min(abi::KL_PARTIALS);
    let ctas = group_iterations(&x, vectorizable).div_ceil(ITERATIONS).clamp(1, most);
    let partials = cx.memory.reduction_partials();
    let p = abi::KlGroupStats { x, stats: NONE, partials, blocks: u64::from(ctas), groups, unused: 0 };
    cx.kernels.launch(if vectorizable { Kernel::GroupStats8 } else { Kernel::GroupStatsAny }, [ctas, 1, 1], &p)?;
    Ok(ctas)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_norms_fit_their_rows() {
        let rms = |cols| rms_norm_kernel(cols, true);
        // Each kernel takes rows too wide for the one before it: only then does a thread lack no more than its last vector.
        assert_eq!([8, 1024, 1032, 2560].map(|cols| rms(cols).0), [0, 0, 1, 2].map(|i| rms_norms()[i]));
        assert_eq!([3072, 4096, 4104, 6144, 6152, 8192].map(|cols| rms(cols).0), [2, 3, 4, 4, 5, 5].map(|i| rms_norms()[i]));
        assert_eq!(rms(8200), (Kernel::RmsNormAny, 1));
        let layer = |vectorizable, result| layer_norm_kernel(3072, vectorizable, result);
        assert_eq!(layer(true, DType::Bf16), (Kernel::LayerNorm3072, 2));
        assert_eq!(layer(true, DType::E4m3), (Kernel::LayerNormE4m3_3072, 2));
        assert_eq!(layer(true, DType::E2m1), (Kernel::LayerNormE2m1_3072, 2));
        let results = [DType::Bf16, DType::E4m3, DType::E2m1];
        assert_eq!(results.map(|result| layer(false, result)), [(Kernel::LayerNormAny, 1); 3]);
    }
}
