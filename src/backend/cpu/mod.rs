//! The reference backend: f32 arithmetic on the stored types, rounding only where a result is stored.
//!
//! Weights are read in place from the mapped files; only a part that is misaligned or of another dtype is copied. This file owns
//! the memory and resolves tensor descriptors to bounds-checked views; the arithmetic is in `kernels` and `image`.
#![allow(unsafe_code)]

mod image;
mod kernels;
mod math;
mod view;

use super::{Backend, HostData, Op, Role, StepKey, WeightPart};
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::{ALIGN, Bytes, DType, Region, Tensor};
use crate::threads;
use rayon::prelude::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use view::{In, Out};

/// The CPU backend.
pub struct Cpu {
    weights: Vec<Segment>,
    arena: Buffer,
    high_water: u64,
    /// The backend's own threads; without a pool it runs on those of the caller.
    pool: Option<rayon::ThreadPool>,
    stop: Arc<AtomicBool>,
}

/// Consecutive bytes of a weight and the range of the weight region that they represent.
struct Segment {
    range: Range<u64>,
    data: SegmentData,
}

enum SegmentData {
    Mapped(Bytes),
    F32(Vec<f32>),
    Half(Vec<u16>),
}

impl Segment {
    fn as_ptr(&self) -> *const u8 {
        match &self.data {
            SegmentData::Mapped(bytes) => bytes.as_ptr(),
            SegmentData::F32(v) => v.as_ptr().cast(),
            SegmentData::Half(v) => v.as_ptr().cast(),
        }
    }
}

/// Zeroed memory aligned to [`ALIGN`]. The system commits a page only when it is first touched.
struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is plain memory owned by this struct; access to it is handed out by `Cpu::input` and `Cpu::output` only.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared reference alone reads nothing.
unsafe impl Sync for Buffer {}

impl Buffer {
    const EMPTY: Self = Self { ptr: NonNull::dangling(), len: 0 };

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len, ALIGN as usize).ok()
    }

    fn new(bytes: u64) -> Result<Self> {
        let refused = Error::Memory { need: bytes };
        if bytes == 0 {
            return Ok(Self::EMPTY);
        }
        let Some(layout) = usize::try_from(bytes).ok().and_then(Self::layout) else { return Err(refused) };
        // SAFETY: the layout is not empty.
        let ptr = memory::fallible(|| unsafe { alloc_zeroed(layout) });
        NonNull::new(ptr).map(|ptr| Self { ptr, len: layout.size() }).ok_or(refused)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (true, Some(layout)) = (self.len > 0, Self::layout(self.len)) {
            // SAFETY: allocated in `new` with this same layout.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

/// Debug builds poison unused working memory with NaN, so that reading it shows up in the results.
const POISON: bool = cfg!(debug_assertions);

impl Cpu {
    /// A backend with its own pool of `threads` workers (0: one per core). Once `stop` is set, ops fail with
    /// [`Error::Interrupted`].
    pub fn new(threads: usize, stop: Arc<AtomicBool>) -> Result<Self> {
        // rayon takes zero as permission to read the number of threads from the environment.
        let count = if threads == 0 { threads::cores() } else { threads };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).stack_size(threads::STACK).build();
        let pool = pool.map_err(|error| Error::Threads { count, why: error.to_string() })?;
        Ok(Self { pool: Some(pool), ..Self::shared(stop) })
    }

    /// A backend that runs on the caller's threads: the rayon pool that the caller is in, or the global one.
    pub fn shared(stop: Arc<AtomicBool>) -> Self {
        Self { weights: Vec::new(), arena: Buffer::EMPTY, high_water: 0, pool: None, stop }
    }

    /// Number of worker threads.
    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or_else(rayon::current_num_threads, rayon::ThreadPool::current_num_threads)
    }

    /// Runs `work` on the backend's threads.
    fn on_threads<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// High-water mark of working memory: the end of the highest range that an op or transfer has accessed.
    pub fn high_water(&self) -> u64 {
        self.high_water
    }

    fn check_stop(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn outside(tensor: Tensor, op: &'static str) -> Error {
        Error::Op { op, what: format!("{tensor:?} lies outside its memory") }
    }

    /// Checks what the views rely on. Both regions start at aligned addresses, so a tensor is aligned if its offset is.
    fn check_alignment(tensor: Tensor, op: &'static str) -> Result<()> {
        if tensor.offset.is_multiple_of(tensor.dtype.size() as u64) {
            return Ok(());
        }
        Err(Error::Op { op, what: format!("{tensor:?} is misaligned") })
    }

    /// A view for reading.
    fn input(&self, tensor: Tensor, op: &'static str) -> Result<In<'_>> {
        let extent = tensor.extent();
        if tensor.is_empty() {
            return Ok(In::empty(tensor));
        }
        Self::check_alignment(tensor, op)?;
        match tensor.region {
            Region::Arena => {
                if extent.end > self.arena.len as u64 {
                    return Err(Self::outside(tensor, op));
                }
                // SAFETY: the extent lies inside the arena, which lives as long as `self`.
                Ok(unsafe { In::new(tensor, vec![(0, self.arena.ptr.as_ptr().add(tensor.offset as usize))]) })
            }
            Region::Weights => {
                let row_bytes = (tensor.stride * tensor.dtype.size()) as u64;
                let first = self.weights.partition_point(|s| s.range.end <= extent.start);
                let mut spans = Vec::new();
                let mut at = extent.start;
                for segment in &self.weights[first..] {
                    if at >= extent.end || segment.range.start > at {
                        break;
                    }
                    let skip = (at - segment.range.start) as usize;
                    // SAFETY: `skip` is less than the segment's length because the segment contains `at`.
                    spans.push((((at - extent.start) / row_bytes) as usize, unsafe { segment.as_ptr().add(skip) }));
                    at = segment.range.end;
                }
                // A span begins at a row of the weight, which is a row of the view only if the view has all columns.
                if at < extent.end || (spans.len() > 1 && tensor.cols != tensor.stride) {
                    return Err(Self::outside(tensor, op));
                }
                // SAFETY: the spans cover the extent without a gap, each row lies inside one span, and they live as long as
                // `self`.
                Ok(unsafe { In::new(tensor, spans) })
            }
        }
    }

    /// A view for writing.
    ///
    /// # Safety
    /// No other view that overlaps the tensor may be used while this one is, which [`Op::check`] ensures.
    unsafe fn output(&self, tensor: Tensor, op: &'static str) -> Result<Out<'_>> {
        if tensor.region != Region::Arena || tensor.extent().end > self.arena.len as u64 {
            return Err(Self::outside(tensor, op));
        }
        Self::check_alignment(tensor, op)?;
        // SAFETY: the extent lies inside the arena; the caller guarantees exclusive access.
        Ok(unsafe { Out::new(tensor, self.arena.ptr.as_ptr().add(tensor.offset as usize)) })
    }

    fn touch(&mut self, tensor: Tensor) {
        if tensor.region == Region::Arena {
            self.high_water = self.high_water.max(tensor.extent().end);
        }
    }

    fn dispatch(&self, op: Op<'_>) -> Result<()> {
        let name = op.name();
        let read = |t: Tensor| self.input(t, name);
        let read_opt = |t: Option<Tensor>| t.map(read).transpose();
        // SAFETY: `Op::check` has rejected operands that overlap a written one.
        let write = |t: Tensor| unsafe { self.output(t, name) };
        match op {
            Op::Embed { out, ids, table } => kernels::embed(write(out)?, read(ids)?, read(table)?)?,
            Op::Copy { out, x } => kernels::map(write(out)?, read(x)?, |v| v),
            Op::Silu { out, x } => kernels::map(write(out)?, read(x)?, math::silu),
            Op::RmsNorm { out, x, weight, eps } => kernels::rms_norm(write(out)?, read(x)?, read(weight)?, eps),
            Op::LayerNormModulate { streams, eps } => {
                for s in streams {
                    kernels::layer_norm_modulate(write(s.out)?, read(s.x)?, read(s.shift)?, read(s.scale)?, eps);
                }
            }
            Op::Linear(streams) => {
                for s in streams {
                    kernels::linear(write(s.out)?, read(s.x)?, read(s.w.weight)?, read_opt(s.w.bias)?);
                }
            }
            Op::LinearSwiglu(streams) => {
                for s in streams {
                    kernels::linear_swiglu(write(s.out)?, read(s.x)?, read(s.w.weight)?);
                }
            }
            Op::LinearGateResidual(streams) => {
                for s in streams {
                    let (gate, bias) = (read_opt(s.gate)?, read_opt(s.w.bias)?);
                    kernels::linear_gate_residual(write(s.into)?, read(s.x)?, read(s.w.weight)?, bias, gate);
                }
            }
            Op::Qkv(streams) => {
                for s in streams {
                    let heads = kernels::QkNormRope {
                        q_norm: read(s.norm.q)?,
                        k_norm: read(s.norm.k)?,
                        eps: s.norm.eps,
                        q_scale: s.norm.q_scale,
                        table: read(s.rope.table)?,
                        style: s.rope.style,
                    };
                    let out = [s.q.map(write).transpose()?, Some(write(s.k)?), Some(write(s.v)?)];
                    kernels::qkv(out, s.mlp.map(write).transpose()?, read(s.x)?, read(s.w.weight)?, &heads);
                }
            }
            Op::Attention { out, q, kv, head_dim, causal, scale, .. } => {
                let kv = kv.iter().map(|s| Ok((read(s.k)?, read(s.v)?))).collect::<Result<Vec<_>>>()?;
                kernels::attention(write(out)?, read(q)?, &kv, head_dim, kernels::LogitParams { causal, scale });
            }
            Op::Conv { out, x, w, width, height, sampling, residual, stats } => {
                let geometry = image::Geometry { width, height, sampling };
                image::conv(write(out)?, read(x)?, read(w.weight)?, read(w.bias)?, geometry, read_opt(residual)?);
                if let Some(stats) = stats {
                    image::group_stats_into(write(stats)?, read(out)?);
                }
            }
            Op::GroupNorm { out, x, norm, stats, silu } => {
                let params =
                    image::GroupParams { weight: read(norm.weight)?, bias: read(norm.bias)?, groups: norm.groups, eps: norm.eps };
                image::group_norm(write(out)?, read(x)?, &params, read_opt(stats)?, silu);
            }
            Op::Patchify { out, x, stats, width } => {
                image::patchify(write(out)?, read(x)?, read(stats.mean)?, read(stats.var)?, stats.eps, width);
            }
            Op::Unpatchify { out, x, stats, width } => {
                image::unpatchify(write(out)?, read(x)?, read(stats.mean)?, read(stats.var)?, stats.eps, width);
            }
            Op::Euler { latents, velocity, dt } => kernels::euler(write(latents)?, read(velocity)?, dt),
            Op::Guidance { out, cond, uncond, scale } => kernels::guidance(write(out)?, read(cond)?, read(uncond)?, scale),
            Op::NonFinite { count, x } => kernels::non_finite(write(count)?, read(x)?),
            Op::Pixels { out, x } => kernels::map(write(out)?, read(x)?, math::to_byte),
        }
        Ok(())
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn available(&self) -> Result<Option<u64>> {
        Ok(memory::available())
    }

    fn reserve_weights(&mut self, _bytes: u64) -> Result<()> {
        self.weights.clear();
        Ok(())
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightPart]) -> Result<()> {
        self.check_stop()?;
        let total = to.offset + (to.len() * to.dtype.size()) as u64;
        let mut at = to.offset;
        for part in parts {
            let elements = part.bytes.len() / part.dtype.size();
            let end = at + (elements * to.dtype.size()) as u64;
            let whole = part.bytes.len() % part.dtype.size() == 0 && elements % to.cols.max(1) == 0;
            if end > total || !whole {
                return Err(Error::Op { op: "upload", what: format!("{role:?} parts do not fit {to:?}") });
            }
            let data = if part.is_readable_as(to.dtype) {
                SegmentData::Mapped(part.bytes.clone())
            } else {
                self.on_threads(|| converted(part, to.dtype))?
            };
            if elements > 0 {
                let index = self.weights.partition_point(|s| s.range.end <= at);
                // Segments that overlap the new one are dropped, even if only in part: reading the rest of them is an error from
                // now on.
                let taken = index + self.weights[index..].partition_point(|s| s.range.start < end);
                self.weights.splice(index..taken, [Segment { range: at..end, data }]);
            }
            at = end;
        }
        if at != total {
            return Err(Error::Op { op: "upload", what: format!("{role:?} parts do not fill {to:?}") });
        }
        Ok(())
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.arena = Buffer::EMPTY;
        self.arena = Buffer::new(bytes)?;
        self.high_water = 0;
        self.released(0..bytes);
        Ok(())
    }

    fn write(&mut self, to: Tensor, data: HostData<'_>) -> Result<()> {
        self.touch(to);
        let wrong = |what: &str| Error::Op { op: "write", what: format!("{what} for {to:?}") };
        // SAFETY: `&mut self`, so no other view is alive.
        let mut out = unsafe { self.output(to, "write")? };
        match data {
            HostData::F32(values) if to.dtype != DType::U32 => {
                if values.len() != to.len() {
                    return Err(wrong("wrong number of values"));
                }
                for (r, row) in values.chunks_exact(to.cols.max(1)).enumerate() {
                    out.store(r, 0, row);
                }
            }
            HostData::U32(values) if to.dtype == DType::U32 && to.cols == 1 => {
                if values.len() != to.len() {
                    return Err(wrong("wrong number of ids"));
                }
                values.iter().enumerate().for_each(|(r, &id)| out.store_id(r, id));
            }
            _ => return Err(wrong("wrong type")),
        }
        Ok(())
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        if to.len() != from.len() || from.dtype == DType::U32 {
            return Err(Error::Op { op: "read", what: format!("{} values from {from:?}", to.len()) });
        }
        let view = self.input(from, "read")?;
        for (r, row) in to.chunks_exact_mut(from.cols.max(1)).enumerate() {
            view.load(r, 0, row);
        }
        Ok(())
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        if to.len() != from.len() || from.dtype != DType::U8 {
            return Err(Error::Op { op: "read_bytes", what: format!("{} bytes from {from:?}", to.len()) });
        }
        let view = self.input(from, "read_bytes")?;
        for (r, row) in to.chunks_exact_mut(from.cols.max(1)).enumerate() {
            view.bytes(r, 0, row);
        }
        Ok(())
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        self.check_stop()?;
        op.check()?;
        op.operands(&mut |t, _| self.touch(t));
        self.on_threads(|| self.dispatch(op))
    }

    fn released(&mut self, range: Range<u64>) {
        let end = (range.end as usize).min(self.arena.len);
        let start = (range.start as usize).min(end);
        if POISON && end > start {
            // SAFETY: the range lies inside the arena and `&mut self` rules out other views. All ones is NaN in every float type.
            unsafe { std::ptr::write_bytes(self.arena.ptr.as_ptr().add(start), 0xff, end - start) }
        }
    }

    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        body(self)
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A part's values in another element type, or the same one at an aligned address.
fn converted(part: &WeightPart, to: DType) -> Result<SegmentData> {
    /// Elements that one thread converts at a time.
    const GRAIN: usize = 4 << 10;
    let (from, bytes) = (part.dtype, &part.bytes[..]);
    let (elements, pieces) = (bytes.len() / from.size(), bytes.par_chunks(GRAIN * from.size()));
    match (from, to) {
        (DType::F32 | DType::Bf16 | DType::F16, DType::F32) => {
            let mut values = vec![0.0; elements];
            values.par_chunks_mut(GRAIN).zip(pieces).for_each(|(to, bytes)| from.decode(bytes, to));
            Ok(SegmentData::F32(values))
        }
        (DType::F32 | DType::Bf16 | DType::F16, DType::Bf16) | (DType::F16, DType::F16) => {
            let mut values = vec![0; elements];
            values.par_chunks_mut(GRAIN).zip(pieces).for_each(|(words, bytes): (&mut [u16], _)| {
                let mut stored = [0; 2 * GRAIN];
                let stored = &mut stored[..2 * words.len()];
                from.convert(bytes, to, stored);
                words.iter_mut().zip(stored.as_chunks().0).for_each(|(word, b)| *word = u16::from_ne_bytes(*b));
            });
            Ok(SegmentData::Half(values))
        }
        _ => Err(Error::Op { op: "upload", what: format!("no conversion from {from:?} to {to:?}") }),
    }
}
