//! The ops: what each computes, on which operands, at what cost, and what makes its operands fit each other.

use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// A linear layer `y = W x + b`, `W` stored `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The weight, `[out, in]`. No op writes it: a GPU reads it before the op before has ended.
    pub weight: Tensor,
    /// The bias, `[1, out]`, where the layer has one.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// The layer that computes only some of the outputs.
    pub fn rows(self, range: Range<usize>) -> Self {
        Self { weight: self.weight.rows(range.clone()), bias: self.bias.map(|b| b.cols(range)) }
    }
}

/// A 3x3 convolution with bias.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    /// The weight, `[out, in * 9]` in the file's order: input channel, kernel row, kernel column.
    pub weight: Tensor,
    /// The bias, `[1, out]`.
    pub bias: Tensor,
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

/// Statistics that bring the VAE's latents to unit scale, one pair per packed channel.
#[derive(Clone, Copy, Debug)]
pub struct LatentStats {
    /// Means, `[1, channels]`.
    pub mean: Tensor,
    /// Variances, `[1, channels]`.
    pub var: Tensor,
    /// Added to the variance.
    pub eps: f32,
}

/// Which elements of a head a rotation pairs up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Neighbours: (0, 1), (2, 3), ... as the FLUX.2 transformer does.
    Interleaved,
    /// Halves: (0, d/2), (1, d/2 + 1), ... as Qwen3 does.
    HalfSplit,
}

/// Rotary position embedding: a table of one row per token, `head_dim / 2` cosines followed by as many sines, in f32.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// The table, `[tokens, head_dim]`.
    pub table: Tensor,
    /// How elements are paired.
    pub style: RopeStyle,
}

/// RMS norms of the query and key heads.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    /// Query scale, `[1, head_dim]`.
    pub q: Tensor,
    /// Key scale, `[1, head_dim]`.
    pub k: Tensor,
    /// Added to the mean square.
    pub eps: f32,
    /// Queries are multiplied by it as well.
    pub q_scale: f32,
}

/// `out = x W^T + b`, one stream.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// `[rows, n]`.
    pub out: Tensor,
    /// `[rows, k]`.
    pub x: Tensor,
    /// `[n, k]`.
    pub w: &'a Linear,
}

/// `into += gate * (x W^T + b)`, one stream; no gate means a gate of one.
#[derive(Clone, Copy, Debug)]
pub struct GatedGemm<'a> {
    /// The residual stream, read and written.
    pub into: Tensor,
    /// `[rows, k]`.
    pub x: Tensor,
    /// `[n, k]`.
    pub w: &'a Linear,
    /// `[1, n]`.
    pub gate: Option<Tensor>,
}

/// Queries, keys and values of one stream, normalised and rotated; with `mlp` also the SwiGLU half of a single block.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `[rows, k]`.
    pub x: Tensor,
    /// Rows of the weight: queries (with `q`), keys, values, then (with `mlp`) gates and ups.
    pub w: &'a Linear,
    /// Norm of the query and key heads.
    pub norm: QkNorm,
    /// Rotation of the query and key heads.
    pub rope: Rope,
    /// Queries out, where they are needed.
    pub q: Option<Tensor>,
    /// Keys out.
    pub k: Tensor,
    /// Values out, not normalised, not rotated.
    pub v: Tensor,
    /// `silu(gate) * up` out.
    pub mlp: Option<Tensor>,
}

/// `out = (1 + scale) * LN(x) + shift`, one stream.
#[derive(Clone, Copy, Debug)]
pub struct Modulated {
    /// `[rows, n]`.
    pub out: Tensor,
    /// `[rows, n]`.
    pub x: Tensor,
    /// `[1, n]`.
    pub shift: Tensor,
    /// `[1, n]`.
    pub scale: Tensor,
}

/// One run of keys and their values.
#[derive(Clone, Copy, Debug)]
pub struct KvSegment {
    /// `[tokens, kv_heads * head_dim]`.
    pub k: Tensor,
    /// The same shape.
    pub v: Tensor,
}

/// How a convolution moves between resolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// Same size, one pixel of zeros all around.
    Same,
    /// The input is doubled by repetition first.
    Up,
    /// Stride two; zeros at the right and bottom edge only.
    Down,
}

/// One fused operation. Slices hold one entry per stream: the two streams of a double block are one op.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// Rows of a table by token id.
    Embed {
        /// `[ids, n]`.
        out: Tensor,
        /// `[ids, 1]`, u32.
        ids: Tensor,
        /// `[vocabulary, n]`.
        table: Tensor,
    },
    /// A copy that may change the element type.
    Copy {
        /// Same shape as `x`.
        out: Tensor,
        /// Any matrix.
        x: Tensor,
    },
    /// `x * sigmoid(x)`.
    Silu {
        /// Same shape as `x`.
        out: Tensor,
        /// Any matrix.
        x: Tensor,
    },
    /// `x / sqrt(mean(x^2) + eps) * weight`.
    RmsNorm {
        /// Same shape as `x`.
        out: Tensor,
        /// Any matrix.
        x: Tensor,
        /// `[1, n]`.
        weight: Tensor,
        /// Added to the mean square.
        eps: f32,
    },
    /// LayerNorm without weights, then scale and shift.
    LayerNormModulate {
        /// One entry per stream.
        streams: &'a [Modulated],
        /// Added to the variance.
        eps: f32,
    },
    /// Matrix products.
    Linear(&'a [Gemm<'a>]),
    /// `silu(gate) * up`, the weight's rows being all gates, then all ups.
    LinearSwiglu(&'a [Gemm<'a>]),
    /// Products added to a residual stream.
    LinearGateResidual(&'a [GatedGemm<'a>]),
    /// Attention inputs of a block.
    Qkv(&'a [Projection<'a>]),
    /// `softmax(q k^T * scale) v` over the keys of all segments together.
    Attention {
        /// Same shape as `q`.
        out: Tensor,
        /// `[tokens, heads * head_dim]`.
        q: Tensor,
        /// Runs of keys; query heads share key heads evenly.
        kv: &'a [KvSegment],
        /// Elements of a head.
        head_dim: usize,
        /// Query `i` sees keys `0..=i` only.
        causal: bool,
        /// Of scores. Where it is ln 2, scores are exponents of two, and kernels need not multiply.
        scale: f32,
        /// No scaled score is larger than this, whatever the tokens; infinite where nothing is known.
        bound: f32,
    },
    /// 3x3 convolution over an image with channels last.
    Conv {
        /// `[out pixels, out channels]`.
        out: Tensor,
        /// `[width * height, in channels]`.
        x: Tensor,
        /// Weight and bias.
        w: &'a Conv,
        /// Input columns.
        width: usize,
        /// Input rows.
        height: usize,
        /// Resolution change.
        sampling: Sampling,
        /// Added to the result; same shape as `out`.
        residual: Option<Tensor>,
        /// Mean and variance of each channel group of the result, `[groups, 2]` f32, for the norm that follows.
        stats: Option<Tensor>,
    },
    /// Group normalisation, optionally followed by `silu`.
    GroupNorm {
        /// Same shape as `x`.
        out: Tensor,
        /// `[pixels, channels]`.
        x: Tensor,
        /// Weights, groups, epsilon.
        norm: &'a GroupNorm,
        /// Statistics of `x` where its producer made them.
        stats: Option<Tensor>,
        /// Apply `silu`.
        silu: bool,
    },
    /// 2x2 patches of a latent image become tokens, brought to unit scale.
    Patchify {
        /// `[width * height, 4 * channels]`.
        out: Tensor,
        /// `[2 width * 2 height, channels]`.
        x: Tensor,
        /// Statistics of the packed channels.
        stats: &'a LatentStats,
        /// Token columns.
        width: usize,
    },
    /// The inverse of [`Op::Patchify`].
    Unpatchify {
        /// `[2 width * 2 height, channels]`.
        out: Tensor,
        /// `[width * height, 4 * channels]`.
        x: Tensor,
        /// Statistics of the packed channels.
        stats: &'a LatentStats,
        /// Token columns.
        width: usize,
    },
    /// `latents += dt * velocity`, in f32.
    Euler {
        /// f32, read and written.
        latents: Tensor,
        /// Same shape.
        velocity: Tensor,
        /// Step, negative towards the image.
        dt: f32,
    },
    /// `out = uncond + scale * (cond - uncond)`.
    Guidance {
        /// Same shape.
        out: Tensor,
        /// Prediction with the prompt.
        cond: Tensor,
        /// Prediction without it.
        uncond: Tensor,
        /// Guidance scale.
        scale: f32,
    },
    /// How many values are not finite.
    NonFinite {
        /// `[1, 1]`, f32.
        count: Tensor,
        /// Any matrix.
        x: Tensor,
    },
    /// Values within -1..1 as bytes: `255 (x / 2 + 1/2)`, clamped, rounded half to even.
    Pixels {
        /// Same shape, u8.
        out: Tensor,
        /// An image.
        x: Tensor,
    },
}

/// What [`Op::name`] may say.
pub const OP_NAMES: &[&str] = &[
    "embed",
    "copy",
    "silu",
    "rms_norm",
    "layer_norm_modulate",
    "linear",
    "linear_swiglu",
    "linear_gate_residual",
    "qkv_norm_rope",
    "qkv_mlp",
    "attention",
    "attention_causal",
    "conv",
    "group_norm",
    "patchify",
    "unpatchify",
    "euler",
    "guidance",
    "non_finite",
    "pixels",
];

/// How an op touches one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Only written, every element.
    Write,
    /// Read, then written.
    Update,
}

impl Op<'_> {
    /// A short name for messages and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::Copy { .. } => "copy",
            Self::Silu { .. } => "silu",
            Self::RmsNorm { .. } => "rms_norm",
            Self::LayerNormModulate { .. } => "layer_norm_modulate",
            Self::Linear(_) => "linear",
            Self::LinearSwiglu(_) => "linear_swiglu",
            Self::LinearGateResidual(_) => "linear_gate_residual",
            Self::Qkv(p) if p.iter().any(|p| p.mlp.is_some()) => "qkv_mlp",
            Self::Qkv(_) => "qkv_norm_rope",
            Self::Attention { causal: true, .. } => "attention_causal",
            Self::Attention { .. } => "attention",
            Self::Conv { .. } => "conv",
            Self::GroupNorm { .. } => "group_norm",
            Self::Patchify { .. } => "patchify",
            Self::Unpatchify { .. } => "unpatchify",
            Self::Euler { .. } => "euler",
            Self::Guidance { .. } => "guidance",
            Self::NonFinite { .. } => "non_finite",
            Self::Pixels { .. } => "pixels",
        }
    }

    /// Calls `f` for every tensor the op touches.
    pub fn operands(&self, f: &mut dyn FnMut(Tensor, Access)) {
        use Access::{Read, Update, Write};
        let linear = |w: &Linear, f: &mut dyn FnMut(Tensor, Access)| {
            f(w.weight, Read);
            w.bias.iter().for_each(|&b| f(b, Read));
        };
        match *self {
            Self::Embed { out, ids, table } => {
                f(out, Write);
                f(ids, Read);
                f(table, Read);
            }
            Self::Copy { out, x } | Self::Silu { out, x } => {
                f(out, Write);
                f(x, Read);
            }
            Self::RmsNorm { out, x, weight, .. } => {
                f(out, Write);
                f(x, Read);
                f(weight, Read);
            }
            Self::LayerNormModulate { streams, .. } => {
                for s in streams {
                    f(s.out, Write);
                    f(s.x, Read);
                    f(s.shift, Read);
                    f(s.scale, Read);
                }
            }
            Self::Linear(streams) | Self::LinearSwiglu(streams) => {
                for s in streams {
                    f(s.out, Write);
                    f(s.x, Read);
                    linear(s.w, f);
                }
            }
            Self::LinearGateResidual(streams) => {
                for s in streams {
                    f(s.into, Update);
                    f(s.x, Read);
                    linear(s.w, f);
                    s.gate.iter().for_each(|&g| f(g, Read));
                }
            }
            Self::Qkv(streams) => {
                for s in streams {
                    s.q.iter().for_each(|&q| f(q, Write));
                    f(s.k, Write);
                    f(s.v, Write);
                    s.mlp.iter().for_each(|&m| f(m, Write));
                    f(s.x, Read);
                    linear(s.w, f);
                    f(s.norm.q, Read);
                    f(s.norm.k, Read);
                    f(s.rope.table, Read);
                }
            }
            Self::Attention { out, q, kv, .. } => {
                f(out, Write);
                f(q, Read);
                for s in kv {
                    f(s.k, Read);
                    f(s.v, Read);
                }
            }
            Self::Conv { out, x, w, residual, stats, .. } => {
                f(out, Write);
                stats.iter().for_each(|&s| f(s, Write));
                f(x, Read);
                f(w.weight, Read);
                f(w.bias, Read);
                residual.iter().for_each(|&r| f(r, Read));
            }
            Self::GroupNorm { out, x, norm, stats, .. } => {
                f(out, Write);
                f(x, Read);
                f(norm.weight, Read);
                f(norm.bias, Read);
                stats.iter().for_each(|&s| f(s, Read));
            }
            Self::Patchify { out, x, stats, .. } | Self::Unpatchify { out, x, stats, .. } => {
                f(out, Write);
                f(x, Read);
                f(stats.mean, Read);
                f(stats.var, Read);
            }
            Self::Euler { latents, velocity, .. } => {
                f(latents, Update);
                f(velocity, Read);
            }
            Self::Guidance { out, cond, uncond, .. } => {
                f(out, Write);
                f(cond, Read);
                f(uncond, Read);
            }
            Self::NonFinite { count: out, x } | Self::Pixels { out, x } => {
                f(out, Write);
                f(x, Read);
            }
        }
    }

    /// Floating-point operations of the matrix products in it, a multiply-add counted as two. Element-wise work is not
    /// counted: it is bound by memory, not by arithmetic.
    pub fn flops(&self) -> u64 {
        let gemm = |x: Tensor, w: &Linear| 2 * (x.rows * w.weight.len()) as u64;
        match *self {
            Self::Linear(streams) | Self::LinearSwiglu(streams) => streams.iter().map(|s| gemm(s.x, s.w)).sum(),
            Self::LinearGateResidual(streams) => streams.iter().map(|s| gemm(s.x, s.w)).sum(),
            Self::Qkv(streams) => streams.iter().map(|s| gemm(s.x, s.w)).sum(),
            // Counted dense, as the usual formulas do; a causal mask halves the true work.
            Self::Attention { q, kv, .. } => kv.iter().map(|s| 4 * (q.len() * s.k.rows) as u64).sum(),
            Self::Conv { out, w, .. } => 2 * (out.rows * w.weight.len()) as u64,
            _ => 0,
        }
    }

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
