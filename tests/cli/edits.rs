//! The real program with reference images and negative prompts, and `kiln plan`.

use common::sandbox::{Png, Sandbox};

#[test]
fn references_change_the_image_and_their_order_counts() {
    let sandbox = Sandbox::new();
    sandbox.write_png("red.png", 80, 64, |_, _| [220, 20, 30]);
    sandbox.write_png("blue.png", 64, 96, |_, _| [20, 30, 220]);
    let generate = |out: &str, references: &[&str]| {
        let flags: Vec<&str> = references.iter().flat_map(|r| ["--reference", *r]).collect();
        sandbox.quick(&[&["x", "--seed", "7", "-o", out], &flags[..]].concat());
        Png::read(&sandbox.path(out)).pixels
    };
    let none = generate("none.png", &[]);
    let both = generate("both.png", &["red.png", "blue.png"]);
    let swapped = generate("swapped.png", &["blue.png", "red.png"]);
    let again = generate("again.png", &["red.png", "blue.png"]);
    assert_ne!(none, both);
    assert_ne!(both, swapped);
    assert_eq!(both, again);
}

#[test]
fn a_reference_gives_the_image_its_size() {
    let sandbox = Sandbox::new();
    sandbox.write_png("odd.png", 119, 101, |_, _| [90, 120, 30]);
    let line =
        ["x", "--reference", "odd.png", "--steps", "1", "--precision", "f32", "-o", "a.png", "-v", "--dump", "a.safetensors"];
    let run = sandbox.run(line).good();
    assert!(run.stderr.contains("reference 1: odd.png, 119x101 -> 112x96, 42 tokens\n"), "{}", run.stderr);
    assert!(run.stderr.contains("encoding references "), "{}", run.stderr);
    let png = Png::read(&sandbox.path("a.png"));
    assert_eq!((png.width, png.height), (112, 96));
    assert_eq!(png.text["references"], "1");
    let dump = kiln::internals::checkpoint::Shard::open(&sandbox.path("a.safetensors")).unwrap();
    assert_eq!(dump.entry("reference.1.tokens").unwrap().shape, [42, 128]);
    // A side that a flag gives is kept.
    sandbox.run(["x", "--reference", "odd.png", "--width", "64", "--steps", "1", "--precision", "f32", "-o", "b.png"]).good();
    let png = Png::read(&sandbox.path("b.png"));
    assert_eq!((png.width, png.height), (64, 96));
}

#[test]
fn a_negative_prompt_is_for_base_models() {
    let sandbox = Sandbox::with_tiny();
    let base = ["x", "--seed", "1", "--variant", "base", "--guidance", "4"];
    sandbox.quick(&[&base[..], &["-o", "a.png"]].concat());
    sandbox.quick(&[&base[..], &["-o", "b.png", "--negative", "blurry", "--dump", "b.safetensors"]].concat());
    sandbox.quick(&[&base[..], &["-o", "c.png", "--negative", ""]].concat());
    let [a, b, c] = ["a.png", "b.png", "c.png"].map(|name| Png::read(&sandbox.path(name)));
    assert_ne!(a.pixels, b.pixels);
    assert_eq!(a.pixels, c.pixels, "an empty negative prompt is the default");
    assert_eq!(b.text["negative"], "blurry");
    let dump = kiln::internals::checkpoint::Shard::open(&sandbox.path("b.safetensors")).unwrap();
    assert_eq!(dump.entry("negative_prompt_embeds").unwrap().shape, [512, 384]);
    let run = sandbox.quick(&["x", "-o", "d.png", "--negative", "blurry"]);
    assert!(run.stderr.contains("--negative is ignored: this is a distilled model"), "{}", run.stderr);
    // Without CFG the negative prompt has no effect, and the PNG does not mention it.
    for scale in ["1", "0.5"] {
        let run =
            sandbox.quick(&["x", "-o", "e.png", "--force", "--variant", "base", "--guidance", scale, "--negative", "blurry"]);
        let warning = format!("warning: --negative is ignored: it works through a --guidance above 1, which is {scale} here");
        assert!(run.stderr.lines().any(|line| line == warning), "{}", run.stderr);
        assert!(!Png::read(&sandbox.path("e.png")).text.contains_key("negative"));
    }
    // Each prompt is truncated by itself, and the warning says which.
    let long = "blurry ".repeat(200);
    for (prompt, negative, cut) in [("x", &*long, "the negative prompt"), (&*long, "x", "the prompt")] {
        let run =
            sandbox.quick(&[prompt, "-o", "f.png", "--force", "--variant", "base", "--guidance", "2", "--negative", negative]);
        let warnings: Vec<&str> = run.stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
        assert!(warnings.len() == 1 && warnings[0].starts_with(&format!("warning: {cut} is ")), "{warnings:?}");
        assert!(warnings[0].contains(" tokens too long; only its first 512 are used, up to `…"), "{warnings:?}");
    }
}

#[test]
fn a_plan_opens_no_weights() {
    let sandbox = Sandbox::new();
    let run = sandbox.bare(["plan"]).good();
    assert_eq!(run.stderr, "");
    for line in [
        "model                FLUX.2 [klein] 4B (distilled), bf16",
        "tokens               4608 = 512 text + 4096 canvas",
        "schedule             mu 2.291180, timesteps 1000.000, 967.384, 908.144, 767.200",
    ] {
        assert!(run.text().lines().any(|l| l == line), "{line}\n{}", run.text());
    }
    sandbox.write_png("a.png", 605, 807, |_, _| [1, 2, 3]);
    sandbox.write_png("b.png", 1500, 1000, |_, _| [1, 2, 3]);
    let flags =
        ["--width", "1024", "--height", "1024", "--reference", "a.png", "--reference", "b.png", "--model", "klein-9b", "--json"];
    let run = sandbox.bare(["plan"].iter().chain(&flags)).good();
    let json = &run.json()[0];
    assert_eq!(json["tokens"]["references"], serde_json::json!([1850, 4056]));
    assert_eq!(json["tokens"]["total"], 512 + 10_002);
    assert!(json["weight_bytes"].as_u64().unwrap() > 28_000_000_000);

    let run = sandbox.bare(["plan", "--width", "4096", "--height", "4096"]);
    assert_eq!(run.code, Some(2));
    assert_eq!(
        run.stderr,
        "error: too many tokens: 512 text + 65536 image = 66048, the limit is 52000\n\nhint: lower --width and --height\n"
    );

    // The plan of a named model comes from its headers.
    sandbox.tiny("model", &[]);
    let run =
        sandbox.bare(["plan", "--model", "model", "--width", "64", "--height", "64", "--variant", "base", "--steps", "2"]).good();
    assert!(run.text().contains("guidance             4, two passes per step"), "{}", run.text());
    assert_eq!(sandbox.names(), ["a.png", "b.png", "model"]);
}

/// The name of a published model takes precedence over an environment variable, and over a folder of that name; but only in a plan.
#[test]
fn a_plan_takes_the_names_of_published_models() {
    let sandbox = Sandbox::new();
    sandbox.tiny("klein-9b", &[]);
    for (flags, name) in [
        (&[][..], "FLUX.2 [klein] tiny (distilled), bf16\n"),
        (&["--model", "klein-9b"], "FLUX.2 [klein] 9B (distilled), bf16\n"),
        (&["--model", "klein-9b-kv"], "FLUX.2 [klein] 9B (kv), bf16\n"),
        (&["--model", "klein-base-4b", "--variant", "kv"], "FLUX.2 [klein] 4B (kv), bf16\n"),
        (&["--model", "dev"], "FLUX.2 [dev] 32B, bf16\n"),
        (&["--model", "./klein-9b"], "FLUX.2 [klein] tiny (distilled), bf16\n"),
    ] {
        let run = sandbox.run(["plan"].iter().chain(flags)).good();
        assert!(run.text().starts_with(&format!("model                {name}")), "{flags:?}: {}", run.text());
    }
    for (line, code, told) in [
        (
            "plan --model klein-7b",
            3,
            "(klein-7b): the folder does not exist\n\nhint: the names of published models are `klein-4b`",
        ),
        ("plan --model dev --vae klein-9b", 2, "error: the model `dev` has no parts to replace\n"),
        ("x --model klein-4b", 3, "(klein-4b): the folder does not exist\n\nhint: expected transformer/"),
    ] {
        let run = sandbox.run(line.split(' '));
        assert!(run.code == Some(code) && run.stderr.contains(told), "{line}: {}", run.stderr);
    }
}
