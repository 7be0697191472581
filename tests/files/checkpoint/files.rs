//! Files and folders on disk: single files, shards with and without an index, and other entries.

use super::{described, message, zeros};
use common::scratch::Scratch;
use kiln::error::Error;
use kiln::internals::checkpoint::{Shard, Weights};
use kiln::internals::component::Component;
use kiln::internals::names::TensorSpec;
use std::path::Path;

/// Two tensors of a text encoder, each in a shard.
fn halves() -> [(&'static str, Vec<u8>); 2] {
    [
        ("model-00001-of-00002.safetensors", zeros(&[described("model.embed_tokens.weight", "BF16", &[8, 4])])),
        ("model-00002-of-00002.safetensors", zeros(&[described("model.layers.0.input_layernorm.weight", "BF16", &[4])])),
    ]
}

fn index(map: &str) -> String {
    format!(r#"{{"metadata":{{"total_size":72}},"weight_map":{{{map}}}}}"#)
}

const BOTH: &str = r#""model.embed_tokens.weight":"model-00001-of-00002.safetensors",
    "model.layers.0.input_layernorm.weight":"model-00002-of-00002.safetensors""#;

fn refused(folder: &Path) -> String {
    message(&Weights::open(Component::TextEncoder, folder).unwrap_err())
}

#[test]
fn shards_are_read_with_and_without_an_index() {
    let scratch = Scratch::new();
    for (name, bytes) in halves() {
        scratch.write(name, bytes);
    }
    let bare = Weights::open(Component::TextEncoder, scratch.path()).unwrap();
    scratch.write("model.safetensors.index.json", index(BOTH));
    let indexed = Weights::open(Component::TextEncoder, scratch.path()).unwrap();
    for weights in [bare, indexed] {
        assert_eq!(weights.shards().len(), 2);
        assert_eq!(weights.shape("model.embed_tokens.weight").unwrap(), [8, 4]);
        assert_eq!(weights.weight(&TensorSpec::new("model.layers.0.input_layernorm.weight", &[4])).unwrap().parts[0].cols(), 4);
    }
}

/// A sharded checkpoint with an index takes precedence over a single file next to it, unless that file has a usual checkpoint
/// name. Then the choice is ambiguous and an error.
#[test]
fn a_stray_file_does_not_take_the_place_of_a_checkpoint() {
    let other = || zeros(&[described("model.embed_tokens.weight", "F32", &[2, 2])]);
    for (stray, indexed, wins) in [
        ("aaa.safetensors", true, true),
        ("zzz.safetensors", true, true),
        ("model.fp16.safetensors", true, true),
        ("model.safetensors", true, false),
        ("diffusion_pytorch_model.safetensors", true, false),
        ("aaa.safetensors", false, false),
        ("model.safetensors", false, false),
    ] {
        let scratch = Scratch::new();
        for (name, bytes) in halves() {
            scratch.write(name, bytes);
        }
        if indexed {
            scratch.write("model.safetensors.index.json", index(BOTH));
        }
        scratch.write(stray, other());
        if wins {
            let weights = Weights::open(Component::TextEncoder, scratch.path()).unwrap();
            assert_eq!(weights.shape("model.embed_tokens.weight").unwrap(), [8, 4], "{stray}");
            assert_eq!(weights.source(), format!("2 shards of {}", scratch.path().display()));
        } else {
            let error = refused(scratch.path());
            let beside = if indexed { "model.safetensors.index.json" } else { "model-00001-of-00002.safetensors" };
            assert!(
                error.starts_with("several checkpoints in one folder") && error.contains(&format!("{stray}, {beside}")),
                "{error}"
            );
        }
        // The path of a file is never ambiguous.
        let single = Weights::open(Component::TextEncoder, &scratch.path().join(stray)).unwrap();
        assert_eq!(single.shape("model.embed_tokens.weight").unwrap(), [2, 2]);
        assert_eq!(single.source(), scratch.path().join(stray).display().to_string());
    }
}

/// Usual names take precedence over others; two usual names are ambiguous.
#[test]
fn of_two_usual_names_none_is_guessed() {
    let scratch = Scratch::new();
    let file = |side| zeros(&[described("model.embed_tokens.weight", "F32", &[side, 2])]);
    scratch.write("model.safetensors", file(2));
    scratch.write("aaa.safetensors", file(3));
    let weights = Weights::open(Component::TextEncoder, scratch.path()).unwrap();
    assert_eq!(weights.shape("model.embed_tokens.weight").unwrap(), [2, 2]);
    scratch.write("diffusion_pytorch_model.safetensors", file(4));
    let error = refused(scratch.path());
    assert!(error.starts_with("several checkpoints in one folder"), "{error}");
    assert!(error.contains(": diffusion_pytorch_model.safetensors, model.safetensors / name the file itself"), "{error}");

    let scratch = Scratch::new();
    for (name, bytes) in halves() {
        scratch.write(name, bytes);
    }
    for name in ["model", "diffusion_pytorch_model"] {
        scratch.write(&format!("{name}.safetensors.index.json"), index(BOTH));
    }
    let error = refused(scratch.path());
    let both = "diffusion_pytorch_model.safetensors.index.json, model.safetensors.index.json";
    assert!(error.starts_with("several checkpoints in one folder") && error.contains(both), "{error}");
}

#[test]
fn incomplete_and_misleading_folders_are_refused() {
    let scratch = Scratch::new();
    assert!(refused(scratch.path()).contains("the folder holds no .safetensors file"));
    let [(first, bytes), (second, other)] = halves();
    let shard = scratch.write(first, bytes);
    assert!(refused(scratch.path()).contains("1 of 2 shards are there / download the missing files"));
    let name = "model.safetensors.index.json";
    for (text, expected) in [
        (index(BOTH), "incomplete checkpoint"),
        (index(BOTH), "shard `model-00002-of-00002.safetensors` is not there"),
        (index(r#""x":"model-00001-of-00002.safetensors""#), "does not hold tensor `x`"),
        (index(r#""x":"../secret.safetensors""#), "not a file name"),
        (index(r#""x":"/etc/passwd""#), "not a file name"),
        (index(r#""x":"a\\b.safetensors""#), "not a file name"),
        (index(r#""x":"model.bin""#), "not a file name"),
        (index(r#""x":"a.safetensors","x":"b.safetensors""#), "`x` is there twice"),
        (index(r#""x":7"#), "expected a string"),
        (index(""), "names no tensor"),
        ("{}".into(), "missing field `weight_map`"),
        ("[".into(), "invalid shard index"),
        (format!("{}{}", index(BOTH), " ".repeat(5 << 20)), "longer than"),
    ] {
        scratch.write(name, text);
        let error = refused(scratch.path());
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
    // A tensor that is in two shards.
    scratch.write(second, other);
    std::fs::copy(&shard, scratch.path().join("model-00003-of-00003.safetensors")).unwrap();
    let twice = r#","model.norm.weight":"model-00003-of-00003.safetensors""#;
    scratch.write("model-00003-of-00003.safetensors", {
        let norm = described("model.norm.weight", "BF16", &[4]);
        zeros(&[described("model.embed_tokens.weight", "BF16", &[8, 4]), norm])
    });
    scratch.write(name, index(&format!("{BOTH}{twice}")));
    let error = refused(scratch.path());
    assert!(error.starts_with("duplicate tensor") && error.contains("`model.embed_tokens.weight`"), "{error}");
    // There are several single files without a usual name.
    let scratch = Scratch::new();
    scratch.write("a.safetensors", zeros(&[]));
    scratch.write("b.safetensors", zeros(&[]));
    assert!(refused(scratch.path()).contains("a.safetensors, b.safetensors / name the file itself, or move"));
}

#[test]
fn special_files_are_named() {
    let scratch = Scratch::new();
    let error = Shard::open(scratch.path()).unwrap_err();
    assert!(message(&error).starts_with("not a safetensors file") && message(&error).ends_with("it is a folder"));
    let error = Weights::open(Component::Vae, &scratch.path().join("missing")).unwrap_err();
    assert!(matches!(error, Error::NoModel { .. }) && message(&error).ends_with("the vae does not exist"), "{error}");
    assert!(matches!(Shard::open(&scratch.path().join("missing")), Err(Error::Read { .. })));
    let empty = scratch.write("empty.safetensors", "");
    assert!(message(&Shard::open(&empty).unwrap_err()).contains("it is empty"));
    #[cfg(unix)]
    {
        // Opening a pipe would block until somebody writes to it.
        let device = Shard::open(Path::new("/dev/zero")).unwrap_err();
        assert!(message(&device).ends_with("it is not a regular file"));
    }
}
