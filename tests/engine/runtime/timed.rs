//! Rows of the microbenchmark on the stand-in: their kernels, and the number of launches.

use super::cuda;
use common::stand_in::StandIn;
use kiln::internals::backend::Backend;
use kiln::internals::backend::cuda::{Kernel, kernels_of};
use kiln::internals::tensor::Precision;
use kiln::microbench::{Protocol, Scale, rows};
use std::sync::Arc;

#[test]
fn every_op_can_be_timed() {
    let driver = StandIn::new(1 << 40);
    let mut cuda = cuda(&driver, &Arc::default()).unwrap();
    for row in rows(Scale::Quick, Precision::Bf16, cuda.gemm_formats()).unwrap() {
        let (launches, replays) = (driver.launches.get(), driver.replays.get());
        let figure = row.measure(&mut cuda, &Protocol::QUICK).unwrap();
        assert!(figure.kernels.iter().all(|name| name.starts_with("kl_")) && !figure.kernels.is_empty(), "{figure:?}");
        // The warm-up launches, and captures graphs that no earlier row has captured. Only the replay is timed.
        let graphs = if figure.of_copy.is_some() { 2 } else { 1 };
        assert_eq!(driver.replays.get() - replays, graphs * (1 + 1 + figure.seconds.len()), "{figure:?}");
        assert!(driver.launches.get() - launches >= graphs * figure.sets, "{figure:?}");
        assert!(figure.kernels.iter().all(|name| kernels_of(row.op).iter().any(|k| k.symbol() == *name)), "{figure:?}");
    }
}

#[test]
fn fewer_sets_where_memory_is_short() {
    let driver = StandIn::new(8 << 20);
    let mut cuda = cuda(&driver, &Arc::default()).unwrap();
    let rows = rows(Scale::Quick, Precision::Bf16, cuda.gemm_formats()).unwrap();
    let row = rows.iter().find(|row| row.shape == "64x64, 64 channels, stats given").unwrap();
    assert_eq!(row.measure(&mut cuda, &Protocol::QUICK).unwrap().sets, 1);
}

/// At full size every matrix op runs on tensor cores.
#[test]
fn large_shapes_take_the_fast_kernels() {
    let driver = StandIn::new(1 << 40);
    let mut cuda = cuda(&driver, &Arc::default()).unwrap();
    for row in rows(Scale::Klein, Precision::Bf16, cuda.gemm_formats()).unwrap() {
        row.prepare(&mut cuda, 1).unwrap().warm_up(&mut cuda).unwrap();
    }
    let launched = |kernel: Kernel| cuda.launched().any(|(k, times)| k == kernel && times > 0);
    use Kernel::*;
    let fast = [
        GemmBf16Sm90_256x192,
        GemmBf16Sm90_128x256,
        AttentionBf16Sm90MaxFree,
        AttentionBf16Sm90Causal,
        AttentionWideBf16Sm90_128x512,
        ConvBf16Sm90_128x256,
        ConvBf16Sm90_256x128,
        NormConvNarrow,
        ConvNarrowIn,
    ];
    assert!(fast.into_iter().all(launched));
    let portable =
        [GemmBf16Sm80_256x128, AttentionBf16Sm80_4warps, AttentionWideBf16Sm80_64x512, ConvBf16Sm80_256x128, QkNormRope];
    assert!(!portable.into_iter().any(launched));
    assert!(!cuda.launched().any(|(kernel, times)| kernel.symbol().starts_with("kl_naive") && times > 0));
}
