// The portable 3x3 convolution over the mainloop of gemm/mma_tile.cuh: the body of entry/conv_bf16_sm80.cu.
//
// M is the pixels, N the output channels, K the filter taps by the input channels; im2col happens in the cp.async addresses. Upsampling
// makes four phases, each with filters of its own. A tile has pixels of one phase: every second pixel of every second row. The residual may
// be `out` itself: every value is read by the thread that stores it, or before a barrier that precedes its store.
//
// Statistics are computed from rounded outputs. Each thread computes count, mean and M2 (the sum of squared deviations, as in Welford's
// algorithm) of its few values. These moments are merged across lanes and warps by the pairwise formula of Chan et al. 1979, and then
// across tiles, always in the same order. Nothing cancels where the mean is far from zero.
#pragma once

#include <common/moments.cuh>
#include <conv/geometry.cuh>
#include <gemm/epilogue_mma.cuh>

KL_DYNAMIC_SHARED(128);

namespace kl::conv::portable {
using namespace gemm::portable;

// The moments of a span of 2 to 8 columns by a warp's rows, stored behind the staged output tile.
template <class Tile>
__device__ __forceinline__ StoredMoments* moments_at(uint32_t warp_row, uint32_t span) {
  static_assert(Tile::kBlockM * Tile::kOutPitch + Tile::kThreads / 64 * (Tile::kBlockN / 2) * 16 <= Tile::kSharedBytes,
                "shared memory is too small for the moments");
  return reinterpret_cast<StoredMoments*>(dynamic_shared + Tile::kBlockM * Tile::kOutPitch) + warp_row * (Tile::kBlockN / 2) + span;
}

// Computes the moments of the thread's outputs for each span of columns that lies in one group, and merges them within the warp.
template <class Tile>
__device__ __forceinline__ void warp_moments(const KlConv& p, const Tile& tile, uint32_t pixel0, uint32_t pixels) {
  const uint32_t width = p.out.cols / p.groups, span = min(width, 8u), lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Tile::kMmaN; n++) {
    Moments<float> own{};
#pragma unroll
    for (int i = 0; i < 2 * Tile::kMmaM; i++) {
      if (pixel0 + Tile::row_of_acc(i / 2, i % 2) < pixels) {
        own.count += 2.0f;
        own.mean += tile.acc[i / 2][n][i % 2 * 2] + tile.acc[i / 2][n][i % 2 * 2 + 1];
      }
    }
    if (own.count > 0.0f) own.mean /= own.count;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kMmaM; i++) {
      const float a = tile.acc[i / 2][n][i % 2 * 2] - own.mean, b = tile.acc[i / 2][n][i % 2 * 2 + 1] - own.mean;
      if (pixel0 + Tile::row_of_acc(i / 2, i % 2) < pixels) own.squares += a * a + b * b;
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) own.merge_lanes(mask);
    if (span > 2) own.merge_lanes(1);
    if (span > 4) own.merge_lanes(2);
    const uint32_t col = Tile::col_of_acc(n);
    if (lane < 4 && col % span == 0) {
      *moments_at<Tile>(threadIdx.x / 64, col / span) = StoredMoments{own.mean, own.squares, own.count};
    }
  }
}

// Merges the moments of all warps and stores them for kl_conv_stats.
template <class Tile>
__device__ __forceinline__ void store_moments(const KlConv& p, uint32_t row_tile, uint32_t col0) {
  const uint32_t width = p.out.cols / p.groups, spans = width / min(width, 8u);
  if (threadIdx.x >= Tile::kBlockN / width) return;
  Moments<float> group{};
  for (uint32_t warp = 0; warp < Tile::kThreads / 64; warp++) {
    for (uint32_t span = 0; span < spans; span++) {
      group.merge(*moments_at<Tile>(warp, threadIdx.x * spans + span));
    }
  }
  StoredMoments* to = reinterpret_cast<StoredMoments*>(p.partials) + static_cast<uint64_t>(row_tile) * p.groups + col0 / width;
  to[threadIdx.x] = StoredMoments{group.mean, group.squares, group.count};
}

// Adds bias and residual, stores the tile, and computes the statistics of the stored values.
template <class Tile>
__device__ __forceinline__ void finish_tile(const KlConv& p, Tile& tile, uint32_t row_tile, uint32_t col0) {
  const uint32_t phases = conv_phases(p.sampling), phase = row_tile % phases, pixel0 = row_tile / phases * Tile::kBlockM;
  const uint32_t pixels = p.out.rows / phases;
  const TileEpilogue<Tile, uint32_t> epilogue{tile, dynamic_shared, p.out, pixel0, col0};
  const KlMat& residual = p.residual;
  const bool words = residual.dtype == KL_BF16 && residual.data % 4 == 0 && residual.stride % 2 == 0;
  if (!epilogue.is_whole() || (residual.data && !words)) {
    epilogue.for_each_value([&](uint32_t pixel, uint32_t col, float v) {
      if (pixel >= pixels || col >= p.out.cols) return;
      const uint64_t row = conv_out_row(p, pixel, phase);
      v += load<float>(p.bias, 0, col);
      if (residual.data) v += load_any(residual, row, col);
      store_any(p.out, row, col, v);
    });
    return;
  }
  epilogue.add_bias(row_of<const float>(p.bias, 0));
  // The residual is added while the tile is staged, so that its loads overlap the writes to shared memory; in a pass of its own it took
  // 4 % of the time of a 1024x1024 convolution. Accumulators keep the rounded values, whose statistics are wanted.
  epilogue.for_each_row([&](int m, int half, uint32_t row, uint32_t pixel) {
    const bool add = residual.data && pixel < pixels;
    const bf16* from = add ? row_of<const bf16>(residual, conv_out_row(p, pixel, phase)) + col0 : nullptr;
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; n++) {
      const uint32_t col = Tile::col_of_acc(n);
      float* v = &tile.acc[m][n][2 * half];
      if (add) {
        const float2 old = load_pair(from + col);
        v[0] += old.x, v[1] += old.y;
      }
      Tile::stage_pair(dynamic_shared, row, col, v[0], v[1]);
      v[0] = to_float(from_float<bf16>(v[0])), v[1] = to_float(from_float<bf16>(v[1]));
    }
  });
  if (p.stats.data) warp_moments(p, tile, pixel0, pixels);
  const auto row_at = [&](uint32_t row) { return pixel0 + row < pixels ? conv_out_row(p, pixel0 + row, phase) : p.out.rows; };
  Tile::store_staged_rows(dynamic_shared, p.out, row_at, col0, Tile::kBlockN);
  if (p.stats.data) store_moments<Tile>(p, row_tile, col0);
}

__device__ __forceinline__ uint32_t in_image(int32_t at, uint32_t size) { return at >= 0 && at < static_cast<int32_t>(size); }

template <class Tile>
__device__ __forceinline__ void conv(const KlConv& p) {
  // Column tiles vary fastest, then phases: the filters stay in L2, and so do the pixels that neighboring tiles share.
  const uint32_t col_tiles = ceil_div(p.out.cols, static_cast<uint32_t>(Tile::kBlockN)), row_tile = blockIdx.x / col_tiles;
  const uint32_t col0 = blockIdx.x % col_tiles * Tile::kBlockN, phases = conv_phases(p.sampling), phase = row_tile % phases;
  const uint32_t pixel0 = row_tile / phases * Tile::kBlockM, pixels = p.out.rows / phases, width = conv_phase_width(p);
  const uint32_t channels = p.x.cols, stride = p.x.stride, k_size = conv_taps(p.sampling) * channels, chunk = Tile::copy_chunk() * 8;
  // For each pixel that the thread copies: the offset of the element under the filter's corner, and a byte of bits for the filter rows (0
  // to 2) and columns (3 to 5) that lie inside the image. Offsets outside of the image wrap around. Pixels past the last one have no bits
  // set.
  uint32_t corner[Tile::kACopies], taps_inside[ceil_div(Tile::kACopies, 4)] = {};
#pragma unroll
  for (int i = 0; i < Tile::kACopies; i++) {
    const uint32_t pixel = pixel0 + Tile::copy_row() + Tile::kRowsPerCopy * i, y = pixel / width, x = pixel % width;
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t tap = 0; tap < 3; tap++) {
      bits |= in_image(conv_source(p.sampling, y, phase / 2, tap), p.height) << tap;
      bits |= in_image(conv_source(p.sampling, x, phase % 2, tap), p.width) << (3 + tap);
    }
    const uint32_t top = conv_source(p.sampling, y, phase / 2, 0), left = conv_source(p.sampling, x, phase % 2, 0);
    corner[i] = (top * p.width + left) * stride;
    if (pixel < pixels) taps_inside[i / 4] |= bits << i % 4 * 8;
  }
  const bf16 *image = row_of<const bf16>(p.x, 0), *filters = row_of<const bf16>(p.w, 0) + phase * k_size;
  const uint32_t filter = (col0 + Tile::copy_row()) * static_cast<uint32_t>(p.w.stride) + chunk;
  const uint32_t last_filter = (p.out.cols - 1) * static_cast<uint32_t>(p.w.stride) + chunk;
  Tile tile;
  tile.mainloop(
      dynamic_shared, k_size, 0, ceil_div(k_size, static_cast<uint32_t>(Tile::kBlockK)),
      [&](int i, uint32_t k, bool& valid) {
        const uint32_t tap = (k + chunk) / channels, channel = k + chunk - tap * channels, bits = taps_inside[i / 4] >> i % 4 * 8;
        const uint32_t dy = conv_tap_row(p.sampling, tap), dx = conv_tap_col(p.sampling, tap);
        valid = valid && bits >> dy & bits >> (3 + dx) & 1;
        return image + (valid ? corner[i] + (dy * p.width + dx) * stride + channel : 0);
      },
      // Filters past the last one repeat it; their results are not stored.
      [&](int i, uint32_t k, bool&) {
        return filters + (min(filter + i * Tile::kRowsPerCopy * static_cast<uint32_t>(p.w.stride), last_filter) + k);
      });
  finish_tile(p, tile, row_tile, col0);
}
}  // namespace kl::conv::portable
