//! The real program on the tiny model: its files, its messages, what it refuses, and its exit codes.

use common::sandbox::{Png, QUICK, Run, Sandbox};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::Stdio;

#[test]
fn a_prompt_is_enough() {
    let sandbox = Sandbox::with_tiny();
    let run = sandbox.run(["A red fox, in the snow!"]).good();
    let names = sandbox.names();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(run.text(), format!("{}\n", names[0]), "standard output has the path and nothing else");
    let seed = names[0].strip_prefix("a-red-fox-in-the-snow-").unwrap().strip_suffix(".png").unwrap();

    let mut lines: Vec<&str> = run.stderr.lines().collect();
    assert!(lines[0].starts_with("note: the tiny model is random and untrained, so the image is noise"), "{}", lines[0]);
    assert!(lines[0].ends_with("--model or KILN_MODEL"), "{}", lines[0]);
    let gpu = lines.remove(1);
    assert!(gpu.starts_with("note: no usable GPU: ") && gpu.ends_with("; running on the CPU"), "{gpu}");
    assert!(lines[1].ends_with(&format!("256x256, 4 steps, seed {seed}")), "{}", lines[1]);
    let phases = ["loading weights ", "encoding text ", "loading weights ", "denoising ", "decoding "];
    assert_eq!(lines.len(), 2 + phases.len(), "{}", run.stderr);
    assert!(lines[2..].iter().zip(phases).all(|(line, phase)| line.starts_with(phase)), "{}", run.stderr);

    let png = Png::read(&sandbox.path(&names[0]));
    assert_eq!((png.width, png.height), (256, 256));
    let text: BTreeMap<String, String> = [
        ("prompt", "A red fox, in the snow!"),
        ("seed", seed),
        ("model", "tiny random model (built in, not trained)"),
        ("variant", "distilled"),
        ("steps", "4"),
        ("size", "256x256"),
        ("precision", "bf16"),
        ("noise-kind", "torch-cuda"),
        ("noise-sms", "132"),
        ("noise-threads", "2048"),
        ("version", concat!("kiln ", env!("CARGO_PKG_VERSION"))),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    let (basic, more): (BTreeMap<_, _>, BTreeMap<_, _>) = png.text.into_iter().partition(|(key, _)| text.contains_key(key));
    assert_eq!(basic, text);
    assert_eq!(more.keys().collect::<Vec<_>>(), ["arithmetic", "device", "kiln", "model-id", "parameters"]);
}

#[test]
fn a_seed_determines_the_image() {
    let sandbox = Sandbox::new();
    sandbox.quick(&["x", "--seed", "7", "-o", "a.png"]);
    sandbox.quick(&["generate", "x", "--seed", "7", "-o", "b.png", "--threads", "1"]);
    sandbox.quick(&["x", "--seed", "8", "-o", "c.png"]);
    sandbox.quick(&["x", "--seed", "7", "-o", "d.png", "--noise-kind", "torch-cpu"]);
    let bytes = |name: &str| fs::read(sandbox.path(name)).unwrap();
    let pixels = |name: &str| Png::read(&sandbox.path(name)).pixels;
    assert_eq!(bytes("a.png"), bytes("b.png"), "whatever the number of threads");
    sandbox.quick(&["x", "--seed", "7", "-o", "b.png", "--force", "--low-memory"]);
    assert_eq!(bytes("a.png"), bytes("b.png"), "in little memory");
    assert_ne!(pixels("a.png"), pixels("c.png"));
    assert_ne!(pixels("a.png"), pixels("d.png"));

    // An existing file is refused without --force and replaced with it.
    assert_eq!(sandbox.run(["y", "-o", "a.png"]).code, Some(5));
    assert_eq!(bytes("a.png"), bytes("b.png"));
    sandbox.quick(&["x", "--seed", "8", "-o", "a.png", "--force"]);
    assert_eq!(bytes("a.png"), bytes("c.png"));
    assert_eq!(sandbox.names(), ["a.png", "b.png", "c.png", "d.png"]);
}

#[test]
fn several_images_are_numbered() {
    let sandbox = Sandbox::with_tiny();
    let run = sandbox.quick(&["x", "--seed", "18446744073709551614", "--count", "2", "-o", "out.png", "--json"]);
    assert!(run.stderr.contains("seeds 18446744073709551614 to 18446744073709551615\n"), "{}", run.stderr);
    let objects = run.json();
    let of = |key: &str| objects.iter().map(|object| object[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("path"), ["out-1.png", "out-2.png"]);
    assert_eq!(of("seed"), [u64::MAX - 1, u64::MAX]);
    for (key, value) in [
        ("width", Value::from(64)),
        ("height", 64.into()),
        ("steps", 1.into()),
        ("guidance", Value::Null),
        ("model", "tiny random model (built in, not trained)".into()),
        ("variant", "distilled".into()),
        ("precision", "f32".into()),
        ("quantize", Value::Null),
        ("backend", "cpu".into()),
        ("saturated", 0.into()),
    ] {
        assert_eq!(of(key), [value.clone(), value], "{key}");
    }
    for phase in ["load", "encode", "denoise", "decode"] {
        assert!(objects[1]["seconds"][phase].as_f64().unwrap() > 0.0, "{phase}");
    }

    // The second image is the one that its seed gives alone, and default names contain the seeds.
    let run = sandbox.quick(&["x", "--seed", "0", "--count", "2", "-q"]);
    assert_eq!((run.text(), run.stderr.as_str()), ("x-0.png\nx-1.png\n", ""));
    sandbox.quick(&["x", "--seed", "18446744073709551615", "-q"]);
    assert!(Png::read(&sandbox.path("x-18446744073709551615.png")).pixels == Png::read(&sandbox.path("out-2.png")).pixels);

    // An existing file among the outputs is found before the first image is generated.
    fs::write(sandbox.path("y-3.png"), b"").unwrap();
    fs::write(sandbox.path("z-3.png"), b"").unwrap();
    for target in ["y.png", "z.png"] {
        let run = sandbox.run(["x", "--count", "3", "-o", target]);
        assert_eq!(run.code, Some(5), "{}", run.stderr);
    }
    assert_eq!(
        sandbox.names(),
        ["out-1.png", "out-2.png", "x-0.png", "x-1.png", "x-18446744073709551615.png", "y-3.png", "z-3.png"]
    );
}

#[test]
fn a_dump_holds_every_stage_and_its_noise_reproduces_the_image() {
    let sandbox = Sandbox::with_tiny();
    let flags = ["x", "--width", "80", "--height", "64", "--steps", "2", "--json"];
    let run = |extra: &[&str]| sandbox.run(flags.iter().chain(extra)).good();
    run(&["-o", "a.png", "--dump", "a.safetensors", "--seed", "3"]);
    let again = run(&["-o", "b.png", "--dump", "b.safetensors", "--noise", "a.safetensors"]);
    let bytes = fs::read(sandbox.path("a.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> =
        file.tensors().into_iter().map(|(name, t)| (name, format!("{:?}", t.dtype()), t.shape().to_vec())).collect();
    tensors.sort();
    let expected = [
        ("image", "F32", vec![3, 64, 80]),
        ("latents.0", "F32", vec![20, 128]),
        ("latents.1", "F32", vec![20, 128]),
        ("latents.2", "F32", vec![20, 128]),
        ("noise", "F32", vec![20, 128]),
        ("prompt_embeds", "F32", vec![512, 384]),
        ("token_ids", "I32", vec![512]),
    ];
    assert_eq!(tensors, expected.map(|(name, dtype, shape)| (name.to_owned(), dtype.to_owned(), shape)));
    assert_eq!(file.tensor("noise").unwrap().data(), file.tensor("latents.0").unwrap().data());

    // The PNG has the pixels of the raw image, rounded.
    let raw: Vec<f32> =
        file.tensor("image").unwrap().data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let interleaved: Vec<f32> = (0..64 * 80 * 3).map(|i| raw[i % 3 * 64 * 80 + i / 3]).collect();
    let rounded: Vec<u8> =
        interleaved.iter().map(|v| (255.0 * (0.5 * v + 0.5).clamp(0.0, 1.0)).round_ties_even() as u8).collect();
    let (a, b) = (Png::read(&sandbox.path("a.png")), Png::read(&sandbox.path("b.png")));
    assert_eq!((a.width, a.height), (80, 64));
    assert_eq!(a.pixels, rounded);
    assert_eq!(a.pixels, b.pixels);
    assert_eq!(b.text["noise-kind"], "file");
    // No seed gives this noise, so none is reported, and the default file name has none.
    assert_eq!((a.text["seed"].as_str(), b.text.get("seed"), &again.json()[0]["seed"]), ("3", None, &Value::Null));
    assert!(again.stderr.contains("80x64, 2 steps, noise from a file\n"), "{}", again.stderr);
    assert_eq!(run(&["--noise", "a.safetensors"]).json()[0]["path"], "x-noise.png");
    assert_eq!(bytes, fs::read(sandbox.path("b.safetensors")).unwrap());
}

#[test]
fn prompts_from_a_file_and_from_standard_input() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("prompt.txt"), "狐 in\nthe snow\n").unwrap();
    let run = sandbox.quick(&["--prompt-file", "prompt.txt", "--seed", "1"]);
    assert_eq!(run.text(), "in-the-snow-1.png\n");
    let png = Png::read(&sandbox.path("in-the-snow-1.png"));
    assert_eq!(png.text["prompt"], "狐 in\nthe snow");

    let mut command = sandbox.command(["--prompt-file", "-", "--seed", "1", "-o", "b.png"].iter().chain(&QUICK));
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all("狐 in\nthe snow".as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(Png::read(&sandbox.path("b.png")).pixels, png.pixels);

    // An empty prompt is valid, and a prompt may be spelled like a command or an option.
    assert_eq!(sandbox.quick(&["", "--seed", "1"]).text(), "kiln-1.png\n");
    assert_eq!(sandbox.quick(&["generate", "tiny", "--seed", "1"]).text(), "tiny-1.png\n");
    let run = sandbox.run(QUICK.iter().chain(&["--seed", "1", "--", "--fox"])).good();
    assert_eq!(run.text(), "fox-1.png\n");
}

#[test]
fn a_prompt_that_is_too_long_is_cut_where_the_warning_says() {
    let sandbox = Sandbox::with_tiny();
    let words: Vec<String> = (0..400).map(|i| format!("w{i}")).collect();
    let prompt = words.join(" ");
    let run = sandbox.quick(&[&prompt, "--seed", "1", "-o", "a.png"]);
    let warning =
        run.stderr.lines().find(|line| line.starts_with("warning: the prompt is ")).unwrap_or_else(|| panic!("{}", run.stderr));
    let (count, ending) = warning.split_once(" tokens too long; only its first 512 are used, up to `…").unwrap();
    assert!(count.rsplit(' ').next().unwrap().parse::<usize>().unwrap() > 0, "{warning}");
    let ending = ending.strip_suffix('`').unwrap();
    let end = prompt.find(ending).unwrap() + ending.len();
    assert!(ending.contains(' ') && end < prompt.len(), "{warning}");

    // Text after the cut changes nothing, and text before it does.
    let with = |from: usize| format!("{}{}", &prompt[..from], "z".repeat(prompt.len() - from));
    sandbox.quick(&[&with(end + 8), "--seed", "1", "-o", "b.png"]);
    sandbox.quick(&[&with(end - 4), "--seed", "1", "-o", "c.png"]);
    let pixels = |name: &str| Png::read(&sandbox.path(name)).pixels;
    assert_eq!(pixels("a.png"), pixels("b.png"));
    assert_ne!(pixels("a.png"), pixels("c.png"));

    assert!(!sandbox.quick(&["x", "-o", "d.png"]).stderr.contains("warning"));
}

#[test]
fn all_layouts_give_the_same_image() {
    let sandbox = Sandbox::new();
    sandbox.tiny("folder", &[]);
    sandbox.tiny("files", &["--layout", "bfl"]);
    sandbox.tiny("half", &["--layout", "bfl", "--dtype", "f16"]);
    let parts = ["--transformer", "files/flux-2-klein-tiny.safetensors", "--text-encoder", "files/qwen.safetensors"];
    let rest = ["--vae", "files/ae.safetensors", "--tokenizer", "files/tokenizer.json"];
    let single = [parts, rest].concat();
    let generate = |flags: &[&str]| {
        let run = sandbox.quick(&[&["x", "--seed", "5", "--force", "-o", "out.png", "--json"], flags].concat());
        (Png::read(&sandbox.path("out.png")).pixels, run.json()[0]["model"].as_str().unwrap().to_owned(), run.stderr)
    };
    let (pixels, _, stderr) = generate(&["--model", "tiny"]);
    assert!(stderr.starts_with("note: the tiny model is random and untrained"), "{stderr}");
    for flags in [&["--model", "folder"], &["--model", "./files"], &["--model", "half"], &single[..]] {
        let (same, model, stderr) = generate(flags);
        assert_eq!(same, pixels, "{flags:?}");
        assert_eq!(model, "FLUX.2 [klein] tiny (distilled)");
        assert!(!stderr.contains("random"), "{stderr}");
    }

    // KILN_MODEL names a model, too.
    let mut command = sandbox.command(["x", "--seed", "5", "--json", "-o", "env.png"].iter().chain(&QUICK));
    command.env("KILN_MODEL", sandbox.path("folder"));
    assert_eq!(Run::of(command).good().json()[0]["model"], "FLUX.2 [klein] tiny (distilled)");
    assert_eq!(Png::read(&sandbox.path("env.png")).pixels, pixels);

    // A folder that is not empty is not written to.
    let run = sandbox.run(["tiny", "folder"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(5), "error: cannot write (folder): the folder is not empty\n"));
}

#[test]
fn guidance_belongs_to_base_models() {
    let sandbox = Sandbox::new();
    let base = sandbox.quick(&["x", "--variant", "base", "--guidance", "3.5", "--seed", "1", "-o", "base.png", "--json", "-v"]);
    assert_eq!((&base.json()[0]["guidance"], &base.json()[0]["variant"]), (&Value::from(3.5), &Value::from("base")));
    assert_eq!(Png::read(&sandbox.path("base.png")).text["guidance"], "3.5");
    let noise = "noise-kind torch-cuda, noise-sms 132";
    for detail in ["variant base, guidance 3.5, precision f32", "backend cpu, ", noise, "\nformats all bf16\n", "TFLOP"] {
        assert!(base.stderr.contains(detail), "{}", base.stderr);
    }
    assert!(!base.stderr.contains("warning"), "{}", base.stderr);

    let run = sandbox.quick(&["x", "--guidance", "3.5", "--seed", "1", "-o", "distilled.png"]);
    assert!(run.stderr.contains("warning: --guidance is ignored: this is a distilled model"), "{}", run.stderr);
    assert!(!Png::read(&sandbox.path("distilled.png")).text.contains_key("guidance"));
}

/// Two shards of a safetensors file and the index that names them.
fn shards(file: &[u8], stem: &str) -> [(String, Vec<u8>); 3] {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap().tensors();
    let (mut halves, mut map) = ([Vec::new(), Vec::new()], BTreeMap::new());
    for (i, (name, view)) in tensors.into_iter().enumerate() {
        map.insert(name.clone(), format!("{stem}-0000{}-of-00002.safetensors", i % 2 + 1));
        halves[i % 2].push((name, view));
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string().into_bytes();
    let [first, second] = halves.map(|half| safetensors::serialize(half, None).unwrap());
    [
        (format!("{stem}-00001-of-00002.safetensors"), first),
        (format!("{stem}-00002-of-00002.safetensors"), second),
        (format!("{stem}.safetensors.index.json"), index),
    ]
}

#[test]
fn the_files_in_use_are_listed() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let single = sandbox.path("model/transformer/diffusion_pytorch_model.safetensors");
    let whole = fs::read(&single).unwrap();
    let plain = sandbox.quick(&["x", "--seed", "1", "-o", "plain.png", "--model", "model", "-v"]);
    let lines = |third: &str| {
        let rest = ["text encoder model/text_encoder/model.safetensors", "vae model/vae/diffusion_pytorch_model.safetensors"];
        [third.to_owned(), rest[0].into(), rest[1].into()]
    };
    let first = "transformer model/transformer/diffusion_pytorch_model.safetensors";
    assert!(plain.stderr.contains(&lines(first).join("\n")), "{}", plain.stderr);

    // Shards of these weights, with an unrelated file in the same folder.
    fs::remove_file(&single).unwrap();
    for (name, bytes) in shards(&whole, "diffusion_pytorch_model") {
        fs::write(sandbox.path(&format!("model/transformer/{name}")), bytes).unwrap();
    }
    fs::write(sandbox.path("model/transformer/an_adapter.safetensors"), "").unwrap();
    let run = sandbox.quick(&["x", "--seed", "1", "-o", "sharded.png", "--model", "model", "-v"]);
    let lines = lines("transformer 2 shards of model/transformer");
    assert!(run.stderr.contains(&lines.join("\n")), "{}", run.stderr);
    let pixels = |name: &str| Png::read(&sandbox.path(name)).pixels;
    assert_eq!(pixels("plain.png"), pixels("sharded.png"));

    // `kiln doctor` opens the files, names the model, and reports what is wrong.
    let doctor = |args: &[&str]| sandbox.run([&["doctor"], args].concat()).good().text().to_owned();
    let indented: Vec<String> = lines.iter().map(|line| format!("          {line}\n")).collect();
    let found = format!(
        "model     FLUX.2 [klein] tiny (distilled), distilled, model\n{}formats   all bf16 on the CPU\n",
        indented.concat()
    );
    assert!(doctor(&["--model", "model"]).contains(&found), "{}", doctor(&["--model", "model"]));
    fs::write(sandbox.path("model/vae/diffusion_pytorch_model.safetensors"), "no weights at all").unwrap();
    let run = sandbox.run(["doctor", "--model", "model"]);
    let text = run.text();
    let wrong = "model     not a safetensors file (model/vae/diffusion_pytorch_model.safetensors): it is text\n          use a";
    assert!(text.contains(wrong), "{text}");
    assert!(!text.contains("--backend"), "it has no such flag: {text}");
    // It is an error if the model was named, and not if it was found.
    assert!(run.code == Some(3) && run.stderr.starts_with("error: not a safetensors file ("), "{}", run.stderr);
    let mut found = sandbox.command(["doctor"]);
    found.env("KILN_MODEL", "model");
    assert!(Run::of(found).good().text().contains(wrong));
}

#[test]
fn the_doctor_says_what_a_user_needs_and_with_verbose_every_kernel() {
    let sandbox = Sandbox::new();
    let doctor = |flag: &[&str]| sandbox.run([&["doctor", "--model", "tiny"], flag].concat()).good().text().to_owned();
    let (short, all) = (doctor(&[]), doctor(&["-v"]));
    let heading = "\nop                    kernels\n";
    let names: Vec<&str> = short.lines().filter_map(|line| line.split("  ").next()).filter(|name| !name.is_empty()).collect();
    assert_eq!(names, ["kiln", "kernels", "cpu", "driver", "model", "speed"], "{short}");
    assert!(short.contains("\nspeed     minutes for an image of a FLUX.2 model on the CPU, seconds with `builtin`"), "{short}");
    assert!(!short.contains("kl_") && !short.contains(heading), "{short}");
    let (about, symbols) = all.split_once(heading).expect(&all);
    assert_eq!(about, short.trim_end_matches('\n').to_owned() + "\n");
    let gemm = "\nlinear                kl_gemm_bf16_sm90_256x192 kl_gemm_bf16_sm90_192x192 ";
    assert!(symbols.contains(gemm) && symbols.lines().all(|line| line.contains(" kl_")), "{symbols}");
    assert_eq!(doctor(&["--verbose"]), all);
}

#[test]
fn a_flat_image_is_warned_about() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl", "--dtype", "f32"]);
    // With a last convolution that is almost zero only its bias is left.
    let path = sandbox.path("model/ae.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let range = kiln::internals::checkpoint::Shard::open(&path).unwrap().entry("decoder.conv_out.weight").unwrap().range.clone();
    bytes[range].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&1e-9f32.to_le_bytes()));
    fs::write(&path, bytes).unwrap();
    let run = sandbox.quick(&["x", "-o", "flat.png", "--model", "model"]);
    assert!(run.stderr.contains("\nwarning: the image is one flat color ("), "{}", run.stderr);
    assert!(Png::read(&sandbox.path("flat.png")).pixels.chunks(3).all(|pixel| pixel.iter().all(|v| v.abs_diff(pixel[0]) < 64)));
    assert!(!sandbox.quick(&["x", "-o", "noise.png"]).stderr.contains("flat"));
}

#[test]
fn a_plan_is_about_the_files_and_flags_that_are_given() {
    let sandbox = Sandbox::with_tiny();
    sandbox.tiny("single", &["--dtype", "f32"]);
    sandbox.tiny("half", &[]);
    let plan = |args: &[&str]| sandbox.run([&["plan"], args].concat()).good();
    let weights = |args: &[&str]| plan(&[args, &["--json"]].concat()).json()[0]["weight_bytes"].as_u64().unwrap();
    // In f32 weights keep the width of the file, except for filters that are added up after an upsampling.
    let [wide, narrow] = ["single", "half"].map(|model| weights(&["--model", model, "--precision", "f32"]));
    assert!(wide > 2 * narrow - narrow / 25 && wide <= 2 * narrow, "{wide} {narrow}");
    assert_eq!(weights(&["--model", "single"]), weights(&["--model", "half"]));

    // Formats are named by kind of layer, as the files store them and as a GPU holds them.
    for (args, line, names) in [
        ("--model half", "bf16", ["bf16"; 3]),
        ("--model half --precision f32", "bf16", ["bf16", "bf16", "f32"]),
        ("--model single", "f32 rounded to bf16", ["f32", "bf16", "bf16"]),
        ("--model single --precision f32", "f32", ["f32"; 3]),
        ("--model klein-4b", "bf16", ["bf16"; 3]),
    ] {
        let args: Vec<&str> = args.split(' ').collect();
        let text = plan(&args).text().to_owned();
        assert!(text.contains(&format!("\nformats              all {line}\n")), "{text}");
        let json = plan(&[&args[..], &["--json"]].concat()).json().remove(0);
        let formats = json["formats"].as_array().unwrap();
        let kinds: Vec<&str> = formats.iter().map(|row| row["kind"].as_str().unwrap()).collect();
        assert_eq!((formats.len(), kinds[0], kinds[14]), (15, "double blocks qkv", "down"), "{json}");
        let named = |row: &Value| [&row["stored"][0], &row["held"][0], &row["input"]].map(|v| v.as_str().unwrap().to_owned());
        assert!(formats.iter().all(|row| named(row) == names), "{json}");
        let held: u64 = formats.iter().map(|row| row["held_bytes"].as_u64().unwrap()).sum();
        assert!(held < json["weight_bytes"].as_u64().unwrap(), "{json}");
    }
    // The token embeddings are counted apart, because they stay in host memory.
    let table = plan(&["--model", "klein-4b"]).text().to_owned();
    assert!(table.ends_with("\ntoken embeddings     0.72 GiB, in host memory\n"), "{table}");

    for (scale, passes) in [
        ("4", "guidance             4, two passes per step\n"),
        ("1", "guidance             1, one pass per step; a second one needs a scale above 1\n"),
        ("0.5", "guidance             0.5, one pass per step; a second one needs a scale above 1\n"),
    ] {
        let run = plan(&["--variant", "base", "--guidance", scale]);
        assert!(run.text().contains(passes) && run.stderr.is_empty(), "{}{}", run.text(), run.stderr);
    }
    for variant in ["distilled", "kv"] {
        let run = plan(&["--variant", variant, "--guidance", "4"]);
        let told = format!("warning: --guidance is ignored: this is a {variant} model, only base models and dev take it\n");
        assert_eq!((run.stderr.as_str(), run.text().contains("guidance")), (told.as_str(), false));
    }
}

/// Refusals that are not in the table of `tests/cli/bad_input`: arguments, exit code, beginning of the first line, hint.
#[test]
fn refusals() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &["--layout", "bfl"]);
    let vae = fs::read(sandbox.path("model/ae.safetensors")).unwrap();
    fs::write(sandbox.path("renamed.safetensors"), renamed(&vae, "decoder.conv_out.bias", "decoder.conv_out.bibs")).unwrap();
    fs::write(sandbox.path("there.png"), "mine").unwrap();
    fs::write(sandbox.path("latin.txt"), b"a caf\xe9 by the sea").unwrap();
    sandbox.quick(&["x", "-o", "there-2.png", "--dump", "noise.safetensors"]);
    let before = sandbox.names();

    for (args, code, first, hint) in [
        ("x -o new.png --dump ./new.png", 2, "the image and --dump would be the same file", "give one of them another name"),
        ("x --variant turbo", 2, "invalid value 'turbo' for '--variant <KIND>'", "-"),
        ("x --nvfp4-layout turbo", 2, "invalid value 'turbo' for '--nvfp4-layout <ORDER>'", "-"),
        ("x --attention turbo", 2, "invalid value 'turbo' for '--attention <TYPE>'", "-"),
        ("x --fp8-accumulate turbo", 2, "invalid value 'turbo' for '--fp8-accumulate <HOW>'", "-"),
        ("x --quantize int8", 2, "invalid value 'int8' for '--quantize <FORMAT>'", "-"),
        ("plan --gpu turbo", 2, "invalid value 'turbo' for '--gpu <NAME>': expected one of RTX 3090", "-"),
        ("doctor --gpu H100", 2, "invalid value 'H100' for '--gpu <NAME>'", "-"),
        ("selftest --device -1", 2, "invalid value '-1' for '--device <N>'", "-"),
        ("x --nvfp4-math turbo", 2, "invalid value 'turbo' for '--nvfp4-math <TYPE>'", "-"),
        ("x --attention fp8", 2, "FP8 attention is impossible: the inputs of `double_blocks.0` are not", "leave out --attention"),
        (
            "plan --gpu H200 --model klein-4b --attention fp8",
            2,
            "FP8 attention is impossible: the inputs of `double_b",
            "leave out --attention",
        ),
        ("x --backend gpu", 2, "invalid value 'gpu' for '--backend <WHERE>'", "-"),
        ("x --device -1", 2, "invalid value '-1' for '--device <N>'", "-"),
        ("x --no-such-flag", 2, "unexpected argument '--no-such-flag' found", "-"),
        ("a red fox", 2, "there is more than one prompt: `a` and `red`", "put the whole prompt in quotes"),
        ("x -q -v", 2, "the argument '--quiet' cannot be used with '--verbose'", "-"),
        ("x --noise noise.safetensors --noise-kind torch-cpu", 2, "the argument '--noise <FILE>' cannot be used with", "-"),
        ("x --noise noise.safetensors --seed 3", 2, "the argument '--noise <FILE>' cannot be used with '--seed <N>'", "-"),
        ("x --noise-kind torch-cpu --noise-sms 8", 2, "--noise-sms describes a GPU", "leave out --noise-sms"),
        ("x --count 2 --noise noise.safetensors", 2, "--noise is about one image, --count 2", "leave out --count, or --noise"),
        ("x --count 2 --dump new.safetensors", 2, "--dump is about one image, --count 2", "leave out --count, or --dump"),
        ("--seed 1", 2, "there is no prompt", "give one in quotes, or --prompt-file FILE; `kiln --help` has examples"),
        ("x --prompt-file latin.txt", 2, "there are two prompts", "give PROMPT or --prompt-file, not both"),
        ("x --model tiny --vae model/ae.safetensors", 2, "the model `tiny` has no parts to replace", "name a model folder"),
        (
            "x --model model --vae renamed.safetensors",
            3,
            "missing tensor (renamed.safetensors): `decoder.conv_out.bias`, this model needs it as [3]",
            "this file is incomplete or belongs to another model",
        ),
        (
            "x --noise noise.safetensors",
            3,
            "wrong noise (noise.safetensors): tensor `noise` is [16, 128], an image of this size needs [256, 128]",
            "use the --width and --height it was made for",
        ),
        ("x --noise model/ae.safetensors", 3, "wrong noise (model/ae.safetensors): there is no tensor `noise`", ""),
        ("tiny there.png", 5, "cannot write (there.png): ", ""),
    ] {
        let run = sandbox.run(args.split(' '));
        let context = format!("kiln {args}\n{}", run.stderr);
        let lines: Vec<&str> = run.stderr.lines().skip_while(|line| line.starts_with("note:")).collect();
        assert_eq!(run.code, Some(code), "{context}");
        assert!(run.stdout.is_empty(), "{context}");
        assert!(lines[0].strip_prefix("error: ").is_some_and(|line| line.starts_with(first)), "{context}");
        match hint {
            // Errors of clap have a form of their own.
            "-" => assert!(run.stderr.ends_with("try '--help'.\n"), "{context}"),
            "" => assert!(lines.len() == 1 || lines[2].starts_with("hint: "), "{context}"),
            hint => {
                assert_eq!((lines.len(), lines[1]), (3, ""), "{context}");
                assert!(lines[2].strip_prefix("hint: ").is_some_and(|line| line.starts_with(hint)), "{context}");
            }
        }
        assert!(!run.stderr.contains("panicked") && !run.stderr.contains("backtrace"), "{context}");
        assert_eq!(sandbox.names(), before, "nothing is written: {context}");
    }
    assert_eq!(fs::read(sandbox.path("there.png")).unwrap(), b"mine");
}

/// A file in which a tensor has another name of the same length.
fn renamed(file: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = file.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    let mut file = file.to_vec();
    file[at..at + to.len()].copy_from_slice(to.as_bytes());
    file
}

#[test]
fn help_teaches_every_flag() {
    let sandbox = Sandbox::new();
    for args in [&["--help"][..], &["generate", "--help"], &["help", "generate"]] {
        let run = sandbox.run(args).good();
        assert!(run.stderr.is_empty());
        let flags = "prompt-file output model transformer vae text-encoder tokenizer variant nvfp4-layout width height steps guidance seed \
                     count noise-kind noise-sms noise-threads noise dump backend precision quantize attention fp8-accumulate nvfp4-math vae-tiling \
                     threads force quiet verbose json help";
        for flag in flags.split(' ') {
            assert!(run.text().contains(&format!("--{flag}")), "{args:?} does not mention --{flag}");
        }
        for word in ["Examples:", "Input:", "Model:", "Output:", "Sampling:", "Run:", "KILN_MODEL", "-o, ", "-q, ", "-v, "] {
            assert!(run.text().contains(word), "{args:?} does not mention {word}");
        }
    }
    assert_eq!(sandbox.run(["--version"]).good().text(), concat!("kiln ", env!("CARGO_PKG_VERSION"), "\n"));
    let run = sandbox.run::<&str>([]);
    assert_eq!((run.code, run.text()), (Some(2), ""));
    assert!(run.stderr.contains("Usage: kiln [OPTIONS] [PROMPT]"), "{}", run.stderr);
    // Usage lines of errors do not show optional flags as if they were required.
    for (line, usage) in [
        ("x --no-such-flag", "kiln [OPTIONS] [PROMPT]\n       kiln <COMMAND>"),
        ("x -q -v", "kiln [OPTIONS] [PROMPT]\n       kiln <COMMAND>"),
        ("x --modl y", "kiln [OPTIONS] [PROMPT]\n       kiln <COMMAND>"),
        ("generate x --noise a --noise-kind torch-cpu", "kiln generate [OPTIONS] [PROMPT]"),
        ("plan x", "kiln plan [OPTIONS]"),
        ("bench --quick", "kiln bench [OPTIONS] [PROMPT]"),
        ("bench --kernels --model tiny", "kiln bench [OPTIONS] [PROMPT]"),
        ("doctor --force", "kiln doctor [OPTIONS]"),
        ("selftest --force", "kiln selftest [OPTIONS]"),
        ("tiny", "kiln tiny [OPTIONS] <DIR>"),
    ] {
        let run = sandbox.run(line.split(' '));
        assert_eq!(run.code, Some(2), "{line}");
        let (_, rest) = run.stderr.split_once("\nUsage: ").unwrap_or_else(|| panic!("{line}: {}", run.stderr));
        assert_eq!(rest, format!("{usage}\n\nFor more information, try '--help'.\n"), "{line}");
    }
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn a_reader_that_leaves_is_no_error() {
        let sandbox = Sandbox::new();
        let mut child = sandbox.command(["x", "-q", "-o", "out.png"].iter().chain(&QUICK)).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
        assert_eq!(sandbox.names(), ["out.png"]);
        let mut child = sandbox.command(["--help"]).spawn().unwrap();
        drop(child.stdout.take());
        assert!(child.wait_with_output().unwrap().status.success());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_standard_output_is_an_error() {
        let sandbox = Sandbox::new();
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = sandbox.command(["x", "-q", "-o", "out.png"].iter().chain(&QUICK));
        let run = command.stdout(full.try_clone().unwrap()).output().unwrap();
        assert_eq!(run.status.code(), Some(5));
        let error = "error: cannot write (standard output): ";
        assert!(String::from_utf8(run.stderr).unwrap().starts_with(error));
        // For commands that only print, standard output is the whole result.
        for args in [&["--help"][..], &["-h"], &["--version"], &["help", "bench"]] {
            let run = sandbox.command(args).stdout(full.try_clone().unwrap()).output().unwrap();
            assert_eq!(run.status.code(), Some(5), "{args:?}");
            assert!(String::from_utf8(run.stderr).unwrap().starts_with(error), "{args:?}");
        }
        // Errors about flags go to standard error; if that is full, the exit code is still right.
        assert_eq!(sandbox.command(["--bad"]).stderr(full).output().unwrap().status.code(), Some(2));
    }

    #[test]
    fn arguments_need_not_be_text() {
        let sandbox = Sandbox::new();
        let bytes = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let mut args = vec![bytes(b"x"), bytes(b"-o"), bytes(b"\xff\xfe.png")];
        args.extend(QUICK.map(OsString::from));
        assert_eq!(sandbox.run(&args).good().stdout, b"\xff\xfe.png\n");
        assert_eq!(Png::read(&sandbox.0.join(bytes(b"\xff\xfe.png"))).width, 64);

        // Input files and folders may have such names, too.
        let (folder, image) = (bytes(b"model\xff"), bytes(b"\xfe.jpg"));
        sandbox.run([bytes(b"tiny"), folder.clone()]).good();
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/references/baseline_420.jpg");
        fs::copy(fixture, sandbox.0.join(&image)).unwrap();
        let mut args = vec![bytes(b"x"), bytes(b"-o"), bytes(b"read.png"), bytes(b"--model"), folder];
        args.extend([bytes(b"--reference"), image]);
        args.extend(QUICK.map(OsString::from));
        assert_eq!(sandbox.run(&args).good().text(), "read.png\n");
    }
}
