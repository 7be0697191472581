//! The flags of `kiln run`.

use super::super::args::{FileArgs, ImageOptions, LoraArgs, ModelArgs, PreviewArgs, RunArgs, ShowArgs};
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
      Continues a stopped run.

  echo '{\"prompt\": \"a red star\", \"seed\": 7, \"output\": \"star.png\"}' | kiln run | jq .path
      A line with its own settings. Another program may keep the pipe open and wait for each answer.

  {\"prompt\": \"a fox\", \"lora\": [\"ink.safetensors\", {\"file\": \"owner/repository\", \"scale\": 0.5}]}
      A line with its own adapters, which replace --lora. The model is not loaded again.";

/// Generate an image per input line, with a model that is loaded once
///
/// The lines come from a file or from standard input. kiln answers each line with a line of JSON on standard output, in order, as
/// soon as the line is done. The answer has the fields of `kiln generate --json` and the line number, or an `error` with its
/// `hint` and `code`. A failed line does not end the run, but makes the exit code 1.
#[derive(Args, Debug)]
#[command(override_usage = "kiln run [OPTIONS] [FILE]", after_help = EXAMPLES)]
#[command(allow_negative_numbers = true)]
pub struct BatchArgs {
    /// Read prompts from this file, one per line; `-` is standard input
    #[arg(value_name = "FILE", default_value = "-", long_help = file_help())]
    pub file: PathBuf,

    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// Write images to this folder [default: the current one]
    ///
    /// kiln creates the folder if it does not exist. File names are made from the prompt's words and a hash of everything that decides
    /// the image. A line can name its `output` instead, relative to this folder.
    #[arg(short, long, value_name = "DIR", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// How files are written
    #[command(flatten)]
    pub image_file: FileArgs,

    /// Skip lines whose file exists, to continue a stopped run
    ///
    /// kiln answers skipped lines, too, with `"skipped": true`. Only a complete image counts as a file. Two runs can share a folder.
    /// kiln then also skips a line if the other run writes the line's file first.
    #[arg(long, conflicts_with = "force", help_heading = "Output")]
    pub skip_existing: bool,

    /// Whether images are drawn
    #[command(flatten)]
    pub show: ShowArgs,

    /// Whether unfinished images are shown
    #[command(flatten)]
    pub preview: PreviewArgs,

    /// What images are made from and how large, where a line does not tell
    #[command(flatten)]
    pub image: ImageOptions,

    /// Set the negative prompt of lines without one; base models only
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
        "Read prompts from this file, one per line; `-` is standard input\n\n\
         A line is a prompt, or a JSON object if it begins with `{{`. The object has `prompt` and any of {}. `size` is \"WxH\", \
         `references` is a list of files, and `sigmas` is text as in --sigmas, or a list of numbers. `lora` is a list of \"FILE\", \
         \"FILE:SCALE\" or {{\"file\": .., \"scale\": ..}}; an empty list means no adapters. Flags decide \
         what a line leaves open. kiln skips empty lines.",
        names.join(", ")
    )
}
