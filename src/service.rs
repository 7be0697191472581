//! One engine for many callers. A dedicated thread builds the [`Engine`] and keeps it, because a backend may not move between threads.
//! Jobs wait in a queue that is fair to callers, and each caller receives its own job's images through a [`Ticket`].
//!
//! A canceled or failed job leaves the engine ready for the next one. After a panic the engine's state is unknown. A service that can build
//! its engine again does so, and only the job that panicked fails. Otherwise the service ends: every waiting job and every later one gets
//! an error.

mod queue;

use crate::error::{Error, Result};
use crate::pipeline::{Engine, GeneratedImage, Job};
use crate::progress::Progress;
use crate::threads;
use queue::FairQueue;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most images of one job that wait for the caller. The engine waits before it adds more.
const WAITING_IMAGES: usize = 2;

/// The pause before the engine checks again whether a caller has room for an image.
const PATIENCE: Duration = Duration::from_millis(1);

/// Receives the progress of a job, on the thread of the engine.
pub type JobProgress = Arc<dyn Progress + Send + Sync>;

/// Makes a job when its turn has come, on the thread of the engine.
pub type JobSource = Box<dyn FnOnce() -> Result<Job> + Send>;

/// Receives the events of a job, on the thread of the engine, which must not wait for long. An error ends the job.
pub type EventSink = Box<dyn FnMut(Event) -> Result<()> + Send>;

/// A result of a job.
#[derive(Debug)]
pub enum Event {
    /// An image is done.
    Image(GeneratedImage),
    /// The job is over; nothing follows.
    Done(Result<()>),
}

/// An engine on a dedicated thread. Dropping the service cancels all its jobs and waits for the thread to end.
pub struct Service {
    queue: Arc<FairQueue<Task>>,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by callers and the engine's thread.
#[derive(Default)]
struct State {
    /// Set when the service is dropped.
    closing: AtomicBool,
    /// The running job.
    running: Mutex<Option<Running>>,
    /// Free bytes of the device after the last job; 0 if it does not tell.
    free: AtomicU64,
    /// The message of the panic that ended the thread.
    panic: Mutex<Option<String>>,
}

/// The job that runs.
struct Running {
    cancel: Arc<AtomicBool>,
    since: Instant,
    /// How long the job is predicted to take.
    seconds: f64,
}

impl State {
    /// The reason why no further event comes.
    fn ended(&self) -> Error {
        locked(&self.panic).as_deref().map_or(Error::Interrupted, panicked)
    }
}

/// The error of a job that panicked.
fn panicked(message: &str) -> Error {
    Error::Op { op: "service", what: format!("the engine's thread panicked: {message}") }
}

/// A job in the queue.
struct Task {
    job: JobSource,
    seconds: f64,
    cancel: Arc<AtomicBool>,
    progress: JobProgress,
    events: EventSink,
}

impl Task {
    fn is_live(&self) -> bool {
        !self.cancel.load(Ordering::Relaxed)
    }
}

/// Ends the queue with the thread that serves it, so that nobody waits for what no longer comes.
struct Ended(Arc<FairQueue<Task>>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// A job that was submitted. Dropping it cancels the job.
pub struct Handle {
    cancel: Arc<AtomicBool>,
    queue: Arc<FairQueue<Task>>,
}

/// A job that was submitted, and its events. Dropping it cancels the job.
pub struct Ticket {
    handle: Handle,
    events: Receiver<Event>,
    state: Arc<State>,
}

impl Service {
    /// Starts the thread and waits until it has built the engine. `build` also returns what the caller needs to know about the engine.
    pub fn start<T: Send + 'static>(build: impl FnOnce() -> Result<(Engine, T)> + Send + 'static) -> Result<(Self, T)> {
        let mut build = Some(build);
        Self::launch(move || build.take().map(|build| build()))
    }

    /// Like [`Service::start`], and builds the engine again after a panic.
    pub fn start_renewable<T: Send + 'static>(
        mut build: impl FnMut() -> Result<(Engine, T)> + Send + 'static,
    ) -> Result<(Self, T)> {
        Self::launch(move || Some(build()))
    }

    /// Starts the thread. `build` returns `None` if it cannot build an engine again.
    fn launch<T: Send + 'static>(mut build: impl FnMut() -> Option<Result<(Engine, T)>> + Send + 'static) -> Result<(Self, T)> {
        let queue = Arc::new(FairQueue::new());
        let tasks = Ended(queue.clone());
        let (ready, built) = sync_channel(1);
        let state = Arc::<State>::default();
        let own = state.clone();
        let work = move || {
            let served = catch_unwind(AssertUnwindSafe(|| {
                let mut engine = match build() {
                    Some(Ok((engine, known))) => {
                        let _ = ready.send(Ok(known));
                        engine
                    }
                    Some(Err(error)) => return drop(ready.send(Err(error))),
                    None => return,
                };
                while let Err(panic) = serve(engine, &tasks.0, &own) {
                    match build() {
                        Some(Ok((built, _))) => engine = built,
                        Some(Err(error)) => return *locked(&own.panic) = Some(format!("{panic}; then {error}")),
                        None => return *locked(&own.panic) = Some(panic),
                    }
                }
            }));
            // This comes before `ready` is dropped, which the caller notices.
            if let Err(payload) = served {
                *locked(&own.panic) = Some(message(payload.as_ref()));
            }
        };
        let thread = std::thread::Builder::new().stack_size(threads::STACK).spawn(work);
        let thread = thread.map_err(|error| Error::Threads { count: 1, why: error.to_string() })?;
        let service = Self { queue, state, thread: Some(thread) };
        match built.recv() {
            Ok(known) => Ok((service, known?)),
            Err(_) => Err(service.state.ended()),
        }
    }

    /// Queues a job of the only caller.
    pub fn submit(&self, job: Job, progress: JobProgress) -> Ticket {
        self.submit_for("", 1.0, job, progress)
    }

    /// Queues a job of a caller, who has a fair share of the engine. The job is predicted to take this many seconds.
    pub fn submit_for(&self, caller: &str, seconds: f64, job: Job, progress: JobProgress) -> Ticket {
        let (sender, events) = sync_channel(WAITING_IMAGES);
        let (cancel, state) = (Arc::<AtomicBool>::default(), self.state.clone());
        let own = cancel.clone();
        let deliver = move |event: Event| {
            // A caller that is gone needs no answer.
            let flag = if matches!(event, Event::Done(_)) { &state.closing } else { &*own };
            deliver(&sender, event, &|| if flag.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) })
        };
        let handle = self.push(caller, seconds, cancel, Box::new(move || Ok(job)), progress, Box::new(deliver));
        Ticket { handle, events, state: self.state.clone() }
    }

    /// Queues a job that is made when its turn has come. Its events go to a function. If the service drops the function before
    /// [`Event::Done`], nobody will run the job; [`Service::ended`] says why.
    pub fn submit_to(&self, caller: &str, seconds: f64, job: JobSource, progress: JobProgress, events: EventSink) -> Handle {
        self.push(caller, seconds, Arc::default(), job, progress, events)
    }

    fn push(
        &self,
        caller: &str,
        seconds: f64,
        cancel: Arc<AtomicBool>,
        job: JobSource,
        progress: JobProgress,
        events: EventSink,
    ) -> Handle {
        let handle = Handle { cancel: cancel.clone(), queue: self.queue.clone() };
        // If nobody takes the task, it is dropped with its events.
        self.queue.push(caller, seconds, Task { job, seconds, cancel, progress, events });
        handle
    }

    /// How many jobs wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// How many jobs of this caller wait.
    pub fn waiting_of(&self, caller: &str) -> usize {
        self.queue.len_of(caller)
    }

    /// The predicted seconds that a job of this caller would wait for others in the queue.
    pub fn seconds_ahead(&self, caller: &str) -> f64 {
        self.queue.ahead(caller).1
    }

    /// How many jobs in the queue come before a job of this caller.
    pub fn jobs_ahead(&self, caller: &str) -> usize {
        self.queue.ahead(caller).0
    }

    /// The predicted seconds of all jobs that wait.
    pub fn seconds_waiting(&self) -> f64 {
        self.queue.seconds()
    }

    /// The predicted seconds until the running job ends.
    pub fn seconds_running(&self) -> f64 {
        let running = locked(&self.state.running);
        running.as_ref().map_or(0.0, |running| (running.seconds - running.since.elapsed().as_secs_f64()).max(0.0))
    }

    /// Takes no more jobs, and drops the waiting ones that are not predicted to end within this many seconds.
    pub fn drain(&self, seconds: f64) {
        self.queue.close();
        self.queue.keep_first(seconds - self.seconds_running());
    }

    /// Cancels the running job, and drops the waiting ones.
    pub fn stop(&self) {
        self.queue.clear();
        if let Some(running) = &*locked(&self.state.running) {
            running.cancel.store(true, Ordering::Relaxed);
        }
    }

    /// Free bytes of the device's memory after the last job, if it tells.
    pub fn device_free(&self) -> Option<u64> {
        Some(self.state.free.load(Ordering::Relaxed)).filter(|free| *free > 0)
    }

    /// Why a job that was dropped did not run.
    pub fn ended(&self) -> Error {
        self.state.ended()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Relaxed);
        if let Some(running) = &*locked(&self.state.running) {
            running.cancel.store(true, Ordering::Relaxed);
        }
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            // The thread's panic was already caught.
            let _ = thread.join();
        }
    }
}

impl Handle {
    /// Cancels the job. A job that runs ends before its next op. A job that waits leaves the queue.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
        self.queue.retain(Task::is_live);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl Ticket {
    /// Waits for the next event. After [`Event::Done`] this always returns an error.
    pub fn next(&self) -> Event {
        self.events.recv().unwrap_or_else(|_| Event::Done(Err(self.state.ended())))
    }

    /// Waits for the job and returns all its images.
    pub fn wait(self) -> Result<Vec<GeneratedImage>> {
        let mut images = Vec::new();
        loop {
            match self.next() {
                Event::Image(image) => images.push(image),
                Event::Done(result) => return result.map(|()| images),
            }
        }
    }

    /// Cancels the job. It ends with [`Error::Interrupted`] unless it finishes first.
    pub fn cancel(&self) {
        self.handle.cancel();
    }
}

/// Runs jobs one after the other until there are no callers. Returns the message of a panic, after which the engine is gone.
fn serve(mut engine: Engine, tasks: &FairQueue<Task>, state: &State) -> std::result::Result<(), String> {
    while let Some(Task { job, seconds, cancel, progress, mut events }) = tasks.pop(Task::is_live) {
        *locked(&state.running) = Some(Running { cancel: cancel.clone(), since: Instant::now(), seconds });
        // Checked after the flag is published: a service that is dropped now either finds the flag or is noticed here.
        if state.closing.load(Ordering::Relaxed) {
            cancel.store(true, Ordering::Relaxed);
        }
        let check = || if cancel.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) };
        let work = || {
            check()?;
            let job = job()?;
            engine.check_memory(&job)?;
            engine.set_cancel(Some(cancel.clone()));
            engine.generate(&job, &*progress, &mut |image| {
                check()?;
                events(Event::Image(image))
            })
        };
        let (result, panic) = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => (result, None),
            Err(payload) => {
                let message = message(payload.as_ref());
                (Err(panicked(&message)), Some(message))
            }
        };
        if panic.is_none() {
            engine.set_cancel(None);
        }
        *locked(&state.running) = None;
        let _ = events(Event::Done(result));
        if let Some(message) = panic {
            // The engine's state is unknown, so it is not used again, and dropping it may fail as well.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(engine)));
            return Err(message);
        }
        let free = if engine.backend().reads_files() { None } else { engine.backend().available().ok().flatten() };
        state.free.store(free.unwrap_or(0), Ordering::Relaxed);
    }
    Ok(())
}

/// Sends an event to the caller, who may take long to receive it. It gives up when `check` fails: dropping a service must not wait for a
/// caller that never receives. A caller that has dropped its ticket has canceled the job.
fn deliver(events: &SyncSender<Event>, mut event: Event, check: &dyn Fn() -> Result<()>) -> Result<()> {
    loop {
        match events.try_send(event) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Disconnected(_)) => return Err(Error::Interrupted),
            Err(TrySendError::Full(kept)) => event = kept,
        }
        check()?;
        std::thread::sleep(PATIENCE);
    }
}

/// The message of a panic.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Locks a value. A panic of another holder leaves no value half-changed.
fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
