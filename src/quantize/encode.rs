//! Quantizes layers one by one into their places in the file, a few rows at a time, so that memory is bounded for layers of any
//! size. The bytes and the measured errors do not depend on the number of threads.

use super::layout::{Content, Tensor, WeightLayout, declaration};
use super::source::SourceLayer;
use crate::error::{Error, Result};
use crate::output::StagedFile;
use crate::tensor::nvfp4::{BLOCK, TILE_ROWS, scale_bytes, scale_offset, tiles_along};
use crate::tensor::quantize::{self, encode_nvfp4, encode_scaled, largest_magnitude};
use crate::tensor::{Bytes, DType, Scale, ScaleKind, Scales, SliceScaling, Stored, WeightSlice};
use flate2::Crc;
use kiln_numerics::scan::{non_finite, squared_error};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Approximate input bytes per thread and chunk.
const CHUNK_BYTES: usize = 1 << 20;
/// Approximate input bytes that are encoded between two writes.
const BATCH_BYTES: usize = 64 << 20;

/// The result of a finished layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// The bits of the weight scale, if the layer is quantized. Among row scales, the largest.
    pub scale_bits: Option<u32>,
    /// The bits of the input scale, if the file has one.
    pub input_scale_bits: Option<u32>,
    /// The quantization error.
    pub error: ErrorSums,
    /// The CRC-32 of each of the layer's tensors, in storage order.
    pub checksums: Vec<u32>,
}

/// The sums of squared errors and of squared values, as bits of f64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorSums {
    errors: u64,
    values: u64,
}

impl ErrorSums {
    fn new(errors: f64, values: f64) -> Self {
        Self { errors: errors.to_bits(), values: values.to_bits() }
    }

    /// Adds two pairs of sums.
    pub fn plus(self, other: Self) -> Self {
        let sum = |a: u64, b: u64| f64::from_bits(a) + f64::from_bits(b);
        Self::new(sum(self.errors, other.errors), sum(self.values, other.values))
    }

    /// The root mean square of the errors, relative to the root mean square of the values.
    pub fn relative(self) -> f64 {
        let (errors, values) = (f64::from_bits(self.errors), f64::from_bits(self.values));
        if values > 0.0 { (errors / values).sqrt() } else { 0.0 }
    }
}

/// Rows of a part, and the row of the layer at which they begin.
struct Chunk<'a> {
    part: &'a WeightSlice,
    rows: Range<usize>,
    at: usize,
}

/// An encoded chunk, as the file stores it.
struct Encoded {
    elements: Bytes,
    /// The row or block scales; empty if the weight has only one scale.
    scales: Bytes,
    error: ErrorSums,
}

/// Writes all tensors of a layer. `path` is its source file. `batch_done` is called with the size of every written batch, and may
/// fail to stop the work.
pub fn write_layer(
    layer: &SourceLayer,
    layout: WeightLayout,
    tensors: &[&Tensor],
    input_scale: Option<f32>,
    path: &Path,
    to: &mut StagedFile,
    batch_done: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Finished> {
    let format = layer.spec.format;
    let scale = format.map(|format| weight_scale(layer, format, path)).transpose()?;
    let chunks = chunks(layer);
    let batch = (BATCH_BYTES / CHUNK_BYTES.max(layer.row_bytes())).max(1);
    let (mut elements, mut scales) = (Crc::new(), Crc::new());
    let mut error = ErrorSums::default();
    let place = |content: Content| tensors.iter().find(|tensor| tensor.content == content).map_or(0, |t| t.range.start);
    let (elements_at, scales_at) = (place(Content::Elements), place(Content::Scales));
    let cols: usize = layer.spec.shape.get(1..).unwrap_or_default().iter().product();
    for batch in chunks.chunks(batch) {
        let encoded: Option<Vec<Encoded>> = batch.par_iter().map(|chunk| encode(chunk, format.zip(scale), layout)).collect();
        let encoded = encoded.ok_or_else(|| unscalable(layer, path, NOT_FINITE))?;
        let mut written = 0;
        for (chunk, encoded) in batch.iter().zip(encoded) {
            let dtype = format.unwrap_or(DType::Bf16);
            to.write_at(elements_at + dtype.bytes(chunk.at * cols) as u64, &encoded.elements)?;
            elements.update(&encoded.elements);
            if let Some(format) = format.filter(|_| !encoded.scales.is_empty()) {
                to.write_at(scales_at + layout.scale_bytes(format, [chunk.at, cols]), &encoded.scales)?;
                scales.update(&encoded.scales);
            }
            error = error.plus(encoded.error);
            written += (encoded.elements.len() + encoded.scales.len()) as u64;
        }
        batch_done(written)?;
    }
    let mut checksums = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let small = match tensor.content {
            Content::Elements if layer.spec.is_verbatim => layer.verbatim.to_vec(),
            Content::Elements => {
                checksums.push(elements.sum());
                continue;
            }
            Content::Scales => {
                checksums.push(scales.sum());
                continue;
            }
            Content::WeightScale => scale.map_or(Vec::new(), |scale| scale.get().to_le_bytes().to_vec()),
            Content::InputScale => input_scale.map_or(Vec::new(), |scale| scale.to_le_bytes().to_vec()),
            Content::Declaration => format.map_or(Vec::new(), |format| declaration(format).into_bytes()),
        };
        to.write_at(tensor.range.start, &small)?;
        let mut sum = Crc::new();
        sum.update(&small);
        checksums.push(sum.sum());
    }
    Ok(Finished {
        scale_bits: scale.map(|scale| scale.get().to_bits()),
        input_scale_bits: input_scale.map(f32::to_bits),
        error,
        checksums,
    })
}

const NOT_FINITE: &str = "has values that are not finite";

/// The scale of a whole weight. For a weight with row scales it is the largest one. Fails if no file may have this scale.
fn weight_scale(layer: &SourceLayer, format: DType, path: &Path) -> Result<Scale> {
    let largest = largest_magnitude(&layer.parts);
    match Scale::stored(largest / format.format().largest) {
        _ if !largest.is_finite() => Err(unscalable(layer, path, NOT_FINITE)),
        // The codes of zeros are zeros, whatever the scale.
        _ if largest == 0.0 => Ok(Scale::ONE),
        Ok(scale) => Ok(scale),
        Err(why) => Err(unscalable(layer, path, &format!("has values of up to {largest:e}, which is {why}"))),
    }
}

fn unscalable(layer: &SourceLayer, path: &Path, what: &str) -> Error {
    let error = Error::bad_file(path, "cannot be quantized", format!("tensor `{}` {what}", layer.spec.weight));
    error.with_hint("the file is damaged; download it again")
}

/// The rows of a layer in chunks of about equal size. A quantized layer's chunks begin at whole tiles of block scales.
fn chunks(layer: &SourceLayer) -> Vec<Chunk<'_>> {
    let grain = if layer.spec.format.is_some() { TILE_ROWS } else { 1 };
    let step = grain * (CHUNK_BYTES / (grain * layer.row_bytes()).max(1)).max(1);
    let (mut chunks, mut first) = (Vec::new(), 0);
    for part in &layer.parts {
        chunks.extend((0..part.rows).step_by(step).map(|row| Chunk {
            part,
            rows: row..part.rows.min(row + step),
            at: first + row,
        }));
        first += part.rows;
    }
    chunks
}

/// Encodes rows in a format with the weight's scale, or rounds them to BF16. `None` if values are not finite in BF16, or if the format
/// has row scales and none fits a row.
fn encode(chunk: &Chunk<'_>, format: Option<(DType, Scale)>, layout: WeightLayout) -> Option<Encoded> {
    let (part, rows, cols) = (chunk.part, chunk.rows.clone(), chunk.part.cols());
    let Some((format, scale)) = format else {
        let mut bytes = vec![0; DType::Bf16.bytes(rows.len() * cols)];
        let lines = bytes.chunks_mut(DType::Bf16.bytes(cols).max(1));
        rows.zip(lines).for_each(|(row, line)| part.convert(row, Stored::plain(DType::Bf16), line));
        if non_finite("BF16", &bytes).first.is_some() {
            return None;
        }
        return Some(Encoded { elements: owned(bytes), scales: owned(Vec::new()), error: ErrorSums::default() });
    };
    let mut elements = vec![0; format.bytes(rows.len() * cols)];
    let (scales, scaling) = match (format.format().scales, layout) {
        (ScaleKind::None, _) => {
            encode_scaled(part, rows.clone(), format, Scale::ONE, &mut elements);
            (owned(Vec::new()), SliceScaling::Unscaled)
        }
        (ScaleKind::TensorOrRows, WeightLayout::Comfy) => {
            encode_scaled(part, rows.clone(), format, scale, &mut elements);
            (owned(Vec::new()), SliceScaling::Tensor(scale))
        }
        (ScaleKind::TensorOrRows, WeightLayout::Diffusers) => {
            let (mut scales, by_row) = (vec![0; 4 * rows.len()], Stored { dtype: format, scales: Scales::Rows });
            if !quantize::encode(part, rows.clone(), by_row, &mut elements, &mut scales) {
                return None;
            }
            let scales = owned(scales);
            (scales.clone(), SliceScaling::Rows(scales))
        }
        (ScaleKind::Blocks, _) => {
            let mut scales = vec![0; scale_bytes(rows.len(), cols)];
            encode_nvfp4(part, rows.clone(), scale, &mut elements, &mut scales);
            if layout == WeightLayout::Diffusers {
                elements.iter_mut().for_each(|pair| *pair = pair.rotate_left(4));
                scales = row_major(&scales, rows.len(), cols);
            }
            let scales = owned(scales);
            (scales.clone(), SliceScaling::Blocks16 { scales, tensor: scale, layout: layout.nvfp4() })
        }
    };
    let elements = owned(elements);
    let stored = WeightSlice { bytes: elements.clone(), dtype: format, rows: rows.len(), scaling };
    let (errors, values) = squared_error(part, rows, &stored);
    let error = ErrorSums::new(errors, values);
    Some(Encoded { elements, scales, error })
}

/// Rearranges block scales from tiles to row-major order.
fn row_major(tiled: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let (blocks, along) = (cols / BLOCK, tiles_along(cols));
    (0..rows * blocks).map(|at| tiled[scale_offset(at / blocks, at % blocks, along)]).collect()
}

fn owned(bytes: Vec<u8>) -> Bytes {
    Bytes::new(Arc::new(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a chunk and decodes it again. Returns the values and their error.
    fn read(part: &WeightSlice, format: DType, scale: f32, layout: WeightLayout) -> Option<(Vec<f32>, ErrorSums)> {
        let (rows, scale) = (0..part.rows, Scale::new(scale).unwrap());
        let chunk = Chunk { part, rows: rows.clone(), at: 0 };
        let Encoded { elements, scales, error } = encode(&chunk, Some((format, scale)), layout)?;
        assert_eq!(scales.len() as u64, layout.scale_bytes(format, [part.rows, part.cols()]));
        let scaling = match format.format().scales {
            ScaleKind::None => SliceScaling::Unscaled,
            ScaleKind::TensorOrRows => SliceScaling::Rows(scales),
            ScaleKind::Blocks => SliceScaling::Blocks16 { scales, tensor: scale, layout: layout.nvfp4() },
        };
        let stored = WeightSlice { bytes: elements, dtype: format, rows: part.rows, scaling };
        assert!(stored.is_complete());
        let mut values = vec![0.0; part.rows * part.cols()];
        values.chunks_mut(part.cols()).zip(rows).for_each(|(to, row)| stored.decode(row, to));
        Some((values, error))
    }

    #[test]
    fn both_orders_of_nvfp4_have_the_same_values_where_tiles_are_padded() {
        let (rows, cols) = (130, 48);
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919 % 1009) as f32 - 504.0) * (1 + i / 16 % 9) as f32).collect();
        let part = WeightSlice::plain(owned(DType::F32.encoded(&values)), DType::F32, rows);
        let [comfy, diffusers] =
            [WeightLayout::Comfy, WeightLayout::Diffusers].map(|layout| read(&part, DType::E2m1, 1.75, layout).unwrap());
        assert!(comfy == diffusers && comfy.1.relative() > 0.05 && comfy.1.relative() < 0.15, "{:?}", comfy.1);
    }

    #[test]
    fn a_row_that_is_not_finite_has_no_scale() {
        let fits = |second: f32| {
            let part = WeightSlice::plain(owned(DType::F32.encoded(&[448.0, -1.0, 0.0, second])), DType::F32, 2);
            read(&part, DType::E4m3, 1.0, WeightLayout::Diffusers).map(|(values, _)| values)
        };
        assert_eq!(fits(0.0), Some(vec![448.0, -1.0, 0.0, 0.0]));
        assert_eq!(fits(-0.5), Some(vec![448.0, -1.0, 0.0, -0.5]));
        // This row's scale would be zero, and so are its values.
        assert_eq!(fits(f32::from_bits(1)), Some(vec![448.0, -1.0, 0.0, 0.0]));
        assert_eq!(fits(f32::INFINITY), None);
    }
}
