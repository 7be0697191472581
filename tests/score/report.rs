//! Statistics of many verdicts, and how they are displayed.

use crate::edits::EditVerdict;
use crate::judge::Verdict;
use crate::render::Image;
use crate::world::SIDE;
pub use judging::Share;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

pub const COLUMNS: [&str; 6] = ["colors", "shapes", "places", "backgrounds", "edits made", "rest kept"];
/// The limits of a release, as percentages of objects (three columns), prompts, and edits (two columns).
pub const MUSTS: [f64; 6] = [95.0, 85.0, 92.0, 97.0, 80.0, 85.0];
pub const GOALS: [f64; 6] = [98.0, 92.0, 96.0, 99.0, 92.0, 92.0];

/// The first four columns: colors, shapes, places, backgrounds.
pub fn tally(verdicts: &[Verdict]) -> [Share; 4] {
    let objects = || verdicts.iter().flat_map(|v| &v.objects);
    [
        Share::of(objects().map(|o| o.color)),
        Share::of(objects().map(|o| o.shape)),
        Share::of(objects().map(|o| o.place)),
        Share::of(verdicts.iter().map(|v| v.background)),
    ]
}

/// The last two columns: edits made, rest kept.
pub fn tally_edits(verdicts: &[EditVerdict]) -> [Share; 2] {
    [Share::of(verdicts.iter().map(|v| v.made)), Share::of(verdicts.iter().map(|v| v.kept))]
}

/// The last two columns for each kind of edit.
pub fn by_kind(verdicts: &[EditVerdict]) -> BTreeMap<&str, [Share; 2]> {
    let mut kinds = BTreeMap::new();
    for v in verdicts {
        kinds.entry(v.kind.as_str()).or_insert_with(Vec::new).push(v.clone());
    }
    kinds.into_iter().map(|(kind, verdicts)| (kind, tally_edits(&verdicts))).collect()
}

/// Formats shares as a line.
pub fn line(shares: &[Share]) -> String {
    shares.iter().map(|s| format!("{:5.1} ({}/{})", s.percent(), s.right, s.of)).collect::<Vec<_>>().join("  ")
}

/// All six columns with their musts and goals, and the edits kind by kind.
pub fn table(shares: &[Share; 6], edits: &[EditVerdict]) -> String {
    let mut text = format!("{:<12} {:>6} {:>9}  {:>5} {:>5}\n", "", "%", "", "must", "goal");
    for (i, share) in shares.iter().enumerate() {
        let of = format!("{}/{}", share.right, share.of);
        let note = if share.percent() < MUSTS[i] { "  missed" } else { "" };
        let _ = writeln!(text, "{:<12} {:6.1} {of:>9}  {:5} {:5}{note}", COLUMNS[i], share.percent(), MUSTS[i], GOALS[i]);
    }
    for (kind, [made, kept]) in by_kind(edits) {
        let (made, kept) = (format!("{}/{}", made.right, made.of), format!("{}/{}", kept.right, kept.of));
        let _ = writeln!(text, "  {kind:<10} made {made:>6}, rest kept {kept:>6}");
    }
    text
}

/// Saves a grid of images, `columns` in a row; one that failed has a red frame.
pub fn save_grid(path: &Path, images: &[(&Image, bool)], columns: usize) {
    const FRAME: usize = 4;
    let cell = SIDE + 2 * FRAME;
    let (width, height) = (cell * columns, cell * images.len().div_ceil(columns));
    let mut pixels = vec![255; width * height * 3];
    for (i, (image, right)) in images.iter().enumerate() {
        let (left, top) = (i % columns * cell, i / columns * cell);
        for y in 0..cell {
            for x in 0..cell {
                let inside = (FRAME..SIDE + FRAME).contains(&x) && (FRAME..SIDE + FRAME).contains(&y);
                let pixel = match (inside, right) {
                    (true, _) => image.0[(y - FRAME) * SIDE + x - FRAME],
                    (false, true) => [255; 3],
                    (false, false) => [255, 0, 0],
                };
                let at = ((top + y) * width + left + x) * 3;
                pixels[at..at + 3].copy_from_slice(&pixel);
            }
        }
    }
    let image = kiln::image::Image { width, height, pixels };
    std::fs::write(path, image.encode_png(&[]).unwrap()).unwrap();
}
