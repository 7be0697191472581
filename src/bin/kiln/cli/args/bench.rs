//! The flags of `kiln bench`.

use super::values::within;
use super::{ImageOptions, LoraArgs, ModelArgs, PromptArgs, RunArgs};
use clap::Args;
use std::path::PathBuf;

/// Flags of `kiln bench`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct BenchArgs {
    /// What the pictures show; any prompt takes the same time
    #[command(flatten)]
    pub prompt: PromptArgs,

    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// Time single ops at klein 4B's shapes instead of pictures; with NAME, those whose name contains it
    ///
    /// Needs no model. Each row tells how much of the ceiling is reached: memory-bound ops against a copy of as many bytes in the
    /// same run; GEMM, convolution and attention on a GPU against the peak of its tensor cores. The CPU gets smaller shapes.
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with_all = ["PromptArgs", "ModelArgs", "LoraArgs", "ImageOptions", "runs", "low_memory", "attention", "trace"],
        help_heading = "Measuring"
    )]
    pub kernels: Option<String>,

    /// Only show that every op can be timed: tiny shapes, few batches, figures that mean nothing
    #[arg(long, requires = "kernels", help_heading = "Measuring")]
    pub quick: bool,

    /// How many warm pictures
    #[arg(long, value_name = "N", value_parser = within(1usize..=1000), default_value = "5", help_heading = "Measuring")]
    pub runs: usize,

    /// Print JSON instead of a table, or write it to a new file beside the table
    ///
    /// With every single time. bench/README.md in the sources describes the fields.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-",
        help_heading = "Measuring"
    )]
    pub json: Option<PathBuf>,

    /// Draw the results to a new SVG file: pictures stage by stage, or kernels below their ceilings
    #[arg(long, value_name = "FILE", help_heading = "Measuring")]
    pub svg: Option<PathBuf>,

    /// Draw the pictures of another engine or run beside; may be given several times
    ///
    /// A file of tools/bench_beside_diffusers.py, or of --json. Size and steps have to be the same.
    #[arg(long, value_name = "FILE", requires = "svg", conflicts_with = "kernels", help_heading = "Measuring")]
    pub beside: Vec<PathBuf>,

    /// Draw what a file of --json has, and measure nothing
    #[arg(
        long,
        value_name = "FILE",
        requires = "svg",
        conflicts_with_all = ["PromptArgs", "ModelArgs", "LoraArgs", "ImageOptions", "runs", "kernels", "json", "share", "trace"],
        help_heading = "Measuring"
    )]
    pub from: Option<PathBuf>,

    /// Generate a picture for each line of standard input, `SEED PROMPT`, and print its times as JSON
    ///
    /// So that another program can take turns with kiln. The first line of output is the JSON of a cold picture, whose prompt and seed
    /// are those of other runs; each line after it has the times of one picture, prompt to PNG.
    #[arg(
        long,
        conflicts_with_all = ["kernels", "json", "share", "svg", "runs"],
        help_heading = "Measuring"
    )]
    pub on_request: bool,

    /// Also print a block to paste into an issue: card, driver, figures, and what was predicted
    ///
    /// It has no paths, no prompt and no name of the machine or its user.
    #[arg(long, conflicts_with = "kernels", help_heading = "Measuring")]
    pub share: bool,

    /// What the pictures are made from and how large
    #[command(flatten)]
    pub image: ImageOptions,

    /// Where and how to compute
    #[command(flatten)]
    pub run: RunArgs,
}
