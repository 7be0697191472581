/* What the host and the kernels agree on: the parameters of every kernel and the constants both sides use.
 *
 * The only file that both compilers read. It includes nothing but <stdint.h>, so that bindgen needs no CUDA headers. Addresses
 * are 64-bit integers; every struct is passed by value as a kernel's only parameter. Sizes are checked on both sides: bindgen
 * asserts the layout it found, and the runtime asks the driver how large each kernel's parameter is. */
#ifndef KILN_ABI_H
#define KILN_ABI_H

#include <stdint.h>

/* Element types of a KlMat. */
#define KL_F32 0u
#define KL_BF16 1u
#define KL_F16 2u
#define KL_U32 3u
#define KL_U8 4u

/* A matrix: `rows` rows of `cols` elements, `stride` elements from row to row. A `data` of zero means "not there". */
typedef struct {
  uint64_t data;
  uint64_t stride;
  uint32_t rows;
  uint32_t cols;
  uint32_t dtype;
  uint32_t unused;
} KlMat;

/* A tensor map as the driver encodes it, which lies in a kernel's parameters at this alignment. */
#ifdef __cplusplus
#define KL_ALIGN(bytes) alignas(bytes)
#else
#define KL_ALIGN(bytes) _Alignas(bytes)
#endif

typedef struct {
  KL_ALIGN(128) uint64_t opaque[16];
} KlTensorMap;

/* ---------------------------------------------------------------------------------------------------- pointwise.cu */

#define KL_POINTWISE_THREADS 256u

/* What kl_map does to each value. */
#define KL_COPY 0u
#define KL_SILU 1u

typedef struct {
  KlMat out, x;
  uint32_t function;
  uint32_t unused;
} KlMap;

/* Bits of the word that kernels set when they meet something impossible. */
#define KL_FAULT_TOKEN 1u

typedef struct {
  KlMat out, ids, table;
  uint64_t fault;
} KlEmbed;

typedef struct {
  KlMat tokens, pixels, mean, var;
  uint32_t width;
  float eps;
} KlPatch;

typedef struct {
  KlMat latents, velocity;
  float dt;
  uint32_t unused;
} KlEuler;

typedef struct {
  KlMat out, cond, uncond;
  float scale;
  uint32_t unused;
} KlGuidance;

typedef struct {
  KlMat out, x;
} KlPixels;

/* Loads of 16 bytes that a thread has on their way at once. */
#define KL_COUNT_BATCH 4u

/* `words`: how many blocks are done, and what they counted; zero before and after. */
typedef struct {
  KlMat count, x;
  uint64_t words;
} KlCount;

/* --------------------------------------------------------------------------------------------------------- norm.cu */

#define KL_NORM_THREADS 128u
#define KL_NORM_THREADS_WIDE 512u
/* Rows that a block of a row norm takes. */
#define KL_NORM_ROWS 2u

typedef struct {
  KlMat out, x, weight;
  float eps;
  uint32_t unused;
} KlRmsNorm;

#define KL_STREAMS 2u

typedef struct {
  KlMat out, x, shift, scale;
} KlModulated;

typedef struct {
  KlModulated stream[KL_STREAMS];
  float eps;
  uint32_t unused;
} KlLayerNorm;

#define KL_ROPE_INTERLEAVED 0u
#define KL_ROPE_HALF_SPLIT 1u

/* Heads of one tensor, normalised and rotated where they lie. */
typedef struct {
  KlMat x, weight, table;
  float scale; /* after the norm */
  uint32_t unused;
} KlQkHeads;

/* Queries and keys of two streams. */
#define KL_QK_PARTS 4u
/* Heads that one warp takes, one after the other. */
#define KL_HEADS_PER_WARP 8u

typedef struct {
  KlQkHeads part[KL_QK_PARTS];
  uint32_t head_dim;
  uint32_t style;
  float eps;
  uint32_t unused;
} KlQkNormRope;

#define KL_GROUP_THREADS 256u
/* Most groups a normalisation may have. */
#define KL_GROUPS 64u
/* Most blocks that share the statistics of an image. */
#define KL_PARTIALS 1024u

/* `partials` are two f32 for each block and group. */
typedef struct {
  KlMat x, stats;
  uint64_t partials;
  uint64_t blocks;
  uint32_t groups;
  uint32_t unused;
} KlGroupStats;

/* `stats` are means and variances; if absent, those of the `partials` that `blocks` blocks of kl_group_stats left. */
typedef struct {
  KlMat out, x, weight, bias, stats;
  uint64_t partials;
  uint32_t blocks;
  uint32_t groups;
  float eps;
  uint32_t silu;
} KlGroupNorm;

/* -------------------------------------------------------------------------------------------------------- naive.cu */

#define KL_NAIVE_TILE 64u
#define KL_NAIVE_THREADS 256u

/* What becomes of a product. */
#define KL_STORE 0u
#define KL_SWIGLU 1u
#define KL_GATE_RESIDUAL 2u

/* `bias` and `gate` may be absent; `w` has twice as many rows as `out` has columns for KL_SWIGLU, gates first. */
typedef struct {
  KlMat out, x, w, bias, gate;
  uint32_t epilogue;
  uint32_t unused;
} KlNaiveGemm;

/* Runs of keys that one launch takes. */
#define KL_KV_SEGMENTS 16u
#define KL_ATTENTION_WARPS 4u
/* Largest head. */
#define KL_HEAD_DIM 512u

typedef struct {
  KlMat k, v;
} KlKeyValues;

typedef struct {
  KlMat out, q;
  KlKeyValues kv[KL_KV_SEGMENTS];
  uint32_t segments;
  uint32_t head_dim;
  uint32_t group;
  uint32_t causal;
  float scale;
  uint32_t unused;
} KlAttention;

/* On tensor cores. */
#define KL_ATTENTION_BLOCK_Q 128u
#define KL_ATTENTION_SHARED 98304u
/* With a head of 512. */
#define KL_WIDE_HEAD 512u
#define KL_WIDE_THREADS_64 256u
#define KL_WIDE_SHARED_64 135936u
#define KL_WIDE_THREADS_32 128u
#define KL_WIDE_SHARED_32 100736u

#define KL_SAME 0u
#define KL_UP 1u
#define KL_DOWN 2u

/* Sides of an image are at most this. */
#define KL_CONV_SIDE 16384u

/* `w` is stored output channel, kernel row, kernel column, input channel. Where there is a `stats`, tiles leave what it takes for
 * each group in `partials`, sixteen bytes each. */
typedef struct {
  KlMat out, x, w, bias, residual, stats;
  uint64_t partials;
  uint32_t row_tiles;
  uint32_t groups;
  uint32_t width, height;
  uint32_t sampling;
  uint32_t unused;
} KlConv;

/* ----------------------------------------------------------------------------------------- gemm_mma.cu, conv_mma.cu */

#define KL_MMA_THREADS 128u
#define KL_MMA_THREADS_256 256u
#define KL_MMA_COLS 128u
#define KL_MMA_SHARED_256 147456u
#define KL_MMA_SHARED_128 49152u
#define KL_MMA_SHARED_64 73728u
/* Of the inner dimension, in one round. */
#define KL_MMA_BLOCK_K_256 64u
#define KL_MMA_BLOCK_K_128 32u
#define KL_MMA_BLOCK_K_64 64u

/* One more thing that may become of a product: heads of 128 columns, normalised and rotated. */
#define KL_QK_NORM_ROPE 3u

/* Some columns of a product and where they go. `extra` is the gate of KL_GATE_RESIDUAL or the norm weight of KL_QK_NORM_ROPE. */
typedef struct {
  KlMat out, extra;
  uint32_t epilogue;
  uint32_t first_row; /* of the weight */
  uint32_t tiles;     /* of columns */
  float scale;        /* of heads, after their norm */
} KlGemmPart;

#define KL_GEMM_PARTS 4u

typedef struct {
  KlMat x, w, bias, table;
  KlGemmPart part[KL_GEMM_PARTS];
  uint32_t row_tiles;
  uint32_t col_tiles;
  uint32_t rope;
  float eps;
} KlGemmStream;

/* How the tiles of all streams are scheduled (Stream-K): CTAs take the first `full_tiles` whole; the `k_blocks` of each of the others
 * are divided evenly among workers, of which the first `remainder` take one more than `k_blocks_per_worker`. Accumulators of tiles
 * that a worker did not finish pass through `partials`, with `flags`, which are zero before and after a launch. */
typedef struct {
  uint64_t partials;
  uint64_t flags;
  uint32_t k_blocks;
  uint32_t full_tiles;
  uint32_t k_blocks_per_worker;
  uint32_t remainder;
} KlTileSchedule;

typedef struct {
  KlGemmStream stream[KL_STREAMS];
  KlTileSchedule schedule;
} KlGemm;

/* ---------------------------------------------------------------------------------------------- gemm_bf16_sm90.cu */

/* Blocks that share an operand. */
#define KL_SM90_CLUSTER 2u
#define KL_SM90_BLOCK_K 64u
/* Rows that a warp stores at once; with them 64 columns, or 32 or 16 where a tile is no multiple of those. */
#define KL_SM90_STORE_ROWS 16u
/* By the tile, rows x columns. */
#define KL_SM90_THREADS_256X192 384u
#define KL_SM90_THREADS_192X192 512u
#define KL_SM90_THREADS_128X256 384u
#define KL_SM90_THREADS_128X208 384u
#define KL_SM90_THREADS_128X192 384u
#define KL_SM90_THREADS_128X160 384u
#define KL_SM90_SHARED_256X192 222256u
#define KL_SM90_SHARED_192X192 222272u
#define KL_SM90_SHARED_128X256 230464u
#define KL_SM90_SHARED_128X208 228432u
#define KL_SM90_SHARED_128X192 230464u
#define KL_SM90_SHARED_128X160 226416u

/* As KlGemm; `row_tiles` and `col_tiles` of a stream are those of a cluster, which walks `group` of the rows before it goes on to
 * the next columns. `out` has the maps of the parts, `residual` that of the first where its residual is read. */
typedef struct {
  KlTensorMap x[KL_STREAMS], w[KL_STREAMS], out[KL_STREAMS][KL_GEMM_PARTS], residual[KL_STREAMS];
  KlGemmStream stream[KL_STREAMS];
  uint32_t group[KL_STREAMS];
  KlTileSchedule schedule;
  uint64_t unused[7];
} KlGemmSm90;

/* --------------------------------------------------------------------------------------------- attention_sm90.cu */

/* Runs of keys that one launch takes; none is empty. */
#define KL_SM90_KV_SEGMENTS 8u
#define KL_SM90_BLOCK_Q 128u
#define KL_SM90_ATTENTION_THREADS 384u
/* Of a round. */
#define KL_SM90_BLOCK_KV 128u
/* Without a mask, and with one. */
#define KL_SM90_ATTENTION_SHARED 230536u
#define KL_SM90_CAUSAL_SHARED 164960u

/* A tile is `pack` heads of KL_SM90_BLOCK_Q / pack queries each; those heads share their keys. A cluster's tiles lie below each
 * other, and there are `row_tiles` such pairs; with a mask there are no clusters, and half of a tile's queries come from the end.
 * `schedule` counts rounds of keys. `scale` makes scores exponents of two; the kernel without a maximum takes them as they are. */
typedef struct {
  KlTensorMap q, k[KL_SM90_KV_SEGMENTS], v[KL_SM90_KV_SEGMENTS];
  KlMat out;
  KlTileSchedule schedule;
  uint32_t keys[KL_SM90_KV_SEGMENTS];
  uint32_t row_tiles;
  uint32_t group;
  uint32_t pack;
  float scale; /* of powers of two */
  uint64_t unused[2];
} KlAttentionSm90;

/* ------------------------------------------------------------------------------------------------ selftest_sm90.cu */

#define KL_SELFTEST_TILE 64u
#define KL_SELFTEST_THREADS 128u
#define KL_SELFTEST_CLUSTER 2u

typedef struct {
  KlTensorMap x;
  KlMat out;
  uint64_t unused[12];
} KlSelftest;

#endif
