// Attention with a wide head on Hopper: the body of entry/attention_wide_bf16_sm90.cu.
//
// Numbers below are for a head of 512; the small decoder has the other head dimension.
//
// The accumulators of 64 queries by 512 columns are half of an SM's registers, so an SM cannot have more outputs. A cluster of two CTAs
// therefore computes a tile of 128 queries together, a KV block of 128 keys at a time. Each CTA has half of the scores (all queries by 64
// of the keys) and half of the outputs (all queries by 256 columns). So each loads half of K by rows and half of V by columns, and no byte
// is loaded twice. The two consumer warpgroups of a CTA have 64 queries each. Through distributed shared memory, a warpgroup exchanges row
// maxima and then probabilities P with the warpgroup of the other CTA that has the same queries. It has P of its own keys in registers, and
// reads P of the other keys from shared memory.
//
// Per KV block an SM's tensor cores take 4096 clocks. Its shared memory takes 4480: Q K^T reads 2048 (m64n64k16: 16 for A, 16 for B), P V
// 1152 (m64n256k16: 64 for B, 16 for an A that is not in registers), TMA writes 1024, and P takes 256. With a tile of 64 queries for each
// CTA, and scores of 32 keys for each warpgroup, it would take 6400. 128 KiB of K and V per CTA, at the 25 bytes per clock and SM that L2
// delivers, take 5200.
//
// Q K^T of the next KV block is issued before P V of this one. Softmax runs while the first half of that P V is in flight, which takes the
// warpgroup's own keys. The second half follows, so the exchanged P has that time to arrive. K and V come in stages of 8 KiB. A KV block
// takes sixteen stages, and there are ten: a stage is released as soon as a wgmma has read it.
//
// Tiles are scheduled by Stream-K over their KV blocks (persistent/stream_k.cuh); row sums and maxima go with the partial accumulators.
#pragma once

#include <attention/softmax.cuh>
#include <attention/tile_sm90.cuh>
#include <common/swizzle.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <persistent/pipeline.cuh>
#include <persistent/scheduler.cuh>

namespace kl::attention::wide {
constexpr int kBlockQ = KL_WIDE_SM90_BLOCK_Q, kBlockKV = KL_WIDE_SM90_BLOCK_KV;
constexpr int kCluster = KL_SM90_CLUSTER, kConsumers = 2;
constexpr int kWarps = kWarpgroupWarps * kConsumers, kThreads = kWarpgroupThreads * (1 + kConsumers);
static_assert(kBlockQ == kWgmmaRows * kConsumers, "abi.h states another size: each consumer warpgroup has one wgmma tile of queries");
using AttentionRegisters = RegisterSplit<kConsumers, /*producer*/ 40, /*consumer*/ 232>;
constexpr int kKeys = kBlockKV / kCluster;  // per CTA

// Tiles lie in shared memory in slices of 64 columns, the 128 bytes of a row that the swizzle allows. A stage is a slice of a CTA's keys,
// or the CTA's columns of V for the sixteen keys of a wgmma, in slices as well.
constexpr uint32_t kSliceCols = kSwizzleRowBytes / sizeof(bf16);
constexpr int kVKeys = KL_WIDE_SM90_V_ROWS, kMmaBytes = 32;
constexpr int kHalfStages = kKeys / kVKeys;  // stages of V for the keys of one CTA
constexpr uint32_t kStageBytes = kKeys * kSwizzleRowBytes, kVSliceBytes = kVKeys * kSwizzleRowBytes;
static_assert(kKeys * sizeof(bf16) == kSwizzleRowBytes, "a row of P is a row of the swizzle");
// Row statistics are exchanged through two alternating buffers.
constexpr uint32_t kStatsBuffers = 2, kStatsBytes = kWgmmaRows * sizeof(float), kAllStatsBytes = kStatsBuffers * kConsumers * kStatsBytes;
constexpr uint32_t kRingBytes = 2 * kMbarrierBytes;
// Stages that a wgmma group reads. While one group is in flight the next is issued.
constexpr int kGroupStages = 2;

template <int kBlockQ, int kHeadDim_, int kStages_>
struct WideConfig {
  static constexpr int kHeadDim = kHeadDim_, kStages = kStages_;
  static constexpr int kCols = kHeadDim / kCluster;  // output columns of a CTA
  static constexpr int kQKSlices = kHeadDim / kSliceCols, kVSlices = kCols / kSliceCols;
  static_assert(kVSlices * kSliceCols == kCols, "slices are whole");
  static_assert(kHalfStages % kGroupStages == 0 && kQKSlices % kGroupStages == 0, "groups are whole");
  static constexpr uint32_t kVBytes = kVSlices * kVSliceBytes;  // bytes of V in a stage
  static_assert(kVBytes <= kStageBytes, "a stage has room for keys and for values");
  static constexpr uint32_t kGroupQBytes = kQKSlices * kWgmmaTileBytes, kQBytes = kConsumers * kGroupQBytes;
  static constexpr uint32_t kPOffset = kQBytes + kStages * kStageBytes, kStatsOffset = kPOffset + kConsumers * kWgmmaTileBytes;
  // Mbarriers: full and empty for Q and for each stage; for each warpgroup full and empty for P, and full for each statistics buffer.
  static constexpr uint32_t kBarrierOffset = kStatsOffset + kAllStatsBytes;
  static constexpr uint32_t kSmemBytes = kSwizzleAlignment + kBarrierOffset + (1 + kStages + 2 * kConsumers) * kRingBytes;
  // An SM has one CTA, because of its registers, and gives it all of its shared memory.
  static constexpr uint32_t kThreads = wide::kThreads, kSharedBytes = KL_SM90_SHARED_LIMIT;
  static_assert(kBlockQ == wide::kBlockQ, "abi.h states another size");
  static_assert(kSmemBytes <= kSharedBytes, "more shared memory than a CTA can have");
};

template <int kCount>
using Ring = RingBarriers<kCount, kRingBytes, kMbarrierBytes>;

template <class Config>
struct SmemLayout {
  static constexpr int kStages = Config::kStages;
  uint32_t base;

  __device__ __forceinline__ uint32_t q(uint32_t group) const { return base + group * Config::kGroupQBytes; }
  __device__ __forceinline__ uint32_t data(uint32_t stage) const { return base + Config::kQBytes + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t p(uint32_t group) const { return base + Config::kPOffset + group * kWgmmaTileBytes; }
  __device__ __forceinline__ uint32_t stats(uint32_t group, uint32_t buffer) const {
    return base + Config::kStatsOffset + (group * kStatsBuffers + buffer) * kStatsBytes;
  }
  __device__ __forceinline__ uint32_t barriers() const { return base + Config::kBarrierOffset; }
  __device__ __forceinline__ Ring<1> q_ring() const { return {barriers()}; }
  __device__ __forceinline__ Ring<kStages> ring() const { return {barriers() + kRingBytes}; }
  __device__ __forceinline__ Ring<kConsumers> p_ring() const { return {barriers() + (1 + kStages) * kRingBytes}; }
  __device__ __forceinline__ uint32_t stats_full(uint32_t group, uint32_t buffer) const {
    return barriers() + (1 + kStages + kConsumers + group) * kRingBytes + buffer * kMbarrierBytes;
  }
};

// The coordinates of a tile.
struct TileCoord {
  uint32_t head, first_query;

  __device__ __forceinline__ TileCoord(const KlAttentionSm90& p, uint32_t tile)
      : head(tile / p.row_tiles), first_query((tile - head * p.row_tiles) * kBlockQ) {}
};

// The producer: one thread that issues all TMA loads of a CTA, in the order in which consumers use them.
template <class Config>
__device__ __forceinline__ void produce(const KlAttentionSm90& p, SmemLayout<Config> smem) {
  constexpr int kHeadDim = Config::kHeadDim, kQKSlices = Config::kQKSlices;
  const uint32_t rank = cluster_rank();
  PipelineState<Config::kStages> pipe;
  const auto next_stage = [&](uint32_t bytes, auto load) {
    const uint32_t full = smem.ring().full(pipe.stage);
    mbarrier_wait(smem.ring().empty(pipe.stage), pipe.parity ^ 1);
    mbarrier_arrive_expect_tx(full, bytes);
    load(smem.data(pipe.stage), full);
    pipe.advance();
  };
  uint32_t q_parity = 1;
  TileScheduler<kCluster> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work); q_parity ^= 1) {
    const TileCoord at(p, work.tile);
    const uint32_t k_col = at.head / p.group * kHeadDim, v_col = k_col + rank * Config::kCols;
    const auto load_k = [&](uint32_t k) {
      for (int i = 0; i < kQKSlices; i++) {
        next_stage(kStageBytes, [&](uint32_t to, uint32_t full) {
          tma_load_2d(to, &p.k[0], k_col + i * kSliceCols, k * kBlockKV + rank * kKeys, full);
        });
      }
    };
    // The values of this CTA's keys come first, then the values of the other CTA's keys.
    const auto load_v = [&](uint32_t k) {
      for (uint32_t half = 0; half < kCluster; half++) {
        const uint32_t key = k * kBlockKV + (rank ^ half) * kKeys;
        for (int i = 0; i < kHalfStages; i++) {
          next_stage(Config::kVBytes, [&](uint32_t to, uint32_t full) {
#pragma unroll
            for (int slice = 0; slice < Config::kVSlices; slice++) {
              tma_load_2d(to + slice * kVSliceBytes, &p.v[0], v_col + slice * kSliceCols, key + i * kVKeys, full);
            }
          });
        }
      }
    };
    mbarrier_wait(smem.q_ring().empty(0), q_parity);
    mbarrier_arrive_expect_tx(smem.q_ring().full(0), Config::kQBytes);
    for (uint32_t group = 0; group < kConsumers; group++) {
      for (int slice = 0; slice < kQKSlices; slice++) {
        tma_load_2d(smem.q(group) + slice * kWgmmaTileBytes, &p.q, at.head * kHeadDim + slice * kSliceCols,
                    at.first_query + group * kWgmmaRows, smem.q_ring().full(0));
      }
    }
    for (uint32_t k = work.k_begin; k < work.k_end; k++) {
      load_k(k);
      if (k > work.k_begin) load_v(k - 1);
    }
    load_v(work.k_end - 1);
  }
}

// The stages of a consumer. It uses them in order, and releases them in order once the wgmma that read them have completed.
template <class Config>
struct ConsumerStages : PipelineState<Config::kStages> {
  using PipelineState<Config::kStages>::stage, PipelineState<Config::kStages>::parity;
  static constexpr int kStages = Config::kStages;
  SmemLayout<Config> smem;
  uint32_t held = 0;  // stages not released yet

  // Waits for the next kCount stages; `data` are their addresses.
  template <int kCount>
  __device__ __forceinline__ void next(uint32_t (&data)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++, this->advance(), held++) {
      mbarrier_wait(smem.ring().full(stage), parity);
      data[i] = smem.data(stage);
    }
  }

  // Waits until at most kGroups wgmma groups (one or none) are in flight, and releases all stages but the last kKept, which they read.
  template <int kGroups, uint32_t kKept>
  __device__ __forceinline__ void retire() {
    wgmma_wait<kGroups>();
#pragma unroll 1
    for (; held > kKept; held--) release_stage</*CTAs*/ 1>(smem.ring().empty(stage < held ? stage + kStages - held : stage - held));
  }
};

// The peer of an exchange: the warpgroup of the other CTA that has the same queries.
template <class Config>
struct Peer {
  SmemLayout<Config> smem;
  uint32_t group, rank = cluster_rank() ^ 1;
  uint32_t exchanges = 0, p_parity = 0;

  // The first of the two rows of the tile that a thread has; the other is eight rows below.
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x % kWarpgroupThreads / 32 * kWarpRows + lane() / 4; }

  // Sends one number for each of the thread's rows. All lanes of a quad have the same numbers.
  __device__ __forceinline__ void send(const float (&v)[2]) const {
    const uint32_t buffer = exchanges % kStatsBuffers, full = smem.stats_full(group, buffer);
    if (lane() == 0) mbarrier_arrive_expect_tx_remote(full, kWarpRows * sizeof(float), rank);
    const uint32_t h = lane() % 4;
    if (h < 2) store_remote_async(smem.stats(group, buffer) + (row() + 8 * h) * sizeof(float), h == 0 ? v[0] : v[1], full, rank);
  }

  // Receives the peer's numbers. The peer reuses this buffer only after it has received this warpgroup's next numbers, and by then all
  // warps of this warpgroup have received the present ones.
  __device__ __forceinline__ void receive(float (&v)[2]) {
    const uint32_t buffer = exchanges % kStatsBuffers, from = smem.stats(group, buffer) + row() * sizeof(float);
    mbarrier_wait(smem.stats_full(group, buffer), exchanges / kStatsBuffers % 2);
#pragma unroll
    for (int h = 0; h < 2; h++) v[h] = __uint_as_float(load_shared_word(from + 8 * h * sizeof(float)));
    exchanges++;
  }

  // Sends P from registers, as a K-major wgmma operand. The lanes of a quad exchange words, so that each has 16 bytes of a row.
  __device__ __forceinline__ void send_p(const uint32_t (&p_frag)[kKeys / 4]) const {
    const uint32_t full = smem.p_ring().full(group);
    mbarrier_wait(smem.p_ring().empty(group), p_parity ^ 1);
    if (lane() == 0) mbarrier_arrive_expect_tx_remote(full, kWarpRows * kSwizzleRowBytes, rank);
#pragma unroll
    for (int i = 0; i < kKeys / 8; i += 4) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t* of = &p_frag[2 * i + h];
        const uint4 eight = transpose_quad({of[0], of[2], of[4], of[6]});
        const uint32_t to = smem.p(group) + swizzled<kSwizzleRowBytes>(row() + 8 * h, i + lane() % 4);
        store_remote_async(to, eight, full, rank);
      }
    }
  }

  // Waits for the peer's P. Stores of another SM are not writes of the async proxy, through which wgmma reads, hence the fence.
  __device__ __forceinline__ void wait_for_p() const {
    mbarrier_wait(smem.p_ring().full(group), p_parity);
    fence_proxy_async();
  }

  // Called once the wgmma that read the peer's P have completed: the peer may send the next P.
  __device__ __forceinline__ void release_p() {
    if (threadIdx.x % kWarpgroupThreads == 0) mbarrier_arrive_remote(smem.p_ring().empty(group), rank);
    p_parity ^= 1;
  }
};

// A thread's registers of a tile.
template <class Config>
struct WideTile : OutputTile<Config::kCols> {
  using OutputTile<Config::kCols>::out, OutputTile<Config::kCols>::row_max;
  float scores[kKeys / 2];
  uint32_t p_frag[kKeys / 4];

  // scores = q k^T. Returns with only the last wgmma group in flight.
  __device__ __forceinline__ void qk_mma(ConsumerStages<Config>& stages, uint32_t q) {
#pragma unroll 1
    for (int first = 0; first < Config::kQKSlices; first += kGroupStages) {
      uint32_t k[kGroupStages];
      stages.next(k);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kGroupStages; j++) {
        const uint64_t a = wgmma_descriptor(q + (first + j) * kWgmmaTileBytes), b = wgmma_descriptor(k[j]);
#pragma unroll
        for (int i = 0; i < kSwizzleRowBytes / kMmaBytes; i++) {
          constexpr uint64_t kStep = kMmaBytes / kDescriptorUnitBytes;
          wgmma<kKeys>(scores, a + kStep * i, b + kStep * i, first > 0 || j > 0 || i > 0);
        }
      }
      wgmma_commit();
      stages.template retire<1, kGroupStages>();
    }
  }

  // out += p v, of this CTA's keys.
  __device__ __forceinline__ void own_pv_mma(ConsumerStages<Config>& stages) {
    uint32_t v[kHalfStages];
    stages.next(v);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalfStages; i++) wgmma_rs(out, &p_frag[4 * i], wgmma_descriptor_mn_major(v[i], kVSliceBytes));
    wgmma_commit();
  }

  // out += p v, of the other CTA's keys. Returns with the wgmma of the last group in flight. Calls `own_done` when p_frag is no longer
  // used.
  template <class OwnDone>
  __device__ __forceinline__ void peer_pv_mma(ConsumerStages<Config>& stages, const Peer<Config>& peer, OwnDone own_done) {
    peer.wait_for_p();
    const uint64_t p = wgmma_descriptor(stages.smem.p(peer.group));
#pragma unroll
    for (int first = 0; first < kHalfStages; first += kGroupStages) {
      uint32_t v[kGroupStages];
      stages.next(v);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kGroupStages; j++) {
        const uint64_t a = p + kVKeys * sizeof(bf16) / kDescriptorUnitBytes * (first + j);
        wgmma_mn_major<Config::kCols>(out, a, wgmma_descriptor_mn_major(v[j], kVSliceBytes));
      }
      wgmma_commit();
      stages.template retire<1, kGroupStages>();
      if (first == 0) own_done();
    }
  }

  // Online softmax of a block that has `count` keys in this CTA. The row maxima include the other CTA's keys.
  __device__ __forceinline__ void softmax_block(Peer<Config>& peer, uint32_t count, float scale) {
    constexpr int kCount = kKeys / 4;
    const auto score_of = [&](int h) { return [this, h](int i) -> float& { return scores[i / 2 * 4 + 2 * h + i % 2]; }; };
    if (count < kKeys) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; i++) {
        if (i / 4 * 8 + lane() % 4 * 2 + i % 2 >= count) scores[i] = -INFINITY;
      }
    }
    float block_max[2] = {quad_row_max<kCount>(row_max[0], score_of(0)), quad_row_max<kCount>(row_max[1], score_of(1))}, peer_max[2];
    peer.send(block_max);
    peer.receive(peer_max);
    // The first block has a key for every query, so the maximum is always finite.
    block_max[0] = fmaxf(block_max[0], peer_max[0]), block_max[1] = fmaxf(block_max[1], peer_max[1]);
    this->template online_softmax_block<kCount>(block_max, scale, score_of);
  }

  __device__ __forceinline__ void round_p() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) p_frag[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }
};

// Divides by the row sums of both CTAs' keys, and stores. Lanes of a quad exchange values, so that each has eight contiguous ones.
template <class Config>
__device__ __forceinline__ void store(const KlAttentionSm90& p, const TileCoord& at, Peer<Config>& peer, const WideTile<Config>& tile) {
  const uint32_t col = at.head * Config::kHeadDim + cluster_rank() * Config::kCols + lane() % 4 * 8;
  float sum[2] = {quad_sum(tile.row_sum[0]), quad_sum(tile.row_sum[1])}, peer_sum[2];
  peer.send(sum);
  peer.receive(peer_sum);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float inverse = 1.0f / (sum[h] + peer_sum[h]);
    const uint32_t query = at.first_query + peer.group * kWgmmaRows + peer.row() + 8 * h;
    const bool valid = query < p.out[0].rows;
    bf16* to = row_of<bf16>(p.out[0], valid ? query : 0) + col;
#pragma unroll
    for (int j = 0; j < Config::kCols / 8; j += 4) {
      const float* of = &tile.out[4 * j + 2 * h];
      uint32_t pairs[4];
#pragma unroll
      for (int e = 0; e < 4; e++) pairs[e] = pack_bf16(of[4 * e] * inverse, of[4 * e + 1] * inverse);
      const uint4 eight = transpose_quad(pairs);
      if (valid && col + 8 * j < p.out[0].cols) *reinterpret_cast<uint4*>(to + 8 * j) = eight;
    }
  }
}

// The consumers.
template <class Config>
__device__ __forceinline__ void consume(const KlAttentionSm90& p, SmemLayout<Config> smem) {
  const uint32_t group = threadIdx.x / kWarpgroupThreads - 1;
  ConsumerStages<Config> stages{{}, smem};
  Peer<Config> peer{smem, group};
  uint32_t q_parity = 0;
  TileScheduler<kCluster> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work); q_parity ^= 1) {
    const TileCoord at(p, work.tile);
    WideTile<Config> tile;
    const auto softmax_block = [&](uint32_t k) {
      const uint32_t first = k * kBlockKV + cluster_rank() * kKeys;
      tile.softmax_block(peer, max(p.keys[0], first) - first, p.scale);
    };
    // Issues the first half of P V for the block whose P is in registers. Returns with its wgmma in flight, and no earlier ones.
    const auto begin_pv = [&] {
      tile.own_pv_mma(stages);
      peer.send_p(tile.p_frag);
      stages.template retire<1, kHalfStages>();
    };
    mbarrier_wait(smem.q_ring().full(0), q_parity);
    tile.qk_mma(stages, smem.q(group));
    stages.template retire<0, 0>();
    softmax_block(work.k_begin);
    tile.round_p();
    for (uint32_t k = work.k_begin + 1; k < work.k_end; k++) {
      tile.qk_mma(stages, smem.q(group));
      if (k > work.k_begin + 1) peer.release_p();  // its wgmma came before the wgmma of the scores
      begin_pv();
      softmax_block(k);
      tile.peer_pv_mma(stages, peer, [&] { tile.round_p(); });
      if (tile.raised) {
        stages.template retire<0, 0>();
        tile.rescale_out(tile.correction);
      }
    }
    release_stage</*CTAs*/ 1>(smem.q_ring().empty(0));
    stages.template retire<0, 0>();
    if (work.k_begin + 1 < work.k_end) peer.release_p();
    begin_pv();
    tile.peer_pv_mma(stages, peer, [] {});
    stages.template retire<0, 0>();
    peer.release_p();
    using Partials = TilePartials<Config::kCols, kCluster, kWarps, /*running maximum*/ true>;
    finish_or_store(
        p.schedule, work, scheduler.worker(), [&] { Partials(p.schedule, scheduler.worker()).store_tile(tile); },
        [&](uint32_t other) { Partials(p.schedule, other).add_to(tile, p.scale); }, [&] { store(p, at, peer, tile); });
  }
}

template <class Config>
__device__ __forceinline__ void attention(const KlAttentionSm90& p) {
  KL_DYNAMIC_SHARED(kSwizzleAlignment);
  const SmemLayout<Config> smem{align_to_swizzle(shared_address(dynamic_shared))};
  const auto init = [&] {
    prefetch_tensor_map(&p.q), prefetch_tensor_map(&p.k[0]), prefetch_tensor_map(&p.v[0]);
    smem.q_ring().init(1, kConsumers);
    smem.ring().init(1, kConsumers);
    smem.p_ring().init(kWarpgroupWarps, 1);
    for (uint32_t i = 0; i < kConsumers * kStatsBuffers; i++) {
      mbarrier_init(smem.stats_full(i / kStatsBuffers, i % kStatsBuffers), kWarpgroupWarps);
    }
  };
  const auto run_producer = [&] {
    if (threadIdx.x == 0) wait_for_previous_kernel(), produce(p, smem);
    __syncwarp();
  };
  // The CTAs store into each other's shared memory, so they start and end together as with multicast.
  run_warp_specialized<AttentionRegisters, kCluster, /*multicast*/ kCluster>(init, run_producer, [&] { consume(p, smem); });
}
}  // namespace kl::attention::wide
