//! LoRA branches. A layer whose adapters are not merged into its weight computes `W x + up (down x)` with two thin matrices. All
//! branches share one memory region. Switching adapters uploads only that region. Adapters of the same ranks reuse its addresses.

use super::formats::Formats;
use super::result_cache::{ResultCache, Source};
use crate::adapter::{AdapterSet, Adapters, MAX_RANK};
use crate::backend::{Backend, Linear, LoraBranch, Role};
use crate::error::{Error, Remedy, Result};
use crate::model::LayerFormat;
use crate::names::LayerId;
use crate::tensor::{ALIGN, Arena, Bytes, Precision, Region, Scaling, Tensor, WeightSlice};
use crate::trace;
use rayon::prelude::*;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

/// The adapters of a job: its own, or the model's. Fails if they differ and the model's adapters are merged into its weights.
pub fn adapters_of<'a>(
    job: Option<&'a Adapters>,
    model: &'a Adapters,
    mut layers: impl Iterator<Item = &'a LayerFormat>,
) -> Result<(&'a Adapters, AdapterSet)> {
    let own = model.id();
    let Some(others) = job else { return Ok((model, own)) };
    let set = others.id();
    if set == own {
        return Ok((model, own));
    }
    if let Some(layer) = layers.find(|layer| layer.merged) {
        let what = format!("the job cannot use other adapters than the model's, which are merged into `{}`", layer.id);
        return Err(Error::Usage { what, hint: Some(Remedy::UnmergedAdapters) });
    }
    Ok((others, set))
}

/// The layers with a LoRA branch, and the branch ranks. They decide which ops a job has.
pub type Ranks = Arc<[(LayerId, usize)]>;

/// The LoRA branches of a set of adapters.
#[derive(Default)]
pub struct Branches {
    pub set: AdapterSet,
    pub ranks: Ranks,
    /// The matrices of each branch.
    places: Vec<LoraBranch>,
    /// Bytes of the branch matrices.
    pub branch_bytes: u64,
    /// Total bytes, including scratch space for merging.
    pub bytes: u64,
    /// The values of all branches in one piece. `None` if only shapes matter.
    values: Option<(Tensor, WeightSlice)>,
}

impl Branches {
    /// Allocates branches for the layers whose adapters are not merged.
    pub fn place<'a>(
        (adapters, set): (&Adapters, AdapterSet),
        layers: impl Iterator<Item = &'a LayerFormat>,
        precision: Precision,
    ) -> Result<Self> {
        let (mut region, mut ranks, mut places) = (Arena::new(Region::Adapters), Vec::new(), Vec::new());
        let (dtype, mut known, mut merged) = (precision.activations(), HashSet::new(), 0);
        for layer in layers {
            known.insert(layer.id);
            let (rows, cols) = (layer.weight.rows(), layer.weight.cols());
            let rank = adapters.rank(layer.id, [rows, cols])?;
            let Some(rank) = rank else { continue };
            if layer.merged {
                let mut room = Arena::new(Region::Adapters);
                if Adapters::is_added_in_place(rank, layer.parts.iter().map(|part| [part.stored, part.held])) {
                    Adapters::place_factors(&mut room, Adapters::padded(rank), [rows, cols])?;
                }
                merged = merged.max(room.peak());
                continue;
            }
            if rank > MAX_RANK {
                let what = format!("adapters add a rank of {rank} to `{}`; a LoRA branch has at most {MAX_RANK}", layer.id);
                return Err(Error::Usage { what, hint: Some(Remedy::MergeAdapters) });
            }
            let rank = Adapters::padded(rank);
            places.push(LoraBranch { down: region.alloc(rank, cols, dtype)?, up: region.alloc(rows, rank, dtype)? });
            ranks.push((layer.id, rank));
        }
        let mut all = adapters.effective().flat_map(|(adapter, _)| &adapter.layers);
        if let Some(layer) = all.find(|layer| !known.contains(&layer.target.id)) {
            let what = format!("an adapter was opened for another model: this one has no `{}`", layer.target.id);
            return Err(Error::Usage { what, hint: None });
        }
        let branch_bytes = region.peak();
        Ok(Self { set, ranks: ranks.into(), places, branch_bytes, bytes: branch_bytes + merged, values: None })
    }

    /// Adds the values, ready to be uploaded. `adapters` are the ones passed to [`Branches::place`].
    fn with_values(self, adapters: &Adapters) -> Result<Self> {
        let _span = trace::span("prepare adapters");
        let Some(dtype) = self.places.first().map(|place| place.down.dtype) else { return Ok(self) };
        let mut bytes = vec![0; self.branch_bytes as usize];
        let mut pieces = Vec::with_capacity(self.places.len());
        let (mut rest, mut at) = (&mut bytes[..], 0);
        for (&(id, rank), LoraBranch { down, up }) in self.ranks.iter().zip(&self.places) {
            let [down, up] = [down, up].map(|tensor| {
                let extent = tensor.extent();
                let (own, after) =
                    std::mem::take(&mut rest)[(extent.start - at) as usize..].split_at_mut((extent.end - extent.start) as usize);
                (rest, at) = (after, extent.end);
                own
            });
            pieces.push((id, rank, [down, up]));
        }
        pieces.into_par_iter().for_each(|(id, rank, matrices)| adapters.write_branch(id, rank, dtype, matrices));
        adapters.verify()?;
        // Uploading one piece is much faster than uploading hundreds of small ones.
        let cols = dtype.elements(ALIGN as usize);
        let rows = (self.branch_bytes / ALIGN) as usize;
        let whole = Tensor { region: Region::Adapters, dtype, offset: 0, rows, cols, stride: cols, scaling: Scaling::Unscaled };
        let values = WeightSlice::plain(Bytes::new(Arc::new(bytes)), dtype, rows);
        Ok(Self { values: Some((whole, values)), ..self })
    }

    /// Replaces the branches of layers with these.
    pub fn attach<'a>(&self, layers: impl Iterator<Item = &'a mut Linear>) {
        for layer in layers {
            let found = self.ranks.iter().position(|(id, _)| Some(*id) == layer.id);
            layer.lora = found.map(|at| self.places[at]);
        }
    }
}

/// The LoRA branches of an engine: prepared sets, and the set in the backend's memory.
#[derive(Default)]
pub struct SideBranches {
    /// The branch sets of the latest jobs, the last one at the end.
    prepared: Vec<Arc<Branches>>,
    /// Bytes reserved in the backend's memory.
    reserved: u64,
    /// The set in the backend's memory.
    uploaded: AdapterSet,
}

impl SideBranches {
    /// The most sets that stay prepared, and their most bytes. A single set may be larger.
    const KEPT: usize = 16;
    const MOST: u64 = 2 << 30;

    /// Prepares the branches of a set of adapters for these layers, ready to be uploaded.
    pub fn prepare<'a>(
        &mut self,
        (adapters, set): (&Adapters, AdapterSet),
        layers: impl Iterator<Item = &'a LayerFormat>,
        precision: Precision,
    ) -> Result<Arc<Branches>> {
        let known = self.prepared.iter().position(|branches| branches.set == set);
        let branches = match known {
            Some(at) => self.prepared.remove(at),
            None => Arc::new(Branches::place((adapters, set), layers, precision)?.with_values(adapters)?),
        };
        self.prepared.push(branches.clone());
        let bytes = |all: &[Arc<Branches>]| all.iter().map(|branches| branches.bytes).sum::<u64>();
        while self.prepared.len() > Self::KEPT || self.prepared.len() > 1 && bytes(&self.prepared) > Self::MOST {
            self.prepared.remove(0);
        }
        Ok(branches)
    }

    /// Bytes to allocate for branches, and bytes that are freed for them.
    pub fn growth(&self, branches: &Branches) -> (u64, u64) {
        if branches.bytes > self.reserved { (branches.bytes, self.reserved) } else { (0, 0) }
    }

    /// Brings branches into the backend's memory: copies them from the cache, or uploads them.
    pub fn upload(&mut self, be: &mut dyn Backend, branches: &Branches, cache: &mut ResultCache) -> Result<()> {
        if branches.set == self.uploaded {
            return Ok(());
        }
        let _span = trace::span("upload adapters");
        // If this fails, the previous branches are gone.
        self.uploaded = AdapterSet::default();
        if branches.bytes > self.reserved {
            self.reserved = 0;
            be.reserve(Region::Adapters, branches.bytes)?;
            self.reserved = branches.bytes;
        }
        if let Some((whole, values)) = &branches.values {
            // Where ops read the host's bytes, a cached copy would save nothing.
            let source = (cache.is_on() && !be.reads_files()).then(|| Source::Adapters(branches.set.clone()));
            cache.copy_or(be, source, &[*whole], |be| be.upload(*whole, Role::Linear, std::slice::from_ref(values)))?;
        }
        self.uploaded = branches.set.clone();
        Ok(())
    }
}

/// How kiln applied an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterUse {
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of the file, as hexadecimal digits.
    pub digest: String,
    /// The strength.
    pub strength: f32,
    /// Number of its layers that the model has.
    pub layers: usize,
    /// How many of these layers are merged into weights.
    pub merged: usize,
    /// How many of these layers have a LoRA branch. Zero if the strength is zero.
    pub branches: usize,
    /// Number of its layers that the model does not have.
    pub unmatched: usize,
}

impl Formats {
    /// How adapters are applied to a model whose layers have these formats.
    pub fn adapter_uses(&self, adapters: &Adapters) -> Vec<AdapterUse> {
        let merged: HashSet<LayerId> = self.layers.iter().filter(|layer| layer.merged).map(|layer| layer.id).collect();
        let of = |(adapter, strength): &(crate::adapter::Adapter, f32)| {
            let layers = adapter.layers.len();
            let count = adapter.layers.iter().filter(|layer| merged.contains(&layer.target.id)).count();
            let (merged, branches) = if *strength == 0.0 { (0, 0) } else { (count, layers - count) };
            let (path, digest) = (adapter.path.clone(), adapter.digest.clone());
            AdapterUse { path, digest, strength: *strength, layers, merged, branches, unmatched: adapter.unmatched.len() }
        };
        adapters.0.iter().map(of).collect()
    }
}
