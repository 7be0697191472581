//! How matrix products are cut into tiles, and tiles dealt out to multiprocessors. Nothing here touches a GPU.

use super::abi;
use super::launch::Kernel;

/// What a block computes at a time, rows by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// 64x128: for a handful of rows.
    Rows64,
    /// 128x128: for GPUs with little shared memory.
    Rows128,
    /// 256x128: for other GPUs that are not Hopper.
    Rows256,
    /// For large products on Hopper.
    Hopper256x192,
    /// Where it fits a product better.
    Hopper192x192,
    /// With whole heads of 128 columns.
    Hopper128x256,
    /// For products of a few hundred rows, whichever of two wastes less.
    Hopper128x208,
    /// The other one.
    Hopper128x192,
    /// For narrow ones of those and for a handful of rows: two blocks have halves of a tile's inner dimension.
    Hopper128x160,
}

/// What the blocks of a cluster have in common, and copy for each other by halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Common {
    /// Rows of the activations: the cluster is two tiles wide.
    Rows,
    /// Rows of the weight: the cluster is two tiles high.
    Cols,
    /// The whole tile, of which each has half of the inner dimension. Such clusters do not stay: each has one tile.
    Tile,
}

/// What there is to know about a tile.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// How much of the inner dimension is a round.
    pub inner: u32,
    /// Blocks of it that a multiprocessor runs at once.
    pub resident: u32,
    /// On Hopper, where blocks stay for the whole product, in clusters.
    pub cluster: Option<Common>,
    /// The kernel that computes it.
    pub kernel: Kernel,
    /// Time for as much work, as measured (bench/README.md): small tiles move each operand more often.
    slowness: u64,
}

/// Most blocks that a multiprocessor runs at once, of any tile.
pub(super) const RESIDENT: u32 = 3;

/// Most warps of a block that leave sums for others.
pub(super) const WARPS: u32 = 12;

/// Rows of x that clusters walk before they go on to the next columns: as many as stay in the cache while all columns pass.
const GROUP_ROWS: u32 = 3072;

impl Tile {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Rows64,
        Self::Rows128,
        Self::Rows256,
        Self::Hopper256x192,
        Self::Hopper192x192,
        Self::Hopper128x256,
        Self::Hopper128x208,
        Self::Hopper128x192,
        Self::Hopper128x160,
    ];

    /// What there is to know about it.
    pub const fn spec(self) -> Spec {
        const fn portable(rows: u32, inner: u32, resident: u32, kernel: Kernel, slowness: u64) -> Spec {
            Spec { rows, cols: abi::KL_MMA_COLS, inner, resident, cluster: None, kernel, slowness }
        }
        const fn hopper(rows: u32, cols: u32, common: Common, kernel: Kernel, slowness: u64) -> Spec {
            Spec { rows, cols, inner: abi::KL_SM90_BLOCK_K, resident: 1, cluster: Some(common), kernel, slowness }
        }
        match self {
            Self::Rows64 => portable(64, abi::KL_MMA_BLOCK_K_64, RESIDENT, Kernel::GemmMma64, 480),
            Self::Rows128 => portable(128, abi::KL_MMA_BLOCK_K_128, 2, Kernel::GemmMma128, 480),
            Self::Rows256 => portable(256, abi::KL_MMA_BLOCK_K_256, 1, Kernel::GemmMma256, 420),
            Self::Hopper256x192 => hopper(256, 192, Common::Rows, Kernel::GemmSm90Large, 100),
            Self::Hopper192x192 => hopper(192, 192, Common::Rows, Kernel::GemmSm90Square, 102),
            Self::Hopper128x256 => hopper(128, 256, Common::Cols, Kernel::GemmSm90Wide, 102),
            Self::Hopper128x208 => hopper(128, 208, Common::Cols, Kernel::GemmSm90Broad, 103),
            Self::Hopper128x192 => hopper(128, 192, Common::Cols, Kernel::GemmSm90Medium, 106),
            Self::Hopper128x160 => hopper(128, 160, Common::Tile, Kernel::GemmSm90Narrow, 108),
        }
    }

    /// Rows of it that a warpgroup has.
    pub const fn group_rows(self) -> u32 {
        if matches!(self, Self::Hopper256x192) { 128 } else { 64 }
    }

    /// Whether it is for Hopper alone.
    pub const fn is_hopper(self) -> bool {
        self.spec().cluster.is_some()
    }

    /// Whether two blocks have halves of its inner dimension.
    pub const fn is_halved(self) -> bool {
        matches!(self.spec().cluster, Some(Common::Tile))
    }

    /// Tiles of a product, down and across, counted as they are dealt out: by blocks, or by clusters.
    pub fn count(self, rows: u32, col_tiles: u32) -> (u32, u32) {
        let Spec { rows: high, cluster, .. } = self.spec();
        let down = rows.div_ceil(high);
        match cluster {
            None | Some(Common::Tile) => (down, col_tiles),
            Some(Common::Rows) => (down, col_tiles.div_ceil(abi::KL_SM90_CLUSTER)),
            Some(Common::Cols) => (down.div_ceil(abi::KL_SM90_CLUSTER), col_tiles),
        }
    }

    /// Blocks, or clusters of them, that run at once.
    pub fn slots(self, multiprocessors: u32) -> u32 {
        let Spec { resident, cluster, .. } = self.spec();
        let slots = if cluster.is_some() { multiprocessors / abi::KL_SM90_CLUSTER } else { resident * multiprocessors };
        slots.max(1)
    }
}

/// A product: its rows, and the columns of each of its parts, as rows of the weight.
#[derive(Clone, Debug)]
pub struct Size {
    /// Rows.
    pub rows: u32,
    /// Weight rows of each part.
    pub parts: Vec<u32>,
}

impl Size {
    fn cut(&self, tile: Tile) -> (u32, u32) {
        tile.count(self.rows, self.parts.iter().map(|cols| cols.div_ceil(tile.spec().cols)).sum())
    }
}

/// How tiles are dealt out: so many to blocks of their own, the rest shared by workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Tiles that are computed as they are.
    pub whole: u32,
    /// Who shares the others.
    pub workers: u32,
}

impl Deal {
    /// Clusters to launch, where those that have no share stay for as many of the `tiles` as come to them.
    pub fn clusters(self, tiles: u32, slots: u32) -> u32 {
        if self.workers > 0 { self.workers } else { tiles.min(slots) }
    }
}

/// Deals `tiles` of `rounds` each to as many blocks as run at once. Rather than leave a last round of blocks half empty, the last two
/// are shared.
pub fn deal(tiles: u32, rounds: u32, slots: u32) -> Deal {
    /// Below this a worker's share is not worth starting it.
    const LEAST_ROUNDS: u64 = 4;
    let full = tiles / slots.max(1);
    let shared = tiles - full.saturating_sub(1) * slots;
    let workers = (u64::from(shared) * u64::from(rounds) / LEAST_ROUNDS).min(u64::from(slots)) as u32;
    let even = tiles.is_multiple_of(slots.max(1));
    if even || (full == 0 && workers <= tiles) {
        Deal { whole: tiles, workers: 0 }
    } else {
        Deal { whole: tiles - shared, workers }
    }
}

/// The same for blocks that stay: all of them or none share, and where there are fewer tiles than clusters each is cut into equal parts.
pub fn deal_to_clusters(tiles: u32, rounds: u32, slots: u32) -> Deal {
    let none = Deal { whole: tiles, workers: 0 };
    if tiles == 0 {
        return none;
    }
    if tiles < slots {
        let parts = (slots / tiles).min(rounds);
        return if parts > 1 { Deal { whole: 0, workers: tiles * parts } } else { none };
    }
    let dealt = deal(tiles, rounds, slots);
    if dealt.workers == slots { dealt } else { none }
}

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Which tiles.
    pub tile: Tile,
    /// Who computes them.
    pub deal: Deal,
}

/// Row tiles that a cluster walks before it goes on to the next columns, of so many rows and columns of tiles.
pub fn group(tile: Tile, row_tiles: u32, col_tiles: u32, multiprocessors: u32) -> u32 {
    /// With this many rows of tiles what all clusters have at once is about as high as it is wide.
    const SQUARE: u32 = 6;
    /// How often all clusters have to take tiles for their order to count.
    const OFTEN: u32 = 4;
    let slots = tile.slots(multiprocessors);
    let at_once = slots / col_tiles.max(1);
    if at_once >= SQUARE && slots.is_multiple_of(col_tiles) {
        return at_once;
    }
    if at_once >= SQUARE && row_tiles > OFTEN * at_once {
        return 1;
    }
    // Groups of nearly the same size.
    let high = tile.spec().rows * if tile.spec().cluster == Some(Common::Cols) { abi::KL_SM90_CLUSTER } else { 1 };
    let groups = row_tiles.div_ceil(GROUP_ROWS / high).max(1);
    row_tiles.div_ceil(groups).max(1)
}

/// Products in one launch, over inner dimensions of at most `inner`. Unless they are `alike`, nothing is shared: shares are counted in
/// rounds, of which all tiles must have as many.
#[derive(Clone, Copy, Debug)]
pub struct Products<'a> {
    /// Their sizes.
    pub sizes: &'a [Size],
    /// The longest inner dimension.
    pub inner: u32,
    /// Whether all have it.
    pub alike: bool,
}

impl Products<'_> {
    fn tiles(&self, tile: Tile) -> u32 {
        self.sizes.iter().map(|size| size.cut(tile)).map(|(down, across)| down * across).sum()
    }

    /// With that tile: as it is, and shared if that is possible.
    fn plans(&self, tile: Tile, multiprocessors: u32) -> [Plan; 2] {
        let (tiles, rounds, slots) = (self.tiles(tile), self.inner.div_ceil(tile.spec().inner), tile.slots(multiprocessors));
        let none = Deal { whole: tiles, workers: 0 };
        let shared = match (self.alike && !tile.is_halved(), tile.is_hopper()) {
            (false, _) => none,
            (true, true) => deal_to_clusters(tiles, rounds, slots),
            (true, false) => deal(tiles, rounds, slots),
        };
        // On other GPUs what can be shared is: it was never slower.
        [if tile.is_hopper() { none } else { shared }, shared].map(|deal| Plan { tile, deal })
    }

    fn cost(&self, Plan { tile, deal: Deal { whole, workers } }: Plan, multiprocessors: u32) -> u64 {
        let Spec { rows, cols, resident, slowness, .. } = tile.spec();
        let (tiles, slots) = (self.tiles(tile), tile.slots(multiprocessors));
        let one = u64::from(self.inner) * u64::from(rows * cols) * slowness * u64::from(resident);
        if workers == 0 {
            // The last round of blocks takes as long as a full one.
            let turns = u64::from(tiles.div_ceil(slots));
            if !tile.is_halved() {
                return turns * one;
            }
            // Halves have to come together; and as they do not stay, all but the first start while the machine waits.
            let (together, start) = (100 * u64::from(rows * cols) * 100, 600 * u64::from(rows * cols) * 100);
            return turns * (one / 2 + together) + turns.saturating_sub(1) * start;
        }
        // Adding up what workers leave takes a time that was measured, and as often as there are parts of a tile.
        let left = tiles - whole;
        let parts = u64::from(workers / left.max(1));
        let adding = if tile.is_hopper() {
            parts.saturating_sub(1).max(1) * 1500 * u64::from(rows * cols) * 100
        } else {
            parts * u64::from(128 + rows) * 64 * 420 * u64::from(cols)
        };
        u64::from(whole) * one / u64::from(slots) + u64::from(left) * one / u64::from(workers) + adding
    }

    /// The plan that keeps a multiprocessor busy for the least time.
    pub fn plan(&self, multiprocessors: u32, can: impl Fn(Tile) -> bool) -> Plan {
        let candidates = Tile::ALL.into_iter().rev().filter(|&tile| can(tile));
        let plans = candidates.flat_map(|tile| self.plans(tile, multiprocessors));
        let portable = || self.plans(Tile::Rows128, multiprocessors)[0];
        plans.min_by_key(|&plan| self.cost(plan, multiprocessors)).unwrap_or_else(portable)
    }

    /// The plan with a tile that was asked for, shared wherever possible: who asks wants to see that it works.
    pub fn forced(&self, tile: Tile, multiprocessors: u32) -> Plan {
        self.plans(tile, multiprocessors)[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(rows: u32, parts: &[u32]) -> Size {
        Size { rows, parts: parts.to_vec() }
    }

    fn plan(sizes: &[Size], inner: u32, multiprocessors: u32, can: impl Fn(Tile) -> bool) -> Plan {
        Products { sizes, inner, alike: true }.plan(multiprocessors, can)
    }

    fn tile_of(products: &[Size], inner: u32, can: impl Fn(Tile) -> bool) -> Tile {
        plan(products, inner, 132, can).tile
    }

    #[test]
    fn tiles_fit_the_product() {
        let other = |products: &[Size], inner| tile_of(products, inner, |tile| !tile.is_hopper());
        // A single block of klein 4B at 1024x1024 and its output projection; both streams of a double block.
        assert_eq!(other(&[size(4608, &[27648])], 3072), Tile::Rows256);
        assert_eq!(other(&[size(4608, &[3072])], 12288), Tile::Rows256);
        assert_eq!(other(&[size(512, &[9216]), size(4096, &[9216])], 3072), Tile::Rows256);
        // The text encoder's 512 rows: few tiles, but a long inner dimension to share.
        assert_eq!(other(&[size(512, &[2560])], 9728), Tile::Rows256);
        // The last layer is so narrow that adding up would take longer than the product.
        assert_eq!(other(&[size(4608, &[128])], 3072), Tile::Rows64);
        // A handful of rows, as modulations have.
        assert_eq!(other(&[size(5, &[18432])], 3072), Tile::Rows64);
        assert_eq!(other(&[], 0), Tile::Rows256);
        // Without room for the large tile.
        let small = |tile: Tile| !tile.is_hopper() && tile != Tile::Rows256;
        assert_eq!(plan(&[size(4608, &[27648])], 3072, 128, small).tile, Tile::Rows128);
        assert_eq!(plan(&[size(4608, &[27648])], 3072, 0, |_| false).tile, Tile::Rows128);
    }

    /// What the sweep of bench/README.md found to be best, or as good as the best.
    #[test]
    fn hopper_takes_what_was_measured_to_be_fastest() {
        let all = |rows, cols, inner| plan(&[size(rows, &[cols])], inner, 132, |_| true);
        let whole = |plan: Plan| (plan.tile, plan.deal.workers == 0);
        for (rows, cols, inner) in [
            (4608, 27648, 3072),
            (4096, 9216, 3072),
            (4096, 18432, 3072),
            (4096, 3072, 9216),
            (4096, 3072, 3072),
            (4608, 4096, 16384),
            (16896, 3072, 12288),
        ] {
            assert_eq!(whole(all(rows, cols, inner)), (Tile::Hopper256x192, true), "{rows}x{cols}x{inner}");
        }
        assert_eq!(whole(all(4608, 36864, 4096)), (Tile::Hopper256x192, false));
        assert_eq!(whole(all(4608, 3072, 12288)), (Tile::Hopper192x192, true));
        // The text encoder.
        assert_eq!(whole(all(512, 6144, 2560)), (Tile::Hopper128x192, true));
        assert_eq!(whole(all(512, 19456, 2560)), (Tile::Hopper128x208, true));
        for inner in [4096, 9728] {
            assert_eq!(whole(all(512, 2560, inner)), (Tile::Hopper128x160, true));
        }
        let halvable = |tile: Tile| tile != Tile::Hopper128x208;
        assert_eq!(whole(plan(&[size(512, &[19456])], 2560, 132, halvable)), (Tile::Hopper128x192, false));
        // Heads need whole heads of columns; a handful of rows is no work for large tiles.
        let heads = |tile: Tile| tile.spec().cols.is_multiple_of(128);
        assert_eq!(tile_of(&[size(4608, &[3072, 3072, 3072, 18432])], 3072, heads), Tile::Hopper128x256);
        assert_eq!(all(5, 18432, 3072).tile, Tile::Hopper128x160);
        // The last layer was not in the sweep.
        assert_eq!(all(4608, 128, 3072).tile, Tile::Hopper128x160);
    }

    #[test]
    fn every_round_is_dealt_once() {
        // Even, no more than fits, too short to share: everyone has a tile.
        assert_eq!(deal(264, 48, 132), Deal { whole: 264, workers: 0 });
        assert_eq!(deal(40, 2, 132), Deal { whole: 40, workers: 0 });
        assert_eq!(deal(0, 48, 132), Deal { whole: 0, workers: 0 });
        // Three rounds of blocks and a quarter: two are whole.
        assert_eq!(deal(432, 48, 132), Deal { whole: 264, workers: 132 });
        assert_eq!(deal(40, 152, 132), Deal { whole: 0, workers: 132 });
        // At least four rounds each.
        assert_eq!(deal(40, 8, 132), Deal { whole: 0, workers: 80 });
        for dealing in [deal, deal_to_clusters] {
            for (tiles, rounds, slots) in
                [(1, 1, 1), (1, 96, 264), (7, 5, 3), (133, 48, 132), (10_000, 3, 132), (395, 7, 396), (0, 4, 66), (65, 2, 66)]
            {
                let Deal { whole, workers } = dealing(tiles, rounds, slots);
                assert!(workers <= slots && whole <= tiles && (workers > 0 || whole == tiles), "{tiles} {rounds} {slots}");
                // A share is never empty.
                assert!(workers == 0 || (tiles - whole) * rounds >= workers);
            }
        }
    }

    #[test]
    fn clusters_share_alike_or_not_at_all() {
        // Fewer tiles than clusters: each in as many equal parts.
        assert_eq!(deal_to_clusters(32, 152, 66), Deal { whole: 0, workers: 64 });
        assert_eq!(deal_to_clusters(20, 152, 66), Deal { whole: 0, workers: 60 });
        assert_eq!(deal_to_clusters(1, 3, 66), Deal { whole: 0, workers: 3 });
        assert_eq!(deal_to_clusters(40, 152, 66), Deal { whole: 40, workers: 0 });
        // Blocks that stay begin with whole tiles: everyone has as many.
        assert_eq!(deal_to_clusters(216, 48, 66), Deal { whole: 132, workers: 66 });
        assert_eq!(deal_to_clusters(140, 1, 66), Deal { whole: 140, workers: 0 });
        for tiles in 0..400 {
            let Deal { whole, workers } = deal_to_clusters(tiles, 48, 66);
            assert!(workers == 0 || whole.is_multiple_of(66) && (whole == 0 || workers == 66), "{tiles}");
        }
    }

    #[test]
    fn groups_of_rows_are_alike() {
        // 204 row tiles: 17 groups of 12. 19 do not leave a group of seven.
        let group = |tile, down, across| group(tile, down, across, 132);
        assert_eq!(group(Tile::Hopper256x192, 204, 72), 12);
        assert_eq!(group(Tile::Hopper256x192, 19, 72), 10);
        assert_eq!(group(Tile::Hopper128x256, 18, 108), 9);
        // All columns at once: six rows are all clusters, eight and a bit are not.
        assert_eq!(group(Tile::Hopper256x192, 18, 11), 6);
        assert_eq!(group(Tile::Hopper256x192, 204, 8), 1);
        assert_eq!(group(Tile::Hopper192x192, 24, 8), 12);
        assert_eq!(group(Tile::Hopper192x192, 1, 0), 1);
        assert_eq!(group(Tile::Hopper192x192, 0, 0), 1);
    }
}
