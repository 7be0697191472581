// FP8 (OCP E4M3): codes as values, values as codes, and the count of values that no code is near.
#pragma once

#include <stdint.h>

#include <ptx/sm89.cuh>

struct e4m3 {
  uint8_t bits;
};

// The magnitude from which on a value would be rounded beyond the largest code, 448.
constexpr float kE4m3Overflow = 464.0f;

// The value of a code. The code's bits are moved to their places in an f32, whose exponent is then 120 too small. A subnormal code becomes
// a subnormal f32, so the product is exact for all codes.
__device__ __forceinline__ float decode_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
  return magnitude == 0x7f ? __uint_as_float(0x7fc00000u) : __uint_as_float(sign | magnitude << 20) * 0x1p120f;
}

// The code of a value as cvt_e4m3x2 rounds it, for GPUs that do not have the instruction.
__device__ __forceinline__ uint32_t encode_e4m3(float v) {
  constexpr uint32_t kDropped = 20;     // bits of an f32 mantissa that a code drops
  constexpr float kApart = 0x1p14f;     // f32 above it are as far apart as subnormal codes, so adding it rounds to one of them
  constexpr float kNormal = 0x1p-6f;    // the smallest normal value; the largest of the subnormal ones may be rounded up to it
  constexpr uint32_t kBias = 120 << 3;  // the difference of the exponents' biases, in codes
  const float magnitude = fminf(fabsf(v), 448.0f);
  const uint32_t bits = __float_as_uint(magnitude), odd = bits >> kDropped & 1;
  const uint32_t normal = ((bits + (1u << (kDropped - 1)) - 1 + odd) >> kDropped) - kBias;
  const uint32_t subnormal = __float_as_uint(magnitude + kApart) - __float_as_uint(kApart);
  const uint32_t code = v != v ? 0x7f : magnitude < kNormal ? subnormal : normal;
  return (__float_as_uint(v) >> 24 & 0x80u) | code;
}

// Two values rounded to e4m3 (to nearest, ties to even; finite values beyond the range become the largest), `low` in the lower byte.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return encode_e4m3(low) | encode_e4m3(high) << 8;
#else
  return cvt_e4m3x2(low, high);
#endif
}

// The number of values that do not fit.
template <int kCount>
__device__ __forceinline__ uint32_t saturated_of(const float* v) {
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) count += fabsf(v[i]) >= kE4m3Overflow;
  return count;
}

// Adds to the count at this address. The number is almost always zero.
__device__ __forceinline__ void add_saturated(uint64_t saturated, uint32_t count) {
  if (count) atomicAdd(reinterpret_cast<unsigned long long*>(saturated), static_cast<unsigned long long>(count));
}

// Counts a thread's values that do not fit, and adds them to the count. If the sum of squares, at one FMA a value, shows that all fit,
// nothing is counted.
template <int kCount>
__device__ __forceinline__ void count_saturated(uint64_t saturated, const float* v) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; i++) squares += v[i] * v[i];
  if (!(squares < kE4m3Overflow * kE4m3Overflow)) add_saturated(saturated, saturated_of<kCount>(v));
}
