// The configuration of the tiles of gemm_bf16_sm90.cu: sizes, tile coordinates, shared-memory layout.
#pragma once

#include <common/types.cuh>
#include <gemm/pipeline_sm90.cuh>
#include <ptx/sm90.cuh>

// What the CTAs of a cluster share: A (the same rows of x), B (the same rows of w), or one tile, of which each has half of K.
enum class ClusterMode { kMulticastA, kMulticastB, kSplitK };

// Ids of named barriers; 0 is __syncthreads. Each consumer warpgroup has one, from kWarpgroupBarrier on; the split-K hand-over comes
// after them.
enum NamedBarrier : uint32_t { kWarpgroupBarrier = 1 };

// The width of a TMA store box, for a tile of `cols` columns.
__host__ __device__ constexpr int store_cols(int cols) {
  return cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16;
}

// A tile is kConsumers consumer warpgroups, one below the other, with kMmaM wgmma tiles of 64 rows by kBlockN columns each. kMmaN counts
// the 8-column fragments of an accumulator row.
template <int kConsumers_, int kMmaM_, int kBlockN_, int kStages_, ClusterMode kMode_>
struct GemmConfig {
  static constexpr int kConsumers = kConsumers_, kWarps = 4 * kConsumers, kThreads = 128 * (1 + kConsumers), kStages = kStages_;
  static constexpr int kMmaM = kMmaM_, kMmaN = kBlockN_ / 8, kBlockM = kConsumers * kMmaM * 64, kBlockN = kBlockN_;
  static constexpr ClusterMode kMode = kMode_;
  static constexpr bool kSplitK = kMode == ClusterMode::kSplitK;
  // Tiles of a cluster.
  static constexpr uint32_t kClusterM = kMode == ClusterMode::kMulticastB ? 2 : 1;
  static constexpr uint32_t kClusterN = kMode == ClusterMode::kMulticastA ? 2 : 1;
  static constexpr uint32_t kABytes = kBlockM * 128, kBBytes = kBlockN * 128, kStageBytes = kABytes + kBBytes;
  // Registers per thread after setmaxnreg.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // The residual comes through the pipeline in boxes of a warpgroup's rows and 64 columns, as many at a time as a stage holds.
  static constexpr uint32_t kResidualBoxBytes = kMmaM * 64 * 128, kResidualBoxesM = kSplitK ? 1 : kConsumers;
  static constexpr uint32_t kResidualBoxesN = (kBlockN + 63) / 64, kResidualBoxes = kResidualBoxesM * kResidualBoxesN;
  static constexpr uint32_t kBoxesPerStage = kStageBytes / kResidualBoxBytes;
  static constexpr uint32_t kResidualStages = (kResidualBoxes + kBoxesPerStage - 1) / kBoxesPerStage;
  // With split-K a CTA finishes one warpgroup's rows and receives the peer's partial accumulators of them, per warp.
  static constexpr uint32_t kPartialBytes = kMmaN * 32 * sizeof(float4);
  // Staging buffers of each warp for TMA stores: as many as fit, up to four. With split-K they overlay the peer's partials, one for every
  // piece that is stored.
  static constexpr uint32_t kStoreBufferBytes = KL_SM90_STORE_ROWS * store_cols(kBlockN) * sizeof(bf16);
  static constexpr int kFreeBytes = 232448 - 1024 - 512 - kStages * kStageBytes;
  static constexpr int kBuffersThatFit = kSplitK ? kPartialBytes / kStoreBufferBytes : kFreeBytes / (kWarps * kStoreBufferBytes);
  static constexpr int kMaxBuffers = kSplitK ? kBlockN / store_cols(kBlockN) : 4;
  static constexpr int kStoreBuffers = kBuffersThatFit < kMaxBuffers ? kBuffersThatFit : kMaxBuffers;
  // Pieces that are staged and stored together, because the fence and barrier in between cost more than a small piece. With split-K all
  // of them, because the CTA has nothing else to do.
  static constexpr int kStoresOf2K = 2048 / kStoreBufferBytes;
  static constexpr int kStoresAtOnce = kSplitK || kStoresOf2K > kStoreBuffers ? kStoreBuffers : kStoresOf2K;
  static constexpr uint32_t kStoreBytes = kSplitK ? 4 * kPartialBytes : kWarps * kStoreBuffers * kStoreBufferBytes;
  static constexpr uint32_t kSmemBytes = 1024 + kStages * (kStageBytes + 16) + kStoreBytes + (kSplitK ? 32 : 0);
  static_assert(kStoreBuffers > 0 && kSmemBytes <= 232448, "more shared memory than an SM has");
};

// The coordinates of a tile, from its linear index.
template <class Config>
struct TileCoord {
  uint32_t stream, row_tile, col_tile, part = 0;  // col_tile counts within the part

  __device__ __forceinline__ TileCoord(const KlGemmSm90& p, uint32_t index) {
    const uint32_t first = p.stream[0].row_tiles * p.stream[0].col_tiles;
    stream = index >= first;
    if (stream) index -= first;
    const KlGemmStream& s = p.stream[stream];
    // Rasterisation in groups of row tiles: as many rows of x as stay in L2 while all columns pass.
    const uint32_t group = p.group[stream], group_index = index / (group * s.col_tiles);
    const uint32_t within = index - group_index * group * s.col_tiles;
    const uint32_t rows = min(group, s.row_tiles - group_index * group);
    row_tile = (group_index * group + within % rows) * Config::kClusterM, col_tile = within / rows * Config::kClusterN;
    if constexpr (!Config::kSplitK) (Config::kMode == ClusterMode::kMulticastB ? row_tile : col_tile) += cluster_rank();
    // The last cluster may have one tile too many: it lies beyond the last part, and TMA clips its stores.
    while (part + 1 < KL_GEMM_PARTS && s.part[part + 1].tiles && col_tile >= s.part[part].tiles) col_tile -= s.part[part++].tiles;
  }
};

// Shared memory: the pipeline stages (A, then B), the warps' staging buffers, and the mbarriers.
template <class Config>
struct SmemLayout {
  uint32_t base;

  static constexpr uint32_t kStoreOffset = Config::kStages * Config::kStageBytes, kFullOffset = kStoreOffset + Config::kStoreBytes;
  static constexpr uint32_t kEmptyOffset = kFullOffset + 8 * Config::kStages, kReadyOffset = kEmptyOffset + 8 * Config::kStages;

  __device__ __forceinline__ uint32_t a(uint32_t i) const { return base + i * Config::kStageBytes; }
  __device__ __forceinline__ uint32_t b(uint32_t i) const { return a(i) + Config::kABytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return base + kFullOffset + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return base + kEmptyOffset + 8 * i; }
  __device__ __forceinline__ uint32_t store_buffers(uint32_t warp) const {
    constexpr uint32_t kWarpBytes = Config::kSplitK ? Config::kPartialBytes : Config::kStoreBuffers * Config::kStoreBufferBytes;
    return base + kStoreOffset + (Config::kSplitK ? warp % 4 : warp) * kWarpBytes;
  }
  // With split-K, the mbarrier of the peer's partials for a warp.
  __device__ __forceinline__ uint32_t partials_ready(uint32_t warp) const { return base + kReadyOffset + 8 * (warp % 4); }
};

// The shared memory of a CTA, and the position of a producer or consumer in its pipeline.
template <class Config>
struct Pipeline : SmemLayout<Config>, PipelineState<Config::kStages> {};
