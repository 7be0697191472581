//! The three parts of a model: descriptors of their weights, and a forward pass written over [`Backend`]. Nothing here knows
//! which backend runs it, and no state is kept between calls.

mod bounds;
mod manifest;
mod text_encoder;
mod transformer;
mod vae;

pub use manifest::{text_manifest, transformer_manifest, vae_manifest};
pub use text_encoder::TextEncoder;
pub use transformer::{ContextIn, Modulation, ReferenceTokens, StepInput, Transformer};
pub use vae::Vae;

use self::bounds::{NormGain, QkGain};
use crate::backend::{Backend, Conv, GroupNorm, Linear, QkNorm, Role, WeightPart};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::names::TensorSpec;
use crate::tensor::{Arena, DType, Precision, Region, Tensor};

/// Hands a model the tensors that its `load` names. Every tensor's name and shape is spelled once, in `load`, and serves two
/// purposes: with weights or a dry run the tensors are placed on a backend, and for a manifest they are only listed.
pub struct Loader<'a> {
    target: Target<'a>,
    precision: Precision,
}

/// What becomes of the tensors that are loaded.
enum Target<'a> {
    /// They are placed on a backend.
    Backend(Upload<'a>),
    /// They are listed in the order of loading, and nothing is placed.
    Manifest(&'a mut Vec<TensorSpec>),
}

/// Places tensors of a checkpoint on a backend. Without a checkpoint only shapes are placed, which is enough for a dry run.
struct Upload<'a> {
    backend: &'a mut dyn Backend,
    region: &'a mut Arena,
    source: Option<&'a Weights>,
    loaded: &'a mut dyn FnMut(u64),
    /// Whether weights are checked for parts that were never written.
    wary: bool,
}

impl<'a> Loader<'a> {
    /// A loader that places weights of `source` into `region`; `loaded` is told the bytes of each weight as it is placed.
    pub fn new(
        backend: &'a mut dyn Backend,
        region: &'a mut Arena,
        source: Option<&'a Weights>,
        precision: Precision,
        loaded: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self { target: Target::Backend(Upload { backend, region, source, loaded, wary: false }), precision }
    }

    /// Sets whether weights are checked as they are used, so that a matrix of which a part was never written is an error. A dry
    /// run uses none.
    pub fn wary(mut self, wary: bool) -> Self {
        if let Target::Backend(upload) = &mut self.target {
            upload.wary = wary;
        }
        self
    }

    /// Lists the tensors that `load` asks for, with their shapes, in the order in which it does.
    fn record<T>(load: impl FnOnce(&mut Loader<'_>) -> Result<T>) -> Vec<TensorSpec> {
        let mut list = Vec::new();
        let mut loader = Loader { target: Target::Manifest(&mut list), precision: Precision::Bf16 };
        // Nothing is allocated or read, so there is nothing that could fail.
        load(&mut loader).map(drop).expect("recording a manifest does not fail");
        list
    }

    /// Loads a tensor, as a matrix of its first dimension by all others together.
    fn place(&mut self, spec: TensorSpec, role: Role) -> Result<Tensor> {
        let (rows, cols) = match &spec.shape[..] {
            [n] => (1, *n),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
            [] => (1, 1),
        };
        match &mut self.target {
            Target::Backend(upload) => upload.place(&spec, role, [rows, cols], self.precision),
            Target::Manifest(list) => {
                list.push(spec);
                Ok(Tensor { region: Region::Weights, dtype: DType::Bf16, offset: 0, rows, cols, stride: cols })
            }
        }
    }

    fn vector(&mut self, name: &str, n: usize) -> Result<Tensor> {
        self.place(TensorSpec::new(name, &[n]), Role::Vector)
    }

    fn table(&mut self, name: &str, rows: usize, cols: usize) -> Result<Tensor> {
        self.place(TensorSpec::new(name, &[rows, cols]), Role::Table)
    }

    /// A linear layer without bias, `name` being the weight's.
    fn linear(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        self.stacked(name, &[out], input)
    }

    /// A linear layer without bias whose rows are those of several layers, which a checkpoint may store one by one.
    fn stacked(&mut self, name: &str, stack: &[usize], input: usize) -> Result<Linear> {
        Ok(Linear { weight: self.place(TensorSpec::stacked(name, stack, input), Role::Linear)?, bias: None })
    }

    /// The same, with `tail` rows of gate and up projections at the end.
    fn gate_up(&mut self, name: &str, stack: &[usize], input: usize, tail: usize) -> Result<Linear> {
        Ok(Linear { weight: self.place(TensorSpec::stacked(name, stack, input), Role::GateUp { tail })?, bias: None })
    }

    /// A linear layer with bias, `name` being the layer's.
    fn linear_bias(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        self.biased(name, &[out, input])
    }

    /// A 1x1 convolution, which is a linear layer of every pixel's channels.
    fn conv_1x1(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        self.biased(name, &[out, input, 1, 1])
    }

    fn biased(&mut self, name: &str, shape: &[usize]) -> Result<Linear> {
        let weight = self.place(TensorSpec::new(format!("{name}.weight"), shape), Role::Linear)?;
        Ok(Linear { weight, bias: Some(self.vector(&format!("{name}.bias"), shape[0])?) })
    }

    fn conv(&mut self, name: &str, out: usize, input: usize) -> Result<Conv> {
        let weight = self.place(TensorSpec::new(format!("{name}.weight"), &[out, input, 3, 3]), Role::Conv)?;
        Ok(Conv { weight, bias: self.vector(&format!("{name}.bias"), out)? })
    }

    fn group_norm(&mut self, name: &str, channels: usize, groups: usize, eps: f32) -> Result<GroupNorm> {
        let weight = self.vector(&format!("{name}.weight"), channels)?;
        Ok(GroupNorm { weight, bias: self.vector(&format!("{name}.bias"), channels)?, groups, eps })
    }

    fn qk_norm(&mut self, q: &str, k: &str, head_dim: usize, eps: f32, q_scale: f32) -> Result<QkNorm> {
        Ok(QkNorm { q: self.vector(q, head_dim)?, k: self.vector(k, head_dim)?, eps, q_scale })
    }

    /// What that norm does to lengths.
    fn qk_gain(&self, q: &str, k: &str, head_dim: usize) -> Result<QkGain> {
        let gain = |name| match &self.target {
            Target::Backend(upload) => Ok(NormGain::of(&upload.stored(&TensorSpec::new(name, &[head_dim]))?)),
            Target::Manifest(_) => Ok(NormGain::default()),
        };
        Ok(QkGain { q: gain(q)?, k: gain(k)? })
    }
}

impl Upload<'_> {
    fn place(&mut self, spec: &TensorSpec, role: Role, [rows, cols]: [usize; 2], precision: Precision) -> Result<Tensor> {
        let parts = self.stored(spec)?;
        // In f32 a matrix stays as it is stored, which every op can read exactly; vectors are few and always f32.
        let dtype = match (role, precision) {
            (Role::Vector, _) => DType::F32,
            (_, Precision::Bf16) => DType::Bf16,
            (_, Precision::F32) => {
                let stored = parts.first().map_or(DType::Bf16, |p| p.dtype);
                if parts.iter().all(|p| p.dtype == stored) { stored } else { DType::F32 }
            }
        };
        let tensor = self.region.alloc(rows, cols, dtype)?;
        self.backend.upload(tensor, role, &parts)?;
        // Of the vectors only those count that something is multiplied or divided by.
        let scales = role != Role::Vector || !["bias", "mean"].iter().any(|end| spec.name.ends_with(end));
        if let Some(source) = self.source.filter(|_| self.wary && scales) {
            source.note_used(&spec.name, role == Role::Table);
            // A backend that copies has just read all of it. Where files are used in place, their pages come with the first ops.
            if !self.backend.reads_files() {
                source.check_written()?;
            }
        }
        (self.loaded)((tensor.len() * dtype.size()) as u64);
        Ok(tensor)
    }

    /// A tensor as the checkpoint stores it; nothing without a checkpoint.
    fn stored(&self, spec: &TensorSpec) -> Result<Vec<WeightPart>> {
        let Some(source) = self.source else { return Ok(Vec::new()) };
        Ok(source.weight(spec)?.parts.into_iter().map(|p| WeightPart { bytes: p.bytes, dtype: p.dtype }).collect())
    }
}
