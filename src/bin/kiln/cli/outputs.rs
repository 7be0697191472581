//! The files of a run, planned and checked before any work, and the metadata of images.

use super::adapters::mode_name;
use super::args::{FileArgs, ImageFormatArg};
use super::edit::Facts;
use super::names::Target;
use super::request::ImageRequest;
use super::session::Session;
use super::settings::Settings;
use super::stdout::{DASH, STDOUT};
use kiln::error::{Error, Result};
use kiln::image::Format;
use kiln::inspect::ModelSamples;
use kiln::metadata::{ARITHMETIC, Detail, ImageMetadata};
use kiln::output::{PlannedFile, check_writable, refuse_replaced};
use kiln::text::shown_path;
use kiln::{CHANNELS, Variant, is_dump};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The files of a run.
#[derive(Debug)]
pub struct Outputs {
    /// The image files still to be written, in order; empty if the image goes to standard output.
    images: std::vec::IntoIter<PlannedFile>,
    /// The file of `--dump`. Its size leaves out the prompt embeddings, whose width is known only once the model is open.
    dump: Option<PlannedFile>,
    /// The file of `--preview`.
    preview: Option<PathBuf>,
    /// The format of the images.
    pub format: Format,
    /// Whether existing files are replaced.
    pub force: bool,
    /// Whether standard output gets JSON objects instead of paths.
    pub json: bool,
    /// How much metadata images have.
    pub detail: Detail,
}

impl Outputs {
    /// Plans the files of a request, and refuses those that cannot be written now rather than after minutes of work.
    pub fn plan(
        request: &ImageRequest,
        target: &Target,
        format: Format,
        dump: Option<PathBuf>,
        trace: Option<&Path>,
        file: FileArgs,
        json: bool,
    ) -> Result<Self> {
        let force = file.force;
        let others = [(dump.as_deref(), "--dump"), (trace, "--trace")];
        if let [(Some(dump), flag), (Some(trace), other)] = others {
            refuse_same(dump, flag, trace, other)?;
        }
        let (width, height) = (request.size.width(), request.size.height());
        let finished = request.finished_size();
        let bytes = format.max_bytes(finished.0, finished.1) + request.prompt.len() as u64;
        let mut images = Vec::with_capacity(request.seeds.len());
        for path in request.seeds.iter().enumerate().filter_map(|(i, &seed)| target.path(i, request.noise.seed(seed))) {
            check_name(&path)?;
            for (other, flag) in others.into_iter().filter_map(|(other, flag)| Some((other?, flag))) {
                refuse_same(&path, "the image", other, flag)?;
            }
            images.push(PlannedFile { path, bytes });
        }
        if *target == Target::Stdout {
            check_stdout()?;
        }
        // A dump holds the noise twice, the latents after each step and the image before rounding.
        let latents = (request.options.steps.unwrap_or(1) + 2) * request.size.grid().tokens() * CHANNELS;
        let dump = dump.map(|path| PlannedFile { path, bytes: 4 * (latents + 3 * width * height) as u64 });
        let outputs = Self { images: images.into_iter(), dump, preview: None, format, force, json, detail: file.metadata.into() };
        outputs.check(0)?;
        if let Some(path) = outputs.dump().filter(|path| force && path.is_file() && !is_dump(path)) {
            let why = "this is not a dump, and --dump replaces nothing else; use another name";
            return Err(Error::Write { path: path.into(), source: io::Error::new(io::ErrorKind::InvalidInput, why) });
        }
        Ok(outputs)
    }

    /// Adds the file of previews, which has to be another one than all others.
    pub fn add_preview(&mut self, preview: Option<&Path>) -> Result<()> {
        let Some(preview) = preview else { return Ok(()) };
        let images = self.images.as_slice().iter().map(|planned| (planned.path.as_path(), "the image"));
        images
            .chain(self.dump().map(|dump| (dump, "--dump")))
            .try_for_each(|(other, what)| refuse_same(other, what, preview, "--preview"))?;
        self.preview = Some(preview.into());
        Ok(())
    }

    /// Refuses files that cannot be written. `embeddings` is the number of values in the prompt embeddings, or 0 while that is unknown.
    pub fn check(&self, embeddings: usize) -> Result<()> {
        let dump =
            self.dump.iter().map(|dump| PlannedFile { path: dump.path.clone(), bytes: dump.bytes + 4 * embeddings as u64 });
        let files: Vec<PlannedFile> = self.images.as_slice().iter().cloned().chain(dump).collect();
        check_writable(&files, self.force)
    }

    /// Refuses files that the run reads: replacing one would destroy the model or an adapter.
    pub fn refuse_inputs(&self, read: &[&Path]) -> Result<()> {
        let images = self.images.as_slice().iter();
        let paths = images.chain(&self.dump).map(|planned| &planned.path).chain(&self.preview);
        paths.into_iter().try_for_each(|path| refuse_replaced(path, read))
    }

    /// Where the next image goes; `None` is standard output.
    pub fn next_path(&mut self) -> Option<PathBuf> {
        self.images.next().map(|planned| planned.path)
    }

    /// The file of `--dump`.
    pub fn dump(&self) -> Option<&Path> {
        self.dump.as_ref().map(|dump| dump.path.as_path())
    }
}

/// What of an image's metadata its settings do not hold.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The identity of the weights.
    pub model_id: String,
    /// The kind of device.
    pub device: String,
    /// How much is stored.
    pub detail: Detail,
}

impl Origin {
    /// An origin that takes as much room as the one that is known once the model is loaded.
    pub fn expected(device: String, detail: Detail) -> Self {
        Self { model_id: "k1:0000000000000000".into(), device, detail }
    }

    /// The metadata of an image in a format, as keys and values.
    pub fn text(&self, settings: &Settings, seed: u64, format: Format) -> Vec<(&'static str, String)> {
        image_metadata(settings, seed, format, self).text(self.detail)
    }
}

/// An origin that is known only while the first image is made. Samples of the weights are read once all weights are loaded: before, they
/// would be in the way of the loader on a cold disk.
pub struct LaterOrigin {
    samples: Option<ModelSamples>,
    origin: Mutex<Option<Origin>>,
    expected: Origin,
}

impl LaterOrigin {
    /// The origin of images of an open model.
    pub fn new(session: &Session, detail: Detail) -> Result<Self> {
        let samples = if detail == Detail::Full { Some(session.samples()?) } else { None };
        Ok(Self { samples, origin: Mutex::new(None), expected: Origin::expected(session.device(), detail) })
    }

    /// An origin that takes as much room as this one.
    pub fn expected(&self) -> &Origin {
        &self.expected
    }

    /// The origin; the first caller computes it.
    pub fn get(&self) -> Result<Origin> {
        let mut origin = self.origin.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(origin) = &*origin {
            return Ok(origin.clone());
        }
        let model_id = self.samples.as_ref().map_or_else(|| Ok(String::new()), ModelSamples::id)?;
        Ok(origin.insert(Origin { model_id, ..self.expected.clone() }).clone())
    }
}

/// The metadata of an image: enough to generate the image again, and nothing that would differ between two such runs.
fn image_metadata(settings: &Settings, seed: u64, format: Format, origin: &Origin) -> ImageMetadata {
    let (job, variant) = (&settings.job, settings.variant);
    let (width, height) = settings.size();
    // Engines pad [dev] prompts differently.
    let padding = (variant == Variant::Dev || job.padding != variant.spec().padding).then(|| job.padding.to_string());
    ImageMetadata {
        prompt: job.prompt.clone(),
        seed: job.noise.seed(seed),
        model: settings.model.clone(),
        model_id: origin.model_id.clone(),
        variant: variant.to_string(),
        steps: job.steps,
        size: [width, height],
        precision: settings.precision.name().into(),
        sigmas: job.sigmas.as_ref().map(ToString::to_string),
        padding,
        quantized: settings.quantized_flags.iter().map(|(flag, value)| ((*flag).to_owned(), value.clone())).collect(),
        lora: settings.adapters.clone(),
        lora_mode: mode_name(settings.adapter_mode).filter(|_| !settings.adapters.is_empty()).map(String::from),
        vae_tiling: settings.vae_tiling,
        guidance: settings.guidance.chosen,
        negative: settings.negative.clone().filter(|_| settings.guided),
        init: settings.edit.as_ref().map(Facts::metadata),
        references: settings.reference_digests.clone(),
        noise: settings.noise.clone(),
        device: origin.device.clone(),
        quality: format.quality(),
        arithmetic: ARITHMETIC,
        version: concat!("kiln ", env!("CARGO_PKG_VERSION")).into(),
    }
}

/// The image format that flags and the file name agree on.
pub fn file_format(asked: Option<ImageFormatArg>, quality: Option<u8>, output: Option<&Path>) -> Result<Format> {
    let path = output.filter(|path| *path != Path::new(DASH));
    let extension = path.and_then(Path::extension).map(|extension| extension.to_ascii_lowercase());
    let named = match extension.as_ref().map(|extension| extension.to_str()) {
        None => None,
        Some(Some("png")) => Some(ImageFormatArg::Png),
        Some(Some("jpg" | "jpeg")) => Some(ImageFormatArg::Jpeg),
        Some(Some("webp")) => Some(ImageFormatArg::Webp),
        Some(_) => {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "kiln writes files named .png, .jpg, .jpeg or .webp");
            return Err(Error::Write { path: path.unwrap_or(Path::new("")).into(), source });
        }
    };
    let format = match (asked, named) {
        (Some(asked), Some(named)) if asked != named => {
            let (flag, extension) = (flag_value(asked), file_extension(asked));
            let name = path.map(shown_path).unwrap_or_default();
            let what = format!("--format {flag} is not what the name of the file says ({name})");
            return Err(Error::usage(what, format!("leave out --format, or name it .{extension}")));
        }
        (asked, named) => asked.or(named).unwrap_or(ImageFormatArg::Png),
    };
    match (format, quality) {
        (ImageFormatArg::Jpeg, quality) => Ok(Format::Jpeg { quality: quality.unwrap_or(Format::DEFAULT_QUALITY) }),
        (other, Some(_)) => {
            let what = format!("--quality is about JPEG, --format {} is lossless", flag_value(other));
            Err(Error::usage(what, "leave out --quality, or use --format jpeg and a name to match"))
        }
        (ImageFormatArg::Png, None) => Ok(Format::Png),
        (ImageFormatArg::Webp, None) => Ok(Format::WebP),
    }
}

/// How `--format` spells a format.
fn flag_value(format: ImageFormatArg) -> &'static str {
    match format {
        ImageFormatArg::Png => "png",
        ImageFormatArg::Jpeg => "jpeg",
        ImageFormatArg::Webp => "webp",
    }
}

/// The usual file extension of a format.
fn file_extension(format: ImageFormatArg) -> &'static str {
    match format {
        ImageFormatArg::Jpeg => "jpg",
        other => flag_value(other),
    }
}

/// The extension of default file names.
pub fn extension(format: Format) -> &'static str {
    file_extension(match format {
        Format::Png => ImageFormatArg::Png,
        Format::Jpeg { .. } => ImageFormatArg::Jpeg,
        Format::WebP => ImageFormatArg::Webp,
    })
}

/// Refuses paths that name standard output.
fn check_name(path: &Path) -> Result<()> {
    if ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|own| path == Path::new(own)) {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "this is standard output, which is called `-`");
        return Err(Error::Write { path: path.into(), source });
    }
    Ok(())
}

/// Refuses to write an image to a terminal, or to a standard output that is closed.
fn check_stdout() -> Result<()> {
    let why = if io::stdout().is_terminal() {
        "a terminal cannot show an image; redirect standard output, or name a file"
    } else if stdout_was_closed() {
        "it is closed, so nobody would get the image"
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

/// Refuses two outputs with one name.
pub fn refuse_same(a: &Path, what: &str, b: &Path, other: &str) -> Result<()> {
    if same_file(a, b) {
        let what = format!("{what} and {other} would be the same file ({})", shown_path(a));
        return Err(Error::usage(what, "give one of them another name"));
    }
    Ok(())
}

/// Whether two paths that may not exist yet name the same file.
fn same_file(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (folder.canonicalize().ok(), path.file_name().map(|name| name.to_owned()))
    };
    a == b || place(a) == place(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_follows_from_flag_and_name() {
        use ImageFormatArg::{Jpeg, Png, Webp};
        let of = |asked, quality, name: Option<&str>| file_format(asked, quality, name.map(Path::new));
        for (asked, quality, name, want) in [
            (None, None, None, Format::Png),
            (None, None, Some("-"), Format::Png),
            (None, None, Some("a"), Format::Png),
            (None, None, Some(".webp"), Format::Png),
            (None, None, Some("a.PNG"), Format::Png),
            (None, None, Some("a.jpg"), Format::Jpeg { quality: 95 }),
            (None, Some(3), Some("a.b/c.jpeg"), Format::Jpeg { quality: 3 }),
            (None, None, Some("a.Webp"), Format::WebP),
            (Some(Jpeg), Some(100), None, Format::Jpeg { quality: 100 }),
            (Some(Jpeg), None, Some("-"), Format::Jpeg { quality: 95 }),
            (Some(Webp), None, Some("a"), Format::WebP),
            (Some(Png), None, Some("a.png"), Format::Png),
        ] {
            assert_eq!(of(asked, quality, name).unwrap(), want, "{asked:?} {quality:?} {name:?}");
        }
        for (asked, quality, name, code) in [
            (Some(Png), None, Some("a.jpg"), 2),
            (Some(Jpeg), None, Some("a.webp"), 2),
            (None, Some(90), None, 2),
            (Some(Webp), Some(90), Some("-"), 2),
            (None, None, Some("a.gif"), 5),
            (Some(Png), None, Some("a.v2"), 5),
        ] {
            assert_eq!(of(asked, quality, name).unwrap_err().exit_code(), code, "{asked:?} {quality:?} {name:?}");
        }
    }
}
