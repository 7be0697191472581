//! The flag for a trace.

use clap::Args;
use std::path::PathBuf;

/// The flag for a trace.
#[derive(Args, Debug, Default)]
pub struct TraceArgs {
    /// Write when everything ran to a JSON file for ui.perfetto.dev: threads, steps, GPU kernels
    ///
    /// Also if the run fails or is interrupted. The image is the same; steps take a little longer on a GPU, because kernels are
    /// timed one by one: none begins before the one before it has ended, and steps are not captured as CUDA graphs.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub trace: Option<PathBuf>,
}
