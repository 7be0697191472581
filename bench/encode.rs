//! Times the encoding of photo-like images: `cargo bench --bench encode -- [--threads N] [--sides 1024,2048] [--write FOLDER]`.
//! With `--write` the images and their encoded files go to a folder, for `tools/check_encoding.py`.
#![allow(clippy::print_stdout)] // this program's output is its purpose

use clap::Parser;
use common::photo_like::{KINDS, photo_like};
use kiln::image::{Format, Threads};
use std::path::PathBuf;
use std::time::Instant;

/// Times the encoding of photo-like images.
#[derive(Parser)]
#[command(bin_name = "cargo bench --bench encode --")]
struct Args {
    /// Worker threads (0: one per core).
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Sides of the square images.
    #[arg(long, value_name = "PIXELS", value_delimiter = ',', default_values_t = [1024, 2048])]
    sides: Vec<usize>,
    /// Runs of each encoding; the fastest and the median are printed.
    #[arg(long, value_name = "N", default_value_t = 30)]
    runs: usize,
    /// Also write the pixels and the files to a new folder.
    #[arg(long, value_name = "FOLDER")]
    write: Option<PathBuf>,
    /// Passed by `cargo bench` and ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    if let Some(folder) = &args.write {
        std::fs::create_dir(folder)?;
    }
    let threads = kiln::threads::start(args.threads);
    for side in args.sides {
        for kind in KINDS {
            let image = photo_like(kind, side, side);
            let stem = args.write.as_ref().map(|folder| folder.join(format!("{kind}-{side}")));
            if let Some(stem) = &stem {
                std::fs::write(stem.with_extension("rgb"), &image.pixels)?;
            }
            for (name, format) in [("png", Format::Png), ("jpg", Format::Jpeg { quality: 95 }), ("webp", Format::WebP)] {
                let mut times = Vec::with_capacity(args.runs);
                let mut bytes = Vec::new();
                for _ in 0..args.runs.max(1) {
                    let start = Instant::now();
                    bytes = image.encode(format, &[], Threads::All)?;
                    times.push(1e3 * start.elapsed().as_secs_f64());
                }
                times.sort_unstable_by(f64::total_cmp);
                let (least, median, size) = (times[0], times[times.len() / 2], bytes.len());
                println!(
                    "{name:<4} {kind:<8} {side}x{side} | {threads} threads | {median:8.2} ms median, {least:8.2} least | {size} bytes"
                );
                if let Some(stem) = &stem {
                    std::fs::write(stem.with_extension(name), &bytes)?;
                }
            }
        }
    }
    Ok(())
}
