//! Patterns of layer names: `*` stands for any characters, `?` for one.

/// Whether a whole name matches a pattern.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // The latest star, and the end of the text that it matches so far. Only the latest star ever has to match more.
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
        // Matching a pattern with many stars takes no longer than their number times the length of the name.
        assert!(!matches(&"*a".repeat(200), &"a".repeat(199)));
    }
}
