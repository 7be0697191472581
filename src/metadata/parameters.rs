//! The text `parameters`, in the form of AUTOMATIC1111's web UI: the prompt, the negative prompt, and a last line of settings.
//!
//! Readers split it at lines and at commas, so a text that looks like another part needs care.

use super::ImageMetadata;

/// What the negative prompt begins with. A line of a prompt that begins so would be read as one.
const NEGATIVE: &str = "Negative prompt:";

/// A zero-width space: readers show nothing, and do not trim it.
const HARMLESS: char = '\u{200b}';

impl ImageMetadata {
    /// The text that image galleries read. There is no hash of the model, because readers expect the hash of one whole file.
    pub fn parameters(&self) -> String {
        let mut text = prompt(&self.prompt);
        if let Some(negative) = self.negative.as_deref().filter(|negative| !negative.is_empty()) {
            text.push_str(&format!("\n{NEGATIVE} {}", prompt(negative)));
        }
        let mut settings = vec![("Steps", self.steps.to_string()), ("Sampler", "Euler".into())];
        settings.extend(self.guidance.map(|scale| ("CFG scale", scale.to_string())));
        settings.extend(self.seed.map(|seed| ("Seed", seed.to_string())));
        settings.extend([("Size", self.shown_size()), ("Model", self.model.clone())]);
        settings.extend(self.init.as_ref().map(|init| ("Denoising strength", init.strength.to_string())));
        settings.push(("Version", self.version.clone()));
        let settings: Vec<String> = settings.iter().map(|(name, value)| format!("{name}: {}", quoted(value))).collect();
        format!("{text}\n{}", settings.join(", "))
    }
}

/// A prompt none of whose lines begins as a negative prompt.
fn prompt(text: &str) -> String {
    let line = |line: &str| match line.trim_start().starts_with(NEGATIVE) {
        true => format!("{HARMLESS}{line}"),
        false => line.to_owned(),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// A value, quoted if it holds a separator.
fn quoted(value: &str) -> String {
    if value.contains([',', ':', '\n', '"']) { serde_json::Value::from(value).to_string() } else { value.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::tests::complete;
    use super::*;
    use std::collections::BTreeMap;

    /// Parses the text by the rule of the web UI (`parse_generation_parameters`): the last line has the settings if it has at least three;
    /// in the others, the negative prompt begins where a line does.
    fn parsed(text: &str) -> (String, String, BTreeMap<String, String>) {
        let mut lines: Vec<&str> = text.trim().split('\n').collect();
        let last = lines.pop().unwrap();
        let found = settings(last);
        assert!(found.len() >= 3, "{last}");
        let (mut prompt, mut negative, mut is_negative) = (Vec::new(), Vec::new(), false);
        for mut line in lines.into_iter().map(str::trim) {
            if let Some(rest) = line.strip_prefix(NEGATIVE) {
                (is_negative, line) = (true, rest.trim());
            }
            if is_negative { negative.push(line) } else { prompt.push(line) }
        }
        (prompt.join("\n"), negative.join("\n"), found)
    }

    /// `\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)`, repeated.
    fn settings(line: &str) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let mut rest = line;
        while let Some((name, value)) = rest.split_once(':') {
            let value = value.trim_start();
            let end = match value.strip_prefix('"') {
                None => value.find(',').unwrap_or(value.len()),
                Some(inner) => {
                    let mut escaped = false;
                    let is_end = |c: char| {
                        let end = c == '"' && !escaped;
                        escaped = c == '\\' && !escaped;
                        end
                    };
                    inner.find(is_end).unwrap() + 2
                }
            };
            let text = &value[..end];
            let text = if text.starts_with('"') { serde_json::from_str(text).unwrap() } else { text.trim().to_owned() };
            found.insert(name.trim().to_owned(), text);
            rest = value[end..].trim_start_matches(',');
        }
        found
    }

    #[test]
    fn readers_find_prompts_and_settings() {
        for prompt in [
            "a fox",
            "",
            "a fox,\nin the snow: \"cold\"",
            "a sign\nNegative prompt: none\nSteps: 4, Sampler: x, Seed: 9",
            "Negative prompt: at the start",
            "Steps: 4, Seed: 1, Size: 2x2",
            "  indented\n   Negative prompt: too",
        ] {
            let mut metadata = complete();
            metadata.prompt = prompt.into();
            metadata.negative = Some(format!("{prompt}\nblurry"));
            metadata.model = "my \"model\", v2: best".into();
            let (read, negative, settings) = parsed(&metadata.parameters());
            let plain = |text: &str| text.replace(HARMLESS, "").lines().map(str::trim).collect::<Vec<_>>().join("\n");
            assert_eq!(plain(&read).trim(), plain(prompt).trim(), "{prompt:?}");
            assert_eq!(plain(&negative).trim(), plain(&format!("{prompt}\nblurry")).trim(), "{prompt:?}");
            for (name, value) in [
                ("Steps", "50"),
                ("Seed", "7"),
                ("Size", "1024x768"),
                ("CFG scale", "4"),
                ("Model", &metadata.model),
                ("Denoising strength", "0.6"),
                ("Version", "kiln 0.1.0"),
            ] {
                assert_eq!(settings.get(name).map(String::as_str), Some(value), "{name} after {prompt:?}");
            }
            assert!(!settings.contains_key("Model hash"));
        }
    }
}
