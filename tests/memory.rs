//! Memory of a real run against the plan, by a counting allocator and by the peak RSS of the process.
//!
//! One test in a process of its own: the counters see every thread.
#![allow(unsafe_code)] // an allocator cannot be written without it
#![allow(clippy::print_stdout)] // figures, shown with --nocapture

mod common;

use common::adapter_files::{adapters, lora_of_all};
use common::quantised::{self, Content, Form, SHORT};
use common::{engine_on, small_job};
use kiln::backend::GemmFormats;
use kiln::backend::cpu::Cpu;
use kiln::config::Variant;
use kiln::locate::Found;
use kiln::model::transformer_manifest;
use kiln::names::Layout;
use kiln::noise::NoiseKind;
use kiln::part::{Part, PerPart};
use kiln::pipeline::{Engine, Job, LoadOptions, Noise, OpenModel};
use kiln::progress::Silent;
use kiln::sequence::Pixels;
use kiln::tensor::{ALIGN, DType, Precision};
use kiln::tiny;
use kiln::tokenizer::Tokenizer;
use std::alloc::{self, GlobalAlloc, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes in use, and their peak.
struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    const fn new() -> Self {
        Self { now: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn restart(&self) {
        self.peak.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Only the arena is allocated with this alignment, which distinguishes it from everything else.
static ARENA: Gauge = Gauge::new();
static OTHER: Gauge = Gauge::new();

fn gauge(layout: alloc::Layout) -> &'static Gauge {
    if layout.align() == ALIGN as usize { &ARENA } else { &OTHER }
}

struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: alloc::Layout) -> *mut u8 {
        gauge(layout).add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: alloc::Layout) -> *mut u8 {
        gauge(layout).add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: alloc::Layout) {
        gauge(layout).sub(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A backend with one thread. What several threads keep depends on how many there are, and on which of them had time for a GEMM.
fn cpu() -> Cpu {
    Cpu::new(1, Arc::default()).unwrap()
}

/// The peak RSS of the process, in bytes.
fn peak_resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) * 1024
}

/// The tiny model from f32 files, which a run of bf16 has to convert.
fn wide_model() -> OpenModel {
    let model = tiny::model(Layout::Diffusers, DType::F32).unwrap();
    let weights = PerPart::from_fn(|part| model.weights(part).unwrap());
    let tokenizer = Tokenizer::from_json(tiny::TOKENIZER, Path::new("tiny")).unwrap();
    let conventions = Found::Tiny.conventions().unwrap();
    OpenModel::check(weights, PerPart::default(), tokenizer, Variant::Distilled, conventions).unwrap()
}

/// The tiny model from a file with NVFP4 layers in one of their orders.
fn nvfp4_model(form: Form) -> OpenModel {
    let file = Content::of("nvfp4").with_names_of_diffusers().file(form);
    quantised::model(quantised::weights(Part::Transformer, file), None, SHORT)
}

/// The bytes that a model takes beside its files after a run in bf16, and the bytes of weights that the plan says are copied.
fn copied_and_planned(model: OpenModel, job: &Job) -> [usize; 2] {
    let options = LoadOptions::DEFAULT;
    let planned = model.estimate(options, GemmFormats::ALL, job).unwrap().copied_bytes as usize;
    let before = OTHER.now.load(Ordering::Relaxed);
    let mut engine = Engine::load(Box::new(cpu()), model, options, &Silent).unwrap();
    engine.generate(job, &Silent, &mut |_| Ok(())).unwrap();
    let copied = OTHER.now.load(Ordering::Relaxed) - before;
    println!("copied {copied} bytes, {planned} planned");
    [copied, planned]
}

/// Weights that have to be converted are copied, and the plan counts these bytes.
fn copies_are_what_the_plan_says(job: &Job) {
    let [copied, planned] = copied_and_planned(wide_model(), job);
    // A thread keeps the packing buffers of GEMMs.
    assert!(planned > 32 << 20 && copied >= planned && copied - planned < 8 << 20, "{copied} bytes, {planned} planned");

    // So are weights that are merged with an adapter, again up to what the thread keeps.
    let plain = || OpenModel::open(&Found::Tiny, None).unwrap();
    let mut merged = plain();
    let layers = lora_of_all(&transformer_manifest(&merged.configs.transformer), 4);
    merged.adapters = adapters(&merged, [(&layers[..], 0.1)]);
    let [less, norms] = copied_and_planned(plain(), job);
    let [copied, planned] = copied_and_planned(merged, job);
    assert!(
        planned - norms > 8 << 20 && (copied - less).abs_diff(planned - norms) < 4 << 20,
        "{copied} bytes, {planned} planned"
    );

    // ModelOpt has elements and block scales in another order than tensors; ComfyUI has them in the same, so that only norms are
    // copied.
    let [less, norms] = copied_and_planned(nvfp4_model(Form::COMFY), job);
    let [copied, planned] = copied_and_planned(nvfp4_model(Form::MODELOPT), job);
    let (copied, planned) = (copied - less, planned - norms);
    let (elements, scales) = Content::of("nvfp4").layers.iter().fold((0, 0), |(elements, scales), layer| {
        (elements + layer.codes.len(), scales + layer.blocks.as_ref().map_or(0, Vec::len))
    });
    assert_eq!(planned, elements + scales, "the tiny model has whole tiles");
    assert!(copied.abs_diff(planned) < scales / 4, "{copied} bytes, {planned} planned");
}

#[test]
fn a_run_uses_the_planned_memory_and_little_else() {
    const MIB: usize = 1 << 20;
    let job = Job {
        prompt: "a lighthouse".into(),
        size: Pixels::new(256, 320).unwrap(),
        noise: Noise::Drawn(NoiseKind::HOPPER),
        ..small_job()
    };
    for precision in [Precision::F32, Precision::Bf16] {
        let mut engine = engine_on(Box::new(cpu()), Variant::Distilled, precision);
        let plan = engine.plan(&job).unwrap();
        let weights = OTHER.now.load(Ordering::Relaxed);
        ARENA.restart();
        OTHER.restart();
        engine.generate(&job, &Silent, &mut |_| Ok(())).unwrap();

        let arena = ARENA.peak.load(Ordering::Relaxed);
        assert_eq!(arena as u64, plan.arena_bytes.next_multiple_of(ALIGN), "the arena is what the plan says, to its alignment");
        let scratch = OTHER.peak.load(Ordering::Relaxed) - weights;
        println!("{}: arena {} MiB, scratch {} MiB", precision.name(), arena / MIB, scratch / MIB);
        assert!(scratch <= 256 * MIB, "{scratch} bytes beside the plan");

        let resident = peak_resident();
        let limit = (weights + arena) + (weights + arena) / 10 + 256 * MIB;
        assert!(resident <= limit, "{resident} bytes resident, {limit} allowed");
        drop(engine);
        assert_eq!(ARENA.now.load(Ordering::Relaxed), 0, "working memory is given back");
    }
    copies_are_what_the_plan_says(&Job { size: Pixels::new(64, 64).unwrap(), ..job });
}
