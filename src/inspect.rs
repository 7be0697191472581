//! The first look at real weights: whether the files are known ones ([`identify`]), whether every value in them is finite
//! ([`scan`]) and there at all ([`refuse_unwritten`]), and whether the text encoder gives the values that were published for it
//! ([`published`]). [`digests`] hashes whole files, which takes longer and is the only thing that tells values apart.

mod digest;
mod finite;
mod known;
pub mod published;

pub use digest::{FileDigest, digests};
pub use finite::{FiniteReport, NonFiniteTensor, refuse_unwritten, scan};
pub use known::{Finding, KNOWN, KnownFile, Likeness, Tensors, fingerprint, identify, published_digest};
