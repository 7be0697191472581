// The part of CUDA's header of this name that the kernels use: they only read half precision.
#pragma once

#include <builtins.h>

struct alignas(2) __half {
  uint16_t bits;
};

inline float __half2float(__half v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000) << 16, magnitude = v.bits & 0x7fff;
  // An infinity or NaN keeps its payload. Other values are scaled by 2^112, which is exact for subnormals as well.
  if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}
