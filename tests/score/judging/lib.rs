//! Judges images of the built-in model by geometry: scenes are drawn exactly, and the colors, shapes and places of an image are measured.
//!
//! A crate of its own, because it looks at every pixel: it is compiled with optimization, and the tests that call it are not.

pub mod edits;
pub mod judge;
mod regions;
pub mod render;
mod share;
pub mod world;

pub use share::Share;
