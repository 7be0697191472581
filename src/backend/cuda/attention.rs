//! Attention: on tensor cores where operands allow it, by the naive kernel elsewhere.

use super::abi::{self, KlAttentionSm90, KlMat};
use super::gemm::{NO_MAP, aligned};
use super::launch::Kernel;
use super::ops::{NONE, dtype, in_words};
use super::tile::{Deal, deal_to_clusters};
use super::{Choice, Cuda};
use crate::backend::KeyValues;
use crate::error::{Error, Result};
use crate::tensor::DType;
use std::f32::consts::LOG2_E;

/// Exponents of two up to which no maximum is needed: even if every score is as large, there is room for 2^16 keys and values up to
/// 2^11 before a sum leaves the range of f32; the smallest powers are far from vanishing.
const LARGEST_POWER: f32 = 100.0;

/// Heads that share keys and lie in one tile, where there is a mask: then a prompt is about as many tiles as there are multiprocessors.
const PACKED: u32 = 4;

/// What is attended to, and how.
pub struct Attended<'a> {
    pub kv: &'a [KeyValues],
    pub head_dim: usize,
    pub causal: bool,
    pub scale: f32,
    pub bound: f32,
}

/// Runs of keys without the empty ones, and one for two where the second begins at the end of the first.
fn joined(kv: &[abi::KlKeyValues]) -> Vec<abi::KlKeyValues> {
    let follows = |a: &KlMat, b: &KlMat| {
        let end = a.data + u64::from(a.rows) * a.stride * DType::Bf16.size() as u64;
        end == b.data && a.stride == b.stride && a.dtype == abi::KL_BF16 && b.dtype == abi::KL_BF16
    };
    let mut runs: Vec<abi::KlKeyValues> = Vec::new();
    for next in kv.iter().filter(|s| s.k.rows > 0) {
        match runs.last_mut() {
            Some(run) if follows(&run.k, &next.k) && follows(&run.v, &next.v) => {
                run.k.rows += next.k.rows;
                run.v.rows += next.v.rows;
            }
            _ => runs.push(*next),
        }
    }
    runs
}

impl Cuda {
    pub(super) fn attention(&self, op: &'static str, out: KlMat, q: KlMat, what: &Attended<'_>) -> Result<()> {
        let &Attended { kv, head_dim, causal, .. } = what;
        let limits = kv.len() <= abi::KL_KV_SEGMENTS as usize && head_dim <= abi::KL_HEAD_DIM as usize;
        if !limits || kv.iter().any(|s| s.k.dtype != s.v.dtype || dtype(s.k.dtype) != q.dtype) {
            let what = format!("{} runs of keys, heads of {head_dim}, or mixed types", kv.len());
            return Err(Error::Op { op, what });
        }
        const ABSENT: abi::KlKeyValues = abi::KlKeyValues { k: NONE, v: NONE };
        let mut p = abi::KlAttention {
            out,
            q,
            kv: [ABSENT; abi::KL_KV_SEGMENTS as usize],
            segments: kv.len() as u32,
            head_dim: head_dim as u32,
            group: (q.cols as usize / kv[0].k.cols) as u32,
            causal: u32::from(causal),
            scale: what.scale,
            unused: 0,
        };
        for (to, s) in p.kv.iter_mut().zip(kv) {
            *to = abi::KlKeyValues { k: self.mat(s.k, op)?, v: self.mat(s.v, op)? };
        }
        let heads = q.cols / p.head_dim;
        let copied =
            [p.q].into_iter().chain(p.kv[..kv.len()].iter().flat_map(|s| [s.k, s.v])).all(|m| m.rows == 0 || aligned(&m));
        let paired = p.out.dtype == abi::KL_BF16 && in_words(&p.out);
        if self.choice != Choice::Naive && copied && paired {
            if head_dim == 128 {
                let runs = joined(&p.kv[..kv.len()]);
                // Tiles that are asked for are those of the portable kernels.
                if self.choice == Choice::Best && runs.len() <= abi::KL_SM90_KV_SEGMENTS as usize && aligned(&p.out) {
                    let exponents = (what.scale * LOG2_E - 1.0).abs() <= f32::EPSILON;
                    let kernel = match (causal, exponents && what.bound * LOG2_E <= LARGEST_POWER) {
                        (true, _) => Kernel::AttentionSm90Causal,
                        (false, true) => Kernel::AttentionSm90,
                        (false, false) => Kernel::AttentionSm90Running,
                    };
                    if self.kernels.has(kernel) {
                        return self.attention_on_hopper(kernel, &p, &runs);
                    }
                }
                return self.kernels.launch(Kernel::AttentionMma, [q.rows.div_ceil(abi::KL_ATTENTION_BLOCK_Q), heads, 1], &p);
            }
            if head_dim == abi::KL_WIDE_HEAD as usize && kv.len() == 1 && !causal && p.kv[0].k.rows > 0 {
                let large = self.takes_large(Kernel::AttentionWide64, q.rows * heads / 64);
                let (kernel, queries) = if large { (Kernel::AttentionWide64, 64) } else { (Kernel::AttentionWide32, 32) };
                return self.kernels.launch(kernel, [q.rows.div_ceil(queries), heads, 1], &p);
            }
        }
        self.kernels.launch(Kernel::NaiveAttention, [q.rows.div_ceil(abi::KL_ATTENTION_WARPS), heads, 1], &p)
    }

    fn attention_on_hopper(&self, kernel: Kernel, of: &abi::KlAttention, runs: &[abi::KlKeyValues]) -> Result<()> {
        let causal = of.causal != 0;
        let cluster = if causal { 1 } else { abi::KL_SM90_CLUSTER };
        let pack = if causal && of.group.is_multiple_of(PACKED) { PACKED } else { 1 };
        let (rows, heads) = (abi::KL_SM90_BLOCK_Q / pack, of.q.cols / of.head_dim);
        let row_tiles = of.q.rows.div_ceil(rows * cluster);
        let tiles = row_tiles * (heads / pack);
        let rounds: u32 = runs.iter().map(|s| s.k.rows.div_ceil(abi::KL_SM90_BLOCK_KV)).sum();
        // With a mask every block has one tile; there are few. They have as many rounds as they see keys, so there is nothing to share.
        let slots = if causal { tiles } else { (self.device().multiprocessors / cluster).max(1) };
        let deal = if causal { Deal { whole: tiles, workers: 0 } } else { deal_to_clusters(tiles, rounds, slots) };
        let mut p = KlAttentionSm90 {
            // Each of two warpgroups has rows of its own.
            q: self.box_map(&of.q, [64, rows / 2])?,
            k: [NO_MAP; abi::KL_SM90_KV_SEGMENTS as usize],
            v: [NO_MAP; abi::KL_SM90_KV_SEGMENTS as usize],
            out: of.out,
            schedule: self.dealt(deal, tiles, rounds),
            keys: [0; abi::KL_SM90_KV_SEGMENTS as usize],
            row_tiles,
            group: of.group,
            pack,
            scale: of.scale * LOG2_E,
            unused: [0; 2],
        };
        for (i, run) in runs.iter().enumerate() {
            p.k[i] = self.box_map(&run.k, [64, abi::KL_SM90_BLOCK_KV / cluster])?;
            p.v[i] = self.box_map(&run.v, [64, abi::KL_SM90_BLOCK_KV / cluster])?;
            p.keys[i] = run.k.rows;
        }
        self.kernels.launch(kernel, [deal.clusters(tiles, slots) * cluster, 1, 1], &p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(data: u64, rows: u32) -> abi::KlKeyValues {
        let m = KlMat { data, stride: 256, rows, cols: 256, dtype: abi::KL_BF16, ..NONE };
        abi::KlKeyValues { k: m, v: KlMat { data: data + (1 << 30), ..m } }
    }

    #[test]
    fn runs_that_follow_each_other_are_one() {
        let rows = |kv: &[abi::KlKeyValues]| joined(kv).iter().map(|s| (s.k.data, s.k.rows, s.v.rows)).collect::<Vec<_>>();
        let second = 4096 + 10 * 512;
        assert_eq!(rows(&[run(4096, 10), run(second, 3)]), [(4096, 13, 13)]);
        assert_eq!(rows(&[run(4096, 10), run(9, 0), run(second, 3)]), [(4096, 13, 13)]);
        assert_eq!(rows(&[run(4096, 10), run(second + 512, 3)]), [(4096, 10, 10), (second + 512, 3, 3)]);
        // Keys that follow, values that do not.
        let mut apart = run(second, 3);
        apart.v.data += 512;
        assert_eq!(rows(&[run(4096, 10), apart]).len(), 2);
    }
}
