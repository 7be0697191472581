//! What images say about how they were made.

use common::sandbox::{Png, Sandbox};
use common::sha256;
use serde_json::{Value, json};
use std::fs;

/// Every format stores the same metadata: as much as was asked for.
#[test]
fn images_say_how_they_were_made() {
    let sandbox = Sandbox::with_tiny();
    sandbox.write_png("reference.png", 64, 64, |x, y| [x as u8, y as u8, 9]);
    sandbox.write_png("init.png", 64, 64, |x, y| [y as u8, 3 * x as u8, 80]);
    let flags = ["--reference", "reference.png", "--init", "init.png", "--strength", "0.5", "--steps", "2", "--precision", "f32"];
    let made = |output: &str, more: &[&str]| {
        let prompt = "a sign, \"cold\"\nNegative prompt: none";
        sandbox.run([&[prompt, "--seed", "7", "-o", output], &flags[..], more].concat()).good();
        fs::read(sandbox.path(output)).unwrap()
    };
    made("a.png", &[]);
    let png = Png::read(&sandbox.path("a.png"));
    let json: Value = serde_json::from_str(&png.text["kiln"]).unwrap();
    assert_eq!((&json["seed"], &json["steps"], &json["size"]), (&json!(7), &json!(2), &json!([64, 64])));
    let digest = |name: &str| sha256::hex(&fs::read(sandbox.path(name)).unwrap());
    assert_eq!(json["references"], json!([digest("reference.png")]));
    assert_eq!((&json["init"]["sha256"], &json["init"]["strength"]), (&json!(digest("init.png")), &json!(0.5)));
    assert_eq!(png.text["reference-sha256"], digest("reference.png")[..16]);
    assert!(png.text["model-id"].starts_with("k1:") && png.text["model-id"].len() == 19, "{}", png.text["model-id"]);
    assert!(png.text["device"].starts_with("cpu "), "{}", png.text["device"]);
    let parameters = &png.text["parameters"];
    let size = parameters.lines().last().unwrap();
    assert!(size.starts_with("Steps: 2, Sampler: Euler, Seed: 7, Size: 64x64, Model: "), "{parameters}");

    // The text for galleries is Exif's user comment in the other formats, and everything else is XMP.
    let wide: Vec<u8> = parameters.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let has = |file: &[u8], bytes: &[u8]| file.windows(bytes.len()).any(|window| window == bytes);
    for name in ["a.jpg", "a.webp"] {
        let file = made(name, &[]);
        assert!(has(&file, &[b"UNICODE\0", &wide[..]].concat()), "{name}");
        assert!(has(&file, b"<kiln:kiln>{&quot;prompt&quot;:") && !has(&file, b"<kiln:parameters>"), "{name}");
        let stored = if name == "a.jpg" { &b"<kiln:quality>95</kiln:quality>"[..] } else { b"<kiln:device>cpu " };
        assert!(has(&file, stored), "{name}");
    }
    made("b.png", &["--metadata", "basic"]);
    let basic = Png::read(&sandbox.path("b.png"));
    assert_eq!(basic.pixels, png.pixels);
    for key in ["kiln", "parameters", "model-id", "device", "reference-sha256", "arithmetic"] {
        assert!(!basic.text.contains_key(key) && png.text.contains_key(key), "{key}");
    }
    assert_eq!((&*basic.text["prompt"], &*basic.text["references"]), (&*png.text["prompt"], "1"));
    for name in ["c.png", "c.jpg", "c.webp"] {
        let file = made(name, &["--metadata", "none"]);
        assert!(!has(&file, b"prompt") && !has(&file, b"a sign") && !has(&file, b"Exif"), "{name}");
    }
}

/// Which images are the same to the byte is promised by a number. Whoever changes the bytes raises it, and writes new hashes.
#[test]
fn the_arithmetic_has_a_number() {
    let sandbox = Sandbox::with_tiny();
    sandbox.write_png("init.png", 64, 64, |x, y| [4 * x as u8, 4 * y as u8, 99]);
    let mut pixels = Vec::new();
    let cases = [&["--precision", "f32"][..], &[], &["--reference", "init.png"], &["--init", "init.png", "--quantize", "fp8"]];
    for flags in cases {
        let usual = ["a fox", "--seed", "1", "--width", "64", "--height", "64", "--steps", "2", "--force", "-o", "out.png"];
        sandbox.run([&usual[..], flags].concat()).good();
        let png = Png::read(&sandbox.path("out.png"));
        pixels.extend(png.pixels);
    }
    let png = Png::read(&sandbox.path("out.png"));
    let found = format!("{} {} {}", png.text["arithmetic"], png.text["device"], &sha256::hex(&pixels)[..16]);
    // Other instruction sets sum in another order.
    if png.text["device"] == "cpu x86-64-v4" {
        assert_eq!(found, "1 cpu x86-64-v4 ca0d3616914c686c", "raise kiln::metadata::ARITHMETIC, and write the new hash here");
    }
}

/// On a cold disk, samples of the weights would be in the way of the loader, so they are read after it.
#[test]
fn weights_are_sampled_once_all_are_loaded() {
    let sandbox = Sandbox::new();
    for (name, flags) in [("a", &[][..]), ("b", &["--low-memory"]), ("c", &["--count", "2", "--metadata", "basic"])] {
        let (image, trace) = (format!("{name}.png"), format!("{name}.json"));
        sandbox.quick(&[&["x", "-o", &*image, "--trace", &*trace], flags].concat());
        let trace: Value = serde_json::from_slice(&fs::read(sandbox.path(&trace)).unwrap()).unwrap();
        let spans = |wanted: &str| -> Vec<(f64, f64)> {
            let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == wanted);
            events.map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())).collect()
        };
        let loaded = spans("loading weights").into_iter().map(|(start, duration)| start + duration).fold(0.0, f64::max);
        assert!(loaded > 0.0, "{trace}");
        match (&spans("identify the model")[..], name) {
            ([(start, _)], "a" | "b") => assert!(*start >= loaded, "{name}: {start} is before {loaded}"),
            ([], "c") => {}
            (other, _) => panic!("{name}: {other:?}"),
        }
    }
}
