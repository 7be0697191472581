//! The loaded model, as far as requests depend on it: turns a request into settings, and predicts its cost.

use super::limits::SPARE_BYTES;
use super::rates::{Rates, units};
use crate::cli::args::{ImageOptions, LoraArg};
use crate::cli::{
    ImageRequest, Library, ModelProfile, Origin, PreparedEdit, Settings, field, ignored_settings, unknown_words_note,
};
use kiln::api::{ApiError, ApiResult, Request};
use kiln::device::GemmFormats;
use kiln::edit::Mask;
use kiln::error::Error;
use kiln::locate::Found;
use kiln::lora::Adapters;
use kiln::predict::Predictor;
use kiln::progress::{Phase, PreviewKind};
use kiln::{DecodedReference, Estimate, EstimateRequest, Grid, Job, LoadOptions, Noise, NoiseKind, OpenModel, Pixels, estimate};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The loaded model.
pub struct Model {
    pub profile: ModelProfile,
    pub found: Found,
    pub origin: Origin,
    /// The name of the backend, and the device for display.
    pub backend: &'static str,
    pub device: String,
    /// The name in OpenAI's list of models.
    pub id: String,
    /// Unix time of the start.
    pub created: u64,
    /// The files of adapters by their names.
    pub adapters: BTreeMap<String, PathBuf>,
    pub library: Mutex<Library>,
    pub predictions: Predictions,
    /// Memory of the device for the working memory of a job, if there is a limit.
    pub capacity: Option<u64>,
    pub rates: Arc<Rates>,
}

/// What costs are predicted from: the model's files once more, without their weights.
pub struct Predictions {
    pub model: Mutex<OpenModel>,
    pub options: LoadOptions,
    pub gemms: GemmFormats,
    pub predictor: Option<Predictor>,
    /// The costs of the latest kinds of jobs, the last one at the end. An estimate takes milliseconds, and most clients ask for one kind.
    pub latest: Mutex<VecDeque<(String, Arc<Estimate>)>>,
}

/// How many kinds of jobs are remembered.
const KINDS: usize = 64;

impl Predictions {
    /// The cost of a job. No weight is read.
    pub fn estimate(&self, job: &Job) -> kiln::Result<Arc<Estimate>> {
        let kind = kind_of(job);
        let latest = || self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let known = latest().iter().find(|(other, _)| *other == kind).map(|(_, estimate)| estimate.clone());
        let estimate = known.map_or_else(|| self.compute(job).map(Arc::new), Ok)?;
        let mut latest = latest();
        latest.retain(|(other, _)| *other != kind);
        if latest.len() >= KINDS {
            latest.pop_front();
        }
        latest.push_back((kind, estimate.clone()));
        Ok(estimate)
    }

    fn compute(&self, job: &Job) -> kiln::Result<Estimate> {
        let model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        let time = self.predictor.as_ref().map(Predictor::op_time);
        estimate(EstimateRequest { time, ..model.estimate_request(self.options, self.gemms) }, job)
    }
}

/// All of a job that its cost depends on.
fn kind_of(job: &Job) -> String {
    let Job { prompt: _, negative: _, seeds: _, noise: _, sigmas: _, steps: _, .. } = job;
    let Job { size, start, references, padding, guidance, record, adapters, .. } = job;
    let references: Vec<Grid> = references.iter().map(|reference| reference.grid).collect();
    let start = start.as_ref().map(|start| (start.uses_init(), start.keep.is_some(), start.is_reference));
    let adapters = adapters.as_ref().map(|adapters| adapters.0.iter().map(|(adapter, _)| &adapter.digest).collect::<Vec<_>>());
    format!("{:?}", (size, job.noise_levels(), start, references, padding, guidance, record, adapters))
}

/// The name of a model in OpenAI's list: its display name in lower case, with hyphens between words.
pub fn id_of(name: &str) -> String {
    let mut id = String::new();
    for c in name.chars().map(|c| c.to_ascii_lowercase()) {
        if c.is_ascii_alphanumeric() || c == '.' {
            id.push(c);
        } else if !id.is_empty() && !id.ends_with('-') {
            id.push('-');
        }
    }
    id.trim_end_matches('-').into()
}

/// Whether a client means the loaded model by a name. Many clients know OpenAI's names only.
pub fn is_name_of(asked: &str, id: &str) -> bool {
    let openai = ["gpt-image", "dall-e", "chatgpt-image"];
    asked == id || asked == "kiln" || openai.iter().any(|start| asked.starts_with(start))
}

impl Model {
    /// The settings of a request. Decodes its images.
    pub fn settings(&self, request: &Request) -> ApiResult<Settings> {
        let defaults = &self.profile.defaults;
        if let Some(asked) = request.model.as_deref().filter(|asked| !is_name_of(asked, &self.id)) {
            let message = format!("there is no model `{}` here; this server has `{}`", kiln::text::shown(asked), self.id);
            return Err(ApiError { status: 404, ..ApiError::new("model_not_found", "model", message) });
        }
        if request.precision.is_some_and(|precision| precision != self.profile.precision) {
            let message = format!("the model is loaded in {}", self.profile.precision.name());
            return Err(ApiError::new("unsupported_value", "precision", message));
        }
        let first = request.seed.unwrap_or_default();
        let Some(last) = first.checked_add(u64::from(request.count) - 1) else {
            return Err(ApiError::new("invalid_value", "seed", "the seeds of all images together go beyond the largest seed"));
        };
        let of = |place: &str| {
            let place = place.to_owned();
            move |error: Error| ApiError::of(&error, Some(&place))
        };
        let references = request.images.iter().map(|upload| {
            let decoded = DecodedReference::from_bytes(&upload.bytes, Path::new(&upload.place)).map_err(of(&upload.place))?;
            Ok(decoded.prepare(defaults.max_reference_pixels))
        });
        let references = references.collect::<ApiResult<Vec<_>>>()?;
        let (width, height) = request.size;
        let options = ImageOptions {
            width,
            height,
            aspect: request.aspect,
            steps: request.steps,
            guidance: request.guidance,
            vae_tiling: self.predictions.options.vae_tiling,
            ..ImageOptions::default()
        };
        let mut edit = None;
        if let Some(init) = &request.init {
            let mask =
                request.mask.as_ref().map(|mask| Mask::from_bytes(&mask.bytes, Path::new(&mask.place)).map_err(of(&mask.place)));
            let decoded = DecodedReference::from_bytes(&init.bytes, Path::new(&init.place)).map_err(of(&init.place))?;
            // A mask has the size of its image, so a result of another size would be a surprise.
            let mut edit_options = request.edit.clone();
            if request.mask.is_some() {
                edit_options.size = (None, None);
            }
            let prepared = PreparedEdit::new(decoded, mask.transpose()?, &edit_options, defaults, Vec::new());
            let prepared = prepared.map_err(|error| ApiError::of(&error, fault_of_edit(&error, request)))?;
            let size = prepared.edit.summary.size;
            let is_other = width.is_some_and(|width| width != size.0) || height.is_some_and(|height| height != size.1);
            if request.mask.is_some() && is_other {
                let message = format!("with a mask the image has {}x{}; send that, or `auto`", size.0, size.1);
                return Err(ApiError::new("invalid_value", "size", message));
            }
            edit = Some(prepared);
        }
        let adapters = self.adapters_of(request)?;
        let noise = Noise::Drawn(request.noise.unwrap_or(NoiseKind::HOPPER));
        let image = ImageRequest::of_images(options, edit, references, defaults);
        let image = image.map_err(|error| ApiError::of(&error, matches!(error, Error::ImageSize { .. }).then_some("size")))?;
        let image = ImageRequest {
            prompt: request.prompt.clone(),
            negative: request.negative.clone(),
            seeds: (first..=last).collect(),
            noise,
            adapters,
            ..image
        };
        let settings = Settings::resolve(image, &self.profile);
        let text = self.origin.text(&settings, last, request.format());
        request.format().check_text(&text).map_err(|error| ApiError::of(&error, Some("prompt")))?;
        Ok(settings)
    }

    /// The adapters of a request, if it names any.
    fn adapters_of(&self, request: &Request) -> ApiResult<Option<Arc<Adapters>>> {
        if request.adapters.is_empty() {
            return Ok(None);
        }
        let mut list = Vec::new();
        for (number, choice) in request.adapters.iter().enumerate() {
            let Some(file) = self.adapters.get(&choice.name) else {
                let names: Vec<String> = self.adapters.keys().map(|name| format!("`{name}`")).collect();
                let there =
                    if names.is_empty() { "none; `kiln serve --adapters DIR` adds some".into() } else { names.join(", ") };
                let message = format!("there is no adapter `{}` here; there is {there}", kiln::text::shown(&choice.name));
                return Err(ApiError::new("invalid_value", &format!("lora[{number}]"), message));
            };
            list.push(LoraArg { file: file.clone(), scale: choice.scale });
        }
        let mut library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = library.open(&list, &mut |_| {});
        opened.map(Some).map_err(|error| {
            // The file is the server's, so its faults are not the client's.
            let message = match &error {
                Error::Mismatch { detail, .. } => format!("an adapter does not fit the model: {detail}"),
                _ => "an adapter cannot be used; the server's log says why".into(),
            };
            ApiError { status: 500, ..ApiError::new("internal", "lora", message) }
        })
    }

    /// The cost of one image, and its predicted seconds. Refuses what the device can never hold.
    pub fn estimate(&self, job: &Job) -> ApiResult<(Arc<Estimate>, f64)> {
        let estimate = self.predictions.estimate(job).map_err(|error| ApiError::of(&error, None))?;
        if let Some(capacity) = self.capacity {
            let most = capacity.saturating_sub(SPARE_BYTES);
            if estimate.arena_bytes > most {
                let (need, have) = (kiln::text::gib(estimate.arena_bytes), kiln::text::gib(most));
                let message = format!(
                    "this image needs {need} of working memory, and the device has {have}; make it smaller, or send fewer images"
                );
                return Err(ApiError { status: 422, code: "does_not_fit", param: None, message });
            }
        }
        let seconds = self.rates.seconds(&estimate);
        Ok((estimate, seconds))
    }

    /// How the previews of a request are made: by the model's colors if it has some, unless the client chose another way.
    pub fn preview_kind(&self, request: &Request) -> ApiResult<PreviewKind> {
        let has_colors = {
            let model = self.predictions.model.lock().unwrap_or_else(PoisonError::into_inner);
            model.configs.vae.preview.is_some()
        };
        match request.preview {
            Some(PreviewKind::Fast) if !has_colors && request.partial_images > 0 => {
                let message = "this model has no colors for fast previews; `full` decodes them";
                Err(ApiError::new("unsupported_value", "preview", message))
            }
            Some(kind) => Ok(kind),
            None => Ok(if has_colors { PreviewKind::Fast } else { PreviewKind::Full }),
        }
    }

    /// What a client may not expect of its request.
    pub fn warnings(&self, settings: &Settings) -> Vec<String> {
        let mut warnings = ignored_settings(settings, spelled);
        let notes = settings.edit.iter().flat_map(|edit| edit.notes(&settings.job)).filter(|note| note.starts_with("note: "));
        warnings.extend(notes);
        warnings.extend(unknown_words_note(&settings.job.prompt, &self.found, &self.profile.defaults));
        warnings
    }

    /// The coefficients of `fixed + steps (a T + b T²) + pixels c` in seconds, where T counts all tokens: fixed, a, b, c. A page predicts
    /// times with them while somebody types.
    pub fn coefficients(&self) -> Option<[f64; 4]> {
        let defaults = &self.profile.defaults;
        let of = |side: usize| {
            let job = Job::new("", 0, defaults, self.profile.variant).ok()?;
            let estimate = self.predictions.estimate(&Job { size: Pixels::new(side, side).ok()?, ..job }).ok()?;
            let steps = estimate.sigmas.len() as f64;
            let tokens = (estimate.text_tokens + estimate.canvas_tokens) as f64;
            Some((tokens, units(&estimate, Phase::Denoise) / steps, estimate))
        };
        let ((few, small, estimate), (many, large, _)) = (of(256)?, of(1024)?);
        let is_timed = !estimate.seconds.is_empty();
        let rate = |stage: Phase| self.rates.of(stage, is_timed);
        let b = (large / many - small / few) / (many - few);
        let a = small / few - b * few;
        let pixel = units(&estimate, Phase::Decode) / (256.0 * 256.0);
        let fixed = units(&estimate, Phase::Encode) * rate(Phase::Encode);
        Some([fixed, a * rate(Phase::Denoise), b * rate(Phase::Denoise), pixel * rate(Phase::Decode)])
    }
}

/// How a setting is called in requests.
fn spelled(name: &str) -> String {
    field(if name == "negative" { "negative_prompt" } else { name })
}

/// The field that an error of an edit is about.
fn fault_of_edit(error: &Error, request: &Request) -> Option<&'static str> {
    match error {
        Error::BadFile { .. } if request.mask.is_some() => Some("mask"),
        Error::ImageSize { .. } if request.edit.extend.is_some() => Some("extend"),
        Error::ImageSize { .. } => Some("size"),
        Error::Usage { what, .. } => {
            // The message names the field in quotes.
            ["strength", "feather", "mask_crop", "extend", "mask"].into_iter().find(|name| what.contains(&format!("`{name}`")))
        }
        _ => None,
    }
}

/// The adapters of a folder, by their file names without the extension.
pub fn adapters_in(folder: &Path) -> kiln::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(|error| Error::read(folder, error))? {
        let path = entry.map_err(|error| Error::read(folder, error))?.path();
        let is_adapter = path.extension().is_some_and(|extension| extension == "safetensors") && path.is_file();
        let name = path.file_stem().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'));
        if let (true, Some(name)) = (is_adapter, name) {
            found.insert(name.to_owned(), path.clone());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::{ModelDefaults, Padding, ReferenceInput, Variant};

    #[test]
    fn jobs_of_one_kind_cost_the_same() {
        let job = Job::new("a fox", 1, &ModelDefaults::klein(), Variant::Distilled).unwrap();
        let other = Job { prompt: "a cat".into(), seeds: vec![2], negative: "x".into(), ..job.clone() };
        assert_eq!(kind_of(&job), kind_of(&other));
        let grid = Grid { width: 4, height: 4 };
        for other in [
            Job { size: Pixels::new(64, 64).unwrap(), ..job.clone() },
            Job { steps: 5, ..job.clone() },
            Job { references: vec![ReferenceInput { grid, pixels: Arc::default() }], ..job.clone() },
            Job { guidance: 7.0, ..job.clone() },
            Job { padding: Padding::Left, ..job.clone() },
        ] {
            assert_ne!(kind_of(&job), kind_of(&other));
        }
    }

    #[test]
    fn ids_are_words() {
        assert_eq!(id_of("FLUX.2 [klein] 4B (distilled)"), "flux.2-klein-4b-distilled");
        assert_eq!(id_of("  kiln's model! "), "kiln-s-model");
        for name in ["kiln", "gpt-image-1", "dall-e-3", "chatgpt-image-latest", "flux.2-klein-4b-distilled"] {
            assert!(is_name_of(name, "flux.2-klein-4b-distilled"), "{name}");
        }
        for name in ["", "gpt-4", "Kiln", "flux.2-klein-9b"] {
            assert!(!is_name_of(name, "flux.2-klein-4b-distilled"), "{name}");
        }
    }
}
