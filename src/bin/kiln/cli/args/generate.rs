//! The flags of `kiln generate` as other commands fill them in.

use super::{FileArgs, GenerateArgs, LoraArgs, ModelArgs, PromptArgs, RunArgs, ShapeArgs};

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
        Self {
            prompt,
            model,
            lora,
            output: None,
            file: FileArgs::default(),
            dump: None,
            json: false,
            shape,
            negative,
            seed: Some(0),
            count: 1,
            noise_kind: None,
            noise_sms: None,
            noise_threads: None,
            noise: None,
            run,
        }
    }
}
