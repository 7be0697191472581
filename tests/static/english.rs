//! Plain English, as far as a program can count it: phrases that make a reader look for a noun, doc comments that begin in the middle,
//! and sentences that are too long.

use super::{links, sources};
use common::english::{long_sentences, paragraphs};
use std::path::{Path, PathBuf};

/// Phrases that are seldom the best, and how often `src` has them. The numbers may only fall.
const PHRASES: [(&[&str], usize); 2] =
    [(&["that of", "those of", "the one of", "the ones of", "that which"], 0), (&["beside", "besides"], 2)];

/// Words that no help, message or document has, with the words to use.
const WORDS: [(&str, &str); 2] = [("picture", "image"), ("pictures", "images")];

/// How no doc comment begins.
const BEGINNINGS: [&str; 4] = ["That", "Those", "Of", "The same"];

/// How often a text has one of some phrases, as whole words in any case.
fn count(text: &str, phrases: &[&str]) -> usize {
    // Words may be on two lines, with a comment's marks between them.
    let words = |line: &str| line.trim_start().trim_start_matches(['/', '!', '#']).trim().to_lowercase();
    let text = text.lines().map(words).collect::<Vec<_>>().join(" ");
    let is_whole = |at: usize, phrase: &str| {
        !text[..at].ends_with(char::is_alphanumeric) && !text[at + phrase.len()..].starts_with(char::is_alphanumeric)
    };
    let times = |phrase: &&str| text.match_indices(*phrase).filter(|(at, _)| is_whole(*at, phrase)).count();
    phrases.iter().map(times).sum()
}

/// The lines of comments in a source, each with its number and whether a comment or one of its paragraphs begins there.
fn comments(text: &str) -> Vec<(usize, &str, bool)> {
    let (mut found, mut inside) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line.trim_start())) {
        let marks = ["///", "//!", "//", "/**", "/*", "#"];
        let comment =
            marks.iter().find_map(|mark| line.strip_prefix(mark)).filter(|rest| rest.is_empty() || rest.starts_with(' '));
        let words = comment.map(str::trim).filter(|words| !words.is_empty());
        if let Some(words) = words {
            found.push((number, words, !inside));
        }
        inside = words.is_some();
    }
    found
}

/// Whether a comment begins as none does.
fn begins_in_the_middle(comment: &str) -> bool {
    let continues = |start: &&str| comment.strip_prefix(*start).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric));
    BEGINNINGS.iter().any(continues)
}

fn all(folders: &[&str], extensions: &[&str]) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    folders.iter().for_each(|folder| sources(&root.join(folder), extensions, &mut files));
    let skipped = ["static/english.rs", "static/vocabulary.rs"];
    files
        .retain(|path| !skipped.iter().any(|end| path.ends_with(end)) && !path.components().any(|c| c.as_os_str() == "fixtures"));
    let read = |path: PathBuf| (path.strip_prefix(root).unwrap().display().to_string(), std::fs::read_to_string(&path).unwrap());
    files.into_iter().map(read).collect()
}

#[test]
fn old_phrases_become_fewer() {
    let files = all(&["src"], &["rs"]);
    for (phrases, limit) in PHRASES {
        let found: usize = files.iter().map(|(_, text)| count(text, phrases)).sum();
        assert!(
            found <= limit,
            "src has {found} of {phrases:?} instead of {limit}: repeat the noun, or say next to, compared with, ..."
        );
        assert!(found == limit, "src has only {found} of {phrases:?}: lower the limit of {limit} in PHRASES");
    }
}

#[test]
fn doc_comments_begin_with_a_noun_or_a_verb() {
    let files = all(&["src", "kernels", "tests", "tools"], &["rs", "cu", "cuh", "h", "cpp", "def", "py", ""]);
    assert!(files.len() > 300, "only {} files were looked at", files.len());
    let faults = |(path, text): &(String, String)| {
        let begins = comments(text).into_iter().filter(|(_, words, first)| *first && begins_in_the_middle(words));
        begins.map(|(line, words, _)| format!("{path}:{line}: {words}")).collect::<Vec<_>>()
    };
    let found: Vec<_> = files.iter().flat_map(faults).collect();
    assert!(found.is_empty(), "say what the thing is, or what it is for:\n{}", found.join("\n"));
}

#[test]
fn messages_and_documents_use_one_word() {
    let pages = links::pages().into_iter().map(|(path, text)| (path.display().to_string(), text));
    let data = |path: &str| path.starts_with("bench/results") || path == "bench/LOG.md";
    for (path, text) in all(&["src"], &["rs"]).into_iter().chain(pages.filter(|(path, _)| !data(path))) {
        // Recorded results have names and keys of their time.
        let is_recorded = |line: &&str| line.contains("bench/results") || line.contains("serde(alias");
        let text: String = text.lines().filter(|line| !is_recorded(line)).collect::<Vec<_>>().join("\n");
        for (word, instead) in WORDS {
            assert!(count(&text, &[word]) == 0, "{path} says \"{word}\": the word is \"{instead}\"");
        }
    }
}

#[test]
fn sentences_of_documents_are_short() {
    let mut found = Vec::new();
    for (path, text) in links::pages() {
        let path = path.display().to_string();
        if !path.starts_with("bench/results") && path != "bench/LOG.md" {
            for (line, paragraph) in paragraphs(&text) {
                found.extend(
                    long_sentences(&paragraph).into_iter().map(|(words, text)| format!("{path}:{line}: {words} words: {text}")),
                );
            }
        }
    }
    assert!(found.is_empty(), "{} sentences are too long:\n{}", found.len(), found.join("\n"));
}

#[test]
fn phrases_and_beginnings_are_found() {
    assert_eq!(count("/// Less than that\n/// of a tile, those of thatof", &["that of", "those of"]), 2);
    assert!(begins_in_the_middle("Of a tile.") && begins_in_the_middle("The same for rows."));
    assert!(!begins_in_the_middle("Offset of a tile.") && !begins_in_the_middle("Thatched."));
    let text = "/// One\n/// Of two.\n\n/// Three.\n///\n/// Those four.\n#[test]\n# five";
    let first: Vec<_> = comments(text).into_iter().filter(|(_, _, first)| *first).map(|(line, ..)| line).collect();
    assert_eq!(first, [1, 4, 6, 8]);
}

#[test]
fn words_are_counted() {
    let sentence = |n: usize| vec!["word"; n].join(" ") + ".";
    assert_eq!(long_sentences(&format!("{} {}", sentence(35), sentence(35))), []);
    assert_eq!(long_sentences(&format!("{} {}", sentence(3), sentence(36)))[0].0, 36);
    // A list of code is one word, a link's target none.
    let list = "`a`, `b c` and `d`";
    assert_eq!(long_sentences(&format!("{list} [one](two/three.md#four) - {}", sentence(33))), []);
    assert_eq!(long_sentences(&format!("{list} [one](two/three.md#four) {}", sentence(34)))[0].0, 36);
}

#[test]
fn paragraphs_of_a_page_are_found() {
    let page = "# Title\n\nOne\ntwo.\n\n    code\n\n- three\n  four\n- five\n\n| a | b |\n\n```\nmore code\n```\n1. six\n";
    let found: Vec<_> = paragraphs(page).into_iter().map(|(line, text)| format!("{line} {text}")).collect();
    assert_eq!(found, ["3 One two.", "8 three four", "10 five", "17 six"]);
}
