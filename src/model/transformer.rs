//! The FLUX.2 transformer: double blocks with separate weights for text and image, then single blocks over the joint sequence.
//!
//! The residual stream of the whole sequence is one matrix, text rows first, so nothing is ever concatenated. What depends only
//! on the time ([`Transformer::modulations`]) or only on the prompt ([`Transformer::context`]) is computed once per image.

use super::Loader;
use crate::backend::{
    Backend, GatedProduct, HostData, KeyValues, Linear, Modulated, Op, Product, Projection, QkNorm, Rope, RopeStyle, StepKey,
    scope,
};
use crate::config::{HEAD_DIM, TransformerConfig};
use crate::error::Result;
use crate::sampler::{SINUSOID, sinusoid};
use crate::sequence::SequencePlan;
use crate::tensor::{Arena, Precision, Tensor};

/// The transformer.
pub struct Transformer {
    config: TransformerConfig,
    precision: Precision,
    image_in: Linear,
    text_in: Linear,
    time_in: Linear,
    time_out: Linear,
    image_modulation: Linear,
    text_modulation: Linear,
    single_modulation: Linear,
    double_blocks: Vec<DoubleBlock>,
    single_blocks: Vec<SingleBlock>,
    final_modulation: Linear,
    image_out: Linear,
}

/// One stream's half of a double block.
struct Stream {
    qkv: Linear,
    qk_norm: QkNorm,
    attention_out: Linear,
    mlp_in: Linear,
    mlp_out: Linear,
}

struct DoubleBlock {
    text: Stream,
    image: Stream,
}

struct SingleBlock {
    linear1: Linear,
    qk_norm: QkNorm,
    linear2: Linear,
}

/// What the time does to every block: shifts, scales and gates, side by side in one row.
#[derive(Clone, Copy)]
pub struct Modulation {
    row: Tensor,
    hidden: usize,
}

/// Shift, scale and gate of one norm.
#[derive(Clone, Copy)]
struct Triple {
    shift: Tensor,
    scale: Tensor,
    gate: Tensor,
}

impl Modulation {
    fn chunk(self, index: usize) -> Tensor {
        self.row.cols(index * self.hidden..(index + 1) * self.hidden)
    }

    fn triple(self, first: usize) -> Triple {
        Triple { shift: self.chunk(first), scale: self.chunk(first + 1), gate: self.chunk(first + 2) }
    }

    fn image(self, set: usize) -> Triple {
        self.triple(3 * set)
    }

    fn text(self, set: usize) -> Triple {
        self.triple(6 + 3 * set)
    }

    fn single(self) -> Triple {
        self.triple(12)
    }

    fn last(self) -> (Tensor, Tensor) {
        (self.chunk(15), self.chunk(16))
    }
}

impl Triple {
    fn norm(self, out: Tensor, x: Tensor) -> Modulated {
        Modulated { out, x, shift: self.shift, scale: self.scale }
    }
}

/// Operands of one prediction.
#[derive(Clone, Copy)]
pub struct StepInput<'a> {
    /// Where everything stands in the sequence.
    pub plan: &'a SequencePlan,
    /// Rotations, one row per token of the plan.
    pub rope: Tensor,
    /// The prompt's context, from [`Transformer::context`].
    pub context: Tensor,
    /// The noisy canvas, f32, one row per token.
    pub latents: Tensor,
    /// Tokens of the reference images.
    pub references: &'a [Tensor],
    /// The time's modulation.
    pub modulation: Modulation,
    /// The predicted velocity of the canvas, f32.
    pub velocity: Tensor,
}

impl Stream {
    fn load(loader: &mut Loader<'_>, prefix: &str, c: &TransformerConfig) -> Result<Self> {
        let (h, mlp) = (c.hidden, c.mlp());
        let norm = |which: &str| format!("{prefix}_attn.norm.{which}_norm.scale");
        Ok(Self {
            qkv: loader.linear(&format!("{prefix}_attn.qkv.weight"), 3 * h, h)?,
            qk_norm: loader.qk_norm(&norm("query"), &norm("key"), HEAD_DIM, c.eps)?,
            attention_out: loader.linear(&format!("{prefix}_attn.proj.weight"), h, h)?,
            mlp_in: loader.gate_up(&format!("{prefix}_mlp.0.weight"), 2 * mlp, h, 2 * mlp)?,
            mlp_out: loader.linear(&format!("{prefix}_mlp.2.weight"), h, mlp)?,
        })
    }
}

impl SingleBlock {
    fn load(loader: &mut Loader<'_>, prefix: &str, c: &TransformerConfig) -> Result<Self> {
        let (h, mlp) = (c.hidden, c.mlp());
        let norm = |which: &str| format!("{prefix}.norm.{which}_norm.scale");
        Ok(Self {
            linear1: loader.gate_up(&format!("{prefix}.linear1.weight"), 3 * h + 2 * mlp, h, 2 * mlp)?,
            qk_norm: loader.qk_norm(&norm("query"), &norm("key"), HEAD_DIM, c.eps)?,
            linear2: loader.linear(&format!("{prefix}.linear2.weight"), h, h + mlp)?,
        })
    }
}

impl Transformer {
    /// Places the weights.
    pub fn load(loader: &mut Loader<'_>, config: &TransformerConfig) -> Result<Self> {
        let (c, h) = (config, config.hidden);
        Ok(Self {
            config: c.clone(),
            precision: loader.precision,
            image_in: loader.linear("img_in.weight", h, c.channels)?,
            text_in: loader.linear("txt_in.weight", h, c.context)?,
            time_in: loader.linear("time_in.in_layer.weight", h, SINUSOID)?,
            time_out: loader.linear("time_in.out_layer.weight", h, h)?,
            image_modulation: loader.linear("double_stream_modulation_img.lin.weight", 6 * h, h)?,
            text_modulation: loader.linear("double_stream_modulation_txt.lin.weight", 6 * h, h)?,
            single_modulation: loader.linear("single_stream_modulation.lin.weight", 3 * h, h)?,
            double_blocks: (0..c.double_blocks)
                .map(|i| {
                    let image = Stream::load(loader, &format!("double_blocks.{i}.img"), c)?;
                    Ok(DoubleBlock { image, text: Stream::load(loader, &format!("double_blocks.{i}.txt"), c)? })
                })
                .collect::<Result<_>>()?,
            single_blocks: (0..c.single_blocks)
                .map(|i| SingleBlock::load(loader, &format!("single_blocks.{i}"), c))
                .collect::<Result<_>>()?,
            final_modulation: loader.linear("final_layer.adaLN_modulation.1.weight", 2 * h, h)?,
            image_out: loader.linear("final_layer.linear.weight", c.channels, h)?,
        })
    }

    /// Modulations of all `times` (1 is pure noise), one row each.
    pub fn modulations(&self, be: &mut dyn Backend, ws: &mut Arena, times: &[f32]) -> Result<Tensor> {
        let (h, rows, act) = (self.config.hidden, times.len(), self.precision.activations());
        let table = ws.alloc(rows, 17 * h, act)?;
        scope(be, ws, |be, ws| {
            let wave = ws.alloc(rows, SINUSOID, act)?;
            let (a, b) = (ws.alloc(rows, h, act)?, ws.alloc(rows, h, act)?);
            let waves: Vec<f32> = times.iter().flat_map(|&t| sinusoid(t)).collect();
            be.write(wave, HostData::F32(&waves))?;
            be.run(Op::Linear(&[Product { out: a, x: wave, w: &self.time_in }]))?;
            be.run(Op::Silu { out: b, x: a })?;
            be.run(Op::Linear(&[Product { out: a, x: b, w: &self.time_out }]))?;
            // Every use of the time vector takes its silu.
            be.run(Op::Silu { out: b, x: a })?;
            let part = |chunks: std::ops::Range<usize>, w| Product { out: table.cols(chunks.start * h..chunks.end * h), x: b, w };
            be.run(Op::Linear(&[
                part(0..6, &self.image_modulation),
                part(6..12, &self.text_modulation),
                part(12..15, &self.single_modulation),
                part(15..17, &self.final_modulation),
            ]))
        })?;
        Ok(table)
    }

    /// A place for the modulation of the current step, which stays the same from step to step.
    pub fn modulation_slot(&self, ws: &mut Arena) -> Result<Modulation> {
        let hidden = self.config.hidden;
        Ok(Modulation { row: ws.alloc(1, 17 * hidden, self.precision.activations())?, hidden })
    }

    /// Brings row `step` of `table` into the slot.
    pub fn select(&self, be: &mut dyn Backend, slot: Modulation, table: Tensor, step: usize) -> Result<()> {
        be.run(Op::Copy { out: slot.row, x: table.rows(step..step + 1) })
    }

    /// A place for a prompt's context of `rows` tokens.
    pub fn context_slot(&self, ws: &mut Arena, rows: usize) -> Result<Tensor> {
        ws.alloc(rows, self.config.hidden, self.precision.activations())
    }

    /// Brings a prompt's features to the transformer's width.
    pub fn context(&self, be: &mut dyn Backend, context: Tensor, features: Tensor) -> Result<()> {
        be.run(Op::Linear(&[Product { out: context, x: features, w: &self.text_in }]))
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
        let (c, act) = (&self.config, self.precision.activations());
        let (plan, tokens) = (input.plan, input.plan.tokens());
        let rope = Rope { table: input.rope, style: RopeStyle::Interleaved };
        let x = ws.alloc(tokens, c.hidden, act)?;
        let text = x.rows(plan.text());
        let image = x.rows(plan.canvas().start..tokens);

        be.run(Op::Copy { out: text, x: input.context })?;
        scope(be, ws, |be, ws| {
            let packed = ws.alloc(image.rows, c.channels, act)?;
            let start = plan.canvas().start;
            let place = |be: &mut dyn Backend, span: std::ops::Range<usize>, x: Tensor| {
                be.run(Op::Copy { out: packed.rows(span.start - start..span.end - start), x })
            };
            place(be, plan.canvas(), input.latents)?;
            for (j, &reference) in input.references.iter().enumerate() {
                place(be, plan.reference(j), reference)?;
            }
            be.run(Op::Linear(&[Product { out: image, x: packed, w: &self.image_in }]))
        })?;
        for block in &self.double_blocks {
            scope(be, ws, |be, ws| self.double_block(be, ws, block, [text, image], rope, input.modulation))?;
        }
        for block in &self.single_blocks {
            scope(be, ws, |be, ws| self.single_block(be, ws, block, x, rope, input.modulation.single()))?;
        }
        scope(be, ws, |be, ws| {
            let canvas = x.rows(plan.canvas());
            let normed = ws.alloc(canvas.rows, c.hidden, act)?;
            let (shift, scale) = input.modulation.last();
            be.run(Op::LayerNormModulate { streams: &[Modulated { out: normed, x: canvas, shift, scale }], eps: c.eps })?;
            be.run(Op::Linear(&[Product { out: input.velocity, x: normed, w: &self.image_out }]))
        })
    }

    fn double_block(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        block: &DoubleBlock,
        [text, image]: [Tensor; 2],
        rope: Rope,
        modulation: Modulation,
    ) -> Result<()> {
        let (c, act) = (&self.config, self.precision.activations());
        let (h, n, tokens) = (c.hidden, text.rows, text.rows + image.rows);
        let split = |t: Tensor| [t.rows(0..n), t.rows(n..tokens)];
        let normed = split(ws.alloc(tokens, h, act)?);
        let attended = ws.alloc(tokens, h, act)?;

        let (mt, mi) = (modulation.text(0), modulation.image(0));
        be.run(Op::LayerNormModulate { streams: &[mt.norm(normed[0], text), mi.norm(normed[1], image)], eps: c.eps })?;
        scope(be, ws, |be, ws| {
            let (q, k, v) = (ws.alloc(tokens, h, act)?, ws.alloc(tokens, h, act)?, ws.alloc(tokens, h, act)?);
            let streams = [&block.text, &block.image];
            let projection = |i: usize| Projection {
                x: normed[i],
                w: &streams[i].qkv,
                norm: streams[i].qk_norm,
                rope: Rope { table: split(rope.table)[i], ..rope },
                q: split(q)[i],
                k: split(k)[i],
                v: split(v)[i],
                mlp: None,
            };
            be.run(Op::Qkv(&[projection(0), projection(1)]))?;
            be.run(Op::Attention { out: attended, q, kv: &[KeyValues { k, v }], head_dim: HEAD_DIM, causal: false })
        })?;
        let attended = split(attended);
        be.run(Op::LinearGateResidual(&[
            GatedProduct { into: text, x: attended[0], w: &block.text.attention_out, gate: Some(mt.gate) },
            GatedProduct { into: image, x: attended[1], w: &block.image.attention_out, gate: Some(mi.gate) },
        ]))?;

        let (mt, mi) = (modulation.text(1), modulation.image(1));
        be.run(Op::LayerNormModulate { streams: &[mt.norm(normed[0], text), mi.norm(normed[1], image)], eps: c.eps })?;
        let inner = split(ws.alloc(tokens, c.mlp(), act)?);
        be.run(Op::LinearSwiglu(&[
            Product { out: inner[0], x: normed[0], w: &block.text.mlp_in },
            Product { out: inner[1], x: normed[1], w: &block.image.mlp_in },
        ]))?;
        be.run(Op::LinearGateResidual(&[
            GatedProduct { into: text, x: inner[0], w: &block.text.mlp_out, gate: Some(mt.gate) },
            GatedProduct { into: image, x: inner[1], w: &block.image.mlp_out, gate: Some(mi.gate) },
        ]))
    }

    fn single_block(
        &self,
        be: &mut dyn Backend,
        ws: &mut Arena,
        block: &SingleBlock,
        x: Tensor,
        rope: Rope,
        m: Triple,
    ) -> Result<()> {
        let (c, act) = (&self.config, self.precision.activations());
        let (h, tokens) = (c.hidden, x.rows);
        // Attention and MLP write side by side, which is how the last product reads them.
        let joined = ws.alloc(tokens, h + c.mlp(), act)?;
        scope(be, ws, |be, ws| {
            let (q, k, v) = (ws.alloc(tokens, h, act)?, ws.alloc(tokens, h, act)?, ws.alloc(tokens, h, act)?);
            scope(be, ws, |be, ws| {
                let normed = ws.alloc(tokens, h, act)?;
                be.run(Op::LayerNormModulate { streams: &[m.norm(normed, x)], eps: c.eps })?;
                let mlp = Some(joined.cols(h..h + c.mlp()));
                be.run(Op::Qkv(&[Projection { x: normed, w: &block.linear1, norm: block.qk_norm, rope, q, k, v, mlp }]))
            })?;
            let out = joined.cols(0..h);
            be.run(Op::Attention { out, q, kv: &[KeyValues { k, v }], head_dim: HEAD_DIM, causal: false })
        })?;
        be.run(Op::LinearGateResidual(&[GatedProduct { into: x, x: joined, w: &block.linear2, gate: Some(m.gate) }]))
    }
}
