//! The Rust side of `kernels/abi.h`, written by bindgen; CONTRIBUTING.md says how. Not to be edited.

#![allow(missing_docs)]

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
pub const KL_LOW_RANK_THREADS: u32 = 256;
pub const KL_LOW_RANK_ROWS: u32 = 32;
pub const KL_LOW_RANK_COLS: u32 = 64;
pub const KL_LOW_RANK_STEP: u32 = 16;
pub const KL_EXPAND_THREADS: u32 = 256;
pub const KL_EXPAND_VECTOR: u32 = 8;
pub const KL_EXPAND_BATCH: u32 = 4;
pub const KL_EXPAND_MATRICES: u32 = 8;
pub const KL_SM90_CLUSTER: u32 = 2;
pub const KL_SM90_STORE_ROWS: u32 = 16;
pub const KL_SM90_WARPGROUP_ROWS: u32 = 64;
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlMat"][::core::mem::size_of::<KlMat>() - 40usize];
    ["Alignment of KlMat"][::core::mem::align_of::<KlMat>() - 8usize];
    ["Offset of field: KlMat::data"][::core::mem::offset_of!(KlMat, data) - 0usize];
    ["Offset of field: KlMat::scales"][::core::mem::offset_of!(KlMat, scales) - 8usize];
    ["Offset of field: KlMat::stride"][::core::mem::offset_of!(KlMat, stride) - 16usize];
    ["Offset of field: KlMat::rows"][::core::mem::offset_of!(KlMat, rows) - 24usize];
    ["Offset of field: KlMat::cols"][::core::mem::offset_of!(KlMat, cols) - 28usize];
    ["Offset of field: KlMat::dtype"][::core::mem::offset_of!(KlMat, dtype) - 32usize];
    ["Offset of field: KlMat::scale"][::core::mem::offset_of!(KlMat, scale) - 36usize];
};
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlTensorMap {
    pub opaque: [u64; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlTensorMap"][::core::mem::size_of::<KlTensorMap>() - 128usize];
    ["Alignment of KlTensorMap"][::core::mem::align_of::<KlTensorMap>() - 128usize];
    ["Offset of field: KlTensorMap::opaque"][::core::mem::offset_of!(KlTensorMap, opaque) - 0usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlMap {
    pub out: KlMat,
    pub x: KlMat,
    pub function: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlMap"][::core::mem::size_of::<KlMap>() - 88usize];
    ["Alignment of KlMap"][::core::mem::align_of::<KlMap>() - 8usize];
    ["Offset of field: KlMap::out"][::core::mem::offset_of!(KlMap, out) - 0usize];
    ["Offset of field: KlMap::x"][::core::mem::offset_of!(KlMap, x) - 40usize];
    ["Offset of field: KlMap::function"][::core::mem::offset_of!(KlMap, function) - 80usize];
    ["Offset of field: KlMap::unused"][::core::mem::offset_of!(KlMap, unused) - 84usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlPatch"][::core::mem::size_of::<KlPatch>() - 168usize];
    ["Alignment of KlPatch"][::core::mem::align_of::<KlPatch>() - 8usize];
    ["Offset of field: KlPatch::tokens"][::core::mem::offset_of!(KlPatch, tokens) - 0usize];
    ["Offset of field: KlPatch::pixels"][::core::mem::offset_of!(KlPatch, pixels) - 40usize];
    ["Offset of field: KlPatch::mean"][::core::mem::offset_of!(KlPatch, mean) - 80usize];
    ["Offset of field: KlPatch::var"][::core::mem::offset_of!(KlPatch, var) - 120usize];
    ["Offset of field: KlPatch::width"][::core::mem::offset_of!(KlPatch, width) - 160usize];
    ["Offset of field: KlPatch::eps"][::core::mem::offset_of!(KlPatch, eps) - 164usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlEuler {
    pub latents: KlMat,
    pub velocity: KlMat,
    pub dt: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlEuler"][::core::mem::size_of::<KlEuler>() - 88usize];
    ["Alignment of KlEuler"][::core::mem::align_of::<KlEuler>() - 8usize];
    ["Offset of field: KlEuler::latents"][::core::mem::offset_of!(KlEuler, latents) - 0usize];
    ["Offset of field: KlEuler::velocity"][::core::mem::offset_of!(KlEuler, velocity) - 40usize];
    ["Offset of field: KlEuler::dt"][::core::mem::offset_of!(KlEuler, dt) - 80usize];
    ["Offset of field: KlEuler::unused"][::core::mem::offset_of!(KlEuler, unused) - 84usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGuidance {
    pub out: KlMat,
    pub cond: KlMat,
    pub uncond: KlMat,
    pub scale: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGuidance"][::core::mem::size_of::<KlGuidance>() - 128usize];
    ["Alignment of KlGuidance"][::core::mem::align_of::<KlGuidance>() - 8usize];
    ["Offset of field: KlGuidance::out"][::core::mem::offset_of!(KlGuidance, out) - 0usize];
    ["Offset of field: KlGuidance::cond"][::core::mem::offset_of!(KlGuidance, cond) - 40usize];
    ["Offset of field: KlGuidance::uncond"][::core::mem::offset_of!(KlGuidance, uncond) - 80usize];
    ["Offset of field: KlGuidance::scale"][::core::mem::offset_of!(KlGuidance, scale) - 120usize];
    ["Offset of field: KlGuidance::unused"][::core::mem::offset_of!(KlGuidance, unused) - 124usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlBlend {
    pub into: KlMat,
    pub from: KlMat,
    pub channels: u32,
    pub steps: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlBlend"][::core::mem::size_of::<KlBlend>() - 88usize];
    ["Alignment of KlBlend"][::core::mem::align_of::<KlBlend>() - 8usize];
    ["Offset of field: KlBlend::into"][::core::mem::offset_of!(KlBlend, into) - 0usize];
    ["Offset of field: KlBlend::from"][::core::mem::offset_of!(KlBlend, from) - 40usize];
    ["Offset of field: KlBlend::channels"][::core::mem::offset_of!(KlBlend, channels) - 80usize];
    ["Offset of field: KlBlend::steps"][::core::mem::offset_of!(KlBlend, steps) - 84usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlPixels {
    pub out: KlMat,
    pub x: KlMat,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlPixels"][::core::mem::size_of::<KlPixels>() - 80usize];
    ["Alignment of KlPixels"][::core::mem::align_of::<KlPixels>() - 8usize];
    ["Offset of field: KlPixels::out"][::core::mem::offset_of!(KlPixels, out) - 0usize];
    ["Offset of field: KlPixels::x"][::core::mem::offset_of!(KlPixels, x) - 40usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlCount {
    pub count: KlMat,
    pub x: KlMat,
    pub words: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlCount"][::core::mem::size_of::<KlCount>() - 88usize];
    ["Alignment of KlCount"][::core::mem::align_of::<KlCount>() - 8usize];
    ["Offset of field: KlCount::count"][::core::mem::offset_of!(KlCount, count) - 0usize];
    ["Offset of field: KlCount::x"][::core::mem::offset_of!(KlCount, x) - 40usize];
    ["Offset of field: KlCount::words"][::core::mem::offset_of!(KlCount, words) - 80usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlLargest {
    pub largest: KlMat,
    pub x: KlMat,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlLargest"][::core::mem::size_of::<KlLargest>() - 80usize];
    ["Alignment of KlLargest"][::core::mem::align_of::<KlLargest>() - 8usize];
    ["Offset of field: KlLargest::largest"][::core::mem::offset_of!(KlLargest, largest) - 0usize];
    ["Offset of field: KlLargest::x"][::core::mem::offset_of!(KlLargest, x) - 40usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlRmsNorm"][::core::mem::size_of::<KlRmsNorm>() - 136usize];
    ["Alignment of KlRmsNorm"][::core::mem::align_of::<KlRmsNorm>() - 8usize];
    ["Offset of field: KlRmsNorm::out"][::core::mem::offset_of!(KlRmsNorm, out) - 0usize];
    ["Offset of field: KlRmsNorm::x"][::core::mem::offset_of!(KlRmsNorm, x) - 40usize];
    ["Offset of field: KlRmsNorm::weight"][::core::mem::offset_of!(KlRmsNorm, weight) - 80usize];
    ["Offset of field: KlRmsNorm::saturated"][::core::mem::offset_of!(KlRmsNorm, saturated) - 120usize];
    ["Offset of field: KlRmsNorm::eps"][::core::mem::offset_of!(KlRmsNorm, eps) - 128usize];
    ["Offset of field: KlRmsNorm::unused"][::core::mem::offset_of!(KlRmsNorm, unused) - 132usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlModulated {
    pub out: KlMat,
    pub x: KlMat,
    pub shift: KlMat,
    pub scale: KlMat,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlModulated"][::core::mem::size_of::<KlModulated>() - 160usize];
    ["Alignment of KlModulated"][::core::mem::align_of::<KlModulated>() - 8usize];
    ["Offset of field: KlModulated::out"][::core::mem::offset_of!(KlModulated, out) - 0usize];
    ["Offset of field: KlModulated::x"][::core::mem::offset_of!(KlModulated, x) - 40usize];
    ["Offset of field: KlModulated::shift"][::core::mem::offset_of!(KlModulated, shift) - 80usize];
    ["Offset of field: KlModulated::scale"][::core::mem::offset_of!(KlModulated, scale) - 120usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlLayerNorm {
    pub stream: [KlModulated; 2usize],
    pub saturated: u64,
    pub eps: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlLayerNorm"][::core::mem::size_of::<KlLayerNorm>() - 336usize];
    ["Alignment of KlLayerNorm"][::core::mem::align_of::<KlLayerNorm>() - 8usize];
    ["Offset of field: KlLayerNorm::stream"][::core::mem::offset_of!(KlLayerNorm, stream) - 0usize];
    ["Offset of field: KlLayerNorm::saturated"][::core::mem::offset_of!(KlLayerNorm, saturated) - 320usize];
    ["Offset of field: KlLayerNorm::eps"][::core::mem::offset_of!(KlLayerNorm, eps) - 328usize];
    ["Offset of field: KlLayerNorm::unused"][::core::mem::offset_of!(KlLayerNorm, unused) - 332usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlQkHeads {
    pub x: KlMat,
    pub weight: KlMat,
    pub table: KlMat,
    pub scale: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlQkHeads"][::core::mem::size_of::<KlQkHeads>() - 128usize];
    ["Alignment of KlQkHeads"][::core::mem::align_of::<KlQkHeads>() - 8usize];
    ["Offset of field: KlQkHeads::x"][::core::mem::offset_of!(KlQkHeads, x) - 0usize];
    ["Offset of field: KlQkHeads::weight"][::core::mem::offset_of!(KlQkHeads, weight) - 40usize];
    ["Offset of field: KlQkHeads::table"][::core::mem::offset_of!(KlQkHeads, table) - 80usize];
    ["Offset of field: KlQkHeads::scale"][::core::mem::offset_of!(KlQkHeads, scale) - 120usize];
    ["Offset of field: KlQkHeads::unused"][::core::mem::offset_of!(KlQkHeads, unused) - 124usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlQkNormRope {
    pub part: [KlQkHeads; 4usize],
    pub head_dim: u32,
    pub style: u32,
    pub eps: f32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlQkNormRope"][::core::mem::size_of::<KlQkNormRope>() - 528usize];
    ["Alignment of KlQkNormRope"][::core::mem::align_of::<KlQkNormRope>() - 8usize];
    ["Offset of field: KlQkNormRope::part"][::core::mem::offset_of!(KlQkNormRope, part) - 0usize];
    ["Offset of field: KlQkNormRope::head_dim"][::core::mem::offset_of!(KlQkNormRope, head_dim) - 512usize];
    ["Offset of field: KlQkNormRope::style"][::core::mem::offset_of!(KlQkNormRope, style) - 516usize];
    ["Offset of field: KlQkNormRope::eps"][::core::mem::offset_of!(KlQkNormRope, eps) - 520usize];
    ["Offset of field: KlQkNormRope::unused"][::core::mem::offset_of!(KlQkNormRope, unused) - 524usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGroupStats"][::core::mem::size_of::<KlGroupStats>() - 104usize];
    ["Alignment of KlGroupStats"][::core::mem::align_of::<KlGroupStats>() - 8usize];
    ["Offset of field: KlGroupStats::x"][::core::mem::offset_of!(KlGroupStats, x) - 0usize];
    ["Offset of field: KlGroupStats::stats"][::core::mem::offset_of!(KlGroupStats, stats) - 40usize];
    ["Offset of field: KlGroupStats::partials"][::core::mem::offset_of!(KlGroupStats, partials) - 80usize];
    ["Offset of field: KlGroupStats::blocks"][::core::mem::offset_of!(KlGroupStats, blocks) - 88usize];
    ["Offset of field: KlGroupStats::groups"][::core::mem::offset_of!(KlGroupStats, groups) - 96usize];
    ["Offset of field: KlGroupStats::unused"][::core::mem::offset_of!(KlGroupStats, unused) - 100usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGroupNorm"][::core::mem::size_of::<KlGroupNorm>() - 224usize];
    ["Alignment of KlGroupNorm"][::core::mem::align_of::<KlGroupNorm>() - 8usize];
    ["Offset of field: KlGroupNorm::out"][::core::mem::offset_of!(KlGroupNorm, out) - 0usize];
    ["Offset of field: KlGroupNorm::x"][::core::mem::offset_of!(KlGroupNorm, x) - 40usize];
    ["Offset of field: KlGroupNorm::weight"][::core::mem::offset_of!(KlGroupNorm, weight) - 80usize];
    ["Offset of field: KlGroupNorm::bias"][::core::mem::offset_of!(KlGroupNorm, bias) - 120usize];
    ["Offset of field: KlGroupNorm::stats"][::core::mem::offset_of!(KlGroupNorm, stats) - 160usize];
    ["Offset of field: KlGroupNorm::partials"][::core::mem::offset_of!(KlGroupNorm, partials) - 200usize];
    ["Offset of field: KlGroupNorm::blocks"][::core::mem::offset_of!(KlGroupNorm, blocks) - 208usize];
    ["Offset of field: KlGroupNorm::groups"][::core::mem::offset_of!(KlGroupNorm, groups) - 212usize];
    ["Offset of field: KlGroupNorm::eps"][::core::mem::offset_of!(KlGroupNorm, eps) - 216usize];
    ["Offset of field: KlGroupNorm::silu"][::core::mem::offset_of!(KlGroupNorm, silu) - 220usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlNaiveGemm {
    pub out: KlMat,
    pub x: KlMat,
    pub w: [KlMat; 2usize],
    pub bias: KlMat,
    pub gate: KlMat,
    pub reduced: KlMat,
    pub up: [KlMat; 2usize],
    pub saturated: u64,
    pub first: [u32; 2usize],
    pub epilogue: u32,
    pub unused: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlNaiveGemm"][::core::mem::size_of::<KlNaiveGemm>() - 384usize];
    ["Alignment of KlNaiveGemm"][::core::mem::align_of::<KlNaiveGemm>() - 8usize];
    ["Offset of field: KlNaiveGemm::out"][::core::mem::offset_of!(KlNaiveGemm, out) - 0usize];
    ["Offset of field: KlNaiveGemm::x"][::core::mem::offset_of!(KlNaiveGemm, x) - 40usize];
    ["Offset of field: KlNaiveGemm::w"][::core::mem::offset_of!(KlNaiveGemm, w) - 80usize];
    ["Offset of field: KlNaiveGemm::bias"][::core::mem::offset_of!(KlNaiveGemm, bias) - 160usize];
    ["Offset of field: KlNaiveGemm::gate"][::core::mem::offset_of!(KlNaiveGemm, gate) - 200usize];
    ["Offset of field: KlNaiveGemm::reduced"][::core::mem::offset_of!(KlNaiveGemm, reduced) - 240usize];
    ["Offset of field: KlNaiveGemm::up"][::core::mem::offset_of!(KlNaiveGemm, up) - 280usize];
    ["Offset of field: KlNaiveGemm::saturated"][::core::mem::offset_of!(KlNaiveGemm, saturated) - 360usize];
    ["Offset of field: KlNaiveGemm::first"][::core::mem::offset_of!(KlNaiveGemm, first) - 368usize];
    ["Offset of field: KlNaiveGemm::epilogue"][::core::mem::offset_of!(KlNaiveGemm, epilogue) - 376usize];
    ["Offset of field: KlNaiveGemm::unused"][::core::mem::offset_of!(KlNaiveGemm, unused) - 380usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlKeyValues {
    pub k: KlMat,
    pub v: KlMat,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlKeyValues"][::core::mem::size_of::<KlKeyValues>() - 80usize];
    ["Alignment of KlKeyValues"][::core::mem::align_of::<KlKeyValues>() - 8usize];
    ["Offset of field: KlKeyValues::k"][::core::mem::offset_of!(KlKeyValues, k) - 0usize];
    ["Offset of field: KlKeyValues::v"][::core::mem::offset_of!(KlKeyValues, v) - 40usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlAttention"][::core::mem::size_of::<KlAttention>() - 1392usize];
    ["Alignment of KlAttention"][::core::mem::align_of::<KlAttention>() - 8usize];
    ["Offset of field: KlAttention::out"][::core::mem::offset_of!(KlAttention, out) - 0usize];
    ["Offset of field: KlAttention::q"][::core::mem::offset_of!(KlAttention, q) - 40usize];
    ["Offset of field: KlAttention::kv"][::core::mem::offset_of!(KlAttention, kv) - 80usize];
    ["Offset of field: KlAttention::saturated"][::core::mem::offset_of!(KlAttention, saturated) - 1360usize];
    ["Offset of field: KlAttention::segments"][::core::mem::offset_of!(KlAttention, segments) - 1368usize];
    ["Offset of field: KlAttention::head_dim"][::core::mem::offset_of!(KlAttention, head_dim) - 1372usize];
    ["Offset of field: KlAttention::group"][::core::mem::offset_of!(KlAttention, group) - 1376usize];
    ["Offset of field: KlAttention::causal"][::core::mem::offset_of!(KlAttention, causal) - 1380usize];
    ["Offset of field: KlAttention::scale"][::core::mem::offset_of!(KlAttention, scale) - 1384usize];
    ["Offset of field: KlAttention::unused"][::core::mem::offset_of!(KlAttention, unused) - 1388usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlConv"][::core::mem::size_of::<KlConv>() - 272usize];
    ["Alignment of KlConv"][::core::mem::align_of::<KlConv>() - 8usize];
    ["Offset of field: KlConv::out"][::core::mem::offset_of!(KlConv, out) - 0usize];
    ["Offset of field: KlConv::x"][::core::mem::offset_of!(KlConv, x) - 40usize];
    ["Offset of field: KlConv::w"][::core::mem::offset_of!(KlConv, w) - 80usize];
    ["Offset of field: KlConv::bias"][::core::mem::offset_of!(KlConv, bias) - 120usize];
    ["Offset of field: KlConv::residual"][::core::mem::offset_of!(KlConv, residual) - 160usize];
    ["Offset of field: KlConv::stats"][::core::mem::offset_of!(KlConv, stats) - 200usize];
    ["Offset of field: KlConv::partials"][::core::mem::offset_of!(KlConv, partials) - 240usize];
    ["Offset of field: KlConv::row_tiles"][::core::mem::offset_of!(KlConv, row_tiles) - 248usize];
    ["Offset of field: KlConv::groups"][::core::mem::offset_of!(KlConv, groups) - 252usize];
    ["Offset of field: KlConv::width"][::core::mem::offset_of!(KlConv, width) - 256usize];
    ["Offset of field: KlConv::height"][::core::mem::offset_of!(KlConv, height) - 260usize];
    ["Offset of field: KlConv::sampling"][::core::mem::offset_of!(KlConv, sampling) - 264usize];
    ["Offset of field: KlConv::unused"][::core::mem::offset_of!(KlConv, unused) - 268usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlNormConv"][::core::mem::size_of::<KlNormConv>() - 296usize];
    ["Alignment of KlNormConv"][::core::mem::align_of::<KlNormConv>() - 8usize];
    ["Offset of field: KlNormConv::out"][::core::mem::offset_of!(KlNormConv, out) - 0usize];
    ["Offset of field: KlNormConv::x"][::core::mem::offset_of!(KlNormConv, x) - 40usize];
    ["Offset of field: KlNormConv::w"][::core::mem::offset_of!(KlNormConv, w) - 80usize];
    ["Offset of field: KlNormConv::bias"][::core::mem::offset_of!(KlNormConv, bias) - 120usize];
    ["Offset of field: KlNormConv::stats"][::core::mem::offset_of!(KlNormConv, stats) - 160usize];
    ["Offset of field: KlNormConv::gain"][::core::mem::offset_of!(KlNormConv, gain) - 200usize];
    ["Offset of field: KlNormConv::shift"][::core::mem::offset_of!(KlNormConv, shift) - 240usize];
    ["Offset of field: KlNormConv::width"][::core::mem::offset_of!(KlNormConv, width) - 280usize];
    ["Offset of field: KlNormConv::height"][::core::mem::offset_of!(KlNormConv, height) - 284usize];
    ["Offset of field: KlNormConv::eps"][::core::mem::offset_of!(KlNormConv, eps) - 288usize];
    ["Offset of field: KlNormConv::strip_rows"][::core::mem::offset_of!(KlNormConv, strip_rows) - 292usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmRows {
    pub matrix: u32,
    pub first: u32,
    pub dtype: u32,
    pub alpha: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGemmRows"][::core::mem::size_of::<KlGemmRows>() - 16usize];
    ["Alignment of KlGemmRows"][::core::mem::align_of::<KlGemmRows>() - 4usize];
    ["Offset of field: KlGemmRows::matrix"][::core::mem::offset_of!(KlGemmRows, matrix) - 0usize];
    ["Offset of field: KlGemmRows::first"][::core::mem::offset_of!(KlGemmRows, first) - 4usize];
    ["Offset of field: KlGemmRows::dtype"][::core::mem::offset_of!(KlGemmRows, dtype) - 8usize];
    ["Offset of field: KlGemmRows::alpha"][::core::mem::offset_of!(KlGemmRows, alpha) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmPart {
    pub out: KlMat,
    pub extra: KlMat,
    pub w: [KlGemmRows; 2usize],
    pub epilogue: u32,
    pub first_col: u32,
    pub tiles: u32,
    pub scale: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGemmPart"][::core::mem::size_of::<KlGemmPart>() - 128usize];
    ["Alignment of KlGemmPart"][::core::mem::align_of::<KlGemmPart>() - 8usize];
    ["Offset of field: KlGemmPart::out"][::core::mem::offset_of!(KlGemmPart, out) - 0usize];
    ["Offset of field: KlGemmPart::extra"][::core::mem::offset_of!(KlGemmPart, extra) - 40usize];
    ["Offset of field: KlGemmPart::w"][::core::mem::offset_of!(KlGemmPart, w) - 80usize];
    ["Offset of field: KlGemmPart::epilogue"][::core::mem::offset_of!(KlGemmPart, epilogue) - 112usize];
    ["Offset of field: KlGemmPart::first_col"][::core::mem::offset_of!(KlGemmPart, first_col) - 116usize];
    ["Offset of field: KlGemmPart::tiles"][::core::mem::offset_of!(KlGemmPart, tiles) - 120usize];
    ["Offset of field: KlGemmPart::scale"][::core::mem::offset_of!(KlGemmPart, scale) - 124usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmStream {
    pub x: KlMat,
    pub w: [KlMat; 4usize],
    pub bias: KlMat,
    pub table: KlMat,
    pub reduced: KlMat,
    pub up: KlMat,
    pub part: [KlGemmPart; 4usize],
    pub row_tiles: u32,
    pub col_tiles: u32,
    pub rope: u32,
    pub eps: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGemmStream"][::core::mem::size_of::<KlGemmStream>() - 888usize];
    ["Alignment of KlGemmStream"][::core::mem::align_of::<KlGemmStream>() - 8usize];
    ["Offset of field: KlGemmStream::x"][::core::mem::offset_of!(KlGemmStream, x) - 0usize];
    ["Offset of field: KlGemmStream::w"][::core::mem::offset_of!(KlGemmStream, w) - 40usize];
    ["Offset of field: KlGemmStream::bias"][::core::mem::offset_of!(KlGemmStream, bias) - 200usize];
    ["Offset of field: KlGemmStream::table"][::core::mem::offset_of!(KlGemmStream, table) - 240usize];
    ["Offset of field: KlGemmStream::reduced"][::core::mem::offset_of!(KlGemmStream, reduced) - 280usize];
    ["Offset of field: KlGemmStream::up"][::core::mem::offset_of!(KlGemmStream, up) - 320usize];
    ["Offset of field: KlGemmStream::part"][::core::mem::offset_of!(KlGemmStream, part) - 360usize];
    ["Offset of field: KlGemmStream::row_tiles"][::core::mem::offset_of!(KlGemmStream, row_tiles) - 872usize];
    ["Offset of field: KlGemmStream::col_tiles"][::core::mem::offset_of!(KlGemmStream, col_tiles) - 876usize];
    ["Offset of field: KlGemmStream::rope"][::core::mem::offset_of!(KlGemmStream, rope) - 880usize];
    ["Offset of field: KlGemmStream::eps"][::core::mem::offset_of!(KlGemmStream, eps) - 884usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlTileSchedule"][::core::mem::size_of::<KlTileSchedule>() - 32usize];
    ["Alignment of KlTileSchedule"][::core::mem::align_of::<KlTileSchedule>() - 8usize];
    ["Offset of field: KlTileSchedule::partials"][::core::mem::offset_of!(KlTileSchedule, partials) - 0usize];
    ["Offset of field: KlTileSchedule::flags"][::core::mem::offset_of!(KlTileSchedule, flags) - 8usize];
    ["Offset of field: KlTileSchedule::k_blocks"][::core::mem::offset_of!(KlTileSchedule, k_blocks) - 16usize];
    ["Offset of field: KlTileSchedule::full_tiles"][::core::mem::offset_of!(KlTileSchedule, full_tiles) - 20usize];
    ["Offset of field: KlTileSchedule::k_blocks_per_worker"]
        [::core::mem::offset_of!(KlTileSchedule, k_blocks_per_worker) - 24usize];
    ["Offset of field: KlTileSchedule::remainder"][::core::mem::offset_of!(KlTileSchedule, remainder) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlGemm {
    pub stream: [KlGemmStream; 2usize],
    pub schedule: KlTileSchedule,
    pub saturated: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGemm"][::core::mem::size_of::<KlGemm>() - 1816usize];
    ["Alignment of KlGemm"][::core::mem::align_of::<KlGemm>() - 8usize];
    ["Offset of field: KlGemm::stream"][::core::mem::offset_of!(KlGemm, stream) - 0usize];
    ["Offset of field: KlGemm::schedule"][::core::mem::offset_of!(KlGemm, schedule) - 1776usize];
    ["Offset of field: KlGemm::saturated"][::core::mem::offset_of!(KlGemm, saturated) - 1808usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlReduction {
    pub out: KlMat,
    pub x: KlMat,
    pub down: KlMat,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlReduction"][::core::mem::size_of::<KlReduction>() - 120usize];
    ["Alignment of KlReduction"][::core::mem::align_of::<KlReduction>() - 8usize];
    ["Offset of field: KlReduction::out"][::core::mem::offset_of!(KlReduction, out) - 0usize];
    ["Offset of field: KlReduction::x"][::core::mem::offset_of!(KlReduction, x) - 40usize];
    ["Offset of field: KlReduction::down"][::core::mem::offset_of!(KlReduction, down) - 80usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlLowRank {
    pub stream: [KlReduction; 2usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlLowRank"][::core::mem::size_of::<KlLowRank>() - 240usize];
    ["Alignment of KlLowRank"][::core::mem::align_of::<KlLowRank>() - 8usize];
    ["Offset of field: KlLowRank::stream"][::core::mem::offset_of!(KlLowRank, stream) - 0usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlExpand {
    pub w: [KlMat; 8usize],
    pub to: [u64; 8usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlExpand"][::core::mem::size_of::<KlExpand>() - 384usize];
    ["Alignment of KlExpand"][::core::mem::align_of::<KlExpand>() - 8usize];
    ["Offset of field: KlExpand::w"][::core::mem::offset_of!(KlExpand, w) - 0usize];
    ["Offset of field: KlExpand::to"][::core::mem::offset_of!(KlExpand, to) - 320usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlExpansion {
    pub counters: u64,
    pub to: [[u64; 4usize]; 2usize],
    pub units: u32,
    pub tiles: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlExpansion"][::core::mem::size_of::<KlExpansion>() - 80usize];
    ["Alignment of KlExpansion"][::core::mem::align_of::<KlExpansion>() - 8usize];
    ["Offset of field: KlExpansion::counters"][::core::mem::offset_of!(KlExpansion, counters) - 0usize];
    ["Offset of field: KlExpansion::to"][::core::mem::offset_of!(KlExpansion, to) - 8usize];
    ["Offset of field: KlExpansion::units"][::core::mem::offset_of!(KlExpansion, units) - 72usize];
    ["Offset of field: KlExpansion::tiles"][::core::mem::offset_of!(KlExpansion, tiles) - 76usize];
};
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlGemmSm90 {
    pub x: [KlTensorMap; 2usize],
    pub w: [[KlTensorMap; 4usize]; 2usize],
    pub out: [[KlTensorMap; 4usize]; 2usize],
    pub residual: [KlTensorMap; 2usize],
    pub reduced: [KlTensorMap; 2usize],
    pub up: [KlTensorMap; 2usize],
    pub stream: [KlGemmStream; 2usize],
    pub expansion: KlExpansion,
    pub group: [u32; 2usize],
    pub schedule: KlTileSchedule,
    pub saturated: u64,
    pub unused: [u64; 18usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlGemmSm90"][::core::mem::size_of::<KlGemmSm90>() - 5120usize];
    ["Alignment of KlGemmSm90"][::core::mem::align_of::<KlGemmSm90>() - 128usize];
    ["Offset of field: KlGemmSm90::x"][::core::mem::offset_of!(KlGemmSm90, x) - 0usize];
    ["Offset of field: KlGemmSm90::w"][::core::mem::offset_of!(KlGemmSm90, w) - 256usize];
    ["Offset of field: KlGemmSm90::out"][::core::mem::offset_of!(KlGemmSm90, out) - 1280usize];
    ["Offset of field: KlGemmSm90::residual"][::core::mem::offset_of!(KlGemmSm90, residual) - 2304usize];
    ["Offset of field: KlGemmSm90::reduced"][::core::mem::offset_of!(KlGemmSm90, reduced) - 2560usize];
    ["Offset of field: KlGemmSm90::up"][::core::mem::offset_of!(KlGemmSm90, up) - 2816usize];
    ["Offset of field: KlGemmSm90::stream"][::core::mem::offset_of!(KlGemmSm90, stream) - 3072usize];
    ["Offset of field: KlGemmSm90::expansion"][::core::mem::offset_of!(KlGemmSm90, expansion) - 4848usize];
    ["Offset of field: KlGemmSm90::group"][::core::mem::offset_of!(KlGemmSm90, group) - 4928usize];
    ["Offset of field: KlGemmSm90::schedule"][::core::mem::offset_of!(KlGemmSm90, schedule) - 4936usize];
    ["Offset of field: KlGemmSm90::saturated"][::core::mem::offset_of!(KlGemmSm90, saturated) - 4968usize];
    ["Offset of field: KlGemmSm90::unused"][::core::mem::offset_of!(KlGemmSm90, unused) - 4976usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlConvImage"][::core::mem::size_of::<KlConvImage>() - 768usize];
    ["Alignment of KlConvImage"][::core::mem::align_of::<KlConvImage>() - 128usize];
    ["Offset of field: KlConvImage::plane"][::core::mem::offset_of!(KlConvImage, plane) - 0usize];
    ["Offset of field: KlConvImage::shortcut"][::core::mem::offset_of!(KlConvImage, shortcut) - 512usize];
    ["Offset of field: KlConvImage::shortcut_bias"][::core::mem::offset_of!(KlConvImage, shortcut_bias) - 640usize];
    ["Offset of field: KlConvImage::partials"][::core::mem::offset_of!(KlConvImage, partials) - 680usize];
    ["Offset of field: KlConvImage::tap_rows"][::core::mem::offset_of!(KlConvImage, tap_rows) - 688usize];
    ["Offset of field: KlConvImage::tap_filters"][::core::mem::offset_of!(KlConvImage, tap_filters) - 696usize];
    ["Offset of field: KlConvImage::tap_planes"][::core::mem::offset_of!(KlConvImage, tap_planes) - 704usize];
    ["Offset of field: KlConvImage::window_starts"][::core::mem::offset_of!(KlConvImage, window_starts) - 708usize];
    ["Offset of field: KlConvImage::origin"][::core::mem::offset_of!(KlConvImage, origin) - 712usize];
    ["Offset of field: KlConvImage::groups"][::core::mem::offset_of!(KlConvImage, groups) - 716usize];
    ["Offset of field: KlConvImage::width"][::core::mem::offset_of!(KlConvImage, width) - 720usize];
    ["Offset of field: KlConvImage::height"][::core::mem::offset_of!(KlConvImage, height) - 724usize];
    ["Offset of field: KlConvImage::tiles_across"][::core::mem::offset_of!(KlConvImage, tiles_across) - 728usize];
    ["Offset of field: KlConvImage::channels"][::core::mem::offset_of!(KlConvImage, channels) - 732usize];
    ["Offset of field: KlConvImage::taps"][::core::mem::offset_of!(KlConvImage, taps) - 736usize];
    ["Offset of field: KlConvImage::tap_blocks"][::core::mem::offset_of!(KlConvImage, tap_blocks) - 740usize];
    ["Offset of field: KlConvImage::half_blocks"][::core::mem::offset_of!(KlConvImage, half_blocks) - 744usize];
    ["Offset of field: KlConvImage::unused"][::core::mem::offset_of!(KlConvImage, unused) - 748usize];
};
#[repr(C)]
#[repr(align(128))]
#[derive(Debug, Copy, Clone)]
pub struct KlConvSm90 {
    pub gemm: KlGemmSm90,
    pub image: KlConvImage,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlConvSm90"][::core::mem::size_of::<KlConvSm90>() - 5888usize];
    ["Alignment of KlConvSm90"][::core::mem::align_of::<KlConvSm90>() - 128usize];
    ["Offset of field: KlConvSm90::gemm"][::core::mem::offset_of!(KlConvSm90, gemm) - 0usize];
    ["Offset of field: KlConvSm90::image"][::core::mem::offset_of!(KlConvSm90, image) - 5120usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlAttentionSm90"][::core::mem::size_of::<KlAttentionSm90>() - 2432usize];
    ["Alignment of KlAttentionSm90"][::core::mem::align_of::<KlAttentionSm90>() - 128usize];
    ["Offset of field: KlAttentionSm90::q"][::core::mem::offset_of!(KlAttentionSm90, q) - 0usize];
    ["Offset of field: KlAttentionSm90::k"][::core::mem::offset_of!(KlAttentionSm90, k) - 128usize];
    ["Offset of field: KlAttentionSm90::v"][::core::mem::offset_of!(KlAttentionSm90, v) - 1152usize];
    ["Offset of field: KlAttentionSm90::out"][::core::mem::offset_of!(KlAttentionSm90, out) - 2176usize];
    ["Offset of field: KlAttentionSm90::schedule"][::core::mem::offset_of!(KlAttentionSm90, schedule) - 2256usize];
    ["Offset of field: KlAttentionSm90::saturated"][::core::mem::offset_of!(KlAttentionSm90, saturated) - 2288usize];
    ["Offset of field: KlAttentionSm90::keys"][::core::mem::offset_of!(KlAttentionSm90, keys) - 2296usize];
    ["Offset of field: KlAttentionSm90::row_tiles"][::core::mem::offset_of!(KlAttentionSm90, row_tiles) - 2328usize];
    ["Offset of field: KlAttentionSm90::group"][::core::mem::offset_of!(KlAttentionSm90, group) - 2332usize];
    ["Offset of field: KlAttentionSm90::pack"][::core::mem::offset_of!(KlAttentionSm90, pack) - 2336usize];
    ["Offset of field: KlAttentionSm90::scale"][::core::mem::offset_of!(KlAttentionSm90, scale) - 2340usize];
    ["Offset of field: KlAttentionSm90::unused"][::core::mem::offset_of!(KlAttentionSm90, unused) - 2344usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlTestCopy"][::core::mem::size_of::<KlTestCopy>() - 256usize];
    ["Alignment of KlTestCopy"][::core::mem::align_of::<KlTestCopy>() - 128usize];
    ["Offset of field: KlTestCopy::map"][::core::mem::offset_of!(KlTestCopy, map) - 0usize];
    ["Offset of field: KlTestCopy::from"][::core::mem::offset_of!(KlTestCopy, from) - 128usize];
    ["Offset of field: KlTestCopy::out"][::core::mem::offset_of!(KlTestCopy, out) - 168usize];
    ["Offset of field: KlTestCopy::how"][::core::mem::offset_of!(KlTestCopy, how) - 208usize];
    ["Offset of field: KlTestCopy::unused"][::core::mem::offset_of!(KlTestCopy, unused) - 212usize];
};
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
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlFragments"][::core::mem::size_of::<KlFragments>() - 32usize];
    ["Alignment of KlFragments"][::core::mem::align_of::<KlFragments>() - 8usize];
    ["Offset of field: KlFragments::fragments"][::core::mem::offset_of!(KlFragments, fragments) - 0usize];
    ["Offset of field: KlFragments::results"][::core::mem::offset_of!(KlFragments, results) - 8usize];
    ["Offset of field: KlFragments::cases"][::core::mem::offset_of!(KlFragments, cases) - 16usize];
    ["Offset of field: KlFragments::selector_a"][::core::mem::offset_of!(KlFragments, selector_a) - 20usize];
    ["Offset of field: KlFragments::selector_b"][::core::mem::offset_of!(KlFragments, selector_b) - 24usize];
    ["Offset of field: KlFragments::unused"][::core::mem::offset_of!(KlFragments, unused) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct KlConversions {
    pub values: u64,
    pub e4m3: u64,
    pub e2m1: u64,
    pub count: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of KlConversions"][::core::mem::size_of::<KlConversions>() - 32usize];
    ["Alignment of KlConversions"][::core::mem::align_of::<KlConversions>() - 8usize];
    ["Offset of field: KlConversions::values"][::core::mem::offset_of!(KlConversions, values) - 0usize];
    ["Offset of field: KlConversions::e4m3"][::core::mem::offset_of!(KlConversions, e4m3) - 8usize];
    ["Offset of field: KlConversions::e2m1"][::core::mem::offset_of!(KlConversions, e2m1) - 16usize];
    ["Offset of field: KlConversions::count"][::core::mem::offset_of!(KlConversions, count) - 24usize];
};
