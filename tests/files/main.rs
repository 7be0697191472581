//! Files and prompts that others wrote, and what reading them costs; and the memory that a run takes. An allocator counts.
#![allow(clippy::print_stdout)] // figures, shown with --nocapture

mod checkpoint;
mod limits;
mod lora;
mod memory;
mod prompts;
mod references;

#[global_allocator]
static ALLOCATOR: common::cost::Counting = common::cost::Counting;
