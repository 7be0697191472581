//! Random delays, and runs of the program in parallel.

use crate::random::Random;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Pseudo-random number `index` below `limit`, the same in every run. The machine decides what a delay coincides with.
pub fn number(index: usize, limit: usize) -> usize {
    Random::new(index as u64).below(limit)
}

/// A pseudo-random fraction of a duration.
pub fn moment(index: usize, of: Duration) -> Duration {
    of.mul_f64(number(index, 1_000_000) as f64 / 1e6)
}

/// Calls `work` with every index below `count`, two at a time, and returns the results in no particular order.
pub fn in_pairs<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let indices = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < count));
        indices.map(&work).collect::<Vec<T>>()
    };
    std::thread::scope(|scope| {
        let workers = [scope.spawn(worker), scope.spawn(worker)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}
