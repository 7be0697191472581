//! Shape rules: which operands fit each other.

use super::{Access, Linear, Op, Sampling, Seam, Softmax};
use crate::error::{Error, Result};
use crate::tensor::formats::Format;
use crate::tensor::{DType, Region, ScaleKind, Scaling, Tensor};

impl Op<'_> {
    /// Checks that the operands fit each other, and that nothing is read or written while it is being overwritten.
    pub fn check(&self) -> Result<()> {
        let fits = |ok: bool, what: &str| {
            if ok { Ok(()) } else { Err(Error::Op { op: self.name(), what: format!("{what} in {self:?}") }) }
        };
        let same = |a: Tensor, b: Tensor| a.rows == b.rows && a.cols == b.cols;
        let row = |t: Tensor, cols: usize| t.rows == 1 && t.cols == cols;
        let vector = |t: Tensor, cols: usize| row(t, cols) && t.dtype == DType::F32;
        let is_head = |t: &Tensor| t.dtype.format().block == 1;
        let gemm = |x: Tensor, w: &Linear| {
            let parts = w.weight.parts().iter().all(|part| part.cols == x.cols && part.stride == part.cols);
            let lora = w.lora.is_none_or(|l| {
                let plain = !l.down.dtype.is_quantized() && !l.up.dtype.is_quantized();
                l.down.cols == x.cols && l.up.rows == w.weight.rows() && l.up.cols == l.down.rows && plain
            });
            // An input has to be stored in the format that its layer was loaded for. Plain values of any type can be multiplied.
            let quantized = x.dtype.is_quantized() || w.input.dtype.is_quantized();
            let stored = !quantized || x.stored() == w.input;
            parts && lora && stored && w.bias.is_none_or(|b| vector(b, w.weight.rows()))
        };
        match *self {
            Self::Copy { out, x } | Self::Silu { out, x } => fits(same(out, x), "shapes")?,
            Self::RmsNorm { out, x, weight, .. } => fits(same(out, x) && vector(weight, x.cols), "shapes")?,
            Self::LayerNormModulate { streams, .. } => {
                for s in streams {
                    fits(same(s.out, s.x) && row(s.shift, s.x.cols) && row(s.scale, s.x.cols), "shapes")?;
                }
            }
            Self::Linear(streams) => {
                for s in streams {
                    fits(gemm(s.x, s.w) && s.out.rows == s.x.rows && s.out.cols == s.w.weight.rows(), "shapes")?;
                }
            }
            Self::LinearSwiglu(streams) => {
                for s in streams {
                    let wide = s.w.weight.rows() == 2 * s.out.cols;
                    fits(gemm(s.x, s.w) && s.out.rows == s.x.rows && wide && s.w.bias.is_none(), "shapes")?;
                }
            }
            Self::LinearGateResidual(streams) => {
                for s in streams {
                    let gate = s.gate.is_none_or(|g| row(g, s.into.cols) && !g.dtype.is_quantized());
                    fits(gemm(s.x, s.w) && gate && s.into.rows == s.x.rows && s.into.cols == s.w.weight.rows(), "shapes")?;
                }
            }
            Self::Qkv(streams) => {
                for s in streams {
                    let d = s.rope.table.cols;
                    let q_cols = s.q.map_or(0, |q| q.cols);
                    let wide = q_cols + s.k.cols + s.v.cols + s.mlp.map_or(0, |m| 2 * m.cols);
                    let rows = [s.q, Some(s.k), Some(s.v), s.mlp, Some(s.rope.table)];
                    fits(gemm(s.x, s.w) && wide == s.w.weight.rows() && s.w.bias.is_none(), "shapes")?;
                    fits(rows.iter().flatten().all(|t| t.rows == s.x.rows), "rows")?;
                    fits(d > 0 && d % 2 == 0 && q_cols % d == 0 && s.k.cols % d == 0 && s.k.cols == s.v.cols, "heads")?;
                    let norm = s.norm.is_none_or(|norm| vector(norm.q, d) && vector(norm.k, d));
                    fits(norm && s.rope.table.dtype == DType::F32, "norms and table")?;
                    fits(s.q_scale > 0.0 && s.k_scale > 0.0, "scales")?;
                    fits([s.q, Some(s.k), Some(s.v)].iter().flatten().all(is_head), "heads in e2m1")?;
                }
            }
            Self::Attention { out, q, kv, head_dim, causal, softmax } => {
                let rows: usize = out.iter().map(|o| o.rows).sum();
                fits(rows == q.rows && out.iter().all(|o| o.cols == q.cols), "shapes")?;
                fits(head_dim > 0 && q.cols % head_dim == 0 && !kv.is_empty(), "heads or segments")?;
                let kv_cols = kv[0].k.cols;
                fits(kv.iter().all(|s| same(s.k, s.v) && s.k.cols == kv_cols), "segments")?;
                fits(kv_cols > 0 && kv_cols % head_dim == 0 && q.cols % kv_cols == 0, "heads")?;
                fits(kv.iter().any(|s| s.k.rows > 0), "no keys")?;
                fits(!causal || kv.len() == 1, "a causal mask over several segments")?;
                fits(!causal || out.len() == 1, "a causal mask over several outputs")?;
                fits(is_head(&q) && kv.iter().all(|s| is_head(&s.k) && is_head(&s.v)), "heads in e2m1")?;
                fits(out.iter().all(|o| head_dim.is_multiple_of(o.dtype.format().block)), "blocks across heads")?;
                fits(
                    match softmax {
                        Softmax::Natural { scale } => scale > 0.0,
                        Softmax::Base2 { bound } => bound >= 0.0,
                    },
                    "softmax",
                )?;
            }
            Self::Conv { out, x, w, width, height, sampling, residual, shortcut, stats } => {
                let pixels = match sampling {
                    Sampling::Same => width * height,
                    Sampling::Up => 4 * width * height,
                    Sampling::Down => (width / 2) * (height / 2),
                };
                fits(x.rows == width * height && out.rows == pixels, "pixels")?;
                fits(sampling != Sampling::Down || (width % 2 == 0 && height % 2 == 0), "odd side")?;
                let filters = sampling.phases() * sampling.taps();
                fits(w.weight.cols == filters * x.cols && w.weight.rows == out.cols && vector(w.bias, out.cols), "channels")?;
                if let Some(s) = shortcut {
                    fits(residual.is_none() && sampling == Sampling::Same && s.w.lora.is_none(), "shortcut")?;
                    let shapes = s.x.rows == out.rows && s.w.weight.rows() == out.cols;
                    fits(gemm(s.x, s.w) && shapes && !s.x.dtype.is_quantized(), "shortcut's shapes")?;
                }
                let plain = [Some(x), Some(w.weight), residual].iter().flatten().all(|t| !t.dtype.is_quantized());
                fits(plain, "quantized values")?;
                fits(residual.is_none_or(|r| same(r, out)), "residual")?;
                fits(
                    stats.is_none_or(|s| s.cols == 2 && s.rows > 0 && out.cols % s.rows == 0 && s.dtype == DType::F32),
                    "stats",
                )?;
            }
            Self::GroupNorm { out, x, norm, stats, .. } => {
                fits(same(out, x) && vector(norm.weight, x.cols) && vector(norm.bias, x.cols), "shapes")?;
                fits(norm.groups > 0 && x.cols % norm.groups == 0, "groups")?;
                fits(stats.is_none_or(|s| s.cols == 2 && s.rows == norm.groups && s.dtype == DType::F32), "stats")?;
                // Kernels that compute statistics subtract the first pixel, which another CTA may already have normalized.
                fits(out != x || stats.is_some(), "stats in place")?;
            }
            Self::NormConv { out, x, norm, stats, w, width, height } => {
                fits(x.rows == width * height && out.rows == x.rows, "pixels")?;
                fits(w.weight.cols == 9 * x.cols && w.weight.rows == out.cols && vector(w.bias, out.cols), "channels")?;
                fits(vector(norm.weight, x.cols) && vector(norm.bias, x.cols), "shapes")?;
                fits(norm.groups > 0 && x.cols % norm.groups == 0, "groups")?;
                fits(stats.is_none_or(|s| s.cols == 2 && s.rows == norm.groups && s.dtype == DType::F32), "stats")?;
            }
            Self::Patchify { out: tokens, x: pixels, stats, width }
            | Self::Unpatchify { out: pixels, x: tokens, stats, width } => {
                fits(pixels.rows == 4 * tokens.rows && tokens.cols == 4 * pixels.cols, "shapes")?;
                fits(width > 0 && tokens.rows % width == 0, "width")?;
                fits(vector(stats.mean, tokens.cols) && vector(stats.var, tokens.cols), "statistics")?;
            }
            Self::Euler { latents, velocity, .. } => {
                fits(same(latents, velocity) && latents.dtype == DType::F32, "shapes")?;
            }
            Self::Renoise { latents, init, noise, keep, sigma } => {
                fits(same(latents, init) && same(latents, noise) && latents.dtype == DType::F32, "shapes")?;
                fits(keep.is_none_or(|k| k.rows == latents.rows && k.cols == 1 && k.dtype == DType::F32), "rows to keep")?;
                fits((0.0..=1.0).contains(&sigma), "noise level")?;
            }
            Self::Guidance { out, cond, uncond, .. } => fits(same(out, cond) && same(out, uncond), "shapes")?,
            Self::Blend { into, from, seam } => {
                fits(same(into, from), "shapes")?;
                let whole = |channels: usize| channels > 0 && into.cols.is_multiple_of(channels);
                fits(!matches!(seam, Seam::Left { channels } if !whole(channels)), "pixels")?;
            }
            Self::NonFinite { count: one, .. } | Self::LargestMagnitude { largest: one, .. } => fits(vector(one, 1), "shapes")?,
            Self::Preview { out, latents, table, width } => {
                fits(out.rows == 4 * latents.rows && out.cols == 3 && out.dtype == DType::U8, "pixels")?;
                fits(latents.cols == 4 * table.rows.saturating_sub(1) && latents.dtype == DType::F32, "channels")?;
                fits(table.rows > 0 && table.cols == 3 && table.dtype == DType::F32, "table")?;
                fits(width > 0 && latents.rows % width == 0, "width")?;
            }
            Self::Pixels { out, x } => fits(same(out, x) && out.dtype == DType::U8, "shapes")?,
        }

        let mut operands = Vec::with_capacity(24);
        self.operands(&mut |t, access| operands.push((t, access)));
        for (i, &(a, access)) in operands.iter().enumerate() {
            fits(a.stride >= a.cols || a.rows <= 1, "rows overlap")?;
            fits(scaling_fits(a), "scales")?;
            fits(!a.dtype.is_quantized() || self.takes_quantized(access), "quantized values")?;
            let bytes = matches!(*self, Self::Pixels { out, .. } | Self::Preview { out, .. } if out == a);
            fits(a.dtype != DType::U8 || bytes, "bytes used as values")?;
            for (j, &(b, other)) in operands.iter().enumerate() {
                let clash = i != j && access != Access::Read && (other == Access::Read || i < j) && a.overlaps(b);
                fits(!clash, "operands overlap")?;
            }
        }
        Ok(())
    }

    /// Whether operands with this access may be quantized: the inputs of matrix ops may, and so may the ops that produce them. The residual
    /// stream, latents and modulations keep their precision.
    fn takes_quantized(&self, access: Access) -> bool {
        let product = matches!(self, Self::LinearSwiglu(_) | Self::Qkv(_) | Self::Attention { .. });
        match access {
            // The only layer of a convolution is its shortcut.
            Access::Read => product || matches!(self, Self::Linear(_) | Self::LinearGateResidual(_) | Self::Conv { .. }),
            Access::Write => product || matches!(self, Self::RmsNorm { .. } | Self::LayerNormModulate { .. }),
            Access::Update => false,
        }
    }
}

/// Whether the scales of a tensor fit its format, and cover whole blocks.
fn scaling_fits(t: Tensor) -> bool {
    let Format { block, scales, holds_results, .. } = t.dtype.format();
    let fits = match (scales, t.scaling) {
        (ScaleKind::None | ScaleKind::TensorOrRows, Scaling::Unscaled) | (ScaleKind::TensorOrRows, Scaling::Tensor(_)) => true,
        // Only weights have row scales.
        (ScaleKind::TensorOrRows, Scaling::Rows(_)) => t.region == Region::Weights,
        (ScaleKind::Blocks, Scaling::Blocks16 { .. }) => {
            let (elements, scales) = (t.extent(), t.scale_extent());
            elements.end <= scales.start || scales.end <= elements.start
        }
        _ => false,
    };
    fits && t.cols.is_multiple_of(*block) && t.stride.is_multiple_of(*block) && (*holds_results || t.region == Region::Weights)
}
