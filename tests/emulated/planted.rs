//! Bugs planted in copies of the kernels: each has to be found, and named by what it does.

use crate::available;
use crate::driver::Gpu;
use crate::runner::Runner;
use common::ops::cases;
use kiln::internals::backend::cuda::{Choice, Tile};
use kiln_emulator::planted;

/// Seeds that are tried until a bug is found: some show only in a certain order of events.
const SEEDS: u64 = 20;
/// Seeds with which nothing may be found where there is no bug. All cases run with other seeds besides.
const SOUND_SEEDS: u64 = 8;

/// How a planted bug is found.
struct Expected {
    /// The module that has it.
    bug: &'static str,
    choice: Choice,
    case: &'static str,
    /// A part of what the emulator reports.
    message: &'static str,
}

/// Ten k-blocks, more than any pipeline has stages, which two Stream-K workers or the CTAs of a cluster divide evenly.
const LONG: &str = "linear_gate_residual 66x64, rows of 584 gate true bias true bf16 whole";
/// Nine k-blocks, which two workers cannot divide evenly.
const REMAINDER: &str = "linear_gate_residual 130x168, rows of 520 gate true bias true bf16 whole";
/// Several groups of k-blocks that are expanded together, and columns of two tiles.
const EXPANDED: &str = "linear w8a16 130 rows of 528 to 168, e4m3, bias false bf16 whole";
/// Weights that a kernel before the GEMM expands.
const EXPANDED_BEFORE: &str = "linear w8a16 67 rows of 208 to 168, e4m3 unscaled, bias false bf16 whole";
/// Several tiles of block scales.
const NVFP4: &str = "linear w4a16 130 rows of 576 to 168, nvfp4, bias false bf16 whole";
/// Results of NVFP4.
const NVFP4_NORM: &str = "layer_norm_modulate 5 and 3 rows of 1024 into nvfp4 and clipped nvfp4 bf16 whole";
const NVFP4_ATTENTION: &str = "attention into nvfp4, 2:1 heads of 128 bf16 whole";
/// Both operands of e4m3, with more k-blocks than the pipeline has stages; and with a result of e4m3.
const FP8: &str = "linear_gate_residual w8a8 130 rows of 528 to 168, e4m3 by rows, gate true bias false bf16 whole";
const FP8_STORED: &str = "linear_swiglu w8a8 67 rows of 528 to 208, e4m3 and e4m3 by rows into e4m3 bf16 whole";
/// A tile of attention whose rows are in two ranges of the output.
const RANGES: &str = "attention of e4m3 into e4m3 with two scales, 2:1 heads of 128 bf16 whole";
/// Values beyond the range of e4m3.
const CLIPPED: &str = "attention of e4m3 into plain and clipped e4m3, 2:1 heads of 128 bf16 whole";
/// Keys with two scales, of more than one block.
const SCALED_KEYS: &str =
    "attention of e4m3 by 0.37 and 0.0071 or 0.013 130 queries [129, 0, 7, 40] keys 2:1 heads of 128 bf16 whole";
/// Several KV blocks of a wide head, and row maxima that rise.
const WIDE: &str = "attention huge 5 queries [600] keys 1:1 heads of 512 bf16 whole";
/// Every epilogue that normalises heads.
const QKV: &str = "qkv 113x64 3:3 heads of 128 interleaved mlp some(129) bf16 whole";

/// Both operands of NVFP4, and the result; the rows of ups begin within a tile of scales.
const W4A4: &str = "linear_swiglu w4a4 67 rows of 640 to 192, nvfp4 in one matrix into nvfp4 bf16 whole";

/// Terms of low rank that take several pipeline stages, beside a residual; and with scales.
const LOW_RANK: &str = "linear_gate_residual bf16 67 rows of 640 to 264, rank 400, gate true bias true bf16 whole";
const LOW_RANK_FP8: &str = "linear w8a8 130 rows of 640 to 168, rank 48, bias true bf16 whole";

/// A convolution with moments, of tiles at every edge.
const MOMENTS: &str = "conv 33x35 8 to 256 same residual true stats some(4) bf16 whole";
/// Three windows: that of the taps, and two of another image.
const SHORTCUT: &str = "conv 19x31 16 to 128 same shortcut of 72 stats some(32) bf16 whole";
/// A convolution in phases, of whole tiles of channels.
const UPSAMPLED: &str = "conv 7x3 40 to 128 up residual false stats some(16) bf16 whole";
/// Several strips, of several steps each, and a ragged end on both sides.
const NORM_CONV: &str = "norm_conv 47x35 128 to 3 groups 32 stats given true bf16 whole";
/// Two k-blocks of channels for each tap, of which the second is half empty.
const HALF_BLOCKS: &str = "conv 17x9 96 to 96 same residual false stats some(32) bf16 whole";
/// Several KV blocks of a head whose values are fewer bytes than keys.
const NARROWER: &str = "attention huge 5 queries [600] keys 1:1 heads of 384 bf16 whole";
const BLEND: &str = "blend 11x27 at the left, 3 channels bf16 whole";
/// More than one tile of pixels.
const CONV_IN: &str = "conv 33x17 3 to 128 same residual false stats some(32) bf16 whole";

/// A bug that cases do not show: their results may be as far off as tensor cores are. The test of FP8 sums finds it.
pub const FOUND_BY_ITS_SUMS: &str = "missing_promotion";

const EXPECTED: &[Expected] = &[
    Expected {
        bug: "stage_released_early",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "which a wgmma of CTA",
    },
    Expected {
        bug: "low_rank_released_early",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LOW_RANK,
        message: "without a barrier between them",
    },
    Expected { bug: "low_rank_scaled", choice: Choice::Tile(Tile::Fp8_128x192), case: LOW_RANK_FP8, message: "relative error" },
    Expected {
        bug: "low_rank_not_skipped",
        choice: Choice::Tile(Tile::Sm90_128x160),
        case: LOW_RANK,
        message: "arrivals and 0 bytes are missing",
    },
    Expected {
        bug: "low_rank_skipped_apart",
        choice: Choice::Tile(Tile::Sm90_128x160),
        case: LOW_RANK,
        message: "arrivals and 0 bytes are missing",
    },
    Expected {
        bug: "low_rank_without_barrier",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LOW_RANK,
        message: "without a barrier",
    },
    Expected {
        bug: "low_rank_other_columns",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LOW_RANK,
        message: "relative error",
    },
    Expected {
        bug: "missing_empty_wait",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "has had all 1 arrivals of phase",
    },
    Expected {
        bug: "missing_full_wait",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: " reads shared memory +0x",
    },
    Expected {
        bug: "missing_remote_arrive",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "2 of 4 arrivals and 0 bytes are missing",
    },
    Expected {
        bug: "missing_wgmma_wait",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "while a wgmma on it is in flight",
    },
    Expected { bug: "wrong_swizzle", choice: Choice::Tile(Tile::Sm90_128x192), case: LONG, message: "relative error" },
    Expected {
        bug: "missing_proxy_fence",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "without fence_proxy_async",
    },
    Expected {
        bug: "overlapping_boxes",
        choice: Choice::Tile(Tile::Sm90_128x160),
        case: LONG,
        message: "which a TMA load of CTA",
    },
    Expected {
        bug: "wrong_byte_count",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "0 of 1 arrivals and 16 bytes are missing",
    },
    Expected {
        bug: "wrong_barrier_id",
        choice: Choice::Tile(Tile::Sm90_128x160),
        case: LONG,
        message: "barrier 3, where 128 of 256 threads have arrived",
    },
    Expected {
        bug: "partials_published_early",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: LONG,
        message: "without an acquire of what that warp has released",
    },
    Expected {
        bug: "stream_k_off_by_one",
        choice: Choice::Tile(Tile::Sm90_128x192),
        case: REMAINDER,
        message: "global memory that is not allocated",
    },
    Expected {
        bug: "expanded_without_fence",
        choice: Choice::Tile(Tile::Mixed128x192),
        case: EXPANDED,
        message: "without fence_proxy_async_global",
    },
    Expected {
        bug: "expanded_rows_not_awaited",
        choice: Choice::Tile(Tile::Mixed128x192),
        case: EXPANDED,
        message: "without an acquire of what that warp has released",
    },
    Expected { bug: "wrong_half_expanded", choice: Choice::Tile(Tile::Mixed128x192), case: EXPANDED, message: "was not written" },
    Expected {
        bug: "promoted_without_wait",
        choice: Choice::Tile(Tile::Fp8Promoted256x128),
        case: FP8,
        message: "an accumulator is read while a wgmma on it is in flight",
    },
    Expected {
        bug: "bytes_of_other_lanes",
        choice: Choice::Tile(Tile::Fp8_128x256),
        case: FP8_STORED,
        message: "relative error",
    },
    Expected { bug: "range_of_the_tile", choice: Choice::Best, case: RANGES, message: "is no result" },
    Expected { bug: "saturated_uncounted", choice: Choice::Best, case: CLIPPED, message: "values are counted as out of range" },
    Expected { bug: "tap_not_shifted", choice: Choice::Tile(Tile::Conv128x256), case: MOMENTS, message: "relative error" },
    Expected {
        bug: "window_released_early",
        choice: Choice::Tile(Tile::Conv128x256),
        case: SHORTCUT,
        message: "which a wgmma of CTA",
    },
    Expected { bug: "phases_exchanged", choice: Choice::Tile(Tile::Conv128x256), case: UPSAMPLED, message: "relative error" },
    Expected {
        bug: "moments_share_a_place",
        choice: Choice::Tile(Tile::Conv128x256),
        case: MOMENTS,
        message: "without a barrier between them",
    },
    Expected { bug: "moments_past_the_edge", choice: Choice::Tile(Tile::Conv128x256), case: MOMENTS, message: "relative error" },
    Expected { bug: "p_not_awaited", choice: Choice::Best, case: WIDE, message: "reads shared memory" },
    Expected { bug: "p_overwritten", choice: Choice::Best, case: WIDE, message: "which a wgmma read" },
    Expected { bug: "wrong_phase_of_maxima", choice: Choice::Best, case: WIDE, message: "was never written" },
    Expected { bug: "maximum_of_one_half", choice: Choice::Best, case: WIDE, message: "relative error" },
    Expected { bug: "missing_correction", choice: Choice::Best, case: WIDE, message: "relative error" },
    Expected { bug: "keys_released_early", choice: Choice::Best, case: WIDE, message: "which a wgmma of CTA" },
    Expected {
        bug: "missing_cp_async_wait",
        choice: Choice::Tile(Tile::Mma128x128),
        case: LONG,
        message: "while an asynchronous operation writes it",
    },
    Expected {
        bug: "missing_syncthreads",
        choice: Choice::Tile(Tile::Mma128x128),
        case: QKV,
        message: "without a barrier between them",
    },
    Expected { bug: "nibbles_exchanged", choice: Choice::Tile(Tile::Mma128x128), case: NVFP4, message: "relative error" },
    Expected { bug: "scale_of_another_block", choice: Choice::Tile(Tile::Mma128x128), case: NVFP4, message: "relative error" },
    Expected { bug: "last_vector_not_expanded", choice: Choice::Tile(Tile::Mma128x128), case: NVFP4, message: "was not written" },
    Expected { bug: "stored_nibbles_exchanged", choice: Choice::Best, case: NVFP4_NORM, message: "has the code" },
    Expected { bug: "largest_of_half_a_block", choice: Choice::Best, case: NVFP4_NORM, message: "has the scale" },
    Expected {
        bug: "scale_of_another_row",
        choice: Choice::Tile(Tile::Mma128x128),
        case: NVFP4_ATTENTION,
        message: "has the scale",
    },
    Expected {
        bug: "scales_of_the_other_half",
        choice: Choice::Tile(Tile::Fp8Mma128x128),
        case: FP8_STORED,
        message: "relative error",
    },
    Expected {
        bug: "scale_of_the_first_segment",
        choice: Choice::Tile(Tile::Mma64x128),
        case: SCALED_KEYS,
        message: "relative error",
    },
    Expected {
        bug: "stage_overwritten_early",
        choice: Choice::Tile(Tile::Mma64x128),
        case: SCALED_KEYS,
        message: "without a barrier between them",
    },
    Expected {
        bug: "keys_loaded_as_queries",
        choice: Choice::Tile(Tile::Mma64x128),
        case: SCALED_KEYS,
        message: "relative error",
    },
    Expected {
        bug: "scales_of_other_rows",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "has the scale",
    },
    Expected {
        bug: "scales_of_other_columns",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "nibbles_of_one_operand",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "swiglu_nibbles_exchanged",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "lower_half_of_scales",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "scales_of_the_first_step",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "scales_in_order_of_lanes",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "coordinates_of_elements",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "wrong_phase",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "which was never written",
    },
    Expected {
        bug: "copies_not_awaited",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "which was never written",
    },
    Expected {
        bug: "swizzle_of_longer_rows",
        choice: Choice::Tile(Tile::Nvfp4Sm120_256x128),
        case: W4A4,
        message: "relative error",
    },
    Expected {
        bug: "rows_of_the_first_phase",
        choice: Choice::Tile(Tile::Mma128x128),
        case: UPSAMPLED,
        message: "is not allocated",
    },
    Expected {
        bug: "filters_of_the_first_phase",
        choice: Choice::Tile(Tile::Mma128x128),
        case: UPSAMPLED,
        message: "relative error",
    },
    Expected { bug: "padded_before_the_norm", choice: Choice::Best, case: NORM_CONV, message: "relative error" },
    Expected { bug: "tap_of_another_column", choice: Choice::Best, case: NORM_CONV, message: "relative error" },
    Expected { bug: "products_overwritten_early", choice: Choice::Best, case: NORM_CONV, message: "without a barrier" },
    Expected { bug: "half_of_every_block", choice: Choice::Tile(Tile::Conv256x96), case: HALF_BLOCKS, message: "relative error" },
    Expected { bug: "bytes_of_keys", choice: Choice::Best, case: NARROWER, message: "2048 bytes are missing" },
    Expected { bug: "blended_backwards", choice: Choice::Best, case: BLEND, message: "relative error" },
    Expected { bug: "columns_not_padded", choice: Choice::Best, case: CONV_IN, message: "is not allocated" },
    Expected {
        bug: "preloads_what_is_expanded",
        choice: Choice::Tile(Tile::Bf16Sm120_128x128),
        case: EXPANDED_BEFORE,
        message: "was not written",
    },
];

impl Expected {
    /// The GPU that the tile is for.
    fn gpu(&self) -> Gpu {
        if matches!(self.choice, Choice::Tile(tile) if tile.is_sm120()) { Gpu::NATIVE_BLACKWELL } else { Gpu::HOPPER }
    }

    /// The seeds for this case without its bug. What a wrong result shows does not depend on the order of events.
    fn sound_seeds(&self) -> u64 {
        if self.message == "relative error" { 1 } else { SOUND_SEEDS }
    }

    /// The first report of the emulator on the case with one of so many seeds, if there is one.
    fn run(&self, bug: Option<&'static str>, seeds: u64) -> Option<(u64, String)> {
        let case = cases::all().into_iter().find(|case| case.name == self.case);
        let case = case.unwrap_or_else(|| panic!("no case is called {:?}", self.case));
        let mut runner = Runner::with_bug(self.gpu(), bug);
        (0..seeds).find_map(|seed| Some((seed, runner.run(self.choice, &case, seed, true).err()?)))
    }
}

#[test]
fn every_planted_bug_is_found_and_named() {
    if !available() {
        return;
    }
    let mut wrong = Vec::new();
    // Without a bug nothing is found.
    let mut sound: Vec<&Expected> = Vec::new();
    for expected in EXPECTED {
        match sound.iter_mut().find(|other| (other.choice, other.case) == (expected.choice, expected.case)) {
            Some(other) if other.sound_seeds() < expected.sound_seeds() => *other = expected,
            Some(_) => {}
            None => sound.push(expected),
        }
    }
    for expected in sound {
        let found = expected.run(None, expected.sound_seeds());
        wrong.extend(found.map(|(seed, message)| format!("no bug, with seed {seed}: {message}")));
    }
    // Those of the self-test's own kernels are found by its checks.
    let of_kernels = planted::all().filter(|bug| !bug.kernel_file.starts_with("selftest"));
    for bug in of_kernels.clone().filter(|bug| bug.name != FOUND_BY_ITS_SUMS) {
        let expected = EXPECTED.iter().find(|expected| expected.bug == bug.name);
        let expected = expected.unwrap_or_else(|| panic!("it is not said how {} is found", bug.name));
        match expected.run(Some(bug.name), SEEDS) {
            Some((seed, message)) if message.contains(expected.message) => println!("{} with seed {seed}: {message}", bug.name),
            Some((seed, message)) => wrong.push(format!("{} is not named, with seed {seed}: {message}", bug.name)),
            None => wrong.push(format!("{} is not found", bug.name)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(EXPECTED.len() + 1, of_kernels.count());
}
