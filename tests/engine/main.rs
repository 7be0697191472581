//! The library: models and ops on each backend, formats and adapters, memory and traces.
#![allow(clippy::print_stdout)] // figures, shown with --nocapture

mod adapters;
mod backends;
mod builtin;
mod calibration;
mod dev;
mod editing;
mod encode;
mod formats;
mod lora;
mod model;
mod modes;
mod ops;
mod predictions;
mod previews;
mod quantized;
mod runtime;
mod service;
mod tiling;
mod trace;
