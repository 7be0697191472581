//! Memory of a real run against the plan, by a counting allocator and by the peak RSS of the process.
//!
//! One test in a process of its own: the counters see every thread.
#![allow(unsafe_code)] // an allocator cannot be written without it
#![allow(clippy::print_stdout)] // figures, shown with --nocapture

mod common;

use common::{cpu, engine_on, small_job};
use kiln::backend::GemmFormats;
use kiln::config::Variant;
use kiln::locate::Found;
use kiln::names::Layout;
use kiln::noise::NoiseKind;
use kiln::part::PerPart;
use kiln::pipeline::{Engine, Job, LoadOptions, Noise, OpenModel};
use kiln::progress::Silent;
use kiln::sequence::Pixels;
use kiln::tensor::{ALIGN, DType, Precision};
use kiln::tiny;
use kiln::tokenizer::Tokenizer;
use std::alloc::{self, GlobalAlloc, System};
use std::path::Path;
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

/// The peak RSS of the process, in bytes.
fn peak_resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) * 1024
}

/// Weights that have to be converted are copied, and the plan counts these bytes: f32 files in a run of bf16.
fn copies_are_what_the_plan_says(job: &Job) {
    let model = tiny::model(Layout::Diffusers, DType::F32).unwrap();
    let weights = PerPart::from_fn(|part| model.weights(part).unwrap());
    let tokenizer = Tokenizer::from_json(tiny::TOKENIZER, Path::new("tiny")).unwrap();
    let conventions = Found::Tiny.conventions().unwrap();
    let model = OpenModel::check(weights, PerPart::default(), tokenizer, Variant::Distilled, conventions).unwrap();
    let options = LoadOptions { precision: Precision::Bf16, references: false, low_memory: false };
    let want = model.estimate(options, GemmFormats::ALL, job).unwrap().copied_bytes as usize;
    let before = OTHER.now.load(Ordering::Relaxed);
    let mut engine = Engine::load(Box::new(cpu()), model, options, &Silent).unwrap();
    engine.generate(job, &Silent, &mut |_| Ok(())).unwrap();
    let copied = OTHER.now.load(Ordering::Relaxed) - before;
    println!("copied {copied} bytes, {want} planned");
    // Threads keep the packing buffers of GEMMs.
    assert!(want > 32 << 20 && copied >= want && copied - want < 8 << 20, "{copied} bytes, {want} planned");
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
