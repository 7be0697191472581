//! Number formats, tensor descriptors, and the loops of the CPU backend over them.
//!
//! The loops are a separate crate because they take most of the time of a test: a quick build optimizes this crate and not the
//! rest of kiln. Only kiln calls it.
#![allow(missing_docs)]

pub mod hashed;
pub mod idct;
pub mod image;
pub mod kernels;
pub mod math;
pub mod merging;
pub mod resample;
pub mod scan;
pub mod tensor;
pub mod up_conv;
pub mod view;

/// Which elements of a head form the pairs that RoPE rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Adjacent elements, (0, 1), (2, 3), ..., as in the FLUX.2 transformer.
    Interleaved,
    /// One element of each half, (0, d/2), (1, d/2 + 1), ..., as in Qwen3.
    HalfSplit,
}

/// How a convolution changes the resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// The resolution stays. The input is padded by one pixel of zeros on every side.
    Same,
    /// The input is upsampled by two (nearest neighbor) and padded as for `Same`. That equals four 2x2 convolutions of the input,
    /// one for each parity of the output's row and column (a phase). The weight holds their filters.
    Up,
    /// Stride two. The input is padded by zeros at the right and bottom edge only.
    Down,
}

impl Sampling {
    /// The number of phases of output pixels. Each phase has its own filters.
    pub const fn phases(self) -> usize {
        match self {
            Self::Up => 4,
            Self::Same | Self::Down => 1,
        }
    }

    /// Filter taps per phase.
    pub const fn taps(self) -> usize {
        match self {
            Self::Up => 4,
            Self::Same | Self::Down => 9,
        }
    }
}

/// The edge at which a tile of an image overlaps the tile before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seam {
    /// The top edge: matrix rows are rows of pixels.
    Top,
    /// The left edge: matrix columns are pixels of `channels` channels.
    Left {
        /// Columns per pixel.
        channels: usize,
    },
}
