//! Quantizes plain weights: computes their scales and codes as the files of ComfyUI and Black Forest Labs store them.
//!
//! A scale is the largest magnitude over the largest code, and all divisions are in f32. Multiplying by reciprocals is faster,
//! but would change one code in a thousand, and the files would differ from other programs' files.

use super::formats::Format;
use super::{Bytes, DType, Scale, Scales, SliceScaling, Stored, WeightSlice, nvfp4};
use rayon::prelude::*;
use std::mem::discriminant;
use std::ops::Range;
use std::sync::Arc;

/// Values decoded at a time. They stay in the first-level cache. A multiple of NVFP4's block size.
const CHUNK: usize = 1024;
/// The least number of chunks per thread.
const GRAIN: usize = 64;
/// Rows with their own scales that a thread quantizes at a time.
const GRAIN_ROWS: usize = 16;

/// The largest magnitude of plain weights, or NaN if one is NaN or infinite: no scale fits such a matrix.
///
/// # Panics
/// If a part is already quantized.
pub fn largest_magnitude(parts: &[WeightSlice]) -> f32 {
    let largest = |part: &WeightSlice| {
        let chunks = plain(part, 0..part.rows).par_chunks(part.dtype.bytes(CHUNK)).with_min_len(GRAIN);
        chunks.map(|bytes| largest_bits(part.dtype, bytes)).max().unwrap_or(0)
    };
    match parts.iter().map(largest).max().unwrap_or(0) {
        bits if bits < f32::INFINITY.to_bits() as i32 => f32::from_bits(bits as u32),
        _ => f32::NAN,
    }
}

/// The largest magnitude in a chunk, as bits. Positive floats have the order of their bits, and infinity and NaN are above all
/// others. They are compared as signed numbers, which every processor does in vectors.
fn largest_bits(dtype: DType, bytes: &[u8]) -> i32 {
    let mut values = [0.0; CHUNK];
    let values = &mut values[..dtype.elements(bytes.len())];
    dtype.decode(bytes, values);
    values.iter().map(|value| value.abs().to_bits() as i32).max().unwrap_or(0)
}

/// Quantizes rows of plain weights to elements of a type, all with this scale.
///
/// # Panics
/// If the part is already quantized or has no such rows, or if `to` has the wrong size.
pub fn encode_scaled(part: &WeightSlice, rows: Range<usize>, dtype: DType, scale: Scale, to: &mut [u8]) {
    let bytes = plain(part, rows);
    assert_eq!(to.len(), dtype.bytes(part.dtype.elements(bytes.len())), "bytes of {dtype:?}");
    let (mut chunk, scale) = ([0.0; CHUNK], scale.get());
    for (to, bytes) in to.chunks_mut(dtype.bytes(CHUNK)).zip(bytes.chunks(part.dtype.bytes(CHUNK))) {
        let chunk = &mut chunk[..dtype.elements(to.len())];
        part.dtype.decode(bytes, chunk);
        chunk.iter_mut().for_each(|value| *value /= scale);
        dtype.encode(chunk, to);
    }
}

/// Quantizes rows of plain weights to NVFP4 with this tensor scale, in the layout of
/// [`Nvfp4Layout::COMFY`](super::Nvfp4Layout::COMFY): the even column in the high nibble, and the block scales of these rows in
/// tiles padded with zeros.
///
/// # Panics
/// If the part is already quantized or has no such rows, if the rows do not begin at a whole tile or consist of whole blocks, or
/// if the codes or the scale tiles have the wrong size.
pub fn encode_nvfp4(part: &WeightSlice, rows: Range<usize>, tensor: Scale, codes: &mut [u8], tiled_scales: &mut [u8]) {
    let cols = part.cols();
    assert!(rows.start.is_multiple_of(nvfp4::TILE_ROWS), "row {} is inside a tile of scales", rows.start);
    assert!(cols.is_multiple_of(nvfp4::BLOCK), "{cols} columns are not whole blocks");
    assert_eq!(tiled_scales.len(), nvfp4::scale_bytes(rows.len(), cols), "tiles of scales");
    let bytes = plain(part, rows);
    assert_eq!(2 * codes.len(), part.dtype.elements(bytes.len()), "two elements to a byte");
    tiled_scales.fill(0);
    if codes.is_empty() {
        return;
    }
    let (mut chunk, tiles_along) = ([0.0; CHUNK], nvfp4::tiles_along(cols));
    for (row, (codes, bytes)) in codes.chunks_mut(cols / 2).zip(bytes.chunks(part.dtype.bytes(cols))).enumerate() {
        let chunks = codes.chunks_mut(CHUNK / 2).zip(bytes.chunks(part.dtype.bytes(CHUNK)));
        for (i, (codes, bytes)) in chunks.enumerate() {
            let chunk = &mut chunk[..2 * codes.len()];
            part.dtype.decode(bytes, chunk);
            let blocks = chunk.as_chunks::<{ nvfp4::BLOCK }>().0.iter().zip(codes.as_chunks_mut::<{ nvfp4::BLOCK / 2 }>().0);
            for (block, (values, codes)) in blocks.enumerate() {
                let at = nvfp4::scale_offset(row, i * (CHUNK / nvfp4::BLOCK) + block, tiles_along);
                tiled_scales[at] = nvfp4::encode_block(values, tensor.get(), codes);
            }
        }
    }
}

/// Whether [`encode`] can quantize a part to this format. The part must be plain, with rows of whole blocks, and the format a
/// quantization target with the scales of [`Stored::by_rows`].
pub fn encodes(part: &WeightSlice, to: Stored) -> bool {
    let Format { block, target, .. } = to.dtype.format();
    let has_scales = discriminant(&Stored::by_rows(to.dtype, Scale::ONE).scales) == discriminant(&to.scales);
    target.is_some() && has_scales && is_plain(part) && part.cols().is_multiple_of(*block)
}

/// Quantizes rows of plain weights in parallel, with row scales (little-endian f32), tiled block scales, or none. Returns false
/// if values are not finite and a row has no scale. Then some of the rows are not written.
///
/// # Panics
/// If [`encodes`] is false, and as for [`encode_scaled`] and [`encode_nvfp4`].
pub fn encode(part: &WeightSlice, rows: Range<usize>, to: Stored, codes: &mut [u8], scales: &mut [u8]) -> bool {
    let (first, cols) = (rows.start, part.cols());
    assert!(encodes(part, to) && codes.len() == to.dtype.bytes(rows.len() * cols), "{:?} as {to:?}", part.stored());
    if codes.is_empty() {
        return true;
    }
    match to.scales {
        Scales::Blocks16(tensor) => {
            let tiles = codes.par_chunks_mut(nvfp4::TILE_ROWS * cols / 2);
            let tiles = tiles.zip(scales.par_chunks_mut(nvfp4::scale_bytes(nvfp4::TILE_ROWS, cols))).enumerate();
            tiles.for_each(|(tile, (codes, scales))| {
                let start = first + tile * nvfp4::TILE_ROWS;
                encode_nvfp4(part, start..start + 2 * codes.len() / cols, tensor, codes, scales);
            });
            true
        }
        Scales::Unscaled | Scales::Tensor(_) => {
            let each = codes.par_chunks_mut(to.dtype.bytes(cols)).with_min_len(GRAIN_ROWS).enumerate();
            each.for_each(|(row, codes)| encode_scaled(part, first + row..first + row + 1, to.dtype, Scale::ONE, codes));
            true
        }
        Scales::Rows => {
            assert_eq!(scales.len(), 4 * rows.len(), "a scale for each row");
            let each = codes
                .par_chunks_mut(to.dtype.bytes(cols))
                .zip(scales.as_chunks_mut::<4>().0)
                .with_min_len(GRAIN_ROWS)
                .enumerate();
            each.all(|(row, (codes, scale_bytes))| {
                let row = first + row..first + row + 1;
                let bytes = plain(part, row.clone()).chunks(part.dtype.bytes(CHUNK));
                let largest = bytes.map(|bytes| largest_bits(part.dtype, bytes)).max().unwrap_or(0);
                let Some(scale) = to.dtype.scale_for(f32::from_bits(largest as u32)) else { return false };
                *scale_bytes = scale.get().to_le_bytes();
                encode_scaled(part, row, to.dtype, scale, codes);
                true
            })
        }
    }
}

/// Quantizes all rows of a part, or returns `None` where [`encode`] fails.
///
/// # Panics
/// If [`encodes`] is false.
pub fn encoded(part: &WeightSlice, to: Stored) -> Option<(Bytes, Bytes)> {
    let (rows, cols) = (part.rows, part.cols());
    let (mut codes, mut scales) = (vec![0; to.dtype.bytes(rows * cols)], vec![0; scale_bytes(rows, cols, to.scales)]);
    encode(part, 0..rows, to, &mut codes, &mut scales).then(|| (Bytes::new(Arc::new(codes)), Bytes::new(Arc::new(scales))))
}

/// Bytes of a matrix's row scales or block scales.
pub const fn scale_bytes(rows: usize, cols: usize, scales: Scales) -> usize {
    match scales {
        Scales::Unscaled | Scales::Tensor(_) => 0,
        Scales::Rows => 4 * rows,
        Scales::Blocks16(_) => nvfp4::scale_bytes(rows, cols),
    }
}

fn is_plain(part: &WeightSlice) -> bool {
    matches!(part.scaling, SliceScaling::Unscaled) && !part.dtype.is_quantized()
}

/// The bytes of rows of plain elements.
fn plain(part: &WeightSlice, rows: Range<usize>) -> &[u8] {
    assert!(is_plain(part), "{:?} are quantized already", part.stored());
    let row = part.dtype.bytes(part.cols());
    &part.bytes[rows.start * row..rows.end * row]
}
