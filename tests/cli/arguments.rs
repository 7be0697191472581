//! Random command lines: each is accepted, or refused with the right exit code. They run inside of the test process, because a
//! process for each would be slow, and open no model.

use clap::CommandFactory;
use common::alone::alone;
use common::random::{Random, cases};
use kiln::locate::Environment;
use kiln_program::cli::batch::BatchRequest;
use kiln_program::cli::bench::BenchRequest;
use kiln_program::cli::generate::GenerateRequest;
use kiln_program::cli::{self, Cli, Command, Process, Signals};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The current folder, in which output names are tried.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("kiln-arguments-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
});

/// Every flag that clap knows.
static FLAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let command = Cli::command();
    let all = std::iter::once(&command).chain(command.get_subcommands()).flat_map(|command| command.get_arguments());
    let mut flags: Vec<String> = all
        .flat_map(|arg| {
            let long = arg.get_long().map(|name| format!("--{name}"));
            long.into_iter().chain(arg.get_short().map(|name| format!("-{name}")))
        })
        .chain(["--help", "-h", "--version", "--", "-", "--no-such-flag"].map(String::from))
        .collect();
    flags.sort();
    flags.dedup();
    flags
});

const VALUES: [&str; 48] = [
    "",
    " ",
    "x",
    "a red fox",
    "-",
    "--",
    "0",
    "1",
    "-1",
    "2",
    "16",
    "64",
    "65",
    "256",
    "1000",
    "1001",
    "4097",
    "16384",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "-0.0",
    "100.1",
    "NaN",
    "inf",
    "٣",
    "½",
    "tiny",
    "builtin",
    "base",
    "kv",
    "f32",
    "bf16",
    "torch-cpu",
    "torch-cuda",
    "cpu",
    "generate",
    "plan",
    "help",
    "out.png",
    "out.jpg",
    "none/out.png",
    "/dev/null",
    "/dev/zero",
    "..",
    "\u{202e}\u{301}",
    "\n",
    "9b",
];

/// A value of a flag: one of [`VALUES`], a very long text, random bytes, a path, or a number of any magnitude.
fn value(random: &mut Random) -> OsString {
    match random.below(16) {
        0 => OsString::from("x".repeat(random.below(70_000))),
        1 | 2 => bytes((0..random.below(12)).map(|_| random.next() as u8).collect()),
        3 => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/references/rgb.png").into(),
        4 => FOLDER.join(format!("{}.png", random.below(1000))).into(),
        5 => random.size().to_string().into(),
        _ => random.pick(&VALUES).into(),
    }
}

#[cfg(unix)]
fn bytes(bytes: Vec<u8>) -> OsString {
    std::os::unix::ffi::OsStringExt::from_vec(bytes)
}

#[cfg(not(unix))]
fn bytes(bytes: Vec<u8>) -> OsString {
    String::from_utf8_lossy(&bytes).into_owned().into()
}

/// A random command line: flags with and without a value, with `=` and without, and positional arguments between them.
fn arguments(random: &mut Random) -> Vec<OsString> {
    let mut args = vec![OsString::from("kiln")];
    match random.below(8) {
        0 if random.below(8) == 0 => args.push("plan".into()),
        0 if random.below(4) == 0 => args.extend(["quantize", "tiny", "x", "--to", "fp8"].map(OsString::from)),
        1 => args.push("generate".into()),
        2 if random.below(4) == 0 => args.push("tiny".into()),
        2 => args.push("bench".into()),
        // Most command lines have a prompt and a model, so that the checks behind parsing are reached.
        3..7 => args.extend(["a fox", "--model", "tiny"].map(OsString::from)),
        _ => {}
    }
    for _ in 0..random.below(6) {
        let flag = &FLAGS[random.below(FLAGS.len())];
        match random.below(6) {
            // Few flags name an output.
            _ if random.below(16) == 0 => args.extend(["--output", "none/out.png"].map(OsString::from)),
            0 => args.push(value(random)),
            1 => args.push(flag.into()),
            2 => {
                let mut joined = OsString::from(format!("{flag}="));
                joined.push(value(random));
                args.push(joined);
            }
            _ => args.extend([flag.into(), value(random)]),
        }
    }
    args
}

/// Parses and checks arguments up to the point where a model would be opened. Returns the exit code, or none for success.
fn outcome(args: Vec<OsString>) -> Option<u8> {
    let error = match cli::parse(args) {
        Err(text) => {
            assert!(!text.to_string().is_empty());
            return Some(u8::try_from(text.exit_code()).unwrap());
        }
        Ok(Command::Generate(args)) => GenerateRequest::new(*args, Environment::default(), &mut &b"a fox"[..], 1).err(),
        Ok(Command::Bench(args)) => BenchRequest::new(*args, Environment::default(), &mut &b"a fox"[..]).err(),
        Ok(Command::Run(args)) => BatchRequest::new(*args, Environment::default()).err(),
        Ok(command @ (Command::Plan(_) | Command::Lora(_) | Command::Completions(_) | Command::Man(_))) => {
            let (environment, signals) = (Environment::default(), &Signals::default());
            command.subcommand().run(Process { environment, signals, out: &mut Vec::new() }).err()
        }
        // Others would open the GPU driver or write files.
        Ok(_) => None,
    };
    error.map(|error| {
        assert!(!error.to_string().is_empty());
        error.exit_code()
    })
}

#[test]
fn random_arguments_never_panic() {
    if !alone(random_arguments_never_panic) {
        return;
    }
    // Relative output names are tried in the current folder.
    std::env::set_current_dir(&*FOLDER).unwrap();
    assert!(FLAGS.len() > 30, "{FLAGS:?}");
    let counts: [AtomicUsize; 6] = Default::default();
    cases("arguments", 10_000, 300_000, |random| {
        let args = arguments(random);
        let shown = format!("{args:.300?}");
        match outcome(args) {
            None => counts[1].fetch_add(1, Ordering::Relaxed),
            Some(code @ (0 | 2 | 3 | 5)) => counts[usize::from(code)].fetch_add(1, Ordering::Relaxed),
            Some(code) => panic!("{code}: {shown}"),
        };
    });
    // Every outcome occurs: help, success, and each kind of refusal.
    let [help, fine, usage, file, _, output] = counts.map(AtomicUsize::into_inner);
    let least = (help + fine + usage + file + output) / 2000;
    assert!([help, fine, usage, file, output].iter().all(|count| *count > least), "{help} {fine} {usage} {file} {output}");
    assert_eq!(std::fs::read_dir(&*FOLDER).unwrap().count(), 0, "nothing was written");
    std::fs::remove_dir(&*FOLDER).unwrap();
}

#[test]
fn numbers_are_accepted_exactly_within_their_limits() {
    let outcome = |flag: &str, value: &str| {
        // Only a JPEG has a quality.
        let name = if flag == "--quality" { "kiln-numbers.jpg" } else { "kiln-numbers.png" };
        let output = std::env::temp_dir().join(name).into_os_string();
        let args = ["kiln", "a fox", "--model", "tiny", flag, value, "-o"].map(OsString::from);
        outcome(args.into_iter().chain([output]).collect())
    };
    let whole = ["", " ", "NaN", "inf", "1e999", "1e1", "1.0", "٣", "３", "²", "½", "0x10", "1 ", " 1", "1_0", "--", "\0"];
    let table = [
        // Flag, the value below its minimum, the minimum, the maximum, the value above it.
        ("--steps", "0", "1", "1000", "1001"),
        ("--count", "0", "1", "10000", "10001"),
        ("--threads", "0", "1", "1024", "1025"),
        ("--quality", "0", "1", "100", "101"),
        ("--noise-sms", "0", "1", "1024", "1025"),
        ("--noise-threads", "255", "256", "4096", "4097"),
        ("--device", "-1", "0", "1023", "1024"),
        ("--seed", "-1", "0", "18446744073709551615", "18446744073709551616"),
        ("--guidance", "-0.0001", "0", "100", "100.0001"),
        ("--megapixels", "0.0099", "0.01", "12.5", "12.51"),
        ("--width", "63", "64", "16384", "16385"),
        ("--width", "48", "64", "16384", "16400"),
        ("--height", "63", "64", "16384", "16385"),
        ("--height", "48", "64", "16384", "16400"),
    ];
    for (flag, below, least, most, above) in table {
        assert_eq!([least, most].map(|value| outcome(flag, value)), [None; 2], "{flag}");
        for value in whole.into_iter().chain([below, above, "-1", "18446744073709551616", "99999999999999999999999"]) {
            // Only these numbers may have a fraction or an exponent.
            let scale = ["--guidance", "--megapixels"].contains(&flag) && ["1e1", "1.0"].contains(&value);
            assert_eq!(outcome(flag, value), (!scale).then_some(2), "{flag} {value:?}");
        }
    }
    // The table has every flag that takes a number.
    let numeric: Vec<String> = Cli::command()
        .get_arguments()
        .filter(|arg| arg.get_value_names().is_some_and(|names| ["N", "PIXELS", "SCALE"].contains(&names[0].as_str())))
        .map(|arg| format!("--{}", arg.get_long().unwrap()))
        .collect();
    for flag in &numeric {
        assert!(table.iter().any(|(listed, ..)| listed == flag), "{flag}");
    }
    assert_eq!(numeric.len(), 12);
}
