// The norm of queries and keys (qk-norm) with rotary position embedding, where no GEMM epilogue has fused it.
//
//   kl_qk_norm_rope  each head of x: RMS norm with weight (if there is one), times scale, then RoPE by the row's angles, in place
//                    table [rows, d]: d/2 cosines, then d/2 sines; pairs are interleaved (2i, 2i+1) or half-split (i, i + d/2)
//
// Bound: HBM. A warp holds a head in registers between its norm and its rotation.
#include <common/reduce.cuh>
#include <common/rope.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/entry.cuh>

// Heads of 128: a lane has two pairs of each head, and keeps their angles and weights in registers for all heads of the row.
template <class X, bool kInterleaved>
__device__ __forceinline__ void qk_norm_rope_128(const KlQkHeads& part, uint64_t row, uint32_t first, uint32_t last, float eps) {
  // The lane loads two adjacent elements twice: from 4 l and 4 l + 2 (interleaved), or from 2 l and 64 + 2 l (half-split).
  const uint32_t low = kInterleaved ? 4 * lane() : 2 * lane(), high = kInterleaved ? low + 2 : low + 64;
  const float *angles = row_of<const float>(part.table, row), *weight = row_of<const float>(part.weight, 0);
  const uint32_t pair = 2 * lane();  // in both layouts the lane has pairs 2 l and 2 l + 1
  const float c0 = angles[pair], c1 = angles[pair + 1], s0 = angles[64 + pair], s1 = angles[64 + pair + 1];
  const float w0 = weight[low], w1 = weight[low + 1], w2 = weight[high], w3 = weight[high + 1];
  X* at = row_of<X>(part.x, row);
#pragma unroll 4
  for (uint32_t head = first; head < last; head++) {
    X* const x = at + head * 128;
    const float2 a = load_pair(x + low), b = load_pair(x + high);
    const float squares = warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
    const float scale = qk_norm_scale(squares, 128.0f, eps, part.scale);
    float v0 = a.x * scale * w0, v1 = a.y * scale * w1, v2 = b.x * scale * w2, v3 = b.y * scale * w3;
    rope_rotate(v0, kInterleaved ? v1 : v2, c0, s0);
    rope_rotate(kInterleaved ? v2 : v1, v3, c1, s1);
    store_pair(x + low, v0, v1);
    store_pair(x + high, v2, v3);
  }
}

// Heads of any even size at any alignment.
template <class X>
__device__ __forceinline__ void qk_norm_rope_any(const KlQkHeads& part, uint64_t row, uint32_t first, uint32_t last, uint32_t d,
                                                 bool interleaved, float eps) {
  const uint32_t half = d / 2;
  const float *angles = row_of<const float>(part.table, row), *weight = row_of<const float>(part.weight, 0);
  for (uint32_t head = first; head < last; head++) {
    X* const x = row_of<X>(part.x, row) + static_cast<uint64_t>(head) * d;
    float squares = 0.0f;
    for (uint32_t i = lane(); i < d; i += 32) squares += to_float(x[i]) * to_float(x[i]);
    const float scale = qk_norm_scale(warp_sum(squares), static_cast<float>(d), eps, part.scale);
    for (uint32_t pair = lane(); pair < half; pair += 32) {
      const uint32_t i = interleaved ? 2 * pair : pair, j = interleaved ? i + 1 : pair + half;
      float a = to_float(x[i]) * scale * weight[i], b = to_float(x[j]) * scale * weight[j];
      rope_rotate(a, b, angles[pair], angles[half + pair]);
      x[i] = from_float<X>(a);
      x[j] = from_float<X>(b);
    }
    __syncwarp();
  }
}

// Heads of any even size at any alignment, for models without a qk-norm.
template <class X>
__device__ __forceinline__ void rope_any(const KlQkHeads& part, uint64_t row, uint32_t first, uint32_t last, uint32_t d,
                                         bool interleaved) {
  const uint32_t half = d / 2;
  const float* angles = row_of<const float>(part.table, row);
  X* const x = row_of<X>(part.x, row);
  for (uint32_t i = first * half + lane(); i < last * half; i += 32) {
    const uint32_t pair = i % half;
    X* const head = x + static_cast<uint64_t>(i / half) * d;
    X &even = head[interleaved ? 2 * pair : pair], &odd = head[interleaved ? 2 * pair + 1 : pair + half];
    float a = to_float(even) * part.scale, b = to_float(odd) * part.scale;
    rope_rotate(a, b, angles[pair], angles[half + pair]);
    even = from_float<X>(a);
    odd = from_float<X>(b);
  }
}

// A warp takes one row and KL_HEADS_PER_WARP of its heads. The rows of all parts are in sequence along the grid's x, the heads along y.
KL_ENTRY(kl_qk_norm_rope, KlQkNormRope, KL_NORM_THREADS) {
  uint64_t row = blockIdx.x * (KL_NORM_THREADS / 32) + threadIdx.x / 32;
  uint32_t index = 0;
  while (index < KL_QK_PARTS && row >= p.part[index].x.rows) row -= p.part[index++].x.rows;
  if (index == KL_QK_PARTS) return;
  const KlQkHeads& part = p.part[index];
  const uint32_t heads = part.x.cols / p.head_dim, first = blockIdx.y * KL_HEADS_PER_WARP;
  const uint32_t last = min(heads, first + KL_HEADS_PER_WARP);
  const bool interleaved = p.style == KL_ROPE_INTERLEAVED;
  with_type(part.x.dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    const bool pairs = part.x.data % (2 * sizeof(X)) == 0 && part.x.stride % 2 == 0;
    if (part.weight.data == 0) {
      rope_any<X>(part, row, first, last, p.head_dim, interleaved);
    } else if (p.head_dim != 128 || !pairs) {
      qk_norm_rope_any<X>(part, row, first, last, p.head_dim, interleaved, p.eps);
    } else if (interleaved) {
      qk_norm_rope_128<X, true>(part, row, first, last, p.eps);
    } else {
      qk_norm_rope_128<X, false>(part, row, first, last, p.eps);
    }
  });
}
