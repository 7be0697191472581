//! Finds the words of a prompt that a model was not trained on.

use std::collections::HashSet;

/// The unknown words of a prompt, each once, as first written. Ignores case and punctuation. `known` lists words in lower case,
/// separated by spaces.
pub fn unknown<'a>(prompt: &'a str, known: &str) -> Vec<&'a str> {
    let mut seen: HashSet<String> = known.split_whitespace().map(str::to_owned).collect();
    let words = prompt.split(is_between).map(|word| word.trim_matches(is_apostrophe));
    words.filter(|word| !word.is_empty() && seen.insert(word.to_lowercase())).collect()
}

/// Whether a character separates words. All others belong to words, including symbols and emoji: a model that does not know the
/// word "fox" does not know its emoji either.
fn is_between(c: char) -> bool {
    // Punctuation of Latin, Arabic, Indic and East Asian scripts, by Unicode block.
    let punctuation = c.is_ascii_punctuation()
        || matches!(c, '\u{a1}'..='\u{bf}' | '\u{60c}' | '\u{61b}' | '\u{61f}' | '\u{6d4}' | '\u{964}' | '\u{965}' | '\u{feff}')
        || matches!(c, '\u{2000}'..='\u{206f}' | '\u{2e00}'..='\u{2e7f}' | '\u{3000}'..='\u{303f}' | '\u{fe10}'..='\u{fe6f}')
        || matches!(c, '\u{ff01}'..='\u{ff65}');
    (punctuation && !is_apostrophe(c) && !c.is_alphanumeric()) || c.is_whitespace() || c.is_control()
}

fn is_apostrophe(c: char) -> bool {
    matches!(c, '\'' | '\u{2018}' | '\u{2019}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_count() {
        let known = "a an red star on the background 1 image";
        for (prompt, want) in [
            ("", &[][..]),
            (" ,.;!? \n\u{1b} - “” … ", &[]),
            ("a red star", &[]),
            ("A RED, star... on the (background)!", &[]),
            ("'red' \"star\" ‘red’ «star» a-star red/star 1", &[]),
            ("¿red? ¡star! red，star red star؟ red star। red·star § re\u{feff}d", &["re", "d"]),
            ("Ａ red star", &["Ａ"]),
            ("a fluffy cat", &["fluffy", "cat"]),
            ("five red stars, Five more Stars", &["five", "stars", "more"]),
            ("the star's background", &["star's"]),
            ("a light-red star", &["light"]),
            ("a 🦊 狐、rénard", &["🦊", "狐", "rénard"]),
            ("image 2", &["2"]),
        ] {
            assert_eq!(unknown(prompt, known), want, "{prompt:?}");
        }
    }
}
