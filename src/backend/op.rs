//! The ops: what each one computes, its operands and its cost. Their shape rules are in `op/check.rs`, the operands of image ops in
//! `op/image.rs`.

mod check;
mod image;
mod kind;
mod softmax;
mod weight;

pub use image::{Conv, GroupNorm, LatentStats, Shortcut};
pub use kiln_numerics::{RopeStyle, Sampling, Seam};
pub use kind::OpKind;
pub use softmax::Softmax;
pub use weight::Weight;

use super::GemmFormats;
use crate::names::LayerId;
use crate::tensor::{ALIGN, DType, Stored, Tensor};
use std::ops::Range;

/// A linear layer `y = W x + b`, `W` stored `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Which layer of a transformer or a text encoder it is.
    pub id: Option<LayerId>,
    /// The weight, `[out, in]`. No op may write it shortly before: a GPU prefetches it while the previous kernel is still running.
    pub weight: Weight,
    /// The bias, `[1, out]`, if the layer has one.
    pub bias: Option<Tensor>,
    /// How the op that produces the layer's input has to store it.
    pub input: Stored,
    /// The LoRA branch that is added to the weight (Hu et al. 2021).
    pub lora: Option<LoraBranch>,
}

impl Linear {
    /// A layer whose weight has one format, on plain bf16 inputs.
    pub const fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { id: None, weight: Weight::new(weight), bias, input: Stored::plain(DType::Bf16), lora: None }
    }

    /// The layer restricted to a range of its outputs.
    pub fn rows(self, range: Range<usize>) -> Self {
        Self {
            weight: self.weight.slice(range.clone()),
            bias: self.bias.map(|b| b.cols(range.clone())),
            lora: self.lora.map(|l| LoraBranch { up: l.up.rows(range), ..l }),
            ..self
        }
    }
}

/// A low-rank branch of a layer: the matrix `up down` is added to the layer's weight.
#[derive(Clone, Copy, Debug)]
pub struct LoraBranch {
    /// `[rank, in]`.
    pub down: Tensor,
    /// `[out, rank]`.
    pub up: Tensor,
}

impl LoraBranch {
    /// The type in which a GPU stores `x down^T`: the type of `up`, unless `x` has more places.
    pub fn down_out_type(self, x: Tensor) -> DType {
        if x.dtype == DType::F32 || self.up.dtype == DType::F32 { DType::F32 } else { DType::Bf16 }
    }

    /// Bytes of `x down^T`.
    pub fn down_out_bytes(self, x: Tensor) -> u64 {
        (self.down_out_type(x).bytes(x.rows * self.down.rows) as u64).next_multiple_of(ALIGN)
    }
}

/// Rotary position embedding (RoPE, Su et al. 2021): a table with one row per token, `head_dim / 2` cosines followed by as many
/// sines, in f32.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// The table, `[tokens, head_dim]`.
    pub table: Tensor,
    /// How the elements of a head are paired.
    pub style: RopeStyle,
}

/// The qk-norm: RMS normalization of each query and key head.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    /// Gain of the query heads, `[1, head_dim]`.
    pub q: Tensor,
    /// Gain of the key heads, `[1, head_dim]`.
    pub k: Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

/// The GEMM of one stream, `out = x W^T + b`.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// `[rows, n]`.
    pub out: Tensor,
    /// `[rows, k]`.
    pub x: Tensor,
    /// `[n, k]`.
    pub w: &'a Linear,
}

/// The GEMM of one stream with a gated residual epilogue, `into += gate * (x W^T + b)`; without a gate the factor is one.
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

/// The QKV projection of one stream with qk-norm and RoPE in its epilogue; with `mlp` also the SwiGLU half of a single block.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `[rows, k]`.
    pub x: Tensor,
    /// The weight. It has query rows (with `q`), key rows and value rows, then (with `mlp`) gate and up rows.
    pub w: &'a Linear,
    /// The qk-norm of the query and key heads, if the model has one.
    pub norm: Option<QkNorm>,
    /// A factor of the queries. The softmax scale can be folded into it.
    pub q_scale: f32,
    /// A factor of the keys.
    pub k_scale: f32,
    /// RoPE of the query and key heads.
    pub rope: Rope,
    /// Output for the queries, if they are needed.
    pub q: Option<Tensor>,
    /// Output for the keys.
    pub k: Tensor,
    /// Output for the values, which are neither normalized nor rotated.
    pub v: Tensor,
    /// Output for `silu(gate) * up`.
    pub mlp: Option<Tensor>,
}

/// The AdaLN modulation of one stream, `out = (1 + scale) * LN(x) + shift`.
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

/// A KV segment: consecutive keys and their values.
#[derive(Clone, Copy, Debug)]
pub struct KvSegment {
    /// `[tokens, kv_heads * head_dim]`.
    pub k: Tensor,
    /// The values, in the same shape.
    pub v: Tensor,
}

/// One fused operation. Slices hold one entry per stream: the two streams of a double block are one op, and one kernel launch.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
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
    /// LayerNorm without learned weights, then AdaLN scale and shift.
    LayerNormModulate {
        /// One entry per stream.
        streams: &'a [Modulated],
        /// Added to the variance.
        eps: f32,
    },
    /// Linear layers.
    Linear(&'a [Gemm<'a>]),
    /// Linear layers with a SwiGLU epilogue, `silu(gate) * up`. The rows of the weight are all gate rows, then all up rows.
    LinearSwiglu(&'a [Gemm<'a>]),
    /// Linear layers whose gated results are added to a residual stream.
    LinearGateResidual(&'a [GatedGemm<'a>]),
    /// Queries, keys and values of a block.
    Qkv(&'a [Projection<'a>]),
    /// `softmax(q k^T) v`, with one softmax over the keys of all KV segments.
    Attention {
        /// Consecutive row ranges of the result, which together have the shape of `q`. They need not be adjacent: text and image rows are
        /// inputs of different layers, which may be stored with different scales.
        out: &'a [Tensor],
        /// `[tokens, heads * head_dim]`.
        q: Tensor,
        /// KV segments. With fewer key heads than query heads, groups of query heads share one (GQA).
        kv: &'a [KvSegment],
        /// Number of elements of a head.
        head_dim: usize,
        /// Whether query `i` attends to keys `0..=i` only.
        causal: bool,
        /// How scores become weights of the values.
        softmax: Softmax,
    },
    /// 3x3 convolution over an image in channels-last layout.
    Conv {
        /// `[out pixels, out channels]`.
        out: Tensor,
        /// `[width * height, in channels]`.
        x: Tensor,
        /// Weight and bias.
        w: &'a Conv,
        /// Width of the input.
        width: usize,
        /// Height of the input.
        height: usize,
        /// How the resolution changes.
        sampling: Sampling,
        /// Added to the result; same shape as `out`.
        residual: Option<Tensor>,
        /// A 1x1 convolution that is added to the result; not together with `residual`, and only with `Sampling::Same`.
        shortcut: Option<Shortcut<'a>>,
        /// Output for the mean and variance of each channel group of the result, `[groups, 2]` f32. The group norm that follows reads it.
        stats: Option<Tensor>,
    },
    /// Group normalization, optionally followed by `silu`.
    GroupNorm {
        /// Same shape as `x`, or `x` itself if its statistics are given.
        out: Tensor,
        /// `[pixels, channels]`.
        x: Tensor,
        /// Weights, groups, epsilon.
        norm: &'a GroupNorm,
        /// Statistics of `x`, if the op that produced `x` computed them.
        stats: Option<Tensor>,
        /// Whether `silu` is applied to the result.
        silu: bool,
    },
    /// Group normalization, `silu` and a 3x3 convolution of the same size, without storing the normalized image. The convolution
    /// pads the normalized image with zeros.
    NormConv {
        /// `[width * height, out channels]`.
        out: Tensor,
        /// `[width * height, in channels]`.
        x: Tensor,
        /// Weights, groups, epsilon.
        norm: &'a GroupNorm,
        /// Statistics of `x`, if the op that produced `x` computed them.
        stats: Option<Tensor>,
        /// Weight and bias of the convolution.
        w: &'a Conv,
        /// Width of the image.
        width: usize,
        /// Height of the image.
        height: usize,
    },
    /// Packs 2x2 patches of a latent image into tokens and normalizes them to unit variance.
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
    /// A flow-matching Euler step, `latents += dt * velocity`, in f32.
    Euler {
        /// f32, read and written.
        latents: Tensor,
        /// Same shape.
        velocity: Tensor,
        /// Change of sigma, which is negative.
        dt: f32,
    },
    /// An image at a noise level, `latents = (1 - sigma) init + sigma noise`, in f32. Editing starts from it, and keeps with it what is not
    /// repainted.
    Renoise {
        /// f32, read and written.
        latents: Tensor,
        /// Same shape: the image without noise.
        init: Tensor,
        /// Same shape: pure noise.
        noise: Tensor,
        /// `[rows, 1]`, f32. Rows of `latents` stay where it is zero. Without it no row stays.
        keep: Option<Tensor>,
        /// The noise level, within 0..=1.
        sigma: f32,
    },
    /// Classifier-free guidance (CFG, Ho and Salimans 2022), `out = uncond + scale * (cond - uncond)`.
    Guidance {
        /// Same shape.
        out: Tensor,
        /// Prediction with the prompt.
        cond: Tensor,
        /// Prediction without the prompt.
        uncond: Tensor,
        /// Guidance scale.
        scale: f32,
    },
    /// Blends the overlap of two image tiles. Over its `n` rows or columns of pixels the weight of `into` rises from 0 in steps of `1 / n`
    /// and the weight of `from` falls from 1.
    Blend {
        /// The overlap in the later tile, read and written.
        into: Tensor,
        /// The overlap in the earlier tile; same shape.
        from: Tensor,
        /// On which side the later tile has the overlap.
        seam: Seam,
    },
    /// Counts the values that are not finite.
    NonFinite {
        /// `[1, 1]`, f32.
        count: Tensor,
        /// Any matrix.
        x: Tensor,
    },
    /// The larger of the largest magnitude in a matrix and an earlier result. NaN is larger than infinity: bits are compared.
    LargestMagnitude {
        /// `[1, 1]`, f32: zero or a former result, read and written.
        largest: Tensor,
        /// Any matrix.
        x: Tensor,
    },
    /// The colors of latents without the VAE, as bytes: [`Op::Pixels`] of the sum of all channels times their factors, plus a bias.
    Preview {
        /// `[2 width * 2 height, 3]`, u8.
        out: Tensor,
        /// `[width * height, 4 * channels]`, f32: 2x2 patches, normalized.
        latents: Tensor,
        /// `[channels + 1, 3]`, f32: the factors of each channel for red, green and blue, and the bias.
        table: Tensor,
        /// Token columns.
        width: usize,
    },
    /// Converts values within -1..1 to bytes: `255 (x / 2 + 1/2)`, clamped, rounded half to even.
    Pixels {
        /// Same shape, u8.
        out: Tensor,
        /// An image.
        x: Tensor,
    },
}

/// How an op accesses one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The operand is only read.
    Read,
    /// Every element is written and none is read.
    Write,
    /// The operand is read, then written.
    Update,
}

impl Op<'_> {
    /// A short name for messages and reports.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Calls `f` for every operand of the op.
    pub fn operands(&self, f: &mut dyn FnMut(Tensor, Access)) {
        use Access::{Read, Update, Write};
        let mut each = |access: Access, tensors: &[Tensor]| tensors.iter().for_each(|&tensor| f(tensor, access));
        let linear = |each: &mut dyn FnMut(Access, &[Tensor]), w: &Linear| {
            each(Read, w.weight.parts());
            each(Read, w.bias.as_slice());
            w.lora.iter().for_each(|l| each(Read, &[l.down, l.up]));
        };
        match *self {
            Self::Copy { out, x } | Self::Silu { out, x } | Self::NonFinite { count: out, x } | Self::Pixels { out, x } => {
                each(Write, &[out]);
                each(Read, &[x]);
            }
            Self::RmsNorm { out, x, weight, .. } => {
                each(Write, &[out]);
                each(Read, &[x, weight]);
            }
            Self::LayerNormModulate { streams, .. } => {
                for s in streams {
                    each(Write, &[s.out]);
                    each(Read, &[s.x, s.shift, s.scale]);
                }
            }
            Self::Linear(streams) | Self::LinearSwiglu(streams) => {
                for s in streams {
                    each(Write, &[s.out]);
                    each(Read, &[s.x]);
                    linear(&mut each, s.w);
                }
            }
            Self::LinearGateResidual(streams) => {
                for s in streams {
                    each(Update, &[s.into]);
                    each(Read, &[s.x]);
                    linear(&mut each, s.w);
                    each(Read, s.gate.as_slice());
                }
            }
            Self::Qkv(streams) => {
                for s in streams {
                    each(Write, s.q.as_slice());
                    each(Write, &[s.k, s.v]);
                    each(Write, s.mlp.as_slice());
                    each(Read, &[s.x]);
                    linear(&mut each, s.w);
                    s.norm.iter().for_each(|norm| each(Read, &[norm.q, norm.k]));
                    each(Read, &[s.rope.table]);
                }
            }
            Self::Attention { out, q, kv, .. } => {
                each(Write, out);
                each(Read, &[q]);
                kv.iter().for_each(|s| each(Read, &[s.k, s.v]));
            }
            Self::Conv { out, x, w, residual, shortcut, stats, .. } => {
                each(Write, &[out]);
                each(Write, stats.as_slice());
                each(Read, &[x, w.weight, w.bias]);
                each(Read, residual.as_slice());
                if let Some(s) = shortcut {
                    each(Read, &[s.x]);
                    linear(&mut each, s.w);
                }
            }
            Self::GroupNorm { out, x, norm, stats, .. } => {
                if out == x {
                    each(Update, &[x]);
                } else {
                    each(Write, &[out]);
                    each(Read, &[x]);
                }
                each(Read, &[norm.weight, norm.bias]);
                each(Read, stats.as_slice());
            }
            Self::NormConv { out, x, norm, stats, w, .. } => {
                each(Write, &[out]);
                each(Read, &[x, norm.weight, norm.bias, w.weight, w.bias]);
                each(Read, stats.as_slice());
            }
            Self::Patchify { out, x, stats, .. } | Self::Unpatchify { out, x, stats, .. } => {
                each(Write, &[out]);
                each(Read, &[x, stats.mean, stats.var]);
            }
            Self::Euler { latents: to, velocity: x, .. }
            | Self::Blend { into: to, from: x, .. }
            | Self::LargestMagnitude { largest: to, x } => {
                each(Update, &[to]);
                each(Read, &[x]);
            }
            Self::Renoise { latents, init, noise, keep, .. } => {
                each(Update, &[latents]);
                each(Read, &[init, noise]);
                each(Read, keep.as_slice());
            }
            Self::Preview { out, latents, table, .. } => {
                each(Write, &[out]);
                each(Read, &[latents, table]);
            }
            Self::Guidance { out, cond, uncond, .. } => {
                each(Write, &[out]);
                each(Read, &[cond, uncond]);
            }
        }
    }

    /// Calls `f` for every linear layer of the op, with its input.
    pub fn layers(&self, f: &mut dyn FnMut(Tensor, &Linear)) {
        match *self {
            Self::Linear(streams) | Self::LinearSwiglu(streams) => streams.iter().for_each(|s| f(s.x, s.w)),
            Self::LinearGateResidual(streams) => streams.iter().for_each(|s| f(s.x, s.w)),
            Self::Qkv(streams) => streams.iter().for_each(|s| f(s.x, s.w)),
            Self::Conv { shortcut: Some(s), .. } => f(s.x, s.w),
            _ => {}
        }
    }

    /// Bytes of working memory that a GPU with these GEMMs needs in addition to the operands. Quantized weights with plain inputs need room
    /// in bf16 if the GPU [expands](GemmFormats::expands) them, and LoRA branches need room for `x down^T`.
    pub fn scratch_bytes(&self, formats: GemmFormats) -> u64 {
        let mut bytes = 0;
        self.layers(&mut |x, w| {
            let is_expanded = |part: &&Tensor| formats.expands && part.dtype.is_quantized() && !w.input.dtype.is_quantized();
            let parts = w.weight.parts().iter().filter(is_expanded);
            bytes += parts.map(|part| (DType::Bf16.bytes(part.len()) as u64).next_multiple_of(ALIGN)).sum::<u64>();
            bytes += w.lora.map_or(0, |lora| lora.down_out_bytes(x));
        });
        bytes
    }

    /// Floating-point operations of its GEMMs, convolutions and attention, with a multiply-add counted as two. Element-wise work
    /// is not counted: it is bound by memory, not by arithmetic.
    pub fn flops(&self) -> u64 {
        let mut gemms = 0;
        self.layers(&mut |x, w| {
            let lora = w.lora.map_or(0, |l| l.down.len() + l.up.len());
            gemms += 2 * (x.rows * (w.weight.len() + lora)) as u64;
        });
        match *self {
            // Attention is counted as dense, as in the usual formulas; a causal mask halves the actual work.
            Self::Attention { q, kv, .. } => kv.iter().map(|s| 4 * (q.len() * s.k.rows) as u64).sum(),
            // Each output pixel of an upsampling convolution has one phase, a quarter of the weight.
            Self::Conv { out, w, sampling, .. } => gemms + 2 * (out.rows * w.weight.len() / sampling.phases()) as u64,
            Self::NormConv { out, w, .. } => 2 * (out.rows * w.weight.len()) as u64,
            _ => gemms,
        }
    }
}
