//! Random moments, and many runs at once.
#![allow(dead_code)] // each test binary uses its own part of this

use crate::random::Random;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The `index`th of some numbers that look random, below `limit`. The same in every run, so that a failure can be named; when
/// exactly something happens is up to the machine.
pub fn number(index: usize, limit: usize) -> usize {
    Random::new(index as u64).below(limit)
}

/// A random part of some time.
pub fn moment(index: usize, of: Duration) -> Duration {
    of.mul_f64(number(index, 1_000_000) as f64 / 1e6)
}

/// Calls `work` with 0 to `count`, two at a time, and gives the results in no order.
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
