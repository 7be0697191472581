//! What the server says of itself: health, metrics, the list of models, and what a page needs to know.

use super::answer::{self, Answer};
use super::limits::{BODY_BYTES, IMAGE_SECONDS, WAITING_SECONDS};
use super::metrics::Gauges;
use super::server::{Phase, Running, Server};
use kiln::api::{ApiError, MAX_COUNT, MAX_IMAGES, MAX_STEPS};
use kiln::locate::Found;
use kiln::{MAX_PROMPT_BYTES, Variant};
use serde_json::{Value, json};

/// The description of the API.
pub const OPEN_API: &str = include_str!("openapi.json");

/// Prompts that the built-in model can draw.
const EXAMPLES: [&str; 3] = [
    "a large red star on a blue background",
    "a small green circle and a large yellow heart on a black background",
    "a large white moon on a purple background",
];

/// The program's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Whether the process can go on. A device that has failed does not come back.
pub fn health(server: &Server) -> Answer {
    match server.phase() {
        Phase::Faulted => answer::json(503, &json!({"status": "gpu_fault"})),
        _ => answer::json(200, &json!({"status": "ok"})),
    }
}

/// Whether requests are taken now.
pub fn ready(server: &Server) -> Answer {
    let (status, word) = match server.phase() {
        Phase::Ready => (200, "ready"),
        Phase::Loading => (503, "loading"),
        Phase::Draining | Phase::Ended => (503, "shutting_down"),
        Phase::Faulted => (503, "gpu_fault"),
    };
    answer::json(status, &json!({"status": word}))
}

/// The running engine, also while it ends.
fn running(server: &Server) -> Result<&Running, ApiError> {
    server.running().map_or_else(|| server.check_open(), Ok)
}

/// OpenAI's list of models.
pub fn models(server: &Server) -> Result<Value, ApiError> {
    let model = &running(server)?.model;
    Ok(json!({"object": "list", "data": [{"id": model.id, "object": "model", "created": model.created, "owned_by": "kiln"}]}))
}

/// One model of the list.
pub fn model(server: &Server, id: &str) -> Result<Value, ApiError> {
    let model = &running(server)?.model;
    if !super::model::is_name_of(id, &model.id) {
        let message = format!("there is no such model here; this server has `{}`", model.id);
        return Err(ApiError { status: 404, ..ApiError::new("model_not_found", "model", message) });
    }
    Ok(json!({"id": model.id, "object": "model", "created": model.created, "owned_by": "kiln"}))
}

/// What a page and a command line need to know: the model, limits, the queue, and how to predict times.
pub fn status(server: &Server) -> Value {
    let phase = match server.phase() {
        Phase::Loading => "loading",
        Phase::Ready => "ready",
        Phase::Draining | Phase::Ended => "shutting_down",
        Phase::Faulted => "gpu_fault",
    };
    let mut status = json!({"server": {"version": VERSION, "boot": server.boot, "state": phase}});
    let Some(Running { service, model, .. }) = server.running() else { return status };
    let (profile, defaults) = (&model.profile, &model.profile.defaults);
    status["server"]["device"] = json!(model.device);
    status["server"]["backend"] = json!(model.backend);
    status["model"] = json!({
        "id": model.id,
        "name": profile.name,
        "model_id": model.origin.model_id,
        "builtin": matches!(model.found, Found::BuiltIn(_)),
        "variant": profile.variant.to_string(),
        "precision": profile.precision.name(),
        "width": defaults.width,
        "height": defaults.height,
        "steps": defaults.steps(profile.variant),
        "guidance": defaults.guide(profile.variant, None).chosen,
        "takes_guidance": matches!(profile.variant, Variant::Base | Variant::Dev),
        "takes_negative": profile.variant == Variant::Base,
        "max_init_pixels": defaults.max_reference_pixels,
    });
    status["limits"] = json!({
        "references": MAX_IMAGES,
        "images": MAX_COUNT,
        "steps": MAX_STEPS,
        "prompt_bytes": MAX_PROMPT_BYTES,
        "body_bytes": BODY_BYTES,
        "waiting": server.config.max_waiting,
        "waiting_seconds": WAITING_SECONDS,
        "image_seconds": IMAGE_SECONDS,
    });
    let predicted = service.seconds_waiting() + service.seconds_running();
    status["queue"] = json!({"waiting": service.waiting(), "predicted_ms": (predicted * 1e3).round()});
    status["predict"] = model.coefficients().map_or(Value::Null, |[fixed, token, token2, pixel]| {
        json!({"fixed_ms": fixed * 1e3, "token_ms": token * 1e3, "token2_ms": token2 * 1e3, "pixel_ms": pixel * 1e3})
    });
    status["adapters"] = model.adapters.keys().cloned().collect();
    let examples: &[&str] = if matches!(model.found, Found::BuiltIn(_)) { &EXAMPLES } else { &[] };
    status["examples"] = json!(examples);
    status
}

/// All metrics as text.
pub fn metrics(server: &Server) -> String {
    let running = server.running();
    let service = running.map(|running| &running.service);
    let kept = [("urls", server.store().bytes()), ("retries", server.retries.bytes())];
    let held = [("uploads", server.uploads.held()), ("decoded", server.decoded.held())];
    server.metrics.text(&Gauges {
        queue_length: service.map_or(0, |service| service.waiting()),
        queue_seconds: service.map_or(0.0, |service| service.seconds_waiting() + service.seconds_running()),
        connections: server.connections(),
        host_bytes: held.into_iter().chain(kept).collect(),
        device_free: service.and_then(|service| service.device_free()),
        version: VERSION,
        backend: running.map_or(String::new(), |running| running.model.backend.into()),
    })
}

/// What somebody sees who opens the server in a browser.
pub fn index(server: &Server) -> String {
    let name = server.model_name();
    let model = if name.is_empty() { "The model is being loaded.".to_owned() } else { format!("The model is {name}.") };
    format!(
        "kiln {VERSION} serves OpenAI's images API. {model}\n\n\
         POST /v1/images/generations   {{\"prompt\": \"a red fox in the snow\"}}\n\
         POST /v1/images/edits         a form with prompt, image and mask\n\
         GET  /v1/models, /kiln/status, /openapi.json, /metrics, /health, /ready\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::route::{ROUTES, Row};
    use kiln::api::{ApiResult, Part, Request, Route};
    use std::collections::BTreeSet;
    use std::path::Path;

    /// What the description has at a path, such as `/info/version`.
    fn described(at: &str) -> Value {
        let document: Value = serde_json::from_str(OPEN_API).unwrap();
        document.pointer(at).unwrap_or_else(|| panic!("there is no {at}")).clone()
    }

    /// The code of the Rust files in a folder on one line each, without unit tests.
    fn sources(folder: &str) -> Vec<String> {
        let folder = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        let files = folder.map(|file| file.unwrap().path()).filter(|path| path.extension().is_some_and(|kind| kind == "rs"));
        files.map(|path| on_one_line(&std::fs::read_to_string(path).unwrap())).collect()
    }

    /// The code of a file, as if no line ended within parentheses or brackets.
    fn on_one_line(source: &str) -> String {
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        code.split_whitespace().collect::<Vec<_>>().join(" ").replace("( ", "(").replace("[ ", "[").replace(", ]", "]")
    }

    /// The texts in quotes right after a mark.
    fn quoted_after<'a>(code: &'a str, mark: &str) -> Vec<&'a str> {
        code.split(mark).skip(1).filter_map(|rest| rest.strip_prefix('"')?.split('"').next()).collect()
    }

    #[test]
    fn the_description_has_every_route() {
        let paths = described("/paths");
        for row in ROUTES {
            // Paths of OpenAI's API are described with `/v1`.
            let is_main = |other: &&Row| other.route == row.route && other.path.starts_with("/v1");
            let main = ROUTES.iter().find(is_main).unwrap_or(row).path;
            let operation = &paths[main][row.method.as_str().to_lowercase()];
            let text = operation["description"].as_str().unwrap_or_default();
            assert!(!text.is_empty(), "{} {main} is not described", row.method);
            assert!(main == row.path || text.contains(&format!("`{}`", row.path)), "{} is not mentioned", row.path);
            // An operation that says nothing of security needs a key, if the server has keys.
            let is_open = operation.get("security").is_some_and(|security| *security == json!([]));
            assert_eq!(is_open, row.is_open, "{}", row.path);
        }
        for (path, operations) in paths.as_object().unwrap() {
            for method in operations.as_object().unwrap().keys() {
                let is_it = |row: &Row| row.path == path && row.method.as_str().to_lowercase() == *method;
                assert!(ROUTES.iter().any(is_it), "there is no {method} {path}");
            }
        }
        assert_eq!(described("/info/version"), VERSION);
    }

    #[test]
    fn the_description_has_every_field() {
        let fields = |schema: &str| {
            let properties = described(&format!("/components/schemas/{schema}/properties"));
            properties.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>()
        };
        let settings = fields("Settings");
        let (json, form) = (&settings | &fields("JsonImages"), &settings | &fields("FormImages"));
        let of_json = |name: &str| {
            let body = json!({"prompt": "x", name: 7}).to_string();
            Request::of_json(Route::Generations, body.as_bytes())
        };
        let of_form = |name: &str| {
            let parts = [("prompt", "x"), (name, "7")].map(|(name, text)| (name.to_owned(), Part::Text(text.into())));
            Request::of_form(Route::Generations, parts.into())
        };
        // An error is about a value, so its field is known.
        let is_known = |read: ApiResult<Request>| read.map_or(true, |request| request.ignored.is_empty());
        assert!(!is_known(of_json("unheard")) && !is_known(of_form("unheard")));
        json.iter().for_each(|name| assert!(is_known(of_json(name)), "no request has the field {name}"));
        form.iter().for_each(|name| assert!(is_known(of_form(name)), "no form has the field {name}"));

        // Names are in lists: in calls that read a field, and in constants.
        let code = on_one_line(include_str!("../../../api/request.rs"));
        let lists = ["(&[\"", "] = [\""].into_iter().flat_map(|mark| code.split(mark).skip(1));
        let names = lists.flat_map(|list| list.split("\"]").next().unwrap_or_default().split("\", \""));
        let names: BTreeSet<&str> = names.collect();
        assert!(names.len() > 45, "{names:?}");
        for name in names {
            assert!(json.contains(name) && form.contains(name), "the field {name} is not described");
        }
    }

    #[test]
    fn the_description_has_every_limit() {
        let limit = |at: &str| described(&format!("/components/schemas/{at}"));
        assert_eq!(limit("Settings/properties/n/maximum"), MAX_COUNT);
        assert_eq!(limit("Settings/properties/steps/maximum"), MAX_STEPS);
        assert_eq!(limit("JsonImages/properties/image/anyOf/1/maxItems"), MAX_IMAGES);
        assert_eq!(limit("FormImages/properties/image/maxItems"), MAX_IMAGES);
    }

    #[test]
    fn the_description_has_every_error() {
        let codes = described("/components/schemas/Error/properties/error/properties/code/enum");
        let codes: BTreeSet<&str> = codes.as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let sources: Vec<String> = ["src/api", "src/bin/kiln/serve"].into_iter().flat_map(sources).collect();
        // A code follows one of these, or its status, as in `(503, "loading")`.
        let marks = ["code: ", "ApiError::new(", "refused(", "not_now("].map(String::from);
        let marks: Vec<String> = marks.into_iter().chain((400..600).map(|status| format!("({status}, "))).collect();
        let used = sources.iter().flat_map(|source| marks.iter().flat_map(|mark| quoted_after(source, mark)));
        let is_code = |text: &&str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        assert_eq!(used.filter(is_code).collect::<BTreeSet<_>>(), codes);
    }
}
