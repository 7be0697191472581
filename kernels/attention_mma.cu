// Attention on tensor cores, portable (sm_80 and newer): softmax(q k^T * scale) v in one pass, as in FlashAttention-2 (Dao 2023), with
// online softmax (Milakov and Gimelshein 2018): scores exist one block at a time, and the output is rescaled when the row maximum rises.
//
//   kl_attention_mma     heads of 128; several KV segments, grouped-query attention (GQA), optional causal mask
//   kl_attention_mma_8   the same with eight warps
//
// A CTA takes 128 queries of one head, four warps with 32 each; K and V come in blocks of 64 keys, double-buffered by cp.async. Scores
// and accumulators are f32; probabilities are rounded to bf16 for the P V MMAs, as plain bf16 arithmetic does. Tensor cores have work
// while one of two CTAs on an SM computes its softmax. Where shared memory has room for one only, it has eight warps with 16 queries each,
// which read K and V twice as often.
// Bound: tensor cores. 4 * queries * keys * 128 FLOP per head; klein 4B at 1024x1024: 0.26 TFLOP per transformer block.
// Needs: bf16, strides multiples of 8, 16-byte aligned addresses; the output may also be e4m3 or e2m1.
#include <attention/kv_cursor.cuh>
#include <attention/load_rows.cuh>
#include <attention/softmax.cuh>
#include <attention/store_output.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/sm80.cuh>

constexpr int kHeadDim = KL_MMA_COLS, kBlockKV = 64, kBlockQ = KL_ATTENTION_BLOCK_Q;
constexpr uint32_t kRowBytes = kHeadDim * 2, kTileBytes = kBlockKV * kRowBytes;
static_assert(kBlockQ * kRowBytes + 4 * kTileBytes == KL_ATTENTION_SHARED, "abi.h states another size");

// The segments up to key `limit`, past which a causal mask leaves nothing.
struct Segments {
  static constexpr bool kMayBeEmpty = true;
  const KlAttention& p;
  uint32_t limit;

  __device__ __forceinline__ uint32_t count() const { return p.segments; }
  __device__ __forceinline__ uint32_t keys(uint32_t segment) const { return min(p.kv[segment].k.rows, limit); }
};

using Cursor = KVCursor<kBlockKV, Segments>;

template <int kThreads, int kRows>
__device__ __forceinline__ void load_rows(uint32_t to, const KlMat& m, uint32_t first, uint32_t col) {
  load_rows_async<kHeadDim, kThreads, kRows, /*unroll*/ 2>(to, m, first, col);
}

template <int kThreads>
__device__ __forceinline__ void attention(const KlAttention& p, unsigned char* shared) {
  constexpr int kMmaM = kBlockQ / (16 * kThreads / 32);  // MMA tiles of 16 rows per warp
  const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kMmaM;
  const uint32_t query0 = blockIdx.x * kBlockQ;
  const uint32_t q_col = blockIdx.y * kHeadDim, kv_col = blockIdx.y / p.group * kHeadDim;
  const uint32_t q_at = shared_address(shared), tiles_at = q_at + kBlockQ * kRowBytes;
  // With a causal mask no query of this CTA attends to a key past its last row.
  const uint32_t limit = p.causal ? query0 + kBlockQ : ~0u;
  const Exp2Masked exponential{p.scale * kLog2e};

  const auto load_kv = [&](const Cursor& c, uint32_t stage) {
    if (!c.at_end()) {
      load_rows<kThreads, kBlockKV>(tiles_at + stage * 2 * kTileBytes, p.kv[c.segment].k, c.key, kv_col);
      load_rows<kThreads, kBlockKV>(tiles_at + stage * 2 * kTileBytes + kTileBytes, p.kv[c.segment].v, c.key, kv_col);
    }
    cp_async_commit();
  };

  float out[kMmaM][kHeadDim / 8][4] = {}, row_max[kMmaM][2], row_sum[kMmaM][2] = {};
#pragma unroll
  for (int m = 0; m < kMmaM; m++) row_max[m][0] = row_max[m][1] = -INFINITY;

  Cursor now{{p, limit}};
  now.skip_empty();
  load_rows<kThreads, kBlockQ>(q_at, p.q, query0, q_col);
  load_kv(now, 0);
  for (uint32_t stage = 0; !now.at_end(); stage ^= 1) {
    {
      Cursor after = now;
      after.next();
      load_kv(after, stage ^ 1);
    }
    cp_async_wait<1>();
    __syncthreads();
    const uint32_t k_at = tiles_at + stage * 2 * kTileBytes, v_at = k_at + kTileBytes;

    float scores[kMmaM][kBlockKV / 8][4] = {};
#pragma unroll 2
    for (int d = 0; d < kHeadDim / 16; d++) {
      uint32_t q[kMmaM][4];
#pragma unroll
      for (int m = 0; m < kMmaM; m++) ldmatrix_x4(q[m], q_at + swizzled<kRowBytes>(warp_row + m * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int n = 0; n < kBlockKV / 16; n++) {
        uint32_t k[4];
        ldmatrix_x4(k, k_at + swizzled<kRowBytes>(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kMmaM; m++) {
          mma(scores[m][2 * n], q[m], k[0], k[1]);
          mma(scores[m][2 * n + 1], q[m], k[2], k[3]);
        }
      }
    }

    // Masks keys beyond the end of the segment, and with a causal mask those after the query.
    const uint32_t keys = p.kv[now.segment].k.rows;
    if (now.key + kBlockKV > keys || (p.causal && now.key + kBlockKV > query0)) {
#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
#pragma unroll
        for (int n = 0; n < kBlockKV / 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const uint32_t key = now.key + n * 8 + lane % 4 * 2 + e % 2;
            const uint32_t query = query0 + warp_row + m * 16 + lane / 4 + e / 2 * 8;
            if (key >= keys || (p.causal && key > query)) scores[m][n][e] = -INFINITY;
          }
        }
      }
    }

    // Online softmax.
#pragma unroll
    for (int m = 0; m < kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const auto score = [&](int i) -> float& { return scores[m][i / 2][2 * half + i % 2]; };
        const float new_max = quad_row_max<kBlockKV / 4>(row_max[m][half], score);
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
        ldmatrix_x4_trans(v, v_at + swizzled<kRowBytes>(k * 16 + lane % 16, 2 * n + lane / 16));
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

KL_DYNAMIC_SHARED(128);

KL_ENTRY(kl_attention_mma, KlAttention, KL_ATTENTION_THREADS, 2) { attention<KL_ATTENTION_THREADS>(p, dynamic_shared); }
KL_ENTRY(kl_attention_mma_8, KlAttention, 2 * KL_ATTENTION_THREADS, 1) { attention<2 * KL_ATTENTION_THREADS>(p, dynamic_shared); }
