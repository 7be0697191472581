//! `kiln quantize`: writes a model in FP8 or NVFP4.

use super::args::{BackendArg, DEVICES, PartArg, STEPS, THREADS, VariantArg, WeightLayoutArg, pixels, weight_format, within};
use super::device::{SelectedBackend, select_backend};
use super::stdout::{json_line, line_of, print};
use super::{Process, Subcommand};
use crate::terminal::{Terminal, Verbosity};
use clap::Args;
use kiln::device::Fp8Accumulate;
use kiln::error::{Error, Result};
use kiln::locate::{Environment, Found, LocateRequest, locate};
use kiln::output::Staged;
use kiln::progress::Progress;
use kiln::quantize::calibrate::{Calibration, calibrate, read_prompts};
use kiln::quantize::{
    CHECKPOINT_BYTES, ComponentSource, FilePlan, FileReport, Options, Report, Target, calibration_inputs, copies,
};
use kiln::selftest::Records;
use kiln::text::{amount, shown_path};
use kiln::{Component, DType, OpenModel, PerComponent, Pixels, Variant, check_length};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The end of `kiln quantize --help`.
const EXAMPLES: &str = "\
Examples:
  kiln quantize ~/models/FLUX.2-klein-4B ~/models/klein-4b-fp8 --to fp8
      Writes the folder of a whole model, with transformer and text encoder in FP8. kiln copies
      everything else.
      kiln \"a red fox\" --model ~/models/klein-4b-fp8 uses the folder.

  kiln quantize black-forest-labs/FLUX.2-klein-4B klein-4b-nvfp4.safetensors --to nvfp4
  kiln quantize ~/ComfyUI/models qwen-fp8.safetensors --to fp8 --part text-encoder
      One part as a single file, for ComfyUI as well.

  kiln quantize klein.safetensors klein-fp8.safetensors --to fp8 --no-calibration
      A single file without the rest of its model: inputs are scaled by constants.

  kiln quantize ~/models/FLUX.2-klein-4B out --to nvfp4 --keep 'single_blocks.0.*' --keep '*.proj'
      Some layers stay in BF16.";

/// Quantize a model to FP8 or NVFP4 files
///
/// The files have the layout of published quantized files. To continue a stopped run, repeat the command.
#[derive(Args, Debug)]
#[command(override_usage = "kiln quantize [OPTIONS] --to <FORMAT> <IN> <OUT>", after_long_help = EXAMPLES)]
pub struct QuantizeArgs {
    /// Read this model folder, cached repository id, or weights of one part
    ///
    /// IN is what --model of `kiln generate` takes, including `builtin` and `tiny`, or the weights of one part: a safetensors
    /// file, or a folder of shards. --part names that part. Weights are BF16, F16 or F32.
    #[arg(value_name = "IN")]
    pub input: PathBuf,

    /// Write this folder, or this .safetensors file of one part
    ///
    /// A folder holds a whole model, so kiln copies what it does not quantize. Unfinished output is called OUT.tmp, and
    /// OUT.tmp.json next to it records the progress.
    #[arg(value_name = "OUT")]
    pub output: PathBuf,

    /// Quantize layers to this format
    ///
    /// In the transformer, kiln quantizes the layers that official files quantize. These are all layers of the blocks, for some
    /// models with a few exceptions. In the text encoder kiln quantizes all projections. With nvfp4, attention projections of the
    /// text encoder become FP8.
    #[arg(long, value_name = "FORMAT", help_heading = "Format")]
    #[arg(value_parser = weight_format(DType::targets().map(|(dtype, target)| (dtype, target.file_help))))]
    pub to: DType,

    /// Lay out the transformer for this program
    ///
    /// kiln reads every layout without a flag, but ComfyUI and diffusers read only their own. diffusers loads its files with
    /// `from_single_file` and a `BFLQuantizationConfig`; NVFP4 for diffusers needs calibration. diffusers reads no quantized text
    /// encoders, so these are always laid out for ComfyUI.
    #[arg(long, value_enum, value_name = "PROGRAM", default_value = "comfy", help_heading = "Format")]
    pub layout: WeightLayoutArg,

    /// Quantize only this part [default: both, or transformer if OUT is a file]
    #[arg(long, value_enum, value_name = "PART", help_heading = "Format")]
    pub part: Option<PartArg>,

    /// Keep layers in BF16, by name; may be given several times
    ///
    /// `*` matches any characters and `?` matches one, as in 'single_blocks.0.*'. Names are those in the written file, without
    /// `.weight`. -v lists them.
    #[arg(long, value_name = "PATTERN", help_heading = "Format")]
    pub keep: Vec<String>,

    /// Calibrate with the prompts of this file [default: a built-in list]
    ///
    /// The file has one prompt per line. Calibration runs the model and measures the largest input of every layer. The layer's
    /// `input_scale` allows at least four times that input.
    #[arg(long, value_name = "FILE", help_heading = "Calibration")]
    pub prompts: Option<PathBuf>,

    /// Set the side of calibration images [default: 512, on the CPU 128]
    #[arg(long, value_name = "PIXELS", value_parser = pixels, help_heading = "Calibration")]
    pub calibration_size: Option<usize>,

    /// Set calibration steps [default: the model's own, on the CPU at most 2]
    #[arg(long, value_name = "N", value_parser = within(STEPS), help_heading = "Calibration")]
    pub calibration_steps: Option<usize>,

    /// Scale layer inputs by constants, and run nothing
    ///
    /// FP8 files then have input scales of 1, or of 8 after a SwiGLU. These scales are large enough for any klein model. NVFP4
    /// files then have no input scales, and their layers have bf16 inputs.
    #[arg(
        long,
        conflicts_with_all = ["prompts", "calibration_size", "calibration_steps", "backend", "device"],
        help_heading = "Calibration"
    )]
    pub no_calibration: bool,

    /// Choose the backend to calibrate on [default: auto]
    #[arg(long, value_enum, value_name = "WHERE", help_heading = "Calibration")]
    pub backend: Option<BackendArg>,

    /// Use the GPU with this number in `kiln doctor` [default: 0]
    #[arg(long, value_name = "N", value_parser = within(DEVICES), help_heading = "Calibration")]
    pub device: Option<usize>,

    /// Take this text encoder instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,

    /// Copy this VAE instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// Use this tokenizer.json instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,

    /// Set the model variant, if it cannot be inferred from the file names
    ///
    /// The variant decides which layers stay in BF16.
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Model")]
    pub variant: Option<VariantArg>,

    /// Overwrite an existing file (never a non-empty folder)
    #[arg(long, help_heading = "Output")]
    pub force: bool,

    /// Discard the unfinished output of an earlier run
    #[arg(long, help_heading = "Output")]
    pub restart: bool,

    /// Print a JSON object with every layer instead of the path
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Set the number of CPU threads [default and maximum: one per core]
    #[arg(long, value_name = "N", value_parser = within(THREADS), help_heading = "Run")]
    pub threads: Option<usize>,

    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Run")]
    pub quiet: bool,

    /// Print the quantization error of every layer
    #[arg(short, long, help_heading = "Run")]
    pub verbose: bool,
}

/// The model parts to quantize.
struct Source {
    parts: Vec<ComponentSource>,
    /// The whole model, unless a part was opened without it.
    model: Option<(Found, OpenModel)>,
}

impl Subcommand for QuantizeArgs {
    fn threads(&self) -> Option<usize> {
        self.threads
    }

    fn run(self: Box<Self>, Process { environment, signals, out }: Process<'_>) -> Result<()> {
        let terminal = &signals.terminal(Verbosity::new(self.quiet, self.verbose));
        let stop = &signals.stop;
        let start = Instant::now();
        check_output(&self.output)?;
        let is_file = self.output.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"));
        let parts: Vec<Component> = match self.part.map(Component::from) {
            Some(part) => vec![part],
            None if is_file => vec![Component::Transformer],
            None => vec![Component::Transformer, Component::TextEncoder],
        };
        let for_diffusers = self.layout == WeightLayoutArg::Diffusers;
        if for_diffusers {
            check_diffusers(&self, &parts)?;
        }
        let has_inputs = self.to.format().holds_results && parts.contains(&Component::Transformer);
        let calibrates = has_inputs && !self.no_calibration;
        let runs = if calibrates { Some(Runs::new(&self)?) } else { None };
        let records = Records::below(environment.caches().as_deref());
        let source = open(&self, &parts, !is_file || calibrates, environment)?;
        let calibration = runs.as_ref().map(|runs| format!("{runs:?}"));
        let copied = match &source.model {
            Some((found, model)) if !is_file => copies(found, model.weights(), &parts, model.variant)?,
            _ => Vec::new(),
        };
        let read = match &source.model {
            Some((found, model)) if calibrates => calibration_inputs(found, model.weights(), &parts, model.variant)?,
            _ => Vec::new(),
        };
        let options = Options { format: self.to, layout: self.layout.into(), keep: self.keep.clone(), calibration };
        let shards = source.model.iter().flat_map(|(_, model)| model.weights().values()).flat_map(|weights| weights.shards());
        let tokenizer = source.model.iter().filter_map(|(found, _)| found.tokenizer());
        let inputs = shards.map(|shard| shard.path().to_owned()).chain(self.prompts.clone()).chain(tokenizer).collect();
        let plan = FilePlan::new(&source.parts, copied, &options)?.calibrated_by(read).protecting(inputs);
        source.model.iter().flat_map(|(_, model)| &model.warnings).for_each(|warning| terminal.warn(warning));
        let asked = self.prompts.is_some() || self.calibration_size.is_some() || self.calibration_steps.is_some();
        if asked && !calibrates {
            terminal.warn("text encoders have no input scales, so nothing is calibrated");
        }
        if for_diffusers && parts.contains(&Component::TextEncoder) {
            terminal.say("note: diffusers reads no quantized text encoders; this one is laid out for kiln and ComfyUI");
        }
        if plan.narrowed() > 0 {
            terminal.say(&format!("note: {} tensors that are not quantized are rounded to bf16", plan.narrowed()));
        }
        let target = Target {
            path: self.output.clone(),
            is_folder: !is_file,
            force: self.force,
            restart: self.restart,
            checkpoint_bytes: CHECKPOINT_BYTES,
        };
        let mut model = source.model.map(|(_, model)| model);
        let mut calibrate = || match (model.take(), &runs) {
            (Some(model), Some(runs)) => runs.measure(model, &plan.measured(), &self, &records, stop, terminal),
            _ => Err(Error::Op { op: "calibrate", what: "there is no model to run".into() }),
        };
        let report = plan.write(&target, &mut calibrate, terminal, stop).inspect_err(|error| {
            let (path, journal) = (Staged::path_of(&target.path), Staged::journal_of(&target.path));
            if matches!(error, Error::Interrupted) && path.exists() {
                terminal.say("note: the same command continues from here; with --restart it begins anew");
            } else if is_taken(error) && path.exists() && journal.exists() {
                let [path, journal] = [&path, &journal].map(|path| shown_path(path));
                terminal
                    .say(&format!("note: `{path}` and `{journal}` stay: the same command continues them once OUT is moved away"));
            }
        })?;
        report.files.iter().flat_map(table).for_each(|line| terminal.say(&line));
        if self.json {
            let seconds = start.elapsed().as_secs_f64();
            return print(out, &json_line(&description(&report, &self.output, seconds))?);
        }
        print(out, &line_of(&self.output))
    }
}

/// Endings of the files that other programs keep weights in. A folder of such a name is not what is meant.
const FOREIGN: [&str; 9] = ["gguf", "ggml", "sft", "ckpt", "pt", "pth", "bin", "onnx", "npz"];

/// Fails if the output has the name of standard output, or of a file that kiln does not write.
fn check_output(output: &Path) -> Result<()> {
    let hint = "name a file that ends in .safetensors for one part, or a folder for a model";
    if output.as_os_str() == "-" {
        return Err(Error::usage("quantize writes a file or a folder, not standard output", hint));
    }
    let ending = output.extension().unwrap_or_default();
    if FOREIGN.iter().any(|foreign| ending.eq_ignore_ascii_case(foreign)) {
        return Err(Error::usage(format!("quantize writes no .{} files: {}", ending.display(), output.display()), hint));
    }
    Ok(())
}

/// Whether an output failed because its path is taken.
fn is_taken(error: &Error) -> bool {
    match error {
        Error::OutputExists { .. } => true,
        Error::Write { source, .. } => source.kind() == ErrorKind::DirectoryNotEmpty,
        _ => false,
    }
}

/// Fails if diffusers could not read the requested output.
fn check_diffusers(args: &QuantizeArgs, parts: &[Component]) -> Result<()> {
    if !parts.contains(&Component::Transformer) {
        let hint = "leave out --layout for a file that kiln and ComfyUI read";
        return Err(Error::usage("--layout diffusers: diffusers reads no quantized text encoders", hint));
    }
    if args.no_calibration && args.to == DType::E2m1 {
        let what = "--layout diffusers: diffusers reads NVFP4 only with input scales, which only calibration gives";
        return Err(Error::usage(what, "leave out --no-calibration, or use --to fp8"));
    }
    Ok(())
}

/// The settings of a calibration. The journal records them as text, and a stopped run resumes only with the same settings.
#[derive(Debug)]
struct Runs {
    prompts: Option<Vec<String>>,
    size: Option<Pixels>,
    steps: Option<usize>,
}

impl Runs {
    fn new(args: &QuantizeArgs) -> Result<Self> {
        let prompts = args.prompts.as_deref().map(read_prompts).transpose()?;
        prompts.iter().flatten().try_for_each(|prompt| check_length(prompt.len()))?;
        let size = args.calibration_size.map(square).transpose()?;
        Ok(Self { prompts, size, steps: args.calibration_steps })
    }

    /// Runs the model and measures the inputs of these layers.
    fn measure(
        &self,
        model: OpenModel,
        layers: &BTreeSet<&str>,
        args: &QuantizeArgs,
        records: &Records,
        stop: &Arc<AtomicBool>,
        terminal: &Terminal,
    ) -> Result<BTreeMap<String, f32>> {
        let backend = args.backend.unwrap_or(BackendArg::Auto);
        let selected = select_backend(backend, args.device.unwrap_or(0), Fp8Accumulate::Auto, records, stop)?;
        selected.announce(terminal);
        let SelectedBackend { backend, machine, device, .. } = selected;
        let by_default = if device.is_some() { Calibration::thorough } else { Calibration::quick };
        let mut calibration = by_default(&model.defaults, model.variant)?;
        calibration.prompts = self.prompts.clone().unwrap_or(calibration.prompts);
        calibration.size = self.size.unwrap_or(calibration.size);
        calibration.steps = self.steps.unwrap_or(calibration.steps);
        terminal.say(&format!("calibration: {calibration}, on {machine}"));
        calibrate(backend, &machine, model, &calibration, &|name| layers.contains(name), terminal)
    }
}

/// A square image for calibration.
fn square(side: usize) -> Result<Pixels> {
    Pixels::new(side, side).map_err(|error| match error {
        Error::ImageSize { rule, nearest: (side, _), width, .. } => {
            Error::usage(format!("--calibration-size {width}: {rule}"), format!("try --calibration-size {side}"))
        }
        other => other,
    })
}

/// Opens the model parts to quantize: the whole model if `whole`, else only a part that is named by its file.
fn open(args: &QuantizeArgs, parts: &[Component], whole: bool, environment: Environment) -> Result<Source> {
    let variant = args.variant.map(Variant::from);
    let input = args.input.as_path();
    let is_file = input.is_file();
    let part = parts.first().copied().unwrap_or(Component::Transformer);
    let alone = || Ok(Source { parts: vec![ComponentSource::open(part, input, variant)?], model: None });
    if is_file && !whole {
        return alone();
    }
    let mut replaced = PerComponent { transformer: None, text_encoder: args.text_encoder.clone(), vae: args.vae.clone() };
    if is_file {
        replaced[part] = Some(input.into());
    }
    let request = LocateRequest {
        model: (!is_file).then(|| input.into()),
        parts: replaced,
        tokenizer: args.tokenizer.clone(),
        nvfp4_layout: None,
        environment,
    };
    let found = match locate(&request) {
        // A folder of shards is a part, not a model.
        Err(Error::NoModel { .. }) if !whole && holds_weights(input) => return alone(),
        Err(Error::NoModel { what, path, .. }) if is_file => return Err(needs_all(&format!("{}: {what}", path.display()))),
        Err(Error::IncompleteModel { what, .. }) => return Err(needs_all(&what)),
        found => found?,
    };
    let model = OpenModel::open(&found, variant)?;
    let (weights, config) = (model.weights(), &model.configs.transformer);
    let part = |part: &Component| match part {
        Component::Transformer => ComponentSource::Transformer(weights.transformer.clone(), config.clone(), model.variant),
        _ => ComponentSource::TextEncoder(weights.text_encoder.clone()),
    };
    Ok(Source { parts: parts.iter().map(part).collect(), model: Some((found, model)) })
}

/// The error for a part that needs the rest of its model.
fn needs_all(what: &str) -> Error {
    let hint = "name the folder of the whole model, or give --text-encoder and --vae; \
                a single file as OUT and --no-calibration need only the part";
    Error::usage(format!("the rest of the model is needed, too: {what}"), hint)
}

/// Whether a folder itself holds weights.
fn holds_weights(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
}

/// The errors of a file by kind of layer, for display.
fn table(file: &FileReport) -> Vec<String> {
    let kinds = file.by_kind();
    let width = kinds.iter().map(|row| row.kind.len()).max().unwrap_or(0);
    let head = format!("{}: {} layers quantized, {} tensors in bf16", file.part, file.layers.len(), file.plain);
    let mut lines = vec![format!("{head}, {}", amount(file.bytes))];
    if !kinds.is_empty() {
        lines.push(format!("  {:width$}  {:6} {:>6} {:>9} {:>9}", "layers", "format", "number", "error", "largest"));
    }
    lines.extend(kinds.iter().map(|row| {
        let (error, worst) = (100.0 * row.error, 100.0 * row.worst);
        format!("  {:width$}  {:6} {:6} {error:7.3} % {worst:7.3} %", row.kind, row.format.label(), row.layers)
    }));
    lines
}

/// The JSON output.
fn description(report: &Report, output: &Path, seconds: f64) -> Value {
    let file = |file: &FileReport| {
        let layers = file.layers.iter().map(|layer| {
            json!({
                "name": layer.name,
                "format": layer.format.label(),
                "rows": layer.shape[0],
                "cols": layer.shape[1],
                "weight_scale": layer.scale,
                "input_scale": layer.input_scale,
                "error": layer.error(),
            })
        });
        json!({
            "part": file.part.to_string(),
            "path": file.path.to_string_lossy(),
            "bytes": file.bytes,
            "plain_tensors": file.plain,
            "layers": layers.collect::<Vec<_>>(),
        })
    };
    json!({
        "output": output.to_string_lossy(),
        "bytes": report.bytes,
        "seconds": seconds,
        "files": report.files.iter().map(file).collect::<Vec<_>>(),
    })
}
