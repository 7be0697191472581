//! Previews of an image while it is denoised. They are made in buffers of the image that nothing else uses between steps, so they take no
//! memory of their own.

use crate::backend::{Backend, Op, Reading};
use crate::config::PreviewTable;
use crate::error::Result;
use crate::image::Image;
use crate::model::Vae;
use crate::progress::{PreviewKind, Progress};
use crate::sequence::{Grid, PATCH};
use crate::tensor::{Arena, Tensor};
use std::time::{Duration, Instant};

/// The least time between two previews of steps. More than five images a second help nobody.
const PAUSE: Duration = Duration::from_millis(200);

/// Buffers of an image. None holds anything that is read after a step.
#[derive(Clone, Copy)]
pub struct PreviewBuffers {
    /// f32, in the shape of the latents: receives the predicted clean latents.
    pub clean: Tensor,
    /// The decoded image, f32.
    pub image: Tensor,
    /// The decoded image in bytes.
    pub pixels: Tensor,
    /// The size of the image in tokens.
    pub grid: Grid,
}

/// Makes previews for a caller who wants them.
pub struct Previews<'a> {
    progress: &'a dyn Progress,
    how: How<'a>,
    buffers: PreviewBuffers,
    /// When the last preview was shown.
    last: Option<Instant>,
    /// When this step of the image began, if one did, and how long the step before took.
    began: Option<Instant>,
    pace: Duration,
    /// Whether the caller has chosen the step that runs.
    wanted: bool,
    /// The preview on its way from the device.
    drawn: Option<Drawn>,
}

/// A preview that the device draws and sends while it works on the next step.
struct Drawn {
    /// The number of steps that are done.
    step: usize,
    /// Whether the caller wants this step's preview, however soon it comes.
    wanted: bool,
    size: [usize; 2],
    pixels: Reading<u8>,
}

/// How latents become an image.
enum How<'a> {
    Table(&'a PreviewTable),
    Vae(&'a Vae),
}

impl<'a> Previews<'a> {
    /// The previews that the caller wants. There are none without a table if the caller wants fast ones.
    pub fn wanted(
        progress: &'a dyn Progress,
        table: Option<&'a PreviewTable>,
        vae: &'a Vae,
        buffers: PreviewBuffers,
    ) -> Option<Self> {
        let how = match progress.wants_preview()? {
            PreviewKind::Fast => How::Table(table?),
            PreviewKind::Full => How::Vae(vae),
        };
        Some(Self { progress, how, buffers, last: None, began: None, pace: Duration::ZERO, wanted: false, drawn: None })
    }

    /// Whether the caller has chosen this step while the preview of the step before is still in the buffers, which hold one preview.
    pub fn needs_room(&self, step: usize, steps: usize) -> bool {
        self.drawn.is_some() && self.progress.wants_preview_of(step, steps) == Some(true)
    }

    /// Begins a step, the first being 1. If the caller leaves the choice of steps to the pace, the preview of the step is worth drawing if the
    /// last one will be old enough when the step has ended, as far as the step before tells. The host issues a step while the device works,
    /// so it cannot wait and see.
    pub fn begin_step(&mut self, step: usize, steps: usize) -> bool {
        let now = Instant::now();
        if let Some(before) = self.began.replace(now) {
            self.pace = now - before;
        }
        let choice = self.progress.wants_preview_of(step, steps);
        self.wanted = choice == Some(true);
        // The buffers hold one preview.
        self.drawn.is_none() && choice.unwrap_or_else(|| is_due(self.last, now + self.pace))
    }

    /// Where the predicted clean latents belong.
    pub fn clean(&self) -> Tensor {
        self.buffers.clean
    }

    /// Predicts the clean latents from the latents after a step, the step's velocity and the noise level that the step has reached.
    pub fn predict(&self, be: &mut dyn Backend, latents: Tensor, velocity: Tensor, sigma: f32) -> Result<()> {
        let clean = self.buffers.clean;
        be.run(Op::Copy { out: clean, x: latents })?;
        be.run(Op::Euler { latents: clean, velocity, dt: -sigma })
    }

    /// Issues the drawing of the predicted clean latents. `step` is the number of steps that are done then.
    pub fn draw(&mut self, be: &mut dyn Backend, ws: &mut Arena, step: usize) -> Result<()> {
        let PreviewBuffers { clean, image, pixels, grid } = self.buffers;
        let (out, size) = match self.how {
            How::Table(table) => {
                let (out, rows) = (pixels.rows(0..4 * clean.rows), image.rows(0..PreviewTable::ROWS));
                be.write(rows, table.values())?;
                be.run(Op::Preview { out, latents: clean, table: rows, width: grid.width })?;
                (out, [2 * grid.width, 2 * grid.height])
            }
            How::Vae(vae) => {
                vae.decode(be, ws, image, clean, grid)?;
                be.run(Op::Pixels { out: pixels, x: image })?;
                (pixels, [PATCH * grid.width, PATCH * grid.height])
            }
        };
        self.drawn = Some(Drawn { step, wanted: self.wanted, size, pixels: Reading::begin_bytes(be, out)? });
        Ok(())
    }

    /// Shows what was drawn, once this many steps have ended well. It is passed over if that was sooner than expected.
    pub fn show(&mut self, be: &mut dyn Backend, done: usize) -> Result<()> {
        let Some(Drawn { step, wanted, size: [width, height], pixels }) = self.drawn.take_if(|drawn| drawn.step <= done) else {
            return Ok(());
        };
        let pixels = pixels.finish_bytes(be)?;
        if wanted || is_due(self.last, Instant::now()) {
            self.progress.preview(step, Image { width, height, pixels });
            self.last = Some(Instant::now());
        }
        Ok(())
    }

    /// The image is finished, and was shown just now.
    pub fn finish(&mut self) {
        (self.last, self.began) = (Some(Instant::now()), None);
    }
}

/// Whether a step that ends now has a preview.
fn is_due(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= PAUSE)
}

/// Wants previews and shows none.
pub struct Unseen(pub Option<PreviewKind>);

impl Progress for Unseen {
    fn wants_preview(&self) -> Option<PreviewKind> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::Adapters;
    use crate::backend::{DryRun, GemmFormats};
    use crate::component::PerComponent;
    use crate::config::{Configs, ModelDefaults, Variant};
    use crate::pipeline::branches::Branches;
    use crate::pipeline::inputs::Inputs;
    use crate::pipeline::job::{Job, LoadOptions};
    use crate::pipeline::stages::Stages;
    use crate::sequence::Pixels;
    use crate::tokenizer::Tokens;

    /// The bytes and the ops of a dry run.
    fn dry_run(kind: Option<PreviewKind>, side: usize, vae_tiling: bool) -> (u64, u64) {
        let (configs, adapters) = (Configs::KLEIN_4B, Adapters(Vec::new()));
        let options = LoadOptions { vae_tiling, ..LoadOptions::DEFAULT };
        let (stages, ..) = Stages::place(&configs, PerComponent::default(), options, &adapters, GemmFormats::NONE).unwrap();
        // With guidance every buffer of latents is in use.
        let job = Job::new("", 0, &ModelDefaults::klein(), Variant::Base).unwrap();
        let job = Job { size: Pixels::new(side, side).unwrap(), steps: 2, ..job };
        let length = configs.text_encoder.max_tokens;
        let tokens = Tokens { ids: vec![0; length], real: length, padding: job.padding, cut: 0 };
        let inputs = Inputs::new(&job, Variant::Base, &Branches::default(), None, |_, _| Ok(tokens.clone())).unwrap();
        let mut plan = DryRun::new(GemmFormats::NONE);
        (stages.dry_run(&mut plan, &inputs, &Unseen(kind)).unwrap(), plan.ops)
    }

    #[test]
    fn previews_take_no_more_memory() {
        for (side, tiling) in [(64, false), (1024, false), (2048, true)] {
            let (bytes, ops) = dry_run(None, side, tiling);
            let [fast, full] = [PreviewKind::Fast, PreviewKind::Full].map(|kind| dry_run(Some(kind), side, tiling));
            assert_eq!(fast, (bytes, ops + 3), "{side}");
            assert!(full.0 == bytes && full.1 > ops + 3, "{side}: {full:?}, without previews {bytes} and {ops}");
        }
    }

    #[test]
    fn a_step_that_ends_too_soon_is_passed_over() {
        let shown = Instant::now();
        let due = |millis| is_due(Some(shown), shown + Duration::from_millis(millis));
        assert!(is_due(None, shown) && due(200) && due(5000));
        assert!(!due(0) && !due(199));
    }
}
