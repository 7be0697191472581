// Attention on tensor cores with queries and keys in FP8 (sm_89 and newer): attention_bf16_sm80.cu with e4m3 queries and keys, bf16 values.
//
//   kl_attention_fp8_sm89_max_free         2^(q k^T) v divided by the row sum, where logits are known to be bounded (see
//                                          attention/kernel_sm90.cuh)
//   kl_attention_fp8_sm89_online_softmax   softmax(q k^T * scale) v for any logits, and for keys with scales of their own in every segment
//
// Queries and keys have half the bytes, and blocks of 32 keys half the keys of attention_bf16_sm80.cu. So two CTAs of four warps have room
// on every SM: one multiplies while the other computes its softmax. sm_89 keeps thirteen binary places of a sum of e4m3 products. For 128
// products that is far more precise than the products are (docs/accuracy.md), so nothing is promoted.
// Bound: tensor cores. Where FP8 has twice the rate of bf16, 3 instead of 4 parts of the time. sm_90 has no such instruction: the compiler
// makes conversions and MMAs in f16 of it, for tests alone.
// Needs: strides of queries and keys multiples of 16, of values multiples of 8, 16-byte aligned addresses; no causal mask. The output is
// bf16, e4m3 or e2m1.
#include <attention/kernel_mma.cuh>

using namespace kl::attention;
using namespace kl::attention::portable;

KL_DYNAMIC_SHARED(128);

using Exp2_max_free = Exp2MaxFree;
using Exp2_online_softmax = Exp2Scaled;

#define KL_FAMILY_attention_fp8_sm89 ~,
#define KL_ROW(family, softmax, keys, warps, ctas_per_sm)                                    \
  using Config_##softmax = AttentionConfig<warps, keys, E4m3Mma, Exp2_##softmax, /*causal*/ false>; \
  KL_TILE_ENTRY(kl_##family##_##softmax, KlAttention, Config_##softmax, ctas_per_sm) { attention<Config_##softmax>(p, dynamic_shared); }
#include <kernels.def>
