//! Writes quantized models: the transformer and the text encoder in FP8 or NVFP4. The files have the form that Black Forest Labs
//! and ComfyUI publish, or the form that diffusers reads.
//!
//! Everything about a file except its values follows from its tensors' shapes, so the layout and the size on disk are known before
//! the first byte is written. Layers are then quantized in order, a few rows at a time, into their places. A journal next to the
//! output lists the finished layers, so that a run stopped by a signal or a power failure can be continued. The output gets its
//! name when all of it is on disk.

pub mod calibrate;
mod copies;
mod encode;
mod journal;
mod layout;
mod pattern;
mod policy;
mod report;
mod source;

pub use crate::checkpoint::Identity;
pub use copies::{Copied, calibration_inputs, copies};
#[cfg(feature = "internals")]
pub use journal::{Entry, Journal, line_of};
pub use layout::WeightLayout;
#[cfg(feature = "internals")]
pub use layout::{Content, FileLayout, LayerSpec};
#[cfg(not(feature = "internals"))]
pub(crate) use layout::{FileLayout, LayerSpec};
#[cfg(feature = "internals")]
pub use pattern::matches;
#[cfg(not(feature = "internals"))]
pub(crate) use policy::{Policy, constant_scale};
#[cfg(feature = "internals")]
pub use policy::{Policy, constant_scale};
pub use report::{FileReport, KindReport, LayerReport, Report};
pub use source::ComponentSource;

use crate::checkpoint::{Shard, Weights};
use crate::component::Component;
use crate::config::{ModelSize, SIZES, TransformerConfig, Variant};
use crate::error::{Error, Remedy, Result};
use crate::model::transformer_manifest;
use crate::names::LayerRole;
use crate::output::{Staged, StagedFile, refuse_replaced};
use crate::progress::{Phase, Progress};
use crate::tensor::{DType, Scale};
use calibrate::input_scale;
use encode::{Finished, write_layer};
use flate2::Crc;
use journal::{CopyRecord, FileRecord, Record};
#[cfg(not(feature = "internals"))]
use journal::{Entry, Journal};
use source::{SourceLayer, text_encoder_layers, transformer_layers};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes between two syncs and journal entries: a few seconds of work that may have to be repeated.
pub const CHECKPOINT_BYTES: u64 = 512 << 20;

/// Bytes of a file that are copied at a time.
const COPY_BYTES: usize = 4 << 20;

/// Options of a quantization.
#[derive(Clone, Debug)]
pub struct Options {
    /// The format of the quantized layers.
    pub format: DType,
    /// The storage layout of the transformer's layers.
    pub layout: WeightLayout,
    /// Patterns of layers that stay in BF16.
    pub keep: Vec<String>,
    /// A description of the calibration; `None` if constants scale the inputs of the transformer's layers. The device is not
    /// included: the journal holds the measurements, and they are used wherever the work is continued.
    pub calibration: Option<String>,
}

/// The planned files of an output: everything except the values.
#[derive(Clone, Debug)]
pub struct FilePlan {
    files: Vec<PlannedFile>,
    copies: Vec<Copied>,
    calibration: Option<String>,
    /// The files that calibration reads in addition to the quantized ones.
    calibrated_by: Vec<Identity>,
    /// Further files that the output must not replace.
    protected: Vec<PathBuf>,
}

/// A file with quantized layers.
#[derive(Clone, Debug)]
struct PlannedFile {
    part: Component,
    /// The file's path in the output folder.
    path: PathBuf,
    weights: Weights,
    layers: Vec<SourceLayer>,
    layout: FileLayout,
}

/// The destination of the output.
#[derive(Clone, Debug)]
pub struct Target {
    /// The path of a file or a folder.
    pub path: PathBuf,
    /// Whether it is a folder.
    pub is_folder: bool,
    /// Whether an existing file may be replaced.
    pub force: bool,
    /// Whether to discard what an earlier run left unfinished.
    pub restart: bool,
    /// Bytes between two entries of the journal, usually [`CHECKPOINT_BYTES`].
    pub checkpoint_bytes: u64,
}

/// Measures the largest input magnitude of each layer, by the canonical name of its weight.
pub type Calibrate<'a> = &'a mut dyn FnMut() -> Result<BTreeMap<String, f32>>;

impl PlannedFile {
    fn new(source: &ComponentSource, options: &Options) -> Result<Self> {
        let Options { format, layout, keep, calibration } = options;
        let (part, weights, path, mut layers) = match source {
            ComponentSource::Transformer(weights, config, variant) => {
                let policy = Policy::transformer(config, *variant, *format, keep);
                let layers = transformer_layers(weights, &transformer_manifest(config), &policy)?;
                (Component::Transformer, weights, transformer_file(config, *variant, *format), layers)
            }
            ComponentSource::TextEncoder(weights) => {
                let layers = text_encoder_layers(weights, &Policy::text_encoder(*format, keep))?;
                (Component::TextEncoder, weights, text_encoder_file(weights, *format), layers)
            }
        };
        for SourceLayer { spec, .. } in layers.iter_mut().filter(|_| part == Component::Transformer) {
            let constant = spec.format.and_then(|format| constant_scale(spec.layer?, format));
            spec.has_input_scale =
                spec.format.is_some_and(|format| format.format().holds_results) && (calibration.is_some() || constant.is_some());
        }
        let layout = FileLayout::new(part, *layout, &layers.iter().map(|layer| layer.spec.clone()).collect::<Vec<_>>());
        Ok(Self { part, path: path.into(), weights: weights.clone(), layers, layout })
    }

    /// The scale of a layer's input in this file.
    fn input_scale(&self, layer: &LayerSpec, measured: Option<&BTreeMap<String, u32>>) -> Result<Option<f32>> {
        let Some(format) = layer.format.filter(|_| layer.has_input_scale) else { return Ok(None) };
        let Some(measured) = measured else { return Ok(layer.layer.and_then(|id| constant_scale(id, format))) };
        let largest = measured.get(&layer.weight).map(|bits| f32::from_bits(*bits));
        let scale = largest.and_then(|largest| input_scale(format, largest)).map(Scale::get);
        let scale = scale.filter(|scale| Scale::stored(*scale).is_ok());
        let unusable =
            || Error::Calibration { layer: layer.name().into(), what: "no scale suits what was measured of its input" };
        scale.map(Some).ok_or_else(unusable)
    }
}

/// The path of a quantized transformer in the output folder, with the official files' name.
fn transformer_file(config: &TransformerConfig, variant: Variant, format: DType) -> String {
    let size = ModelSize::of(config).map_or("", |size| size.in_file_name);
    let [before, after] = variant.spec().file_name;
    format!("transformer/{before}{size}{after}-{}.safetensors", format.label())
}

/// The path of a quantized text encoder in the output folder, with the official files' name.
fn text_encoder_file(weights: &Weights, format: DType) -> String {
    let hidden = weights.shape(&LayerRole::TokenTable.only().canonical()).and_then(|shape| shape.get(1).copied());
    let known = SIZES.iter().find(|size| Some(size.configs.text_encoder.hidden) == hidden);
    let name = known.map_or("qwen_3", |size| size.encoder_file);
    format!("text_encoder/{name}_{}.safetensors", format.label())
}

impl FilePlan {
    /// Plans the files for these parts. `copies` are further files for a folder.
    pub fn new(parts: &[ComponentSource], copies: Vec<Copied>, options: &Options) -> Result<Self> {
        let files = parts.iter().map(|part| PlannedFile::new(part, options)).collect::<Result<Vec<_>>>()?;
        let layers = files.iter().flat_map(|file| &file.layers).filter(|layer| layer.spec.shape.len() == 2);
        policy::check_patterns(&options.keep, layers.map(|layer| layer.spec.name()))?;
        let has_transformer = files.iter().any(|file| file.part == Component::Transformer);
        let calibration = options.calibration.clone().filter(|_| has_transformer);
        Ok(Self { files, copies, calibration, calibrated_by: Vec::new(), protected: Vec::new() })
    }

    /// Adds the files that calibration reads in addition to the quantized ones.
    pub fn calibrated_by(self, files: Vec<Identity>) -> Self {
        Self { calibrated_by: files, ..self }
    }

    /// Adds files that the output must not replace. The files that are quantized or copied need not be among them.
    pub fn protecting(self, files: Vec<PathBuf>) -> Self {
        Self { protected: files, ..self }
    }

    /// Fails if the output, or a file in which it grows, is one of the files that are read, under whatever name.
    fn check_target(&self, target: &Path) -> Result<()> {
        let quantized = self.files.iter().flat_map(|file| file.weights.shards()).map(Shard::path);
        let copied = self.copies.iter().filter_map(Copied::path);
        let read: Vec<&Path> = quantized.chain(copied).chain(self.protected.iter().map(PathBuf::as_path)).collect();
        let written = [target.into(), Staged::path_of(target), Staged::journal_of(target)];
        written.iter().try_for_each(|path| refuse_replaced(path, &read))
    }

    /// The size of all files in bytes.
    pub fn bytes(&self) -> u64 {
        let copied: u64 = self.copies.iter().map(Copied::bytes).sum();
        copied + self.files.iter().map(|file| file.layout.bytes()).sum::<u64>()
    }

    /// The canonical names of the weights whose inputs have to be measured.
    pub fn measured(&self) -> BTreeSet<&str> {
        let layers = self.files.iter().filter(|_| self.calibration.is_some()).flat_map(|file| &file.layers);
        layers.filter(|layer| layer.spec.has_input_scale).map(|layer| layer.spec.weight.as_str()).collect()
    }

    /// The number of tensors that are not quantized, but rounded to BF16.
    pub fn narrowed(&self) -> usize {
        self.files.iter().flat_map(|file| &file.layers).filter(|layer| layer.is_narrowed()).count()
    }

    /// The request, as the journal records it.
    fn record(&self) -> Record {
        let shards = self.files.iter().flat_map(|file| file.weights.shards());
        let file = |file: &PlannedFile| {
            let mut header = Crc::new();
            header.update(&file.layout.header);
            FileRecord { path: file.path.clone(), bytes: file.layout.bytes(), header: header.sum() }
        };
        let copy = |copied: &Copied| CopyRecord { to: copied.to.clone(), from: copied.identity.clone() };
        Record {
            version: env!("CARGO_PKG_VERSION").into(),
            inputs: shards.map(|shard| shard.identity()).chain(self.calibrated_by.iter().cloned()).collect(),
            copies: self.copies.iter().map(copy).collect(),
            files: self.files.iter().map(file).collect(),
            calibration: self.calibration.clone().unwrap_or_else(|| "none".into()),
        }
    }

    /// Writes the output, or continues an earlier run's. Returns [`Error::Interrupted`] once `stop` is set, and keeps the finished
    /// work.
    pub fn write(&self, target: &Target, calibrate: Calibrate<'_>, progress: &dyn Progress, stop: &AtomicBool) -> Result<Report> {
        self.check_target(&target.path)?;
        let mut staged = Staged::open(&target.path, target.is_folder, target.force, Journal::is_one)?;
        staged.check_space(self.bytes())?;
        let journal = self.earlier(&mut staged, target, progress)?;
        let (files, notes) = (Vec::new(), Vec::new());
        let mut writer = Writer { plan: self, staged, journal, notes, unsaved: 0, target, progress, stop, files };
        match writer.run(calibrate) {
            Ok(()) => {
                let report = Report::new(self, &writer.journal);
                self.check_target(&target.path)?;
                writer.staged.publish()?;
                Ok(report)
            }
            Err(error) => {
                // A damaged or changing input has to be replaced by another one, which needs a new start.
                if writer.journal.is_empty() || matches!(error, Error::BadFile { .. }) {
                    writer.staged.discard();
                } else {
                    // Work that cannot be saved now has to be repeated; nothing else is lost.
                    let _ = writer.save();
                }
                Err(error)
            }
        }
    }

    /// The journal of an earlier run with this request, or a new one.
    fn earlier(&self, staged: &mut Staged, target: &Target, progress: &dyn Progress) -> Result<Journal> {
        let (record, restart) = (self.record(), target.restart);
        match staged.earlier().map(Journal::parse) {
            Some(Some(journal)) if !restart => match journal.request.difference(&record) {
                None => {
                    self.check_calibration(&journal, &Staged::journal_of(&target.path))?;
                    return Ok(journal);
                }
                Some(what) => {
                    let what = format!("`{}` was begun {what}", staged.path().display());
                    return Err(Error::usage(what, Remedy::Restart));
                }
            },
            Some(None) if !restart => {
                progress.warn(&format!(
                    "the journal of `{}` is damaged or of another version: starting anew",
                    staged.path().display()
                ));
            }
            _ => {}
        }
        let request = Entry::Request(record.clone());
        staged.begin(&request.line())?;
        Ok(Journal::new(record))
    }

    /// Fails if a layer's input has no scale in these calibration results.
    fn check_scales(&self, measured: &BTreeMap<String, u32>) -> Result<()> {
        let mut layers = self.files.iter().flat_map(|file| file.layers.iter().map(move |layer| (file, &layer.spec)));
        layers.try_for_each(|(file, layer)| file.input_scale(layer, Some(measured)).map(drop))
    }

    /// Fails if a journal has calibration results that were not asked for, or not a usable one for each layer.
    fn check_calibration(&self, journal: &Journal, path: &Path) -> Result<()> {
        let Some(measured) = &journal.calibration else { return Ok(()) };
        let detail = match self.check_scales(measured) {
            _ if self.calibration.is_none() => "it has calibration results, but its request has no calibration".into(),
            Err(Error::Calibration { layer, .. }) => format!("its calibration has no usable result for `{layer}`"),
            other => return other,
        };
        Err(Error::bad_file(path, "invalid journal", detail).with_hint(Remedy::BeginAnew))
    }
}

/// A run that writes an output.
struct Writer<'a> {
    plan: &'a FilePlan,
    staged: Staged,
    journal: Journal,
    /// Journal lines that are not saved yet.
    notes: Vec<u8>,
    /// Bytes written since the journal was saved.
    unsaved: u64,
    target: &'a Target,
    progress: &'a dyn Progress,
    stop: &'a AtomicBool,
    files: Vec<StagedFile>,
}

impl Writer<'_> {
    fn run(&mut self, calibrate: Calibrate<'_>) -> Result<()> {
        for file in &self.plan.files {
            file.weights.shards().iter().try_for_each(|shard| shard.check_written(file.part))?;
        }
        for file in &self.plan.files {
            self.files.push(self.staged.file(&file.path, file.layout.bytes())?);
        }
        if self.plan.calibration.is_some() && self.journal.calibration.is_none() {
            let measured = calibrate()?.into_iter().map(|(name, largest)| (name, largest.to_bits())).collect();
            self.plan.check_scales(&measured)?;
            self.note(Entry::Calibration(measured));
            self.save()?;
        }
        self.progress.begin(Phase::Quantize, self.plan.bytes());
        let written = self.write_all();
        self.progress.end();
        written
    }

    fn write_all(&mut self) -> Result<()> {
        for index in 0..self.plan.files.len() {
            self.write_file(index)?;
        }
        for copied in &self.plan.copies {
            self.copy(copied)?;
        }
        self.plan.files.iter().try_for_each(|file| file.weights.verify())?;
        if self.target.is_folder {
            let (files, copies) =
                (self.plan.files.iter().map(|file| &file.path), self.plan.copies.iter().map(|copied| &copied.to));
            self.staged.retain(&files.chain(copies).map(PathBuf::as_path).collect())?;
        }
        self.save()
    }

    fn write_file(&mut self, index: usize) -> Result<()> {
        let plan = self.plan;
        let file = &plan.files[index];
        let mut tensors = vec![Vec::new(); file.layers.len()];
        file.layout.tensors.iter().for_each(|tensor| tensors[tensor.layer].push(tensor));
        self.files[index].write_at(0, &file.layout.header)?;
        self.progress.advance(file.layout.header.len() as u64);
        for (layer, tensors) in file.layers.iter().zip(&tensors) {
            self.check_stop()?;
            let bytes: u64 = tensors.iter().map(|tensor| tensor.range.end - tensor.range.start).sum();
            let weight = &layer.spec.weight;
            if let Some(finished) = self.journal.finished[index].get(weight) {
                let to = &mut self.files[index];
                let sums = tensors.iter().map(|tensor| to.checksum(tensor.range.clone())).collect::<Result<Vec<_>>>()?;
                if sums == finished.checksums {
                    self.progress.advance(bytes);
                    continue;
                }
                self.progress.warn(&format!("`{weight}` is not on disk as an earlier run wrote it: writing it again"));
                self.journal.finished[index].remove(weight);
            }
            let input_scale = file.input_scale(&layer.spec, self.journal.calibration.as_ref())?;
            let (progress, stop, mut large) = (self.progress, self.stop, 0);
            let mut batch_done = |written: u64| {
                progress.advance(written);
                large += written;
                file.weights.release();
                if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
            };
            let (path, to) = (file.weights.path(), &mut self.files[index]);
            let finished = write_layer(layer, file.layout.weights, tensors, input_scale, path, to, &mut batch_done)?;
            progress.advance(bytes - large);
            self.finish(index, layer, finished, bytes)?;
        }
        Ok(())
    }

    /// Notes in the journal that a layer is written.
    fn finish(&mut self, index: usize, layer: &SourceLayer, finished: Finished, bytes: u64) -> Result<()> {
        if let Some(format) = layer.spec.format {
            let error = 100.0 * finished.error.relative();
            self.progress.detail(&format!("{} {} error {error:.3} %", layer.spec.name(), format.label()));
        }
        self.note(Entry::Finished(index, layer.spec.weight.clone(), finished));
        self.unsaved += bytes;
        if self.unsaved >= self.target.checkpoint_bytes { self.save() } else { Ok(()) }
    }

    /// Adds an entry to the journal.
    fn note(&mut self, entry: Entry) {
        self.notes.extend(entry.line());
        // The journal knows every file of the plan, so this cannot fail.
        let _ = self.journal.add(entry);
    }

    /// Waits until all noted layers are on disk, then saves the journal.
    fn save(&mut self) -> Result<()> {
        self.files.iter().try_for_each(StagedFile::sync)?;
        self.staged.append(&self.notes)?;
        self.notes.clear();
        self.unsaved = 0;
        Ok(())
    }

    fn copy(&self, copied: &Copied) -> Result<()> {
        copied.check(self.stop)?;
        let (mut from, path) = copied.open()?;
        let mut to = self.staged.file(&copied.to, copied.bytes())?;
        let mut buffer = vec![0; COPY_BYTES.min(copied.bytes() as usize)];
        let mut at = 0;
        while at < copied.bytes() {
            self.check_stop()?;
            let left = (copied.bytes() - at).min(COPY_BYTES as u64) as usize;
            from.read_exact(&mut buffer[..left]).map_err(|error| Error::read(path, error))?;
            to.write_at(at, &buffer[..left])?;
            at += left as u64;
            self.progress.advance(left as u64);
        }
        copied.verify()?;
        to.sync()
    }

    fn check_stop(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}
