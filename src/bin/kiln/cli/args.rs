//! The flags that several commands share. Only checks of a single flag are here;
//! [`super::generate::GenerateRequest`] checks flags against each other.

mod edit;
mod file;
mod image;
mod lora;
mod plan;
mod preview;
mod quantized;
mod trace;
mod values;

pub use edit::EditFlags;
pub use file::FileArgs;
pub use image::{ImageOptions, STEPS};
pub use lora::{LoraArg, LoraArgs};
pub use plan::PlanArgs;
pub use preview::{PreviewArgs, PreviewTarget, ShowArgs};
pub use quantized::QuantizedArgs;
pub use trace::TraceArgs;
pub use values::*;

use crate::terminal::Verbosity;
use clap::Args;
use kiln::PerComponent;
use kiln::error::{Error, Result};
use kiln::locate::{Environment, LocateRequest};
use std::ffi::OsString;
use std::path::PathBuf;

/// Flags that give a prompt.
#[derive(Args, Debug)]
pub struct PromptArgs {
    /// Describe the image to generate; may be empty
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<OsString>,

    /// Words after the prompt. Most likely the user forgot quotes.
    #[arg(hide = true)]
    pub rest: Vec<OsString>,

    /// Read the prompt from a file, or from standard input with `-`
    ///
    /// The text is UTF-8. A byte order mark at its start and one newline at its end are dropped. Empty standard input is an error.
    /// Pass an empty prompt as "".
    #[arg(long, value_name = "FILE", help_heading = "Input")]
    pub prompt_file: Option<PathBuf>,
}

/// Flags that say where and how to compute.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Choose the backend to compute on
    #[arg(long, value_enum, value_name = "WHERE", default_value = "auto", help_heading = "Run")]
    pub backend: BackendArg,

    /// Use the GPU with this number in `kiln doctor` [default: 0]
    #[arg(long, value_name = "N", value_parser = within(DEVICES), help_heading = "Run")]
    pub device: Option<usize>,

    /// In which formats results are stored, and layers and attention computed
    #[command(flatten)]
    pub quantized: QuantizedArgs,

    /// Let the transformer replace the text encoder in GPU memory
    ///
    /// kiln does this anyway if both do not fit. The image is the same. A run takes slightly longer, because loading waits for
    /// the prompt.
    #[arg(long, help_heading = "Run")]
    pub low_memory: bool,

    /// Set the number of CPU threads [default and maximum: one per core]
    #[arg(long, value_name = "N", value_parser = within(THREADS), help_heading = "Run")]
    pub threads: Option<usize>,

    /// A trace of the run
    #[command(flatten)]
    pub trace: TraceArgs,

    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Run")]
    pub quiet: bool,

    /// Print resolved settings, references and the GPU kernels used
    #[arg(short, long, help_heading = "Run")]
    pub verbose: bool,
}

impl RunArgs {
    /// How much to print.
    pub fn verbosity(&self) -> Verbosity {
        Verbosity::new(self.quiet, self.verbose)
    }

    /// The index of the GPU to use, should the backend be a GPU.
    pub fn device(&self) -> Result<usize> {
        match self.device {
            Some(_) if self.backend == BackendArg::Cpu => {
                Err(Error::usage("--device is about GPUs, --backend cpu takes none", "leave out one of them"))
            }
            asked => Ok(asked.unwrap_or(0)),
        }
    }
}

/// Flags that name a model.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// Use this model folder, or repository id in the Hugging Face cache
    ///
    /// The folder is in the diffusers layout, is ComfyUI's folder of models, or has a file for each part. `builtin` is the small
    /// model inside kiln, and `tiny` is a random model. Without this option kiln looks at KILN_MODEL, then into the cache. If
    /// neither has a model, kiln uses `builtin`.
    #[arg(long, value_name = "PATH|ID", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Use this transformer instead of the model's
    ///
    /// FILE is a safetensors file in the BFL or diffusers layout, or a folder of shards. --text-encoder and --vae also take a
    /// file or a folder.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub transformer: Option<PathBuf>,

    /// Use this text encoder instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,

    /// Use this VAE instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// Use this tokenizer.json instead of the model's
    ///
    /// Models in single files need none, because kiln contains their tokenizer.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,

    /// Set the model variant, if it cannot be inferred from the file names
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Model")]
    pub variant: Option<VariantArg>,

    /// Override the nibble and scale order of NVFP4 files
    ///
    /// ComfyUI and BFL files have one order, ModelOpt files two others. With `auto`, kiln infers the order from the names and
    /// metadata in the file. Any other value overrides even an order that the file declares.
    #[arg(long, value_enum, value_name = "ORDER", default_value = "auto", help_heading = "Model")]
    pub nvfp4_layout: Nvfp4LayoutArg,
}

impl ModelArgs {
    /// Whether a model is named by `--model` or by the environment.
    pub fn is_named(&self, environment: &Environment) -> bool {
        self.model.is_some() || environment.kiln_model.is_some()
    }

    /// Whether a flag names a model or a part of one.
    pub fn names_files(&self) -> bool {
        [&self.model, &self.transformer, &self.text_encoder, &self.vae].iter().any(|path| path.is_some())
    }

    /// The request for `locate`.
    pub fn request(&self, environment: Environment) -> LocateRequest {
        let Self { model, transformer, text_encoder, vae, tokenizer, nvfp4_layout, .. } = self;
        LocateRequest {
            model: model.clone(),
            parts: PerComponent { transformer: transformer.clone(), text_encoder: text_encoder.clone(), vae: vae.clone() },
            tokenizer: tokenizer.clone(),
            nvfp4_layout: (*nvfp4_layout).into(),
            environment,
        }
    }
}
