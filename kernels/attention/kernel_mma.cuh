// Attention with heads of 128 on tensor cores by mma.sync: softmax(q k^T * scale) v in one pass, as in FlashAttention-2 (Dao 2023). Scores
// exist one block of keys at a time, and where softmax is online the output is rescaled when the row maximum rises.
//
// A CTA takes 128 queries of one head, and its warps have 32 or 16 each. K and V come in blocks, double-buffered by cp.async. Scores and
// accumulators are f32; probabilities are rounded to bf16 for the P V MMAs, as plain bf16 arithmetic does.
#pragma once

#include <attention/kv_cursor.cuh>
#include <attention/load_rows.cuh>
#include <attention/softmax.cuh>
#include <attention/store_output.cuh>
#include <common/mma.cuh>
#include <common/vectors.cuh>

namespace kl::attention::portable {
constexpr int kHeadDim = KL_MMA_COLS, kBlockQ = KL_ATTENTION_BLOCK_Q;

// The configuration of a kernel: its warps, the keys of a block, the MMA of queries and keys, the exponential of its softmax, and whether
// it takes a causal mask.
template <int kWarps, int kBlockKV_, class QKMma_, class Exponential_, bool kMayBeCausal_>
struct AttentionConfig {
  using QKMma = QKMma_;
  using QKElement = typename QKMma::Element;
  using Exponential = Exponential_;
  static constexpr int kThreads = 32 * kWarps, kBlockKV = kBlockKV_;
  static constexpr bool kMayBeCausal = kMayBeCausal_;
  static constexpr int kMmaM = kBlockQ / (16 * kThreads / 32);  // MMA tiles of 16 rows per warp
  static constexpr uint32_t kQKRowBytes = kHeadDim * sizeof(QKElement), kVRowBytes = kHeadDim * sizeof(bf16);
  static constexpr uint32_t kQBytes = kBlockQ * kQKRowBytes, kKBytes = kBlockKV * kQKRowBytes, kStageBytes = kKBytes + kBlockKV * kVRowBytes;
  static constexpr uint32_t kSharedBytes = kQBytes + 2 * kStageBytes;
};

// The segments up to key `limit`, after which a causal mask leaves nothing.
struct Segments {
  static constexpr bool kMayBeEmpty = true;
  const KlAttention& p;
  uint32_t limit;

  __device__ __forceinline__ uint32_t count() const { return p.segments; }
  __device__ __forceinline__ uint32_t keys(uint32_t segment) const { return min(p.kv[segment].k.rows, limit); }
};

// The exponential that applies to the scores of a segment's keys.
__device__ __forceinline__ Exp2Masked exponential_of(Type<Exp2Masked>, const KlAttention& p, uint32_t) { return {p.scale * kLog2e}; }
__device__ __forceinline__ Exp2MaxFree exponential_of(Type<Exp2MaxFree>, const KlAttention&, uint32_t) { return {}; }
__device__ __forceinline__ Exp2Scaled exponential_of(Type<Exp2Scaled>, const KlAttention& p, uint32_t segment) {
  return {p.scale * kLog2e * p.q.scale * p.kv[segment].k.scale};
}

template <class Config>
__device__ __forceinline__ void attention(const KlAttention& p, unsigned char* shared) {
  using QKElement = typename Config::QKElement;
  using Cursor = KVCursor<Config::kBlockKV, Segments>;
  constexpr int kThreads = Config::kThreads, kBlockKV = Config::kBlockKV, kMmaM = Config::kMmaM;
  constexpr uint32_t kQKRowBytes = Config::kQKRowBytes, kVRowBytes = Config::kVRowBytes;
  const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kMmaM;
  const uint32_t query0 = blockIdx.x * kBlockQ;
  const uint32_t q_col = blockIdx.y * kHeadDim, kv_col = blockIdx.y / p.group * kHeadDim;
  const uint32_t q_at = shared_address(shared), tiles_at = q_at + Config::kQBytes;
  const auto causal = [&] { return Config::kMayBeCausal && p.causal; };  // read from constant memory where it is needed
  // With a causal mask no query of this CTA attends to a key past its last row.
  const uint32_t limit = causal() ? query0 + kBlockQ : ~0u;

  constexpr int kUnroll = 2;
  const auto load_kv = [&](const Cursor& c, uint32_t stage) {
    if (!c.at_end()) {
      const uint32_t to = tiles_at + stage * Config::kStageBytes;
      load_rows_async<QKElement, kHeadDim, kThreads, kBlockKV, kUnroll>(to, p.kv[c.segment].k, c.key, kv_col);
      load_rows_async<bf16, kHeadDim, kThreads, kBlockKV, kUnroll>(to + Config::kKBytes, p.kv[c.segment].v, c.key, kv_col);
    }
    cp_async_commit();
  };

  float out[kMmaM][kHeadDim / 8][4] = {}, row_max[kMmaM][2], row_sum[kMmaM][2] = {};
#pragma unroll
  for (int m = 0; m < kMmaM; m++) row_max[m][0] = row_max[m][1] = -INFINITY;

  Cursor now{{p, limit}};
  now.skip_empty();
  load_rows_async<QKElement, kHeadDim, kThreads, kBlockQ, kUnroll>(q_at, p.q, query0, q_col);
  load_kv(now, 0);
  for (uint32_t stage = 0; !now.at_end(); stage ^= 1) {
    {
      Cursor after = now;
      after.next();
      load_kv(after, stage ^ 1);
    }
    cp_async_wait<1>();
    __syncthreads();
    const uint32_t k_at = tiles_at + stage * Config::kStageBytes, v_at = k_at + Config::kKBytes;

    float scores[kMmaM][kBlockKV / 8][4] = {};
#pragma unroll 2
    for (int d = 0; d < static_cast<int>(kQKRowBytes) / 32; d++) {
      uint32_t q[kMmaM][4];
#pragma unroll
      for (int m = 0; m < kMmaM; m++) ldmatrix_x4(q[m], q_at + swizzled<kQKRowBytes>(warp_row + m * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int n = 0; n < kBlockKV / 16; n++) {
        uint32_t k[4];
        ldmatrix_x4(k, k_at + swizzled<kQKRowBytes>(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kMmaM; m++) {
          Config::QKMma::multiply(scores[m][2 * n], q[m], k[0], k[1]);
          Config::QKMma::multiply(scores[m][2 * n + 1], q[m], k[2], k[3]);
        }
      }
    }

    // Masks keys past the end of the segment and, with a causal mask, keys after the query.
    const uint32_t keys = p.kv[now.segment].k.rows;
    if (now.key + kBlockKV > keys || (causal() && now.key + kBlockKV > query0)) {
#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
#pragma unroll
        for (int n = 0; n < kBlockKV / 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const uint32_t key = now.key + n * 8 + lane % 4 * 2 + e % 2;
            const uint32_t query = query0 + warp_row + m * 16 + lane / 4 + e / 2 * 8;
            if (key >= keys || (causal() && key > query)) scores[m][n][e] = -INFINITY;
          }
        }
      }
    }

    const auto exponential = exponential_of(Type<typename Config::Exponential>(), p, now.segment);
#pragma unroll
    for (int m = 0; m < kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const auto score = [&](int i) -> float& { return scores[m][i / 2][2 * half + i % 2]; };
        const float new_max = raised_max<kBlockKV / 4>(exponential, row_max[m][half], score);
        const float correction = online_softmax<kBlockKV / 4>(row_max[m][half], row_sum[m][half], new_max, exponential, score);
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; n++) out[m][n][2 * half] *= correction, out[m][n][2 * half + 1] *= correction;
      }
    }
#pragma unroll
    for (int k = 0; k < kBlockKV / 16; k++) {
      // The accumulator layout of two score fragments is the A operand layout of one P V MMA.
      uint32_t p_frag[kMmaM][4];
#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* v = &scores[m][2 * k + i / 2][i % 2 * 2];
          p_frag[m][i] = pack_bf16(v[0], v[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 16; n++) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, v_at + swizzled<kVRowBytes>(k * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
        for (int m = 0; m < kMmaM; m++) {
          mma(out[m][2 * n], p_frag[m], v[0], v[1]);
          mma(out[m][2 * n + 1], p_frag[m], v[2], v[3]);
        }
      }
    }
    __syncthreads();  // all warps are done with this stage
    now.next();
  }

#pragma unroll
  for (int m = 0; m < kMmaM; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t query = query0 + warp_row + m * 16 + half * 8 + lane / 4;
      const auto value = [&](int n, int i) { return out[m][n][2 * half + i]; };
      store_output_row<kHeadDim>(p.out, query, q_col, 1.0f / quad_sum(row_sum[m][half]), p.saturated, value);
    }
  }
}
}  // namespace kl::attention::portable
