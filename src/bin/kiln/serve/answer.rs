//! Answers: their bodies and headers.

use super::connection::Activity;
use super::log::Record;
use futures_util::Stream;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Response, StatusCode};
use kiln::api::ApiError;
use kiln::image::Format;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// An answer.
pub type Answer = Response<Body>;

/// The body of an answer.
pub struct Body {
    content: Content,
    /// Writes a line of the log when the body has gone out, or nobody takes it.
    record: Option<Record>,
    activity: Option<Activity>,
}

enum Content {
    Whole(VecDeque<Bytes>),
    Events(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl Body {
    /// A body of these pieces.
    pub fn of(pieces: impl IntoIterator<Item = Bytes>) -> Self {
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        Self { content: Content::Whole(pieces), record: None, activity: None }
    }

    /// A body that is made as it goes out.
    pub fn events(stream: impl Stream<Item = Bytes> + Send + 'static) -> Self {
        Self { content: Content::Events(Box::pin(stream)), record: None, activity: None }
    }

    /// Adds who is told when the body has gone out.
    pub fn with(mut self, record: Record, activity: Activity) -> Self {
        (self.record, self.activity) = (Some(record), Some(activity));
        self
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some(activity) = &self.activity {
            activity.end();
        }
        if let Some(record) = &mut self.record {
            record.is_whole = matches!(&self.content, Content::Whole(pieces) if pieces.is_empty()) || record.is_whole;
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = match &mut self.content {
            Content::Whole(pieces) => Poll::Ready(pieces.pop_front()),
            Content::Events(stream) => stream.as_mut().poll_next(cx),
        };
        if let Some(record) = &mut self.record {
            match &next {
                Poll::Ready(Some(bytes)) => record.bytes += bytes.len() as u64,
                Poll::Ready(None) => record.is_whole = true,
                Poll::Pending => {}
            }
        }
        next.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(pieces) if pieces.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(pieces) => SizeHint::with_exact(pieces.iter().map(|piece| piece.len() as u64).sum()),
            Content::Events(_) => SizeHint::default(),
        }
    }
}

/// An answer with a body.
pub fn answer(status: u16, kind: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// An answer in JSON.
pub fn json(status: u16, value: &Value) -> Answer {
    answer(status, "application/json", Body::of([value.to_string().into()]))
}

/// An answer in plain text.
pub fn text(status: u16, text: impl Into<String>) -> Answer {
    answer(status, "text/plain; charset=utf-8", Body::of([text.into().into()]))
}

/// The answer to a request that failed. `wait` is when another try is worthwhile, in seconds.
pub fn error(error: &ApiError, wait: Option<u64>) -> Answer {
    let mut answer = json(error.status, &error.body());
    let headers = answer.headers_mut();
    if error.status == 401 {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if matches!(error.status, 429 | 503) {
        headers.insert(RETRY_AFTER, HeaderValue::from(wait.unwrap_or(1).clamp(1, 60)));
    }
    if error.status == 500 {
        // Another try of this request would fail as well.
        headers.insert("x-should-retry", HeaderValue::from_static("false"));
    }
    if matches!(error.status, 408 | 413) {
        // The rest of the body is not read.
        headers.insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// The media type of a format.
pub const fn media_type(format: Format) -> &'static str {
    match format {
        Format::Png => "image/png",
        Format::Jpeg { .. } => "image/jpeg",
        Format::WebP => "image/webp",
    }
}

/// The name of a format in requests and answers.
pub const fn format_name(format: Format) -> &'static str {
    match format {
        Format::Png => "png",
        Format::Jpeg { .. } => "jpeg",
        Format::WebP => "webp",
    }
}
