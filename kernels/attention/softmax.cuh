// Online softmax (Milakov and Gimelshein 2018). Scores come in blocks. A row keeps `row_max`, the largest score so far or a value not much
// smaller, and `row_sum`, the sum of the exponentials relative to it. When a block raises row_max, row_sum and the output are multiplied by
// a `correction`.
//
// A kernel chooses the exponential, which also says how scores are scaled:
//   Exp2         2^(scale * (score - row_max)), `scale` having a factor of log2(e): the hardware has exp2. The first block of a row must
//                have a key that is not masked, because -inf - -inf is NaN.
//   Exp2Masked   Exp2 for rows whose keys so far may all be masked
//   Exp2Scaled   Exp2 where blocks have scales of their own, so that row_max is an exponent: 2^(scale * score - row_max)
//   Exp2MaxFree  2^score without a maximum, for scores that are scaled and known to be bounded
//   NaturalExp   e^(score - row_max), for scores that are scaled
#pragma once

#include <common/reduce.cuh>
#include <ptx/sm80.cuh>

namespace kl::attention {
constexpr float kLog2e = 1.44269504f;

struct Exp2 {
  float scale;

  __device__ __forceinline__ float offset(float row_max) const { return row_max * scale; }
  __device__ __forceinline__ float correction(float old_max, float new_max) const { return exp2_approx((old_max - new_max) * scale); }
  __device__ __forceinline__ float prob(float score, float offset) const { return exp2_approx(score * scale - offset); }
};

struct Exp2Masked {
  float scale;

  __device__ __forceinline__ float offset(float row_max) const { return row_max == -INFINITY ? 0.0f : row_max * scale; }
  __device__ __forceinline__ float correction(float old_max, float new_max) const { return prob(old_max, offset(new_max)); }
  __device__ __forceinline__ float prob(float score, float offset) const { return exp2_approx(score * scale - offset); }
};

struct Exp2Scaled {
  float scale;

  __device__ __forceinline__ float offset(float row_max) const { return row_max; }
  __device__ __forceinline__ float correction(float old_max, float new_max) const { return exp2_approx(old_max - new_max); }
  __device__ __forceinline__ float prob(float score, float offset) const { return exp2_approx(score * scale - offset); }
};

struct Exp2MaxFree {
  __device__ __forceinline__ float offset(float) const { return 0.0f; }
  __device__ __forceinline__ float correction(float, float) const { return 1.0f; }
  __device__ __forceinline__ float prob(float score, float) const { return exp2_approx(score); }
};

struct NaturalExp {
  __device__ __forceinline__ float offset(float row_max) const { return row_max; }
  __device__ __forceinline__ float correction(float old_max, float new_max) const { return expf(old_max - new_max); }
  __device__ __forceinline__ float prob(float score, float offset) const { return expf(score - offset); }
};

// The maximum of row_max and a row's scores in a quad, kCount of them in each lane; score(i) returns a reference to the i-th.
template <int kCount, class Score>
__device__ __forceinline__ float quad_row_max(float row_max, Score score) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) row_max = fmaxf(row_max, fmaxf(score(i), score(i + 1)));
  return quad_max(row_max);
}

// The row maximum after a block.
template <int kCount, class Exponential, class Score>
__device__ __forceinline__ float raised_max(Exponential, float row_max, Score score) {
  return quad_row_max<kCount>(row_max, score);
}
template <int kCount, class Score>
__device__ __forceinline__ float raised_max(Exp2Scaled exponential, float row_max, Score score) {
  return fmaxf(row_max, quad_row_max<kCount>(-INFINITY, score) * exponential.scale);
}
template <int kCount, class Score>
__device__ __forceinline__ float raised_max(Exp2MaxFree, float row_max, Score) {
  return row_max;
}

// Replaces kCount scores of a row by unnormalized probabilities and adds them to row_sum, of which each lane has its part. Returns the
// correction for the output. The additions overlap in kChains partial sums.
template <int kCount, int kChains = 1, class Exponential, class Score>
__device__ __forceinline__ float online_softmax(float& row_max, float& row_sum, float new_max, Exponential exponential, Score score) {
  const float offset = exponential.offset(new_max), correction = exponential.correction(row_max, new_max);
  row_max = new_max;
  float sum[kChains] = {};
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    float& v = score(i);
    v = exponential.prob(v, offset);
    sum[i % kChains] += v;
  }
#pragma unroll
  for (int i = 1; i < kChains; i++) sum[0] += sum[i];
  row_sum = row_sum * correction + sum[0];
  return correction;
}
}  // namespace kl::attention
