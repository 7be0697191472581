//! What the program says about quantised models: `kiln plan` for a GPU, `kiln doctor` and `-v` for the CPU, and the note where
//! weights are expanded.

mod common;
#[path = "common/sandbox.rs"]
mod sandbox;

use common::quantised::{Content, Form, Plain, plain_tensors};
use kiln::names::Layout;
use kiln::part::Part;
use kiln::tensor::DType;
use sandbox::Sandbox;
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
    let plain = plain_tensors(Part::TextEncoder, Layout::Bfl).into_iter().map(converted).collect();
    fs::write(sandbox.path("model/qwen.safetensors"), Content { layers: Vec::new(), plain }.file(Form::BARE)).unwrap();
    let text = |args: &[&str]| sandbox.run(args).good().text().to_owned();
    let rest = "transformer img_in, txt_in, time_in, modulations, final layer: bf16";
    let encoder = |fp8: &str, wide: &str| {
        let qkv = format!("text encoder qkv: {fp8} + bf16");
        [qkv, "text encoder out, gate/up: bf16".into(), format!("text encoder down: fp8-e5m2 expanded to {wide}")]
    };

    // The CPU multiplies what the files hold, but for e5m2.
    let doctor = text(&["doctor", "--model", "model"]);
    let transformer = |format: &str| {
        [
            format!("transformer double blocks (qkv): 3 {format}, 1 bf16"),
            format!("transformer double blocks (proj, mlp in, mlp out), single blocks: {format}"),
            rest.into(),
        ]
    };
    let want = [&["on the CPU:".to_owned()][..], &transformer("fp8 (w8a8)"), &encoder("fp8 (w8a16)", "bf16")].concat();
    assert_eq!(lines(&doctor, "formats ", 10), want, "{doctor}");
    let run = sandbox.quick(&["x", "-o", "out.png", "--model", "model", "-v"]);
    let want = [transformer("fp8 (w8a32)"), encoder("fp8 (w8a32)", "f32")].concat();
    let formats: Vec<&str> = run.stderr.lines().filter_map(|line| line.strip_prefix("formats ")).collect();
    assert_eq!(formats, want, "{}", run.stderr);

    // A GPU has no kernels for them, so that the plan is that of a bf16 model.
    let args = ["plan", "--model", "model"];
    let want = [transformer("fp8 expanded to bf16"), encoder("fp8 expanded to bf16", "bf16")].concat();
    assert_eq!(lines(&text(&args), "formats ", 21), want);
    let plan = |model: &str| sandbox.run(["plan", "--model", model, "--json"]).good().json().remove(0);
    let (plain, quantised) = (plan("plain"), plan("model"));
    for bytes in ["weight_bytes", "low_memory_weight_bytes", "working_bytes", "token_embedding_bytes"] {
        assert_eq!(plain[bytes], quantised[bytes], "{bytes}");
    }
    let rows = quantised["formats"].as_array().unwrap();
    let row = |kind: &str, stored: &str| {
        let fits = |row: &&Value| row["kind"] == kind && row["stored"][0] == stored;
        rows.iter().find(fits).unwrap_or_else(|| panic!("{kind} {stored}: {quantised}"))
    };
    let linear = row("single blocks linear1", "fp8");
    assert_eq!((&linear["held"], &linear["input"]), (&json!(["bf16"]), &json!("bf16")));
    assert_eq!(linear["held_bytes"], 2 * linear["stored_bytes"].as_u64().unwrap());
    let qkv = row("qkv", "fp8");
    assert_eq!((&qkv["part"], &qkv["stored"], &qkv["held"]), (&json!("text encoder"), &json!(["fp8", "bf16"]), &json!(["bf16"])));

    // The note counts what is expanded, and nothing else: here the matrices in e5m2, from one byte to four.
    let down = row("down", "fp8-e5m2")["stored_bytes"].as_u64().unwrap() as f64 / f64::from(1 << 20);
    let note = "note: fp8-e5m2 weights are expanded to f32 on the CPU: ";
    let note = format!("{note}{:.1} MiB instead of {down:.1} MiB\n", 4.0 * down);
    assert!(run.stderr.contains(&note), "{note}{}", run.stderr);
    assert!(!sandbox.quick(&["x", "-o", "plain.png", "--model", "plain"]).stderr.contains("expanded"));
}
