//! The Rust side of `kernels/abi.h`, written by bindgen; CONTRIBUTING.md says how. Not to be edited.

#![allow(missing_docs)]

/// A struct with the layout that the C compiler gives it: its size and alignment, and the offset of each field.
macro_rules! layout {
    ($name:ident: $size:literal bytes, aligned to $align:literal; $($offset:literal => $field:ident: $type:ty),*) => {
        #[repr(C, align($align))]
        #[derive(Debug, Copy, Clone)]
        pub struct $name { $(pub $field: $type),* }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}

pub const KL_F32: u32 = 0;
pub const KL_BF16: u32 = 1;
pub const KL_F16: u32 = 2;
pub const KL_U8: u32 = 3;
pub const KL_E4M3: u32 = 4;
pub const KL_E2M1: u32 = 5;
pub const KL_SCALE_TILE_ROWS: u32 = 128;
pub const KL_SCALE_TILE_COLS: u32 = 64;
pub const KL_SCALE_TILE_BYTES: u32 = 512;
pub const KL_POINTWISE_THREADS: u32 = 256;
pub const KL_COPY: u32 = 0;
pub const KL_SILU: u32 = 1;
pub const KL_REDUCTION_BATCH: u32 = 4;
pub const KL_NORM_THREADS: u32 = 128;
pub const KL_NORM_ROWS: u32 = 2;
pub const KL_STREAMS: u32 = 2;
pub const KL_ROPE_INTERLEAVED: u32 = 0;
pub const KL_ROPE_HALF_SPLIT: u32 = 1;
pub const KL_QK_PARTS: u32 = 4;
pub const KL_HEADS_PER_WARP: u32 = 8;
pub const KL_GROUP_THREADS: u32 = 256;
pub const KL_GROUPS: u32 = 64;
pub const KL_PARTIALS: u32 = 1024;
pub const KL_NAIVE_TILE: u32 = 64;
pub const KL_NAIVE_THREADS: u32 = 256;
pub const KL_STORE: u32 = 0;
pub const KL_SWIGLU: u32 = 1;
pub const KL_GATE_RESIDUAL: u32 = 2;
pub const KL_KV_SEGMENTS: u32 = 16;
pub const KL_ATTENTION_WARPS: u32 = 4;
pub const KL_HEAD_DIM: u32 = 512;
pub const KL_ATTENTION_BLOCK_Q: u32 = 128;
pub const KL_WIDE_HEAD: u32 = 512;
pub const KL_SAME: u32 = 0;
pub const KL_UP: u32 = 1;
pub const KL_DOWN: u32 = 2;
pub const KL_CONV_STATS_THREADS: u32 = 512;
pub const KL_CONV_SIDE: u32 = 16384;
pub const KL_NARROW_THREADS: u32 = 128;
pub const KL_NARROW_COLS: u32 = 48;
pub const KL_NARROW_CHANNELS: u32 = 128;
pub const KL_NARROW_OUTPUTS: u32 = 3;
pub const KL_NARROW_SHARED: u32 = 44960;
pub const KL_NARROW_IN_THREADS: u32 = 256;
pub const KL_NARROW_IN_CHANNELS: u32 = 3;
pub const KL_NARROW_IN_OUTPUTS: u32 = 256;
pub const KL_MMA_COLS: u32 = 128;
pub const KL_QK_NORM_ROPE: u32 = 3;
pub const KL_E2M1_ALPHA: f64 = 512.0;
pub const KL_GEMM_PARTS: u32 = 4;
pub const KL_LORA_DOWN_THREADS: u32 = 256;
pub const KL_LORA_DOWN_ROWS: u32 = 32;
pub const KL_LORA_DOWN_COLS: u32 = 64;
pub const KL_LORA_DOWN_STEP: u32 = 16;
pub const KL_EXPAND_THREADS: u32 = 256;
pub const KL_EXPAND_VECTOR: u32 = 8;
pub const KL_EXPAND_BATCH: u32 = 4;
pub const KL_EXPAND_MATRICES: u32 = 8;
pub const KL_SM90_CLUSTER: u32 = 2;
pub const KL_TMA_STORE_ROWS: u32 = 16;
pub const KL_TMA_WARPGROUP_ROWS: u32 = 64;
pub const KL_SM90_BOX_COLS: u32 = 64;
pub const KL_SM90_SHARED_LIMIT: u32 = 232448;
pub const KL_SM120_SHARED_LIMIT: u32 = 101376;
pub const KL_SM120_BOX_COLS: u32 = 32;
pub const KL_EXPANSION_ROWS: u32 = 32;
pub const KL_EXPANSION_GROUP: u32 = 4;
pub const KL_EXPANSION_COUNTERS: u32 = 2;
pub const KL_CONV_TILE_WIDTH: u32 = 8;
pub const KL_CONV_WINDOW_WIDTH: u32 = 10;
pub const KL_CONV_TILE_GROUPS: u32 = 32;
pub const KL_SM90_KV_SEGMENTS: u32 = 8;
pub const KL_SM90_BLOCK_Q: u32 = 128;
pub const KL_SM90_BLOCK_KV: u32 = 128;
pub const KL_WIDE_SM90_BLOCK_Q: u32 = 128;
pub const KL_WIDE_SM90_BLOCK_KV: u32 = 128;
pub const KL_WIDE_SM90_V_ROWS: u32 = 16;
pub const KL_SM90_ATTENTION_OUTS: u32 = 2;
pub const KL_SELFTEST_TILE: u32 = 64;
pub const KL_SELFTEST_THREADS: u32 = 128;
pub const KL_SELFTEST_CLUSTER: u32 = 2;
pub const KL_TEST_BOX_128: u32 = 0;
pub const KL_TEST_BOX_64: u32 = 1;
pub const KL_TEST_BULK: u32 = 2;
pub const KL_FRAGMENT_WORDS: u32 = 12;
layout!(KlMat: 40 bytes, aligned to 8; 0 => data: u64, 8 => scales: u64, 16 => stride: u64, 24 => rows: u32, 28 => cols: u32,
    32 => dtype: u32, 36 => scale: f32);
layout!(KlTensorMap: 128 bytes, aligned to 128; 0 => opaque: [u64; 16usize]);
layout!(KlMap: 88 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => function: u32, 84 => unused: u32);
layout!(KlPatch: 168 bytes, aligned to 8; 0 => tokens: KlMat, 40 => pixels: KlMat, 80 => mean: KlMat, 120 => var: KlMat,
    160 => width: u32, 164 => eps: f32);
layout!(KlEuler: 88 bytes, aligned to 8; 0 => latents: KlMat, 40 => velocity: KlMat, 80 => dt: f32, 84 => unused: u32);
layout!(KlRenoise: 168 bytes, aligned to 8; 0 => latents: KlMat, 40 => init: KlMat, 80 => noise: KlMat, 120 => keep: KlMat,
    160 => sigma: f32, 164 => cols: u32);
layout!(KlGuidance: 128 bytes, aligned to 8; 0 => out: KlMat, 40 => cond: KlMat, 80 => uncond: KlMat, 120 => scale: f32,
    124 => unused: u32);
layout!(KlBlend: 88 bytes, aligned to 8; 0 => into: KlMat, 40 => from: KlMat, 80 => channels: u32, 84 => steps: u32);
layout!(KlPreview: 128 bytes, aligned to 8; 0 => out: KlMat, 40 => latents: KlMat, 80 => table: KlMat, 120 => width: u32,
    124 => unused: u32);
layout!(KlPixels: 80 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat);
layout!(KlCount: 88 bytes, aligned to 8; 0 => count: KlMat, 40 => x: KlMat, 80 => words: u64);
layout!(KlLargest: 80 bytes, aligned to 8; 0 => largest: KlMat, 40 => x: KlMat);
layout!(KlRmsNorm: 136 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => weight: KlMat, 120 => saturated: u64,
    128 => eps: f32, 132 => unused: u32);
layout!(KlModulated: 160 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => shift: KlMat, 120 => scale: KlMat);
layout!(KlLayerNorm: 336 bytes, aligned to 8; 0 => stream: [KlModulated; 2usize], 320 => saturated: u64, 328 => eps: f32,
    332 => unused: u32);
layout!(KlQkHeads: 128 bytes, aligned to 8; 0 => x: KlMat, 40 => weight: KlMat, 80 => table: KlMat, 120 => scale: f32,
    124 => unused: u32);
layout!(KlQkNormRope: 528 bytes, aligned to 8; 0 => part: [KlQkHeads; 4usize], 512 => head_dim: u32, 516 => style: u32,
    520 => eps: f32, 524 => unused: u32);
layout!(KlGroupStats: 104 bytes, aligned to 8; 0 => x: KlMat, 40 => stats: KlMat, 80 => partials: u64, 88 => blocks: u64,
    96 => groups: u32, 100 => unused: u32);
layout!(KlGroupNorm: 224 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => weight: KlMat, 120 => bias: KlMat,
    160 => stats: KlMat, 200 => partials: u64, 208 => blocks: u32, 212 => groups: u32, 216 => eps: f32, 220 => silu: u32);
layout!(KlNaiveGemm: 384 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => w: [KlMat; 2usize], 160 => bias: KlMat,
    200 => gate: KlMat, 240 => down_out: KlMat, 280 => up: [KlMat; 2usize], 360 => saturated: u64, 368 => first: [u32; 2usize],
    376 => epilogue: u32, 380 => unused: u32);
layout!(KlKeyValues: 80 bytes, aligned to 8; 0 => k: KlMat, 40 => v: KlMat);
layout!(KlAttention: 1392 bytes, aligned to 8; 0 => out: KlMat, 40 => q: KlMat, 80 => kv: [KlKeyValues; 16usize],
    1360 => saturated: u64, 1368 => segments: u32, 1372 => head_dim: u32, 1376 => group: u32, 1380 => causal: u32,
    1384 => scale: f32, 1388 => unused: u32);
layout!(KlConv: 272 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => w: KlMat, 120 => bias: KlMat,
    160 => residual: KlMat, 200 => stats: KlMat, 240 => partials: u64, 248 => row_tiles: u32, 252 => groups: u32,
    256 => width: u32, 260 => height: u32, 264 => sampling: u32, 268 => unused: u32);
layout!(KlNormConv: 296 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => w: KlMat, 120 => bias: KlMat,
    160 => stats: KlMat, 200 => gain: KlMat, 240 => shift: KlMat, 280 => width: u32, 284 => height: u32, 288 => eps: f32,
    292 => strip_rows: u32);
layout!(KlGemmRows: 16 bytes, aligned to 4; 0 => matrix: u32, 4 => first: u32, 8 => dtype: u32, 12 => alpha: f32);
layout!(KlOutputRange: 128 bytes, aligned to 8; 0 => out: KlMat, 40 => extra: KlMat, 80 => w: [KlGemmRows; 2usize],
    112 => epilogue: u32, 116 => first_col: u32, 120 => tiles: u32, 124 => scale: f32);
layout!(KlGemmStream: 888 bytes, aligned to 8; 0 => x: KlMat, 40 => w: [KlMat; 4usize], 200 => bias: KlMat, 240 => table: KlMat,
    280 => down_out: KlMat, 320 => up: KlMat, 360 => part: [KlOutputRange; 4usize], 872 => row_tiles: u32, 876 => col_tiles: u32,
    880 => rope: u32, 884 => eps: f32);
layout!(KlTileSchedule: 32 bytes, aligned to 8; 0 => partials: u64, 8 => flags: u64, 16 => k_blocks: u32, 20 => full_tiles: u32,
    24 => k_blocks_per_worker: u32, 28 => remainder: u32);
layout!(KlGemm: 1816 bytes, aligned to 8; 0 => stream: [KlGemmStream; 2usize], 1776 => schedule: KlTileSchedule,
    1808 => saturated: u64);
layout!(KlReduction: 120 bytes, aligned to 8; 0 => out: KlMat, 40 => x: KlMat, 80 => down: KlMat);
layout!(KlLoraDown: 240 bytes, aligned to 8; 0 => stream: [KlReduction; 2usize]);
layout!(KlExpand: 384 bytes, aligned to 8; 0 => w: [KlMat; 8usize], 320 => to: [u64; 8usize]);
layout!(KlExpansion: 80 bytes, aligned to 8; 0 => counters: u64, 8 => to: [[u64; 4usize]; 2usize], 72 => units: u32,
    76 => tiles: u32);
layout!(KlGemmTma: 5120 bytes, aligned to 128; 0 => x: [KlTensorMap; 2usize], 256 => w: [[KlTensorMap; 4usize]; 2usize],
    1280 => out: [[KlTensorMap; 4usize]; 2usize], 2304 => residual: [KlTensorMap; 2usize],
    2560 => down_out: [KlTensorMap; 2usize], 2816 => up: [KlTensorMap; 2usize], 3072 => stream: [KlGemmStream; 2usize],
    4848 => expansion: KlExpansion, 4928 => group: [u32; 2usize], 4936 => schedule: KlTileSchedule, 4968 => saturated: u64,
    4976 => unused: [u64; 18usize]);
layout!(KlConvImage: 768 bytes, aligned to 128; 0 => plane: [KlTensorMap; 4usize], 512 => shortcut: KlTensorMap,
    640 => shortcut_bias: KlMat, 680 => partials: u64, 688 => tap_rows: u64, 696 => tap_filters: u64, 704 => tap_planes: u32,
    708 => window_starts: u32, 712 => origin: i32, 716 => groups: u32, 720 => width: u32, 724 => height: u32,
    728 => tiles_across: u32, 732 => channels: u32, 736 => taps: u32, 740 => tap_blocks: u32, 744 => half_blocks: u32,
    748 => unused: [u32; 5usize]);
layout!(KlConvSm90: 5888 bytes, aligned to 128; 0 => gemm: KlGemmTma, 5120 => image: KlConvImage);
layout!(KlAttentionSm90: 2432 bytes, aligned to 128; 0 => q: KlTensorMap, 128 => k: [KlTensorMap; 8usize],
    1152 => v: [KlTensorMap; 8usize], 2176 => out: [KlMat; 2usize], 2256 => schedule: KlTileSchedule, 2288 => saturated: u64,
    2296 => keys: [u32; 8usize], 2328 => row_tiles: u32, 2332 => group: u32, 2336 => pack: u32, 2340 => scale: f32,
    2344 => unused: [u64; 11usize]);
layout!(KlTestCopy: 256 bytes, aligned to 128; 0 => map: KlTensorMap, 128 => from: KlMat, 168 => out: KlMat, 208 => how: u32,
    212 => unused: [u32; 11usize]);
layout!(KlFragments: 32 bytes, aligned to 8; 0 => fragments: u64, 8 => results: u64, 16 => cases: u32, 20 => selector_a: u32,
    24 => selector_b: u32, 28 => unused: u32);
layout!(KlConversions: 32 bytes, aligned to 8; 0 => values: u64, 8 => e4m3: u64, 16 => e2m1: u64, 24 => count: u64);
