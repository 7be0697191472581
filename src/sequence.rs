//! Lays out a prompt, a canvas and reference images as one token sequence with 4-D position ids. Pure: no backend, no I/O.
//!
//! The sequence is text, then the canvas (the image to be generated), then the references. The transformer has no attention mask;
//! a token's only positional information is its id `(t, h, w, l)`, which is applied to queries and keys as RoPE.

use crate::error::{Error, Result};
use crate::trace;
use std::ops::Range;

/// The longest sequence that is supported.
pub const MAX_TOKENS: usize = 52_000;

/// Pixels along one side of a token's patch: the VAE downsamples by 8, patchifying by 2.
pub const PATCH: usize = 16;

/// Shortest side of a canvas, in pixels.
const MIN_SIDE: usize = 64;

/// Longest side of a canvas, in pixels. No square this large fits [`MAX_TOKENS`]; a narrow strip does.
const MAX_SIDE: usize = 16_384;

/// Side of the largest square that fits [`MAX_TOKENS`] with a prompt: 226 x 226 tokens and 512 tokens of text.
const LARGEST_SQUARE: usize = 226 * PATCH;

/// Distance on the `t` axis between the canvas and the first reference, and from one reference to the next.
const REFERENCE_SPACING: usize = 10;

/// The size of an image that divides into whole patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pixels {
    width: usize,
    height: usize,
}

impl Pixels {
    /// Checks the size of a canvas.
    pub fn new(width: usize, height: usize) -> Result<Self> {
        let mut nearest = (nearest_side(width), nearest_side(height));
        if nearest != (width, height) {
            // The advised size must be valid: two sides that are legal on their own can exceed the token limit together.
            if nearest.0 * nearest.1 > LARGEST_SQUARE * LARGEST_SQUARE {
                nearest = (LARGEST_SQUARE, LARGEST_SQUARE);
            }
            let rule = format!("sides must be multiples of {PATCH}, at least {MIN_SIDE}, and within the token limit");
            return Err(Error::ImageSize { width, height, rule, nearest });
        }
        Ok(Self { width, height })
    }

    /// The width.
    pub const fn width(self) -> usize {
        self.width
    }

    /// The height.
    pub const fn height(self) -> usize {
        self.height
    }

    /// The size in tokens.
    pub const fn grid(self) -> Grid {
        Grid { width: self.width / PATCH, height: self.height / PATCH }
    }
}

/// The nearest legal side; the smaller one in a tie.
fn nearest_side(side: usize) -> usize {
    let side = side.clamp(MIN_SIDE, MAX_SIDE);
    let below = side - side % PATCH;
    if side - below > PATCH / 2 { below + PATCH } else { below }
}

/// An image size in tokens, one for each patch of 16 x 16 pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Tokens in a row.
    pub width: usize,
    /// Rows of tokens.
    pub height: usize,
}

impl Grid {
    /// Number of tokens of the image. It saturates, so an unchecked size exceeds every limit instead of wrapping around.
    pub const fn tokens(self) -> usize {
        self.width.saturating_mul(self.height)
    }

    /// Position ids of all patches, row by row, in the plane `t`.
    fn ids(self, t: usize) -> impl Iterator<Item = [u32; 4]> {
        (0..self.height).flat_map(move |h| (0..self.width).map(move |w| [t as u32, h as u32, w as u32, 0]))
    }
}

/// Parameters of the multi-axis RoPE.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Number of head dimensions of each axis, in the order `t, h, w, l`. Each is even.
    pub axes: [usize; 4],
}

impl RopeSpec {
    /// The parameters of all FLUX.2 klein models.
    pub const KLEIN: Self = Self { theta: 2000.0, axes: [32; 4] };

    /// Number of dimensions of a head.
    pub fn head_dim(&self) -> usize {
        self.axes.iter().sum()
    }
}

impl Default for RopeSpec {
    fn default() -> Self {
        Self::KLEIN
    }
}

/// The layout of a token sequence: `text | canvas | reference 0 | reference 1 | ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLayout {
    text: usize,
    canvas: Grid,
    references: Vec<Grid>,
    tokens: usize,
}

impl SequenceLayout {
    /// Lays out a sequence, or returns an error if it is longer than `MAX_TOKENS`.
    pub fn new(text: usize, canvas: Grid, references: &[Grid]) -> Result<Self> {
        let tokens = references.iter().chain([&canvas]).fold(text, |sum, grid| sum.saturating_add(grid.tokens()));
        if tokens > MAX_TOKENS {
            return Err(Error::TooManyTokens { text, image: tokens - text, limit: MAX_TOKENS });
        }
        Ok(Self { text, canvas, references: references.to_vec(), tokens })
    }

    /// Rows of the text tokens.
    pub fn text(&self) -> Range<usize> {
        0..self.text
    }

    /// Rows of the tokens that are denoised.
    pub fn canvas(&self) -> Range<usize> {
        self.text..self.text + self.canvas.tokens()
    }

    /// The sizes of the references.
    pub fn references(&self) -> &[Grid] {
        &self.references
    }

    /// Length of the sequence in tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The position id `(t, h, w, l)` of every token. Text tokens differ in `l`; the patches of an image differ in `h` and `w`.
    /// Each image has its own plane `t`, so patches of different images never share a position.
    pub fn ids(&self) -> Vec<[u32; 4]> {
        let text = (0..self.text).map(|l| [0, 0, 0, l as u32]);
        let references = self.references.iter().enumerate().flat_map(|(j, grid)| grid.ids(REFERENCE_SPACING * (j + 1)));
        text.chain(self.canvas.ids(0)).chain(references).collect()
    }

    /// The RoPE table of all tokens, row-major `[tokens, head_dim]`: each row holds the cosines of all pairs, then their sines.
    /// Pairs are grouped by axis; pair `p` rotates elements `2p` and `2p + 1` of a head.
    pub fn rope_table(&self, spec: &RopeSpec) -> Vec<f32> {
        let _span = trace::span("RoPE table");
        let ids = self.ids();
        // An axis has few distinct positions (at most as many as rows, columns or text tokens), so each angle is computed once.
        let tables: [Vec<f32>; 4] = std::array::from_fn(|axis| {
            let positions = ids.iter().map(|id| id[axis] as usize + 1).max().unwrap_or(0);
            rope_table_1d(positions, spec.axes[axis], spec.theta)
        });
        let mut out = Vec::with_capacity(ids.len() * spec.head_dim());
        for id in &ids {
            let row = |axis: usize| {
                let dim = spec.axes[axis];
                tables[axis][id[axis] as usize * dim..][..dim].split_at(dim / 2)
            };
            (0..4).for_each(|axis| out.extend_from_slice(row(axis).0));
            (0..4).for_each(|axis| out.extend_from_slice(row(axis).1));
        }
        out
    }
}

/// The RoPE table of the positions `0..tokens` along a single axis, row-major `[tokens, head_dim]`: each row holds `head_dim / 2`
/// cosines, then as many sines. This is the whole table of a text encoder, where pair `k` rotates elements `k` and
/// `k + head_dim / 2` of a head.
///
/// Angles are computed in f64: in f32 a large angle's rounding error would exceed its cosine's.
pub fn rope_table_1d(tokens: usize, head_dim: usize, theta: f64) -> Vec<f32> {
    let half = head_dim / 2;
    let omega: Vec<f64> = (0..half).map(|k| theta.powf(-(k as f64) / half as f64)).collect();
    let mut out = Vec::with_capacity(tokens * head_dim);
    for position in 0..tokens {
        let angles = omega.iter().map(|omega| position as f64 * omega);
        out.extend(angles.clone().map(|angle| angle.cos() as f32));
        out.extend(angles.map(|angle| angle.sin() as f32));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(width: usize, height: usize) -> Grid {
        Pixels::new(width, height).unwrap().grid()
    }

    #[test]
    fn pixels_name_the_nearest_legal_size() {
        let error = Pixels::new(1000, 1001).unwrap_err();
        assert_eq!(error.to_string(), "1000x1001: sides must be multiples of 16, at least 64, and within the token limit");
        assert_eq!(error.hint().as_deref(), Some("try 992x1008"));
        assert_eq!(error.exit_code(), 2);
        for (side, nearest) in [(0, 64), (48, 64), (65, 64), (72, 64), (73, 80), (16_385, 16_384), (usize::MAX, 16_384)] {
            let hint = Pixels::new(side, 512).unwrap_err().hint();
            assert_eq!(hint, Some(format!("try {nearest}x512")), "{side}");
        }
    }

    #[test]
    fn pixels_become_patches_of_sixteen() {
        assert_eq!(grid(64, 16_384), Grid { width: 4, height: 1024 });
        assert_eq!(grid(1360, 768).tokens(), 4080);
        assert_eq!(Grid { width: usize::MAX, height: 2 }.tokens(), usize::MAX);
    }

    #[test]
    fn spans_are_consecutive_and_position_ids_match_them() {
        // Two references of different sizes and a 1024 x 1024 canvas: 10,002 image tokens.
        let references = [grid(592, 800), grid(1248, 832)];
        let plan = SequenceLayout::new(512, grid(1024, 1024), &references).unwrap();
        assert_eq!(plan.text(), 0..512);
        assert_eq!(plan.canvas(), 512..4608);
        assert_eq!((plan.tokens(), plan.tokens() - 512, plan.references.len()), (10_514, 10_002, 2));

        let ids = plan.ids();
        assert_eq!(ids.len(), plan.tokens());
        assert_eq!((ids[0], ids[511]), ([0, 0, 0, 0], [0, 0, 0, 511]));
        assert_eq!((ids[512], ids[513], ids[512 + 64], ids[4607]), ([0; 4], [0, 0, 1, 0], [0, 1, 0, 0], [0, 63, 63, 0]));
        // Each reference has its own grid: 37 columns by 50 rows, then 78 by 52.
        assert_eq!((ids[4608], ids[4608 + 37], ids[6457]), ([10, 0, 0, 0], [10, 1, 0, 0], [10, 49, 36, 0]));
        assert_eq!((ids[6458], ids[6458 + 77], ids[10_513]), ([20, 0, 0, 0], [20, 0, 77, 0], [20, 51, 77, 0]));
    }

    #[test]
    fn a_sequence_over_the_limit_is_refused() {
        let canvas = Grid { width: 1, height: MAX_TOKENS - 512 };
        assert_eq!(SequenceLayout::new(512, canvas, &[]).unwrap().tokens(), MAX_TOKENS);
        let error = SequenceLayout::new(512, canvas, &[Grid { width: 1, height: 1 }]).unwrap_err();
        assert!(matches!(error, Error::TooManyTokens { text: 512, image: 51_489, limit: MAX_TOKENS }), "{error}");
        // Sizes that overflow also count as too many tokens, and the message can be formatted.
        let huge = Grid { width: usize::MAX, height: usize::MAX };
        assert!(SequenceLayout::new(512, huge, &[huge]).unwrap_err().to_string().starts_with("too many tokens"));
    }

    #[test]
    fn rope_frequencies() {
        // For small positions sin(omega) is omega, so this compares angles with atan2 at position 1.
        let want = [
            1.0, 0.62184998, 0.38669740, 0.24046777, 0.14953488, 0.09298826, 0.05782475, 0.03595832, 0.02236068, 0.01390499,
            0.00864682, 0.00537702, 0.00334370, 0.00207928, 0.00129300, 0.00080405,
        ];
        let table = rope_table_1d(2, 32, 2000.0);
        assert_eq!(table[..32], [[1.0f32; 16], [0.0; 16]].concat());
        for (k, want) in want.into_iter().enumerate() {
            let (cos, sin) = (f64::from(table[32 + k]), f64::from(table[48 + k]));
            assert!((sin.atan2(cos) - want).abs() < 1e-7, "omega {k}: {} is not {want}", sin.atan2(cos));
        }
    }

    #[test]
    fn rope_rows_hold_cosines_then_sines_grouped_by_axis() {
        let plan = SequenceLayout::new(3, Grid { width: 5, height: 4 }, &[Grid { width: 2, height: 2 }]).unwrap();
        let table = plan.rope_table(&RopeSpec::default());
        assert_eq!(table.len(), plan.tokens() * 128);
        for (row, id) in table.chunks_exact(128).zip(plan.ids()) {
            for (axis, k) in (0..4).flat_map(|axis| (0..16).map(move |k| (axis, k))) {
                let angle = f64::from(id[axis]) * 2000f64.powf(-(k as f64) / 16.0);
                let pair = 16 * axis + k;
                assert_eq!((row[pair], row[64 + pair]), (angle.cos() as f32, angle.sin() as f32), "{id:?} pair {pair}");
            }
        }
        // Axes of different sizes keep their places.
        let table = plan.rope_table(&RopeSpec { theta: 100.0, axes: [4, 2, 6, 8] });
        let last = &table[(plan.tokens() - 1) * 20..]; // id (10, 1, 1, 0)
        assert_eq!((last[0], last[2], last[3], last[6]), (10f64.cos() as f32, 1f64.cos() as f32, 1f64.cos() as f32, 1.0));
        assert_eq!((last[10], last[12], last[13], last[16]), (10f64.sin() as f32, 1f64.sin() as f32, 1f64.sin() as f32, 0.0));
    }

    #[test]
    fn half_split_rows_of_a_text_encoder() {
        let table = rope_table_1d(512, 128, 1e6);
        assert_eq!(table.len(), 512 * 128);
        let (position, k) = (511usize, 63usize);
        let angle = 511.0 * 1e6f64.powf(-63.0 / 64.0);
        assert_eq!(table[position * 128 + k], angle.cos() as f32);
        assert_eq!(table[position * 128 + 64 + k], angle.sin() as f32);
        assert!(rope_table_1d(0, 128, 1e6).is_empty());
    }
}
