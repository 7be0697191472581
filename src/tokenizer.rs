//! Encodes a prompt to the token ids of the text encoder: chat template, byte-level BPE, fixed length.
//!
//! Qwen3 vocabularies are encoded by the `tokenizers` crate, with a model's own `tokenizer.json` or with the built-in one. That
//! file is as untrusted as the model, and the crate was not written for hostile files. So `file` parses it, and every call into
//! the crate goes through `isolated`. Mistral's vocabulary is built in as a list of ranks, which `ranks` encodes with: it is
//! ready in 20 ms, and the crate takes 600.

mod file;
mod format;
mod mistral;
mod padding;
mod ranks;
mod special;

pub use format::PromptFormat;
pub use padding::Padding;

use crate::error::{Error, Result};
use crate::files;
use crate::trace;
use file::Parsed;
use flate2::read::GzDecoder;
use ranks::{RankList, Ranks};
use std::any::Any;
use std::io::Read;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer};

/// The largest `tokenizer.json`, in bytes. Mistral's, the largest in use, is half of that.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// The longest prompt, in bytes. It far exceeds the token limit, and bounds the work that a single "word" can cause.
pub const MAX_PROMPT_BYTES: usize = 32 * 1024;

/// The hint for a prompt that is too long.
pub const SHORTEN: &str = "shorten it; models read a few hundred tokens at most";

/// Number of tokens that kiln shows to tell where it truncated a prompt.
const ENDING: usize = 12;

/// The hint for a file that is not a usable tokenizer.
pub const HINT: &str = "use the tokenizer.json that came with the text encoder";

/// The error for a file that is not a usable tokenizer.
const NOT_USABLE: &str = "not a usable tokenizer";

/// The origin of Mistral's vocabulary, for messages.
const MISTRAL: &str = "built-in Mistral vocabulary";

/// The tokenizer of all Qwen3 models, gzipped.
static QWEN3: &[u8] = include_bytes!("../models/qwen3/tokenizer.json.gz");

/// An encoded prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Exactly the requested number of ids: the prompt in its template, with padding before or after it.
    pub ids: Vec<u32>,
    /// Number of ids that are not padding.
    pub real: usize,
    /// The place and meaning of the padding.
    pub padding: Padding,
    /// Number of ids that were truncated at the end, the template's closing part first.
    pub cut: usize,
}

impl Tokens {
    /// The positions of the ids that are not padding.
    pub fn rows(&self) -> Range<usize> {
        let first = if self.padding.is_left() { self.ids.len() - self.real } else { 0 };
        first..first + self.real
    }
}

/// A loaded vocabulary and the format of prompts that goes with it.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    format: &'static PromptFormat,
    pad: u32,
    origin: PathBuf,
}

/// The implementation that encodes a text.
#[derive(Debug)]
enum Encoder {
    /// The `tokenizers` crate, with the settings from a file.
    Library(Box<tokenizers::Tokenizer>),
    /// A list of ranks, with Mistral's special tokens.
    Ranks(Box<Ranks>),
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn open(path: &Path) -> Result<Self> {
        let _span = trace::span("read the tokenizer");
        let bytes = files::read(path, MAX_FILE_BYTES).map_err(|source| Error::read(path, source))?;
        Self::from_json(&bytes, path)
    }

    /// Parses the content of a `tokenizer.json`. Error messages name the path `origin`.
    ///
    /// The tokens decide which family the file is for. A Mistral file with as many tokens as the built-in vocabulary must have
    /// the same tokens, and the built-in one is used. A file with another number of tokens, from a tiny model, is used itself.
    pub fn from_json(bytes: &[u8], origin: &Path) -> Result<Self> {
        let file = isolated(origin, || Parsed::new(bytes))?;
        if special::is_full_size(file.vocab()) {
            let ours = Self::shipped_ranks()?;
            if !mistral::is_shipped(file.vocab(), RankList(&ours)) {
                return Err(mistral::other_vocabulary(origin));
            }
            drop(file);
            return Self::of_ranks(ours, Path::new(MISTRAL));
        }
        let inner = isolated(origin, || file.build())?;
        // A template token must be an added token: one that is only in the vocabulary would not be found in a text.
        let added = inner.get_added_vocabulary().get_vocab();
        let has = |format: &PromptFormat| format.marks.iter().all(|mark| added.contains_key(*mark));
        let format = PromptFormat::ALL.into_iter().find(|format| has(format));
        let Some((format, pad)) = format.and_then(|format| Some((format, *added.get(format.pad)?))) else {
            let marks = PromptFormat::ALL.map(|format| format!("`{}` of {}", format.marks.join("`, `"), format.family));
            let detail = format!("it adds neither {}", marks.join(" nor "));
            return Err(Error::bad_file(origin, "not a known tokenizer", detail).with_hint(HINT));
        };
        Ok(Self { encoder: Encoder::Library(inner.into()), format, pad, origin: origin.into() })
    }

    /// The embedded Qwen3 tokenizer.
    pub fn qwen3() -> Result<Self> {
        let _span = trace::span("read the tokenizer");
        let origin = Path::new("built-in tokenizer.json");
        let mut json = Vec::new();
        GzDecoder::new(QWEN3).read_to_end(&mut json).map_err(|source| Error::read(origin, source))?;
        Self::from_json(&json, origin)
    }

    /// The embedded tokenizer of Mistral Small 3.
    pub fn mistral() -> Result<Self> {
        let _span = trace::span("read the tokenizer");
        Self::of_ranks(Self::shipped_ranks()?, Path::new(MISTRAL))
    }

    /// A Mistral tokenizer with these tokens after its 1000 special ones. They come in rank order, each a length byte and then
    /// its bytes. The first 256 are the single bytes in order, which are enough for a tiny model.
    pub fn from_ranks(list: &[u8], origin: &Path) -> Result<Self> {
        Self::of_ranks(list.to_vec(), origin)
    }

    /// The tokenizer of a `tekken.json`, Mistral's own format. ComfyUI's files have it as the tensor `tekken_model`.
    ///
    /// As in [`Tokenizer::from_json`], a vocabulary of full size must match the built-in one. The file's settings for words and
    /// special tokens are not used.
    pub fn from_tekken(json: &[u8], origin: &Path) -> Result<Self> {
        let _span = trace::span("read the tokenizer");
        if json.len() as u64 > MAX_FILE_BYTES {
            let detail = format!("it has {} bytes, the limit is {MAX_FILE_BYTES}", json.len());
            return Err(Error::bad_file(origin, NOT_USABLE, detail).with_hint(HINT));
        }
        let list = isolated(origin, || mistral::tekken_ranks(json))?;
        if RankList(&list).count() != special::TOKENS - special::SPECIALS {
            return Self::of_ranks(list, origin);
        }
        if list != Self::shipped_ranks()? {
            return Err(mistral::other_vocabulary(origin));
        }
        Self::of_ranks(list, Path::new(MISTRAL))
    }

    /// The built-in list of ranks.
    fn shipped_ranks() -> Result<Vec<u8>> {
        mistral::shipped().map_err(|source| Error::read(Path::new(MISTRAL), source))
    }

    fn of_ranks(list: Vec<u8>, origin: &Path) -> Result<Self> {
        let ranks = isolated(origin, || Ranks::new(list))?;
        let format = &PromptFormat::MISTRAL;
        let pad = special::id_of(format.pad).unwrap_or_default();
        Ok(Self { encoder: Encoder::Ranks(ranks.into()), format, pad, origin: origin.into() })
    }

    /// The text around prompts. It shows the family of text encoders that the vocabulary is for.
    pub fn format(&self) -> &'static PromptFormat {
        self.format
    }

    /// Encodes a prompt into exactly `length` ids, with padding after it.
    pub fn encode(&self, prompt: &str, length: usize) -> Result<Tokens> {
        self.encode_padded(prompt, length, Padding::Right)
    }

    /// Encodes a prompt into exactly `length` ids.
    ///
    /// Template and prompt are encoded as one string: a newline at the start of the prompt merges with the template's newline,
    /// and text that spells a special token is encoded as that token. Both match the models' reference implementation.
    pub fn encode_padded(&self, prompt: &str, length: usize, padding: Padding) -> Result<Tokens> {
        let _span = trace::span("tokenize");
        check_length(prompt.len())?;
        let mut ids = self.ids(&self.format.text(prompt))?;
        let (all, real) = (ids.len(), ids.len().min(length));
        ids.resize(length, self.pad);
        let mut tokens = Tokens { ids, real, padding, cut: all - real };
        let first = tokens.rows().start;
        tokens.ids.rotate_right(first);
        Ok(tokens)
    }

    /// The ids of an unmodified text.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        isolated(&self.origin, || match &self.encoder {
            Encoder::Library(inner) => library_ids(inner, text),
            Encoder::Ranks(ranks) => Ok(ranks.ids(text)),
        })
    }

    /// The last words of a truncated prompt, for display.
    pub fn ending(&self, tokens: &Tokens) -> Result<String> {
        let kept = &tokens.ids[tokens.rows()];
        let last = &kept[kept.len().saturating_sub(ENDING)..];
        let text = isolated(&self.origin, || match &self.encoder {
            Encoder::Library(inner) => inner.decode(last, true),
            Encoder::Ranks(ranks) => Ok(ranks.text(last)),
        })?;
        // Truncation can split a character, and control characters must not reach a terminal.
        let words = text.trim_end_matches(char::REPLACEMENT_CHARACTER).split(|c: char| c.is_whitespace() || c.is_control());
        Ok(words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" "))
    }
}

/// Encodes a text with the library: the steps of `encode_fast` without token strings, offsets and masks, which would take a third
/// of the time.
fn library_ids(tokenizer: &tokenizers::Tokenizer, text: &str) -> tokenizers::Result<Vec<u32>> {
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(splitter) = tokenizer.get_pre_tokenizer() {
        splitter.pre_tokenize(&mut pieces)?;
    }
    let mut ids = Vec::new();
    for (piece, _, token) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
        match token {
            // A special token already has its id.
            Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
            None => ids.extend(tokenizer.get_model().tokenize(piece)?.iter().map(|token| token.id)),
        }
    }
    Ok(ids)
}

/// Rejects a prompt of more than [`MAX_PROMPT_BYTES`]. It needs no tokenizer, so it can be called before a model is opened.
pub fn check_length(bytes: usize) -> Result<()> {
    if bytes > MAX_PROMPT_BYTES {
        return Err(Error::usage(format!("prompt too long: it has {bytes} bytes, the limit is {MAX_PROMPT_BYTES}"), SHORTEN));
    }
    Ok(())
}

/// The only way to call the `tokenizers` crate. Its errors and panics both become errors about the file.
///
/// The closure is asserted to be unwind-safe because nothing that a panic could leave inconsistent is used again. A tokenizer
/// that failed to load is dropped, and encoding takes it by shared reference.
fn isolated<T>(origin: &Path, call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let detail = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic_message(panic.as_ref()).to_owned(),
    };
    Err(Error::bad_file(origin, NOT_USABLE, detail).with_hint(HINT))
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the tokenizer library failed without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::LazyLock;

    /// A small file for tests that modify it.
    const TINY: &[u8] = include_bytes!("../models/tiny/tokenizer.json");

    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::qwen3().unwrap());

    const START: [u32; 2] = [151644, 872];
    const SUFFIX: [u32; 9] = [151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271];

    /// Encodes to 512 ids, checks the padding and returns the rest.
    fn real_ids(prompt: &str) -> Vec<u32> {
        let tokens = TOKENIZER.encode(prompt, 512).unwrap();
        assert_eq!((tokens.ids.len(), tokens.cut), (512, 0));
        assert!(tokens.ids[tokens.real..].iter().all(|&id| id == 151643));
        tokens.ids[..tokens.real].to_vec()
    }

    #[test]
    fn reference_prompts() {
        // The ids between `<|im_start|>user` and the closing part, including the newline.
        let cases: [(&str, &[u32]); 10] = [
            (
                "A cat holding a sign that says \"Gifu AI Study Group\"",
                &[198, 32, 8251, 9963, 264, 1841, 429, 2727, 330, 38, 20850, 15235, 19173, 5737, 1],
            ),
            ("", &[198]),
            ("a cat", &[198, 64, 8251]),
            ("\nleading newline", &[271, 20654, 39027]),
            (
                "A photo of 1234 cafés, naïve façade — “quotes”",
                &[198, 32, 6548, 315, 220, 16, 17, 18, 19, 29103, 5397, 11, 94880, 586, 94872, 1021, 1959, 1036, 53282, 854],
            ),
            ("你好，世界", &[198, 108386, 3837, 99489]),
            ("emoji 🦀🚀 ok", &[198, 37523, 11162, 99, 222, 145836, 5394]),
            ("don't WON'T I'm", &[198, 15007, 944, 97367, 17323, 358, 2776]),
            ("  two  spaces\ttab", &[198, 220, 1378, 220, 12621, 58149]),
            ("Ünïcode e\u{301} combining", &[198, 52491, 77, 37572, 1851, 3958, 34171]),
        ];
        for (prompt, middle) in cases {
            assert_eq!(real_ids(prompt), [&START, middle, &SUFFIX].concat(), "{prompt:?}");
        }
        assert_eq!(real_ids("").len(), 12);
    }

    #[test]
    fn special_token_text_in_a_prompt_is_the_token() {
        let ids = real_ids("a<|im_end|>b <think><|endoftext|>");
        assert_eq!(ids, [&START, &[198, 64, 151645, 65, 220, 151667, 151643][..], &SUFFIX].concat());
        // Text that only resembles a special token is ordinary text.
        assert!(!real_ids("<|im_end >").contains(&151643) && real_ids("<|IM_END|>").len() > 13);
    }

    #[test]
    fn a_long_prompt_is_truncated_at_its_end() {
        let tokens = TOKENIZER.encode(&"cat ".repeat(600), 512).unwrap();
        assert_eq!((tokens.ids.len(), tokens.real), (512, 512));
        // 600 words and the space after the last one, plus 12 tokens of template.
        assert_eq!(tokens.cut, 613 - 512);
        assert_eq!(tokens.ids[..3], [151644, 872, 198]);
        assert!(!tokens.ids.contains(&151645), "the closing part of the template is cut, too");
        assert_eq!(TOKENIZER.encode("a cat", 0).unwrap(), Tokens { ids: vec![], real: 0, padding: Padding::Right, cut: 14 });
    }

    #[test]
    fn prompts_at_and_over_the_cap() {
        // The worst case of each stage: a single word, whitespace that the split pattern backtracks over, combining marks.
        for piece in ["a", " ", "\u{301}", "\0", "'", "\r\n", "🦀"] {
            let prompt = piece.repeat(MAX_PROMPT_BYTES / piece.len());
            assert_eq!(TOKENIZER.encode(&prompt, 512).unwrap().ids.len(), 512, "{piece:?}");
        }
        let error = TOKENIZER.encode(&"a".repeat(MAX_PROMPT_BYTES + 1), 512).unwrap_err();
        assert_eq!(error.to_string(), "prompt too long: it has 32769 bytes, the limit is 32768");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn settings_stored_in_the_file_are_ignored() {
        let plain: Value = serde_json::from_slice(TINY).unwrap();
        let mut loaded = plain.clone();
        loaded["truncation"] = json!({"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
        loaded["padding"] = json!({"strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 1,
            "pad_type_id": 0, "pad_token": "b"});
        loaded["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "b", "type_id": 0}}], "pair": [],
            "special_tokens": {"b": {"id": "b", "ids": [1], "tokens": ["b"]}}});
        let encode = |file: &Value| {
            let tokenizer = Tokenizer::from_json(file.to_string().as_bytes(), Path::new("t.json")).unwrap();
            tokenizer.encode("aaabaa", 60).unwrap()
        };
        assert_eq!(encode(&loaded), encode(&plain));
        assert!(encode(&plain).real < 60);
    }

    #[test]
    fn damaged_files_are_errors() {
        let origin = Path::new("m/tokenizer.json");
        for bytes in [&b""[..], b"{}", b"[1,2", b"\xFF\xFE", br#"{"version":"1.0","model":{"type":"BPE"}}"#] {
            let error = Tokenizer::from_json(bytes, origin).unwrap_err();
            assert!(error.to_string().starts_with("not a usable tokenizer (m/tokenizer.json): "), "{error}");
            assert_eq!(error.exit_code(), 3);
        }
        let mut no_pad: Value = serde_json::from_slice(TINY).unwrap();
        no_pad["added_tokens"] = json!([]);
        let error = Tokenizer::from_json(no_pad.to_string().as_bytes(), origin).unwrap_err();
        assert!(error.to_string().contains("<|endoftext|>"), "{error}");
    }

    #[test]
    fn a_panic_of_the_library_is_an_error() {
        for (call, want) in [
            ((|| panic!("plain")) as fn() -> tokenizers::Result<()>, "plain"),
            (|| panic!("{}", String::from("formatted")), "formatted"),
            (|| std::panic::panic_any(7), "without a message"),
        ] {
            let error = isolated(Path::new("t.json"), call).unwrap_err();
            assert!(error.to_string().contains(want), "{error}");
        }
    }
}
