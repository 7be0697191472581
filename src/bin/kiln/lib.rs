//! The program `kiln` as a library, for front ends that carry it, such as an extension module with a `kiln` command of its own:
//! [`run`] takes the arguments of a process and returns its exit code. `main.rs` compiles the same modules.

#[cfg(feature = "builtin")]
mod builtin;
#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod draw;
mod program;
#[cfg(feature = "serve")]
mod serve;
#[doc(hidden)]
pub mod terminal;

pub use program::run;
