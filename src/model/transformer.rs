//! The FLUX.2 transformer: double blocks with separate weights for text and image, then single blocks over the joint sequence.
//!
//! The residual stream of the whole sequence is one matrix, text rows first, so nothing is ever concatenated. Everything that
//! depends only on the timestep ([`Transformer::modulations`]) or only on the prompt ([`ContextIn`]) is computed once per image.

use super::attention::{BlockAttention, BlockFormat, KvCache};
use super::{Loader, alloc_for, bounds::QkGain};
use crate::backend::{
    Backend, GatedGemm, Gemm, KvSegment, Linear, Modulated, Op, Projection, QkNorm, Rope, RopeStyle, StepKey, scope,
};
use crate::config::{HEAD_DIM, TransformerConfig};
use crate::error::Result;
use crate::names::{self, LayerRole};
use crate::sampler::{TIMESTEP_CHANNELS, timestep_embedding};
use crate::sequence::SequenceLayout;
use crate::tensor::{Arena, Precision, Tensor};
use std::ops::Range;

/// The layer that projects prompt embeddings to the transformer's width (`txt_in`). It is a separate type because it is loaded
/// with the text encoder.
pub struct ContextIn {
    layer: Linear,
    precision: Precision,
}

impl ContextIn {
    /// Loads the weight.
    pub fn load(loader: &mut Loader<'_>, config: &TransformerConfig) -> Result<Self> {
        let layer = loader.linear(LayerRole::TextIn.only(), &[config.hidden], config.context)?;
        Ok(Self { layer, precision: loader.precision() })
    }

    /// The layer.
    pub fn layer_mut(&mut self) -> &mut Linear {
        &mut self.layer
    }

    /// Allocates the context of a prompt of `rows` tokens.
    pub fn slot(&self, ws: &mut Arena, rows: usize) -> Result<Tensor> {
        ws.alloc(rows, self.layer.weight.rows(), self.precision.activations())
    }

    /// Projects the embeddings of a prompt to its context.
    pub fn run(&self, be: &mut dyn Backend, context: Tensor, features: Tensor) -> Result<()> {
        be.run(Op::Linear(&[Gemm { out: context, x: features, w: &self.layer }]))
    }
}

/// The transformer without [`ContextIn`].
pub struct Transformer {
    config: TransformerConfig,
    precision: Precision,
    image_in: Linear,
    time_in: Linear,
    time_out: Linear,
    /// The guidance embedder, for models that take the guidance scale as an input.
    guidance: Option<(Linear, Linear)>,
    image_modulation: Linear,
    text_modulation: Linear,
    single_modulation: Linear,
    double_blocks: Vec<DoubleBlock>,
    single_blocks: Vec<SingleBlock>,
    final_modulation: Linear,
    image_out: Linear,
}

/// The weights of one stream of a double block.
struct Stream {
    qkv: Linear,
    qk_norm: QkNorm,
    qk_gain: QkGain,
    attention_out: Linear,
    mlp_in: Linear,
    mlp_out: Linear,
}

struct DoubleBlock {
    text: Stream,
    image: Stream,
    /// Attention within and between the streams.
    attention: BlockAttention,
}

struct SingleBlock {
    linear1: Linear,
    qk_norm: QkNorm,
    attention: BlockAttention,
    linear2: Linear,
}

/// The AdaLN modulation of one timestep: shifts, scales and gates of all blocks, side by side in one row.
#[derive(Clone, Copy)]
pub struct Modulation {
    row: Tensor,
    hidden: usize,
}

/// Shift, scale and gate of one norm.
#[derive(Clone, Copy)]
struct ModulationOut {
    shift: Tensor,
    scale: Tensor,
    gate: Tensor,
}

impl Modulation {
    fn chunk(self, index: usize) -> Tensor {
        self.row.cols(index * self.hidden..(index + 1) * self.hidden)
    }

    fn chunks_at(self, first: usize) -> ModulationOut {
        ModulationOut { shift: self.chunk(first), scale: self.chunk(first + 1), gate: self.chunk(first + 2) }
    }

    fn image(self, set: usize) -> ModulationOut {
        self.chunks_at(3 * set)
    }

    fn text(self, set: usize) -> ModulationOut {
        self.chunks_at(6 + 3 * set)
    }

    fn single(self) -> ModulationOut {
        self.chunks_at(12)
    }

    fn last(self) -> (Tensor, Tensor) {
        (self.chunk(15), self.chunk(16))
    }
}

impl ModulationOut {
    fn norm(self, out: Tensor, x: Tensor) -> Modulated {
        Modulated { out, x, shift: self.shift, scale: self.scale }
    }
}

/// Operands of one denoising step.
#[derive(Clone, Copy)]
pub struct StepInput<'a> {
    /// The sequence layout.
    pub plan: &'a SequenceLayout,
    /// The RoPE table, one row per token of the plan.
    pub rope: Tensor,
    /// The prompt's context, from [`ContextIn`].
    pub context: Tensor,
    /// The noisy canvas, f32, one row per token.
    pub latents: Tensor,
    /// The reference images.
    pub references: ReferenceTokens<'a>,
    /// The modulation of the timestep.
    pub modulation: Modulation,
    /// The predicted velocity of the canvas, f32.
    pub velocity: Tensor,
}

/// How reference images enter the attention.
#[derive(Clone, Copy)]
pub enum ReferenceTokens<'a> {
    /// Their tokens are part of the sequence, one tensor per image.
    InSequence(&'a [Tensor]),
    /// Their keys and values in every block are cached, by [`Transformer::fill_reference_cache`].
    Cached(&'a [KvSegment]),
}

/// The input of one stream of a double block: its weights, its residual stream and its modulations.
struct StreamInput<'a> {
    weights: &'a Stream,
    x: Tensor,
    attention: ModulationOut,
    mlp: ModulationOut,
}

impl Stream {
    fn load(loader: &mut Loader<'_>, stream: names::Stream, block: usize, c: &TransformerConfig) -> Result<Self> {
        let (h, mlp) = (c.hidden, c.mlp());
        let id = |role: fn(names::Stream) -> LayerRole| role(stream).of_block(block);
        let (q, k) = (id(LayerRole::QueryNorm), id(LayerRole::KeyNorm));
        Ok(Self {
            qkv: loader.linear(id(LayerRole::Qkv), &[h; 3], h)?,
            qk_norm: loader.qk_norm(q, k, HEAD_DIM, c.eps)?,
            qk_gain: loader.qk_gain(q, k, HEAD_DIM)?,
            attention_out: loader.linear(id(LayerRole::AttentionOut), &[h], h)?,
            mlp_in: loader.linear(id(LayerRole::MlpIn), &[2 * mlp], h)?,
            mlp_out: loader.linear(id(LayerRole::MlpOut), &[h], mlp)?,
        })
    }
}

impl SingleBlock {
    fn load(loader: &mut Loader<'_>, block: usize, c: &TransformerConfig) -> Result<Self> {
        let (h, mlp) = (c.hidden, c.mlp());
        let (q, k) = (LayerRole::SingleQueryNorm.of_block(block), LayerRole::SingleKeyNorm.of_block(block));
        let linear1 = loader.linear(LayerRole::Linear1.of_block(block), &[3 * h + 2 * mlp], h)?;
        let gain = loader.qk_gain(q, k, HEAD_DIM)?;
        Ok(Self {
            linear1,
            attention: loader.attention(&[&linear1], &gain)?,
            linear2: loader.linear(LayerRole::Linear2.of_block(block), &[h], h + mlp)?,
            qk_norm: loader.qk_norm(q, k, HEAD_DIM, c.eps)?,
        })
    }
}

impl Transformer {
    /// Loads the weights.
    pub fn load(loader: &mut Loader<'_>, config: &TransformerConfig) -> Result<Self> {
        let (c, h, precision) = (config, config.hidden, loader.precision());
        let mut linear = |role: LayerRole, out: usize, input: usize| loader.linear(role.only(), &[out], input);
        Ok(Self {
            config: c.clone(),
            precision,
            image_in: linear(LayerRole::ImageIn, h, c.channels)?,
            time_in: linear(LayerRole::TimeIn, h, TIMESTEP_CHANNELS)?,
            time_out: linear(LayerRole::TimeOut, h, h)?,
            image_modulation: linear(LayerRole::ImageModulation, 6 * h, h)?,
            text_modulation: linear(LayerRole::TextModulation, 6 * h, h)?,
            single_modulation: linear(LayerRole::SingleModulation, 3 * h, h)?,
            final_modulation: linear(LayerRole::FinalModulation, 2 * h, h)?,
            image_out: linear(LayerRole::ImageOut, c.channels, h)?,
            guidance: match c.guidance_embed {
                true => Some((linear(LayerRole::GuidanceIn, h, TIMESTEP_CHANNELS)?, linear(LayerRole::GuidanceOut, h, h)?)),
                false => None,
            },
            double_blocks: (0..c.double_blocks)
                .map(|i| {
                    let image = Stream::load(loader, names::Stream::Image, i, c)?;
                    let text = Stream::load(loader, names::Stream::Text, i, c)?;
                    let attention = loader.attention(&[&image.qkv, &text.qkv], &image.qk_gain.or(&text.qk_gain))?;
                    Ok(DoubleBlock { image, text, attention })
                })
                .collect::<Result<_>>()?,
            single_blocks: (0..c.single_blocks).map(|i| SingleBlock::load(loader, i, c)).collect::<Result<_>>()?,
        })
    }

    /// The linear layers of the transformer.
    pub fn layers_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let streams = self.double_blocks.iter_mut().flat_map(|block| [&mut block.image, &mut block.text]);
        let double =
            streams.flat_map(|stream| [&mut stream.qkv, &mut stream.attention_out, &mut stream.mlp_in, &mut stream.mlp_out]);
        let single = self.single_blocks.iter_mut().flat_map(|SingleBlock { linear1, linear2, .. }| [linear1, linear2]);
        let guidance = self.guidance.iter_mut().flat_map(|(into, out)| [into, out]);
        let embedders = [&mut self.image_in, &mut self.time_in, &mut self.time_out].into_iter().chain(guidance);
        let modulations = [&mut self.image_modulation, &mut self.text_modulation, &mut self.single_modulation];
        let last = [&mut self.final_modulation, &mut self.image_out];
        embedders.chain(modulations).chain(last).chain(double).chain(single)
    }

    /// The attention of every block, in the order in which they run.
    fn attentions(&self) -> impl Iterator<Item = &BlockAttention> {
        let double = self.double_blocks.iter().map(|block| &block.attention);
        double.chain(self.single_blocks.iter().map(|block| &block.attention))
    }

    /// The formats of queries and keys in every block.
    pub fn attention_formats(&self) -> impl Iterator<Item = &BlockFormat> {
        self.attentions().map(BlockAttention::format)
    }

    /// Computes the modulations of `rows` timesteps, one row each, from their [embeddings](crate::sampler::timestep_embeddings).
    /// `guidance` matters only for models that take the guidance scale as an input.
    pub fn modulations(&self, be: &mut dyn Backend, ws: &mut Arena, rows: usize, times: &[f32], guidance: f32) -> Result<Tensor> {
        let (h, act) = (self.config.hidden, self.precision.activations());
        let table = ws.alloc(rows, 17 * h, act)?;
        scope(be, ws, |be, ws| {
            let embedding = ws.alloc(rows, TIMESTEP_CHANNELS, act)?;
            let (a, b) = (ws.alloc(rows, h, act)?, ws.alloc(rows, h, act)?);
            let vector = ws.alloc(rows, h, act)?;
            let embed = |be: &mut dyn Backend, values: &[f32], w: &Linear| {
                be.write(embedding, values)?;
                be.run(Op::Linear(&[Gemm { out: a, x: embedding, w }]))?;
                be.run(Op::Silu { out: b, x: a })
            };
            embed(be, times, &self.time_in)?;
            be.run(Op::Linear(&[Gemm { out: vector, x: b, w: &self.time_out }]))?;
            if let Some((guidance_in, guidance_out)) = &self.guidance {
                embed(be, &timestep_embedding(guidance).repeat(rows), guidance_in)?;
                be.run(Op::LinearGateResidual(&[GatedGemm { into: vector, x: b, w: guidance_out, gate: None }]))?;
            }
            // All modulation layers read the same silu of the conditioning vector.
            be.run(Op::Silu { out: b, x: vector })?;
            let part = |chunks: Range<usize>, w| Gemm { out: table.cols(chunks.start * h..chunks.end * h), x: b, w };
            be.run(Op::Linear(&[
                part(0..6, &self.image_modulation),
                part(6..12, &self.text_modulation),
                part(12..15, &self.single_modulation),
                part(15..17, &self.final_modulation),
            ]))
        })?;
        Ok(table)
    }

    /// Allocates the modulation of the current step. Every step reads it from the same address, so a captured step can be
    /// replayed.
    pub fn modulation_slot(&self, ws: &mut Arena) -> Result<Modulation> {
        let hidden = self.config.hidden;
        Ok(Modulation { row: ws.alloc(1, 17 * hidden, self.precision.activations())?, hidden })
    }

    /// Copies row `step` of `table` into the slot.
    pub fn select(&self, be: &mut dyn Backend, slot: Modulation, table: Tensor, step: usize) -> Result<()> {
        be.run(Op::Copy { out: slot.row, x: table.rows(step..step + 1) })
    }

    /// Predicts the velocity of the canvas.
    pub fn step(&self, be: &mut dyn Backend, ws: &mut Arena, key: StepKey, input: StepInput<'_>) -> Result<()> {
        let mark = ws.mark();
        let result = be.step(key, &mut |be| {
            ws.reset(mark);
            self.predict(be, ws, input)
        });
        be.released(ws.reset(mark));
        result
    }

    fn predict(&self, be: &mut dyn Backend, ws: &mut Arena, input: StepInput<'_>) -> Result<()> {
        let (c, act, plan) = (&self.config, self.precision.activations(), input.plan);
        let (tokens, cache) = match input.references {
            ReferenceTokens::InSequence(tokens) => (tokens, None),
            ReferenceTokens::Cached(cache) => (&[][..], Some(cache)),
        };
        let kv_cache = |block: usize| KvCache { read: cache.map(|c| c[block]), write: None };
        let rows = if cache.is_some() { plan.canvas().end } else { plan.tokens() };
        let rope = Rope { table: input.rope.rows(0..rows), style: RopeStyle::Interleaved };
        let x = ws.alloc(rows, c.hidden, act)?;
        let (text, image) = (x.rows(plan.text()), x.rows(plan.canvas().start..rows));

        be.run(Op::Copy { out: text, x: input.context })?;
        self.embed_image(be, ws, image, &[&[input.latents], tokens].concat())?;
        let m = input.modulation;
        for (i, block) in self.double_blocks.iter().enumerate() {
            let streams = [
                StreamInput { weights: &block.text, x: text, attention: m.text(0), mlp: m.text(1) },
                StreamInput { weights: &block.image, x: image, attention: m.image(0), mlp: m.image(1) },
            ];
            scope(be, ws, |be, ws| self.double_block(be, ws, &streams, &block.attention, rope, kv_cache(i)))?;
        }
        for (i, block) in self.single_blocks.iter().enumerate() {
            // Only the canvas rows of the last block are read: the other tokens contribute their keys and values only.
            let wanted = if i + 1 == self.single_blocks.len() { plan.canvas() } else { 0..rows };
            let kv_cache = kv_cache(self.double_blocks.len() + i);
            scope(be, ws, |be, ws| self.single_block(be, ws, block, x, wanted, rope, m.single(), kv_cache))?;
        }
        scope(be, ws, |be, ws| {
            let canvas = x.rows(plan.canvas());
            let normed = ws.alloc(canvas.rows, c.hidden, act)?;
            let (shift, scale) = m.last();
            be.run(Op::LayerNormModulate { streams: &[Modulated { out: normed, x: canvas, shift, scale }], eps: c.eps })?;
            be.run(Op::Linear(&[Gemm { out: input.velocity, x: normed, w: &self.image_out }]))
        })
    }

    /// Allocates memory for the keys and values of `tokens` reference tokens in every block.
    pub fn reference_cache(&self, ws: &mut Arena, tokens: usize) -> Result<Vec<KvSegment>> {
        self.attentions().map(|attention| attention.key_values(ws, tokens, self.config.hidden)).collect()
    }

    /// Computes the reference keys and values, for models trained with a KV cache of references. The references attend only to
    /// each other and are modulated as at timestep zero. So their keys and values do not depend on the prompt, the canvas or the
    /// step. `rope` has only the references' rows.
    pub fn fill_reference_cache(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        cache: &[KvSegment],
        tokens: &[Tensor],
        rope: Tensor,
        modulation: Modulation,
    ) -> Result<()> {
        let (h, act, rows) = (self.config.hidden, self.precision.activations(), rope.rows);
        let kv_cache = |block: usize| KvCache { read: None, write: Some(cache[block]) };
        let rope = Rope { table: rope, style: RopeStyle::Interleaved };
        scope(be, ws, |be, ws| {
            let x = ws.alloc(rows, h, act)?;
            self.embed_image(be, ws, x, tokens)?;
            for (i, block) in self.double_blocks.iter().enumerate() {
                let (attention, mlp) = (modulation.image(0), modulation.image(1));
                let stream = StreamInput { weights: &block.image, x, attention, mlp };
                scope(be, ws, |be, ws| self.double_block(be, ws, &[stream], &block.attention, rope, kv_cache(i)))?;
            }
            for (i, block) in self.single_blocks.iter().enumerate() {
                let wanted = if i + 1 == self.single_blocks.len() { 0..0 } else { 0..rows };
                let kv_cache = kv_cache(self.double_blocks.len() + i);
                scope(be, ws, |be, ws| self.single_block(be, ws, block, x, wanted, rope, modulation.single(), kv_cache))?;
            }
            Ok(())
        })
    }

    /// Projects image tokens, given as consecutive pieces, to the transformer's width.
    fn embed_image(&self, be: &mut dyn Backend, ws: &mut Arena, out: Tensor, pieces: &[Tensor]) -> Result<()> {
        scope(be, ws, |be, ws| {
            let packed = ws.alloc(out.rows, self.config.channels, self.precision.activations())?;
            let mut first = 0;
            for &x in pieces {
                be.run(Op::Copy { out: packed.rows(first..first + x.rows), x })?;
                first += x.rows;
            }
            be.run(Op::Linear(&[Gemm { out, x: packed, w: &self.image_in }]))
        })
    }

    /// Attention over all streams together, then an MLP, each stream with its own weights. Streams are consecutive in the
    /// sequence.
    fn double_block(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        streams: &[StreamInput<'_>],
        attention: &BlockAttention,
        rope: Rope,
        cache: KvCache,
    ) -> Result<()> {
        let c = &self.config;
        let (h, rows) = (c.hidden, rope.table.rows);
        let mut first = 0;
        let spans: Vec<Range<usize>> = streams
            .iter()
            .map(|s| {
                first += s.x.rows;
                first - s.x.rows..first
            })
            .collect();
        let part = |whole: Tensor, i: usize| whole.rows(spans[i].clone());
        // Allocates the inputs of one layer in every stream.
        let inputs = |ws: &mut Arena, cols: usize, layer: fn(&Stream) -> &Linear| {
            let layers: Vec<_> = streams.iter().map(|s| (s.x.rows, layer(s.weights))).collect();
            alloc_for(ws, cols, &layers)
        };
        let norm = |be: &mut dyn Backend, out: &[Tensor], m: fn(&StreamInput<'_>) -> ModulationOut| {
            let norms: Vec<_> = streams.iter().zip(out).map(|(s, &out)| m(s).norm(out, s.x)).collect();
            be.run(Op::LayerNormModulate { streams: &norms, eps: c.eps })
        };
        let residual = |be: &mut dyn Backend, x: &[Tensor], w: fn(&Stream) -> &Linear, gate: fn(&StreamInput<'_>) -> Tensor| {
            let gemms = streams.iter().zip(x);
            let gemms: Vec<_> = gemms.map(|(s, &x)| GatedGemm { into: s.x, x, w: w(s.weights), gate: Some(gate(s)) }).collect();
            be.run(Op::LinearGateResidual(&gemms))
        };

        let attended = inputs(ws, h, |w| &w.attention_out)?;
        scope(be, ws, |be, ws| {
            let normed = inputs(ws, h, |w| &w.qkv)?;
            norm(be, &normed, |s| s.attention)?;
            let q = attention.queries(ws, rows, h)?;
            let own = attention.own_key_values(ws, rows, h, cache)?;
            let projections: Vec<_> = streams
                .iter()
                .enumerate()
                .map(|(i, s)| Projection {
                    x: normed[i],
                    w: &s.weights.qkv,
                    norm: Some(s.weights.qk_norm),
                    q_scale: attention.q_scale,
                    k_scale: attention.k_scale,
                    rope: Rope { table: part(rope.table, i), ..rope },
                    q: Some(part(q, i)),
                    k: part(own.k, i),
                    v: part(own.v, i),
                    mlp: None,
                })
                .collect();
            be.run(Op::Qkv(&projections))?;
            attention.run(be, &attended, q, own, cache)
        })?;
        residual(be, &attended, |w| &w.attention_out, |s| s.attention.gate)?;

        let normed = inputs(ws, h, |w| &w.mlp_in)?;
        norm(be, &normed, |s| s.mlp)?;
        let inner = inputs(ws, c.mlp(), |w| &w.mlp_out)?;
        let gemms: Vec<_> =
            streams.iter().enumerate().map(|(i, s)| Gemm { out: inner[i], x: normed[i], w: &s.weights.mlp_in }).collect();
        be.run(Op::LinearSwiglu(&gemms))?;
        residual(be, &inner, |w| &w.mlp_out, |s| s.mlp.gate)
    }

    /// Attention and MLP in parallel, over the joint sequence. Only the `wanted` rows of the residual stream are updated.
    #[allow(clippy::too_many_arguments)]
    fn single_block(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        block: &SingleBlock,
        x: Tensor,
        wanted: Range<usize>,
        rope: Rope,
        m: ModulationOut,
        cache: KvCache,
    ) -> Result<()> {
        let (c, attention) = (&self.config, &block.attention);
        let (h, rows) = (c.hidden, x.rows);
        let into = x.rows(wanted.clone());
        // Attention and MLP write adjacent columns of one buffer, which is the input of the last GEMM.
        let joined = ws.alloc_stored(into.rows, h + c.mlp(), block.linear2.input)?;
        scope(be, ws, |be, ws| {
            let q = attention.queries(ws, into.rows, h)?;
            let own = attention.own_key_values(ws, rows, h, cache)?;
            scope(be, ws, |be, ws| {
                let ranges = [0..wanted.start, wanted.clone(), wanted.end..rows];
                let ranges: Vec<_> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
                let normed = alloc_for(ws, h, &ranges.iter().map(|range| (range.len(), &block.linear1)).collect::<Vec<_>>())?;
                let norms: Vec<_> = ranges.iter().zip(&normed).map(|(range, &out)| m.norm(out, x.rows(range.clone()))).collect();
                be.run(Op::LayerNormModulate { streams: &norms, eps: c.eps })?;
                let kv_only = block.linear1.rows(h..3 * h);
                let projection = |(range, &x): (&Range<usize>, &Tensor)| {
                    let whole = *range == wanted;
                    Projection {
                        x,
                        w: if whole { &block.linear1 } else { &kv_only },
                        norm: Some(block.qk_norm),
                        q_scale: attention.q_scale,
                        k_scale: attention.k_scale,
                        rope: Rope { table: rope.table.rows(range.clone()), ..rope },
                        q: whole.then_some(q),
                        k: own.k.rows(range.clone()),
                        v: own.v.rows(range.clone()),
                        mlp: whole.then(|| joined.cols(h..h + c.mlp())),
                    }
                };
                be.run(Op::Qkv(&ranges.iter().zip(&normed).map(projection).collect::<Vec<_>>()))
            })?;
            match into.rows {
                0 => Ok(()),
                _ => attention.run(be, &[joined.cols(0..h)], q, own, cache),
            }
        })?;
        match into.rows {
            0 => Ok(()),
            _ => be.run(Op::LinearGateResidual(&[GatedGemm { into, x: joined, w: &block.linear2, gate: Some(m.gate) }])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::component::Component;
    use crate::names::Layout;
    use crate::sequence::{Grid, RopeSpec};
    use crate::tensor::{DType, Region};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    /// A fixed pattern of values of order one.
    fn pattern(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + 13) % 257) as f32 / 128.0 - 1.0).collect()
    }

    #[test]
    fn rows_that_the_last_block_skips_do_not_change_the_canvas() {
        let config = crate::config::Configs::TINY.transformer;
        let weights = crate::tiny::model(Layout::Diffusers, DType::Bf16).unwrap().weights(Component::Transformer).unwrap();
        let mut be = Cpu::new(0, Arc::new(AtomicBool::new(false))).unwrap();
        let (mut region, mut ws) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        let mut ignore = |_| ();
        let mut loader = Loader::new(&mut be, &mut region, Some(&weights), Precision::F32, &mut ignore);
        let transformer = Transformer::load(&mut loader, &config).unwrap();
        be.reserve(Region::Arena, 64 << 20).unwrap();

        let grid = Grid { width: 4, height: 5 };
        let plan = SequenceLayout::new(33, grid, &[Grid { width: 3, height: 4 }]).unwrap();
        let mut place = |ws: &mut Arena, rows: usize, cols: usize, values: Vec<f32>| {
            let tensor = ws.alloc(rows, cols, DType::F32).unwrap();
            be.write(tensor, &values).unwrap();
            tensor
        };
        let rows = plan.tokens();
        let table = place(&mut ws, rows, HEAD_DIM, plan.rope_table(&RopeSpec::KLEIN));
        let hidden = pattern(rows * config.hidden);
        let (whole, part) =
            (place(&mut ws, rows, config.hidden, hidden.clone()), place(&mut ws, rows, config.hidden, hidden.clone()));
        let row = place(&mut ws, 1, 17 * config.hidden, pattern(17 * config.hidden));
        let m = Modulation { row, hidden: config.hidden }.single();
        let rope = Rope { table, style: RopeStyle::Interleaved };
        let kv_cache = KvCache { read: None, write: None };
        let block = &transformer.single_blocks[1];
        scope(&mut be, &mut ws, |be, ws| transformer.single_block(be, ws, block, whole, 0..rows, rope, m, kv_cache)).unwrap();
        scope(&mut be, &mut ws, |be, ws| transformer.single_block(be, ws, block, part, plan.canvas(), rope, m, kv_cache))
            .unwrap();

        let mut read = |tensor: Tensor| {
            let mut values = vec![0.0; tensor.len()];
            be.read(tensor, &mut values).unwrap();
            values
        };
        assert_eq!(read(whole.rows(plan.canvas())), read(part.rows(plan.canvas())), "the canvas is the same to the bit");
        assert_eq!(read(part.rows(plan.text())), hidden[..33 * config.hidden], "the rest is left as it was");
        assert_ne!(read(whole.rows(plan.text())), hidden[..33 * config.hidden]);
    }
}
