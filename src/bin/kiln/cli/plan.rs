//! `kiln plan`: what an image would cost, estimated without reading weights.

use super::adapters::{AdapterFiles, applied, descriptions};
use super::args::PlanArgs;
use super::edit::Facts;
use super::formats::{format_lines, heads_reason, input_reason, kind_name, words};
use super::report::{flag, ignored_guidance, warn_of_accumulation, warn_of_nvfp4_math};
use super::request::ImageRequest;
use super::settings::{ModelProfile, Settings};
use super::stdout::{json_line, print};
use super::{Process, Subcommand};
use crate::terminal::{Terminal, Verbosity};
use kiln::device::{CAPABILITY, devices, fp8_accumulate, gemm_formats};
use kiln::error::{Error, Remedy, Result};
use kiln::locate::{Environment, locate};
use kiln::lora::Adapters;
use kiln::metadata::AdapterMetadata;
use kiln::predict::{GpuSpec, Prediction, Predictor};
use kiln::progress::{Phase, Progress};
use kiln::text::shown_line;
use kiln::{
    AttentionFormatCount, Configs, Estimate, EstimateRequest, GuidedBy, Job, KindFormat, LoadOptions, MODELS, ModelDefaults,
    ModelSpec, OpenModel, Precision, Variant, display_name, estimate,
};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

/// The estimate of a job and the settings that it is for.
#[derive(Serialize)]
struct Report {
    model: String,
    variant: String,
    precision: &'static str,
    /// The GPU that the plan is for.
    gpu: String,
    width: usize,
    height: usize,
    steps: usize,
    /// Steps that run: fewer with a strength below 1.
    steps_run: usize,
    strength: Option<f64>,
    /// Tokens that are repainted, if there is a mask or a frame.
    repainted: Option<usize>,
    /// The edit as a line of the table.
    #[serde(skip)]
    init_line: Option<String>,
    guidance: Option<f32>,
    lora: Vec<AdapterMetadata>,
    /// The adapters as lines of the table.
    #[serde(skip)]
    lora_lines: Vec<String>,
    /// Whether classifier-free guidance runs each step twice.
    #[serde(skip)]
    guided: bool,
    /// What the guidance scale does.
    #[serde(skip)]
    guided_by: Option<GuidedBy>,
    tokens: TokenReport,
    mu: f64,
    sigmas: Vec<f32>,
    stages: Vec<StageReport>,
    /// Predicted, never measured; empty if nothing predicts them.
    predicted: Vec<PredictedStage>,
    /// The prediction as a line of the table.
    #[serde(skip)]
    predicted_line: Option<String>,
    ops: u64,
    weight_bytes: u64,
    low_memory_weight_bytes: u64,
    working_bytes: u64,
    /// Bytes of the token embeddings, which stay in host memory.
    token_embedding_bytes: u64,
    formats: Vec<FormatReport>,
    attention: Vec<AttentionReport>,
    /// The formats as lines of the table.
    #[serde(skip)]
    format_lines: Vec<String>,
}

#[derive(Serialize)]
struct TokenReport {
    text: usize,
    canvas: usize,
    references: Vec<usize>,
    total: usize,
}

#[derive(Serialize)]
struct StageReport {
    stage: &'static str,
    flop: u64,
}

/// The layers of one kind that have one format.
#[derive(Serialize)]
struct FormatReport {
    part: String,
    kind: String,
    layers: usize,
    stored: Vec<&'static str>,
    held: Vec<&'static str>,
    input: &'static str,
    accumulation: Option<&'static str>,
    reason: Option<&'static str>,
    stored_bytes: u64,
    held_bytes: u64,
}

impl FormatReport {
    fn new(format: &KindFormat) -> Self {
        let KindFormat { kind, layers, input, why, sums, stored_bytes, held_bytes, .. } = *format;
        let (blocks, name) = kind_name(kind);
        Self {
            part: kind.component().to_string(),
            kind: format!("{blocks} {name}").trim_start().into(),
            layers,
            stored: words(format.types.iter().map(|(stored, _)| *stored)),
            held: words(format.types.iter().map(|(_, held)| *held)),
            input: input.label(),
            accumulation: sums,
            reason: input_reason(why),
            stored_bytes,
            held_bytes,
        }
    }
}

/// The blocks whose attention has one format.
#[derive(Serialize)]
struct AttentionReport {
    blocks: usize,
    heads: &'static str,
    values: &'static str,
    reason: Option<&'static str>,
}

impl AttentionReport {
    fn new(format: &AttentionFormatCount) -> Self {
        let AttentionFormatCount { blocks, heads, values, why } = *format;
        Self { blocks, heads: heads.label(), values: values.label(), reason: heads_reason(why) }
    }
}

impl Subcommand for PlanArgs {
    fn run(self: Box<Self>, Process { environment, out, .. }: Process<'_>) -> Result<()> {
        plan(*self, environment, &Terminal::new(Verbosity::Normal), out)
    }
}

/// Writes the plan to `out`, and warnings about the model or the flags to the terminal.
pub fn plan(args: PlanArgs, environment: Environment, terminal: &Terminal, out: &mut dyn Write) -> Result<()> {
    let model = PlannedModel::new(&args, environment)?;
    args.image.check(flag)?;
    let request = ImageRequest::new(args.image, &model.defaults)?;
    let options = request.load_options(false, &args.quantized);
    let options = LoadOptions { adapters: args.lora.lora_mode.into(), ..options };
    let settings = Settings::resolve(request, &model.profile(options));
    model.warnings.iter().for_each(|warning| terminal.warn(warning));
    ignored_guidance(settings.guidance, settings.variant, flag).iter().for_each(|warning| terminal.warn(warning));
    let gpu = PlannedGpu::new(args.gpu.as_ref(), options.precision);
    let mut estimate = model.estimate(options, &gpu, &settings.job)?;
    let accumulate = args.quantized.fp8_accumulate.into();
    estimate.formats.accumulate = Some(fp8_accumulate(gpu.capability, accumulate));
    warn_of_accumulation(accumulate, &estimate.formats, terminal);
    warn_of_nvfp4_math(options.nvfp4_math, &estimate.formats, terminal);
    let lora_lines = descriptions(model.adapters(), &estimate.formats).into_iter().map(|(line, _)| line).collect();
    let report = Report { lora_lines, ..Report::new(settings, estimate, gpu) };
    let text = if args.json { json_line(&report)? } else { report.table().into_bytes() };
    print(out, &text)
}

/// The facts about a model that are known without reading its weights.
struct PlannedModel {
    /// Display name.
    name: String,
    variant: Variant,
    defaults: ModelDefaults,
    warnings: Vec<String>,
    source: Source,
}

/// The source of a model's sizes.
enum Source {
    /// The headers of its files.
    Files(Box<OpenModel>),
    /// The configuration of a published model, which needs no files. Adapters are checked against it.
    Published(&'static Configs, Adapters),
}

impl PlannedModel {
    /// Opens the files of the named model, or looks up a published model. The default is the first published model. Other commands take
    /// such a name as a path.
    fn new(args: &PlanArgs, environment: Environment) -> Result<Self> {
        let m = &args.model;
        let adapters = AdapterFiles::locate(&args.lora, &environment)?;
        let has_parts = [&m.transformer, &m.text_encoder, &m.vae, &m.tokenizer].iter().any(|part| part.is_some());
        let variant = m.variant.map(Variant::from);
        let name = m.model.as_deref().and_then(Path::to_str);
        let published = name.and_then(ModelSpec::named);
        if let Some(spec) = published.filter(|_| has_parts) {
            return Err(Error::usage(format!("the model `{}` has no parts to replace", spec.name), Remedy::NameModel));
        }
        if published.is_none() && (m.is_named(&environment) || has_parts) {
            let found = locate(&m.request(environment)).map_err(|error| match error.remedy() {
                Some(Remedy::CompleteFolder) if name.is_some_and(|name| !Path::new(name).exists()) => {
                    error.with_hint(names_hint())
                }
                _ => error,
            })?;
            let mut model = OpenModel::open(&found, variant)?;
            model.adapters = adapters.open(|| model.layer_targets())?;
            return Ok(Self {
                name: model.name.clone(),
                variant: model.variant,
                defaults: model.defaults.clone(),
                warnings: model.warnings.clone(),
                source: Source::Files(Box::new(model)),
            });
        }
        let ModelSpec { size, variant: usual, .. } = published.unwrap_or(&MODELS[0]);
        let variant = variant.unwrap_or(*usual);
        variant.check(&size.configs.transformer)?;
        let adapters = adapters.open(|| size.configs.layer_targets())?;
        Ok(Self {
            name: display_name(&size.configs.transformer, variant),
            variant,
            defaults: ModelDefaults::klein(),
            warnings: Vec::new(),
            source: Source::Published(&size.configs, adapters),
        })
    }

    /// The adapters of the model.
    fn adapters(&self) -> &Adapters {
        match &self.source {
            Source::Files(model) => &model.adapters,
            Source::Published(_, adapters) => adapters,
        }
    }

    /// The properties of the model that the settings of a job depend on.
    fn profile(&self, options: LoadOptions) -> ModelProfile {
        ModelProfile {
            name: self.name.clone(),
            variant: self.variant,
            defaults: self.defaults.clone(),
            precision: options.precision,
            quantized_flags: Vec::new(),
            adapters: applied(self.adapters()),
            adapter_mode: options.adapters,
        }
    }

    /// Estimates the cost of a job on a GPU. With files the dtype of the stored weights is known, which f32 precision keeps;
    /// klein as published is taken to be bfloat16.
    fn estimate(&self, options: LoadOptions, gpu: &PlannedGpu, job: &Job) -> Result<Estimate> {
        let (gemms, time) = (gemm_formats(gpu.capability), gpu.predictor.as_ref().map(Predictor::op_time));
        let request = match &self.source {
            Source::Files(model) => model.estimate_request(options, gemms),
            Source::Published(configs, adapters) => {
                EstimateRequest { adapters, ..EstimateRequest::new(configs, self.variant, options, gemms) }
            }
        };
        estimate(EstimateRequest { time, ..request }, job)
    }
}

/// The hint for a `--model` that is no folder.
fn names_hint() -> String {
    let names: Vec<String> = MODELS.iter().map(|model| format!("`{}`", model.name)).collect();
    format!("the names of published models are {}; anything else is a folder", names.join(", "))
}

/// The GPU that a plan is for.
struct PlannedGpu {
    /// The GPU, for display.
    name: String,
    capability: (u32, u32),
    /// The predictor of its times, if there is one.
    predictor: Option<Predictor>,
}

impl PlannedGpu {
    /// The requested GPU, else the first one here, else the lowest compute capability that kiln runs on.
    fn new(gpu: Option<&GpuSpec>, precision: Precision) -> Self {
        let here = || devices().ok().and_then(|devices| devices.into_iter().next());
        let (name, capability, gpu) = match (gpu, gpu.map_or_else(here, |_| None)) {
            (Some(gpu), _) => (gpu.name.to_string(), gpu.capability, Some(gpu)),
            (None, Some(gpu)) => (format!("GPU {} ({})", gpu.index, gpu.name), gpu.capability, GpuSpec::named(&gpu.name)),
            (None, None) => {
                let (major, minor) = CAPABILITY;
                let what = format!("none here, so any of compute capability {major}.{minor}; --gpu names another");
                (what, CAPABILITY, None)
            }
        };
        // In f32 nothing runs on tensor cores.
        let gpu = gpu.filter(|_| precision == Precision::Bf16);
        Self { name, capability, predictor: gpu.and_then(|gpu| Predictor::new(gpu, gpu.arch())) }
    }
}

/// The predicted time of a stage.
#[derive(Serialize)]
struct PredictedStage {
    stage: &'static str,
    seconds: f64,
}

/// The predicted times in one line, if there are any.
fn predicted_line(prediction: &Prediction) -> Option<String> {
    let step = prediction.step()?;
    let stages = [
        ("encoding text", prediction.stage(Phase::Encode)),
        ("a step", Some(step)),
        ("decoding", prediction.stage(Phase::Decode)),
    ];
    let ms = stages.iter().filter_map(|(name, seconds)| Some(format!("{name} {:.1} ms", 1e3 * (*seconds)?)));
    Some(format!("{}; not measured", ms.collect::<Vec<_>>().join(", ")))
}

impl Report {
    fn new(settings: Settings, e: Estimate, gpu: PlannedGpu) -> Self {
        let Settings { job, model, variant, precision, guidance, guided, adapters, edit, .. } = settings;
        let predicted_line = predicted_line(&Prediction::of(&e));
        let total = e.text_tokens + e.canvas_tokens + e.reference_tokens.iter().sum::<usize>();
        Self {
            model,
            variant: variant.to_string(),
            precision: precision.name(),
            gpu: gpu.name,
            width: job.size.width(),
            height: job.size.height(),
            steps: job.steps,
            steps_run: e.sigmas.len(),
            strength: edit.as_ref().map(|edit| edit.strength().share()),
            repainted: edit.as_ref().filter(|edit| edit.is_masked()).map(Facts::tokens_repainted),
            init_line: edit.as_ref().and_then(|edit| edit.notes(&job).into_iter().next()),
            guidance: guidance.chosen,
            lora: adapters,
            lora_lines: Vec::new(),
            guided,
            guided_by: variant.spec().guided_by,
            tokens: TokenReport { text: e.text_tokens, canvas: e.canvas_tokens, references: e.reference_tokens, total },
            mu: e.mu,
            sigmas: e.sigmas,
            predicted: e.seconds.iter().map(|&(phase, seconds)| PredictedStage { stage: phase.name(), seconds }).collect(),
            predicted_line,
            stages: e.stages.iter().map(|(phase, flop)| StageReport { stage: phase.name(), flop: *flop }).collect(),
            ops: e.ops,
            weight_bytes: e.weight_bytes,
            low_memory_weight_bytes: e.low_memory_weight_bytes,
            working_bytes: e.arena_bytes,
            token_embedding_bytes: e.table_bytes,
            formats: e.formats.by_kind().iter().map(FormatReport::new).collect(),
            attention: e.formats.attention_by_format().iter().map(AttentionReport::new).collect(),
            format_lines: format_lines(&e.formats),
        }
    }

    fn table(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<20} {}", shown_line(&value));
        };
        row("model", format!("{}, {}", self.model, self.precision));
        for (i, line) in self.format_lines.iter().enumerate() {
            row(if i == 0 { "formats" } else { "" }, line.clone());
        }
        for (i, line) in self.lora_lines.iter().enumerate() {
            row(if i == 0 { "adapters" } else { "" }, line.clone());
        }
        row("gpu", self.gpu.clone());
        row("image", format!("{}x{}, {} steps", self.width, self.height, self.steps));
        if let Some(line) = &self.init_line {
            row("init", line.clone());
        }
        if let Some(guidance) = self.guidance {
            let passes = match self.guided {
                true => "two passes per step",
                false if self.guided_by == Some(GuidedBy::Input) => "an input of the model",
                false => "one pass per step; a second one needs a scale above 1",
            };
            row("guidance", format!("{guidance}, {passes}"));
        }
        let references = &self.tokens.references;
        let mut parts = vec![format!("{} text", self.tokens.text), format!("{} canvas", self.tokens.canvas)];
        parts.extend(references.iter().enumerate().map(|(j, n)| format!("{n} reference {}", j + 1)));
        row("tokens", format!("{} = {}", self.tokens.total, parts.join(" + ")));
        let levels: Vec<String> = self.sigmas.iter().take(8).map(|s| format!("{:.3}", 1000.0 * s)).collect();
        let more = if self.sigmas.len() > 8 { ", ..." } else { "" };
        row("schedule", format!("mu {:.6}, timesteps {}{more}", self.mu, levels.join(", ")));
        let total: u64 = self.stages.iter().map(|s| s.flop).sum();
        for stage in &self.stages {
            row(stage.stage, format!("{:.3} TFLOP", stage.flop as f64 / 1e12));
        }
        row("in all", format!("{:.3} TFLOP in {} ops", total as f64 / 1e12, self.ops));
        if let Some(line) = &self.predicted_line {
            row("predicted", line.clone());
        }
        row(
            "weights",
            format!("{:.2} GiB, {:.2} GiB with --low-memory", gib(self.weight_bytes), gib(self.low_memory_weight_bytes)),
        );
        row("working memory", format!("{:.2} GiB", gib(self.working_bytes)));
        row("token embeddings", format!("{:.2} GiB, in host memory", gib(self.token_embedding_bytes)));
        text
    }
}
