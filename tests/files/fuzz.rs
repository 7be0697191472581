//! Replays the corpora of the fuzz targets, and checks that the parts of `fuzz/` fit together.

use kiln_fuzz_targets::{TARGETS, Target, run};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The most bytes of all corpora.
const MOST: u64 = 1_000_000;

fn folder(name: &str) -> PathBuf {
    common::root().join("fuzz").join(name)
}

/// The inputs in the corpus of a target, in order.
fn inputs(target: &str) -> Vec<PathBuf> {
    let list = std::fs::read_dir(folder("corpus").join(target)).unwrap_or_else(|error| panic!("{target}: {error}"));
    let mut list: Vec<PathBuf> = list.map(|entry| entry.unwrap().path()).collect();
    list.sort();
    list
}

#[test]
fn every_input_of_the_corpora_passes() {
    let all: Vec<(Target, PathBuf)> =
        TARGETS.into_iter().flat_map(|(name, target)| inputs(name).into_iter().map(move |path| (target, path))).collect();
    let (next, start) = (AtomicUsize::new(0), Instant::now());
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(8));
    // Threads of their own: one of rayon's would count the memory of another input while it waits.
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((target, path)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let data = std::fs::read(path).unwrap();
                    let passed = catch_unwind(AssertUnwindSafe(|| run(*target, &data)));
                    assert!(passed.is_ok(), "{} fails", path.display());
                }
            });
        }
    });
    println!("{} inputs in {:.1} s", all.len(), start.elapsed().as_secs_f64());
    assert!(all.len() > 150, "{}", all.len());
}

#[test]
fn every_target_has_a_program_a_corpus_and_a_dictionary() {
    let manifest = std::fs::read_to_string(folder("Cargo.toml")).unwrap();
    let mut bytes = 0;
    for (target, _) in TARGETS {
        assert!(manifest.contains(&format!("path = \"bins/{target}.rs\"")), "{target} is not in fuzz/Cargo.toml");
        let program = std::fs::read_to_string(folder("bins").join(format!("{target}.rs"))).unwrap();
        assert!(program.contains(&format!("program!({target})")), "{program}");
        assert!(folder("dict").join(format!("{target}.dict")).exists(), "{target}");
        let inputs = inputs(target);
        assert!(!inputs.is_empty(), "{target}");
        bytes += inputs.iter().map(|path| path.metadata().unwrap().len()).sum::<u64>();
    }
    assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
    assert!(bytes <= MOST, "the corpora have {bytes} bytes; `fuzz/run --keep` shrinks them");
}

#[derive(serde::Deserialize)]
struct Planted {
    target: String,
    file: PathBuf,
    text: String,
    bug: String,
}

#[test]
fn bugs_can_be_planted() {
    let list: Vec<Planted> = serde_json::from_slice(&std::fs::read(folder("planted.json")).unwrap()).unwrap();
    for Planted { target, file, text, bug } in &list {
        assert!(TARGETS.iter().any(|(name, _)| name == target), "{target}");
        let source = std::fs::read_to_string(common::root().join(Path::new(file))).unwrap();
        assert_eq!(source.matches(text.as_str()).count(), 1, "{}: {text}", file.display());
        assert_ne!(text, bug);
    }
    assert!(list.len() >= 3);
}
