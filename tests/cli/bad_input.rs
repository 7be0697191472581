//! Common mistakes and the error of each: a table of command lines for the real program, each row with the exact exit code, the
//! exact first line of the error and the exact hint. No file may be written or changed.
#![cfg(unix)]

mod editing;
mod models;
mod outputs;
mod prompts;
mod references;
mod terminal;
mod tokenizers;
mod weights;

use common::header::{safetensors, write_sparse};
use common::mistake::{CHANGING, Change, Help, Is, Nothing, Row, check, row};
use common::sandbox::{QUICK, Sandbox, grouped};
use kiln::internals::component::Component;
use kiln::internals::config::{TextConfig, TransformerConfig, VaeConfig};
use kiln::internals::model::{text_manifest, transformer_manifest, vae_manifest};
use kiln::internals::names::{Layout, TensorSpec, file_tensors};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;

/// A sandbox with files that every row can use: the tiny model, and an existing image.
fn prepared() -> Sandbox {
    let sandbox = Sandbox::with_tiny();
    sandbox.tiny("model", &["--layout", "bfl"]);
    write(&sandbox, "there.png", "mine");
    sandbox
}

fn write(sandbox: &Sandbox, name: &str, bytes: impl AsRef<[u8]>) -> u64 {
    fs::write(sandbox.path(name), &bytes).unwrap();
    bytes.as_ref().len() as u64
}

/// The control of the table: a run without a mistake fails as a row, and so does a row with one wrong expectation.
#[test]
fn the_table_can_fail() {
    let sandbox = prepared();
    let exists = "output exists (there.png); not overwritten";
    let hint = "use --force or another name";
    let right = || row("x -q -o there.png", 5, exists, Is(hint));
    right().check(&sandbox).unwrap();
    for (wrong, what) in [
        (Row { code: 3, ..right() }, "exit code is"),
        (Row { first: "output exists (there.png)".into(), ..right() }, "error is"),
        (Row { hint: String::new(), ..right() }, "error is"),
        (Row { help: true, ..right() }, "error is"),
    ] {
        assert!(wrong.check(&sandbox).unwrap_err().contains(what));
    }
    let line = format!("x -q -o new.png {}", QUICK.join(" "));
    let report = row(&line, 5, exists, Is(hint)).check(&sandbox).unwrap_err();
    for what in ["exit code is\n  Some(0)", "standard output is\n  new.png", "files were left or changed"] {
        assert!(report.contains(what), "{report}");
    }
    let rewrites: Change = |sandbox| {
        write(sandbox, "there.png", "ours");
    };
    let report = right().meanwhile(rewrites).check(&sandbox).unwrap_err();
    assert!(report.contains("files were left or changed"), "{report}");
}

/// A sparse file with the header of a real model.
fn sparse(sandbox: &Sandbox, name: &str, part: Component, layout: Layout, manifest: &[TensorSpec]) {
    let tensors = manifest.iter().flat_map(|spec| file_tensors(part, layout, spec));
    write_sparse(&sandbox.path(name), &tensors.map(|spec| (spec.name, "BF16", spec.shape)).collect::<Vec<_>>());
}

/// A safetensors file of this header, followed by `data` zero bytes.
fn crafted(sandbox: &Sandbox, name: &str, header: &str, data: usize) {
    write(sandbox, name, safetensors(header, &vec![0; data]));
}
