//! Masked edits of the built-in model: the prompt describes the whole scene, and the mask gets the new object.

use crate::engine::Model;
use crate::judge::judge;
use crate::render::{Image, render};
use crate::world::{Background, Object, SIDE, Scene};
use common::random::long;
use kiln::edit::{Edit, EditOptions, Mask};
use kiln::image;
use kiln::internals::config::ModelDefaults;
use kiln::internals::reference::DecodedReference;
use kiln::internals::tensor::Precision;
use std::path::Path;

const PROMPT: &str = "a small purple ring at the top left and a large red star at the bottom right on a plain yellow background";

/// The box of the mask: left, top, right, bottom.
const BOX: [usize; 4] = [16, 16, 104, 104];

fn object(shape: &str, color: &str, size: &str, place: &str, at: f32, r: f32) -> Object {
    let [shape, color, size, place] = [shape, color, size, place].map(String::from);
    Object { shape, color, size, place, cx: at, cy: at, r, rot: 0.0, tint: 0.0 }
}

/// The scene after the edit. Before it, the first object is missing.
fn scene() -> Scene {
    let background =
        Background { kind: "plain".into(), color: "yellow".into(), color2: String::new(), direction: "vertical".into() };
    let objects = vec![
        object("ring", "purple", "small", "top left", 58.0, 28.0),
        object("star", "red", "large", "bottom right", 198.0, 48.0),
    ];
    Scene { background, objects }
}

fn png(pixel: impl Fn(usize, usize) -> [u8; 3]) -> Vec<u8> {
    let pixels = (0..SIDE * SIDE).flat_map(|i| pixel(i % SIDE, i / SIDE)).collect();
    image::Image { width: SIDE, height: SIDE, pixels }.encode_png(&[]).unwrap()
}

/// With every seed the ring appears, nothing else changes, and what is not repainted is the init image to the byte.
#[test]
fn a_mask_gets_what_the_prompt_adds() {
    let scene = scene();
    let init = render(&Scene { objects: scene.objects[1..].to_vec(), ..scene.clone() });
    let [left, top, right, bottom] = BOX;
    let white = |x: usize, y: usize| (left..right).contains(&x) && (top..bottom).contains(&y);
    let mask = Mask::from_bytes(&png(|x, y| [if white(x, y) { 255 } else { 0 }; 3]), Path::new("mask")).unwrap();
    let decoded = DecodedReference::from_bytes(&png(|x, y| init.0[y * SIDE + x]), Path::new("init")).unwrap();
    let options = EditOptions { feather: Some(8), ..EditOptions::default() };
    let edit = Edit::new(decoded, Some(mask), &options, &ModelDefaults::klein()).unwrap();
    let mut model = Model::open(&crate::engine::model_folder(), Precision::Bf16);
    let (seeds, least) = if long() { (24, 22) } else { (4, 3) };
    let mut made = 0;
    for seed in 0..seeds {
        let out: Image = model.edit(PROMPT, edit.start.clone(), seed);
        let far = |i: &usize| {
            let (x, y) = (i % SIDE, i / SIDE);
            x + 8 < left || x >= right + 8 || y + 8 < top || y >= bottom + 8
        };
        assert!((0..SIDE * SIDE).filter(far).all(|i| out.0[i] == init.0[i]), "seed {seed}: a pixel far from the mask changed");
        let verdict = judge(&out, &scene);
        let is_made = verdict.background && verdict.objects.iter().all(|seen| seen.color && seen.shape && seen.place);
        println!("seed {seed}: {is_made} {}; {}", verdict.objects[0].found, verdict.found);
        made += usize::from(is_made);
    }
    println!("{made} of {seeds} edits made");
    assert!(made >= least, "{made} of {seeds} edits made");
}
