//! The text `parameters`, in the form of AUTOMATIC1111's web UI: the prompt, the negative prompt, and a last line of settings.
//!
//! Readers split it at lines and at commas, so a text that looks like another part needs care.

use super::ImageMetadata;
use std::borrow::Cow;

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

/// What a text of this form says.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Parameters<'a> {
    /// The prompt, whose lines are trimmed.
    pub prompt: String,
    /// The negative prompt, whose lines are trimmed. Empty if there is none.
    pub negative: String,
    /// Names and values of the settings.
    pub settings: Vec<(&'a str, Cow<'a, str>)>,
}

impl<'a> Parameters<'a> {
    /// Reads a text by the rule of the web UI (`parse_generation_parameters`): the last line has the settings if it has at least three. In
    /// the others the negative prompt begins where a line does.
    pub fn of(text: &'a str) -> Self {
        let text = text.trim();
        let (prompts, last) = text.rsplit_once('\n').unwrap_or(("", text));
        let found = settings(last);
        let (prompts, settings) = if found.len() < 3 { (text, Vec::new()) } else { (prompts, found) };
        let mut read = Self { settings, ..Self::default() };
        let mut is_negative = false;
        for mut line in prompts.split('\n').map(str::trim) {
            if let Some(rest) = line.strip_prefix(NEGATIVE) {
                (is_negative, line) = (true, rest.trim());
            }
            let text = if is_negative { &mut read.negative } else { &mut read.prompt };
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(line);
        }
        read
    }

    /// The value of a setting.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.settings.iter().find(|(setting, _)| *setting == name).map(|(_, value)| &**value)
    }
}

/// The most settings that are read of a line.
const SETTINGS: usize = 200;

/// The settings of a line, by the rule `\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)`.
fn settings(line: &str) -> Vec<(&str, Cow<'_, str>)> {
    let (mut found, mut rest) = (Vec::new(), line);
    while let Some((name, value)) = rest.split_once(':').filter(|_| found.len() < SETTINGS) {
        let value = value.trim_start();
        let quoted = value.strip_prefix('"').and_then(|inner| {
            let mut escaped = false;
            let end = inner.find(|c: char| {
                let is_end = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                is_end
            });
            value.split_at_checked(end? + 2)
        });
        let (text, after) = quoted.unwrap_or_else(|| value.split_at(value.find(',').unwrap_or(value.len())));
        let unquoted = quoted.and_then(|(text, _)| serde_json::from_str(text).ok());
        found.push((name.trim(), unquoted.map_or_else(|| text.trim().into(), Cow::Owned)));
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::complete;
    use super::*;

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
            let text = metadata.parameters();
            let read = Parameters::of(&text);
            let plain = |text: &str| text.replace(HARMLESS, "").lines().map(str::trim).collect::<Vec<_>>().join("\n");
            assert_eq!(plain(&read.prompt).trim(), plain(prompt).trim(), "{prompt:?}");
            assert_eq!(plain(&read.negative).trim(), plain(&format!("{prompt}\nblurry")).trim(), "{prompt:?}");
            for (name, value) in [
                ("Steps", "50"),
                ("Seed", "7"),
                ("Size", "1024x768"),
                ("CFG scale", "4"),
                ("Model", &metadata.model),
                ("Denoising strength", "0.6"),
                ("Version", "kiln 0.1.0"),
            ] {
                assert_eq!(read.get(name), Some(value), "{name} after {prompt:?}");
            }
            assert_eq!(read.get("Model hash"), None);
        }
    }

    /// Texts of other programs, and texts that only look like one.
    #[test]
    fn other_texts_are_read() {
        let text = "a cat, (cute:1.2)\nsecond line\nNegative prompt: blurry\nbad\n\
                    Steps: 20, Sampler: DPM++ 2M, Seed: 42, Size: 512x768, Lora hashes: \"a: 1, b: 2\", Version: v1.9";
        let read = Parameters::of(text);
        assert_eq!((&*read.prompt, &*read.negative), ("a cat, (cute:1.2)\nsecond line", "blurry\nbad"));
        assert_eq!((read.get("Seed"), read.get("Lora hashes")), (Some("42"), Some("a: 1, b: 2")));
        for (text, settings) in [
            ("", 0),
            ("Steps: 1, Seed: 2, Size: 3", 3),
            ("a: 1, b: 2", 0),
            ("x\na: \"1, b: 2, c: 3, d: 4", 4),
            ("x\n:::,,,", 0),
            ("x\na: \"\\\", b: 1, c: 2, d:", 4),
        ] {
            assert_eq!(Parameters::of(text).settings.len(), settings, "{text:?}");
        }
        assert_eq!(Parameters::of("a: 1, b: 2").prompt, "a: 1, b: 2");
    }
}
