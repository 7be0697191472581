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
    let kept = server.store().bytes();
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
