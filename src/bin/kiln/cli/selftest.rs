//! `kiln selftest`: checks a GPU and prints a line for each check. Marks delimit a block to paste into an issue.

use super::args::{DEVICES, within};
use super::device::describe_gpu;
use super::stdout::{json_line, print};
use super::{Process, Subcommand};
use crate::terminal::Verbosity;
use clap::Args;
use kiln::device::{Cuda, DeviceInfo, NVCC, driver_release};
use kiln::error::{Error, Result};
use kiln::selftest::{Extent, Line, Outcome, Records, record};
use kiln::text::shown_line;
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// The end of `kiln selftest --help`.
const EXAMPLES: &str = "\
Examples:
  kiln selftest
      One line for each check: ok, FAILED with what is wrong, or not on this GPU. Everything between
      the marks is a block to paste into an issue. The block has no private data.

  kiln selftest --quick --device 1
      Only the quick checks, on the second GPU.

  kiln selftest --json | jq '.checks[] | select(.outcome == \"failed\")'
      The failed checks, for programs.";

/// Check that a GPU computes what kiln asks of it
///
/// kiln checks copies, single instructions element by element, and whole GEMMs and attention against naive kernels. Then it
/// measures their speed. The self-test takes less than a minute and needs no model. If the GPU or this build lacks what a check
/// needs, kiln prints `not on this GPU`. A failed check gives exit code 1.
///
/// kiln uses its kernels for compute capability 12.x only after the quick checks have passed on the GPU. kiln runs these checks
/// before it first uses the kernels, and remembers the result for this GPU, driver and build of kiln. This command refreshes the
/// result.
#[derive(Args, Debug, Default)]
#[command(override_usage = "kiln selftest [OPTIONS]", after_help = EXAMPLES)]
#[command(allow_negative_numbers = true)]
pub struct SelftestArgs {
    /// Use the GPU with this number in `kiln doctor` [default: 0]
    #[arg(long, value_name = "N", value_parser = within(DEVICES))]
    pub device: Option<usize>,

    /// Run only quick checks, in about a second
    ///
    /// kiln leaves out the largest GEMM and the speed measurements, and checks attention at a small size.
    #[arg(long)]
    pub quick: bool,

    /// Print a JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

/// Width of the names of checks.
const WIDTH: usize = 50;

/// The JSON output.
#[derive(Serialize)]
struct Report<'a> {
    kiln: &'static str,
    nvcc: &'static str,
    gpu: &'a str,
    capability: String,
    multiprocessors: u32,
    shared_bytes: u32,
    clock_khz: u32,
    memory_bytes: u64,
    driver: Option<String>,
    cuda: String,
    kernels: Vec<&'static str>,
    quick: bool,
    passed: bool,
    seconds: f64,
    checks: Vec<CheckReport<'a>>,
}

#[derive(Serialize)]
struct CheckReport<'a> {
    name: &'a str,
    outcome: &'static str,
    detail: &'a str,
}

impl<'a> CheckReport<'a> {
    fn new(line: &'a Line) -> Self {
        let (outcome, detail) = match &line.outcome {
            Outcome::Passed(detail) => ("ok", detail.as_str()),
            Outcome::Failed(detail) => ("failed", detail.as_str()),
            Outcome::NotHere => ("not on this GPU", ""),
        };
        Self { name: &line.name, outcome, detail }
    }
}

/// The files of the kernels that this GPU runs.
fn kernel_files(cuda: &Cuda) -> Vec<&'static str> {
    let mut files: Vec<&str> = cuda.loaded().map(|kernel| kernel.file()).collect();
    files.sort_unstable();
    files.dedup();
    files
}

fn write_line(out: &mut dyn Write, text: &str) -> Result<()> {
    print(out, format!("{}\n", shown_line(text)).as_bytes())
}

impl Subcommand for SelftestArgs {
    /// Checks a GPU. If a check fails, returns an error after all checks have run.
    fn run(self: Box<Self>, Process { environment, signals, out }: Process<'_>) -> Result<()> {
        signals.terminal(Verbosity::Normal);
        let cuda = Cuda::open(self.device.unwrap_or(0), signals.stop.clone()).map_err(|error| match error {
            Error::NoGpu { what, hint } => Error::NoGpuToTest { what, hint },
            other => other,
        })?;
        let records = Records::below(environment.caches().as_deref());
        let extent = if self.quick { Extent::QUICK } else { Extent::FULL };
        test(cuda, &self, &extent, &records, driver_release(), out)
    }
}

/// Runs checks of this extent on an open GPU.
pub fn test(
    mut cuda: Cuda,
    args: &SelftestArgs,
    extent: &Extent<'_>,
    records: &Records,
    release: Option<String>,
    out: &mut dyn Write,
) -> Result<()> {
    let (device, files, start) = (cuda.device().clone(), kernel_files(&cuda), Instant::now());
    if !args.json {
        let kiln = env!("CARGO_PKG_VERSION");
        write_line(
            out,
            &format!("--- from here on: kiln selftest{}, kiln {kiln} ---", if args.quick { " --quick" } else { "" }),
        )?;
        let mut rows = Vec::new();
        describe_gpu(&device, release.as_deref(), &mut |name, value| rows.push(format!("{name:<12} {value}")));
        rows.push(format!("{:<12} {}", "kernels", files.join(" ")));
        rows.push(String::new());
        rows.iter().try_for_each(|row| write_line(out, row))?;
    }
    let mut report = |line: &Line| match args.json {
        true => Ok(()),
        false => write_line(out, &format!("{:<WIDTH$} {}", line.name, line.outcome)),
    };
    let (lines, _) = record(&mut cuda, extent, records, &mut report)?;
    let (failed, seconds) = (lines.iter().filter(|line| line.failed()).count(), start.elapsed().as_secs_f64());
    if args.json {
        print(out, &json_line(&described(&device, release, files, &lines, args.quick, seconds))?)?;
    } else {
        let count = |wanted: fn(&Outcome) -> bool| lines.iter().filter(|line| wanted(&line.outcome)).count();
        let (passed, absent) = (count(|o| matches!(o, Outcome::Passed(_))), count(|o| *o == Outcome::NotHere));
        // A line break inside of a line would be shown as an escape.
        write_line(out, "")?;
        write_line(out, &format!("{passed} ok, {failed} failed, {absent} not on this GPU; {seconds:.1} s"))?;
        write_line(out, "--- up to here ---")?;
    }
    if failed == 0 { Ok(()) } else { Err(Error::SelfTest { failed, checks: lines.len() }) }
}

fn described<'a>(
    device: &'a DeviceInfo,
    driver: Option<String>,
    kernels: Vec<&'static str>,
    lines: &'a [Line],
    quick: bool,
    seconds: f64,
) -> Report<'a> {
    Report {
        kiln: env!("CARGO_PKG_VERSION"),
        nvcc: NVCC,
        gpu: &device.name,
        capability: format!("{}.{}", device.capability.0, device.capability.1),
        multiprocessors: device.multiprocessors,
        shared_bytes: device.shared,
        clock_khz: device.clock,
        memory_bytes: device.memory,
        driver,
        cuda: format!("{}.{}", device.driver.0, device.driver.1),
        kernels,
        quick,
        passed: lines.iter().all(|line| !line.failed()),
        seconds,
        checks: lines.iter().map(CheckReport::new).collect(),
    }
}
