//! Quantized files as `kiln quantize` writes them: laid out as the official ones, with the values of the formulas to the bit, and
//! whole or not at all, however often the work is stopped.

mod command;
mod diffusers;
mod resuming;
mod round_trip;

use kiln::error::Result;
use kiln::internals::tensor::DType;
use kiln::progress::Progress;
use kiln::quantize::{ComponentSource, FilePlan, Options, Report, Target, WeightLayout};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Options without calibration.
fn options(format: DType, keep: &[&str]) -> Options {
    let keep = keep.iter().map(|pattern| (*pattern).into()).collect();
    Options { format, layout: WeightLayout::Comfy, keep, calibration: None }
}

/// A single file as target, whose journal is saved after so many bytes.
fn target(path: &Path, checkpoint_bytes: u64) -> Target {
    Target { path: path.into(), is_folder: false, force: false, restart: false, checkpoint_bytes }
}

/// Writes one part to a file.
fn write(part: &ComponentSource, options: &Options, target: &Target, observer: &Observer) -> Result<Report> {
    let plan = FilePlan::new(std::slice::from_ref(part), Vec::new(), options)?;
    let mut calibrate = || Ok(BTreeMap::new());
    plan.write(target, &mut calibrate, observer, &observer.stop)
}

/// What happens to a run when its progress reaches a point.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// It goes on.
    Never,
    /// It is asked to stop after so many reports.
    Stop(usize),
    /// Its process ends at once, after so many reports.
    Abort(usize),
    /// Its process ends at once when everything is written, but has no name yet.
    AbortAtEnd,
}

/// Follows a run, and may end it.
struct Observer {
    at: At,
    stop: AtomicBool,
    reports: Cell<usize>,
    /// The layers that were quantized.
    layers: RefCell<Vec<String>>,
    warnings: RefCell<Vec<String>>,
}

impl Observer {
    fn new(at: At) -> Self {
        Self {
            at,
            stop: AtomicBool::new(false),
            reports: Cell::default(),
            layers: RefCell::default(),
            warnings: RefCell::default(),
        }
    }
}

impl Progress for Observer {
    fn advance(&self, _amount: u64) {
        self.reports.set(self.reports.get() + 1);
        match self.at {
            At::Stop(reports) if self.reports.get() == reports => self.stop.store(true, Ordering::Relaxed),
            At::Abort(reports) if self.reports.get() == reports => std::process::abort(),
            _ => {}
        }
    }

    fn end(&self) {
        if self.at == At::AbortAtEnd {
            std::process::abort();
        }
    }

    fn detail(&self, text: &str) {
        self.layers.borrow_mut().push(text.into());
    }

    fn warn(&self, text: &str) {
        self.warnings.borrow_mut().push(text.into());
    }
}

/// The folder of the model that is part of the program.
fn builtin() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/builtin")
}
