//! What op families need to launch kernels: the loaded kernels, the device memory, and the choice of kernels.

use super::abi::{self, KlMat, KlTensorMap};
use super::launch::{Kernel, Kernels, templates};
use super::memory::Memory;
use super::params::{Pixels, image_map_spec, map_spec};
use super::select::{Schedule, Tile};
use crate::backend::Fp8Accumulate;
use crate::error::Result;
use crate::tensor::Tensor;

/// Which kernels matrix ops take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// The fastest kernels for the shape and the GPU.
    Best,
    /// The naive kernels.
    Naive,
    /// This kernel for every op that it can compute on this GPU. Other GEMMs take the fastest kernel, other ops one that runs on every GPU.
    Only(Kernel),
}

impl KernelChoice {
    /// All choices, including each kernel that ops choose from.
    pub fn all() -> impl Iterator<Item = Self> {
        let gemms = Tile::ALL.iter().map(|tile| tile.kernel);
        let portable = [templates::CONV_BF16_SM80, templates::ATTENTION_BF16_SM80, templates::ATTENTION_WIDE_BF16_SM80];
        let kernels = gemms.chain(portable.into_iter().flatten().copied());
        [Self::Best, Self::Naive].into_iter().chain(kernels.map(Self::Only))
    }
}

/// The state that ops launch with.
pub struct OpContext {
    // The order matters: kernels are unloaded before the memory that they work on is freed.
    /// The loaded kernels.
    pub kernels: Kernels,
    /// The device memory.
    pub memory: Memory,
    /// Which kernels ops take.
    pub choice: KernelChoice,
    /// How sums of e4m3 products are accumulated.
    pub accumulate: Fp8Accumulate,
    /// Number of SMs.
    pub sms: u32,
    /// Most bytes of shared memory that a CTA may have.
    pub shared: u32,
}

impl OpContext {
    /// A tensor as kernels take it.
    pub fn mat(&self, t: Tensor, op: &'static str) -> Result<KlMat> {
        self.memory.mat(t, op)
    }

    /// An optional tensor as kernels take it.
    pub fn mat_if(&self, t: Option<Tensor>, op: &'static str) -> Result<KlMat> {
        self.memory.mat_if(t, op)
    }

    /// A tensor map with which TMA copies boxes of this many columns and rows.
    pub fn tensor_map(&self, m: &KlMat, tile: [u32; 2]) -> Result<KlTensorMap> {
        self.kernels.tensor_map(map_spec(m, tile))
    }

    /// A tensor map with which TMA copies image boxes of this many channels, columns and lines.
    pub fn image_map(&self, m: &KlMat, pixels: Pixels, tile: [u32; 3]) -> Result<KlTensorMap> {
        self.kernels.tensor_map(image_map_spec(m, pixels, tile))
    }

    /// A schedule as kernels take it: `tiles` with `k_blocks` each, and the number of k-blocks of each Stream-K worker.
    pub fn tile_schedule(&self, Schedule { full_tiles, workers }: Schedule, tiles: u32, k_blocks: u32) -> abi::KlTileSchedule {
        let shared = (tiles - full_tiles) * k_blocks;
        abi::KlTileSchedule {
            partials: self.memory.stream_k_partials(),
            flags: self.memory.stream_k_flags(),
            k_blocks,
            full_tiles,
            // Without workers there are no k-blocks to share.
            k_blocks_per_worker: shared.checked_div(workers).unwrap_or(0),
            remainder: shared.checked_rem(workers).unwrap_or(0),
        }
    }

    /// Chooses among the kernels of a template, which are ordered from the largest tile to the smallest. `ctas` tells how many CTAs a tile
    /// needs. Takes the largest tile that leaves no SM without work, or else the last, which runs anywhere.
    pub fn largest_tile(&self, kernels: &[Kernel], ctas: impl Fn([u32; 2]) -> u32) -> Kernel {
        let preferred = |kernel: &Kernel| {
            let wanted = match self.choice {
                KernelChoice::Only(only) => only == *kernel,
                KernelChoice::Best | KernelChoice::Naive => ctas(kernel.tile()) >= self.sms,
            };
            wanted && self.kernels.has(*kernel)
        };
        *kernels.iter().find(|kernel| preferred(kernel)).unwrap_or(&kernels[kernels.len() - 1])
    }
}
