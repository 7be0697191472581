//! Flags that trade precision for speed and memory.

use super::values::{AccumulateArg, AttentionArg, Nvfp4MathArg, PrecisionArg, weight_format};
use clap::Args;
use kiln::DType;

/// The precision, and the arithmetic of FP8 and NVFP4. Every command that loads or plans a model has these flags.
#[derive(Args, Clone, Copy, Debug)]
pub struct QuantizedArgs {
    /// Set the precision that results are stored in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "bf16", help_heading = "Run")]
    pub precision: PrecisionArg,

    /// Quantize the weights of a bf16, f16 or f32 model at load
    ///
    /// The weights of the transformer's blocks and of the text encoder become smaller. Embedders, modulations and norms keep
    /// their format. Nothing is calibrated. `kiln quantize` writes calibrated files, which also load faster. With fp8, the
    /// transformer's inputs have constant scales. kiln clamps inputs that are out of range, and reports their number after the
    /// image.
    #[arg(long, value_name = "FORMAT", help_heading = "Run")]
    #[arg(value_parser = weight_format(DType::targets().map(|(dtype, target)| (dtype, target.load_help))))]
    pub quantize: Option<DType>,

    /// Set the format of queries and keys in the transformer's attention
    ///
    /// In FP8 (e4m3) the products of queries and keys take half the time. Queries and keys are rounded to four significant bits,
    /// as the inputs of FP8 layers are. Values are not quantized. `-v` and `kiln plan` print the format of each block.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "auto", help_heading = "Run")]
    pub attention: AttentionArg,

    /// Choose how a GPU sums the products of FP8 layers
    ///
    /// Hopper's tensor cores keep only 13 binary places of a sum. A sum whose terms have one sign comes out too small: by up to
    /// 5 % with 3072 terms, and by up to 18 % with 12288. Exact sums make a layer take up to a fifth longer. Other GPUs and the
    /// CPU have exact sums only.
    #[arg(long, value_enum, value_name = "HOW", default_value = "auto", help_heading = "Run")]
    pub fp8_accumulate: AccumulateArg,

    /// Choose how the transformer's NVFP4 weights are multiplied
    ///
    /// With `bf16`, weights stay in NVFP4, in less than a third of the memory of bf16 weights. kiln expands them exactly for each
    /// product. With `fp8`, weights take twice that memory, and products half the time. Up to a quarter of the weights is then
    /// rounded, by up to 5 %. Inputs are rounded, too. FP8 is for layers whose file has an input scale. Other layers and text
    /// encoders use bf16. `-v` and `kiln plan` print the formats of the layers.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "auto", help_heading = "Run")]
    pub nvfp4_math: Nvfp4MathArg,
}
