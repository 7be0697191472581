//! Tokenizers: unsupported files, files that cannot be read, and models that do not take one.

use super::*;
use common::mistake::Hint;
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::process::Command;

const HINT: Hint = Is("use the tokenizer.json that came with the text encoder");

/// The tiny model's tokenizer with a change.
fn changed(sandbox: &Sandbox, name: &str, change: impl FnOnce(&mut Value)) {
    let mut file: Value = serde_json::from_slice(kiln::internals::tiny::TOKENIZER).unwrap();
    change(&mut file);
    write(sandbox, name, file.to_string());
}

/// Creates a named pipe, which nobody writes to.
fn pipe(sandbox: &Sandbox, name: &str) {
    assert!(Command::new("mkfifo").arg(sandbox.path(name)).status().unwrap().success());
}

#[test]
fn files_that_are_programs() {
    let sandbox = prepared();
    let doubling = vec![json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}); 40];
    let normalizers = [
        ("doubling.json", json!({"type": "Sequence", "normalizers": doubling})),
        ("prepend.json", json!({"type": "Prepend", "prepend": "x".repeat(5 << 20)})),
        ("charsmap.json", json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="})),
        ("replace.json", doubling[0].clone()),
    ];
    for (name, normalizer) in normalizers {
        changed(&sandbox, name, |file| file["normalizer"] = normalizer);
    }
    let splits = ["pre_tokenizer", "pretokenizers"];
    changed(&sandbox, "pattern.json", |file| file[splits[0]][splits[1]][0]["pattern"]["Regex"] = "(a*)*b".into());
    changed(&sandbox, "dropout.json", |file| file["model"]["dropout"] = 0.5.into());
    changed(&sandbox, "twice.json", |file| file["model"]["vocab"]["a"] = 0.into());
    changed(&sandbox, "merge.json", |file| file["model"]["merges"] = json!(["a bc"]));
    changed(&sandbox, "unigram.json", |file| file["model"] = json!({"type": "Unigram", "vocab": [["a", 0.5]], "unk_id": 0}));
    changed(&sandbox, "whole.json", |file| file["pre_tokenizer"] = json!(null));
    // Without the token of the letter `z`, whose id another token takes.
    changed(&sandbox, "letters.json", |file| {
        let vocab = file["model"]["vocab"].as_object_mut().unwrap();
        let id = vocab.remove("z").unwrap();
        vocab.insert("zz".into(), id);
    });
    let mut rows = Vec::new();
    for (name, detail) in [
        ("whole", "it has no pre-tokenizer, kiln knows ByteLevel"),
        ("letters", "its vocabulary has no token for the byte letter `z`"),
        ("doubling", "its normalizer is `Sequence`, kiln knows NFC"),
        ("prepend", "its normalizer is `Prepend`, kiln knows NFC"),
        ("charsmap", "its normalizer is `Precompiled`, kiln knows NFC"),
        ("replace", "its normalizer is `Replace`, kiln knows NFC"),
        ("pattern", "its pre-tokenizer's Split has the pattern `(a*)*b`, kiln knows Qwen3's and Llama 3's"),
        ("dropout", "`dropout` is 0.5, kiln knows 0"),
        ("twice", "its token `Ā` has the id 0, and so has another"),
        ("merge", "Token `bc` out of vocabulary"),
        ("unigram", "its model is `Unigram`, kiln knows BPE"),
    ] {
        let first = format!("not a usable tokenizer ({name}.json): {detail}");
        for line in ["x -q", "plan"] {
            rows.push(row(&format!("{line} --model model --tokenizer {name}.json"), 3, first.clone(), HINT));
        }
    }
    check(&sandbox, &rows);
}

#[test]
fn files_that_cannot_be_read() {
    let sandbox = prepared();
    pipe(&sandbox, "pipe");
    fs::create_dir(sandbox.path("nothing")).unwrap();
    // Models whose tokenizer exists and cannot be read: the embedded one must not be used instead.
    let model = |name: &str| {
        fs::create_dir(sandbox.path(name)).unwrap();
        for file in ["flux-2-klein-tiny.safetensors", "qwen.safetensors", "ae.safetensors"] {
            symlink(format!("../model/{file}"), sandbox.path(&format!("{name}/{file}"))).unwrap();
        }
    };
    let names = ["gone", "loop", "folder", "fifo", "away", "flat", "inner"];
    names.into_iter().for_each(model);
    symlink("none", sandbox.path("gone/tokenizer.json")).unwrap();
    symlink("tokenizer.json", sandbox.path("loop/tokenizer.json")).unwrap();
    fs::create_dir(sandbox.path("folder/tokenizer.json")).unwrap();
    pipe(&sandbox, "fifo/tokenizer.json");
    symlink("none", sandbox.path("away/tokenizer")).unwrap();
    write(&sandbox, "flat/tokenizer", "");
    fs::create_dir(sandbox.path("inner/tokenizer")).unwrap();
    symlink("none", sandbox.path("inner/tokenizer/tokenizer.json")).unwrap();
    // Nor may another file of the same folder be used instead.
    fs::copy(sandbox.path("model/tokenizer.json"), sandbox.path("inner/tokenizer.json")).unwrap();

    let given = |file: &str, first: String| row(&format!("x -q --model model --tokenizer {file}"), 3, first, Nothing);
    let (nowhere, irregular) = ("No such file or directory (os error 2)", "it is not a regular file");
    let mut rows = vec![
        given("pipe", format!("cannot read (pipe): {irregular}")),
        given("/dev/zero", format!("cannot read (/dev/zero): {irregular}")),
        given("nothing", "no model found (nothing): the folder holds no tokenizer.json".into()),
        given("fifo", format!("cannot read (fifo/tokenizer.json): {irregular}")),
        given("none.json", "no model found (none.json): it does not exist".into()),
    ];
    for (file, why) in [
        ("gone/tokenizer.json", nowhere),
        ("loop/tokenizer.json", "Too many levels of symbolic links (os error 40)"),
        ("folder/tokenizer.json", "it is a folder"),
        ("fifo/tokenizer.json", irregular),
        ("away/tokenizer/tokenizer.json", nowhere),
        ("flat/tokenizer/tokenizer.json", "Not a directory (os error 20)"),
        ("inner/tokenizer/tokenizer.json", nowhere),
    ] {
        let name = file.split('/').next().unwrap();
        for line in ["x -q", "plan"] {
            rows.push(row(&format!("{line} --model {name}"), 3, format!("cannot read ({file}): {why}"), Nothing));
        }
    }
    check(&sandbox, &rows);
    // A folder `tokenizer` of other files does not count, so the file next to it is used.
    fs::remove_file(sandbox.path("inner/tokenizer/tokenizer.json")).unwrap();
    sandbox.run(["plan", "--model", "inner"]).good();
}

#[test]
fn models_that_take_none() {
    let sandbox = prepared();
    let none = |line: &str, name: &str| {
        let what = format!("the model `{name}` has no parts to replace");
        row(&format!("{line} --tokenizer model/tokenizer.json"), 2, what, Is("name a model folder with --model"))
    };
    let nowhere = |line: &str| {
        let expected = "expected transformer/, text_encoder/, vae/ and tokenizer/tokenizer.json there, or give --transformer, \
            --text-encoder and --vae";
        let what = "no model found (--model): there is no transformer and no text encoder and no vae";
        row(&format!("{line} --tokenizer model/tokenizer.json"), 3, what, Is(expected)).within("unset KILN_MODEL")
    };
    check(
        &sandbox,
        &[
            none("x -q", "tiny"),
            none("x -q --model tiny", "tiny"),
            none("plan --model tiny", "tiny"),
            none("plan", "tiny"),
            none("bench --model tiny", "tiny"),
            nowhere("x -q"),
            nowhere("plan"),
        ],
    );
    #[cfg(feature = "builtin")]
    check(&sandbox, &[none("x -q --model builtin", "builtin"), none("plan --model builtin", "builtin")]);
}
