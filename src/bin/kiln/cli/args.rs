//! The flags that commands have in common; a command's own are in its file. Only checks of a single flag are here;
//! [`super::generate::GenerateRequest`] checks flags against each other.

mod file;
mod image;
mod lora;
mod plan;
mod quantized;
mod trace;
mod values;

pub use file::FileArgs;
pub use image::{ImageOptions, STEPS};
pub use lora::{LoraArg, LoraArgs};
pub use plan::PlanArgs;
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
    /// What to show; may be empty
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<OsString>,

    /// What was typed after it, which is a mistake: most likely quotes were forgotten.
    #[arg(hide = true)]
    pub rest: Vec<OsString>,

    /// Read the prompt from a file, or from standard input with `-`
    ///
    /// UTF-8. A byte order mark at its start and one newline at its end are dropped. Standard input that is empty is an error; an
    /// empty prompt is given as "".
    #[arg(long, value_name = "FILE", help_heading = "Input")]
    pub prompt_file: Option<PathBuf>,
}

/// Flags that say where and how to compute.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Backend to compute on
    #[arg(long, value_enum, value_name = "WHERE", default_value = "auto", help_heading = "Run")]
    pub backend: BackendArg,

    /// Which GPU, as `kiln doctor` numbers them [default: 0]
    #[arg(long, value_name = "N", value_parser = within(DEVICES), help_heading = "Run")]
    pub device: Option<usize>,

    /// In which formats results are stored, and layers and attention computed
    #[command(flatten)]
    pub quantized: QuantizedArgs,

    /// Let the transformer take the text encoder's place in GPU memory
    ///
    /// Done anyway where both do not fit. The image is the same; it is there a little later, because loading waits for the
    /// prompt.
    #[arg(long, help_heading = "Run")]
    pub low_memory: bool,

    /// CPU threads, at most one per core [default: one per core]
    #[arg(long, value_name = "N", value_parser = within(THREADS), help_heading = "Run")]
    pub threads: Option<usize>,

    /// A trace of the run
    #[command(flatten)]
    pub trace: TraceArgs,

    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Run")]
    pub quiet: bool,

    /// Print more: what became of the flags and of references, and which GPU kernels ran
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
    /// Model folder, or repository id in the Hugging Face cache
    ///
    /// A folder as diffusers writes it, ComfyUI's folder of models, or one with a file for each part; or `builtin`, the small
    /// model that kiln has itself, or `tiny`, a random one. Without this option kiln looks at KILN_MODEL, then into the cache.
    #[arg(long, value_name = "PATH|ID", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Transformer to use instead of the model's
    ///
    /// A safetensors file in the BFL or the diffusers layout, or a folder of shards. The same goes for the other parts.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub transformer: Option<PathBuf>,

    /// Text encoder to use instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,

    /// VAE to use instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// The tokenizer.json to use instead of the model's
    ///
    /// Single files need none: the one they were trained with is built in.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,

    /// Variant of the model, where names do not tell
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Model")]
    pub variant: Option<VariantArg>,

    /// Order of elements and scales in NVFP4 files, most of which do not tell
    ///
    /// Files of ComfyUI and BFL have one order, those of ModelOpt two others. kiln goes by the names and the metadata in the
    /// file.
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
