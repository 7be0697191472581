//! The image autoencoder: latents to pixels. Images are matrices of one row per pixel, channels last.

use super::Loader;
use crate::backend::{Backend, Conv, GatedProduct, GroupNorm, KeyValues, LatentStats, Linear, Op, Product, Sampling, scope};
use crate::config::VaeConfig;
use crate::error::Result;
use crate::sequence::Grid;
use crate::tensor::{Arena, DType, Precision, Tensor};

/// The autoencoder's decoder.
pub struct Vae {
    config: VaeConfig,
    precision: Precision,
    stats: LatentStats,
    post_quant: Linear,
    conv_in: Conv,
    mid: (Resnet, Attention, Resnet),
    /// Coarsest first.
    levels: Vec<Level>,
    norm_out: GroupNorm,
    conv_out: Conv,
}

struct Resnet {
    norm1: GroupNorm,
    conv1: Conv,
    norm2: GroupNorm,
    conv2: Conv,
    /// Where the number of channels changes.
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
    up: Option<Conv>,
}

/// An image in memory: a row per pixel, and the group statistics of its values where its producer made them.
#[derive(Clone, Copy)]
struct Map {
    data: Tensor,
    stats: Option<Tensor>,
    width: usize,
    height: usize,
}

/// Residual blocks of a decoder level.
const RESNETS: usize = 3;

impl Resnet {
    fn load(loader: &mut Loader<'_>, name: &str, input: usize, out: usize, c: &VaeConfig) -> Result<Self> {
        Ok(Self {
            norm1: loader.group_norm(&format!("{name}.norm1"), input, c.groups, c.eps)?,
            conv1: loader.conv(&format!("{name}.conv1"), out, input)?,
            norm2: loader.group_norm(&format!("{name}.norm2"), out, c.groups, c.eps)?,
            conv2: loader.conv(&format!("{name}.conv2"), out, out)?,
            shortcut: match input == out {
                true => None,
                false => Some(loader.linear_bias(&format!("{name}.conv_shortcut"), out, input)?),
            },
        })
    }
}

impl Attention {
    fn load(loader: &mut Loader<'_>, name: &str, channels: usize, c: &VaeConfig) -> Result<Self> {
        let mut linear = |which: &str| loader.linear_bias(&format!("{name}.{which}"), channels, channels);
        let (q, k, v, out) = (linear("to_q")?, linear("to_k")?, linear("to_v")?, linear("to_out.0")?);
        Ok(Self { norm: loader.group_norm(&format!("{name}.group_norm"), channels, c.groups, c.eps)?, q, k, v, out })
    }
}

impl Vae {
    /// Places the decoder's weights and the latent statistics.
    pub fn load(loader: &mut Loader<'_>, config: &VaeConfig) -> Result<Self> {
        let c = config;
        let top = c.decoder[3];
        let mut levels = Vec::new();
        let mut input = top;
        for (i, &channels) in c.decoder.iter().rev().enumerate() {
            let name = format!("decoder.up_blocks.{i}");
            let resnets = (0..RESNETS)
                .map(|j| Resnet::load(loader, &format!("{name}.resnets.{j}"), if j == 0 { input } else { channels }, channels, c))
                .collect::<Result<_>>()?;
            let up = match i < 3 {
                true => Some(loader.conv(&format!("{name}.upsamplers.0.conv"), channels, channels)?),
                false => None,
            };
            levels.push(Level { channels, resnets, up });
            input = channels;
        }
        Ok(Self {
            config: c.clone(),
            precision: loader.precision,
            stats: LatentStats {
                mean: loader.vector("bn.running_mean", c.patched())?,
                var: loader.vector("bn.running_var", c.patched())?,
                eps: c.stats_eps,
            },
            post_quant: loader.linear_bias("post_quant_conv", c.latent, c.latent)?,
            conv_in: loader.conv("decoder.conv_in", top, c.latent)?,
            mid: (
                Resnet::load(loader, "decoder.mid_block.resnets.0", top, top, c)?,
                Attention::load(loader, "decoder.mid_block.attentions.0", top, c)?,
                Resnet::load(loader, "decoder.mid_block.resnets.1", top, top, c)?,
            ),
            levels,
            norm_out: loader.group_norm("decoder.conv_norm_out", c.decoder[0], c.groups, c.eps)?,
            conv_out: loader.conv("decoder.conv_out", 3, c.decoder[0])?,
        })
    }

    /// Turns latents of `grid` tokens into an f32 image of `[pixels, 3]`, nominally within -1..1.
    pub fn decode(&self, be: &mut dyn Backend, ws: &mut Arena, image: Tensor, latents: Tensor, grid: Grid) -> Result<()> {
        let (c, act) = (&self.config, self.precision.activations());
        let (width, height) = (2 * grid.width, 2 * grid.height);
        scope(be, ws, |be, ws| {
            let mut x = self.map(ws, width, height, c.decoder[3])?;
            scope(be, ws, |be, ws| {
                let (z, quantised) = (ws.alloc(width * height, c.latent, act)?, ws.alloc(width * height, c.latent, act)?);
                be.run(Op::Unpatchify { out: z, x: latents, stats: &self.stats, width: grid.width })?;
                be.run(Op::Linear(&[Product { out: quantised, x: z, w: &self.post_quant }]))?;
                let z = Map { data: quantised, stats: None, width, height };
                conv(be, x, z, &self.conv_in, Sampling::Same, None)
            })?;
            scope(be, ws, |be, ws| {
                let y = self.map(ws, width, height, c.decoder[3])?;
                self.resnet(be, ws, &self.mid.0, y, x)?;
                self.attention(be, ws, &self.mid.1, y)?;
                self.resnet(be, ws, &self.mid.2, x, Map { stats: None, ..y })
            })?;
            for level in &self.levels {
                x = self.level(be, ws, level, x, image)?;
            }
            Ok(())
        })
    }

    /// A level's blocks, then its upsampling; the last level writes the image instead.
    fn level(&self, be: &mut dyn Backend, ws: &mut Arena, level: &Level, x: Map, image: Tensor) -> Result<Map> {
        // The input of the next level outlives this one, so it is placed first.
        let next = match &level.up {
            Some(_) => self.map(ws, 2 * x.width, 2 * x.height, level.channels)?,
            None => Map { data: image, stats: None, ..x },
        };
        scope(be, ws, |be, ws| {
            let buffers = [self.map(ws, x.width, x.height, level.channels)?, self.map(ws, x.width, x.height, level.channels)?];
            let mut current = x;
            for (resnet, &out) in level.resnets.iter().zip(buffers.iter().cycle()) {
                self.resnet(be, ws, resnet, out, current)?;
                current = out;
            }
            match &level.up {
                Some(up) => conv(be, next, current, up, Sampling::Up, None),
                None => {
                    let normed = self.norm(be, ws, &self.norm_out, current, true)?;
                    conv(be, next, normed, &self.conv_out, Sampling::Same, None)
                }
            }
        })?;
        Ok(next)
    }

    /// `out = shortcut(x) + conv(silu(norm(conv(silu(norm(x))))))`.
    fn resnet(&self, be: &mut dyn Backend, ws: &mut Arena, block: &Resnet, out: Map, x: Map) -> Result<()> {
        scope(be, ws, |be, ws| {
            // `out` holds the inner map until the second convolution overwrites it.
            scope(be, ws, |be, ws| {
                let normed = self.norm(be, ws, &block.norm1, x, true)?;
                conv(be, out, normed, &block.conv1, Sampling::Same, None)
            })?;
            let normed = self.norm(be, ws, &block.norm2, out, true)?;
            let residual = match &block.shortcut {
                Some(w) => {
                    let shortcut = ws.alloc(out.data.rows, out.data.cols, out.data.dtype)?;
                    be.run(Op::Linear(&[Product { out: shortcut, x: x.data, w }]))?;
                    shortcut
                }
                None => x.data,
            };
            conv(be, out, normed, &block.conv2, Sampling::Same, Some(residual))
        })
    }

    /// Self-attention over all pixels with one head, added to `x`.
    fn attention(&self, be: &mut dyn Backend, ws: &mut Arena, block: &Attention, x: Map) -> Result<()> {
        let (rows, channels, act) = (x.data.rows, x.data.cols, self.precision.activations());
        scope(be, ws, |be, ws| {
            let normed = self.norm(be, ws, &block.norm, x, false)?.data;
            let (q, k, v) = (ws.alloc(rows, channels, act)?, ws.alloc(rows, channels, act)?, ws.alloc(rows, channels, act)?);
            be.run(Op::Linear(&[
                Product { out: q, x: normed, w: &block.q },
                Product { out: k, x: normed, w: &block.k },
                Product { out: v, x: normed, w: &block.v },
            ]))?;
            be.run(Op::Attention { out: normed, q, kv: &[KeyValues { k, v }], head_dim: channels, causal: false })?;
            be.run(Op::LinearGateResidual(&[GatedProduct { into: x.data, x: normed, w: &block.out, gate: None }]))
        })
    }

    fn norm(&self, be: &mut dyn Backend, ws: &mut Arena, norm: &GroupNorm, x: Map, silu: bool) -> Result<Map> {
        let out = ws.alloc(x.data.rows, x.data.cols, self.precision.activations())?;
        be.run(Op::GroupNorm { out, x: x.data, norm, stats: x.stats, silu })?;
        Ok(Map { data: out, stats: None, ..x })
    }

    fn map(&self, ws: &mut Arena, width: usize, height: usize, channels: usize) -> Result<Map> {
        let data = ws.alloc(width * height, channels, self.precision.activations())?;
        Ok(Map { data, stats: Some(ws.alloc(self.config.groups, 2, DType::F32)?), width, height })
    }
}

fn conv(be: &mut dyn Backend, out: Map, x: Map, w: &Conv, sampling: Sampling, residual: Option<Tensor>) -> Result<()> {
    let (width, height) = (x.width, x.height);
    be.run(Op::Conv { out: out.data, x: x.data, w, width, height, sampling, residual, stats: out.stats })
}
