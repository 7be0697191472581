// The output of attention, from accumulators of mma.sync: a quad of lanes has the columns of a row, each lane two of every eight.
#pragma once

#include <common/e4m3.cuh>
#include <common/nvfp4.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>

namespace kl::attention {
// Stores kCols columns of a row, from column `first` on, as bf16, e4m3 or e2m1. value(n, i) returns the i-th of the two values that the
// lane has of the n-th eight columns; values are multiplied by `factor`. All lanes of a warp call it, also for rows past the end.
template <int kCols, class Value>
__device__ __forceinline__ void store_output_row(const KlMat& out, uint32_t row, uint32_t first, float factor, uint64_t saturated,
                                                 Value value) {
  static_assert(kCols % 16 == 0, "whole blocks of e2m1");
  const uint32_t col = first + lane() % 4 * 2;
  const bool inside = row < out.rows;
  if (out.dtype == KL_E2M1) {
#pragma unroll
    for (int block = 0; block < kCols / 16; block++) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = value(2 * block + i / 2, i % 2) * factor;
      const QuantizedBlock quantized(quad_max_bits(largest_magnitude(v)), out.scale);
      if (!inside) continue;
      uint8_t* to = code_pair(out, row, col + block * 16);
      to[0] = static_cast<uint8_t>(pack_e2m1(v[0] * quantized.inverse, v[1] * quantized.inverse));
      to[4] = static_cast<uint8_t>(pack_e2m1(v[2] * quantized.inverse, v[3] * quantized.inverse));
      // The lanes of a quad take turns.
      if (lane() % 4 == block % 4) block_scale(out, row, first / 16 + block) = static_cast<uint8_t>(quantized.scale);
    }
    return;
  }
  if (!inside) return;
  if (out.dtype == KL_E4M3) {
    const float scale = factor / out.scale;
    e4m3* to = row_of<e4m3>(out, row) + col;
#pragma unroll
    for (int n = 0; n < kCols / 8; n++) {
      const float v[2] = {value(n, 0) * scale, value(n, 1) * scale};
      count_saturated<2>(saturated, v);
      *reinterpret_cast<uint16_t*>(to + n * 8) = static_cast<uint16_t>(pack_e4m3(v[0], v[1]));
    }
    return;
  }
  bf16* to = row_of<bf16>(out, row) + col;
#pragma unroll
  for (int n = 0; n < kCols / 8; n++) store_pair(to + n * 8, value(n, 0) * factor, value(n, 1) * factor);
}
}  // namespace kl::attention
