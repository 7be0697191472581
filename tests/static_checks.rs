//! Rules about the source itself: who may use whom, and where `unsafe` may stand.

use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, found);
        } else if entry.extension().is_some_and(|e| e == "rs") {
            found.push(entry);
        }
    }
}

/// Every source file's path below `src`, with its text up to the unit tests, comments left out.
fn code() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    files
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            let lines = text.lines().filter(|l| !l.trim_start().starts_with("//"));
            (path.strip_prefix(&root).unwrap().display().to_string(), lines.collect::<Vec<_>>().join("\n"))
        })
        .collect()
}

/// The first name after `crate::` of everything a file mentions.
fn uses(code: &str) -> Vec<&str> {
    code.match_indices("crate::")
        .map(|(at, found)| {
            let rest = &code[at + found.len()..];
            &rest[..rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())]
        })
        .collect()
}

fn module(path: &str) -> &str {
    path.split(['/', '.']).next().unwrap_or_default()
}

#[test]
fn modules_use_only_what_is_below_them() {
    // From the bottom up: a module may use those before it in this list, and itself.
    let order = [
        "text",
        "words",
        "files",
        "memory",
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
        "config",
        "locate",
        "model",
        "tiny",
        "dump",
        "pipeline",
        "terminal",
        "cli",
        "lib",
        "builtin",
        "allocator",
        "main",
    ];
    let rank = |m: &str| order.iter().position(|o| *o == m).unwrap_or_else(|| panic!("module `{m}` has no place in the order"));
    for (path, code) in code() {
        let this = module(&path);
        for used in uses(&code) {
            assert!(rank(used) <= rank(this), "{path} uses `{used}`, which is above it");
        }
    }
}

#[test]
fn pure_modules_stay_pure() {
    for (path, code) in code() {
        if ["sequence", "sampler", "noise"].contains(&module(&path)) {
            for word in ["std::fs", "std::env", "crate::backend", "crate::checkpoint"] {
                assert!(!code.contains(word), "{path} mentions {word}");
            }
        }
        if module(&path) == "model" {
            assert!(!code.contains("backend::cpu") && !code.contains("std::fs"), "{path} knows where it runs");
        }
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
    for (path, code) in code() {
        let unsafe_code = code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl");
        assert!(!unsafe_code || allowed.contains(&path.as_str()), "{path} has unsafe code");
    }
}

#[test]
fn files_can_be_read_in_one_sitting() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "tests", "bench"] {
        let mut files = Vec::new();
        if root.join(folder).exists() {
            sources(&root.join(folder), &mut files);
        }
        for path in files {
            let lines = std::fs::read_to_string(&path).unwrap().lines().count();
            assert!(lines <= 700, "{} has {lines} lines", path.display());
        }
    }
}
