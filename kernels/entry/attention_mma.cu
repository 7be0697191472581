// Attention on tensor cores, portable (sm_80 and newer): softmax(q k^T * scale) v, with online softmax (attention/kernel_mma.cuh).
//
//   kl_attention_mma     heads of 128; several KV segments, grouped-query attention (GQA), optional causal mask
//   kl_attention_mma_8   the same with eight warps
//
// Four warps have 32 queries each and take blocks of 64 keys. Tensor cores have work while one of two CTAs on an SM computes its softmax.
// Where shared memory has room for one only, it has eight warps with 16 queries each, which read K and V twice as often.
// Bound: tensor cores. 4 * queries * keys * 128 FLOP per head; klein 4B at 1024x1024: 0.26 TFLOP per transformer block.
// Needs: bf16, strides multiples of 8, 16-byte aligned addresses; the output may also be e4m3 or e2m1.
#include <attention/kernel_mma.cuh>

using namespace kl::attention;
using namespace kl::attention::portable;

template <int kThreads>
using Config = AttentionConfig<kThreads, /*keys*/ 64, Bf16Mma, Exp2Masked, /*causal*/ true>;
static_assert(Config<KL_ATTENTION_THREADS>::kSharedBytes == KL_ATTENTION_SHARED, "abi.h states another size");

KL_DYNAMIC_SHARED(128);

KL_ENTRY(kl_attention_mma, KlAttention, KL_ATTENTION_THREADS, 2) { attention<Config<KL_ATTENTION_THREADS>>(p, dynamic_shared); }
KL_ENTRY(kl_attention_mma_8, KlAttention, 2 * KL_ATTENTION_THREADS, 1) { attention<Config<2 * KL_ATTENTION_THREADS>>(p, dynamic_shared); }
