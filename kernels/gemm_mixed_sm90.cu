// W8A16 GEMM on Hopper: the GEMM of gemm_bf16_sm90.cu with weights of e4m3, which are expanded to bf16 on their way into the pipeline.
//
//   kl_gemm_mixed_sm90_256x192, ...   out = epilogue(alpha x w^T + bias), activations of bf16, weights of e4m3 or bf16, f32 accumulators
//
// Bound: as gemm_bf16_sm90.cu; half of the bytes of a weight. By the count of their instructions, 40 for sixteen codes, the writer warps
// are busy for about two thirds of the time that the MMAs of a k-block take with 128 rows, and a third with 256.
// Needs: what gemm_bf16_sm90.cu needs; weights of e4m3 at 16-byte aligned addresses with strides that are multiples of 16; outputs of
// bf16 or, of SwiGLU and qk-norm, e4m3.
//
// Text encoders whose files have e4m3 keep the codes in memory, but their activations are not quantised. Each matrix of a weight has a
// format of its own, so that queries, keys and values, or gates and ups, of different formats are one launch.
#include <common/tile_row.cuh>
#include <gemm/expand_sm90.cuh>
#include <gemm/mainloop_sm90.cuh>
#include <gemm/policies_sm90.cuh>

template <int kRawStages>
struct MixedInputPolicies {
  using Params = KlGemmSm90;
  using OperandA = RowsA;
  using OperandB = ExpandedB<kRawStages>;
  using Mma = MmaBf16;
  using Scaling = Scaled;
  using Store = StoreBf16OrE4m3Rows;
};

#define KL_GEMM_MIXED_SM90(file, m, n, block_k, consumers, stages, raw_stages, mode, threads, shared_bytes, relative_cost)     \
  using Tile##m##x##n = GemmConfig<MixedInputPolicies<raw_stages>, m, n, block_k, consumers, stages, ClusterMode::k##mode>;         \
  static_assert(row_states<Tile##m##x##n::kThreads, threads>());                                                               \
  static_assert(row_states<Tile##m##x##n::kSmemBytes, shared_bytes>());                                                        \
  KL_ENTRY(kl_##file##_##m##x##n, KlGemmSm90, threads, 1) { gemm<Tile##m##x##n>(p); }
#include <tiles.def>
