// Stream-K (Osama et al. 2023, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU"), in its
// hybrid form: full waves of tiles run data-parallel, and only the k-blocks of the remaining tiles are divided evenly among workers, so
// that no SM idles in a partly filled last wave. KlTileSchedule has the numbers.
//
// A worker's range of k-blocks may begin and end within a tile. It takes its last tile first and stores that tile's partial accumulators
// for the next worker; it ends with the tile whose first k-blocks the workers before it have stored, which by then are there. The fix-up
// adds partials in a fixed order, so results are deterministic. A worker waits only for CTAs with smaller indices, which are started
// before it, so no cooperative launch is needed.
#pragma once

#include <common/reduce.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/sm80.cuh>

namespace kl::persistent {
// The first k-block of a Stream-K worker, counted over all tiles; the range of the worker before it ends there.
__device__ __forceinline__ uint32_t first_k_block(const KlTileSchedule& schedule, uint32_t worker) {
  return schedule.full_tiles * schedule.k_blocks + worker * schedule.k_blocks_per_worker + min(worker, schedule.remainder);
}

// K-blocks `k_begin` to `k_end` of an output tile (KV blocks in attention).
struct WorkTile {
  uint32_t tile, k_begin, k_end;

  __device__ __forceinline__ bool is_unfinished(const KlTileSchedule& schedule) const { return k_end < schedule.k_blocks; }
};

// Takes the last tile, or the part of it in range, off the k-blocks from `begin` to `end`; `end` becomes the new end.
__device__ __forceinline__ WorkTile take_last_tile(const KlTileSchedule& schedule, uint32_t begin, uint32_t& end) {
  const uint32_t tile = (end - 1) / schedule.k_blocks, origin = tile * schedule.k_blocks, start = max(begin, origin);
  const WorkTile work = {tile, start - origin, end - origin};
  end = start;
  return work;
}

// A warp that stores and adds partials by itself, where warps have nothing else to wait for. `index` is its number among all warps that
// store partials.
struct PartialsOfWarp {
  static constexpr uint32_t kThreads = 32;
  uint32_t index;

  static __device__ __forceinline__ uint32_t thread() { return lane(); }
  static __device__ __forceinline__ void sync() { __syncwarp(); }
  static __device__ __forceinline__ void sync_stores() { __syncwarp(); }
};

// A CTA of kThreads_ threads that stores and adds partials together; `index` is its worker.
template <int kThreads_>
struct PartialsOfCta {
  static constexpr uint32_t kThreads = kThreads_;
  uint32_t index;

  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  static __device__ __forceinline__ void sync_stores() {
    __threadfence();
    __syncthreads();
  }
};

// The partial accumulators of an unfinished tile, in the register layout of the threads that store them for the same threads of the next
// worker: kVectors vectors per thread, and a flag that publishes them.
template <class Owner, int kVectors>
struct PartialTile {
  const KlTileSchedule& schedule;
  Owner owner;

  __device__ __forceinline__ PartialTile(const KlTileSchedule& schedule, Owner owner) : schedule(schedule), owner(owner) {}

  __device__ __forceinline__ float4* vectors() const {
    float4* partials = reinterpret_cast<float4*>(schedule.partials);
    return partials + static_cast<uint64_t>(owner.index) * (kVectors * Owner::kThreads) + Owner::thread();
  }
  __device__ __forceinline__ uint32_t* flag() const { return reinterpret_cast<uint32_t*>(schedule.flags) + owner.index; }

  // Stores vector(i) for all i, and publishes them.
  template <class Vector>
  __device__ __forceinline__ void store(Vector vector) const {
#pragma unroll
    for (int i = 0; i < kVectors; i++) __stcg(vectors() + i * Owner::kThreads, vector(i));
    Owner::sync_stores();
    if (Owner::thread() == 0) store_release(flag(), 1);
  }

  // Stores accumulators: acc(i) points to the thread's four accumulators of vector i.
  template <class Acc>
  __device__ __forceinline__ void store_acc(Acc acc) const {
    store([&](int i) { return make_float4(acc(i)[0], acc(i)[1], acc(i)[2], acc(i)[3]); });
  }

  // Waits until the vectors are published, and resets the flag for the next launch.
  __device__ __forceinline__ void wait() const {
    if (Owner::thread() == 0) {
      while (load_acquire(flag()) == 0) {
      }
      *flag() = 0;
    }
    Owner::sync();
  }

  __device__ __forceinline__ float4 load(int i) const { return load_uncached(vectors() + i * Owner::kThreads); }

  // Calls visit(i, vector i) for all vectors from kFirst on, in order, with kInFlight loads in flight.
  template <int kFirst, int kInFlight, class Visit>
  __device__ __forceinline__ void load_each(Visit visit) const {
#pragma unroll
    for (int i = kFirst; i < kVectors; i += kInFlight) {
      float4 v[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight && i + j < kVectors; j++) v[j] = load(i + j);
#pragma unroll
      for (int j = 0; j < kInFlight && i + j < kVectors; j++) visit(i + j, v[j]);
    }
  }

  // Adds another worker's partials to the accumulators.
  template <int kInFlight, class Acc>
  __device__ __forceinline__ void add_to(Acc acc) const {
    wait();
    load_each</*first*/ 0, kInFlight>([&](int i, const float4& v) { add_vector(acc(i), v); });
  }
};

// Ends a worker's part of a tile: if the next worker finishes the tile, `store` stores accumulators as partials. Otherwise add(peer) adds
// the partials of every worker that has computed a part of the tile, from the last to the first, and `finish` runs the epilogue.
template <class Store, class Add, class Finish>
__device__ __forceinline__ void finish_or_store(const KlTileSchedule& schedule, const WorkTile& work, uint32_t worker, Store store, Add add,
                                                Finish finish) {
  if (work.is_unfinished(schedule)) {
    store();
  } else {
    if (work.k_begin > 0) {
      uint32_t peer = worker;
      do {
        add(--peer);
      } while (first_k_block(schedule, peer) > work.tile * schedule.k_blocks);
    }
    finish();
  }
}
}  // namespace kl::persistent
