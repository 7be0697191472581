//! The bodies of the fuzz targets: what is done with an input, and what has to be true of the result. A target panics where it finds a bug.
//!
//! The libFuzzer programs in `fuzz/bins` and the test that replays `fuzz/corpus` call the same functions. Most inputs are not the bytes of
//! a file but what a file is made from, so that a small change of an input is a small change of what the file says: lengths, checksums and
//! compression are filled in. A target says in its comment how.

mod adapters;
mod command_line;
mod configs;
mod encoders;
mod images;
mod journals;
mod metadatas;
mod pngs;
mod tokenizers;
mod webps;
mod weights;

pub use adapters::adapter;
pub use command_line::{arguments, line, values};
pub use common::cost::Counting;
pub use configs::config;
pub use encoders::encode;
pub use images::jpeg;
pub use journals::journal;
pub use metadatas::metadata;
pub use pngs::png;
pub use tokenizers::{tekken, tokenizer};
pub use webps::webp;
pub use weights::{quantization, safetensors};

use common::cost::peak_of;
use kiln::error::Error;
use kiln::metadata::{Maker, StoredText};
use kiln::text::shown_line;
use kiln_program::cli;
use std::path::Path;

/// What a target does with an input.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Target); 15] = [
    ("adapter", adapter),
    ("arguments", arguments),
    ("config", config),
    ("encode", encode),
    ("journal", journal),
    ("jpeg", jpeg),
    ("line", line),
    ("metadata", metadata),
    ("png", png),
    ("quantization", quantization),
    ("safetensors", safetensors),
    ("tekken", tekken),
    ("tokenizer", tokenizer),
    ("values", values),
    ("webp", webp),
];

/// The longest input. What a parser does with a long file it does with a short one, and slower.
pub const LONGEST: usize = 64 << 10;

/// Runs a target, unless the input is too long.
pub fn run(target: Target, data: &[u8]) {
    if data.len() <= LONGEST {
        target(data);
    }
}

/// Checks an error about what others wrote: it is no bug of kiln, and what it shows of a file is harmless to a terminal.
fn check_error(error: &Error, codes: &[u8]) {
    let message = cli::message(error);
    assert!(codes.contains(&error.exit_code()), "exit code {} for: {message}", error.exit_code());
    assert!(!message.ends_with("the decoder gave up on it"), "a decoder panicked: {message}");
    for text in [Some(message), cli::hint(error)].into_iter().flatten() {
        assert_eq!(text, shown_line(&text), "a message shows what a terminal interprets");
    }
}

/// Checks an error about a file.
fn check_file_error(error: &Error) {
    check_error(error, &[3]);
}

/// Reads the text of an image file, which takes little memory whatever it says.
fn check_texts(file: &[u8]) {
    let read = || -> kiln::Result<usize> {
        let text = StoredText::of_file(file, Path::new("x"))?;
        drop((Maker::of(&text), text.metadata()));
        Ok(text.notes().len())
    };
    let (notes, peak) = peak_of(read);
    assert!(peak <= 1 << 20, "{peak} bytes for text");
    match notes {
        Ok(notes) => assert!(notes <= 20, "{notes} notes"),
        Err(error) => check_file_error(&error),
    }
}

/// The bytes of an input, one value after the other; zeros behind its end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let taken = self.take(N);
        out[..taken.len()].copy_from_slice(taken);
        out
    }

    /// The next bytes, fewer at the end.
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// The bytes up to the next line feed, or to the end.
    fn line(&mut self) -> &'a [u8] {
        let length = self.0.iter().position(|byte| *byte == b'\n').unwrap_or(self.0.len());
        let taken = self.take(length);
        self.take(1);
        taken
    }

    /// What is left, repeated to `count` bytes; zeros if nothing is left.
    fn repeated(&self, count: usize) -> Vec<u8> {
        let bytes = if self.0.is_empty() { &[0][..] } else { self.0 };
        bytes.iter().copied().cycle().take(count).collect()
    }
}
