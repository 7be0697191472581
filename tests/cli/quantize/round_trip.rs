//! A written file, read back, has the values that the formulas of its format give for the original.

use super::{At, Observer, builtin, options, target, write};
use common::ops::formats::Codes;
use common::quantized::{Plain, plain_tensors, written};
use common::sandbox::Sandbox;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::config::{ModelDefaults, TextConfig, TransformerConfig, Variant};
use kiln::internals::model::{text_manifest, transformer_manifest};
use kiln::internals::names::{Layout, TensorSpec};
use kiln::internals::tensor::DType::{E2m1 as Nvfp4, E4m3 as Fp8};
use kiln::internals::tensor::nvfp4::{scale_offset, tiles_along};
use kiln::internals::tensor::{DType, Scale, Stored, WeightSlice};
use kiln::internals::tiny;
use kiln::quantize::{ComponentSource, constant_scale};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// All values of a weight.
pub fn values(parts: &[WeightSlice]) -> Vec<f32> {
    let mut values = Vec::new();
    for part in parts {
        let at = values.len();
        values.resize(at + part.rows * part.cols(), 0.0);
        values[at..].chunks_mut(part.cols()).enumerate().for_each(|(row, to)| part.decode(row, to));
    }
    values
}

/// Holds a quantized layer to the formulas: the bytes in the file, and the values that are read from it.
fn check_layer(file: &Shard, layer: &str, cols: usize, format: DType, plain: &[f32], read: &[f32]) {
    let bytes = |suffix: &str| file.bytes(&format!("{layer}.{suffix}")).unwrap_or_else(|| panic!("{layer}.{suffix}"));
    let single = |suffix: &str| f32::from_le_bytes(bytes(suffix)[..].try_into().unwrap());
    let (e4m3, e2m1) = (Codes::of(DType::E4m3), Codes::of(DType::E2m1));
    let largest = plain.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let weight = bytes("weight");
    match format {
        Fp8 => {
            let scale = largest / 448.0;
            assert_eq!(single("weight_scale"), scale, "{layer}");
            for (i, (&value, &code)) in plain.iter().zip(&weight[..]).enumerate() {
                assert_eq!(code, e4m3.encode(f64::from(value / scale)), "{layer} {i}");
                assert_eq!(read[i], e4m3.decode(code) as f32 * scale, "{layer} {i}");
            }
        }
        _ => {
            let (tensor, scales) = (largest / (448.0 * 6.0), bytes("weight_scale"));
            assert_eq!(single("weight_scale_2"), tensor, "{layer}");
            for (i, block) in plain.chunks(16).enumerate() {
                let (row, column) = (i * 16 / cols, i * 16 % cols);
                let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                let scale = e4m3.encode(f64::from((largest / 6.0 / tensor).min(448.0)));
                assert_eq!(scales[scale_offset(row, column / 16, tiles_along(cols))], scale, "{layer} block {i}");
                let unit = tensor * e4m3.decode(scale) as f32;
                for (j, &value) in block.iter().enumerate() {
                    let at = i * 16 + j;
                    let code = weight[at / 2] >> if at % 2 == 0 { 4 } else { 0 } & 15;
                    let multiple = if unit == 0.0 { 0.0 } else { value / unit };
                    assert_eq!(code, e2m1.encode(f64::from(multiple)), "{layer} {at}");
                    assert_eq!(read[at], e2m1.decode(code) as f32 * unit, "{layer} {at}");
                }
            }
        }
    }
}

/// Quantizes a part to a file, and holds every tensor of it to the original. Returns the bytes.
fn check_part(source: &ComponentSource, specs: &[TensorSpec], format: DType, path: &Path) -> Vec<u8> {
    let report = write(source, &options(format, &[]), &target(path, u64::MAX), &Observer::new(At::Never)).unwrap();
    let (part, original) = match source {
        ComponentSource::Transformer(weights, ..) => (Component::Transformer, weights),
        ComponentSource::TextEncoder(weights) => (Component::TextEncoder, weights),
    };
    let (file, written) = (Shard::open(path).unwrap(), Weights::open(part, path).unwrap());
    assert!(written.check(specs).unwrap().is_empty());
    let layers = &report.files[0].layers;
    let mut quantized = 0;
    for spec in specs {
        let (before, after) = (original.weight(spec).unwrap(), written.weight(spec).unwrap());
        // Every piece of a text encoder's stacked layers is a layer of its own, on both sides.
        let pairs: Vec<(Vec<f32>, Vec<f32>, usize)> = if part == Component::Transformer {
            vec![(values(&before.parts), values(&after.parts), before.parts[0].cols())]
        } else {
            let pair = |(before, after): (&WeightSlice, &WeightSlice)| {
                (values(std::slice::from_ref(before)), values(std::slice::from_ref(after)), before.cols())
            };
            before.parts.iter().zip(&after.parts).map(pair).collect()
        };
        let names = kiln::internals::names::spell(part, Layout::Bfl, &spec.name);
        assert_eq!(names.len(), pairs.len());
        for (name, (plain, read, cols)) in names.iter().zip(&pairs) {
            let layer = name.trim_end_matches(".weight");
            match layers.iter().find(|report| report.name == layer) {
                Some(report) => {
                    check_layer(&file, layer, *cols, report.format, plain, read);
                    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
                    let errors = squares(&mut plain.iter().zip(read).map(|(plain, read)| f64::from(*read) - f64::from(*plain)));
                    let error = (errors / squares(&mut plain.iter().map(|value| f64::from(*value)))).sqrt();
                    assert!((report.error() / error - 1.0).abs() < 1e-9, "{layer}: {} {error}", report.error());
                    quantized += 1;
                }
                None => assert_eq!(plain, read, "{layer}"),
            }
        }
        let layer = spec.name.trim_end_matches(".weight");
        let report = layers.iter().find(|report| report.name == layer);
        let constant = report
            .filter(|_| part == Component::Transformer)
            .and_then(|report| constant_scale(spec.layer.unwrap(), report.format));
        assert_eq!(after.input, constant.and_then(Scale::new).map(Stored::fp8), "{layer}");
    }
    assert!(quantized > 0 && quantized <= layers.len(), "{quantized} of {}", layers.len());
    std::fs::read(path).unwrap()
}

/// The two parts of a model in a folder that can be quantized, with the tensors that are read of each.
fn parts(folder: &Path, files: [&str; 2], defaults: &ModelDefaults) -> [(ComponentSource, Vec<TensorSpec>); 2] {
    let open = |part, file: &str| Weights::open(part, &folder.join(file)).unwrap();
    let (transformer, text) = (open(Component::Transformer, files[0]), open(Component::TextEncoder, files[1]));
    let config = TransformerConfig::detect(&transformer, None).unwrap();
    let read = kiln::internals::config::ConfigFile::read(&folder.join("text_encoder/config.json")).ok();
    let text_config = TextConfig::detect(&text, read.as_ref(), defaults).unwrap();
    let specs = [transformer_manifest(&config), text_manifest(&text_config)];
    let sources = [ComponentSource::Transformer(transformer, config, Variant::Distilled), ComponentSource::TextEncoder(text)];
    let [first, second] = specs;
    let [transformer, text] = sources;
    [(transformer, first), (text, second)]
}

/// Writes the tiny model to a folder.
fn tiny_folder(sandbox: &Sandbox, name: &str, layout: Layout, dtype: DType) -> PathBuf {
    let folder = sandbox.path(name);
    tiny::write_to(&folder, layout, dtype, &AtomicBool::new(false)).unwrap();
    folder
}

const DIFFUSERS: [&str; 2] = ["transformer", "text_encoder"];
const BFL: [&str; 2] = ["flux-2-klein-tiny.safetensors", "qwen.safetensors"];

#[test]
fn values_are_those_of_the_formulas_to_the_bit() {
    let sandbox = Sandbox::new();
    let klein = ModelDefaults::klein();
    let split = tiny_folder(&sandbox, "split", Layout::Diffusers, DType::Bf16);
    let fused = tiny_folder(&sandbox, "fused", Layout::Bfl, DType::F32);
    let own = ModelDefaults::read(&builtin().join("kiln.json")).unwrap();
    for format in [Fp8, Nvfp4] {
        for (source, specs) in parts(&builtin(), DIFFUSERS, &own) {
            let part = if matches!(source, ComponentSource::TextEncoder(_)) { "text" } else { "transformer" };
            check_part(&source, &specs, format, &sandbox.path(&format!("builtin-{part}-{}.safetensors", format.label())));
        }
        // Another layout and a wider type hold the same values, and give the same file.
        let [bf16, f32] = [(&split, DIFFUSERS, "a"), (&fused, BFL, "b")].map(|(folder, files, name)| {
            parts(folder, files, &klein).map(|(source, specs)| {
                let part = if matches!(source, ComponentSource::TextEncoder(_)) { "text" } else { "transformer" };
                let path = sandbox.path(&format!("{name}-{part}-{}.safetensors", format.label()));
                check_part(&source, &specs, format, &path)
            })
        });
        assert!(bf16 == f32, "{}", format.label());
    }
}

#[test]
fn bytes_and_errors_do_not_depend_on_the_number_of_threads() {
    let sandbox = Sandbox::new();
    let folder = tiny_folder(&sandbox, "tiny", Layout::Diffusers, DType::F32);
    for format in [Fp8, Nvfp4] {
        let results = [1, 2].map(|threads| {
            let path = sandbox.path(&format!("{threads}-{}.safetensors", format.label()));
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let report = pool.install(|| {
                let source = ComponentSource::open(Component::Transformer, &folder.join("transformer"), None).unwrap();
                write(&source, &options(format, &[]), &target(&path, u64::MAX), &Observer::new(At::Never)).unwrap()
            });
            let errors: Vec<u64> = report.files[0].layers.iter().map(|layer| layer.error().to_bits()).collect();
            (errors, std::fs::read(&path).unwrap())
        });
        assert!(results[0] == results[1], "{}", format.label());
    }
}

/// ComfyUI's encoders of [dev] carry their vocabulary as a tensor of bytes, of any length.
#[test]
fn the_vocabulary_of_a_text_encoder_is_kept() {
    let sandbox = Sandbox::new();
    let mut tensors = plain_tensors(Component::TextEncoder, Layout::Bfl);
    let vocabulary = Plain { name: "tekken_model".into(), dtype: Dtype::U8, shape: vec![7], bytes: b"{\"a\":1}".to_vec() };
    tensors.push(vocabulary.clone());
    std::fs::write(sandbox.path("text.safetensors"), written(&tensors, HashMap::new())).unwrap();
    let source = ComponentSource::open(Component::TextEncoder, &sandbox.path("text.safetensors"), None).unwrap();
    for format in [Fp8, Nvfp4] {
        let out = sandbox.path(&format!("{}.safetensors", format.label()));
        let report = write(&source, &options(format, &[]), &target(&out, 0), &Observer::new(At::Never)).unwrap();
        let (file, weights) = (Shard::open(&out).unwrap(), Weights::open(Component::TextEncoder, &out).unwrap());
        let entry = file.entry("tekken_model").unwrap();
        assert_eq!((entry.dtype.name, &entry.shape[..]), ("U8", &[7][..]));
        assert_eq!(weights.vocabulary().unwrap()[..], vocabulary.bytes[..]);
        // It is neither quantized nor rounded.
        let quantized = report.files[0].layers.len();
        assert_eq!(report.files[0].plain, tensors.len() - 1 - quantized);
    }
}
