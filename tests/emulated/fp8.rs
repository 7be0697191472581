//! FP8 on the CUDA backend beyond the op cases: how sums are accumulated, and which weights are refused.

use crate::driver::{Emulated, Gpu};
use crate::runner::cuda_with;
use common::random::one_in;
use kiln::error::Error;
use kiln::internals::backend::cuda::{Cuda, GemmOperands, KernelChoice, Tile};
use kiln::internals::backend::{Backend, Fp8Accumulate, Gemm, Linear, Op, Role};
use kiln::internals::tensor::{Arena, Bytes, DType, Region, Scale, SliceScaling, Stored, Tensor, WeightSlice};
use kiln_emulator::planted::{BUGS, Expect};
use std::sync::Arc;

const ROWS: usize = 16;
const ONE_AND_AN_EIGHTH: u8 = 0x39;

/// Uploads an e4m3 weight with these codes.
fn upload(cuda: &mut Cuda, codes: Vec<u8>) -> Result<Tensor, Error> {
    let mut weights = Arena::new(Region::Weights);
    let w = weights.alloc_stored(ROWS, codes.len() / ROWS, Stored::fp8(Scale::ONE))?;
    cuda.reserve(Region::Weights, weights.peak())?;
    let scaling = SliceScaling::Tensor(Scale::ONE);
    let part = WeightSlice { bytes: Bytes::new(Arc::new(codes)), dtype: DType::E4m3, rows: ROWS, scaling };
    cuda.upload(w, Role::Linear, &[part])?;
    Ok(w)
}

/// Sums of `k` products whose factors are all 1.125.
fn sums(gpu: Gpu, accumulate: Fp8Accumulate, choice: KernelChoice, k: usize) -> Result<Vec<f32>, Error> {
    sums_with(cuda_with(&Emulated::new(gpu), None)?, accumulate, choice, k)
}

fn sums_with(mut cuda: Cuda, accumulate: Fp8Accumulate, choice: KernelChoice, k: usize) -> Result<Vec<f32>, Error> {
    cuda.set_fp8_accumulate(accumulate);
    cuda.set_choice(choice);
    let weight = upload(&mut cuda, vec![ONE_AND_AN_EIGHTH; ROWS * k])?;
    let (mut arena, format) = (Arena::new(Region::Arena), Stored::fp8(Scale::ONE));
    let (x, out) = (arena.alloc_stored(ROWS, k, format)?, arena.alloc(ROWS, ROWS, DType::Bf16)?);
    cuda.reserve(Region::Arena, arena.peak())?;
    cuda.write(x, &vec![1.125; ROWS * k])?;
    let w = Linear { input: format, ..Linear::new(weight, None) };
    cuda.run(Op::Linear(&[Gemm { out, x, w: &w }]))?;
    let mut values = vec![0.0; out.len()];
    cuda.read(out, &mut values)?;
    Ok(values)
}

/// Checks long sums of one sign, which tensor cores alone get wrong.
#[test]
fn sums_are_exact_where_they_are_to_be() {
    use Fp8Accumulate::{Auto, Exact, Fast};
    needs_emulator!();
    // The largest missing share: under `Auto`, and of all sums that are not exact.
    for (k, total, auto) in [(4096, 5184.0, 0.07), (6144, 7776.0, 0.11), (12288, 15552.0, 0.016)] {
        let missing = [(Exact, 0.0), (Fast, 0.2), (Auto, auto)];
        for (accumulate, most) in missing {
            let sums = sums(Gpu::HOPPER, accumulate, KernelChoice::Best, k).unwrap();
            let right = |sum: &f32| (*sum == total) == (most == 0.0) && total - sum <= most * total;
            assert!(sums.iter().all(right), "{accumulate:?}, {k} products: {} and {total}", sums[0]);
        }
    }
    let tiles = Tile::ALL.iter().filter(|tile| tile.operands == GemmOperands::Fp8);
    for tile in one_in(8, "tiles", tiles) {
        let sums = sums(Gpu::HOPPER, Auto, KernelChoice::Only(tile.kernel), 12288).unwrap();
        let (exact, most) = match tile.longest_sum {
            Some(128) => (true, 0.0),
            Some(_) => (false, 0.016 * 15552.0),
            None => (false, 0.2 * 15552.0),
        };
        assert!(sums.iter().all(|sum| (*sum == 15552.0) == exact && 15552.0 - sum <= most), "{tile:?}: {}", sums[0]);
    }
    // The portable kernel promotes, even with `Fast`. Without promotion Ada would lose as much as Hopper does, and Blackwell nothing.
    let bugs: Vec<&str> = BUGS.iter().filter(|bug| matches!(bug.expect, Expect::Sums)).map(|bug| bug.name).collect();
    assert!(!bugs.is_empty());
    for gpu in [Gpu::ADA, Gpu::BLACKWELL] {
        let sums = sums(gpu, Fast, KernelChoice::Best, 12288).unwrap();
        assert!(sums.iter().all(|sum| *sum == 15552.0), "{gpu:?}: {}", sums[0]);
        for bug in &bugs {
            let wrong = cuda_with(&Emulated::new(gpu), Some(bug)).unwrap();
            let sums = sums_with(wrong, Fast, KernelChoice::Best, 12288).unwrap();
            assert!(sums.iter().all(|sum| (*sum == 15552.0) == (gpu.capability > (9, 0))), "{gpu:?}, {bug}: {}", sums[0]);
        }
    }
}

/// Where codes are expanded, a NaN code would become a number.
#[test]
fn weights_with_nan_are_refused() {
    needs_emulator!();
    let mut cuda = cuda_with(&Emulated::new(Gpu::HOPPER), None).unwrap();
    for nan in [0x7f, 0xff] {
        let mut codes = vec![ONE_AND_AN_EIGHTH; ROWS * 70_016];
        upload(&mut cuda, codes.clone()).unwrap();
        codes[ROWS * 70_016 - 5] = nan;
        let refused = upload(&mut cuda, codes);
        assert!(matches!(&refused, Err(Error::Op { op: "upload", what }) if what.contains("NaN")), "{refused:?}");
    }
}
