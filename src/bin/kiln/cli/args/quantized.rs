//! Flags that trade precision for speed and memory.

use super::values::{AccumulateArg, AttentionArg, Nvfp4MathArg, PrecisionArg, weight_format};
use clap::Args;
use kiln::DType;

/// The precision, and how FP8 and NVFP4 are computed with. They belong to every command that loads or plans a model.
#[derive(Args, Clone, Copy, Debug)]
pub struct QuantizedArgs {
    /// Precision that results are stored in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "bf16", help_heading = "Run")]
    pub precision: PrecisionArg,

    /// Quantize the weights of a bf16, f16 or f32 model while it is loaded
    ///
    /// Those of the transformer's blocks and of the text encoder become smaller; embedders, modulations and norms stay as they
    /// are. Nothing is calibrated: `kiln quantize` makes files that are, and that load faster. The transformer's inputs in FP8 have
    /// constant scales; what is out of their range is counted and reported after the image.
    #[arg(long, value_name = "FORMAT", help_heading = "Run")]
    #[arg(value_parser = weight_format(DType::targets().map(|(dtype, target)| (dtype, target.load_help))))]
    pub quantize: Option<DType>,

    /// Format of queries and keys in the transformer's attention
    ///
    /// In FP8 (e4m3) their products take half the time. They are rounded to four significant bits, as the inputs of FP8 layers
    /// are; values stay as they are. `-v` and `kiln plan` tell what the blocks of a model have.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "auto", help_heading = "Run")]
    pub attention: AttentionArg,

    /// How a GPU adds up the products of FP8 layers
    ///
    /// On Hopper tensor cores keep few places of a sum, so that a sum whose terms have one sign comes out too small: by up to 5 %
    /// with 3072 terms and 18 % with 12288. Exact sums make a layer take up to a fifth longer. Other GPUs and the CPU have exact
    /// sums only.
    #[arg(long, value_enum, value_name = "HOW", default_value = "auto", help_heading = "Run")]
    pub fp8_accumulate: AccumulateArg,

    /// What the transformer's NVFP4 weights are multiplied as
    ///
    /// As bf16 they have the values of the file and a quarter of the memory. As FP8 they take twice that memory and half the
    /// time: up to a quarter of them is rounded, by up to 5 %, and so are their inputs. That is for layers whose file has an
    /// input scale; others and text encoders stay with bf16. `-v` and `kiln plan` tell what the layers of a model have.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "auto", help_heading = "Run")]
    pub nvfp4_math: Nvfp4MathArg,
}
