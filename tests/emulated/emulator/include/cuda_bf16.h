// The part of CUDA's header of this name that the kernels use.
#pragma once

#include <builtins.h>

struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }

// Rounds to nearest even. NaN becomes the canonical NaN, as with the conversion instruction.
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
