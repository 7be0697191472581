// Attention on tensor cores, portable (sm_80 and newer): softmax(q k^T * scale) v in one pass, as in FlashAttention-2 (Dao 2023), with
// online softmax (Milakov and Gimelshein 2018): scores exist one block at a time, and the output is rescaled when the row maximum rises.
//
//   kl_attention_mma   heads of 128; several KV segments, grouped-query attention (GQA), optional causal mask
//
// A CTA takes 128 queries of one head, four warps with 32 each; K and V come in blocks of 64 keys, double-buffered by cp.async. Scores
// and accumulators are f32; probabilities are rounded to bf16 for the P V MMAs, as plain bf16 arithmetic does.
// Bound: tensor cores. 4 * queries * keys * 128 FLOP per head; klein 4B at 1024x1024: 0.26 TFLOP per transformer block.
// Needs: bf16, strides multiples of 8, 16-byte aligned addresses.
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/sm80.cuh>

constexpr int kHeadDim = 128, kBlockKV = 64, kWarps = KL_MMA_THREADS / 32;
constexpr int kMmaM = KL_ATTENTION_BLOCK_Q / (16 * kWarps);  // MMA tiles of 16 rows per warp
constexpr int kBlockQ = KL_ATTENTION_BLOCK_Q;
constexpr uint32_t kRowBytes = kHeadDim * 2, kTileBytes = kBlockKV * kRowBytes;
static_assert(kBlockQ * kRowBytes + 4 * kTileBytes == KL_ATTENTION_SHARED, "abi.h states another size");

// The swizzle of rows of 256 bytes: 16-byte chunks are permuted by the row's last three bits, so that ldmatrix has no bank conflicts.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) { return row * kRowBytes + (chunk ^ (row & 7)) * 16; }

// Copies kCount rows of one head; rows beyond the matrix are zero-filled.
template <int kCount>
__device__ __forceinline__ void load_rows_async(uint32_t to, const KlMat& m, uint32_t first, uint32_t col) {
#pragma unroll 2
  for (int i = 0; i < kCount * 16 / static_cast<int>(KL_MMA_THREADS); i++) {
    const uint32_t at = i * KL_MMA_THREADS + threadIdx.x, row = at / 16, chunk = at % 16;
    const bool valid = first + row < m.rows;
    cp_async(to + swizzled(row, chunk), row_of<const bf16>(m, valid ? first + row : 0) + col + chunk * 8, valid);
  }
}

// The position of a KV block: its segment and first key.
struct KVCursor {
  uint32_t segment = 0;
  uint32_t key = 0;

  __device__ __forceinline__ bool at_end(const KlAttention& p) const { return segment >= p.segments; }

  // Skips segments that have no more keys.
  __device__ __forceinline__ void skip_empty(const KlAttention& p, uint32_t limit) {
    while (segment < p.segments && key >= min(p.kv[segment].k.rows, limit)) segment++, key = 0;
  }

  __device__ __forceinline__ void next(const KlAttention& p, uint32_t limit) {
    key += kBlockKV;
    skip_empty(p, limit);
  }
};

KL_DYNAMIC_SHARED(128);

KL_ENTRY(kl_attention_mma, KlAttention, KL_MMA_THREADS, 2) {
  const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kMmaM;
  const uint32_t query0 = blockIdx.x * kBlockQ;
  const uint32_t q_col = blockIdx.y * kHeadDim, kv_col = blockIdx.y / p.group * kHeadDim;
  const uint32_t q_at = shared_address(dynamic_shared), tiles_at = q_at + kBlockQ * kRowBytes;
  // With a causal mask no query of this CTA attends to a key past its last row.
  const uint32_t limit = p.causal ? query0 + kBlockQ : ~0u;
  const float scale = p.scale * 1.44269504f;  // log2(e): the hardware has exp2

  const auto load_kv = [&](const KVCursor& c, uint32_t stage) {
    if (!c.at_end(p)) {
      load_rows_async<kBlockKV>(tiles_at + stage * 2 * kTileBytes, p.kv[c.segment].k, c.key, kv_col);
      load_rows_async<kBlockKV>(tiles_at + stage * 2 * kTileBytes + kTileBytes, p.kv[c.segment].v, c.key, kv_col);
    }
    cp_async_commit();
  };

  float out[kMmaM][kHeadDim / 8][4] = {}, row_max[kMmaM][2], row_sum[kMmaM][2] = {};
#pragma unroll
  for (int m = 0; m < kMmaM; m++) row_max[m][0] = row_max[m][1] = -INFINITY;

  KVCursor now;
  now.skip_empty(p, limit);
  load_rows_async<kBlockQ>(q_at, p.q, query0, q_col);
  load_kv(now, 0);
  for (uint32_t stage = 0; !now.at_end(p); stage ^= 1) {
    {
      KVCursor after = now;
      after.next(p, limit);
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
      for (int m = 0; m < kMmaM; m++) ldmatrix_x4(q[m], q_at + swizzled(warp_row + m * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int n = 0; n < kBlockKV / 16; n++) {
        uint32_t k[4];
        ldmatrix_x4(k, k_at + swizzled(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
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
        float new_max = row_max[m][half];
#pragma unroll
        for (int n = 0; n < kBlockKV / 8; n++) new_max = fmaxf(new_max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 1));
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 2));
        // A row whose keys were all masked so far keeps zeros: -inf - -inf would be NaN.
        const float base = new_max == -INFINITY ? 0.0f : new_max * scale;
        const float correction = exp2_approx(row_max[m][half] * scale - base);
        row_max[m][half] = new_max;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlockKV / 8; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float prob = exp2_approx(scores[m][n][2 * half + e] * scale - base);
            scores[m][n][2 * half + e] = prob;
            sum += prob;
          }
        }
        row_sum[m][half] = row_sum[m][half] * correction + sum;
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
        ldmatrix_x4_trans(v, v_at + swizzled(k * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
        for (int m = 0; m < kMmaM; m++) {
          mma(out[m][2 * n], p_frag[m], v[0], v[1]);
          mma(out[m][2 * n + 1], p_frag[m], v[2], v[3]);
        }
      }
    }
    __syncthreads();  // all warps are done with this stage
    now.next(p, limit);
  }

#pragma unroll
  for (int m = 0; m < kMmaM; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = row_sum[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const uint32_t query = query0 + warp_row + m * 16 + half * 8 + lane / 4;
      if (query >= p.out.rows) continue;
      const float inverse = 1.0f / sum;
      bf16* to = row_of<bf16>(p.out, query) + q_col + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n++) {
        *reinterpret_cast<uint32_t*>(to + n * 8) = pack_bf16(out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse);
      }
    }
  }
}
