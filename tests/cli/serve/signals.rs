//! How a server ends: what it has accepted is made, everyone gets an answer, and the exit code names the signal.

use super::server::{Server, serve, small, without_socket, write_model};
use common::http::Request;
use common::moments::moment;
use common::random::long;
use common::sandbox::Sandbox;
use serde_json::json;
use std::net::TcpStream;
use std::time::{Duration, Instant};

const GENERATIONS: &str = "/v1/images/generations";

/// The time that a server takes for what it has accepted, and for answers to go out.
const DRAIN_TIME: Duration = Duration::from_secs(34);

#[test]
fn an_idle_server_ends_at_once() {
    for (signal, code) in [("-TERM", 143), ("-INT", 130)] {
        let server = Server::start(&[]);
        // Connections that nobody uses do not hold it.
        let silent = server.connect();
        let mut idle = server.connect();
        assert_eq!(idle.ask(&server.host(), &Request::get("/ready")).status, 200);
        let start = Instant::now();
        server.signal(signal);
        let (ended, log) = server.end();
        assert_eq!(ended, Some(code), "{log}");
        assert!(start.elapsed() < DRAIN_TIME, "{:?}", start.elapsed());
        assert!(log.contains("event=drain waiting=0"), "{log}");
        assert!(idle.is_closed());
        drop(silent);
    }
}

/// A model that takes long to load says so, and a signal ends it before it is there.
#[test]
fn a_server_that_loads_can_be_ended() {
    for (signal, code) in [("-TERM", 143), ("-INT", 130)] {
        let sandbox = Sandbox::new();
        // The first image, which nobody sees, takes a while at this size.
        write_model(&sandbox.path("large"), 1024);
        let command = serve(&sandbox, &without_socket(&["--model", "large"]));
        let server = Server::launch(sandbox, command);
        assert_eq!(server.get("/health").status, 200);
        let ready = server.get("/ready");
        assert_eq!((ready.status, ready.json()), (503, json!({"status": "loading"})));
        for request in [Request::json(GENERATIONS, &small(&json!({}))), Request::get("/v1/models")] {
            let answer = server.ask(&request);
            assert_eq!((answer.status, &*answer.code()), (503, "loading"), "{}", answer.text());
        }
        assert_eq!(server.get("/kiln/status").good().json()["server"]["state"], "loading");
        assert!(!server.log().contains(", ready at "), "the test is of no use");
        let start = Instant::now();
        server.signal(signal);
        let (ended, log) = server.end();
        assert_eq!(ended, Some(code), "{log}");
        assert!(!log.contains(", ready at ") && start.elapsed() < DRAIN_TIME, "{log}");
    }
}

/// What was accepted is made; what comes later is refused.
#[test]
fn accepted_images_are_made() {
    let server = Server::start(&[]);
    let want = server.generate(&small(&json!({}))).good().image(0);
    let host = server.host();
    let mut late = server.connect();
    assert_eq!(late.ask(&host, &Request::get("/health")).status, 200);
    // A body of which the end is missing: nothing was accepted yet.
    let half = Request::json(GENERATIONS, &small(&json!({"seed": 9})));
    let mut pending = server.connect();
    let bytes = half.bytes(&host);
    pending.send(&bytes[..bytes.len() - 1]);
    let occupant = server.occupy();
    let pair = |index: u64| Request::json(GENERATIONS, &small(&json!({"n": 2, "seed": 7 + 10 * index})));
    let mut accepted: Vec<_> = (0..3).map(|index| server.begin(&pair(index))).collect();
    accepted.push(server.begin(&Request::json(GENERATIONS, &small(&json!({"stream": true})))));
    server.reaches("kiln_queue_length", 7.0);
    server.signal("-TERM");
    server.wait_for("event=drain");
    // Nobody new gets in, whether they have a connection or not.
    late.send(&Request::json(GENERATIONS, &small(&json!({}))).bytes(&host));
    let refused = late.answer_to("POST").map(|answer| (answer.status, answer.code()));
    assert!(refused.as_ref().map_or(true, |refused| *refused == (503, "shutting_down".into())), "{refused:?}");
    assert!(TcpStream::connect(server.address).is_err() || long());
    pending.send(&bytes[bytes.len() - 1..]);
    let refused = pending.answer_to("POST").map(|answer| (answer.status, answer.code()));
    assert_eq!(refused.unwrap(), (503, "shutting_down".into()));
    // Its client leaves, and the others have their turn.
    drop(occupant);
    let mut stream = accepted.pop().unwrap();
    for (index, connection) in accepted.iter_mut().enumerate() {
        let answer = connection.answer().good();
        assert!(index > 0 || answer.image(0) == want);
        assert_eq!(answer.header("connection"), Some("close"), "request {index}: {:?}", answer.headers);
        assert!(connection.is_closed());
    }
    assert_eq!(stream.head().unwrap().status, 200);
    assert_eq!(stream.event().unwrap().0, "image_generation.completed");
    assert_eq!(stream.event(), None);
    let (code, log) = server.end();
    assert_eq!(code, Some(143), "{log}");
}

/// What is predicted to take longer than the end may is refused at once, and everyone is told.
#[test]
fn what_takes_too_long_is_refused_at_the_end() {
    let server = Server::start(&[]);
    let predicted = || server.metric("kiln_queue_predicted_seconds");
    let dear = Request::json(GENERATIONS, &json!({"prompt": "", "size": "128x128", "steps": 64}));
    let _occupant = server.occupy();
    let mut waiting = Vec::new();
    // The end waits for what is predicted to take 25 s, and how many images that are depends on the machine.
    while predicted() < 30.0 {
        waiting.push(server.begin(&dear));
        server.reaches("kiln_queue_length", waiting.len() as f64);
        assert!(waiting.len() < 30, "{} s", predicted());
    }
    server.signal("-INT");
    server.wait_for("event=drain");
    let start = Instant::now();
    let answer = waiting.pop().expect("a request that waits").answer();
    assert_eq!((answer.status, &*answer.code()), (503, "shutting_down"));
    // A second signal does not wait for it.
    server.signal("-INT");
    let (code, log) = server.end();
    assert_eq!(code, Some(130), "{log}");
    assert!(start.elapsed() < DRAIN_TIME, "{:?}", start.elapsed());
}

#[test]
fn a_second_signal_ends_it_at_once() {
    for (first, second) in [("-TERM", "-TERM"), ("-INT", "-INT"), ("-TERM", "-INT")] {
        let server = Server::start(&[]);
        let mut occupant = server.occupy();
        server.signal(first);
        server.wait_for("event=drain");
        let start = Instant::now();
        server.signal(second);
        let (code, log) = server.end();
        assert!(matches!(code, Some(130 | 143)), "{code:?}: {log}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        while occupant.try_event().is_ok_and(|event| event.is_some()) {}
    }
}

/// A signal at any moment: every request that was read has an answer.
#[test]
fn everyone_is_answered() {
    let rounds = if long() { 50 } else { 2 };
    for round in 0..rounds {
        let server = Server::start(&[]);
        let host = server.host();
        let signal = if round % 2 == 0 { "-TERM" } else { "-INT" };
        let accepted: Vec<_> = (0..6)
            .map(|seed| {
                let mut connection = server.connect();
                connection.send(&Request::json(GENERATIONS, &small(&json!({"seed": seed}))).bytes(&host));
                connection
            })
            .collect();
        std::thread::sleep(moment(round, Duration::from_millis(100)));
        server.reaches("kiln_connections", 7.0);
        let taken = server.metric("kiln_queue_length") + server.made();
        server.signal(signal);
        let answers: Vec<_> =
            accepted.into_iter().map(|mut connection| connection.answer_to("POST").map(|answer| answer.status)).collect();
        let made = answers.iter().filter(|status| matches!(status, Ok(200))).count();
        assert!(made as f64 >= taken, "{made} of {taken} that were taken");
        // Whoever has no answer sent a request that nobody read.
        let answered = answers.iter().flatten().filter(|status| matches!(status, 200 | 503)).count();
        let (code, log) = server.end();
        let logged = log.lines().filter(|line| line.contains("route=generations")).collect::<Vec<_>>();
        assert!(logged.len() == answered && !log.contains("gone=true"), "{answers:?}\n{log}");
        assert_eq!(code, Some(if signal == "-TERM" { 143 } else { 130 }), "{log}");
    }
}
