// The fused epilogues of the portable tensor-core kernels, which a CTA runs on the accumulators of a finished tile.
#pragma once

#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/rope.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <gemm/mma_tile.cuh>

namespace kl::gemm::portable {
// Steps that the epilogues share. A bf16 tile whose columns all exist is staged in shared memory, for coalesced stores of whole chunks;
// other dtypes and the last columns are stored value by value.
template <class Tile, class Index>
struct TileEpilogue {
  Tile& tile;
  unsigned char* shared;
  const KlMat& out;
  Index row0, col0;  // the tile's corner in `out`

  __device__ __forceinline__ bool row_exists(Index row) const { return row < out.rows; }
  __device__ __forceinline__ bool is_whole() const { return out.dtype == KL_BF16 && col0 + Tile::kBlockN <= out.cols; }

  // Calls f(m, half, row in the tile, row of the matrix) for the rows whose accumulators this thread has.
  template <class F>
  __device__ __forceinline__ void for_each_row(F f) const {
#pragma unroll
    for (int m = 0; m < Tile::kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = Tile::row_of_acc(m, half);
        f(m, half, row, row0 + row);
      }
    }
  }

  // Adds the bias of each column of a whole tile; `bias` points to the bias of column 0 of `out`.
  __device__ __forceinline__ void add_bias(const float* bias) const {
    bias += col0 + Tile::col_of_acc(0);
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

  // Rounds the tile and writes it to the staging area; column(n) is where the first of the thread's two columns of fragment n belongs.
  template <class F>
  __device__ __forceinline__ void stage(F column) const {
    for_each_row([&](int m, int half, uint32_t row, Index) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
        Tile::stage_pair(shared, row, column(n), tile.acc[m][n][2 * half], tile.acc[m][n][2 * half + 1]);
      }
    });
  }

  __device__ __forceinline__ void stage() const {
    stage([](int n) { return Tile::col_of_acc(n); });
  }

  __device__ __forceinline__ void store_staged(uint32_t width = Tile::kBlockN) const {
    Tile::store_staged(shared, out, row0, col0, width);
  }

  // Calls f(row, column, v) for each value v of the tile, also if there is no such row or column. Whether f checks the row or the column
  // first makes a difference to the registers that the compiler needs.
  template <class F>
  __device__ __forceinline__ void for_each_value(F f) const {
    for_each_row([&](int m, int half, uint32_t, Index row) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          f(row, col0 + Tile::col_of_acc(n) + e, tile.acc[m][n][2 * half + e]);
        }
      }
    });
  }
};

// The column of the part (and the weight row) that is loaded into column `col` of a tile, if the members of a pair are `apart`.
__device__ __forceinline__ uint32_t interleaved_column(uint32_t col, uint32_t apart) {
  return col / 16 * 8 + col % 8 + (col / 8 % 2) * apart;
}

// The epilogues of the portable GEMM.
template <class Tile>
struct GemmEpilogue : TileEpilogue<Tile, uint64_t> {
  using Base = TileEpilogue<Tile, uint64_t>;
  using Base::out, Base::shared, Base::tile;

  const KlGemmStream& s;
  const KlOutputRange& part;
  uint64_t saturated;  // the address of the count of values that do not fit an output of e4m3

  // The epilogue of tile (row_tile, col_tile) of the part; a tile has `width` output columns.
  __device__ __forceinline__ GemmEpilogue(const KlGemmStream& s, const KlOutputRange& part, uint64_t saturated, Tile& tile,
                                          unsigned char* shared, uint32_t row_tile, uint32_t col_tile, uint32_t width)
      : Base{tile, shared, part.out, static_cast<uint64_t>(row_tile) * Tile::kBlockM, static_cast<uint64_t>(col_tile) * width},
        s(s), part(part), saturated(saturated) {}

  // Multiplies accumulators by the scales of quantized operands.
  __device__ __forceinline__ void apply_scales() const {
    const auto is_one = [&](const KlGemmRows& rows) { return rows.alpha == 1.0f && !s.w[rows.matrix].scales; };
    const bool swiglu = part.epilogue == KL_SWIGLU, half_split = part.epilogue == KL_QK_NORM_ROPE && s.rope == KL_ROPE_HALF_SPLIT;
    if (is_one(part.w[0]) && (!swiglu || is_one(part.w[1]))) return;
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; n++) {
      const KlGemmRows& rows = part.w[swiglu ? n % 2 : 0];
      const float* by_row = reinterpret_cast<const float*>(s.w[rows.matrix].scales);
      const uint32_t col = swiglu || half_split ? interleaved_column(Tile::col_of_acc(n), half_split ? 64 : 0) : Tile::col_of_acc(n);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float scale = rows.alpha;
        if (by_row) scale *= by_row[rows.first + min(static_cast<uint32_t>(this->col0) + col + e, out.cols - 1)];
#pragma unroll
        for (int m = 0; m < Tile::kMmaM; m++) tile.acc[m][n][e] *= scale, tile.acc[m][n][2 + e] *= scale;
        // Otherwise the compiler would load all scales first, for which there are no registers.
        asm volatile("" ::: "memory");
      }
    }
  }

  // Adds the LoRA branch. Rows of its up matrix go to the same columns as the weight rows.
  __device__ __forceinline__ void add_lora() const {
    const bool swiglu = part.epilogue == KL_SWIGLU, half_split = part.epilogue == KL_QK_NORM_ROPE && s.rope == KL_ROPE_HALF_SPLIT;
    tile.add_product(
        shared, s.down_out.cols,
        [&](uint32_t row) { return row_of<const bf16>(s.down_out, min(static_cast<uint32_t>(this->row0) + row, s.down_out.rows - 1)); },
        [&](uint32_t col) {
          const uint32_t within = swiglu || half_split ? interleaved_column(col, half_split ? 64 : 0) : col;
          const uint32_t first = part.first_col + (swiglu && col / 8 % 2 ? out.cols : 0);
          return row_of<const bf16>(s.up, first + min(static_cast<uint32_t>(this->col0) + within, out.cols - 1));
        });
  }

  __device__ __forceinline__ void linear() const {
    const bool gate_residual = part.epilogue == KL_GATE_RESIDUAL;
    const auto gate = [&](uint64_t col) { return part.extra.data ? load_any(part.extra, 0, col) : 1.0f; };
    if (!this->is_whole() || out.data % 4 != 0 || out.stride % 2 != 0) {
      this->for_each_value([&](uint64_t row, uint64_t col, float v) {
        if (col >= out.cols || !this->row_exists(row)) return;
        if (s.bias.data) v += load<float>(s.bias, 0, part.first_col + col);
        if (gate_residual) v = load_any(out, row, col) + gate(col) * v;
        store_any(out, row, col, v);
      });
      return;
    }
    if (s.bias.data) this->add_bias(row_of<const float>(s.bias, 0) + part.first_col);
    if (gate_residual) {
      float gates[Tile::kMmaN][2];
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) gates[n][e] = gate(this->col0 + Tile::col_of_acc(n) + e);
      }
      this->for_each_row([&](int m, int half, uint32_t, uint64_t row) {
        if (!this->row_exists(row)) return;
        const bf16* from = row_of<const bf16>(out, row) + this->col0 + Tile::col_of_acc(0);
#pragma unroll
        for (int n = 0; n < Tile::kMmaN; n++) {
          const float2 old = load_pair(from + n * 8);
          float* v = &tile.acc[m][n][2 * half];
          v[0] = old.x + gates[n][0] * v[0];
          v[1] = old.y + gates[n][1] * v[1];
        }
      });
    }
    this->stage();
    this->store_staged();
  }

  __device__ __forceinline__ void swiglu() const {
    uint32_t beyond = 0;
    this->for_each_row([&](int m, int half, uint32_t row, uint64_t r) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n += 2) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; e++) v[e] = silu(tile.acc[m][n][2 * half + e]) * (tile.acc[m][n + 1][2 * half + e] * part.scale);
        const uint32_t col = interleaved_column(Tile::col_of_acc(n), 0);
        const auto exists = [&](int e) { return this->row_exists(r) && this->col0 + col + e < out.cols; };
        if (out.dtype == KL_BF16) {
          Tile::stage_pair(shared, row, col, v[0], v[1]);
        } else if (out.dtype == KL_E4M3) {
          Tile::stage_e4m3(shared, row, col, v[0], v[1]);
#pragma unroll
          for (int e = 0; e < 2; e++) beyond += exists(e) && fabsf(v[e]) >= kE4m3Overflow;
        } else {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (exists(e)) row_of<float>(out, r)[this->col0 + col + e] = v[e];
          }
        }
      }
    });
    if (out.dtype == KL_BF16) this->store_staged(Tile::kBlockN / 2);
    if (out.dtype == KL_E4M3) store_e4m3(beyond, Tile::kBlockN / 2);
  }

  // Stores a tile staged in e4m3, and counts the values that did not fit.
  __device__ __forceinline__ void store_e4m3(uint32_t beyond, uint32_t width) const {
    add_saturated(saturated, beyond);
    Tile::template store_staged<e4m3>(shared, out, this->row0, this->col0, width);
  }

  // The column within a head of the element in acc[m][n][..].
  __device__ __forceinline__ uint32_t head_column(int n) const {
    const uint32_t col = Tile::col_of_acc(n);
    return s.rope == KL_ROPE_HALF_SPLIT ? interleaved_column(col, 64) : col;
  }

  __device__ __forceinline__ void qk_norm_rope() const {
    const float* weight = row_of<const float>(part.extra, 0);
    // Two warps hold one half each of a row's columns. Both write their sum of squares to shared memory and read the other warp's.
    float* squares = reinterpret_cast<float*>(shared);
    const uint32_t side = threadIdx.x / 32 % 2;
    this->for_each_row([&](int m, int half, uint32_t row, uint64_t) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) sum += tile.acc[m][n][2 * half + e] * tile.acc[m][n][2 * half + e];
      }
      sum = quad_sum(sum);
      if (threadIdx.x % 4 == 0) squares[side * Tile::kBlockM + row] = sum;
    });
    __syncthreads();
    this->for_each_row([&](int m, int half, uint32_t row, uint64_t r) {
      const float scale = qk_norm_scale(squares[row] + squares[Tile::kBlockM + row], 128.0f, s.eps, part.scale);
      // The row's angles: 64 cosines, then 64 sines.
      const float* angles = row_of<const float>(s.table, this->row_exists(r) ? r : 0);
      const auto rotate = [&](float& a, float& b, uint32_t pair) { rope_rotate(a, b, angles[pair], angles[64 + pair]); };
      // A pair is two adjacent columns or, half-split, two columns of the tile that are eight apart and 64 apart in the head.
      const bool interleaved = s.rope == KL_ROPE_INTERLEAVED;
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n += 2) {
        const uint32_t col = head_column(n), next = head_column(n + 1);
        float &a = tile.acc[m][n][2 * half], &b = tile.acc[m][n][2 * half + 1];
        float &c = tile.acc[m][n + 1][2 * half], &d = tile.acc[m][n + 1][2 * half + 1];
        a *= scale * weight[col], b *= scale * weight[col + 1], c *= scale * weight[next], d *= scale * weight[next + 1];
        if (interleaved) {
          rotate(a, b, col / 2);
          rotate(c, d, next / 2);
        } else {
          rotate(a, c, col);
          rotate(b, d, col + 1);
        }
      }
    });
    __syncthreads();  // all warps have read the sums of squares
    if (out.dtype == KL_E4M3) {
      uint32_t beyond = 0;
      this->for_each_row([&](int m, int half, uint32_t row, uint64_t r) {
#pragma unroll
        for (int n = 0; n < Tile::kMmaN; n++) {
          const float* v = &tile.acc[m][n][2 * half];
          Tile::stage_e4m3(shared, row, head_column(n), v[0], v[1]);
          if (this->row_exists(r)) beyond += saturated_of<2>(v);
        }
      });
      store_e4m3(beyond, Tile::kBlockN);
      return;
    }
    this->stage([&](int n) { return head_column(n); });
    this->store_staged();
  }
};

template <class Tile>
__device__ __forceinline__ void finish_gemm_tile(const KlGemmStream& s, const KlOutputRange& part, uint64_t saturated, Tile& tile,
                                                 unsigned char* shared, uint32_t row_tile, uint32_t col_tile) {
  const uint32_t width = part.epilogue == KL_SWIGLU ? Tile::kBlockN / 2 : Tile::kBlockN;
  const GemmEpilogue<Tile> epilogue(s, part, saturated, tile, shared, row_tile, col_tile, width);
  epilogue.apply_scales();
  if (s.down_out.data) epilogue.add_lora();
  if (part.epilogue == KL_SWIGLU) {
    epilogue.swiglu();
  } else if (part.epilogue == KL_QK_NORM_ROPE) {
    epilogue.qk_norm_rope();
  } else {
    epilogue.linear();
  }
}
}  // namespace kl::gemm::portable
