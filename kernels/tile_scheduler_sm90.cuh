// Who does what, among blocks that stay for a whole launch: whole tiles first, then a share of the others (see KlTileSchedule).
#pragma once

#include "common.cuh"
#include "ptx_sm90.cuh"

__device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }

// Rounds `first` to `last` of a tile.
struct WorkTile {
  uint32_t tile, k_begin, k_end;
};

// What a cluster of kCluster blocks does, in order: whole tiles, then its share of the others, from the last round to the first, so that
// what the next worker waits for is there early.
template <int kCluster>
struct TileScheduler {
  const KlTileSchedule& schedule;
  // The next whole tile, or where the rest of the share ends: one register, for there are few.
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
    const uint32_t begin = first_k_block(schedule, worker()), end = next_tile - kStreamK;
    if (end <= begin) return false;
    const uint32_t index = (end - 1) / schedule.k_blocks, origin = index * schedule.k_blocks, start = max(begin, origin);
    work = {index, start - origin, end - origin};
    next_tile = kStreamK + start;
    return true;
  }
};

// What a warp leaves for the same warp of the next worker, of kVectors vectors for every lane, and the word that says it is there. The
// first warpgroup of a block copies and leaves nothing; kWarps others do.
template <int kCluster, int kWarps, int kVectors>
struct PartialTile {
  float4* vectors;
  uint32_t* flag;

  __device__ __forceinline__ PartialTile(const KlTileSchedule& schedule, uint32_t worker) {
    uint32_t block = worker;
    if constexpr (kCluster > 1) block = worker * kCluster + cluster_rank();
    const uint32_t warp = block * kWarps + threadIdx.x / 32 - 4;
    vectors = reinterpret_cast<float4*>(schedule.partials) + static_cast<uint64_t>(warp) * (kVectors * 32) + lane();
    flag = reinterpret_cast<uint32_t*>(schedule.flags) + warp;
  }

  __device__ __forceinline__ void store(int i, float4 v) const { __stcg(vectors + i * 32, v); }
  __device__ __forceinline__ float4 load(int i) const { return load_uncached(vectors + i * 32); }

  // All are put.
  __device__ __forceinline__ void publish() const {
    __syncwarp();
    if (lane() == 0) store_release(flag, 1);
  }

  // Until all are there; puts the word back for the next launch.
  __device__ __forceinline__ void wait() const {
    if (lane() == 0) {
      while (load_acquire(flag) == 0) {
      }
      *flag = 0;
    }
    __syncwarp();
  }
};
