// GEMM on tensor cores in FP8 (sm_89 and newer), with a fused epilogue: gemm_bf16_sm80.cu on e4m3 operands.
//
//   kl_gemm_fp8_sm89_128x128   out = epilogue(alpha x w^T + bias), e4m3 operands, sums of 128 products promoted to f32 accumulators;
//                              epilogues as in gemm_bf16_sm80.cu, SwiGLU also into e4m3
//
// Promotion is for sm_89, which keeps thirteen binary places of a sum (MMA-Sim, arXiv 2511.10909). It takes two accumulators per output, so
// a warp has half of the rows that it has in bf16.
// Bound: tensor cores. sm_90 has no such instruction. The compiler makes conversions and f16 MMAs of it, slower than bf16, for tests alone.
// Needs: K and the strides of x and w multiples of 16, 16-byte aligned addresses, operands of less than 2^32 elements; heads of 128.
#include <gemm/kernel_mma.cuh>

using namespace kl::gemm::portable;

KL_DYNAMIC_SHARED(128);

#define KL_FAMILY_gemm_fp8_sm89 ~,
#define KL_ROW(family, m, n, block_k, warps, stages, ctas_per_sm, relative_cost)           \
  using Tile##m##x##n = MmaTile<m, n, warps, block_k, stages, E4m3Mma, /*promotes*/ true>; \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlGemm, Tile##m##x##n, ctas_per_sm) { gemm<Tile##m##x##n>(p, dynamic_shared); }
#include <kernels.def>
