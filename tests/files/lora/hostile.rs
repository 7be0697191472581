//! Hostile, damaged and foreign adapter files: each is a typed error that names the fault.

use crate::checkpoint::message;
use common::adapter_files::{KOHYA, PEFT, read};
use common::header::safetensors;
use common::lora::{File, Tensor, pair};
use common::random::long;
use common::scratch::Scratch;
use kiln::internals::adapter::{Adapter, LayerTargets};
use kiln::internals::config::Configs;
use kiln::internals::tensor::DType;
use std::time::{Duration, Instant};

/// Layers of the tiny model, in three spellings.
const QKV: &str = "diffusion_model.double_blocks.0.img_attn.qkv";
const FLAT: &str = "lora_unet_double_blocks_0_img_attn_qkv";
const QUERY: &str = "transformer.transformer_blocks.0.attn.to_q";

pub fn tiny() -> LayerTargets {
    Configs::TINY.layer_targets()
}

fn f32s(name: &str, shape: &[usize], value: f32) -> Tensor {
    Tensor::new(name, DType::F32, shape, &vec![value; shape.iter().product()])
}

fn raw(name: &str, dtype: &str, shape: &[usize], bytes: usize) -> Tensor {
    Tensor { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), bytes: vec![0; bytes] }
}

/// A LoRA of one layer of the tiny model, with both of its factors.
fn good() -> File {
    File::of(pair(QKV, PEFT, [768, 256], 4, DType::Bf16))
}

/// Reads a file, which takes milliseconds. The exact time is only checked on an otherwise idle machine.
fn soon<T>(what: &str, read: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = read();
    assert!(!long() || start.elapsed() < Duration::from_secs(5), "{what} took {:?}", start.elapsed());
    out
}

fn refused(what: &str, file: &File, targets: &LayerTargets, says: &[&str]) {
    let error = soon(what, || read(file.bytes(), targets)).map(|adapter| adapter.layers.len()).expect_err(what);
    let said = message(&error);
    assert!(said.contains("x.safetensors"), "{what}: {said}");
    for text in says {
        assert!(said.contains(text), "{what}: {said}: {text}");
    }
}

#[test]
fn factors_that_do_not_make_a_layer_are_refused() {
    let alpha = |value| f32s(&format!("{QKV}.alpha"), &[], value);
    let named = |ending: &str, shape: &[usize]| f32s(&format!("{QKV}{ending}"), shape, 0.5);
    let down = || good().tensors[0].clone();
    let up = || good().tensors[1].clone();
    let lokr = |w2: [usize; 2]| File::of([named(".lokr_w1", &[4, 4]), named(".lokr_w2", &w2)]);
    let targets = tiny();
    assert_eq!(read(good().bytes(), &targets).unwrap().layers.len(), 1);
    assert_eq!(read(lokr([192, 64]).bytes(), &targets).unwrap().layers.len(), 1);
    let cases: Vec<(&str, File, &[&str])> = vec![
        ("alpha 0", good().with(alpha(0.0)), &["alpha of 0"]),
        ("alpha NaN", good().with(alpha(f32::NAN)), &["alpha of NaN"]),
        ("alpha infinite", good().with(alpha(f32::INFINITY)), &["alpha of inf"]),
        ("alpha -infinite", good().with(alpha(f32::NEG_INFINITY)), &["alpha of -inf"]),
        ("alpha 1e38", good().with(alpha(1e38)), &["alpha of 1e38, which has no effect or destroys the image"]),
        ("alpha 1e-38", good().with(alpha(1e-38)), &["alpha of 1e-38, which has no effect or destroys the image"]),
        ("alpha of two", good().with(named(".alpha", &[2])), &["no number"]),
        ("alpha of none", good().with(named(".alpha", &[0])), &["no number"]),
        ("alpha as I64", good().with(raw(&format!("{QKV}.alpha"), "I64", &[], 8)), &["stored as I64"]),
        ("alpha alone", File::of([alpha(1.0)]), &["lacks a factor"]),
        ("down alone", File::of([down()]), &["lacks a factor"]),
        ("up alone", File::of([up()]), &["lacks a factor"]),
        ("rank 4 and 8", File::of([down(), named(".lora_B.weight", &[768, 8])]), &["rank 4 in one factor and 8 in the other"]),
        ("rank 0", File::of([named(".lora_A.weight", &[0, 256]), named(".lora_B.weight", &[768, 0])]), &["is no matrix"]),
        ("no rows", File::of([named(".lora_A.weight", &[4, 256]), named(".lora_B.weight", &[0, 4])]), &["is no matrix"]),
        ("factors swapped", File::of(pair(QKV, [PEFT[1], PEFT[0]], [768, 256], 4, DType::F32)), &["in the other"]),
        ("a vector", File::of([down(), named(".lora_B.weight", &[768])]), &["is no matrix"]),
        ("a scalar", File::of([down(), named(".lora_B.weight", &[])]), &["is no matrix"]),
        ("3x3", File::of([named(".lora_A.weight", &[4, 256, 3, 3]), up()]), &["is no matrix"]),
        ("F64", File::of([raw(&format!("{QKV}.lora_A.weight"), "F64", &[4, 256], 8192), up()]), &["stored as F64"]),
        ("I8", File::of([raw(&format!("{QKV}.lora_A.weight"), "I8", &[4, 256], 1024), up()]), &["stored as I8"]),
        ("FP8", File::of([raw(&format!("{QKV}.lora_A.weight"), "F8_E4M3", &[4, 256], 1024), up()]), &["stored as F8_E4M3"]),
        ("both spellings of a factor", good().with(named(".lora_down.weight", &[4, 256])), &["are the same factor"]),
        ("two adapters in one", good().with(named(".lora_A.other.weight", &[4, 256])), &["are the same factor"]),
        ("LoRA and LoKr", good().with(named(".lokr_w1", &[4, 4])), &["both LoRA and LoKr"]),
        ("LoKr without w2", File::of([named(".lokr_w1", &[4, 4])]), &["lacks a factor"]),
        ("LoKr with half of w2", lokr([192, 64]).with(named(".lokr_w2_a", &[192, 2])), &["lacks a factor"]),
        ("LoKr of another shape", lokr([192, 63]), &["is for a layer of [768, 252], the model's has [768, 256]"]),
        (
            "LoKr, ranks",
            File::of([named(".lokr_w1", &[4, 4]), named(".lokr_w2_a", &[192, 2]), named(".lokr_w2_b", &[3, 64])]),
            &["rank 2 in one factor and 3"],
        ),
        (
            "LoKr, alpha infinite",
            File::of([
                named(".lokr_w1", &[4, 4]),
                named(".lokr_w2_a", &[192, 2]),
                named(".lokr_w2_b", &[2, 64]),
                alpha(f32::INFINITY),
            ]),
            &["alpha of inf"],
        ),
        ("LoKr with w1 of no rows", File::of([named(".lokr_w1", &[0, 4]), named(".lokr_w2", &[192, 64])]), &["is no matrix"]),
        ("DoRA of kohya", good().with(named(".dora_scale", &[768, 1])), &["it is DoRA, which is not supported"]),
        ("DoRA of PEFT", good().with(named(".lora_magnitude_vector", &[768])), &["it is DoRA"]),
        ("LoHa", File::of([named(".hada_w1_a", &[4, 4]), named(".hada_w1_b", &[4, 4])]), &["it is LoHa"]),
        ("LoCon", good().with(named(".lora_mid.weight", &[4, 4, 3, 3])), &["LoRA of a convolution"]),
        ("LoKr of a convolution", lokr([192, 64]).with(named(".lokr_t2", &[4, 4, 3, 3])), &["LoKr of a convolution"]),
        ("OFT", File::of([named(".oft_blocks", &[4, 4])]), &["it is OFT"]),
        ("whole differences", File::of([named(".diff", &[768, 256])]), &["a difference of whole weights"]),
        ("a bias", good().with(named(".lora_B.bias", &[768])), &["LoRA with a bias"]),
        (
            "other tensors beside",
            good().with(f32s("text_projection.weight", &[4], 1.0)),
            &["tensors that are not part of an adapter", "`text_projection.weight`"],
        ),
        ("only other tensors", File::of([f32s("img_in.weight", &[4, 4], 1.0)]), &["no factors of LoRA or LoKr"]),
        ("nothing", File::default(), &["no factors of LoRA or LoKr"]),
    ];
    for (what, file, says) in cases {
        refused(what, &file, &targets, says);
    }
}

#[test]
fn values_that_would_destroy_the_image_are_refused() {
    let targets = tiny();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (tensor, index) in [(0, 0), (0, 1023), (1, 17), (1, 3071)] {
            for dtype in [DType::F32, DType::Bf16, DType::F16] {
                let mut file = File::of(pair(QKV, PEFT, [768, 256], 4, dtype));
                let (bytes, one) = (&mut file.tensors[tensor].bytes, dtype.encoded(&[value]));
                bytes[index * one.len()..][..one.len()].copy_from_slice(&one);
                refused("not finite", &file, &targets, &["not finite"]);
            }
        }
    }
    // The factors are finite, but their product is not.
    let large = |a, b| {
        File::of([f32s(&format!("{QKV}.lora_A.weight"), &[4, 256], a), f32s(&format!("{QKV}.lora_B.weight"), &[768, 4], b)])
    };
    refused("product", &large(1e30, 1e30), &targets, &["not finite"]);
    refused("sum of products", &large(2e19, 1e19), &targets, &["not finite"]);
    refused("alpha", &large(1e20, 1e17).with(f32s(&format!("{QKV}.alpha"), &[], 4e5)), &targets, &["not finite"]);
    let kronecker =
        File::of([f32s(&format!("{QKV}.lokr_w1"), &[4, 4], 1e30), f32s(&format!("{QKV}.lokr_w2"), &[192, 64], -1e30)]);
    refused("Kronecker product", &kronecker, &targets, &["not finite"]);
    assert!(read(large(1e15, 1e15).bytes(), &targets).is_ok());
}

#[test]
fn layers_that_are_there_twice_are_refused() {
    let (targets, other) = (tiny(), |layer: &str, shape| pair(layer, KOHYA, shape, 2, DType::F32));
    for (layer, shape) in [
        (FLAT, [768, 256]),
        ("double_blocks.0.img_attn.qkv", [768, 256]),
        ("base_model.model.double_blocks.0.img_attn.qkv", [768, 256]),
        (QUERY, [256, 256]),
        ("lycoris_transformer_blocks_0_attn_to_v", [256, 256]),
        ("transformer.double_blocks.0.img_attn.qkv.1", [256, 256]),
    ] {
        let mut file = good();
        file.tensors.extend(other(layer, shape));
        refused(layer, &file, &targets, &["are for the same layer", layer, QKV]);
    }
    // Queries and keys of one layer do not overlap.
    let mut file = File::of(other(QUERY, [256, 256]));
    file.tensors.extend(other("transformer.transformer_blocks.0.attn.to_k", [256, 256]));
    assert_eq!(read(file.bytes(), &targets).unwrap().layers.len(), 2);
}

#[test]
fn adapters_of_other_models_are_refused_by_name() {
    let klein = Configs::KLEIN_4B.layer_targets();
    let one = |layer: &str, shape| File::of(pair(layer, KOHYA, shape, 1, DType::Bf16));
    let qkv = |h: usize| one(FLAT, [3 * h, h]);
    assert!(read(qkv(3072).bytes(), &klein).is_ok());
    refused("9B", &qkv(4096), &klein, &["is for a layer of [12288, 4096], the model's has [9216, 3072]", "klein] 9B"]);
    refused("dev", &qkv(6144), &klein, &["FLUX.2 [dev]"]);
    refused("tiny", &qkv(256), &klein, &["the model's has [9216, 3072]"]);
    let mut flux1 = one("lora_unet_double_blocks_0_img_attn_qkv", [9216, 3072]);
    flux1.tensors.extend(one("lora_unet_double_blocks_0_img_mod_lin", [18432, 3072]).tensors);
    flux1.tensors.extend(one("lora_unet_single_blocks_0_linear1", [21504, 3072]).tensors);
    refused("FLUX.1", &flux1, &klein, &["FLUX.1"]);
    let sdxl = one("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", [640, 640]);
    refused(
        "SDXL",
        &sdxl,
        &klein,
        &["the model has no layer", "`lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q`", "nearest is"],
    );
}

#[test]
fn damaged_files_are_refused() {
    let (targets, whole) = (tiny(), good().bytes());
    for cut in (0..whole.len()).step_by(37) {
        assert!(read(whole[..cut].to_vec(), &targets).is_err(), "{cut}");
    }
    let changed = |from: &str, to: &str| {
        let header = good().header().replacen(from, to, 1);
        assert_ne!(header, good().header(), "{from}");
        safetensors(header, &good().data())
    };
    for (from, to, says) in [
        ("[0,2048]", "[0,2050]", "data_offsets"),
        ("[2048,8192]", "[2046,8190]", "overlaps"),
        ("[4, 256]", "[4, 4294967296, 4294967296]", "overflows"),
        ("[4, 256]", "[2305843009213693951]", "overflows"),
        ("BF16", "BF61", "unknown dtype"),
        ("lora_B", "lora_A", "is there twice"),
    ] {
        let error = read(changed(from, to), &targets).map(|_| ()).expect_err(from);
        assert!(error.to_string().contains(says), "{error}: {says}");
    }
    // Many keys, each of them valid.
    let many = (0..100_000).map(|i| raw(&format!("lora_unet_x{i}.lora_down.weight"), "F32", &[0, 1], 0));
    let file = File::of(many);
    refused("100,000 keys", &file, &targets, &["limit 4,194,304"]);
    let many = (0..5000).map(|i| raw(&format!("x{i}.lora_down.weight"), "F32", &[0, 1], 0));
    refused("5,000 keys", &File::of(many), &targets, &["more than 4096 tensors"]);
    // As many layers as a file can have, none of which the model has.
    let none = (0..2048).flat_map(|i| pair(&format!("lora_unet_double_blocks_{i}_img_attn_q"), KOHYA, [2, 2], 1, DType::F32));
    refused("4,096 keys of another model", &File::of(none), &targets, &["and 2045 more", "nearest is"]);
}

#[test]
fn settings_in_the_metadata_may_be_anything() {
    let targets = tiny();
    let with = |text: &str| File::of(pair(QUERY, PEFT, [256, 256], 4, DType::F32)).with_metadata("lora_adapter_metadata", text);
    for text in ["", "[", "7", "[]", "null", "\"x\"", "{]", "{\"transformer.r\": ", "\u{0}", "NaN"] {
        refused(text, &with(text), &targets, &["the settings of this adapter are not readable"]);
    }
    for text in [
        r#"{"transformer.lora_alpha": "8"}"#,
        r#"{"transformer.lora_alpha": [8]}"#,
        r#"{"transformer.use_rslora": 7}"#,
        r#"{"transformer.alpha_pattern": [1]}"#,
        r#"{"transformer.alpha_pattern": {"x": {}}}"#,
        r#"{"transformer.lora_alpha": 8, "transformer.lora_alpha": 8}"#,
    ] {
        refused(text, &with(text), &targets, &["the settings of this adapter are not readable"]);
    }
    for pattern in ["^transformer_blocks", r"attn\\.to_q", "to_[qk]", "(", "to_q|to_k", "attn.*"] {
        let text = format!(r#"{{"transformer.alpha_pattern": {{"{pattern}": 1}}}}"#);
        refused(pattern, &with(&text), &targets, &["not readable", "alpha_pattern is not the name of a layer"]);
    }
    for (text, says) in [
        (r#"{"transformer.lora_alpha": 0}"#, "alpha of 0"),
        (r#"{"transformer.lora_alpha": 1e300}"#, "alpha of inf"),
        (r#"{"transformer.lora_alpha": 1e30}"#, "alpha of 1e30"),
        (r#"{"transformer.lora_alpha": -1e300}"#, "alpha of -inf"),
        (r#"{"transformer.lora_alpha": 1e-300}"#, "alpha of 0"),
        (r#"{"transformer.lora_alpha": 8, "transformer.alpha_pattern": {"attn.to_q": 0}}"#, "alpha of 0"),
    ] {
        refused(text, &with(text), &targets, &[says]);
    }
    refused("deep", &with(&"[".repeat(100_000)), &targets, &["not readable"]);
    refused("long", &with(&format!("{{{}", " ".repeat(3_000_000))), &targets, &["not readable"]);
    refused("longer than a header may be", &with(&" ".repeat(5_000_000)), &targets, &["limit 4,194,304"]);
    let many: Vec<String> = (0..50_000).map(|i| format!("\"layer{i}\":1")).collect();
    let text = format!(r#"{{"transformer.lora_alpha": 2, "transformer.alpha_pattern": {{{}}}}}"#, many.join(","));
    assert_eq!(soon("many", || read(with(&text).bytes(), &targets)).unwrap().layers[0].delta.scale, 0.5);
    // The text encoder has separate settings.
    let text = "text_encoder.model.layers.3.self_attn.q_proj";
    let mut both = with(r#"{"transformer.lora_alpha": 2, "text_encoder.lora_alpha": 8}"#);
    both.tensors.extend(pair(text, PEFT, [512, 128], 4, DType::F32));
    let scales = read(both.bytes(), &targets).unwrap().layers.into_iter().map(|layer| (layer.name, layer.delta.scale));
    assert_eq!(scales.collect::<Vec<_>>(), [(text.to_owned(), 2.0), (QUERY.to_owned(), 0.5)]);
    // Settings other than scales do not matter.
    let text = r#"{"transformer.lora_alpha": 2, "transformer.target_modules": [["x"], 7], "unknown": null}"#;
    assert_eq!(read(with(text).bytes(), &targets).unwrap().layers[0].delta.scale, 0.5);
}

#[test]
fn settings_beside_the_file_may_be_anything() {
    let (targets, file) =
        (tiny(), File::of(pair("base_model.model.transformer_blocks.0.attn.to_q", PEFT, [256, 256], 4, DType::F32)));
    let open = |prepare: &dyn Fn(&Scratch)| {
        let folder = Scratch::new();
        let path = folder.write("adapter_model.safetensors", file.bytes());
        prepare(&folder);
        Adapter::open(&path, &targets).map(|adapter| adapter.layers[0].delta.scale)
    };
    let with = |text: &str| open(&|folder| drop(folder.write("adapter_config.json", text)));
    assert_eq!(open(&|_| ()).unwrap(), 1.0);
    assert_eq!(with(r#"{"r": 4, "lora_alpha": 8}"#).unwrap(), 2.0);
    assert_eq!(with(r#"{"r": 4, "lora_alpha": 8, "use_rslora": true}"#).unwrap(), 4.0);
    for text in ["", "{", "[1]", "7", "\u{feff}{}", r#"{"lora_alpha": "8"}"#, &"[".repeat(10_000), &" ".repeat(2 << 20)] {
        let said = message(&with(text).unwrap_err());
        assert!(said.contains("settings of this adapter are not readable") && said.contains("adapter_config.json"), "{said}");
    }
    let folder = open(&|folder| std::fs::create_dir(folder.path().join("adapter_config.json")).unwrap());
    let said = message(&folder.unwrap_err());
    assert!(said.contains("settings of this adapter are not readable") && said.contains("it is a folder"), "{said}");
}
