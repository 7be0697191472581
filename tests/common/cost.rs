//! The cost of a call: peak memory, total bytes allocated, and CPU time. Memory is counted in programs whose allocator is [`Counting`]. It
//! is the same on every machine, busy or not, so tests check it in every run. Only the long tests check time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The CPU time of this thread so far; wall time where the system does not report it.
fn running(since: Instant) -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanos = text.and_then(|text| text.split(' ').next()?.parse().ok());
    nanos.map_or(since.elapsed(), Duration::from_nanos)
}

/// The CPU time of `work`: the least of five means, each of up to three runs. A mean, because the system counts in steps of milliseconds.
/// The least, because a busy machine is slow by chance and a bad input is slow every time.
pub fn time_of(mut work: impl FnMut()) -> Duration {
    const RUNS: u32 = 3;
    /// A run that takes this long needs no mean: a step of the system's clock makes no difference.
    const LONG: Duration = Duration::from_millis(50);
    let since = Instant::now();
    let mut mean = || {
        let (start, mut taken, mut runs) = (running(since), Duration::ZERO, 0);
        while runs < RUNS && taken < LONG {
            work();
            runs += 1;
            taken = running(since).saturating_sub(start);
        }
        taken / runs
    };
    (0..5).map(|_| mean()).min().unwrap_or_default()
}

/// Bytes in use by all threads, and their peak.
pub struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    const fn new() -> Self {
        Self { now: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub fn now(&self) -> usize {
        self.now.load(Ordering::Relaxed)
    }

    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    pub fn restart(&self) {
        self.peak.store(self.now(), Ordering::Relaxed);
    }
}

/// Counts everything. The CPU's working memory comes from the system, and is not counted.
pub static HEAP: Gauge = Gauge::new();

thread_local! {
    // Signed, because a thread may free memory of another one.
    static IN_USE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static TOTAL: Cell<usize> = const { Cell::new(0) };
}

/// A global allocator that counts what each thread has allocated, and what all of them have.
pub struct Counting;

impl Counting {
    fn add(layout: Layout) {
        HEAP.add(layout.size());
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        TOTAL.set(TOTAL.get() + layout.size());
        IN_USE.set(IN_USE.get().wrapping_add_unsigned(layout.size()));
        PEAK.set(PEAK.get().max(IN_USE.get()));
    }
}

// SAFETY: every call is passed on unchanged to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout);
        // SAFETY: the caller upholds the contract of `alloc`, which is also `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::add(layout);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HEAP.sub(layout.size());
        IN_USE.set(IN_USE.get().wrapping_sub_unsigned(layout.size()));
        // SAFETY: `pointer` came from `System` by way of a call above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// How often this thread has allocated.
pub fn allocations() -> usize {
    ALLOCATIONS.get()
}

/// Runs `work` and returns the total bytes that this thread allocated during it, freed or not.
pub fn allocated_by<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = TOTAL.get();
    let out = work();
    (out, TOTAL.get() - before)
}

/// Runs `work` and returns the peak memory of this thread during it, beyond what it had before. No call that is measured here allocates on
/// another thread.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, isize) {
    let before = IN_USE.get();
    PEAK.set(before);
    let out = work();
    (out, PEAK.get() - before)
}
