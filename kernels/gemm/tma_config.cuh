// The configuration of a persistent GEMM with TMA, for Hopper and for compute capability 12.x: sizes, tile coordinates, shared-memory
// layout.
#pragma once

#include <type_traits>

#include <common/math.cuh>
#include <common/types.cuh>
#include <persistent/pipeline.cuh>
#include <ptx/sm90.cuh>

namespace kl::gemm {
using namespace persistent;

// What the CTAs of a cluster share: A (the same rows of x), B (the same rows of w), or one tile, of which each CTA has half of K. kSingle
// means no clusters, because the GPU has no multicast.
enum class ClusterMode { kMulticastA, kMulticastB, kSplitK, kSingle };

// The columns of a Store box, for a tile of `cols` columns: the largest power of two that divides them, up to the box limit.
template <class Store>
__host__ __device__ constexpr int box_cols(int cols) {
  const int bits = cols | Store::kMaxBoxCols;
  return bits & -bits;
}

// Ids of named barriers; 0 is __syncthreads. Each consumer warpgroup has one, from kWarpgroupBarrier on. The hand-over barrier comes after
// them.
enum NamedBarrier : uint32_t { kWarpgroupBarrier = 1 };

// Registers per thread: the SM's file is split between two or three consumer warpgroups and a producer. A producer that expands B or loads
// block scales gets some more if the consumers have few accumulators and can do with less.
template <int kConsumers, int kBlockM, int kBlockN, bool kMore>
constexpr auto gemm_registers() {
  if constexpr (kConsumers == 3) {
    return std::conditional_t<kMore, RegisterSplit<3, 56, 152>, RegisterSplit<3, 32, 160>>{};
  } else if constexpr (kMore && kBlockM == 2 * kWgmmaRows) {
    return std::conditional_t<(kBlockN > 208), RegisterSplit<2, 56, 224>, RegisterSplit<2, 104, 200>>{};
  } else if constexpr (kMore && kBlockN <= 128) {
    return RegisterSplit<2, 56, 224>{};
  } else {
    return RegisterSplit<2, 40, 232>{};
  }
}

// A tile of kBlockM x kBlockN outputs, kBlockK of K per pipeline stage. It has kConsumers consumer warpgroups, one below the other, with
// kMmaM wgmma tiles of 64 rows by kBlockN columns each. kMmaN counts the 8-column fragments of an accumulator row. If warps multiply by
// themselves (mma.sync), each has the rows and accumulators that a warp has in a wgmma. Policies are described in tma_policies.cuh.
template <class Policies, int kBlockM_, int kBlockN_, int kBlockK_, int kConsumers_, int kStages_, ClusterMode kMode_>
struct GemmConfig : Policies {
  using Params = typename Policies::Params;
  using OperandB = typename Policies::OperandB;
  using Mma = typename Policies::Mma;
  using Store = typename Policies::Store;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_, kStages = kStages_;
  static constexpr int kConsumers = kConsumers_, kWarps = kWarpgroupWarps * kConsumers, kThreads = kWarpgroupThreads * (1 + kConsumers);
  static constexpr int kMmaM = kBlockM / (kConsumers * kWgmmaRows), kMmaN = kBlockN / 8, kMmaK = kBlockK / Mma::kInstructionK;
  static_assert(kBlockM == kConsumers * kMmaM * kWgmmaRows, "consumer warpgroups have whole wgmma tiles");
  static_assert(kBlockK * Mma::kElementBits == 8 * Mma::kRowBytes, "a stage has rows of as many bytes as the swizzle has");
  // Columns of a k-block as tensor maps count them: two elements of e2m1 are one column.
  static constexpr uint32_t kMapCols = Mma::kRowBytes / sizeof(typename Mma::Element);
  // bf16 columns of a LoRA branch that a stage holds; convolutions have none.
  static constexpr uint32_t kLoraCols = Mma::kRowBytes / sizeof(bf16);
  static constexpr bool kLora = Policies::OperandA::kWindows == 0;
  // Accumulators of a thread.
  using Acc = float[kMmaM][kBlockN / 2];

  static constexpr ClusterMode kMode = kMode_;
  static constexpr bool kSplitK = kMode == ClusterMode::kSplitK;
  static constexpr bool kPromoted = Mma::kPromotionInterval > 0;
  static_assert(Mma::kPromotionInterval <= 1 || kMmaM == 1, "a longer interval takes partial accumulators for each wgmma tile of a warpgroup");
  static_assert(!kPromoted || !kSplitK, "the hand-over of split-K is for MMAs that stay in flight from one k-block to the next");
  // CTAs that multicast into each other.
  static constexpr int kCluster = kMode == ClusterMode::kSingle ? 1 : KL_SM90_CLUSTER, kMulticast = kSplitK ? 1 : kCluster;
  // Tiles of a cluster.
  static constexpr uint32_t kClusterM = kMode == ClusterMode::kMulticastB ? 2 : 1;
  static constexpr uint32_t kClusterN = kMode == ClusterMode::kMulticastA ? 2 : 1;

  // A stage has both operands of a k-block. If several k-blocks multiply the same window of A, it has B alone.
  static constexpr int kWindows = Policies::OperandA::kWindows;
  static constexpr uint32_t kWindowBytes = ceil_div(Policies::OperandA::window_bytes(kBlockM), kSwizzleAlignment) * kSwizzleAlignment;
  static constexpr uint32_t kABytes = kWindows > 0 ? 0 : kBlockM * Mma::kRowBytes, kBBytes = kBlockN * Mma::kRowBytes;
  // Behind the operands, a stage has their block scales, if there are any.
  static constexpr uint32_t kAScaleBytes = Policies::OperandA::scale_bytes(kBlockM), kBScaleBytes = OperandB::scale_bytes(kBlockN);
  static constexpr uint32_t kOperandBytes = kABytes + kBBytes + kAScaleBytes + kBScaleBytes;
  // The residual comes through the pipeline in boxes of a warpgroup's rows by 64 bf16 columns, as many at a time as fit in a stage.
  static constexpr uint32_t kResidualCols = KL_SM90_BOX_COLS, kResidualBoxBytes = kMmaM * kWgmmaRows * kResidualCols * sizeof(bf16);
  static constexpr uint32_t kStageBytes = kOperandBytes > kResidualBoxBytes ? kOperandBytes : kResidualBoxBytes;
  static_assert(kStageBytes % kSwizzleAlignment == 0, "stages are aligned to the swizzle");
  using Registers = decltype(gemm_registers<kConsumers, kBlockM, kBlockN, OperandB::kExpands || Mma::kPerWarp>());
  static constexpr uint32_t kResidualBoxesM = kSplitK ? 1 : kConsumers, kResidualBoxesN = ceil_div<uint32_t>(kBlockN, kResidualCols);
  static constexpr uint32_t kResidualBoxes = kResidualBoxesM * kResidualBoxesN, kBoxesPerStage = kStageBytes / kResidualBoxBytes;
  static constexpr uint32_t kResidualStages = ceil_div(kResidualBoxes, kBoxesPerStage);

  // With split-K a CTA finishes one warpgroup's rows and receives the peer's partial accumulators of them, per warp.
  static constexpr uint32_t kPartialBytes = kMmaN * 32 * sizeof(float4);
  // Staging buffers of each warp for TMA stores: as many as fit, up to four. With split-K they overlay the peer's partials, and there is
  // one for every piece that is stored.
  static constexpr int kStoreCols = box_cols<Store>(kBlockN);
  static constexpr uint32_t kStoreBufferBytes = KL_TMA_STORE_ROWS * kStoreCols * sizeof(typename Store::Element);
  static constexpr uint32_t kMbarrierReserve = 512;  // bytes, more than the mbarriers of any configuration take
  // An SM has one CTA, because of its registers, and gives it all of its shared memory.
  static constexpr int kSharedBytes = Mma::kPerWarp ? KL_SM120_SHARED_LIMIT : KL_SM90_SHARED_LIMIT;
  // Bytes that the warps of a warpgroup exchange in their epilogue.
  static constexpr uint32_t kExchangeBytes = Policies::kExchangeBytes;
  static constexpr uint32_t kPipelineBytes = kStages * kStageBytes + kWindows * kWindowBytes;
  static constexpr int kFreeBytes = kSharedBytes - kSwizzleAlignment - kMbarrierReserve - kPipelineBytes - kConsumers * kExchangeBytes;
  static constexpr int kBuffersThatFit =
      kSplitK ? kPartialBytes / kStoreBufferBytes : kFreeBytes / static_cast<int>(kWarps * kStoreBufferBytes);
  static constexpr int kMaxBuffers = kSplitK ? kBlockN / kStoreCols : 4;
  static constexpr int kStoreBuffers = kBuffersThatFit < kMaxBuffers ? kBuffersThatFit : kMaxBuffers;
  // Pieces that are staged and stored together: at least 2 KB, because the fence and barrier in between cost more than a small piece. With
  // split-K it is all of them, because the CTA has nothing else to do.
  static constexpr uint32_t kStoreBatchBytes = 2048;
  static constexpr int kStoresPerBatch = kStoreBatchBytes / kStoreBufferBytes;
  static constexpr int kStoresAtOnce = kSplitK || kStoresPerBatch > kStoreBuffers ? kStoreBuffers : kStoresPerBatch;
  static constexpr uint32_t kStoreBytes = kSplitK ? kWarpgroupWarps * kPartialBytes : kWarps * kStoreBuffers * kStoreBufferBytes;
  // Full and empty for each stage and window; with split-K one more per warp, for the peer's partials.
  static constexpr uint32_t kMbarriers = 2 * (kStages + kWindows) + (kSplitK ? kWarpgroupWarps : 0);
  static_assert(kMbarriers * kMbarrierBytes <= kMbarrierReserve, "more mbarriers than there is shared memory for");
  static constexpr uint32_t kSmemBytes =
      kSwizzleAlignment + kPipelineBytes + kStoreBytes + kMbarriers * kMbarrierBytes + kConsumers * kExchangeBytes;
  static_assert(kStoreBuffers > 0 && kSmemBytes <= kSharedBytes, "more shared memory than a CTA can have");
};

// The coordinates of a tile, from its linear index.
template <class Config>
struct TileCoord {
  uint32_t stream, row_tile, col_tile, part = 0;  // col_tile counts within the part

  __device__ __forceinline__ TileCoord(const KlGemmTma& p, uint32_t index) {
    const uint32_t first = p.stream[0].row_tiles * p.stream[0].col_tiles;
    stream = index >= first;
    if (stream) index -= first;
    const KlGemmStream& s = p.stream[stream];
    // Rasterization in groups of row tiles: as many rows of x as stay in L2 while all columns pass.
    const uint32_t group = p.group[stream], group_index = index / (group * s.col_tiles);
    const uint32_t within = index - group_index * group * s.col_tiles;
    const uint32_t rows = min(group, s.row_tiles - group_index * group);
    row_tile = (group_index * group + within % rows) * Config::kClusterM, col_tile = within / rows * Config::kClusterN;
    if constexpr (Config::kMulticast > 1) (Config::kMode == ClusterMode::kMulticastB ? row_tile : col_tile) += cluster_rank();
    find_part(s);
  }

  // Tile `col_tile`, counted over the columns of all parts.
  __device__ __forceinline__ TileCoord(const KlGemmTma& p, uint32_t stream, uint32_t col_tile)
      : stream(stream), row_tile(0), col_tile(col_tile) {
    find_part(p.stream[stream]);
  }

 private:
  __device__ __forceinline__ void find_part(const KlGemmStream& s) {
    // The last cluster may have one tile too many: it lies beyond the last part, and TMA clips its stores.
    while (part + 1 < KL_GEMM_PARTS && s.part[part + 1].tiles && col_tile >= s.part[part].tiles) col_tile -= s.part[part++].tiles;
  }
};

// Shared memory: the pipeline stages (A, then B), the windows of A, the warps' staging buffers, the mbarriers, and the exchange space.
template <class Config>
struct SmemLayout {
  uint32_t base;

  static constexpr uint32_t kStoreOffset = Config::kPipelineBytes, kRingOffset = kStoreOffset + Config::kStoreBytes;
  static constexpr uint32_t kWindowRingOffset = kRingOffset + 2 * Config::kStages * kMbarrierBytes;
  static constexpr uint32_t kReadyOffset = kWindowRingOffset + 2 * Config::kWindows * kMbarrierBytes;

  __device__ __forceinline__ uint32_t a(uint32_t i) const { return base + i * Config::kStageBytes; }
  __device__ __forceinline__ uint32_t b(uint32_t i) const { return a(i) + Config::kABytes; }
  __device__ __forceinline__ uint32_t window(uint32_t i) const { return a(Config::kStages) + i * Config::kWindowBytes; }
  // All full mbarriers come before the first empty one.
  __device__ __forceinline__ RingBarriers<Config::kStages, kMbarrierBytes, Config::kStages * kMbarrierBytes> ring() const {
    return {base + kRingOffset};
  }
  __device__ __forceinline__ RingBarriers<Config::kWindows, kMbarrierBytes, Config::kWindows * kMbarrierBytes> window_ring() const {
    return {base + kWindowRingOffset};
  }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return ring().full(i); }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return ring().empty(i); }
  __device__ __forceinline__ uint32_t store_buffers(uint32_t warp) const {
    constexpr uint32_t kWarpBytes = Config::kSplitK ? Config::kPartialBytes : Config::kStoreBuffers * Config::kStoreBufferBytes;
    return base + kStoreOffset + (Config::kSplitK ? warp % kWarpgroupWarps : warp) * kWarpBytes;
  }
  // The exchange space of a consumer warpgroup.
  __device__ __forceinline__ uint32_t exchange(uint32_t group) const {
    return base + kRingOffset + Config::kMbarriers * kMbarrierBytes + group * Config::kExchangeBytes;
  }
  // With split-K, the mbarrier of the peer's partials for a warp.
  __device__ __forceinline__ uint32_t partials_ready(uint32_t warp) const {
    return base + kReadyOffset + warp % kWarpgroupWarps * kMbarrierBytes;
  }
};

// Lanes of a warp that release a stage, after all of them have read it. racecheck does not follow __syncwarp from one lane's reads to
// another's arrival, so each lane arrives for itself in builds for sanitizers (KL_EMULATE).
#ifdef KL_EMULATE
constexpr uint32_t kArrivalsPerWarp = 32;
#else
constexpr uint32_t kArrivalsPerWarp = 1;
#endif

// The shared memory of a CTA, and the position of a producer or consumer in its pipeline.
template <class Config>
struct Pipeline : SmemLayout<Config>, PipelineState<Config::kStages> {
  PipelineState<Config::kWindows> windows;

  // Called by consumers that have read a stage: by whole warpgroups or, if warps multiply by themselves, by each warp.
  __device__ __forceinline__ void release(uint32_t stage) const {
    if constexpr (Config::Mma::kPerWarp) {
      __syncwarp();
      if (threadIdx.x % 32 < kArrivalsPerWarp) mbarrier_arrive(this->empty(stage));
    } else {
      release_stage<Config::kMulticast>(this->empty(stage));
    }
  }
};
}  // namespace kl::gemm
