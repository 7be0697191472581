//! GEMMs `out = epilogue(x W^T + b)`: on tensor cores where operands allow it, by the naive kernel elsewhere.
//!
//! A launch computes up to two GEMMs, those of the two streams of a double block. Each may have several parts: ranges of the weight's
//! rows whose results go to different outputs through different epilogues, as in the fused projection of queries, keys, values and MLP.

use super::abi::{self, KlGemmPart, KlGemmStream, KlMat, KlTensorMap};
use super::context::{Choice, OpContext};
use super::launch::Kernel;
use super::norm::{QkHeads, qk_norm_rope, rope_code};
use super::params::{NO_MAP, NONE, is_async_copyable, naive_grid};
use super::select::{ClusterMode, GemmShape, GroupedGemm, Tile, TileConfig, group_m};
use crate::backend::{Linear, Projection};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// The kernels of a GEMM with one part, the fastest first.
pub fn kernels() -> Vec<Kernel> {
    Tile::ALL.iter().map(|tile| tile.config().kernel).chain([Kernel::NaiveGemm]).collect()
}

/// The kernels of the fused projection, which needs tiles of whole heads.
pub fn projection_kernels() -> Vec<Kernel> {
    let tiles = Tile::ALL.iter().map(|tile| tile.config()).filter(TileConfig::has_whole_heads);
    tiles.map(|tile| tile.kernel).chain([Kernel::NaiveGemm, Kernel::QkNormRope]).collect()
}

/// A GEMM whose columns all have one epilogue.
pub struct EpilogueGemm {
    pub out: Tensor,
    pub x: Tensor,
    pub w: Linear,
    pub epilogue: u32,
    pub gate: Option<Tensor>,
}

const NO_PART: KlGemmPart = KlGemmPart { out: NONE, extra: NONE, epilogue: 0, first_row: 0, tiles: 0, scale: 1.0 };

const NO_MAPS: [KlTensorMap; abi::KL_STREAMS as usize] = [NO_MAP; abi::KL_STREAMS as usize];

const NO_STREAM: KlGemmStream = KlGemmStream {
    x: NONE,
    w: NONE,
    bias: NONE,
    table: NONE,
    part: [NO_PART; abi::KL_GEMM_PARTS as usize],
    row_tiles: 0,
    col_tiles: 0,
    rope: 0,
    eps: 0.0,
};

/// Rows of the weight that a part takes.
fn weight_rows(part: &KlGemmPart) -> u32 {
    if part.epilogue == abi::KL_SWIGLU { 2 * part.out.cols } else { part.out.cols }
}

/// Columns of the boxes in which the Hopper kernel stores a tile of so many columns: the largest power of two that divides them, up to
/// what a box can have.
const fn store_cols(cols: u32) -> u32 {
    1 << (cols | abi::KL_SM90_BOX_COLS).trailing_zeros()
}

/// Whether the Hopper kernel can compute a stream with this tile: results in bf16 that TMA can store, and whole heads.
fn fits_sm90(stream: &KlGemmStream, tile: TileConfig) -> bool {
    let in_pairs = |m: &KlMat| m.data == 0 || m.dtype == abi::KL_BF16 && m.data.is_multiple_of(4);
    stream.part.iter().filter(|part| part.out.data != 0).all(|part| {
        let fits = match part.epilogue {
            abi::KL_QK_NORM_ROPE => tile.has_whole_heads(),
            // Half of a tile's columns are stored, at least sixteen at a time.
            abi::KL_SWIGLU => tile.block_n.is_multiple_of(32),
            abi::KL_GATE_RESIDUAL => in_pairs(&part.extra),
            _ => true,
        };
        fits && is_async_copyable(&part.out)
    })
}

/// Takes as many streams to a launch as a kernel does: on tensor cores where `stream` has the parameters of all of them, else by
/// `fallback`.
fn in_launches<T>(
    cx: &OpContext,
    all: &[T],
    stream: impl Fn(&T) -> Result<Option<KlGemmStream>>,
    fallback: impl Fn(&[T]) -> Result<()>,
) -> Result<()> {
    for group in all.chunks(abi::KL_STREAMS as usize) {
        let streams = group.iter().map(&stream).collect::<Result<Option<Vec<_>>>>()?;
        match streams {
            Some(streams) => launch(cx, &streams)?,
            None => fallback(group)?,
        }
    }
    Ok(())
}

/// GEMMs with one part each.
pub fn linear(cx: &OpContext, op: &'static str, gemms: impl Iterator<Item = EpilogueGemm>) -> Result<()> {
    let naive = |group: &[EpilogueGemm]| group.iter().try_for_each(|gemm| naive_gemm(cx, op, gemm));
    in_launches(cx, &gemms.collect::<Vec<_>>(), |gemm| linear_stream(cx, op, gemm), naive)
}

/// The weight of a layer: one matrix, without a term of low rank. There are no kernels for others.
fn weight(cx: &OpContext, op: &'static str, layer: &Linear) -> Result<KlMat> {
    match (layer.weight.single(), layer.low_rank) {
        (Some(weight), None) => cx.mat(weight, op),
        _ => Err(Error::Op { op, what: format!("{layer:?} cannot be multiplied on the GPU") }),
    }
}

/// The parameters of a GEMM on tensor cores, if its operands allow it.
fn linear_stream(cx: &OpContext, op: &'static str, gemm: &EpilogueGemm) -> Result<Option<KlGemmStream>> {
    let (x, w) = (cx.mat(gemm.x, op)?, weight(cx, op, &gemm.w)?);
    let storable = matches!(gemm.out.dtype, DType::Bf16 | DType::F32);
    if cx.choice == Choice::Naive || !is_async_copyable(&x) || !is_async_copyable(&w) || !storable {
        return Ok(None);
    }
    let mut stream = KlGemmStream { x, w, bias: cx.mat_if(gemm.w.bias, op)?, ..NO_STREAM };
    let (out, extra) = (cx.mat(gemm.out, op)?, cx.mat_if(gemm.gate, op)?);
    stream.part[0] = KlGemmPart { out, extra, epilogue: gemm.epilogue, ..NO_PART };
    Ok(Some(stream))
}

fn naive_gemm(cx: &OpContext, op: &'static str, gemm: &EpilogueGemm) -> Result<()> {
    let p = abi::KlNaiveGemm {
        out: cx.mat(gemm.out, op)?,
        x: cx.mat(gemm.x, op)?,
        w: weight(cx, op, &gemm.w)?,
        bias: cx.mat_if(gemm.w.bias, op)?,
        gate: cx.mat_if(gemm.gate, op)?,
        epilogue: gemm.epilogue,
        unused: 0,
    };
    cx.kernels.launch(Kernel::NaiveGemm, naive_grid(&p.out), &p)
}

/// Selects a tile and a schedule for a grouped GEMM on tensor cores, and launches it.
fn launch(cx: &OpContext, streams: &[KlGemmStream]) -> Result<()> {
    let shape = |s: &KlGemmStream| GemmShape { m: s.x.rows, parts: s.part.iter().map(weight_rows).collect() };
    let shapes: Vec<GemmShape> = streams.iter().map(shape).collect();
    let k = streams.iter().map(|s| s.x.cols).max().unwrap_or(0);
    let same_k = streams.iter().all(|s| s.x.cols == k);
    let fits = |tile: Tile| {
        // A single k-block cannot be split.
        let divisible = !tile.is_split_k() || k > tile.config().block_k;
        let sm90 = same_k && divisible && streams.iter().all(|s| fits_sm90(s, tile.config()));
        (!tile.is_sm90() || sm90) && cx.kernels.has(tile.config().kernel)
    };
    let gemm = GroupedGemm { shapes: &shapes, k, same_k };
    let plan = match cx.choice {
        Choice::Tile(tile) if fits(tile) => gemm.forced(tile, cx.sms),
        _ => gemm.plan(cx.sms, fits),
    };
    let TileConfig { block_m, block_n, block_k, kernel, cluster, .. } = plan.tile.config();
    let mut stream = [NO_STREAM; abi::KL_STREAMS as usize];
    for (to, s) in stream.iter_mut().zip(streams) {
        *to = *s;
        to.part.iter_mut().for_each(|part| part.tiles = weight_rows(part).div_ceil(block_n));
        let col_tiles = to.part.iter().map(|part| part.tiles).sum();
        (to.row_tiles, to.col_tiles) = plan.tile.tile_counts(s.x.rows, col_tiles);
    }
    let tiles: u32 = stream.iter().map(|s| s.row_tiles * s.col_tiles).sum();
    let schedule = cx.tile_schedule(plan.schedule, tiles, k.div_ceil(block_k));
    let Some(mode) = cluster else {
        let ctas = plan.schedule.full_tiles + plan.schedule.workers;
        return cx.kernels.launch(kernel, [ctas, 1, 1], &abi::KlGemm { stream, schedule });
    };
    let group = stream.map(|s| group_m(plan.tile, s.row_tiles, s.col_tiles, cx.sms));
    let (x, w, out, unused) = (NO_MAPS, NO_MAPS, [[NO_MAP; abi::KL_GEMM_PARTS as usize]; abi::KL_STREAMS as usize], [0; 7]);
    let mut p = abi::KlGemmSm90 { x, w, out, residual: NO_MAPS, stream, group, schedule, unused };
    // Each CTA of a cluster loads one half of what it multicasts. B is loaded in halves in any case.
    let a_rows = if mode == ClusterMode::MulticastA { block_m / abi::KL_SM90_CLUSTER } else { block_m };
    for (i, s) in stream.iter().enumerate().take(streams.len()) {
        p.x[i] = cx.tensor_map(&s.x, [block_k, a_rows])?;
        p.w[i] = cx.tensor_map(&s.w, [block_k, block_n / 2])?;
        if s.part[0].epilogue == abi::KL_GATE_RESIDUAL {
            p.residual[i] = cx.tensor_map(&s.part[0].out, [abi::KL_SM90_BOX_COLS, plan.tile.warpgroup_rows()])?;
        }
        for (map, part) in p.out[i].iter_mut().zip(&s.part).filter(|(_, part)| part.out.data != 0) {
            let cols = if part.epilogue == abi::KL_SWIGLU { block_n / 2 } else { block_n };
            *map = cx.tensor_map(&part.out, [store_cols(cols), abi::KL_SM90_STORE_ROWS])?;
        }
    }
    // Clusters of split-K are not persistent: each computes one tile.
    let slots = if plan.tile.is_split_k() { tiles } else { plan.tile.slots(cx.sms) };
    cx.kernels.launch(kernel, [plan.schedule.persistent_clusters(tiles, slots) * abi::KL_SM90_CLUSTER, 1, 1], &p)
}

/// The fused projection of attention inputs. On tensor cores it is one launch, whose epilogue normalises and rotates queries and keys
/// before they are stored; elsewhere it is one GEMM for each output and a pass over the heads.
pub fn projection(cx: &OpContext, op: &'static str, streams: &[Projection<'_>]) -> Result<()> {
    in_launches(cx, streams, |s| projection_stream(cx, op, s), |group| projection_in_passes(cx, op, group))
}

/// The parameters of a fused projection on tensor cores, if its operands allow it.
fn projection_stream(cx: &OpContext, op: &'static str, s: &Projection<'_>) -> Result<Option<KlGemmStream>> {
    let (x, w) = (cx.mat(s.x, op)?, weight(cx, op, s.w)?);
    let outs = [s.q, Some(s.k), Some(s.v), s.mlp];
    let storable = outs.iter().flatten().all(|t| t.dtype == DType::Bf16);
    let whole_heads = s.rope.table.cols == abi::KL_MMA_COLS as usize;
    // The epilogue of tensor-core kernels always normalises.
    let Some(norm) = s.norm else { return Ok(None) };
    if cx.choice == Choice::Naive || !is_async_copyable(&x) || !is_async_copyable(&w) || !storable || !whole_heads {
        return Ok(None);
    }
    let (table, rope) = (cx.mat(s.rope.table, op)?, rope_code(s.rope.style));
    let mut stream = KlGemmStream { x, w, table, rope, eps: norm.eps, ..NO_STREAM };
    let (mut first_row, mut parts) = (0, stream.part.iter_mut());
    let epilogues = [
        (abi::KL_QK_NORM_ROPE, Some(norm.q), s.q_scale),
        (abi::KL_QK_NORM_ROPE, Some(norm.k), s.k_scale),
        (abi::KL_STORE, None, 1.0),
        (abi::KL_SWIGLU, None, 1.0),
    ];
    for (out, (epilogue, norm, scale)) in outs.into_iter().zip(epilogues) {
        let (Some(out), Some(part)) = (out, out.and_then(|_| parts.next())) else { continue };
        let (out, extra) = (cx.mat(out, op)?, cx.mat_if(norm, op)?);
        *part = KlGemmPart { out, extra, epilogue, first_row, scale, ..NO_PART };
        first_row += weight_rows(part);
    }
    Ok(Some(stream))
}

/// The projection by naive GEMMs, then the norm and rotation of queries and keys in place: in bf16 these are rounded once more.
fn projection_in_passes(cx: &OpContext, op: &'static str, streams: &[Projection<'_>]) -> Result<()> {
    let mut heads = Vec::new();
    for s in streams {
        let mut first = 0;
        let (q_norm, k_norm) = (s.norm.map(|norm| norm.q), s.norm.map(|norm| norm.k));
        let outs = [(s.q, Some((q_norm, s.q_scale))), (Some(s.k), Some((k_norm, s.k_scale))), (Some(s.v), None)];
        for (out, head) in outs {
            let Some(out) = out else { continue };
            let w = s.w.rows(first..first + out.cols);
            naive_gemm(cx, op, &EpilogueGemm { out, x: s.x, w, epilogue: abi::KL_STORE, gate: None })?;
            first += out.cols;
            if let Some((weight, scale)) = head {
                let (x, weight, table) = (cx.mat(out, op)?, cx.mat_if(weight, op)?, cx.mat(s.rope.table, op)?);
                heads.push(QkHeads {
                    heads: abi::KlQkHeads { x, weight, table, scale, unused: 0 },
                    head_dim: s.rope.table.cols,
                    style: s.rope.style,
                    eps: s.norm.map_or(0.0, |norm| norm.eps),
                });
            }
        }
        if let Some(out) = s.mlp {
            let w = s.w.rows(first..s.w.weight.rows());
            naive_gemm(cx, op, &EpilogueGemm { out, x: s.x, w, epilogue: abi::KL_SWIGLU, gate: None })?;
        }
    }
    qk_norm_rope(cx, op, &heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_divide_a_tile() {
        assert_eq!([256, 192, 160, 208, 96, 80].map(store_cols), [64, 64, 32, 16, 32, 16]);
    }
}
