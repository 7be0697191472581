//! Kernel times for a trace: an event with a timestamp before and after each launch. The host reads times when it is not waiting for
//! results, because reading one while work is queued would stall the queue.
//!
//! Events only give time differences. To place them on the host's time axis, one event is recorded on an idle stream between two readings
//! of the host's clock. It is off by at most half the distance of these readings, the time that a synchronization takes.

use super::driver::{Driver, Event, Stream};
use crate::error::Result;
use crate::trace::{self, Track};
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The most launches with unread times. At this number the host waits for the stream and reads them. An image of klein in four steps has
/// about 1,500.
const MOST: usize = 1 << 14;
/// How many events are tried as the anchor. The one between the closest clock readings is taken.
const TRIES: usize = 4;

/// The launches of a stream, with the events around them.
pub struct Timeline {
    driver: Rc<dyn Driver>,
    stream: Stream,
    track: Track,
    /// Whether launches are captured and not run, so there is nothing to time.
    paused: Cell<bool>,
    /// An event, and when it was reached on the host's clock.
    anchor: Cell<Option<(Event, Instant)>>,
    launches: RefCell<Vec<Launched>>,
    /// Events that are not in use.
    free: RefCell<Vec<Event>>,
}

struct Launched {
    name: &'static str,
    grid: [u32; 3],
    begin: Event,
    end: Event,
}

impl Timeline {
    /// The timeline of an idle stream. `None` if no trace is being recorded.
    pub fn new(driver: Rc<dyn Driver>, stream: Stream) -> Option<Self> {
        let device = driver.device();
        let track = Track::new(&format!("GPU {} ({})", device.index, device.name), "kernels")?;
        let timeline = Self {
            driver,
            stream,
            track,
            paused: Cell::new(false),
            anchor: Cell::default(),
            launches: RefCell::default(),
            free: RefCell::default(),
        };
        timeline.set_anchor();
        Some(timeline)
    }

    /// Launches a kernel and times it. A trace never makes a launch fail: launches that cannot be timed are counted.
    pub fn time(&self, name: &'static str, grid: [u32; 3], launch: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.paused.get() {
            return launch();
        }
        let begin = self.mark();
        launch().inspect_err(|_| self.free.borrow_mut().extend(begin.iter().copied()))?;
        match (begin, self.mark()) {
            (Ok(begin), Ok(end)) => self.launches.borrow_mut().push(Launched { name, grid, begin, end }),
            (begin, end) => {
                self.free.borrow_mut().extend(begin.into_iter().chain(end));
                self.track.untimed(1);
            }
        }
        if self.launches.borrow().len() == MOST {
            self.collect();
        }
        Ok(())
    }

    /// Runs `body`, which captures its launches, without timing them.
    pub fn untimed<T>(&self, body: impl FnOnce() -> T) -> T {
        self.paused.set(true);
        let result = body();
        self.paused.set(false);
        result
    }

    /// Waits for the stream and reads the times of all launches so far, then sets a new anchor: the clocks of host and device drift apart,
    /// and the driver gives time differences in single precision.
    pub fn collect(&self) {
        let _span = trace::span("collect kernel times");
        self.read();
        self.set_anchor();
    }

    /// An event, recorded behind all launches so far.
    fn mark(&self) -> Result<Event> {
        let free = self.free.borrow_mut().pop();
        let event = free.map_or_else(|| self.driver.timed_event(), Ok)?;
        self.driver.record_event(event, self.stream).inspect_err(|_| self.free.borrow_mut().push(event))?;
        Ok(event)
    }

    fn set_anchor(&self) {
        let attempt = || {
            let before = Instant::now();
            let event = self.mark()?;
            let reached = self.driver.synchronize(self.stream);
            let apart = before.elapsed();
            reached.map(|()| (apart, event, before + apart / 2)).inspect_err(|_| self.free.borrow_mut().push(event))
        };
        let mut tries: Vec<(Duration, Event, Instant)> = (0..TRIES).filter_map(|_| attempt().ok()).collect();
        tries.sort_by_key(|(apart, ..)| Reverse(*apart));
        let best = tries.pop();
        let unused = tries.into_iter().map(|(_, event, _)| event);
        let old = self.anchor.replace(best.map(|(_, event, at)| (event, at)));
        self.free.borrow_mut().extend(unused.chain(old.map(|(event, _)| event)));
    }

    /// Reads the times of all launches so far. After a fault of the device there are none.
    fn read(&self) {
        let reached = self.driver.synchronize(self.stream);
        let anchor = self.anchor.get().filter(|_| reached.is_ok());
        let (launches, mut untimed) = (std::mem::take(&mut *self.launches.borrow_mut()), 0);
        for Launched { name, grid, begin, end } in launches {
            let times = anchor.and_then(|(anchor, at)| {
                let from = self.driver.elapsed(anchor, begin).ok()?;
                Some((at + from, self.driver.elapsed(begin, end).ok()?))
            });
            match times {
                Some((start, length)) => self.track.kernel(name, grid, start, length),
                None => untimed += 1,
            }
            self.free.borrow_mut().extend([begin, end]);
        }
        self.track.untimed(untimed);
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.read();
        let anchor = self.anchor.take().map(|(event, _)| event);
        self.free.take().into_iter().chain(anchor).for_each(|event| self.driver.destroy_event(event));
    }
}
