//! Parses `tokenizer.json` and builds the byte-level BPE tokenizer that it describes.
//!
//! The format can express hostile programs: replacements that double a text forty times, regular expressions with exponential run
//! time, tables that take gigabytes, dropout that yields different ids every time. Tokenizers of models of this architecture use
//! a small subset of the format. So this module parses files with types that accept only that subset, and the library never sees
//! the file itself. Anything else is rejected by name. Memory use is at most a small multiple of the file size.

use super::{ranks, special};
use crate::text::shown;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// Limit on the tokens of a vocabulary, and on its merges. Qwen3 has 151,643 tokens and Mistral 269,443 merges. The largest in
/// use have twice that.
pub const MAX_TOKENS: usize = 1 << 19;

/// Limit on added tokens. Qwen3 has 26, Mistral 1000.
const MAX_ADDED: usize = 1024;

/// Limit on the length of an added token, in bytes. All added tokens are compiled into one automaton.
const MAX_ADDED_BYTES: usize = 128;

/// Number of pre-tokenizer steps that are kept.
const STEPS: usize = 2;

/// The pattern with which Qwen2 and Qwen3 split text into words.
pub const QWEN_PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The word patterns that are passed to the library. Its backtracking search takes exponential time for some other patterns.
const PATTERNS: [&str; 2] = [QWEN_PATTERN, ranks::PATTERN];

/// A file whose model is supported.
pub struct Parsed {
    model: Model,
    normalizer: Option<Part<IgnoredAny>>,
    pre_tokenizer: Option<Part<Few<Part<IgnoredAny>, STEPS>>>,
    decoder: Option<Part<IgnoredAny>>,
    added_tokens: Few<Added, MAX_ADDED>,
}

impl Parsed {
    /// Parses a file. Ignores its truncation, padding and post-processing: kiln pads and truncates the input of the text encoder
    /// itself.
    pub fn new(bytes: &[u8]) -> tokenizers::Result<Self> {
        let File { model, normalizer, pre_tokenizer, decoder, added_tokens } = serde_json::from_slice(bytes)?;
        Ok(Self { model: model.0?, normalizer, pre_tokenizer, decoder, added_tokens })
    }

    /// The tokens of the model and their ids, from 0 without gaps.
    pub fn vocab(&self) -> &Vocab {
        &self.model.vocab
    }

    /// Builds the tokenizer that the file describes.
    pub fn build(self) -> tokenizers::Result<Tokenizer> {
        let Model { vocab, merges, ignore_merges } = self.model;
        let added = added_tokens(self.added_tokens, &vocab)?;
        let normalizer = match &self.normalizer {
            None => None,
            Some(part) if part.kind == "NFC" => Some(NFC),
            Some(part) => return Err(part.unknown("normalizer", "NFC").into()),
        };
        let decoder = match &self.decoder {
            None => None,
            // The settings of ByteLevel do not affect decoding.
            Some(part) if part.kind == BYTE_LEVEL => Some(ByteLevel::default()),
            Some(part) => return Err(part.unknown("decoder", BYTE_LEVEL).into()),
        };
        let alphabet = check_alphabet(&vocab);
        let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(ignore_merges).build()?;
        let mut tokenizer = Tokenizer::new(model);
        // The pattern takes a while to compile, so cheaper checks come first.
        let splitter = self.pre_tokenizer.map(pre_tokenizer);
        let splitter = splitter.unwrap_or_else(|| Err("it has no pre-tokenizer, kiln knows ByteLevel".into()))?;
        tokenizer.with_normalizer(normalizer).with_pre_tokenizer(Some(splitter)).with_decoder(decoder);
        tokenizer.add_tokens(&added);
        // This error comes last because the others are more specific.
        alphabet?;
        Ok(tokenizer)
    }
}

/// Checks that the vocabulary has a token for every byte, so that any text can be encoded. The library silently drops bytes
/// without a token, and then different prompts get the same ids.
fn check_alphabet(vocab: &Vocab) -> Result<(), String> {
    let missing = ByteLevel::alphabet().into_iter().filter(|letter| !vocab.contains_key(letter.encode_utf8(&mut [0; 4]) as &str));
    match missing.min() {
        Some(letter) => Err(format!("its vocabulary has no token for the byte letter `{letter}`")),
        None => Ok(()),
    }
}

const BYTE_LEVEL: &str = "ByteLevel";

/// The parts of the file that kiln reads.
#[derive(serde::Deserialize)]
struct File {
    model: ReadModel,
    normalizer: Option<Part<IgnoredAny>>,
    pre_tokenizer: Option<Part<Few<Part<IgnoredAny>, STEPS>>>,
    decoder: Option<Part<IgnoredAny>>,
    #[serde(default)]
    added_tokens: Few<Added, MAX_ADDED>,
}

/// A normalizer, pre-tokenizer or decoder, or a step of one: its kind, and every setting of the supported kinds.
#[derive(serde::Deserialize)]
#[serde(bound(deserialize = "S: serde::Deserialize<'de> + Default"))]
struct Part<S> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    add_prefix_space: bool,
    #[serde(default = "yes")]
    use_regex: bool,
    #[serde(default)]
    pattern: Option<Pattern>,
    #[serde(default)]
    behavior: Option<String>,
    #[serde(default)]
    invert: bool,
    #[serde(default)]
    pretokenizers: S,
}

/// The format's default for `use_regex`.
const fn yes() -> bool {
    true
}

#[derive(serde::Deserialize)]
enum Pattern {
    String(IgnoredAny),
    Regex(String),
}

impl<S> Part<S> {
    fn unknown(&self, what: &str, known: &str) -> String {
        format!("its {what} is `{}`, kiln knows {known}", shown(&self.kind))
    }

    /// Converts this part to a byte-level step.
    fn byte_level(&self) -> Result<ByteLevel, String> {
        if self.kind != BYTE_LEVEL {
            return Err(self.unknown("pre-tokenizer", "ByteLevel, and Split before it"));
        }
        if self.add_prefix_space {
            return Err("its pre-tokenizer has `add_prefix_space`, kiln knows ByteLevel without".into());
        }
        Ok(ByteLevel::new(false, false, self.use_regex))
    }

    /// Converts this part to a step that splits text into words.
    fn split(&self) -> Result<Split, String> {
        if self.kind != "Split" {
            return Err(self.unknown("pre-tokenizer's first step", "Split"));
        }
        let detail = match (&self.pattern, self.behavior.as_deref(), self.invert) {
            (Some(Pattern::Regex(pattern)), Some("Isolated"), false) if PATTERNS.contains(&pattern.as_str()) => {
                let pattern = SplitPattern::Regex(pattern.clone());
                return Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|e| e.to_string());
            }
            (Some(Pattern::Regex(pattern)), Some("Isolated"), false) => format!("the pattern `{}`", shown(pattern)),
            (Some(Pattern::String(_)), ..) => "a text to split at".into(),
            (None, ..) => "no pattern".into(),
            (_, _, true) => "`invert`".into(),
            (_, behavior, _) => format!("the behavior `{}`", shown(behavior.unwrap_or_default())),
        };
        Err(format!("its pre-tokenizer's Split has {detail}, kiln knows Qwen3's and Llama 3's"))
    }
}

fn pre_tokenizer(part: Part<Few<Part<IgnoredAny>, STEPS>>) -> Result<PreTokenizerWrapper, String> {
    if part.kind != "Sequence" {
        return part.byte_level().map(Into::into);
    }
    match (&part.pretokenizers.first[..], part.pretokenizers.count) {
        ([split, bytes], STEPS) => Ok(Sequence::new(vec![split.split()?.into(), bytes.byte_level()?.into()]).into()),
        (_, count) => Err(format!("its pre-tokenizer has {count} steps, kiln knows Split and ByteLevel")),
    }
}

/// An added token.
#[derive(serde::Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

/// Checks that the library will assign these tokens the ids that the file states: the id in the vocabulary, or otherwise the next
/// free id.
fn added_tokens(list: Few<Added, MAX_ADDED>, vocab: &Vocab) -> Result<Vec<AddedToken>, String> {
    if list.count > MAX_ADDED {
        return Err(format!("it adds {} tokens, the limit is {MAX_ADDED}", list.count));
    }
    let mut names = std::collections::HashSet::new();
    let mut next = vocab.len();
    for token in &list.first {
        let name = shown(&token.content);
        let (length, settings) = (token.content.len(), [token.single_word, token.lstrip, token.rstrip]);
        if !(1..=MAX_ADDED_BYTES).contains(&length) {
            return Err(format!("it adds the token `{name}` of {length} bytes, the limit is {MAX_ADDED_BYTES}"));
        }
        if !names.insert(token.content.as_str()) {
            return Err(format!("it adds the token `{name}` twice"));
        }
        // With such a setting the library scans all preceding text at every match.
        if let Some((_, setting)) = settings.iter().zip(["single_word", "lstrip", "rstrip"]).find(|(set, _)| **set) {
            return Err(format!("its token `{name}` has `{setting}`, kiln knows tokens without"));
        }
        let id = vocab.get(&token.content).map_or(next, |id| *id as usize);
        if token.id as usize != id {
            return Err(format!("its token `{name}` has the id {}, which should be {id}", token.id));
        }
        next += usize::from(id == next);
    }
    let token = |t: Added| AddedToken::from(t.content, t.special).normalized(t.normalized);
    Ok(list.first.into_iter().map(token).collect())
}

/// A byte-pair encoding (BPE, Sennrich et al. 2016).
struct Model {
    vocab: Vocab,
    merges: Vec<(String, String)>,
    /// Whether a word that is a token is encoded as that token, even if merges would not lead to it.
    ignore_merges: bool,
}

/// A model, or why it is not supported. The reason is a value and not a parse error, because serde would add a line and a column
/// to an error.
struct ReadModel(Result<Model, String>);

impl<'de> Deserialize<'de> for ReadModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ModelVisitor).map(Self)
    }
}

struct ModelVisitor;

impl<'de> Visitor<'de> for ModelVisitor {
    type Value = Result<Model, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut vocab, mut merges, mut ignore_merges) = (None, None, false);
        let mut refused = None;
        while let Some(key) = map.next_key::<String>()? {
            let refusal = match key.as_str() {
                "type" => match map.next_value::<String>()? {
                    kind if kind == "BPE" => None,
                    kind => Some(format!("its model is `{}`, kiln knows BPE", shown(&kind))),
                },
                "vocab" => match map.next_value::<ReadVocab>()?.0 {
                    Ok(read) => vocab.replace(read).map(|_| "its model has two vocabularies".into()),
                    Err(detail) => Some(detail),
                },
                // A vocabulary of this size is compared with the built-in one, and its merges are not used.
                "merges" if vocab.as_ref().is_some_and(special::is_full_size) => {
                    map.next_value::<IgnoredAny>()?;
                    merges.replace(Vec::new()).map(|_| "its model has two lists of merges".into())
                }
                "merges" => match map.next_value::<Few<Merge, MAX_TOKENS>>()? {
                    Few { count, .. } if count > MAX_TOKENS => Some(format!("it has {count} merges, the limit is {MAX_TOKENS}")),
                    list => merges
                        .replace(list.first.into_iter().map(|merge| merge.0).collect())
                        .map(|_: Vec<_>| "its model has two lists of merges".into()),
                },
                // With dropout the same prompt would yield different ids.
                "dropout" => {
                    map.next_value::<Option<f64>>()?.filter(|p| *p != 0.0).map(|p| format!("`dropout` is {p}, kiln knows 0"))
                }
                "unk_token" | "continuing_subword_prefix" | "end_of_word_suffix" => map
                    .next_value::<Option<String>>()?
                    .filter(|text| !text.is_empty())
                    .map(|text| format!("`{key}` is `{}`, kiln knows models without", shown(&text))),
                "ignore_merges" => {
                    ignore_merges = map.next_value::<Option<bool>>()?.unwrap_or_default();
                    None
                }
                "fuse_unk" | "byte_fallback" => map
                    .next_value::<Option<bool>>()?
                    .filter(|set| *set)
                    .map(|_| format!("`{key}` is set, kiln knows models without")),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    None
                }
            };
            if refusal.is_some() {
                refused = refusal;
                break;
            }
        }
        if let Some(refused) = refused {
            return skip_rest(map).map(|()| Err(refused));
        }
        Ok(match (vocab, merges) {
            (Some(vocab), Some(merges)) => Ok(Model { vocab, merges, ignore_merges }),
            (None, _) => Err("its model has no `vocab`".into()),
            (_, None) => Err("its model has no `merges`".into()),
        })
    }
}

/// Skips the rest of an object; serde reports an error if a map is not read to its end.
fn skip_rest<'de, A: MapAccess<'de>>(mut map: A) -> Result<(), A::Error> {
    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
    Ok(())
}

/// A vocabulary with consecutive ids from 0, or why it is not supported.
struct ReadVocab(Result<Vocab, String>);

impl<'de> Deserialize<'de> for ReadVocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(VocabVisitor).map(Self)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = Result<Vocab, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary of tokens and their ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut vocab = Vocab::default();
        let mut taken: Vec<bool> = Vec::new();
        let mut refused = None;
        while let Some((token, id)) = map.next_entry::<String, u32>()? {
            let at = id as usize;
            if at >= MAX_TOKENS {
                refused = Some(format!("its token `{}` has the id {id}, the limit is {MAX_TOKENS}", shown(&token)));
            } else {
                taken.resize(taken.len().max(at + 1), false);
                if std::mem::replace(&mut taken[at], true) {
                    refused = Some(format!("its token `{}` has the id {id}, and so has another", shown(&token)));
                } else if vocab.contains_key(&token) {
                    refused = Some(format!("its token `{}` is there twice", shown(&token)));
                } else {
                    vocab.insert(token, id);
                }
            }
            if refused.is_some() {
                break;
            }
        }
        if let Some(refused) = refused {
            return skip_rest(map).map(|()| Err(refused));
        }
        Ok(match taken.iter().position(|taken| !taken) {
            Some(id) => Err(format!("its ids go up to {}, and no token has {id}", taken.len() - 1)),
            None => Ok(vocab),
        })
    }
}

/// Two tokens that merge into one, written `"a b"` or `["a", "b"]`.
struct Merge((String, String));

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor).map(Self)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = (String, String);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("two tokens to merge")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        match text.split_once(' ') {
            Some((a, b)) if !b.contains(' ') => Ok((a.into(), b.into())),
            _ => Err(E::custom(format!("merge `{}` is not two tokens", shown(text)))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        match (list.next_element()?, list.next_element()?, list.next_element::<IgnoredAny>()?) {
            (Some(a), Some(b), None) => Ok((a, b)),
            _ => Err(A::Error::custom("a merge is not two tokens")),
        }
    }
}

/// The first `N` elements of a list, and its length. The other elements are parsed and dropped.
pub struct Few<T, const N: usize> {
    /// The first elements.
    pub first: Vec<T>,
    /// The number of all elements.
    pub count: usize,
}

impl<T, const N: usize> Default for Few<T, N> {
    fn default() -> Self {
        Self { first: Vec::new(), count: 0 }
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for Few<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(FewVisitor(PhantomData))
    }
}

struct FewVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for FewVisitor<T, N> {
    type Value = Few<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut few = Few::default();
        while few.count < N {
            let Some(element) = list.next_element()? else { return Ok(few) };
            few.first.push(element);
            few.count += 1;
        }
        while list.next_element::<IgnoredAny>()?.is_some() {
            few.count += 1;
        }
        Ok(few)
    }
}
