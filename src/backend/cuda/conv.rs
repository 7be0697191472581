//! 3x3 convolutions as implicit GEMMs: on tensor cores where operands allow it, by the naive kernel elsewhere.

use super::abi::{self, KlMat};
use super::context::{KernelChoice, OpContext};
use super::conv_narrow;
use super::conv_sm90::{ConvGemm, ShortcutMats};
use super::gemm::{self, EpilogueGemm};
use super::launch::{Kernel, templates};
use super::norm::group_stats;
use super::params::{NONE, is_async_copyable, is_pair_aligned, naive_grid};
use crate::backend::{Conv, Sampling, Shortcut};
use crate::error::Result;
use crate::tensor::Tensor;

/// The kernels of a convolution, of its result's statistics, and of its shortcut's GEMM.
pub fn kernels() -> Vec<Kernel> {
    [
        templates::CONV_BF16_SM90,
        templates::CONV_BF16_SM80,
        &[Kernel::ConvStats, Kernel::ConvNarrowIn, Kernel::NaiveConv],
        &[Kernel::GroupStats8, Kernel::GroupStatsAny, Kernel::GroupStatsFinish],
        // The weights of shortcuts are not quantized.
        templates::GEMM_BF16_SM90,
        templates::GEMM_BF16_SM120,
        templates::GEMM_BF16_SM80,
    ]
    .concat()
}

/// Operands of [`Op::Conv`](crate::backend::Op::Conv).
pub struct ConvArgs<'a> {
    pub out: Tensor,
    pub x: Tensor,
    pub w: &'a Conv,
    pub width: usize,
    pub height: usize,
    pub sampling: Sampling,
    pub residual: Option<Tensor>,
    pub shortcut: Option<Shortcut<'a>>,
    pub stats: Option<Tensor>,
}

/// Whether the epilogue can also compute the statistics of the result. This takes bf16, whole tiles that channel groups divide, and enough
/// scratch for the moments of every tile.
fn can_fuse_stats(cx: &OpContext, p: &abi::KlConv, stats: &KlMat) -> bool {
    let room = u64::from(p.row_tiles) * u64::from(stats.rows) * 16 <= cx.memory.stream_k_partial_bytes();
    let residual = p.residual.data == 0 || p.residual.dtype == abi::KL_BF16 && is_pair_aligned(&p.residual);
    let channels = p.out.cols / stats.rows;
    let whole = p.out.cols.is_multiple_of(abi::KL_MMA_COLS) && channels >= 2 && abi::KL_MMA_COLS.is_multiple_of(channels);
    p.out.dtype == abi::KL_BF16 && residual && room && whole
}

/// A convolution, and the statistics of its channel groups if they are wanted.
pub fn conv(cx: &OpContext, op: &'static str, args: &ConvArgs<'_>) -> Result<()> {
    let mut p = abi::KlConv {
        out: cx.mat(args.out, op)?,
        x: cx.mat(args.x, op)?,
        w: cx.mat(args.w.weight, op)?,
        bias: cx.mat(args.w.bias, op)?,
        residual: cx.mat_if(args.residual, op)?,
        stats: NONE,
        partials: 0,
        row_tiles: 0,
        groups: 0,
        width: args.width as u32,
        height: args.height as u32,
        sampling: match args.sampling {
            Sampling::Same => abi::KL_SAME,
            Sampling::Up => abi::KL_UP,
            Sampling::Down => abi::KL_DOWN,
        },
        unused: 0,
    };
    let stats = args.stats.map(|t| cx.mat(t, op)).transpose()?;
    if args.shortcut.is_none() && conv_narrow::takes_conv(cx, &p) {
        conv_narrow::conv_in(cx, &p)?;
        return stats.map_or(Ok(()), |stats| group_stats(cx, op, p.out, stats));
    }
    let shortcut = args.shortcut.map(|shortcut| ShortcutMats::new(cx, op, shortcut)).transpose()?;
    if shortcut.is_none_or(|shortcut| shortcut.is_some())
        && let Some(gemm) = ConvGemm::new(cx, &p, shortcut.flatten())
    {
        return gemm.launch(cx, op, stats);
    }
    // The other kernels have no shortcut. Its GEMM runs first, and the convolution takes the result as its residual, in place.
    if let Some(Shortcut { x, w }) = args.shortcut {
        let product = EpilogueGemm { out: args.out, x, w: *w, epilogue: abi::KL_STORE, gate: None };
        gemm::linear(cx, op, [product].into_iter())?;
        p.residual = p.out;
    }
    let phases = args.sampling.phases() as u32;
    let side = p.width.max(p.height) * if p.sampling == abi::KL_UP { 2 } else { 1 };
    if cx.choice == KernelChoice::Naive
        || ![p.x, p.w].iter().all(|m| is_async_copyable(m, abi::KL_BF16))
        || side > abi::KL_CONV_SIDE
    {
        let [row_tiles, col_tiles, _] = naive_grid(&KlMat { rows: p.out.rows / phases, ..p.out });
        cx.kernels.launch(Kernel::NaiveConv, [row_tiles, col_tiles, phases], &p)?;
        return stats.map_or(Ok(()), |stats| group_stats(cx, op, p.out, stats));
    }
    // All pixels of a tile belong to one phase.
    let row_tiles = |rows| phases * (p.out.rows / phases).div_ceil(rows);
    let ctas = |[rows, cols]: [u32; 2]| row_tiles(rows) * p.out.cols.div_ceil(cols);
    let kernel = cx.largest_tile(templates::CONV_BF16_SM80, ctas);
    let grid = [ctas(kernel.tile()), 1, 1];
    (p.row_tiles, p.partials) = (row_tiles(kernel.tile()[0]), cx.memory.stream_k_partials());
    let fused = stats.filter(|stats| can_fuse_stats(cx, &p, stats));
    if let Some(stats) = fused {
        (p.stats, p.groups) = (stats, stats.rows);
    }
    cx.kernels.launch(kernel, grid, &p)?;
    match stats {
        None => Ok(()),
        Some(_) if fused.is_some() => cx.kernels.launch(Kernel::ConvStats, [p.groups, 1, 1], &p),
        Some(stats) => group_stats(cx, op, p.out, stats),
    }
}
