//! Keeps the field's terms: lists phrases and identifiers that kiln once used for things that the field has a name for. They mean
//! nothing else here. The test names the term to use instead.

use super::sources;
use std::path::{Path, PathBuf};

/// Replaced words, and what to write instead. They match literally, but ignore case.
const REPLACED: &[(&str, &str)] = &[
    ("copy engine", "TMA"),
    ("as many blocks as multiprocessors", "persistent CTAs, one per SM"),
    ("the one thread that copies", "the producer"),
    ("KlDeal", "KlTileSchedule"),
    ("kHalves", "kSplitK"),
    ("give_registers", "setmaxnreg_dec"),
    ("take_registers", "setmaxnreg_inc"),
    ("meet_wait", "named_barrier_sync"),
    ("meet_arrive", "named_barrier_arrive"),
    ("soften", "online_softmax"),
    ("no maximum is sought", "max-free softmax"),
    ("runs of keys", "KV segments"),
    ("word of faults", "device fault flags"),
    ("fault word", "device fault flags"),
    ("plain cores", "CUDA cores"),
    ("obvious kernel", "naive kernel"),
    ("so manieth", "every n-th"),
    ("gates beside their ups", "gate/up interleaved"),
    ("Stretches", "QkGain"),
    ("slowness", "relative_cost"),
    ("GemmSm90Large", "a tile is called by its numbers"),
    ("GemmSm90Square", "a tile is called by its numbers"),
    ("GemmSm90Wide", "a tile is called by its numbers"),
    ("GemmSm90Broad", "a tile is called by its numbers"),
    ("GemmSm90Medium", "a tile is called by its numbers"),
    ("GemmSm90Narrow", "a tile is called by its numbers"),
    ("what people see", "display name"),
    ("name for people", "display name"),
    ("say_which", "announce_model"),
    ("say_unknown", "announce_unknown_words"),
    ("OpenReference", "another name for each stage of a reference"),
    ("KlProduct", "KlNaiveGemm"),
    ("kl_naive_product", "kl_naive_gemm"),
    ("kl_head_norm", "kl_qk_norm_rope"),
    ("work_sm90", "persistent/scheduler.cuh"),
    ("deal_to_clusters", "persistent_stream_k"),
    ("GatedProduct", "GatedGemm"),
    ("half_split_table", "rope_table_1d"),
    ("set_recording", "set_graph_capture"),
    ("nameless", "tmpfile"),
    ("store_in_block", "st.async to a CTA's shared memory"),
    ("term of low rank", "LoRA branch"),
    ("terms of low rank", "LoRA branches"),
    ("ScaledTerm", "ScaledDelta"),
    ("LayerPlace", "LayerId"),
    ("ShapeArgs", "ImageOptions"),
    ("--beside", "--compare"),
    ("tiles.def", "kernels.def"),
    ("GemmMma", "GemmBf16Sm80"),
    ("posing_as", "with_capability"),
    ("--card", "--gpu"),
    ("rehears", "KernelPreload, preload_kernels"),
    ("SequencePlan", "SequenceLayout"),
    ("keep_results", "cache_results"),
    ("Region::Kept", "Region::Cache"),
    ("WeightPart", "WeightSlice"),
    ("PartScaling", "SliceScaling"),
    ("PerPart", "PerComponent"),
    ("PartSource", "ComponentSource"),
    ("first_tap", "first_text_layer"),
    ("Conventions", "ModelDefaults"),
    ("--klein", "--model klein-9b"),
    ("quantis", "quantiz"),
    ("normalis", "normaliz"),
    ("initialis", "initializ"),
    ("serialis", "serializ"),
    ("optimis", "optimiz"),
    ("recognis", "recogniz"),
    ("colour", "color"),
    ("clang-format", "lines are broken by hand"),
];

/// Folders with text of the project; recorded results, fixtures and corpora are data.
const FOLDERS: [&str; 11] = [".ci", ".github", "bench", "build", "docs", "examples", "fuzz", "kernels", "src", "tests", "tools"];

/// The extensions of the files that the test reads; scripts have none.
const EXTENSIONS: [&str; 11] = ["rs", "cu", "cuh", "h", "cpp", "py", "md", "toml", "yml", "txt", ""];

/// All texts of the project but this one.
fn texts(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in FOLDERS {
        sources(&root.join(folder), &EXTENSIONS, &mut found);
    }
    let top = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    found.extend(top.filter(|path| path.extension().is_some_and(|e| ["md", "rs", "toml"].iter().any(|own| e == *own))));
    let is_data = |path: &Path| {
        path.components().any(|part| ["results", "fixtures", "corpus"].iter().any(|data| part.as_os_str() == *data))
    };
    // Words of prompts are data as well.
    let other = ["static/vocabulary.rs", "bench/LOG.md", "calibrate/prompts.txt", "train_builtin/tokenizer.py"];
    found.retain(|path| !is_data(path.strip_prefix(root).unwrap()) && !other.iter().any(|end| path.ends_with(end)));
    found
}

/// The lines of a text that hold a replaced word, with the term to use instead.
fn faults(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let lower: Vec<String> = text.lines().map(str::to_lowercase).collect();
    let found = |(word, term): &(&'static str, &'static str)| {
        let needle = word.to_lowercase();
        let lines = lower.iter().enumerate().filter(|(_, line)| line.contains(&needle));
        lines.map(|(i, _)| (i + 1, *word, *term)).collect::<Vec<_>>()
    };
    REPLACED.iter().flat_map(found).collect()
}

#[test]
fn the_field_has_words_for_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = texts(root);
    assert!(files.len() > 150, "only {} files were looked at", files.len());
    let mut list = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        for (line, word, term) in faults(&text) {
            list.push(format!("{}:{line}: \"{word}\" is called {term}", path.strip_prefix(root).unwrap().display()));
        }
    }
    assert!(list.is_empty(), "{}", list.join("\n"));
}

#[test]
fn a_replaced_word_is_found() {
    let text = "The TMA brings a tile.\nThe Copy Engine brings a tile.\n";
    assert_eq!(faults(text), [(2, "copy engine", "TMA")]);
}
