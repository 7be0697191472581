// The emulator's bodies of the wrappers in kernels/ptx/sm89.cuh, which this file replaces.
#pragma once

#include <ptx/sm80.cuh>

#include <cmath>
#include <cstdint>

namespace kl_emu::ptx {

inline uint32_t encode_e4m3(float v) {
  const uint32_t sign = std::signbit(v) ? 0x80 : 0;
  const float magnitude = std::fabs(v);
  if (std::isnan(v)) return sign | 0x7f;
  if (magnitude >= 448.0f) return sign | 0x7e;
  // A code is a multiple of an eighth of the power of two below its value, and below 2^-6 a multiple of an eighth of 2^-6.
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int eighths = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | static_cast<uint32_t>(8 * (exponent + 6) + eighths);
}

}  // namespace kl_emu::ptx

inline uint32_t cvt_e4m3x2(float low, float high) { return kl_emu::ptx::encode_e4m3(low) | kl_emu::ptx::encode_e4m3(high) << 8; }

void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
