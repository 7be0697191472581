// The swizzle of shared memory: the 16-byte chunks of a row are permuted by the row's index. Eight rows of the same chunk, which ldmatrix
// and stmatrix access together, then lie in different banks. TMA and wgmma have this permutation in hardware, for rows of 32, 64 and 128
// bytes.
#pragma once

#include <stdint.h>

// The chunk index within the row where chunk `chunk` of row `row` is stored. Rows of 128 bytes and more permute groups of eight chunks by
// the row's last three bits. Several shorter rows fit in 128 bytes and share a permutation.
template <uint32_t kRowBytes>
__device__ __forceinline__ uint32_t swizzled_chunk(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0, "rows of other sizes have bank conflicts");
  constexpr uint32_t kChunks = kRowBytes < 128 ? kRowBytes / 16 : 8;
  return chunk ^ row / (8 / kChunks) % kChunks;
}

// The byte offset of a chunk from the first row, which is aligned to eight rows.
template <uint32_t kRowBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + swizzled_chunk<kRowBytes>(row, chunk) * 16;
}
