//! The report of a quantization: the format and the error of every layer.

use super::encode::{ErrorSums, Finished};
use super::journal::Journal;
use super::layout::LayerSpec;
use super::{FilePlan, PlannedFile};
use crate::component::Component;
use crate::tensor::DType;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The report of an output.
#[derive(Clone, Debug)]
pub struct Report {
    /// The files with quantized layers.
    pub files: Vec<FileReport>,
    /// The size of all files in bytes.
    pub bytes: u64,
}

/// A file with quantized layers.
#[derive(Clone, Debug)]
pub struct FileReport {
    /// The part of the model in the file.
    pub part: Component,
    /// The path in the output folder.
    pub path: PathBuf,
    /// The size in bytes.
    pub bytes: u64,
    /// The quantized layers.
    pub layers: Vec<LayerReport>,
    /// The number of tensors in BF16.
    pub plain: usize,
}

/// A quantized layer.
#[derive(Clone, Debug)]
pub struct LayerReport {
    /// The layer's name in the file.
    pub name: String,
    /// The layer's format.
    pub format: DType,
    /// Rows and columns of the weight.
    pub shape: [usize; 2],
    /// The scale of the whole weight, or its largest row scale.
    pub scale: f32,
    /// The scale of the layer's input, if the file has one.
    pub input_scale: Option<f32>,
    error: ErrorSums,
}

impl LayerReport {
    /// The layer's error: the root mean square of the differences between decoded and original values, relative to the root
    /// mean square of the original values.
    pub fn error(&self) -> f64 {
        self.error.relative()
    }

    /// The layer's kind: its name without the block number.
    pub fn kind(&self) -> String {
        let mut numbered = false;
        let components = self.name.split('.').map(|component| {
            let is_block = !numbered && component.bytes().all(|b| b.is_ascii_digit());
            numbered |= is_block;
            if is_block { "*" } else { component }
        });
        components.collect::<Vec<_>>().join(".")
    }
}

/// The layers that share a kind and a format.
#[derive(Clone, Debug)]
pub struct KindReport {
    /// The layers' kind.
    pub kind: String,
    /// The layers' format.
    pub format: DType,
    /// The number of layers.
    pub layers: usize,
    /// The error of all these layers as one.
    pub error: f64,
    /// The largest error of a single layer.
    pub worst: f64,
}

impl FileReport {
    fn new(file: &PlannedFile, finished: &BTreeMap<String, Finished>) -> Self {
        let layer = |spec: &LayerSpec| {
            let finished = finished.get(&spec.weight)?;
            Some(LayerReport {
                name: spec.name().into(),
                format: spec.format?,
                shape: [*spec.shape.first()?, *spec.shape.get(1)?],
                scale: f32::from_bits(finished.scale_bits?),
                input_scale: finished.input_scale_bits.map(f32::from_bits),
                error: finished.error,
            })
        };
        let layers: Vec<LayerReport> = file.layers.iter().filter_map(|source| layer(&source.spec)).collect();
        let plain = file.layers.iter().filter(|layer| layer.spec.format.is_none() && !layer.spec.is_verbatim).count();
        Self { part: file.part, path: file.path.clone(), bytes: file.layout.bytes(), layers, plain }
    }

    /// The file's layers by kind, in the order in which the kinds first occur.
    pub fn by_kind(&self) -> Vec<KindReport> {
        let mut kinds: Vec<(KindReport, ErrorSums)> = Vec::new();
        for layer in &self.layers {
            let kind = layer.kind();
            let at = kinds.iter().position(|(row, _)| row.kind == kind && row.format == layer.format).unwrap_or_else(|| {
                let row = KindReport { kind, format: layer.format, layers: 0, error: 0.0, worst: 0.0 };
                kinds.push((row, ErrorSums::default()));
                kinds.len() - 1
            });
            let (row, sums) = &mut kinds[at];
            *sums = sums.plus(layer.error);
            row.layers += 1;
            row.error = sums.relative();
            row.worst = row.worst.max(layer.error());
        }
        kinds.into_iter().map(|(row, _)| row).collect()
    }
}

impl Report {
    pub(super) fn new(plan: &FilePlan, journal: &Journal) -> Self {
        let files = plan.files.iter().zip(&journal.finished).map(|(file, finished)| FileReport::new(file, finished)).collect();
        Self { files, bytes: plan.bytes() }
    }
}
