//! Traces this process in the Trace Event Format, which Perfetto and Chrome show: what each thread did when, and what a GPU ran.
//!
//! The whole process has one recorder. While it is off, a span costs one relaxed atomic load and allocates nothing, so spans can be
//! used anywhere, in any thread. While it is on, a span takes a lock when it ends. Memory is bounded: after [`MAX_EVENTS`] events
//! further ones are counted and dropped.

use serde::Serialize;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// The maximum number of events: hundreds of images on a GPU. They take about 50 MB, and the file twice that.
pub const MAX_EVENTS: usize = 1 << 19;

/// Whether a trace is being recorded. The lock protects all other state.
static ON: AtomicBool = AtomicBool::new(false);
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

struct Recorder {
    origin: Instant,
    events: Vec<Recorded>,
    /// Events dropped because there were too many.
    dropped: u64,
    /// Kernel launches whose times are unknown.
    untimed: u64,
    tracks: Vec<Named>,
    threads: HashMap<ThreadId, usize>,
}

/// A row of the display, and its group.
struct Named {
    device: Option<String>,
    name: String,
}

struct Recorded {
    name: &'static str,
    detail: Option<Detail>,
    track: usize,
    start: Duration,
    length: Duration,
}

/// Details of an event in addition to its name.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Detail {
    What(Box<str>),
    Grid([u32; 3]),
}

fn recorder() -> MutexGuard<'static, Option<Recorder>> {
    RECORDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a trace is being recorded.
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

impl Recorder {
    fn push(&mut self, name: &'static str, detail: Option<Detail>, track: usize, start: Instant, length: Duration) {
        if self.events.len() == MAX_EVENTS {
            self.dropped += 1;
            return;
        }
        // Skips events that began before the trace.
        if let Some(start) = start.checked_duration_since(self.origin) {
            self.events.push(Recorded { name, detail, track, start, length });
        }
    }

    /// The track of the calling thread.
    fn thread(&mut self) -> usize {
        let current = thread::current();
        *self.threads.entry(current.id()).or_insert_with(|| {
            let name = current.name().map_or_else(|| format!("worker {}", self.tracks.len()), str::to_owned);
            self.tracks.push(Named { device: None, name });
            self.tracks.len() - 1
        })
    }
}

/// A time span on the calling thread. It ends when it is dropped.
#[must_use = "a span ends when it is dropped"]
pub struct Span {
    open: Option<(Instant, &'static str, Option<Detail>)>,
    /// Ties the span to the thread that began it.
    thread: PhantomData<*const ()>,
}

/// Begins a span.
pub fn span(name: &'static str) -> Span {
    let open = is_on().then(|| (Instant::now(), name, None));
    Span { open, thread: PhantomData }
}

/// Begins a span with a detail in addition to its name, such as a file.
pub fn span_of(name: &'static str, what: impl FnOnce() -> String) -> Span {
    let open = is_on().then(|| (Instant::now(), name, Some(Detail::What(what().into()))));
    Span { open, thread: PhantomData }
}

/// Records a span of the calling thread that began at `start` and ends now.
pub fn since(start: Instant, name: &'static str) {
    drop(Span { open: is_on().then_some((start, name, None)), thread: PhantomData });
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some((start, name, detail)) = self.open.take() else { return };
        let length = start.elapsed();
        if let Some(recorder) = recorder().as_mut() {
            let track = recorder.thread();
            recorder.push(name, detail, track, start, length);
        }
    }
}

/// A track for a device's work. Its user supplies the times.
pub(crate) struct Track(usize);

impl Track {
    /// Makes a new track; `None` if no trace is being recorded.
    pub fn new(device: &str, name: &str) -> Option<Self> {
        let mut recorder = recorder();
        let tracks = &mut recorder.as_mut()?.tracks;
        tracks.push(Named { device: Some(device.into()), name: name.into() });
        Some(Self(tracks.len() - 1))
    }

    /// Records a kernel.
    pub fn kernel(&self, name: &'static str, grid: [u32; 3], start: Instant, length: Duration) {
        if let Some(recorder) = recorder().as_mut() {
            recorder.push(name, Some(Detail::Grid(grid)), self.0, start, length);
        }
    }

    /// Counts kernels whose times are unknown.
    pub fn untimed(&self, count: u64) {
        if let Some(recorder) = recorder().as_mut() {
            recorder.untimed += count;
        }
    }
}

/// The current recording. Dropping it without [`Trace::finish`] discards the trace.
pub struct Trace(());

/// A finished trace as a file, with its statistics.
pub struct Finished {
    /// The JSON.
    pub bytes: Vec<u8>,
    /// Events in the trace.
    pub events: usize,
    /// Events that were dropped because there were too many.
    pub dropped: u64,
    /// Kernels whose times are unknown, for example after a GPU fault.
    pub untimed: u64,
}

impl Trace {
    /// Starts recording; `None` if a recording is already running.
    pub fn start() -> Option<Self> {
        let mut recorder = recorder();
        if recorder.is_some() {
            return None;
        }
        *recorder = Some(Recorder {
            origin: Instant::now(),
            events: Vec::new(),
            dropped: 0,
            untimed: 0,
            tracks: Vec::new(),
            threads: HashMap::new(),
        });
        ON.store(true, Ordering::Relaxed);
        Some(Self(()))
    }

    /// Stops recording. Spans that are still open are not in the trace. `command` names the process in it.
    pub fn finish(self, command: &str) -> Finished {
        ON.store(false, Ordering::Relaxed);
        let recorded = recorder().take();
        // Skips `drop`, which would stop a trace started since.
        std::mem::forget(self);
        // Only this function and `drop` take the recorder.
        let mut recorder = recorded.unwrap_or_else(|| unreachable!());
        // A span comes before those inside it.
        recorder.events.sort_by_key(|event| (event.track, event.start, Reverse(event.length)));
        let Recorder { events, dropped, untimed, .. } = &recorder;
        let (events, dropped, untimed) = (events.len(), *dropped, *untimed);
        Finished { bytes: recorder.json(command), events, dropped, untimed }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        ON.store(false, Ordering::Relaxed);
        recorder().take();
    }
}

/// The first bytes of every trace.
const BEGINNING: &[u8] = b"{\"traceEvents\":[\n";

/// Whether a file is a trace that kiln wrote, or empty. Other files are somebody's data.
pub fn is_one(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BEGINNING.len() as u64).read_to_end(&mut start));
    read.is_ok() && (start.is_empty() || start == BEGINNING)
}

/// An event in the trace format; times are in microseconds.
#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args<'a> {
    Name { name: &'a str },
    Detail(&'a Detail),
}

impl Recorder {
    /// The host is process 1, and each device is a further process. A thread's number is its track's, starting at 1.
    fn json(&self, command: &str) -> Vec<u8> {
        let mut devices: Vec<&str> = Vec::new();
        for device in self.tracks.iter().filter_map(|track| track.device.as_deref()) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        let process = |device: Option<&str>| devices.iter().position(|known| Some(*known) == device).map_or(1, |i| i + 2);
        let named = |what, pid, tid, name| {
            let args = Some(Args::Name { name });
            Event { name: what, ph: "M", pid, tid, ts: None, dur: None, args }
        };
        let mut lines: Vec<Event<'_>> = vec![named("process_name", 1, 0, command)];
        lines.extend(devices.iter().map(|device| named("process_name", process(Some(device)), 0, device)));
        let tracks = self.tracks.iter().enumerate();
        lines.extend(tracks.map(|(i, track)| named("thread_name", process(track.device.as_deref()), i + 1, &track.name)));
        let us = |time: Duration| Some(time.as_nanos() as f64 / 1e3);
        let events = self.events.iter().map(|event| Event {
            name: event.name,
            ph: "X",
            pid: process(self.tracks[event.track].device.as_deref()),
            tid: event.track + 1,
            ts: us(event.start),
            dur: us(event.length),
            args: event.detail.as_ref().map(Args::Detail),
        });
        let mut bytes = BEGINNING.to_vec();
        for (i, line) in lines.into_iter().chain(events).enumerate() {
            if i > 0 {
                bytes.extend_from_slice(b",\n");
            }
            // Writing to memory does not fail, nor do these types.
            let _ = serde_json::to_writer(&mut bytes, &line);
        }
        let about = serde_json::json!({
            "kiln": env!("CARGO_PKG_VERSION"),
            "dropped": self.dropped,
            "untimed": self.untimed,
            "note": "Kernels are timed by CUDA events. While they are, steps are not captured as CUDA graphs and no kernel begins before \
                     the one before it has ended, so a step takes a little longer than without a trace.",
        });
        bytes.extend_from_slice(format!("\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":{about}}}\n").as_bytes());
        bytes
    }
}
