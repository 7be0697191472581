//! Files that are read are never replaced, whatever the flags.
#![cfg(unix)]

use common::adapter_files::{PEFT, file, lora};
use common::sandbox::{QUICK, Run, Sandbox};
use kiln::internals::tensor::DType;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The content of every file below a folder.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| match path.is_dir() {
        true => contents(&path),
        false => [(path.clone(), fs::read(&path).unwrap())].into(),
    });
    files.collect()
}

/// A sandbox with a model, an adapter, an image and a prompt.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let layer = "diffusion_model.double_blocks.0.img_attn.proj";
    fs::write(sandbox.path("adapter.safetensors"), file(&lora(layer, PEFT, [256, 256], 2), DType::F32, &[])).unwrap();
    fs::write(sandbox.path("prompt.txt"), "a fox").unwrap();
    sandbox.write_png("image.png", 64, 64, |x, y| [x as u8, y as u8, 1]);
    sandbox
}

/// Runs the program, which has to refuse and to change nothing.
fn refused(sandbox: &Sandbox, args: &[&str], why: &str) {
    let before = contents(&sandbox.0);
    let Run { code, stderr, stdout } = sandbox.run(args);
    let said = stderr + std::str::from_utf8(&stdout).unwrap();
    assert!(code.is_some_and(|code| [1, 5].contains(&code)) && said.contains(why), "{args:?}: {code:?} {said}");
    assert!(contents(&sandbox.0) == before, "{args:?} changed a file");
}

const MODEL: [&str; 3] = ["x", "--model", "model"];

#[test]
fn a_trace_replaces_nothing_but_a_trace() {
    let sandbox = sandbox();
    let transformer = "model/transformer/diffusion_pytorch_model.safetensors";
    let why = "this is not a trace, and --trace replaces nothing else; use another name";
    for target in [transformer, "model/tokenizer/tokenizer.json", "model/vae/config.json", "adapter.safetensors", "image.png"] {
        let flags = ["--force", "--lora", "adapter.safetensors", "--reference", "image.png", "-o", "out.png", "--trace", target];
        refused(&sandbox, &[&MODEL[..], &QUICK, &flags].concat(), why);
        // Neither does a run that fails for another reason.
        refused(&sandbox, &[&MODEL[..], &QUICK, &["--force", "-o", "none/out.png", "--trace", target]].concat(), why);
        fs::write(sandbox.path("lines"), "a fox").unwrap();
        refused(&sandbox, &[&["run", "lines", "--model", "model", "--force", "--trace", target][..], &QUICK].concat(), why);
    }
    let trace = [&MODEL[..], &QUICK, &["-o", "out.png", "--force", "--trace", "trace.json"]].concat();
    sandbox.run(&trace).good();
    let first = fs::read(sandbox.path("trace.json")).unwrap();
    sandbox.run(&trace).good();
    assert_ne!(fs::read(sandbox.path("trace.json")).unwrap(), first, "a trace replaces a trace");
    fs::write(sandbox.path("trace.json"), "").unwrap();
    sandbox.run(&trace).good();
}

#[test]
fn a_dump_replaces_nothing_but_a_dump() {
    let sandbox = sandbox();
    let why = "this is not a dump, and --dump replaces nothing else; use another name";
    for target in ["model/tokenizer/tokenizer.json", "model/model_index.json", "model/vae/config.json", "prompt.txt", "image.png"]
    {
        refused(&sandbox, &[&MODEL[..], &QUICK, &["--force", "-o", "out.png", "--dump", target]].concat(), why);
    }
    let dump = [&MODEL[..], &QUICK, &["-o", "out.png", "--force", "--dump", "dump.safetensors"]].concat();
    sandbox.run(&dump).good();
    sandbox.run(&dump).good();
    // The noise of this very run.
    let why = "this is one of the files that are read";
    refused(&sandbox, &[&dump[..], &["--noise", "dump.safetensors"]].concat(), why);
}

#[test]
fn an_image_replaces_no_file_that_is_read() {
    let sandbox = sandbox();
    sandbox.tiny("parts", &["--layout", "bfl"]);
    let why = "this is one of the files that are read";
    for (from, to) in [
        ("parts/flux-2-klein-tiny.safetensors", "part.png"),
        ("adapter.safetensors", "adapter.png"),
        ("prompt.txt", "prompt.png"),
    ] {
        fs::copy(sandbox.path(from), sandbox.path(to)).unwrap();
    }
    fs::write(sandbox.path("lines.png"), r#"{"prompt": "x", "output": "lines.png"}"#).unwrap();
    let model = ["--model", "parts", "--force"];
    let line = |lora: &str, output: &str| format!(r#"{{"prompt": "x", "lora": [{lora}], "output": "{output}"}}"#);
    for (lines, flags) in [
        (line("", "part.png"), &["--transformer", "part.png"][..]),
        (line("\"adapter.png\"", "adapter.png"), &[]),
        (line("", "adapter.png"), &["--lora", "adapter.png"]),
        (r#"{"prompt": "x", "references": ["image.png"], "output": "image.png"}"#.into(), &[]),
    ] {
        fs::write(sandbox.path("lines"), lines).unwrap();
        refused(&sandbox, &[&["run", "lines"][..], &model, &QUICK, flags].concat(), why);
    }
    refused(&sandbox, &[&["run", "lines.png"][..], &model, &QUICK].concat(), why);
    for (flags, output) in [
        (&["x", "--transformer", "part.png"][..], "part.png"),
        (&["x", "--lora", "adapter.png"], "adapter.png"),
        (&["x", "--reference", "image.png"], "image.png"),
        (&["--prompt-file", "prompt.png"], "prompt.png"),
    ] {
        refused(&sandbox, &[flags, &model, &QUICK, &["-o", output]].concat(), why);
    }
}

#[test]
fn quantize_replaces_no_tokenizer() {
    let sandbox = sandbox();
    fs::copy(sandbox.path("model/tokenizer/tokenizer.json"), sandbox.path("tokenizer.safetensors")).unwrap();
    let flags = [
        "--tokenizer",
        "tokenizer.safetensors",
        "--to",
        "fp8",
        "--calibration-size",
        "64",
        "--calibration-steps",
        "1",
        "--force",
    ];
    let line = [&["quantize", "model", "tokenizer.safetensors", "--backend", "cpu"][..], &flags].concat();
    refused(&sandbox, &line, "this is one of the files that are read");
}

/// What changes the image changes its name, so that `--skip-existing` makes it.
#[test]
fn skip_existing_knows_everything_that_decides_an_image() {
    let sandbox = sandbox();
    fs::write(sandbox.path("lines"), r#"{"prompt": "a", "seed": 3}"#).unwrap();
    let run = |flags: &[&str]| {
        let line = [&["run", "lines", "--model", "model", "--skip-existing", "-o", "out"][..], &QUICK, flags].concat();
        let answer = sandbox.run(line).good().json().remove(0);
        answer["skipped"] == true
    };
    assert!(!run(&[]) && run(&[]));
    let change = |file: &str, from: &str, to: &str| {
        let path = sandbox.path(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file}: {text}");
        fs::write(path, text.replacen(from, to, 1)).unwrap();
    };
    change("model/text_encoder/config.json", "\"rms_norm_eps\": 1e-6", "\"rms_norm_eps\": 1e-5");
    assert!(!run(&[]) && run(&[]), "an epsilon of the text encoder");
    let adapter = ["--lora", "adapter.safetensors"];
    assert!(!run(&adapter) && run(&adapter));
    let merged = ["--lora", "adapter.safetensors", "--lora-mode", "merge"];
    assert!(!run(&merged) && run(&merged), "the mode of adapters");
    let quality = |quality| ["--format", "jpeg", "--quality", quality];
    assert!(!run(&quality("90")) && run(&quality("90")) && !run(&quality("20")), "the quality of a JPEG");
}
