//! Decides whether a request is taken, and queues its images. A request that is taken is never dropped for a later one.

use super::body::{Digest, Held};
use super::handler::Refusal;
use super::limits::{IMAGE_SECONDS, WAITING_SECONDS};
use super::plan::Plan;
use super::server::{Phase, Running, Server};
use super::work::{Watch, Work};
use kiln::api::ApiError;
use kiln::error::Error;
use kiln::service::{Event, Handle, Service};
use std::sync::{Arc, Weak};

/// What waits already, and what a request would add.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Images and predicted seconds that wait, of all clients.
    waiting: (usize, f64),
    /// Images of this client that wait.
    own: usize,
    /// Images of the request, and predicted seconds of each.
    images: (usize, f64),
    /// Predicted seconds until the running image ends.
    running: f64,
    /// The most images that may wait.
    most: usize,
}

/// Refuses a request that would have to wait too long.
fn check(load: Load) -> Result<(), Refusal> {
    let Load { waiting: (waiting, seconds), own, images: (images, each), running, most } = load;
    if each > IMAGE_SECONDS {
        let message = format!(
            "this image is predicted to take {each:.0} s, and the limit is {IMAGE_SECONDS:.0}; use fewer steps or a smaller image"
        );
        return Err(ApiError { status: 400, code: "too_expensive", param: None, message }.into());
    }
    // Whoever comes to an empty queue is served, however many images that takes.
    if waiting == 0 {
        return Ok(());
    }
    let refused = |code, message: String, wait: f64| {
        let wait = Some(wait.ceil().clamp(1.0, 60.0) as u64);
        Err(Refusal { wait, ..ApiError { status: 429, code, param: None, message }.into() })
    };
    let mean = if waiting > 0 { seconds / waiting as f64 } else { each };
    if waiting + images > most {
        let excess = (waiting + images - most) as f64;
        return refused("queue_full", format!("{waiting} of {most} places in the queue are taken"), running + excess * mean);
    }
    let total = seconds + each * images as f64;
    if total > WAITING_SECONDS {
        let message = format!("the queue is predicted to take {seconds:.0} s, and the limit is {WAITING_SECONDS:.0}");
        return refused("queue_full", message, running + total - WAITING_SECONDS);
    }
    if own > 0 && own + images > most.div_ceil(2) {
        let message = format!("{own} of your images wait, which is this client's share; let some finish first");
        return refused("client_limit", message, running + mean);
    }
    Ok(())
}

/// Queues the images of a request. `share` is the client's key of fair shares. With the key `repeat`, the request may come again.
pub fn admit(
    server: &Arc<Server>,
    running: &Running,
    share: &str,
    plan: Plan,
    uploads: Held,
    repeat: Option<Digest>,
) -> Result<Arc<Work>, Refusal> {
    // One at a time, so that two requests do not take the same place.
    let _turn = server.admitting();
    let Running { service, model, encoder, .. } = running;
    server.check_open()?;
    let load = Load {
        waiting: (service.waiting(), service.seconds_waiting()),
        own: service.waiting_of(share),
        images: (plan.seeds.len(), plan.seconds),
        running: service.seconds_running(),
        most: server.config.max_waiting,
    };
    check(load)?;
    let predicted = service.seconds_ahead(share) + load.running;
    let position = service.jobs_ahead(share) + usize::from(load.running > 0.0);
    let work =
        Work::new(plan, (predicted, position), server.metrics.clone(), uploads, repeat.map(|key| (server.retries.clone(), key)));
    let jobs = work.plan.seeds.iter().enumerate().map(|(index, &seed)| {
        let watch = Watch::new(&work, index, encoder.clone(), model.rates.clone());
        submit(server, service, share, &work.plan, (seed, watch))
    });
    let jobs: Vec<Handle> = jobs.collect();
    work.attach(jobs);
    Ok(work)
}

/// Tells a watch how its job ends. A job that the service drops ends as well.
struct Ending {
    server: Weak<Server>,
    watch: Arc<Watch>,
    has_ended: bool,
}

impl Ending {
    fn end(&mut self, error: Option<ApiError>) {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.watch.end(error);
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let Some(server) = self.server.upgrade() else { return self.end(Some(error_of(&Error::Interrupted))) };
        // Canceled by its client, the job has nobody to tell. Otherwise the engine is gone.
        if self.watch.is_awaited()
            && server.phase() == Phase::Ready
            && let Some(running) = server.running()
        {
            server.fail(running.service.ended());
        }
        let error = server.check_open().err();
        self.end(Some(error.unwrap_or_else(|| error_of(&Error::Interrupted))));
    }
}

/// Queues an image with this seed.
fn submit(server: &Arc<Server>, service: &Service, share: &str, plan: &Plan, (seed, watch): (u64, Arc<Watch>)) -> Handle {
    let (settings, own, progress) = (plan.settings.clone(), watch.clone(), watch.clone());
    let job = move || {
        own.start();
        settings.job(seed)
    };
    let mut ending = Ending { server: Arc::downgrade(server), watch, has_ended: false };
    let events = move |event: Event| match event {
        Event::Image(image) => ending.watch.image(image),
        Event::Done(Ok(())) => {
            ending.end(None);
            Ok(())
        }
        Event::Done(Err(error)) => {
            ending.end(Some(error_of(&error)));
            let server = ending.server.upgrade();
            if let Some(server) = &server
                && !matches!(error, Error::Interrupted)
            {
                // What happened inside is for the log.
                server.log.write("failure", &[("error", error.to_string())]);
            }
            // A device that has failed makes no image any more, and what it makes cannot be trusted.
            if let (Error::Device { .. }, Some(server)) = (&error, server) {
                server.fail(error);
            }
            Ok(())
        }
    };
    service.submit_to(share, plan.seconds, Box::new(job), progress, Box::new(events))
}

/// The error of a job, for its client. The job fitted when it was admitted, so memory that is short now will be there again.
pub fn error_of(error: &Error) -> ApiError {
    let of = ApiError::of(error, None);
    match error {
        Error::DeviceMemory { .. } | Error::HostMemory { .. } => {
            let message = "memory is short because of other programs; try again".into();
            ApiError { status: 503, code: "memory_short", message, ..of }
        }
        Error::Interrupted => ApiError { message: "the server is ending".into(), ..of },
        Error::Op { .. } => {
            ApiError { status: 500, code: "internal", message: "this image failed; the server goes on".into(), ..of }
        }
        _ => of,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load { waiting: (4, 4.0), own: 2, images: (1, 1.0), running: 0.5, most: 8 };

    fn verdict(load: Load) -> Result<(), (&'static str, Option<u64>)> {
        check(load).map_err(|refusal| (refusal.error.code, refusal.wait))
    }

    #[test]
    fn requests_beyond_a_limit_are_refused_with_the_time_to_wait() {
        assert_eq!(verdict(LOAD), Ok(()));
        assert_eq!(verdict(Load { images: (4, 1.0), own: 0, ..LOAD }), Ok(()));
        assert_eq!(verdict(Load { images: (5, 1.0), own: 0, ..LOAD }), Err(("queue_full", Some(2))));
        assert_eq!(verdict(Load { waiting: (4, 119.5), ..LOAD }), Err(("queue_full", Some(1))));
        assert_eq!(verdict(Load { waiting: (4, 119.0), ..LOAD }), Ok(()));
        assert_eq!(verdict(Load { waiting: (4, 100.0), images: (2, 100.0), ..LOAD }), Err(("queue_full", Some(60))));
        assert_eq!(verdict(Load { own: 4, ..LOAD }), Err(("client_limit", Some(2))));
        assert_eq!(verdict(Load { images: (1, 300.5), ..LOAD }), Err(("too_expensive", None)));
        // An empty queue takes what no queue has room for.
        assert_eq!(verdict(Load { waiting: (0, 0.0), own: 0, images: (10, 300.0), ..LOAD }), Ok(()));
    }

    #[test]
    fn errors_of_jobs_name_no_device_memory() {
        let short = Error::HostMemory { need: 9, have: 1, ways: Vec::new() };
        assert_eq!((error_of(&short).status, error_of(&short).code), (503, "memory_short"));
        assert_eq!(error_of(&Error::Interrupted).code, "shutting_down");
    }
}
