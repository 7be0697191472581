//! Images as answers: the bytes of `kiln generate`, in each form in which they are handed over.

use super::server::{Server, generated, plain, small};
use common::adapter_files::{PEFT, file, lora};
use common::http::Request;
use common::sandbox::{Png, Sandbox};
use kiln::internals::tensor::DType;
use serde_json::json;
use std::fs;

#[test]
fn images_have_the_bytes_of_the_command() {
    let (server, sandbox) = (plain(), Sandbox::new());
    for (name, extension) in [("png", "png"), ("jpeg", "jpg"), ("webp", "webp")] {
        let path = format!("a.{extension}");
        generated(&sandbox, &["--width", "64", "--height", "64", "-o", &path]);
        let want = fs::read(sandbox.path(&path)).unwrap();
        let kind = format!("image/{name}");
        let body = small(&json!({"output_format": name, "quality": "high"}));
        let answer = server.generate(&body).good();
        assert!(answer.image(0) == want, "{name} in base64");
        let found = answer.json();
        assert_eq!(
            (&found["data"][0]["seed"], &found["output_format"], &found["size"]),
            (&json!(7), &json!(name), &json!("64x64"))
        );
        assert_eq!((&found["quality"], &found["background"]), (&json!("high"), &json!("opaque")));
        let usage = json!({"input_tokens": 64, "input_tokens_details": {"text_tokens": 64, "image_tokens": 0}, "output_tokens": 16, "total_tokens": 80});
        assert_eq!(found["usage"], usage);
        assert_eq!((&found["kiln"]["steps"], &found["kiln"]["warnings"]), (&json!(1), &json!([])));
        assert!(found["kiln"]["ms"].is_u64() && found["kiln"]["queue_ms"].is_u64() && found["created"].is_u64());
        assert_eq!((answer.header("x-kiln-seed"), answer.header("content-type")), (Some("7"), Some("application/json")));
        assert!(answer.header("x-kiln-ms").unwrap().parse::<u64>().is_ok());

        // The file itself: its kind decides the format, unless the request does.
        for body in [&body, &small(&json!({}))] {
            let generation = Request::json("/v1/images/generations", body).with("Accept", &format!("text/html, {kind};q=0.9"));
            let answer = server.ask(&generation).good();
            assert_eq!((answer.header("content-type"), answer.header("x-kiln-seed")), (Some(&*kind), Some("7")));
            assert!(answer.body == want, "{name} as the answer to {body}");
        }

        // A URL, which needs no name that the client did not use.
        let by_url = small(&json!({"output_format": name, "response_format": "url"}));
        let url = server.generate(&by_url).good().json()["data"][0]["url"].as_str().unwrap().to_owned();
        let path = url.strip_prefix(&format!("http://{}", server.address)).expect(&url);
        assert!(path.strip_prefix("/v1/images/").is_some_and(|id| id.len() == 32), "{path}");
        let answer = server.get(path).good();
        assert_eq!(answer.header("content-type"), Some(&*kind));
        assert!(answer.body == want, "{name} by its URL");
        let answer = server.ask(&Request::new("HEAD", path));
        assert_eq!((answer.header("content-length"), answer.body.len()), (Some(&*want.len().to_string()), 0));
    }
}

#[test]
fn seeds_are_in_a_row() {
    let (server, sandbox) = (plain(), Sandbox::new());
    generated(&sandbox, &["--width", "64", "--height", "64", "--count", "3", "-o", "a.png"]);
    // Several images are no file, whatever the client accepts.
    let request = Request::json("/v1/images/generations", &small(&json!({"n": 3}))).with("Accept", "image/png");
    let answer = server.ask(&request).good();
    for index in 0..3 {
        assert!(answer.image(index) == fs::read(sandbox.path(&format!("a-{}.png", index + 1))).unwrap(), "image {index}");
        assert_eq!(answer.json()["data"][index]["seed"], 7 + index);
    }
    assert_eq!(answer.json()["usage"]["output_tokens"], 48);
    assert_eq!(answer.json()["data"].as_array().unwrap().len(), 3);
    // A seed that kiln draws is in the answer, and makes the image again.
    let drawn = |seed| server.generate(&small(&json!({"seed": seed}))).good();
    let (first, second) = (drawn(json!(null)), drawn(json!(-1)));
    let seed = first.json()["data"][0]["seed"].as_u64().unwrap();
    assert!(seed < 1 << 32 && first.json()["data"][0]["seed"] != second.json()["data"][0]["seed"]);
    assert!(drawn(json!(seed.to_string())).image(0) == first.image(0));
    let last = server.generate(&small(&json!({"seed": u64::MAX.to_string(), "n": 2})));
    assert_eq!((last.status, last.param().as_deref()), (400, Some("seed")));
    assert_eq!(drawn(json!(u64::MAX)).json()["data"][0]["seed"], u64::MAX);
}

#[test]
fn requests_have_ids_and_unknown_fields_are_named() {
    let server = plain();
    let given =
        |id: &str| server.ask(&Request::get("/health").with("X-Request-Id", id)).header("x-request-id").unwrap().to_owned();
    for id in ["a", "req_7-B", &"x".repeat(64)] {
        assert_eq!(given(id), id);
    }
    for id in ["", "a b", "../../etc", "a\u{e9}", &"x".repeat(65)] {
        assert_ne!(given(id), id);
    }
    assert_ne!(given(""), given(""));
    let id = "kept-while-refused";
    let refused = server.ask(&Request::get("/nothing").with("x-request-id", id));
    assert_eq!((refused.status, refused.header("x-request-id")), (404, Some(id)));
    assert!(server.wait_for(&format!("id={id} ")).contains("route=none status=404"));
    let ignored = server.metric("kiln_ignored_fields_total");
    let body = small(&json!({"free": {"deep": [1]}, "cfg": 3, "a\r\nx-evil: 1": 1, "style": "vivid", "user": "u", "n": null}));
    let answer = server.generate(&body).good();
    assert_eq!(answer.header("x-kiln-ignored"), Some("ax-evil: 1, cfg, free"));
    assert_eq!(answer.header("x-evil"), None);
    assert!(server.metric("kiln_ignored_fields_total") >= ignored + 3.0);
    assert_eq!(server.generate(&small(&json!({}))).good().header("x-kiln-ignored"), None);
}

#[test]
fn the_server_describes_itself() {
    let server = plain();
    let id = "flux.2-klein-tiny-distilled";
    for path in ["/v1/models", "/models"] {
        let list = server.get(path).good().json();
        let created = &list["data"][0]["created"];
        let one = json!({"id": id, "object": "model", "created": created, "owned_by": "kiln"});
        assert_eq!(list, json!({"object": "list", "data": [one]}));
        for name in [id, "kiln", "gpt-image-1", "dall-e-3"] {
            assert_eq!(server.get(&format!("{path}/{name}")).good().json(), one, "{name}");
        }
        let other = server.get(&format!("{path}/gpt-4"));
        assert_eq!((other.status, &*other.code()), (404, "model_not_found"));
        assert!(other.message().contains(id), "{}", other.message());
    }
    let other = server.generate(&small(&json!({"model": "flux.1-dev"})));
    assert_eq!((other.status, &*other.code(), other.param().as_deref()), (404, "model_not_found", Some("model")));
    assert!(other.message().contains(id), "{}", other.message());
    let by_url = server.generate(&small(&json!({"model": "dall-e-2"}))).good().json();
    assert!(by_url["data"][0]["url"].is_string() && by_url["data"][0].get("b64_json").is_none());
    let status = server.get("/kiln/status").good().json();
    let model = &status["model"];
    assert_eq!((&model["id"], &model["width"], &model["precision"]), (&json!(id), &json!(64), &json!("f32")));
    assert_eq!((&status["server"]["state"], &status["limits"]["images"]), (&json!("ready"), &json!(10)));
    assert!(status["queue"]["waiting"].is_u64() && status["predict"]["token_ms"].is_number(), "{status}");
    assert!(server.get("/openapi.json").good().json()["openapi"].as_str().is_some_and(|version| version.starts_with("3.")));
    assert!(server.get("/").good().text().contains("/v1/images/generations"));
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).good().header("cache-control"), Some("no-store"));
    }
    let metrics = server.get("/metrics").good();
    for name in [
        "kiln_requests_total{route=\"models\",status=\"200\"}",
        "kiln_images_total{result=\"done\"}",
        "kiln_queue_length",
        "kiln_queue_predicted_seconds",
        "kiln_queue_seconds_count",
        "kiln_image_seconds_count",
        "kiln_stage_seconds_count{stage=\"denoise\"}",
        "kiln_stage_seconds_count{stage=\"decode\"}",
        "kiln_host_bytes{kind=\"urls\"}",
        "kiln_connections",
        "kiln_ignored_fields_total",
        "kiln_build_info{version=",
    ] {
        assert!(metrics.text().lines().any(|line| line.starts_with(name)), "{name} in {}", metrics.text());
    }
}

#[test]
fn adapters_have_names() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("styles")).unwrap();
    for (name, scale) in [("ink", 1.0), ("oil", 0.5)] {
        let layer = lora("diffusion_model.double_blocks.0.img_attn.qkv", PEFT, [768, 256], 1);
        let tensors: Vec<_> = layer.into_iter().map(|factor| factor.times(scale)).collect();
        fs::write(sandbox.path(&format!("styles/{name}.safetensors")), file(&tensors, DType::F32, &[])).unwrap();
    }
    // Neither is an adapter.
    fs::write(sandbox.path("styles/.hidden.safetensors"), "x").unwrap();
    fs::write(sandbox.path("styles/notes.txt"), "x").unwrap();
    let server =
        Server::in_sandbox(sandbox, &["--adapters", "styles", "--metadata", "none", "--public-url", "https://images.example/"]);
    let url = server.generate(&small(&json!({"response_format": "url"}))).good().json()["data"][0]["url"].clone();
    assert!(url.as_str().unwrap().starts_with("https://images.example/v1/images/"), "{url}");
    assert_eq!(server.get("/kiln/status").good().json()["adapters"], json!(["ink", "oil"]));
    let made = |lora| server.generate(&small(&json!({"lora": lora}))).good().image(0);
    let command = |flags: &[&str]| {
        let usual = ["--width", "64", "--height", "64", "--metadata", "none", "--lora-mode", "branch", "-o", "a.png"];
        generated(&server.sandbox, &[&usual, flags].concat());
        fs::read(server.sandbox.path("a.png")).unwrap()
    };
    let (plain, ink) = (made(json!([])), made(json!("ink")));
    assert!(plain != ink && Png::decode(&ink).text.is_empty(), "no metadata");
    assert!(ink == command(&["--lora", "styles/ink.safetensors"]));
    let both = made(json!(["ink:0.5", {"name": "oil", "scale": -1}]));
    assert!(both == command(&["--lora", "styles/ink.safetensors:0.5", "--lora", "styles/oil.safetensors:-1"]));
    assert!(made(json!(null)) == plain, "adapters belong to their request");
    let unknown = server.generate(&small(&json!({"lora": ["ink", "watercolor"]})));
    assert_eq!((unknown.status, &*unknown.code(), unknown.param().as_deref()), (400, "invalid_value", Some("lora[1]")));
    assert!(unknown.message().contains("`watercolor`") && unknown.message().contains("`ink`, `oil`"), "{}", unknown.message());
    for name in ["styles/ink", "../ink", "ink.safetensors", ".hidden", "/etc/passwd", "INK", "ink:x", ""] {
        let refused = server.generate(&small(&json!({"lora": name})));
        assert_eq!((refused.status, &*refused.code()), (400, "invalid_value"), "{name}");
    }
}
