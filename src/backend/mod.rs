//! The seam between the model and the machine.
//!
//! Model code says what to compute by handing [`Op`] values to a [`Backend`]; it never asks which backend that is. An op is a
//! plain description over [`Tensor`] descriptors, at the granularity of one fused kernel, and runs at once: there is no graph
//! and no optimiser. Because ops are values, their shape rules ([`Op::check`]), their cost ([`Op::flops`]) and what they touch
//! ([`Op::operands`]) are written once, and a backend that plans ([`Plan`]), compares ([`Lockstep`]) or injects faults is a few
//! lines long.

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

/// What a weight is for. A backend may lay its copy out to suit; the model never sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Rows of a linear layer.
    Linear,
    /// A linear layer whose rows end in gates and ups of equal number, `tail` rows in all.
    GateUp {
        /// Gate and up rows at the end of the weight.
        tail: usize,
    },
    /// A 3x3 convolution in the file's order.
    Conv,
    /// A lookup table.
    Table,
    /// A norm weight, a bias or a statistic; always f32.
    Vector,
}

/// Consecutive rows of a weight as some file stores them.
#[derive(Clone, Debug)]
pub struct WeightPart {
    /// The bytes, row-major.
    pub bytes: Bytes,
    /// Their element type.
    pub dtype: DType,
}

impl WeightPart {
    /// Whether they can be read where they are, as values of this type.
    pub fn is_readable_as(&self, dtype: DType) -> bool {
        self.dtype == dtype && self.bytes.as_ptr().align_offset(dtype.size()) == 0
    }
}

/// Host data to place in working memory.
#[derive(Clone, Copy, Debug)]
pub enum HostData<'a> {
    /// Rounded to the tensor's type as it is written.
    F32(&'a [f32]),
    /// Token ids.
    U32(&'a [u32]),
}

/// Names a sequence of ops that recurs with the same operands, so that a backend may record and replay it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepKey(pub &'static str);

/// A machine that can hold weights and working memory and run ops on them.
pub trait Backend {
    /// A short name for messages.
    fn name(&self) -> &'static str;

    /// Places a weight, whatever was there before. `parts` are its rows in order; their element types may differ from `to`'s. Ops
    /// from before it see what they saw then.
    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightPart]) -> Result<()>;

    /// Bytes of memory that can still be had, where the backend knows.
    fn available(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// How often each kernel was launched so far, by its name, where the backend has kernels. What is recorded counts once, however
    /// often it is replayed.
    fn launches(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Says how many bytes of weights there will be, before the first upload. Weights from before are gone.
    fn reserve_weights(&mut self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Whether ops read weights where [`Backend::upload`] was given them, and not a copy.
    fn reads_files(&self) -> bool {
        true
    }

    /// Provides `bytes` of working memory. What was in it before is lost.
    fn reserve(&mut self, bytes: u64) -> Result<()>;

    /// Writes host data, row by row.
    fn write(&mut self, to: Tensor, data: HostData<'_>) -> Result<()>;

    /// Reads a tensor back as f32, row by row. Waits for the ops before it.
    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()>;

    /// Reads a tensor of bytes back, row by row. Waits for the ops before it.
    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()>;

    /// Runs one op.
    fn run(&mut self, op: Op<'_>) -> Result<()>;

    /// Says that a range of working memory holds nothing of value any more.
    fn released(&mut self, _range: Range<u64>) {}

    /// Runs `body`, which issues the same ops on the same tensors whenever `key` is the same.
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()>;

    /// Waits until everything issued so far is done.
    fn synchronize(&mut self) -> Result<()>;
}

/// Runs `body` with working memory that is given back afterwards.
pub fn scope<R>(be: &mut dyn Backend, ws: &mut Arena, body: impl FnOnce(&mut dyn Backend, &mut Arena) -> Result<R>) -> Result<R> {
    let mark = ws.mark();
    let result = body(be, ws);
    be.released(ws.reset(mark));
    result
}
