//! Estimates the cost of a job: its stages run on the dry-run backend, with the shapes of the weights but not their values.

use super::branches::{Branches, adapters_of};
use super::formats::Formats;
use super::inputs::Inputs;
use super::job::{Job, LoadOptions};
use super::open::OpenModel;
use super::stages::Stages;
use crate::adapter::Adapters;
use crate::backend::{Backend, DryRun, GemmFormats, Observed, Op};
use crate::checkpoint::Weights;
use crate::component::PerComponent;
use crate::config::{Configs, Variant};
use crate::error::Result;
use crate::progress::{Phase, Progress};
use crate::tokenizer::Tokens;
use crate::trace;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The cost of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Tokens of the prompt.
    pub text_tokens: usize,
    /// Tokens of the image.
    pub canvas_tokens: usize,
    /// Tokens of each reference.
    pub reference_tokens: Vec<usize>,
    /// The time shift of the schedule.
    pub mu: f64,
    /// Noise levels (sigma), one per step that runs.
    pub sigmas: Vec<f32>,
    /// Floating-point operations of each stage, in order.
    pub stages: Vec<(Phase, u64)>,
    /// Predicted seconds of each stage, if the request has an op time.
    pub seconds: Vec<(Phase, f64)>,
    /// Number of ops of one whole image.
    pub ops: u64,
    /// Bytes of the weights on a backend, including LoRA branches.
    pub weight_bytes: u64,
    /// Bytes of the weights in low-memory mode, where the transformer replaces the text encoder.
    pub low_memory_weight_bytes: u64,
    /// Bytes of the weights that even a backend that reads files in place has to copy: misaligned weights and weights of another
    /// dtype.
    pub copied_bytes: u64,
    /// The copied bytes in low-memory mode.
    pub low_memory_copied_bytes: u64,
    /// How many of these bytes are LoRA branches.
    pub adapter_bytes: u64,
    /// Bytes of the token embeddings, which stay in host memory and are not among the weights.
    pub table_bytes: u64,
    /// Bytes of the arena, which holds the activations.
    pub arena_bytes: u64,
    /// The formats of transformer and text encoder.
    pub formats: Formats,
}

/// Returns the seconds that an op takes on some device.
pub type OpTime = Rc<dyn Fn(&Op<'_>) -> f64>;

/// Measures phases: reads the floating-point operations and seconds of all ops so far at the start and end of each phase.
#[derive(Default)]
struct Meter {
    so_far: Rc<Cell<(u64, f64)>>,
    stages: RefCell<Vec<(Phase, u64, f64)>>,
}

impl Progress for Meter {
    fn begin(&self, phase: Phase, _total: u64) {
        let (flops, seconds) = self.so_far.get();
        self.stages.borrow_mut().push((phase, flops, seconds));
    }

    fn end(&self) {
        if let Some((_, flops, seconds)) = self.stages.borrow_mut().last_mut() {
            let so_far = self.so_far.get();
            (*flops, *seconds) = (so_far.0 - *flops, so_far.1 - *seconds);
        }
    }
}

/// What to estimate: a model, and a device for it. No weight is read.
#[derive(Clone)]
pub struct EstimateRequest<'a> {
    /// The sizes of the model.
    pub configs: &'a Configs,
    /// How the model was trained.
    pub variant: Variant,
    /// The model's files. Their dtypes matter in f32 precision, which keeps them. Without files all weights are in bf16.
    pub weights: PerComponent<Option<&'a Weights>>,
    /// The model's adapters.
    pub adapters: &'a Adapters,
    /// How the model is loaded.
    pub options: LoadOptions,
    /// The quantized GEMMs of the device.
    pub gemms: GemmFormats,
    /// The time of an op, to predict times.
    pub time: Option<OpTime>,
}

impl<'a> EstimateRequest<'a> {
    /// A request for a model without files and adapters, and without times.
    pub fn new(configs: &'a Configs, variant: Variant, options: LoadOptions, gemms: GemmFormats) -> Self {
        static NONE: Adapters = Adapters(Vec::new());
        Self { configs, variant, weights: PerComponent::default(), adapters: &NONE, options, gemms, time: None }
    }
}

impl OpenModel {
    /// The request for an estimate of this model, without times.
    pub fn estimate_request(&self, options: LoadOptions, gemms: GemmFormats) -> EstimateRequest<'_> {
        let (weights, adapters) = (self.weights.each_ref().map(Some), &self.adapters);
        EstimateRequest { weights, adapters, ..EstimateRequest::new(&self.configs, self.variant, options, gemms) }
    }

    /// The formats of the linear layers and of attention, in the files and on a backend with these GEMMs.
    pub fn formats(&self, options: LoadOptions, gemms: GemmFormats) -> Result<Formats> {
        let (stages, ..) = Stages::place(&self.configs, self.weights.each_ref().map(Some), options, &self.adapters, gemms)?;
        Ok(stages.formats())
    }
}

/// Estimates the cost of one image of `job`.
pub fn estimate(request: EstimateRequest<'_>, job: &Job) -> Result<Estimate> {
    let EstimateRequest { configs, variant, weights, adapters, options, gemms, time } = request;
    let (meter, is_timed) = (Meter::default(), time.is_some());
    let so_far = meter.so_far.clone();
    let mut plan = Observed::new(Box::new(DryRun::new(gemms)), move |plan: &mut DryRun, op: Op<'_>| {
        plan.run(op)?;
        so_far.set((plan.flops, so_far.get().1 + time.as_ref().map_or(0.0, |time| time(&op))));
        Ok(())
    });
    let (mut networks, sizes, copied) = Stages::place(configs, weights, options, adapters, gemms)?;
    let chosen = adapters_of(job.adapters.as_deref(), adapters, networks.layers())?;
    let branches = Branches::place(chosen, networks.layers(), options.precision)?;
    networks.attach(&branches);
    let with_branches = |bytes: u64| bytes.saturating_add(branches.bytes);
    let length = configs.text_encoder.max_tokens;
    // Prompts are padded to the same length, so their text does not matter.
    let tokens = Tokens { ids: vec![0; length], real: length, padding: job.padding, cut: 0 };
    let inputs = Inputs::new(job, variant, &branches, None, |_, _| Ok(tokens.clone()))?;
    let arena_bytes = {
        let _span = trace::span("dry run");
        networks.walk(&mut plan, &inputs, &meter)?.max(plan.inner.arena_bytes)
    };
    let canvas_tokens = inputs.plan.canvas().len();
    let stages = meter.stages.into_inner();
    Ok(Estimate {
        text_tokens: inputs.plan.text().len(),
        canvas_tokens,
        reference_tokens: inputs.plan.references().iter().map(|grid| grid.tokens()).collect(),
        mu: inputs.schedule.mu(),
        sigmas: (0..inputs.schedule.steps()).map(|i| inputs.schedule.sigma(i)).collect(),
        seconds: stages.iter().filter(|_| is_timed).map(|&(phase, _, seconds)| (phase, seconds)).collect(),
        stages: stages.into_iter().map(|(phase, flops, _)| (phase, flops)).collect(),
        ops: plan.inner.ops,
        weight_bytes: with_branches(sizes.total(false)),
        low_memory_weight_bytes: with_branches(sizes.total(true)),
        copied_bytes: with_branches(copied.total(false)),
        low_memory_copied_bytes: with_branches(copied.total(true)),
        adapter_bytes: branches.bytes,
        table_bytes: networks.table_bytes(),
        arena_bytes,
        formats: networks.formats(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelDefaults;
    use crate::names::LayerRole;
    use crate::names::Stream::Image;
    use crate::pipeline::ReferenceInput;
    use crate::sequence::{Grid, Pixels};
    use crate::tensor::DType;
    use std::sync::Arc;

    fn job(side: usize, references: usize) -> Job {
        let grid = Grid { width: 64, height: 64 };
        Job {
            size: Pixels::new(side, side).unwrap(),
            references: (0..references).map(|_| ReferenceInput { grid, pixels: Arc::default() }).collect(),
            guidance: 1.0,
            ..Job::new("", 0, &ModelDefaults::klein(), Variant::Distilled).unwrap()
        }
    }

    fn of(configs: &Configs, variant: Variant, side: usize, references: usize) -> Estimate {
        let options = LoadOptions { references: references > 0, ..LoadOptions::DEFAULT };
        estimate(EstimateRequest::new(configs, variant, options, GemmFormats::NONE), &job(side, references)).unwrap()
    }

    fn tera(estimate: &Estimate, phase: Phase) -> f64 {
        estimate.stages.iter().filter(|(p, _)| *p == phase).map(|(_, f)| *f as f64).sum::<f64>() / 1e12
    }

    /// The known costs of klein, minus what the last block saves: the queries, MLP and output of text tokens, which nothing reads.
    #[test]
    fn flops_match_the_known_counts() {
        let (h, text, canvas) = (3072.0, 512.0, 4096.0);
        let plain = 34.82e12 * 4.0;
        let saved = 4.0 * (text * h * (2.0 * h * 7.0 + 2.0 * 4.0 * h) + 4.0 * text * (text + canvas) * h);
        let at_1024 = of(&Configs::KLEIN_4B, Variant::Distilled, 1024, 0);
        let context = 2.0 * text * 7680.0 * h;
        let want = (plain - saved - 4.0 * context) / 1e12;
        assert!((tera(&at_1024, Phase::Denoise) - want).abs() < 0.05, "{} {want}", tera(&at_1024, Phase::Denoise));
        assert!((tera(&at_1024, Phase::Encode) - 2.91 - context / 1e12).abs() < 0.02, "{}", tera(&at_1024, Phase::Encode));
        // Each upsampling leaves four of the nine taps that follow it.
        let upsampling: f64 =
            [(256.0, 512.0), (512.0, 512.0), (1024.0, 256.0)].iter().map(|(side, c)| 18.0 * side * side * c * c).sum();
        let want = 10.47 - upsampling * 5.0 / 9.0 / 1e12;
        assert!((tera(&at_1024, Phase::Decode) - want).abs() < 0.01, "{} {want}", tera(&at_1024, Phase::Decode));
        assert_eq!((at_1024.text_tokens, at_1024.canvas_tokens), (512, 4096));
        assert!((at_1024.mu - 2.291_180).abs() < 1e-6);
        let edited = of(&Configs::KLEIN_4B, Variant::Distilled, 1024, 1);
        assert!((tera(&edited, Phase::References) - 4.89).abs() < 0.02, "{}", tera(&edited, Phase::References));
    }

    /// The decoder takes most of the memory: the input of its finest level with as many channels as the level before, the
    /// normalized input, and the output.
    #[test]
    fn working_memory_is_that_of_the_decoder() {
        let (finest, channels) = (1_u64 << 20, 256 + 256 + 128);
        let options = |vae_tiling| LoadOptions { vae_tiling, ..LoadOptions::DEFAULT };
        let bytes = |side: usize, tiling| {
            let klein = Configs::KLEIN_4B;
            let request = EstimateRequest::new(&klein, Variant::Distilled, options(tiling), GemmFormats::NONE);
            estimate(request, &job(side, 0)).unwrap().arena_bytes
        };
        for (side, tiling, megapixels) in [(1024, false, 1), (2048, false, 4), (2048, true, 1)] {
            let (found, decoder) = (bytes(side, tiling), 2 * megapixels * finest * channels);
            let rest = if tiling { 10 } else { 40 };
            assert!(found > decoder && found < decoder + decoder / rest, "{side} {tiling}: {found}, of the decoder {decoder}");
        }
    }

    #[test]
    fn weight_bytes_count_the_tensors_in_use() {
        let vectors = |bytes: u64| bytes / 500; // norms and biases are held in f32
        // The weights do not include the table of token embeddings: it stays in host memory.
        for (configs, transformer, layers) in
            [(Configs::KLEIN_4B, 7_751_089_152, 5_450_264_064), (Configs::KLEIN_9B, 18_157_162_496, 10_419_107_328_u64)]
        {
            let got = of(&configs, Variant::Distilled, 256, 0).weight_bytes;
            let want = transformer + layers + 2 * 49_620_259;
            assert!(got.abs_diff(want) < vectors(want), "{got} {want}");
        }
        let tables = [Configs::KLEIN_4B, Configs::KLEIN_9B].map(|c| of(&c, Variant::Distilled, 256, 0).table_bytes);
        assert_eq!(tables, [2 * 151_936 * 2560, 2 * 151_936 * 4096]);
    }

    #[test]
    fn every_linear_layer_is_of_a_known_kind() {
        let formats = of(&Configs::KLEIN_4B, Variant::Distilled, 256, 0).formats;
        let layers: Vec<_> = formats.by_kind().iter().map(|row| (row.kind, row.layers)).collect();
        use LayerRole::*;
        let double = [Qkv(Image), AttentionOut(Image), MlpIn(Image), MlpOut(Image)].map(|kind| (kind, 10));
        let single = [(Linear1, 20), (Linear2, 20)];
        let rest = [(ImageIn, 1), (TextIn, 1), (TimeIn, 2), (ImageModulation, 3), (FinalModulation, 2)];
        let encoder = [EncoderQkv, EncoderOut, EncoderGateUp, EncoderDown].map(|kind| (kind, 27));
        assert_eq!(layers, [&double[..], &single, &rest, &encoder].concat());
        assert!(formats.by_kind().iter().all(|row| row.types == [(DType::Bf16, DType::Bf16)].into() && row.input == DType::Bf16));
        let bytes: u64 = formats.by_kind().iter().map(|row| row.held_bytes).sum();
        assert!(formats.by_kind().iter().all(|row| row.stored_bytes == row.held_bytes));
        // Norms and the VAE come on top of these weights.
        let all = 7_751_089_152 + 5_450_264_064;
        assert!(bytes < all && all - bytes < all / 500, "{bytes} of {all}");
    }

    #[test]
    fn cached_references_cost_one_pass() {
        let plain = of(&Configs::KLEIN_9B, Variant::Distilled, 1024, 4);
        let cached = of(&Configs::KLEIN_9B, Variant::Kv, 1024, 4);
        let (plain, cached) = (tera(&plain, Phase::Denoise), tera(&cached, Phase::Denoise) + tera(&cached, Phase::References));
        assert!(plain > 2000.0 && cached < 900.0, "{plain} {cached}");
    }

    #[test]
    fn too_many_tokens_are_refused() {
        let options = LoadOptions { references: true, ..LoadOptions::DEFAULT };
        let klein = Configs::KLEIN_4B;
        let request = EstimateRequest::new(&klein, Variant::Distilled, options, GemmFormats::NONE);
        assert!(estimate(request, &job(2048, 9)).is_err());
    }
}
