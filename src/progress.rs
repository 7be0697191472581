//! How the library tells what it is doing. It never prints; whoever calls it decides what to show.

/// A part of the work that takes noticeable time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Placing weights, in parts; counted in bytes.
    Load,
    /// Running the text encoder; counted in prompts.
    Encode,
    /// Turning reference images into tokens; counted in images.
    References,
    /// Denoising; counted in steps.
    Denoise,
    /// Turning latents into pixels.
    Decode,
}

impl Phase {
    /// What a person reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "loading weights",
            Self::Encode => "encoding text",
            Self::References => "encoding references",
            Self::Denoise => "denoising",
            Self::Decode => "decoding",
        }
    }
}

/// Somebody who wants to know.
pub trait Progress {
    /// A phase begins; `total` is how much [`Progress::advance`] will add up to.
    fn begin(&self, phase: Phase, total: u64);

    /// Some of the phase is done.
    fn advance(&self, amount: u64);

    /// The phase is over.
    fn end(&self);

    /// Something that only a curious user wants to read.
    fn detail(&self, text: &str);

    /// Something the user should know.
    fn warn(&self, text: &str);
}

/// Nobody listening.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _phase: Phase, _total: u64) {}
    fn advance(&self, _amount: u64) {}
    fn end(&self) {}
    fn detail(&self, _text: &str) {}
    fn warn(&self, _text: &str) {}
}
