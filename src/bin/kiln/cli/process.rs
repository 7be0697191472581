//! The process that a command runs in: its environment, the signals that end it, and standard output.

use crate::terminal::{Terminal, Verbosity};
use kiln::locate::Environment;
use kiln::progress::Progress;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The process that a command runs in.
pub struct Process<'a> {
    pub environment: Environment,
    pub signals: &'a Signals,
    /// Standard output.
    pub out: &'a mut (dyn Write + Send),
}

/// Flags that the signal handlers set.
#[derive(Clone, Default)]
pub struct Signals {
    /// Set by SIGINT and SIGTERM.
    pub stop: Arc<AtomicBool>,
    /// Set by SIGTERM only, which has an exit code of its own.
    pub terminated: Arc<AtomicBool>,
}

impl Signals {
    /// Creates the terminal of a command that checks the stop flag, and installs the signal handlers that set it. Other commands keep
    /// the default handlers, which end the process at once.
    pub fn terminal(&self, verbosity: Verbosity) -> Terminal {
        let terminal = Terminal::new(verbosity);
        if let Err(error) = self.listen() {
            terminal.warn(&format!("signals end this run at once: {error}"));
        }
        terminal
    }

    /// Turns the first signal into a flag, which ends the run at the next op. The second ends the process at once.
    fn listen(&self) -> io::Result<()> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::flag::{register, register_conditional_shutdown};
        for (signal, code) in [(SIGINT, 130), (SIGTERM, 143)] {
            // Handlers run in the order of registration, so the first signal finds the flag still unset.
            register_conditional_shutdown(signal, code, self.stop.clone())?;
            register(signal, self.stop.clone())?;
        }
        register(SIGTERM, self.terminated.clone())?;
        Ok(())
    }
}
