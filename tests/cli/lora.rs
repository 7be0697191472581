//! Adapters on the command line: the description of a file, refused files, and the metadata in images and answers.

use common::adapter_files::{Factor, KOHYA, PEFT, factor, file, lokr, lora, number};
use common::sandbox::{Png, QUICK, Run, Sandbox};
use common::sha256;
use kiln::internals::tensor::DType;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The width of the tiny model.
const H: usize = 256;

/// Writes a file, and returns its SHA-256.
fn write(path: &Path, tensors: &[Factor], metadata: &[(&str, &str)]) -> String {
    let bytes = file(tensors, DType::F32, metadata);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, &bytes).unwrap();
    sha256::hex(&bytes)
}

/// Both factors of a layer, with small values.
fn pair(layer: &str, endings: [&str; 2], shape: [usize; 2], rank: usize) -> Vec<Factor> {
    lora(layer, endings, shape, rank).into_iter().map(|factor| factor.times(0.1)).collect()
}

/// A file of two layers that the tiny model has.
fn good() -> Vec<Factor> {
    let qkv = pair("diffusion_model.double_blocks.0.img_attn.qkv", PEFT, [3 * H, H], 4);
    let linear2 = pair("diffusion_model.single_blocks.1.linear2", PEFT, [H, 4 * H], 2);
    [qkv, linear2].concat()
}

/// A folder with the tiny model, whose prompts have 64 tokens instead of 512.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    fs::write(sandbox.path("model/kiln.json"), "{\"max_text_tokens\": 64}").unwrap();
    sandbox
}

fn run(sandbox: &Sandbox, args: &[&str]) -> Run {
    sandbox.run(args.iter().chain(&QUICK).chain(&["--model", "model"]))
}

fn inspect(sandbox: &Sandbox, file: &str, flags: &[&str]) -> Value {
    sandbox.run(["lora", "inspect", file, "--json"].iter().chain(flags)).good().json().remove(0)
}

#[test]
fn every_spelling_is_recognized_and_placed() {
    let sandbox = Sandbox::new();
    for (i, (layer, tensors, spelling)) in [
        ("transformer.transformer_blocks.0.attn.to_q", PEFT, "diffusers (diffusers, SimpleTuner)"),
        ("transformer_blocks.0.attn.to_k", PEFT, "diffusers without a prefix (DiffSynth)"),
        ("sformer_blocks.0.attn.to_k", PEFT, "diffusers, converted"),
        ("diffusion_model.double_blocks.1.img_attn.proj", PEFT, "BFL (ai-toolkit, ComfyUI)"),
        ("double_blocks.1.img_attn.proj", [".lora.down.weight", ".lora.up.weight"], "BFL without a prefix"),
        ("base_model.model.double_blocks.1.txt_attn.proj", [".lora_A.default.weight", ".lora_B.default.weight"], "PEFT"),
        ("lora_unet_double_blocks_1_img_attn_proj", KOHYA, "Kohya (sd-scripts, musubi-tuner)"),
        ("lora_transformer_transformer_blocks_0_attn_to_v", KOHYA, "OneTrainer"),
        ("transformer.double_blocks.1.img_attn.qkv.2", KOHYA, "OneTrainer"),
    ]
    .into_iter()
    .map(|(layer, endings, spelling)| (layer, pair(layer, endings, [H, H], 3), spelling))
    .chain([(
        "lycoris_transformer_blocks_1_attn_to_q",
        lokr("lycoris_transformer_blocks_1_attn_to_q", ([4, 4], None), ([H / 4, H / 4], None)),
        "LyCORIS (SimpleTuner, older ai-toolkit)",
    )])
    .enumerate()
    {
        let file = format!("{i}.safetensors");
        let digest = write(&sandbox.path(&file), &tensors, &[]);
        let told = inspect(&sandbox, &file, &["--model", "tiny"]);
        assert_eq!(told["spellings"], json!([spelling]), "{layer}");
        let is_lokr = layer.starts_with("lycoris");
        assert_eq!(told["methods"], json!([if is_lokr { "LoKr" } else { "LoRA" }]), "{layer}");
        assert_eq!((&told["sha256"], &told["dtypes"]), (&json!(digest), &json!(["F32"])), "{layer}");
        let own = &told["layers"][0];
        let rank = if is_lokr { Value::Null } else { json!(3) };
        assert_eq!((&own["name"], &own["rank"]), (&json!(layer), &rank), "{layer}");
        assert_eq!(
            [&own["rows"], &own["columns"], &own["scale"], &own["fault"]],
            [&json!(H), &json!(H), &json!(1.0), &Value::Null]
        );
        let fit = json!({"model": told["fit"]["model"], "fits": true, "matched": 1, "unmatched": [], "error": null});
        assert_eq!(told["fit"], fit, "{layer}");
        assert!(told["base"].as_str().unwrap().contains("kiln's"), "{layer}: {}", told["base"]);
    }
}

#[test]
fn a_file_is_described_without_a_model() {
    let sandbox = Sandbox::new();
    let mut tensors = pair("lora_unet_double_blocks_0_img_attn_qkv", KOHYA, [9216, 3072], 2);
    tensors.push(number("lora_unet_double_blocks_0_img_attn_qkv.alpha", -0.013));
    tensors.extend(pair("lora_unet_double_blocks_1_img_attn_qkv", KOHYA, [9216, 3072], 2));
    tensors.extend(pair("lora_te_model_layers_3_mlp_up_proj", KOHYA, [9728, 2560], 1));
    let metadata = [
        ("ss_output_name", "style\u{1b}[2J"),
        ("modelspec.trigger_phrase", "ohwx man, oil\npainting"),
        ("ss_tag_frequency", r#"{"10_a": {"dog": 3}, "5_b": {"dog": 2, "cat\u001b": 4}}"#),
        ("ss_network_dim", "2"),
    ];
    let digest = write(&sandbox.path("style.safetensors"), &tensors, &metadata);
    let run = sandbox.run(["lora", "inspect", "style.safetensors"]).good();
    assert_eq!(run.stderr, "");
    for text in [
        "file       style.safetensors, 0.2 MiB, F32\n",
        &format!("sha256     {digest}\n"),
        "method     LoRA\n",
        "spelling   Kohya (sd-scripts, musubi-tuner)\n",
        "base       FLUX.2 [klein] 4B\n",
        "layers     3, ranks 1 to 2\n",
        "             2 lora_unet_double_blocks_*_img_attn_qkv: rank 2, 9216x3072, alpha -0.013, scale -0.0065 and 1\n",
        "             1 lora_te_model_layers_*_mlp_up_proj: rank 1, 9728x2560, scale 1\n",
        "name       style\\u{1b}[2J\n",
        "trigger    \"ohwx man\", \"oil\\npainting\"\n",
        "tags       dog (5), cat\\u{1b} (4)\n",
        "ss_network_dim: 2\n",
    ] {
        assert!(run.text().contains(text), "{text}: {}", run.text());
    }
    assert!(!run.text().contains('\u{1b}'));
    let told = inspect(&sandbox, "style.safetensors", &[]);
    assert_eq!(told["trigger_words"], json!(["ohwx man", "oil\npainting"]));
    assert_eq!(told["tags"][0], json!({"tag": "dog", "count": 5}));
    assert_eq!((&told["metadata"]["ss_network_dim"], &told["fit"]), (&json!("2"), &Value::Null));
    let verbose = sandbox.run(["lora", "inspect", "style.safetensors", "-v"]).good();
    assert!(verbose.text().contains("1 lora_unet_double_blocks_1_img_attn_qkv: rank 2"), "{}", verbose.text());
}

#[test]
fn methods_that_are_not_supported_are_listed_and_refused() {
    let sandbox = sandbox();
    let qkv = "diffusion_model.double_blocks.0.img_attn.qkv";
    let with = |more: Factor| [good(), vec![more]].concat();
    let loha: Vec<Factor> =
        ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"].map(|name| factor(format!("{qkv}.{name}"), &[2, 2])).to_vec();
    for (file, tensors, method, layers) in [
        ("dora", with(factor(format!("{qkv}.dora_scale"), &[3 * H, 1])), "DoRA", 2),
        ("loha", loha, "LoHa", 1),
        ("bias", with(factor(format!("{qkv}.lora_B.bias"), &[3 * H])), "LoRA with a bias", 2),
    ] {
        write(&sandbox.path(file), &tensors, &[]);
        let told = inspect(&sandbox, file, &["--model", "tiny"]);
        assert_eq!((&told["unsupported"], told["layers"].as_array().unwrap().len()), (&json!([method]), layers), "{file}");
        assert_eq!(told["fit"]["fits"], json!(false), "{file}");
        let table = sandbox.run(["lora", "inspect", file]).good();
        assert!(table.text().contains(&format!("not supported: {method}\n")), "{}", table.text());
        let refused = run(&sandbox, &["x", "--lora", file]);
        assert_eq!(refused.code, Some(3));
        let said = format!("error: this adapter cannot be used ({file}): it is {method}, which is not supported");
        assert!(refused.stderr.contains(&said), "{}", refused.stderr);
        assert!(refused.stderr.contains("\n\nhint: kiln takes LoRA and LoKr"), "{}", refused.stderr);
    }
    assert!(!sandbox.path("x.png").exists());
}

#[test]
fn files_that_do_not_fit_are_refused_with_their_reasons() {
    let sandbox = sandbox();
    let of = |name: &str, tensors: &[Factor]| {
        write(&sandbox.path(name), tensors, &[]);
        name.to_owned()
    };
    let absent = |block: usize| pair(&format!("diffusion_model.double_blocks.{block}.img_attn.qkv"), PEFT, [3 * H, H], 1);
    let klein = |name: &str, shape: [usize; 2]| pair(name, KOHYA, shape, 1);
    let some = [good(), (5..9).flat_map(absent).collect()].concat();
    let partial = "use an adapter made for this model, or --lora-partial to apply the layers that fit";
    let inspect = "`kiln lora inspect FILE` lists what a file has";
    for (file, error, hint) in [
        (
            of("some", &some),
            "only 2 of its 6 layers fit: the model has no layer `diffusion_model.double_blocks.5.img_attn.qkv`, \
             `diffusion_model.double_blocks.6.img_attn.qkv`, `diffusion_model.double_blocks.7.img_attn.qkv` and 1 more; the nearest is \
             `double_blocks.0.img_attn.qkv`",
            partial,
        ),
        (
            of("none", &absent(5)),
            "the model has no layer `diffusion_model.double_blocks.5.img_attn.qkv`; the nearest is `double_blocks.",
            inspect,
        ),
        (
            of("9b", &klein("lora_unet_double_blocks_0_img_attn_qkv", [12288, 4096])),
            "`lora_unet_double_blocks_0_img_attn_qkv` is for a layer of [12288, 4096], the model's has [768, 256]; it seems to be for \
             FLUX.2 [klein] 9B",
            inspect,
        ),
        (
            of("dev", &klein("lora_unet_single_blocks_47_linear2", [6144, 100])),
            "the model has no layer `lora_unet_single_blocks_47_linear2`; the nearest is `single_blocks.0.linear2`; \
             it seems to be for FLUX.2 [dev]",
            inspect,
        ),
        (
            of("flux1", &klein("lora_unet_double_blocks_0_img_mod_lin", [18432, 3072])),
            "nearest is `double_blocks.0.img_mlp.0`; it seems to be for FLUX.1",
            inspect,
        ),
        (of("model-file", &[factor("img_in.weight", &[4, 4])]), "it has no factors of LoRA or LoKr", inspect),
    ] {
        let refused = run(&sandbox, &["x", "-q", "-o", "out.png", "--lora", &file]);
        assert_eq!((refused.code, refused.text()), (Some(3), ""), "{file}: {}", refused.stderr);
        let (said, advice) = refused.stderr.split_once("\n\nhint: ").unwrap_or_else(|| panic!("{}", refused.stderr));
        assert!(said.starts_with(&format!("error: this adapter cannot be used ({file}): ")), "{said}");
        assert!(said.contains(error), "{file}: {said}");
        assert!(advice.contains(hint), "{file}: {advice}");
    }
    assert!(!sandbox.path("out.png").exists());

    // With --lora-partial a part of the layers is enough, but not none.
    let used = run(&sandbox, &["x", "-v", "-o", "out.png", "--lora", "some", "--lora-partial"]).good();
    let line = "LoRA some: 2 of 6 layers, ranks 2 to 4, scale 1, merged; the model does not have the others\n";
    assert!(used.stderr.contains(line), "{}", used.stderr);
    assert!(used.stderr.contains("  diffusion_model.double_blocks.8.img_attn.qkv is left out: the model has no such layer\n"));
    assert_eq!(run(&sandbox, &["x", "-q", "--lora", "none", "--lora-partial"]).code, Some(3));
    // `kiln plan` compares with the published klein 4B.
    let plan = sandbox.bare(["plan", "--lora", "9b"]);
    assert_eq!(plan.code, Some(3), "{}", plan.stderr);
    assert!(plan.stderr.contains("the model's has [9216, 3072]; it seems to be for FLUX.2 [klein] 9B"), "{}", plan.stderr);
}

#[test]
fn names_that_lead_nowhere_say_what_to_do() {
    let sandbox = sandbox();
    let snapshot = sandbox.path(".cache/huggingface/hub/models--me--styles/snapshots/0a1b");
    write(&snapshot.join("ink.safetensors"), &good(), &[]);
    write(&sandbox.path("peft/adapter_model.safetensors"), &good(), &[]);
    fs::write(sandbox.path("peft/adapter_config.json"), r#"{"r": 4, "lora_alpha": 8}"#).unwrap();
    fs::create_dir(sandbox.path("empty")).unwrap();
    for (lora, error, hint) in [
        ("none.safetensors", "no LoRA found (none.safetensors): the file does not exist", "owner/name"),
        ("none/none.safetensors", "no LoRA found (none/none.safetensors): the file does not exist", "owner/name"),
        ("me/none:0.5", "no LoRA found (me/none): neither a folder nor in the Hugging Face cache", "`hf download me/none`"),
        (
            "me/styles/oil.safetensors",
            "me/styles is in the Hugging Face cache, but not its oil.safetensors",
            "`hf download me/styles oil",
        ),
        ("empty", "no LoRA found (empty): the folder has no safetensors file", ""),
        ("model/kiln.json", "not a safetensors file (model/kiln.json): it is JSON", "use a .safetensors file"),
    ] {
        let refused = run(&sandbox, &["x", "-q", "-o", "out.png", "--lora", lora]);
        assert_eq!(refused.code, Some(3), "{lora}: {}", refused.stderr);
        assert!(refused.stderr.contains(error) && refused.stderr.contains(hint), "{lora}: {}", refused.stderr);
        let inspected = sandbox.run(["lora", "inspect", lora.trim_end_matches(":0.5")]);
        assert_eq!(inspected.code, Some(3), "{lora}");
        assert!(inspected.stderr.contains(error), "{lora}: {}", inspected.stderr);
    }
    for (lora, why) in [
        ("a:nan", "expected a scale from -1000"),
        ("a:1e38", "expected a scale from -1000 to 1000"),
        (":1", "expected a file"),
        ("", "expected a file"),
    ] {
        let refused = sandbox.run(["x", "--lora", lora]);
        assert_eq!(refused.code, Some(2), "{lora}");
        assert!(refused.stderr.contains(why), "{lora}: {}", refused.stderr);
    }
    assert_eq!(sandbox.run(["x", "--lora-mode", "both"]).code, Some(2));
    assert_eq!(inspect(&sandbox, "me/styles", &[])["layers"].as_array().unwrap().len(), 2);
    assert_eq!(inspect(&sandbox, "me/styles/ink.safetensors", &[])["base"], json!("kiln's tiny model or kiln's built-in model"));
    // The scale of a PEFT folder comes from the settings next to the file.
    assert_eq!(inspect(&sandbox, "peft", &[])["layers"][0]["scale"], json!(2.0));
    write(&snapshot.join("oil.safetensors"), &good(), &[]);
    let several = sandbox.run(["lora", "inspect", "me/styles"]);
    assert!(several.stderr.contains("2 safetensors files: ink.safetensors, oil.safetensors\n"), "{}", several.stderr);
    assert!(several.stderr.contains("hint: name one of them, as in me/styles/ink.safetensors\n"), "{}", several.stderr);
}

#[test]
fn images_and_json_tell_which_adapters_they_have() {
    let sandbox = sandbox();
    let first = write(&sandbox.path("loras/a.safetensors"), &good(), &[]);
    let second = write(&sandbox.path("b.safetensors"), &pair("transformer.transformer_blocks.1.attn.to_v", PEFT, [H, H], 1), &[]);
    let two = ["--lora", "loras/a.safetensors:0.8", "--lora", "b.safetensors"];
    let made = run(&sandbox, &[&["x", "--seed", "3", "-o", "a.png", "--json", "-v"], &two[..]].concat()).good();
    let lora = json!([
        {"file": "a.safetensors", "sha256": first, "scale": 0.8},
        {"file": "b.safetensors", "sha256": second, "scale": 1.0}
    ]);
    assert_eq!(made.json()[0]["lora"], lora);
    let png = Png::read(&sandbox.path("a.png"));
    assert_eq!(png.text["lora"], "a.safetensors:0.8, b.safetensors:1");
    assert_eq!(png.text["lora-sha256"], format!("{first}, {second}"));
    assert!(!png.text.contains_key("lora-mode"));
    for line in [
        "LoRA a.safetensors: 2 of 2 layers, ranks 2 to 4, scale 0.8, merged\n",
        "  diffusion_model.double_blocks.0.img_attn.qkv -> transformer double_blocks.0.img_attn.qkv.weight rows 0..768, rank 4, scale 1\n",
        "LoRA b.safetensors: 1 of 1 layers, rank 1, scale 1, merged\n",
        "  transformer.transformer_blocks.1.attn.to_v -> transformer double_blocks.1.img_attn.qkv.weight rows 512..768, rank 1, scale 1\n",
    ] {
        assert!(made.stderr.contains(line), "{line}: {}", made.stderr);
    }
    // XMP has the same facts, and the mode if a flag sets it.
    run(&sandbox, &[&["x", "-q", "-o", "a.webp", "--lora-mode", "branch"], &two[..]].concat()).good();
    let webp = fs::read(sandbox.path("a.webp")).unwrap();
    let webp = String::from_utf8_lossy(&webp);
    for text in ["<kiln:lora>a.safetensors:0.8, b.safetensors:1</kiln:lora>", &format!("<kiln:lora-sha256>{first}, {second}<")] {
        assert!(webp.contains(text), "{text}");
    }
    assert!(webp.contains("<kiln:lora-mode>branch</kiln:lora-mode>"));
    let without = run(&sandbox, &["x", "--seed", "3", "-q", "-o", "b.png", "--json"]).good();
    assert_eq!(without.json()[0]["lora"], json!([]));
    let plain = Png::read(&sandbox.path("b.png"));
    assert!(!plain.text.keys().any(|key| key.starts_with("lora")));
    assert!(plain.pixels != png.pixels, "adapters change the image");
    // At scale 0 the image equals the one without adapters, and says so.
    let none = run(&sandbox, &["x", "--seed", "3", "-o", "c.png", "--lora", "b.safetensors:0"]).good();
    assert!(none.stderr.contains("LoRA b.safetensors: 1 of 1 layers, rank 1, scale 0, without effect\n"), "{}", none.stderr);
    assert!(Png::read(&sandbox.path("c.png")).pixels == plain.pixels);

    let plan = sandbox.run(["plan", "--model", "model", "--json"].iter().chain(&two)).good();
    assert_eq!(plan.json()[0]["lora"], lora);
    let plan = sandbox.run(["plan", "--model", "model"].iter().chain(&two)).good();
    let rows =
        "adapters             LoRA a.safetensors: 2 of 2 layers, ranks 2 to 4, scale 0.8, merged\n                     LoRA b";
    assert!(plan.text().contains(rows), "{}", plan.text());
}

#[cfg(unix)]
#[test]
fn lines_have_adapters_of_their_own() {
    let sandbox = sandbox();
    let first = write(&sandbox.path("a.safetensors"), &good(), &[]);
    let second = write(&sandbox.path("b.safetensors"), &good()[..2], &[]);
    write(&sandbox.path("wrong"), &pair("lora_unet_double_blocks_0_img_attn_qkv", KOHYA, [12288, 4096], 1), &[]);
    let lines = [
        r#"{"prompt": "x", "output": "0.png"}"#,
        r#"{"prompt": "x", "output": "1.png", "lora": ["b.safetensors:0.5", {"file": "a.safetensors", "scale": 2}]}"#,
        r#"{"prompt": "x", "output": "2.png", "lora": []}"#,
        r#"{"prompt": "x", "output": "3.png", "lora": ["wrong"]}"#,
        r#"{"prompt": "x", "output": "4.png", "lora": ["none"]}"#,
        r#"{"prompt": "x", "output": "5.png", "lora": "a.safetensors"}"#,
        r#"{"prompt": "x", "output": "6.png", "lora": ["b.safetensors"]}"#,
        r#"{"prompt": "x", "output": "7.png", "lora": ["a.safetensors"]}"#,
    ];
    fs::write(sandbox.path("lines"), lines.join("\n")).unwrap();
    let answered = run(&sandbox, &["run", "lines", "--lora", "a.safetensors"]);
    let answers = answered.json();
    let codes: Vec<Option<u64>> = answers.iter().map(|answer| answer["code"].as_u64()).collect();
    assert_eq!(codes, [None, None, None, Some(3), Some(3), Some(2), None, None], "{}", answered.stderr);
    let lora = |file: &str, digest: &str, scale: f32| json!({"file": file, "sha256": digest, "scale": scale});
    let (a, b) = (|scale| lora("a.safetensors", &first, scale), |scale| lora("b.safetensors", &second, scale));
    let told: Vec<&Value> = [0, 1, 2, 6, 7].map(|i: usize| &answers[i]["lora"]).to_vec();
    assert_eq!(told, [&json!([a(1.0)]), &json!([b(0.5), a(2.0)]), &json!([]), &json!([b(1.0)]), &json!([a(1.0)])]);
    assert!(answers[3]["error"].as_str().unwrap().contains("it seems to be for FLUX.2 [klein] 9B"), "{}", answers[3]);
    assert!(answers[4]["error"].as_str().unwrap().starts_with("no LoRA found (none)"), "{}", answers[4]);
    // Adapters run as branches, so lines can differ. kiln describes each file when it opens it.
    assert!(answered.stderr.contains("LoRA a.safetensors: 2 of 2 layers, ranks 2 to 4, scale 1, as branches\n"));
    let opened: Vec<&str> = answered.stderr.lines().filter(|line| line.starts_with("line ") && line.contains("LoRA ")).collect();
    assert_eq!(
        opened[..2],
        [
            "line 2: LoRA b.safetensors: 1 of 1 layers, rank 4, scale 0.5, as branches",
            "line 2: LoRA a.safetensors: 2 of 2 layers, ranks 2 to 4, scale 2, as branches",
        ]
    );
    assert!(opened.len() == 3 && opened[2].starts_with("line 5: error: no LoRA found"), "{opened:?}");
    let text = |name: &str| Png::read(&sandbox.path(name)).text;
    assert_eq!(
        (text("1.png")["lora"].as_str(), text("1.png")["lora-mode"].as_str()),
        ("b.safetensors:0.5, a.safetensors:2", "branch")
    );
    assert_eq!(text("0.png")["lora"], "a.safetensors:1");
    assert!(!text("2.png").contains_key("lora"));

    // The images equal the images of `kiln generate`.
    for (name, lora) in
        [("1.png", &["--lora", "b.safetensors:0.5", "--lora", "a.safetensors:2", "--lora-mode", "branch"][..]), ("2.png", &[])]
    {
        let seed = text(name)["seed"].clone();
        run(&sandbox, &[&["x", "-q", "-o", "own.png", "--force", "--seed", &seed], lora].concat()).good();
        assert!(fs::read(sandbox.path("own.png")).unwrap() == fs::read(sandbox.path(name)).unwrap(), "{name}");
    }

    // Merged adapters cannot change from line to line.
    fs::write(sandbox.path("lines"), "{\"prompt\": \"x\", \"lora\": []}\n{\"prompt\": \"y\", \"lora\": [\"a.safetensors\"]}")
        .unwrap();
    let merged = run(&sandbox, &["run", "lines", "--lora", "a.safetensors", "--lora-mode", "merge"]);
    let answers = merged.json();
    assert_eq!((answers[0]["code"].as_u64(), answers[1]["code"].as_u64()), (Some(2), None), "{}", merged.stderr);
    assert!(answers[0]["hint"].as_str().unwrap().contains("--lora-mode merge"), "{}", answers[0]);
}

#[test]
fn the_help_teaches() {
    let sandbox = Sandbox::new();
    for (args, texts) in [
        (
            &["--help"][..],
            &["--lora <FILE[:SCALE]>", "style.safetensors:0.8", "owner/name", "--lora-partial", "--lora-mode <HOW>"][..],
        ),
        (&["run", "--help"], &["--lora <FILE[:SCALE]>", "`lora`"]),
        (&["plan", "--help"], &["--lora <FILE[:SCALE]>"]),
        (&["bench", "--help"], &["--lora <FILE[:SCALE]>"]),
        (&["lora", "--help"], &["inspect", "--lora"]),
        (&["lora", "inspect", "--help"], &["trigger words", "DoRA", "--model <PATH|ID>", "--json"]),
        (&["man", "lora-inspect"], &[".TH kiln-lora-inspect 1 ", "trigger words"]),
    ] {
        let help = sandbox.run(args).good();
        texts.iter().for_each(|text| assert!(help.text().contains(text), "{args:?} {text}: {}", help.text()));
    }
    assert_eq!(sandbox.run(["lora"]).code, Some(2));
    assert_eq!(sandbox.run(["lora", "inspect"]).code, Some(2));
}
