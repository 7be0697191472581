//! Flags of `kiln quantize`.

use super::image::STEPS;
use super::values::{BackendArg, FormatArg, PartArg, VariantArg, WeightLayoutArg, pixels, within};
use clap::Args;
use std::path::PathBuf;

/// Flags of `kiln quantize`.
#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// Model folder, repository id in the Hugging Face cache, or the safetensors file of one part
    ///
    /// As --model of `kiln generate`, `builtin` and `tiny` included; weights in BF16, F16 or F32. A file is the part that --part
    /// says.
    #[arg(value_name = "IN")]
    pub input: PathBuf,

    /// The folder to write, or with the ending .safetensors the file of one part
    ///
    /// A folder holds a whole model: what is not quantised is copied. While it is written it is called OUT.part, and OUT.part.json
    /// beside it says how far that is.
    #[arg(value_name = "OUT")]
    pub output: PathBuf,

    /// Format of the quantised layers
    ///
    /// The layers of the transformer are those that the official files quantise: those of the blocks, for some models without a few.
    /// In the text encoder they are all projections, and with nvfp4 those of attention are FP8.
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Format")]
    pub to: FormatArg,

    /// Which programs the transformer is laid out for, besides kiln
    ///
    /// No file serves both, and kiln reads either without a flag. diffusers has it from `from_single_file` with a
    /// `BFLQuantizationConfig`; NVFP4 for it needs calibration. It reads no quantised text encoders: those are always laid out for
    /// ComfyUI.
    #[arg(long, value_enum, value_name = "PROGRAM", default_value = "comfy", help_heading = "Format")]
    pub layout: WeightLayoutArg,

    /// Which part to quantise [default: both in a folder, the transformer in a file]
    #[arg(long, value_enum, value_name = "PART", help_heading = "Format")]
    pub part: Option<PartArg>,

    /// Keep layers in BF16, by name; may be given several times
    ///
    /// `*` stands for any characters and `?` for one, as in 'single_blocks.0.*'. Names are those of the file that is written,
    /// without `.weight`; -v lists them.
    #[arg(long, value_name = "PATTERN", help_heading = "Format")]
    pub keep: Vec<String>,

    /// Prompts to calibrate with, one per line of a file [default: a built-in list]
    ///
    /// Calibration runs the model and measures the largest input of every layer, from which its `input_scale` follows, with two
    /// octaves of head room.
    #[arg(long, value_name = "FILE", help_heading = "Calibration")]
    pub prompts: Option<PathBuf>,

    /// Width and height of the pictures of the calibration [default: 512, on the CPU 128]
    #[arg(long, value_name = "PIXELS", value_parser = pixels, help_heading = "Calibration")]
    pub calibration_size: Option<usize>,

    /// Denoising steps of the calibration [default: the model's own, on the CPU at most 2]
    #[arg(long, value_name = "N", value_parser = within(STEPS), help_heading = "Calibration")]
    pub calibration_steps: Option<usize>,

    /// Scale the inputs of layers by constants, and run nothing
    ///
    /// FP8 files then have input scales of 1, or of 8 behind a SwiGLU, which leaves room enough for any klein; NVFP4 files have
    /// none, and kiln multiplies their layers by bf16.
    #[arg(
        long,
        conflicts_with_all = ["prompts", "calibration_size", "calibration_steps", "backend", "device"],
        help_heading = "Calibration"
    )]
    pub no_calibration: bool,

    /// Backend to calibrate on [default: auto]
    #[arg(long, value_enum, value_name = "WHERE", help_heading = "Calibration")]
    pub backend: Option<BackendArg>,

    /// Which GPU, as `kiln doctor` numbers them [default: 0]
    #[arg(long, value_name = "N", value_parser = within(0usize..=1023), help_heading = "Calibration")]
    pub device: Option<usize>,

    /// Text encoder to calibrate with or to copy, instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,

    /// VAE to copy, instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// The tokenizer.json to use instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,

    /// Variant of the model, where names do not tell; it decides which layers stay in BF16
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Model")]
    pub variant: Option<VariantArg>,

    /// Replace a file that exists; a folder that holds something never is
    #[arg(long, help_heading = "Output")]
    pub force: bool,

    /// Discard what an earlier run left unfinished
    #[arg(long, help_heading = "Output")]
    pub restart: bool,

    /// Print a JSON object with every layer instead of the path
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// CPU threads, at most one per core [default: one per core]
    #[arg(long, value_name = "N", value_parser = within(1usize..=1024), help_heading = "Run")]
    pub threads: Option<usize>,

    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Run")]
    pub quiet: bool,

    /// Print more: the error of every layer
    #[arg(short, long, help_heading = "Run")]
    pub verbose: bool,
}
