//! What the stages of a job are told, and the checks that what they made may be shown.

use super::Job;
use crate::backend::{Backend, Op};
use crate::checkpoint::{Part, Weights};
use crate::config::Variant;
use crate::error::{Error, Result};
use crate::sampler::Schedule;
use crate::sequence::{Grid, SequencePlan};
use crate::tensor::{Precision, Tensor};
use crate::tokenizer::Tokens;
use std::sync::Arc;

/// What the stages need beside the weights, known before anything runs.
pub struct Inputs<'a> {
    pub job: &'a Job,
    pub precision: Precision,
    pub prompt: Tokens,
    /// The negative prompt, where guidance needs one.
    pub negative: Option<Tokens>,
    /// Reference tokens are seen through their cached keys and values.
    pub cached: bool,
    pub plan: SequencePlan,
    pub schedule: Schedule,
    /// Files that ops read from.
    pub files: Option<Arc<[Weights; 3]>>,
}

impl<'a> Inputs<'a> {
    /// Derives the rest from a job and its tokens; `negative` belongs to jobs that are guided.
    pub fn new(
        job: &'a Job,
        precision: Precision,
        variant: Variant,
        prompt: Tokens,
        negative: Option<Tokens>,
        files: Option<Arc<[Weights; 3]>>,
    ) -> Result<Self> {
        let canvas = job.size.grid();
        let references: Vec<Grid> = job.references.iter().map(|r| r.grid).collect();
        Ok(Self {
            job,
            precision,
            cached: variant == Variant::Kv && !references.is_empty(),
            plan: SequencePlan::new(prompt.ids.len(), canvas, &references)?,
            schedule: Schedule::new(job.steps, canvas.tokens()),
            prompt,
            negative,
            files,
        })
    }

    /// Lets values pass that were made from whole and unchanged weights and are finite, and so fit to be shown: a NaN would be a
    /// black square with no word of why. Weights come first, because they can be where a NaN is from. `count` is a place for one
    /// number, `parts` are those whose weights were read by now.
    pub fn check(
        &self,
        be: &mut dyn Backend,
        count: Tensor,
        x: Tensor,
        parts: &[Part],
        stage: impl FnOnce() -> String,
    ) -> Result<()> {
        be.run(Op::NonFinite { count, x })?;
        let found = download(be, count)?[0];
        self.check_files(parts)?;
        if found == 0.0 { Ok(()) } else { Err(Error::NotFinite { stage: stage(), count: found as usize }) }
    }

    /// The same for encoded prompts, which were counted when they were made: nobody waited for them then.
    pub fn check_prompts(&self, be: &mut dyn Backend, counts: Tensor) -> Result<()> {
        let counts = download(be, counts)?;
        self.check_files(&[Part::TextEncoder])?;
        for (count, stage) in counts.into_iter().zip(["encoding the prompt", "encoding the negative prompt"]) {
            if count != 0.0 {
                return Err(Error::NotFinite { stage: stage.into(), count: count as usize });
            }
        }
        Ok(())
    }

    /// Fails if files that ops read from changed, or if weights of these parts were never written.
    fn check_files(&self, parts: &[Part]) -> Result<()> {
        let files = || self.files.iter().flat_map(|files| files.iter());
        files().try_for_each(Weights::verify)?;
        files().filter(|weights| parts.contains(&weights.part())).try_for_each(Weights::check_written)
    }
}

/// Brings values to the host.
pub fn download(be: &mut dyn Backend, tensor: Tensor) -> Result<Vec<f32>> {
    let mut values = vec![0.0; tensor.len()];
    be.read(tensor, &mut values)?;
    Ok(values)
}
