//! A stand-in for the CUDA driver. It computes nothing, but checks that every handle is freed exactly once and never used afterwards,
//! tracks the order of copies and kernels, and can make any call fail.

use crate::order::Order;
use kiln::error::{Error, Result};
use kiln::internals::backend::cuda::driver::{DeviceInfo, Driver, Event, Function, Graph, Launch, MapSpec, Module, Rows, Stream};
use std::alloc::Layout as Block;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// The first address. The stand-in recognizes addresses among a kernel's parameters, and no two adjacent sizes look like this.
const FIRST_ADDRESS: u64 = 0x7f << 40;

/// The time that a kernel takes; nothing else takes time. No host launches kernels this fast, so the clock is never behind.
pub const LAUNCH: Duration = Duration::from_nanos(1);

/// A driver without a device.
pub struct StandIn {
    info: DeviceInfo,
    /// Calls so far that can be made to fail.
    pub calls: Cell<usize>,
    /// The number of the call that fails.
    fails: Cell<Option<usize>>,
    /// The name of the call that failed.
    pub failed: Cell<&'static str>,
    /// Resources that were allocated and not freed, by handle: the kind and how many bytes.
    pub taken: RefCell<HashMap<u64, (&'static str, u64)>>,
    next: Cell<u64>,
    /// Bytes of device memory in use, and the peak.
    pub bytes: Cell<(u64, u64)>,
    memory: u64,
    pub launches: Cell<usize>,
    /// Loaded modules: how many before the first launch, and how many after it.
    pub loads: Cell<[usize; 2]>,
    /// Kernels that were looked up after the first launch.
    pub late_kernels: Cell<usize>,
    /// How many launches may begin before the preceding one has ended.
    pub overlapping: Cell<usize>,
    /// When each event was reached.
    reached: RefCell<HashMap<u64, Duration>>,
    /// The parameters of the last kernel, in address-sized words.
    pub params: RefCell<Vec<u64>>,
    pub replays: Cell<usize>,
    /// How often the host waited for a stream to finish, by stream.
    pub waits: RefCell<HashMap<u64, usize>>,
    pub order: RefCell<Order>,
}

impl StandIn {
    pub fn new(memory: u64) -> Rc<Self> {
        Self::of((9, 0), DeviceInfo::SM90_SHARED, memory)
    }

    /// A GPU of this compute capability, whose CTAs may use this much shared memory.
    pub fn of(capability: (u32, u32), shared: u32, memory: u64) -> Rc<Self> {
        let info = DeviceInfo {
            index: 0,
            name: "Stand-in".into(),
            uuid: [0; 16],
            capability,
            multiprocessors: 1,
            shared,
            clock: 1_000_000,
            memory,
            driver: (13, 0),
        };
        Rc::new(Self {
            info,
            calls: Cell::new(0),
            fails: Cell::new(None),
            failed: Cell::new(""),
            taken: RefCell::new(HashMap::new()),
            next: Cell::new(FIRST_ADDRESS),
            bytes: Cell::new((0, 0)),
            memory,
            launches: Cell::new(0),
            loads: Cell::default(),
            late_kernels: Cell::default(),
            overlapping: Cell::new(0),
            reached: RefCell::default(),
            params: RefCell::default(),
            replays: Cell::new(0),
            waits: RefCell::default(),
            order: RefCell::default(),
        })
    }

    fn call(&self, name: &'static str) -> Result<()> {
        let call = self.calls.get();
        self.calls.set(call + 1);
        if self.fails.get() == Some(call) {
            self.failed.set(name);
            return Err(Error::Device { call: name, status: "planted".into() });
        }
        Ok(())
    }

    fn wait(&self, stream: Stream) {
        *self.waits.borrow_mut().entry(stream.0).or_default() += 1;
        self.order.borrow_mut().synchronize(stream.0);
    }

    fn take(&self, what: &'static str, bytes: u64) -> u64 {
        let handle = self.next.get();
        self.next.set(handle + bytes.next_multiple_of(1024) + 1024);
        self.taken.borrow_mut().insert(handle, (what, bytes));
        handle
    }

    fn give(&self, what: &'static str, handle: u64) -> u64 {
        let (kind, bytes) = self.taken.borrow_mut().remove(&handle).unwrap_or_else(|| panic!("{what} freed twice"));
        assert_eq!(kind, what);
        bytes
    }

    /// Makes the `n`th call from now fail.
    pub fn fail_after(&self, n: usize) {
        self.fails.set(Some(self.calls.get() + n));
    }

    /// How many resources of this kind were not freed yet.
    pub fn held(&self, kind: &str) -> usize {
        self.taken.borrow().values().filter(|(of, _)| *of == kind).count()
    }

    /// Stops failing calls. Returns whether the call that was to fail was reached.
    pub fn heal(&self) -> bool {
        self.fails.take().is_none_or(|call| call < self.calls.get())
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        assert!(self.taken.borrow().is_empty() || std::thread::panicking(), "never freed: {:?}", self.taken.borrow());
    }
}

/// The layout of a pinned block. Pinned memory is real, because the backend writes to it. Alignment stays within what the allocator
/// guarantees, which then need not fill the block with zeros.
fn block(bytes: u64) -> Block {
    Block::from_size_align(bytes as usize, 16).unwrap()
}

#[allow(unsafe_code)]
impl Driver for StandIn {
    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&self) -> Result<u64> {
        self.call("free_memory")?;
        Ok(self.memory - self.bytes.get().0)
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.call("allocate")?;
        let (now, most) = self.bytes.get();
        self.bytes.set((now + bytes, most.max(now + bytes)));
        Ok(self.take("memory", bytes))
    }

    fn free(&self, address: u64) {
        let bytes = self.give("memory", address);
        self.order.borrow_mut().free(address..address + bytes);
        let (now, most) = self.bytes.get();
        self.bytes.set((now - bytes, most));
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.call("allocate_pinned")?;
        // SAFETY: the block is not empty.
        let memory = NonNull::new(unsafe { std::alloc::alloc_zeroed(block(bytes as u64)) }).unwrap();
        self.taken.borrow_mut().insert(memory.as_ptr() as u64, ("pinned", bytes as u64));
        Ok(memory)
    }

    fn free_pinned(&self, memory: NonNull<u8>) {
        let bytes = self.give("pinned", memory.as_ptr() as u64);
        // SAFETY: allocated above with the same layout.
        unsafe { std::alloc::dealloc(memory.as_ptr(), block(bytes)) }
    }

    fn load(&self, _image: &[u8]) -> Result<Module> {
        self.call("load")?;
        let mut loads = self.loads.get();
        loads[usize::from(self.launches.get() > 0)] += 1;
        self.loads.set(loads);
        Ok(Module(self.take("module", 0)))
    }

    fn unload(&self, module: Module) {
        self.give("module", module.0);
    }

    fn function(&self, module: Module, _symbol: &str, _params: usize, _shared: u32) -> Result<Function> {
        assert!(self.taken.borrow().contains_key(&module.0), "a kernel of a module that is gone");
        self.call("function")?;
        self.late_kernels.set(self.late_kernels.get() + usize::from(self.launches.get() > 0));
        Ok(Function(0))
    }

    fn stream(&self) -> Result<Stream> {
        self.call("stream")?;
        Ok(Stream(self.take("stream", 0)))
    }

    fn destroy_stream(&self, stream: Stream) {
        self.give("stream", stream.0);
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.call("synchronize")?;
        self.wait(stream);
        Ok(())
    }

    fn event(&self) -> Result<Event> {
        self.call("event")?;
        Ok(Event(self.take("event", 0)))
    }

    fn timed_event(&self) -> Result<Event> {
        self.event()
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration> {
        self.call("elapsed")?;
        let at = |event: Event| *self.reached.borrow().get(&event.0).expect("an event that was never recorded");
        Ok(at(to) - at(from))
    }

    fn destroy_event(&self, event: Event) {
        self.give("event", event.0);
    }

    fn record_event(&self, event: Event, stream: Stream) -> Result<()> {
        self.call("record_event")?;
        self.order.borrow_mut().set_event(event.0, stream.0);
        self.reached.borrow_mut().insert(event.0, LAUNCH * self.launches.get() as u32);
        Ok(())
    }

    fn synchronize_event(&self, event: Event) -> Result<()> {
        self.call("synchronize_event")?;
        self.order.borrow_mut().finish_event(event.0);
        Ok(())
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.call("wait_event")?;
        self.order.borrow_mut().wait_event(stream.0, event.0);
        Ok(())
    }

    fn copy_in(&self, stream: Stream, to: Rows, from: &[u8]) -> Result<()> {
        assert!((from.len() as u64).is_multiple_of(to.width));
        self.call("copy_in")?;
        let buffer = from.as_ptr() as u64;
        if self.taken.borrow().contains_key(&buffer) {
            self.order.borrow_mut().copy(stream.0, buffer, to.address..to.address + from.len() as u64);
        }
        Ok(())
    }

    fn copy_out(&self, stream: Stream, _from: Rows, to: &mut [u8]) -> Result<()> {
        self.call("copy_out")?;
        self.wait(stream);
        to.fill(0);
        Ok(())
    }

    fn fill(&self, _stream: Stream, _at: u64, _value: u8, _len: u64) -> Result<()> {
        self.call("fill")
    }

    fn launch(&self, stream: Stream, launch: &Launch, params: &[u8]) -> Result<()> {
        self.overlapping.set(self.overlapping.get() + usize::from(launch.overlap));
        assert!(self.taken.borrow().contains_key(&stream.0), "a launch on a stream that is gone");
        self.launches.set(self.launches.get() + 1);
        self.call("launch")?;
        let words = params.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap()));
        let words: Vec<u64> = words.collect();
        self.order.borrow_mut().launch(stream.0, &words);
        self.params.replace(words);
        Ok(())
    }

    fn tensor_map(&self, _spec: &MapSpec) -> Result<[u64; 16]> {
        self.call("tensor_map")?;
        Ok([0; 16])
    }

    fn begin_capture(&self, _stream: Stream) -> Result<()> {
        self.call("begin_capture")?;
        self.order.borrow_mut().record();
        Ok(())
    }

    fn end_capture(&self, _stream: Stream) -> Result<Graph> {
        let ended = self.call("end_capture").map(|()| Graph(self.take("graph", 0)));
        self.order.borrow_mut().recorded(ended.as_ref().ok().map(|graph| graph.0));
        ended
    }

    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        assert!(self.taken.borrow().contains_key(&graph.0), "a graph that is gone");
        self.replays.set(self.replays.get() + 1);
        self.call("replay")?;
        self.order.borrow_mut().replay(stream.0, graph.0);
        Ok(())
    }

    fn destroy_graph(&self, graph: Graph) {
        self.give("graph", graph.0);
    }
}
