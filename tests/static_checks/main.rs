//! Rules about the source itself: who may use whom, where `unsafe` may stand, and how long a file may be.

mod imports;
mod vocabulary;

use imports::Crate;
use std::path::{Path, PathBuf};

/// Most lines of a file.
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

/// Everything below `src`.
fn code() -> Crate {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &["rs"], &mut files);
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        (name, std::fs::read_to_string(&path).unwrap())
    };
    let files: Vec<_> = files.into_iter().map(read).collect();
    assert!(files.len() > 100, "{} files", files.len());
    Crate::new(&files)
}

/// The module at the crate's root that a file belongs to.
fn module(path: &str) -> &str {
    path.split(['/', '.']).next().unwrap_or_default()
}

#[test]
fn modules_use_only_what_is_below_them() {
    // From the bottom up: a module may use those before it in this list, and itself.
    let order = [
        "text",
        "trace",
        "words",
        "files",
        "memory",
        "part",
        "error",
        "threads",
        "tensor",
        "progress",
        "output",
        "sequence",
        "sampler",
        "noise",
        "tokenizer",
        "image",
        "reference",
        "backend",
        "microbench",
        "names",
        "checkpoint",
        "adapter",
        "config",
        "locate",
        "model",
        "tiny",
        "dump",
        "pipeline",
        "service",
        "quantise",
        "inspect",
        "predict",
        "selftest",
        "terminal",
        "cli",
        "lib",
        "builtin",
        "allocator",
        "main",
    ];
    let rank = |m: &str| order.iter().position(|o| *o == m).unwrap_or_else(|| panic!("module `{m}` has no place in the order"));
    let code = code();
    let mut seen = 0;
    for (path, used) in code.named().filter_map(|(path, used)| Some((path, used.first()?))) {
        assert!(rank(used) <= rank(module(path)), "{path} uses `{used}`, which is above it");
        seen += 1;
    }
    assert!(seen > 1000, "only {seen} names were found");
}

#[test]
fn files_form_no_circle() {
    let code = code();
    let uses = code.uses();
    assert!(uses.len() > 300, "only {} imports were found", uses.len());
    let circles: Vec<String> = code
        .circles()
        .iter()
        .map(|circle| {
            let within = uses.iter().filter(|(a, b)| circle.contains(a) && circle.contains(b));
            within.map(|(a, b)| format!("{a} -> {b}")).collect::<Vec<_>>().join(", ")
        })
        .collect();
    assert!(circles.is_empty(), "files that use each other in a circle:\n{}", circles.join("\n"));
}

#[test]
fn pure_modules_stay_pure() {
    let code = code();
    for (path, used) in code.uses() {
        if ["sequence", "sampler", "noise"].contains(&module(path)) {
            assert!(!["backend", "checkpoint", "files"].contains(&module(used)), "{path} uses {used}");
        }
        if module(path) == "model" {
            let backends = ["backend/cpu", "backend/cuda", "backend/plan", "backend/lockstep"];
            assert!(!backends.iter().any(|backend| used.starts_with(backend)), "{path} names a backend: {used}");
        }
    }
    for path in [code.with_token("fs"), code.with_token("env")].concat() {
        assert!(!["sequence", "sampler", "noise", "model"].contains(&module(path)), "{path} looks at the system it runs on");
    }
}

/// Whether a line of code has a flag in a text, such as `"use --width"`.
fn spells_a_flag(line: &str) -> bool {
    let mut texts = line.split('"').skip(1).step_by(2);
    texts.any(|text| {
        text.match_indices("--").any(|(at, _)| {
            let before = text[..at].chars().next_back();
            before.is_none_or(|c| c == ' ' || c == '(') && text[at + 2..].starts_with(|c: char| c.is_ascii_lowercase())
        })
    })
}

#[test]
fn only_the_command_line_spells_flags() {
    assert!(spells_a_flag(r#"    Some("use --force or another name".into())"#) && spells_a_flag(r#"("--vae")"#));
    assert!(!spells_a_flag(r#"format!("{a}--{b} models--x")"#));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &["rs"], &mut files);
    for path in files {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let flags: Vec<&str> = lines.filter(|line| spells_a_flag(line)).collect();
        assert!(flags.is_empty() || module(name) == "cli", "{name} names flags, which only `cli` knows: {flags:?}");
    }
}

#[test]
fn unsafe_code_stands_where_it_is_allowed() {
    let allowed = [
        "allocator.rs",
        "backend/cpu/mod.rs",
        "backend/cpu/view.rs",
        "backend/cuda/launch.rs",
        "backend/cuda/staging.rs",
        "backend/cuda/system.rs",
        "checkpoint/guard.rs",
        "checkpoint/guard/bus.rs",
    ];
    let code = code();
    let found = code.with_token("unsafe");
    assert!(found.contains(&"backend/cpu/view.rs"), "{found:?}");
    for path in found {
        assert!(allowed.contains(&path), "{path} has unsafe code");
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

/// A crate of a few short files.
fn planted(files: &[(&str, &str)]) -> Crate {
    Crate::new(&files.iter().map(|(path, text)| ((*path).into(), (*text).into())).collect::<Vec<_>>())
}

#[test]
fn imports_are_found_however_they_are_written() {
    let files =
        [("lib.rs", "pub mod a;\npub mod b;"), ("a.rs", "mod c; pub use c::{C, self as see};"), ("a/c.rs", "pub struct C;")];
    for text in [
        "use crate::a::C;",
        "use crate::{b, a::{self, C}};",
        "use super::a::C;",
        "use super::{a::see::C as D};",
        "use crate::a; fn f() { a::C::new() }",
        "fn f() -> Option<crate::a::C> { None }",
        "mod inner { use super::super::a::C; }",
        "fn f() { let text = \"\\\"//\"; crate::a::see::f(text) }",
    ] {
        let code = planted(&[&files[..], &[("b.rs", text)]].concat());
        assert!(code.uses().contains(&("b.rs", "a/c.rs")), "{text}: {:?}", code.uses());
    }
    for text in [
        "// use crate::a::C;",
        "/* crate::a::C */",
        "const TEXT: &str = \"crate::a::C\"; const RAW: &str = r#\"crate::a::\"C\"#;",
        "#[cfg(test)] mod tests { use crate::a::C; } fn f<'a>(x: &'a u8) -> char { '\"' }",
        "use std::a::C;",
    ] {
        let code = planted(&[&files[..], &[("b.rs", text)]].concat());
        assert!(!code.uses().iter().any(|(user, _)| *user == "b.rs"), "{text}: {:?}", code.uses());
    }
}

#[test]
fn circles_are_found() {
    let root = ("lib.rs", "pub mod a; pub mod b; pub mod c;");
    for (files, circle) in [
        (&[("a.rs", "use crate::b::B;"), ("b.rs", "use crate::c::C;"), ("c.rs", "use super::{a::A};")][..], "a.rs b.rs c.rs"),
        (&[("a.rs", "mod x; mod y;"), ("a/x.rs", "use super::y::Y;"), ("a/y.rs", "fn f() { super::x::f() }")], "a/x.rs a/y.rs"),
        // Through names that the module hands on.
        (
            &[("a.rs", "mod x; mod y; pub use x::X; pub use y::Y;"), ("a/x.rs", "use super::Y;"), ("a/y.rs", "use crate::a::X;")],
            "a/x.rs a/y.rs",
        ),
        (&[("a.rs", "mod x; use x::X;"), ("a/x.rs", "use crate::b::B;"), ("b.rs", "use crate::a::A;")], "a.rs a/x.rs b.rs"),
        // A child that uses what its parent defines is no circle, nor is a straight line.
        (&[("a.rs", "mod x; use x::X;"), ("a/x.rs", "use super::A;")], ""),
        (&[("a.rs", "use crate::b::B; use crate::c::C;"), ("b.rs", "use crate::c::C;"), ("c.rs", "")], ""),
    ] {
        let code = planted(&[&[root], files].concat());
        let found: Vec<String> = code.circles().iter().map(|circle| circle.join(" ")).collect();
        assert_eq!(found.join(", "), circle);
    }
}
