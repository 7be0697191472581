//! The formats of a model in words: its linear layers by kind, and its attention.

use kiln::{AttentionFormatCount, Component, DType, Formats, KindFormat, LayerRole, PlainHeads, PlainInput};
use std::collections::BTreeSet;

/// The formats in short lines. Kinds of a part with the same formats share a line, and so does a whole model. Attention has a line of
/// its own if anything is quantized.
pub fn format_lines(formats: &Formats) -> Vec<String> {
    let mut lines = layer_lines(&formats.by_kind());
    let mut parts = formats.layers.iter().flat_map(|layer| &layer.parts);
    let is_quantized = parts.any(|part| part.stored.is_quantized() || part.held.is_quantized());
    if is_quantized && !formats.attention.is_empty() {
        lines.push(format!("attention: {}", attention_words(&formats.attention_by_format())));
    }
    lines
}

fn layer_lines(rows: &[KindFormat]) -> Vec<String> {
    let kinds: Vec<(LayerRole, String)> =
        rows.chunk_by(|a, b| a.kind == b.kind).map(|rows| (rows[0].kind, kind_words(rows))).collect();
    if let [(words, _)] = &*grouped(kinds.iter().map(|(kind, words)| (words, kind)))
        && rows.len() == kinds.len()
    {
        return vec![format!("all {words}")];
    }
    let mut lines = Vec::new();
    for part in Component::ALL {
        let kinds: Vec<_> = kinds.iter().filter(|(kind, _)| kind.component() == part).collect();
        let count = |blocks: &str| kinds.iter().filter(|(kind, _)| kind_name(*kind).0 == blocks).count();
        for (words, alike) in grouped(kinds.iter().map(|(kind, words)| (words, kind_name(*kind)))) {
            let layers = if alike.len() == kinds.len() { String::new() } else { format!(" {}", layer_words(&alike, count)) };
            lines.push(format!("{part}{layers}: {words}"));
        }
    }
    lines
}

/// The name of a layer kind: its blocks, if the part has several block types, and its name there.
pub const fn kind_name(kind: LayerRole) -> (&'static str, &'static str) {
    match kind.kind() {
        LayerRole::Qkv(_) => ("double blocks", "qkv"),
        LayerRole::AttentionOut(_) => ("double blocks", "proj"),
        LayerRole::MlpIn(_) => ("double blocks", "mlp in"),
        LayerRole::MlpOut(_) => ("double blocks", "mlp out"),
        LayerRole::Linear1 => ("single blocks", "linear1"),
        LayerRole::Linear2 => ("single blocks", "linear2"),
        LayerRole::ImageIn => ("", "img_in"),
        LayerRole::TextIn => ("", "txt_in"),
        LayerRole::TimeIn => ("", "time_in"),
        LayerRole::GuidanceIn => ("", "guidance_in"),
        LayerRole::ImageModulation => ("", "modulations"),
        LayerRole::FinalModulation => ("", "final layer"),
        LayerRole::EncoderQkv => ("", "qkv"),
        LayerRole::EncoderOut => ("", "out"),
        LayerRole::EncoderGateUp => ("", "gate/up"),
        LayerRole::EncoderDown => ("", "down"),
        _ => ("", "other"),
    }
}

/// The formats of attention, with the number of blocks if blocks differ.
fn attention_words(rows: &[AttentionFormatCount]) -> String {
    let words = |row: &AttentionFormatCount| match (heads_reason(row.why), row.heads == row.values) {
        (Some(reason), _) => format!("{} ({reason})", row.heads.label()),
        (None, true) => row.heads.label().into(),
        (None, false) => format!("q and k {}, v {}", row.heads.label(), row.values.label()),
    };
    match rows {
        [only] => words(only),
        rows => {
            let counted = |row: &AttentionFormatCount| {
                let blocks = if row.blocks == 1 { "block" } else { "blocks" };
                format!("{} {blocks} {}", row.blocks, words(row))
            };
            rows.iter().map(counted).collect::<Vec<_>>().join("; ")
        }
    }
}

/// The formats of one layer kind, with counts if there are several. If there are many, as in text encoders that mix formats layer by
/// layer, only the ingredients are named.
fn kind_words(rows: &[KindFormat]) -> String {
    const MANY: usize = 4;
    let is_alike = |row: &KindFormat| (row.input, row.why, row.sums) == (rows[0].input, rows[0].why, rows[0].sums);
    match rows {
        [only] => type_words(&only.types, only),
        [first, ..] if rows.len() >= MANY && rows.iter().all(is_alike) => {
            let layers: usize = rows.iter().map(|row| row.layers).sum();
            let types = rows.iter().flat_map(|row| row.types.iter().copied()).collect();
            format!("{layers} mixes of {}", type_words(&types, first))
        }
        _ => {
            let counted = |row: &KindFormat| format!("{} {}", row.layers, type_words(&row.types, row));
            rows.iter().map(counted).collect::<Vec<_>>().join(", ")
        }
    }
}

/// Formats in words: the stored format, then the GEMM by the bits of weight and activation if the backend holds it unmodified, or else
/// the format it is converted to. `row` has the format of the inputs.
fn type_words(types: &BTreeSet<(DType, DType)>, row: &KindFormat) -> String {
    let multiplied = |held: DType| {
        let sums = row.sums.map_or(String::new(), |name| format!(", {name} sums"));
        let reason = input_reason(row.why).map_or(String::new(), |reason| format!(": {reason}"));
        format!(" ({}{sums}{reason})", gemm(held, row.input))
    };
    let treated = |(stored, held): (DType, DType)| {
        let label = held.label();
        let treatment = match (stored.is_quantized(), held.is_quantized()) {
            (true, true) if stored == held => multiplied(held),
            (true, true) => format!(" as {label}{}", multiplied(held)),
            (false, true) => format!(" quantized at load to {label}{}", multiplied(held)),
            (true, false) => format!(" expanded to {label} ({})", why_expanded(stored, row)),
            (false, false) if stored == held => String::new(),
            (false, false) if held.bits() > stored.bits() => format!(" expanded to {label}"),
            (false, false) => format!(" rounded to {label}"),
        };
        (treatment, stored.label())
    };
    let alike = grouped(types.iter().copied().map(treated));
    alike.iter().map(|(treatment, stored)| stored.join(" + ") + treatment).collect::<Vec<_>>().join(" + ")
}

/// Names a GEMM by the bits of weight and activation.
fn gemm(weight: DType, input: DType) -> String {
    format!("w{}a{}", weight.bits(), input.bits())
}

/// Why weights that the files store in this format are expanded.
fn why_expanded(stored: DType, row: &KindFormat) -> String {
    let by_input = gemm(stored, row.input);
    match (row.why, input_reason(row.why)) {
        (Some(PlainInput::Adapter), Some(reason)) => reason.into(),
        _ if stored.format().is_expanded => "no GEMM takes it".into(),
        (Some(PlainInput::Device), _) => format!("no {} or {by_input} GEMM here", gemm(stored, stored)),
        (_, Some(reason)) => format!("{reason}, no {by_input} GEMM here"),
        (_, None) => format!("no {by_input} GEMM here"),
    }
}

/// Names layer kinds of one part. If they are all `count` kinds of a block type, the block type alone is enough.
fn layer_words(kinds: &[(&str, &str)], count: impl Fn(&str) -> usize) -> String {
    let words = |kinds: &[(&str, &str)]| {
        let (blocks, names) = (kinds[0].0, kinds.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", "));
        match blocks {
            "" => names,
            _ if kinds.len() == count(blocks) => blocks.into(),
            _ => format!("{blocks} ({names})"),
        }
    };
    kinds.chunk_by(|a, b| a.0 == b.0).map(words).collect::<Vec<_>>().join(", ")
}

/// Why inputs are not quantized, unless the rest of the line says so.
pub const fn input_reason(why: Option<PlainInput>) -> Option<&'static str> {
    match why {
        Some(PlainInput::File) => Some("as the file asks"),
        Some(PlainInput::Parts) => Some("its parts need different inputs"),
        Some(PlainInput::Device) => Some("no GEMM of quantized inputs here"),
        Some(PlainInput::Asked) => Some("as asked"),
        Some(PlainInput::Adapter) => Some("merged with an adapter"),
        // Text encoders always have plain inputs, and in f32 all layers do.
        Some(PlainInput::Model | PlainInput::Precision) | None => None,
    }
}

/// Why queries and keys are not in FP8, unless the rest of the line says so.
pub const fn heads_reason(why: Option<PlainHeads>) -> Option<&'static str> {
    match why {
        Some(PlainHeads::Asked) => Some("as asked"),
        Some(PlainHeads::Device) => Some("no fp8 attention here"),
        Some(PlainHeads::Inputs) => Some("made from inputs that are not quantized"),
        Some(PlainHeads::MaxFree) => Some("fp8 would need a running maximum"),
        // In f32 nothing is quantized.
        Some(PlainHeads::Precision) | None => None,
    }
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

/// The names of formats, each once, in the order in which they are listed.
pub fn words(dtypes: impl IntoIterator<Item = DType>) -> Vec<&'static str> {
    let dtypes: BTreeSet<DType> = dtypes.into_iter().collect();
    dtypes.into_iter().map(|dtype| dtype.label()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{Bf16, E2m1, E4m3, E5m2, F16, F32};
    use kiln::device::Fp8Accumulate;
    use kiln::internals::backend::Weight;
    use kiln::internals::model::{BlockFormat, LayerFormat, PartFormat};
    use kiln::internals::names::LayerId;
    use kiln::internals::names::Stream::{Image, Text};
    use kiln::ops::{Arena, Region};

    /// A layer of one part each that is stored and held in these types, with a thousand inputs.
    fn layer(id: LayerId, parts: &[(DType, DType)], input: DType) -> LayerFormat {
        let part = |&(stored, held)| PartFormat { stored, held, stored_bytes: 0, held_bytes: 0 };
        LayerFormat { id, weight: weight(1000), parts: parts.iter().map(part).collect(), input, why: None, merged: false }
    }

    fn weight(inputs: usize) -> Weight {
        Weight::new(Arena::new(Region::Weights).alloc(1, inputs, Bf16).unwrap())
    }

    fn formats(layers: impl IntoIterator<Item = LayerFormat>) -> Formats {
        Formats { layers: layers.into_iter().collect(), ..Formats::default() }
    }

    /// The linear layers of a model with two blocks of each sort; `of` tells the parts and the input of each.
    fn model(of: impl Fn(LayerId) -> (Vec<(DType, DType)>, DType)) -> Formats {
        use LayerRole::*;
        let encoder = [EncoderQkv, EncoderOut, EncoderGateUp, EncoderDown];
        let double = [Image, Text].map(|stream| [Qkv(stream), AttentionOut(stream), MlpIn(stream), MlpOut(stream)]);
        let blocks = [&encoder[..], &double.concat(), &[Linear1, Linear2]].concat();
        let rest = [TextIn, ImageIn, TimeIn, TimeOut, ImageModulation, SingleModulation, FinalModulation, ImageOut];
        let blocks = (0..2).flat_map(|i| blocks.iter().map(move |role| role.of_block(i)));
        let all = blocks.chain(rest.map(LayerRole::only)).map(|id| (id, of(id)));
        formats(all.map(|(id, (parts, input))| layer(id, &parts, input)))
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
            (E5m2, Bf16, Bf16, "all fp8-e5m2 expanded to bf16 (no GEMM takes it)"),
            (E2m1, E2m1, Bf16, "all nvfp4 (w4a16)"),
            (E2m1, E4m3, E4m3, "all nvfp4 as fp8 (w8a8)"),
        ] {
            assert_eq!(format_lines(&model(|_| (vec![(stored, held)], input))), [line]);
        }
        assert!(format_lines(&Formats::default()).is_empty());
    }

    #[test]
    fn kinds_of_the_same_format_share_a_line() {
        let is_block = |id: LayerId| id.block.is_some() && id.component() == Component::Transformer;
        let fp8 = |id| if is_block(id) { (vec![(E4m3, E4m3)], E4m3) } else { (vec![(Bf16, Bf16)], Bf16) };
        assert_eq!(
            format_lines(&model(fp8)),
            ["transformer double blocks, single blocks: fp8 (w8a8)", PLAIN, "text encoder: bf16"]
        );

        // A few layers of a kind may have another format, in one stream or in one block.
        let mixed = |id: LayerId| match (id.role, id.block) {
            (LayerRole::Qkv(Image), Some(0)) => (vec![(Bf16, Bf16)], Bf16),
            (LayerRole::Linear2, Some(0)) => (vec![(E2m1, E2m1)], Bf16),
            (LayerRole::Linear2, _) => (vec![(E2m1, E2m1)], E2m1),
            _ => fp8(id),
        };
        let want = [
            "transformer double blocks (qkv): 3 fp8 (w8a8), 1 bf16",
            "transformer double blocks (proj, mlp in, mlp out), single blocks (linear1): fp8 (w8a8)",
            "transformer single blocks (linear2): 1 nvfp4 (w4a16), 1 nvfp4 (w4a4)",
            PLAIN,
            "text encoder: bf16",
        ];
        assert_eq!(format_lines(&model(mixed)), want);
    }

    #[test]
    fn layers_in_parts_name_the_format_of_each_once() {
        let encoder = |id: LayerId| match (id.role, id.block) {
            (LayerRole::EncoderQkv, Some(0)) => vec![(Bf16, Bf16), (E2m1, E2m1), (E4m3, E4m3)],
            (LayerRole::EncoderQkv, _) => vec![(E4m3, E4m3), (E2m1, E2m1), (Bf16, Bf16)],
            (LayerRole::EncoderGateUp, _) => vec![(E4m3, E4m3), (E4m3, E4m3)],
            (LayerRole::EncoderDown, _) => vec![(E5m2, Bf16)],
            _ => vec![(Bf16, Bf16)],
        };
        let want = [
            "transformer: bf16",
            "text encoder qkv: fp8 (w8a16) + nvfp4 (w4a16) + bf16",
            "text encoder out: bf16",
            "text encoder gate/up: fp8 (w8a16)",
            "text encoder down: fp8-e5m2 expanded to bf16 (no GEMM takes it)",
        ];
        assert_eq!(format_lines(&model(|id| (encoder(id), Bf16))), want);

        let expanded = model(|id| (encoder(id).iter().map(|(stored, _)| (*stored, Bf16)).collect(), Bf16));
        assert_eq!(
            format_lines(&expanded)[1],
            "text encoder qkv: fp8 expanded to bf16 (no w8a16 GEMM here) + nvfp4 expanded to bf16 (no w4a16 GEMM here) + bf16"
        );

        // If a kind has many formats, only their ingredients are named.
        let mixes = [vec![E4m3], vec![E4m3, E2m1], vec![Bf16, E2m1], vec![E2m1], vec![E4m3]];
        let layers = mixes.iter().enumerate().map(|(i, types)| {
            let parts: Vec<_> = types.iter().map(|dtype| (*dtype, *dtype)).collect();
            layer(LayerRole::EncoderGateUp.of_block(i), &parts, Bf16)
        });
        let mixed = formats(layers);
        assert_eq!(format_lines(&mixed), ["text encoder: 5 mixes of fp8 (w8a16) + nvfp4 (w4a16) + bf16"]);
        assert_eq!(mixed.by_kind().iter().map(|row| row.layers).collect::<Vec<_>>(), [2, 1, 1, 1]);
    }

    #[test]
    fn lines_tell_why_inputs_are_plain() {
        let line = |parts: &[(DType, DType)], input: DType, why: PlainInput| {
            let layer = layer(LayerRole::Linear1.of_block(0), parts, input);
            format_lines(&formats([LayerFormat { why: Some(why), ..layer }])).remove(0)
        };
        let (kept, expanded) = ([(E4m3, E4m3)], [(E4m3, Bf16)]);
        for (parts, input, why, want) in [
            (kept, Bf16, PlainInput::Model, "fp8 (w8a16)"),
            (kept, F32, PlainInput::Precision, "fp8 (w8a32)"),
            (kept, Bf16, PlainInput::File, "fp8 (w8a16: as the file asks)"),
            (kept, Bf16, PlainInput::Parts, "fp8 (w8a16: its parts need different inputs)"),
            (kept, Bf16, PlainInput::Device, "fp8 (w8a16: no GEMM of quantized inputs here)"),
            (expanded, Bf16, PlainInput::Model, "fp8 expanded to bf16 (no w8a16 GEMM here)"),
            (expanded, Bf16, PlainInput::Device, "fp8 expanded to bf16 (no w8a8 or w8a16 GEMM here)"),
            (expanded, Bf16, PlainInput::File, "fp8 expanded to bf16 (as the file asks, no w8a16 GEMM here)"),
            (expanded, Bf16, PlainInput::Parts, "fp8 expanded to bf16 (its parts need different inputs, no w8a16 GEMM here)"),
            ([(E5m2, Bf16)], Bf16, PlainInput::File, "fp8-e5m2 expanded to bf16 (no GEMM takes it)"),
            (expanded, Bf16, PlainInput::Adapter, "fp8 expanded to bf16 (merged with an adapter)"),
            ([(E2m1, E2m1)], Bf16, PlainInput::Asked, "nvfp4 (w4a16: as asked)"),
            ([(E2m1, E2m1)], Bf16, PlainInput::Device, "nvfp4 (w4a16: no GEMM of quantized inputs here)"),
            ([(E2m1, Bf16)], Bf16, PlainInput::Asked, "nvfp4 expanded to bf16 (as asked, no w4a16 GEMM here)"),
        ] {
            assert_eq!(line(&parts, input, why), format!("all {want}"));
        }
        // Each layer has its own reason, so layers of one kind can differ in it.
        let layers = [Some(PlainInput::Parts), Some(PlainInput::File)].map(|why| {
            let layer = layer(LayerRole::Qkv(Image).of_block(0), &kept, Bf16);
            LayerFormat { why, ..layer }
        });
        let want = "1 fp8 (w8a16: its parts need different inputs), 1 fp8 (w8a16: as the file asks)";
        assert_eq!(format_lines(&formats(layers)), [format!("transformer: {want}")]);
    }

    #[test]
    fn sums_are_named_by_the_number_of_their_terms() {
        let layers = || {
            let of = |role: LayerRole, inputs| LayerFormat {
                weight: weight(inputs),
                ..layer(role.of_block(0), &[(E4m3, E4m3)], E4m3)
            };
            let plain = layer(LayerRole::EncoderOut.of_block(0), &[(E4m3, E4m3)], Bf16);
            [of(LayerRole::Linear1, 6144), of(LayerRole::Linear2, 6145), plain]
        };
        let lines = |accumulate| format_lines(&Formats { accumulate, ..formats(layers()) });
        let encoder = "text encoder: fp8 (w8a16)";
        assert_eq!(lines(None), ["transformer: fp8 (w8a8)", encoder]);
        let [fast, exact] = ["fast", "exact"].map(|sums| format!("transformer: fp8 (w8a8, {sums} sums)"));
        assert_eq!(lines(Some(Fp8Accumulate::Fast)), [fast.as_str(), encoder]);
        assert_eq!(lines(Some(Fp8Accumulate::Exact)), [exact.as_str(), encoder]);
        let each = [("linear1", "fast"), ("linear2", "promoted")];
        let each = each.map(|(kind, sums)| format!("transformer single blocks ({kind}): fp8 (w8a8, {sums} sums)"));
        assert_eq!(lines(Some(Fp8Accumulate::Auto)), [&each[0], &each[1], encoder]);
        let reencoded = layer(LayerRole::Linear1.of_block(0), &[(E2m1, E4m3)], E4m3);
        let reencoded = Formats { accumulate: Some(Fp8Accumulate::Auto), ..formats([reencoded]) };
        assert_eq!(format_lines(&reencoded), ["all nvfp4 as fp8 (w8a8, fast sums)"]);
        let rows = Formats { accumulate: Some(Fp8Accumulate::Auto), ..formats(layers()) };
        let rows: Vec<_> = rows.by_kind().iter().map(|row| row.sums).collect();
        assert_eq!(rows, [Some("fast"), Some("promoted"), None]);
    }

    #[test]
    fn attention_has_a_line_if_something_is_quantized() {
        let block = |heads, why| BlockFormat { name: "single_blocks.0".into(), heads, values: Bf16, why };
        let fp8 = block(E4m3, None);
        let line = |attention: &[BlockFormat], stored: DType| {
            let layers = formats([layer(LayerRole::Linear1.of_block(0), &[(stored, stored)], stored)]);
            format_lines(&Formats { attention: attention.into(), ..layers }).into_iter().nth(1)
        };
        let asked = block(Bf16, Some(PlainHeads::Asked));
        assert_eq!(line(std::slice::from_ref(&asked), Bf16), None);
        let inputs = block(Bf16, Some(PlainHeads::Inputs));
        let max_free = block(Bf16, Some(PlainHeads::MaxFree));
        for (attention, want) in [
            (&[fp8.clone(), fp8.clone()][..], "q and k fp8, v bf16"),
            (&[asked], "bf16 (as asked)"),
            (&[block(Bf16, Some(PlainHeads::Device))], "bf16 (no fp8 attention here)"),
            (&[BlockFormat { values: F32, ..block(F32, Some(PlainHeads::Precision)) }], "f32"),
            (
                &[max_free.clone(), fp8.clone(), max_free],
                "2 blocks bf16 (fp8 would need a running maximum); 1 block q and k fp8, v bf16",
            ),
            (&[fp8.clone(), inputs, fp8], "2 blocks q and k fp8, v bf16; 1 block bf16 (made from inputs that are not quantized)"),
        ] {
            assert_eq!(line(attention, E4m3), Some(format!("attention: {want}")));
        }
    }
}
