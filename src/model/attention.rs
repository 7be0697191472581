//! The attention of the transformer's blocks: the format of queries and keys, their place in memory, and the KV cache.

use super::bounds::QkGain;
use crate::backend::{Backend, GemmFormats, KvSegment, Linear, Op, Softmax};
use crate::config::HEAD_DIM;
use crate::error::{Error, Remedy, Result};
use crate::tensor::{Arena, DType, Precision, Scale, Stored, Tensor};
use std::f32::consts::LOG2_E;

/// Which format the queries and keys of the transformer's attention are to have. Values are never quantised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionFormat {
    /// e4m3 in every block that makes them from e4m3 inputs, if the backend has such an attention.
    #[default]
    Auto,
    /// That of activations.
    Bf16,
    /// e4m3 in every block; it is an error if a block cannot have it.
    Fp8,
}

/// Why a block does not store queries and keys in e4m3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainHeads {
    /// Nothing else was asked for.
    Asked,
    /// In f32 nothing is rounded that need not be.
    Precision,
    /// The backend has no attention of e4m3.
    Device,
    /// The layers that make them do not all have e4m3 inputs, so that their precision is not that of e4m3 either.
    Inputs,
}

/// The format of queries and keys in one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFormat {
    /// The name of the block in the checkpoint.
    pub name: String,
    /// The type of queries and keys.
    pub heads: DType,
    /// The type of values.
    pub values: DType,
    /// Why queries and keys are not e4m3, if they are not.
    pub why: Option<PlainHeads>,
}

/// The attention of one block.
pub(super) struct BlockAttention {
    format: BlockFormat,
    /// How queries and keys are stored.
    heads: Stored,
    /// Factor of the queries. Those of queries and keys together are log2(e)/sqrt(d), so that the softmax is a bare exp2: one
    /// multiplication per element instead of one per score.
    pub q_scale: f32,
    /// Factor of the keys.
    pub k_scale: f32,
    softmax: Softmax,
}

/// The KV cache of one block: a cached segment to attend to besides the block's own keys, and the place to store the block's own
/// keys and values.
#[derive(Clone, Copy)]
pub(super) struct KvCache {
    pub read: Option<KvSegment>,
    pub write: Option<KvSegment>,
}

impl BlockAttention {
    /// The attention of the block `name`, whose queries and keys `layers` make and a qk-norm with this gain normalises.
    pub fn new(
        asked: AttentionFormat,
        gemms: GemmFormats,
        precision: Precision,
        name: &str,
        layers: &[&Linear],
        gain: &QkGain,
    ) -> Result<Self> {
        let why = match asked {
            AttentionFormat::Bf16 => Some(PlainHeads::Asked),
            _ if precision != Precision::Bf16 => Some(PlainHeads::Precision),
            _ if !gemms.takes_heads(DType::E4m3) => Some(PlainHeads::Device),
            _ if layers.iter().any(|layer| layer.input.dtype != DType::E4m3) => Some(PlainHeads::Inputs),
            _ => None,
        };
        if let (AttentionFormat::Fp8, Some(why)) = (asked, why) {
            return Err(refused(name, why));
        }
        let (scale, values) = (LOG2_E / (HEAD_DIM as f32).sqrt(), precision.activations());
        let (heads, [q_scale, k_scale], bound) = match why {
            Some(_) => (Stored::plain(values), [scale, 1.0], LOG2_E * gain.bound(HEAD_DIM)),
            // e4m3 has the same precision over fifteen octaves, so it suffices that both keep clear of its ends. With the same
            // factor they do: an element is at most about 4 times the gain of its norm, and e4m3 ends at 448.
            None => {
                let each = scale.sqrt();
                (Stored::fp8(Scale::ONE), [each; 2], gain.e4m3_bound(HEAD_DIM, each))
            }
        };
        let format = BlockFormat { name: name.into(), heads: heads.dtype, values, why };
        Ok(Self { format, heads, q_scale, k_scale, softmax: Softmax::Base2 { bound } })
    }

    /// The format of its queries and keys.
    pub fn format(&self) -> &BlockFormat {
        &self.format
    }

    /// Allocates queries.
    pub fn queries(&self, ws: &mut Arena, rows: usize, cols: usize) -> Result<Tensor> {
        ws.alloc_stored(rows, cols, self.heads)
    }

    /// Allocates keys and values.
    pub fn key_values(&self, ws: &mut Arena, rows: usize, cols: usize) -> Result<KvSegment> {
        Ok(KvSegment { k: ws.alloc_stored(rows, cols, self.heads)?, v: ws.alloc(rows, cols, self.format.values)? })
    }

    /// The place for a block's own keys and values: in the cache, or newly allocated.
    pub fn own_key_values(&self, ws: &mut Arena, rows: usize, cols: usize, cache: KvCache) -> Result<KvSegment> {
        cache.write.map_or_else(|| self.key_values(ws, rows, cols), Ok)
    }

    /// Attention to a block's own keys and values, and to cached ones.
    pub fn run(&self, be: &mut dyn Backend, out: &[Tensor], q: Tensor, own: KvSegment, cache: KvCache) -> Result<()> {
        let kv: Vec<KvSegment> = [own].into_iter().chain(cache.read).collect();
        be.run(Op::Attention { out, q, kv: &kv, head_dim: HEAD_DIM, causal: false, softmax: self.softmax })
    }
}

/// The error for a block that cannot have the format that was asked for.
fn refused(name: &str, why: PlainHeads) -> Error {
    let why = match why {
        PlainHeads::Asked | PlainHeads::Precision => "nothing is quantised in f32 precision".into(),
        PlainHeads::Device => "this device has no such kernel".into(),
        PlainHeads::Inputs => format!("the inputs of `{name}` are not FP8"),
    };
    Error::Usage { what: format!("FP8 attention cannot be had: {why}"), hint: Some(Remedy::AnyAttention) }
}
