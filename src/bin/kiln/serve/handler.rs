//! Answers requests: lets them in, reads them, hands them to the engine and puts what it makes into words.

use super::answer::{self, Answer, Body};
use super::body::{self, Content, Digest, Form, Held, digest};
use super::connection::{Activity, Peer};
use super::guard::{self, Caller};
use super::images;
use super::log::Record;
use super::retries::Found;
use super::route::{self, Route};
use super::server::{Phase, Server};
use super::{admission, plan::Handover, plan::Plan, status};
use crate::serve::work::Work;
use futures_util::FutureExt;
use futures_util::future::{Either, select};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, HeaderMap, HeaderName, HeaderValue, ORIGIN, VARY};
use hyper::http::request::Parts;
use hyper::{Method, Request};
use kiln::api::{ApiError, ApiResult};
use kiln::image::Format;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

/// Headers that the SDKs of OpenAI send, which a page of an allowed origin may send as well.
const CORS_HEADERS: &str = "authorization, content-type, accept, idempotency-key, x-request-id, x-stainless-lang, \
     x-stainless-package-version, x-stainless-os, x-stainless-arch, x-stainless-runtime, x-stainless-runtime-version, \
     x-stainless-async, x-stainless-retry-count, x-stainless-timeout, x-stainless-read-timeout";

/// Headers of answers that such a page may read.
const CORS_EXPOSED: &str = "x-request-id, x-kiln-seed, x-kiln-ms, x-kiln-ignored, retry-after";

/// Bodies of this size are taken apart at once, without another thread.
const SMALL_BODY: usize = 64 << 10;

/// An error, and what its answer says in headers.
pub struct Refusal {
    pub error: ApiError,
    /// When another try is worthwhile, in seconds.
    pub wait: Option<u64>,
    /// The method that the path takes.
    pub allow: Option<Method>,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self { error, wait: None, allow: None }
    }
}

/// Answers a request.
pub async fn handle(
    server: Arc<Server>,
    peer: Peer,
    activity: Activity,
    request: Request<Incoming>,
) -> Result<Answer, Infallible> {
    activity.begin();
    let since = Instant::now();
    let (parts, body) = request.into_parts();
    let (found, id) = (route::find(parts.uri.path()), request_id(&parts.headers));
    let mut record = Record {
        log: server.log.clone(),
        _open: server.count_open(),
        metrics: server.metrics.clone(),
        // Probes come every few seconds.
        is_quiet: server.config.is_quiet || found.is_some_and(|(route, _)| route.is_probe()),
        id: id.clone(),
        method: method_name(&parts.method).into(),
        route: found.map_or("none", |(route, _)| route.name()),
        status: 0,
        code: None,
        key: None,
        since,
        bytes: 0,
        is_whole: false,
    };
    let caller = guard::check(&server.config, &peer, &parts, found.map(|(route, _)| route));
    // A client that leaves drops this future at one of its pauses. The record then says that nobody took the answer.
    let answered = match &caller {
        Ok(caller) => {
            record.key = caller.key.clone();
            let work = dispatch(&server, caller, &parts, found, body);
            match AssertUnwindSafe(work).catch_unwind().await {
                Ok(answered) => answered,
                Err(_) => Err(internal().into()),
            }
        }
        Err(error) => Err(error.clone().into()),
    };
    let mut answer = answered.unwrap_or_else(|Refusal { error, wait, allow }| {
        record.code = Some(error.code);
        let mut answer = answer::error(&error, wait);
        let allow = allow.and_then(|method| HeaderValue::from_str(method.as_str()).ok());
        allow.map(|allow| answer.headers_mut().insert(ALLOW, allow));
        answer
    });
    finish(&mut answer, &id, guard::allowed_origin(&server.config, &parts.headers), &server);
    record.status = answer.status().as_u16();
    Ok(answer.map(|body| body.with(record, activity)))
}

/// The error of a bug.
fn internal() -> ApiError {
    ApiError { status: 500, code: "internal", param: None, message: "this is a bug in kiln; the server goes on".into() }
}

/// A method as it is logged. A client may invent one.
fn method_name(method: &Method) -> &str {
    let known = [Method::GET, Method::HEAD, Method::POST, Method::OPTIONS, Method::PUT, Method::DELETE, Method::PATCH];
    if known.contains(method) { method.as_str() } else { "other" }
}

/// The client's own id of a request, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let is_fine = |id: &&str| {
        (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    given.filter(is_fine).map_or_else(|| format!("req_{:08x}", crate::cli::random_seed()), String::from)
}

/// Adds the headers that every answer has.
fn finish(answer: &mut Answer, id: &str, origin: Option<HeaderValue>, server: &Server) {
    let headers = answer.headers_mut();
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert("x-request-id", id);
    }
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
    headers.entry("cache-control").or_insert(HeaderValue::from_static("no-store"));
    if !server.config.allowed_origins.is_empty() {
        headers.insert(VARY, HeaderValue::from_name(ORIGIN));
    }
    if let Some(origin) = origin {
        headers.insert("access-control-allow-origin", origin);
        headers.insert("access-control-expose-headers", HeaderValue::from_static(CORS_EXPOSED));
    }
    if !matches!(server.phase(), Phase::Loading | Phase::Ready) {
        headers.insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Answers a request that was let in.
async fn dispatch(
    server: &Arc<Server>,
    caller: &Caller,
    parts: &Parts,
    found: Option<(Route, &str)>,
    body: Incoming,
) -> Result<Answer, Refusal> {
    let Some((route, id)) = found.filter(|(route, id)| !(*route == Route::Image && *id == "variations")) else {
        return Err(not_found(parts.uri.path()).into());
    };
    let method = if parts.method == Method::HEAD { Method::GET } else { parts.method.clone() };
    if caller.is_preflight {
        return Ok(preflight(route));
    }
    if method != route.method() {
        let message = format!("this path takes {}", route.method());
        let error = ApiError { status: 405, code: "method_not_allowed", param: None, message };
        return Err(Refusal { allow: Some(route.method()), ..error.into() });
    }
    match route {
        Route::Generations => generate(server, caller, parts, kiln::api::Route::Generations, body).await,
        Route::Edits => generate(server, caller, parts, kiln::api::Route::Edits, body).await,
        Route::Models => Ok(answer::json(200, &status::models(server)?)),
        Route::Model => Ok(answer::json(200, &status::model(server, id)?)),
        Route::Image => {
            let made = server.store().image(id);
            let gone = || ApiError {
                status: 404,
                code: "not_found",
                param: None,
                message: "there is no image with this id; images are there for an hour".into(),
            };
            let made = made.ok_or_else(gone)?;
            Ok(answer::answer(200, made.media_type, Body::of([made.file.clone()])))
        }
        Route::Status => Ok(answer::json(200, &status::status(server))),
        Route::Health => Ok(status::health(server)),
        Route::Ready => Ok(status::ready(server)),
        Route::Metrics => Ok(answer::answer(200, "text/plain; version=0.0.4", Body::of([status::metrics(server).into()]))),
        Route::OpenApi => Ok(answer::answer(200, "application/json", Body::of([status::OPEN_API.into()]))),
        Route::Index => Ok(answer::text(200, status::index(server))),
    }
}

fn not_found(path: &str) -> ApiError {
    let message = match path.trim_end_matches('/').ends_with("/images/variations") {
        true => "there are no variations; send the image to /v1/images/edits",
        false => "there is nothing at this path; /openapi.json lists what there is",
    };
    ApiError { status: 404, code: "not_found", param: None, message: message.into() }
}

/// The answer to a browser that asks whether a page of an allowed origin may send a request.
fn preflight(route: Route) -> Answer {
    let mut answer = answer::answer(204, "text/plain", Body::of([]));
    let headers = answer.headers_mut();
    headers.remove(hyper::header::CONTENT_TYPE);
    if let Ok(method) = HeaderValue::from_str(route.method().as_str()) {
        headers.insert("access-control-allow-methods", method);
    }
    headers.insert("access-control-allow-headers", HeaderValue::from_static(CORS_HEADERS));
    headers.insert("access-control-max-age", HeaderValue::from_static("600"));
    answer
}

/// Whether the client wants the file itself. Its kind is then the file's format, unless the request has another one.
fn wants_file(headers: &HeaderMap, request: &mut kiln::api::Request) -> bool {
    let kinds = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let kinds: Vec<&str> = kinds.map(|kind| kind.split(';').next().unwrap_or_default().trim()).collect();
    let is_accepted = |format: Format| kinds.contains(&answer::media_type(format));
    let formats = [Format::Png, Format::Jpeg { quality: request.jpeg_quality }, Format::WebP];
    request.format = request.format.or_else(|| formats.into_iter().find(|format| is_accepted(*format)));
    is_accepted(request.format())
}

/// Makes or edits images.
async fn generate(
    server: &Arc<Server>,
    caller: &Caller,
    parts: &Parts,
    route: kiln::api::Route,
    body: Incoming,
) -> Result<Answer, Refusal> {
    let form = Form::of(route, &parts.headers)?;
    server.check_open()?;
    // A server that ends does not wait for bodies.
    let reading = pin!(body::read(body, &server.uploads));
    let ending = pin!(server.at(Phase::Draining));
    let (bytes, uploads) = match select(reading, ending).await {
        Either::Left((read, _)) => read?,
        Either::Right(_) => Err(server.check_open().err().unwrap_or_else(internal))?,
    };
    let running = server.check_open()?;
    let given = parts.headers.get(HeaderName::from_static("idempotency-key")).map(HeaderValue::as_bytes);
    let body = open(form, bytes).await?;
    let accept = parts.headers.get(ACCEPT).map_or(&b""[..], HeaderValue::as_bytes);
    let content = digest(&[caller.share.as_bytes(), format!("{route:?}").as_bytes(), accept, &body.digest]);
    let key = given.map_or(content, |key| digest(&[caller.share.as_bytes(), key]));
    let claim = loop {
        // The lock ends with the statement.
        let found = server.retries.find(key, content);
        match found {
            Found::New(claim) => break claim,
            // It ends when the twin was read.
            Found::Wait(mut twin) => drop(twin.changed().await),
            Found::Same(work) => return respond(server, caller, work).await,
            Found::Other => {
                let message = "another request had this idempotency key".into();
                return Err(ApiError { status: 422, code: "invalid_value", param: None, message }.into());
            }
        }
    };
    let (headers, model, decoded) = (parts.headers.clone(), running.model.clone(), server.decoded.clone());
    let empty = Held::nothing(&server.uploads);
    let read = tokio::task::spawn_blocking(move || -> ApiResult<(Plan, Option<String>, Held)> {
        let mut request = body.content.request(route)?;
        let (wants_file, user) = (wants_file(&headers, &mut request), request.user.clone());
        let plan = Plan::new(request, wants_file, &model, &decoded)?;
        // The files are gone once their images are decoded.
        let uploads = if plan.settings.keeps_files() { uploads } else { empty };
        Ok((plan, user, uploads))
    });
    let (plan, user, uploads) = read.await.map_err(|_| internal())??;
    server.metrics.count_ignored(plan.ignored.len());
    let share = match user {
        Some(user) => format!("{} {user}", caller.share),
        None => caller.share.clone(),
    };
    let work = admission::admit(server, running, &share, plan, uploads, given.map(|_| key))?;
    // The seed makes a request a pure function, so the same one joins it while it runs. With a key, a later one has its answer, too.
    match given.is_some() || work.plan.has_seed {
        true => claim.share(&work),
        false => drop(claim),
    }
    respond(server, caller, work).await
}

/// The content of a body, and its digest.
struct Opened {
    content: Content,
    digest: Digest,
}

/// Takes a body apart. A large one takes a while, in which other requests are answered.
async fn open(form: Form, body: Vec<u8>) -> Result<Opened, Refusal> {
    let is_small = body.len() <= SMALL_BODY;
    let work = async move {
        let content = form.open(body).await?;
        let digest = content.digest();
        Ok(Opened { content, digest })
    };
    if is_small {
        return Ok(work.await.map_err(|error: ApiError| error)?);
    }
    let handle = tokio::runtime::Handle::current();
    Ok(tokio::task::spawn_blocking(move || handle.block_on(work)).await.map_err(|_| internal())??)
}

/// Answers with the images of a request, once they are there or as they come.
async fn respond(server: &Arc<Server>, caller: &Caller, work: Arc<Work>) -> Result<Answer, Refusal> {
    let ignored = work.plan.ignored.join(", ");
    let (first, handover) = (work.plan.seeds.first().copied().unwrap_or_default(), work.plan.handover);
    let mut answer = match handover {
        Handover::Stream => images::stream(work),
        Handover::File | Handover::Base64 | Handover::Url => {
            work.finished().await;
            let error = work.state().error.clone();
            if let Some(error) = error {
                let wait = if error.code == "memory_short" { 10 } else { 1 };
                return Err(Refusal { wait: Some(wait), ..error.into() });
            }
            match handover {
                Handover::File => images::file(&work),
                _ => images::json(server, caller, &work)?,
            }
        }
    };
    let headers = answer.headers_mut();
    headers.insert("x-kiln-seed", HeaderValue::from(first));
    // Names of fields are the client's, and may be anything.
    let ignored: String = ignored.chars().filter(|c| (' '..='~').contains(c)).take(1000).collect();
    if !ignored.is_empty()
        && let Ok(value) = HeaderValue::from_str(&ignored)
    {
        headers.insert("x-kiln-ignored", value);
    }
    Ok(answer)
}
