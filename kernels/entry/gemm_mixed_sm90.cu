// Mixed-input GEMM on Hopper (W4A16, W8A16): gemm_bf16_sm90.cu with quantized weights, which are expanded to bf16 while it runs.
//
//   kl_gemm_mixed_sm90_256x192, ...   out = epilogue(alpha x w^T + bias), bf16 activations, f32 accumulators; weights in e2m1 with block
//                                     scales (NVFP4), e4m3 or bf16
//
// Bound: as gemm_bf16_sm90.cu with thousands of rows, where expanding hides behind the MMAs. With 512 rows expanding is the bound: 32 rows
// of a weight by 256 of K take a warp about 10,000 cycles.
// Needs: as gemm_bf16_sm90.cu; e4m3 and e2m1 weights at 16-byte aligned addresses with strides that are multiples of 16; outputs in bf16
// or, for SwiGLU and qk-norm, e4m3; a buffer for expanded weights.
//
// Weights stay in memory as in the file, and activations are not quantized. Each matrix of a weight has a format of its own, so one launch
// takes queries, keys and values, or gates and ups, of different formats.
#include <gemm/expand_sm90.cuh>
#include <gemm/tma_mainloop.cuh>

using namespace kl::gemm;

#define KL_ROW_0(...)
#define KL_ROW_1(m, n, block_k, consumers, stages, mode)                                            \
  using Tile##m##x##n = GemmConfig<MixedInputPolicies, m, n, block_k, consumers, stages, ClusterMode::k##mode>;\
  KL_TILE_ENTRY(kl_gemm_mixed_sm90_##m##x##n, KlGemmTma, Tile##m##x##n, 1) { gemm<Tile##m##x##n>(p); }

// Instantiates the rows of gemm_bf16_sm90 whose column `mixed` is 1.
#define KL_FAMILY_gemm_bf16_sm90 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, mode, mixed, relative_cost) \
  KL_ROW_##mixed(m, n, block_k, consumers, stages, mode)
#include <kernels.def>
