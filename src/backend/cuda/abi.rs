//! The Rust side of `kernels/abi.h`, written by bindgen; CONTRIBUTING.md says how. Not to be edited.

#![allow(missing_docs)]

macro_rules! layout {
    ($name:ident: $size:literal bytes, aligned to $align:literal; $($field:ident at $offset:literal),*) => {
        const _: () = {
            assert!(size_of::<$name>() == $size && align_of::<$name>() == $align);
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
pub const KL_ATTENTION_THREADS: u32 = 128;
pub const KL_ATTENTION_BLOCK_Q: u32 = 128;
pub const KL_ATTENTION_SHARED: u32 = 98304;
pub const KL_ATTENTION_FP8_SHARED: u32 = 40960;
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
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlMat {
    pub data: u64,
    pub scales: u64,
    pub stride: u64,
    pub rows: u32,
    pub cols: u32,
    pub dtype: u32,
    pub scale: f32,
}
layout!(KlMat: 40 bytes, aligned to 8; data at 0, scales at 8, stride at 16, rows at 24, cols at 28, dtype at 32, scale at 36);
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlTensorMap {
    pub opaque: [u64; 16usize],
}
layout!(KlTensorMap: 128 bytes, aligned to 128; opaque at 0);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlMap {
    pub out: KlMat,
    pub x: KlMat,
    pub function: u32,
    pub unused: u32,
}
layout!(KlMap: 88 bytes, aligned to 8; out at 0, x at 40, function at 80, unused at 84);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlPatch {
    pub tokens: KlMat,
    pub pixels: KlMat,
    pub mean: KlMat,
    pub var: KlMat,
    pub width: u32,
    pub eps: f32,
}
layout!(KlPatch: 168 bytes, aligned to 8; tokens at 0, pixels at 40, mean at 80, var at 120, width at 160, eps at 164);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlEuler {
    pub latents: KlMat,
    pub velocity: KlMat,
    pub dt: f32,
    pub unused: u32,
}
layout!(KlEuler: 88 bytes, aligned to 8; latents at 0, velocity at 40, dt at 80, unused at 84);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGuidance {
    pub out: KlMat,
    pub cond: KlMat,
    pub uncond: KlMat,
    pub scale: f32,
    pub unused: u32,
}
layout!(KlGuidance: 128 bytes, aligned to 8; out at 0, cond at 40, uncond at 80, scale at 120, unused at 124);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlBlend {
    pub into: KlMat,
    pub from: KlMat,
    pub channels: u32,
    pub steps: u32,
}
layout!(KlBlend: 88 bytes, aligned to 8; into at 0, from at 40, channels at 80, steps at 84);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlPixels {
    pub out: KlMat,
    pub x: KlMat,
}
layout!(KlPixels: 80 bytes, aligned to 8; out at 0, x at 40);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlCount {
    pub count: KlMat,
    pub x: KlMat,
    pub words: u64,
}
layout!(KlCount: 88 bytes, aligned to 8; count at 0, x at 40, words at 80);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlLargest {
    pub largest: KlMat,
    pub x: KlMat,
}
layout!(KlLargest: 80 bytes, aligned to 8; largest at 0, x at 40);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlRmsNorm {
    pub out: KlMat,
    pub x: KlMat,
    pub weight: KlMat,
    pub saturated: u64,
    pub eps: f32,
    pub unused: u32,
}
layout!(KlRmsNorm: 136 bytes, aligned to 8; out at 0, x at 40, weight at 80, saturated at 120, eps at 128, unused at 132);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlModulated {
    pub out: KlMat,
    pub x: KlMat,
    pub shift: KlMat,
    pub scale: KlMat,
}
layout!(KlModulated: 160 bytes, aligned to 8; out at 0, x at 40, shift at 80, scale at 120);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlLayerNorm {
    pub stream: [KlModulated; 2usize],
    pub saturated: u64,
    pub eps: f32,
    pub unused: u32,
}
layout!(KlLayerNorm: 336 bytes, aligned to 8; stream at 0, saturated at 320, eps at 328, unused at 332);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlQkHeads {
    pub x: KlMat,
    pub weight: KlMat,
    pub table: KlMat,
    pub scale: f32,
    pub unused: u32,
}
layout!(KlQkHeads: 128 bytes, aligned to 8; x at 0, weight at 40, table at 80, scale at 120, unused at 124);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlQkNormRope {
    pub part: [KlQkHeads; 4usize],
    pub head_dim: u32,
    pub style: u32,
    pub eps: f32,
    pub unused: u32,
}
layout!(KlQkNormRope: 528 bytes, aligned to 8; part at 0, head_dim at 512, style at 516, eps at 520, unused at 524);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGroupStats {
    pub x: KlMat,
    pub stats: KlMat,
    pub partials: u64,
    pub blocks: u64,
    pub groups: u32,
    pub unused: u32,
}
layout!(KlGroupStats: 104 bytes, aligned to 8; x at 0, stats at 40, partials at 80, blocks at 88, groups at 96, unused at 100);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGroupNorm {
    pub out: KlMat,
    pub x: KlMat,
    pub weight: KlMat,
    pub bias: KlMat,
    pub stats: KlMat,
    pub partials: u64,
    pub blocks: u32,
    pub groups: u32,
    pub eps: f32,
    pub silu: u32,
}
layout!(KlGroupNorm: 224 bytes, aligned to 8; out at 0, x at 40, weight at 80, bias at 120, stats at 160, partials at 200,
    blocks at 208, groups at 212, eps at 216, silu at 220);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlNaiveGemm {
    pub out: KlMat,
    pub x: KlMat,
    pub w: [KlMat; 2usize],
    pub bias: KlMat,
    pub gate: KlMat,
    pub down_out: KlMat,
    pub up: [KlMat; 2usize],
    pub saturated: u64,
    pub first: [u32; 2usize],
    pub epilogue: u32,
    pub unused: u32,
}
layout!(KlNaiveGemm: 384 bytes, aligned to 8; out at 0, x at 40, w at 80, bias at 160, gate at 200, down_out at 240, up at 280,
    saturated at 360, first at 368, epilogue at 376, unused at 380);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlKeyValues {
    pub k: KlMat,
    pub v: KlMat,
}
layout!(KlKeyValues: 80 bytes, aligned to 8; k at 0, v at 40);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlAttention {
    pub out: KlMat,
    pub q: KlMat,
    pub kv: [KlKeyValues; 16usize],
    pub saturated: u64,
    pub segments: u32,
    pub head_dim: u32,
    pub group: u32,
    pub causal: u32,
    pub scale: f32,
    pub unused: u32,
}
layout!(KlAttention: 1392 bytes, aligned to 8; out at 0, q at 40, kv at 80, saturated at 1360, segments at 1368,
    head_dim at 1372, group at 1376, causal at 1380, scale at 1384, unused at 1388);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlConv {
    pub out: KlMat,
    pub x: KlMat,
    pub w: KlMat,
    pub bias: KlMat,
    pub residual: KlMat,
    pub stats: KlMat,
    pub partials: u64,
    pub row_tiles: u32,
    pub groups: u32,
    pub width: u32,
    pub height: u32,
    pub sampling: u32,
    pub unused: u32,
}
layout!(KlConv: 272 bytes, aligned to 8; out at 0, x at 40, w at 80, bias at 120, residual at 160, stats at 200, partials at 240,
    row_tiles at 248, groups at 252, width at 256, height at 260, sampling at 264, unused at 268);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlNormConv {
    pub out: KlMat,
    pub x: KlMat,
    pub w: KlMat,
    pub bias: KlMat,
    pub stats: KlMat,
    pub gain: KlMat,
    pub shift: KlMat,
    pub width: u32,
    pub height: u32,
    pub eps: f32,
    pub strip_rows: u32,
}
layout!(KlNormConv: 296 bytes, aligned to 8; out at 0, x at 40, w at 80, bias at 120, stats at 160, gain at 200, shift at 240,
    width at 280, height at 284, eps at 288, strip_rows at 292);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmRows {
    pub matrix: u32,
    pub first: u32,
    pub dtype: u32,
    pub alpha: f32,
}
layout!(KlGemmRows: 16 bytes, aligned to 4; matrix at 0, first at 4, dtype at 8, alpha at 12);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlOutputRange {
    pub out: KlMat,
    pub extra: KlMat,
    pub w: [KlGemmRows; 2usize],
    pub epilogue: u32,
    pub first_col: u32,
    pub tiles: u32,
    pub scale: f32,
}
layout!(KlOutputRange: 128 bytes, aligned to 8; out at 0, extra at 40, w at 80, epilogue at 112, first_col at 116, tiles at 120,
    scale at 124);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmStream {
    pub x: KlMat,
    pub w: [KlMat; 4usize],
    pub bias: KlMat,
    pub table: KlMat,
    pub down_out: KlMat,
    pub up: KlMat,
    pub part: [KlOutputRange; 4usize],
    pub row_tiles: u32,
    pub col_tiles: u32,
    pub rope: u32,
    pub eps: f32,
}
layout!(KlGemmStream: 888 bytes, aligned to 8; x at 0, w at 40, bias at 200, table at 240, down_out at 280, up at 320,
    part at 360, row_tiles at 872, col_tiles at 876, rope at 880, eps at 884);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlTileSchedule {
    pub partials: u64,
    pub flags: u64,
    pub k_blocks: u32,
    pub full_tiles: u32,
    pub k_blocks_per_worker: u32,
    pub remainder: u32,
}
layout!(KlTileSchedule: 32 bytes, aligned to 8; partials at 0, flags at 8, k_blocks at 16, full_tiles at 20,
    k_blocks_per_worker at 24, remainder at 28);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemm {
    pub stream: [KlGemmStream; 2usize],
    pub schedule: KlTileSchedule,
    pub saturated: u64,
}
layout!(KlGemm: 1816 bytes, aligned to 8; stream at 0, schedule at 1776, saturated at 1808);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlReduction {
    pub out: KlMat,
    pub x: KlMat,
    pub down: KlMat,
}
layout!(KlReduction: 120 bytes, aligned to 8; out at 0, x at 40, down at 80);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlLoraDown {
    pub stream: [KlReduction; 2usize],
}
layout!(KlLoraDown: 240 bytes, aligned to 8; stream at 0);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlExpand {
    pub w: [KlMat; 8usize],
    pub to: [u64; 8usize],
}
layout!(KlExpand: 384 bytes, aligned to 8; w at 0, to at 320);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlExpansion {
    pub counters: u64,
    pub to: [[u64; 4usize]; 2usize],
    pub units: u32,
    pub tiles: u32,
}
layout!(KlExpansion: 80 bytes, aligned to 8; counters at 0, to at 8, units at 72, tiles at 76);
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmTma {
    pub x: [KlTensorMap; 2usize],
    pub w: [[KlTensorMap; 4usize]; 2usize],
    pub out: [[KlTensorMap; 4usize]; 2usize],
    pub residual: [KlTensorMap; 2usize],
    pub down_out: [KlTensorMap; 2usize],
    pub up: [KlTensorMap; 2usize],
    pub stream: [KlGemmStream; 2usize],
    pub expansion: KlExpansion,
    pub group: [u32; 2usize],
    pub schedule: KlTileSchedule,
    pub saturated: u64,
    pub unused: [u64; 18usize],
}
layout!(KlGemmTma: 5120 bytes, aligned to 128; x at 0, w at 256, out at 1280, residual at 2304, down_out at 2560, up at 2816,
    stream at 3072, expansion at 4848, group at 4928, schedule at 4936, saturated at 4968, unused at 4976);
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlConvImage {
    pub plane: [KlTensorMap; 4usize],
    pub shortcut: KlTensorMap,
    pub shortcut_bias: KlMat,
    pub partials: u64,
    pub tap_rows: u64,
    pub tap_filters: u64,
    pub tap_planes: u32,
    pub window_starts: u32,
    pub origin: i32,
    pub groups: u32,
    pub width: u32,
    pub height: u32,
    pub tiles_across: u32,
    pub channels: u32,
    pub taps: u32,
    pub tap_blocks: u32,
    pub half_blocks: u32,
    pub unused: [u32; 5usize],
}
layout!(KlConvImage: 768 bytes, aligned to 128; plane at 0, shortcut at 512, shortcut_bias at 640, partials at 680,
    tap_rows at 688, tap_filters at 696, tap_planes at 704, window_starts at 708, origin at 712, groups at 716, width at 720,
    height at 724, tiles_across at 728, channels at 732, taps at 736, tap_blocks at 740, half_blocks at 744, unused at 748);
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlConvSm90 {
    pub gemm: KlGemmTma,
    pub image: KlConvImage,
}
layout!(KlConvSm90: 5888 bytes, aligned to 128; gemm at 0, image at 5120);
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlAttentionSm90 {
    pub q: KlTensorMap,
    pub k: [KlTensorMap; 8usize],
    pub v: [KlTensorMap; 8usize],
    pub out: [KlMat; 2usize],
    pub schedule: KlTileSchedule,
    pub saturated: u64,
    pub keys: [u32; 8usize],
    pub row_tiles: u32,
    pub group: u32,
    pub pack: u32,
    pub scale: f32,
    pub unused: [u64; 11usize],
}
layout!(KlAttentionSm90: 2432 bytes, aligned to 128; q at 0, k at 128, v at 1152, out at 2176, schedule at 2256,
    saturated at 2288, keys at 2296, row_tiles at 2328, group at 2332, pack at 2336, scale at 2340, unused at 2344);
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlTestCopy {
    pub map: KlTensorMap,
    pub from: KlMat,
    pub out: KlMat,
    pub how: u32,
    pub unused: [u32; 11usize],
}
layout!(KlTestCopy: 256 bytes, aligned to 128; map at 0, from at 128, out at 168, how at 208, unused at 212);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlFragments {
    pub fragments: u64,
    pub results: u64,
    pub cases: u32,
    pub selector_a: u32,
    pub selector_b: u32,
    pub unused: u32,
}
layout!(KlFragments: 32 bytes, aligned to 8; fragments at 0, results at 8, cases at 16, selector_a at 20, selector_b at 24,
    unused at 28);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlConversions {
    pub values: u64,
    pub e4m3: u64,
    pub e2m1: u64,
    pub count: u64,
}
layout!(KlConversions: 32 bytes, aligned to 8; values at 0, e4m3 at 8, e2m1 at 16, count at 24);
