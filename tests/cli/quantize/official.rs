//! Files that would be written for the official models have the fingerprints, headers and sizes of the official files.

use common::sha256;
use kiln::internals::component::Component;
use kiln::internals::config::{TransformerConfig, Variant};
use kiln::internals::model::transformer_manifest;
use kiln::internals::tensor::DType::{self, E2m1 as Nvfp4, E4m3 as Fp8};
use kiln::quantize::{FileLayout, LayerSpec, Policy, WeightLayout};

/// The layout of a transformer whose quantised layers all have an input scale.
fn layout(config: &TransformerConfig, variant: Variant, format: DType, keep: &[&str]) -> FileLayout {
    let keep: Vec<String> = keep.iter().map(|pattern| (*pattern).into()).collect();
    let policy = Policy::transformer(config, variant, format, &keep);
    let layer = |spec: kiln::internals::names::TensorSpec| {
        let layer = LayerSpec::new(spec.name, spec.layer, spec.shape, &policy);
        LayerSpec { has_input_scale: layer.format.is_some(), ..layer }
    };
    let layers: Vec<LayerSpec> = transformer_manifest(config).into_iter().map(layer).collect();
    FileLayout::new(Component::Transformer, WeightLayout::Comfy, &layers)
}

/// The SHA-256 of all names, dtypes and shapes as Python prints them.
fn fingerprint(layout: &FileLayout) -> String {
    let tuple = |shape: &[usize]| match shape {
        [only] => format!("({only},)"),
        shape => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let mut tensors: Vec<_> = layout.tensors.iter().collect();
    tensors.sort_by_key(|tensor| &tensor.name);
    let lines: Vec<String> =
        tensors.iter().map(|tensor| format!("{}:('{}', {})", tensor.name, tensor.dtype, tuple(&tensor.shape))).collect();
    sha256::hex(lines.join("\n").as_bytes())
}

#[test]
fn headers_are_those_of_the_official_files() {
    let (small, large) = (TransformerConfig::klein_4b(), TransformerConfig::klein_9b());
    let dev =
        TransformerConfig { hidden: 6144, heads: 48, single_blocks: 48, context: 15_360, guidance_embed: true, ..large.clone() };
    use Variant::{Base, Distilled};
    // Tensors, quantised layers, length of the header, size of the file, and the fingerprint where one was published.
    for (config, variant, format, counts, hash) in [
        (
            &small,
            Distilled,
            Fp8,
            [309, 80, 36_480, 4_070_624_520],
            "2ff21124fb997716c2da1597fab0824dc7bedcaf1aa182ade036e46788b79d6b",
        ),
        (&small, Base, Fp8, [305, 78, 36_096, 4_089_498_488], "ab66231a752c13d876075bd31111ca0e6b28a465d9209b972b84820e587fb5a6"),
        (
            &large,
            Distilled,
            Fp8,
            [425, 112, 50_448, 9_433_061_528],
            "c25cec508eb68835ccd5833bb3a9886a1dea9cfb652ecf98b1ecf4d6d332940d",
        ),
        (&large, Base, Fp8, [417, 108, 49_696, 9_567_278_472], ""),
        (
            &small,
            Distilled,
            Nvfp4,
            [389, 80, 44_968, 2_460_413_488],
            "c6683e31192ed861a3068673e41d89555caacdad2e4a3a7357e5e576dcaea9d6",
        ),
        (&small, Base, Nvfp4, [383, 78, 44_368, 2_487_544_776], ""),
        (
            &large,
            Distilled,
            Nvfp4,
            [531, 110, 62_136, 5_760_960_048],
            "a222d48e4d796bfdb027b0c8e0eb3c8dc655d0901dbe9a7fdab41b434fb036f8",
        ),
        (&large, Base, Nvfp4, [525, 108, 61_416, 5_809_193_808], ""),
        (&dev, Distilled, Nvfp4, [731, 144, 85_312, 21_035_602_376], ""),
        (&dev, Distilled, Fp8, [555, 128, 65_504, 35_455_599_592], ""),
    ] {
        let layout = layout(config, variant, format, &[]);
        let quantised = layout.tensors.iter().filter(|tensor| tensor.name.ends_with(".input_scale")).count() as u64;
        let header = layout.header.len() as u64 - 8;
        let name = format!("{} {variant} {}", config.size(), format.label());
        assert_eq!([layout.tensors.len() as u64, quantised, header, layout.bytes()], counts, "{name}");
        assert_eq!(layout.header[..8], header.to_le_bytes(), "{name}");
        assert!(hash.is_empty() || fingerprint(&layout) == hash, "{name}");
        // Tensors follow each other without a gap.
        let mut at = layout.header.len() as u64;
        for tensor in &layout.tensors {
            assert_eq!(tensor.range.start, at, "{}", tensor.name);
            at = tensor.range.end;
        }
        assert_eq!(at, layout.bytes());
    }
}

#[test]
fn one_more_layer_in_bf16_is_another_file() {
    let config = TransformerConfig::klein_4b();
    let official = layout(&config, Variant::Distilled, Fp8, &[]);
    let kept = layout(&config, Variant::Distilled, Fp8, &["double_blocks.0.*_attn.proj"]);
    assert_ne!(fingerprint(&official), fingerprint(&kept));
    // The base model of the same size keeps those two.
    assert_eq!(fingerprint(&layout(&config, Variant::Base, Fp8, &[])), fingerprint(&kept));
}
