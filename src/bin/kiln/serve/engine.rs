//! Builds the engine of the server, and what requests need to know about it.

use super::model::{Model, Predictions, id_of};
use super::rates::{Rates, Stopwatch};
use crate::cli::{ImageRequest, Library, ModelProfile, Origin, Session, Settings, Setup};
use crate::terminal::Terminal;
use kiln::error::Result;
use kiln::locate::{Environment, Found};
use kiln::lora::LayerTargets;
use kiln::metadata::Detail;
use kiln::progress::Silent;
use kiln::{Engine, Job, OpenModel, threads};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// What to build.
#[derive(Clone)]
pub struct EngineRequest {
    pub setup: Setup,
    /// An image of the default settings, which memory and caches are planned for.
    pub usual: ImageRequest,
    /// How much images say about how they were made.
    pub detail: Detail,
    /// Ends work on the engine at once.
    pub halt: Arc<AtomicBool>,
    pub terminal: Arc<Terminal>,
}

/// What is known of the engine once it is there.
pub struct Known {
    profile: ModelProfile,
    found: Found,
    origin: Origin,
    backend: &'static str,
    device: String,
    predictions: Predictions,
    targets: LayerTargets,
    capacity: Option<u64>,
    rates: Rates,
}

impl EngineRequest {
    /// Opens the device, loads the model and makes an image that nobody sees: it finds the kernels, and shows how fast this machine is.
    pub fn build(&self) -> Result<(Engine, Known)> {
        let terminal = &self.terminal;
        let mut session = Session::open(self.setup.clone(), &self.halt, terminal)?;
        let profile = session.profile();
        let job = Settings::resolve(self.usual.clone(), &profile).job;
        session.fit(&job, terminal)?;
        let is_gpu = session.backend.device.is_some();
        // The model once more, because the engine takes the one that is open.
        let mut model = OpenModel::open(&session.found, Some(profile.variant))?;
        model.adapters = session.model.adapters.clone();
        let predictions = Predictions {
            model: Mutex::new(model),
            options: session.options,
            gemms: session.backend.backend.gemm_formats(),
            predictor: session.backend.predictor.clone().ok(),
            latest: Mutex::default(),
        };
        let (found, backend, device) = (session.found.clone(), session.backend.name, session.backend.machine.clone());
        let (targets, cache, samples, kind) =
            (session.model.layer_targets(), session.result_cache(), session.samples()?, session.device());
        let (engine, weights) = threads::join(|| session.load(&**terminal), || samples.id());
        let (mut engine, origin) = (engine?, Origin { model_id: weights?, device: kind, detail: self.detail });
        engine.cache_results(cache, &job)?;
        let capacity = if is_gpu { engine.backend().available()? } else { None };
        // A CPU has no kernels to find, and one step shows how fast it is.
        let steps = if is_gpu { job.steps } else { 1 };
        let rates = warm_up(&mut engine, &predictions, Job { steps, sigmas: None, ..job })?;
        let known = Known { profile, found, origin, backend, device, predictions, targets, capacity, rates };
        Ok((engine, known))
    }
}

/// Makes an image, and returns how long its stages took.
fn warm_up(engine: &mut Engine, predictions: &Predictions, job: Job) -> Result<Rates> {
    let (rates, watch) = (Rates::default(), Stopwatch::default());
    engine.check_memory(&job)?;
    // The first image also loads weights and finds kernels, so a GPU makes another one.
    let is_gpu = engine.backend().cuda().is_some();
    if is_gpu {
        engine.generate(&job, &Silent, &mut |_| Ok(()))?;
    }
    engine.generate(&job, &watch, &mut |_| Ok(()))?;
    let estimate = predictions.estimate(&job)?;
    rates.learn(&estimate, &watch.take());
    Ok(rates)
}

impl Known {
    /// The model of the server.
    pub fn model(self, adapters: BTreeMap<String, PathBuf>, environment: Environment, partial: bool, created: u64) -> Model {
        let Self { profile, found, origin, backend, device, predictions, targets, capacity, rates } = self;
        let id = id_of(&profile.name);
        let library = Mutex::new(Library::new(targets, environment, partial));
        let rates = Arc::new(rates);
        Model { profile, found, origin, backend, device, id, created, adapters, library, predictions, capacity, rates }
    }
}

/// Opens each adapter once, so that a file that does not fit is an error of the command and not of a request.
pub fn check_adapters(model: &Model) -> Result<()> {
    for path in model.adapters.values() {
        let choice = crate::cli::args::LoraArg { file: path.clone(), scale: 1.0 };
        let mut library = model.library.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        library.open(&[choice], &mut |_| {})?;
    }
    Ok(())
}
