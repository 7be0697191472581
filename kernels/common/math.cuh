// Arithmetic that several kernels share.
#pragma once

#include <ptx/sm80.cuh>

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Uses the approximate exponential and division, each accurate to two or three ulp: the exact ones would take as long as the memory
// traffic of an element-wise kernel.
__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }
