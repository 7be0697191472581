// Attention with a wide head on tensor cores by mma.sync: the body of entry/attention_wide_bf16_sm80.cu.
//
// Online softmax as in attention_bf16_sm80.cu. A row of the output is too wide for the registers of one warp, so the two MMAs are split
// across warps in two ways: Q K^T by queries and keys, P V by output columns. P passes from one to the other through shared memory, 32 keys
// at a time, together with the correction by which a new row maximum rescales the output. K is copied while V is used, and V while K is.
#pragma once

#include <attention/load_rows.cuh>
#include <attention/softmax.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/sm80.cuh>

KL_DYNAMIC_SHARED(128);

namespace kl::attention::portable {
template <int kBlockQ, int kHeadDim, int kWarps>
struct Wide {
  static_assert(kHeadDim == KL_WIDE_HEAD && kBlockQ == 8 * kWarps, "two warps have 16 queries of Q K^T");
  static constexpr int kBlockKV = 32, kThreads = 32 * kWarps;
  static constexpr uint32_t kRowBytes = kHeadDim * 2, kTileBytes = kBlockKV * kRowBytes;
  // For Q K^T a warp has 16 queries by half of the keys, for P V all queries by kWarpCols columns.
  static constexpr int kMmaM = kBlockQ / 16, kWarpCols = kHeadDim / kWarps;
  static constexpr uint32_t kKOffset = kBlockQ * kRowBytes, kVOffset = kKOffset + kTileBytes, kPOffset = kVOffset + kTileBytes;
  static constexpr uint32_t kSideStatsOffset = kPOffset + kBlockQ * kBlockKV * 2, kCorrectionOffset = kSideStatsOffset + 2 * kBlockQ * 4;
  static constexpr uint32_t kSharedBytes = kCorrectionOffset + kBlockQ * 4;

  // An offset in P. A row of P has a query's probabilities for the keys of a block.
  static __device__ __forceinline__ uint32_t swizzled_p(uint32_t row, uint32_t chunk) { return swizzled<kBlockKV * 2>(row, chunk); }

  template <int kRows>
  static __device__ __forceinline__ void load_rows(uint32_t to, const KlMat& m, uint32_t first, uint32_t col) {
    load_rows_async<bf16, kHeadDim, kThreads, kRows, /*unroll*/ 4, /*clip*/ true>(to, m, first, col);
  }

  static __device__ __forceinline__ void run(const KlAttention& p) {
    const uint32_t base = shared_address(dynamic_shared), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t side = warp % 2, score_row = warp / 2 * 16;  // the half of the keys, and the first query, of the warp's scores
    const uint32_t query0 = blockIdx.x * kBlockQ, q_col = blockIdx.y * kHeadDim, kv_col = blockIdx.y / p.group * kHeadDim;
    const KlMat &k = p.kv[0].k, &v = p.kv[0].v;
    float* const side_stats = reinterpret_cast<float*>(dynamic_shared + kSideStatsOffset);
    float* const corrections = reinterpret_cast<float*>(dynamic_shared + kCorrectionOffset);
    const Exp2 exponential{p.scale * kLog2e};

    float out[kMmaM][kWarpCols / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    load_rows<kBlockQ>(base, p.q, query0, q_col);
    load_rows<kBlockKV>(base + kKOffset, k, 0, kv_col);
    cp_async_commit();
    for (uint32_t key0 = 0; key0 < k.rows; key0 += kBlockKV) {
      cp_async_wait<0>();
      __syncthreads();  // K has arrived, and all warps are done with the previous V
      load_rows<kBlockKV>(base + kVOffset, v, key0, kv_col);
      cp_async_commit();

      // Even and odd k16 steps have accumulators of their own: the MMAs of a single dependency chain would wait for each other.
      float scores[2][4] = {}, odd[2][4] = {};
#pragma unroll 4
      for (int d = 0; d < kHeadDim / 16; d++) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, base + swizzled<kRowBytes>(score_row + lane % 16, 2 * d + lane / 16));
        ldmatrix_x4(b, base + kKOffset + swizzled<kRowBytes>(side * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
        mma(d % 2 ? odd[0] : scores[0], a, b[0], b[1]);
        mma(d % 2 ? odd[1] : scores[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) scores[i / 4][i % 4] += odd[i / 4][i % 4];
      const auto score = [&](int half, int i) -> float& { return scores[i / 2][2 * half + i % 2]; };
      float local_max[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (key0 + side * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2 >= k.rows) score(half, i) = -INFINITY;
        }
        local_max[half] = quad_row_max<4>(-INFINITY, [&](int i) { return score(half, i); });
        if (lane % 4 == 0) side_stats[side * kBlockQ + score_row + half * 8 + lane / 4] = local_max[half];
      }
      __syncthreads();  // the maxima of both sides are there, and all warps are done with K
      if (key0 + kBlockKV < k.rows) load_rows<kBlockKV>(base + kKOffset, k, key0 + kBlockKV, kv_col);
      cp_async_commit();

#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = score_row + half * 8 + lane / 4;
        // The first block has a key for every query, so the maximum is always finite.
        const float new_max = fmaxf(row_max[half], fmaxf(local_max[half], side_stats[(side ^ 1) * kBlockQ + row]));
        const float correction =
            online_softmax<4>(row_max[half], row_sum[half], new_max, exponential, [&](int i) -> float& { return score(half, i); });
        if (side == 0 && lane % 4 == 0) corrections[row] = correction;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          unsigned char* const to = dynamic_shared + kPOffset + swizzled_p(row, side * 2 + i) + lane % 4 * 4;
          store_pair(reinterpret_cast<bf16*>(to), score(half, 2 * i), score(half, 2 * i + 1));
        }
      }
      cp_async_wait<1>();
      __syncthreads();  // V, P and the corrections are there

#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
        const float low = corrections[m * 16 + lane / 4], high = corrections[m * 16 + 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < kWarpCols / 8; n++) out[m][n][0] *= low, out[m][n][1] *= low, out[m][n][2] *= high, out[m][n][3] *= high;
      }
#pragma unroll
      for (int step = 0; step < kBlockKV / 16; step++) {
        uint32_t p_frag[kMmaM][4];
#pragma unroll
        for (int m = 0; m < kMmaM; m++) ldmatrix_x4(p_frag[m], base + kPOffset + swizzled_p(m * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int n = 0; n < kWarpCols / 16; n++) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, base + kVOffset + swizzled<kRowBytes>(step * 16 + lane % 16, warp * (kWarpCols / 8) + 2 * n + lane / 16));
#pragma unroll
          for (int m = 0; m < kMmaM; m++) {
            mma(out[m][2 * n], p_frag[m], b[0], b[1]);
            mma(out[m][2 * n + 1], p_frag[m], b[2], b[3]);
          }
        }
      }
    }

    // Each side has the row sums of its own keys. The sides exchange and add them.
#pragma unroll
    for (int half = 0; half < 2; half++) {
      row_sum[half] = quad_sum(row_sum[half]);
      if (lane % 4 == 0) side_stats[side * kBlockQ + score_row + half * 8 + lane / 4] = row_sum[half];
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = m * 16 + half * 8 + lane / 4;
        if (query0 + row >= p.out.rows) continue;
        const float inverse = 1.0f / (side_stats[row] + side_stats[kBlockQ + row]);
        bf16* const to = row_of<bf16>(p.out, query0 + row) + q_col + warp * kWarpCols + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kWarpCols / 8; n++) {
          if (q_col + warp * kWarpCols + n * 8 >= p.out.cols) continue;
          store_pair(to + n * 8, out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse);
        }
      }
    }
  }
};
}  // namespace kl::attention::portable
