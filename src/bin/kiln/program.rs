//! The program: parses the flags, runs the command, prints an error and what to do about it, and returns the exit code of its kind.

use crate::cli::{self, Process, Signals};
use kiln::error::{Error, Result};
use kiln::locate::{Embedded, Environment};
use kiln::text::{shown_line, shown_text};
use kiln::threads;
use std::error::Error as _;
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{self, UnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// The model that is part of this program.
#[cfg(feature = "builtin")]
const BUILT_IN: Option<Embedded> = Some(crate::builtin::MODEL);
#[cfg(not(feature = "builtin"))]
const BUILT_IN: Option<Embedded> = None;

/// The message of the latest panic.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Why the program ends early.
enum Failure {
    /// An error of the library.
    Error(Error),
    /// A bug, with the message of the panic.
    Panic(String),
}

/// Runs the program with these arguments, the first of which is its own name, and returns its exit code. A process calls it once:
/// it installs a panic hook and, for most commands, signal handlers.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    // The main thread's stack is as large as `ulimit -s` says, which may be too small for this program. Under a limit on addresses it
    // may not grow any more when it has to, and a signal would end the program. The stack of another thread is there from its start.
    #[cfg(target_os = "linux")]
    {
        use rustix::process::Resource;
        let limit = |of| rustix::process::getrlimit(of).current;
        let small = limit(Resource::Stack).is_some_and(|bytes| bytes < threads::STACK as u64);
        let may_not_grow = small || limit(Resource::As).is_some();
        let on_thread = |args: Vec<OsString>| std::thread::Builder::new().stack_size(threads::STACK).spawn(|| program(args));
        if may_not_grow && let Ok(thread) = on_thread(args.clone()) {
            // `program` catches its own panics, so the join does not fail.
            return thread.join().unwrap_or(70);
        }
    }
    program(args)
}

fn program(args: Vec<OsString>) -> u8 {
    record_panics();
    // A write beyond the limit on file sizes raises SIGXFSZ, which by default ends the process. With any handler installed the
    // write fails with EFBIG instead and is reported like other errors. Without one the program still works.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let signals = Signals::default();
    let failure = match guarded(|| {
        let command = match cli::parse(args) {
            Ok(command) => command,
            // clap returns help and version as errors, too; they go to standard output, usage errors to standard error.
            Err(text) => {
                let printed = text.print().and_then(|()| io::stdout().flush());
                return match printed {
                    Err(source) if !text.use_stderr() => Err(Error::Write { path: cli::STDOUT.into(), source }),
                    // A usage error that cannot be printed to standard error leaves only the exit code.
                    _ => Ok(text.exit_code() as u8),
                };
            }
        };
        let command = command.subcommand();
        // The thread pool has to exist before its first use. Zero threads mean one per core.
        let count = command.threads().unwrap_or(0);
        if command.shares_pool() {
            threads::start_shared(count)?;
        } else {
            threads::start(count);
        }
        let (environment, out) = (Environment::of_process(BUILT_IN), &mut io::stdout());
        command.run(Process { environment, signals: &signals, out }).map(|()| 0)
    }) {
        Ok(code) => return code,
        Err(failure) => failure,
    };
    // A reader such as `head` closes the pipe once it has enough output, which is not a failure.
    if matches!(&failure, Failure::Error(error) if cli::reader_left(error)) {
        return 0;
    }
    // Standard error may be closed, too; the exit code still reports the failure.
    let _ = io::stderr().write_all(report(&failure).as_bytes());
    code(&failure, &signals)
}

/// The exit code of the process.
fn code(failure: &Failure, signals: &Signals) -> u8 {
    match failure {
        Failure::Error(Error::Interrupted) if signals.terminated.load(Ordering::Relaxed) => 143,
        Failure::Error(error) => error.exit_code(),
        Failure::Panic(_) => 70,
    }
}

/// Replaces the panic hook with one that only records the message. Some panics are expected: the library catches a
/// dependency's panics and turns them into errors. [`guarded`] alone decides which panic ends the program.
fn record_panics() {
    panic::set_hook(Box::new(|info| {
        let what = info.payload_as_str().unwrap_or("no message");
        let place = info.location().map(|place| format!(" ({place})")).unwrap_or_default();
        // The backtrace is empty unless RUST_BACKTRACE asks for it.
        let trace = std::backtrace::Backtrace::capture();
        let trace = match trace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("\n{trace}"),
            _ => String::new(),
        };
        *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{what}{place}{trace}"));
    }));
}

/// Runs the whole program and turns an uncaught panic into a failure.
fn guarded<T>(work: impl FnOnce() -> Result<T> + UnwindSafe) -> Result<T, Failure> {
    match panic::catch_unwind(work) {
        Ok(result) => result.map_err(Failure::Error),
        Err(_) => {
            let text = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
            Err(Failure::Panic(text.unwrap_or_else(|| "no message".into())))
        }
    }
}

/// Formats the error, its causes, and after a blank line the hint.
fn report(failure: &Failure) -> String {
    let error = match failure {
        Failure::Error(error) => error,
        Failure::Panic(text) => {
            let text = text.split('\n').map(shown_line).collect::<Vec<_>>().join("\n");
            return format!("error: internal error: {text}\n\nhint: {}\n", cli::REPORT_BUG);
        }
    };
    let mut message = cli::message(error);
    let mut text = format!("error: {message}\n");
    let mut source = error.source();
    while let Some(cause) = source {
        // Some messages already end with their cause.
        let cause_text = shown_text(&cause.to_string());
        if !message.ends_with(&cause_text) {
            text.push_str(&format!("  caused by: {cause_text}\n"));
        }
        message = cause_text;
        source = cause.source();
    }
    if let Some(hint) = cli::hint(error) {
        text.push_str(&format!("\nhint: {hint}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn a_panic_becomes_one_line_and_a_hint() {
        record_panics();
        let failure = guarded(|| -> Result<()> { panic!("boom {}", 7) }).unwrap_err();
        let text = report(&failure);
        assert!(text.starts_with("error: internal error: boom 7 (src/bin/kiln/program.rs:"), "{text}");
        assert!(text.ends_with("\n\nhint: this is a bug in kiln; please report it with the command line\n"), "{text}");
        assert_eq!(code(&failure, &Signals::default()), 70);
        // A panic that is caught further down does not end the program.
        let value = guarded(|| Ok(panic::catch_unwind(|| panic!("expected")).is_err()));
        assert!(matches!(value, Ok(true)));
        let error = guarded(|| -> Result<()> { Err(Error::Interrupted) });
        assert!(matches!(error, Err(Failure::Error(Error::Interrupted))));
    }

    #[test]
    fn causes_are_not_repeated() {
        let source = io::Error::new(ErrorKind::NotFound, "gone");
        let failure = Failure::Error(Error::Read { path: "x".into(), source });
        assert_eq!(report(&failure), "error: cannot read (x): gone\n");
        let failure = Failure::Error(Error::usage("wrong", "do right"));
        assert_eq!(report(&failure), "error: wrong\n\nhint: do right\n");
    }

    #[test]
    fn only_a_broken_pipe_of_standard_output_is_ignored() {
        let error = |path: &str, kind: ErrorKind| Error::Write { path: path.into(), source: kind.into() };
        assert!(cli::reader_left(&error(cli::STDOUT, ErrorKind::BrokenPipe)));
        assert!(!cli::reader_left(&error(cli::STDOUT, ErrorKind::StorageFull)));
        assert!(!cli::reader_left(&error("x.png", ErrorKind::BrokenPipe)));
    }
}
