//! `kiln show`: what files say, and images on a terminal.
#![cfg(unix)]

use common::sandbox::{Png, QUICK, Sandbox};
use common::terminal::{Display, Session};
use kiln::image::{Format, Image, Threads};
use serde_json::{Value, json};
use std::fs;

#[test]
fn files_are_described() {
    let sandbox = Sandbox::with_tiny();
    sandbox.run([&["a fox\nin the snow", "--seed", "7", "-o", "fox.png"], &QUICK[..]].concat()).good();
    let run = sandbox.run(["show", "fox.png"]).good();
    assert_eq!(run.stderr, "");
    let text = run.text();
    assert!(text.starts_with("fox.png: PNG, 64x64, made by kiln\n  prompt: a fox\n    in the snow\n  seed: 7\n"), "{text}");
    assert!(text.contains("\n  model-id: k1:") && !text.contains("parameters") && !text.contains("kiln: {"), "{text}");
    let [line] = &sandbox.run(["show", "--json", "fox.png"]).good().json()[..] else { panic!() };
    assert_eq!((&line["program"], &line["seed"], &line["metadata"]["seed"]), (&json!("kiln"), &json!(7), &json!(7)));
    assert_eq!((&line["width"], &line["format"]), (&json!(64), &json!("PNG")));
    assert_eq!(line["text"]["prompt"], "a fox\nin the snow");
}

#[test]
fn foreign_files_are_named() {
    let sandbox = Sandbox::with_tiny();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/foreign/");
    for (name, maker, parts) in [
        ("comfy.png", ", made by ComfyUI\n", &["  prompt: a red fox, café\n", "  seed: 8566257\n"][..]),
        ("a1111.webp", ", made by AUTOMATIC1111's web UI\n", &["  negative: blurry, bad\n", "Sampler: DPM++ 2M"]),
        ("mflux.png", ", made by mflux\n", &["  prompt: a red fox\n", "  seed: 7\n"]),
        ("none.png", ": PNG, 64x64\n", &[]),
    ] {
        let text = sandbox.run(["show", &format!("{folder}{name}")]).good().text().to_owned();
        assert!(parts.iter().chain(&[maker]).all(|part| text.contains(part)), "{name}: {text}");
        assert!(!text.contains("class_type"), "{text}");
    }
    let lines = sandbox.run(["show", "--json", &format!("{folder}comfy.png"), &format!("{folder}none.png")]).good().json();
    assert_eq!((&lines[0]["program"], &lines[0]["seed"]), (&json!("ComfyUI"), &json!(8_566_257)));
    assert!(lines[0]["text"]["prompt"].as_str().unwrap().contains("class_type"));
    assert_eq!((&lines[1]["program"], &lines[1]["metadata"]), (&Value::Null, &Value::Null));
}

/// A file that cannot be shown is named, and the others are shown.
#[test]
fn a_bad_file_does_not_hide_the_others() {
    let sandbox = Sandbox::with_tiny();
    sandbox.write_png("good.png", 64, 64, |x, y| [x as u8, y as u8, 0]);
    fs::write(sandbox.path("bad.png"), "text").unwrap();
    let run = sandbox.run(["show", "bad.png", "nowhere.png", "good.png"]);
    assert_eq!((run.code, run.text()), (Some(3), "good.png: PNG, 64x64\n"));
    assert!(run.stderr.starts_with("error: cannot read image (bad.png)"), "{}", run.stderr);
    assert!(run.stderr.contains("\nerror: cannot read (nowhere.png)"), "{}", run.stderr);
    assert_eq!(sandbox.run(["show"]).code, Some(2));
}

#[test]
fn no_escape_sequence_of_a_file_reaches_the_terminal() {
    let sandbox = Sandbox::with_tiny();
    let image = Image { width: 64, height: 64, pixels: vec![99; 64 * 64 * 3] };
    let hostile = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\r\nsecond\u{1b}P";
    for (name, format) in [("a.png", Format::Png), ("a.webp", Format::WebP)] {
        let text = [("prompt", hostile.to_owned()), ("version", format!("kiln {hostile}")), ("kiln", hostile.into())];
        fs::write(sandbox.path(name), image.encode(format, &text, Threads::One).unwrap()).unwrap();
        let run = sandbox.run(["show", name]).good();
        assert!(!run.text().contains(|c: char| c.is_control() && c != '\n'), "{:?}", run.text());
        assert!(!run.text().contains('\u{202e}') && run.text().contains("  note: `kiln` cannot be read: "), "{:?}", run.text());
        let line = sandbox.run(["show", "--json", name]).good();
        assert!(!line.text().contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'), "{:?}", line.text());
    }
}

#[test]
fn an_image_is_drawn_above_its_text() {
    let sandbox = Sandbox::with_tiny();
    sandbox.write_png("good.png", 64, 64, |x, y| [4 * x as u8, 4 * y as u8, 7]);
    let shown = |variables: &str, flags: &[&str]| {
        let mut session = Session::start(sandbox.command([&["show", "good.png"], flags].concat()), (80, 24), variables, true);
        assert_eq!(session.finish(), Some(0));
        Display::after(80, 24, &session.bytes)
    };
    let display = shown("TERM=xterm-kitty", &[]);
    let placed: Vec<_> = display.images.values().collect();
    assert_eq!(Png::decode(&placed[0].png).pixels, Png::read(&sandbox.path("good.png")).pixels);
    let lines = display.text();
    let line = lines.iter().position(|line| line == "good.png: PNG, 64x64").unwrap();
    assert!(placed.len() == 1 && placed[0].row < line, "{lines:?}");
    let blocks = shown("TERM=xterm-256color COLORTERM=truecolor", &[]);
    assert!(blocks.text()[0].starts_with('▀') && blocks.images.is_empty(), "{:?}", blocks.text());
    for (variables, flags) in [("TERM=dumb", &[][..]), ("TERM=xterm-kitty NO_COLOR=1", &[]), ("TERM=xterm-kitty", &["--json"])] {
        let display = shown(variables, flags);
        assert_eq!((display.placed, display.text()[0].contains('▀')), (0, false), "{variables} {flags:?}");
    }
}
