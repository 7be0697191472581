//! A request that is checked against the model: its settings, its cost, and what its answer holds.

use super::body::{Budget, Held};
use super::model::Model;
use crate::cli::{Settings, flat_image_warning, saturation_warning};
use kiln::api::{ApiResult, Delivery, Request, Route};
use kiln::error::{Error, Result};
use kiln::image::Format;
use kiln::progress::PreviewKind;
use kiln::{Estimate, GeneratedImage, Job};
use std::mem::size_of;
use std::sync::{Arc, Mutex, PoisonError};

/// How the images of an answer are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// In JSON, in base64.
    Base64,
    /// In JSON, by a URL.
    Url,
    /// The answer is the file.
    File,
    /// A stream of events.
    Stream,
}

/// A request that is checked against the model.
pub struct Plan {
    pub route: Route,
    pub seeds: Vec<u64>,
    /// Whether the client chose the seed.
    pub has_seed: bool,
    pub handover: Handover,
    pub format: Format,
    pub partial_images: u8,
    preview: PreviewKind,
    pub wants_progress: bool,
    pub quality: String,
    pub ignored: Vec<String>,
    pub warnings: Vec<String>,
    /// Width and height of the images.
    pub size: (usize, usize),
    pub steps: usize,
    pub guidance: Option<f32>,
    /// Predicted seconds of each image.
    pub seconds: f64,
    pub estimate: Arc<Estimate>,
    pub settings: Arc<LaterSettings>,
}

/// The settings of a request, with its decoded images. While memory is short they are dropped, and made again from the request's files when
/// its turn has come.
pub struct LaterSettings {
    ready: Mutex<Option<Ready>>,
    request: Option<Request>,
    model: Arc<Model>,
}

struct Ready {
    settings: Arc<Settings>,
    _held: Option<Held>,
}

impl LaterSettings {
    fn new(request: Request, settings: Settings, model: &Arc<Model>, budget: &Arc<Budget>) -> Self {
        let held = Held::new(budget, job_bytes(&settings.job));
        let (ready, request) = match held {
            Some(held) => (Some(Ready { settings: Arc::new(settings), _held: Some(held) }), None),
            None => (None, Some(request)),
        };
        Self { ready: Mutex::new(ready), request, model: model.clone() }
    }

    /// Whether the files of the request are kept.
    pub fn keeps_files(&self) -> bool {
        self.request.is_some()
    }

    /// The settings.
    pub fn get(&self) -> Result<Arc<Settings>> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Ready { settings, .. }) = &*ready {
            return Ok(settings.clone());
        }
        let Some(request) = &self.request else { return Err(Error::Interrupted) };
        // It was made before from the same bytes, so nothing of the client's can be wrong.
        let settings = self.model.settings(request).map_err(|error| Error::Op { op: "prepare", what: error.to_string() })?;
        Ok(ready.insert(Ready { settings: Arc::new(settings), _held: None }).settings.clone())
    }

    /// The job of an image.
    pub fn job(&self, seed: u64) -> Result<Job> {
        Ok(Job { seeds: vec![seed], ..self.get()?.job.clone() })
    }
}

/// The bytes of the images of a job.
fn job_bytes(job: &Job) -> u64 {
    let start = job.start.iter().map(|start| &start.init);
    let values: usize = job.references.iter().chain(start).map(|input| input.pixels.len()).sum();
    (values * size_of::<f32>() + 4 * job.size.width() * job.size.height()) as u64
}

impl Plan {
    /// Checks a request against the model, and decodes its images. `wants_file` says whether the answer is to be the file.
    pub fn new(mut request: Request, wants_file: bool, model: &Arc<Model>, budget: &Arc<Budget>) -> ApiResult<Self> {
        let has_seed = request.seed.is_some();
        request.seed = Some(request.seed.unwrap_or_else(crate::cli::random_seed));
        let settings = model.settings(&request)?;
        let (estimate, seconds) = model.estimate(&settings.job)?;
        let handover = match request.delivery {
            _ if request.stream => Handover::Stream,
            _ if wants_file && request.count == 1 => Handover::File,
            Delivery::Base64 => Handover::Base64,
            Delivery::Url => Handover::Url,
        };
        Ok(Self {
            route: request.route,
            has_seed,
            seeds: settings.job.seeds.clone(),
            handover,
            format: request.format(),
            partial_images: request.partial_images,
            preview: model.preview_kind(&request)?,
            wants_progress: request.progress,
            quality: request.quality.clone(),
            ignored: request.ignored.clone(),
            warnings: model.warnings(&settings),
            size: settings.size(),
            steps: settings.job.steps,
            guidance: settings.guidance.chosen,
            seconds,
            estimate,
            settings: Arc::new(LaterSettings::new(request, settings, model, budget)),
        })
    }

    /// The model that the request is for.
    pub fn model(&self) -> &Model {
        &self.settings.model
    }

    /// The previews that the engine makes.
    pub fn preview_kind(&self) -> Option<PreviewKind> {
        (self.partial_images > 0).then_some(self.preview)
    }

    /// What is remarkable about a finished image.
    pub fn warnings_of(&self, image: &GeneratedImage) -> Vec<String> {
        let saturation = self.settings.get().ok().and_then(|settings| saturation_warning(image.saturated, &settings));
        flat_image_warning(image).into_iter().chain(saturation).collect()
    }

    /// Tokens of the prompt, of the images that came with the request, and of each new image.
    pub fn tokens(&self) -> (usize, usize, usize) {
        let Estimate { text_tokens, canvas_tokens, reference_tokens, .. } = &*self.estimate;
        (*text_tokens, reference_tokens.iter().sum(), *canvas_tokens)
    }
}
