//! Bodies of requests: read under limits on their length, their time and the memory of all of them together, then taken apart.

use super::connection::body_time;
use super::limits::BODY_BYTES;
use futures_util::stream;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap};
use kiln::api::{ApiError, ApiResult, Part, Request, Route};
use multer::{Constraints, Multipart, SizeLimit};
use sha2::{Digest as _, Sha256};
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::{Instant, timeout_at};

/// How many bytes of a body arrive before its announced length is believed.
const TRUSTED_AFTER: usize = 1 << 20;

/// Bytes that many hold together, up to a limit.
#[derive(Debug)]
pub struct Budget {
    held: AtomicU64,
    most: u64,
}

/// A share of a budget. Dropping it gives the bytes back.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { held: AtomicU64::new(0), most })
    }

    /// The bytes that are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}

impl Held {
    /// A share of no bytes.
    pub fn nothing(budget: &Arc<Budget>) -> Self {
        Self { budget: budget.clone(), bytes: 0 }
    }

    /// A share of this many bytes, unless the budget has no room.
    pub fn new(budget: &Arc<Budget>, bytes: u64) -> Option<Self> {
        let mut held = Self::nothing(budget);
        held.grow(bytes).then_some(held)
    }

    /// Takes more bytes; `false` if the budget has no room.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let Budget { held, most } = &*self.budget;
        let room = |held: u64| held.checked_add(bytes).filter(|sum| sum <= most);
        let took = held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok();
        self.bytes += if took { bytes } else { 0 };
        took
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads a body. Memory is taken as bytes arrive, whatever length the client has announced.
pub async fn read(mut body: Incoming, budget: &Arc<Budget>) -> ApiResult<(Vec<u8>, Held)> {
    let too_large = || ApiError {
        status: 413,
        code: "body_too_large",
        param: None,
        message: format!("a request may have {} MiB", BODY_BYTES >> 20),
    };
    if body.size_hint().lower() > BODY_BYTES as u64 {
        return Err(too_large());
    }
    let (start, mut bytes, mut held) = (Instant::now(), Vec::new(), Held::nothing(budget));
    loop {
        let next = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let frame = match timeout_at(start + body_time(bytes.len()), next).await {
            Ok(None) => return Ok((bytes, held)),
            Ok(Some(Ok(frame))) => frame,
            // Nobody will read this: the connection is broken.
            Ok(Some(Err(_))) => {
                return Err(ApiError { status: 400, code: "invalid_value", param: None, message: "the body ended early".into() });
            }
            Err(_) => {
                return Err(ApiError {
                    status: 408,
                    code: "body_timeout",
                    param: None,
                    message: "the body took too long".into(),
                });
            }
        };
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > BODY_BYTES {
            return Err(too_large());
        }
        if !held.grow(data.len() as u64) {
            let message = "too many images are on their way; try again".into();
            return Err(ApiError { status: 429, code: "queue_full", param: None, message });
        }
        // A client that has sent this much means what it announced. Without this the vector would leave its smaller selves behind.
        let rest = usize::try_from(body.size_hint().lower()).unwrap_or(0);
        if rest > 0 && bytes.len() + data.len() > bytes.capacity().max(TRUSTED_AFTER) {
            bytes.reserve_exact((data.len() + rest).min(BODY_BYTES - bytes.len()));
        }
        bytes.extend_from_slice(&data);
    }
}

/// The form in which a body holds a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    Json,
    /// Parts between lines with this boundary.
    Multipart(String),
}

impl Form {
    /// The form that headers announce. Pages of other origins can send neither form of a generation without being asked by the browser.
    pub fn of(route: Route, headers: &HeaderMap) -> ApiResult<Self> {
        let unsupported =
            |message: &str| ApiError { status: 415, code: "unsupported_media_type", param: None, message: message.into() };
        let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        match (essence.as_str(), route) {
            ("application/json", _) => Ok(Self::Json),
            ("multipart/form-data", Route::Edits) => {
                let boundary = multer::parse_boundary(kind).map_err(|_| unsupported("the form has no boundary"))?;
                Ok(Self::Multipart(boundary))
            }
            (_, Route::Edits) => Err(unsupported("expected `multipart/form-data` or `application/json`")),
            (_, Route::Generations) => Err(unsupported("expected `application/json`")),
        }
    }

    /// Takes a body apart. This takes time with large images, and waits for nothing.
    pub async fn open(self, body: Vec<u8>) -> ApiResult<Content> {
        match self {
            Self::Json => Ok(Content::Json(body)),
            Self::Multipart(boundary) => parts(body, boundary).await.map(Content::Parts),
        }
    }
}

/// What a body holds.
pub enum Content {
    Json(Vec<u8>),
    /// The parts of a form, in order.
    Parts(Vec<(String, Part)>),
}

impl Content {
    /// A digest of the content. The boundary of a form is another one whenever a client sends it.
    pub fn digest(&self) -> Digest {
        match self {
            Self::Json(body) => digest(&[b"json", body]),
            Self::Parts(parts) => {
                let of = |(name, part): &(String, Part)| match part {
                    Part::Text(text) => digest(&[name.as_bytes(), b"text", text.as_bytes()]),
                    Part::File(bytes) => digest(&[name.as_bytes(), b"file", bytes]),
                };
                digest(&parts.iter().map(of).collect::<Vec<_>>().iter().map(|part| &part[..]).collect::<Vec<_>>())
            }
        }
    }

    /// Reads the request.
    pub fn request(self, route: Route) -> ApiResult<Request> {
        match self {
            Self::Json(body) => Request::of_json(route, &body),
            Self::Parts(parts) => Request::of_form(route, parts),
        }
    }
}

/// The SHA-256 of pieces and of where they end.
pub type Digest = [u8; 32];

/// A digest of pieces.
pub fn digest(pieces: &[&[u8]]) -> Digest {
    let mut hash = Sha256::new();
    for piece in pieces {
        hash.update((piece.len() as u64).to_le_bytes());
        hash.update(piece);
    }
    hash.finalize().into()
}

/// The parts of a form, in order.
async fn parts(body: Vec<u8>, boundary: String) -> ApiResult<Vec<(String, Part)>> {
    let damaged = |why: &dyn std::fmt::Display| ApiError {
        status: 400,
        code: "invalid_value",
        param: None,
        message: format!("the form is damaged: {why}"),
    };
    let whole = stream::iter([Ok::<_, Infallible>(Bytes::from(body))]);
    let limits = Constraints::new().size_limit(SizeLimit::new().whole_stream(BODY_BYTES as u64));
    let (mut form, mut parts) = (Multipart::with_constraints(whole, boundary, limits), Vec::new());
    while let Some(field) = form.next_field().await.map_err(|error| damaged(&error))? {
        let name = field.name().unwrap_or_default().to_owned();
        let is_file = field.file_name().is_some();
        let bytes = field.bytes().await.map_err(|error| damaged(&error))?;
        if name.is_empty() {
            return Err(damaged(&"a part has no name"));
        }
        // More than any form may have. The exact limit and its message come with the fields.
        if parts.len() > 1000 {
            return Err(damaged(&"it has too many parts"));
        }
        let part = match is_file {
            true => Part::File(bytes.into()),
            false => Part::Text(
                String::from_utf8(bytes.into()).map_err(|_| ApiError::new("invalid_value", &name, "this is not UTF-8"))?,
            ),
        };
        parts.push((name, part));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn a_budget_has_an_end() {
        let budget = Budget::new(100);
        let mut first = Held::new(&budget, 60).unwrap();
        assert!(Held::new(&budget, 41).is_none() && first.grow(40) && !first.grow(1));
        assert!(Held::new(&budget, u64::MAX).is_none() && budget.held() == 100);
        drop(first);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn types_decide_the_form() {
        let of = |route, kind: &str| {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().unwrap())]);
            Form::of(route, &headers).map_err(|error| error.status)
        };
        assert_eq!(of(Route::Generations, "application/json; charset=utf-8"), Ok(Form::Json));
        assert_eq!(of(Route::Edits, "Application/JSON"), Ok(Form::Json));
        assert_eq!(of(Route::Edits, "multipart/form-data; boundary=x"), Ok(Form::Multipart("x".into())));
        for kind in ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "multipart/form-data"] {
            assert_eq!(of(Route::Generations, kind), Err(415), "{kind}");
            assert_eq!(of(Route::Edits, kind), Err(415), "{kind}");
        }
        assert_eq!(of(Route::Generations, "multipart/form-data; boundary=x"), Err(415));
    }

    #[test]
    fn the_boundary_is_no_content() {
        let of = |boundary: &str, text: &str| {
            let body = format!("--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{text}\r\n--{boundary}--\r\n");
            block_on(Form::Multipart(boundary.into()).open(body.into())).unwrap().digest()
        };
        assert!(of("x", "1") == of("yy", "1") && of("x", "1") != of("x", "2"));
        assert!(digest(&[b"ab", b"c"]) != digest(&[b"a", b"bc"]));
    }

    #[test]
    fn parts_keep_their_order_and_their_bytes() {
        let body = b"--x\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\na\r\nb\r\n--x\r\n\
            Content-Disposition: form-data; name=\"image[]\"; filename=\"../../etc/\xC3\xA9 %22.png\"\r\nContent-Type: text/html\r\n\r\n\
            \x00\xFF\r\n--y\r\n--x--\r\n";
        let found = block_on(parts(body.to_vec(), "x".into())).unwrap();
        let want =
            [("prompt".to_owned(), Part::Text("a\r\nb".into())), ("image[]".into(), Part::File(b"\x00\xFF\r\n--y".to_vec()))];
        assert_eq!(found, want);
        for damaged in [&body[..body.len() - 6], b"", b"--x", b"--x\r\n\r\nno name\r\n--x--\r\n"] {
            assert_eq!(block_on(parts(damaged.to_vec(), "x".into())).unwrap_err().status, 400, "{damaged:?}");
        }
        let text = b"--x\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\n\xFF\r\n--x--\r\n";
        assert_eq!(block_on(parts(text.to_vec(), "x".into())).unwrap_err().param.as_deref(), Some("prompt"));
    }
}
