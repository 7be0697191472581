//! Compares adapters on the tiny model with diffusers and PEFT on the same files, or with the plain pipeline on weights merged in f64.
//! `tools/goldens/lora.py` says which case is which.

use common::lora::{File, Tensor};
use common::random::long;
use common::scratch::Scratch;
use common::{Goldens, cpu, fixture, relative_l2, run, short_model, small_job};
use kiln::internals::adapter::{Adapter, AdapterMode, Adapters, LayerTargets};
use kiln::internals::config::Variant;
use kiln::internals::dump::Record;
use kiln::internals::names::{LayerRole, Stream};
use kiln::internals::pipeline::{Engine, Job, LoadOptions};
use kiln::internals::sampler::Schedule;
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{DType, Precision};
use kiln::progress::Silent;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

#[derive(serde::Deserialize)]
struct Fixture {
    files: Vec<Recorded>,
    cases: Vec<Case>,
}

/// A file's header and settings; values follow from the names.
#[derive(serde::Deserialize)]
struct Recorded {
    name: String,
    metadata: BTreeMap<String, String>,
    /// The text of the `adapter_config.json` next to it.
    config: Option<String>,
    /// `BF16 2x256`, or `F32 =1.5` for a number.
    tensors: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    prompt: String,
    width: usize,
    height: usize,
    steps: usize,
    seed: u64,
    /// File names with their strengths.
    files: Vec<(String, f32)>,
    /// The merged model's error in bf16.
    bf16_exact_time_relative_l2: BTreeMap<String, f64>,
}

impl Recorded {
    fn file(&self) -> File {
        let tensors = self.tensors.iter().map(|(name, described)| {
            let (dtype, shape) = described.split_once(' ').unwrap();
            let dtype = match dtype {
                "F32" => DType::F32,
                "BF16" => DType::Bf16,
                "F16" => DType::F16,
                other => panic!("{other}"),
            };
            match shape.strip_prefix('=') {
                Some(value) => Tensor::new(name, dtype, &[], &[value.parse().unwrap()]),
                None => {
                    let shape: Vec<usize> = shape.split('x').map(|dim| dim.parse().unwrap()).collect();
                    Tensor::hashed(name, dtype, &shape)
                }
            }
        });
        File { metadata: self.metadata.clone().into_iter().collect(), ..File::of(tensors) }
    }

    /// Writes the file with its settings, and opens it.
    fn open(&self, targets: &LayerTargets) -> Adapter {
        let folder = Scratch::new();
        self.config.iter().for_each(|text| drop(folder.write("adapter_config.json", text)));
        let path = folder.write("adapter_model.safetensors", self.file().bytes());
        let adapter = Adapter::open(&path, targets).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        assert_eq!(adapter.unmatched, Vec::<String>::new(), "{}", self.name);
        adapter
    }
}

impl Case {
    fn job(&self) -> Job {
        Job {
            prompt: self.prompt.clone(),
            size: Pixels::new(self.width, self.height).unwrap(),
            steps: self.steps,
            seeds: vec![self.seed],
            record: true,
            ..small_job()
        }
    }

    fn adapters(&self, opened: &BTreeMap<String, Adapter>) -> Adapters {
        Adapters(self.files.iter().map(|(name, strength)| (opened[name].clone(), *strength)).collect())
    }

    /// Relative errors of the recorded tensors.
    fn errors(&self, record: &Record, goldens: &Goldens) -> BTreeMap<&'static str, f64> {
        // The step is `latents.1 = noise + dt * velocity`.
        let dt = Schedule::new(self.steps, record.latents[0].len() / 128).dt(0);
        let velocity: Vec<f32> = record.latents[1].iter().zip(&record.latents[0]).map(|(a, b)| (a - b) / dt).collect();
        let mut errors = BTreeMap::new();
        errors.insert("velocity", relative_l2(&velocity, &goldens.f32(&format!("{}.velocity", self.name))));
        if self.files.iter().any(|(name, _)| name.starts_with("text")) {
            let cols = record.prompt_embeds.len() / record.token_ids.len();
            let rows: Vec<f32> = record.prompt_embeds.chunks_exact(cols).step_by(4).flatten().copied().collect();
            errors.insert("prompt_embeds", relative_l2(&rows, &goldens.f32(&format!("{}.prompt_embeds", self.name))));
        }
        errors
    }
}

/// The recorded fixture, and its files as adapters of the tiny model.
fn recorded() -> &'static (Fixture, BTreeMap<String, Adapter>) {
    static RECORDED: OnceLock<(Fixture, BTreeMap<String, Adapter>)> = OnceLock::new();
    RECORDED.get_or_init(|| {
        let recorded: Fixture = serde_json::from_str(&std::fs::read_to_string(fixture("lora.json")).unwrap()).unwrap();
        let targets = short_model(Variant::Distilled).layer_targets();
        let opened = recorded.files.iter().map(|file| (file.name.clone(), file.open(&targets))).collect();
        (recorded, opened)
    })
}

fn engine(adapters: Adapters, mode: AdapterMode, precision: Precision) -> Engine {
    let mut model = short_model(Variant::Distilled);
    model.adapters = adapters;
    let options = LoadOptions { precision, adapters: mode, ..LoadOptions::DEFAULT };
    Engine::load(Box::new(cpu()), model, options, &Silent).unwrap()
}

/// The spelling of a LoRA branch does not change it, so a few cases suffice where another test has all: rows in another order, rows of
/// fused layers, both kinds of products, several adapters, and the text encoder.
fn few(case: &&Case) -> bool {
    long() || ["diffusers", "onetrainer", "lokr_both", "text_folder", "two"].contains(&case.name.as_str())
}

fn check(case: &Case, record: &Record, what: &str, allowed: impl Fn(&str) -> f64) {
    let goldens = Goldens::named("lora.safetensors");
    for (output, error) in case.errors(record, &goldens) {
        let allowed = allowed(output);
        println!("{} {what} {output}: {error:.2e}, allowed {allowed:.2e}", case.name);
        assert!(error <= allowed, "{} {what}: {output} differs by {error:.2e}, allowed {allowed:.2e}", case.name);
    }
}

/// Merged weights. In bf16 they are rounded afterwards, like the reference's.
#[test]
fn merged_adapters_equal_diffusers() {
    let (fixture, opened) = recorded();
    for case in fixture.cases.iter().filter(few) {
        for precision in [Precision::F32, Precision::Bf16] {
            let mut engine = engine(case.adapters(opened), AdapterMode::Merge, precision);
            let record = run(&mut engine, &case.job()).unwrap().record.unwrap();
            check(case, &record, &format!("merged in {}", precision.name()), |output| match precision {
                Precision::F32 => 1e-4,
                Precision::Bf16 => 1.2 * case.bf16_exact_time_relative_l2[output],
            });
        }
    }
}

/// Branches, which have additional roundings in bf16.
#[test]
fn adapters_beside_weights_in_bf16_are_within_twice_the_error_of_diffusers_in_bf16() {
    let (fixture, opened) = recorded();
    for case in fixture.cases.iter().filter(few) {
        let mut engine = engine(case.adapters(opened), AdapterMode::Branch, Precision::Bf16);
        let record = run(&mut engine, &case.job()).unwrap().record.unwrap();
        check(case, &record, "beside bf16", |output| 2.0 * case.bf16_exact_time_relative_l2[output]);
    }
}

/// Runs all cases in one engine. Every job names its own adapters, and the previous job's adapters leave no trace.
#[test]
fn jobs_of_one_engine_can_have_any_adapters() {
    let (fixture, opened) = recorded();
    let mut engine = engine(Adapters::default(), AdapterMode::Branch, Precision::F32);
    let job = |adapters: Option<Adapters>| Job { adapters: adapters.map(Arc::new), ..fixture.cases[0].job() };
    let plain = run(&mut engine, &job(None)).unwrap().record.unwrap().latents;
    let mut ran = 0;
    for case in &fixture.cases {
        let record = run(&mut engine, &job(Some(case.adapters(opened)))).unwrap().record.unwrap();
        check(case, &record, "as a job", |_| 1e-4);
        if ["lokr_both", "two"].contains(&case.name.as_str()) {
            // No adapters, or one with a strength of zero, equal the plain model exactly.
            let zero = Adapters(case.adapters(opened).0.into_iter().map(|(adapter, _)| (adapter, 0.0)).collect());
            for none in [Adapters::default(), zero] {
                let latents = run(&mut engine, &job(Some(none))).unwrap().record.unwrap().latents;
                assert!(latents == plain, "after {}", case.name);
            }
            ran += 1;
        }
    }
    assert_eq!(ran, 2);
}

/// The control: wrong strengths, scales and places do not pass.
#[test]
fn mistakes_are_noticed() {
    let ((fixture, opened), goldens) = (recorded(), Goldens::named("lora.safetensors"));
    let named = |name: &str| fixture.cases.iter().find(|case| case.name == name).unwrap();
    let mut engine = engine(Adapters::default(), AdapterMode::Branch, Precision::F32);
    let mut moved = |what: &str, name: &str, change: &dyn Fn(&mut Adapters)| {
        let (case, mut adapters) = (named(name), named(name).adapters(opened));
        change(&mut adapters);
        let job = Job { adapters: Some(Arc::new(adapters)), ..case.job() };
        let error = case.errors(&run(&mut engine, &job).unwrap().record.unwrap(), &goldens)["velocity"];
        println!("{name}, {what}: {error:.2e}");
        assert!(error > 1e-2, "{name}, {what}: {error:.2e}");
    };
    moved("strength", "scaled", &|adapters| adapters.0[0].1 *= 1.1);
    moved("strengths exchanged", "two", &|adapters| {
        let strengths = [adapters.0[1].1, adapters.0[0].1];
        adapters.0.iter_mut().zip(strengths).for_each(|((_, strength), other)| *strength = other);
    });
    moved("no alpha", "kohya", &|adapters| adapters.0[0].0.layers.iter_mut().for_each(|layer| layer.delta.scale = 1.0));
    moved("halves not swapped", "diffusers", &|adapters| {
        adapters.0[0].0.layers.iter_mut().for_each(|layer| layer.target.rows.sort_by_key(|rows| rows.start));
    });
    moved("a layer missing", "bfl", &|adapters| {
        adapters.0[0].0.layers.retain(|layer| layer.target.id != LayerRole::AttentionOut(Stream::Image).of_block(1));
    });
    moved("keys in place of values", "onetrainer", &|adapters| {
        let layers = &mut adapters.0[0].0.layers;
        let at = |end: &str| layers.iter().position(|layer| layer.name.ends_with(&format!("double_blocks.0.img_attn.qkv.{end}")));
        let (keys, values) = (at("1").unwrap(), at("2").unwrap());
        let rows = layers[keys].target.rows.clone();
        layers[keys].target.rows = std::mem::replace(&mut layers[values].target.rows, rows);
    });
}
