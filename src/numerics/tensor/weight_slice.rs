//! Weights as files store them.

use super::reencode::{power_between, reencode_block, reencoded_scale};
use super::{Bytes, DType, Scale, Scales, Stored, nvfp4};
use rayon::prelude::*;
use std::sync::Arc;

/// Consecutive rows of a weight, in one format, as a checkpoint stores them.
#[derive(Clone, Debug)]
pub struct WeightSlice {
    /// The elements, row-major.
    pub bytes: Bytes,
    /// The type of the elements.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// The scales of the elements.
    pub scaling: SliceScaling,
}

/// The scales of stored weight rows.
#[derive(Clone, Debug)]
pub enum SliceScaling {
    /// None.
    Unscaled,
    /// One for all rows.
    Tensor(Scale),
    /// One little-endian f32 per row.
    Rows(Bytes),
    /// The scales of NVFP4.
    Blocks16 {
        /// One e4m3 for every sixteen columns of a row.
        scales: Bytes,
        /// The factor of the whole tensor.
        tensor: Scale,
        /// The order in which elements and scales are stored.
        layout: Nvfp4Layout,
    },
}

/// The order in which an NVFP4 file stores elements and block scales. The bytes do not show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nvfp4Layout {
    /// Whether the even column of a pair is in the high nibble.
    pub high_first: bool,
    /// Whether the block scales are in tiles of 128 rows by four blocks, padded to whole tiles, as in `nvfp4::scale_offset`.
    /// Otherwise they are row-major.
    pub tiled: bool,
}

impl Nvfp4Layout {
    /// The layout of files of ComfyUI and BFL, and of every [`Tensor`](super::Tensor).
    pub const COMFY: Self = Self { high_first: true, tiled: true };
    /// The layout of ModelOpt's exports for diffusers, which diffusers itself reads.
    pub const MODELOPT: Self = Self { high_first: false, tiled: false };
    /// The layout of ModelOpt's single files for ComfyUI: tiled scales, but nibbles in ModelOpt's order.
    pub const MODELOPT_SINGLE: Self = Self { high_first: false, tiled: true };

    /// All layouts, by name.
    pub const NAMED: [(&'static str, Self); 3] =
        [("comfy", Self::COMFY), ("modelopt", Self::MODELOPT), ("modelopt-single", Self::MODELOPT_SINGLE)];
}

impl WeightSlice {
    /// Creates rows of plain values.
    pub fn plain(bytes: Bytes, dtype: DType, rows: usize) -> Self {
        Self { bytes, dtype, rows, scaling: SliceScaling::Unscaled }
    }

    /// The format of the rows.
    pub fn stored(&self) -> Stored {
        let scales = match &self.scaling {
            SliceScaling::Unscaled => Scales::Unscaled,
            SliceScaling::Tensor(scale) => Scales::Tensor(*scale),
            SliceScaling::Rows(_) => Scales::Rows,
            SliceScaling::Blocks16 { tensor, .. } => Scales::Blocks16(*tensor),
        };
        Stored { dtype: self.dtype, scales }
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.dtype.elements(self.bytes.len()).checked_div(self.rows).unwrap_or(0)
    }

    /// Bytes in the file, including row scales or block scales.
    pub fn stored_bytes(&self) -> u64 {
        let scales = match &self.scaling {
            SliceScaling::Unscaled | SliceScaling::Tensor(_) => 0,
            SliceScaling::Rows(scales) | SliceScaling::Blocks16 { scales, .. } => scales.len(),
        };
        (self.bytes.len() + scales) as u64
    }

    /// Whether the elements fill their rows and every row has its scales.
    pub fn is_complete(&self) -> bool {
        let (rows, cols) = (self.rows, self.cols());
        let scaled = match &self.scaling {
            SliceScaling::Unscaled | SliceScaling::Tensor(_) => true,
            SliceScaling::Rows(scales) => scales.len() == 4 * rows,
            SliceScaling::Blocks16 { scales, layout, .. } => {
                let bytes = if layout.tiled { nvfp4::scale_bytes(rows, cols) } else { rows * (cols / nvfp4::BLOCK) };
                cols.is_multiple_of(nvfp4::BLOCK) && scales.len() == bytes
            }
        };
        scaled && self.bytes.len() == self.dtype.bytes(rows * cols)
    }

    /// Whether the bytes can be read in place as a tensor of this format, without conversion or an aligned copy.
    pub fn is_readable_as(&self, to: Stored) -> bool {
        let in_order = match &self.scaling {
            SliceScaling::Blocks16 { layout, .. } => *layout == Nvfp4Layout::COMFY,
            _ => true,
        };
        in_order && self.stored() == to && self.bytes.as_ptr().align_offset(self.dtype.align()) == 0
    }

    /// The bytes of one row.
    fn row(&self, row: usize) -> &[u8] {
        let bytes = self.dtype.bytes(self.cols());
        &self.bytes[row * bytes..(row + 1) * bytes]
    }

    /// Decodes a row: elements times their scales.
    ///
    /// # Panics
    /// If there is no such row, or if `to` has the wrong length.
    pub fn decode(&self, row: usize, to: &mut [f32]) {
        let bytes = self.row(row);
        match &self.scaling {
            SliceScaling::Unscaled => self.dtype.decode(bytes, to),
            SliceScaling::Tensor(scale) => self.decode_times(bytes, scale.get(), to),
            SliceScaling::Rows(scales) => {
                let scale = scales[4 * row..].first_chunk().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes));
                self.decode_times(bytes, scale, to);
            }
            SliceScaling::Blocks16 { tensor, .. } => {
                self.each_block(row, to, |codes, scale, to| nvfp4::decode_block(codes, nvfp4::unit(tensor.get(), scale), to));
            }
        }
    }

    /// Calls `f` for each block of an NVFP4 row, with its elements (the even column in the high nibble), the code of its scale,
    /// and its slice of `to`.
    fn each_block<T>(&self, row: usize, to: &mut [T], f: impl Fn(&[u8], u8, &mut [T])) {
        let SliceScaling::Blocks16 { scales, layout, .. } = &self.scaling else { return };
        let (bytes, tiles) = (self.row(row), nvfp4::tiles_along(to.len()));
        let blocks = to.len().div_ceil(nvfp4::BLOCK);
        for (block, to) in to.chunks_mut(nvfp4::BLOCK).enumerate() {
            let at = if layout.tiled { nvfp4::scale_offset(row, block, tiles) } else { row * blocks + block };
            let codes = &bytes[block * nvfp4::BLOCK / 2..][..to.len() / 2];
            match layout.high_first {
                true => f(codes, scales[at], to),
                false => f(&swapped::<{ nvfp4::BLOCK / 2 }>(codes), scales[at], to),
            }
        }
    }

    /// The format of NVFP4 rows re-encoded as e4m3 with one scale. `None` for rows in another format, or if the scale is beyond f32.
    pub fn as_fp8(&self) -> Option<Stored> {
        let SliceScaling::Blocks16 { scales, tensor, layout } = &self.scaling else { return None };
        let largest = match layout.tiled {
            true => nvfp4::largest_scale(scales, self.rows, self.cols()),
            false => scales.par_iter().copied().max().unwrap_or(0),
        };
        reencoded_scale(*tensor, largest).map(Stored::fp8)
    }

    /// Whether [`WeightSlice::convert`] can make rows of this format. It makes plain elements from any format, and from NVFP4
    /// also e4m3 with one scale, if the ratio of that scale to the tensor scale is a power of two.
    pub fn converts_to(&self, to: Stored) -> bool {
        match (&self.scaling, to) {
            (_, Stored { dtype, scales: Scales::Unscaled }) => !dtype.is_quantized(),
            (SliceScaling::Blocks16 { tensor, .. }, Stored { dtype: DType::E4m3, scales: Scales::Tensor(scale) }) => {
                power_between(*tensor, scale).is_some()
            }
            _ => false,
        }
    }

    /// Rounds a row to elements of another format, or copies it.
    ///
    /// # Panics
    /// As [`WeightSlice::decode`] does, or if [`WeightSlice::converts_to`] is false.
    pub fn convert(&self, row: usize, to: Stored, out: &mut [u8]) {
        match (&self.scaling, to.scales) {
            (SliceScaling::Unscaled, Scales::Unscaled) => self.dtype.convert(self.row(row), to.dtype, out),
            (_, Scales::Unscaled) => {
                let mut values = vec![0.0; self.cols()];
                self.decode(row, &mut values);
                to.dtype.encode(&values, out);
            }
            (SliceScaling::Blocks16 { tensor, .. }, Scales::Tensor(scale)) => {
                let power = power_between(*tensor, scale).unwrap_or_else(|| panic!("{self:?} as {to:?}"));
                self.each_block(row, out, |codes, scale, to| reencode_block(codes, nvfp4::unit(power, scale), to));
            }
            _ => panic!("{self:?} as {to:?}"),
        }
    }

    fn decode_times(&self, bytes: &[u8], scale: f32, to: &mut [f32]) {
        self.dtype.decode(bytes, to);
        to.iter_mut().for_each(|v| *v *= scale);
    }

    /// Converts NVFP4 to the layout of a [`Tensor`](super::Tensor): the even column in the high nibble, and tiled scales. The
    /// values stay the same.
    pub fn in_tensor_layout(&self) -> Self {
        let SliceScaling::Blocks16 { scales, tensor, layout } = &self.scaling else { return self.clone() };
        let bytes = match layout.high_first {
            true => self.bytes.clone(),
            false => owned(self.bytes.iter().map(|byte| byte.rotate_left(4)).collect()),
        };
        let scales = if layout.tiled { scales.clone() } else { owned(tiled(scales, self.rows, self.cols())) };
        let scaling = SliceScaling::Blocks16 { scales, tensor: *tensor, layout: Nvfp4Layout::COMFY };
        Self { bytes, scaling, ..self.clone() }
    }
}

fn owned(bytes: Vec<u8>) -> Bytes {
    Bytes::new(Arc::new(bytes))
}

/// Up to `N` bytes with their nibbles swapped.
fn swapped<const N: usize>(codes: &[u8]) -> [u8; N] {
    let mut swapped = [0; N];
    swapped.iter_mut().zip(codes).for_each(|(to, code)| *to = code.rotate_left(4));
    swapped
}

/// Converts row-major block scales to tiles.
fn tiled(scales: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let (blocks, tiles) = (cols.div_ceil(nvfp4::BLOCK), nvfp4::tiles_along(cols));
    let mut tiled = vec![0; nvfp4::scale_bytes(rows, cols)];
    for (row, scales) in scales.chunks_exact(blocks.max(1)).enumerate() {
        scales.iter().enumerate().for_each(|(block, &scale)| tiled[nvfp4::scale_offset(row, block, tiles)] = scale);
    }
    tiled
}
