// Attention with a wide head, up to 512, on tensor cores, portable (sm_80 and newer): the VAE's single head over all pixels of its latent.
//
//   kl_attention_wide_bf16_sm80_64x512, _32x512   softmax(q k^T * scale) v, one KV segment; named by the queries of a CTA and the head
//
// Bound: tensor cores. 4 * queries * keys * 512 FLOP: 0.55 TFLOP for 1024x1024. The smaller tile is for GPUs with less than 132 KiB of
// shared memory per CTA.
// Needs: heads of 512, or a single smaller head that is a multiple of 8; bf16, strides multiples of 8, 16-byte aligned addresses; 4-byte
// aligned outputs.
#include <attention/wide_mma.cuh>

using namespace kl::attention::portable;

#define KL_FAMILY_attention_wide_bf16_sm80 ~,
#define KL_ROW(family, m, n, warps, ctas_per_sm) \
  using Tile##m##x##n = Wide<m, n, warps>;       \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlAttention, Tile##m##x##n, ctas_per_sm) { Tile##m##x##n::run(p); }
#include <kernels.def>
