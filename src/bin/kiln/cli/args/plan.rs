//! The flags of `kiln plan`.

use super::values::gpu;
use super::{ImageOptions, LoraArgs, ModelArgs, QuantizedArgs};
use clap::{Arg, Args};
use kiln::MODELS;
use kiln::predict::GpuSpec;

/// Print the operations and memory that an image takes
///
/// kiln generates no image. Without a flag or KILN_MODEL that names a model, the plan is for klein 4B. A published model needs no
/// files; of other models kiln reads only the headers. The plan lists the tokens of each part, the schedule, the floating-point
/// operations of each stage, the layer formats, and the bytes of weights and workspace. Formats and bytes are for a GPU. Quantized
/// weights for which the GPU has no kernels count as expanded.
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

    /// Plan for this GPU [default: the first GPU of this machine]
    ///
    /// The names are RTX 3090, RTX 4090, RTX 5090, RTX PRO 6000 and H200. Times for these GPUs are predicted and not measured.
    /// Without a GPU, the plan is for compute capability 8.0, the lowest that kiln runs on.
    #[arg(long, value_name = "NAME", value_parser = gpu, help_heading = "Run")]
    pub gpu: Option<GpuSpec>,

    /// Print a JSON object instead of a table
    #[arg(long, help_heading = "Run")]
    pub json: bool,
}

/// Extends the flag `--model` to the names of published models.
fn with_names(model: Arg) -> Arg {
    let names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
    let help =
        format!("Plan for a published model, a model folder or a cached repository id [default: KILN_MODEL, else {}]", names[0]);
    let more = "A published model needs no files. Write `./klein-9b` for a folder of that name.";
    let long = format!("{help}\n\nThe names are {}. {more}", names.join(", "));
    model.help(help).long_help(long).value_name("NAME|PATH|ID")
}
