//! Attention: on tensor cores where operands allow it, by the naive kernel elsewhere.

use super::abi::{self, KlAttentionSm90, KlMat};
use super::context::{KernelChoice, OpContext};
use super::launch::{Kernel, templates};
use super::params::{NO_MAP, NONE, box_cols, bytes, is_async_copyable, is_pair_aligned};
use super::select::{Schedule, persistent_stream_k};
use crate::backend::{KvSegment, Softmax};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};
use std::f32::consts::LOG2_E;

/// The attention kernels, the fastest first.
pub fn kernels() -> Vec<Kernel> {
    [
        templates::ATTENTION_FP8_SM90,
        templates::ATTENTION_BF16_SM90,
        templates::ATTENTION_WIDE_BF16_SM90,
        templates::ATTENTION_FP8_SM120,
        templates::ATTENTION_FP8_SM89,
        templates::ATTENTION_BF16_SM80,
        templates::ATTENTION_WIDE_BF16_SM80,
        &[Kernel::NaiveAttention],
    ]
    .concat()
}

/// Query heads that share a tile of causal attention, since they have the same keys. A prompt then gives about as many tiles as there are
/// SMs.
const PACKED_HEADS: u32 = 4;

/// The operands of [`Op::Attention`](crate::backend::Op::Attention) except `out` and `q`.
pub struct AttentionArgs<'a> {
    pub kv: &'a [KvSegment],
    pub head_dim: usize,
    pub causal: bool,
    pub softmax: Softmax,
}

impl AttentionArgs<'_> {
    /// Whether softmax needs no row maximum.
    fn is_max_free(&self) -> bool {
        self.softmax.is_max_free(self.kv.iter().map(|segment| segment.k.rows).sum())
    }
}

/// The KV segments without empty ones. Segments that are adjacent in memory become one.
fn merge_segments(kv: &[abi::KlKeyValues]) -> Vec<abi::KlKeyValues> {
    let follows = |a: &KlMat, b: &KlMat| {
        let end = a.data + bytes(u64::from(a.rows) * a.stride, a.dtype);
        end == b.data && a.stride == b.stride && a.dtype == b.dtype && a.scale.to_bits() == b.scale.to_bits()
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

/// Merges adjacent row ranges.
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

/// `softmax(q k^T) v` over all KV segments together. Outputs that are adjacent in memory count as one row range. The Hopper kernels store
/// two ranges in a launch, the others one.
pub fn attention(cx: &OpContext, op: &'static str, out: &[Tensor], q: Tensor, args: &AttentionArgs<'_>) -> Result<()> {
    let kv = key_values(cx, op, q, args)?;
    let mut first = 0;
    for ranges in merge_rows(out).chunks(abi::KL_SM90_ATTENTION_OUTS as usize) {
        let out = ranges.iter().map(|&range| cx.mat(range, op)).collect::<Result<Vec<_>>>()?;
        let rows = ranges.iter().map(|range| range.rows).sum::<usize>();
        let queries = cx.mat(q.rows(first..first + rows), op)?;
        if let Some(launch) = HopperLaunch::new(cx, &out, queries, &kv, args) {
            launch.run(cx, args)?;
            first += rows;
            continue;
        }
        for (&range, out) in ranges.iter().zip(out) {
            portable_attention(cx, out, cx.mat(q.rows(first..first + range.rows), op)?, &kv, args)?;
            first += range.rows;
        }
    }
    Ok(())
}

/// The KV segments as kernels take them. Queries, keys and values have one type, or queries and keys are e4m3.
fn key_values(cx: &OpContext, op: &'static str, q: Tensor, args: &AttentionArgs<'_>) -> Result<Vec<abi::KlKeyValues>> {
    let &AttentionArgs { kv, head_dim, .. } = args;
    let limits = kv.len() <= abi::KL_KV_SEGMENTS as usize && head_dim <= abi::KL_HEAD_DIM as usize;
    let values = kv[0].v.dtype;
    let types = !values.is_quantized() && (q.dtype == values || q.dtype == DType::E4m3);
    if !limits || !types || kv.iter().any(|s| s.k.dtype != q.dtype || s.v.dtype != values) {
        let (keys, count) = (kv[0].k.dtype, kv.len());
        let what = format!("{:?} by {keys:?} by {values:?}, {count} KV segments, heads of {head_dim}, or mixed types", q.dtype);
        return Err(Error::Op { op, what });
    }
    kv.iter().map(|s| Ok(abi::KlKeyValues { k: cx.mat(s.k, op)?, v: cx.mat(s.v, op)? })).collect()
}

/// Whether two CTAs of the portable attention fit on an SM. `shared` is the shared memory that one CTA may have, which is nearly all of the
/// SM's. The system takes 1 KiB for each CTA.
pub const fn has_two_attention_ctas(shared: u32) -> bool {
    const SYSTEM: u32 = 1 << 10;
    2 * (Kernel::AttentionBf16Sm80_4warps.shared() + SYSTEM) <= shared + SYSTEM
}

/// The portable kernel for bf16 heads of 128. An SM has eight warps, in two CTAs or in one.
const fn bf16_kernel(shared: u32, choice: KernelChoice) -> Kernel {
    match choice {
        KernelChoice::Only(kernel @ (Kernel::AttentionBf16Sm80_4warps | Kernel::AttentionBf16Sm80_8warps)) => kernel,
        _ if has_two_attention_ctas(shared) => Kernel::AttentionBf16Sm80_4warps,
        _ => Kernel::AttentionBf16Sm80_8warps,
    }
}

/// The `mma.sync` kernels for heads of 128 with e4m3 queries and keys, the fastest first.
const FP8_MAX_FREE: [Kernel; 2] = [Kernel::AttentionFp8Sm120MaxFree, Kernel::AttentionFp8Sm89MaxFree];
const FP8_ONLINE_SOFTMAX: [Kernel; 2] = [Kernel::AttentionFp8Sm120OnlineSoftmax, Kernel::AttentionFp8Sm89OnlineSoftmax];

/// The `mma.sync` kernels that compute attention with e4m3 queries and keys. `scales` has the product of query and key scale of each
/// segment. Products other than one scale the scores, which a max-free kernel would ignore.
fn fp8_kernels(scales: impl IntoIterator<Item = f32>, args: &AttentionArgs<'_>) -> &'static [Kernel] {
    match args.causal {
        true => &[],
        false if args.is_max_free() && scales.into_iter().all(|scale| scale == 1.0) => &FP8_MAX_FREE,
        false => &FP8_ONLINE_SOFTMAX,
    }
}

/// Attention of one row range by the kernels for every GPU, or for every GPU with FP8.
fn portable_attention(cx: &OpContext, out: KlMat, q: KlMat, kv: &[abi::KlKeyValues], args: &AttentionArgs<'_>) -> Result<()> {
    let &AttentionArgs { head_dim, causal, softmax, .. } = args;
    const ABSENT: abi::KlKeyValues = abi::KlKeyValues { k: NONE, v: NONE };
    let mut p = abi::KlAttention {
        out,
        q,
        kv: [ABSENT; abi::KL_KV_SEGMENTS as usize],
        saturated: cx.memory.saturated(),
        segments: kv.len() as u32,
        head_dim: head_dim as u32,
        group: q.cols / kv[0].k.cols,
        causal: u32::from(causal),
        scale: softmax.natural_scale(),
        unused: 0,
    };
    p.kv[..kv.len()].copy_from_slice(kv);
    let heads = q.cols / p.head_dim;
    let copyable = |m: &KlMat, dtype| m.rows == 0 || is_async_copyable(m, dtype);
    let copyable = copyable(&q, q.dtype) && kv.iter().all(|s| copyable(&s.k, q.dtype) && copyable(&s.v, abi::KL_BF16));
    if cx.choice != KernelChoice::Naive && copyable && is_pair_aligned(&out) {
        if head_dim == abi::KL_MMA_COLS as usize && [abi::KL_BF16, abi::KL_E4M3, abi::KL_E2M1].contains(&out.dtype) {
            let kernel = match q.dtype {
                abi::KL_E4M3 => {
                    let kernels = fp8_kernels(kv.iter().map(|s| q.scale * s.k.scale), args);
                    kernels.iter().copied().find(|&kernel| cx.kernels.has(kernel))
                }
                abi::KL_BF16 => Some(bf16_kernel(cx.shared, cx.choice)),
                _ => None,
            };
            if let Some(kernel) = kernel {
                return cx.kernels.launch(kernel, [q.rows.div_ceil(abi::KL_ATTENTION_BLOCK_Q), heads, 1], &p);
            }
        }
        let one_segment = kv.len() == 1 && p.kv[0].k.rows > 0;
        let bf16 = q.dtype == abi::KL_BF16 && out.dtype == abi::KL_BF16;
        if has_wide_head(args, q.cols, p.kv[0].k.cols) && one_segment && !causal && bf16 {
            let kernel = cx.largest_tile(templates::ATTENTION_WIDE_BF16_SM80, |[rows, _]| q.rows * heads / rows);
            return cx.kernels.launch(kernel, [q.rows.div_ceil(kernel.tile()[0]), heads, 1], &p);
        }
    }
    cx.kernels.launch(Kernel::NaiveAttention, [q.rows.div_ceil(abi::KL_ATTENTION_WARPS), heads, 1], &p)
}

/// A launch of a Hopper kernel.
struct HopperLaunch<'a> {
    kernel: Kernel,
    /// Whether the kernel is one for wide heads.
    wide: bool,
    out: &'a [KlMat],
    q: KlMat,
    segments: Vec<abi::KlKeyValues>,
    /// The factor that turns products of stored queries and keys into exponents of two.
    scale: f32,
}

impl<'a> HopperLaunch<'a> {
    /// The launch that computes these row ranges, if there is one. `None` unless the choice is `Best`: only portable kernels can be chosen
    /// by name.
    fn new(cx: &OpContext, out: &'a [KlMat], q: KlMat, kv: &[abi::KlKeyValues], args: &AttentionArgs<'_>) -> Option<Self> {
        let segments = merge_segments(kv);
        let (keys, dtype) = (segments.first()?.k, q.dtype);
        let copyable = is_async_copyable(&q, dtype)
            && segments.iter().all(|s| is_async_copyable(&s.k, dtype) && is_async_copyable(&s.v, abi::KL_BF16));
        let storable = |m: &KlMat| [abi::KL_BF16, abi::KL_E4M3].contains(&m.dtype) && is_async_copyable(m, m.dtype);
        let fits = cx.choice == KernelChoice::Best
            && segments.len() <= abi::KL_SM90_KV_SEGMENTS as usize
            // The kernel has one factor for all logits.
            && segments.iter().all(|s| s.k.scale.to_bits() == keys.scale.to_bits())
            && copyable
            && out.iter().all(storable);
        let operands = q.scale * keys.scale;
        let wide = has_wide_head(args, q.cols, keys.cols);
        let kernel = hopper_kernel(dtype, operands, args, wide).filter(|&kernel| fits && cx.kernels.has(kernel))?;
        // The wide-head kernels take one KV segment and store one row range, in bf16.
        let plain = out.len() == 1 && out[0].dtype == abi::KL_BF16;
        if wide && !(plain && segments.len() == 1) {
            return None;
        }
        Some(Self { kernel, wide, out, q, segments, scale: args.softmax.natural_scale() * operands * LOG2_E })
    }

    /// Launches persistent clusters. Stream-K divides the KV blocks of all query tiles among them.
    fn run(&self, cx: &OpContext, args: &AttentionArgs<'_>) -> Result<()> {
        let Self { kernel, wide, out, q, ref segments, scale } = *self;
        let (causal, cluster) = (args.causal, kernel.cluster());
        let group = q.cols / segments[0].k.cols;
        let pack = if causal && group.is_multiple_of(PACKED_HEADS) { PACKED_HEADS } else { 1 };
        let heads = q.cols / args.head_dim as u32;
        // Queries in the tile of a cluster, and keys in a KV block. With a wide head both CTAs of a cluster have the same queries, and V is
        // loaded in smaller boxes.
        let (block_q, block_kv) = match wide {
            true => (abi::KL_WIDE_SM90_BLOCK_Q, abi::KL_WIDE_SM90_BLOCK_KV),
            false => (abi::KL_SM90_BLOCK_Q / pack * cluster, abi::KL_SM90_BLOCK_KV),
        };
        let (k_rows, v_rows) = (block_kv / cluster, if wide { abi::KL_WIDE_SM90_V_ROWS } else { block_kv / cluster });
        let row_tiles = q.rows.div_ceil(block_q);
        let tiles = row_tiles * (heads / pack);
        let kv_blocks: u32 = segments.iter().map(|s| s.k.rows.div_ceil(block_kv)).sum();
        // With a causal mask every CTA computes one tile. There are few tiles, and each has as many KV blocks as it sees keys, so Stream-K
        // has no equal shares to give.
        let slots = if causal { tiles } else { (cx.sms / cluster).max(1) };
        let schedule = if causal { Schedule::data_parallel(tiles) } else { persistent_stream_k(tiles, kv_blocks, slots) };
        let map = |m: &KlMat, rows| cx.tensor_map(m, [box_cols(m.dtype), rows]);
        let mut p = KlAttentionSm90 {
            // Each consumer warpgroup loads its own rows.
            q: map(&q, abi::KL_TMA_WARPGROUP_ROWS / pack)?,
            k: [NO_MAP; abi::KL_SM90_KV_SEGMENTS as usize],
            v: [NO_MAP; abi::KL_SM90_KV_SEGMENTS as usize],
            out: [NONE; abi::KL_SM90_ATTENTION_OUTS as usize],
            schedule: cx.tile_schedule(schedule, tiles, kv_blocks),
            saturated: cx.memory.saturated(),
            keys: [0; abi::KL_SM90_KV_SEGMENTS as usize],
            row_tiles,
            group,
            pack,
            scale,
            unused: [0; _],
        };
        p.out[..out.len()].copy_from_slice(out);
        for (i, segment) in segments.iter().enumerate() {
            p.k[i] = map(&segment.k, k_rows)?;
            p.v[i] = map(&segment.v, v_rows)?;
            p.keys[i] = segment.k.rows;
        }
        cx.kernels.launch(kernel, [schedule.persistent_clusters(tiles, slots) * cluster, 1, 1], &p)
    }
}

/// Whether the wide-head kernels compute heads of this size, with this many columns of queries and keys in all. The head is as wide as the
/// kernel's, or it is the only one and narrower, with zeros for the missing columns.
const fn has_wide_head(args: &AttentionArgs<'_>, q_cols: u32, k_cols: u32) -> bool {
    let (head, wide) = (args.head_dim as u32, abi::KL_WIDE_HEAD);
    let single = q_cols == head && k_cols == head && head > abi::KL_MMA_COLS && head < wide && head.is_multiple_of(8);
    head == wide || single
}

/// The Hopper kernel for this type of queries and keys and this softmax, if there is one. `operands` is the product of their scales. The
/// max-free kernels take bounded scores that are exponents of two already.
fn hopper_kernel(dtype: u32, operands: f32, args: &AttentionArgs<'_>, wide: bool) -> Option<Kernel> {
    let (causal, max_free) = (args.causal, args.is_max_free() && operands == 1.0);
    if wide {
        let wide_enough = templates::ATTENTION_WIDE_BF16_SM90.iter().find(|kernel| args.head_dim <= kernel.tile()[1] as usize)?;
        return (dtype == abi::KL_BF16 && !causal).then_some(*wide_enough);
    }
    match dtype {
        _ if args.head_dim != abi::KL_MMA_COLS as usize => None,
        abi::KL_BF16 if causal => Some(Kernel::AttentionBf16Sm90Causal),
        abi::KL_BF16 if max_free => Some(Kernel::AttentionBf16Sm90MaxFree),
        abi::KL_BF16 => Some(Kernel::AttentionBf16Sm90OnlineSoftmax),
        abi::KL_E4M3 if causal => None,
        abi::KL_E4M3 if max_free => Some(Kernel::AttentionFp8Sm90MaxFree),
        abi::KL_E4M3 => Some(Kernel::AttentionFp8Sm90OnlineSoftmax),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kernel::*;

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
        // Keys of e4m3 have half the bytes. Only keys with the same scale are merged.
        let e4m3 = |data, scale| {
            let of = segment(4096, 10);
            abi::KlKeyValues { k: KlMat { data, dtype: abi::KL_E4M3, scale, ..of.k }, v: of.v }
        };
        let next = |k: abi::KlKeyValues| abi::KlKeyValues { v: KlMat { data: k.v.data + 10 * 512, ..k.v }, ..k };
        assert_eq!(merged(&[e4m3(4096, 0.5), next(e4m3(4096 + 10 * 256, 0.5))]), [(4096, 20, 20)]);
        assert_eq!(merged(&[e4m3(4096, 0.5), next(e4m3(4096 + 10 * 256, 0.25))]).len(), 2);
        assert_eq!(merged(&[e4m3(4096, 0.5), next(e4m3(second, 0.5))]).len(), 2);
    }

    #[test]
    fn an_sm_has_eight_warps_of_portable_attention() {
        let kernel = |shared| bf16_kernel(shared, KernelChoice::Best);
        // GeForce cards, A100, Hopper.
        assert_eq!(
            [101_376, 166_912, 232_448].map(kernel),
            [AttentionBf16Sm80_8warps, AttentionBf16Sm80_8warps, AttentionBf16Sm80_4warps]
        );
    }

    /// A max-free kernel multiplies scores by nothing, so a kernel with a running maximum has to apply the scales of queries and keys.
    #[test]
    fn no_kernel_ignores_a_scale() {
        let args = |causal, softmax| AttentionArgs { kv: &[], head_dim: 128, causal, softmax };
        let kernel = |dtype, scale, causal, softmax| hopper_kernel(dtype, scale, &args(causal, softmax), false);
        let (bounded, unbounded) = (Softmax::Base2 { bound: 100.0 }, Softmax::Base2 { bound: f32::INFINITY });
        assert_eq!(kernel(abi::KL_E4M3, 1.0, false, bounded), Some(AttentionFp8Sm90MaxFree));
        assert_eq!(kernel(abi::KL_E4M3, 0.5, false, bounded), Some(AttentionFp8Sm90OnlineSoftmax));
        assert_eq!(kernel(abi::KL_E4M3, 1.0, false, unbounded), Some(AttentionFp8Sm90OnlineSoftmax));
        assert_eq!(kernel(abi::KL_E4M3, 1.0, true, bounded), None);
        assert_eq!(kernel(abi::KL_BF16, 1.0, false, bounded), Some(AttentionBf16Sm90MaxFree));
        assert_eq!(kernel(abi::KL_BF16, 1.0, false, Softmax::Natural { scale: 0.1 }), Some(AttentionBf16Sm90OnlineSoftmax));
        assert_eq!(kernel(abi::KL_BF16, 1.0, true, bounded), Some(AttentionBf16Sm90Causal));
        assert_eq!(kernel(abi::KL_F32, 1.0, false, bounded), None);
        let other = |head_dim: usize| {
            let args = AttentionArgs { head_dim, ..args(false, bounded) };
            hopper_kernel(abi::KL_BF16, 1.0, &args, has_wide_head(&args, head_dim as u32, head_dim as u32))
        };
        let (narrow, wide) = (Some(AttentionWideBf16Sm90_128x384), Some(AttentionWideBf16Sm90_128x512));
        assert_eq!([64, 256, 384, 392, 512, 520].map(other), [None, narrow, narrow, wide, wide, None]);
        let portable = |scales: &[f32], causal, softmax| fp8_kernels(scales.iter().copied(), &args(causal, softmax));
        assert_eq!(portable(&[1.0, 1.0], false, bounded), FP8_MAX_FREE);
        assert_eq!(portable(&[1.0, 0.5], false, bounded), FP8_ONLINE_SOFTMAX);
        assert_eq!(portable(&[1.0], false, unbounded), FP8_ONLINE_SOFTMAX);
        assert!(portable(&[1.0], true, bounded).is_empty());
    }
}
