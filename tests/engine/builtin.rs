//! The built-in model: its folder against outputs recorded from diffusers, and the program that embeds it. Also tests other models
//! with a `kiln.json`.

use common::sandbox::Sandbox;
use common::{Goldens, cpu, fixture, relative_l2, run, unit_image};
use kiln::internals::dump::Record;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, Noise, OpenModel, ReferenceInput};
use kiln::internals::sequence::{Grid, PATCH, Pixels};
use kiln::internals::tensor::Precision;
use kiln::locate::{Found, LocateRequest, locate};
use kiln::progress::Silent;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/builtin");

/// The record that `tools/goldens builtin` writes.
#[derive(serde::Deserialize)]
struct Recorded {
    /// The CRC-32 of each weight file.
    weights: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    prompt: String,
    width: usize,
    height: usize,
    steps: usize,
    reference: Option<Disc>,
    bf16_relative_l2: BTreeMap<String, f64>,
    bf16_exact_time_relative_l2: BTreeMap<String, f64>,
}

/// A reference image: a disc on a plain background.
#[derive(serde::Deserialize)]
struct Disc {
    width: usize,
    height: usize,
    cx: i64,
    cy: i64,
    r: i64,
    color: [u8; 3],
    background: [u8; 3],
}

impl Disc {
    fn pixels(&self) -> Vec<u8> {
        let inside = |x: usize, y: usize| (x as i64 - self.cx).pow(2) + (y as i64 - self.cy).pow(2) <= self.r.pow(2);
        let points = (0..self.height).flat_map(|y| (0..self.width).map(move |x| (x, y)));
        points.flat_map(|(x, y)| if inside(x, y) { self.color } else { self.background }).collect()
    }

    fn reference(&self) -> ReferenceInput {
        let pixels = self.pixels().into_iter().map(|v| 2.0 * (f32::from(v) / 255.0) - 1.0).collect::<Vec<f32>>().into();
        ReferenceInput { grid: Grid { width: self.width / PATCH, height: self.height / PATCH }, pixels }
    }
}

fn recorded() -> Recorded {
    serde_json::from_str(&std::fs::read_to_string(fixture("builtin.json")).unwrap()).unwrap()
}

fn folder() -> Found {
    locate(&LocateRequest { model: Some(FOLDER.into()), ..LocateRequest::default() }).unwrap()
}

impl Case {
    fn run(&self, goldens: &Goldens, precision: Precision) -> Record {
        let model = OpenModel::open(&folder(), None).unwrap();
        assert_eq!(model.defaults.steps(model.variant), self.steps);
        let job = Job {
            size: Pixels::new(self.width, self.height).unwrap(),
            references: self.reference.iter().map(Disc::reference).collect(),
            noise: Noise::Given(goldens.f32("noise")),
            record: true,
            ..Job::new(&self.prompt, 0, &model.defaults, model.variant).unwrap()
        };
        let options = LoadOptions { precision, references: self.reference.is_some(), ..LoadOptions::DEFAULT };
        let mut engine = Engine::load(Box::new(cpu()), model, options, &Silent).unwrap();
        run(&mut engine, &job).unwrap().record.unwrap()
    }

    /// The relative error of every recorded tensor, named as in the record.
    fn errors(&self, record: &Record, goldens: &Goldens) -> [(&'static str, f64); 3] {
        let golden = |name: &str| goldens.f32(&format!("{}.{name}", self.name));
        assert_eq!(record.token_ids, goldens.ids(&format!("{}.token_ids", self.name)), "{}", self.name);
        let cols = record.prompt_embeds.len() / record.token_ids.len();
        let embeds: Vec<f32> = record.prompt_embeds.chunks_exact(cols).step_by(8).flatten().copied().collect();
        let want = goldens.image(&format!("{}.image", self.name));
        let image = unit_image(&record.image);
        let rows = image.chunks_exact(3 * self.width).step_by(8);
        let image: Vec<f32> = rows.flat_map(|row| row.chunks_exact(3).step_by(8).flatten().copied()).collect();
        let worst = image.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{} worst pixel: {:.2} of 255", self.name, 255.0 * worst);
        [
            ("prompt_embeds", relative_l2(&embeds, &golden("prompt_embeds"))),
            ("latents", relative_l2(record.latents.last().unwrap(), &golden("latents"))),
            ("image", relative_l2(&image, &want)),
        ]
    }
}

#[test]
fn the_recorded_weights_are_these() {
    for (file, crc) in recorded().weights {
        let mut sum = flate2::Crc::new();
        sum.update(&std::fs::read(Path::new(FOLDER).join(&file)).unwrap());
        assert_eq!(format!("{:08x}", sum.sum()), crc, "{file} changed: run tools/goldens builtin");
    }
}

/// Compares every case in one precision; `allowed` is the limit of a stage's error.
fn compare(precision: Precision, allowed: impl Fn(&Case, &str) -> f64) {
    let goldens = Goldens::named("builtin.safetensors");
    for case in recorded().cases {
        let record = case.run(&goldens, precision);
        for (stage, error) in case.errors(&record, &goldens) {
            let allowed = allowed(&case, stage);
            println!("{} {} {stage}: {error:.2e}, allowed {allowed:.2e}", case.name, precision.name());
            assert!(error <= allowed, "{}: {stage} differ by {error:.2e}, allowed {allowed:.2e}", case.name);
        }
    }
}

#[test]
fn f32_equals_diffusers() {
    compare(Precision::F32, |_, _| 1e-4);
}

#[test]
fn bf16_is_at_least_as_close_as_diffusers_in_bf16() {
    compare(Precision::Bf16, |case, stage| 1.2 * case.bf16_relative_l2[stage].min(case.bf16_exact_time_relative_l2[stage]));
}

/// Runs the real program on the tiny model with other defaults.
#[test]
fn a_models_defaults_are_kept_by_every_command() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let plan = |flags: &[&str]| {
        let args = [&["plan", "--model", "model", "--json"], flags].concat();
        sandbox.bare(args).good().json().remove(0)
    };
    let before = plan(&[]);
    assert_eq!((&before["width"], &before["tokens"]["text"]), (&1024.into(), &512.into()));
    let own = r#"{"name": "mine", "variant": "base", "text_layers": [2, 3, 5], "max_text_tokens": 32, "width": 80, "height": 64,
        "steps": 2, "guidance": 1.5, "max_reference_pixels": 4096}"#;
    std::fs::write(sandbox.path("model/kiln.json"), own).unwrap();
    let image = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/references/rgb.png");

    let after = plan(&["--reference", image, "--width", "80", "--height", "64"]);
    for (key, value) in
        [("model", Value::from("mine")), ("variant", "base".into()), ("steps", 2.into()), ("guidance", 1.5.into())]
    {
        assert_eq!(after[key], value, "{key}");
    }
    // kiln does not load layers after the last one it reads: 22 fewer, each with 344,064 values in matrices and some in norms.
    let weights = |plan: &Value| plan["weight_bytes"].as_u64().unwrap();
    let saved = weights(&before) - weights(&plan(&[]));
    assert!((22 * 688_128..22 * 700_000).contains(&saved), "{saved}");
    let args = ["x", "--model", "model", "--seed", "1", "-o", "a.png", "--json", "--dump", "a.safetensors"];
    let run = sandbox.bare(args.iter().chain(&["--reference", image, "--width", "80", "--height", "64"])).good();
    let made = &run.json()[0];
    for key in ["model", "variant", "width", "height", "steps", "guidance"] {
        assert_eq!(made[key], after[key], "{key}");
    }
    let bytes = std::fs::read(sandbox.path("a.safetensors")).unwrap();
    let dump = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let shape = |name: &str| dump.tensor(name).unwrap().shape().to_vec();
    assert_eq!((shape("prompt_embeds"), shape("token_ids")), (vec![32, 384], vec![32]));
    let tokens = after["tokens"]["references"][0].as_u64().unwrap();
    assert_eq!(shape("reference.1.tokens"), [tokens as usize, 128]);
    assert!(tokens == 12, "{tokens}");
    // Without a reference `kiln.json` sets the size, and flags take precedence over it.
    assert_eq!((&plan(&[])["width"], &plan(&[])["height"]), (&80.into(), &64.into()));
    assert_eq!(plan(&["--height", "96", "--steps", "3"])["steps"], 3);

    std::fs::write(sandbox.path("model/kiln.json"), own.replace("steps", "stepz")).unwrap();
    for command in [&["x"][..], &["plan"], &["bench"]] {
        let run = sandbox.bare([command, &["--model", "model"]].concat());
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert_eq!((run.code, lines[0]), (Some(3), "error: invalid configuration (model/kiln.json): unknown key `stepz`"));
        assert!(lines[2].starts_with("hint: kiln.json may say name, variant, text_layers, "), "{}", run.stderr);
    }
}

/// The quoted strings of a text that do not span lines.
fn quoted(text: &str) -> Vec<String> {
    let odd = text.split('"').skip(1).step_by(2);
    odd.map(|quote| quote.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// The words of a prompt that the model's folder does not list.
fn unknown(prompt: &str) -> Vec<&str> {
    let words = folder().defaults().unwrap().words.unwrap();
    kiln::internals::words::unknown(prompt, &words)
}

#[test]
fn it_knows_the_words_it_is_scored_with() {
    let file: Value = serde_json::from_str(&std::fs::read_to_string(fixture("builtin/prompts.json")).unwrap()).unwrap();
    let prompts = ["prompts", "edits"].iter().flat_map(|list| file[list].as_array().unwrap());
    let mut count = 0;
    for prompt in prompts.map(|prompt| prompt["text"].as_str().unwrap()) {
        assert!(unknown(prompt).is_empty(), "{prompt}: {:?}", unknown(prompt));
        count += 1;
    }
    assert!(count >= 300, "{count}");
    for case in recorded().cases {
        assert!(unknown(&case.prompt).is_empty(), "{}", case.prompt);
    }
}

#[test]
fn it_knows_the_words_of_its_examples() {
    let page = include_str!("../../docs/builtin-model.md");
    // The captions of the page's images, and the commands that generate some of them.
    let captions = page.lines().filter(|line| line.starts_with("| \"")).flat_map(quoted);
    let commands = page.lines().filter(|line| line.starts_with("    kiln \"") && line.contains(" star "));
    let examples: Vec<String> = captions.chain(commands.map(|line| quoted(line).swap_remove(0))).collect();
    assert!(examples.len() >= 15, "{examples:?}");
    for example in examples {
        assert!(unknown(&example).is_empty(), "{example}: {:?}", unknown(&example));
    }
    // Numbers above three are unknown, and so is every other word that training never used.
    assert_eq!(unknown("Five red stars, a fluffy cat and one blue ring"), ["Five", "stars", "fluffy", "cat"]);
}

/// Runs the program that embeds the model.
#[cfg(feature = "builtin")]
mod program {
    use super::{FOLDER, recorded};
    use common::sandbox::{Png, Run, Sandbox};
    use std::fs;

    const STAR: &str = "a large red star on a blue background";
    /// A small image in one step, which is enough to compare.
    const SMALL: [&str; 8] = ["--width", "64", "--height", "64", "--steps", "1", "--seed", "5"];

    /// Writes the recorded reference at twice its width and height.
    fn reference(sandbox: &Sandbox) {
        let disc = recorded().cases.into_iter().find_map(|case| case.reference).unwrap();
        let (width, height) = (2 * disc.width, 2 * disc.height);
        let small = disc.pixels();
        let at = |x: usize, y: usize| &small[3 * (y / 2 * disc.width + x / 2)..][..3];
        let pixels: Vec<u8> = (0..height).flat_map(|y| (0..width).flat_map(move |x| at(x, y).iter().copied())).collect();
        let image = kiln::image::Image { width, height, pixels };
        fs::write(sandbox.path("disc.png"), image.encode_png(&[]).unwrap()).unwrap();
    }

    #[test]
    fn a_prompt_is_enough() {
        let sandbox = Sandbox::new();
        let run = sandbox.bare([STAR, "--seed", "5"]).good();
        assert_eq!(run.text(), "a-large-red-star-on-a-blue-background-5.png\n");
        let mut lines = run.stderr.lines();
        let note = lines.next().unwrap();
        assert!(note.starts_with("note: no FLUX.2 model was found, so kiln's own small model draws this; "), "{note}");
        assert!(note.ends_with("; for FLUX.2 weights use --model or KILN_MODEL"), "{note}");
        assert!(lines.any(|line| line == "builtin, 256x256, 4 steps, seed 5"), "{}", run.stderr);
        let png = Png::read(&sandbox.path(run.text().trim()));
        assert_eq!((png.width, png.height, png.text["model"].as_str()), (256, 256, "builtin"));
        assert!(!png.text.contains_key("guidance"));
    }

    #[test]
    fn the_program_and_the_folder_give_the_same_bytes() {
        let sandbox = Sandbox::new();
        reference(&sandbox);
        for flags in [&[STAR][..], &["make the circle green", "--reference", "disc.png"]] {
            let generate = |file: &str, model: &[&str]| {
                let args = [flags, &SMALL, &["-o", file, "--force"], model].concat();
                let run = sandbox.bare(&args).good();
                (fs::read(sandbox.path(file)).unwrap(), run.stderr)
            };
            let (found, _) = generate("a.png", &[]);
            let (named, stderr) = generate("b.png", &["--model", "builtin"]);
            let (folder, _) = generate("c.png", &["--model", FOLDER]);
            assert!(found == named && found == folder, "{flags:?}");
            assert!(!stderr.contains("no FLUX.2 model"), "{stderr}");
        }
    }

    #[test]
    fn a_reference_is_brought_to_its_own_size() {
        let sandbox = Sandbox::new();
        reference(&sandbox);
        let flags = ["make the circle green", "--reference", "disc.png", "--steps", "1", "-o", "a.png"];
        sandbox.bare(flags).good();
        let png = Png::read(&sandbox.path("a.png"));
        assert_eq!((png.width, png.height), (256, 256));
    }

    #[test]
    fn words_it_does_not_know_are_named() {
        let sandbox = Sandbox::new();
        let draw = |prompt: &str, flags: &[&str]| {
            let run = sandbox.bare([&[prompt, "-o", "a.png", "--force"], &SMALL[..], flags].concat()).good();
            run.stderr.lines().filter(|line| line.contains("does not know")).map(str::to_owned).collect::<Vec<_>>()
        };
        let draws = "it draws one to three circles, squares, triangles, stars, hearts, rings, crosses or hexagons in twelve colors on \
            plain, gradient or striped backgrounds";
        let note = |words: &str, rest: &str| vec![format!("note: builtin does not know {words}; {draws}{rest}")];
        let help = ", see kiln --help";
        assert_eq!(draw("A fluffy cat.", &[]), note(r#""fluffy", "cat""#, help));
        assert_eq!(draw("five red stars", &["--model", "builtin"]), note(r#""five", "stars""#, help));
        assert_eq!(draw("a fluffy cat", &["--model", FOLDER]), note(r#""fluffy", "cat""#, ""));
        // The note names only the first unknown words, and control characters do not reach the terminal.
        let long = format!("{} b\u{202e}c d e f g", "x".repeat(500));
        let want = format!(r#""{}…", "b", "c", "d", "e" and 2 more"#, "x".repeat(128));
        assert_eq!(draw(&long, &["--model", "builtin"]), note(&want, help));
        for quiet in [&["A large, RED star: on a blue background!", "--model", "builtin"][..], &["a fluffy cat", "-q"], &[""]] {
            assert!(draw(quiet[0], &quiet[1..]).is_empty(), "{quiet:?}");
        }
    }

    #[test]
    fn it_knows_the_words_of_the_help() {
        let help = Sandbox::new().bare(["--help"]).good().text().to_owned();
        let others = |text: &String| ["fox", "cat", "dashes", "tiny"].iter().any(|word| text.split(' ').any(|w| w == *word));
        let examples: Vec<String> = super::quoted(&help).into_iter().filter(|text| !text.is_empty() && !others(text)).collect();
        assert!(examples.len() >= 8, "{examples:?}");
        for example in examples {
            assert!(super::unknown(&example).is_empty(), "{example}: {:?}", super::unknown(&example));
        }
    }

    #[test]
    fn other_sizes_work_and_are_remarked_on() {
        let sandbox = Sandbox::new();
        let flags = ["--width", "96", "--height", "64", "--steps", "1", "--model", "builtin", "-o", "a.png"];
        let run = sandbox.bare([STAR].iter().chain(&flags)).good();
        let note = "note: builtin was trained on 256x256 images; other sizes may look wrong";
        assert!(run.stderr.lines().any(|line| line == note), "{}", run.stderr);
        assert_eq!(Png::read(&sandbox.path("a.png")).width, 96);
    }

    #[test]
    fn prompts_are_cut_at_its_own_length() {
        let sandbox = Sandbox::new();
        let prompt = "a small red star and ".repeat(20);
        let run = sandbox.bare([prompt.as_str(), "-o", "a.png"].iter().chain(&SMALL)).good();
        assert!(run.stderr.contains(" tokens too long; only its first 64 are used, up to `…"), "{}", run.stderr);
    }

    #[test]
    fn every_command_knows_it() {
        let sandbox = Sandbox::new();
        reference(&sandbox);
        let run = sandbox.bare(["plan", "--model", "builtin", "--json", "--reference", "disc.png"]).good();
        let plan = &run.json()[0];
        assert_eq!((&plan["model"], &plan["width"], &plan["height"]), (&"builtin".into(), &256.into(), &256.into()));
        assert_eq!((&plan["steps"], &plan["guidance"]), (&4.into(), &serde_json::Value::Null));
        assert_eq!(plan["tokens"], serde_json::json!({"text": 64, "canvas": 256, "references": [256], "total": 576}));
        assert_eq!(sandbox.bare(["plan", "--model", FOLDER, "--json", "--reference", "disc.png"]).good().text(), run.text());

        let mut command = sandbox.bare_command(["bench", "--runs", "1", "--json", "-q", "--steps", "1"]);
        command.env("KILN_MODEL", "builtin");
        let bench = &Run::of(command).good().json()[0];
        assert_eq!((&bench["model"], &bench["width"], &bench["steps"]), (&"builtin".into(), &256.into(), &1.into()));

        let doctor = |args: &[&str]| sandbox.bare([&["doctor"], args].concat()).good().text().to_owned();
        let line = "model     builtin, part of this program, draws colored shapes";
        assert!(doctor(&[]).lines().any(|l| l == format!("{line}; no FLUX.2 model was found")), "{}", doctor(&[]));
        assert!(doctor(&["--model", "builtin"]).lines().any(|l| l == line));
        let help = sandbox.bare(["--help"]).good().text().to_owned();
        for word in [STAR, "make the star green", "`builtin`", "hexagon"] {
            assert!(help.contains(word), "{word}");
        }
    }

    #[test]
    fn flags_go_before_what_the_model_says() {
        let sandbox = Sandbox::new();
        let flags = ["--model", "builtin", "--variant", "base", "--guidance", "2", "--width", "64", "--height", "64"];
        let run = sandbox.bare([&["x", "--steps", "2", "--json", "-o", "a.png"][..], &flags].concat()).good();
        let made = &run.json()[0];
        assert_eq!((&made["steps"], &made["guidance"], &made["variant"]), (&2.into(), &2.0.into(), &"base".into()));
        // The steps of `kiln.json` apply only to the variant that it names.
        let plan = &sandbox.bare([&["plan", "--json"][..], &flags].concat()).good().json()[0];
        assert_eq!((&plan["steps"], &plan["guidance"]), (&50.into(), &2.0.into()));
    }
}
