//! From an op to launches: descriptors become parameters, shapes become grids. Which kernel an op takes is decided here, from
//! its shapes alone.

use super::super::{Access, Conv, GatedProduct, GroupNorm, LatentStats, Op, Product, Sampling};
use super::abi::{self, KlMat};
use super::attention::Attended;
use super::gemm::{Job, aligned};
use super::launch::Kernel;
use super::{Choice, Cuda, Rows, Tile};
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

pub(super) const fn dtype(dtype: DType) -> u32 {
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
pub(super) fn in_words(m: &KlMat) -> bool {
    m.data.is_multiple_of(4) && m.stride.is_multiple_of(2)
}

/// Blocks for a product of `rows` by `cols`.
pub(super) fn tiles(m: &KlMat) -> [u32; 3] {
    [m.rows.div_ceil(abi::KL_NAIVE_TILE), m.cols.div_ceil(abi::KL_NAIVE_TILE), 1]
}

/// Whether rows of that type can be taken [`VECTOR`] values at a time.
fn in_vectors(m: &KlMat, dtype: u32) -> bool {
    let bytes = if dtype == abi::KL_F32 { 4 } else { 2 };
    let rows = m.rows <= 1 || (m.stride * bytes).is_multiple_of(16);
    m.dtype == dtype && m.data.is_multiple_of(16) && rows && m.cols.is_multiple_of(VECTOR)
}

/// Most columns that the row norms but the last take; that takes any number, of any type at any address.
const ROW_LIMITS: [u32; 5] = [1024, 2048, 3072, 4096, 8192];
const RMS_NORMS: [Kernel; 6] =
    [Kernel::RmsNorm1024, Kernel::RmsNorm2048, Kernel::RmsNorm3072, Kernel::RmsNorm4096, Kernel::RmsNorm8192, Kernel::RmsNormAny];
const LAYER_NORMS: [Kernel; 6] = [
    Kernel::LayerNorm1024,
    Kernel::LayerNorm2048,
    Kernel::LayerNorm3072,
    Kernel::LayerNorm4096,
    Kernel::LayerNorm8192,
    Kernel::LayerNormAny,
];

/// The norm for rows of so many columns, and how many of them a block takes.
fn row_norm(norms: [Kernel; 6], cols: u32, in_vectors: bool) -> (Kernel, u32) {
    match ROW_LIMITS.iter().position(|most| in_vectors && cols <= *most) {
        Some(i) => (norms[i], abi::KL_NORM_ROWS),
        None => (norms[ROW_LIMITS.len()], 1),
    }
}

/// How often a block of a group kernel has to take pixels, if it is alone: as many at once as it has threads for.
fn group_rounds(x: &KlMat, in_vectors: bool) -> u32 {
    let runs = if in_vectors { x.cols / VECTOR } else { x.cols };
    x.rows.div_ceil((abi::KL_GROUP_THREADS / runs.max(1)).max(1))
}

fn check_groups(op: &'static str, groups: u32) -> Result<()> {
    if groups > abi::KL_GROUPS {
        return Err(Error::Op { op, what: format!("{groups} groups, at most {}", abi::KL_GROUPS) });
    }
    Ok(())
}

/// The kernels an op may launch, for people: the fast ones first, then those for other types and odd addresses.
pub fn kernels_of(op: &str) -> &'static [Kernel] {
    match op {
        "embed" => &[Kernel::Embed],
        "copy" | "silu" => &[Kernel::Map],
        "rms_norm" => &RMS_NORMS,
        "layer_norm_modulate" => &LAYER_NORMS,
        "linear" | "linear_swiglu" | "linear_gate_residual" => &[
            Kernel::GemmSm90Large,
            Kernel::GemmSm90Square,
            Kernel::GemmSm90Wide,
            Kernel::GemmSm90Broad,
            Kernel::GemmSm90Medium,
            Kernel::GemmSm90Narrow,
            Kernel::GemmMma256,
            Kernel::GemmMma128,
            Kernel::GemmMma64,
            Kernel::NaiveGemm,
        ],
        "qkv_norm_rope" | "qkv_mlp" => &[
            Kernel::GemmSm90Wide,
            Kernel::GemmMma256,
            Kernel::GemmMma128,
            Kernel::GemmMma64,
            Kernel::NaiveGemm,
            Kernel::QkNormRope,
        ],
        "attention" | "attention_causal" => &[
            Kernel::AttentionSm90,
            Kernel::AttentionSm90Running,
            Kernel::AttentionSm90Causal,
            Kernel::AttentionMma,
            Kernel::AttentionWide64,
            Kernel::AttentionWide32,
            Kernel::NaiveAttention,
        ],
        "conv" => &[
            Kernel::ConvMma256,
            Kernel::ConvMma128,
            Kernel::ConvStats,
            Kernel::NaiveConv,
            Kernel::GroupStats8,
            Kernel::GroupStatsAny,
            Kernel::GroupStatsFinish,
        ],
        "group_norm" => &[Kernel::GroupStats8, Kernel::GroupNorm8, Kernel::GroupStatsAny, Kernel::GroupNormAny],
        "patchify" => &[Kernel::Patchify],
        "unpatchify" => &[Kernel::Unpatchify],
        "euler" => &[Kernel::Euler],
        "guidance" => &[Kernel::Guidance],
        "non_finite" => &[Kernel::Count],
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
                let fit = [p.out, p.x].iter().all(|m| in_vectors(m, abi::KL_BF16)) && in_vectors(&p.weight, abi::KL_F32);
                let (kernel, rows) = row_norm(RMS_NORMS, p.x.cols, fit);
                self.kernels.launch(kernel, [p.x.rows.div_ceil(rows), 1, 1], &p)
            }
            Op::LayerNormModulate { streams, eps } => {
                const ABSENT: abi::KlModulated = abi::KlModulated { out: NONE, x: NONE, shift: NONE, scale: NONE };
                for pair in streams.chunks(abi::KL_STREAMS as usize) {
                    let mut p = abi::KlLayerNorm { stream: [ABSENT; abi::KL_STREAMS as usize], eps, unused: 0 };
                    for (to, s) in p.stream.iter_mut().zip(pair) {
                        *to = abi::KlModulated { out: mat(s.out)?, x: mat(s.x)?, shift: mat(s.shift)?, scale: mat(s.scale)? };
                    }
                    let cols = p.stream[0].x.cols;
                    let fit = p.stream[..pair.len()]
                        .iter()
                        .all(|s| s.x.cols == cols && [s.out, s.x, s.shift, s.scale].iter().all(|m| in_vectors(m, abi::KL_BF16)));
                    let (kernel, rows) = row_norm(LAYER_NORMS, cols, fit);
                    let blocks = p.stream.iter().map(|s| s.x.rows.div_ceil(rows)).sum();
                    self.kernels.launch(kernel, [blocks, 1, 1], &p)?;
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
            Op::Attention { out, q, kv, head_dim, causal, scale, bound } => {
                self.attention(name, mat(out)?, mat(q)?, &Attended { kv, head_dim, causal, scale, bound })
            }
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
                let groups = groups as u32;
                check_groups(name, groups)?;
                let (x, own) = (mat(x)?, stats.is_none());
                let p = abi::KlGroupNorm {
                    out: mat(out)?,
                    x,
                    weight: mat(weight)?,
                    bias: mat(bias)?,
                    stats: self.mat_if(stats, name)?,
                    partials: self.partials(),
                    blocks: if own { self.group_sums(x, groups)? } else { 0 },
                    groups,
                    eps,
                    silu: u32::from(silu),
                };
                let fit = [p.out, x].iter().all(|m| in_vectors(m, abi::KL_BF16))
                    && [p.weight, p.bias].iter().all(|m| in_vectors(m, abi::KL_F32));
                // As many blocks as run at once, since each begins with the statistics; and a batch of pixels for each thread.
                let blocks = group_rounds(&x, fit).div_ceil(4).min(3 * self.device().multiprocessors);
                self.kernels.launch(if fit { Kernel::GroupNorm8 } else { Kernel::GroupNormAny }, [blocks, 1, 1], &p)
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
                let p = abi::KlCount { count: mat(count)?, x, words: self.counts() };
                // As many blocks as run at once, and a batch of loads for each thread.
                let most = 8 * self.device().multiprocessors;
                let (bytes, batch) =
                    (if x.dtype == abi::KL_F32 { 4 } else { 2 }, abi::KL_POINTWISE_THREADS * abi::KL_COUNT_BATCH * 16);
                let columns = x.cols.div_ceil(batch / bytes).clamp(1, most);
                self.kernels.launch(Kernel::Count, [columns, x.rows.clamp(1, most.div_ceil(columns)), 1], &p)
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
        let cols = p.out.cols.div_ceil(abi::KL_MMA_COLS);
        let large = self.takes_large(Kernel::ConvMma256, p.out.rows.div_ceil(Tile::Rows256.spec().rows) * cols);
        let (kernel, tile) = if large { (Kernel::ConvMma256, Tile::Rows256) } else { (Kernel::ConvMma128, Tile::Rows128) };
        (p.row_tiles, p.partials) = (p.out.rows.div_ceil(tile.spec().rows), self.left().1);
        // With statistics on the way where tiles are whole, groups divide them and there is room for every tile's share.
        let on_the_way = |stats: &KlMat| {
            let room = u64::from(p.row_tiles) * u64::from(stats.rows) * 16 <= self.scratch_size().sums();
            let residual = p.residual.data == 0 || p.residual.dtype == abi::KL_BF16 && in_words(&p.residual);
            let width = p.out.cols / stats.rows;
            let whole = p.out.cols.is_multiple_of(abi::KL_MMA_COLS) && width >= 2 && abi::KL_MMA_COLS.is_multiple_of(width);
            p.out.dtype == abi::KL_BF16 && residual && room && whole
        };
        let fused = stats.filter(on_the_way);
        if let Some(stats) = fused {
            (p.stats, p.groups) = (stats, stats.rows);
        }
        self.kernels.launch(kernel, [p.row_tiles * cols, 1, 1], &p)?;
        match stats {
            None => Ok(()),
            Some(_) if fused.is_some() => self.kernels.launch(Kernel::ConvStats, [p.groups, 1, 1], &p),
            Some(stats) => self.group_stats(op, p.out, stats),
        }
    }

    /// Whether a kernel with large blocks is taken, so many of them: not if it would leave multiprocessors without work.
    pub(super) fn takes_large(&self, kernel: Kernel, blocks: u32) -> bool {
        let wanted = match self.choice {
            Choice::Tile(tile) => tile == Tile::Rows256,
            Choice::Best | Choice::Naive => blocks >= self.device().multiprocessors,
        };
        wanted && self.kernels.has(kernel)
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

    /// Mean and variance of each group of channels of `x`.
    fn group_stats(&self, op: &'static str, x: KlMat, stats: KlMat) -> Result<()> {
        let groups = stats.rows;
        check_groups(op, groups)?;
        let blocks = u64::from(self.group_sums(x, groups)?);
        let p = abi::KlGroupStats { x, stats, partials: self.partials(), blocks, groups, unused: 0 };
        self.kernels.launch(Kernel::GroupStatsFinish, [1, 1, 1], &p)
    }

    /// The sums they are made of, by how many blocks it says. A matter of shapes and the GPU alone, so sums are always cut alike.
    fn group_sums(&self, x: KlMat, groups: u32) -> Result<u32> {
        let fit = in_vectors(&x, abi::KL_BF16);
        // Few blocks, since whoever finishes reads what all of them leave; and a batch of pixels for each thread.
        let most = (2 * self.device().multiprocessors).min(abi::KL_PARTIALS);
        let blocks = group_rounds(&x, fit).div_ceil(8).clamp(1, most);
        let p = abi::KlGroupStats { x, stats: NONE, partials: self.partials(), blocks: u64::from(blocks), groups, unused: 0 };
        self.kernels.launch(if fit { Kernel::GroupStats8 } else { Kernel::GroupStatsAny }, [blocks, 1, 1], &p)?;
        Ok(blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_norms_fit_their_rows() {
        let rms = |cols| row_norm(RMS_NORMS, cols, true);
        // Each takes what is too wide for the one before it: only then does a thread miss its last vector at most.
        assert_eq!([8, 1024, 1032, 2560].map(|cols| rms(cols).0), [0, 0, 1, 2].map(|i| RMS_NORMS[i]));
        assert_eq!([3072, 4096, 4104, 8192].map(|cols| rms(cols).0), [2, 3, 4, 4].map(|i| RMS_NORMS[i]));
        assert_eq!(rms(8200), (Kernel::RmsNormAny, 1));
        assert_eq!(row_norm(LAYER_NORMS, 3072, true), (Kernel::LayerNorm3072, 2));
        assert_eq!(row_norm(LAYER_NORMS, 3072, false), (Kernel::LayerNormAny, 1));
    }

    #[test]
    fn vectors_are_whole_and_aligned() {
        let m = KlMat { data: 1 << 20, stride: 3072, rows: 5, cols: 3072, dtype: abi::KL_BF16, unused: 0 };
        let bf16 = |m: KlMat| in_vectors(&m, abi::KL_BF16);
        assert!(bf16(m) && bf16(KlMat { stride: 3080, ..m }) && bf16(KlMat { stride: 3073, rows: 1, ..m }));
        assert!(!bf16(KlMat { stride: 3076, ..m }) && in_vectors(&KlMat { stride: 3076, dtype: abi::KL_F32, ..m }, abi::KL_F32));
        assert!(!bf16(KlMat { data: m.data + 8, ..m }) && !bf16(KlMat { cols: 3068, ..m }));
        assert!(!bf16(KlMat { dtype: abi::KL_F32, ..m }));
    }
}
