//! `--preview`: images while they are denoised, on a terminal and in a file. They change no byte of an image, and leave nothing behind.
#![cfg(unix)]

use crate::drawing::{SIZE, assert_restored, decoded, read, shown};
use common::sandbox::{Png, QUICK, Run, Sandbox, send};
use common::terminal::{Cell, Display, Placed, Session};
use kiln::image::Image;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

const KITTY: &str = "TERM=xterm-kitty";

/// Flags for an image of the tiny model that takes long enough for some previews.
const SLOW: [&str; 8] = ["--preview", "--preview-kind", "full", "--steps", "8", "--width=64", "--height=64", "--precision=f32"];

/// A run in a terminal with these variables. The result has all images that were drawn, in order.
fn drawn(sandbox: &Sandbox, args: &[&str], variables: &str) -> (String, Display, Vec<(u64, Placed)>) {
    let mut session = Session::start(sandbox.command(args), SIZE, variables, true);
    let code = session.finish();
    let text = String::from_utf8(session.bytes).unwrap();
    assert_eq!(code, Some(0), "{variables}: {text}");
    let (mut display, mut images) = (Display::new(SIZE.0.into(), SIZE.1.into()), Vec::new());
    for piece in text.split_inclusive("\x1b\\") {
        let before = display.placed;
        display.write(piece);
        if display.placed > before {
            images.extend(display.images.iter().map(|(id, placed)| (*id, placed.clone())));
        }
    }
    (text, display, images)
}

/// Fails if a run has left an image, another color, or text at the cursor.
fn assert_nothing_left(display: &Display, text: &str) {
    let (row, column) = display.cursor;
    assert!(display.images.is_empty() && !display.text().concat().contains('▀'), "{:?}", display.text());
    assert!(column == 0 && display.lines[row..].iter().all(Vec::is_empty), "{:?}", display.text());
    assert!(["\x1b[?", "\x1b[>", "\x1b[6n", "\x1b[c"].iter().all(|sequence| !text.contains(sequence)), "{text:?}");
    let mut after = Display::after(SIZE.0.into(), SIZE.1.into(), text.as_bytes());
    after.write("x");
    assert_eq!(after.lines[row], [Cell { text: 'x', ..Cell::default() }]);
}

/// The flags of a run of the tiny model that shows full previews of one step.
fn full<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &["--preview-kind", "full"], &QUICK].concat()
}

#[test]
fn previews_change_no_byte() {
    let sandbox = Sandbox::new();
    let common = ["a red star", "--model", "builtin", "--seed", "3", "--width", "64", "--height", "64", "--steps", "3", "-o"];
    let with = |name: &'static str, flags: &[&'static str]| [&common[..], &[name], flags].concat();
    sandbox.run(with("plain.png", &[])).good();
    let plain = fs::read(sandbox.path("plain.png")).unwrap();
    for (name, flags) in [("fast.png", &["--preview=now.png"][..]), ("full.png", &["--preview=now.png", "--preview-kind=full"])] {
        let run = sandbox.run(with(name, flags)).good();
        assert!(!run.stderr.contains("preview"), "{}", run.stderr);
        assert!(fs::read(sandbox.path(name)).unwrap() == plain, "{name}");
        // The file ends as the finished image, and says what it is.
        let Png { text, .. } = Png::read(&sandbox.path("now.png"));
        assert_eq!(read(&sandbox, "now.png"), read(&sandbox, "plain.png"), "{name}");
        assert_eq!(text.into_iter().collect::<Vec<_>>(), [("preview".into(), "step 3 of 3".into())]);
    }
    for (name, flags) in [
        ("kitty.png", &["--preview"][..]),
        ("blocks.png", &["--preview=blocks", "--preview-kind=full"]),
        ("shown.png", &["--preview=iterm2", "--show"]),
    ] {
        let (text, display, images) = drawn(&sandbox, &with(name, flags), KITTY);
        assert!(fs::read(sandbox.path(name)).unwrap() == plain, "{name}");
        assert!(text.contains(if name == "blocks.png" { "▀" } else { "\x1b]1337" }) || !images.is_empty(), "{name}: {text:?}");
        assert_eq!(display.images.len(), usize::from(name == "shown.png"), "{name}");
        assert!(!display.text().concat().contains('▀'), "{name}");
    }
    let mut names = sandbox.names();
    names.retain(|name| name.ends_with("png") || name.starts_with(".kiln"));
    assert_eq!(names, ["blocks.png", "fast.png", "full.png", "kitty.png", "now.png", "plain.png", "shown.png"]);
}

#[test]
fn fast_previews_are_small_images_in_the_same_place() {
    let sandbox = Sandbox::new();
    let args =
        ["a red star", "--model", "builtin", "--seed=3", "--preview", "--show", "--width=128", "--height=128", "-o", "a.png"];
    let (text, display, images) = drawn(&sandbox, &args, KITTY);
    let image = read(&sandbox, "a.png");
    let sizes: Vec<usize> = images.iter().map(|(_, placed)| decoded(&placed.png).width).collect();
    let (last, previews) = sizes.split_last().unwrap();
    assert!(!previews.is_empty() && previews.iter().all(|width| *width == image.width / 8), "{sizes:?}");
    assert_eq!(*last, image.width);
    // All are drawn in as many columns, whatever their size.
    let columns = |placed: &Placed| placed.keys.split(',').find(|key| key.starts_with("c=")).map(str::to_owned);
    assert!(images.iter().all(|(id, placed)| *id == images[0].0 && columns(placed) == columns(&images[0].1)));
    assert_eq!(display.images.len(), 1);
    assert_restored(&display, &text);
}

#[test]
fn previews_replace_each_other_and_are_gone_at_the_end() {
    let sandbox = Sandbox::new();
    let (text, display, images) = drawn(&sandbox, &[&["x", "--seed=1", "-o", "a.png"][..], &SLOW].concat(), KITTY);
    let previews: Vec<Image> = images.iter().map(|(_, placed)| decoded(&placed.png)).collect();
    assert!(!previews.is_empty(), "{text:?}");
    assert!(images.iter().all(|(id, _)| *id == images[0].0), "one number");
    assert!(previews.iter().all(|preview| preview.width == 64));
    // Nothing is left but the lines of a run without previews.
    assert_nothing_left(&display, &text);
    let (_, plain) = shown(&sandbox, &["x", "--seed=1", "-o", "b.png"], KITTY);
    assert_eq!(display.cursor, plain.cursor, "{:?}", display.text());
    // The finished image takes their place, and stays.
    let (text, display, images) = drawn(&sandbox, &[&["x", "--seed=1", "--show", "-o", "c.png"][..], &SLOW].concat(), KITTY);
    let left: Vec<_> = display.images.iter().collect();
    let [(id, placed)] = left[..] else { panic!("{} images", left.len()) };
    let places = images.iter().map(|(other, placed)| (other, placed.row));
    assert!(images.len() > 1 && places.clone().all(|(other, _)| other == id), "{:?}", display.text());
    // Lines of finished phases come in between, so the place moves down.
    assert!(places.is_sorted_by_key(|(_, row)| row));
    assert_eq!(decoded(&placed.png), read(&sandbox, "c.png"));
    assert!(images.iter().any(|(_, other)| other.png != placed.png), "the image changes");
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("c.png")).unwrap());
    assert_restored(&display, &text);
}

#[test]
fn an_interrupted_run_leaves_no_preview() {
    let sandbox = Sandbox::new();
    for (variables, sign) in [(KITTY, "\x1b\\"), ("TERM=xterm COLORTERM=truecolor", "▀")] {
        let args = [&["x", "-o", "a.png"][..], &SLOW, &["--count", "100", "--force"]].concat();
        let mut session = Session::start(sandbox.command(args), SIZE, variables, true);
        assert!(session.read_until(sign), "{}", String::from_utf8_lossy(&session.bytes));
        send("-INT", &session.child);
        let ended = session.finish();
        let text = String::from_utf8(session.bytes).unwrap();
        assert_eq!(ended, Some(130), "{text:?}");
        let display = Display::after(SIZE.0.into(), SIZE.1.into(), text.as_bytes());
        assert_nothing_left(&display, &text);
    }
}

#[test]
fn nothing_is_drawn_where_nobody_looks() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(full(&["x", "--preview=kitty", "-o", "a.png"]));
    command.env("TERM", "xterm-kitty");
    let run = Run::of(command).good();
    assert!(!run.stderr.contains('\x1b'), "{:?}", run.stderr);
    assert!(run.stderr.contains("note: no preview is drawn here: standard error is not a terminal\n"), "{}", run.stderr);
    for (name, flags, variables, note) in [
        ("b.png", &["--preview"][..], "TERM=xterm-kitty CI=1", Some("CI is set")),
        ("c.png", &["--preview"], "TERM=dumb", Some("TERM is not set, or `dumb`")),
        ("d.png", &["--preview", "--quiet"], KITTY, None),
        ("e.png", &["--preview=now.png"], KITTY, None),
        ("f.png", &["--preview=quiet.png", "--quiet"], KITTY, None),
    ] {
        let (text, display, _) = drawn(&sandbox, &full(&[&["x", "-o", name], flags].concat()), variables);
        assert_eq!(display.placed, 0, "{text:?}");
        let told = display.text().into_iter().find_map(|line| line.split_once("drawn here: ").map(|(_, why)| why.to_owned()));
        assert_eq!(told.as_deref(), note, "{text:?}");
    }
    assert_eq!(read(&sandbox, "now.png"), read(&sandbox, "e.png"));
    assert_eq!(read(&sandbox, "quiet.png"), read(&sandbox, "f.png"));
}

#[test]
fn only_previews_are_replaced() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str]| sandbox.run(full(args));
    fs::write(sandbox.path("mine.png"), "mine").unwrap();
    let refused = run(&["x", "-o", "a.png", "--preview=mine.png"]);
    assert_eq!(refused.code, Some(5), "{}", refused.stderr);
    assert!(refused.stderr.starts_with("error: output exists (mine.png); not overwritten"), "{}", refused.stderr);
    assert_eq!((fs::read(sandbox.path("mine.png")).unwrap(), sandbox.names()), (b"mine".to_vec(), vec!["mine.png".into()]));
    // An image of kiln is not a preview either.
    run(&["x", "-o", "a.png", "--preview=now.png"]).good();
    assert_eq!(run(&["x", "-o", "b.png", "--preview=a.png"]).code, Some(5));
    run(&["y", "-o", "b.png", "--preview=now.png"]).good();
    assert_eq!(read(&sandbox, "now.png"), read(&sandbox, "b.png"));
    run(&["x", "-o", "c.png", "--preview=mine.png", "--force"]).good();
    assert_eq!(read(&sandbox, "mine.png"), read(&sandbox, "c.png"));
    // A link may lead anywhere, and no folder is made.
    std::os::unix::fs::symlink("now.png", sandbox.path("link.png")).unwrap();
    fs::create_dir(sandbox.path("folder.png")).unwrap();
    for preview in ["--preview=link.png", "--preview=folder.png", "--preview=none/now.png"] {
        for force in [&[][..], &["--force"]] {
            let refused = run(&[&["x", "-o", "d.png", preview][..], force].concat());
            assert_eq!(refused.code, Some(5), "{preview}: {}", refused.stderr);
        }
    }
    // No file of the run is a preview.
    for (flags, code, what) in [
        (&["-o", "d.png", "--preview=./d.png"][..], 2, "the image and --preview would be the same file"),
        (&["-o", "d.png", "--count=2", "--preview=d-2.png"], 2, "the image and --preview would be the same file"),
        (&["-o", "d.png", "--dump=e.png", "--preview=e.png"], 2, "--dump and --preview would be the same file"),
        (&["-o", "d.png", "--trace=e.png", "--preview=e.png"], 2, "--preview and --trace would be the same file"),
        (&["-o", "d.png", "--reference=now.png", "--preview=now.png"], 5, "this is one of the files that are read"),
    ] {
        let refused = run(&[&["x"], flags].concat());
        assert_eq!(refused.code, Some(code), "{flags:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(what), "{flags:?}: {}", refused.stderr);
    }
    assert!(!sandbox.path("d.png").exists() && !sandbox.path("e.png").exists());
}

#[test]
fn a_model_without_colors_says_so() {
    let sandbox = Sandbox::new();
    for (args, name) in [(&["x", "-o", "a.png"][..], "a.png"), (&["run", "lines", "-o", "out"], "out/b.png")] {
        fs::write(sandbox.path("lines"), "{\"prompt\": \"x\", \"output\": \"b.png\"}\n").unwrap();
        let run = sandbox.quick(&[args, &["--preview=now.png"]].concat());
        let note = "note: this model has no colors for fast previews; --preview-kind full decodes them\n";
        assert_eq!(run.stderr.matches(note).count(), 1, "{}", run.stderr);
        assert!(sandbox.path(name).exists() && !sandbox.path("now.png").exists());
    }
}

#[test]
fn a_run_shows_one_image_after_the_other() {
    let sandbox = Sandbox::new();
    let lines = ["{\"prompt\": \"a\", \"output\": \"a.png\"}", "{\"prompt\": \"b\", \"output\": \"b.png\", \"size\": \"96x64\"}"];
    fs::write(sandbox.path("lines"), lines.join("\n")).unwrap();
    let (text, display, images) = drawn(&sandbox, &[&["run", "lines", "-o", "out"][..], &SLOW].concat(), KITTY);
    let widths: Vec<usize> = images.iter().map(|(_, placed)| decoded(&placed.png).width).collect();
    assert!(widths.starts_with(&[64]) && widths.ends_with(&[96]) && widths.is_sorted(), "{widths:?}");
    assert_nothing_left(&display, &text);
    let plain: Vec<_> = ["out/a.png", "out/b.png"].map(|name| fs::read(sandbox.path(name)).unwrap()).into();
    // A file in the folder that the run makes. A line must not name it.
    let own = "{\"prompt\": \"c\", \"output\": \"now.png\"}";
    fs::write(sandbox.path("lines"), [&[own], &lines[..]].concat().join("\n")).unwrap();
    let run = sandbox.run([&["run", "lines", "-o", "new"][..], &SLOW[1..], &["--preview=new/now.png"]].concat());
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let answers = run.json();
    assert!(answers[0]["error"].as_str().unwrap().starts_with("the image and --preview would be the same file"), "{answers:?}");
    assert!(plain == ["new/a.png", "new/b.png"].map(|name| fs::read(sandbox.path(name)).unwrap()));
    assert_eq!(read(&sandbox, "new/now.png"), read(&sandbox, "new/b.png"));
    // The file of a refused command is refused before its folder is made.
    fs::write(sandbox.path("mine.png"), "mine").unwrap();
    assert_eq!(sandbox.run(full(&["run", "lines", "-o", "other", "--preview=mine.png"])).code, Some(5));
    assert!(!sandbox.path("other").exists());
}

#[test]
fn a_preview_that_cannot_be_written_is_only_a_warning() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("folder")).unwrap();
    let mut command = sandbox.command(full(&["run", "--preview=folder/now.png"]));
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("ready for lines") {
        assert!(stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    fs::remove_dir(sandbox.path("folder")).unwrap();
    let lines = b"{\"prompt\": \"a\", \"output\": \"a.png\"}\n{\"prompt\": \"b\", \"output\": \"b.png\"}\n";
    child.stdin.take().unwrap().write_all(lines).unwrap();
    stderr.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
    assert_eq!(text.matches("warning: a preview is missing: cannot write (folder/now.png)").count(), 1, "{text}");
    assert!(sandbox.path("a.png").exists() && sandbox.path("b.png").exists());
}
