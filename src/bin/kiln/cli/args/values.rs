//! The values of flags: choices, and numbers within limits.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kiln::device::Fp8Accumulate;
use kiln::lora::AdapterMode;
use kiln::metadata::Detail;
use kiln::predict::{GPU_SPECS, GpuSpec};
use kiln::quantize::WeightLayout;
use kiln::{AttentionFormat, Component, DType, Layout, Nvfp4Layout, Nvfp4Math, Padding, Precision, Variant};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Defines a `ValueEnum` that converts to another enum.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident for $target:ty { $($(#[$text:meta])* $case:ident => $value:expr,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        #[allow(missing_docs)] // the comments are help texts
        pub enum $name {
            $($(#[$text])* $case,)+
        }

        impl From<$name> for $target {
            fn from(choice: $name) -> Self {
                match choice {
                    $($name::$case => $value,)+
                }
            }
        }
    };
}

choice! {
    /// Values of `--variant`.
    VariantArg for Variant {
        /// Few steps, no guidance
        Distilled => Variant::Distilled,
        /// Many steps, with guidance
        Base => Variant::Base,
        /// Distilled, with cached reference images
        Kv => Variant::Kv,
        /// FLUX.2 dev: many steps, the guidance scale is an input
        Dev => Variant::Dev,
    }
}

choice! {
    /// Values of `--metadata`.
    #[derive(Default)]
    DetailArg for Detail {
        /// Everything that is needed to make the image again
        #[default]
        Full => Detail::Full,
        /// Prompt and settings
        Basic => Detail::Basic,
        /// Nothing
        None => Detail::None,
    }
}

choice! {
    /// Values of `--padding`.
    #[derive(Deserialize, Serialize)]
    #[serde(rename_all = "kebab-case")]
    PaddingArg for Padding {
        /// Before the prompt, with padding tokens that attend to nothing
        Left => Padding::Left,
        /// After the prompt, with padding tokens that attend to the prompt
        Right => Padding::Right,
        /// Zeros before the prompt
        LeftZeros => Padding::LeftZeros,
        /// Zeros after the prompt
        RightZeros => Padding::RightZeros,
    }
}

choice! {
    /// Values of `--precision`.
    PrecisionArg for Precision {
        /// Single precision, nothing rounded
        F32 => Precision::F32,
        /// bfloat16, as the models were trained
        Bf16 => Precision::Bf16,
    }
}

choice! {
    /// Values of `--attention`.
    AttentionArg for AttentionFormat {
        /// FP8 in blocks with quantized inputs, if available and faster
        Auto => AttentionFormat::Auto,
        /// The format of --precision, like other activations
        Bf16 => AttentionFormat::Bf16,
        /// FP8 in every block, or an error that says what is missing
        Fp8 => AttentionFormat::Fp8,
    }
}

choice! {
    /// Values of `--fp8-accumulate`.
    AccumulateArg for Fp8Accumulate {
        /// Like `fast` for up to 6144 products, else partial sums of 1024 in f32, at most 1.5 % too small
        Auto => Fp8Accumulate::Auto,
        /// Sum partial sums of 128 products in f32
        Exact => Fp8Accumulate::Exact,
        /// Sum everything in tensor cores, which keep 13 binary places
        Fast => Fp8Accumulate::Fast,
    }
}

choice! {
    /// Values of `--nvfp4-math`.
    Nvfp4MathArg for Nvfp4Math {
        /// NVFP4 inputs if the device multiplies them, else bf16
        Auto => Nvfp4Math::Auto,
        /// bf16, which is exact
        Bf16 => Nvfp4Math::Bf16,
        /// FP8, re-encoded when the model is loaded
        Fp8 => Nvfp4Math::Fp8,
    }
}

choice! {
    /// Values of `--lora-mode`.
    LoraModeArg for AdapterMode {
        /// Merge into bf16, f16 and f32 weights, branch for FP8 and NVFP4; in `kiln run` always branch
        Auto => AdapterMode::Auto,
        /// Add to the weights at load; quantized weights are expanded for it
        Merge => AdapterMode::Merge,
        /// Compute alongside the layers, whose weights do not change
        Branch => AdapterMode::Branch,
    }
}

/// Values of `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ImageFormatArg {
    /// Lossless
    Png,
    /// Lossy, see --quality; colors are not subsampled
    Jpeg,
    /// Lossless
    Webp,
}

/// Parses `--to` and `--quantize`: formats that weights are quantized to, each with its help.
pub fn weight_format(formats: impl Iterator<Item = (DType, &'static str)>) -> impl TypedValueParser<Value = DType> {
    let names = PossibleValuesParser::new(formats.map(|(dtype, help)| PossibleValue::new(dtype.label()).help(help)));
    names.try_map(|name| DType::targets().map(|(dtype, _)| dtype).find(|dtype| dtype.label() == name).ok_or("no format"))
}

choice! {
    /// Values of `--layout` of `kiln quantize`.
    WeightLayoutArg for WeightLayout {
        /// The layout that ComfyUI reads and Black Forest Labs publishes
        Comfy => WeightLayout::Comfy,
        /// diffusers' layout: FP8 row scales, NVFP4 in ModelOpt's order
        Diffusers => WeightLayout::Diffusers,
    }
}

choice! {
    /// Values of `--part`.
    PartArg for Component {
        /// The transformer
        Transformer => Component::Transformer,
        /// The text encoder
        TextEncoder => Component::TextEncoder,
    }
}

choice! {
    /// Values of `--nvfp4-layout`.
    Nvfp4LayoutArg for Option<Nvfp4Layout> {
        /// Inferred from the file
        Auto => None,
        /// First element in the high nibble, scales in tiles
        Comfy => Some(Nvfp4Layout::COMFY),
        /// First element in the low nibble, scales row by row
        Modelopt => Some(Nvfp4Layout::MODELOPT),
        /// First element in the low nibble, scales in tiles
        ModeloptSingle => Some(Nvfp4Layout::MODELOPT_SINGLE),
    }
}

choice! {
    /// Values of `--layout`.
    LayoutArg for Layout {
        /// A folder with one folder per part
        Diffusers => Layout::Diffusers,
        /// One file per part
        Bfl => Layout::Bfl,
    }
}

choice! {
    /// Values of `--dtype`.
    DTypeArg for DType {
        /// bfloat16
        Bf16 => DType::Bf16,
        /// IEEE half precision
        F16 => DType::F16,
        /// IEEE single precision
        F32 => DType::F32,
    }
}

/// Values of `--noise-kind`.
#[allow(clippy::enum_variant_names)] // the values are spelled like them
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NoiseArg {
    /// PyTorch on a CUDA device
    TorchCuda,
    /// PyTorch 2.12 and later on the CPU
    TorchCpu,
    /// PyTorch up to 2.11 on the CPU, drawing bfloat16
    TorchCpuLegacy,
}

/// Values of `--backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// A usable GPU, else the CPU
    Auto,
    /// An NVIDIA GPU
    Cuda,
    /// The CPU
    Cpu,
}

/// The range of GPU indices.
pub const DEVICES: RangeInclusive<usize> = 0..=1023;

/// The range of `--threads`.
pub const THREADS: RangeInclusive<usize> = 1..=1024;

/// Parses a number of pixels. A later check decides whether it is legal, because that depends on both sides of the image.
pub fn pixels(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a number of pixels, such as 1024".into())
}

/// Says which whole numbers a parser accepts.
pub fn a_whole_number(range: &RangeInclusive<impl Display>) -> String {
    format!("expected a whole number from {} to {}", range.start(), range.end())
}

/// Says which numbers a parser accepts.
pub fn a_number(range: &RangeInclusive<f32>) -> String {
    format!("expected a number from {} to {}", range.start(), range.end())
}

/// A parser of whole numbers within limits.
pub fn within<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| a_whole_number(&range))
}

/// Parses the name of a GPU of the table.
pub fn gpu(text: &str) -> Result<GpuSpec, String> {
    let names: Vec<&str> = GPU_SPECS.iter().map(|gpu| gpu.name.trim_start_matches("GeForce ")).collect();
    GpuSpec::named(text).cloned().ok_or_else(|| format!("expected one of {}", names.join(", ")))
}

/// A parser of numbers within limits.
pub fn number(range: RangeInclusive<f32>) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync + 'static {
    // NaN is not contained in any range.
    move |text| text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| a_number(&range))
}
