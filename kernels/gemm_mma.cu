// GEMM on tensor cores, portable (sm_80 and newer), with a fused epilogue.
//
//   kl_gemm_mma_256, _128, _64   out = epilogue(x w^T + bias), bf16 operands, f32 accumulators; named by the rows of a
//                                tile, which has 128 columns
//     store           out
//     swiglu          silu(gate) * up; w is all gate rows, then all up rows; a tile has 64 columns of each, interleaved
//     gate_residual   out += gate * (...)
//     qk_norm_rope    one head of 128 columns per tile: RMS norm with weight (qk-norm), then RoPE
//
// One launch takes up to two streams (the text and the image tokens of a double block), each with up to four ranges of weight rows that
// have epilogues and outputs of their own (Q, K, V, MLP).
// Bound: tensor cores. A denoising step of klein 4B at 1024x1024 is 29 TFLOP of this.
// Needs: bf16, K and the strides of x and w multiples of 8, 16-byte aligned addresses, operands of less than 2^32 elements; heads of 128.
//
// Stream-K (Osama et al. 2023, see tile_scheduler_sm90.cuh): the first `full_tiles` CTAs compute one tile each. Instead of a last wave
// that leaves SMs idle, the k-blocks of the remaining tiles are divided evenly among workers, so a worker's range may begin and end
// within a tile. A worker takes its last tile first and stores that tile's partial accumulators for the next worker; it ends with the
// tile whose first k-blocks the previous worker has stored, which by then are there. The fix-up adds partials in a fixed order, so
// results are deterministic. A worker waits only for CTAs with smaller indices, which are started before it, so no cooperative launch
// is needed.
//
// Operands are copied row by row, so any weight row can be loaded into any column of a tile. SwiGLU interleaves eight gate columns with
// the eight up columns that belong to them, and half-split RoPE eight elements with those 64 further, so that one thread holds both
// members of each pair in registers. Weights in memory stay as the checkpoint has them.
#include <gemm/mma_tile.cuh>
#include <gemm/stream_k.cuh>

// The column of the part (and with it the weight row) that is loaded into column `col` of a tile, where the members of a pair are
// `apart`.
__device__ __forceinline__ uint32_t interleaved_column(uint32_t col, uint32_t apart) {
  return col / 16 * 8 + col % 8 + (col / 8 % 2) * apart;
}

template <class Tile>
struct Epilogue {
  const KlGemmStream& s;
  const KlGemmPart& part;
  Tile& tile;
  unsigned char* shared;
  uint64_t row0;
  uint32_t col_tile;  // within the part

  __device__ __forceinline__ bool row_exists(uint64_t row) const { return row < s.x.rows; }

  // Calls f(m, half, row in the tile, row of the matrix) for the rows that this thread has accumulators of.
  template <class F>
  __device__ __forceinline__ void rows(F f) const {
#pragma unroll
    for (int m = 0; m < Tile::kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = Tile::row_of_acc(m, half);
        f(m, half, row, row0 + row);
      }
    }
  }

  __device__ __forceinline__ void linear() {
    const uint64_t col0 = static_cast<uint64_t>(col_tile) * Tile::kBlockN;
    const KlMat& out = part.out;
    // Whole bf16 tiles take the vectorised path, which reads the residual as pairs.
    if (out.dtype == KL_BF16 && col0 + Tile::kBlockN <= out.cols && out.data % 4 == 0 && out.stride % 2 == 0) {
      store_whole_tile(col0);
    } else {
      store_edge_tile(col0);
    }
  }

  __device__ __forceinline__ void store_whole_tile(uint64_t col0) {
    const uint64_t first = col0 + Tile::col_of_acc(0);
    if (s.bias.data) {
      const float* bias = row_of<const float>(s.bias, 0) + part.first_row + first;
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float b = bias[n * 8 + e];
#pragma unroll
          for (int m = 0; m < Tile::kMmaM; m++) tile.acc[m][n][e] += b, tile.acc[m][n][2 + e] += b;
        }
      }
    }
    if (part.epilogue == KL_GATE_RESIDUAL) {
      float gate[Tile::kMmaN][2];
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) gate[n][e] = part.extra.data ? load_any(part.extra, 0, first + n * 8 + e) : 1.0f;
      }
      rows([&](int m, int half, uint32_t, uint64_t r) {
        if (!row_exists(r)) return;
        const bf16* residual = row_of<const bf16>(part.out, r) + first;
#pragma unroll
        for (int n = 0; n < Tile::kMmaN; n++) {
          const float2 old = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(residual + n * 8));
          float* acc = &tile.acc[m][n][2 * half];
          acc[0] = old.x + gate[n][0] * acc[0];
          acc[1] = old.y + gate[n][1] * acc[1];
        }
      });
    }
    rows([&](int m, int half, uint32_t row, uint64_t) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
        Tile::stage_pair(shared, row, Tile::col_of_acc(n), tile.acc[m][n][2 * half], tile.acc[m][n][2 * half + 1]);
      }
    });
    Tile::store_staged(shared, part.out, row0, col0, Tile::kBlockN);
  }

  // Stores value by value, for other dtypes and for the last columns.
  __device__ __forceinline__ void store_edge_tile(uint64_t col0) {
    rows([&](int m, int half, uint32_t, uint64_t r) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const uint64_t c = col0 + Tile::col_of_acc(n) + e;
          if (c >= part.out.cols || !row_exists(r)) continue;
          float v = tile.acc[m][n][2 * half + e];
          if (s.bias.data) v += load<float>(s.bias, 0, part.first_row + c);
          if (part.epilogue == KL_GATE_RESIDUAL) {
            v = load_any(part.out, r, c) + (part.extra.data ? load_any(part.extra, 0, c) : 1.0f) * v;
          }
          store_any(part.out, r, c, v);
        }
      }
    });
  }

  __device__ __forceinline__ void swiglu() {
    const uint64_t col0 = static_cast<uint64_t>(col_tile) * (Tile::kBlockN / 2);
    const bool staged = part.out.dtype == KL_BF16;
    rows([&](int m, int half, uint32_t row, uint64_t r) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n += 2) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; e++) v[e] = silu(tile.acc[m][n][2 * half + e]) * tile.acc[m][n + 1][2 * half + e];
        const uint32_t col = interleaved_column(Tile::col_of_acc(n), 0);
        if (staged) {
          Tile::stage_pair(shared, row, col, v[0], v[1]);
        } else {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (row_exists(r) && col0 + col + e < part.out.cols) row_of<float>(part.out, r)[col0 + col + e] = v[e];
          }
        }
      }
    });
    if (staged) Tile::store_staged(shared, part.out, row0, col0, Tile::kBlockN / 2);
  }

  // The column within a head of the element in acc[m][n][..].
  __device__ __forceinline__ uint32_t head_column(int n) const {
    const uint32_t col = Tile::col_of_acc(n);
    return s.rope == KL_ROPE_HALF_SPLIT ? interleaved_column(col, 64) : col;
  }

  // Rotates a pair by an angle of the row's table: 64 cosines, then 64 sines.
  static __device__ __forceinline__ void rope_rotate(float& a, float& b, const float* angles, uint32_t pair) {
    const float c = angles[pair], q = angles[64 + pair], x = a;
    a = x * c - b * q;
    b = x * q + b * c;
  }

  __device__ __forceinline__ void qk_norm_rope() {
    const uint64_t col0 = static_cast<uint64_t>(col_tile) * Tile::kBlockN;
    const float* weight = row_of<const float>(part.extra, 0);
    // Two warps hold one half each of a row's columns: both write their sum of squares to shared memory, and read the other's.
    float* squares = reinterpret_cast<float*>(shared);
    const uint32_t side = threadIdx.x / 32 % 2;
    rows([&](int m, int half, uint32_t row, uint64_t) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) sum += tile.acc[m][n][2 * half + e] * tile.acc[m][n][2 * half + e];
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0) squares[side * Tile::kBlockM + row] = sum;
    });
    __syncthreads();
    rows([&](int m, int half, uint32_t row, uint64_t r) {
      const float scale = part.scale * rsqrtf((squares[row] + squares[Tile::kBlockM + row]) * (1.0f / 128.0f) + s.eps);
      const float* angles = row_of<const float>(s.table, row_exists(r) ? r : 0);
      // A pair is two adjacent columns or, half-split, two columns of the tile that are eight apart and 64 apart in the head.
      const bool interleaved = s.rope == KL_ROPE_INTERLEAVED;
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n += 2) {
        const uint32_t col = head_column(n), next = head_column(n + 1);
        float &a = tile.acc[m][n][2 * half], &b = tile.acc[m][n][2 * half + 1];
        float &c = tile.acc[m][n + 1][2 * half], &d = tile.acc[m][n + 1][2 * half + 1];
        a *= scale * weight[col], b *= scale * weight[col + 1], c *= scale * weight[next], d *= scale * weight[next + 1];
        if (interleaved) {
          rope_rotate(a, b, angles, col / 2);
          rope_rotate(c, d, angles, next / 2);
        } else {
          rope_rotate(a, c, angles, col);
          rope_rotate(b, d, angles, col + 1);
        }
      }
    });
    __syncthreads();  // all warps have read the sums of squares
    rows([&](int m, int half, uint32_t row, uint64_t) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
        Tile::stage_pair(shared, row, head_column(n), tile.acc[m][n][2 * half], tile.acc[m][n][2 * half + 1]);
      }
    });
    Tile::store_staged(shared, part.out, row0, col0, Tile::kBlockN);
  }
};

// The partial accumulators that a worker stores for the next one, in the register layout of the threads.
template <class Tile>
__device__ __forceinline__ float4* partials_of(const KlGemm& p, uint32_t worker) {
  float4* partials = reinterpret_cast<float4*>(p.schedule.partials);
  return partials + static_cast<uint64_t>(worker) * Tile::kMmaM * Tile::kMmaN * Tile::kThreads + threadIdx.x;
}

template <class Tile>
__device__ __forceinline__ void store_partials(const KlGemm& p, const Tile& tile, uint32_t worker) {
  float4* to = partials_of<Tile>(p, worker);
#pragma unroll
  for (int m = 0; m < Tile::kMmaM; m++) {
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; n++, to += Tile::kThreads) {
      const float* v = tile.acc[m][n];
      __stcg(to, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(reinterpret_cast<uint32_t*>(p.schedule.flags) + worker, 1);
}

// Stream-K fix-up: waits for the partial accumulators of a worker, adds them, and resets its flag for the next launch.
template <class Tile>
__device__ __forceinline__ void add_partials(const KlGemm& p, Tile& tile, uint32_t worker) {
  if (threadIdx.x == 0) {
    uint32_t* flag = reinterpret_cast<uint32_t*>(p.schedule.flags) + worker;
    while (load_acquire(flag) == 0) {
    }
    *flag = 0;
  }
  __syncthreads();
  const float4* from = partials_of<Tile>(p, worker);
#pragma unroll
  for (int m = 0; m < Tile::kMmaM; m++) {
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; n++, from += Tile::kThreads) {
      const float4 v = __ldcg(from);
      float* acc = tile.acc[m][n];
      acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
    }
  }
}

// The rows of an operand that a thread copies: every kRowsPerCopy-th or, where columns are interleaved in pairs, every half as many. Rows
// beyond the end repeat the last one; their results are not stored.
struct OperandRows {
  const bf16* base;
  uint32_t offset, step, last;  // in elements

  __device__ __forceinline__ const bf16* at(int i, uint32_t k) const { return base + (min(offset + i * step, last) + k); }
};

// The coordinates of a tile from its linear index.
struct TileCoord {
  const KlGemmStream& s;
  uint32_t row_tile, col_tile, part_index;

  __device__ __forceinline__ TileCoord(const KlGemm& p, uint32_t index)
      : s(p.stream[index >= p.stream[0].row_tiles * p.stream[0].col_tiles]) {
    // Row tiles vary fastest: CTAs that run at the same time share weight rows, and x stays in L2.
    if (&s != &p.stream[0]) index -= p.stream[0].row_tiles * p.stream[0].col_tiles;
    row_tile = index % s.row_tiles, col_tile = index / s.row_tiles, part_index = 0;
    while (col_tile >= s.part[part_index].tiles) col_tile -= s.part[part_index++].tiles;
  }

  __device__ __forceinline__ const KlGemmPart& part() const { return s.part[part_index]; }
};

// Accumulates `k_blocks` k-blocks of a tile, from `first_k_block` on.
template <class Tile>
__device__ __forceinline__ void compute(const KlGemm& p, Tile& tile, unsigned char* shared, uint32_t index, uint32_t first_k_block,
                                        uint32_t k_blocks) {
  const TileCoord at(p, index);
  const KlGemmStream& s = at.s;
  const KlGemmPart& part = at.part();
  const uint32_t x_stride = s.x.stride, w_stride = s.w.stride, line = Tile::copy_row(), chunk = Tile::copy_chunk() * 8;
  const OperandRows a{row_of<const bf16>(s.x, 0), (at.row_tile * Tile::kBlockM + line) * x_stride + chunk, Tile::kRowsPerCopy * x_stride,
                  (s.x.rows - 1) * x_stride + chunk};
  // The weight row of the first column that the thread copies.
  uint32_t row = at.col_tile * Tile::kBlockN + line, step = Tile::kRowsPerCopy, last = part.out.cols - 1;
  if (part.epilogue == KL_SWIGLU) {
    row = at.col_tile * (Tile::kBlockN / 2) + interleaved_column(line, part.out.cols), step = Tile::kRowsPerCopy / 2;
    last += line / 8 % 2 * part.out.cols;
  } else if (part.epilogue == KL_QK_NORM_ROPE && s.rope == KL_ROPE_HALF_SPLIT) {
    row = at.col_tile * Tile::kBlockN + interleaved_column(line, 64), step = Tile::kRowsPerCopy / 2;
  }
  const OperandRows b{row_of<const bf16>(s.w, part.first_row), row * w_stride + chunk, step * w_stride, last * w_stride + chunk};
  tile.mainloop(
      shared, s.x.cols, first_k_block, min(k_blocks, ceil_div(s.x.cols, static_cast<uint32_t>(Tile::kBlockK))),
      [&](int i, uint32_t k, bool&) { return a.at(i, k); }, [&](int i, uint32_t k, bool&) { return b.at(i, k); });
}

template <class Tile>
__device__ __forceinline__ void finish_tile(const KlGemm& p, Tile& tile, unsigned char* shared, uint32_t index) {
  const TileCoord at(p, index);
  Epilogue<Tile> epilogue{at.s, at.part(), tile, shared, static_cast<uint64_t>(at.row_tile) * Tile::kBlockM, at.col_tile};
  if (at.part().epilogue == KL_SWIGLU) {
    epilogue.swiglu();
  } else if (at.part().epilogue == KL_QK_NORM_ROPE) {
    epilogue.qk_norm_rope();
  } else {
    epilogue.linear();
  }
}

template <class Tile>
__device__ __forceinline__ void gemm(const KlGemm& p, unsigned char* shared) {
  // The CTA's k-blocks, counted over all tiles; it works from their end to their beginning.
  const KlTileSchedule& s = p.schedule;
  uint32_t end = blockIdx.x < s.full_tiles ? (blockIdx.x + 1) * s.k_blocks : first_k_block(s, blockIdx.x - s.full_tiles + 1);
  for (;;) {
    const auto begin = [&] {
      return blockIdx.x < s.full_tiles ? blockIdx.x * s.k_blocks : first_k_block(s, blockIdx.x - s.full_tiles);
    };
    uint32_t index = (end - 1) / s.k_blocks;
    Tile tile;
    {
      const uint32_t start = max(begin(), index * s.k_blocks);
      compute(p, tile, shared, index, start - index * s.k_blocks, end - start);
    }
    // Everything below is derived from `end` again: otherwise the compiler would keep it in registers, which the mainloop needs.
    asm volatile("" : "+r"(end));
    index = (end - 1) / s.k_blocks;
    const uint32_t origin = index * s.k_blocks, start = max(begin(), origin), worker = blockIdx.x - s.full_tiles;
    if (end < origin + s.k_blocks) {
      store_partials(p, tile, worker);
    } else {
      if (start > origin) {
        uint32_t peer = worker;
        do {
          add_partials(p, tile, --peer);
        } while (first_k_block(s, peer) > origin);
      }
      finish_tile(p, tile, shared, index);
    }
    end = start;
    if (end <= begin()) return;
    __syncthreads();  // the staged output has left shared memory
  }
}

KL_DYNAMIC_SHARED(128);

using Tile256 = MmaTile<256, 8, 64, 3>;
using Tile128 = MmaTile<128, 4, 32, 3>;
using Tile64 = MmaTile<64, 4, 64, 3>;
static_assert(Tile256::kSharedBytes == KL_MMA_SHARED_256 && Tile256::kThreads == KL_MMA_THREADS_256, "abi.h states another size");
static_assert(Tile128::kSharedBytes == KL_MMA_SHARED_128 && Tile128::kThreads == KL_MMA_THREADS, "abi.h states another size");
static_assert(Tile64::kSharedBytes == KL_MMA_SHARED_64 && Tile64::kThreads == KL_MMA_THREADS, "abi.h states another size");
static_assert(Tile256::kBlockK == KL_MMA_BLOCK_K_256 && Tile128::kBlockK == KL_MMA_BLOCK_K_128 && Tile64::kBlockK == KL_MMA_BLOCK_K_64,
              "abi.h states another size");

KL_ENTRY(kl_gemm_mma_256, KlGemm, KL_MMA_THREADS_256, 1) { gemm<Tile256>(p, dynamic_shared); }
KL_ENTRY(kl_gemm_mma_128, KlGemm, KL_MMA_THREADS, 2) { gemm<Tile128>(p, dynamic_shared); }
KL_ENTRY(kl_gemm_mma_64, KlGemm, KL_MMA_THREADS, 3) { gemm<Tile64>(p, dynamic_shared); }
