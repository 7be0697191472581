// Attention on Hopper with queries and keys in FP8: attention_bf16_sm90.cu with e4m3 queries and keys, bf16 values. MMAs of queries and
// keys take half the time, and K takes half the bytes of a stage.
//
//   kl_attention_fp8_sm90_max_free, _online_softmax   as kl_attention_bf16_sm90_...
//
// Bound: tensor cores, and the power they draw.
// Needs: as attention_bf16_sm90.cu, with queries and keys of e4m3.
#include <attention/kernel_sm90.cuh>

using namespace kl::attention;

#define KL_FAMILY_attention_fp8_sm90 ~,
#define KL_ROW(family, softmax, stages, cluster)                                     \
  using Config_##softmax = AttentionConfig<stages, cluster, e4m3, Softmax::softmax>; \
  KL_TILE_ENTRY(kl_##family##_##softmax, KlAttentionSm90, Config_##softmax, 1) { attention<Config_##softmax>(p); }
#include <kernels.def>
