//! The engine: a model's weights on a backend, and the jobs that run there. Each job first runs on the dry-run backend, which
//! measures how much memory its stages need.

use super::branches::{SideBranches, adapters_of};
use super::inputs::Inputs;
use super::job::{GeneratedImage, Job, LoadOptions};
use super::open::OpenModel;
use super::prepared::{ShapeCache, Tables, WorkNeeded, initial_noise};
use super::preview::Unseen;
use super::result_cache::ResultCache;
use super::stages::{Canvas, Encoded, Images, Prompts, Stages};
use super::weights::Store;
use crate::backend::{Backend, DryRun};
use crate::config::Variant;
use crate::error::{Error, Remedy, Result};
use crate::image::Image;
use crate::progress::{Progress, Silent, Traced};
use crate::tensor::{Arena, Region};
use crate::threads;
use crate::tokenizer::{self, Padding, Tokenizer, Tokens};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A model on a backend, ready to run.
pub struct Engine {
    backend: Box<dyn Backend>,
    stages: Stages,
    store: Store,
    side: SideBranches,
    shapes: ShapeCache,
    cache: ResultCache,
    /// Bytes of working memory that the backend holds.
    working: u64,
    tokenizer: Tokenizer,
    variant: Variant,
    name: String,
}

/// The input of a job's denoising.
struct Start<'a> {
    encoded: Encoded,
    canvas: Canvas,
    tables: Arc<Tables>,
    /// The noise of the first image.
    first: Cow<'a, [f32]>,
}

impl Engine {
    /// Reserves memory for a model's weights on a backend and loads the weights that encode prompts. The others are loaded with
    /// the first image.
    pub fn load(mut backend: Box<dyn Backend>, model: OpenModel, options: LoadOptions, progress: &dyn Progress) -> Result<Self> {
        let progress = &Traced::new(progress);
        let OpenModel { weights, tokenizer, configs, variant, name, adapters, read_ahead, .. } = model;
        let sources = weights.each_ref().map(Some);
        let (stages, sizes, _) = Stages::place(&configs, sources, options, &adapters, backend.gemm_formats())?;
        backend.reserve(Region::Weights, sizes.total(options.low_memory))?;
        let (files, branches, text, transformer, vae) = (Arc::new(weights), Arc::default(), false, false, false);
        let store = Store { files, configs, options, sizes, adapters, branches, text, transformer, vae, read_ahead };
        let mut engine = Self {
            backend,
            stages,
            store,
            side: SideBranches::default(),
            shapes: ShapeCache::default(),
            cache: ResultCache::default(),
            working: 0,
            tokenizer,
            variant,
            name,
        };
        engine.select(None)?;
        let Self { backend, stages, store, side, cache, .. } = &mut engine;
        // Adapters merged into weights need memory as well.
        side.upload(backend.as_mut(), &store.branches, cache)?;
        store.load_text(&mut stages.text, backend.as_mut(), progress)?;
        Ok(engine)
    }

    /// Attaches the LoRA branches of a job's adapters, or of the model's, to the layers. It does not upload them yet.
    fn select(&mut self, job: Option<&Job>) -> Result<()> {
        let Self { stages, store, side, .. } = self;
        let others = job.and_then(|job| job.adapters.as_deref());
        let (adapters, set) = adapters_of(others, &store.adapters, stages.layers())?;
        if set != store.branches.set {
            let branches = side.prepare((adapters, set), stages.layers(), store.options.precision)?;
            stages.attach(&branches);
            store.branches = branches;
        }
        Ok(())
    }

    /// The model's display name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The backend that the engine runs on.
    pub fn backend(&mut self) -> &mut dyn Backend {
        self.backend.as_mut()
    }

    /// Number of launches of each kernel so far, by kernel name. A backend without kernels has none. A captured launch counts
    /// once, however often it is replayed.
    pub fn launches(&mut self) -> Vec<(&'static str, u64)> {
        self.backend.cuda().map_or_else(Vec::new, |cuda| cuda.launches())
    }

    /// How the model was trained.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Sets the flag that cancels jobs. While it is true, jobs return [`Error::Interrupted`]. `None` removes it.
    pub fn set_cancel(&mut self, cancel: Option<Arc<AtomicBool>>) {
        self.backend.set_cancel(cancel);
    }

    /// Starts caching encoded prompts, references and their keys and values on the device. A job that hits the cache gives the same bytes
    /// as one that does not. The cache takes at most `most` bytes, and at most a quarter of what a job like `usual` leaves free.
    pub fn cache_results(&mut self, most: u64, usual: &Job) -> Result<()> {
        let inputs = self.inputs(usual, &Silent)?;
        let (branches, freed) = self.side.growth(&self.store.branches);
        let more = self.dry_run(&inputs)?.bytes.saturating_sub(self.working) + branches - freed;
        let spare = self.backend.available()?.map_or(u64::MAX, |free| free.saturating_sub(more));
        self.cache.reserve(self.backend.as_mut(), most.min(spare / 4))
    }

    /// Refuses a job whose working memory does not fit into the free memory and the memory that earlier jobs of this engine have
    /// left. The weights are loaded, or their memory is reserved.
    pub fn check_memory(&mut self, job: &Job) -> Result<()> {
        let inputs = self.inputs(job, &Silent)?;
        let working = self.dry_run(&inputs)?.bytes;
        // The existing memory is freed before more is allocated.
        let (working, freed) = if working > self.working { (working, self.working) } else { (0, 0) };
        let (branches, freed_branches) = self.side.growth(&self.store.branches);
        let need = working + branches;
        if need == 0 {
            return Ok(());
        }
        let Some(free) = self.backend.available()? else { return Ok(()) };
        let have = free.saturating_add(freed + freed_branches);
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

    /// Measures the work of a job, unless a job of the same shape was measured before.
    fn dry_run(&mut self, inputs: &Inputs<'_>) -> Result<WorkNeeded> {
        let Self { backend, stages, shapes, .. } = self;
        shapes.dry_run(inputs, || {
            let mut plan = DryRun::new(backend.gemm_formats());
            let bytes = stages.dry_run(&mut plan, inputs, &Silent)?;
            Ok(WorkNeeded { bytes, ops: plan.ops, flops: plan.flops })
        })
    }

    /// Derives the inputs of a job, and attaches its LoRA branches to the layers.
    fn inputs<'a>(&mut self, job: &'a Job, progress: &dyn Progress) -> Result<Inputs<'a>> {
        self.select(Some(job))?;
        let files = self.backend.reads_files().then(|| self.store.files.clone());
        Inputs::new(job, self.variant, &self.store.branches, files, |what, text| self.tokenize(job.padding, what, text, progress))
    }

    /// Tokenizes a text. `what` names the text in the warning that it is too long.
    fn tokenize(&self, padding: Padding, what: &str, text: &str, progress: &dyn Progress) -> Result<Tokens> {
        let config = &self.store.configs.text_encoder;
        let tokens = self.tokenizer.encode_padded(text, config.max_tokens, padding)?;
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
    pub fn plan(&mut self, job: &Job) -> Result<DryRun> {
        let mut plan = DryRun::new(self.backend.gemm_formats());
        let inputs = self.inputs(job, &Silent)?;
        self.stages.dry_run(&mut plan, &inputs, &Silent)?;
        Ok(plan)
    }

    /// Generates the images of a job and passes each to `sink` when it is done.
    pub fn generate(
        &mut self,
        job: &Job,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(GeneratedImage) -> Result<()>,
    ) -> Result<()> {
        let done = self.generate_images(job, progress, sink);
        if done.is_err() {
            // Cached results may be incomplete or not finite.
            self.cache.forget();
        }
        done
    }

    fn generate_images(
        &mut self,
        job: &Job,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(GeneratedImage) -> Result<()>,
    ) -> Result<()> {
        let (progress, mut ws) = (&Traced::new(progress), Arena::new(Region::Arena));
        let inputs = self.inputs(job, progress)?;
        self.prepare(&inputs, progress)?;
        match self.encode(&mut ws, &inputs, progress)? {
            Some(start) => self.denoise(&mut ws, &inputs, start, progress, sink),
            None => Ok(()),
        }
    }

    /// Reserves the memory of a job, finds its kernels and loads the text encoder.
    fn prepare(&mut self, inputs: &Inputs<'_>, progress: &dyn Progress) -> Result<()> {
        let WorkNeeded { bytes, ops, flops } = self.dry_run(inputs)?;
        progress.detail(&format!(
            "{} tokens, {ops} ops, {:.3} TFLOP, {:.1} MiB of working memory",
            inputs.plan.tokens(),
            flops as f64 / 1e12,
            bytes as f64 / 1_048_576.0
        ));
        let Self { backend, stages, store, side, shapes, cache, working, .. } = self;
        let be = backend.as_mut();
        side.upload(be, &store.branches, cache)?;
        // If this fails, the previous working memory is gone.
        let before = std::mem::take(working);
        be.reserve(Region::Arena, bytes)?;
        *working = bytes.max(before);
        if let Some(cuda) = be.cuda() {
            let previews = progress.wants_preview();
            let mut walk = |be: &mut dyn Backend| stages.walk(be, inputs, &Unseen(previews)).map(drop);
            shapes.preload_kernels(inputs, previews, || cuda.preload_kernels(&mut walk))?;
        }
        // Discards the count that a failed job left behind.
        be.take_saturated()?;
        store.load_text(&mut stages.text, be, progress)
    }

    /// Encodes the prompts while the host prepares the denoising inputs, if the job has seeds. Then loads the transformer.
    fn encode<'a>(&mut self, ws: &mut Arena, inputs: &Inputs<'a>, progress: &dyn Progress) -> Result<Option<Start<'a>>> {
        let Self { backend, stages, store, shapes, cache, .. } = self;
        let (be, job, known) = (backend.as_mut(), inputs.job, shapes.tables(inputs));
        let (config, precision) = (&stages.transformer_config, store.options.precision);
        let (prompts, (tables, first)) = threads::join(
            || stages.encode_prompts(be, ws, inputs, cache, progress),
            || {
                let tables = known.unwrap_or_else(|| Arc::new(Tables::new(config, inputs)));
                (tables, job.seeds.first().map(|&seed| initial_noise(job, seed, precision)))
            },
        );
        let Prompts { encoded, counts } = prompts?;
        shapes.keep_tables(inputs, &tables);
        let Some(first) = first else {
            progress.end();
            return Ok(None);
        };
        let canvas = stages.place_canvas(be, ws, inputs, &tables, &first)?;
        // If the transformer is not loaded yet, loading it overlaps with encoding the prompts, so nothing waits for them here.
        if store.transformer {
            inputs.check_prompts(be, counts)?;
            progress.end();
        } else {
            progress.end();
            store.load_transformer(&mut stages.image, be, progress)?;
            inputs.check_prompts(be, counts)?;
        }
        Ok(Some(Start { encoded, canvas, tables, first }))
    }

    /// Denoises and decodes the images, and loads the VAE.
    fn denoise<'a>(
        &mut self,
        ws: &mut Arena,
        inputs: &Inputs<'a>,
        Start { encoded, canvas, tables, first }: Start<'a>,
        progress: &dyn Progress,
        sink: &mut dyn FnMut(GeneratedImage) -> Result<()>,
    ) -> Result<()> {
        let Self { backend, stages, store, cache, .. } = self;
        let (be, job, precision) = (backend.as_mut(), inputs.job, store.options.precision);
        if !inputs.images().is_empty() {
            store.load_vae(be)?;
        }
        let load_vae = &mut |be: &mut dyn Backend| store.load_vae(be);
        // Zeros would be pages that the system provides one by one when the device's copy arrives.
        let pixel_buffer = &|| vec![u8::MAX; 3 * job.size.width() * job.size.height()];
        let (seeds, tables, noise_of) = (&*job.seeds, &*tables, &|seed: u64| initial_noise(job, seed, precision));
        let images = Images { canvas, tables, seeds, first, noise_of, cache, load_vae, pixel_buffer };
        stages.denoise_and_decode(be, ws, inputs, encoded, images, progress, &mut |seed, mut values| {
            let (pixels, width, height) = (std::mem::take(&mut values.pixels), job.size.width(), job.size.height());
            let saturated = values.saturated;
            let record = job.record.then(|| values.into_record(&inputs.prompt, job.size));
            let image = Image { width, height, pixels };
            let image = match job.start.as_ref().and_then(|start| start.paste.as_ref()) {
                Some(paste) => paste.over(image),
                None => image,
            };
            if progress.wants_preview().is_some() {
                progress.preview(inputs.schedule.steps(), image.clone());
            }
            sink(GeneratedImage { seed, image, record, saturated })
        })
    }
}
