//! The engine: a model's weights on a backend, and the stages of an image, written once for every backend. The prompts are
//! encoded, then the references, then the latents are denoised and decoded. Each job runs on the dry-run backend first, which
//! measures how much memory the stages need.

use super::formats::Formats;
use super::inputs::{Checks, Inputs, download};
use super::job::{GeneratedImage, Job, LoadOptions, ReferenceInput};
use super::kept::{Kept, Source};
use super::open::{Configs, OpenModel};
use super::prepared::{DryRun, Shapes, Tables, initial_noise};
use super::values::Values;
use super::weights::{ImageSide, Placing, Sizes, Store, TextSide};
use crate::backend::{Backend, GemmFormats, Op, Plan, Reading, StepKey, scope};
use crate::checkpoint::Weights;
use crate::config::{HEAD_DIM, TextConfig, TransformerConfig, Variant};
use crate::error::{Error, Remedy, Result};
use crate::image::Image;
use crate::model::{ReferenceTokens, StepInput};
use crate::part::{Part, PerPart};
use crate::progress::{Phase, Progress, Silent, Traced};
use crate::sequence::PATCH;
use crate::tensor::{Arena, DType, Region, Tensor};
use crate::threads;
use crate::tokenizer::{self, Tokenizer, Tokens};
use crate::trace;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A model on a backend, ready to run.
pub struct Engine {
    backend: Box<dyn Backend>,
    stages: Stages,
    store: Store,
    shapes: Shapes,
    kept: Kept,
    /// Bytes of working memory that the backend holds.
    working: u64,
    tokenizer: Tokenizer,
    variant: Variant,
    name: String,
}

impl Engine {
    /// Reserves memory for a model's weights on a backend and loads those that encode prompts. The others are loaded with the first
    /// image.
    pub fn load(mut backend: Box<dyn Backend>, model: OpenModel, options: LoadOptions, progress: &dyn Progress) -> Result<Self> {
        let progress = &Traced::new(progress);
        let OpenModel { weights, tokenizer, configs, variant, name, read_ahead, .. } = model;
        let (mut stages, sizes, _) = Stages::place(&configs, weights.each_ref().map(Some), options, backend.gemm_formats())?;
        backend.reserve_weights(sizes.total(options.low_memory))?;
        let (text, transformer, vae) = (false, false, false);
        let mut store = Store { files: Arc::new(weights), configs, options, sizes, text, transformer, vae, read_ahead };
        store.load_text(&mut stages.text, backend.as_mut(), progress)?;
        Ok(Self {
            backend,
            stages,
            store,
            shapes: Shapes::default(),
            kept: Kept::default(),
            working: 0,
            tokenizer,
            variant,
            name,
        })
    }

    /// The model's display name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The backend that the engine runs on.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// How the model was trained.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// From now on jobs end with [`Error::Interrupted`] once this flag is set, until there is another one or none.
    pub fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.backend.set_cancel(cancel);
    }

    /// From now on keeps encoded prompts, references and their keys and values in the backend's memory, for later jobs with the same ones,
    /// which have the same results to the byte. They take `most` bytes, or less where memory is short: at most a quarter of what a `usual` job leaves.
    pub fn keep_results(&mut self, most: u64, usual: &Job) -> Result<()> {
        let inputs = self.inputs(usual, &Silent)?;
        let more = self.dry_run(&inputs)?.bytes.saturating_sub(self.working);
        let spare = self.backend.available()?.map_or(u64::MAX, |free| free.saturating_sub(more));
        self.kept.reserve(self.backend.as_mut(), most.min(spare / 4))
    }

    /// Refuses a job whose working memory does not fit into what is free and what earlier jobs of this engine have left. The
    /// weights are there, or their memory is reserved.
    pub fn check_memory(&mut self, job: &Job) -> Result<()> {
        let inputs = self.inputs(job, &Silent)?;
        let need = self.dry_run(&inputs)?.bytes;
        if need <= self.working {
            return Ok(());
        }
        let Some(free) = self.backend.available()? else { return Ok(()) };
        // What is there already is freed before more is allocated.
        let have = free.saturating_add(self.working);
        match need <= have {
            true => Ok(()),
            false if self.backend.reads_files() => {
                Err(Error::HostMemory { need, have, ways: vec![Remedy::SmallerImage, Remedy::ClosePrograms] })
            }
            false => {
                let (device, ways) = (self.backend.name().into(), vec![Remedy::SmallerImage, Remedy::CloseGpuPrograms]);
                Err(Error::DeviceMemory { need, have, device, ways })
            }
        }
    }

    /// Measures what a job takes, unless one of its shape was measured before.
    fn dry_run(&mut self, inputs: &Inputs<'_>) -> Result<DryRun> {
        let Self { backend, stages, shapes, .. } = self;
        shapes.dry_run(inputs, || {
            let mut plan = Plan::new(backend.gemm_formats());
            let bytes = stages.dry_run(&mut plan, inputs, &Silent)?;
            Ok(DryRun { bytes, ops: plan.ops, flops: plan.flops() })
        })
    }

    fn inputs<'a>(&self, job: &'a Job, progress: &dyn Progress) -> Result<Inputs<'a>> {
        let files = self.backend.reads_files().then(|| self.store.files.clone());
        Inputs::new(job, self.variant, files, |what, text| self.tokenize(what, text, progress))
    }

    /// Tokenizes a text. `what` names it in the warning that it is too long.
    fn tokenize(&self, what: &str, text: &str, progress: &dyn Progress) -> Result<Tokens> {
        let config = &self.store.configs.text_encoder;
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
    }

    /// Runs the stages of one image on the dry-run backend, which counts what they need.
    pub fn plan(&self, job: &Job) -> Result<Plan> {
        let mut plan = Plan::new(self.backend.gemm_formats());
        self.stages.dry_run(&mut plan, &self.inputs(job, &Silent)?, &Silent)?;
        Ok(plan)
    }

    /// Generates the images of a job and hands each to `sink` as it is done.
    pub fn generate(
        &mut self,
        job: &Job,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(GeneratedImage) -> Result<()>,
    ) -> Result<()> {
        let done = self.generate_images(job, progress, sink);
        if done.is_err() {
            // What was kept may not have been computed, or not be finite.
            self.kept.forget();
        }
        done
    }

    fn generate_images(
        &mut self,
        job: &Job,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(GeneratedImage) -> Result<()>,
    ) -> Result<()> {
        let progress = &Traced::new(progress);
        let inputs = self.inputs(job, progress)?;
        let DryRun { bytes, ops, flops } = self.dry_run(&inputs)?;
        progress.detail(&format!(
            "{} tokens, {ops} ops, {:.3} TFLOP, {:.1} MiB of working memory",
            inputs.plan.tokens(),
            flops as f64 / 1e12,
            bytes as f64 / 1_048_576.0
        ));
        let Self { backend, stages, store, shapes, kept: results, working, .. } = self;
        let (be, mut ws) = (backend.as_mut(), Arena::new(Region::Arena));
        // Should this fail, nothing is left of what was there.
        let before = std::mem::take(working);
        be.reserve(bytes)?;
        *working = bytes.max(before);
        // What a job that failed left is not of these images.
        be.take_saturated()?;
        store.load_text(&mut stages.text, be, progress)?;

        let (known, config, precision) = (shapes.tables(&inputs), &stages.transformer_config, store.options.precision);
        let noise_of = |seed: u64| initial_noise(job, seed, precision);
        let (prompts, (tables, first)) = threads::join(
            || stages.encode_prompts(be, &mut ws, &inputs, results, progress),
            || {
                let tables = known.unwrap_or_else(|| Arc::new(Tables::new(config, &inputs)));
                (tables, job.seeds.first().map(|&seed| noise_of(seed)))
            },
        );
        let prompts = prompts?;
        shapes.keep_tables(&inputs, &tables);
        let Some(first) = first else {
            progress.end();
            return Ok(());
        };
        let canvas = stages.place_canvas(be, &mut ws, &inputs, &tables, &first)?;
        // If the transformer is still to be loaded, loading overlaps with encoding the prompts, so nothing waits for them here.
        if store.transformer {
            inputs.check_prompts(be, prompts.counts)?;
            progress.end();
        } else {
            progress.end();
            store.load_transformer(&mut stages.image, be, progress)?;
            inputs.check_prompts(be, prompts.counts)?;
        }
        if !job.references.is_empty() {
            store.load_vae(be)?;
        }
        let load_vae = &mut |be: &mut dyn Backend| store.load_vae(be);
        // Zeros would be pages that the system provides one by one when the device's copy arrives.
        let pixel_buffer = &|| vec![u8::MAX; 3 * job.size.width() * job.size.height()];
        let (seeds, tables, noise_of) = (&*job.seeds, &*tables, &noise_of);
        let images = Images { canvas, tables, seeds, first, noise_of, kept: results, load_vae, pixel_buffer };
        stages.denoise_and_decode(be, &mut ws, &inputs, prompts.encoded, images, progress, &mut |seed, mut values| {
            let (pixels, width, height) = (std::mem::take(&mut values.pixels), job.size.width(), job.size.height());
            let saturated = values.saturated;
            let record = job.record.then(|| values.into_record(&inputs.prompt, job.size));
            sink(GeneratedImage { seed, image: Image { width, height, pixels }, record, saturated })
        })
    }
}

/// A model's networks, placed on a backend.
pub struct Stages {
    transformer_config: TransformerConfig,
    text_config: TextConfig,
    text: TextSide,
    image: ImageSide,
    /// Element type of activations.
    activations: DType,
}

/// Prompts whose encoding was issued.
struct Prompts {
    encoded: Encoded,
    /// The number of values that are not finite, one per prompt.
    counts: Reading,
}

/// Encoded prompts in the arena.
struct Encoded {
    context: Tensor,
    negative: Option<Tensor>,
    /// Holds the prompt embeddings if the job asks for a record.
    values: Values,
}

/// What the images of a job are denoised in.
#[derive(Clone, Copy)]
struct Canvas {
    rope: Tensor,
    latents: Tensor,
}

/// The images of a job, and what the host prepares for them.
struct Images<'a> {
    /// Holds the RoPE table and the noise of the first image.
    canvas: Canvas,
    tables: &'a Tables,
    seeds: &'a [u64],
    /// The noise of the first image.
    first: Cow<'a, [f32]>,
    /// Draws the noise of a seed.
    noise_of: &'a (dyn Fn(u64) -> Cow<'a, [f32]> + Sync),
    /// Results of earlier jobs.
    kept: &'a mut Kept,
    /// Loads the VAE where that has not been done; a device that runs on its own is denoising meanwhile.
    load_vae: &'a mut dyn FnMut(&mut dyn Backend) -> Result<()>,
    /// Allocates memory for the pixels of an image, none in a dry run.
    pixel_buffer: &'a dyn Fn() -> Vec<u8>,
}

impl Stages {
    /// Places a model's networks without loading them, for a backend with these GEMMs. Also returns how many bytes their weights
    /// take, and how many of those even a backend that reads files in place has to copy.
    pub fn place(
        configs: &Configs,
        sources: PerPart<Option<&Weights>>,
        options: LoadOptions,
        gemms: GemmFormats,
    ) -> Result<(Self, Sizes, Sizes)> {
        let (text, image, sizes, copied) = Placing { configs, sources, options, real: false }.both(gemms)?;
        let (transformer_config, text_config) = (configs.transformer.clone(), configs.text_encoder.clone());
        let activations = options.precision.activations();
        Ok((Self { transformer_config, text_config, text, image, activations }, sizes, copied))
    }

    /// Bytes of the token embeddings, which stay in host memory.
    pub fn table_bytes(&self) -> u64 {
        self.text.encoder.table_bytes()
    }

    /// The formats of the linear layers and of attention.
    pub fn formats(&self) -> Formats {
        Formats {
            layers: self.text.formats.iter().chain(&self.image.formats).cloned().collect(),
            attention: self.image.transformer.attention_formats().cloned().collect(),
            accumulate: None,
        }
    }

    /// Runs the stages of one image on the dry-run backend. Returns the bytes of the arena they need.
    pub fn dry_run(&self, plan: &mut Plan, inputs: &Inputs<'_>, progress: &dyn Progress) -> Result<u64> {
        let _span = trace::span("dry run");
        let mut ws = Arena::new(Region::Arena);
        // A plan takes no values, so none are computed.
        let (tables, first, noise_of) = (&Tables::default(), Cow::default(), &|_| Cow::default());
        let kept = &mut Kept::default();
        let Prompts { encoded, counts } = self.encode_prompts(plan, &mut ws, inputs, kept, progress)?;
        let canvas = self.place_canvas(plan, &mut ws, inputs, tables, &first)?;
        inputs.check_prompts(plan, counts)?;
        progress.end();
        let images =
            Images { canvas, tables, seeds: &[0], first, noise_of, kept, load_vae: &mut |_| Ok(()), pixel_buffer: &Vec::new };
        self.denoise_and_decode(plan, &mut ws, inputs, encoded, images, progress, &mut |_, _| Ok(()))?;
        Ok(ws.peak().max(plan.arena_bytes))
    }

    /// The first part of the stages: issues the encoding of the prompts, whose phase ends when their counts are there.
    fn encode_prompts(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        kept: &mut Kept,
        progress: &dyn Progress,
    ) -> Result<Prompts> {
        progress.begin(Phase::Encode, 1 + u64::from(inputs.negative.is_some()));
        let mut values = Values::default();
        // There is one count for the prompt and one for the negative prompt.
        let counts = ws.alloc(2, 1, DType::F32)?;
        let (context, embeds) = self.encode_prompt(be, ws, inputs, &inputs.prompt, counts.rows(0..1), kept)?;
        values.prompt_embeds = embeds;
        progress.advance(1);
        let mut negative = None;
        if let Some(tokens) = &inputs.negative {
            let (context, embeds) = self.encode_prompt(be, ws, inputs, tokens, counts.rows(1..2), kept)?;
            values.negative_prompt_embeds = Some(embeds);
            negative = Some(context);
        }
        let counts = be.begin_read(counts.rows(0..1 + usize::from(negative.is_some())))?;
        Ok(Prompts { encoded: Encoded { context, negative, values }, counts })
    }

    /// The second: writes what the host has prepared, while the prompts may still be encoded.
    fn place_canvas(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        tables: &Tables,
        noise: &[f32],
    ) -> Result<Canvas> {
        let rope = ws.alloc(inputs.plan.tokens(), HEAD_DIM, DType::F32)?;
        let latents = ws.alloc(inputs.plan.canvas().len(), self.transformer_config.channels, DType::F32)?;
        be.write(rope, &tables.rope)?;
        be.write(latents, noise)?;
        Ok(Canvas { rope, latents })
    }

    /// The third: encodes the references, then denoises and decodes one image per seed.
    #[allow(clippy::too_many_arguments)]
    fn denoise_and_decode(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        Encoded { context, negative, values: mut shared }: Encoded,
        Images { canvas: Canvas { rope, latents }, tables, seeds, first, noise_of, kept, load_vae, pixel_buffer }: Images<'_>,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(u64, Values) -> Result<()>,
    ) -> Result<()> {
        let (job, plan) = (inputs.job, &inputs.plan);
        let schedule = &inputs.schedule;
        let table = self.image.transformer.modulations(be, ws, schedule.steps() + 1, &tables.times, job.guidance)?;
        let modulation = self.image.transformer.modulation_slot(ws)?;

        let (mut tokens, mut cache) = (Vec::new(), Vec::new());
        if !job.references.is_empty() {
            progress.begin(Phase::References, (job.references.len() + usize::from(inputs.cached)) as u64);
            let source = |input: &ReferenceInput| Source::reference(input.grid, &input.pixels);
            let sources: Vec<Source> = job.references.iter().filter(|_| kept.is_on()).map(source).collect();
            tokens = self.encode_references(be, ws, inputs, kept, &sources, &mut shared.references, progress)?;
            if inputs.cached {
                let rows = rope.rows(plan.canvas().end..plan.tokens());
                cache = self.image.transformer.reference_cache(ws, rows.rows)?;
                let key_values: Vec<Tensor> = cache.iter().flat_map(|segment| [segment.k, segment.v]).collect();
                let source = kept.is_on().then_some(Source::KeyValues(sources));
                kept.copy_or(be, source, &key_values, |be| {
                    self.image.transformer.select(be, modulation, table, schedule.steps())?;
                    self.image.transformer.fill_reference_cache(be, ws, &cache, &tokens, rows, modulation)
                })?;
                be.synchronize()?;
                progress.advance(1);
            }
            progress.end();
        }
        let references = if inputs.cached { ReferenceTokens::Cached(&cache) } else { ReferenceTokens::InSequence(&tokens) };
        let [velocity, other] = {
            let mut alloc = || ws.alloc(latents.rows, latents.cols, latents.dtype);
            [alloc()?, alloc()?]
        };
        let image = ws.alloc(job.size.width() * job.size.height(), 3, DType::F32)?;
        let pixels = ws.alloc(image.rows, image.cols, DType::U8)?;
        // One for each step, and one for the decoded image.
        let counts = ws.alloc(schedule.steps() + 1, 1, DType::F32)?;
        let count = |stage: usize| counts.rows(stage..stage + 1);

        let mut drawn = Some(first);
        for (index, &seed) in seeds.iter().enumerate() {
            let noise = drawn.take().unwrap_or_else(|| noise_of(seed));
            if index > 0 {
                be.write(latents, &noise)?;
            }
            let one_image = || {
                let mut values = shared.clone();
                if job.record {
                    values.latents.push(noise.into_owned());
                }
                let (mut checks, mut buffer) = (Checks::new(inputs), None);
                progress.begin(Phase::Denoise, schedule.steps() as u64);
                for i in 0..schedule.steps() {
                    self.image.transformer.select(be, modulation, table, i)?;
                    let step = StepInput { plan, rope, context, latents, references, modulation, velocity };
                    self.image.transformer.step(be, ws, StepKey("prompt"), step)?;
                    if let Some(context) = negative {
                        let step = StepInput { context, velocity: other, ..step };
                        self.image.transformer.step(be, ws, StepKey("negative"), step)?;
                        scope(be, ws, |be, ws| {
                            let guided = ws.alloc(velocity.rows, velocity.cols, velocity.dtype)?;
                            be.run(Op::Guidance { out: guided, cond: velocity, uncond: other, scale: job.guidance })?;
                            be.run(Op::Euler { latents, velocity: guided, dt: schedule.dt(i) })
                        })?;
                    } else {
                        be.run(Op::Euler { latents, velocity, dt: schedule.dt(i) })?;
                    }
                    load_vae(be)?;
                    // The VAE's weights are checked before they are used: that is cheap, and a fault found later would waste all
                    // steps.
                    let parts = &[Part::Transformer, Part::Vae];
                    checks.begin(be, count(i), latents, parts, format!("denoising step {} of {}", i + 1, schedule.steps()))?;
                    if job.record {
                        values.latents.push(download(be, latents)?);
                    }
                    buffer.get_or_insert_with(pixel_buffer);
                    // The host is one step ahead of a device that runs on its own, so that it never waits for work.
                    advance(progress, checks.settle(be, 1)?);
                }
                advance(progress, checks.settle(be, 0)?);
                progress.end();

                progress.begin(Phase::Decode, 1);
                // A job without steps only decodes.
                load_vae(be)?;
                self.image.vae.decode(be, ws, image, latents, job.size.grid())?;
                checks.begin(be, count(schedule.steps()), image, &[], "decoding".into())?;
                be.run(Op::Pixels { out: pixels, x: image })?;
                values.pixels = buffer.unwrap_or_else(pixel_buffer);
                be.read_bytes(pixels, &mut values.pixels)?;
                checks.settle(be, 0)?;
                if job.record {
                    values.image = download(be, image)?;
                }
                values.saturated = be.take_saturated()?;
                progress.end();
                sink(seed, values)
            };
            match seeds.get(index + 1) {
                Some(&next) => {
                    let (done, next) = threads::join(one_image, || noise_of(next));
                    done?;
                    drawn = Some(next);
                }
                None => one_image()?,
            }
        }
        Ok(())
    }

    /// Encodes a prompt to the transformer's context. Also returns the prompt embeddings if the job asks for a record. `count`
    /// becomes the number of context values that are not finite.
    fn encode_prompt(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        tokens: &Tokens,
        count: Tensor,
        kept: &mut Kept,
    ) -> Result<(Tensor, Vec<f32>)> {
        // Prompts are padded to the length that the model was trained with.
        let length = self.text_config.max_tokens;
        let context = self.text.context.slot(ws, length)?;
        let mut embeds = Vec::new();
        // A record has the embeddings as well.
        let source = (kept.is_on() && !inputs.job.record).then(|| Source::Prompt(tokens.ids.clone(), tokens.real));
        kept.copy_or(be, source, &[context], |be| {
            scope(be, ws, |be, ws| {
                let features = ws.alloc(length, self.text_config.features(), self.activations)?;
                self.text.encoder.forward(be, ws, features, tokens)?;
                if inputs.job.record {
                    embeds = download(be, features)?;
                }
                self.text.context.run(be, context, features)
            })
        })?;
        be.run(Op::NonFinite { count, x: context })?;
        Ok((context, embeds))
    }

    /// Encodes the reference images to tokens, and keeps their values in `record` if the job asks for one. `sources` are what they are
    /// kept by, if they are.
    #[allow(clippy::too_many_arguments)]
    fn encode_references(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        kept: &mut Kept,
        sources: &[Source],
        record: &mut Vec<Vec<f32>>,
        progress: &dyn Progress,
    ) -> Result<Vec<Tensor>> {
        let (references, act) = (&inputs.job.references, self.activations);
        let (mut all, mut checks) = (Vec::with_capacity(references.len()), Checks::new(inputs));
        let counts = ws.alloc(references.len(), 1, DType::F32)?;
        for (j, ReferenceInput { grid, pixels }) in references.iter().enumerate() {
            let tokens = ws.alloc(grid.tokens(), self.transformer_config.channels, act)?;
            kept.copy_or(be, sources.get(j).cloned(), &[tokens], |be| {
                scope(be, ws, |be, ws| {
                    let image = ws.alloc(PATCH * PATCH * grid.tokens(), 3, act)?;
                    be.write(image, pixels)?;
                    self.image.vae.encode(be, ws, tokens, image, *grid)
                })
            })?;
            checks.begin(be, counts.rows(j..j + 1), tokens, &[Part::Vae], format!("encoding reference {}", j + 1))?;
            if inputs.job.record {
                record.push(download(be, tokens)?);
            }
            advance(progress, checks.settle(be, 1)?);
            all.push(tokens);
        }
        advance(progress, checks.settle(be, 0)?);
        Ok(all)
    }
}

/// Reports what is done, if anything is: the device may still be busy with all of it.
fn advance(progress: &dyn Progress, done: u64) {
    if done > 0 {
        progress.advance(done);
    }
}
