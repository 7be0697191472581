//! From a prompt to an image: [`OpenModel`] opens and checks a model's files, [`Engine`] loads its weights and generates the images
//! of a [`Job`], and [`estimate()`] computes beforehand what a job costs.

mod branches;
mod engine;
mod estimate;
mod fit;
mod formats;
mod inputs;
mod job;
mod open;
mod prepared;
mod preview;
mod result_cache;
mod stages;
mod text_layer;
mod values;
mod weights;

pub use branches::AdapterUse;
pub use engine::Engine;
pub use estimate::{Estimate, EstimateRequest, OpTime, estimate};
pub use formats::{AttentionFormatCount, Expansion, Formats, KindFormat};
pub use job::{GeneratedImage, Job, LoadOptions, Noise, ReferenceInput, Start};
pub use open::OpenModel;
