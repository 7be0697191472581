// Attention with a wide head on Hopper, up to 512: what attention_wide_mma.cu computes, with TMA, wgmma and clusters.
//
//   kl_attention_wide_sm90_512, _384   softmax(q k^T * scale) v for any logits, one KV segment: online softmax with a running row
//                                      maximum. Named by the head
//
// Bound: shared memory, tensor cores and L2, about equally (see attention/wide_sm90.cuh). 4 * queries * keys * head FLOP per head.
// Needs: heads of this size, or a single one of a multiple of 8 below it, whose missing columns TMA fills with zeros; bf16, addresses and
// strides that are multiples of 16 bytes.
#include <attention/wide_sm90.cuh>
#include <common/tile_row.cuh>

using namespace kl::attention::wide;

#define KL_ATTENTION_WIDE_SM90(file, head, stages, threads, shared_bytes)     \
  using Head##head = WideConfig<head, stages>;                                \
  static_assert(row_states<kThreads, threads>());                             \
  static_assert(row_states<Head##head::kSmemBytes, shared_bytes>());          \
  KL_ENTRY(kl_##file##_##head, KlAttentionSm90, threads, 1) { attention<Head##head>(p); }
#include <tiles.def>
