//! Operands of the image ops: convolutions, group norms, latent statistics, shortcuts.

use super::Linear;
use crate::tensor::Tensor;

/// A 3x3 convolution with bias.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    /// The weight, `[out, in * 9]`, or with [`Sampling::Up`] in phase form, `[out, in * 16]`. It is uploaded as
    /// [`Role::Conv`](crate::backend::Role::Conv) or [`Role::UpConv`](crate::backend::Role::UpConv). A backend stores it in an order of its
    /// own.
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

/// A group normalization.
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

/// Statistics that normalize the VAE's latents to unit variance, one pair per packed channel.
#[derive(Clone, Copy, Debug)]
pub struct LatentStats {
    /// Means, `[1, channels]`.
    pub mean: Tensor,
    /// Variances, `[1, channels]`.
    pub var: Tensor,
    /// Added to the variance.
    pub eps: f32,
}
