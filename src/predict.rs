//! Predicts how long the stages of an image take on a GPU that kiln may never have run on: every op of the dry run takes the time that
//! a roofline gives it, with shares of the peaks that were measured elsewhere or are assumed. docs/kernels.md names all assumptions
//! and says how far the predictions are from what was measured. They are predictions, and no figure of them is ever called measured.

mod card;
mod time;

pub use card::{CARDS, Card};
pub use time::{KernelFamily, Predictor};

use crate::pipeline::{Estimate, OpTime};
use crate::progress::Phase;
use std::rc::Rc;

/// The predicted seconds of an image's stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    stages: Vec<(Phase, f64)>,
    steps: usize,
}

impl Predictor {
    /// The time of ops, for an estimate.
    pub fn op_time(&self) -> OpTime {
        let predictor = self.clone();
        Rc::new(move |op| predictor.seconds(op))
    }
}

impl Prediction {
    /// That of an estimate which was told what ops take; none of another.
    pub fn of(estimate: &Estimate) -> Option<Self> {
        let (stages, steps) = (estimate.seconds.clone(), estimate.sigmas.len());
        (!stages.is_empty()).then_some(Self { stages, steps })
    }

    /// The seconds of a stage; none if the image does not have it.
    pub fn stage(&self, phase: Phase) -> Option<f64> {
        self.stages.iter().filter(|(p, _)| *p == phase).map(|(_, seconds)| *seconds).reduce(|a, b| a + b)
    }

    /// The seconds of a denoising step.
    pub fn step(&self) -> Option<f64> {
        Some(self.stage(Phase::Denoise)? / self.steps.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Conventions, Variant};
    use crate::pipeline::{Configs, Job, LoadOptions, estimate_timed};
    use crate::sequence::Pixels;

    #[test]
    fn show() {
        for (name, c) in [("4b", Configs::klein_4b()), ("9b", Configs::klein_9b())] {
            for side in [512, 1024, 2048] {
                for (card, family) in CARDS.iter().map(|c| (c, KernelFamily::Portable)).chain([(&CARDS[3], KernelFamily::Hopper)])
                {
                    let mut job = Job::new("", 0, &Conventions::klein(), Variant::Distilled).unwrap();
                    job.size = Pixels::new(side, side).unwrap();
                    let p = Predictor::new(card, family).unwrap();
                    let e =
                        estimate_timed(&c, Variant::Distilled, LoadOptions::DEFAULT, card.gemm_formats(), &job, Some(p.op_time()))
                            .unwrap();
                    let q = Prediction::of(&e).unwrap();
                    println!(
                        "{name} {side} {} {family:?}: encode {:.1} step {:.1} decode {:.1}",
                        card.name,
                        1e3 * q.stage(Phase::Encode).unwrap(),
                        1e3 * q.step().unwrap(),
                        1e3 * q.stage(Phase::Decode).unwrap()
                    );
                }
            }
        }
    }
}
