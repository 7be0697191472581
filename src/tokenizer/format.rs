//! The text around a prompt. Image models were trained with one fixed template each, so it is data and not an option.

use std::borrow::Cow;

/// How the text encoders of a family expect a prompt.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptFormat {
    /// The language models of the family, for display.
    pub family: &'static str,
    /// The text before the prompt.
    pub before: &'static str,
    /// The text after the prompt.
    pub after: &'static str,
    /// A text to remove from the prompt before anything else. It is removed in one pass, so text that the removal joins stays.
    pub removed: Option<&'static str>,
    /// The padding token.
    pub pad: &'static str,
    /// The special tokens that identify a vocabulary of the family. It must have all of them.
    pub marks: &'static [&'static str],
}

impl PromptFormat {
    /// The format of Qwen3, for FLUX.2 \[klein\]. The empty think block disables the reasoning of the chat model.
    pub const QWEN3: Self = Self {
        family: "Qwen3",
        before: "<|im_start|>user\n",
        after: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        removed: None,
        pad: "<|endoftext|>",
        marks: &["<|endoftext|>"],
    };

    /// The format of Mistral Small 3, for FLUX.2 \[dev\]. The system text has exactly one newline, after its second `object`. The
    /// image placeholder is removed from prompts, because the text encoder gets no image.
    pub const MISTRAL: Self = Self {
        family: "Mistral Small 3",
        before: "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing \
            on object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]",
        after: "[/INST]",
        removed: Some("[IMG]"),
        pad: "<pad>",
        marks: &["<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "<pad>"],
    };

    /// The formats of all families.
    pub const ALL: [&'static Self; 2] = [&Self::QWEN3, &Self::MISTRAL];

    /// The prompt with the text around it.
    pub fn text(&self, prompt: &str) -> String {
        let prompt = match self.removed {
            Some(removed) => Cow::Owned(prompt.replace(removed, "")),
            None => Cow::Borrowed(prompt),
        };
        [self.before, &prompt, self.after].concat()
    }
}
