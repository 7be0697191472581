//! The pipeline with quantized weights, on any backend, against outputs recorded from the formulas of `tools/goldens/quantized.py`.

use super::super::wrapped;
use super::super::{Case, Goldens, cases, cpu, relative_l2, run, unit_image};
use super::{Content, Form, RECORDED, RecordedCase, RecordedModel, engine, model, weights};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::{Backend, GemmFormats, Op};
use kiln::internals::component::Component;
use kiln::internals::config::{HEAD_DIM, ModelDefaults};
use kiln::internals::dump::Record;
use kiln::internals::model::AttentionFormat;
use kiln::internals::noise::CHANNELS;
use kiln::internals::pipeline::{Engine, Job, LoadOptions};
use kiln::internals::sampler::Schedule;
use kiln::internals::tensor::formats::{e4m3, to_e4m3};
use kiln::internals::tensor::{Precision, Tensor};
use std::f32::consts::LOG2_E;

/// Makes a backend that has these quantized GEMMs and no others.
pub type MakeWith<'a> = &'a dyn Fn(GemmFormats) -> Box<dyn Backend>;

/// Quantized weights with plain inputs only.
pub const PLAIN_INPUTS: GemmFormats = GemmFormats { w8a8: false, w4a4: false, ..GemmFormats::ALL };

/// A case and its recorded values.
pub struct Golden {
    recorded: &'static RecordedCase,
    model: &'static RecordedModel,
    case: Case,
}

impl Golden {
    /// Finds a case by the names of its model and of itself, joined by a dot.
    pub fn named(name: &str) -> Self {
        Self::all().find(|golden| golden.name() == name).unwrap_or_else(|| panic!("no case `{name}`"))
    }

    pub fn all() -> impl Iterator<Item = Self> {
        RECORDED.cases.iter().map(|recorded| Self {
            recorded,
            model: RECORDED.models.iter().find(|model| model.name == recorded.model).unwrap(),
            case: cases().into_iter().find(|case| case.name == recorded.case).unwrap(),
        })
    }

    pub fn name(&self) -> &str {
        &self.recorded.name
    }

    /// An engine of the model, from files of Black Forest Labs and ComfyUI, in one precision. Attention is in bf16, like theirs.
    fn engine(&self, backend: Box<dyn Backend>, precision: Precision) -> Engine {
        self.engine_with(backend, LoadOptions { precision, attention: AttentionFormat::Bf16, ..LoadOptions::DEFAULT })
    }

    fn engine_with(&self, backend: Box<dyn Backend>, options: LoadOptions) -> Engine {
        let transformer = Content::of(&self.model.transformer).file(Form::BFL);
        let text_encoder = self.model.text_encoder.as_deref().map(|file| Content::of(file).file(Form::COMFY));
        let text_encoder = text_encoder.map(|file| weights(Component::TextEncoder, file));
        let model = model(weights(Component::Transformer, transformer), text_encoder, ModelDefaults::klein().max_text_tokens);
        engine(backend, model, options)
    }

    pub fn job(&self) -> Job {
        self.case.job()
    }

    fn run(&self, engine: &mut Engine) -> Record {
        run(engine, &self.job()).unwrap().record.unwrap()
    }

    /// The error of a stage against one of the recorded runs, `wide` or `quantized`.
    pub fn error(&self, record: &Record, truth: &str, stage: &str, goldens: &Goldens) -> f64 {
        // The text encoder is the same in both runs.
        let truth = if stage == "prompt_embeds" { "wide" } else { truth };
        let name = format!("{}.{truth}.{stage}", self.name());
        match stage {
            "prompt_embeds" => {
                let cols = record.prompt_embeds.len() / record.token_ids.len();
                relative_l2(&every(16, cols, &record.prompt_embeds), &goldens.f32(&name))
            }
            "velocity" => {
                // The first step is `latents.1 = noise + dt * velocity`.
                let dt = Schedule::new(record.latents.len() - 1, record.latents[0].len() / CHANNELS).dt(0);
                let steps = record.latents[1].iter().zip(&record.latents[0]);
                let velocity: Vec<f32> = steps.map(|(after, before)| (after - before) / dt).collect();
                self.velocity_error(&velocity, truth, goldens)
            }
            "latents" => relative_l2(&every(3, CHANNELS, record.latents.last().unwrap()), &goldens.f32(&name)),
            "image" => relative_l2(&pixels(record), &goldens.image(&name)),
            _ => panic!("no stage `{stage}`"),
        }
    }

    /// The error of the first step's velocity against one of the recorded runs.
    pub fn velocity_error(&self, velocity: &[f32], truth: &str, goldens: &Goldens) -> f64 {
        relative_l2(&every(3, CHANNELS, velocity), &goldens.f32(&format!("{}.{truth}.velocity", self.name())))
    }

    /// The stages that have recorded outputs.
    fn stages(&self) -> &'static [&'static str] {
        let all = &["prompt_embeds", "velocity", "latents", "image"];
        if self.model.text_encoder.is_some() { all } else { &all[1..] }
    }

    /// The error of ComfyUI's arithmetic in bf16: the smaller one of rounded and exact timesteps.
    pub fn bf16_error(&self, kind: &str, stage: &str) -> f64 {
        let key = format!("{kind}.{stage}");
        self.recorded.bf16_relative_l2[&key].min(self.recorded.bf16_exact_time_relative_l2[&key])
    }

    /// Checks a run in bf16 against the error of ComfyUI's arithmetic. `kind` names that arithmetic, and with it the run that both are
    /// measured against.
    fn check_bf16(&self, record: &Record, kind: &str, goldens: &Goldens) {
        let truth = if kind == "quantized" { kind } else { "wide" };
        for stage in self.stages() {
            let error = self.error(record, truth, stage, goldens);
            let theirs = self.bf16_error(kind, stage);
            println!("{} bf16 {kind} {stage}: {error:.2e}, ComfyUI's arithmetic {theirs:.2e}", self.name());
            assert!(error <= 1.2 * theirs, "{}: {kind} {stage} differs by {error:.2e}, theirs by {theirs:.2e}", self.name());
        }
    }
}

/// Every `step`-th row of a matrix.
fn every(step: usize, cols: usize, values: &[f32]) -> Vec<f32> {
    values.chunks_exact(cols).step_by(step).flatten().copied().collect()
}

/// The rows of the image that are recorded.
fn pixels(record: &Record) -> Vec<f32> {
    every(7, 3 * record.width, &unit_image(&record.image))
}

/// Checks every stage in f32, where weights are expanded and activations are not quantized.
pub fn f32_equals_the_expanded_model(make: MakeWith<'_>) {
    let goldens = Goldens::named("quantized.safetensors");
    // Models whose activations are not quantized duplicate others here.
    for golden in Golden::all().filter(|golden| golden.model.quantizes_activations) {
        let record = golden.run(&mut golden.engine(make(GemmFormats::ALL), Precision::F32));
        for stage in golden.stages() {
            let error = golden.error(&record, "wide", stage, &goldens);
            println!("{} f32 {stage}: {error:.2e}", golden.name());
            assert!(error < 1e-4, "{}: {stage} differs by {error:.2e}", golden.name());
        }
        let recorded = goldens.image(&format!("{}.wide.image", golden.name()));
        let worst = pixels(&record).iter().zip(&recorded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 1.0 / 255.0, "{}: a pixel differs by {worst}", golden.name());
    }
}

/// Checks every stage in bf16, with the GEMMs that the files are made for. The error against both recorded runs is at most 1.2 times the
/// error of ComfyUI's arithmetic in bf16.
pub fn bf16_is_as_close_as_comfyui(make: MakeWith<'_>) {
    let goldens = Goldens::named("quantized.safetensors");
    for golden in Golden::all() {
        let formats = if golden.model.quantizes_activations { GemmFormats::ALL } else { PLAIN_INPUTS };
        let record = golden.run(&mut golden.engine(make(formats), Precision::Bf16));
        golden.check_bf16(&record, "wide", &goldens);
        if golden.model.quantizes_activations {
            golden.check_bf16(&record, "quantized", &goldens);
            // The error exceeds what expanded weights alone would give, so the inputs are really quantized.
            let error = golden.error(&record, "wide", "velocity", &goldens);
            assert!(error > 2.0 * golden.bf16_error("expanded", "velocity"), "{}: {error:.2e}", golden.name());
        }
    }
}

/// A CPU backend that rounds the transformer's queries and keys to e4m3, however they are stored.
fn rounding_heads() -> Box<dyn Backend> {
    let whole = LOG2_E / (HEAD_DIM as f32).sqrt();
    let round = |be: &mut Cpu, tensor: Tensor, factor: f32| {
        let mut values = vec![0.0; tensor.len()];
        be.read(tensor, &mut values)?;
        values.iter_mut().for_each(|v| *v = e4m3(to_e4m3(*v * factor)));
        be.write(tensor, &values)
    };
    Box::new(wrapped::after_op(cpu(), move |_, op, be| {
        let Op::Qkv(streams) = op else { return Ok(()) };
        // Queries carry the whole factor of the scores here. e4m3 divides it between queries and keys.
        for s in streams.iter().filter(|s| s.q_scale == whole) {
            s.q.map_or(Ok(()), |q| round(be, q, whole.sqrt() / whole))?;
            round(be, s.k, whole.sqrt())?;
        }
        Ok(())
    }))
}

/// By default queries and keys are e4m3 as well; ComfyUI's are not. Their own error is measured by rounding them in the expanded f32 model,
/// where nothing else is rounded. It is independent of the error of ComfyUI's arithmetic, so their squares add up.
pub fn fp8_attention_adds_its_own_error(make: MakeWith<'_>) {
    let (goldens, golden) = (Goldens::named("quantized.safetensors"), Golden::named("fp8.odd"));
    let record = golden.run(&mut golden.engine_with(make(GemmFormats::ALL), LoadOptions::DEFAULT));
    let rounded = golden.run(&mut golden.engine(rounding_heads(), Precision::F32));
    for stage in golden.stages() {
        let [error, own] = [&record, &rounded].map(|record| golden.error(record, "wide", stage, &goldens));
        let theirs = golden.bf16_error("wide", stage);
        let both = theirs.hypot(own);
        println!("{} {stage}: {error:.2e}, of ComfyUI {theirs:.2e}, of e4m3 heads {own:.2e}, both {both:.2e}", golden.name());
        assert!(error <= 1.2 * both, "{}: {stage} differs by {error:.2e}, expected are {both:.2e}", golden.name());
        assert!(error > theirs, "{}: {stage} differs by {error:.2e} only, with bf16 heads by {theirs:.2e}", golden.name());
    }
}

/// Checks a backend without these GEMMs, where weights are expanded to bf16 and activations are not quantized.
pub fn expanded_weights_are_as_close_as_comfyui(make: MakeWith<'_>) {
    let goldens = Goldens::named("quantized.safetensors");
    // These two have all formats. The mixed model has the transformer of the FP8 model.
    for golden in ["nvfp4.square", "mixed.square"].map(Golden::named) {
        let record = golden.run(&mut golden.engine(make(GemmFormats::NONE), Precision::Bf16));
        golden.check_bf16(&record, "expanded", &goldens);
    }
}
