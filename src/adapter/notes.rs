//! Reads the notes that trainers write into an adapter file's metadata.

use serde_json::Value;
use std::collections::BTreeMap;

/// Entries with trigger words. Most are comma-separated lists, some are JSON.
const TRIGGERS: [&str; 8] = [
    "modelspec.trigger_phrase",
    "trigger_phrase",
    "trigger_words",
    "trigger_word",
    "ss_trigger_words",
    "trained_words",
    "activation text",
    "instance_prompt",
];

/// Entries that hold the name of the adapter.
const NAMES: [&str; 3] = ["modelspec.title", "ss_output_name", "name"];

/// The entry that counts the tags of the captions, by dataset.
const TAGS: &str = "ss_tag_frequency";

/// How many of these tags are listed.
const MOST_FREQUENT: usize = 10;

/// The notes in an adapter's metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// The adapter's name.
    pub name: Option<String>,
    /// Trigger words: a prompt has to contain them for the adapter to have an effect.
    pub triggers: Vec<String>,
    /// The most frequent tags of the training captions, and how often each occurs.
    pub tags: Vec<(String, u64)>,
}

impl Notes {
    /// Reads a file's metadata. Entries in another form are skipped: nothing depends on them.
    pub fn read(metadata: &BTreeMap<String, String>) -> Self {
        let filled =
            |key: &&str| metadata.get(*key).map(|value| value.trim()).filter(|value| !value.is_empty() && *value != "None");
        let name = NAMES.iter().find_map(filled).map(String::from);
        let mut triggers = Vec::new();
        for word in TRIGGERS.iter().filter_map(filled).flat_map(words) {
            if !triggers.contains(&word) {
                triggers.push(word);
            }
        }
        Self { name, triggers, tags: metadata.get(TAGS).map_or_else(Vec::new, |text| most_frequent(text)) }
    }
}

/// The words of an entry: a JSON list, or a text with commas.
fn words(text: &str) -> Vec<String> {
    let list = match serde_json::from_str(text) {
        Ok(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(String::from).collect(),
        Ok(Value::String(text)) => vec![text],
        _ => vec![text.to_owned()],
    };
    let words = list.iter().flat_map(|text| text.split(',')).map(str::trim);
    words.filter(|word| !word.is_empty()).map(String::from).collect()
}

/// The most frequent tags of `{"dataset": {"tag": count}}`, or of `{"tag": count}`.
fn most_frequent(text: &str) -> Vec<(String, u64)> {
    let Ok(Value::Object(all)) = serde_json::from_str(text) else { return Vec::new() };
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for (key, value) in &all {
        let tags: Vec<(&str, &Value)> = match value {
            Value::Object(tags) => tags.iter().map(|(tag, number)| (tag.as_str(), number)).collect(),
            number => vec![(key.as_str(), number)],
        };
        for (tag, number) in tags.into_iter().filter_map(|(tag, number)| Some((tag.trim(), number.as_u64()?))) {
            let sum = counts.entry(tag).or_default();
            *sum = sum.saturating_add(number);
        }
    }
    let mut counts: Vec<(String, u64)> =
        counts.into_iter().filter(|(tag, _)| !tag.is_empty()).map(|(tag, number)| (tag.to_owned(), number)).collect();
    counts.sort_by_key(|(_, number)| std::cmp::Reverse(*number));
    counts.truncate(MOST_FREQUENT);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(entries: &[(&str, &str)]) -> Notes {
        Notes::read(&entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn triggers_are_read_however_they_are_written() {
        for (key, value, want) in [
            ("modelspec.trigger_phrase", "ohwx man, oil painting", &["ohwx man", "oil painting"][..]),
            ("trained_words", r#"["a, b", "c"]"#, &["a", "b", "c"]),
            ("ss_trigger_words", r#""ohwx""#, &["ohwx"]),
            ("instance_prompt", " a photo of sks dog ", &["a photo of sks dog"]),
            ("trigger_word", "None", &[]),
            ("trigger_word", " ", &[]),
            ("trigger_words", "[1, 2]", &[]),
            ("something", "else", &[]),
        ] {
            assert_eq!(notes(&[(key, value)]).triggers, want, "{key} {value}");
        }
        assert_eq!(notes(&[("trigger_phrase", "x, y"), ("instance_prompt", "y")]).triggers, ["x", "y"]);
    }

    #[test]
    fn tags_of_all_datasets_are_added_up() {
        let tags = |text: &str| notes(&[("ss_tag_frequency", text)]).tags;
        let own = |list: &[(&str, u64)]| list.iter().map(|(tag, number)| ((*tag).to_owned(), *number)).collect::<Vec<_>>();
        assert_eq!(
            tags(r#"{"10_dog": {"dog": 3, " grass ": 2}, "1_cat": {"cat": 4, "grass": 3}}"#),
            own(&[("grass", 5), ("cat", 4), ("dog", 3)])
        );
        assert_eq!(tags(r#"{"dog": 2, "cat": 3}"#), own(&[("cat", 3), ("dog", 2)]));
        let many: Vec<String> = (0..30).map(|i| format!("\"t{i:02}\": {}", 100 - i)).collect();
        assert_eq!(tags(&format!("{{\"d\": {{{}}}}}", many.join(","))).len(), MOST_FREQUENT);
        for odd in ["", "[]", "{", r#"{"a": {"b": "c", "": 3}}"#, r#"{"a": -1}"#] {
            assert_eq!(tags(odd), [], "{odd}");
        }
    }

    #[test]
    fn names_are_those_of_the_model_specification_first() {
        assert_eq!(notes(&[("ss_output_name", "b"), ("modelspec.title", "a")]).name.as_deref(), Some("a"));
        assert_eq!(notes(&[("ss_output_name", "b"), ("modelspec.title", "")]).name.as_deref(), Some("b"));
        assert_eq!(notes(&[]).name, None);
    }
}
