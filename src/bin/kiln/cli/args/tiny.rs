//! The flags of `kiln tiny`.

use super::{DTypeArg, LayoutArg};
use clap::Args;
use std::path::PathBuf;

/// Flags of `kiln tiny`.
#[derive(Args, Debug)]
pub struct TinyArgs {
    /// The folder to write; it must not hold anything yet
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,

    /// How files and tensors are named
    #[arg(long, value_enum, default_value = "diffusers")]
    pub layout: LayoutArg,

    /// Dtype of the weights
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DTypeArg,
}
