//! Edits: forms and JSON make the images that flags of the command make.

use super::server::{data_url, generated, plain, small, small_parts};
use common::http::{Answer, Part, Request};
use common::sandbox::{Png, Sandbox};
use serde_json::{Value, json};
use std::fs;

const EDITS: &str = "/v1/images/edits";

/// Images to edit, and a mask that is transparent where an image is to change.
struct Files {
    sandbox: Sandbox,
    a: Vec<u8>,
    b: Vec<u8>,
    mask: Vec<u8>,
}

/// The box of the mask: its left, top, right and bottom.
const BOX: [u32; 4] = [16, 16, 48, 32];

impl Files {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        sandbox.write_png("a.png", 64, 64, |x, y| [(x * 3) as u8, (y * 2) as u8, (x * y) as u8]);
        sandbox.write_png("b.png", 80, 64, |x, y| [(y * 3) as u8, 90, (x + y) as u8]);
        let mut encoder = png::Encoder::new(fs::File::create(sandbox.path("mask.png")).unwrap(), 64, 64);
        encoder.set_color(png::ColorType::Rgba);
        let is_inside = |at: u32| (BOX[0]..BOX[2]).contains(&(at % 64)) && (BOX[1]..BOX[3]).contains(&(at / 64));
        let pixels: Vec<u8> = (0..64 * 64).flat_map(|at| [255, 255, 255, if is_inside(at) { 0 } else { 255 }]).collect();
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        let [a, b, mask] = ["a.png", "b.png", "mask.png"].map(|name| fs::read(sandbox.path(name)).unwrap());
        Self { sandbox, a, b, mask }
    }

    /// The image of the command with these flags.
    fn command(&self, flags: &str) -> Vec<u8> {
        let flags: Vec<&str> = flags.split(' ').chain(["-o", "out.png"]).collect();
        generated(&self.sandbox, &flags);
        fs::read(self.sandbox.path("out.png")).unwrap()
    }
}

fn edit_form(parts: &[Part<'_>]) -> Answer {
    plain().ask(&Request::form(EDITS, &small_parts(parts)))
}

fn edit_json(fields: &Value) -> Answer {
    let mut body = small(fields);
    body.as_object_mut().unwrap().remove("size");
    plain().ask(&Request::json(EDITS, &body))
}

#[test]
fn images_are_references() {
    let files = Files::new();
    let (a, b) = (&*files.a, &*files.b);
    let steps = Part::Text("steps", "1");
    let one = files.command("--reference a.png");
    let answer = edit_form(&[Part::File("image", a), steps]).good();
    assert!(answer.image(0) == one, "a file");
    assert_eq!(
        (&answer.json()["size"], &answer.json()["usage"]["input_tokens_details"]["image_tokens"]),
        (&json!("64x64"), &json!(16))
    );
    // Names and types of files mean nothing, and their order does.
    let two = files.command("--reference a.png --reference b.png");
    let mixed = [Part::Named("image[]", "../../etc/passwd.gif", a), steps, Part::File("image", b)];
    assert!(edit_form(&mixed[..2]).good().image(0) == one, "a list of one file");
    assert!(edit_form(&mixed).good().image(0) == two && two != one, "both names, in the order of the parts");
    assert!(edit_form(&[Part::File("image[]", a), Part::File("image[]", b), steps]).good().image(0) == two, "files");
    let [a, b] = [a, b].map(data_url);
    let pair = json!([{"image_url": &a}, {"image_url": {"url": &b}}]);
    assert!(edit_json(&json!({"images": [&a]})).good().image(0) == one, "a data URL");
    assert!(edit_json(&json!({"images": &pair})).good().image(0) == two, "data URLs");
    let generation = small(&json!({"images": [b, a], "size": "64x64"}));
    let swapped = files.command("--reference b.png --reference a.png --width 64 --height 64");
    assert!(plain().generate(&generation).good().image(0) == swapped && swapped != two, "a generation with references");
}

#[test]
fn a_mask_is_transparent_where_the_image_changes() {
    let files = Files::new();
    let (steps, mask) = (Part::Text("steps", "2"), Part::File("mask", &files.mask));
    let want = files.command("--init a.png --mask mask.png --init-reference on --steps 2");
    // The mask may come first.
    let answer = edit_form(&[mask, Part::File("image", &files.a), steps]).good();
    assert!(answer.image(0) == want, "a mask");
    let [before, after] = [&files.a, &answer.image(0)].map(|file| Png::decode(file).pixels);
    let changed = |left: u32, top: u32, right: u32, bottom: u32| {
        let of = |x: u32, y: u32| (3 * (64 * y + x)) as usize..(3 * (64 * y + x + 1)) as usize;
        (left..right)
            .flat_map(|x| (top..bottom).map(move |y| (x, y)))
            .filter(|&(x, y)| before[of(x, y)] != after[of(x, y)])
            .count()
    };
    assert!(changed(BOX[0], BOX[1], BOX[2], BOX[3]) > 400, "the box is repainted");
    assert_eq!(changed(0, 50, 64, 64), 0, "what is far from it stays");
    let want = files.command("--init a.png --mask mask.png --feather 0 --init-reference off --reference b.png --steps 2");
    let [image, other] = [&files.a, &files.b].map(|file| Part::File("image[]", file));
    let more = [Part::Text("feather", "0"), Part::Text("init_reference", "off")];
    assert!(edit_form(&[&[image, other, mask, steps], &more[..]].concat()).good().image(0) == want, "a mask with another image");
    let fields = json!({"images": [data_url(&files.a), data_url(&files.b)], "mask": {"image_url": data_url(&files.mask)}, "steps": 2, "feather": 0, "init_reference": "off"});
    assert!(edit_json(&fields).good().image(0) == want, "a mask in JSON");
    // A mask has the size of its image.
    let other = edit_form(&[Part::File("image", &files.b), mask]);
    assert_eq!((other.status, other.param().as_deref()), (400, Some("mask")), "{}", other.message());
    let sized = edit_form(&[image, mask, Part::Text("size", "96x96")]);
    assert_eq!((sized.status, sized.param().as_deref()), (400, Some("size")), "{}", sized.message());
    assert!(sized.message().contains("64x64"), "{}", sized.message());
}

#[test]
fn an_image_to_start_from() {
    let files = Files::new();
    let image = Part::File("image", &files.a);
    let strength = [image, Part::Text("strength", "0.5"), Part::Text("steps", "4")];
    assert!(edit_form(&strength).good().image(0) == files.command("--init a.png --strength 0.5 --steps 4"), "strength");
    let extend = [image, Part::Text("extend", "16"), Part::Text("steps", "1")];
    let answer = edit_form(&extend).good();
    assert!(answer.image(0) == files.command("--init a.png --extend 16"), "extend");
    assert_eq!(answer.json()["size"], "96x96");
    let init = json!({"init": data_url(&files.a), "images": [data_url(&files.b)], "strength": 0.75, "steps": 4});
    let want = files.command("--init a.png --reference b.png --strength 0.75 --steps 4");
    assert!(edit_json(&init).good().image(0) == want, "init with a reference");
    assert!(
        plain()
            .generate(&{
                let mut body = small(&init);
                body.as_object_mut().unwrap().remove("size");
                body
            })
            .good()
            .image(0)
            == want,
        "init in a generation"
    );
}

#[test]
fn edits_without_sense_name_their_field() {
    let files = Files::new();
    let image = || Part::File("image", &files.a);
    let cut = &files.a[..files.a.len() / 2];
    for (parts, param) in [
        (vec![], "image"),
        (vec![Part::File("mask", &files.mask)], "image"),
        (vec![Part::File("image", b"not an image")], "image[0]"),
        (vec![image(), Part::File("image", cut)], "image[1]"),
        (vec![Part::File("image[]", cut)], "image[0]"),
        (vec![image(), Part::File("mask", cut)], "mask"),
        (vec![image(), Part::File("mask", &files.mask), Part::File("mask", &files.mask)], "mask"),
        (vec![image(), Part::Text("strength", "2")], "strength"),
        (vec![image(), Part::Text("feather", "-1")], "feather"),
        (vec![image(), Part::Text("extend", "7000000000")], "extend"),
        (vec![image(), Part::Text("n", "0")], "n"),
        (vec![image(), Part::Text("stream", "yes")], "stream"),
        (vec![image(); 11], "image[10]"),
        (vec![image(), Part::Text("prompt", "twice")], "prompt"),
    ] {
        let answer = edit_form(&parts);
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some(param)), "{}", answer.text());
    }
    for image in [&json!(7), &json!("***"), &json!({"image_url": 7}), &json!([[data_url(&files.a)]])] {
        let answer = edit_json(&json!({"images": [image]}));
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some("images[0]")), "{image}: {}", answer.text());
    }
}
