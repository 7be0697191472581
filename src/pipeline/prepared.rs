//! What the host prepares for a job, on the threads of the pool while the device is busy: the RoPE table, the timestep embeddings
//! and the initial noise. What depends on the shape of a job alone is kept for the next job of that
//! shape.

use super::branches::Ranks;
use super::inputs::Inputs;
use super::job::{Job, Noise};
use crate::config::TransformerConfig;
use crate::error::Result;
use crate::noise::draw;
use crate::sampler::{Schedule, timestep_embeddings};
use crate::sequence::{RopeSpec, SequenceLayout};
use crate::tensor::Precision;
use crate::tokenizer::Padding;
use std::borrow::Cow;
use std::sync::Arc;

/// Everything of a job that decides which ops its images take, on one engine.
#[derive(Clone, PartialEq)]
struct Shape {
    plan: SequenceLayout,
    steps: usize,
    /// Real tokens of the prompt and how it is padded, and those of the negative prompt if there is one.
    prompt: (usize, Padding),
    negative: Option<usize>,
    /// Whether references are cached, and whether values are read back for a record.
    cached: bool,
    record: bool,
    /// What adapters have beside weights.
    ranks: Ranks,
}

/// What a dry run has found.
#[derive(Clone, Copy)]
pub struct WorkNeeded {
    /// Bytes of working memory.
    pub bytes: u64,
    pub ops: u64,
    pub flops: u64,
}

/// Values that depend on the shape of a job alone; all are empty in a dry run.
#[derive(Default)]
pub struct Tables {
    /// The RoPE table of the transformer.
    pub rope: Vec<f32>,
    /// The embeddings of all timesteps, and of time zero.
    pub times: Vec<f32>,
}

impl Tables {
    pub fn new(config: &TransformerConfig, inputs: &Inputs<'_>) -> Self {
        let spec = RopeSpec { theta: config.rope_theta, axes: config.rope_axes };
        Self { rope: inputs.plan.rope_table(&spec), times: timestep_embeddings(&inputs.schedule) }
    }
}

/// The noise that the image of a seed begins with.
pub fn initial_noise(job: &Job, seed: u64, precision: Precision) -> Cow<'_, [f32]> {
    match &job.noise {
        Noise::Drawn(kind) => Cow::Owned(draw(*kind, seed, job.size.grid(), precision)),
        Noise::Given(values) => Cow::Borrowed(values),
    }
}

/// What was computed for the shapes of earlier jobs, the latest at the end.
#[derive(Default)]
pub struct ShapeCache {
    dry_runs: Vec<(Shape, WorkNeeded)>,
    preloaded: Vec<(SequenceLayout, usize, Ranks)>,
    tables: Vec<(SequenceLayout, Schedule, Arc<Tables>)>,
}

impl ShapeCache {
    /// Dry runs that are kept; prompts of different lengths are different ones.
    const DRY_RUNS: usize = 64;
    /// Tables that are kept. One takes 2.4 MB at 1024x1024, and 27 MB at the most tokens that there can be.
    const TABLES: usize = 4;

    /// What a dry run of these inputs finds; `run` is called if none of their shape is kept.
    pub fn dry_run(&mut self, inputs: &Inputs<'_>, run: impl FnOnce() -> Result<WorkNeeded>) -> Result<WorkNeeded> {
        let shape = Shape {
            plan: inputs.plan.clone(),
            steps: inputs.schedule.steps(),
            prompt: (inputs.prompt.real, inputs.prompt.padding),
            negative: inputs.negative.as_ref().map(|tokens| tokens.real),
            cached: inputs.cached,
            record: inputs.job.record,
            ranks: inputs.ranks.clone(),
        };
        let kept = self.dry_runs.iter().position(|(of, _)| *of == shape);
        let found = match kept {
            Some(at) => self.dry_runs.remove(at).1,
            None => run()?,
        };
        keep(&mut self.dry_runs, (shape, found), Self::DRY_RUNS);
        Ok(found)
    }

    /// Calls `preload_kernels` unless ops of such inputs were gone through before.
    pub fn preload_kernels(&mut self, inputs: &Inputs<'_>, preload_kernels: impl FnOnce() -> Result<()>) -> Result<()> {
        let shape = (inputs.plan.clone(), inputs.schedule.steps(), inputs.ranks.clone());
        if !self.preloaded.contains(&shape) {
            preload_kernels()?;
            keep(&mut self.preloaded, shape, Self::DRY_RUNS);
        }
        Ok(())
    }

    /// The tables of these inputs, if they are kept.
    pub fn tables(&self, inputs: &Inputs<'_>) -> Option<Arc<Tables>> {
        let same = |(plan, schedule, _): &&(SequenceLayout, Schedule, _)| *plan == inputs.plan && *schedule == inputs.schedule;
        self.tables.iter().find(same).map(|(.., tables)| tables.clone())
    }

    /// Keeps the tables of these inputs, in place of those that were not used for longest.
    pub fn keep_tables(&mut self, inputs: &Inputs<'_>, tables: &Arc<Tables>) {
        self.tables.retain(|(.., kept)| !Arc::ptr_eq(kept, tables));
        keep(&mut self.tables, (inputs.plan.clone(), inputs.schedule.clone(), tables.clone()), Self::TABLES);
    }
}

/// Adds the latest entry, and drops the oldest if there are more than `most`.
fn keep<T>(entries: &mut Vec<T>, latest: T, most: usize) {
    entries.push(latest);
    if entries.len() > most {
        entries.remove(0);
    }
}
