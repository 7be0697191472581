//! Bugs that tests plant in copies of kernel sources, to see that the emulator finds them.

// The build script reads this file from its path, from which Rust takes the folder of its modules.
#[path = "planted/image.rs"]
mod image;

/// A bug: a text that stands once in a source, and what it is replaced with.
#[derive(Clone, Copy, Debug)]
pub struct Planted {
    /// The name of the module that has the bug.
    pub name: &'static str,
    /// The kernel file that is compiled with it, without its extension.
    pub kernel_file: &'static str,
    /// How the row of `tiles.def` begins that the module keeps; it has no other entry point of a template.
    pub tile: &'static str,
    /// The source below `kernels/` that the text stands in.
    pub source: &'static str,
    /// What is replaced.
    pub find: &'static str,
    /// What it is replaced with.
    pub replace: &'static str,
}

/// All of them.
pub fn all() -> impl Iterator<Item = &'static Planted> + Clone {
    MODELS.iter().chain(image::BUGS)
}

/// Those of kernels that text encoders and transformers run.
const MODELS: &[Planted] = &[
    // A consumer gives a stage back while the MMAs of its k-block are in flight.
    Planted {
        name: "stage_released_early",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/mainloop_sm90.cuh",
        find: "    if (k > work.k_begin) pipe.release(pipe.previous());\n  }\n  wgmma_wait<0>();\n  pipe.release(pipe.previous());",
        replace: "    pipe.release(pipe.stage);\n  }\n  wgmma_wait<0>();",
    },
    // The producer does not wait until a stage is free.
    Planted {
        name: "missing_empty_wait",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/mainloop_sm90.cuh",
        find: "        mbarrier_wait(pipe.empty(pipe.stage), pipe.parity ^ 1);\n        load_b(k);",
        replace: "        load_b(k);",
    },
    // Consumers do not wait for the copies of a stage.
    Planted {
        name: "missing_full_wait",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/mainloop_sm90.cuh",
        find: "named_barrier_sync(kHandOverBarrier<Config>);\n    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);\n",
        replace: "named_barrier_sync(kHandOverBarrier<Config>);\n",
    },
    // A stage is given back to the CTA's own producer alone, and not to the peer that multicasts into it.
    Planted {
        name: "missing_remote_arrive",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/pipeline_sm90.cuh",
        find: "if (threadIdx.x % kWarpgroupThreads < kCtas) mbarrier_arrive_remote(empty, threadIdx.x % kWarpgroupThreads);",
        replace: "if (threadIdx.x % kWarpgroupThreads == 0) mbarrier_arrive(empty);",
    },
    // The epilogue reads accumulators of MMAs in flight.
    Planted {
        name: "missing_wgmma_wait",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/mainloop_sm90.cuh",
        find: "  wgmma_wait<0>();\n  pipe.release(pipe.previous());",
        replace: "  pipe.release(pipe.previous());",
    },
    // Results are staged without the swizzle that the tensor map of the output has.
    Planted {
        name: "wrong_swizzle",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/policies_sm90.cuh",
        find: "swizzled<kCols * sizeof(Element)>(lane % 16, lane / 16);",
        replace: "lane % 16 * (kCols * sizeof(Element)) + lane / 16 * 16;",
    },
    // TMA stores results that it need not see yet.
    Planted {
        name: "missing_proxy_fence",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/epilogue_sm90.cuh",
        find: "      fence_proxy_async();\n",
        replace: "",
    },
    // The second box of B overlaps the first.
    Planted {
        name: "overlapping_boxes",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 160,",
        source: "gemm/policies_sm90.cuh",
        find: "tma_load_2d(to + Config::kBBytes / 2, second.map,",
        replace: "tma_load_2d(to + Config::kBBytes / 4, second.map,",
    },
    // A stage is expected to receive more bytes than its boxes have.
    Planted {
        name: "wrong_byte_count",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/mainloop_sm90.cuh",
        find: "mbarrier_arrive_expect_tx(full, LoaderA::kTmaBytes + LoaderB::kTmaBytes);",
        replace: "mbarrier_arrive_expect_tx(full, LoaderA::kTmaBytes + LoaderB::kTmaBytes + 16);",
    },
    // One warpgroup hands over at another barrier than the one at which the other waits.
    Planted {
        name: "wrong_barrier_id",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 160,",
        source: "gemm/mainloop_sm90.cuh",
        find: "k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier<Config>);",
        replace: "k + 1 == work.k_end) named_barrier_arrive(kHandOverBarrier<Config> + 1);",
    },
    // A Stream-K worker publishes its partials before all of its lanes have stored theirs, so that stale ones are added.
    Planted {
        name: "partials_published_early",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/stream_k.cuh",
        find: "    Owner::sync_stores();\n    if",
        replace: "    if",
    },
    // The ranges of Stream-K workers begin one k-block late.
    Planted {
        name: "stream_k_off_by_one",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/stream_k.cuh",
        find: "min(worker, schedule.remainder)",
        replace: "min(worker + 1, schedule.remainder)",
    },
    // TMA loads expanded weights that it need not see yet.
    Planted {
        name: "expanded_without_fence",
        kernel_file: "gemm_mixed_sm90",
        tile: "KL_GEMM_MIXED_SM90(gemm_mixed_sm90, 128, 192,",
        source: "gemm/expand_sm90.cuh",
        find: "      fence_proxy_async_global();\n",
        replace: "",
    },
    // The producer does not wait for all rows of a tile.
    Planted {
        name: "expanded_rows_not_awaited",
        kernel_file: "gemm_mixed_sm90",
        tile: "KL_GEMM_MIXED_SM90(gemm_mixed_sm90, 128, 192,",
        source: "gemm/expand_sm90.cuh",
        find: "< units_per_flag<Config>()",
        replace: "< units_per_flag<Config>() - 1",
    },
    // The second half of a tile's rows is expanded from the codes of the first.
    Planted {
        name: "wrong_half_expanded",
        kernel_file: "gemm_mixed_sm90",
        tile: "KL_GEMM_MIXED_SM90(gemm_mixed_sm90, 128, 192,",
        source: "gemm/expand_sm90.cuh",
        find: "part % 2);",
        replace: "0);",
    },
    // Partial accumulators are added, and their stage is released, while MMAs are still in flight.
    Planted {
        name: "promoted_without_wait",
        kernel_file: "gemm_fp8_sm90",
        tile: "KL_GEMM_FP8_SM90(gemm_fp8_sm90, 256, 128,",
        source: "gemm/mainloop_sm90.cuh",
        find: "      wgmma_wait<0>();\n      if (apart && m == 0",
        replace: "      if (apart && m == 0",
    },
    // Lanes of a quad write each other's bytes.
    Planted {
        name: "bytes_of_other_lanes",
        kernel_file: "gemm_fp8_sm90",
        tile: "KL_GEMM_FP8_SM90(gemm_fp8_sm90, 128, 256,",
        source: "common/reduce.cuh",
        find: "even_lanes = odd ? other : mine, odd_lanes = odd ? mine : other;",
        replace: "even_lanes = odd ? mine : other, odd_lanes = odd ? other : mine;",
    },
    // The range of the output that a row belongs to is taken to be that of the tile's first row.
    Planted {
        name: "range_of_the_tile",
        kernel_file: "attention_sm90",
        tile: "KL_ATTENTION_SM90(attention_sm90, kl_attention_sm90_e4m3,",
        source: "attention_sm90.cu",
        find: "const bool valid = row < out.rows;",
        replace: "const bool valid = row - tile_row % at.rows < out.rows;",
    },
    // Only one lane of a quad counts the values that do not fit.
    Planted {
        name: "saturated_uncounted",
        kernel_file: "attention_sm90",
        tile: "KL_ATTENTION_SM90(attention_sm90, kl_attention_sm90_e4m3,",
        source: "attention_sm90.cu",
        find: "    count_saturated<8>(p.saturated, v);\n",
        replace: "    if (lane() % 4 == 0) count_saturated<8>(p.saturated, v);\n",
    },
    // Fragments are loaded from a stage whose copies may not have arrived.
    Planted {
        name: "missing_cp_async_wait",
        kernel_file: "gemm_mma",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "gemm/mma_tile.cuh",
        find: "          cp_async_wait<kStages - 2>();\n          __syncthreads();  // the next stage",
        replace: "          __syncthreads();  // the next stage",
    },
    // Warps overwrite sums of squares that others have yet to read.
    Planted {
        name: "missing_syncthreads",
        kernel_file: "gemm_mma",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "gemm/epilogue_mma.cuh",
        find: "    __syncthreads();  // all warps have read the sums of squares\n",
        replace: "",
    },
    // The codes of a byte are taken in the wrong order.
    Planted {
        name: "nibbles_exchanged",
        kernel_file: "expand",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "common/expand.cuh",
        find: "permute_bytes<0x4000>(codes, odd)",
        replace: "permute_bytes<0x0040>(codes, odd)",
    },
    // The pre-pass takes the scale of the block before.
    Planted {
        name: "scale_of_another_block",
        kernel_file: "expand",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "expand.cu",
        find: "block_scale_offset(row, col / 16,",
        replace: "block_scale_offset(row, col / 32,",
    },
    // The pre-pass stops one vector early.
    Planted {
        name: "last_vector_not_expanded",
        kernel_file: "expand",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "expand.cu",
        find: "    if (at < vectors) reinterpret_cast<uint4*>",
        replace: "    if (at + 1 < vectors) reinterpret_cast<uint4*>",
    },
    // The norm puts even columns into the low nibble.
    Planted {
        name: "stored_nibbles_exchanged",
        kernel_file: "norm_rows",
        tile: "KL_ROW_NORM(norm_rows, 1024,",
        source: "norm_rows.cu",
        find: "pack_e2m1(v[2 * i] * block.inverse, v[2 * i + 1] * block.inverse) << 8 * i",
        replace: "pack_e2m1(v[2 * i + 1] * block.inverse, v[2 * i] * block.inverse) << 8 * i",
    },
    // The norm quantises a lane's half of a block without the other lane's.
    Planted {
        name: "largest_of_half_a_block",
        kernel_file: "norm_rows",
        tile: "KL_ROW_NORM(norm_rows, 1024,",
        source: "norm_rows.cu",
        find: "const QuantisedBlock block(max(mine, __shfl_xor_sync(0xffffffffu, mine, 1)), m.scale);",
        replace: "const QuantisedBlock block(mine, m.scale);",
    },
    // Attention stores the scale of a block where that of the next lanes' row belongs.
    Planted {
        name: "scale_of_another_row",
        kernel_file: "attention_mma",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "attention/store_output.cuh",
        find: "block_scale(out, row, first / 16 + block)",
        replace: "block_scale(out, row ^ 1, first / 16 + block)",
    },
    // Gates are multiplied by the scales of ups.
    Planted {
        name: "scales_of_the_other_half",
        kernel_file: "gemm_fp8_sm89",
        tile: "KL_GEMM_FP8_MMA(gemm_fp8_sm89, 128, 128,",
        source: "gemm/epilogue_mma.cuh",
        find: "part.w[swiglu ? n % 2 : 0]",
        replace: "part.w[swiglu ? 1 - n % 2 : 0]",
    },
    // A self-test has the scales of B from the lanes of another selector.
    Planted {
        name: "scales_of_other_lanes",
        kernel_file: "selftest_sm120",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "selftest_sm120.cu",
        find: "mma_nvf4<kA, 1>",
        replace: "mma_nvf4<kA, 2>",
    },
    // A self-test has two registers of A in the wrong order.
    Planted {
        name: "registers_exchanged",
        kernel_file: "selftest_sm89",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "selftest/fragments.cuh",
        find: "{first.x, first.y, first.z, first.w}",
        replace: "{first.x, first.z, first.y, first.w}",
    },
    // A self-test has a conversion lose the sign.
    Planted {
        name: "negative_lost",
        kernel_file: "selftest",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "selftest.cu",
        find: "pack_e2m1(v, -v)",
        replace: "pack_e2m1(v, v)",
    },
    // Keys of all segments are taken to have the scale of the first.
    Planted {
        name: "scale_of_the_first_segment",
        kernel_file: "attention_fp8_sm89",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "attention/kernel_mma.cuh",
        find: "p.q.scale * p.kv[segment].k.scale",
        replace: "p.q.scale * p.kv[0].k.scale",
    },
    // A warp copies keys to where others still read.
    Planted {
        name: "stage_overwritten_early",
        kernel_file: "attention_fp8_sm89",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "attention/kernel_mma.cuh",
        find: "    __syncthreads();  // all warps are done with this stage\n",
        replace: "",
    },
    // Keys are loaded in the order in which queries are.
    Planted {
        name: "keys_loaded_as_queries",
        kernel_file: "attention_fp8_sm89",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "attention/kernel_mma.cuh",
        find: "ldmatrix_x4(k, k_at + swizzled<kQKRowBytes>(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));",
        replace: "ldmatrix_x4(k, k_at + swizzled<kQKRowBytes>(n * 16 + lane % 16, 2 * d + lane / 16));",
    },
    // Tensor cores of Ada add up all of K.
    Planted {
        name: "missing_promotion",
        kernel_file: "gemm_fp8_sm89",
        tile: "KL_GEMM_FP8_MMA(gemm_fp8_sm89, 128, 128,",
        source: "gemm_fp8_sm89.cu",
        find: "/*promotes*/ true",
        replace: "/*promotes*/ false",
    },
    // MMAs on the lower rows of a warp have the scales of A that the other lanes supply, which are those of the upper ones.
    Planted {
        name: "scales_of_other_rows",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "if (m == 1) with_a(std::integral_constant<int, 1>());",
        replace: "if (m == 1) with_a(std::integral_constant<int, 0>());",
    },
    // One MMA in four has the scales of B from the lanes of another selector.
    Planted {
        name: "scales_of_other_columns",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "if (n % 4 == 2) mma_nvf4<kA, 2>",
        replace: "if (n % 4 == 2) mma_nvf4<kA, 1>",
    },
    // The nibbles of one operand are exchanged, those of the other are not.
    Planted {
        name: "nibbles_of_one_operand",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "const uint2 pair = scales.b[n / 8];",
        replace: "const uint2 pair = scales.b[n / 8];\n      b0 = (b0 & 0x0f0f0f0f) << 4 | (b0 >> 4 & 0x0f0f0f0f);",
    },
    // SwiGLU puts even columns into the low nibble.
    Planted {
        name: "swiglu_nibbles_exchanged",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/epilogue_sm90.cuh",
        find: "pack_e2m1(v[2 * i] * quantised.inverse, v[2 * i + 1]",
        replace: "pack_e2m1(v[2 * i + 1] * quantised.inverse, v[2 * i]",
    },
    // The upper half of a scale tile's rows is taken for the lower.
    Planted {
        name: "lower_half_of_scales",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "half * kScaleBytes + upper * 8 +",
        replace: "half * kScaleBytes + 0 * upper +",
    },
    // The second step of a k-block has the scales of the first.
    Planted {
        name: "scales_of_the_first_step",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "const uint32_t at = stage + step * kScaleTileBytes;",
        replace: "const uint32_t at = stage + 0 * step;",
    },
    // A lane loads the scales of another lane's column.
    Planted {
        name: "scales_in_order_of_lanes",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "(lane() % 4 * 8 + lane() / 4) * 16;",
        replace: "lane() * 16;",
    },
    // Coordinates of B count elements, of which two are one column of the map.
    Planted {
        name: "coordinates_of_elements",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm90.cuh",
        find: "// Waits until k-block `k` can be loaded.\n    __device__ __forceinline__ void wait(uint32_t, bool) const {}\n\n    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const { load_from(k * Config::kMapCols,",
        replace: "__device__ __forceinline__ void wait(uint32_t, bool) const {}\n\n    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const { load_from(k * Config::kBlockK,",
    },
    // Warps wait for the phase before.
    Planted {
        name: "wrong_phase",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/mainloop_sm90.cuh",
        find: "pipe.parity);\n    const uint32_t stage = pipe.a(pipe.stage);",
        replace: "pipe.parity ^ 1);\n    const uint32_t stage = pipe.a(pipe.stage);",
    },
    // Warps do not wait for the copies of a stage.
    Planted {
        name: "copies_not_awaited",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/mainloop_sm90.cuh",
        find: "    mbarrier_wait(pipe.full(pipe.stage), pipe.parity);\n    const uint32_t stage = pipe.a(pipe.stage);",
        replace: "    const uint32_t stage = pipe.a(pipe.stage);",
    },
    // Fragments of A are loaded with the swizzle of longer rows.
    Planted {
        name: "swizzle_of_longer_rows",
        kernel_file: "gemm_nvfp4_sm120",
        tile: "KL_GEMM_NVFP4_SM120(gemm_nvfp4_sm120, 256, 128,",
        source: "gemm/policies_sm90.cuh",
        find: "a_offset(swizzled<kRowBytes>(row + lane % 16, lane / 16)),",
        replace: "a_offset((row + lane % 16) * kRowBytes + swizzled_chunk<2 * kRowBytes>(lane % 4, lane / 16) * 16),",
    },
    // A block of a term of low rank is given back before all warps have read it.
    Planted {
        name: "low_rank_released_early",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 192,",
        source: "gemm/epilogue_sm90.cuh",
        find: "if constexpr (!Config::Mma::kPerWarp) warpgroup_sync(kWarpgroupBarrier + thread / kWarpgroupThreads - 1);\n      pipe.release(pipe.stage);\n    }\n  }\n\n  // Calls f",
        replace: "pipe.release(pipe.stage);\n    }\n  }\n\n  // Calls f",
    },
    // The term of low rank is multiplied by the scales of the weight.
    Planted {
        name: "low_rank_scaled",
        kernel_file: "gemm_fp8_sm90",
        tile: "KL_GEMM_FP8_SM90(gemm_fp8_sm90, 128, 192, 128, 2, 4, MulticastB, 0,",
        source: "gemm/epilogue_sm90.cuh",
        find: "return s.reduced.data ? 1.0f : part.w[half].alpha;",
        replace: "return part.w[half].alpha;",
    },
    // With split-K a warpgroup keeps the stages that are of no use to it.
    Planted {
        name: "low_rank_not_skipped",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 160,",
        source: "gemm/mainloop_sm90.cuh",
        find: "if constexpr (Config::kLowRank) skip_low_rank(p.stream[at.stream], pipe, group);",
        replace: "",
    },
    // Or gives them back before all its warps have seen them filled.
    Planted {
        name: "low_rank_skipped_apart",
        kernel_file: "gemm_bf16_sm90",
        tile: "KL_GEMM_SM90(gemm_bf16_sm90, 128, 160,",
        source: "gemm/mainloop_sm90.cuh",
        find: "    warpgroup_sync(kWarpgroupBarrier + group);\n    pipe.release(pipe.stage);",
        replace: "    pipe.release(pipe.stage);",
    },
    // Warps add up their sums of a product of low rank before all have stored them.
    Planted {
        name: "low_rank_without_barrier",
        kernel_file: "low_rank",
        tile: "",
        source: "low_rank.cu",
        find: "    __syncthreads();\n    if (warp < half) {",
        replace: "    if (warp < half) {",
    },
    // The lanes of a quad take each other's part of K for their own.
    Planted {
        name: "low_rank_other_columns",
        kernel_file: "low_rank",
        tile: "",
        source: "low_rank.cu",
        find: "b[n] = Bf16Rows::load(p.down, col0 + line + 8 * n, col + 8 * v);",
        replace: "b[n] = Bf16Rows::load(p.down, col0 + line + 8 * n, col % 8 + k + (quad ^ 1) * Rows::kElements + 8 * v);",
    },
    // Weights are loaded while the kernel before may still expand them.
    Planted {
        name: "preloads_what_is_expanded",
        kernel_file: "gemm_bf16_sm120",
        tile: "KL_GEMM_BF16_SM120(gemm_bf16_sm120, 128, 128,",
        source: "gemm/policies_sm120.cuh",
        find: "static constexpr bool kPreloads = false;",
        replace: "static constexpr bool kPreloads = true;",
    },
];
