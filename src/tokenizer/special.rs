//! Mistral's special tokens, whose ids precede all other ids.

use super::PromptFormat;
use std::borrow::Cow;
use tokenizers::models::bpe::Vocab;

/// The number of special tokens.
pub const SPECIALS: usize = 1000;

/// The number of all tokens.
pub const TOKENS: usize = 131_072;

/// The special tokens with names, by id. The others are called `<SPECIAL_20>` to `<SPECIAL_999>`.
const NAMED: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// The length of the longest special token, in bytes.
pub const LONGEST: usize = 18;

/// Whether special tokens start with this byte.
pub fn opens(byte: u8) -> bool {
    matches!(byte, b'<' | b'[')
}

/// The special token that a text starts with: its id and its length in bytes.
///
/// Each special token ends with the first bracket that closes its opening bracket, so there is at most one.
pub fn at_start(text: &str) -> Option<(u32, usize)> {
    let close = if text.starts_with('<') { b'>' } else { b']' };
    let length = 1 + text.bytes().take(LONGEST).position(|byte| byte == close)?;
    Some((id_of(&text[..length])?, length))
}

/// The id of a special token.
pub fn id_of(name: &str) -> Option<u32> {
    let id = match name.strip_prefix("<SPECIAL_").and_then(|rest| rest.strip_suffix('>')) {
        Some(digits) => digits.parse().ok().filter(|id| (NAMED.len()..SPECIALS).contains(id))?,
        None => NAMED.iter().position(|known| *known == name)?,
    };
    // Only one spelling of a number is valid.
    (name_of(id) == name).then_some(id as u32)
}

/// The special token with this id.
pub fn name_of(id: usize) -> Cow<'static, str> {
    NAMED.get(id).map_or_else(|| format!("<SPECIAL_{id}>").into(), |name| (*name).into())
}

/// Whether a `tokenizer.json`'s vocabulary is one of Mistral's with as many tokens as the built-in one.
pub fn is_full_size(vocab: &Vocab) -> bool {
    vocab.len() == TOKENS && PromptFormat::MISTRAL.marks.iter().all(|mark| vocab.contains_key(*mark))
}
