//! Traces: GPU kernels on a stand-in for the driver, and the files that the real program writes. A process has one recorder, so
//! tests that use it run alone.

use common::alone::alone;
use common::sandbox::{QUICK, Sandbox, send};
use common::stand_in::{LAUNCH, StandIn};
use common::{opened, small_job, tiny_weights};
use kiln::error::Result;
use kiln::internals::backend::cuda::Cuda;
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, OpenModel};
use kiln::internals::tensor::DType;
use kiln::internals::tiny::{self, TinyModel};
use kiln::progress::Silent;
use kiln::trace::{self, Finished, MAX_EVENTS, Trace};
use serde_json::Value;
use std::borrow::Cow;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

/// A parsed trace.
struct Parsed {
    events: Vec<Value>,
    about: Value,
}

impl Parsed {
    fn of(bytes: &[u8]) -> Self {
        let mut json: Value = serde_json::from_slice(bytes).unwrap();
        assert_eq!(json["displayTimeUnit"], "ms");
        let Value::Array(events) = json["traceEvents"].take() else { panic!("{json}") };
        Self { events, about: json["otherData"].take() }
    }

    fn read(path: &Path) -> Self {
        Self::of(&fs::read(path).unwrap())
    }

    /// The events with a duration.
    fn spans(&self) -> impl Iterator<Item = &Value> {
        self.events.iter().filter(|event| event["ph"] == "X")
    }

    fn named(&self, name: &str) -> Vec<&Value> {
        self.spans().filter(|event| event["name"] == name).collect()
    }

    /// The names of processes or threads, with their numbers.
    fn metadata(&self, kind: &str) -> Vec<(u64, u64, String)> {
        let events = self.events.iter().filter(|event| event["ph"] == "M" && event["name"] == kind);
        let number = |value: &Value| value.as_u64().unwrap();
        events.map(|e| (number(&e["pid"]), number(&e["tid"]), e["args"]["name"].as_str().unwrap().into())).collect()
    }

    /// Checks that every thread has a name, and that its spans are nested or disjoint.
    fn check_nesting(&self) {
        let threads = self.metadata("thread_name");
        assert!(!threads.is_empty());
        let mut seen = 0;
        for (pid, tid, name) in &threads {
            let mut open: Vec<(f64, f64)> = Vec::new();
            for event in self.spans().filter(|event| event["pid"] == *pid && event["tid"] == *tid) {
                let (start, end) = interval(event);
                open.retain(|(_, outer)| start < *outer - 1e-6);
                assert!(open.last().is_none_or(|(from, to)| *from <= start && end <= *to + 1e-6), "{name}: {event} in {open:?}");
                open.push((start, end));
                seen += 1;
            }
        }
        assert_eq!(seen, self.spans().count(), "a span of a thread without a name");
    }
}

fn interval(event: &Value) -> (f64, f64) {
    let start = event["ts"].as_f64().unwrap();
    (start, start + event["dur"].as_f64().unwrap())
}

#[test]
fn spans_of_all_threads_are_recorded() {
    if !alone(spans_of_all_threads_are_recorded) {
        return;
    }
    let early = trace::span("before the trace");
    let trace = Trace::start().unwrap();
    assert!(Trace::start().is_none(), "one at a time");
    {
        let _outer = trace::span("outer");
        let _inner = trace::span_of("inner", || "a \"quoted\"\n\u{1} name".into());
        std::thread::Builder::new().name("other".into()).spawn(|| drop(trace::span("beside"))).unwrap().join().unwrap();
    }
    drop(early);
    let still_open = trace::span("open at the end");
    let Finished { bytes, events, dropped, untimed } = trace.finish("a test");
    drop(still_open);
    assert_eq!((events, dropped, untimed, trace::is_on()), (3, 0, 0, false));
    let parsed = Parsed::of(&bytes);
    parsed.check_nesting();
    assert_eq!(parsed.metadata("process_name"), [(1, 0, "a test".into())]);
    assert!(parsed.metadata("thread_name").iter().any(|(_, _, name)| name == "other"));
    let names: Vec<&str> = parsed.spans().map(|event| event["name"].as_str().unwrap()).collect();
    assert!(names == ["beside", "outer", "inner"] || names == ["outer", "inner", "beside"], "{names:?}");
    assert_eq!(parsed.named("inner")[0]["args"]["what"], "a \"quoted\"\n\u{1} name");
    // The next trace begins empty.
    assert_eq!(Trace::start().unwrap().finish("a test").events, 0);
}

#[test]
fn too_many_events_are_counted() {
    if !alone(too_many_events_are_counted) {
        return;
    }
    let trace = Trace::start().unwrap();
    (0..MAX_EVENTS + 3).for_each(|_| drop(trace::span("a")));
    let Finished { bytes, events, dropped, .. } = trace.finish("a test");
    assert_eq!((events, dropped), (MAX_EVENTS, 3));
    assert!(String::from_utf8_lossy(&bytes[bytes.len() - 1000..]).contains("\"dropped\":3"));
}

fn open() -> OpenModel {
    static MODEL: LazyLock<TinyModel> = LazyLock::new(|| tiny::model(Layout::Diffusers, DType::Bf16).unwrap());
    opened(tiny_weights(&MODEL), Variant::Distilled, ModelDefaults::klein())
}

/// Loads the tiny model and generates an image in three steps.
fn generate(driver: &Rc<StandIn>) -> Result<()> {
    let cuda = Cuda::new(driver.clone(), &|_| Ok(Cow::Borrowed(&[])), Arc::default())?;
    let mut engine = Engine::load(Box::new(cuda), open(), LoadOptions::DEFAULT, &Silent)?;
    engine.generate(&Job { steps: 3, ..small_job() }, &Silent, &mut |_| Ok(()))
}

#[test]
fn kernels_have_a_track_of_their_own() {
    if !alone(kernels_have_a_track_of_their_own) {
        return;
    }
    // Without a trace, steps are replayed and kernels overlap.
    let driver = StandIn::new(80 << 30);
    generate(&driver).unwrap();
    assert!(driver.replays.get() == 2 && driver.overlapping.get() > 0);

    let driver = StandIn::new(80 << 30);
    let trace = Trace::start().unwrap();
    generate(&driver).unwrap();
    let Finished { bytes, untimed, .. } = trace.finish("a test");
    assert_eq!((driver.replays.get(), driver.overlapping.get(), untimed), (0, 0, 0));
    let parsed = Parsed::of(&bytes);
    parsed.check_nesting();
    let processes = parsed.metadata("process_name");
    assert_eq!(processes[1..], [(2, 0, "GPU 0 (Stand-in)".to_owned())]);
    assert!(parsed.metadata("thread_name").iter().any(|(pid, _, name)| (*pid, name.as_str()) == (2, "kernels")));
    let kernels: Vec<&Value> = parsed.spans().filter(|event| event["pid"] == 2).collect();
    assert_eq!(kernels.len(), driver.launches.get());
    let mut last = 0.0;
    for kernel in &kernels {
        let (start, end) = interval(kernel);
        assert!(kernel["name"].as_str().unwrap().starts_with("kl_"), "{kernel}");
        assert!(start >= last && (end - start - LAUNCH.as_secs_f64() * 1e6).abs() < 1e-6, "{kernel} after {last}");
        assert_eq!(kernel["args"]["grid"].as_array().unwrap().len(), 3);
        last = end - 1e-6;
    }
    for (name, count) in [("step", 3), ("denoising", 1), ("loading weights", 2), ("dry run", 1), ("decoding", 1)] {
        assert_eq!(parsed.named(name).len(), count, "{name}");
    }
    for name in [
        "open kernels",
        "find kernels",
        "load module",
        "upload the transformer",
        "upload",
        "write to the GPU",
        "wait and read back",
    ] {
        assert!(!parsed.named(name).is_empty(), "{name}");
    }
    assert!(parsed.about["note"].as_str().unwrap().contains("CUDA graphs"));
}

/// Whatever call fails, there is a trace, and no event leaks. The stand-in checks that when it is dropped.
#[test]
fn a_failed_run_has_a_trace() {
    if !alone(a_failed_run_has_a_trace) {
        return;
    }
    let counted = StandIn::new(80 << 30);
    let trace = Trace::start().unwrap();
    generate(&counted).unwrap();
    drop(trace);
    let calls = counted.calls.get();
    for n in (0..calls).step_by(calls / 20) {
        let driver = StandIn::new(80 << 30);
        let trace = Trace::start().unwrap();
        driver.fail_after(n);
        let ended = generate(&driver);
        let Finished { bytes, untimed, .. } = trace.finish("a test");
        let parsed = Parsed::of(&bytes);
        let kernels = parsed.spans().filter(|event| event["pid"] == 2).count() as u64;
        // A refused launch does not count as a launch, and a refused event does not make a run fail.
        let refused = u64::from(driver.failed.get() == "launch");
        assert_eq!(kernels + untimed + refused, driver.launches.get() as u64, "call {n} ({})", driver.failed.get());
        let quiet = ["event", "record_event", "elapsed", "synchronize", "fill"].contains(&driver.failed.get());
        assert!(ended.is_err() || quiet, "call {n} ({})", driver.failed.get());
    }
}

#[test]
fn the_program_writes_what_each_thread_did() {
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let model = ["--model", "model", "--seed", "3"];
    let run = |flags: &[&str]| sandbox.run(["x"].iter().chain(&model).chain(&QUICK).chain(flags));
    run(&["-o", "a.png"]).good();
    let traced = run(&["-o", "b.png", "--trace", "t.json"]).good();
    assert_eq!(traced.text(), "b.png\n");
    let parsed = Parsed::read(&sandbox.path("t.json"));
    let said = format!("trace: t.json, {} events\n", parsed.spans().count());
    assert!(traced.stderr.ends_with(&said), "{}", traced.stderr);
    assert_eq!(fs::read(sandbox.path("a.png")).unwrap(), fs::read(sandbox.path("b.png")).unwrap());
    parsed.check_nesting();
    assert_eq!(parsed.metadata("process_name"), [(1, 0, "kiln generate".into())]);
    assert!(parsed.metadata("thread_name").iter().any(|(_, _, name)| name == "main"));
    for (name, least) in [
        ("read the request", 1),
        ("open the model", 1),
        ("open part", 3),
        ("open file", 3),
        ("parse header", 3),
        ("read the tokenizer", 1),
        ("check tensors", 1),
        ("check memory", 1),
        ("tokenize", 1),
        ("dry run", 1),
        ("upload the text encoder", 1),
        ("upload the transformer", 1),
        ("upload the VAE", 1),
        ("encoding text", 1),
        ("RoPE table", 1),
        ("draw noise", 1),
        ("denoising", 1),
        ("step", 1),
        ("attention", 1),
        ("decoding", 1),
        ("encode the image file", 1),
        ("write file", 1),
    ] {
        assert!(parsed.named(name).len() >= least, "{name}");
    }
    let [step] = parsed.named("step")[..] else { panic!("one step") };
    let ((from, to), (start, end)) = (interval(parsed.named("denoising")[0]), interval(step));
    assert!(from <= start && end <= to && end > start);

    // An existing file is not replaced. kiln finds it before anything runs.
    let before = fs::read(sandbox.path("t.json")).unwrap();
    let refused = run(&["-o", "c.png", "--trace", "t.json"]);
    assert!(refused.code == Some(5) && refused.stderr.contains("t.json"), "{}", refused.stderr);
    assert_eq!(fs::read(sandbox.path("t.json")).unwrap(), before);
    run(&["-o", "b.png", "--trace", "t.json", "--force"]).good();
    assert_ne!(fs::read(sandbox.path("t.json")).unwrap(), before);
    for (flags, code, message) in [
        (["-o", "d.png", "--trace", "d.png"], 2, "the image and --trace would be the same file"),
        (["-o", "d.png", "--trace", "-"], 2, "--trace writes a file"),
        (["-o", "d.png", "--trace", "none/t.json"], 5, "there is no such folder"),
        // A mistake on the command line leaves no file behind.
        (["--steps=0", "-q", "--trace", "d.json"], 2, ""),
        (["--width=65", "-q", "--trace", "d.json"], 2, ""),
    ] {
        let refused = sandbox.run(["x"].iter().chain(&flags));
        assert!(refused.code == Some(code) && refused.stderr.contains(message), "{flags:?}: {}", refused.stderr);
    }
    assert_eq!(sandbox.names(), ["a.png", "b.png", "model", "t.json"]);
}

#[test]
fn a_failed_or_interrupted_run_writes_its_trace() {
    use std::io::{BufRead, BufReader};
    let sandbox = Sandbox::new();
    sandbox.tiny("model", &[]);
    let vae = sandbox.path("model/vae/diffusion_pytorch_model.safetensors");
    let bytes = fs::read(&vae).unwrap();
    fs::write(&vae, &bytes[..bytes.len() - 1]).unwrap();
    // What happened before the model was opened.
    let run = sandbox.run(["x", "--model", "none", "--trace", "early.json"]);
    assert!(run.code == Some(3) && run.stderr.contains("trace: early.json, "), "{}", run.stderr);
    assert!(Parsed::read(&sandbox.path("early.json")).named("read the request").len() == 1);
    let run = sandbox.run(["x", "--model", "model", "--trace", "failed.json"]);
    assert!(run.code == Some(3) && run.stderr.contains("trace: failed.json, "), "{}", run.stderr);
    let parsed = Parsed::read(&sandbox.path("failed.json"));
    parsed.check_nesting();
    assert!(parsed.named("open file").len() >= 3 && parsed.named("denoising").is_empty());

    let flags = ["bench", "--runs", "1000", "--trace", "stopped.json"];
    let mut child = sandbox.command(flags.iter().chain(&QUICK)).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(stderr.any(|line| line.unwrap().starts_with("warm image 1 of 1000")));
    send("-INT", &child);
    let rest: Vec<String> = stderr.map(|line| line.unwrap()).collect();
    assert_eq!(rest.last().unwrap(), "error: interrupted");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let parsed = Parsed::read(&sandbox.path("stopped.json"));
    parsed.check_nesting();
    assert!(parsed.named("denoising").len() >= 2);
    assert_eq!(parsed.metadata("process_name"), [(1, 0, "kiln bench".into())]);
}

#[test]
fn what_cannot_be_traced_is_refused() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("there.json"), b"").unwrap();
    for (line, code, message) in [
        ("bench --kernels --trace t.json", 2, "cannot be used with"),
        ("bench --trace there.json", 5, "give another name"),
        ("bench --trace t.json --json=t.json", 2, "--json and --trace would be the same file"),
    ] {
        let run = sandbox.run(line.split(' '));
        assert_eq!((run.code, run.text()), (Some(code), ""), "{line}: {}", run.stderr);
        assert!(run.stderr.contains(message) && !run.stderr.contains("--force"), "{line}: {}", run.stderr);
    }
    assert_eq!(sandbox.names(), ["there.json"]);
}
