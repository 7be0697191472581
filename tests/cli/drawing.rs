//! Images on a terminal: the real program in a pseudoterminal, and the screen that its bytes make. Whatever is parsed back has to be
//! the image of the file.
#![cfg(unix)]

use common::sandbox::{Png, QUICK, Sandbox, send};
use common::terminal::{Cell, Display, Session};
use kiln::image::{Image, Threads};
use kiln::progress::{Phase, Progress};
use kiln_program::draw::area::Area;
use kiln_program::draw::way::Colors;
use kiln_program::draw::{Canvas, Facts, Screen, Way, blocks::scaled};
use kiln_program::terminal::{Terminal, Verbosity};
use std::process::{Command, Stdio};
use std::time::Duration;

pub const SIZE: (u16, u16) = (80, 24);

/// The colors of a scaled image as cells of half blocks.
fn cells(image: &Image, area: Area) -> Vec<Vec<Cell>> {
    let image = scaled(image, area.columns, area.halves);
    let pixel = |x: usize, y: usize| (y < area.halves).then(|| image.pixels[3 * (y * image.width + x)..][..3].to_vec());
    let cell = |x, y| Cell { text: '▀', foreground: pixel(x, 2 * y), background: pixel(x, 2 * y + 1) };
    (0..area.rows).map(|y| (0..area.columns).map(|x| cell(x, y)).collect()).collect()
}

/// An image file as pixels.
pub fn read(sandbox: &Sandbox, name: &str) -> Image {
    let Png { width, height, pixels, .. } = Png::read(&sandbox.path(name));
    Image { width: width as usize, height: height as usize, pixels }
}

/// The pixels of a PNG.
pub fn decoded(png: &[u8]) -> Image {
    let Png { width, height, pixels, .. } = Png::decode(png);
    Image { width: width as usize, height: height as usize, pixels }
}

/// A run of the tiny model in a terminal with these variables, and the screen after it.
pub fn shown(sandbox: &Sandbox, args: &[&str], variables: &str) -> (String, Display) {
    let mut session = Session::start(sandbox.command(args.iter().chain(&QUICK)), SIZE, variables, true);
    let code = session.finish();
    let text = String::from_utf8(session.bytes).unwrap();
    assert_eq!(code, Some(0), "{variables}: {text}");
    let display = Display::after(SIZE.0.into(), SIZE.1.into(), text.as_bytes());
    (text, display)
}

/// Fails if the terminal's state is another one than before: colors, cursor, or text in the cursor's line.
pub fn assert_restored(display: &Display, text: &str) {
    assert!(["\x1b[?", "\x1b[>", "\x1b[6n", "\x1b[c"].iter().all(|sequence| !text.contains(sequence)), "{text:?}");
    assert_eq!(display.cursor, (display.lines.len() - 1, 0), "{:?}", display.text());
    assert_eq!(display.lines.last().map(Vec::len), Some(0), "{:?}", display.text());
    // A character that is printed now has no color.
    let mut after = Display::after(80, 24, text.as_bytes());
    after.write("x");
    assert_eq!(after.lines.last(), Some(&vec![Cell { text: 'x', ..Cell::default() }]));
}

#[test]
fn every_row_of_the_table_in_a_terminal() {
    let sandbox = Sandbox::with_tiny();
    let screen = Screen { columns: 80, rows: 24, pixels: None };
    let blocks = Way::Blocks(Colors::True);
    for (i, (variables, want)) in [
        ("TERM=dumb COLORTERM=truecolor", None),
        ("TERM=xterm-kitty NO_COLOR=1", None),
        ("TERM=xterm-kitty CI=true", None),
        ("TERM=linux", None),
        ("TERM=tmux-256color COLORTERM=truecolor TMUX=x KITTY_WINDOW_ID=1", Some(blocks)),
        ("TERM=xterm-256color KITTY_WINDOW_ID=1", Some(Way::Kitty { wrapped: false })),
        ("TERM=xterm-256color KONSOLE_VERSION=230801", Some(Way::Kitty { wrapped: false })),
        ("TERM=xterm-256color TERM_PROGRAM=WezTerm", Some(Way::Iterm2)),
        ("TERM=xterm-256color COLORTERM=truecolor", Some(blocks)),
        ("TERM=xterm-256color", Some(Way::Blocks(Colors::Cube))),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("{i}.png");
        // The flag and the variable are the same.
        let (flag, variable) = if i % 2 == 0 { (&["--show"][..], "") } else { (&[][..], " KILN_SHOW=1") };
        let args = [&["x", "--seed", "1", "--backend", "cpu", "-o", &name], flag].concat();
        let (text, display) = shown(&sandbox, &args, &format!("{variables}{variable}"));
        let image = read(&sandbox, &name);
        let lines = display.text();
        let first = lines.iter().position(|line| line.starts_with('▀'));
        // The path is printed below the image, and nothing is between them.
        let path = lines.iter().position(|line| *line == name).unwrap_or_else(|| panic!("{lines:?}"));
        match want {
            None => {
                assert_eq!((first, display.placed), (None, 0), "{variables}: {text:?}");
                let told = lines.iter().any(|line| line.starts_with("note: no image is drawn here: "));
                assert_eq!(told, i % 2 == 0, "{variables}: {lines:?}");
            }
            Some(way @ Way::Blocks(colors)) => {
                let area = Area::fit((64, 64), screen, way);
                let first = first.unwrap_or_else(|| panic!("{variables}: {text:?}"));
                let found = &display.lines[first..path];
                match colors {
                    Colors::True => assert_eq!(found, cells(&image, area), "{variables}"),
                    Colors::Cube => assert_eq!((found.len(), found[0].len()), (area.rows, area.columns)),
                }
            }
            Some(way) => {
                let images: Vec<_> = display.images.values().collect();
                let [placed] = images[..] else { panic!("{variables}: {} images", images.len()) };
                assert_eq!(decoded(&placed.png), image, "{variables}");
                assert_eq!((placed.row + Area::fit((64, 64), screen, way).rows, placed.column), (path, 0), "{lines:?}");
                assert_eq!(first, None);
            }
        }
        if !variables.contains("dumb") {
            assert_restored(&display, &text);
        }
    }
}

#[test]
fn nothing_is_drawn_where_nobody_looks() {
    let sandbox = Sandbox::with_tiny();
    let mut command = sandbox.command(["x", "--show", "-o", "-", "--backend", "cpu"].iter().chain(&QUICK));
    command.envs([("TERM", "xterm-kitty"), ("KILN_SHOW", "1")]);
    let run = common::sandbox::Run::of(command).good();
    assert!(run.stdout.starts_with(b"\x89PNG"));
    assert!(!run.stderr.contains('\x1b'), "{:?}", run.stderr);
    assert!(run.stderr.contains("note: no image is drawn here: standard error is not a terminal\n"), "{}", run.stderr);
    // The variable alone is no reason for a note.
    let mut command = sandbox.command(["x", "-o", "a.png"].iter().chain(&QUICK));
    command.envs([("TERM", "xterm-kitty"), ("KILN_SHOW", "1")]);
    let run = common::sandbox::Run::of(command).good();
    assert!(!run.stderr.contains('\x1b') && !run.stderr.contains("drawn"), "{:?}", run.stderr);
    for (args, variables) in [
        (&["x", "-o", "b.png", "--show", "--quiet"][..], "TERM=xterm-kitty KILN_SHOW=1"),
        (&["x", "-o", "c.png", "--quiet"], "TERM=xterm-kitty"),
        (&["x", "-o", "d.png"], "TERM=xterm-kitty"),
        (&["x", "-o", "e.png"], "TERM=xterm-kitty KILN_SHOW=0"),
    ] {
        let (text, display) = shown(&sandbox, args, variables);
        assert_eq!(display.placed, 0, "{text:?}");
        assert!(args.contains(&"--quiet") != text.contains('\x1b'), "{text:?}");
    }
}

#[test]
fn every_image_of_a_run_is_drawn() {
    let sandbox = Sandbox::with_tiny();
    let kitty = "TERM=xterm-kitty";
    let (text, display) = shown(&sandbox, &["x", "--show", "--count", "3", "--seed", "1", "-o", "a.png"], kitty);
    let in_order = |display: &Display| {
        let mut images: Vec<_> = display.images.values().map(|placed| (placed.row, decoded(&placed.png))).collect();
        images.sort_by_key(|(row, _)| *row);
        images.into_iter().map(|(_, image)| image).collect::<Vec<_>>()
    };
    // Each has a number of its own, else it would replace the one before.
    assert_eq!(in_order(&display), ["a-1.png", "a-2.png", "a-3.png"].map(|name| read(&sandbox, name)));
    assert_restored(&display, &text);
    std::fs::write(sandbox.path("lines"), "{\"prompt\": \"a\", \"output\": \"b.png\"}\n{\"prompt\": \"\"}\n").unwrap();
    let (text, display) = shown(&sandbox, &["run", "lines", "--show", "-o", "out"], kitty);
    assert_eq!(display.placed, 2, "{text:?}");
    assert_eq!(in_order(&display)[0], read(&sandbox, "out/b.png"));
    assert_restored(&display, &text);
}

#[test]
fn an_interrupted_run_leaves_the_terminal_as_it_was() {
    let sandbox = Sandbox::with_tiny();
    for (variables, signal, code) in [
        ("TERM=xterm-kitty", "-INT", 130),
        ("TERM=xterm-256color COLORTERM=truecolor", "-INT", 130),
        ("TERM=xterm-256color TERM_PROGRAM=iTerm.app", "-TERM", 143),
    ] {
        let args = ["x", "--show", "--count", "1000", "-o", "a.png", "--force", "--backend", "cpu"];
        let command = sandbox.command(args.iter().chain(&QUICK));
        let mut session = Session::start(command, SIZE, variables, true);
        // The second image is being made, after the first was drawn.
        assert!(session.read_until("a-1.png"), "{}", String::from_utf8_lossy(&session.bytes));
        send(signal, &session.child);
        let ended = session.finish();
        let text = String::from_utf8(session.bytes).unwrap();
        assert_eq!(ended, Some(code), "{text:?}");
        let display = Display::after(SIZE.0.into(), SIZE.1.into(), text.as_bytes());
        assert_restored(&display, &text);
        let lines = display.text();
        assert!(lines.iter().any(|line| line.starts_with("error: interrupted")), "{lines:?}");
    }
}

/// An image in which every pixel has another color.
fn image(width: usize, height: usize, start: u8) -> Image {
    let pixels = (0..width * height * 3).map(|i| (i * 31 % 256) as u8 ^ start).collect();
    Image { width, height, pixels }
}

#[test]
fn images_replace_each_other() {
    let screen = Screen { columns: 40, rows: 15, pixels: None };
    for way in [Way::Kitty { wrapped: false }, Way::Iterm2, Way::Blocks(Colors::True)] {
        let area = Area::fit((256, 256), screen, way);
        let mut display = Display::new(40, 15);
        // The terminal is almost full, so the first image scrolls it.
        (0..12).for_each(|i| display.write(&format!("line {i}\n")));
        let mut canvas = Canvas::new(way, (256, 256));
        let feed = |display: &mut Display, bytes: Vec<u8>| display.write(std::str::from_utf8(&bytes).unwrap());
        assert_eq!(canvas.lines(), 0);
        for (i, size) in [32, 32, 256].into_iter().enumerate() {
            let image = image(size, size, i as u8);
            feed(&mut display, canvas.draw(&image, screen, Threads::One).unwrap());
            assert_eq!((canvas.lines(), display.cursor), (area.rows, (12 + area.rows, 0)), "{way:?}");
            match way {
                Way::Blocks(_) => assert_eq!(display.lines[12..12 + area.rows], cells(&image, area)),
                _ => {
                    let placed: Vec<_> = display.images.values().collect();
                    assert_eq!((placed.len(), placed[0].row), (1, 12), "{way:?}");
                    assert_eq!(decoded(&placed[0].png), image);
                }
            }
            // A progress line below the image.
            display.write("\rdenoising 1/3\r\x1b[2K");
        }
        // A line of text takes the place of the image, which moves down.
        feed(&mut display, canvas.hide());
        assert_eq!((display.cursor, canvas.lines()), ((12, 0), 0));
        assert!(display.images.is_empty());
        display.write("warning: something\n");
        feed(&mut display, canvas.show_again());
        feed(&mut display, canvas.show_again());
        assert_eq!(display.text()[12], "warning: something");
        assert_eq!(display.cursor, (13 + area.rows, 0));
        if let Way::Blocks(_) = way {
            assert_eq!(display.lines[13..13 + area.rows], cells(&image(256, 256, 2), area));
        } else {
            assert_eq!(display.images.values().map(|placed| placed.row).collect::<Vec<_>>(), [13]);
        }
        // In a terminal of another size, the place of the image is unknown, so the next one is drawn below.
        let other = Screen { columns: 41, ..screen };
        feed(&mut display, canvas.draw(&image(256, 256, 9), other, Threads::One).unwrap());
        assert_eq!(display.cursor, (13 + 2 * area.rows, 0));
        // A hidden image leaves nothing to replace.
        feed(&mut display, canvas.hide());
        feed(&mut display, canvas.draw(&image(256, 256, 8), other, Threads::One).unwrap());
        assert_eq!(display.cursor, (13 + 2 * area.rows, 0));
        feed(&mut display, canvas.finish(false));
        assert_eq!(display.cursor, (13 + area.rows, 0));
        assert!(display.text()[13 + area.rows..].iter().all(String::is_empty));
        if let Way::Kitty { .. } = way {
            assert!(display.images.is_empty());
        }
    }
}

#[test]
fn a_kept_image_stays() {
    let screen = Screen { columns: 40, rows: 15, pixels: None };
    for way in [Way::Kitty { wrapped: false }, Way::Iterm2, Way::Blocks(Colors::Cube)] {
        let mut canvas = Canvas::new(way, (64, 64));
        let bytes = canvas.draw(&image(64, 64, 3), screen, Threads::One).unwrap();
        let rows = canvas.lines();
        let display = Display::after(40, 15, &[bytes, canvas.finish(true)].concat());
        assert_eq!(display.cursor, (rows, 0));
        assert_eq!(display.images.len(), usize::from(!matches!(way, Way::Blocks(_))));
        // A canvas without an image has nothing to clear.
        assert!(Canvas::new(way, (64, 64)).finish(false).is_empty());
    }
}

/// The environment variable that names the helper's task.
const TASK: &str = "KILN_TEST_DRAWING";

/// Not a test but a process that draws the images of a run that nobody computes.
#[test]
#[ignore = "a helper for the test below"]
fn helper() {
    let Ok(task) = std::env::var(TASK) else { return };
    let way = Way::best(&Facts::of_stderr(false)).unwrap();
    let terminal = Terminal::new(Verbosity::Normal).showing(way);
    terminal.begin(Phase::Denoise, 3);
    for i in 0..3 {
        // The previews of a part of an image have another shape than the image.
        let size = if task == "part" { (128, 256) } else { (256, 256) };
        terminal.draw(1, way, size, &image(32, 32, i), Threads::One);
        terminal.advance(1);
        // The progress line is redrawn meanwhile.
        std::thread::sleep(Duration::from_millis(250));
        match (i, task.as_str()) {
            (1, "stopped") => return,
            (1, _) => terminal.warn("something that happens in between"),
            _ => {}
        }
    }
    terminal.end();
    terminal.show(1, &image(256, 256, 3), Threads::One);
    // A preview that comes too late or too early is not drawn.
    [1, 3].into_iter().for_each(|number| terminal.draw(number, way, (256, 256), &image(32, 32, 4), Threads::One));
    terminal.say("done");
}

#[test]
fn images_stand_above_the_progress_line() {
    for (variables, way) in [
        ("TERM=xterm-kitty", Way::Kitty { wrapped: false }),
        ("TERM=xterm-256color LC_TERMINAL=iTerm2", Way::Iterm2),
        ("TERM=xterm-256color COLORTERM=truecolor", Way::Blocks(Colors::True)),
    ] {
        let area = Area::fit((256, 256), Screen { columns: 60, rows: 12, pixels: None }, way);
        let run = |task: &str| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "drawing::helper", "--ignored", "--nocapture"]).env(TASK, task);
            command.stdin(Stdio::null()).stdout(Stdio::null());
            let mut session = Session::start(command, (60, 12), variables, false);
            assert_eq!(session.finish(), Some(0), "{}", String::from_utf8_lossy(&session.bytes));
            let text = String::from_utf8(session.bytes).unwrap();
            (Display::after(60, 12, text.as_bytes()), text)
        };
        for task in ["all", "part"] {
            let (display, text) = run(task);
            let lines = display.text();
            // Only the last image is left, between the text that came before and the text that came after it.
            let place =
                |start: &str| lines.iter().position(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{lines:?}"));
            let (warned, summed, done) = (place("warning: something"), place("denoising"), place("done"));
            assert_eq!((warned, summed, done), (0, 1, 2 + area.rows), "{lines:?}");
            match way {
                Way::Blocks(_) => assert_eq!(display.lines[2..done], cells(&image(256, 256, 3), area)),
                _ => {
                    let images: Vec<_> = display.images.values().collect();
                    assert_eq!((images.len(), images[0].row), (1, 2), "{lines:?}");
                    assert_eq!(decoded(&images[0].png), image(256, 256, 3));
                    // Each is drawn once, and once more after each line of text.
                    assert_eq!(display.placed, 6);
                }
            }
            assert_restored(&display, &text);
        }
        let (display, text) = run("stopped");
        assert!(text.contains("denoising"), "{text:?}");
        assert_eq!((display.images.len(), display.cursor), (0, (0, 0)), "{text:?}");
        assert!(display.text().iter().all(String::is_empty), "{:?}", display.text());
    }
}
