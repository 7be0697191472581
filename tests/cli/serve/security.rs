//! Keys: every route but the open ones needs one, a wrong one does not pass, and none is ever shown.

use super::server::{KEY, Server, command, ends, guarded, plain, serve, small, without_socket};
use common::http::{Connection, Request};
use common::sandbox::Sandbox;
use serde_json::json;
use std::fs;

/// The table of routes in the program's source.
const TABLE: &str = include_str!("../../../src/bin/kiln/serve/route.rs");

/// Paths with their methods, and whether they are open to everyone.
fn routes() -> Vec<(String, String, bool)> {
    let rows = TABLE.lines().filter_map(|line| line.trim().strip_prefix("row(Route::")?.strip_suffix("),"));
    let routes = rows.map(|row| {
        let [_, method, path, _, is_open] = row.split(", ").collect::<Vec<_>>()[..] else { panic!("{row}") };
        let path = path.trim_matches('"').replace("{id}", "kiln");
        (method.strip_prefix("Method::").unwrap().to_owned(), path, is_open == "true")
    });
    let routes: Vec<_> = routes.collect();
    assert!(routes.len() >= 15, "{routes:?}");
    // The id of an image is its permission, and the page holds no secret and asks for the key.
    let open = ["/", "/app.js", "/style.css", "/health", "/ready", "/v1/images/kiln"];
    let is_right = |(_, path, is_open): &(String, String, bool)| *is_open == open.contains(&&**path);
    assert!(routes.iter().all(is_right), "{routes:?}");
    routes
}

#[test]
fn every_route_but_the_open_ones_needs_a_key() {
    let server = guarded();
    let methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "get"];
    let mut asked = 0;
    let mut connection = server.connect();
    for (own_method, path, is_open) in routes() {
        for method in methods {
            asked += 1;
            let request = Request::new(method, &path).with_body(if method == "POST" { "{}" } else { "" });
            let answer = connection.ask(&server.host(), &request);
            assert_eq!(answer.status == 401, !is_open, "{method} {path}: {}", answer.status);
            if !is_open {
                assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
                assert!(method == "HEAD" || answer.code() == "invalid_api_key", "{method} {path}");
            }
            if answer.header("connection") == Some("close") {
                connection = server.connect();
            }
        }
        // With a key it is another answer.
        let request = Request::new(&own_method, &path).with("Authorization", &format!("Bearer {}", KEY.1));
        assert_ne!(server.ask(&request).status, 401, "{path}");
    }
    assert!(asked >= 150);
    // Other spellings of a path name nothing, and nothing is open by accident.
    let port = server.address.port();
    for path in [
        "//metrics",
        "/metrics/",
        "//health",
        "/METRICS",
        "/./metrics",
        "/health/",
        "/health/../metrics",
        "/health/%2e%2e/metrics",
        "/%2e%2e/metrics",
        "/%6detrics",
        "/metrics%00",
        "/metrics%2f",
        "/health%2f..%2fmetrics",
        "/health;/metrics",
        "/metrics;a=b",
        "/metrics?",
        "/metrics?/health",
        "/v1//models",
        "/v1/models/../models",
        "/v1/%69mages/generations",
        "/v1/images/../../metrics",
        "/v1/images/%2e%2e%2fmetrics/x",
        "/v1/images//",
        "/kiln/status/.",
        "/kiln%2fstatus",
        "/\\metrics",
        &format!("http://localhost:{port}/metrics"),
        &format!("http://localhost:{port}//metrics"),
        "/openapi.json/",
        "/nothing",
    ] {
        for method in ["GET", "HEAD", "POST", "OPTIONS"] {
            let answer = server.ask(&Request::new(method, path));
            // A path that is no path is refused before anybody looks for a route.
            assert!(matches!(answer.status, 400 | 401), "{method} {path}: {}", answer.status);
        }
    }
    // An open route has nothing to hide, whatever follows the question mark.
    assert_eq!(server.get("/health?/../metrics").good().text(), server.get("/health").good().text());
}

#[test]
fn wrong_keys_do_not_pass() {
    let server = guarded();
    let (_, key) = KEY;
    let asked = |value: &str| server.ask(&Request::get("/v1/models").with("Authorization", value));
    for value in [&format!("Bearer {key}"), &format!("bearer {key}"), "Bearer fedcba9876543210b"] {
        asked(value).good();
    }
    let long = format!("Bearer {key}{}", "x".repeat(8000));
    let wrong = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer  ",
        key,
        &format!("Bearer{key}"),
        &format!("Bearer  {key}"),
        &format!("Bearer {}", key.to_lowercase()),
        &format!("Bearer {}", key.to_uppercase()),
        &format!("Bearer {}", &key[..key.len() - 1]),
        &format!("Bearer {}", &key[1..]),
        &format!("Bearer {key}x"),
        &format!("Bearer x{key}"),
        &format!("Bearer {key},"),
        &format!("Bearer \"{key}\""),
        &format!("Bearer {key} {key}"),
        &format!("Bearer {key}\u{301}"),
        &format!("Bearer {}", key.replace('a', "\u{430}")),
        &format!("Bearer team-a:{key}"),
        &format!("Basic {key}"),
        &format!("Token {key}"),
        "Bearer null",
        "Bearer *",
        &long,
    ];
    for value in wrong {
        let answer = asked(value);
        assert_eq!((answer.status, &*answer.code()), (401, "invalid_api_key"), "{value}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        assert!(!answer.text().contains(key), "{}", answer.text());
    }
    // A second key, before or after a good one, is no way in, and neither is another header.
    let (good, bad) = (format!("Bearer {key}"), "Bearer fedcba9876543210x");
    for [first, second] in [[&*good, bad], [bad, &good], [&good, &good]] {
        let request = Request::get("/v1/models").with("Authorization", first).with("Authorization", second);
        assert!(matches!(server.ask(&request).status, 400 | 401));
    }
    for name in ["X-Api-Key", "Api-Key", "Proxy-Authorization", "X-Authorization", "Cookie"] {
        assert_eq!(server.ask(&Request::get("/v1/models").with(name, &good)).status, 401, "{name}");
    }
    for path in [format!("/v1/models?api_key={key}"), format!("/v1/models?Authorization=Bearer%20{key}")] {
        assert_eq!(server.get(&path).status, 401, "{path}");
    }
    // One that is longer than any header.
    let mut connection = server.connect();
    connection
        .send(&Request::get("/v1/models").with("Authorization", &format!("Bearer {}", "x".repeat(1 << 20))).bytes("localhost"));
    assert!(connection.answer_to("GET").map_or(true, |answer| matches!(answer.status, 400 | 401 | 431)));
    // An image takes a key, and the one of the other team does not pass for it.
    let generation = Request::json("/v1/images/generations", &small(&json!({}))).with("Authorization", &good);
    server.ask(&generation).good();
    // The address of an image is a permission by itself, and nothing but the whole of it.
    let by_url = Request::json("/v1/images/generations", &small(&json!({"response_format": "url"}))).with("Authorization", &good);
    let url = server.ask(&by_url).good().json()["data"][0]["url"].as_str().unwrap().to_owned();
    let path = &url[url.find("/v1/").unwrap()..];
    assert_eq!(server.get(path).good().header("content-type"), Some("image/png"));
    for other in [&path[..path.len() - 1], &path.to_uppercase().replace("/V1/IMAGES", "/v1/images"), &format!("{path}0")] {
        assert_eq!(server.get(other).status, 404, "{other}");
    }
    let log = server.wait_for("route=generations status=200");
    assert!(log.contains("key=team-a") && log.contains("key=team-b") && log.contains("status=401"), "{log}");
    // The keys are nowhere to be seen.
    let line = fs::read(format!("/proc/{}/cmdline", server.child.id())).unwrap();
    for key in [key, "fedcba9876543210b"] {
        assert!(!log.contains(key) && !String::from_utf8_lossy(&line).contains(key));
    }
}

#[test]
fn others_get_in_with_a_key_only() {
    // An address that other machines reach.
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let sandbox = Sandbox::new();
        let (code, told) = ends(serve(&sandbox, &without_socket(&["--listen", listen])));
        assert_eq!(code, Some(2), "{told}");
        assert!(told.contains("can be reached from other machines, and there is no key"), "{told}");
        assert!(told.contains("hint: add --api-key-file, or --insecure"), "{told}");
        assert_eq!(sandbox.names(), [""; 0]);
    }
    let key = "only-in-the-environment";
    let sandbox = Sandbox::new();
    let mut keyed = serve(&sandbox, &without_socket(&["--listen", "0.0.0.0:0"]));
    keyed.env("KILN_API_KEY", key);
    let mut server = Server::launch(sandbox, keyed);
    server.address.set_ip([127, 0, 0, 1].into());
    server.wait_for(", ready at ");
    assert_eq!(server.get("/v1/models").status, 401);
    server.ask(&Request::get("/v1/models").with("Authorization", &format!("Bearer {key}"))).good();
    assert_eq!(server.get("/health").status, 200);
    assert!(!server.wait_for("key=default").contains(key));
    drop(server);
    let sandbox = Sandbox::new();
    let open = serve(&sandbox, &without_socket(&["--listen", "0.0.0.0:0", "--insecure"]));
    let mut server = Server::launch(sandbox, open);
    server.address.set_ip([127, 0, 0, 1].into());
    server.wait_for(", ready at ");
    server.get("/v1/models").good();
    // Names are checked even so.
    assert_eq!(server.ask(&Request::get("/v1/models").with("Host", "evil.example")).status, 403);
}

#[test]
fn files_of_keys_are_checked() {
    let sandbox = Sandbox::new();
    let told = |content: &[u8]| {
        fs::write(sandbox.path("keys"), content).unwrap();
        let (code, told) = ends(serve(&sandbox, &without_socket(&["--api-key-file", "keys"])));
        (code, told.lines().next().unwrap_or_default().to_owned())
    };
    for (content, why) in [
        (&b""[..], "there is no key"),
        (b"# nothing\n\n", "there is no key"),
        (b"team:short", "line 1: a key has at least 16 characters"),
        (b"a:0123456789abcdef\nb b:0123456789abcdef", "line 2: a name has letters"),
        (b"a:0123456789 abcdef", "line 1: a key has at least 16 characters, and no spaces"),
        (b"a:\xFF\xFE0123456789abcdef", "the file is not UTF-8"),
    ] {
        let (code, line) = told(content);
        assert!(code == Some(3) && line.contains("keys") && line.contains(why), "{code:?}: {line}");
        assert!(!line.contains("0123456789"), "{line}");
    }
    let (code, line) = ends(serve(&sandbox, &without_socket(&["--api-key-file", "missing"])));
    assert!(code == Some(3) && line.contains("missing"), "{code:?}: {line}");
    let mut short = command(&sandbox, &["serve", "--socket", "none", "--listen", "127.0.0.1:0"]);
    short.env("KILN_API_KEY", "hunter2");
    let (code, line) = ends(short);
    assert!(code == Some(2) && line.contains("KILN_API_KEY") && !line.contains("hunter2"), "{code:?}: {line}");
}

/// A control: the checks of answers find what they are for.
#[test]
fn secrets_are_noticed() {
    for text in ["/tmp/kiln-cli-1-2/keys", "at src/serve.rs:17", "thread panicked", "0x7ffd1234abcd", env!("CARGO_MANIFEST_DIR")]
    {
        assert!(std::panic::catch_unwind(|| common::http::check_secrets(text)).is_err(), "{text}");
    }
    common::http::check_secrets("the color is 0xff, the path is /v1/images/edits");
    // The open server lets in what the other one refuses.
    plain().get("/v1/models").good();
    assert_eq!(Connection::to(guarded().address).ask(&guarded().host(), &Request::get("/v1/models")).status, 401);
}
