//! The executable `kiln`: the program of `program.rs`, with an allocator that ends it where memory does.

#[cfg(target_os = "linux")]
mod allocator;
#[cfg(feature = "builtin")]
mod builtin;
mod cli;
mod draw;
mod program;
#[cfg(feature = "serve")]
mod serve;
mod terminal;

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    allocator::configure();
    ExitCode::from(program::run(std::env::args_os()))
}
