//! Reads the scales of quantized weights from companion tensors, and checks them against the weight's shape.
//!
//! A scale is a factor by which decoded elements are multiplied, so each one has to be positive and finite.

use super::declared::invalid;
use super::header::Entry;
use super::shard::Shard;
use crate::error::{Error, Remedy, Result};
use crate::tensor::nvfp4::{self, BLOCK, TILE_ROWS};
use crate::tensor::{Bytes, DType, Nvfp4Layout, Scale, SliceScaling};
use crate::text::shown;
use rayon::prelude::*;

/// A tensor that holds scales.
#[derive(Clone, Copy)]
pub(super) struct ScaleTensor<'a> {
    pub shard: &'a Shard,
    pub name: &'a str,
    pub entry: &'a Entry,
}

impl ScaleTensor<'_> {
    /// The error for a tensor with unusable content.
    fn fault(self, what: impl std::fmt::Display) -> Error {
        invalid(self.shard, format!("tensor `{}` {what}", shown(self.name)))
    }

    /// The tensor's bytes in the mapped file.
    pub fn bytes(self) -> Result<Bytes> {
        self.shard.bytes(self.name).ok_or_else(|| self.fault("is not in the file"))
    }

    /// A single scale.
    pub fn single(self) -> Result<Scale> {
        let stored_as = self.entry.dtype.name;
        let dtype = DType::plain_stored_as(stored_as);
        let dtype = dtype.ok_or_else(|| self.fault(format_args!("is {stored_as}, needed is F32")))?;
        if !matches!(*self.entry.shape, [] | [1]) {
            return Err(self.fault(format_args!("is {:?}, needed is a single scale", self.entry.shape)));
        }
        let values = dtype.decoded(&self.bytes()?);
        self.checked(values.first().copied().unwrap_or(f32::NAN), "")
    }

    /// Reads the scales of an FP8 weight: a single one, or one for each row. Rows may be so close to zero that no limit suits their
    /// scales, but not all of them.
    pub fn fp8(self, rows: usize) -> Result<SliceScaling> {
        match *self.entry.shape {
            [] | [1] => return Ok(SliceScaling::Tensor(self.single()?)),
            [n] | [n, 1] if n == rows => {}
            _ => {
                let detail = format!("is {:?}, needed is one scale, or one for each of {rows} rows", self.entry.shape);
                return Err(self.fault(detail));
            }
        }
        if self.entry.dtype.name != "F32" {
            return Err(self.fault(format_args!("is {}, needed is F32", self.entry.dtype.name)));
        }
        let (bytes, mut largest) = (self.bytes()?, 0.0_f32);
        for (row, value) in bytes.as_chunks().0.iter().enumerate() {
            let value = f32::from_le_bytes(*value);
            if Scale::new(value).is_none_or(|scale| scale.get() > 1.0) {
                self.checked(value, &format!(" in row {row}"))?;
            }
            largest = largest.max(value);
        }
        self.checked(largest, " at most")?;
        Ok(SliceScaling::Rows(bytes))
    }

    fn checked(self, value: f32, place: &str) -> Result<Scale> {
        let shown = if value.abs() < 1e-4 && value != 0.0 { format!("{value:e}") } else { value.to_string() };
        Scale::stored(value).map_err(|why| self.fault(format_args!("is {shown}{place}, {why}")))
    }

    /// Reads the block scales of an NVFP4 weight with these rows and columns.
    pub fn blocks(self, [rows, cols]: [usize; 2], layout: Nvfp4Layout) -> Result<Bytes> {
        // Files without an FP8 dtype store the same bytes as integers.
        if !["F8_E4M3", "U8"].contains(&self.entry.dtype.name) {
            return Err(self.fault(format_args!("is {}, needed is F8_E4M3", self.entry.dtype.name)));
        }
        let plain = [rows, cols / BLOCK];
        let tiled = [rows.saturating_add(TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, plain[1].next_multiple_of(4)];
        let (want, other, order) = if layout.tiled { (tiled, plain, "row-major") } else { (plain, tiled, "tiled") };
        if *self.entry.shape == want {
            return self.bytes();
        }
        let detail = format!("is {:?}, a weight of {rows} x {cols} has block scales of {want:?}", self.entry.shape);
        if *self.entry.shape == other {
            let error = self.fault(format_args!("{detail}; this is the shape of {order} ones"));
            return Err(error.with_hint(Remedy::Nvfp4Layout));
        }
        Err(self.fault(detail))
    }

    /// Checks every block scale of an NVFP4 weight with these packed elements.
    pub fn check_blocks(self, codes: &[u8], [rows, cols]: [usize; 2], layout: Nvfp4Layout) -> Result<()> {
        let grid = Grid { rows, blocks: cols / BLOCK, tiled: layout.tiled };
        let scales = self.blocks([rows, cols], layout)?;
        let fault = scales.par_chunks(CHUNK).enumerate().find_map_first(|(i, chunk)| grid.fault(codes, chunk, i * CHUNK));
        let Some((at, what)) = fault else { return Ok(()) };
        let (row, block) = grid.place(at);
        let error = self.fault(format_args!("{what}, at block {block} of row {row}"));
        // A zero scale over nonzero elements suggests that the file has another NVFP4 order.
        Err(if what == ZERO { error.with_hint(Remedy::Nvfp4Layout) } else { error })
    }
}

/// Bytes of scales that one thread checks at a time.
const CHUNK: usize = 1 << 16;

const ZERO: &str = "is zero over elements that are not";

/// The layout of block scales.
#[derive(Clone, Copy)]
struct Grid {
    rows: usize,
    blocks: usize,
    tiled: bool,
}

impl Grid {
    /// The row and block whose scale is at this byte. Tiles may extend past the end of the matrix.
    fn place(self, at: usize) -> (usize, usize) {
        if !self.tiled {
            return (at / self.blocks, at % self.blocks);
        }
        nvfp4::scale_place(at, nvfp4::tiles_along(self.blocks * BLOCK))
    }

    /// Finds the first invalid scale of a chunk that begins at byte `start`, and says what is wrong with it.
    fn fault(self, codes: &[u8], chunk: &[u8], start: usize) -> Option<(usize, &'static str)> {
        let (words, rest) = chunk.as_chunks::<8>();
        let slow = |from: usize, bytes: &[u8]| {
            let mut places = bytes.iter().enumerate().map(|(i, &scale)| (start + from + i, scale));
            places.find_map(|(at, scale)| Some((at, self.verdict(codes, at, scale)?)))
        };
        // Padding holds zeros, which the fast test would not tell from suspects. Padded tiles are checked byte by byte.
        let padded = self.tiled && !(self.rows.is_multiple_of(TILE_ROWS) && self.blocks.is_multiple_of(4));
        let fast = words.iter().enumerate().filter(|(_, word)| padded || is_unusual(u64::from_le_bytes(**word)));
        let found = fast.map(|(i, word)| slow(8 * i, word)).find(Option::is_some).flatten();
        found.or_else(|| slow(chunk.len() - rest.len(), rest))
    }

    fn verdict(self, codes: &[u8], at: usize, scale: u8) -> Option<&'static str> {
        let (row, block) = self.place(at);
        if row >= self.rows || block >= self.blocks {
            return (scale != 0).then_some("is not zero in its padding");
        }
        match scale {
            0x7f | 0xff => Some("is NaN"),
            0x80.. => Some("is negative"),
            0 => {
                let at = (row * self.blocks + block) * BLOCK / 2;
                let codes = codes.get(at..at + BLOCK / 2)?;
                (!may_have_scale_zero(u64::from_le_bytes(codes.try_into().ok()?))).then_some(ZERO)
            }
            _ => None,
        }
    }
}

/// Whether one of eight scales may be zero, negative or NaN. Carries between bytes can only add false positives.
fn is_unusual(scales: u64) -> bool {
    const ONES: u64 = u64::MAX / 0xff;
    (scales | scales.wrapping_add(ONES) | scales.wrapping_sub(ONES)) & (ONES << 7) != 0
}

/// Whether a quantizer may write these sixteen elements with a scale of zero: if all are zero, or if all nonzero ones have the
/// largest value, as ComfyUI's quantizer writes them when it divides by a scale that underflowed.
fn may_have_scale_zero(codes: u64) -> bool {
    let magnitudes = codes & 0x7777_7777_7777_7777;
    (magnitudes ^ (magnitudes >> 1)) & 0x3333_3333_3333_3333 == 0
}

/// Half the bytes of a tensor.
pub(super) fn half_of(bytes: &Bytes, second: bool) -> Option<Bytes> {
    let middle = bytes.len() / 2;
    bytes.slice(if second { middle..bytes.len() } else { 0..middle })
}

/// The scales of half the rows; `None` if the half does not begin at a whole tile.
pub(super) fn half(scaling: SliceScaling, rows: usize, second: bool) -> Option<SliceScaling> {
    Some(match scaling {
        SliceScaling::Rows(scales) => SliceScaling::Rows(half_of(&scales, second)?),
        SliceScaling::Blocks16 { layout, .. } if layout.tiled && !(rows / 2).is_multiple_of(TILE_ROWS) => return None,
        SliceScaling::Blocks16 { scales, tensor, layout } => {
            SliceScaling::Blocks16 { scales: half_of(&scales, second)?, tensor, layout }
        }
        same => same,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::formats::e2m1;

    #[test]
    fn the_fast_test_misses_no_invalid_scale() {
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Most bytes are valid, so single invalid bytes have valid neighbors.
            let valid = (state ^ (state >> 29)) & 0x3f3f_3f3f_3f3f_3f3f | 0x4040_4040_4040_4040;
            for (bad, shift) in [0, 0x7f, 0x80, 0xff, 0xc3].into_iter().zip([0, 8, 24, 40, 56]) {
                assert!(is_unusual(valid & !(0xff << shift) | bad << shift), "{valid:x} {bad:x}");
            }
        }
        assert!(!is_unusual(0x7e01_4038_3f02_7d10));
    }

    #[test]
    fn only_zeros_and_the_largest_elements_may_have_a_scale_of_zero() {
        for code in 0..16_u8 {
            let expected = e2m1(code) == 0.0 || e2m1(code).abs() == 6.0;
            for place in 0..16 {
                assert_eq!(may_have_scale_zero(u64::from(code) << (4 * place)), expected, "{code} {place}");
                assert_eq!(may_have_scale_zero(!(15 << (4 * place)) | u64::from(code) << (4 * place)), expected);
            }
        }
    }

    #[test]
    fn places_are_the_inverse_of_offsets() {
        let (rows, blocks) = (300, 10);
        let along = nvfp4::tiles_along(blocks * BLOCK);
        let (tiled, plain) = (Grid { rows, blocks, tiled: true }, Grid { rows, blocks, tiled: false });
        for row in 0..rows {
            for block in 0..blocks {
                assert_eq!(tiled.place(nvfp4::scale_offset(row, block, along)), (row, block));
                assert_eq!(plain.place(row * blocks + block), (row, block));
            }
        }
    }
}
