//! `kiln replay`: every setting that an image can be made with, and everything that can be missing.

use common::adapter_files::{PEFT, file, lora};
use common::sandbox::{Png, Run, Sandbox};
use kiln::image::{Format, Image, Threads};
use kiln::internals::tensor::DType;
use kiln::metadata::{ImageMetadata, QUANTIZED, StoredText};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Flags that make an image quickly.
const FAST: [&str; 6] = ["--width", "64", "--height", "64", "--steps", "1"];

/// A folder with images and an adapter.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write_png("one.png", 80, 64, |x, y| [3 * x as u8, y as u8, 9]);
    sandbox.write_png("two.png", 64, 96, |x, y| [y as u8, 2 * x as u8, 80]);
    sandbox.write_png("mask.png", 80, 64, |x, _| [if x < 24 { 255 } else { 0 }; 3]);
    let layer = lora("diffusion_model.double_blocks.0.img_attn.proj", PEFT, [256, 256], 2);
    fs::write(sandbox.path("style.safetensors"), file(&layer, DType::F32, &[])).unwrap();
    let other = lora("diffusion_model.double_blocks.9.img_attn.proj", PEFT, [256, 256], 2);
    fs::write(sandbox.path("partial.safetensors"), file(&[layer, other].concat(), DType::F32, &[])).unwrap();
    sandbox
}

/// The metadata of an image file.
fn metadata(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap();
    let text = StoredText::of_file(&bytes, path).unwrap();
    serde_json::from_str(text.get(ImageMetadata::KEY).unwrap()).unwrap()
}

/// Writes an image again with other metadata.
fn rewrite(sandbox: &Sandbox, name: &str, change: impl FnOnce(&mut Image, &mut Value)) {
    let Png { width, height, pixels, text } = Png::read(&sandbox.path(name));
    let mut image = Image { width: width as usize, height: height as usize, pixels };
    let mut value: Value = serde_json::from_str(&text[ImageMetadata::KEY]).unwrap();
    change(&mut image, &mut value);
    let text = [(ImageMetadata::KEY, value.to_string())];
    fs::write(sandbox.path(name), image.encode(Format::Png, &text, Threads::One).unwrap()).unwrap();
}

/// The names of all members of an object and of the objects in it.
fn members(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            found.insert(format!("{at}/{key}"));
            members(value, &format!("{at}/{key}"), found);
        }),
        Value::Array(items) => items.iter().for_each(|item| members(item, at, found)),
        _ => {}
    }
}

/// All members that the schema allows for metadata.
fn allowed() -> BTreeSet<String> {
    fn list(schema: &Value, all: &Value, at: &str, found: &mut BTreeSet<String>) {
        if let Some(target) = schema["$ref"].as_str() {
            return list(all.pointer(&target[1..]).unwrap(), all, at, found);
        }
        list_members(schema, all, at, found);
        if schema.get("items").is_some() {
            list(&schema["items"], all, at, found);
        }
    }
    fn list_members(schema: &Value, all: &Value, at: &str, found: &mut BTreeSet<String>) {
        for (key, value) in schema["properties"].as_object().into_iter().flatten() {
            found.insert(format!("{at}/{key}"));
            list(value, all, &format!("{at}/{key}"), found);
        }
    }
    let schema: Value = serde_json::from_str(include_str!("../../docs/schema.json")).unwrap();
    let mut found = BTreeSet::new();
    list(&schema["$defs"]["metadata"], &schema, "", &mut found);
    found
}

/// Makes an image with these flags, and again from what it says.
fn twice(sandbox: &Sandbox, name: &str, prompt: &str, flags: &[&str]) -> Value {
    sandbox.run([&["-o", name], flags, &["--", prompt]].concat()).good();
    let run = sandbox.run(["replay", name, "--force"]);
    let (stem, extension) = name.rsplit_once('.').unwrap();
    assert_eq!(
        (run.code, run.text()),
        (Some(0), &*format!("{stem}-replay.{extension}\nidentical\n")),
        "{flags:?}: {}",
        run.stderr
    );
    let again = metadata(&sandbox.path(&format!("{stem}-replay.{extension}")));
    let made = metadata(&sandbox.path(name));
    assert_eq!(again, made, "{flags:?}");
    made
}

/// Every member of the metadata occurs, and is replayed.
#[test]
fn images_of_every_setting_are_made_again() {
    let sandbox = sandbox();
    let plain = "a fox";
    let size = &FAST[..4];
    // Files that are read.
    sandbox.run([&["-o", "dumped.png", "--dump", "noise.safetensors", "--seed", "5"], &FAST[..], &[plain]].concat()).good();
    sandbox.tiny("whole", &[]);
    sandbox.run(["quantize", "whole", "nvfp4", "--to", "nvfp4", "--no-calibration", "-q"]).good();
    let rows: Vec<(&str, &str, Vec<&str>)> = vec![
        ("plain.png", plain, [&FAST[..], &["--seed", "18446744073709551615"]].concat()),
        ("dash.png", "--seed 1 -o x", FAST.into()),
        ("empty.png", "", FAST.into()),
        ("a.jpg", "a sign: \"cold\"\nNegative prompt: none\nSteps: 4, \u{7}", [&FAST[..], &["--quality", "80"]].concat()),
        ("a.webp", "狐 <b>&amp;", FAST.into()),
        ("sigmas.png", plain, [size, &["--sigmas", "1,0.4"]].concat()),
        ("padding.png", plain, [&FAST[..], &["--padding", "left-zeros", "--precision", "f32"]].concat()),
        ("base.png", plain, [&FAST[..], &["--variant", "base", "--guidance", "1.5", "--negative=-blurry"]].concat()),
        ("kv.png", plain, [&FAST[..], &["--variant", "kv", "--reference", "one.png"]].concat()),
        ("fp8.png", plain, [&FAST[..], &["--quantize", "fp8", "--attention", "bf16"]].concat()),
        ("nvfp4.png", plain, [&FAST[..], &["--model", "nvfp4", "--nvfp4-layout", "modelopt"]].concat()),
        ("lora.png", plain, [&FAST[..], &["--lora", "style.safetensors:0.5", "--lora-mode", "branch"]].concat()),
        (
            "partial.png",
            plain,
            [&FAST[..], &["--lora", "partial.safetensors:-1", "--lora", "style.safetensors", "--lora-partial"]].concat(),
        ),
        ("tiling.png", plain, [&FAST[..], &["--vae-tiling"]].concat()),
        ("references.png", plain, ["--steps", "1", "--reference", "two.png", "--reference", "one.png"].into()),
        ("init.png", plain, ["--steps", "2", "--init", "one.png", "--strength", "0.7"].into()),
        ("sized.png", plain, [&["--steps", "2", "--init", "one.png", "--init-reference", "on"], size].concat()),
        ("mask.png", plain, ["--steps", "2", "--init", "one.png", "--mask", "mask.png", "--feather", "3"].into()),
        ("crop.png", plain, ["--steps", "1", "--init", "one.png", "--mask", "mask.png", "--mask-crop", "16"].into()),
        ("extend.png", plain, ["--steps", "1", "--init", "one.png", "--extend", "left=16,bottom=32", "--width", "64"].into()),
        ("noise.png", plain, [&FAST[..], &["--noise", "noise.safetensors"]].concat()),
        ("cpu.png", plain, [&FAST[..], &["--noise-kind", "torch-cpu"]].concat()),
        ("sms.png", plain, [&FAST[..], &["--noise-sms", "108", "--noise-threads", "1536"]].concat()),
    ];
    let (mut found, mut flags) = (BTreeSet::new(), BTreeSet::new());
    for (name, prompt, row) in rows {
        // The mask of the edit has the name of an output.
        let name = name.replace("mask.png", "masked.png");
        let with_model = row.windows(2).find(|pair| pair[0] == "--model").map(|pair| pair[1]);
        let made = match with_model {
            None => twice(&sandbox, &name, prompt, &row),
            // The model is a flag of the replay, too.
            Some(model) => {
                sandbox.run([&["-o", &*name], &row[..], &[prompt]].concat()).good();
                let run = sandbox.run(["replay", &name, "--model", model]);
                assert!(run.text().ends_with("\nidentical\n"), "{row:?}: {} {}", run.text(), run.stderr);
                metadata(&sandbox.path(&name))
            }
        };
        assert_eq!(made["prompt"], prompt);
        flags.extend(made["quantized"].as_array().into_iter().flatten().map(|flag| flag[0].as_str().unwrap().to_owned()));
        members(&made, "", &mut found);
    }
    let allowed = allowed();
    assert_eq!(found.difference(&allowed).collect::<Vec<_>>(), [""; 0], "not in the schema");
    assert_eq!(allowed.difference(&found).collect::<Vec<_>>(), [""; 0], "no image of this test has it");
    let unseen: Vec<&str> = QUANTIZED.into_iter().filter(|flag| !flags.contains(*flag)).collect();
    assert_eq!(unseen, ["fp8-accumulate", "nvfp4-math"], "only tensor cores have a choice");
}

fn refused(run: &Run, parts: &[&str]) {
    assert_eq!((run.code, run.text()), (Some(3), ""), "{}", run.stderr);
    for part in parts {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
}

#[test]
fn everything_that_is_missing_is_listed_at_once() {
    let sandbox = sandbox();
    fs::create_dir(sandbox.path("elsewhere")).unwrap();
    let flags = ["--reference", "one.png", "--reference", "two.png", "--init", "one.png", "--lora", "style.safetensors"];
    sandbox.run([&["a fox", "--seed", "1", "--steps", "1", "-o", "made.png"], &flags[..]].concat()).good();
    for name in ["one.png", "style.safetensors"] {
        fs::rename(sandbox.path(name), sandbox.path("elsewhere").join(name)).unwrap();
    }
    // The second reference has changed.
    sandbox.write_png("two.png", 64, 96, |x, y| [y as u8, 2 * x as u8, 81]);
    let made = metadata(&sandbox.path("made.png"));
    let short = |value: &Value| value.as_str().unwrap()[..16].to_owned();
    let needed = [
        format!("reference 1 with the SHA-256 {}… is not there (--reference)", short(&made["references"][0])),
        format!("reference 2 with the SHA-256 {}… is not there (--reference)", short(&made["references"][1])),
        format!("the init image with the SHA-256 {}… is not there (--init)", short(&made["init"]["sha256"])),
        "the LoRA `style.safetensors` with the SHA-256 ".into(),
        "the model is tiny random model (built in, not trained) (k1:".into(),
    ];
    let run = sandbox.run(["replay", "made.png", "--model", "tiny"]);
    refused(&run, &needed.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(run.stderr.contains("a file that was saved again is another file"), "{}", run.stderr);
    assert!(!sandbox.path("made-replay.png").exists());
    // Files by flags: the same ones are a replay, others a variation.
    let by_flags = ["--reference", "elsewhere/one.png", "--reference", "two.png", "--init", "elsewhere/one.png"];
    let with_lora = ["--lora", "elsewhere/style.safetensors"];
    let run = sandbox.run([&["replay", "made.png"], &by_flags[..], &with_lora].concat()).good();
    assert_eq!(run.text(), "made-replay.png\n", "a changed reference is not compared");
    sandbox.write_png("two.png", 64, 96, |x, y| [y as u8, 2 * x as u8, 80]);
    fs::rename(sandbox.path("elsewhere/style.safetensors"), sandbox.path("renamed.safetensors")).unwrap();
    let run = sandbox.run([&["replay", "made.png", "--force"], &by_flags[..]].concat()).good();
    assert_eq!(run.text(), "made-replay.png\nidentical\n", "{}", run.stderr);
}

#[test]
fn another_model_or_device_is_named() {
    let sandbox = sandbox();
    sandbox.run([&["a fox", "--seed", "1", "-o", "made.png"], &FAST[..]].concat()).good();
    let run = sandbox.run(["replay", "made.png", "--model", "builtin"]);
    refused(&run, &["the model is builtin (k1:", " is needed (--model, or --any-model)"]);
    let run = sandbox.run(["replay", "made.png", "--model", "builtin", "--any-model"]).good();
    assert_eq!(run.text(), "made-replay.png\n");
    // A model that needs no files is found by itself.
    let run = sandbox.bare([&["a fox", "--seed", "1", "-o", "tiny.png", "--model", "tiny"], &FAST[..]].concat()).good();
    assert_eq!(run.text(), "tiny.png\n");
    assert_eq!(sandbox.bare(["replay", "tiny.png"]).good().text(), "tiny-replay.png\nidentical\n");

    rewrite(&sandbox, "made.png", |_, value| {
        value["device"] = json!("cuda sm_90\u{1b}[2J");
        value["arithmetic"] = json!(0);
        value["version"] = json!("kiln 0.0.1");
    });
    let run = sandbox.run(["replay", "made.png", "--force"]).good();
    assert_eq!(run.text(), "made-replay.png\nidentical\n");
    assert!(run.stderr.contains("warning: the image was made on cuda sm_90\\u{1b}[2J, this is cpu "), "{}", run.stderr);
    assert!(run.stderr.contains("warning: kiln 0.0.1 computed with arithmetic 0, this kiln has 1"), "{}", run.stderr);
}

#[test]
fn a_difference_is_counted_and_is_a_failure() {
    let sandbox = sandbox();
    sandbox.run([&["a fox", "--seed", "1", "-o", "made.png"], &FAST[..]].concat()).good();
    rewrite(&sandbox, "made.png", |image, _| image.pixels[5] ^= 4);
    let run = sandbox.run(["replay", "made.png"]);
    assert_eq!((run.code, run.text()), (Some(1), "made-replay.png\n"));
    assert!(run.stderr.ends_with("error: differs (made.png): 1 of 4,096 pixels, at most 4 levels\n"), "{}", run.stderr);
    let run = sandbox.run(["replay", "made.png", "--force", "--json", "--quiet"]);
    let [image, verdict] = &run.json()[..] else { panic!("{}", run.text()) };
    assert_eq!((run.code, &image["path"]), (Some(1), &json!("made-replay.png")));
    assert_eq!(verdict, &json!({"identical": false, "pixels_differ": 1, "largest_difference": 4, "keys": []}));
}

#[test]
fn flags_make_variations() {
    let sandbox = sandbox();
    let flags = ["--noise-sms", "108", "--sigmas", "1,0.5"];
    sandbox.run([&["a fox", "--seed", "7", "-o", "made.png"], &FAST[..4], &flags].concat()).good();
    let pixels = |name: &str| Png::read(&sandbox.path(name)).pixels;
    let varied = |name: &str, flags: &[&str]| {
        let run = sandbox.run([&["replay", "made.png", "-o", name], flags].concat()).good();
        assert!(!run.text().contains("identical"), "{flags:?}");
        metadata(&sandbox.path(name))
    };
    let original = metadata(&sandbox.path("made.png"));
    let same_but = |made: &Value, changes: &[(&str, Value)]| {
        let mut want = original.clone();
        changes.iter().for_each(|(key, value)| want[*key] = value.clone());
        want.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        assert_eq!(*made, want);
    };
    same_but(&varied("a.png", &["--seed", "8"]), &[("seed", json!(8))]);
    same_but(&varied("b.png", &["--steps", "1"]), &[("steps", json!(1)), ("sigmas", Value::Null)]);
    same_but(&varied("c.png", &["--prompt=--a cat"]), &[("prompt", json!("--a cat"))]);
    same_but(&varied("d.png", &["--width", "80"]), &[("size", json!([80, 64]))]);
    same_but(&varied("e.png", &["--aspect", "1:2", "--megapixels", "0.01"]), &[("size", json!([80, 144]))]);
    same_but(&varied("f.png", &["--noise-kind", "torch-cpu"]), &[("noise", json!({"kind": "torch-cpu"}))]);
    assert_ne!(pixels("a.png"), pixels("made.png"));
    let run = sandbox.run(["replay", "made.png", "--count", "2"]).good();
    assert_eq!(run.text(), "made-replay-1.png\nmade-replay-2.png\n");
    assert_eq!(pixels("made-replay-1.png"), pixels("made.png"));
    // An equal prompt is no change.
    let run = sandbox.run(["replay", "made.png", "-o", "g.png", "--prompt", "a fox"]).good();
    assert_eq!(run.text(), "g.png\nidentical\n");
}

#[test]
fn files_that_say_nothing_are_refused_with_a_hint() {
    let sandbox = sandbox();
    let foreign = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/foreign/comfy.png");
    refused(&sandbox.run(["replay", foreign]), &["it was made by ComfyUI", "hint: `kiln show "]);
    refused(&sandbox.run(["replay", "one.png"]), &["it does not say how it was made"]);
    sandbox.run([&["a fox", "-o", "basic.png", "--metadata", "basic"], &FAST[..]].concat()).good();
    refused(&sandbox.run(["replay", "basic.png"]), &["it does not say which model and files it was made from"]);
    refused(&sandbox.run(["replay", "nowhere.png"]), &["nowhere.png"]);
    refused(&sandbox.run(["replay", "style.safetensors"]), &["style.safetensors"]);
    assert_eq!(sandbox.run(["replay"]).code, Some(2));
    // Metadata that was changed by hand.
    sandbox.run([&["a fox", "--seed", "1", "-o", "made.png"], &FAST[..]].concat()).good();
    let changed = |name: &str, key: &str, value: Value| {
        fs::copy(sandbox.path("made.png"), sandbox.path(name)).unwrap();
        rewrite(&sandbox, name, |_, metadata| metadata[key] = value);
        sandbox.run(["replay", name])
    };
    refused(&changed("a.png", "surprise", json!(1)), &["its metadata cannot be read: unknown field `surprise`"]);
    refused(&changed("b.png", "steps", json!(100_000)), &["cannot make this image again (b.png)", "100000"]);
    refused(&changed("c.png", "variant", json!("--force")), &["cannot make this image again (c.png)"]);
    refused(&changed("d.png", "precision", json!("\u{1b}[2J")), &["\\u{1b}[2J"]);
    refused(&changed("e.png", "references", json!(["../one.png"])), &["reference 1 with the SHA-256 ../one.png… is not there"]);
    let run = changed("f.png", "prompt", json!("--output=g.png"));
    assert_eq!((run.code, sandbox.path("g.png").exists()), (Some(1), false), "{}", run.stderr);
}

#[test]
fn nothing_is_overwritten_unasked() {
    let sandbox = sandbox();
    sandbox.run([&["a fox", "--seed", "1", "-o", "made.png"], &FAST[..]].concat()).good();
    let before = fs::read(sandbox.path("made.png")).unwrap();
    fs::write(sandbox.path("made-replay.png"), "mine").unwrap();
    let run = sandbox.run(["replay", "made.png"]);
    assert_eq!((run.code, fs::read(sandbox.path("made-replay.png")).unwrap()), (Some(5), b"mine".to_vec()));
    // The original is an input.
    let run = sandbox.run(["replay", "made.png", "-o", "made.png", "--force"]);
    assert_eq!((run.code, fs::read(sandbox.path("made.png")).unwrap()), (Some(5), before), "{}", run.stderr);
    // An image on standard output is not compared.
    let run = sandbox.run(["replay", "made.png", "-o", "-"]).good();
    assert!(run.stdout.starts_with(b"\x89PNG"));
}
