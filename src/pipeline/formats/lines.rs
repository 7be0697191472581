//! The formats in short lines, for display.

use super::{AttentionFormatCount, Formats, KindFormat, LayerKind, Product, grouped, is_quantised_at_load, sorted, word};
use crate::model::PlainInput;
use crate::part::Part;
use crate::tensor::DType;

impl Formats {
    /// The formats in short lines, for display: one line for all kinds of a part that have the same ones, and only one if the
    /// whole model has the same. Attention has a line, too, unless nothing is quantised: then it is as all else.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = self.layer_lines();
        let is_quantised =
            self.layers.iter().flat_map(|layer| &layer.parts).any(|part| part.stored.is_quantised() || part.held.is_quantised());
        if is_quantised && !self.attention.is_empty() {
            lines.push(format!("attention: {}", self.attention_words()));
        }
        lines
    }

    fn layer_lines(&self) -> Vec<String> {
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

    /// The formats of attention: with the number of blocks if they differ.
    fn attention_words(&self) -> String {
        let words = |row: &AttentionFormatCount| match (row.reason, row.heads == row.values) {
            (Some(reason), _) => format!("{} ({reason})", row.heads),
            (None, true) => row.heads.into(),
            (None, false) => format!("q and k {}, v {}", row.heads, row.values),
        };
        match &*self.attention_by_format() {
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
}

impl KindFormat {
    /// The format in words. Layers in parts of several formats have several.
    fn words(&self) -> String {
        type_words(&self.types, self.product)
    }
}

/// The formats of one kind: with counts if there are several. Of many, as in text encoders whose parts are mixed layer by layer,
/// only what they are made of is named.
fn kind_words(rows: &[KindFormat]) -> String {
    const MANY: usize = 4;
    match rows {
        [only] => only.words(),
        [first, ..] if rows.len() >= MANY && rows.iter().all(|row| row.product == first.product) => {
            let layers: usize = rows.iter().map(|row| row.layers).sum();
            let types = sorted(rows.iter().flat_map(|row| row.types.iter().copied()));
            format!("{layers} mixes of {}", type_words(&types, first.product))
        }
        _ => rows.iter().map(|row| format!("{} {}", row.layers, row.words())).collect::<Vec<_>>().join(", "),
    }
}

/// Formats in words: what the files store and, if the backend holds that as it is, the GEMM by the bits of weight and activation;
/// otherwise what it is turned to.
fn type_words(types: &[(DType, DType)], product: Product) -> String {
    let gemm = |weight: DType, input: DType| format!("w{}a{}", weight.bits(), input.bits());
    let quantised = |held: DType| {
        let accumulation = product.sums.map_or(String::new(), |name| format!(", {name} sums"));
        let reason = product.reason().map_or(String::new(), |reason| format!(": {reason}"));
        format!(" ({}{accumulation}{reason})", gemm(held, product.input))
    };
    let treated = |&(stored, held): &(DType, DType)| {
        let treatment = match stored == held {
            true if held.is_quantised() => quantised(held),
            false if is_quantised_at_load(stored, held) => format!(" quantised at load to {}{}", word(held), quantised(held)),
            false if held.is_quantised() => format!(" as {}{}", word(held), quantised(held)),
            true => String::new(),
            false if stored.is_quantised() => {
                let cause = match (product.why, product.reason()) {
                    (Some(PlainInput::Adapter), Some(reason)) => reason.into(),
                    _ if stored == DType::E5m2 => "no GEMM takes it".into(),
                    (Some(PlainInput::File | PlainInput::Parts | PlainInput::Asked), Some(reason)) => {
                        format!("{reason}, no {} GEMM here", gemm(stored, product.input))
                    }
                    (Some(PlainInput::Device), _) => {
                        format!("no {} or {} GEMM here", gemm(stored, stored), gemm(stored, product.input))
                    }
                    _ => format!("no {} GEMM here", gemm(stored, product.input)),
                };
                format!(" expanded to {} ({cause})", word(held))
            }
            false if held.bits() > stored.bits() => format!(" expanded to {}", word(held)),
            false => format!(" rounded to {}", word(held)),
        };
        (treatment, word(stored))
    };
    let alike = grouped(types.iter().map(treated));
    alike.iter().map(|(treatment, stored)| stored.join(" + ") + treatment).collect::<Vec<_>>().join(" + ")
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

#[cfg(test)]
mod tests {
    use super::super::tests::{formats, layer, model};
    use super::*;
    use crate::backend::Fp8Accumulate;
    use crate::model::{BlockFormat, LayerFormat, PlainHeads};
    use DType::{Bf16, E2m1, E4m3, E5m2, F16, F32};

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
            "text encoder down: fp8-e5m2 expanded to bf16 (no GEMM takes it)",
        ];
        assert_eq!(model(|name| (encoder(name), Bf16)).lines(), want);

        let expanded = model(|name| (encoder(name).iter().map(|(stored, _)| (*stored, Bf16)).collect(), Bf16));
        assert_eq!(
            expanded.lines()[1],
            "text encoder qkv: fp8 expanded to bf16 (no w8a16 GEMM here) + nvfp4 expanded to bf16 (no w4a16 GEMM here) + bf16"
        );

        // Of many formats of one kind only what they are made of is named.
        let mixes = [vec![E4m3], vec![E4m3, E2m1], vec![Bf16, E2m1], vec![E2m1], vec![E4m3]];
        let layers = mixes.iter().enumerate().map(|(i, types)| {
            let parts: Vec<_> = types.iter().map(|dtype| (*dtype, *dtype)).collect();
            layer(&format!("model.layers.{i}.mlp.gate_up_proj.weight"), &parts, Bf16)
        });
        let mixed = formats(layers);
        assert_eq!(mixed.lines(), ["text encoder: 5 mixes of fp8 (w8a16) + nvfp4 (w4a16) + bf16"]);
        assert_eq!(mixed.by_kind().iter().map(|row| row.layers).collect::<Vec<_>>(), [2, 1, 1, 1]);
    }

    #[test]
    fn lines_tell_why_inputs_are_plain() {
        let line = |parts: &[(DType, DType)], input: DType, why: PlainInput| {
            let layer = layer("single_blocks.0.linear1.weight", parts, input);
            formats([LayerFormat { why: Some(why), ..layer }]).lines().remove(0)
        };
        let (kept, expanded) = ([(E4m3, E4m3)], [(E4m3, Bf16)]);
        for (parts, input, why, want) in [
            (kept, Bf16, PlainInput::Model, "fp8 (w8a16)"),
            (kept, F32, PlainInput::Precision, "fp8 (w8a32)"),
            (kept, Bf16, PlainInput::File, "fp8 (w8a16: as the file asks)"),
            (kept, Bf16, PlainInput::Parts, "fp8 (w8a16: its parts need different inputs)"),
            (kept, Bf16, PlainInput::Device, "fp8 (w8a16: no GEMM of quantised inputs here)"),
            (expanded, Bf16, PlainInput::Model, "fp8 expanded to bf16 (no w8a16 GEMM here)"),
            (expanded, Bf16, PlainInput::Device, "fp8 expanded to bf16 (no w8a8 or w8a16 GEMM here)"),
            (expanded, Bf16, PlainInput::File, "fp8 expanded to bf16 (as the file asks, no w8a16 GEMM here)"),
            (expanded, Bf16, PlainInput::Parts, "fp8 expanded to bf16 (its parts need different inputs, no w8a16 GEMM here)"),
            ([(E5m2, Bf16)], Bf16, PlainInput::File, "fp8-e5m2 expanded to bf16 (no GEMM takes it)"),
            (expanded, Bf16, PlainInput::Adapter, "fp8 expanded to bf16 (merged with an adapter)"),
            ([(E2m1, E2m1)], Bf16, PlainInput::Asked, "nvfp4 (w4a16: as asked)"),
            ([(E2m1, E2m1)], Bf16, PlainInput::Device, "nvfp4 (w4a16: no GEMM of quantised inputs here)"),
            ([(E2m1, Bf16)], Bf16, PlainInput::Asked, "nvfp4 expanded to bf16 (as asked, no w4a16 GEMM here)"),
        ] {
            assert_eq!(line(&parts, input, why), format!("all {want}"));
        }
        // The reason is one of the layers, so that others of their kind are told apart.
        let layers = [Some(PlainInput::Parts), Some(PlainInput::File)].map(|why| {
            let layer = layer("double_blocks.0.img_attn.qkv.weight", &kept, Bf16);
            LayerFormat { why, ..layer }
        });
        let want = "1 fp8 (w8a16: its parts need different inputs), 1 fp8 (w8a16: as the file asks)";
        assert_eq!(formats(layers).lines(), [format!("transformer: {want}")]);
    }

    #[test]
    fn sums_are_named_by_the_number_of_their_terms() {
        let layers = || {
            let of = |name: &str, inputs: usize| LayerFormat { inputs, ..layer(name, &[(E4m3, E4m3)], E4m3) };
            let plain = layer("model.layers.0.self_attn.o_proj.weight", &[(E4m3, E4m3)], Bf16);
            [of("single_blocks.0.linear1.weight", 6144), of("single_blocks.0.linear2.weight", 6145), plain]
        };
        let lines = |accumulate| Formats { accumulate, ..formats(layers()) }.lines();
        let encoder = "text encoder: fp8 (w8a16)";
        assert_eq!(lines(None), ["transformer: fp8 (w8a8)", encoder]);
        let [fast, exact] = ["fast", "exact"].map(|sums| format!("transformer: fp8 (w8a8, {sums} sums)"));
        assert_eq!(lines(Some(Fp8Accumulate::Fast)), [fast.as_str(), encoder]);
        assert_eq!(lines(Some(Fp8Accumulate::Exact)), [exact.as_str(), encoder]);
        let each = [("linear1", "fast"), ("linear2", "promoted")];
        let each = each.map(|(kind, sums)| format!("transformer single blocks ({kind}): fp8 (w8a8, {sums} sums)"));
        assert_eq!(lines(Some(Fp8Accumulate::Auto)), [&each[0], &each[1], encoder]);
        let reencoded = layer("single_blocks.0.linear1.weight", &[(E2m1, E4m3)], E4m3);
        let reencoded = Formats { accumulate: Some(Fp8Accumulate::Auto), ..formats([reencoded]) };
        assert_eq!(reencoded.lines(), ["all nvfp4 as fp8 (w8a8, fast sums)"]);
        let rows = Formats { accumulate: Some(Fp8Accumulate::Auto), ..formats(layers()) };
        let rows: Vec<_> = rows.by_kind().iter().map(KindFormat::accumulation).collect();
        assert_eq!(rows, [Some("fast"), Some("promoted"), None]);
    }

    #[test]
    fn attention_has_a_line_if_something_is_quantised() {
        let block = |heads, why| BlockFormat { name: "single_blocks.0".into(), heads, values: Bf16, why };
        let fp8 = block(E4m3, None);
        let line = |attention: &[BlockFormat], stored: DType| {
            let layers = formats([layer("single_blocks.0.linear1.weight", &[(stored, stored)], stored)]);
            Formats { attention: attention.into(), ..layers }.lines().into_iter().nth(1)
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
            (&[fp8.clone(), inputs, fp8], "2 blocks q and k fp8, v bf16; 1 block bf16 (made from inputs that are not quantised)"),
        ] {
            assert_eq!(line(attention, E4m3), Some(format!("attention: {want}")));
        }
    }
}
