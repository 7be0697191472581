// Attention with queries and keys in FP8 on compute capability 12.x: attention_fp8_sm89.cu with the block-scaled MMA. Its scales are one;
// it has twice the rate of the plain MMA there, and four times the rate of bf16.
//
//   kl_attention_fp8_sm120_max_free, _online_softmax   as kl_attention_fp8_sm89_..., with the same needs
#include <attention/kernel_mma.cuh>
#include <ptx/sm120.cuh>

using namespace kl::attention;
using namespace kl::attention::portable;

struct E4m3ScaledMma {
  using Element = e4m3;
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_e4m3_scaled(d, a, b0, b1);
  }
};

KL_DYNAMIC_SHARED(128);

using Exp2_max_free = Exp2MaxFree;
using Exp2_online_softmax = Exp2Scaled;

#define KL_FAMILY_attention_fp8_sm120 ~,
#define KL_ROW(family, softmax, keys, warps, ctas_per_sm)                                          \
  using Config_##softmax = AttentionConfig<warps, keys, E4m3ScaledMma, Exp2_##softmax, /*causal*/ false>; \
  KL_TILE_ENTRY(kl_##family##_##softmax, KlAttention, Config_##softmax, ctas_per_sm) { attention<Config_##softmax>(p, dynamic_shared); }
#include <kernels.def>
