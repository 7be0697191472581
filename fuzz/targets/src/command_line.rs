//! What people write: arguments, lines of `kiln run`, and the small grammars of single values.

use crate::{Reader, check_error};
use common::cost::peak_of;
use kiln::quantize::matches;
use kiln::text::{shown, shown_line};
use kiln::{Grid, ModelDefaults, Pixels, SequenceLayout, Sigmas, unknown_words};
use kiln_program::cli::args::{ImageOptions, LoraArg, STEPS};
use kiln_program::cli::batch::line::{Line, fields};
use kiln_program::cli::{Command, parse};
use serde_json::Value;
use std::ffi::OsString;

/// A command line, each argument on a line of its own. What is accepted is within its limits; what is refused says so in words that a
/// terminal can show.
pub fn arguments(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let args = std::iter::once("kiln").chain(text.split('\n')).map(OsString::from);
    let (parsed, peak) = peak_of(|| parse(args));
    assert!(peak <= (4 << 20) + 256 * data.len() as isize, "{peak} bytes for {} bytes of arguments", data.len());
    match parsed {
        Ok(Command::Generate(args)) => {
            check_options(&args.options.image);
            assert!((1..=10_000).contains(&args.options.count));
            args.options.lora.lora.iter().for_each(check_adapter);
        }
        Ok(Command::Run(args)) => {
            check_options(&args.image);
            args.lora.lora.iter().for_each(check_adapter);
        }
        Ok(_) => {}
        Err(error) => {
            assert!([0, 2].contains(&error.exit_code()), "{error}");
            let shown = error.to_string();
            assert!(shown.lines().all(|line| line == shown_line(line) || line.chars().count() > 1024), "{shown:?}");
        }
    }
}

fn check_options(options: &ImageOptions) {
    assert!(options.steps.is_none_or(|steps| STEPS.contains(&steps)), "{options:?}");
    assert!(options.guidance.is_none_or(|scale| (0.0..=100.0).contains(&scale)), "{options:?}");
    if let Some(sigmas) = &options.sigmas {
        assert!(STEPS.contains(&sigmas.steps()) && options.steps.is_none(), "{options:?}");
        let again: Sigmas = sigmas.to_string().parse().expect("they are printed as they are read");
        assert_eq!(again, *sigmas);
    }
    if let Ok(size) = options.size((1024, 1024), 1024 * 1024) {
        check_size(size);
    }
}

fn check_size(size: Pixels) {
    let (width, height) = (size.width(), size.height());
    assert!(width >= 64 && height >= 64 && width % 16 == 0 && height % 16 == 0, "{size:?}");
    if let Ok(layout) = SequenceLayout::new(512, size.grid(), &[Grid { width: 64, height: 64 }]) {
        assert_eq!(layout.canvas().len(), width / 16 * (height / 16));
    }
}

fn check_adapter(adapter: &LoraArg) {
    assert!(!adapter.file.as_os_str().is_empty() && adapter.scale.is_finite(), "{adapter:?}");
    let Some(file) = adapter.file.to_str() else { return };
    let object = serde_json::to_value(adapter).expect("a text and a number");
    for spelled in [Value::from(format!("{file}:{}", adapter.scale)), object] {
        let again: LoraArg = serde_json::from_value(spelled).expect("it is printed as it is read");
        assert_eq!(again, *adapter);
    }
}

/// A line of `kiln run`. An accepted one is within its limits, and written as JSON it is read as the same line, with the same seed and name.
pub fn line(data: &[u8]) {
    let (line, peak) = peak_of(|| Line::parse(data));
    assert!(peak <= (1 << 18) + 64 * data.len() as isize, "{peak} bytes for a line of {}", data.len());
    let line = match line {
        Ok(Some(line)) => line,
        Ok(None) => return assert!(data.iter().all(|byte| !byte.is_ascii_graphic())),
        Err(error) => return check_error(&error, &[2]),
    };
    check_options(&line.options);
    line.lora.iter().flatten().for_each(check_adapter);
    assert!(line.size.is_none(), "a size is split into its sides");
    assert!(line.seed.is_some() || line.seed() < 1 << 32);

    let parts = [serde_json::to_value(&line), serde_json::to_value(&line.options), serde_json::to_value(&line.options.edit)];
    let mut all = serde_json::Map::new();
    for part in parts {
        let Ok(Value::Object(part)) = part else { panic!("a line cannot be written") };
        all.extend(part);
    }
    // As a text, because numbers of JSON are read less exactly.
    if let Some(sigmas) = &line.options.sigmas {
        all.insert("sigmas".into(), sigmas.to_string().into());
    }
    assert!(all.keys().all(|key| fields().contains(key)));
    let again = Line::parse(Value::Object(all).to_string().as_bytes());
    let again = again.unwrap_or_else(|error| panic!("written it is refused: {error}")).expect("it is not empty");
    assert_eq!(again, line);
    assert_eq!((again.seed(), again.id("m")), (line.seed(), line.id("m")));
    // Flags fill in what is open, and nothing else.
    let flags = ImageOptions { steps: Some(7), width: Some(64), ..ImageOptions::default() };
    let filled = again.with_defaults(&flags, Some("n"), &[]);
    check_options(&filled.options);
    assert_eq!(filled.negative.as_deref(), line.negative.as_deref().or(Some("n")));
    assert_eq!(filled.options.guidance, line.options.guidance);
    let ImageOptions { references, edit, .. } = &filled.options;
    // No file of this machine is read.
    if !references.is_empty() || edit.init.is_some() || edit.mask.is_some() || filled.output.is_some() {
        return;
    }
    if let Err(error) = filled.request(&ModelDefaults::klein()) {
        check_error(&error, &[2, 4]);
    }
}

/// A value of one of the small grammars: the first byte says of which.
pub fn values(data: &[u8]) {
    let mut input = Reader(data);
    let kind = input.byte();
    let Ok(text) = std::str::from_utf8(input.0) else { return };
    match kind % 5 {
        0 => adapter_value(text),
        1 => {
            if let Ok(sigmas) = text.parse::<Sigmas>() {
                assert!(STEPS.contains(&sigmas.steps()));
                assert_eq!(sigmas.to_string().parse::<Sigmas>().expect("they are printed as they are read"), sigmas);
            }
        }
        2 => {
            let sides: Vec<usize> = text.split('x').filter_map(|side| side.parse().ok()).collect();
            let [width, height] = sides[..] else { return };
            match Pixels::new(width, height) {
                Ok(size) => {
                    assert_eq!((size.width(), size.height()), (width, height));
                    check_size(size);
                }
                Err(error) => {
                    check_error(&error, &[2]);
                    let kiln::Error::ImageSize { nearest, .. } = error else { panic!("{error:?}") };
                    assert!(Pixels::new(nearest.0, nearest.1).is_ok(), "the advised size is illegal: {nearest:?}");
                }
            }
        }
        3 => {
            let (pattern, name) = text.split_once('\n').unwrap_or((text, ""));
            if pattern.len() <= 12 && name.len() <= 24 {
                let [p, n]: [Vec<char>; 2] = [pattern, name].map(|text| text.chars().collect());
                assert_eq!(matches(pattern, name), matches_by_definition(&p, &n), "{pattern:?} {name:?}");
            } else {
                matches(pattern, name);
            }
        }
        _ => {
            let shown = shown(text);
            assert_eq!(shown, shown_line(&shown));
            assert!(shown.chars().count() <= 129 * 10, "{}", shown.len());
            let (prompt, known) = text.split_once('\n').unwrap_or((text, ""));
            assert!(unknown_words(prompt, known).iter().all(|word| prompt.contains(word)));
        }
    }
}

/// `FILE:SCALE`, which means the same as a flag and in a line.
fn adapter_value(text: &str) {
    let from_line = Line::parse(serde_json::json!({"prompt": "", "lora": [text]}).to_string().as_bytes());
    let from_flag = parse(["kiln", "generate", "x", &format!("--lora={text}")].map(OsString::from));
    match (from_line, from_flag) {
        (Ok(Some(Line { lora: Some(line), .. })), Ok(Command::Generate(args))) => {
            assert_eq!(line, args.options.lora.lora);
            line.iter().for_each(check_adapter);
        }
        (Err(error), Err(_)) => check_error(&error, &[2]),
        (line, flag) => panic!("{text:?} as a line is {line:?}, as a flag {flag:?}"),
    }
}

/// Whether a name matches a pattern, by trying everything.
fn matches_by_definition(pattern: &[char], name: &[char]) -> bool {
    match pattern {
        [] => name.is_empty(),
        ['*', rest @ ..] => (0..=name.len()).any(|skipped| matches_by_definition(rest, &name[skipped..])),
        [first, rest @ ..] => match name {
            [letter, others @ ..] if *first == '?' || first == letter => matches_by_definition(rest, others),
            _ => false,
        },
    }
}
