//! Names the formats of a model's linear layers by kind of layer: what the files store, what the backend holds, what that is
//! multiplied by, and why where that is more than the files ask for. Likewise the formats of attention.

mod lines;

use crate::backend::Fp8Accumulate;
use crate::model::{BlockFormat, LayerFormat, Nvfp4Math, PartFormat, PlainHeads, PlainInput};
use crate::part::Part;
use crate::tensor::DType;
use serde::Serialize;

/// A kind of linear layer: those that differ only in the block that they are in, or in the stream of a double block.
#[derive(Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// The part of the model that has them.
    pub part: Part,
    /// The blocks that they are in; empty if there is only one sort of block, or none.
    pub blocks: &'static str,
    /// Their name within a block.
    pub name: &'static str,
    /// How the canonical names of their weights begin and end.
    starts: &'static str,
    ends: &'static str,
}

impl LayerKind {
    pub(super) fn of(name: &str) -> &'static Self {
        let fits = |kind: &&Self| name.starts_with(kind.starts) && name.ends_with(kind.ends);
        KINDS.iter().find(fits).unwrap_or(&KINDS[KINDS.len() - 1])
    }
}

/// All kinds, in the order in which they are listed. The last one takes what no other does.
static KINDS: [LayerKind; 17] = {
    use Part::{TextEncoder, Transformer};
    const fn new(part: Part, blocks: &'static str, name: &'static str, starts: &'static str, ends: &'static str) -> LayerKind {
        LayerKind { part, blocks, name, starts, ends }
    }
    [
        new(Transformer, "double blocks", "qkv", "double_blocks.", "_attn.qkv.weight"),
        new(Transformer, "double blocks", "proj", "double_blocks.", "_attn.proj.weight"),
        new(Transformer, "double blocks", "mlp in", "double_blocks.", "_mlp.0.weight"),
        new(Transformer, "double blocks", "mlp out", "double_blocks.", "_mlp.2.weight"),
        new(Transformer, "single blocks", "linear1", "single_blocks.", ".linear1.weight"),
        new(Transformer, "single blocks", "linear2", "single_blocks.", ".linear2.weight"),
        new(Transformer, "", "img_in", "img_in.", ""),
        new(Transformer, "", "txt_in", "txt_in.", ""),
        new(Transformer, "", "time_in", "time_in.", ""),
        new(Transformer, "", "guidance_in", "guidance_in.", ""),
        new(Transformer, "", "modulations", "", ".lin.weight"),
        new(Transformer, "", "final layer", "final_layer.", ""),
        new(TextEncoder, "", "qkv", "model.layers.", ".qkv_proj.weight"),
        new(TextEncoder, "", "out", "model.layers.", ".o_proj.weight"),
        new(TextEncoder, "", "gate/up", "model.layers.", ".gate_up_proj.weight"),
        new(TextEncoder, "", "down", "model.layers.", ".down_proj.weight"),
        new(Transformer, "", "other", "", ""),
    ]
};

/// The layers of one kind that have one format.
#[derive(Debug, PartialEq, Eq)]
pub struct KindFormat {
    /// Their kind.
    pub kind: &'static LayerKind,
    /// How many they are.
    pub layers: usize,
    /// The types in which the files store their parts, each with the one in which the backend holds it; every pair once.
    types: Vec<(DType, DType)>,
    product: Product,
    /// Bytes in the files, with scales.
    pub stored_bytes: u64,
    /// Bytes on the backend, with scales.
    pub held_bytes: u64,
}

/// What layers multiply their weights by, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Product {
    /// The type of their input.
    input: DType,
    /// Why that is not quantised, though weights are.
    why: Option<PlainInput>,
    /// How sums of e4m3 products are accumulated, on a device where that is a choice.
    sums: Option<&'static str>,
}

impl Product {
    fn of(layer: &LayerFormat, accumulate: Option<Fp8Accumulate>) -> Self {
        let sums = accumulate.filter(|_| multiplies_fp8(layer)).map(|accumulate| accumulate.sums(layer.inputs));
        Self { input: layer.input, why: layer.why, sums }
    }

    /// Why inputs are not quantised, unless the rest of the line tells.
    const fn reason(self) -> Option<&'static str> {
        match self.why {
            Some(PlainInput::File) => Some("as the file asks"),
            Some(PlainInput::Parts) => Some("its parts need different inputs"),
            Some(PlainInput::Device) => Some("no GEMM of quantised inputs here"),
            Some(PlainInput::Asked) => Some("as asked"),
            Some(PlainInput::Adapter) => Some("merged with an adapter"),
            // Text encoders always have plain inputs, and in f32 so has everything.
            Some(PlainInput::Model | PlainInput::Precision) | None => None,
        }
    }
}

impl KindFormat {
    /// The names of the formats in the files, each once.
    pub fn stored(&self) -> Vec<&'static str> {
        each_once(self.types.iter().map(|(stored, _)| *stored))
    }

    /// The names of the formats on the backend, each once.
    pub fn held(&self) -> Vec<&'static str> {
        each_once(self.types.iter().map(|(_, held)| *held))
    }

    /// The name of their inputs' format.
    pub fn input(&self) -> &'static str {
        word(self.product.input)
    }

    /// How sums of e4m3 products are accumulated, `exact`, `promoted` or `fast`; `None` where there are none, or the device has one
    /// way only.
    pub fn accumulation(&self) -> Option<&'static str> {
        self.product.sums
    }

    /// Why the inputs of quantised weights are not quantised; `None` if they are, or the model or the precision has no others.
    pub fn reason(&self) -> Option<&'static str> {
        self.product.reason()
    }
}

/// The formats of a model's transformer and text encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Formats {
    /// Those of the linear layers.
    pub layers: Vec<LayerFormat>,
    /// Those of the attention in each block of the transformer.
    pub attention: Vec<BlockFormat>,
    /// How sums of e4m3 products are accumulated, on a device where that is a choice.
    pub accumulate: Option<Fp8Accumulate>,
}

impl Formats {
    /// Counts the layers of each kind and format. Kinds are in the order of the model, the most frequent format of each is first.
    pub fn by_kind(&self) -> Vec<KindFormat> {
        let mut rows: Vec<KindFormat> = Vec::new();
        for layer in &self.layers {
            let (kind, product) = (LayerKind::of(&layer.name), Product::of(layer, self.accumulate));
            let types = sorted(layer.parts.iter().map(|part| (part.stored, part.held)));
            let known = rows.iter().position(|row| row.kind == kind && row.types == types && row.product == product);
            let at = known.unwrap_or_else(|| {
                rows.push(KindFormat { kind, layers: 0, types, product, stored_bytes: 0, held_bytes: 0 });
                rows.len() - 1
            });
            rows[at].layers += 1;
            rows[at].stored_bytes += layer.parts.iter().map(|part| part.stored_bytes).sum::<u64>();
            rows[at].held_bytes += layer.parts.iter().map(|part| part.held_bytes).sum::<u64>();
        }
        let place = |kind: &LayerKind| KINDS.iter().position(|other| other == kind);
        rows.sort_by_key(|row| (place(row.kind), std::cmp::Reverse(row.layers)));
        rows
    }

    /// The formats of attention, each with the number of blocks that have it.
    pub fn attention_by_format(&self) -> Vec<AttentionFormatCount> {
        let groups = grouped(self.attention.iter().map(|block| ((block.heads, block.values, block.why), ())));
        let count = |((heads, values, why), blocks): ((DType, DType, Option<PlainHeads>), Vec<()>)| AttentionFormatCount {
            blocks: blocks.len(),
            heads: word(heads),
            values: word(values),
            reason: heads_reason(why),
        };
        groups.into_iter().map(count).collect()
    }

    /// Whether a block has queries and keys in FP8, and whether all have.
    pub fn fp8_attention(&self) -> (bool, bool) {
        let is_fp8 = |block: &BlockFormat| block.heads == DType::E4m3;
        (self.attention.iter().any(is_fp8), self.attention.iter().all(is_fp8))
    }

    /// Whether a layer multiplies e4m3 weights by e4m3 inputs.
    pub fn multiplies_fp8(&self) -> bool {
        self.layers.iter().any(multiplies_fp8)
    }

    /// Whether there are sums of e4m3 products, and a choice how they are accumulated.
    pub fn accumulates_fp8(&self) -> bool {
        self.accumulate.is_some() && self.multiplies_fp8()
    }

    /// What NVFP4 weights are multiplied as, if there are any in layers where that is a choice: those of which the files ask for
    /// quantised inputs, and those that were quantised when they were loaded.
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

    /// The name of the format that plain weights were quantised to when they were loaded, if they were.
    pub fn quantised_at_load(&self) -> Option<&'static str> {
        let parts = self.layers.iter().flat_map(|layer| &layer.parts);
        parts.filter(|part| is_quantised_at_load(part.stored, part.held)).map(|part| word(part.held)).next()
    }

    /// What of a model's quantised weights is expanded, if anything is.
    pub fn expansion(&self) -> Option<Expansion> {
        let is_expanded = |part: &&PartFormat| part.stored.is_quantised() && !part.held.is_quantised();
        let parts = || self.layers.iter().flat_map(|layer| &layer.parts).filter(is_expanded);
        parts().next()?;
        Some(Expansion {
            stored: each_once(parts().map(|part| part.stored)),
            held: each_once(parts().map(|part| part.held)),
            stored_bytes: parts().map(|part| part.stored_bytes).sum(),
            held_bytes: parts().map(|part| part.held_bytes).sum(),
        })
    }
}

const fn is_quantised_at_load(stored: DType, held: DType) -> bool {
    held.is_quantised() && !stored.is_quantised()
}

fn multiplies_fp8(layer: &LayerFormat) -> bool {
    layer.input == DType::E4m3 && layer.parts.iter().any(|part| part.held == DType::E4m3)
}

/// Why queries and keys are not in FP8, unless the rest of the line tells.
const fn heads_reason(why: Option<PlainHeads>) -> Option<&'static str> {
    match why {
        Some(PlainHeads::Asked) => Some("as asked"),
        Some(PlainHeads::Device) => Some("no fp8 attention here"),
        Some(PlainHeads::Inputs) => Some("made from inputs that are not quantised"),
        Some(PlainHeads::MaxFree) => Some("fp8 would need a running maximum"),
        // In f32 nothing is quantised.
        Some(PlainHeads::Precision) | None => None,
    }
}

/// Pairs of types, each once.
fn sorted(types: impl Iterator<Item = (DType, DType)>) -> Vec<(DType, DType)> {
    let mut types: Vec<_> = types.collect();
    types.sort_by_key(|(stored, held)| (list_order(*stored), list_order(*held)));
    types.dedup();
    types
}

/// Blocks whose attention has the same format.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct AttentionFormatCount {
    /// How many they are.
    pub blocks: usize,
    /// The format of queries and keys.
    pub heads: &'static str,
    /// The format of values.
    pub values: &'static str,
    /// Why queries and keys are not in FP8; `None` if they are, or the precision has no other format.
    pub reason: Option<&'static str>,
}

/// Quantised weights that a backend holds in another format than the files do.
#[derive(Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The formats in the files, by name.
    pub stored: Vec<&'static str>,
    /// The formats on the backend.
    pub held: Vec<&'static str>,
    /// Bytes of these weights in the files, with scales.
    pub stored_bytes: u64,
    /// Their bytes on the backend.
    pub held_bytes: u64,
}

/// Collects the values of each key. Keys are in the order in which they appear first.
fn grouped<K: PartialEq, V>(pairs: impl Iterator<Item = (K, V)>) -> Vec<(K, Vec<V>)> {
    let mut groups: Vec<(K, Vec<V>)> = Vec::new();
    for (key, value) in pairs {
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

/// The name of a format as users know it. Elements of e2m1 always have the scales of NVFP4.
const fn word(dtype: DType) -> &'static str {
    match dtype {
        DType::E4m3 => "fp8",
        DType::E5m2 => "fp8-e5m2",
        DType::E2m1 => "nvfp4",
        plain => plain.name(),
    }
}

/// The names of formats, each once, in the order of [`list_order`].
fn each_once(dtypes: impl Iterator<Item = DType>) -> Vec<&'static str> {
    let mut dtypes: Vec<DType> = dtypes.collect();
    dtypes.sort_by_key(|dtype| list_order(*dtype));
    dtypes.dedup();
    dtypes.into_iter().map(word).collect()
}

/// The place of a format in lists. Plain ones come last, so that layers are named by what is quantised.
fn list_order(dtype: DType) -> usize {
    const ORDER: [DType; 6] = [DType::E4m3, DType::E2m1, DType::E5m2, DType::Bf16, DType::F16, DType::F32];
    ORDER.iter().position(|other| *other == dtype).unwrap_or(ORDER.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Weight;
    use crate::tensor::{Arena, Region};
    use DType::{Bf16, E2m1, E4m3, E5m2, F16, F32};

    /// A layer of parts that are stored and held in these types, a thousand elements each.
    pub fn layer(name: &str, parts: &[(DType, DType)], input: DType) -> LayerFormat {
        let bytes = |dtype: DType| dtype.bytes(1000) as u64;
        let part = |&(stored, held)| PartFormat { stored, held, stored_bytes: bytes(stored), held_bytes: bytes(held) };
        let weight = Weight::new(Arena::new(Region::Weights).alloc(1, 1000, Bf16).unwrap());
        LayerFormat {
            name: name.into(),
            weight,
            parts: parts.iter().map(part).collect(),
            input,
            inputs: 1000,
            why: None,
            merged: false,
        }
    }

    pub fn formats(layers: impl IntoIterator<Item = LayerFormat>) -> Formats {
        Formats { layers: layers.into_iter().collect(), ..Formats::default() }
    }

    /// The linear layers of a model with two blocks of each sort; `of` tells the parts and the input of each.
    pub fn model(of: impl Fn(&str) -> (Vec<(DType, DType)>, DType)) -> Formats {
        let mut names: Vec<String> = Vec::new();
        for i in 0..2 {
            let encoder = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"];
            names.extend(encoder.iter().map(|layer| format!("model.layers.{i}.{layer}.weight")));
            for stream in ["img", "txt"] {
                let layers = ["attn.qkv", "attn.proj", "mlp.0", "mlp.2"];
                names.extend(layers.iter().map(|layer| format!("double_blocks.{i}.{stream}_{layer}.weight")));
            }
            names.extend(["linear1", "linear2"].map(|layer| format!("single_blocks.{i}.{layer}.weight")));
        }
        names.extend(["txt_in", "img_in", "time_in.in_layer", "time_in.out_layer"].map(|layer| format!("{layer}.weight")));
        names.extend(["double_stream_modulation_img", "single_stream_modulation"].map(|layer| format!("{layer}.lin.weight")));
        names.extend(["adaLN_modulation.1", "linear"].map(|layer| format!("final_layer.{layer}.weight")));
        formats(names.iter().map(|name| (name, of(name))).map(|(name, (parts, input))| layer(name, &parts, input)))
    }

    #[test]
    fn rows_count_layers_and_bytes() {
        let formats = formats([
            layer("model.layers.7.self_attn.qkv_proj.weight", &[(E4m3, E4m3), (E2m1, Bf16), (E4m3, E4m3)], Bf16),
            layer("double_blocks.3.txt_mlp.0.weight", &[(E4m3, E4m3)], E4m3),
            layer("double_blocks.0.img_mlp.0.weight", &[(Bf16, Bf16)], Bf16),
            layer("double_blocks.3.img_mlp.0.weight", &[(E4m3, E4m3)], E4m3),
        ]);
        let rows = formats.by_kind();
        let rows: Vec<_> = rows
            .iter()
            .map(|row| (row.kind.name, row.layers, row.stored(), row.held(), row.input(), row.stored_bytes, row.held_bytes))
            .collect();
        let want = [
            ("mlp in", 2, vec!["fp8"], vec!["fp8"], "fp8", 2000, 2000),
            ("mlp in", 1, vec!["bf16"], vec!["bf16"], "bf16", 2000, 2000),
            ("qkv", 1, vec!["fp8", "nvfp4"], vec!["fp8", "bf16"], "bf16", 2500, 4000),
        ];
        assert_eq!(rows, want);
        // Only the part that is expanded counts.
        let want = Expansion { stored: vec!["nvfp4"], held: vec!["bf16"], stored_bytes: 500, held_bytes: 2000 };
        assert_eq!(formats.expansion(), Some(want));
    }

    #[test]
    fn only_quantised_weights_are_expanded() {
        assert_eq!(model(|_| (vec![(F16, F32), (F32, Bf16)], Bf16)).expansion(), None);
        assert_eq!(model(|_| (vec![(E4m3, E4m3), (Bf16, Bf16)], Bf16)).expansion(), None);
        let all = model(|_| (vec![(E5m2, F32), (E2m1, F32), (E4m3, F32), (Bf16, F32)], F32)).expansion().unwrap();
        assert_eq!((all.stored, all.held), (vec!["fp8", "nvfp4", "fp8-e5m2"], vec!["f32"]));
        // Re-encoding is asked for, and is no expansion.
        assert_eq!(model(|_| (vec![(E2m1, E4m3)], E4m3)).expansion(), None);
    }

    #[test]
    fn what_nvfp4_is_multiplied_as_shows_in_the_inputs() {
        let math = |parts: &[(DType, DType)], input, why| {
            let nvfp4 = LayerFormat { why, ..layer("single_blocks.0.linear1.weight", parts, input) };
            let encoder = layer("model.layers.0.self_attn.o_proj.weight", &[(E2m1, E2m1)], Bf16);
            let encoder = LayerFormat { why: Some(PlainInput::Model), ..encoder };
            formats([encoder, nvfp4]).nvfp4_math()
        };
        let kept = [(E2m1, E2m1)];
        assert_eq!(math(&[(E2m1, E4m3)], E4m3, None), Some(Nvfp4Math::Fp8));
        assert_eq!(math(&kept, E2m1, None), Some(Nvfp4Math::Auto));
        for why in [PlainInput::Asked, PlainInput::Device] {
            assert_eq!(math(&kept, Bf16, Some(why)), Some(Nvfp4Math::Bf16));
        }
        // Where inputs are plain in any case there is no choice, nor is there with other weights.
        for why in [PlainInput::File, PlainInput::Parts, PlainInput::Precision] {
            assert_eq!(math(&kept, Bf16, Some(why)), None);
        }
        assert_eq!(math(&[(E4m3, E4m3)], E4m3, None), None);
    }
}
