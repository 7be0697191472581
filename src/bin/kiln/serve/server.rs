//! What all requests share: the configuration, the engine once it is there, and how far the server is in its life.

use super::Config;
use super::body::Budget;
use super::limits::{DECODED_BYTES, UPLOADED_BYTES};
use super::log::Log;
use super::metrics::Metrics;
use super::model::Model;
use super::retries::Retries;
use super::store::Store;
use super::work::Encode;
use kiln::api::ApiError;
use kiln::error::Error;
use kiln::service::Service;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;
use tokio::sync::watch;

/// How far the server is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The model is loaded.
    Loading,
    Ready,
    /// Accepted images are made, and no others are taken.
    Draining,
    /// The device failed.
    Faulted,
    /// All requests have their answers.
    Ended,
}

/// The engine, and what requests need to know about it.
pub struct Running {
    pub service: Service,
    pub model: Arc<Model>,
    /// The thread that encodes images.
    pub encoder: Sender<Encode>,
}

/// The state of the server.
pub struct Server {
    pub config: Config,
    pub log: Arc<Log>,
    pub metrics: Arc<Metrics>,
    /// Bytes of bodies that are read or wait, and of decoded images that wait.
    pub uploads: Arc<Budget>,
    pub decoded: Arc<Budget>,
    connections: AtomicUsize,
    /// When this process began to serve, which tells a page that the server is another one.
    pub boot: String,
    running: OnceLock<Running>,
    store: Mutex<Store>,
    pub retries: Retries,
    phase: watch::Sender<Phase>,
    /// Why the server ends, if no signal ended it.
    failure: Mutex<Option<Error>>,
    admitting: Mutex<()>,
    /// Its receivers count the requests that have no answer yet.
    open: watch::Sender<()>,
}

impl Server {
    pub fn new(config: Config, log: Log) -> Arc<Self> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Arc::new(Self {
            config,
            log: Arc::new(log),
            metrics: Arc::default(),
            uploads: Budget::new(UPLOADED_BYTES),
            decoded: Budget::new(DECODED_BYTES),
            connections: AtomicUsize::new(0),
            boot: format!("{:x}", since.as_micros()),
            running: OnceLock::new(),
            store: Mutex::default(),
            retries: Retries::default(),
            phase: watch::channel(Phase::Loading).0,
            failure: Mutex::default(),
            admitting: Mutex::default(),
            open: watch::channel(()).0,
        })
    }

    /// How far the server is.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits until the server is at least that far.
    pub fn at(&self, phase: Phase) -> impl Future<Output = ()> + Send + use<> {
        let mut phases = self.phase.subscribe();
        async move {
            let _ = phases.wait_for(|now| *now as u8 >= phase as u8).await;
        }
    }

    /// Goes on to a phase. No phase comes back, and a fault stays a fault.
    pub fn enter(&self, next: Phase) {
        self.phase.send_if_modified(|phase| {
            let is_later = (next as u8) > (*phase as u8);
            if is_later {
                *phase = next;
            }
            is_later
        });
    }

    /// The engine is there.
    pub fn begin(&self, running: Running) {
        if self.running.set(running).is_ok() {
            self.enter(Phase::Ready);
        }
    }

    /// The engine, if it is there.
    pub fn running(&self) -> Option<&Running> {
        self.running.get()
    }

    /// The engine, if requests are taken now.
    pub fn check_open(&self) -> Result<&Running, ApiError> {
        let not_now = |code, message: &str| ApiError { status: 503, code, param: None, message: message.into() };
        match (self.phase(), self.running()) {
            (Phase::Ready, Some(running)) => Ok(running),
            (Phase::Loading | Phase::Ready, _) => Err(not_now("loading", "the model is being loaded; try again")),
            (Phase::Draining | Phase::Ended, _) => Err(not_now("shutting_down", "the server is ending")),
            (Phase::Faulted, _) => Err(not_now("gpu_fault", "the GPU failed, and the server is ending")),
        }
    }

    /// The display name of the model.
    pub fn model_name(&self) -> String {
        self.running().map_or(String::new(), |running| running.model.profile.name.clone())
    }

    pub fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one request at a time be admitted.
    pub fn admitting(&self) -> MutexGuard<'_, ()> {
        self.admitting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an open request, as long as the value lives.
    pub fn count_open(&self) -> watch::Receiver<()> {
        self.open.subscribe()
    }

    /// Waits until no request is open.
    pub async fn all_answered(&self) {
        self.open.closed().await;
    }

    /// Counts a connection; `false` if there are too many.
    pub fn count_connection(&self, most: usize) -> bool {
        let room = |count: usize| (count < most).then_some(count + 1);
        self.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok()
    }

    /// A connection has ended.
    pub fn end_connection(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many connections there are.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Ends the server with an error, which no later request survives.
    pub fn fail(&self, error: Error) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.enter(Phase::Faulted);
    }

    /// The error that ended the server.
    pub fn take_failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
