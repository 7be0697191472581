//! Makes quantised models of plain ones.

pub mod calibrate;
