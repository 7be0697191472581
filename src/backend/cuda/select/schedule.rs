//! Schedules of tiles over the SMs: Stream-K in its hybrid form (Osama et al. 2023, "Stream-K: Work-centric Parallel Decomposition for
//! Dense Matrix-Matrix Multiplication on the GPU"). One CTA computes most tiles alone. The k-blocks of the rest, which would leave the last
//! wave partly empty, are divided evenly among workers. The worker that finishes a tile adds up the partials of the others.

/// How tiles are distributed: the first `full_tiles` go to one CTA each, and `workers` share the k-blocks of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Tiles that one CTA computes from the first k-block to the last.
    pub full_tiles: u32,
    /// CTAs, or clusters, that share the other tiles.
    pub workers: u32,
}

impl Schedule {
    /// One CTA for each tile.
    pub const fn data_parallel(tiles: u32) -> Self {
        Self { full_tiles: tiles, workers: 0 }
    }

    /// How many persistent clusters to launch: the workers, or as many as run at once and loop over the tiles.
    pub fn persistent_clusters(self, tiles: u32, slots: u32) -> u32 {
        if self.workers > 0 { self.workers } else { tiles.min(slots) }
    }
}

/// Schedules `tiles` of `k_blocks` each over as many CTAs as run at once. If the last wave would be partly empty, workers share the tiles
/// of the last two waves.
pub fn stream_k(tiles: u32, k_blocks: u32, slots: u32) -> Schedule {
    /// With fewer k-blocks a worker takes longer to start than to compute.
    const MIN_K_BLOCKS_PER_WORKER: u64 = 4;
    let full_waves = tiles / slots.max(1);
    let shared = tiles - full_waves.saturating_sub(1) * slots;
    let workers = (u64::from(shared) * u64::from(k_blocks) / MIN_K_BLOCKS_PER_WORKER).min(u64::from(slots)) as u32;
    let even = tiles.is_multiple_of(slots.max(1));
    if even || (full_waves == 0 && workers <= tiles) {
        Schedule::data_parallel(tiles)
    } else {
        Schedule { full_tiles: tiles - shared, workers }
    }
}

/// Schedules tiles over persistent clusters. Either all of them are workers or none is. If there are fewer tiles than clusters, each tile
/// is divided into equal parts.
pub fn persistent_stream_k(tiles: u32, k_blocks: u32, slots: u32) -> Schedule {
    if tiles == 0 {
        return Schedule::data_parallel(tiles);
    }
    if tiles < slots {
        let parts = (slots / tiles).min(k_blocks);
        return if parts > 1 { Schedule { full_tiles: 0, workers: tiles * parts } } else { Schedule::data_parallel(tiles) };
    }
    let schedule = stream_k(tiles, k_blocks, slots);
    if schedule.workers == slots { schedule } else { Schedule::data_parallel(tiles) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_k_block_is_scheduled_once() {
        // Full waves only, or too little work to share: one CTA for each tile.
        assert_eq!(stream_k(264, 48, 132), Schedule::data_parallel(264));
        assert_eq!(stream_k(40, 2, 132), Schedule::data_parallel(40));
        assert_eq!(stream_k(0, 48, 132), Schedule::data_parallel(0));
        // Three waves and a quarter: the tiles of the first two are not shared.
        assert_eq!(stream_k(432, 48, 132), Schedule { full_tiles: 264, workers: 132 });
        assert_eq!(stream_k(40, 152, 132), Schedule { full_tiles: 0, workers: 132 });
        // Every worker has at least four k-blocks.
        assert_eq!(stream_k(40, 8, 132), Schedule { full_tiles: 0, workers: 80 });
        for schedule in [stream_k, persistent_stream_k] {
            for (tiles, k_blocks, slots) in
                [(1, 1, 1), (1, 96, 264), (7, 5, 3), (133, 48, 132), (10_000, 3, 132), (395, 7, 396), (0, 4, 66), (65, 2, 66)]
            {
                let Schedule { full_tiles, workers } = schedule(tiles, k_blocks, slots);
                let bounded = workers <= slots && full_tiles <= tiles && (workers > 0 || full_tiles == tiles);
                assert!(bounded, "{tiles} {k_blocks} {slots}");
                // No worker is without a k-block.
                assert!(workers == 0 || (tiles - full_tiles) * k_blocks >= workers);
            }
        }
    }

    #[test]
    fn all_persistent_clusters_are_workers_or_none_is() {
        // Fewer tiles than clusters: every tile has the same number of equal parts.
        assert_eq!(persistent_stream_k(32, 152, 66), Schedule { full_tiles: 0, workers: 64 });
        assert_eq!(persistent_stream_k(20, 152, 66), Schedule { full_tiles: 0, workers: 60 });
        assert_eq!(persistent_stream_k(1, 3, 66), Schedule { full_tiles: 0, workers: 3 });
        assert_eq!(persistent_stream_k(40, 152, 66), Schedule::data_parallel(40));
        // Persistent clusters begin with full tiles, so each must have the same number of them.
        assert_eq!(persistent_stream_k(216, 48, 66), Schedule { full_tiles: 132, workers: 66 });
        assert_eq!(persistent_stream_k(140, 1, 66), Schedule::data_parallel(140));
        for tiles in 0..400 {
            let Schedule { full_tiles, workers } = persistent_stream_k(tiles, 48, 66);
            assert!(workers == 0 || full_tiles.is_multiple_of(66) && (full_tiles == 0 || workers == 66), "{tiles}");
        }
    }
}
