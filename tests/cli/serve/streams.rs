//! Streams of events: their order, their fields, and the image at their end.

use super::server::{Server, plain, small};
use common::http::{Connection, Part, Request};
use common::sandbox::{Png, Sandbox};
use serde_json::{Value, json};
use std::fs;

/// The events of a request.
fn events(server: &Server, request: &Request) -> Vec<(String, Value)> {
    let mut connection = server.begin(request);
    let head = connection.head().unwrap();
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    let of = |name: &str| head.header(name).unwrap_or_default().to_owned();
    assert_eq!((of("cache-control"), of("x-accel-buffering"), of("x-kiln-seed")), ("no-store".into(), "no".into(), "7".into()));
    let events = rest(&mut connection);
    // The connection lives on.
    assert_eq!(connection.ask(&server.host(), &Request::get("/health")).status, 200);
    events
}

/// The events of a stream to its end.
fn rest(connection: &mut Connection) -> Vec<(String, Value)> {
    let events: Vec<_> = std::iter::from_fn(|| connection.event()).collect();
    for (name, data) in &events {
        assert_eq!(data["type"], **name);
    }
    events
}

fn file(event: &Value) -> Vec<u8> {
    kiln::base64::decode(event["b64_json"].as_str().unwrap().as_bytes()).unwrap()
}

fn generation(fields: &Value) -> Request {
    Request::json("/v1/images/generations", &small(fields))
}

#[test]
fn a_stream_ends_with_the_image() {
    let server = plain();
    let want = server.ask(&generation(&json!({"steps": 4}))).good();
    let only = events(server, &generation(&json!({"steps": 4, "stream": true, "quality": "low"})));
    assert_eq!(only.len(), 1);
    let (name, done) = &only[0];
    assert!(name == "image_generation.completed" && file(done) == want.image(0));
    assert_eq!((&done["seed"], &done["size"], &done["quality"]), (&json!(7), &json!("64x64"), &json!("low")));
    assert_eq!(
        (&done["output_format"], &done["background"], &done["usage"]),
        (&json!("png"), &json!("opaque"), &want.json()["usage"])
    );
    assert!(done["created_at"].is_u64() && done.get("index").is_none() && done.get("partial_image_index").is_none());
    // Several images are several events, in order.
    let two = events(server, &generation(&json!({"steps": 1, "stream": true, "n": 2})));
    let seeds: Vec<_> = two.iter().map(|(_, data)| (data["index"].as_u64().unwrap(), data["seed"].as_u64().unwrap())).collect();
    assert_eq!(seeds, [(0, 7), (1, 8)]);
    assert!(two.iter().all(|(name, _)| name == "image_generation.completed"));
}

/// The steps after which images of a stream were shown, after a check of their fields.
fn partial_steps(events: &[(String, Value)], name: &str, steps: u64) -> Vec<u64> {
    let partials: Vec<&Value> = events.iter().filter(|(other, _)| other == name).map(|(_, data)| data).collect();
    for (index, partial) in partials.iter().enumerate() {
        assert_eq!((&partial["partial_image_index"], &partial["steps"]), (&json!(index), &json!(steps)));
        assert_eq!(
            (&partial["size"], &partial["output_format"], &partial["quality"]),
            (&json!("64x64"), &json!("png"), &json!("auto"))
        );
        assert!(partial["created_at"].is_u64() && partial["background"] == "opaque" && partial.get("usage").is_none());
        let image = Png::decode(&file(partial));
        assert_eq!((image.width, image.height), (64, 64));
    }
    partials.iter().map(|partial| partial["step"].as_u64().unwrap()).collect()
}

#[test]
fn previews_and_progress_come_before_the_image() {
    let server = plain();
    let want = server.ask(&generation(&json!({"steps": 4}))).good().image(0);
    let fields = json!({"steps": 4, "stream": true, "partial_images": 2, "preview": "full", "progress": true});
    // A busy machine may lose previews: one that is late is left out.
    let mut seen = Vec::new();
    for _ in 0..5 {
        let events = events(server, &generation(&fields));
        let (last, earlier) = events.split_last().unwrap();
        assert!(last.0 == "image_generation.completed" && file(&last.1) == want, "previews change nothing");
        assert!(earlier.iter().all(|(name, _)| name == "kiln.progress" || name == "image_generation.partial_image"));
        let progress: Vec<&Value> = earlier.iter().filter(|(name, _)| name == "kiln.progress").map(|(_, data)| data).collect();
        let phases = ["queued", "encode", "denoise", "decode"];
        let ranks: Vec<usize> =
            progress.iter().map(|data| phases.iter().position(|phase| data["phase"] == *phase).expect("a phase")).collect();
        assert!(ranks.is_sorted() && ranks.contains(&2), "{progress:?}");
        for data in &progress {
            let is_queued = data["phase"] == "queued";
            assert!(!is_queued || data["position"].is_u64() && data["eta_ms"].is_u64(), "{data}");
            assert!(is_queued || data["done"].as_u64().unwrap() <= data["of"].as_u64().unwrap(), "{data}");
        }
        let denoised = progress.iter().filter(|data| data["phase"] == "denoise");
        let done: Vec<_> = denoised.map(|data| (data["done"].as_u64().unwrap(), data["of"].as_u64().unwrap())).collect();
        assert!(done.is_sorted() && done.iter().all(|(_, of)| *of == 4), "{done:?}");
        seen = partial_steps(&events, "image_generation.partial_image", 4);
        assert!(seen.iter().all(|step| [1, 3].contains(step)) && seen.is_sorted(), "{seen:?}");
        if seen.len() == 2 {
            break;
        }
    }
    assert_eq!(seen, [1, 3]);
    // Without `stream` there are no events to ask for.
    for name in ["partial_images", "progress"] {
        let value = if name == "progress" { json!(true) } else { json!(1) };
        let answer = server.ask(&generation(&json!({name: value})));
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some(name)));
    }
}

#[test]
fn edits_have_events_of_their_own() {
    let (server, sandbox) = (plain(), Sandbox::new());
    sandbox.write_png("a.png", 64, 64, |x, y| [x as u8, y as u8, 0]);
    let image = fs::read(sandbox.path("a.png")).unwrap();
    let parts = [Part::Text("prompt", ""), Part::Text("seed", "7"), Part::Text("steps", "2"), Part::File("image", &image)];
    let want = server.ask(&Request::form("/v1/images/edits", &parts)).good().image(0);
    let stream = [Part::Text("stream", "true"), Part::Text("partial_images", "1"), Part::Text("preview", "full")];
    let events = events(server, &Request::form("/v1/images/edits", &[&parts[..], &stream].concat()));
    let (last, earlier) = events.split_last().unwrap();
    assert!(last.0 == "image_edit.completed" && file(&last.1) == want);
    assert!(earlier.len() <= 1 && partial_steps(earlier, "image_edit.partial_image", 2).len() == earlier.len());
}

#[test]
fn a_stream_that_is_refused_is_no_stream() {
    let server = plain();
    let answer = server.ask(&generation(&json!({"stream": true, "partial_images": 4})));
    assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/json")));
    assert_eq!(answer.param().as_deref(), Some("partial_images"));
}
