//! Flags of the commands that print what shells and manuals need.

use clap::Args;
use clap_complete::Shell;

/// Flags of `kiln completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell that reads the script
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Flags of `kiln man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The command to describe, instead of kiln as a whole
    #[arg(value_parser = COMMANDS)]
    pub command: Option<String>,
}

/// The names of all commands; one of a command's own comes after it and a hyphen.
pub(super) const COMMANDS: [&str; 12] =
    ["generate", "run", "plan", "bench", "quantize", "lora", "lora-inspect", "doctor", "selftest", "tiny", "completions", "man"];
