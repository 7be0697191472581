//! Files and prompts from elsewhere, and the cost of reading them. Also a run's memory, by a counting allocator.
#![allow(clippy::print_stdout)] // figures, shown with --nocapture

mod checkpoint;
mod fuzz;
mod limits;
mod lora;
mod memory;
mod metadata;
mod prompts;
mod references;

#[global_allocator]
static ALLOCATOR: common::cost::Counting = common::cost::Counting;
