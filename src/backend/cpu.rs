//! The reference backend: f32 arithmetic on the stored types, rounding only where a result is stored.
//!
//! Weights are read in place from the mapped files; only a part that is misaligned or of another dtype is copied. This file owns
//! the memory and resolves tensor descriptors to bounds-checked views; the arithmetic is in `kernels` and `image`.
#![allow(unsafe_code)]

use super::{Backend, GemmFormats, Linear, Op, Role, Sampling, StepKey, Stop, up_conv};
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::{Bytes, DType, Region, Scaling, SliceScaling, Stored, Tensor, WeightSlice, quantize};
use crate::threads;
use kiln_numerics::view::{In, Out, Watch};
use kiln_numerics::{image, kernels};
use memmap2::MmapMut;
use rayon::prelude::*;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The CPU backend.
pub struct Cpu {
    weights: Segments,
    adapters: Segments,
    arena: Buffer,
    kept: Buffer,
    high_water: u64,
    /// The backend's own threads. Without a pool it runs on the caller's threads.
    pool: Option<rayon::ThreadPool>,
    stop: Stop,
    /// Counts saturated values, and has the flags of `stop`.
    watch: Watch,
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

/// Uploads to a region, in the order of their addresses.
#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    /// Adds a segment. Segments that overlap it, even in part, are dropped: reading the rest of them is an error from now on.
    fn insert(&mut self, range: Range<u64>, data: SegmentData) {
        if range.is_empty() {
            return;
        }
        let index = self.0.partition_point(|s| s.range.end <= range.start);
        let taken = index + self.0[index..].partition_point(|s| s.range.start < range.end);
        self.0.splice(index..taken, [Segment { range, data }]);
    }

    /// The addresses of the segments that cover a range, each with the offset at which its part of the range begins. `None` if there is a
    /// gap.
    fn spans(&self, range: Range<u64>) -> Option<Vec<(u64, *const u8)>> {
        let first = self.0.partition_point(|s| s.range.end <= range.start);
        let mut spans = Vec::new();
        let mut at = range.start;
        for segment in &self.0[first..] {
            if at >= range.end || segment.range.start > at {
                break;
            }
            let skip = (at - segment.range.start) as usize;
            // SAFETY: `skip` is less than the segment's length because the segment contains `at`.
            spans.push((at, unsafe { segment.as_ptr().add(skip) }));
            at = segment.range.end;
        }
        (at >= range.end).then_some(spans)
    }
}

/// Zeroed pages, which are aligned to [`ALIGN`](crate::tensor::ALIGN). The system commits a page only when it is first touched. An
/// allocator would write zeros to memory of such an alignment, which takes seconds for a large image.
struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
    /// The pages that `ptr` leads to.
    _pages: Option<MmapMut>,
}

// SAFETY: the buffer is plain memory owned by this struct; access to it is handed out by `Cpu::input` and `Cpu::output` only.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared reference alone reads nothing.
unsafe impl Sync for Buffer {}

impl Buffer {
    const EMPTY: Self = Self { ptr: NonNull::dangling(), len: 0, _pages: None };

    fn new(bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self::EMPTY);
        }
        let pages = usize::try_from(bytes).ok().and_then(|len| MmapMut::map_anon(len).ok());
        let mut pages = pages.ok_or(Error::Memory { need: bytes })?;
        let ptr = NonNull::from(&mut *pages).cast();
        Ok(Self { ptr, len: pages.len(), _pages: Some(pages) })
    }
}

/// Debug builds poison unused working memory with NaN, so that reading it shows up in the results.
const POISON: bool = cfg!(debug_assertions);

impl Cpu {
    /// A backend with its own pool of `threads` workers (0: one per core). Once `stop` is set, ops fail with
    /// [`Error::Interrupted`].
    pub fn new(threads: usize, stop: Arc<AtomicBool>) -> Result<Self> {
        // With zero, rayon would read the number of threads from the environment.
        let count = if threads == 0 { threads::cores() } else { threads };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).stack_size(threads::STACK).build();
        let pool = pool.map_err(|error| Error::Threads { count, why: error.to_string() })?;
        Ok(Self { pool: Some(pool), ..Self::shared(stop) })
    }

    /// A backend that runs on the caller's threads: the rayon pool that the caller is in, or the global one.
    pub fn shared(stop: Arc<AtomicBool>) -> Self {
        Self {
            weights: Segments::default(),
            adapters: Segments::default(),
            arena: Buffer::EMPTY,
            kept: Buffer::EMPTY,
            high_water: 0,
            pool: None,
            watch: Watch { stop: vec![stop.clone()], ..Watch::default() },
            stop: Stop { all: stop, job: None },
        }
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

    fn outside(tensor: Tensor, op: &'static str) -> Error {
        Error::Op { op, what: format!("{tensor:?} lies outside its memory") }
    }

    /// Checks what the views rely on. All regions start at aligned addresses, so a tensor is aligned if its offset is.
    fn check_alignment(tensor: Tensor, op: &'static str) -> Result<()> {
        if tensor.offset.is_multiple_of(tensor.dtype.align() as u64) {
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
            Region::Arena | Region::Cache => {
                let (ptr, scales) = self.addresses(tensor, op)?;
                // SAFETY: elements and scales lie inside a buffer that lives as long as `self`.
                Ok(unsafe { In::new(tensor, &[(0, ptr.cast_const())], scales) })
            }
            Region::Weights | Region::Adapters => {
                let uploaded = if tensor.region == Region::Weights { &self.weights } else { &self.adapters };
                let row_bytes = (tensor.dtype.bytes(tensor.stride) as u64).max(1);
                let spans = uploaded.spans(extent.clone());
                let scales = uploaded.spans(tensor.scale_extent());
                let (Some(spans), Some(scales)) = (spans, scales) else { return Err(Self::outside(tensor, op)) };
                // Scales are uploaded in one piece, with all rows. Several spans have to begin at rows of the view, and the view has to
                // have all columns.
                let in_rows = |(at, _): &(u64, *const u8)| (at - extent.start).is_multiple_of(row_bytes);
                let in_rows = tensor.cols == tensor.stride && tensor.scaling == Scaling::Unscaled && spans.iter().all(in_rows);
                if scales.len() > 1 || (spans.len() > 1 && !in_rows) {
                    return Err(Self::outside(tensor, op));
                }
                let rows: Vec<_> = spans.iter().map(|(at, ptr)| (((at - extent.start) / row_bytes) as usize, *ptr)).collect();
                let scales = scales.first().map_or(std::ptr::null(), |(_, ptr)| *ptr);
                // SAFETY: the spans cover the elements and the scales without a gap, each row lies inside one span, and they live
                // as long as `self`.
                Ok(unsafe { In::new(tensor, &rows, scales) })
            }
        }
    }

    /// The addresses of the elements and the scales of a tensor that is not a weight.
    fn addresses(&self, tensor: Tensor, op: &'static str) -> Result<(*mut u8, *mut u8)> {
        let (scales, buffer) = (tensor.scale_extent(), if tensor.region == Region::Cache { &self.kept } else { &self.arena });
        if tensor.extent().end.max(scales.end) > buffer.len as u64 {
            return Err(Self::outside(tensor, op));
        }
        // SAFETY: both lie inside the buffer.
        unsafe { Ok((buffer.ptr.as_ptr().add(tensor.offset as usize), buffer.ptr.as_ptr().add(scales.start as usize))) }
    }

    /// A view for writing.
    ///
    /// # Safety
    /// No other view that overlaps the tensor may be used during the life of this one, which [`Op::check`] ensures. An op whose output is
    /// its input has two views of it, but reads each row before it writes that row.
    unsafe fn output(&self, tensor: Tensor, op: &'static str) -> Result<Out<'_>> {
        if tensor.region.is_read_only() || matches!(tensor.scaling, Scaling::Rows(_)) {
            return Err(Self::outside(tensor, op));
        }
        Self::check_alignment(tensor, op)?;
        let (ptr, scales) = self.addresses(tensor, op)?;
        // SAFETY: elements and scales lie inside a buffer; the caller guarantees exclusive access.
        Ok(unsafe { Out::new(tensor, ptr, scales, &self.watch) })
    }

    /// The weights of a linear layer.
    fn layer(&self, w: &Linear, op: &'static str) -> Result<kernels::Layer<'_>> {
        let read = |t: Tensor| self.input(t, op);
        Ok(kernels::Layer {
            weight: In::stack(w.weight.parts().iter().map(|&part| read(part)).collect::<Result<_>>()?),
            bias: w.bias.map(read).transpose()?,
            lora: w.lora.map(|l| Ok((read(l.down)?, read(l.up)?))).transpose()?,
        })
    }

    fn touch(&mut self, tensor: Tensor) {
        if tensor.region == Region::Arena {
            self.high_water = self.high_water.max(tensor.extent().end).max(tensor.scale_extent().end);
        }
    }

    fn dispatch(&self, op: Op<'_>) -> Result<()> {
        let name = op.name();
        let read = |t: Tensor| self.input(t, name);
        let read_opt = |t: Option<Tensor>| t.map(read).transpose();
        let layer = |w: &Linear| self.layer(w, name);
        // SAFETY: `Op::check` has rejected operands that overlap a written one.
        let write = |t: Tensor| unsafe { self.output(t, name) };
        match op {
            Op::Copy { out, x } => kernels::copy(write(out)?, read(x)?),
            Op::Silu { out, x } => kernels::silu(write(out)?, read(x)?),
            Op::RmsNorm { out, x, weight, eps } => kernels::rms_norm(write(out)?, read(x)?, read(weight)?, eps),
            Op::LayerNormModulate { streams, eps } => {
                for s in streams {
                    kernels::layer_norm_modulate(write(s.out)?, read(s.x)?, read(s.shift)?, read(s.scale)?, eps);
                }
            }
            Op::Linear(streams) => {
                for s in streams {
                    kernels::linear(write(s.out)?, read(s.x)?, layer(s.w)?);
                }
            }
            Op::LinearSwiglu(streams) => {
                for s in streams {
                    kernels::linear_swiglu(write(s.out)?, read(s.x)?, layer(s.w)?);
                }
            }
            Op::LinearGateResidual(streams) => {
                for s in streams {
                    kernels::linear_gate_residual(write(s.into)?, read(s.x)?, layer(s.w)?, read_opt(s.gate)?);
                }
            }
            Op::Qkv(streams) => {
                for s in streams {
                    let gain = |weight: Option<Tensor>, scale: f32| {
                        let norm = read_opt(weight)?.zip(s.norm.map(|norm| norm.eps));
                        Ok(kernels::HeadGain::new(norm, scale, s.rope.table.cols))
                    };
                    let heads = kernels::Heads {
                        q: gain(s.norm.map(|norm| norm.q), s.q_scale)?,
                        k: gain(s.norm.map(|norm| norm.k), s.k_scale)?,
                        table: read(s.rope.table)?,
                        style: s.rope.style,
                    };
                    let out = [s.q.map(write).transpose()?, Some(write(s.k)?), Some(write(s.v)?)];
                    kernels::qkv(out, s.mlp.map(write).transpose()?, read(s.x)?, layer(s.w)?, &heads);
                }
            }
            Op::Attention { out, q, kv, head_dim, causal, softmax } => {
                let kv = kv.iter().map(|s| Ok((read(s.k)?, read(s.v)?))).collect::<Result<Vec<_>>>()?;
                let params = kernels::LogitParams { causal, scale: softmax.natural_scale() };
                let mut first = 0;
                for &out in out {
                    kernels::attention(write(out)?, read(q.rows(first..first + out.rows))?, &kv, head_dim, params);
                    first += out.rows;
                }
            }
            Op::Conv { out, x, w, width, height, sampling, residual, shortcut, stats } => {
                let geometry = image::Geometry { width, height, sampling };
                let shortcut = shortcut.map(|s| Ok((read(s.x)?, layer(s.w)?))).transpose()?;
                let filters = image::Filters::new(&read(w.weight)?, &read(w.bias)?, geometry);
                image::conv(write(out)?, read(x)?, &filters, read_opt(residual)?, shortcut);
                if let Some(stats) = stats {
                    image::group_stats_into(write(stats)?, read(out)?);
                }
            }
            Op::GroupNorm { out, x, norm, stats, silu } => {
                let params =
                    image::GroupParams { weight: read(norm.weight)?, bias: read(norm.bias)?, groups: norm.groups, eps: norm.eps };
                image::group_norm(write(out)?, read(x)?, &params, read_opt(stats)?, silu);
            }
            Op::NormConv { out, x, norm, stats, w, width, height } => {
                let params =
                    image::GroupParams { weight: read(norm.weight)?, bias: read(norm.bias)?, groups: norm.groups, eps: norm.eps };
                let geometry = image::Geometry { width, height, sampling: Sampling::Same };
                let filters = image::Filters::new(&read(w.weight)?, &read(w.bias)?, geometry);
                image::norm_conv(write(out)?, read(x)?, &params, read_opt(stats)?, &filters);
            }
            Op::Patchify { out, x, stats, width } => {
                image::patchify(write(out)?, read(x)?, read(stats.mean)?, read(stats.var)?, stats.eps, width);
            }
            Op::Unpatchify { out, x, stats, width } => {
                image::unpatchify(write(out)?, read(x)?, read(stats.mean)?, read(stats.var)?, stats.eps, width);
            }
            Op::Euler { latents, velocity, dt } => kernels::euler(write(latents)?, read(velocity)?, dt),
            Op::Renoise { latents, init, noise, keep, sigma } => {
                kernels::renoise(write(latents)?, read(init)?, read(noise)?, read_opt(keep)?, sigma);
            }
            Op::Guidance { out, cond, uncond, scale } => kernels::guidance(write(out)?, read(cond)?, read(uncond)?, scale),
            Op::Blend { into, from, seam } => image::blend(write(into)?, read(from)?, seam),
            Op::NonFinite { count, x } => kernels::non_finite(write(count)?, read(x)?),
            Op::LargestMagnitude { largest, x } => kernels::largest_magnitude(write(largest)?, read(x)?),
            Op::Preview { out, latents, table, width } => {
                image::preview(write(out)?, read(latents)?, read(table)?, width);
            }
            Op::Pixels { out, x } => kernels::pixels(write(out)?, read(x)?),
        }
        Ok(())
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn gemm_formats(&self) -> GemmFormats {
        GemmFormats::ALL
    }

    fn available(&self) -> Result<Option<u64>> {
        Ok(memory::available())
    }

    fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.stop.job = cancel;
        self.watch.stop = [&self.stop.all].into_iter().chain(&self.stop.job).cloned().collect();
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        self.stop.check()?;
        let wrong = |what: &str| Error::Op { op: "upload", what: format!("{role:?} parts do not {what} {to:?}") };
        if to.stride != to.cols || parts.iter().map(|part| part.rows).sum::<usize>() != to.rows {
            return Err(wrong("fill"));
        }
        // The view of a weight needs its scales in one piece.
        if parts.len() > 1 && !to.scale_extent().is_empty() {
            return Err(wrong("share the scales of"));
        }
        let mut at = to.offset;
        let mut segments = Vec::new();
        for part in parts {
            let part = &match role {
                Role::UpConv => self.on_threads(|| up_conv::folded(part, to.dtype)).ok_or_else(|| wrong("fit"))?,
                Role::Linear | Role::Conv | Role::Vector => part.clone(),
            };
            if part.cols() != to.cols || !part.is_complete() {
                return Err(wrong("fit"));
            }
            let range = at..at + to.dtype.bytes(part.rows * to.cols) as u64;
            at = range.end;
            if quantize::encodes(part, to.stored()) {
                let encoded = self.on_threads(|| quantize::encoded(part, to.stored()));
                let infinite = || format!("{to:?} is quantized from values that are not finite");
                let (codes, scales) = encoded.ok_or_else(|| Error::Op { op: "upload", what: infinite() })?;
                segments.push((range, SegmentData::Mapped(codes)));
                segments.push((to.scale_extent(), SegmentData::Mapped(scales)));
                continue;
            }
            if part.converts_to(to.stored()) && !part.is_readable_as(to.stored()) {
                let data = self.on_threads(|| converted(part, to.stored()))?;
                segments.push((range, data));
                continue;
            }
            let part = part.in_tensor_layout();
            if !part.is_readable_as(to.stored()) {
                return Err(wrong("have the format of"));
            }
            segments.push((range, SegmentData::Mapped(part.bytes)));
            if let SliceScaling::Rows(scales) | SliceScaling::Blocks16 { scales, .. } = part.scaling {
                segments.push((to.scale_extent(), SegmentData::Mapped(scales)));
            }
        }
        let uploaded = match to.region {
            Region::Weights => &mut self.weights,
            Region::Adapters => &mut self.adapters,
            Region::Arena | Region::Cache => return Err(wrong("belong into")),
        };
        segments.into_iter().for_each(|(range, data)| uploaded.insert(range, data));
        Ok(())
    }

    fn reserve(&mut self, region: Region, bytes: u64) -> Result<()> {
        match region {
            Region::Weights => self.weights = Segments::default(),
            Region::Adapters => self.adapters = Segments::default(),
            Region::Cache => {
                self.kept = Buffer::EMPTY;
                self.kept = Buffer::new(bytes)?;
            }
            Region::Arena => {
                self.arena = Buffer::EMPTY;
                self.arena = Buffer::new(bytes)?;
                self.high_water = 0;
                self.released(0..bytes);
            }
        }
        Ok(())
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        self.touch(to);
        if values.len() != to.len() {
            return Err(Error::Op { op: "write", what: format!("{} values for {to:?}", values.len()) });
        }
        // Values that the host writes are no results of an op, so they are not counted.
        let saturated = *self.watch.saturated.get_mut();
        // SAFETY: `&mut self`, so no other view is alive.
        let mut out = unsafe { self.output(to, "write")? };
        for (r, row) in values.chunks_exact(to.cols.max(1)).enumerate() {
            out.store(r, 0, row);
        }
        *self.watch.saturated.get_mut() = saturated;
        Ok(())
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        if to.len() != from.len() {
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
        self.stop.check()?;
        op.check()?;
        op.operands(&mut |t, _| self.touch(t));
        let _span = crate::trace::span(op.name());
        self.on_threads(|| self.dispatch(op))?;
        // Loops end early once a flag is set.
        self.stop.check()
    }

    fn released(&mut self, range: Range<u64>) {
        let end = (range.end as usize).min(self.arena.len);
        let start = (range.start as usize).min(end);
        if POISON && end > start {
            // SAFETY: the range lies inside the arena and `&mut self` rules out other views. All ones is NaN in every float type
            // but e2m1, whose block scales it makes NaN.
            unsafe { std::ptr::write_bytes(self.arena.ptr.as_ptr().add(start), 0xff, end - start) }
        }
    }

    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        body(self)
    }

    fn take_saturated(&mut self) -> Result<u64> {
        Ok(std::mem::take(self.watch.saturated.get_mut()))
    }
}

/// A part's values in another format, at an aligned address.
fn converted(part: &WeightSlice, to: Stored) -> Result<SegmentData> {
    /// Elements that one thread converts at a time.
    const GRAIN: usize = 4 << 10;
    let (rows, cols) = (part.rows, part.cols());
    let least = GRAIN.div_ceil(cols.max(1));
    match to.dtype {
        DType::F32 => {
            let mut values = vec![0.0; rows * cols];
            let each = values.par_chunks_exact_mut(cols.max(1)).with_min_len(least).enumerate();
            each.for_each(|(row, to)| part.decode(row, to));
            Ok(SegmentData::F32(values))
        }
        DType::Bf16 | DType::F16 => {
            let mut values = vec![0; rows * cols];
            let each = values.par_chunks_exact_mut(cols.max(1)).with_min_len(least).enumerate();
            each.for_each_init(
                || vec![0; to.dtype.bytes(cols)],
                |stored, (row, words): (usize, &mut [u16])| {
                    part.convert(row, to, stored);
                    words.iter_mut().zip(stored.as_chunks().0).for_each(|(word, b)| *word = u16::from_ne_bytes(*b));
                },
            );
            Ok(SegmentData::Half(values))
        }
        dtype if dtype.is_quantized() => {
            let mut codes = vec![0; dtype.bytes(rows * cols)];
            let each = codes.par_chunks_exact_mut(dtype.bytes(cols).max(1)).with_min_len(least).enumerate();
            each.for_each(|(row, codes)| part.convert(row, to, codes));
            Ok(SegmentData::Mapped(Bytes::new(Arc::new(codes))))
        }
        _ => Err(Error::Op { op: "upload", what: format!("no conversion from {:?} to {to:?}", part.dtype) }),
    }
}
