//! The flags of `kiln plan`.

use super::values::gpu;
use super::{ImageOptions, KleinArg, LoraArgs, ModelArgs, QuantisedArgs};
use clap::Args;
use kiln::predict::GpuSpec;

/// Print what a picture would take, without computing anything
///
/// For klein 4B, or for the model that is named, by its files' headers: tokens of each part, the schedule, floating-point
/// operations of each stage, the formats of its layers, bytes of weights and of workspace. Formats and bytes are those on a
/// GPU: quantised weights that it has no kernels for are counted as they are expanded.
#[derive(Args, Debug)]
#[command(override_usage = "kiln plan [OPTIONS]")]
#[command(allow_negative_numbers = true)]
pub struct PlanArgs {
    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Size of klein, whatever KILN_MODEL names [default: 4b]
    #[arg(
        long,
        value_enum,
        value_name = "SIZE",
        conflicts_with_all = ["model", "transformer", "text_encoder", "vae", "tokenizer"],
        help_heading = "Model"
    )]
    pub klein: Option<KleinArg>,

    /// FLUX.2 [dev] instead of klein, whatever KILN_MODEL names
    #[allow(rustdoc::broken_intra_doc_links)] // the comment is a help text, and FLUX.2 [dev] a name
    #[arg(
        long,
        conflicts_with_all = ["klein", "model", "transformer", "text_encoder", "vae", "tokenizer"],
        help_heading = "Model"
    )]
    pub dev: bool,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// What the picture is made from and how large
    #[command(flatten)]
    pub image: ImageOptions,

    /// In which formats results are stored, and layers and attention computed
    #[command(flatten)]
    pub quantised: QuantisedArgs,

    /// The GPU to plan for: RTX 3090, RTX 4090, RTX 5090, RTX PRO 6000 or H200 [default: the first one here]
    ///
    /// With predicted times, which were not measured. Where there is no GPU, the plan is for compute capability 8.0, the least that
    /// kiln runs on.
    #[arg(long, value_name = "NAME", value_parser = gpu, help_heading = "Run")]
    pub gpu: Option<GpuSpec>,

    /// Print a JSON object instead of a table
    #[arg(long, help_heading = "Run")]
    pub json: bool,
}
