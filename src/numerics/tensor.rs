//! Tensor descriptors: dtype, shape and location of a tensor. Nothing here owns or references memory: a [`Tensor`] is a `Copy`
//! descriptor that a backend resolves to an address.

pub mod formats;
pub mod quantize;
mod reencode;
mod weight_slice;

pub use formats::{DType, Scale, ScaleKind, Scales, Scaling, Stored, decode_bf16, encode_bf16, nvfp4};
pub use weight_slice::{Nvfp4Layout, SliceScaling, WeightSlice};

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

    /// The name that users type.
    pub const fn name(self) -> &'static str {
        self.activations().name()
    }
}

/// Which memory region of a backend a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// Model weights: written by `upload`, read by ops.
    Weights,
    /// Working memory of a run.
    Arena,
    /// Results that outlive a run: written and read by ops.
    Cache,
    /// LoRA branches, followed by scratch space for merging: written by `upload`, read by ops.
    Adapters,
}

impl Region {
    /// Whether ops of a step may only read the region.
    pub const fn is_read_only(self) -> bool {
        matches!(self, Self::Weights | Self::Adapters)
    }
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
    /// The factors of the decoded elements.
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
            Scaling::Unscaled => Scales::Unscaled,
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

    /// Bytes of the elements and of scales in memory, not counting the gaps between rows.
    pub fn bytes(self) -> u64 {
        let scales = self.scale_extent();
        self.dtype.bytes(self.len()) as u64 + scales.end - scales.start
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
        self.offset..self.offset + self.dtype.bytes(elements) as u64
    }

    /// The byte range of the scales in the tensor's region; empty if they are not in memory.
    pub fn scale_extent(self) -> Range<u64> {
        match self.scaling {
            Scaling::Unscaled | Scaling::Tensor(_) => 0..0,
            Scaling::Rows(scales) => scales..scales + 4 * self.rows as u64,
            Scaling::Blocks16 { scales, .. } => {
                let (tiles, pitch) = (nvfp4::tiles_along(self.cols), nvfp4::tiles_along(self.stride));
                let down = self.rows.div_ceil(nvfp4::TILE_ROWS);
                let tiles = if down == 0 || tiles == 0 { 0 } else { (down - 1) * pitch + tiles };
                scales..scales + (tiles * nvfp4::TILE_BYTES) as u64
            }
        }
    }

    /// The elements and the block scales as byte matrices, to copy a quantized tensor unchanged.
    pub fn as_bytes(self) -> impl Iterator<Item = Self> {
        let width = |elements: usize| self.dtype.bytes(elements);
        let bytes =
            Self { dtype: DType::U8, cols: width(self.cols), stride: width(self.stride), scaling: Scaling::Unscaled, ..self };
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

    /// True if the two tensors may share an element or a block scale. Exact for slices of one buffer, conservative otherwise.
    pub fn overlaps(self, other: Self) -> bool {
        self.region == other.region && self.as_bytes().any(|a| other.as_bytes().any(|b| a.bytes_overlap(b)))
    }

    /// True if two matrices of bytes may share a byte.
    fn bytes_overlap(self, other: Self) -> bool {
        let (a, b) = (self.extent(), other.extent());
        if self.is_empty() || other.is_empty() || a.end <= b.start || b.end <= a.start {
            return false;
        }
        if self.stride != other.stride || self.stride == 0 {
            return true;
        }
        // Two column slices of the same rows-by-pitch buffer: compare the columns.
        let (low, high) = if self.offset <= other.offset { (self, other) } else { (other, self) };
        let shift = ((high.offset - low.offset) % self.stride as u64) as usize;
        !(shift >= low.cols && shift + high.cols <= self.stride)
    }
}
