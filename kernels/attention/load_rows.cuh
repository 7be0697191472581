// Copies of rows from global to swizzled shared memory.
#pragma once

#include <common/swizzle.cuh>
#include <common/types.cuh>
#include <ptx/sm80.cuh>

namespace kl::attention {
// Copies `kRows` rows of one head, of kHeadDim values each, with all kThreads threads of a CTA; rows past the end are zero-filled. kUnroll
// bounds the registers that addresses take. With kClip a head may have fewer values than kHeadDim; the missing ones are zero-filled.
template <class Element, int kHeadDim, int kThreads, int kRows, int kUnroll, bool kClip = false>
__device__ __forceinline__ void load_rows_async(uint32_t to, const KlMat& m, uint32_t first, uint32_t col) {
  constexpr uint32_t kPerChunk = 16 / sizeof(Element), kChunks = kHeadDim / kPerChunk;
#pragma unroll kUnroll
  for (int i = 0; i < kRows * static_cast<int>(kChunks) / kThreads; i++) {
    const uint32_t at = i * kThreads + threadIdx.x, row = at / kChunks, chunk = at % kChunks;
    const bool valid = first + row < m.rows && (!kClip || col + chunk * kPerChunk < m.cols);
    const Element* from = row_of<const Element>(m, valid ? first + row : 0) + (kClip && !valid ? 0 : col + chunk * kPerChunk);
    cp_async(to + swizzled<kHeadDim * sizeof(Element)>(row, chunk), from, valid);
  }
}
}  // namespace kl::attention
