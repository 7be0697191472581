//! Number formats, tensor descriptors, and the loops of the CPU backend over them.
//!
//! These loops are a crate of their own because they take most of the time of a test: a quick build optimizes this crate and not the rest
//! of kiln. Only kiln calls it.
#![allow(missing_docs)]

pub mod hashed;
pub mod idct;
pub mod image;
pub mod kernels;
pub mod lanczos;
pub mod math;
pub mod merging;
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
    /// The resolution stays; the input is padded by one pixel of zeros on every side.
    Same,
    /// The input is first upsampled by two, by nearest neighbor, and padded as above. That is four 2x2 convolutions of the input, one
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
