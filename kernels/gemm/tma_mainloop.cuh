// The persistent GEMM with TMA over a configuration: the producer, the consumers' main loop, split-K inside a cluster, Stream-K fix-up.
#pragma once

#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <gemm/tma_config.cuh>
#include <gemm/tma_epilogue.cuh>
#include <persistent/scheduler.cuh>
#include <persistent/stream_k.cuh>
#include <ptx/sm90.cuh>

namespace kl::gemm {
// The Stream-K partials of a warp: all accumulators of a lane.
template <class Config>
struct TilePartials : PartialTile<PartialsOfWarp, Config::kMmaM * Config::kMmaN> {
  static constexpr int kVectors = Config::kMmaM * Config::kMmaN;
  using Partials = PartialTile<PartialsOfWarp, kVectors>;
  // As many loads in flight as registers allow, next to the accumulators and some forty registers for addresses and loop state.
  static constexpr int kOtherRegisters = 40, kFreeVectors = (Config::Registers::kConsumer - 4 * kVectors - kOtherRegisters) / 4;
  static constexpr int kInFlight = kFreeVectors < 1 ? 1 : kFreeVectors < kVectors ? kFreeVectors : kVectors;

  __device__ __forceinline__ TilePartials(const KlTileSchedule& schedule, uint32_t worker)
      : Partials(schedule, partials_of_warp<Config::kCluster, Config::kWarps>(worker)) {}

  // Takes the accumulators by reference: captured by the caller's lambda, convolutions compile to other machine code.
  __device__ __forceinline__ void store_acc(const typename Config::Acc& acc) const {
    Partials::store_acc([&](int i) { return &acc[i / Config::kMmaN][4 * (i % Config::kMmaN)]; });
  }

  __device__ __forceinline__ void add_to(typename Config::Acc& acc) const {
    Partials::template add_to<kInFlight>([&](int i) { return &acc[i / Config::kMmaN][4 * (i % Config::kMmaN)]; });
  }
};

// Restricts a tile to this CTA's half of its k-blocks.
__device__ __forceinline__ void split_k_range(WorkTile& work) {
  const uint32_t middle = ceil_div(work.k_end, 2u);
  (cluster_rank() == 0 ? work.k_end : work.k_begin) = middle;
}

// Split-K: sends the accumulators of a warpgroup's rows to the CTA that finishes them, through distributed shared memory.
template <class Config>
__device__ __forceinline__ void send_partials(const Pipeline<Config>& pipe, const typename Config::Acc& acc) {
  const uint32_t warp = threadIdx.x / 32 - kWarpgroupWarps, to = pipe.store_buffers(warp) + lane() * sizeof(float4);
#pragma unroll
  for (int n = 0; n < Config::kMmaN; n++) {
    const float* v = &acc[0][4 * n];
    const float4 four = make_float4(v[0], v[1], v[2], v[3]);
    store_remote_async(to + n * (32 * sizeof(float4)), four, pipe.partials_ready(warp), cluster_rank() ^ 1);
  }
}

// Split-K: adds the accumulators that the peer CTA has sent.
template <class Config>
__device__ __forceinline__ void reduce_partials(const Pipeline<Config>& pipe, typename Config::Acc& acc) {
  const uint32_t warp = threadIdx.x / 32 - kWarpgroupWarps, from = pipe.store_buffers(warp) + lane() * sizeof(float4);
  mbarrier_wait(pipe.partials_ready(warp), 0);
#pragma unroll
  for (int n = 0; n < Config::kMmaN; n++) add_vector(&acc[0][4 * n], load_shared(from + n * (32 * sizeof(float4))));
}

// Split-K: a warpgroup whose rows the peer finishes does not use the LoRA branch, but has to release the branch's stages.
template <class Config>
__device__ __forceinline__ void skip_lora(const KlGemmStream& s, Pipeline<Config>& pipe, uint32_t group) {
  for (uint32_t col = 0; col < s.down_out.cols; col += Config::kLoraCols, pipe.advance()) {
    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
    // A warp that misses this phase until the stage is filled twice more would take the second fill for it, and wait forever.
    warpgroup_sync(kWarpgroupBarrier + group);
    pipe.release(pipe.stage);
  }
}

// Loads the residual of a tile through the pipeline, box after box.
template <class Config>
__device__ __forceinline__ void produce_residual(const typename Config::Params& p, Pipeline<Config>& pipe, const TileCoord<Config>& at,
                                                 uint32_t rank) {
  for (uint32_t box = 0; box < Config::kResidualBoxes; pipe.advance()) {
    const uint32_t full = pipe.full(pipe.stage), count = min(Config::kBoxesPerStage, Config::kResidualBoxes - box);
    mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);
    mbarrier_arrive_expect_tx(full, count * Config::kResidualBoxBytes);
    for (uint32_t i = 0; i < count; i++, box++) {
      const uint32_t group = Config::kSplitK ? rank : box % Config::kResidualBoxesM;
      const uint32_t col = at.col_tile * Config::kBlockN + box / Config::kResidualBoxesM * Config::kResidualCols;
      const typename Config::Store::template Origin<Config> origin(p, at, group * (Config::kMmaM * kWgmmaRows));
      origin.load(pipe.a(pipe.stage) + i * Config::kResidualBoxBytes, &p.residual[at.stream], col, full);
    }
  }
}

// Loads a tile's LoRA operands through the pipeline, a block of their columns at a time.
template <class Config>
__device__ __forceinline__ void produce_lora(const typename Config::Params& p, Pipeline<Config>& pipe, const TileCoord<Config>& at,
                                                 uint32_t rank) {
  const uint32_t cols = p.stream[at.stream].down_out.cols;
  RowsA::Loader<Config> a(p, at, rank);
  CopiedB::Loader<Config> b(p, at, rank);
  a.map = &p.down_out[at.stream];
  b.first.point_at_up(p, at, CopiedB::Loader<Config>::kMulticast ? rank : 0), b.second.point_at_up(p, at, 1);
  for (uint32_t col = 0; col < cols; col += Config::kLoraCols, pipe.advance()) {
    const uint32_t full = pipe.full(pipe.stage);
    mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);
    mbarrier_arrive_expect_tx(full, Config::kABytes + Config::kBBytes);
    a.load_from(col, pipe.a(pipe.stage), full);
    b.load_from(col, pipe.b(pipe.stage), full);
  }
}

// Whether this CTA finishes a tile. If so, the operands of the epilogue follow the k-blocks through the pipeline.
template <class Config>
__device__ __forceinline__ bool is_finished(const KlGemmTma& p, const WorkTile& work) {
  return Config::kSplitK || !work.is_unfinished(p.schedule);
}

// Loads the window of A that a k-block multiplies, for this CTA alone.
template <class Config, class LoaderA, class Cursor>
__device__ __forceinline__ void produce_window(Pipeline<Config>& pipe, const LoaderA& a, const Cursor& k) {
  const uint32_t full = pipe.window_ring().full(pipe.windows.stage);
  mbarrier_wait(pipe.window_ring().empty(pipe.windows.stage), pipe.windows.parity ^ 1);
  mbarrier_arrive_expect_tx(full, LoaderA::kWindowTmaBytes);
  a.load(k, pipe.window(pipe.windows.stage), full);
  pipe.windows.advance();
}

// The producer: one thread that issues all TMA loads of a CTA.
template <class Config>
__device__ __forceinline__ void produce(const typename Config::Params& p, Pipeline<Config> pipe) {
  using LoaderA = typename Config::OperandA::template Loader<Config>;
  using LoaderB = typename Config::OperandB::template Loader<Config>;
  using Cursor = typename Config::OperandA::Cursor;
  const uint32_t rank = Config::kCluster > 1 ? cluster_rank() : 0;
  uint32_t ahead = 0;
  bool waited = false;
  TileScheduler<Config::kCluster> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work);) {
    if constexpr (Config::kSplitK) split_k_range(work);
    const TileCoord<Config> at(p, work.tile);
    const LoaderA a(p, at, rank);
    const LoaderB b(p, at, rank);
    const auto load_b = [&](const Cursor& k) {
      const uint32_t full = pipe.full(pipe.stage);
      mbarrier_arrive_expect_tx(full, LoaderA::kTmaBytes + LoaderB::kTmaBytes);
      b.load(k, pipe.b(pipe.stage), full);
    };
    if (!waited) {
      // The first loads of B are issued while the previous kernel ends. More of them would delay A.
      if constexpr (Config::OperandB::kPreloads) {
        constexpr uint32_t kAhead = 2;
        const Pipeline<Config> start = pipe;
        for (Cursor k(p, work.k_begin); k < work.k_end && ahead < kAhead; k.advance(), ahead++, pipe.advance()) load_b(k);
        pipe = start;
      }
      wait_for_previous_kernel();
      waited = true;
    }
    for (Cursor k(p, work.k_begin); k < work.k_end; k.advance(), pipe.advance()) {
      if constexpr (Config::kWindows > 0) {
        if (k == work.k_begin || k.begins_window()) produce_window(pipe, a, k);
      }
      if (ahead) {
        ahead--;
      } else {
        b.wait(k, k == work.k_begin);
        mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);
        load_b(k);
      }
      if constexpr (Config::kWindows == 0) a.load(k, pipe.a(pipe.stage), pipe.full(pipe.stage));
    }
    if (!is_finished<Config>(p, work)) continue;
    if constexpr (Config::kLora) {
      if (p.stream[at.stream].down_out.data) produce_lora(p, pipe, at, rank);
    }
    if (p.stream[at.stream].part[at.part].epilogue == KL_GATE_RESIDUAL) produce_residual(p, pipe, at, rank);
  }
}

// Prefetches the tensor map and the gate that a tile's epilogue reads.
template <class Config>
__device__ __forceinline__ void prefetch_epilogue_operands(const KlGemmTma& p, const TileCoord<Config>& at) {
  const KlOutputRange& part = p.stream[at.stream].part[at.part];
  if (threadIdx.x % kWarpgroupThreads == 0) prefetch_tensor_map(&p.out[at.stream][at.part]);
  constexpr uint32_t kLineCols = 64;  // of bf16 in a cache line
  const uint32_t col = at.col_tile * Config::kBlockN + lane() * kLineCols;
  if (part.epilogue == KL_GATE_RESIDUAL && part.extra.data && lane() * kLineCols < Config::kBlockN && col < part.out.cols) {
    prefetch_l1(row_of<const bf16>(part.extra, 0) + col);
  }
}

// The named barrier at which one of two consumer warpgroups waits for the other. Its id follows the warpgroups' own barriers.
template <class Config>
constexpr uint32_t kHandOverBarrier = kWarpgroupBarrier + Config::kConsumers;

// Accumulates the k-blocks of a tile. With split-K, `finishes` says whether the warpgroup's rows are finished in this CTA.
template <class Config>
__device__ __forceinline__ void accumulate(Pipeline<Config>& pipe, typename Config::Acc& acc, const WorkTile& work, uint32_t group,
                                           bool finishes) {
  // With split-K, the warpgroup whose accumulators the peer needs gets the tensor cores to itself for the last k-blocks that the pipeline
  // holds: its partials travel while the other warpgroup finishes.
  constexpr uint32_t kLeadKBlocks = Config::kStages - 1;
  const bool leads = Config::kSplitK && work.k_end - work.k_begin >= kLeadKBlocks;
  for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
    if (leads && finishes && k + kLeadKBlocks == work.k_end) named_barrier_sync(kHandOverBarrier<Config>);
    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
    const uint32_t a = pipe.a(pipe.stage) + group * (Config::kMmaM * kWgmmaTileBytes);
    mma_k_block<Config>(acc, a, pipe.b(pipe.stage), k > work.k_begin);
    // The MMAs of the previous k-block are done: its stage is free.
    wgmma_wait<1>();
    if (leads && !finishes && k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier<Config>);
    if (k > work.k_begin) pipe.release(pipe.previous());
  }
  wgmma_wait<0>();
  pipe.release(pipe.previous());
}

// Accumulates the k-blocks of a tile if several of them multiply the same window of A, each its own rows of the window.
template <class Config>
__device__ __forceinline__ void accumulate_windows(const typename Config::Params& p, const TileCoord<Config>& at, Pipeline<Config>& pipe,
                                                   typename Config::Acc& acc, const WorkTile& work, uint32_t group) {
  typename Config::OperandA::template Reader<Config> reader(p, at, work.k_begin);
  const auto release_window = [&] { release_stage<1>(pipe.window_ring().empty(pipe.windows.previous())); };
  bool waits = true, leaves = false;
  for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
    if (waits) mbarrier_wait(pipe.window_ring().full(pipe.windows.stage), pipe.windows.parity);
    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
    const uint32_t a = pipe.window(pipe.windows.stage) + reader.offset() + group * (Config::kMmaM * Config::OperandA::kTileBytes);
    if (reader.is_half()) {
      mma_k_block<Config, Config::kMmaK / 2>(acc, a, pipe.b(pipe.stage), k > work.k_begin);
    } else {
      mma_k_block<Config>(acc, a, pipe.b(pipe.stage), k > work.k_begin);
    }
    // The MMAs of the previous k-block are done: its stage is free. If it was the last to read its window, the window is free, too.
    wgmma_wait<1>();
    if (k > work.k_begin) pipe.release(pipe.previous());
    if (leaves) release_window();
    reader.advance();
    leaves = waits = reader.begins_window() || k + 1 == work.k_end;
    if (leaves) pipe.windows.advance();
  }
  wgmma_wait<0>();
  release_window();
  pipe.release(pipe.previous());
}

// Accumulates with promotion: the wgmma tiles of a warpgroup take turns with one set of partial accumulators, which covers a single k-block
// and is then added to the accumulators of the tile. Registers have no room for a second set, so a warpgroup does not multiply while it
// adds. The other warpgroup does, if it is half a k-block apart. Tensor cores serve both alike: warpgroups that start together also add
// together, and then nobody multiplies. So the second one starts when the first has finished its first MMAs, and the distance stays. A
// range of fewer k-blocks than the pipeline holds skips this: the first one could arrive once more before the second has waited.
template <class Config>
__device__ __forceinline__ void accumulate_promoted(Pipeline<Config>& pipe, typename Config::Acc& acc, const WorkTile& work,
                                                    uint32_t group) {
  static_assert(Config::kConsumers == 2, "the hand-over is for two warpgroups");
#pragma unroll
  for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
    for (int e = 0; e < Config::kBlockN / 2; e++) acc[m][e] = 0.0f;
  }
  const bool apart = work.k_end - work.k_begin >= Config::kStages;
  if (apart && group == 1) named_barrier_sync(kHandOverBarrier<Config>);
  for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
    const uint32_t a = pipe.a(pipe.stage) + group * (Config::kMmaM * kWgmmaTileBytes);
#pragma unroll
    for (int m = 0; m < Config::kMmaM; m++) {
      float partial[1][Config::kBlockN / 2];
      mma_k_block<Config>(partial, a + m * kWgmmaTileBytes, pipe.b(pipe.stage), false);
      wgmma_wait<0>();
      if (apart && m == 0 && group == 0 && k == work.k_begin) named_barrier_arrive(kHandOverBarrier<Config>);
      if (m == Config::kMmaM - 1) pipe.release(pipe.stage);
#pragma unroll
      for (int e = 0; e < Config::kBlockN / 2; e++) acc[m][e] += partial[0][e];
    }
  }
}

// Accumulates with promotion after several k-blocks. They are multiplied without promotion, and their sum is added to the accumulators of
// the tile.
template <class Config>
__device__ __forceinline__ void accumulate_in_parts(Pipeline<Config>& pipe, typename Config::Acc& acc, const WorkTile& work,
                                                    uint32_t group) {
  constexpr uint32_t kInterval = Config::Mma::kPromotionInterval;
#pragma unroll
  for (int e = 0; e < Config::kBlockN / 2; e++) acc[0][e] = 0.0f;
  for (uint32_t k = work.k_begin; k < work.k_end; k += kInterval) {
    typename Config::Acc partial;
    accumulate(pipe, partial, {work.tile, k, min(k + kInterval, work.k_end)}, group, false);
#pragma unroll
    for (int e = 0; e < Config::kBlockN / 2; e++) acc[0][e] += partial[0][e];
  }
}

// Accumulates with MMAs of single warps. Each warp loads fragments of its rows and of all columns: 64 bytes of K a k-block, in steps of 32.
template <class Config>
__device__ __forceinline__ void accumulate_per_warp(const typename Config::Params& p, const TileCoord<Config>& at, Pipeline<Config>& pipe,
                                                    typename Config::Acc& acc, const WorkTile& work, uint32_t group) {
  using Mma = typename Config::Mma;
  using Fragments = WarpFragments<Config>;
  const uint32_t row = group * (Config::kMmaM * kWgmmaRows) + threadIdx.x / 32 % kWarpgroupWarps * kWarpRows;
  const Fragments fragments(row, lane());
  const typename Mma::template Scales<Config> scales(p, at, row);
#pragma unroll
  for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
    for (int e = 0; e < Config::kBlockN / 2; e++) acc[m][e] = 0.0f;
  }
  for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
    const uint32_t stage = pipe.a(pipe.stage);
#pragma unroll
    for (uint32_t step = 0; step < Fragments::kSteps; step++) {
      uint32_t a[Config::kMmaM][4], b[Config::kBlockN / 16][4];
      const auto of_blocks = scales.load(stage, step);
      fragments.load_a(stage, step, a);
#pragma unroll
      for (int n = 0; n < Config::kBlockN / 16; n++) fragments.load_b(stage, step, n, b[n]);
      Mma::template multiply<Config>(acc, a, b, of_blocks);
    }
    pipe.release(pipe.stage);
  }
}

// The consumers: main loop, Stream-K fix-up or split-K reduction, epilogue.
template <class Config>
__device__ __forceinline__ void consume(const typename Config::Params& p, Pipeline<Config> pipe) {
  const uint32_t group = threadIdx.x / kWarpgroupThreads - 1;
  TileScheduler<Config::kCluster> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work);) {
    if constexpr (Config::kSplitK) split_k_range(work);
    // Hidden from the compiler, which would otherwise hoist everything derived from it out of the loop and keep it in registers.
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    typename Config::Acc acc;
    // Computed before there are accumulators: the divisions need registers that are scarce afterwards.
    const TileCoord<Config> at(p, work.tile);
    prefetch_epilogue_operands<Config>(p, at);
    const bool finishes = Config::kSplitK && group == cluster_rank();
    if constexpr (Config::Mma::kPerWarp) {
      accumulate_per_warp(p, at, pipe, acc, work, group);
    } else if constexpr (Config::kWindows > 0) {
      accumulate_windows(p, at, pipe, acc, work, group);
    } else if constexpr (Config::Mma::kPromotionInterval > 1) {
      accumulate_in_parts(pipe, acc, work, group);
    } else if constexpr (Config::kPromoted) {
      accumulate_promoted(pipe, acc, work, group);
    } else {
      accumulate(pipe, acc, work, group, finishes);
    }
    const auto finish = [&] {
      TileCoord<Config> tile = at;
      // If accumulators take most registers, addresses that belong to the tile are computed anew instead of being kept since its
      // prefetches.
      if constexpr (Config::kMmaM > 1 && !Config::Mma::kPerWarp) asm volatile("" : "+r"(tile.stream), "+r"(tile.part));
      typename Config::template Epilogue<Config>(p, tile, acc, pipe, thread).run(pipe);
    };
    if constexpr (Config::kSplitK) {
      cluster_wait();  // the peer has initialized its mbarriers, long ago
      if (finishes) {
        reduce_partials(pipe, acc);
        finish();
      } else {
        send_partials(pipe, acc);
        if constexpr (Config::kLora) skip_lora(p.stream[at.stream], pipe, group);
      }
    } else {
      finish_or_store(
          p.schedule, work, scheduler.worker(), [&] { TilePartials<Config>(p.schedule, scheduler.worker()).store_acc(acc); },
          [&](uint32_t peer) { TilePartials<Config>(p.schedule, peer).add_to(acc); }, finish);
    }
  }
  if (lane() == 0) tma_store_wait<0>();
}

template <class Config>
__device__ __forceinline__ void gemm(const typename Config::Params& p) {
  KL_DYNAMIC_SHARED(kSwizzleAlignment);
  const Pipeline<Config> pipe{{align_to_swizzle(shared_address(dynamic_shared))}, {}};
  const auto init = [&] {
    prefetch_tensor_map(&p.w[0][0]), prefetch_tensor_map(Config::OperandA::first_map(p));
    pipe.ring().init(1, Config::Mma::kPerWarp ? kArrivalsPerWarp * Config::kWarps : Config::kConsumers * Config::kMulticast);
    pipe.window_ring().init(1, Config::kConsumers);
    if constexpr (Config::kSplitK) {
      for (uint32_t warp = 0; warp < kWarpgroupWarps; warp++) {
        mbarrier_init(pipe.partials_ready(warp), 1);
        mbarrier_arrive_expect_tx(pipe.partials_ready(warp), Config::kPartialBytes);
      }
    }
  };
  const auto run_producer = [&] {
    if (threadIdx.x == 0) produce(p, pipe);
    if constexpr (Config::OperandB::kExpands) {
      const typename Config::OperandB::template Expander<Config> expander{p};
      if (threadIdx.x >= 32) expander.run();
      expander.finish();
    }
    __syncwarp();
    if constexpr (Config::kSplitK) cluster_wait();
  };
  // With split-K the CTAs do not touch each other's shared memory before the end, where they wait for each other's partials.
  run_warp_specialized<typename Config::Registers, Config::kCluster, Config::kMulticast>(init, run_producer, [&] { consume(p, pipe); });
}
}  // namespace kl::gemm
