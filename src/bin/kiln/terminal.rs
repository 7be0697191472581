//! [`Progress`] on standard error: a progress line that is redrawn while a phase runs, if standard error is a terminal, and one
//! line per finished phase. Images stand above the progress line.
//!
//! Standard output is reserved for data. A closed standard error is no reason to stop, so failures to write are ignored.

use crate::draw::{self, Canvas, Screen, Way};
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kiln::image::{Image, Threads};
use kiln::progress::{Phase, Progress};
use kiln::text::shown_line;
use kiln::threads;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How much is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Nothing. Errors are printed elsewhere.
    Quiet,
    /// Phases, notes and warnings.
    Normal,
    /// Also details.
    Verbose,
}

impl Verbosity {
    /// The verbosity for the flags `--quiet` and `--verbose`, which are mutually exclusive.
    pub const fn new(quiet: bool, verbose: bool) -> Self {
        match (quiet, verbose) {
            (true, _) => Self::Quiet,
            (false, true) => Self::Verbose,
            (false, false) => Self::Normal,
        }
    }
}

/// Seconds of the latest run of each phase; loading happens in parts, which are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Loading weights, in total, once for all images. On a GPU the prompt is encoded at the same time.
    pub load: f64,
    /// Running the text encoder, once for all images, as far as it does not overlap with loading.
    pub encode: f64,
    /// Encoding reference images to tokens.
    pub references: f64,
    /// Denoising.
    pub denoise: f64,
    /// Decoding latents to pixels.
    pub decode: f64,
}

impl Seconds {
    /// The seconds of a phase, if it is one of generating an image.
    fn of(&mut self, phase: Phase) -> Option<&mut f64> {
        match phase {
            Phase::Load => Some(&mut self.load),
            Phase::Encode => Some(&mut self.encode),
            Phase::References => Some(&mut self.references),
            Phase::Denoise => Some(&mut self.denoise),
            Phase::Decode => Some(&mut self.decode),
            Phase::Calibrate | Phase::Quantize | Phase::Inspect | Phase::Hash => None,
        }
    }
}

/// Progress reports on standard error. One thread reports phases; others may print lines.
pub struct Terminal {
    verbosity: Verbosity,
    /// Whether lines can be redrawn.
    live: bool,
    seconds: Mutex<Seconds>,
    running: Mutex<Option<Running>>,
    /// How much of the running phase is done.
    done: AtomicU64,
    /// How finished images are drawn, if they are.
    way: Option<Way>,
    /// Where images are drawn. This lock is taken before `running`.
    place: Mutex<Place>,
}

/// The place of images, which are numbered from 1 on.
#[derive(Default)]
struct Place {
    /// Where an unfinished image is drawn.
    canvas: Option<Canvas>,
    /// The number of the last finished image.
    finished: u64,
}

/// The phase in progress.
struct Running {
    phase: Phase,
    total: u64,
    start: Instant,
    bar: Option<Bar>,
}

/// A progress line that is redrawn.
struct Bar {
    line: ProgressBar,
    /// A thread that redraws the line even if there is no progress. `None` if the system refused the thread, at which indicatif's
    /// own ticker would panic.
    ticker: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    fn new(phase: Phase, total: u64) -> Self {
        let line = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        line.set_style(style(phase));
        line.set_message(phase.name());
        let ((sender, receiver), ticking) = (channel::<()>(), line.clone());
        // A step can take so long that a static line would look like a hung program.
        let tick = move || {
            while receiver.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout) {
                ticking.tick();
            }
        };
        line.tick();
        let thread = std::thread::Builder::new().stack_size(threads::STACK).spawn(tick);
        Self { line, ticker: thread.ok().map(|thread| (sender, thread)) }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.ticker.take() {
            // The thread ends when the sender is dropped. It is joined, so that it does not draw over later output.
            drop(sender);
            let _ = thread.join();
        }
        self.line.finish_and_clear();
    }
}

impl Terminal {
    /// Reports on the standard error of this process.
    pub fn new(verbosity: Verbosity) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let live = std::io::stderr().is_terminal() && !dumb;
        let (seconds, running, done, place) = Default::default();
        Self { verbosity, live, seconds, running, done, way: None, place }
    }

    /// Makes [`Terminal::show`] draw in this way.
    pub fn showing(mut self, way: Way) -> Self {
        self.way = Some(way);
        self
    }

    /// Draws the finished image of this number, if images are shown. It stays, in the place of its previews. Otherwise they disappear.
    pub fn show(&self, number: u64, image: &Image, threads: Threads) {
        let mut place = locked(&self.place);
        let size = (image.width, image.height);
        let drawn = self.way.is_some_and(|way| self.replace(&mut place, way, size, image, threads));
        self.finish(&mut place, number, drawn);
    }

    /// Draws a preview of the image of this number above the progress line. The next one replaces it. The finished image will have this
    /// width and height.
    pub fn draw(&self, number: u64, way: Way, size: (usize, usize), image: &Image, threads: Threads) {
        let mut place = locked(&self.place);
        // A preview may come when its image is finished, or when the image before is not.
        if number == place.finished + 1 {
            self.replace(&mut place, way, size, image, threads);
        }
    }

    /// Clears the previews of the image of this number, unless it is finished.
    pub fn finish_drawing(&self, number: u64) {
        let mut place = locked(&self.place);
        if number > place.finished {
            self.finish(&mut place, number, false);
        }
    }

    /// Draws an image in the place of the one before, and returns whether it is there now.
    fn replace(&self, place: &mut Place, way: Way, size: (usize, usize), image: &Image, threads: Threads) -> bool {
        let Some(screen) = Screen::of_stderr() else { return false };
        if let Some(other) = place.canvas.take_if(|canvas| !canvas.is_for(way, size)) {
            self.without_bar(|| write(&other.finish(false)));
        }
        let canvas = place.canvas.get_or_insert_with(|| Canvas::new(way, size));
        // An image that cannot be drawn is no reason to stop.
        let Ok(bytes) = canvas.draw(image, screen, threads) else { return false };
        self.without_bar(|| write(&bytes));
        true
    }

    /// Ends the drawing of the image of this number, which stays with `keep`.
    fn finish(&self, place: &mut Place, number: u64, keep: bool) {
        place.finished = number;
        if let Some(canvas) = place.canvas.take() {
            self.without_bar(|| write(&canvas.finish(keep)));
        }
    }

    /// The duration of each phase.
    pub fn seconds(&self) -> Seconds {
        *locked(&self.seconds)
    }

    /// Prints a line unless the verbosity is quiet.
    pub fn say(&self, text: &str) {
        self.line(Verbosity::Normal, text);
    }

    /// Prints a line whatever the verbosity is.
    #[cfg(feature = "serve")]
    pub fn log(&self, text: &str) {
        self.line(Verbosity::Quiet, text);
    }

    fn line(&self, least: Verbosity, text: &str) {
        if self.verbosity < least {
            return;
        }
        let write = || {
            // The text may contain file names and parts of files.
            let _ = writeln!(std::io::stderr(), "{}", shown_line(text));
        };
        self.interject(write);
    }

    /// Writes something to standard output or standard error. A progress line and an unfinished image are cleared before, and come
    /// back below.
    pub fn interject<T>(&self, print: impl FnOnce() -> T) -> T {
        let mut place = locked(&self.place);
        let canvas = &mut place.canvas;
        // An image may be drawn where no line is.
        if !self.live && canvas.is_none() {
            drop(place);
            return print();
        }
        self.without_bar(|| {
            canvas.iter_mut().for_each(|canvas| write(&canvas.hide()));
            let printed = print();
            canvas.iter_mut().for_each(|canvas| write(&canvas.show_again()));
            printed
        })
    }

    /// Does something while no progress line is visible.
    fn without_bar<T>(&self, work: impl FnOnce() -> T) -> T {
        match locked(&self.running).as_ref().and_then(|running| running.bar.as_ref()) {
            Some(bar) => bar.line.suspend(work),
            None => work(),
        }
    }
}

impl Drop for Terminal {
    /// Leaves neither a progress line nor an unfinished image, however the run ended.
    fn drop(&mut self) {
        *locked(&self.running) = None;
        self.finish(&mut locked(&self.place), u64::MAX, false);
    }
}

impl Progress for Terminal {
    fn begin(&self, phase: Phase, total: u64) {
        let bar = (self.live && self.verbosity > Verbosity::Quiet).then(|| Bar::new(phase, total));
        *locked(&self.running) = Some(Running { phase, total, start: Instant::now(), bar });
        self.done.store(0, Ordering::Relaxed);
    }

    fn advance(&self, amount: u64) {
        let done = self.done.fetch_add(amount, Ordering::Relaxed) + amount;
        // Whoever draws an image right now has the lock, and the terminal may be slow. The work goes on meanwhile.
        let Ok(running) = self.running.try_lock() else { return };
        if let Some(Running { start, bar: Some(Bar { line, .. }), .. }) = &*running {
            line.set_prefix(per_step(start.elapsed().as_secs_f64(), done));
            line.set_position(done);
        }
    }

    fn end(&self) {
        // This is a separate statement because `say` below locks `running` again.
        let running = locked(&self.running).take();
        let Some(Running { phase, total, start, bar, .. }) = running else { return };
        let seconds = start.elapsed().as_secs_f64();
        let mut all = self.seconds();
        let before = if phase == Phase::Load { all.load } else { 0.0 };
        if let Some(of_phase) = all.of(phase) {
            *of_phase = before + seconds;
        }
        *locked(&self.seconds) = all;
        drop(bar);
        self.say(&summary(phase, total, seconds));
    }

    fn detail(&self, text: &str) {
        self.line(Verbosity::Verbose, text);
    }

    fn warn(&self, text: &str) {
        self.say(&format!("warning: {text}"));
    }
}

/// Writes a part of an image to standard error, if it can be written to.
fn write(bytes: &[u8]) {
    let _ = draw::write(bytes, &mut std::io::stderr());
}

/// A value behind a lock. A panic while it was held leaves nothing half-done.
fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The line for a finished phase.
fn summary(phase: Phase, total: u64, seconds: f64) -> String {
    let name = phase.name();
    match phase {
        Phase::Load | Phase::Quantize | Phase::Inspect | Phase::Hash => format!("{name} {seconds:.1} s ({})", HumanBytes(total)),
        Phase::Denoise | Phase::Calibrate if total > 1 => {
            format!("{name} {seconds:.1} s ({total} steps, {})", per_step(seconds, total))
        }
        _ => format!("{name} {seconds:.1} s"),
    }
}

fn per_step(seconds: f64, steps: u64) -> String {
    format!("{:.2} s/step", seconds / steps.max(1) as f64)
}

/// The style of the progress line of a phase.
fn style(phase: Phase) -> ProgressStyle {
    // A template that does not parse would be a bug in this file; a test below checks all of them.
    let style = ProgressStyle::with_template(template(phase)).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ").tick_chars(r"|/-\ ")
}

const fn template(phase: Phase) -> &'static str {
    match phase {
        Phase::Load => "{msg} [{bar:24}] {bytes}/{total_bytes}",
        Phase::Quantize | Phase::Inspect | Phase::Hash => {
            "{spinner} {msg} [{bar:24}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left"
        }
        Phase::Denoise | Phase::References => "{spinner} {msg} [{bar:24}] {pos}/{len} {prefix}",
        Phase::Calibrate => "{spinner} {msg} [{bar:24}] {pos}/{len} {prefix}, {eta} left",
        Phase::Encode | Phase::Decode => "{spinner} {msg} {elapsed}",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_parse() {
        use Phase::{Calibrate, Decode, Denoise, Encode, Hash, Inspect, Load, Quantize, References};
        for phase in [Load, Encode, References, Denoise, Decode, Calibrate, Quantize, Inspect, Hash] {
            assert!(ProgressStyle::with_template(template(phase)).is_ok(), "{phase:?}");
        }
    }

    #[test]
    fn finished_phases_are_one_line() {
        assert_eq!(summary(Phase::Load, 3 << 29, 0.26), "loading weights 0.3 s (1.50 GiB)");
        assert_eq!(summary(Phase::Encode, 1, 0.21), "encoding text 0.2 s");
        assert_eq!(summary(Phase::Denoise, 4, 1.72), "denoising 1.7 s (4 steps, 0.43 s/step)");
        assert_eq!(summary(Phase::Denoise, 1, 1.72), "denoising 1.7 s");
        assert_eq!(summary(Phase::Calibrate, 8, 172.0), "calibrating 172.0 s (8 steps, 21.50 s/step)");
    }

    #[test]
    fn seconds_are_kept_by_phase() {
        let terminal = Terminal::new(Verbosity::Quiet);
        terminal.begin(Phase::Denoise, 2);
        terminal.advance(1);
        terminal.detail("unheard");
        std::thread::sleep(Duration::from_millis(2));
        terminal.end();
        // An end without a beginning and progress outside of a phase must not panic.
        terminal.end();
        terminal.advance(1);
        let seconds = terminal.seconds();
        assert!(seconds.denoise >= 0.002, "{seconds:?}");
        assert_eq!(Seconds { denoise: 0.0, ..seconds }, Seconds::default());
        for _ in 0..2 {
            terminal.begin(Phase::Load, 1);
            std::thread::sleep(Duration::from_millis(2));
            terminal.end();
        }
        assert!(terminal.seconds().load >= 0.004, "{:?}", terminal.seconds());
        assert!(Verbosity::new(true, false) < Verbosity::new(false, false));
        assert!(Verbosity::new(false, false) < Verbosity::new(false, true));
    }
}
