//! The flags of `kiln generate` as other commands fill them in.

use super::{Cli, GenerateArgs, LoraArgs, ModelArgs, PromptArgs, RunArgs, ShapeArgs};
use clap::Parser;

impl GenerateArgs {
    /// One image with seed 0 for a command that decides itself what becomes of it.
    pub fn without_files(
        prompt: PromptArgs,
        model: ModelArgs,
        lora: LoraArgs,
        shape: ShapeArgs,
        negative: Option<String>,
        run: RunArgs,
    ) -> Self {
        let usual = Cli::parse_from(["kiln", "--seed", "0"]).generate;
        Self { prompt, model, lora, shape, negative, run, ..usual }
    }
}
