//! Captured CUDA graphs, and the steps that they are of.

use super::driver::{Driver, Graph, Stream};
use crate::backend::StepKey;
use crate::error::Result;
use std::collections::HashMap;
use std::rc::Rc;

/// Launches that were captured from a stream, ready to be launched again as one.
pub struct CapturedGraph {
    driver: Rc<dyn Driver>,
    graph: Graph,
}

impl CapturedGraph {
    /// Captures what `body` launches on `stream`, without running it.
    pub fn capture(driver: &Rc<dyn Driver>, stream: Stream, body: impl FnOnce() -> Result<()>) -> Result<Self> {
        driver.begin_capture(stream)?;
        let issued = body();
        // The capture has to end whatever happened inside it, or the stream is lost.
        let graph = driver.end_capture(stream).map(|graph| Self { driver: driver.clone(), graph });
        issued?;
        graph
    }

    /// Queues the captured launches.
    pub fn launch(&self, stream: Stream) -> Result<()> {
        self.driver.launch_graph(stream, self.graph)
    }
}

/// The steps that recur. A graph is found by what it launches, so it outlives the job that it was captured in: the next one whose step
/// launches the same kernels with the same parameters, addresses among them, takes it.
#[derive(Default)]
pub struct Steps {
    /// Hashes of the launches of steps that ran one by one since working memory was reserved.
    seen: HashMap<StepKey, u64>,
    /// Graphs by that hash, the one that was launched last at the end.
    graphs: Vec<(u64, CapturedGraph)>,
}

impl Steps {
    /// Graphs that are kept: those of a prompt and of a negative prompt for a few sizes.
    const KEPT: usize = 16;

    /// The hash of a step's launches, if it ran one by one.
    pub fn launches(&self, key: StepKey) -> Option<u64> {
        self.seen.get(&key).copied()
    }

    /// A step ran one by one, and launched what has this hash.
    pub fn saw(&mut self, key: StepKey, hash: u64) {
        self.seen.insert(key, hash);
    }

    /// The graph of these launches, if they were captured.
    pub fn graph(&mut self, hash: u64) -> Option<&CapturedGraph> {
        let place = self.graphs.iter().position(|(of, _)| *of == hash)?;
        let found = self.graphs.remove(place);
        self.graphs.push(found);
        self.graphs.last().map(|(_, graph)| graph)
    }

    /// Keeps a graph, in place of the one that was not launched for longest.
    pub fn keep(&mut self, hash: u64, graph: CapturedGraph) {
        if self.graphs.len() == Self::KEPT {
            self.graphs.remove(0);
        }
        self.graphs.push((hash, graph));
    }

    /// What recurs from now on may launch something else.
    pub fn begin_anew(&mut self) {
        self.seen.clear();
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        self.driver.destroy_graph(self.graph);
    }
}
