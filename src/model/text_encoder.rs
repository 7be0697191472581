//! Qwen3 as klein uses it, and Mistral Small 3 as \[dev\] does: only the first layers run, the hidden states of three of them are the prompt
//! embeddings, and there is no final norm.
//!
//! The transformer reads padding as well. Padding after a prompt attends to every real token and to no padding, so each padding
//! token has its own embedding. Padding before a prompt has nothing to attend to in a causal mask: its attention is zero, its
//! embedding depends on neither the prompt nor the position, and one row is computed for all of it.

use super::Loader;
use super::table::TokenTable;
use crate::backend::{
    Backend, GatedGemm, Gemm, KvSegment, Linear, Op, Projection, QkNorm, Rope, RopeStyle, Softmax, repeat_rows, scope,
};
use crate::config::{HEAD_DIM, TextConfig};
use crate::error::{Error, Result};
use crate::names::LayerRole;
use crate::sequence::rope_table_1d;
use crate::tensor::{Arena, DType, Precision, Tensor};
use crate::tokenizer::{Padding, Tokens};
use std::borrow::Cow;
use std::sync::OnceLock;

/// The text encoder.
pub struct TextEncoder {
    config: TextConfig,
    precision: Precision,
    embedding: TokenTable,
    layers: Vec<Layer>,
    /// The RoPE table of the longest prompt, filled with the first prompt.
    rope: OnceLock<Vec<f32>>,
}

struct Layer {
    input_norm: Tensor,
    qkv: Linear,
    qk_norm: Option<QkNorm>,
    out: Linear,
    mlp_norm: Tensor,
    gate_up: Linear,
    down: Linear,
}

impl TextEncoder {
    /// Loads the weights of the layers that run.
    pub fn load(loader: &mut Loader<'_>, config: &TextConfig) -> Result<Self> {
        let c = config;
        let (q, kv, mlp) = (c.heads * HEAD_DIM, c.kv_heads * HEAD_DIM, c.intermediate);
        let embedding = loader.table(LayerRole::TokenTable.only(), c.vocab, c.hidden)?;
        let layers = (0..c.used_layers())
            .map(|i| {
                let id = |role: LayerRole| role.of_block(i);
                let qk_norm = |loader: &mut Loader<'_>| {
                    loader.qk_norm(id(LayerRole::EncoderQueryNorm), id(LayerRole::EncoderKeyNorm), HEAD_DIM, c.eps)
                };
                Ok(Layer {
                    input_norm: loader.norm(id(LayerRole::EncoderInputNorm), c.hidden)?,
                    qkv: loader.linear(id(LayerRole::EncoderQkv), &[q, kv, kv], c.hidden)?,
                    qk_norm: c.family.spec().has_qk_norm.then(|| qk_norm(loader)).transpose()?,
                    out: loader.linear(id(LayerRole::EncoderOut), &[c.hidden], q)?,
                    mlp_norm: loader.norm(id(LayerRole::EncoderMlpNorm), c.hidden)?,
                    gate_up: loader.linear(id(LayerRole::EncoderGateUp), &[mlp, mlp], c.hidden)?,
                    down: loader.linear(id(LayerRole::EncoderDown), &[c.hidden], mlp)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { config: config.clone(), precision: loader.precision(), embedding, layers, rope: OnceLock::new() })
    }

    /// The linear layers of the text encoder.
    pub fn layers_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.layers.iter_mut().flat_map(|Layer { qkv, out, gate_up, down, .. }| [qkv, out, gate_up, down])
    }

    /// Bytes of the token embedding table. It stays in host memory and is not part of a backend's weights.
    pub fn table_bytes(&self) -> u64 {
        self.embedding.bytes()
    }

    /// Computes the embeddings of a prompt, one row per token: the hidden states of the text layers side by side.
    pub fn forward(&self, be: &mut dyn Backend, ws: &mut Arena, features: Tensor, tokens: &Tokens) -> Result<()> {
        let c = &self.config;
        let (all, act) = (tokens.ids.len(), self.precision.activations());
        let (q_cols, kv_cols) = (c.heads * HEAD_DIM, c.kv_heads * HEAD_DIM);
        // Rows that attend to the prompt. Padding before the prompt is a single row that does not.
        let (attending, ids) = match tokens.padding {
            Padding::Right => (0..all, Cow::Borrowed(&tokens.ids[..])),
            Padding::Left => {
                let (real, one) = (tokens.rows(), tokens.rows().start.min(1));
                let ids = tokens.ids[real.clone()].iter().chain(&tokens.ids[..one]).copied().collect();
                (real, Cow::Owned(ids))
            }
            Padding::LeftZeros | Padding::RightZeros => (tokens.rows(), Cow::Borrowed(&tokens.ids[tokens.rows()])),
        };
        scope(be, ws, |be, ws| {
            let rows = ids.len();
            let table = ws.alloc(rows, HEAD_DIM, DType::F32)?;
            let values = self.rope.get_or_init(|| rope_table_1d(c.max_tokens, HEAD_DIM, c.rope_theta));
            let too_long =
                || Error::Op { op: "text encoder", what: format!("{all} tokens, the longest prompt has {}", c.max_tokens) };
            be.write(table, values.get(..rows * HEAD_DIM).ok_or_else(too_long)?)?;
            let rope = Rope { table, style: RopeStyle::HalfSplit };

            let x = ws.alloc(rows, c.hidden, act)?;
            let normed = ws.alloc(rows, c.hidden, act)?;
            let (q, k) = (ws.alloc(rows, q_cols, act)?, ws.alloc(rows, kv_cols, act)?);
            let (v, attended) = (ws.alloc(rows, kv_cols, act)?, ws.alloc(rows, q_cols, act)?);
            let inner = ws.alloc(rows, c.intermediate, act)?;
            self.embed(be, x, &ids)?;
            let own = attending.len();
            if own < rows {
                be.write(attended.rows(own..rows), &vec![0.0; q_cols])?;
            }

            for (i, layer) in self.layers.iter().enumerate() {
                be.run(Op::RmsNorm { out: normed, x, weight: layer.input_norm, eps: c.eps })?;
                be.run(Op::Qkv(&[Projection {
                    x: normed,
                    w: &layer.qkv,
                    norm: layer.qk_norm,
                    q_scale: 1.0,
                    k_scale: 1.0,
                    rope,
                    q: Some(q),
                    k,
                    v,
                    mlp: None,
                }]))?;
                // Restricting the keys to the real tokens is the padding mask: a causal row past the end attends to exactly those
                // keys.
                let kv = [KvSegment { k: k.rows(0..tokens.real), v: v.rows(0..tokens.real) }];
                let (out, q) = (attended.rows(0..own), q.rows(0..own));
                let softmax = Softmax::Natural { scale: 1.0 / (HEAD_DIM as f32).sqrt() };
                be.run(Op::Attention { out: &[out], q, kv: &kv, head_dim: HEAD_DIM, causal: true, softmax })?;
                be.run(Op::LinearGateResidual(&[GatedGemm { into: x, x: attended, w: &layer.out, gate: None }]))?;
                be.run(Op::RmsNorm { out: normed, x, weight: layer.mlp_norm, eps: c.eps })?;
                be.run(Op::LinearSwiglu(&[Gemm { out: inner, x: normed, w: &layer.gate_up }]))?;
                be.run(Op::LinearGateResidual(&[GatedGemm { into: x, x: inner, w: &layer.down, gate: None }]))?;
                if let Some(tap) = c.text_layers.iter().position(|&depth| depth == i + 1) {
                    let tap = features.cols(tap * c.hidden..(tap + 1) * c.hidden);
                    be.run(Op::Copy { out: tap.rows(attending.clone()), x: x.rows(0..own) })?;
                    if own < rows {
                        be.run(Op::Copy { out: tap.rows(0..1), x: x.rows(own..rows) })?;
                    }
                }
            }
            // The remaining rows are padding, all before the prompt or all after it.
            let padding = if attending.start > 0 { 0..attending.start } else { attending.end..all };
            if !padding.is_empty() && own == rows {
                be.write(features.rows(padding.start..padding.start + 1), &vec![0.0; features.cols])?;
            }
            repeat_rows(be, features.rows(padding), 1)
        })
    }

    /// Looks up the tokens of a prompt. Most are padding at its end: one of these rows is written and the others are copies.
    fn embed(&self, be: &mut dyn Backend, out: Tensor, ids: &[u32]) -> Result<()> {
        let padding = ids.iter().rev().take_while(|id| Some(*id) == ids.last()).count();
        let first = ids.len() - padding;
        let written = (first + 1).min(ids.len());
        be.write(out.rows(0..written), &self.embedding.rows(&ids[..written])?)?;
        repeat_rows(be, out.rows(first..ids.len()), 1)
    }
}
