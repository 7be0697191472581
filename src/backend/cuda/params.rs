//! Kernel parameters: matrices in the form of `abi.h`, the addresses and strides that kernels need, and the grids of kernels without
//! selectable tiles.

use super::abi::{self, KlGemmStream, KlMat, KlTensorMap};
use super::driver::{MapSpec, Swizzle};
use super::select::GemmOperands;
use crate::tensor::{DType, nvfp4};

/// Values that a thread of a vectorized kernel loads at once.
pub const VECTOR: u32 = 8;
/// Rows and columns are 32-bit numbers in the kernels.
pub const SIDE_LIMIT: usize = u32::MAX as usize;
/// CUDA counts CTAs along y and z in sixteen bits.
const GRID_LIMIT: u32 = 65_535;

/// Kernels expect block scales where tensors have them.
const _: () = assert!(
    abi::KL_SCALE_TILE_ROWS as usize == nvfp4::TILE_ROWS
        && abi::KL_SCALE_TILE_COLS as usize == nvfp4::TILE_COLS
        && abi::KL_SCALE_TILE_BYTES as usize == nvfp4::TILE_BYTES
);

/// An absent matrix.
pub const NONE: KlMat = KlMat { data: 0, scales: 0, stride: 0, rows: 0, cols: 0, dtype: 0, scale: 1.0 };

/// An absent tensor map.
pub const NO_MAP: KlTensorMap = KlTensorMap { opaque: [0; 16] };

/// The code of dtypes that have none in `abi.h`. Operands with such dtypes are refused.
pub const NO_CODE: u32 = u32::MAX;

/// The code of a dtype in `abi.h`.
pub const fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => abi::KL_F32,
        DType::Bf16 => abi::KL_BF16,
        DType::F16 => abi::KL_F16,
        DType::U8 => abi::KL_U8,
        DType::E4m3 => abi::KL_E4M3,
        DType::E2m1 => abi::KL_E2M1,
        _ => NO_CODE,
    }
}

/// Bits of an element of a dtype of `abi.h`.
const fn bits(dtype: u32) -> u64 {
    let mut all = DType::ALL;
    while let [first, rest @ ..] = all {
        if dtype_code(*first) == dtype {
            return first.bits() as u64;
        }
        all = rest;
    }
    16
}

/// Bytes of consecutive elements of a dtype of `abi.h`.
pub const fn bytes(elements: u64, dtype: u32) -> u64 {
    elements * bits(dtype) / 8
}

/// The operand types of a stream's tensor-core kernels.
pub fn operands(stream: &KlGemmStream) -> GemmOperands {
    let e4m3 = |m: &KlMat| m.dtype == abi::KL_E4M3;
    let codes = |m: &KlMat| e4m3(m) || m.dtype == abi::KL_E2M1;
    if e4m3(&stream.x) {
        GemmOperands::Fp8
    } else if codes(&stream.x) {
        GemmOperands::Nvfp4
    } else if stream.w.iter().any(codes) || stream.part.iter().any(|part| codes(&part.out)) {
        GemmOperands::MixedInput
    } else {
        GemmOperands::Bf16
    }
}

/// K of a grouped GEMM: the largest K of its streams.
pub fn k_of(streams: &[KlGemmStream]) -> u32 {
    streams.iter().map(|s| s.x.cols).max().unwrap_or(0)
}

/// Turns matrices of one shape into one long row each, if all are contiguous.
pub fn flatten<const N: usize>(mut mats: [KlMat; N]) -> [KlMat; N] {
    let contiguous =
        |m: &KlMat| (m.rows <= 1 || m.stride == u64::from(m.cols)) && u64::from(m.rows) * u64::from(m.cols) <= SIDE_LIMIT as u64;
    if mats.iter().all(contiguous) {
        for m in &mut mats {
            *m = KlMat { cols: m.rows * m.cols, rows: m.rows.min(1), stride: u64::from(m.rows * m.cols), ..*m };
        }
    }
    mats
}

/// Whether values can be loaded and stored in pairs.
pub fn is_pair_aligned(m: &KlMat) -> bool {
    m.data.is_multiple_of(bytes(2, m.dtype)) && m.stride.is_multiple_of(2)
}

/// Whether rows of this type can be loaded and stored [`VECTOR`] values at a time, with up to sixteen bytes for each instruction.
pub fn is_vectorizable(m: &KlMat, dtype: u32) -> bool {
    let access = bytes(u64::from(VECTOR), dtype).min(16);
    let rows = m.rows <= 1 || bytes(m.stride, dtype).is_multiple_of(access);
    m.dtype == dtype && m.data.is_multiple_of(access) && rows && m.cols.is_multiple_of(VECTOR)
}

/// Whether `cp.async` and TMA can copy a tensor-core operand of this type, sixteen bytes at a time, from 32-bit offsets. Operands in e2m1,
/// which kernels expand on the way, are copied one block of sixteen elements at a time.
pub fn is_async_copyable(m: &KlMat, dtype: u32) -> bool {
    let elements = if dtype == abi::KL_E2M1 { nvfp4::BLOCK as u64 } else { 16 * 8 / bits(dtype) };
    m.dtype == dtype
        && m.data.is_multiple_of(16)
        && m.stride.is_multiple_of(elements)
        && m.cols.is_multiple_of(elements as u32)
        && m.rows > 0
        && m.cols > 0
        && u64::from(m.rows) * m.stride <= u64::from(u32::MAX)
}

/// The most columns of a TMA box. The swizzle allows 128 bytes.
pub const fn box_cols(dtype: u32) -> u32 {
    abi::KL_SM90_BOX_COLS * (bits(abi::KL_BF16) / bits(dtype)) as u32
}

/// How TMA copies boxes of this many columns and rows between shared memory and a bf16 or e4m3 matrix. Two e2m1 columns count as one.
pub fn map_spec(m: &KlMat, tile: [u32; 2]) -> MapSpec {
    if m.dtype == abi::KL_E2M1 {
        return map_spec(&KlMat { dtype: abi::KL_E4M3, cols: m.cols / 2, stride: m.stride / 2, ..*m }, tile);
    }
    let dtype = if m.dtype == abi::KL_E4M3 { DType::E4m3 } else { DType::Bf16 };
    let (size, pitch) = ([u64::from(m.cols), u64::from(m.rows), 1], [dtype.bytes(m.stride as usize) as u64, 0]);
    MapSpec { address: m.data, dtype, size, pitch, tile: [tile[0], tile[1], 1], swizzle: swizzle(dtype, tile[0]) }
}

/// The swizzle for boxes of this many columns.
fn swizzle(dtype: DType, cols: u32) -> Swizzle {
    match dtype.bytes(cols as usize) {
        128 => Swizzle::Bytes128,
        64 => Swizzle::Bytes64,
        _ => Swizzle::Bytes32,
    }
}

/// Pixels of a bf16 image: all of them, or every second one of every second line.
#[derive(Clone, Copy)]
pub struct Pixels {
    /// Columns and lines of the whole image.
    pub size: [u32; 2],
    /// Distance from one pixel to the next, and from one line to the next.
    pub step: u32,
    /// The first column and line.
    pub first: [u32; 2],
}

/// How TMA copies boxes of this many channels, columns and lines between shared memory and a bf16 image. Each row of `m` is a pixel.
pub fn image_map_spec(m: &KlMat, Pixels { size: [width, height], step, first: [x, y] }: Pixels, tile: [u32; 3]) -> MapSpec {
    let (pixel, line) = (bytes(m.stride, abi::KL_BF16), bytes(m.stride * u64::from(width), abi::KL_BF16));
    let count = |size: u32, first: u32| u64::from((size - first).div_ceil(step));
    MapSpec {
        address: m.data + u64::from(x) * pixel + u64::from(y) * line,
        dtype: DType::Bf16,
        size: [u64::from(m.cols), count(width, x), count(height, y)],
        pitch: [u64::from(step) * pixel, u64::from(step) * line],
        tile,
        swizzle: swizzle(DType::Bf16, tile[0]),
    }
}

/// The grid of a pointwise kernel: columns along x, rows along y.
pub fn pointwise_grid(m: &KlMat) -> [u32; 3] {
    [m.cols.div_ceil(abi::KL_POINTWISE_THREADS * VECTOR), m.rows.min(GRID_LIMIT), 1]
}

/// The grid of a naive GEMM or convolution with this output.
pub fn naive_grid(m: &KlMat) -> [u32; 3] {
    [m.rows.div_ceil(abi::KL_NAIVE_TILE), m.cols.div_ceil(abi::KL_NAIVE_TILE), 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_whole_and_aligned() {
        let m = KlMat { data: 1 << 20, stride: 3072, rows: 5, cols: 3072, dtype: abi::KL_BF16, ..NONE };
        let bf16 = |m: KlMat| is_vectorizable(&m, abi::KL_BF16);
        assert!(bf16(m) && bf16(KlMat { stride: 3080, ..m }) && bf16(KlMat { stride: 3073, rows: 1, ..m }));
        assert!(!bf16(KlMat { stride: 3076, ..m }));
        assert!(is_vectorizable(&KlMat { stride: 3076, dtype: abi::KL_F32, ..m }, abi::KL_F32));
        assert!(!bf16(KlMat { data: m.data + 8, ..m }) && !bf16(KlMat { cols: 3068, ..m }));
        assert!(!bf16(KlMat { dtype: abi::KL_F32, ..m }));
        // Eight e4m3 values take eight bytes.
        let e4m3 = |m: KlMat| is_vectorizable(&KlMat { dtype: abi::KL_E4M3, ..m }, abi::KL_E4M3);
        assert!(e4m3(m) && e4m3(KlMat { data: m.data + 8, stride: 3080, ..m }));
        assert!(!e4m3(KlMat { data: m.data + 4, ..m }) && !e4m3(KlMat { stride: 3076, ..m }) && !e4m3(KlMat { cols: 3068, ..m }));
    }

    #[test]
    fn rows_of_e2m1_have_whole_blocks() {
        let m = KlMat { data: 1 << 20, stride: 48, rows: 5, cols: 48, dtype: abi::KL_E2M1, ..NONE };
        let copyable = |m: KlMat| is_async_copyable(&m, abi::KL_E2M1);
        assert!(copyable(m) && copyable(KlMat { data: m.data + 16, stride: 64, ..m }));
        assert!(!copyable(KlMat { data: m.data + 8, ..m }) && !copyable(KlMat { cols: 40, ..m }));
        assert!(!copyable(KlMat { stride: 56, ..m }) && !copyable(KlMat { dtype: abi::KL_E4M3, ..m }));
    }
}
