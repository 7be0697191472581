//! The file of `--trace`.

use super::args::RunArgs;
use super::bench::without_force_hint;
use super::stdout::DASH;
use crate::terminal::{Terminal, Verbosity};
use kiln::error::{Error, Result};
use kiln::output::{PlannedFile, check_writable, save_new};
use kiln::progress::Progress;
use kiln::text::{grouped, shown_path};
use kiln::trace::{self, Finished, Trace};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The trace of a command, from its flags to its end.
pub struct TraceFile {
    open: Option<(Trace, PathBuf)>,
    command: &'static str,
    /// Whether an existing file is replaced; `None` if the command has no flag for that.
    force: Option<bool>,
    verbosity: Verbosity,
}

impl TraceFile {
    /// Runs a command, and records it. The trace is written however the command ends, except for a mistake on the command line, which
    /// leaves no file.
    pub fn record(args: &RunArgs, command: &'static str, force: Option<bool>, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let trace = Self::start(args, command, force)?;
        match work() {
            Err(error) if error.exit_code() == 2 => Err(error),
            ended => trace.end(ended),
        }
    }

    /// Starts to record if `--trace` is given, and refuses a file that cannot be written now rather than after the run.
    fn start(args: &RunArgs, command: &'static str, force: Option<bool>) -> Result<Self> {
        let mut this = Self { open: None, command, force, verbosity: args.verbosity() };
        if let Some(path) = &args.trace.trace {
            if path == Path::new(DASH) {
                return Err(Error::usage("--trace writes a file, not standard output", "name a file, such as trace.json"));
            }
            let planned = PlannedFile { path: path.clone(), bytes: 0 };
            this.hinted(check_writable(&[planned], force.unwrap_or(false)))?;
            refuse_others(path)?;
            let trace = Trace::start().ok_or(Error::Op { op: "trace", what: "this process is traced already".into() })?;
            this.open = Some((trace, path.clone()));
        }
        Ok(this)
    }

    /// Writes the trace of a run, and returns the run's result.
    fn end(mut self, ended: Result<()>) -> Result<()> {
        let Some((trace, path)) = self.open.take() else { return ended };
        let Finished { bytes, events, dropped, untimed } = trace.finish(self.command);
        let saved = refuse_others(&path).and_then(|()| self.hinted(save_new(&path, &bytes, self.force.unwrap_or(false))));
        let terminal = Terminal::new(self.verbosity);
        match &saved {
            Ok(()) => {
                let mut line = format!("trace: {}, {} events", shown_path(&path), grouped(events as u64));
                if dropped > 0 {
                    line += &format!("; the last {} are not in it", grouped(dropped));
                }
                if untimed > 0 {
                    line += &format!("; {} kernels could not be timed", grouped(untimed));
                }
                terminal.say(&line);
            }
            // The error of the run takes precedence.
            Err(error) if ended.is_err() => terminal.warn(&format!("there is no trace: {error}")),
            Err(_) => {}
        }
        ended.and(saved)
    }

    fn hinted(&self, result: Result<()>) -> Result<()> {
        if self.force.is_none() { result.map_err(without_force_hint) } else { result }
    }
}

/// Refuses to replace a file that is not a trace: it may be a part of the model, and what a run reads is known only once it runs.
fn refuse_others(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(there) if there.is_file() && !trace::is_one(path) => {
            let why = "this is not a trace, and --trace replaces nothing else; use another name";
            Err(Error::Write { path: path.into(), source: io::Error::new(io::ErrorKind::InvalidInput, why) })
        }
        _ => Ok(()),
    }
}
