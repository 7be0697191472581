//! The command itself: what it writes and prints, what it refuses, and that its models generate images.

use common::sandbox::{Png, Run, Sandbox};
use kiln::internals::checkpoint::Shard;
use kiln::internals::config::Variant;
use kiln::internals::pipeline::OpenModel;
use kiln::internals::tensor::DType;
use kiln::locate::Found;
use std::fs;

/// Flags of an image that takes no time.
const SMALL: [&str; 8] = ["--width", "64", "--height", "64", "--steps", "1", "--seed", "7"];

#[test]
fn a_quantized_model_generates_images() {
    let sandbox = Sandbox::new();
    let image = |model: &str| {
        let out = format!("{}.png", model.replace('/', "-"));
        sandbox.bare(["a large red star on a blue background", "-q", "--model", model, "-o", &out].iter().chain(&SMALL)).good();
        Png::read(&sandbox.path(&out)).pixels
    };
    let plain = image("builtin");
    for format in ["fp8", "nvfp4"] {
        let run =
            sandbox.bare(["quantize", "builtin", format, "--to", format, "--calibration-steps", "1", "--calibration-size", "64"]);
        let run = run.good();
        assert_eq!(run.text(), format!("{format}\n"));
        assert!(run.stderr.contains("\ncalibration: 2 prompts at 64x64, 1 step each, on "), "{}", run.stderr);
        assert!(run.stderr.contains("\ntransformer: 16 layers quantized, 21 tensors in bf16, "), "{}", run.stderr);
        assert!(run.stderr.contains("\n  single_blocks.*.linear2  "), "{}", run.stderr);
        let mean = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / a.len() as f64;
        let quantized = image(format);
        // The image differs only by rounding. A model of noise would be further away.
        let difference = mean(&plain, &quantized);
        assert!(difference > 0.0 && difference < 30.0, "{format}: {difference}");
        // Inputs are scaled by powers of two that calibration found, none of them a constant for all.
        let file = Shard::open(&sandbox.path(&format!("{format}/transformer/flux-2-klein-{format}.safetensors"))).unwrap();
        let names: Vec<String> =
            file.tensors().map(|(name, _)| name.to_owned()).filter(|name| name.ends_with(".input_scale")).collect();
        let scale = |name: &String| f32::from_le_bytes(file.bytes(name).unwrap()[..].try_into().unwrap());
        let scales: Vec<f32> = names.iter().map(scale).collect();
        assert!(scales.len() == 16 && scales.iter().all(|scale| scale.log2().fract() == 0.0), "{scales:?}");
        assert!(scales.iter().any(|scale| *scale != scales[0]), "{scales:?}");
        // No word about the file's origin: the official ones have a single entry of metadata.
        assert_eq!(file.metadata().keys().collect::<Vec<_>>(), ["_quantization_metadata"]);
    }
}

#[test]
fn a_folder_is_a_model_by_itself_and_keeps_its_variant() {
    let sandbox = Sandbox::new();
    // Single files. Only their names say that this is a base model.
    sandbox.tiny("tiny", &["--layout", "bfl"]);
    fs::create_dir(sandbox.path("base")).unwrap();
    for (from, to) in [("flux-2-klein-tiny", "flux-2-klein-base"), ("qwen", "qwen"), ("ae", "ae")]
        .map(|(a, b)| (format!("tiny/{a}"), format!("base/{b}")))
    {
        fs::rename(sandbox.path(&format!("{from}.safetensors")), sandbox.path(&format!("{to}.safetensors"))).unwrap();
    }
    fs::rename(sandbox.path("tiny/tokenizer.json"), sandbox.path("base/tokenizer.json")).unwrap();
    sandbox.run(["quantize", "base", "out/", "--to", "fp8", "--no-calibration", "-q", "--part", "transformer"]).good();
    fs::remove_dir_all(sandbox.path("base")).unwrap();
    let locate = kiln::locate::LocateRequest { model: Some(sandbox.path("out")), ..Default::default() };
    let found = kiln::locate::locate(&locate).unwrap();
    let Found::Files(files) = &found else { panic!("{found:?}") };
    assert_eq!(files.tokenizer, Some(sandbox.path("out/tokenizer/tokenizer.json")));
    let model = OpenModel::open(&found, None).unwrap();
    assert_eq!(model.variant, Variant::Base);
    // The text encoder is copied unmodified.
    let names: Vec<_> = model.weights().text_encoder.shards().iter().map(|shard| shard.path().to_owned()).collect();
    assert_eq!(names, [sandbox.path("out/text_encoder/qwen.safetensors")]);
    let dtype = |part: &kiln::internals::checkpoint::Weights| {
        part.shards()[0].tensors().filter(|(_, entry)| entry.dtype.name == "F8_E4M3").count()
    };
    assert_eq!((dtype(&model.weights().transformer), dtype(&model.weights().text_encoder)), (20, 0));
    assert!(sandbox.path("out/transformer/flux-2-klein-base-fp8.safetensors").exists());
}

#[test]
fn layers_are_kept_by_pattern() {
    let sandbox = Sandbox::new();
    let run = sandbox.run([
        "quantize",
        "tiny",
        "out.safetensors",
        "--to",
        "nvfp4",
        "--no-calibration",
        "--json",
        "-v",
        "--keep",
        "single_blocks.0.*",
        "--keep",
        "*.txt_attn.proj",
    ]);
    let run = run.good();
    let json = run.json();
    let layers = json[0]["files"][0]["layers"].as_array().unwrap();
    assert_eq!((json.len(), layers.len()), (1, 16));
    assert_eq!(json[0]["output"], "out.safetensors");
    let file = Shard::open(&sandbox.path("out.safetensors")).unwrap();
    assert_eq!(json[0]["bytes"], fs::metadata(sandbox.path("out.safetensors")).unwrap().len());
    for (name, dtype) in [
        ("single_blocks.0.linear1", "BF16"),
        ("single_blocks.1.linear1", "U8"),
        ("double_blocks.1.txt_attn.proj", "BF16"),
        ("double_blocks.1.img_attn.proj", "U8"),
    ] {
        assert_eq!(file.entry(&format!("{name}.weight")).unwrap().dtype.name, dtype, "{name}");
        let listed = layers.iter().find(|layer| layer["name"] == name);
        assert_eq!(listed.is_some(), dtype == "U8", "{name}");
        assert_eq!(run.stderr.contains(&format!("\n{name} nvfp4 error 10.")), dtype == "U8", "{}", run.stderr);
        // Without calibration there are no input scales.
        assert!(listed.is_none_or(|layer| layer["input_scale"].is_null() && layer["error"].as_f64().unwrap() > 0.09));
    }
    assert!(file.tensors().all(|(name, _)| !name.ends_with(".input_scale")));
}

#[test]
fn what_cannot_be_done_is_refused_with_a_remedy() {
    let sandbox = Sandbox::new();
    sandbox.tiny("tiny", &[]);
    fs::write(sandbox.path("there.safetensors"), "mine").unwrap();
    fs::create_dir(sandbox.path("full")).unwrap();
    fs::write(sandbox.path("full/file"), "mine").unwrap();
    sandbox.run(["quantize", "tiny", "fp8", "--to", "fp8", "--no-calibration", "-q"]).good();
    fs::write(sandbox.path("blank.txt"), "\n \n").unwrap();
    let weights = "tiny/transformer/diffusion_pytorch_model.safetensors";
    let text = ["quantize", "tiny", "text.safetensors", "--to", "fp8", "--part", "text-encoder", "--calibration-steps", "1"];
    let run = sandbox.run(text).good();
    assert!(run.stderr.starts_with("warning: text encoders have no input scales, so nothing is calibrated\n"), "{}", run.stderr);
    let before = sandbox.names();
    for (line, code, message, hint) in [
        ("tiny out", 2, "the following required arguments were not provided", ""),
        ("tiny out --to int8", 2, "invalid value 'int8'", ""),
        ("none out --to fp8", 3, "no model found (none)", "expected transformer/"),
        (
            "tiny there.safetensors --to fp8 --no-calibration",
            5,
            "output exists (there.safetensors); not overwritten",
            "use --force",
        ),
        ("tiny full --to fp8 --no-calibration", 5, "cannot write (full): the folder is not empty", ""),
        (
            "tiny no/out.safetensors --to fp8 --no-calibration",
            5,
            "cannot write (no/out.safetensors): there is no such folder",
            "",
        ),
        ("tiny . --to fp8 --no-calibration", 5, "cannot write (.): this is not the name of a file or folder", ""),
        (
            "fp8 out --to nvfp4 --no-calibration",
            3,
            "quantized already (fp8/transformer): tensor `double_blocks.0.",
            "use the BF16",
        ),
        (
            "fp8 x.safetensors --to fp8 --part text-encoder",
            3,
            "quantized already (fp8/text_encoder/qwen_3_fp8.safetensors)",
            "BF16",
        ),
        ("tiny out --to fp8 --no-calibration --keep linear9", 2, "no layer matches `linear9`", "the nearest are `"),
        ("tiny out --to fp8 --no-calibration --prompts x", 2, "cannot be used with", ""),
        ("tiny out --to nvfp4 --no-calibration --layout diffusers", 2, "only with input scales", "leave out --no-calibration"),
        (
            "tiny x.safetensors --to fp8 --part text-encoder --layout diffusers",
            2,
            "no quantized text encoders",
            "leave out --layout",
        ),
        ("tiny out --to fp8 --part text-encoder --layout diffusers", 2, "no quantized text encoders", "leave out --layout"),
        ("tiny out --to fp8 --layout bfl", 2, "invalid value 'bfl'", ""),
        ("tiny out --to fp8 --prompts none.txt", 3, "cannot read (none.txt)", ""),
        ("tiny out --to fp8 --prompts blank.txt", 3, "not a list of prompts (blank.txt)", ""),
        ("tiny out --to fp8 --calibration-size 100", 2, "--calibration-size 100: ", "try --calibration-size 96"),
        (
            &format!("{weights} out.safetensors --to fp8"),
            2,
            "the rest of the model is needed, too",
            "--no-calibration need only the part",
        ),
        (&format!("{weights} out.safetensors --to fp8 --part text-encoder"), 3, "not a text encoder of FLUX.2", ""),
    ] {
        let args: Vec<&str> = ["quantize"].into_iter().chain(line.split(' ')).collect();
        let run = sandbox.bare(&args);
        assert_eq!(run.code, Some(code), "{line}: {}", run.stderr);
        assert!(run.stderr.starts_with(&format!("error: {message}")) || run.stderr.contains(message), "{line}: {}", run.stderr);
        assert!(
            hint.is_empty() || run.stderr.split("hint: ").nth(1).is_some_and(|text| text.contains(hint)),
            "{line}: {}",
            run.stderr
        );
        assert!(run.stdout.is_empty(), "{line}");
    }
    assert_eq!(sandbox.names(), before);
    assert_eq!(fs::read(sandbox.path("there.safetensors")).unwrap(), b"mine");
    // What was asked for explicitly is replaced.
    let forced = ["quantize", weights, "there.safetensors", "--to", "fp8", "--no-calibration", "--force", "-q"];
    sandbox.run(forced).good();
    let shard = Shard::open(&sandbox.path("there.safetensors")).unwrap();
    assert_eq!(shard.entry("single_blocks.0.linear1.weight").unwrap().dtype.name, "F8_E4M3");
    assert_eq!(sandbox.names(), before);
}

#[cfg(target_os = "linux")]
#[test]
fn a_limit_on_the_size_of_files_is_an_error_before_any_work() {
    let sandbox = Sandbox::new();
    for out in ["out.safetensors", "out"] {
        let line = ["quantize", "tiny", out, "--to", "fp8", "--no-calibration", "-q"];
        // The limit is in units of 512 or 1024 bytes; the transformer takes several megabytes.
        let run = Run::of(sandbox.limited("-f 2000", line));
        assert_eq!(run.code, Some(5), "{}", run.stderr);
        assert!(run.stderr.starts_with(&format!("error: cannot write ({out}")), "{}", run.stderr);
        assert!(sandbox.names().is_empty(), "{:?}", sandbox.names());
    }
}

/// What kiln would refuse in a written file is refused in its source: nothing is written.
#[test]
fn weights_that_kiln_would_not_use_are_named() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    let whole = |file: &str| fs::read(sandbox.path(&format!("model/{file}.safetensors"))).unwrap();
    let (transformer, text, vae) = ("flux-2-klein-tiny", "qwen", "ae");
    let (linear, down) = ("single_blocks.0.linear1.weight", "model.layers.3.mlp.down_proj.weight");
    let bf16 = |value: f32| DType::Bf16.encoded(&[value]);
    let quantized = |what: &str, tensor: &str, why: &str| format!("{what} (FILE): tensor `{tensor}` {why}");
    let no_scale = |tensor: &str, why: &str| quantized("cannot be quantized", tensor, why);
    let damaged = |tensor: &str| quantized("damaged weights", tensor, "has values that are not finite");
    let zeros = |tensor: &str| quantized("incomplete file", tensor, "is all zeros");
    let not_finite = "has values that are not finite";
    // The file, the tensor, its first bytes or zeros from one of its eighths on, and the error. One part, but copies need a folder.
    let cases = [
        (transformer, linear, Some(f32::INFINITY), 0, no_scale(linear, not_finite)),
        (
            transformer,
            linear,
            Some(1e30),
            0,
            no_scale(linear, "has values of up to 1.00025555e30, which is too large for a scale"),
        ),
        (transformer, "img_in.weight", Some(f32::NAN), 0, no_scale("img_in.weight", not_finite)),
        (
            transformer,
            "single_blocks.0.norm.key_norm.scale",
            Some(f32::NEG_INFINITY),
            0,
            no_scale("single_blocks.0.norm.key_norm.scale", not_finite),
        ),
        (transformer, linear, None, 4, quantized("incomplete file", linear, "is zeros from byte")),
        (transformer, "img_in.weight", None, 0, zeros("img_in.weight")),
        (transformer, "single_blocks.0.norm.key_norm.scale", None, 0, zeros("single_blocks.0.norm.key_norm.scale")),
        (text, down, None, 0, zeros(down)),
        (text, down, Some(f32::NAN), 0, no_scale(down, not_finite)),
        (text, "model.embed_tokens.weight", Some(f32::NAN), 0, no_scale("model.embed_tokens.weight", not_finite)),
        (vae, "decoder.conv_in.weight", Some(f32::NAN), 0, damaged("decoder.conv_in.weight")),
        (vae, "decoder.conv_in.weight", None, 0, zeros("decoder.conv_in.weight")),
    ];
    for (file, tensor, value, eighth, error) in cases {
        let (original, path) = (whole(file), format!("model/{file}.safetensors"));
        let range = Shard::open(&sandbox.path(&path)).unwrap().entry(tensor).unwrap().range.clone();
        let mut bytes = original.clone();
        match value {
            Some(value) => bytes[range.start..range.start + 2].copy_from_slice(&bf16(value)),
            None => bytes[range.start + range.len() / 8 * eighth..range.end].fill(0),
        }
        fs::write(sandbox.path(&path), bytes).unwrap();
        let part = if file == text { "text-encoder" } else { "transformer" };
        let (input, out) = if file == vae { ("model", "out") } else { (&*path, "out.safetensors") };
        let run = sandbox.run(["quantize", input, out, "--to", "fp8", "--no-calibration", "-q", "--part", part]);
        assert_eq!(run.code, Some(3), "{tensor}: {}", run.stderr);
        assert!(run.stderr.starts_with(&format!("error: {}", error.replace("FILE", &path))), "{}", run.stderr);
        assert!(run.stderr.contains("\nhint: ") && run.stderr.contains("download it again"), "{}", run.stderr);
        assert_eq!(sandbox.names(), ["model"], "{tensor}");
        fs::write(sandbox.path(&path), original).unwrap();
    }
}
