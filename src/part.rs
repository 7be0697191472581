//! The parts of a model that have weights.

use std::fmt;

/// One of the three networks of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The denoiser.
    Transformer,
    /// Qwen3.
    TextEncoder,
    /// The image autoencoder.
    Vae,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transformer => "transformer",
            Self::TextEncoder => "text encoder",
            Self::Vae => "vae",
        })
    }
}
