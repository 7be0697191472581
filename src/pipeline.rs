//! From a prompt to a picture: one straight line through the stages, run once as a plan and then for real.

mod estimate;
mod fit;
mod inputs;
mod weights;

pub use estimate::{Configs, Estimate, estimate};

use crate::backend::{Backend, HostData, Op, Plan, StepKey, scope};
use crate::checkpoint::Weights;
use crate::config::{
    ConfigFile, Conventions, HEAD_DIM, TextConfig, TransformerConfig, VaeConfig, Variant, check_fit, check_scheduler,
    display_name,
};
use crate::dump::Record;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::locate::{Embedded, Found, ModelFiles};
use crate::model::{ContextIn, ReferenceTokens, StepInput, TextEncoder, Transformer, Vae};
use crate::names::{Layout, Part, text_manifest, transformer_manifest, vae_manifest};
use crate::noise::{NoiseKind, draw};
use crate::progress::{Phase, Progress, Silent};
use crate::sequence::{Grid, PATCH, Pixels, RopeSpec};
use crate::tensor::{Arena, DType, Precision, Region, Tensor};
use crate::tiny;
use crate::tokenizer::{self, Tokenizer, Tokens};
use inputs::{Inputs, download};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weights::{Placing, Sizes, Store};

/// What to make.
#[derive(Clone, Debug)]
pub struct Job {
    /// The prompt.
    pub prompt: String,
    /// Size of the picture.
    pub size: Pixels,
    /// Denoising steps.
    pub steps: usize,
    /// What the picture should not be; base models use it where they use guidance.
    pub negative: String,
    /// Images to start from, in order.
    pub references: Vec<ReferenceInput>,
    /// Guidance scale; base models use it when it is above one, others ignore it.
    pub guidance: f32,
    /// One picture for each.
    pub seeds: Vec<u64>,
    /// Where the initial noise comes from.
    pub noise: Noise,
    /// Keep what [`Record`] holds.
    pub record: bool,
}

/// Where the initial noise comes from.
#[derive(Clone, Debug)]
pub enum Noise {
    /// Drawn from the seed.
    Drawn(NoiseKind),
    /// Given, one row of 128 values per token.
    Given(Vec<f32>),
}

/// An image to start from, brought to size.
#[derive(Clone, Debug)]
pub struct ReferenceInput {
    /// Its size in tokens.
    pub grid: Grid,
    /// Its pixels within -1..1, row by row, three channels each.
    pub pixels: Vec<f32>,
}

/// A finished picture.
#[derive(Debug)]
pub struct GeneratedImage {
    /// The seed it came from.
    pub seed: u64,
    /// Its pixels.
    pub image: Image,
    /// Values along the way, if asked for.
    pub record: Option<Record>,
}

/// A model on a backend, ready to run.
pub struct Engine {
    backend: Box<dyn Backend>,
    parts: Parts,
    store: Store,
    tokenizer: Tokenizer,
    variant: Variant,
    name: String,
}

struct Parts {
    transformer_config: TransformerConfig,
    text_config: TextConfig,
    text: TextEncoder,
    context: ContextIn,
    transformer: Transformer,
    vae: Vae,
}

/// How a model is loaded.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// What a run rounds to.
    pub precision: Precision,
    /// Load what reference images need.
    pub references: bool,
    /// Let the transformer take the text encoder's place in memory once a prompt is encoded.
    pub low_memory: bool,
}

/// The files of a model, opened and checked, nothing read yet.
pub struct OpenModel {
    transformer: Weights,
    text: Weights,
    vae: Weights,
    tokenizer: Tokenizer,
    /// Sizes of the three parts.
    pub configs: Configs,
    /// Which kind of klein it is.
    pub variant: Variant,
    /// How its pictures are made where nothing else is asked for.
    pub conventions: Conventions,
    /// Name for people.
    pub name: String,
    /// Things worth telling the user.
    pub warnings: Vec<String>,
}

impl OpenModel {
    /// Opens what was found and checks that every tensor is there and right. `variant` overrides what the names say.
    pub fn open(found: &Found, variant: Option<Variant>) -> Result<Self> {
        match found {
            Found::Files(files) => Self::files(files, variant),
            Found::BuiltIn(model) => Self::embedded(*model, variant),
            Found::Tiny => {
                let model = tiny::model(Layout::Diffusers, DType::Bf16)?;
                let weights = |part| model.weights(part);
                let tokenizer = Tokenizer::from_json(tiny::TOKENIZER, Path::new("built-in tokenizer"))?;
                let parts = [weights(Part::Transformer)?, weights(Part::TextEncoder)?, weights(Part::Vae)?];
                let variant = variant.unwrap_or(Variant::Distilled);
                let mut model = Self::check(parts, [None; 3], tokenizer, variant, found.conventions()?)?;
                model.name = "tiny random model (built in, not trained)".into();
                Ok(model)
            }
        }
    }

    fn files(files: &ModelFiles, variant: Option<Variant>) -> Result<Self> {
        let parts = [
            Weights::open(Part::Transformer, &files.transformer)?,
            Weights::open(Part::TextEncoder, &files.text_encoder)?,
            Weights::open(Part::Vae, &files.vae)?,
        ];
        let read = |path: Option<PathBuf>| path.as_deref().map(ConfigFile::read).transpose();
        let config = |part: &Path| read(ModelFiles::config_of(part));
        let configs = [config(&files.transformer)?, config(&files.text_encoder)?, config(&files.vae)?];
        read(files.scheduler())?.as_ref().map_or(Ok(()), check_scheduler)?;
        let tokenizer = match &files.tokenizer {
            Some(path) => Tokenizer::open(path)?,
            None => Tokenizer::qwen3()?,
        };
        let variant = match variant.or(files.conventions.variant) {
            Some(variant) => variant,
            None => {
                let file = files.transformer.file_name().unwrap_or_default().to_string_lossy();
                Variant::detect(read(files.index.clone())?.as_ref(), &[&file, &files.origin])?
            }
        };
        Self::check(parts, configs.each_ref().map(Option::as_ref), tokenizer, variant, files.conventions.clone())
    }

    fn embedded(model: Embedded, variant: Option<Variant>) -> Result<Self> {
        let parts = [
            model.weights(Part::Transformer, "transformer/diffusion_pytorch_model.safetensors")?,
            model.weights(Part::TextEncoder, "text_encoder/model.safetensors")?,
            model.weights(Part::Vae, "vae/diffusion_pytorch_model.safetensors")?,
        ];
        let config = |part: &str| model.config(&format!("{part}/config.json"));
        let configs = [config("transformer")?, config("text_encoder")?, config("vae")?];
        let conventions = model.conventions()?;
        let variant = match variant.or(conventions.variant) {
            Some(variant) => variant,
            None => Variant::detect(Some(&model.config("model_index.json")?), &[])?,
        };
        Self::check(parts, configs.each_ref().map(Some), model.tokenizer()?, variant, conventions)
    }

    /// Checks that three parts (transformer, text encoder, VAE) are complete and fit each other. `configs` are their
    /// `config.json` files, where there are any.
    pub fn check(
        parts: [Weights; 3],
        configs: [Option<&ConfigFile>; 3],
        tokenizer: Tokenizer,
        variant: Variant,
        conventions: Conventions,
    ) -> Result<Self> {
        let [transformer, text, vae] = parts;
        let c = TransformerConfig::detect(&transformer, configs[0])?;
        let t = TextConfig::detect(&text, configs[1], &conventions)?;
        let v = VaeConfig::detect(&vae, configs[2])?;
        check_fit(&c, &t)?;
        if v.patched() != c.channels {
            let detail = format!("image tokens have {} channels there and {} here", c.channels, v.patched());
            return Err(Error::Mismatch { part: "VAE", detail, hint: None });
        }
        let mut warnings = Vec::new();
        for (weights, manifest) in
            [(&transformer, transformer_manifest(&c)), (&text, text_manifest(&t)), (&vae, vae_manifest(&v))]
        {
            let extra = weights.check(&manifest)?;
            if let Some(first) = extra.first() {
                let more = if extra.len() > 1 { format!(" and {} more", extra.len() - 1) } else { String::new() };
                warnings.push(format!("{}: unknown tensor `{first}`{more}, ignored", weights.path().display()));
            }
        }
        let name = conventions.name.clone().unwrap_or_else(|| display_name(&c, variant));
        Ok(Self { transformer, text, vae, tokenizer, configs: (c, t, v), variant, conventions, name, warnings })
    }

    /// The files in use, part by part, for people.
    pub fn files_in_use(&self) -> [(Part, String); 3] {
        [&self.transformer, &self.text, &self.vae].map(|weights| (weights.part(), weights.source()))
    }

    fn sources(&self) -> [Option<&Weights>; 3] {
        [Some(&self.transformer), Some(&self.text), Some(&self.vae)]
    }

    /// Fails if one of the files changed since it was opened.
    pub fn verify(&self) -> Result<()> {
        [&self.transformer, &self.text, &self.vae].into_iter().try_for_each(Weights::verify)
    }
}

impl Parts {
    /// The model's parts, how many bytes their weights take, and how many of them are copied whatever the backend.
    fn place(configs: &Configs, sources: [Option<&Weights>; 3], options: LoadOptions) -> Result<(Self, Sizes, Sizes)> {
        let placing = Placing { configs, sources, options, real: false };
        let ((text, context), (transformer, vae), sizes, copied) = placing.both()?;
        let (transformer_config, text_config) = (configs.0.clone(), configs.1.clone());
        Ok((Self { transformer_config, text_config, text, context, transformer, vae }, sizes, copied))
    }
}

impl Engine {
    /// Makes room for a model on a backend and brings over what reads prompts. The rest follows with the first picture.
    pub fn load(mut backend: Box<dyn Backend>, model: OpenModel, options: LoadOptions, progress: &dyn Progress) -> Result<Self> {
        let (parts, sizes, _) = Parts::place(&model.configs, model.sources(), options)?;
        backend.reserve_weights(sizes.total(options.low_memory))?;
        let OpenModel { transformer, text, vae, tokenizer, configs, variant, name, .. } = model;
        let files = Arc::new([transformer, text, vae]);
        let mut store = Store { files, configs, options, sizes, text: false, image: false };
        store.bring_text(backend.as_mut(), progress)?;
        Ok(Self { backend, parts, store, tokenizer, variant, name })
    }

    /// The model's name for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it runs.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Which kind of klein it is.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    fn inputs<'a>(&self, job: &'a Job, progress: &dyn Progress) -> Result<Inputs<'a>> {
        let config = &self.parts.text_config;
        let encode = |what: &str, text: &str| -> Result<Tokens> {
            let tokens = self.tokenizer.encode(text, config.max_tokens)?;
            if let Some(id) = tokens.ids.iter().find(|&&id| id as usize >= config.vocab) {
                return Err(Error::Mismatch {
                    part: "tokenizer",
                    detail: format!("it makes token {id}, the text encoder knows {}", config.vocab),
                    hint: Some(tokenizer::HINT.into()),
                });
            }
            if tokens.cut > 0 {
                let (cut, kept, ending) = (tokens.cut, config.max_tokens, self.tokenizer.ending(&tokens)?);
                progress.warn(&format!("the {what} is {cut} tokens too long; only its first {kept} are used, up to `…{ending}`"));
            }
            Ok(tokens)
        };
        let prompt = encode("prompt", &job.prompt)?;
        let negative = if self.variant.guides(job.guidance) { Some(encode("negative prompt", &job.negative)?) } else { None };
        let files = self.backend.reads_files().then(|| self.store.files.clone());
        Inputs::new(job, self.store.options.precision, self.variant, prompt, negative, files)
    }

    /// Runs the stages of one picture without touching memory and tells what they need.
    pub fn plan(&self, job: &Job) -> Result<Plan> {
        let mut plan = Plan::new();
        self.parts.dry_run(&mut plan, &self.inputs(job, &Silent)?, &Silent)?;
        Ok(plan)
    }

    /// Makes the job's pictures and hands each to `sink` as it is done.
    pub fn generate(
        &mut self,
        job: &Job,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(GeneratedImage) -> Result<()>,
    ) -> Result<()> {
        let inputs = self.inputs(job, progress)?;
        let mut plan = Plan::new();
        let bytes = self.parts.dry_run(&mut plan, &inputs, &Silent)?;
        progress.detail(&format!(
            "{} tokens, {} ops, {:.3} TFLOP, {:.1} MiB of working memory",
            inputs.plan.tokens(),
            plan.ops,
            plan.flops() as f64 / 1e12,
            bytes as f64 / 1_048_576.0
        ));
        self.backend.reserve(bytes)?;
        let Self { backend, parts, store, .. } = self;
        let (be, mut ws) = (backend.as_mut(), Arena::new(Region::Arena));
        store.bring_text(be, progress)?;
        // With weights left to bring there is better to do than to wait.
        let prompts = parts.read_prompts(be, &mut ws, &inputs, store.image, progress)?;
        store.bring_image(be, progress)?;
        let (grid, precision) = (job.size.grid(), inputs.precision);
        let mut noises = |seed| match &job.noise {
            Noise::Drawn(kind) => Ok(draw(*kind, seed, grid, precision)),
            Noise::Given(values) => Ok(values.clone()),
        };
        parts.paint(be, &mut ws, &inputs, prompts, &job.seeds, &mut noises, progress, &mut |seed, mut values| {
            let (pixels, width, height) = (std::mem::take(&mut values.pixels), job.size.width(), job.size.height());
            let record = job.record.then(|| values.into_record(&inputs.prompt, job.size));
            sink(GeneratedImage { seed, image: Image { width, height, pixels }, record })
        })
    }
}

/// What a run of the stages leaves on the host. All but the pixels only when a record is asked for.
#[derive(Clone, Default)]
struct Values {
    prompt_embeds: Vec<f32>,
    negative_prompt_embeds: Option<Vec<f32>>,
    references: Vec<Vec<f32>>,
    latents: Vec<Vec<f32>>,
    /// One row of three channels per pixel, before and after rounding to bytes.
    image: Vec<f32>,
    pixels: Vec<u8>,
}

impl Values {
    fn into_record(self, prompt: &Tokens, size: Pixels) -> Record {
        let pixels = size.width() * size.height();
        let image = (0..3).flat_map(|c| (0..pixels).map(move |p| 3 * p + c)).map(|i| self.image[i]).collect();
        Record {
            token_ids: prompt.ids.clone(),
            prompt_embeds: self.prompt_embeds,
            negative_prompt_embeds: self.negative_prompt_embeds,
            references: self.references,
            latents: self.latents,
            image,
            width: size.width(),
            height: size.height(),
        }
    }
}

/// Encoded prompts in working memory.
struct Prompts {
    context: Tensor,
    negative: Option<Tensor>,
    /// How many of their values are not finite, one number each.
    counts: Tensor,
    /// Holds their features if a record is asked for.
    values: Values,
}

impl Parts {
    /// Runs the stages of one picture on a plan. Returns the bytes of working memory they need.
    fn dry_run(&self, plan: &mut Plan, inputs: &Inputs<'_>, progress: &dyn Progress) -> Result<u64> {
        let mut ws = Arena::new(Region::Arena);
        let noise = vec![0.0; inputs.plan.canvas().len() * self.transformer_config.channels];
        let prompts = self.read_prompts(plan, &mut ws, inputs, true, progress)?;
        self.paint(plan, &mut ws, inputs, prompts, &[0], &mut |_| Ok(noise.clone()), progress, &mut |_, _| Ok(()))?;
        Ok(ws.peak())
    }

    /// The first half of the line: encode.
    fn read_prompts(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        wait: bool,
        progress: &dyn Progress,
    ) -> Result<Prompts> {
        progress.begin(Phase::Encode, 1 + u64::from(inputs.negative.is_some()));
        let mut values = Values::default();
        let counts = ws.alloc(1 + usize::from(inputs.negative.is_some()), 1, DType::F32)?;
        let (context, embeds) = self.encode(be, ws, inputs, &inputs.prompt, counts.rows(0..1))?;
        values.prompt_embeds = embeds;
        progress.advance(1);
        let mut negative = None;
        if let Some(tokens) = &inputs.negative {
            let (context, embeds) = self.encode(be, ws, inputs, tokens, counts.rows(1..2))?;
            values.negative_prompt_embeds = Some(embeds);
            negative = Some(context);
        }
        if wait {
            be.synchronize()?;
        }
        progress.end();
        Ok(Prompts { context, negative, counts, values })
    }

    /// The second half: prepare, denoise, decode.
    #[allow(clippy::too_many_arguments)]
    fn paint(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        Prompts { context, negative, counts, values: mut shared }: Prompts,
        seeds: &[u64],
        noises: &mut dyn FnMut(u64) -> Result<Vec<f32>>,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(u64, Values) -> Result<()>,
    ) -> Result<()> {
        let (c, job, plan) = (&self.transformer_config, inputs.job, &inputs.plan);
        let schedule = &inputs.schedule;
        // They are done by now: where nothing waited for them, loading the other weights did, so asking holds nothing up.
        inputs.check_prompts(be, counts)?;
        let count = ws.alloc(1, 1, DType::F32)?;
        let rope = ws.alloc(plan.tokens(), HEAD_DIM, DType::F32)?;
        be.write(rope, HostData::F32(&plan.rope_table(&RopeSpec { theta: c.rope_theta, axes: c.rope_axes })))?;
        // The row after the last step is time zero, which cached references see.
        let times: Vec<f32> = (0..=schedule.steps()).map(|i| schedule.sigma(i)).collect();
        let table = self.transformer.modulations(be, ws, &times, job.guidance)?;
        let modulation = self.transformer.modulation_slot(ws)?;

        let (mut tokens, mut cache) = (Vec::new(), Vec::new());
        if !job.references.is_empty() {
            progress.begin(Phase::References, (job.references.len() + usize::from(inputs.cached)) as u64);
            tokens = self.encode_references(be, ws, inputs, count, &mut shared.references, progress)?;
            if inputs.cached {
                let rows = rope.rows(plan.canvas().end..plan.tokens());
                self.transformer.select(be, modulation, table, schedule.steps())?;
                cache = self.transformer.reference_cache(be, ws, &tokens, rows, modulation)?;
                progress.advance(1);
            }
            be.synchronize()?;
            progress.end();
        }
        let references = if inputs.cached { ReferenceTokens::Cached(&cache) } else { ReferenceTokens::InSequence(&tokens) };
        let [latents, velocity, other] = {
            let mut place = || ws.alloc(plan.canvas().len(), c.channels, DType::F32);
            [place()?, place()?, place()?]
        };
        let image = ws.alloc(job.size.width() * job.size.height(), 3, DType::F32)?;
        let pixels = ws.alloc(image.rows, image.cols, DType::U8)?;

        for &seed in seeds {
            let mut values = shared.clone();
            let noise = noises(seed)?;
            be.write(latents, HostData::F32(&noise))?;
            if job.record {
                values.latents.push(noise);
            }

            progress.begin(Phase::Denoise, schedule.steps() as u64);
            for i in 0..schedule.steps() {
                self.transformer.select(be, modulation, table, i)?;
                let step = StepInput { plan, rope, context, latents, references, modulation, velocity };
                self.transformer.step(be, ws, StepKey("prompt"), step)?;
                if let Some(context) = negative {
                    let step = StepInput { context, velocity: other, ..step };
                    self.transformer.step(be, ws, StepKey("negative"), step)?;
                    scope(be, ws, |be, ws| {
                        let guided = ws.alloc(velocity.rows, velocity.cols, velocity.dtype)?;
                        be.run(Op::Guidance { out: guided, cond: velocity, uncond: other, scale: job.guidance })?;
                        be.run(Op::Euler { latents, velocity: guided, dt: schedule.dt(i) })
                    })?;
                } else {
                    be.run(Op::Euler { latents, velocity, dt: schedule.dt(i) })?;
                }
                // The VAE's weights come next and are few, so that they are not found missing after all the other steps.
                let parts = [Part::Transformer, Part::Vae];
                inputs.check(be, count, latents, &parts, || format!("denoising step {} of {}", i + 1, schedule.steps()))?;
                if job.record {
                    values.latents.push(download(be, latents)?);
                }
                progress.advance(1);
            }
            progress.end();

            progress.begin(Phase::Decode, 1);
            self.vae.decode(be, ws, image, latents, job.size.grid())?;
            inputs.check(be, count, image, &[], || "decoding".into())?;
            be.run(Op::Pixels { out: pixels, x: image })?;
            values.pixels = vec![0; pixels.len()];
            be.read_bytes(pixels, &mut values.pixels)?;
            if job.record {
                values.image = download(be, image)?;
            }
            progress.end();
            sink(seed, values)?;
        }
        Ok(())
    }

    /// A prompt's context, and its features if a record is asked for. `count` becomes the number of its values that are not finite.
    fn encode(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        tokens: &Tokens,
        count: Tensor,
    ) -> Result<(Tensor, Vec<f32>)> {
        let context = self.context.slot(ws, tokens.ids.len())?;
        let mut embeds = Vec::new();
        scope(be, ws, |be, ws| {
            let features = ws.alloc(tokens.ids.len(), self.text_config.features(), inputs.precision.activations())?;
            self.text.forward(be, ws, features, tokens)?;
            if inputs.job.record {
                embeds = download(be, features)?;
            }
            self.context.run(be, context, features)
        })?;
        be.run(Op::NonFinite { count, x: context })?;
        Ok((context, embeds))
    }

    /// Tokens of the reference images, and their values if a record is asked for.
    fn encode_references(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        count: Tensor,
        record: &mut Vec<Vec<f32>>,
        progress: &dyn Progress,
    ) -> Result<Vec<Tensor>> {
        let (references, act) = (&inputs.job.references, inputs.precision.activations());
        let mut all = Vec::with_capacity(references.len());
        for (j, ReferenceInput { grid, pixels }) in references.iter().enumerate() {
            let tokens = ws.alloc(grid.tokens(), self.transformer_config.channels, act)?;
            scope(be, ws, |be, ws| {
                let image = ws.alloc(PATCH * PATCH * grid.tokens(), 3, act)?;
                be.write(image, HostData::F32(pixels))?;
                self.vae.encode(be, ws, tokens, image, *grid)
            })?;
            inputs.check(be, count, tokens, &[Part::Vae], || format!("encoding reference {}", j + 1))?;
            if inputs.job.record {
                record.push(download(be, tokens)?);
            }
            progress.advance(1);
            all.push(tokens);
        }
        Ok(all)
    }
}
