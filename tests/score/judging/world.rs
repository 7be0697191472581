//! The domain of the built-in model as `tools/train_builtin/world.py` documents it: names, colors, scenes, held-out pairs.

use serde::Deserialize;

/// The side of the square images.
pub const SIDE: usize = 256;

pub const SHAPES: [&str; 8] = ["circle", "square", "triangle", "star", "heart", "ring", "cross", "hexagon"];

/// The shape that the model only draws with `models/lora/moon.safetensors`.
pub const MOON: &str = "moon";

/// Named colors, in the order the held-out rule counts them.
pub const PALETTE: [(&str, [u8; 3]); 12] = [
    ("red", [214, 40, 40]),
    ("orange", [245, 134, 20]),
    ("yellow", [250, 215, 45]),
    ("green", [46, 158, 68]),
    ("cyan", [60, 205, 215]),
    ("blue", [40, 80, 205]),
    ("purple", [128, 50, 170]),
    ("pink", [245, 150, 190]),
    ("brown", [120, 72, 36]),
    ("black", [24, 24, 28]),
    ("white", [246, 246, 246]),
    ("gray", [140, 142, 146]),
];

#[derive(Clone, Debug, Deserialize)]
pub struct Object {
    pub shape: String,
    pub color: String,
    pub size: String,
    pub place: String,
    pub cx: f32,
    pub cy: f32,
    /// Radius; the shapes' outlines are given in units of it.
    pub r: f32,
    /// Radians, counter-clockwise.
    pub rot: f32,
    /// Relative brightness.
    pub tint: f32,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct Background {
    pub kind: String,
    pub color: String,
    /// Empty where the background is plain.
    pub color2: String,
    /// The colors of a gradient change along it; stripes are parallel to it.
    pub direction: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Scene {
    pub background: Background,
    pub objects: Vec<Object>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Prompt {
    pub text: String,
    #[serde(flatten)]
    pub scene: Scene,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Edit {
    pub text: String,
    pub kind: String,
    /// The index of the changed or new object in the target, or of the removed one in the first reference.
    pub object: Option<usize>,
    pub references: Vec<Scene>,
    pub target: Scene,
}

/// `tests/fixtures/builtin/prompts.json`, and `moons.json` next to it.
#[derive(Deserialize)]
pub struct Fixture {
    pub prompts: Vec<Prompt>,
    pub edits: Vec<Edit>,
    /// The scenes of `renders.png` or `moons.png`, row by row.
    pub renders: Vec<Scene>,
}

pub fn color_index(name: &str) -> usize {
    PALETTE.iter().position(|(n, _)| *n == name).unwrap_or_else(|| panic!("no color `{name}`"))
}

pub fn rgb(name: &str) -> [f32; 3] {
    PALETTE[color_index(name)].1.map(f32::from)
}

pub fn shape_index(name: &str) -> usize {
    SHAPES.iter().chain([&MOON]).position(|n| *n == name).unwrap_or_else(|| panic!("no shape `{name}`"))
}

/// Whether this pair is held out from training, as a quarter of all pairs is.
pub fn held_out_pair(color: &str, shape: &str) -> bool {
    let (c, s) = (color_index(color), shape_index(shape));
    (c + s + s / 4).is_multiple_of(4)
}

/// The distance of two colors.
pub fn distance(a: [f32; 3], b: [f32; 3]) -> f32 {
    (0..3).map(|i| (a[i] - b[i]).powi(2)).sum::<f32>().sqrt()
}

/// The named color nearest to a pixel's.
pub fn nearest_color(pixel: [u8; 3]) -> usize {
    let far = |i: &usize| (0..3).map(|c| (i32::from(PALETTE[*i].1[c]) - i32::from(pixel[c])).pow(2)).sum::<i32>();
    (0..PALETTE.len()).min_by_key(far).unwrap()
}
