//! `kiln run`: every line is answered, in order, with the image that `kiln generate` makes of it, however the run ends.
#![cfg(unix)]

use common::adapter_files::{Factor, PEFT, file, lora};
use common::moments::moment;
use common::random::long;
use common::sandbox::{Png, QUICK, Run, Sandbox, send};
use kiln::internals::tensor::DType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// The tiny model, with prompts of 64 tokens instead of 512, most of which would be padding.
const MODEL: [&str; 2] = ["--model", "model"];

/// A folder with that model.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    fs::write(sandbox.path("model/kiln.json"), "{\"max_text_tokens\": 64}").unwrap();
    sandbox
}

/// Runs lines of a file, with [`QUICK`] flags.
fn run(sandbox: &Sandbox, lines: &str, flags: &[&str]) -> Run {
    fs::write(sandbox.path("lines"), lines).unwrap();
    sandbox.run(["run", "lines"].iter().chain(&QUICK).chain(&MODEL).chain(flags))
}

/// One image of `kiln generate`.
fn generate(sandbox: &Sandbox, flags: &[&str]) -> Run {
    sandbox.quick(&[flags, &MODEL].concat())
}

/// The values of a field of all answers.
fn fields<'a>(answers: &'a [Value], name: &str) -> Vec<&'a Value> {
    answers.iter().map(|answer| &answer[name]).collect()
}

/// A run that another program talks to.
struct Conversation {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Conversation {
    fn start(sandbox: &Sandbox, flags: &[&str]) -> Self {
        let mut command = sandbox.command(["run"].iter().chain(&QUICK).chain(&MODEL).chain(flags));
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    fn ask(&mut self, line: &str) -> Value {
        self.say(line);
        self.answer().unwrap()
    }

    fn say(&mut self, line: &str) {
        self.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn answer(&mut self) -> Option<Value> {
        let mut answer = String::new();
        self.stdout.read_line(&mut answer).unwrap();
        (!answer.is_empty()).then(|| serde_json::from_str(&answer).unwrap())
    }

    /// Closes standard input.
    fn end(mut self) -> Option<i32> {
        self.stdin = None;
        assert_eq!(self.answer(), None);
        self.child.wait().unwrap().code()
    }
}

#[test]
fn lines_are_answered_in_order_and_errors_end_nothing() {
    let sandbox = sandbox();
    fs::create_dir(sandbox.path("out")).unwrap();
    let long = "x".repeat(40_000);
    let lines = [
        "a fox",
        r#"{"prompt": "a fox", "seed": 7, "output": "seven.png"}"#,
        "",
        r#"{"prompt": "a fox", "color": "red"}"#,
        "狐 🦊 \\ \"quoted\"",
        r#"{"prompt": "wide", "size": "96x64", "steps": 2, "output": "wide.webp"}"#,
        r#"{"prompt": "odd", "size": "100x64"}"#,
        r#"{"prompt": "edit", "references": ["missing.png"]}"#,
        "a fox",
        r#"{"prompt": "x", "output": "seven.png"}"#,
        r#"{"prompt": "x", "output": "./seven.png"}"#,
        r#"{"prompt": "x", "output": "no/folder.png"}"#,
        r#"{"prompt": "x", "output": "x.gif"}"#,
        r#"{"prompt": "x", "output": "-"}"#,
        &long,
        "   ",
        "the last, without a newline",
    ];
    let run = run(&sandbox, &lines.join("\n"), &["-o", "out"]);
    let answers = run.json();
    assert_eq!(fields(&answers, "line"), [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17]);
    let codes: Vec<Option<u64>> = answers.iter().map(|answer| answer["code"].as_u64()).collect();
    let no = None;
    let [usage, file, output] = [2, 3, 5].map(Some);
    assert_eq!(codes, [no, no, usage, no, no, usage, file, usage, usage, usage, output, output, usage, usage, no]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.ends_with("error: 10 of 15 lines failed\n"), "{}", run.stderr);
    for answer in answers.iter().filter(|answer| answer["code"].is_u64()) {
        assert!(answer["error"].as_str().is_some_and(|text| !text.is_empty()) && answer.get("hint").is_some(), "{answer}");
        assert_eq!(answer.as_object().unwrap().len(), 4);
    }
    assert!(answers[2]["error"].as_str().unwrap().contains("unknown field `color`"));
    assert!(answers[5]["error"].as_str().unwrap().starts_with("`width` 100, `height` 64: sides must be"), "{}", answers[5]);
    assert_eq!(answers[5]["hint"], "try `width` 96 and `height` 64");
    assert!(answers[7]["error"].as_str().unwrap().starts_with("an earlier line has the same file"));
    let written = fs::read_dir(sandbox.path("out")).unwrap().count();
    assert_eq!(written, 5);
    assert_eq!((answers[1]["path"].as_str(), answers[1]["seed"].as_u64()), (Some("out/seven.png"), Some(7)));
    let wide = [&answers[4]["width"], &answers[4]["height"], &answers[4]["steps"]];
    assert_eq!(wide, [96, 64, 2]);

    // Fields and bytes equal those of `kiln generate`.
    let (answer, seed) = (&answers[3], answers[3]["seed"].to_string());
    let one = generate(&sandbox, &[lines[4], "--seed", &seed, "-o", "one.png", "--json"]);
    let mut fields: Vec<String> = one.json()[0].as_object().unwrap().keys().cloned().collect();
    fields.insert(0, "line".into());
    fields.sort();
    let own: Vec<String> = answer.as_object().unwrap().keys().cloned().collect();
    assert_eq!(own, fields);
    let path = sandbox.path(answer["path"].as_str().unwrap());
    assert!(fs::read(path).unwrap() == fs::read(sandbox.path("one.png")).unwrap());
    assert_eq!(Png::read(&sandbox.path(answers[3]["path"].as_str().unwrap())).text["prompt"], lines[4]);
}

#[test]
fn references_belong_to_their_line() {
    let sandbox = sandbox();
    generate(&sandbox, &["a fox", "--seed", "1", "-o", "reference.png"]);
    let lines = "{\"prompt\": \"edit\", \"references\": [\"reference.png\"], \"seed\": 3}\nplain\n";
    let answers = run(&sandbox, lines, &[]).good().json();
    generate(&sandbox, &["edit", "--seed", "3", "--reference", "reference.png", "-o", "edit.png"]);
    let seed = answers[1]["seed"].to_string();
    generate(&sandbox, &["plain", "--seed", &seed, "-o", "plain.png"]);
    for (answer, name) in answers.iter().zip(["edit.png", "plain.png"]) {
        let path = sandbox.path(answer["path"].as_str().unwrap());
        assert!(fs::read(path).unwrap() == fs::read(sandbox.path(name)).unwrap(), "{name}");
    }
}

#[test]
fn existing_files_are_kept_skipped_or_replaced() {
    let sandbox = sandbox();
    let lines = "{\"prompt\": \"a\", \"output\": \"a.png\"}\nb\n";
    let first = run(&sandbox, lines, &[]).good().json();
    let mine = fs::read(sandbox.path(first[1]["path"].as_str().unwrap())).unwrap();
    fs::write(sandbox.path("a.png"), &mine).unwrap();
    let again = run(&sandbox, lines, &[]);
    assert_eq!((again.code, fields(&again.json(), "code")), (Some(1), vec![&json!(5), &json!(5)]));
    assert!(again.json()[0]["hint"].as_str().unwrap().contains("--force"));
    assert!(again.json()[0]["hint"].as_str().unwrap().contains("`output`"));
    // A field without effect is named as one.
    let warned = run(&sandbox, "{\"prompt\": \"c\", \"guidance\": 3}\n", &["--force"]).good();
    assert!(warned.stderr.contains("line 1: warning: `guidance` is ignored: "), "{}", warned.stderr);
    let skipped = run(&sandbox, lines, &["--skip-existing"]).good().json();
    let [skip_a, skip_b] =
        [0, 1].map(|i| json!({"line": i + 1, "path": first[i]["path"], "seed": first[i]["seed"], "skipped": true}));
    assert_eq!(skipped, [skip_a, skip_b]);
    assert!(fs::read(sandbox.path("a.png")).unwrap() == mine);
    let replaced = run(&sandbox, lines, &["--force"]).good().json();
    assert_eq!(fields(&replaced, "seed"), fields(&first, "seed"));
    assert!(fs::read(sandbox.path("a.png")).unwrap() != mine);
    // A name identifies everything that decides the image.
    let other = run(&sandbox, "{\"prompt\": \"b\", \"steps\": 2}\n", &["--skip-existing"]).good().json();
    assert!(other[0]["skipped"].is_null() && other[0]["path"] != first[1]["path"], "{other:?}");
    // The folder is created, but not by a command that is refused.
    assert_eq!(run(&sandbox, lines, &["-o", "new/folder", "--quality", "90"]).code, Some(2));
    assert!(!sandbox.path("new").exists());
    run(&sandbox, lines, &["-o", "new/folder"]).good();
    assert!(sandbox.path("new/folder/a.png").is_file());
}

/// Whatever decides an image is part of its name: an image of another model, or of another adapter or reference under the same name,
/// is not taken for the one that is asked for.
#[test]
fn an_image_of_other_files_is_not_skipped() {
    let sandbox = sandbox();
    let same = |run: Run| run.good().json()[0]["skipped"] == true;
    sandbox.write_png("r.png", 64, 64, |x, y| [x as u8, y as u8, 0]);
    let lines = r#"{"prompt": "a", "references": ["r.png"], "lora": ["l.safetensors"]}"#;
    let adapter = |scale: f32| {
        let layer = lora("diffusion_model.double_blocks.0.img_attn.qkv", PEFT, [768, 256], 1);
        let tensors: Vec<Factor> = layer.into_iter().map(|factor| factor.times(scale)).collect();
        fs::write(sandbox.path("l.safetensors"), file(&tensors, DType::F32, &[])).unwrap();
    };
    adapter(0.5);
    let again = || run(&sandbox, lines, &["--skip-existing"]);
    let first = again().good().json();
    assert!(same(again()));
    sandbox.write_png("r.png", 64, 64, |x, y| [x as u8, y as u8, 1]);
    assert!(!same(again()), "another reference");
    adapter(0.25);
    assert!(!same(again()), "another adapter");
    let weights = sandbox.path("model/transformer/diffusion_pytorch_model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 0x80;
    fs::write(&weights, bytes).unwrap();
    let other = again().good().json();
    assert!(other[0]["skipped"].is_null(), "another model");
    // The seed follows from the line alone, so that models can be compared.
    assert_eq!(other[0]["seed"], first[0]["seed"]);
    // The folder of the model does not matter.
    fs::rename(sandbox.path("model"), sandbox.path("elsewhere")).unwrap();
    let args = ["run", "lines", "--skip-existing", "--model", "elsewhere"];
    assert!(same(sandbox.run(args.iter().chain(&QUICK))));
}

/// Two runs of the same lines in one folder: each file is written once, and nothing fails.
#[test]
fn two_runs_share_a_folder() {
    let sandbox = sandbox();
    let lines: String = (0..6).map(|i| format!("prompt number {i}\n")).collect();
    fs::write(sandbox.path("lines"), lines).unwrap();
    let args = || ["run", "lines", "--skip-existing", "--threads", "1"].into_iter().chain(QUICK).chain(MODEL);
    let other = sandbox.command(args()).spawn().unwrap();
    let one = sandbox.run(args()).good().json();
    let other = other.wait_with_output().unwrap();
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stderr));
    let other = Run { code: Some(0), stdout: other.stdout, stderr: String::new() }.json();
    assert_eq!(fields(&one, "path"), fields(&other, "path"));
    for (one, other) in one.iter().zip(&other) {
        assert!(one["skipped"].is_null() != other["skipped"].is_null(), "one has written it: {one} {other}");
    }
    assert_eq!(images(&sandbox).len(), 6);
}

/// What is no complete image is not taken for one, and not replaced.
#[test]
fn only_complete_images_are_skipped() {
    let sandbox = sandbox();
    let line = |name: &str| format!("{{\"prompt\": \"a\", \"output\": \"{name}\"}}\n");
    let names = ["whole.png", "cut.png", "named.jpg", "empty.webp", "folder.png", "link.png", "dangling.png", "pipe.png"];
    run(&sandbox, &line("whole.png"), &[]).good();
    let bytes = fs::read(sandbox.path("whole.png")).unwrap();
    fs::write(sandbox.path("cut.png"), &bytes[..bytes.len() - 1]).unwrap();
    fs::write(sandbox.path("named.jpg"), &bytes).unwrap();
    fs::write(sandbox.path("empty.webp"), "").unwrap();
    fs::create_dir(sandbox.path("folder.png")).unwrap();
    std::os::unix::fs::symlink("whole.png", sandbox.path("link.png")).unwrap();
    std::os::unix::fs::symlink("nothing", sandbox.path("dangling.png")).unwrap();
    assert!(Command::new("mkfifo").arg(sandbox.path("pipe.png")).status().unwrap().success());
    let answers = run(&sandbox, &names.map(line).concat(), &["--skip-existing"]).json();
    let told = |i: usize| answers[i]["error"].as_str().unwrap_or("skipped");
    let in_the_way = |name, format| {
        format!("cannot write ({name}): it exists and is not a complete {format} file; remove it to generate the image")
    };
    assert_eq!((told(0), told(5)), ("skipped", "skipped"));
    assert_eq!(told(1), in_the_way("cut.png", "PNG"));
    assert_eq!(told(2), in_the_way("named.jpg", "JPEG"));
    assert_eq!(told(3), in_the_way("empty.webp", "WebP"));
    assert_eq!(told(4), "cannot write (folder.png): this is a folder");
    assert!(told(6).contains("this is a symbolic link") && told(7).ends_with("this is not a regular file"), "{answers:?}");
    assert!(fields(&answers, "code").iter().all(|code| code.is_null() || **code == 5), "{answers:?}");
}

/// The images of a folder by name.
fn images(sandbox: &Sandbox) -> BTreeMap<String, Vec<u8>> {
    let names = sandbox.names().into_iter().filter(|name| name.ends_with(".png"));
    names.map(|name| (name.clone(), fs::read(sandbox.path(&name)).unwrap())).collect()
}

/// Killed at any moment, a run is continued by the same command: no image is missing, made twice or half written.
#[test]
fn a_killed_run_is_continued() {
    let lines: String = (0..6).map(|i| format!("prompt number {i}\n")).collect();
    let whole = sandbox();
    run(&whole, &lines, &["--threads", "1"]).good();
    let right = images(&whole);
    assert_eq!(right.len(), 6);
    let sandbox = sandbox();
    fs::write(sandbox.path("lines"), &lines).unwrap();
    let args = || ["run", "lines", "--skip-existing", "--threads", "1"].into_iter().chain(QUICK).chain(MODEL);
    let mut times = BTreeMap::new();
    for round in 0..4 {
        let mut child = sandbox.command(args()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(moment(round, Duration::from_millis(900)));
        child.kill().unwrap();
        child.wait().unwrap();
        for (name, bytes) in images(&sandbox) {
            assert!(right[&name] == bytes, "{name}");
            // Existing files are not written again.
            let written = fs::metadata(sandbox.path(&name)).unwrap().modified().unwrap();
            assert_eq!(*times.entry(name).or_insert(written), written);
        }
    }
    let before = images(&sandbox).len();
    let answers = sandbox.run(args()).good().json();
    assert_eq!(answers.iter().filter(|answer| answer["skipped"] == true).count(), before);
    assert!(answers.len() == 6 && images(&sandbox) == right);
}

/// Each answer comes before the next line is known, and standard input that closes ends the run.
#[test]
fn a_program_can_talk_to_it() {
    let sandbox = sandbox();
    let mut talk = Conversation::start(&sandbox, &[]);
    for number in 1..=3 {
        let answer = talk.ask(&format!("{{\"prompt\": \"x\", \"seed\": {number}}}"));
        assert_eq!((&answer["line"], &answer["seed"]), (&json!(number), &json!(number)));
        assert!(sandbox.path(answer["path"].as_str().unwrap()).is_file());
    }
    assert_eq!(talk.ask("{")["code"], 2);
    assert_eq!(talk.end(), Some(1));
    let mut talk = Conversation::start(&sandbox, &[]);
    talk.ask("fine");
    assert_eq!(talk.end(), Some(0));
    // No line at all.
    assert_eq!(Conversation::start(&sandbox, &[]).end(), Some(0));
}

#[test]
fn signals_end_it() {
    let sandbox = sandbox();
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut talk = Conversation::start(&sandbox, &["--force"]);
        talk.ask("x");
        // While it waits for a line, which never comes.
        send(signal, &talk.child);
        assert_eq!(talk.child.wait().unwrap().code(), Some(code));
        // While it works; what it has answered is there, and nothing else.
        let mut talk = Conversation::start(&sandbox, &["--force"]);
        (0..500).for_each(|i| talk.say(&format!("{signal} {i}")));
        let mut answered = vec![talk.answer().unwrap()];
        send(signal, &talk.child);
        answered.extend(std::iter::from_fn(|| talk.answer()));
        assert_eq!(talk.child.wait().unwrap().code(), Some(code));
        let prefix = format!("{}-", signal.trim_start_matches('-').to_lowercase());
        let written = images(&sandbox).into_keys().filter(|name| name.starts_with(&prefix)).count();
        assert!(answered.len() < 500 && written <= answered.len() + 1, "{} of {written}", answered.len());
        assert!(answered.iter().all(|answer| answer["error"].is_null()), "{answered:?}");
    }
}

/// The files are the result, so a reader that leaves, such as `head -1`, ends neither `kiln run` nor `kiln generate`. Lines that fail are
/// still told by the exit code.
#[test]
fn a_reader_that_leaves_ends_nothing() {
    let sandbox = sandbox();
    let count = |prefix: &str| images(&sandbox).into_keys().filter(|name| name.starts_with(prefix)).count();
    for (last, code) in [("leaving 5", 0), ("{", 1)] {
        let Conversation { mut child, stdin, mut stdout } = Conversation::start(&sandbox, &["--force"]);
        let mut stdin = stdin.unwrap();
        stdin.write_all("leaving 1\n".as_bytes()).unwrap();
        stdout.read_line(&mut String::new()).unwrap();
        drop(stdout);
        stdin.write_all(format!("leaving 2\nleaving 3\nleaving 4\n{last}\n").as_bytes()).unwrap();
        drop(stdin);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert_eq!(count("leaving-"), 5);
    }
    let mut child = sandbox.command(["many", "--count", "4", "--seed", "1"].iter().chain(&QUICK).chain(&MODEL)).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    drop(stdout);
    assert_eq!((child.wait().unwrap().code(), count("many-")), (Some(0), 4));
}

/// Bytes of memory that a process uses, without mapped files.
#[cfg(target_os = "linux")]
fn resident(child: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_lines() {
    let sandbox = sandbox();
    let mut talk = Conversation::start(&sandbox, &["--threads", "2"]);
    let ask = |talk: &mut Conversation, range: std::ops::Range<usize>| {
        range.for_each(|i| assert_eq!(talk.ask(&format!("prompt {i}"))["line"], i + 1));
        resident(&talk.child)
    };
    let (few, many) = if long() { (40, 240) } else { (15, 30) };
    // The first lines fill the buffers that stay.
    let early = ask(&mut talk, 0..few);
    let late = ask(&mut talk, few..many);
    assert_eq!(talk.end(), Some(0));
    assert!(late < early + (4 << 20), "{early} bytes after {few} lines, {late} after {many}");
}
