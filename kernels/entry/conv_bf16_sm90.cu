// 3x3 convolution on Hopper: the results of kl_conv_bf16_sm80, by an implicit GEMM with TMA, wgmma and thread-block clusters.
//
//   kl_conv_bf16_sm90_128x256, ...   out = conv(x) + bias + residual, or + a 1x1 convolution of another image, over NHWC images of bf16: same
//                                    size, after nearest-neighbor upsampling by two, or with stride two; and the moments of groups of
//                                    channels for kl_conv_stats. Named by the tile, pixels x output channels
//
// Bound: tensor cores and the power they draw, as gemm_bf16_sm90.cu. It shares that main loop; conv/policies_sm90.cuh has what differs. A
// pixel is loaded once for all nine taps, so a multiply-accumulate takes fewer bytes from L2 than in a GEMM of the same tile.
// Needs: addresses and strides as TMA requires; even sides with stride two; no residual if the image is upsampled. For moments groups of 2,
// 4, ... 64 channels, at most KL_CONV_TILE_GROUPS of them in a tile.
//
// Upsampling is four convolutions with 2x2 filters, one for each phase of output pixels, as parts of one launch. The image of twice the
// size is never written, and five of nine products are saved (Shi et al. 2016). Filters are added up when they are uploaded. With stride
// two the image is four planes, of even and odd lines and columns. Each tap reads one plane.
#include <gemm/tma_mainloop.cuh>
#include <conv/policies_sm90.cuh>

using namespace kl::conv;

#define KL_FAMILY_conv_bf16_sm90 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, mode, relative_cost)                                                 \
  using Tile##m##x##n = GemmConfig<ConvPolicies<(n & (n - 1)) == 0>, m, n, block_k, consumers, stages, ClusterMode::k##mode>; \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, ConvParams, Tile##m##x##n, 1) { gemm<Tile##m##x##n>(p); }
#include <kernels.def>
