//! kiln: an inference engine for FLUX.2 \[klein\].
//!
//! A prompt becomes tokens, tokens become prompt embeddings, embeddings and noise become latents over a few denoising steps, and
//! latents become pixels. [`Engine`] runs these stages in order.
//!
//! Generating an image takes a model, a job and a backend (`examples/generate.rs` is the whole program):
//!
//! ```ignore
//! let model = kiln::open("path/to/FLUX.2-klein-4B")?;
//! let job = kiln::Job::new("a red fox in the snow", 7, &model.defaults, model.variant)?;
//! let backend = Box::new(kiln::open_gpu(0)?);
//! let mut engine = kiln::Engine::load(backend, model, kiln::LoadOptions::default(), &Silent)?;
//! engine.generate(&job, &Silent, &mut |generated| save(generated.image))?;
//! ```
//!
//! [`estimate()`] computes the FLOPs and memory of a job without reading a weight, and [`OpenModel::check_memory`] checks
//! that it fits into a backend's memory. The fields of [`Job`] are public: size, steps, guidance scale, seeds and reference images
//! can be set. [`service::Service`] runs an engine on a thread of its own for many callers. `docs/library.md` lists every public
//! item; `ARCHITECTURE.md` describes the internals.

// The internals. The public modules below re-export what callers need from private ones.
mod adapter;
pub mod api;
mod backend;
pub mod base64;
mod checkpoint;
mod component;
mod config;
mod dump;
pub mod edit;
pub mod error;
mod files;
pub mod image;
pub mod inspect;
mod json;
pub mod locate;
pub mod memory;
pub mod metadata;
pub mod microbench;
mod model;
mod names;
mod noise;
pub mod output;
mod pipeline;
pub mod predict;
pub mod progress;
pub mod quantize;
mod reference;
mod sampler;
pub mod selftest;
mod sequence;
pub mod service;
mod tensor;
pub mod text;
pub mod threads;
mod tiny;
mod tokenizer;
pub mod trace;
mod words;

pub use component::{Component, PerComponent};
pub use config::{
    Configs, Guidance, GuidedBy, MODELS, ModelDefaults, ModelSize, ModelSpec, PreviewTable, Variant, VariantSpec, display_name,
};
pub use dump::{NoiseFile, is_dump, read_noise};
pub use error::{Error, Result};
pub use files::read as read_file;
pub use model::{AttentionFormat, Nvfp4Math, PlainHeads, PlainInput};
pub use names::{LayerRole, Layout};
pub use noise::{CHANNELS, NoiseKind};
pub use pipeline::{
    AdapterUse, AttentionFormatCount, Engine, Estimate, EstimateRequest, Expansion, Formats, GeneratedImage, Job, KindFormat,
    LoadOptions, Noise, OpenModel, ReferenceInput, Start, estimate,
};
pub use reference::{DecodedReference, PreparedReference};
pub use sampler::Sigmas;
pub use sequence::{Grid, Pixels, SequenceLayout};
pub use tensor::{DType, Nvfp4Layout, Precision};
pub use tiny::write_to as write_tiny_model;
pub use tokenizer::{MAX_PROMPT_BYTES, Padding, SHORTEN, check_length};
pub use words::unknown as unknown_words;

/// Backends: the devices that run a model, and GPU properties that are known before a model is opened.
pub mod device {
    pub use crate::backend::cpu::Cpu;
    pub use crate::backend::cuda::driver::DeviceInfo;
    pub use crate::backend::cuda::{
        ARCHS, Arch, CAPABILITY, Cuda, Kernel, NVCC, Tile, devices, driver_release, fp8_accumulate, gemm_formats, has_driver,
        kernels_of,
    };
    pub use crate::backend::{Backend, Fp8Accumulate, GemmFormats, OpKind};
    pub use kiln_numerics::math::instruction_set;
}

/// Adapters: LoRA and LoKr files, and the layers they belong to.
pub mod lora {
    pub use crate::adapter::{
        Adapter, AdapterMode, Adapters, Contents, Layer, LayerContents, LayerTargets, Notes, Product, Spelling,
    };
}

/// Single ops on any [`Backend`](crate::device::Backend), for kernel benchmarks; `examples/op.rs` runs one.
pub mod ops {
    pub use crate::backend::{Op, Role};
    pub use crate::tensor::{Arena, Bytes, Region, Tensor, WeightSlice};
}

/// The library's internals, for kiln's own tests and benchmarks. Nothing here is stable.
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals {
    macro_rules! open {
        ($($module:ident)*) => { $(pub mod $module { pub use crate::$module::*; })* };
    }
    open! {
        adapter backend checkpoint component config dump edit files model names noise pipeline reference sampler sequence tensor tiny tokenizer
        words
    }
}

/// Opens a GPU. Kernels that were never run on its architecture are used only if they pass a self-test. The test takes a second,
/// and its result is kept in the user's cache folder.
pub fn open_gpu(device: usize) -> Result<device::Cuda> {
    let caches = locate::Environment::of_process(None).caches();
    Ok(selftest::open(device, std::sync::Arc::default(), &selftest::Records::below(caches.as_deref()))?.0)
}

/// Opens a model by name: a folder, a repository in the Hugging Face cache, or `tiny`. Checks the name, shape and dtype of every
/// tensor, but reads no weight yet.
pub fn open(name: &str) -> Result<OpenModel> {
    let environment = locate::Environment::of_process(None);
    let request = locate::LocateRequest { model: Some(name.into()), environment, ..Default::default() };
    OpenModel::open(&locate::locate(&request)?, None)
}
