//! Quantized layers in every file form. Their values equal those of a decoder written from the format definitions, and the
//! stored input of a layer follows the file.

use super::written::{Written, padded};
use super::{described, shard, zeros};
use common::ops::formats::{Codes, tiled, unit};
use common::random::Random;
use common::scratch::Scratch;
use kiln::internals::checkpoint::{StoredWeight, Weights};
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, ModelDefaults, TextConfig, TransformerConfig};
use kiln::internals::model::{text_manifest, transformer_manifest};
use kiln::internals::names::{Layout, TensorSpec, file_tensors};
use kiln::internals::tensor::{DType, Nvfp4Layout, Scale, Stored};

const QKV: &str = "double_blocks.0.img_attn.qkv";
const FP8: &str = r#"{"format": "float8_e4m3fn"}"#;
const NVFP4: &str = r#"{"format": "nvfp4"}"#;

/// An NVFP4 weight with random codes and scales.
struct Nvfp4 {
    size: [usize; 2],
    codes: Vec<u8>,
    scales: Vec<u8>,
    tensor: f32,
    layout: Nvfp4Layout,
}

impl Nvfp4 {
    fn new(seed: u64, size: [usize; 2], layout: Nvfp4Layout) -> Self {
        let mut random = Random::new(seed);
        let [rows, blocks] = [size[0], size[1] / 16];
        let codes = (0..rows * blocks * 8).map(|_| random.next() as u8).collect();
        let [down, along] = if layout.tiled { padded([rows, blocks]) } else { [rows, blocks] };
        let mut scales = vec![0; down * along];
        for row in 0..rows {
            for block in 0..blocks {
                let at = if layout.tiled { tiled(row, block, blocks) } else { row * blocks + block };
                scales[at] = 1 + random.below(0x7e) as u8;
            }
        }
        Self { size, codes, scales, tensor: 4.940_941_3e-5, layout }
    }

    fn add(&self, file: &mut Written, layer: &str) {
        file.nvfp4(layer, self.size, &self.codes, &self.scales, self.tensor);
    }

    fn values(&self) -> Vec<f32> {
        let [rows, cols] = self.size;
        let value = |row: usize, col: usize| {
            let byte = self.codes[row * cols / 2 + col / 2];
            let code = if col.is_multiple_of(2) == self.layout.high_first { byte >> 4 } else { byte & 15 };
            let block = col / 16;
            let at = if self.layout.tiled { tiled(row, block, cols / 16) } else { row * (cols / 16) + block };
            Codes::of(DType::E2m1).decode(code) as f32 * unit(self.tensor, self.scales[at])
        };
        (0..rows * cols).map(|i| value(i / cols, i % cols)).collect()
    }
}

/// Random FP8 codes that are finite in both FP8 types.
fn codes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.next() as u8 & 0xfb).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn weight(weights: &Weights, name: &str, shape: &[usize]) -> StoredWeight {
    weights.weight(&TensorSpec::new(name, shape)).unwrap()
}

fn values(weight: &StoredWeight) -> Vec<f32> {
    let mut all = Vec::new();
    for part in &weight.parts {
        let mut row = vec![0.0; part.cols()];
        for i in 0..part.rows {
            part.decode(i, &mut row);
            all.extend_from_slice(&row);
        }
    }
    all
}

fn scaled(codes: &[u8], dtype: DType, scale: f32) -> Vec<f32> {
    codes.iter().map(|&code| Codes::of(dtype).decode(code) as f32 * scale).collect()
}

fn fp8_input(scale: f32) -> Option<Stored> {
    Some(Stored::fp8(Scale::new(scale).unwrap()))
}

#[test]
fn fp8_layers_of_every_transport() {
    let (rows, cols) = (6, 20);
    let codes = codes(1, rows * cols);
    let name = |suffix: &str| format!("{QKV}.{suffix}");
    let declare = |file: &mut Written| file.declare(&[(QKV, FP8)]);
    let settings = |text: &'static str| move |file: &mut Written| file.settings(QKV, text);
    let marker = |elements: usize| move |file: &mut Written| file.add("scaled_fp8", "F8_E4M3", &[elements], vec![0; elements]);
    let scale = |file: &mut Written| file.scale(&name("weight_scale"), 0.3);
    let scales = |file: &mut Written| {
        file.scale(&name("weight_scale"), 0.3);
        file.scale(&name("input_scale"), 0.07);
    };
    let old_scales = |input: f32| {
        move |file: &mut Written| {
            file.scale(&name("scale_weight"), 0.3);
            file.scale(&name("scale_input"), input);
        }
    };
    let full_precision = settings(r#"{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}"#);
    let half = |element, shape: &'static [usize], bytes: [u8; 2]| {
        move |file: &mut Written| file.add(&name("weight_scale"), element, shape, bytes)
    };
    type Changes<'a> = &'a [&'a dyn Fn(&mut Written)];
    let cases: [(&str, Changes<'_>, f32, Option<Stored>); 13] = [
        ("metadata", &[&declare, &scales], 0.3, fp8_input(0.07)),
        ("metadata without a scale of the input", &[&declare, &scale], 0.3, fp8_input(1.0)),
        ("settings", &[&settings(FP8), &scales], 0.3, fp8_input(0.07)),
        (
            "metadata and settings that agree",
            &[&declare, &settings(r#"{"format":"float8_e4m3fn","group_size":null}"#), &scale],
            0.3,
            fp8_input(1.0),
        ),
        ("full precision", &[&full_precision, &scales], 0.3, None),
        ("marker", &[&marker(0), &old_scales(0.07)], 0.3, fp8_input(0.07)),
        (
            "marker and a scale of one",
            &[&|file| file.add("scaled_fp8", "F32", &[1], [0; 4]), &old_scales(1.0)],
            0.3,
            fp8_input(1.0),
        ),
        ("marker for full precision", &[&marker(2), &old_scales(0.07)], 0.3, None),
        ("no scales", &[], 1.0, None),
        ("scales that nothing declares", &[&scales], 0.3, fp8_input(0.07)),
        ("a scale that nothing declares", &[&scale], 0.3, None),
        ("BF16", &[&half("BF16", &[1], [0x80, 0x3e])], 0.25, None),
        ("F16", &[&half("F16", &[], [0x00, 0x34])], 0.25, None),
    ];
    for (what, changes, scale, input) in cases {
        let mut file = Written::default();
        changes.iter().for_each(|change| change(&mut file));
        file.add(&name("weight"), "F8_E4M3", &[rows, cols], codes.clone());
        let weights = file.open(Component::Transformer).unwrap();
        assert_eq!(weights.shape(&name("weight")).unwrap(), [rows, cols], "{what}");
        let found = weight(&weights, &name("weight"), &[rows, cols]);
        assert_eq!(found.parts[0].dtype, DType::E4m3, "{what}");
        assert_eq!(bits(&values(&found)), bits(&scaled(&codes, DType::E4m3, scale)), "{what}");
        assert_eq!(found.input, input, "{what}");
        weights.check_scales(&name("weight")).unwrap();
    }
}

#[test]
fn rows_may_have_scales_of_their_own() {
    let (rows, cols) = (6, 20);
    let codes = codes(2, rows * cols);
    let scales: Vec<f32> = (1..=rows).map(|row| row as f32 / 7.0).collect();
    let stored: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let want: Vec<f32> = codes.chunks(cols).zip(&scales).flat_map(|(row, &scale)| scaled(row, DType::E4m3, scale)).collect();
    for shape in [&[rows][..], &[rows, 1]] {
        let mut file = Written::default();
        // An odd number of preceding bytes, so that the scales are not aligned.
        file.settings(QKV, FP8);
        file.add(&format!("{QKV}.weight_scale"), "F32", shape, stored.clone());
        file.add(&format!("{QKV}.weight"), "F8_E4M3", &[rows, cols], codes.clone());
        let found = weight(&file.open(Component::Transformer).unwrap(), &format!("{QKV}.weight"), &[rows, cols]);
        assert_eq!(bits(&values(&found)), bits(&want));
    }
    // The halves of the final modulation are in the other order in diffusers' files.
    let mut file = Written::default();
    file.add("norm_out.linear.weight", "F8_E4M3", &[rows, cols], codes);
    file.add("norm_out.linear.weight_scale", "F32", &[rows], stored);
    let weights = file.open(Component::Transformer).unwrap();
    let found = weight(&weights, "final_layer.adaLN_modulation.1.weight", &[rows, cols]);
    let (first, second) = want.split_at(want.len() / 2);
    assert_eq!(bits(&values(&found)), bits(&[second, first].concat()));
}

#[test]
fn all_tensors_may_be_fp8_without_scales() {
    let manifest = transformer_manifest(&Configs::TINY.transformer);
    for (element, dtype) in [("F8_E4M3", DType::E4m3), ("F8_E5M2", DType::E5m2)] {
        let mut file = Written::default();
        for (i, spec) in manifest.iter().flat_map(|spec| file_tensors(Component::Transformer, Layout::Bfl, spec)).enumerate() {
            file.add(&spec.name, element, &spec.shape, codes(i as u64, spec.shape.iter().product()));
        }
        let weights = file.open(Component::Transformer).unwrap();
        assert_eq!(TransformerConfig::detect(&weights, None).unwrap(), Configs::TINY.transformer);
        assert!(weights.check(&manifest).unwrap().is_empty());
        for spec in &manifest {
            let found = weights.weight(spec).unwrap();
            assert_eq!((found.parts[0].dtype, found.input), (dtype, None), "{}", spec.name);
            let stored = &file.tensor(&spec.name).1;
            assert_eq!(bits(&values(&found)), bits(&scaled(stored, dtype, 1.0)), "{}", spec.name);
        }
    }
}

/// A way to write a file with one NVFP4 layer.
struct Nvfp4File {
    layer: &'static str,
    canonical: &'static str,
    change: fn(&mut Written),
    layout: Nvfp4Layout,
    forced: Option<Nvfp4Layout>,
}

#[test]
fn nvfp4_layers_of_every_layout() {
    const PROJ: &str = "double_blocks.0.img_attn.proj";
    const OUT: &str = "transformer_blocks.0.attn.to_out.0";
    const DOWN: &str = "model.layers.0.mlp.down_proj";
    let modelopt = |file: &mut Written| file.note("quantization_config", "{}");
    // Both declarations say the same.
    let declared_twice = |file: &mut Written| {
        file.declare(&[(PROJ, NVFP4)]);
        file.settings(PROJ, r#"{"format":"nvfp4","full_precision_matrix_mult":false}"#);
    };
    let declared_by_modelopt = |file: &mut Written| {
        file.declare(&[(OUT, NVFP4)]);
        file.note("quantization_config", "{}");
    };
    let declared_with_layout = |file: &mut Written| {
        file.declare(&[(PROJ, NVFP4)]);
        file.note("nvfp4_layout", "modelopt-single");
    };
    let (comfy, plain, single) = (Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE);
    let case = |layer, canonical, change, layout| Nvfp4File { layer, canonical, change, layout, forced: None };
    let forced = |layer, canonical, change, layout| Nvfp4File { layer, canonical, change, layout, forced: Some(layout) };
    let cases = [
        case(PROJ, PROJ, |file| file.declare(&[(PROJ, NVFP4)]), comfy),
        case(PROJ, PROJ, |file| file.settings(PROJ, NVFP4), comfy),
        case(PROJ, PROJ, declared_twice, comfy),
        case(PROJ, PROJ, |_| (), comfy),
        case(OUT, PROJ, |file| file.settings(OUT, NVFP4), comfy),
        case(OUT, PROJ, |file| file.declare(&[(OUT, NVFP4)]), comfy),
        case(OUT, PROJ, |_| (), plain),
        case(OUT, PROJ, modelopt, plain),
        case(PROJ, PROJ, modelopt, single),
        case(OUT, PROJ, declared_by_modelopt, single),
        // A file's statement takes precedence over its other contents.
        case(PROJ, PROJ, |file| file.note("nvfp4_layout", "modelopt"), plain),
        case(OUT, PROJ, |file| file.note("nvfp4_layout", "comfy"), comfy),
        case(PROJ, PROJ, declared_with_layout, single),
        case(DOWN, DOWN, |file| file.settings(DOWN, NVFP4), comfy),
        case(DOWN, DOWN, |_| (), plain),
        forced(PROJ, PROJ, |file| file.note("nvfp4_layout", "modelopt"), comfy),
        forced(PROJ, PROJ, |file| file.declare(&[(PROJ, NVFP4)]), plain),
        forced(PROJ, PROJ, |_| (), single),
        forced(OUT, PROJ, |_| (), comfy),
    ];
    for (i, Nvfp4File { layer, canonical, change, layout, forced }) in cases.into_iter().enumerate() {
        // Whole tiles, parts of one in both directions, and less than one.
        for size in [[128, 64], [144, 80], [4, 32]] {
            for element in ["F8_E4M3", "U8"] {
                let part = if layer == DOWN { Component::TextEncoder } else { Component::Transformer };
                let weight_of = Nvfp4::new(i as u64, size, layout);
                let mut file = Written::default();
                change(&mut file);
                weight_of.add(&mut file, layer);
                file.tensor(&format!("{layer}.weight_scale")).0.1 = element;
                file.scale(&format!("{layer}.input_scale"), 0.02);
                let weights = file.open(part).unwrap().with_nvfp4_layout(forced);
                let name = format!("{canonical}.weight");
                assert_eq!(weights.shape(&name).unwrap(), size);
                let found = weight(&weights, &name, &size);
                assert_eq!(bits(&values(&found)), bits(&weight_of.values()), "{i} {size:?}");
                // Text encoders never quantize their activations.
                let input = Stored::nvfp4(Scale::new(0.02).unwrap());
                assert_eq!(found.input, (part == Component::Transformer).then_some(input), "{i}");
                weights.check_scales(&name).unwrap();
                // Without a scale the input stays plain.
                file.remove(&format!("{layer}.input_scale"));
                assert_eq!(weight(&file.open(part).unwrap().with_nvfp4_layout(forced), &name, &size).input, None);
            }
        }
    }
}

#[test]
fn parts_of_one_weight_may_have_formats_of_their_own() {
    let cols = 64;
    let layer = |letter: &str| format!("transformer_blocks.0.attn.to_{letter}");
    let (query, value) = (codes(3, 128 * cols), Nvfp4::new(4, [128, cols], Nvfp4Layout::COMFY));
    let mut file = Written::default();
    file.settings(&layer("q"), FP8);
    file.scale(&format!("{}.weight_scale", layer("q")), 0.3);
    file.add(&format!("{}.weight", layer("q")), "F8_E4M3", &[128, cols], query.clone());
    file.add(&format!("{}.weight", layer("k")), "BF16", &[128, cols], [0x80, 0x3f].repeat(128 * cols));
    file.settings(&layer("v"), NVFP4);
    value.add(&mut file, &layer("v"));
    file.scale(&format!("{}.input_scale", layer("v")), 1.0);
    let spec = TensorSpec::stacked(format!("{QKV}.weight"), &[128; 3], cols);
    let weights = file.open(Component::Transformer).unwrap();
    assert_eq!(weights.shape(&spec.name).unwrap(), spec.shape);
    let found = weights.weight(&spec).unwrap();
    assert_eq!(found.parts.iter().map(|part| part.dtype).collect::<Vec<_>>(), [DType::E4m3, DType::Bf16, DType::E2m1]);
    let want = [scaled(&query, DType::E4m3, 0.3), vec![1.0; 128 * cols], value.values()].concat();
    assert_eq!(bits(&values(&found)), bits(&want));
    assert_eq!(found.input, None, "the parts do not agree");
    weights.check_scales(&spec.name).unwrap();

    // Three FP8 parts agree, or differ in the scale of the input.
    for (scales, input) in [([0.5; 3], fp8_input(0.5)), ([0.5, 0.5, 0.25], None)] {
        let mut file = Written::default();
        for (letter, scale) in ["q", "k", "v"].into_iter().zip(scales) {
            file.scale(&format!("{}.weight_scale", layer(letter)), 0.3);
            file.scale(&format!("{}.input_scale", layer(letter)), scale);
            file.add(&format!("{}.weight", layer(letter)), "F8_E4M3", &[128, cols], query.clone());
        }
        assert_eq!(file.open(Component::Transformer).unwrap().weight(&spec).unwrap().input, input);
    }
}

#[test]
fn halves_of_nvfp4_weights_take_their_scales_along() {
    for (layout, rows, is_cut) in [
        (Nvfp4Layout::COMFY, 256, true),
        (Nvfp4Layout::MODELOPT_SINGLE, 512, true),
        (Nvfp4Layout::MODELOPT, 10, true),
        (Nvfp4Layout::COMFY, 128, false),
    ] {
        let stored = Nvfp4::new(5, [rows, 80], layout);
        let mut file = Written::default();
        stored.add(&mut file, "norm_out.linear");
        let weights = file.open(Component::Transformer).unwrap().with_nvfp4_layout(Some(layout));
        let spec = TensorSpec::new("final_layer.adaLN_modulation.1.weight", &[rows, 80]);
        match weights.weight(&spec) {
            Ok(found) if is_cut => {
                let want = stored.values();
                let (first, second) = want.split_at(want.len() / 2);
                assert_eq!(bits(&values(&found)), bits(&[second, first].concat()));
            }
            Err(error) if !is_cut => {
                let text = super::message(&error);
                let what = "tensor `norm_out.linear.weight` has 128 rows, and half of them is no multiple of 128";
                assert!(text.contains(what), "{text}");
            }
            other => panic!("{rows}: {other:?}"),
        }
    }
}

#[test]
fn prefixes_are_seen_through_and_other_parts_passed_over() {
    let (codes, prefix) = (codes(6, 128 * 64), "model.diffusion_model.");
    let down = "text_encoders.qwen3_8b.transformer.model.layers.3.mlp.down_proj";
    let stored = Nvfp4::new(7, [128, 64], Nvfp4Layout::COMFY);
    // Metadata may spell layers with the prefix or without.
    for declared in [format!("{prefix}{QKV}"), QKV.into()] {
        let mut file = Written::default();
        file.declare(&[(&declared, FP8), (down, NVFP4), ("vae.decoder.conv_in", r#"{"format": "mxfp8"}"#)]);
        file.add(&format!("{prefix}{QKV}.weight"), "F8_E4M3", &[128, 64], codes.clone());
        file.scale(&format!("{prefix}{QKV}.weight_scale"), 0.3);
        file.add("vae.decoder.conv_in.weight", "F8_E4M3", &[8, 4, 3, 3], vec![0; 288]);
        stored.add(&mut file, down);
        let found = weight(&file.open(Component::Transformer).unwrap(), &format!("{QKV}.weight"), &[128, 64]);
        assert_eq!(bits(&values(&found)), bits(&scaled(&codes, DType::E4m3, 0.3)));
        assert_eq!(found.input, fp8_input(1.0));
        let name = "model.layers.3.mlp.down_proj.weight";
        let encoder = file.open(Component::TextEncoder).unwrap();
        assert_eq!(bits(&values(&weight(&encoder, name, &[128, 64]))), bits(&stored.values()));
        let text = super::message(&file.open(Component::Vae).unwrap_err());
        assert!(text.contains("tensor `vae.decoder.conv_in.weight` is MXFP8"), "{text}");
    }
    // A marker applies to the component that its prefix names.
    let mut file = Written::default();
    file.add(&format!("{prefix}scaled_fp8"), "F8_E4M3", &[0], []);
    file.add(&format!("{prefix}{QKV}.weight"), "F8_E4M3", &[128, 64], codes);
    file.scale(&format!("{prefix}{QKV}.scale_weight"), 0.3);
    assert_eq!(weight(&file.open(Component::Transformer).unwrap(), &format!("{QKV}.weight"), &[128, 64]).input, fp8_input(1.0));
}

#[test]
fn weights_at_odd_offsets_and_scales_in_another_file() {
    let stored: Vec<Nvfp4> = (0..3).map(|i| Nvfp4::new(20 + i, [128, 64], Nvfp4Layout::COMFY)).collect();
    let layer = |i: usize| format!("double_blocks.{i}.img_attn.proj");
    // The reference writer sorts settings between the elements.
    let mut file = Written::default();
    for (i, weight) in stored.iter().enumerate() {
        file.settings(&layer(i), NVFP4);
        weight.add(&mut file, &layer(i));
    }
    file.tensors.sort_by_key(|((name, element, _), _)| (*element == "U8", *element, name.clone()));
    let opened = file.shard();
    let odd = (0..3).filter(|&i| opened.entry(&format!("{}.weight", layer(i))).unwrap().range.start % 2 == 1).count();
    assert!(odd > 0);
    // Every other tensor is in a second file.
    let mut files = [Written::default(), Written::default()];
    for (i, tensor) in file.tensors.iter().enumerate() {
        files[i % 2].tensors.push(tensor.clone());
    }
    let split = Weights::from_shards(Component::Transformer, files.iter().map(Written::shard).collect()).unwrap();
    for weights in [file.open(Component::Transformer).unwrap(), split] {
        for (i, stored) in stored.iter().enumerate() {
            let name = format!("{}.weight", layer(i));
            assert_eq!(bits(&values(&weight(&weights, &name, &[128, 64]))), bits(&stored.values()));
            weights.check_scales(&name).unwrap();
        }
    }
}

/// A whole transformer of the tiny model in BFL's layout, with block layers alternating between NVFP4 and FP8.
fn mixed_transformer() -> Written {
    let mut file = Written::default();
    let manifest = transformer_manifest(&Configs::TINY.transformer);
    for (i, spec) in manifest.iter().flat_map(|spec| file_tensors(Component::Transformer, Layout::Bfl, spec)).enumerate() {
        let layer = spec.name.trim_end_matches(".weight").to_owned();
        match spec.shape[..] {
            [rows, cols] if spec.name.contains("_blocks.") && i % 2 == 0 => {
                file.settings(&layer, NVFP4);
                Nvfp4::new(i as u64, [rows, cols], Nvfp4Layout::COMFY).add(&mut file, &layer);
            }
            [rows, cols] if spec.name.contains("_blocks.") => {
                file.settings(&layer, FP8);
                file.scale(&format!("{layer}.weight_scale"), 0.5);
                file.add(&spec.name, "F8_E4M3", &[rows, cols], codes(i as u64, rows * cols));
            }
            _ => file.add(&spec.name, "BF16", &spec.shape, [0x80, 0x3f].repeat(spec.shape.iter().product())),
        }
    }
    file
}

#[test]
fn a_mixed_transformer_is_detected_and_complete() {
    let file = mixed_transformer();
    let weights = file.open(Component::Transformer).unwrap();
    let config = TransformerConfig::detect(&weights, None).unwrap();
    assert_eq!(config, Configs::TINY.transformer);
    assert!(weights.check(&transformer_manifest(&config)).unwrap().is_empty());
    for name in weights.names().map(str::to_owned).collect::<Vec<_>>() {
        weights.check_scales(&name).unwrap();
        weights.note_used(&name, false);
    }
    weights.check_written().unwrap();
    // The model again, from a file on disk.
    let scratch = Scratch::new();
    let path = scratch.write("mixed.safetensors", file.bytes());
    assert!(Weights::open(Component::Transformer, &path).unwrap().check(&transformer_manifest(&config)).unwrap().is_empty());
}

#[test]
fn layers_of_an_encoder_that_no_run_reads_may_have_any_scales() {
    let config = Configs::TINY.text_encoder;
    let manifest = text_manifest(&config);
    let tensors: Vec<_> =
        manifest.iter().flat_map(|spec| file_tensors(Component::TextEncoder, Layout::Diffusers, spec)).collect();
    let with = |layer: usize| {
        let mut file = Written::default();
        for spec in &tensors {
            file.add(&spec.name, "BF16", &spec.shape, vec![0; 2 * spec.shape.iter().product::<usize>()]);
        }
        file.declare(&[(&format!("model.layers.{layer}.mlp.x_proj"), FP8)]);
        file.scale(&format!("model.layers.{layer}.mlp.up_proj.weight_scale"), f32::NAN);
        file.scale("lm_head.weight_scale", -1.0);
        file.open(Component::TextEncoder).unwrap()
    };
    assert!(with(35).check(&manifest).unwrap().is_empty());
    assert!(with(0).check(&manifest).is_err());
    let detected = TextConfig::detect(&with(35), None, &ModelDefaults::klein()).unwrap();
    assert_eq!(detected.hidden, config.hidden);
}

#[test]
fn zeros_in_elements_or_scales_are_noticed() {
    let file = mixed_transformer();
    let refused = |name: &str| {
        let mut file = file.clone();
        file.tensor(name).1.fill(0);
        let weights = file.open(Component::Transformer).unwrap();
        weights.names().for_each(|name| weights.note_used(name, false));
        super::message(&weights.check_written().unwrap_err())
    };
    let is_matrix = |shape: &[usize]| shape.len() == 2;
    let matrices = file.tensors.iter().filter(|((name, _, shape), _)| name.contains("_blocks.") && is_matrix(shape));
    let mut count = 0;
    for ((name, ..), _) in matrices {
        assert!(refused(name).contains(&format!("tensor `{name}` is all zeros")), "{name}");
        count += 1;
    }
    assert!(count > 24, "{count}");
}

#[test]
fn formats_that_are_not_supported_are_refused_by_tensor_and_name() {
    let weight = |element| described(&format!("{QKV}.weight"), element, &[4]);
    let beside = |suffix: &str, element| described(&format!("{QKV}.{suffix}"), element, &[]);
    for (tensors, format) in [
        (vec![weight("I8"), beside("weight_scale", "F32")], "INT8"),
        (vec![weight("U8")], "packed in U8"),
        (vec![weight("F8_E4M3FNUZ")], "FP8 (E4M3 FNUZ)"),
        (vec![weight("F8_E5M2FNUZ")], "FP8 (E5M2 FNUZ)"),
        (vec![weight("F8_E4M3"), beside("weight_scale", "F8_E8M0")], "MXFP8"),
        (vec![weight("F8_E4M3"), beside("weight_scale_inv", "F32")], "FP8 with scales of square blocks"),
        (vec![weight("BF16"), beside("weight_packed", "U8")], "compressed-tensors"),
        (vec![weight("U8"), beside("weight_global_scale", "F32")], "compressed-tensors"),
        (vec![weight("U8"), beside("pre_quant_scale", "F32")], "smoothed by AWQ (pre_quant_scale)"),
        (vec![weight("U8"), beside("weight.absmax", "F32")], "4-bit (bitsandbytes)"),
        (vec![weight("U8"), beside("weight.nested_absmax", "F32")], "in an unknown quantized format"),
    ] {
        let error = Weights::from_shards(Component::Transformer, vec![shard(zeros(&tensors)).unwrap()]).unwrap_err();
        assert_eq!(error.to_string(), format!("unsupported quantization (x.safetensors): tensor `{QKV}.weight` is {format}"));
        assert_eq!(error.hint().unwrap(), "use the BF16, FP8 or NVFP4 checkpoint of the same model");
    }
    for (settings, format) in [
        (r#"{"format": "mxfp8"}"#, "MXFP8"),
        (r#"{"format": "int8_tensorwise"}"#, "INT8"),
        (r#"{"format": "convrot_w4a4"}"#, "INT4"),
        (r#"{"format": "asym_w4a8_int8"}"#, "INT4"),
        (r#"{"format": "awq_w4a16"}"#, "INT4"),
        (r#"{"format": "new"}"#, "in an unknown quantized format"),
        ("{}", "in an unknown quantized format"),
        (r#"{"convrot": true}"#, "rotated (ConvRot)"),
        (r#"{"format": "nvfp4", "params": {"convrot": true}}"#, "rotated (ConvRot)"),
    ] {
        for in_metadata in [true, false] {
            let mut file = Written::default();
            if in_metadata {
                file.declare(&[(QKV, settings)])
            } else {
                file.settings(QKV, settings)
            }
            file.add(&format!("{QKV}.weight"), "F8_E4M3", &[4], [0; 4]);
            let text = file.open(Component::Transformer).unwrap_err().to_string();
            assert_eq!(text, format!("unsupported quantization (x.safetensors): tensor `{QKV}.weight` is {format}"));
        }
    }
}
