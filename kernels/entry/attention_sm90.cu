// Attention on Hopper: what kl_attention_mma computes, with TMA, wgmma and clusters, after FlashAttention-3 (Shah et al. 2024).
//
//   kl_attention_sm90           max-free softmax: 2^(q k^T) v divided by the row sum, where logits are known to be bounded (see
//                               attention/kernel_sm90.cuh)
//   kl_attention_sm90_running   softmax(q k^T * scale) v for any logits: online softmax with a running row maximum
//   kl_attention_sm90_causal    online softmax with a causal mask; query heads that share a KV head are packed into one tile (GQA)
//   ..._e4m3                    the same with queries and keys in e4m3: their MMAs take half the time, and K half the bytes of a stage
//
// Bound: tensor cores, 4 * queries * keys * 128 FLOP per head; and the power they draw.
// Needs: heads of 128; values of bf16, queries and keys of bf16 or both of e4m3; addresses and strides that are multiples of 16 bytes.
#include <attention/kernel_sm90.cuh>
#include <common/tile_row.cuh>

using namespace kl::attention;

static_assert(sizeof(KlAttentionSm90) % 128 == 0, "abi.h leaves a gap");

#define KL_ATTENTION_SM90(file, symbol, name, stages, cluster, qk, running_max, causal, threads, shared_bytes) \
  using name = AttentionConfig<stages, cluster, qk, running_max, causal>;                                      \
  static_assert(row_states<kThreads, threads>());                                                              \
  static_assert(row_states<name::kSmemBytes, shared_bytes>());                                                 \
  KL_ENTRY(symbol, KlAttentionSm90, threads, 1) { attention<name>(p); }
#include <tiles.def>
