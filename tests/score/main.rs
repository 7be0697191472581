//! Images of the built-in model, judged by geometry that shares no code with its training: colors, shapes and places of objects,
//! backgrounds, edits. Controls test the judge itself.
//!
//! `cargo test --release --test score -- --ignored --nocapture` is the score; `tools/train_builtin/README.md` describes it.
#![allow(clippy::print_stdout)] // figures, shown with --nocapture

mod adapter;
mod calibration;
mod comparison;
mod controls;
mod editing;
mod engine;
mod fixture;
mod full;
mod quantized;
mod report;
mod settings;
mod wording;

use engine::root;
use judging::render::Image;
use judging::{edits, judge, render, world};
use std::path::Path;
use world::{Fixture, SIDE};

fn fixture() -> Fixture {
    read_fixture("prompts.json")
}

/// The prompts of the example adapter.
fn moons() -> Fixture {
    read_fixture("moons.json")
}

fn read_fixture(name: &str) -> Fixture {
    let path = root().join("tests/fixtures/builtin").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Reads a PNG as a grid of images, row by row.
fn read_images(path: &Path) -> Vec<Image> {
    let file = kiln::internals::reference::DecodedReference::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let image = file.image();
    assert!(
        image.width.is_multiple_of(SIDE) && image.height.is_multiple_of(SIDE),
        "{} is {}x{}",
        path.display(),
        image.width,
        image.height
    );
    let columns = image.width / SIDE;
    let cut = |i: usize| {
        let (left, top) = (i % columns * SIDE, i / columns * SIDE);
        let row = |y: usize| {
            let at = ((top + y) * image.width + left) * 3;
            &image.pixels[at..at + 3 * SIDE]
        };
        Image::from_bytes(&(0..SIDE).flat_map(row).copied().collect::<Vec<u8>>())
    };
    (0..columns * (image.height / SIDE)).map(cut).collect()
}
