//! The tiles that the GEMM kernels are instantiated with.

use crate::backend::cuda::abi;
use crate::backend::cuda::launch::Kernel;

/// The part of the output that a CTA computes at a time, called by its rows and columns (MxN). `Mma` tiles are of the portable kernel
/// (`mma.sync`), `Sm90` tiles of the Hopper kernel (TMA and `wgmma`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// For a handful of rows.
    Mma64x128,
    /// For GPUs with little shared memory.
    Mma128x128,
    /// For every other GPU that is not Hopper.
    Mma256x128,
    /// For large GEMMs.
    Sm90_256x192,
    /// For large GEMMs that 256x192 would leave with a nearly empty last wave.
    Sm90_192x192,
    /// For outputs that consist of whole attention heads of 128 columns.
    Sm90_128x256,
    /// For a few hundred rows.
    Sm90_128x208,
    /// For a few hundred rows where 208 columns would compute more padding.
    Sm90_128x192,
    /// For a few hundred rows of a narrow output, and for a handful of rows: split-K over the two CTAs of a cluster.
    Sm90_128x160,
}

/// What the two CTAs of a cluster have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterMode {
    /// The rows of A, the activations: the cluster is two tiles wide, and each CTA multicasts one half of A to both.
    MulticastA,
    /// The rows of B, the weight: the cluster is two tiles high, and each CTA multicasts one half of B to both.
    MulticastB,
    /// The output tile, for which each CTA computes one half of K. Such clusters are not persistent: each computes one tile.
    SplitK,
}

/// A tile's properties.
#[derive(Clone, Copy, Debug)]
pub struct TileConfig {
    /// Rows.
    pub block_m: u32,
    /// Columns.
    pub block_n: u32,
    /// The part of K that one k-block covers.
    pub block_k: u32,
    /// CTAs that are resident on an SM at the same time.
    pub ctas_per_sm: u32,
    /// How the CTAs of a cluster cooperate; none for the portable kernel, which has no clusters.
    pub cluster: Option<ClusterMode>,
    /// The kernel that computes it.
    pub kernel: Kernel,
    /// Time per multiply-accumulate, in percent of [`Tile::Sm90_256x192`], as measured (bench/LOG.md): small tiles load each
    /// operand more often.
    pub relative_cost: u64,
}

/// Most CTAs that any tile has resident on an SM.
pub const MAX_CTAS_PER_SM: u32 = 3;

/// Most warps of a CTA that store Stream-K partials.
pub const MAX_PARTIAL_WARPS: u32 = 12;

impl Tile {
    /// All tiles.
    pub const ALL: [Self; 9] = [
        Self::Mma64x128,
        Self::Mma128x128,
        Self::Mma256x128,
        Self::Sm90_256x192,
        Self::Sm90_192x192,
        Self::Sm90_128x256,
        Self::Sm90_128x208,
        Self::Sm90_128x192,
        Self::Sm90_128x160,
    ];

    /// Its properties.
    pub const fn config(self) -> TileConfig {
        const fn mma(block_m: u32, block_k: u32, ctas_per_sm: u32, kernel: Kernel, relative_cost: u64) -> TileConfig {
            TileConfig { block_m, block_n: abi::KL_MMA_COLS, block_k, ctas_per_sm, cluster: None, kernel, relative_cost }
        }
        const fn sm90(block_m: u32, block_n: u32, mode: ClusterMode, kernel: Kernel, relative_cost: u64) -> TileConfig {
            let (block_k, cluster) = (abi::KL_SM90_BLOCK_K, Some(mode));
            TileConfig { block_m, block_n, block_k, ctas_per_sm: 1, cluster, kernel, relative_cost }
        }
        match self {
            Self::Mma64x128 => mma(64, abi::KL_MMA_BLOCK_K_64, MAX_CTAS_PER_SM, Kernel::GemmMma64x128, 480),
            Self::Mma128x128 => mma(128, abi::KL_MMA_BLOCK_K_128, 2, Kernel::GemmMma128x128, 480),
            Self::Mma256x128 => mma(256, abi::KL_MMA_BLOCK_K_256, 1, Kernel::GemmMma256x128, 420),
            Self::Sm90_256x192 => sm90(256, 192, ClusterMode::MulticastA, Kernel::GemmSm90_256x192, 100),
            Self::Sm90_192x192 => sm90(192, 192, ClusterMode::MulticastA, Kernel::GemmSm90_192x192, 102),
            Self::Sm90_128x256 => sm90(128, 256, ClusterMode::MulticastB, Kernel::GemmSm90_128x256, 102),
            Self::Sm90_128x208 => sm90(128, 208, ClusterMode::MulticastB, Kernel::GemmSm90_128x208, 103),
            Self::Sm90_128x192 => sm90(128, 192, ClusterMode::MulticastB, Kernel::GemmSm90_128x192, 106),
            Self::Sm90_128x160 => sm90(128, 160, ClusterMode::SplitK, Kernel::GemmSm90_128x160, 108),
        }
    }

    /// Rows of it that one consumer warpgroup computes.
    pub const fn warpgroup_rows(self) -> u32 {
        if matches!(self, Self::Sm90_256x192) { 128 } else { 64 }
    }

    /// Whether it is a tile of the Hopper kernel.
    pub const fn is_sm90(self) -> bool {
        self.config().cluster.is_some()
    }

    /// Whether two CTAs compute one half of K each.
    pub const fn is_split_k(self) -> bool {
        matches!(self.config().cluster, Some(ClusterMode::SplitK))
    }

    /// Rows and columns of tiles that cover an output of `m` rows and `col_tiles` columns of tiles. They are counted in units of the
    /// schedule, which are clusters where a cluster computes two tiles, and else CTAs.
    pub fn tile_counts(self, m: u32, col_tiles: u32) -> (u32, u32) {
        let TileConfig { block_m, cluster, .. } = self.config();
        let row_tiles = m.div_ceil(block_m);
        match cluster {
            None | Some(ClusterMode::SplitK) => (row_tiles, col_tiles),
            Some(ClusterMode::MulticastA) => (row_tiles, col_tiles.div_ceil(abi::KL_SM90_CLUSTER)),
            Some(ClusterMode::MulticastB) => (row_tiles.div_ceil(abi::KL_SM90_CLUSTER), col_tiles),
        }
    }

    /// CTAs, or clusters of them, that the GPU runs at the same time.
    pub fn slots(self, sms: u32) -> u32 {
        let TileConfig { ctas_per_sm, cluster, .. } = self.config();
        let slots = if cluster.is_some() { sms / abi::KL_SM90_CLUSTER } else { ctas_per_sm * sms };
        slots.max(1)
    }
}
