//! Device memory: allocations for weights, cached results, adapters and working memory, which ends in the backend's own scratch. Also finds
//! the address of a tensor.

use super::abi::{self, KlMat};
use super::driver::{Driver, Rows};
use super::params::{NONE, SIDE_LIMIT, dtype_code};
use super::select::Tile;
use crate::error::{Error, Result};
use crate::tensor::{ALIGN, Region, Scaling, Tensor};
use std::ops::Range;
use std::rc::Rc;

/// A device allocation.
struct Allocation {
    driver: Rc<dyn Driver>,
    address: u64,
    bytes: u64,
}

impl Allocation {
    fn empty(driver: &Rc<dyn Driver>) -> Self {
        Self { driver: driver.clone(), address: 0, bytes: 0 }
    }

    fn new(driver: &Rc<dyn Driver>, bytes: u64) -> Result<Self> {
        let address = if bytes == 0 { 0 } else { driver.allocate(bytes)? };
        Ok(Self { driver: driver.clone(), address, bytes })
    }

    /// Frees the old memory with its contents, then allocates.
    fn replace(&mut self, bytes: u64) -> Result<()> {
        let driver = self.driver.clone();
        *self = Self::empty(&driver);
        *self = Self::new(&driver, bytes)?;
        Ok(())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.address != 0 {
            self.driver.free(self.address);
        }
    }
}

/// Sizes of the backend's own scratch, in this order: the reduction counters and the count of saturated values, the reduction partials, the
/// Stream-K flags, the expansion counters, and the Stream-K partials.
#[derive(Clone, Copy)]
struct Scratch {
    sms: u64,
}

impl Scratch {
    /// Bytes of the counters that the CTAs of a counting kernel share.
    const COUNTERS: u64 = 2 * size_of::<u32>() as u64;
    const REDUCTION_PARTIALS: u64 = abi::KL_PARTIALS as u64 * abi::KL_GROUPS as u64 * 16;

    /// Bytes of the expansion counters: several times a flag for each column tile and 256 of K, of the largest layers that exist.
    const EXPANSION_COUNTERS: u64 = 1 << 20;

    /// The 32-bit Stream-K flags of all tiles that run at once, for the tile that needs the most.
    fn stream_k_flags(self) -> u64 {
        let per_sm = Tile::ALL.iter().map(|tile| tile.flags_per_sm());
        (self.sms * u64::from(per_sm.max().unwrap_or(0)) * 4).next_multiple_of(ALIGN)
    }

    /// One f32 for each element of all tiles that run at once, for the tile that needs the most.
    fn stream_k_partials(self) -> u64 {
        let per_sm = Tile::ALL.iter().map(|tile| tile.block_m * tile.block_n * tile.ctas_per_sm);
        self.sms * u64::from(per_sm.max().unwrap_or(0)) * 4
    }

    fn bytes(self) -> u64 {
        ALIGN + Self::REDUCTION_PARTIALS + self.stream_k_flags() + Self::EXPANSION_COUNTERS + self.stream_k_partials()
    }
}

/// The backend's device memory.
pub struct Memory {
    weights: Allocation,
    arena: Allocation,
    /// Memory for results that outlive a run.
    kept: Allocation,
    /// Memory for LoRA branches.
    adapters: Allocation,
    /// Memory for op scratch that does not fit into working memory.
    spare: Allocation,
    /// Address and bytes of the current op's scratch. It begins with weights that are expanded before their GEMM, and ends with the
    /// products `x down^T` of LoRA branches.
    op_scratch: (u64, u64),
    /// Address at which working memory begins.
    base: u64,
    /// Bytes of working memory that ops may use.
    working: u64,
    /// Address at which the backend's own scratch begins. Zero until working memory is reserved.
    scratch: u64,
    layout: Scratch,
    driver: Rc<dyn Driver>,
}

impl Memory {
    /// Creates the struct without allocating.
    pub fn new(driver: Rc<dyn Driver>) -> Self {
        Self {
            weights: Allocation::empty(&driver),
            arena: Allocation::empty(&driver),
            kept: Allocation::empty(&driver),
            adapters: Allocation::empty(&driver),
            spare: Allocation::empty(&driver),
            op_scratch: (0, 0),
            base: 0,
            working: 0,
            scratch: 0,
            layout: Scratch { sms: u64::from(driver.device().multiprocessors) },
            driver,
        }
    }

    /// Allocates `bytes` of a region. Its old contents are lost.
    pub fn reserve(&mut self, region: Region, bytes: u64) -> Result<()> {
        match region {
            Region::Arena => self.reserve_working(bytes),
            Region::Weights => self.weights.replace(bytes),
            Region::Cache => self.kept.replace(bytes),
            Region::Adapters => self.adapters.replace(bytes),
        }
    }

    /// Bytes of the allocation for weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes
    }

    /// Allocates `bytes` of working memory and the scratch, unless the allocation is large enough already. Then both keep their addresses,
    /// so graphs captured for other image sizes stay valid.
    fn reserve_working(&mut self, bytes: u64) -> Result<()> {
        let (working, scratch) = (bytes.next_multiple_of(ALIGN), self.layout.bytes().next_multiple_of(ALIGN));
        if self.arena.bytes < working + scratch {
            (self.working, self.scratch) = (0, 0);
            self.arena.replace(working + scratch)?;
        }
        // Scratch lies at the end of the allocation, so its address does not depend on the image.
        (self.base, self.working) = (self.arena.address, working);
        self.scratch = self.base + self.arena.bytes - scratch;
        Ok(())
    }

    /// Places the scratch of an op at the end of working memory, if there is room behind the part in use, or else in the spare memory.
    /// False if that is too small and has to be [allocated](Self::reserve_spare).
    pub fn place_op_scratch(&mut self, live: u64, bytes: u64) -> bool {
        // If offsets are addresses, the end of working memory is unknown.
        let has_room = self.working != u64::MAX && live.next_multiple_of(ALIGN) + bytes <= self.working;
        let own = self.spare.address;
        self.op_scratch = if has_room { (self.base + self.working - bytes, bytes) } else { (own, self.spare.bytes) };
        has_room || bytes <= self.spare.bytes
    }

    /// Allocates the spare memory. Its old contents are lost.
    pub fn reserve_spare(&mut self, bytes: u64) -> Result<()> {
        self.spare.replace(bytes)
    }

    /// Address and bytes of the current op's scratch.
    pub fn op_scratch(&self) -> (u64, u64) {
        self.op_scratch
    }

    /// Address of the expansion counters.
    pub fn expansion_counters(&self) -> u64 {
        self.stream_k_flags() + self.layout.stream_k_flags()
    }

    /// Bytes of the expansion counters.
    pub fn expansion_counter_bytes(&self) -> u64 {
        Scratch::EXPANSION_COUNTERS
    }

    /// Makes the offset of every tensor its address, in all regions.
    pub fn use_addresses(&mut self) {
        (self.base, self.working) = (0, u64::MAX);
        self.weights = Allocation::empty(&self.driver);
        self.weights.bytes = u64::MAX;
    }

    /// Address and bytes of the part of a working-memory range that exists.
    pub fn working_range(&self, range: Range<u64>) -> Option<(u64, u64)> {
        let end = range.end.min(self.working);
        (end > range.start).then(|| (self.base + range.start, end - range.start))
    }

    /// Where a tensor's rows lie.
    pub fn rows(&self, tensor: Tensor, op: &'static str) -> Result<Rows> {
        let (base, end) = self.region(tensor.region);
        let bytes = |elements: usize| tensor.dtype.bytes(elements) as u64;
        let outside = tensor.extent().end.max(tensor.scale_extent().end) > end;
        if outside || !tensor.offset.is_multiple_of(tensor.dtype.align() as u64) {
            return Err(Error::Op { op, what: format!("{tensor:?} lies outside its memory or is misaligned") });
        }
        let (width, pitch) = (bytes(tensor.cols), bytes(tensor.stride));
        // Rows without gaps count as one long row.
        let width = if pitch == width || tensor.rows <= 1 { width * tensor.rows as u64 } else { width };
        Ok(Rows { address: base + tensor.offset, pitch: pitch.max(width), width })
    }

    /// A tensor as kernels take it.
    pub fn mat(&self, t: Tensor, op: &'static str) -> Result<KlMat> {
        let Rows { address, .. } = self.rows(t, op)?;
        if t.rows > SIDE_LIMIT || t.cols > SIDE_LIMIT {
            return Err(Error::Op { op, what: format!("{t:?} is too large for the GPU") });
        }
        Ok(KlMat {
            data: address,
            scales: self.scales(t),
            stride: t.stride as u64,
            rows: t.rows as u32,
            cols: t.cols as u32,
            dtype: dtype_code(t.dtype),
            scale: match t.scaling {
                Scaling::Tensor(scale) | Scaling::Blocks16 { tensor: scale, .. } => scale.get(),
                Scaling::Unscaled | Scaling::Rows(_) => 1.0,
            },
        })
    }

    /// An optional tensor as kernels take it.
    pub fn mat_if(&self, t: Option<Tensor>, op: &'static str) -> Result<KlMat> {
        t.map_or(Ok(NONE), |t| self.mat(t, op))
    }

    /// Address and bytes of a region.
    fn region(&self, region: Region) -> (u64, u64) {
        match region {
            Region::Weights => (self.weights.address, self.weights.bytes),
            Region::Arena => (self.base, self.working),
            Region::Cache => (self.kept.address, self.kept.bytes),
            Region::Adapters => (self.adapters.address, self.adapters.bytes),
        }
    }

    /// Address of a tensor's row or block scales. Zero if it has none.
    pub fn scales(&self, t: Tensor) -> u64 {
        let (base, _) = self.region(t.region);
        match t.scaling {
            Scaling::Rows(offset) | Scaling::Blocks16 { scales: offset, .. } => base + offset,
            Scaling::Unscaled | Scaling::Tensor(_) => 0,
        }
    }

    /// Bytes of the scratch.
    pub fn scratch_bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Address of the counters that the CTAs of a counting kernel share.
    pub fn counters(&self) -> u64 {
        self.scratch
    }

    /// Address of the count of values that did not fit their FP8 tensor. It follows the counters of KlCount.
    pub fn saturated(&self) -> u64 {
        self.scratch + Scratch::COUNTERS
    }

    /// Whether scratch exists. It is allocated with working memory.
    pub fn has_scratch(&self) -> bool {
        self.scratch != 0
    }

    /// Address of the reduction partials.
    pub fn reduction_partials(&self) -> u64 {
        self.scratch + ALIGN
    }

    /// Address of the flags that Stream-K workers set for each other.
    pub fn stream_k_flags(&self) -> u64 {
        self.reduction_partials() + Scratch::REDUCTION_PARTIALS
    }

    /// Bytes of the Stream-K flags.
    pub fn stream_k_flag_bytes(&self) -> u64 {
        self.layout.stream_k_flags()
    }

    /// Address of the partials that Stream-K workers store for each other.
    pub fn stream_k_partials(&self) -> u64 {
        self.expansion_counters() + Scratch::EXPANSION_COUNTERS
    }

    /// Bytes of the Stream-K partials.
    pub fn stream_k_partial_bytes(&self) -> u64 {
        self.layout.stream_k_partials()
    }
}
