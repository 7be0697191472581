//! The edit of a request: its files are read here, and what it does is put into words, metadata and JSON.

use super::args::EditFlags;
use kiln::edit::{Area, Edit, EditOptions, Mask, Sides, Strength, Summary};
use kiln::error::Result;
use kiln::metadata::InitMetadata;
use kiln::text::grouped;
use kiln::{DecodedReference, Job, ModelDefaults};
use serde::Serialize;
use std::path::PathBuf;

/// An edit whose files are read.
#[derive(Clone, Debug)]
pub struct PreparedEdit {
    pub edit: Edit,
    /// The files of the init image and of the mask.
    pub files: Vec<PathBuf>,
    facts: Facts,
}

/// What is reported of an edit.
#[derive(Clone, Debug)]
pub struct Facts {
    sha256: String,
    mask_sha256: Option<String>,
    /// Pixels around the mask that are worked on.
    mask_crop: Option<usize>,
    /// Whether a size was asked for.
    sized: bool,
    summary: Summary,
    strength: Strength,
    tokens: usize,
}

/// The edit of an image as JSON.
#[derive(Debug, Serialize)]
pub struct EditReport<'a> {
    sha256: &'a str,
    mask_sha256: Option<&'a str>,
    tokens_repainted: usize,
    pixels_repainted: usize,
    feather: usize,
    crop: Option<[usize; 4]>,
    extend: Option<[usize; 4]>,
    reference: bool,
}

impl PreparedEdit {
    /// Reads the files of an edit; `None` if there is no init image.
    pub fn open(flags: &EditFlags, size: (Option<usize>, Option<usize>), defaults: &ModelDefaults) -> Result<Option<Self>> {
        let Some(init) = &flags.init else { return Ok(None) };
        let mask = flags.mask.as_deref().map(Mask::open).transpose()?;
        let init = DecodedReference::open(init)?;
        let files = flags.init.iter().chain(&flags.mask).cloned().collect();
        Self::new(init, mask, &flags.options(size), defaults, files).map(Some)
    }

    /// Prepares an edit of a decoded image. `files` are its files, if it has any.
    pub fn new(
        init: DecodedReference,
        mask: Option<Mask>,
        options: &EditOptions,
        defaults: &ModelDefaults,
        files: Vec<PathBuf>,
    ) -> Result<Self> {
        let (sha256, mask_sha256) = (init.digest().to_owned(), mask.as_ref().map(|mask| mask.digest().to_owned()));
        let edit = Edit::new(init, mask, options, defaults)?;
        let facts = Facts {
            sha256,
            mask_sha256,
            mask_crop: options.mask_crop,
            sized: options.size != (None, None),
            summary: edit.summary.clone(),
            strength: edit.start.strength,
            tokens: edit.canvas.grid().tokens(),
        };
        Ok(Self { edit, files, facts })
    }

    /// What is reported of it.
    pub fn facts(&self) -> Facts {
        self.facts.clone()
    }
}

impl Facts {
    /// Width and height of the finished image.
    pub fn size(&self) -> (usize, usize) {
        self.summary.size
    }

    /// The share of the schedule that runs.
    pub fn strength(&self) -> Strength {
        self.strength
    }

    /// The number of tokens that are repainted.
    pub fn tokens_repainted(&self) -> usize {
        self.summary.tokens_repainted
    }

    /// Whether there is a mask or a frame.
    pub fn is_masked(&self) -> bool {
        self.summary.is_masked
    }

    /// Whether only a part of the image is worked on.
    pub fn is_cropped(&self) -> bool {
        self.summary.crop.is_some()
    }

    /// What the edit does, in one line, then what the user may not have expected.
    pub fn notes(&self, job: &Job) -> Vec<String> {
        let Summary { size, is_masked, tokens_repainted, pixels_repainted, .. } = self.summary;
        let levels = job.noise_levels();
        let noise = levels.first().copied().unwrap_or_default();
        let mut line = format!("strength {}: noise {noise:.3}, {} of {} steps", self.strength, levels.len(), job.steps);
        if is_masked {
            let share = 100.0 * pixels_repainted as f64 / (size.0 * size.1) as f64;
            let share = if share < 1.0 { "less than 1".into() } else { format!("{share:.0}") };
            let (some, all) = (grouped(tokens_repainted as u64), grouped(self.tokens as u64));
            let crop = self.summary.crop.map_or(String::new(), |Area { width, height, .. }| {
                format!("; {width}x{height} around it, drawn as {}x{}", job.size.width(), job.size.height())
            });
            line = format!("mask: {share} % of the image, {some} of {all} tokens{crop}; {line}");
        }
        let mut notes = vec![line];
        if is_masked && tokens_repainted == self.tokens {
            notes.push("note: the mask covers everything; the init image alone does the same".into());
        }
        if !is_masked && self.strength == Strength::WHOLE && !self.summary.reference {
            notes.push("note: strength 1 leaves nothing of the init image but its size".into());
        }
        notes
    }

    /// The metadata of the edit.
    pub fn metadata(&self) -> InitMetadata {
        let Summary { feather, crop, extend, reference, is_masked, .. } = &self.summary;
        InitMetadata {
            sha256: self.sha256.clone(),
            strength: self.strength.share(),
            mask_sha256: self.mask_sha256.clone(),
            feather: is_masked.then_some(*feather),
            mask_crop: self.mask_crop,
            crop: crop.map(area),
            extend: extend.map(|sides| sides.to_string()),
            reference: *reference,
            sized: self.sized,
        }
    }

    /// The JSON of the edit.
    pub fn report(&self) -> EditReport<'_> {
        let Summary { tokens_repainted, pixels_repainted, feather, crop, extend, reference, .. } = self.summary;
        EditReport {
            sha256: &self.sha256,
            mask_sha256: self.mask_sha256.as_deref(),
            tokens_repainted,
            pixels_repainted,
            feather,
            crop: crop.map(area),
            extend: extend.map(Sides::values),
            reference,
        }
    }
}

fn area(Area { left, top, width, height }: Area) -> [usize; 4] {
    [left, top, width, height]
}
