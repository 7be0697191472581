//! Tests whether a GPU computes what kiln's kernels rely on: copies, single instructions, whole GEMMs and attention, each against known
//! results. The caller prints the lines. On GPUs that gated kernels were never run on, the [`gate`] runs the quick form before it enables
//! them.

mod attention;
mod burst;
mod compare;
mod copies;
mod fragments;
mod gate;
mod gemms;
mod instructions;
mod record;

pub use attention::Size;
pub use gate::{Gate, gate, open, record};
pub use gemms::{Format, Shape};
pub use record::{Key, Records, Verdict};

use crate::backend::Backend;
use crate::backend::cuda::{CopyBy, Cuda, Mma};
use crate::error::{Error, Result};
use crate::tensor::{DType, Region};

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is right. The detail may be empty.
    Passed(String),
    /// The text says what is wrong.
    Failed(String),
    /// This GPU, or this build, has nothing to check here.
    NotHere,
}

impl Outcome {
    fn passed(detail: impl Into<String>) -> Self {
        Self::Passed(detail.into())
    }

    /// Passed unless there is a fault.
    fn unless(fault: Option<String>) -> Self {
        fault.map_or_else(|| Self::passed(""), Self::Failed)
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Passed(detail) if detail.is_empty() => f.write_str("ok"),
            Self::Passed(detail) => write!(f, "ok ({detail})"),
            Self::Failed(detail) => write!(f, "FAILED ({detail})"),
            Self::NotHere => f.write_str("not on this GPU"),
        }
    }
}

/// A check with its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// What was checked.
    pub name: String,
    /// The result.
    pub outcome: Outcome,
}

impl Line {
    /// Whether the check failed.
    pub const fn failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }
}

/// How much a self-test checks.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// GEMM shapes.
    pub shapes: &'a [Shape],
    /// Size of the attention op.
    pub attention: Size,
    /// Whether rates are measured at the end.
    pub burst: bool,
}

const SHAPES: [Shape; 3] = [
    Shape { rows: 128, cols: 128, k: 256 },
    // Sides that are not multiples of a tile's.
    Shape { rows: 200, cols: 384, k: 640 },
    // The rows of a 1024x1024 image in klein 4B.
    Shape { rows: 4608, cols: 3072, k: 3072 },
];

impl Extent<'_> {
    /// The full self-test.
    pub const FULL: Self = Self { shapes: &SHAPES, attention: Size { tokens: 4608, heads: 24 }, burst: true };
    /// Checks that take less than a second.
    pub const QUICK: Self = Self { shapes: SHAPES.split_at(2).0, attention: Size { tokens: 200, heads: 2 }, burst: false };
}

/// A check: its name and the function that runs it.
type Check = (String, Box<dyn Fn(&mut Cuda) -> Result<Outcome>>);

fn check(name: impl Into<String>, run: impl Fn(&mut Cuda) -> Result<Outcome> + 'static) -> Check {
    (name.into(), Box::new(run))
}

/// Checks of copies and launches, for a quick look at a GPU.
fn launch_checks() -> Vec<Check> {
    let by = |name, by| check(name, move |cuda| copies::copy_by(cuda, by));
    vec![
        check("copy", copies::copy),
        by("tensor map, 128-byte swizzle", CopyBy::Box128),
        by("tensor map, 64-byte swizzle", CopyBy::Box64),
        by("bulk copy", CopyBy::Bulk),
        by("cluster", CopyBy::Cluster),
        check("overlap", copies::overlap),
        check("graph", copies::graph),
    ]
}

fn instruction_checks() -> Vec<Check> {
    let selectors: Vec<Mma> = (0..8).map(|i| Mma::Nvf4 { selectors: [i % 2, i / 2] }).collect();
    let [bf16, e4m3, scaled, nvf4] =
        [("bf16", Mma::Bf16), ("e4m3", Mma::E4m3), ("e4m3, block-scaled", Mma::E4m3Scaled), ("nvf4", selectors[0])];
    let single =
        [bf16, e4m3, scaled].map(|(name, form)| check(format!("mma {name}"), move |cuda| instructions::mma(cuda, &[form])));
    let sums =
        [bf16, e4m3, scaled, nvf4].map(|(name, form)| check(format!("sums {name}"), move |cuda| instructions::sums(cuda, form)));
    [check("cvt e4m3", instructions::convert_e4m3), check("cvt e2m1", instructions::convert_e2m1)]
        .into_iter()
        .chain(single)
        .chain([check("mma nvf4", move |cuda| instructions::mma(cuda, &selectors))])
        .chain(sums)
        .chain([check("sums W8A8 GEMM", gemms::sums_of_gemm)])
        .collect()
}

fn product_checks(extent: &Extent<'_>) -> Vec<Check> {
    let mut checks = Vec::new();
    for format in Format::ALL {
        for &shape in extent.shapes {
            checks.push(check(format!("GEMM {} {shape}", format.name()), move |cuda| gemms::product(cuda, format, shape)));
        }
    }
    let size = extent.attention;
    for (name, heads) in [("bf16", DType::Bf16), ("e4m3 q and k", DType::E4m3)] {
        checks.push(check(format!("attention {name}, {size}"), move |cuda| attention::attention(cuda, heads, size)));
    }
    checks
}

/// Runs checks in order and reports each line at once. Everything that the GPU holds is lost.
fn make(cuda: &mut Cuda, checks: Vec<Check>, report: &mut dyn FnMut(&Line) -> Result<()>) -> Result<Vec<Line>> {
    let (mut lines, mut lost) = (Vec::new(), false);
    for (name, run) in checks {
        let outcome = match if lost { Ok(Outcome::Failed("not run: the GPU has failed before".into())) } else { run(cuda) } {
            Err(error @ (Error::Device { .. } | Error::Op { .. })) => {
                // After a fault of the device nothing runs any more.
                lost = matches!(error, Error::Device { .. });
                Outcome::Failed(error.to_string())
            }
            outcome => outcome?,
        };
        let line = Line { name, outcome };
        report(&line)?;
        lines.push(line);
    }
    if !lost {
        // Frees what the checks have allocated, and forgets their saturated values.
        cuda.take_saturated()?;
        cuda.reserve(Region::Arena, 0)?;
        cuda.reserve(Region::Weights, 0)?;
    }
    Ok(lines)
}

/// Runs all checks of an extent.
pub fn run(cuda: &mut Cuda, extent: &Extent<'_>, report: &mut dyn FnMut(&Line) -> Result<()>) -> Result<Vec<Line>> {
    let mut checks = launch_checks();
    checks.extend(instruction_checks());
    checks.extend(product_checks(extent));
    if extent.burst {
        checks.extend(burst::checks(cuda)?);
    }
    make(cuda, checks, report)
}

/// Checks copies and launches.
pub fn run_launches(cuda: &mut Cuda) -> Result<Vec<Line>> {
    make(cuda, launch_checks(), &mut |_| Ok(()))
}
