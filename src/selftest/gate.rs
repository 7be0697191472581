//! The gate for native kernels: on GPUs that kernels for their architecture were never run on, these are used only after the quick
//! self-test has passed there. The portable kernels compute the same.

use super::{Extent, Key, Line, Outcome, Records, Verdict, run};
use crate::backend::cuda::Cuda;
use crate::error::Result;
use crate::trace;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// What the gate found.
#[derive(Clone, Debug, PartialEq)]
pub enum Gate {
    /// This GPU has no kernels that need it.
    Open,
    /// This is on record, and it was not run again.
    Recorded(Verdict),
    /// It was run, with this verdict, in so many seconds.
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

/// Makes the checks of an extent with native kernels, and records the verdict. Where it failed, native kernels are off afterwards; the GPU
/// may be unusable then, until it is opened again.
pub fn record(
    cuda: &mut Cuda,
    extent: &Extent<'_>,
    records: &Records,
    report: &mut dyn FnMut(&Line) -> Result<()>,
) -> Result<(Vec<Line>, Verdict)> {
    let key = Key::of(cuda);
    // A folder that cannot be written costs a second at the next start, and nothing else.
    let _ = records.save(&key, Verdict::Begun);
    cuda.enable_gated(true);
    let lines = run(cuda, extent, report).inspect_err(|_| {
        // Nothing is known then, as after a stop by the user.
        records.remove(&key);
    })?;
    let verdict = verdict(&lines);
    cuda.enable_gated(verdict == Verdict::Passed);
    let _ = records.save(&key, verdict.clone());
    Ok((lines, verdict))
}

/// Turns native kernels on if they are on record as right, or prove to be now, by checks of this extent. What the GPU holds is lost if it
/// has to be tested.
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

/// Opens a GPU, with native kernels as the gate allows them.
pub fn open(device: usize, stop: Arc<AtomicBool>, records: &Records) -> Result<(Cuda, Gate)> {
    let mut cuda = Cuda::open(device, stop.clone())?;
    let gate = gate(&mut cuda, &Extent::QUICK, records)?;
    if let Gate::Ran(Verdict::Failed(_), _) = gate {
        // The fault may have been one that the driver does not forget as long as the context lives.
        drop(cuda);
        cuda = Cuda::open(device, stop)?;
    }
    Ok((cuda, gate))
}
