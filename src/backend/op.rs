//! The ops: what each computes, on which operands, and at what cost. The shape rules are in `op/check.rs`.

mod check;

use crate::tensor::Tensor;
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
pub struct Product<'a> {
    /// `[rows, n]`.
    pub out: Tensor,
    /// `[rows, k]`.
    pub x: Tensor,
    /// `[n, k]`.
    pub w: &'a Linear,
}

/// `into += gate * (x W^T + b)`, one stream; no gate means a gate of one.
#[derive(Clone, Copy, Debug)]
pub struct GatedProduct<'a> {
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
pub struct KeyValues {
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
    Linear(&'a [Product<'a>]),
    /// `silu(gate) * up`, the weight's rows being all gates, then all ups.
    LinearSwiglu(&'a [Product<'a>]),
    /// Products added to a residual stream.
    LinearGateResidual(&'a [GatedProduct<'a>]),
    /// Attention inputs of a block.
    Qkv(&'a [Projection<'a>]),
    /// `softmax(q k^T * scale) v` over the keys of all segments together.
    Attention {
        /// Same shape as `q`.
        out: Tensor,
        /// `[tokens, heads * head_dim]`.
        q: Tensor,
        /// Runs of keys; query heads share key heads evenly.
        kv: &'a [KeyValues],
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
        let product = |x: Tensor, w: &Linear| 2 * (x.rows * w.weight.len()) as u64;
        match *self {
            Self::Linear(streams) | Self::LinearSwiglu(streams) => streams.iter().map(|s| product(s.x, s.w)).sum(),
            Self::LinearGateResidual(streams) => streams.iter().map(|s| product(s.x, s.w)).sum(),
            Self::Qkv(streams) => streams.iter().map(|s| product(s.x, s.w)).sum(),
            // Counted dense, as the usual formulas do; a causal mask halves the true work.
            Self::Attention { q, kv, .. } => kv.iter().map(|s| 4 * (q.len() * s.k.rows) as u64).sum(),
            Self::Conv { out, w, .. } => 2 * (out.rows * w.weight.len()) as u64,
            _ => 0,
        }
    }
}
