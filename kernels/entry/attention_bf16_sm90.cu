// Attention on Hopper: the results of kl_attention_bf16_sm80, with TMA, wgmma and clusters, after FlashAttention-3 (Shah et al. 2024).
//
//   kl_attention_bf16_sm90_max_free         2^(q k^T) v divided by the row sum, where logits are known to be bounded (see
//                                           attention/kernel_sm90.cuh)
//   kl_attention_bf16_sm90_online_softmax   softmax(q k^T * scale) v for any logits, with a running row maximum
//   kl_attention_bf16_sm90_causal           online softmax with a causal mask; query heads that share a KV head are packed into one tile
//                                           (GQA)
//
// Bound: tensor cores, 4 * queries * keys * 128 FLOP per head; and the power they draw.
// Needs: heads of 128; bf16; addresses and strides that are multiples of 16 bytes.
#include <attention/kernel_sm90.cuh>

using namespace kl::attention;

static_assert(sizeof(KlAttentionSm90) % 128 == 0, "abi.h leaves a gap");

#define KL_FAMILY_attention_bf16_sm90 ~,
#define KL_ROW(family, softmax, stages, cluster)                                     \
  using Config_##softmax = AttentionConfig<stages, cluster, bf16, Softmax::softmax>; \
  KL_TILE_ENTRY(kl_##family##_##softmax, KlAttentionSm90, Config_##softmax, 1) { attention<Config_##softmax>(p); }
#include <kernels.def>
