//! The service: one engine for many jobs, on the CPU backend and on the CUDA backend with a stand-in for the driver.

use common::stand_in::StandIn;
use common::wrapped::{self, Wrapped};
use common::{cpu, short_model, small_job};
use kiln::error::{Error, Result};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::cuda::Cuda;
use kiln::internals::backend::{Backend, Op};
use kiln::internals::config::Variant;
use kiln::internals::pipeline::{Engine, GeneratedImage, Job, LoadOptions, Noise};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::Region;
use kiln::progress::{Phase, Progress, Silent};
use kiln::service::{Event, JobSource, Service, Ticket};
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::sleep;
use std::time::Duration;

const OPTIONS: LoadOptions = LoadOptions { references: true, ..LoadOptions::DEFAULT };

fn engine(backend: Box<dyn Backend>, variant: Variant) -> Result<Engine> {
    Engine::load(backend, short_model(variant), OPTIONS, &Silent)
}

fn service(make: impl FnOnce() -> Box<dyn Backend> + Send + 'static, variant: Variant) -> Service {
    Service::start(move || Ok((engine(make(), variant)?, ()))).unwrap().0
}

fn submit(service: &Service, job: &Job) -> Ticket {
    service.submit(job.clone(), Arc::new(Silent))
}

fn one(images: Result<Vec<GeneratedImage>>) -> Vec<u8> {
    let mut images = images.unwrap();
    assert_eq!(images.len(), 1);
    images.remove(0).image.pixels
}

fn cuda(stop: &Arc<AtomicBool>) -> Cuda {
    Cuda::new(StandIn::new(80 << 30), &|_| Ok(Cow::Borrowed(&[])), stop.clone()).unwrap()
}

/// A service whose engine caches encoded prompts and references in `bytes` bytes, and a counter of cache hits.
fn keeping(bytes: u64) -> (Service, Arc<AtomicUsize>) {
    let used = Arc::<AtomicUsize>::default();
    let counter = used.clone();
    let build = move || {
        let count = move |_, op: Op<'_>, _: &mut Cpu| {
            counter.fetch_add(usize::from(matches!(op, Op::Copy { x, .. } if x.region == Region::Cache)), Ordering::Relaxed);
            Ok(())
        };
        let mut engine = engine(Box::new(wrapped::after_op(cpu(), count)), Variant::Kv)?;
        engine.cache_results(bytes, &small_job())?;
        Ok((engine, ()))
    };
    (Service::start(build).unwrap().0, used)
}

/// Cached tables, dry runs, encoded prompts and references never change an image: it equals the image of an engine that has made no
/// other.
#[test]
fn an_engine_makes_the_images_of_a_new_one() {
    let modes = common::modes::modes();
    let edit = modes.cases.iter().find(|case| case.kv).unwrap().job(&modes.images);
    let small = small_job();
    let edit = Job { size: small.size, steps: 1, record: false, ..edit };
    let jobs = [
        small.clone(),
        Job { steps: 2, ..small.clone() },
        Job { size: Pixels::new(96, 64).unwrap(), ..small.clone() },
        edit.clone(),
        Job { prompt: "a longer prompt than before".into(), ..small.clone() },
        Job { references: edit.references[..1].to_vec(), ..edit.clone() },
        Job { seeds: vec![8], ..small.clone() },
    ];
    let (service, used) = keeping(64 << 20);
    // Twice, so that the second pass finds everything in the cache; it runs in another order.
    let images: Vec<Vec<u8>> = jobs.iter().map(|job| one(submit(&service, job).wait())).collect();
    // One prompt was used four times, another prompt and a reference twice each.
    assert_eq!(used.swap(0, Ordering::Relaxed), 3 + 1 + 1);
    let again: Vec<Vec<u8>> = jobs.iter().rev().map(|job| one(submit(&service, job).wait())).collect();
    let references = 2 + 1;
    let config = short_model(Variant::Kv).configs.transformer;
    let keys_and_values = 2 * 2 * (config.double_blocks + config.single_blocks);
    assert_eq!(used.load(Ordering::Relaxed), jobs.len() + references + keys_and_values);
    // A job that fails leaves nothing.
    let not_finite = Job { noise: Noise::Given(vec![f32::NAN; 16 * 128]), ..small.clone() };
    assert!(submit(&service, &not_finite).wait().is_err());
    used.store(0, Ordering::Relaxed);
    one(submit(&service, &small).wait());
    assert_eq!(used.load(Ordering::Relaxed), 0);
    // In a small cache, entries replace each other.
    let (little, used) = keeping(200 << 10);
    for (job, image) in jobs.iter().zip(&images).chain(jobs.iter().zip(&images)) {
        assert!(one(submit(&little, job).wait()) == *image);
    }
    let used = used.load(Ordering::Relaxed);
    assert!((1..2 * jobs.len()).contains(&used), "{used}");
    for ((job, image), again) in jobs.iter().zip(&images).zip(again.iter().rev()) {
        let alone = common::run(&mut engine(Box::new(cpu()), Variant::Kv).unwrap(), job).unwrap();
        assert!(alone.image.pixels == *image && image == again, "{} {:?} {}", job.prompt, job.size, job.steps);
    }
    // Two seeds in one job give the same images. The second image's noise is drawn while the first is generated.
    let both = submit(&service, &Job { seeds: vec![5, 8], ..small }).wait().unwrap();
    assert!(both[0].image.pixels == images[0] && both[1].image.pixels == images[6] && images[0] != images[6]);
}

/// A CPU backend that stops after an op, reports it, and waits until it may continue.
fn halting(at: usize, reached: Sender<()>, go_on: Receiver<()>) -> Wrapped<Cpu> {
    wrapped::after_op(cpu(), move |number, _: Op<'_>, _: &mut Cpu| {
        if number == at {
            reached.send(()).unwrap();
            go_on.recv().unwrap();
        }
        Ok(())
    })
}

#[test]
fn a_canceled_job_ends_alone() {
    let ((reached, at_op), (go, go_on)) = (channel(), channel());
    let service = service(move || Box::new(halting(20, reached, go_on)), Variant::Distilled);
    let job = small_job();
    let [running, waiting, dropped, last] = [(); 4].map(|()| submit(&service, &job));
    at_op.recv().unwrap();
    running.cancel();
    waiting.cancel();
    drop(dropped);
    go.send(()).unwrap();
    for ticket in [running, waiting] {
        assert!(matches!(ticket.next(), Event::Done(Err(Error::Interrupted))));
    }
    assert_eq!(
        one(last.wait()),
        common::run(&mut engine(Box::new(cpu()), Variant::Distilled).unwrap(), &job).unwrap().image.pixels
    );
}

#[test]
fn a_failed_job_ends_alone() {
    let service = service(|| Box::new(cpu()), Variant::Distilled);
    let job = small_job();
    let wrong = Job { noise: Noise::Given(vec![0.0; 3]), ..job.clone() };
    let not_finite = Job { noise: Noise::Given(vec![f32::NAN; 16 * 128]), ..job.clone() };
    let tickets = [&wrong, &not_finite, &job].map(|job| submit(&service, job));
    let [wrong, not_finite, good] = tickets.map(Ticket::wait);
    assert!(matches!(wrong, Err(Error::Op { op: "write", .. })));
    assert!(matches!(not_finite, Err(Error::NotFinite { .. })));
    one(good);
}

/// On the CUDA backend a job's flag and the process's flag end jobs before the next op is launched.
#[test]
fn jobs_on_a_gpu_end_when_asked_to() {
    let stop = Arc::<AtomicBool>::default();
    let own = stop.clone();
    let service = service(move || Box::new(cuda(&own)), Variant::Distilled);
    let job = Job { steps: 3, ..small_job() };
    one(submit(&service, &job).wait());
    let canceled = Job { seeds: (0..10_000).collect(), ..job.clone() };
    let ticket = submit(&service, &canceled);
    assert!(matches!(ticket.next(), Event::Image(_)));
    ticket.cancel();
    assert!(matches!(ticket.wait(), Err(Error::Interrupted)));
    one(submit(&service, &job).wait());
    stop.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        assert!(matches!(submit(&service, &job).wait(), Err(Error::Interrupted)));
    }
    stop.store(false, Ordering::Relaxed);
    one(submit(&service, &job).wait());
}

#[test]
fn dropping_the_service_ends_its_thread() {
    let (reached, at_op) = channel();
    // The first job never gets beyond one op, which it repeats until the job is canceled.
    let repeating = move |number, op: Op<'_>, cpu: &mut Cpu| {
        if number == 5 {
            reached.send(()).unwrap();
            while !matches!(cpu.run(op), Err(Error::Interrupted)) {}
        }
        Ok(())
    };
    let service = service(move || Box::new(wrapped::after_op(cpu(), repeating)), Variant::Distilled);
    let tickets = [(); 3].map(|()| submit(&service, &small_job()));
    at_op.recv().unwrap();
    // Dropping the service cancels all jobs and waits for its thread.
    drop(service);
    assert!(tickets.map(Ticket::wait).iter().all(|result| matches!(result, Err(Error::Interrupted))));
}

#[test]
fn a_panic_is_an_error_for_everyone() {
    let service = service(
        || {
            let mut jobs = 0;
            Box::new(wrapped::before_write(cpu(), move |_, values| {
                // A write of this length is the noise of the second job.
                jobs += usize::from(values.len() == 16 * 128);
                assert!(jobs < 2, "planted");
            }))
        },
        Variant::Distilled,
    );
    let [good, bad, waiting] = [(); 3].map(|()| submit(&service, &small_job()));
    one(good.wait());
    for result in [bad.wait(), waiting.wait(), submit(&service, &small_job()).wait()] {
        let error = result.unwrap_err();
        assert!(error.exit_code() == 70 && error.to_string().contains("planted"), "{error}");
    }
}

/// A service that can build its engine again survives a panic: only the job that panicked fails, and those that wait are done.
#[test]
fn a_service_that_can_be_renewed_survives_panics() {
    let built = Arc::<AtomicUsize>::default();
    let count = built.clone();
    let build = move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok((engine(Box::new(cpu()), Variant::Distilled)?, ()))
    };
    let service = Service::start_renewable(build).unwrap().0;
    let job = small_job();
    let good = one(submit(&service, &job).wait());
    let (sender, receiver) = channel();
    let run = |make: JobSource| {
        let sender = sender.clone();
        let events = move |event: Event| {
            sender.send(event).unwrap();
            Ok(())
        };
        service.submit_to("", 1.0, make, Arc::new(Silent), Box::new(events))
    };
    for round in 1..4 {
        let bad = run(Box::new(|| panic!("planted")));
        let waiting = submit(&service, &job);
        let Event::Done(Err(error)) = receiver.recv().unwrap() else { panic!("an image of a job that panics") };
        assert!(error.exit_code() == 70 && error.to_string().contains("planted"), "{error}");
        assert!(one(waiting.wait()) == good);
        drop(bad);
        assert_eq!(built.load(Ordering::Relaxed), 1 + round);
    }
    // A job that cannot be made fails alone, and needs no new engine.
    let missing = run(Box::new(|| Err(Error::Interrupted)));
    assert!(matches!(receiver.recv().unwrap(), Event::Done(Err(Error::Interrupted))));
    drop(missing);
    assert_eq!((one(submit(&service, &job).wait()) == good, built.load(Ordering::Relaxed)), (true, 4));
}

/// Notes when it is dropped.
struct Dropped(Sender<()>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// A canceled job leaves the queue at once, with all that it holds, and a service that drains keeps what ends in time.
#[test]
fn jobs_leave_the_queue() {
    let ((reached, at_op), (go, go_on)) = (channel(), channel());
    let service = service(move || Box::new(halting(20, reached, go_on)), Variant::Distilled);
    let job = small_job();
    let running = service.submit_for("a", 5.0, job.clone(), Arc::new(Silent));
    at_op.recv().unwrap();
    let (dropped, gone) = channel();
    let own = Dropped(dropped);
    let events = move |_: Event| {
        let _whole = &own;
        Ok(())
    };
    let make = job.clone();
    let handle = service.submit_to("b", 2.0, Box::new(move || Ok(make)), Arc::new(Silent), Box::new(events));
    let [kept, late] = [1.0, 30.0].map(|seconds| service.submit_for("b", seconds, job.clone(), Arc::new(Silent)));
    assert_eq!((service.waiting(), service.waiting_of("b"), service.seconds_waiting()), (3, 3, 33.0));
    assert!(gone.try_recv().is_err());
    drop(handle);
    gone.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!((service.waiting(), service.seconds_waiting()), (2, 31.0));
    let left = service.seconds_running();
    assert!(left > 0.0 && left <= 5.0, "{left}");
    service.drain(25.0);
    assert_eq!(service.waiting(), 1);
    assert!(matches!(late.next(), Event::Done(Err(Error::Interrupted))));
    // A closed queue takes nothing.
    assert!(matches!(submit(&service, &job).wait(), Err(Error::Interrupted)));
    go.send(()).unwrap();
    for ticket in [running, kept] {
        one(ticket.wait());
    }
    assert_eq!(service.seconds_running(), 0.0);
}

#[test]
fn errors_of_building_are_returned() {
    let built = Service::start::<()>(|| Err(Error::Interrupted));
    assert!(matches!(built.map(drop), Err(Error::Interrupted)));
    let built = Service::start::<()>(|| panic!("planted"));
    assert!(built.map(drop).unwrap_err().to_string().contains("planted"));
}

/// Notes when its job begins to denoise. The first one waits until all jobs are queued.
struct Noted {
    name: &'static str,
    gate: Option<Arc<Barrier>>,
    order: Arc<Mutex<Vec<&'static str>>>,
}

impl Progress for Noted {
    fn begin(&self, phase: Phase, _total: u64) {
        if phase == Phase::Denoise {
            self.order.lock().unwrap().push(self.name);
            if let Some(gate) = &self.gate {
                gate.wait();
            }
        }
    }
}

/// A caller with many jobs does not keep the others waiting, and a job that is canceled in the queue costs nothing.
#[test]
fn callers_have_fair_shares() {
    let service = service(|| Box::new(cpu()), Variant::Distilled);
    let (gate, order) = (Arc::new(Barrier::new(2)), Arc::new(Mutex::new(Vec::new())));
    let submit = |caller: &str, seconds: f64, name: &'static str, gate: Option<Arc<Barrier>>| {
        service.submit_for(caller, seconds, small_job(), Arc::new(Noted { name, gate, order: order.clone() }))
    };
    let first = submit("a", 1.0, "a1", Some(gate.clone()));
    while order.lock().unwrap().is_empty() {
        sleep(Duration::from_millis(1));
    }
    let rest =
        [submit("a", 1.0, "a2", None), submit("a", 1.0, "a3", None), submit("b", 2.0, "b1", None), submit("b", 1.0, "b2", None)];
    let gone = submit("c", 50.0, "c1", None);
    let waiting = || (service.waiting(), service.seconds_ahead("new"));
    let before = waiting();
    gone.cancel();
    let after = waiting();
    gate.wait();
    // b1 comes first. Its 2 s make a2 and a3 due, which were to begin after 0 and 1 s, and c1, which was to begin after 2.
    assert_eq!((before, after), ((5, 55.0), (4, 4.0)));
    for ticket in std::iter::once(first).chain(rest) {
        one(ticket.wait());
    }
    assert!(matches!(gone.wait(), Err(Error::Interrupted)));
    assert_eq!(*order.lock().unwrap(), ["a1", "b1", "a2", "a3", "b2"]);
    assert_eq!(service.waiting(), 0);
}
