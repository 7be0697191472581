//! The flags of `kiln plan`.

use super::values::gpu;
use super::{ImageOptions, LoraArgs, ModelArgs, QuantizedArgs};
use clap::{Arg, Args};
use kiln::MODELS;
use kiln::predict::GpuSpec;

/// Print what an image would take, without computing anything
///
/// For klein 4B, or for the model that is named, as it was published or by its files' headers: tokens of each part, the schedule, floating-point
/// operations of each stage, the formats of its layers, bytes of weights and of workspace. Formats and bytes are those on a
/// GPU: quantized weights that it has no kernels for are counted as they are expanded.
#[derive(Args, Debug)]
#[command(override_usage = "kiln plan [OPTIONS]")]
#[command(allow_negative_numbers = true)]
#[command(mut_arg("model", with_names))]
pub struct PlanArgs {
    /// Which model
    #[command(flatten)]
    pub model: ModelArgs,

    /// Adapters of the model
    #[command(flatten)]
    pub lora: LoraArgs,

    /// What the image is made from and how large
    #[command(flatten)]
    pub image: ImageOptions,

    /// In which formats results are stored, and layers and attention computed
    #[command(flatten)]
    pub quantized: QuantizedArgs,

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

/// The flag `--model`, where it also takes the names of published models.
fn with_names(model: Arg) -> Arg {
    let names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
    let more =
        "Of a published model no files are needed. A folder of such a name is `./klein-9b`. Without this option kiln looks at";
    let help =
        format!("Name of a published model, model folder, or repository id in the Hugging Face cache [default: {}]", names[0]);
    let long = format!("{help}\n\nThe names are {}. {more} KILN_MODEL.", names.join(", "));
    model.help(help).long_help(long).value_name("NAME|PATH|ID")
}
