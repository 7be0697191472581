//! The CUDA backend: two device allocations, a stream for ops and one for weights on their way, and a launch for each op.
//!
//! [`driver`] is the seam to the driver API and [`system`] the real thing behind it; `launch` holds the kernel table and the one
//! launch function, `ops` turns descriptors into parameters, `staging` brings weights over. This file owns the memory.

mod abi;
mod attention;
pub mod driver;
mod gemm;
mod launch;
mod ops;
mod selftest;
mod staging;
mod system;
mod tile;

pub use launch::{ARCHS, Images, Kernel, NVCC};
pub use ops::kernels_of;
pub use system::{System, devices};
pub use tile::Tile;

use super::{Backend, HostData, Linear, Op, Projection, Role, StepKey, WeightPart};
use crate::error::{Error, Result};
use crate::tensor::{ALIGN, DType, Region, Tensor};
use driver::{DeviceInfo, Driver, Graph, Rows, Stream};
use launch::Kernels;
use staging::Staging;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Working memory that belongs to no op: the word of faults and those of counts, partial results of reductions, and what the blocks
/// of a product leave for each other, first words and then sums.
#[derive(Clone, Copy)]
struct Scratch {
    multiprocessors: u64,
}

impl Scratch {
    const PARTIALS: u64 = abi::KL_PARTIALS as u64 * abi::KL_GROUPS as u64 * 16;

    /// A word for each of the blocks of a multiprocessor, or for each warp of its only one.
    fn words(self) -> u64 {
        (self.multiprocessors * u64::from(tile::RESIDENT.max(tile::WARPS)) * 4).next_multiple_of(ALIGN)
    }

    /// No tile has more sums in all blocks of a multiprocessor than the largest has in one.
    fn sums(self) -> u64 {
        let largest = Tile::ALL.map(|tile| tile.config()).map(|tile| tile.rows * tile.cols * tile.resident).into_iter().max();
        self.multiprocessors * u64::from(largest.unwrap_or(0)) * 4
    }

    fn bytes(self) -> u64 {
        ALIGN + Self::PARTIALS + self.words() + self.sums()
    }
}

/// The CUDA backend.
pub struct Cuda {
    // In this order: graphs and kernels go before the memory they name, and all before the stream and the driver.
    steps: HashMap<StepKey, Step>,
    kernels: Kernels,
    staging: Option<Staging>,
    weights: Memory,
    /// Offsets of weights that ops read which may not be done.
    read: Range<u64>,
    arena: Memory,
    /// Where working memory begins, and how many bytes of it ops may use.
    base: u64,
    working: u64,
    /// Address of [`Scratch`].
    scratch: u64,
    capturing: bool,
    capture: bool,
    choice: Choice,
    poison: bool,
    stop: Arc<AtomicBool>,
    stream: StreamGuard,
    driver: Rc<dyn Driver>,
}

/// Which kernels matrix ops take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// What shapes and the GPU call for.
    Best,
    /// The obvious ones.
    Naive,
    /// On tensor cores, with such tiles as far as an op and the GPU have them.
    Tile(Tile),
}

impl Choice {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Best, Self::Naive].into_iter().chain(Tile::ALL.map(Self::Tile))
    }
}

/// What is known of a step.
enum Step {
    /// It has run once.
    Seen,
    /// It is recorded.
    Captured(CapturedGraph),
}

/// A device allocation.
struct Memory {
    driver: Rc<dyn Driver>,
    address: u64,
    bytes: u64,
}

impl Memory {
    fn empty(driver: &Rc<dyn Driver>) -> Self {
        Self { driver: driver.clone(), address: 0, bytes: 0 }
    }

    fn new(driver: &Rc<dyn Driver>, bytes: u64) -> Result<Self> {
        let address = if bytes == 0 { 0 } else { driver.allocate(bytes)? };
        Ok(Self { driver: driver.clone(), address, bytes })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 {
            self.driver.free(self.address);
        }
    }
}

/// A stream, and who gives it back if it is ours.
struct StreamGuard(Option<Rc<dyn Driver>>, Stream);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        if let Some(driver) = &self.0 {
            driver.destroy_stream(self.1);
        }
    }
}

struct CapturedGraph(Rc<dyn Driver>, Graph);

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        self.0.destroy_graph(self.1);
    }
}

fn check_stop(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
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

    /// A backend for tensors that somebody else owns, on somebody else's stream of the same GPU: a tensor's offset is its address,
    /// and all lie in working memory. For measuring beside another library.
    pub fn borrowing(device: usize, stream: u64) -> Result<Self> {
        let driver: Rc<dyn Driver> = Rc::new(System::open(device)?);
        let mut cuda = Self::on_stream(driver, &launch::built_in, Arc::default(), StreamGuard(None, Stream(stream)))?;
        // Room for partial results is the only memory of its own, and whatever address a tensor has is right.
        cuda.reserve(0)?;
        cuda.base = 0;
        cuda.working = u64::MAX;
        Ok(cuda)
    }

    fn on_stream(driver: Rc<dyn Driver>, images: Images<'_>, stop: Arc<AtomicBool>, stream: StreamGuard) -> Result<Self> {
        Ok(Self {
            steps: HashMap::new(),
            kernels: Kernels::load(driver.clone(), images, stream.1)?,
            staging: None,
            weights: Memory::empty(&driver),
            read: 0..0,
            arena: Memory::empty(&driver),
            base: 0,
            working: 0,
            scratch: 0,
            capturing: false,
            capture: true,
            choice: Choice::Best,
            poison: cfg!(debug_assertions),
            stop,
            stream,
            driver,
        })
    }

    /// Fills working memory that holds nothing of value with NaN, so that a read of it cannot go unnoticed. Debug builds do so
    /// anyway.
    pub fn set_poison(&mut self, poison: bool) {
        self.poison = poison;
    }

    /// Whether steps that recur are recorded and replayed.
    pub fn set_graph_capture(&mut self, capture: bool) {
        self.capture = capture;
    }

    /// Which kernels matrix ops take, to hold one to another.
    pub fn set_choice(&mut self, choice: Choice) {
        self.choice = choice;
    }

    /// The GPU.
    pub fn device(&self) -> &DeviceInfo {
        self.driver.device()
    }

    /// How often each kernel that this GPU can run was launched so far. A recorded step counts once, however often it is replayed.
    pub fn launched(&self) -> impl Iterator<Item = (Kernel, u64)> {
        self.kernels.launched()
    }

    /// Where a tensor's rows lie.
    fn rows(&self, tensor: Tensor, op: &'static str) -> Result<Rows> {
        let (base, end) = match tensor.region {
            Region::Weights => (self.weights.address, self.weights.bytes),
            Region::Arena => (self.base, self.working),
        };
        let size = tensor.dtype.size() as u64;
        if tensor.extent().end > end || !tensor.offset.is_multiple_of(size) {
            return Err(Error::Op { op, what: format!("{tensor:?} lies outside its memory or is misaligned") });
        }
        let (width, pitch) = (tensor.cols as u64 * size, tensor.stride as u64 * size);
        // Rows without gaps are one long row.
        let width = if pitch == width || tensor.rows <= 1 { width * tensor.rows as u64 } else { width };
        Ok(Rows { address: base + tensor.offset, pitch: pitch.max(width), width })
    }

    /// Address of the word of faults.
    fn fault_flags(&self) -> u64 {
        self.scratch
    }

    /// Address of the words that the blocks of a count share, in a line of memory of their own.
    fn counts(&self) -> u64 {
        self.scratch + 128
    }

    /// Address of room for partial results.
    fn partials(&self) -> u64 {
        self.scratch + ALIGN
    }

    /// Address of words that blocks leave for each other, and of sums.
    fn left(&self) -> (u64, u64) {
        let words = self.partials() + Scratch::PARTIALS;
        (words, words + self.scratch_size().words())
    }

    fn scratch_size(&self) -> Scratch {
        Scratch { multiprocessors: u64::from(self.device().multiprocessors) }
    }

    /// What is issued next finds the weights that were uploaded so far.
    fn order_uploads(&mut self) -> Result<()> {
        match &mut self.staging {
            Some(staging) => staging.before(self.stream.1),
            None => Ok(()),
        }
    }

    fn no_step(&self, op: &'static str) -> Result<()> {
        if self.capturing { Err(Error::Op { op, what: "a transfer inside a step".into() }) } else { Ok(()) }
    }

    fn transfer(&mut self, op: &'static str) -> Result<()> {
        self.no_step(op)?;
        self.order_uploads()
    }

    /// Notes that weights are about to be read.
    fn reads(&mut self, weights: Range<u64>) {
        let Range { start, end } = self.read;
        self.read = if start == end { weights } else { start.min(weights.start)..end.max(weights.end) };
    }

    /// Fails if a kernel met something impossible since the arena was reserved.
    fn check_faults(&self) -> Result<()> {
        if self.scratch == 0 {
            return Ok(());
        }
        let mut word = [0; 4];
        self.driver.copy_out(self.stream.1, Rows { address: self.fault_flags(), pitch: 4, width: 4 }, &mut word)?;
        match u32::from_ne_bytes(word) {
            0 => Ok(()),
            abi::KL_FAULT_TOKEN => Err(Error::Op { op: "embed", what: "a token id outside the vocabulary".into() }),
            faults => Err(Error::Op { op: "cuda", what: format!("fault word {faults:#x}") }),
        }
    }

    fn download(&mut self, from: Tensor, op: &'static str) -> Result<Vec<u8>> {
        self.transfer(op)?;
        let mut bytes = vec![0; from.len() * from.dtype.size()];
        if !bytes.is_empty() {
            self.driver.copy_out(self.stream.1, self.rows(from, op)?, &mut bytes)?;
        }
        self.check_faults()?;
        Ok(bytes)
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn available(&self) -> Result<Option<u64>> {
        // What an allocation is rounded up to, for each of the two.
        const GRANULE: u64 = 2 << 20;
        Ok(Some(self.driver.free_memory()?.saturating_sub(self.scratch_size().bytes() + 2 * GRANULE)))
    }

    fn launches(&self) -> Vec<(&'static str, u64)> {
        self.launched().filter(|(_, times)| *times > 0).map(|(kernel, times)| (kernel.symbol(), times)).collect()
    }

    fn reserve_weights(&mut self, bytes: u64) -> Result<()> {
        if let Some(staging) = &self.staging {
            staging.finish()?;
        }
        self.driver.synchronize(self.stream.1)?;
        self.read = 0..0;
        self.weights = Memory::empty(&self.driver);
        self.weights = Memory::new(&self.driver, bytes)?;
        Ok(())
    }

    fn reads_files(&self) -> bool {
        false
    }

    fn upload(&mut self, to: Tensor, role: Role, parts: &[WeightPart]) -> Result<()> {
        self.no_step("upload")?;
        let address = self.rows(to, "upload")?.address;
        if to.region != Region::Weights || to.stride != to.cols {
            return Err(Error::Op { op: "upload", what: format!("{to:?} is no place for a weight") });
        }
        let staging = match &mut self.staging {
            Some(staging) => staging,
            none => none.insert(Staging::new(self.driver.clone())?),
        };
        // Copies go on beside ops, unless these read what is to be replaced.
        if to.extent().start < self.read.end && self.read.start < to.extent().end {
            staging.after(self.stream.1)?;
            self.read = 0..0;
        }
        staging.weight(address, to, role, parts, &|| check_stop(&self.stop))
    }

    fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.steps.clear();
        self.driver.synchronize(self.stream.1)?;
        let scratch = self.scratch_size();
        let total = bytes.next_multiple_of(ALIGN) + scratch.bytes();
        // A second picture of the same size finds its memory where it was.
        if self.arena.bytes != total {
            (self.working, self.scratch) = (0, 0);
            self.arena = Memory::empty(&self.driver);
            self.arena = Memory::new(&self.driver, total)?;
            (self.base, self.working) = (self.arena.address, total - scratch.bytes());
            self.scratch = self.base + self.working;
        }
        self.released(0..bytes);
        self.driver.fill(self.stream.1, self.left().0, 0, scratch.words())?;
        // Faults and counts.
        self.driver.fill(self.stream.1, self.fault_flags(), 0, ALIGN)
    }

    fn write(&mut self, to: Tensor, data: HostData<'_>) -> Result<()> {
        self.transfer("write")?;
        let wrong = |what: &str| Error::Op { op: "write", what: format!("{what} for {to:?}") };
        let rows = self.rows(to, "write")?;
        let bytes = match data {
            HostData::F32(values) if to.dtype != DType::U32 && values.len() == to.len() => staging::encode(values, to.dtype),
            HostData::U32(ids) if to.dtype == DType::U32 && to.cols == 1 && ids.len() == to.len() => {
                ids.iter().flat_map(|id| id.to_le_bytes()).collect()
            }
            _ => return Err(wrong("wrong type or number of values")),
        };
        if bytes.is_empty() {
            return Ok(());
        }
        self.driver.copy_in(self.stream.1, rows, &bytes)?;
        self.driver.synchronize(self.stream.1)
    }

    fn read(&mut self, from: Tensor, to: &mut [f32]) -> Result<()> {
        if to.len() != from.len() || from.dtype == DType::U32 {
            return Err(Error::Op { op: "read", what: format!("{} values from {from:?}", to.len()) });
        }
        let bytes = self.download(from, "read")?;
        staging::decode(&bytes, from.dtype, to);
        Ok(())
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        if to.len() != from.len() || from.dtype != DType::U8 {
            return Err(Error::Op { op: "read_bytes", what: format!("{} bytes from {from:?}", to.len()) });
        }
        to.copy_from_slice(&self.download(from, "read_bytes")?);
        Ok(())
    }

    fn run(&mut self, op: Op<'_>) -> Result<()> {
        check_stop(&self.stop)?;
        op.check()?;
        self.order_uploads()?;
        op.operands(&mut |tensor, _| {
            if tensor.region == Region::Weights {
                self.reads(tensor.extent());
            }
        });
        self.dispatch(op)
    }

    fn released(&mut self, range: Range<u64>) {
        let end = range.end.min(self.working);
        if self.poison && end > range.start {
            // All ones is NaN in every float type. A failure is an earlier fault, which the next call reports.
            let _ = self.driver.fill(self.stream.1, self.base + range.start, 0xff, end - range.start);
        }
    }

    /// Runs plainly the first time, is recorded the second, and replayed from then on.
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut dyn Backend) -> Result<()>) -> Result<()> {
        check_stop(&self.stop)?;
        self.order_uploads()?;
        self.reads(0..self.weights.bytes);
        match self.steps.get(&key) {
            Some(Step::Captured(graph)) => return self.driver.launch_graph(self.stream.1, graph.1),
            Some(Step::Seen) if self.capture && !self.capturing => {}
            _ => {
                self.steps.insert(key, Step::Seen);
                return body(self);
            }
        }
        self.driver.begin_capture(self.stream.1)?;
        self.capturing = true;
        let issued = body(self);
        self.capturing = false;
        // Recording has to end whatever happened inside, or the stream is lost.
        let graph = self.driver.end_capture(self.stream.1).map(|graph| CapturedGraph(self.driver.clone(), graph));
        issued?;
        let graph = graph?;
        self.driver.launch_graph(self.stream.1, graph.1)?;
        self.steps.insert(key, Step::Captured(graph));
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.order_uploads()?;
        self.driver.synchronize(self.stream.1)?;
        self.check_faults()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Nothing may be running when its memory goes. An error was reported where it happened, or no longer matters.
        let _ = self.driver.synchronize(self.stream.1);
    }
}
