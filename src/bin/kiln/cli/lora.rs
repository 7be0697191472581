//! `kiln lora inspect`: lists the contents of an adapter file, and which of its layers a model has.

use super::adapters::ranks;
use super::args::ModelArgs;
use super::hint::message;
use super::stdout::{json_line, print};
use super::{Process, Subcommand};
use clap::{Arg, Args};
use kiln::error::Result;
use kiln::locate::{locate, locate_adapter};
use kiln::lora::{Adapter, Contents, LayerContents};
use kiln::text::{amount, grouped, shown, shown_line, shown_path};
use kiln::{OpenModel, Variant};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

/// The end of `kiln lora --help` and `kiln lora inspect --help`.
const EXAMPLES: &str = "\
Examples:
  kiln lora inspect watercolor.safetensors
      Layer kinds with their ranks, the spelling of layer names, the base model, trigger words.

  kiln lora inspect owner/repository --model ~/models/FLUX.2-klein-4B
      An adapter in the Hugging Face cache, and which of its layers the model has.

  kiln lora inspect watercolor.safetensors --json | jq .trigger_words
      Every layer and all metadata, for programs.";

/// Inspect LoRA and LoKr adapter files
///
/// To apply an adapter to an image, use --lora of `kiln generate`.
#[derive(Debug, clap::Subcommand)]
#[command(override_usage = "kiln lora inspect [OPTIONS] <FILE>", after_help = EXAMPLES)]
pub enum LoraCommand {
    /// Print an adapter's layers, ranks, base model and trigger words
    ///
    /// kiln also prints how the file spells layer names. No model is needed. With --model, or a flag that names a part, kiln says
    /// which of the adapter's layers that model has. kiln also lists layers of unsupported methods, such as DoRA and LoHa.
    #[command(override_usage = "kiln lora inspect [OPTIONS] <FILE>", after_help = EXAMPLES)]
    Inspect(Box<InspectArgs>),
}

/// Flags of `kiln lora inspect`.
#[derive(Args, Debug)]
#[command(mut_arg("model", for_comparison))]
pub struct InspectArgs {
    /// Read this safetensors file, folder with one, or cached `owner/name`
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Which model to compare it with
    #[command(flatten)]
    pub model: ModelArgs,

    /// Print a JSON object with every layer and all metadata
    #[arg(long)]
    pub json: bool,

    /// List every layer instead of layer kinds
    #[arg(short, long)]
    pub verbose: bool,
}

/// Changes the help of `--model`: no model is used unless a flag names one.
fn for_comparison(model: Arg) -> Arg {
    let help = "Compare with this model folder, or id in the Hugging Face cache";
    let values = "PATH is what --model of `kiln generate` takes, including `builtin` and `tiny`.";
    model.help(help).long_help(format!("{help}\n\n{values} Without a flag that names a model or part, kiln compares nothing."))
}

impl Subcommand for LoraCommand {
    fn run(self: Box<Self>, Process { environment, out, .. }: Process<'_>) -> Result<()> {
        let Self::Inspect(args) = *self;
        let path = locate_adapter(&args.file, &environment)?;
        let contents = Contents::open(&path)?;
        let fit = if args.model.names_files() {
            let model = OpenModel::open(&locate(&args.model.request(environment))?, args.model.variant.map(Variant::from))?;
            Some(Fit::new(&contents, &model))
        } else {
            None
        };
        let text = match args.json {
            true => json_line(&Report::new(&contents, fit.as_ref()))?,
            false => table(&contents, fit.as_ref(), args.verbose).into_bytes(),
        };
        print(out, &text)
    }
}

/// How an adapter fits a model.
#[derive(Serialize)]
struct Fit {
    model: String,
    /// Whether the model can use it without `--lora-partial`.
    fits: bool,
    /// How many of its layers the model has.
    matched: usize,
    /// Names of layers that the model does not have.
    unmatched: Vec<String>,
    /// Why it cannot be used, if it cannot.
    error: Option<String>,
}

impl Fit {
    fn new(contents: &Contents, model: &OpenModel) -> Self {
        let targets = model.layer_targets();
        let names = contents.layers.iter().map(|layer| layer.name.clone());
        let (matched, unmatched): (Vec<String>, Vec<String>) = names.partition(|name| targets.find(name).is_some());
        let error = Adapter::open_whole(&contents.path, &targets).err().map(|error| message(&error));
        Self { model: model.name.clone(), fits: error.is_none(), matched: matched.len(), unmatched, error }
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    file: String,
    bytes: u64,
    sha256: &'a str,
    dtypes: &'a [&'static str],
    methods: Vec<&'static str>,
    /// Methods that are not supported.
    unsupported: Vec<&'static str>,
    spellings: Vec<&'static str>,
    /// The model that it seems to be made for.
    base: Option<&'a str>,
    name: Option<&'a str>,
    trigger_words: &'a [String],
    tags: Vec<Tag<'a>>,
    layers: Vec<Layer<'a>>,
    /// Tensors that belong to no layer.
    other_tensors: &'a [String],
    metadata: &'a BTreeMap<String, String>,
    fit: Option<&'a Fit>,
}

#[derive(Serialize)]
struct Tag<'a> {
    tag: &'a str,
    count: u64,
}

#[derive(Serialize)]
struct Layer<'a> {
    name: &'a str,
    method: &'static str,
    spelling: &'static str,
    rank: Option<usize>,
    rows: Option<usize>,
    columns: Option<usize>,
    alpha: Option<f32>,
    scale: Option<f32>,
    fault: Option<&'a str>,
}

impl<'a> Report<'a> {
    fn new(contents: &'a Contents, fit: Option<&'a Fit>) -> Self {
        let layer = |layer: &'a LayerContents| Layer {
            name: &layer.name,
            method: layer.method,
            spelling: layer.spelling.name(),
            rank: layer.rank,
            rows: layer.shape.map(|[rows, _]| rows),
            columns: layer.shape.map(|[_, columns]| columns),
            alpha: layer.alpha,
            scale: layer.scale,
            fault: layer.fault.as_deref(),
        };
        Self {
            file: contents.path.to_string_lossy().into_owned(),
            bytes: contents.bytes,
            sha256: &contents.digest,
            dtypes: &contents.dtypes,
            methods: each_once(contents.layers.iter().map(|layer| layer.method)),
            unsupported: unsupported(contents),
            spellings: spellings(contents),
            base: contents.base.as_deref(),
            name: contents.notes.name.as_deref(),
            trigger_words: &contents.notes.triggers,
            tags: contents.notes.tags.iter().map(|(tag, count)| Tag { tag, count: *count }).collect(),
            layers: contents.layers.iter().map(layer).collect(),
            other_tensors: &contents.others,
            metadata: &contents.metadata,
            fit,
        }
    }
}

/// Names in order, each once.
fn each_once(names: impl Iterator<Item = &'static str>) -> Vec<&'static str> {
    let mut list = Vec::new();
    names.for_each(|name| {
        if !list.contains(&name) {
            list.push(name);
        }
    });
    list
}

fn unsupported(contents: &Contents) -> Vec<&'static str> {
    each_once(contents.layers.iter().filter(|layer| !layer.supported).map(|layer| layer.method))
}

fn spellings(contents: &Contents) -> Vec<&'static str> {
    each_once(contents.layers.iter().map(|layer| layer.spelling.name()))
}

/// How many faults, unmatched layers and other tensors a table lists without `--verbose`.
const LISTED: usize = 3;

/// The output without `--json`. Text from the file is escaped, line by line.
fn table(contents: &Contents, fit: Option<&Fit>, verbose: bool) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<10} {}", shown_line(&value));
    };
    row("file", format!("{}, {}, {}", shown_path(&contents.path), amount(contents.bytes), contents.dtypes.join(" and ")));
    row("sha256", contents.digest.clone());
    row("method", each_once(contents.layers.iter().map(|layer| layer.method)).join(" and "));
    let unsupported = unsupported(contents);
    if !unsupported.is_empty() {
        row("", format!("not supported: {}", unsupported.join(" and ")));
    }
    row("spelling", spellings(contents).join(" and "));
    row("base", contents.base.clone().unwrap_or_else(|| "unknown".into()));
    let layers = contents.layers.iter();
    row("layers", format!("{}, {}", contents.layers.len(), ranks(layers.clone().map(|layer| layer.rank))));
    if verbose {
        layers.clone().for_each(|layer| row("", layer_line(&shown(&layer.name), 1, &[layer])));
    } else {
        kinds(contents).iter().for_each(|(kind, layers)| row("", layer_line(&shown(kind), layers.len(), layers)));
    }
    let list = |names: Vec<String>| {
        let shown = if verbose { names.len() } else { LISTED };
        let more = names.len().saturating_sub(shown);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", names.into_iter().take(shown).collect::<Vec<_>>().join(", "))
    };
    let faults = layers.filter_map(|layer| Some(format!("{}: {}", shown(&layer.name), layer.fault.as_ref()?)));
    let faults: Vec<String> = faults.collect();
    if !faults.is_empty() {
        row("faults", list(faults));
    }
    if !contents.others.is_empty() {
        row("others", format!("tensors of no layer: {}", list(contents.others.iter().map(|name| shown(name)).collect())));
    }
    if let Some(fit) = fit {
        row("model", format!("{} has {} of {} layers", fit.model, fit.matched, contents.layers.len()));
        if !fit.unmatched.is_empty() {
            row("", format!("it does not have {}", list(fit.unmatched.iter().map(|name| shown(name)).collect())));
        }
        row("", fit.error.clone().unwrap_or_else(|| "it can be used".into()));
    }
    let notes = &contents.notes;
    notes.name.iter().for_each(|name| row("name", shown(name)));
    let quoted: Vec<String> = notes.triggers.iter().map(|word| format!("\"{}\"", shown(word))).collect();
    row("trigger", if quoted.is_empty() { "the file names no trigger words".into() } else { quoted.join(", ") });
    if !notes.tags.is_empty() {
        let tags: Vec<String> = notes.tags.iter().map(|(tag, count)| format!("{} ({})", shown(tag), grouped(*count))).collect();
        row("tags", tags.join(", "));
    }
    for (i, (key, value)) in contents.metadata.iter().enumerate() {
        row(if i == 0 { "metadata" } else { "" }, format!("{}: {}", shown(key), shown(value)));
    }
    text
}

/// Groups layers that differ only in their block number, by their name with `*` for the number.
fn kinds(contents: &Contents) -> BTreeMap<String, Vec<&LayerContents>> {
    let mut kinds: BTreeMap<String, Vec<&LayerContents>> = BTreeMap::new();
    for layer in &contents.layers {
        kinds.entry(kind_of(&layer.name)).or_default().push(layer);
    }
    kinds
}

/// A name with the number of its block replaced.
fn kind_of(name: &str) -> String {
    for word in ["blocks.", "blocks_", "layers.", "layers_"] {
        if let Some((before, rest)) = name.split_once(word) {
            let after = rest.trim_start_matches(|c: char| c.is_ascii_digit());
            if after.len() < rest.len() {
                return format!("{before}{word}*{after}");
            }
        }
    }
    name.into()
}

/// Describes the layers of one kind in one line.
fn layer_line(name: &str, count: usize, layers: &[&LayerContents]) -> String {
    let values = |of: &dyn Fn(&LayerContents) -> Option<String>| {
        let mut list: Vec<String> = Vec::new();
        for value in layers.iter().filter_map(|layer| of(layer)) {
            if !list.contains(&value) {
                list.push(value);
            }
        }
        match &list[..] {
            [first, _, _, _, ..] => format!("{first} and {} others", list.len() - 1),
            few => few.join(" and "),
        }
    };
    let mut parts = vec![ranks(layers.iter().map(|layer| layer.rank))];
    for (what, text) in [
        ("", values(&|layer| layer.shape.map(|[rows, columns]| format!("{rows}x{columns}")))),
        ("alpha ", values(&|layer| layer.alpha.map(|alpha| alpha.to_string()))),
        ("scale ", values(&|layer| layer.scale.map(|scale| scale.to_string()))),
    ] {
        if !text.is_empty() {
            parts.push(format!("{what}{text}"));
        }
    }
    format!("{count:>3} {name}: {}", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_names_without_the_number_of_the_block() {
        for (name, kind) in [
            ("diffusion_model.double_blocks.12.img_attn.qkv", "diffusion_model.double_blocks.*.img_attn.qkv"),
            ("lora_unet_single_blocks_3_linear1", "lora_unet_single_blocks_*_linear1"),
            ("transformer.single_transformer_blocks.0.attn.to_out", "transformer.single_transformer_blocks.*.attn.to_out"),
            ("text_encoder.model.layers.7.mlp.up_proj", "text_encoder.model.layers.*.mlp.up_proj"),
            ("transformer.x_embedder", "transformer.x_embedder"),
            ("a.blocks.x", "a.blocks.x"),
        ] {
            assert_eq!(kind_of(name), kind, "{name}");
        }
    }
}
