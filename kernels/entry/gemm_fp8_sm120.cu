// GEMM on e4m3 operands for compute capability 12.x: gemm_nvfp4_sm120.cu with another instruction.
//
//   kl_gemm_fp8_sm120_256x128, ...   out = epilogue(alpha x w^T + bias), e4m3 operands, f32 accumulators
//
// The MMA is block-scaled, with scales of one, which has twice the rate of plain FP8. It keeps 25 binary places of a sum, so nothing is
// promoted.
// Bound: tensor cores.
// Needs: as gemm_bf16_sm90.cu; results in bf16 or e4m3 or, for SwiGLU, e2m1.
#include <gemm/tma_mainloop.cuh>
#include <gemm/policies_sm120.cuh>

using namespace kl::gemm;

#define KL_FAMILY_gemm_fp8_sm120 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, relative_cost)                                                 \
  using Tile##m##x##n = GemmConfig<Sm120Policies<WarpMmaE4m3>, m, n, block_k, consumers, stages, ClusterMode::kSingle>; \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlGemmTma, Tile##m##x##n, 1) { gemm<Tile##m##x##n>(p); }
#include <kernels.def>
