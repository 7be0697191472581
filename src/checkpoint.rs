//! Checkpoints: mapped safetensors files, and the weights of one model part under canonical names.
//!
//! A [`Shard`] is one file whose header has been validated. [`Weights`] collects the shards of a part, maps their names to
//! canonical ones, and returns bytes only after checking name, shape, dtype and the scales of quantized weights. Nothing is
//! copied: a [`StoredWeight`] points into the mapped file.

mod declared;
mod folder;
mod foreign;
mod guard;
mod header;
mod quantized;
mod read_ahead;
mod scales;
mod shard;
mod values;
mod zeros;

pub use header::{Entry, StoredDtype};
pub use read_ahead::ReadAhead;
pub use shard::{Identity, Shard, digits};
pub use zeros::may_be_zero;

use crate::component::Component;
use crate::error::{Error, Remedy, Result};
use crate::names::{self, Layout, Rows, Spelling, TensorRole, TensorSpec};
use crate::tensor::nvfp4::TILE_ROWS;
use crate::tensor::{Bytes, DType, Nvfp4Layout, ScaleKind, SliceScaling, Stored, WeightSlice};
use crate::text::shown_path;
use crate::trace;
use quantized::{FileWeight, Quantization};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A weight whose name, shape and dtype were checked.
#[derive(Clone, Debug)]
pub struct StoredWeight {
    /// The weight's rows in order. A vector is one row.
    pub parts: Vec<WeightSlice>,
    /// The format in which the checkpoint wants the layer's input; `None` if the input is not quantized.
    pub input: Option<Stored>,
    /// Whether the parts want different input formats. The input can then not be quantized for all of them.
    pub inputs_differ: bool,
}

/// The weights of one model part under their canonical names.
#[derive(Clone, Debug)]
pub struct Weights {
    part: Component,
    path: PathBuf,
    shards: Vec<Shard>,
    /// The pieces of each tensor in row order, by canonical name. A piece that no file holds is `None`.
    tensors: BTreeMap<String, Vec<Option<Segment>>>,
    /// Tensors that no spelling table lists, each with the index of its shard.
    unknown: Vec<(usize, String)>,
    quantization: Quantization,
    /// The order in which NVFP4 weights are stored.
    nvfp4: Nvfp4Layout,
    /// How these files spell names, for messages about missing tensors.
    layout: Layout,
    prefix: &'static str,
    /// Matrices in use that are not yet checked for zeros, and whether each is a lookup table.
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
    pub fn open(part: Component, path: &Path) -> Result<Self> {
        let _span = trace::span_of("open part", || part.to_string());
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
    pub fn from_shards(part: Component, shards: Vec<Shard>) -> Result<Self> {
        let path = shards.first().map(|shard| shard.path().to_path_buf()).unwrap_or_default();
        Self::gather(part, path, shards)
    }

    fn gather(part: Component, path: PathBuf, shards: Vec<Shard>) -> Result<Self> {
        // Adapters and unsupported formats are refused first, because their tensors would otherwise be reported as faults.
        shards.iter().try_for_each(refuse_adapter)?;
        let quantization = Quantization::read(part, &shards)?;
        let (layout, nvfp4) = (Layout::Diffusers, quantization.nvfp4_layout(false));
        let (tensors, unknown, unchecked) = Default::default();
        let mut weights = Self { part, path, shards, tensors, unknown, quantization, nvfp4, layout, prefix: "", unchecked };
        let mut original = 0i64;
        for (index, shard) in weights.shards.iter().enumerate() {
            for (name, _) in shard.tensors() {
                match names::resolve(part, name) {
                    TensorRole::Weight(spelling) => {
                        original += spelling.layout.map_or(0, |layout| if layout == Layout::Bfl { 1 } else { -1 });
                        weights.prefix = spelling.prefix;
                        place(&weights.shards, &mut weights.tensors, index, name, spelling)?;
                    }
                    TensorRole::Unknown => weights.unknown.push((index, name.into())),
                    TensorRole::Unused | TensorRole::OtherPart | TensorRole::Quantization(..) | TensorRole::Fp8Marker => {}
                }
            }
        }
        if original > 0 {
            weights.layout = Layout::Bfl;
            weights.nvfp4 = weights.quantization.nvfp4_layout(true);
        }
        Ok(weights)
    }

    /// Sets the order in which NVFP4 weights are stored. `None` keeps the order that the files suggest.
    pub fn with_nvfp4_layout(mut self, layout: Option<Nvfp4Layout>) -> Self {
        self.nvfp4 = layout.unwrap_or(self.nvfp4);
        self
    }

    /// The part of the model that these weights belong to.
    pub fn component(&self) -> Component {
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

    /// The source of the weights for display: the file, or the number of shards and their folder.
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

    /// Frees the memory of mapped pages that were read so far. A caller that reads all weights once, one after the other, needs
    /// memory for only a few of them.
    pub fn release(&self) {
        self.shards.iter().for_each(Shard::release);
    }

    /// Canonical names of all tensors found, complete or not.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor; `None` if the tensor or one of its pieces is missing, or if its pieces do not fit together.
    pub fn shape(&self, canonical: &str) -> Option<Vec<usize>> {
        let mut whole: Option<Vec<usize>> = None;
        for segment in self.tensors.get(canonical)? {
            let segment = segment.as_ref()?;
            let shape = self.quantization.shape(&segment.tensor, self.entry(segment)?);
            // Both halves come from one file tensor, which has the whole shape.
            if segment.rows != Rows::All {
                return Some(shape);
            }
            match &mut whole {
                None => whole = Some(shape),
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

    /// The vocabulary that a text encoder's files may carry, as JSON bytes.
    pub fn vocabulary(&self) -> Option<Bytes> {
        let found = |shard: &Shard| {
            let name = shard.tensors().map(|(name, _)| name).find(|name| names::without_prefix(name) == names::VOCABULARY)?;
            shard.bytes(name)
        };
        self.shards.iter().find_map(found)
    }

    /// Checks that every tensor of the manifest exists and has the right shape, dtype and scales. Extra tensors in a transformer
    /// are an error: they mean that it is another model. For other parts their names are returned.
    pub fn check(&self, manifest: &[TensorSpec]) -> Result<Vec<String>> {
        for spec in manifest {
            self.weight(spec)?;
        }
        let known: std::collections::BTreeSet<&str> = manifest.iter().map(|spec| spec.name.as_str()).collect();
        // Layers of a text encoder after the last one in use are ignored.
        let read = manifest.iter().filter_map(|spec| names::text_layer(&spec.name)).max();
        let unread = |name: &str| read.is_some_and(|last| names::text_layer(name).is_some_and(|layer| layer > last));
        self.quantization.check(&self.shards, &unread)?;
        let surplus = self.tensors.iter().filter(|(name, _)| !known.contains(name.as_str()));
        let surplus = surplus.flat_map(|(_, segments)| segments.iter().flatten()).map(|s| (s.shard, s.tensor.clone()));
        let mut extras: Vec<(usize, String)> =
            self.unknown.iter().cloned().chain(surplus).filter(|(_, name)| !unread(name)).collect();
        extras.sort();
        extras.dedup();
        match extras.first() {
            Some((shard, name)) if self.part == Component::Transformer => {
                Err(Error::TensorUnknown { path: self.shards[*shard].path().to_path_buf(), name: name.clone() })
            }
            _ => Ok(extras.into_iter().map(|(_, name)| name).collect()),
        }
    }

    /// Records that a matrix is in use, for [`Weights::check_written`]. A `table` may have rows that are never used.
    pub fn note_used(&self, name: &str, table: bool) {
        self.unchecked.lock().unwrap_or_else(PoisonError::into_inner).push((name.into(), table));
    }

    /// Fails if one of the matrices recorded since the last call is zero where no trained matrix is: missing parts of an
    /// incomplete download read as zeros. This reads a few places of each matrix, which is slow from a cold disk and fast from
    /// the page cache, so callers check after the weights were used.
    pub fn check_written(&self) -> Result<()> {
        let unchecked = std::mem::take(&mut *self.unchecked.lock().unwrap_or_else(PoisonError::into_inner));
        unchecked.iter().try_for_each(|(name, table)| self.refuse_zeros(name, *table))
    }

    fn refuse_zeros(&self, name: &str, table: bool) -> Result<()> {
        for weight in self.file_weights(name) {
            let own = (&self.shards[weight.shard], weight.name, weight.entry);
            let scales = self.quantization.scale_tensor(weight).map(|scales| (scales.shard, scales.name, scales.entry));
            for (shard, name, entry) in [own].into_iter().chain(scales) {
                let Some(bytes) = shard.bytes(name) else { continue };
                // A file that was truncated after it was opened also reads as zeros; then the error says that it changed.
                zeros::refuse(shard.path(), name, entry, &bytes, table).map_err(|error| shard.verify().err().unwrap_or(error))?;
            }
        }
        Ok(())
    }

    /// Fails if a block scale of an NVFP4 weight is invalid, or zero where its elements are not, or if an FP8 weight has lost its scale.
    /// This reads all block scales, and all of an FP8 weight without scales, so callers check when they load a weight.
    pub fn check_scales(&self, name: &str) -> Result<()> {
        for weight in self.file_weights(name) {
            let shard = &self.shards[weight.shard];
            let (Some(format), Some(codes)) = (self.quantization.format(weight)?, shard.bytes(weight.name)) else { continue };
            let checked = match self.quantization.scale_tensor(weight) {
                Some(scales) if format.format().scales == ScaleKind::Blocks => {
                    scales.check_blocks(&codes, self.quantization.block_matrix(weight, format.format())?, self.nvfp4)
                }
                _ => self.quantization.check_unscaled(weight, format, &codes),
            };
            // A file that was truncated after it was opened reads as zeros; then the error says that it changed.
            checked.map_err(|error| self.verify().err().unwrap_or(error))?;
        }
        Ok(())
    }

    /// The file tensors that hold a canonical one.
    fn file_weights(&self, canonical: &str) -> impl Iterator<Item = FileWeight<'_>> {
        let segments = self.tensors.get(canonical).into_iter().flatten().flatten();
        // Two halves come from one tensor.
        segments.filter(|segment| segment.rows != Rows::SecondHalf).filter_map(|segment| self.file_weight(segment))
    }

    fn file_weight<'a>(&'a self, segment: &'a Segment) -> Option<FileWeight<'a>> {
        let entry = self.entry(segment)?;
        Some(FileWeight { shards: &self.shards, shard: segment.shard, name: &segment.tensor, entry })
    }

    fn entry(&self, segment: &Segment) -> Option<&Entry> {
        self.shards.get(segment.shard)?.entry(&segment.tensor)
    }

    /// Returns the bytes of a tensor, which has to have the given shape.
    pub fn weight(&self, spec: &TensorSpec) -> Result<StoredWeight> {
        let Some(segments) = self.tensors.get(&spec.name) else { return Err(self.missing(spec, 0)) };
        let (mut parts, mut inputs) = (Vec::with_capacity(segments.len()), Vec::with_capacity(segments.len()));
        let mut total = 0usize;
        for (piece, segment) in segments.iter().enumerate() {
            let found = segment.as_ref().and_then(|s| Some((s, self.file_weight(s)?, self.shards[s.shard].bytes(&s.tensor)?)));
            let Some((&Segment { rows, .. }, weight, bytes)) = found else { return Err(self.missing(spec, piece)) };
            let whole = segments.len() == 1 || rows != Rows::All;
            let mut want = spec.shape.clone();
            if let Some(rows) = want.first_mut().filter(|_| !whole) {
                // If the rows of the pieces are not known, only their sum is compared.
                let stacked = (spec.stack.len() == segments.len()).then(|| spec.stack[piece]);
                *rows = stacked.or(weight.entry.shape.first().copied()).unwrap_or(0);
            }
            let (part, input) = self.weight_part(weight, bytes, rows, &want)?;
            total = total.saturating_add(part.rows);
            parts.push(part);
            inputs.push(input);
        }
        if Some(&total) != spec.shape.first() {
            let name = names::spell(self.part, self.layout, &spec.name).join(" + ");
            let got = [&[total], spec.shape.get(1..).unwrap_or_default()].concat();
            return Err(Error::TensorShape { path: self.path.clone(), name, got, want: spec.shape.clone() });
        }
        // All parts multiply one input, so it can be quantized only if they want the same format.
        let inputs_differ = inputs.iter().any(|input| *input != inputs[0]);
        let input = inputs.first().copied().flatten().filter(|_| !inputs_differ);
        if spec.shape.len() < 2 {
            parts.iter_mut().for_each(|part| part.rows = 1);
        }
        Ok(StoredWeight { parts, input, inputs_differ })
    }

    /// Returns rows of one file tensor, whose full shape has to be `want`, and the format of the layer's input.
    fn weight_part(
        &self,
        weight: FileWeight<'_>,
        bytes: Bytes,
        rows: Rows,
        want: &[usize],
    ) -> Result<(WeightSlice, Option<Stored>)> {
        let (path, name) = (|| self.shards[weight.shard].path().to_path_buf(), || weight.name.to_owned());
        let format = self.quantization.format(weight)?;
        let stored_as = weight.entry.dtype.name;
        let wrong_type = || Error::TensorType { path: path(), name: name(), got: stored_as.into() };
        let dtype = format.or_else(|| DType::plain_stored_as(stored_as)).ok_or_else(wrong_type)?;
        let (shape, halves) = (self.quantization.shape(weight.name, weight.entry), rows != Rows::All);
        let count = want.first().copied().unwrap_or(0);
        if matrix(&shape) != matrix(want) || count == 0 || (halves && count % 2 != 0) {
            return Err(Error::TensorShape { path: path(), name: name(), got: shape, want: want.to_vec() });
        }
        let (scaling, input) = match format {
            Some(format) => self.quantization.scaling(weight, format, self.nvfp4)?,
            None => (SliceScaling::Unscaled, None),
        };
        if !halves {
            return Ok((WeightSlice { bytes, dtype, rows: count, scaling }, input));
        }
        let second = rows == Rows::SecondHalf;
        let halved = scales::half_of(&bytes, second).zip(scales::half(scaling, count, second));
        let (bytes, scaling) = halved.ok_or_else(|| {
            weight.invalid(format_args!("has {count} rows, and half of them is no multiple of {TILE_ROWS}, as its scales need"))
        })?;
        Ok((WeightSlice { bytes, dtype, rows: count / 2, scaling }, input))
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
        // If a checkpoint has the same weight in two spellings, kiln cannot know which one to use.
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
    Err(error.with_hint(Remedy::ApplyAdapter))
}

/// The shape of a 1x1 convolution as a matrix, which has the same elements in the same order. Other shapes are unchanged.
fn matrix(shape: &[usize]) -> &[usize] {
    match shape {
        [_, _, 1, 1] => &shape[..2],
        _ => shape,
    }
}
