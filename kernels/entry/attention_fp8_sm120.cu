// Attention with queries and keys in FP8 on compute capability 12.x: attention_fp8_sm89.cu by the MMA that takes scales of blocks. These are
// one; that instruction has twice the rate of the plain one there, four times that of bf16.
//
//   kl_attention_fp8_sm120, _running   as kl_attention_fp8_sm89, with the same needs
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

template <class Exponential>
using Config = AttentionConfig<KL_ATTENTION_THREADS, /*keys*/ 32, E4m3ScaledMma, Exponential, /*causal*/ false>;
static_assert(Config<Exp2MaxFree>::kSharedBytes == KL_ATTENTION_FP8_SHARED, "abi.h states another size");

KL_DYNAMIC_SHARED(128);

KL_ENTRY(kl_attention_fp8_sm120, KlAttention, KL_ATTENTION_THREADS, 2) { attention<Config<Exp2MaxFree>>(p, dynamic_shared); }
KL_ENTRY(kl_attention_fp8_sm120_running, KlAttention, KL_ATTENTION_THREADS, 2) { attention<Config<Exp2Scaled>>(p, dynamic_shared); }
