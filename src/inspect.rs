//! Checks a model's files before they are trusted: whether the files are known ones ([`identify`]), whether every value in them
//! is finite ([`scan`]) and was written at all ([`refuse_unwritten`]), and whether the text encoder gives the published values
//! ([`published`]). [`digests`] hashes whole files, which takes longer but is the only way to compare values.

mod digest;
mod finite;
mod known;
mod model_id;
pub mod published;

pub use digest::{FileDigest, digests};
pub use finite::{FiniteReport, NonFiniteTensor, refuse_unwritten, scan};
pub use known::{Finding, KNOWN, KnownFile, Likeness, Tensors, fingerprint, identify, published_digest};
pub use model_id::ModelSamples;
