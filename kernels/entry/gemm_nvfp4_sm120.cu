// NVFP4 GEMM for compute capability 12.x (RTX 50, RTX PRO Blackwell): e2m1 by e2m1 with block scales. Tensor cores multiply operands and
// scales as stored in memory.
//
//   kl_gemm_nvfp4_sm120_256x128, ...   out = epilogue(alpha x w^T + bias), e2m1 operands with block scales, f32 accumulators; epilogues
//                                      and parameters as in gemm_bf16_sm90.cu; SwiGLU also into e4m3 and e2m1
//
// The persistent GEMM of gemm/tma_mainloop.cuh. A producer thread loads codes by TMA and scales by bulk copies, 128 of K per stage, and
// each of eight consumer warps multiplies its rows by all columns. There are no clusters. Scales stay in the tiles that files have.
// Bound: tensor cores. A warp reads 5,120 bytes of shared memory for 32 MMAs of 16x8x64, less than a third of its bandwidth.
// Needs: K a multiple of 128, ranges of weight rows that begin at multiples of 64; else as gemm_bf16_sm90.cu.
#include <gemm/tma_mainloop.cuh>
#include <gemm/policies_sm120.cuh>

using namespace kl::gemm;

#define KL_FAMILY_gemm_nvfp4_sm120 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, relative_cost)                                                                              \
  using Tile##m##x##n = GemmConfig<Sm120Policies<WarpMmaNvfp4, BlockScaledA, BlockScaledB>, m, n, block_k, consumers, stages, ClusterMode::kSingle>; \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlGemmTma, Tile##m##x##n, 1) { gemm<Tile##m##x##n>(p); }
#include <kernels.def>
