//! How long images take on this machine: what an estimate says of a stage, times what its images have taken so far.

use kiln::Estimate;
use kiln::progress::{Phase, Progress};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The stages that are predicted.
pub const STAGES: [Phase; 4] = [Phase::Encode, Phase::References, Phase::Denoise, Phase::Decode];

/// The share of the latest image in an average.
const LATEST: f64 = 0.25;

/// Seconds per FLOP before anything was measured: a slow CPU.
const UNKNOWN: f64 = 1.0 / 20e9;

/// Seconds per unit of an estimate, for each stage, as moving averages.
#[derive(Default)]
pub struct Rates(Mutex<[Option<f64>; STAGES.len()]>);

/// What an estimate says of a stage: seconds if the device is known, otherwise FLOP.
pub fn units(estimate: &Estimate, stage: Phase) -> f64 {
    if estimate.seconds.is_empty() {
        estimate.stages.iter().filter(|(phase, _)| *phase == stage).map(|(_, flops)| *flops as f64).sum()
    } else {
        estimate.seconds.iter().filter(|(phase, _)| *phase == stage).map(|(_, seconds)| seconds).sum()
    }
}

impl Rates {
    fn all(&self) -> MutexGuard<'_, [Option<f64>; STAGES.len()]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what an image took.
    pub fn learn(&self, estimate: &Estimate, spent: &[(Phase, Duration)]) {
        for (rate, stage) in self.all().iter_mut().zip(STAGES) {
            let time: Duration = spent.iter().filter(|(phase, _)| *phase == stage).map(|(_, time)| *time).sum();
            let units = units(estimate, stage);
            if units > 0.0 && !time.is_zero() {
                let latest = time.as_secs_f64() / units;
                *rate = Some(rate.map_or(latest, |before| before + LATEST * (latest - before)));
            }
        }
    }

    /// Seconds per unit of a stage. A stage that never ran is as fast as denoising.
    pub fn of(&self, stage: Phase, is_timed: bool) -> f64 {
        let all = self.all();
        let known = |stage: Phase| STAGES.iter().position(|other| *other == stage).and_then(|index| all[index]);
        known(stage).or_else(|| known(Phase::Denoise)).unwrap_or(if is_timed { 1.0 } else { UNKNOWN })
    }

    /// The predicted seconds of an image.
    pub fn seconds(&self, estimate: &Estimate) -> f64 {
        let is_timed = !estimate.seconds.is_empty();
        STAGES.iter().map(|&stage| units(estimate, stage) * self.of(stage, is_timed)).sum()
    }
}

/// Times the phases of a job.
#[derive(Default)]
pub struct Stopwatch(Mutex<Times>);

#[derive(Default)]
struct Times {
    running: Option<(Phase, Instant)>,
    spent: Vec<(Phase, Duration)>,
}

impl Stopwatch {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The times of the phases that have ended, in order.
    pub fn take(&self) -> Vec<(Phase, Duration)> {
        std::mem::take(&mut self.times().spent)
    }
}

impl Progress for Stopwatch {
    fn begin(&self, phase: Phase, _total: u64) {
        self.times().running = Some((phase, Instant::now()));
    }

    fn end(&self) {
        let mut times = self.times();
        if let Some((phase, since)) = times.running.take() {
            times.spent.push((phase, since.elapsed()));
        }
    }
}
