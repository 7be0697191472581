//! `kiln bench`: the time and memory that images take, stage by stage, or the speed of single kernels.

mod chart;
mod images;
mod kernels;
mod share;

use super::args::{BenchArgs, GenerateArgs, RunArgs};
use super::outputs::refuse_same;
use super::request::{ImageRequest, Setup};
use super::stdout::{DASH, json_line, line_of, print};
use crate::terminal::{Terminal, Verbosity};
use chart::Recorded;
use kiln::error::{Error, Result};
use kiln::locate::Environment;
use kiln::output::{Planned, check_writable, save_new};
use kiln::selftest::Records;
use kiln::text::shown_path;
use kiln::trace;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The default prompt. Prompts are padded to the same length, so the choice does not affect the timing.
const PROMPT: &str = "a red fox in the snow";

/// What to measure.
#[derive(Debug)]
pub struct BenchRequest {
    /// The start of the command, from which the time of the cold image counts.
    started: Instant,
    subject: Subject,
    /// The file for JSON, if it was asked for; `-` is standard output, where JSON replaces the table.
    json: Option<PathBuf>,
    /// The file for a chart, and what stands beside these results in it.
    svg: Option<PathBuf>,
    beside: Vec<Recorded>,
    /// How much to print.
    pub verbosity: Verbosity,
}

/// The subject of a measurement.
#[derive(Debug)]
enum Subject {
    /// A cold image and `runs` warm ones; with `share` there is a block to paste.
    Images { request: Box<ImageRequest>, setup: Box<Setup>, runs: usize, share: bool },
    /// A cold image, and one for each line of standard input.
    OnRequest { request: Box<ImageRequest>, setup: Box<Setup> },
    /// Results that were recorded, to be drawn.
    Recorded(Box<Recorded>),
    /// The ops whose names contain `filter`, on the backend that `run` selects.
    Kernels { filter: String, quick: bool, run: RunArgs, records: Records },
}

impl BenchRequest {
    /// Checks flags against each other, the environment and the file system.
    pub fn new(args: BenchArgs, environment: Environment, stdin: &mut dyn Read) -> Result<Self> {
        let started = Instant::now();
        let _span = trace::span("read the request");
        let BenchArgs { mut prompt, model, lora, kernels, quick, runs, json, svg, beside, from, on_request, share, image, run } =
            args;
        let verbosity = run.verbosity();
        if share && json.as_deref() == Some(Path::new(DASH)) {
            let what = "--share adds a block to the table, and --json prints JSON in its place";
            return Err(Error::usage(what, "write --json=FILE to have both"));
        }
        let json_file = json.as_deref().filter(|path| *path != Path::new(DASH));
        check_files(&[(json_file, "--json"), (svg.as_deref(), "--svg"), (run.trace.trace.as_deref(), "--trace")])?;
        if let (Some(_), None, Some(word)) = (&json, json_file, &prompt.prompt)
            && Path::new(word).extension().is_some_and(|extension| extension == "json")
        {
            let file = shown_path(Path::new(word));
            return Err(Error::usage(
                format!("`{file}` would be the prompt, not the file of --json"),
                format!("write --json={file}"),
            ));
        }
        let beside: Vec<Recorded> = beside.iter().map(|path| Recorded::read(path)).collect::<Result<_>>()?;
        let this = |subject| Self { started, subject, json, svg, beside, verbosity };
        if let Some(path) = from {
            return Ok(this(Subject::Recorded(Box::new(Recorded::read(&path)?))));
        }
        if let Some(filter) = kernels {
            kernels::check(&filter)?;
            let records = Records::below(environment.caches().as_deref());
            return Ok(this(Subject::Kernels { filter, quick, run, records }));
        }
        if prompt.prompt.is_none() && prompt.prompt_file.is_none() {
            prompt.prompt = Some(OsString::from(PROMPT));
        }
        let args = GenerateArgs::without_files(prompt, model, lora, image, None, run);
        let (request, setup) = ImageRequest::from_args(&args, environment, stdin, 0)?;
        let (request, setup) = (Box::new(request), Box::new(setup));
        Ok(this(match on_request {
            true => Subject::OnRequest { request, setup },
            false => Subject::Images { request, setup, runs, share },
        }))
    }
}

/// Refuses files that cannot be written now rather than after the measurement. Each comes with the flag that names it.
fn check_files(files: &[(Option<&Path>, &str)]) -> Result<()> {
    let files: Vec<(&Path, &str)> = files.iter().filter_map(|(path, flag)| Some(((*path)?, *flag))).collect();
    for (i, (path, flag)) in files.iter().enumerate() {
        files[i + 1..].iter().try_for_each(|(other, name)| refuse_same(path, flag, other, name))?;
        if *path == Path::new(DASH) {
            return Err(Error::usage(format!("{flag} writes a file, not standard output"), "name a file"));
        }
        check_writable(&[Planned { path: (*path).into(), bytes: 0 }], false).map_err(without_force_hint)?;
    }
    Ok(())
}

/// Runs the measurement and writes a table or JSON to `out`. No image is kept. What is asked for while it runs comes from `requests`.
pub fn bench(
    request: BenchRequest,
    stop: &Arc<AtomicBool>,
    terminal: &Terminal,
    requests: &mut dyn BufRead,
    out: &mut dyn Write,
) -> Result<()> {
    let BenchRequest { started, subject, json, svg, beside, .. } = request;
    let files = (json.as_deref(), svg.as_deref().map(|path| (path, beside)));
    match subject {
        Subject::Images { request, setup, runs, share } => {
            let report = images::measure(*request, *setup, started, runs, stop, terminal)?;
            let block = if share { format!("\n{}", report.share_block()) } else { String::new() };
            publish(&report, report.table() + &block, files, out)
        }
        Subject::OnRequest { request, setup } => images::serve(*request, *setup, started, stop, terminal, requests, out),
        Subject::Recorded(recorded) => {
            let (_, Some((path, beside))) = files else { return Ok(()) };
            save_chart(path, &chart::draw_recorded(*recorded, beside)?)?;
            print(out, &line_of(path))
        }
        Subject::Kernels { filter, quick, run, records } => {
            let report = kernels::measure(&filter, quick, &run, &records, stop, terminal)?;
            publish(&report, report.table(), files, out)
        }
    }
}

/// A file for JSON; a file for a chart, and what stands beside these results in it.
type Files<'a> = (Option<&'a Path>, Option<(&'a Path, Vec<Recorded>)>);

fn save_chart(path: &Path, chart: &str) -> Result<()> {
    save_new(path, chart.as_bytes(), false).map_err(without_force_hint)
}

/// Writes the table, the JSON, or both, and the chart, as requested.
fn publish(report: &impl Serialize, table: String, (json, svg): Files<'_>, out: &mut dyn Write) -> Result<()> {
    let chart = svg.map(|(path, beside)| chart::draw(report, beside).and_then(|chart| save_chart(path, &chart)));
    let printed = match json {
        Some(path) if path == Path::new(DASH) => print(out, &json_line(report)?),
        Some(path) => {
            // The file is written first, so that the results are kept even if the table cannot be printed.
            save_new(path, &json_line(report)?, false).map_err(without_force_hint)?;
            print(out, table.as_bytes())
        }
        None => print(out, table.as_bytes()),
    };
    // Results that were measured are told even if they could not be drawn.
    printed.and(chart.unwrap_or(Ok(())))
}

/// Replaces the error whose hint recommends `--force`, which `kiln bench` does not have.
pub fn without_force_hint(error: Error) -> Error {
    match error {
        Error::OutputExists { path } => {
            let source = io::Error::new(ErrorKind::AlreadyExists, "it exists, and is not overwritten; give another name");
            Error::Write { path, source }
        }
        other => other,
    }
}
