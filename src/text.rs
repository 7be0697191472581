//! Text for people: foreign text made escaped, numbers made readable.

use std::path::Path;

/// Characters of a name that are shown: a tensor, a key, a layer.
const NAME: usize = 128;

/// Characters of anything longer that are shown: a path, what a library says about a file.
const SENTENCE: usize = 1024;

/// Characters of a whole line that are shown.
const LINE: usize = 8192;

/// A name out of a file as it may be shown: at most [`NAME`] characters, none of which moves a terminal's cursor.
pub fn shown(name: &str) -> String {
    escaped(name, NAME)
}

/// A path as it may be shown.
pub fn shown_path(path: &Path) -> String {
    escaped(&path.to_string_lossy(), SENTENCE)
}

/// Text that may hold parts of a file, as it may be shown.
pub fn shown_text(text: &str) -> String {
    escaped(text, SENTENCE)
}

/// A whole line with foreign text in it, as it may be shown: it stays one line, and does not go on for pages.
pub fn shown_line(line: &str) -> String {
    escaped(line, LINE)
}

/// The one function that foreign text passes before anybody sees it: whatever a terminal would obey is escaped, and the rest is
/// cut after so many characters.
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

/// Control characters, line and paragraph separators, and the marks that turn the direction of what follows. `escape_debug`
/// writes each of them as ASCII.
fn is_control_like(c: char) -> bool {
    c.is_control() || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// A number with a comma between thousands.
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

/// Bytes in the unit that cards are sold by.
pub fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

/// The same where much less can matter.
pub fn amount(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{:.1} MiB", bytes as f64 / (1_u64 << 20) as f64),
        _ => gib(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_shown() {
        assert_eq!(shown("\u{1b}[2J\r\n\t\0\u{7f}\u{85}"), r"\u{1b}[2J\r\n\t\0\u{7f}\u{85}");
        assert_eq!(shown("a\u{202e}b\u{2067}c\u{2028}\u{200f}\u{61c}"), r"a\u{202e}b\u{2067}c\u{2028}\u{200f}\u{61c}");
        // What is only unusual stays as it is.
        assert_eq!(shown("é 狐 🦊 'quoted' \"twice\" back\\slash"), "é 狐 🦊 'quoted' \"twice\" back\\slash");
        for c in (0..=char::MAX as u32).filter_map(char::from_u32).filter(|c| is_control_like(*c)) {
            assert!(shown(&c.to_string()).is_ascii(), "{c:?}");
        }
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(shown(&"x".repeat(128)), "x".repeat(128));
        assert_eq!(shown(&"é".repeat(129)), format!("{}…", "é".repeat(128)));
        assert_eq!(shown_path(Path::new(&"x".repeat(5000))).chars().count(), 1025);
        assert_eq!(shown_text(&"\n".repeat(5000)).len(), 2048 + '…'.len_utf8());
        assert_eq!(shown_line(&"x".repeat(9000)).chars().count(), 8193);
    }

    #[test]
    fn thousands_are_set_apart() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(gib(3 << 29), "1.5 GiB");
    }
}
