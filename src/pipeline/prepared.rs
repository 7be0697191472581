//! Prepares the RoPE table, the timestep embeddings and the initial noise of a job, on the pool's threads while the device is
//! busy. Values that depend only on the shape of a job are kept for the next job of that shape.

use super::branches::Ranks;
use super::inputs::Inputs;
use super::job::{Job, Noise};
use crate::config::TransformerConfig;
use crate::error::Result;
use crate::noise::draw;
use crate::progress::PreviewKind;
use crate::sampler::{Schedule, timestep_embeddings};
use crate::sequence::{RopeSpec, SequenceLayout};
use crate::tensor::Precision;
use crate::tokenizer::Padding;
use std::borrow::Cow;
use std::sync::Arc;

/// The facts about a job that decide which ops its images take, on one engine.
#[derive(Clone, PartialEq)]
struct Shape {
    plan: SequenceLayout,
    steps: usize,
    /// Real tokens and padding of the prompt, and real tokens of the negative prompt if there is one.
    prompt: (usize, Padding),
    negative: Option<usize>,
    /// Whether references are cached, and whether values are read back for a record.
    cached: bool,
    record: bool,
    /// Whether the init image is encoded, whether denoising starts from it, and whether tokens of it are kept.
    init: [bool; 3],
    /// The ranks of the LoRA branches.
    ranks: Ranks,
}

/// The result of a dry run.
#[derive(Clone, Copy)]
pub struct WorkNeeded {
    /// Bytes of working memory.
    pub bytes: u64,
    pub ops: u64,
    pub flops: u64,
}

/// Values that depend only on the shape of a job; all empty in a dry run.
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

/// The initial noise of the image with this seed.
pub fn initial_noise(job: &Job, seed: u64, precision: Precision) -> Cow<'_, [f32]> {
    match &job.noise {
        Noise::Drawn(kind) => Cow::Owned(draw(*kind, seed, job.size.grid(), precision)),
        Noise::Given(values) => Cow::Borrowed(values),
    }
}

/// Values computed for the shapes of earlier jobs, the latest at the end.
#[derive(Default)]
pub struct ShapeCache {
    dry_runs: Vec<(Shape, WorkNeeded)>,
    preloaded: Vec<(SequenceLayout, usize, Ranks, Option<PreviewKind>)>,
    tables: Vec<(SequenceLayout, Schedule, Arc<Tables>)>,
}

impl ShapeCache {
    /// The most dry runs to keep. Prompts of different lengths have different dry runs.
    const DRY_RUNS: usize = 64;
    /// The most tables to keep. A table takes 2.4 MB at 1024x1024, and 27 MB at the maximum number of tokens.
    const TABLES: usize = 4;

    /// The result of a dry run of these inputs. Calls `run` unless a result for their shape is cached.
    pub fn dry_run(&mut self, inputs: &Inputs<'_>, run: impl FnOnce() -> Result<WorkNeeded>) -> Result<WorkNeeded> {
        let shape = Shape {
            plan: inputs.plan.clone(),
            steps: inputs.schedule.steps(),
            prompt: (inputs.prompt.real, inputs.prompt.padding),
            negative: inputs.negative.as_ref().map(|tokens| tokens.real),
            cached: inputs.cached,
            record: inputs.job.record,
            init: [inputs.init().is_some(), inputs.start().is_some(), inputs.start().is_some_and(|start| start.keep.is_some())],
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

    /// Calls `preload_kernels` unless the kernels for inputs of this shape, with such previews, were preloaded before.
    pub fn preload_kernels(
        &mut self,
        inputs: &Inputs<'_>,
        previews: Option<PreviewKind>,
        preload_kernels: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let shape = (inputs.plan.clone(), inputs.schedule.steps(), inputs.ranks.clone(), previews);
        if !self.preloaded.contains(&shape) {
            preload_kernels()?;
            keep(&mut self.preloaded, shape, Self::DRY_RUNS);
        }
        Ok(())
    }

    /// The cached tables of these inputs.
    pub fn tables(&self, inputs: &Inputs<'_>) -> Option<Arc<Tables>> {
        let same = |(plan, schedule, _): &&(SequenceLayout, Schedule, _)| *plan == inputs.plan && *schedule == inputs.schedule;
        self.tables.iter().find(same).map(|(.., tables)| tables.clone())
    }

    /// Keeps the tables of these inputs. They replace the least recently used ones.
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
