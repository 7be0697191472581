// The geometry of 3x3 convolutions.
#pragma once

#include <common/types.cuh>

__device__ __forceinline__ uint32_t conv_width(const KlConv& p) {
  return p.sampling == KL_UP ? 2 * p.width : p.sampling == KL_DOWN ? p.width / 2 : p.width;
}

// The input coordinate that filter tap `tap` reads for output coordinate `at`; a coordinate outside the image is zero padding.
__device__ __forceinline__ int32_t conv_source(uint32_t sampling, uint32_t at, uint32_t tap, uint32_t size) {
  if (sampling == KL_DOWN) return static_cast<int32_t>(2 * at + tap);
  const int32_t i = static_cast<int32_t>(at + tap) - 1;
  if (sampling == KL_UP) return i < 0 || i >= static_cast<int32_t>(2 * size) ? -1 : i / 2;
  return i;
}
