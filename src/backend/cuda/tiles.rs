//! The instantiations of kernel templates, from `kernels/tiles.def`: the build script reads its rows and writes them as Rust source.

use super::arch::Arch;
use super::launch::Kernel;
use super::select::{ClusterMode, GemmOperands, Tile};

/// A tile of the portable convolution.
pub struct ConvTile {
    /// Pixels of the output.
    pub block_m: u32,
    /// Channels of the output.
    pub block_n: u32,
    /// The kernel that computes it.
    pub kernel: Kernel,
}

/// A Hopper kernel of attention with a wide head.
pub struct WideHead {
    /// Columns of the head, at most.
    pub head: u32,
    /// The kernel.
    pub kernel: Kernel,
}

/// A portable kernel of attention with a wide head.
pub struct WideAttention {
    /// Queries of a CTA.
    pub block_q: u32,
    /// The kernel.
    pub kernel: Kernel,
}

/// The norms of rows that a CTA keeps in registers.
pub struct RowNorm {
    /// Most columns of a row.
    pub max_columns: u32,
    /// The modulated layer norm.
    pub layer_norm: Kernel,
    /// The same with results of e4m3.
    pub layer_norm_e4m3: Kernel,
    /// The same with results of e2m1.
    pub layer_norm_e2m1: Kernel,
    /// The RMS norm.
    pub rms_norm: Kernel,
}

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));
