//! GEMMs `out = epilogue(x W^T + b)`: on tensor cores where operands allow it, by the naive kernel elsewhere.
//!
//! A launch computes up to two GEMMs, one for each stream of a double block. Each may have several parts: ranges of weight rows whose
//! results go to different outputs through different epilogues, as in the fused projection of queries, keys, values and MLP.

use super::abi::{self, KlGemmRows, KlGemmStream, KlMat, KlOutputRange, KlTensorMap};
use super::arch::Arch;
use super::context::{KernelChoice, OpContext};
use super::expansion::{expand, expansion, in_bf16};
use super::launch::Kernel;
use super::lora::{self, LoraMats};
use super::norm::{QkHeads, qk_norm_rope, rope_code};
use super::params::{NO_MAP, NONE, box_cols, is_async_copyable, k_of, naive_grid, operands};
use super::select::{ClusterMode, GemmOperands, GemmPlan, GemmShape, GroupedGemm, Tile, group_m};
use crate::backend::{Linear, Projection};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// All tiles except the convolution tiles.
fn gemm_tiles() -> impl Iterator<Item = &'static Tile> {
    Tile::ALL.iter().filter(|tile| tile.operands != GemmOperands::Conv3x3)
}

/// The kernels of a GEMM with one part, the fastest first.
pub fn kernels() -> Vec<Kernel> {
    gemm_tiles().map(|tile| tile.kernel).chain([Kernel::Expand]).chain(lora::kernels()).collect()
}

/// The kernels of the fused projection, which needs tiles of whole heads.
pub fn projection_kernels() -> Vec<Kernel> {
    let tiles = gemm_tiles().filter(|tile| tile.has_whole_heads());
    tiles.map(|tile| tile.kernel).chain([Kernel::Expand, Kernel::QkNormRope]).chain(lora::kernels()).collect()
}

/// A GEMM whose columns all have one epilogue.
pub struct EpilogueGemm {
    pub out: Tensor,
    pub x: Tensor,
    pub w: Linear,
    pub epilogue: u32,
    pub gate: Option<Tensor>,
}

impl EpilogueGemm {
    /// Splits a GEMM with a residual into one for each matrix of the weight: kernels read the residual through one tensor map.
    fn by_residual(self, lora: LoraMats) -> Vec<(Self, LoraMats)> {
        let Self { out, x, w, epilogue, gate } = self;
        let parts = w.weight.parts();
        if epilogue != abi::KL_GATE_RESIDUAL || parts.len() == 1 {
            return vec![(self, lora)];
        }
        let mut first = 0;
        let of_rows = |part: &Tensor| {
            let rows = first..first + part.rows;
            first = rows.end;
            let gate = gate.map(|gate| gate.cols(rows.clone()));
            let gemm = Self { out: out.cols(rows.clone()), x, w: w.rows(rows.clone()), epilogue, gate };
            (gemm, LoraMats { up: lora.up_from(rows.start), ..lora })
        };
        parts.iter().map(of_rows).collect()
    }

    /// All columns, as one part.
    fn part(&self) -> OutputRange {
        OutputRange { out: self.out, epilogue: self.epilogue, extra: self.gate, scale: 1.0, rows: 0..self.out.cols }
    }
}

pub const NO_ROWS: KlGemmRows = KlGemmRows { matrix: 0, first: 0, dtype: 0, alpha: 1.0 };

pub const NO_PART: KlOutputRange =
    KlOutputRange { out: NONE, extra: NONE, w: [NO_ROWS; 2], epilogue: 0, first_col: 0, tiles: 0, scale: 1.0 };

pub const NO_MAPS: [KlTensorMap; abi::KL_GEMM_PARTS as usize] = [NO_MAP; abi::KL_GEMM_PARTS as usize];

pub const NO_STREAM: KlGemmStream = KlGemmStream {
    x: NONE,
    w: [NONE; abi::KL_GEMM_PARTS as usize],
    bias: NONE,
    table: NONE,
    down_out: NONE,
    up: NONE,
    part: [NO_PART; abi::KL_GEMM_PARTS as usize],
    row_tiles: 0,
    col_tiles: 0,
    rope: 0,
    eps: 0.0,
};

/// How many weight rows a part has.
fn weight_rows(part: &KlOutputRange) -> u32 {
    if part.epilogue == abi::KL_SWIGLU { 2 * part.out.cols } else { part.out.cols }
}

/// Columns of a box, in which a persistent kernel stores a tile of `cols` columns: the largest power of two that divides them, up to the
/// columns that a box can have.
pub const fn store_cols(tile: Tile, cols: u32, dtype: u32) -> u32 {
    let most = box_cols(dtype);
    let most = if matches!(tile.arch, Arch::Sm120) { most * abi::KL_SM120_BOX_COLS / abi::KL_SM90_BOX_COLS } else { most };
    1 << (cols | most).trailing_zeros()
}

/// How many of a tile's columns are stored: half of them with SwiGLU.
const fn stored_cols(part: &KlOutputRange, block_n: u32) -> u32 {
    if part.epilogue == abi::KL_SWIGLU { block_n / 2 } else { block_n }
}

/// Whether the persistent kernels can compute a stream with this tile. TMA must be able to store the results, and heads must be whole.
fn fits_tma(stream: &KlGemmStream, tile: Tile) -> bool {
    if tile.operands == GemmOperands::Nvfp4 && !has_whole_scale_tiles(stream, tile) {
        return false;
    }
    let in_pairs = |m: &KlMat| m.data == 0 || m.dtype == abi::KL_BF16 && m.data.is_multiple_of(4);
    stream.part.iter().filter(|part| part.out.data != 0).all(|part| {
        let stored = stored_cols(part, tile.block_n);
        let fits = match part.epilogue {
            abi::KL_QK_NORM_ROPE => tile.has_whole_heads(),
            // Half of a tile's columns are stored, at least sixteen at a time.
            abi::KL_SWIGLU => stored.is_multiple_of(16),
            abi::KL_GATE_RESIDUAL => in_pairs(&part.extra),
            _ => true,
        };
        fits && match part.out.dtype {
            abi::KL_E4M3 => stored.is_multiple_of(32) && is_async_copyable(&part.out, abi::KL_E4M3),
            // Only SwiGLU stores e2m1, in whole words of scales.
            abi::KL_E2M1 => {
                let whole = part.out.cols.is_multiple_of(abi::KL_SCALE_TILE_COLS) && part.out.stride.is_multiple_of(32);
                tile.arch == Arch::Sm120 && part.epilogue == abi::KL_SWIGLU && whole && part.out.data.is_multiple_of(16)
            }
            _ => is_async_copyable(&part.out, abi::KL_BF16),
        }
    })
}

/// Whether k-blocks are whole block-scale tiles, and the rows of each half of a GEMM tile begin at half a scale tile. TMA also needs rows
/// at multiples of sixteen bytes.
fn has_whole_scale_tiles(stream: &KlGemmStream, tile: Tile) -> bool {
    let aligned = |m: &KlMat| m.stride.is_multiple_of(32);
    let halves = |part: &KlOutputRange| part.w.iter().all(|rows| rows.first.is_multiple_of(abi::KL_SCALE_TILE_ROWS / 2));
    stream.x.cols.is_multiple_of(tile.block_k)
        && aligned(&stream.x)
        && stream.w.iter().all(aligned)
        && stream.part.iter().all(halves)
}

/// Whether the portable kernels can compute a stream. They do not store e2m1, and after expansion gate and up rows must be close enough for
/// a 32-bit offset.
fn fits_mma(cx: &OpContext, stream: &KlGemmStream) -> bool {
    let (expansion, _) = cx.memory.op_scratch();
    let expands = operands(stream) == GemmOperands::MixedInput;
    let place = |w: &KlMat| if expands && w.dtype != abi::KL_BF16 { (expansion, u64::from(w.cols)) } else { (w.data, w.stride) };
    stream.part.iter().all(|part| {
        let [gate, up] = part.w.map(|rows| place(&stream.w[rows.matrix as usize]));
        // Offsets in chunks of sixteen bytes reach twice as far.
        let near = gate.0.abs_diff(up.0) < (1 << 35) && gate.1 == up.1;
        part.out.dtype != abi::KL_E2M1 && (part.epilogue != abi::KL_SWIGLU || near)
    })
}

/// Whether a tile's kernel computes GEMMs of these operands. Mixed-input GEMMs run on bf16 kernels, after expansion, except on Hopper.
fn multiplies(tile: Tile, operands: GemmOperands) -> bool {
    let own = tile.operands;
    own == operands || operands == GemmOperands::MixedInput && own == GemmOperands::Bf16 && tile.arch != Arch::Sm90
}

/// Launches as many streams at a time as a kernel takes. They run on tensor cores if `stream` returns the parameters of all of them and a
/// kernel takes their operands, otherwise by `fallback`.
fn in_launches<T>(
    cx: &OpContext,
    all: &[T],
    stream: impl Fn(&T) -> Result<Option<KlGemmStream>>,
    fallback: impl Fn(&[T]) -> Result<()>,
) -> Result<()> {
    for group in all.chunks(abi::KL_STREAMS as usize) {
        let streams = group.iter().map(&stream).collect::<Result<Option<Vec<_>>>>()?.unwrap_or_default();
        // The streams of a double block may have weights of different formats.
        let alike: Vec<_> = streams.chunk_by(|a, b| operands(a) == operands(b)).collect();
        let plans: Option<Vec<_>> = alike.iter().map(|streams| plan(cx, streams)).collect();
        match plans.filter(|plans| !plans.is_empty()) {
            Some(plans) => alike.iter().zip(plans).try_for_each(|(streams, plan)| launch(cx, streams, plan))?,
            None => fallback(group)?,
        }
    }
    Ok(())
}

/// GEMMs that have one part each.
pub fn linear(cx: &OpContext, op: &'static str, gemms: impl Iterator<Item = EpilogueGemm>) -> Result<()> {
    let gemms: Vec<_> = gemms.collect();
    let loras = lora::reduce(cx, op, gemms.iter().map(|gemm| (gemm.x, &gemm.w)))?;
    let gemms: Vec<_> = gemms.into_iter().zip(loras).flat_map(|(gemm, lora)| gemm.by_residual(lora)).collect();
    let naive = |group: &[(EpilogueGemm, LoraMats)]| {
        group.iter().try_for_each(|(gemm, lora)| naive_gemm(cx, op, gemm.x, &gemm.w, lora, gemm.part()))
    };
    in_launches(cx, &gemms, |(gemm, lora)| linear_stream(cx, op, gemm, lora), naive)
}

fn unsupported(op: &'static str, layer: &Linear) -> Error {
    Error::Op { op, what: format!("{layer:?} cannot be multiplied on the GPU") }
}

/// The matrices of a layer's weight. Inputs of NVFP4 have kernels only with NVFP4 weights.
struct Matrices {
    mats: Vec<KlMat>,
}

impl Matrices {
    fn new(cx: &OpContext, op: &'static str, layer: &Linear) -> Result<Self> {
        let nvfp4 = |part: &Tensor| part.dtype == DType::E2m1;
        if layer.input.dtype == DType::E2m1 && !layer.weight.parts().iter().all(nvfp4) {
            return Err(unsupported(op, layer));
        }
        Ok(Self { mats: layer.weight.parts().iter().map(|&part| cx.mat(part, op)).collect::<Result<_>>()? })
    }

    /// Whether tensor cores multiply the matrices by these inputs. Inputs and weights are both e4m3 or both e2m1, or the inputs are bf16
    /// and the weights bf16, e4m3 or e2m1.
    fn are_multiplied_by(&self, x: &KlMat) -> bool {
        let copyable = |m: &KlMat, types: &[u32]| types.contains(&m.dtype) && is_async_copyable(m, m.dtype);
        let mixed = [abi::KL_BF16, abi::KL_E4M3, abi::KL_E2M1];
        let weights = if x.dtype == abi::KL_BF16 { &mixed[..] } else { &[x.dtype] };
        copyable(x, &mixed) && self.mats.iter().all(|w| copyable(w, weights))
    }

    /// The leading rows of a range that lie in one matrix, and their number.
    fn first_of(&self, range: Range<usize>, x: &KlMat) -> (KlGemmRows, usize) {
        let (mut start, mut matrix) = (0, 0);
        let rows = |matrix: usize| self.mats[matrix].rows as usize;
        while matrix + 1 < self.mats.len() && start + rows(matrix) <= range.start {
            start += rows(matrix);
            matrix += 1;
        }
        let w = &self.mats[matrix];
        let count = range.len().min((start + rows(matrix)).saturating_sub(range.start));
        let first = (range.start - start) as u32;
        let is_expanded = w.dtype == abi::KL_E2M1 && x.dtype != abi::KL_E2M1;
        let unit = if is_expanded { abi::KL_E2M1_ALPHA as f32 } else { 1.0 };
        (KlGemmRows { matrix: matrix as u32, first, dtype: w.dtype, alpha: x.scale * w.scale * unit }, count)
    }
}

/// Output columns of a layer whose weight rows go through one epilogue. With SwiGLU `rows` are gate rows, and as many up rows follow them.
struct OutputRange {
    out: Tensor,
    epilogue: u32,
    extra: Option<Tensor>,
    scale: f32,
    rows: Range<usize>,
}

/// Splits parts so that each takes rows of one matrix, and pairs them with these rows. `None` if the gate rows or the up rows of a part
/// span several matrices.
fn split_parts(w: &Matrices, x: &KlMat, parts: Vec<OutputRange>) -> Option<Vec<(OutputRange, [KlGemmRows; 2])>> {
    let mut split = Vec::new();
    for part in parts {
        if part.epilogue == abi::KL_SWIGLU {
            let n = part.rows.len();
            let (gate, gates) = w.first_of(part.rows.clone(), x);
            let (up, ups) = w.first_of(part.rows.end..part.rows.end + n, x);
            if gates < n || ups < n {
                return None;
            }
            split.push((part, [gate, up]));
            continue;
        }
        let mut first = 0;
        while first < part.rows.len() {
            let (rows, count) = w.first_of(part.rows.start + first..part.rows.end, x);
            let (start, end) = (part.rows.start + first, part.rows.start + first + count);
            split.push((OutputRange { out: part.out.cols(first..first + count), rows: start..end, ..part }, [rows, NO_ROWS]));
            first += count;
        }
    }
    Some(split)
}

/// The tensor-core parameters that all epilogues have in common, if there are not too many parts.
fn stream_of(
    cx: &OpContext,
    op: &'static str,
    x: KlMat,
    w: &Matrices,
    lora: &LoraMats,
    parts: Vec<OutputRange>,
) -> Result<Option<KlGemmStream>> {
    if cx.choice == KernelChoice::Naive || !w.are_multiplied_by(&x) || !lora.is_multiplied() {
        return Ok(None);
    }
    let Some(parts) = split_parts(w, &x, parts).filter(|parts| parts.len() <= abi::KL_GEMM_PARTS as usize) else {
        return Ok(None);
    };
    let mut stream = KlGemmStream { x, down_out: lora.down_out, up: lora.up, ..NO_STREAM };
    stream.w[..w.mats.len()].copy_from_slice(&w.mats);
    for (to, (part, rows)) in stream.part.iter_mut().zip(parts) {
        let (out, extra) = (cx.mat(part.out, op)?, cx.mat_if(part.extra, op)?);
        *to = KlOutputRange { out, extra, w: rows, epilogue: part.epilogue, first_col: part.rows.start as u32, ..NO_PART };
        // The scale of an e4m3 output goes into a factor that the epilogue has anyway.
        match part.epilogue {
            abi::KL_QK_NORM_ROPE => to.scale = part.scale / out.scale,
            // The scale of an e2m1 output is part of its block scales.
            abi::KL_SWIGLU if out.dtype == abi::KL_E2M1 => {}
            abi::KL_SWIGLU => to.scale = out.scale.recip(),
            _ if [abi::KL_E4M3, abi::KL_E2M1].contains(&out.dtype) => return Ok(None),
            _ => {}
        }
    }
    Ok(Some(stream))
}

/// The parameters of a GEMM on tensor cores, if its operands allow it.
fn linear_stream(cx: &OpContext, op: &'static str, gemm: &EpilogueGemm, lora: &LoraMats) -> Result<Option<KlGemmStream>> {
    let (x, w) = (cx.mat(gemm.x, op)?, Matrices::new(cx, op, &gemm.w)?);
    if !matches!(gemm.out.dtype, DType::Bf16 | DType::F32 | DType::E4m3 | DType::E2m1) {
        return Ok(None);
    }
    let bias = cx.mat_if(gemm.w.bias, op)?;
    Ok(stream_of(cx, op, x, &w, lora, vec![gemm.part()])?.map(|stream| KlGemmStream { bias, ..stream }))
}

/// Computes a part of a layer by the naive kernel, with a launch for each matrix of the weight.
fn naive_gemm(cx: &OpContext, op: &'static str, x: Tensor, layer: &Linear, lora: &LoraMats, part: OutputRange) -> Result<()> {
    let (x, w) = (cx.mat(x, op)?, Matrices::new(cx, op, layer)?);
    for (part, rows) in split_parts(&w, &x, vec![part]).ok_or_else(|| unsupported(op, layer))? {
        let bias = layer.bias.map(|bias| bias.cols(part.rows.clone()));
        let p = abi::KlNaiveGemm {
            out: cx.mat(part.out, op)?,
            x,
            w: rows.map(|rows| w.mats[rows.matrix as usize]),
            bias: cx.mat_if(bias, op)?,
            gate: cx.mat_if(part.extra, op)?,
            down_out: lora.down_out,
            // With SwiGLU as many up rows follow the gate rows.
            up: [0, if part.epilogue == abi::KL_SWIGLU { part.rows.len() } else { 0 }]
                .map(|row| lora.up_from(part.rows.start + row)),
            saturated: cx.memory.saturated(),
            first: rows.map(|rows| rows.first),
            epilogue: part.epilogue,
            unused: 0,
        };
        cx.kernels.launch(Kernel::NaiveGemm, naive_grid(&p.out), &p)?;
    }
    Ok(())
}

/// Selects a tile and a schedule for a grouped GEMM on tensor cores, if a kernel takes its operands.
fn plan(cx: &OpContext, streams: &[KlGemmStream]) -> Option<GemmPlan> {
    let shape = |s: &KlGemmStream| GemmShape { m: s.x.rows, parts: s.part.iter().map(weight_rows).collect() };
    let shapes: Vec<GemmShape> = streams.iter().map(shape).collect();
    let (k, operands) = (k_of(streams), operands(&streams[0]));
    let same_k = streams.iter().all(|s| s.x.cols == k);
    let fits = |tile: Tile| {
        // A single k-block cannot be split.
        let divisible = !tile.is_split_k() || k > tile.block_k;
        let fits = match tile.is_persistent() {
            true => same_k && divisible && streams.iter().all(|s| fits_tma(s, tile)),
            false => streams.iter().all(|s| fits_mma(cx, s)),
        };
        multiplies(tile, operands) && fits && cx.kernels.has(tile.kernel)
    };
    let gemm = GroupedGemm { shapes: &shapes, k, same_k };
    match cx.choice {
        KernelChoice::Only(kernel) if Tile::of(kernel).is_some_and(fits) => Some(gemm.forced(Tile::of(kernel)?, cx.sms)),
        _ => gemm.plan(cx.sms, |tile| {
            // Only FP8 sums have to be promoted.
            let longest = cx.accumulate.longest_sum(k as usize);
            let is_short = |sum: u32| sum.min(k) as usize <= longest;
            fits(tile) && (operands != GemmOperands::Fp8 || is_short(tile.longest_sum.unwrap_or(k)))
        }),
    }
}

/// Launches a grouped GEMM on tensor cores.
fn launch(cx: &OpContext, streams: &[KlGemmStream], plan: GemmPlan) -> Result<()> {
    let Tile { block_m, block_n, block_k, kernel, cluster, .. } = plan.tile;
    let mut stream = [NO_STREAM; abi::KL_STREAMS as usize];
    for (to, s) in stream.iter_mut().zip(streams) {
        *to = *s;
        to.part.iter_mut().for_each(|part| part.tiles = weight_rows(part).div_ceil(block_n));
        let col_tiles = to.part.iter().map(|part| part.tiles).sum();
        (to.row_tiles, to.col_tiles) = plan.tile.tile_counts(s.x.rows, col_tiles);
    }
    let tiles: u32 = stream.iter().map(|s| s.row_tiles * s.col_tiles).sum();
    let schedule = cx.tile_schedule(plan.schedule, tiles, k_of(streams).div_ceil(block_k));
    if plan.tile.arch != Arch::Sm90 {
        expand(cx, &mut stream)?;
    }
    let Some(mode) = cluster else {
        let (ctas, saturated) = (plan.schedule.full_tiles + plan.schedule.workers, cx.memory.saturated());
        return cx.kernels.launch(kernel, [ctas, 1, 1], &abi::KlGemm { stream, schedule, saturated });
    };
    let group = stream.map(|s| group_m(plan.tile, s.row_tiles, s.col_tiles, cx.sms));
    let maps = [NO_MAPS; abi::KL_STREAMS as usize];
    let no_map = [NO_MAP; abi::KL_STREAMS as usize];
    // Clusters of split-K are not persistent: each computes one tile.
    let slots = if plan.tile.is_split_k() { tiles } else { plan.tile.slots(cx.sms) };
    let clusters = plan.schedule.persistent_clusters(tiles, slots);
    let expansion = expansion(cx, &stream, plan.tile, clusters.min(plan.tile.slots(cx.sms)).div_ceil(group[0].max(1)))?;
    let mut p = abi::KlGemmTma {
        x: no_map,
        w: maps,
        out: maps,
        residual: no_map,
        down_out: no_map,
        up: no_map,
        stream,
        expansion,
        group,
        schedule,
        saturated: cx.memory.saturated(),
        unused: [0; _],
    };
    // A column of a tensor map is two e2m1 elements.
    let k_cols = if operands(&stream[0]) == GemmOperands::Nvfp4 { block_k / 2 } else { block_k };
    // Each CTA of a cluster loads half of what it multicasts. B is always loaded in halves.
    let a_rows = if mode == ClusterMode::MulticastA { block_m / abi::KL_SM90_CLUSTER } else { block_m };
    for (i, s) in stream.iter().enumerate().take(streams.len()) {
        p.x[i] = cx.tensor_map(&s.x, [k_cols, a_rows])?;
        for ((map, w), &to) in p.w[i].iter_mut().zip(&s.w).zip(&expansion.to[i]).filter(|((_, w), _)| w.data != 0) {
            *map = cx.tensor_map(&if to == 0 { *w } else { in_bf16(w, to) }, [k_cols, block_n / 2])?;
        }
        if s.down_out.data != 0 {
            let cols = plan.tile.lora_cols();
            p.down_out[i] = cx.tensor_map(&s.down_out, [cols, a_rows])?;
            p.up[i] = cx.tensor_map(&s.up, [cols, block_n / 2])?;
        }
        if s.part[0].epilogue == abi::KL_GATE_RESIDUAL {
            p.residual[i] = cx.tensor_map(&s.part[0].out, [abi::KL_SM90_BOX_COLS, plan.tile.warpgroup_rows()])?;
        }
        // Results of e2m1 are stored without TMA.
        let mapped = |part: &KlOutputRange| part.out.data != 0 && part.out.dtype != abi::KL_E2M1;
        for (map, part) in p.out[i].iter_mut().zip(&s.part).filter(|(_, part)| mapped(part)) {
            let cols = store_cols(plan.tile, stored_cols(part, block_n), part.out.dtype);
            *map = cx.tensor_map(&part.out, [cols, abi::KL_TMA_STORE_ROWS])?;
        }
    }
    cx.kernels.launch(kernel, [clusters * kernel.cluster(), 1, 1], &p)
}

/// The fused projection of attention inputs. On tensor cores it is one launch, whose epilogue normalizes and rotates queries and keys
/// before they are stored. Elsewhere it is one GEMM for each output and a pass over the heads. The fused epilogue always normalizes, so
/// heads without a norm are also rotated by such a pass.
pub fn projection(cx: &OpContext, op: &'static str, streams: &[Projection<'_>]) -> Result<()> {
    let loras = lora::reduce(cx, op, streams.iter().map(|s| (s.x, s.w)))?;
    let streams: Vec<_> = streams.iter().zip(loras).collect();
    for group in streams.chunk_by(|a, b| a.0.norm.is_some() == b.0.norm.is_some()) {
        // Operands are checked before the first launch.
        let without_norm = group.iter().filter(|(s, _)| s.norm.is_none()).map(|(s, _)| heads_of(cx, op, s));
        let rotated = without_norm.collect::<Result<Vec<_>>>()?;
        in_launches(cx, group, |(s, lora)| projection_stream(cx, op, s, lora), |group| projection_in_passes(cx, op, group))?;
        rotated.iter().try_for_each(|heads| qk_norm_rope(cx, op, heads))?;
    }
    Ok(())
}

/// The outputs of a projection with their weight rows. Queries and keys may have norms.
fn projection_parts(s: &Projection<'_>) -> Vec<OutputRange> {
    let norms = (s.norm.map(|norm| norm.q), s.norm.map(|norm| norm.k));
    let heads = if s.norm.is_some() { abi::KL_QK_NORM_ROPE } else { abi::KL_STORE };
    let epilogues = [
        (s.q, heads, norms.0, s.q_scale),
        (Some(s.k), heads, norms.1, s.k_scale),
        (Some(s.v), abi::KL_STORE, None, 1.0),
        (s.mlp, abi::KL_SWIGLU, None, 1.0),
    ];
    let mut first = 0;
    let part = |(out, epilogue, extra, scale): (Option<Tensor>, _, _, _)| {
        let (out, rows) = (out?, first..first + out?.cols);
        first = rows.end;
        Some(OutputRange { out, epilogue, extra, scale, rows })
    };
    epilogues.into_iter().filter_map(part).collect()
}

/// The parameters of a fused projection on tensor cores, if its operands allow it.
fn projection_stream(cx: &OpContext, op: &'static str, s: &Projection<'_>, lora: &LoraMats) -> Result<Option<KlGemmStream>> {
    let (x, w) = (cx.mat(s.x, op)?, Matrices::new(cx, op, s.w)?);
    let parts = projection_parts(s);
    let storable = parts.iter().all(|part| matches!(part.out.dtype, DType::Bf16 | DType::E4m3 | DType::E2m1));
    let whole_heads = s.rope.table.cols == abi::KL_MMA_COLS as usize;
    if !storable || s.norm.is_some() && !whole_heads {
        return Ok(None);
    }
    let (table, rope) = (cx.mat(s.rope.table, op)?, rope_code(s.rope.style));
    let stream = stream_of(cx, op, x, &w, lora, parts)?;
    let heads = |part: &KlOutputRange| part.epilogue != abi::KL_QK_NORM_ROPE || part.out.cols.is_multiple_of(abi::KL_MMA_COLS);
    let stream = stream.filter(|stream| stream.part.iter().all(heads));
    let eps = s.norm.map_or(0.0, |norm| norm.eps);
    Ok(stream.map(|stream| KlGemmStream { table, rope, eps, ..stream }))
}

/// The projection by naive GEMMs, then a norm and rotation pass over queries and keys in place, which rounds bf16 values once more.
fn projection_in_passes(cx: &OpContext, op: &'static str, streams: &[(&Projection<'_>, LoraMats)]) -> Result<()> {
    let normed = streams.iter().filter(|(s, _)| s.norm.is_some());
    let heads = normed.map(|(s, _)| heads_of(cx, op, s)).collect::<Result<Vec<_>>>()?;
    for (s, lora) in streams {
        for part in projection_parts(s) {
            let part = match part.epilogue {
                abi::KL_QK_NORM_ROPE => OutputRange { epilogue: abi::KL_STORE, extra: None, ..part },
                _ => part,
            };
            naive_gemm(cx, op, s.x, s.w, lora, part)?;
        }
    }
    qk_norm_rope(cx, op, &heads.into_iter().flatten().collect::<Vec<_>>())
}

/// The queries and keys of a projection, for a pass over their heads.
fn heads_of(cx: &OpContext, op: &'static str, s: &Projection<'_>) -> Result<Vec<QkHeads>> {
    let queries = s.q.map(|q| (q, s.norm.map(|norm| norm.q), s.q_scale));
    let keys = (s.k, s.norm.map(|norm| norm.k), s.k_scale);
    let heads = |(out, weight, scale): (Tensor, Option<Tensor>, f32)| {
        // Rounded before and after the norm, queries and keys of e4m3 would have twice the error.
        if out.dtype.is_quantized() {
            return Err(Error::Op { op, what: format!("heads in {out:?} need tensor cores") });
        }
        let (x, weight, table) = (cx.mat(out, op)?, cx.mat_if(weight, op)?, cx.mat(s.rope.table, op)?);
        Ok(QkHeads {
            heads: abi::KlQkHeads { x, weight, table, scale, unused: 0 },
            head_dim: s.rope.table.cols,
            style: s.rope.style,
            eps: s.norm.map_or(0.0, |norm| norm.eps),
        })
    };
    queries.into_iter().chain([keys]).map(heads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_divide_a_tile() {
        let cols = |kernel, dtype| [256, 192, 160, 208, 96, 80].map(|cols| store_cols(Tile::of(kernel).unwrap(), cols, dtype));
        assert_eq!(cols(Kernel::GemmBf16Sm90_256x192, abi::KL_BF16), [64, 64, 32, 16, 32, 16]);
        assert_eq!(cols(Kernel::GemmBf16Sm90_256x192, abi::KL_E4M3), [128, 64, 32, 16, 32, 16]);
        assert_eq!(cols(Kernel::GemmNvfp4Sm120_256x128, abi::KL_BF16), [32, 32, 32, 16, 32, 16]);
        assert_eq!(cols(Kernel::GemmNvfp4Sm120_256x128, abi::KL_E4M3), [64, 64, 32, 16, 32, 16]);
    }
}
