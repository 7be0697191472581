//! Checkpoints: mapped safetensors files, and the weights of one model part under canonical names.
//!
//! A [`Shard`] is one file whose header has been validated. [`Weights`] collects the shards of a part, maps their names to
//! canonical ones, and returns bytes only after name, shape and dtype were checked. Nothing is copied: a [`Weight`] points into
//! the mapped file.

mod folder;
mod foreign;
mod guard;
mod header;
mod quantised;
mod shard;
mod zeros;

pub use header::{Entry, StoredDtype};
pub use shard::Shard;

use crate::error::{Error, Result};
use crate::names::{self, Layout, Place, Rows, Spelling, TensorSpec};
use crate::part::Part;
use crate::tensor::{Bytes, DType, Stored, WeightPart};
use crate::text::shown_path;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A weight whose name, shape and dtype were checked.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Its rows in order. A vector is one row.
    pub parts: Vec<WeightPart>,
    /// How the op that produces its input has to store it, if that is to be quantised.
    pub input: Option<Stored>,
}

/// The weights of one model part under their canonical names.
#[derive(Clone, Debug)]
pub struct Weights {
    part: Part,
    path: PathBuf,
    shards: Vec<Shard>,
    /// The pieces of each tensor in row order, by canonical name. A piece that no file has is `None`.
    tensors: BTreeMap<String, Vec<Option<Segment>>>,
    /// Tensors that are in no spelling table, each with the index of its shard.
    unknown: Vec<(usize, String)>,
    /// How these files spell names, for messages about missing tensors.
    layout: Layout,
    prefix: &'static str,
    /// Matrices in use that were not yet checked for zeros, and whether each is a lookup table.
    unchecked: Arc<Mutex<Vec<(String, bool)>>>,
}

/// Where rows of a canonical tensor are stored.
#[derive(Clone, Debug)]
struct Segment {
    shard: usize,
    tensor: String,
    rows: Rows,
}

impl Weights {
    /// Opens a `.safetensors` file, or a folder that holds one or holds its shards.
    pub fn open(part: Part, path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::NoModel { path: path.into(), what: format!("the {part} does not exist"), hint: None }
            }
            _ => Error::read(path, e),
        })?;
        let shards = if meta.is_dir() { folder::open(path)? } else { vec![Shard::open(path)?] };
        Self::gather(part, path.into(), shards)
    }

    /// Collects the weights of files that are already open.
    pub fn from_shards(part: Part, shards: Vec<Shard>) -> Result<Self> {
        let path = shards.first().map(|shard| shard.path().to_path_buf()).unwrap_or_default();
        Self::gather(part, path, shards)
    }

    fn gather(part: Part, path: PathBuf, shards: Vec<Shard>) -> Result<Self> {
        let layout = Layout::Diffusers;
        let (tensors, unknown, unchecked) = Default::default();
        let mut weights = Self { part, path, shards, tensors, unknown, layout, prefix: "", unchecked };
        // Adapters and quantised files are refused first, because their tensors would otherwise be reported as faults.
        for shard in &weights.shards {
            refuse_adapter(shard)?;
            quantised::refuse(part, shard)?;
        }
        let mut original = 0i64;
        for (index, shard) in weights.shards.iter().enumerate() {
            for (name, _) in shard.tensors() {
                match names::resolve(part, name) {
                    Place::Weight(spelling) => {
                        original += spelling.layout.map_or(0, |layout| if layout == Layout::Bfl { 1 } else { -1 });
                        weights.prefix = spelling.prefix;
                        place(&weights.shards, &mut weights.tensors, index, name, spelling)?;
                    }
                    Place::Unknown => weights.unknown.push((index, name.into())),
                    Place::Unused | Place::OtherPart | Place::Quantisation(_) => {}
                }
            }
        }
        if original > 0 {
            weights.layout = Layout::Bfl;
        }
        Ok(weights)
    }

    /// The part of the model that these weights belong to.
    pub fn part(&self) -> Part {
        self.part
    }

    /// The file or folder that the weights are in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How most of the names are spelled.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The files that the weights are in.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The source of the weights for display: the one file, or the number of shards and their folder.
    pub fn source(&self) -> String {
        match &*self.shards {
            [only] => shown_path(only.path()),
            shards => format!("{} shards of {}", shards.len(), shown_path(&self.path)),
        }
    }

    /// Fails if one of the files changed since it was opened; see [`Shard::verify`].
    pub fn verify(&self) -> Result<()> {
        self.shards.iter().try_for_each(Shard::verify)
    }

    /// Canonical names of all tensors found, complete or not.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor, or `None` if it, or a piece of it, is missing or does not fit the others.
    pub fn shape(&self, canonical: &str) -> Option<Vec<usize>> {
        let mut whole: Option<Vec<usize>> = None;
        for segment in self.tensors.get(canonical)? {
            let segment = segment.as_ref()?;
            let shape = &self.entry(segment)?.shape;
            // The halves of one tensor together have its shape.
            if segment.rows != Rows::All {
                return Some(shape.clone());
            }
            match &mut whole {
                None => whole = Some(shape.clone()),
                Some(sum) => {
                    if shape.is_empty() || sum.get(1..)? != &shape[1..] {
                        return None;
                    }
                    sum[0] = sum[0].checked_add(shape[0])?;
                }
            }
        }
        whole
    }

    /// The bytes of a tensor, which has to have the given shape.
    pub fn weight(&self, spec: &TensorSpec) -> Result<Weight> {
        let mut parts = self.checked(spec)?;
        if spec.shape.len() < 2 {
            parts.iter_mut().for_each(|part| part.rows = 1);
        }
        Ok(Weight { parts, input: None })
    }

    /// Checks that every tensor of the manifest exists and has the right shape and dtype. Extra tensors are an error in the
    /// transformer, where they mean that it is another model; in other parts their names are returned.
    pub fn check(&self, manifest: &[TensorSpec]) -> Result<Vec<String>> {
        for spec in manifest {
            self.checked(spec)?;
        }
        let known: std::collections::BTreeSet<&str> = manifest.iter().map(|spec| spec.name.as_str()).collect();
        // Layers of a text encoder after the last one that is used are ignored.
        let read = manifest.iter().filter_map(|spec| names::text_layer(&spec.name)).max();
        let unread = |name: &str| read.is_some_and(|last| names::text_layer(name).is_some_and(|layer| layer > last));
        let surplus = self.tensors.iter().filter(|(name, _)| !known.contains(name.as_str()));
        let surplus = surplus.flat_map(|(_, segments)| segments.iter().flatten()).map(|s| (s.shard, s.tensor.clone()));
        let mut extras: Vec<(usize, String)> =
            self.unknown.iter().cloned().chain(surplus).filter(|(_, name)| !unread(name)).collect();
        extras.sort();
        extras.dedup();
        match extras.first() {
            Some((shard, name)) if self.part == Part::Transformer => {
                Err(Error::TensorUnknown { path: self.shards[*shard].path().to_path_buf(), name: name.clone() })
            }
            _ => Ok(extras.into_iter().map(|(_, name)| name).collect()),
        }
    }

    /// Records that a matrix is in use, for [`Weights::check_written`]. A `table` may have rows that are never used.
    pub fn note_used(&self, name: &str, table: bool) {
        self.unchecked.lock().unwrap_or_else(PoisonError::into_inner).push((name.into(), table));
    }

    /// Fails if one of the matrices recorded since the last call is zero where no trained matrix is, because the missing part of an
    /// incomplete download reads as zeros. This reads a few places of each matrix, which is slow from a cold disk and fast from the
    /// page cache, so it is called after the weights were used.
    pub fn check_written(&self) -> Result<()> {
        let unchecked = std::mem::take(&mut *self.unchecked.lock().unwrap_or_else(PoisonError::into_inner));
        unchecked.iter().try_for_each(|(name, table)| self.refuse_zeros(name, *table))
    }

    fn refuse_zeros(&self, name: &str, table: bool) -> Result<()> {
        for segment in self.tensors.get(name).into_iter().flatten().flatten() {
            let shard = &self.shards[segment.shard];
            if let (Some(entry), Some(bytes)) = (shard.entry(&segment.tensor), shard.bytes(&segment.tensor)) {
                // A file that was truncated after it was opened reads as zeros, too; then the error says that it changed.
                zeros::refuse(shard.path(), &segment.tensor, entry, &bytes, table)
                    .map_err(|error| shard.verify().err().unwrap_or(error))?;
            }
        }
        Ok(())
    }

    fn entry(&self, segment: &Segment) -> Option<&Entry> {
        self.shards.get(segment.shard)?.entry(&segment.tensor)
    }

    fn checked(&self, spec: &TensorSpec) -> Result<Vec<WeightPart>> {
        let Some(segments) = self.tensors.get(&spec.name) else { return Err(self.missing(spec, 0)) };
        let mut slices = Vec::with_capacity(segments.len());
        let mut total = 0usize;
        for (piece, segment) in segments.iter().enumerate() {
            let found = segment.as_ref().and_then(|s| Some((s, self.entry(s)?, self.shards[s.shard].bytes(&s.tensor)?)));
            let Some((segment, entry, bytes)) = found else { return Err(self.missing(spec, piece)) };
            let whole = segments.len() == 1 || segment.rows != Rows::All;
            let mut want = spec.shape.clone();
            if let Some(rows) = want.first_mut().filter(|_| !whole) {
                // If the rows of the pieces are not known, only their sum is compared.
                let stacked = (spec.stack.len() == segments.len()).then(|| spec.stack[piece]);
                *rows = stacked.or(entry.shape.first().copied()).unwrap_or(0);
            }
            let slice = self.slice(segment, entry, bytes, &want)?;
            total = total.saturating_add(slice.rows);
            slices.push(slice);
        }
        if Some(&total) != spec.shape.first() {
            let name = names::spell(self.part, self.layout, &spec.name).join(" + ");
            let got = [&[total], spec.shape.get(1..).unwrap_or_default()].concat();
            return Err(Error::TensorShape { path: self.path.clone(), name, got, want: spec.shape.clone() });
        }
        Ok(slices)
    }

    /// The rows of one file tensor, which as a whole has to have the shape `want`.
    fn slice(&self, segment: &Segment, entry: &Entry, bytes: Bytes, want: &[usize]) -> Result<WeightPart> {
        let (path, name) = (self.shards[segment.shard].path().to_path_buf(), segment.tensor.clone());
        let dtype = match entry.dtype.name {
            "BF16" => DType::Bf16,
            "F16" => DType::F16,
            "F32" => DType::F32,
            other => return Err(Error::TensorType { path, name, got: other.into() }),
        };
        let rows = want.first().copied().unwrap_or(0);
        let halves = segment.rows != Rows::All;
        if matrix(&entry.shape) != matrix(want) || rows == 0 || (halves && rows % 2 != 0) {
            return Err(Error::TensorShape { path, name, got: entry.shape.clone(), want: want.to_vec() });
        }
        if !halves {
            return Ok(WeightPart::plain(bytes, dtype, rows));
        }
        let middle = bytes.len() / 2;
        let range = if segment.rows == Rows::FirstHalf { 0..middle } else { middle..bytes.len() };
        let bytes = bytes.slice(range).ok_or(Error::Op { op: "slice", what: format!("half of `{name}`") })?;
        Ok(WeightPart::plain(bytes, dtype, rows / 2))
    }

    /// The error for a piece that no file has, in the files' own spelling.
    fn missing(&self, spec: &TensorSpec, piece: usize) -> Error {
        let spelled = names::file_tensors(self.part, self.layout, spec);
        let wanted = spelled.into_iter().nth(piece).unwrap_or_else(|| spec.clone());
        Error::TensorMissing { path: self.path.clone(), name: format!("{}{}", self.prefix, wanted.name), want: wanted.shape }
    }
}

/// Records one tensor of a file under its canonical name.
fn place(
    shards: &[Shard],
    tensors: &mut BTreeMap<String, Vec<Option<Segment>>>,
    shard: usize,
    name: &str,
    spelling: Spelling,
) -> Result<()> {
    let pieces = tensors.entry(spelling.canonical).or_insert_with(|| vec![None; spelling.pieces]);
    for (piece, rows) in spelling.holds {
        let taken = pieces.get(piece).and_then(Option::as_ref);
        // If a checkpoint has the same weight in two spellings, it is not clear which one to use.
        if pieces.len() != spelling.pieces || taken.is_some() {
            let other = taken.or(pieces.iter().flatten().next());
            let other = other.map_or_else(String::new, |o| format!(" and `{}` ({})", o.tensor, shards[o.shard].path().display()));
            return Err(Error::bad_file(
                shards[shard].path(),
                "duplicate tensor",
                format!("`{name}`{other} are the same weight"),
            ));
        }
        pieces[piece] = Some(Segment { shard, tensor: name.into(), rows });
    }
    Ok(())
}

/// Fails if a file holds an adapter instead of a model.
fn refuse_adapter(shard: &Shard) -> Result<()> {
    let Some((name, _)) = shard.tensors().find(|(name, _)| names::is_adapter(name)) else { return Ok(()) };
    let error = Error::bad_file(shard.path(), "not a model", format!("it is a LoRA adapter, with tensor `{name}`"));
    Err(error.with_hint("LoRA is not supported yet; use the model that it was made for"))
}

/// The shape of a 1x1 convolution as a matrix, which has the same elements in the same order. Other shapes are unchanged.
fn matrix(shape: &[usize]) -> &[usize] {
    match shape {
        [_, _, 1, 1] => &shape[..2],
        _ => shape,
    }
}
