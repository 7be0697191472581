// Attention with a wide head, up to 512, on tensor cores, portable (sm_80 and newer): the VAE's single head over all pixels of its latent.
//
//   kl_attention_wide_64, kl_attention_wide_32   softmax(q k^T * scale) v, one KV segment; 64 or 32 queries per CTA
//
// Bound: tensor cores. 4 * queries * keys * 512 FLOP: 0.55 TFLOP for 1024x1024. The smaller tile is for GPUs with less than 132 KiB of
// shared memory per CTA.
// Needs: heads of 512, or a single one of a multiple of 8 up to it; bf16, strides multiples of 8, 16-byte aligned addresses; outputs at 4-byte aligned addresses.
#include <attention/wide_mma.cuh>
#include <common/tile_row.cuh>

using namespace kl::attention::portable;

#define KL_ATTENTION_WIDE(file, queries, threads, ctas_per_sm, shared_bytes) \
  static_assert(row_states<Wide<queries>::kThreads, threads>());             \
  static_assert(row_states<Wide<queries>::kSharedBytes, shared_bytes>());    \
  KL_ENTRY(kl_attention_wide_##queries, KlAttention, threads, ctas_per_sm) { Wide<queries>::run(p); }
#include <tiles.def>
