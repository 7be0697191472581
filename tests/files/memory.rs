//! Compares the memory of a real run with the plan, by the counting allocator and by the process's peak RSS. Also checks that
//! spans take no memory while nothing is recorded.

use common::adapter_files::{adapters, lora_of_all};
use common::alone::alone;
use common::cost::{HEAP, allocations};
use common::quantized::{self, Content, Form, SHORT};
use common::{engine_on, opened, small_job, tiny_weights};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{GemmFormats, Observed, Observer};
use kiln::internals::component::Component;
use kiln::internals::config::Variant;
use kiln::internals::model::transformer_manifest;
use kiln::internals::names::Layout;
use kiln::internals::noise::NoiseKind;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, Noise, OpenModel, estimate};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{ALIGN, DType, Precision};
use kiln::internals::tiny;
use kiln::locate::Found;
use kiln::progress::Silent;
use kiln::trace;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A backend with one thread. With several, kept memory depends on their number and on which of them had time for a GEMM.
fn cpu() -> Cpu {
    Cpu::new(1, Arc::default()).unwrap()
}

/// Records the bytes of the arena, whose pages come from the system and not from the counting allocator.
#[derive(Clone, Default)]
struct ArenaBytes(Arc<AtomicU64>);

impl Observer<Cpu> for ArenaBytes {
    fn working_bytes(&mut self, bytes: u64) -> u64 {
        self.0.fetch_max(bytes, Ordering::Relaxed);
        bytes
    }
}

/// A size of the process, in bytes: `VmHWM` is the peak RSS, `VmSize` the mapped addresses.
fn of_process(what: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix(what)?.strip_prefix(':')).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) * 1024
}

/// The tiny model from f32 files, which a run of bf16 has to convert.
fn wide_model() -> OpenModel {
    let model = tiny::model(Layout::Diffusers, DType::F32).unwrap();
    opened(tiny_weights(&model), Variant::Distilled, Found::Tiny.defaults().unwrap())
}

/// The tiny model from a file with NVFP4 layers in this form.
fn nvfp4_model(form: Form) -> OpenModel {
    let file = Content::of("nvfp4").with_names_of_diffusers().file(form);
    quantized::model(quantized::weights(Component::Transformer, file), None, SHORT)
}

/// The bytes that a model takes in addition to its files after a bf16 run, and the copied weight bytes of the plan.
fn copied_and_planned(model: OpenModel, job: &Job) -> [usize; 2] {
    let options = LoadOptions::DEFAULT;
    let planned = estimate(model.estimate_request(options, GemmFormats::ALL), job).unwrap().copied_bytes as usize;
    let before = HEAP.now();
    let mut engine = Engine::load(Box::new(cpu()), model, options, &Silent).unwrap();
    engine.generate(job, &Silent, &mut |_| Ok(())).unwrap();
    let copied = HEAP.now() - before;
    println!("copied {copied} bytes, {planned} planned");
    [copied, planned]
}

/// Converted weights are copied, and the plan counts these bytes.
fn copies_are_what_the_plan_says(job: &Job) {
    let [copied, planned] = copied_and_planned(wide_model(), job);
    // A thread keeps the packing buffers of GEMMs.
    assert!(planned > 32 << 20 && copied >= planned && copied - planned < 8 << 20, "{copied} bytes, {planned} planned");

    // Weights merged with an adapter are copied as well, again up to the memory that the thread keeps.
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

    // ModelOpt stores elements and block scales in another order than tensors do. ComfyUI uses the same order, so only norms are
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
    // The counters see every thread.
    if !alone(a_run_uses_the_planned_memory_and_little_else) {
        return;
    }
    const MIB: usize = 1 << 20;
    let job = Job {
        prompt: "a lighthouse".into(),
        size: Pixels::new(256, 320).unwrap(),
        noise: Noise::Drawn(NoiseKind::HOPPER),
        ..small_job()
    };
    for precision in [Precision::F32, Precision::Bf16] {
        let reserved = ArenaBytes::default();
        let backend = Observed::new(Box::new(cpu()), reserved.clone());
        let mut engine = engine_on(Box::new(backend), Variant::Distilled, precision);
        let plan = engine.plan(&job).unwrap();
        let weights = HEAP.now();
        HEAP.restart();
        engine.generate(&job, &Silent, &mut |_| Ok(())).unwrap();

        let arena = plan.arena_bytes.next_multiple_of(ALIGN);
        assert_eq!(reserved.0.load(Ordering::Relaxed), arena, "the arena is what the plan says, to its alignment");
        let arena = arena as usize;
        let scratch = HEAP.peak() - weights;
        println!("{}: arena {} MiB, scratch {} MiB", precision.name(), arena / MIB, scratch / MIB);
        assert!(scratch <= 256 * MIB, "{scratch} bytes in addition to the plan");

        let resident = of_process("VmHWM");
        let limit = (weights + arena) + (weights + arena) / 10 + 256 * MIB;
        assert!(resident <= limit, "{resident} bytes resident, {limit} allowed");
        let mapped = of_process("VmSize");
        drop(engine);
        assert!(of_process("VmSize") + arena <= mapped, "working memory is given back");
    }
    copies_are_what_the_plan_says(&Job { size: Pixels::new(64, 64).unwrap(), ..job });
}

#[test]
fn spans_cost_nothing_while_nothing_is_recorded() {
    assert!(!trace::is_on());
    let before = allocations();
    for _ in 0..1000 {
        let _span = trace::span("a");
        let _other = trace::span_of("b", || unreachable!());
    }
    assert_eq!(allocations(), before);
    // The counter works.
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1);
}
