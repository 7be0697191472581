//! kiln: a FLUX.2 [klein] inference engine.
//!
//! A prompt becomes tokens, tokens become text features, features and noise become latents over a few steps, latents become
//! pixels. [`pipeline`] is that straight line; [`model`] holds the three networks, written once over the [`backend`] seam;
//! everything between is pure. `ARCHITECTURE.md` tells what may call what, and why.

pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod dump;
pub mod error;
pub mod files;
pub mod image;
pub mod locate;
pub mod memory;
pub mod microbench;
pub mod model;
pub mod names;
pub mod noise;
pub mod output;
pub mod part;
pub mod pipeline;
pub mod progress;
pub mod reference;
pub mod sampler;
pub mod sequence;
pub mod tensor;
pub mod terminal;
pub mod text;
pub mod threads;
pub mod tiny;
pub mod tokenizer;
pub mod words;
