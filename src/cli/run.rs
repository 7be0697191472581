//! Carries out a request.

use super::args::TinyArgs;
use super::device::{Chosen, choose};
use super::names::DASH;
use super::request::{GenerateRequest, OpenReference};
use crate::config::{Conventions, Guidance, Variant};
use crate::error::{Error, Result};
use crate::locate::Found;
use crate::noise::NoiseKind;
use crate::output::save_new;
use crate::pipeline::{Engine, GeneratedImage, Job, LoadOptions, Noise, OpenModel, ReferenceInput};
use crate::progress::Progress;
use crate::terminal::{Seconds, Terminal};
use crate::text::shown;
use crate::words;
use serde::Serialize;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What standard output is called in errors.
pub const STDOUT: &str = "standard output";

/// Makes the pictures of a request. Each is saved, and its path or JSON object written to `out`, as soon as it is done. Once
/// `stop` is set nothing more is saved.
pub fn generate(request: &GenerateRequest, stop: &Arc<AtomicBool>, terminal: &Terminal, out: &mut dyn Write) -> Result<()> {
    say_which(request, terminal);
    say_unknown(request, terminal);
    let (chosen, model) = open(request, stop)?;
    let made = Made::new(request, &model, &chosen);
    made.introduce(&model, &chosen, terminal);
    let job = made.job();
    // Now that it is known how wide features are, which only a dump holds.
    if request.dump.is_some() {
        let encoder = &model.configs.text_encoder;
        request.check_outputs(made.prompts() * encoder.max_tokens * encoder.features())?;
    }
    let options = made.fit(&model, &chosen, &job, terminal)?;
    let mut engine = Engine::load(chosen.backend, model, options, terminal)?;
    let mut index = 0;
    engine.generate(&job, terminal, &mut |picture| {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let path = request.target.path(index, request.seed(picture.seed));
        index += 1;
        let png = picture.image.encode_png(&made.text(picture.seed))?;
        let told = match &path {
            Some(path) => {
                save_new(path, &png, request.force)?;
                // The files are the product, and the rest of them is made even if nobody listens any more.
                print(out, &made.line(path, &picture, terminal.seconds())?).or_else(|error| match reader_left(&error) {
                    true => Ok(()),
                    false => Err(error),
                })
            }
            // Here the stream is the product, and a reader who leaves has lost it.
            None => out.write_all(&png).and_then(|()| out.flush()).map_err(|source| Error::Write { path: DASH.into(), source }),
        };
        warn_of_flat(&picture, terminal);
        // After what was said: should this fail, the picture is there all the same, and somebody has to know.
        if let (Some(path), Some(record)) = (&request.dump, &picture.record) {
            save_new(path, &record.to_safetensors()?, request.force)?;
        }
        told
    })?;
    let kernels: Vec<&str> = engine.backend().launches().iter().map(|(name, _)| *name).collect();
    if !kernels.is_empty() {
        terminal.detail(&format!("kernels {}", kernels.join(" ")));
    }
    Ok(())
}

/// Tells of a picture that shows nothing.
fn warn_of_flat(picture: &GeneratedImage, terminal: &Terminal) {
    if let Some([red, green, blue]) = picture.image.flat_colour() {
        terminal.warn(&format!(
            "the image is one flat colour ({red}, {green}, {blue}); unless the prompt asks for that, the model's files may be damaged"
        ));
    }
}

/// Tells of a guidance that was asked for and that the model does not take.
pub fn warn_of_guidance(guidance: Guidance, variant: Variant, terminal: &Terminal) {
    if guidance.ignored {
        terminal.warn(&format!("--guidance is ignored: this is a {variant} model, only base models take it"));
    }
}

/// Opens the device and the model's files at once.
pub fn open(request: &GenerateRequest, stop: &Arc<AtomicBool>) -> Result<(Chosen, OpenModel)> {
    let device = || choose(request.backend, request.device, stop);
    let (chosen, model) = beside(|| OpenModel::open(&request.found, request.variant), device);
    Ok((chosen?, model?))
}

/// Does `there` on another thread of the pool and `here` on this one; one after the other where this is the only one. Returns
/// what `here` gave, then what `there` gave.
fn beside<A, B: Send>(there: impl FnOnce() -> B + Send, here: impl FnOnce() -> A) -> (A, B) {
    let mut second = None;
    let first = rayon::in_place_scope(|scope| {
        scope.spawn(|_| second = Some(there()));
        here()
    });
    // A scope ends when all in it is done.
    (first, second.unwrap_or_else(|| unreachable!()))
}

/// Writes the tiny model to a new folder and that folder's path to `out`, unless `stop` is set before it is complete.
pub fn tiny(args: &TinyArgs, stop: &AtomicBool, out: &mut dyn Write) -> Result<()> {
    let folder = &args.folder;
    let refused = |source| Error::Write { path: folder.clone(), source };
    let occupied = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(refused(error)),
    };
    if occupied {
        return Err(refused(io::Error::new(ErrorKind::DirectoryNotEmpty, "the folder is not empty")));
    }
    crate::tiny::write_to(folder, args.layout.into(), args.dtype.into(), stop)?;
    print(out, &line_of(folder))
}

/// Says which model makes the picture where none was named, or what to expect of one that was never trained, so that nobody takes
/// that for a fault.
pub fn say_which(request: &GenerateRequest, terminal: &Terminal) {
    let how = "for FLUX.2 weights use --model or KILN_MODEL";
    match (&request.found, request.named) {
        (Found::BuiltIn(_), false) => terminal.say(&format!(
            "note: no FLUX.2 model was found, so kiln's own small one draws this; it knows shapes and colours, as in \
             \"a large red star on a blue background\"; {how}"
        )),
        (Found::Tiny, true) => {
            terminal.say(&format!("note: the tiny model is random and untrained, so the picture is noise; {how}"));
        }
        (Found::Tiny, false) => terminal.say(&format!(
            "note: no FLUX.2 model was found; this is a tiny untrained random model, so the picture is noise; {how}"
        )),
        _ => {}
    }
}

/// How many unknown words are named.
const NAMED_WORDS: usize = 5;

/// Says which words of the prompt a model was never trained with, where its files tell: it draws something all the same, and nobody
/// would know why.
fn say_unknown(request: &GenerateRequest, terminal: &Terminal) {
    let Conventions { name, words: Some(words), draws, .. } = &request.conventions else { return };
    let unknown = words::unknown(&request.prompt, words);
    if unknown.is_empty() {
        return;
    }
    let named: Vec<String> = unknown.iter().take(NAMED_WORDS).map(|word| format!("\"{}\"", shown(word))).collect();
    let mut note = format!("note: {} does not know {}", name.as_deref().unwrap_or("this model"), named.join(", "));
    if unknown.len() > NAMED_WORDS {
        note += &format!(" and {} more", unknown.len() - NAMED_WORDS);
    }
    note += &draws.as_ref().map_or(String::new(), |draws| format!("; it draws {draws}"));
    note += if matches!(request.found, Found::BuiltIn(_)) { ", see kiln --help" } else { "" };
    terminal.say(&note);
}

/// What became of a reference on its way to the model.
fn became(OpenReference { path, prepared }: &OpenReference) -> String {
    let mut sizes = vec![prepared.original];
    sizes.extend(prepared.resized);
    sizes.push((prepared.width, prepared.height));
    sizes.dedup();
    let sizes: Vec<String> = sizes.iter().map(|(w, h)| format!("{w}x{h}")).collect();
    format!("{}, {}, {} tokens", path.display(), sizes.join(" -> "), prepared.grid().tokens())
}

/// Whether an error only says that whoever read standard output has seen enough.
pub fn reader_left(error: &Error) -> bool {
    matches!(error, Error::Write { path, source } if path == Path::new(STDOUT) && source.kind() == ErrorKind::BrokenPipe)
}

/// A path as bytes, whatever they are, and a newline.
fn line_of(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_encoded_bytes(), b"\n"].concat()
}

pub fn print(out: &mut dyn Write, line: &[u8]) -> Result<()> {
    // Flushed at once: whoever reads along wants to know of a picture when it is there.
    out.write_all(line).and_then(|()| out.flush()).map_err(|source| Error::Write { path: STDOUT.into(), source })
}

/// How pictures are made: the request, and what the model's files added to it.
pub struct Made<'a> {
    pub request: &'a GenerateRequest,
    pub model: String,
    pub variant: Variant,
    pub steps: usize,
    pub guidance: Guidance,
    /// Name of the backend, as the command line spells it.
    pub backend: &'static str,
}

/// What `--json` prints for a picture.
#[derive(Serialize)]
struct Report<'a> {
    path: &'a str,
    seed: Option<u64>,
    width: usize,
    height: usize,
    steps: usize,
    guidance: Option<f32>,
    model: &'a str,
    variant: String,
    precision: &'a str,
    backend: &'a str,
    seconds: Seconds,
}

impl<'a> Made<'a> {
    pub fn new(request: &'a GenerateRequest, model: &OpenModel, chosen: &Chosen) -> Self {
        let variant = model.variant;
        Self {
            request,
            model: model.name.clone(),
            variant,
            steps: request.steps.unwrap_or(model.conventions.steps(variant)),
            guidance: model.conventions.guide(variant, request.guidance),
            backend: chosen.name,
        }
    }

    /// Says what is about to be made, with what and on what.
    pub fn introduce(&self, model: &OpenModel, chosen: &Chosen, terminal: &Terminal) {
        let request = self.request;
        chosen.note.iter().for_each(|note| terminal.say(&format!("note: {note}")));
        model.warnings.iter().for_each(|warning| terminal.warn(warning));
        warn_of_guidance(self.guidance, self.variant, terminal);
        match (&request.negative, self.guidance.chosen) {
            (Some(_), None) => {
                terminal.warn(&format!("--negative is ignored: this is a {} model, only base models take it", self.variant));
            }
            (Some(_), Some(scale)) if !self.variant.guides(scale) => {
                terminal.warn(&format!("--negative is ignored: it works through a --guidance above 1, which is {scale} here"));
            }
            _ => {}
        }
        let (width, height) = (model.conventions.width, model.conventions.height);
        if matches!(request.found, Found::BuiltIn(_)) && (request.size.width(), request.size.height()) != (width, height) {
            terminal.say(&format!("note: {} was trained on pictures of {width}x{height}, others may look wrong", self.model));
        }
        terminal.say(&self.headline());
        self.setup(&chosen.machine).iter().for_each(|line| terminal.detail(line));
        if matches!(request.found, Found::Files(_)) {
            model.files_in_use().iter().for_each(|(part, files)| terminal.detail(&format!("{part} {files}")));
        }
        for (j, reference) in request.references.iter().enumerate() {
            terminal.detail(&format!("reference {}: {}", j + 1, became(reference)));
        }
    }

    /// How the model is loaded so that the job fits, or why it cannot.
    pub fn fit(&self, model: &OpenModel, chosen: &Chosen, job: &Job, terminal: &Terminal) -> Result<LoadOptions> {
        let GenerateRequest { precision, low_memory, references, .. } = self.request;
        let asked = LoadOptions { precision: *precision, references: !references.is_empty(), low_memory: *low_memory };
        let options = model.check_memory(chosen.backend.as_ref(), &chosen.machine, asked, job)?;
        if options.low_memory && !asked.low_memory {
            let gpu = if chosen.device.is_some() { "GPU " } else { "" };
            terminal.say(&format!("note: {gpu}memory is short, so the transformer takes the text encoder's place"));
        }
        Ok(options)
    }

    pub fn job(&self) -> Job {
        let request = self.request;
        Job {
            prompt: request.prompt.clone(),
            size: request.size,
            steps: self.steps,
            negative: request.negative.clone().unwrap_or_default(),
            references: self.references(),
            guidance: self.guidance.scale,
            seeds: request.seeds.clone(),
            noise: request.noise.clone(),
            record: request.dump.is_some(),
        }
    }

    fn references(&self) -> Vec<ReferenceInput> {
        let references = self.request.references.iter().map(|r| &r.prepared);
        references.map(|prepared| ReferenceInput { grid: prepared.grid(), pixels: prepared.values() }).collect()
    }

    /// Prompts that are encoded: the negative one, too, where a step runs twice.
    fn prompts(&self) -> usize {
        1 + usize::from(self.guidance.chosen.is_some_and(|scale| self.variant.guides(scale)))
    }

    pub fn size(&self) -> String {
        format!("{}x{}", self.request.size.width(), self.request.size.height())
    }

    /// What every user sees, before any time is spent: above all the seed, which may be nowhere else.
    fn headline(&self) -> String {
        let steps = if self.steps == 1 { "1 step".into() } else { format!("{} steps", self.steps) };
        let seeds = match &*self.request.seeds {
            _ if matches!(self.request.noise, Noise::Given(_)) => "noise from a file".into(),
            [first, .., last] => format!("seeds {first} to {last}"),
            [first] => format!("seed {first}"),
            [] => String::new(),
        };
        format!("{}, {}, {steps}, {seeds}", self.model, self.size())
    }

    /// What only a curious user sees.
    fn setup(&self, machine: &str) -> [String; 4] {
        let origin = match &self.request.found {
            Found::Files(files) => &files.origin,
            Found::BuiltIn(_) => "part of this program",
            Found::Tiny => "made by this program",
        };
        let guidance = self.guidance.chosen.map_or("none".into(), |scale| scale.to_string());
        let noise: Vec<String> = self.noise().into_iter().map(|(key, value)| format!("{key} {value}")).collect();
        [
            format!("model {origin}"),
            format!("variant {}, guidance {guidance}, precision {}", self.variant, self.request.precision.name()),
            format!("backend {}, {machine}", self.backend),
            noise.join(", "),
        ]
    }

    /// Where the noise came from, by the names of the flags that ask for it.
    fn noise(&self) -> Vec<(&'static str, String)> {
        match self.request.noise {
            Noise::Given(_) => vec![("noise-kind", "file".into())],
            Noise::Drawn(kind) => {
                let mut list = vec![("noise-kind", kind.to_string())];
                if let NoiseKind::TorchCuda { sms, threads } = kind {
                    list.extend([("noise-sms", sms.to_string()), ("noise-threads", threads.to_string())]);
                }
                list
            }
        }
    }

    /// What a PNG says about itself: enough to make it again, and nothing that differs when it is made again.
    pub fn text(&self, seed: u64) -> Vec<(&'static str, String)> {
        let mut text = vec![("prompt", self.request.prompt.clone())];
        text.extend(self.request.seed(seed).map(|seed| ("seed", seed.to_string())));
        text.extend([
            ("model", self.model.clone()),
            ("variant", self.variant.to_string()),
            ("steps", self.steps.to_string()),
            ("size", self.size()),
            ("precision", self.request.precision.name().into()),
        ]);
        text.extend(self.guidance.chosen.map(|scale| ("guidance", scale.to_string())));
        if let (Some(negative), Some(scale)) = (&self.request.negative, self.guidance.chosen)
            && self.variant.guides(scale)
        {
            text.push(("negative", negative.clone()));
        }
        if !self.request.references.is_empty() {
            text.push(("references", self.request.references.len().to_string()));
        }
        text.extend(self.noise());
        text.push(("version", concat!("kiln ", env!("CARGO_PKG_VERSION")).into()));
        text
    }

    /// What standard output gets for a picture.
    fn line(&self, path: &Path, picture: &GeneratedImage, seconds: Seconds) -> Result<Vec<u8>> {
        if !self.request.json {
            return Ok(line_of(path));
        }
        let report = Report {
            // JSON is text, so a name that is not loses the bytes that are none.
            path: &path.to_string_lossy(),
            seed: self.request.seed(picture.seed),
            width: picture.image.width,
            height: picture.image.height,
            steps: self.steps,
            guidance: self.guidance.chosen,
            model: &self.model,
            variant: self.variant.to_string(),
            precision: self.request.precision.name(),
            backend: self.backend,
            seconds,
        };
        let mut line = serde_json::to_vec(&report).map_err(|e| Error::Op { op: "json", what: e.to_string() })?;
        line.push(b'\n');
        Ok(line)
    }
}
