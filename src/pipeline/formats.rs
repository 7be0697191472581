//! Names the formats of a model's linear layers by kind of layer: what the files store, and what the backend holds.

use crate::model::{LayerFormat, PartFormat};
use crate::part::Part;
use crate::tensor::DType;

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
    fn of(name: &str) -> &'static Self {
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
    /// The type of their input.
    input: DType,
    /// Bytes in the files, with scales.
    pub stored_bytes: u64,
    /// Bytes on the backend, with scales.
    pub held_bytes: u64,
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
        word(self.input)
    }

    /// The format in words. Layers in parts of several formats have several.
    fn words(&self) -> String {
        type_words(&self.types, self.input)
    }
}

/// The formats of the linear layers of a model's transformer and text encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Formats(pub Vec<LayerFormat>);

impl Formats {
    /// Counts the layers of each kind and format. Kinds are in the order of the model, the most frequent format of each is first.
    pub fn by_kind(&self) -> Vec<KindFormat> {
        let mut rows: Vec<KindFormat> = Vec::new();
        for layer in &self.0 {
            let (kind, input) = (LayerKind::of(&layer.name), layer.input);
            let types = sorted(layer.parts.iter().map(|part| (part.stored, part.held)));
            let known = rows.iter().position(|row| row.kind == kind && row.types == types && row.input == input);
            let at = known.unwrap_or_else(|| {
                rows.push(KindFormat { kind, layers: 0, types, input, stored_bytes: 0, held_bytes: 0 });
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

    /// The formats in short lines, for display: one line for all kinds of a part that have the same ones, and only one if the
    /// whole model has the same.
    pub fn lines(&self) -> Vec<String> {
        let rows = self.by_kind();
        let kinds: Vec<(&LayerKind, String)> =
            rows.chunk_by(|a, b| a.kind == b.kind).map(|rows| (rows[0].kind, kind_words(rows))).collect();
        if let [(words, _)] = &*grouped(kinds.iter().map(|(kind, words)| (words, kind)))
            && rows.len() == kinds.len()
        {
            return vec![format!("all {words}")];
        }
        let mut lines = Vec::new();
        for part in Part::ALL {
            let kinds: Vec<_> = kinds.iter().filter(|(kind, _)| kind.part == part).collect();
            let count = |blocks: &str| kinds.iter().filter(|(kind, _)| kind.blocks == blocks).count();
            for (words, alike) in grouped(kinds.iter().map(|(kind, words)| (words, *kind))) {
                let layers = if alike.len() == kinds.len() { String::new() } else { format!(" {}", layer_words(&alike, count)) };
                lines.push(format!("{part}{layers}: {words}"));
            }
        }
        lines
    }

    /// What of a model's quantised weights is expanded, if anything is.
    pub fn expansion(&self) -> Option<Expansion> {
        let is_expanded = |part: &&PartFormat| part.stored.is_quantised() && part.held != part.stored;
        let parts = || self.0.iter().flat_map(|layer| &layer.parts).filter(is_expanded);
        parts().next()?;
        Some(Expansion {
            stored: each_once(parts().map(|part| part.stored)),
            held: each_once(parts().map(|part| part.held)),
            stored_bytes: parts().map(|part| part.stored_bytes).sum(),
            held_bytes: parts().map(|part| part.held_bytes).sum(),
        })
    }
}

/// The formats of one kind: with counts if there are several. Of many, as in text encoders whose parts are mixed layer by layer,
/// only what they are made of is named.
fn kind_words(rows: &[KindFormat]) -> String {
    const MANY: usize = 4;
    match rows {
        [only] => only.words(),
        [first, ..] if rows.len() >= MANY && rows.iter().all(|row| row.input == first.input) => {
            let layers: usize = rows.iter().map(|row| row.layers).sum();
            let types = sorted(rows.iter().flat_map(|row| row.types.iter().copied()));
            format!("{layers} mixes of {}", type_words(&types, first.input))
        }
        _ => rows.iter().map(|row| format!("{} {}", row.layers, row.words())).collect::<Vec<_>>().join(", "),
    }
}

/// Formats in words: what the files store and, if the backend holds that as it is, the GEMM by the bits of weight and activation;
/// otherwise what it is turned to.
fn type_words(types: &[(DType, DType)], input: DType) -> String {
    let treated = |&(stored, held): &(DType, DType)| {
        let treatment = match stored == held {
            true if held.is_quantised() => format!(" (w{}a{})", held.bits(), input.bits()),
            true => String::new(),
            false if stored.is_quantised() || held.bits() > stored.bits() => format!(" expanded to {}", word(held)),
            false => format!(" rounded to {}", word(held)),
        };
        (treatment, word(stored))
    };
    let alike = grouped(types.iter().map(treated));
    alike.iter().map(|(treatment, stored)| stored.join(" + ") + treatment).collect::<Vec<_>>().join(" + ")
}

/// Pairs of types, each once.
fn sorted(types: impl Iterator<Item = (DType, DType)>) -> Vec<(DType, DType)> {
    let mut types: Vec<_> = types.collect();
    types.sort_by_key(|(stored, held)| (list_order(*stored), list_order(*held)));
    types.dedup();
    types
}

/// Names kinds of layers of one part: by their blocks alone if these are all kinds in such blocks, of which there are `count`.
fn layer_words(kinds: &[&LayerKind], count: impl Fn(&str) -> usize) -> String {
    let words = |kinds: &[&LayerKind]| {
        let (blocks, names) = (kinds[0].blocks, kinds.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", "));
        match blocks {
            "" => names,
            _ if kinds.len() == count(blocks) => blocks.into(),
            _ => format!("{blocks} ({names})"),
        }
    };
    kinds.chunk_by(|a, b| a.blocks == b.blocks).map(words).collect::<Vec<_>>().join(", ")
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
    use DType::{Bf16, E2m1, E4m3, E5m2, F16, F32};

    /// A layer of parts that are stored and held in these types, a thousand elements each.
    fn layer(name: &str, parts: &[(DType, DType)], input: DType) -> LayerFormat {
        let bytes = |dtype: DType| dtype.bytes(1000) as u64;
        let part = |&(stored, held)| PartFormat { stored, held, stored_bytes: bytes(stored), held_bytes: bytes(held) };
        LayerFormat { name: name.into(), parts: parts.iter().map(part).collect(), input }
    }

    /// The linear layers of a model with two blocks of each sort; `of` tells the parts and the input of each.
    fn model(of: impl Fn(&str) -> (Vec<(DType, DType)>, DType)) -> Formats {
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
        Formats(names.iter().map(|name| (name, of(name))).map(|(name, (parts, input))| layer(name, &parts, input)).collect())
    }

    const PLAIN: &str = "transformer img_in, txt_in, time_in, modulations, final layer: bf16";

    #[test]
    fn a_model_of_one_format_has_one_line() {
        for (stored, held, input, line) in [
            (Bf16, Bf16, Bf16, "all bf16"),
            (Bf16, Bf16, F32, "all bf16"),
            (F16, Bf16, Bf16, "all f16 rounded to bf16"),
            (F32, Bf16, Bf16, "all f32 rounded to bf16"),
            (E4m3, E4m3, F32, "all fp8 (w8a32)"),
            (E5m2, Bf16, Bf16, "all fp8-e5m2 expanded to bf16"),
        ] {
            assert_eq!(model(|_| (vec![(stored, held)], input)).lines(), [line]);
        }
        assert!(Formats::default().lines().is_empty());
    }

    #[test]
    fn kinds_of_the_same_format_share_a_line() {
        let is_block = |name: &str| name.contains("_blocks.");
        let fp8 = |name: &str| if is_block(name) { (vec![(E4m3, E4m3)], E4m3) } else { (vec![(Bf16, Bf16)], Bf16) };
        assert_eq!(model(fp8).lines(), ["transformer double blocks, single blocks: fp8 (w8a8)", PLAIN, "text encoder: bf16"]);

        // A few layers of a kind may have another format, in one stream or in one block.
        let mixed = |name: &str| match name {
            "double_blocks.0.img_attn.qkv.weight" => (vec![(Bf16, Bf16)], Bf16),
            "single_blocks.0.linear2.weight" => (vec![(E2m1, E2m1)], Bf16),
            "single_blocks.1.linear2.weight" => (vec![(E2m1, E2m1)], E2m1),
            _ => fp8(name),
        };
        let want = [
            "transformer double blocks (qkv): 3 fp8 (w8a8), 1 bf16",
            "transformer double blocks (proj, mlp in, mlp out), single blocks (linear1): fp8 (w8a8)",
            "transformer single blocks (linear2): 1 nvfp4 (w4a16), 1 nvfp4 (w4a4)",
            PLAIN,
            "text encoder: bf16",
        ];
        assert_eq!(model(mixed).lines(), want);
    }

    #[test]
    fn layers_in_parts_name_the_format_of_each_once() {
        let encoder = |name: &str| match name {
            "model.layers.0.self_attn.qkv_proj.weight" => vec![(Bf16, Bf16), (E2m1, E2m1), (E4m3, E4m3)],
            "model.layers.1.self_attn.qkv_proj.weight" => vec![(E4m3, E4m3), (E2m1, E2m1), (Bf16, Bf16)],
            _ if name.ends_with("gate_up_proj.weight") => vec![(E4m3, E4m3), (E4m3, E4m3)],
            _ if name.ends_with("down_proj.weight") => vec![(E5m2, Bf16)],
            _ => vec![(Bf16, Bf16)],
        };
        let want = [
            "transformer: bf16",
            "text encoder qkv: fp8 (w8a16) + nvfp4 (w4a16) + bf16",
            "text encoder out: bf16",
            "text encoder gate/up: fp8 (w8a16)",
            "text encoder down: fp8-e5m2 expanded to bf16",
        ];
        assert_eq!(model(|name| (encoder(name), Bf16)).lines(), want);

        let expanded = model(|name| (encoder(name).iter().map(|(stored, _)| (*stored, Bf16)).collect(), Bf16));
        assert_eq!(expanded.lines()[1], "text encoder qkv: fp8 + nvfp4 expanded to bf16 + bf16");

        // Of many formats of one kind only what they are made of is named.
        let mixes = [vec![E4m3], vec![E4m3, E2m1], vec![Bf16, E2m1], vec![E2m1], vec![E4m3]];
        let layers = mixes.iter().enumerate().map(|(i, types)| {
            let parts: Vec<_> = types.iter().map(|dtype| (*dtype, *dtype)).collect();
            layer(&format!("model.layers.{i}.mlp.gate_up_proj.weight"), &parts, Bf16)
        });
        let mixed = Formats(layers.collect());
        assert_eq!(mixed.lines(), ["text encoder: 5 mixes of fp8 (w8a16) + nvfp4 (w4a16) + bf16"]);
        assert_eq!(mixed.by_kind().iter().map(|row| row.layers).collect::<Vec<_>>(), [2, 1, 1, 1]);
    }

    #[test]
    fn rows_count_layers_and_bytes() {
        let formats = Formats(vec![
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
    }
}
