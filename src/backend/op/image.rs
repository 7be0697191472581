//! What the image ops take: convolutions, group norms, statistics of latents, overlaps of tiles.

use super::Linear;
use crate::tensor::Tensor;

/// A 3x3 convolution with bias.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    /// The weight, `[out, in * 9]`; with [`Sampling::Up`] it is in phase form, `[out, in * 16]`. It is uploaded as
    /// [`Role::Conv`](crate::backend::Role::Conv) or [`Role::UpConv`](crate::backend::Role::UpConv), and a backend has it in an
    /// order of its own.
    pub weight: Tensor,
    /// The bias, `[1, out]`.
    pub bias: Tensor,
}

/// The shortcut of a residual block: a 1x1 convolution of another image.
#[derive(Clone, Copy, Debug)]
pub struct Shortcut<'a> {
    /// `[out pixels, its channels]`.
    pub x: Tensor,
    /// Weight and bias, `[out channels, its channels]`.
    pub w: &'a Linear,
}

/// A group normalisation.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    /// Scale, `[1, channels]`.
    pub weight: Tensor,
    /// Shift, `[1, channels]`.
    pub bias: Tensor,
    /// Number of groups.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f32,
}

/// Statistics that normalise the VAE's latents to unit variance, one pair per packed channel.
#[derive(Clone, Copy, Debug)]
pub struct LatentStats {
    /// Means, `[1, channels]`.
    pub mean: Tensor,
    /// Variances, `[1, channels]`.
    pub var: Tensor,
    /// Added to the variance.
    pub eps: f32,
}

/// How a convolution changes the resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// The resolution stays; the input is padded by one pixel of zeros on every side.
    Same,
    /// The input is first upsampled by two, by nearest neighbour, and padded as above. That is four 2x2 convolutions of the input, one
    /// for each parity of the output's row and column (a phase), and the weight has their filters.
    Up,
    /// Stride two; the input is padded by zeros at the right and bottom edge only.
    Down,
}

impl Sampling {
    /// In how many phases output pixels are computed, each with filters of its own.
    pub const fn phases(self) -> usize {
        match self {
            Self::Up => 4,
            Self::Same | Self::Down => 1,
        }
    }

    /// Filter taps of a phase.
    pub const fn taps(self) -> usize {
        match self {
            Self::Up => 4,
            Self::Same | Self::Down => 9,
        }
    }
}

/// Where a tile of an image overlaps the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seam {
    /// At its top: the rows of the matrix are rows of pixels.
    Top,
    /// At its left: the columns of the matrix are pixels of so many channels.
    Left {
        /// Columns of a pixel.
        channels: usize,
    },
}
