// FP8 GEMM on Hopper: gemm_bf16_sm90.cu on e4m3 operands, which wgmma multiplies twice as fast.
//
//   kl_gemm_fp8_sm90_256x192, ...            out = epilogue(alpha x w^T + bias), e4m3 operands, f32 accumulators; `fast`
//   kl_gemm_fp8_sm90_256x128_promoted, ...   as above, with exact sums
//
// Bound: as gemm_bf16_sm90.cu; a stage of the same size holds 128 of K.
// Needs: 16-byte aligned addresses and strides that are multiples of 16; outputs in bf16 or, for SwiGLU and qk-norm, e4m3.
//
// Tensor cores keep thirteen binary places of a sum of e4m3 products (bit-accurate model: MMA-Sim, arXiv 2511.10909). Errors of typical
// sums are far below the errors of the operands, but sums of one sign shrink, by 5 % over 3,072 of K and 18 % over 12,288. Promoted tiles
// add accumulators to f32 registers after every 128 of K, as DeepGEMM does. Two consumer warpgroups with two wgmma tiles each take turns
// with one set of partial accumulators a thread: while one adds, the other's MMAs run.
//
// Scales are one f32 per operand, and one per weight row if the weight has them. The epilogue applies them in multiplications that it does
// anyway. SwiGLU and qk-norm store e4m3 if the next op reads e4m3, so no pass over activations is needed.
#include <gemm/tma_mainloop.cuh>
#include <gemm/tma_policies.cuh>

using namespace kl::gemm;

// Symbol suffixes by promotion interval.
#define KL_SUFFIX_0(symbol) symbol
#define KL_SUFFIX_1(symbol) symbol##_promoted
#define KL_SUFFIX_8(symbol) symbol##_promoted_8

#define KL_FAMILY_gemm_fp8_sm90 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, mode, interval, relative_cost)                                         \
  using Tile##m##x##n##_##interval = GemmConfig<Fp8Policies<interval>, m, n, block_k, consumers, stages, ClusterMode::k##mode>; \
  KL_TILE_ENTRY(KL_SUFFIX_##interval(kl_##family##_##m##x##n), KlGemmTma, Tile##m##x##n##_##interval, 1) {                      \
    gemm<Tile##m##x##n##_##interval>(p);                                                                                        \
  }
#include <kernels.def>
