//! Bugs that tests plant in copies of kernel sources, to check that the emulator finds them. The build script compiles each as a module.

use Expect::{Check, Report, Sums};

/// A bug: a text that occurs once in a source, its replacement, and how the bug is found.
#[derive(Clone, Copy, Debug)]
pub struct Planted {
    /// The name of the module that has the bug.
    pub name: &'static str,
    /// The kernel file to compile with the bug, without its extension.
    pub kernel_file: &'static str,
    /// A part of the `kernels.def` row that the module keeps; empty for all rows.
    pub row: &'static str,
    /// The kernel that the case must take; empty for the backend's own choice.
    pub kernel: &'static str,
    /// The source that contains the text, below `kernels/`.
    pub source: &'static str,
    /// The text to replace.
    pub find: &'static str,
    /// The replacement.
    pub replace: &'static str,
    /// How the bug is found.
    pub expect: Expect,
}

/// How a bug is found.
#[derive(Clone, Copy, Debug)]
pub enum Expect {
    /// This op case fails, and its report contains this text.
    Report(&'static str, &'static str),
    /// On a GPU of this compute capability only this check of `kiln selftest` fails, with a text that begins like this.
    Check((u32, u32), &'static str, &'static str),
    /// The test of FP8 sums fails. Op cases do not, because their results may be as far off as on tensor cores.
    Sums,
}

/// Files, rows and kernels, with the bugs of each: a name, how it is found, a source, a text in that source, and its replacement.
macro_rules! planted {
    ($($file:literal, $row:literal, $kernel:literal {
        $($name:ident: $expect:expr, $source:literal, $find:literal => $replace:literal;)*
    })*) => {
        &[$($(Planted {
            name: stringify!($name),
            kernel_file: $file,
            row: $row,
            kernel: $kernel,
            source: $source,
            find: $find,
            replace: $replace,
            expect: $expect,
        },)*)*]
    };
}

/// The report of a result with too large an error.
pub const WRONG: &str = "relative error";
/// Ten k-blocks, more than any pipeline has stages. Two Stream-K workers, or the CTAs of a cluster, divide them evenly.
const LONG: &str = "linear_gate_residual 66x64, rows of 584 gate true bias true bf16 whole";
/// Nine k-blocks, which two workers cannot divide evenly.
const REMAINDER: &str = "linear_gate_residual 130x168, rows of 520 gate true bias true bf16 whole";
/// Several groups of k-blocks that are expanded together, and two tiles of columns.
const EXPANDED: &str = "linear w8a16 130 rows of 528 to 168, e4m3, bias false bf16 whole";
/// Weights that another kernel expands before the GEMM.
const EXPANDED_BEFORE: &str = "linear w8a16 67 rows of 208 to 168, e4m3 unscaled, bias false bf16 whole";
/// Several block-scale tiles.
const NVFP4: &str = "linear w4a16 130 rows of 576 to 168, nvfp4, bias false bf16 whole";
/// NVFP4 results.
const NVFP4_NORM: &str = "layer_norm_modulate 5 and 3 rows of 1024 into nvfp4 and clipped nvfp4 bf16 whole";
const NVFP4_ATTENTION: &str = "attention into nvfp4, 2:1 heads of 128 bf16 whole";
/// Two e4m3 operands and more k-blocks than pipeline stages; and the same operands with an e4m3 result.
const FP8: &str = "linear_gate_residual w8a8 130 rows of 528 to 168, e4m3 by rows, gate true bias false bf16 whole";
const FP8_STORED: &str = "linear_swiglu w8a8 67 rows of 528 to 208, e4m3 and e4m3 by rows into e4m3 bf16 whole";
/// An attention tile whose rows are in two output ranges.
const RANGES: &str = "attention of e4m3 into e4m3 with two scales, 2:1 heads of 128 bf16 whole";
/// Values beyond the range of e4m3.
const CLIPPED: &str = "attention of e4m3 into plain and clipped e4m3, 2:1 heads of 128 bf16 whole";
/// Keys with two scales, in more than one block.
const SCALED_KEYS: &str =
    "attention of e4m3 by 0.37 and 0.0071 or 0.013 130 queries [129, 0, 7, 40] keys 2:1 heads of 128 bf16 whole";
/// Several KV blocks of a wide head, and row maxima that rise.
const WIDE: &str = "attention huge 5 queries [600] keys 1:1 heads of 512 bf16 whole";
/// Every epilogue that normalizes heads.
const QKV: &str = "qkv 113x64 3:3 heads of 128 interleaved mlp some(129) bf16 whole";
/// Two NVFP4 operands and an NVFP4 result. The rows of ups begin within a scale tile.
const W4A4: &str = "linear_swiglu w4a4 67 rows of 640 to 192, nvfp4 in one matrix into nvfp4 bf16 whole";
/// LoRA branches of several pipeline stages: with a residual, and with scales.
const LOW_RANK: &str = "linear_gate_residual bf16 67 rows of 640 to 264, rank 400, gate true bias true bf16 whole";
const LOW_RANK_FP8: &str = "linear w8a8 130 rows of 640 to 168, rank 48, bias true bf16 whole";
/// A convolution with moments, and with tiles at every edge.
const MOMENTS: &str = "conv 33x35 8 to 256 same residual true stats some(4) bf16 whole";
/// Three windows: one for the taps, and two for the other image.
const SHORTCUT: &str = "conv 19x31 16 to 128 same shortcut of 72 stats some(32) bf16 whole";
/// A convolution in phases, with whole tiles of channels.
const UPSAMPLED: &str = "conv 7x3 40 to 128 up residual false stats some(16) bf16 whole";
/// Several strips of several steps each, and a ragged end on both sides.
const NORM_CONV: &str = "norm_conv 47x35 128 to 3 groups 32 stats given true bf16 whole";
/// Two k-blocks of channels for each tap. The second is half empty.
const HALF_BLOCKS: &str = "conv 17x9 96 to 96 same residual false stats some(32) bf16 whole";
/// Several KV blocks of a head whose values have fewer bytes than its keys.
const NARROWER: &str = "attention huge 5 queries [600] keys 1:1 heads of 384 bf16 whole";
const BLEND: &str = "blend 11x27 at the left, 3 channels bf16 whole";
/// More than one tile of pixels.
const CONV_IN: &str = "conv 33x17 3 to 128 same residual false stats some(32) bf16 whole";

/// All planted bugs.
pub const BUGS: &[Planted] = planted! {
    "gemm_bf16_sm90", "128, 192,", "GemmBf16Sm90_128x192" {
        // A consumer gives a stage back while the MMAs of its k-block are in flight.
        stage_released_early: Report(LONG, "which a wgmma of CTA"), "gemm/tma_mainloop.cuh",
        "    if (k > work.k_begin) pipe.release(pipe.previous());\n  }\n  wgmma_wait<0>();\n  pipe.release(pipe.previous());"
        => "    pipe.release(pipe.stage);\n  }\n  wgmma_wait<0>();";
        // The producer does not wait until a stage is free.
        missing_empty_wait: Report(LONG, "has had all 1 arrivals of phase"), "gemm/tma_mainloop.cuh",
        "        mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);\n        load_b(k);" => "        load_b(k);";
        // Consumers do not wait for the copies of a stage.
        missing_full_wait: Report(LONG, " reads shared memory +0x"), "gemm/tma_mainloop.cuh",
        "named_barrier_sync(kHandOverBarrier<Config>);\n    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);\n"
        => "named_barrier_sync(kHandOverBarrier<Config>);\n";
        // A stage is given back only to the CTA's own producer, and not to the peer that multicasts into it.
        missing_remote_arrive: Report(LONG, "2 of 4 arrivals and 0 bytes are missing"), "persistent/pipeline.cuh",
        "if (threadIdx.x % kWarpgroupThreads < kCtas) mbarrier_arrive_remote(empty, threadIdx.x % kWarpgroupThreads);"
        => "if (threadIdx.x % kWarpgroupThreads == 0) mbarrier_arrive(empty);";
        // The epilogue reads accumulators while MMAs on them are in flight.
        missing_wgmma_wait: Report(LONG, "while a wgmma on it is in flight"), "gemm/tma_mainloop.cuh",
        "  wgmma_wait<0>();\n  pipe.release(pipe.previous());" => "  pipe.release(pipe.previous());";
        // Results are staged without the swizzle of the output's tensor map.
        wrong_swizzle: Report(LONG, WRONG), "gemm/tma_policies.cuh",
        "swizzled<kCols * sizeof(Element)>(lane % 16, lane / 16);" => "lane % 16 * (kCols * sizeof(Element)) + lane / 16 * 16;";
        // TMA stores results that need not be visible to it yet.
        missing_proxy_fence: Report(LONG, "without fence_proxy_async"), "gemm/tma_epilogue.cuh",
        "      fence_proxy_async();\n" => "";
        // A stage expects more bytes than its boxes have.
        wrong_byte_count: Report(LONG, "0 of 1 arrivals and 16 bytes are missing"), "gemm/tma_mainloop.cuh",
        "mbarrier_arrive_expect_tx(full, LoaderA::kTmaBytes + LoaderB::kTmaBytes);"
        => "mbarrier_arrive_expect_tx(full, LoaderA::kTmaBytes + LoaderB::kTmaBytes + 16);";
        // A Stream-K worker publishes its partials before all of its lanes have stored them, so stale partials are added.
        partials_published_early: Report(LONG, "without an acquire of what that warp has released"), "persistent/stream_k.cuh",
        "    Owner::sync_stores();\n    if" => "    if";
        // The ranges of Stream-K workers begin one k-block late.
        stream_k_off_by_one: Report(REMAINDER, "global memory that is not allocated"), "persistent/stream_k.cuh",
        "min(worker, schedule.remainder)" => "min(worker + 1, schedule.remainder)";
        // A block of a LoRA branch is released before all warps have read it.
        low_rank_released_early: Report(LOW_RANK, "without a barrier between them"), "gemm/tma_epilogue.cuh",
        "if constexpr (!Config::Mma::kPerWarp) warpgroup_sync(kWarpgroupBarrier + thread / kWarpgroupThreads - 1);\n      pipe.release(pipe.stage);\n    }\n  }\n\n  // Calls f"
        => "pipe.release(pipe.stage);\n    }\n  }\n\n  // Calls f";
    }
    "gemm_bf16_sm90", "128, 160,", "GemmBf16Sm90_128x160" {
        // The second box of B overlaps the first.
        overlapping_boxes: Report(LONG, "which a TMA load of CTA"), "gemm/tma_policies.cuh",
        "tma_load_2d(to + Config::kBBytes / 2, second.map," => "tma_load_2d(to + Config::kBBytes / 4, second.map,";
        // One warpgroup hands over at a different barrier from the one where the other waits.
        wrong_barrier_id: Report(LONG, "barrier 3, where 128 of 256 threads have arrived"), "gemm/tma_mainloop.cuh",
        "k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier<Config>);"
        => "k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier<Config> + 1);";
        // With split-K a warpgroup keeps the stages that it does not use.
        low_rank_not_skipped: Report(LOW_RANK, "arrivals and 0 bytes are missing"), "gemm/tma_mainloop.cuh",
        "if constexpr (Config::kLora) skip_lora(p.stream[at.stream], pipe, group);" => "";
        // With split-K a warpgroup releases such stages before all its warps have seen them filled.
        low_rank_skipped_apart: Report(LOW_RANK, "arrivals and 0 bytes are missing"), "gemm/tma_mainloop.cuh",
        "    warpgroup_sync(kWarpgroupBarrier + group);\n    pipe.release(pipe.stage);" => "    pipe.release(pipe.stage);";
    }
    "gemm_mixed_sm90", "128, 192,", "GemmMixedSm90_128x192" {
        // TMA loads expanded weights that need not be visible to it yet.
        expanded_without_fence: Report(EXPANDED, "without fence_proxy_async_global"), "gemm/expand_sm90.cuh",
        "      fence_proxy_async_global();\n" => "";
        // The producer does not wait for all rows of a tile.
        expanded_rows_not_awaited: Report(EXPANDED, "without an acquire of what that warp has released"), "gemm/expand_sm90.cuh",
        "< units_per_flag<Config>()" => "< units_per_flag<Config>() - 1";
        // The second half of a tile's rows is expanded from the codes of the first.
        wrong_half_expanded: Report(EXPANDED, "was not written"), "gemm/expand_sm90.cuh",
        "part % 2);" => "0);";
    }
    "gemm_fp8_sm90", "256, 128,", "GemmFp8Sm90_256x128Promoted" {
        // Partial accumulators are added, and their stage is released, while MMAs are still in flight.
        promoted_without_wait: Report(FP8, "an accumulator is read while a wgmma on it is in flight"), "gemm/tma_mainloop.cuh",
        "      wgmma_wait<0>();\n      if (apart && m == 0" => "      if (apart && m == 0";
    }
    "gemm_fp8_sm90", "128, 256,", "GemmFp8Sm90_128x256" {
        // Lanes of a quad write each other's bytes.
        bytes_of_other_lanes: Report(FP8_STORED, WRONG), "common/reduce.cuh",
        "even_lanes = odd ? other : mine, odd_lanes = odd ? mine : other;"
        => "even_lanes = odd ? mine : other, odd_lanes = odd ? other : mine;";
    }
    "attention_fp8_sm90", "max_free,", "" {
        // The output range of a row is taken from the tile's first row.
        range_of_the_tile: Report(RANGES, "is no result"), "attention/kernel_sm90.cuh",
        "const bool valid = row < out.rows;" => "const bool valid = row - tile_row % at.rows < out.rows;";
        // Only one lane of a quad counts the values that are out of range.
        saturated_uncounted: Report(CLIPPED, "values are counted as out of range"), "attention/kernel_sm90.cuh",
        "    count_saturated<8>(p.saturated, v);\n" => "    if (lane() % 4 == 0) count_saturated<8>(p.saturated, v);\n";
    }
    "gemm_bf16_sm80", "128, 128,", "GemmBf16Sm80_128x128" {
        // Fragments are loaded from a stage before its copies have arrived.
        missing_cp_async_wait: Report(LONG, "while an asynchronous operation writes it"), "gemm/mma_tile.cuh",
        "          cp_async_wait<kStages - 2>();\n          __syncthreads();  // the next stage"
        => "          __syncthreads();  // the next stage";
        // Warps overwrite sums of squares before other warps have read them.
        missing_syncthreads: Report(QKV, "without a barrier between them"), "gemm/epilogue_mma.cuh",
        "    __syncthreads();  // all warps have read the sums of squares\n" => "";
    }
    "expand", "", "GemmBf16Sm80_128x128" {
        // The codes of a byte are taken in the wrong order.
        nibbles_exchanged: Report(NVFP4, WRONG), "common/expand.cuh",
        "permute_bytes<0x4000>(codes, odd)" => "permute_bytes<0x0040>(codes, odd)";
        // The pre-pass takes the scale of the preceding block.
        scale_of_another_block: Report(NVFP4, WRONG), "entry/expand.cu",
        "block_scale_offset(row, col / 16," => "block_scale_offset(row, col / 32,";
        // The pre-pass stops one vector early.
        last_vector_not_expanded: Report(NVFP4, "was not written"), "entry/expand.cu",
        "    if (at < vectors) reinterpret_cast<uint4*>" => "    if (at + 1 < vectors) reinterpret_cast<uint4*>";
    }
    "norm_rows", "1024,", "" {
        // The norm puts even columns into the low nibble.
        stored_nibbles_exchanged: Report(NVFP4_NORM, "has the code"), "entry/norm_rows.cu",
        "pack_e2m1(v[2 * i] * block.inverse, v[2 * i + 1] * block.inverse) << 8 * i"
        => "pack_e2m1(v[2 * i + 1] * block.inverse, v[2 * i] * block.inverse) << 8 * i";
        // The norm quantizes a lane's half of a block without the other lane's half.
        largest_of_half_a_block: Report(NVFP4_NORM, "has the scale"), "entry/norm_rows.cu",
        "const QuantizedBlock block(max(mine, __shfl_xor_sync(0xffffffffu, mine, 1)), m.scale);"
        => "const QuantizedBlock block(mine, m.scale);";
    }
    "attention_bf16_sm80", "", "AttentionBf16Sm80_4warps" {
        // Attention stores a block scale in the place of the next lanes' row.
        scale_of_another_row: Report(NVFP4_ATTENTION, "has the scale"), "attention/store_output.cuh",
        "block_scale(out, row, first / 16 + block)" => "block_scale(out, row ^ 1, first / 16 + block)";
    }
    "gemm_fp8_sm89", "128, 128,", "GemmFp8Sm89_128x128" {
        // Gates are multiplied by the scales of the ups.
        scales_of_the_other_half: Report(FP8_STORED, WRONG), "gemm/epilogue_mma.cuh",
        "part.w[swiglu ? n % 2 : 0]" => "part.w[swiglu ? 1 - n % 2 : 0]";
        // Ada's tensor cores add up all of K.
        missing_promotion: Sums, "entry/gemm_fp8_sm89.cu",
        "/*promotes*/ true" => "/*promotes*/ false";
    }
    "selftest_sm120", "", "" {
        // A self-test takes the scales of B from the lanes of another selector.
        scales_of_other_lanes: Check((12, 0), "mma nvf4", "a[0][0] (lane 0, register 0, bits 0 to 3) alone: d[0][0] (lane 0, register 0) is 28, not"),
        "entry/selftest_sm120.cu", "mma_nvf4<kA, 1>" => "mma_nvf4<kA, 2>";
    }
    "selftest_sm89", "", "" {
        // A self-test has two registers of A in the wrong order.
        registers_exchanged: Check((8, 9), "mma e4m3", "a[8][0] (lane 0, register 1, bits 0 to 7) alone: d[8][0] (lane 0, register 2) is 0, not 0.5"),
        "selftest/fragments.cuh", "{first.x, first.y, first.z, first.w}" => "{first.x, first.z, first.y, first.w}";
    }
    "selftest", "", "" {
        // A conversion in a self-test loses the sign.
        negative_lost: Check((9, 0), "cvt e2m1", "-0e0 becomes 0x00, not 0x08"), "entry/selftest.cu",
        "pack_e2m1(v, -v)" => "pack_e2m1(v, v)";
    }
    "attention_fp8_sm89", "", "AttentionBf16Sm80_4warps" {
        // The first segment's key scale is used for the keys of all segments.
        scale_of_the_first_segment: Report(SCALED_KEYS, WRONG), "attention/kernel_mma.cuh",
        "p.q.scale * p.kv[segment].k.scale" => "p.q.scale * p.kv[0].k.scale";
        // A warp copies keys to a place that others still read.
        stage_overwritten_early: Report(SCALED_KEYS, "without a barrier between them"), "attention/kernel_mma.cuh",
        "    __syncthreads();  // all warps are done with this stage\n" => "";
        // Keys are loaded in the order of queries.
        keys_loaded_as_queries: Report(SCALED_KEYS, WRONG), "attention/kernel_mma.cuh",
        "ldmatrix_x4(k, k_at + swizzled<kQKRowBytes>(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));"
        => "ldmatrix_x4(k, k_at + swizzled<kQKRowBytes>(n * 16 + lane % 16, 2 * d + lane / 16));";
    }
    "gemm_nvfp4_sm120", "256, 128,", "GemmNvfp4Sm120_256x128" {
        // MMAs on a warp's lower rows take the scales of A that the other lanes supply. These belong to the upper rows.
        scales_of_other_rows: Report(W4A4, "has the scale"), "gemm/policies_sm120.cuh",
        "if (m == 1) with_a(std::integral_constant<int, 1>());" => "if (m == 1) with_a(std::integral_constant<int, 0>());";
        // One MMA in four takes the scales of B from the lanes of another selector.
        scales_of_other_columns: Report(W4A4, WRONG), "gemm/policies_sm120.cuh",
        "if (n % 4 == 2) mma_nvf4<kA, 2>" => "if (n % 4 == 2) mma_nvf4<kA, 1>";
        // The nibbles of only one operand are exchanged.
        nibbles_of_one_operand: Report(W4A4, WRONG), "gemm/policies_sm120.cuh",
        "const uint2 pair = scales.b[n / 8];"
        => "const uint2 pair = scales.b[n / 8];\n      b0 = (b0 & 0x0f0f0f0f) << 4 | (b0 >> 4 & 0x0f0f0f0f);";
        // SwiGLU puts even columns into the low nibble.
        swiglu_nibbles_exchanged: Report(W4A4, WRONG), "gemm/tma_epilogue.cuh",
        "pack_e2m1(v[2 * i] * quantized.inverse, v[2 * i + 1]" => "pack_e2m1(v[2 * i + 1] * quantized.inverse, v[2 * i]";
        // The upper half of a scale tile's rows is mistaken for the lower half.
        lower_half_of_scales: Report(W4A4, WRONG), "gemm/policies_sm120.cuh",
        "half * kScaleBytes + upper * 8 +" => "half * kScaleBytes + 0 * upper +";
        // The second step of a k-block takes the scales of the first.
        scales_of_the_first_step: Report(W4A4, WRONG), "gemm/policies_sm120.cuh",
        "const uint32_t at = stage + step * kScaleTileBytes;" => "const uint32_t at = stage + 0 * step;";
        // A lane loads the scales of another lane's column.
        scales_in_order_of_lanes: Report(W4A4, WRONG), "gemm/policies_sm120.cuh",
        "(lane() % 4 * 8 + lane() / 4) * 16;" => "lane() * 16;";
        // Coordinates of B count elements, two of which are one column of the map.
        coordinates_of_elements: Report(W4A4, WRONG), "gemm/tma_policies.cuh",
        "// Waits until k-block `k` can be loaded.\n    __device__ __forceinline__ void wait(uint32_t, bool) const {}\n\n    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const { load_from(k * Config::kMapCols,"
        => "__device__ __forceinline__ void wait(uint32_t, bool) const {}\n\n    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const { load_from(k * Config::kBlockK,";
        // Warps wait for the preceding phase.
        wrong_phase: Report(W4A4, "which was never written"), "gemm/tma_mainloop.cuh",
        "pipe.parity);\n    const uint32_t stage = pipe.a(pipe.stage);"
        => "pipe.parity ^ 1);\n    const uint32_t stage = pipe.a(pipe.stage);";
        // Warps do not wait for the copies of a stage.
        copies_not_awaited: Report(W4A4, "which was never written"), "gemm/tma_mainloop.cuh",
        "    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);\n    const uint32_t stage = pipe.a(pipe.stage);"
        => "    const uint32_t stage = pipe.a(pipe.stage);";
        // Fragments of A are loaded with the swizzle of longer rows.
        swizzle_of_longer_rows: Report(W4A4, WRONG), "gemm/tma_policies.cuh",
        "a_offset(swizzled<kRowBytes>(row + lane % 16, lane / 16)),"
        => "a_offset((row + lane % 16) * kRowBytes + swizzled_chunk<2 * kRowBytes>(lane % 4, lane / 16) * 16),";
    }
    "gemm_fp8_sm90", "128, 192, 128, 2, 4, MulticastB, 0,", "GemmFp8Sm90_128x192" {
        // The LoRA branch is multiplied by the weight's scales.
        low_rank_scaled: Report(LOW_RANK_FP8, WRONG), "gemm/tma_epilogue.cuh",
        "return s.down_out.data ? 1.0f : part.w[half].alpha;" => "return part.w[half].alpha;";
    }
    "lora_down", "", "GemmBf16Sm90_128x192" {
        // Warps add up their LoRA sums before all warps have stored them.
        low_rank_without_barrier: Report(LOW_RANK, "without a barrier"), "entry/lora_down.cu",
        "    __syncthreads();\n    if (warp < half) {" => "    if (warp < half) {";
        // The lanes of a quad take each other's part of K.
        low_rank_other_columns: Report(LOW_RANK, WRONG), "entry/lora_down.cu",
        "b[n] = Bf16Rows::load(p.down, col0 + line + 8 * n, col + 8 * v);"
        => "b[n] = Bf16Rows::load(p.down, col0 + line + 8 * n, col % 8 + k + (quad ^ 1) * Rows::kElements + 8 * v);";
    }
    "gemm_bf16_sm120", "128, 128,", "GemmBf16Sm120_128x128" {
        // Weights are loaded while the preceding kernel may still expand them.
        preloads_what_is_expanded: Report(EXPANDED_BEFORE, "was not written"), "gemm/policies_sm120.cuh",
        "static constexpr bool kPreloads = false;" => "static constexpr bool kPreloads = true;";
    }
    "attention_wide_bf16_sm90", "512,", "" {
        // A warpgroup reads the other CTA's P before it has arrived.
        p_not_awaited: Report(WIDE, "reads shared memory"), "attention/wide_sm90.cuh",
        "    mbarrier_wait(smem.p_ring().full(group), p_parity);\n" => "";
        // P is sent while the other CTA may still read the preceding P.
        p_overwritten: Report(WIDE, "which a wgmma read"), "attention/wide_sm90.cuh",
        "    mbarrier_wait(smem.p_ring().empty(group), p_parity ^ 1);\n" => "";
        // Row maxima are read before the maxima of the other CTA's keys have arrived.
        wrong_phase_of_maxima: Report(WIDE, "was never written"), "attention/wide_sm90.cuh",
        "exchanges / kStatsBuffers % 2);" => "exchanges / kStatsBuffers % 2 ^ 1);";
        // The CTAs of a cluster use the row maxima of their own keys.
        maximum_of_one_half: Report(WIDE, WRONG), "attention/wide_sm90.cuh",
        "block_max[0] = fmaxf(block_max[0], peer_max[0]), block_max[1] = fmaxf(block_max[1], peer_max[1]);" => "";
        // The output is not rescaled when a row maximum has risen.
        missing_correction: Report(WIDE, WRONG), "attention/wide_sm90.cuh",
        "        tile.rescale_out(tile.correction);\n" => "";
        // A stage of keys is given back while the MMAs that read it are in flight.
        keys_released_early: Report(WIDE, "which a wgmma of CTA"), "attention/wide_sm90.cuh",
        "      stages.template retire<1, kGroupStages>();\n    }\n  }\n\n  // out += p v"
        => "      stages.template retire<1, 0>();\n    }\n  }\n\n  // out += p v";
    }
    "conv_bf16_sm90", "128, 256,", "ConvBf16Sm90_128x256" {
        // The window's lines are taken to be as long as the tile's.
        tap_not_shifted: Report(MOMENTS, WRONG), "conv/policies_sm90.cuh",
        "wgmma_descriptor(address, kLineBytes)" => "wgmma_descriptor(address)";
        // A window is released while the MMAs of its last k-block are in flight.
        window_released_early: Report(SHORTCUT, "which a wgmma of CTA"), "gemm/tma_mainloop.cuh",
        "    if (leaves) release_window();\n    reader.advance();"
        => "    reader.advance();\n    if (reader.begins_window() && k + 1 < work.k_end) release_stage<1>(pipe.window_ring().empty(pipe.windows.stage));";
        // Lines and columns of a phase are exchanged.
        phases_exchanged: Report(UPSAMPLED, WRONG), "conv/policies_sm90.cuh",
        "phase_row(at.part / 2 * kWidth + at.part % 2)" => "phase_row(at.part % 2 * kWidth + at.part / 2)";
        // Moments are written to a place that another warp still reads.
        moments_share_a_place: Report(MOMENTS, "without a barrier between them"), "conv/policies_sm90.cuh",
        "(kWarpgroupWarps - 2 * half + warp() % half)" => "(warp() % half)";
        // Pixels beyond the edge of the image count in the moments.
        moments_past_the_edge: Report(MOMENTS, WRONG), "conv/policies_sm90.cuh",
        "lane() / 4 >= columns()" => "false";
    }
    "conv_bf16_sm80", "128, 128,", "ConvBf16Sm80_128x128" {
        // Every phase of an upsampling convolution reads the rows of the first phase.
        rows_of_the_first_phase: Report(UPSAMPLED, "is not allocated"), "conv/kernel_mma.cuh",
        "top = conv_source(p.sampling, y, phase / 2, 0)," => "top = conv_source(p.sampling, y, 0, 0),";
        // Every phase uses the filters of the first phase.
        filters_of_the_first_phase: Report(UPSAMPLED, WRONG), "conv/kernel_mma.cuh",
        "row_of<const bf16>(p.w, 0) + phase * k_size;" => "row_of<const bf16>(p.w, 0);";
    }
    "conv_narrow", "", "" {
        // The image is padded before it is normalized.
        padded_before_the_norm: Report(NORM_CONV, WRONG), "entry/conv_narrow.cu",
        "exists ? acc[tile][n][e] : 0.0f;" => "acc[tile][n][e];";
        // The products of a tap are added one pixel away.
        tap_of_another_column: Report(NORM_CONV, WRONG), "entry/conv_narrow.cu",
        "[col + tap % 3];" => "[col + 2 - tap % 3];";
        // Warps store the products of their next row while others read the products they replace.
        products_overwritten_early: Report(NORM_CONV, "without a barrier"), "entry/conv_narrow.cu",
        "    __syncthreads();  // the next step overwrites rows that were read here\n" => "";
        // Pixels beyond the left edge are read from the end of the row above.
        columns_not_padded: Report(CONV_IN, "is not allocated"), "entry/conv_narrow.cu",
        "1u << row | 8u << col : 64u;" => "1u << row : 64u;";
    }
    "conv_bf16_sm90", "256, 96,", "ConvBf16Sm90_256x96" {
        // Every k-block of a 96-channel image is taken to be half empty.
        half_of_every_block: Report(HALF_BLOCKS, WRONG), "conv/policies_sm90.cuh",
        "k < image.half_blocks && block % 2 == 1" => "k < image.half_blocks";
    }
    "attention_wide_bf16_sm90", "384,", "" {
        // The wait for the values of a smaller head expects as many bytes as its keys have.
        bytes_of_keys: Report(NARROWER, "2048 bytes are missing"), "attention/wide_sm90.cuh",
        "next_stage(Config::kVBytes," => "next_stage(kStageBytes,";
    }
    "pointwise", "", "" {
        // The weights of two overlapping tiles are exchanged.
        blended_backwards: Report(BLEND, WRONG), "entry/pointwise.cu",
        "const float weight = static_cast<float>(step) / static_cast<float>(p.steps);"
        => "const float weight = 1.0f - static_cast<float>(step) / static_cast<float>(p.steps);";
    }
};
