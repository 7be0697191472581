//! Text for display: escapes untrusted text and formats numbers.

use std::path::Path;

/// The maximum number of characters shown of a name: a tensor, a key, a layer.
const NAME: usize = 128;

/// The maximum number of characters shown of longer texts: a path, a library's error message.
const SENTENCE: usize = 1024;

/// The maximum number of characters shown of a whole line.
const LINE: usize = 8192;

/// A name from a file, for display: at most `NAME` characters, with control characters escaped.
pub fn shown(name: &str) -> String {
    escaped(name, NAME)
}

/// A path, for display.
pub fn shown_path(path: &Path) -> String {
    escaped(&path.to_string_lossy(), SENTENCE)
}

/// Text that may contain parts of a file, for display.
pub fn shown_text(text: &str) -> String {
    escaped(text, SENTENCE)
}

/// A whole line that contains untrusted text, for display: it stays one line, of limited length.
pub fn shown_line(line: &str) -> String {
    escaped(line, LINE)
}

/// Escapes all untrusted text before it is displayed: characters that control a terminal are escaped, and the text is truncated
/// after `limit` characters.
fn escaped(text: &str, limit: usize) -> String {
    let mut out = String::with_capacity(text.len().min(limit));
    for (count, c) in text.chars().enumerate() {
        if count == limit {
            out.push('…');
            break;
        }
        if is_control_like(c) { out.extend(c.escape_debug()) } else { out.push(c) }
    }
    out
}

/// Whether a character is a control character, a line or paragraph separator, or a bidirectional control, which reverses the text
/// after it. `escape_debug` writes each of them as ASCII.
fn is_control_like(c: char) -> bool {
    c.is_control() || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// JSON whose strings hold no character that controls a terminal. serde_json escapes such characters of ASCII, and this escapes the others.
pub fn harmless_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match u32::from(c) {
            // All of them are below U+10000.
            code if is_control_like(c) && !c.is_ascii() => out.push_str(&format!("\\u{code:04x}")),
            _ => out.push(c),
        }
    }
    out
}

/// A number with thousands separators.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (left, digit) in (0..digits.len()).rev().zip(digits.chars()) {
        text.push(digit);
        if left > 0 && left.is_multiple_of(3) {
            text.push(',');
        }
    }
    text
}

/// A size in GiB, the unit of GPU memory.
pub fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

/// A size in GiB, or in MiB if it is below 1 GiB.
pub fn amount(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{:.1} MiB", bytes as f64 / (1_u64 << 20) as f64),
        _ => gib(bytes),
    }
}

/// The number of similar names that a message lists.
const NEAR: usize = 3;

/// The most similar names, nearest first.
pub fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<(usize, &str)> = names.map(|other| (distance(name, other), other)).collect();
    names.sort();
    names.into_iter().take(NEAR).map(|(_, name)| name).collect()
}

/// The name that a misspelled one most likely means.
pub fn misspelled<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    nearest(name, names).into_iter().next().filter(|near| distance(name, near) <= 2.min(name.chars().count() / 2))
}

/// The number of characters to insert, remove or replace to turn one text into the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        assert_eq!(shown("\u{1b}[2J\r\n\t\0\u{7f}\u{85}"), r"\u{1b}[2J\r\n\t\0\u{7f}\u{85}");
        assert_eq!(shown("a\u{202e}b\u{2067}c\u{2028}\u{200f}\u{61c}"), r"a\u{202e}b\u{2067}c\u{2028}\u{200f}\u{61c}");
        // Other unusual characters are unchanged.
        assert_eq!(shown("é 狐 🦊 'quoted' \"twice\" back\\slash"), "é 狐 🦊 'quoted' \"twice\" back\\slash");
        for c in (0..=char::MAX as u32).filter_map(char::from_u32).filter(|c| is_control_like(*c)) {
            assert!(shown(&c.to_string()).is_ascii(), "{c:?}");
        }
    }

    #[test]
    fn json_controls_no_terminal() {
        let text = "\u{1b}[2J\u{9b}31m\u{202e}é 🦊\u{2028}\n\"";
        let json = harmless_json(&serde_json::to_string(text).unwrap());
        assert!(!json.contains(is_control_like), "{json:?}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }

    #[test]
    fn long_text_is_truncated() {
        assert_eq!(shown(&"x".repeat(128)), "x".repeat(128));
        assert_eq!(shown(&"é".repeat(129)), format!("{}…", "é".repeat(128)));
        assert_eq!(shown_path(Path::new(&"x".repeat(5000))).chars().count(), 1025);
        assert_eq!(shown_text(&"\n".repeat(5000)).len(), 2048 + '…'.len_utf8());
        assert_eq!(shown_line(&"x".repeat(9000)).chars().count(), 8193);
    }

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(gib(3 << 29), "1.5 GiB");
    }

    #[test]
    fn near_names_are_those_with_the_fewest_edits() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(
            nearest("linear3", ["img_in", "linear1", "linear12", "linear2"].into_iter()),
            ["linear1", "linear2", "linear12"]
        );
    }
}
