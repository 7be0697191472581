//! Patterns of layer names: `*` stands for any characters, `?` for one.

/// The number of near names that a message lists.
const NEAR: usize = 3;

/// Whether a whole name matches a pattern.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // The latest star, and the end of what it stands for so far. Only the latest one ever has to stand for more.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == '?' || pattern[p] == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((at, end)) = star {
            star = Some((at, end + 1));
            (p, n) = (at + 1, end + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

/// The names that are spelled most like a pattern, nearest first.
pub fn nearest<'a>(pattern: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<(usize, &str)> = names.map(|name| (distance(pattern, name), name)).collect();
    names.sort();
    names.into_iter().take(NEAR).map(|(_, name)| name).collect()
}

/// The number of characters that have to be inserted, removed or replaced to make one text the other.
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
    fn stars_and_question_marks() {
        for (pattern, name, is_match) in [
            ("img_in", "img_in", true),
            ("img_in", "img_in.x", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*.proj", "double_blocks.0.img_attn.proj", true),
            ("double_blocks.0.*_attn.proj", "double_blocks.0.txt_attn.proj", true),
            ("double_blocks.0.*_attn.proj", "double_blocks.10.txt_attn.proj", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b", "abab", true),
            ("*a*b", "aba", false),
            ("**?", "", false),
            ("single_blocks.1?.linear1", "single_blocks.19.linear1", true),
            ("single_blocks.1?.linear1", "single_blocks.1.linear1", false),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
        }
        // A pattern of many stars takes no longer than their number times the length of the name.
        assert!(!matches(&"*a".repeat(200), &"a".repeat(199)));
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
