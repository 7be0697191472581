//! The published quantised files: rebuilt from the manifests and from the list of layers that each leaves in BF16, they have the
//! published fingerprints, headers and sizes to the byte; and they are opened.

use super::message;
use common::header::safetensors;
use common::scratch::Scratch;
use common::sha256;
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, TransformerConfig};
use kiln::internals::model::transformer_manifest;
use kiln::internals::names::{Layout, file_tensors};
use kiln::internals::tensor::DType;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;

/// Tensors with their dtypes and shapes, by name.
type Tensors = BTreeMap<String, (&'static str, Vec<usize>)>;

/// The order in which the reference writer groups tensors, with the bytes of an element.
const DTYPES: [(&str, usize); 5] = [("F32", 4), ("BF16", 2), ("F8_E4M3", 1), ("I8", 1), ("U8", 1)];

struct Published {
    tensors: Tensors,
    layers: Vec<String>,
    /// The header as the reference writer writes it.
    header: String,
    data: usize,
}

/// Whether a layer is one of those that files may quantise.
fn is_in_a_block(name: &str) -> bool {
    name.ends_with(".weight") && (name.starts_with("double_blocks.") || name.starts_with("single_blocks."))
}

/// A file in BFL's layout whose block layers are stored in `format`, except those for which `is_kept` is true.
fn published(config: &TransformerConfig, format: &str, is_kept: &dyn Fn(&str) -> bool) -> Published {
    let manifest = transformer_manifest(config);
    let specs = manifest.iter().flat_map(|spec| file_tensors(Component::Transformer, Layout::Bfl, spec));
    let mut tensors: Tensors = specs.map(|spec| (spec.name, ("BF16", spec.shape))).collect();
    let layers: Vec<String> = tensors.keys().filter(|name| is_in_a_block(name) && !format.is_empty()).cloned().collect();
    let layers: Vec<String> = layers.iter().map(|name| name.trim_end_matches(".weight").to_owned()).collect();
    let layers: Vec<String> = layers.into_iter().filter(|layer| !is_kept(layer)).collect();
    for layer in &layers {
        let [rows, cols] = tensors[&format!("{layer}.weight")].1[..] else { panic!("{layer}") };
        let mut add =
            |suffix: &str, dtype, shape: &[usize]| drop(tensors.insert(format!("{layer}.{suffix}"), (dtype, shape.to_vec())));
        match format {
            "float8_e4m3fn" => {
                add("weight", "F8_E4M3", &[rows, cols]);
                add("weight_scale", "F32", &[]);
                add("input_scale", "F32", &[]);
            }
            "nvfp4" => {
                add("weight", "U8", &[rows, cols / 2]);
                add("weight_scale", "F8_E4M3", &[rows, cols / 16]);
                add("weight_scale_2", "F32", &[]);
                add("input_scale", "F32", &[]);
            }
            _ => {
                add("weight", "I8", &[rows, cols]);
                add("weight_scale", "F32", &[]);
                add("comfy_quant", "U8", &[format!(r#"{{"format": "{format}"}}"#).len()]);
            }
        }
    }
    let (header, data) = header(&tensors, &layers, format);
    Published { tensors, layers, header, data }
}

fn header(tensors: &Tensors, layers: &[String], format: &str) -> (String, usize) {
    let mut entries = Vec::new();
    if !layers.is_empty() {
        let list: Vec<String> = layers.iter().map(|layer| format!(r#""{layer}": {{"format": "{format}"}}"#)).collect();
        let text = format!(r#"{{"format_version": "1.0", "layers": {{{}}}}}"#, list.join(", "));
        entries.push(format!(r#""__metadata__":{{"_quantization_metadata":{text:?}}}"#));
    }
    let mut offset = 0;
    for (dtype, size) in DTYPES {
        for (name, (_, shape)) in tensors.iter().filter(|(_, (other, _))| *other == dtype) {
            let end = offset + shape.iter().product::<usize>() * size;
            let shape = format!("{shape:?}").replace(' ', "");
            entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{offset},{end}]}}"#));
            offset = end;
        }
    }
    let header = format!("{{{}}}", entries.join(","));
    let padding = header.len().next_multiple_of(8) - header.len();
    (header + &" ".repeat(padding), offset)
}

/// The SHA-256 of all names, dtypes and shapes as Python prints them.
fn fingerprint(tensors: &Tensors) -> String {
    let tuple = |shape: &[usize]| match shape {
        [only] => format!("({only},)"),
        shape => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let lines: Vec<String> =
        tensors.iter().map(|(name, (dtype, shape))| format!("{name}:('{dtype}', {})", tuple(shape))).collect();
    sha256::hex(lines.join("\n").as_bytes())
}

#[test]
fn published_files_are_rebuilt_to_the_byte() {
    let none = |_: &str| false;
    let is_first = |layer: &str, kinds: &[&str]| {
        layer.strip_prefix("double_blocks.0.").is_some_and(|rest| kinds.iter().any(|kind| rest.ends_with(kind)))
    };
    let first_proj = |layer: &str| is_first(layer, &["_attn.proj"]);
    let first_qkv = |layer: &str| is_first(layer, &["_attn.qkv"]);
    let first_attention = |layer: &str| is_first(layer, &["_attn.qkv", "_attn.proj"]);
    let text_attention = |layer: &str| layer.contains(".txt_attn.");
    let attention = |layer: &str| layer.contains("_attn.");
    let (small, large) = (Configs::KLEIN_4B.transformer, Configs::KLEIN_9B.transformer);
    let dev = TransformerConfig {
        hidden: 6144,
        heads: 48,
        single_blocks: 48,
        context: 15_360,
        guidance_embed: true,
        ..Configs::KLEIN_9B.transformer
    };
    type Row<'a> = (&'a TransformerConfig, &'a str, &'a dyn Fn(&str) -> bool, [usize; 4], &'a str);
    let (fp8, nvfp4) = ("float8_e4m3fn", "nvfp4");
    let rows: [Row<'_>; 13] = [
        (&small, "", &none, [149, 0, 16_552, 7_751_105_712], ""),
        (&large, "", &none, [201, 0, 22_664, 18_157_185_168], ""),
        (
            &small,
            fp8,
            &none,
            [309, 80, 36_480, 4_070_624_520],
            "2ff21124fb997716c2da1597fab0824dc7bedcaf1aa182ade036e46788b79d6b",
        ),
        (
            &small,
            fp8,
            &first_proj,
            [305, 78, 36_096, 4_089_498_488],
            "ab66231a752c13d876075bd31111ca0e6b28a465d9209b972b84820e587fb5a6",
        ),
        (
            &large,
            fp8,
            &none,
            [425, 112, 50_448, 9_433_061_528],
            "c25cec508eb68835ccd5833bb3a9886a1dea9cfb652ecf98b1ecf4d6d332940d",
        ),
        (&large, fp8, &first_attention, [417, 108, 49_696, 9_567_278_472], ""),
        (
            &small,
            nvfp4,
            &none,
            [389, 80, 44_968, 2_460_413_488],
            "c6683e31192ed861a3068673e41d89555caacdad2e4a3a7357e5e576dcaea9d6",
        ),
        (&small, nvfp4, &first_proj, [383, 78, 44_368, 2_487_544_776], ""),
        (
            &large,
            nvfp4,
            &first_qkv,
            [531, 110, 62_136, 5_760_960_048],
            "a222d48e4d796bfdb027b0c8e0eb3c8dc655d0901dbe9a7fdab41b434fb036f8",
        ),
        (&large, nvfp4, &first_attention, [525, 108, 61_416, 5_809_193_808], ""),
        (&dev, nvfp4, &text_attention, [731, 144, 85_312, 21_035_602_376], ""),
        (&dev, fp8, &attention, [555, 128, 65_504, 35_455_599_592], ""),
        (&large, "int8_tensorwise", &none, [425, 112, 51_784, 9_433_065_664], ""),
    ];
    let scratch = Scratch::new();
    for (config, format, is_kept, counts, hash) in rows {
        let file = published(config, format, is_kept);
        let found = [file.tensors.len(), file.layers.len(), file.header.len(), 8 + file.header.len() + file.data];
        assert_eq!(found, counts, "{format}");
        if !hash.is_empty() {
            assert_eq!(fingerprint(&file.tensors), hash, "{format}");
        }
        // A sparse file: the scales, which are all F32 and come first, are one, and everything else is zero.
        let path = scratch.path().join("published.safetensors");
        let mut sparse = File::create(&path).unwrap();
        sparse.write_all(&safetensors(&file.header, &[])).unwrap();
        let scales = file.tensors.values().filter(|(dtype, _)| *dtype == "F32").count();
        sparse.write_all(&1.0_f32.to_le_bytes().repeat(scales)).unwrap();
        sparse.set_len(counts[3] as u64).unwrap();
        drop(sparse);
        let opened = Weights::open(Component::Transformer, &path);
        if format == "int8_tensorwise" {
            let text = message(&opened.unwrap_err());
            assert!(text.contains("tensor `double_blocks.0.img_attn.proj.weight` is INT8"), "{text}");
            continue;
        }
        let weights = opened.unwrap();
        assert_eq!(&TransformerConfig::detect(&weights, None).unwrap(), config);
        let manifest = transformer_manifest(config);
        assert!(weights.check(&manifest).unwrap().is_empty());
        let wanted = if format == nvfp4 { DType::E2m1 } else { DType::E4m3 };
        for spec in manifest {
            let weight = weights.weight(&spec).unwrap();
            let is_quantised = file.layers.iter().any(|layer| spec.name == format!("{layer}.weight"));
            assert_eq!(weight.parts.len(), 1);
            assert_eq!(weight.parts[0].dtype, if is_quantised { wanted } else { DType::Bf16 }, "{}", spec.name);
            assert_eq!(weight.input.map(|input| input.dtype), is_quantised.then_some(wanted), "{}", spec.name);
        }
    }
}

#[test]
fn digests_are_those_of_the_standard() {
    assert_eq!(sha256::hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_eq!(sha256::hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    let long = "a".repeat(1_000_000);
    assert_eq!(sha256::hex(long.as_bytes()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}
