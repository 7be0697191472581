//! The ordering that CUDA guarantees: work on one stream runs in order; work on several streams is ordered only by an event or the host.
//! Copies and kernels are checked against it as they are queued, with a vector clock per stream.

use std::collections::{BTreeMap, HashMap};

/// A vector clock: how much of each stream's work happens before a point.
#[derive(Clone, Debug, Default)]
struct Clock(HashMap<u64, u64>);

impl Clock {
    fn merge(&mut self, other: &Self) {
        for (&stream, &count) in &other.0 {
            let known = self.0.entry(stream).or_default();
            *known = count.max(*known);
        }
    }

    fn has(&self, work: Work) -> bool {
        self.0.get(&work.stream).is_some_and(|&count| count >= work.number)
    }
}

/// One piece of work.
#[derive(Clone, Copy, Debug)]
struct Work {
    stream: u64,
    number: u64,
}

/// Bytes that a copy wrote, and the last kernel that reads them.
#[derive(Debug)]
struct Written {
    end: u64,
    by: Work,
    read: Option<Work>,
}

#[derive(Default)]
pub struct Order {
    host: Clock,
    streams: HashMap<u64, Clock>,
    events: HashMap<u64, Clock>,
    /// The copied ranges, by their first address.
    written: BTreeMap<u64, Written>,
    /// The last copy from each staging buffer.
    buffers: HashMap<u64, Work>,
    last_kernel: Option<Work>,
    /// The addresses that the kernels of CUDA graphs read: in the graph being captured, and in those captured before.
    recording: Option<Vec<u64>>,
    recordings: HashMap<u64, Vec<u64>>,
    /// Copies on streams of their own: how many may overlap with kernels, and how many wait for all kernels before them.
    pub beside: usize,
    pub behind: usize,
}

impl Order {
    fn queue(&mut self, stream: u64) -> Work {
        let clock = self.streams.entry(stream).or_default();
        clock.merge(&self.host);
        let number = clock.0.entry(stream).or_default();
        *number += 1;
        Work { stream, number: *number }
    }

    pub fn synchronize(&mut self, stream: u64) {
        self.host.merge(self.streams.entry(stream).or_default());
    }

    pub fn set_event(&mut self, event: u64, stream: u64) {
        let clock = self.streams.entry(stream).or_default().clone();
        self.events.insert(event, clock);
    }

    pub fn finish_event(&mut self, event: u64) {
        self.host.merge(self.events.entry(event).or_default());
    }

    pub fn wait_event(&mut self, stream: u64, event: u64) {
        let clock = self.events.entry(event).or_default().clone();
        self.streams.entry(stream).or_default().merge(&clock);
    }

    /// Queues a copy from the staging buffer at `from`, which the host has just filled.
    pub fn copy(&mut self, stream: u64, from: u64, to: std::ops::Range<u64>) {
        if let Some(&last) = self.buffers.get(&from) {
            assert!(self.host.has(last), "a buffer is filled again before it was copied");
        }
        let work = self.queue(stream);
        let clock = &self.streams[&stream];
        let replaced: Vec<u64> = self.written.range(..to.end).filter(|(_, w)| w.end > to.start).map(|(at, _)| *at).collect();
        for at in replaced {
            let old = self.written.remove(&at).unwrap();
            assert!(clock.has(old.by), "two copies to one place in no order");
            assert!(old.read.is_none_or(|kernel| clock.has(kernel)), "weights are replaced while a kernel reads them");
        }
        if let Some(kernel) = self.last_kernel.filter(|kernel| kernel.stream != stream) {
            *if clock.has(kernel) { &mut self.behind } else { &mut self.beside } += 1;
        }
        self.buffers.insert(from, work);
        self.written.insert(to.start, Written { end: to.end, by: work, read: None });
    }

    /// Launches a kernel. Its parameters hold the addresses that it reads, among other values.
    pub fn launch(&mut self, stream: u64, params: &[u64]) {
        let reads: Vec<u64> = params.iter().copied().filter(|word| self.holds(*word)).collect();
        match &mut self.recording {
            Some(recording) => recording.extend(reads),
            None => self.kernel(stream, &reads),
        }
    }

    fn holds(&self, address: u64) -> bool {
        self.written.range(..=address).next_back().is_some_and(|(_, written)| written.end > address)
    }

    fn kernel(&mut self, stream: u64, reads: &[u64]) {
        let work = self.queue(stream);
        let clock = &self.streams[&stream];
        for address in reads {
            let (_, written) = self.written.range_mut(..=address).next_back().unwrap();
            assert!(clock.has(written.by), "a kernel reads weights that may not be there yet");
            written.read = Some(work);
        }
        self.last_kernel = Some(work);
    }

    pub fn record(&mut self) {
        self.recording = Some(Vec::new());
    }

    /// Ends the capture of a graph. The graph is kept if it has a handle.
    pub fn recorded(&mut self, graph: Option<u64>) {
        let reads = self.recording.take().unwrap();
        self.recordings.extend(graph.map(|graph| (graph, reads)));
    }

    pub fn replay(&mut self, stream: u64, graph: u64) {
        let reads = self.recordings[&graph].clone();
        self.kernel(stream, &reads);
    }

    /// Frees memory.
    pub fn free(&mut self, memory: std::ops::Range<u64>) {
        self.written.retain(|at, _| !memory.contains(at));
    }
}
