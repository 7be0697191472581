//! The convolutions at the ends of the VAE, whose input or output is pixels with three channels. The wide convolutions are in `conv.rs`.

use super::abi::{self, KlMat};
use super::context::{KernelChoice, OpContext};
use super::launch::Kernel;
use super::norm::group_stats;
use super::params::{NONE, is_async_copyable, is_pair_aligned, is_vectorizable, naive_grid};
use crate::backend::{Conv, GroupNorm};
use crate::error::Result;
use crate::tensor::Tensor;

/// The kernels of [`Op::NormConv`](crate::backend::Op::NormConv).
pub const NORM_CONVS: [Kernel; 5] =
    [Kernel::NormConvNarrow, Kernel::NaiveNormConv, Kernel::GroupStats8, Kernel::GroupStatsAny, Kernel::GroupStatsFinish];

/// Channels that the kernels process at once.
const RUN: u32 = 32;

/// Operands of [`Op::NormConv`](crate::backend::Op::NormConv).
pub struct NormConvArgs<'a> {
    pub out: Tensor,
    pub x: Tensor,
    pub norm: &'a GroupNorm,
    pub stats: Option<Tensor>,
    pub w: &'a Conv,
    pub width: usize,
    pub height: usize,
}

/// Group norm, SiLU and a convolution. Uses the statistics that the producer of the image computed, if it did.
pub fn norm_conv(cx: &OpContext, op: &'static str, args: &NormConvArgs<'_>) -> Result<()> {
    let (x, groups) = (cx.mat(args.x, op)?, args.norm.groups as u32);
    let stats = match args.stats {
        Some(stats) => cx.mat(stats, op)?,
        None => {
            // This memory is free: no GEMM runs in between.
            let data = cx.memory.stream_k_partials();
            let stats = KlMat { data, stride: 2, rows: groups, cols: 2, dtype: abi::KL_F32, ..NONE };
            group_stats(cx, op, x, stats)?;
            stats
        }
    };
    let (width, height) = (args.width as u32, args.height as u32);
    let (col_strips, strip_rows) = strips(width, height, cx.sms);
    let p = abi::KlNormConv {
        out: cx.mat(args.out, op)?,
        x,
        w: cx.mat(args.w.weight, op)?,
        bias: cx.mat(args.w.bias, op)?,
        stats,
        gain: cx.mat(args.norm.weight, op)?,
        shift: cx.mat(args.norm.bias, op)?,
        width,
        height,
        eps: args.norm.eps,
        strip_rows,
    };
    let narrow = p.out.cols <= abi::KL_NARROW_OUTPUTS && x.cols <= abi::KL_NARROW_CHANNELS && x.cols.is_multiple_of(RUN);
    if cx.choice == KernelChoice::Naive || !narrow || ![x, p.w].iter().all(|m| is_async_copyable(m, abi::KL_BF16)) {
        return cx.kernels.launch(Kernel::NaiveNormConv, naive_grid(&p.out), &p);
    }
    cx.kernels.launch(Kernel::NormConvNarrow, [col_strips * height.div_ceil(strip_rows), 1, 1], &p)
}

/// How an image is cut into strips, one for each CTA: the number of strips across, and the rows of a strip. A strip reads two rows more
/// than it writes, and fills whole steps of the CTA's warps. CTAs take equally long, so strips are chosen by their waves and rows.
fn strips(width: u32, height: u32, sms: u32) -> (u32, u32) {
    /// CTAs that are resident on an SM at the same time.
    const CTAS_PER_SM: u32 = 3;
    const MOST_WAVES: u32 = 4;
    let (col_strips, slots) = (width.div_ceil(abi::KL_NARROW_COLS - 2), CTAS_PER_SM * sms);
    let rows_of = |waves: u32| {
        let rows = height.div_ceil((waves * slots / col_strips.max(1)).max(1));
        (rows + 2).next_multiple_of(abi::KL_NARROW_THREADS / 32) - 2
    };
    let time = |rows: u32| (col_strips * height.div_ceil(rows)).div_ceil(slots) * (rows + 2);
    (col_strips, (1..=MOST_WAVES).map(rows_of).min_by_key(|&rows| time(rows)).unwrap_or_else(|| rows_of(1)))
}

/// Whether [`conv_in`] can compute this convolution.
pub fn takes_conv(cx: &OpContext, p: &abi::KlConv) -> bool {
    let narrow =
        p.x.cols <= abi::KL_NARROW_IN_CHANNELS && p.out.cols <= abi::KL_NARROW_IN_OUTPUTS && p.out.cols.is_multiple_of(RUN);
    let types = [p.x, p.w].iter().all(|m| m.dtype == abi::KL_BF16);
    let aligned = is_vectorizable(&p.out, abi::KL_BF16) && is_pair_aligned(&p.bias);
    cx.choice != KernelChoice::Naive && p.sampling == abi::KL_SAME && p.residual.data == 0 && narrow && types && aligned
}

/// A convolution that reads pixels.
pub fn conv_in(cx: &OpContext, p: &abi::KlConv) -> Result<()> {
    /// CTAs that are resident on an SM at the same time. Each begins by reading the filters.
    const CTAS_PER_SM: u32 = 2;
    let tiles = p.out.rows.div_ceil(abi::KL_NARROW_IN_THREADS);
    cx.kernels.launch(Kernel::ConvNarrowIn, [tiles.min(CTAS_PER_SM * cx.sms), 1, 1], p)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_cover_an_image_in_whole_waves() {
        for (width, height, sms) in
            [(1, 1, 132), (46, 7, 132), (47, 1024, 8), (1024, 1024, 132), (1360, 768, 20), (8192, 8192, 132)]
        {
            let (cols, rows) = strips(width, height, sms);
            assert!(cols * 46 >= width && (cols - 1) * 46 < width, "{cols} strips of {width}");
            assert!((rows + 2).is_multiple_of(4) && rows > 0);
        }
        // 23 by 17 strips fill 396 slots. At 2048 pixels a side, one wave would leave a tenth of the slots empty.
        assert_eq!(strips(1024, 1024, 132), (23, 62));
        let (cols, rows) = strips(2048, 2048, 132);
        assert_eq!((cols * 2048_u32.div_ceil(rows)).div_ceil(396), 2);
    }
}
