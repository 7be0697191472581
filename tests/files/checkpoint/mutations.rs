//! Headers and quantized layers with random faults, in addition to the directed cases; a reader without checks is the control.

use super::quantized_faults::{fp8, nvfp4, spec};
use super::written::Written;
use super::{message, shard};
use common::ops::formats::{Codes, tiled};
use common::random::{Random, cases};
use kiln::error::Result;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::names::TensorSpec;
use kiln::internals::tensor::{Bytes, DType, Nvfp4Layout, Scale, SliceScaling, WeightSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const TYPES: [&str; 8] = ["U8", "BF16", "F32", "F64", "F4", "F6_E2M3", "C64", "F128"];
const WORDS: [&str; 12] =
    ["0", "1", "-1", "4294967296", "2305843009213693951", "18446744073709551615", "1e99", "[]", "null", "\"", "}", "\\u0000"];

/// A file of a few tensors. Each number may be replaced by a large one, tensors may be doubled, removed or swapped, and in half
/// of the files some random bytes are changed.
fn mutated(random: &mut Random) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut offset = 0;
    for i in 0..random.below(5) {
        let kind = random.below(TYPES.len());
        let shape: Vec<u64> = (0..random.below(4)).map(|_| number(random, 3)).collect();
        let bits = [8, 16, 32, 64, 4, 6, 64, 8][kind];
        let bytes = shape.iter().fold(bits, |product: u64, &dim| product.wrapping_mul(dim)) / 8;
        let begin = if random.below(16) == 0 { random.size() } else { offset };
        let end = if random.below(16) == 0 { random.size() } else { begin.wrapping_add(bytes) };
        offset = end;
        let name = if random.below(16) == 0 { 0 } else { i };
        let dtype = TYPES[kind];
        entries.push(format!(r#""t{name}.weight":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#));
    }
    if random.below(4) == 0 {
        entries.push(r#""__metadata__":{"format":"pt"}"#.into());
    }
    if !entries.is_empty() && random.below(8) == 0 {
        let (from, to) = (random.below(entries.len()), random.below(entries.len()));
        entries.swap(from, to);
    }
    let header = format!("{{{}}}", entries.join(","));
    let length = if random.below(16) == 0 { random.size() } else { header.len() as u64 };
    let data = if random.below(16) == 0 { random.below(64) } else { offset.min(4096) as usize };
    let mut file = [&length.to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat();
    if random.below(2) == 0 {
        random.mutate(&mut file, &WORDS);
    }
    file
}

/// Mostly a small number, sometimes one of any magnitude.
fn number(random: &mut Random, small: usize) -> u64 {
    if random.below(16) == 0 { random.size() } else { random.below(small) as u64 + 1 }
}

/// A reader of a file, which returns the byte ranges of the tensors, or none if it refuses the file.
type Reader = fn(&[u8]) -> Option<Vec<Range<usize>>>;

fn kiln(file: &[u8]) -> Option<Vec<Range<usize>>> {
    match shard(file.to_vec()) {
        Ok(shard) => {
            consistent(&shard);
            Some(shard.tensors().map(|(_, entry)| entry.range.clone()).collect())
        }
        Err(error) => {
            assert!(message(&error).contains("(x.safetensors)"), "{error}");
            None
        }
    }
}

/// Every tensor of an accepted file can be read to its last byte, and its length agrees with its shape.
fn consistent(shard: &Shard) {
    for (name, entry) in shard.tensors() {
        let elements: u128 = entry.shape.iter().map(|&dim| dim as u128).product();
        let bytes = shard.bytes(name).unwrap();
        assert_eq!(bytes.len() as u128 * 8, elements * u128::from(entry.dtype.bits), "{name}");
        std::hint::black_box(bytes.iter().fold(0u8, |sum, byte| sum ^ byte));
    }
}

/// A reader without checks, which trusts every offset.
fn believing(file: &[u8]) -> Option<Vec<Range<usize>>> {
    let length = u64::from_le_bytes(file.get(..8)?.try_into().ok()?) as usize;
    let header: serde_json::Value = serde_json::from_slice(file.get(8..length.checked_add(8)?)?).ok()?;
    let tensors = header.as_object()?.iter().filter(|(name, _)| *name != "__metadata__");
    let offset = |value: &serde_json::Value| Some((value.as_u64()? as usize).wrapping_add(8 + length));
    tensors.map(|(_, entry)| Some(offset(&entry["data_offsets"][0])?..offset(&entry["data_offsets"][1])?)).collect()
}

/// The number of accepted files, of files with a tensor outside the file, and of files with overlapping tensors.
fn faults(reader: Reader, short: u64, long: u64) -> [usize; 3] {
    let [accepted, outside, shared] = [const { AtomicUsize::new(0) }; 3];
    cases("mutated headers", short, long, |random| {
        let file = mutated(random);
        let Some(mut ranges) = reader(&file) else { return };
        accepted.fetch_add(1, Ordering::Relaxed);
        if ranges.iter().any(|range| file.get(range.clone()).is_none()) {
            outside.fetch_add(1, Ordering::Relaxed);
        }
        ranges.sort_by_key(|range| (range.start, range.end));
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            shared.fetch_add(1, Ordering::Relaxed);
        }
    });
    [accepted, outside, shared].map(AtomicUsize::into_inner)
}

#[test]
fn mutated_headers_never_panic_nor_lead_out_of_the_file() {
    let [accepted, outside, shared] = faults(kiln, 200_000, 10_000_000);
    assert_eq!([outside, shared], [0, 0]);
    // Changed data and changed names are still valid files.
    assert!(accepted > 10_000, "{accepted}");
}

#[test]
fn a_reader_without_checks_fails_the_same_test() {
    let [accepted, outside, shared] = faults(believing, 20_000, 20_000);
    assert!(accepted > 1000 && outside > 1000 && shared > 100, "{accepted} {outside} {shared}");
}

const DTYPES: [&str; 8] = ["U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "BF16", "F32", "F4"];
const SUFFIXES: [&str; 8] =
    ["weight", "weight_scale", "weight_scale_2", "input_scale", "comfy_quant", "scale_weight", "scale_input", "weight_packed"];
const SETTINGS: [&str; 16] = [
    "float8_e4m3fn",
    "float8_e5m2",
    "nvfp4",
    "mxfp8",
    "null",
    "true",
    "{",
    "}",
    "[",
    "\"",
    "\\u00",
    "layers",
    "format",
    ":",
    "convrot",
    "full_precision_matrix_mult",
];

/// Scales at the ends of their range and beyond.
const SCALES: [f32; 8] = [f32::MAX, 1e30, 1e9, 1e-30, f32::MIN_POSITIVE, 1e-45, 0.0, f32::NAN];

/// A file with one weight.
struct Layers {
    file: Written,
    part: Component,
    weight: TensorSpec,
    /// The layers of the file that hold it.
    names: Vec<&'static str>,
}

/// A file with one weight, of a kind that has its own reader.
fn layers(random: &mut Random) -> Layers {
    let whole = |file| {
        let names = vec!["double_blocks.0.img_attn.proj"];
        Layers { file, part: Component::Transformer, weight: spec(), names }
    };
    match random.below(4) {
        0 => whole(fp8()),
        1 => whole(nvfp4()),
        2 => split(),
        _ => halves(random),
    }
}

/// Queries, keys and values of a text encoder, each in another format.
fn split() -> Layers {
    let names = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"];
    let ([q, k, v], mut file) = (names, Written::default());
    file.declare(&[(q, r#"{"format": "float8_e4m3fn"}"#), (v, r#"{"format": "nvfp4"}"#)]);
    file.add(&format!("{q}.weight"), "F8_E4M3", &[32, 32], [0x38; 1024]);
    file.add(&format!("{q}.weight_scale"), "F32", &[32], 0.5_f32.to_le_bytes().repeat(32));
    file.add(&format!("{k}.weight"), "BF16", &[16, 32], [0x80, 0x3f].repeat(512));
    let mut scales = [0; 512];
    (0..32).for_each(|i| scales[tiled(i / 2, i % 2, 2)] = 0x38);
    file.nvfp4(v, [16, 32], &[0x2a; 256], &scales, 0.5);
    let weight = TensorSpec::stacked("model.layers.0.self_attn.qkv_proj.weight", &[32, 16, 16], 32);
    Layers { file, part: Component::TextEncoder, weight, names: names.into() }
}

/// The final modulation under its diffusers name, with its halves in the other order: in FP8 with row scales, or in NVFP4 with
/// row-major scales.
fn halves(random: &mut Random) -> Layers {
    let (name, mut file) = ("norm_out.linear", Written::default());
    file.note("quantization_config", "{}");
    match random.below(2) {
        0 => {
            file.add(&format!("{name}.weight"), "F8_E4M3", &[16, 32], [0x38; 512]);
            file.add(&format!("{name}.weight_scale"), "F32", &[16, 1], 0.5_f32.to_le_bytes().repeat(16));
        }
        _ => file.nvfp4(name, [16, 32], &[0x2a; 256], &[0x38; 32], 0.5),
    }
    file.scale(&format!("{name}.input_scale"), 0.5);
    let weight = TensorSpec::new("final_layer.adaLN_modulation.1.weight", &[16, 32]);
    Layers { file, part: Component::Transformer, weight, names: vec![name] }
}

/// Changes a few things of a file: bytes of tensors and metadata, scales, dtypes, shapes, names. Tensors may be missing, and in a
/// quarter of the files some bytes anywhere are changed.
fn mutated_layers(random: &mut Random, Layers { mut file, names, .. }: Layers) -> Vec<u8> {
    if random.below(3) == 0 {
        let (key, text) = file.metadata.remove(0);
        let mut text = text.into_bytes();
        random.mutate(&mut text, &SETTINGS);
        if random.below(2) == 0 {
            file.note(&key, &String::from_utf8_lossy(&text));
        } else {
            let start = text.iter().rposition(|&byte| byte == b'{').unwrap_or(0);
            file.add(&format!("{}.comfy_quant", random.pick(&names)), "U8", &[text.len() - start], &text[start..]);
        }
    }
    if random.below(16) == 0 {
        file.note("quantization_config", "{}");
    }
    if random.below(16) == 0 {
        file.add("scaled_fp8", "F8_E4M3", &[2], [0; 2]);
    }
    for _ in 0..random.below(3) {
        let index = random.below(file.tensors.len());
        let ((name, element, shape), bytes) = &mut file.tensors[index];
        match random.below(7) {
            0 => drop(file.tensors.remove(index)),
            1 => *name = format!("{}.{}", random.pick(&names), random.pick(&SUFFIXES)),
            2 => {
                // Another dtype of the same size, or a shape that has as many elements.
                *element = random.pick(&DTYPES);
                let size = [1, 1, 1, 1, 1, 2, 4, 1][DTYPES.iter().position(|dtype| dtype == element).unwrap()];
                bytes.resize(shape.iter().product::<usize>() * size, 0x38);
            }
            3 => shape.reverse(),
            4 => shape.push(1),
            5 if *element == "F32" => {
                let at = 4 * random.below(bytes.len() / 4);
                bytes[at..at + 4].copy_from_slice(&SCALES[random.below(SCALES.len())].to_le_bytes());
            }
            _ if !bytes.is_empty() => {
                let at = random.below(bytes.len());
                bytes[at] = random.next() as u8;
            }
            _ => {}
        }
    }
    file.tensors.sort_by(|a, b| a.0.0.cmp(&b.0.0));
    file.tensors.dedup_by(|a, b| a.0.0 == b.0.0);
    let mut bytes = file.bytes();
    if random.below(4) == 0 {
        random.mutate(&mut bytes, &SETTINGS);
    }
    bytes
}

/// Runs all checks of a weight, and returns its rows.
fn load(weights: &Weights, spec: &TensorSpec) -> Result<Vec<WeightSlice>> {
    let weight = weights.weight(spec)?;
    weights.check(std::slice::from_ref(spec))?;
    weights.check_scales(&spec.name)?;
    weights.note_used(&spec.name, false);
    weights.check_written()?;
    Ok(weight.parts)
}

/// The number of non-finite values with finite codes. NVFP4 codes are always finite.
fn overflows(part: &WeightSlice) -> usize {
    let is_finite = match part.dtype {
        DType::E4m3 | DType::E5m2 => |dtype, code| Codes::of(dtype).decode(code).is_finite(),
        DType::E2m1 => |_, _| true,
        // Plain values have no factor.
        _ => return 0,
    };
    let (cols, mut row) = (part.cols(), vec![0.0; part.cols()]);
    let count = |i: usize| {
        part.decode(i, &mut row);
        let wrong = |(col, value): &(usize, &f32)| {
            !value.is_finite() && is_finite(part.dtype, part.bytes[part.dtype.bytes(i * cols + col)])
        };
        row.iter().enumerate().filter(wrong).count()
    };
    (0..part.rows).map(count).sum()
}

#[test]
fn mutated_layers_never_panic_and_are_refused_by_name() {
    let (accepted, refused) = ([const { AtomicUsize::new(0) }; 4], AtomicUsize::new(0));
    let layouts = [Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE];
    cases("mutated quantized layers", 30_000, 3_000_000, |random| {
        let layout = (random.below(4) == 0).then(|| layouts[random.below(3)]);
        let layers = layers(random);
        let (part, spec) = (layers.part, layers.weight.clone());
        let opened = shard(mutated_layers(random, layers)).and_then(|shard| Weights::from_shards(part, vec![shard]));
        match opened.map(|weights| weights.with_nvfp4_layout(layout)).and_then(|weights| load(&weights, &spec)) {
            Ok(parts) => {
                let kinds = [DType::E4m3, DType::E5m2, DType::E2m1];
                for part in &parts {
                    assert_eq!(overflows(part), 0, "{part:?}");
                    let kind = kinds.iter().position(|dtype| *dtype == part.dtype).unwrap_or(3);
                    accepted[kind].fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(error) => {
                assert!(message(&error).contains("(x.safetensors)"), "{error}");
                refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let (accepted, refused) = (accepted.map(AtomicUsize::into_inner), refused.into_inner());
    let [e4m3, _, nvfp4, plain] = accepted;
    assert!(e4m3 > 1000 && nvfp4 > 1000 && plain > 500 && refused > 1000, "{accepted:?} {refused}");
}

/// The control: scales that no file may have. Half of the elements are one, the others two.
#[test]
fn values_that_overflow_are_counted() {
    let codes = Bytes::new(Arc::new([0x38, 0x40].repeat(8)));
    let part = |scale| WeightSlice {
        bytes: codes.clone(),
        dtype: DType::E4m3,
        rows: 1,
        scaling: SliceScaling::Tensor(Scale::new(scale).unwrap()),
    };
    assert_eq!([1.0, f32::MAX].map(|scale| overflows(&part(scale))), [0, 8]);
    let scales = Bytes::new(Arc::new(vec![0x40; 2]));
    let scaling = SliceScaling::Blocks16 { scales, tensor: Scale::new(f32::MAX).unwrap(), layout: Nvfp4Layout::MODELOPT };
    let bytes = Bytes::new(Arc::new([0x22].repeat(16)));
    assert_eq!(overflows(&WeightSlice { bytes, dtype: DType::E2m1, rows: 2, scaling }), 32);
}
