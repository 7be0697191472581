//! Requests of OpenAI's images API: what clients send becomes a checked [`Request`], and what went wrong an [`ApiError`].
//!
//! There is no HTTP here. Whoever speaks it hands over the body of a request: JSON, or the parts of a form. Fields that OpenAI does not
//! have are optional, and have the names that other servers gave them as well. A field of a wrong type or out of range is an error that
//! names the field. An unknown field is no error, because some clients send their own; the request lists them.

mod error;
mod fields;
mod request;

pub use error::ApiError;
pub use fields::Part;
pub use request::{AdapterChoice, Delivery, MAX_COUNT, MAX_IMAGES, MAX_STEPS, Request, Route, Upload};

/// The result of reading a request.
pub type ApiResult<T> = std::result::Result<T, ApiError>;
