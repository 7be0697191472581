//! Sentences of help and documents, and how long they are.

/// The most words of a sentence.
pub const MOST_WORDS: usize = 35;

/// The sentences of a paragraph that have more than [`MOST_WORDS`] words, with their number. Code between backticks, also a list of such
/// code, is one word, and the target of a link is none.
pub fn long_sentences(paragraph: &str) -> Vec<(usize, String)> {
    let plain = plain(paragraph);
    let (mut found, mut sentence) = (Vec::new(), Vec::new());
    let mut words = plain.split_whitespace().peekable();
    while let Some(word) = words.next() {
        // A dash between spaces is none.
        if word.contains(char::is_alphanumeric) {
            sentence.push(word);
        }
        let ends = word.trim_end_matches([')', '"', '*', ']']).ends_with(['.', '!', '?']);
        if ends || words.peek().is_none() {
            if sentence.len() > MOST_WORDS {
                found.push((sentence.len(), sentence.join(" ")));
            }
            sentence.clear();
        }
    }
    found
}

/// A paragraph with one word for each run of code, and without the targets of links.
fn plain(paragraph: &str) -> String {
    let mut text = String::new();
    for (i, piece) in paragraph.split('`').enumerate() {
        if i % 2 == 1 {
            // Code after code, with nothing but a comma or a word such as "and" in between, is a list.
            let before = text.trim_end_matches([',', ' ', '/', '|']);
            let before =
                before.strip_suffix(" and").or(before.strip_suffix(" or")).unwrap_or(before).trim_end_matches([',', ' ']);
            if before.ends_with("CODE") {
                text.truncate(before.len());
            } else {
                text.push_str("CODE");
            }
        } else {
            text.push_str(piece);
        }
    }
    let mut rest = text.as_str();
    let mut plain = String::new();
    while let Some((head, tail)) = rest.split_once("](") {
        plain.push_str(head);
        rest = tail.split_once(')').map_or("", |(_, tail)| tail);
    }
    plain + rest
}

/// The paragraphs and list items of a Markdown text, each with the number of its first line; without code, tables, headings and HTML.
pub fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut fenced, mut open) = (Vec::<(usize, String)>::new(), false, false);
    for (number, line) in text.lines().enumerate().map(|(i, line)| (i + 1, line)) {
        let trimmed = line.trim_start();
        fenced ^= trimmed.starts_with("```");
        let indented = line.starts_with("    ") && !open;
        if fenced || indented || trimmed.is_empty() || trimmed.starts_with(['|', '#', '<']) || trimmed.starts_with("```") {
            open = false;
            continue;
        }
        let numbered = trimmed.split_once(". ").filter(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
        let item = trimmed.strip_prefix("- ").or(trimmed.strip_prefix("* ")).or(numbered.map(|(_, rest)| rest));
        match (found.last_mut().filter(|_| open), item) {
            (Some((_, paragraph)), None) => *paragraph = format!("{paragraph} {trimmed}"),
            _ => found.push((number, item.unwrap_or(trimmed).to_owned())),
        }
        open = true;
    }
    found
}
