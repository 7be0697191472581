// The norm of queries and keys (qk-norm) and rotary position embedding (RoPE), as qk_norm_rope.cu and the epilogues of the GEMMs apply
// them to a head.
#pragma once

#include <ptx/sm80.cuh>

// The factor of every element of a head, next to its weight: the reciprocal of the head's root mean square, times `scale`.
__device__ __forceinline__ float qk_norm_scale(float sum_of_squares, float head_dim, float eps, float scale) {
  return scale * rsqrtf(sum_of_squares / head_dim + eps);
}

// Rotates a pair of elements.
__device__ __forceinline__ void rope_rotate(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = x * cosine - y * sine;
  b = x * sine + y * cosine;
}
