//! The options of an edit. As with [`ImageOptions`](super::ImageOptions), one field defines a flag and a field of a line of `kiln run`.

use super::super::report::Spell;
use super::values::within;
use clap::{Args, ValueEnum};
use kiln::edit::{EditOptions, FEATHER, InitReference, MASK_CROP, Sides, Strength};
use kiln::error::{Error, Result};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// An init image, and what of it is repainted.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct EditFlags {
    /// Start from this image instead of from noise
    ///
    /// FILE is a PNG, JPEG or WebP. It gives the size of the new image, unless --width or --height is given. kiln scales it down to
    /// one megapixel, or to the limit that the model sets, and crops its sides to multiples of 16.
    #[arg(long, value_name = "FILE", help_heading = "Input")]
    pub init: Option<PathBuf>,

    /// Set how much of the init image changes: above 0, at most 1
    ///
    /// A small strength changes details, 1 repaints everything. It is the part of the schedule that runs: 0.5 runs the last two of
    /// four steps. The default is 0.6, and 1 with --mask or --extend.
    #[arg(long, value_name = "S", help_heading = "Input")]
    pub strength: Option<Strength>,

    /// Repaint only what is white or transparent in this image
    ///
    /// FILE has the size of the init image. If it has transparency, what is transparent is repainted. Otherwise what is white is, and
    /// gray is in between. All other pixels stay as they are, to the byte. It may be the init image's own file.
    #[arg(long, value_name = "FILE", help_heading = "Input")]
    pub mask: Option<PathBuf>,

    /// Fade the repainted part out over this many pixels [default: 16]
    #[arg(long, value_name = "PX", value_parser = within(FEATHER), help_heading = "Input")]
    pub feather: Option<usize>,

    /// Work on the mask and this many pixels around it, enlarged
    ///
    /// kiln scales that part to the model's size, repaints it, and puts it back into the untouched image, whose size stays. This is
    /// for small masks in large photos. 64 is a good value.
    #[arg(long, value_name = "PX", value_parser = within(MASK_CROP), help_heading = "Input")]
    pub mask_crop: Option<usize>,

    /// Widen the init image: `256`, or left=256,right=256
    ///
    /// Pixels are multiples of 16. Without sides they are added at all four.
    #[arg(long, value_name = "SIDES", help_heading = "Input")]
    #[serde(deserialize_with = "sides", serialize_with = "super::image::spelled")]
    pub extend: Option<Sides>,

    /// Also show the init image to the model as a reference [default: auto]
    ///
    /// With `on` the prompt can refer to it as "image 1", and a step takes twice as long. `auto` is on with --extend and off without.
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "Input")]
    pub init_reference: Option<InitReferenceArg>,
}

/// Values of `--init-reference`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum InitReferenceArg {
    /// With --extend
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

impl From<InitReferenceArg> for InitReference {
    fn from(when: InitReferenceArg) -> Self {
        match when {
            InitReferenceArg::Auto => Self::Auto,
            InitReferenceArg::On => Self::On,
            InitReferenceArg::Off => Self::Off,
        }
    }
}

impl EditFlags {
    /// Checks options against each other, and values that did not pass the parsers of the flags.
    pub fn check(&self, size: (Option<usize>, Option<usize>), spell: Spell) -> Result<()> {
        for (value, range, name) in [(self.feather, FEATHER, "feather"), (self.mask_crop, MASK_CROP, "mask-crop")] {
            if value.is_some_and(|value| !range.contains(&value)) {
                let expected = super::values::a_whole_number(&range);
                return Err(Error::usage(format!("{} is out of range", spell(name)), expected));
            }
        }
        if self.init.is_none() {
            let needless = [
                (self.mask.is_some(), "mask", "says what of an init image is repainted"),
                (self.extend.is_some(), "extend", "widens an init image"),
                (self.strength.is_some(), "strength", "says how much of an init image changes"),
                (self.feather.is_some(), "feather", "fades out what is repainted of an init image"),
                (self.mask_crop.is_some(), "mask-crop", "crops an init image"),
                (self.init_reference.is_some(), "init-reference", "is about an init image"),
            ];
            return match needless.into_iter().find(|(given, ..)| *given) {
                Some((_, name, what)) => Err(Error::usage(
                    format!("{} {what}, and there is none", spell(name)),
                    format!("name one with {}", spell("init")),
                )),
                None => Ok(()),
            };
        }
        self.options(size).check(self.mask.is_some(), spell)
    }

    /// Fills in options that are not given from flags.
    pub fn or(self, flags: &Self) -> Self {
        // Flags about an edit have no meaning for a line without an init image.
        if self.init.is_none() && flags.init.is_none() {
            return self;
        }
        let flags = flags.clone();
        // A mask belongs to its init image, and so do its crop and its frame.
        let parts = if self.init.is_some() { Self::default() } else { flags.clone() };
        Self {
            init: self.init.or(flags.init),
            // A frame goes with a whole strength only, which may not be what the flags say.
            strength: self.strength.or(flags.strength.filter(|_| self.extend.is_none())),
            mask: self.mask.or(parts.mask),
            feather: self.feather.or(parts.feather),
            mask_crop: self.mask_crop.or(parts.mask_crop),
            extend: self.extend.or(parts.extend),
            init_reference: self.init_reference.or(flags.init_reference),
        }
    }

    /// The library's options, for an image of this size.
    pub fn options(&self, size: (Option<usize>, Option<usize>)) -> EditOptions {
        EditOptions {
            strength: self.strength,
            feather: self.feather,
            mask_crop: self.mask_crop,
            extend: self.extend,
            init_reference: self.init_reference.map_or_else(InitReference::default, InitReference::from),
            size,
        }
    }

    /// The given values from which names and seeds of lines are made, each with its name. Their order must never change.
    pub fn content(&self) -> Vec<Value> {
        let Self { init, strength, mask, feather, mask_crop, extend, init_reference } = self;
        let path = |path: &PathBuf| path.to_string_lossy().into_owned();
        let given = [
            ("init", init.as_ref().map(path)),
            ("strength", strength.map(|strength| strength.to_string())),
            ("mask", mask.as_ref().map(path)),
            ("feather", feather.map(|feather| feather.to_string())),
            ("mask_crop", mask_crop.map(|margin| margin.to_string())),
            ("extend", extend.map(|sides| sides.to_string())),
            ("init_reference", init_reference.map(|when| format!("{when:?}"))),
        ];
        given.into_iter().filter_map(|(name, value)| Some(serde_json::json!([name, value?]))).collect()
    }
}

/// Reads sides in the syntax of the flag, as a number for all, or as an object of sides.
fn sides<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Sides>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected sides, as in 256, \"left=256,right=256\" or {\"left\": 256}")]
    enum Spelled {
        All(usize),
        Text(String),
        Each(BTreeMap<String, usize>),
    }
    let sides = Option::<Spelled>::deserialize(deserializer)?.map(|spelled| match spelled {
        Spelled::All(side) => Sides::new([side; 4]),
        Spelled::Text(text) => text.parse(),
        Spelled::Each(sides) => sides.iter().map(|(name, side)| format!("{name}={side}")).collect::<Vec<_>>().join(",").parse(),
    });
    sides.transpose().map_err(D::Error::custom)
}
