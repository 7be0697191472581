//! HTTP/1.1 itself: connections that are kept, requests in a row, lengths that lie, and clients that say nothing.

use super::server::{Server, plain, small};
use common::http::{Connection, Request};
use common::random::long;
use serde_json::json;
use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

const GENERATIONS: &str = "/v1/images/generations";

/// Limits of the server.
const HEADER_TIME: Duration = Duration::from_secs(5);
const IDLE_TIME: Duration = Duration::from_secs(60);
const BODY_TIME: Duration = Duration::from_secs(30);

/// Connections of one address.
const CONNECTIONS: usize = 32;

/// What a busy machine may add to a limit.
const SLACK: Duration = Duration::from_secs(20);

#[test]
fn errors_of_routes() {
    let server = plain();
    for (method, path, allow) in [
        ("GET", GENERATIONS, "POST"),
        ("HEAD", GENERATIONS, "POST"),
        ("DELETE", "/v1/images/edits", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/models/kiln", "GET"),
        ("POST", "/health", "GET"),
        ("OPTIONS", "/metrics", "GET"),
        ("BREW", "/", "GET"),
    ] {
        let answer = server.ask(&Request::new(method, path));
        assert_eq!(answer.status, 405, "{method} {path}");
        let allowed = answer.header("allow").expect("`Allow`");
        assert!(allowed.split(", ").any(|method| method == allow), "{method} {path}: {allowed}");
        assert!(method == "HEAD" || answer.code() == "method_not_allowed");
    }
    for path in ["/v1/images/variations", "/images/variations"] {
        for method in ["POST", "GET"] {
            let answer = server.ask(&Request::new(method, path));
            assert_eq!((answer.status, &*answer.code()), (404, "not_found"), "{method} {path}");
            assert!(answer.message().contains("/v1/images/edits"), "{}", answer.message());
        }
    }
    for path in ["/v1", "/v1/images/", "/v1/chat/completions", "/favicon.ico", "/v1/images/0123456789abcdef0123456789abcdef"] {
        assert_eq!(server.get(path).code(), "not_found", "{path}");
    }
    for (path, kinds) in [
        (GENERATIONS, &["text/plain", "application/octet-stream", "multipart/form-data; boundary=x"][..]),
        ("/v1/images/edits", &["text/plain", "image/png", "multipart/mixed; boundary=x"]),
    ] {
        for kind in kinds {
            let answer = server.ask(&Request::new("POST", path).with("Content-Type", kind).with_body("{}"));
            assert_eq!((answer.status, &*answer.code()), (415, "unsupported_media_type"), "{path} {kind}");
        }
    }
}

#[test]
fn a_connection_serves_many_requests() {
    let server = plain();
    let host = server.host();
    let mut connection = server.connect();
    for path in ["/health", "/v1/models", "/nothing", "/metrics", "/health"] {
        assert_ne!(connection.ask(&host, &Request::get(path)).header("connection"), Some("close"), "{path}");
    }
    // Requests that do not wait for answers are answered in their order.
    let image = Request::json(GENERATIONS, &small(&json!({}))).with("x-request-id", "first");
    let requests =
        [image, Request::get("/health").with("x-request-id", "second"), Request::get("/nothing").with("x-request-id", "third")];
    connection.send(&requests.each_ref().map(|request| request.bytes(&host)).concat());
    let answers = [(); 3].map(|()| connection.answer());
    assert_eq!(answers.each_ref().map(|answer| answer.status), [200, 200, 404]);
    assert_eq!(answers.each_ref().map(|answer| answer.header("x-request-id").unwrap()), ["first", "second", "third"]);
    assert_eq!(connection.ask(&host, &Request::get("/health").with("Connection", "close")).header("connection"), Some("close"));
    assert!(connection.is_closed());
    // A request in single bytes is a request.
    let mut connection = server.connect();
    for byte in Request::get("/health").bytes(&host) {
        connection.send(&[byte]);
    }
    assert_eq!(connection.answer().status, 200);
    // HTTP/1.0, whose connections end.
    for (path, status) in [("/health", 200), ("/nothing", 404)] {
        let mut old = server.connect();
        old.send(format!("GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").as_bytes());
        assert!(old.answer().status == status && old.is_closed(), "{path}");
    }
    // Without a name nobody knows whom the request is for.
    for line in ["GET /v1/models HTTP/1.0\r\n\r\n", "GET /v1/models HTTP/1.1\r\n\r\n"] {
        let mut anonymous = server.connect();
        anonymous.send(line.as_bytes());
        assert_eq!(anonymous.answer().status, 400, "{line:?}");
    }
    for path in ["/health", "/v1/models", "/", "/metrics"] {
        let (got, head) = (server.get(path), server.ask(&Request::new("HEAD", path)));
        assert_eq!((head.status, head.header("content-type")), (200, got.header("content-type")), "{path}");
        assert!(head.header("content-length").unwrap().parse::<usize>().is_ok_and(|length| length > 0));
    }
}

#[test]
fn bodies_may_wait_for_a_word_or_come_in_chunks() {
    let server = plain();
    let host = server.host();
    let request = Request::json(GENERATIONS, &small(&json!({}))).with("Expect", "100-continue");
    let bytes = request.bytes(&host);
    let mut connection = server.connect();
    connection.send(&bytes[..bytes.len() - request.body.len()]);
    assert_eq!(connection.head().unwrap().status, 100);
    connection.send(&request.body);
    let want = connection.answer().good().image(0);
    // A body that would be refused is not asked for.
    let large = Request::new("POST", GENERATIONS).with("Content-Type", "application/json").with("Expect", "100-continue");
    let mut connection = server.connect();
    connection.send(&large.with("Content-Length", "100000000").bytes(&host));
    assert_eq!(connection.head().unwrap().status, 413);
    let chunked = Request::new("POST", GENERATIONS).with("Content-Type", "application/json").with("Transfer-Encoding", "chunked");
    let mut connection = server.connect();
    connection.send(&chunked.bytes(&host));
    for byte in &request.body {
        connection.send(format!("1;x=y\r\n{}\r\n", *byte as char).as_bytes());
    }
    connection.send(b"0\r\nX-Trailer: 1\r\n\r\n");
    assert!(connection.answer().good().image(0) == want);
}

#[test]
fn lengths_that_lie_cost_nothing() {
    let server = Server::start(&[]);
    let host = server.host();
    let post = || Request::new("POST", GENERATIONS).with("Content-Type", "application/json");
    let body = small(&json!({})).to_string();
    let before = server.kib("VmHWM");
    let start = Instant::now();
    for length in ["10000000000", "67108865", "9223372036854775807"] {
        let mut connection = server.connect();
        connection.send(&post().with("Content-Length", length).with_body("{").bytes(&host));
        let answer = connection.answer();
        assert_eq!(
            (answer.status, &*answer.code(), answer.header("connection")),
            (413, "body_too_large", Some("close")),
            "{length}"
        );
        assert!(answer.message().contains("64 MiB"));
        assert!(connection.is_closed(), "the rest is not read");
    }
    assert!(start.elapsed() < BODY_TIME, "nobody waits for a body that is refused");
    assert!(server.kib("VmHWM") - before < 32 << 10);
    // Lengths that are none, or two of them: such a request could be two requests to a proxy.
    for headers in [
        vec![("Content-Length", "-1")],
        vec![("Content-Length", "+5")],
        vec![("Content-Length", "0x10")],
        vec![("Content-Length", "1e3")],
        vec![("Content-Length", "")],
        vec![("Content-Length", "18446744073709551615")],
        vec![("Content-Length", "99999999999999999999999")],
        vec![("Content-Length", "5"), ("Content-Length", "6")],
        vec![("Content-Length", "5, 6")],
        vec![("Transfer-Encoding", "chunked, identity")],
        vec![("Transfer-Encoding", "xchunked")],
        vec![("Transfer-Encoding", "gzip, chunked, gzip")],
    ] {
        let request = headers.iter().fold(post(), |request, (name, value)| request.with(name, value));
        let mut connection = server.connect();
        connection.send(&request.with_body(body.clone()).bytes(&host));
        let answer = connection.answer_to("POST").map(|answer| answer.status);
        assert!(answer.as_ref().map_or(true, |status| matches!(status, 400 | 411 | 413 | 431 | 501)), "{headers:?}: {answer:?}");
        assert!(connection.is_closed(), "{headers:?}");
    }
    // A body that is longer than its length is another request, and a broken one.
    let mut connection = server.connect();
    connection.send(&post().with("Content-Length", "2").with_body("{}GARBAGE\r\n\r\n").bytes(&host));
    assert_eq!(connection.answer().status, 400);
    assert!(connection.answer_to("GET").map_or(true, |answer| answer.status == 400) && connection.is_closed());
    // One that is shorter has no end.
    let mut connection = server.connect();
    connection.send(&post().with("Content-Length", "1000").with_body("{}").bytes(&host));
    connection.stream.shutdown(Shutdown::Write).unwrap();
    assert!(connection.answer_to("POST").map_or(true, |answer| answer.status == 400));
    // Broken chunks.
    for chunks in ["zz\r\n", "FFFFFFFFFFFFFFFFF\r\n", "-1\r\n", "5\r\nabcdefgh\r\n0\r\n\r\n"] {
        let mut connection = server.connect();
        connection.send(&post().with("Transfer-Encoding", "chunked").with_body(chunks).bytes(&host));
        assert!(connection.answer_to("POST").map_or(true, |answer| answer.status == 400), "{chunks:?}");
    }
    server.generate(&small(&json!({}))).good();
}

#[test]
fn heads_have_limits() {
    let server = plain();
    let host = server.host();
    let many = |count: usize| (0..count).fold(Request::get("/health"), |request, i| request.with(&format!("x-{i}"), "1"));
    let tries = [
        Request::get("/health").with("x-long", &"x".repeat(20_000)),
        Request::get(&format!("/{}", "x".repeat(20_000))),
        many(2000),
        many(200),
    ];
    for request in tries {
        let mut connection = server.connect();
        connection.send(&request.bytes(&host));
        let status = connection.answer_to("GET").map(|answer| answer.status);
        assert!(status.as_ref().map_or(true, |status| matches!(status, 400 | 404 | 414 | 431)), "{status:?}");
        assert!(status.is_ok_and(|status| status == 404) || connection.is_closed());
    }
    for garbage in [
        &b"\r\n\r\n\r\nGARBAGE\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\nHost: localhost\n\n",
    ] {
        let mut connection = server.connect();
        connection.send(garbage);
        let _ = connection.stream.shutdown(Shutdown::Write);
        let status = connection.answer_to("GET").map(|answer| answer.status);
        assert!(status.as_ref().map_or(true, |status| (400..600).contains(status)), "{garbage:?}: {status:?}");
    }
    assert_eq!(server.get("/health").status, 200);
}

/// One address cannot have all connections.
#[test]
fn an_address_has_a_share_of_the_connections() {
    let server = Server::start(&[]);
    let host = server.host();
    let mut all: Vec<Connection> = (0..CONNECTIONS).map(|_| server.connect()).collect();
    for connection in &mut all {
        assert_eq!(connection.ask(&host, &Request::get("/health")).status, 200);
    }
    let mut another = server.begin(&Request::get("/health"));
    assert!(another.answer_to("GET").is_err(), "one more is one too many");
    let ask = |connection: &mut Connection| connection.ask(&host, &Request::get("/metrics")).good();
    assert!(ask(&mut all[0]).text().contains(&format!("\nkiln_connections {CONNECTIONS}\n")));
    // A place that is given back is free again.
    let mut first = all.remove(0);
    drop(all);
    while !ask(&mut first).text().contains("\nkiln_connections 1\n") {}
    assert_eq!(server.get("/health").status, 200);
}

/// The time until a connection is closed, of a client that sends bytes at a pace. Its last byte is not sent.
fn closed_after(server: &Server, first: &[u8], pace: Option<(u8, Duration)>) -> Duration {
    let start = Instant::now();
    let mut connection = server.connect();
    connection.send(first);
    if let Some((byte, pause)) = pace {
        connection.stream.set_read_timeout(Some(pause)).unwrap();
        while start.elapsed() < BODY_TIME * 3 {
            let closed = std::io::Read::read(&mut connection.stream, &mut [0; 1024]);
            let is_open = closed.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
            if !is_open || connection.stream.write_all(&[byte]).is_err() {
                break;
            }
        }
        return start.elapsed();
    }
    while connection.answer_to("GET").is_ok() {}
    start.elapsed()
}

#[test]
fn silent_clients_are_let_go() {
    let server = plain();
    let (head, pause) = (b"GET /health HTTP/1.1\r\nX: ", Duration::from_millis(500));
    let lines: [(&[u8], _); 4] = [(b"", None), (b"GET /hea", None), (head, None), (head, Some((b'x', pause)))];
    std::thread::scope(|scope| {
        let all = lines.map(|(first, pace)| scope.spawn(move || closed_after(server, first, pace)));
        // Others are served meanwhile.
        server.generate(&small(&json!({}))).good();
        for (thread, (first, pace)) in all.into_iter().zip(lines) {
            let took = thread.join().unwrap();
            assert!(took >= HEADER_TIME && took < HEADER_TIME + SLACK, "{first:?} {pace:?}: {took:?}");
        }
    });
    // A second request has the same time for its head, and idling has more.
    let mut connection = server.connect();
    assert_eq!(connection.ask(&server.host(), &Request::get("/health")).status, 200);
    let idle = Instant::now();
    std::thread::sleep(HEADER_TIME + Duration::from_secs(1));
    assert_eq!(connection.ask(&server.host(), &Request::get("/health")).status, 200, "{:?}", idle.elapsed());
    let start = Instant::now();
    connection.send(b"GET /hea");
    assert!(connection.is_closed());
    assert!(start.elapsed() >= HEADER_TIME && start.elapsed() < HEADER_TIME + SLACK, "{:?}", start.elapsed());
}

/// Limits that take longer: of bodies, and of connections between two requests.
#[test]
fn slow_clients_are_let_go() {
    if !long() {
        return;
    }
    let server = plain();
    let host = server.host();
    let post = Request::new("POST", GENERATIONS).with("Content-Type", "application/json").with("Content-Length", "5000");
    let bytes = &post.bytes(&host);
    let timed_out = |mut connection: Connection, pace: bool| {
        let start = Instant::now();
        if pace {
            let mut writer = connection.stream.try_clone().unwrap();
            std::thread::spawn(move || {
                while writer.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(100))
                }
            });
        }
        let answer = connection.answer();
        let took = start.elapsed();
        assert_eq!((answer.status, &*answer.code(), answer.header("connection")), (408, "body_timeout", Some("close")));
        assert!(took >= BODY_TIME - Duration::from_secs(1) && took < BODY_TIME + SLACK, "{took:?}");
    };
    std::thread::scope(|scope| {
        for pace in [false, true] {
            scope.spawn(move || {
                let mut connection = server.connect();
                connection.send(bytes);
                timed_out(connection, pace);
            });
        }
        scope.spawn(|| {
            let mut connection = server.connect();
            assert_eq!(connection.ask(&server.host(), &Request::get("/health")).status, 200);
            let start = Instant::now();
            assert!(connection.is_closed());
            assert!(start.elapsed() + Duration::from_secs(1) >= IDLE_TIME && start.elapsed() < IDLE_TIME + SLACK);
        });
    });
}
