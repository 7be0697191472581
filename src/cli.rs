//! The command line. A request takes one way: flags as they are typed (`args`), what they ask for (`request`), the device and the
//! model it runs on (`session`), what is left to decide (`settings`), what the user is told (`report`), and the files that are
//! written (`outputs`). Only `args` and `completions` know clap; once a request exists, every number in it is legal and every file it
//! names was looked at.

pub mod args;
mod bench;
mod completions;
mod device;
mod doctor;
mod hint;
mod names;
mod outputs;
mod plan;
mod report;
mod request;
mod run;
mod session;
mod settings;
mod stdout;
mod tiny;

pub use bench::{BenchRequest, bench};
pub use completions::{completions, man};
pub use doctor::doctor;
pub use hint::{SAVE_MEMORY, hint, message};
pub use outputs::Outputs;
pub use plan::plan;
pub use request::{ImageRequest, Setup, random_seed};
pub use run::{GenerateRequest, generate};
pub use stdout::{STDOUT, reader_left};
pub use tiny::tiny;

use crate::text::shown;
use args::{Cli, Command, GenerateArgs};
use clap::Parser;
use std::ffi::OsString;

/// Reads the arguments of a process, its own name first. Asking for help or the version is an "error" too: the text to print,
/// and the code to end with, are in it.
///
/// A first argument that names a command is that command; everything else is the flags of `generate`. So a prompt that is
/// spelled like a command needs `kiln generate`, and the value of an option is never mistaken for one.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let Cli { command, generate } = Cli::try_parse_from(&args).map_err(|error| {
        // An error repeats what was typed, or what a script passed on. Said again with that made harmless it is the same error.
        let harmless = args.iter().map(|arg| OsString::from(shown(&arg.to_string_lossy())));
        if error.use_stderr() { Cli::try_parse_from(harmless).err().unwrap_or(error) } else { error }
    })?;
    Ok(command.unwrap_or_else(|| Command::Generate(Box::<GenerateArgs>::new(generate))))
}
