//! The formats of linear layers by kind: what the files store, what the backend holds, what the weights are multiplied by, and
//! why inputs are not quantized. Also the formats of attention.

use crate::backend::Fp8Accumulate;
use crate::model::{BlockFormat, LayerFormat, Nvfp4Math, PartFormat, PlainHeads, PlainInput};
use crate::names::LayerRole;
use crate::tensor::DType;
use std::collections::BTreeSet;

/// The layers of one kind that have one format.
#[derive(Debug, PartialEq, Eq)]
pub struct KindFormat {
    /// The [kind](LayerRole::kind) of these layers.
    pub kind: LayerRole,
    /// Number of layers.
    pub layers: usize,
    /// The types of the layers' parts: in the files, and on the backend.
    pub types: BTreeSet<(DType, DType)>,
    /// The type of the layers' input.
    pub input: DType,
    /// Why the input is not quantized although the weights are.
    pub why: Option<PlainInput>,
    /// How sums of e4m3 products are accumulated: `exact`, `promoted` or `fast`. `None` if there are no such sums, or if the
    /// device has only one way.
    pub sums: Option<&'static str>,
    /// Bytes in the files, with scales.
    pub stored_bytes: u64,
    /// Bytes on the backend, with scales.
    pub held_bytes: u64,
}

/// The formats of a model's transformer and text encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Formats {
    /// The formats of the linear layers.
    pub layers: Vec<LayerFormat>,
    /// The attention formats of the transformer's blocks.
    pub attention: Vec<BlockFormat>,
    /// How sums of e4m3 products are accumulated, on a device that has a choice.
    pub accumulate: Option<Fp8Accumulate>,
}

impl Formats {
    /// Counts the layers of each kind and format. Kinds are in model order. The most frequent format of a kind comes first.
    pub fn by_kind(&self) -> Vec<KindFormat> {
        let mut rows: Vec<KindFormat> = Vec::new();
        for layer in &self.layers {
            let (kind, input, why) = (layer.id.role.kind(), layer.input, layer.why);
            let sums = self.accumulate.filter(|_| multiplies_fp8(layer)).map(|accumulate| accumulate.sums(layer.weight.cols()));
            let types = layer.parts.iter().map(|part| (part.stored, part.held)).collect();
            let own = KindFormat { kind, layers: 0, types, input, why, sums, stored_bytes: 0, held_bytes: 0 };
            let is_alike =
                |row: &KindFormat| (row.kind, &row.types, row.input, row.why, row.sums) == (kind, &own.types, input, why, sums);
            let at = rows.iter().position(is_alike).unwrap_or_else(|| {
                rows.push(own);
                rows.len() - 1
            });
            rows[at].layers += 1;
            rows[at].stored_bytes += layer.parts.iter().map(|part| part.stored_bytes).sum::<u64>();
            rows[at].held_bytes += layer.parts.iter().map(|part| part.held_bytes).sum::<u64>();
        }
        rows.sort_by_key(|row| (row.kind, std::cmp::Reverse(row.layers)));
        rows
    }

    /// The attention formats, each with its number of blocks.
    pub fn attention_by_format(&self) -> Vec<AttentionFormatCount> {
        let mut rows: Vec<AttentionFormatCount> = Vec::new();
        for &BlockFormat { heads, values, why, .. } in &self.attention {
            match rows.iter_mut().find(|row| (row.heads, row.values, row.why) == (heads, values, why)) {
                Some(row) => row.blocks += 1,
                None => rows.push(AttentionFormatCount { blocks: 1, heads, values, why }),
            }
        }
        rows
    }

    /// Whether some block has queries and keys in FP8, and whether all blocks have.
    pub fn fp8_attention(&self) -> (bool, bool) {
        let is_fp8 = |block: &BlockFormat| block.heads == DType::E4m3;
        (self.attention.iter().any(is_fp8), self.attention.iter().all(is_fp8))
    }

    /// Whether a layer multiplies e4m3 weights by e4m3 inputs.
    pub fn multiplies_fp8(&self) -> bool {
        self.layers.iter().any(multiplies_fp8)
    }

    /// Whether there are sums of e4m3 products and a choice of how they are accumulated.
    pub fn accumulates_fp8(&self) -> bool {
        self.accumulate.is_some() && self.multiplies_fp8()
    }

    /// How NVFP4 weights are multiplied, if a layer has that choice. Layers have it if the files ask for quantized inputs, or if
    /// their weights were quantized at load.
    pub fn nvfp4_math(&self) -> Option<Nvfp4Math> {
        let is_nvfp4 = |layer: &&LayerFormat| layer.parts.iter().any(|part| [part.stored, part.held].contains(&DType::E2m1));
        let math = |layer: &LayerFormat| match (layer.input, layer.why) {
            (DType::E4m3, _) => Some(Nvfp4Math::Fp8),
            (DType::E2m1, _) => Some(Nvfp4Math::Auto),
            (_, Some(PlainInput::Asked | PlainInput::Device)) => Some(Nvfp4Math::Bf16),
            _ => None,
        };
        self.layers.iter().filter(is_nvfp4).find_map(math)
    }

    /// The type that plain weights were quantized to at load, if they were.
    pub fn quantized_at_load(&self) -> Option<DType> {
        let mut parts = self.layers.iter().flat_map(|layer| &layer.parts);
        parts.find(|part| part.held.is_quantized() && !part.stored.is_quantized()).map(|part| part.held)
    }

    /// The quantized weights that the backend expands, if any.
    pub fn expansion(&self) -> Option<Expansion> {
        let is_expanded = |part: &&PartFormat| part.stored.is_quantized() && !part.held.is_quantized();
        let parts = || self.layers.iter().flat_map(|layer| &layer.parts).filter(is_expanded);
        parts().next()?;
        Some(Expansion {
            stored: parts().map(|part| part.stored).collect(),
            held: parts().map(|part| part.held).collect(),
            stored_bytes: parts().map(|part| part.stored_bytes).sum(),
            held_bytes: parts().map(|part| part.held_bytes).sum(),
        })
    }
}

fn multiplies_fp8(layer: &LayerFormat) -> bool {
    layer.input == DType::E4m3 && layer.parts.iter().any(|part| part.held == DType::E4m3)
}

/// The number of blocks with one attention format.
#[derive(Debug, PartialEq, Eq)]
pub struct AttentionFormatCount {
    /// Number of blocks.
    pub blocks: usize,
    /// The type of queries and keys.
    pub heads: DType,
    /// The type of values.
    pub values: DType,
    /// Why queries and keys are not in FP8, if they are not.
    pub why: Option<PlainHeads>,
}

/// Quantized weights that a backend holds in a format other than the file's.
#[derive(Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The types in the files.
    pub stored: BTreeSet<DType>,
    /// The types on the backend.
    pub held: BTreeSet<DType>,
    /// Bytes of these weights in the files, with scales.
    pub stored_bytes: u64,
    /// Bytes of these weights on the backend.
    pub held_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Weight;
    use crate::names::LayerId;
    use crate::names::Stream::{Image, Text};
    use crate::tensor::{Arena, Region};
    use DType::{Bf16, E2m1, E4m3, E5m2, F16, F32};

    /// A layer whose parts are stored and held in these types, a thousand elements each.
    fn layer(id: LayerId, parts: &[(DType, DType)], input: DType) -> LayerFormat {
        let bytes = |dtype: DType| dtype.bytes(1000) as u64;
        let part = |&(stored, held)| PartFormat { stored, held, stored_bytes: bytes(stored), held_bytes: bytes(held) };
        let weight = Weight::new(Arena::new(Region::Weights).alloc(1, 1000, Bf16).unwrap());
        LayerFormat { id, weight, parts: parts.iter().map(part).collect(), input, why: None, merged: false }
    }

    fn formats(layers: impl IntoIterator<Item = LayerFormat>) -> Formats {
        Formats { layers: layers.into_iter().collect(), ..Formats::default() }
    }

    #[test]
    fn rows_count_layers_and_bytes() {
        let mlp = |stream, block| LayerRole::MlpIn(stream).of_block(block);
        let formats = formats([
            layer(LayerRole::EncoderQkv.of_block(7), &[(E4m3, E4m3), (E2m1, Bf16), (E4m3, E4m3)], Bf16),
            layer(mlp(Text, 3), &[(E4m3, E4m3)], E4m3),
            layer(mlp(Image, 0), &[(Bf16, Bf16)], Bf16),
            layer(mlp(Image, 3), &[(E4m3, E4m3)], E4m3),
        ]);
        let rows = formats.by_kind();
        let rows: Vec<_> = rows
            .into_iter()
            .map(|row| (row.kind, row.layers, Vec::from_iter(row.types), row.input, row.stored_bytes, row.held_bytes))
            .collect();
        let want = [
            (LayerRole::MlpIn(Image), 2, vec![(E4m3, E4m3)], E4m3, 2000, 2000),
            (LayerRole::MlpIn(Image), 1, vec![(Bf16, Bf16)], Bf16, 2000, 2000),
            (LayerRole::EncoderQkv, 1, vec![(E4m3, E4m3), (E2m1, Bf16)], Bf16, 2500, 4000),
        ];
        assert_eq!(rows, want);
        // Only the expanded part counts.
        let want = Expansion { stored: [E2m1].into(), held: [Bf16].into(), stored_bytes: 500, held_bytes: 2000 };
        assert_eq!(formats.expansion(), Some(want));
    }

    #[test]
    fn only_quantized_weights_are_expanded() {
        let expansion =
            |types: &[(DType, DType)], input| formats([layer(LayerRole::Linear1.of_block(0), types, input)]).expansion();
        assert_eq!(expansion(&[(F16, F32), (F32, Bf16)], Bf16), None);
        assert_eq!(expansion(&[(E4m3, E4m3), (Bf16, Bf16)], Bf16), None);
        let all = expansion(&[(E5m2, F32), (E2m1, F32), (E4m3, F32), (Bf16, F32)], F32).unwrap();
        assert_eq!((all.stored, all.held), ([E4m3, E2m1, E5m2].into(), [F32].into()));
        // Re-encoding was requested and is not an expansion.
        assert_eq!(expansion(&[(E2m1, E4m3)], E4m3), None);
    }

    #[test]
    fn what_nvfp4_is_multiplied_as_shows_in_the_inputs() {
        let math = |parts: &[(DType, DType)], input, why| {
            let nvfp4 = LayerFormat { why, ..layer(LayerRole::Linear1.of_block(0), parts, input) };
            let encoder = layer(LayerRole::EncoderOut.of_block(0), &[(E2m1, E2m1)], Bf16);
            let encoder = LayerFormat { why: Some(PlainInput::Model), ..encoder };
            formats([encoder, nvfp4]).nvfp4_math()
        };
        let kept = [(E2m1, E2m1)];
        assert_eq!(math(&[(E2m1, E4m3)], E4m3, None), Some(Nvfp4Math::Fp8));
        assert_eq!(math(&kept, E2m1, None), Some(Nvfp4Math::Auto));
        for why in [PlainInput::Asked, PlainInput::Device] {
            assert_eq!(math(&kept, Bf16, Some(why)), Some(Nvfp4Math::Bf16));
        }
        // There is no choice if inputs are always plain, or with other weights.
        for why in [PlainInput::File, PlainInput::Parts, PlainInput::Precision] {
            assert_eq!(math(&kept, Bf16, Some(why)), None);
        }
        assert_eq!(math(&[(E4m3, E4m3)], E4m3, None), None);
    }
}
