// Attention with a head of 512 on tensor cores, portable (sm_80 and newer): the VAE's single head over all pixels of its latent.
//
//   kl_attention_wide_64, kl_attention_wide_32   softmax(q k^T * scale) v, one run of keys; a block takes 64 or 32 queries
//
// A row of results is too wide for one warp's registers, so both products are shared by all warps in two ways: scores by queries and
// keys, results by columns. Weights pass from one to the other through shared memory, 32 keys at a time, with the factor by which a
// new maximum shrinks what is already summed. Keys are copied while values are used, and values while keys are.
// Bound: tensor cores. 4 * queries * keys * 512 operations: 0.55 TFLOP for 1024x1024. The smaller block is for GPUs with less than
// 132 KiB of shared memory for a block.
// Needs: bf16, strides multiples of 8, 16-byte addresses; results at 4-byte addresses.
#include "mma.cuh"

constexpr int kHead = 512, kKeys = 32;
constexpr uint32_t kRowBytes = kHead * 2, kTileBytes = kKeys * kRowBytes;

extern __shared__ __align__(128) unsigned char dynamic_shared[];

template <int kQueries>
struct Wide {
  static constexpr int kWarps = kQueries / 8, kThreads = kWarps * 32;
  // Scores: a warp has 16 queries by half the keys. Results: all queries by kCols columns.
  static constexpr int kM = kQueries / 16, kCols = kHead / kWarps;
  static constexpr uint32_t kKeysAt = kQueries * kRowBytes, kValuesAt = kKeysAt + kTileBytes, kWeightsAt = kValuesAt + kTileBytes;
  static constexpr uint32_t kHalvesAt = kWeightsAt + kQueries * kKeys * 2, kFactorsAt = kHalvesAt + 2 * kQueries * 4;
  static constexpr uint32_t kSharedBytes = kFactorsAt + kQueries * 4;

  // 16-byte chunks are exchanged by the row's bits, so that the eight rows of a matrix lie in eight bank groups.
  static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t chunk) { return row * kRowBytes + (chunk ^ (row & 7)) * 16; }
  static __device__ __forceinline__ uint32_t weight_place(uint32_t row, uint32_t chunk) {
    return row * (kKeys * 2) + ((chunk ^ (row >> 1)) & 3) * 16;
  }

  // Copies rows of one head; rows beyond the matrix become zeros.
  template <int kCount>
  static __device__ __forceinline__ void fetch(uint32_t to, const KlMat& m, uint32_t first, uint32_t col) {
#pragma unroll 4
    for (int i = 0; i < kCount * (kHead / 8) / kThreads; i++) {
      const uint32_t at = i * kThreads + threadIdx.x, row = at / (kHead / 8), chunk = at % (kHead / 8);
      const bool valid = first + row < m.rows;
      copy_async(to + place(row, chunk), row_of<const bf16>(m, valid ? first + row : 0) + col + chunk * 8, valid);
    }
  }

  static __device__ __forceinline__ void run(const KlAttention& p) {
    const uint32_t base = shared_address(dynamic_shared), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t side = warp % 2, score_row = warp / 2 * 16;  // of the warp's scores
    const uint32_t query0 = blockIdx.x * kQueries, q_col = blockIdx.y * kHead, kv_col = blockIdx.y / p.group * kHead;
    const KlMat &k = p.kv[0].k, &v = p.kv[0].v;
    float* const halves = reinterpret_cast<float*>(dynamic_shared + kHalvesAt);
    float* const factors = reinterpret_cast<float*>(dynamic_shared + kFactorsAt);
    const float scale = p.scale * 1.44269504f;  // powers of two are what the hardware has

    float out[kM][kCols / 8][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, total[2] = {};
    fetch<kQueries>(base, p.q, query0, q_col);
    fetch<kKeys>(base + kKeysAt, k, 0, kv_col);
    copy_commit();
    for (uint32_t key0 = 0; key0 < k.rows; key0 += kKeys) {
      copy_wait<0>();
      __syncthreads();  // keys have arrived, and everyone is done with the values before them
      fetch<kKeys>(base + kValuesAt, v, key0, kv_col);
      copy_commit();

      // Even and odd steps are summed apart: one chain of products would wait for itself.
      float scores[2][4] = {}, odd[2][4] = {};
#pragma unroll 4
      for (int d = 0; d < kHead / 16; d++) {
        uint32_t a[4], b[4];
        load_matrices(a, base + place(score_row + lane % 16, 2 * d + lane / 16));
        load_matrices(b, base + kKeysAt + place(side * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
        mma(d % 2 ? odd[0] : scores[0], a, b[0], b[1]);
        mma(d % 2 ? odd[1] : scores[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) scores[i / 4][i % 4] += odd[i / 4][i % 4];
      float highest[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        highest[half] = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& score = scores[i / 2][2 * half + i % 2];
          if (key0 + side * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2 >= k.rows) score = -INFINITY;
          highest[half] = fmaxf(highest[half], score);
        }
        highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 1));
        highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 2));
        if (lane % 4 == 0) halves[side * kQueries + score_row + half * 8 + lane / 4] = highest[half];
      }
      __syncthreads();  // maxima are there, and everyone is done with the keys
      if (key0 + kKeys < k.rows) fetch<kKeys>(base + kKeysAt, k, key0 + kKeys, kv_col);
      copy_commit();

#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = score_row + half * 8 + lane / 4;
        // The first tile has a key for every query, so a maximum is always finite.
        const float now = fmaxf(maximum[half], fmaxf(highest[half], halves[(side ^ 1) * kQueries + row]));
        const float factor = power_of_two((maximum[half] - now) * scale), shift = now * scale;
        maximum[half] = now;
        float weight[4], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          weight[i] = power_of_two(scores[i / 2][2 * half + i % 2] * scale - shift);
          sum += weight[i];
        }
        total[half] = total[half] * factor + sum;
        if (side == 0 && lane % 4 == 0) factors[row] = factor;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          unsigned char* const to = dynamic_shared + kWeightsAt + weight_place(row, side * 2 + i) + lane % 4 * 4;
          *reinterpret_cast<uint32_t*>(to) = pack(weight[2 * i], weight[2 * i + 1]);
        }
      }
      copy_wait<1>();
      __syncthreads();  // values, weights and factors are there

#pragma unroll
      for (int m = 0; m < kM; m++) {
        const float low = factors[m * 16 + lane / 4], high = factors[m * 16 + 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < kCols / 8; n++) out[m][n][0] *= low, out[m][n][1] *= low, out[m][n][2] *= high, out[m][n][3] *= high;
      }
#pragma unroll
      for (int step = 0; step < kKeys / 16; step++) {
        uint32_t weights[kM][4];
#pragma unroll
        for (int m = 0; m < kM; m++) load_matrices(weights[m], base + kWeightsAt + weight_place(m * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int n = 0; n < kCols / 16; n++) {
          uint32_t b[4];
          load_matrices_transposed(b, base + kValuesAt + place(step * 16 + lane % 16, warp * (kCols / 8) + 2 * n + lane / 16));
#pragma unroll
          for (int m = 0; m < kM; m++) {
            mma(out[m][2 * n], weights[m], b[0], b[1]);
            mma(out[m][2 * n + 1], weights[m], b[2], b[3]);
          }
        }
      }
    }

    // Each side has summed its own keys' weights; factors now hold their sums' inverse.
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
      if (lane % 4 == 0) halves[side * kQueries + score_row + half * 8 + lane / 4] = total[half];
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = m * 16 + half * 8 + lane / 4;
        if (query0 + row >= p.out.rows) continue;
        const float inverse = 1.0f / (halves[row] + halves[kQueries + row]);
        bf16* const to = row_of<bf16>(p.out, query0 + row) + q_col + warp * kCols + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kCols / 8; n++) {
          *reinterpret_cast<uint32_t*>(to + n * 8) = pack(out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse);
        }
      }
    }
  }
};

static_assert(Wide<64>::kSharedBytes == KL_WIDE_SHARED_64 && Wide<64>::kThreads == KL_WIDE_THREADS_64, "abi.h states another size");
static_assert(Wide<32>::kSharedBytes == KL_WIDE_SHARED_32 && Wide<32>::kThreads == KL_WIDE_THREADS_32, "abi.h states another size");

KL_ENTRY(kl_attention_wide_64, KlAttention, KL_WIDE_THREADS_64, 1) { Wide<64>::run(p); }
KL_ENTRY(kl_attention_wide_32, KlAttention, KL_WIDE_THREADS_32, 2) { Wide<32>::run(p); }
