//! Requests that were made to hurt: paths in every field, sizes that lie, numbers out of range, images that unfold.

use super::server::{Server, data_url, plain, small};
use common::http::{Answer, Part, Request};
use common::random::long;
use common::sandbox::Sandbox;
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

const GENERATIONS: &str = "/v1/images/generations";

/// Ways out of a folder. `X` is a name that nobody else uses.
const TRAVERSALS: [&str; 60] = [
    "../X",
    "../../X",
    "../../../../../../../../tmp/X",
    "/tmp/X",
    "//tmp/X",
    "/tmp//X",
    "/tmp/./X",
    "./X",
    "X",
    "X.png",
    ".X",
    "X/",
    "X/..",
    "X/../../X",
    "..",
    ".",
    "...",
    "..../X",
    "....//....//X",
    "..\\X",
    "..\\..\\X",
    "\\X",
    "\\\\host\\share\\X",
    "C:\\X",
    "C:X",
    "file:///tmp/X",
    "~/X",
    "~root/X",
    "$HOME/X",
    "${HOME}/X",
    "%HOME%\\X",
    "%2e%2e%2fX",
    "%2e%2e/X",
    "..%2fX",
    "..%5cX",
    "%252e%252e%252fX",
    "..%c0%afX",
    "..%c1%9cX",
    "%uff0e%uff0e/X",
    "\u{ff0e}\u{ff0e}/X",
    "..\u{2215}X",
    "..\u{2044}X",
    "..\u{ff0f}X",
    "..\0/X",
    "../X\0.png",
    "X\0",
    "../X\n",
    "\n../X",
    "../X\r\nX: 1",
    "\u{1b}]52;c;WA==\u{7}X",
    "\u{202e}gnp.X",
    "X;touch X",
    "$(touch X)",
    "`touch X`",
    "|touch X",
    "&touch X",
    "> X",
    "/dev/stdout",
    "/proc/self/fd/2",
    "/dev/shm/X",
];

#[test]
fn no_field_is_a_path() {
    let server = Server::start(&[]);
    let name = format!("kiln-traversal-{}", std::process::id());
    fs::write(server.sandbox.path("there"), "before").unwrap();
    let before = server.sandbox.names();
    let checked = [
        "model",
        "size",
        "response_format",
        "output_format",
        "background",
        "seed",
        "aspect",
        "noise_kind",
        "precision",
        "preview",
        "lora",
        "extend",
        "strength",
        "init_reference",
        "markup",
        "n",
        "steps",
        "stream",
        "images",
        "init",
        "mask",
        "width",
        "feather",
    ];
    let mut connection = server.connect();
    let mut ask = |request: &Request, what: &str| {
        let answer = connection.ask(&server.host(), request);
        assert!(matches!(answer.status, 200 | 400 | 404 | 422), "{what}: {}", answer.status);
        // What a client sent may be repeated, but never as it was: a log or a terminal may show it.
        assert!(!answer.body.iter().any(|byte| *byte < b' '), "{what}: {}", answer.text());
        if answer.header("connection") == Some("close") {
            connection = server.connect();
        }
        answer
    };
    for (index, traversal) in TRAVERSALS.into_iter().enumerate() {
        let text = traversal.replace('X', &name);
        for field in checked {
            let answer = ask(&Request::json(GENERATIONS, &small(&json!({field: text}))), field);
            assert!(matches!(answer.status, 400 | 404), "{field} {text:?}: {}", answer.status);
        }
        // Fields that take any text. The last member keeps the engine out of it, but for a few.
        let is_made = long() || index % 12 == 0;
        let any = json!({
            "prompt": text.replace('\0', ""), "negative_prompt": text.replace('\0', ""), "quality": text, "style": text,
            "moderation": text, "input_fidelity": text, "complexity": text, "user": text, "safety_identifier": text, (&*text): text,
            "filename": text, "output": text, "path": [text], "model": if is_made { "kiln" } else { "other" },
        });
        let answer = ask(&Request::json(GENERATIONS, &small(&any)), "text");
        assert_eq!(answer.status, if is_made { 200 } else { 404 }, "{text:?}: {}", String::from_utf8_lossy(&answer.body));
        // Names of parts and files, ids in paths, and headers.
        let plain: String = text.chars().filter(|c| !c.is_control() && *c != '"').collect();
        let parts = [Part::Text("prompt", &text), Part::Named("image", &plain, b"x"), Part::Named(&plain, &plain, b"x")];
        assert_eq!(ask(&Request::form("/v1/images/edits", &parts), "form").status, 400, "{text:?}");
        let word: String = plain.chars().filter(|c| c.is_ascii_graphic()).collect();
        for path in ["/v1/images/", "/v1/models/", "/"] {
            let answer = ask(&Request::get(&format!("{path}{word}")), path);
            // These are the table's own routes.
            let is_route = matches!(&*format!("{path}{word}"), "/" | "/v1/models");
            assert!(is_route || matches!(answer.status, 400 | 404), "{path}{word}: {}", answer.status);
        }
        let headers = Request::json(GENERATIONS, &json!({})).with("Idempotency-Key", &plain);
        assert_eq!(ask(&headers, "headers").status, 400);
    }
    assert_eq!(server.sandbox.names(), before);
    assert_eq!(fs::read(server.sandbox.path("there")).unwrap(), b"before");
    let outside = [std::env::temp_dir(), "/".into(), "/dev/shm".into(), server.sandbox.0.parent().unwrap().into()];
    for folder in outside {
        assert!(!folder.join(&name).exists() && !folder.join(format!("{name}.png")).exists(), "{folder:?}");
    }
    // A line of the log stays one, and has no control characters.
    let log = server.log();
    assert!(
        !log.contains('\u{1b}')
            && log.lines().filter(|line| line.contains("event=request")).all(|line| line.starts_with("time="))
    );
    assert!(!log.contains(&name), "nothing that a client sent is logged");
}

/// Expects that a request is refused with this status.
fn refused(fields: &Value, param: &str) {
    let answer = plain().generate(&small(fields));
    assert_eq!((answer.status, answer.param().as_deref()), (400, Some(param)), "{fields}: {}", answer.text());
}

#[test]
fn numbers_have_ranges() {
    let far = [
        json!(-1),
        json!(1e300),
        json!(u64::MAX),
        json!(1.5),
        json!("1e9"),
        json!("NaN"),
        json!([1]),
        json!({}),
        json!(true),
        json!(""),
    ];
    for name in [
        "n",
        "steps",
        "num_inference_steps",
        "step",
        "width",
        "height",
        "partial_images",
        "output_compression",
        "feather",
        "mask_crop",
    ] {
        for value in &far {
            refused(&json!({name: value, "size": null}), if name == "size" { "size" } else { name });
        }
    }
    for (name, values) in [
        ("n", json!([0, 11, 4_294_967_296_u64])),
        ("steps", json!([0, 65, 1_000_000])),
        ("guidance", json!([-0.1, 30.5, "inf", "nan", 1e39])),
        ("seed", json!([-2, 1.5, "0x7", "18446744073709551616", [7]])),
        ("size", json!(["0x0", "16x16", "1000x1000", "-64x64", "64x", "x64", "64", "64x64x64", "9999999999999999999999x64", 64])),
        ("size", json!(["1048576x64", "64x1048576", "65536x65536"])),
        ("strength", json!([0, -1, 1.5, "x"])),
        ("stream", json!(["true", 1, "yes"])),
        ("prompt", json!([7, ["x"], {"text": "x"}, "x".repeat(32_769), "a\0b"])),
        ("output_format", json!(["gif", "svg", "PNG", 7])),
        ("background", json!(["transparent", 7])),
        ("response_format", json!(["b64", "", 7])),
        ("lora", json!(["a:1e9", {"name": 7}, 7, {"name": "a", "scale": "x"}])),
    ] {
        for value in values.as_array().unwrap() {
            let answer = plain().generate(&small(&json!({name: value})));
            assert_eq!(answer.status, 400, "{name} {value}: {}", answer.text());
            let param = answer.param().unwrap();
            assert!(param.starts_with(name), "{name} {value}: {}", answer.text());
        }
    }
    let missing = plain().generate(&json!({"size": "64x64"}));
    assert_eq!((missing.status, missing.param().as_deref()), (400, Some("prompt")));
    // What is large and allowed is refused for its cost, without any work.
    let dear = plain().generate(&small(&json!({"size": "2048x2048", "steps": 64})));
    assert_eq!((dear.status, &*dear.code()), (400, "too_expensive"), "{}", dear.text());
}

#[test]
fn json_has_limits() {
    let ask = |body: &[u8]| -> Answer {
        let request = Request::new("POST", GENERATIONS).with("Content-Type", "application/json").with_body(body);
        plain().ask(&request)
    };
    let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    let fine = ask(format!("{{\"prompt\": \"\", \"model\": \"other\", \"deep\": {}}}", nested(15)).as_bytes());
    assert_eq!(fine.code(), "model_not_found", "16 levels are fine");
    for body in [
        format!("{{\"prompt\": \"\", \"deep\": {}}}", nested(16)),
        nested(1_000_000),
        "[".repeat(10_000_000),
        "{\"a\":".repeat(100_000),
        String::new(),
        "null".into(),
        "[]".into(),
        "\"x\"".into(),
        "{".into(),
        "{}{}".into(),
        "{\"prompt\": \"x\",}".into(),
        "{'prompt': 'x'}".into(),
        "{\"prompt\": NaN}".into(),
        "{\"prompt\": \"\\ud800\"}".into(),
        "\u{feff}{\"prompt\": \"x\"}".into(),
        "prompt=x".into(),
    ] {
        let answer = ask(body.as_bytes());
        assert_eq!((answer.status, &*answer.code()), (400, "invalid_json"), "{}", body.get(..40).unwrap_or(&body));
    }
    assert_eq!(ask(b"{\"prompt\": \"\xFF\"}").code(), "invalid_json");
    // Two values of one member: the last one counts or none does, but nothing breaks.
    assert!(matches!(ask(b"{\"prompt\": \"x\", \"n\": 99, \"n\": 0}").status, 400));
    let many: Vec<String> = (0..100_000).map(|i| format!("\"field-{i}\": {i}")).collect();
    let answer = ask(format!("{{\"prompt\": \"\", \"model\": \"other\", {}}}", many.join(",")).as_bytes());
    assert_eq!(answer.code(), "model_not_found");
}

#[test]
fn forms_have_limits() {
    let ask = |parts: &[Part<'_>]| plain().ask(&Request::form("/v1/images/edits", parts));
    let prompt = Part::Text("prompt", "x");
    assert_eq!(ask(&vec![prompt; 33]).status, 400);
    assert_eq!(ask(&vec![Part::Text("a", ""); 100_000]).status, 400);
    let long = "x".repeat((64 << 10) + 1);
    assert_eq!(ask(&[Part::Text("anything", &long)]).param().as_deref(), Some("anything"));
    assert_eq!(ask(&[Part::File("prompt", b"x")]).param().as_deref(), Some("prompt"));
    assert_eq!(ask(&[prompt, Part::Text("image", "x")]).status, 400);
    let whole = Request::form("/v1/images/edits", &[prompt, Part::File("image", b"x")]);
    for cut in [0, 1, 10, whole.body.len() / 2, whole.body.len() - 3] {
        let answer = plain().ask(&whole.clone().with_body(&whole.body[..cut]));
        assert_eq!((answer.status, &*answer.code()), (400, "invalid_value"), "{cut}");
    }
    for kind in [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"",
        "multipart/mixed; boundary=x",
    ] {
        let answer = plain().ask(&Request::new("POST", "/v1/images/edits").with("Content-Type", kind).with_body("--x--"));
        assert!(matches!(answer.status, 400 | 415), "{kind}: {}", answer.status);
    }
}

/// The head of a PNG of this size, with the start of its pixels.
fn claimed(width: u32, height: u32) -> Vec<u8> {
    let sandbox = Sandbox::new();
    sandbox.write_png("a.png", 64, 64, |x, y| [x as u8, y as u8, 0]);
    let mut file = fs::read(sandbox.path("a.png")).unwrap();
    file[16..20].copy_from_slice(&width.to_be_bytes());
    file[20..24].copy_from_slice(&height.to_be_bytes());
    let mut crc = !0_u32;
    for byte in &file[12..29] {
        crc ^= u32::from(*byte);
        (0..8).for_each(|_| crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 });
    }
    file[29..33].copy_from_slice(&(!crc).to_be_bytes());
    file
}

#[test]
fn images_do_not_unfold() {
    let server = Server::start(&[]);
    let form = |file: &[u8]| {
        Request::form("/v1/images/edits", &[Part::Text("prompt", "x"), Part::Text("steps", "1"), Part::File("image", file)])
    };
    // The head that this test writes is right: with its own size the file is an image.
    server.ask(&form(&claimed(64, 64))).good();
    let before = server.kib("VmHWM");
    let start = Instant::now();
    for (width, height) in
        [(60_000, 60_000), (u32::MAX >> 1, u32::MAX >> 1), (16_384, 16_384), (100_000, 1), (0, 64), (64, 0), (12_000, 8_000)]
    {
        let file = claimed(width, height);
        let json = small(&json!({"init": data_url(&file), "strength": 0.5}));
        for request in [form(&file), Request::json(GENERATIONS, &json)] {
            let answer = server.ask(&request);
            assert_eq!((answer.status, &*answer.code()), (400, "invalid_image"), "{width}x{height}: {}", answer.text());
        }
    }
    // Decoding any of them would take gigabytes, and more time than this on any machine.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let grown = server.kib("VmHWM") - before;
    assert!(grown < 64 << 10, "{grown} KiB");
    server.generate(&small(&json!({}))).good();
}

/// A request that is refused or fails leaves nothing behind: the next one has the bytes that it always has.
#[test]
fn poisoned_requests_are_followed_by_good_ones() {
    let server = plain();
    let want = server.generate(&small(&json!({}))).good().image(0);
    let files = Sandbox::new();
    files.write_png("a.png", 64, 64, |_, _| [7; 3]);
    let image = fs::read(files.path("a.png")).unwrap();
    let poisons = [
        Request::json(GENERATIONS, &small(&json!({"n": 99}))),
        Request::json(GENERATIONS, &small(&json!({"images": ["***"]}))),
        Request::new("POST", GENERATIONS).with("Content-Type", "application/json").with_body("{"),
        Request::form("/v1/images/edits", &[Part::Text("prompt", "x"), Part::File("image", &image[..100])]),
        Request::form("/v1/images/edits", &[Part::Text("prompt", "x"), Part::File("image", &image), Part::File("mask", b"x")]),
        Request::json(GENERATIONS, &small(&json!({"lora": "none"}))),
        Request::json(GENERATIONS, &small(&json!({"model": "other"}))),
        Request::json(GENERATIONS, &small(&json!({"precision": "bf16"}))),
        Request::json(GENERATIONS, &small(&json!({"size": "2048x2048", "steps": 64}))),
        Request::new("BREW", GENERATIONS),
        Request::json("/v1/images/variations", &json!({})),
    ];
    let count = if long() { 1000 } else { poisons.len() };
    for poison in poisons.iter().cycle().take(count) {
        let answer = server.ask(poison);
        assert!((400..500).contains(&answer.status), "{poison:?}: {}", answer.status);
        assert!(server.generate(&small(&json!({}))).good().image(0) == want, "after {poison:?}");
    }
}
