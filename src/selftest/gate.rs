//! The gate for kernels that were never run on hardware. On GPUs of their architecture they are used only after the quick self-test has
//! passed. The portable kernels compute the same.

use super::{Extent, Key, Line, Outcome, Records, Verdict, run};
use crate::backend::cuda::Cuda;
use crate::error::Result;
use crate::trace;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// How the gate decided.
#[derive(Clone, Debug, PartialEq)]
pub enum Gate {
    /// This GPU has no gated kernels.
    Open,
    /// The record has this verdict, and the self-test was not run again.
    Recorded(Verdict),
    /// The self-test was run, with this verdict, in this many seconds.
    Ran(Verdict, f64),
}

/// The verdict on the lines of a self-test.
fn verdict(lines: &[Line]) -> Verdict {
    let failed = |line: &Line| match &line.outcome {
        Outcome::Failed(detail) => Some(format!("{}: {detail}", line.name)),
        _ => None,
    };
    lines.iter().find_map(failed).map_or(Verdict::Passed, Verdict::Failed)
}

/// Runs the checks of an extent with gated kernels on, and records the verdict. If it failed, gated kernels are off afterwards, and the GPU
/// may be unusable until it is opened again.
pub fn record(
    cuda: &mut Cuda,
    extent: &Extent<'_>,
    records: &Records,
    report: &mut dyn FnMut(&Line) -> Result<()>,
) -> Result<(Vec<Line>, Verdict)> {
    let key = Key::of(cuda);
    // If the folder cannot be written, the next start runs the self-test again, which takes a second.
    let _ = records.save(&key, Verdict::Begun);
    cuda.enable_gated(true);
    let lines = run(cuda, extent, report).inspect_err(|_| {
        // A self-test that was interrupted has no verdict.
        records.remove(&key);
    })?;
    let verdict = verdict(&lines);
    cuda.enable_gated(verdict == Verdict::Passed);
    let _ = records.save(&key, verdict.clone());
    Ok((lines, verdict))
}

/// Turns gated kernels on if the record says that they passed. Without a record it runs the checks of this extent, and the contents of the
/// GPU are lost.
pub fn gate(cuda: &mut Cuda, extent: &Extent<'_>, records: &Records) -> Result<Gate> {
    if !cuda.has_gated_kernels() {
        return Ok(Gate::Open);
    }
    if let Some(verdict) = records.find(&Key::of(cuda)) {
        cuda.enable_gated(verdict == Verdict::Passed);
        return Ok(Gate::Recorded(verdict));
    }
    let start = Instant::now();
    let _span = trace::span("self-test");
    let (_, verdict) = record(cuda, extent, records, &mut |_| Ok(()))?;
    Ok(Gate::Ran(verdict, start.elapsed().as_secs_f64()))
}

/// Opens a GPU, with gated kernels as the gate allows them.
pub fn open(device: usize, stop: Arc<AtomicBool>, records: &Records) -> Result<(Cuda, Gate)> {
    let mut cuda = Cuda::open(device, stop.clone())?;
    let gate = gate(&mut cuda, &Extent::QUICK, records)?;
    if let Gate::Ran(Verdict::Failed(_), _) = gate {
        // The driver may remember the fault as long as the context lives.
        drop(cuda);
        cuda = Cuda::open(device, stop)?;
    }
    Ok((cuda, gate))
}
