// Attention with a wide head on Hopper, up to 512: the results of attention_wide_bf16_sm80.cu, with TMA, wgmma and clusters.
//
//   kl_attention_wide_bf16_sm90_128x512, _128x384   softmax(q k^T * scale) v for any logits, one KV segment: online softmax with a running
//                                                   row maximum. Named by the queries of a cluster and the head
//
// Bound: shared memory, tensor cores and L2, about equally (see attention/wide_sm90.cuh). 4 * queries * keys * head FLOP per head.
// Needs: heads of this size, or a single smaller head that is a multiple of 8 (TMA fills its missing columns with zeros); bf16, addresses
// and strides that are multiples of 16 bytes.
#include <attention/wide_sm90.cuh>

using namespace kl::attention::wide;

#define KL_FAMILY_attention_wide_bf16_sm90 ~,
#define KL_ROW(family, m, n, stages)        \
  using Head##n = WideConfig<m, n, stages>; \
  KL_TILE_ENTRY(kl_##family##_##m##x##n, KlAttentionSm90, Head##n, 1) { attention<Head##n>(p); }
#include <kernels.def>
