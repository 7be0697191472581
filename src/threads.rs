//! The threads of the program: one pool for everything that runs in parallel, made once and before any of it.
//!
//! What is parallel here never says where it runs: it takes rayon's current pool, which outside of any other is the one of the
//! process. Left alone, that one is made by whoever comes first, with as many threads as a variable of the environment says, and
//! a thread that cannot be had ends the process. So the program makes it itself. The thread that does is one of the workers: with
//! `--threads 1` there is no other, and where the system gives no more, that one does all the work.

use crate::memory;
use std::io::ErrorKind;
use std::num::NonZero;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Bytes of a worker's stack. Said here, because otherwise the environment says it.
pub const STACK: usize = 2 << 20;

/// How many threads can run at once on this machine, or in what this process may use of it.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// How many threads a request comes to; 0 asks for one per core. More than that would only wait for each other.
pub fn worker_count(asked: usize, cores: usize) -> usize {
    if asked == 0 { cores } else { asked.min(cores) }
}

/// Makes the pool of this process, with the calling thread as one of `asked` workers (0: one per core). Returns how many there
/// are: as many as the system gives, and no more than there are cores. A pool that is there already stays as it is.
///
/// Whoever works in parallel on a thread of its own has to wait for workers, and with one of them for the calling thread; so this
/// is for a program that starts no such thread.
pub fn start(asked: usize) -> usize {
    let (sender, receiver) = channel::<rayon::ThreadBuilder>();
    let receiver = Arc::new(Mutex::new(receiver));
    // First the threads and then the pool, which would be broken for good by one that it cannot have.
    let others = (0..affordable(worker_count(asked, cores()) - 1)).take_while(|_| spawn(&receiver)).count();
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(1 + others)
        .use_current_thread()
        .spawn_handler(|worker| sender.send(worker).map_err(|_| ErrorKind::BrokenPipe.into()))
        .build_global();
    // There is one already, and it does as well. The threads end for want of a worker to be.
    drop(built);
    rayon::current_num_threads()
}

/// For how many of so many threads there is memory: for their stacks, and for what a thread needs as it starts, where libraries
/// take a no for the end of the world.
fn affordable(count: usize) -> usize {
    let bytes = |count: usize| count * (STACK + (64 << 10)) + (4 << 20);
    (1..=count).rev().find(|&count| memory::can_allocate(bytes(count))).unwrap_or(0)
}

/// Starts a thread that becomes the worker it is sent.
fn spawn(receiver: &Arc<Mutex<Receiver<rayon::ThreadBuilder>>>) -> bool {
    let receiver = receiver.clone();
    let work = move || {
        // In a statement of its own: the lock must not be held while the worker runs.
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
    fn there_are_as_many_as_asked_for_and_at_most_one_per_core() {
        for (asked, cores, want) in [(0, 8, 8), (1, 8, 1), (3, 8, 3), (8, 8, 8), (9, 8, 8), (1024, 2, 2), (0, 1, 1)] {
            assert_eq!(worker_count(asked, cores), want, "{asked} on {cores}");
        }
    }
}
