// The operands of mma.sync as a policy, for kernels that are made for several types: the operand type and the instruction.
#pragma once

#include <common/types.cuh>
#include <ptx/sm89.cuh>

struct Bf16Mma {
  using Element = bf16;
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma(d, a, b0, b1); }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
struct E4m3Mma {
  using Element = e4m3;
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_e4m3(d, a, b0, b1); }
};
#endif
