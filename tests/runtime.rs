//! The CUDA backend on a stand-in for the driver: no arithmetic, but every call is counted, everything taken has to be given back,
//! weights have to be there when a kernel reads them, and any call can be made to fail.

mod common;
#[path = "common/ops/mod.rs"]
#[allow(dead_code)] // results are not looked at here
mod ops;
#[path = "common/order.rs"]
mod order;
#[path = "common/random.rs"]
mod random;

use common::cases;
use kiln::backend::cuda::driver::{DeviceInfo, Driver, Event, Function, Graph, Launch, MapSpec, Module, Rows, Stream};
use kiln::backend::cuda::{self, Choice, Cuda, Kernel};
use kiln::backend::{Backend, Op, Role, WeightPart};
use kiln::checkpoint::Weights;
use kiln::config::{Conventions, Variant};
use kiln::error::{Error, Result};
use kiln::microbench::{Protocol, Scale, rows};
use kiln::names::{Layout, Part};
use kiln::pipeline::{Engine, Job, LoadOptions, OpenModel, Picture};
use kiln::progress::Silent;
use kiln::tensor::{Arena, Bytes, DType, Precision, Region};
use kiln::tiny::{self, TinyModel};
use kiln::tokenizer::Tokenizer;
use order::Order;
use random::long;
use std::alloc::Layout as Block;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::Path;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A driver without a device.
struct StandIn {
    info: DeviceInfo,
    /// Calls so far that may fail.
    calls: Cell<usize>,
    /// The one that does.
    fails: Cell<Option<usize>>,
    /// Which it was.
    failed: Cell<&'static str>,
    /// What is taken and not given back, by handle: what it is and how many bytes.
    taken: RefCell<HashMap<u64, (&'static str, u64)>>,
    next: Cell<u64>,
    /// Bytes of device memory in use, and the most there ever were.
    bytes: Cell<(u64, u64)>,
    memory: u64,
    launches: Cell<usize>,
    replays: Cell<usize>,
    order: RefCell<Order>,
}

impl StandIn {
    fn new(memory: u64) -> Rc<Self> {
        let info = DeviceInfo {
            index: 0,
            name: "Stand-in".into(),
            capability: (9, 0),
            multiprocessors: 1,
            shared: 232_448,
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
            replays: Cell::new(0),
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

    fn take(&self, what: &'static str, bytes: u64) -> u64 {
        let handle = self.next.get();
        self.next.set(handle + bytes.next_multiple_of(1024) + 1024);
        self.taken.borrow_mut().insert(handle, (what, bytes));
        handle
    }

    fn give(&self, what: &'static str, handle: u64) -> u64 {
        let (kind, bytes) = self.taken.borrow_mut().remove(&handle).unwrap_or_else(|| panic!("{what} given back twice"));
        assert_eq!(kind, what);
        bytes
    }

    /// Fails from the `n`th call on from here.
    fn fail_after(&self, n: usize) {
        self.fails.set(Some(self.calls.get() + n));
    }

    /// Calls since then, if the one that was to fail was never reached.
    fn heal(&self) {
        self.fails.set(None);
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        assert!(self.taken.borrow().is_empty() || std::thread::panicking(), "never given back: {:?}", self.taken.borrow());
    }
}

/// Pinned memory is real: the backend writes to it. Aligned no further than the allocator does by itself, which then need not fill
/// it with zeros.
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
        Ok(Module(self.take("module", 0)))
    }

    fn unload(&self, module: Module) {
        self.give("module", module.0);
    }

    fn function(&self, module: Module, _symbol: &str, _params: usize, _shared: u32) -> Result<Function> {
        assert!(self.taken.borrow().contains_key(&module.0), "a kernel of a module that is gone");
        self.call("function")?;
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
        self.order.borrow_mut().synchronize(stream.0);
        Ok(())
    }

    fn event(&self) -> Result<Event> {
        self.call("event")?;
        Ok(Event(self.take("event", 0)))
    }

    fn destroy_event(&self, event: Event) {
        self.give("event", event.0);
    }

    fn set_event(&self, event: Event, stream: Stream) -> Result<()> {
        self.call("set_event")?;
        self.order.borrow_mut().set_event(event.0, stream.0);
        Ok(())
    }

    fn finish_event(&self, event: Event) -> Result<()> {
        self.call("finish_event")?;
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
        self.order.borrow_mut().synchronize(stream.0);
        to.fill(0);
        Ok(())
    }

    fn fill(&self, _stream: Stream, _at: u64, _value: u8, _len: u64) -> Result<()> {
        self.call("fill")
    }

    fn launch(&self, stream: Stream, _launch: &Launch, params: &[u8]) -> Result<()> {
        assert!(self.taken.borrow().contains_key(&stream.0), "a launch on a stream that is gone");
        self.launches.set(self.launches.get() + 1);
        self.call("launch")?;
        self.order.borrow_mut().launch(stream.0, params);
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

    fn replay(&self, stream: Stream, graph: Graph) -> Result<()> {
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

/// The tiny model, made once.
struct Model(TinyModel);

impl Model {
    fn new() -> Self {
        Self(tiny::model(Layout::Diffusers, DType::Bf16).unwrap())
    }

    fn open(&self, variant: Variant) -> OpenModel {
        let weights = |part| self.0.weights(part).unwrap();
        let parts = [weights(Part::Transformer), weights(Part::TextEncoder), weights(Part::Vae)];
        let tokenizer = Tokenizer::from_json(tiny::TOKENIZER, Path::new("tiny")).unwrap();
        OpenModel::check(parts, [None; 3], tokenizer, variant, Conventions::klein()).unwrap()
    }

    fn engine(&self, driver: &Rc<StandIn>, stop: &Arc<AtomicBool>, variant: Variant, low_memory: bool) -> Result<Engine> {
        let options = LoadOptions { low_memory, ..OPTIONS };
        Engine::load(Box::new(cuda(driver, stop)?), self.open(variant), options, &Silent)
    }
}

const OPTIONS: LoadOptions = LoadOptions { precision: Precision::Bf16, references: true, low_memory: false };

fn cuda(driver: &Rc<StandIn>, stop: &Arc<AtomicBool>) -> Result<Cuda> {
    Cuda::new(driver.clone(), &|_| Ok(Cow::Borrowed(&[])), stop.clone())
}

fn make(engine: &mut Engine, job: &Job) -> Result<Vec<Picture>> {
    let mut pictures = Vec::new();
    engine.generate(job, &Silent, &mut |picture| {
        pictures.push(picture);
        Ok(())
    })?;
    Ok(pictures)
}

/// One job from a prompt and one from an image, with steps enough for each to be plain, recorded and replayed.
fn jobs() -> [(Variant, Job); 2] {
    let job = Job { steps: 3, record: false, ..cases()[0].job() };
    let modes = common::modes::modes();
    let edit = modes.cases.iter().find(|c| c.kv).unwrap().job(&modes.images);
    [(Variant::Distilled, job.clone()), (Variant::Kv, Job { steps: 3, record: false, size: job.size, ..edit })]
}

/// The same in little time.
fn small(job: Job) -> Job {
    Job { steps: 1, size: kiln::sequence::Pixels::new(64, 64).unwrap(), ..job }
}

const PLENTY: u64 = 80 << 30;

/// Where addresses begin: what kernels read is told from their parameters, and no two sizes side by side look like this.
const FIRST_ADDRESS: u64 = 0x7f << 40;

#[test]
fn memory_is_what_was_planned_and_steps_are_replayed() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    for ((variant, job), low_memory) in jobs().into_iter().flat_map(|job| [(job.clone(), false), (job, true)]) {
        let mut engine = model.engine(&driver, &stop, variant, low_memory).unwrap();
        let weights = driver.bytes.get().0;
        let plan = engine.plan(&job).unwrap();
        let estimate = model.open(variant).estimate(OPTIONS, &job).unwrap();
        assert_eq!(weights, if low_memory { estimate.low_memory_weight_bytes } else { estimate.weight_bytes });
        assert!(estimate.low_memory_weight_bytes < estimate.weight_bytes);
        let before = driver.replays.get();
        make(&mut engine, &job).unwrap();
        let working = driver.bytes.get().0 - weights;
        // Faults, partial results, words and sums of one multiprocessor's blocks.
        let scratch = 1024 + (1 << 20) + 1024 + 256 * 192 * 4;
        assert_eq!(working - plan.arena_bytes.next_multiple_of(1024), scratch, "beside the plan only the scratch");
        assert_eq!(driver.replays.get() - before, 2, "the second and the third step");
        // A second picture of the same size takes no more memory.
        make(&mut engine, &job).unwrap();
        assert_eq!(driver.bytes.get().0, weights + working);
        drop(engine);
        assert_eq!(driver.bytes.get().0, 0);
    }
}

/// The calls that fail, one in each run: all of them, or in a short run the first and the last ones, which are made once each, and
/// every fifth of those between, which are the same few again and again.
fn failing(calls: usize) -> impl Iterator<Item = usize> {
    (0..calls).filter(move |n| long() || *n < 40 || n % 5 == 0 || *n + 20 > calls)
}

/// Every call of a run fails in turn: an error each time, everything given back, and the same engine works again.
#[test]
fn any_call_of_a_run_may_fail() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let [plain, edit] = jobs();
    // Where memory is saved, all weights are brought again with every run.
    for ((variant, job), low_memory) in [(plain.clone(), false), (edit, false), ((plain.0, small(plain.1)), true)] {
        let mut engine = model.engine(&driver, &stop, variant, low_memory).unwrap();
        // The second run finds its memory there.
        make(&mut engine, &job).unwrap();
        let start = driver.calls.get();
        make(&mut engine, &job).unwrap();
        let calls = driver.calls.get() - start;
        assert!(calls > 300, "{calls}");
        for n in failing(calls) {
            driver.fail_after(n);
            let result = make(&mut engine, &job);
            driver.heal();
            // Poisoning released memory may fail unseen: the next call on a real device would say so.
            match result {
                Err(Error::Device { .. }) => {}
                Ok(_) if driver.failed.get() == "fill" => {}
                other => panic!("call {n} ({}): {:?}", driver.failed.get(), other.map(|p| p.len())),
            }
        }
        assert_eq!(make(&mut engine, &job).unwrap().len(), 1);
    }
}

/// The first run brings the rest of the weights. A second one finishes what a failure left half done.
#[test]
fn any_call_of_the_first_run_may_fail() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let [(variant, job), _] = jobs();
    let job = small(job);
    let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
    let start = driver.calls.get();
    make(&mut engine, &job).unwrap();
    let calls = driver.calls.get() - start;
    // Not every call, because each takes an engine: uploads make the same three again and again.
    for n in (0..calls).step_by(7) {
        let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
        driver.fail_after(n);
        let result = make(&mut engine, &job);
        driver.heal();
        assert!(result.is_err() || driver.failed.get() == "fill", "call {n} ({})", driver.failed.get());
        assert_eq!(make(&mut engine, &job).unwrap().len(), 1, "call {n} ({})", driver.failed.get());
    }
}

/// Copies of the transformer go on beside the kernels that read the prompt, unless they take the place of what these read. That
/// kernels wait for weights, and copies for kernels, is checked with every call: see [`Order`].
#[test]
fn weights_are_brought_while_the_prompt_is_read() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    for low_memory in [false, true] {
        let driver = StandIn::new(PLENTY);
        let mut engine = model.engine(&driver, &stop, variant, low_memory).unwrap();
        let copies = || (driver.order.borrow().beside, driver.order.borrow().behind);
        assert_eq!((driver.launches.get(), copies()), (0, (0, 0)));
        make(&mut engine, &job).unwrap();
        let (beside, behind) = copies();
        assert!(if low_memory { beside == 0 && behind > 50 } else { beside > 50 && behind == 0 }, "{beside} {behind}");
        make(&mut engine, &Job { prompt: "another".into(), ..job.clone() }).unwrap();
        let again = copies();
        assert!(if low_memory { again.0 == 0 && again.1 > 2 * behind } else { again == (beside, behind) }, "{again:?}");
    }
}

/// Nothing between them that would wait anyway.
#[test]
fn ops_and_the_weights_they_read_take_turns() {
    let driver = StandIn::new(PLENTY);
    let mut cuda = cuda(&driver, &Arc::default()).unwrap();
    let (mut weights, mut ws) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    let weight = weights.alloc(1, 64, DType::F32).unwrap();
    let [out, x] = [4, 4].map(|rows| ws.alloc(rows, 64, DType::F32).unwrap());
    cuda.reserve_weights(weights.peak()).unwrap();
    cuda.reserve(ws.peak()).unwrap();
    for _ in 0..3 {
        let bytes = Bytes::new(Arc::new(vec![0; 256]));
        cuda.upload(weight, Role::Vector, &[WeightPart { bytes, dtype: DType::F32 }]).unwrap();
        cuda.run(Op::RmsNorm { out, x, weight, eps: 1e-6 }).unwrap();
    }
    assert_eq!((driver.order.borrow().beside, driver.order.borrow().behind), (0, 2));
}

/// Files matter as long as something is read from them.
#[test]
fn files_may_change_once_everything_is_on_the_gpu() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    let path = std::env::temp_dir().join(format!("kiln-runtime-{}.safetensors", std::process::id()));
    for (low_memory, pictures, refused) in [(false, 1, false), (true, 1, true), (false, 0, true)] {
        std::fs::write(&path, &*model.0.transformer).unwrap();
        let transformer = Weights::open(Part::Transformer, &path).unwrap();
        let (text, vae) = (model.0.weights(Part::TextEncoder).unwrap(), model.0.weights(Part::Vae).unwrap());
        let tokenizer = Tokenizer::from_json(tiny::TOKENIZER, Path::new("tiny")).unwrap();
        let open = OpenModel::check([transformer, text, vae], [None; 3], tokenizer, variant, Conventions::klein()).unwrap();
        let driver = StandIn::new(PLENTY);
        let options = LoadOptions { low_memory, ..OPTIONS };
        let mut engine = Engine::load(Box::new(cuda(&driver, &stop).unwrap()), open, options, &Silent).unwrap();
        (0..pictures).for_each(|_| drop(make(&mut engine, &job).unwrap()));
        std::fs::write(&path, b"short").unwrap();
        match make(&mut engine, &job) {
            Ok(_) => assert!(!refused, "{low_memory} {pictures}"),
            Err(error) => assert!(refused && error.to_string().starts_with("weight file changed"), "{error}"),
        }
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn any_call_of_loading_may_fail() {
    let (model, stop) = (Model::new(), Arc::default());
    let calls = {
        let driver = StandIn::new(PLENTY);
        model.engine(&driver, &stop, Variant::Distilled, false).map(drop).unwrap();
        driver.calls.get()
    };
    assert!(calls > 150, "{calls}");
    for n in failing(calls) {
        let driver = StandIn::new(PLENTY);
        driver.fail_after(n);
        let result = model.engine(&driver, &stop, Variant::Distilled, false).map(drop);
        // What is left to synchronise when the backend goes away has nobody to tell.
        let failed = matches!(result, Err(Error::Device { .. }) | Err(Error::DeviceMemory { .. }));
        assert!(failed || (result.is_ok() && driver.failed.get() == "synchronize"), "call {n} ({})", driver.failed.get());
        assert!(driver.taken.borrow().is_empty(), "call {n} ({}): {:?}", driver.failed.get(), driver.taken.borrow());
    }
}

#[test]
fn a_run_ends_at_the_next_op_when_asked_to() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::<AtomicBool>::default());
    let [(variant, job), _] = jobs();
    let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
    stop.store(true, Ordering::Relaxed);
    let before = driver.launches.get();
    assert!(matches!(make(&mut engine, &job), Err(Error::Interrupted)));
    assert_eq!(driver.launches.get(), before);
    let loading = model.engine(&driver, &stop, variant, false).map(drop);
    assert!(matches!(loading, Err(Error::Interrupted)), "{loading:?}");
    stop.store(false, Ordering::Relaxed);
    assert_eq!(make(&mut engine, &job).unwrap().len(), 1);
}

/// Tools that look for races and the like run the small cases only: no kernel may escape them.
#[test]
fn the_small_cases_launch_every_kernel() {
    let mut cuda = cuda(&StandIn::new(PLENTY), &Arc::default()).unwrap();
    assert!(cuda.launched().all(|(_, times)| times == 0));
    let mut weights = Arena::new(Region::Weights);
    for choice in Choice::all() {
        cuda.set_choice(choice);
        for case in ops::cases::all().iter().filter(|case| ops::is_within(ops::SMALL, &case.name)) {
            ops::run(&mut cuda, &mut weights, case, false, &mut Vec::new());
        }
    }
    // The self-test launches its own, and looks at what comes back, which here is nothing.
    assert!(cuda.self_test().is_err());
    let missed = cuda.launched().filter(|(kernel, times)| *times == 0 && *kernel != Kernel::Selftest);
    let missed: Vec<_> = missed.map(|(kernel, _)| kernel).collect();
    assert!(missed.is_empty(), "never launched: {missed:?}");
}

#[test]
fn a_job_that_does_not_fit_is_refused_with_ways_down() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    let size = kiln::sequence::Pixels::new(2048, 2048).unwrap();
    let job = Job { size, ..job };
    let open = model.open(variant);
    let options = LoadOptions { references: false, ..OPTIONS };
    let estimate = open.estimate(options, &job).unwrap();
    let need = estimate.weight_bytes + estimate.arena_bytes;
    let least = estimate.low_memory_weight_bytes + estimate.arena_bytes;
    // What the backend itself takes, at most.
    let own = 6 << 20;
    let saves = [(need + own, Some(false)), (need, Some(true)), (least + own, Some(true))];
    for (memory, saves) in saves.into_iter().chain([least, need / 2, 1 << 22].map(|memory| (memory, None))) {
        let driver = StandIn::new(memory);
        let answer = open.check_memory(&cuda(&driver, &stop).unwrap(), "GPU 0 (Stand-in)", options, &job);
        assert_eq!(driver.bytes.get().1, 0, "nothing is taken to find out");
        if let Some(low_memory) = saves {
            assert_eq!(answer.unwrap().low_memory, low_memory, "{memory}");
            continue;
        }
        let error = answer.unwrap_err();
        assert_eq!(error.exit_code(), 4);
        let (message, hint) = (error.to_string(), error.hint().unwrap());
        let needs = format!("not enough GPU memory: this job needs {:.1} GiB", least as f64 / f64::from(1 << 30));
        assert!(message.starts_with(&needs), "{message}");
        assert!(message.ends_with(" is free on GPU 0 (Stand-in)"), "{message}");
        let smaller = if memory > 1 << 25 { "try to use --width 1" } else { "try to close other programs" };
        assert!(hint.starts_with(smaller) && hint.ends_with(", or use --backend cpu"), "{memory}: {hint}");
    }
}

#[test]
fn every_op_can_be_timed() {
    let driver = StandIn::new(1 << 40);
    let mut cuda = Cuda::new(driver.clone(), &|_| Ok(Cow::Borrowed(&[])), Arc::default()).unwrap();
    for row in rows(Scale::Quick, Precision::Bf16).unwrap() {
        let (launches, replays) = (driver.launches.get(), driver.replays.get());
        let figure = row.measure(&mut cuda, &Protocol::QUICK).unwrap();
        assert!(figure.kernels.iter().all(|name| name.starts_with("kl_")) && !figure.kernels.is_empty(), "{figure:?}");
        // Warm-up launches and records; what is timed is replayed.
        let recorded = if figure.of_copy.is_some() { 2 } else { 1 };
        assert_eq!(driver.replays.get() - replays, recorded * (1 + 1 + figure.seconds.len()), "{figure:?}");
        assert!(driver.launches.get() - launches >= recorded * 2 * figure.sets, "{figure:?}");
        assert!(figure.kernels.iter().all(|name| cuda::kernels_of(row.name).iter().any(|k| k.symbol() == *name)), "{figure:?}");
    }
}

#[test]
fn fewer_sets_where_memory_is_short() {
    let driver = StandIn::new(8 << 20);
    let mut cuda = Cuda::new(driver.clone(), &|_| Ok(Cow::Borrowed(&[])), Arc::default()).unwrap();
    let rows = rows(Scale::Quick, Precision::Bf16).unwrap();
    let row = rows.iter().find(|row| row.shape == "64x64, 64 channels, stats given").unwrap();
    assert_eq!(row.measure(&mut cuda, &Protocol::QUICK).unwrap().sets, 1);
}

/// At full size on tensor cores, every one.
#[test]
fn large_shapes_take_the_fast_kernels() {
    let driver = StandIn::new(1 << 40);
    let mut cuda = Cuda::new(driver.clone(), &|_| Ok(Cow::Borrowed(&[])), Arc::default()).unwrap();
    for row in rows(Scale::Klein, Precision::Bf16).unwrap() {
        row.prepare(&mut cuda, 1).unwrap().warm_up(&mut cuda).unwrap();
    }
    let launched = |kernel: Kernel| cuda.launched().any(|(k, times)| k == kernel && times > 0);
    let fast = [
        Kernel::GemmSm90Large,
        Kernel::GemmSm90Wide,
        Kernel::AttentionSm90,
        Kernel::AttentionSm90Causal,
        Kernel::AttentionWide64,
        Kernel::ConvMma256,
    ];
    assert!(fast.into_iter().all(launched));
    assert!(
        ![
            Kernel::GemmMma256,
            Kernel::AttentionMma,
            Kernel::NaiveProduct,
            Kernel::NaiveConv,
            Kernel::NaiveAttention,
            Kernel::HeadNorm
        ]
        .into_iter()
        .any(launched)
    );
}
