//! The interface through which the library reports progress. The library never prints anything; the caller decides what to show.

use crate::image::Image;
use crate::trace::{self, Span};
use std::cell::RefCell;
use std::time::Instant;

/// A phase of a run that takes noticeable time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Loading weights, in parts; counted in bytes.
    Load,
    /// Running the text encoder; counted in prompts.
    Encode,
    /// Encoding reference images to tokens; counted in images.
    References,
    /// Denoising; counted in steps.
    Denoise,
    /// Decoding latents to pixels.
    Decode,
    /// Running prompts to measure the inputs of a model's layers; counted in denoising steps.
    Calibrate,
    /// Writing a quantized model; counted in bytes.
    Quantize,
    /// Checking every value of a model's files; counted in bytes.
    Inspect,
    /// Hashing a model's files; counted in bytes.
    Hash,
}

impl Phase {
    /// The display name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "loading weights",
            Self::Encode => "encoding text",
            Self::References => "encoding references",
            Self::Denoise => "denoising",
            Self::Decode => "decoding",
            Self::Calibrate => "calibrating",
            Self::Quantize => "quantizing",
            Self::Inspect => "reading all values",
            Self::Hash => "hashing files",
        }
    }

    /// The name of a counted item, if each one is worth a trace span.
    const fn item(self) -> Option<&'static str> {
        match self {
            Self::References => Some("reference"),
            Self::Denoise => Some("step"),
            _ => None,
        }
    }
}

/// How previews of an image are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreviewKind {
    /// By a table of colors, with a pixel for 8x8 pixels of the image. Only for models with such a table.
    Fast,
    /// By the VAE, at the image's size.
    Full,
}

/// Receives progress reports. By default each method discards its report.
pub trait Progress {
    /// A phase begins; `total` is the sum of all amounts that [`Progress::advance`] will report.
    fn begin(&self, _phase: Phase, _total: u64) {}

    /// A part of the phase is done.
    fn advance(&self, _amount: u64) {}

    /// The phase is over.
    fn end(&self) {}

    /// A detail for verbose output.
    fn detail(&self, _text: &str) {}

    /// A warning to the user.
    fn warn(&self, _text: &str) {}

    /// Which previews [`Progress::preview`] is to receive. Without any nothing is computed or copied for them.
    fn wants_preview(&self) -> Option<PreviewKind> {
        None
    }

    /// Whether a step has a preview, the first step being 1. `None` leaves it to the pace: steps that end within 200 ms of the last preview
    /// are passed over.
    fn wants_preview_of(&self, _step: usize, _steps: usize) -> Option<bool> {
        None
    }

    /// How the image looks after a step. The last step's preview is the finished image, of whichever kind.
    fn preview(&self, _step: usize, _image: Image) {}
}

/// Discards all reports.
pub struct Silent;

impl Progress for Silent {}

/// Forwards all reports, and records phases and their steps in the trace, if there is one. Dropping this ends phases that an error left
/// open.
pub(crate) struct Traced<'a> {
    to: &'a dyn Progress,
    open: RefCell<Vec<OpenPhase>>,
}

struct OpenPhase {
    item: Option<&'static str>,
    /// The start of the current item.
    since: Instant,
    _span: Span,
}

impl<'a> Traced<'a> {
    /// Forwards reports to `to`.
    pub fn new(to: &'a dyn Progress) -> Self {
        Self { to, open: RefCell::default() }
    }
}

impl Progress for Traced<'_> {
    fn begin(&self, phase: Phase, total: u64) {
        if trace::is_on() {
            // The first item starts after its phase.
            let span = trace::span(phase.name());
            self.open.borrow_mut().push(OpenPhase { item: phase.item(), since: Instant::now(), _span: span });
        }
        self.to.begin(phase, total);
    }

    fn advance(&self, amount: u64) {
        if let Some(OpenPhase { item: Some(item), since, .. }) = self.open.borrow_mut().last_mut() {
            trace::since(*since, item);
            *since = Instant::now();
        }
        self.to.advance(amount);
    }

    fn end(&self) {
        self.to.end();
        self.open.borrow_mut().pop();
    }

    fn detail(&self, text: &str) {
        self.to.detail(text);
    }

    fn warn(&self, text: &str) {
        self.to.warn(text);
    }

    fn wants_preview(&self) -> Option<PreviewKind> {
        self.to.wants_preview()
    }

    fn wants_preview_of(&self, step: usize, steps: usize) -> Option<bool> {
        self.to.wants_preview_of(step, steps)
    }

    fn preview(&self, step: usize, image: Image) {
        self.to.preview(step, image);
    }
}

impl Drop for Traced<'_> {
    fn drop(&mut self) {
        // Inner spans end first.
        let open = self.open.get_mut();
        while open.pop().is_some() {}
    }
}
