//! The VAE: decodes latents to pixels and encodes pixels to latents. Images are matrices of one row per pixel, channels last.

mod tiles;

use super::Loader;
use crate::backend::{
    Backend, Conv, GatedGemm, Gemm, GroupNorm, KvSegment, LatentStats, Linear, Op, Sampling, Shortcut, Softmax, scope,
};
use crate::config::VaeConfig;
use crate::error::Result;
use crate::sequence::Grid;
use crate::tensor::{Arena, DType, Precision, Region, Tensor};
use tiles::{Scale, Tiles};

/// The VAE.
pub struct Vae {
    config: VaeConfig,
    precision: Precision,
    stats: LatentStats,
    decoder: Decoder,
    encoder: Option<Encoder>,
    /// Whether images with a side longer than a tile are decoded and encoded in tiles.
    tiling: bool,
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
    /// The convolution that changes the resolution for the next level.
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

impl FeatureMap {
    fn shape(self) -> Shape {
        Shape { width: self.width, height: self.height, channels: self.data.cols }
    }
}

/// The size of a feature map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    width: usize,
    height: usize,
    channels: usize,
}

impl Shape {
    /// The size after the convolution that changes the resolution.
    fn resampled(self, sampling: Sampling, channels: usize) -> Self {
        let scaled = |side: usize| match sampling {
            Sampling::Up => 2 * side,
            Sampling::Down => side / 2,
            Sampling::Same => side,
        };
        Self { width: scaled(self.width), height: scaled(self.height), channels }
    }
}

/// Pixels of the image along each side of a latent.
const SCALE: usize = 8;

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
    /// Loads the levels of the encoder or decoder. Their channels are given in running order. Every level but the last ends with
    /// a convolution that changes the resolution.
    fn load_all(
        loader: &mut Loader<'_>,
        name: &str,
        channels: [usize; 4],
        resnets: usize,
        sampling: Sampling,
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
            let resample = match (i < 3, sampling) {
                (false, _) => None,
                (true, Sampling::Up) => Some(loader.up_conv(&format!("{name}.upsamplers.0.conv"), channels, channels)?),
                (true, _) => Some(loader.conv(&format!("{name}.downsamplers.0.conv"), channels, channels)?),
            };
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
            levels: Level::load_all(loader, "decoder.up_blocks", decoder, DECODER_RESNETS, Sampling::Up, c)?,
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
            levels: Level::load_all(loader, "encoder.down_blocks", c.encoder, ENCODER_RESNETS, Sampling::Down, c)?,
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
        Ok(Self { config: c.clone(), precision: loader.precision(), stats, decoder, encoder, tiling: false })
    }

    /// Sets whether images with a side longer than [`VaeConfig::tile`] are decoded and encoded in tiles. Apart from the results,
    /// tiles need no more working memory than an image of that size. Each tile is normalized by its own statistics, so the image
    /// differs from an untiled one.
    #[must_use]
    pub fn with_tiling(self, tiling: bool) -> Self {
        Self { tiling, ..self }
    }

    /// The tiles of an image, if it is processed in tiles. `side` is the longest tile side, in the unit of `width` and `height`.
    fn tiles(&self, width: usize, height: usize, side: usize) -> Option<Tiles> {
        Tiles::new(width, height, side).filter(|_| self.tiling)
    }

    /// Decodes latents of `grid` tokens to an f32 image of `[pixels, 3]`, nominally within -1..1.
    pub fn decode(&self, be: &mut dyn Backend, ws: &mut Arena, image: Tensor, latents: Tensor, grid: Grid) -> Result<()> {
        let (width, height) = (2 * grid.width, 2 * grid.height);
        scope(be, ws, |be, ws| {
            let z = ws.alloc(width * height, self.config.latent, self.precision.activations())?;
            be.run(Op::Unpatchify { out: z, x: latents, stats: &self.stats, width: grid.width })?;
            let network = |be: &mut dyn Backend, ws: &mut Arena, image, z, size| self.decode_latents(be, ws, image, z, size);
            match self.tiles(width, height, self.config.tile / SCALE) {
                Some(tiles) => tiles.run(be, ws, image, z, Scale::Up(SCALE), &network),
                None => network(be, ws, image, z, [width, height]),
            }
        })
    }

    /// Decodes latents of this width and height.
    fn decode_latents(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        image: Tensor,
        z: Tensor,
        [width, height]: [usize; 2],
    ) -> Result<()> {
        let (c, d) = (&self.config, &self.decoder);
        let first = Shape { width, height, channels: c.decoder[3] };
        scope(be, ws, |be, ws| {
            let quantized = ws.alloc(z.rows, c.latent, self.precision.activations())?;
            be.run(Op::Linear(&[Gemm { out: quantized, x: z, w: &d.post_quant }]))?;
            let z = FeatureMap { data: quantized, stats: None, width, height };
            let begin = |be: &mut dyn Backend, x| conv(be, x, z, &d.conv_in, Sampling::Same, Added::Nothing);
            self.levels(be, ws, (&d.levels, &d.mid), (first, Sampling::Up), &begin, &|be, last| {
                let FeatureMap { data: x, stats, width, height } = last;
                be.run(Op::NormConv { out: image, x, norm: &d.norm_out, stats, w: &d.conv_out, width, height })
            })
        })
    }

    /// Encodes an image of `[pixels, 3]` to tokens of `grid`: the mean of the encoder's posterior, without sampling.
    ///
    /// # Panics
    /// If the encoder was not loaded: a bug in the caller.
    pub fn encode(&self, be: &mut dyn Backend, ws: &mut Arena, tokens: Tensor, image: Tensor, grid: Grid) -> Result<()> {
        let (width, height) = (2 * SCALE * grid.width, 2 * SCALE * grid.height);
        scope(be, ws, |be, ws| {
            let z = ws.alloc(4 * grid.tokens(), self.config.latent, DType::F32)?;
            let network = |be: &mut dyn Backend, ws: &mut Arena, z, image, size| self.encode_pixels(be, ws, z, image, size);
            match self.tiles(width, height, self.config.tile) {
                Some(tiles) => tiles.run(be, ws, z, image, Scale::Down(SCALE), &network)?,
                None => network(be, ws, z, image, [width, height])?,
            }
            be.run(Op::Patchify { out: tokens, x: z, stats: &self.stats, width: grid.width })
        })
    }

    /// Encodes an image of this width and height.
    fn encode_pixels(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        z: Tensor,
        image: Tensor,
        [width, height]: [usize; 2],
    ) -> Result<()> {
        let e = self.encoder.as_ref().expect("the encoder was not loaded");
        let c = &self.config;
        let first = Shape { width, height, channels: c.encoder[0] };
        scope(be, ws, |be, ws| {
            let moments = ws.alloc(z.rows, 2 * c.latent, self.precision.activations())?;
            let image = FeatureMap { data: image, stats: None, width, height };
            let begin = |be: &mut dyn Backend, x| conv(be, x, image, &e.conv_in, Sampling::Same, Added::Nothing);
            self.levels(be, ws, (&e.levels, &e.mid), (first, Sampling::Down), &begin, &|be, last| {
                let normed = self.norm(be, &e.norm_out, last.data, last, true)?;
                let out = FeatureMap { data: moments, stats: None, ..last };
                conv(be, out, normed, &e.conv_out, Sampling::Same, Added::Nothing)
            })?;
            // The second half of the channels is the log-variance of the posterior. The mean does not need it.
            let mean = e.quant.rows(0..c.latent);
            be.run(Op::Linear(&[Gemm { out: z, x: moments, w: &mean }]))
        })
    }

    /// Runs all levels, and the blocks at the coarsest resolution before or after them. `begin` computes the input of the first
    /// level, of this shape; `end` gets the last output.
    ///
    /// The buffers share one block of memory. Levels alternate between its beginning and its end. So the input of a level can be
    /// computed while all buffers of the level before exist. Later the level takes over their memory.
    fn levels(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        (levels, mid): (&[Level], &Mid),
        (mut shape, sampling): (Shape, Sampling),
        begin: &dyn Fn(&mut dyn Backend, FeatureMap) -> Result<()>,
        end: &dyn Fn(&mut dyn Backend, FeatureMap) -> Result<()>,
    ) -> Result<()> {
        let mut sizes = Vec::new();
        for level in levels {
            sizes.push((shape, Buffers::bytes(self, shape, level.channels)?));
            shape = shape.resampled(sampling, level.channels);
        }
        let input_bytes = |level: usize| sizes.get(level).map_or(0, |(_, [input, _])| *input);
        let coarsest = if sampling == Sampling::Up { 0 } else { levels.len() - 1 };
        let mid_bytes = MidBuffers::bytes(self, Shape { channels: levels[coarsest].channels, ..sizes[coarsest].0 })?;
        let needs = |(i, &(_, [input, rest])): (usize, &(Shape, [u64; 2]))| {
            input + rest + if i == coarsest { mid_bytes.max(input_bytes(i + 1)) } else { input_bytes(i + 1) }
        };
        let bytes = sizes.iter().enumerate().map(needs).max().unwrap_or(0);
        scope(be, ws, |be, ws| {
            let block = ws.alloc(bytes as usize, 1, DType::U8)?.extent();
            let place = |level: usize| -> Result<(FeatureMap, Arena)> {
                let (shape, [input, rest]) = sizes[level];
                // At the end of the block, the input comes after the level's other buffers. This keeps it away from the buffers
                // of the level before.
                let (x, rest) = match level % 2 {
                    0 => (block.end - input, block.end - input - rest),
                    _ => (block.start, block.start + input),
                };
                Ok((self.map(&mut Arena::starting_at(Region::Arena, x), shape)?, Arena::starting_at(Region::Arena, rest)))
            };
            let (mut x, mut rest) = place(0)?;
            begin(be, x)?;
            if sampling == Sampling::Up {
                self.mid(be, &mut Arena::starting_at(Region::Arena, block.start), mid, x)?;
            }
            for (i, level) in levels.iter().enumerate() {
                let next = if i + 1 < levels.len() { Some(place(i + 1)?) } else { None };
                scope(be, &mut rest, |be, rest| {
                    let last = self.level(be, rest, level, x)?;
                    match (&level.resample, &next) {
                        (Some(resample), Some((next, _))) => conv(be, *next, last, resample, sampling, Added::Nothing),
                        _ => {
                            if sampling == Sampling::Down {
                                self.mid(be, rest, mid, last)?;
                            }
                            end(be, last)
                        }
                    }
                })?;
                if let Some(next) = next {
                    (x, rest) = next;
                }
            }
            Ok(())
        })
    }

    /// Runs the residual blocks of a level. Its input is overwritten unless input and output differ in their channels.
    fn level(&self, be: &mut dyn Backend, ws: &mut Arena, level: &Level, x: FeatureMap) -> Result<FeatureMap> {
        let Buffers { first, second, inner, normed } = Buffers::new(self, ws, x, level.channels)?;
        let (mut current, mut other) = (x, first);
        for (i, resnet) in level.resnets.iter().enumerate() {
            match normed.filter(|_| i == 0) {
                // The input stays until the shortcut has read it, so the first block needs two more buffers.
                Some(normed) => {
                    self.resnet(be, resnet, x, normed, first, second)?;
                    (current, other) = (second, first);
                }
                None => {
                    self.resnet(be, resnet, current, other.data, inner, other)?;
                    (current, other) = (other, current);
                }
            }
        }
        Ok(current)
    }

    /// Runs the blocks at the coarsest resolution, in place. Afterwards `x` has the statistics of its new values.
    fn mid(&self, be: &mut dyn Backend, ws: &mut Arena, mid: &Mid, x: FeatureMap) -> Result<()> {
        scope(be, ws, |be, ws| {
            let MidBuffers { y, inner, attention } = MidBuffers::new(self, ws, x.shape())?;
            self.resnet(be, &mid.first, x, y.data, inner, y)?;
            self.attention(be, &mid.attention, y, attention)?;
            // Attention has changed the values since their statistics were computed.
            self.resnet(be, &mid.second, FeatureMap { stats: None, ..y }, x.data, inner, x)
        })
    }

    /// `out = shortcut(x) + conv(silu(norm(conv(silu(norm(x))))))`. Intermediate values overwrite `normed` and `inner`; `normed`
    /// has the size of `x` and may be the memory of `out`.
    fn resnet(
        &self,
        be: &mut dyn Backend,
        block: &Resnet,
        x: FeatureMap,
        normed: Tensor,
        inner: FeatureMap,
        out: FeatureMap,
    ) -> Result<()> {
        let normed = self.norm(be, &block.norm1, normed, x, true)?;
        conv(be, inner, normed, &block.conv1, Sampling::Same, Added::Nothing)?;
        let normed = self.norm(be, &block.norm2, inner.data, inner, true)?;
        let added = match &block.shortcut {
            Some(w) => Added::Shortcut(Shortcut { x: x.data, w }),
            None => Added::Residual(x.data),
        };
        conv(be, out, normed, &block.conv2, Sampling::Same, added)
    }

    /// Adds self-attention over all pixels, with one head, to `x`. The four matrices are overwritten.
    fn attention(&self, be: &mut dyn Backend, block: &Attention, x: FeatureMap, [normed, q, k, v]: [Tensor; 4]) -> Result<()> {
        self.norm(be, &block.norm, normed, x, false)?;
        be.run(Op::Linear(&[
            Gemm { out: q, x: normed, w: &block.q },
            Gemm { out: k, x: normed, w: &block.k },
            Gemm { out: v, x: normed, w: &block.v },
        ]))?;
        be.run(Op::Attention {
            out: &[normed],
            q,
            kv: &[KvSegment { k, v }],
            head_dim: q.cols,
            causal: false,
            softmax: Softmax::Natural { scale: 1.0 / (q.cols as f32).sqrt() },
        })?;
        be.run(Op::LinearGateResidual(&[GatedGemm { into: x.data, x: normed, w: &block.out, gate: None }]))
    }

    /// Normalizes `x` into `out`. If the statistics are known, `out` may be the memory of `x`.
    fn norm(&self, be: &mut dyn Backend, norm: &GroupNorm, out: Tensor, x: FeatureMap, silu: bool) -> Result<FeatureMap> {
        be.run(Op::GroupNorm { out, x: x.data, norm, stats: x.stats, silu })?;
        Ok(FeatureMap { data: out, stats: None, ..x })
    }

    fn map(&self, ws: &mut Arena, shape: Shape) -> Result<FeatureMap> {
        let Shape { width, height, channels } = shape;
        let data = ws.alloc(width * height, channels, self.precision.activations())?;
        Ok(FeatureMap { data, stats: Some(ws.alloc(self.config.groups, 2, DType::F32)?), width, height })
    }
}

/// The buffers of a level, without its input.
struct Buffers {
    /// The outputs of residual blocks alternate: one buffer is the input of the next block, which writes the other. If input and
    /// output of the level have the same size, `second` is the input.
    first: FeatureMap,
    second: FeatureMap,
    /// Intermediate values between the two convolutions of a block.
    inner: FeatureMap,
    /// The normalized input, if input and output differ in their channels. As far as it fits, it shares the memory of `second`
    /// and `inner`: the first block does not use `inner`, and writes `second` last.
    normed: Option<Tensor>,
}

impl Buffers {
    fn new(vae: &Vae, ws: &mut Arena, x: FeatureMap, channels: usize) -> Result<Self> {
        let shape = Shape { channels, ..x.shape() };
        let first = vae.map(ws, shape)?;
        if shape == x.shape() {
            return Ok(Self { first, second: x, inner: vae.map(ws, shape)?, normed: None });
        }
        let mut alternative = ws.clone();
        let normed = alternative.alloc(x.data.rows, x.data.cols, x.data.dtype)?;
        let buffers = Self { first, second: vae.map(ws, shape)?, inner: vae.map(ws, shape)?, normed: Some(normed) };
        // The arena has to hold whichever takes more.
        ws.extend_to(alternative.mark());
        Ok(buffers)
    }

    /// Bytes of the input of a level, and of its other buffers.
    fn bytes(vae: &Vae, input: Shape, channels: usize) -> Result<[u64; 2]> {
        let mut ws = Arena::new(Region::Arena);
        let x = vae.map(&mut ws, input)?;
        let input = ws.mark();
        Self::new(vae, &mut ws, x, channels)?;
        Ok([input, ws.peak() - input])
    }
}

/// The buffers of the blocks at the coarsest resolution.
struct MidBuffers {
    y: FeatureMap,
    inner: FeatureMap,
    attention: [Tensor; 4],
}

impl MidBuffers {
    fn new(vae: &Vae, ws: &mut Arena, shape: Shape) -> Result<Self> {
        let (y, inner) = (vae.map(ws, shape)?, vae.map(ws, shape)?);
        let mut alloc = || ws.alloc(y.data.rows, y.data.cols, y.data.dtype);
        Ok(Self { y, inner, attention: [alloc()?, alloc()?, alloc()?, alloc()?] })
    }

    fn bytes(vae: &Vae, shape: Shape) -> Result<u64> {
        let mut ws = Arena::new(Region::Arena);
        Self::new(vae, &mut ws, shape)?;
        Ok(ws.peak())
    }
}

/// The summand that a convolution adds to its result.
enum Added<'a> {
    Nothing,
    Residual(Tensor),
    Shortcut(Shortcut<'a>),
}

fn conv(be: &mut dyn Backend, out: FeatureMap, x: FeatureMap, w: &Conv, sampling: Sampling, added: Added<'_>) -> Result<()> {
    let (width, height) = (x.width, x.height);
    let (residual, shortcut) = match added {
        Added::Nothing => (None, None),
        Added::Residual(residual) => (Some(residual), None),
        Added::Shortcut(shortcut) => (None, Some(shortcut)),
    };
    be.run(Op::Conv { out: out.data, x: x.data, w, width, height, sampling, residual, shortcut, stats: out.stats })
}
