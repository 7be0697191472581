// The first product of a LoRA branch (Hu et al. 2021), portable (sm_80 and newer): the input times the down matrix. It runs before the
// GEMM, which multiplies the result by the up matrix in its epilogue.
//
//   kl_lora_down   out = x down^T   x of bf16, e4m3 or e2m1, as the GEMM takes it; down and out of bf16
//
// Inputs do not go through shared memory. The order of K is free as long as both operands agree, so a lane loads sixteen consecutive bytes
// of a row of either one and takes them for the elements of K that MMA fragments have in its place. The warps of a CTA divide K among them,
// and add up their sums at the end. The grid has the rows of the longest stream along x, the columns along y, and a stream per index along
// z.
// Bound: memory. x is read once for up to 64 columns, mostly from L2, where the op before has left it.
// Needs: columns of x a multiple of 16, of out of KL_LORA_DOWN_STEP; rows that begin at multiples of 16 bytes.
#include <common/expand.cuh>
#include <common/math.cuh>
#include <common/mma.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/entry.cuh>

constexpr int kWarps = KL_LORA_DOWN_THREADS / 32, kMmaM = KL_LORA_DOWN_ROWS / 16, kMaxMmaN = KL_LORA_DOWN_COLS / 8;

// A lane's load from a row: kElements elements. Index `v` selects eight of them as pairs of bf16, the lane's part of a row of A in two
// MMAs.
struct Bf16Rows {
  static constexpr int kElements = 8;
  static constexpr float kFactor = 1.0f;
  using Codes = uint4;

  static __device__ __forceinline__ Codes load(const KlMat& m, uint32_t row, uint32_t col) {
    return *reinterpret_cast<const uint4*>(row_of<const bf16>(m, row) + col);
  }
  static __device__ __forceinline__ uint4 expand(const Codes& codes, int) { return codes; }
};

struct E4m3Rows {
  static constexpr int kElements = 16;
  static constexpr float kFactor = 1.0f;
  using Codes = uint4;

  static __device__ __forceinline__ Codes load(const KlMat& m, uint32_t row, uint32_t col) {
    return *reinterpret_cast<const uint4*>(m.data + row * m.stride + col);
  }
  static __device__ __forceinline__ uint4 expand(const Codes& codes, int v) {
    const uint2 a = e4m3_to_bf16(v ? codes.z : codes.x), b = e4m3_to_bf16(v ? codes.w : codes.y);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
};

struct E2m1Rows {
  static constexpr int kElements = 16;
  static constexpr float kFactor = KL_E2M1_ALPHA;
  struct Codes {
    uint2 codes;
    uint32_t scale;
  };

  static __device__ __forceinline__ Codes load(const KlMat& m, uint32_t row, uint32_t col) {
    const uint32_t scale = block_scale_offset(row, col / 16, static_cast<uint32_t>(m.stride));
    return {*reinterpret_cast<const uint2*>(m.data + (row * m.stride + col) / 2), reinterpret_cast<const uint8_t*>(m.scales)[scale]};
  }
  static __device__ __forceinline__ uint4 expand(const Codes& codes, int v) {
    return e2m1_to_bf16(v ? codes.codes.y : codes.codes.x, block_scale(codes.scale));
  }
};

using Partials = float4[kWarps / 2][kMmaM * kMaxMmaN][32];

// Computes KL_LORA_DOWN_ROWS rows of 8 kMmaN columns.
template <class Rows, int kMmaN>
__device__ __forceinline__ void reduce_rows(const KlReduction& p, Partials& partials) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, quad = lane % 4;
  const uint32_t row0 = blockIdx.x * KL_LORA_DOWN_ROWS, col0 = blockIdx.y * KL_LORA_DOWN_COLS;
  constexpr uint32_t kVectors = Rows::kElements / 8, kStep = 4 * Rows::kElements;  // of K, for the lanes of a quad
  float acc[kMmaM][kMmaN][4] = {};
  // Rows past the end repeat the last one: their results are not stored.
  const auto x_row = [&](int i) { return min(row0 + line + 8 * i, p.x.rows - 1); };
  // As many loads in flight as registers allow.
  constexpr int kUnroll = kMmaN == 2 ? 2 : 1;
#pragma unroll kUnroll
  for (uint32_t k = warp * kStep; k < p.x.cols; k += kWarps * kStep) {
    const uint32_t col = k + quad * Rows::kElements;
    const bool exists = col < p.x.cols;
    typename Rows::Codes codes[2 * kMmaM] = {};
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; i++) {
      if (exists) codes[i] = Rows::load(p.x, x_row(i), col);
    }
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      uint4 b[kMmaN] = {};
#pragma unroll
      for (int n = 0; n < kMmaN; n++) {
        if (exists) b[n] = Bf16Rows::load(p.down, col0 + line + 8 * n, col + 8 * v);
      }
#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
        const uint4 upper = Rows::expand(codes[2 * m], v), lower = Rows::expand(codes[2 * m + 1], v);
        const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int n = 0; n < kMmaN; n++) {
          Bf16Mma::multiply(acc[m][n], first, b[n].x, b[n].y);
          Bf16Mma::multiply(acc[m][n], second, b[n].z, b[n].w);
        }
      }
    }
  }
  // In each round the upper half of the warps gives its sums to the lower half.
#pragma unroll
  for (uint32_t half = kWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < kMmaM * kMmaN; i++) {
        const float* v = acc[i / kMmaN][i % kMmaN];
        partials[warp - half][i][lane] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int i = 0; i < kMmaM * kMmaN; i++) add_vector(acc[i / kMmaN][i % kMmaN], partials[warp][i][lane]);
    }
    __syncthreads();
  }
  if (warp > 0) return;
  const float factor = Rows::kFactor * p.x.scale;
#pragma unroll
  for (int i = 0; i < 2 * kMmaM; i++) {
    const uint32_t row = row0 + line + 8 * i;
    if (row >= p.out.rows) continue;
#pragma unroll
    for (int n = 0; n < kMmaN; n++) {
      const float* v = &acc[i / 2][n][2 * (i % 2)];
      store_pair(row_of<bf16>(p.out, row) + col0 + 8 * n + 2 * quad, v[0] * factor, v[1] * factor);
    }
  }
}

template <class Rows>
__device__ __forceinline__ void reduce_stream(const KlReduction& p, Partials& partials) {
  const uint32_t cols = min(p.out.cols - blockIdx.y * KL_LORA_DOWN_COLS, KL_LORA_DOWN_COLS);
  if (cols == 16) return reduce_rows<Rows, 2>(p, partials);
  if (cols == 32) return reduce_rows<Rows, 4>(p, partials);
  if (cols == 48) return reduce_rows<Rows, 6>(p, partials);
  reduce_rows<Rows, 8>(p, partials);
}

KL_ENTRY(kl_lora_down, KlLoraDown, KL_LORA_DOWN_THREADS, 2) {
  KL_SHARED(Partials, partials, );
  const KlReduction& stream = p.stream[blockIdx.z];
  if (blockIdx.x * KL_LORA_DOWN_ROWS >= stream.out.rows || blockIdx.y * KL_LORA_DOWN_COLS >= stream.out.cols) return;
  if (stream.x.dtype == KL_BF16) return reduce_stream<Bf16Rows>(stream, partials);
  if (stream.x.dtype == KL_E4M3) return reduce_stream<E4m3Rows>(stream, partials);
  reduce_stream<E2m1Rows>(stream, partials);
}
