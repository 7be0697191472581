//! Editing: an image starts from an init image, a mask says which part is repainted, and a frame widens it.
//!
//! Everything here is arithmetic on bytes, the same on every machine. [`Edit::new`] turns what a user wants into a [`Start`], which a job
//! takes, and into what is shown and stored of it. The semantics follow diffusers where it has any; a strength is not rounded to whole
//! steps, a mask is hard on tokens and soft on pixels, and pixels that are not repainted are the init's, to the byte.

mod feather;
mod geometry;
mod mask;
mod paste;

pub use geometry::{Aspect, Sides};
pub use mask::Mask;
pub use paste::{Area, Paste};

use crate::config::ModelDefaults;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::pipeline::{ReferenceInput, Start};
use crate::reference::resample::{Filter, resize};
use crate::reference::{DecodedReference, centered, vae_input};
use crate::sequence::{Grid, PATCH, Pixels};
use feather::feathered;
use geometry::{canvas_of_area, fit, frame};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

/// The range of the feather, in pixels.
pub const FEATHER: RangeInclusive<usize> = 0..=256;

/// The range of the margin of a mask crop, in pixels.
pub const MASK_CROP: RangeInclusive<usize> = 16..=1024;

/// The default feather, in pixels: a token.
pub const DEFAULT_FEATHER: usize = PATCH;

/// The share of the schedule that runs without a mask.
const DEFAULT_STRENGTH: Strength = Strength(0.6);

/// The gray of a frame: nothing that could be mistaken for content.
const GRAY: u8 = 128;

/// The share of the schedule that runs, above 0 and at most 1. The smaller it is, the more of the init image stays.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Strength(f64);

impl Strength {
    /// The whole schedule, from pure noise.
    pub const WHOLE: Self = Self(1.0);

    /// Checks a strength.
    pub fn new(strength: f64) -> Option<Self> {
        (strength > 0.0 && strength <= 1.0).then_some(Self(strength))
    }

    /// The share of the schedule.
    pub const fn share(self) -> f64 {
        self.0
    }
}

impl fmt::Display for Strength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<f64> for Strength {
    type Error = Error;

    fn try_from(strength: f64) -> Result<Self> {
        let what = "expected a number above 0, at most 1";
        Self::new(strength).ok_or_else(|| Error::usage(what, "1 repaints everything, 0.3 changes little"))
    }
}

impl From<Strength> for f64 {
    fn from(strength: Strength) -> Self {
        strength.0
    }
}

impl FromStr for Strength {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse().unwrap_or(f64::NAN).try_into()
    }
}

/// Whether the init image is also a reference image, which the model sees all the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InitReference {
    /// Only when the image is extended: what is added has to fit.
    #[default]
    Auto,
    /// As the first reference.
    On,
    /// The image is where denoising starts, and nothing else.
    Off,
}

/// What a user wants of an init image.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EditOptions {
    /// The share of the schedule that runs. The default is 1 with a mask or a frame, and 0.6 without.
    pub strength: Option<Strength>,
    /// Pixels over which the repainted part fades out around the mask.
    pub feather: Option<usize>,
    /// Pixels around the mask that are worked on, scaled to the model's size. Without it, the whole image is.
    pub mask_crop: Option<usize>,
    /// What is added at the sides.
    pub extend: Option<Sides>,
    /// Whether the init image is a reference, too.
    pub init_reference: InitReference,
    /// Width and height of the image, where they are given. They do not count the frame.
    pub size: (Option<usize>, Option<usize>),
}

/// An edit, ready for a job.
#[derive(Clone, Debug)]
pub struct Edit {
    /// Where the job starts.
    pub start: Start,
    /// The size of the canvas.
    pub canvas: Pixels,
    /// The init image without its frame as a reference of its own, which comes first.
    pub reference: Option<ReferenceInput>,
    /// What was decided.
    pub summary: Summary,
}

/// What an edit does, for display and for metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Width and height of the finished image.
    pub size: (usize, usize),
    /// Whether there is a mask or a frame.
    pub is_masked: bool,
    /// Tokens that are repainted, of all tokens of the canvas.
    pub tokens_repainted: usize,
    /// Pixels of the finished image that change.
    pub pixels_repainted: usize,
    /// Pixels over which the repainted part fades out.
    pub feather: usize,
    /// The part of the image that is worked on, with a mask crop.
    pub crop: Option<Area>,
    /// The frame.
    pub extend: Option<Sides>,
    /// Whether the init image is a reference.
    pub reference: bool,
}

impl Edit {
    /// Prepares an edit for a model with these defaults.
    pub fn new(init: DecodedReference, mask: Option<Mask>, options: &EditOptions, defaults: &ModelDefaults) -> Result<Self> {
        options.check(mask.is_some(), |name| format!("`{}`", name.replace('-', "_")))?;
        let is_masked = mask.is_some() || options.extend.is_some();
        let strength = options.strength.unwrap_or(if is_masked { Strength::WHOLE } else { DEFAULT_STRENGTH });
        let feather = options.feather.unwrap_or(DEFAULT_FEATHER);
        let mask = mask.map(|mask| mask.matching(&init)).transpose()?;
        let is_reference = match options.init_reference {
            InitReference::Auto => options.extend.is_some(),
            InitReference::On => true,
            InitReference::Off => false,
        };
        let prepared = match (options.mask_crop, mask) {
            (Some(margin), Some(mask)) => Prepared::of_crop(init.into_image(), mask, feather, margin, defaults)?,
            (_, mask) => Prepared::of_whole(init.into_image(), mask, feather, options, defaults, is_reference)?,
        };
        let Prepared { canvas, init, opacity, paste, reference } = prepared;
        let keep = opacity.map(|opacity| kept_tokens(&opacity, canvas.grid()));
        let tokens = canvas.grid().tokens();
        let summary = Summary {
            size: paste.as_ref().map_or((canvas.width(), canvas.height()), Paste::size),
            is_masked,
            tokens_repainted: keep.as_ref().map_or(tokens, |keep| keep.iter().filter(|keep| !**keep).count()),
            pixels_repainted: paste.as_ref().map_or(canvas.width() * canvas.height(), Paste::changed),
            feather,
            crop: paste.as_ref().and_then(|paste| options.mask_crop.map(|_| paste.area())),
            extend: options.extend,
            reference: is_reference,
        };
        let start = Start {
            init: ReferenceInput { grid: canvas.grid(), pixels: Arc::new(vae_input(&init)) },
            strength,
            // A mask that covers every token is none.
            keep: keep.filter(|keep| keep.iter().any(|keep| *keep)),
            // With a frame the reference is another image.
            is_reference: is_reference && reference.is_none(),
            paste: paste.map(Arc::new),
        };
        Ok(Self { start, canvas, reference, summary })
    }
}

impl EditOptions {
    /// Checks options that exclude each other. `spell` turns the name of an option, such as `mask-crop`, into what the user writes.
    pub fn check(&self, has_mask: bool, spell: fn(&str) -> String) -> Result<()> {
        let add_mask = || format!("name one with {}", spell("mask"));
        if self.extend.is_some() && self.strength.is_some_and(|strength| strength != Strength::WHOLE) {
            let what = format!("{} needs a strength of 1: the new part holds nothing to start from", spell("extend"));
            return Err(Error::usage(what, format!("leave out {}", spell("strength"))));
        }
        if self.mask_crop.is_some() {
            let crop = spell("mask-crop");
            if !has_mask {
                return Err(Error::usage(format!("{crop} crops around a mask, and there is none"), add_mask()));
            }
            let changes =
                [("width", self.size.0.is_some()), ("height", self.size.1.is_some()), ("extend", self.extend.is_some())];
            if let Some((name, _)) = changes.into_iter().find(|(_, given)| *given) {
                let what = format!("{crop} keeps the size of the image, and {} changes it", spell(name));
                return Err(Error::usage(what, "leave out one of them"));
            }
        }
        if !has_mask && self.extend.is_none() && self.feather.is_some() {
            let what = format!("{} fades out what is repainted, and there is no mask", spell("feather"));
            return Err(Error::usage(what, add_mask()));
        }
        Ok(())
    }
}

/// The init image on the canvas.
struct Prepared {
    canvas: Pixels,
    /// RGB.
    init: Vec<u8>,
    /// The opacity of what is repainted on the canvas, if not everything is.
    opacity: Option<Vec<u8>>,
    paste: Option<Paste>,
    reference: Option<ReferenceInput>,
}

impl Prepared {
    /// The whole image, scaled and cut to the canvas, with its frame.
    fn of_whole(
        init: Image,
        mask: Option<Mask>,
        feather: usize,
        options: &EditOptions,
        defaults: &ModelDefaults,
        is_reference: bool,
    ) -> Result<Self> {
        let from = (init.width, init.height);
        let fit = fit(from, options.size, defaults.max_reference_pixels);
        let mut size = fit.size;
        let mut pixels = centered::<3>(scaled::<3>(init.pixels, from, fit.scaled, Filter::Lanczos), fit.scaled, size);
        let mut opacity =
            mask.map(|mask| centered::<1>(scaled::<1>(mask.into_values(), from, fit.scaled, Filter::Triangle), fit.scaled, size));
        let mut reference = None;
        if let Some(sides) = options.extend {
            if is_reference {
                let bare = Image { width: size.0, height: size.1, pixels: pixels.clone() };
                let bare = DecodedReference::from_image(bare).prepare(defaults.max_reference_pixels);
                reference = Some(ReferenceInput { grid: bare.grid(), pixels: Arc::new(bare.values()) });
            }
            let kept = opacity.unwrap_or_else(|| vec![0; size.0 * size.1]);
            opacity = Some(frame::<1>(&kept, size, sides, u8::MAX));
            pixels = frame::<3>(&pixels, size, sides, GRAY);
            size = sides.around(size);
        }
        let canvas = Pixels::new(size.0, size.1)?;
        let opacity = opacity.map(|mask| feathered(mask, size.0, size.1, feather));
        let paste = opacity.as_ref().map(|opacity| {
            let under = Image { width: size.0, height: size.1, pixels: pixels.clone() };
            Paste::new(under, Area { left: 0, top: 0, width: size.0, height: size.1 }, opacity.clone())
        });
        Ok(Self { canvas, init: pixels, opacity, paste, reference })
    }

    /// The part around the mask, scaled to the model's area.
    fn of_crop(init: Image, mask: Mask, feather: usize, margin: usize, defaults: &ModelDefaults) -> Result<Self> {
        let from = (init.width, init.height);
        let opacity = feathered(mask.into_values(), from.0, from.1, feather);
        let area = Area::around(&opacity, from.0).grown(margin, from);
        let size = canvas_of_area((area.width, area.height), defaults.width * defaults.height);
        let canvas = Pixels::new(size.0, size.1)?;
        let (part, opacity) = (area.of::<3>(&init.pixels, from.0), area.of::<1>(&opacity, from.0));
        let pixels = resize::<3>(&part, (area.width, area.height), size, Filter::Lanczos);
        let on_canvas = resize::<1>(&opacity, (area.width, area.height), size, Filter::Triangle);
        let paste = Some(Paste::new(init, area, opacity));
        Ok(Self { canvas, init: pixels, opacity: Some(on_canvas), paste, reference: None })
    }
}

/// Resamples an image unless its size stays.
fn scaled<const C: usize>(pixels: Vec<u8>, from: (usize, usize), to: (usize, usize), filter: Filter) -> Vec<u8> {
    if from == to { pixels } else { resize::<C>(&pixels, from, to, filter) }
}

/// The tokens none of whose pixels is repainted.
fn kept_tokens(opacity: &[u8], grid: Grid) -> Vec<bool> {
    let width = grid.width * PATCH;
    let mut keep = vec![true; grid.tokens()];
    for (y, row) in opacity.chunks_exact(width).enumerate() {
        let tokens = &mut keep[y / PATCH * grid.width..][..grid.width];
        for (keep, pixels) in tokens.iter_mut().zip(row.chunks_exact(PATCH)) {
            *keep &= pixels.iter().all(|pixel| *pixel == 0);
        }
    }
    keep
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An edit of a gray image with a white box as its mask, and the opacity of what is repainted.
    fn boxed(size: (usize, usize), area: Area, feather: usize) -> (Edit, Vec<u8>) {
        let inside = |x: usize, y: usize| {
            (area.left..area.left + area.width).contains(&x) && (area.top..area.top + area.height).contains(&y)
        };
        let image = |value: &dyn Fn(usize, usize) -> u8| {
            let pixels = (0..size.0 * size.1).flat_map(|i| [value(i % size.0, i / size.0); 3]).collect();
            Image { width: size.0, height: size.1, pixels }
        };
        let mask = image(&|x, y| if inside(x, y) { 255 } else { 0 });
        let mask = Mask::of_image(&mask, None, "mask".as_ref()).unwrap();
        let init = DecodedReference::from_image(image(&|_, _| GRAY));
        let options = EditOptions { feather: Some(feather), ..EditOptions::default() };
        let edit = Edit::new(init, Some(mask), &options, &ModelDefaults::klein()).unwrap();
        // Where white laid over the gray shows.
        let (width, height) = (edit.canvas.width(), edit.canvas.height());
        let white = Image { width, height, pixels: vec![255; 3 * width * height] };
        let over = edit.start.paste.as_ref().unwrap().over(white);
        let opacity = over.pixels.chunks_exact(3).map(|pixel| 2 * (pixel[0] - GRAY)).collect();
        (edit, opacity)
    }

    #[test]
    fn pixels_fade_out_over_the_feather() {
        let area = Area { left: 20, top: 24, width: 16, height: 8 };
        let (edit, opacity) = boxed((64, 64), area, 8);
        let ((top, bottom), (left, right)) = feather::extent(&opacity, 64).unwrap();
        assert_eq!((top, bottom, left, right), (24 - 8, 32 + 8, 20 - 8, 36 + 8));
        assert_eq!(edit.summary.pixels_repainted, (16 + 16) * (8 + 16));
    }

    /// A mask is scaled without the overshoot of Lanczos, which would repaint pixels beyond its edge.
    #[test]
    fn a_scaled_mask_ends_at_its_edge() {
        let area = Area { left: 800, top: 300, width: 400, height: 400 };
        let (edit, opacity) = boxed((2048, 1024), area, 0);
        let (width, height) = (edit.canvas.width(), edit.canvas.height());
        assert!(width < 2048 && height < 1024, "{width}x{height}");
        let scale = width as f64 / 2048.0;
        let ((top, bottom), (left, right)) = feather::extent(&opacity, width).unwrap();
        for (edge, original) in [(left, 800), (right, 1200), (top, 300), (bottom, 700)] {
            assert!((edge as f64 - f64::from(original) * scale).abs() <= 2.0, "{edge} for {original}");
        }
    }

    #[test]
    fn one_pixel_repaints_its_token() {
        let grid = Grid { width: 3, height: 2 };
        let (width, height) = (grid.width * PATCH, grid.height * PATCH);
        for (x, y) in [(0, 0), (PATCH - 1, 0), (PATCH, PATCH - 1), (2 * PATCH + 5, PATCH), (width - 1, height - 1)] {
            let mut opacity = vec![0; width * height];
            opacity[y * width + x] = 1;
            let repainted: Vec<usize> = (0..grid.tokens()).filter(|token| !kept_tokens(&opacity, grid)[*token]).collect();
            assert_eq!(repainted, [y / PATCH * grid.width + x / PATCH], "{x},{y}");
        }
    }
}
