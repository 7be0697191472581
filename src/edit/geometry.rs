//! Sizes: how an init image fits a canvas, the frame around it, and sizes of a shape.

use crate::error::{Error, Result};
use crate::reference::capped;
use crate::sequence::PATCH;
use std::fmt;
use std::str::FromStr;

/// The most that a crop is enlarged.
const MOST_ENLARGED: f64 = 4.0;

/// The shortest side of a canvas.
const LEAST: usize = 4 * PATCH;

/// How an init image fits a canvas: scaled, then cut around its center.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Width and height after scaling.
    pub scaled: (usize, usize),
    /// Width and height after cutting.
    pub size: (usize, usize),
}

/// Fits an image to a size. A side that is not given is the image's own, which is scaled down to at most `area` pixels and cut to whole
/// patches.
pub fn fit(from: (usize, usize), asked: (Option<usize>, Option<usize>), area: usize) -> Fit {
    let own = capped(from, area).unwrap_or(from);
    let whole = (own.0 - own.0 % PATCH, own.1 - own.1 % PATCH);
    if asked == (None, None) {
        return Fit { scaled: own, size: whole };
    }
    let size = (asked.0.unwrap_or(whole.0), asked.1.unwrap_or(whole.1));
    // The larger of two factors, so that the image covers the canvas. Sides are far below 2^32, so products are exact.
    let rounded = |side: usize, to: usize, of: usize| (2 * side * to + of) / (2 * of);
    let scaled = match size.0 * from.1 >= size.1 * from.0 {
        true => (size.0, rounded(from.1, size.0, from.0).max(size.1)),
        false => (rounded(from.0, size.1, from.1).max(size.0), size.1),
    };
    Fit { scaled, size }
}

/// Pixels that are added at each side, multiples of 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sides {
    /// At the left.
    pub left: usize,
    /// At the top.
    pub top: usize,
    /// At the right.
    pub right: usize,
    /// At the bottom.
    pub bottom: usize,
}

impl Sides {
    /// The names of the sides, in the order of [`Sides::values`].
    pub const NAMES: [&str; 4] = ["left", "top", "right", "bottom"];

    /// The longest side, which no canvas exceeds.
    const MOST: usize = 16_384;

    /// Checks the sides.
    pub fn new([left, top, right, bottom]: [usize; 4]) -> Result<Self> {
        for (side, name) in [left, top, right, bottom].into_iter().zip(Self::NAMES) {
            if side % PATCH != 0 || side > Self::MOST {
                let nearest = ((side.min(Self::MOST) + PATCH / 2) / PATCH * PATCH).max(PATCH);
                let what = format!("{name} is {side}, and has to be a multiple of {PATCH}, at most {}", Self::MOST);
                return Err(Error::usage(what, format!("the nearest is {nearest}")));
            }
        }
        let sides = Self { left, top, right, bottom };
        match sides == Self::default() {
            true => Err(Error::usage("no side is extended", EXAMPLE)),
            false => Ok(sides),
        }
    }

    /// The pixels at the left, top, right and bottom.
    pub const fn values(self) -> [usize; 4] {
        [self.left, self.top, self.right, self.bottom]
    }

    /// The size of an image with these sides added.
    pub const fn around(self, (width, height): (usize, usize)) -> (usize, usize) {
        (width + self.left + self.right, height + self.top + self.bottom)
    }
}

/// How sides are written.
const EXAMPLE: &str = "write 256 for all sides, or left=256,right=256";

impl FromStr for Sides {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::usage("expected pixels for all sides, or for each", EXAMPLE);
        if let Ok(all) = text.parse() {
            return Self::new([all; 4]);
        }
        let mut sides = [None; 4];
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let at = Self::NAMES.iter().position(|side| *side == name.trim()).ok_or_else(wrong)?;
            let value = value.trim().parse::<usize>().map_err(|_| wrong())?;
            if sides[at].replace(value).is_some() {
                return Err(Error::usage(format!("{} is given twice", Self::NAMES[at]), EXAMPLE));
            }
        }
        Self::new(sides.map(Option::unwrap_or_default))
    }
}

impl fmt::Display for Sides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sides = self.values().into_iter().zip(Self::NAMES).filter(|(side, _)| *side > 0);
        f.write_str(&sides.map(|(side, name)| format!("{name}={side}")).collect::<Vec<_>>().join(","))
    }
}

/// An image with a frame of one value.
pub fn frame<const C: usize>(pixels: &[u8], size: (usize, usize), sides: Sides, value: u8) -> Vec<u8> {
    let (width, height) = sides.around(size);
    let mut framed = vec![value; width * height * C];
    for (y, row) in pixels.chunks_exact(size.0 * C).enumerate() {
        let at = ((sides.top + y) * width + sides.left) * C;
        framed[at..at + row.len()].copy_from_slice(row);
    }
    framed
}

/// The canvas for a part of an image: as many pixels as the model is made for, in the part's shape.
pub fn canvas_of_area((width, height): (usize, usize), area: usize) -> (usize, usize) {
    let scale = (area as f64 / (width * height) as f64).sqrt().min(MOST_ENLARGED);
    let side = |side: usize| ((side as f64 * scale / PATCH as f64).round() as usize * PATCH).max(LEAST);
    (side(width), side(height))
}

/// The shape of an image: its width to its height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aspect {
    width: u32,
    height: u32,
}

impl Aspect {
    /// The most that one side is longer than the other.
    const MOST: u32 = 16;

    /// The shape of an image of this size.
    pub fn of((width, height): (usize, usize)) -> Self {
        Self { width: width as u32, height: height as u32 }
    }

    /// The size of an image of this shape with about `area` pixels. Sides are multiples of 16.
    pub fn size(self, area: f64) -> (usize, usize) {
        let ratio = f64::from(self.width) / f64::from(self.height);
        let side = |ratio: f64| (((area * ratio).sqrt() / PATCH as f64 + 0.5).floor() as usize * PATCH).max(LEAST);
        (side(ratio), side(1.0 / ratio))
    }

    /// The height of an image of this shape and width.
    pub fn height_for(self, width: usize) -> usize {
        Self::other(width, self.height, self.width)
    }

    /// The width of an image of this shape and height.
    pub fn width_for(self, height: usize) -> usize {
        Self::other(height, self.width, self.height)
    }

    fn other(side: usize, to: u32, of: u32) -> usize {
        let exact = side as f64 * f64::from(to) / f64::from(of);
        ((exact / PATCH as f64 + 0.5).floor() as usize * PATCH).max(LEAST)
    }
}

impl FromStr for Aspect {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let sides = text.split_once(':').and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
        let fits = |(width, height): &(u32, u32)| {
            let (short, long) = (*width.min(height), *width.max(height));
            short > 0 && long <= 10_000 && long <= Self::MOST * short
        };
        match sides.filter(fits) {
            Some((width, height)) => Ok(Self { width, height }),
            None => Err(Error::usage("expected a width and a height, at most 16 times one another", "write 16:9, 3:2 or 1:1")),
        }
    }
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.width, self.height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_init_is_scaled_and_cut_to_the_canvas() {
        let of = |from, asked| {
            let Fit { scaled, size } = fit(from, asked, 1 << 20);
            (scaled, size)
        };
        assert_eq!(of((1000, 700), (None, None)), ((1000, 700), (992, 688)));
        assert_eq!(of((4000, 3000), (None, None)), ((1182, 886), (1168, 880)));
        assert_eq!(of((1000, 500), (Some(512), Some(512))), ((1024, 512), (512, 512)));
        assert_eq!(of((500, 1000), (Some(512), Some(512))), ((512, 1024), (512, 512)));
        assert_eq!(of((100, 75), (Some(128), Some(96))), ((128, 96), (128, 96)));
        assert_eq!(of((333, 500), (Some(128), None)), ((330, 496), (128, 496)));
        // Rounding never leaves a gap.
        for (width, height) in (64..200).map(|side| (side, 261 - side)) {
            let Fit { scaled, size } = fit((width, height), (Some(176), Some(96)), 1 << 20);
            assert!(
                scaled.0 >= size.0 && scaled.1 >= size.1 && (scaled.0 == 176 || scaled.1 == 96),
                "{width}x{height}: {scaled:?}"
            );
        }
    }

    #[test]
    fn sides_are_multiples_of_a_patch() {
        let sides = |text: &str| text.parse::<Sides>();
        assert_eq!(sides("256").unwrap().values(), [256; 4]);
        assert_eq!(sides("right=32, left=16").unwrap().values(), [16, 0, 32, 0]);
        assert_eq!(sides("right=32,left=16").unwrap().to_string(), "left=16,right=32");
        for (text, why) in [
            ("250", "left is 250, and has to be a multiple of 16, at most 16384"),
            ("0", "no side is extended"),
            ("left=16,left=32", "left is given twice"),
            ("left", "expected pixels"),
            ("up=16", "expected pixels"),
            ("top=-16", "expected pixels"),
            ("", "expected pixels"),
            ("top=18446744073709551615", "top is 18446744073709551615"),
        ] {
            let error = sides(text).unwrap_err();
            assert!(error.to_string().starts_with(why) && error.exit_code() == 2, "{text}: {error}");
        }
        assert_eq!(sides("250").unwrap_err().hint().unwrap(), "the nearest is 256");
        let framed = frame::<1>(&[1, 2], (2, 1), Sides { left: 1, top: 1, right: 0, bottom: 2 }, 9);
        assert_eq!(framed, [9, 9, 9, 9, 1, 2, 9, 9, 9, 9, 9, 9]);
    }

    #[test]
    fn shapes_have_about_a_megapixel() {
        let size = |text: &str, megapixels: f64| text.parse::<Aspect>().unwrap().size(megapixels * 1_048_576.0);
        for (aspect, megapixels, want) in [
            ("1:1", 1.0, (1024, 1024)),
            ("5:4", 1.0, (1152, 912)),
            ("4:3", 1.0, (1184, 880)),
            ("3:2", 1.0, (1248, 832)),
            ("16:10", 1.0, (1296, 816)),
            ("16:9", 1.0, (1360, 768)),
            ("2:1", 1.0, (1456, 720)),
            ("21:9", 1.0, (1568, 672)),
            ("16:9", 2.0, (1936, 1088)),
            ("16:9", 0.25, (688, 384)),
            ("9:16", 1.0, (768, 1360)),
            ("16:1", 0.0625, (1024, 64)),
        ] {
            assert_eq!(size(aspect, megapixels), want, "{aspect} {megapixels}");
        }
        let wide: Aspect = "16:9".parse().unwrap();
        assert_eq!((wide.height_for(1360), wide.width_for(768), wide.height_for(64)), (768, 1360, 64));
        for wrong in ["", "16", "16:0", "0:1", "-1:1", "17:1", "16x9", "1.5:1", "a:b", "4294967296:1"] {
            assert_eq!(wrong.parse::<Aspect>().unwrap_err().exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn a_crop_fills_the_area_of_the_model() {
        assert_eq!(canvas_of_area((512, 512), 1 << 20), (1024, 1024));
        assert_eq!(canvas_of_area((100, 100), 1 << 20), (400, 400));
        assert_eq!(canvas_of_area((4000, 3000), 1 << 20), (1184, 880));
        assert_eq!(canvas_of_area((4000, 16), 1 << 20), (16_000, 64));
    }
}
