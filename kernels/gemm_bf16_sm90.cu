// Products on Hopper: what kl_gemm_mma does (see there for the epilogues), by the copy engine and whole warpgroups.
//
//   kl_gemm_bf16_sm90_256x192, ...   out = epilogue(x w^T + bias), bf16, f32 sums; tiles of so many rows by so many columns
//
// Bound: tensor cores, and with large products the power they draw: at 700 W the clock falls until the energy of a product, not its
// cycles, decides how long it takes. Most of what can be saved is bytes moved to the multiprocessors, hence tiles as large as the
// registers hold and operands that two blocks share.
// Needs: what kl_gemm_mma needs; bf16 results at 16-byte addresses with strides that are multiples of 8; heads of 128 in tiles of 128
// or 256 columns; one inner dimension for all streams.
//
// As many blocks as multiprocessors stay for the whole product. Of a block one thread copies: 64 of the inner dimension of both
// operands at a time, into a ring of stages. Two or three warpgroups multiply out of it, 64 or 128 rows each, and each warp stores its
// own sixteen rows by the copy engine. Meanwhile the ring fills for the next tile. A residual comes through the ring as well. Two
// blocks are a cluster: they have rows or columns in common, and each copies one half of those for both.
//
// Tiles are dealt out as kl_gemm_mma does, with clusters for blocks: see there for what workers leave for each other.
//
// Products with few tiles are cut along the inner dimension instead: a cluster has one tile, each of its blocks half of the rounds. Then
// each finishes one warpgroup's rows, and gets what the other has of them through shared memory.
//
// Swiglu has gates in the left half of a tile and ups in the right, so that a thread has both in its registers. So it has both
// elements of a pair in heads, whether they are neighbours or 64 apart.
#include "mma.cuh"
#include "pipeline_sm90.cuh"
#include "ptx_sm90.cuh"
#include "tile_scheduler_sm90.cuh"

// What the blocks of a cluster have in common: rows, columns, or the whole tile, of which each then has half of the inner dimension.
enum class ClusterMode { kMulticastA, kMulticastB, kSplitK };

// Ids of named barriers; 0 is __syncthreads. Each consumer warpgroup has one, from kWarpgroupBarrier on.
enum NamedBarrier : uint32_t { kWarpgroupBarrier = 1 };

// Columns that a warp stores at once, of a tile with so many.
__host__ __device__ constexpr int store_cols(int cols) {
  return cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16;
}

// kGroups warpgroups of 64 kM x kCols, one below the other, make a tile.
template <int kConsumers_, int kMmaM_, int kBlockN_, int kStages_, ClusterMode kMode_>
struct GemmConfig {
  static constexpr int kConsumers = kConsumers_, kWarps = 4 * kConsumers, kThreads = 128 * (1 + kConsumers), kStages = kStages_;
  static constexpr int kMmaM = kMmaM_, kMmaN = kBlockN_ / 8, kBlockM = kConsumers * kMmaM * 64, kBlockN = kBlockN_;
  static constexpr ClusterMode kMode = kMode_;
  static constexpr bool kSplitK = kMode == ClusterMode::kSplitK;
  // A cluster's tiles, down and across.
  static constexpr uint32_t kClusterM = kMode == ClusterMode::kMulticastB ? 2 : 1, kClusterN = kMode == ClusterMode::kMulticastA ? 2 : 1;
  static constexpr uint32_t kABytes = kBlockM * 128, kBBytes = kBlockN * 128, kStageBytes = kABytes + kBBytes;
  // Registers that the copying warpgroup keeps, and that others have.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // What is there already comes through the ring as well, in boxes of a warpgroup's rows and 64 columns, as many as a stage holds at
  // a time.
  static constexpr uint32_t kResidualBoxBytes = kMmaM * 64 * 128, kResidualBoxesN = (kBlockN + 63) / 64, kResidualBoxesM = kSplitK ? 1 : kConsumers;
  static constexpr uint32_t kResidualBoxes = kResidualBoxesM * kResidualBoxesN;
  static constexpr uint32_t kBoxesPerStage = kStageBytes / kResidualBoxBytes, kResidualStages = (kResidualBoxes + kBoxesPerStage - 1) / kBoxesPerStage;
  // Of halves each block finishes one warpgroup's rows, and has room for what the other block has of them: of each warp so much.
  static constexpr uint32_t kPartialBytes = kMmaN * 32 * sizeof(float4);
  // Buffers of each warp, for a piece of what it stores: as many as fit, up to four. With halves they lie where the other's sums were,
  // and there is one for every piece.
  static constexpr uint32_t kStoreBufferBytes = KL_SM90_STORE_ROWS * store_cols(kBlockN) * sizeof(bf16);
  static constexpr int kFreeBytes = 232448 - 1024 - 512 - kStages * kStageBytes;
  static constexpr int kBuffersThatFit = kSplitK ? kPartialBytes / kStoreBufferBytes : kFreeBytes / (kWarps * kStoreBufferBytes);
  static constexpr int kMaxBuffers = kSplitK ? kBlockN / store_cols(kBlockN) : 4, kStoreBuffers = kBuffersThatFit < kMaxBuffers ? kBuffersThatFit : kMaxBuffers;
  // Pieces that are stored together: what comes between writing a small one and storing it takes longer than either. Of halves all, for
  // there is nothing else to do meanwhile.
  static constexpr int kStoresOf2K = 2048 / kStoreBufferBytes, kStoresAtOnce = kSplitK || kStoresOf2K > kStoreBuffers ? kStoreBuffers : kStoresOf2K;
  static constexpr uint32_t kStoreBytes = kSplitK ? 4 * kPartialBytes : kWarps * kStoreBuffers * kStoreBufferBytes;
  static constexpr uint32_t kSmemBytes = 1024 + kStages * (kStageBytes + 16) + kStoreBytes + (kSplitK ? 32 : 0);
  static_assert(kStoreBuffers > 0 && kSmemBytes <= 232448, "more than a multiprocessor has");
};

// Where a tile lies.
template <class Config>
struct TileCoord {
  uint32_t stream, row_tile, col_tile, part = 0;  // col_tile: within the part

  __device__ __forceinline__ TileCoord(const KlGemmSm90& p, uint32_t index) {
    const uint32_t first = p.stream[0].row_tiles * p.stream[0].col_tiles;
    stream = index >= first;
    if (stream) index -= first;
    const KlGemmStream& s = p.stream[stream];
    // Some rows at a time, as many as stay in the cache while all columns pass.
    const uint32_t group = p.group[stream], group_index = index / (group * s.col_tiles), within = index - group_index * group * s.col_tiles;
    const uint32_t rows = min(group, s.row_tiles - group_index * group);
    row_tile = (group_index * group + within % rows) * Config::kClusterM, col_tile = within / rows * Config::kClusterN;
    if constexpr (!Config::kSplitK) (Config::kMode == ClusterMode::kMulticastB ? row_tile : col_tile) += cluster_rank();
    // The last cluster may have a tile too many: it lies beyond the last part, where nothing is stored.
    while (part + 1 < KL_GEMM_PARTS && s.part[part + 1].tiles && col_tile >= s.part[part].tiles) col_tile -= s.part[part++].tiles;
  }
};

// Shared memory: a ring of stages, the warps' buffers, and barriers; and where a thread stands in the ring.
template <class Config>
struct SmemLayout {
  uint32_t base;

  static constexpr uint32_t kStoreOffset = Config::kStages * Config::kStageBytes, kFullOffset = kStoreOffset + Config::kStoreBytes;
  static constexpr uint32_t kEmptyOffset = kFullOffset + 8 * Config::kStages, kReadyOffset = kEmptyOffset + 8 * Config::kStages;

  __device__ __forceinline__ uint32_t a(uint32_t i) const { return base + i * Config::kStageBytes; }
  __device__ __forceinline__ uint32_t b(uint32_t i) const { return a(i) + Config::kABytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return base + kFullOffset + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return base + kEmptyOffset + 8 * i; }
  // A warp's.
  __device__ __forceinline__ uint32_t store_buffers(uint32_t warp) const {
    return base + kStoreOffset + (Config::kSplitK ? warp % 4 * Config::kPartialBytes : warp * (Config::kStoreBuffers * Config::kStoreBufferBytes));
  }
  // With halves: until the other block's sums are in there.
  __device__ __forceinline__ uint32_t partials_ready(uint32_t warp) const { return base + kReadyOffset + 8 * (warp % 4); }
};

template <class Config>
struct Pipeline : SmemLayout<Config>, PipelineState<Config::kStages> {};

// What a warp does with its rows of a finished tile.
template <class Config>
struct Epilogue {
  const KlGemmStream& s;
  const KlGemmPart& part;
  const KlTensorMap* out;
  float (&acc)[Config::kMmaM][Config::kBlockN / 2];
  uint32_t buffers;  // the warp's own
  uint32_t thread;
  uint32_t row0, col0;

  static constexpr int kBlockN = Config::kBlockN;

  __device__ __forceinline__ Epilogue(const KlGemmSm90& p, const TileCoord<Config>& at, float (&acc)[Config::kMmaM][Config::kBlockN / 2], const Pipeline<Config>& pipe,
                                      uint32_t thread)
      : s(p.stream[at.stream]), part(s.part[at.part]), out(&p.out[at.stream][at.part]), acc(acc), buffers(pipe.store_buffers(thread / 32 - 4)),
        thread(thread) {
    const uint32_t warp = thread / 32 - 4;
    row0 = at.row_tile * Config::kBlockM + warp / 4 * (Config::kMmaM * 64) + warp % 4 * 16;
    col0 = at.col_tile * (part.epilogue == KL_SWIGLU ? kBlockN / 2 : kBlockN);
  }

  __device__ __forceinline__ uint32_t lane() const { return thread % 32; }

  // Buffer i. Its rows are kWidth columns; the copy engine exchanges chunks of sixteen bytes within them by the row (the swizzle).
  __device__ __forceinline__ uint32_t buffer(int i) const { return buffers + i % Config::kStoreBuffers * Config::kStoreBufferBytes; }

  // The chunk of the lane's row that it names to store_matrices, of chunks j and j + 1.
  template <int kWidth>
  __device__ __forceinline__ uint32_t staging_address(int i, int j) const {
    constexpr uint32_t kChunks = kWidth / 8;
    const uint32_t row = lane() % 16, chunk = (lane() / 16 ^ row * kChunks / 8) % kChunks;
    return (buffers + row * (kWidth * 2) + chunk * 16 ^ j * 16) + i % Config::kStoreBuffers * Config::kStoreBufferBytes;
  }

  // Sixteen rows of kWidth columns, of fragments from v on, to buffer i.
  template <int kWidth>
  __device__ __forceinline__ void stage_piece(int i, const float* v) {
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += 2) {
      const float* a = v + 4 * j;
      stmatrix_x4(staging_address<kWidth>(i, j), pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]), pack_bf16(a[6], a[7]));
    }
  }

  // Stores the first kWidth columns of all rows, each value of f(m, where it stands).
  template <int kWidth, class F>
  __device__ __forceinline__ void store_all(F f) {
    constexpr int kPiece = store_cols(kWidth), kAcross = kWidth / kPiece, kCount = Config::kMmaM * kAcross;
#pragma unroll
    for (int first = 0; first < kCount; first += Config::kStoresAtOnce) {
      if (lane() == 0) tma_store_wait<Config::kStoreBuffers - Config::kStoresAtOnce>();
      __syncwarp();
#pragma unroll
      for (int i = first; i < first + Config::kStoresAtOnce && i < kCount; i++) {
        float v[kPiece / 2];
#pragma unroll
        for (int e = 0; e < kPiece / 2; e++) v[e] = f(i / kAcross, i % kAcross * (kPiece / 2) + e);
        stage_piece<kPiece>(i, v);
      }
      fence_proxy_async();
      __syncwarp();
      if (lane() == 0) {
#pragma unroll
        for (int i = first; i < first + Config::kStoresAtOnce && i < kCount; i++) {
          tma_store_2d(out, buffer(i), col0 + i % kAcross * kPiece, row0 + 64 * (i / kAcross));
        }
      }
    }
  }

  __device__ __forceinline__ void store_acc() {
    store_all<kBlockN>([&](int m, int e) { return acc[m][e]; });
  }

  // Calls f(fragment, column of the part) for those of the thread's columns that exist; of each it has two neighbours.
  template <class F>
  __device__ __forceinline__ void for_each_column(F f) {
#pragma unroll
    for (int n = 0; n < Config::kMmaN; n++) {
      const uint32_t col = col0 + 8 * n + lane() % 4 * 2;
      if (col >= part.out.cols) continue;
      f(n, col);
    }
  }

  __device__ __forceinline__ void add_bias() {
    if (!s.bias.data) return;
    const float* bias = row_of<const float>(s.bias, 0) + part.first_row;
    for_each_column([&](int n, uint32_t col) {
      const float a = bias[col], b = bias[col + 1];
#pragma unroll
      for (int m = 0; m < Config::kMmaM; m++) {
        float* v = &acc[m][4 * n];
        v[0] += a, v[1] += b, v[2] += a, v[3] += b;
      }
    });
  }

  __device__ __forceinline__ void linear() {
    add_bias();
    store_acc();
  }

  __device__ __forceinline__ void apply_gate() {
    if (!part.extra.data) return;
    const bf16* gates = row_of<const bf16>(part.extra, 0);
    for_each_column([&](int n, uint32_t col) {
      const float2 g = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(gates + col));
#pragma unroll
      for (int m = 0; m < Config::kMmaM; m++) {
        float* v = &acc[m][4 * n];
        v[0] *= g.x, v[1] *= g.y, v[2] *= g.x, v[3] *= g.y;
      }
    });
  }

  // Adds what is there: the boxes of the warpgroup's rows, as they come through the ring.
  template <class Release>
  __device__ __forceinline__ void add_residual(Pipeline<Config>& pipe, Release release) {
    const uint32_t group = thread / 128 - 1, row = thread / 32 % 4 * 16 + lane() % 16, chunk = (lane() / 16 ^ row) % 8;
#pragma unroll
    for (uint32_t stage = 0; stage < Config::kResidualStages; stage++, pipe.advance()) {
      mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
#pragma unroll
      for (uint32_t across = 0; across < Config::kResidualBoxesN; across++) {
        // Boxes lie one after the other, those of all warpgroups for the same columns together.
        const uint32_t box = across * Config::kResidualBoxesM + (Config::kSplitK ? 0 : group);
        if (box / Config::kBoxesPerStage != stage) continue;
        const uint32_t from = pipe.a(pipe.stage) + box % Config::kBoxesPerStage * Config::kResidualBoxBytes + row * 128 + chunk * 16;
#pragma unroll
        for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            if (across * 8 + j >= Config::kMmaN) continue;
            uint32_t old[4];
            ldmatrix_x4(old, (from + m * 8192) ^ j * 16);
            float* v = &acc[m][4 * (across * 8 + j)];
#pragma unroll
            for (int h = 0; h < 4; h++) {
              const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&old[h]));
              v[2 * h] += pair.x, v[2 * h + 1] += pair.y;
            }
          }
        }
      }
      warpgroup_sync(kWarpgroupBarrier + group);  // all its warps have read the stage
      release(pipe.stage);
    }
  }

  __device__ __forceinline__ void swiglu() {
    store_all<kBlockN / 2>([&](int m, int e) { return silu(acc[m][e]) * acc[m][kBlockN / 4 + e]; });
  }

  // A pair of elements, normalised, weighted and turned.
  static __device__ __forceinline__ void rope_rotate(float& a, float& b, float scale, float weight_a, float weight_b, float cosine, float sine) {
    const float x = a * scale * weight_a, y = b * scale * weight_b;
    a = x * cosine - y * sine, b = x * sine + y * cosine;
  }

  __device__ __forceinline__ void qk_norm_rope() {
    constexpr int kHeads = kBlockN / 128;
    const float* weight = row_of<const float>(part.extra, 0);
    const uint32_t q = lane() % 4;
#pragma unroll
    for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float scale[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
          const float* head = &acc[m][64 * h + 2 * half];
          float sum = 0.0f;
#pragma unroll
          for (int n = 0; n < 16; n++) sum += head[4 * n] * head[4 * n] + head[4 * n + 1] * head[4 * n + 1];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          scale[h] = part.scale * rsqrtf(sum * (1.0f / 128.0f) + s.eps);
        }
        // The row's angles: 64 cosines, then 64 sines. All heads turn by the same.
        const float* angles = row_of<const float>(s.table, min(row0 + 64 * m + lane() / 4 + 8 * half, s.x.rows - 1));
        if (s.rope == KL_ROPE_INTERLEAVED) {
#pragma unroll
          for (int n = 0; n < 16; n++) {
            const float2 w = *reinterpret_cast<const float2*>(weight + 8 * n + 2 * q);
            const float cosine = angles[4 * n + q], sine = angles[64 + 4 * n + q];
#pragma unroll
            for (int h = 0; h < kHeads; h++) {
              float* v = &acc[m][64 * h + 4 * n + 2 * half];
              rope_rotate(v[0], v[1], scale[h], w.x, w.y, cosine, sine);
            }
          }
        } else {
#pragma unroll
          for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const uint32_t i = 8 * n + 2 * q + e;
              const float a = weight[i], b = weight[64 + i], cosine = angles[i], sine = angles[64 + i];
#pragma unroll
              for (int h = 0; h < kHeads; h++) {
                float* v = &acc[m][64 * h + 4 * n + 2 * half + e];
                rope_rotate(v[0], v[32], scale[h], a, b, cosine, sine);
              }
            }
          }
        }
      }
    }
    store_acc();
  }

  template <class Release>
  __device__ __forceinline__ void run(Pipeline<Config>& pipe, Release release) {
    if (lane() == 0) tma_store_wait<0>();  // of the tile before
    if (part.epilogue == KL_GATE_RESIDUAL) {
      add_bias();
      apply_gate();
      add_residual(pipe, release);
      store_acc();
    } else if (part.epilogue == KL_SWIGLU) {
      if constexpr (kBlockN / 2 % 16 == 0) swiglu();
    } else if (part.epilogue == KL_QK_NORM_ROPE) {
      if constexpr (kBlockN % 128 == 0) qk_norm_rope();
    } else {
      linear();
    }
  }
};

template <class Config>
using TilePartials = PartialTile<KL_SM90_CLUSTER, Config::kWarps, Config::kMmaM * Config::kMmaN>;

template <class Config>
__device__ __forceinline__ void store_partials(const TilePartials<Config>& partials, const float (&from)[Config::kMmaM][Config::kBlockN / 2]) {
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
  // As many on their way at once as there are registers for.
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

// A block's half of a tile's rounds. Such a cluster has one tile.
__device__ __forceinline__ void split_k_range(WorkTile& work) {
  const uint32_t middle = ceil_div(work.k_end, 2u);
  (cluster_rank() == 0 ? work.k_end : work.k_begin) = middle;
}

// Hands the sums of a warpgroup's rows to the block that finishes them.
template <class Config>
__device__ __forceinline__ void send_partials(const Pipeline<Config>& pipe, const float (&acc)[Config::kMmaM][Config::kBlockN / 2]) {
  const uint32_t warp = threadIdx.x / 32 - 4, to = pipe.store_buffers(warp) + lane() * sizeof(float4);
#pragma unroll
  for (int n = 0; n < Config::kMmaN; n++) {
    const float* v = &acc[0][4 * n];
    store_remote_async(to + n * (32 * sizeof(float4)), make_float4(v[0], v[1], v[2], v[3]), pipe.partials_ready(warp), cluster_rank() ^ 1);
  }
}

// Adds what the other block has.
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

// The one thread that copies.
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
    // Weight rows come in two halves: gates and ups lie apart.
    const bool paired = part.epilogue == KL_SWIGLU;
    const uint32_t row = part.first_row + at.col_tile * (paired ? Config::kBlockN / 2 : Config::kBlockN), apart = paired ? part.out.cols : Config::kBlockN / 2;
    const auto load_b = [&](uint32_t k) {
      const uint32_t full = pipe.full(pipe.stage);
      mbarrier_arrive_expect_tx(full, Config::kStageBytes);
      if constexpr (Config::kMode == ClusterMode::kMulticastB) {
        tma_load_2d_multicast(pipe.b(pipe.stage) + rank * (Config::kBBytes / 2), w, k * KL_SM90_BLOCK_K, row + rank * apart, full, kAllCtas);
      } else {
        tma_load_2d(pipe.b(pipe.stage), w, k * KL_SM90_BLOCK_K, row, full);
        tma_load_2d(pipe.b(pipe.stage) + Config::kBBytes / 2, w, k * KL_SM90_BLOCK_K, row + apart, full);
      }
    };
    if (!waited) {
      // Weights depend on no kernel before: the first are on their way while it ends. More of them would keep activations waiting.
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
        tma_load_2d_multicast(pipe.a(pipe.stage) + rank * (Config::kABytes / 2), x, k * KL_SM90_BLOCK_K, at.row_tile * Config::kBlockM + rank * (Config::kBlockM / 2), full, kAllCtas);
      }
    }
    if (part.epilogue != KL_GATE_RESIDUAL || !Config::kSplitK && work.k_end < p.schedule.k_blocks) continue;
    for (uint32_t box = 0; box < Config::kResidualBoxes; pipe.advance()) {
      const uint32_t full = pipe.full(pipe.stage), count = min(Config::kBoxesPerStage, Config::kResidualBoxes - box);
      mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);
      mbarrier_arrive_expect_tx(full, count * Config::kResidualBoxBytes);
      for (uint32_t i = 0; i < count; i++, box++) {
        const uint32_t group = Config::kSplitK ? rank : box % Config::kResidualBoxesM;
        const uint32_t col = at.col_tile * Config::kBlockN + box / Config::kResidualBoxesM * 64, row = at.row_tile * Config::kBlockM + group * (Config::kMmaM * 64);
        tma_load_2d(pipe.a(pipe.stage) + i * Config::kResidualBoxBytes, &p.residual[at.stream], col, row, full);
      }
    }
  }
}

// Asks for what the end of a tile needs, so that it is there when the tile is summed.
template <class Config>
__device__ __forceinline__ void prefetch_epilogue_operands(const KlGemmSm90& p, const TileCoord<Config>& at) {
  const KlGemmPart& part = p.stream[at.stream].part[at.part];
  if (threadIdx.x % 128 == 0) prefetch_tensor_map(&p.out[at.stream][at.part]);
  const uint32_t col = at.col_tile * Config::kBlockN + lane() * 64;
  if (part.epilogue == KL_GATE_RESIDUAL && part.extra.data && lane() * 64 < Config::kBlockN && col < part.out.cols) {
    prefetch_l1(row_of<const bf16>(part.extra, 0) + col);
  }
}

// The other warpgroups.
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
    // Hidden from the compiler, which would find out everything that follows from it once, for all tiles, and keep it.
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    float acc[Config::kMmaM][Config::kBlockN / 2];
    // Found before there are sums: divisions take registers that are scarce afterwards.
    const TileCoord<Config> at(p, work.tile);
    prefetch_epilogue_operands<Config>(p, at);
    // Of halves, the warpgroup whose sums the other block needs has the tensor cores to itself for the last rounds that the ring holds:
    // its sums travel while the other one ends.
    constexpr uint32_t kLeadKBlocks = Config::kStages - 1, kHandOverBarrier = kWarpgroupBarrier + Config::kConsumers;
    const bool finishes = Config::kSplitK && group == cluster_rank(), leads = Config::kSplitK && work.k_end - work.k_begin >= kLeadKBlocks;
    for (uint32_t k = work.k_begin; k < work.k_end; k++, pipe.advance()) {
      if (leads && finishes && k + kLeadKBlocks == work.k_end) named_barrier_sync(kHandOverBarrier);
      mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
      const uint32_t a = pipe.a(pipe.stage) + group * (Config::kMmaM * 64 * 128);
      const uint64_t b = wgmma_descriptor(pipe.b(pipe.stage));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KL_SM90_BLOCK_K / 16; i++) {
#pragma unroll
        for (int m = 0; m < Config::kMmaM; m++) wgmma<Config::kBlockN>(acc[m], wgmma_descriptor(a + m * 8192) + 2 * i, b + 2 * i, k > work.k_begin || i > 0);
      }
      wgmma_commit();
      // The products of the round before are done: its stage is free.
      wgmma_wait<1>();
      if (leads && !finishes && k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier);
      if (k > work.k_begin) release(pipe.previous());
    }
    wgmma_wait<0>();
    release(pipe.previous());
    if constexpr (Config::kSplitK) {
      cluster_wait();  // the other block is there; it has been for long
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
  extern __shared__ __align__(1024) unsigned char dynamic[];
  // The swizzle goes by addresses: stages and buffers begin at multiples of 1024.
  const Pipeline<Config> pipe{{shared_address(dynamic) + 1023 & ~1023u}, {}};
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
  // Halves need each other at the end only, and copy nothing into each other before.
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
  // Nobody leaves while the other copies into it or arrives at its barriers. Of halves, who finishes waits for all there is to come.
  if constexpr (!Config::kSplitK) cluster_sync_relaxed();
}

using Tile256x192 = GemmConfig<2, 2, 192, 3, ClusterMode::kMulticastA>;
using Tile192x192 = GemmConfig<3, 1, 192, 4, ClusterMode::kMulticastA>;
using Tile128x256 = GemmConfig<2, 1, 256, 4, ClusterMode::kMulticastB>;
using Tile128x208 = GemmConfig<2, 1, 208, 5, ClusterMode::kMulticastB>;
using Tile128x192 = GemmConfig<2, 1, 192, 4, ClusterMode::kMulticastB>;
using Tile128x160 = GemmConfig<2, 1, 160, 5, ClusterMode::kSplitK>;
#define KL_CHECK_SIZES(Config, suffix)                                                                                                     \
  static_assert(Config::kSmemBytes == KL_SM90_SHARED_##suffix && Config::kThreads == KL_SM90_THREADS_##suffix, "abi.h states another size")
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
