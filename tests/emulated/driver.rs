//! A CUDA driver whose device is the emulator: device memory is host memory, and kernels run on the CPU.
//!
//! Queued work is done in the order of the calls, which is one of the orders that streams and events allow. `tests/engine/runtime.rs`
//! checks that events order everything that needs an order. A kernel with programmatic dependent launch overlaps with the preceding one.

use kiln::error::{Error, Result};
use kiln::internals::backend::cuda::driver::{
    DeviceInfo, Driver, Event, Function, Graph, Launch, MapSpec, Module, Rows, Stream, Swizzle,
};
use kiln_emulator::{self as emulator, DeviceMemory, Entry, TensorMap};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// A GPU to emulate.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub sms: u32,
    /// The most bytes of shared memory that a CTA may have.
    pub shared: u32,
    /// Whether the backend uses kernels that need a self-test.
    pub native: bool,
}

impl Gpu {
    /// A Hopper GPU with so few SMs that small GEMMs are shared by Stream-K workers.
    pub const HOPPER: Self = Self { capability: (9, 0), sms: 4, shared: DeviceInfo::SM90_SHARED, native: false };
    /// A GPU of the first generation that is supported.
    pub const AMPERE: Self = Self { capability: (8, 0), sms: 3, shared: 166_912, native: false };
    /// An Ada GPU. It has no room for the largest tiles, and FP8 sums keep thirteen places.
    pub const ADA: Self = Self { capability: (8, 9), sms: 2, shared: 101_376, native: false };
    /// A consumer GPU of the Blackwell generation with the portable kernels. FP8 sums keep all places.
    pub const BLACKWELL: Self = Self { capability: (12, 0), sms: 2, shared: DeviceInfo::SM120_SHARED, native: false };
    /// A consumer Blackwell GPU with its own kernels.
    pub const NATIVE_BLACKWELL: Self = Self { native: true, ..Self::BLACKWELL };
}

/// Changes what the host passes to the driver, as a host bug would.
pub enum Sabotage {
    /// Changes a tensor map.
    Map(fn(&mut MapSpec)),
    /// Changes a launch or the kernel's parameter.
    Launch(fn(&mut Launch, &mut Vec<u8>)),
}

/// Queued work that a graph replays.
#[derive(Clone)]
enum Node {
    Launch(Launch, Vec<u8>),
    Fill { at: u64, value: u8, len: u64 },
}

struct Kernel {
    entry: Entry,
    symbol: String,
    /// The most dynamic shared memory that it may have.
    shared: u32,
}

/// A driver for one emulated GPU.
pub struct Emulated {
    info: DeviceInfo,
    memory: DeviceMemory,
    pinned: RefCell<HashMap<usize, Box<[u8]>>>,
    /// The names under which each loaded module's kernels are looked up, in this order.
    modules: RefCell<BTreeMap<u64, Vec<String>>>,
    kernels: RefCell<Vec<Kernel>>,
    capture: RefCell<Option<Vec<Node>>>,
    graphs: RefCell<BTreeMap<u64, Vec<Node>>>,
    next_handle: Cell<u64>,
    /// The seed of the running case, and its launches so far.
    seed: Cell<(u64, u64)>,
    sabotage: RefCell<Option<Sabotage>>,
}

/// Turns a report of the emulator into a device error.
fn check<T>(call: &'static str, outcome: std::result::Result<T, String>) -> Result<T> {
    outcome.map_err(|status| Error::Device { call, status })
}

impl Emulated {
    pub fn new(gpu: Gpu) -> Rc<Self> {
        let Gpu { capability, sms, shared, .. } = gpu;
        let name = format!("emulated compute {}.{}", capability.0, capability.1);
        let (uuid, memory, driver) = ([capability.0 as u8; 16], 16 << 30, (13, 0));
        Rc::new(Self {
            info: DeviceInfo { index: 0, name, uuid, capability, multiprocessors: sms, shared, clock: 1_000_000, memory, driver },
            memory: DeviceMemory::default(),
            pinned: RefCell::default(),
            modules: RefCell::default(),
            kernels: RefCell::default(),
            capture: RefCell::default(),
            graphs: RefCell::default(),
            next_handle: Cell::new(1),
            seed: Cell::new((0, 0)),
            sabotage: RefCell::new(None),
        })
    }

    /// Sets the seed from which the emulator draws the order of what hardware leaves open.
    pub fn set_seed(&self, seed: u64) {
        self.seed.set((seed, 0));
    }

    /// Kernels launched since the seed was set.
    pub fn launches(&self) -> u64 {
        self.seed.get().1
    }

    /// Plants a host bug, or removes it.
    pub fn set_sabotage(&self, sabotage: Option<Sabotage>) {
        *self.sabotage.borrow_mut() = sabotage;
    }

    fn handle(&self) -> u64 {
        self.next_handle.replace(self.next_handle.get() + 1)
    }

    /// Keeps work for the graph being captured, or does it now.
    fn queue(&self, node: Node) -> Result<()> {
        match self.capture.borrow_mut().as_mut() {
            Some(nodes) => nodes.push(node),
            None => return self.execute(node),
        }
        Ok(())
    }

    fn execute(&self, node: Node) -> Result<()> {
        match node {
            Node::Fill { at, value, len } => {
                check("finish", emulator::finish())?;
                check("fill", self.memory.fill(at, value, len))
            }
            Node::Launch(mut launch, mut params) => {
                if let Some(Sabotage::Launch(change)) = &*self.sabotage.borrow() {
                    change(&mut launch, &mut params);
                }
                let kernels = self.kernels.borrow();
                let Kernel { entry, symbol, shared } = &kernels[launch.function.0 as usize];
                let Launch { grid, threads, cluster, .. } = launch;
                let fits = threads <= entry.max_threads && launch.shared <= *shared && grid[0].is_multiple_of(cluster);
                if !fits {
                    let status = format!("invalid launch of {symbol}: {launch:?}");
                    return Err(Error::Device { call: "launch", status });
                }
                let (seed, launches) = self.seed.get();
                self.seed.set((seed, launches + 1));
                let (major, minor) = self.info.capability;
                let (overlap, capability) = (launch.overlap.into(), 10 * major + minor);
                let launch = emulator::Launch { grid, threads, shared: launch.shared, cluster, overlap, capability };
                check("launch", emulator::launch(*entry, &launch, &params, seed.wrapping_add(launches)))
            }
        }
    }

    fn refuse_in_capture(&self, call: &'static str) -> Result<()> {
        match *self.capture.borrow() {
            Some(_) => Err(Error::Device { call, status: "not permitted while a stream is captured".into() }),
            None => Ok(()),
        }
    }

    /// Runs all queued work, as the host requires before it copies.
    fn settle(&self, call: &'static str) -> Result<()> {
        self.refuse_in_capture(call)?;
        check(call, emulator::finish())
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // Queued work would run on freed memory. Its errors were reported, or nobody has asked for its results.
        let _ = emulator::finish();
    }
}

/// The addresses of the rows, in order.
fn addresses(rows: Rows) -> impl Iterator<Item = u64> {
    (0..).map(move |row| rows.address + row * rows.pitch)
}

impl Driver for Emulated {
    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&self) -> Result<u64> {
        Ok(self.info.memory - self.memory.bytes())
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        check("allocate", self.memory.allocate(bytes).ok_or_else(|| format!("{bytes} bytes of host memory")))
    }

    fn free(&self, address: u64) {
        // An error would belong to a kernel whose results nobody has asked for.
        let _ = emulator::finish();
        self.memory.free(address);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        let mut memory = vec![0; bytes].into_boxed_slice();
        let address = NonNull::from(&mut *memory).cast();
        self.pinned.borrow_mut().insert(address.addr().get(), memory);
        Ok(address)
    }

    fn free_pinned(&self, memory: NonNull<u8>) {
        self.pinned.borrow_mut().remove(&memory.addr().get()).expect("freed twice, or never allocated");
    }

    /// An image is a list of module names. The first module that has a kernel provides it.
    fn load(&self, image: &[u8]) -> Result<Module> {
        let names = String::from_utf8_lossy(image).split(' ').map(String::from).collect();
        let handle = self.handle();
        self.modules.borrow_mut().insert(handle, names);
        Ok(Module(handle))
    }

    fn unload(&self, module: Module) {
        self.modules.borrow_mut().remove(&module.0).expect("unloaded twice, or never loaded");
    }

    fn function(&self, module: Module, symbol: &str, params: usize, shared: u32) -> Result<Function> {
        let bug = |what: String| Error::Op { op: "load kernels", what };
        let modules = self.modules.borrow();
        let names = &modules[&module.0];
        let entry = names.iter().find_map(|name| emulator::entry(name, symbol));
        let entry = entry.ok_or_else(|| bug(format!("`{symbol}` is not in {}", names.join(" or "))))?;
        if entry.param_bytes != params as u64 {
            return Err(bug(format!("`{symbol}` takes {} bytes, the host has {params}", entry.param_bytes)));
        }
        if shared > self.info.shared {
            return Err(bug(format!("`{symbol}` asks for {shared} bytes of shared memory, a CTA may have {}", self.info.shared)));
        }
        let mut kernels = self.kernels.borrow_mut();
        kernels.push(Kernel { entry, symbol: symbol.into(), shared });
        Ok(Function(kernels.len() as u64 - 1))
    }

    fn stream(&self) -> Result<Stream> {
        Ok(Stream(self.handle()))
    }

    fn destroy_stream(&self, _stream: Stream) {}

    fn synchronize(&self, _stream: Stream) -> Result<()> {
        self.settle("synchronize")
    }

    fn event(&self) -> Result<Event> {
        Ok(Event(self.handle()))
    }

    fn timed_event(&self) -> Result<Event> {
        self.event()
    }

    /// The emulator does not measure time.
    fn elapsed(&self, _from: Event, _to: Event) -> Result<Duration> {
        Ok(Duration::ZERO)
    }

    fn destroy_event(&self, _event: Event) {}

    fn record_event(&self, _event: Event, _stream: Stream) -> Result<()> {
        Ok(())
    }

    fn synchronize_event(&self, _event: Event) -> Result<()> {
        self.settle("synchronize_event")
    }

    fn wait_event(&self, _stream: Stream, _event: Event) -> Result<()> {
        Ok(())
    }

    fn copy_in(&self, _stream: Stream, to: Rows, from: &[u8]) -> Result<()> {
        self.settle("copy_in")?;
        let mut rows = from.chunks_exact(to.width as usize).zip(addresses(to));
        rows.try_for_each(|(row, address)| check("copy_in", self.memory.write(address, row)))
    }

    fn copy_out(&self, _stream: Stream, from: Rows, to: &mut [u8]) -> Result<()> {
        self.settle("copy_out")?;
        let mut rows = to.chunks_exact_mut(from.width as usize).zip(addresses(from));
        rows.try_for_each(|(row, address)| check("copy_out", self.memory.read(address, row)))
    }

    fn fill(&self, _stream: Stream, at: u64, value: u8, len: u64) -> Result<()> {
        self.queue(Node::Fill { at, value, len })
    }

    fn launch(&self, _stream: Stream, launch: &Launch, params: &[u8]) -> Result<()> {
        self.queue(Node::Launch(*launch, params.to_vec()))
    }

    fn tensor_map(&self, spec: &MapSpec) -> Result<[u64; 16]> {
        let mut spec = *spec;
        if let Some(Sabotage::Map(change)) = &*self.sabotage.borrow() {
            change(&mut spec);
        }
        let swizzle = match spec.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        };
        let map = TensorMap {
            address: spec.address,
            element_bytes: spec.dtype.align() as u32,
            rank: spec.rank(),
            size: spec.size,
            pitch: spec.pitch,
            tile: spec.tile,
            swizzle,
        };
        check("tensor_map", emulator::tensor_map(&map))
    }

    fn begin_capture(&self, _stream: Stream) -> Result<()> {
        self.refuse_in_capture("begin_capture")?;
        *self.capture.borrow_mut() = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, _stream: Stream) -> Result<Graph> {
        let nodes = self.capture.borrow_mut().take();
        let nodes = check("end_capture", nodes.ok_or_else(|| "no stream is captured".into()))?;
        let handle = self.handle();
        self.graphs.borrow_mut().insert(handle, nodes);
        Ok(Graph(handle))
    }

    fn launch_graph(&self, _stream: Stream, graph: Graph) -> Result<()> {
        let nodes = self.graphs.borrow()[&graph.0].clone();
        nodes.into_iter().try_for_each(|node| self.queue(node))
    }

    fn destroy_graph(&self, graph: Graph) {
        self.graphs.borrow_mut().remove(&graph.0).expect("destroyed twice, or never captured");
    }
}
