//! Reads weight files ahead of their use, on extra threads, while a GPU's driver starts and earlier weights are copied.
//!
//! A mapped file is read when its pages are touched. Even a page in the page cache takes a fault to be mapped: at 4 KiB each, the faults
//! of a few gigabytes take longer than a bus needs to move them. So threads touch all pages in the order of their use. Nothing depends
//! on it: a page that was not touched in time is read when it is needed.

use crate::tensor::Bytes;
use crate::threads;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Bytes that a thread touches before it takes the next piece.
const PIECE: usize = 4 << 20;
/// The smallest page size in bytes. Larger pages are touched several times.
const PAGE: usize = 4096;
/// More threads would only wait for each other or for the disk.
const MOST_THREADS: usize = 8;

/// Threads that read ahead until everything is read or this is dropped.
#[derive(Debug)]
pub struct ReadAhead {
    stop: Arc<AtomicBool>,
}

impl ReadAhead {
    /// Starts reading these bytes in order.
    pub fn start(all: Vec<Bytes>) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let work = Arc::new((all, AtomicUsize::new(0)));
        for _ in 0..threads::cores().div_ceil(2).min(MOST_THREADS) {
            let (work, stop) = (work.clone(), stop.clone());
            let touch = move || {
                let (all, next) = &*work;
                while !stop.load(Ordering::Relaxed) {
                    let Some(piece) = nth_piece(all, next.fetch_add(1, Ordering::Relaxed)) else { return };
                    piece.iter().step_by(PAGE).for_each(|byte| _ = black_box(*byte));
                }
            };
            // If the thread cannot start, the bytes are read later.
            let _ = thread::Builder::new().name("read ahead".into()).stack_size(threads::STACK).spawn(touch);
        }
        Self { stop }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The piece with this number, if it exists.
fn nth_piece(all: &[Bytes], mut number: usize) -> Option<&[u8]> {
    for bytes in all {
        let pieces = bytes.len().div_ceil(PIECE);
        if number < pieces {
            return bytes.chunks(PIECE).nth(number);
        }
        number -= pieces;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_in_order_and_complete() {
        let of = |len: usize, value: u8| Bytes::new(Arc::new(vec![value; len]));
        let all = [of(2 * PIECE + 1, 1), of(0, 2), of(PIECE, 3), of(5, 4)];
        let pieces: Vec<_> = (0..).map_while(|number| nth_piece(&all, number)).map(|piece| (piece[0], piece.len())).collect();
        assert_eq!(pieces, [(1, PIECE), (1, PIECE), (1, 1), (3, PIECE), (4, 5)]);
    }

    /// Bytes that record whether they were read.
    struct Told(Vec<u8>, AtomicBool);

    impl AsRef<[u8]> for Told {
        fn as_ref(&self) -> &[u8] {
            self.1.store(true, Ordering::Relaxed);
            &self.0
        }
    }

    #[test]
    fn all_is_read_and_let_go() {
        let told = Arc::new(Told(vec![0; 3 * PIECE], AtomicBool::new(false)));
        let bytes = Bytes::new(told.clone());
        told.1.store(false, Ordering::Relaxed);
        let ahead = ReadAhead::start(vec![bytes]);
        while Arc::strong_count(&told) > 1 {
            thread::yield_now();
        }
        assert!(told.1.load(Ordering::Relaxed));
        drop(ahead);
    }
}
