//! Parallel compilation for both build scripts: kiln's compiles kernels, the emulator's compiles C++ units.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, thread};

/// Calls `compile` for every item, in as many threads as cargo was given jobs, and joins the errors.
pub fn compile_all<T: Sync>(items: &[T], compile: impl Fn(&T) -> Result<(), String> + Sync) -> Result<(), String> {
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut errors = Vec::new();
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            errors.extend(compile(item).err());
        }
        errors
    };
    let errors: Vec<String> = thread::scope(|scope| {
        let workers: Vec<_> = (0..items.len().min(jobs)).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a worker does not panic")).collect()
    });
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}
