// The swizzle of shared memory: the 16-byte chunks of a row are permuted by the row's index, so that eight rows of the same chunk, which
// ldmatrix and stmatrix access together, lie in different banks. TMA and wgmma have the same permutation in hardware, for rows of 32, 64
// and 128 bytes.
#pragma once

#include <stdint.h>

// Where chunk `chunk` of row `row` is stored, as an index of chunks within the row. Rows of 128 bytes and more permute groups of eight
// chunks by the row's last three bits. In shorter rows, of which 128 bytes hold several, these share a permutation.
template <uint32_t kRowBytes>
__device__ __forceinline__ uint32_t swizzled_chunk(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0, "rows of other sizes have bank conflicts");
  constexpr uint32_t kChunks = kRowBytes < 128 ? kRowBytes / 16 : 8;
  return chunk ^ row / (8 / kChunks) % kChunks;
}

// The place of a chunk as an offset in bytes from the first row, which is aligned to eight rows.
template <uint32_t kRowBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + swizzled_chunk<kRowBytes>(row, chunk) * 16;
}
