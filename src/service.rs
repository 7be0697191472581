//! One engine for many callers. A dedicated thread builds the [`Engine`] and keeps it, because a backend may not move between threads.
//! Jobs wait in a queue that is fair to callers, and each caller receives its own job's images through a [`Ticket`].
//!
//! A canceled or failed job leaves the engine ready for the next one. A panic ends the service: every waiting job and every later one
//! gets an error.

mod queue;

use crate::error::{Error, Result};
use crate::pipeline::{Engine, GeneratedImage, Job};
use crate::progress::Progress;
use crate::threads;
use queue::FairQueue;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The most images of one job that wait for the caller. The engine waits before it adds more.
const WAITING_IMAGES: usize = 2;

/// The pause before the engine checks again whether a caller has room for an image.
const PATIENCE: Duration = Duration::from_millis(1);

/// Receives the progress of a job, on the thread of the engine.
pub type JobProgress = Arc<dyn Progress + Send + Sync>;

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
    /// The flag that cancels the running job.
    running: Mutex<Option<Arc<AtomicBool>>>,
    /// The message of the panic that ended the thread.
    panic: Mutex<Option<String>>,
}

impl State {
    /// The reason why no further event comes.
    fn ended(&self) -> Error {
        match &*locked(&self.panic) {
            Some(message) => Error::Op { op: "service", what: format!("the engine's thread panicked: {message}") },
            None => Error::Interrupted,
        }
    }
}

/// A job in the queue.
struct Task {
    job: Job,
    cancel: Arc<AtomicBool>,
    progress: JobProgress,
    events: SyncSender<Event>,
}

/// Ends the queue with the thread that serves it, so that nobody waits for what no longer comes.
struct Ended(Arc<FairQueue<Task>>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// A job that was submitted. Dropping it cancels the job.
pub struct Ticket {
    events: Receiver<Event>,
    cancel: Arc<AtomicBool>,
    state: Arc<State>,
}

impl Service {
    /// Starts the thread and waits until it has built the engine. `build` also returns what the caller needs to know about the engine.
    pub fn start<T: Send + 'static>(build: impl FnOnce() -> Result<(Engine, T)> + Send + 'static) -> Result<(Self, T)> {
        let queue = Arc::new(FairQueue::new());
        let tasks = Ended(queue.clone());
        let (ready, built) = sync_channel(1);
        let state = Arc::<State>::default();
        let own = state.clone();
        let work = move || {
            let served = catch_unwind(AssertUnwindSafe(|| match build() {
                Ok((engine, known)) => {
                    let _ = ready.send(Ok(known));
                    serve(engine, &tasks.0, &own);
                }
                Err(error) => drop(ready.send(Err(error))),
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
        let (events, receiver) = sync_channel(WAITING_IMAGES);
        let cancel = Arc::<AtomicBool>::default();
        // If nobody takes the task, it is dropped, and the ticket says why.
        self.queue.push(caller, seconds, Task { job, cancel: cancel.clone(), progress, events });
        Ticket { events: receiver, cancel, state: self.state.clone() }
    }

    /// How many jobs wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The predicted seconds that a job of this caller would wait for others, apart from the job that runs now.
    pub fn seconds_ahead(&self, caller: &str) -> f64 {
        self.queue.seconds_ahead(caller)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Relaxed);
        if let Some(cancel) = &*locked(&self.state.running) {
            cancel.store(true, Ordering::Relaxed);
        }
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            // The thread's panic was already caught.
            let _ = thread.join();
        }
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
        self.cancel.store(true, Ordering::Relaxed);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Runs jobs one after the other until there are no callers.
fn serve(mut engine: Engine, tasks: &FairQueue<Task>, state: &State) {
    let is_live = |task: &Task| !task.cancel.load(Ordering::Relaxed);
    while let Some(Task { job, cancel, progress, events }) = tasks.pop(is_live) {
        *locked(&state.running) = Some(cancel.clone());
        // Checked after the flag is published: a service that is dropped now either finds the flag or is noticed here.
        if state.closing.load(Ordering::Relaxed) {
            cancel.store(true, Ordering::Relaxed);
        }
        let check = || if cancel.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) };
        let mut work = || {
            check()?;
            engine.check_memory(&job)?;
            engine.set_cancel(Some(cancel.clone()));
            engine.generate(&job, &*progress, &mut |image| {
                check()?;
                deliver(&events, Event::Image(image), &check)
            })
        };
        let result = match catch_unwind(AssertUnwindSafe(&mut work)) {
            Ok(result) => result,
            Err(payload) => {
                // The message is stored before the channels close, which other callers notice. The engine's state is unknown, so it is
                // not used again.
                *locked(&state.panic) = Some(message(payload.as_ref()));
                let _ = events.send(Event::Done(Err(state.ended())));
                return;
            }
        };
        engine.set_cancel(None);
        *locked(&state.running) = None;
        let open = || if state.closing.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) };
        // A caller that is gone needs no answer.
        let _ = deliver(&events, Event::Done(result), &open);
    }
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
