//! Captured CUDA graphs of recurring steps.

use super::driver::{Driver, Graph, Stream};
use crate::backend::StepKey;
use crate::error::Result;
use std::collections::HashMap;
use std::rc::Rc;

/// Launches that were captured from a stream, to be launched again as one.
pub struct CapturedGraph {
    driver: Rc<dyn Driver>,
    graph: Graph,
}

impl CapturedGraph {
    /// Captures what `body` launches on `stream`, without running it.
    pub fn capture(driver: &Rc<dyn Driver>, stream: Stream, body: impl FnOnce() -> Result<()>) -> Result<Self> {
        driver.begin_capture(stream)?;
        let issued = body();
        // The capture has to end whatever happened inside it, or the stream is unusable.
        let graph = driver.end_capture(stream).map(|graph| Self { driver: driver.clone(), graph });
        issued?;
        graph
    }

    /// Queues the captured launches.
    pub fn launch(&self, stream: Stream) -> Result<()> {
        self.driver.launch_graph(stream, self.graph)
    }
}

/// The steps that recur. A graph is found by what it launches, so it outlives the job that captured it: a later job takes the graph if its
/// step launches the same kernels with the same parameters and addresses.
#[derive(Default)]
pub struct Steps {
    /// Launch hashes of the steps that ran one by one since working memory was reserved.
    seen: HashMap<StepKey, u64>,
    /// Graphs by launch hash, the most recently launched last.
    graphs: Vec<(u64, CapturedGraph)>,
}

impl Steps {
    /// The most graphs to keep: enough for a prompt and a negative prompt at several sizes.
    const KEPT: usize = 16;

    /// The hash of a step's launches, if the step ran one by one.
    pub fn launches(&self, key: StepKey) -> Option<u64> {
        self.seen.get(&key).copied()
    }

    /// Notes that a step ran one by one and its launches have this hash.
    pub fn saw(&mut self, key: StepKey, hash: u64) {
        self.seen.insert(key, hash);
    }

    /// The graph of launches with this hash, if they were captured.
    pub fn graph(&mut self, hash: u64) -> Option<&CapturedGraph> {
        let place = self.graphs.iter().position(|(of, _)| *of == hash)?;
        let found = self.graphs.remove(place);
        self.graphs.push(found);
        self.graphs.last().map(|(_, graph)| graph)
    }

    /// Keeps a graph, in place of the least recently launched one.
    pub fn keep(&mut self, hash: u64, graph: CapturedGraph) {
        if self.graphs.len() == Self::KEPT {
            self.graphs.remove(0);
        }
        self.graphs.push((hash, graph));
    }

    /// Forgets which steps ran: from now on they may launch something else.
    pub fn begin_anew(&mut self) {
        self.seen.clear();
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        self.driver.destroy_graph(self.graph);
    }
}
