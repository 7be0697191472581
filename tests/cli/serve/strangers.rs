//! Pages of other origins cannot use the server, and no request makes it fetch or open anything.

use super::server::{KEY, data_url, guarded, plain, small};
use common::http::{Answer, Part, Request};
use serde_json::json;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Headers of an answer that let a page read it.
fn cors(answer: &Answer) -> Vec<&str> {
    answer.headers.iter().map(|(name, _)| name.as_str()).filter(|name| name.starts_with("access-control-")).collect()
}

#[test]
fn pages_of_other_origins_are_kept_out() {
    let server = guarded();
    let port = server.address.port();
    let at = |host: &str| format!("{host}:{port}");
    let (own, evil) = (at("localhost"), at("evil.example"));
    let own_origin = format!("http://{own}");
    let with = |headers: &[(&str, &str)]| {
        let request = Request::get("/v1/models").with("Authorization", &format!("Bearer {}", KEY.1));
        server.ask(&headers.iter().fold(request, |request, (name, value)| request.with(name, value)))
    };
    let allowed = "https://app.example";
    let hosts = [
        (own.clone(), 200),
        (at("LocalHost"), 200),
        (at("127.0.0.1"), 200),
        (at("[::1]"), 200),
        ("box.lan:7878".into(), 200),
        ("host.docker.internal".into(), 200),
        (at("host.docker.internal"), 200),
        (evil.clone(), 403),
        (at("localhost.evil.example"), 403),
        (at("127.0.0.1.evil.example"), 403),
        (at("127.0.0.2"), 403),
        (at("0.0.0.0"), 403),
        (at("2130706433"), 403),
        (at("0x7f.1"), 403),
        (at("[::]"), 403),
        (at("localhost."), 403),
        (at("box.lan"), 403),
        ("localhost".into(), 403),
        ("127.0.0.1".into(), 403),
        ("box.lan".into(), 403),
        (format!("localhost:{}", port.wrapping_add(1)), 403),
        (String::new(), 403),
    ];
    let mut combinations = hosts.len();
    for (host, status) in &hosts {
        let answer = with(&[("Host", host)]);
        assert_eq!(answer.status, *status, "Host: {host}");
        assert!(*status == 200 || answer.code() == "host_not_allowed", "Host: {host}");
        assert!(cors(&answer).is_empty());
    }
    let origins: [(&[(&str, &str)], u16); 22] = [
        (&[("Origin", &own_origin)], 200),
        (&[("Origin", allowed)], 200),
        (&[("Origin", allowed), ("Sec-Fetch-Site", "cross-site")], 200),
        (&[("Origin", &own_origin), ("Sec-Fetch-Site", "same-origin")], 200),
        (&[("Sec-Fetch-Site", "none")], 200),
        (&[("Sec-Fetch-Site", "same-origin")], 200),
        // A program that is no browser says how it fetches, too.
        (&[("Sec-Fetch-Mode", "cors")], 200),
        (&[("Origin", "null")], 403),
        (&[("Origin", "")], 403),
        (&[("Origin", "http://evil.example")], 403),
        (&[("Origin", "http://localhost")], 403),
        (&[("Origin", "http://127.0.0.1")], 403),
        (&[("Origin", "http://localhost:1")], 403),
        (&[("Origin", "https://app.example.evil.example")], 403),
        (&[("Origin", "http://app.example")], 403),
        (&[("Origin", "https://app.example:444")], 403),
        (&[("Origin", "https://app.example/")], 403),
        (&[("Sec-Fetch-Site", "cross-site")], 403),
        (&[("Sec-Fetch-Site", "same-site")], 403),
        (&[("Origin", "null"), ("Sec-Fetch-Site", "cross-site")], 403),
        (&[("Origin", "http://evil.example"), ("Sec-Fetch-Site", "same-origin")], 403),
        (&[("Origin", "file://")], 403),
    ];
    combinations += origins.len();
    for (headers, status) in origins {
        let answer = with(&[&[("Host", &*own)], headers].concat());
        assert_eq!(answer.status, status, "{headers:?}");
        assert!(status == 200 || answer.code() == "origin_not_allowed", "{headers:?}");
        let is_allowed = headers.contains(&("Origin", allowed));
        assert_eq!(answer.header("access-control-allow-origin"), is_allowed.then_some(allowed), "{headers:?}");
        assert_eq!(cors(&answer).is_empty(), !is_allowed, "{headers:?}");
        assert_eq!(answer.header("access-control-allow-credentials"), None);
        assert!(answer.header("vary").is_some_and(|vary| vary.to_ascii_lowercase().contains("origin")), "{headers:?}");
    }
    assert!(combinations >= 40);
    // DNS rebinding: name and origin agree with each other, and neither is the server's.
    let rebound = with(&[("Host", &evil), ("Origin", &format!("http://{evil}")), ("Sec-Fetch-Site", "same-origin")]);
    assert_eq!((rebound.status, &*rebound.code()), (403, "host_not_allowed"));
    for twice in [[("Host", &*own), ("Host", &evil)], [("Host", &evil), ("Host", &own)]] {
        assert_eq!(with(&twice).status, 400);
    }
    assert_eq!(with(&[("Host", &own), ("Origin", &own_origin), ("Origin", "http://evil.example")]).status, 400);
    // An absolute target cannot contradict the header.
    let absolute = Request::get(&format!("http://{evil}/v1/models")).with("Authorization", &format!("Bearer {}", KEY.1));
    let answer = server.ask(&absolute.with("Host", &evil));
    assert_eq!(answer.status, 403);
}

/// What a form of another page can send without a question to the server: none of it is a request for images.
#[test]
fn forms_of_other_pages_are_not_taken() {
    let server = plain();
    let body = small(&json!({})).to_string();
    let made = server.made();
    let simple =
        ["text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", "", "application/jsonp", "text/json"];
    for path in ["/v1/images/generations", "/v1/images/edits", "/images/generations"] {
        for kind in simple {
            let answer = server.ask(&Request::new("POST", path).with("Content-Type", kind).with_body(body.clone()));
            assert_eq!((answer.status, &*answer.code()), (415, "unsupported_media_type"), "{path} {kind}");
        }
        assert_eq!(server.ask(&Request::new("POST", path).with_body(body.clone())).status, 415);
    }
    let form = Request::form("/v1/images/generations", &[Part::Text("prompt", "x")]);
    assert_eq!(server.ask(&form).status, 415, "a form can be sent without a question");
    // A form for edits can be, too: the origin is what stops it.
    let image = Part::File("image", b"x");
    let edit = || Request::form("/v1/images/edits", &[Part::Text("prompt", "x"), image]);
    assert_eq!(server.ask(&edit()).code(), "invalid_image");
    assert_eq!(server.ask(&edit().with("Origin", "http://evil.example")).status, 403);
    assert_eq!(server.ask(&edit().with("Sec-Fetch-Site", "cross-site")).status, 403);
    assert_eq!(server.made(), made);
}

#[test]
fn a_browser_asks_before_a_page_of_an_allowed_origin_sends() {
    let server = guarded();
    let preflight = |origin: &str, target: &str| {
        let request = Request::new("OPTIONS", target).with("Origin", origin).with("Access-Control-Request-Method", "POST");
        server.ask(&request.with("Access-Control-Request-Headers", "authorization,content-type,x-stainless-lang"))
    };
    // It sends no key with the question.
    let answer = preflight("https://app.example", "/v1/images/generations");
    assert_eq!(answer.status, 204, "{}", answer.text());
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(answer.header("access-control-allow-methods"), Some("POST"));
    let headers = answer.header("access-control-allow-headers").unwrap();
    for name in ["authorization", "content-type", "idempotency-key", "x-stainless-lang", "x-stainless-retry-count"] {
        assert!(headers.split(", ").any(|other| other == name), "{name} in {headers}");
    }
    assert_eq!(answer.header("access-control-allow-credentials"), None);
    for (origin, target) in [("http://evil.example", "/v1/images/generations"), ("null", "/v1/images/edits")] {
        let answer = preflight(origin, target);
        assert!(answer.status == 403 && cors(&answer).is_empty(), "{origin}");
    }
    // The answer to the request itself may be read, also when it is an error.
    let mut request = Request::json("/v1/images/generations", &json!({})).with("Origin", "https://app.example");
    let refused = server.ask(&request);
    assert_eq!((refused.status, refused.header("access-control-allow-origin")), (401, Some("https://app.example")));
    request = request.with("Authorization", &format!("Bearer {}", KEY.1));
    let refused = server.ask(&request);
    assert_eq!((refused.status, refused.header("access-control-allow-origin")), (400, Some("https://app.example")));
    assert!(refused.header("access-control-expose-headers").unwrap().contains("x-request-id"));
}

/// Spellings of images that are not in the request. `{port}` is where somebody listens, and `{file}` a pipe that nobody may open.
const REMOTE: [&str; 80] = [
    "http://127.0.0.1:{port}/a.png",
    "HTTP://127.0.0.1:{port}/a.png",
    "hTTp://127.0.0.1:{port}/",
    "https://127.0.0.1:{port}/a.png",
    "http://localhost:{port}/a.png",
    "http://LOCALHOST:{port}/a.png",
    "http://localhost.:{port}/a.png",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0x7f.0.0.1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://017700000001:{port}/",
    "http://127.1:{port}/",
    "http://127.0.1:{port}/",
    "http://0:{port}/",
    "http://0.0.0.0:{port}/",
    "http://[::1]:{port}/",
    "http://[::]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/",
    "http://[64:ff9b::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://user@127.0.0.1:{port}/",
    "http://example.com@127.0.0.1:{port}/",
    "http://user:secret@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}#@example.com/",
    "http://127.0.0.1:{port}?@example.com/",
    "http://127.0.0.1:{port}\\@example.com/",
    "http://example.com\\@127.0.0.1:{port}/",
    "http:\\\\127.0.0.1:{port}\\a.png",
    "http:/127.0.0.1:{port}/",
    "http:127.0.0.1:{port}",
    "http:///127.0.0.1:{port}/",
    "//127.0.0.1:{port}/a.png",
    "\\\\127.0.0.1:{port}\\a.png",
    "127.0.0.1:{port}/a.png",
    "http://127.0.0.1:{port}/redirect?to=http://127.0.0.1:{port}/",
    "http://127.0.0.1.nip.io:{port}/",
    "http://localtest.me:{port}/",
    "http://xn--lclhst-bua:{port}/",
    "http://\u{ff4c}\u{ff4f}\u{ff43}\u{ff41}\u{ff4c}\u{ff48}\u{ff4f}\u{ff53}\u{ff54}:{port}/",
    "http://\u{2460}\u{2461}\u{2466}.0.0.1:{port}/",
    "http://127\u{3002}0\u{3002}0\u{3002}1:{port}/",
    " http://127.0.0.1:{port}/a.png",
    "\thttp://127.0.0.1:{port}/a.png",
    "\nhttp://127.0.0.1:{port}/a.png",
    "ht\ntp://127.0.0.1:{port}/a.png",
    "http://127.0.0.1:{port}/a.png\0",
    "\u{0}http://127.0.0.1:{port}/a.png",
    "url:http://127.0.0.1:{port}/",
    "url(http://127.0.0.1:{port}/)",
    "view-source:http://127.0.0.1:{port}/",
    "jar:http://127.0.0.1:{port}/a.jar!/a.png",
    "blob:http://127.0.0.1:{port}/1",
    "ftp://127.0.0.1:{port}/a.png",
    "sftp://127.0.0.1:{port}/a.png",
    "tftp://127.0.0.1:{port}/a.png",
    "gopher://127.0.0.1:{port}/_GET",
    "dict://127.0.0.1:{port}/d:x",
    "ldap://127.0.0.1:{port}/",
    "ws://127.0.0.1:{port}/",
    "unix:///run/docker.sock",
    "s3://bucket/a.png",
    "gs://bucket/a.png",
    "hf://models/a.png",
    "file://{file}",
    "file:{file}",
    "FILE://{file}",
    "file://localhost{file}",
    "file:///proc/self/environ",
    "{file}",
    "../../../../../../../../{file}",
    "~/bait",
    "@{file}",
    "data:text/plain;base64,http://127.0.0.1:{port}/",
    "data:image/png,http://127.0.0.1:{port}/a.png",
    "data:image/png;base64,,http://127.0.0.1:{port}/",
    "data:image/svg+xml,<image href='http://127.0.0.1:{port}/'/>",
    "data://127.0.0.1:{port}/a.png",
];

#[test]
fn nothing_is_fetched_or_opened() {
    let server = plain();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (count, is_over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
    let (own_count, own_over) = (count.clone(), is_over.clone());
    let counter = std::thread::spawn(move || {
        // Whatever came before the end is counted.
        loop {
            let is_last = own_over.load(Ordering::Acquire);
            match listener.accept() {
                Ok(_) => drop(own_count.fetch_add(1, Ordering::Relaxed)),
                Err(error) if is_last => return assert_eq!(error.kind(), ErrorKind::WouldBlock),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    });
    // A pipe in a folder of its own, because another test looks at the server's. Its writer waits until somebody reads.
    let folder = common::scratch::Scratch::new();
    let pipe = folder.path().join("bait");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut writer = Command::new("sh").args(["-c", "echo x > \"$1\"", "sh"]).arg(&pipe).spawn().unwrap();
    let mut connection = server.connect();
    for spelling in REMOTE {
        let text = spelling.replace("{port}", &port.to_string()).replace("{file}", pipe.to_str().unwrap());
        let bodies = [
            json!({"images": [{"image_url": text}]}),
            json!({"image": text}),
            json!({"init": text}),
            json!({"images": [data_url(b"x")], "mask": text}),
        ];
        for body in bodies {
            let answer = connection.ask(&server.host(), &Request::json("/v1/images/edits", &small(&body)));
            assert_eq!(answer.status, 400, "{text:?}");
            let code = answer.code();
            assert!(["remote_images_not_supported", "invalid_image", "invalid_value"].contains(&&*code), "{text:?}: {code}");
            assert!(!answer.text().contains("bait"), "{}", answer.text());
        }
    }
    for id in [json!({"file_id": "file-1"}), json!({"image_url": {"url": format!("http://127.0.0.1:{port}/")}})] {
        let answer = server.ask(&Request::json("/v1/images/edits", &small(&json!({"images": [id]}))));
        assert_eq!((answer.status, &*answer.code()), (400, "remote_images_not_supported"));
    }
    // Text parts of forms, and names of files.
    let url = format!("http://127.0.0.1:{port}/a.png");
    for part in [
        Part::Text("image", &url),
        Part::Text("image_url", &url),
        Part::Named("image", &url, b"x"),
        Part::Named("image", pipe.to_str().unwrap(), b"x"),
    ] {
        let answer = server.ask(&Request::form("/v1/images/edits", &[Part::Text("prompt", "x"), part]));
        assert_eq!(answer.status, 400, "{part:?}");
    }
    assert_eq!(writer.try_wait().unwrap(), None, "nobody reads the pipe");
    assert_eq!(count.load(Ordering::Relaxed), 0, "nobody connects");
    // Controls: a reader of the pipe and a connection are noticed.
    assert_eq!(std::fs::read(&pipe).unwrap(), b"x\n");
    assert!(writer.wait().unwrap().success());
    drop(TcpStream::connect(("127.0.0.1", port)).unwrap());
    is_over.store(true, Ordering::Release);
    counter.join().unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 1);
}
