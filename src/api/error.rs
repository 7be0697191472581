//! Errors in OpenAI's form, from which its clients choose the class of an exception.

use crate::error::Error;
use serde_json::{Value, json};
use std::fmt;

/// An error for a client. It names no path of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the answer.
    pub status: u16,
    /// A word for programs.
    pub code: &'static str,
    /// The field that is wrong, as the client spelled it.
    pub param: Option<String>,
    /// A sentence for people.
    pub message: String,
}

impl ApiError {
    /// An error about a request, which its client can mend.
    pub fn new(code: &'static str, param: &str, message: impl Into<String>) -> Self {
        Self { status: 400, code, param: Some(param.into()), message: message.into() }
    }

    /// An error of the library about a field, or about the request as a whole.
    pub fn of(error: &Error, param: Option<&str>) -> Self {
        let (status, code) = match error {
            Error::Usage { .. } | Error::ImageSize { .. } => (400, "invalid_value"),
            Error::BadFile { .. } | Error::Read { .. } => (400, "invalid_image"),
            Error::TooManyTokens { .. } => (400, "too_many_tokens"),
            Error::HostMemory { .. } | Error::DeviceMemory { .. } => (422, "does_not_fit"),
            Error::Memory { .. } => (503, "memory_short"),
            Error::Interrupted => (503, "shutting_down"),
            Error::Device { .. } | Error::NoGpu { .. } => (503, "gpu_fault"),
            Error::NotFinite { .. } => (500, "not_finite"),
            _ => (500, "internal"),
        };
        let message = match error {
            Error::BadFile { what, detail, .. } => format!("{what}: {detail}"),
            Error::Read { source, .. } => format!("cannot read image: {source}"),
            Error::ImageSize { nearest: (width, height), .. } => format!("{error}; try {width}x{height}"),
            // What happened inside is for the log.
            _ if code == "internal" => "the server could not make this image".into(),
            Error::Device { .. } | Error::NoGpu { .. } => "the GPU failed".into(),
            other => other.to_string(),
        };
        Self { status, code, param: param.map(String::from), message }
    }

    /// OpenAI's class of the error.
    pub const fn kind(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body of the answer. All four members are always there.
    pub fn body(&self) -> Value {
        let Self { code, param, message, .. } = self;
        json!({"error": {"message": message, "type": self.kind(), "param": param, "code": code}})
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.param {
            Some(param) => write!(f, "{} ({param}): {}", self.code, self.message),
            None => write!(f, "{}: {}", self.code, self.message),
        }
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn bodies_have_four_members_and_no_path() {
        let error = Error::bad_file(Path::new("/secret/place.png"), "damaged image", "it has no header");
        let body = ApiError::of(&error, Some("image[2]")).body();
        let want = json!({"message": "damaged image: it has no header", "type": "invalid_request_error", "param": "image[2]", "code": "invalid_image"});
        assert_eq!(body["error"], want);
        let read = Error::read(Path::new("/secret"), std::io::ErrorKind::NotFound.into());
        let inside = Error::Op { op: "gemm", what: "/secret".into() };
        for error in [read, inside, Error::NoModel { path: "/secret".into(), what: "x".into(), hint: None }] {
            assert!(!ApiError::of(&error, None).message.contains("/secret"), "{error}");
        }
        assert_eq!(ApiError::of(&Error::Interrupted, None).kind(), "server_error");
        assert_eq!(ApiError::of(&Error::Interrupted, None).body()["error"]["param"], Value::Null);
    }
}
