// NVFP4: elements of e2m1, two to a byte, with an e4m3 scale for every sixteen columns of a row.
#pragma once

#include <common/e4m3.cuh>
#include <common/types.cuh>
#include <ptx/sm100.cuh>

// The value of a four-bit code, as in decode_e4m3 with an exponent that is 126 too small.
__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}

// The offset of a block's scale among the scales of a matrix with so many columns, which are in tiles (see KlMat). A matrix has fewer than
// 2^32 scales.
__device__ __forceinline__ uint32_t block_scale_offset(uint32_t row, uint32_t block, uint32_t cols) {
  constexpr uint32_t kBlocks = KL_SCALE_TILE_COLS / 16;
  const uint32_t tiles_along = (cols + KL_SCALE_TILE_COLS - 1) / KL_SCALE_TILE_COLS;
  const uint32_t tile = row / KL_SCALE_TILE_ROWS * tiles_along + block / kBlocks;
  return tile * KL_SCALE_TILE_BYTES + row % 32 * 16 + row % KL_SCALE_TILE_ROWS / 32 * kBlocks + block % kBlocks;
}

// The scale of a block of a matrix of e2m1.
__device__ __forceinline__ uint8_t& block_scale(const KlMat& m, uint32_t row, uint32_t block) {
  return reinterpret_cast<uint8_t*>(m.scales)[block_scale_offset(row, block, static_cast<uint32_t>(m.stride))];
}

// The byte of an e2m1 matrix that holds the codes of this column and its neighbor.
__device__ __forceinline__ uint8_t* code_pair(const KlMat& m, uint64_t row, uint32_t col) {
  return reinterpret_cast<uint8_t*>(m.data) + (row * m.stride + col) / 2;
}

// An element of an e2m1 matrix.
__device__ __forceinline__ float load_nvfp4(const KlMat& m, uint32_t row, uint32_t col) {
  const uint32_t byte = *code_pair(m, row, col), scale = block_scale(m, row, col / 16);
  return decode_e2m1(col % 2 ? byte & 15u : byte >> 4) * (m.scale * decode_e4m3(scale));
}

// The code of a value as cvt_e2m1x2 rounds it, for GPUs that do not have the instruction.
__device__ __forceinline__ uint32_t encode_e2m1(float v) {
  constexpr uint32_t kDropped = 22;     // bits of an f32 mantissa that a code drops
  constexpr float kApart = 0x1p22f;     // f32 above it are as far apart as subnormal codes, so adding it rounds to one of them
  constexpr uint32_t kBias = 126 << 1;  // the difference of the exponents' biases, in codes
  const float magnitude = fminf(fabsf(v), 6.0f);
  const uint32_t bits = __float_as_uint(magnitude), odd = bits >> kDropped & 1;
  const uint32_t normal = ((bits + (1u << (kDropped - 1)) - 1 + odd) >> kDropped) - kBias;
  const uint32_t subnormal = __float_as_uint(magnitude + kApart) - __float_as_uint(kApart);
  // fminf has turned NaN into the largest value; its sign does not count.
  return (v != v ? 0 : __float_as_uint(v) >> 28 & 8u) | (magnitude < 1.0f ? subnormal : normal);
}

// Two values rounded to e2m1 as a byte of a matrix: the even column in the high nibble.
__device__ __forceinline__ uint32_t pack_e2m1(float even, float odd) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
  return encode_e2m1(even) << 4 | encode_e2m1(odd);
#else
  return cvt_e2m1x2(even, odd);
#endif
}

// The magnitude of a value as bits. Bits are in the order of magnitudes, with NaN above all of them: codes cannot hold NaN, so the block
// scale must.
__device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// The largest magnitude of these values, as bits.
template <int kCount>
__device__ __forceinline__ uint32_t largest_magnitude(const float (&v)[kCount]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) largest = max(largest, magnitude_bits(v[i]));
  return largest;
}

// The quantization of a block: the code of its scale, and the factor that its values are multiplied by before they are rounded.
struct QuantizedBlock {
  uint32_t scale;
  float inverse;

  // For a block with this largest magnitude, in a matrix with scale `tensor`: the largest value becomes the largest code.
  __device__ __forceinline__ QuantizedBlock(uint32_t largest, float tensor) {
    // Divisions are the approximate ones: a subroutine call would take registers of the whole kernel. They are within two ulp, which
    // matters only next to a tie.
    scale = pack_e4m3(__uint_as_float(largest) * __fdividef(1.0f, 6.0f * tensor), 0.0f) & 0xffu;
    // The block is zeros, or too small for any scale.
    inverse = scale == 0 ? 0.0f : __fdividef(1.0f, tensor * decode_e4m3(scale));
  }
};

// Stores one value per lane, if the lane has one, in a matrix of any result type. All lanes of a warp call it. For e2m1, sixteen
// consecutive lanes have the columns of a block.
__device__ __forceinline__ void store_of_lanes(const KlMat& m, uint64_t row, uint32_t col, float v, bool has_one, uint64_t saturated) {
  if (m.dtype != KL_E2M1) {
    if (has_one) store_quantized(m, row, col, v, saturated);
    return;
  }
  uint32_t largest = magnitude_bits(v);
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  const QuantizedBlock block(largest, m.scale);
  const float next = __shfl_xor_sync(0xffffffffu, v, 1);
  if (!has_one || col % 2) return;
  *code_pair(m, row, col) = static_cast<uint8_t>(pack_e2m1(v * block.inverse, next * block.inverse));
  if (col % 16 == 0) block_scale(m, row, col / 16) = static_cast<uint8_t>(block.scale);
}
