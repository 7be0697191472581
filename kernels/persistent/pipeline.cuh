// Shared by the persistent, warp-specialized kernels with TMA: the ring of stages with its mbarriers, and the division of a CTA into a
// producer warpgroup and consumer warpgroups. The GEMM and attention differ in what a stage holds and in what they do with it.
#pragma once

#include <ptx/sm90.cuh>

namespace kl::persistent {
constexpr uint32_t kWarpgroupThreads = 128, kWarpgroupWarps = 4;
// A wgmma computes 64 rows, sixteen for each warp of the warpgroup.
constexpr uint32_t kWgmmaRows = KL_TMA_WARPGROUP_ROWS, kWarpRows = kWgmmaRows / kWarpgroupWarps;
// Operands have rows of 128 bytes in shared memory, with the 128-byte swizzle, which permutes 16-byte chunks within groups of eight rows.
// The swizzle is a function of the address, so tiles are aligned to a group. Dynamic shared memory is not, hence up to one group more.
constexpr uint32_t kSwizzleRowBytes = 128, kSwizzleAlignment = 8 * kSwizzleRowBytes;
constexpr uint32_t kWgmmaTileBytes = kWgmmaRows * kSwizzleRowBytes;
constexpr uint32_t kMbarrierBytes = 8;
constexpr uint32_t kRegistersPerSm = 65536;

// The first aligned address of dynamic shared memory.
__device__ __forceinline__ uint32_t align_to_swizzle(uint32_t address) {
  return address + (kSwizzleAlignment - 1) & ~(kSwizzleAlignment - 1);
}

// A position in a ring of kStages stages in shared memory: the next stage, and the phase parity of its mbarriers. Each side keeps its own:
// the producer waits for `empty` and fills, consumers wait for `full` and release.
template <int kStages>
struct PipelineState {
  uint32_t stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t previous() const { return (stage == 0 ? kStages : stage) - 1; }
};

// The `full` and `empty` mbarriers of a ring. Mbarriers of consecutive stages are kStrideBytes apart.
template <int kStages, uint32_t kStrideBytes, uint32_t kEmptyOffset>
struct RingBarriers {
  uint32_t base;

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + kStrideBytes * stage; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return base + kEmptyOffset + kStrideBytes * stage; }

  // `full_arrivals` counts the threads that announce or write what a stage holds; `empty_arrivals` the warpgroups that release it.
  __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
    for (int i = 0; i < kStages; i++) mbarrier_init(full(i), full_arrivals), mbarrier_init(empty(i), empty_arrivals);
  }
};

// Called by the threads of a consumer warpgroup that has read a stage: arrives at the stage's `empty` mbarrier in each of the kCtas CTAs
// that multicast into this one.
template <int kCtas>
__device__ __forceinline__ void release_stage(uint32_t empty) {
  // The remainder is not a variable: the compiler would keep it in a register for the whole main loop.
  if constexpr (kCtas > 1) {
    if (threadIdx.x % kWarpgroupThreads < kCtas) mbarrier_arrive_remote(empty, threadIdx.x % kWarpgroupThreads);
  } else {
    if (threadIdx.x % kWarpgroupThreads == 0) mbarrier_arrive(empty);
  }
}

// Registers per thread after setmaxnreg. The producer, which only issues loads, gives up what the consumers' accumulators need.
template <int kConsumers, int kProducer_, int kConsumer_>
struct RegisterSplit {
  static constexpr int kProducer = kProducer_, kConsumer = kConsumer_;
  static_assert(kProducer % 8 == 0 && kConsumer % 8 == 0, "setmaxnreg counts in eights");
  // Registers per thread at launch: the SM's, divided among the threads, in eights. A warpgroup that requests more waits forever.
  static constexpr int kAtLaunch = kRegistersPerSm / ((1 + kConsumers) * kWarpgroupThreads) / 8 * 8;
  static_assert(kProducer + kConsumers * kConsumer <= (1 + kConsumers) * kAtLaunch, "more registers than a CTA has");
};

// Runs a CTA: one thread calls `init` to initialize mbarriers, then the first warpgroup calls `produce` and the others `consume`. The
// kMulticast CTAs of a cluster that multicast into each other start and end together: a CTA must not exit while a peer multicasts into it
// or arrives at its mbarriers. CTAs of a cluster without multicast only arrive, and call cluster_wait before they use each other's
// mbarriers.
template <class Registers, int kCluster, int kMulticast, class Init, class Produce, class Consume>
__device__ __forceinline__ void run_warp_specialized(Init init, Produce produce, Consume consume) {
  if (threadIdx.x == 0) {
    init();
    fence_mbarrier_init();
  }
  if constexpr (kMulticast > 1) {
    cluster_sync_relaxed();
  } else {
    if constexpr (kCluster > 1) cluster_arrive();
    __syncthreads();
  }
  launch_next_kernel();
  if (threadIdx.x < kWarpgroupThreads) {
    setmaxnreg_dec<Registers::kProducer>();
    produce();
  } else {
    setmaxnreg_inc<Registers::kConsumer>();
    wait_for_previous_kernel();
    consume();
  }
  if constexpr (kMulticast > 1) cluster_sync_relaxed();
}
}  // namespace kl::persistent
