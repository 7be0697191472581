//! All tests that need a GPU, in one program, so that one file can be copied to a machine without Rust (see `tools/gpu_bundle`).
//! `cargo test` runs it like the others; without a GPU it says so and passes.
//!
//!     gpu                all tests
//!     gpu ops [words]    every op, or those whose case has all words in its name, against f64 loops
//!     gpu NAME           one test by its name
//!     gpu small FOLDER [L [portable]]  cases without a number above L in their name (256) and with KILN_TEST_CASE in it; processes
//!                        with the same FOLDER share them. `portable`: the image without kernels that store through TMA
//!     gpu outputs FILE [L]  writes the results of every case without a number above L in its name (256), which
//!                        `tests/emulated` compares with the emulator's
//!     gpu list           the names of the tests
//!     gpu hash           a checksum of images, to compare processes
//!     gpu emulated       the kernels of compute capability 12.x at full size, see emulated.rs
//!     gpu planted TOOL FATBIN, gpu ballast BYTES, gpu spoil FILE TENSOR
//!                        see bundle.rs
//!
//! `KILN_EMULATED_KERNELS` names a folder with the kernels of compute capability 12.x, compiled for this GPU with software for what only
//! those GPUs have. With it, all tests run as on such a GPU.
#![allow(clippy::print_stdout)]

mod bundle;
mod emulated;
mod large;

use common::ops::tiles;
use common::{
    Make, cases, cpu, dev, editing, engine_on, goldens, merging, modes, ops, run, saving_memory_changes_nothing, tiling,
};
use kiln::error::Error;
use kiln::internals::backend::cuda::{self, Arch, Cuda, Kernel, KernelChoice};
use kiln::internals::backend::{Backend, Lockstep};
use kiln::internals::config::Variant;
use kiln::internals::pipeline::{GeneratedImage, Job, OpenModel};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::Precision;
use kiln::locate::Found;
use kiln::progress::Silent;
use kiln::quantize::calibrate::{Calibration, calibrate};
use kiln::selftest::{self, Extent, Outcome};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

fn cuda() -> Cuda {
    let mut cuda = match emulated::kernels() {
        Some(folder) => emulated::cuda(&folder, None),
        None => Cuda::open(0, Arc::new(AtomicBool::new(false))).unwrap(),
    };
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
    ("driver", self_test),
    ("small", || Small::ALONE.check()),
    ("ops", || ops::check_some(&mut cuda(), |_| true)),
    ("tiles", every_tile),
    ("lockstep", lockstep),
    ("goldens", || every_golden(&on_cuda)),
    ("dev", || dev::f32_equals_diffusers(&on_cuda, |_| true)),
    ("dev-bf16", || dev::bf16_is_as_close_as_diffusers_in_bf16(&on_cuda, |_| true)),
    ("repeat", repeat),
    ("graphs", graphs_change_nothing),
    ("memory", || saving_memory_changes_nothing(&on_cuda)),
    ("calibration", calibration),
    ("merging", || merging::backend_merges_as_the_host(&mut cuda())),
    ("large", large::last_rows_are_right),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // These commands need no GPU.
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
        ["small", ref rest @ ..] if !rest.is_empty() => Small::parse(rest).expect("small FOLDER [LIMIT [portable]]").check(),
        ["outputs", file, ref limit @ ..] => {
            let limit = limit.first().map_or(ops::SMALL, |limit| limit.parse().expect("outputs FILE [LIMIT]"));
            println!("{} results in {file}", ops::outputs::record(&mut cuda(), limit, Path::new(file)));
        }
        ["hash"] => println!("{:016x}", checksum(&images(&mut |_| ()))),
        ["emulated"] => emulated::products_are_exact(),
        ["planted", tool, image] => bundle::planted(tool, Path::new(image)).unwrap(),
        ["ballast", left] => bundle::ballast(left.parse().unwrap()).unwrap(),
        [] => return all(None),
        [name] => return all(Some(name)),
        _ => panic!("nothing is called {words:?}"),
    }
    ExitCode::SUCCESS
}

/// Runs all tests, or only the test called `only`.
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

/// Runs all checks of `kiln selftest`.
fn self_test() {
    // The rates of emulated kernels mean nothing.
    let extent = Extent { burst: emulated::kernels().is_none(), ..Extent::FULL };
    let lines = selftest::run(&mut cuda(), &extent, &mut |line| {
        println!("{:<48} {}", line.name, line.outcome);
        Ok(())
    });
    let lines = lines.unwrap();
    assert!(lines.iter().all(|line| !line.failed()));
    let passed = |name: &str| lines.iter().any(|line| line.name == name && line.outcome != Outcome::NotHere);
    assert!(passed("copy") && (passed("cluster") || cuda().device().capability != (9, 0)));
}

/// Every kernel, on shapes small enough for sanitizers that slow them down a hundredfold, and an image whose steps are run op by op,
/// captured and replayed.
struct Small {
    /// A folder through which several processes share the work: whoever creates the file of a case runs the case.
    claims: Option<PathBuf>,
    limit: usize,
    /// For sanitizers that do not see TMA stores, and would report that the next kernel reads uninitialized memory.
    portable: bool,
}

impl Small {
    const ALONE: Self = Self { claims: None, limit: ops::SMALL, portable: false };

    fn parse(arguments: &[&str]) -> Option<Self> {
        let (claims, rest) = arguments.split_first()?;
        let (limit, portable) = match *rest {
            [] => (Self::ALONE.limit, false),
            [limit] => (limit.parse().ok()?, false),
            [limit, "portable"] => (limit.parse().ok()?, true),
            _ => return None,
        };
        Some(Self { claims: Some(PathBuf::from(claims)), limit, portable })
    }

    /// Whether this process is the first that wants to run something. The file says which process runs what.
    fn claim(&self, what: &str, name: &str) -> bool {
        self.claims.as_ref().is_none_or(|folder| match File::create_new(folder.join(what)) {
            Ok(mut file) => writeln!(file, "{} {name}", std::process::id()).is_ok(),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => panic!("{}: {error}", folder.display()),
        })
    }

    fn check(&self) {
        self.cases();
        if self.claim("image", "image") {
            let job = Job { size: Pixels::new(64, 64).unwrap(), steps: 3, record: false, ..cases()[0].job() };
            let mut cuda = unpoisoned();
            if self.portable {
                cuda.set_choice(KernelChoice::Only(Kernel::GemmBf16Sm80_256x128));
            }
            run(&mut engine_on(Box::new(cuda), Variant::Distilled, Precision::Bf16), &job).unwrap();
        }
        println!("small is ok");
    }

    fn cases(&self) {
        let mut cuda = unpoisoned();
        let only = std::env::var("KILN_TEST_CASE").unwrap_or_default();
        // The self-test is the longest of all cases under a sanitizer, so it comes first.
        if only.is_empty() && self.claim("selftest", "selftest") {
            let lines = selftest::run(&mut cuda, &Extent::QUICK, &mut |_| Ok(())).unwrap();
            assert!(lines.iter().all(|line| !line.failed()), "{lines:?}");
        }
        // Matrix ops run with every tile; f32 takes the naive kernels in any case.
        let is_own = |choice: &KernelChoice| {
            emulated::kernels().is_none() || matches!(choice, KernelChoice::Only(kernel) if kernel.arch() == Arch::Sm120)
        };
        let choices = KernelChoice::all()
            .filter(|choice| *choice == KernelChoice::Best || *choice != KernelChoice::Naive && is_own(choice));
        for (turn, choice) in choices.enumerate() {
            cuda.set_choice(choice);
            let small = |name: &str| ops::is_within(self.limit, name) && name.contains(&only);
            let cases = ops::cases::all().into_iter().filter(|c| tiles::runs_with(choice, &c.name) && small(&c.name));
            let claimed =
                cases.enumerate().filter(|case| self.claim(&format!("{turn}-{}", case.0), &case.1.name)).map(|(_, case)| case);
            let mut claimed = Timed::new(claimed).peekable();
            if claimed.peek().is_some() {
                ops::check(&mut cuda, claimed);
            }
        }
        // The `run` script adds these up over all processes.
        let launched = || cuda.launched().filter(|(kernel, _)| emulated::kernels().is_none() || kernel.is_gated());
        launched().for_each(|(kernel, times)| println!("launched: {} {times}", kernel.symbol()));
        let missed: Vec<_> = launched().filter(|(_, times)| *times == 0).map(|(kernel, _)| kernel).collect();
        assert!(missed.is_empty() || self.claims.is_some(), "never launched: {missed:?}");
    }
}

/// Cases, with a line for each that took long.
struct Timed<I> {
    cases: I,
    last: Option<(String, Instant)>,
}

impl<I> Timed<I> {
    fn new(cases: I) -> Self {
        Self { cases, last: None }
    }
}

impl<I: Iterator<Item = ops::Case>> Iterator for Timed<I> {
    type Item = ops::Case;

    fn next(&mut self) -> Option<ops::Case> {
        if let Some((name, start)) = self.last.take().filter(|(_, start)| start.elapsed().as_secs() >= 10) {
            println!("took {} s: {name}", start.elapsed().as_secs());
        }
        let case = self.cases.next()?;
        self.last = Some((case.name.clone(), Instant::now()));
        Some(case)
    }
}

/// A backend without poison: a sanitizer would take memory filled with NaN for initialized.
fn unpoisoned() -> Cuda {
    let mut cuda = cuda();
    cuda.set_poison(false);
    cuda
}

/// Runs matrix ops with every tile, because at these sizes mostly the smallest is selected. The oracle takes the host far longer than the
/// kernels take the GPU, so tiles are tested in parallel.
fn every_tile() {
    std::thread::scope(|scope| {
        scope.spawn(|| ops::check_some(&mut cuda(), tiles::is_attention));
        let ours = |kernel: &Kernel| emulated::kernels().is_none() || kernel.arch() == Arch::Sm120;
        let forced =
            KernelChoice::all().filter_map(|choice| if let KernelChoice::Only(kernel) = choice { Some(kernel) } else { None });
        for kernel in forced.filter(ours) {
            scope.spawn(move || {
                let mut cuda = cuda();
                cuda.set_choice(KernelChoice::Only(kernel));
                ops::check_some(&mut cuda, |name| tiles::has_kernel(name, kernel));
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
    editing::every_edit_equals_diffusers(make);
    editing::every_edit_in_bf16_is_as_close_as_diffusers_in_bf16(make);
    tiling::tiles_equal_those_of_diffusers(make);
}

/// Compares every op of every golden case on both backends. The CPU's results are carried forward, so passing the goldens proves nothing.
/// What counts is that no op differs.
fn lockstep() {
    every_golden(&in_lockstep);
}

/// One image of each kind: plain, guided, with references, with cached references.
fn images(prepare: &mut dyn FnMut(&mut Cuda)) -> Vec<GeneratedImage> {
    let mut images = Vec::new();
    let mut backend = || {
        let mut cuda = cuda();
        prepare(&mut cuda);
        Box::new(cuda)
    };
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            images.push(run(&mut engine_on(backend(), case.variant(), precision), &case.job()).unwrap());
        }
        let modes = modes::modes();
        for case in &modes.cases {
            images.push(run(&mut case.engine(backend(), precision), &case.job(&modes.images)).unwrap());
        }
    }
    images
}

fn checksum(images: &[GeneratedImage]) -> u64 {
    modes::fnv1a(images.iter().flat_map(|p| p.image.pixels.iter().copied()))
}

/// Checks that the same seed gives the same bytes, twenty times on one engine. Its steps are run op by op, captured and replayed in turn.
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

/// Checks that the largest inputs of layers are the same in every run, and that op by op they equal the CPU's.
fn calibration() {
    let found = |backend| {
        let model = OpenModel::open(&Found::Tiny, Some(Variant::Base)).unwrap();
        let prompts = ["one", "two words"].map(String::from).into();
        let calibration = Calibration { prompts, size: Pixels::new(128, 64).unwrap(), steps: 3 };
        let in_block = |name: &str| name.contains("_blocks.");
        calibrate(backend, "here", model, &calibration, &in_block, &Silent).unwrap()
    };
    let on_gpu = found(on_cuda());
    assert_eq!(on_gpu, found(on_cuda()));
    assert_eq!(found(in_lockstep()), found(Box::new(cpu())));
}

fn graphs_change_nothing() {
    let with = checksum(&images(&mut |_| ()));
    let without = checksum(&images(&mut |cuda| cuda.set_graph_capture(false)));
    let clean = checksum(&images(&mut |cuda| cuda.set_poison(false)));
    assert_eq!(with, without, "captured graphs give other bytes");
    assert_eq!(with, clean, "released memory is read");
}
