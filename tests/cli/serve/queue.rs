//! The queue: what is refused when it is full, and what a client that leaves gives back.

use super::server::{Server, eventually, small};
use common::http::{Answer, Connection, Request};
use common::moments::moment;
use common::random::long;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const GENERATIONS: &str = "/v1/images/generations";
const LENGTH: &str = "kiln_queue_length";
const LEFT_WAITING: &str = "kiln_canceled_total{when=\"waiting\"}";
const LEFT_RUNNING: &str = "kiln_canceled_total{when=\"running\"}";

/// A request of a user with a seed of its own.
fn of(user: &str, seed: u64, n: u32) -> Request {
    Request::json(GENERATIONS, &small(&json!({"user": user, "seed": seed, "n": n})))
}

/// Sends a request, and waits until this many images wait.
fn queue(server: &Server, request: &Request, length: usize) -> Connection {
    let connection = server.begin(request);
    server.reaches(LENGTH, length as f64);
    connection
}

/// Expects that a request is refused for now.
fn refused(answer: &Answer, code: &str) {
    assert_eq!((answer.status, &*answer.code()), (429, code), "{}", answer.text());
    assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
}

#[test]
fn a_full_queue_refuses_and_keeps_what_it_has() {
    let server = Server::start(&["--max-waiting", "4"]);
    let want = server.ask(&of("a", 1, 1)).good().image(0);
    let occupant = server.occupy();
    let mut kept = vec![queue(&server, &of("a", 1, 1), 1), queue(&server, &of("a", 2, 1), 2)];
    // Half of the queue is for one client.
    let start = Instant::now();
    refused(&server.ask(&of("a", 3, 1)), "client_limit");
    kept.push(queue(&server, &of("b", 4, 1), 3));
    refused(&server.ask(&of("c", 5, 2)), "queue_full");
    kept.push(queue(&server, &of("c", 6, 1), 4));
    for user in ["a", "b", "d"] {
        refused(&server.ask(&of(user, 7, 1)), "queue_full");
    }
    assert!(start.elapsed() < Duration::from_secs(60), "nobody waits to be refused");
    assert!(server.metric("kiln_queue_predicted_seconds") > 0.0);
    let status = server.get("/kiln/status").good().json();
    assert_eq!(status["queue"]["waiting"], 4);
    // What cannot be taken later either is no matter of the queue.
    assert_eq!(server.ask(&of("d", 8, 11)).status, 400);
    drop(occupant);
    server.reaches(LEFT_RUNNING, 1.0);
    let answers: Vec<Answer> = kept.iter_mut().map(|connection| connection.answer().good()).collect();
    assert!(answers[0].image(0) == want);
    assert_eq!(server.metric(LENGTH), 0.0);
    assert_eq!(server.metric(LEFT_WAITING), 0.0, "nothing that was taken was dropped");
    // An empty queue takes any request.
    let _occupant = server.occupy();
    let ten = queue(&server, &of("a", 9, 10), 10);
    refused(&server.ask(&of("b", 10, 1)), "queue_full");
    drop(ten);
    server.reaches(LENGTH, 0.0);
    server.reaches(LEFT_WAITING, 1.0);
}

#[test]
fn clients_take_turns() {
    let server = Server::start(&[]);
    let occupant = server.occupy();
    // Three images of one client wait, then one of another: it comes after the first, and not at the end.
    let mut first = queue(&server, &of("a", 1, 3).with("X-Request-Id", "many"), 3);
    let mut second = queue(&server, &of("b", 2, 1).with("X-Request-Id", "one"), 4);
    drop(occupant);
    second.answer().good();
    assert_eq!(first.answer().good().json()["data"].as_array().unwrap().len(), 3);
    let log = server.wait_for(" id=many ");
    assert!(log.find(" id=one ").expect(&log) < log.find(" id=many ").unwrap(), "{log}");
}

#[test]
fn a_client_that_leaves_ends_its_work() {
    let server = Server::start(&["--max-waiting", "8"]);
    let want = server.ask(&of("a", 1, 1)).good().image(0);
    let made = server.made();
    let occupant = server.occupy();
    let leaves = [queue(&server, &of("a", 2, 2), 2), queue(&server, &of("b", 3, 1), 3)];
    let mut stays = queue(&server, &of("c", 1, 1), 4);
    // It leaves the queue while the engine is busy with something else.
    drop(leaves);
    server.reaches(LENGTH, 1.0);
    server.reaches(LEFT_WAITING, 2.0);
    assert_eq!((server.metric(LEFT_RUNNING), server.made()), (0.0, made));
    // Half a close is one, too: clients that shut their end down do not wait.
    let half = queue(&server, &of("d", 4, 1), 2);
    half.stream.shutdown(std::net::Shutdown::Write).unwrap();
    server.reaches(LENGTH, 1.0);
    server.reaches(LEFT_WAITING, 3.0);
    // The running image stops before its next step.
    drop(occupant);
    server.reaches(LEFT_RUNNING, 1.0);
    assert!(stays.answer().good().image(0) == want);
    assert_eq!(server.made(), made + 1.0);
    server.wait_for("gone=true");
    // A stream that nobody reads any more ends like the others.
    let mut stream = server.begin(&Request::json(
        GENERATIONS,
        &json!({"prompt": "", "size": "128x128", "steps": 64, "stream": true, "progress": true}),
    ));
    stream.head().unwrap();
    stream.event().unwrap();
    drop(stream);
    eventually("the stream ends", || server.metric(LEFT_RUNNING) + server.metric(LEFT_WAITING) == 5.0);
    assert!(server.ask(&of("a", 1, 1)).good().image(0) == want);
}

/// Clients leave at any moment, and the server is as before.
#[test]
fn clients_may_leave_at_any_moment() {
    let rounds = if long() { 200 } else { 12 };
    let server = Server::start(&["--max-waiting", "2"]);
    let want = server.ask(&of("a", 1, 1)).good().image(0);
    let handles = || std::fs::read_dir(format!("/proc/{}/fd", server.child.id())).unwrap().count();
    let (before, body) = (handles(), json!({"steps": 4, "n": 2, "stream": true, "partial_images": 1, "preview": "full"}));
    let requests: [Value; 2] = [small(&json!({"steps": 4})), small(&body)];
    for round in 0..rounds {
        let request = Request::json(GENERATIONS, &requests[round % 2]);
        let connection = server.begin(&request);
        std::thread::sleep(moment(round, Duration::from_millis(250)));
        drop(connection);
    }
    server.reaches(LENGTH, 0.0);
    server.reaches("kiln_queue_predicted_seconds", 0.0);
    // All places are there again.
    let occupant = server.occupy();
    let ten = queue(&server, &of("b", 5, 2), 2);
    refused(&server.ask(&of("c", 6, 1)), "queue_full");
    drop((occupant, ten));
    assert!(server.ask(&of("a", 1, 1)).good().image(0) == want);
    for kind in ["uploads", "decoded"] {
        server.reaches(&format!("kiln_host_bytes{{kind=\"{kind}\"}}"), 0.0);
    }
    eventually("no file is left open", || handles() <= before + 1);
}

/// Many requests, a tenth of them bad and some of them left alone: memory and open files stay as they are.
#[test]
fn it_stays_up() {
    let rounds = if long() { 10_000 } else { 60 };
    let server = Server::start(&[]);
    let handles = || std::fs::read_dir(format!("/proc/{}/fd", server.child.id())).unwrap().count();
    let mut connection = server.connect();
    let (mut memory, mut files) = (0, 0);
    for round in 0..rounds {
        // What is there after a tenth is there at the end.
        if round == rounds / 10 {
            (memory, files) = (server.kib("VmRSS"), handles());
        }
        let request = match round % 20 {
            0 | 10 => Request::json(GENERATIONS, &small(&json!({"n": 99}))),
            5 => {
                drop(server.begin(&of("gone", round as u64, 1)));
                continue;
            }
            7 => Request::new("POST", GENERATIONS).with("Content-Type", "application/json").with("Content-Length", "99999999"),
            8 if long() => of("a", round as u64, 1),
            _ if long() && round % 10 == 3 => of("a", round as u64, 1),
            _ => Request::json(GENERATIONS, &json!({"prompt": "x", "model": "other"})),
        };
        let answer = connection.ask(&server.host(), &request);
        assert!(matches!(answer.status, 200 | 400 | 404 | 413 | 429), "{}", answer.status);
        if answer.header("connection") == Some("close") {
            connection = server.connect();
        }
    }
    server.reaches(LENGTH, 0.0);
    drop(connection);
    eventually("no file is left open", || handles() <= files + 1);
    let now = server.kib("VmRSS");
    assert!(now < memory + (32 << 10), "{memory} KiB became {now} KiB");
}
