//! Geometry of pixel masks: dilation and erosion, connected components, and shape recognition.

use crate::render::mask_of;
use crate::world::{MOON, Object, SHAPES, SIDE};
use std::sync::OnceLock;

pub type Mask = Vec<bool>;

/// Dilation by a square of `by` pixels to each side.
pub fn grow(mask: &Mask, by: usize) -> Mask {
    // One pass along rows and one along columns; pixels of a line are `step` apart.
    let pass = |mask: &Mask, step: usize, line: usize| -> Mask {
        let mut grown = vec![false; SIDE * SIDE];
        for start in (0..SIDE).map(|i| i * line) {
            let mut done = 0;
            for at in (0..SIDE).filter(|at| mask[start + at * step]) {
                let end = (at + by + 1).min(SIDE);
                (at.saturating_sub(by).max(done)..end).for_each(|p| grown[start + p * step] = true);
                done = end;
            }
        }
        grown
    };
    pass(&pass(mask, 1, SIDE), SIDE, 1)
}

/// Erosion by a square of `by` pixels to each side; pixels outside of the image count as part of the mask.
pub fn shrink(mask: &Mask, by: usize) -> Mask {
    not(&grow(&not(mask), by))
}

pub fn not(mask: &Mask) -> Mask {
    mask.iter().map(|m| !m).collect()
}

pub fn and(a: &Mask, b: &Mask) -> Mask {
    a.iter().zip(b).map(|(a, b)| *a && *b).collect()
}

pub fn count(mask: &Mask) -> usize {
    mask.iter().filter(|m| **m).count()
}

pub fn pixels(mask: &Mask) -> impl Iterator<Item = (usize, usize)> {
    mask.iter().enumerate().filter(|(_, m)| **m).map(|(i, _)| (i % SIDE, i / SIDE))
}

/// The centroid of a mask, in pixels from the top left corner.
pub fn centroid(mask: &Mask) -> (f32, f32) {
    let n = count(mask).max(1) as f32;
    let (x, y) = pixels(mask).fold((0.0, 0.0), |(x, y), (px, py)| (x + px as f32 + 0.5, y + py as f32 + 0.5));
    (x / n, y / n)
}

/// The part of a mask that is 8-connected with some of its pixels.
fn reached(mask: &Mask, mut todo: Vec<usize>) -> Mask {
    let mut part = vec![false; SIDE * SIDE];
    todo.iter().for_each(|i| part[*i] = true);
    while let Some(i) = todo.pop() {
        let (x, y) = (i % SIDE, i / SIDE);
        for ny in y.saturating_sub(1)..=(y + 1).min(SIDE - 1) {
            for nx in x.saturating_sub(1)..=(x + 1).min(SIDE - 1) {
                let n = ny * SIDE + nx;
                if mask[n] && !part[n] {
                    part[n] = true;
                    todo.push(n);
                }
            }
        }
    }
    part
}

/// The 8-connected components of a mask.
pub fn connected(mask: &Mask) -> Vec<Mask> {
    let (mut left, mut parts) = (mask.clone(), Vec::new());
    while let Some(start) = left.iter().position(|m| *m) {
        let part = reached(&left, vec![start]);
        left.iter_mut().zip(&part).for_each(|(left, part)| *left &= !part);
        parts.push(part);
    }
    parts
}

/// The mask with its holes filled: everything that cannot be reached from the border of the image.
fn filled(mask: &Mask) -> Mask {
    let border = |i: &usize| [i % SIDE, i / SIDE].iter().any(|c| [0, SIDE - 1].contains(c));
    let outside = not(mask);
    not(&reached(&outside, (0..SIDE * SIDE).filter(border).filter(|i| outside[*i]).collect()))
}

/// Area of the convex hull, by Andrew's monotone chain over the corners of the first and last pixel of every row.
fn hull_area(mask: &Mask) -> f32 {
    let mut corners: Vec<(i32, i32)> = Vec::new();
    for (y, row) in mask.chunks(SIDE).enumerate() {
        let ends = [row.iter().position(|m| *m), row.iter().rposition(|m| *m).map(|x| x + 1)];
        let both = |x: usize| [(x as i32, y as i32), (x as i32, y as i32 + 1)];
        corners.extend(ends.into_iter().flatten().flat_map(both));
    }
    corners.sort_unstable();
    corners.dedup();
    let half = |points: &mut dyn Iterator<Item = (i32, i32)>| {
        let mut chain: Vec<(i32, i32)> = Vec::new();
        for p in points {
            while let [.., a, b] = chain[..] {
                if (b.0 - a.0) * (p.1 - a.1) - (b.1 - a.1) * (p.0 - a.0) > 0 {
                    break;
                }
                chain.pop();
            }
            chain.push(p);
        }
        chain.pop();
        chain
    };
    let mut hull = half(&mut corners.iter().copied());
    hull.extend(half(&mut corners.iter().rev().copied()));
    let twice: i32 = (0..hull.len()).map(|i| (hull[i], hull[(i + 1) % hull.len()])).map(|(a, b)| a.0 * b.1 - a.1 * b.0).sum();
    twice.abs() as f32 / 2.0
}

/// Angular harmonics 1 to 8 of a mask, how much larger its convex hull is, and the share of its holes. They do not depend on
/// place or size, and all are zero for a disc.
pub type Features = [f32; 2 * UPRIGHT + HARMONICS - UPRIGHT + 2];

/// The number of angular harmonics: a triangle has the third, a hexagon the sixth.
const HARMONICS: usize = 8;
/// The number of harmonics with a phase, as two numbers each: a triangle stands on a side and a heart on its tip, while an
/// irregular region can point anywhere.
const UPRIGHT: usize = 3;
/// The weight of the hole, which is a quarter of a ring, to make it comparable with a harmonic.
const HOLE: f32 = 2.0;

fn features(mask: &Mask) -> Features {
    let whole = filled(mask);
    let (cx, cy) = centroid(&whole);
    let (mut turns, mut weight) = ([(0.0f32, 0.0f32); HARMONICS], 0.0);
    for (x, y) in pixels(&whole) {
        let (dx, dy) = (x as f32 + 0.5 - cx, y as f32 + 0.5 - cy);
        // Far pixels distinguish outlines, so they weigh more.
        let far = (dx * dx + dy * dy).max(1e-6);
        weight += far;
        // Powers of the unit vector to the pixel, one for each harmonic.
        let (cos, sin) = (dx / far.sqrt(), dy / far.sqrt());
        let (mut a, mut b) = (cos, sin);
        for sum in &mut turns {
            *sum = (sum.0 + far * a, sum.1 + far * b);
            (a, b) = (a * cos - b * sin, a * sin + b * cos);
        }
    }
    let area = count(&whole) as f32;
    let pointed = turns[..UPRIGHT].iter().flat_map(|(a, b)| [a / weight, b / weight]);
    let strengths = turns[UPRIGHT..].iter().map(|(a, b)| a.hypot(*b) / weight);
    let others = [1.0 - area / hull_area(&whole), HOLE * (1.0 - count(mask) as f32 / area)];
    pointed.chain(strengths).chain(others).collect::<Vec<_>>().try_into().unwrap()
}

/// Every shape's features at a few sizes: its name, root of its area, features.
fn known() -> &'static Vec<(&'static str, f32, Features)> {
    static KNOWN: OnceLock<Vec<(&str, f32, Features)>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let radii = [22.0, 26.0, 30.0, 36.0, 44.0, 56.0];
        let shapes = SHAPES.into_iter().chain([MOON]);
        shapes
            .flat_map(|s| radii.map(|r| (s, r)))
            .map(|(s, r)| {
                let at = SIDE as f32 / 2.0;
                let (color, size, place) = Default::default();
                let mask = mask_of(&Object { shape: s.into(), color, size, place, cx: at, cy: at, r, rot: 0.0, tint: 0.0 });
                (s, (count(&mask) as f32).sqrt(), features(&mask))
            })
            .collect()
    })
}

/// A mask with a larger distance from every shape is none of them.
pub const NO_SHAPE: f32 = 0.45;

/// The nearest shape of a mask, and its distance. Candidates are the model's shapes and the requested one. A shape drawn rounder or sharper
/// has all its features weaker or stronger, so the distance ignores a common factor within limits.
pub fn shape_of(mask: &Mask, asked: &str) -> (&'static str, f32) {
    let (size, seen) = ((count(mask) as f32).sqrt(), features(mask));
    let dot = |a: &Features, b: &Features| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let far = |f: &Features| {
        let strength = (dot(f, &seen) / dot(f, f)).clamp(0.7, 1.2);
        (0..f.len()).map(|i| (strength * f[i] - seen[i]).powi(2)).sum::<f32>().sqrt()
    };
    let each = SHAPES.into_iter().chain([MOON].into_iter().filter(|moon| *moon == asked)).map(|s| {
        let same = known().iter().filter(|k| k.0 == s);
        let nearest = same.min_by(|a, b| (a.1 - size).abs().total_cmp(&(b.1 - size).abs())).unwrap();
        (s, far(&nearest.2))
    });
    each.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
}
