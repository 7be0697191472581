// FP8 (OCP E4M3) activations: values that an op stores for the GEMM or attention that reads them.
#pragma once

#include <stdint.h>

#include <ptx/sm80.cuh>

struct e4m3 {
  uint8_t bits;
};

// The magnitude from which on a value would be rounded beyond the largest code, 448.
constexpr float kE4m3Overflow = 464.0f;

// Adds the values that do not fit to the count at this address. There are hardly ever any.
template <int kCount>
__device__ __forceinline__ void count_saturated(uint64_t saturated, const float* v) {
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) count += fabsf(v[i]) >= kE4m3Overflow;
  if (count) atomicAdd(reinterpret_cast<unsigned long long*>(saturated), static_cast<unsigned long long>(count));
}
