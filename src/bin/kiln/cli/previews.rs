//! `--preview`: shows an image while it is denoised. Previews arrive on the thread that drives the device, so they are encoded, drawn and
//! written on another one. A preview that nobody has drawn yet is replaced by the next.

use super::args::{PreviewArgs, PreviewTarget};
use super::outputs::refuse_same;
use super::request::ImageRequest;
use super::session::Session;
use crate::draw::{Facts, Way};
use crate::terminal::{Terminal, Verbosity};
use kiln::error::Result;
use kiln::image::{Format, Image, Threads};
use kiln::output::{PlannedFile, check_writable, save_new};
use kiln::progress::{Phase, PreviewKind, Progress};
use kiln::{Job, threads};
use std::cell::Cell;
use std::fs::{self, File};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// The text key of a preview's file, which says how many steps are done.
const KEY: &str = "preview";

/// The first bytes of every PNG.
const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1A\n";

/// Where the name and the key of the first text chunk are: after the signature, the header's chunk and the chunk's length.
const TEXT_START: usize = 8 + 25 + 4;

/// Pixels of an image for each pixel of a fast preview, in both directions.
const FAST_SCALE: usize = 8;

/// An image that is predicted to take fewer seconds is not worth a preview.
const SOON: f64 = 1.0;

/// The previews that flags ask for.
#[derive(Debug)]
pub struct PreviewRequest {
    target: PreviewTarget,
    kind: PreviewKind,
    /// Whether any file may be replaced.
    force: bool,
    quiet: bool,
}

impl PreviewRequest {
    /// The request of these flags, if they ask for previews.
    pub fn new(args: PreviewArgs, force: bool, verbosity: Verbosity) -> Option<Self> {
        let kind = args.preview_kind.unwrap_or_default().into();
        Some(Self { target: args.preview?, kind, force, quiet: verbosity == Verbosity::Quiet })
    }

    /// The file, if previews go to one.
    pub fn file(&self) -> Option<&Path> {
        match &self.target {
            PreviewTarget::File(path) => Some(path),
            PreviewTarget::Auto | PreviewTarget::Way(_) => None,
        }
    }

    /// Refuses a file that cannot be written now, or that must not be replaced.
    pub fn check(&self, images: &ImageRequest, trace: Option<&Path>) -> Result<()> {
        let Some(path) = self.file() else { return Ok(()) };
        if let Some(trace) = trace {
            refuse_same(path, "--preview", trace, "--trace")?;
        }
        // An edit of a part is drawn at another size than the finished image has.
        let sizes = [images.finished_size(), (images.size.width(), images.size.height())];
        let bytes = sizes.map(|(width, height)| Format::Png.max_bytes(width, height)).into_iter().max().unwrap_or(0);
        check_writable(&[PlannedFile { path: path.into(), bytes }], self.force || is_preview(path))
    }

    /// Starts to show previews of images like this one, or says why there are none.
    pub fn start(&self, session: &Session, job: &Job, terminal: &Arc<Terminal>) -> Option<Previewer> {
        if self.kind == PreviewKind::Fast && session.model.configs.vae.preview.is_none() {
            terminal.say("note: this model has no colors for fast previews; --preview-kind full decodes them");
            return None;
        }
        let facts = Facts::of_stderr(self.quiet);
        let way = match &self.target {
            PreviewTarget::File(path) => {
                return Some(self.to(Destination::File { path: path.clone(), force: self.force }, terminal));
            }
            PreviewTarget::Way(name) => Way::named(*name, &facts),
            PreviewTarget::Auto => {
                let soon = session.predicted_seconds(job).is_some_and(|seconds| seconds < SOON);
                Way::best(&Facts { soon, ..facts })
            }
        };
        match way {
            Ok(way) => Some(self.to(Destination::Terminal(way), terminal)),
            Err(why) => {
                terminal.say(&format!("note: no preview is drawn here: {why}"));
                None
            }
        }
    }

    fn to(&self, to: Destination, terminal: &Arc<Terminal>) -> Previewer {
        let (terminal, slot, news, failed) = (Arc::clone(terminal), Mutex::default(), Condvar::new(), AtomicBool::new(false));
        Previewer::start(Arc::new(Shared { kind: self.kind, to, terminal, slot, news, failed }))
    }
}

/// Whether a file is a preview that kiln wrote.
fn is_preview(path: &Path) -> bool {
    let mut start = [0; TEXT_START + 4 + KEY.len() + 1];
    // A link leads to a file that is not replaced, and a pipe must not be opened.
    let is_file = fs::symlink_metadata(path).is_ok_and(|there| there.is_file());
    let read = is_file && File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok();
    let text = [b"iTXt", KEY.as_bytes(), b"\0"].concat();
    read && start.starts_with(SIGNATURE) && start[TEXT_START..] == text
}

/// A preview of an image.
pub struct Preview {
    /// The number of the image in its run, from 1 on.
    pub number: u64,
    /// How many steps are done.
    pub step: usize,
    /// How many steps there are. After the last the image is finished.
    pub steps: usize,
    pub image: Image,
}

/// Where previews go.
enum Destination {
    Terminal(Way),
    File { path: PathBuf, force: bool },
}

/// Shows previews on a thread of its own. Dropping this waits for the thread, after which a file holds the last preview.
pub struct Previewer {
    shared: Arc<Shared>,
    /// `None` if the system refused the thread. The caller's thread then does the work.
    thread: Option<JoinHandle<()>>,
}

/// State that both threads share.
struct Shared {
    kind: PreviewKind,
    to: Destination,
    terminal: Arc<Terminal>,
    slot: Mutex<Slot>,
    /// Notified when the slot changes.
    news: Condvar,
    /// Whether a preview failed.
    failed: AtomicBool,
}

/// The room for a preview on its way to the thread.
#[derive(Default)]
struct Slot {
    preview: Option<Preview>,
    /// Whether no more come.
    closed: bool,
}

impl Previewer {
    fn start(shared: Arc<Shared>) -> Self {
        let own = Arc::clone(&shared);
        let work = move || std::iter::from_fn(|| own.next()).for_each(|preview| own.put(&preview));
        let builder = thread::Builder::new().name("previews".into()).stack_size(threads::STACK);
        let thread = if threads::affordable(1) == 1 { builder.spawn(work).ok() } else { None };
        Self { shared, thread }
    }

    /// How previews are made.
    pub fn kind(&self) -> PreviewKind {
        self.shared.kind
    }

    /// Shows a preview, unless the next one comes before.
    pub fn show(&self, preview: Preview) {
        // Whoever saves a finished image also draws or clears it.
        let is_over = self.shared.is_drawn() && preview.step == preview.steps;
        let preview = Some(preview).filter(|_| !is_over);
        if self.thread.is_some() {
            self.shared.slot().preview = preview;
            self.shared.news.notify_one();
        } else if let Some(preview) = preview {
            self.shared.put(&preview);
        }
    }
}

impl Drop for Previewer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        {
            let mut slot = self.shared.slot();
            slot.closed = true;
            // A file ends with the last preview, a terminal with none.
            if self.shared.is_drawn() {
                slot.preview = None;
            }
        }
        self.shared.news.notify_one();
        let _ = thread.join();
    }
}

impl Shared {
    /// Whether previews are drawn on the terminal.
    fn is_drawn(&self) -> bool {
        matches!(self.to, Destination::Terminal(_))
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next preview; `None` if no more come.
    fn next(&self) -> Option<Preview> {
        let is_idle = |slot: &mut Slot| slot.preview.is_none() && !slot.closed;
        self.news.wait_while(self.slot(), is_idle).unwrap_or_else(PoisonError::into_inner).preview.take()
    }

    /// Draws or writes a preview. Only the first failure is a warning. Later previews are tried nevertheless.
    fn put(&self, preview: &Preview) {
        // A bug in previews must not cost an image.
        let why = match catch_unwind(AssertUnwindSafe(|| self.try_put(preview))) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "this is a bug in kiln".into(),
        };
        if !self.failed.swap(true, Ordering::Relaxed) {
            self.terminal.warn(&format!("a preview is missing: {why}"));
        }
    }

    fn try_put(&self, Preview { number, step, steps, image }: &Preview) -> Result<()> {
        match &self.to {
            Destination::Terminal(way) => {
                let scale = if self.kind == PreviewKind::Fast { FAST_SCALE } else { 1 };
                self.terminal.draw(*number, *way, (scale * image.width, scale * image.height), image, Threads::One);
                Ok(())
            }
            Destination::File { path, force } => {
                let text = [(KEY, format!("step {step} of {steps}"))];
                let bytes = image.encode(Format::Png, &text, Threads::One)?;
                save_new(path, &bytes, *force || is_preview(path))
            }
        }
    }
}

/// The progress of a run that makes one image after the other, and their previews.
pub struct Watched<'a> {
    terminal: &'a Terminal,
    previewer: Option<Previewer>,
    number: Cell<u64>,
    steps: Cell<usize>,
    /// What is to be done once all weights are loaded.
    on_loaded: Cell<Option<Box<dyn FnOnce() + 'a>>>,
}

impl<'a> Watched<'a> {
    pub fn new(terminal: &'a Terminal, previewer: Option<Previewer>) -> Self {
        Self { terminal, previewer, number: Cell::new(0), steps: Cell::new(0), on_loaded: Cell::new(None) }
    }

    /// Does something once all weights are loaded, which they are after the first step.
    pub fn when_loaded(&self, work: impl FnOnce() + 'a) {
        self.on_loaded.set(Some(Box::new(work)));
    }

    /// The number of the latest image, from 1 on.
    pub fn number(&self) -> u64 {
        self.number.get()
    }
}

impl Progress for Watched<'_> {
    fn begin(&self, phase: Phase, total: u64) {
        if phase == Phase::Denoise {
            self.number.set(self.number.get() + 1);
            self.steps.set(total as usize);
        }
        self.terminal.begin(phase, total);
    }

    fn advance(&self, amount: u64) {
        // Before the first image, other phases advance.
        if self.number.get() > 0
            && let Some(work) = self.on_loaded.take()
        {
            work();
        }
        self.terminal.advance(amount);
    }

    fn end(&self) {
        self.terminal.end();
    }

    fn detail(&self, text: &str) {
        self.terminal.detail(text);
    }

    fn warn(&self, text: &str) {
        self.terminal.warn(text);
    }

    fn wants_preview(&self) -> Option<PreviewKind> {
        self.previewer.as_ref().map(Previewer::kind)
    }

    fn preview(&self, step: usize, image: Image) {
        if let Some(previewer) = &self.previewer {
            previewer.show(Preview { number: self.number.get(), step, steps: self.steps.get(), image });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preview_is_known_by_its_first_bytes() {
        let folder = std::env::temp_dir().join(format!("kiln-preview-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let image = Image { width: 300, height: 2, pixels: vec![7; 1800] };
        let png = |key: &str| image.encode_png(&[(key, "step 3 of 50".into())]).unwrap();
        let is_one = |bytes: &[u8]| {
            fs::write(folder.join("a.png"), bytes).unwrap();
            is_preview(&folder.join("a.png"))
        };
        let own = png(KEY);
        assert!(is_one(&own));
        for other in [&b""[..], &own[..20], &png("previews"), &png("prompt"), &image.encode_png(&[]).unwrap(), &own[1..]] {
            assert!(!is_one(other));
        }
        assert!(!is_preview(&folder) && !is_preview(&folder.join("none.png")));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_ends_with_the_last_preview_even_without_a_thread() {
        let path = std::env::temp_dir().join(format!("kiln-previews-{}.png", std::process::id()));
        let request = PreviewRequest { target: PreviewTarget::Auto, kind: PreviewKind::Full, force: false, quiet: true };
        let terminal = Arc::new(Terminal::new(Verbosity::Quiet));
        for has_thread in [true, false] {
            let mut previewer = request.to(Destination::File { path: path.clone(), force: false }, &terminal);
            if !has_thread {
                let alone = Arc::clone(&previewer.shared);
                drop(previewer);
                previewer = Previewer { shared: alone, thread: None };
            }
            for step in 1..=20 {
                let image = Image { width: 1, height: 1, pixels: vec![step as u8; 3] };
                previewer.show(Preview { number: 1, step, steps: 20, image });
            }
            let shared = Arc::clone(&previewer.shared);
            drop(previewer);
            let image = Image { width: 1, height: 1, pixels: vec![20; 3] };
            let want = image.encode_png(&[(KEY, "step 20 of 20".into())]).unwrap();
            assert_eq!(fs::read(&path).unwrap(), want);
            assert!(!shared.failed.load(Ordering::Relaxed));
            // A preview that fails leaves the last one.
            let image = Image { width: 9, height: 9, pixels: Vec::new() };
            shared.put(&Preview { number: 1, step: 1, steps: 1, image });
            assert!(shared.failed.load(Ordering::Relaxed) && is_preview(&path));
            fs::remove_file(&path).unwrap();
        }
    }
}
