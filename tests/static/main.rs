//! Rules about the source itself: allowed dependencies of modules, places of `unsafe`, file lengths, public items. Also checks the
//! compiled kernels. The compiler checks that the library does not call the program, because the program is a crate of its own.

mod english;
mod kernels;
mod library;
mod links;
mod vocabulary;

use std::path::{Path, PathBuf};

/// The most lines of a file.
const MAX_LINES: usize = 600;

/// Source files below a folder.
fn sources(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, extensions, found);
        } else if extensions.contains(&entry.extension().unwrap_or_default().to_str().unwrap_or_default()) {
            found.push(entry);
        }
    }
}

/// The files of the library with their paths below `src`, without the program's.
fn library() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &["rs"], &mut files);
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        (name, std::fs::read_to_string(&path).unwrap())
    };
    let files: Vec<_> = files.into_iter().map(read).filter(|(name, _)| !name.starts_with("bin/")).collect();
    assert!(files.len() > 100, "{} files", files.len());
    files
}

/// The lines of a file that are neither comments nor unit tests, with their numbers.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    code.lines().enumerate().map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim_start().starts_with("//"))
}

/// The module at the crate's root that contains a file.
fn module(path: &str) -> &str {
    path.split(['/', '.']).next().unwrap_or_default()
}

#[test]
fn pure_modules_stay_pure() {
    let pure = |path: &str| ["sequence", "sampler", "noise"].contains(&module(path));
    let system = ["std::fs", "std::env", "crate::files", "crate::checkpoint", "crate::backend"];
    let backends = ["backend::cpu", "backend::cuda", "backend::plan", "backend::lockstep", "std::fs", "std::env"];
    let mut seen = 0;
    for (path, text) in library() {
        let words = if pure(&path) { &system[..] } else { &backends };
        if pure(&path) || module(&path) == "model" {
            seen += 1;
            for (line, code) in code(&text) {
                assert!(!words.iter().any(|word| code.contains(word)), "{path}:{line}: a pure module uses `{}`", code.trim());
            }
        }
    }
    assert!(seen > 12, "only {seen} files were looked at");
}

/// Whether a line of code spells a flag in a string, such as `"use --width"`.
fn spells_a_flag(line: &str) -> bool {
    let mut texts = line.split('"').skip(1).step_by(2);
    texts.any(|text| {
        text.match_indices("--").any(|(at, _)| {
            let before = text[..at].chars().next_back();
            before.is_none_or(|c| c == ' ' || c == '(') && text[at + 2..].starts_with(|c: char| c.is_ascii_lowercase())
        })
    })
}

/// Whether a line names what only the program may name: its flags in strings, its commands, modules and terminal anywhere.
fn names_the_program(line: &str) -> bool {
    let commands = ["generate", "run", "bench", "plan", "doctor", "lora", "tiny", "selftest", "quantize", "completions", "man"];
    let is_command =
        |rest: &str| commands.iter().any(|command| rest.split(|c: char| !c.is_alphanumeric()).next() == Some(command));
    // "kiln runs on" is a sentence, `kiln run` is a command.
    line.match_indices("kiln ").any(|(at, word)| is_command(&line[at + word.len()..]))
        || ["cli::", "terminal::", "Terminal", "command line"].iter().any(|word| line.contains(word))
        || spells_a_flag(line)
}

#[test]
fn only_the_program_names_flags_and_commands() {
    assert!(spells_a_flag(r#"    Some("use --force or another name".into())"#) && spells_a_flag(r#"("--vae")"#));
    assert!(!spells_a_flag(r#"format!("{a}--{b} models--x")"#));
    assert!(names_the_program("/// What `kiln bench` shows.") && names_the_program(r#"hint("kiln doctor lists the GPUs")"#));
    assert!(!names_the_program("/// kiln runs klein, and kiln planned it."));
    for (path, text) in library() {
        for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
            assert!(!names_the_program(line), "src/{path}:{number} names what only the program knows: {}", line.trim());
        }
    }
}

#[test]
fn unsafe_code_stands_where_it_is_allowed() {
    let allowed = [
        "backend/cpu.rs",
        "backend/cuda/launch.rs",
        "backend/cuda/staging.rs",
        "backend/cuda/system.rs",
        "checkpoint/guard.rs",
        "checkpoint/guard/bus.rs",
        "numerics/view.rs",
    ];
    // The lint `unsafe_code` is an error everywhere else.
    let mut found: Vec<String> =
        library().into_iter().filter(|(_, text)| text.contains("allow(unsafe_code)")).map(|(path, _)| path).collect();
    found.sort();
    assert_eq!(found, allowed);
}

/// The dependencies of a section of Cargo.toml, with their lines.
fn dependencies<'a>(manifest: &'a str, section: &str) -> Vec<(&'a str, &'a str)> {
    let after = manifest.split(&format!("\n[{section}]\n")).nth(1).unwrap_or_else(|| panic!("no [{section}]"));
    let lines = after.split("\n[").next().unwrap().lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once('=').map(|(name, rest)| (name.trim().trim_end_matches(".workspace"), rest))).collect()
}

/// We know what we build from: few crates, each with a reason, and none of the server's without the server.
#[test]
fn dependencies_are_few_and_have_reasons() {
    let read = |name: &str| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
    let (manifest, lock, guide) = (read("Cargo.toml"), read("Cargo.lock"), read("CONTRIBUTING.md"));
    let sections = ["dependencies", "target.'cfg(target_os = \"linux\")'.dependencies", "target.'cfg(unix)'.dependencies"];
    let direct: Vec<_> = sections.iter().flat_map(|section| dependencies(&manifest, section)).collect();
    assert!((15..=30).contains(&direct.len()), "{} direct dependencies", direct.len());
    let all = lock.matches("\n[[package]]\n").count();
    assert!((100..=200).contains(&all), "{all} crates in Cargo.lock");
    let table = guide.split("\n## Dependencies\n").nth(1).unwrap();
    for (name, _) in direct.iter().filter(|(name, _)| *name != "kiln-numerics") {
        assert!(table.contains(&format!("`{name}`")), "CONTRIBUTING.md does not say what {name} is for");
    }
    let feature = |name: &str| {
        let line = manifest.lines().find(|line| line.starts_with(&format!("{name} = [")));
        line.unwrap_or_else(|| panic!("no feature {name}")).to_owned()
    };
    let server = ["futures-util", "hyper", "hyper-util", "multer", "tokio"];
    for (name, rest) in direct.iter().filter(|(name, _)| server.contains(name)) {
        assert!(rest.contains("optional = true") && feature("serve").contains(&format!("\"dep:{name}\"")), "{name}");
        assert!(!feature("cli").contains(name) && !feature("builtin").contains(name), "{name}");
    }
}

#[test]
fn files_can_be_read_in_one_sitting() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![root.join("build.rs")];
    for folder in ["src", "tests", "bench", "build", "kernels"] {
        sources(&root.join(folder), &["rs", "cu", "cuh", "h", "cpp"], &mut files);
    }
    let lines = |path: &PathBuf| std::fs::read_to_string(path).unwrap().lines().count();
    let long: Vec<String> = files
        .iter()
        .filter(|path| lines(path) > MAX_LINES)
        .map(|path| format!("{} has {} lines", path.strip_prefix(root).unwrap().display(), lines(path)))
        .collect();
    assert!(long.is_empty(), "more than {MAX_LINES} lines: {}", long.join(", "));
}
