//! Shape rules: what makes the operands of an op fit each other.

use super::{Access, Linear, Op, Sampling};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

impl Op<'_> {
    /// Checks that the operands fit each other, and that nothing is read or written while it is being overwritten.
    pub fn check(&self) -> Result<()> {
        let fits = |ok: bool, what: &str| {
            if ok { Ok(()) } else { Err(Error::Op { op: self.name(), what: format!("{what} in {self:?}") }) }
        };
        let same = |a: Tensor, b: Tensor| a.rows == b.rows && a.cols == b.cols;
        let row = |t: Tensor, cols: usize| t.rows == 1 && t.cols == cols;
        let vector = |t: Tensor, cols: usize| row(t, cols) && t.dtype == DType::F32;
        let gemm = |x: Tensor, w: &Linear| {
            x.cols == w.weight.cols && w.weight.stride == w.weight.cols && w.bias.is_none_or(|b| vector(b, w.weight.rows))
        };
        match *self {
            Self::Embed { out, ids, table } => {
                fits(ids.dtype == DType::U32 && ids.cols == 1 && ids.rows == out.rows && out.cols == table.cols, "shapes")?;
            }
            Self::Copy { out, x } | Self::Silu { out, x } => fits(same(out, x), "shapes")?,
            Self::RmsNorm { out, x, weight, .. } => fits(same(out, x) && vector(weight, x.cols), "shapes")?,
            Self::LayerNormModulate { streams, .. } => {
                for s in streams {
                    fits(same(s.out, s.x) && row(s.shift, s.x.cols) && row(s.scale, s.x.cols), "shapes")?;
                }
            }
            Self::Linear(streams) => {
                for s in streams {
                    fits(gemm(s.x, s.w) && s.out.rows == s.x.rows && s.out.cols == s.w.weight.rows, "shapes")?;
                }
            }
            Self::LinearSwiglu(streams) => {
                for s in streams {
                    let wide = s.w.weight.rows == 2 * s.out.cols;
                    fits(gemm(s.x, s.w) && s.out.rows == s.x.rows && wide && s.w.bias.is_none(), "shapes")?;
                }
            }
            Self::LinearGateResidual(streams) => {
                for s in streams {
                    let gate = s.gate.is_none_or(|g| row(g, s.into.cols));
                    fits(gemm(s.x, s.w) && gate && s.into.rows == s.x.rows && s.into.cols == s.w.weight.rows, "shapes")?;
                }
            }
            Self::Qkv(streams) => {
                for s in streams {
                    let d = s.rope.table.cols;
                    let q_cols = s.q.map_or(0, |q| q.cols);
                    let wide = q_cols + s.k.cols + s.v.cols + s.mlp.map_or(0, |m| 2 * m.cols);
                    let rows = [s.q, Some(s.k), Some(s.v), s.mlp, Some(s.rope.table)];
                    fits(gemm(s.x, s.w) && wide == s.w.weight.rows && s.w.bias.is_none(), "shapes")?;
                    fits(rows.iter().flatten().all(|t| t.rows == s.x.rows), "rows")?;
                    fits(d > 0 && d % 2 == 0 && q_cols % d == 0 && s.k.cols % d == 0 && s.k.cols == s.v.cols, "heads")?;
                    fits(vector(s.norm.q, d) && vector(s.norm.k, d) && s.rope.table.dtype == DType::F32, "norms and table")?;
                }
            }
            Self::Attention { out, q, kv, head_dim, causal, scale, bound } => {
                fits(same(out, q) && head_dim > 0 && q.cols % head_dim == 0 && !kv.is_empty(), "shapes")?;
                let kv_cols = kv[0].k.cols;
                fits(kv.iter().all(|s| same(s.k, s.v) && s.k.cols == kv_cols), "segments")?;
                fits(kv_cols > 0 && kv_cols % head_dim == 0 && q.cols % kv_cols == 0, "heads")?;
                fits(kv.iter().any(|s| s.k.rows > 0), "no keys")?;
                fits(!causal || kv.len() == 1, "a causal mask over several segments")?;
                fits(scale > 0.0 && bound >= 0.0, "scale or bound")?;
            }
            Self::Conv { out, x, w, width, height, sampling, residual, stats } => {
                let pixels = match sampling {
                    Sampling::Same => width * height,
                    Sampling::Up => 4 * width * height,
                    Sampling::Down => (width / 2) * (height / 2),
                };
                fits(x.rows == width * height && out.rows == pixels, "pixels")?;
                fits(sampling != Sampling::Down || (width % 2 == 0 && height % 2 == 0), "odd side")?;
                fits(w.weight.cols == 9 * x.cols && w.weight.rows == out.cols && vector(w.bias, out.cols), "channels")?;
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
            Self::Guidance { out, cond, uncond, .. } => fits(same(out, cond) && same(out, uncond), "shapes")?,
            Self::NonFinite { count, .. } => fits(vector(count, 1), "shapes")?,
            Self::Pixels { out, x } => fits(same(out, x) && out.dtype == DType::U8, "shapes")?,
        }

        let mut operands = Vec::with_capacity(24);
        self.operands(&mut |t, access| operands.push((t, access)));
        for (i, &(a, access)) in operands.iter().enumerate() {
            fits(a.stride >= a.cols || a.rows <= 1, "rows overlap")?;
            fits(a.dtype != DType::U32 || matches!(*self, Self::Embed { ids, .. } if ids == a), "ids used as values")?;
            fits(a.dtype != DType::U8 || matches!(*self, Self::Pixels { out, .. } if out == a), "bytes used as values")?;
            for (j, &(b, other)) in operands.iter().enumerate() {
                let clash = i != j && access != Access::Read && (other == Access::Read || i < j) && a.overlaps(b);
                fits(!clash, "operands overlap")?;
            }
        }
        Ok(())
    }
}
