//! Caches results across jobs: encoded prompts, references, their keys and values, and adapters. The key is what a result was
//! computed from. Results stay in a memory region of their own and are copied into a job's working memory. So a job has the same
//! ops and addresses with and without a cache hit.

use crate::adapter::AdapterSet;
use crate::backend::{Backend, Op};
use crate::error::Result;
use crate::sequence::Grid;
use crate::tensor::{ALIGN, Region, Scaling, Tensor};
use crate::tokenizer::Tokens;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// The cache key of a result: what it was computed from.
#[derive(Clone, PartialEq, Eq)]
pub enum Source {
    /// A prompt: its tokens, and the adapters.
    Prompt(Tokens, AdapterSet),
    /// A reference image: the digest of its pixels, and its size.
    Reference([u8; 32], Grid),
    /// Cached keys and values: the references they belong to, in order, and the adapters.
    KeyValues(Vec<Source>, AdapterSet),
    /// LoRA branches: the adapters they belong to.
    Adapters(AdapterSet),
}

impl Source {
    /// The cache key of a reference image.
    pub fn reference(grid: Grid, pixels: &[f32]) -> Self {
        // Hashing a megabyte takes a thread about a millisecond.
        const PIECE: usize = 1 << 18;
        let digest = |values: &[f32]| {
            let mut hash = Sha256::new();
            for values in values.chunks(64) {
                let mut bytes = [0; 256];
                bytes.chunks_exact_mut(4).zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
                hash.update(&bytes[..4 * values.len()]);
            }
            hash.finalize()
        };
        let pieces: Vec<_> = pixels.par_chunks(PIECE).map(digest).collect();
        let mut hash = Sha256::new();
        pieces.iter().for_each(|piece| hash.update(piece));
        Self::Reference(hash.finalize().into(), grid)
    }
}

/// The cached results, in a ring: the next one replaces the oldest.
#[derive(Default)]
pub struct ResultCache {
    bytes: u64,
    next: u64,
    results: Vec<(Source, Vec<Tensor>)>,
}

impl ResultCache {
    /// Drops all results and sets the size of the cache in bytes. Zero turns it off.
    pub fn reserve(&mut self, be: &mut dyn Backend, bytes: u64) -> Result<()> {
        *self = Self::default();
        be.reserve(Region::Cache, bytes)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Whether results are cached.
    pub fn is_on(&self) -> bool {
        self.bytes > 0
    }

    /// Drops all results, for example after a job that failed.
    pub fn forget(&mut self) {
        (self.next, self.results) = (0, Vec::new());
    }

    /// Fills these tensors with a result: from the cache, or by computing and caching it. Without a source, nothing is looked up or cached.
    pub fn copy_or(
        &mut self,
        be: &mut dyn Backend,
        source: Option<Source>,
        to: &[Tensor],
        compute: impl FnOnce(&mut dyn Backend) -> Result<()>,
    ) -> Result<()> {
        let Some(source) = source else { return compute(be) };
        if let Some((_, kept)) = self.results.iter().find(|(of, _)| *of == source) {
            return to.iter().zip(kept).try_for_each(|(&out, &x)| be.run(Op::Copy { out, x }));
        }
        compute(be)?;
        let bytes: u64 = to.iter().map(|tensor| tensor.bytes().next_multiple_of(ALIGN)).sum();
        if bytes > self.bytes || to.iter().any(|tensor| tensor.scaling != Scaling::Unscaled) {
            return Ok(());
        }
        let first = if self.next + bytes > self.bytes { 0 } else { self.next };
        let place = first..first + bytes;
        let is_apart = |other: &Tensor| other.extent().end <= place.start || place.end <= other.extent().start;
        self.results.retain(|(_, others)| others.iter().all(is_apart));
        self.next = first;
        let mut kept = Vec::with_capacity(to.len());
        for &x in to {
            let out = Tensor { region: Region::Cache, offset: self.next, stride: x.cols, ..x };
            be.run(Op::Copy { out, x })?;
            self.next += x.bytes().next_multiple_of(ALIGN);
            kept.push(out);
        }
        self.results.push((source, kept));
        Ok(())
    }
}
