//! Times the stages of one cold image and several warm ones.

use super::super::formats::format_lines;
use super::super::outputs::Origin;
use super::super::report::{announce_run, saturation_warning};
use super::super::request::{ImageRequest, Setup};
use super::super::session::Session;
use super::super::settings::Settings;
use super::super::stdout::{json_line, print};
use super::share::Shared;
use crate::terminal::Terminal;
use kiln::device::{DeviceInfo, driver_release};
use kiln::error::{Error, Result};
use kiln::image::Format;
use kiln::metadata::AdapterMetadata;
use kiln::metadata::Detail;
use kiln::microbench::median;
use kiln::predict::{Prediction, Predictor};
use kiln::progress::{Phase, Progress};
use kiln::text::{shown, shown_line};
use kiln::{Engine, EstimateRequest, MAX_PROMPT_BYTES, Precision, check_length, estimate};
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The results of a measurement. `bench/README.md` describes its JSON fields.
#[derive(Serialize)]
pub struct Report {
    kiln: &'static str,
    kind: &'static str,
    model: String,
    variant: String,
    backend: &'static str,
    machine: String,
    precision: &'static str,
    width: usize,
    height: usize,
    steps: usize,
    guidance: Option<f32>,
    references: usize,
    lora: Vec<AdapterMetadata>,
    cold_s: Times,
    warm_s: Vec<Times>,
    memory: Memory,
    formats: Vec<String>,
    saturated: u64,
    kernels: BTreeMap<&'static str, u64>,
    /// The GPU, if the backend was one.
    #[serde(skip)]
    device: Option<DeviceInfo>,
    /// The prediction, or why there is none.
    #[serde(skip)]
    predicted: Result<(Prediction, Predictor), String>,
}

/// The time that one image took, in seconds.
#[derive(Default, Serialize)]
struct Times {
    /// Reading flags and references, then opening the weight files and the device in parallel; only the cold image has this.
    #[serde(skip_serializing_if = "Option::is_none")]
    open: Option<f64>,
    /// Loading weights to the device; warm images have this only in low-memory mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    load: Option<f64>,
    encode: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    references: Option<f64>,
    denoise: f64,
    /// Each step of `denoise`.
    steps: Vec<f64>,
    decode: f64,
    /// Encoding the PNG, which is then discarded.
    png: f64,
    /// Everything between stages: the tokenizer, the dry run, RoPE tables, modulations, noise.
    rest: f64,
    total: f64,
}

/// Reads the seconds of one stage.
type Stage = fn(&Times) -> Option<f64>;

/// Rows of the table.
const STAGES: [(&str, Stage); 9] = [
    ("open", |t| t.open),
    ("load", |t| t.load),
    ("encode", |t| Some(t.encode)),
    ("references", |t| t.references),
    ("denoise", |t| Some(t.denoise)),
    ("decode", |t| Some(t.decode)),
    ("png", |t| Some(t.png)),
    ("rest", |t| Some(t.rest)),
    ("total", |t| Some(t.total)),
];

impl Times {
    /// Fills in the stages that were timed, and the time between them.
    fn finish(mut self, spans: &[Span], png: f64, total: f64) -> Self {
        let of = |phase: Phase| spans.iter().filter(|s| s.phase == phase).map(Span::seconds).reduce(|a, b| a + b);
        self.load = of(Phase::Load);
        self.encode = of(Phase::Encode).unwrap_or(0.0);
        self.references = of(Phase::References);
        self.denoise = of(Phase::Denoise).unwrap_or(0.0);
        self.steps = spans.iter().filter(|s| s.phase == Phase::Denoise).flat_map(Span::steps).collect();
        self.decode = of(Phase::Decode).unwrap_or(0.0);
        (self.png, self.total) = (png, total);
        let known: f64 = STAGES.iter().filter(|(name, _)| *name != "total").filter_map(|(_, of)| of(&self)).sum();
        self.rest = (total - known).max(0.0);
        self
    }
}

/// Bytes of device memory.
#[derive(Serialize)]
struct Memory {
    planned_weights: u64,
    planned_working: u64,
    /// The largest decrease of free memory since the device was opened, if the backend can measure it.
    measured: Option<u64>,
    /// Whether the measurement is within 5 % plus 256 MiB of the plan.
    holds: Option<bool>,
}

impl Memory {
    fn new(planned_weights: u64, planned_working: u64, measured: Option<u64>) -> Self {
        let planned = planned_weights + planned_working;
        let holds = measured.map(|bytes| bytes.abs_diff(planned) <= planned / 20 + (256 << 20));
        Self { planned_weights, planned_working, measured, holds }
    }

    fn lines(&self) -> String {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let planned = self.planned_weights + self.planned_working;
        let (weights, working) = (mib(self.planned_weights), mib(self.planned_working));
        let mut text = format!("memory      {weights:.1} MiB of weights + {working:.1} MiB of working memory planned\n");
        let measured = match self.measured {
            Some(bytes) => {
                let more = mib(bytes) - mib(planned);
                let share = 100.0 * more / mib(planned).max(f64::MIN_POSITIVE);
                let verdict = if self.holds == Some(true) { "within" } else { "NOT within" };
                format!("{:.1} MiB measured, {more:+.1} MiB ({share:+.1} %): {verdict} 5 % + 256 MiB of the plan", mib(bytes))
            }
            None => "not measured: only GPUs report it".into(),
        };
        let _ = writeln!(text, "            {measured}");
        text
    }
}

/// When a phase began, advanced and ended.
struct Span {
    phase: Phase,
    start: Instant,
    advances: Vec<Instant>,
    end: Option<Instant>,
}

impl Span {
    fn seconds(&self) -> f64 {
        self.end.map_or(0.0, |end| (end - self.start).as_secs_f64())
    }

    /// Seconds from one advance to the next.
    fn steps(&self) -> impl Iterator<Item = f64> {
        let starts = std::iter::once(&self.start).chain(&self.advances);
        starts.zip(&self.advances).map(|(from, to)| (*to - *from).as_secs_f64())
    }
}

/// Takes timestamps when progress is reported. A stage ends by reading a result back, so the device has finished by then.
struct Watch<'a> {
    terminal: &'a Terminal,
    /// Whether progress is forwarded to the terminal. It is for the cold image; each warm one has a single line instead.
    shown: Cell<bool>,
    spans: RefCell<Vec<Span>>,
}

impl Progress for Watch<'_> {
    fn begin(&self, phase: Phase, total: u64) {
        if self.shown.get() {
            self.terminal.begin(phase, total);
        }
        self.spans.borrow_mut().push(Span { phase, start: Instant::now(), advances: Vec::new(), end: None });
    }

    fn advance(&self, amount: u64) {
        if let Some(span) = self.spans.borrow_mut().iter_mut().rfind(|span| span.end.is_none()) {
            span.advances.push(Instant::now());
        }
        if self.shown.get() {
            self.terminal.advance(amount);
        }
    }

    fn end(&self) {
        if let Some(span) = self.spans.borrow_mut().iter_mut().rfind(|span| span.end.is_none()) {
            span.end = Some(Instant::now());
        }
        if self.shown.get() {
            self.terminal.end();
        }
    }

    fn detail(&self, text: &str) {
        if self.shown.get() {
            self.terminal.detail(text);
        }
    }

    fn warn(&self, text: &str) {
        if self.shown.get() {
            self.terminal.warn(text);
        }
    }
}

/// What images are measured, and how.
#[derive(Debug)]
pub struct Measurement {
    pub request: ImageRequest,
    pub setup: Setup,
    /// The start of the command, from which the time of the cold image counts.
    pub started: Instant,
    /// Whether images share what they can, as in `kiln run`.
    pub keep: bool,
}

/// An engine that has generated its first image.
struct Started<'a> {
    engine: Engine,
    settings: Settings,
    origin: Origin,
    watch: Watch<'a>,
    /// Free memory before weights were loaded, if the backend can measure it.
    before: Option<u64>,
    /// The results so far.
    report: Report,
}

/// Generates a cold image and `runs` warm ones.
pub fn measure(measurement: Measurement, runs: usize, stop: &Arc<AtomicBool>, terminal: &Terminal) -> Result<Report> {
    let Started { mut engine, settings, origin, watch, before, mut report } = start(measurement, stop, terminal)?;
    // Weights and workspace stay allocated until the engine is dropped, so sampling after each image sees the peak.
    let mut after = engine.backend().available()?;
    for run in 1..=runs {
        // Repeats the same image, so the saturation count does not change.
        let times = warm_image(&mut engine, &settings, &origin, &watch, stop)?;
        terminal.say(&format!("warm image {run} of {runs}: {:.3} s", times.total));
        report.warm_s.push(times);
        after = after.min(engine.backend().available()?);
    }
    let measured = before.zip(after).map(|(before, after)| before.saturating_sub(after));
    report.memory = Memory::new(report.memory.planned_weights, report.memory.planned_working, measured);
    report.kernels = engine.launches().into_iter().collect();
    Ok(report)
}

/// Generates a cold image and then one for each line of `requests`, a seed and a prompt, and writes a line of JSON for each.
pub fn serve(
    measurement: Measurement,
    stop: &Arc<AtomicBool>,
    terminal: &Terminal,
    requests: &mut dyn BufRead,
    out: &mut dyn Write,
) -> Result<()> {
    let Started { mut engine, mut settings, origin, watch, report, .. } = start(measurement, stop, terminal)?;
    print(out, &json_line(&report)?)?;
    let mut line = Vec::new();
    loop {
        line.clear();
        // A longer line is not a prompt, and is refused as such.
        let limit = (MAX_PROMPT_BYTES + 32) as u64;
        let read = requests.take(limit).read_until(b'\n', &mut line);
        if read.map_err(|source| Error::read(Path::new("standard input"), source))? == 0 {
            return Ok(());
        }
        (settings.job.seeds[0], settings.job.prompt) = parse_request(&line)?;
        print(out, &json_line(&warm_image(&mut engine, &settings, &origin, &watch, stop)?)?)?;
    }
}

/// A seed and a prompt, with a space between them.
fn parse_request(line: &[u8]) -> Result<(u64, String)> {
    let refused =
        |what: &str| Error::usage(format!("{what}: `{}`", shown_line(&String::from_utf8_lossy(line))), "write `SEED PROMPT`");
    let text = std::str::from_utf8(line).map_err(|_| refused("a request is not UTF-8"))?.trim_end_matches(['\r', '\n']);
    let (seed, prompt) = text.split_once(' ').ok_or_else(|| refused("a request has no prompt"))?;
    let seed = seed.parse().map_err(|_| refused("a request does not begin with a seed"))?;
    check_length(prompt.len())?;
    Ok((seed, prompt.into()))
}

/// Generates an image and discards it.
fn warm_image(engine: &mut Engine, settings: &Settings, origin: &Origin, watch: &Watch<'_>, stop: &AtomicBool) -> Result<Times> {
    let start = Instant::now();
    let (png, _) = generate_once(engine, settings, origin, watch, stop)?;
    Ok(Times::default().finish(&watch.spans.take(), png, start.elapsed().as_secs_f64()))
}

/// Opens device and model and generates the cold image.
fn start<'a>(measurement: Measurement, stop: &Arc<AtomicBool>, terminal: &'a Terminal) -> Result<Started<'a>> {
    let Measurement { request, setup, started, keep } = measurement;
    let mut session = Session::open(setup, stop, terminal)?;
    let mut cold = Times { open: Some(started.elapsed().as_secs_f64()), ..Times::default() };
    let settings = Settings::resolve(request, &session.profile());
    announce_run(&settings, &session.found, &session.model, &session.backend, &session.formats, terminal);
    session.fit(&settings.job, terminal)?;
    let predictor = session.backend.predictor.clone().and_then(|predictor| match session.options.precision {
        Precision::Bf16 => Ok(predictor),
        Precision::F32 => Err("f32 does not run on tensor cores".into()),
    });
    let (gemms, time) = (session.backend.backend.gemm_formats(), predictor.as_ref().ok().map(Predictor::op_time));
    let plan = estimate(EstimateRequest { time, ..session.model.estimate_request(session.options, gemms) }, &settings.job)?;
    let predicted = predictor.map(|predictor| (Prediction::of(&plan), predictor));
    let weights = if session.options.low_memory { plan.low_memory_weight_bytes } else { plan.weight_bytes };
    // Memory is measured on GPUs only: the free memory of the host changes with every other process.
    let gpu = session.backend.device.is_some();
    let before = session.backend.backend.available()?.filter(|_| gpu);
    let device = session.backend.device.clone();
    let (backend, machine, formats) = (session.backend.name, session.backend.machine.clone(), format_lines(&session.formats));
    let watch = Watch { terminal, shown: Cell::new(true), spans: RefCell::default() };
    let cache = if keep { session.result_cache() } else { 0 };
    // The identity of the weights is not timed, and another one is as long.
    let origin = Origin::expected(session.device(), Detail::Full);
    let mut engine = session.load(&watch)?;
    if keep {
        engine.cache_results(cache, &settings.job)?;
    }

    let (png, saturated) = generate_once(&mut engine, &settings, &origin, &watch, stop)?;
    saturation_warning(saturated, &settings).iter().for_each(|warning| terminal.warn(warning));
    cold = cold.finish(&watch.spans.take(), png, started.elapsed().as_secs_f64());
    watch.shown.set(false);
    let report = Report {
        kiln: env!("CARGO_PKG_VERSION"),
        kind: "images",
        model: settings.model.clone(),
        variant: settings.variant.to_string(),
        backend,
        machine,
        precision: settings.precision.name(),
        width: settings.job.size.width(),
        height: settings.job.size.height(),
        steps: settings.job.steps,
        guidance: settings.guidance.chosen,
        references: settings.job.references.len(),
        lora: settings.adapters.clone(),
        cold_s: cold,
        warm_s: Vec::new(),
        memory: Memory::new(weights, plan.arena_bytes, None),
        formats,
        saturated,
        kernels: engine.launches().into_iter().collect(),
        device,
        predicted,
    };
    Ok(Started { engine, settings, origin, watch, before, report })
}

/// Generates one image and discards it. Returns the seconds that encoding its PNG took, and how many activations did not fit into FP8.
fn generate_once(
    engine: &mut Engine,
    settings: &Settings,
    origin: &Origin,
    watch: &Watch<'_>,
    stop: &AtomicBool,
) -> Result<(f64, u64)> {
    let mut result = (0.0, 0);
    engine.generate(&settings.job, watch, &mut |image| {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let start = Instant::now();
        image.image.encode_png(&origin.text(settings, image.seed, Format::Png))?;
        result = (start.elapsed().as_secs_f64(), image.saturated);
        Ok(())
    })?;
    Ok(result)
}

/// Minimum, median and maximum.
fn spread(values: &[f64]) -> Option<[f64; 3]> {
    let (min, max) = (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
    Some([min, median(values), max])
}

impl Report {
    /// The block of `--share`.
    pub fn share_block(&self) -> String {
        let (prediction, predictor) = match &self.predicted {
            Ok((prediction, predictor)) => (Some(prediction), Ok(predictor)),
            Err(why) => (None, Err(why.as_str())),
        };
        let of = |phase| prediction.and_then(|prediction| prediction.stage(phase));
        let warm = |of: fn(&Times) -> Vec<f64>| {
            let [_, median, _] = spread(&self.warm_s.iter().flat_map(of).collect::<Vec<f64>>())?;
            Some(median)
        };
        let rows = [
            ("encode", warm(|t| vec![t.encode]), of(Phase::Encode)),
            ("references", warm(|t| t.references.into_iter().collect()), of(Phase::References)),
            ("a step", warm(|t| t.steps.clone()), prediction.and_then(Prediction::step)),
            ("decode", warm(|t| vec![t.decode]), of(Phase::Decode)),
            ("total", warm(|t| vec![t.total]), None),
        ];
        let references = match self.references {
            0 => String::new(),
            count => format!(", {count} references"),
        };
        let Self { model, width, height, steps, precision, .. } = self;
        Shared {
            device: self.device.as_ref(),
            machine: &self.machine,
            release: driver_release().filter(|_| self.device.is_some()),
            subject: format!("{}, {width}x{height}, {steps} steps, {precision}{references}", shown(model)),
            formats: &self.formats,
            kernels: self.kernels.keys().copied().collect(),
            memory: (self.memory.measured, self.memory.planned_weights + self.memory.planned_working),
            stages: rows.into_iter().filter_map(|(name, measured, predicted)| Some((name, measured?, predicted))).collect(),
            predictor,
        }
        .block()
    }

    pub fn table(&self) -> String {
        let mut text = format!(
            "kiln {}, {}, {}x{}, {} steps, {}\n",
            self.kiln,
            shown(&self.model),
            self.width,
            self.height,
            self.steps,
            self.precision
        );
        let _ = writeln!(text, "{}, {}\n", self.backend, self.machine);
        let _ = writeln!(text, "{:<10} {:>12} {:>12} {:>12} {:>12}", "ms", "cold", "warm median", "min", "max");
        let mut row = |name: &str, cold: Option<f64>, warm: Vec<f64>| {
            let cell = |seconds: Option<f64>| seconds.map_or(String::new(), |s| format!("{:.3}", 1e3 * s));
            let [min, median, max] = spread(&warm).map_or([None; 3], |values| values.map(Some));
            let cells = [cold, median, min, max].map(cell);
            let line = format!("{name:<10} {:>12} {:>12} {:>12} {:>12}", cells[0], cells[1], cells[2], cells[3]);
            let _ = writeln!(text, "{}", line.trim_end());
        };
        for (name, of) in STAGES {
            let (cold, warm) = (of(&self.cold_s), self.warm_s.iter().filter_map(of).collect::<Vec<f64>>());
            // Stages that did not run are left out of the table.
            if cold.is_some() || !warm.is_empty() {
                row(name, cold, warm);
            }
            if name == "denoise" {
                let cold = spread(&self.cold_s.steps).map(|[_, median, _]| median);
                row("  a step", cold, self.warm_s.iter().flat_map(|t| t.steps.iter().copied()).collect());
            }
        }
        let _ = write!(text, "\n{}", self.memory.lines());
        for (i, line) in self.formats.iter().enumerate() {
            let _ = writeln!(text, "{:<11} {line}", if i == 0 { "formats" } else { "" });
        }
        if !self.kernels.is_empty() {
            let names: Vec<&str> = self.kernels.keys().copied().collect();
            let _ = writeln!(text, "kernels     {}", names.join(" "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::Verbosity;
    use std::time::Duration;

    #[test]
    fn phases_are_timed_separately() {
        let terminal = Terminal::new(Verbosity::Quiet);
        let watch = Watch { terminal: &terminal, shown: Cell::new(true), spans: RefCell::default() };
        let wait = || std::thread::sleep(Duration::from_millis(2));
        watch.begin(Phase::Load, 2);
        wait();
        // Phases can nest, as when weights are loaded while the prompt is encoded.
        watch.begin(Phase::Encode, 1);
        wait();
        watch.end();
        watch.end();
        watch.begin(Phase::Denoise, 2);
        for _ in 0..2 {
            wait();
            watch.advance(1);
        }
        watch.end();
        // An end without a matching begin and progress outside of a phase are ignored.
        watch.end();
        watch.advance(1);
        let times = Times::default().finish(&watch.spans.take(), 0.0, 1.0);
        assert!(times.load.unwrap() >= 0.004 && times.encode >= 0.002, "{:?} {}", times.load, times.encode);
        assert_eq!((times.steps.len(), times.references), (2, None));
        assert!(times.steps.iter().all(|s| *s >= 0.002) && times.steps.iter().sum::<f64>() <= times.denoise);
        let known = times.load.unwrap() + times.encode + times.denoise + times.decode + times.png;
        assert!((known + times.rest - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_plan_holds_within_5_percent_and_256_mib() {
        let memory = |measured| Memory::new(9_000 << 20, 1_000 << 20, measured);
        for (mib, holds) in [(10_000, true), (10_756, true), (10_757, false), (9_244, true), (9_243, false)] {
            let memory = memory(Some(mib << 20));
            assert_eq!(memory.holds, Some(holds), "{mib}");
            assert_eq!(memory.lines().contains("NOT within"), !holds, "{mib}");
        }
        assert_eq!(memory(None).holds, None);
        assert!(memory(None).lines().contains("not measured"));
        assert!(memory(Some(10_100 << 20)).lines().contains("10100.0 MiB measured, +100.0 MiB (+1.0 %): within 5 %"));
    }

    #[test]
    fn minimum_median_and_maximum() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Some([1.0, 2.0, 3.0]));
        assert_eq!(spread(&[]), None);
    }
}
