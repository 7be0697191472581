//! The ops that are benchmarked, and their shapes.

use super::{Row, RowFormat, call};
use crate::backend::{
    Conv, GatedGemm, Gemm, GemmFormats, GroupNorm, KvSegment, LatentStats, Linear, Modulated, Op, Projection, QkNorm, Role, Rope,
    RopeStyle, Sampling, Seam, Shortcut, Softmax,
};
use crate::error::Result;
use crate::tensor::{DType, Precision};

/// The scale of the shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// The shapes of klein 4B for an image of 1024x1024.
    Klein,
    /// The widths of klein 4B, but few enough rows for a CPU.
    Processor,
    /// The smallest possible shapes.
    Quick,
}

impl Scale {
    /// The name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Klein => "klein 4B, 1024x1024",
            Self::Processor => "klein 4B, few rows",
            Self::Quick => "quick",
        }
    }
}

const HEAD_DIM: usize = 128;
const GROUPS: usize = 32;
const EPS: f32 = 1e-6;
/// Channels of a latent token, and of the latent pixels that it packs.
const PACKED: usize = 128;
const LATENT: usize = 32;

/// Sizes of a model and an image.
struct Sizes {
    /// Tokens of the prompt, and tokens along one side of the image.
    text: usize,
    side: usize,
    /// Hidden size of the transformer and of its MLP.
    width: usize,
    mlp: usize,
    /// Hidden size of the larger transformer and of its MLP.
    large: (usize, usize),
    /// The text encoder: hidden size, query heads, key heads, MLP size.
    text_width: usize,
    text_heads: usize,
    text_kv_heads: usize,
    text_mlp: usize,
    /// Channels of the VAE decoder's widest level.
    channels: usize,
}

const KLEIN: Sizes = Sizes {
    text: 512,
    side: 64,
    width: 3072,
    mlp: 9216,
    large: (4096, 12_288),
    text_width: 2560,
    text_heads: 32,
    text_kv_heads: 8,
    text_mlp: 9728,
    channels: 512,
};

const QUICK: Sizes = Sizes {
    text: 16,
    side: 4,
    width: 256,
    mlp: 384,
    large: (384, 512),
    text_width: 128,
    text_heads: 2,
    text_kv_heads: 1,
    text_mlp: 256,
    channels: 128,
};

/// All rows of a scale, with activations in a precision, including the quantized formats that a backend takes.
pub fn rows(scale: Scale, precision: Precision, formats: GemmFormats) -> Result<Vec<Row>> {
    let activations = precision.activations();
    let builder = RowBuilder(RowFormat { activations, weights: DType::Bf16, inputs: activations });
    let sizes = match scale {
        Scale::Klein => &KLEIN,
        Scale::Quick => &QUICK,
        Scale::Processor => return builder.processor(),
    };
    let mut rows = builder.model(sizes)?;
    // Only bf16 activations are quantized.
    if precision == Precision::Bf16 {
        rows.extend(builder.quantized(sizes, formats)?);
    }
    Ok(rows)
}

/// Creates rows whose operands have these formats.
struct RowBuilder(RowFormat);

impl RowBuilder {
    /// Every op of generating an image, stage by stage.
    fn model(&self, s: &Sizes) -> Result<Vec<Row>> {
        let Sizes { text, side, width, mlp, text_width, text_heads, text_kv_heads, text_mlp, channels, .. } = *s;
        let canvas = side * side;
        let (all, both) = (text + canvas, [text, canvas]);
        let (text_q, text_kv) = (text_heads * HEAD_DIM, text_kv_heads * HEAD_DIM);
        let heads = width / HEAD_DIM;
        // The side of the feature maps at each level of the decoder.
        let [first, second, third, last] = [2, 4, 8, 16].map(|scale| scale * side);
        let (half, quarter) = (channels / 2, channels / 4);
        [
            // The text encoder.
            self.rms_norm(text, text_width),
            self.qkv(&[text], text_width, text_q, text_kv, 0, RopeStyle::HalfSplit),
            self.attention(text, text_heads, text_kv_heads, HEAD_DIM, true),
            self.linear_gate_residual(&[text], text_width, text_q, false),
            self.linear_swiglu(&[text], text_mlp, text_width),
            self.linear_gate_residual(&[text], text_width, text_mlp, false),
            // The transformer: inputs, a double block, a single block, the output.
            self.copy(all, width),
            self.silu(all, width),
            self.linear(1, 6 * width, width),
            self.linear(text, width, 3 * text_width),
            self.linear(canvas, width, PACKED),
            self.layer_norm_modulate(&both, width),
            self.qkv(&both, width, width, width, 0, RopeStyle::Interleaved),
            self.attention(all, heads, heads, HEAD_DIM, false),
            self.linear_gate_residual(&both, width, width, true),
            self.linear_swiglu(&both, mlp, width),
            self.linear_gate_residual(&both, width, mlp, true),
            self.layer_norm_modulate(&[all], width),
            self.qkv(&[all], width, width, width, mlp, RopeStyle::Interleaved),
            self.linear_gate_residual(&[all], width, width + mlp, true),
            self.linear(canvas, PACKED, width),
            self.guidance(canvas, PACKED),
            self.euler(canvas, PACKED),
            self.renoise(canvas, PACKED),
            self.blend(4 * side, 16 * side),
            self.non_finite(canvas, PACKED),
            self.largest_magnitude(all, width),
            // The VAE: its decoder, and the encoder ops that the decoder does not have.
            self.unpatchify(side),
            self.conv(first, channels, channels, Sampling::Same, true),
            self.group_norm(first, channels, true),
            self.group_norm(first, channels, false),
            self.attention(first * first, 1, 1, channels, false),
            self.conv(first, channels, channels, Sampling::Up, true),
            self.group_norm(second, channels, true),
            self.conv(second, channels, channels, Sampling::Same, true),
            self.conv(third, channels, half, Sampling::Same, false),
            self.group_norm(third, half, true),
            self.conv(third, half, half, Sampling::Same, true),
            self.conv(last, half, quarter, Sampling::Same, false),
            self.group_norm(last, half, true),
            self.group_norm(last, quarter, true),
            self.conv(last, quarter, quarter, Sampling::Same, true),
            self.conv_shortcut(last, quarter, half),
            self.norm_conv(last, quarter, 3),
            self.preview(side),
            self.pixels(last),
            self.conv(last, 3, quarter, Sampling::Same, true),
            self.conv(last, quarter, quarter, Sampling::Down, false),
            self.patchify(side),
        ]
        .into_iter()
        .collect()
    }

    /// The text encoder's layers, with weights of a quantized type.
    fn encoder(&self, s: &Sizes, weights: DType) -> [Result<Row>; 4] {
        let Sizes { text, text_width, text_heads, text_kv_heads, text_mlp, .. } = *s;
        let (text_q, text_kv) = (text_heads * HEAD_DIM, text_kv_heads * HEAD_DIM);
        let layers = Self(RowFormat { weights, ..self.0 });
        [
            layers.qkv(&[text], text_width, text_q, text_kv, 0, RopeStyle::HalfSplit),
            layers.linear_gate_residual(&[text], text_width, text_q, false),
            layers.linear_swiglu(&[text], text_mlp, text_width),
            layers.linear_gate_residual(&[text], text_width, text_mlp, false),
        ]
    }

    /// The quantized ops of a model in FP8 and of a model in NVFP4. FP8 has the layers of the text encoder in W8A16 and the blocks of the
    /// transformer in W8A8, with queries and keys in e4m3. NVFP4 has the blocks of the transformer in W4A4 and, with plain inputs, the
    /// layers of the text encoder and of the single blocks of both transformers in W4A16.
    fn quantized(&self, s: &Sizes, formats: GemmFormats) -> Result<Vec<Row>> {
        let Sizes { text, side, width, mlp, large, .. } = *s;
        let (all, both, heads) = (text + side * side, [text, side * side], width / HEAD_DIM);
        let mut rows = Vec::new();
        if formats.w8a16 {
            rows.extend(self.encoder(s, DType::E4m3));
        }
        let w8a8 = Self(RowFormat { weights: DType::E4m3, inputs: DType::E4m3, ..self.0 });
        let w4a4 = Self(RowFormat { weights: DType::E2m1, inputs: DType::E2m1, ..self.0 });
        for blocks in [formats.w8a8.then_some(&w8a8), formats.w4a4.then_some(&w4a4)].into_iter().flatten() {
            rows.extend([
                blocks.linear(all, width, width + mlp),
                blocks.layer_norm_modulate(&both, width),
                blocks.qkv(&both, width, width, width, 0, RopeStyle::Interleaved),
                blocks.linear_gate_residual(&both, width, width, true),
                blocks.linear_swiglu(&both, mlp, width),
                blocks.linear_gate_residual(&both, width, mlp, true),
                blocks.layer_norm_modulate(&[all], width),
                blocks.qkv(&[all], width, width, width, mlp, RopeStyle::Interleaved),
                blocks.linear_gate_residual(&[all], width, width + mlp, true),
            ]);
        }
        if formats.qk8 {
            rows.push(w8a8.attention(all, heads, heads, HEAD_DIM, false));
        }
        if formats.w4a16 {
            rows.extend(self.encoder(s, DType::E2m1));
            let w4a16 = Self(RowFormat { weights: DType::E2m1, ..self.0 });
            for (width, mlp) in [(width, mlp), large] {
                rows.push(w4a16.qkv(&[all], width, width, width, mlp, RopeStyle::Interleaved));
                rows.push(w4a16.linear_gate_residual(&[all], width, width + mlp, true));
            }
        }
        rows.into_iter().collect()
    }

    /// One row for each kernel of the CPU backend.
    fn processor(&self) -> Result<Vec<Row>> {
        let Sizes { width, mlp, channels, .. } = KLEIN;
        let heads = width / HEAD_DIM;
        [
            // Several GEMM tiles in both dimensions, to include the cost of tile boundaries.
            self.linear(1536, width, width),
            // The modulation: a single row, bound by reading the weight.
            self.linear(1, 6 * width, width),
            self.qkv(&[512], width, width, width, mlp, RopeStyle::Interleaved),
            self.attention(1024, heads, heads, HEAD_DIM, false),
            self.conv(64, channels, channels, Sampling::Same, false),
            self.rms_norm(4096, width),
            self.layer_norm_modulate(&[4096], width),
            self.group_norm(128, channels, false),
        ]
        .into_iter()
        .collect()
    }

    // ------------------------------------------------------------------------------------------------------- one op each

    fn copy(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (out, x) = (m.results(rows, cols)?, m.activations(rows, cols)?);
            call(move |run| run(Op::Copy { out, x }))
        })
    }

    fn silu(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (out, x) = (m.results(rows, cols)?, m.activations(rows, cols)?);
            call(move |run| run(Op::Silu { out, x }))
        })
    }

    fn rms_norm(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (out, x, weight) = (m.results(rows, cols)?, m.activations(rows, cols)?, m.vector(cols)?);
            call(move |run| run(Op::RmsNorm { out, x, weight, eps: EPS }))
        })
    }

    fn layer_norm_modulate(&self, streams: &[usize], cols: usize) -> Result<Row> {
        let rows = streams.to_vec();
        Row::new(format!("{}x{cols}", sum(streams)), self.0, move |m| {
            let stream = |&rows: &usize| {
                let (out, x) = (m.layer_output(rows, cols)?, m.activations(rows, cols)?);
                Ok(Modulated { out, x, shift: m.activations(1, cols)?, scale: m.activations(1, cols)? })
            };
            let streams = rows.iter().map(stream).collect::<Result<Vec<_>>>()?;
            call(move |run| run(Op::LayerNormModulate { streams: &streams, eps: EPS }))
        })
    }

    fn linear(&self, rows: usize, cols: usize, inner: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}x{inner}"), self.0, move |m| {
            let (out, x, w) = (m.results(rows, cols)?, m.layer_input(rows, inner)?, m.linear(cols, inner)?);
            call(move |run| run(Op::Linear(&[Gemm { out, x, w: &w }])))
        })
    }

    fn linear_swiglu(&self, streams: &[usize], cols: usize, inner: usize) -> Result<Row> {
        let rows = streams.to_vec();
        Row::new(format!("{}x{}x{inner}", sum(streams), 2 * cols), self.0, move |m| {
            let stream = |&rows: &usize| {
                let w = m.linear(2 * cols, inner)?;
                Ok((m.layer_output(rows, cols)?, m.layer_input(rows, inner)?, w))
            };
            let streams = rows.iter().map(stream).collect::<Result<Vec<_>>>()?;
            call(move |run| {
                let gemms: Vec<_> = streams.iter().map(|(out, x, w)| Gemm { out: *out, x: *x, w }).collect();
                run(Op::LinearSwiglu(&gemms))
            })
        })
    }

    fn linear_gate_residual(&self, streams: &[usize], cols: usize, inner: usize, gated: bool) -> Result<Row> {
        let rows = streams.to_vec();
        Row::new(format!("{}x{cols}x{inner}", sum(streams)), self.0, move |m| {
            let stream = |&rows: &usize| {
                let gate = if gated { Some(m.activations(1, cols)?) } else { None };
                let (into, x) = (m.activations(rows, cols)?, m.layer_input(rows, inner)?);
                Ok((into, x, m.linear(cols, inner)?, gate))
            };
            let streams = rows.iter().map(stream).collect::<Result<Vec<_>>>()?;
            call(move |run| {
                let gemms: Vec<_> =
                    streams.iter().map(|(into, x, w, gate)| GatedGemm { into: *into, x: *x, w, gate: *gate }).collect();
                run(Op::LinearGateResidual(&gemms))
            })
        })
    }

    fn qkv(&self, streams: &[usize], inner: usize, q_cols: usize, kv_cols: usize, mlp: usize, style: RopeStyle) -> Result<Row> {
        let rows = streams.to_vec();
        let cols = q_cols + 2 * kv_cols + 2 * mlp;
        Row::new(format!("{}x{cols}x{inner}", sum(streams)), self.0, move |m| {
            let stream = |&rows: &usize| {
                let w = m.linear(cols, inner)?;
                let norm = QkNorm { q: m.vector(HEAD_DIM)?, k: m.vector(HEAD_DIM)?, eps: EPS };
                let rope = Rope { table: m.input(rows, HEAD_DIM, DType::F32)?, style };
                let (x, q) = (m.layer_input(rows, inner)?, m.head_output(rows, q_cols)?);
                let (k, v) = (m.head_output(rows, kv_cols)?, m.results(rows, kv_cols)?);
                // Adjacent to the columns of the attention result, as in a single block.
                let hidden = if mlp > 0 { Some(m.layer_output(rows, q_cols + mlp)?.cols(q_cols..q_cols + mlp)) } else { None };
                Ok((x, w, norm, rope, q, k, v, hidden))
            };
            let streams = rows.iter().map(stream).collect::<Result<Vec<_>>>()?;
            call(move |run| {
                let projections: Vec<_> = streams
                    .iter()
                    .map(|(x, w, norm, rope, q, k, v, mlp)| Projection {
                        x: *x,
                        w,
                        norm: Some(*norm),
                        q_scale: 1.0,
                        k_scale: 1.0,
                        rope: *rope,
                        q: Some(*q),
                        k: *k,
                        v: *v,
                        mlp: *mlp,
                    })
                    .collect();
                run(Op::Qkv(&projections))
            })
        })
    }

    fn attention(&self, tokens: usize, heads: usize, kv_heads: usize, head_dim: usize, causal: bool) -> Result<Row> {
        let of = if heads == kv_heads { heads.to_string() } else { format!("{heads}:{kv_heads}") };
        let plural = if heads == 1 { "head" } else { "heads" };
        Row::new(format!("{tokens} tokens, {of} {plural} of {head_dim}"), self.0, move |m| {
            let (out, q) = (m.layer_output(tokens, heads * head_dim)?, m.heads(tokens, heads * head_dim)?);
            let kv = [KvSegment { k: m.heads(tokens, kv_heads * head_dim)?, v: m.activations(tokens, kv_heads * head_dim)? }];
            // In the transformer, queries are pre-scaled for a base-2 softmax and the scores are bounded. Here scores are about
            // four, and none is over 64.
            let softmax = match !causal && head_dim == HEAD_DIM {
                true => Softmax::Base2 { bound: 64.0 },
                false => Softmax::Natural { scale: 1.0 / (head_dim as f32).sqrt() },
            };
            call(move |run| run(Op::Attention { out: &[out], q, kv: &kv, head_dim, causal, softmax }))
        })
    }

    /// A convolution. With `more`, it adds a residual to the result and computes the statistics for the next group norm.
    fn conv(&self, side: usize, channels: usize, to: usize, sampling: Sampling, more: bool) -> Result<Row> {
        let (name, to_side) = match sampling {
            Sampling::Same => ("", side),
            Sampling::Up => (", up", 2 * side),
            Sampling::Down => (", down", side / 2),
        };
        // There is no residual after the first convolution or a change of resolution.
        let residual = more && sampling == Sampling::Same && channels == to;
        let added = if residual { ", residual" } else { "" };
        let stats = if more { ", stats" } else { "" };
        Row::new(format!("{side}x{side}, {channels} to {to}{name}{added}{stats}"), self.0, move |m| {
            let role = if sampling == Sampling::Up { Role::UpConv } else { Role::Conv };
            let taps = sampling.phases() * sampling.taps();
            let w = Conv { weight: m.weight(to, taps * channels, DType::Bf16, role)?, bias: m.vector(to)? };
            let x = m.activations(side * side, channels)?;
            let pixels = to_side * to_side;
            let out = m.results(pixels, to)?;
            let residual = if residual { Some(m.activations(pixels, to)?) } else { None };
            let stats = if more { Some(m.output(GROUPS, 2, DType::F32)?) } else { None };
            let (width, height, shortcut) = (side, side, None);
            call(move |run| run(Op::Conv { out, x, w: &w, width, height, sampling, residual, shortcut, stats }))
        })
    }

    /// The end of a residual block whose input has a different number of channels.
    fn conv_shortcut(&self, side: usize, channels: usize, from: usize) -> Result<Row> {
        Row::new(format!("{side}x{side}, {channels} to {channels}, shortcut of {from}, stats"), self.0, move |m| {
            let w = Conv { weight: m.weight(channels, 9 * channels, DType::Bf16, Role::Conv)?, bias: m.vector(channels)? };
            let shortcut_weight = Linear::new(m.weight(channels, from, DType::Bf16, Role::Linear)?, Some(m.vector(channels)?));
            let (x, input) = (m.activations(side * side, channels)?, m.activations(side * side, from)?);
            let (out, stats) = (m.results(side * side, channels)?, Some(m.output(GROUPS, 2, DType::F32)?));
            let (width, height, sampling, residual) = (side, side, Sampling::Same, None);
            call(move |run| {
                let shortcut = Some(Shortcut { x: input, w: &shortcut_weight });
                run(Op::Conv { out, x, w: &w, width, height, sampling, residual, shortcut, stats })
            })
        })
    }

    /// The last layer of the decoder. The decoded image is stored in f32.
    fn norm_conv(&self, side: usize, channels: usize, to: usize) -> Result<Row> {
        Row::new(format!("{side}x{side}, {channels} to {to}, stats given"), self.0, move |m| {
            let norm = GroupNorm { weight: m.vector(channels)?, bias: m.vector(channels)?, groups: GROUPS, eps: EPS };
            let w = Conv { weight: m.weight(to, 9 * channels, DType::Bf16, Role::Conv)?, bias: m.vector(to)? };
            let (out, x) = (m.output(side * side, to, DType::F32)?, m.activations(side * side, channels)?);
            let (width, height, stats) = (side, side, Some(m.input(GROUPS, 2, DType::F32)?));
            call(move |run| run(Op::NormConv { out, x, norm: &norm, stats, w: &w, width, height }))
        })
    }

    fn group_norm(&self, side: usize, channels: usize, given: bool) -> Result<Row> {
        let stats = if given { ", stats given" } else { "" };
        Row::new(format!("{side}x{side}, {channels} channels{stats}"), self.0, move |m| {
            let norm = GroupNorm { weight: m.vector(channels)?, bias: m.vector(channels)?, groups: GROUPS, eps: EPS };
            let (out, x) = (m.results(side * side, channels)?, m.activations(side * side, channels)?);
            let stats = if given { Some(m.input(GROUPS, 2, DType::F32)?) } else { None };
            call(move |run| run(Op::GroupNorm { out, x, norm: &norm, stats, silu: true }))
        })
    }

    fn patchify(&self, side: usize) -> Result<Row> {
        Row::new(format!("{}x{PACKED}", side * side), self.0, move |m| {
            let stats = LatentStats { mean: m.vector(PACKED)?, var: m.vector(PACKED)?, eps: EPS };
            let (out, x) = (m.results(side * side, PACKED)?, m.activations(4 * side * side, LATENT)?);
            call(move |run| run(Op::Patchify { out, x, stats: &stats, width: side }))
        })
    }

    fn unpatchify(&self, side: usize) -> Result<Row> {
        Row::new(format!("{}x{PACKED}", side * side), self.0, move |m| {
            let stats = LatentStats { mean: m.vector(PACKED)?, var: m.vector(PACKED)?, eps: EPS };
            let (out, x) = (m.results(4 * side * side, LATENT)?, m.input(side * side, PACKED, DType::F32)?);
            call(move |run| run(Op::Unpatchify { out, x, stats: &stats, width: side }))
        })
    }

    fn euler(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (latents, velocity) = (m.input(rows, cols, DType::F32)?, m.input(rows, cols, DType::F32)?);
            call(move |run| run(Op::Euler { latents, velocity, dt: -0.25 }))
        })
    }

    fn renoise(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (latents, noise) = (m.input(rows, cols, DType::F32)?, m.input(rows, cols, DType::F32)?);
            let init = m.activations(rows, cols)?;
            call(move |run| run(Op::Renoise { latents, init, noise, keep: None, sigma: 0.5 }))
        })
    }

    fn guidance(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (cond, uncond) = (m.input(rows, cols, DType::F32)?, m.input(rows, cols, DType::F32)?);
            let out = m.output(rows, cols, DType::F32)?;
            call(move |run| run(Op::Guidance { out, cond, uncond, scale: 4.0 }))
        })
    }

    /// The overlap of two adjacent image tiles.
    fn blend(&self, width: usize, height: usize) -> Result<Row> {
        const CHANNELS: usize = 3;
        Row::new(format!("{width}x{height}x{CHANNELS}"), self.0, move |m| {
            let (into, from) = (m.input(height, width * CHANNELS, DType::F32)?, m.input(height, width * CHANNELS, DType::F32)?);
            call(move |run| run(Op::Blend { into, from, seam: Seam::Left { channels: CHANNELS } }))
        })
    }

    fn non_finite(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (count, x) = (m.output(1, 1, DType::F32)?, m.input(rows, cols, DType::F32)?);
            call(move |run| run(Op::NonFinite { count, x }))
        })
    }

    fn largest_magnitude(&self, rows: usize, cols: usize) -> Result<Row> {
        Row::new(format!("{rows}x{cols}"), self.0, move |m| {
            let (largest, x) = (m.input(1, 1, DType::F32)?, m.activations(rows, cols)?);
            call(move |run| run(Op::LargestMagnitude { largest, x }))
        })
    }

    fn preview(&self, side: usize) -> Result<Row> {
        Row::new(format!("{}x{PACKED}", side * side), self.0, move |m| {
            let (out, table) = (m.output(4 * side * side, 3, DType::U8)?, m.input(LATENT + 1, 3, DType::F32)?);
            let latents = m.input(side * side, PACKED, DType::F32)?;
            call(move |run| run(Op::Preview { out, latents, table, width: side }))
        })
    }

    fn pixels(&self, side: usize) -> Result<Row> {
        Row::new(format!("{side}x{side}x3"), self.0, move |m| {
            let (out, x) = (m.output(side * side, 3, DType::U8)?, m.input(side * side, 3, DType::F32)?);
            call(move |run| run(Op::Pixels { out, x }))
        })
    }
}

fn sum(streams: &[usize]) -> String {
    streams.iter().map(usize::to_string).collect::<Vec<_>>().join("+")
}
