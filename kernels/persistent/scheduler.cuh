// The tile scheduler of persistent kernels on Hopper, whose Stream-K workers are clusters.
#pragma once

#include <persistent/pipeline.cuh>
#include <persistent/stream_k.cuh>
#include <ptx/sm90.cuh>

namespace kl::persistent {
// Hands out the work of a cluster of kCluster CTAs: full tiles first, then its Stream-K range, last tile first.
template <int kCluster>
struct TileScheduler {
  const KlTileSchedule& schedule;
  // The next full tile or, with kStreamK set, the end of what is left of the Stream-K range. They share one register, because registers
  // are scarce.
  uint32_t next_tile = worker();
  static constexpr uint32_t kStreamK = 1u << 31;

  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / kCluster; }

  __device__ __forceinline__ bool next(WorkTile& work) {
    if (next_tile < schedule.full_tiles) {
      work = {next_tile, 0, schedule.k_blocks};
      next_tile += gridDim.x / kCluster;
      return true;
    }
    if (next_tile < kStreamK) next_tile = kStreamK + first_k_block(schedule, worker() + 1);
    const uint32_t begin = first_k_block(schedule, worker());
    uint32_t end = next_tile - kStreamK;
    if (end <= begin) return false;
    work = take_last_tile(schedule, begin, end);
    next_tile = kStreamK + end;
    return true;
  }
};

// The calling consumer warp as the owner of partials, in a CTA of a worker that has kWarps consumer warps; the producer warpgroup comes
// before them.
template <int kCluster, int kWarps>
__device__ __forceinline__ PartialsOfWarp partials_of_warp(uint32_t worker) {
  uint32_t cta = worker;
  if constexpr (kCluster > 1) cta = worker * kCluster + cluster_rank();
  return {cta * kWarps + threadIdx.x / 32 - kWarpgroupWarps};
}
}  // namespace kl::persistent
