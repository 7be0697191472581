//! Requests that come twice: idempotency keys, and explicit seeds.

use super::server::{Server, small};
use common::http::{Connection, Request};
use serde_json::{Value, json};

const GENERATIONS: &str = "/v1/images/generations";
const LENGTH: &str = "kiln_queue_length";

fn keyed(key: &str, fields: &Value) -> Request {
    Request::json(GENERATIONS, &small(fields)).with("Idempotency-Key", key)
}

/// Sends requests that come while the engine is busy, each when the server has taken the one before, and waits until this many images
/// wait. All of them are streams, of which the head says that the request was taken.
fn queue(server: &Server, requests: &[Request], length: usize) -> Vec<Connection> {
    let begin = |request: &Request| {
        let mut connection = server.begin(request);
        assert_eq!(connection.head().unwrap().status, 200);
        connection
    };
    let connections = requests.iter().map(begin).collect();
    server.reaches(LENGTH, length as f64);
    connections
}

/// The seed and the image at the end of a stream.
fn image(connection: &mut Connection) -> (u64, String) {
    let (name, data) = connection.event().unwrap();
    assert_eq!((&*name, connection.event()), ("image_generation.completed", None));
    (data["seed"].as_u64().unwrap(), data["b64_json"].as_str().unwrap().to_owned())
}

#[test]
fn an_idempotency_key_has_one_answer() {
    let server = Server::start(&[]);
    // Without a seed, so that only the key makes them the same.
    let free = json!({"seed": null});
    let [first, ..] = ["k1", "k2", "k3", "k4"].map(|key| {
        let first = server.ask(&keyed(key, &free)).good();
        let made = server.made();
        let again = server.ask(&keyed(key, &free)).good();
        assert_eq!(again.header("x-kiln-seed"), first.header("x-kiln-seed"), "{key}");
        assert!(again.image(0) == first.image(0) && server.made() == made, "nothing is made again");
        first
    });
    let made = server.made();
    let url = keyed("k1", &json!({"seed": null, "response_format": "url"}));
    for other in [keyed("k1", &json!({"seed": null, "steps": 2})), keyed("k1", &free).with("Accept", "image/png"), url] {
        let answer = server.ask(&other);
        assert_eq!((answer.status, &*answer.code()), (422, "invalid_value"), "{}", answer.text());
        assert!(answer.message().contains("idempotency key"), "{}", answer.message());
    }
    let edits = Request { target: "/v1/images/edits".into(), ..keyed("k1", &free) };
    assert_eq!(server.ask(&edits).status, 422);
    // Another key is another request.
    let other = server.ask(&keyed("k5", &free)).good();
    assert!(other.header("x-kiln-seed") != first.header("x-kiln-seed") && server.made() == made + 1.0);
    // A key whose request was refused is free.
    assert_eq!(server.ask(&keyed("k6", &json!({"n": 99}))).status, 400);
    server.ask(&keyed("k6", &free)).good();

    // While the first runs, the second joins it.
    let stream = json!({"seed": null, "stream": true});
    let occupant = server.occupy();
    let made = server.made();
    let mut joined = queue(&server, &[keyed("k7", &stream), keyed("k7", &stream), keyed("k7", &stream)], 1);
    assert_eq!(server.ask(&keyed("k7", &json!({"seed": null, "stream": true, "steps": 2}))).status, 422);
    // One of them may leave, even the one that was first.
    drop(joined.remove(0));
    drop(occupant);
    assert_eq!(image(&mut joined[0]), image(&mut joined[1]));
    assert_eq!(server.made(), made + 1.0);
    // When all have left, the key is free, too.
    let occupant = server.occupy();
    drop(queue(&server, &[keyed("k8", &stream), keyed("k8", &stream)], 1));
    server.reaches(LENGTH, 0.0);
    drop(occupant);
    server.ask(&keyed("k8", &json!({"seed": null, "size": "80x64"}))).good();
}

#[test]
fn a_seed_joins_a_request_that_runs() {
    let server = Server::start(&[]);
    let of = |mut fields: Value| {
        fields["stream"] = json!(true);
        Request::json(GENERATIONS, &small(&fields))
    };
    let plain = Request::json(GENERATIONS, &small(&json!({})));
    let want = server.ask(&plain).good().json()["data"][0]["b64_json"].as_str().unwrap().to_owned();
    let occupant = server.occupy();
    let made = server.made();
    let mut twins = queue(&server, &[of(json!({})), of(json!({})), of(json!({}))], 1);
    // Whoever asks for anything else gets something else: another client, seed, or form of the answer.
    let mut others = queue(&server, &[of(json!({"seed": 8})), of(json!({"user": "u"})), of(json!({"progress": true}))], 4);
    // Without a seed nobody has asked for the same image.
    let mut free = queue(&server, &[of(json!({"seed": null})), of(json!({"seed": null}))], 6);
    // One of them may leave, even the one that was first.
    drop(twins.remove(0));
    drop(occupant);
    for twin in &mut twins {
        assert_eq!(image(twin), (7, want.clone()));
    }
    let (other, user) = (image(&mut others[0]), image(&mut others[1]));
    assert!(other.0 == 8 && other.1 != want && user == (7, want));
    assert_ne!(image(&mut free[0]), image(&mut free[1]));
    while others[2].event().is_some() {}
    assert_eq!(server.made(), made + 6.0);
    // It is over, so the next one is made again.
    server.ask(&plain).good();
    assert_eq!(server.made(), made + 7.0);
}

/// Clients send again what takes too long, and some send everything twice at once.
#[test]
fn twins_that_come_together_are_one() {
    let server = Server::start(&[]);
    let occupant = server.occupy();
    let keyed = keyed("k1", &json!({"seed": null, "stream": true}));
    let seeded = Request::json(GENERATIONS, &small(&json!({"stream": true})));
    let requests = [&keyed, &seeded, &keyed, &seeded, &keyed, &seeded].map(|request| request.bytes(&server.host()));
    let mut connections = requests.each_ref().map(|_| server.connect());
    for (connection, bytes) in connections.iter_mut().zip(&requests) {
        connection.send(bytes);
    }
    let made = server.made();
    for connection in &mut connections {
        assert_eq!(connection.head().unwrap().status, 200);
    }
    assert_eq!(server.metric(LENGTH), 2.0);
    drop(occupant);
    let images = connections.map(|mut connection| image(&mut connection));
    for pair in images.windows(3) {
        assert_eq!(pair[0], pair[2]);
    }
    assert_eq!(server.made(), made + 2.0);
}
