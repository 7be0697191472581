//! The tiles that the GEMM kernels are instantiated with.

use crate::backend::cuda::abi;
use crate::backend::cuda::arch::Arch;
use crate::backend::cuda::launch::Kernel;

/// What the two CTAs of a cluster share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterMode {
    /// The rows of A, the activations: the cluster is two tiles wide, and each CTA multicasts one half of A to both.
    MulticastA,
    /// The rows of B, the weight: the cluster is two tiles high, and each CTA multicasts one half of B to both.
    MulticastB,
    /// The output tile, for which each CTA computes one half of K. Such clusters are not persistent: each computes one tile.
    SplitK,
    /// Nothing: a CTA is alone. GPUs of compute capability 12.x have no multicast.
    Single,
}

/// The operand types of a GEMM kernel, and the types that it can store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmOperands {
    /// bf16 by bf16, stored as bf16.
    Bf16,
    /// e4m3 by e4m3, stored as bf16 or e4m3.
    Fp8,
    /// bf16 inputs by weights of e2m1, e4m3 or bf16, stored as bf16 or e4m3.
    MixedInput,
    /// e2m1 by e2m1, both with block scales, stored as bf16, e4m3 or e2m1.
    Nvfp4,
    /// A convolution: bf16 pixels under the taps of a filter by bf16 filters, stored as bf16.
    Conv3x3,
}

/// The part of the output that a CTA of a GEMM or a convolution computes at a time. The rows come from `kernels/kernels.def`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The GPUs that the tile is for.
    pub arch: Arch,
    /// Rows.
    pub block_m: u32,
    /// Columns.
    pub block_n: u32,
    /// The part of K that one k-block covers.
    pub block_k: u32,
    /// CTAs that are resident on an SM at the same time.
    pub ctas_per_sm: u32,
    /// Consumer warpgroups; none for the portable kernel, all of whose warps both load and compute.
    pub consumers: u32,
    /// How the CTAs of a cluster cooperate; none for the portable kernel, which is not persistent.
    pub cluster: Option<ClusterMode>,
    /// The operand types.
    pub operands: GemmOperands,
    /// The most products that tensor cores add up before the sum is promoted to f32 registers, or before it is accurate to f32 anyway.
    /// `None` if sums are never promoted.
    pub longest_sum: Option<u32>,
    /// The kernel that computes it.
    pub kernel: Kernel,
    /// Time per multiply-accumulate, in percent of the first tile with the same operands, as measured (bench/LOG.md). Small tiles load each
    /// operand more often.
    pub relative_cost: u64,
}

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));

impl Tile {
    /// All tiles, the fastest first.
    pub const ALL: &[Self] = TILES;

    /// The tile of a kernel that is a GEMM or a convolution with a tile.
    pub fn of(kernel: Kernel) -> Option<Self> {
        Self::ALL.iter().copied().find(|tile| tile.kernel == kernel)
    }

    /// Whether the columns are whole attention heads of the size that tensor-core kernels normalize in their epilogue.
    pub const fn has_whole_heads(&self) -> bool {
        self.block_n.is_multiple_of(abi::KL_MMA_COLS)
    }

    /// Rows of the tile that one consumer warpgroup computes.
    pub const fn warpgroup_rows(self) -> u32 {
        self.block_m / self.consumers
    }

    /// The most Stream-K flags that an SM needs: one for each resident CTA of the portable kernel, or one for each consumer warp of a
    /// persistent kernel.
    pub const fn flags_per_sm(self) -> u32 {
        const WARPS_PER_WARPGROUP: u32 = 4;
        if self.is_persistent() { WARPS_PER_WARPGROUP * self.consumers } else { self.ctas_per_sm }
    }

    /// Whether the tile's kernel is persistent and uses TMA.
    pub const fn is_persistent(self) -> bool {
        self.cluster.is_some()
    }

    /// Columns of bf16 in a row of a pipeline stage. Persistent kernels load a LoRA branch in such rows.
    pub const fn lora_cols(self) -> u32 {
        if matches!(self.arch, Arch::Sm120) { abi::KL_SM120_BOX_COLS } else { abi::KL_SM90_BOX_COLS }
    }

    /// Whether two CTAs compute half of K each.
    pub const fn is_split_k(self) -> bool {
        matches!(self.cluster, Some(ClusterMode::SplitK))
    }

    /// Row tiles and column tiles that cover an output of `m` rows and `col_tiles` columns of tiles. The schedule counts them in clusters
    /// if a cluster computes two tiles, otherwise in CTAs.
    pub fn tile_counts(self, m: u32, col_tiles: u32) -> (u32, u32) {
        let row_tiles = m.div_ceil(self.block_m);
        match self.cluster {
            None | Some(ClusterMode::SplitK | ClusterMode::Single) => (row_tiles, col_tiles),
            Some(ClusterMode::MulticastA) => (row_tiles, col_tiles.div_ceil(abi::KL_SM90_CLUSTER)),
            Some(ClusterMode::MulticastB) => (row_tiles.div_ceil(abi::KL_SM90_CLUSTER), col_tiles),
        }
    }

    /// CTAs, or clusters, that the GPU runs at the same time.
    pub fn slots(self, sms: u32) -> u32 {
        let slots = if self.arch == Arch::Sm90 { sms / abi::KL_SM90_CLUSTER } else { self.ctas_per_sm * sms };
        slots.max(1)
    }
}
