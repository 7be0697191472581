//! Judges edits: whether the change was made, and whether the rest was kept.

use crate::judge::{judge, share_of_background};
use crate::regions::{Mask, grow, not, pixels};
use crate::render::{Image, mask_of, render};
use crate::world::Edit;

/// How much larger the mean difference of the rest may be than the VAE round trip's, in 255ths.
const LEEWAY: f32 = 4.0;

/// The verdict on an edit.
#[derive(Clone, Debug, serde::Serialize)]
pub struct EditVerdict {
    pub kind: String,
    pub made: bool,
    pub kept: bool,
    /// The mean difference of the rest from the target, and the mean difference of the target's VAE round trip.
    pub off: f32,
    pub trip: f32,
    /// A description of the result.
    pub found: String,
}

/// An edit and its target.
pub struct Task<'a> {
    pub edit: &'a Edit,
    pub target: Image,
    rest: Mask,
}

/// The mean difference of two images within a mask, in 255ths.
fn mean_difference(a: &Image, b: &Image, mask: &Mask) -> f32 {
    let (mut sum, mut n) = (0u32, 0);
    for (x, y) in pixels(mask) {
        let (a, b) = (a.at(x, y), b.at(x, y));
        sum += (0..3).map(|c| (a[c] - b[c]).abs() as u32).sum::<u32>();
        n += 3;
    }
    assert!(n > 0, "nothing is left to compare");
    sum as f32 / n as f32
}

impl<'a> Task<'a> {
    pub fn new(edit: &'a Edit) -> Self {
        let (before, target) = (render(&edit.references[0]), render(&edit.target));
        let differ = |(a, b): (&[u8; 3], &[u8; 3])| (0..3).any(|c| a[c].abs_diff(b[c]) > 2);
        let changed = before.0.iter().zip(&target.0).map(differ).collect();
        // Pixels that differ, and some around them, may change; if the background changes, only the inside of objects remains.
        // The prompt leaves the exact place of a new object open, so its margin is wider.
        let rest = not(&grow(&changed, if edit.object.is_some() { 8 } else { 4 }));
        Self { edit, target, rest }
    }

    /// Judges a result. `trip` is the round trip of the target through the VAE. The rest is kept if its difference from the
    /// target is about that of the round trip, and every other object is still there.
    pub fn judge(&self, result: &Image, trip: &Image) -> EditVerdict {
        let edit = self.edit;
        let verdict = judge(result, &edit.target);
        let (made, found) = match (edit.kind.as_str(), edit.object) {
            ("remove", Some(i)) => {
                let gone = mask_of(&edit.references[0].objects[i]);
                let clean = share_of_background(result, &edit.target.background, |p| gone[p]);
                (clean.percent() >= 95.0, format!("{:.0} % of it is background", clean.percent()))
            }
            ("recolor" | "colorlike" | "reshape" | "add", Some(i)) => {
                let seen = &verdict.objects[i];
                (seen.color && seen.shape && seen.place, seen.found.clone())
            }
            ("background" | "combine", None) => {
                let there = verdict.objects.iter().all(|o| o.color && o.place);
                let objects = verdict.objects.iter().map(|o| o.found.as_str());
                let words: Vec<&str> = [verdict.found.as_str()].into_iter().chain(objects).collect();
                (verdict.background && there, words.join("; "))
            }
            (kind, object) => panic!("no edit `{kind}` of object {object:?}"),
        };
        let off = mean_difference(result, &self.target, &self.rest);
        let trip = mean_difference(trip, &self.target, &self.rest);
        // A small object can disappear and hardly change the mean.
        let mut others = verdict.objects.iter().enumerate().filter(|(i, _)| edit.kind == "remove" || Some(*i) != edit.object);
        let there = others.all(|(_, o)| o.color && o.place);
        EditVerdict { kind: edit.kind.clone(), made, kept: off <= trip + LEEWAY && there, off, trip, found }
    }
}
