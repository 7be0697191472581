//! The interface between the model and the hardware.
//!
//! Model code describes what to compute by passing [`Op`] values to a [`Backend`]; it never asks which backend that is. An op is
//! a plain description over [`Tensor`] descriptors, at the granularity of one fused kernel, and is executed eagerly: there is no
//! computation graph and no graph optimiser. Because ops are values, their shape rules ([`Op::check`]), their cost
//! ([`Op::flops`]) and their operands ([`Op::operands`]) are written once, and a backend that plans ([`Plan`]), compares
//! ([`Lockstep`]) or injects faults is a few lines long.

pub mod cpu;
pub mod cuda;
mod lockstep;
mod op;
mod plan;

pub use lockstep::Lockstep;
pub use op::{
    Access, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Modulated, OP_NAMES, Op, Projection, QkNorm, Rope,
    RopeStyle, Sampling,
};
pub use plan::Plan;

use crate::error::Result;
use crate::tensor::{Arena, Bytes, DType, Tensor};
use std::ops::Range;

/// What a weight is used for. A backend may choose the memory layout of its copy by the role; the model never sees that layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The weight of a linear layer, `[out, in]`.
    Linear,
    /// A linear layer whose last `tail` rows are the gate rows of a SwiGLU followed by as many up rows.
    GateUp {
        /// Number of gate and up rows together.
        tail: usize,
    },
    /// The weight of a 3x3 convolution, in the order of the checkpoint.
    Conv,
    /// An embedding table.
    Table,
    /// A norm weight, a bias or a statistic; always f32.
    Vector,
}

/// Consecutive rows of a weight, as a checkpoint stores them.
#[derive(Clone, Debug)]
pub struct WeightPart {
    /// The bytes, row-major.
    pub bytes: Bytes,
    /// Their element type.
    pub dtype: DType,
}

impl WeightPart {
    /// Whether the bytes can be read in place as values of this type, without a conversion or an aligned copy.
    pub fn is_readable_as(&self, dtype: DType) -> bool {
        self.dtype == dtype && self.bytes.as_ptr().align_offset(dtype.size()) == 0
    }
}

/// Host data to write to working memory.
#[derive(Clone, Copy, Debug)]
pub enum HostData<'a> {
    /// Values that are rounded to the tensor's dtype as they are written.
    F32(&'a [f32]),
    /// Token ids.
    U32(&'a [u32]),
}

/// Names a sequence of ops that recurs with the same operands, so that a backend may capture it (as a CUDA graph) and replay it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepKey(pub &'static str);

/// A device that holds weights and working memory and runs ops on them.
pub trait Backend {
    /// A short name for messages.
    fn name(&self) -> &'static str;

    /// Uploads a weight and replaces whatever was stored there. `parts` are its rows in order; their dtypes may differ from that
    /// of `to`. Ops that were issued earlier still read the old values.
    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightPart]) -> Result<()>;

    /// Bytes of memory that can still be allocated, if the backend knows.
    fn available(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Number of launches of each kernel so far, by kernel name; empty for a backend without kernels. A captured launch counts
    /// once, however often it is replayed.
    fn launches(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Reserves memory for `bytes` of weights, before the first upload. Weights that were uploaded earlier are dropped.
    fn reserve_weights(&mut self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Whether ops read weights in place, from the bytes that [`Backend::upload`] was given, instead of from a copy.
    fn reads_files(&self) -> bool {
        true
    }

    /// Allocates `bytes` of working memory. Its previous content is lost.
    fn reserve(&mut self, bytes: u64) -> Result<()>;

    /// Writes host data, row by row.
    fn write(&mut self, to: Tensor, data: HostData<'_>) -> Result<()>;

    /// Reads a tensor back as f32, row by row, after all ops issued so far have finished.
    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()>;

    /// Reads a u8 tensor back, row by row, after all ops issued so far have finished.
    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()>;

    /// Runs one op.
    fn run(&mut self, op: Op<'_>) -> Result<()>;

    /// Tells the backend that a range of working memory is no longer in use.
    fn released(&mut self, _range: Range<u64>) {}

    /// Runs `body`, which must issue the same ops on the same tensors whenever `key` is the same.
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()>;

    /// Waits until all ops issued so far have finished.
    fn synchronize(&mut self) -> Result<()>;
}

/// Runs `body` and afterwards frees the working memory that it allocated.
pub fn scope<R>(be: &mut dyn Backend, ws: &mut Arena, body: impl FnOnce(&mut dyn Backend, &mut Arena) -> Result<R>) -> Result<R> {
    let mark = ws.mark();
    let result = body(be, ws);
    be.released(ws.reset(mark));
    result
}
