//! Calibration: runs prompts on an unquantized model and finds the largest input magnitude of each layer. The input scales follow
//! from these magnitudes.
//!
//! A maximum does not depend on the order of its values, and every prompt starts from the same noise. So the result is the same
//! for any order of the prompts and any number of threads. Other kernels round differently, and so may other devices.

mod observer;

use crate::backend::{Backend, Observed};
use crate::checkpoint::Weights;
use crate::config::{ModelDefaults, Variant};
use crate::error::{Error, Result};
use crate::files;
use crate::pipeline::{Engine, Job, LoadOptions, OpenModel};
use crate::progress::{Phase, Progress};
use crate::sequence::Pixels;
use crate::tensor::{DType, Scale};
use observer::LargestInputs;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

/// Prompts of many kinds, one per line. The first ones differ the most, for runs that use only a few.
const PROMPTS: &str = include_str!("calibrate/prompts.txt");
/// The seed of every prompt.
const SEED: u64 = 0;
/// The ratio between the largest input that a scale allows and the largest measured one. It costs next to nothing: over fifteen
/// octaves the relative precision of e4m3 is constant.
const HEAD_ROOM: f64 = 4.0;
/// The largest prompt file, in bytes.
const MAX_PROMPT_FILE: u64 = 1 << 20;

/// The work of a calibration.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The prompts. Each makes one image.
    pub prompts: Vec<String>,
    /// The size of the images.
    pub size: Pixels,
    /// The denoising steps of each prompt.
    pub steps: usize,
}

impl Calibration {
    /// A calibration for a GPU: all built-in prompts, with the model's default number of steps, at up to 512x512.
    pub fn thorough(defaults: &ModelDefaults, variant: Variant) -> Result<Self> {
        let steps = defaults.steps(variant);
        Ok(Self { prompts: lines(PROMPTS), size: size_within(512, defaults)?, steps })
    }

    /// A calibration for the CPU: two prompts in up to two steps at up to 128x128. For a 4B model these are 20 TFLOP, nearly all
    /// of them for the prompt tokens, whose number is constant: two minutes on two cores at GEMM speed.
    pub fn quick(defaults: &ModelDefaults, variant: Variant) -> Result<Self> {
        let steps = defaults.steps(variant).min(2);
        let prompts = lines(PROMPTS).into_iter().take(2).collect();
        Ok(Self { prompts, size: size_within(128, defaults)?, steps })
    }

    /// The job of one prompt, with the model's default guidance.
    fn job(&self, prompt: &str, defaults: &ModelDefaults, variant: Variant) -> Result<Job> {
        let job = Job::new(prompt, SEED, defaults, variant)?;
        Ok(Job { size: self.size, steps: self.steps, ..job })
    }

    /// The number of denoising steps of all prompts together.
    fn total_steps(&self) -> usize {
        self.prompts.len() * self.steps
    }
}

impl std::fmt::Display for Calibration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (prompts, steps) = (self.prompts.len(), self.steps);
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (width, height) = (self.size.width(), self.size.height());
        write!(f, "{prompts} prompt{} at {width}x{height}, {steps} step{} each", plural(prompts), plural(steps))
    }
}

/// The default size, with each side limited to `side` pixels.
fn size_within(side: usize, defaults: &ModelDefaults) -> Result<Pixels> {
    Pixels::new(defaults.width.min(side), defaults.height.min(side))
}

/// The lines that are not blank.
fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Reads a file with one prompt per line. Skips blank lines.
pub fn read_prompts(path: &Path) -> Result<Vec<String>> {
    let wrong = |detail: &str| Error::bad_file(path, "not a list of prompts", detail);
    let bytes = files::read(path, MAX_PROMPT_FILE).map_err(|source| Error::read(path, source))?;
    let text =
        String::from_utf8(bytes).map_err(|e| wrong(&format!("not valid UTF-8 at byte {}", e.utf8_error().valid_up_to())))?;
    // Editors on Windows may begin a file with a byte order mark.
    let prompts = lines(text.trim_start_matches('\u{feff}'));
    match &prompts[..] {
        [] => Err(wrong("every line is blank")),
        all if all.iter().any(|prompt| prompt.contains('\0')) => Err(wrong("a prompt contains a NUL character")),
        _ => Ok(prompts),
    }
}

/// Runs a calibration's prompts on a backend. Returns the largest input magnitude of every linear layer that is `wanted`, by the
/// canonical name of its weight. Only layers that the transformer's steps run can be wanted. `machine` names the device in errors.
pub fn calibrate(
    backend: Box<dyn Backend>,
    machine: &str,
    model: OpenModel,
    calibration: &Calibration,
    wanted: &dyn Fn(&str) -> bool,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, f32>> {
    let (defaults, variant) = (model.defaults.clone(), model.variant);
    let jobs = calibration.prompts.iter().map(|prompt| calibration.job(prompt, &defaults, variant));
    let jobs = jobs.collect::<Result<Vec<_>>>()?;
    let Some(first) = jobs.first() else { return Err(Error::usage("there is no prompt to calibrate with", "give one")) };
    let weights = model.weights().clone();
    let release = move || weights.values().for_each(Weights::release);
    let mut observed = Observed::new(backend, LargestInputs::new(Box::new(release)));
    let options = model.check_memory(&observed, machine, LoadOptions::DEFAULT, first)?;
    let layers = model.formats(options, observed.gemm_formats())?.layers.into_iter().map(|layer| layer.id);
    let largest = observed.observer.watch(layers.filter(|layer| wanted(&layer.canonical())));
    if largest.borrow().is_empty() {
        return Ok(BTreeMap::new());
    }
    let progress = Steps::new(progress, calibration.total_steps());
    let mut engine = Engine::load(Box::new(observed), model, options, &progress)?;
    for job in &jobs {
        engine.generate(job, &progress, &mut |_| Ok(()))?;
    }
    progress.finish();
    let found: BTreeMap<String, f32> = largest.take().iter().map(|(layer, largest)| (layer.canonical(), *largest)).collect();
    match found.iter().find(|(_, largest)| **largest == 0.0) {
        Some((layer, _)) => Err(Error::Calibration { layer: layer.clone(), what: "its input is zero for every prompt" }),
        None => Ok(found),
    }
}

/// The scale of inputs with this largest magnitude in a calibration: the smallest power of two that keeps four times the magnitude
/// within the format's range. `None` if the magnitude is zero or not finite.
pub fn input_scale(format: DType, largest: f32) -> Option<Scale> {
    let largest = Scale::new(largest)?.get();
    let top = f64::from(format.format().largest);
    // Products with a power of two are exact in f64. Comparing them shows on which side a quotient would be.
    let allows = |exponent: i32| HEAD_ROOM * f64::from(largest) <= top * f64::from(exponent).exp2();
    let mut exponent = (HEAD_ROOM * f64::from(largest) / top).log2().ceil() as i32;
    while !allows(exponent) {
        exponent += 1;
    }
    while allows(exponent - 1) {
        exponent -= 1;
    }
    Scale::new(f64::from(exponent).exp2() as f32)
}

/// Reports the steps of all prompts as one phase. Reports before the first step, such as loading, are passed through.
struct Steps<'a> {
    inner: &'a dyn Progress,
    total: u64,
    begun: Cell<bool>,
    /// Whether the current phase is denoising.
    denoising: Cell<bool>,
}

impl<'a> Steps<'a> {
    fn new(inner: &'a dyn Progress, total: usize) -> Self {
        Self { inner, total: total as u64, begun: Cell::new(false), denoising: Cell::new(false) }
    }

    /// Ends the phase after all prompts.
    fn finish(&self) {
        if self.begun.get() {
            self.inner.end();
        }
    }
}

impl Progress for Steps<'_> {
    fn begin(&self, phase: Phase, total: u64) {
        self.denoising.set(phase == Phase::Denoise);
        match (self.begun.get(), phase) {
            (false, Phase::Denoise) => {
                self.begun.set(true);
                self.inner.begin(Phase::Calibrate, self.total);
            }
            (false, _) => self.inner.begin(phase, total),
            (true, _) => {}
        }
    }

    fn advance(&self, amount: u64) {
        if self.denoising.get() || !self.begun.get() {
            self.inner.advance(amount);
        }
    }

    fn end(&self) {
        if !self.begun.get() {
            self.inner.end();
        }
    }

    fn detail(&self, text: &str) {
        self.inner.detail(text);
    }

    fn warn(&self, text: &str) {
        self.inner.warn(text);
    }
}
