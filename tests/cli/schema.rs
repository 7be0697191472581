//! `docs/schema.json` against everything that the program prints as JSON, and against the lines that `kiln run` reads.

use common::adapter_files::{Factor, KOHYA, PEFT, factor, file, lora, number};
use common::sandbox::{Png, QUICK, Run, Sandbox};
use common::stand_in::StandIn;
use kiln::image::Image;
use kiln::internals::backend::cuda::Cuda;
use kiln::internals::tensor::DType;
use kiln::metadata::{ARITHMETIC, AdapterMetadata, ImageMetadata, InitMetadata, NoiseMetadata};
use kiln::selftest::{Extent, Records, Size};
use kiln_program::cli::selftest::{SelftestArgs, test as selftest};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, LazyLock};

static SCHEMA: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(include_str!("../../docs/schema.json")).unwrap());

/// A reference image.
const IMAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/references/rgb.png");

/// Subschemas that no test output reaches. A type after the pointer is one of several that the schema allows.
const UNSEEN: [(&str, &str); 8] = [
    ("/$defs/bench/properties/kernels/additionalProperties", "only a GPU launches kernels"),
    ("/$defs/bench/properties/memory/properties/holds boolean", "only GPU memory is measured"),
    ("/$defs/bench/properties/memory/properties/measured integer", "only GPU memory is measured"),
    ("/$defs/kernels/properties/rows/items/properties/kernels/items", "only a GPU launches kernels"),
    ("/$defs/kernels/properties/rows/items/properties/of_tensor_cores number", "only GPUs have tensor cores"),
    ("/$defs/kernels/properties/tensor_flops number", "only GPUs have tensor cores"),
    ("/$defs/kernels/properties/tensor_flops_e2m1 number", "only GPUs have tensor cores"),
    ("/$defs/kernels/properties/tensor_flops_e4m3 number", "only GPUs have tensor cores"),
];

/// Validates values. A keyword that it does not know is a panic, so that the schema has none without effect.
#[derive(Clone)]
struct Validator<'a> {
    schema: &'a Value,
    /// JSON pointers of the subschemas that values have passed, also with the type of the value where there is a choice.
    seen: BTreeSet<String>,
}

impl<'a> Validator<'a> {
    fn new(schema: &'a Value) -> Self {
        Self { schema, seen: BTreeSet::new() }
    }

    fn rules(&self, at: &str) -> &'a serde_json::Map<String, Value> {
        self.schema.pointer(at).and_then(Value::as_object).unwrap_or_else(|| panic!("no schema at {at}"))
    }

    /// Validates a value against the subschema at a JSON pointer.
    fn check(&mut self, at: &str, value: &Value) -> Result<(), String> {
        let rules = self.rules(at);
        for (keyword, rule) in rules {
            let below = format!("{at}/{keyword}");
            let number = |holds: fn(f64, f64) -> bool| value.as_f64().is_none_or(|own| holds(own, rule.as_f64().unwrap()));
            let members = || value.as_object().into_iter().flatten();
            let holds = match keyword.as_str() {
                "$schema" | "$defs" | "title" | "description" => true,
                "$ref" => self.check(rule.as_str().unwrap().strip_prefix('#').unwrap(), value).map(|()| true)?,
                "type" => self.check_type(at, rule, value),
                "const" => value == rule,
                "enum" => rule.as_array().unwrap().contains(value),
                "minimum" => number(|own, least| own >= least),
                "exclusiveMinimum" => number(|own, bound| own > bound),
                "maximum" => number(|own, most| own <= most),
                "multipleOf" => number(|own, step| own % step == 0.0),
                "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= rule.as_u64().unwrap()),
                "items" => {
                    value.as_array().into_iter().flatten().try_for_each(|item| self.check(&below, item))?;
                    true
                }
                "required" => !value.is_object() || words(rule).all(|key| value.get(key).is_some()),
                "properties" => {
                    let mut known = members().filter(|(key, _)| rule.get(key).is_some());
                    known.try_for_each(|(key, item)| self.check(&format!("{below}/{key}"), item))?;
                    true
                }
                "additionalProperties" => {
                    let known = |key: &str| rules.get("properties").is_some_and(|properties| properties.get(key).is_some());
                    let mut others = members().filter(|(key, _)| !known(key));
                    match rule.as_bool() {
                        Some(allowed) => allowed || others.next().is_none(),
                        None => others.try_for_each(|(_, item)| self.check(&below, item)).map(|()| true)?,
                    }
                }
                "oneOf" => {
                    let branches = (0..rule.as_array().unwrap().len()).filter_map(|i| {
                        let mut branch = self.clone();
                        branch.check(&format!("{below}/{i}"), value).ok().map(|()| branch)
                    });
                    let mut valid: Vec<Self> = branches.collect();
                    let one = valid.len() == 1;
                    valid.drain(..).for_each(|branch| *self = branch);
                    one
                }
                _ => panic!("unknown keyword {keyword} at {at}"),
            };
            if !holds {
                return Err(format!("{below} refuses {value}"));
            }
        }
        self.seen.insert(at.into());
        Ok(())
    }

    fn check_type(&mut self, at: &str, rule: &Value, value: &Value) -> bool {
        let found = words(rule).find(|name| match *name {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            "number" => value.is_number(),
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            name => panic!("unknown type {name} at {at}"),
        });
        if let (Some(name), true) = (found, rule.is_array()) {
            self.seen.insert(format!("{at} {name}"));
        }
        found.is_some()
    }

    /// Lists the subschemas at and below a JSON pointer, as in `seen`.
    fn list(&self, at: &str, all: &mut BTreeSet<String>) {
        let rules = self.rules(at);
        all.insert(at.into());
        for (keyword, rule) in rules {
            let below = format!("{at}/{keyword}");
            match (keyword.as_str(), rule) {
                ("type", Value::Array(_)) => all.extend(words(rule).map(|name| format!("{at} {name}"))),
                ("items", _) | ("additionalProperties", Value::Object(_)) => self.list(&below, all),
                ("properties", Value::Object(members)) => {
                    members.keys().for_each(|key| self.list(&format!("{below}/{key}"), all));
                }
                ("oneOf", Value::Array(branches)) => (0..branches.len()).for_each(|i| self.list(&format!("{below}/{i}"), all)),
                _ => {}
            }
        }
    }
}

/// The strings of a list, or a single string.
fn words(rule: &Value) -> impl Iterator<Item = &str> {
    rule.as_str().into_iter().chain(rule.as_array().into_iter().flatten().map(|word| word.as_str().unwrap()))
}

/// The pointer of a definition.
fn definition(name: &str) -> String {
    format!("/$defs/{name}")
}

fn is_valid(name: &str, value: &Value) -> bool {
    Validator::new(&SCHEMA).check(&definition(name), value).is_ok()
}

/// Subschemas of these definitions that no value has reached.
fn unseen(validator: &Validator<'_>, is_included: impl Fn(&str) -> bool) -> Vec<String> {
    let mut all = BTreeSet::new();
    let names = SCHEMA["$defs"].as_object().unwrap().keys().filter(|name| is_included(name));
    names.for_each(|name| validator.list(&definition(name), &mut all));
    all.difference(&validator.seen).cloned().collect()
}

/// Writes an adapter file.
fn adapter(sandbox: &Sandbox, name: &str, tensors: &[Factor], metadata: &[(&str, &str)]) {
    fs::write(sandbox.path(name), file(tensors, DType::F32, metadata)).unwrap();
}

/// Each object that the program printed, with the name of its definition.
fn printed() -> Vec<(&'static str, Value)> {
    let sandbox = Sandbox::new();
    let layer = "diffusion_model.double_blocks.0.img_attn.proj";
    adapter(&sandbox, "good", &lora(layer, PEFT, [256, 256], 2), &[]);
    let mut all = Vec::new();
    let mut add = |name: &'static str, run: Run| {
        assert!(!run.stdout.is_empty(), "{name}: {}", run.stderr);
        all.extend(run.json().into_iter().map(|object| (name, object)));
    };
    let tiny = |args: &[&str]| sandbox.quick(args);
    add("image", tiny(&["x", "-o", "a.png", "--json", "--dump", "a.safetensors"]));
    let base = ["--variant", "base", "--lora", "good"];
    let noise = ["x", "-o", "b.png", "--json", "--noise", "a.safetensors", "--quantize", "fp8"];
    add("image", tiny(&[&noise[..], &base].concat()));
    sandbox.write_png("mask.png", 96, 64, |x, _| [if x < 20 { 255 } else { 0 }; 3]);
    sandbox.write_png("init.png", 96, 64, |x, y| [x as u8, y as u8, 9]);
    let edit = ["x", "--json", "--steps", "1", "--precision", "f32", "--init", "init.png"];
    let crop = ["--mask", "mask.png", "--mask-crop", "16", "-o", "cropped.png"];
    for more in [&["--extend", "left=16", "-o", "wide.png"][..], &crop] {
        add("image", sandbox.run(edit.iter().chain(more)));
    }
    let words = ["plan", "--json", "--init", "init.png", "--mask", "mask.png", "--strength", "0.5"];
    add("plan", sandbox.run(words));
    let lines = [r#"{"prompt": "x", "output": "c.png"}"#, r#"{"prompt": "x", "output": "a.png"}"#, r#"{"seed": 1}"#];
    fs::write(sandbox.path("lines"), lines.join("\n")).unwrap();
    add("answer", sandbox.run(["run", "lines", "--skip-existing"].iter().chain(&QUICK)));
    fs::write(sandbox.path("lines"), r#"{"prompt": "x", "output": "no/c.png"}"#).unwrap();
    add("answer", sandbox.run(["run", "lines"].iter().chain(&QUICK)));

    add("plan", tiny(&[&["plan", "--json", "--reference", IMAGE][..], &base].concat()));
    for gpu in ["H200", "RTX 3090"] {
        add("plan", sandbox.run(["plan", "--model", "klein-4b", "--json", "--quantize", "fp8", "--gpu", gpu]).good());
    }
    add("bench", tiny(&["bench", "--runs", "1", "--json", "--reference", IMAGE, "--lora", "good"]));
    add("kernels", sandbox.run(["bench", "--kernels=conv", "--quick", "--json"]).good());
    let mut child = sandbox.command(["bench", "--on-request"].iter().chain(&QUICK)).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"7 x\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let lines: Vec<Value> = output.stdout.split(|byte| *byte == b'\n').flat_map(serde_json::from_slice).collect();
    assert_eq!(lines.len(), 2, "{}", String::from_utf8_lossy(&output.stderr));
    all.extend(["bench", "times"].into_iter().zip(lines));

    let mut add = |name, run: Run| all.extend(run.good().json().into_iter().map(|object| (name, object)));
    let inspect = |args: &[&str]| sandbox.run(["lora", "inspect", "--json"].iter().chain(args));
    let mut tensors = lora("lora_unet_double_blocks_0_img_attn_qkv", KOHYA, [9216, 3072], 2);
    tensors.extend([number("lora_unet_double_blocks_0_img_attn_qkv.alpha", 1.0), factor("other.weight", &[2, 2])]);
    let metadata =
        [("ss_output_name", "style"), ("modelspec.trigger_phrase", "ink"), ("ss_tag_frequency", r#"{"1_a": {"dog": 3}}"#)];
    adapter(&sandbox, "style", &tensors, &metadata);
    add("lora", inspect(&["style"]));
    add("lora", inspect(&["good", "--model", "tiny"]));
    let absent = "diffusion_model.double_blocks.9.img_attn.proj";
    let half = [factor(format!("{absent}.lora_A.weight"), &[2, 256]), factor(format!("{layer}.dora_scale"), &[256, 1])];
    adapter(&sandbox, "bad", &half, &[]);
    add("lora", inspect(&["bad", "--model", "tiny"]));
    for format in ["fp8", "nvfp4"] {
        add("quantize", sandbox.run(["quantize", "tiny", format, "--to", format, "--no-calibration", "--json", "-q"]));
    }
    let mut foreign = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/foreign/comfy.png")).unwrap();
    // The text is there once more.
    let end = foreign.len() - 12;
    let start = foreign.windows(4).position(|word| word == b"tEXt").unwrap() - 4;
    let length = u32::from_be_bytes(foreign[start..start + 4].try_into().unwrap()) as usize;
    let again = foreign[start..start + 12 + length].to_vec();
    foreign.splice(end..end, again);
    fs::write(sandbox.path("foreign.png"), foreign).unwrap();
    add("show", sandbox.run(["show", "--json", "a.png", "init.png", "foreign.png"]));
    let replayed = sandbox.run(["replay", "--json", "a.png"]).good().json();
    all.extend(["image", "replay"].into_iter().zip(replayed));
    let (mut image, text) = image_and_text(&sandbox.path("a.png"));
    image.pixels[0] ^= 1;
    let text: Vec<(&str, String)> =
        text.iter().map(|(key, text)| (&**key, text.replace("\"steps\":1", "\"steps\":1,\"negative\":\"x\""))).collect();
    fs::write(sandbox.path("changed.png"), image.encode_png(&text).unwrap()).unwrap();
    all.extend(["image", "replay"].into_iter().zip(sandbox.run(["replay", "--json", "changed.png"]).json()));
    all.extend([None, Some("580.1")].map(|release| ("selftest", selftest_report(release))));
    all
}

/// The pixels and the text of a PNG.
fn image_and_text(path: &Path) -> (Image, BTreeMap<String, String>) {
    let Png { width, height, pixels, text } = Png::read(path);
    (Image { width: width as usize, height: height as usize, pixels }, text)
}

/// The report of `kiln selftest --json` on a stand-in for the driver, which computes nothing.
fn selftest_report(release: Option<&str>) -> Value {
    let cuda = Cuda::new(StandIn::new(80 << 30), &|_| Ok(Cow::Borrowed(&[])), Arc::default()).unwrap();
    let extent = Extent { shapes: &[], attention: Size { tokens: 1, heads: 1 }, burst: false };
    let args = SelftestArgs { device: None, quick: true, json: true };
    let mut out = Vec::new();
    selftest(cuda, &args, &extent, &Records::below(None), release.map(String::from), &mut out).unwrap_err();
    serde_json::from_slice(&out).unwrap()
}

/// The JSON pointers of the objects in a value, of lists only the first item.
fn objects(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            found.push(at.into());
            members.iter().for_each(|(key, item)| objects(item, &format!("{at}/{key}"), found));
        }
        Value::Array(items) => items.iter().take(1).for_each(|item| objects(item, &format!("{at}/0"), found)),
        _ => {}
    }
}

/// The value with one item of each list.
fn shortened(mut value: Value) -> Value {
    match &mut value {
        Value::Object(members) => members.values_mut().for_each(|item| *item = shortened(item.take())),
        Value::Array(items) => *items = items.drain(..).take(1).map(shortened).collect(),
        _ => {}
    }
    value
}

/// Changes an output key by key: an object with one more key or one fewer is invalid, unless the key is optional.
fn check_changes(name: &str, output: &Value) {
    let output = shortened(output.clone());
    assert!(is_valid(name, &output), "{output}");
    let mut places = Vec::new();
    objects(&output, "", &mut places);
    for place in places {
        let with = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
            let mut changed = output.clone();
            change(changed.pointer_mut(&place).unwrap().as_object_mut().unwrap());
            is_valid(name, &changed)
        };
        let is_larger_valid = with(&|object| {
            object.insert("one more".into(), true.into());
        });
        assert!(!is_larger_valid, "{name}{place} takes one more key");
        // Metadata have a check of their own.
        if name == "show" && place.starts_with("/metadata") {
            continue;
        }
        let object = output.pointer(&place).unwrap().as_object().unwrap();
        for key in object.keys() {
            let is_stage = object.contains_key("png") && ["open", "load", "references"].contains(&key.as_str());
            let is_optional = is_stage || place.ends_with("/metadata") || place == "/text";
            let is_smaller_valid = with(&|object| {
                object.remove(key);
            });
            assert_eq!(is_smaller_valid, is_optional, "{name}{place} without {key}");
        }
    }
}

#[test]
fn what_the_program_prints_is_described() {
    let mut validator = Validator::new(&SCHEMA);
    for (name, output) in printed() {
        validator.check(&definition(name), &output).unwrap_or_else(|error| panic!("{name}: {error}\n{output}"));
        check_changes(name, &output);
    }
    let metadata = serde_json::to_value(complete_metadata()).unwrap();
    validator.check(&definition("metadata"), &metadata).unwrap();
    for key in metadata.as_object().unwrap().keys() {
        let mut less = metadata.clone();
        less.as_object_mut().unwrap().remove(key);
        let is_read = serde_json::from_value::<ImageMetadata>(less.clone()).is_ok();
        assert_eq!(Validator::new(&SCHEMA).check(&definition("metadata"), &less).is_ok(), is_read, "without {key}");
    }
    let expected: Vec<&str> = UNSEEN.iter().map(|(place, _)| *place).collect();
    assert_eq!(unseen(&validator, |name| name != "line"), expected);
}

/// Metadata with every member.
fn complete_metadata() -> ImageMetadata {
    let digest = || "0a".repeat(32);
    ImageMetadata {
        prompt: "x".into(),
        seed: Some(u64::MAX),
        model: "klein 4B".into(),
        model_id: "k1:0123456789abcdef".into(),
        variant: "base".into(),
        steps: 50,
        size: [1024, 768],
        precision: "bf16".into(),
        sigmas: Some("1,0.5".into()),
        padding: Some("left".into()),
        quantized: vec![("quantize".into(), "fp8".into())],
        lora: vec![AdapterMetadata { file: "a.safetensors".into(), sha256: digest(), scale: 0.5 }],
        lora_mode: Some("merge".into()),
        vae_tiling: true,
        guidance: Some(4.0),
        negative: Some("y".into()),
        init: Some(InitMetadata {
            sha256: digest(),
            strength: 0.5,
            mask_sha256: Some(digest()),
            feather: Some(16),
            mask_crop: Some(64),
            crop: Some([0, 1, 2, 3]),
            extend: Some("left=16".into()),
            reference: false,
            sized: true,
        }),
        references: vec![digest()],
        noise: NoiseMetadata { kind: "torch-cuda".into(), sms: Some(132), threads: Some(2048), sha256: Some(digest()) },
        device: "cuda sm_90".into(),
        quality: Some(95),
        arithmetic: ARITHMETIC,
        version: "kiln 0.1.0".into(),
    }
}

/// The program and the schema agree about values of each field. Rules between fields are only in the program.
#[test]
fn lines_are_described_as_they_are_read() {
    let list = |values: Value| values.as_array().unwrap().clone();
    let cases = [
        ("prompt", json!(["x", "狐"]), json!([null, 7, ["x"]])),
        ("size", json!(["64x64", null]), json!([64, [64, 64]])),
        ("width", json!([64, 1024, null]), json!([0, 48, 100, 16_400, -64, 64.5, "64"])),
        ("height", json!([64, 1024, null]), json!([0, 48, 100, 16_400, -64, 64.5, "64"])),
        ("steps", json!([1, 1000, null]), json!([0, 1001, -1, 1.5, "2"])),
        ("sigmas", json!(["turbo", "1,0.5", [1, 0.5], null]), json!([8, {}, [], [0], [1.5], ["1"]])),
        ("guidance", json!([0, 2.5, 100, null]), json!([-1, 101, "4"])),
        ("padding", json!(["right", "left", "left-zeros", "right-zeros", null]), json!(["top", 1])),
        ("negative", json!(["", "x", null]), json!([1])),
        ("seed", json!([0, u64::MAX, null]), json!([-1, 1.5, "1"])),
        ("references", json!([[], ["none.png"]]), json!([null, "none.png", [1]])),
        (
            "lora",
            json!([[], ["none"], ["none:0.5"], [{"file": "none"}], [{"file": "none", "scale": 2}], null]),
            json!(["none", [1], [{"scale": 1}], [{"file": 1}], [{"file": "none", "scale": null}], [{"file": "none", "more": 1}]]),
        ),
        ("output", json!(["none/x.png", null]), json!([1, ["x.png"]])),
        ("aspect", json!(["16:9", null]), json!([1.5, [16, 9]])),
        ("megapixels", json!([0.01, 1, 12.5, null]), json!([0, 13, "1"])),
        ("init", json!(["none.png", null]), json!([1])),
        ("strength", json!([0.5, 1, null]), json!([0, 1.5, -1, "0.5"])),
        ("mask", json!(["none.png", null]), json!([1])),
        ("feather", json!([0, 256, null]), json!([-1, 257, "8"])),
        ("mask_crop", json!([16, 1024, null]), json!([15, 1025, "64"])),
        (
            "extend",
            json!(["left=16", 16, {"left": 16, "top": 0}, {"right": 16, "bottom": 32}, null]),
            json!([8, 0, 15, {"left": 8}, {"up": 16}]),
        ),
        ("init_reference", json!(["auto", "on", "off", null]), json!(["yes", true])),
        ("color", json!([]), json!(["red"])),
    ];
    // Each line that can be read fails later, at a folder or a reference that is not there, so that no image is generated.
    let line = |name: &str, value: Value, i: usize| {
        let mut line = match name {
            "output" => json!({"prompt": "x", "references": ["none.png"]}),
            "feather" | "mask_crop" => json!({"prompt": "x", "init": "none.png", "mask": "none.png"}),
            "init" => json!({"prompt": "x", "output": format!("none/{i}.png")}),
            "strength" | "mask" | "extend" | "init_reference" => json!({"prompt": "x", "init": "none.png"}),
            _ => json!({"prompt": "x", "output": format!("none/{i}.png")}),
        };
        line[name] = value;
        line
    };
    let cases = cases.into_iter().flat_map(|(name, good, bad)| {
        let good = list(good).into_iter().map(move |value| (name, value, true));
        good.chain(list(bad).into_iter().map(move |value| (name, value, false)))
    });
    let mut lines: Vec<(Value, bool)> = cases.enumerate().map(|(i, (name, value, good))| (line(name, value, i), good)).collect();
    lines.push((json!({"output": "none/x.png"}), false));
    let sandbox = Sandbox::new();
    let text: Vec<String> = lines.iter().map(|(line, _)| line.to_string()).collect();
    fs::write(sandbox.path("lines"), text.join("\n")).unwrap();
    let run = sandbox.run(["run", "lines", "-q"]);
    let answers = run.json();
    assert_eq!(answers.len(), lines.len(), "{}", run.stderr);
    let mut validator = Validator::new(&SCHEMA);
    for ((line, good), answer) in lines.iter().zip(&answers) {
        assert_eq!(answer["code"].as_u64().is_some_and(|code| [3, 5].contains(&code)), *good, "{line}: {answer}");
        assert!(*good || answer["code"] == 2, "{line}: {answer}");
        assert_eq!(is_valid("line", line), *good, "{line}");
        if *good {
            validator.check(&definition("line"), line).unwrap();
        }
    }
    assert_eq!(unseen(&validator, |name| name == "line"), [""; 0]);
}

#[test]
fn the_schema_is_strict_and_explained() {
    let validator = Validator::new(&SCHEMA);
    let mut all = BTreeSet::new();
    SCHEMA["$defs"].as_object().unwrap().keys().for_each(|name| validator.list(&definition(name), &mut all));
    for place in all.iter().filter(|place| !place.contains(' ')) {
        let rules = validator.rules(place);
        if let Some(properties) = rules.get("properties") {
            assert_eq!(rules["additionalProperties"], false, "{place}");
            assert!(words(&rules["required"]).all(|key| properties.get(key).is_some()), "{place}");
        }
        if !rules.contains_key("$ref") {
            let text = rules.get("description").unwrap_or_else(|| panic!("{place} is not described")).as_str().unwrap();
            let is_sentence = text.ends_with('.') && !text.contains(". ") && text.split(' ').count() <= 35;
            assert!(is_sentence, "{place}: {text}");
        }
    }
    // The answer to a line has the fields of an image.
    let keys = |name: &str| words(&SCHEMA["$defs"][name]["required"]).collect::<BTreeSet<_>>();
    assert_eq!(keys("done"), &keys("image") | &BTreeSet::from(["line"]));
}

#[test]
fn the_validator_finds_faults() {
    let named =
        json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": false});
    for (schema, good, bad) in [
        (json!({}), json!([null, 1, "x"]), json!([])),
        (json!({"type": "integer"}), json!([0, -3, u64::MAX, 2.0]), json!([1.5, "1", null, true, [], {}])),
        (json!({"type": "number"}), json!([1, 1.5]), json!(["1", null])),
        (json!({"type": ["string", "boolean"]}), json!(["", true]), json!([null, 1, [], {}])),
        (json!({"type": "array", "items": {"const": 1}, "minItems": 1}), json!([[1], [1, 1]]), json!([[], [1, 2], {}, 1])),
        (json!({"enum": ["a", null]}), json!(["a", null]), json!(["b", 0])),
        (json!({"minimum": 2, "maximum": 6, "multipleOf": 2}), json!([2, 4, 6, "1"]), json!([1, 3, 8])),
        (json!({"exclusiveMinimum": 0}), json!([0.1, "0"]), json!([0, -1])),
        (named, json!([{"a": null}]), json!([{}, {"a": 1}, {"a": null, "b": null}, null, []])),
        (json!({"additionalProperties": {"type": "string"}}), json!([{}, {"a": ""}, 1]), json!([{"a": 1}])),
        (json!({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), json!([1, 2.5]), json!([2, 1.5])),
        (json!({"$ref": "#/$defs/b", "$defs": {"b": {"const": 1}}}), json!([1]), json!([2])),
    ] {
        for (values, valid) in [(good, true), (bad, false)] {
            for value in values.as_array().unwrap() {
                assert_eq!(Validator::new(&schema).check("", value).is_ok(), valid, "{schema}: {value}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "unknown keyword maxItems")]
fn unknown_keywords_are_refused() {
    let _ = Validator::new(&json!({"maxItems": 1})).check("", &json!([]));
}
