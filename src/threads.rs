//! The threads of the program: one rayon pool for all parallel work, created once and before its first use.
//!
//! Parallel code never names a pool: it runs in rayon's current pool, by default the global one. Left to itself, rayon creates the
//! global pool at its first use, takes the number of threads from the environment, and panics if a thread cannot be created. So the
//! program creates it explicitly. The calling thread is one of the workers: if there is one worker, or if the system refuses more
//! threads, it does all the work.

use crate::error::{Error, Result};
use crate::memory;
use std::io::ErrorKind;
use std::num::NonZero;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Stack size of a worker in bytes. It is explicit because the environment would set it otherwise.
pub const STACK: usize = 2 << 20;

/// Number of threads that can run at once on this machine, within this process's CPU limits.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Number of worker threads for a request; 0 means one per core. It is at most the number of cores, because more threads would only
/// wait for each other.
fn worker_count(asked: usize, cores: usize) -> usize {
    if asked == 0 { cores } else { asked.min(cores) }
}

/// Creates the global pool, with the calling thread as one of `asked` workers (0: one per core). Returns the number of workers:
/// at most one per core, and fewer if the system refuses threads. A global pool that already exists is left unchanged.
///
/// The calling thread is a worker, so parallel work that another thread starts may have to wait for it. This function is for
/// programs without such threads.
pub fn start(asked: usize) -> usize {
    let (sender, receiver) = channel::<rayon::ThreadBuilder>();
    let receiver = Arc::new(Mutex::new(receiver));
    // The threads are created before the pool, because a pool that fails to spawn one of its threads cannot be built again.
    let others = (0..affordable(worker_count(asked, cores()) - 1)).take_while(|_| spawn(&receiver)).count();
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(1 + others)
        .use_current_thread()
        .spawn_handler(|worker| sender.send(worker).map_err(|_| ErrorKind::BrokenPipe.into()))
        .build_global();
    // An existing global pool is used instead. The threads started above then end without a worker to run.
    drop(built);
    rayon::current_num_threads()
}

/// Creates the global pool from new threads only, for programs in which several threads start parallel work. Fails if the system
/// refuses even one worker.
pub fn start_shared(asked: usize) -> Result<usize> {
    let count = worker_count(asked, cores());
    let count = affordable(count).max(1);
    let built = rayon::ThreadPoolBuilder::new().num_threads(count).stack_size(STACK).build_global();
    built.map_err(|error| Error::Threads { count, why: error.to_string() })?;
    Ok(count)
}

/// How many of `count` threads have enough memory: for their stacks, and for the allocations at a thread's start, whose failure
/// aborts the process.
pub fn affordable(count: usize) -> usize {
    let bytes = |count: usize| count * (STACK + (64 << 10)) + (4 << 20);
    (1..=count).rev().find(|&count| memory::can_allocate(bytes(count))).unwrap_or(0)
}

/// Runs `here` on this thread and `there` on another thread of the pool, or one after the other if the pool has only this thread.
/// Unlike with `rayon::join`, `here` need not be `Send`. Returns both results.
pub fn join<A, B: Send>(here: impl FnOnce() -> A, there: impl FnOnce() -> B + Send) -> (A, B) {
    let mut second = None;
    let first = rayon::in_place_scope(|scope| {
        scope.spawn(|_| second = Some(there()));
        here()
    });
    // The scope returns only after the spawned task has run, so there is a value.
    (first, second.unwrap_or_else(|| unreachable!()))
}

/// Starts a thread that waits for a rayon worker and runs it.
fn spawn(receiver: &Arc<Mutex<Receiver<rayon::ThreadBuilder>>>) -> bool {
    let receiver = receiver.clone();
    let work = move || {
        // This is a separate statement, so that the lock is released before the worker runs.
        let worker = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
        if let Ok(worker) = worker {
            worker.run();
        }
    };
    thread::Builder::new().stack_size(STACK).spawn(work).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_count_is_as_requested_and_at_most_one_per_core() {
        for (asked, cores, want) in [(0, 8, 8), (1, 8, 1), (3, 8, 3), (8, 8, 8), (9, 8, 8), (1024, 2, 2), (0, 1, 1)] {
            assert_eq!(worker_count(asked, cores), want, "{asked} on {cores}");
        }
    }
}
