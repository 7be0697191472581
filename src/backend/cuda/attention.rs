//! Attention: on tensor cores where operands allow it, by the naive kernel elsewhere.

use super::abi::{self, KlAttentionSm90, KlMat};
use super::context::{Choice, OpContext};
use super::launch::Kernel;
use super::params::{NO_MAP, NONE, dtype_code, is_async_copyable, is_pair_aligned};
use super::select::{Schedule, persistent_stream_k};
use super::tiles::WIDE_ATTENTIONS;
use crate::backend::{KvSegment, Softmax};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};
use std::f32::consts::LOG2_E;

/// The kernels of attention, the fastest first.
pub fn kernels() -> Vec<Kernel> {
    let sm90 = [Kernel::AttentionSm90MaxFree, Kernel::AttentionSm90OnlineSoftmax, Kernel::AttentionSm90Causal];
    let wide = WIDE_ATTENTIONS.iter().map(|tile| tile.kernel);
    sm90.into_iter().chain([Kernel::AttentionMma]).chain(wide).chain([Kernel::NaiveAttention]).collect()
}

/// The largest bound of logits, as exponents of two, for which softmax subtracts no row maximum. Even if every logit is as large, 2^16
/// keys with values up to 2^11 stay within the range of f32, and the smallest exponentials are far from underflow.
const MAX_FREE_BOUND: f32 = 100.0;

/// Query heads with the same keys that share a tile of causal attention: then a prompt gives about as many tiles as there are SMs.
const PACKED_HEADS: u32 = 4;

/// What queries attend to, and how: the operands of [`Op::Attention`](crate::backend::Op::Attention) but `out` and `q`.
pub struct AttentionArgs<'a> {
    pub kv: &'a [KvSegment],
    pub head_dim: usize,
    pub causal: bool,
    pub softmax: Softmax,
}

/// The KV segments without the empty ones, where two that are adjacent in memory are one.
fn merge_segments(kv: &[abi::KlKeyValues]) -> Vec<abi::KlKeyValues> {
    let follows = |a: &KlMat, b: &KlMat| {
        let end = a.data + DType::Bf16.bytes((u64::from(a.rows) * a.stride) as usize) as u64;
        end == b.data && a.stride == b.stride && a.dtype == abi::KL_BF16 && b.dtype == abi::KL_BF16
    };
    let mut segments: Vec<abi::KlKeyValues> = Vec::new();
    for next in kv.iter().filter(|s| s.k.rows > 0) {
        match segments.last_mut() {
            Some(segment) if follows(&segment.k, &next.k) && follows(&segment.v, &next.v) => {
                segment.k.rows += next.k.rows;
                segment.v.rows += next.v.rows;
            }
            _ => segments.push(*next),
        }
    }
    segments
}

/// The Hopper kernel for a softmax. The max-free one takes scores that are exponents of two as they are, and bounded.
fn sm90_kernel(&AttentionArgs { causal, softmax, .. }: &AttentionArgs<'_>) -> Kernel {
    match softmax {
        _ if causal => Kernel::AttentionSm90Causal,
        Softmax::Base2 { bound } if bound <= MAX_FREE_BOUND => Kernel::AttentionSm90MaxFree,
        Softmax::Base2 { .. } | Softmax::Natural { .. } => Kernel::AttentionSm90OnlineSoftmax,
    }
}

/// Adjacent ranges of rows as one.
fn merge_rows(ranges: &[Tensor]) -> Vec<Tensor> {
    let mut merged: Vec<Tensor> = Vec::new();
    for &next in ranges.iter().filter(|range| range.rows > 0) {
        let follows = |last: &Tensor| {
            let end = last.offset + last.dtype.bytes(last.rows * last.stride) as u64;
            Tensor { offset: end, rows: next.rows, ..*last } == next
        };
        match merged.last_mut() {
            Some(last) if follows(last) => last.rows += next.rows,
            _ => merged.push(next),
        }
    }
    merged
}

/// `softmax(q k^T) v` over all KV segments together: one launch for outputs that are adjacent in memory, else one for each.
pub fn attention(cx: &OpContext, op: &'static str, out: &[Tensor], q: Tensor, args: &AttentionArgs<'_>) -> Result<()> {
    let mut first = 0;
    for out in merge_rows(out) {
        attend(cx, op, cx.mat(out, op)?, cx.mat(q.rows(first..first + out.rows), op)?, args)?;
        first += out.rows;
    }
    Ok(())
}

/// Attention of rows that are stored without a gap.
fn attend(cx: &OpContext, op: &'static str, out: KlMat, q: KlMat, args: &AttentionArgs<'_>) -> Result<()> {
    let &AttentionArgs { kv, head_dim, causal, softmax } = args;
    let limits = kv.len() <= abi::KL_KV_SEGMENTS as usize && head_dim <= abi::KL_HEAD_DIM as usize;
    if !limits || kv.iter().any(|s| s.k.dtype != s.v.dtype || dtype_code(s.k.dtype) != q.dtype) {
        let what = format!("{} KV segments, heads of {head_dim}, or mixed types", kv.len());
        return Err(Error::Op { op, what });
    }
    const ABSENT: abi::KlKeyValues = abi::KlKeyValues { k: NONE, v: NONE };
    let mut p = abi::KlAttention {
        out,
        q,
        kv: [ABSENT; abi::KL_KV_SEGMENTS as usize],
        saturated: cx.memory.saturated(),
        segments: kv.len() as u32,
        head_dim: head_dim as u32,
        group: (q.cols as usize / kv[0].k.cols) as u32,
        causal: u32::from(causal),
        scale: softmax.natural_scale(),
        unused: 0,
    };
    for (to, s) in p.kv.iter_mut().zip(kv) {
        *to = abi::KlKeyValues { k: cx.mat(s.k, op)?, v: cx.mat(s.v, op)? };
    }
    let heads = q.cols / p.head_dim;
    let segments = &p.kv[..kv.len()];
    let mut operands = [q].into_iter().chain(segments.iter().flat_map(|s| [s.k, s.v]));
    let copyable = operands.all(|m| m.rows == 0 || is_async_copyable(&m, abi::KL_BF16));
    let storable = out.dtype == abi::KL_BF16 && is_pair_aligned(&out);
    if cx.choice != Choice::Naive && copyable && storable {
        if head_dim == 128 {
            let segments = merge_segments(segments);
            // A tile that is asked for is one of the portable kernels.
            let kernel = sm90_kernel(args);
            let sm90 = cx.choice == Choice::Best
                && segments.len() <= abi::KL_SM90_KV_SEGMENTS as usize
                && is_async_copyable(&out, abi::KL_BF16);
            if sm90 && cx.kernels.has(kernel) {
                return attention_sm90(cx, kernel, &p, &segments);
            }
            return cx.kernels.launch(Kernel::AttentionMma, [q.rows.div_ceil(abi::KL_ATTENTION_BLOCK_Q), heads, 1], &p);
        }
        if head_dim == abi::KL_WIDE_HEAD as usize && kv.len() == 1 && !causal && p.kv[0].k.rows > 0 {
            let tile = cx.largest_tile(WIDE_ATTENTIONS, |tile| tile.kernel, |tile| q.rows * heads / tile.block_q);
            return cx.kernels.launch(tile.kernel, [q.rows.div_ceil(tile.block_q), heads, 1], &p);
        }
    }
    cx.kernels.launch(Kernel::NaiveAttention, [q.rows.div_ceil(abi::KL_ATTENTION_WARPS), heads, 1], &p)
}

/// Launches a Hopper kernel: persistent clusters, among which Stream-K divides the KV blocks of all tiles of queries.
fn attention_sm90(cx: &OpContext, kernel: Kernel, of: &abi::KlAttention, segments: &[abi::KlKeyValues]) -> Result<()> {
    let (causal, cluster) = (of.causal != 0, kernel.cluster());
    let pack = if causal && of.group.is_multiple_of(PACKED_HEADS) { PACKED_HEADS } else { 1 };
    let (rows, heads) = (abi::KL_SM90_BLOCK_Q / pack, of.q.cols / of.head_dim);
    let row_tiles = of.q.rows.div_ceil(rows * cluster);
    let tiles = row_tiles * (heads / pack);
    let kv_blocks: u32 = segments.iter().map(|s| s.k.rows.div_ceil(abi::KL_SM90_BLOCK_KV)).sum();
    // With a causal mask every CTA computes one tile. There are few of them, and each has as many KV blocks as it sees keys, so
    // Stream-K has nothing equal to divide.
    let slots = if causal { tiles } else { (cx.sms / cluster).max(1) };
    let schedule = if causal { Schedule::data_parallel(tiles) } else { persistent_stream_k(tiles, kv_blocks, slots) };
    let mut p = KlAttentionSm90 {
        // Each consumer warpgroup has rows of its own.
        q: cx.tensor_map(&of.q, [abi::KL_SM90_BOX_COLS, abi::KL_SM90_WARPGROUP_ROWS / pack])?,
        k: [NO_MAP; abi::KL_SM90_KV_SEGMENTS as usize],
        v: [NO_MAP; abi::KL_SM90_KV_SEGMENTS as usize],
        out: [of.out, NONE],
        schedule: cx.tile_schedule(schedule, tiles, kv_blocks),
        saturated: cx.memory.saturated(),
        keys: [0; abi::KL_SM90_KV_SEGMENTS as usize],
        row_tiles,
        group: of.group,
        pack,
        scale: of.scale * LOG2_E,
        unused: [0; 13],
    };
    let kv_box = [abi::KL_SM90_BOX_COLS, abi::KL_SM90_BLOCK_KV / cluster];
    for (i, segment) in segments.iter().enumerate() {
        p.k[i] = cx.tensor_map(&segment.k, kv_box)?;
        p.v[i] = cx.tensor_map(&segment.v, kv_box)?;
        p.keys[i] = segment.k.rows;
    }
    cx.kernels.launch(kernel, [schedule.persistent_clusters(tiles, slots) * cluster, 1, 1], &p)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(data: u64, rows: u32) -> abi::KlKeyValues {
        let m = KlMat { data, stride: 256, rows, cols: 256, dtype: abi::KL_BF16, ..NONE };
        abi::KlKeyValues { k: m, v: KlMat { data: data + (1 << 30), ..m } }
    }

    #[test]
    fn adjacent_segments_are_merged() {
        let merged =
            |kv: &[abi::KlKeyValues]| merge_segments(kv).iter().map(|s| (s.k.data, s.k.rows, s.v.rows)).collect::<Vec<_>>();
        let second = 4096 + 10 * 512;
        assert_eq!(merged(&[segment(4096, 10), segment(second, 3)]), [(4096, 13, 13)]);
        assert_eq!(merged(&[segment(4096, 10), segment(9, 0), segment(second, 3)]), [(4096, 13, 13)]);
        assert_eq!(merged(&[segment(4096, 10), segment(second + 512, 3)]), [(4096, 10, 10), (second + 512, 3, 3)]);
        // The keys are adjacent, the values are not.
        let mut apart = segment(second, 3);
        apart.v.data += 512;
        assert_eq!(merged(&[segment(4096, 10), apart]).len(), 2);
    }
}
