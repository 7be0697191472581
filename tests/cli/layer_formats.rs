//! What the program says about quantized models: `kiln plan` for a GPU, `kiln doctor` and `-v` for the CPU, and the note where
//! weights are expanded.

use common::quantized::{Content, Form, Layer, Plain, plain_tensors};
use common::sandbox::{Png, Sandbox, grouped};
use kiln::internals::component::Component;
use kiln::internals::config::Configs;
use kiln::internals::names::Layout;
use kiln::internals::tensor::DType;
use serde_json::{Value, json};
use std::fs;

/// The indented lines of a table from the one with this name on.
fn lines<'a>(table: &'a str, name: &str, indent: usize) -> Vec<&'a str> {
    let from = table.lines().skip_while(|line| !line.starts_with(name));
    let is_more = |line: &&str| line.len() > indent && line[..indent].trim().is_empty();
    from.clone().take(1).chain(from.skip(1).take_while(is_more)).map(|line| &line[indent..]).collect()
}

#[test]
fn formats_are_named_by_kind_of_layer() {
    let sandbox = Sandbox::new();
    sandbox.tiny("plain", &["--layout", "bfl"]);
    sandbox.tiny("model", &["--layout", "bfl"]);
    // As published: the blocks in scaled FP8, one layer of them left in bf16.
    let transformer = Content::of("fp8").with_plain_layers(|layer| layer == "double_blocks.0.img_attn.qkv");
    fs::write(sandbox.path("model/flux-2-klein-tiny.safetensors"), transformer.file(Form::BFL)).unwrap();
    let converted = |tensor: Plain| match &*tensor.name {
        name if name.ends_with("self_attn.q_proj.weight") => tensor.in_fp8(DType::E4m3),
        name if name.ends_with("mlp.down_proj.weight") => tensor.in_fp8(DType::E5m2),
        _ => tensor,
    };
    let plain = plain_tensors(Component::TextEncoder, Layout::Bfl).into_iter().map(converted).collect();
    fs::write(sandbox.path("model/qwen.safetensors"), Content { layers: Vec::new(), plain }.file(Form::BARE)).unwrap();
    let text = |args: &[&str]| sandbox.run(args).good().text().to_owned();
    let rest = "transformer img_in, txt_in, time_in, modulations, final layer: bf16";
    let encoder = |fp8: &str, wide: &str| {
        let qkv = format!("text encoder qkv: {fp8} + bf16");
        let down = format!("text encoder down: fp8-e5m2 expanded to {wide} (no GEMM takes it)");
        [qkv, "text encoder out, gate/up: bf16".into(), down]
    };
    let attention = |format: &str| [format!("attention: {format}")];

    // The CPU multiplies every stored format except e5m2.
    let doctor = text(&["doctor", "--model", "model"]);
    let transformer = |format: &str| {
        [
            format!("transformer double blocks (qkv): 3 {format}, 1 bf16"),
            format!("transformer double blocks (proj, mlp in, mlp out), single blocks: {format}"),
            rest.into(),
        ]
    };
    let blocks = attention("1 block bf16 (made from inputs that are not quantized); 3 blocks q and k fp8, v bf16");
    let want = [&["on the CPU:".to_owned()][..], &transformer("fp8 (w8a8)"), &encoder("fp8 (w8a16)", "bf16"), &blocks].concat();
    assert_eq!(lines(&doctor, "formats ", 10), want, "{doctor}");
    let run = sandbox.quick(&["x", "-o", "out.png", "--model", "model", "-v"]);
    let want = [&transformer("fp8 (w8a32)")[..], &encoder("fp8 (w8a32)", "f32"), &attention("f32")].concat();
    let formats: Vec<&str> = run.stderr.lines().filter_map(|line| line.strip_prefix("formats ")).collect();
    assert_eq!(formats, want, "{}", run.stderr);

    // A GPU without FP8 tensor cores keeps them, and multiplies them by bf16.
    let args = ["plan", "--model", "model", "--gpu", "RTX 3090"];
    let kept = "fp8 (w8a16: no GEMM of quantized inputs here)";
    let plain = attention("bf16 (no fp8 attention here)");
    let want = [&transformer(kept)[..], &encoder("fp8 (w8a16)", "bf16"), &plain].concat();
    assert_eq!(lines(&text(&args), "formats ", 21), want);
    let plan = |model: &str| sandbox.run(["plan", "--model", model, "--gpu", "3090", "--json"]).good().json().remove(0);
    let (plain, quantized) = (plan("plain"), plan("model"));
    assert_eq!(plain["token_embedding_bytes"], quantized["token_embedding_bytes"]);
    for bytes in ["weight_bytes", "low_memory_weight_bytes"] {
        let [plain, quantized] = [&plain, &quantized].map(|plan| plan[bytes].as_u64().unwrap());
        assert!(quantized < plain, "{bytes}: {quantized} of {plain}");
    }
    let rows = quantized["formats"].as_array().unwrap();
    let row = |kind: &str, stored: &str| {
        let fits = |row: &&Value| row["kind"] == kind && row["stored"][0] == stored;
        rows.iter().find(fits).unwrap_or_else(|| panic!("{kind} {stored}: {quantized}"))
    };
    let linear = row("single blocks linear1", "fp8");
    assert_eq!((&linear["held"], &linear["input"]), (&json!(["fp8"]), &json!("bf16")));
    assert_eq!(linear["held_bytes"], linear["stored_bytes"]);
    assert_eq!((&linear["accumulation"], &linear["reason"]), (&Value::Null, &json!("no GEMM of quantized inputs here")));
    let blocks = json!([{ "blocks": 4, "heads": "bf16", "values": "bf16", "reason": "no fp8 attention here" }]);
    assert_eq!(quantized["attention"], blocks);
    let qkv = row("qkv", "fp8");
    assert_eq!(
        (&qkv["part"], &qkv["stored"], &qkv["held"]),
        (&json!("text encoder"), &json!(["fp8", "bf16"]), &json!(["fp8", "bf16"]))
    );

    // The note counts what is expanded, and nothing else: here the matrices in e5m2, from one byte to four.
    let down = row("down", "fp8-e5m2")["stored_bytes"].as_u64().unwrap() as f64 / f64::from(1 << 20);
    let note = "note: fp8-e5m2 weights are expanded to f32 on the CPU: ";
    let note = format!("{note}{:.1} MiB instead of {down:.1} MiB\n", 4.0 * down);
    assert!(run.stderr.contains(&note), "{note}{}", run.stderr);
    assert!(!sandbox.quick(&["x", "-o", "plain.png", "--model", "plain"]).stderr.contains("expanded"));
}

#[test]
fn how_fp8_is_computed_with_is_chosen_told_and_recorded() {
    /// No input of this layer fits its scale.
    fn too_small(layer: &mut Layer, _: &[Layer]) {
        if layer.name == "double_blocks.1.img_attn.qkv" {
            layer.input_scale = Some(1e-12);
        }
    }
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    let transformer = |content: &Content| {
        fs::write(sandbox.path("model/flux-2-klein-tiny.safetensors"), content.file(Form::BFL)).unwrap();
    };
    let flags = ["x", "--model", "model", "--width", "64", "--height", "64", "--steps", "1", "--seed", "1", "--json", "-v"];
    let run = |name: &str, more: &[&str]| {
        let run = sandbox.run(flags.iter().chain(&["-o", name]).chain(more)).good();
        let attention = run.stderr.lines().find_map(|line| line.strip_prefix("formats attention: ")).map(String::from);
        (Png::read(&sandbox.path(name)), attention, run)
    };
    let text = |png: &Png, key: &str| png.text.get(key).cloned();

    transformer(Content::of("fp8"));
    let (png, attention, first) = run("default.png", &[]);
    assert_eq!(attention.as_deref(), Some("q and k fp8, v bf16"));
    // The CPU has only one way to sum, so nothing is recorded.
    assert_eq!((text(&png, "attention").as_deref(), text(&png, "fp8-accumulate")), (Some("fp8"), None));
    assert!(!first.stderr.contains("warning") && first.json()[0]["saturated"] == 0, "{}", first.stderr);
    let (asked, _, _) = run("fp8.png", &["--attention", "fp8", "--fp8-accumulate", "auto"]);
    assert!(asked.pixels == png.pixels);
    let (plain, attention, other) = run("bf16.png", &["--attention", "bf16", "--fp8-accumulate", "fast"]);
    assert_eq!((attention.as_deref(), text(&plain, "attention").as_deref()), (Some("bf16 (as asked)"), Some("bf16")));
    assert!(plain.pixels != png.pixels);
    let warning = "warning: --fp8-accumulate is ignored: the CPU sums in f32\n";
    assert!(other.stderr.contains(warning), "{}", other.stderr);
    let refused = sandbox.run(flags.iter().chain(&["-o", "no.png", "--attention", "fp8", "--precision", "f32"]));
    let why = "error: FP8 attention is impossible: nothing is quantized in f32 precision\n\nhint: leave out --attention to use";
    assert!(refused.code == Some(2) && refused.stderr.contains(why), "{}", refused.stderr);

    transformer(&Content::of("fp8").changed(too_small));
    let (_, _, run) = run("clamped.png", &[]);
    let count = 16 * Configs::TINY.transformer.hidden as u64;
    let warning = format!("\nwarning: {} activations were beyond the range of FP8 and clamped", grouped(count));
    assert!(run.stderr.contains(&warning), "{}", run.stderr);
    assert_eq!(run.json()[0]["saturated"], count);
}

#[test]
fn what_nvfp4_is_multiplied_as_is_chosen_told_and_recorded() {
    let sandbox = Sandbox::new();
    sandbox.tiny("plain", &["--layout", "bfl"]);
    sandbox.tiny("model", &["--layout", "bfl"]);
    let file = Content::of("nvfp4").file(Form::BFL);
    fs::write(sandbox.path("model/flux-2-klein-tiny.safetensors"), file).unwrap();
    let flags = ["x", "--width", "64", "--height", "64", "--steps", "1", "--seed", "1", "-v", "--model"];
    let run = |model: &str, name: &str, more: &[&str]| {
        let run = sandbox.run(flags.iter().chain(&[model, "-o", name]).chain(more)).good();
        let blocks = "formats transformer double blocks, single blocks: ";
        let formats = run.stderr.lines().find_map(|line| line.strip_prefix(blocks)).map(String::from);
        (Png::read(&sandbox.path(name)), formats, run.stderr)
    };
    let mut pixels = Vec::new();
    for (math, formats, attention) in
        [("auto", "nvfp4 (w4a4)", None), ("bf16", "nvfp4 (w4a16: as asked)", None), ("fp8", "nvfp4 as fp8 (w8a8)", Some("fp8"))]
    {
        let (png, told, stderr) = run("model", &format!("{math}.png"), &["--nvfp4-math", math]);
        assert_eq!(told.as_deref(), Some(formats));
        let recorded = ["nvfp4-math", "attention"].map(|key| png.text.get(key).map(String::as_str));
        assert_eq!(recorded, [Some(math), attention]);
        assert!(!stderr.contains("warning") && !stderr.contains("expanded"), "{stderr}");
        pixels.push(png.pixels);
    }
    let (default, _, _) = run("model", "default.png", &[]);
    assert!(default.pixels == pixels[0] && pixels[0] != pixels[1] && pixels[1] != pixels[2] && pixels[0] != pixels[2]);

    // Without a GPU there are no kernels, and without NVFP4 weights the flag has no effect.
    let refused = sandbox.run(["plan", "--model", "model", "--nvfp4-math", "fp8"]);
    let why =
        "error: NVFP4 weights cannot be multiplied as FP8: this device has no FP8 GEMM\n\nhint: leave out --nvfp4-math to mul";
    assert!(refused.code == Some(2) && refused.stderr.contains(why), "{}", refused.stderr);
    let (png, _, stderr) = run("plain", "plain.png", &["--nvfp4-math", "fp8"]);
    let warning = "warning: --nvfp4-math is ignored: no layer of this model has NVFP4 weights and an input scale\n";
    assert!(stderr.contains(warning) && !png.text.contains_key("nvfp4-math"), "{stderr}");
}

#[test]
fn what_is_quantized_at_load_is_told_and_recorded() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    let flags = ["x", "--model", "model", "--width", "64", "--height", "64", "--steps", "1", "--seed", "1", "--json", "-v"];
    let run = |name: &str, more: &[&str]| {
        let run = sandbox.run(flags.iter().chain(&["-o", name]).chain(more)).good();
        let blocks = "formats transformer double blocks, single blocks: bf16 quantized at load to ";
        let formats = run.stderr.lines().find_map(|line| line.strip_prefix(blocks)).map(String::from);
        (Png::read(&sandbox.path(name)), formats, run)
    };
    let (plain, formats, first) = run("plain.png", &[]);
    assert_eq!((formats, first.json()[0]["quantize"].clone(), plain.text.get("quantize")), (None, Value::Null, None));
    let plan = |more: &[&str]| sandbox.run(["plan", "--model", "model"].iter().chain(more)).good().text().to_owned();
    let mut pixels = vec![plain.pixels];
    for (format, words) in [("fp8", "fp8 (w8a8)"), ("nvfp4", "nvfp4 (w4a4)")] {
        let (png, formats, run) = run(&format!("{format}.png"), &["--quantize", format]);
        assert_eq!(formats.as_deref(), Some(words));
        assert_eq!(
            (run.json()[0]["quantize"].as_str(), png.text.get("quantize").map(String::as_str)),
            (Some(format), Some(format))
        );
        assert!(!run.stderr.contains("warning") && !run.stderr.contains("expanded"), "{}", run.stderr);
        pixels.push(png.pixels);
        // A plan without a GPU is for one that multiplies such weights.
        let told = plan(&["--quantize", format]);
        let line = lines(&told, "formats ", 21)[0];
        assert!(
            line.starts_with(&format!("transformer double blocks, single blocks: bf16 quantized at load to {format}")),
            "{told}"
        );
    }
    assert!(pixels[0] != pixels[1] && pixels[1] != pixels[2] && pixels[0] != pixels[2]);
    // Published sizes, without files: the blocks and the text encoder take half of what they took, or less.
    let weights = |more: &[&str]| {
        let plan = sandbox.run(["plan", "--model", "klein-4b", "--json"].iter().chain(more)).good().json().remove(0);
        plan["weight_bytes"].as_u64().unwrap() as f64
    };
    let plain = weights(&[]);
    let shares = ["fp8", "nvfp4"].map(|format| weights(&["--quantize", format]) / plain);
    assert!((0.50..0.56).contains(&shares[0]) && (0.28..0.36).contains(&shares[1]), "{shares:?}");

    let refused = |model: &str, why: &str| {
        let run = sandbox.run(["x", "--model", model, "-o", "no.png", "--quantize", "nvfp4"]);
        let message =
            format!("error: the weights cannot be quantized to nvfp4 at load: {why}\n\nhint: leave out --quantize, or name");
        assert!(run.code == Some(2) && run.stderr.contains(&message), "{}", run.stderr);
    };
    fs::write(sandbox.path("model/flux-2-klein-tiny.safetensors"), Content::of("fp8").file(Form::BFL)).unwrap();
    refused("model", "`double_blocks.0.img_attn.qkv.weight` is stored as e4m3 already");

    // Products of SwiGLU beyond 8 times 448.
    let mut tensors = plain_tensors(Component::Transformer, Layout::Bfl);
    let weight = tensors.iter_mut().find(|tensor| tensor.name == "double_blocks.1.img_mlp.0.weight").unwrap();
    weight.bytes = DType::Bf16.encoded(&weight.values().iter().map(|value| 4096.0 * value).collect::<Vec<_>>());
    let file = Content { layers: Vec::new(), plain: tensors }.file(Form::BARE);
    fs::write(sandbox.path("model/flux-2-klein-tiny.safetensors"), file).unwrap();
    let (_, _, run) = run("clamped.png", &["--quantize", "fp8"]);
    let why = "beyond the range of FP8 and clamped, so the image may be wrong: --quantize does not calibrate its input scales; a";
    assert!(run.stderr.contains(why) && run.json()[0]["saturated"].as_u64().unwrap() > 0, "{}", run.stderr);
}
