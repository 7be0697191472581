//! Matrix products: on tensor cores where operands allow it, by the naive kernel elsewhere.

use super::abi::{self, KlGemmPart, KlGemmStream, KlMat, KlTensorMap};
use super::driver::{MapSpec, Swizzle};
use super::launch::Kernel;
use super::ops::{NONE, tiles};
use super::tile::{self, Common, Deal, Products, Size, Spec, Tile};
use super::{Choice, Cuda, Linear, Projection};
use crate::backend::RopeStyle;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// What becomes of a product, and where it goes.
pub struct Job {
    pub out: Tensor,
    pub x: Tensor,
    pub w: Linear,
    pub epilogue: u32,
    pub gate: Option<Tensor>,
}

const NO_PART: KlGemmPart = KlGemmPart { out: NONE, extra: NONE, epilogue: 0, first_row: 0, tiles: 0, scale: 1.0 };

pub(super) const NO_MAP: KlTensorMap = KlTensorMap { opaque: [0; 16] };

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

/// Columns of a result that a warp of Hopper's kernel stores at once, of a tile with so many.
const fn stored_cols(cols: u32) -> u32 {
    if cols.is_multiple_of(64) {
        64
    } else if cols.is_multiple_of(32) {
        32
    } else {
        16
    }
}

/// Whether Hopper's kernel can do a stream with such tiles: results in bf16 that the copy engine can store, whole heads.
fn on_hopper(stream: &KlGemmStream, tile: Spec) -> bool {
    let in_pairs = |m: &KlMat| m.data == 0 || m.dtype == abi::KL_BF16 && m.data.is_multiple_of(4);
    stream.part.iter().filter(|part| part.out.data != 0).all(|part| {
        let fits = match part.epilogue {
            abi::KL_QK_NORM_ROPE => tile.cols.is_multiple_of(abi::KL_MMA_COLS),
            // Half of a tile's columns are stored, sixteen at a time at least.
            abi::KL_SWIGLU => tile.cols.is_multiple_of(32),
            abi::KL_GATE_RESIDUAL => in_pairs(&part.extra),
            _ => true,
        };
        fits && aligned(&part.out)
    })
}

/// Whether an operand can be copied sixteen bytes at a time, from 32-bit offsets.
pub(super) fn aligned(m: &KlMat) -> bool {
    m.dtype == abi::KL_BF16
        && m.data.is_multiple_of(16)
        && m.stride.is_multiple_of(8)
        && m.cols.is_multiple_of(8)
        && m.rows > 0
        && m.cols > 0
        && u64::from(m.rows) * m.stride <= u64::from(u32::MAX)
}

const fn rope(style: RopeStyle) -> u32 {
    match style {
        RopeStyle::Interleaved => abi::KL_ROPE_INTERLEAVED,
        RopeStyle::HalfSplit => abi::KL_ROPE_HALF_SPLIT,
    }
}

impl Cuda {
    /// Takes streams two to a launch: on tensor cores where `stream` gives all of them their form for it, else by `otherwise`.
    fn in_pairs<T>(
        &self,
        all: &[T],
        stream: impl Fn(&T) -> Result<Option<KlGemmStream>>,
        otherwise: impl Fn(&[T]) -> Result<()>,
    ) -> Result<()> {
        for pair in all.chunks(abi::KL_STREAMS as usize) {
            let streams = pair.iter().map(&stream).collect::<Result<Option<Vec<_>>>>()?;
            match streams {
                Some(streams) => self.launch_gemm(&streams)?,
                None => otherwise(pair)?,
            }
        }
        Ok(())
    }

    /// Runs products.
    pub(super) fn products(&self, op: &'static str, jobs: &[Job]) -> Result<()> {
        let naive = |pair: &[Job]| pair.iter().try_for_each(|job| self.naive_product(op, job));
        self.in_pairs(jobs, |job| self.stream(op, job), naive)
    }

    /// A product as the tensor-core kernel takes it, if it does.
    fn stream(&self, op: &'static str, job: &Job) -> Result<Option<KlGemmStream>> {
        let (x, w) = (self.mat(job.x, op)?, self.mat(job.w.weight, op)?);
        if self.choice == Choice::Naive || !aligned(&x) || !aligned(&w) || !matches!(job.out.dtype, DType::Bf16 | DType::F32) {
            return Ok(None);
        }
        let mut stream = KlGemmStream { x, w, bias: self.mat_if(job.w.bias, op)?, ..NO_STREAM };
        stream.part[0] =
            KlGemmPart { out: self.mat(job.out, op)?, extra: self.mat_if(job.gate, op)?, epilogue: job.epilogue, ..NO_PART };
        Ok(Some(stream))
    }

    fn naive_product(&self, op: &'static str, job: &Job) -> Result<()> {
        let p = abi::KlNaiveGemm {
            out: self.mat(job.out, op)?,
            x: self.mat(job.x, op)?,
            w: self.mat(job.w.weight, op)?,
            bias: self.mat_if(job.w.bias, op)?,
            gate: self.mat_if(job.gate, op)?,
            epilogue: job.epilogue,
            unused: 0,
        };
        self.kernels.launch(Kernel::NaiveGemm, tiles(&p.out), &p)
    }

    fn launch_gemm(&self, streams: &[KlGemmStream]) -> Result<()> {
        let size = |s: &KlGemmStream| Size { rows: s.x.rows, parts: s.part.iter().map(weight_rows).collect() };
        let sizes: Vec<Size> = streams.iter().map(size).collect();
        let (multiprocessors, inner) = (self.device().multiprocessors, streams.iter().map(|s| s.x.cols).max().unwrap_or(0));
        let alike = streams.iter().all(|s| s.x.cols == inner);
        let can = |tile: Tile| {
            // One round has no halves.
            let divisible = !tile.is_halved() || inner > tile.spec().inner;
            let hopper = alike && divisible && streams.iter().all(|s| on_hopper(s, tile.spec()));
            let fits = !tile.is_hopper() || hopper;
            fits && self.kernels.has(tile.spec().kernel)
        };
        let products = Products { sizes: &sizes, inner, alike };
        let plan = match self.choice {
            Choice::Tile(tile) if can(tile) => products.forced(tile, multiprocessors),
            _ => products.plan(multiprocessors, can),
        };
        let Spec { rows, cols, inner: step, kernel, cluster, .. } = plan.tile.spec();
        let rounds = inner.div_ceil(step);
        let mut stream = [NO_STREAM; abi::KL_STREAMS as usize];
        for (to, s) in stream.iter_mut().zip(streams) {
            *to = *s;
            to.part.iter_mut().for_each(|part| part.tiles = weight_rows(part).div_ceil(cols));
            let across = to.part.iter().map(|part| part.tiles).sum();
            (to.row_tiles, to.col_tiles) = plan.tile.count(s.x.rows, across);
        }
        let Deal { whole, workers } = plan.deal;
        let tiles: u32 = stream.iter().map(|s| s.row_tiles * s.col_tiles).sum();
        let deal = self.dealt(plan.deal, tiles, rounds);
        let Some(common) = cluster else {
            let p = abi::KlGemm { stream, schedule: deal };
            return self.kernels.launch(kernel, [whole + workers, 1, 1], &p);
        };
        let group = stream.map(|s| tile::group(plan.tile, s.row_tiles, s.col_tiles, multiprocessors));
        let (x, w, out, unused) = (NO_MAPS, NO_MAPS, [[NO_MAP; abi::KL_GEMM_PARTS as usize]; abi::KL_STREAMS as usize], [0; 7]);
        let mut p = abi::KlGemmSm90 { x, w, out, residual: NO_MAPS, stream, group, schedule: deal, unused };
        // What both blocks of a cluster need, each copies one half of; weight rows come in halves in any case.
        let x_rows = if common == Common::Rows { rows / abi::KL_SM90_CLUSTER } else { rows };
        for (i, s) in stream.iter().enumerate().take(streams.len()) {
            p.x[i] = self.box_map(&s.x, [step, x_rows])?;
            p.w[i] = self.box_map(&s.w, [step, cols / 2])?;
            if s.part[0].epilogue == abi::KL_GATE_RESIDUAL {
                p.residual[i] = self.box_map(&s.part[0].out, [step, plan.tile.group_rows()])?;
            }
            for (map, part) in p.out[i].iter_mut().zip(&s.part).filter(|(_, part)| part.out.data != 0) {
                let width = if part.epilogue == abi::KL_SWIGLU { cols / 2 } else { cols };
                *map = self.box_map(&part.out, [stored_cols(width), abi::KL_SM90_STORE_ROWS])?;
            }
        }
        // Halves do not stay: each cluster has one tile.
        let slots = if plan.tile.is_halved() { tiles } else { plan.tile.slots(multiprocessors) };
        self.kernels.launch(kernel, [plan.deal.clusters(tiles, slots) * abi::KL_SM90_CLUSTER, 1, 1], &p)
    }

    /// What each of those who share `tiles` of so many rounds has of them.
    pub(super) fn dealt(&self, Deal { whole, workers }: Deal, tiles: u32, rounds: u32) -> abi::KlTileSchedule {
        let shared = (tiles - whole) * rounds;
        // Without workers there is nothing to share.
        let (share, extra) = (shared.checked_div(workers).unwrap_or(0), shared.checked_rem(workers).unwrap_or(0));
        let (flags, left) = self.left();
        abi::KlTileSchedule {
            partials: left,
            flags,
            k_blocks: rounds,
            full_tiles: whole,
            k_blocks_per_worker: share,
            remainder: extra,
        }
    }

    /// How the copy engine takes boxes of so many columns and rows from a matrix, and puts them there.
    pub(super) fn box_map(&self, m: &KlMat, tile: [u32; 2]) -> Result<KlTensorMap> {
        let swizzle = match tile[0] {
            64 => Swizzle::Bytes128,
            32 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        let (size, pitch) = ([u64::from(m.cols), u64::from(m.rows)], m.stride * DType::Bf16.size() as u64);
        self.kernels.tensor_map(MapSpec { address: m.data, dtype: DType::Bf16, size, pitch, tile, swizzle })
    }

    /// Attention inputs: on tensor cores in one launch, queries and keys normalised and rotated before they are stored; elsewhere as
    /// products and a pass over the heads.
    pub(super) fn qkv(&self, op: &'static str, streams: &[Projection<'_>]) -> Result<()> {
        self.in_pairs(streams, |s| self.qkv_stream(op, s), |pair| self.qkv_in_passes(op, pair))
    }

    fn qkv_stream(&self, op: &'static str, s: &Projection<'_>) -> Result<Option<KlGemmStream>> {
        let (x, w) = (self.mat(s.x, op)?, self.mat(s.w.weight, op)?);
        let outs = [s.q, Some(s.k), Some(s.v), s.mlp];
        let stored = outs.iter().flatten().all(|t| t.dtype == DType::Bf16);
        if self.choice == Choice::Naive
            || !aligned(&x)
            || !aligned(&w)
            || !stored
            || s.rope.table.cols != abi::KL_MMA_COLS as usize
        {
            return Ok(None);
        }
        let mut stream =
            KlGemmStream { x, w, table: self.mat(s.rope.table, op)?, rope: rope(s.rope.style), eps: s.norm.eps, ..NO_STREAM };
        let (mut first_row, mut parts) = (0, stream.part.iter_mut());
        let kinds = [
            (abi::KL_QK_NORM_ROPE, Some(s.norm.q), s.norm.q_scale),
            (abi::KL_QK_NORM_ROPE, Some(s.norm.k), 1.0),
            (abi::KL_STORE, None, 1.0),
            (abi::KL_SWIGLU, None, 1.0),
        ];
        for (out, (epilogue, norm, scale)) in outs.into_iter().zip(kinds) {
            let (Some(out), Some(part)) = (out, out.and_then(|_| parts.next())) else { continue };
            let (out, extra) = (self.mat(out, op)?, self.mat_if(norm, op)?);
            *part = KlGemmPart { out, extra, epilogue, first_row, scale, ..NO_PART };
            first_row += weight_rows(part);
        }
        Ok(Some(stream))
    }

    /// Products to their places, then the heads of queries and keys where they lie: in bf16 that rounds once more.
    fn qkv_in_passes(&self, op: &'static str, streams: &[Projection<'_>]) -> Result<()> {
        let mut heads = Vec::new();
        for s in streams {
            let mut first = 0;
            for (out, norm, scale) in
                [(s.q, Some(s.norm.q), s.norm.q_scale), (Some(s.k), Some(s.norm.k), 1.0), (Some(s.v), None, 1.0)]
            {
                let Some(out) = out else { continue };
                let w = s.w.rows(first..first + out.cols);
                self.naive_product(op, &Job { out, x: s.x, w, epilogue: abi::KL_STORE, gate: None })?;
                first += out.cols;
                if let Some(weight) = norm {
                    let (x, weight, table) = (self.mat(out, op)?, self.mat(weight, op)?, self.mat(s.rope.table, op)?);
                    heads.push((
                        abi::KlQkHeads { x, weight, table, scale, unused: 0 },
                        (s.rope.table.cols, s.rope.style, s.norm.eps),
                    ));
                }
            }
            if let Some(out) = s.mlp {
                let w = s.w.rows(first..s.w.weight.rows);
                self.naive_product(op, &Job { out, x: s.x, w, epilogue: abi::KL_SWIGLU, gate: None })?;
            }
        }
        let Some(&(_, alike)) = heads.first() else { return Ok(()) };
        if heads.iter().any(|(_, how)| *how != alike) {
            return Err(Error::Op { op, what: "streams with other heads, rotations or epsilons".into() });
        }
        let (head_dim, style, eps) = alike;
        const ABSENT: abi::KlQkHeads = abi::KlQkHeads { x: NONE, weight: NONE, table: NONE, scale: 1.0, unused: 0 };
        let mut p = abi::KlQkNormRope {
            part: [ABSENT; abi::KL_QK_PARTS as usize],
            head_dim: head_dim as u32,
            style: rope(style),
            eps,
            unused: 0,
        };
        p.part.iter_mut().zip(heads).for_each(|(to, (part, _))| *to = part);
        let rows: u32 = p.part.iter().map(|h| h.x.rows).sum();
        let most = p.part.iter().map(|h| h.x.cols / p.head_dim).max().unwrap_or(0);
        let grid = [rows.div_ceil(abi::KL_NORM_THREADS / 32), most.div_ceil(abi::KL_HEADS_PER_WARP), 1];
        self.kernels.launch(Kernel::QkNormRope, grid, &p)
    }
}
