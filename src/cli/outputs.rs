//! Writes images to files or to standard output, with metadata in the PNG and a line of output for each file.

use super::names::Target;
use super::report::{warn_of_flat_image, warn_of_saturation};
use super::request::ImageRequest;
use super::settings::Settings;
use super::stdout::{DASH, STDOUT, json_line, line_of, print, reader_left};
use crate::error::{Error, Result};
use crate::noise::CHANNELS;
use crate::output::{Planned, check_writable, save_new};
use crate::pipeline::GeneratedImage;
use crate::terminal::{Seconds, Terminal};
use crate::text::shown_path;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// The files of a run.
#[derive(Debug)]
pub struct Outputs {
    /// The image files still to be written, in order; empty if the image goes to standard output.
    images: std::vec::IntoIter<Planned>,
    /// The file of `--dump`. Its size leaves out the prompt embeddings, whose width is known only once the model is open.
    dump: Option<Planned>,
    /// Whether existing files are replaced.
    force: bool,
    /// Whether standard output gets JSON objects instead of paths.
    json: bool,
}

/// What `--json` prints for an image.
#[derive(Serialize)]
struct ImageLine<'a> {
    path: &'a str,
    seed: Option<u64>,
    width: usize,
    height: usize,
    steps: usize,
    guidance: Option<f32>,
    model: &'a str,
    variant: String,
    precision: &'a str,
    /// What weights were quantised to when they were loaded.
    quantize: Option<&'a str>,
    backend: &'a str,
    /// Activations that did not fit into FP8.
    saturated: u64,
    seconds: Seconds,
}

impl<'a> ImageLine<'a> {
    /// JSON holds Unicode only, so bytes of a path that are not valid UTF-8 are replaced in `path`.
    fn new(path: &'a str, image: &GeneratedImage, settings: &'a Settings, backend: &'a str, seconds: Seconds) -> Self {
        Self {
            path,
            seed: settings.job.noise.seed(image.seed),
            width: image.image.width,
            height: image.image.height,
            steps: settings.job.steps,
            guidance: settings.guidance.chosen,
            model: &settings.model,
            variant: settings.variant.to_string(),
            precision: settings.precision.name(),
            quantize: settings.quantize(),
            backend,
            saturated: image.saturated,
            seconds,
        }
    }
}

impl Outputs {
    /// Plans the files of a request, and refuses those that cannot be written now rather than after minutes of work.
    pub fn plan(request: &ImageRequest, target: &Target, dump: Option<PathBuf>, force: bool, json: bool) -> Result<Self> {
        // The estimate is the size of a PNG that does not compress at all, with its text.
        let (pixels, rows) = (request.size.width() * request.size.height(), request.size.height());
        let bytes = (3 * pixels + rows + request.prompt.len()) as u64 + (16 << 10);
        let mut images = Vec::with_capacity(request.seeds.len());
        for path in request.seeds.iter().enumerate().filter_map(|(i, &seed)| target.path(i, request.noise.seed(seed))) {
            check_format(&path)?;
            if let Some(dump) = &dump
                && same_file(&path, dump)
            {
                let what = format!("the picture and --dump would be the same file ({})", shown_path(&path));
                return Err(Error::usage(what, "give one of them another name"));
            }
            images.push(Planned { path, bytes });
        }
        if *target == Target::Stdout {
            check_stdout()?;
        }
        // A dump holds the noise twice, the latents after each step and the image before rounding.
        let latents = (request.steps.unwrap_or(1) + 2) * request.size.grid().tokens() * CHANNELS;
        let dump = dump.map(|path| Planned { path, bytes: 4 * (latents + 3 * pixels) as u64 });
        let outputs = Self { images: images.into_iter(), dump, force, json };
        outputs.check(0)?;
        Ok(outputs)
    }

    /// Whether intermediate values are written.
    pub fn has_dump(&self) -> bool {
        self.dump.is_some()
    }

    /// Refuses files that cannot be written. `embeddings` is the number of values in the prompt embeddings, or 0 while that is
    /// unknown.
    pub fn check(&self, embeddings: usize) -> Result<()> {
        let dump = self.dump.iter().map(|dump| Planned { path: dump.path.clone(), bytes: dump.bytes + 4 * embeddings as u64 });
        let files: Vec<Planned> = self.images.as_slice().iter().cloned().chain(dump).collect();
        check_writable(&files, self.force)
    }

    /// Saves the next image and reports it on `out`. `backend` is the name of the backend that computed it.
    pub fn write(
        &mut self,
        image: &GeneratedImage,
        settings: &Settings,
        backend: &str,
        terminal: &Terminal,
        out: &mut dyn Write,
    ) -> Result<()> {
        let png = image.image.encode_png(&png_text(settings, image.seed))?;
        let reported = match self.images.next() {
            Some(Planned { path, .. }) => {
                save_new(&path, &png, self.force)?;
                let line = match self.json {
                    true => json_line(&ImageLine::new(&path.to_string_lossy(), image, settings, backend, terminal.seconds()))?,
                    false => line_of(&path),
                };
                match print(out, &line) {
                    // The files are the result, so the rest of them is generated even after the reader closed the pipe.
                    Err(error) if reader_left(&error) => Ok(()),
                    printed => printed,
                }
            }
            // Here the stream is the result, so a closed pipe is an error.
            None => out.write_all(&png).and_then(|()| out.flush()).map_err(|source| Error::Write { path: DASH.into(), source }),
        };
        warn_of_flat_image(image, terminal);
        warn_of_saturation(image.saturated, settings, terminal);
        // The dump comes after the report of the image, which exists even if writing the dump fails.
        if let (Some(dump), Some(record)) = (&self.dump, &image.record) {
            save_new(&dump.path, &record.to_safetensors()?, self.force)?;
        }
        reported
    }
}

/// The metadata of a PNG: enough to generate the image again, and nothing that would differ between two such runs.
pub fn png_text(settings: &Settings, seed: u64) -> Vec<(&'static str, String)> {
    let mut text = vec![("prompt", settings.job.prompt.clone())];
    text.extend(settings.job.noise.seed(seed).map(|seed| ("seed", seed.to_string())));
    text.extend([
        ("model", settings.model.clone()),
        ("variant", settings.variant.to_string()),
        ("steps", settings.job.steps.to_string()),
        ("size", settings.size()),
        ("precision", settings.precision.name().into()),
    ]);
    text.extend(settings.quantised_flags.iter().cloned());
    if settings.vae_tiling {
        text.push(("vae-tiling", "on".into()));
    }
    text.extend(settings.guidance.chosen.map(|scale| ("guidance", scale.to_string())));
    text.extend(settings.negative.iter().filter(|_| settings.guided).map(|negative| ("negative", negative.clone())));
    if !settings.job.references.is_empty() {
        text.push(("references", settings.job.references.len().to_string()));
    }
    text.extend(settings.noise_flags.iter().cloned());
    text.push(("version", concat!("kiln ", env!("CARGO_PKG_VERSION")).into()));
    text
}

/// Refuses extensions other than .png, and paths that name standard output. A name without an extension is allowed.
fn check_format(path: &Path) -> Result<()> {
    let refused = |why: &str| Error::Write { path: path.into(), source: io::Error::new(io::ErrorKind::InvalidInput, why) };
    if ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|own| path == Path::new(own)) {
        return Err(refused("this is standard output, which is called `-`"));
    }
    match path.extension() {
        Some(extension) if !extension.eq_ignore_ascii_case("png") => Err(refused("kiln writes PNG files, named .png")),
        _ => Ok(()),
    }
}

/// Refuses to write an image to a terminal, or to a standard output that is closed.
fn check_stdout() -> Result<()> {
    let why = if io::stdout().is_terminal() {
        "a terminal cannot show a picture; redirect standard output, or name a file"
    } else if stdout_was_closed() {
        "it is closed, so nobody would get the picture"
    } else {
        return Ok(());
    };
    Err(Error::Write { path: STDOUT.into(), source: io::Error::new(io::ErrorKind::InvalidInput, why) })
}

/// Whether standard output was closed when the program started. Rust's runtime then opens the null device in its place for reading
/// and writing; a redirection by a shell opens it for writing only.
fn stdout_was_closed() -> bool {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{OFlags, fcntl_getfl, fstat, stat};
        let (stdout, null) = (fstat(io::stdout()), stat("/dev/null"));
        let is_null =
            stdout.is_ok_and(|stdout| null.is_ok_and(|null| stdout.st_rdev == null.st_rdev && stdout.st_ino == null.st_ino));
        is_null && fcntl_getfl(io::stdout()).is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDWR)
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Whether two paths that may not exist yet name the same file.
fn same_file(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (folder.canonicalize().ok(), path.file_name().map(|name| name.to_owned()))
    };
    a == b || place(a) == place(b)
}
