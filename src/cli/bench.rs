//! `kiln bench`: how long pictures take, stage by stage, and what they take of memory; or how fast single kernels are.

mod pictures;

use super::args::{BenchArgs, GenerateArgs};
use super::request::GenerateRequest;
use super::run::print;
use crate::error::{Error, Result};
use crate::locate::Environment;
use crate::output::{check_writable, save_new};
use crate::terminal::{Terminal, Verbosity};
use serde::Serialize;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The prompt where none is given. All are padded to the same length, so none is faster than another.
const PROMPT: &str = "a red fox in the snow";

/// What to measure.
#[derive(Debug)]
pub struct BenchRequest {
    /// When this began, which a cold picture is counted from.
    started: Instant,
    pictures: GenerateRequest,
    runs: usize,
    /// Where JSON goes, if anywhere; `-` is standard output, which then has no table.
    json: Option<PathBuf>,
    /// How much to tell.
    pub verbosity: Verbosity,
}

impl BenchRequest {
    /// Checks flags against each other, the environment and the file system.
    pub fn new(args: BenchArgs, environment: Environment, stdin: &mut dyn Read) -> Result<Self> {
        let started = Instant::now();
        let BenchArgs { mut prompt, model, runs, json, shape, run, .. } = args;
        if let Some(path) = json.as_deref().filter(|path| *path != Path::new("-")) {
            check_writable(path, false, 0)?;
        }
        if prompt.prompt.is_none() && prompt.prompt_file.is_none() {
            prompt.prompt = Some(OsString::from(PROMPT));
        }
        let verbosity = Verbosity::new(run.quiet, run.verbose);
        let args = GenerateArgs {
            prompt,
            model,
            output: None,
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
        let pictures = GenerateRequest::unsaved(args, environment, stdin, 0)?;
        Ok(Self { started, pictures, runs, json, verbosity })
    }
}

/// Measures, and writes a table or JSON to `out`. No picture is kept.
pub fn bench(request: &BenchRequest, stop: &Arc<AtomicBool>, terminal: &Terminal, out: &mut dyn Write) -> Result<()> {
    let report = pictures::measure(&request.pictures, request.started, request.runs, stop, terminal)?;
    publish(&report, report.table(), request.json.as_deref(), out)
}

/// Writes results where they were asked for.
fn publish(report: &impl Serialize, table: String, json: Option<&Path>, out: &mut dyn Write) -> Result<()> {
    let text = || {
        let text = serde_json::to_string(report).map_err(|e| Error::Op { op: "json", what: e.to_string() })?;
        Ok(format!("{text}\n"))
    };
    match json {
        Some(path) if path == Path::new("-") => print(out, text()?.as_bytes()),
        Some(path) => {
            // First, so that a table that cannot be shown costs no figures.
            save_new(path, text()?.as_bytes(), false)?;
            print(out, table.as_bytes())
        }
        None => print(out, table.as_bytes()),
    }
}
