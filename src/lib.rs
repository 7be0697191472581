//! kiln.
pub mod backend;
pub mod error;
pub mod tensor;
