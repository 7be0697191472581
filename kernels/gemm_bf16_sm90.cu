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
#include "ptx_sm90.cuh"
#include "work_sm90.cuh"

// What the blocks of a cluster have in common: rows, columns, or the whole tile, of which each then has half of the inner dimension.
enum class Common { kRows, kCols, kTile };

// Columns that a warp stores at once, of a tile with so many.
__host__ __device__ constexpr int store_cols(int cols) {
  return cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16;
}

// kGroups warpgroups of 64 kM x kCols, one below the other, make a tile.
template <int kGroups_, int kM_, int kCols_, int kStages_, Common kCommon_>
struct Shape {
  static constexpr int kGroups = kGroups_, kWarps = 4 * kGroups, kThreads = 128 * (1 + kGroups), kStages = kStages_;
  static constexpr int kM = kM_, kN = kCols_ / 8, kRows = kGroups * kM * 64, kCols = kCols_;
  static constexpr Common kCommon = kCommon_;
  static constexpr bool kHalves = kCommon == Common::kTile;
  // A cluster's tiles, down and across.
  static constexpr uint32_t kDown = kCommon == Common::kCols ? 2 : 1, kAcross = kCommon == Common::kRows ? 2 : 1;
  static constexpr uint32_t kLeftBytes = kRows * 128, kRightBytes = kCols * 128, kStageBytes = kLeftBytes + kRightBytes;
  // Registers that the copying warpgroup keeps, and that others have.
  static constexpr int kFewRegisters = kGroups == 3 ? 32 : 40, kManyRegisters = kGroups == 3 ? 160 : 232;
  // What is there already comes through the ring as well, in boxes of a warpgroup's rows and 64 columns, as many as a stage holds at
  // a time.
  static constexpr uint32_t kBoxBytes = kM * 64 * 128, kBoxesAcross = (kCols + 63) / 64, kBoxesDown = kHalves ? 1 : kGroups;
  static constexpr uint32_t kBoxes = kBoxesDown * kBoxesAcross;
  static constexpr uint32_t kBoxesOfStage = kStageBytes / kBoxBytes, kResidualStages = (kBoxes + kBoxesOfStage - 1) / kBoxesOfStage;
  // Of halves each block finishes one warpgroup's rows, and has room for what the other block has of them: of each warp so much.
  static constexpr uint32_t kOtherBytes = kN * 32 * sizeof(float4);
  // Buffers of each warp, for a piece of what it stores: as many as fit, up to four. With halves they lie where the other's sums were,
  // and there is one for every piece.
  static constexpr uint32_t kBufferBytes = KL_SM90_STORE_ROWS * store_cols(kCols) * sizeof(bf16);
  static constexpr int kFree = 232448 - 1024 - 512 - kStages * kStageBytes;
  static constexpr int kRoom = kHalves ? kOtherBytes / kBufferBytes : kFree / (kWarps * kBufferBytes);
  static constexpr int kMost = kHalves ? kCols / store_cols(kCols) : 4, kBuffers = kRoom < kMost ? kRoom : kMost;
  // Pieces that are stored together: what comes between writing a small one and storing it takes longer than either. Of halves all, for
  // there is nothing else to do meanwhile.
  static constexpr int kSmall = 2048 / kBufferBytes, kAtOnce = kHalves || kSmall > kBuffers ? kBuffers : kSmall;
  static constexpr uint32_t kStoreBytes = kHalves ? 4 * kOtherBytes : kWarps * kBuffers * kBufferBytes;
  static constexpr uint32_t kSharedBytes = 1024 + kStages * (kStageBytes + 16) + kStoreBytes + (kHalves ? 32 : 0);
  static_assert(kBuffers > 0 && kSharedBytes <= 232448, "more than a multiprocessor has");
};

// Where a tile lies.
template <class S>
struct Place {
  uint32_t stream, row_tile, col_tile, part = 0;  // col_tile: within the part

  __device__ __forceinline__ Place(const KlGemmSm90& p, uint32_t index) {
    const uint32_t first = p.stream[0].row_tiles * p.stream[0].col_tiles;
    stream = index >= first;
    if (stream) index -= first;
    const KlGemmStream& s = p.stream[stream];
    // Some rows at a time, as many as stay in the cache while all columns pass.
    const uint32_t group = p.group[stream], which = index / (group * s.col_tiles), within = index - which * group * s.col_tiles;
    const uint32_t rows = min(group, s.row_tiles - which * group);
    row_tile = (which * group + within % rows) * S::kDown, col_tile = within / rows * S::kAcross;
    if constexpr (!S::kHalves) (S::kCommon == Common::kCols ? row_tile : col_tile) += cluster_rank();
    // The last cluster may have a tile too many: it lies beyond the last part, where nothing is stored.
    while (part + 1 < KL_GEMM_PARTS && s.part[part + 1].tiles && col_tile >= s.part[part].tiles) col_tile -= s.part[part++].tiles;
  }
};

// Shared memory: a ring of stages, the warps' buffers, and barriers; and where a thread stands in the ring.
template <class S>
struct Ring {
  uint32_t base, stage = 0, parity = 0;

  static constexpr uint32_t kBuffersAt = S::kStages * S::kStageBytes, kFullAt = kBuffersAt + S::kStoreBytes;
  static constexpr uint32_t kEmptyAt = kFullAt + 8 * S::kStages, kGotAt = kEmptyAt + 8 * S::kStages;

  __device__ __forceinline__ uint32_t left() const { return base + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t right() const { return left() + S::kLeftBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return base + kFullAt + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return base + kEmptyAt + 8 * i; }
  // A warp's.
  __device__ __forceinline__ uint32_t buffers(uint32_t warp) const {
    return base + kBuffersAt + (S::kHalves ? warp % 4 * S::kOtherBytes : warp * (S::kBuffers * S::kBufferBytes));
  }
  // With halves: until the other block's sums are in there.
  __device__ __forceinline__ uint32_t got(uint32_t warp) const { return base + kGotAt + 8 * (warp % 4); }
  __device__ __forceinline__ void advance() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t before() const { return (stage == 0 ? S::kStages : stage) - 1; }
};

// What a warp does with its rows of a finished tile.
template <class S>
struct Epilogue {
  const KlGemmStream& s;
  const KlGemmPart& part;
  const KlTensorMap* out;
  float (&sums)[S::kM][S::kCols / 2];
  uint32_t buffers;  // the warp's own
  uint32_t thread;
  uint32_t row0, col0;

  static constexpr int kCols = S::kCols;

  __device__ __forceinline__ Epilogue(const KlGemmSm90& p, const Place<S>& at, float (&sums)[S::kM][S::kCols / 2], const Ring<S>& ring,
                                      uint32_t thread)
      : s(p.stream[at.stream]), part(s.part[at.part]), out(&p.out[at.stream][at.part]), sums(sums), buffers(ring.buffers(thread / 32 - 4)),
        thread(thread) {
    const uint32_t warp = thread / 32 - 4;
    row0 = at.row_tile * S::kRows + warp / 4 * (S::kM * 64) + warp % 4 * 16;
    col0 = at.col_tile * (part.epilogue == KL_SWIGLU ? kCols / 2 : kCols);
  }

  __device__ __forceinline__ uint32_t lane() const { return thread % 32; }

  // Buffer i. Its rows are kWidth columns; the copy engine exchanges chunks of sixteen bytes within them by the row (the swizzle).
  __device__ __forceinline__ uint32_t buffer(int i) const { return buffers + i % S::kBuffers * S::kBufferBytes; }

  // The chunk of the lane's row that it names to store_matrices, of chunks j and j + 1.
  template <int kWidth>
  __device__ __forceinline__ uint32_t spot(int i, int j) const {
    constexpr uint32_t kChunks = kWidth / 8;
    const uint32_t row = lane() % 16, chunk = (lane() / 16 ^ row * kChunks / 8) % kChunks;
    return (buffers + row * (kWidth * 2) + chunk * 16 ^ j * 16) + i % S::kBuffers * S::kBufferBytes;
  }

  // Sixteen rows of kWidth columns, of fragments from v on, to buffer i.
  template <int kWidth>
  __device__ __forceinline__ void put(int i, const float* v) {
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += 2) {
      const float* a = v + 4 * j;
      store_matrices(spot<kWidth>(i, j), pack(a[0], a[1]), pack(a[2], a[3]), pack(a[4], a[5]), pack(a[6], a[7]));
    }
  }

  // Stores the first kWidth columns of all rows, each value of f(m, where it stands).
  template <int kWidth, class F>
  __device__ __forceinline__ void store_all(F f) {
    constexpr int kPiece = store_cols(kWidth), kAcross = kWidth / kPiece, kCount = S::kM * kAcross;
#pragma unroll
    for (int first = 0; first < kCount; first += S::kAtOnce) {
      if (lane() == 0) tma_store_wait<S::kBuffers - S::kAtOnce>();
      __syncwarp();
#pragma unroll
      for (int i = first; i < first + S::kAtOnce && i < kCount; i++) {
        float v[kPiece / 2];
#pragma unroll
        for (int e = 0; e < kPiece / 2; e++) v[e] = f(i / kAcross, i % kAcross * (kPiece / 2) + e);
        put<kPiece>(i, v);
      }
      fence_shared_writes();
      __syncwarp();
      if (lane() == 0) {
#pragma unroll
        for (int i = first; i < first + S::kAtOnce && i < kCount; i++) {
          tma_store_2d(out, buffer(i), col0 + i % kAcross * kPiece, row0 + 64 * (i / kAcross));
        }
      }
    }
  }

  __device__ __forceinline__ void store_sums() {
    store_all<kCols>([&](int m, int e) { return sums[m][e]; });
  }

  // Calls f(fragment, column of the part) for those of the thread's columns that exist; of each it has two neighbours.
  template <class F>
  __device__ __forceinline__ void columns(F f) {
#pragma unroll
    for (int n = 0; n < S::kN; n++) {
      const uint32_t col = col0 + 8 * n + lane() % 4 * 2;
      if (col >= part.out.cols) continue;
      f(n, col);
    }
  }

  __device__ __forceinline__ void add_bias() {
    if (!s.bias.data) return;
    const float* bias = row_of<const float>(s.bias, 0) + part.first_row;
    columns([&](int n, uint32_t col) {
      const float a = bias[col], b = bias[col + 1];
#pragma unroll
      for (int m = 0; m < S::kM; m++) {
        float* v = &sums[m][4 * n];
        v[0] += a, v[1] += b, v[2] += a, v[3] += b;
      }
    });
  }

  __device__ __forceinline__ void plain() {
    add_bias();
    store_sums();
  }

  __device__ __forceinline__ void gate() {
    if (!part.extra.data) return;
    const bf16* gates = row_of<const bf16>(part.extra, 0);
    columns([&](int n, uint32_t col) {
      const float2 g = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(gates + col));
#pragma unroll
      for (int m = 0; m < S::kM; m++) {
        float* v = &sums[m][4 * n];
        v[0] *= g.x, v[1] *= g.y, v[2] *= g.x, v[3] *= g.y;
      }
    });
  }

  // Adds what is there: the boxes of the warpgroup's rows, as they come through the ring.
  template <class Release>
  __device__ __forceinline__ void add_residual(Ring<S>& ring, Release release) {
    const uint32_t group = thread / 128 - 1, row = thread / 32 % 4 * 16 + lane() % 16, chunk = (lane() / 16 ^ row) % 8;
#pragma unroll
    for (uint32_t stage = 0; stage < S::kResidualStages; stage++, ring.advance()) {
      barrier_wait(ring.full(ring.stage), ring.parity);
#pragma unroll
      for (uint32_t across = 0; across < S::kBoxesAcross; across++) {
        // Boxes lie one after the other, those of all warpgroups for the same columns together.
        const uint32_t box = across * S::kBoxesDown + (S::kHalves ? 0 : group);
        if (box / S::kBoxesOfStage != stage) continue;
        const uint32_t from = ring.left() + box % S::kBoxesOfStage * S::kBoxBytes + row * 128 + chunk * 16;
#pragma unroll
        for (int m = 0; m < S::kM; m++) {
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            if (across * 8 + j >= S::kN) continue;
            uint32_t old[4];
            load_matrices(old, (from + m * 8192) ^ j * 16);
            float* v = &sums[m][4 * (across * 8 + j)];
#pragma unroll
            for (int h = 0; h < 4; h++) {
              const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&old[h]));
              v[2 * h] += pair.x, v[2 * h + 1] += pair.y;
            }
          }
        }
      }
      warpgroup_sync(group);  // all its warps have read the stage
      release(ring.stage);
    }
  }

  __device__ __forceinline__ void swiglu() {
    store_all<kCols / 2>([&](int m, int e) { return silu(sums[m][e]) * sums[m][kCols / 4 + e]; });
  }

  // A pair of elements, normalised, weighted and turned.
  static __device__ __forceinline__ void turn(float& a, float& b, float scale, float weight_a, float weight_b, float cosine, float sine) {
    const float x = a * scale * weight_a, y = b * scale * weight_b;
    a = x * cosine - y * sine, b = x * sine + y * cosine;
  }

  __device__ __forceinline__ void heads() {
    constexpr int kHeads = kCols / 128;
    const float* weight = row_of<const float>(part.extra, 0);
    const uint32_t q = lane() % 4;
#pragma unroll
    for (int m = 0; m < S::kM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float scale[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
          const float* head = &sums[m][64 * h + 2 * half];
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
              float* v = &sums[m][64 * h + 4 * n + 2 * half];
              turn(v[0], v[1], scale[h], w.x, w.y, cosine, sine);
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
                float* v = &sums[m][64 * h + 4 * n + 2 * half + e];
                turn(v[0], v[32], scale[h], a, b, cosine, sine);
              }
            }
          }
        }
      }
    }
    store_sums();
  }

  template <class Release>
  __device__ __forceinline__ void run(Ring<S>& ring, Release release) {
    if (lane() == 0) tma_store_wait<0>();  // of the tile before
    if (part.epilogue == KL_GATE_RESIDUAL) {
      add_bias();
      gate();
      add_residual(ring, release);
      store_sums();
    } else if (part.epilogue == KL_SWIGLU) {
      if constexpr (kCols / 2 % 16 == 0) swiglu();
    } else if (part.epilogue == KL_QK_NORM_ROPE) {
      if constexpr (kCols % 128 == 0) heads();
    } else {
      plain();
    }
  }
};

template <class S>
using TileLeft = Left<KL_SM90_CLUSTER, S::kWarps, S::kM * S::kN>;

template <class S>
__device__ __forceinline__ void leave(const TileLeft<S>& left, const float (&from)[S::kM][S::kCols / 2]) {
#pragma unroll
  for (int m = 0; m < S::kM; m++) {
#pragma unroll
    for (int n = 0; n < S::kN; n++) {
      const float* v = &from[m][4 * n];
      left.put(m * S::kN + n, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  left.done();
}

template <class S>
__device__ __forceinline__ void add_left(const TileLeft<S>& left, float (&to)[S::kM][S::kCols / 2]) {
  left.wait();
  // As many on their way at once as there are registers for.
  constexpr int kCount = S::kM * S::kN, kFree = (S::kManyRegisters - 4 * kCount - 40) / 4;
  constexpr int kBatch = kFree < 1 ? 1 : kFree < kCount ? kFree : kCount;
  float* sum = to[0];
#pragma unroll
  for (int i = 0; i < kCount; i += kBatch) {
    float4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch && i + j < kCount; j++) v[j] = left.get(i + j);
#pragma unroll
    for (int j = 0; j < kBatch && i + j < kCount; j++, sum += 4) sum[0] += v[j].x, sum[1] += v[j].y, sum[2] += v[j].z, sum[3] += v[j].w;
  }
}

// A block's half of a tile's rounds. Such a cluster has one tile.
__device__ __forceinline__ void cut(Item& item) {
  const uint32_t middle = ceil_div(item.last, 2u);
  (cluster_rank() == 0 ? item.last : item.first) = middle;
}

// Hands the sums of a warpgroup's rows to the block that finishes them.
template <class S>
__device__ __forceinline__ void give(const Ring<S>& ring, const float (&sums)[S::kM][S::kCols / 2]) {
  const uint32_t warp = threadIdx.x / 32 - 4, to = ring.buffers(warp) + lane() * sizeof(float4);
#pragma unroll
  for (int n = 0; n < S::kN; n++) {
    const float* v = &sums[0][4 * n];
    store_in_block(to + n * (32 * sizeof(float4)), make_float4(v[0], v[1], v[2], v[3]), ring.got(warp), cluster_rank() ^ 1);
  }
}

// Adds what the other block has.
template <class S>
__device__ __forceinline__ void take(const Ring<S>& ring, float (&sums)[S::kM][S::kCols / 2]) {
  const uint32_t warp = threadIdx.x / 32 - 4, from = ring.buffers(warp) + lane() * sizeof(float4);
  barrier_wait(ring.got(warp), 0);
#pragma unroll
  for (int n = 0; n < S::kN; n++) {
    const float4 v = load_shared(from + n * (32 * sizeof(float4)));
    float* to = &sums[0][4 * n];
    to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
  }
}

// The one thread that copies.
template <class S>
__device__ __forceinline__ void copy(const KlGemmSm90& p, Ring<S> ring) {
  constexpr uint16_t kAll = (1 << KL_SM90_CLUSTER) - 1;
  const uint32_t rank = cluster_rank();
  uint32_t ahead = 0;
  bool waited = false;
  Work<KL_SM90_CLUSTER> work{p.schedule};
  for (Item item; work.next(item);) {
    if constexpr (S::kHalves) cut(item);
    const Place<S> at(p, item.tile);
    const KlGemmPart& part = p.stream[at.stream].part[at.part];
    const KlTensorMap *x = &p.x[at.stream], *w = &p.w[at.stream];
    // Weight rows come in two halves: gates and ups lie apart.
    const bool paired = part.epilogue == KL_SWIGLU;
    const uint32_t row = part.first_row + at.col_tile * (paired ? S::kCols / 2 : S::kCols), apart = paired ? part.out.cols : S::kCols / 2;
    const auto weights = [&](uint32_t k) {
      const uint32_t full = ring.full(ring.stage);
      barrier_arrive_expect(full, S::kStageBytes);
      if constexpr (S::kCommon == Common::kCols) {
        tma_load_2d_to_all(ring.right() + rank * (S::kRightBytes / 2), w, k * KL_SM90_BLOCK_K, row + rank * apart, full, kAll);
      } else {
        tma_load_2d(ring.right(), w, k * KL_SM90_BLOCK_K, row, full);
        tma_load_2d(ring.right() + S::kRightBytes / 2, w, k * KL_SM90_BLOCK_K, row + apart, full);
      }
    };
    if (!waited) {
      // Weights depend on no kernel before: the first are on their way while it ends. More of them would keep activations waiting.
      constexpr uint32_t kAhead = 2;
      const Ring<S> start = ring;
      for (uint32_t k = item.first; k < item.last && ahead < kAhead; k++, ahead++, ring.advance()) weights(k);
      ring = start;
      wait_for_previous_kernel();
      waited = true;
    }
    for (uint32_t k = item.first; k < item.last; k++, ring.advance()) {
      if (ahead) {
        ahead--;
      } else {
        barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
        weights(k);
      }
      const uint32_t full = ring.full(ring.stage);
      if constexpr (S::kCommon != Common::kRows) {
        tma_load_2d(ring.left(), x, k * KL_SM90_BLOCK_K, at.row_tile * S::kRows, full);
      } else {
        tma_load_2d_to_all(ring.left() + rank * (S::kLeftBytes / 2), x, k * KL_SM90_BLOCK_K, at.row_tile * S::kRows + rank * (S::kRows / 2), full, kAll);
      }
    }
    if (part.epilogue != KL_GATE_RESIDUAL || !S::kHalves && item.last < p.schedule.k_blocks) continue;
    for (uint32_t box = 0; box < S::kBoxes; ring.advance()) {
      const uint32_t full = ring.full(ring.stage), count = min(S::kBoxesOfStage, S::kBoxes - box);
      barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
      barrier_arrive_expect(full, count * S::kBoxBytes);
      for (uint32_t i = 0; i < count; i++, box++) {
        const uint32_t group = S::kHalves ? rank : box % S::kBoxesDown;
        const uint32_t col = at.col_tile * S::kCols + box / S::kBoxesDown * 64, row = at.row_tile * S::kRows + group * (S::kM * 64);
        tma_load_2d(ring.left() + i * S::kBoxBytes, &p.residual[at.stream], col, row, full);
      }
    }
  }
}

// Asks for what the end of a tile needs, so that it is there when the tile is summed.
template <class S>
__device__ __forceinline__ void expect_end(const KlGemmSm90& p, const Place<S>& at) {
  const KlGemmPart& part = p.stream[at.stream].part[at.part];
  if (threadIdx.x % 128 == 0) prefetch_map(&p.out[at.stream][at.part]);
  const uint32_t col = at.col_tile * S::kCols + lane() * 64;
  if (part.epilogue == KL_GATE_RESIDUAL && part.extra.data && lane() * 64 < S::kCols && col < part.out.cols) {
    prefetch(row_of<const bf16>(part.extra, 0) + col);
  }
}

// The other warpgroups.
template <class S>
__device__ __forceinline__ void multiply(const KlGemmSm90& p, Ring<S> ring) {
  const uint32_t group = threadIdx.x / 128 - 1;
  const auto release = [&](uint32_t stage) {
    if constexpr (S::kHalves) {
      if (threadIdx.x % 128 == 0) barrier_arrive(ring.empty(stage));
    } else {
      if (threadIdx.x % 128 < KL_SM90_CLUSTER) barrier_arrive_at(ring.empty(stage), threadIdx.x % 128);
    }
  };
  Work<KL_SM90_CLUSTER> work{p.schedule};
  for (Item item; work.next(item);) {
    if constexpr (S::kHalves) cut(item);
    // Hidden from the compiler, which would find out everything that follows from it once, for all tiles, and keep it.
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    float sums[S::kM][S::kCols / 2];
    // Found before there are sums: divisions take registers that are scarce afterwards.
    const Place<S> at(p, item.tile);
    expect_end<S>(p, at);
    // Of halves, the warpgroup whose sums the other block needs has the tensor cores to itself for the last rounds that the ring holds:
    // its sums travel while the other one ends.
    constexpr uint32_t kLead = S::kStages - 1, kHandOver = S::kGroups + 1;
    const bool finishes = S::kHalves && group == cluster_rank(), leads = S::kHalves && item.last - item.first >= kLead;
    for (uint32_t k = item.first; k < item.last; k++, ring.advance()) {
      if (leads && finishes && k + kLead == item.last) meet_wait(kHandOver);
      barrier_wait(ring.full(ring.stage), ring.parity);
      const uint32_t left = ring.left() + group * (S::kM * 64 * 128);
      const uint64_t right = wgmma_operand(ring.right());
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KL_SM90_BLOCK_K / 16; i++) {
#pragma unroll
        for (int m = 0; m < S::kM; m++) wgmma<S::kCols>(sums[m], wgmma_operand(left + m * 8192) + 2 * i, right + 2 * i, k > item.first || i > 0);
      }
      wgmma_commit();
      // The products of the round before are done: its stage is free.
      wgmma_wait<1>();
      if (leads && !finishes && k + 1 == item.last) meet_arrive(kHandOver);
      if (k > item.first) release(ring.before());
    }
    wgmma_wait<0>();
    release(ring.before());
    if constexpr (S::kHalves) {
      cluster_wait();  // the other block is there; it has been for long
      if (finishes) {
        take(ring, sums);
        Epilogue<S>(p, at, sums, ring, thread).run(ring, release);
      } else {
        give(ring, sums);
      }
    } else if (item.last < p.schedule.k_blocks) {
      leave<S>({p.schedule, work.worker()}, sums);
    } else {
      if (item.first > 0) {
        uint32_t other = work.worker();
        do {
          add_left<S>({p.schedule, --other}, sums);
        } while (front(p.schedule, other) > item.tile * p.schedule.k_blocks);
      }
      Epilogue<S>(p, at, sums, ring, thread).run(ring, release);
    }
  }
  if (lane() == 0) tma_store_wait<0>();
}

template <class S>
__device__ __forceinline__ void gemm(const KlGemmSm90& p) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  // The swizzle goes by addresses: stages and buffers begin at multiples of 1024.
  const Ring<S> ring{shared_address(dynamic) + 1023 & ~1023u};
  if (threadIdx.x == 0) {
    prefetch_map(&p.w[0]), prefetch_map(&p.x[0]);
    for (int i = 0; i < S::kStages; i++) {
      barrier_init(ring.full(i), 1);
      barrier_init(ring.empty(i), S::kGroups * (S::kHalves ? 1 : KL_SM90_CLUSTER));
    }
    for (int i = 0; S::kHalves && i < 4; i++) barrier_init(ring.got(i), 1);
    fence_barrier_init();
    for (int i = 0; S::kHalves && i < 4; i++) barrier_arrive_expect(ring.got(i), S::kOtherBytes);
  }
  // Halves need each other at the end only, and copy nothing into each other before.
  if constexpr (S::kHalves) {
    cluster_arrive();
    __syncthreads();
  } else {
    cluster_meet();
  }
  launch_next_kernel();
  if (threadIdx.x < 128) {
    give_registers<S::kFewRegisters>();
    if (threadIdx.x == 0) copy(p, ring);
    __syncwarp();
    if constexpr (S::kHalves) cluster_wait();
  } else {
    take_registers<S::kManyRegisters>();
    wait_for_previous_kernel();
    multiply(p, ring);
  }
  // Nobody leaves while the other copies into it or arrives at its barriers. Of halves, who finishes waits for all there is to come.
  if constexpr (!S::kHalves) cluster_meet();
}

using Large = Shape<2, 2, 192, 3, Common::kRows>;
using Square = Shape<3, 1, 192, 4, Common::kRows>;
using Wide = Shape<2, 1, 256, 4, Common::kCols>;
using Broad = Shape<2, 1, 208, 5, Common::kCols>;
using Medium = Shape<2, 1, 192, 4, Common::kCols>;
using Narrow = Shape<2, 1, 160, 5, Common::kTile>;
#define KL_SAME_SIZE(S, suffix)                                                                                                     \
  static_assert(S::kSharedBytes == KL_SM90_SHARED_##suffix && S::kThreads == KL_SM90_THREADS_##suffix, "abi.h states another size")
KL_SAME_SIZE(Large, 256X192);
KL_SAME_SIZE(Square, 192X192);
KL_SAME_SIZE(Wide, 128X256);
KL_SAME_SIZE(Broad, 128X208);
KL_SAME_SIZE(Medium, 128X192);
KL_SAME_SIZE(Narrow, 128X160);
static_assert(sizeof(KlGemmSm90) % 128 == 0, "abi.h leaves a gap");

KL_ENTRY(kl_gemm_bf16_sm90_256x192, KlGemmSm90, KL_SM90_THREADS_256X192, 1) { gemm<Large>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_192x192, KlGemmSm90, KL_SM90_THREADS_192X192, 1) { gemm<Square>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x256, KlGemmSm90, KL_SM90_THREADS_128X256, 1) { gemm<Wide>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x208, KlGemmSm90, KL_SM90_THREADS_128X208, 1) { gemm<Broad>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x192, KlGemmSm90, KL_SM90_THREADS_128X192, 1) { gemm<Medium>(p); }
KL_ENTRY(kl_gemm_bf16_sm90_128x160, KlGemmSm90, KL_SM90_THREADS_128X160, 1) { gemm<Narrow>(p); }
