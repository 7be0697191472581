//! `kiln tiny`: writes the tiny random model in a layout in which real models are published.

use super::args::{DTypeArg, LayoutArg};
use super::stdout::{line_of, print};
use super::{Process, Subcommand};
use crate::terminal::Verbosity;
use clap::Args;
use kiln::error::{Error, Result};
use std::io::{self, ErrorKind};
use std::path::PathBuf;

/// Write the tiny random model to a folder, in the layout of real models
#[derive(Args, Debug)]
#[command(override_usage = "kiln tiny [OPTIONS] <DIR>")]
pub struct TinyArgs {
    /// Write to this folder, which must be new or empty
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,

    /// Choose how files and tensors are named
    #[arg(long, value_enum, default_value = "diffusers")]
    pub layout: LayoutArg,

    /// Set the dtype of the weights
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DTypeArg,
}

impl Subcommand for TinyArgs {
    fn run(self: Box<Self>, Process { signals, out, .. }: Process<'_>) -> Result<()> {
        signals.terminal(Verbosity::Normal);
        let folder = &self.folder;
        let refused = |source| Error::Write { path: folder.clone(), source };
        let occupied = match std::fs::read_dir(folder) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(refused(error)),
        };
        if occupied {
            return Err(refused(io::Error::new(ErrorKind::DirectoryNotEmpty, "the folder is not empty")));
        }
        kiln::write_tiny_model(folder, self.layout.into(), self.dtype.into(), &signals.stop)?;
        print(out, &line_of(folder))
    }
}
