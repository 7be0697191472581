//! The inputs of a job's stages, and the checks of their results.

use super::branches::{Branches, Ranks};
use super::job::{Job, ReferenceInput, Start};
use crate::adapter::AdapterSet;
use crate::backend::{Backend, Op, Reading};
use crate::checkpoint::Weights;
use crate::component::{Component, PerComponent};
use crate::config::Variant;
use crate::error::{Error, Result};
use crate::sampler::Schedule;
use crate::sequence::{Grid, SequenceLayout};
use crate::tensor::Tensor;
use crate::tokenizer::Tokens;
use std::collections::VecDeque;
use std::sync::Arc;

/// The inputs of the stages, apart from the weights. All are known before anything runs.
pub struct Inputs<'a> {
    pub job: &'a Job,
    pub prompt: Tokens,
    /// The negative prompt, if classifier-free guidance is on.
    pub negative: Option<Tokens>,
    /// Whether attention sees reference tokens through cached keys and values.
    pub cached: bool,
    pub plan: SequenceLayout,
    pub schedule: Schedule,
    /// The adapters that have LoRA branches, and the branch ranks.
    pub adapters: AdapterSet,
    pub ranks: Ranks,
    /// The weight files, if the backend reads them in place while ops run.
    pub files: Option<Arc<PerComponent<Weights>>>,
}

impl<'a> Inputs<'a> {
    /// Derives the inputs from a job, for a model of this variant with these LoRA branches. `tokenize` takes the name of a text,
    /// for messages, and the text.
    pub fn new(
        job: &'a Job,
        variant: Variant,
        branches: &Branches,
        files: Option<Arc<PerComponent<Weights>>>,
        tokenize: impl Fn(&str, &str) -> Result<Tokens>,
    ) -> Result<Self> {
        let prompt = tokenize("prompt", &job.prompt)?;
        let guided = variant.uses_cfg(job.guidance);
        let negative = guided.then(|| tokenize("negative prompt", &job.negative)).transpose()?;
        let canvas = job.size.grid();
        let as_reference = job.start.iter().filter(|start| start.is_reference).map(|start| &start.init);
        let references: Vec<Grid> = as_reference.chain(&job.references).map(|r| r.grid).collect();
        Ok(Self {
            job,
            cached: variant == Variant::Kv && !references.is_empty(),
            plan: SequenceLayout::new(prompt.ids.len(), canvas, &references)?,
            schedule: job.schedule(),
            prompt,
            negative,
            adapters: branches.set.clone(),
            ranks: branches.ranks.clone(),
            files,
        })
    }

    /// The init image, if it is encoded: as where denoising starts, or as a reference.
    pub fn init(&self) -> Option<&'a ReferenceInput> {
        self.job.start.as_ref().filter(|start| start.uses_init() || start.is_reference).map(|start| &start.init)
    }

    /// The images that are encoded: the init image first, then the references.
    pub fn images(&self) -> Vec<&'a ReferenceInput> {
        self.init().into_iter().chain(&self.job.references).collect()
    }

    /// The name of encoding one of these images, for messages.
    pub fn stage_of_image(&self, index: usize) -> String {
        match (self.init(), index) {
            (Some(_), 0) => "encoding the init image".into(),
            (init, _) => format!("encoding reference {}", index + 1 - usize::from(init.is_some())),
        }
    }

    /// Where denoising starts, if it needs the init image.
    pub fn start(&self) -> Option<&'a Start> {
        self.job.start.as_ref().filter(|start| start.uses_init())
    }

    /// Refuses encoded prompts with values that are not finite. `counts` is how many the encoding has found.
    pub fn check_prompts(&self, be: &mut dyn Backend, counts: Reading) -> Result<()> {
        let counts = counts.finish(be)?;
        self.check_files(&[Component::TextEncoder])?;
        for (count, stage) in counts.into_iter().zip(["encoding the prompt", "encoding the negative prompt"]) {
            if count != 0.0 {
                return Err(Error::NotFinite { stage: stage.into(), count: count as usize });
            }
        }
        Ok(())
    }

    /// Fails if files that ops read from have changed, or if weights of these parts were never written.
    fn check_files(&self, parts: &[Component]) -> Result<()> {
        let files = || self.files.iter().flat_map(|files| files.values());
        files().try_for_each(Weights::verify)?;
        files().filter(|weights| parts.contains(&weights.component())).try_for_each(Weights::check_written)
    }
}

/// Checks of results whose counts are still on their way to the host. They refuse values that are not finite or came from weights
/// that changed or were never written. Otherwise a NaN would become a black image without an explanation.
pub struct Checks<'a> {
    inputs: &'a Inputs<'a>,
    waiting: VecDeque<Check<'a>>,
}

struct Check<'a> {
    count: Reading,
    /// The parts whose weights have been read.
    parts: &'a [Component],
    stage: String,
}

impl<'a> Checks<'a> {
    /// No checks yet.
    pub fn new(inputs: &'a Inputs<'a>) -> Self {
        Self { inputs, waiting: VecDeque::new() }
    }

    /// Begins a check of `x`, the result of a stage. `count` is a tensor of one element for the count. No later op may write it
    /// before the check is settled.
    pub fn begin(&mut self, be: &mut dyn Backend, count: Tensor, x: Tensor, parts: &'a [Component], stage: String) -> Result<()> {
        be.run(Op::NonFinite { count, x })?;
        let count = Reading::begin(be, count)?;
        self.waiting.push_back(Check { count, parts, stage });
        Ok(())
    }

    /// Waits until at most `most` checks are left, and finishes the checks that are already complete. Returns how many have
    /// passed. Weights are checked first, because they can be the cause of a NaN.
    pub fn settle(&mut self, be: &mut dyn Backend, most: usize) -> Result<u64> {
        let mut passed = 0;
        while self.waiting.len() > most || self.waiting.front().is_some_and(|check| matches!(check.count, Reading::Done(_))) {
            let Some(Check { count, parts, stage }) = self.waiting.pop_front() else { break };
            let found = count.finish(be)?.first().copied().unwrap_or(0.0);
            self.inputs.check_files(parts)?;
            if found != 0.0 {
                return Err(Error::NotFinite { stage, count: found as usize });
            }
            passed += 1;
        }
        Ok(passed)
    }
}

/// Reads a tensor back to the host.
pub fn download(be: &mut dyn Backend, tensor: Tensor) -> Result<Vec<f32>> {
    let mut values = vec![0.0; tensor.len()];
    be.read(tensor, &mut values)?;
    Ok(values)
}
