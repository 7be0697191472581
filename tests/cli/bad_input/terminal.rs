//! Text of files, and their names, in messages: no escape sequence reaches the terminal, no line can be mistaken for one of the
//! program, and long text is cut.

use super::*;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A text that sets the title of a terminal, clears it, begins a line that looks like one of the program, and reverses the
/// direction of writing.
const HOSTILE: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\r\nerror: planted\nhint: planted\u{202e}";

/// The hostile text, repeated, as a JSON string.
fn json(times: usize) -> String {
    serde_json::to_string(&HOSTILE.repeat(times)).unwrap()
}

/// Fails if the output has control characters or very long lines.
fn assert_harmless(what: &str, text: &str) {
    assert!(!text.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'), "{what}: {text:?}");
    for line in text.lines() {
        assert!(line.chars().count() < 10_000, "{what}: a line of {} characters", line.chars().count());
        assert!(!line.starts_with("error: planted") && !line.starts_with("hint: planted"), "{what}: {text:?}");
    }
}

#[test]
fn no_text_of_a_file_reaches_the_terminal_raw() {
    let sandbox = Sandbox::new();
    let long = json(20_000);
    let tensor = |name: &str, dtype: &str, rest: &str| {
        format!("{{{name}:{{\"dtype\":{dtype},\"shape\":[1],\"data_offsets\":[0,4]{rest}}}}}")
    };
    let entry =
        |name: &str| format!("{{\"{name}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}},\"__metadata__\":{{}}}}");
    let short = json(1);
    // Weights with hostile text in every string of a header.
    let headers = [
        tensor(&long, "\"F32\"", ""),
        tensor(&short, "\"F32\"", ""),
        tensor("\"a\"", &long, ""),
        tensor("\"a\"", "\"F32\"", &format!(",{long}:0")),
        tensor("\"a\"", "\"F32\"", &format!(",{short}:[{short}]")),
        format!("{{\"a\":{short}}}"),
        format!("{{\"__metadata__\":{{{short}:0}}}}"),
        format!("{{\"__metadata__\":{short}}}"),
        entry("what\u{9b}ever\u{202e}"),
    ];
    let part = |i: usize| sandbox.path(&format!("header-{i}.safetensors"));
    sandbox.tiny("files", &["--layout", "bfl"]);
    let check = |mut args: Vec<OsString>| {
        let what = format!("kiln {args:?}");
        if args[0] == "x" {
            args.extend(QUICK.map(OsString::from));
            args.push("--force".into());
        }
        let run = sandbox.run(&args);
        assert!(matches!(run.code, Some(0 | 2 | 3 | 5)), "{what}: {:?} {}", run.code, run.stderr);
        assert_harmless(&what, &run.stderr);
        // On success standard output is the unchanged path of the image.
        if args[0] == "doctor" || args[0] == "plan" {
            assert_harmless(&what, run.text());
        }
    };
    let mut lines: Vec<Vec<OsString>> = Vec::new();
    let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
    for (i, header) in headers.iter().enumerate() {
        crafted(&sandbox, &format!("header-{i}.safetensors"), header, 4);
        for command in ["x", "plan", "doctor"] {
            lines.push([words(command), words("--model files --vae"), vec![part(i).into()]].concat());
        }
        lines.push([words("x --model tiny --noise"), vec![part(i).into()]].concat());
    }
    // The other files of a model, one after the other.
    sandbox.tiny("folder", &[]);
    let model = |file: &str, content: &str| {
        let path = sandbox.path(&format!("folder/{file}"));
        let before = fs::read(&path).ok();
        fs::write(&path, content).unwrap();
        ["x", "plan", "doctor"].iter().for_each(|command| check(words(&format!("{command} --model folder"))));
        before.map_or_else(|| fs::remove_file(&path), |before| fs::write(&path, before)).unwrap();
    };
    for content in [
        format!("{{\"model_type\":{long}}}"),
        format!("{{\"model_type\":{short}}}"),
        format!("{{\"hidden_act\":{long}}}"),
        format!("{{\"architectures\":[{short}]}}"),
        format!("{{\"head_dim\":{long}}}"),
        format!("{{\"rope_scaling\":{long}}}"),
        format!("{{{short}"),
        short.clone(),
    ] {
        model("text_encoder/config.json", &content);
        model("transformer/config.json", &content);
        model("vae/config.json", &content);
    }
    for content in [
        format!("{{{long}:0}}"),
        format!("{{{short}:0}}"),
        format!("{{\"name\":{short}}}"),
        format!("{{\"variant\":{long}}}"),
        "{\"name\":\"turned\u{202e}around\"}".into(),
    ] {
        model("kiln.json", &content);
    }
    for content in [
        format!("{{\"version\":{long}}}"),
        format!("{{\"version\":\"1.0\",{short}:{short}}}"),
        format!("{{\"version\":\"1.0\",\"model\":{{\"type\":{long}}}}}"),
        format!(
            "{{\"version\":\"1.0\",\"normalizer\":{{\"type\":{short}}},\"model\":{{\"type\":\"BPE\",\"vocab\":{{}},\"merges\":[]}}}}"
        ),
        format!("{{\"version\":\"1.0\",\"model\":{{\"type\":\"BPE\",\"vocab\":{{{short}:0}},\"merges\":[[{short},{long}]]}}}}"),
        format!("{{\"version\":\"1.0\",\"added_tokens\":[{{\"id\":0,\"content\":{short}}}]}}"),
    ] {
        model("tokenizer/tokenizer.json", &content);
    }
    for content in [
        format!("{{\"weight_map\":{{{short}:{short}}}}}"),
        format!("{{\"weight_map\":{{{long}:\"a.safetensors\"}}}}"),
        format!("{{\"weight_map\":{{\"a\":{}}}}}", serde_json::to_string(&format!("{HOSTILE}.safetensors")).unwrap()),
    ] {
        model("vae/model.safetensors.index.json", &content);
    }
    // Hostile file names.
    let name = |rest: &str| PathBuf::from(OsString::from_vec([HOSTILE.as_bytes(), b"\xff", rest.as_bytes()].concat()));
    fs::copy(sandbox.path("header-1.safetensors"), sandbox.0.join(name(".safetensors"))).unwrap();
    fs::create_dir(sandbox.0.join(name(""))).unwrap();
    fs::write(sandbox.0.join(name(".png")), "text").unwrap();
    for (line, file) in [
        ("x --model", ""),
        ("plan --gpu", ""),
        ("doctor --model", ""),
        ("x --model", "none"),
        ("doctor --model", "none"),
        ("x --model files --transformer", ".safetensors"),
        ("doctor --model files --transformer", ".safetensors"),
        ("x --model files --vae", ""),
        ("x --model files --tokenizer", ".png"),
        ("x --model files --tokenizer", ""),
        ("x --reference", ".png"),
        ("x --reference", "none"),
        ("x --noise", ".png"),
        ("x --prompt-file", "none"),
        ("x -o", ".png"),
        ("x -o", ".jpg"),
        ("x -o", "/out.png"),
        ("x -o new.png --dump", ".png"),
        ("tiny", ""),
        ("tiny", ".png"),
        ("bench --json x --reference", ".png"),
        ("a", "b"),
    ] {
        lines.push([words(line), vec![name(file).into()]].concat());
    }
    // Hostile arguments, as a script may pass them on.
    let hostile = OsString::from(HOSTILE);
    for flag in
        "width height steps guidance seed count noise-kind backend device precision threads variant no-such-flag".split(' ')
    {
        lines.push([words(&format!("x --{flag}")), vec![hostile.clone()]].concat());
        lines.push([words("x"), vec![format!("--{flag}={HOSTILE}").into()]].concat());
    }
    for line in ["plan", "plan --gpu", "doctor", "tiny a", "tiny a --layout", "bench --runs", "help", "x --json=", "generate x"] {
        lines.push([words(line), vec![hostile.clone()]].concat());
    }
    lines.push(vec![format!("--{}", HOSTILE.repeat(1000)).into()]);
    lines.into_iter().for_each(check);
}
