//! NVFP4: e2m1 elements with an e4m3 scale for every sixteen columns of a row, and an f32 scale for the whole tensor.
//!
//! The block scales of a [`Tensor`](super::Tensor) are stored as FP4 tensor cores read them: in tiles of 128 rows by four blocks,
//! 512 bytes each, that run along a row of tiles first. Within a tile sixteen bytes hold the four scales of rows r, r + 32, r + 64
//! and r + 96. A matrix is padded with zeros to whole tiles.

use super::minifloat::{e2m1, e4m3, to_e2m1, to_e4m3};

/// Columns that share a scale.
pub const BLOCK: usize = 16;
/// Rows of a tile of scales.
pub const TILE_ROWS: usize = 128;
/// Columns of the matrix that a tile of scales covers.
pub const TILE_COLS: usize = 4 * BLOCK;
/// Bytes of a tile of scales.
pub const TILE_BYTES: usize = 512;

/// The number of tiles along a row of a matrix.
pub const fn tiles_along(cols: usize) -> usize {
    cols.div_ceil(TILE_COLS)
}

/// Bytes of the tiled scales of a matrix.
pub const fn scale_bytes(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * tiles_along(cols) * TILE_BYTES
}

/// The byte at which the scale of a block stands among the tiled scales of a matrix with so many tiles along a row.
pub const fn scale_offset(row: usize, block: usize, tiles_along: usize) -> usize {
    (row / TILE_ROWS * tiles_along + block / 4) * TILE_BYTES + row % 32 * 16 + row % TILE_ROWS / 32 * 4 + block % 4
}

/// What the values of a block are multiples of: the product of both scales, rounded once.
pub fn unit(tensor: f32, scale: u8) -> f32 {
    tensor * e4m3(scale)
}

/// Decodes the elements of a block, two to a byte.
pub fn decode_block(codes: &[u8], unit: f32, to: &mut [f32]) {
    for (pair, code) in to.chunks_mut(2).zip(codes) {
        for (value, code) in pair.iter_mut().zip([code >> 4, *code]) {
            *value = e2m1(code) * unit;
        }
    }
}

/// Quantises a block relative to the scale of the whole tensor: writes the elements, and returns the block's scale. It is the
/// largest magnitude divided by six, so that this becomes the largest element.
pub fn encode_block(values: &[f32], tensor: f32, codes: &mut [u8]) -> u8 {
    // NaN must propagate: the elements cannot hold it.
    let largest = values.iter().fold(0.0_f32, |most, v| if v.is_nan() || v.abs() > most { v.abs() } else { most });
    let scale = to_e4m3(largest / 6.0 / tensor);
    let unit = unit(tensor, scale);
    let code = |value: f32| if unit == 0.0 { 0 } else { to_e2m1(value / unit) };
    for (pair, byte) in values.chunks(2).zip(codes) {
        *byte = code(pair[0]) << 4 | pair.get(1).map_or(0, |&odd| code(odd));
    }
    scale
}
