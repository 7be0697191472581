//! Times the preparation of an edit and the composite: `cargo bench --bench edit -- [--threads N] [--size 4000x3000] [--runs N]`.
//!
//! The init image and the mask are decoded before: their files take longer than everything here, and are timed apart.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use clap::Parser;
use common::photo_like::photo_like;
use kiln::edit::{Edit, EditOptions, Mask};
use kiln::image::{Format, Image, Threads};
use kiln::internals::config::ModelDefaults;
use kiln::internals::reference::DecodedReference;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Times the preparation of an edit and the composite.
#[derive(Parser)]
#[command(bin_name = "cargo bench --bench edit --")]
struct Args {
    /// Worker threads (0: one per core).
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Width and height of the init image.
    #[arg(long, value_name = "WxH", default_value = "4000x3000", value_parser = size)]
    size: (usize, usize),
    /// The radius of the round mask, in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 500)]
    radius: usize,
    /// Pixels over which the mask fades out.
    #[arg(long, value_name = "PIXELS", default_value_t = 32)]
    feather: usize,
    /// Pixels around the mask that are worked on.
    #[arg(long, value_name = "PIXELS", default_value_t = 128)]
    mask_crop: usize,
    /// Runs of each; the fastest and the median are printed.
    #[arg(long, value_name = "N", default_value_t = 15)]
    runs: usize,
    /// Passed by `cargo bench` and ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

fn size(text: &str) -> Result<(usize, usize), String> {
    let sides = text.split_once('x').and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
    sides.ok_or_else(|| "expected WIDTHxHEIGHT".into())
}

/// The median time in milliseconds, and the fastest.
fn timed<T, U>(runs: usize, mut input: impl FnMut() -> T, mut work: impl FnMut(T) -> U) -> [f64; 2] {
    let mut times: Vec<f64> = (0..runs.max(1))
        .map(|_| {
            let input = input();
            let start = Instant::now();
            let result = work(input);
            let seconds = start.elapsed().as_secs_f64();
            black_box(result);
            1e3 * seconds
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    [times[times.len() / 2], times[0]]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Args { threads, size: (width, height), radius, feather, mask_crop, runs, .. } = Args::parse();
    let threads = kiln::threads::start(threads);
    let circle = |x: usize, y: usize| x.abs_diff(width / 2).pow(2) + y.abs_diff(height / 2).pow(2) < radius * radius;
    let pixels = (0..width * height).flat_map(|i| [if circle(i % width, i / width) { 255 } else { 0 }; 3]).collect();
    let init = photo_like("portrait", width, height).encode(Format::Jpeg { quality: 92 }, &[], Threads::All)?;
    let white = Image { width, height, pixels };
    let mask_file = white.encode(Format::Png, &[], Threads::All)?;

    let (init_name, mask_name) = (Path::new("init.jpg"), Path::new("mask.png"));
    let decoded = DecodedReference::from_bytes(&init, init_name)?;
    let mask = Mask::from_bytes(&mask_file, mask_name)?;
    let options = EditOptions { feather: Some(feather), mask_crop: Some(mask_crop), ..EditOptions::default() };
    let defaults = ModelDefaults::klein();
    let prepare = |(init, mask)| Edit::new(init, Some(mask), &options, &defaults).expect("the edit is valid");
    let edit = prepare((decoded.clone(), mask.clone()));
    let paste = edit.start.paste.as_ref().expect("there is a mask");
    let made = photo_like("portrait", edit.canvas.width(), edit.canvas.height());

    println!(
        "{width}x{height}, mask of radius {radius}, feather {feather}, mask crop {mask_crop}, {threads} threads: {:?}",
        paste.area()
    );
    let rows = [
        ("decode init.jpg", timed(runs, || (), |()| DecodedReference::from_bytes(&init, init_name))),
        ("decode mask.png", timed(runs, || (), |()| DecodedReference::from_bytes(&mask_file, mask_name))),
        ("mask", timed(runs, || white.clone(), |white| Mask::of_image(&white, None, mask_name))),
        ("prepare", timed(runs, || (decoded.clone(), mask.clone()), prepare)),
        ("composite", timed(runs, || made.clone(), |made| paste.over(made))),
    ];
    for (name, [median, least]) in rows {
        println!("{name:<16} {median:8.2} ms median, {least:8.2} least");
    }
    Ok(())
}
