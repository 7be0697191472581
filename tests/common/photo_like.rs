//! Computed images that resemble what a model generates. They are the same on every machine.

use kiln::image::Image;

/// The kinds of images, by name.
pub const KINDS: [&str; 5] = ["noise", "portrait", "gradient", "text", "flat"];

/// An image of one of the kinds:
///
/// - `noise`: 1/f noise in all channels down to single pixels, as in foliage or gravel;
/// - `portrait`: a smooth subject before a background out of focus, with the slight grain of a decoder;
/// - `gradient`: a sky, dithered by less than a level;
/// - `text`: letters on paper with a little texture and the grain of a decoder;
/// - `flat`: letters on a plain ground, such as a poster.
pub fn photo_like(kind: &str, width: usize, height: usize) -> Image {
    let pixel: &dyn Fn(usize, usize) -> [f32; 3] = match kind {
        "noise" => &|x, y| colored(x, y, 2.0, 1.0, 60.0, 1),
        "portrait" => &|x, y| {
            // Distance from the center in units of the image, without a square root.
            let (u, v) = (x as f32 / width as f32 - 0.5, y as f32 / height as f32 - 0.55);
            let inside = 1.0 / (1.0 + (400.0 * (u * u + 0.6 * v * v - 0.06)).clamp(-8.0, 8.0).powi(2) * 0.2);
            let sharp = colored(x, y, 2.0, 0.7, 45.0, 2);
            let soft = colored(x, y, 64.0, 1.0, 70.0, 3);
            std::array::from_fn(|c| soft[c] + inside * (sharp[c] - soft[c]) + 1.5 * white(x, y, 4 + c as u32))
        },
        "gradient" => &|x, y| {
            let (u, v) = (x as f32 / width as f32, y as f32 / height as f32);
            let sky = [40.0 + 90.0 * v, 90.0 + 100.0 * v + 20.0 * u, 235.0 - 60.0 * v - 10.0 * u * u];
            std::array::from_fn(|c| sky[c] + 0.5 * white(x, y, 9 + c as u32))
        },
        "text" => &|x, y| {
            let paper = colored(x, y, 4.0, 0.8, 6.0, 5);
            let level = if is_ink(x, y) { 0.15 } else { 0.85 };
            std::array::from_fn(|c| 240.0 * level + 0.5 * (paper[c] - 128.0) + 1.5 * white(x, y, 20 + c as u32))
        },
        "flat" => &|x, y| if is_ink(x, y) { [20.0, 30.0, 90.0] } else { [250.0, 240.0, 200.0] },
        other => panic!("no such kind: {other}"),
    };
    let mut pixels = Vec::with_capacity(3 * width * height);
    for y in 0..height {
        for x in 0..width {
            pixels.extend(pixel(x, y).map(|level| level.round().clamp(0.0, 255.0) as u8));
        }
    }
    Image { width, height, pixels }
}

/// Noise with as much energy in every octave: lattices of 256 pixels down to `finest`, each `slope` times as high per halving of its pitch.
/// The channels share most of it, as in photographs.
fn colored(x: usize, y: usize, finest: f32, slope: f32, contrast: f32, seed: u32) -> [f32; 3] {
    let (mut light, mut tint, mut height, mut pitch) = (0.0, [0.0; 3], 1.0, 256.0);
    while pitch >= finest {
        light += height * lattice(x, y, pitch, seed);
        (0..3).for_each(|c| tint[c] += height * lattice(x, y, pitch, seed + 100 * (c as u32 + 1)));
        // Amplitudes of 1/f noise halve with the pitch.
        height *= 0.5 * (1.0 + slope) / 2.0 + 0.1;
        pitch /= 2.0;
    }
    std::array::from_fn(|c| 128.0 + contrast * (light + 0.4 * tint[c]))
}

/// Smooth noise between -1 and 1 with independent values at every `pitch` pixels.
fn lattice(x: usize, y: usize, pitch: f32, seed: u32) -> f32 {
    let split = |value: usize| {
        let at = value as f32 / pitch;
        let (cell, t) = (at.floor(), at - at.floor());
        (cell as usize, t * t * (3.0 - 2.0 * t))
    };
    let ((i, s), (j, t)) = (split(x), split(y));
    let seed = seed.wrapping_mul(31).wrapping_add(pitch as u32);
    let row = |j: usize| {
        let (a, b) = (white(i, j, seed), white(i + 1, j, seed));
        a + s * (b - a)
    };
    let (top, bottom) = (row(j), row(j + 1));
    top + t * (bottom - top)
}

/// White noise between -1 and 1: a hash of the position.
fn white(x: usize, y: usize, seed: u32) -> f32 {
    let mut hash = (x as u32).wrapping_mul(0x9E37_79B1) ^ (y as u32).wrapping_mul(0x85EB_CA77) ^ seed.wrapping_mul(0xC2B2_AE3D);
    hash = (hash ^ (hash >> 15)).wrapping_mul(0x2C1B_3C6D);
    hash = (hash ^ (hash >> 12)).wrapping_mul(0x297A_2D39);
    hash ^= hash >> 15;
    (hash >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// The letters K, I, L and N, five columns by seven rows, top row first.
const LETTERS: [[u8; 7]; 4] = [
    [0b10001, 0b10010, 0b10100, 0b11000, 0b10100, 0b10010, 0b10001],
    [0b01110, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110],
    [0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b11111],
    [0b10001, 0b11001, 0b10101, 0b10101, 0b10011, 0b10001, 0b10001],
];

/// Whether a pixel is part of a letter. Every line has different letters.
fn is_ink(x: usize, y: usize) -> bool {
    // Two pixels a dot; eight dots from letter to letter, eleven from line to line.
    let (column, row) = (x / 2, y / 2);
    let letter = LETTERS[(column / 8 * 7 + row / 11 * 5 + (column / 8) * (row / 11) / 3) % 4];
    let (dot, line) = (column % 8, row % 11);
    dot < 5 && line < 7 && letter[line] >> (4 - dot) & 1 == 1
}
