// Wrappers of instructions that GPUs of the Blackwell generation have (sm_100 and sm_120): conversion to FP4.
#pragma once

#include <ptx/sm89.cuh>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1000
// Two values rounded to e2m1 (to nearest, ties to even; values beyond the range and NaN become the largest), `high` in the upper nibble of
// a byte.
__device__ __forceinline__ uint32_t cvt_e2m1x2(float high, float low) {
  uint32_t byte;
  asm("{\n"
      ".reg .b8 pair;\n"
      "cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n"
      "cvt.u32.u8 %0, pair;\n"
      "}\n"
      : "=r"(byte)
      : "f"(high), "f"(low));
  return byte;
}
#endif
