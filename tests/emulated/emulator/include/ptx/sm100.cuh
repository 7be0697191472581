// The emulator's bodies of the wrappers in kernels/ptx/sm100.cuh, which this file replaces.
#pragma once

#include <ptx/sm89.cuh>

#include <cmath>
#include <cstdint>

namespace kl_emu::ptx {

inline uint32_t encode_e2m1(float v) {
  const uint32_t sign = std::signbit(v) ? 8 : 0;
  const float magnitude = std::fabs(v);
  if (std::isnan(v)) return 7;
  if (magnitude >= 6.0f) return sign | 7;
  // A code is a multiple of half the power of two below its value, and below 1 a multiple of a half.
  const int exponent = magnitude < 1.0f ? 0 : std::ilogb(magnitude);
  const int halves = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 1 - exponent)));
  return sign | static_cast<uint32_t>(2 * exponent + halves);
}

}  // namespace kl_emu::ptx

inline uint32_t cvt_e2m1x2(float high, float low) { return kl_emu::ptx::encode_e2m1(high) << 4 | kl_emu::ptx::encode_e2m1(low); }
