//! Everything that needs a GPU, in one program, so that one file can be carried to a machine without Rust (see
//! `tools/gpu_bundle`). `cargo test` runs it like the others; without a GPU it says so and passes.
//!
//!     gpu                all tests
//!     gpu ops [words]    every op, or those whose case has all words in its name, against f64 loops
//!     gpu NAME           one test by its name
//!     gpu small I/N [L [portable]]  the share of process I of N, counted from 0, in cases without a number above L in their name
//!                        (256); `portable`: the picture without kernels that store through the copy engine
//!     gpu list           the names of the tests
//!     gpu hash           a checksum of pictures, to compare processes
//!     gpu planted TOOL FATBIN, gpu ballast BYTES, gpu spoil FILE TENSOR
//!                        see bundle.rs
#![allow(clippy::print_stdout)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/ops/mod.rs"]
mod ops;

mod bundle;
mod large;

use common::{Make, cases, cpu, engine_on, goldens, modes, run, saving_memory_changes_nothing};
use kiln::backend::cuda::{self, Choice, Cuda, Tile};
use kiln::backend::{Backend, Lockstep};
use kiln::config::Variant;
use kiln::error::Error;
use kiln::pipeline::{GeneratedImage, Job};
use kiln::sequence::Pixels;
use kiln::tensor::Precision;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

fn cuda() -> Cuda {
    let mut cuda = Cuda::open(0, Arc::new(AtomicBool::new(false))).unwrap();
    cuda.set_poison(true);
    cuda
}

fn on_cuda() -> Box<dyn Backend> {
    Box::new(cuda())
}

fn in_lockstep() -> Box<dyn Backend> {
    Box::new(Lockstep::new(cpu(), cuda()))
}

const TESTS: &[(&str, fn())] = &[
    ("driver", every_road),
    ("small", || Share::ALL.check()),
    ("ops", || ops::check_some(&mut cuda(), |_| true)),
    ("products", every_product),
    ("lockstep", lockstep),
    ("goldens", || every_golden(&on_cuda)),
    ("repeat", repeat),
    ("graphs", graphs_change_nothing),
    ("memory", || saving_memory_changes_nothing(&on_cuda)),
    ("large", large::last_rows_are_right),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // What needs no GPU.
    match *words {
        ["list"] => {
            TESTS.iter().for_each(|(name, _)| println!("{name}"));
            return ExitCode::SUCCESS;
        }
        ["spoil", file, tensor] => {
            bundle::spoil(Path::new(file), tensor);
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    match cuda::devices() {
        Ok(found) => found.iter().for_each(|d| println!("GPU {}: {}, {} multiprocessors", d.index, d.name, d.multiprocessors)),
        Err(Error::NoGpu { what, .. }) => {
            println!("skipped: no CUDA device ({what})");
            return ExitCode::SUCCESS;
        }
        Err(error) => panic!("{error}"),
    }
    match *words {
        ["ops", ref words @ ..] if !words.is_empty() => {
            ops::check_some(&mut cuda(), |name| words.iter().all(|w| name.contains(w)));
        }
        ["small", share, ref rest @ ..] => Share::parse(share, rest).expect("small I/N [LIMIT [portable]]").check(),
        ["hash"] => println!("{:016x}", checksum(&pictures(&mut |_| ()))),
        ["planted", tool, image] => bundle::planted(tool, Path::new(image)).unwrap(),
        ["ballast", left] => bundle::ballast(left.parse().unwrap()).unwrap(),
        [] => return all(None),
        [name] => return all(Some(name)),
        _ => panic!("nothing is called {words:?}"),
    }
    ExitCode::SUCCESS
}

/// Runs the tests, or the one of that name.
fn all(only: Option<&str>) -> ExitCode {
    let (mut failed, mut count) = (0, 0);
    for (name, test) in TESTS.iter().filter(|(name, _)| only.is_none_or(|only| only == *name)) {
        let start = Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(test)).is_ok();
        println!("test {name} ... {} ({:.1} s)", if passed { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        failed += usize::from(!passed);
        count += 1;
    }
    assert!(count > 0, "no test is called {only:?}");
    println!("{} passed, {failed} failed", count - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Tensor maps, clusters, overlapped launches and recorded graphs, through the product's own launch code.
fn every_road() {
    let tried = cuda().self_test().unwrap();
    println!("tried: {}", tried.join(", "));
    assert!(tried.len() == 5 || cuda().device().capability != (9, 0));
}

/// Every kernel, on shapes small enough for tools that slow them down a hundredfold, and a picture whose steps are plain, recorded
/// and replayed. Several processes may share them: the first has the picture, the others take turns at the cases.
struct Share {
    part: usize,
    parts: usize,
    limit: usize,
    /// For tools that do not see what the copy engine stores, and would find that nobody wrote what the next kernel reads.
    portable: bool,
}

impl Share {
    const ALL: Self = Self { part: 0, parts: 1, limit: ops::SMALL, portable: false };

    fn parse(share: &str, rest: &[&str]) -> Option<Self> {
        let (part, parts) = share.split_once('/')?;
        let (part, parts) = (part.parse().ok()?, parts.parse().ok()?);
        let (limit, portable) = match *rest {
            [] => (Self::ALL.limit, false),
            [limit] => (limit.parse().ok()?, false),
            [limit, "portable"] => (limit.parse().ok()?, true),
            _ => return None,
        };
        (part < parts).then_some(Self { part, parts, limit, portable })
    }

    fn check(&self) {
        let alone = self.parts == 1;
        if alone || self.part > 0 {
            self.cases();
        }
        if self.part == 0 {
            let job = Job { size: Pixels::new(64, 64).unwrap(), steps: 3, record: false, ..cases()[0].job() };
            let mut cuda = unpoisoned();
            if self.portable {
                cuda.set_choice(Choice::Tile(Tile::Rows256));
            }
            run(&mut engine_on(Box::new(cuda), Variant::Distilled, Precision::Bf16), &job).unwrap();
        }
        println!("small {}/{} is ok", self.part, self.parts);
    }

    fn cases(&self) {
        let mut cuda = unpoisoned();
        // Neighbours in the table are of one kind and take as long as each other, so they go to different processes.
        let (turn, others) = (Cell::new(0), (self.parts - 1).max(1));
        let ours = |name: &str| {
            let small = ops::is_within(self.limit, name);
            turn.set(turn.get() + usize::from(small));
            small && turn.get() % others == self.part % others
        };
        ops::check_some(&mut cuda, |name| (!is_product(name) || is_attention(name)) && ours(name));
        // Every tile there is for them; values of four bytes take the naive kernels in any case.
        for tile in Tile::ALL {
            cuda.set_choice(Choice::Tile(tile));
            ops::check_some(&mut cuda, |name| has_tile(name, tile) && ours(name));
        }
        cuda.self_test().unwrap();
        // For whoever adds up the shares.
        cuda.launched().for_each(|(kernel, times)| println!("launched: {} {times}", kernel.symbol()));
        let missed: Vec<_> = cuda.launched().filter(|(_, times)| *times == 0).map(|(kernel, _)| kernel).collect();
        assert!(missed.is_empty() || self.parts > 1, "never launched: {missed:?}");
    }
}

/// Fresh memory stays as it is: filled with NaN, a read of it would no longer be one of memory that nobody wrote.
fn unpoisoned() -> Cuda {
    let mut cuda = cuda();
    cuda.set_poison(false);
    cuda
}

/// Which has no tiles to choose from, but kernels of its own for some GPUs.
fn is_attention(name: &str) -> bool {
    name.starts_with("attention")
}

fn is_product(name: &str) -> bool {
    ["linear", "qkv", "attention", "conv"].iter().any(|op| name.starts_with(op))
}

/// Whether a tile makes a difference to a case: Hopper's are for products alone, and what takes the naive kernels is the same with all.
/// The widths of the real models take the host longer than all the rest, so of those only the tiles that they get in a real model.
fn has_tile(name: &str, tile: Tile) -> bool {
    let usual = matches!(tile, Tile::Hopper256x192 | Tile::Hopper128x256);
    let product = ["linear", "qkv"].iter().any(|op| name.starts_with(op)) && (usual || !name.contains(" klein"));
    let first = tile == Tile::ALL[0];
    is_product(name) && (first || on_tensor_cores(name)) && (!tile.is_hopper() || product)
}

/// Values of four bytes take the naive kernels, and so do products of rows that do not begin at whole vectors.
fn on_tensor_cores(name: &str) -> bool {
    let words: Vec<&str> = name.split([' ', 'x', ',']).collect();
    // "linear 64x65x66 ..." or "linear 64x66, rows of 65 ...".
    let inner = words.iter().position(|word| *word == "of").map_or(2, |of| of + 1);
    let whole = !name.starts_with("linear") || words[inner].parse::<usize>().is_ok_and(|inner| inner.is_multiple_of(8));
    whole && name.contains(" bf16 ")
}

/// Matrix ops with every tile: at these sizes mostly the smallest is chosen. What they are compared with takes the host far longer than
/// the GPU, so tiles go beside each other.
fn every_product() {
    std::thread::scope(|scope| {
        scope.spawn(|| ops::check_some(&mut cuda(), is_attention));
        for tile in Tile::ALL {
            scope.spawn(move || {
                let mut cuda = cuda();
                cuda.set_choice(Choice::Tile(tile));
                ops::check_some(&mut cuda, |name| has_tile(name, tile));
            });
        }
    });
}

fn every_golden(make: Make<'_>) {
    goldens::f32_equals_diffusers(make);
    goldens::bf16_is_as_close_as_diffusers_in_bf16(make);
    modes::every_mode_equals_diffusers(make);
    modes::every_mode_in_bf16_is_as_close_as_diffusers_in_bf16(make);
    modes::guidance_as_an_input_equals_diffusers(make);
}

/// Every op of every recorded case, on both backends. Here the host's results are carried forward, so passing the goldens is no
/// feat; what counts is that no op differs.
fn lockstep() {
    every_golden(&in_lockstep);
}

/// A picture of each kind: plain, guided, with references, with cached ones.
fn pictures(prepare: &mut dyn FnMut(&mut Cuda)) -> Vec<GeneratedImage> {
    let mut pictures = Vec::new();
    let mut backend = || {
        let mut cuda = cuda();
        prepare(&mut cuda);
        Box::new(cuda)
    };
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            pictures.push(run(&mut engine_on(backend(), case.variant(), precision), &case.job()).unwrap());
        }
        let modes = modes::modes();
        for case in &modes.cases {
            pictures.push(run(&mut case.engine(backend(), precision), &case.job(&modes.images)).unwrap());
        }
    }
    pictures
}

fn checksum(pictures: &[GeneratedImage]) -> u64 {
    modes::fnv1a(pictures.iter().flat_map(|p| p.image.pixels.iter().copied()))
}

/// Same seed, same bytes: twenty times on one engine, whose steps are plain, recorded and replayed in turn.
fn repeat() {
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            let mut engine = engine_on(on_cuda(), case.variant(), precision);
            let first = run(&mut engine, &case.job()).unwrap();
            for i in 1..20 {
                let again = run(&mut engine, &case.job()).unwrap();
                assert!(first.image == again.image, "{} {}: run {i} differs", case.name, precision.name());
                assert_eq!(first.record.as_ref().unwrap().image, again.record.unwrap().image);
            }
        }
    }
}

fn graphs_change_nothing() {
    let with = checksum(&pictures(&mut |_| ()));
    let without = checksum(&pictures(&mut |cuda| cuda.set_recording(false)));
    let clean = checksum(&pictures(&mut |cuda| cuda.set_poison(false)));
    assert_eq!(with, without, "recorded steps give other bytes");
    assert_eq!(with, clean, "released memory is read");
}
