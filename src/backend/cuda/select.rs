//! Chooses a GEMM's tile and schedule from nothing but its shape and the number of SMs. Everything here is pure: tests need no GPU.
//!
//! A plan is a [`Tile`] and a Stream-K [`Schedule`]. The cost of every candidate is estimated from what was measured (bench/LOG.md),
//! and the cheapest is taken.

mod schedule;
mod tile;

pub use schedule::{Schedule, persistent_stream_k, stream_k};
pub use tile::{ClusterMode, GemmOperands, Tile};

use super::abi;

/// The unit of costs: percent of the time that the Hopper tile of 256x192 in bf16 takes for one multiply-accumulate, on one SM.
const PERCENT: u64 = 100;

/// Cost of reducing a split-K tile through distributed shared memory, as the extra K that would take as long.
const SPLIT_K_REDUCTION_K: u64 = 100;

/// Cost of starting a cluster that is not persistent while its SM waits, as the extra K that would take as long.
const CLUSTER_START_K: u64 = 600;

/// Cost of adding one worker's partials to a tile of a persistent kernel, as the extra K that would take as long.
const PERSISTENT_FIXUP_K: u64 = 1500;

/// Cost of adding one worker's partials to a tile of the portable kernel: as long as this K at this relative cost, for a tile with that
/// many more rows.
const MMA_FIXUP_K: u64 = 64;
const MMA_FIXUP_COST: u64 = 420;
const MMA_FIXUP_ROWS: u32 = 128;

/// Rows of A that clusters walk before they go on to the next columns. This many stay in the L2 cache while all columns pass.
const GROUP_ROWS: u32 = 3072;

/// A GEMM's output: its M, and the N of each part. A part is a range of columns with its own epilogue. N counts weight rows.
#[derive(Clone, Debug)]
pub struct GemmShape {
    /// Rows.
    pub m: u32,
    /// Weight rows of each part.
    pub parts: Vec<u32>,
}

impl GemmShape {
    fn tiles(&self, tile: Tile) -> u32 {
        let col_tiles = self.parts.iter().map(|n| n.div_ceil(tile.block_n)).sum();
        let (row_tiles, col_tiles) = tile.tile_counts(self.m, col_tiles);
        row_tiles * col_tiles
    }
}

/// How a launch computes a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmPlan {
    /// The tile.
    pub tile: Tile,
    /// How tiles are distributed over the SMs.
    pub schedule: Schedule,
}

/// Row tiles that clusters walk before they go on to the next columns (`GROUP_M` in other libraries), for an output of this many row and
/// column tiles.
pub fn group_m(tile: Tile, row_tiles: u32, col_tiles: u32, sms: u32) -> u32 {
    /// With this many row tiles, the area that all clusters compute at the same time is about square.
    const SQUARE: u32 = 6;
    /// The fewest waves for which the order of tiles matters.
    const MANY_WAVES: u32 = 4;
    let slots = tile.slots(sms);
    let rows_per_wave = slots / col_tiles.max(1);
    if rows_per_wave >= SQUARE && slots.is_multiple_of(col_tiles) {
        return rows_per_wave;
    }
    if rows_per_wave >= SQUARE && row_tiles > MANY_WAVES * rows_per_wave {
        return 1;
    }
    let Tile { block_m, cluster, .. } = tile;
    let unit_rows = block_m * if cluster == Some(ClusterMode::MulticastB) { abi::KL_SM90_CLUSTER } else { 1 };
    // The groups have nearly equal sizes.
    let groups = row_tiles.div_ceil(GROUP_ROWS / unit_rows).max(1);
    row_tiles.div_ceil(groups).max(1)
}

/// The GEMMs of one launch. Stream-K only schedules GEMMs of the same K: it shares k-blocks, of which all tiles must have the same number.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemm<'a> {
    /// The output of each GEMM.
    pub shapes: &'a [GemmShape],
    /// The largest K.
    pub k: u32,
    /// Whether all GEMMs have this K.
    pub same_k: bool,
}

impl GroupedGemm<'_> {
    fn tiles(&self, tile: Tile) -> u32 {
        self.shapes.iter().map(|shape| shape.tiles(tile)).sum()
    }

    /// The candidate plans with a tile: data-parallel, and Stream-K if possible.
    fn plans(&self, tile: Tile, sms: u32) -> [GemmPlan; 2] {
        let (tiles, k_blocks, slots) = (self.tiles(tile), self.k.div_ceil(tile.block_k), tile.slots(sms));
        let data_parallel = Schedule::data_parallel(tiles);
        let shared = match (self.same_k && !tile.is_split_k(), tile.is_persistent()) {
            (false, _) => data_parallel,
            (true, true) => persistent_stream_k(tiles, k_blocks, slots),
            (true, false) => stream_k(tiles, k_blocks, slots),
        };
        // With the portable kernel Stream-K was never slower.
        [if tile.is_persistent() { data_parallel } else { shared }, shared].map(|schedule| GemmPlan { tile, schedule })
    }

    /// The cost of a plan, to compare it with other plans.
    pub fn cost(&self, GemmPlan { tile, schedule: Schedule { full_tiles, workers } }: GemmPlan, sms: u32) -> u64 {
        let Tile { block_m, block_n, ctas_per_sm, relative_cost, .. } = tile;
        let (tiles, slots) = (self.tiles(tile), tile.slots(sms));
        let area = u64::from(block_m * block_n);
        let full_tile = u64::from(self.k) * area * relative_cost * u64::from(ctas_per_sm);
        if workers == 0 {
            // A wave that is partly empty takes as long as a full one.
            let waves = u64::from(tiles.div_ceil(slots));
            if !tile.is_split_k() {
                return waves * full_tile;
            }
            // The clusters of all waves but the first start while their SM waits.
            let (reduction, start) = (SPLIT_K_REDUCTION_K * area * PERCENT, CLUSTER_START_K * area * PERCENT);
            return waves * (full_tile / 2 + reduction) + waves.saturating_sub(1) * start;
        }
        // Partials are added up once for every part of a tile except the last.
        let shared = tiles - full_tiles;
        let parts = u64::from(workers / shared.max(1));
        let fixup = if tile.is_persistent() {
            parts.saturating_sub(1).max(1) * PERSISTENT_FIXUP_K * area * PERCENT
        } else {
            parts * u64::from(MMA_FIXUP_ROWS + block_m) * MMA_FIXUP_K * MMA_FIXUP_COST * u64::from(block_n)
        };
        u64::from(full_tiles) * full_tile / u64::from(slots) + u64::from(shared) * full_tile / u64::from(workers) + fixup
    }

    /// The plan that keeps the SMs busy for the least time, among the tiles that `fits` accepts. `None` if it accepts none.
    pub fn plan(&self, sms: u32, fits: impl Fn(Tile) -> bool) -> Option<GemmPlan> {
        // Among plans with the same cost the first is taken, which has the smaller persistent tile or the larger portable one.
        let (persistent, mma): (Vec<_>, Vec<_>) =
            Tile::ALL.iter().copied().filter(|&tile| fits(tile)).partition(|tile| tile.is_persistent());
        let plans = persistent.into_iter().rev().chain(mma).flat_map(|tile| self.plans(tile, sms));
        plans.min_by_key(|&plan| self.cost(plan, sms))
    }

    /// The plan with a given tile, with Stream-K wherever possible: tests force tiles to check both.
    pub fn forced(&self, tile: Tile, sms: u32) -> GemmPlan {
        self.plans(tile, sms)[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::arch::Arch;
    use crate::backend::cuda::launch::Kernel::{self, *};

    fn shape(m: u32, parts: &[u32]) -> GemmShape {
        GemmShape { m, parts: parts.to_vec() }
    }

    fn plan(shapes: &[GemmShape], k: u32, sms: u32, fits: impl Fn(Tile) -> bool) -> GemmPlan {
        GroupedGemm { shapes, k, same_k: true }
            .plan(sms, |tile| tile.operands == GemmOperands::Bf16 && tile.arch != Arch::Sm120 && fits(tile))
            .unwrap()
    }

    fn tile_of(shapes: &[GemmShape], k: u32, fits: impl Fn(Tile) -> bool) -> Kernel {
        plan(shapes, k, 132, fits).tile.kernel
    }

    #[test]
    fn portable_tiles_fit_the_shape() {
        let portable = |shapes: &[GemmShape], k| tile_of(shapes, k, |tile| !tile.is_persistent());
        // A single block of klein 4B at 1024x1024 and its output projection; both streams of a double block.
        assert_eq!(portable(&[shape(4608, &[27648])], 3072), GemmBf16Sm80_256x128);
        assert_eq!(portable(&[shape(4608, &[3072])], 12288), GemmBf16Sm80_256x128);
        assert_eq!(portable(&[shape(512, &[9216]), shape(4096, &[9216])], 3072), GemmBf16Sm80_256x128);
        // The text encoder's 512 rows give few tiles, but a large K to share.
        assert_eq!(portable(&[shape(512, &[2560])], 9728), GemmBf16Sm80_256x128);
        // The last layer is so narrow that the fix-up would take longer than the main loop.
        assert_eq!(portable(&[shape(4608, &[128])], 3072), GemmBf16Sm80_64x128);
        // Modulations have a handful of rows.
        assert_eq!(portable(&[shape(5, &[18432])], 3072), GemmBf16Sm80_64x128);
        assert_eq!(portable(&[], 0), GemmBf16Sm80_256x128);
        // A GPU without enough shared memory for the large tile.
        let small = |tile: Tile| !tile.is_persistent() && tile.kernel != GemmBf16Sm80_256x128;
        assert_eq!(plan(&[shape(4608, &[27648])], 3072, 128, small).tile.kernel, GemmBf16Sm80_128x128);
        assert_eq!(GroupedGemm { shapes: &[shape(4608, &[27648])], k: 3072, same_k: true }.plan(0, |_| false), None);
    }

    /// The plans that the sweep of bench/LOG.md found to be the best, or as good as the best.
    #[test]
    fn hopper_takes_the_plan_that_was_measured_to_be_fastest() {
        let all = |m, n, k| plan(&[shape(m, &[n])], k, 132, |_| true);
        let tile_and_data_parallel = |plan: GemmPlan| (plan.tile.kernel, plan.schedule.workers == 0);
        for (m, n, k) in [
            (4608, 27648, 3072),
            (4096, 9216, 3072),
            (4096, 18432, 3072),
            (4096, 3072, 9216),
            (4096, 3072, 3072),
            (4608, 4096, 16384),
            (16896, 3072, 12288),
        ] {
            assert_eq!(tile_and_data_parallel(all(m, n, k)), (GemmBf16Sm90_256x192, true), "{m}x{n}x{k}");
        }
        assert_eq!(tile_and_data_parallel(all(4608, 36864, 4096)), (GemmBf16Sm90_256x192, false));
        assert_eq!(tile_and_data_parallel(all(4608, 3072, 12288)), (GemmBf16Sm90_192x192, true));
        // The text encoder.
        assert_eq!(tile_and_data_parallel(all(512, 6144, 2560)), (GemmBf16Sm90_128x192, true));
        assert_eq!(tile_and_data_parallel(all(512, 19456, 2560)), (GemmBf16Sm90_128x208, true));
        for k in [4096, 9728] {
            assert_eq!(tile_and_data_parallel(all(512, 2560, k)), (GemmBf16Sm90_128x160, true));
        }
        // SwiGLU stores half of a tile's columns, which for 208 is not a multiple of sixteen.
        let swiglu = |tile: Tile| tile.kernel != GemmBf16Sm90_128x208;
        assert_eq!(tile_and_data_parallel(plan(&[shape(512, &[19456])], 2560, 132, swiglu)), (GemmBf16Sm90_128x192, false));
        // The qk-norm needs whole heads of 128 columns.
        let whole_heads = |tile: Tile| tile.block_n.is_multiple_of(128);
        assert_eq!(tile_of(&[shape(4608, &[3072, 3072, 3072, 18432])], 3072, whole_heads), GemmBf16Sm90_128x256);
        // A handful of rows would leave most of a large tile empty.
        assert_eq!(all(5, 18432, 3072).tile.kernel, GemmBf16Sm90_128x160);
        // The last layer was not in the sweep.
        assert_eq!(all(4608, 128, 3072).tile.kernel, GemmBf16Sm90_128x160);
    }

    /// A small image gets small tiles, so that every SM has work.
    #[test]
    fn convolutions_of_small_images_take_small_tiles() {
        let tile = |side: u32, channels: u32| {
            let shapes = [shape(side * side, &[channels])];
            let gemm = GroupedGemm { shapes: &shapes, k: 9 * channels, same_k: true };
            gemm.plan(132, |tile| tile.operands == GemmOperands::Conv3x3).unwrap().tile.kernel
        };
        assert_eq!([32, 64].map(|side| tile(side, 512)), [ConvBf16Sm90_128x128; 2]);
        assert_eq!([128, 256, 512].map(|side| tile(side, 512)), [ConvBf16Sm90_128x256; 3]);
        assert_eq!([tile(512, 256), tile(1024, 128)], [ConvBf16Sm90_128x256, ConvBf16Sm90_256x128]);
        assert_eq!([tile(512, 192), tile(1024, 96)], [ConvBf16Sm90_256x192, ConvBf16Sm90_256x96]);
    }

    #[test]
    fn groups_of_row_tiles_have_nearly_the_same_size() {
        // 204 row tiles are 17 groups of 12; 19 are not a group of twelve and one of seven.
        let group = |kernel, row_tiles, col_tiles| group_m(Tile::of(kernel).unwrap(), row_tiles, col_tiles, 132);
        assert_eq!(group(GemmBf16Sm90_256x192, 204, 72), 12);
        assert_eq!(group(GemmBf16Sm90_256x192, 19, 72), 10);
        assert_eq!(group(GemmBf16Sm90_128x256, 18, 108), 9);
        // One wave covers all columns: six rows of tiles are all clusters, eight and a bit are not.
        assert_eq!(group(GemmBf16Sm90_256x192, 18, 11), 6);
        assert_eq!(group(GemmBf16Sm90_256x192, 204, 8), 1);
        assert_eq!(group(GemmBf16Sm90_192x192, 24, 8), 12);
        assert_eq!(group(GemmBf16Sm90_192x192, 1, 0), 1);
        assert_eq!(group(GemmBf16Sm90_192x192, 0, 0), 1);
    }
}
