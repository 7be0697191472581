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
    /// For a handful of rows.
    Rows64,
    /// For GPUs with little shared memory.
    Rows128,
    /// For the rest.
    Rows256,
}

/// Most blocks that a multiprocessor runs at once, of any tile.
pub(super) const RESIDENT: u32 = 3;

impl Tile {
    const ALL: [Self; 3] = [Self::Rows64, Self::Rows128, Self::Rows256];

    pub(super) const fn rows(self) -> u32 {
        match self {
            Self::Rows64 => 64,
            Self::Rows128 => 128,
            Self::Rows256 => 256,
        }
    }

    const fn kernel(self) -> Kernel {
        match self {
            Self::Rows64 => Kernel::GemmMma64,
            Self::Rows128 => Kernel::GemmMma128,
            Self::Rows256 => Kernel::GemmMma256,
        }
    }

    /// How much of the inner dimension is a round.
    const fn inner(self) -> u32 {
        match self {
            Self::Rows64 => abi::KL_MMA_INNER_64,
            Self::Rows128 => abi::KL_MMA_INNER_128,
            Self::Rows256 => abi::KL_MMA_INNER_256,
        }
    }

    /// Blocks of it that a multiprocessor runs at once.
    const fn resident(self) -> u32 {
        match self {
            Self::Rows64 => RESIDENT,
            Self::Rows128 => 2,
            Self::Rows256 => 1,
        }
    }

    /// Time for as much work, as measured: small tiles load each operand more often.
    const fn slowness(self) -> u64 {
        match self {
            Self::Rows64 | Self::Rows128 => 115,
            Self::Rows256 => 100,
        }
    }
}

/// How tiles are dealt out: so many to blocks of their own, the rest shared by workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    whole: u32,
    workers: u32,
}

/// Deals `tiles` of `rounds` each to as many blocks as run at once. Rather than leave a last round of blocks half empty, the last two
/// are shared.
pub fn deal(tiles: u32, rounds: u32, slots: u32) -> Deal {
    /// Below this a worker's share is not worth starting it.
    const LEAST_ROUNDS: u64 = 4;
    let full = tiles / slots.max(1);
    let shared = tiles - full.saturating_sub(1) * slots;
    let workers = (u64::from(shared) * u64::from(rounds) / LEAST_ROUNDS).min(u64::from(slots)) as u32;
    let even = tiles.is_multiple_of(slots.max(1));
    if even || (full == 0 && workers <= tiles) {
        Deal { whole: tiles, workers: 0 }
    } else {
        Deal { whole: tiles - shared, workers }
    }
}

/// The tile for products of so many rows, each with so many tiles of columns, over an inner dimension of `inner`: the one that keeps a
/// multiprocessor busy for the least time.
pub fn pick_tile(products: &[(u32, u32)], inner: u32, multiprocessors: u32, can: impl Fn(Tile) -> bool) -> Tile {
    let multiprocessors = multiprocessors.max(1);
    let cost = |tile: Tile| {
        let tiles: u32 = products.iter().map(|(rows, cols)| rows.div_ceil(tile.rows()) * cols).sum();
        let slots = tile.resident() * multiprocessors;
        let Deal { whole, workers } = deal(tiles, inner.div_ceil(tile.inner()), slots);
        let one = u64::from(inner) * u64::from(tile.rows()) * tile.slowness();
        if workers == 0 {
            // The last round of blocks takes as long as a full one.
            return u64::from(tiles.div_ceil(slots) * tile.resident()) * one;
        }
        // Adding up what workers leave takes a fixed time and some for each row, as measured.
        let parts = u64::from(workers / (tiles - whole).max(1));
        u64::from(tiles) * one / u64::from(multiprocessors) + parts * u64::from(128 + tile.rows()) * 64 * 100
    };
    Tile::ALL.into_iter().rev().filter(|&tile| can(tile)).min_by_key(|&tile| cost(tile)).unwrap_or(Tile::Rows128)
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
        let (multiprocessors, inner) = (self.device().multiprocessors, streams.iter().map(|s| s.x.cols).max().unwrap_or(0));
        let can = |tile: Tile| self.kernels.has(tile.kernel());
        let tile = match self.choice {
            Choice::Tile(tile) if can(tile) => tile,
            _ => pick_tile(&sizes, inner, multiprocessors, can),
        };
        let (flags, left) = self.left();
        let rounds = inner.div_ceil(tile.inner());
        let mut p =
            abi::KlGemm { stream: [NO_STREAM; abi::KL_STREAMS as usize], left, flags, rounds, whole: 0, share: 0, extra: 0 };
        for (to, s) in p.stream.iter_mut().zip(streams) {
            *to = KlGemmStream { row_tiles: s.x.rows.div_ceil(tile.rows()), ..*s };
        }
        let tiles = p.stream.iter().map(|s| s.row_tiles * s.col_tiles).sum();
        // Shares are counted in rounds, of which all tiles must have as many.
        let alike = streams.iter().all(|s| s.x.cols == inner);
        let dealt =
            if alike { deal(tiles, rounds, tile.resident() * multiprocessors) } else { Deal { whole: tiles, workers: 0 } };
        let shared = (tiles - dealt.whole) * rounds;
        p.whole = dealt.whole;
        // Without workers there is nothing to share.
        p.share = shared.checked_div(dealt.workers).unwrap_or(0);
        p.extra = shared.checked_rem(dealt.workers).unwrap_or(0);
        self.kernels.launch(tile.kernel(), [dealt.whole + dealt.workers, 1, 1], &p)
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
    fn tiles_fit_the_product() {
        let h200 = |products: &[(u32, u32)], inner| pick_tile(products, inner, 132, |_| true);
        // A single block of klein 4B at 1024x1024 and its output projection; both streams of a double block.
        assert_eq!(h200(&[(4608, 216)], 3072), Tile::Rows256);
        assert_eq!(h200(&[(4608, 24)], 12288), Tile::Rows256);
        assert_eq!(h200(&[(512, 72), (4096, 72)], 3072), Tile::Rows256);
        // The text encoder's 512 rows: few tiles, but a long inner dimension to share.
        assert_eq!(h200(&[(512, 20)], 9728), Tile::Rows256);
        // The last layer is so narrow that adding up would take longer than the product.
        assert_eq!(h200(&[(4608, 1)], 3072), Tile::Rows64);
        // A handful of rows, as modulations have.
        assert_eq!(h200(&[(5, 144)], 3072), Tile::Rows64);
        assert_eq!(h200(&[], 0), Tile::Rows256);
        // Without room for the large tile.
        assert_eq!(pick_tile(&[(4608, 216)], 3072, 128, |tile| tile != Tile::Rows256), Tile::Rows128);
        assert_eq!(pick_tile(&[(4608, 216)], 3072, 0, |_| false), Tile::Rows128);
    }

    #[test]
    fn every_round_is_dealt_once() {
        // Even, no more than fits, too short to share: everyone has a tile.
        assert_eq!(deal(264, 48, 132), Deal { whole: 264, workers: 0 });
        assert_eq!(deal(40, 2, 132), Deal { whole: 40, workers: 0 });
        assert_eq!(deal(0, 48, 132), Deal { whole: 0, workers: 0 });
        // Three rounds of blocks and a quarter: two are whole.
        assert_eq!(deal(432, 48, 132), Deal { whole: 264, workers: 132 });
        assert_eq!(deal(40, 152, 132), Deal { whole: 0, workers: 132 });
        // At least four rounds each.
        assert_eq!(deal(40, 8, 132), Deal { whole: 0, workers: 80 });
        for (tiles, rounds, slots) in [(1, 1, 1), (1, 96, 264), (7, 5, 3), (133, 48, 132), (10_000, 3, 132), (395, 7, 396)] {
            let Deal { whole, workers } = deal(tiles, rounds, slots);
            assert!(workers <= slots && whole <= tiles && (workers > 0 || whole == tiles), "{tiles} {rounds} {slots}");
            // A share is never empty.
            assert!(workers == 0 || (tiles - whole) * rounds >= workers);
        }
    }
}
