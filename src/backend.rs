//! The interface between the model and the hardware.
//!
//! Model code describes what to compute by passing [`Op`] values to a [`Backend`]; it never asks which backend that is. An op is
//! a plain description over [`Tensor`] descriptors, at the granularity of one fused kernel, and is executed eagerly: there is no
//! computation graph and no graph optimizer. Because ops are values, their shape rules ([`Op::check`]), their cost
//! ([`Op::flops`]) and their operands ([`Op::operands`]) are written once, and a backend that plans ([`DryRun`]), compares
//! ([`Lockstep`]) or watches another one ([`Observed`]) is a few lines long.

pub mod cpu;
pub mod cuda;
mod dry_run;
#[cfg(feature = "internals")]
mod lockstep;
mod observed;
mod op;
use kiln_numerics::up_conv;

pub use dry_run::DryRun;
#[cfg(feature = "internals")]
pub use lockstep::Lockstep;
pub use observed::{Observed, Observer};
pub use op::{
    Access, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, LoraBranch, Modulated, Op, OpKind, Projection,
    QkNorm, Rope, RopeStyle, Sampling, Seam, Shortcut, Softmax, Weight,
};

use crate::error::{Error, Result};
use crate::tensor::{Arena, DType, Region, Tensor, WeightSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a weight is used for. A backend may choose the memory layout of its copy by the role; the model never sees that layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The weight of a linear layer, `[out, in]`.
    Linear,
    /// The weight of a 3x3 convolution, in the order of the checkpoint: input channel, filter row, filter column.
    Conv,
    /// The weight of a 3x3 convolution after nearest-neighbor upsampling by two. Parts are `[out, in * 9]` in checkpoint order. The tensor
    /// is `[out, in * 16]`: a backend sums the taps of every phase in f32 and rounds the sums once.
    UpConv,
    /// A norm weight, a bias or a statistic; always f32.
    Vector,
}

/// Which quantized GEMMs a backend has, by the bits of the weight (8 is e4m3, 4 is NVFP4) and of the input (16 is the precision of
/// activations), and whether it has quantized attention. A weight that the backend has no GEMM for is expanded when it is uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmFormats {
    /// e4m3 by e4m3.
    pub w8a8: bool,
    /// e4m3 weights, plain inputs.
    pub w8a16: bool,
    /// NVFP4 by NVFP4.
    pub w4a4: bool,
    /// NVFP4 weights, plain inputs.
    pub w4a16: bool,
    /// Weights in any other format that is not expanded when it is loaded, by plain inputs.
    pub decodes: bool,
    /// Queries by keys in attention, both e4m3. Values are plain.
    pub qk8: bool,
    /// Whether weights with plain inputs are expanded each time that they are multiplied, in working memory that nothing else
    /// uses at that time.
    pub expands: bool,
}

impl GemmFormats {
    /// Every quantized GEMM, without expansion.
    pub const ALL: Self = Self { w8a8: true, w8a16: true, w4a4: true, w4a16: true, decodes: true, qk8: true, expands: false };
    /// No quantized GEMM.
    pub const NONE: Self =
        Self { w8a8: false, w8a16: false, w4a4: false, w4a16: false, decodes: false, qk8: false, expands: false };

    /// The formats that two backends have in common.
    pub const fn and(self, other: Self) -> Self {
        Self {
            w8a8: self.w8a8 && other.w8a8,
            w8a16: self.w8a16 && other.w8a16,
            w4a4: self.w4a4 && other.w4a4,
            w4a16: self.w4a16 && other.w4a16,
            decodes: self.decodes && other.decodes,
            qk8: self.qk8 && other.qk8,
            // `expands` is a need and not an ability, so one of the two is enough.
            expands: self.expands || other.expands,
        }
    }

    /// Whether there is a GEMM of such weights by such inputs. Plain types are always multiplied.
    pub const fn takes(self, weight: DType, input: DType) -> bool {
        match (weight, input) {
            (DType::E4m3, DType::E4m3) => self.w8a8,
            (DType::E4m3, DType::F32 | DType::Bf16) => self.w8a16,
            (DType::E2m1, DType::E2m1) => self.w4a4,
            (DType::E2m1, DType::F32 | DType::Bf16) => self.w4a16,
            _ if input.is_quantized() => false,
            _ => !weight.is_quantized() || self.decodes && !weight.format().is_expanded,
        }
    }

    /// Whether attention takes queries and keys of this type. Plain types are always taken.
    pub const fn takes_heads(self, heads: DType) -> bool {
        match heads {
            DType::E4m3 => self.qk8,
            _ => !heads.is_quantized(),
        }
    }
}

/// How tensor cores accumulate e4m3 products, on GPUs that keep fewer places than f32 has. Hopper and Ada keep thirteen binary places below
/// the largest term of a sum. Typical sums do not suffer. Sums whose terms have one sign shrink: by up to 5 % at K 3072, 10 % at K 6144 and
/// 18 % at K 12288.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fp8Accumulate {
    /// [`Fast`](Self::Fast) up to a K of [`FAST_UP_TO`](Self::FAST_UP_TO). Above it, partial sums of up to
    /// [`LONGEST_PART`](Self::LONGEST_PART) products are promoted, so no sum shrinks by more than a partial sum does.
    #[default]
    Auto,
    /// Partial sums are promoted to f32: after every 128 of K they are added to a sum in f32.
    Exact,
    /// Tensor cores accumulate over all of K and keep thirteen binary places.
    Fast,
}

impl Fp8Accumulate {
    /// The largest K whose sums `Auto` does not promote. It is the K of layers whose inputs come from a norm, in the widest model: their
    /// sums have terms of both signs.
    pub const FAST_UP_TO: usize = 6144;
    /// The most products that tensor cores add up under `Auto` if K is above `FAST_UP_TO`. Such a partial sum shrinks by up to 1.5 %.
    pub const LONGEST_PART: usize = 1024;
    /// The most products that tensor cores add up under `Exact`: sums of this length keep all places.
    pub const EXACT_PART: usize = 128;

    /// The name that users type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Exact => "exact",
            Self::Fast => "fast",
        }
    }

    /// How many products of a GEMM with this K tensor cores may add up before the partial sum is promoted.
    pub const fn longest_sum(self, k: usize) -> usize {
        match self {
            Self::Auto if k > Self::FAST_UP_TO => Self::LONGEST_PART,
            Self::Exact => Self::EXACT_PART,
            Self::Auto | Self::Fast => k,
        }
    }

    /// How sums of a GEMM with this K are accumulated, in one word.
    pub const fn sums(self, k: usize) -> &'static str {
        match self {
            Self::Auto if k > Self::FAST_UP_TO => "promoted",
            Self::Exact => "exact",
            Self::Auto | Self::Fast => "fast",
        }
    }
}

/// Names a sequence of ops that recurs with the same operands, so that a backend may capture it (as a CUDA graph) and replay it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepKey(pub &'static str);

/// Flags that end ops early: one for all jobs and one for the running job.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Set to end every job.
    pub all: Arc<AtomicBool>,
    /// Set to end the running job alone.
    pub job: Option<Arc<AtomicBool>>,
}

impl Stop {
    /// [`Error::Interrupted`] once one of the flags is set.
    pub fn check(&self) -> Result<()> {
        let is_set = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        if is_set(&self.all) || self.job.as_ref().is_some_and(is_set) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// A read of a tensor in progress.
#[derive(Debug)]
pub enum Reading<T = f32> {
    /// The values are on the host.
    Done(Vec<T>),
    /// The values are on the device until the ops issued before the read have finished.
    Queued {
        /// The tensor to read. It must not be written before the read has finished.
        from: Tensor,
        /// The read's place in the device's queue.
        place: usize,
    },
}

impl<T: Copy + Default> Reading<T> {
    /// Begins a read: the device tells when it has come this far, and other backends read now.
    fn begin_with(
        be: &mut dyn Backend,
        from: Tensor,
        read: impl FnOnce(&mut dyn Backend, &mut [T]) -> Result<()>,
    ) -> Result<Self> {
        if let Some(cuda) = be.cuda() {
            return Ok(Self::Queued { from, place: cuda.begin_read()? });
        }
        let mut values = vec![T::default(); from.len()];
        read(be, &mut values)?;
        Ok(Self::Done(values))
    }

    fn finish_with(
        self,
        be: &mut dyn Backend,
        read: impl FnOnce(&mut cuda::Cuda, Tensor, usize) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        match (self, be.cuda()) {
            (Self::Done(values), _) => Ok(values),
            (Self::Queued { from, place }, Some(cuda)) => read(cuda, from, place),
            (Self::Queued { from, .. }, None) => {
                Err(Error::Op { op: "read", what: format!("{from:?} is read by another backend") })
            }
        }
    }
}

impl Reading {
    /// Begins to read a tensor back. Meanwhile a GPU runs the ops that are issued next. A read need not be finished.
    pub fn begin(be: &mut dyn Backend, from: Tensor) -> Result<Self> {
        Self::begin_with(be, from, |be, values| be.read(from, values))
    }

    /// Waits for the ops issued before the read was begun, but for no later ones. Returns the values.
    pub fn finish(self, be: &mut dyn Backend) -> Result<Vec<f32>> {
        self.finish_with(be, cuda::Cuda::finish_read)
    }
}

impl Reading<u8> {
    /// Begins to read a tensor of bytes back.
    pub fn begin_bytes(be: &mut dyn Backend, from: Tensor) -> Result<Self> {
        Self::begin_with(be, from, |be, bytes| be.read_bytes(from, bytes))
    }

    /// Waits for the ops issued before the read was begun, but for no later ones. Returns the bytes.
    pub fn finish_bytes(self, be: &mut dyn Backend) -> Result<Vec<u8>> {
        self.finish_with(be, cuda::Cuda::finish_read_bytes)
    }
}

/// A device that holds weights and working memory and runs ops on them.
pub trait Backend {
    /// A short name for messages.
    fn name(&self) -> &'static str;

    /// The quantized GEMMs that the backend has.
    fn gemm_formats(&self) -> GemmFormats {
        GemmFormats::NONE
    }

    /// Sets the flag that cancels ops: while it is true they end with [`Error::Interrupted`]. `None` removes it. A flag that the backend
    /// was created with also ends them.
    fn set_cancel(&mut self, _cancel: Option<Arc<AtomicBool>>) {}

    /// Uploads a weight and replaces whatever was stored there. `parts` are its rows in order, in the format of `to` or in one that can be
    /// [converted](WeightSlice::converts_to) or quantized to it. Ops issued earlier still read the old values.
    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()>;

    /// Bytes of memory that can still be allocated, if the backend knows.
    fn available(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Whether ops read weights in place, from the bytes that [`Backend::upload`] was given, instead of from a copy.
    fn reads_files(&self) -> bool {
        true
    }

    /// Allocates `bytes` of a region of memory. What was there is lost: weights are reserved before the first upload.
    fn reserve(&mut self, _region: Region, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Writes host values, row by row, rounded to the format of the tensor. Does not wait for ops that were issued earlier.
    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()>;

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

    /// How many values did not fit the FP8 tensor that an op stored them in, and became its largest value, since the last call. These are
    /// values of at least 464 times its scale, which would round to a code above 448. Waits until all ops issued so far have finished.
    fn take_saturated(&mut self) -> Result<u64> {
        Ok(0)
    }

    /// Waits until all ops issued so far have finished.
    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    /// The GPU that runs the ops, if one does. It offers what no other backend has: background reads, kernels and their launches.
    fn cuda(&mut self) -> Option<&mut cuda::Cuda> {
        None
    }
}

/// Fills a tensor with copies of its first `filled` rows, which double with every op.
pub fn repeat_rows(be: &mut dyn Backend, to: Tensor, mut filled: usize) -> Result<()> {
    while filled < to.rows {
        let more = filled.min(to.rows - filled);
        be.run(Op::Copy { out: to.rows(filled..filled + more), x: to.rows(0..more) })?;
        filled += more;
    }
    Ok(())
}

/// Runs `body` and afterwards frees the working memory that it allocated.
pub fn scope<R>(be: &mut dyn Backend, ws: &mut Arena, body: impl FnOnce(&mut dyn Backend, &mut Arena) -> Result<R>) -> Result<R> {
    let mark = ws.mark();
    let result = body(be, ws);
    be.released(ws.reset(mark));
    result
}
