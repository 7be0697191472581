//! The stages of an image, written once for every backend: encode the prompts, encode the references, then denoise and decode the
//! latents.

use super::branches::Branches;
use super::formats::Formats;
use super::inputs::{Checks, Inputs, download};
use super::job::{LoadOptions, ReferenceInput, Start};
use super::prepared::Tables;
use super::preview::{PreviewBuffers, Previews};
use super::result_cache::{ResultCache, Source};
use super::values::Values;
use super::weights::{ImageSide, Sizes, TextSide, WeightPlacement};
use crate::adapter::Adapters;
use crate::backend::{Backend, DryRun, GemmFormats, Op, Reading, StepKey, scope};
use crate::checkpoint::Weights;
use crate::component::{Component, PerComponent};
use crate::config::{Configs, HEAD_DIM, PreviewTable, TextConfig, TransformerConfig};
use crate::error::Result;
use crate::model::{LayerFormat, ReferenceTokens, StepInput};
use crate::progress::{Phase, Progress};
use crate::sequence::PATCH;
use crate::tensor::{Arena, DType, Region, Tensor};
use crate::threads;
use crate::tokenizer::Tokens;
use crate::trace;
use std::borrow::Cow;

/// A model's networks, placed on a backend.
pub struct Stages {
    pub transformer_config: TransformerConfig,
    text_config: TextConfig,
    pub text: TextSide,
    pub image: ImageSide,
    /// Element type of activations.
    activations: DType,
    /// The colors of latents, if they are known.
    preview: Option<PreviewTable>,
}

/// Prompts whose encoding is issued.
pub struct Prompts {
    pub encoded: Encoded,
    /// The number of non-finite values of each prompt.
    pub counts: Reading,
}

/// Encoded prompts in the arena.
pub struct Encoded {
    context: Tensor,
    negative: Option<Tensor>,
    /// Holds the prompt embeddings if the job asks for a record.
    values: Values,
}

/// The buffers in which the images of a job are denoised.
#[derive(Clone, Copy)]
pub struct Canvas {
    rope: Tensor,
    latents: Tensor,
    /// The noise of an image. It is the latents themselves where denoising starts from pure noise.
    noise: Tensor,
}

/// Where the images of a job start, on the device.
#[derive(Clone, Copy)]
struct StartTensors {
    init: Tensor,
    keep: Option<Tensor>,
}

/// The images of a job, and the inputs that the host prepares for them.
pub struct Images<'a> {
    /// Holds the RoPE table and the noise of the first image.
    pub canvas: Canvas,
    pub tables: &'a Tables,
    pub seeds: &'a [u64],
    /// The noise of the first image.
    pub first: Cow<'a, [f32]>,
    /// Draws the noise of a seed.
    pub noise_of: &'a (dyn Fn(u64) -> Cow<'a, [f32]> + Sync),
    /// Results of earlier jobs.
    pub cache: &'a mut ResultCache,
    /// Loads the VAE if it is not loaded. A device that runs asynchronously is denoising meanwhile.
    pub load_vae: &'a mut dyn FnMut(&mut dyn Backend) -> Result<()>,
    /// Allocates memory for the pixels of an image. Returns none in a dry run.
    pub pixel_buffer: &'a dyn Fn() -> Vec<u8>,
}

impl Stages {
    /// Places a model's networks without loading them, for a backend with these GEMMs. Also returns the bytes of their weights,
    /// and how many of those bytes even a backend that reads files in place has to copy.
    pub fn place(
        configs: &Configs,
        sources: PerComponent<Option<&Weights>>,
        options: LoadOptions,
        adapters: &Adapters,
        gemms: GemmFormats,
    ) -> Result<(Self, Sizes, Sizes)> {
        let (text, image, sizes, copied) =
            WeightPlacement { configs, sources, options, adapters, merged_at: 0, real: false }.both(gemms)?;
        let (transformer_config, text_config) = (configs.transformer.clone(), configs.text_encoder.clone());
        let activations = options.precision.activations();
        let preview = configs.vae.preview.clone();
        Ok((Self { transformer_config, text_config, text, image, activations, preview }, sizes, copied))
    }

    /// Bytes of the token embeddings, which stay in host memory.
    pub fn table_bytes(&self) -> u64 {
        self.text.encoder.table_bytes()
    }

    /// The formats of the linear layers.
    pub fn layers(&self) -> impl Iterator<Item = &LayerFormat> {
        self.text.formats.iter().chain(&self.image.formats)
    }

    /// Attaches LoRA branches to the linear layers.
    pub fn attach(&mut self, branches: &Branches) {
        self.text.attach(branches);
        self.image.attach(branches);
    }

    /// The formats of the linear layers and of attention.
    pub fn formats(&self) -> Formats {
        Formats {
            layers: self.layers().cloned().collect(),
            attention: self.image.transformer.attention_formats().cloned().collect(),
            accumulate: None,
        }
    }

    /// Runs the stages of one image on the dry-run backend. Returns the arena bytes that they need.
    pub fn dry_run(&self, plan: &mut DryRun, inputs: &Inputs<'_>, progress: &dyn Progress) -> Result<u64> {
        let _span = trace::span("dry run");
        let peak = self.walk(plan, inputs, progress)?;
        Ok(peak.max(plan.arena_bytes))
    }

    /// Runs the stages of one image on a backend that computes nothing. Returns the arena bytes that they took.
    pub fn walk(&self, be: &mut dyn Backend, inputs: &Inputs<'_>, progress: &dyn Progress) -> Result<u64> {
        let mut ws = Arena::new(Region::Arena);
        // Nothing reads the values, so none are computed.
        let (tables, first, noise_of) = (&Tables::default(), Cow::default(), &|_| Cow::default());
        let cache = &mut ResultCache::default();
        let Prompts { encoded, counts } = self.encode_prompts(be, &mut ws, inputs, cache, progress)?;
        let canvas = self.place_canvas(be, &mut ws, inputs, tables, &first)?;
        inputs.check_prompts(be, counts)?;
        progress.end();
        let images =
            Images { canvas, tables, seeds: &[0], first, noise_of, cache, load_vae: &mut |_| Ok(()), pixel_buffer: &Vec::new };
        self.denoise_and_decode(be, &mut ws, inputs, encoded, images, progress, &mut |_, _| Ok(()))?;
        Ok(ws.peak())
    }

    /// First part of the stages: issues the encoding of the prompts. That phase ends when the counts arrive.
    pub fn encode_prompts(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        cache: &mut ResultCache,
        progress: &dyn Progress,
    ) -> Result<Prompts> {
        progress.begin(Phase::Encode, 1 + u64::from(inputs.negative.is_some()));
        let mut values = Values::default();
        // One count for the prompt and one for the negative prompt.
        let counts = ws.alloc(2, 1, DType::F32)?;
        let (context, embeds) = self.encode_prompt(be, ws, inputs, &inputs.prompt, counts.rows(0..1), cache)?;
        values.record.prompt_embeds = embeds;
        progress.advance(1);
        let mut negative = None;
        if let Some(tokens) = &inputs.negative {
            let (context, embeds) = self.encode_prompt(be, ws, inputs, tokens, counts.rows(1..2), cache)?;
            values.record.negative_prompt_embeds = Some(embeds);
            negative = Some(context);
        }
        let counts = Reading::begin(be, counts.rows(0..1 + usize::from(negative.is_some())))?;
        Ok(Prompts { encoded: Encoded { context, negative, values }, counts })
    }

    /// Second part of the stages: writes what the host has prepared, while the prompts may still be encoded.
    pub fn place_canvas(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        tables: &Tables,
        noise: &[f32],
    ) -> Result<Canvas> {
        let rope = ws.alloc(inputs.plan.tokens(), HEAD_DIM, DType::F32)?;
        let latents = ws.alloc(inputs.plan.canvas().len(), self.transformer_config.channels, DType::F32)?;
        let pure = match inputs.start() {
            Some(_) => ws.alloc(latents.rows, latents.cols, DType::F32)?,
            None => latents,
        };
        be.write(rope, &tables.rope)?;
        be.write(pure, noise)?;
        Ok(Canvas { rope, latents, noise: pure })
    }

    /// Third part of the stages: encodes the init image and the references, then denoises and decodes one image per seed.
    #[allow(clippy::too_many_arguments)]
    pub fn denoise_and_decode(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        Encoded { context, negative, values: mut shared }: Encoded,
        Images { canvas: Canvas { rope, latents, noise: pure }, tables, seeds, first, noise_of, cache, load_vae, pixel_buffer }: Images<'_>,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(u64, Values) -> Result<()>,
    ) -> Result<()> {
        let (job, plan) = (inputs.job, &inputs.plan);
        let schedule = &inputs.schedule;
        let table = self.image.transformer.modulations(be, ws, schedule.steps() + 1, &tables.times, job.guidance)?;
        let modulation = self.image.transformer.modulation_slot(ws)?;

        let (mut tokens, mut key_values, mut init) = (Vec::new(), Vec::new(), None);
        let images = inputs.images();
        if !images.is_empty() {
            progress.begin(Phase::References, (images.len() + usize::from(inputs.cached)) as u64);
            let source = |input: &&ReferenceInput| Source::reference(input.grid, &input.pixels);
            let mut sources: Vec<Source> = images.iter().filter(|_| cache.is_on()).map(source).collect();
            tokens = self.encode_images(be, ws, inputs, cache, (&images, &sources), &mut shared.record.references, progress)?;
            if inputs.init().is_some() {
                init = tokens.first().copied();
                shared.record.init = shared.record.references.first().cloned();
                // It is a reference only if asked for.
                if !job.start.as_ref().is_some_and(|start| start.is_reference) {
                    tokens.remove(0);
                    sources.drain(..1.min(sources.len()));
                    shared.record.references.drain(..1.min(shared.record.references.len()));
                }
            }
            if inputs.cached {
                let rows = rope.rows(plan.canvas().end..plan.tokens());
                key_values = self.image.transformer.reference_cache(ws, rows.rows)?;
                let held: Vec<Tensor> = key_values.iter().flat_map(|segment| [segment.k, segment.v]).collect();
                let source = cache.is_on().then(|| Source::KeyValues(sources, inputs.adapters.clone()));
                cache.copy_or(be, source, &held, |be| {
                    self.image.transformer.select(be, modulation, table, schedule.steps())?;
                    self.image.transformer.fill_reference_cache(be, ws, &key_values, &tokens, rows, modulation)
                })?;
                be.synchronize()?;
                progress.advance(1);
            }
            progress.end();
        }
        shared.record.keep = inputs.start().and_then(|start| start.keep.clone());
        let start = match (inputs.start(), init) {
            (Some(start), Some(init)) => Some(place_start(be, ws, start, init)?),
            _ => None,
        };
        let references = if inputs.cached { ReferenceTokens::Cached(&key_values) } else { ReferenceTokens::InSequence(&tokens) };
        let [velocity, other] = {
            let mut alloc = || ws.alloc(latents.rows, latents.cols, latents.dtype);
            [alloc()?, alloc()?]
        };
        let image = ws.alloc(job.size.width() * job.size.height(), 3, DType::F32)?;
        let pixels = ws.alloc(image.rows, image.cols, DType::U8)?;
        // One count for each step, and one for the decoded image.
        let counts = ws.alloc(schedule.steps() + 1, 1, DType::F32)?;
        let count = |stage: usize| counts.rows(stage..stage + 1);

        // Without a negative prompt nothing uses `other`, and with one nothing needs it after guidance.
        let buffers = PreviewBuffers { clean: other, image, pixels, grid: job.size.grid() };
        let mut previews = Previews::wanted(progress, self.preview.as_ref(), &self.image.vae, buffers);

        let mut drawn = Some(first);
        for (index, &seed) in seeds.iter().enumerate() {
            let noise = drawn.take().unwrap_or_else(|| noise_of(seed));
            if index > 0 {
                be.write(pure, &noise)?;
            }
            let one_image = || {
                let mut values = shared.clone();
                if let Some(StartTensors { init, .. }) = start {
                    be.run(Op::Renoise { latents, init, noise: pure, keep: None, sigma: schedule.sigma(0) })?;
                }
                if job.record {
                    values.record.noise = noise.into_owned();
                    values.record.latents.push(download(be, latents)?);
                }
                let (mut checks, mut buffer) = (Checks::new(inputs), None);
                progress.begin(Phase::Denoise, schedule.steps() as u64);
                // Steps that have ended well.
                let mut done = 0;
                let mut settle =
                    |be: &mut dyn Backend, checks: &mut Checks<'_>, previews: &mut Option<Previews<'_>>, most: usize| {
                        let passed = checks.settle(be, most)?;
                        advance(progress, passed);
                        done += passed as usize;
                        previews.as_mut().map_or(Ok(()), |previews| previews.show(be, done))
                    };
                for i in 0..schedule.steps() {
                    if previews.as_ref().is_some_and(|previews| previews.needs_room(i + 1, schedule.steps())) {
                        settle(be, &mut checks, &mut previews, 0)?;
                    }
                    // The last step's preview is the image.
                    let preview = previews
                        .as_mut()
                        .filter(|_| i + 1 < schedule.steps())
                        .and_then(|previews| previews.begin_step(i + 1, schedule.steps()).then_some(previews));
                    let advance_latents = |be: &mut dyn Backend, velocity: Tensor| {
                        be.run(Op::Euler { latents, velocity, dt: schedule.dt(i) })?;
                        preview.as_ref().map_or(Ok(()), |p| p.predict(be, latents, velocity, schedule.sigma(i + 1)))
                    };
                    self.image.transformer.select(be, modulation, table, i)?;
                    let step = StepInput { plan, rope, context, latents, references, modulation, velocity };
                    self.image.transformer.step(be, ws, StepKey("prompt"), step)?;
                    if let Some(context) = negative {
                        let step = StepInput { context, velocity: other, ..step };
                        self.image.transformer.step(be, ws, StepKey("negative"), step)?;
                        scope(be, ws, |be, ws| {
                            let guided = ws.alloc(velocity.rows, velocity.cols, velocity.dtype)?;
                            be.run(Op::Guidance { out: guided, cond: velocity, uncond: other, scale: job.guidance })?;
                            advance_latents(be, guided)
                        })?;
                    } else {
                        advance_latents(be, velocity)?;
                    }
                    if let Some(StartTensors { init, keep: Some(keep) }) = start {
                        let sigma = schedule.sigma(i + 1);
                        let keep = Some(keep);
                        be.run(Op::Renoise { latents, init, noise: pure, keep, sigma })?;
                        if let Some(preview) = &preview {
                            be.run(Op::Renoise { latents: preview.clean(), init, noise: pure, keep, sigma: 0.0 })?;
                        }
                    }
                    load_vae(be)?;
                    // The VAE's weights are checked before they are used. The check is cheap, and a fault found later would waste
                    // all steps.
                    let parts = &[Component::Transformer, Component::Vae];
                    checks.begin(be, count(i), latents, parts, format!("denoising step {} of {}", i + 1, schedule.steps()))?;
                    if job.record {
                        values.record.latents.push(download(be, latents)?);
                    }
                    buffer.get_or_insert_with(pixel_buffer);
                    if let Some(preview) = preview {
                        preview.draw(be, ws, i + 1)?;
                    }
                    // The host stays one step ahead of an asynchronous device, so the device never waits for work.
                    settle(be, &mut checks, &mut previews, 1)?;
                }
                settle(be, &mut checks, &mut previews, 0)?;
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
                    values.record.image = download(be, image)?;
                }
                values.saturated = be.take_saturated()?;
                progress.end();
                sink(seed, values)?;
                previews.iter_mut().for_each(Previews::finish);
                Ok(())
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

    /// Encodes a prompt to the transformer's context. Also returns the prompt embeddings if the job asks for a record. Sets
    /// `count` to the number of context values that are not finite.
    fn encode_prompt(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        tokens: &Tokens,
        count: Tensor,
        cache: &mut ResultCache,
    ) -> Result<(Tensor, Vec<f32>)> {
        // Prompts are padded to the length that the model was trained with.
        let length = self.text_config.max_tokens;
        let context = self.text.context.slot(ws, length)?;
        let mut embeds = Vec::new();
        // A record needs the embeddings as well, which are not cached.
        let source = (cache.is_on() && !inputs.job.record).then(|| Source::Prompt(tokens.clone(), inputs.adapters.clone()));
        cache.copy_or(be, source, &[context], |be| {
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

    /// Encodes images to tokens, and stores their values in `record` if the job asks for one. `sources` are the cache keys of the
    /// images, if any.
    #[allow(clippy::too_many_arguments)]
    fn encode_images(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        inputs: &Inputs<'_>,
        cache: &mut ResultCache,
        (images, sources): (&[&ReferenceInput], &[Source]),
        record: &mut Vec<Vec<f32>>,
        progress: &dyn Progress,
    ) -> Result<Vec<Tensor>> {
        let (mut all, mut checks) = (Vec::with_capacity(images.len()), Checks::new(inputs));
        let counts = ws.alloc(images.len(), 1, DType::F32)?;
        for (j, ReferenceInput { grid, pixels }) in images.iter().enumerate() {
            let tokens = ws.alloc(grid.tokens(), self.transformer_config.channels, self.activations)?;
            cache.copy_or(be, sources.get(j).cloned(), &[tokens], |be| {
                scope(be, ws, |be, ws| {
                    let image = ws.alloc(PATCH * PATCH * grid.tokens(), 3, self.activations)?;
                    be.write(image, pixels)?;
                    self.image.vae.encode(be, ws, tokens, image, *grid)
                })
            })?;
            checks.begin(be, counts.rows(j..j + 1), tokens, &[Component::Vae], inputs.stage_of_image(j))?;
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

/// Writes which tokens keep the init image.
fn place_start(be: &mut dyn Backend, ws: &mut Arena, start: &Start, init: Tensor) -> Result<StartTensors> {
    let mut keep = None;
    if let Some(tokens) = &start.keep {
        let flags = ws.alloc(init.rows, 1, DType::F32)?;
        be.write(flags, &tokens.iter().map(|keep| f32::from(*keep)).collect::<Vec<_>>())?;
        keep = Some(flags);
    }
    Ok(StartTensors { init, keep })
}

/// Reports progress if there is any: the device may still be busy with all the work.
fn advance(progress: &dyn Progress, done: u64) {
    if done > 0 {
        progress.advance(done);
    }
}
