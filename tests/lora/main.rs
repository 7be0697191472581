//! Adapters: LoRA and LoKr in every spelling against outputs recorded from diffusers and PEFT, hostile files, and the trained example.

#![allow(clippy::print_stdout)] // figures, shown with --nocapture

#[path = "../common/mod.rs"]
mod common;
mod file;
mod goldens;
mod hostile;
mod mutations;
#[path = "../common/random.rs"]
mod random;
mod scratch;
