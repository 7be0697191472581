// NVFP4: elements of e2m1, two to a byte, with an e4m3 scale for every sixteen columns of a row.
#pragma once

#include <common/e4m3.cuh>
#include <common/types.cuh>

// The value of a code, which is four bits. As in decode_e4m3, but the exponent is 126 too small.
__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}

// The offset of the scale of a block among those of a matrix with so many columns, which are in tiles (see KlMat). A matrix has
// fewer than 2^32 of them.
__device__ __forceinline__ uint32_t block_scale_offset(uint32_t row, uint32_t block, uint32_t cols) {
  constexpr uint32_t kBlocks = KL_SCALE_TILE_COLS / 16;
  const uint32_t tiles_along = (cols + KL_SCALE_TILE_COLS - 1) / KL_SCALE_TILE_COLS;
  const uint32_t tile = row / KL_SCALE_TILE_ROWS * tiles_along + block / kBlocks;
  return tile * KL_SCALE_TILE_BYTES + row % 32 * 16 + row % KL_SCALE_TILE_ROWS / 32 * kBlocks + block % kBlocks;
}

// An element of a matrix of e2m1.
__device__ __forceinline__ float load_nvfp4(const KlMat& m, uint32_t row, uint32_t col) {
  const uint32_t byte = reinterpret_cast<const uint8_t*>(m.data)[(row * m.stride + col) / 2];
  const uint32_t scale = reinterpret_cast<const uint8_t*>(m.scales)[block_scale_offset(row, col / 16, static_cast<uint32_t>(m.stride))];
  return decode_e2m1(col % 2 ? byte & 15u : byte >> 4) * (m.scale * decode_e4m3(scale));
}
