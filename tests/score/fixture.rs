//! Checks of the fixture: prompts and edits are held out, and its renders equal the training's.

use crate::render::render;
use crate::wording::{EDITS, PROMPTS, fits};
use crate::world::{PALETTE, SHAPES, Scene, held_out_pair};
use crate::{fixture, moons, read_images, root};
use std::collections::BTreeSet;

const KINDS: [(&str, usize); 7] =
    [("recolor", 1), ("background", 1), ("remove", 1), ("reshape", 1), ("add", 1), ("combine", 2), ("colorlike", 2)];

#[test]
fn a_quarter_of_the_pairs_is_held_out() {
    let pairs = PALETTE.iter().flat_map(|(c, _)| SHAPES.map(|s| (*c, s)));
    let held: Vec<_> = pairs.filter(|(c, s)| held_out_pair(c, s)).collect();
    assert_eq!(held.len(), 24);
    assert!(held.contains(&("red", "circle")) && held.contains(&("blue", "star")) && !held.contains(&("red", "star")));
}

#[test]
fn prompts_are_held_out() {
    let prompts = fixture().prompts;
    for (objects, count) in [(1, 80), (2, 80), (3, 40)] {
        assert_eq!(prompts.iter().filter(|p| p.scene.objects.len() == objects).count(), count);
    }
    assert_eq!(prompts.len(), 200);
    let texts: BTreeSet<&str> = prompts.iter().map(|p| p.text.as_str()).collect();
    assert_eq!(texts.len(), prompts.len(), "a prompt is there twice");
    let mut used = BTreeSet::new();
    for p in &prompts {
        let template = PROMPTS.iter().find(|t| fits(t, &p.text)).unwrap_or_else(|| panic!("no held-out wording: {}", p.text));
        used.insert(template);
        let text = p.text.to_lowercase().replace("grey", "gray");
        let said = |words: &str| words.split(' ').all(|w| text.contains(w));
        let sizes = |size: &str| p.scene.objects.iter().filter(|o| o.size == size).count();
        let words = |words: [&str; 2]| text.split([' ', ',', ';', '.']).filter(|w| words.contains(w)).count();
        assert_eq!((sizes("small"), sizes("large")), (words(["small", "little"]), words(["large", "big"])), "{}", p.text);
        for o in &p.scene.objects {
            assert!(held_out_pair(&o.color, &o.shape), "{} {} is not held out: {}", o.color, o.shape, p.text);
            assert!(said(&o.color) && said(&o.shape), "{}", p.text);
            // The object is in this third of the image; a large one is moved inwards.
            let third = |c: f32| if c < 90.0 { 0 } else { 1 + usize::from(c > 166.0) };
            let column = ["left", "right"].iter().position(|side| o.place.contains(side)).map_or(1, |i| 2 * i);
            let row = ["top", "bottom"].iter().position(|side| o.place.contains(side)).map_or(1, |i| 2 * i);
            assert_eq!((third(o.cx), third(o.cy)), (column, row), "{}", p.text);
            assert_eq!((o.rot, o.tint), (0.0, 0.0), "{}", p.text);
        }
        assert!(said(&p.scene.background.color) && said(&p.scene.background.color2), "{}", p.text);
    }
    // Templates are drawn at random, so one may be missing. Another list would miss more.
    assert!(used.len() + 1 >= PROMPTS.len(), "wordings are never used");
}

#[test]
fn edits_are_held_out_and_change_one_thing() {
    let edits = fixture().edits;
    assert_eq!(edits.len(), 105);
    for (kind, references) in KINDS {
        let same: Vec<_> = edits.iter().filter(|e| e.kind == kind).collect();
        assert_eq!(same.len(), 15);
        for e in same {
            assert_eq!(e.references.len(), references);
            assert!(EDITS.iter().any(|(k, t)| *k == kind && fits(t, &e.text)), "no held-out wording: {}", e.text);
            let (before, after) = (&e.references[0], &e.target);
            let objects = |s: &Scene| -> Vec<String> { s.objects.iter().map(|o| format!("{o:?}")).collect() };
            let (before_objects, after_objects) = (objects(before), objects(after));
            let new = after_objects.iter().filter(|o| !before_objects.contains(o)).count();
            let gone = before_objects.iter().filter(|o| !after_objects.contains(o)).count();
            let moved = usize::from(before.background != after.background);
            let want = match kind {
                "remove" => (0, 1, 0),
                "add" => (1, 0, 0),
                "background" | "combine" => (0, 0, 1),
                _ => (1, 1, 0),
            };
            // The second reference may happen to have the background of the first.
            assert!((new, gone, moved) == want || (kind == "combine" && (new, gone) == (0, 0)), "{}", e.text);
            assert_eq!(e.object.is_some(), new + gone > 0);
        }
    }
    let used = EDITS.iter().filter(|(_, t)| edits.iter().any(|e| fits(t, &e.text))).count();
    assert!(used + 1 >= EDITS.len(), "wordings are never used");
}

/// The templates of training do not pass as held-out ones.
#[test]
fn wordings_of_training_do_not_fit() {
    for text in [
        "a red circle on the left on a blue background",
        "a red circle on the left on a background with vertical red and blue stripes",
        "a red circle on the left against a background fading from red at the top to blue at the bottom",
        "on a blue background, a red circle at the top and a green star at the bottom",
        "a red circle above a green star on a blue background",
        "a blue background and a red circle", // no place
        "draw a red circle on the left on a blue background",
    ] {
        assert!(!PROMPTS.iter().any(|t| fits(t, text)), "{text}");
    }
    assert!(PROMPTS.iter().any(|t| fits(t, "A blue background and a red circle on the left.")));
    for text in ["make the star red", "remove the star", "turn the star into a circle", "add a red circle on the left"] {
        assert!(!EDITS.iter().any(|(_, t)| fits(t, text)), "{text}");
    }
}

/// Compares this renderer with the renderer of training.
#[test]
fn renders_equal_those_of_training() {
    let read = |name: &str| read_images(&root().join("tests/fixtures/builtin").join(name));
    let (scenes, images) = ([fixture().renders, moons().renders].concat(), [read("renders.png"), read("moons.png")].concat());
    assert_eq!((scenes.len(), images.len()), (16, 16));
    for (i, (scene, wanted)) in scenes.iter().zip(&images).enumerate() {
        let got = render(scene);
        let off: Vec<u8> = got.bytes().iter().zip(wanted.bytes()).map(|(a, b)| a.abs_diff(b)).collect();
        let mean = off.iter().map(|d| f64::from(*d)).sum::<f64>() / off.len() as f64;
        let far = off.iter().filter(|d| **d > 3).count() as f64 / off.len() as f64;
        println!("render {i}: mean difference {mean:.4}, {far:.5} of the values further than 3 apart");
        assert!(mean <= 0.2 && far <= 0.001, "render {i}");
        // The control: a scene with one object moved by a pixel does not pass.
        let mut moved = scene.clone();
        moved.objects[0].cx += 1.0;
        let off = render(&moved).bytes().iter().zip(wanted.bytes()).filter(|(a, b)| a.abs_diff(*b) > 3).count();
        assert!(off as f64 / wanted.bytes().len() as f64 > 0.001, "render {i} moved");
    }
}
