//! Answers that hold images: JSON, the file itself, and streams of events.

use super::answer::{Answer, Body, answer, format_name};
use super::guard::Caller;
use super::limits::STREAM_PAUSE;
use super::plan::{Handover, Plan};
use super::server::Server;
use super::work::{Made, Now, Partial, State, Work, stage_name};
use futures_util::stream;
use hyper::body::Bytes;
use hyper::header::HeaderValue;
use kiln::api::{ApiError, ApiResult, Route};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::timeout;

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The members that answers and events share.
fn common(plan: &Plan) -> Map<String, Value> {
    let (width, height) = plan.size;
    let members = json!({
        "size": format!("{width}x{height}"),
        "output_format": format_name(plan.format),
        "quality": plan.quality,
        "background": "opaque",
    });
    members.as_object().cloned().unwrap_or_default()
}

/// The tokens of a request, in OpenAI's form.
fn usage(plan: &Plan, images: usize) -> Value {
    let (text, references, canvas) = plan.tokens();
    let (input, output) = (text + references, canvas * images);
    json!({
        "input_tokens": input,
        "input_tokens_details": {"text_tokens": text, "image_tokens": references},
        "output_tokens": output,
        "total_tokens": input + output,
    })
}

/// How a request was carried out.
fn report(work: &Work, state: &State, model: &str) -> Value {
    let begun = state.begun.unwrap_or(work.admitted);
    let ended = state.ended.unwrap_or(begun);
    json!({
        "model": model,
        "steps": work.plan.steps,
        "guidance": work.plan.guidance,
        "queue_ms": (begun - work.admitted).as_millis() as u64,
        "ms": (ended - begun).as_millis() as u64,
        "warnings": state.warnings,
    })
}

/// The answer that is a file.
pub fn file(work: &Work) -> Answer {
    let state = work.state();
    let Some(Some(made)) = state.images.first() else { return answer(500, "text/plain", Body::of([])) };
    let mut answer = answer(200, made.media_type, Body::of([made.file.clone()]));
    let begun = state.begun.unwrap_or(work.admitted);
    let ms = state.ended.unwrap_or(begun).duration_since(begun).as_millis();
    answer.headers_mut().insert("x-kiln-ms", HeaderValue::from(ms as u64));
    answer
}

/// The answer in JSON. Images are not copied into it.
pub fn json(server: &Server, caller: &Caller, work: &Work) -> ApiResult<Answer> {
    let plan = &work.plan;
    let state = work.state();
    let mut pieces: Vec<Bytes> = vec![format!("{{\"created\":{},\"data\":[", unix_time()).into()];
    for (number, made) in state.images.iter().flatten().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        if plan.handover == Handover::Url {
            let url = url(server, caller, made)?;
            pieces.push(format!("{comma}{{\"url\":{},\"seed\":{}}}", Value::from(url), made.seed).into());
        } else {
            pieces.push(format!("{comma}{{\"b64_json\":\"").into());
            pieces.push(made.base64.clone());
            pieces.push(format!("\",\"seed\":{}}}", made.seed).into());
        }
    }
    let mut rest = common(plan);
    rest.insert("usage".into(), usage(plan, plan.seeds.len()));
    rest.insert("kiln".into(), report(work, &state, &server.model_name()));
    let rest = Value::Object(rest).to_string();
    pieces.push(format!("],{}", rest.strip_prefix('{').unwrap_or("}")).into());
    let mut answer = answer(200, "application/json", Body::of(pieces));
    let begun = state.begun.unwrap_or(work.admitted);
    let ms = state.ended.unwrap_or(begun).duration_since(begun).as_millis();
    answer.headers_mut().insert("x-kiln-ms", HeaderValue::from(ms as u64));
    Ok(answer)
}

/// The URL of an image, which is kept for a while.
fn url(server: &Server, caller: &Caller, made: &Arc<Made>) -> ApiResult<String> {
    let mut random = [0; 16];
    let failed = || ApiError { status: 500, code: "internal", param: None, message: "the system has no random numbers".into() };
    let mut taken = 0;
    while taken < random.len() {
        taken += rustix::rand::getrandom(&mut random[taken..], rustix::rand::GetRandomFlags::empty()).map_err(|_| failed())?;
    }
    let id = server.store().add(made.clone(), random);
    let base = server.config.public_url.clone();
    let base = base.or_else(|| caller.host.as_ref().map(|host| format!("http://{host}")));
    Ok(format!("{}/v1/images/{id}", base.unwrap_or_default()))
}

/// A stream of events. They are made as the client takes them, so a slow client holds no more than its images.
pub fn stream(work: Arc<Work>) -> Answer {
    let news = work.news();
    let events = Events {
        work,
        news,
        ready: VecDeque::new(),
        partials: 0,
        previewed: 0,
        images: 0,
        is_queued: false,
        now: None,
        is_over: false,
    };
    let frames = stream::unfold(events, |mut events| async move { events.next().await.map(|frame| (frame, events)) });
    let mut answer = answer(200, "text/event-stream", Body::events(frames));
    // Proxies hold back what they take for a file.
    answer.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    answer
}

/// What a client of a stream has seen.
struct Events {
    work: Arc<Work>,
    news: watch::Receiver<u64>,
    ready: VecDeque<Bytes>,
    /// How many previews were looked at, and how many were sent.
    partials: usize,
    previewed: usize,
    /// How many images were sent.
    images: usize,
    /// Whether the place in the queue was sent.
    is_queued: bool,
    now: Option<Now>,
    is_over: bool,
}

/// A frame of an event stream.
fn frame(kind: &str, members: Map<String, Value>, base64: Option<&Bytes>) -> Vec<Bytes> {
    let mut all = Map::new();
    all.insert("type".into(), kind.into());
    all.extend(members);
    let json = Value::Object(all).to_string();
    let Some(base64) = base64 else { return vec![format!("event: {kind}\ndata: {json}\n\n").into()] };
    let head = format!("event: {kind}\ndata: {},\"b64_json\":\"", json.strip_suffix('}').unwrap_or_default());
    vec![head.into(), base64.clone(), "\"}\n\n".into()]
}

impl Events {
    /// The next piece of the stream; `None` after the last.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            if self.is_over {
                return None;
            }
            self.collect();
            if self.ready.is_empty() && !self.is_over {
                match timeout(STREAM_PAUSE, self.news.changed()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return None,
                    Err(_) => return Some(": wait\n\n".into()),
                }
            }
        }
    }

    /// Collects what has happened since the last time.
    fn collect(&mut self) {
        self.news.borrow_and_update();
        let work = self.work.clone();
        let (state, plan) = (work.state(), &work.plan);
        let name = if plan.route == Route::Edits { "image_edit" } else { "image_generation" };
        if plan.wants_progress {
            self.progress(&state);
        }
        while self.images <= state.images.len() {
            for partial in state.partials.iter().skip(self.partials) {
                self.partials += 1;
                // A preview of a finished image is of no use.
                if partial.image >= self.images && state.images.get(partial.image).is_some_and(Option::is_none) {
                    self.partial(name, partial);
                }
            }
            let Some(Some(made)) = state.images.get(self.images) else { break };
            let mut members = common(plan);
            members.insert("created_at".into(), unix_time().into());
            members.insert("usage".into(), usage(plan, plan.seeds.len()));
            members.insert("seed".into(), made.seed.into());
            if plan.seeds.len() > 1 {
                members.insert("index".into(), self.images.into());
            }
            self.images += 1;
            self.previewed = 0;
            self.ready.extend(frame(&format!("{name}.completed"), members, Some(&made.base64)));
        }
        if let Some(error) = &state.error {
            let members = error.body().as_object().cloned().unwrap_or_default();
            self.ready.extend(frame("error", members, None));
        }
        self.is_over = state.is_over();
    }

    fn partial(&mut self, name: &str, partial: &Partial) {
        let mut members = common(&self.work.plan);
        members.insert("created_at".into(), unix_time().into());
        members.insert("partial_image_index".into(), self.previewed.into());
        members.insert("output_format".into(), "png".into());
        members.insert("step".into(), partial.step.into());
        members.insert("steps".into(), partial.steps.into());
        if self.work.plan.seeds.len() > 1 {
            members.insert("index".into(), partial.image.into());
        }
        self.previewed += 1;
        self.ready.extend(frame(&format!("{name}.partial_image"), members, Some(&partial.base64)));
    }

    /// What the engine does now, or where in the queue the request is.
    fn progress(&mut self, state: &State) {
        let Some(now) = state.now else {
            if state.begun.is_none() && !std::mem::replace(&mut self.is_queued, true) {
                let eta = (self.work.predicted * 1000.0).round() as u64;
                let members = json!({"phase": "queued", "position": self.work.position(), "eta_ms": eta});
                self.ready.extend(frame("kiln.progress", members.as_object().cloned().unwrap_or_default(), None));
            }
            return;
        };
        if self.now != Some(now) {
            self.now = Some(now);
            let members = json!({"phase": stage_name(now.phase), "index": now.image, "done": now.done, "of": now.of});
            self.ready.extend(frame("kiln.progress", members.as_object().cloned().unwrap_or_default(), None));
        }
    }
}
