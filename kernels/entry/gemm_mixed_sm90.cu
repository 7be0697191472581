// Mixed-input GEMM on Hopper (W4A16, W8A16): the GEMM of gemm_bf16_sm90.cu with quantized weights, which are expanded to bf16 while it runs.
//
//   kl_gemm_mixed_sm90_256x192, ...   out = epilogue(alpha x w^T + bias), activations of bf16, weights of e2m1 with block scales (NVFP4),
//                                     of e4m3 or of bf16, f32 accumulators
//
// Bound: as gemm_bf16_sm90.cu with thousands of rows, where expanding hides behind the MMAs. With 512 rows expanding is the bound: 32 rows
// of a weight by 256 of K take a warp about 10,000 cycles.
// Needs: what gemm_bf16_sm90.cu needs; weights of e4m3 at 16-byte aligned addresses with strides that are multiples of 16, those of e2m1
// as well; outputs of bf16 or, of SwiGLU and qk-norm, e4m3; a buffer for what is expanded.
//
// Weights stay in memory as they are in the file, and activations are not quantized. Each matrix of a weight has a format of its own, so
// that queries, keys and values, or gates and ups, of different formats are one launch.
#include <gemm/expand_sm90.cuh>
#include <gemm/tma_mainloop.cuh>

using namespace kl::gemm;

#define KL_ROW_0(...)
#define KL_ROW_1(m, n, block_k, consumers, stages, mode)                                            \
  using Tile##m##x##n = GemmConfig<MixedInputPolicies, m, n, block_k, consumers, stages, ClusterMode::k##mode>;\
  KL_TILE_ENTRY(kl_gemm_mixed_sm90_##m##x##n, KlGemmTma, Tile##m##x##n, 1) { gemm<Tile##m##x##n>(p); }

// The rows of gemm_bf16_sm90.cu that say so.
#define KL_FAMILY_gemm_bf16_sm90 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, mode, mixed, relative_cost) \
  KL_ROW_##mixed(m, n, block_k, consumers, stages, mode)
#include <kernels.def>
