//! `kiln quantize`: writes a model in FP8 or NVFP4.

use super::args::{BackendArg, FormatArg, QuantizeArgs, WeightLayoutArg};
use super::device::{SelectedBackend, select_backend};
use super::stdout::{json_line, line_of, print};
use crate::terminal::Terminal;
use kiln::device::Fp8Accumulate;
use kiln::error::{Error, Result};
use kiln::locate::{Environment, Found, LocateRequest, locate};
use kiln::output::Staged;
use kiln::progress::Progress;
use kiln::quantize::calibrate::{Calibration, calibrate, read_prompts};
use kiln::quantize::{CHECKPOINT_BYTES, FileReport, Options, PartSource, Plan, Report, Target, calibration_inputs, copies};
use kiln::selftest::Records;
use kiln::text::{amount, shown_path};
use kiln::{OpenModel, Part, PerPart, Pixels, Variant, check_length};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// What is quantised.
struct Source {
    parts: Vec<PartSource>,
    /// The whole model, unless a part was opened without it.
    model: Option<(Found, OpenModel)>,
}

/// Quantises a model, and writes the path of the result to `out`, or a JSON object about it. Setting `stop` interrupts it.
pub fn quantize(
    args: QuantizeArgs,
    environment: Environment,
    stop: &Arc<AtomicBool>,
    terminal: &Terminal,
    out: &mut dyn Write,
) -> Result<()> {
    let start = Instant::now();
    let is_file = args.output.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"));
    let parts: Vec<Part> = match args.part.map(Part::from) {
        Some(part) => vec![part],
        None if is_file => vec![Part::Transformer],
        None => vec![Part::Transformer, Part::TextEncoder],
    };
    let for_diffusers = args.layout == WeightLayoutArg::Diffusers;
    if for_diffusers {
        check_diffusers(&args, &parts)?;
    }
    let calibrates = !args.no_calibration && parts.contains(&Part::Transformer);
    let runs = if calibrates { Some(Runs::new(&args)?) } else { None };
    let records = Records::below(environment.caches().as_deref());
    let source = open(&args, &parts, !is_file || calibrates, environment)?;
    let calibration = runs.as_ref().map(|runs| format!("{runs:?}"));
    let copied = match &source.model {
        Some((found, model)) if !is_file => copies(found, model.weights(), &parts, model.variant)?,
        _ => Vec::new(),
    };
    let read = match &source.model {
        Some((found, model)) if calibrates => calibration_inputs(found, model.weights(), &parts, model.variant)?,
        _ => Vec::new(),
    };
    let options = Options { format: args.to.into(), layout: args.layout.into(), keep: args.keep.clone(), calibration };
    let plan = Plan::new(&source.parts, copied, &options)?.calibrated_by(read);
    source.model.iter().flat_map(|(_, model)| &model.warnings).for_each(|warning| terminal.warn(warning));
    let asked = args.prompts.is_some() || args.calibration_size.is_some() || args.calibration_steps.is_some();
    if asked && !calibrates {
        terminal.warn("text encoders have no input scales, so nothing is calibrated");
    }
    if for_diffusers && parts.contains(&Part::TextEncoder) {
        terminal.say("note: diffusers reads no quantised text encoders; this one is as kiln and ComfyUI read it");
    }
    if plan.narrowed() > 0 {
        terminal.say(&format!("note: {} tensors that are not quantised are rounded to bf16", plan.narrowed()));
    }
    let target = Target {
        path: args.output.clone(),
        is_folder: !is_file,
        force: args.force,
        restart: args.restart,
        checkpoint_bytes: CHECKPOINT_BYTES,
    };
    let mut model = source.model.map(|(_, model)| model);
    let mut calibrate = || match (model.take(), &runs) {
        (Some(model), Some(runs)) => runs.measure(model, &plan.measured(), &args, &records, stop, terminal),
        _ => Err(Error::Op { op: "calibrate", what: "there is no model to run".into() }),
    };
    let report = plan.write(&target, &mut calibrate, terminal, stop).inspect_err(|error| {
        let (path, journal) = (Staged::path_of(&target.path), Staged::journal_of(&target.path));
        if matches!(error, Error::Interrupted) && path.exists() {
            terminal.say("note: the same command continues from here; with --restart it begins anew");
        } else if is_taken(error) && path.exists() && journal.exists() {
            let [path, journal] = [&path, &journal].map(|path| shown_path(path));
            terminal.say(&format!("note: `{path}` and `{journal}` stay: the same command continues them once OUT is moved away"));
        }
    })?;
    report.files.iter().flat_map(table).for_each(|line| terminal.say(&line));
    if args.json {
        let seconds = start.elapsed().as_secs_f64();
        return print(out, &json_line(&description(&report, &args.output, seconds))?);
    }
    print(out, &line_of(&args.output))
}

/// Whether an output has failed because there is something of its name.
fn is_taken(error: &Error) -> bool {
    match error {
        Error::OutputExists { .. } => true,
        Error::Write { source, .. } => source.kind() == ErrorKind::DirectoryNotEmpty,
        _ => false,
    }
}

/// Fails if diffusers would not read what is asked for.
fn check_diffusers(args: &QuantizeArgs, parts: &[Part]) -> Result<()> {
    if !parts.contains(&Part::Transformer) {
        let hint = "leave out --layout: the file is then as kiln and ComfyUI read it";
        return Err(Error::usage("--layout diffusers: diffusers reads no quantised text encoders", hint));
    }
    if args.no_calibration && args.to == FormatArg::Nvfp4 {
        let what = "--layout diffusers: diffusers reads NVFP4 only with input scales, which only calibration gives";
        return Err(Error::usage(what, "leave out --no-calibration, or use --to fp8"));
    }
    Ok(())
}

/// What is asked of a calibration. Its text goes into the journal, and a run that was stopped is continued only with the same one.
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
        let mut calibration = by_default(&model.conventions, model.variant)?;
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

/// Opens what is quantised: the whole model if `whole`, or else only the part if it is named by itself.
fn open(args: &QuantizeArgs, parts: &[Part], whole: bool, environment: Environment) -> Result<Source> {
    let variant = args.variant.map(Variant::from);
    let input = args.input.as_path();
    let is_file = input.is_file();
    let part = parts.first().copied().unwrap_or(Part::Transformer);
    let alone = || Ok(Source { parts: vec![PartSource::open(part, input, variant)?], model: None });
    if is_file && !whole {
        return alone();
    }
    let mut replaced = PerPart { transformer: None, text_encoder: args.text_encoder.clone(), vae: args.vae.clone() };
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
        // A folder of shards is no model, but a part.
        Err(Error::NoModel { .. }) if !whole && holds_weights(input) => return alone(),
        Err(Error::NoModel { what, path, .. }) if is_file => return Err(needs_all(&format!("{}: {what}", path.display()))),
        Err(Error::IncompleteModel { what, .. }) => return Err(needs_all(&what)),
        found => found?,
    };
    let model = OpenModel::open(&found, variant)?;
    let (weights, config) = (model.weights(), &model.configs.transformer);
    let part = |part: &Part| match part {
        Part::Transformer => PartSource::Transformer(weights.transformer.clone(), config.clone(), model.variant),
        _ => PartSource::TextEncoder(weights.text_encoder.clone()),
    };
    Ok(Source { parts: parts.iter().map(part).collect(), model: Some((found, model)) })
}

/// The error for a part whose model is needed as a whole.
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
    let head = format!("{}: {} layers quantised, {} tensors in bf16", file.part, file.layers.len(), file.plain);
    let mut lines = vec![format!("{head}, {}", amount(file.bytes))];
    if !kinds.is_empty() {
        lines.push(format!("  {:width$}  {:6} {:>6} {:>9} {:>9}", "layers", "format", "number", "error", "largest"));
    }
    lines.extend(kinds.iter().map(|row| {
        let (error, worst) = (100.0 * row.error, 100.0 * row.worst);
        format!("  {:width$}  {:6} {:6} {error:7.3} % {worst:7.3} %", row.kind, row.format.name(), row.layers)
    }));
    lines
}

/// What was written as JSON.
fn description(report: &Report, output: &Path, seconds: f64) -> Value {
    let file = |file: &FileReport| {
        let layers = file.layers.iter().map(|layer| {
            json!({
                "name": layer.name,
                "format": layer.format.name(),
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
