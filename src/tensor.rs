//! Tensor descriptors: dtype, shape and location of a tensor, and the allocation of working memory.
//!
//! Nothing here owns or references memory. A [`Tensor`] is a `Copy` descriptor that a backend resolves to an address. An
//! [`Arena`] only computes offsets, so a dry run and the real run yield the same ones.

mod format;
pub mod minifloat;
pub mod nvfp4;
mod part;
mod values;

pub use format::{DType, Scale, Scales, Scaling, Stored};
pub use part::{Nvfp4Layout, PartScaling, WeightPart};

use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A reference-counted slice of bytes: of a mapped file or of a buffer. Cloning it copies no data.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

// Ranges come from untrusted files, so no arithmetic on them may overflow.
#[deny(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
impl Bytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..(*owner).as_ref().len();
        Self { owner, range }
    }

    /// A sub-slice, or `None` if the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end).then(|| Self { owner: self.owner.clone(), range: start..end })
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({:?})", self.range)
    }
}

/// The precision that results are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Results are kept in f32.
    F32,
    /// Every op computes in f32 and rounds its result to bfloat16 once, when it stores it.
    Bf16,
}

impl Precision {
    /// Dtype of activations.
    pub const fn activations(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::Bf16,
        }
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Which memory region of a backend a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// Model weights: written by `upload`, read by ops.
    Weights,
    /// Working memory of a run.
    Arena,
}

/// The descriptor of a matrix in one of a backend's memory regions: `rows` rows of `cols` elements, `stride` elements from row to
/// row. Images are stored with channels last, so every tensor of the model is such a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// The memory region.
    pub region: Region,
    /// Element type.
    pub dtype: DType,
    /// Byte offset of the first element in the region.
    pub offset: u64,
    /// Number of rows.
    pub rows: usize,
    /// Elements in a row.
    pub cols: usize,
    /// Elements from the start of one row to the start of the next.
    pub stride: usize,
    /// What decoded elements are multiplied by.
    pub scaling: Scaling,
}

impl Tensor {
    /// The sub-matrix of a range of rows.
    ///
    /// # Panics
    /// If the range does not lie inside the tensor: a bug in model code. If it does not begin at a whole tile of block scales.
    pub fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {self:?}");
        let scaling = match self.scaling {
            Scaling::Rows(scales) => Scaling::Rows(scales + 4 * range.start as u64),
            Scaling::Blocks16 { scales, tensor } => {
                assert!(range.start.is_multiple_of(nvfp4::TILE_ROWS), "rows {range:?} of {self:?}");
                let skip = nvfp4::scale_offset(range.start, 0, nvfp4::tiles_along(self.stride));
                Scaling::Blocks16 { scales: scales + skip as u64, tensor }
            }
            same => same,
        };
        let skip = self.dtype.bytes(range.start * self.stride) as u64;
        Self { offset: self.offset + skip, rows: range.len(), scaling, ..self }
    }

    /// The sub-matrix of a range of columns.
    ///
    /// # Panics
    /// If the range does not lie inside the tensor: a bug in model code. If it does not begin at a whole tile of block scales.
    pub fn cols(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "cols {range:?} of {self:?}");
        let scaling = match self.scaling {
            Scaling::Blocks16 { scales, tensor } => {
                assert!(range.start.is_multiple_of(nvfp4::TILE_COLS), "cols {range:?} of {self:?}");
                let skip = nvfp4::scale_offset(0, range.start / nvfp4::BLOCK, nvfp4::tiles_along(self.stride));
                Scaling::Blocks16 { scales: scales + skip as u64, tensor }
            }
            same => same,
        };
        let skip = self.dtype.bytes(range.start) as u64;
        Self { offset: self.offset + skip, cols: range.len(), scaling, ..self }
    }

    /// How the values are stored.
    pub fn stored(self) -> Stored {
        let scales = match self.scaling {
            Scaling::One => Scales::One,
            Scaling::Tensor(scale) => Scales::Tensor(scale),
            Scaling::Rows(_) => Scales::Rows,
            Scaling::Blocks16 { tensor, .. } => Scales::Blocks16(tensor),
        };
        Stored { dtype: self.dtype, scales }
    }

    /// Number of elements, not counting the gaps between rows.
    pub fn len(self) -> usize {
        self.rows * self.cols
    }

    /// True if the tensor has no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The byte range from the first element to the last, including the gaps between rows.
    pub fn extent(self) -> Range<u64> {
        if self.is_empty() {
            return self.offset..self.offset;
        }
        let elements = (self.rows - 1) * self.stride + self.cols;
        self.offset..self.offset + self.dtype.bytes(elements).next_multiple_of(self.dtype.align()) as u64
    }

    /// The byte range of the scales in the tensor's region; empty if they are not in memory.
    pub fn scale_extent(self) -> Range<u64> {
        match self.scaling {
            Scaling::One | Scaling::Tensor(_) => 0..0,
            Scaling::Rows(scales) => scales..scales + 4 * self.rows as u64,
            Scaling::Blocks16 { scales, .. } => {
                let (tiles, pitch) = (nvfp4::tiles_along(self.cols), nvfp4::tiles_along(self.stride));
                let down = self.rows.div_ceil(nvfp4::TILE_ROWS);
                let tiles = if down == 0 || tiles == 0 { 0 } else { (down - 1) * pitch + tiles };
                scales..scales + (tiles * nvfp4::TILE_BYTES) as u64
            }
        }
    }

    /// The elements and the block scales as matrices of bytes, with which a quantised tensor can be copied unchanged.
    pub fn as_bytes(self) -> impl Iterator<Item = Self> {
        let width = |elements: usize| self.dtype.bytes(elements);
        let bytes = Self { dtype: DType::U8, cols: width(self.cols), stride: width(self.stride), scaling: Scaling::One, ..self };
        let scales = match self.scaling {
            Scaling::Blocks16 { scales, .. } => Some(Self {
                offset: scales,
                rows: self.rows.div_ceil(nvfp4::TILE_ROWS),
                cols: nvfp4::tiles_along(self.cols) * nvfp4::TILE_BYTES,
                stride: nvfp4::tiles_along(self.stride) * nvfp4::TILE_BYTES,
                ..bytes
            }),
            _ => None,
        };
        [bytes].into_iter().chain(scales)
    }

    /// True if the two tensors may share an element; scales are allocated with the elements, so they need no test. Exact for column slices of one buffer, conservative otherwise.
    pub fn overlaps(self, other: Self) -> bool {
        if self.region != other.region || self.is_empty() || other.is_empty() {
            return false;
        }
        let (a, b) = (self.extent(), other.extent());
        if a.end <= b.start || b.end <= a.start {
            return false;
        }
        let pitch = self.dtype.bytes(self.stride) as u64;
        if pitch == other.dtype.bytes(other.stride) as u64 && pitch > 0 {
            // Two column slices of the same rows-by-pitch buffer: compare the columns.
            let (low, high) = if self.offset <= other.offset { (self, other) } else { (other, self) };
            let shift = (high.offset - low.offset) % pitch;
            let low_width = low.dtype.bytes(low.cols) as u64;
            let high_width = high.dtype.bytes(high.cols) as u64;
            return !(shift >= low_width && shift + high_width <= pitch);
        }
        true
    }
}

/// A bump allocator of offsets. It holds no memory: [`Arena::peak`] is the size that a backend has to reserve.
#[derive(Clone, Debug)]
pub struct Arena {
    region: Region,
    top: u64,
    peak: u64,
}

/// Alignment of every allocation, which suffices for vector loads, shared-memory swizzles and TMA tensor maps.
pub const ALIGN: u64 = 1024;

// Sizes come from files and flags and are checked for overflow here, so that [`Tensor`] can do unchecked arithmetic on the sizes
// of whatever was allocated.
#[deny(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
impl Arena {
    /// An empty arena over one region.
    pub fn new(region: Region) -> Self {
        Self::starting_at(region, 0)
    }

    /// An arena that starts at `offset`, such as the end of another one.
    pub fn starting_at(region: Region, offset: u64) -> Self {
        Self { region, top: offset, peak: offset }
    }

    /// Allocates a contiguous matrix of plain values.
    pub fn alloc(&mut self, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
        self.alloc_stored(rows, cols, Stored::plain(dtype))
    }

    /// Allocates a contiguous matrix and the scales that its format has.
    pub fn alloc_stored(&mut self, rows: usize, cols: usize, stored: Stored) -> Result<Tensor> {
        let bits = (rows as u64).checked_mul(cols as u64).and_then(|n| n.checked_mul(stored.dtype.bits() as u64));
        let offset = self.take(bits.map(|bits| bits.div_ceil(8)))?;
        let scaling = match stored.scales {
            Scales::One => Scaling::One,
            Scales::Tensor(scale) => Scaling::Tensor(scale),
            Scales::Rows => Scaling::Rows(self.take((rows as u64).checked_mul(4))?),
            Scales::Blocks16(tensor) => {
                let down = rows.div_ceil(nvfp4::TILE_ROWS) as u64;
                let tiles = down.checked_mul(nvfp4::tiles_along(cols) as u64);
                let scales = self.take(tiles.and_then(|tiles| tiles.checked_mul(nvfp4::TILE_BYTES as u64)))?;
                Scaling::Blocks16 { scales, tensor }
            }
        };
        Ok(Tensor { region: self.region, dtype: stored.dtype, offset, rows, cols, stride: cols, scaling })
    }

    /// Allocates consecutive ranges of the rows of one matrix, which are stored in formats of their own. They are adjacent in memory
    /// if their formats have one number of bits and no scales in memory.
    pub fn alloc_ranges(&mut self, ranges: &[(usize, Stored)], cols: usize) -> Result<Vec<Tensor>> {
        let adjacent = |stored: &Stored| matches!(stored.scales, Scales::One | Scales::Tensor(_));
        let dtype = ranges.first().map(|(_, stored)| stored.dtype);
        if !ranges.iter().all(|(_, stored)| adjacent(stored) && Some(stored.dtype) == dtype) {
            return ranges.iter().map(|&(rows, stored)| self.alloc_stored(rows, cols, stored)).collect();
        }
        let rows = ranges.iter().try_fold(0_usize, |sum, (rows, _)| sum.checked_add(*rows));
        let (Some(rows), Some(dtype)) = (rows, dtype) else { return Ok(Vec::new()) };
        let mut rest = self.alloc(rows, cols, dtype)?;
        let mut all = Vec::with_capacity(ranges.len());
        for &(rows, stored) in ranges {
            let scaling = if let Scales::Tensor(scale) = stored.scales { Scaling::Tensor(scale) } else { Scaling::One };
            all.push(Tensor { scaling, ..rest.rows(0..rows) });
            rest = rest.rows(rows..rest.rows);
        }
        Ok(all)
    }

    /// The offset of newly allocated bytes; `None` is more than can be counted.
    fn take(&mut self, bytes: Option<u64>) -> Result<u64> {
        let end = bytes.and_then(|b| self.top.checked_add(b)).and_then(|e| e.checked_next_multiple_of(ALIGN));
        let end = end.ok_or(Error::Memory { need: u64::MAX })?;
        let offset = self.top;
        self.top = end;
        self.peak = self.peak.max(end);
        Ok(offset)
    }

    /// The current top, to return to with [`Arena::reset`].
    pub fn mark(&self) -> u64 {
        self.top
    }

    /// Frees everything allocated since the mark and returns the freed byte range.
    pub fn reset(&mut self, mark: u64) -> Range<u64> {
        let freed = mark..self.top;
        self.top = mark;
        freed
    }

    /// Peak use in bytes.
    pub fn peak(&self) -> u64 {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_one_buffer_overlap_only_where_they_share_columns() {
        let mut arena = Arena::new(Region::Arena);
        let joined = arena.alloc(10, 1024, DType::Bf16).unwrap();
        let (left, right) = (joined.cols(0..256), joined.cols(256..1024));
        assert!(!left.overlaps(right) && !right.overlaps(left));
        assert!(joined.cols(0..257).overlaps(right));
        assert!(left.overlaps(joined));
        assert!(!joined.rows(0..5).overlaps(joined.rows(5..10)));
        assert!(joined.rows(0..6).cols(0..8).overlaps(joined.rows(5..10)));
        assert!(!joined.rows(0..6).cols(0..8).overlaps(joined.rows(5..10).cols(8..16)));
        assert!(!joined.rows(5..10).cols(0..8).overlaps(joined.rows(0..6).cols(8..16)));
    }

    #[test]
    fn arena_keeps_its_peak_and_reuses_freed_space() {
        let mut arena = Arena::new(Region::Arena);
        let a = arena.alloc(1, 1, DType::F32).unwrap();
        let mark = arena.mark();
        let b = arena.alloc(100, 100, DType::F32).unwrap();
        assert_eq!((a.offset, b.offset), (0, ALIGN));
        assert_eq!(arena.reset(mark), ALIGN..ALIGN + 40_960);
        assert_eq!(arena.alloc(1, 1, DType::F32).unwrap().offset, ALIGN);
        assert_eq!(arena.peak(), ALIGN + 40_960);
        assert!(arena.alloc(usize::MAX, usize::MAX, DType::F32).is_err());
    }
}
