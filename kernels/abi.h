/* The interface between host and kernels: the parameter struct of every kernel and the constants that both sides use.
 *
 * This is the only file that both compilers read. It includes nothing but <stdint.h>, so that bindgen needs no CUDA headers. Addresses
 * are 64-bit integers; every struct is passed by value as a kernel's only parameter. Sizes are checked on both sides: bindgen asserts the
 * layout it found, and the runtime asks the driver how large each kernel's parameter is. */
#ifndef KILN_ABI_H
#define KILN_ABI_H

#include <stdint.h>

/* The dtype of a KlMat. */
#define KL_F32 0u
#define KL_BF16 1u
#define KL_F16 2u
#define KL_U8 3u
#define KL_E4M3 4u
#define KL_E2M1 5u

/* Tiles of the block scales of KL_E2M1: rows, columns of the matrix, bytes. */
#define KL_SCALE_TILE_ROWS 128u
#define KL_SCALE_TILE_COLS 64u
#define KL_SCALE_TILE_BYTES 512u

/* A matrix: `rows` rows of `cols` elements, `stride` elements from row to row. A KL_E4M3 element stands for `scale` times its value. A
 * KL_E2M1 element stands for `scale` times its value times the scale of its block of sixteen columns; two elements share a byte, the
 * even column in the high nibble. `scales` is optional: one more f32 factor per row or, for KL_E2M1, the e4m3 block scales. Block scales
 * are in tiles of KL_SCALE_TILE_BYTES for 128 rows by four blocks, along the columns of all `stride` elements first. Sixteen bytes of a
 * tile hold four scales for each of the rows r, r + 32, r + 64 and r + 96. An absent matrix has a `data` of zero. */
typedef struct {
  uint64_t data;
  uint64_t scales;
  uint64_t stride;
  uint32_t rows;
  uint32_t cols;
  uint32_t dtype;
  float scale;
} KlMat;

/* A TMA tensor map as the driver encodes it; kernel parameters hold it at this alignment. */
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

/* The function that kl_map applies to each value. */
#define KL_COPY 0u
#define KL_SILU 1u

typedef struct {
  KlMat out, x;
  uint32_t function;
  uint32_t unused;
} KlMap;

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

/* Rows of `latents` stay where `keep` is zero, if there is one. `cols` are the columns of a row; the host may pass all rows as one. */
typedef struct {
  KlMat latents, init, noise, keep;
  float sigma;
  uint32_t cols;
} KlRenoise;

typedef struct {
  KlMat out, cond, uncond;
  float scale;
  uint32_t unused;
} KlGuidance;

/* The overlap of two tiles: `steps` rows or, if `channels` is above zero, `steps` columns of pixels. */
typedef struct {
  KlMat into, from;
  uint32_t channels, steps;
} KlBlend;

/* `width` tokens are a row of `latents`. The last row of `table` is the bias. */
typedef struct {
  KlMat out, latents, table;
  uint32_t width;
  uint32_t unused;
} KlPreview;

typedef struct {
  KlMat out, x;
} KlPixels;

/* Loads of 16 bytes that a thread of a reduction has in flight. */
#define KL_REDUCTION_BATCH 4u

/* `words` are two counters: the CTAs that have finished, and the values they have counted. Both are zero before and after a launch. */
typedef struct {
  KlMat count, x;
  uint64_t words;
} KlCount;

/* Before a launch, `largest` is zero or an earlier result. */
typedef struct {
  KlMat largest, x;
} KlLargest;

/* -------------------------------------------------------------------- norm_rows.cu, qk_norm_rope.cu, group_norm.cu */

#define KL_NORM_THREADS 128u
/* Rows per CTA of a row norm. */
#define KL_NORM_ROWS 2u

/* `saturated` as in KlGemmTma, here and below. */
typedef struct {
  KlMat out, x, weight;
  uint64_t saturated;
  float eps;
  uint32_t unused;
} KlRmsNorm;

#define KL_STREAMS 2u

typedef struct {
  KlMat out, x, shift, scale;
} KlModulated;

typedef struct {
  KlModulated stream[KL_STREAMS];
  uint64_t saturated;
  float eps;
  uint32_t unused;
} KlLayerNorm;

#define KL_ROPE_INTERLEAVED 0u
#define KL_ROPE_HALF_SPLIT 1u

/* The heads of one tensor, normalized and rotated in place. */
typedef struct {
  KlMat x, weight, table;
  float scale; /* applied after the norm */
  uint32_t unused;
} KlQkHeads;

/* Q and K of two streams. */
#define KL_QK_PARTS 4u
/* Heads that one warp processes, one after the other. */
#define KL_HEADS_PER_WARP 8u

typedef struct {
  KlQkHeads part[KL_QK_PARTS];
  uint32_t head_dim;
  uint32_t style;
  float eps;
  uint32_t unused;
} KlQkNormRope;

#define KL_GROUP_THREADS 256u
/* The largest number of groups of a group norm. */
#define KL_GROUPS 64u
/* The largest number of CTAs that compute the statistics of an image. */
#define KL_PARTIALS 1024u

/* `partials` are two f32 for each CTA and group. */
typedef struct {
  KlMat x, stats;
  uint64_t partials;
  uint64_t blocks;
  uint32_t groups;
  uint32_t unused;
} KlGroupStats;

/* `stats` are means and variances; if absent, the kernel computes them from the `partials` that `blocks` CTAs of kl_group_stats have
 * stored. */
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

/* Epilogues of a GEMM. */
#define KL_STORE 0u
#define KL_SWIGLU 1u
#define KL_GATE_RESIDUAL 2u

/* `bias`, `gate` and `down_out` may be absent. `w` are matrices of the weight, and the GEMM starts at row `first` of each. KL_SWIGLU
 * takes gate rows first, then up rows. KlGemmStream describes `down_out` and `up`; `up` starts at these rows as well. */
typedef struct {
  KlMat out, x, w[2], bias, gate, down_out, up[2];
  uint64_t saturated;
  uint32_t first[2];
  uint32_t epilogue;
  uint32_t unused;
} KlNaiveGemm;

/* The largest number of KV segments of one launch. */
#define KL_KV_SEGMENTS 16u
#define KL_ATTENTION_WARPS 4u
/* The largest head dimension. */
#define KL_HEAD_DIM 512u

typedef struct {
  KlMat k, v;
} KlKeyValues;

typedef struct {
  KlMat out, q;
  KlKeyValues kv[KL_KV_SEGMENTS];
  uint64_t saturated;
  uint32_t segments;
  uint32_t head_dim;
  uint32_t group;
  uint32_t causal;
  float scale;
  uint32_t unused;
} KlAttention;

/* attention_bf16_sm80.cu and attention_fp8_sm89.cu: queries per CTA. */
#define KL_ATTENTION_BLOCK_Q 128u
/* attention_wide_bf16_sm80.cu: the head dimension, the largest there is. */
#define KL_WIDE_HEAD 512u

#define KL_SAME 0u
#define KL_UP 1u
#define KL_DOWN 2u

/* Threads of kl_conv_stats. */
#define KL_CONV_STATS_THREADS 512u

/* The largest side of an image. */
#define KL_CONV_SIDE 16384u

/* `w` is [output channel, kernel row, kernel column, input channel]. With KL_UP it is in phase form: [output channel, parity of the
 * output row, parity of the output column, kernel row (of two), kernel column (of two), input channel]. With `stats`, tiles store their
 * moments of each group in `partials`, sixteen bytes each, for kl_conv_stats. */
typedef struct {
  KlMat out, x, w, bias, residual, stats;
  uint64_t partials;
  uint32_t row_tiles;
  uint32_t groups;
  uint32_t width, height;
  uint32_t sampling;
  uint32_t unused;
} KlConv;

/* kl_norm_conv_narrow: threads; columns of a strip, the last two without outputs; maximum input and output channels; bytes of shared
 * memory. The bytes are six rows of 27 f32 for each column (and four more), two f32 for each channel, and 32 rows of filters. */
#define KL_NARROW_THREADS 128u
#define KL_NARROW_COLS 48u
#define KL_NARROW_CHANNELS 128u
#define KL_NARROW_OUTPUTS 3u
#define KL_NARROW_SHARED 44960u
/* kl_conv_narrow_in: threads; maximum input and output channels. */
#define KL_NARROW_IN_THREADS 256u
#define KL_NARROW_IN_CHANNELS 3u
#define KL_NARROW_IN_OUTPUTS 256u

/* Group norm with `gain` and `shift`, SiLU and a 3x3 convolution of the same size. `stats` are the mean and the variance of each group. A
 * CTA of kl_norm_conv_narrow computes `strip_rows` rows, two less than a multiple of its warps. */
typedef struct {
  KlMat out, x, w, bias, stats, gain, shift;
  uint32_t width, height;
  float eps;
  uint32_t strip_rows;
} KlNormConv;

/* ----------------------------------------------------------------------- gemm_bf16_sm80.cu, gemm_fp8_sm89.cu, conv_bf16_sm80.cu */

/* Columns of a portable tile, and of an attention head. */
#define KL_MMA_COLS 128u

/* One more epilogue of the tensor-core GEMMs: qk-norm and RoPE of heads of 128 columns. */
#define KL_QK_NORM_ROPE 3u

/* A factor in the `alpha` of KL_E2M1 weights. Kernels expand an element to bf16 as 2^-9 times its value times its block scale: with its
 * bits moved to where bf16 has them, an element is 2^-126 times its value. 2^126 times a scale of up to 448 would be more than bf16 can
 * hold; 2^117 times the scale is not. */
#define KL_E2M1_ALPHA 512.0f

/* Rows of a weight: they start at row `first` of one of the stream's matrices, whose type is `dtype`. Accumulators are multiplied by
 * `alpha`: the scale of x times the scale of the matrix, times KL_E2M1_ALPHA for KL_E2M1. */
typedef struct {
  uint32_t matrix;
  uint32_t first;
  uint32_t dtype;
  float alpha;
} KlGemmRows;

/* A column range of a GEMM, with its epilogue and output. `extra` is the gate of KL_GATE_RESIDUAL or the norm weight of KL_QK_NORM_ROPE.
 * `w[0]` are the weight rows, or the gate rows of KL_SWIGLU; `w[1]` are the up rows. */
typedef struct {
  KlMat out, extra;
  KlGemmRows w[2];
  uint32_t epilogue;
  uint32_t first_col; /* the first column of the bias, and row of `up` */
  uint32_t tiles;     /* the number of column tiles */
  float scale;        /* applied to heads after their norm, and to results of KL_SWIGLU; divided by the scale of an e4m3 output */
} KlOutputRange;

#define KL_GEMM_PARTS 4u

/* `w` are the matrices that make up the weight, one below the other. A LoRA branch, `up down`, may be added to it: `down_out`, if
 * present, is x times the transpose of `down`, and `up` has a row for each row of the weight. Both are KL_BF16. */
typedef struct {
  KlMat x, w[KL_GEMM_PARTS], bias, table, down_out, up;
  KlOutputRange part[KL_GEMM_PARTS];
  uint32_t row_tiles;
  uint32_t col_tiles;
  uint32_t rope;
  float eps;
} KlGemmStream;

/* The Stream-K schedule of the tiles of all streams. CTAs take the first `full_tiles` whole. The k-blocks of the other tiles, `k_blocks`
 * each, are divided evenly among workers: the first `remainder` workers take one more than `k_blocks_per_worker`. Accumulators of
 * unfinished tiles pass to the next worker through `partials`, with `flags`. Flags are zero before and after a launch. */
typedef struct {
  uint64_t partials;
  uint64_t flags;
  uint32_t k_blocks;
  uint32_t full_tiles;
  uint32_t k_blocks_per_worker;
  uint32_t remainder;
} KlTileSchedule;

/* `saturated` as in KlGemmTma. */
typedef struct {
  KlGemmStream stream[KL_STREAMS];
  KlTileSchedule schedule;
  uint64_t saturated;
} KlGemm;

/* ----------------------------------------------------------------------------------------------------- lora_down.cu */

#define KL_LORA_DOWN_THREADS 256u
/* Output rows and maximum output columns of a CTA. The columns are a multiple of KL_LORA_DOWN_STEP. */
#define KL_LORA_DOWN_ROWS 32u
#define KL_LORA_DOWN_COLS 64u
#define KL_LORA_DOWN_STEP 16u

/* out = x down^T, for each stream that has an `out`. */
typedef struct {
  KlMat out, x, down;
} KlReduction;

typedef struct {
  KlReduction stream[KL_STREAMS];
} KlLoraDown;

/* ------------------------------------------------------------------------------------------------------- expand.cu */

#define KL_EXPAND_THREADS 256u
/* Elements that a thread expands at a time, and how many times it does so. */
#define KL_EXPAND_VECTOR 8u
#define KL_EXPAND_BATCH 4u
/* The matrices of all streams of a GEMM. */
#define KL_EXPAND_MATRICES 8u

/* KL_E4M3 or KL_E2M1 matrices, and the addresses they are expanded to, without gaps between rows. */
typedef struct {
  KlMat w[KL_EXPAND_MATRICES];
  uint64_t to[KL_EXPAND_MATRICES];
} KlExpand;

/* ------------------------------------------------------------- gemm_bf16_sm90.cu, gemm_fp8_sm90.cu, gemm_mixed_sm90.cu */

/* CTAs per cluster. */
#define KL_SM90_CLUSTER 2u
/* Rows of a TMA store box; it has as many columns as the largest power of two that divides the tile's, up to KL_SM90_BOX_COLS. */
#define KL_TMA_STORE_ROWS 16u
/* Rows of a wgmma, which a consumer warpgroup computes together. */
#define KL_TMA_WARPGROUP_ROWS 64u
/* Columns of a bf16 TMA box: the 128 bytes that the swizzle allows. An e4m3 box can have twice as many. */
#define KL_SM90_BOX_COLS 64u
/* Bytes of shared memory that a CTA can have on Hopper, and with compute capability 12.x. */
#define KL_SM90_SHARED_LIMIT 232448u
#define KL_SM120_SHARED_LIMIT 101376u
/* Columns of a bf16 TMA box that stores results on compute capability 12.x: shared memory has no room for more. */
#define KL_SM120_BOX_COLS 32u

/* Weight rows and k-blocks of a unit of expansion. */
#define KL_EXPANSION_ROWS 32u
#define KL_EXPANSION_GROUP 4u
/* Counters before the flags: the next unit, and the warps that have finished. */
#define KL_EXPANSION_COUNTERS 2u

/* Quantized matrices of a weight are expanded to bf16 while the GEMM runs: to `to`, without gaps between rows, where the maps of `w`
 * point. A unit of work is up to KL_EXPANSION_ROWS rows of one half of a tile's columns by KL_EXPANSION_GROUP k-blocks. There are
 * `units` of them, zero if no weight is quantized. Units are taken in the order in which tiles need them: `tiles` column tiles at a
 * time, which are the tiles of a wave. `counters` are 32-bit numbers, zero before and after a launch: KL_EXPANSION_COUNTERS, then for
 * each column tile and group of k-blocks the number of finished units. */
typedef struct {
  uint64_t counters;
  uint64_t to[KL_STREAMS][KL_GEMM_PARTS];
  uint32_t units;
  uint32_t tiles;
} KlExpansion;

/* KlGemm with tensor maps. `row_tiles` and `col_tiles` of a stream count cluster tiles. Rasterization goes down `group` row tiles before
 * it goes on to the next columns. `out` has a map for each part, `residual` a map for the residual of the first part, `down_out` and
 * `up` the maps of the LoRA branch. `saturated` is the address of a 64-bit count of values that did not fit the range of an e4m3 output. */
typedef struct {
  KlTensorMap x[KL_STREAMS], w[KL_STREAMS][KL_GEMM_PARTS], out[KL_STREAMS][KL_GEMM_PARTS], residual[KL_STREAMS];
  KlTensorMap down_out[KL_STREAMS], up[KL_STREAMS];
  KlGemmStream stream[KL_STREAMS];
  KlExpansion expansion;
  uint32_t group[KL_STREAMS];
  KlTileSchedule schedule;
  uint64_t saturated;
  uint64_t unused[18];
} KlGemmTma;

/* -------------------------------------------------------------------------------------------------- conv_bf16_sm90.cu */

/* Pixel columns of a tile: one row group of the swizzle, so that wgmma reads a line of pixels as one group. A window has the columns of
 * all taps. */
#define KL_CONV_TILE_WIDTH 8u
#define KL_CONV_WINDOW_WIDTH (KL_CONV_TILE_WIDTH + 2u)
/* The most channel groups whose moments a tile can compute. */
#define KL_CONV_TILE_GROUPS 32u

/* A convolution as a GEMM: rows are pixels, tile by tile. A k-block is 64 channels of one tap, and the taps of the same channels are
 * consecutive. `plane` are maps of the image: the first maps all of it. With stride two, the first maps its even lines and columns, and
 * the others map the planes with odd columns, odd lines, and both. Where the image is upsampled, a part is one phase: the output pixels
 * of one line and column parity. A window of a plane begins `origin` columns and lines from the tile. The 1x1 convolution of `shortcut`,
 * if there is one, comes after the k-blocks of all taps, with the second matrix of the weight. With `partials`, the warpgroups of a tile
 * store their moments of each of `groups` groups, sixteen bytes each, for kl_conv_stats. */
typedef struct {
  KlTensorMap plane[4], shortcut;
  KlMat shortcut_bias;
  uint64_t partials;
  /* Bit fields of each tap, in the order of k-blocks: the window row where its pixels begin in phase 0, six bits; its place in the
   * filter, four; the plane that it reads, two; whether it is the first to read the window, one. */
  uint64_t tap_rows;
  uint64_t tap_filters;
  uint32_t tap_planes;
  uint32_t window_starts;
  int32_t origin;
  uint32_t groups;
  uint32_t width, height; /* of the output, or of a phase of it */
  uint32_t tiles_across;  /* tiles side by side in the image */
  uint32_t channels;      /* of the image */
  uint32_t taps;
  uint32_t tap_blocks;  /* k-blocks of all taps */
  uint32_t half_blocks; /* in k-blocks below this one, odd blocks of channels are empty in their upper half */
  uint32_t unused[5];
} KlConvImage;

typedef struct {
  KlGemmTma gemm;
  KlConvImage image;
} KlConvSm90;

/* ------------------------------------------------------------------------ attention_bf16_sm90.cu, attention_wide_bf16_sm90.cu */

/* The largest number of KV segments of one launch; none is empty. */
#define KL_SM90_KV_SEGMENTS 8u
/* Queries per CTA, and keys per KV block. */
#define KL_SM90_BLOCK_Q 128u
#define KL_SM90_BLOCK_KV 128u
/* Wide heads: queries of a tile, which the two CTAs of a cluster compute together; keys per KV block, half of them loaded by each CTA;
 * rows of a TMA box of V. */
#define KL_WIDE_SM90_BLOCK_Q 128u
#define KL_WIDE_SM90_BLOCK_KV 128u
#define KL_WIDE_SM90_V_ROWS 16u
/* The most row ranges that the output can have. */
#define KL_SM90_ATTENTION_OUTS 2u

/* A tile is `pack` query heads that share a KV head, with KL_SM90_BLOCK_Q / pack queries each. The two CTAs of a cluster have
 * consecutive tiles of a head, and there are `row_tiles` such pairs. With a causal mask there are no clusters, and half of a tile's
 * queries come from the end of the sequence. `out` are the row ranges of the output in sequence; the second may be absent. `keys` are
 * the lengths of the KV segments, `group` is the number of query heads per KV head. `schedule` counts KV blocks. With a wide head there
 * are `row_tiles` tiles of a head, one KV segment and one row range, and nothing is packed. */
typedef struct {
  KlTensorMap q, k[KL_SM90_KV_SEGMENTS], v[KL_SM90_KV_SEGMENTS];
  KlMat out[KL_SM90_ATTENTION_OUTS];
  KlTileSchedule schedule;
  uint64_t saturated;
  uint32_t keys[KL_SM90_KV_SEGMENTS];
  uint32_t row_tiles;
  uint32_t group;
  uint32_t pack;
  float scale; /* turns logits into exponents of two; max-free softmax takes Q pre-scaled and ignores it */
  uint64_t unused[11];
} KlAttentionSm90;

/* ----------------------------------------------- selftest.cu, selftest_sm89.cu, selftest_sm90.cu, selftest_sm120.cu */

#define KL_SELFTEST_TILE 64u
#define KL_SELFTEST_THREADS 128u
#define KL_SELFTEST_CLUSTER 2u

/* How a tile of 64 rows is loaded into shared memory: by TMA in rows of 128 or 64 bytes, with the swizzle of that width, or row by row
 * by bulk copies of up to 128 bytes. */
#define KL_TEST_BOX_128 0u
#define KL_TEST_BOX_64 1u
#define KL_TEST_BULK 2u

/* A copy of a bf16 matrix. `out` may be larger than what `map` describes; the rest becomes zeros. Bulk copies read `from`, not `map`. */
typedef struct {
  KlTensorMap map;
  KlMat from, out;
  uint32_t how;
  uint32_t unused[11];
} KlTestCopy;

/* Words of a lane in an MMA test case: four registers of a, two of b, the scales of a and of b, four accumulators. */
#define KL_FRAGMENT_WORDS 12u

/* MMA test cases of 32 lanes each. `results` are the four accumulators of each lane afterwards. `selector_a` and `selector_b` select the
 * lanes whose scales a block-scaled MMA takes. */
typedef struct {
  uint64_t fragments;
  uint64_t results;
  uint32_t cases;
  uint32_t selector_a;
  uint32_t selector_b;
  uint32_t unused;
} KlFragments;

/* f32 values to convert. For each value, `e4m3` gets two bytes: its code, then the code of its negative. `e2m1` gets one byte: its code
 * in the high nibble and its negative's in the low. */
typedef struct {
  uint64_t values, e4m3, e2m1;
  uint64_t count;
} KlConversions;

#endif
