//! `kiln run`: prompts from a file or another program, one a line, each answered with a line of JSON in the same order. One engine
//! serves them all; while an image is encoded and written, the next one is denoised.
//!
//! Three threads: one reads lines, one owns the engine ([`Service`]), and this one plans, writes and answers. Only the last of them
//! has state, and it never waits for a line that may not come while an answer is due.

mod args;
mod existing;
pub mod line;
mod source;

pub use args::BatchArgs;

use super::adapters::{Library, applied};
use super::args::{FileArgs, ImageOptions, LoraArg, PromptArgs};
use super::generate::GenerateArgs;
use super::hint::{hint_of_line, message_of_line};
use super::names::{Target, content_name};
use super::outputs::{Origin, Outputs, extension, file_format, refuse_same};
use super::previews::{Preview, PreviewRequest, Previewer};
use super::report::{field, ignored_settings, unknown_words_note, warn_of_image};
use super::request::{ImageRequest, Setup};
use super::session::Session;
use super::settings::{ModelProfile, Settings};
use super::stdout::{DASH, json_line, print_line};
use super::trace::TraceFile;
use super::writer::ImageLine;
use super::{Process, Subcommand};
use crate::terminal::{Seconds, Terminal, Verbosity};
use kiln::error::{Error, Result};
use kiln::image::{Format, Image, Threads};
use kiln::locate::{Environment, Found};
use kiln::lora::{AdapterMode, LayerTargets};
use kiln::output::save_new;
use kiln::progress::{Phase, PreviewKind, Progress};
use kiln::service::{Event, Service, Ticket};
use kiln::text::shown_path;
use kiln::{GeneratedImage, threads};
use line::{Line, MAX_LINE_BYTES};
use serde::Serialize;
use sha2::{Digest, Sha256};
use source::{RawLine, Source, read_lines};
use std::collections::{HashSet, VecDeque};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// How many lines are submitted before they are answered: one is denoised, and one waits.
const AHEAD: usize = 2;

/// The longest delay until a signal is noticed while no line arrives.
const PATIENCE: Duration = Duration::from_millis(50);

impl Subcommand for BatchArgs {
    fn threads(&self) -> Option<usize> {
        self.run.threads
    }

    fn shares_pool(&self) -> bool {
        true
    }

    fn run(self: Box<Self>, Process { environment, signals, out }: Process<'_>) -> Result<()> {
        let (run, force, show) = (self.run.clone(), self.image_file.force, self.show);
        TraceFile::record(&run, "kiln run", Some(force), || {
            let request = BatchRequest::new(*self, environment)?;
            let terminal = Arc::new(show.apply(signals.terminal(request.verbosity), request.verbosity));
            batch(request, &signals.stop, &terminal, out)
        })
    }
}

/// The request of `kiln run`.
pub struct BatchRequest {
    source: Source,
    /// The name of the source, for messages.
    file: PathBuf,
    setup: Setup,
    /// The image of a line without settings, apart from its prompt.
    usual: ImageRequest,
    defaults: Defaults,
    /// Where to look for the adapters of lines, and whether they may fit in part.
    environment: Environment,
    lora_partial: bool,
    /// The previews to show.
    preview: Option<PreviewRequest>,
    /// How much to print.
    pub verbosity: Verbosity,
}

/// The values that all lines share.
struct Defaults {
    image: ImageOptions,
    negative: Option<String>,
    lora: Vec<LoraArg>,
    folder: PathBuf,
    image_file: FileArgs,
    skip_existing: bool,
    /// The trace file, which no line may overwrite.
    trace: Option<PathBuf>,
    /// The file of previews, which no line may overwrite either.
    preview: Option<PathBuf>,
}

impl BatchRequest {
    /// Checks flags against each other, the environment and the file system.
    pub fn new(args: BatchArgs, environment: Environment) -> Result<Self> {
        let BatchArgs { file, model, lora, output, image_file, skip_existing, preview, image, negative, run, .. } = args;
        let (own_lora, lora_partial) = (lora.lora.clone(), lora.lora_partial);
        let (verbosity, trace) = (run.verbosity(), run.trace.trace.clone());
        // A mistake that affects every line is an error of the command.
        file_format(image_file.format, image_file.quality, None)?;
        let folder = output.unwrap_or_default();
        if folder.exists() && !folder.is_dir() {
            let what = format!("--output is not a folder ({})", shown_path(&folder));
            return Err(Error::usage(what, "name a folder; kiln creates one that does not exist"));
        }
        let source: Source = match &file {
            path if path == Path::new(DASH) => Box::new(io::stdin()),
            path => Box::new(File::open(path).map_err(|error| Error::read(path, error))?),
        };
        let prompt = PromptArgs { prompt: Some(OsString::new()), rest: Vec::new(), prompt_file: None };
        // Lines with an init image of their own take the other flags about edits.
        let edit = Some(&image.edit).filter(|edit| edit.init.is_some()).cloned().unwrap_or_default();
        let usual = ImageOptions { edit, ..image.clone() };
        let args = GenerateArgs::without_files(prompt, model, lora, usual, negative.clone(), run);
        let (usual, mut setup) = ImageRequest::from_args(&args, environment.clone(), &mut io::empty(), 0)?;
        // Any line may have references.
        setup.options.references = true;
        // Any line may have adapters. Merged weights could not change for them.
        if setup.options.adapters == AdapterMode::Auto {
            setup.options.adapters = AdapterMode::Branch;
        }
        let preview = PreviewRequest::new(preview, image_file.force, verbosity);
        let check_preview = || preview.as_ref().map_or(Ok(()), |preview| preview.check(&usual, trace.as_deref()));
        let preview_file = preview.as_ref().and_then(PreviewRequest::file).map(Path::to_owned);
        let is_inside = !folder.exists() && preview_file.as_deref().and_then(Path::parent) == Some(&*folder);
        if !is_inside {
            check_preview()?;
        }
        // The last step, so that a command that is refused leaves no folder.
        if !folder.as_os_str().is_empty() {
            fs::create_dir_all(&folder).map_err(|source| Error::Write { path: folder.clone(), source })?;
        }
        if is_inside {
            check_preview()?;
        }
        let defaults =
            Defaults { image, negative, lora: own_lora, folder, image_file, skip_existing, trace, preview: preview_file };
        Ok(Self { source, file, setup, usual, defaults, environment, lora_partial, preview, verbosity })
    }
}

/// The facts about model and device that the engine's thread reports.
struct Known {
    profile: ModelProfile,
    backend: &'static str,
    found: Found,
    /// The identity of the model's weights, and the device.
    origin: Origin,
    /// A digest of the model's configuration.
    configs: String,
    /// The files that every line reads.
    files: Vec<PathBuf>,
    /// Shows previews, if they are asked for and can be shown.
    previewer: Option<Arc<Previewer>>,
}

impl Known {
    /// A text that identifies the model and its arithmetic.
    fn id(&self, vae_tiling: bool) -> String {
        let ModelProfile { variant, precision, quantized_flags, adapter_mode, .. } = &self.profile;
        let nvfp4 = if let Found::Files(files) = &self.found { files.nvfp4_layout } else { None };
        let (weights, configs) = (&self.origin.model_id, &self.configs);
        format!("{weights} {configs} {variant} {} {vae_tiling} {quantized_flags:?} {nvfp4:?} {adapter_mode:?}", precision.name())
    }
}

/// Reads lines until they end and answers each. Errors of a line do not end the run, but make it fail at its end.
pub fn batch(request: BatchRequest, stop: &Arc<AtomicBool>, terminal: &Arc<Terminal>, out: &mut dyn Write) -> Result<()> {
    let BatchRequest { source, file, setup, usual, defaults, environment, lora_partial, preview, .. } = request;
    let (own_stop, own_terminal, detail) = (stop.clone(), terminal.clone(), defaults.image_file.metadata.into());
    let (service, (known, targets)) = Service::start(move || {
        let found = setup.found.clone();
        let mut session = Session::open(setup, &own_stop, &own_terminal)?;
        let profile = session.profile();
        let job = Settings::resolve(usual, &profile).job;
        session.fit(&job, &own_terminal)?;
        let previewer = preview.and_then(|preview| preview.start(&session, &job, &own_terminal)).map(Arc::new);
        let (samples, backend, device) = (session.samples()?, session.backend.name, session.device());
        let targets: LayerTargets = session.model.layer_targets();
        let cache = session.result_cache();
        let configs = short_digest(format!("{:?}", session.model.configs).as_bytes());
        let files: Vec<PathBuf> = session.model_files().map(Path::to_owned).collect();
        let (engine, weights) = threads::join(|| session.load(&*own_terminal), || samples.id());
        let (mut engine, origin) = (engine?, Origin { model_id: weights?, device, detail });
        let known = Known { profile, backend, found, origin, configs, files, previewer };
        engine.cache_results(cache, &job)?;
        Ok((engine, (known, targets)))
    })?;
    terminal.say(&format!("{}, ready for lines", known.profile.name));
    let lines = read_lines(source)?;
    let model_id = known.id(defaults.image.vae_tiling);
    let mut run = Run {
        service,
        known,
        model_id,
        library: Library::new(targets, environment, lora_partial),
        defaults,
        file,
        lines: Some(lines),
        pending: VecDeque::new(),
        claimed: HashSet::new(),
        stop,
        terminal,
        out,
        submitted: 0,
        answered: 0,
        failed: 0,
    };
    run.answer_all()?;
    let Run { answered, failed, .. } = run;
    if failed > 0 { Err(Error::Lines { failed, lines: answered }) } else { Ok(()) }
}

/// A line without an answer so far.
struct Pending {
    number: u64,
    what: Planned,
}

enum Planned {
    Image(Box<Submitted>),
    /// Its file exists.
    Skipped {
        path: PathBuf,
        seed: u64,
    },
    Failed(Error),
}

/// An image that was submitted.
struct Submitted {
    ticket: Ticket,
    settings: Settings,
    path: PathBuf,
    format: Format,
    watch: Arc<Watch>,
}

/// The answer to a line whose image was written.
#[derive(Serialize)]
struct Done<'a> {
    line: u64,
    #[serde(flatten)]
    image: ImageLine<'a>,
}

/// The answer to a skipped line.
#[derive(Serialize)]
struct Skipped<'a> {
    line: u64,
    path: &'a str,
    seed: u64,
    skipped: bool,
}

/// The answer to a line that failed.
#[derive(Serialize)]
struct Failed {
    line: u64,
    error: String,
    hint: Option<String>,
    /// The exit code that `kiln generate` would have had.
    code: u8,
}

/// Records the times of a job's phases, forwards warnings with their line number, and shows previews.
struct Watch {
    line: u64,
    /// The number of its image among those that are submitted, from 1 on.
    image: u64,
    /// The number of its steps.
    steps: AtomicUsize,
    times: Terminal,
    terminal: Arc<Terminal>,
    previewer: Option<Arc<Previewer>>,
}

impl Progress for Watch {
    fn begin(&self, phase: Phase, total: u64) {
        if phase == Phase::Denoise {
            self.steps.store(total as usize, Ordering::Relaxed);
        }
        self.times.begin(phase, total);
    }

    fn advance(&self, amount: u64) {
        self.times.advance(amount);
    }

    fn end(&self) {
        self.times.end();
    }

    fn detail(&self, text: &str) {
        self.terminal.detail(&format!("line {}: {text}", self.line));
    }

    fn warn(&self, text: &str) {
        self.terminal.say(&format!("line {}: warning: {text}", self.line));
    }

    fn wants_preview(&self) -> Option<PreviewKind> {
        self.previewer.as_ref().map(|previewer| previewer.kind())
    }

    fn preview(&self, step: usize, image: Image) {
        if let Some(previewer) = &self.previewer {
            previewer.show(Preview { number: self.image, step, steps: self.steps.load(Ordering::Relaxed), image });
        }
    }
}

/// The state of a run.
struct Run<'a> {
    service: Service,
    known: Known,
    model_id: String,
    library: Library,
    defaults: Defaults,
    file: PathBuf,
    /// Receives lines; `None` after the last one.
    lines: Option<Receiver<io::Result<RawLine>>>,
    pending: VecDeque<Pending>,
    /// Digests of the output paths of earlier lines.
    claimed: HashSet<[u8; 16]>,
    stop: &'a AtomicBool,
    terminal: &'a Arc<Terminal>,
    out: &'a mut dyn Write,
    /// Images that were submitted.
    submitted: u64,
    answered: u64,
    failed: u64,
}

impl Run<'_> {
    fn answer_all(&mut self) -> Result<()> {
        loop {
            self.plan_ahead(true)?;
            match self.pending.pop_front() {
                Some(Pending { number, what }) => self.answer(number, what)?,
                None if self.lines.is_none() => return Ok(()),
                None => {}
            }
        }
    }

    fn check_stop(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Plans up to [`AHEAD`] lines. With `wait`, and if none is planned, waits for one.
    fn plan_ahead(&mut self, wait: bool) -> Result<()> {
        while self.pending.len() < AHEAD {
            self.check_stop()?;
            let Some(lines) = &self.lines else { break };
            let waits = wait && self.pending.is_empty();
            let patience = if waits { PATIENCE } else { Duration::ZERO };
            match lines.recv_timeout(patience) {
                Ok(line) => {
                    let RawLine { number, bytes } = line.map_err(|error| Error::read(&self.file, error))?;
                    let planned = self.plan(number, bytes.as_deref()).unwrap_or_else(|error| Some(Planned::Failed(error)));
                    self.pending.extend(planned.map(|what| Pending { number, what }));
                }
                Err(RecvTimeoutError::Timeout) if waits => {}
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => self.lines = None,
            }
        }
        Ok(())
    }

    /// Submits the image of a line. Returns `None` if the line is empty.
    fn plan(&mut self, number: u64, bytes: Option<&[u8]>) -> Result<Option<Planned>> {
        let too_long = || Error::usage(format!("the line is longer than {MAX_LINE_BYTES} bytes"), "shorten it");
        let Some(line) = Line::parse(bytes.ok_or_else(too_long)?)? else { return Ok(None) };
        let Self { service, known, model_id, library, defaults, claimed, terminal, file, submitted, .. } = self;
        let Defaults { image, folder, image_file, trace, preview, .. } = defaults;
        let mut line = line.with_defaults(image, defaults.negative.as_deref(), &defaults.lora);
        // Before any of its files is read.
        line.options.check(field)?;
        let output = line.output.take();
        if output.as_deref() == Some(Path::new(DASH)) {
            return Err(Error::usage("`output` is standard output, where the answers go", "name a file"));
        }
        let format = file_format(image_file.format, image_file.quality, output.as_deref())?;
        // A line with the same adapters as the flags uses those that the model was loaded with.
        let own_lora = line.lora.clone().filter(|lora| *lora != defaults.lora);
        let mut open_adapters = || {
            let mut tell = |text: &str| terminal.say(&format!("line {number}: {text}"));
            own_lora.as_ref().map(|lora| library.open(lora, &mut tell)).transpose()
        };
        let (name, opened) = match output {
            Some(name) => (name, None),
            None => {
                let opened = open_adapters()?;
                let adapters = opened.as_ref().map_or_else(|| known.profile.adapters.clone(), |adapters| applied(adapters));
                let quality = image_file.quality.map_or(String::new(), |quality| format!(" quality {quality}"));
                let context = [model_id.clone(), line.digests(&adapters)?, quality].concat();
                (content_name(&line.prompt, &line.id(&context), extension(format)), Some(opened))
            }
        };
        let (path, seed) = (folder.join(name), line.seed());
        if let Some(preview) = preview {
            refuse_same(&path, "the image", preview, "--preview")?;
        }
        // Two lines with one file are a mistake, even if the first one failed.
        if !claimed.insert(place_of(&path)) {
            let what = format!("an earlier line has the same file ({})", shown_path(&path));
            return Err(Error::usage(what, "give one of them another `output` or `seed`, or leave it out"));
        }
        if defaults.skip_existing && existing::is_image(&path, format) {
            return Ok(Some(Planned::Skipped { path, seed }));
        }
        // The image has the adapters that its name was made from, even if their files change meanwhile.
        let adapters = opened.map_or_else(open_adapters, Ok)?;
        let request = ImageRequest { adapters, ..line.request(&known.profile.defaults)? };
        match Outputs::plan(&request, &Target::One(path.clone()), format, None, trace.as_deref(), *image_file, true) {
            // The file of another run may have appeared meanwhile.
            Err(Error::OutputExists { .. }) if defaults.skip_existing => {
                return match existing::is_image(&path, format) {
                    true => Ok(Some(Planned::Skipped { path, seed })),
                    false => Err(existing::in_the_way(&path, format)),
                };
            }
            planned => {
                let adapters =
                    request.adapters.iter().flat_map(|adapters| &adapters.0).map(|(adapter, _)| adapter.path.as_path());
                let shared = known.files.iter().chain([&*file]).map(PathBuf::as_path);
                let mut outputs = planned?;
                outputs.add_preview(preview.as_deref())?;
                outputs.refuse_inputs(&shared.chain(adapters).chain(request.files()).collect::<Vec<_>>())?;
            }
        }
        let (times, terminal, previewer) = (Terminal::new(Verbosity::Quiet), Arc::clone(terminal), known.previewer.clone());
        let (image, steps) = (*submitted + 1, AtomicUsize::new(0));
        let watch = Arc::new(Watch { line: number, image, steps, times, terminal: terminal.clone(), previewer });
        unknown_words_note(&request.prompt, &known.found, &known.profile.defaults)
            .iter()
            .for_each(|note| terminal.say(&format!("line {number}: {note}")));
        let settings = Settings::resolve(request, &known.profile);
        format.check_text(&known.origin.text(&settings, seed, format))?;
        ignored_settings(&settings, field).iter().for_each(|warning| watch.warn(warning));
        let edit = settings.edit.iter().flat_map(|edit| edit.notes(&settings.job));
        edit.for_each(|note| terminal.say(&format!("line {number}: {note}")));
        let ticket = service.submit(settings.job.clone(), watch.clone());
        *submitted = image;
        Ok(Some(Planned::Image(Box::new(Submitted { ticket, settings, path, format, watch }))))
    }

    fn answer(&mut self, number: u64, what: Planned) -> Result<()> {
        let result = match what {
            Planned::Image(submitted) => {
                let answer = self.answer_image(number, &submitted);
                // An image that failed leaves its previews.
                self.terminal.finish_drawing(submitted.watch.image);
                answer
            }
            Planned::Skipped { path, seed } => self.skip(number, &path, seed),
            Planned::Failed(error) => Err(error),
        };
        self.answered += 1;
        let error = match result {
            Ok(line) => return self.print(&line),
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => error,
        };
        self.failed += 1;
        let text = message_of_line(&error);
        self.terminal.say(&format!("line {number}: error: {text}"));
        self.print(&json_line(&Failed { line: number, error: text, hint: hint_of_line(&error), code: error.exit_code() })?)?;
        // A failed GPU, or an engine that is gone, would fail every other line as well.
        match error {
            Error::Device { .. } | Error::Op { op: "service", .. } => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits for an image, writes it and returns its answer.
    fn answer_image(&mut self, number: u64, submitted: &Submitted) -> Result<Vec<u8>> {
        let Submitted { ticket, settings, path, format, watch } = submitted;
        let image = match ticket.next() {
            Event::Image(image) => image,
            Event::Done(result) => return Err(result.err().unwrap_or_else(|| missing(number))),
        };
        match ticket.next() {
            Event::Done(result) => result?,
            Event::Image(_) => return Err(missing(number)),
        }
        // The next line is submitted first, so that the engine is busy while this image is encoded.
        self.plan_ahead(false)?;
        let seconds = watch.times.seconds();
        self.write(watch, &image, settings, path, *format, seconds)
    }

    fn write(
        &self,
        Watch { line: number, image: place, .. }: &Watch,
        image: &GeneratedImage,
        settings: &Settings,
        path: &Path,
        format: Format,
        seconds: Seconds,
    ) -> Result<Vec<u8>> {
        let bytes = image.image.encode(format, &self.known.origin.text(settings, image.seed, format), Threads::All)?;
        self.check_stop()?;
        match save_new(path, &bytes, self.defaults.image_file.force) {
            // Another run in the same folder was faster.
            Err(Error::OutputExists { .. }) if self.defaults.skip_existing && existing::is_image(path, format) => {
                return self.skip(*number, path, image.seed);
            }
            saved => saved?,
        }
        self.terminal.show(*place, &image.image, Threads::All);
        warn_of_image(image, settings, self.terminal);
        self.terminal.say(&format!("line {number}: {}", shown_path(path)));
        let path = path.to_string_lossy();
        json_line(&Done { line: *number, image: ImageLine::new(&path, image, settings, self.known.backend, seconds) })
    }

    /// The answer to a line whose file exists.
    fn skip(&self, number: u64, path: &Path, seed: u64) -> Result<Vec<u8>> {
        self.terminal.detail(&format!("line {number}: {} exists", shown_path(path)));
        json_line(&Skipped { line: number, path: &path.to_string_lossy(), seed, skipped: true })
    }

    fn print(&mut self, line: &[u8]) -> Result<()> {
        let Self { terminal, out, .. } = self;
        terminal.interject(|| print_line(*out, line))
    }
}

/// The error for a job that did not give exactly one image.
fn missing(number: u64) -> Error {
    Error::Op { op: "run", what: format!("line {number} did not give exactly one image") }
}

/// The first digits of a digest.
fn short_digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A digest of the path of a file that may not exist yet.
fn place_of(path: &Path) -> [u8; 16] {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.into());
    let place = path.file_name().map_or_else(|| path.into(), |name| folder.join(name));
    let digest = Sha256::digest(place.as_os_str().as_encoded_bytes());
    std::array::from_fn(|i| digest[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_has_one_place() {
        assert_eq!(place_of(Path::new("a.png")), place_of(Path::new("./a.png")));
        assert_ne!(place_of(Path::new("a.png")), place_of(Path::new("b.png")));
    }
}
