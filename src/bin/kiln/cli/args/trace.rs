//! The flag for a trace.

use clap::Args;
use std::path::PathBuf;

/// The flag for a trace.
#[derive(Args, Clone, Debug, Default)]
pub struct TraceArgs {
    /// Write a timeline of the run to a JSON file for ui.perfetto.dev
    ///
    /// The timeline has threads, steps and GPU kernels. kiln writes it even if the run fails or is interrupted, unless a flag is wrong.
    /// The image is the same. On a GPU, steps take a little longer because kernels are timed one by one. No kernel begins before the
    /// previous one has ended, and steps are not captured as CUDA graphs.
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub trace: Option<PathBuf>,
}
