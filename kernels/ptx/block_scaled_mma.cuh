// The block-scaled mma.sync of compute capability 12.x in software, for tests of its kernels on other GPUs (KL_EMULATE). Results match the
// published model (MMA-Sim, arXiv 2511.10909) to the bit. The sum of a block's products is exact. The block sums, times their scales, and
// the accumulator are aligned to the largest exponent among them and truncated 35 binary places below it. The sum of what is left is
// truncated to f32. FP8 keeps 25 places of each product.
#pragma once

#include <stdint.h>

// A number as significand * 2^(exponent - places). Its source determines `places`.
struct Term {
  int64_t significand;
  int exponent;
};

constexpr int kZeroExponent = -126;

__device__ __forceinline__ Term f32_term(float v) {
  const uint32_t bits = __float_as_uint(v), field = bits >> 23 & 255;
  const int64_t magnitude = (bits & 0x7fffffu) | (field ? 1u << 23 : 0u);
  const int exponent = magnitude ? static_cast<int>(field ? field : 1) - 127 : kZeroExponent;
  return {bits >> 31 ? -magnitude : magnitude, exponent};
}

// The magnitude of an e4m3 code, with three binary places.
__device__ __forceinline__ Term e4m3_term(uint32_t code) {
  const uint32_t field = code >> 3 & 15, magnitude = (code & 7) | (field ? 8u : 0u);
  return {magnitude, magnitude ? static_cast<int>(field ? field : 1) - 7 : kZeroExponent};
}

// The value of an e2m1 code, in halves.
__device__ __forceinline__ int e2m1_halves(uint32_t code) {
  const int magnitude = (code & 7) < 2 ? code & 1 : (2 | (code & 1)) << ((code >> 1 & 3) - 1);
  return code & 8 ? -magnitude : magnitude;
}

// significand * 2^places as an integer, truncated toward zero.
__device__ __forceinline__ int64_t shifted(int64_t significand, int places) {
  if (places >= 0) return significand << places;
  const int64_t magnitude = (significand < 0 ? -significand : significand) >> min(-places, 63);
  return significand < 0 ? -magnitude : magnitude;
}

// sum * 2^exponent, truncated to f32.
__device__ __forceinline__ float truncated(int64_t sum, int exponent) {
  const uint64_t magnitude = sum < 0 ? -sum : sum;
  if (magnitude == 0) return 0.0f;
  const int top = 63 - __clzll(magnitude), unit = max(top + exponent, -126) - 23;  // the exponent of the last place that is kept
  const float v = scalbnf(static_cast<float>(shifted(magnitude, exponent - unit)), unit);
  return sum < 0 ? -v : v;
}

// The sum of the accumulator c and the terms. terms[0] is c with 23 places, the others have `places`; sums keep `kept` places.
template <int kTerms>
__device__ __forceinline__ float fused_sum(float c, const Term (&terms)[kTerms], int places, int kept) {
  if (isinf(c)) return c;
  int largest = terms[0].exponent;
  for (int i = 1; i < kTerms; i++) largest = max(largest, terms[i].exponent);
  int64_t sum = shifted(terms[0].significand, kept - 23 + terms[0].exponent - largest);
  for (int i = 1; i < kTerms; i++) sum += shifted(terms[i].significand, kept - places + terms[i].exponent - largest);
  return truncated(sum, largest - kept);
}

// Element e of an accumulator fragment has row lane / 4 + e / 2 * 8 and column lane % 4 * 2 + e % 2. Loops are not unrolled and the function
// is not inlined: otherwise a kernel would not compile in reasonable time.
__device__ __noinline__ float4 block_scaled_nvf4(float4 d, uint4 a, uint2 b, uint2 scales, int select_a, int select_b) {
  const uint32_t lane = threadIdx.x % 32;
  float out[4] = {d.x, d.y, d.z, d.w};
#pragma unroll 1
  for (int e = 0; e < 4; e++) {
    const uint32_t half = e / 2, col = lane % 4 * 2 + e % 2;
    const uint32_t row_scales = __shfl_sync(~0u, scales.x, lane / 4 * 4 + 2 * select_a + half);
    const uint32_t col_scales = __shfl_sync(~0u, scales.y, 4 * col + select_b);
    const float c = e == 0 ? out[0] : e == 1 ? out[1] : e == 2 ? out[2] : out[3];
    Term terms[5] = {f32_term(c)};
    bool nan = c != c;
#pragma unroll 1
    for (int block = 0; block < 4; block++) {
      // A word has eight elements of K. Blocks 0 and 1 are in the first registers, each in words of two lanes.
      int quarters = 0;
#pragma unroll 1
      for (int i = 2 * block; i < 2 * block + 2; i++) {
        const uint32_t own_a = i / 4 ? (half ? a.w : a.z) : (half ? a.y : a.x), own_b = i / 4 ? b.y : b.x;
        const uint32_t word_a = __shfl_sync(~0u, own_a, lane / 4 * 4 + i % 4), word_b = __shfl_sync(~0u, own_b, 4 * col + i % 4);
#pragma unroll 1
        for (int n = 0; n < 8; n++) quarters += e2m1_halves(word_a >> 4 * n & 15) * e2m1_halves(word_b >> 4 * n & 15);
      }
      const uint32_t code_a = row_scales >> 8 * block & 0x7f, code_b = col_scales >> 8 * block & 0x7f;
      nan = nan || code_a == 0x7f || code_b == 0x7f;
      const Term x = e4m3_term(code_a), y = e4m3_term(code_b);
      terms[1 + block] = {quarters * x.significand * y.significand, x.exponent + y.exponent};
    }
    const float sum = nan ? __uint_as_float(0x7fffffffu) : fused_sum(c, terms, /*places*/ 2 + 3 + 3, /*kept*/ 35);
    if (e == 0) out[0] = sum;
    if (e == 1) out[1] = sum;
    if (e == 2) out[2] = sum;
    if (e == 3) out[3] = sum;
  }
  return make_float4(out[0], out[1], out[2], out[3]);
}

__device__ __noinline__ float4 block_scaled_e4m3(float4 d, uint4 a, uint2 b) {
  const uint32_t lane = threadIdx.x % 32;
  float out[4] = {d.x, d.y, d.z, d.w};
#pragma unroll 1
  for (int e = 0; e < 4; e++) {
    const uint32_t half = e / 2, col = lane % 4 * 2 + e % 2;
    const float c = e == 0 ? out[0] : e == 1 ? out[1] : e == 2 ? out[2] : out[3];
    Term terms[33] = {f32_term(c)};
    bool nan = c != c;
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      const uint32_t own_a = i / 4 ? (half ? a.w : a.z) : (half ? a.y : a.x), own_b = i / 4 ? b.y : b.x;
      const uint32_t word_a = __shfl_sync(~0u, own_a, lane / 4 * 4 + i % 4), word_b = __shfl_sync(~0u, own_b, 4 * col + i % 4);
#pragma unroll 1
      for (int n = 0; n < 4; n++) {
        const uint32_t code_a = word_a >> 8 * n & 0xff, code_b = word_b >> 8 * n & 0xff;
        nan = nan || (code_a & 0x7f) == 0x7f || (code_b & 0x7f) == 0x7f;
        const Term x = e4m3_term(code_a & 0x7f), y = e4m3_term(code_b & 0x7f);
        const int64_t product = x.significand * y.significand;
        terms[1 + 4 * i + n] = {(code_a ^ code_b) & 0x80 ? -product : product, x.exponent + y.exponent};
      }
    }
    const float sum = nan ? __uint_as_float(0x7fffffffu) : fused_sum(c, terms, /*places*/ 3 + 3, /*kept*/ 25);
    if (e == 0) out[0] = sum;
    if (e == 1) out[1] = sum;
    if (e == 2) out[2] = sum;
    if (e == 3) out[3] = sum;
  }
  return make_float4(out[0], out[1], out[2], out[3]);
}

template <int kA, int kB>
__device__ __forceinline__ void mma_nvf4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b) {
  const float4 sum = block_scaled_nvf4(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b0, b1),
                                       make_uint2(scales_a, scales_b), kA, kB);
  d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
}

__device__ __forceinline__ void mma_e4m3_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const float4 sum = block_scaled_e4m3(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b0, b1));
  d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
}
