//! Models: folders with wrong parts, unfinished downloads, and configurations that the engine does not support.

use super::*;
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const NOT_THERE: &str = "it is a link to something that is not there";
const PIPE: &str = "it is not a regular file";

fn pipe(sandbox: &Sandbox, name: &str) {
    assert!(Command::new("mkfifo").arg(sandbox.path(name)).status().unwrap().success());
}

/// Copies a folder.
fn copied(sandbox: &Sandbox, from: &str, to: &str) {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir(to).unwrap();
        for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            if from.is_dir() {
                copy(&from, &to);
            } else {
                fs::copy(from, to).unwrap();
            }
        }
    }
    copy(&sandbox.path(from), &sandbox.path(to));
}

/// Replaces a file by something else.
fn instead(sandbox: &Sandbox, name: &str, put: impl Fn(&Path)) {
    let path = sandbox.path(name);
    let _ = fs::remove_file(&path);
    put(&path);
}

#[test]
fn parts_that_are_not_what_they_seem() {
    let sandbox = prepared();
    sandbox.tiny("folder", &[]);
    for name in ["two", "linked", "piped", "nested", "three"] {
        copied(&sandbox, "model", name);
    }
    write(&sandbox, "two/flux-2-klein-9b.safetensors", "");
    write(&sandbox, "three/flux-2-klein-9b.safetensors", "");
    write(&sandbox, "three/qwen_3_8b.safetensors", "");
    instead(&sandbox, "linked/ae.safetensors", |path| symlink("../blobs/none", path).unwrap());
    instead(&sandbox, "piped/qwen.safetensors", |_| pipe(&sandbox, "piped/qwen.safetensors"));
    instead(&sandbox, "nested/ae.safetensors", |path| fs::create_dir(path).unwrap());
    copied(&sandbox, "folder", "flat");
    fs::remove_dir_all(sandbox.path("flat/vae")).unwrap();
    write(&sandbox, "flat/vae", "");
    copied(&sandbox, "folder", "unlinked");
    let weights = "unlinked/text_encoder/model.safetensors";
    instead(&sandbox, weights, |path| symlink("../../../blobs/none", path).unwrap());
    copied(&sandbox, "folder", "both");
    write(&sandbox, "both/vae/diffusion_pytorch_model.safetensors.index.json", r#"{"weight_map":{}}"#);
    copied(&sandbox, "folder", "usual");
    fs::copy(
        sandbox.path("usual/text_encoder/model.safetensors"),
        sandbox.path("usual/text_encoder/diffusion_pytorch_model.safetensors"),
    )
    .unwrap();
    for name in ["pipe-beside", "link-beside", "link-before", "link-instead"] {
        copied(&sandbox, "model", name);
    }
    pipe(&sandbox, "pipe-beside/flux-2-klein-9b.safetensors");
    symlink("none", sandbox.path("link-beside/flux-2-klein-9b.safetensors")).unwrap();
    fs::create_dir(sandbox.path("link-before/diffusion_models")).unwrap();
    symlink("none", sandbox.path("link-before/diffusion_models/flux-2-klein-4b.safetensors")).unwrap();
    symlink("none", sandbox.path("link-instead/transformer")).unwrap();
    symlink("none", sandbox.path("model-link")).unwrap();

    let model =
        |name: &str, what: &str, hint| row(&format!("x -q --model {name}"), 3, format!("no model found ({name}): {what}"), hint);
    check(
        &sandbox,
        &[
            model(
                "two",
                "2 files could be the transformer: flux-2-klein-9b.safetensors, flux-2-klein-tiny.safetensors",
                Is("pick one with --transformer"),
            ),
            model(
                "three",
                "2 files could be the transformer: flux-2-klein-9b.safetensors, flux-2-klein-tiny.safetensors; \
                 2 files could be the text encoder: qwen.safetensors, qwen_3_8b.safetensors",
                Is("pick one with --transformer and one with --text-encoder"),
            ),
            model(
                "linked",
                &format!("the vae cannot be used: ae.safetensors: {NOT_THERE}"),
                Is("put a complete file there, or give another with --vae"),
            ),
            model(
                "piped",
                &format!("the text encoder cannot be used: qwen.safetensors: {PIPE}"),
                Is("put a complete file there, or give another with --text-encoder"),
            ),
            model(
                "nested",
                "the vae cannot be used: ae.safetensors: it is a folder",
                Is("put a complete file there, or give another with --vae"),
            ),
            model(
                "flat",
                "the vae cannot be used: vae: Not a directory (os error 20)",
                Is("put a complete file there, or give another with --vae"),
            ),
            model(
                "unlinked",
                &format!("the text encoder cannot be used: text_encoder/model.safetensors: {NOT_THERE}"),
                Is("put a complete file there, or give another with --text-encoder"),
            ),
            // An unusable file is an error; another one is not used in its place.
            model(
                "pipe-beside",
                &format!(
                    "the transformer cannot be used: flux-2-klein-9b.safetensors: {PIPE} (usable is flux-2-klein-tiny.safetensors)"
                ),
                Is("pick one with --transformer"),
            ),
            model(
                "link-beside",
                &format!(
                    "the transformer cannot be used: flux-2-klein-9b.safetensors: {NOT_THERE} \
                     (usable is flux-2-klein-tiny.safetensors)"
                ),
                Is("pick one with --transformer"),
            ),
            model(
                "link-before",
                &format!(
                    "the transformer cannot be used: diffusion_models/flux-2-klein-4b.safetensors: {NOT_THERE} \
                     (usable is flux-2-klein-tiny.safetensors)"
                ),
                Is("pick one with --transformer"),
            ),
            model(
                "link-instead",
                &format!("the transformer cannot be used: transformer: {NOT_THERE} (usable is flux-2-klein-tiny.safetensors)"),
                Is("pick one with --transformer"),
            ),
            model("model-link", NOT_THERE, Nothing),
            row("x -q --model model --vae model-link", 3, format!("no model found (model-link): {NOT_THERE}"), Nothing),
            row(
                "x -q --model usual",
                3,
                "several checkpoints in one folder (usual/text_encoder): diffusion_pytorch_model.safetensors, model.safetensors",
                Is("name the file itself, or move what is not meant elsewhere"),
            ),
            // A single file, and the index of several shards next to it.
            row(
                "x -q --model both",
                3,
                "several checkpoints in one folder (both/vae): diffusion_pytorch_model.safetensors, \
                 diffusion_pytorch_model.safetensors.index.json",
                Is("name the file itself, or move what is not meant elsewhere"),
            ),
        ],
    );
}

#[test]
fn settings_that_are_no_files() {
    let sandbox = prepared();
    sandbox.tiny("folder", &[]);
    let mut rows = Vec::new();
    for (folder, file) in [
        ("a", "kiln.json"),
        ("b", "model_index.json"),
        ("c", "transformer/config.json"),
        ("d", "text_encoder/config.json"),
        ("e", "vae/config.json"),
        ("f", "text_encoder/model.safetensors.index.json"),
        ("s", "scheduler/scheduler_config.json"),
    ] {
        copied(&sandbox, "folder", folder);
        if folder == "f" {
            fs::rename(sandbox.path("f/text_encoder/model.safetensors"), sandbox.path("f/text_encoder/x.safetensors")).unwrap();
        }
        let path = format!("{folder}/{file}");
        instead(&sandbox, &path, |_| pipe(&sandbox, &path));
        rows.push(row(&format!("x -q --model {folder}"), 3, format!("cannot read ({path}): {PIPE}"), Nothing));
    }
    copied(&sandbox, "folder", "g");
    instead(&sandbox, "g/vae/config.json", |path| symlink("none", path).unwrap());
    let first = "cannot read (g/vae/config.json): No such file or directory (os error 2)";
    rows.push(row("x -q --model g", 3, first, Nothing));
    check(&sandbox, &rows);
}

#[test]
fn downloads_that_are_not_finished() {
    let sandbox = prepared();
    let id = "black-forest-labs/FLUX.2-klein-4B";
    let hub = ".cache/huggingface/hub";
    let repository = format!("{hub}/models--black-forest-labs--FLUX.2-klein-4B");
    fs::create_dir_all(sandbox.path(&format!("{repository}/snapshots/abc"))).unwrap();
    fs::create_dir_all(sandbox.path(&format!("{repository}/refs"))).unwrap();
    write(&sandbox, &format!("{repository}/refs/main"), "abc");
    write(&sandbox, &format!("{repository}/snapshots/abc/model_index.json"), "{}");
    let bare = |line: &str, what: &str| {
        let first = format!("no model found ({id}): it is in the Hugging Face cache, but not whole: {what}");
        let hint = Is(
            "finish the download, for example with `hf download black-forest-labs/FLUX.2-klein-4B`; --model builtin is kiln's own \
             small model",
        );
        row(line, 3, first, hint).within("unset KILN_MODEL")
    };
    let nothing = "there is no transformer and no text encoder and no vae";
    check(&sandbox, &[bare("x -q", nothing), bare("bench -q", nothing)]);

    // The file that names the revision is a folder, or endless.
    let reference = format!("{repository}/refs/main");
    let unreadable = |why: &str| format!("the Hugging Face cache has a reference that cannot be read ($HOME/{reference}): {why}");
    let named = |why: &str| {
        let hint = Is("download it first, for example with `hf download`, or name a folder");
        row(&format!("x -q --model {id}"), 3, format!("no model found ({id}): {}", unreadable(why)), hint)
    };
    instead(&sandbox, &reference, |_| pipe(&sandbox, &reference));
    check(&sandbox, &[named(PIPE), bare("x -q", &unreadable(PIPE))]);
    instead(&sandbox, &reference, |path| symlink("/dev/zero", path).unwrap());
    check(&sandbox, &[named(PIPE)]);
    instead(&sandbox, &reference, |path| fs::write(path, [b'a'; 300]).unwrap());
    check(&sandbox, &[named("it is longer than 256 bytes")]);
    // The revision is empty, or does not exist.
    let wrong = |how: &str| format!("the Hugging Face cache has a reference that {how} ($HOME/{reference}): ");
    instead(&sandbox, &reference, |path| fs::write(path, "../../../m").unwrap());
    check(&sandbox, &[bare("x -q", &format!("{}`../../../m`", wrong("names no revision")))]);
    instead(&sandbox, &reference, |path| fs::write(path, "0123").unwrap());
    check(&sandbox, &[bare("x -q", &format!("{}`0123`: it does not exist", wrong("names a revision without files")))]);
    // The repository, or the whole cache, is a dangling link.
    fs::remove_dir_all(sandbox.path(&repository)).unwrap();
    symlink("none", sandbox.path(&repository)).unwrap();
    check(&sandbox, &[bare("x -q", &format!("its folder cannot be used ($HOME/{repository}): {NOT_THERE}"))]);
    fs::remove_dir_all(sandbox.path(hub)).unwrap();
    symlink("none", sandbox.path(hub)).unwrap();
    let first = format!("no model found ($HOME/{hub}): the Hugging Face cache cannot be used: {NOT_THERE}");
    let hint = Is("name a model with --model, or another cache with HF_HUB_CACHE");
    check(&sandbox, &[row("x -q", 3, first, hint).within("unset KILN_MODEL")]);
}

#[test]
fn weights_that_were_never_written() {
    let sandbox = prepared();
    let mut rows = Vec::new();
    let text = "model.layers.3.mlp.down_proj.weight";
    // Flag, file, tensor, the eighth at which its zeros begin, the message.
    for (flag, file, tensor, from, told) in [
        ("transformer", "flux-2-klein-tiny", "double_blocks.1.img_attn.proj.weight", 0, "is all zeros"),
        ("transformer", "flux-2-klein-tiny", "img_in.weight", 0, "is all zeros"),
        ("text-encoder", "qwen", text, 0, "is all zeros"),
        ("text-encoder", "qwen", "model.embed_tokens.weight", 0, "is all zeros"),
        ("vae", "ae", "decoder.conv_in.weight", 0, "is all zeros"),
        // Only vectors that multiply or divide are checked.
        ("text-encoder", "qwen", "model.layers.3.input_layernorm.weight", 0, "is all zeros"),
        ("transformer", "flux-2-klein-tiny", "single_blocks.0.norm.key_norm.scale", 0, "is all zeros"),
        ("vae", "ae", "bn.running_var", 0, "is all zeros"),
        ("transformer", "flux-2-klein-tiny", "single_blocks.0.linear1.weight", 7, "is zeros from byte"),
    ] {
        let source = sandbox.path(&format!("model/{file}.safetensors"));
        let range = kiln::internals::checkpoint::Shard::open(&source).unwrap().entry(tensor).unwrap().range.clone();
        let start = range.start + range.len() / 8 * from;
        let mut bytes = fs::read(&source).unwrap();
        bytes[start..range.end].fill(0);
        let name = format!("{}.safetensors", rows.len());
        write(&sandbox, &name, bytes);
        let told = if from == 0 { told.into() } else { format!("{told} {start} of the file on") };
        rows.push(row(
            &format!("x -q --model model --{flag} {name} {}", QUICK.join(" ")),
            3,
            format!("incomplete file ({name}): tensor `{tensor}` {told}"),
            Is("what is not downloaded yet reads as zeros; download it again"),
        ));
    }
    check(&sandbox, &rows);
}

#[test]
fn files_that_go_by_another_name() {
    let sandbox = prepared();
    let tensors = |list: &[(&str, &str, usize)]| {
        let mut end = 0;
        let entries: Vec<String> = list
            .iter()
            .map(|(name, dtype, bytes)| {
                let start = end;
                end += bytes;
                let size = if *dtype == "U8" { 1 } else { 4 };
                format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{start},{end}]}}", bytes / size)
            })
            .collect();
        (format!("{{{}}}", entries.join(",")), end)
    };
    let part = |flag: &str, file: &str| format!("x -q --model model --{flag} {file}");
    let mut rows = Vec::new();
    let lora = "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight";
    let kohya = "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight";
    for (i, (name, flag)) in [(lora, "transformer"), (kohya, "transformer"), (lora, "vae")].into_iter().enumerate() {
        let (header, data) = tensors(&[(name, "F32", 16)]);
        crafted(&sandbox, &format!("lora{i}"), &header, data);
        rows.push(row(
            &part(flag, &format!("lora{i}")),
            3,
            format!("not a model (lora{i}): it is a LoRA adapter, with tensor `{name}`"),
            Is("name the model that it was made for, and pass this file with --lora"),
        ));
    }
    let down = "model.layers.0.mlp.down_proj";
    let beside = |suffix: &str| format!("{down}.{suffix}");
    for (i, (suffixes, tensor, format)) in [
        (
            &["weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"][..],
            "weight",
            "NF4 (bitsandbytes)",
        ),
        (&["weight", "weight.absmax", "weight.quant_map"], "weight", "4-bit (bitsandbytes)"),
        (&["weight", "SCB"], "weight", "INT8 (bitsandbytes)"),
        (&["qweight", "qzeros", "scales", "g_idx"], "g_idx", "GPTQ"),
        (&["qweight", "qzeros", "scales"], "qweight", "AWQ or GPTQ"),
    ]
    .into_iter()
    .enumerate()
    {
        let names: Vec<String> = suffixes.iter().map(|suffix| beside(suffix)).collect();
        let list: Vec<(&str, &str, usize)> = names.iter().map(|name| (name.as_str(), "U8", 8)).collect();
        let (header, data) = tensors(&list);
        crafted(&sandbox, &format!("quantized{i}"), &header, data);
        rows.push(row(
            &part("text-encoder", &format!("quantized{i}")),
            3,
            format!("unsupported quantization (quantized{i}): tensor `{}` is {format}", beside(tensor)),
            Is("use the BF16, FP8 or NVFP4 checkpoint of the same model"),
        ));
    }
    let (foreign, unsupported, use_safetensors) =
        ("not a safetensors file", "unsupported weight format", "use a .safetensors file");
    for (name, bytes, what, detail, hint) in [
        ("a.png", &b"\x89PNG\r\n\x1A\n\0\0\0\x0DIHDR"[..], foreign, "it is a PNG image", use_safetensors),
        ("a.jpg", b"\xFF\xD8\xFF\xE0\0\x10JFIF\0", foreign, "it is a JPEG image", use_safetensors),
        ("a.so", b"\x7FELF\x02\x01\x01\0\0\0", foreign, "it is a program or library (ELF)", use_safetensors),
        ("a.gz", b"\x1F\x8B\x08\0\0\0\0\0\0\x03", foreign, "it is packed with gzip", "unpack it first"),
        ("a.zst", b"\x28\xB5\x2F\xFD\x24\0\0\0\0\0", foreign, "it is packed with zstd", "unpack it first"),
        ("a.h5", b"\x89HDF\r\n\x1A\n\0\0", unsupported, "HDF5, as Keras writes it", use_safetensors),
        ("a.onnx", b"\x08\x08\x12\x07pytorch\x1A\x052.8.0", unsupported, "ONNX", use_safetensors),
        ("a.txt", b"the weights are in the other folder", foreign, "it is text", use_safetensors),
        ("a.json", b"{\"hidden_size\": 2560}", foreign, "it is JSON", use_safetensors),
        (
            "a.safetensors.index.json",
            b"{\"metadata\": {}, \"weight_map\": {}}",
            foreign,
            "it is the index of a checkpoint in several files",
            "give the folder that holds it",
        ),
    ] {
        write(&sandbox, name, bytes);
        rows.push(row(&part("vae", name), 3, format!("{what} ({name}): {detail}"), Is(hint)));
    }
    check(&sandbox, &rows);
}

#[test]
fn settings_that_contradict_the_engine() {
    let sandbox = prepared();
    sandbox.tiny("folder", &[]);
    let mut rows = Vec::new();
    for (part, key, value, need) in [
        ("transformer", "_class_name", json!("FluxTransformer2DModel"), "Flux2Transformer2DModel"),
        ("transformer", "eps", json!(1e300), "a number above 0 and at most 0.01"),
        ("text_encoder", "hidden_act", json!("gelu"), "silu"),
        ("text_encoder", "use_sliding_window", json!(true), "false"),
        ("text_encoder", "model_type", json!(5), "a text"),
        ("text_encoder", "architectures", json!("LlamaForCausalLM"), "a list of classes"),
        ("text_encoder", "rope_parameters", json!({"type": "yarn"}), "a rotation of type `default`"),
        ("text_encoder", "rope_parameters", json!([1]), "an object"),
        ("text_encoder", "quantization_config", json!({"bits": 4}), "none, or ModelOpt's"),
        ("transformer", "quantization_config", json!({"bits": 4}), "none, or ModelOpt's"),
        ("scheduler", "_class_name", json!("EulerDiscreteScheduler"), "FlowMatchEulerDiscreteScheduler"),
        ("scheduler", "use_dynamic_shifting", json!(false), "true"),
        ("scheduler", "num_train_timesteps", json!(500), "1000"),
        ("vae", "act_fn", json!("mish"), "silu"),
        ("vae", "_class_name", json!("AutoencoderKL"), "AutoencoderKLFlux2"),
    ] {
        let name = format!("m{}", rows.len());
        copied(&sandbox, "folder", &name);
        let file = if part == "scheduler" { "scheduler_config.json" } else { "config.json" };
        let path = format!("{name}/{part}/{file}");
        let mut config: Value = serde_json::from_slice(&fs::read(sandbox.path(&path)).unwrap()).unwrap();
        config[key] = value.clone();
        write(&sandbox, &path, config.to_string());
        let first = format!("unsupported configuration ({path}): `{key}` is {value}, needed is {need}");
        rows.push(row(&format!("x -q --model {name}"), 3, first, Nothing));
    }
    check(&sandbox, &rows);
}

#[test]
fn variants_that_contradict_the_weights() {
    let sandbox = prepared();
    sandbox.tiny("folder", &[]);
    write(&sandbox, "folder/kiln.json", r#"{"variant": "dev"}"#);
    let wrong = |what: &str| format!("variant does not fit the transformer: {what}");
    let dev = wrong("guidance is an input of `dev`, and not of these weights");
    let klein = |variant: &str| wrong(&format!("guidance is an input of these weights, and not of `{variant}`"));
    let hint = Is("leave out --variant, and `variant` in kiln.json; the weights show it");
    let quantize = "quantize model/flux-2-klein-tiny.safetensors out.safetensors --to fp8 --no-calibration -q";
    check(
        &sandbox,
        &[
            row("x -q --model model --variant dev", 3, &*dev, hint),
            row("x -q --model tiny --variant dev", 3, &*dev, hint),
            row("x -q --model builtin --variant dev", 3, &*dev, hint),
            row("x -q --model folder", 3, &*dev, hint),
            row("plan --model model --variant dev", 3, &*dev, hint),
            row("plan --model klein-4b --variant dev", 3, &*dev, hint),
            row("plan --model dev --variant distilled", 3, klein("distilled"), hint),
            row("plan --model dev --variant kv", 3, klein("kv"), hint),
            row(&format!("{quantize} --variant dev"), 3, &*dev, hint),
        ],
    );
}

#[test]
fn keys_that_are_there_twice() {
    let sandbox = prepared();
    sandbox.tiny("folder", &[]);
    let mut rows = Vec::new();
    for (path, text, key) in [
        ("kiln.json", r#"{"steps": 4, "steps": 5}"#, "`steps` is there twice at line 1 column 20"),
        (
            "model_index.json",
            r#"{"is_distilled": true, "is_distilled": false}"#,
            "`is_distilled` is there twice at line 1 column 37",
        ),
        ("vae/config.json", r#"{"act_fn": "silu", "act_fn": "silu"}"#, "`act_fn` is there twice at line 1 column 27"),
    ] {
        let name = format!("m{}", rows.len());
        copied(&sandbox, "folder", &name);
        write(&sandbox, &format!("{name}/{path}"), text);
        rows.push(row(&format!("x -q --model {name}"), 3, format!("invalid configuration ({name}/{path}): {key}"), Nothing));
    }
    check(&sandbox, &rows);
}

/// A command's hints name only flags that it has.
#[test]
fn other_commands() {
    let sandbox = prepared();
    write(&sandbox, "times.json", "mine");
    let first = "cannot write (times.json): it exists, and is not overwritten; give another name";
    check(&sandbox, &[row("bench --kernels --quick --json=times.json", 5, first, Nothing)]);
}
