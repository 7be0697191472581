//! Transfers that do not stall the ops. Writes go through pinned buffers: the device copies them in stream order while the host goes on.
//! Reads have their own stream and wait only for what was issued before them.

use super::driver::{Driver, Rows, Stream};
use super::staging::{Buffer, CopyStream, EventGuard};
use crate::error::{Error, Result};
use std::rc::Rc;

/// Writes of up to this many bytes share the small buffers.
const SMALL: usize = 1 << 20;
/// The sizes of large buffers are multiples of this.
const GRANULE: usize = 4 << 20;

/// The pinned buffers of writes, and the stream of reads. Each is allocated at its first use.
pub struct Transfers {
    // Dropped first: the drop waits until the device has copied everything.
    reads: Option<Reads>,
    small: Ring<4>,
    large: Ring<2>,
    driver: Rc<dyn Driver>,
}

/// Buffers that are filled in rotation.
struct Ring<const N: usize> {
    buffers: [Option<Buffer>; N],
    next: usize,
}

struct Reads {
    stream: CopyStream,
    /// Recorded where reads begin, in rotation. A read whose event was recorded again waits longer, which is harmless.
    places: [EventGuard; 4],
    next: usize,
}

impl<const N: usize> Ring<N> {
    const EMPTY: Self = Self { buffers: [const { None }; N], next: 0 };

    /// The next buffer. It has at least `len` bytes and no copy in progress.
    fn take(&mut self, driver: &Rc<dyn Driver>, len: usize, granule: usize) -> Result<&mut Buffer> {
        let slot = &mut self.buffers[self.next];
        self.next = (self.next + 1) % N;
        if let Some(buffer) = slot {
            buffer.wait()?;
        }
        // A buffer that is too small is freed before its replacement is pinned.
        let buffer = match slot.take().filter(|buffer| buffer.len() >= len) {
            Some(buffer) => buffer,
            None => Buffer::new(driver, len.next_multiple_of(granule))?,
        };
        Ok(slot.insert(buffer))
    }
}

impl Transfers {
    pub fn new(driver: Rc<dyn Driver>) -> Self {
        Self { reads: None, small: Ring::EMPTY, large: Ring::EMPTY, driver }
    }

    /// Queues a copy of `len` bytes that `fill` writes, behind everything queued on `stream`.
    pub fn write(&mut self, stream: Stream, to: Rows, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let buffer = match len {
            ..=SMALL => self.small.take(&self.driver, len, SMALL)?,
            _ => self.large.take(&self.driver, len, GRANULE)?,
        };
        buffer.queue(stream, to, len, fill)
    }

    /// Makes a read wait for everything queued on `stream` so far. Returns its place.
    pub fn begin_read(&mut self, stream: Stream) -> Result<usize> {
        let reads = match &mut self.reads {
            Some(reads) => reads,
            none => none.insert(Reads::new(&self.driver)?),
        };
        let place = reads.next;
        reads.next = (place + 1) % reads.places.len();
        self.driver.record_event(reads.places[place].1, stream)?;
        Ok(place)
    }

    /// Waits until the device reaches the place of the read, then copies the rows to the host.
    pub fn finish_read(&mut self, place: usize, from: Rows, to: &mut [u8]) -> Result<()> {
        let reads = self.reads.as_ref().and_then(|reads| Some((reads.stream.1, reads.places.get(place)?.1)));
        let (stream, event) = reads.ok_or_else(|| Error::Op { op: "read", what: "the read was never begun".into() })?;
        self.driver.wait_event(stream, event)?;
        self.driver.copy_out(stream, from, to)
    }
}

impl Reads {
    fn new(driver: &Rc<dyn Driver>) -> Result<Self> {
        let event = || EventGuard::new(driver);
        Ok(Self { stream: CopyStream::new(driver)?, places: [event()?, event()?, event()?, event()?], next: 0 })
    }
}
