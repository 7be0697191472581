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

KL_ENTRY(kl_conv_stats, KlConv, KL_CONV_STATS_THREADS) { conv_stats(p); }
