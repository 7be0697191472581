//! NVFP4: e2m1 elements with an e4m3 scale for every sixteen columns of a row, and an f32 scale for the whole tensor.
//!
//! A [`Tensor`](super::super::Tensor) stores its block scales as FP4 tensor cores read them: in tiles of 128 rows by four blocks,
//! 512 bytes each, row-major by tile. Within a tile, sixteen bytes hold the four scales of rows r, r + 32, r + 64 and r + 96.
//! Files pad a matrix with zeros to whole tiles. The padding of activations is undefined.

use super::minifloat::Minifloat;
use super::{E4M3_MAX, Format, Scale, ScaleKind, Target, e4m3, to_e4m3};
use rayon::prelude::*;

pub(super) static FORMAT: Format = Format {
    name: "e2m1",
    label: "nvfp4",
    title: "NVFP4",
    stored_as: "U8",
    declared: "nvfp4",
    block: BLOCK,
    block_bytes: BLOCK / 2,
    scales: ScaleKind::Blocks,
    is_quantized: true,
    is_expanded: false,
    target: Some(Target {
        file_help: "Half a byte per weight, one scale per sixteen; in text encoders only the MLPs, the rest is FP8",
        load_help: "e2m1 with one scale per sixteen columns of a row: less than a third of the memory",
        // The block scales follow the values. They are e4m3, so the tensor scale only has to keep the largest value in range: 168
        // after norms and attention, 2688 after SwiGLU. Blocks have full precision down to a largest value of 0.006 and 0.09.
        input_scales: Some([Scale::power_of_two(-4), Scale::ONE]),
    }),
    holds_results: true,
    mantissa: Some(1),
    largest: E4M3_MAX * E2M1_MAX,
    saturates_at: None,
    nan: None,
    decode: |bytes, to| to.as_chunks_mut().0.iter_mut().zip(bytes).for_each(|(t, &b)| *t = e2m1_pair(b)),
    encode,
};

type E2m1 = Minifloat<2, 1>;

const LARGEST: u8 = 7;

/// The values of both codes in a byte, high nibble first.
static PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [E2m1::decode(byte as u8 >> 4), E2m1::decode(byte as u8 & 15)];
        byte += 1;
    }
    pairs
};

/// The largest value of e2m1.
pub const E2M1_MAX: f32 = E2m1::decode(LARGEST);

/// The value of an e2m1 code, the low four bits.
pub fn e2m1(code: u8) -> f32 {
    PAIRS[usize::from(code)][1]
}

/// The values of the two e2m1 codes in a byte, high nibble first.
pub fn e2m1_pair(byte: u8) -> [f32; 2] {
    PAIRS[usize::from(byte)]
}

/// The nearest e2m1 code. Values beyond 6 become 6. There is no NaN code: NaN must go into the scale.
pub fn to_e2m1(value: f32) -> u8 {
    if value.is_nan() { LARGEST } else { E2m1::encode(value, LARGEST) }
}

/// Rounds values to elements, two to a byte.
fn encode(values: &[f32], to: &mut [u8]) {
    to.iter_mut().zip(values.as_chunks().0).for_each(|(t, &[even, odd])| *t = to_e2m1(even) << 4 | to_e2m1(odd));
}

/// Columns that share a scale.
pub const BLOCK: usize = 16;
/// Rows of a scale tile.
pub const TILE_ROWS: usize = 128;
/// Matrix columns that a scale tile covers.
pub const TILE_COLS: usize = 4 * BLOCK;
/// Bytes of a scale tile.
pub const TILE_BYTES: usize = 512;

/// The number of tiles along a row of a matrix.
pub const fn tiles_along(cols: usize) -> usize {
    cols.div_ceil(TILE_COLS)
}

/// Bytes of a matrix's tiled scales.
pub const fn scale_bytes(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * tiles_along(cols) * TILE_BYTES
}

/// The byte offset of a block's scale among the tiled scales of a matrix. `tiles_along` is the number of tiles along a row.
pub const fn scale_offset(row: usize, block: usize, tiles_along: usize) -> usize {
    (row / TILE_ROWS * tiles_along + block / 4) * TILE_BYTES + row % 32 * 16 + row % TILE_ROWS / 32 * 4 + block % 4
}

/// The row and block of the scale at this byte. Tiles may extend past the end of the matrix.
pub const fn scale_place(at: usize, tiles_along: usize) -> (usize, usize) {
    let (tile, within) = (at / TILE_BYTES, at % TILE_BYTES);
    (tile / tiles_along * TILE_ROWS + within / 16 + within % 16 / 4 * 32, tile % tiles_along * 4 + within % 4)
}

/// The code of the largest tiled scale of a matrix. Negative and NaN scales count as the largest. Tile padding does not count.
pub fn largest_scale(scales: &[u8], rows: usize, cols: usize) -> u8 {
    /// The least number of tiles per thread.
    const GRAIN: usize = 64;
    let (blocks, along) = (cols / BLOCK, tiles_along(cols));
    let largest = |(i, tile): (usize, &[u8])| {
        let is_inside = |at: usize| {
            let (row, block) = scale_place(i * TILE_BYTES + at, along);
            row < rows && block < blocks
        };
        match is_inside(TILE_BYTES - 1) {
            true => tile.iter().copied().max(),
            false => tile.iter().enumerate().filter(|(at, _)| is_inside(*at)).map(|(_, scale)| *scale).max(),
        }
    };
    scales.par_chunks(TILE_BYTES).with_min_len(GRAIN).enumerate().filter_map(largest).max().unwrap_or(0)
}

/// The unit of a block's values: the product of both scales, rounded once.
pub fn unit(tensor: f32, scale: u8) -> f32 {
    tensor * e4m3(scale)
}

/// Decodes the elements of a block, two to a byte.
pub fn decode_block(codes: &[u8], unit: f32, to: &mut [f32]) {
    to.as_chunks_mut().0.iter_mut().zip(codes).for_each(|(pair, &byte)| *pair = e2m1_pair(byte).map(|value| value * unit));
}

/// Quantizes a block relative to the tensor scale: writes the elements, and returns the block's scale. The scale is the largest
/// magnitude divided by six, so that this magnitude becomes the largest element.
///
/// # Panics
/// If there are more values than a block has, or if `codes` does not hold two values per byte.
pub fn encode_block(values: &[f32], tensor: f32, codes: &mut [u8]) -> u8 {
    // Magnitudes have the order of their bits, and NaN is above all of them. NaN must reach the scale, because elements cannot hold it.
    let largest = values.iter().map(|value| value.abs().to_bits()).max().map_or(0.0, f32::from_bits);
    let scale = to_e4m3(largest / 6.0 / tensor);
    let unit = unit(tensor, scale);
    let mut multiples = [0.0; BLOCK];
    let multiples = &mut multiples[..values.len()];
    if unit != 0.0 {
        multiples.iter_mut().zip(values).for_each(|(multiple, value)| *multiple = value / unit);
    }
    encode(multiples, codes);
    scale
}

/// The offsets of the tiled block scales of a matrix with `cols` columns, row by row without end.
fn scale_offsets(cols: usize) -> impl Iterator<Item = usize> {
    let along = tiles_along(cols);
    (0..).flat_map(move |row| (0..cols / BLOCK).map(move |block| scale_offset(row, block, along)))
}

/// Decodes rows of whole blocks with tiled scales.
pub fn decode_rows(codes: &[u8], scales: &[u8], cols: usize, tensor: f32, to: &mut [f32]) {
    let blocks = to.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK / 2));
    blocks.zip(scale_offsets(cols)).for_each(|((to, codes), at)| decode_block(codes, unit(tensor, scales[at]), to));
}

/// Quantizes rows of whole blocks and writes their scales into tiles. The rest of the tiles is unmodified. Returns the elements.
pub fn encode_rows(values: &[f32], cols: usize, tensor: f32, scales: &mut [u8]) -> Vec<u8> {
    let mut codes = vec![0; values.len() / 2];
    let blocks = values.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(BLOCK / 2));
    blocks.zip(scale_offsets(cols)).for_each(|((values, codes), at)| scales[at] = encode_block(values, tensor, codes));
    codes
}
