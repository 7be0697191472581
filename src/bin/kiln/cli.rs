//! The command line. A request passes through one module after the other: `args` defines the flags, `request` checks them,
//! `session` opens the device and the model, `settings` resolves defaults, `report` informs the user, and `outputs` writes the
//! files. Only `args` and `completions` depend on clap; in a request every number is legal and every input file was checked.

mod adapters;
pub mod args;
mod batch;
mod bench;
mod completions;
mod device;
mod doctor;
pub mod formats;
mod hint;
mod lora;
mod names;
mod outputs;
mod plan;
mod quantize;
mod report;
mod request;
mod run;
pub mod selftest;
mod session;
mod settings;
mod stdout;
mod support;
mod tiny;
mod trace;
mod writer;

pub use batch::{BatchRequest, batch};
pub use bench::{BenchRequest, bench};
pub use completions::{completions, man};
pub use doctor::doctor;
pub use hint::{REPORT_BUG, SAVE_MEMORY, hint, message};
pub use lora::lora;
pub use plan::plan;
pub use quantize::quantize;
pub use request::random_seed;
pub use run::{GenerateRequest, generate};
pub use selftest::selftest;
pub use stdout::{STDOUT, reader_left};
pub use tiny::tiny;
pub use trace::TraceFile;

use args::{Cli, Command, GenerateArgs};
use clap::Parser;
use kiln::text::shown;
use std::ffi::OsString;

/// Parses the arguments of a process, beginning with its own name. A request for help or the version is returned as an error, too;
/// the error holds the text to print and the exit code.
///
/// If the first argument names a command, it is that command; otherwise all arguments are flags of `generate`. So a prompt that is
/// spelled like a command needs `kiln generate`, and the value of an option is never mistaken for a command.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let Cli { command, generate } = Cli::try_parse_from(&args).map_err(|error| {
        // clap quotes arguments as they are, including control characters. Parsing the escaped arguments gives the same error with
        // a text that is safe to print.
        let harmless = args.iter().map(|arg| OsString::from(shown(&arg.to_string_lossy())));
        if error.use_stderr() { Cli::try_parse_from(harmless).err().unwrap_or(error) } else { error }
    })?;
    Ok(command.unwrap_or_else(|| Command::Generate(Box::<GenerateArgs>::new(generate))))
}
