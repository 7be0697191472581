//! The flags of `kiln generate` as other commands fill them in.

use super::{Cli, GenerateArgs, ImageOptions, LoraArgs, ModelArgs, PromptArgs, RunArgs};
use clap::Parser;

impl GenerateArgs {
    /// One image with seed 0 for a command that decides itself what becomes of it.
    pub fn without_files(
        prompt: PromptArgs,
        model: ModelArgs,
        lora: LoraArgs,
        image: ImageOptions,
        negative: Option<String>,
        run: RunArgs,
    ) -> Self {
        let usual = Cli::parse_from(["kiln", "--seed", "0"]).generate;
        Self { prompt, model, lora, image, negative, run, ..usual }
    }
}
