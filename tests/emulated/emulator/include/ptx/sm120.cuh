// The emulator's bodies of the wrappers in kernels/ptx/sm120.cuh, which this file replaces.
#pragma once

#include <ptx/sm100.cuh>
#include <ptx/sm90.cuh>

namespace kl_emu::ptx {

void mma_nvf4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b, int select_a, int select_b);

}  // namespace kl_emu::ptx

template <int kA, int kB>
inline void mma_nvf4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b) {
  static_assert(kA >= 0 && kA < 2 && kB >= 0 && kB < 4, "no such lanes");
  kl_emu::ptx::mma_nvf4(d, a, b0, b1, scales_a, scales_b, kA, kB);
}

void mma_e4m3_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
