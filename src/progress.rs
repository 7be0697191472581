//! The interface through which the library reports progress. It never prints anything; the caller decides what to show.

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
    /// Running prompts to see what the layers of a model multiply; counted in denoising steps.
    Calibrate,
    /// Writing a quantised model; counted in bytes.
    Quantise,
    /// Looking at every value of a model's files; counted in bytes.
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
            Self::Quantise => "quantising",
            Self::Inspect => "reading all values",
            Self::Hash => "hashing files",
        }
    }
}

/// A receiver of progress reports.
pub trait Progress {
    /// A phase begins; `total` is the sum of all amounts that [`Progress::advance`] will report.
    fn begin(&self, phase: Phase, total: u64);

    /// A part of the phase is done.
    fn advance(&self, amount: u64);

    /// The phase is over.
    fn end(&self);

    /// A detail for verbose output.
    fn detail(&self, text: &str);

    /// A warning to the user.
    fn warn(&self, text: &str);
}

/// Discards all reports.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _phase: Phase, _total: u64) {}
    fn advance(&self, _amount: u64) {}
    fn end(&self) {}
    fn detail(&self, _text: &str) {}
    fn warn(&self, _text: &str) {}
}
