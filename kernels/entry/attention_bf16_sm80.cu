// Attention on tensor cores, portable (sm_80 and newer): softmax(q k^T * scale) v, with online softmax (attention/kernel_mma.cuh).
//
//   kl_attention_bf16_sm80_4warps   heads of 128; several KV segments, grouped-query attention (GQA), optional causal mask
//   kl_attention_bf16_sm80_8warps   as above, with eight warps
//
// Four warps have 32 queries each and take blocks of 64 keys. Tensor cores have work while one of two CTAs on an SM computes its softmax.
// If shared memory has room for one CTA only, it has eight warps with 16 queries each, which read K and V twice as often.
// Bound: tensor cores. 4 * queries * keys * 128 FLOP per head; klein 4B at 1024x1024: 0.26 TFLOP per transformer block.
// Needs: bf16, strides multiples of 8, 16-byte aligned addresses; the output may also be e4m3 or e2m1.
#include <attention/kernel_mma.cuh>

using namespace kl::attention;
using namespace kl::attention::portable;

KL_DYNAMIC_SHARED(128);

#define KL_FAMILY_attention_bf16_sm80 ~,
#define KL_ROW(family, name, keys, warps, ctas_per_sm)                                      \
  using Config_##name = AttentionConfig<warps, keys, Bf16Mma, Exp2Masked, /*causal*/ true>; \
  KL_TILE_ENTRY(kl_##family##_##name, KlAttention, Config_##name, ctas_per_sm) { attention<Config_##name>(p, dynamic_shared); }
#include <kernels.def>
