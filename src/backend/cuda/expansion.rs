//! Expansion of quantized weights to bf16, each time that bf16 inputs are multiplied by them: by a kernel before the GEMM or, on Hopper, by
//! the GEMM itself.

use super::abi::{self, KlGemmStream, KlMat};
use super::context::OpContext;
use super::launch::Kernel;
use super::params::{NONE, bytes, k_of, operands};
use super::select::{ClusterMode, GemmOperands, Tile};
use crate::error::{Error, Result};
use crate::tensor::ALIGN;

/// An address for each matrix of each stream.
type Places = [[u64; abi::KL_GEMM_PARTS as usize]; abi::KL_STREAMS as usize];

/// The expansion kernel takes the matrices of all streams in one launch.
const _: () = assert!(abi::KL_EXPAND_MATRICES == abi::KL_GEMM_PARTS * abi::KL_STREAMS);

/// A matrix after its expansion to bf16, at this address. Its block scales are applied, its row scales are left to the GEMM.
pub fn in_bf16(w: &KlMat, to: u64) -> KlMat {
    let scales = if w.dtype == abi::KL_E2M1 { 0 } else { w.scales };
    KlMat { data: to, scales, stride: u64::from(w.cols), dtype: abi::KL_BF16, scale: 1.0, ..*w }
}

/// Where the quantized matrices of a mixed-input GEMM are expanded to. Zero for other matrices.
fn expanded_places(cx: &OpContext, stream: &[KlGemmStream]) -> Result<Places> {
    let (begin, room) = cx.memory.op_scratch();
    let (mut places, mut end) = (Places::default(), begin);
    for (places, s) in places.iter_mut().zip(stream) {
        for (to, w) in places.iter_mut().zip(&s.w).filter(|(_, w)| w.data != 0 && w.dtype != abi::KL_BF16) {
            *to = end;
            end += bytes(u64::from(w.rows) * u64::from(w.cols), abi::KL_BF16).next_multiple_of(ALIGN);
        }
    }
    if end - begin > room {
        return Err(Error::Op { op: "linear", what: format!("no room to expand weights to {} bytes", end - begin) });
    }
    Ok(places)
}

/// Expands the quantized matrices of a mixed-input GEMM before it, and makes `stream` point to the results.
pub fn expand(cx: &OpContext, stream: &mut [KlGemmStream]) -> Result<()> {
    if operands(&stream[0]) != GemmOperands::MixedInput {
        return Ok(());
    }
    let mut p = abi::KlExpand { w: [NONE; abi::KL_EXPAND_MATRICES as usize], to: [0; abi::KL_EXPAND_MATRICES as usize] };
    let (places, mut count, mut vectors) = (expanded_places(cx, stream)?, 0, 0);
    for (s, places) in stream.iter_mut().zip(places) {
        for (w, to) in s.w.iter_mut().zip(places).filter(|(_, to)| *to != 0) {
            (p.w[count], p.to[count]) = (*w, to);
            vectors = vectors.max(w.rows * (w.cols / abi::KL_EXPAND_VECTOR));
            count += 1;
            *w = in_bf16(w, to);
        }
    }
    let ctas = vectors.div_ceil(abi::KL_EXPAND_THREADS * abi::KL_EXPAND_BATCH);
    cx.kernels.launch(Kernel::Expand, [ctas, count as u32, 1], &p)
}

/// How a mixed-input GEMM itself expands its quantized matrices. In a wave it computes `wave` columns of cluster tiles.
pub fn expansion(cx: &OpContext, stream: &[KlGemmStream], tile: Tile, wave: u32) -> Result<abi::KlExpansion> {
    let Tile { block_n, block_k, operands, .. } = tile;
    let mut expansion = abi::KlExpansion { counters: 0, to: [[0; _]; _], units: 0, tiles: 0 };
    if operands != GemmOperands::MixedInput {
        return Ok(expansion);
    }
    expansion.to = expanded_places(cx, stream)?;
    if expansion.to.as_flattened().iter().all(|&to| to == 0) {
        return Ok(expansion);
    }
    let groups = k_of(stream).div_ceil(block_k).div_ceil(abi::KL_EXPANSION_GROUP);
    let tiles: u32 = stream.iter().flat_map(|s| &s.part).map(|part| part.tiles).sum();
    let needed = 4 * u64::from(abi::KL_EXPANSION_COUNTERS + tiles * groups);
    if needed > cx.memory.expansion_counter_bytes() {
        return Err(Error::Op { op: "linear", what: format!("weights of {tiles} column tiles are too large to expand") });
    }
    expansion.counters = cx.memory.expansion_counters();
    expansion.units = tiles * groups * 2 * (block_n / 2).div_ceil(abi::KL_EXPANSION_ROWS);
    let side_by_side = if tile.cluster == Some(ClusterMode::MulticastA) { abi::KL_SM90_CLUSTER } else { 1 };
    expansion.tiles = wave * side_by_side;
    Ok(expansion)
}
