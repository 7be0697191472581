//! `kiln generate`: its request, and the run that carries it out.

use super::args::{FileArgs, ImageOptions, LoraArgs, ModelArgs, NoiseArg, PreviewArgs, PromptArgs, RunArgs, ShowArgs, within};
use super::help::{EXAMPLE, EXAMPLES};
use super::names::Target;
use super::outputs::{LaterOrigin, Outputs, extension, file_format};
use super::previews::{PreviewRequest, Watched};
use super::report::{announce_run, list_kernels, unknown_words_note};
use super::request::{ImageRequest, Setup, random_seed};
use super::session::Session;
use super::settings::Settings;
use super::trace::TraceFile;
use super::writer::{ImageSink, Pending, Writer};
use super::{Cli, Process, Subcommand};
use crate::terminal::{Terminal, Verbosity};
use clap::{Args, Parser};
use kiln::error::{Error, Result};
use kiln::locate::Environment;
use kiln::progress::Progress;
use kiln::text::shown;
use kiln::{threads, trace};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// Generate images; `kiln PROMPT` is short for this
#[derive(Args, Debug)]
#[command(override_usage = "kiln generate [OPTIONS] [PROMPT]", after_help = EXAMPLE, after_long_help = EXAMPLES)]
// With this the error for `--seed -1` says what a seed is, and not that there is no option `-1`.
#[command(allow_negative_numbers = true)]
pub struct GenerateArgs {
    /// What the image shows
    #[command(flatten)]
    pub prompt: PromptArgs,

    /// Everything else
    #[command(flatten)]
    pub options: GenerateOptions,
}

/// The flags of `kiln generate`, other than the prompt's. `kiln replay` has them as well.
#[derive(Args, Debug)]
pub struct GenerateOptions {
    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// Write this .png, .jpg, .jpeg or .webp file [default: PROMPT-SEED.png]
    ///
    /// The default name is made from the prompt's words. With --count, `out.png` becomes `out-1.png`, `out-2.png` and so on. `-`
    /// writes the image to standard output.
    #[arg(short, long, value_name = "PATH", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// How files are written
    #[command(flatten)]
    pub file: FileArgs,

    /// Write intermediate values to a safetensors file
    ///
    /// The tensors are `token_ids`, `prompt_embeds`, `noise`, `latents.0` (where denoising starts) to `latents.N`, and `image`, the
    /// decoded image before rounding. References add `reference.1.tokens` and so on, an init image adds `init.tokens`, a mask
    /// `mask.tokens`, and guidance `negative_prompt_embeds`.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub dump: Option<PathBuf>,

    /// Print a JSON object per image instead of its path
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Whether images are drawn
    #[command(flatten)]
    pub show: ShowArgs,

    /// Whether unfinished images are shown
    #[command(flatten)]
    pub preview: PreviewArgs,

    /// What the image is made from and how large
    #[command(flatten)]
    pub image: ImageOptions,

    /// Describe what the image should not show; base models only
    #[arg(long, value_name = "PROMPT", help_heading = "Sampling")]
    pub negative: Option<String>,

    /// Set the noise seed [default: random]
    ///
    /// A seed gives the same image every time. kiln prints the seed that it uses, also a random one.
    #[arg(long, value_name = "N", value_parser = within(0..=u64::MAX), conflicts_with = "noise", help_heading = "Sampling")]
    pub seed: Option<u64>,

    /// Generate this many images, with consecutive seeds
    #[arg(long, value_name = "N", value_parser = within(1usize..=10_000), default_value = "1", help_heading = "Sampling")]
    pub count: usize,

    /// Choose the noise generator [default: torch-cuda]
    #[arg(long, value_enum, value_name = "KIND", conflicts_with = "noise", help_heading = "Sampling")]
    pub noise_kind: Option<NoiseArg>,

    /// Set the SM count of the GPU that torch-cuda reproduces [default: 132]
    #[arg(long, value_name = "N", value_parser = within(1u32..=1024), conflicts_with = "noise", help_heading = "Sampling")]
    pub noise_sms: Option<u32>,

    /// Set the resident threads per SM of the GPU that torch-cuda reproduces [default: 2048]
    #[arg(long, value_name = "N", value_parser = within(256u32..=4096), conflicts_with = "noise", help_heading = "Sampling")]
    pub noise_threads: Option<u32>,

    /// Read the initial noise from a safetensors file
    ///
    /// Its tensor `noise` has to be F32, with one row of 128 values for each 16 x 16 pixels. A file that --dump wrote has this
    /// tensor.
    #[arg(long, value_name = "FILE", help_heading = "Sampling")]
    pub noise: Option<PathBuf>,

    /// Where and how to compute
    #[command(flatten)]
    pub run: RunArgs,
}

impl GenerateArgs {
    /// One image with seed 0, for commands that handle the image themselves.
    pub fn without_files(
        prompt: PromptArgs,
        model: ModelArgs,
        lora: LoraArgs,
        image: ImageOptions,
        negative: Option<String>,
        run: RunArgs,
    ) -> Self {
        let usual = Cli::parse_from(["kiln", "--seed", "0"]).generate.options;
        Self { prompt, options: GenerateOptions { model, lora, image, negative, run, ..usual } }
    }
}

impl Subcommand for GenerateArgs {
    fn threads(&self) -> Option<usize> {
        self.options.run.threads
    }

    fn run(self: Box<Self>, process: Process<'_>) -> Result<()> {
        self.carry_out("kiln generate", process, None)
    }
}

/// The image that is made again.
#[derive(Clone, Debug)]
pub struct Original {
    /// Its file, which no output may replace.
    pub path: PathBuf,
    /// The kind of device it was made on.
    pub device: String,
}

impl GenerateArgs {
    /// Generates the images. `command` is the name of the command that the user typed.
    pub fn carry_out(self, command: &'static str, process: Process<'_>, original: Option<Original>) -> Result<()> {
        let Process { environment, signals, out } = process;
        let GenerateOptions { run, file, show, .. } = &self.options;
        let (run, force, show) = (run.clone(), file.force, *show);
        TraceFile::record(&run, command, Some(force), || {
            let GenerateRequest { mut images, mut setup, outputs, preview, verbosity } =
                GenerateRequest::new(self, environment, &mut io::stdin(), random_seed())?;
            images.texts.extend(original.iter().map(|original| original.path.clone()));
            setup.made_on = original.map(|original| original.device);
            let terminal = Arc::new(show.apply(signals.terminal(verbosity), verbosity));
            generate(images, setup, outputs, preview, &signals.stop, &terminal, out)
        })
    }
}

/// The request of `kiln generate`, split by the module that uses each piece.
#[derive(Debug)]
pub struct GenerateRequest {
    /// What to generate.
    pub images: ImageRequest,
    /// Which model to use, and on which device.
    pub setup: Setup,
    /// The files to write.
    pub outputs: Outputs,
    /// The previews to show.
    pub preview: Option<PreviewRequest>,
    /// How much to print.
    pub verbosity: Verbosity,
}

impl GenerateRequest {
    /// Checks flags against each other, the environment and the file system. `stdin` is read if the prompt comes from there;
    /// `random` is the seed to use if none is given.
    pub fn new(args: GenerateArgs, environment: Environment, stdin: &mut dyn Read, random: u64) -> Result<Self> {
        let _span = trace::span("read the request");
        let (images, mut setup) = ImageRequest::from_args(&args, environment, stdin, random)?;
        let args = args.options;
        let format = file_format(args.file.format, args.file.quality, args.output.as_deref())?;
        let target = Target::new(args.output, &images.prompt, images.seeds.len(), extension(format));
        let trace = args.run.trace.trace.as_deref();
        let mut outputs = Outputs::plan(&images, &target, format, args.dump, trace, args.file, args.json)?;
        let preview = PreviewRequest::new(args.preview, args.file.force, args.run.verbosity());
        outputs.add_preview(preview.as_ref().and_then(PreviewRequest::file))?;
        preview.as_ref().map_or(Ok(()), |preview| preview.check(&images, trace))?;
        setup.notes.extend(unknown_words_note(&images.prompt, &setup.found, &setup.defaults));
        Ok(Self { images, setup, outputs, preview, verbosity: args.run.verbosity() })
    }
}

/// Generates the images of a request. Each is saved, and its path or JSON object written to `out`, as soon as it is done, while the
/// next one is computed. Once `stop` is set no further image is saved.
pub fn generate(
    request: ImageRequest,
    setup: Setup,
    mut outputs: Outputs,
    preview: Option<PreviewRequest>,
    stop: &Arc<AtomicBool>,
    terminal: &Arc<Terminal>,
    out: &mut (dyn Write + Send),
) -> Result<()> {
    let made_on = setup.made_on.clone();
    let mut session = Session::open(setup, stop, terminal)?;
    if let Some(other) = made_on.filter(|device| *device != session.device()) {
        terminal.warn(&format!("the image was made on {}, this is {}, and bytes may differ", shown(&other), session.device()));
    }
    let settings = Settings::resolve(request, &session.profile());
    let origin = LaterOrigin::new(&session, outputs.detail)?;
    // The largest seed makes the longest text.
    outputs.format.check_text(&origin.expected().text(&settings, u64::MAX, outputs.format))?;
    announce_run(&settings, &session.found, &session.model, &session.backend, &session.formats, terminal);
    outputs.refuse_inputs(&session.files(&settings))?;
    // A dump holds the prompt embeddings, whose width is known only now that the model is open.
    if outputs.dump().is_some() {
        let encoder = &session.model.configs.text_encoder;
        outputs.check(settings.prompts() * encoder.max_tokens * encoder.features())?;
    }
    session.fit(&settings.job, terminal)?;
    let previewer = preview.and_then(|preview| preview.start(&session, &settings.job, terminal));
    let backend = session.backend.name;
    let mut engine = session.load(&**terminal)?;
    let Outputs { format, force, json, .. } = outputs;
    let (settings, dump) = (&settings, outputs.dump().map(Path::to_owned));
    let sink = ImageSink { settings, origin, backend, format, dump, force, json, terminal, out: Mutex::new(out), stop };
    thread::scope(|scope| {
        let watched = Watched::new(terminal, previewer);
        let origin = &sink.origin;
        watched.when_loaded(move || {
            if threads::affordable(1) == 1 {
                // If the system refuses the thread, the first image that is written asks for the origin.
                let thread = thread::Builder::new().name("identify".into()).stack_size(threads::STACK);
                let _ = thread.spawn_scoped(scope, || drop(origin.get()));
            }
        });
        let mut writer = Writer::start(scope, &sink, settings.job.seeds.len());
        let generated = engine.generate(&settings.job, &watched, &mut |image| {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let number = watched.number();
            writer.write(Pending { number, path: outputs.next_path(), image, seconds: terminal.seconds() })
        });
        writer.finish(generated)
    })?;
    list_kernels(&engine.launches(), terminal);
    // The process ends here, and the system frees all memory at once in a third of the time that it takes piece by piece. A trace still
    // has to collect when kernels ran.
    if !trace::is_on() {
        std::mem::forget(engine);
    }
    Ok(())
}
