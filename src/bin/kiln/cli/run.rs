//! `kiln generate`: its request, and the run that carries it out.

use super::args::GenerateArgs;
use super::names::Target;
use super::outputs::{Outputs, extension, file_format, image_text};
use super::report::{announce_run, list_kernels, unknown_words_note};
use super::request::{ImageRequest, Setup};
use super::session::Session;
use super::settings::Settings;
use super::writer::{Pending, Place, Writer};
use crate::terminal::{Terminal, Verbosity};
use kiln::error::{Error, Result};
use kiln::locate::Environment;
use kiln::trace;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What `kiln generate` was asked for, split by the module that uses each piece.
#[derive(Debug)]
pub struct GenerateRequest {
    /// What to generate.
    pub images: ImageRequest,
    /// Which model to use, and on which device.
    pub setup: Setup,
    /// The files to write.
    pub outputs: Outputs,
    /// How much to print.
    pub verbosity: Verbosity,
}

impl GenerateRequest {
    /// Checks flags against each other, the environment and the file system. `stdin` is read if the prompt comes from there;
    /// `random` is the seed to use if none is given.
    pub fn new(args: GenerateArgs, environment: Environment, stdin: &mut dyn Read, random: u64) -> Result<Self> {
        let _span = trace::span("read the request");
        let (images, mut setup) = ImageRequest::from_args(&args, environment, stdin, random)?;
        let format = file_format(args.file.format, args.file.quality, args.output.as_deref())?;
        let target = Target::new(args.output, &images.prompt, images.seeds.len(), extension(format));
        let trace = args.run.trace.trace.as_deref();
        let outputs = Outputs::plan(&images, &target, format, args.dump, trace, args.file.force, args.json)?;
        setup.notes.extend(unknown_words_note(&images.prompt, &setup.found, &setup.conventions));
        Ok(Self { images, setup, outputs, verbosity: args.run.verbosity() })
    }
}

/// Generates the images of a request. Each is saved, and its path or JSON object written to `out`, as soon as it is done, while the
/// next one is computed. Once `stop` is set no further image is saved.
pub fn generate(
    request: ImageRequest,
    setup: Setup,
    mut outputs: Outputs,
    stop: &Arc<AtomicBool>,
    terminal: &Terminal,
    out: &mut (dyn Write + Send),
) -> Result<()> {
    let mut session = Session::open(setup, stop, terminal)?;
    let settings = Settings::resolve(request, &session.profile());
    // The largest seed makes the longest text.
    outputs.format.check_text(&image_text(&settings, u64::MAX))?;
    announce_run(&settings, &session.found, &session.model, &session.backend, &session.formats, terminal);
    // A dump holds the prompt embeddings, whose width is known only now that the model is open.
    if outputs.dump().is_some() {
        let encoder = &session.model.configs.text_encoder;
        outputs.check(settings.prompts() * encoder.max_tokens * encoder.features())?;
    }
    session.fit(&settings.job, terminal)?;
    let backend = session.backend.name;
    let mut engine = session.load(terminal)?;
    let Outputs { format, force, json, .. } = outputs;
    let (settings, dump) = (&settings, outputs.dump().map(Path::to_owned));
    let place = Place { settings, backend, format, dump, force, json, terminal, out: Mutex::new(out), stop };
    thread::scope(|scope| {
        let mut writer = Writer::start(scope, &place, settings.job.seeds.len());
        let generated = engine.generate(&settings.job, terminal, &mut |image| {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            writer.write(Pending { path: outputs.next_path(), image, seconds: terminal.seconds() })
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
