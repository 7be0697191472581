//! A request that the engine works on. The connections that wait for its images share it, and it ends with the last of them: its images
//! leave the queue, and the one that runs stops before its next step.

use super::answer::media_type;
use super::body::{Digest, Held};
use super::metrics::Metrics;
use super::plan::{Handover, Plan};
use super::rates::{Rates, Stopwatch};
use super::retries::Retries;
use hyper::body::Bytes;
use kiln::api::ApiError;
use kiln::error::Error;
use kiln::image::Image;
use kiln::progress::{Phase, PreviewKind, Progress};
use kiln::service::Handle;
use kiln::{Estimate, GeneratedImage};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;
use tokio::sync::watch;

/// An encoded image.
pub struct Made {
    pub seed: u64,
    pub media_type: &'static str,
    pub file: Bytes,
    /// The file in base64, if answers need it.
    pub base64: Bytes,
}

/// A preview of an image that is not finished.
#[derive(Clone)]
pub struct Partial {
    /// The number of its image in the request, from 0 on.
    pub image: usize,
    pub step: usize,
    pub steps: usize,
    /// A PNG in base64.
    pub base64: Bytes,
}

/// What the engine does for a request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    pub image: usize,
    pub phase: Phase,
    pub done: u64,
    pub of: u64,
}

/// A request that was admitted.
pub struct Work {
    pub plan: Plan,
    pub admitted: Instant,
    /// The predicted seconds until the first image begins, and the images before it, when it was admitted.
    pub predicted: f64,
    position: usize,
    state: Mutex<State>,
    /// Changes whenever the state does.
    news: watch::Sender<u64>,
    /// The jobs of its images. Dropping one cancels it.
    handles: Mutex<Vec<Handle>>,
    metrics: Arc<Metrics>,
    _uploads: Held,
    /// Where the answer is kept, if the request may come again.
    repeat: Option<(Retries, Digest)>,
}

/// What has been made so far.
#[derive(Default)]
pub struct State {
    pub images: Vec<Option<Arc<Made>>>,
    pub partials: Vec<Partial>,
    pub now: Option<Now>,
    pub warnings: Vec<String>,
    pub error: Option<ApiError>,
    /// When the first image began, and when the last was encoded.
    pub begun: Option<Instant>,
    pub ended: Option<Instant>,
}

impl Made {
    /// A file of an image, in the forms that its answer needs.
    pub fn new(plan: &Plan, image: &GeneratedImage, file: Vec<u8>) -> Self {
        let needs_base64 = matches!(plan.handover, Handover::Base64 | Handover::Stream);
        let base64 = if needs_base64 { kiln::base64::encode(&file) } else { Vec::new() };
        Self { seed: image.seed, media_type: media_type(plan.format), file: file.into(), base64: base64.into() }
    }
}

impl State {
    /// Whether nothing more will come.
    pub fn is_over(&self) -> bool {
        self.error.is_some() || self.images.iter().all(Option::is_some)
    }
}

impl Work {
    pub fn new(
        plan: Plan,
        (predicted, position): (f64, usize),
        metrics: Arc<Metrics>,
        uploads: Held,
        repeat: Option<(Retries, Digest)>,
    ) -> Arc<Self> {
        let state =
            State { images: plan.seeds.iter().map(|_| None).collect(), warnings: plan.warnings.clone(), ..State::default() };
        Arc::new(Self {
            plan,
            admitted: Instant::now(),
            predicted,
            position,
            state: Mutex::new(state),
            news: watch::channel(0).0,
            handles: Mutex::default(),
            metrics,
            _uploads: uploads,
            repeat,
        })
    }

    /// What has been made so far.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many images were before its first one.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Who is told of changes.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.news.send_modify(|count| *count += 1);
    }

    /// Adds an image. The last one ends the request.
    fn finish(self: &Arc<Self>, index: usize, made: Made) {
        // The answer is kept before the first client can take it: the request lives no longer than its clients.
        if let Some((retries, key)) = &self.repeat
            && self.state().images.iter().enumerate().all(|(other, image)| other == index || image.is_some())
        {
            retries.keep(key, self);
        }
        self.change(|state| {
            if let Some(place) = state.images.get_mut(index) {
                *place = Some(Arc::new(made));
            }
            if state.is_over() {
                state.ended.get_or_insert_with(Instant::now);
            }
        });
    }

    /// Adds the jobs of the images.
    pub fn attach(&self, handles: Vec<Handle>) {
        *self.handles.lock().unwrap_or_else(PoisonError::into_inner) = handles;
    }

    /// Ends the request with an error. The other images are of no use.
    pub fn fail(&self, error: ApiError) {
        self.change(|state| {
            state.error.get_or_insert(error);
            state.ended.get_or_insert_with(Instant::now);
        });
        let handles = std::mem::take(&mut *self.handles.lock().unwrap_or_else(PoisonError::into_inner));
        drop(handles);
    }

    /// Whether it ended with an error.
    pub fn has_failed(&self) -> bool {
        self.state().error.is_some()
    }

    /// The bytes of its images.
    pub fn bytes(&self) -> usize {
        self.state().images.iter().flatten().map(|made| made.file.len() + made.base64.len()).sum()
    }

    /// Waits until all images are made, or one has failed.
    pub async fn finished(&self) {
        let mut news = self.news();
        while !self.state().is_over() && news.changed().await.is_ok() {}
    }

    fn warn(&self, text: &str) {
        self.change(|state| {
            if !state.warnings.iter().any(|warning| warning == text) {
                state.warnings.push(text.into());
            }
        });
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.is_over() {
            self.metrics.count_canceled(if state.begun.is_some() { "running" } else { "waiting" });
        }
    }
}

/// Something for the thread that encodes.
pub enum Encode {
    Image { work: Weak<Work>, index: usize, image: Box<GeneratedImage>, begun: Instant },
    Preview { work: Weak<Work>, index: usize, step: usize, steps: usize, image: Image },
}

/// Encodes images and previews while the engine works on the next, until no one sends any more.
pub fn encode_all(tasks: std::sync::mpsc::Receiver<Encode>, encode: impl Fn(&Plan, &GeneratedImage) -> Result<Made, Error>) {
    for task in tasks {
        match task {
            Encode::Image { work, index, image, begun } => {
                let Some(work) = work.upgrade() else { continue };
                let warnings = work.plan.warnings_of(&image);
                match encode(&work.plan, &image) {
                    Ok(made) => {
                        work.metrics.count_image("done");
                        work.metrics.add_image_time(begun.elapsed().as_secs_f64());
                        warnings.iter().for_each(|warning| work.warn(warning));
                        work.finish(index, made);
                    }
                    Err(error) => {
                        work.metrics.count_image("failed");
                        work.fail(ApiError::of(&error, None));
                    }
                }
            }
            Encode::Preview { work, index, step, steps, image } => {
                let Some(work) = work.upgrade() else { continue };
                // A preview that cannot be encoded costs no image.
                if let Ok(file) = image.encode(kiln::image::Format::Png, &[], kiln::image::Threads::All) {
                    let base64 = Bytes::from(kiln::base64::encode(&file));
                    work.change(|state| {
                        if state.images.get(index).is_some_and(Option::is_none) {
                            state.partials.push(Partial { image: index, step, steps, base64 });
                        }
                    });
                }
            }
        }
    }
}

/// Watches the job of one image, on the thread of the engine: times its stages, forwards its previews and warnings.
pub struct Watch {
    work: Weak<Work>,
    index: usize,
    encoder: Sender<Encode>,
    rates: Arc<Rates>,
    metrics: Arc<Metrics>,
    estimate: Arc<Estimate>,
    begun: OnceLock<Instant>,
    steps: AtomicUsize,
    stopwatch: Stopwatch,
}

impl Watch {
    pub fn new(work: &Arc<Work>, index: usize, encoder: Sender<Encode>, rates: Arc<Rates>) -> Arc<Self> {
        let (metrics, estimate) = (work.metrics.clone(), work.plan.estimate.clone());
        let (begun, steps, stopwatch) = (OnceLock::new(), AtomicUsize::new(0), Stopwatch::default());
        Arc::new(Self { work: Arc::downgrade(work), index, encoder, rates, metrics, estimate, begun, steps, stopwatch })
    }

    /// Whether a client waits for the image.
    pub fn is_awaited(&self) -> bool {
        self.work.upgrade().is_some_and(|work| !work.state().is_over())
    }

    /// The job's turn has come.
    pub fn start(&self) {
        let now = *self.begun.get_or_init(Instant::now);
        if let Some(work) = self.work.upgrade() {
            self.metrics.add_queue_time((now - work.admitted).as_secs_f64());
            work.change(|state| {
                state.begun.get_or_insert(now);
            });
        }
    }

    /// The image is done, but for its file.
    pub fn image(&self, image: GeneratedImage) -> Result<(), Error> {
        let begun = self.begun.get().copied().unwrap_or_else(Instant::now);
        let task = Encode::Image { work: self.work.clone(), index: self.index, image: Box::new(image), begun };
        self.encoder.send(task).map_err(|_| Error::Interrupted)
    }

    /// The job is over.
    pub fn end(&self, error: Option<ApiError>) {
        let spent = self.stopwatch.take();
        match error {
            None => {
                for (phase, time) in &spent {
                    self.metrics.add_stage_time(stage_name(*phase), time.as_secs_f64());
                }
                self.rates.learn(&self.estimate, &spent);
            }
            Some(error) => {
                let Some(work) = self.work.upgrade() else { return self.metrics.count_image("canceled") };
                self.metrics.count_image("failed");
                work.fail(error);
            }
        }
    }
}

/// The name of a stage in metrics and events.
pub const fn stage_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Load => "load",
        Phase::Encode => "encode",
        Phase::References => "references",
        Phase::Denoise => "denoise",
        Phase::Decode => "decode",
        Phase::Calibrate | Phase::Quantize | Phase::Inspect | Phase::Hash => "other",
    }
}

impl Progress for Watch {
    fn begin(&self, phase: Phase, total: u64) {
        self.stopwatch.begin(phase, total);
        if phase == Phase::Denoise {
            self.steps.store(total as usize, Ordering::Relaxed);
        }
        if let Some(work) = self.work.upgrade().filter(|work| work.plan.wants_progress) {
            work.change(|state| state.now = Some(Now { image: self.index, phase, done: 0, of: total }));
        }
    }

    fn advance(&self, amount: u64) {
        if let Some(work) = self.work.upgrade().filter(|work| work.plan.wants_progress) {
            work.change(|state| {
                if let Some(now) = &mut state.now {
                    now.done += amount;
                }
            });
        }
    }

    fn end(&self) {
        self.stopwatch.end();
    }

    fn warn(&self, text: &str) {
        if let Some(work) = self.work.upgrade() {
            work.warn(text);
        }
    }

    fn wants_preview(&self) -> Option<PreviewKind> {
        self.work.upgrade().and_then(|work| work.plan.preview_kind())
    }

    fn wants_preview_of(&self, step: usize, steps: usize) -> Option<bool> {
        let count = self.work.upgrade().map_or(0, |work| work.plan.partial_images);
        Some(preview_steps(count, steps).any(|wanted| wanted == step))
    }

    fn preview(&self, step: usize, image: Image) {
        let steps = self.steps.load(Ordering::Relaxed);
        // The last one is the finished image.
        if step < steps {
            let task = Encode::Preview { work: self.work.clone(), index: self.index, step, steps, image };
            let _ = self.encoder.send(task);
        }
    }
}

/// The steps after which a stream has this many previews, evenly spread. Few steps have fewer.
pub fn preview_steps(count: u8, steps: usize) -> impl Iterator<Item = usize> {
    let parts = usize::from(count) + 1;
    let mut last = 0;
    (1..parts).map(move |i| (2 * i * steps + parts) / (2 * parts)).filter(move |&step| {
        let is_new = step > last && step < steps;
        last = last.max(step);
        is_new
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn previews_are_spread_evenly() {
        let of = |count, steps| preview_steps(count, steps).collect::<Vec<_>>();
        assert_eq!(of(3, 4), [1, 2, 3]);
        assert_eq!(of(2, 4), [1, 3]);
        assert_eq!(of(1, 4), [2]);
        assert_eq!(of(3, 2), [1]);
        assert_eq!(of(3, 1), [0; 0]);
        assert_eq!(of(0, 50), [0; 0]);
        assert_eq!(of(3, 50), [13, 25, 38]);
    }
}
