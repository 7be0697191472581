//! `kiln bench`: the time and memory that images take, stage by stage, or the speed of single kernels.

mod images;
mod kernels;
mod share;

use super::args::{BenchArgs, GenerateArgs, RunArgs};
use super::outputs::refuse_same;
use super::request::{ImageRequest, Setup};
use super::stdout::{DASH, json_line, print};
use crate::error::{Error, Result};
use crate::locate::Environment;
use crate::output::{Planned, check_writable, save_new};
use crate::selftest::Records;
use crate::terminal::{Terminal, Verbosity};
use crate::text::shown_path;
use crate::trace;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
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
    /// How much to print.
    pub verbosity: Verbosity,
}

/// The subject of a measurement.
#[derive(Debug)]
enum Subject {
    /// A cold image and `runs` warm ones; with `share` there is a block to paste.
    Images { request: Box<ImageRequest>, setup: Box<Setup>, runs: usize, share: bool },
    /// The ops whose names contain `filter`, on the backend that `run` selects.
    Kernels { filter: String, quick: bool, run: RunArgs, records: Records },
}

impl BenchRequest {
    /// Checks flags against each other, the environment and the file system.
    pub fn new(args: BenchArgs, environment: Environment, stdin: &mut dyn Read) -> Result<Self> {
        let started = Instant::now();
        let _span = trace::span("read the request");
        let BenchArgs { mut prompt, model, kernels, quick, runs, json, share, shape, run } = args;
        let verbosity = Verbosity::new(run.quiet, run.verbose);
        if share && json.as_deref() == Some(Path::new(DASH)) {
            let what = "--share adds a block to the table, and --json prints JSON in its place";
            return Err(Error::usage(what, "write --json=FILE to have both"));
        }
        if let Some(path) = json.as_deref().filter(|path| *path != Path::new(DASH)) {
            run.trace.trace.iter().try_for_each(|trace| refuse_same(path, "--json", trace, "--trace"))?;
            check_writable(&[Planned { path: path.into(), bytes: 0 }], false).map_err(without_force_hint)?;
        } else if let (Some(_), Some(word)) = (&json, &prompt.prompt)
            && Path::new(word).extension().is_some_and(|extension| extension == "json")
        {
            let file = shown_path(Path::new(word));
            return Err(Error::usage(
                format!("`{file}` would be the prompt, not the file of --json"),
                format!("write --json={file}"),
            ));
        }
        if let Some(filter) = kernels {
            kernels::check(&filter)?;
            let records = Records::below(environment.caches().as_deref());
            return Ok(Self { started, subject: Subject::Kernels { filter, quick, run, records }, json, verbosity });
        }
        if prompt.prompt.is_none() && prompt.prompt_file.is_none() {
            prompt.prompt = Some(OsString::from(PROMPT));
        }
        let args = GenerateArgs {
            prompt,
            model,
            output: None,
            format: None,
            quality: None,
            force: false,
            dump: None,
            json: false,
            shape,
            negative: None,
            seed: Some(0),
            count: 1,
            noise_kind: None,
            noise_sms: None,
            noise_threads: None,
            noise: None,
            run,
        };
        let (request, setup) = ImageRequest::from_args(&args, environment, stdin, 0)?;
        let subject = Subject::Images { request: Box::new(request), setup: Box::new(setup), runs, share };
        Ok(Self { started, subject, json, verbosity })
    }
}

/// Runs the measurement and writes a table or JSON to `out`. No image is kept.
pub fn bench(request: BenchRequest, stop: &Arc<AtomicBool>, terminal: &Terminal, out: &mut dyn Write) -> Result<()> {
    let BenchRequest { started, subject, json, .. } = request;
    let json = json.as_deref();
    match subject {
        Subject::Images { request, setup, runs, share } => {
            let report = images::measure(*request, *setup, started, runs, stop, terminal)?;
            let block = if share { format!("\n{}", report.share_block()) } else { String::new() };
            publish(&report, report.table() + &block, json, out)
        }
        Subject::Kernels { filter, quick, run, records } => {
            let report = kernels::measure(&filter, quick, &run, &records, stop, terminal)?;
            publish(&report, report.table(), json, out)
        }
    }
}

/// Writes the table, the JSON, or both, as requested.
fn publish(report: &impl Serialize, table: String, json: Option<&Path>, out: &mut dyn Write) -> Result<()> {
    match json {
        Some(path) if path == Path::new(DASH) => print(out, &json_line(report)?),
        Some(path) => {
            // The file is written first, so that the results are kept even if the table cannot be printed.
            save_new(path, &json_line(report)?, false).map_err(without_force_hint)?;
            print(out, table.as_bytes())
        }
        None => print(out, table.as_bytes()),
    }
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
