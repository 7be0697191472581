// The ranges of k-blocks of Stream-K workers.
#pragma once

#include <common/types.cuh>

// The first k-block of a Stream-K worker, counted over all tiles; the range of the worker before it ends there.
__device__ __forceinline__ uint32_t first_k_block(const KlTileSchedule& schedule, uint32_t worker) {
  return schedule.full_tiles * schedule.k_blocks + worker * schedule.k_blocks_per_worker + min(worker, schedule.remainder);
}
