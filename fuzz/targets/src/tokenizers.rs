//! Tokenizer files.

use crate::check_file_error;
use common::cost::peak_of;
use kiln::error::Result;
use kiln::internals::tokenizer::Tokenizer;
use kiln::text::shown_line;
use std::path::Path;
use std::sync::Once;

/// The length of an encoded prompt.
const LENGTH: usize = 96;

const PROMPTS: [&str; 3] =
    ["", "abcab a\n<think>b <|endoftext|> don't 1234 \u{301}\u{fdfa}[INST]狐", "<|im_start|>user<|im_end|></s>\r\n  \u{10ffff}"];

/// Panics of the tokenizers library are caught, and are errors about the file. They are not findings.
fn expect_panics_of_the_library() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| match info.location() {
            Some(place) if place.file().contains("/tokenizers-") => {}
            _ => others(info),
        }));
    });
}

/// A `tokenizer.json`. An accepted one encodes any prompt to the asked number of ids, the same every time.
pub fn tokenizer(data: &[u8]) {
    check(data, || Tokenizer::from_json(data, Path::new("t.json")));
}

/// A `tekken.json`, as [`tokenizer`].
pub fn tekken(data: &[u8]) {
    check(data, || Tokenizer::from_tekken(data, Path::new("t.json")));
}

fn check(data: &[u8], read: impl FnOnce() -> Result<Tokenizer>) {
    expect_panics_of_the_library();
    let (tokenizer, peak) = peak_of(read);
    assert!(peak <= (4 << 20) + 64 * data.len() as isize, "{peak} bytes for a file of {}", data.len());
    let tokenizer = match tokenizer {
        Ok(tokenizer) => tokenizer,
        Err(error) => return check_file_error(&error),
    };
    for prompt in PROMPTS {
        match (tokenizer.encode(prompt, LENGTH), tokenizer.encode(prompt, LENGTH)) {
            (Ok(tokens), Ok(again)) => {
                assert_eq!(tokens, again);
                assert_eq!((tokens.ids.len(), tokens.rows().len()), (LENGTH, tokens.real));
                assert!(tokens.cut == 0 || tokens.real == LENGTH);
                match tokenizer.ending(&tokens) {
                    Ok(ending) => assert!(!ending.chars().any(char::is_control), "{ending:?}"),
                    Err(error) => check_file_error(&error),
                }
            }
            (Err(error), Err(_)) => check_file_error(&error),
            (once, again) => panic!("{prompt:?}: {once:?}, then {again:?}"),
        }
    }
    let format = format!("{:?}", tokenizer.format().family);
    assert_eq!(format, shown_line(&format));
}
