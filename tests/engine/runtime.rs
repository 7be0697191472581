//! The CUDA backend on a stand-in for the driver. It computes nothing, but counts every call, checks that every resource is freed and
//! that weights are uploaded before a kernel reads them, and can make any call fail.

mod coverage;
mod modules;
mod previews;
mod timed;

use common::ops;
use common::quantized::{self, Content, Form};
use common::random::one_in;
use common::stand_in::StandIn;
use common::wrapped;
use common::{cases, opened, small_job, tiny_weights};
use kiln::error::{Error, Result};
use kiln::internals::backend::cuda::driver::DeviceInfo;
use kiln::internals::backend::cuda::{self, Cuda};
use kiln::internals::backend::{Access, Backend, GemmFormats, Observed, Observer, Op, Role};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::{Component, PerComponent};
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, GeneratedImage, Job, LoadOptions, OpenModel, estimate};
use kiln::internals::tensor::{ALIGN, Arena, Bytes, DType, Region, Tensor, WeightSlice};
use kiln::internals::tiny::{self, TinyModel};
use kiln::progress::Silent;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The tiny model, which tests build once.
struct Model(TinyModel);

impl Model {
    fn new() -> Self {
        Self(tiny::model(Layout::Diffusers, DType::Bf16).unwrap())
    }

    fn open(&self, variant: Variant) -> OpenModel {
        opened(tiny_weights(&self.0), variant, ModelDefaults::klein())
    }

    fn engine(&self, driver: &Rc<StandIn>, stop: &Arc<AtomicBool>, variant: Variant, low_memory: bool) -> Result<Engine> {
        let options = LoadOptions { low_memory, ..OPTIONS };
        Engine::load(Box::new(cuda(driver, stop)?), self.open(variant), options, &Silent)
    }
}

const OPTIONS: LoadOptions = LoadOptions { references: true, ..LoadOptions::DEFAULT };

fn cuda(driver: &Rc<StandIn>, stop: &Arc<AtomicBool>) -> Result<Cuda> {
    Cuda::new(driver.clone(), &|_| Ok(Cow::Borrowed(&[])), stop.clone())
}

fn generate(engine: &mut Engine, job: &Job) -> Result<Vec<GeneratedImage>> {
    let mut images = Vec::new();
    engine.generate(job, &Silent, &mut |image| {
        images.push(image);
        Ok(())
    })?;
    Ok(images)
}

/// One job from a prompt and one from an image, with enough steps to run one op by op, capture one and replay one.
fn jobs() -> [(Variant, Job); 2] {
    let job = Job { steps: 3, record: false, ..cases()[0].job() };
    let modes = common::modes::modes();
    let edit = modes.cases.iter().find(|c| c.kv).unwrap().job(&modes.images);
    [(Variant::Distilled, job.clone()), (Variant::Kv, Job { steps: 3, record: false, size: job.size, ..edit })]
}

/// The job at a small size.
fn small(job: Job) -> Job {
    Job { steps: 1, size: kiln::internals::sequence::Pixels::new(64, 64).unwrap(), ..job }
}

const PLENTY: u64 = 80 << 30;

/// Bytes of the scratch space for one SM: fault flags and counters, partial results of reductions, flags of Stream-K workers,
/// expansion counters, and the partials of those workers.
const SCRATCH: u64 = 1024 + (1 << 20) + 1024 + (1 << 20) + 256 * 192 * 4;

#[test]
fn memory_is_what_was_planned_and_steps_are_replayed() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    for ((variant, job), low_memory) in jobs().into_iter().flat_map(|job| [(job.clone(), false), (job, true)]) {
        let mut engine = model.engine(&driver, &stop, variant, low_memory).unwrap();
        let weights = driver.bytes.get().0;
        let plan = engine.plan(&job).unwrap();
        let estimate = estimate(model.open(variant).estimate_request(OPTIONS, cuda::gemm_formats((9, 0))), &job).unwrap();
        assert_eq!(weights, if low_memory { estimate.low_memory_weight_bytes } else { estimate.weight_bytes });
        assert!(estimate.low_memory_weight_bytes < estimate.weight_bytes);
        let before = driver.replays.get();
        generate(&mut engine, &job).unwrap();
        let working = driver.bytes.get().0 - weights;
        assert_eq!(working - plan.arena_bytes.next_multiple_of(ALIGN), SCRATCH, "only the scratch comes on top of the plan");
        assert_eq!(driver.replays.get() - before, 2, "the second and the third step");
        // A second image of the same size takes no additional memory.
        generate(&mut engine, &job).unwrap();
        assert_eq!(driver.bytes.get().0, weights + working);
        drop(engine);
        assert_eq!(driver.bytes.get().0, 0);
    }
}

/// The host waits for the compute stream a few times per job and image, however many steps there are. It reads a step's checks on
/// another stream, while the next step runs.
#[test]
fn steps_do_not_wait_for_the_host() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let [(variant, job), _] = jobs();
    let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
    generate(&mut engine, &job).unwrap();
    let mut waits = |steps: usize, images: u64| {
        driver.waits.borrow_mut().clear();
        generate(&mut engine, &Job { steps, seeds: (0..images).collect(), ..job.clone() }).unwrap();
        let mut waits: Vec<usize> = driver.waits.borrow().values().copied().collect();
        waits.sort_unstable();
        waits
    };
    // The host waits for the stream of ops three times at the start of a job, and for each image's pixels and saturation count. It
    // waits for the read stream once for the prompts, and for each image once per step and once for the decoded result.
    assert_eq!([(3, 1), (9, 1), (9, 2)].map(|(steps, images)| waits(steps, images)), [[5, 5], [5, 11], [7, 21]]);
}

/// A job replays the graph that an earlier job of its kind captured, whatever ran between them, because launches identify a graph.
#[test]
fn graphs_outlive_their_job() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let [(variant, job), _] = jobs();
    let smaller = Job { steps: 3, ..small(job.clone()) };
    let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
    let mut run = |job: &Job| {
        let replays = driver.replays.get();
        generate(&mut engine, job).unwrap();
        assert_eq!(driver.replays.get() - replays, 2, "the second and the third step");
        driver.held("graph")
    };
    let other_prompt = Job { prompt: "another prompt".into(), seeds: vec![7], ..job.clone() };
    assert_eq!([&job, &other_prompt, &smaller, &job, &smaller].map(&mut run), [1, 1, 2, 2, 2]);
    // Larger working memory is a new allocation, where graphs captured in the old memory are not replayed.
    let larger =
        Job { size: kiln::internals::sequence::Pixels::new(2 * job.size.width(), job.size.height()).unwrap(), ..job.clone() };
    assert_eq!([&larger, &job, &larger, &job].map(&mut run), [3, 4, 4, 4]);
}

/// Working memory whose content is lost: weights were expanded there, and nothing was written there since.
#[derive(Default)]
struct Lost(Vec<Range<u64>>);

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Lost {
    fn write(&mut self, range: &Range<u64>) {
        let rest = |lost: &Range<u64>| [lost.start..lost.end.min(range.start), lost.start.max(range.end)..lost.end];
        self.0 = self.0.iter().flat_map(rest).filter(|rest| !rest.is_empty()).collect();
    }

    /// Follows an op to the weights that it expanded: the first address among its kernel's parameters that is in the `arena`, but in
    /// no operand. Returns false if it expanded none.
    fn follow(&mut self, op: Op<'_>, arena: &Range<u64>, params: &[u64]) -> bool {
        let mut operands = Vec::new();
        op.operands(&mut |t, access| operands.extend((t.region == Region::Arena).then(|| (t.extent(), access))));
        for (range, _) in operands.iter().filter(|(_, access)| *access != Access::Write) {
            assert!(!self.0.iter().any(|lost| overlap(lost, range)), "{op:?} reads what expanded weights overwrote");
        }
        operands.iter().filter(|(_, access)| *access != Access::Read).for_each(|(range, _)| self.write(range));
        let bytes = op.scratch_bytes(GemmFormats { expands: true, ..GemmFormats::ALL });
        if bytes == 0 {
            return false;
        }
        let offsets = params.iter().filter(|word| arena.contains(word)).map(|word| word - arena.start);
        let first = offsets.filter(|offset| !operands.iter().any(|(range, _)| range.contains(offset))).min().unwrap();
        let expanded = first..first + bytes;
        assert!(arena.start + expanded.end <= arena.end, "{op:?} expands weights beyond working memory");
        assert!(!operands.iter().any(|(range, _)| overlap(range, &expanded)), "{op:?} expands weights over its operands");
        self.0.push(expanded);
        true
    }
}

/// A model that needs the most working memory where it expands weights. The plan includes that memory, so nothing is allocated in
/// addition, and expanded weights overwrite nothing that is read again.
#[test]
fn weights_are_expanded_in_free_working_memory() {
    let open = || {
        let weights = |part, name, form| quantized::weights(part, Content::of(name).file(form));
        let encoder = weights(Component::TextEncoder, "fp8mixed", Form::COMFY);
        quantized::model(weights(Component::Transformer, "nvfp4", Form::BFL), Some(encoder), 64)
    };
    let (options, job, stop) = (LoadOptions::DEFAULT, Job { steps: 3, ..small_job() }, Arc::default());
    let arena_bytes = |gemms| estimate(open().estimate_request(options, gemms), &job).unwrap().arena_bytes;
    let mut working = 0;
    // A kernel expands weights before the GEMM. On Hopper, the last entry, the GEMM itself does.
    for (capability, shared) in [((8, 0), 166_912), ((8, 9), 101_376), ((12, 0), 101_376), ((9, 0), DeviceInfo::SM90_SHARED)] {
        // No self-test has passed on these GPUs, so NVFP4 inputs are not available.
        let gemms = GemmFormats { w4a4: false, ..cuda::gemm_formats(capability) };
        let planned = arena_bytes(gemms);
        assert!(planned > arena_bytes(GemmFormats { expands: false, ..gemms }), "the plan does not depend on expanded weights");
        working = planned.next_multiple_of(ALIGN);
        let driver = StandIn::of(capability, shared, PLENTY);
        let mut engine = Engine::load(Box::new(cuda(&driver, &stop).unwrap()), open(), options, &Silent).unwrap();
        let all = driver.bytes.get().0 + working + SCRATCH;
        assert_eq!(engine.plan(&job).unwrap().arena_bytes, planned);
        for image in 0..2 {
            generate(&mut engine, &job).unwrap();
            assert_eq!(driver.bytes.get(), (all, all), "in use, and at the peak, on {capability:?}");
            assert_eq!(driver.replays.get(), 2 * (image + 1));
        }
    }

    // This run goes op by op.
    let driver = StandIn::new(PLENTY);
    let lost = Rc::new(RefCell::new(Lost::default()));
    let expansions = Rc::new(Cell::new(0));
    let (watched, written, count) = (driver.clone(), lost.clone(), expansions.clone());
    let after_op = move |_, op: Op<'_>, _: &mut Cuda| {
        let taken = watched.taken.borrow();
        let (address, _) = taken.iter().find(|(_, taken)| **taken == ("memory", working + SCRATCH)).unwrap();
        let follows = lost.borrow_mut().follow(op, &(*address..address + working), &watched.params.borrow());
        count.set(count.get() + u32::from(follows));
        Ok(())
    };
    let mut backend = wrapped::after_op(cuda(&driver, &stop).unwrap(), after_op);
    backend.observer.before_write = Box::new(move |to, _| written.borrow_mut().write(&to.extent()));
    generate(&mut quantized::engine(Box::new(backend), open(), options), &job).unwrap();
    assert!(expansions.get() > 50, "{}", expansions.get());
}

/// Weights that are quantized during upload take the planned memory, and are complete when a kernel reads them.
#[test]
fn weights_are_quantized_while_they_are_uploaded() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    let load = |options: LoadOptions| {
        let (driver, estimate) =
            (StandIn::new(PLENTY), estimate(model.open(variant).estimate_request(options, cuda::gemm_formats((9, 0))), &job));
        let mut engine = Engine::load(Box::new(cuda(&driver, &stop).unwrap()), model.open(variant), options, &Silent).unwrap();
        let (estimate, weights) = (estimate.unwrap(), driver.bytes.get().0);
        assert_eq!(weights, if options.low_memory { estimate.low_memory_weight_bytes } else { estimate.weight_bytes });
        for image in 1..=2 {
            generate(&mut engine, &job).unwrap();
            assert_eq!(driver.bytes.get().0, weights + estimate.arena_bytes.next_multiple_of(ALIGN) + SCRATCH);
            assert_eq!(driver.replays.get(), 2 * image, "the second and the third step");
        }
        let quantized = estimate.formats.layers.iter().filter(|layer| layer.parts[0].held.is_quantized());
        (weights, quantized.flat_map(|layer| &layer.parts).map(|part| part.stored_bytes - part.held_bytes).sum::<u64>())
    };
    for low_memory in [false, true] {
        let [plain, fp8, nvfp4] =
            [None, Some(DType::E4m3), Some(DType::E2m1)].map(|quantize| load(LoadOptions { quantize, low_memory, ..OPTIONS }));
        assert!(plain.1 == 0 && nvfp4.0 < fp8.0 && fp8.0 < plain.0, "{plain:?} {fp8:?} {nvfp4:?}");
        // The saved memory is the difference, up to the rounding of each allocation. In low-memory mode only one side counts.
        let close =
            |(weights, saved): (u64, u64)| plain.0 - weights <= saved && (low_memory || plain.0 - weights > saved / 100 * 98);
        assert!(close(fp8) && close(nvfp4), "{plain:?} {fp8:?} {nvfp4:?}");
    }
}

/// The calls that fail, one in each run. A short run takes the first and the last calls, which are made once each, and some calls
/// between, which repeat a few kinds.
fn failing(calls: usize) -> impl Iterator<Item = usize> {
    (0..25).chain(one_in(96, "failing calls", 25..calls - 10)).chain(calls - 10..calls)
}

/// Every call of a run fails once: each failure is an error, everything is freed, and the same engine works again.
#[test]
fn any_call_of_a_run_may_fail() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let [plain, edit] = jobs();
    // With low memory, every run uploads all weights again.
    for ((variant, job), low_memory) in [(plain.clone(), false), (edit, false), ((plain.0, small(plain.1)), true)] {
        let mut engine = model.engine(&driver, &stop, variant, low_memory).unwrap();
        // The memory of the second run is already allocated.
        generate(&mut engine, &job).unwrap();
        let start = driver.calls.get();
        generate(&mut engine, &job).unwrap();
        let calls = driver.calls.get() - start;
        assert!(calls > 300, "{calls}");
        for n in failing(calls) {
            let attempt = |engine: &mut Engine| {
                driver.fail_after(n);
                let result = generate(engine, &job);
                (result, driver.heal())
            };
            // A run after a failed one finds that run's uploads, and may end before it has made so many calls.
            let result = match attempt(&mut engine) {
                (result, true) => result,
                (result, false) => {
                    assert_eq!(result.unwrap().len(), 1);
                    let (result, is_reached) = attempt(&mut engine);
                    assert!(is_reached, "call {n} of {calls}");
                    result
                }
            };
            // Poisoning released memory may fail unnoticed: on a real device the next call would report it.
            match result {
                Err(Error::Device { .. }) => {}
                Ok(_) if driver.failed.get() == "fill" => {}
                other => panic!("call {n} ({}): {:?}", driver.failed.get(), other.map(|p| p.len())),
            }
        }
        assert_eq!(generate(&mut engine, &job).unwrap().len(), 1);
    }
}

/// The first run uploads the rest of the weights. A second run completes the uploads that a failure interrupted.
#[test]
fn any_call_of_the_first_run_may_fail() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let [(variant, job), _] = jobs();
    let job = small(job);
    let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
    let start = driver.calls.get();
    generate(&mut engine, &job).unwrap();
    let calls = driver.calls.get() - start;
    // Only some calls, because each needs a separate engine, and uploads repeat the same three calls.
    for n in one_in(112, "failing calls of the first run", 0..calls) {
        let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
        driver.fail_after(n);
        let result = generate(&mut engine, &job);
        driver.heal();
        assert!(result.is_err() || driver.failed.get() == "fill", "call {n} ({})", driver.failed.get());
        assert_eq!(generate(&mut engine, &job).unwrap().len(), 1, "call {n} ({})", driver.failed.get());
    }
}

/// Transformer uploads overlap with the text encoder's kernels, unless they overwrite what these read. VAE uploads overlap with those
/// of the first step. [`common::order::Order`] checks with every call that kernels wait for weights, and copies for kernels.
#[test]
fn weights_are_uploaded_while_the_prompt_is_encoded() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    for low_memory in [false, true] {
        let driver = StandIn::new(PLENTY);
        let mut engine = model.engine(&driver, &stop, variant, low_memory).unwrap();
        let copies = || (driver.order.borrow().beside, driver.order.borrow().behind);
        assert_eq!((driver.launches.get(), copies()), (0, (0, 0)));
        generate(&mut engine, &job).unwrap();
        let (beside, behind) = copies();
        assert!(beside > 50 && if low_memory { behind > 40 } else { behind == 0 }, "{beside} {behind}");
        generate(&mut engine, &Job { prompt: "another".into(), ..job.clone() }).unwrap();
        let again = copies();
        assert!(if low_memory { again.0 == 2 * beside && again.1 > 2 * behind } else { again == (beside, behind) }, "{again:?}");
    }
}

/// Nothing else between these uploads and ops would wait, so the backend has to.
#[test]
fn uploads_wait_for_ops_that_read_the_same_weights() {
    let driver = StandIn::new(PLENTY);
    let mut cuda = cuda(&driver, &Arc::default()).unwrap();
    let (mut weights, mut ws) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    let weight = weights.alloc(1, 64, DType::F32).unwrap();
    let [out, x] = [4, 4].map(|rows| ws.alloc(rows, 64, DType::F32).unwrap());
    cuda.reserve(Region::Weights, weights.peak()).unwrap();
    cuda.reserve(Region::Arena, ws.peak()).unwrap();
    for _ in 0..3 {
        let bytes = Bytes::new(Arc::new(vec![0; 256]));
        cuda.upload(weight, Role::Vector, &[WeightSlice::plain(bytes, DType::F32, 1)]).unwrap();
        cuda.run(Op::RmsNorm { out, x, weight, eps: 1e-6 }).unwrap();
    }
    assert_eq!((driver.order.borrow().beside, driver.order.borrow().behind), (0, 2));
}

/// Weight files may not change while the engine still reads from them.
#[test]
fn files_may_change_once_everything_is_uploaded() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    let path = std::env::temp_dir().join(format!("kiln-runtime-{}.safetensors", std::process::id()));
    for (low_memory, images, refused) in [(false, 1, false), (true, 1, true), (false, 0, true)] {
        std::fs::write(&path, &*model.0.transformer).unwrap();
        let transformer = Weights::open(Component::Transformer, &path).unwrap();
        let open = opened(PerComponent { transformer, ..tiny_weights(&model.0) }, variant, ModelDefaults::klein());
        let driver = StandIn::new(PLENTY);
        let options = LoadOptions { low_memory, ..OPTIONS };
        let mut engine = Engine::load(Box::new(cuda(&driver, &stop).unwrap()), open, options, &Silent).unwrap();
        (0..images).for_each(|_| drop(generate(&mut engine, &job).unwrap()));
        std::fs::write(&path, b"short").unwrap();
        match generate(&mut engine, &job) {
            Ok(_) => assert!(!refused, "{low_memory} {images}"),
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
        // The backend cannot report a failure to synchronize while it is dropped.
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
    assert!(matches!(generate(&mut engine, &job), Err(Error::Interrupted)));
    assert_eq!(driver.launches.get(), before);
    let loading = model.engine(&driver, &stop, variant, false).map(drop);
    assert!(matches!(loading, Err(Error::Interrupted)), "{loading:?}");
    stop.store(false, Ordering::Relaxed);
    assert_eq!(generate(&mut engine, &job).unwrap().len(), 1);
}

/// The CUDA backend, which must refuse formats that it may have no kernels for: weights in e5m2, activations in NVFP4, and the ops on
/// them.
struct Refusing {
    driver: Rc<StandIn>,
    refused: usize,
    accepted: usize,
}

impl Observer<Cuda> for Refusing {
    fn gemm_formats(&self, _cuda: &Cuda) -> GemmFormats {
        GemmFormats::NONE
    }

    fn upload(&mut self, cuda: &mut Cuda, to: Tensor, role: Role, parts: &[WeightSlice]) -> Result<()> {
        match cuda.upload(to, role, parts) {
            Err(Error::Op { op: "upload", what }) if to.dtype.is_quantized() => {
                assert!(to.dtype == DType::E5m2 && what.contains("there are no kernels for"), "{what}");
                Ok(())
            }
            other => {
                assert!(to.dtype != DType::E5m2, "{to:?} was accepted");
                other
            }
        }
    }

    fn read(&mut self, cuda: &mut Cuda, from: Tensor, to: &mut [f32]) -> Result<()> {
        match cuda.read(from, to) {
            Err(Error::Op { op: "read", .. }) if from.dtype.is_quantized() => Ok(()),
            other => other,
        }
    }

    fn run(&mut self, cuda: &mut Cuda, op: Op<'_>) -> Result<()> {
        let mut unknown = false;
        op.operands(&mut |t, _| unknown |= t.dtype == DType::E5m2);
        let before = self.driver.launches.get();
        match cuda.run(op) {
            Err(Error::Op { op: name, what }) => {
                let why = ["on the GPU", "need tensor cores"].iter().any(|why| what.contains(why));
                assert!(name == op.name() && why, "{name}: {what}");
                assert_eq!(self.driver.launches.get(), before, "{name} was refused after a launch");
                self.refused += 1;
            }
            other => {
                assert!(!unknown && self.driver.launches.get() > before, "{op:?}");
                self.accepted += 1;
                return other;
            }
        }
        Ok(())
    }
}

/// An op without kernels launches nothing.
#[test]
fn quantized_operands_are_refused() {
    let driver = StandIn::new(PLENTY);
    let cuda = Box::new(cuda(&driver, &Arc::default()).unwrap());
    let mut backend = Observed::new(cuda, Refusing { driver, refused: 0, accepted: 0 });
    let (mut weights, cases) = (ops::Weights::default(), ops::quantized::all());
    for case in &cases {
        ops::run(&mut backend, &mut weights, case, false, &mut Vec::new());
    }
    let Refusing { refused, accepted, .. } = backend.observer;
    assert_eq!(refused + accepted, cases.len());
    assert!(refused > 0 && accepted > 0, "{refused} and {accepted}");
}

#[test]
fn incomplete_weights_are_refused() {
    ops::mistakes::check(&mut cuda(&StandIn::new(PLENTY), &Arc::default()).unwrap());
}

#[test]
fn a_job_that_does_not_fit_is_refused_with_ways_down() {
    let (model, stop) = (Model::new(), Arc::default());
    let [(variant, job), _] = jobs();
    let size = kiln::internals::sequence::Pixels::new(2048, 2048).unwrap();
    let job = Job { size, ..job };
    let open = model.open(variant);
    let options = LoadOptions { references: false, ..OPTIONS };
    let estimate = estimate(open.estimate_request(options, cuda::gemm_formats((9, 0))), &job).unwrap();
    let need = estimate.weight_bytes + estimate.arena_bytes;
    let least = estimate.low_memory_weight_bytes + estimate.arena_bytes;
    // In addition to the plan: the scratch, and up to 2 MiB by which the driver rounds up each of three allocations.
    let own = SCRATCH + 3 * (2 << 20);
    let saves = [(need + own, Some(false)), (need + own - 1, Some(true)), (least + own, Some(true))];
    for (memory, saves) in saves.into_iter().chain([least + own - 1, need / 2, 1 << 22].map(|memory| (memory, None))) {
        let driver = StandIn::new(memory);
        let answer = open.check_memory(&cuda(&driver, &stop).unwrap(), "GPU 0 (Stand-in)", options, &job);
        assert_eq!(driver.bytes.get().1, 0, "nothing is allocated to find out");
        if let Some(low_memory) = saves {
            assert_eq!(answer.unwrap().low_memory, low_memory, "{memory}");
            continue;
        }
        let error = answer.unwrap_err();
        assert_eq!(error.exit_code(), 4);
        let (message, hint) = (error.to_string(), kiln_program::cli::hint(&error).unwrap());
        let needs = format!("not enough GPU memory: this job needs {:.1} GiB", least as f64 / f64::from(1 << 30));
        assert!(message.starts_with(&needs), "{message}");
        assert!(message.ends_with(" is free on GPU 0 (Stand-in)"), "{message}");
        let smaller = if memory > 1 << 25 { "try to use --width 1" } else { "try to close other programs" };
        assert!(hint.starts_with(smaller) && hint.ends_with(", or use --backend cpu"), "{memory}: {hint}");
    }
}
