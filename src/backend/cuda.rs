//! The CUDA backend: device allocations, a stream for ops and one for uploads, and one or more kernel launches for each op.
//!
//! From the bottom up: [`driver`] is the seam to the driver API and `system` the real driver behind it. `launch` holds the kernel table of
//! `kernels/kernels.def` and the one launch function. `select` chooses tiles and schedules, without a GPU. `params` and `memory` turn
//! tensors into kernel parameters. Each op family has a file (`pointwise`, `norm`, `gemm`, `conv` with `conv_sm90`, `attention`) that works
//! on an `OpContext`, and `dispatch` matches ops to families. This file is the [`Backend`]: transfers (`transfers`), uploads (`staging`)
//! and captured graphs (`graph`).

mod abi;
mod arch;
mod attention;
mod context;
mod conv;
mod conv_narrow;
mod conv_sm90;
mod dispatch;
pub mod driver;
mod expansion;
mod gemm;
mod graph;
mod kernel_preload;
mod launch;
mod lora;
mod memory;
mod norm;
mod params;
mod pointwise;
mod select;
mod selftest;
mod staging;
mod system;
mod timeline;
mod transfers;

pub use arch::Arch;
pub use attention::has_two_attention_ctas;
pub use context::KernelChoice;
pub use dispatch::kernels_of;
#[cfg(feature = "internals")]
pub use launch::built_in;
pub use launch::{ARCHS, Images, Kernel, NVCC};
#[cfg(feature = "internals")]
pub use select::GemmOperands;
pub use select::Tile;
#[cfg(feature = "internals")]
pub use selftest::CopyGraph;
pub use selftest::{CopyBy, Fragments, LANES, Mma};
pub use system::{CAPABILITY, System, devices, driver_release, has_driver};

use super::dry_run::Live;
use super::{Backend, Fp8Accumulate, GemmFormats, Op, Role, StepKey, Stop};
use crate::error::{Error, Result};
use crate::tensor::{ALIGN, DType, Region, Scaling, Tensor, WeightSlice, nvfp4};
use crate::trace;
use context::OpContext;
use dispatch::dispatch;
use driver::{DeviceInfo, Driver, Rows, Stream};
use graph::{CapturedGraph, Steps};
use kernel_preload::KernelPreload;
use launch::Kernels;
use memory::Memory;
use params::{NO_CODE, dtype_code};
use staging::Staging;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use timeline::Timeline;
use transfers::Transfers;

/// The quantized GEMMs and attention that have kernels for this compute capability. Weights with plain inputs are expanded to bf16: on
/// Hopper by the GEMM itself, elsewhere by a kernel before it. Compute capability 10.x has no `mma.sync` of FP8 either: the compiler would
/// convert FP8 to f16, which takes longer than expanding weights once. Compute capability 12.x multiplies NVFP4 after a self-test
/// ([`Cuda::enable_gated`]).
pub const fn gemm_formats(capability: (u32, u32)) -> GemmFormats {
    let expanded = GemmFormats { w8a16: true, w4a16: true, expands: true, ..GemmFormats::NONE };
    match capability {
        (8, 9) | (9, 0) => GemmFormats { w8a8: true, qk8: true, ..expanded },
        (12.., _) => GemmFormats { w8a8: true, w4a4: true, qk8: true, ..expanded },
        _ => expanded,
    }
}

/// How e4m3 products are accumulated on this compute capability, if the user asks for `asked`. Only the Hopper kernels offer a choice: all
/// others have exact sums.
pub const fn fp8_accumulate(capability: (u32, u32), asked: Fp8Accumulate) -> Fp8Accumulate {
    match capability {
        (9, 0) => asked,
        _ => Fp8Accumulate::Exact,
    }
}

/// The CUDA backend.
pub struct Cuda {
    // In this order: graphs and uploads end before the kernels and the memory they use, and all before the stream and the driver.
    steps: Steps,
    staging: Option<Staging>,
    transfers: Transfers,
    context: OpContext,
    /// Offsets of the weights that running ops may still read.
    read: Range<u64>,
    /// Values that did not fit the FP8 tensor they were stored in: the part of the count that was already taken from the device.
    saturated: u64,
    /// The working memory that is in use.
    live: Live,
    capturing: bool,
    capture: bool,
    poison: bool,
    stop: Stop,
    stream: StreamGuard,
    driver: Rc<dyn Driver>,
}

/// A stream. If the backend created it, the driver to destroy it with.
struct StreamGuard(Option<Rc<dyn Driver>>, Stream);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        if let Some(driver) = &self.0 {
            driver.destroy_stream(self.1);
        }
    }
}

impl Cuda {
    /// A backend on GPU number `device`. Ops end with [`Error::Interrupted`] once `stop` is set.
    pub fn open(device: usize, stop: Arc<AtomicBool>) -> Result<Self> {
        Self::new(Rc::new(System::open(device)?), &launch::built_in, stop)
    }

    /// A backend on a driver, with kernels from `images`.
    pub fn new(driver: Rc<dyn Driver>, images: Images<'_>, stop: Arc<AtomicBool>) -> Result<Self> {
        let stream = StreamGuard(Some(driver.clone()), driver.stream()?);
        Self::on_stream(driver, images, stop, stream)
    }

    /// A backend for tensors in the caller's memory, on the caller's stream of the same GPU: a tensor's offset is its address. Benchmarks
    /// use it to compare kiln with another library.
    pub fn on_external_memory(device: usize, stream: u64) -> Result<Self> {
        let driver: Rc<dyn Driver> = Rc::new(System::open(device)?);
        let mut cuda = Self::on_stream(driver, &launch::built_in, Arc::default(), StreamGuard(None, Stream(stream)))?;
        // Scratch is the only memory that the backend allocates.
        cuda.reserve(Region::Arena, 0)?;
        cuda.context.memory.use_addresses();
        Ok(cuda)
    }

    fn on_stream(driver: Rc<dyn Driver>, images: Images<'_>, stop: Arc<AtomicBool>, stream: StreamGuard) -> Result<Self> {
        Ok(Self {
            steps: Steps::default(),
            staging: None,
            transfers: Transfers::new(driver.clone()),
            context: OpContext {
                kernels: Kernels::open(driver.clone(), images, stream.1)?,
                memory: Memory::new(driver.clone()),
                choice: KernelChoice::Best,
                accumulate: Fp8Accumulate::Auto,
                sms: driver.device().multiprocessors,
                shared: driver.device().shared,
            },
            read: 0..0,
            saturated: 0,
            live: Live::default(),
            capturing: false,
            capture: true,
            poison: cfg!(debug_assertions),
            stop: Stop { all: stop, job: None },
            stream,
            driver,
        })
    }

    /// Fills unused working memory with NaN, so that a stray read shows in the results. Debug builds always do.
    pub fn set_poison(&mut self, poison: bool) {
        self.poison = poison;
    }

    /// Whether recurring steps are captured as CUDA graphs and replayed.
    pub fn set_graph_capture(&mut self, capture: bool) {
        self.capture = capture;
    }

    /// Which kernels matrix ops take, to compare one with another.
    pub fn set_choice(&mut self, choice: KernelChoice) {
        self.context.choice = choice;
    }

    /// Whether the kernels for compute capability 12.x may be chosen, on GPUs that have them. Their authors never ran them on hardware, so
    /// they are off until a self-test has passed on this GPU. Captured steps are captured anew.
    pub fn enable_gated(&mut self, enabled: bool) {
        self.context.kernels.enable_gated(enabled);
        self.steps.begin_anew();
    }

    /// How sums of e4m3 products are accumulated. Captured steps are captured anew.
    pub fn set_fp8_accumulate(&mut self, accumulate: Fp8Accumulate) {
        self.context.accumulate = accumulate;
        self.steps.begin_anew();
    }

    /// The GPU.
    pub fn device(&self) -> &DeviceInfo {
        self.driver.device()
    }

    /// Bytes per second that the GPU moves to or from its memory at most. `None` if the driver does not tell.
    pub fn memory_bandwidth(&self) -> Result<Option<u64>> {
        self.driver.memory_bandwidth()
    }

    /// The architecture of the fastest kernels that may be chosen on this GPU.
    pub fn arch(&self) -> Arch {
        self.launched().map(|(kernel, _)| kernel.arch()).max().unwrap_or(Arch::Portable)
    }

    /// How often each kernel that this GPU can run was launched so far. A captured launch counts once, however often its graph runs.
    pub fn launched(&self) -> impl Iterator<Item = (Kernel, u64)> {
        self.context.kernels.launched()
    }

    /// Number of launches so far, by kernel name, of each kernel that was launched.
    pub fn launches(&self) -> Vec<(&'static str, u64)> {
        self.launched().filter(|(_, times)| *times > 0).map(|(kernel, times)| (kernel.symbol(), times)).collect()
    }

    /// Begins a background read and returns its place in the queue.
    pub(crate) fn begin_read(&mut self) -> Result<usize> {
        self.prepare_transfer("read")?;
        self.transfers.begin_read(self.stream.1)
    }

    /// Waits for the ops issued before a read was begun, but for no later ones, and returns the values of this tensor.
    pub(crate) fn finish_read(&mut self, from: Tensor, place: usize) -> Result<Vec<f32>> {
        let Some(scale) = transferred_scale(from) else {
            return Err(Error::Op { op: "read", what: format!("{from:?} cannot be read in the background") });
        };
        let (bytes, mut values) = (self.finish_read_bytes(from, place)?, vec![0.0; from.len()]);
        staging::decode(&bytes, from.dtype, scale, &mut values);
        Ok(values)
    }

    /// Waits for the ops issued before a read was begun, but for no later ones, and returns the bytes of this tensor.
    pub(crate) fn finish_read_bytes(&mut self, from: Tensor, place: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; from.dtype.bytes(from.len())];
        self.transfers.finish_read(place, self.rows(from, "read")?, &mut bytes)?;
        Ok(bytes)
    }

    /// Goes through the ops of `body` without running them: a missing kernel fails here, and all kernels are loaded. Results that `body`
    /// reads back have no meaning.
    pub(crate) fn preload_kernels(&mut self, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        let _span = trace::span("find kernels");
        self.refuse_in_capture("preload_kernels")?;
        let live = self.live.clone();
        self.context.kernels.set_preloading(true);
        let done = body(&mut KernelPreload::new(self));
        self.context.kernels.set_preloading(false);
        self.live = live;
        done
    }

    fn reserve_working(&mut self, bytes: u64) -> Result<()> {
        let _span = trace::span_of("allocate working memory", || format!("{bytes} bytes"));
        self.steps.begin_anew();
        self.driver.synchronize(self.stream.1)?;
        // A job begins here, and nothing is running.
        self.context.kernels.timeline().into_iter().for_each(Timeline::collect);
        self.fetch_saturated()?;
        self.context.memory.reserve(Region::Arena, bytes)?;
        self.released(0..bytes);
        let memory = &self.context.memory;
        self.driver.fill(self.stream.1, memory.stream_k_flags(), 0, memory.stream_k_flag_bytes())?;
        self.driver.fill(self.stream.1, memory.expansion_counters(), 0, memory.expansion_counter_bytes())?;
        // The counters are one alignment unit.
        self.driver.fill(self.stream.1, memory.counters(), 0, ALIGN)
    }

    /// Where a tensor's rows lie.
    fn rows(&self, tensor: Tensor, op: &'static str) -> Result<Rows> {
        self.context.memory.rows(tensor, op)
    }

    /// Makes ops issued next wait for the weights uploaded so far.
    fn order_uploads(&mut self) -> Result<()> {
        match &mut self.staging {
            Some(staging) => staging.before(self.stream.1),
            None => Ok(()),
        }
    }

    fn refuse_in_capture(&self, op: &'static str) -> Result<()> {
        if self.capturing { Err(Error::Op { op, what: "a transfer inside a step".into() }) } else { Ok(()) }
    }

    /// Finds memory for the scratch of an op.
    fn place_op_scratch(&mut self, bytes: u64) -> Result<()> {
        if self.context.memory.place_op_scratch(self.live.end(), bytes) {
            return Ok(());
        }
        if self.capturing {
            return Err(Error::Op { op: "scratch", what: "an allocation inside a step".into() });
        }
        // Captured steps have the old address of the scratch.
        self.steps.begin_anew();
        self.driver.synchronize(self.stream.1)?;
        self.context.memory.reserve_spare(bytes)?;
        self.context.memory.place_op_scratch(self.live.end(), bytes);
        Ok(())
    }

    /// Launches the kernels of an op that has passed its checks.
    fn issue(&mut self, op: Op<'_>) -> Result<()> {
        let scratch = op.scratch_bytes(self.gemm_formats());
        if scratch > 0 {
            self.place_op_scratch(scratch)?;
        }
        dispatch(&self.context, op)
    }

    fn prepare_transfer(&mut self, op: &'static str) -> Result<()> {
        self.refuse_in_capture(op)?;
        self.order_uploads()
    }

    /// Notes that weights are about to be read.
    fn note_read(&mut self, weights: Range<u64>) {
        let Range { start, end } = self.read;
        self.read = match (start == end, weights.is_empty()) {
            (_, true) => start..end,
            (true, false) => weights,
            (false, false) => start.min(weights.start)..end.max(weights.end),
        };
    }

    fn download(&mut self, from: Tensor, op: &'static str, to: &mut [u8]) -> Result<()> {
        let _span = trace::span("wait and read back");
        self.prepare_transfer(op)?;
        if to.is_empty() { Ok(()) } else { self.driver.copy_out(self.stream.1, self.rows(from, op)?, to) }
    }

    fn downloaded(&mut self, from: Tensor, op: &'static str) -> Result<Vec<u8>> {
        let mut bytes = vec![0; from.dtype.bytes(from.len())];
        self.download(from, op, &mut bytes)?;
        Ok(bytes)
    }

    /// Takes the count of values that did not fit from the device and resets it there.
    fn fetch_saturated(&mut self) -> Result<()> {
        if !self.context.memory.has_scratch() {
            return Ok(());
        }
        let mut bytes = [0; size_of::<u64>()];
        let (address, width) = (self.context.memory.saturated(), bytes.len() as u64);
        self.driver.copy_out(self.stream.1, Rows { address, pitch: width, width }, &mut bytes)?;
        self.driver.fill(self.stream.1, address, 0, width)?;
        self.saturated += u64::from_le_bytes(bytes);
        Ok(())
    }
}

/// The factor of a tensor's elements, if the host can write and read it: plain types, and e4m3 with one scale. NVFP4 needs [block
/// scales](block_scales) instead.
fn transferred_scale(t: Tensor) -> Option<f32> {
    match t.scaling {
        _ if t.dtype.format().block > 1 || dtype_code(t.dtype) == NO_CODE => None,
        Scaling::Unscaled => Some(1.0),
        Scaling::Tensor(scale) => Some(scale.get()),
        Scaling::Rows(_) | Scaling::Blocks16 { .. } => None,
    }
}

/// The block-scale tiles of an NVFP4 tensor as a matrix of bytes, and the factor of the whole tensor.
fn block_scales(t: Tensor) -> Option<(Tensor, f32)> {
    match t.scaling {
        Scaling::Blocks16 { tensor, .. } if t.cols.is_multiple_of(nvfp4::BLOCK) => Some((t.as_bytes().nth(1)?, tensor.get())),
        _ => None,
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn gemm_formats(&self) -> GemmFormats {
        let has = |kernel| self.context.kernels.has(kernel);
        // A build may lack kernels for this GPU.
        GemmFormats {
            w8a8: has(Kernel::GemmFp8Sm90_256x192) || has(Kernel::GemmFp8Sm89_128x128),
            w4a4: has(Kernel::GemmNvfp4Sm120_128x128),
            w8a16: has(Kernel::Expand),
            w4a16: has(Kernel::Expand),
            decodes: false,
            qk8: has(Kernel::AttentionFp8Sm90MaxFree) || has(Kernel::AttentionFp8Sm89MaxFree),
            expands: has(Kernel::Expand),
        }
        .and(gemm_formats(self.device().capability))
    }

    fn available(&self) -> Result<Option<u64>> {
        // Three allocations (weights, LoRA branches, working memory) are each rounded up to a multiple of this.
        const GRANULE: u64 = 2 << 20;
        Ok(Some(self.driver.free_memory()?.saturating_sub(self.context.memory.scratch_bytes() + 3 * GRANULE)))
    }

    fn reads_files(&self) -> bool {
        false
    }

    fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.stop.job = cancel;
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        self.refuse_in_capture("upload")?;
        let _span = trace::span_of("upload", || format!("{to:?}"));
        let addresses = (self.rows(to, "upload")?.address, self.context.memory.scales(to));
        if !to.region.is_read_only() || to.stride != to.cols {
            return Err(Error::Op { op: "upload", what: format!("a weight cannot be uploaded to {to:?}") });
        }
        let staging = match &mut self.staging {
            Some(staging) => staging,
            none => none.insert(Staging::new(self.driver.clone())?),
        };
        // Copies run concurrently with ops, unless an op reads the weights that are replaced. LoRA branches are replaced between jobs, so
        // the reads of them are not tracked.
        let is_read = |range: Range<u64>| range.start < self.read.end && self.read.start < range.end;
        if to.region == Region::Adapters {
            staging.after(self.stream.1)?;
        } else if is_read(to.extent()) || is_read(to.scale_extent()) {
            staging.after(self.stream.1)?;
            self.read = 0..0;
        }
        staging.upload(addresses, to, role, parts, &|| self.stop.check())
    }

    fn reserve(&mut self, region: Region, bytes: u64) -> Result<()> {
        if region == Region::Arena {
            return self.reserve_working(bytes);
        }
        let is_weights = region == Region::Weights;
        let _span = is_weights.then(|| trace::span_of("allocate weights", || format!("{bytes} bytes")));
        if let Some(staging) = self.staging.as_ref().filter(|_| region.is_read_only()) {
            staging.synchronize()?;
        }
        self.driver.synchronize(self.stream.1)?;
        if is_weights {
            self.read = 0..0;
        }
        self.context.memory.reserve(region, bytes)
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        let _span = trace::span("write to the GPU");
        self.prepare_transfer("write")?;
        let rows = self.rows(to, "write")?;
        self.live.touch(to);
        if let Some((tiles, tensor)) = block_scales(to).filter(|_| values.len() == to.len()) {
            if values.is_empty() {
                return Ok(());
            }
            // The last scale tiles may also cover rows that are not written.
            let mut scales = self.downloaded(tiles, "write")?;
            let codes = nvfp4::encode_rows(values, to.cols, tensor, &mut scales);
            self.driver.copy_in(self.stream.1, rows, &codes)?;
            self.driver.copy_in(self.stream.1, self.rows(tiles, "write")?, &scales)?;
            return self.driver.synchronize(self.stream.1);
        }
        let Some(scale) = transferred_scale(to).filter(|_| values.len() == to.len()) else {
            return Err(Error::Op { op: "write", what: format!("{} values for {to:?}", values.len()) });
        };
        if values.is_empty() {
            return Ok(());
        }
        let len = to.dtype.bytes(values.len());
        self.transfers.write(self.stream.1, rows, len, |bytes| staging::encode(values, to.dtype, scale, bytes))
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        if let Some((tiles, tensor)) = block_scales(from).filter(|_| to.len() == from.len()) {
            let (codes, scales) = (self.downloaded(from, "read")?, self.downloaded(tiles, "read")?);
            nvfp4::decode_rows(&codes, &scales, from.cols, tensor, to);
            return Ok(());
        }
        let Some(scale) = transferred_scale(from).filter(|_| to.len() == from.len()) else {
            return Err(Error::Op { op: "read", what: format!("{} values from {from:?}", to.len()) });
        };
        let bytes = self.downloaded(from, "read")?;
        staging::decode(&bytes, from.dtype, scale, to);
        Ok(())
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        if to.len() != from.len() || from.dtype != DType::U8 {
            return Err(Error::Op { op: "read_bytes", what: format!("{} bytes from {from:?}", to.len()) });
        }
        self.download(from, "read_bytes", to)
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        self.stop.check()?;
        op.check()?;
        self.order_uploads()?;
        op.operands(&mut |tensor, _| {
            self.live.touch(tensor);
            if tensor.region == Region::Weights {
                self.note_read(tensor.extent());
                self.note_read(tensor.scale_extent());
            }
        });
        self.issue(op)
    }

    fn released(&mut self, range: Range<u64>) {
        self.live.release(&range);
        if let Some((address, bytes)) = self.context.memory.working_range(range).filter(|_| self.poison) {
            // All ones is NaN in every float type that kernels write. If filling fails, the cause is an earlier fault, which the next call
            // reports.
            let _ = self.driver.fill(self.stream.1, address, 0xff, bytes);
        }
    }

    /// Runs the ops one by one the first time, captures them as a CUDA graph the second time and launches the graph from then on. If an
    /// earlier job has captured the same launches, the second time finds their graph.
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        self.stop.check()?;
        self.order_uploads()?;
        if self.capturing {
            return body(self);
        }
        // Launches inside a graph cannot be timed one by one.
        let capture = self.capture && self.context.kernels.timeline().is_none();
        let Some(hash) = self.steps.launches(key).filter(|_| capture) else {
            self.context.kernels.begin_hash();
            let issued = body(self);
            let hash = self.context.kernels.end_hash();
            return issued.map(|()| self.steps.saw(key, hash));
        };
        // The graph does not record which weights it reads, so it counts as reading all.
        self.note_read(0..self.context.memory.weight_bytes());
        if let Some(graph) = self.steps.graph(hash) {
            return graph.launch(self.stream.1);
        }
        let graph = CapturedGraph::capture(&self.driver.clone(), self.stream.1, || {
            self.capturing = true;
            let issued = body(self);
            self.capturing = false;
            issued
        })?;
        graph.launch(self.stream.1)?;
        self.steps.keep(hash, graph);
        Ok(())
    }

    fn take_saturated(&mut self) -> Result<u64> {
        self.refuse_in_capture("take_saturated")?;
        self.fetch_saturated()?;
        Ok(std::mem::take(&mut self.saturated))
    }

    fn synchronize(&mut self) -> Result<()> {
        let _span = trace::span("wait for the GPU");
        self.order_uploads()?;
        self.driver.synchronize(self.stream.1)
    }

    fn cuda(&mut self) -> Option<&mut Cuda> {
        Some(self)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // The GPU must be idle when its memory is freed. An error was reported where it happened, or no longer matters.
        let _ = self.driver.synchronize(self.stream.1);
    }
}
