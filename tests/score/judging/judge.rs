//! Compares an image with a scene. Regions that are not background are matched to objects by place and size; then color, shape
//! and place of each region are judged independently.

use crate::Share;
use crate::regions::{Mask, NO_SHAPE, and, centroid, connected, count, grow, pixels, shape_of, shrink};
use crate::render::{Image, background_of, lerp, mask_of, mix};
use crate::world::{Background, Object, PALETTE, SIDE, Scene, color_index, distance, nearest_color, rgb};
use std::sync::OnceLock;

/// A pixel within this distance of the background's color is background.
const SAME: f32 = 40.0;
/// Brightness factors of a background under the shadows of objects.
const SHADES: [f32; 6] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75];
/// A region of fewer pixels is ignored.
pub const DIRT: usize = 120;
/// The largest distance from the expected place; places are at least 66 pixels apart.
const NEAR: f32 = 20.0;
/// The share of an object's pixels that must have its color.
const MOSTLY: f32 = 0.75;
/// The percentage of the remaining pixels that must be the expected background.
const CLEAN: f64 = 95.0;

/// The verdict on one object.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Seen {
    pub color: bool,
    pub shape: bool,
    pub place: bool,
    /// A description of what was found.
    pub found: String,
}

/// The verdict on a scene.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Verdict {
    pub objects: Vec<Seen>,
    pub background: bool,
    /// A description of the background that was found.
    pub found: String,
}

/// Whether a pixel has a background's color, with or without a shadow.
fn is_background(pixel: [u8; 3], background: [f32; 3]) -> bool {
    SHADES.iter().any(|s| distance(pixel.map(f32::from), background.map(|v| v * s)) <= SAME)
}

/// Every background of the world.
fn all_backgrounds() -> Vec<Background> {
    let names = PALETTE.map(|(name, _)| name);
    let make = |kind: &str, color: &str, color2: &str, direction: &str| Background {
        kind: kind.into(),
        color: color.into(),
        color2: color2.into(),
        direction: direction.into(),
    };
    let mut all: Vec<Background> = names.iter().map(|a| make("plain", a, "", "vertical")).collect();
    for (a, b) in names.iter().flat_map(|a| names.iter().map(move |b| (a, b))).filter(|(a, b)| a != b) {
        all.extend(["vertical", "horizontal"].map(|d| make("gradient", a, b, d)));
        all.extend(["vertical", "horizontal", "diagonal"].map(|d| make("stripes", a, b, d)));
    }
    all
}

/// The share of the pixels for which `counts` holds that are the expected background.
pub fn share_of_background(image: &Image, background: &Background, counts: impl Fn(usize) -> bool) -> Share {
    let asked = background_of(background);
    // The edge of a stripe may be some pixels off.
    let even = |i: usize| {
        let beside = [i.saturating_sub(4), i + 4, i.saturating_sub(4 * SIDE), i + 4 * SIDE];
        background.kind != "stripes" || beside.iter().all(|&b| asked.get(b).is_none_or(|b| *b == asked[i]))
    };
    Share::of((0..SIDE * SIDE).filter(|&i| counts(i) && even(i)).map(|i| is_background(image.0[i], asked[i])))
}

/// The background that agrees with most of an image.
fn recognize(image: &Image) -> Background {
    /// The step of the sampling grid, which meets every stripe.
    const STEP: usize = 8;
    static CANDIDATES: OnceLock<Vec<(Background, Vec<f32>)>> = OnceLock::new();
    let points: Vec<(usize, usize)> =
        (0..(SIDE / STEP).pow(2)).map(|i| (i % (SIDE / STEP) * STEP + STEP / 2, i / (SIDE / STEP) * STEP + STEP / 2)).collect();
    let candidates = CANDIDATES.get_or_init(|| {
        let shares = |b: &Background| -> Vec<f32> {
            points.iter().map(|&(x, y)| mix(&b.kind, &b.direction, x as f32 + 0.5, y as f32 + 0.5)).collect()
        };
        all_backgrounds().into_iter().map(|b| (b.clone(), shares(&b))).collect()
    });
    let seen: Vec<[f32; 3]> = points.iter().map(|&(x, y)| image.at(x, y)).collect();
    let mut best = (f32::MAX, &candidates[0].0);
    for (background, shares) in candidates {
        let first = rgb(&background.color);
        let second = if background.kind == "plain" { first } else { rgb(&background.color2) };
        let mut off = 0.0;
        for (pixel, share) in seen.iter().zip(shares) {
            // A pixel that is far off belongs to an object, so its distance is capped.
            off += distance(*pixel, lerp(first, second, *share)).min(1.5 * SAME);
            if off >= best.0 {
                break;
            }
        }
        if off < best.0 {
            best = (off, background);
        }
    }
    best.1.clone()
}

/// Regions that stand out from a background.
fn regions(image: &Image, background: &Background) -> Vec<Mask> {
    let foreground = image.0.iter().zip(background_of(background)).map(|(p, b)| !is_background(*p, b)).collect();
    // A morphological closing: edges of stripes can leave cracks in an object whose color lies between the stripes' colors.
    let apart = shrink(&grow(&foreground, 1), 1);
    // A morphological opening drops thin lines, which a stripe that is some pixels off leaves.
    let solid = grow(&shrink(&apart, 2), 2);
    let seeds = connected(&solid).into_iter().filter(|part| count(part) > DIRT);
    // The opening also drops the tips of objects, which are restored. Pixels nearer to a stripe's color are removed.
    let stripes = [&background.color, &background.color2].map(|name| (background.kind == "stripes").then(|| rgb(name)));
    let whole = |seed: Mask| -> Mask {
        let mean = mean_color(image, &seed);
        let own = |pixel: [f32; 3]| stripes.iter().flatten().all(|s| distance(pixel, mean) <= distance(pixel, *s));
        let near = (0..3).fold(seed, |region, _| and(&grow(&region, 2), &apart));
        near.iter().zip(&image.0).map(|(near, pixel)| *near && own(pixel.map(f32::from))).collect()
    };
    seeds.map(whole).collect()
}

fn mean_color(image: &Image, mask: &Mask) -> [f32; 3] {
    let n = count(mask) as f32;
    pixels(mask).map(|(x, y)| image.at(x, y)).fold([0.0; 3], |sum, pixel| std::array::from_fn(|c| sum[c] + pixel[c] / n))
}

/// The share of a region's pixels for each named color. Its rim is left out, where colors blend.
fn colors_of(image: &Image, region: &Mask) -> [f32; PALETTE.len()] {
    let inner = shrink(region, 2);
    let core = if count(&inner) > DIRT / 2 { inner } else { region.clone() };
    let mut shares = [0.0; PALETTE.len()];
    let one = 1.0 / count(&core) as f32;
    pixels(&core).for_each(|(x, y)| shares[nearest_color(image.0[y * SIDE + x])] += one);
    shares
}

fn apart(a: (f32, f32), b: (f32, f32)) -> f32 {
    (a.0 - b.0).hypot(a.1 - b.1)
}

/// Assigns a region to each object: as many as possible, at the least total distance of places and sizes.
fn matched(wanted: &[Mask], found: &[Mask]) -> Vec<Option<usize>> {
    /// The cost of no region, larger than that of any region.
    const NONE: f32 = 1000.0;
    let size = |mask: &Mask| (count(mask) as f32).sqrt();
    // The smallest object is half as wide as the largest. A region with a larger ratio is not the object.
    let cost = |w: &Mask, f: &Mask| match size(f) / size(w) {
        0.5..=2.0 => apart(centroid(w), centroid(f)) + (size(w) - size(f)).abs(),
        _ => f32::INFINITY,
    };
    let costs: Vec<Vec<f32>> = wanted.iter().map(|w| found.iter().map(|f| cost(w, f)).chain([NONE]).collect()).collect();
    // All assignments, each a number with a digit per object; the largest digit stands for no region.
    let base = found.len() + 1;
    let ways = (0..base.pow(wanted.len() as u32))
        .map(|way| -> Vec<usize> { (0..wanted.len()).map(|i| way / base.pow(i as u32) % base).collect() });
    let once = |way: &Vec<usize>| (0..found.len()).all(|f| way.iter().filter(|w| **w == f).count() <= 1);
    let total = |way: &[usize]| way.iter().enumerate().map(|(i, f)| costs[i][*f]).sum::<f32>();
    let best = ways.filter(once).min_by(|a, b| total(a).total_cmp(&total(b))).unwrap();
    best.into_iter().map(|f| (f < found.len()).then_some(f)).collect()
}

/// Judges one region as one object.
fn object_seen(image: &Image, region: &Mask, wanted: &Mask, object: &Object) -> Seen {
    let shares = colors_of(image, region);
    let main = (0..shares.len()).max_by(|a, b| shares[*a].total_cmp(&shares[*b])).unwrap();
    let (shape, off) = shape_of(region, &object.shape);
    let far = apart(centroid(region), centroid(wanted));
    Seen {
        color: shares[color_index(&object.color)] >= MOSTLY,
        shape: shape == object.shape && off < NO_SHAPE,
        place: far <= NEAR,
        found: format!("{:.0} % {} {} ({off:.3}), {far:.1} px off", 100.0 * shares[main], PALETTE[main].0, shape),
    }
}

/// Judges an image. A region that belongs to no object counts against the background.
pub fn judge(image: &Image, scene: &Scene) -> Verdict {
    let background = recognize(image);
    let mut found = regions(image, &background);
    // Only the largest regions count: the number of assignments grows fast, and an image with more fails anyway.
    found.sort_by_key(|region| std::cmp::Reverse(count(region)));
    found.truncate(8);
    let wanted: Vec<Mask> = scene.objects.iter().map(mask_of).collect();
    let chosen = matched(&wanted, &found);
    let mut own: Vec<Option<Mask>> = chosen.iter().map(|c| c.map(|c| found[c].clone())).collect();
    let mut extra = 0;
    for region in (0..found.len()).filter(|i| !chosen.contains(&Some(*i))).map(|i| &found[i]) {
        // A fragment near an object becomes part of it, and changes its shape.
        let home = (0..own.len()).find(|&o| {
            let object = &scene.objects[o];
            own[o].is_some() && apart(centroid(region), (object.cx, object.cy)) < 1.15 * object.r
        });
        match home {
            Some(o) => own[o] = own[o].take().map(|mask| mask.iter().zip(region).map(|(a, b)| *a || *b).collect()),
            None => extra += 1,
        }
    }
    let seen = |i: usize| match &own[i] {
        Some(region) => object_seen(image, region, &wanted[i], &scene.objects[i]),
        None => Seen { found: "nothing".into(), ..Seen::default() },
    };
    let objects = (0..own.len()).map(seen).collect();
    let mut taken = vec![false; SIDE * SIDE];
    for mask in own.iter().flatten().map(|mask| grow(mask, 3)) {
        pixels(&mask).for_each(|(x, y)| taken[y * SIDE + x] = true);
    }
    let clean = share_of_background(image, &scene.background, |i| !taken[i]);
    let b = &background;
    let words = format!("{} {} {} {}, {:.1} % as asked, {extra} more", b.kind, b.direction, b.color, b.color2, clean.percent());
    Verdict { objects, background: background == scene.background && clean.percent() >= CLEAN && extra == 0, found: words }
}
