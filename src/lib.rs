//! kiln: an inference engine for FLUX.2 \[klein\].
//!
//! A prompt becomes tokens, tokens become prompt embeddings, embeddings and noise become latents over a few denoising steps, and
//! latents become pixels. [`pipeline`] runs these stages in order; [`model`] holds the three networks, written once over the
//! [`Backend`] trait; the modules between are pure. `ARCHITECTURE.md` describes the layers, what may call what, and why.
//!
//! Generating an image takes a model, a job and a backend (`examples/generate.rs` is the whole program):
//!
//! ```ignore
//! let model = kiln::open("path/to/FLUX.2-klein-4B")?;
//! let job = kiln::Job::new("a red fox in the snow", 7, &model.conventions, model.variant)?;
//! let backend = Box::new(kiln::open_gpu(0)?);
//! let mut engine = kiln::Engine::load(backend, model, kiln::LoadOptions::default(), &Silent)?;
//! engine.generate(&job, &Silent, &mut |generated| save(generated.image))?;
//! ```
//!
//! [`OpenModel::estimate`] computes the FLOPs and memory of a job without reading a weight, and [`OpenModel::check_memory`] checks
//! that it fits into a backend's memory. The fields of [`Job`] are public: size, steps, guidance scale, seeds and reference images
//! can be set.
//!
//! [`Backend`]: backend::Backend

pub mod adapter;
pub mod backend;
pub mod checkpoint;
pub mod config;
pub mod dump;
pub mod error;
pub mod files;
pub mod image;
pub mod inspect;
pub mod locate;
pub mod memory;
pub mod microbench;
pub mod model;
pub mod names;
pub mod noise;
pub mod output;
pub mod part;
pub mod pipeline;
pub mod predict;
pub mod progress;
pub mod quantise;
pub mod reference;
pub mod sampler;
pub mod selftest;
pub mod sequence;
pub mod service;
pub mod tensor;
pub mod text;
pub mod threads;
pub mod tiny;
pub mod tokenizer;
pub mod trace;
pub mod words;

pub use error::{Error, Result};
pub use pipeline::{Engine, Job, LoadOptions, OpenModel};

/// Opens a GPU. Kernels that were never run on its architecture are used only if they pass a self-test there, which takes a second
/// and is remembered in the user's cache folder.
pub fn open_gpu(device: usize) -> Result<backend::cuda::Cuda> {
    let caches = locate::Environment::of_process(None).caches();
    Ok(selftest::open(device, std::sync::Arc::default(), &selftest::Records::below(caches.as_deref()))?.0)
}

/// Opens the model that `kiln --model NAME` names: a folder, a repository in the Hugging Face cache, or `tiny`. Every tensor is
/// checked by name, shape and dtype; no weight is read yet.
pub fn open(name: &str) -> Result<OpenModel> {
    let environment = locate::Environment::of_process(None);
    let request = locate::LocateRequest { model: Some(name.into()), environment, ..Default::default() };
    OpenModel::open(&locate::locate(&request)?, None)
}
