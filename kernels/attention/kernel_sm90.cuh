// Attention with heads of 128 on Hopper: the body of entry/attention_bf16_sm90.cu.
//
// Persistent and warp-specialized: one CTA per SM stays for the whole launch. One producer thread loads Q of a tile by TMA, then K and V
// in blocks of 128 keys, up to three blocks ahead (two with a mask, four in e4m3). Two consumer warpgroups have 64 queries each. Softmax
// uses no tensor core, so it is overlapped in two ways: within a warpgroup, the softmax of one KV block runs while the P V of the
// previous is in flight; between them, without a mask, the warpgroups take turns on the tensor cores (ping-pong). P stays in registers:
// the accumulator layout of Q K^T is the A operand layout of P V. Two CTAs are a cluster with the same KV head; each loads one half of
// every K and V block and multicasts it to both.
//
// Max-free softmax: subtracting a constant from all logits of a row changes neither the softmax nor its floating-point precision; the
// maximum only keeps exponentials in range. Q and K come out of RMS norms whose weights bound their lengths, so logits are bounded, too.
// Where 2^logit can neither overflow nor underflow, no maximum is computed and no accumulator is ever rescaled. Q is pre-scaled by
// log2(e) / sqrt(d) in the epilogue that wrote it, so softmax is a bare exp2. In e4m3, Q and K are each pre-scaled by the square root of
// that factor, and have a scale of one.
//
// With a causal mask, later rows attend to more keys. The first warpgroup of a CTA takes rows from the end of the sequence and the second
// as many from its beginning, so all CTAs have the same work.
//
// The output has up to two row ranges, each in bf16 or e4m3. A double block needs two: its text and image rows feed different layers, which
// have different scales.
//
// Tiles are scheduled by Stream-K over their KV blocks (persistent/stream_k.cuh); row sums and maxima go with the partial accumulators.
#pragma once

#include <attention/kv_cursor.cuh>
#include <attention/softmax.cuh>
#include <attention/tile_sm90.cuh>
#include <common/e4m3.cuh>
#include <common/math.cuh>
#include <common/vectors.cuh>
#include <persistent/pipeline.cuh>
#include <persistent/scheduler.cuh>

namespace kl::attention {
constexpr int kHeadDim = KL_MMA_COLS, kBlockQ = KL_SM90_BLOCK_Q, kBlockKV = KL_SM90_BLOCK_KV;
constexpr int kConsumers = 2, kWarps = kWarpgroupWarps * kConsumers, kThreads = kWarpgroupThreads * (1 + kConsumers);
static_assert(kBlockQ == kWgmmaRows * kConsumers, "abi.h states another size: each consumer warpgroup has one wgmma tile of queries");
using AttentionRegisters = RegisterSplit<kConsumers, /*producer*/ 24, /*consumer*/ 240>;
// The 128-byte swizzle limits a TMA box to 128 bytes of a row. In shared memory a bf16 tile is two slices of 64 columns, and an e4m3 tile
// is one slice of 128.
template <class Element>
constexpr uint32_t kSliceCols = kSwizzleRowBytes / sizeof(Element);
template <class Element>
constexpr int kSlices = kHeadDim / kSliceCols<Element>;
constexpr uint32_t kQSliceBytes = kBlockQ * kSwizzleRowBytes, kKVSliceBytes = kBlockKV * kSwizzleRowBytes;
constexpr uint32_t kVBytes = kSlices<bf16> * kKVSliceBytes;
constexpr int kMmaBytes = 32;  // bytes of a row of Q and of K per wgmma, whatever their type
constexpr int kPVKeys = 16;    // keys per wgmma of P and V

// Ids of named barriers; 0 is __syncthreads. A consumer warpgroup waits at its own for its turn on the tensor cores.
enum NamedBarrier : uint32_t { kTurnWG0 = 1, kTurnWG1 = 2 };

// Softmax without a running maximum, with one, and with a running maximum and a causal mask.
enum class Softmax { max_free, online_softmax, causal };

// QKElement is the type of queries and keys.
template <int kStages_, int kCluster_, class QKElement_, Softmax kSoftmax>
struct AttentionConfig {
  using QKElement = QKElement_;
  static constexpr int kStages = kStages_, kCluster = kCluster_, kQKSlices = kSlices<QKElement>;
  static constexpr bool kRunningMax = kSoftmax != Softmax::max_free, kCausal = kSoftmax == Softmax::causal;
  // Mbarriers: full and empty for Q; then for each stage full of K and of V, empty of K and of V, and the number of keys in the stage.
  static constexpr uint32_t kQBytes = kQKSlices * kQSliceBytes, kKBytes = kQKSlices * kKVSliceBytes, kKVBytes = kKBytes + kVBytes;
  static constexpr uint32_t kBarrierOffset = kQBytes + kStages * kKVBytes, kStageBarrierBytes = 5 * kMbarrierBytes;
  static constexpr uint32_t kSmemBytes = kSwizzleAlignment + kBarrierOffset + 2 * kMbarrierBytes + kStages * kStageBarrierBytes;
  // An SM has one CTA, because of its registers, and gives it all of its shared memory.
  static constexpr uint32_t kThreads = attention::kThreads, kSharedBytes = KL_SM90_SHARED_LIMIT;
  static_assert(kSmemBytes <= kSharedBytes, "more shared memory than a CTA can have");
  static_assert(kBlockKV / kCluster % 8 == 0 && kBlockKV % kPVKeys == 0,
                "the swizzle has a period of eight rows, a P V MMA takes sixteen keys");
};

// Shared memory: Q, the stages of K and V, and the mbarriers.
template <class Config>
struct SmemLayout {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(uint32_t i) const { return base + Config::kQBytes + i * Config::kKVBytes; }
  __device__ __forceinline__ uint32_t v(uint32_t i) const { return k(i) + Config::kKBytes; }
  __device__ __forceinline__ uint32_t barriers() const { return base + Config::kBarrierOffset; }
  __device__ __forceinline__ RingBarriers<1, 0, kMbarrierBytes> q_ring() const { return {barriers()}; }
  // In a stage, each mbarrier of V follows the same mbarrier of K.
  using KVRing = RingBarriers<Config::kStages, Config::kStageBarrierBytes, 2 * kMbarrierBytes>;
  __device__ __forceinline__ KVRing k_ring() const { return {barriers() + 2 * kMbarrierBytes}; }
  __device__ __forceinline__ KVRing v_ring() const { return {barriers() + 3 * kMbarrierBytes}; }
  __device__ __forceinline__ uint32_t q_full() const { return q_ring().full(0); }
  __device__ __forceinline__ uint32_t q_empty() const { return q_ring().empty(0); }
  __device__ __forceinline__ uint32_t k_full(uint32_t i) const { return k_ring().full(i); }
  __device__ __forceinline__ uint32_t k_empty(uint32_t i) const { return k_ring().empty(i); }
  __device__ __forceinline__ uint32_t v_full(uint32_t i) const { return v_ring().full(i); }
  __device__ __forceinline__ uint32_t v_empty(uint32_t i) const { return v_ring().empty(i); }
  __device__ __forceinline__ uint32_t kv_count(uint32_t i) const { return k_full(i) + 4 * kMbarrierBytes; }
};

// The shared memory of a CTA, and the position of a producer or consumer in its pipeline.
template <class Config>
struct Pipeline : SmemLayout<Config>, PipelineState<Config::kStages> {};

// The coordinates of a tile, and its KV blocks.
template <class Config>
struct TileCoord {
  const KlAttentionSm90& p;
  uint32_t head, row;  // the first head, and the index of the tile within that head
  uint32_t rows;       // queries of each head that a warpgroup has

  __device__ __forceinline__ TileCoord(const KlAttentionSm90& p, uint32_t tile) : p(p), rows(kWgmmaRows / p.pack) {
    const uint32_t heads = tile / p.row_tiles;
    head = heads * p.pack, row = tile - heads * p.row_tiles;
    if constexpr (Config::kCluster > 1) row = row * Config::kCluster + cluster_rank();
  }

  // The first query of a warpgroup.
  __device__ __forceinline__ uint32_t first_query(uint32_t group) const {
    if constexpr (Config::kCausal) return (group == 0 ? kConsumers * p.row_tiles - 1 - row : row) * rows;
    return (kConsumers * row + group) * rows;
  }

  // The end of a warpgroup's KV blocks. With a causal mask the warpgroup's last query limits them; the first warpgroup has the most.
  __device__ __forceinline__ uint32_t kv_end(const WorkTile& work, uint32_t group) const {
    if constexpr (Config::kCausal) return min(work.k_end, ceil_div<uint32_t>(first_query(group) + rows, kBlockKV));
    return work.k_end;
  }
};

struct Segments {
  static constexpr bool kMayBeEmpty = false;
  const KlAttentionSm90& p;

  __device__ __forceinline__ uint32_t keys(uint32_t segment) const { return p.keys[segment]; }
};

// The producer: one thread that issues all TMA loads of a CTA.
template <class Config>
__device__ __forceinline__ void produce(const KlAttentionSm90& p, Pipeline<Config> pipe) {
  // Loads the rows of a head that this CTA loads for the cluster.
  const auto load_kv = [&](auto t, uint32_t to, const KlTensorMap* map, uint32_t head, uint32_t row, uint32_t full) {
    using Element = typename decltype(t)::type;
#pragma unroll
    for (int slice = 0; slice < kSlices<Element>; slice++) {
      uint32_t to_slice = to + slice * kKVSliceBytes;
      const uint32_t col = head * kHeadDim + slice * kSliceCols<Element>;
      if constexpr (Config::kCluster > 1) {
        constexpr uint32_t kOwnRows = kBlockKV / Config::kCluster;
        const uint32_t own = cluster_rank() * kOwnRows;
        constexpr uint16_t kAllCtas = (1 << Config::kCluster) - 1;
        to_slice += own * kSwizzleRowBytes;
        tma_load_2d_multicast(to_slice, map, col, row + own, full, kAllCtas);
      } else {
        tma_load_2d(to_slice, map, col, row, full);
      }
    }
  };
  using QKElement = typename Config::QKElement;
  uint32_t q_parity = 1;
  TileScheduler<Config::kCluster> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work); q_parity ^= 1) {
    const TileCoord<Config> at(p, work.tile);
    const uint32_t key_head = at.head / p.group, kv_end = at.kv_end(work, 0);
    mbarrier_wait(pipe.q_empty(), q_parity);
    mbarrier_arrive_expect_tx(pipe.q_full(), Config::kQBytes);
    for (uint32_t group = 0; group < kConsumers; group++) {
      for (uint32_t h = 0; h < p.pack; h++) {
        const uint32_t to = pipe.q() + (group * kWgmmaRows + h * at.rows) * kSwizzleRowBytes, col = (at.head + h) * kHeadDim;
#pragma unroll
        for (int slice = 0; slice < Config::kQKSlices; slice++) {
          tma_load_2d(to + slice * kQSliceBytes, &p.q, col + slice * kSliceCols<QKElement>, at.first_query(group), pipe.q_full());
        }
      }
    }
    KVCursor<kBlockKV, Segments> cursor{{p}};
    cursor.seek(work.k_begin);
    for (uint32_t k = work.k_begin; k < kv_end; k++, pipe.advance(), cursor.next()) {
      const uint32_t i = pipe.stage, parity = pipe.parity ^ 1;
      mbarrier_wait(pipe.k_empty(i), parity);
      store_shared(pipe.kv_count(i), cursor.count());
      mbarrier_arrive_expect_tx(pipe.k_full(i), Config::kKBytes);
      load_kv(Type<QKElement>(), pipe.k(i), &p.k[cursor.segment], key_head, cursor.key, pipe.k_full(i));
      mbarrier_wait(pipe.v_empty(i), parity);
      mbarrier_arrive_expect_tx(pipe.v_full(i), kVBytes);
      load_kv(Type<bf16>(), pipe.v(i), &p.v[cursor.segment], key_head, cursor.key, pipe.v_full(i));
    }
  }
}

// A thread's registers of a tile: two rows that are eight apart, and two of every eight columns.
template <class Config>
struct AttentionTile : OutputTile<kHeadDim> {
  static constexpr bool kIsE4m3 = sizeof(typename Config::QKElement) == sizeof(e4m3);
  float scores[kBlockKV / 2];
  uint32_t p_frag[kBlockKV / 4];

  // scores = q k^T
  __device__ __forceinline__ void qk_mma(uint32_t q, uint32_t k) {
#pragma unroll
    for (int slice = 0; slice < Config::kQKSlices; slice++) {
      const uint64_t a = wgmma_descriptor(q + slice * kQSliceBytes), b = wgmma_descriptor(k + slice * kKVSliceBytes);
#pragma unroll
      for (int i = 0; i < kSwizzleRowBytes / kMmaBytes; i++) {
        constexpr uint64_t kStep = kMmaBytes / kDescriptorUnitBytes;
        if constexpr (kIsE4m3) {
          wgmma_e4m3<kBlockKV>(scores, a + kStep * i, b + kStep * i, slice > 0 || i > 0);
        } else {
          wgmma<kBlockKV>(scores, a + kStep * i, b + kStep * i, slice > 0 || i > 0);
        }
      }
    }
    wgmma_commit();
  }

  // out += p v
  __device__ __forceinline__ void pv_mma(uint32_t v) {
#pragma unroll
    for (int i = 0; i < kBlockKV / kPVKeys; i++) {
      wgmma_rs(out, &p_frag[4 * i], wgmma_descriptor_mn_major(v + i * kPVKeys * kSwizzleRowBytes, kKVSliceBytes));
    }
    wgmma_commit();
  }

  // Masks scores whose key is not below the limit of its row. Keys are counted from the first key of the block.
  __device__ __forceinline__ void mask(uint32_t limit0, uint32_t limit1) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; i++) {
      if (i / 4 * 8 + lane() % 4 * 2 + i % 2 >= (i / 2 % 2 ? limit1 : limit0)) scores[i] = -INFINITY;
    }
  }

  // Softmax of a block: scores become unnormalized probabilities and are added to the row sums.
  __device__ __forceinline__ void softmax_block(float scale) {
    constexpr int kCount = kBlockKV / 4;
    const auto score_of = [&](int h) { return [this, h](int i) -> float& { return scores[i / 2 * 4 + 2 * h + i % 2]; }; };
    if constexpr (Config::kRunningMax) {
      const float block_max[2] = {quad_row_max<kCount>(row_max[0], score_of(0)), quad_row_max<kCount>(row_max[1], score_of(1))};
      online_softmax_block<kCount>(block_max, scale, score_of);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) online_softmax<kCount, 2>(row_max[h], row_sum[h], row_max[h], Exp2MaxFree{}, score_of(h));
    }
  }

  __device__ __forceinline__ void round_p() {
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; i++) p_frag[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
  }
};

// Stores a row's values from four groups of eight columns. A lane has two values of each group. The lanes of a quad exchange them, so that
// each has eight contiguous ones, which it stores if the row is `valid`.
__device__ __forceinline__ void store_eight(const KlAttentionSm90&, bf16* to, bool valid, const float (&v)[8]) {
  const uint32_t pairs[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
  const uint4 eight = transpose_quad(pairs);
  if (valid) *reinterpret_cast<uint4*>(to) = eight;
}

__device__ __forceinline__ void store_eight(const KlAttentionSm90& p, e4m3* to, bool valid, const float (&v)[8]) {
  const uint32_t front = cvt_e4m3x2(v[0], v[1]) | cvt_e4m3x2(v[2], v[3]) << 16;
  const uint32_t back = cvt_e4m3x2(v[4], v[5]) | cvt_e4m3x2(v[6], v[7]) << 16;
  const uint2 eight = transpose_quad_halves(front, back);
  if (valid) {
    *reinterpret_cast<uint2*>(to) = eight;
    count_saturated<8>(p.saturated, v);
  }
}

template <class Config>
__device__ __forceinline__ void store(const KlAttentionSm90& p, const TileCoord<Config>& at, uint32_t group,
                                      const AttentionTile<Config>& tile) {
  const uint32_t first = threadIdx.x % kWarpgroupThreads / 32 * kWarpRows + lane() / 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float inverse = 1.0f / quad_sum(tile.row_sum[h]);
    const uint32_t tile_row = first + 8 * h, col = (at.head + tile_row / at.rows) * kHeadDim + lane() % 4 * 8;
    uint32_t row = at.first_query(group) + tile_row % at.rows;  // from the beginning of a range on
#pragma unroll 1
    for (int i = 0; i < KL_SM90_ATTENTION_OUTS; i++) {
      const KlMat& out = p.out[i];
      const bool valid = row < out.rows;
      const auto store_as = [&](auto t, float factor) {
        using Element = typename decltype(t)::type;
        Element* to = row_of<Element>(out, valid ? row : 0) + col;
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; j += 4) {
          const float* of = &tile.out[4 * j + 2 * h];
          float v[8];
#pragma unroll
          for (int e = 0; e < 8; e++) v[e] = of[e / 2 * 4 + e % 2] * factor;
          store_eight(p, to + 8 * j, valid, v);
        }
      };
      // Lanes exchange values, so all lanes of a warp take the same branch, though their rows may be in different ranges.
      if (__ballot_sync(0xffffffffu, valid)) {
        if (out.dtype == KL_E4M3) {
          store_as(Type<e4m3>(), inverse / out.scale);
        } else {
          store_as(Type<bf16>(), inverse);
        }
      }
      row -= out.rows;  // wraps around for rows of this range, so that no other range has them
    }
  }
}

// The consumers.
template <class Config>
__device__ __forceinline__ void consume(const KlAttentionSm90& p, Pipeline<Config> pipe) {
  const uint32_t group = threadIdx.x / kWarpgroupThreads - 1, own_turn = kTurnWG0 + group, other_turn = kTurnWG1 - group;
  const uint32_t q = pipe.q() + group * kWgmmaTileBytes;
  const auto release = [](uint32_t empty) { release_stage<Config::kCluster>(empty); };
  // Ping-pong, unless the warpgroups have different amounts of work; warpgroup 0 goes first.
  constexpr bool kPingPong = !Config::kCausal;
  if (kPingPong && group == 1) named_barrier_arrive(kTurnWG0);
  uint32_t q_parity = 0;
  TileScheduler<Config::kCluster> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work); q_parity ^= 1) {
    const TileCoord<Config> at(p, work.tile);
    const uint32_t kv_end = at.kv_end(work, group);
    AttentionTile<Config> tile;
    // Called once the scores of KV block k are complete: releases K, masks the scores and runs the softmax.
    const auto softmax_block = [&](uint32_t k, uint32_t count) {
      release(pipe.k_empty(pipe.stage));
      if (k + 1 == kv_end) release_stage</*CTAs*/ 1>(pipe.q_empty());
      if (Config::kCausal && k + 1 == kv_end) {
        const uint32_t row = threadIdx.x % kWarpgroupThreads / 32 * kWarpRows + lane() / 4;
        // The number of keys up to the row's own, counted from the first key of the block.
        const auto limit = [&](uint32_t row) {
          return min(count, max(at.first_query(group) + row % at.rows + 1, k * kBlockKV) - k * kBlockKV);
        };
        tile.mask(limit(row), limit(row + 8));
      } else if (count < kBlockKV) {
        tile.mask(count, count);
      }
      tile.softmax_block(p.scale);
    };
    mbarrier_wait(pipe.q_full(), q_parity);
    mbarrier_wait(pipe.k_full(pipe.stage), pipe.parity);
    const uint32_t count = load_shared_word(pipe.kv_count(pipe.stage));
    if constexpr (kPingPong) named_barrier_sync(own_turn);
    wgmma_fence();
    tile.qk_mma(q, pipe.k(pipe.stage));
    if constexpr (kPingPong) named_barrier_arrive(other_turn);
    wgmma_wait<0>();
    softmax_block(work.k_begin, count);
    // Waits for the P V wgmma in flight, if there is one, and rounds P for the next. The mbarrier wait comes first: otherwise the compiler
    // would move the wgmma wait before the softmax.
    uint32_t pv_in_flight = Config::kStages;
    const auto finish_pv = [&](uint32_t full, uint32_t parity) {
      mbarrier_wait(full, parity);
      wgmma_wait<0>();
      if (pv_in_flight < Config::kStages) release(pipe.v_empty(pv_in_flight));
      if constexpr (Config::kRunningMax) {
        if (tile.raised) tile.rescale_out(tile.correction);
      }
      tile.round_p();
    };
    for (uint32_t k = work.k_begin + 1; k < kv_end; k++) {
      const uint32_t previous = pipe.stage, previous_parity = pipe.parity;
      pipe.advance();
      finish_pv(pipe.k_full(pipe.stage), pipe.parity);
      const uint32_t count = load_shared_word(pipe.kv_count(pipe.stage));
      if constexpr (kPingPong) named_barrier_sync(own_turn);
      wgmma_fence();
      tile.qk_mma(q, pipe.k(pipe.stage));
      mbarrier_wait(pipe.v_full(previous), previous_parity);
      wgmma_fence();
      tile.pv_mma(pipe.v(previous));
      pv_in_flight = previous;
      if constexpr (kPingPong) named_barrier_arrive(other_turn);
      wgmma_wait<1>();
      softmax_block(k, count);
    }
    finish_pv(pipe.v_full(pipe.stage), pipe.parity);
    wgmma_fence();
    tile.pv_mma(pipe.v(pipe.stage));
    wgmma_wait<0>();
    release(pipe.v_empty(pipe.stage));
    pipe.advance();
    const auto finish = [&] { store(p, at, group, tile); };
    if constexpr (Config::kCausal) {
      finish();  // tiles are never divided: their KV blocks differ in number
    } else {
      using Partials = TilePartials<kHeadDim, Config::kCluster, kWarps, Config::kRunningMax>;
      finish_or_store(
          p.schedule, work, scheduler.worker(), [&] { Partials(p.schedule, scheduler.worker()).store_tile(tile); },
          [&](uint32_t peer) { Partials(p.schedule, peer).add_to(tile, p.scale); }, finish);
    }
    // Releases the KV blocks that only the other warpgroup has.
    for (uint32_t k = kv_end; k < at.kv_end(work, 0); k++, pipe.advance()) {
      mbarrier_wait(pipe.k_full(pipe.stage), pipe.parity);
      release(pipe.k_empty(pipe.stage));
      mbarrier_wait(pipe.v_full(pipe.stage), pipe.parity);
      release(pipe.v_empty(pipe.stage));
    }
  }
  if (kPingPong && group == 0) named_barrier_sync(kTurnWG0);  // consumes the last arrival of warpgroup 1
}

template <class Config>
__device__ __forceinline__ void attention(const KlAttentionSm90& p) {
  KL_DYNAMIC_SHARED(kSwizzleAlignment);
  const Pipeline<Config> pipe{{align_to_swizzle(shared_address(dynamic_shared))}, {}};
  const auto init = [&] {
    prefetch_tensor_map(&p.q), prefetch_tensor_map(&p.k[0]), prefetch_tensor_map(&p.v[0]);
    pipe.q_ring().init(1, kConsumers);
    pipe.k_ring().init(1, kConsumers * Config::kCluster);
    pipe.v_ring().init(1, kConsumers * Config::kCluster);
  };
  const auto run_producer = [&] {
    if (threadIdx.x == 0) wait_for_previous_kernel(), produce(p, pipe);
    __syncwarp();
  };
  run_warp_specialized<AttentionRegisters, Config::kCluster, Config::kCluster>(init, run_producer, [&] { consume(p, pipe); });
}
}  // namespace kl::attention
