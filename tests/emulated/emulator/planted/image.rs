//! The bugs in kernels of the VAE: convolutions, attention with a wide head, the blending of tiles.

use super::Planted;

pub(super) const BUGS: &[Planted] = &[
    // A warpgroup reads the other CTA's P before it has arrived.
    Planted {
        name: "p_not_awaited",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 512,",
        source: "attention_wide_sm90.cu",
        find: "    mbarrier_wait(smem.p_ring().full(group), p_parity);\n",
        replace: "",
    },
    // P is sent while the other CTA may still read the P before it.
    Planted {
        name: "p_overwritten",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 512,",
        source: "attention_wide_sm90.cu",
        find: "    mbarrier_wait(smem.p_ring().empty(group), p_parity ^ 1);\n",
        replace: "",
    },
    // Row maxima are read before those of the other CTA's keys have arrived.
    Planted {
        name: "wrong_phase_of_maxima",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 512,",
        source: "attention_wide_sm90.cu",
        find: "exchanges / kStatsBuffers % 2);",
        replace: "exchanges / kStatsBuffers % 2 ^ 1);",
    },
    // The CTAs of a cluster use the row maxima of their own keys.
    Planted {
        name: "maximum_of_one_half",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 512,",
        source: "attention_wide_sm90.cu",
        find: "block_max[0] = fmaxf(block_max[0], peer_max[0]), block_max[1] = fmaxf(block_max[1], peer_max[1]);",
        replace: "",
    },
    // The output is not rescaled when a row maximum has risen.
    Planted {
        name: "missing_correction",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 512,",
        source: "attention_wide_sm90.cu",
        find: "        tile.rescale_out(tile.correction);\n",
        replace: "",
    },
    // A stage of keys is given back while the MMAs that read it are in flight.
    Planted {
        name: "keys_released_early",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 512,",
        source: "attention_wide_sm90.cu",
        find: "      stages.template retire<1, kGroupStages>();\n    }\n  }\n\n  // out += p v",
        replace: "      stages.template retire<1, 0>();\n    }\n  }\n\n  // out += p v",
    },
    // Lines of the window are taken to be as long as those of the tile.
    Planted {
        name: "tap_not_shifted",
        kernel_file: "conv_sm90",
        tile: "KL_CONV_SM90(conv_sm90, 128, 256,",
        source: "gemm/policies_conv_sm90.cuh",
        find: "wgmma_descriptor(address, kLineBytes)",
        replace: "wgmma_descriptor(address)",
    },
    // A window is released with the MMAs of its last k-block in flight.
    Planted {
        name: "window_released_early",
        kernel_file: "conv_sm90",
        tile: "KL_CONV_SM90(conv_sm90, 128, 256,",
        source: "gemm/mainloop_sm90.cuh",
        find: "    if (leaves) release_window();\n    reader.advance();",
        replace: "    reader.advance();\n    if (reader.begins_window() && k + 1 < work.k_end) release_stage<1>(pipe.window_ring().empty(pipe.windows.stage));",
    },
    // Lines and columns of a phase are exchanged.
    Planted {
        name: "phases_exchanged",
        kernel_file: "conv_sm90",
        tile: "KL_CONV_SM90(conv_sm90, 128, 256,",
        source: "gemm/policies_conv_sm90.cuh",
        find: "phase_row(at.part / 2 * kWidth + at.part % 2)",
        replace: "phase_row(at.part % 2 * kWidth + at.part / 2)",
    },
    // Moments are written where another warp still reads.
    Planted {
        name: "moments_share_a_place",
        kernel_file: "conv_sm90",
        tile: "KL_CONV_SM90(conv_sm90, 128, 256,",
        source: "gemm/policies_conv_sm90.cuh",
        find: "(kWarpgroupWarps - 2 * half + warp() % half)",
        replace: "(warp() % half)",
    },
    // Pixels beyond the edge of the image count in its moments.
    Planted {
        name: "moments_past_the_edge",
        kernel_file: "conv_sm90",
        tile: "KL_CONV_SM90(conv_sm90, 128, 256,",
        source: "gemm/policies_conv_sm90.cuh",
        find: "lane() / 4 >= columns()",
        replace: "false",
    },
    // Every phase of an upsampling convolution reads the rows of the first.
    Planted {
        name: "rows_of_the_first_phase",
        kernel_file: "conv_mma",
        tile: "KL_CONV_MMA(conv_mma, 128, 128,",
        source: "conv_mma.cu",
        find: "top = conv_source(p.sampling, y, phase / 2, 0),",
        replace: "top = conv_source(p.sampling, y, 0, 0),",
    },
    // Every phase has the filters of the first.
    Planted {
        name: "filters_of_the_first_phase",
        kernel_file: "conv_mma",
        tile: "KL_CONV_MMA(conv_mma, 128, 128,",
        source: "conv_mma.cu",
        find: "row_of<const bf16>(p.w, 0) + phase * k_size;",
        replace: "row_of<const bf16>(p.w, 0);",
    },
    // The image is padded before it is normalised.
    Planted {
        name: "padded_before_the_norm",
        kernel_file: "conv_narrow",
        tile: "KL_CONV_MMA(conv_mma, 128, 128,",
        source: "conv_narrow.cu",
        find: "exists ? acc[tile][n][e] : 0.0f;",
        replace: "acc[tile][n][e];",
    },
    // The products of a tap are added one pixel away.
    Planted {
        name: "tap_of_another_column",
        kernel_file: "conv_narrow",
        tile: "KL_CONV_MMA(conv_mma, 128, 128,",
        source: "conv_narrow.cu",
        find: "[col + tap % 3];",
        replace: "[col + 2 - tap % 3];",
    },
    // Warps store the products of their next row while others read what it replaces.
    Planted {
        name: "products_overwritten_early",
        kernel_file: "conv_narrow",
        tile: "KL_CONV_MMA(conv_mma, 128, 128,",
        source: "conv_narrow.cu",
        find: "    __syncthreads();  // the next step overwrites rows that were read here\n",
        replace: "",
    },
    // Pixels beyond the left edge are those at the end of the row above.
    Planted {
        name: "columns_not_padded",
        kernel_file: "conv_narrow",
        tile: "KL_CONV_MMA(conv_mma, 128, 128,",
        source: "conv_narrow.cu",
        find: "1u << row | 8u << col : 64u;",
        replace: "1u << row : 64u;",
    },
    // Every k-block of an image of 96 channels is taken to be half empty.
    Planted {
        name: "half_of_every_block",
        kernel_file: "conv_sm90",
        tile: "KL_CONV_SM90(conv_sm90, 256, 96,",
        source: "gemm/policies_conv_sm90.cuh",
        find: "k < image.half_blocks && block % 2 == 1",
        replace: "k < image.half_blocks",
    },
    // Values of a smaller head are awaited with the bytes of keys.
    Planted {
        name: "bytes_of_keys",
        kernel_file: "attention_wide_sm90",
        tile: "KL_ATTENTION_WIDE_SM90(attention_wide_sm90, 384,",
        source: "attention_wide_sm90.cu",
        find: "next_stage(Config::kVBytes,",
        replace: "next_stage(kStageBytes,",
    },
    // The weights of two tiles are exchanged where they overlap.
    Planted {
        name: "blended_backwards",
        kernel_file: "pointwise",
        tile: "KL_GEMM_MMA(gemm_mma, 128, 128,",
        source: "pointwise.cu",
        find: "const float weight = static_cast<float>(step) / static_cast<float>(p.steps);",
        replace: "const float weight = 1.0f - static_cast<float>(step) / static_cast<float>(p.steps);",
    },
];
