// Who does what, among blocks that stay for a whole launch: whole tiles first, then a share of the others (see KlDeal).
#pragma once

#include "common.cuh"

// Rounds `first` to `last` of a tile.
struct Item {
  uint32_t tile, first, last;
};

// What a cluster of kCluster blocks does, in order: whole tiles, then its share of the others, from the last round to the first, so that
// what the next worker waits for is there early.
template <int kCluster>
struct Work {
  const KlDeal& deal;
  // The next whole tile, or where the rest of the share ends: one register, for there are few.
  uint32_t next_tile = worker();
  static constexpr uint32_t kSharing = 1u << 31;

  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / kCluster; }

  __device__ __forceinline__ bool next(Item& item) {
    if (next_tile < deal.whole) {
      item = {next_tile, 0, deal.rounds};
      next_tile += gridDim.x / kCluster;
      return true;
    }
    if (next_tile < kSharing) next_tile = kSharing + front(deal, worker() + 1);
    const uint32_t begin = front(deal, worker()), end = next_tile - kSharing;
    if (end <= begin) return false;
    const uint32_t index = (end - 1) / deal.rounds, origin = index * deal.rounds, start = max(begin, origin);
    item = {index, start - origin, end - origin};
    next_tile = kSharing + start;
    return true;
  }
};
