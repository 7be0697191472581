//! Predictions for GPUs that are not here: kernels and times. They obey the limits of the hardware, are consistent, and are compared with
//! measurements. docs/kernels.md has the tables that this code makes; `KILN_UPDATE_PREDICTIONS=1` writes them there.

use common::sandbox::Sandbox;
use kiln::device::Arch;
use kiln::internals::backend::GemmFormats;
use kiln::internals::config::{Configs, ModelDefaults, Variant};
use kiln::internals::pipeline::{Estimate, EstimateRequest, Job, LoadOptions, estimate};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::DType;
use kiln::predict::{GPU_SPECS, GpuSpec, Prediction, Predictor};
use kiln::progress::Phase;
use serde_json::Value;
use std::cell::Cell;
use std::fmt::Write as _;
use std::rc::Rc;

fn models() -> [(&'static str, Configs); 2] {
    [("klein 4B", Configs::KLEIN_4B), ("klein 9B", Configs::KLEIN_9B)]
}

const FORMATS: [(&str, Option<DType>); 3] = [("bf16", None), ("FP8", Some(DType::E4m3)), ("NVFP4", Some(DType::E2m1))];

fn job(side: usize) -> Job {
    let job = Job::new("", 0, &ModelDefaults::klein(), Variant::Distilled).unwrap();
    Job { size: Pixels::new(side, side).unwrap(), ..job }
}

fn request(configs: &Configs, quantize: Option<DType>, gemms: GemmFormats) -> EstimateRequest<'_> {
    let options = LoadOptions { quantize, ..LoadOptions::DEFAULT };
    EstimateRequest::new(configs, Variant::Distilled, options, gemms)
}

fn predict(configs: &Configs, quantize: Option<DType>, side: usize, gpu: &GpuSpec, arch: Arch) -> (Prediction, Estimate) {
    let predictor = Predictor::new(gpu, arch).unwrap();
    let request = request(configs, quantize, gemm_formats(gpu, arch));
    let estimate = estimate(EstimateRequest { time: Some(predictor.op_time()), ..request }, &job(side)).unwrap();
    (Prediction::of(&estimate), estimate)
}

fn step(configs: &Configs, quantize: Option<DType>, side: usize, gpu: &GpuSpec) -> f64 {
    predict(configs, quantize, side, gpu, gpu.arch()).0.step().unwrap()
}

/// The formats that an architecture's kernels multiply.
fn gemm_formats(gpu: &GpuSpec, arch: Arch) -> GemmFormats {
    GemmFormats { w4a4: arch == Arch::Sm120, ..gpu.gemm_formats() }
}

/// The vendor's peak of the fastest instruction for a format's ops.
fn peak(gpu: &GpuSpec, arch: Arch, quantize: Option<DType>) -> f64 {
    let [bf16, e4m3, e2m1] = [DType::Bf16, DType::E4m3, DType::E2m1].map(|dtype| gpu.tensor_flops(dtype));
    let block_scaled = e2m1.filter(|_| arch == Arch::Sm120);
    let peak = match quantize {
        None => bf16,
        // With block scales, e4m3 has half the rate of e2m1.
        Some(DType::E4m3) => block_scaled.map(|e2m1| e2m1 / 2.0).or(e4m3).or(bf16),
        Some(_) => block_scaled.or(bf16),
    };
    peak.unwrap()
}

/// No op is faster than the vendor's peaks of tensor cores and memory.
#[test]
fn no_op_exceeds_the_hardware() {
    for gpu in &GPU_SPECS {
        for (_, quantize) in FORMATS {
            for arch in [gpu.arch(), Arch::Portable] {
                let predictor = Predictor::new(gpu, arch).unwrap();
                let peak = peak(gpu, arch, quantize);
                let (card_bandwidth, ops) = (gpu.bandwidth as f64, Rc::new(Cell::new(0)));
                let seen = ops.clone();
                let check = Rc::new(move |op: &kiln::internals::backend::Op<'_>| {
                    let mut bytes = 0;
                    op.operands(&mut |tensor, _| bytes += tensor.bytes());
                    // A causal mask halves the work, but flops count it as dense.
                    let flops = op.flops() as f64 / if op.name() == "attention_causal" { 2.0 } else { 1.0 };
                    let seconds = predictor.seconds(op);
                    assert!(seconds >= flops / peak && seconds >= bytes as f64 / card_bandwidth && seconds.is_finite(), "{op:?}");
                    seen.set(seen.get() + 1);
                    seconds
                });
                let configs = Configs::KLEIN_4B;
                let request = request(&configs, quantize, gemm_formats(gpu, arch));
                estimate(EstimateRequest { time: Some(check), ..request }, &job(512)).unwrap();
                assert!(ops.get() > 500, "only {} ops", ops.get());
            }
        }
    }
}

#[test]
fn more_work_takes_longer() {
    let (small, large) = (Configs::KLEIN_4B, Configs::KLEIN_9B);
    for gpu in &GPU_SPECS {
        let bf16 = [256, 512, 1024, 2048].map(|side| step(&small, None, side, gpu));
        assert!(bf16.windows(2).all(|pair| pair[0] < pair[1]), "{}: {bf16:?}", gpu.name);
        assert!(step(&large, None, 1024, gpu) > 1.5 * bf16[2], "{}", gpu.name);
        // Expanding weights costs time; FP8 and FP4 tensor cores save more than that.
        let [fp8, nvfp4] = [DType::E4m3, DType::E2m1].map(|format| step(&small, Some(format), 1024, gpu));
        assert_eq!(nvfp4 < bf16[2], gpu.gemm_formats().w4a4, "{}", gpu.name);
        assert_eq!(nvfp4 < fp8, gpu.gemm_formats().w4a4 || !gpu.gemm_formats().w8a8, "{}", gpu.name);
        assert_eq!(fp8 < bf16[2], gpu.gemm_formats().w8a8, "{}", gpu.name);
        // More SMs, a higher clock or faster memory never makes a prediction slower.
        let more = GpuSpec { multiprocessors: gpu.multiprocessors + 16, ..gpu.clone() };
        let faster = GpuSpec { clock: gpu.clock + 100_000, ..gpu.clone() };
        let wider = GpuSpec { bandwidth: 2 * gpu.bandwidth, ..gpu.clone() };
        for better in [more, faster, wider] {
            assert!(step(&small, None, 1024, &better) < bf16[2], "{better:?}");
        }
    }
}

/// Predicted memory is the plan's, which does not depend on times.
#[test]
fn predicting_changes_nothing_of_the_plan() {
    for gpu in &GPU_SPECS {
        for (_, quantize) in FORMATS {
            let (_, timed) = predict(&Configs::KLEIN_4B, quantize, 512, gpu, gpu.arch());
            let gemms = gpu.gemm_formats();
            let plain = estimate(request(&Configs::KLEIN_4B, quantize, gemms), &job(512)).unwrap();
            assert!(plain.seconds.is_empty() && timed.seconds.len() == plain.stages.len());
            assert_eq!(Estimate { seconds: Vec::new(), ..timed }, plain);
        }
    }
    let none = Prediction::of(&estimate(request(&Configs::KLEIN_4B, None, GemmFormats::NONE), &job(256)).unwrap());
    assert_eq!((none.step(), none.stage(Phase::Decode)), (None, None));
}

#[test]
fn where_nothing_is_known_nothing_is_predicted() {
    for capability in [(7, 5), (10, 0), (10, 3), (12, 1)] {
        let gpu = GpuSpec { capability, ..GPU_SPECS[0].clone() };
        assert!(Predictor::new(&gpu, Arch::Portable).is_none(), "{capability:?}");
    }
    // A GPU has no prediction for kernels that it cannot run.
    assert!(Predictor::new(GpuSpec::named("4090").unwrap(), Arch::Sm120).is_none());
}

/// Measurements on an H200; docs/kernels.md has the sources.
struct Measured {
    arch: Arch,
    /// Indices into [`models`] and [`FORMATS`].
    model: usize,
    format: usize,
    side: usize,
    /// Milliseconds of encoding the prompt, a step and decoding.
    ms: [Option<f64>; 3],
}

impl Measured {
    fn predicted(&self) -> [f64; 3] {
        let gpu = GpuSpec::named("H200").unwrap();
        stages(&predict(&models()[self.model].1, FORMATS[self.format].1, self.side, gpu, self.arch).0)
    }
}

fn measured() -> [Measured; 9] {
    use Arch::{Portable, Sm90};
    let of = |arch, model, format, side, ms| Measured { arch, model, format, side, ms };
    [
        of(Portable, 0, 0, 1024, [Some(10.8), Some(93.2), None]),
        of(Sm90, 0, 0, 512, [Some(7.6), Some(15.0), Some(4.55)]),
        of(Sm90, 0, 0, 1024, [Some(7.3), Some(52.5), Some(16.7)]),
        of(Sm90, 0, 0, 2048, [Some(6.5), Some(278.7), Some(78.2)]),
        of(Sm90, 0, 1, 512, [None, Some(9.3), None]),
        of(Sm90, 0, 1, 1024, [Some(9.2), Some(32.6), None]),
        of(Sm90, 0, 2, 512, [None, Some(17.0), None]),
        of(Sm90, 0, 2, 1024, [Some(10.0), Some(53.1), None]),
        of(Sm90, 1, 1, 1024, [None, Some(68.0), None]),
    ]
}

/// Milliseconds of encoding the prompt, a step and decoding.
fn stages(prediction: &Prediction) -> [f64; 3] {
    [prediction.stage(Phase::Encode), prediction.step(), prediction.stage(Phase::Decode)].map(|seconds| 1e3 * seconds.unwrap())
}

/// The portable kernels are those that other cards run. The model leaves out what the card's power limit costs the Hopper kernels.
#[test]
fn predictions_are_near_what_was_measured() {
    for row in measured() {
        let limit = if row.arch == Arch::Portable { 1.10 } else { 1.35 };
        let ratio = row.ms[1].unwrap() / row.predicted()[1];
        assert!(ratio < limit && ratio > 0.95, "{:?} {} {}: {ratio}", row.arch, FORMATS[row.format].0, row.side);
    }
}

/// Makes the tables of docs/kernels.md.
fn tables() -> String {
    let cards: Vec<&GpuSpec> = GPU_SPECS.iter().filter(|gpu| gpu.arch() != Arch::Sm90).collect();
    let short =
        |gpu: &&GpuSpec| gpu.name.trim_start_matches("GeForce ").trim_end_matches(" Blackwell Workstation Edition").to_owned();
    let names: Vec<String> = cards.iter().map(short).collect();
    let mut text = format!("| a step, and peak memory | {} |\n| --- |{}\n", names.join(" | "), " --- |".repeat(names.len()));
    for (name, configs) in &models() {
        for side in [512, 1024] {
            for (format, quantize) in FORMATS {
                let cells: Vec<String> = cards.iter().map(|gpu| cell(configs, quantize, side, gpu)).collect();
                let _ = writeln!(text, "| {name}, {side}x{side}, {format} | {} |", cells.join(" | "));
            }
        }
    }
    let _ = write!(text, "\n| ms | {} |\n| --- |{}\n", names.join(" | "), " --- |".repeat(names.len()));
    for (name, configs) in &models() {
        for (format, quantize) in FORMATS {
            let cells = cards.iter().map(|gpu| predict(configs, quantize, 1024, gpu, gpu.arch()).0);
            let cells: Vec<String> = cells.map(|prediction| format!("{:.0}", stages(&prediction)[0])).collect();
            let _ = writeln!(text, "| {name}, encoding a prompt, {format} | {} |", cells.join(" | "));
        }
    }
    for side in [512, 1024] {
        let cells = cards.iter().map(|gpu| predict(&Configs::KLEIN_4B, None, side, gpu, gpu.arch()).0);
        let cells: Vec<String> = cells.map(|prediction| format!("{:.0}", stages(&prediction)[2])).collect();
        let _ = writeln!(text, "| decoding {side}x{side} | {} |", cells.join(" | "));
    }
    text.push_str("\n| H200, ms measured / predicted | encoding a prompt | a step | decoding |\n| --- | --- | --- | --- |\n");
    for row in measured() {
        let cell = |(measured, predicted): (Option<f64>, f64)| {
            measured.map_or(String::new(), |ms| format!("{ms:.1} / {predicted:.1} = {:.2}", ms / predicted))
        };
        let cells: Vec<String> = row.ms.into_iter().zip(row.predicted()).map(cell).collect();
        let kernels = if row.arch == Arch::Portable { "portable" } else { "Hopper" };
        let (model, format, side) = (models()[row.model].0, FORMATS[row.format].0, row.side);
        let _ = writeln!(text, "| {kernels} kernels, {model}, {side}x{side}, {format} | {} |", cells.join(" | "));
    }
    text
}

/// A step's time and the memory on a card. If both do not fit, the transformer replaces the text encoder in memory.
fn cell(configs: &Configs, quantize: Option<DType>, side: usize, gpu: &GpuSpec) -> String {
    let (prediction, estimate) = predict(configs, quantize, side, gpu, gpu.arch());
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let (all, low) = (estimate.weight_bytes + estimate.arena_bytes, estimate.low_memory_weight_bytes + estimate.arena_bytes);
    // The driver and the desktop take some of the memory.
    let room = gpu.memory / 16 * 15;
    let memory = match (all <= room, low <= room) {
        (true, _) => format!("{:.1} GiB", gib(all)),
        (false, true) => format!("{:.1} GiB *", gib(low)),
        (false, false) => return "does not fit".into(),
    };
    format!("{:.0} ms, {memory}", 1e3 * prediction.step().unwrap())
}

#[test]
fn the_documents_have_the_tables() {
    const MARKS: [&str; 2] = ["<!-- tests/engine/predictions.rs writes these tables -->\n", "<!-- up to here -->\n"];
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/kernels.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let [start, end] = MARKS.map(|mark| text.find(mark).unwrap_or_else(|| panic!("docs/kernels.md has no {mark}")));
    let (before, tables_there, after) = (&text[..start + MARKS[0].len()], &text[start + MARKS[0].len()..end], &text[end..]);
    let made = tables();
    if std::env::var_os("KILN_UPDATE_PREDICTIONS").is_some() {
        std::fs::write(&path, format!("{before}{made}{after}")).unwrap();
        return;
    }
    assert_eq!(tables_there, made, "if this is meant: KILN_UPDATE_PREDICTIONS=1 cargo test --test engine predictions::");
}

/// A plan names its GPU, and has predictions if kiln has numbers for this GPU.
#[test]
fn plans_name_their_gpu() {
    let sandbox = Sandbox::new();
    let plan = |args: &[&str]| sandbox.run([&["plan", "--model", "klein-4b"], args].concat()).good();
    let table = plan(&["--gpu", "rtx 4090"]).text().to_owned();
    assert!(table.contains("\ngpu                  GeForce RTX 4090\n"), "{table}");
    let predicted =
        table.lines().find_map(|line| line.strip_prefix("predicted            ")).unwrap_or_else(|| panic!("{table}"));
    assert!(predicted.starts_with("encoding text ") && predicted.ends_with(" ms; not measured"), "{predicted}");
    let seconds = |args: &[&str]| {
        let json = plan(&[&["--json"], args].concat()).json().remove(0);
        let rows = json["predicted"].as_array().unwrap();
        rows.iter().map(|row: &Value| row["seconds"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    let [fast, slow] = ["4090", "3090"].map(|gpu| seconds(&["--gpu", gpu]));
    assert!(fast.len() == 3 && fast.iter().zip(&slow).all(|(fast, slow)| fast < slow), "{fast:?} {slow:?}");
    assert!(seconds(&["--gpu", "4090", "--precision", "f32"]).is_empty(), "f32 is not for tensor cores");
    // The card decides the formats: only Hopper can choose how to accumulate.
    for (gpu, formats) in [("4090", "(w8a8, exact sums)"), ("H200", "(w8a8, promoted sums)"), ("3090", "(w8a16: ")] {
        let table = plan(&["--gpu", gpu, "--quantize", "fp8"]).text().to_owned();
        assert!(table.contains(formats), "{table}");
    }
}

#[test]
fn the_doctor_says_what_would_run_how_on_a_card() {
    let sandbox = Sandbox::new();
    let doctor = |gpu: &str| sandbox.run(["doctor", "--model", "tiny", "--gpu", gpu]).good().text().to_owned();
    let text = doctor("RTX 3090");
    assert!(text.contains("\ncard      GeForce RTX 3090, compute 8.6, 82 multiprocessors, 24.0 GiB; asked for"), "{text}");
    let why = "weights stay quantized and are expanded to bf16 before each GEMM: compute capability 8.6 has no FP8 tensor cores";
    assert!(text.contains(&format!("\n          FP8 transformer: {why}\n")) && !text.contains("\ndriver"), "{text}");
    let text = doctor("4090");
    assert!(text.contains("\n          FP8 transformer: FP8 by FP8 on tensor cores (mma.sync, "), "{text}");
    let text = doctor("RTX PRO 6000");
    assert!(text.contains("\n          NVFP4 transformer: NVFP4 by NVFP4 on tensor cores ("), "{text}");
}
