//! Files with a deliberate mistake, which the recorded outputs must notice. `linears.rs` tests wrong input scales, because
//! only single layers show them.

use super::linears::other_stream;
use common::modes::{PredictionInputs, predict};
use common::quantized::goldens::{Golden, PLAIN_INPUTS};
use common::quantized::{Change, Content, Form, Layer, engine, model, weights};
use common::wrapped;
use common::{Goldens, cpu, run, small_job};
use kiln::internals::backend::GemmFormats;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::{ModelDefaults, TransformerConfig};
use kiln::internals::dump::Record;
use kiln::internals::pipeline::{Job, LoadOptions};
use kiln::internals::tensor::{Nvfp4Layout, Precision};
use std::sync::LazyLock;

/// A run of the first step. All transformers of a case use its prompt embeddings and noise.
static RUN: LazyLock<Record> = LazyLock::new(|| {
    let model = model(transformer(Content::of("nvfp4"), Form::BFL), None, ModelDefaults::klein().max_text_tokens);
    let job = Job { steps: 1, ..Golden::named("nvfp4.square").job() };
    run(&mut engine(Box::new(cpu()), model, LoadOptions::DEFAULT), &job).unwrap().record.unwrap()
});

/// How to run a model, and which recorded errors are its limits.
#[derive(Clone, Copy)]
struct Rule {
    case: &'static str,
    gemms: GemmFormats,
    kind: &'static str,
}

impl Rule {
    /// The error of the first step's velocity with these transformer weights, from the inputs of a whole run.
    fn error(self, golden: &Golden, own: &Weights) -> f64 {
        let config = TransformerConfig::detect(own, None).unwrap();
        let (size, features, noise) = (golden.job().size, &RUN.prompt_embeds[..], &RUN.latents[0][..]);
        let inputs = PredictionInputs { size, features, noise, time: 1.0, guidance: 1.0 };
        let mut backend = wrapped::with_formats(cpu(), self.gemms);
        let velocity = predict(&mut backend, own, &config, Precision::Bf16, inputs);
        let truth = if self.kind == "quantized" { self.kind } else { "wide" };
        golden.velocity_error(&velocity, truth, &Goldens::named("quantized.safetensors"))
    }

    /// Fails unless the recorded outputs accept the transformer of this file.
    fn accepts(self, file: &str) {
        let golden = Golden::named(self.case);
        let error = self.error(&golden, &transformer(Content::of(file), Form::BFL));
        assert!(error <= 1.2 * golden.bf16_error(self.kind, "velocity"), "{}: {error:.2e}", self.case);
    }

    /// Fails unless the recorded outputs refuse a transformer.
    fn refuses(self, what: &str, wrong: &Weights) {
        let golden = Golden::named(self.case);
        refuse(&golden, what, self.kind, "velocity", self.error(&golden, wrong));
    }
}

/// Fails if an error is within the limit.
fn refuse(golden: &Golden, what: &str, kind: &str, stage: &str, error: f64) {
    let allowed = 1.2 * golden.bf16_error(kind, stage);
    println!("{} {kind} {stage}, {what}: {error:.2e}, allowed {allowed:.2e}", golden.name());
    // An error that is NaN comes from an output that is NaN.
    assert!(error.is_nan() || error > allowed, "{}: {what} is not noticed", golden.name());
}

fn transformer(content: &Content, form: Form) -> Weights {
    weights(Component::Transformer, content.file(form))
}

fn inverse_scale(layer: &mut Layer, _: &[Layer]) {
    layer.scale = 1.0 / layer.scale;
}

fn scale_of_other_stream(layer: &mut Layer, all: &[Layer]) {
    layer.scale = other_stream(&layer.name, all).map_or(layer.scale, |other| other.scale);
}

#[test]
fn wrong_fp8_weights_are_noticed() {
    let rule = Rule { case: "fp8.square", gemms: PLAIN_INPUTS, kind: "expanded" };
    rule.accepts("fp8");
    let changed = |change: Change| transformer(&Content::of("fp8").changed(change), Form::BFL);
    rule.refuses("inverse scales", &changed(inverse_scale));
    rule.refuses("scales of the other stream", &changed(scale_of_other_stream));
}

#[test]
fn wrong_nvfp4_weights_are_noticed() {
    let rule = Rule { case: "nvfp4_w4a16.square", gemms: PLAIN_INPUTS, kind: "wide" };
    rule.accepts("nvfp4");
    let right = Content::of("nvfp4");
    let order = |nvfp4| transformer(right, Form { nvfp4, ..Form::BFL });
    rule.refuses("low nibble first", &order(Nvfp4Layout::MODELOPT_SINGLE));
    rule.refuses("plain scales read as tiles", &order(Nvfp4Layout { tiled: false, ..Nvfp4Layout::COMFY }));
    rule.refuses("inverse scales", &transformer(&right.changed(inverse_scale), Form::BFL));
    rule.refuses("scales of the other stream", &transformer(&right.changed(scale_of_other_stream), Form::BFL));
    // Only the first of these mistakes is larger than the error of quantized inputs.
    let rule = Rule { case: "nvfp4.square", gemms: GemmFormats::ALL, kind: "quantized" };
    rule.refuses("low nibble first", &order(Nvfp4Layout::MODELOPT_SINGLE));
}

/// Layers multiplied together have separate scales. Here they get the scale of the first layer in the same format.
fn scale_of_first(layer: &mut Layer, all: &[Layer]) {
    for group in [&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..], &["mlp.gate_proj", "mlp.up_proj"]] {
        let Some(stem) = group.iter().find_map(|part| layer.name.strip_suffix(part)) else { continue };
        let parts = group.iter().filter_map(|part| all.iter().find(|other| other.name == format!("{stem}{part}")));
        let mut alike = parts.filter(|other| other.blocks.is_some() == layer.blocks.is_some());
        layer.scale = alike.next().unwrap().scale;
    }
}

#[test]
fn a_wrong_text_encoder_is_noticed() {
    let (right, golden) = (Content::of("fp8mixed"), Golden::named("mixed.square"));
    let goldens = Goldens::named("quantized.safetensors");
    for (what, wrong) in [
        ("low nibble first", right.file(Form { nvfp4: Nvfp4Layout::MODELOPT_SINGLE, ..Form::COMFY })),
        ("one scale for q, k, v", right.changed(scale_of_first).file(Form::COMFY)),
    ] {
        let encoder = weights(Component::TextEncoder, wrong);
        let model = model(transformer(Content::of("fp8"), Form::BFL), Some(encoder), ModelDefaults::klein().max_text_tokens);
        // Prompt embeddings do not depend on the image.
        let job = Job { size: small_job().size, steps: 1, ..golden.job() };
        let record = run(&mut engine(Box::new(cpu()), model, LoadOptions::DEFAULT), &job).unwrap().record.unwrap();
        let error = golden.error(&record, "wide", "prompt_embeds", &goldens);
        refuse(&golden, what, "wide", "prompt_embeds", error);
    }
}
