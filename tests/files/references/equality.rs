//! Pixels equal the reference implementation's.

use super::{decode, fixture, fixtures};
use common::fnv::fnv1a;
use common::random::splitmix;
use kiln::image::Image;
use kiln::internals::checkpoint::Shard;
use kiln::internals::reference::{AREA_CAP, DecodedReference, resample};
use kiln::internals::sequence::Pixels;
use serde::Deserialize;

type Size = (usize, usize);

#[derive(Deserialize)]
struct Cases {
    lanczos: Vec<Resized>,
    prepared: Vec<Prepared>,
    images: Vec<Decoded>,
}

#[derive(Deserialize)]
struct Resized {
    seed: u64,
    from: Size,
    to: Size,
    pixels: String,
}

#[derive(Deserialize)]
struct Prepared {
    seed: u64,
    original: Size,
    resized: Option<Size>,
    size: Size,
    pixels: String,
    values: String,
}

#[derive(Deserialize)]
struct Decoded {
    file: String,
    size: Size,
    /// The hash of a PNG's pixels; a JPEG's pixels are stored whole.
    pixels: Option<String>,
}

fn cases() -> Cases {
    serde_json::from_str(&std::fs::read_to_string(fixtures().join("references.json")).unwrap()).unwrap()
}

fn tensors() -> Shard {
    Shard::open(&fixtures().join("references.safetensors")).unwrap()
}

/// The image that `tools/goldens/references.py` makes from this seed.
fn source(seed: u64, (width, height): Size) -> Image {
    let byte = |i| match (splitmix(seed, i) >> 56) as u8 {
        byte if seed.is_multiple_of(2) => byte,
        byte => (byte >> 7) * 255,
    };
    Image { width, height, pixels: (0..(width * height * 3) as u64).map(byte).collect() }
}

fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    format!("{:016x}", fnv1a(bytes))
}

#[test]
fn lanczos_equals_pillow_in_every_bit() {
    let (cases, tensors) = (cases().lanczos, tensors());
    assert_eq!(cases.len(), 50);
    for case in cases {
        let out = resample::resize::<3>(&source(case.seed, case.from).pixels, case.from, case.to, resample::Filter::Lanczos);
        // Some results are stored whole, so that differences can be examined.
        if let Some(want) = tensors.bytes(&format!("lanczos.{}", case.seed)) {
            assert_eq!(out[..], want[..], "{:?} to {:?}", case.from, case.to);
        }
        assert_eq!(fnv(out), case.pixels, "{:?} to {:?}", case.from, case.to);
    }
}

#[test]
fn preparing_equals_the_pipeline_in_every_bit() {
    for case in cases().prepared {
        let png = source(case.seed, case.original).encode_png(&[]).unwrap();
        let prepared = decode(&png).unwrap().prepare(AREA_CAP);
        assert_eq!((prepared.original, prepared.resized), (case.original, case.resized));
        assert_eq!((prepared.width, prepared.height), case.size);
        // The prepared size is valid for the model.
        Pixels::new(prepared.width, prepared.height).unwrap();
        assert_eq!(fnv(prepared.values().into_iter().flat_map(f32::to_le_bytes)), case.values, "{:?}", case.original);
        assert_eq!(fnv(prepared.pixels), case.pixels, "{:?}", case.original);
    }
}

#[test]
fn the_sizes_of_the_specification() {
    // The first is under the cap and keeps its size.
    for (original, resized, size, tokens) in
        [((605, 807), None, (592, 800), 1850), ((1500, 1000), Some((1254, 836)), (1248, 832), 4056)]
    {
        let png = Image { width: original.0, height: original.1, pixels: vec![7; original.0 * original.1 * 3] };
        let prepared = decode(&png.encode_png(&[]).unwrap()).unwrap().prepare(AREA_CAP);
        assert_eq!((prepared.original, prepared.resized, (prepared.width, prepared.height)), (original, resized, size));
        assert_eq!(Pixels::new(size.0, size.1).unwrap().grid().tokens(), tokens);
        assert!(prepared.pixels.iter().all(|&v| v == 7));
    }
}

#[test]
fn files_of_every_kind_decode_as_in_pillow() {
    let (cases, tensors) = (cases().images, tensors());
    assert!(cases.len() >= 40, "{}", cases.len());
    for Decoded { file, size, pixels } in cases {
        let got =
            DecodedReference::open(&fixtures().join("references").join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let got = got.image();
        assert_eq!((got.width, got.height), size, "{file}");
        if let Some(want) = pixels {
            assert_eq!(fnv(got.pixels.iter().copied()), want, "{file}");
            continue;
        }
        let want = tensors.bytes(&format!("image.{file}")).unwrap();
        // Grayscale images are stored with one channel.
        let repeat = got.pixels.len() / want.len();
        let different = got.pixels.iter().enumerate().position(|(i, &v)| v != want[i / repeat]);
        assert_eq!(different, None, "{file}");
    }
}

#[test]
fn the_name_of_a_file_does_not_matter_and_its_end_may_be_followed() {
    for name in ["rgb.png", "baseline_420.jpg", "lossless.webp", "lossy_alpha.webp"] {
        let bytes = fixture(name);
        let plain = decode(&bytes).unwrap();
        let longer = decode(&[&bytes[..], b"something after the end mark \xFF\xD9"].concat()).unwrap();
        assert!(longer.image() == plain.image(), "{name}");
    }
}
