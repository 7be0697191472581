//! The options of an image. One field defines the flag of every command that generates or plans images, the JSON field of a line of
//! `kiln run`, and the limits.

use super::super::report::Spell;
use super::PaddingArg;
use super::edit::EditFlags;
use super::values::{a_number, a_whole_number, number, pixels, within};
use clap::Args;
use kiln::edit::Aspect;
use kiln::error::{Error, Result};
use kiln::{Padding, Pixels, Sigmas};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The range of `--steps`.
pub const STEPS: RangeInclusive<usize> = 1..=1000;

/// The range of `--guidance`.
const GUIDANCE: RangeInclusive<f32> = 0.0..=100.0;

/// The range of `--megapixels`. A larger image does not fit the token limit with a prompt.
const MEGAPIXELS: RangeInclusive<f32> = 0.01..=12.5;

/// Pixels of a megapixel, as the models count them.
const MEGAPIXEL: f64 = 1_048_576.0;

/// Decides how an image is generated and what it costs. Each field is a flag, and a field of a line of `kiln run` unless serde skips it.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct ImageOptions {
    /// Edit or combine this reference image; may be given several times
    ///
    /// FILE is a PNG, JPEG or WebP. The prompt can refer to the images in order: "image 1", "image 2". kiln scales large images down to
    /// one megapixel, or to the limit that the model sets. It crops the sides of all images to multiples of 16.
    #[arg(long = "reference", value_name = "FILE", help_heading = "Input")]
    pub references: Vec<PathBuf>,

    /// Set the width in pixels, a multiple of 16 [default: 1024]
    ///
    /// The width is at least 64. With --reference, the default is the width of the first reference. A model may have its own
    /// default: 256 for `builtin`.
    #[arg(long, value_name = "PIXELS", value_parser = pixels, help_heading = "Sampling")]
    pub width: Option<usize>,

    /// Set the height in pixels, a multiple of 16 [default: 1024]
    ///
    /// The height is at least 64. With --reference, the default is the height of the first reference. A model may have its own
    /// default: 256 for `builtin`.
    #[arg(long, value_name = "PIXELS", value_parser = pixels, help_heading = "Sampling")]
    pub height: Option<usize>,

    /// Set the shape, such as 16:9, instead of width and height
    ///
    /// The image has about as many pixels as the model's own size, or as --megapixels says. With --width or --height it has that side.
    #[arg(long, value_name = "W:H", help_heading = "Sampling")]
    #[serde(deserialize_with = "aspect", serialize_with = "spelled")]
    pub aspect: Option<Aspect>,

    /// Set the area in megapixels, instead of width and height
    ///
    /// A megapixel is 1024 x 1024 pixels. The shape is --aspect's, else the default's.
    #[arg(long, value_name = "N", value_parser = number(MEGAPIXELS), help_heading = "Sampling")]
    pub megapixels: Option<f32>,

    /// Set the number of denoising steps [default: 4, or 50 for base and dev]
    ///
    /// A model may have its own default.
    #[arg(long, value_name = "N", value_parser = within(STEPS), help_heading = "Sampling")]
    pub steps: Option<usize>,

    /// Set the noise levels of the steps: `turbo`, or 1,0.75,0.5,0.25
    ///
    /// Without this option the levels are evenly spaced. Give one level per step, in falling order, at most 1. kiln shifts the
    /// levels by the image size, as diffusers does with its `sigmas`. `turbo` stands for the eight levels that dev's Turbo
    /// adapter was trained for.
    #[arg(long, value_name = "LEVELS", conflicts_with = "steps", help_heading = "Sampling")]
    #[serde(deserialize_with = "sigmas")]
    pub sigmas: Option<Sigmas>,

    /// Set the guidance scale of base models and of dev [default: 4]
    ///
    /// The scale is from 0 to 100. Base models use classifier-free guidance: above 1 each step takes twice as long. dev takes the
    /// scale as an input. Distilled models take no scale.
    #[arg(long, value_name = "SCALE", value_parser = number(GUIDANCE), help_heading = "Sampling")]
    pub guidance: Option<f32>,

    /// Set how the prompt is padded [default: right, or left for dev]
    ///
    /// A model may have its own default. Engines pad dev prompts differently, which changes the image. `left` is used by Black Forest Labs
    /// and by diffusers with transformers 4, `right` by diffusers with transformers 5. `left-zeros` is used by ComfyUI, `right-zeros` by
    /// stable-diffusion.cpp.
    #[arg(long, value_enum, value_name = "SIDE", help_heading = "Sampling")]
    pub padding: Option<PaddingArg>,

    /// Run the VAE in tiles, to bound its memory
    ///
    /// As in diffusers, tiling applies to images and references with a side above 1024 pixels, or above the `sample_size` in the
    /// VAE's config.json. kiln blends tiles where they overlap. Normalization is per tile, so the image differs from an untiled
    /// one.
    #[arg(long, help_heading = "Run")]
    #[serde(skip)]
    pub vae_tiling: bool,

    /// What the image starts from, and what of it is repainted. Its JSON fields are in the same object.
    #[command(flatten)]
    #[serde(skip)]
    pub edit: EditFlags,
}

impl ImageOptions {
    /// Checks options against each other, and values that did not pass the parsers of the flags.
    pub fn check(&self, spell: Spell) -> Result<()> {
        self.check_sampling(spell)?;
        self.edit.check((self.width, self.height), spell)
    }

    /// The checks of everything but the edit. An edit may be complete only together with the flags.
    pub fn check_sampling(&self, spell: Spell) -> Result<()> {
        let refused = |name: &str, expected| Err(Error::usage(format!("{} is out of range", spell(name)), expected));
        if self.sigmas.is_some() && self.steps.is_some() {
            let what = format!("{} is given together with {}", spell("sigmas"), spell("steps"));
            return Err(Error::usage(what, "leave out one of them"));
        }
        if self.steps.is_some_and(|steps| !STEPS.contains(&steps)) {
            return refused("steps", a_whole_number(&STEPS));
        }
        if self.guidance.is_some_and(|scale| !GUIDANCE.contains(&scale)) {
            return refused("guidance", a_number(&GUIDANCE));
        }
        if self.megapixels.is_some_and(|area| !MEGAPIXELS.contains(&area)) {
            return refused("megapixels", a_number(&MEGAPIXELS));
        }
        let shape = [("aspect", self.aspect.is_some()), ("megapixels", self.megapixels.is_some())];
        let sides = usize::from(self.width.is_some()) + usize::from(self.height.is_some());
        for (name, _) in shape.into_iter().filter(|(_, given)| *given) {
            // One side and a shape decide the area.
            if sides > usize::from(name == "aspect" && self.megapixels.is_none()) {
                let what = format!("{} is given together with {} and {}", spell(name), spell("width"), spell("height"));
                return Err(Error::usage(what, "leave out one of them"));
            }
            if self.edit.init.is_some() {
                let what = format!("{} is given together with {}, whose image has a shape", spell(name), spell("init"));
                return Err(Error::usage(what, format!("give {} and {}, which crop it", spell("width"), spell("height"))));
            }
        }
        Ok(())
    }

    /// Fills in options that are not given from flags.
    pub fn or(self, flags: &Self) -> Self {
        let flags = flags.clone();
        // A size is one decision, and so is a schedule: a flag does not complete one side with the other.
        let sized =
            [self.width.is_some(), self.height.is_some(), self.aspect.is_some(), self.megapixels.is_some()].contains(&true);
        let scheduled = self.steps.is_some() || self.sigmas.is_some();
        let sizes = |of: &Self| (of.width, of.height, of.aspect, of.megapixels);
        let (width, height, aspect, megapixels) = if sized { sizes(&self) } else { sizes(&flags) };
        let (steps, sigmas) = if scheduled { (self.steps, self.sigmas) } else { (flags.steps, flags.sigmas) };
        Self {
            references: if self.references.is_empty() { flags.references } else { self.references },
            width,
            height,
            aspect,
            megapixels,
            steps,
            sigmas,
            guidance: self.guidance.or(flags.guidance),
            padding: self.padding.or(flags.padding),
            vae_tiling: flags.vae_tiling,
            edit: self.edit.or(&flags.edit),
        }
    }

    /// The size of the image. What is not given comes from `default`, the size of the first reference or of the model, and from the
    /// model's own area.
    pub fn size(&self, default: (usize, usize), area: usize) -> Result<Pixels> {
        let area = self.megapixels.map_or(area as f64, |megapixels| f64::from(megapixels) * MEGAPIXEL);
        let (width, height) = match (self.aspect, self.megapixels) {
            (None, None) => (self.width.unwrap_or(default.0), self.height.unwrap_or(default.1)),
            (None, Some(_)) => Aspect::of(default).size(area),
            (Some(aspect), _) => match (self.width, self.height) {
                (Some(width), _) => (width, aspect.height_for(width)),
                (None, Some(height)) => (aspect.width_for(height), height),
                (None, None) => aspect.size(area),
            },
        };
        Pixels::new(width, height)
    }

    /// The given values from which names and seeds of lines are made. Their order must never change.
    pub fn content(&self) -> Vec<Value> {
        // The caller hashes the first five itself, and `vae_tiling` is hashed with the model.
        let Self { references: _, width: _, height: _, steps: _, guidance: _, vae_tiling: _, .. } = self;
        let Self { sigmas, padding, aspect, megapixels, edit, .. } = self;
        let padding = padding.map(|padding| Padding::from(padding).to_string());
        let mut content: Vec<Value> =
            [sigmas.as_ref().map(Sigmas::to_string), padding].into_iter().flatten().map(Value::from).collect();
        content.extend(aspect.map(|aspect| serde_json::json!(["aspect", aspect.to_string()])));
        content.extend(megapixels.map(|megapixels| serde_json::json!(["megapixels", megapixels])));
        content.extend(edit.content());
        content
    }
}

/// Reads a shape in the syntax of the flag.
fn aspect<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Aspect>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| text.parse()).transpose().map_err(D::Error::custom)
}

/// Writes a value in the syntax of its flag.
pub fn spelled<T: Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_ref().map(T::to_string).serialize(serializer)
}

/// Reads noise levels in the syntax of the flag, or as a list of numbers.
fn sigmas<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Sigmas>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected noise levels, as in \"turbo\" or [1, 0.75, 0.5, 0.25]")]
    enum Spelled {
        Text(String),
        List(Vec<f64>),
    }
    let sigmas = Option::<Spelled>::deserialize(deserializer)?.map(|spelled| match spelled {
        Spelled::Text(text) => text.parse(),
        Spelled::List(levels) => Sigmas::new(&levels),
    });
    sigmas.transpose().map_err(D::Error::custom)
}
