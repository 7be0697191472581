//! From an op to launches: descriptors become parameters, shapes become grids. Which kernel an op takes is decided here, from
//! its shapes alone.

use super::super::{Access, Conv, GatedProduct, GroupNorm, KeyValues, LatentStats, Op, Product, Sampling};
use super::abi::{self, KlMat};
use super::gemm::{Job, Tile, aligned};
use super::launch::Kernel;
use super::{Choice, Cuda, Rows};
use crate::error::{Error, Result};
use crate::tensor::{DType, Region, Tensor};

/// Values that a thread of an element-wise kernel moves at once.
const VECTOR: u32 = 8;
/// Blocks along y and z are numbered by sixteen bits.
const GRID_LIMIT: u32 = 65_535;
/// Rows and columns are 32-bit numbers in the kernels.
const SIDE_LIMIT: usize = u32::MAX as usize;

/// A matrix that is not there.
pub(super) const NONE: KlMat = KlMat { data: 0, stride: 0, rows: 0, cols: 0, dtype: 0, unused: 0 };

const fn dtype(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => abi::KL_F32,
        DType::Bf16 => abi::KL_BF16,
        DType::F16 => abi::KL_F16,
        DType::U32 => abi::KL_U32,
        DType::U8 => abi::KL_U8,
    }
}

/// Matrices of one shape as one long row each, if none has gaps.
fn flat<const N: usize>(mut mats: [KlMat; N]) -> [KlMat; N] {
    let whole =
        |m: &KlMat| (m.rows <= 1 || m.stride == u64::from(m.cols)) && u64::from(m.rows) * u64::from(m.cols) <= SIDE_LIMIT as u64;
    if mats.iter().all(whole) {
        for m in &mut mats {
            *m = KlMat { cols: m.rows * m.cols, rows: m.rows.min(1), stride: u64::from(m.rows * m.cols), ..*m };
        }
    }
    mats
}

/// Blocks for an element-wise kernel: columns along x, rows along y.
fn elements(m: &KlMat) -> [u32; 3] {
    [m.cols.div_ceil(abi::KL_POINTWISE_THREADS * VECTOR), m.rows.min(GRID_LIMIT), 1]
}

/// Whether values of two bytes can be read and written in pairs.
fn in_words(m: &KlMat) -> bool {
    m.data.is_multiple_of(4) && m.stride.is_multiple_of(2)
}

/// Blocks for a product of `rows` by `cols`.
pub(super) fn tiles(m: &KlMat) -> [u32; 3] {
    [m.rows.div_ceil(abi::KL_NAIVE_TILE), m.cols.div_ceil(abi::KL_NAIVE_TILE), 1]
}

/// Pixels that a block of a group kernel takes at once.
fn group_pixels(x: &KlMat) -> u32 {
    let runs = if x.cols.is_multiple_of(VECTOR) { x.cols / VECTOR } else { x.cols };
    (abi::KL_GROUP_THREADS / runs.max(1)).max(1)
}

/// The kernels an op may launch, for people: the fast ones first, then those for other types and odd addresses.
pub fn kernels_of(op: &str) -> &'static [Kernel] {
    match op {
        "embed" => &[Kernel::Embed],
        "copy" | "silu" => &[Kernel::Map],
        "rms_norm" => &[Kernel::RmsNorm],
        "layer_norm_modulate" => &[Kernel::LayerNorm],
        "linear" | "linear_swiglu" | "linear_gate_residual" => {
            &[Kernel::GemmMma256, Kernel::GemmMma128, Kernel::GemmMma64, Kernel::NaiveProduct]
        }
        "qkv_norm_rope" | "qkv_mlp" => {
            &[Kernel::GemmMma256, Kernel::GemmMma128, Kernel::GemmMma64, Kernel::NaiveProduct, Kernel::HeadNorm]
        }
        "attention" | "attention_causal" => {
            &[Kernel::AttentionMma, Kernel::AttentionWide64, Kernel::AttentionWide32, Kernel::NaiveAttention]
        }
        "conv" => &[
            Kernel::ConvMma256,
            Kernel::ConvMma128,
            Kernel::ConvStats,
            Kernel::NaiveConv,
            Kernel::GroupStats,
            Kernel::GroupStatsFinish,
        ],
        "group_norm" => &[Kernel::GroupStats, Kernel::GroupStatsFinish, Kernel::GroupNorm],
        "patchify" => &[Kernel::Patchify],
        "unpatchify" => &[Kernel::Unpatchify],
        "euler" => &[Kernel::Euler],
        "guidance" => &[Kernel::Guidance],
        "non_finite" => &[Kernel::Count, Kernel::CountFinish],
        "pixels" => &[Kernel::Pixels],
        _ => &[],
    }
}

impl Cuda {
    pub(super) fn mat(&self, t: Tensor, op: &'static str) -> Result<KlMat> {
        let Rows { address, .. } = self.rows(t, op)?;
        if t.rows > SIDE_LIMIT || t.cols > SIDE_LIMIT {
            return Err(Error::Op { op, what: format!("{t:?} is too large for the GPU") });
        }
        Ok(KlMat {
            data: address,
            stride: t.stride as u64,
            rows: t.rows as u32,
            cols: t.cols as u32,
            dtype: dtype(t.dtype),
            unused: 0,
        })
    }

    /// The same for an operand that need not be there.
    pub(super) fn mat_if(&self, t: Option<Tensor>, op: &'static str) -> Result<KlMat> {
        t.map_or(Ok(NONE), |t| self.mat(t, op))
    }

    /// Runs one op whose operands fit each other.
    pub(super) fn dispatch(&self, op: Op<'_>) -> Result<()> {
        let name = op.name();
        let mut written = Ok(());
        op.operands(&mut |t, access| {
            let f16 = t.dtype == DType::F16 && t.region == Region::Arena;
            if (access != Access::Read && t.region != Region::Arena) || f16 {
                written = Err(Error::Op { op: name, what: format!("{t:?} cannot be used so on the GPU") });
            }
        });
        written?;
        let mat = |t: Tensor| self.mat(t, name);
        match op {
            Op::Embed { out, ids, table } => {
                let p = abi::KlEmbed { out: mat(out)?, ids: mat(ids)?, table: mat(table)?, fault: self.faults() };
                self.kernels.launch(Kernel::Embed, elements(&p.out), &p)
            }
            Op::Copy { out, x } => self.map(abi::KL_COPY, mat(out)?, mat(x)?),
            Op::Silu { out, x } => self.map(abi::KL_SILU, mat(out)?, mat(x)?),
            Op::RmsNorm { out, x, weight, eps } => {
                let p = abi::KlRmsNorm { out: mat(out)?, x: mat(x)?, weight: mat(weight)?, eps, unused: 0 };
                self.kernels.launch(Kernel::RmsNorm, [p.x.rows.div_ceil(abi::KL_NORM_ROWS), 1, 1], &p)
            }
            Op::LayerNormModulate { streams, eps } => {
                const ABSENT: abi::KlModulated = abi::KlModulated { out: NONE, x: NONE, shift: NONE, scale: NONE };
                for pair in streams.chunks(abi::KL_STREAMS as usize) {
                    let mut p = abi::KlLayerNorm { stream: [ABSENT; abi::KL_STREAMS as usize], eps, unused: 0 };
                    for (to, s) in p.stream.iter_mut().zip(pair) {
                        *to = abi::KlModulated { out: mat(s.out)?, x: mat(s.x)?, shift: mat(s.shift)?, scale: mat(s.scale)? };
                        if s.shift.dtype != s.scale.dtype {
                            return Err(Error::Op { op: name, what: "shift and scale of different types".into() });
                        }
                    }
                    let blocks = p.stream.iter().map(|s| s.x.rows.div_ceil(abi::KL_NORM_ROWS)).sum();
                    self.kernels.launch(Kernel::LayerNorm, [blocks, 1, 1], &p)?;
                }
                Ok(())
            }
            Op::Linear(streams) => {
                let job = |s: &Product<'_>| Job { out: s.out, x: s.x, w: *s.w, epilogue: abi::KL_STORE, gate: None };
                self.products(name, &streams.iter().map(job).collect::<Vec<_>>())
            }
            Op::LinearSwiglu(streams) => {
                let job = |s: &Product<'_>| Job { out: s.out, x: s.x, w: *s.w, epilogue: abi::KL_SWIGLU, gate: None };
                self.products(name, &streams.iter().map(job).collect::<Vec<_>>())
            }
            Op::LinearGateResidual(streams) => {
                let job =
                    |s: &GatedProduct<'_>| Job { out: s.into, x: s.x, w: *s.w, epilogue: abi::KL_GATE_RESIDUAL, gate: s.gate };
                self.products(name, &streams.iter().map(job).collect::<Vec<_>>())
            }
            Op::Qkv(streams) => self.qkv(name, streams),
            Op::Attention { out, q, kv, head_dim, causal } => self.attention(name, mat(out)?, mat(q)?, kv, head_dim, causal),
            Op::Conv { out, x, w, width, height, sampling, residual, stats } => {
                let Conv { weight, bias } = *w;
                let p = abi::KlConv {
                    out: mat(out)?,
                    x: mat(x)?,
                    w: mat(weight)?,
                    bias: mat(bias)?,
                    residual: self.mat_if(residual, name)?,
                    stats: NONE,
                    partials: 0,
                    row_tiles: 0,
                    groups: 0,
                    width: width as u32,
                    height: height as u32,
                    sampling: match sampling {
                        Sampling::Same => abi::KL_SAME,
                        Sampling::Up => abi::KL_UP,
                        Sampling::Down => abi::KL_DOWN,
                    },
                    unused: 0,
                };
                self.conv(name, p, stats.map(mat).transpose()?)
            }
            Op::GroupNorm { out, x, norm, stats, silu } => {
                let GroupNorm { weight, bias, groups, eps } = *norm;
                let x = mat(x)?;
                let stats = match stats {
                    Some(stats) => mat(stats)?,
                    None => {
                        // Beside the word of faults.
                        let own = KlMat {
                            data: self.faults() + 64,
                            stride: 2,
                            rows: groups as u32,
                            cols: 2,
                            dtype: abi::KL_F32,
                            unused: 0,
                        };
                        self.group_stats(name, x, own)?;
                        own
                    }
                };
                let p = abi::KlGroupNorm {
                    out: mat(out)?,
                    x,
                    weight: mat(weight)?,
                    bias: mat(bias)?,
                    stats,
                    groups: groups as u32,
                    eps,
                    silu: u32::from(silu),
                    unused: 0,
                };
                // Long-lived blocks, since each begins by reading what belongs to its channels; but enough of them for any GPU.
                let rounds = x.rows.div_ceil(group_pixels(&x));
                let blocks = rounds.div_ceil((rounds / 1024).clamp(4, 32));
                self.kernels.launch(Kernel::GroupNorm, [blocks, 1, 1], &p)
            }
            Op::Patchify { out, x, stats, width } => self.patch(Kernel::Patchify, mat(out)?, mat(x)?, stats, width),
            Op::Unpatchify { out, x, stats, width } => self.patch(Kernel::Unpatchify, mat(x)?, mat(out)?, stats, width),
            Op::Euler { latents, velocity, dt } => {
                let [latents, velocity] = flat([mat(latents)?, mat(velocity)?]);
                self.kernels.launch(Kernel::Euler, elements(&latents), &abi::KlEuler { latents, velocity, dt, unused: 0 })
            }
            Op::Guidance { out, cond, uncond, scale } => {
                let [out, cond, uncond] = flat([mat(out)?, mat(cond)?, mat(uncond)?]);
                self.kernels.launch(Kernel::Guidance, elements(&out), &abi::KlGuidance { out, cond, uncond, scale, unused: 0 })
            }
            Op::NonFinite { count, x } => {
                let [x] = flat([mat(x)?]);
                // Few enough blocks in all for the list of partial results.
                let limit = if x.rows > 1 { abi::KL_PARTIALS.isqrt() } else { abi::KL_PARTIALS };
                let grid = [x.cols.div_ceil(abi::KL_POINTWISE_THREADS * VECTOR).clamp(1, limit), x.rows.clamp(1, limit), 1];
                let blocks = u64::from(grid[0]) * u64::from(grid[1]);
                let p = abi::KlCount { count: mat(count)?, x, partials: self.partials(), blocks };
                self.kernels.launch(Kernel::Count, grid, &p)?;
                self.kernels.launch(Kernel::CountFinish, [1, 1, 1], &p)
            }
            Op::Pixels { out, x } => {
                let [out, x] = flat([mat(out)?, mat(x)?]);
                self.kernels.launch(Kernel::Pixels, elements(&out), &abi::KlPixels { out, x })
            }
        }
    }

    fn conv(&self, op: &'static str, mut p: abi::KlConv, stats: Option<KlMat>) -> Result<()> {
        let sides = p.width.max(p.height) * if p.sampling == abi::KL_UP { 2 } else { 1 };
        if self.choice == Choice::Naive || !aligned(&p.x) || !aligned(&p.w) || sides > abi::KL_CONV_SIDE {
            self.kernels.launch(Kernel::NaiveConv, tiles(&p.out), &p)?;
            return stats.map_or(Ok(()), |stats| self.group_stats(op, p.out, stats));
        }
        let (kernel, tile) = self.conv_tile(&p.out);
        (p.row_tiles, p.partials) = (p.out.rows.div_ceil(tile.rows()), self.left().1);
        let grid = [p.row_tiles * p.out.cols.div_ceil(abi::KL_MMA_COLS), 1, 1];
        // With statistics on the way where tiles are whole, groups divide them and there is room for every tile's share.
        let Some(stats) = stats else { return self.kernels.launch(kernel, grid, &p) };
        let room = u64::from(p.row_tiles) * u64::from(stats.rows) * 16 <= self.scratch_size().sums();
        let width = p.out.cols / stats.rows;
        let pairs =
            p.out.dtype == abi::KL_BF16 && (p.residual.data == 0 || p.residual.dtype == abi::KL_BF16 && in_words(&p.residual));
        if !pairs || !room || !p.out.cols.is_multiple_of(abi::KL_MMA_COLS) || width < 2 || !abi::KL_MMA_COLS.is_multiple_of(width)
        {
            self.kernels.launch(kernel, grid, &p)?;
            return self.group_stats(op, p.out, stats);
        }
        (p.stats, p.groups) = (stats, stats.rows);
        self.kernels.launch(kernel, grid, &p)?;
        self.kernels.launch(Kernel::ConvStats, [p.groups, 1, 1], &p)
    }

    /// The tile for a convolution: the large one, unless it would leave multiprocessors without work.
    fn conv_tile(&self, out: &KlMat) -> (Kernel, Tile) {
        let tiles = out.rows.div_ceil(Tile::Rows256.rows()) * out.cols.div_ceil(abi::KL_MMA_COLS);
        let large = match self.choice {
            Choice::Tile(tile) => tile == Tile::Rows256,
            Choice::Best | Choice::Naive => tiles >= self.device().multiprocessors,
        };
        if large && self.kernels.has(Kernel::ConvMma256) {
            (Kernel::ConvMma256, Tile::Rows256)
        } else {
            (Kernel::ConvMma128, Tile::Rows128)
        }
    }

    fn map(&self, function: u32, out: KlMat, x: KlMat) -> Result<()> {
        let [out, x] = flat([out, x]);
        self.kernels.launch(Kernel::Map, elements(&out), &abi::KlMap { out, x, function, unused: 0 })
    }

    fn patch(&self, kernel: Kernel, tokens: KlMat, pixels: KlMat, stats: &LatentStats, width: usize) -> Result<()> {
        let (mean, var) = (self.mat(stats.mean, "patchify")?, self.mat(stats.var, "patchify")?);
        let p = abi::KlPatch { tokens, pixels, mean, var, width: width as u32, eps: stats.eps };
        self.kernels.launch(kernel, elements(&tokens), &p)
    }

    fn attention(&self, op: &'static str, out: KlMat, q: KlMat, kv: &[KeyValues], head_dim: usize, causal: bool) -> Result<()> {
        let limits = kv.len() <= abi::KL_SEGMENTS as usize && head_dim <= abi::KL_HEAD_DIM as usize;
        if !limits || kv.iter().any(|s| s.k.dtype != s.v.dtype || dtype(s.k.dtype) != q.dtype) {
            let what = format!("{} runs of keys, heads of {head_dim}, or mixed types", kv.len());
            return Err(Error::Op { op, what });
        }
        const ABSENT: abi::KlKeyValues = abi::KlKeyValues { k: NONE, v: NONE };
        let mut p = abi::KlAttention {
            out,
            q,
            kv: [ABSENT; abi::KL_SEGMENTS as usize],
            segments: kv.len() as u32,
            head_dim: head_dim as u32,
            group: (q.cols as usize / kv[0].k.cols) as u32,
            causal: u32::from(causal),
            scale: 1.0 / (head_dim as f32).sqrt(),
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
                return self.kernels.launch(Kernel::AttentionMma, [q.rows.div_ceil(abi::KL_ATTENTION_QUERIES), heads, 1], &p);
            }
            if head_dim == abi::KL_WIDE_HEAD as usize && kv.len() == 1 && !causal && p.kv[0].k.rows > 0 {
                let (kernel, queries) = self.wide_block(q.rows * heads);
                return self.kernels.launch(kernel, [q.rows.div_ceil(queries), heads, 1], &p);
            }
        }
        self.kernels.launch(Kernel::NaiveAttention, [q.rows.div_ceil(abi::KL_ATTENTION_WARPS), heads, 1], &p)
    }

    /// The kernel for wide heads, and how many queries a block of it takes: fewer where the larger would leave multiprocessors without
    /// work.
    fn wide_block(&self, queries: u32) -> (Kernel, u32) {
        let large = match self.choice {
            Choice::Tile(tile) => tile == Tile::Rows256,
            Choice::Best | Choice::Naive => queries >= 64 * self.device().multiprocessors,
        };
        if large && self.kernels.has(Kernel::AttentionWide64) {
            (Kernel::AttentionWide64, 64)
        } else {
            (Kernel::AttentionWide32, 32)
        }
    }

    /// Mean and variance of each group of channels of `x`.
    fn group_stats(&self, op: &'static str, x: KlMat, stats: KlMat) -> Result<()> {
        let groups = stats.rows;
        if groups > abi::KL_GROUPS {
            return Err(Error::Op { op, what: format!("{groups} groups, at most {}", abi::KL_GROUPS) });
        }
        // Sixteen rounds each, as far as there is room for partial results. A matter of shapes alone, so sums are always cut alike.
        let blocks = x.rows.div_ceil(group_pixels(&x) * 16).clamp(1, abi::KL_PARTIALS);
        let p = abi::KlGroupStats { x, stats, partials: self.partials(), blocks: u64::from(blocks), groups, unused: 0 };
        self.kernels.launch(Kernel::GroupStats, [blocks, 1, 1], &p)?;
        self.kernels.launch(Kernel::GroupStatsFinish, [groups, 1, 1], &p)
    }
}
