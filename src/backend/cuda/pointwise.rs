//! Ops in which every value depends on few others: element-wise functions and permutations. All are bound by memory bandwidth.

use super::abi::{self, KlMat};
use super::context::OpContext;
use super::launch::Kernel;
use super::params::{NONE, flatten, pointwise_grid};
use crate::backend::{LatentStats, Seam};
use crate::error::Result;

/// Applies a function of `kl_map` to every value.
pub fn map(cx: &OpContext, function: u32, out: KlMat, x: KlMat) -> Result<()> {
    let [out, x] = flatten([out, x]);
    cx.kernels.launch(Kernel::Map, pointwise_grid(&out), &abi::KlMap { out, x, function, unused: 0 })
}

/// Turns latents into tokens, or back, depending on `kernel`.
pub fn patchify(cx: &OpContext, kernel: Kernel, tokens: KlMat, pixels: KlMat, stats: &LatentStats, width: usize) -> Result<()> {
    let (mean, var) = (cx.mat(stats.mean, "patchify")?, cx.mat(stats.var, "patchify")?);
    let p = abi::KlPatch { tokens, pixels, mean, var, width: width as u32, eps: stats.eps };
    cx.kernels.launch(kernel, pointwise_grid(&tokens), &p)
}

/// One Euler step of the flow.
pub fn euler(cx: &OpContext, latents: KlMat, velocity: KlMat, dt: f32) -> Result<()> {
    let [latents, velocity] = flatten([latents, velocity]);
    cx.kernels.launch(Kernel::Euler, pointwise_grid(&latents), &abi::KlEuler { latents, velocity, dt, unused: 0 })
}

/// An image at a noise level, in the rows to keep.
pub fn renoise(cx: &OpContext, [latents, init, noise]: [KlMat; 3], keep: Option<KlMat>, sigma: f32) -> Result<()> {
    let cols = latents.cols;
    let [latents, init, noise] = flatten([latents, init, noise]);
    let p = abi::KlRenoise { latents, init, noise, keep: keep.unwrap_or(NONE), sigma, cols };
    cx.kernels.launch(Kernel::Renoise, pointwise_grid(&latents), &p)
}

/// Classifier-free guidance.
pub fn guidance(cx: &OpContext, out: KlMat, cond: KlMat, uncond: KlMat, scale: f32) -> Result<()> {
    let [out, cond, uncond] = flatten([out, cond, uncond]);
    cx.kernels.launch(Kernel::Guidance, pointwise_grid(&out), &abi::KlGuidance { out, cond, uncond, scale, unused: 0 })
}

/// Blends the overlap of two image tiles. The matrices are not flattened: weights depend on rows and columns.
pub fn blend(cx: &OpContext, into: KlMat, from: KlMat, seam: Seam) -> Result<()> {
    let (channels, steps) = match seam {
        Seam::Top => (0, into.rows),
        Seam::Left { channels } => (channels as u32, into.cols / channels as u32),
    };
    cx.kernels.launch(Kernel::Blend, pointwise_grid(&into), &abi::KlBlend { into, from, channels, steps })
}

/// Counts the values that are not finite.
pub fn non_finite(cx: &OpContext, count: KlMat, x: KlMat) -> Result<()> {
    let [x] = flatten([x]);
    let p = abi::KlCount { count, x, words: cx.memory.counters() };
    cx.kernels.launch(Kernel::CountNonFinite, reduction_grid(cx, &x), &p)
}

/// The largest magnitude of `x` and an earlier result.
pub fn largest_magnitude(cx: &OpContext, largest: KlMat, x: KlMat) -> Result<()> {
    let [x] = flatten([x]);
    cx.kernels.launch(Kernel::LargestMagnitude, reduction_grid(cx, &x), &abi::KlLargest { largest, x })
}

/// The grid of a kernel that reduces a matrix to one value.
fn reduction_grid(cx: &OpContext, x: &KlMat) -> [u32; 3] {
    /// CTAs that are resident on an SM at the same time.
    const CTAS_PER_SM: u32 = 8;
    // No more CTAs than run at once, and enough work for a batch of loads per thread.
    let most = CTAS_PER_SM * cx.sms;
    let value_bytes = if x.dtype == abi::KL_F32 { 4 } else { 2 };
    let batch_bytes = abi::KL_POINTWISE_THREADS * abi::KL_REDUCTION_BATCH * 16;
    let columns = x.cols.div_ceil(batch_bytes / value_bytes).clamp(1, most);
    [columns, x.rows.clamp(1, most.div_ceil(columns)), 1]
}

/// The colors of latents. A thread takes a pixel.
pub fn preview(cx: &OpContext, out: KlMat, latents: KlMat, table: KlMat, width: usize) -> Result<()> {
    let grid = [out.rows.div_ceil(abi::KL_POINTWISE_THREADS), 1, 1];
    cx.kernels.launch(Kernel::Preview, grid, &abi::KlPreview { out, latents, table, width: width as u32, unused: 0 })
}

/// Converts values within -1..1 to bytes.
pub fn pixels(cx: &OpContext, out: KlMat, x: KlMat) -> Result<()> {
    let [out, x] = flatten([out, x]);
    cx.kernels.launch(Kernel::Pixels, pointwise_grid(&out), &abi::KlPixels { out, x })
}
