// GEMM on Hopper: the results of kl_gemm_bf16_sm80 (see gemm_bf16_sm80.cu for the epilogues), with TMA, wgmma and thread-block clusters.
//
//   kl_gemm_bf16_sm90_256x192, ...   out = epilogue(x w^T + bias), bf16, f32 accumulators; named by the tile, rows x columns
//
// Bound: tensor cores and, for large GEMMs, the power they draw: at 700 W the clock falls until energy, not cycles, decides how long a
// GEMM takes. Most of what can be saved is bytes moved to the SMs, hence tiles as large as the registers hold and multicast operands.
// Needs: as kl_gemm_bf16_sm80; bf16 outputs at 16-byte aligned addresses with strides that are multiples of 8; for qk-norm tiles of 128 or
// 256 columns, which are whole heads; the same K for all streams.
//
// Persistent and warp-specialized: one CTA per SM stays for the whole GEMM. One thread of the producer warpgroup loads both operands by
// TMA, 64 of K per stage, into a pipeline of shared-memory stages with full and empty mbarriers. Two or three consumer warpgroups run
// wgmma on 64 or 128 rows each, and each warp stores its own sixteen rows by TMA, while the producer already fills the pipeline for the
// next tile. The residual of the gate_residual epilogue comes through the pipeline as well.
//
// Two CTAs are a cluster (ClusterMode). They may share rows of x or rows of w: each CTA loads one half and multicasts it to both. Or, for
// GEMMs with few tiles, the cluster has one tile and splits its K (split-K). Each CTA accumulates half of the k-blocks and then finishes
// one warpgroup's rows, with the peer's partials for them received through distributed shared memory.
//
// Without split-K, tiles are scheduled by Stream-K as in gemm_bf16_sm80.cu, with clusters as workers (persistent/stream_k.cuh).
//
// SwiGLU has gate columns in the left half of a tile and up columns in the right half, so that a thread holds both in registers. It also
// holds both members of a RoPE pair, whether they are adjacent or 64 apart.
//
// The kernel itself is gemm/tma_mainloop.cuh; a row of kernels.def makes an entry point.
#include <gemm/tma_mainloop.cuh>
#include <gemm/tma_policies.cuh>

using namespace kl::gemm;

static_assert(sizeof(KlGemmTma) % 128 == 0, "abi.h leaves a gap");

#define KL_FAMILY_gemm_bf16_sm90 ~,
#define KL_ROW(family, m, n, block_k, consumers, stages, mode, mixed, relative_cost)                      \
  using Tile##m##x##n = GemmConfig<Bf16Policies, m, n, block_k, consumers, stages, ClusterMode::k##mode>; \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlGemmTma, Tile##m##x##n, 1) { gemm<Tile##m##x##n>(p); }
#include <kernels.def>
