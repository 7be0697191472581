//! Captured CUDA graphs.

use super::driver::{Driver, Graph, Stream};
use crate::error::Result;
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

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        self.driver.destroy_graph(self.graph);
    }
}
