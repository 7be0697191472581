// Products on tensor cores, portable (sm_80 and newer), with what follows a product done before it is stored.
//
//   kl_gemm_mma_128, kl_gemm_mma_64   out = epilogue(x w^T + bias), bf16 operands, f32 sums; tiles of 128 or 64 rows by 128 columns
//     store           out
//     swiglu          silu(gate) * up; w is all gates, then all ups; a tile has 64 columns of each
//     gate_residual   out += gate * (...)
//     heads           one head of 128 columns a tile: RMS norm with weight, rotation by the row's angles
//
// One launch takes up to two streams (the text and the image of a double block), and of each up to four ranges of weight rows with
// epilogues and destinations of their own (queries, keys, values, MLP).
// Bound: tensor cores. A step of klein 4B at 1024x1024 is 29 TFLOP of this.
// Needs: bf16, inner dimension and strides of x and w multiples of 8, 16-byte addresses; heads of 128.
//
// Which weight row a column of the tile takes is free, since copies go row by row. Swiglu puts eight gates beside the eight ups that
// belong to them, and half-split rotation eight elements beside those 64 further, so that a thread has both in its registers.
#include "mma.cuh"

// The column of the part (and with it the weight row) that stands at `col` of a tile, where halves lie `apart`.
__device__ __forceinline__ uint32_t paired_column(uint32_t col, uint32_t apart) {
  return col / 16 * 8 + col % 8 + (col / 8 % 2) * apart;
}

template <class Tile>
struct Gemm {
  const KlGemmStream& s;
  const KlGemmPart& part;
  Tile& tile;
  unsigned char* shared;
  uint64_t row0;
  uint32_t col_tile;  // within the part

  __device__ __forceinline__ bool row_exists(uint64_t row) const { return row < s.x.rows; }

  // Calls f(m, half, row in the tile, row of the matrix) for the rows that this thread has sums of.
  template <class F>
  __device__ __forceinline__ void rows(F f) const {
#pragma unroll
    for (int m = 0; m < Tile::kM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = Tile::row_of_sum(m, half);
        f(m, half, row, row0 + row);
      }
    }
  }

  __device__ __forceinline__ void plain() {
    const uint64_t col0 = static_cast<uint64_t>(col_tile) * Tile::kCols;
    const KlMat& out = part.out;
    // Whole tiles of bf16 take the straight way; pairs of the residual are read as one word.
    if (out.dtype == KL_BF16 && col0 + Tile::kCols <= out.cols && out.data % 4 == 0 && out.stride % 2 == 0) {
      whole(col0);
    } else {
      edge(col0);
    }
  }

  __device__ __forceinline__ void whole(uint64_t col0) {
    const uint64_t first = col0 + Tile::col_of_sum(0);
    if (s.bias.data) {
      const float* bias = row_of<const float>(s.bias, 0) + part.first_row + first;
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float b = bias[n * 8 + e];
#pragma unroll
          for (int m = 0; m < Tile::kM; m++) tile.sums[m][n][e] += b, tile.sums[m][n][2 + e] += b;
        }
      }
    }
    if (part.epilogue == KL_GATE_RESIDUAL) {
      float gate[Tile::kN][2];
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) gate[n][e] = part.extra.data ? load_any(part.extra, 0, first + n * 8 + e) : 1.0f;
      }
      rows([&](int m, int half, uint32_t, uint64_t r) {
        if (!row_exists(r)) return;
        const bf16* residual = row_of<const bf16>(part.out, r) + first;
#pragma unroll
        for (int n = 0; n < Tile::kN; n++) {
          const float2 old = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(residual + n * 8));
          float* sum = &tile.sums[m][n][2 * half];
          sum[0] = old.x + gate[n][0] * sum[0];
          sum[1] = old.y + gate[n][1] * sum[1];
        }
      });
    }
    rows([&](int m, int half, uint32_t row, uint64_t) {
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
        Tile::stage_pair(shared, row, Tile::col_of_sum(n), tile.sums[m][n][2 * half], tile.sums[m][n][2 * half + 1]);
      }
    });
    Tile::store_staged(shared, part.out, row0, col0, Tile::kCols);
  }

  // Value by value, for other types and for the last columns.
  __device__ __forceinline__ void edge(uint64_t col0) {
    rows([&](int m, int half, uint32_t, uint64_t r) {
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const uint64_t c = col0 + Tile::col_of_sum(n) + e;
          if (c >= part.out.cols || !row_exists(r)) continue;
          float v = tile.sums[m][n][2 * half + e];
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
    const uint64_t col0 = static_cast<uint64_t>(col_tile) * (Tile::kCols / 2);
    const bool staged = part.out.dtype == KL_BF16;
    rows([&](int m, int half, uint32_t row, uint64_t r) {
#pragma unroll
      for (int n = 0; n < Tile::kN; n += 2) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; e++) v[e] = silu(tile.sums[m][n][2 * half + e]) * tile.sums[m][n + 1][2 * half + e];
        const uint32_t col = paired_column(Tile::col_of_sum(n), 0);
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
    if (staged) Tile::store_staged(shared, part.out, row0, col0, Tile::kCols / 2);
  }

  // Where a head's element stands that the thread has in sums[m][n][..].
  __device__ __forceinline__ uint32_t head_column(int n) const {
    const uint32_t col = Tile::col_of_sum(n);
    return s.rope == KL_ROPE_HALF_SPLIT ? paired_column(col, 64) : col;
  }

  __device__ __forceinline__ void heads() {
    const uint64_t col0 = static_cast<uint64_t>(col_tile) * Tile::kCols;
    const float* weight = row_of<const float>(part.extra, 0);
    float w[Tile::kN][2];
#pragma unroll
    for (int n = 0; n < Tile::kN; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) w[n][e] = weight[head_column(n) + e];
    }
    // Each half of a row's columns is in another warp: both write their sum of squares, and read the other's.
    float* squares = reinterpret_cast<float*>(shared);
    const uint32_t side = threadIdx.x / 32 % 2;
    rows([&](int m, int half, uint32_t row, uint64_t) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) sum += tile.sums[m][n][2 * half + e] * tile.sums[m][n][2 * half + e];
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0) squares[side * Tile::kRows + row] = sum;
    });
    __syncthreads();
    rows([&](int m, int half, uint32_t row, uint64_t r) {
      const float scale = rsqrtf((squares[row] + squares[Tile::kRows + row]) * (1.0f / 128.0f) + s.eps);
      const float* angles = row_of<const float>(s.table, row_exists(r) ? r : 0);
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) tile.sums[m][n][2 * half + e] *= scale * w[n][e];
      }
      if (s.rope == KL_ROPE_INTERLEAVED) {
#pragma unroll
        for (int n = 0; n < Tile::kN; n++) {
          float &a = tile.sums[m][n][2 * half], &b = tile.sums[m][n][2 * half + 1];
          const uint32_t pair = head_column(n) / 2;
          const float c = angles[pair], q = angles[64 + pair], x = a;
          a = x * c - b * q;
          b = x * q + b * c;
        }
      } else {
#pragma unroll
        for (int n = 0; n < Tile::kN; n += 2) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float &a = tile.sums[m][n][2 * half + e], &b = tile.sums[m][n + 1][2 * half + e];
            const uint32_t pair = head_column(n) + e;
            const float c = angles[pair], q = angles[64 + pair], x = a;
            a = x * c - b * q;
            b = x * q + b * c;
          }
        }
      }
    });
    __syncthreads();  // the sums of squares are read
    rows([&](int m, int half, uint32_t row, uint64_t) {
#pragma unroll
      for (int n = 0; n < Tile::kN; n++) {
        Tile::stage_pair(shared, row, head_column(n), tile.sums[m][n][2 * half], tile.sums[m][n][2 * half + 1]);
      }
    });
    Tile::store_staged(shared, part.out, row0, col0, Tile::kCols);
  }
};

template <class Tile>
__device__ __forceinline__ void gemm(const KlGemm& p, unsigned char* shared) {
  const uint32_t first = p.stream[0].row_tiles * p.stream[0].col_tiles;
  const bool second = blockIdx.x >= first;
  const KlGemmStream& s = p.stream[second];
  // Rows first: neighbours in time share the weight, and x stays in the cache.
  const uint32_t index = second ? blockIdx.x - first : blockIdx.x, row_tile = index % s.row_tiles;
  uint32_t col_tile = index / s.row_tiles, which = 0;
  while (col_tile >= s.part[which].tiles) col_tile -= s.part[which++].tiles;
  const KlGemmPart& part = s.part[which];
  const uint64_t row0 = static_cast<uint64_t>(row_tile) * Tile::kRows;

  // This thread's rows of the operands, or null beyond the edge.
  const uint32_t line = threadIdx.x / 4;
  const bf16 *left[Tile::kLeftCopies], *right[Tile::kRightCopies];
#pragma unroll
  for (int i = 0; i < Tile::kLeftCopies; i++) {
    const uint64_t row = row0 + line + 32 * i;
    left[i] = row < s.x.rows ? row_of<const bf16>(s.x, row) : nullptr;
  }
  const bool swiglu = part.epilogue == KL_SWIGLU, heads = part.epilogue == KL_HEADS;
#pragma unroll
  for (int i = 0; i < Tile::kRightCopies; i++) {
    const uint32_t col = line + 32 * i;
    uint64_t column = static_cast<uint64_t>(col_tile) * Tile::kCols + col;
    bool exists = column < part.out.cols;
    if (swiglu) {
      const uint32_t within = col_tile * (Tile::kCols / 2) + paired_column(col, 0);
      exists = within < part.out.cols;
      column = within + (col / 8 % 2) * static_cast<uint64_t>(part.out.cols);
    } else if (heads && s.rope == KL_ROPE_HALF_SPLIT) {
      column = static_cast<uint64_t>(col_tile) * Tile::kCols + paired_column(col, 64);
    }
    right[i] = exists ? row_of<const bf16>(s.w, part.first_row + column) : nullptr;
  }
  Tile tile;
  const auto from = [](const bf16* row, const bf16* anything, uint32_t k, bool& valid) {
    valid = valid && row;
    return valid ? row + k : anything;
  };
  const bf16* anything = row_of<const bf16>(s.w, 0);
  tile.run(
      shared, s.x.cols, [&](int i, uint32_t k, bool& valid) { return from(left[i], anything, k, valid); },
      [&](int i, uint32_t k, bool& valid) { return from(right[i], anything, k, valid); });

  Gemm<Tile> end{s, part, tile, shared, row0, col_tile};
  if (swiglu) {
    end.swiglu();
  } else if (heads) {
    end.heads();
  } else {
    end.plain();
  }
}

extern __shared__ __align__(128) unsigned char dynamic_shared[];

using Tile128 = MmaTile<128, 4>;
using Tile64 = MmaTile<64, 4>;
static_assert(Tile128::kSharedBytes == KL_MMA_SHARED_128 && Tile64::kSharedBytes == KL_MMA_SHARED_64, "abi.h states another size");

KL_ENTRY(kl_gemm_mma_128, KlGemm, KL_MMA_THREADS, 2) { gemm<Tile128>(p, dynamic_shared); }
KL_ENTRY(kl_gemm_mma_64, KlGemm, KL_MMA_THREADS, 3) { gemm<Tile64>(p, dynamic_shared); }
