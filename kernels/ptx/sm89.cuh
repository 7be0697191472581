// Wrappers of instructions that GPUs have from sm_89 on: conversion to FP8.
#pragma once

#include <ptx/sm80.cuh>

// Two values rounded to e4m3 (to nearest, ties to even; finite values beyond the range become the largest), `low` in the lower byte.
__device__ __forceinline__ uint32_t cvt_e4m3x2(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
