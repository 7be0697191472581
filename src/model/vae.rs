//! The VAE: decodes latents to pixels and encodes pixels to latents. Images are matrices of one row per pixel, channels last.

use super::Loader;
use crate::backend::{Backend, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Op, Sampling, Softmax, scope};
use crate::config::VaeConfig;
use crate::error::Result;
use crate::sequence::Grid;
use crate::tensor::{Arena, DType, Precision, Tensor};

/// The VAE.
pub struct Vae {
    config: VaeConfig,
    precision: Precision,
    stats: LatentStats,
    decoder: Decoder,
    encoder: Option<Encoder>,
}

pub(super) struct Decoder {
    post_quant: Linear,
    conv_in: Conv,
    mid: Mid,
    /// The levels, coarsest first.
    levels: Vec<Level>,
    norm_out: GroupNorm,
    conv_out: Conv,
}

pub(super) struct Encoder {
    conv_in: Conv,
    /// The levels, finest first.
    levels: Vec<Level>,
    mid: Mid,
    norm_out: GroupNorm,
    conv_out: Conv,
    quant: Linear,
}

struct Mid {
    first: Resnet,
    attention: Attention,
    second: Resnet,
}

struct Resnet {
    norm1: GroupNorm,
    conv1: Conv,
    norm2: GroupNorm,
    conv2: Conv,
    /// A 1x1 convolution, if the number of channels changes.
    shortcut: Option<Linear>,
}

struct Attention {
    norm: GroupNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
}

struct Level {
    channels: usize,
    resnets: Vec<Resnet>,
    /// The convolution that changes the resolution to that of the next level.
    resample: Option<Conv>,
}

/// A feature map: one row per pixel, and the group statistics of its values if the op that produced it computed them.
#[derive(Clone, Copy)]
struct FeatureMap {
    data: Tensor,
    stats: Option<Tensor>,
    width: usize,
    height: usize,
}

/// Number of residual blocks of a level.
const ENCODER_RESNETS: usize = 2;
const DECODER_RESNETS: usize = 3;

impl Resnet {
    fn load(loader: &mut Loader<'_>, name: &str, input: usize, out: usize, c: &VaeConfig) -> Result<Self> {
        Ok(Self {
            norm1: loader.group_norm(&format!("{name}.norm1"), input, c.groups, c.eps)?,
            conv1: loader.conv(&format!("{name}.conv1"), out, input)?,
            norm2: loader.group_norm(&format!("{name}.norm2"), out, c.groups, c.eps)?,
            conv2: loader.conv(&format!("{name}.conv2"), out, out)?,
            shortcut: match input == out {
                true => None,
                false => Some(loader.conv_1x1(&format!("{name}.conv_shortcut"), out, input)?),
            },
        })
    }
}

impl Attention {
    fn load(loader: &mut Loader<'_>, name: &str, channels: usize, c: &VaeConfig) -> Result<Self> {
        let norm = loader.group_norm(&format!("{name}.group_norm"), channels, c.groups, c.eps)?;
        let mut linear = |which: &str| loader.linear_bias(&format!("{name}.{which}"), channels, channels);
        Ok(Self { norm, q: linear("to_q")?, k: linear("to_k")?, v: linear("to_v")?, out: linear("to_out.0")? })
    }
}

impl Mid {
    fn load(loader: &mut Loader<'_>, name: &str, channels: usize, c: &VaeConfig) -> Result<Self> {
        Ok(Self {
            first: Resnet::load(loader, &format!("{name}.resnets.0"), channels, channels, c)?,
            attention: Attention::load(loader, &format!("{name}.attentions.0"), channels, c)?,
            second: Resnet::load(loader, &format!("{name}.resnets.1"), channels, channels, c)?,
        })
    }
}

impl Level {
    /// The levels of one half, whose channels are given in the order in which they run. All but the last end in a convolution
    /// that `resample` names.
    fn load_all(
        loader: &mut Loader<'_>,
        name: &str,
        channels: [usize; 4],
        resnets: usize,
        resample: &str,
        c: &VaeConfig,
    ) -> Result<Vec<Self>> {
        let mut input = channels[0];
        let level = |(i, channels): (usize, usize)| {
            let name = format!("{name}.{i}");
            let resnets = (0..resnets)
                .map(|j| {
                    Resnet::load(loader, &format!("{name}.resnets.{j}"), std::mem::replace(&mut input, channels), channels, c)
                })
                .collect::<Result<_>>()?;
            let resample = (i < 3).then(|| loader.conv(&format!("{name}.{resample}.0.conv"), channels, channels)).transpose()?;
            Ok(Self { channels, resnets, resample })
        };
        channels.into_iter().enumerate().map(level).collect()
    }
}

impl Decoder {
    pub(super) fn load(loader: &mut Loader<'_>, c: &VaeConfig) -> Result<Self> {
        let [finest, fine, coarse, coarsest] = c.decoder;
        let decoder = [coarsest, coarse, fine, finest];
        Ok(Self {
            post_quant: loader.conv_1x1("post_quant_conv", c.latent, c.latent)?,
            conv_in: loader.conv("decoder.conv_in", coarsest, c.latent)?,
            mid: Mid::load(loader, "decoder.mid_block", coarsest, c)?,
            levels: Level::load_all(loader, "decoder.up_blocks", decoder, DECODER_RESNETS, "upsamplers", c)?,
            norm_out: loader.group_norm("decoder.conv_norm_out", finest, c.groups, c.eps)?,
            conv_out: loader.conv("decoder.conv_out", 3, finest)?,
        })
    }
}

impl Encoder {
    pub(super) fn load(loader: &mut Loader<'_>, c: &VaeConfig) -> Result<Self> {
        let [finest, .., coarsest] = c.encoder;
        Ok(Self {
            conv_in: loader.conv("encoder.conv_in", finest, 3)?,
            levels: Level::load_all(loader, "encoder.down_blocks", c.encoder, ENCODER_RESNETS, "downsamplers", c)?,
            mid: Mid::load(loader, "encoder.mid_block", coarsest, c)?,
            norm_out: loader.group_norm("encoder.conv_norm_out", coarsest, c.groups, c.eps)?,
            conv_out: loader.conv("encoder.conv_out", 2 * c.latent, coarsest)?,
            quant: loader.conv_1x1("quant_conv", 2 * c.latent, 2 * c.latent)?,
        })
    }
}

/// Mean and variance of each channel of a patch of latents.
pub(super) fn latent_stats(loader: &mut Loader<'_>, c: &VaeConfig) -> Result<LatentStats> {
    Ok(LatentStats {
        mean: loader.vector("bn.running_mean", c.patched())?,
        var: loader.vector("bn.running_var", c.patched())?,
        eps: c.stats_eps,
    })
}

impl Vae {
    /// Loads the weights of the decoder and the latent statistics, and with `with_encoder` also the weights of the encoder.
    pub fn load(loader: &mut Loader<'_>, config: &VaeConfig, with_encoder: bool) -> Result<Self> {
        let c = config;
        let stats = latent_stats(loader, c)?;
        let decoder = Decoder::load(loader, c)?;
        let encoder = if with_encoder { Some(Encoder::load(loader, c)?) } else { None };
        Ok(Self { config: c.clone(), precision: loader.precision(), stats, decoder, encoder })
    }

    /// Decodes latents of `grid` tokens to an f32 image of `[pixels, 3]`, nominally within -1..1.
    pub fn decode(&self, be: &mut dyn Backend, ws: &mut Arena, image: Tensor, latents: Tensor, grid: Grid) -> Result<()> {
        let (c, d, act) = (&self.config, &self.decoder, self.precision.activations());
        let (width, height) = (2 * grid.width, 2 * grid.height);
        scope(be, ws, |be, ws| {
            let mut x = self.map(ws, width, height, c.decoder[3])?;
            scope(be, ws, |be, ws| {
                let (z, quantised) = (ws.alloc(width * height, c.latent, act)?, ws.alloc(width * height, c.latent, act)?);
                be.run(Op::Unpatchify { out: z, x: latents, stats: &self.stats, width: grid.width })?;
                be.run(Op::Linear(&[Gemm { out: quantised, x: z, w: &d.post_quant }]))?;
                let z = FeatureMap { data: quantised, stats: None, width, height };
                conv(be, x, z, &d.conv_in, Sampling::Same, None)
            })?;
            self.mid(be, ws, &d.mid, x)?;
            for level in &d.levels {
                x = self.level(be, ws, level, x, Sampling::Up, |be, ws, last| {
                    let normed = self.norm(be, ws, &d.norm_out, last, true)?;
                    conv(be, FeatureMap { data: image, stats: None, ..last }, normed, &d.conv_out, Sampling::Same, None)
                })?;
            }
            Ok(())
        })
    }

    /// Encodes an image of `[pixels, 3]` to tokens of `grid`: the mean of the encoder's posterior, without sampling.
    ///
    /// # Panics
    /// If the encoder was not loaded: a bug in the caller.
    pub fn encode(&self, be: &mut dyn Backend, ws: &mut Arena, tokens: Tensor, image: Tensor, grid: Grid) -> Result<()> {
        let e = self.encoder.as_ref().expect("the encoder was not loaded");
        let (c, act) = (&self.config, self.precision.activations());
        scope(be, ws, |be, ws| {
            let image = FeatureMap { data: image, stats: None, width: 16 * grid.width, height: 16 * grid.height };
            let mut x = self.map(ws, image.width, image.height, c.encoder[0])?;
            conv(be, x, image, &e.conv_in, Sampling::Same, None)?;
            for level in &e.levels {
                x = self.level(be, ws, level, x, Sampling::Down, |be, ws, last| {
                    self.mid(be, ws, &e.mid, last)?;
                    let normed = self.norm(be, ws, &e.norm_out, last, true)?;
                    let moments = ws.alloc(last.data.rows, 2 * c.latent, act)?;
                    conv(be, FeatureMap { data: moments, stats: None, ..last }, normed, &e.conv_out, Sampling::Same, None)?;
                    // The second half of the channels is the log-variance of the posterior, which is not needed for its mean.
                    let mean = e.quant.rows(0..c.latent);
                    let z = ws.alloc(last.data.rows, c.latent, act)?;
                    be.run(Op::Linear(&[Gemm { out: z, x: moments, w: &mean }]))?;
                    be.run(Op::Patchify { out: tokens, x: z, stats: &self.stats, width: grid.width })
                })?;
            }
            Ok(())
        })
    }

    /// Runs the residual blocks of a level, then its resampling; the last level has no resampling and ends with `last` instead.
    fn level(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        level: &Level,
        x: FeatureMap,
        sampling: Sampling,
        last: impl FnOnce(&mut dyn Backend, &mut Arena, FeatureMap) -> Result<()>,
    ) -> Result<FeatureMap> {
        let scaled = |side: usize| match sampling {
            Sampling::Up => 2 * side,
            Sampling::Down => side / 2,
            Sampling::Same => side,
        };
        // The input of the next level outlives this level's buffers, so it is allocated first.
        let next = match &level.resample {
            Some(_) => self.map(ws, scaled(x.width), scaled(x.height), level.channels)?,
            None => x,
        };
        scope(be, ws, |be, ws| {
            let buffers = [self.map(ws, x.width, x.height, level.channels)?, self.map(ws, x.width, x.height, level.channels)?];
            let mut current = x;
            for (resnet, &out) in level.resnets.iter().zip(buffers.iter().cycle()) {
                self.resnet(be, ws, resnet, out, current)?;
                current = out;
            }
            match &level.resample {
                Some(resample) => conv(be, next, current, resample, sampling, None),
                None => last(be, ws, current),
            }
        })?;
        Ok(next)
    }

    /// Runs the blocks at the coarsest resolution, in place. Afterwards the statistics of `x` are those of its new values.
    fn mid(&self, be: &mut dyn Backend, ws: &mut Arena, mid: &Mid, x: FeatureMap) -> Result<()> {
        scope(be, ws, |be, ws| {
            let y = self.map(ws, x.width, x.height, x.data.cols)?;
            self.resnet(be, ws, &mid.first, y, x)?;
            self.attention(be, ws, &mid.attention, y)?;
            // Attention has changed the values since their statistics were computed.
            self.resnet(be, ws, &mid.second, x, FeatureMap { stats: None, ..y })
        })
    }

    /// `out = shortcut(x) + conv(silu(norm(conv(silu(norm(x))))))`.
    fn resnet(&self, be: &mut dyn Backend, ws: &mut Arena, block: &Resnet, out: FeatureMap, x: FeatureMap) -> Result<()> {
        scope(be, ws, |be, ws| {
            // `out` holds the intermediate feature map until the second convolution overwrites it.
            scope(be, ws, |be, ws| {
                let normed = self.norm(be, ws, &block.norm1, x, true)?;
                conv(be, out, normed, &block.conv1, Sampling::Same, None)
            })?;
            let normed = self.norm(be, ws, &block.norm2, out, true)?;
            let residual = match &block.shortcut {
                Some(w) => {
                    let shortcut = ws.alloc(out.data.rows, out.data.cols, out.data.dtype)?;
                    be.run(Op::Linear(&[Gemm { out: shortcut, x: x.data, w }]))?;
                    shortcut
                }
                None => x.data,
            };
            conv(be, out, normed, &block.conv2, Sampling::Same, Some(residual))
        })
    }

    /// Self-attention over all pixels with one head, added to `x`.
    fn attention(&self, be: &mut dyn Backend, ws: &mut Arena, block: &Attention, x: FeatureMap) -> Result<()> {
        let (rows, channels, act) = (x.data.rows, x.data.cols, self.precision.activations());
        scope(be, ws, |be, ws| {
            let normed = self.norm(be, ws, &block.norm, x, false)?.data;
            let (q, k, v) = (ws.alloc(rows, channels, act)?, ws.alloc(rows, channels, act)?, ws.alloc(rows, channels, act)?);
            be.run(Op::Linear(&[
                Gemm { out: q, x: normed, w: &block.q },
                Gemm { out: k, x: normed, w: &block.k },
                Gemm { out: v, x: normed, w: &block.v },
            ]))?;
            be.run(Op::Attention {
                out: &[normed],
                q,
                kv: &[KvSegment { k, v }],
                head_dim: channels,
                causal: false,
                softmax: Softmax::Natural { scale: 1.0 / (channels as f32).sqrt() },
            })?;
            be.run(Op::LinearGateResidual(&[GatedGemm { into: x.data, x: normed, w: &block.out, gate: None }]))
        })
    }

    fn norm(&self, be: &mut dyn Backend, ws: &mut Arena, norm: &GroupNorm, x: FeatureMap, silu: bool) -> Result<FeatureMap> {
        let out = ws.alloc(x.data.rows, x.data.cols, self.precision.activations())?;
        be.run(Op::GroupNorm { out, x: x.data, norm, stats: x.stats, silu })?;
        Ok(FeatureMap { data: out, stats: None, ..x })
    }

    fn map(&self, ws: &mut Arena, width: usize, height: usize, channels: usize) -> Result<FeatureMap> {
        let data = ws.alloc(width * height, channels, self.precision.activations())?;
        Ok(FeatureMap { data, stats: Some(ws.alloc(self.config.groups, 2, DType::F32)?), width, height })
    }
}

fn conv(
    be: &mut dyn Backend,
    out: FeatureMap,
    x: FeatureMap,
    w: &Conv,
    sampling: Sampling,
    residual: Option<Tensor>,
) -> Result<()> {
    let (width, height) = (x.width, x.height);
    be.run(Op::Conv { out: out.data, x: x.data, w, width, height, sampling, residual, stats: out.stats })
}
