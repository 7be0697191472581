// The 3x3 convolutions at the ends of the VAE, on tensor cores, portable (sm_80 and newer).
//
//   kl_norm_conv_narrow   group norm, SiLU and a convolution to at most three channels: the decoder's last layer, 128 to 3
//   kl_conv_narrow_in     a convolution of at most three channels, + bias: the encoder's first layer, 3 to 128
//
// Bound: HBM, 268 MB each at 1024x1024: what is read of 128 channels, or what is written.
// Needs: bf16 (but for the result of the first), runs of 32 channels at 16-byte addresses on the wide side, at most KL_NARROW_CHANNELS of
// them where they are normalised.
#include <conv/narrow.cuh>

using namespace kl::conv::narrow;

KL_ENTRY(kl_norm_conv_narrow, KlNormConv, KL_NARROW_THREADS, 3) { norm_conv_to_pixels(p); }
KL_ENTRY(kl_conv_narrow_in, KlConv, KL_NARROW_IN_THREADS, 2) { conv_of_pixels(p); }
