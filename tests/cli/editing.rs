//! The real program with init images and masks: what is not repainted stays, and what was done is reported.

use common::sandbox::{Png, Sandbox};
use kiln::internals::checkpoint::Shard;
use serde_json::{Value, json};
use std::fs;

/// Colors that are different almost everywhere.
fn colorful(x: u32, y: u32) -> [u8; 3] {
    [x * 7 + y, x + y * 5, x * y].map(|value| (value % 251) as u8)
}

/// Writes an image of this size, and a mask with a white box.
fn write_files(sandbox: &Sandbox, (width, height): (u32, u32), [left, top, right, bottom]: [u32; 4]) {
    sandbox.write_png("init.png", width, height, colorful);
    let inside = move |x: u32, y: u32| (left..right).contains(&x) && (top..bottom).contains(&y);
    sandbox.write_png("mask.png", width, height, |x, y| [if inside(x, y) { 255 } else { 0 }; 3]);
}

/// The pixels that two images of a width have in common.
fn same_pixels(a: &[u8], b: &[u8]) -> Vec<bool> {
    a.chunks_exact(3).zip(b.chunks_exact(3)).map(|(a, b)| a == b).collect()
}

const EDIT: [&str; 11] = ["x", "--seed", "3", "--steps", "2", "--precision", "f32", "--init", "init.png", "--mask", "mask.png"];

/// Pixels farther from the mask than the feather reaches are the init image's, to the byte, and in the mask all is new.
#[test]
fn what_is_not_repainted_stays_to_the_byte() {
    let sandbox = Sandbox::new();
    let sizes = [((64, 64), [16, 16, 32, 48]), ((96, 80), [40, 0, 60, 20]), ((128, 64), [100, 30, 128, 64])];
    for (size, area) in sizes {
        write_files(&sandbox, size, area);
        for feather in [0_u32, 6] {
            let flags = ["--feather", &feather.to_string(), "-o", "out.png", "--force"];
            sandbox.run(EDIT.iter().chain(&flags)).good();
            let [init, out] = ["init.png", "out.png"].map(|name| Png::read(&sandbox.path(name)));
            assert_eq!((out.width, out.height), size);
            let [left, top, right, bottom] = area;
            let same = same_pixels(&init.pixels, &out.pixels);
            let near = |x: u32, y: u32| x + feather >= left && x < right + feather && y + feather >= top && y < bottom + feather;
            let far = (0..size.1).flat_map(|y| (0..size.0).map(move |x| (x, y))).zip(&same).filter(|((x, y), _)| !near(*x, *y));
            assert!(far.clone().count() > 500 && far.clone().all(|(_, same)| *same), "{size:?}, feather {feather}");
            let inside = |x: u32, y: u32| (left..right).contains(&x) && (top..bottom).contains(&y);
            let changed =
                (0..size.1).flat_map(|y| (0..size.0).map(move |x| (x, y))).zip(&same).filter(|((x, y), _)| inside(*x, *y));
            let (all, kept) = (changed.clone().count(), changed.filter(|(_, same)| **same).count());
            assert!(kept * 20 < all, "{kept} of {all} pixels did not change");
        }
    }
}

#[test]
fn a_crop_keeps_the_image_and_its_size() {
    let sandbox = Sandbox::new();
    // Neither side is a multiple of 16.
    write_files(&sandbox, (301, 211), [120, 90, 141, 117]);
    let flags = ["--mask-crop", "16", "--feather", "4", "-o", "out.png", "--json"];
    let run = sandbox.run(EDIT.iter().chain(&flags)).good();
    let [init, out] = ["init.png", "out.png"].map(|name| Png::read(&sandbox.path(name)));
    assert_eq!((out.width, out.height), (301, 211));
    let same = same_pixels(&init.pixels, &out.pixels);
    let changed: Vec<usize> = (0..same.len()).filter(|&at| !same[at]).collect();
    let near = |at: &usize| (116..145).contains(&(at % 301)) && (86..121).contains(&(at / 301));
    assert!(changed.iter().all(near) && changed.len() > 21 * 27 / 2, "{} pixels changed", changed.len());
    let answer = &run.json()[0];
    assert_eq!(answer["init"]["crop"], json!([100, 70, 61, 67]));
    assert_eq!((&answer["width"], &answer["height"]), (&json!(301), &json!(211)));
    assert_eq!(out.text["mask-crop"], "100,70,61,67");
    assert_eq!(out.text["size"], "301x211");
}

/// Transparency is a mask, white is a mask, and the formats of the files make no difference.
#[test]
fn masks_are_white_or_transparent() {
    let sandbox = Sandbox::new();
    write_files(&sandbox, (96, 64), [20, 10, 60, 50]);
    let run = |mask: &str, out: &str| {
        let mut flags = EDIT;
        flags[10] = mask;
        sandbox.run(flags.iter().chain(&["-o", out])).good();
        Png::read(&sandbox.path(out)).pixels
    };
    let white = run("mask.png", "white.png");
    // The init image's own file, transparent in the box.
    let mut encoder = png::Encoder::new(fs::File::create(sandbox.path("cut.png")).unwrap(), 96, 64);
    encoder.set_color(png::ColorType::Rgba);
    let pixel = |(x, y): (u32, u32)| {
        let [r, g, b] = colorful(x, y);
        [r, g, b, if (20..60).contains(&x) && (10..50).contains(&y) { 0 } else { 255 }]
    };
    let pixels: Vec<u8> = (0..64).flat_map(|y| (0..96).map(move |x| (x, y))).flat_map(pixel).collect();
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    assert_eq!(run("cut.png", "transparent.png"), white);
    // As the init image, its colors count and its transparency does not.
    let mut flags = EDIT;
    (flags[8], flags[10]) = ("cut.png", "cut.png");
    sandbox.run(flags.iter().chain(&["-o", "own.png"])).good();
    assert_eq!(Png::read(&sandbox.path("own.png")).pixels, white);
    // Turned by a quarter, with EXIF that turns it back.
    let mut encoder = png::Encoder::new(fs::File::create(sandbox.path("turned.png")).unwrap(), 64, 96);
    encoder.set_color(png::ColorType::Rgba);
    let turned: Vec<u8> = (0..96).flat_map(|y| (0..64).map(move |x| (y, 63 - x))).flat_map(pixel).collect();
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::eXIf, b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x08\0\0\0\0\0\0\0").unwrap();
    writer.write_image_data(&turned).unwrap();
    drop(writer);
    assert_eq!(run("turned.png", "turned-out.png"), white);
    // A gray PNG with one transparent shade, which is black.
    let mut encoder = png::Encoder::new(fs::File::create(sandbox.path("shade.png")).unwrap(), 96, 64);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_trns(vec![0, 9]);
    let shade: Vec<u8> =
        (0..64).flat_map(|y| (0..96).map(move |x| pixel((x, y))[3])).map(|a| if a == 0 { 9 } else { 200 }).collect();
    encoder.write_header().unwrap().write_image_data(&shade).unwrap();
    assert_eq!(run("shade.png", "shade-out.png"), white);
    // WebP, as kiln itself writes it.
    for name in ["init", "mask"] {
        let png = Png::read(&sandbox.path(&format!("{name}.png")));
        let image = kiln::image::Image { width: 96, height: 64, pixels: png.pixels };
        let bytes = image.encode(kiln::image::Format::WebP, &[], kiln::image::Threads::All).unwrap();
        fs::write(sandbox.path(&format!("{name}.webp")), bytes).unwrap();
    }
    let mut flags = EDIT;
    (flags[8], flags[10]) = ("init.webp", "mask.webp");
    sandbox.run(flags.iter().chain(&["-o", "webp.png"])).good();
    assert_eq!(Png::read(&sandbox.path("webp.png")).pixels, white);
}

#[test]
fn an_edit_is_reported() {
    let sandbox = Sandbox::new();
    write_files(&sandbox, (96, 64), [32, 16, 64, 48]);
    let flags = [
        "--strength",
        "0.75",
        "--steps",
        "4",
        "--feather",
        "0",
        "--init-reference",
        "on",
        "-o",
        "a.png",
        "--json",
        "--dump",
        "a.st",
    ];
    let line: Vec<&str> = EDIT.iter().filter(|word| !["--steps", "2"].contains(word)).chain(&flags).copied().collect();
    let run = sandbox.run(&line).good();
    let note = "mask: 17 % of the image, 4 of 24 tokens; strength 0.75: noise 0.955, 3 of 4 steps\n";
    assert!(run.stderr.contains(note), "{}", run.stderr);
    let answer = &run.json()[0];
    assert_eq!((&answer["steps"], &answer["steps_run"], &answer["strength"]), (&json!(4), &json!(3), &json!(0.75)));
    let init = &answer["init"];
    assert_eq!((&init["tokens_repainted"], &init["pixels_repainted"]), (&json!(4), &json!(32 * 32)));
    assert_eq!((&init["feather"], &init["crop"], &init["extend"]), (&json!(0), &Value::Null, &Value::Null));
    assert_eq!(init["reference"], json!(true));
    let digest = |name: &str| init[name].as_str().unwrap().to_owned();
    assert!(digest("sha256").len() == 64 && digest("mask_sha256").len() == 64 && digest("sha256") != digest("mask_sha256"));
    let png = Png::read(&sandbox.path("a.png"));
    assert_eq!(png.text["init-sha256"], digest("sha256")[..16]);
    assert_eq!(png.text["mask-sha256"], digest("mask_sha256")[..16]);
    assert_eq!((&*png.text["strength"], &*png.text["feather"], &*png.text["init-reference"]), ("0.75", "0", "on"));
    assert!(!png.text.contains_key("mask-crop") && !png.text.contains_key("extend"));
    let dump = Shard::open(&sandbox.path("a.st")).unwrap();
    for (name, shape) in
        [("init.tokens", &[24, 128][..]), ("mask.tokens", &[24]), ("latents.3", &[24, 128]), ("noise", &[24, 128])]
    {
        assert_eq!(dump.entry(name).unwrap().shape, shape, "{name}");
    }
    assert!(dump.entry("latents.4").is_none() && dump.entry("reference.1.tokens").is_some());
    assert_eq!(dump.bytes("mask.tokens").unwrap().iter().filter(|repainted| **repainted == 1).count(), 4);
    // A plan says the same without running.
    let words = [
        "plan",
        "--init",
        "init.png",
        "--mask",
        "mask.png",
        "--strength",
        "0.75",
        "--feather",
        "0",
        "--init-reference",
        "on",
        "--steps",
        "4",
    ];
    let plan = sandbox.run(words).good();
    assert!(plan.text().contains(&format!("init                 {note}")), "{}", plan.text());
    assert!(plan.text().contains("24 reference 1"), "{}", plan.text());
    let plan = &sandbox.run(words.iter().chain(&["--json"])).good().json()[0];
    assert_eq!((&plan["steps_run"], &plan["repainted"], plan["sigmas"].as_array().unwrap().len()), (&json!(3), &json!(4), 3));
    // An image without an edit says so.
    let plain = &sandbox.quick(&["x", "-o", "b.png", "--json"]).json()[0];
    assert_eq!((&plain["steps_run"], &plain["strength"], &plain["init"]), (&json!(1), &Value::Null, &Value::Null));
}

#[test]
fn a_frame_widens_the_image() {
    let sandbox = Sandbox::new();
    write_files(&sandbox, (64, 64), [0, 0, 1, 1]);
    let flags = [
        "x",
        "--seed",
        "1",
        "--steps",
        "1",
        "--precision",
        "f32",
        "--init",
        "init.png",
        "--extend",
        "left=32,bottom=16",
        "--feather",
        "0",
    ];
    let run = sandbox.run(flags.iter().chain(&["-o", "a.png", "--json"])).good();
    assert!(
        run.stderr.contains("mask: 47 % of the image, 14 of 30 tokens; strength 1: noise 1.000, 1 of 1 steps\n"),
        "{}",
        run.stderr
    );
    let [init, out] = ["init.png", "a.png"].map(|name| Png::read(&sandbox.path(name)));
    assert_eq!((out.width, out.height), (96, 80));
    for y in 0..64 {
        assert_eq!(out.pixels[3 * (96 * y + 32)..][..192], init.pixels[192 * y..][..192], "row {y}");
    }
    // The bare image is a reference unless that is turned off.
    assert_eq!(
        run.json()[0]["init"],
        json!({
            "sha256": run.json()[0]["init"]["sha256"], "mask_sha256": null, "tokens_repainted": 14, "pixels_repainted": 96 * 80 - 64 * 64,
            "feather": 0, "crop": null, "extend": [32, 0, 0, 16], "reference": true,
        })
    );
    sandbox.run(flags.iter().chain(&["--init-reference", "off", "-o", "b.png"])).good();
    assert_ne!(Png::read(&sandbox.path("b.png")).pixels, out.pixels);
}

#[test]
fn shapes_and_areas_give_sizes() {
    let sandbox = Sandbox::new();
    sandbox.write_png("wide.png", 128, 64, colorful);
    // The model's own size is 256x256.
    for (flags, size) in [
        (&["--aspect", "4:1"][..], (512, 128)),
        (&["--aspect", "1:2", "--width", "64"], (64, 128)),
        (&["--aspect", "3:2", "--height", "64"], (96, 64)),
        (&["--megapixels", "0.02"], (144, 144)),
        (&["--megapixels", "0.02", "--aspect", "2:1"], (208, 96)),
        (&["--megapixels", "0.0156", "--reference", "wide.png"], (176, 96)),
    ] {
        let words = ["plan", "--json"].iter().chain(flags);
        let plan = &sandbox.run(words).good().json()[0];
        assert_eq!((&plan["width"], &plan["height"]), (&json!(size.0), &json!(size.1)), "{flags:?}");
    }
}

/// A line has the fields, an object of sides is as good as a text, and the same edit gives the same bytes as `generate`.
#[test]
fn lines_of_a_run_are_edits() {
    let sandbox = Sandbox::new();
    write_files(&sandbox, (64, 64), [16, 16, 32, 48]);
    sandbox.write_png("other.png", 64, 64, |x, y| colorful(y, x));
    let edit = json!({"prompt": "x", "seed": 3, "init": "init.png", "mask": "mask.png", "feather": 4, "strength": 0.5});
    let extend = |sides: Value| json!({"prompt": "x", "seed": 3, "init": "init.png", "extend": sides, "init_reference": "off"});
    let with = |mut line: Value, name: &str, value: Value| {
        line[name] = value;
        line
    };
    let lines = [
        edit.clone(),
        with(edit.clone(), "output", json!("again.png")),
        with(edit.clone(), "init", json!("other.png")),
        with(edit.clone(), "strength", json!(1)),
        extend(json!("left=16,right=32")),
        with(extend(json!({"right": 32, "left": 16})), "output", json!("object.png")),
        extend(json!(16)),
        json!({"prompt": "x", "seed": 3, "init": "init.png", "mask": "mask.png", "mask_crop": 16}),
        json!({"prompt": "x", "aspect": "4:1", "megapixels": 0.0156}),
    ];
    fs::write(sandbox.path("lines"), lines.map(|line| line.to_string()).join("\n")).unwrap();
    let run = sandbox.run(["run", "lines", "--steps", "2", "--precision", "f32"]).good();
    let answers = run.json();
    let size = |at: usize| (answers[at]["width"].as_u64().unwrap(), answers[at]["height"].as_u64().unwrap());
    assert_eq!((size(0), size(4), size(6), size(8)), ((64, 64), (112, 64), (96, 96), (256, 64)));
    let pixels = |at: usize| Png::read(&sandbox.path(answers[at]["path"].as_str().unwrap())).pixels;
    assert_eq!(pixels(0), pixels(1));
    assert_eq!(pixels(4), pixels(5));
    assert!(pixels(0) != pixels(2) && pixels(0) != pixels(3));
    assert!(run.stderr.contains("line 1: mask: "), "{}", run.stderr);
    let flags = ["--feather", "4", "--strength", "0.5", "-o", "generated.png"];
    sandbox.run(EDIT.iter().chain(&flags)).good();
    assert_eq!(Png::read(&sandbox.path("generated.png")).pixels, pixels(0));
    // Flags fill in what a line leaves open, and a line with an init image of its own takes no mask of another one.
    let lines = [json!({"prompt": "y", "seed": 3}), json!({"prompt": "y", "seed": 4, "init": "other.png"})];
    fs::write(sandbox.path("lines"), lines.map(|line| line.to_string()).join("\n")).unwrap();
    let flags = ["--init", "init.png", "--mask", "mask.png", "--steps", "2", "--precision", "f32", "--strength", "0.5"];
    let answers = sandbox.run(["run", "lines"].iter().chain(&flags)).good().json();
    assert!(answers[0]["init"]["mask_sha256"].is_string() && answers[1]["init"]["mask_sha256"].is_null());
    assert_eq!(answers[1]["strength"], json!(0.5));
    // Names follow from the content of the files.
    let again = sandbox.run(["run", "lines", "--skip-existing"].iter().chain(&flags)).good().json();
    assert!(again.iter().all(|answer| answer["skipped"] == true), "{again:?}");
    sandbox.write_png("other.png", 64, 64, |x, y| colorful(x + 1, y));
    let again = sandbox.run(["run", "lines", "--skip-existing"].iter().chain(&flags)).good().json();
    assert!(again[0]["skipped"] == true && again[1]["skipped"] == Value::Null, "{again:?}");
}

/// No output replaces an image that is read.
#[test]
fn inputs_are_not_replaced() {
    let sandbox = Sandbox::new();
    write_files(&sandbox, (64, 64), [16, 16, 32, 48]);
    sandbox.write_png("reference.png", 64, 64, colorful);
    let before = ["init.png", "mask.png", "reference.png"].map(|name| fs::read(sandbox.path(name)).unwrap());
    for out in ["init.png", "mask.png", "reference.png"] {
        let run = sandbox.run(EDIT.iter().chain(&["--reference", "reference.png", "-o", out, "--force"]));
        assert!(run.code == Some(5) && run.stderr.contains("this is one of the files that are read"), "{}", run.stderr);
        let line = json!({"prompt": "x", "init": "init.png", "mask": "mask.png", "references": ["reference.png"], "output": out});
        fs::write(sandbox.path("lines"), line.to_string()).unwrap();
        let run = sandbox.run(["run", "lines", "--force", "--steps", "1", "--precision", "f32"]);
        assert!(run.code == Some(1) && run.text().contains("this is one of the files that are read"), "{}", run.text());
    }
    assert_eq!(["init.png", "mask.png", "reference.png"].map(|name| fs::read(sandbox.path(name)).unwrap()), before);
}
