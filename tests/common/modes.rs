//! Every mode of the model, on any backend, against outputs recorded from diffusers: reference images, negative prompts, the KV cache of
//! references, the small decoder, the guidance embedding.

pub use super::fnv::fnv1a;
use super::random::splitmix;
use super::{Goldens, Make, fixture, opened, relative_l2, run, small_job, tiny_weights, unit_image};
use kiln::internals::backend::{Backend, StepKey};
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, HEAD_DIM, ModelDefaults, TransformerConfig, VaeConfig, Variant};
use kiln::internals::dump::Record;
use kiln::internals::model::{ContextIn, Loader, ReferenceTokens, StepInput, Transformer};
use kiln::internals::model::{transformer_manifest, vae_manifest};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, ReferenceInput};
use kiln::internals::sampler::{Schedule, timestep_embedding};
use kiln::internals::sequence::{Grid, Pixels, RopeSpec, SequenceLayout};
use kiln::internals::tensor::{Arena, DType, Precision, Region};
use kiln::internals::tiny;
use kiln::progress::Silent;
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
pub struct Modes {
    pub images: Vec<Source>,
    pub cases: Vec<Case>,
    pub guidance_embed: GuidanceCase,
    pub layout: LayoutCase,
}

/// A reference image before it is cropped.
#[derive(serde::Deserialize)]
pub struct Source {
    width: usize,
    height: usize,
    fnv1a: String,
}

#[derive(serde::Deserialize)]
pub struct Case {
    name: String,
    prompt: String,
    width: usize,
    height: usize,
    steps: usize,
    seed: u64,
    distilled: bool,
    guidance: f32,
    references: Vec<usize>,
    negative: Option<String>,
    pub kv: bool,
    small_decoder: bool,
    bf16_relative_l2: BTreeMap<String, f64>,
    bf16_exact_time_relative_l2: BTreeMap<String, f64>,
}

#[derive(serde::Deserialize)]
pub struct GuidanceCase {
    width: usize,
    height: usize,
    time: f32,
    guidance: Vec<f32>,
    bf16_exact_time_relative_l2: BTreeMap<String, f64>,
}

#[derive(serde::Deserialize)]
pub struct LayoutCase {
    pub width: usize,
    pub height: usize,
    pub prepared: Vec<[usize; 2]>,
    pub ids_fnv1a: BTreeMap<String, BTreeMap<String, String>>,
}

pub fn modes() -> Modes {
    serde_json::from_str(&std::fs::read_to_string(fixture("modes.json")).unwrap()).unwrap()
}

/// Byte `index` of the recorded input called `name`.
pub fn hashed(name: &str, index: usize) -> u8 {
    (splitmix(fnv1a(name.bytes()), index as u64) >> 56) as u8
}

/// Image `i`, cropped around its center to multiples of 16.
pub fn reference(i: usize, source: &Source) -> ReferenceInput {
    let (w, h) = (source.width, source.height);
    let all = (0..h).flat_map(|y| (0..w).flat_map(move |x| (0..3).map(move |c| (y, x, c))));
    assert_eq!(format!("{:016x}", fnv1a(all.map(|(y, x, c)| test_pixel(i, w, y, x, c)))), source.fnv1a, "image {i}");
    test_image(i, w, h)
}

/// A value of image `i`, which has blocks of 8x8 pixels of one color each.
fn test_pixel(i: usize, width: usize, y: usize, x: usize, c: usize) -> u8 {
    hashed(&format!("image.{i}"), ((y / 8) * width.div_ceil(8) + x / 8) * 3 + c)
}

/// Image `i` in this size, cropped around its center to multiples of 16.
pub fn test_image(i: usize, w: usize, h: usize) -> ReferenceInput {
    let grid = Grid { width: w / 16, height: h / 16 };
    let (left, top) = ((w % 16) / 2, (h % 16) / 2);
    let mut pixels = Vec::new();
    for y in 0..16 * grid.height {
        for x in 0..16 * grid.width {
            pixels.extend((0..3).map(|c| 2.0 * (f32::from(test_pixel(i, w, top + y, left + x, c)) / 255.0) - 1.0));
        }
    }
    ReferenceInput { grid, pixels: pixels.into() }
}

impl Case {
    pub fn job(&self, images: &[Source]) -> Job {
        Job {
            prompt: self.prompt.clone(),
            size: Pixels::new(self.width, self.height).unwrap(),
            steps: self.steps,
            negative: self.negative.clone().unwrap_or_default(),
            references: self.references.iter().map(|&i| reference(i, &images[i])).collect(),
            guidance: self.guidance,
            seeds: vec![self.seed],
            record: true,
            ..small_job()
        }
    }

    pub fn engine(&self, backend: Box<dyn Backend>, precision: Precision) -> Engine {
        let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
        let mut weights = tiny_weights(&model);
        if self.small_decoder {
            let config = VaeConfig { decoder: [32, 64, 96, 96], ..Configs::TINY.vae };
            weights.vae = tiny::weights_of(Component::Vae, &vae_manifest(&config), DType::Bf16).unwrap();
        }
        let variant = match (self.kv, self.distilled) {
            (true, _) => Variant::Kv,
            (false, true) => Variant::Distilled,
            (false, false) => Variant::Base,
        };
        let model = opened(weights, variant, ModelDefaults::klein());
        Engine::load(backend, model, LoadOptions { precision, references: true, ..LoadOptions::DEFAULT }, &Silent).unwrap()
    }

    /// The relative error of every recorded tensor, by its name in the record.
    fn errors(&self, record: &Record, goldens: &Goldens) -> BTreeMap<String, f64> {
        let mut errors = BTreeMap::new();
        let mut compare = |name: &str, got: &[f32], want: &[f32]| {
            errors.insert(name.to_string(), relative_l2(got, want));
        };
        let golden = |name: &str| goldens.f32(&format!("{}.{name}", self.name));
        for (j, tokens) in record.references.iter().enumerate() {
            let name = format!("reference.{}.tokens", j + 1);
            compare(&name, tokens, &golden(&name));
        }
        if self.negative.is_some() {
            let embeds = record.negative_prompt_embeds.as_ref().unwrap();
            let cols = embeds.len() / record.token_ids.len();
            let rows: Vec<f32> = embeds.chunks_exact(cols).step_by(16).flatten().copied().collect();
            compare("negative_prompt_embeds", &rows, &golden("negative_prompt_embeds"));
        }
        // A step is `latents.(i+1) = latents.i + dt * velocity`.
        let schedule = Schedule::new(self.steps, record.latents[0].len() / 128);
        let velocity = |i: usize| -> Vec<f32> {
            record.latents[i + 1].iter().zip(&record.latents[i]).map(|(a, b)| (a - b) / schedule.dt(i)).collect()
        };
        compare("velocity", &velocity(0), &golden("velocity"));
        if self.kv {
            compare("velocity_cached", &velocity(1), &golden("velocity_cached"));
        }
        compare("latents", record.latents.last().unwrap(), &golden("latents"));
        compare("image", &unit_image(&record.image), &goldens.image(&format!("{}.image", self.name)));
        errors
    }
}

/// Compares every mode in one precision; `allowed` is the error limit of a tensor.
fn compare(make: Make<'_>, precision: Precision, allowed: impl Fn(&Case, &str) -> f64) {
    let (modes, goldens) = (modes(), Goldens::named("modes.safetensors"));
    for case in &modes.cases {
        let job = case.job(&modes.images);
        let record = run(&mut case.engine(make(), precision), &job).unwrap().record.unwrap();
        for (name, error) in case.errors(&record, &goldens) {
            let allowed = allowed(case, &name);
            println!("{} {} {name}: {error:.2e}, allowed {allowed:.2e}", case.name, precision.name());
            assert!(error <= allowed, "{}: {name} differs by {error:.2e}, allowed {allowed:.2e}", case.name);
        }
        if precision == Precision::F32 {
            let image = goldens.image(&format!("{}.image", case.name));
            let worst = unit_image(&record.image).iter().zip(&image).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1.0 / 255.0, "{}: a pixel differs by {worst}", case.name);
        }
    }
}

/// Checks every mode in f32 against the reference in f32.
pub fn every_mode_equals_diffusers(make: Make<'_>) {
    compare(make, Precision::F32, |_, _| 1e-4);
}

/// Checks every mode in bf16, with the limit of `goldens.rs`.
pub fn every_mode_in_bf16_is_as_close_as_diffusers_in_bf16(make: Make<'_>) {
    // The limit is the smaller of two errors. One has exact timesteps, which the reference rounds to bf16 and kiln does not.
    compare(make, Precision::Bf16, |case, name| 1.2 * case.bf16_exact_time_relative_l2[name].min(case.bf16_relative_l2[name]));
}

/// Checks a transformer that embeds the guidance scale.
pub fn guidance_as_an_input_equals_diffusers(make: Make<'_>) {
    let (case, goldens) = (modes().guidance_embed, Goldens::named("modes.safetensors"));
    let config = TransformerConfig { guidance_embed: true, ..Configs::TINY.transformer };
    let weights = tiny::weights_of(Component::Transformer, &transformer_manifest(&config), DType::Bf16).unwrap();
    assert_eq!(TransformerConfig::detect(&weights, None).unwrap(), config);
    let size = Pixels::new(case.width, case.height).unwrap();
    let values = |name: &str, count: usize| -> Vec<f32> {
        (0..count).map(|i| (2.0 * f32::from(hashed(name, i)) - 255.0) / 256.0).collect()
    };
    let features = values("guidance.features", 512 * config.context);
    let noise = values("guidance.noise", size.grid().tokens() * config.channels);
    for precision in [Precision::F32, Precision::Bf16] {
        for (i, &guidance) in case.guidance.iter().enumerate() {
            let inputs = PredictionInputs { size, features: &features, noise: &noise, time: case.time, guidance };
            let velocity = predict(make().as_mut(), &weights, &config, precision, inputs);
            let error = relative_l2(&velocity, &goldens.f32(&format!("guidance_embed.velocity.{i}")));
            println!("guidance {guidance} {}: {error:.2e}", precision.name());
            let allowed = match precision {
                Precision::F32 => 1e-4,
                Precision::Bf16 => 1.2 * case.bf16_exact_time_relative_l2[&format!("velocity.{i}")],
            };
            assert!(error <= allowed, "guidance {guidance} differs by {error:.2e}");
        }
    }
}

/// The inputs of one velocity prediction.
#[derive(Clone, Copy)]
pub struct PredictionInputs<'a> {
    pub size: Pixels,
    /// Prompt embeddings, one row per token.
    pub features: &'a [f32],
    pub noise: &'a [f32],
    pub time: f32,
    pub guidance: f32,
}

/// Runs one prediction of a transformer alone.
pub fn predict(
    be: &mut dyn Backend,
    weights: &kiln::internals::checkpoint::Weights,
    config: &TransformerConfig,
    precision: Precision,
    inputs: PredictionInputs<'_>,
) -> Vec<f32> {
    let (mut region, mut ws) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
    be.reserve(Region::Weights, 64 << 20).unwrap();
    let mut ignore = |_| ();
    let mut loader = Loader::new(be, &mut region, Some(weights), precision, &mut ignore);
    let context_in = ContextIn::load(&mut loader, config).unwrap();
    let transformer = Transformer::load(&mut loader, config).unwrap();
    be.reserve(Region::Arena, 64 << 20).unwrap();
    let text = inputs.features.len() / config.context;
    let plan = SequenceLayout::new(text, inputs.size.grid(), &[]).unwrap();
    let tokens = plan.canvas().len();
    let features = ws.alloc(text, config.context, precision.activations()).unwrap();
    be.write(features, inputs.features).unwrap();
    let context = context_in.slot(&mut ws, text).unwrap();
    context_in.run(be, context, features).unwrap();
    let rope = ws.alloc(plan.tokens(), HEAD_DIM, DType::F32).unwrap();
    be.write(rope, &plan.rope_table(&RopeSpec::KLEIN)).unwrap();
    let table = transformer.modulations(be, &mut ws, 1, &timestep_embedding(inputs.time), inputs.guidance).unwrap();
    let modulation = transformer.modulation_slot(&mut ws).unwrap();
    transformer.select(be, modulation, table, 0).unwrap();
    let latents = ws.alloc(tokens, config.channels, DType::F32).unwrap();
    be.write(latents, inputs.noise).unwrap();
    let velocity = ws.alloc(tokens, config.channels, DType::F32).unwrap();
    let references = ReferenceTokens::InSequence(&[]);
    let input = StepInput { plan: &plan, rope, context, latents, references, modulation, velocity };
    transformer.step(be, &mut ws, StepKey("prompt"), input).unwrap();
    let mut out = vec![0.0; velocity.len()];
    be.read(velocity, &mut out).unwrap();
    out
}
