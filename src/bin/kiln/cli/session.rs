//! The device and the model that a request runs on, opened in parallel.

use super::adapters::{announce_adapters, applied};
use super::args::BackendArg;
use super::device::{SelectedBackend, select_backend};
use super::report::{announce_model, expansion_note, warn_of_accumulation, warn_of_nvfp4_math};
use super::request::Setup;
use super::settings::{ModelProfile, Settings, quantized_flags};
use crate::terminal::Terminal;
use kiln::device::{DeviceInfo, fp8_accumulate, has_driver, instruction_set};
use kiln::error::Result;
use kiln::inspect::ModelSamples;
use kiln::locate::Found;
use kiln::progress::Progress;
use kiln::{
    Engine, EstimateRequest, Formats, Job, LoadOptions, Nvfp4Layout, OpenModel, Precision, Variant, estimate, threads, trace,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The most GPU memory for encoded prompts and images that later jobs may reuse. It holds 85 prompts of klein 4B, or 250 images of
/// 1024x1024.
const KEPT_BYTES: u64 = 256 << 20;

/// The most additional memory for models that cache keys and values. It holds three references of 1024x1024 with klein 4B.
const KEPT_KEY_VALUES: u64 = 4 << 30;

/// An open device and an open model.
pub struct Session {
    pub backend: SelectedBackend,
    pub found: Found,
    pub model: OpenModel,
    /// How the model is loaded.
    pub options: LoadOptions,
    /// The formats of its layers on the device.
    pub formats: Formats,
}

impl Session {
    /// Opens the device and the model's files in parallel, and prints notes and warnings about them.
    pub fn open(setup: Setup, stop: &Arc<AtomicBool>, terminal: &Terminal) -> Result<Self> {
        let Setup { found, named, adapters, variant, backend, device, accumulate, options, records, notes, .. } = setup;
        announce_model(&found, named, terminal);
        notes.iter().for_each(|note| terminal.say(note));
        let select = || select_backend(backend, device, accumulate, &records, stop);
        // A GPU will copy the weights, and its driver takes a while to start.
        let open = || -> Result<OpenModel> {
            let mut model = match backend != BackendArg::Cpu && has_driver() {
                true => OpenModel::open_and_read_ahead(&found, variant)?,
                false => OpenModel::open(&found, variant)?,
            };
            model.adapters = adapters.open(|| model.layer_targets())?;
            Ok(model)
        };
        let (backend, model) = threads::join(select, open);
        let (backend, model) = (backend?, model?);
        backend.announce(terminal);
        if trace::is_on() && backend.device.is_some() {
            terminal.say("note: kernels are traced one by one, without overlap and CUDA graphs, so steps take a little longer");
        }
        model.warnings.iter().for_each(|warning| terminal.warn(warning));
        let mut formats = model.formats(options, backend.backend.gemm_formats())?;
        // Only tensor cores have a choice.
        formats.accumulate = backend.device.as_ref().map(|device| fp8_accumulate(device.capability, accumulate));
        expansion_note(&formats, backend.device.is_some()).iter().for_each(|note| terminal.say(note));
        warn_of_accumulation(accumulate, &formats, terminal);
        warn_of_nvfp4_math(options.nvfp4_math, &formats, terminal);
        announce_adapters(&model.adapters, &formats, terminal);
        Ok(Self { backend, found, model, options, formats })
    }

    /// The properties of the model that the settings of a job depend on.
    pub fn profile(&self) -> ModelProfile {
        ModelProfile {
            name: self.model.name.clone(),
            variant: self.model.variant,
            defaults: self.model.defaults.clone(),
            precision: self.options.precision,
            quantized_flags: quantized_flags(&self.formats).into_iter().chain(self.nvfp4_layout()).collect(),
            adapters: applied(&self.model.adapters),
            adapter_mode: self.options.adapters,
        }
    }

    /// The order of NVFP4 in the files as a flag and its value, if the user stated it.
    fn nvfp4_layout(&self) -> Option<(&'static str, String)> {
        let Found::Files(files) = &self.found else { return None };
        let (name, _) = Nvfp4Layout::NAMED.into_iter().find(|(_, layout)| Some(*layout) == files.nvfp4_layout)?;
        Some(("nvfp4-layout", name.into()))
    }

    /// How long an image would take on this device, if anything predicts it.
    pub fn predicted_seconds(&self, job: &Job) -> Option<f64> {
        // In f32 nothing runs on tensor cores.
        let predictor = self.backend.predictor.as_ref().ok().filter(|_| self.options.precision == Precision::Bf16)?;
        let request = self.model.estimate_request(self.options, self.backend.backend.gemm_formats());
        let estimate = estimate(EstimateRequest { time: Some(predictor.op_time()), ..request }, job).ok()?;
        Some(estimate.seconds.iter().map(|(_, seconds)| seconds).sum())
    }

    /// The files that images with these settings are made from.
    pub fn files<'a>(&'a self, settings: &'a Settings) -> Vec<&'a Path> {
        self.model_files().chain(settings.inputs.iter().map(PathBuf::as_path)).collect()
    }

    /// The model's files, apart from small ones that no output is mistaken for.
    pub fn model_files(&self) -> impl Iterator<Item = &Path> {
        let shards = self.model.weights().values().flat_map(|weights| weights.shards()).map(|shard| shard.path());
        let adapters = self.model.adapters.0.iter().map(|(adapter, _)| adapter.path.as_path());
        let others = match &self.found {
            Found::Files(files) => files.tokenizer.iter().chain(&files.defaults.path).map(PathBuf::as_path).collect(),
            _ => Vec::new(),
        };
        shards.chain(adapters).chain(others)
    }

    /// Checks that a job fits into memory, and switches to low-memory mode if it fits only then.
    pub fn fit(&mut self, job: &Job, terminal: &Terminal) -> Result<()> {
        let _span = trace::span("check memory");
        let SelectedBackend { backend, machine, device, .. } = &self.backend;
        let options = self.model.check_memory(backend.as_ref(), machine, self.options, job)?;
        if options.low_memory && !self.options.low_memory {
            let gpu = if device.is_some() { "GPU " } else { "" };
            terminal.say(&format!("note: {gpu}memory is short, so the transformer replaces the text encoder"));
        }
        self.options = options;
        Ok(())
    }

    /// The most bytes for results that several jobs share. A CPU keeps none: they would take memory from everything else.
    pub fn result_cache(&self) -> u64 {
        match (&self.backend.device, self.model.variant) {
            (None, _) => 0,
            (Some(_), Variant::Kv) => KEPT_BYTES + KEPT_KEY_VALUES,
            (Some(_), _) => KEPT_BYTES,
        }
    }

    /// The kind of device, which the bytes of an image depend on.
    pub fn device(&self) -> String {
        match &self.backend.device {
            Some(DeviceInfo { capability: (major, minor), .. }) => format!("cuda sm_{major}{minor}"),
            None => format!("cpu {}", instruction_set()),
        }
    }

    /// What the identity of the weights follows from.
    pub fn samples(&self) -> Result<ModelSamples> {
        ModelSamples::new(&self.found, &self.model)
    }

    /// Loads the model.
    pub fn load(self, progress: &dyn Progress) -> Result<Engine> {
        Engine::load(self.backend.backend, self.model, self.options, progress)
    }
}
