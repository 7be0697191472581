// GEMM on Hopper: what kl_gemm_mma computes (see gemm_mma.cu for the epilogues), with TMA, wgmma and thread-block clusters.
//
//   kl_gemm_bf16_sm90_256x192, ...   out = epilogue(x w^T + bias), bf16, f32 accumulators; named by the tile, rows x columns
//
// Bound: tensor cores and, for large GEMMs, the power they draw: at 700 W the clock falls until energy, not cycles, decides how long a
// GEMM takes. Most of what can be saved is bytes moved to the SMs, hence tiles as large as the registers hold and multicast operands.
// Needs: what kl_gemm_mma needs; bf16 outputs at 16-byte aligned addresses with strides that are multiples of 8; for qk-norm tiles of 128
// or 256 columns, which are whole heads; the same K for all streams.
//
// Persistent and warp-specialised: one CTA per SM stays for the whole GEMM. One thread of the producer warpgroup loads both operands by
// TMA, 64 of K per stage, into a pipeline of shared-memory stages with full and empty mbarriers. Two or three consumer warpgroups run
// wgmma on 64 or 128 rows each, and each warp stores its own sixteen rows by TMA, while the producer already fills the pipeline for the
// next tile. The residual of the gate_residual epilogue comes through the pipeline as well.
//
// Two CTAs are a cluster (ClusterMode). Either they have the same rows of x or the same rows of w, of which each CTA loads one half and
// multicasts it to both. Or, for GEMMs with few tiles, the cluster has one tile and splits its K (split-K): each CTA accumulates half of
// the k-blocks and then finishes one warpgroup's rows, with the peer's partials of them received through distributed shared memory.
//
// Without split-K, tiles are scheduled by Stream-K as in gemm_mma.cu, with clusters as workers (tile_scheduler_sm90.cuh).
//
// SwiGLU has gate columns in the left half of a tile and up columns in the right half, so that a thread holds both in registers; it also
// holds both members of a RoPE pair, whether they are adjacent or 64 apart.
#include <gemm/config_sm90.cuh>
#include <gemm/epilogue_sm90.cuh>
#include <gemm/scheduler_sm90.cuh>

// The Stream-K partials of a warp: all accumulators of a lane.
template <class Config>
using TilePartials = PartialTile<KL_SM90_CLUSTER, Config::kWarps, Config::kMmaM * Config::kMmaN>;

template <class Config>
__device__ __forceinline__ void store_partials(const TilePartials<Config>& partials,
                                               const float (&from)[Config::kMmaM][Config::kBlockN / 2]) {
#pragma unroll
  for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
    for (int n = 0; n < Config::kMmaN; n++) {
      const float* v = &from[m][4 * n];
      partials.store(m * Config::kMmaN + n, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  partials.publish();
}

template <class Config>
__device__ __forceinline__ void add_partials(const TilePartials<Config>& partials, float (&to)[Config::kMmaM][Config::kBlockN / 2]) {
  partials.wait();
  // As many loads in flight as there are registers for.
  constexpr int kCount = Config::kMmaM * Config::kMmaN, kFreeRegisters = (Config::kConsumerRegisters - 4 * kCount - 40) / 4;
  constexpr int kBatch = kFreeRegisters < 1 ? 1 : kFreeRegisters < kCount ? kFreeRegisters : kCount;
  float* acc = to[0];
#pragma unroll
  for (int i = 0; i < kCount; i += kBatch) {
    float4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch && i + j < kCount; j++) v[j] = partials.load(i + j);
#pragma unroll
    for (int j = 0; j < kBatch && i + j < kCount; j++, acc += 4) acc[0] += v[j].x, acc[1] += v[j].y, acc[2] += v[j].z, acc[3] += v[j].w;
  }
}

// Restricts a tile to this CTA's half of its k-blocks.
__device__ __forceinline__ void split_k_range(WorkTile& work) {
  const uint32_t middle = ceil_div(work.k_end, 2u);
  (cluster_rank() == 0 ? work.k_end : work.k_begin) = middle;
}

// Split-K: sends the accumulators of a warpgroup's rows to the CTA that finishes them, through distributed shared memory.
template <class Config>
__device__ __forceinline__ void send_partials(const Pipeline<Config>& pipe, const float (&acc)[Config::kMmaM][Config::kBlockN / 2]) {
  const uint32_t warp = threadIdx.x / 32 - 4, to = pipe.store_buffers(warp) + lane() * sizeof(float4);
#pragma unroll
  for (int n = 0; n < Config::kMmaN; n++) {
    const float* v = &acc[0][4 * n];
    const float4 four = make_float4(v[0], v[1], v[2], v[3]);
    store_remote_async(to + n * (32 * sizeof(float4)), four, pipe.partials_ready(warp), cluster_rank() ^ 1);
  }
}

// Split-K: adds the accumulators that the peer has sent.
template <class Config>
__device__ __forceinline__ void reduce_partials(const Pipeline<Config>& pipe, float (&acc)[Config::kMmaM][Config::kBlockN / 2]) {
  const uint32_t warp = threadIdx.x / 32 - 4, from = pipe.store_buffers(warp) + lane() * sizeof(float4);
  mbarrier_wait(pipe.partials_ready(warp), 0);
#pragma unroll
  for (int n = 0; n < Config::kMmaN; n++) {
    const float4 v = load_shared(from + n * (32 * sizeof(float4)));
    float* to = &acc[0][4 * n];
    to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
  }
}

// The producer: one thread that issues all TMA loads of a CTA.
template <class Config>
__device__ __forceinline__ void produce(const KlGemmSm90& p, Pipeline<Config> pipe) {
  constexpr uint16_t kAllCtas = (1 << KL_SM90_CLUSTER) - 1;
  const uint32_t rank = cluster_rank();
  uint32_t ahead = 0;
  bool waited = false;
  TileScheduler<KL_SM90_CLUSTER> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work);) {
    if constexpr (Config::kSplitK) split_k_range(work);
    const TileCoord<Config> at(p, work.tile);
    const KlGemmPart& part = p.stream[at.stream].part[at.part];
    const KlTensorMap *x = &p.x[at.stream], *w = &p.w[at.stream];
    // B is loaded in two boxes, because gate and up rows are apart in the weight.
    const bool paired = part.epilogue == KL_SWIGLU;
    const uint32_t row = part.first_row + at.col_tile * (paired ? Config::kBlockN / 2 : Config::kBlockN);
    const uint32_t apart = paired ? part.out.cols : Config::kBlockN / 2;
    const auto load_b = [&](uint32_t k) {
      const uint32_t full = pipe.full(pipe.stage);
      mbarrier_arrive_expect_tx(full, Config::kStageBytes);
      if constexpr (Config::kMode == ClusterMode::kMulticastB) {
        const uint32_t to = pipe.b(pipe.stage) + rank * (Config::kBBytes / 2);
        tma_load_2d_multicast(to, w, k * KL_SM90_BLOCK_K, row + rank * apart, full, kAllCtas);
      } else {
        tma_load_2d(pipe.b(pipe.stage), w, k * KL_SM90_BLOCK_K, row, full);
        tma_load_2d(pipe.b(pipe.stage) + Config::kBBytes / 2, w, k * KL_SM90_BLOCK_K, row + apart, full);
      }
    };
    if (!waited) {
      // Weights do not depend on the previous kernel: the first loads of B are issued while it ends. More of them would delay A.
      constexpr uint32_t kAhead = 2;
      const Pipeline<Config> start = pipe;
      for (uint32_t k = work.k_begin; k < work.k_end && ahead < kAhead; k++, ahead++, pipe.advance()) load_b(k);
      pipe = start;
      wait_for_previous_kernel();
      waited = true;
    }
    for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
      if (ahead) {
        ahead--;
      } else {
        mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);
        load_b(k);
      }
      const uint32_t full = pipe.full(pipe.stage);
      if constexpr (Config::kMode != ClusterMode::kMulticastA) {
        tma_load_2d(pipe.a(pipe.stage), x, k * KL_SM90_BLOCK_K, at.row_tile * Config::kBlockM, full);
      } else {
        const uint32_t to = pipe.a(pipe.stage) + rank * (Config::kABytes / 2);
        const uint32_t x_row = at.row_tile * Config::kBlockM + rank * (Config::kBlockM / 2);
        tma_load_2d_multicast(to, x, k * KL_SM90_BLOCK_K, x_row, full, kAllCtas);
      }
    }
    if (part.epilogue != KL_GATE_RESIDUAL || !Config::kSplitK && work.k_end < p.schedule.k_blocks) continue;
    for (uint32_t box = 0; box < Config::kResidualBoxes; pipe.advance()) {
      const uint32_t full = pipe.full(pipe.stage), count = min(Config::kBoxesPerStage, Config::kResidualBoxes - box);
      mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);
      mbarrier_arrive_expect_tx(full, count * Config::kResidualBoxBytes);
      for (uint32_t i = 0; i < count; i++, box++) {
        const uint32_t group = Config::kSplitK ? rank : box % Config::kResidualBoxesM;
        const uint32_t col = at.col_tile * Config::kBlockN + box / Config::kResidualBoxesM * 64;
        const uint32_t row = at.row_tile * Config::kBlockM + group * (Config::kMmaM * 64);
        tma_load_2d(pipe.a(pipe.stage) + i * Config::kResidualBoxBytes, &p.residual[at.stream], col, row, full);
      }
    }
  }
}

// Prefetches what the epilogue of a tile reads.
template <class Config>
__device__ __forceinline__ void prefetch_epilogue_operands(const KlGemmSm90& p, const TileCoord<Config>& at) {
  const KlGemmPart& part = p.stream[at.stream].part[at.part];
  if (threadIdx.x % 128 == 0) prefetch_tensor_map(&p.out[at.stream][at.part]);
  const uint32_t col = at.col_tile * Config::kBlockN + lane() * 64;
  if (part.epilogue == KL_GATE_RESIDUAL && part.extra.data && lane() * 64 < Config::kBlockN && col < part.out.cols) {
    prefetch_l1(row_of<const bf16>(part.extra, 0) + col);
  }
}

// The consumers: wgmma mainloop, Stream-K fix-up or split-K reduction, epilogue.
template <class Config>
__device__ __forceinline__ void consume(const KlGemmSm90& p, Pipeline<Config> pipe) {
  const uint32_t group = threadIdx.x / 128 - 1;
  const auto release = [&](uint32_t stage) {
    if constexpr (Config::kSplitK) {
      if (threadIdx.x % 128 == 0) mbarrier_arrive(pipe.empty(stage));
    } else {
      if (threadIdx.x % 128 < KL_SM90_CLUSTER) mbarrier_arrive_remote(pipe.empty(stage), threadIdx.x % 128);
    }
  };
  TileScheduler<KL_SM90_CLUSTER> scheduler{p.schedule};
  for (WorkTile work; scheduler.next(work);) {
    if constexpr (Config::kSplitK) split_k_range(work);
    // Opaque to the compiler, which would otherwise hoist everything derived from it out of the loop and keep it in registers.
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    float acc[Config::kMmaM][Config::kBlockN / 2];
    // Computed before there are accumulators: the divisions need registers that are scarce afterwards.
    const TileCoord<Config> at(p, work.tile);
    prefetch_epilogue_operands<Config>(p, at);
    // With split-K, the warpgroup whose accumulators the peer needs gets the tensor cores to itself for the last k-blocks that the
    // pipeline holds: its partials travel while the other warpgroup finishes.
    constexpr uint32_t kLeadKBlocks = Config::kStages - 1, kHandOverBarrier = kWarpgroupBarrier + Config::kConsumers;
    const bool finishes = Config::kSplitK && group == cluster_rank();
    const bool leads = Config::kSplitK && work.k_end - work.k_begin >= kLeadKBlocks;
    for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
      if (leads && finishes && k + kLeadKBlocks == work.k_end) named_barrier_sync(kHandOverBarrier);
      mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
      const uint32_t a = pipe.a(pipe.stage) + group * (Config::kMmaM * 64 * 128);
      const uint64_t b = wgmma_descriptor(pipe.b(pipe.stage));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KL_SM90_BLOCK_K / 16; i++) {
#pragma unroll
        for (int m = 0; m < Config::kMmaM; m++) {
          wgmma<Config::kBlockN>(acc[m], wgmma_descriptor(a + m * 8192) + 2 * i, b + 2 * i, k > work.k_begin || i > 0);
        }
      }
      wgmma_commit();
      // The MMAs of the previous k-block are done: its stage is free.
      wgmma_wait<1>();
      if (leads && !finishes && k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier);
      if (k > work.k_begin) release(pipe.previous());
    }
    wgmma_wait<0>();
    release(pipe.previous());
    if constexpr (Config::kSplitK) {
      cluster_wait();  // the peer has initialised its mbarriers, long ago
      if (finishes) {
        reduce_partials(pipe, acc);
        Epilogue<Config>(p, at, acc, pipe, thread).run(pipe, release);
      } else {
        send_partials(pipe, acc);
      }
    } else if (work.k_end < p.schedule.k_blocks) {
      store_partials<Config>({p.schedule, scheduler.worker()}, acc);
    } else {
      if (work.k_begin > 0) {
        uint32_t peer = scheduler.worker();
        do {
          add_partials<Config>({p.schedule, --peer}, acc);
        } while (first_k_block(p.schedule, peer) > work.tile * p.schedule.k_blocks);
      }
      Epilogue<Config>(p, at, acc, pipe, thread).run(pipe, release);
    }
  }
  if (lane() == 0) tma_store_wait<0>();
}

template <class Config>
__device__ __forceinline__ void gemm(const KlGemmSm90& p) {
  KL_DYNAMIC_SHARED(1024);
  // The swizzle is a function of the address: stages and staging buffers are aligned to 1024 bytes.
  const Pipeline<Config> pipe{{shared_address(dynamic_shared) + 1023 & ~1023u}, {}};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.w[0]), prefetch_tensor_map(&p.x[0]);
    for (int i = 0; i < Config::kStages; i++) {
      mbarrier_init(pipe.full(i), 1);
      mbarrier_init(pipe.empty(i), Config::kConsumers * (Config::kSplitK ? 1 : KL_SM90_CLUSTER));
    }
    for (int i = 0; Config::kSplitK && i < 4; i++) mbarrier_init(pipe.partials_ready(i), 1);
    fence_mbarrier_init();
    for (int i = 0; Config::kSplitK && i < 4; i++) mbarrier_arrive_expect_tx(pipe.partials_ready(i), Config::kPartialBytes);
  }
  // With split-K the CTAs do not touch each other's shared memory before the end, where they wait for each other.
  if constexpr (Config::kSplitK) {
    cluster_arrive();
    __syncthreads();
  } else {
    cluster_sync_relaxed();
  }
  launch_next_kernel();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, pipe);
    __syncwarp();
    if constexpr (Config::kSplitK) cluster_wait();
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    wait_for_previous_kernel();
    consume(p, pipe);
  }
  // A CTA must not exit while its peer multicasts into it or arrives at its mbarriers. With split-K it has waited for the peer's
  // partials.
  if constexpr (!Config::kSplitK) cluster_sync_relaxed();
}

using Tile256x192 = GemmConfig<2, 2, 192, 3, ClusterMode::kMulticastA>;
using Tile192x192 = GemmConfig<3, 1, 192, 4, ClusterMode::kMulticastA>;
using Tile128x256 = GemmConfig<2, 1, 256, 4, ClusterMode::kMulticastB>;
using Tile128x208 = GemmConfig<2, 1, 208, 5, ClusterMode::kMulticastB>;
using Tile128x192 = GemmConfig<2, 1, 192, 4, ClusterMode::kMulticastB>;
using Tile128x160 = GemmConfig<2, 1, 160, 5, ClusterMode::kSplitK>;
#define KL_CHECK_SIZES(Config, suffix)                                                                                       \
  static_assert(Config::kSmemBytes == KL_SM90_SHARED_##suffix && Config::kThreads == KL_SM90_THREADS_##suffix,               \
                "abi.h states another size")
KL_CHECK_SIZES(Tile256x192, 256X192);
KL_CHECK_SIZES(Tile192x192, 192X192);
KL_CHECK_SIZES(Tile128x256, 128X256);
KL_CHECK_SIZES(Tile128x208, 128X208);
KL_CHECK_SIZES(Tile128x192, 128X192);
KL_CHECK_SIZES(Tile128x160, 128X160);
static_assert(sizeof(KlGemmSm90) % 128 == 0, "abi.h leaves a gap");

KL_ENTRY(kl_gemm_bf16_sm90_256x192, KlGemmSm90, KL_SM90_THREADS_256X192, 1) { gemm<Tile256x192>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_192x192, KlGemmSm90, KL_SM90_THREADS_192X192, 1) { gemm<Tile192x192>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x256, KlGemmSm90, KL_SM90_THREADS_128X256, 1) { gemm<Tile128x256>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x208, KlGemmSm90, KL_SM90_THREADS_128X208, 1) { gemm<Tile128x208>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x192, KlGemmSm90, KL_SM90_THREADS_128X192, 1) { gemm<Tile128x192>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x160, KlGemmSm90, KL_SM90_THREADS_128X160, 1) { gemm<Tile128x160>(p); }
