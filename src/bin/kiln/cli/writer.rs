//! Encodes and writes images with metadata, and prints a line for each file. All but the last image are written on a thread of their
//! own while the next one is denoised.

use super::edit::{EditReport, Facts};
use super::outputs::LaterOrigin;
use super::report::warn_of_image;
use super::settings::Settings;
use super::stdout::{DASH, json_line, line_of, print_line};
use crate::terminal::{Seconds, Terminal};
use kiln::error::{Error, Result};
use kiln::image::{Format, Threads};
use kiln::metadata::AdapterMetadata;
use kiln::output::save_new;
use kiln::{GeneratedImage, threads};
use serde::Serialize;
use std::io::Write;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};

/// What `--json` prints for an image.
#[derive(Serialize)]
pub struct ImageLine<'a> {
    path: &'a str,
    seed: Option<u64>,
    width: usize,
    height: usize,
    steps: usize,
    /// Steps that ran: fewer with a strength below 1.
    steps_run: usize,
    strength: Option<f64>,
    init: Option<EditReport<'a>>,
    guidance: Option<f32>,
    padding: String,
    model: &'a str,
    variant: String,
    precision: &'a str,
    /// The format that weights were quantized to at load.
    quantize: Option<&'a str>,
    lora: &'a [AdapterMetadata],
    backend: &'a str,
    /// Activations that did not fit into FP8.
    saturated: u64,
    seconds: Seconds,
}

impl<'a> ImageLine<'a> {
    /// JSON holds Unicode only, so bytes of a path that are not valid UTF-8 are replaced in `path`.
    pub fn new(path: &'a str, image: &GeneratedImage, settings: &'a Settings, backend: &'a str, seconds: Seconds) -> Self {
        Self {
            path,
            seed: settings.job.noise.seed(image.seed),
            width: image.image.width,
            height: image.image.height,
            steps: settings.job.steps,
            steps_run: settings.job.noise_levels().len(),
            strength: settings.edit.as_ref().map(|edit| edit.strength().share()),
            init: settings.edit.as_ref().map(Facts::report),
            guidance: settings.guidance.chosen,
            padding: settings.job.padding.to_string(),
            model: &settings.model,
            variant: settings.variant.to_string(),
            precision: settings.precision.name(),
            quantize: settings.quantize(),
            lora: &settings.adapters,
            backend,
            saturated: image.saturated,
            seconds,
        }
    }
}

/// The settings for writing that all images of a run share.
pub struct ImageSink<'a> {
    pub settings: &'a Settings,
    pub origin: LaterOrigin,
    /// The name of the backend that computes them.
    pub backend: &'a str,
    pub format: Format,
    pub dump: Option<PathBuf>,
    pub force: bool,
    pub json: bool,
    pub terminal: &'a Terminal,
    pub out: Mutex<&'a mut (dyn Write + Send)>,
    /// Set when writing fails, so that the next image is not computed in vain.
    pub stop: &'a AtomicBool,
}

impl ImageSink<'_> {
    /// Encodes an image, saves it and reports it.
    fn write(&self, Pending { number, path, image, seconds }: &Pending, threads: Threads) -> Result<()> {
        let Self { settings, backend, terminal, .. } = *self;
        let text = self.origin.get()?.text(settings, image.seed, self.format);
        let bytes = image.image.encode(self.format, &text, threads)?;
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let reported = match path {
            Some(path) => {
                save_new(path, &bytes, self.force)?;
                terminal.show(*number, &image.image, threads);
                let line = match self.json {
                    true => json_line(&ImageLine::new(&path.to_string_lossy(), image, settings, backend, *seconds))?,
                    false => line_of(path),
                };
                terminal.interject(|| print_line(*out, &line))
            }
            // Here the stream is the result, so a closed pipe is an error.
            None => {
                let written = out.write_all(&bytes).and_then(|()| out.flush());
                terminal.show(*number, &image.image, threads);
                written.map_err(|source| Error::Write { path: DASH.into(), source })
            }
        };
        warn_of_image(image, settings, terminal);
        // The dump comes after the report of the image, which exists even if writing the dump fails.
        if let (Some(dump), Some(record)) = (&self.dump, &image.record) {
            save_new(dump, &record.to_safetensors()?, self.force)?;
        }
        reported
    }
}

/// An image to write.
pub struct Pending {
    /// Its number in the run, from 1 on.
    pub number: u64,
    /// The file; `None` is standard output.
    pub path: Option<PathBuf>,
    pub image: GeneratedImage,
    /// The seconds of its phases.
    pub seconds: Seconds,
}

/// Writes the images of a run in order.
pub struct Writer<'scope, 'a> {
    sink: &'scope ImageSink<'a>,
    /// The thread that writes all images but the last, and the channel to it.
    worker: Option<(SyncSender<Pending>, ScopedJoinHandle<'scope, Result<()>>)>,
    /// How many images are still to come.
    left: usize,
}

impl<'scope, 'a> Writer<'scope, 'a> {
    /// A writer of `count` images. The calling thread writes a single image, or all images if the system refuses a thread.
    pub fn start(scope: &'scope Scope<'scope, '_>, sink: &'scope ImageSink<'a>, count: usize) -> Self {
        let mut worker = None;
        if count > 1 && threads::affordable(1) == 1 {
            // Without a buffer, an image is handed over once the previous one is written, so at most two are in memory.
            let (sender, receiver) = sync_channel::<Pending>(0);
            let work = move || {
                // The pool's threads compute the next image, and this thread is not one of them.
                let write = |pending: Pending| sink.write(&pending, Threads::One);
                receiver.into_iter().try_for_each(write).inspect_err(|_| sink.stop.store(true, Ordering::Relaxed))
            };
            let thread = std::thread::Builder::new().name("writer".into()).stack_size(threads::STACK).spawn_scoped(scope, work);
            worker = thread.ok().map(|thread| (sender, thread));
        }
        Self { sink, worker, left: count }
    }

    /// Writes an image, or hands it to the thread that does.
    pub fn write(&mut self, pending: Pending) -> Result<()> {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            // Nothing is computed during the last image, so all threads encode it.
            self.wait()?;
        }
        match &self.worker {
            // The thread is gone only if it failed, which `finish` reports.
            Some((sender, _)) => sender.send(pending).map_err(|_| Error::Interrupted),
            None => self.sink.write(&pending, Threads::All),
        }
    }

    /// Waits until all images are written. A write error takes precedence over a compute error, which it may have caused.
    pub fn finish(mut self, generated: Result<()>) -> Result<()> {
        self.wait()?;
        generated
    }

    fn wait(&mut self) -> Result<()> {
        match self.worker.take() {
            Some((sender, thread)) => {
                drop(sender);
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            }
            None => Ok(()),
        }
    }
}
