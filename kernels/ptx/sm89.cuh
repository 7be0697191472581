// Wrappers of instructions that GPUs have from sm_89 on: conversion to FP8, and its mma.sync.
#pragma once

#include <ptx/sm80.cuh>

// Two values rounded to e4m3 (to nearest, ties to even; finite values beyond the range become the largest), `low` in the lower byte.
__device__ __forceinline__ uint32_t cvt_e4m3x2(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// d += a b with a 16x32 and b 32x8 in e4m3, d 16x8 in f32. Fragments have the byte layout of `mma`: a lane has two elements of bf16, or
// four of e4m3, at the same place of a row. On sm_89 sums keep thirteen binary places; sm_90 and sm_100 convert to f16.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
