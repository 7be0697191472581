// The tile scheduler of persistent kernels on Hopper, and the partial tiles that Stream-K workers exchange.
//
// Stream-K (Osama et al. 2023, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU"), in its
// hybrid form: full waves of tiles run data-parallel, and only the k-blocks of the remaining tiles are divided evenly among workers, so
// that no SM idles in a partly filled last wave. A worker is one cluster. KlTileSchedule has the numbers.
#pragma once

#include <gemm/stream_k.cuh>
#include <ptx/sm90.cuh>

__device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }

// K-blocks `k_begin` to `k_end` of an output tile (KV blocks in attention).
struct WorkTile {
  uint32_t tile, k_begin, k_end;
};

// Hands out the work of a cluster of kCluster CTAs: full tiles first, then its Stream-K range, last tile first. So a worker begins with
// the tile that the next worker finishes, and its partial accumulators are there long before they are needed.
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
    const uint32_t begin = first_k_block(schedule, worker()), end = next_tile - kStreamK;
    if (end <= begin) return false;
    const uint32_t index = (end - 1) / schedule.k_blocks, origin = index * schedule.k_blocks, start = max(begin, origin);
    work = {index, start - origin, end - origin};
    next_tile = kStreamK + start;
    return true;
  }
};

// The partial accumulators of an unfinished tile, which a warp stores for the same warp of the next worker: kVectors vectors per lane,
// and a flag that publishes them. Each of the kWarps consumer warps of a CTA has its own; the producer warpgroup comes before them.
template <int kCluster, int kWarps, int kVectors>
struct PartialTile {
  float4* vectors;
  uint32_t* flag;

  __device__ __forceinline__ PartialTile(const KlTileSchedule& schedule, uint32_t worker) {
    uint32_t cta = worker;
    if constexpr (kCluster > 1) cta = worker * kCluster + cluster_rank();
    const uint32_t warp = cta * kWarps + threadIdx.x / 32 - 4;
    vectors = reinterpret_cast<float4*>(schedule.partials) + static_cast<uint64_t>(warp) * (kVectors * 32) + lane();
    flag = reinterpret_cast<uint32_t*>(schedule.flags) + warp;
  }

  __device__ __forceinline__ void store(int i, float4 v) const { __stcg(vectors + i * 32, v); }
  __device__ __forceinline__ float4 load(int i) const { return load_uncached(vectors + i * 32); }

  // Publishes the vectors, once all are stored.
  __device__ __forceinline__ void publish() const {
    __syncwarp();
    if (lane() == 0) store_release(flag, 1);
  }

  // Waits until the vectors are published, and resets the flag for the next launch.
  __device__ __forceinline__ void wait() const {
    if (lane() == 0) {
      while (load_acquire(flag) == 0) {
      }
      *flag = 0;
    }
    __syncwarp();
  }
};
