// GEMM on tensor cores, portable (sm_80 and newer), with a fused epilogue.
//
//   kl_gemm_bf16_sm80_256x128, ...   out = epilogue(alpha x w^T + bias), bf16 operands, f32 accumulators; named by the tile, rows x columns;
//                                    alpha is the scale of weights that expand.cu has expanded
//     store           out
//     swiglu          silu(gate) * up; w is all gate rows, then all up rows; a tile has 64 columns of each, interleaved
//     gate_residual   out += gate * (...)
//     qk_norm_rope    one head of 128 columns per tile: RMS norm with weight (qk-norm), then RoPE
//
// One launch takes up to two streams (the text and the image tokens of a double block). Each has up to four ranges of weight rows with
// their own epilogues and outputs (Q, K, V, MLP).
// Bound: tensor cores. A denoising step of klein 4B at 1024x1024 is 29 TFLOP of this.
// Needs: bf16, K and the strides of x and w multiples of 8, 16-byte aligned addresses, operands of less than 2^32 elements; heads of 128.
#include <gemm/kernel_mma.cuh>

using namespace kl::gemm::portable;

KL_DYNAMIC_SHARED(128);

#define KL_FAMILY_gemm_bf16_sm80 ~,
#define KL_ROW(family, m, n, block_k, warps, stages, ctas_per_sm, relative_cost) \
  using Tile##m##x##n = MmaTile<m, n, warps, block_k, stages>;                   \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlGemm, Tile##m##x##n, ctas_per_sm) { gemm<Tile##m##x##n>(p, dynamic_shared); }
#include <kernels.def>
