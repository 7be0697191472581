//! The flags of `kiln run`.

use super::super::args::{FileArgs, ImageOptions, LoraArgs, ModelArgs, RunArgs};
use super::line::fields;
use clap::Args;
use std::path::PathBuf;

/// The end of `kiln run --help`.
const EXAMPLES: &str = "\
Examples:
  kiln run prompts.txt -o images
      An image for each line. Seeds and names follow from the lines, so the same file gives the same
      images under the same names.

  kiln run prompts.txt -o images --skip-existing
      Continues where a run was stopped.

  echo '{\"prompt\": \"a red star\", \"seed\": 7, \"output\": \"star.png\"}' | kiln run | jq .path
      Settings of its own for a line. Another program may keep the pipe open and wait for each answer.

  {\"prompt\": \"a fox\", \"lora\": [\"ink.safetensors\", {\"file\": \"owner/repository\", \"scale\": 0.5}]}
      A line with adapters of its own, in place of those of --lora. The model is not loaded again.";

/// Generate an image for each line of a file or of standard input, with a model that is loaded once
///
/// Every line is answered with a line of JSON on standard output, in order and as soon as it is done: the fields of `kiln
/// generate --json` and the number of the line, or an `error` with its `hint` and `code`. Errors of a line do not end the run;
/// the exit code is 1 if there were any.
#[derive(Args, Debug)]
#[command(override_usage = "kiln run [OPTIONS] [FILE]", after_help = EXAMPLES)]
#[command(allow_negative_numbers = true)]
pub struct BatchArgs {
    /// The file of prompts, one on each line; `-` is standard input
    #[arg(value_name = "FILE", default_value = "-", long_help = file_help())]
    pub file: PathBuf,

    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// The folder that images are written to [default: the current one]
    ///
    /// Names are made from the prompt's words and a hash of all that decides the image, unless a line names its `output`,
    /// which is relative to this folder.
    #[arg(short, long, value_name = "DIR", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// How files are written
    #[command(flatten)]
    pub image_file: FileArgs,

    /// Pass over lines whose file exists, so that a run that was stopped can be continued
    ///
    /// They are answered, too, with `"skipped": true`.
    #[arg(long, conflicts_with = "force", help_heading = "Output")]
    pub skip_existing: bool,

    /// What images are made from and how large, where a line does not tell
    #[command(flatten)]
    pub image: ImageOptions,

    /// Negative prompt of lines without one; base models only
    #[arg(long, value_name = "PROMPT", help_heading = "Sampling")]
    pub negative: Option<String>,

    /// Where and how to compute
    #[command(flatten)]
    pub run: RunArgs,
}

/// The help on the file of prompts, with the names of all fields.
fn file_help() -> String {
    let names: Vec<String> = fields().iter().filter(|name| *name != "prompt").map(|name| format!("`{name}`")).collect();
    format!(
        "The file of prompts, one on each line; `-` is standard input\n\n\
         A line is a prompt, or a JSON object with `prompt` and any of {}. `size` is \"WxH\", `references` a list of files, `sigmas` \
         a text or a list of numbers, `lora` a list of \"FILE\", \"FILE:SCALE\" or {{\"file\": .., \"scale\": ..}}; an empty one is \
         none. A line that begins with `{{` is JSON. Empty lines are passed over.",
        names.join(", ")
    )
}
