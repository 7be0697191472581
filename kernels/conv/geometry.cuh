// The geometry of 3x3 convolutions. A convolution after nearest-neighbor upsampling is four 2x2 convolutions of the smaller image, one for
// each parity of the output's row and column: the phases 2 (row % 2) + column % 2.
#pragma once

#include <common/types.cuh>

namespace kl::conv {
__device__ __forceinline__ uint32_t conv_phases(uint32_t sampling) { return sampling == KL_UP ? 4 : 1; }

// Filter taps of a phase.
__device__ __forceinline__ uint32_t conv_taps(uint32_t sampling) { return sampling == KL_UP ? 4 : 9; }

// The filter row and the filter column of tap `tap`.
__device__ __forceinline__ uint32_t conv_tap_row(uint32_t sampling, uint32_t tap) { return sampling == KL_UP ? tap / 2 : tap / 3; }
__device__ __forceinline__ uint32_t conv_tap_col(uint32_t sampling, uint32_t tap) { return sampling == KL_UP ? tap % 2 : tap % 3; }

// The width of a phase: its pixels are an image as well.
__device__ __forceinline__ uint32_t conv_phase_width(const KlConv& p) { return p.sampling == KL_DOWN ? p.width / 2 : p.width; }

// The output coordinate of coordinate `at` in a phase with this row or column parity.
__device__ __forceinline__ uint32_t conv_target(uint32_t sampling, uint32_t at, uint32_t parity) {
  return sampling == KL_UP ? 2 * at + parity : at;
}

// The row of `out` that holds pixel `pixel` of a phase.
__device__ __forceinline__ uint64_t conv_out_row(const KlConv& p, uint32_t pixel, uint32_t phase) {
  if (p.sampling != KL_UP) return pixel;
  const uint64_t y = conv_target(KL_UP, pixel / p.width, phase / 2);
  return y * 2 * p.width + conv_target(KL_UP, pixel % p.width, phase % 2);
}

// The input coordinate that a filter tap reads for a coordinate in a phase; one outside the image is zero padding.
__device__ __forceinline__ int32_t conv_source(uint32_t sampling, uint32_t at, uint32_t parity, uint32_t tap) {
  if (sampling == KL_DOWN) return static_cast<int32_t>(2 * at + tap);
  return static_cast<int32_t>(at + tap + (sampling == KL_UP ? parity : 0)) - 1;
}
}  // namespace kl::conv
