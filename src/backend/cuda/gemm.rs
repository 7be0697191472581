//! Matrix products: on tensor cores where operands allow it, by the naive kernel elsewhere.

use super::abi::{self, KlGemmPart, KlGemmStream, KlMat};
use super::launch::Kernel;
use super::ops::{NONE, tiles};
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

const NO_PART: KlGemmPart = KlGemmPart { out: NONE, extra: NONE, epilogue: 0, first_row: 0, tiles: 0, unused: 0 };

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

/// Rows of a tile on tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    Rows64,
    Rows128,
}

impl Tile {
    pub(super) const fn rows(self) -> u32 {
        match self {
            Self::Rows64 => 64,
            Self::Rows128 => 128,
        }
    }

    const fn kernel(self) -> Kernel {
        match self {
            Self::Rows64 => Kernel::GemmMma64,
            Self::Rows128 => Kernel::GemmMma128,
        }
    }

    /// Blocks of it that a multiprocessor runs at once.
    const fn resident(self) -> u32 {
        match self {
            Self::Rows64 => 3,
            Self::Rows128 => 2,
        }
    }
}

/// The tile for products of so many rows, each with so many tiles of columns: the one whose last round of blocks wastes less. A small
/// tile reads the weight twice as often, which costs it about a tenth.
pub fn pick_tile(products: &[(u32, u32)], multiprocessors: u32) -> Tile {
    let cost = |tile: Tile, penalty: u64| {
        let blocks: u32 = products.iter().map(|(rows, cols)| rows.div_ceil(tile.rows()) * cols).sum();
        let rounds = blocks.div_ceil(tile.resident() * multiprocessors.max(1));
        // A round takes as long as the work that a multiprocessor has in it.
        u64::from(rounds) * u64::from(tile.resident() * tile.rows()) * penalty
    };
    if cost(Tile::Rows64, 11) < cost(Tile::Rows128, 10) { Tile::Rows64 } else { Tile::Rows128 }
}

/// Whether an operand can be copied sixteen bytes at a time.
pub(super) fn aligned(m: &KlMat) -> bool {
    m.dtype == abi::KL_BF16
        && m.data.is_multiple_of(16)
        && m.stride.is_multiple_of(8)
        && m.cols.is_multiple_of(8)
        && m.rows > 0
        && m.cols > 0
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
        let width = if job.epilogue == abi::KL_SWIGLU { abi::KL_MMA_COLS / 2 } else { abi::KL_MMA_COLS };
        let out = self.mat(job.out, op)?;
        let tiles = out.cols.div_ceil(width);
        let mut stream = KlGemmStream { x, w, bias: self.mat_if(job.w.bias, op)?, col_tiles: tiles, ..NO_STREAM };
        stream.part[0] = KlGemmPart { out, extra: self.mat_if(job.gate, op)?, epilogue: job.epilogue, tiles, ..NO_PART };
        Ok(Some(stream))
    }

    fn naive_product(&self, op: &'static str, job: &Job) -> Result<()> {
        let p = abi::KlProduct {
            out: self.mat(job.out, op)?,
            x: self.mat(job.x, op)?,
            w: self.mat(job.w.weight, op)?,
            bias: self.mat_if(job.w.bias, op)?,
            gate: self.mat_if(job.gate, op)?,
            epilogue: job.epilogue,
            unused: 0,
        };
        self.kernels.launch(Kernel::NaiveProduct, tiles(&p.out), &p)
    }

    fn launch_gemm(&self, streams: &[KlGemmStream]) -> Result<()> {
        let sizes: Vec<(u32, u32)> = streams.iter().map(|s| (s.x.rows, s.col_tiles)).collect();
        let tile = match self.choice {
            Choice::Rows64 => Tile::Rows64,
            Choice::Rows128 => Tile::Rows128,
            Choice::Best | Choice::Naive => pick_tile(&sizes, self.device().multiprocessors),
        };
        let mut p = abi::KlGemm { stream: [NO_STREAM; abi::KL_STREAMS as usize] };
        for (to, s) in p.stream.iter_mut().zip(streams) {
            *to = KlGemmStream { row_tiles: s.x.rows.div_ceil(tile.rows()), ..*s };
        }
        let blocks = p.stream.iter().map(|s| s.row_tiles * s.col_tiles).sum();
        self.kernels.launch(tile.kernel(), [blocks, 1, 1], &p)
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
        let kinds =
            [(abi::KL_HEADS, Some(s.norm.q)), (abi::KL_HEADS, Some(s.norm.k)), (abi::KL_STORE, None), (abi::KL_SWIGLU, None)];
        for (out, (epilogue, norm)) in outs.into_iter().zip(kinds) {
            let (Some(out), Some(part)) = (out, out.and_then(|_| parts.next())) else { continue };
            let (out, extra) = (self.mat(out, op)?, self.mat_if(norm, op)?);
            let rows = if epilogue == abi::KL_SWIGLU { 2 * out.cols } else { out.cols };
            let tiles = rows.div_ceil(abi::KL_MMA_COLS);
            *part = KlGemmPart { out, extra, epilogue, first_row, tiles, unused: 0 };
            first_row += rows;
            stream.col_tiles += tiles;
        }
        Ok(Some(stream))
    }

    /// Products to their places, then the heads of queries and keys where they lie: in bf16 that rounds once more.
    fn qkv_in_passes(&self, op: &'static str, streams: &[Projection<'_>]) -> Result<()> {
        let mut heads = Vec::new();
        for s in streams {
            let mut first = 0;
            for (out, norm) in [(s.q, Some(s.norm.q)), (Some(s.k), Some(s.norm.k)), (Some(s.v), None)] {
                let Some(out) = out else { continue };
                let w = s.w.rows(first..first + out.cols);
                self.naive_product(op, &Job { out, x: s.x, w, epilogue: abi::KL_STORE, gate: None })?;
                first += out.cols;
                if let Some(weight) = norm {
                    let (x, weight, table) = (self.mat(out, op)?, self.mat(weight, op)?, self.mat(s.rope.table, op)?);
                    heads.push((abi::KlHeads { x, weight, table }, (s.rope.table.cols, s.rope.style, s.norm.eps)));
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
        const ABSENT: abi::KlHeads = abi::KlHeads { x: NONE, weight: NONE, table: NONE };
        let mut p = abi::KlHeadNorm {
            part: [ABSENT; abi::KL_HEAD_PARTS as usize],
            head_dim: head_dim as u32,
            style: rope(style),
            eps,
            unused: 0,
        };
        p.part.iter_mut().zip(heads).for_each(|(to, (part, _))| *to = part);
        let rows: u32 = p.part.iter().map(|h| h.x.rows).sum();
        let most = p.part.iter().map(|h| h.x.cols / p.head_dim).max().unwrap_or(0);
        let grid = [rows.div_ceil(abi::KL_NORM_THREADS / 32), most.div_ceil(abi::KL_HEADS_PER_WARP), 1];
        self.kernels.launch(Kernel::HeadNorm, grid, &p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fill_the_machine() {
        // A single block of klein 4B at 1024x1024: thousands of blocks either way, so the tile that reads less.
        assert_eq!(pick_tile(&[(4608, 216)], 132), Tile::Rows128);
        // Its output projection: 864 blocks of 128 rows take four rounds, 1728 of 64 rows five smaller ones, which is no gain.
        assert_eq!(pick_tile(&[(4608, 24)], 132), Tile::Rows128);
        // The text encoder's 512 rows: 4 by 20 blocks leave most of the machine idle.
        assert_eq!(pick_tile(&[(512, 20)], 132), Tile::Rows64);
        // A handful of rows, as modulations have.
        assert_eq!(pick_tile(&[(5, 144)], 132), Tile::Rows64);
        // Both streams of a double block together.
        assert_eq!(pick_tile(&[(512, 72), (4096, 72)], 132), Tile::Rows128);
        assert_eq!(pick_tile(&[], 0), Tile::Rows128);
    }
}
