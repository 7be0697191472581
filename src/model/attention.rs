//! The attention of the transformer's blocks: the format of queries and keys, their memory, and the KV cache.

use super::bounds::QkGain;
use crate::backend::{Backend, GemmFormats, KvSegment, Linear, Op, Softmax};
use crate::config::HEAD_DIM;
use crate::error::{Error, Remedy, Result};
use crate::names::LayerId;
use crate::tensor::{Arena, DType, Precision, Scale, Stored, Tensor};
use std::f32::consts::LOG2_E;

/// The requested format of queries and keys in the transformer's attention. Values are never quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionFormat {
    /// e4m3 in every block that computes them from quantized inputs, if the backend has FP8 attention. A block in which only bf16
    /// has a max-free softmax stays in bf16.
    #[default]
    Auto,
    /// The format of activations.
    Bf16,
    /// e4m3 in every block. A block that cannot have it is an error.
    Fp8,
}

/// Why a block does not store queries and keys in e4m3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainHeads {
    /// [`AttentionFormat::Bf16`] was requested.
    Asked,
    /// f32 precision rounds nothing that need not be rounded.
    Precision,
    /// The backend has no FP8 attention.
    Device,
    /// Not all layers that compute them have quantized inputs, so they are more precise than e4m3.
    Inputs,
    /// Softmax is max-free in bf16 but would not be in e4m3, where rounding lets scores grow further. A running maximum takes
    /// more time than e4m3 saves.
    MaxFree,
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

/// The number of keys of a 1024x1024 image and its prompt. It decides a block's format before the real number is known. All
/// images must get the same format, which may depend only on what the backend can do. With more keys a softmax that was assumed
/// to be max-free may need a maximum after all, which only costs time.
const USUAL_KEYS: usize = 64 * 64 + 512;

/// The attention of one block.
pub(super) struct BlockAttention {
    format: BlockFormat,
    /// How queries and keys are stored.
    heads: Stored,
    /// Factor of the queries. The factors of queries and keys multiply to log2(e)/sqrt(d), so that the softmax is a bare exp2:
    /// one multiplication per element instead of one per score.
    pub q_scale: f32,
    /// Factor of the keys.
    pub k_scale: f32,
    softmax: Softmax,
}

/// The KV cache of one block: a cached segment to attend to, in addition to the block's own keys, and the place to store the
/// block's own keys and values.
#[derive(Clone, Copy)]
pub(super) struct KvCache {
    pub read: Option<KvSegment>,
    pub write: Option<KvSegment>,
}

impl BlockAttention {
    /// The attention of a block. `layers` compute its queries and keys, and a qk-norm with this gain normalizes them.
    pub fn new(
        asked: AttentionFormat,
        gemms: GemmFormats,
        precision: Precision,
        layers: &[&Linear],
        gain: &QkGain,
    ) -> Result<Self> {
        let (scale, values) = (LOG2_E / (HEAD_DIM as f32).sqrt(), precision.activations());
        // e4m3 has the same precision over fifteen octaves, so queries and keys only have to stay clear of its ends. With equal
        // factors they do: an element is at most about 4 times the gain of its norm, and e4m3 ends at 448.
        let each = scale.sqrt();
        let plain = Softmax::Base2 { bound: LOG2_E * gain.bound(HEAD_DIM) };
        let e4m3 = Softmax::Base2 { bound: gain.e4m3_bound(HEAD_DIM, each) };
        let why = match asked {
            AttentionFormat::Bf16 => Some(PlainHeads::Asked),
            _ if precision != Precision::Bf16 => Some(PlainHeads::Precision),
            _ if !gemms.takes_heads(DType::E4m3) => Some(PlainHeads::Device),
            _ if layers.iter().any(|layer| !layer.input.dtype.is_quantized()) => Some(PlainHeads::Inputs),
            AttentionFormat::Auto if plain.is_max_free(USUAL_KEYS) && !e4m3.is_max_free(USUAL_KEYS) => Some(PlainHeads::MaxFree),
            _ => None,
        };
        let name = layers.iter().find_map(|layer| layer.id).map(LayerId::block_name).unwrap_or_default();
        if let (AttentionFormat::Fp8, Some(why)) = (asked, why) {
            return Err(refused(&name, why));
        }
        let (heads, [q_scale, k_scale], softmax) = match why {
            Some(_) => (Stored::plain(values), [scale, 1.0], plain),
            None => (Stored::fp8(Scale::ONE), [each; 2], e4m3),
        };
        let format = BlockFormat { name, heads: heads.dtype, values, why };
        Ok(Self { format, heads, q_scale, k_scale, softmax })
    }

    /// The format of the block's queries and keys.
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

/// The error for a block that cannot have the requested format.
fn refused(name: &str, why: PlainHeads) -> Error {
    let why = match why {
        // A request for FP8 rules out `Asked` and is met even where FP8 is slower, so only f32 precision is left.
        PlainHeads::Asked | PlainHeads::MaxFree | PlainHeads::Precision => "nothing is quantized in f32 precision".into(),
        PlainHeads::Device => "this device has no kernel for it".into(),
        PlainHeads::Inputs => format!("the inputs of `{name}` are not quantized"),
    };
    Error::Usage { what: format!("FP8 attention is impossible: {why}"), hint: Some(Remedy::AnyAttention) }
}

#[cfg(test)]
mod tests {
    use super::super::bounds::NormGain;
    use super::*;
    use crate::tensor::{Bytes, Region, WeightSlice};
    use std::sync::Arc;

    /// The format of a block with equal gains, and its bounds in bf16 and in e4m3.
    fn block(asked: AttentionFormat, gain: f32) -> (BlockAttention, [f32; 2]) {
        let norm = || {
            let bytes = DType::F32.encoded(&[gain; HEAD_DIM]);
            NormGain::of(&[WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::F32, 1)])
        };
        let gains = QkGain { q: norm(), k: norm() };
        let weight = Arena::new(Region::Weights).alloc(HEAD_DIM, HEAD_DIM, DType::Bf16).unwrap();
        let layer = Linear { input: Stored::fp8(Scale::ONE), ..Linear::new(weight, None) };
        let block = BlockAttention::new(asked, GemmFormats::ALL, Precision::Bf16, &[&layer], &gains).unwrap();
        let scale = (LOG2_E / (HEAD_DIM as f32).sqrt()).sqrt();
        (block, [LOG2_E * gains.bound(HEAD_DIM), gains.e4m3_bound(HEAD_DIM, scale)])
    }

    /// With 4,608 keys softmax is max-free up to bounds of 103.83.
    #[test]
    fn a_running_maximum_is_worse_than_bf16() {
        for (gain, plain, e4m3, why) in [
            (1.0, 16.649, 18.394, None),
            (2.379, 94.226, 103.791, None),
            (2.38, 94.305, 103.878, Some(PlainHeads::MaxFree)),
            (2.497, 103.805, 114.330, Some(PlainHeads::MaxFree)),
            // Both formats need a maximum, so e4m3 is faster.
            (2.498, 103.888, 114.422, None),
            (f32::NAN, f32::INFINITY, f32::INFINITY, None),
        ] {
            let near = |got: f32, want: f32| got == want || (got - want).abs() < 0.001;
            let (auto, bounds) = block(AttentionFormat::Auto, gain);
            assert!(near(bounds[0], plain) && near(bounds[1], e4m3), "{gain}: {bounds:?}");
            assert_eq!(auto.format.why, why, "{gain}");
            let (dtype, bound) = if why.is_none() { (DType::E4m3, bounds[1]) } else { (DType::Bf16, bounds[0]) };
            assert_eq!((auto.format.heads, auto.heads.dtype), (dtype, dtype), "{gain}");
            assert_eq!(auto.softmax, Softmax::Base2 { bound }, "{gain}");
            // A requested format applies to every block.
            let (asked, _) = block(AttentionFormat::Fp8, gain);
            assert_eq!((asked.format.heads, asked.softmax), (DType::E4m3, Softmax::Base2 { bound: bounds[1] }), "{gain}");
            assert_eq!(block(AttentionFormat::Bf16, gain).0.format.why, Some(PlainHeads::Asked), "{gain}");
        }
    }
}
