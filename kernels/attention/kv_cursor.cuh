// The position of an attention kernel in its keys and values.
#pragma once

#include <common/math.cuh>

namespace kl::attention {
// The position of a KV block: its segment and first key. A block never spans two segments. `Segments` says how many keys there are:
// keys(segment) in a segment and, if kMayBeEmpty says that some segments have none, count() segments.
template <uint32_t kBlockKV, class Segments>
struct KVCursor {
  Segments segments;
  uint32_t segment = 0, key = 0;

  __device__ __forceinline__ bool at_end() const { return segment >= segments.count(); }

  // The number of keys in this block.
  __device__ __forceinline__ uint32_t count() const { return min(segments.keys(segment) - key, kBlockKV); }

  // Goes from the first block to block `index`, counted over all segments.
  __device__ __forceinline__ void seek(uint32_t index) {
    for (uint32_t blocks; index >= (blocks = ceil_div(segments.keys(segment), kBlockKV)); segment++) index -= blocks;
    key = index * kBlockKV;
  }

  // Leaves segments that have no more keys.
  __device__ __forceinline__ void skip_empty() {
    if constexpr (Segments::kMayBeEmpty) {
      while (!at_end() && key >= segments.keys(segment)) segment++, key = 0;
    } else {
      if (key >= segments.keys(segment)) segment++, key = 0;
    }
  }

  __device__ __forceinline__ void next() {
    key += kBlockKV;
    skip_empty();
  }
};
}  // namespace kl::attention
