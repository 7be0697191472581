// 3x3 convolution on tensor cores, portable (sm_80 and newer): implicit GEMM over the mainloop of gemm/mma_tile.cuh.
//
//   kl_conv_bf16_sm80_256x128, ...   out = conv(x) + bias + residual over an NHWC image: same size, after nearest-neighbor upsampling by two
//                                    (in phase form), or with stride two and zero padding at the right and bottom edge only
//   kl_conv_stats                    mean and variance of each group of channels, from the partial moments of the tiles (for group norm)
//
// Named by the tile, pixels x output channels.
//
// Bound: tensor cores; decoding 1024x1024 is 8.9 TFLOP.
// Needs: bf16, input channels a multiple of 8, 16-byte aligned addresses, sides of at most KL_CONV_SIDE; for statistics full tiles of
// channels and groups of 2, 4, ... 128 of them.
#include <conv/kernel_mma.cuh>

using namespace kl::conv::portable;

#define KL_FAMILY_conv_bf16_sm80 ~,
#define KL_ROW(family, m, n, block_k, warps, stages, ctas_per_sm) \
  using Tile##m##x##n = MmaTile<m, n, warps, block_k, stages>;    \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlConv, Tile##m##x##n, ctas_per_sm) { conv<Tile##m##x##n>(p); }
#include <kernels.def>

// One CTA per group. The moments of tiles are added up in f64, as sums of differences from the mean of the first tile and of their squares:
// no division, and nothing that matters cancels.
KL_ENTRY(kl_conv_stats, KlConv, KL_CONV_STATS_THREADS) {
  constexpr int kBatch = 4, kWarps = KL_CONV_STATS_THREADS / 32;  // loads in flight
  KL_SHARED(double, shares, [3][kWarps]);
  const StoredMoments* partials = reinterpret_cast<const StoredMoments*>(p.partials) + blockIdx.x;
  const double pivot = partials[0].mean;
  double sums[3] = {};  // of values, of their differences, of squares
  for (uint32_t tile = threadIdx.x; tile < p.row_tiles; tile += kBatch * KL_CONV_STATS_THREADS) {
    StoredMoments of[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const uint32_t from = tile + i * KL_CONV_STATS_THREADS;
      of[i] = from < p.row_tiles ? partials[static_cast<uint64_t>(from) * p.groups] : StoredMoments{};
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const double count = of[i].count, delta = of[i].mean - pivot;
      sums[0] += count, sums[1] += count * delta, sums[2] += of[i].squares + count * delta * delta;
    }
  }
#pragma unroll
  for (int q = 0; q < 3; q++) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sums[q] += __shfl_xor_sync(0xffffffffu, sums[q], mask);
    if (threadIdx.x % 32 == 0) shares[q][threadIdx.x / 32] = sums[q];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int q = 0; q < 3; q++) {
      for (int warp = 1; warp < kWarps; warp++) sums[q] += shares[q][warp];
    }
    const double delta = sums[1] / sums[0];
    float* stats = row_of<float>(p.stats, blockIdx.x);
    stats[0] = static_cast<float>(pivot + delta);
    stats[1] = static_cast<float>(fmax(sums[2] / sums[0] - delta * delta, 0.0));
  }
}
