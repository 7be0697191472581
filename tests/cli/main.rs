//! The program: its arguments, what it prints and writes, what it refuses, and how it ends.

mod arguments;
mod bad_input;
mod bench;
mod comfy;
mod completions;
mod doctor;
mod drawing;
mod editing;
mod edits;
mod exit_codes;
mod generate;
mod guard;
mod inputs;
mod layer_formats;
mod lora;
mod metadata;
mod output;
mod previews;
mod process;
mod quantize;
mod replay;
mod run;
mod schema;
mod serve;
mod show;
