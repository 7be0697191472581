//! The three parts of a model as descriptors of weights and a forward written over [`Backend`]. Nothing here knows which backend
//! runs it, and nothing is kept between calls.

mod bounds;
mod text_encoder;
mod transformer;
mod vae;

pub use text_encoder::TextEncoder;
pub use transformer::{ContextIn, Modulation, ReferenceTokens, StepInput, Transformer};
pub use vae::Vae;

use self::bounds::{Stretch, Stretches};
use crate::backend::{Backend, Conv, GroupNorm, Linear, QkNorm, Role, WeightPart};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::tensor::{Arena, DType, Precision, Tensor};

/// Places the weights of one part on a backend, by canonical name. Without a source only shapes are placed, which is enough for
/// a dry run.
pub struct Loader<'a> {
    backend: &'a mut dyn Backend,
    region: &'a mut Arena,
    source: Option<&'a Weights>,
    precision: Precision,
    loaded: &'a mut dyn FnMut(u64),
    /// Whether weights are looked at as they are placed.
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
        Self { backend, region, source, precision, loaded, wary: false }
    }

    /// The same, but weights are noted as being in use, and matrices refused of which a part was never written. A dry run should not.
    pub fn wary(mut self, wary: bool) -> Self {
        self.wary = wary;
        self
    }

    /// Places a weight whose rows are `shape[0]` and whose columns are all other dimensions together.
    fn place(&mut self, name: &str, shape: &[usize], role: Role) -> Result<Tensor> {
        let parts = self.stored(name, shape)?;
        // In f32 a matrix stays as it is stored, which every op can read exactly; vectors are few and always f32.
        let dtype = match (role, self.precision) {
            (Role::Vector, _) => DType::F32,
            (_, Precision::Bf16) => DType::Bf16,
            (_, Precision::F32) => {
                let stored = parts.first().map_or(DType::Bf16, |p| p.dtype);
                if parts.iter().all(|p| p.dtype == stored) { stored } else { DType::F32 }
            }
        };
        let (rows, cols) = match shape {
            [n] => (1, *n),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
            [] => (1, 1),
        };
        let tensor = self.region.alloc(rows, cols, dtype)?;
        self.backend.upload(tensor, role, &parts)?;
        // Of vectors those that something is multiplied or divided by.
        let scales = role != Role::Vector || !["bias", "mean"].iter().any(|end| name.ends_with(end));
        if let Some(source) = self.source.filter(|_| self.wary && scales) {
            source.note(name, role == Role::Table);
            // Whoever copies has just read all of it. Where files are used in place, their pages come with the first ops.
            if !self.backend.reads_files() {
                source.look()?;
            }
        }
        (self.loaded)((tensor.len() * dtype.size()) as u64);
        Ok(tensor)
    }

    /// A weight as the source has it; nothing without a source.
    fn stored(&self, name: &str, shape: &[usize]) -> Result<Vec<WeightPart>> {
        let Some(source) = self.source else { return Ok(Vec::new()) };
        Ok(source.weight(name, shape)?.parts.into_iter().map(|p| WeightPart { bytes: p.bytes, dtype: p.dtype }).collect())
    }

    fn vector(&mut self, name: &str, n: usize) -> Result<Tensor> {
        self.place(name, &[n], Role::Vector)
    }

    fn table(&mut self, name: &str, rows: usize, cols: usize) -> Result<Tensor> {
        self.place(name, &[rows, cols], Role::Table)
    }

    /// A linear layer without bias, `name` being the weight's.
    fn linear(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        Ok(Linear { weight: self.place(name, &[out, input], Role::Linear)?, bias: None })
    }

    /// A linear layer whose last `tail` rows are gates and ups.
    fn gate_up(&mut self, name: &str, out: usize, input: usize, tail: usize) -> Result<Linear> {
        Ok(Linear { weight: self.place(name, &[out, input], Role::GateUp { tail })?, bias: None })
    }

    /// A linear layer with bias, `name` being the layer's.
    fn linear_bias(&mut self, name: &str, out: usize, input: usize) -> Result<Linear> {
        let weight = self.place(&format!("{name}.weight"), &[out, input], Role::Linear)?;
        Ok(Linear { weight, bias: Some(self.vector(&format!("{name}.bias"), out)?) })
    }

    fn conv(&mut self, name: &str, out: usize, input: usize) -> Result<Conv> {
        let weight = self.place(&format!("{name}.weight"), &[out, input, 3, 3], Role::Conv)?;
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
    fn stretches(&self, q: &str, k: &str, head_dim: usize) -> Result<Stretches> {
        let stretch = |name| self.stored(name, &[head_dim]).map(|parts| Stretch::of(&parts));
        Ok(Stretches { q: stretch(q)?, k: stretch(k)? })
    }
}
