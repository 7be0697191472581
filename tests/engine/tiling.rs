//! The VAE in tiles, on the CPU: its results, its memory, and the flag.

use common::sandbox::{Png, Sandbox};
use common::{cpu, tiling};
use kiln::internals::backend::{DryRun, GemmFormats};
use kiln::internals::checkpoint::Shard;
use kiln::internals::config::Configs;
use kiln::internals::model::{Loader, Vae};
use kiln::internals::sequence::Grid;
use kiln::internals::tensor::{Arena, DType, Precision, Region};

#[test]
fn tiles_equal_those_of_diffusers() {
    tiling::tiles_equal_those_of_diffusers(&|| Box::new(cpu()));
}

#[test]
fn small_images_have_no_tiles() {
    tiling::small_images_have_no_tiles(&|| Box::new(cpu()));
}

/// Bytes of working memory that klein's VAE needs for an image in addition to tokens and pixels: to decode and to encode.
fn working_bytes(side: usize, tiling: bool) -> [u64; 2] {
    let (mut plan, mut region, mut ignore) = (DryRun::new(GemmFormats::NONE), Arena::new(Region::Weights), |_| ());
    let mut loader = Loader::new(&mut plan, &mut region, None, Precision::Bf16, &mut ignore).shapes_only();
    let vae = Vae::load(&mut loader, &Configs::KLEIN_4B.vae, true).unwrap().with_tiling(tiling);
    let grid = Grid { width: side / 16, height: side / 16 };
    [false, true].map(|encode| {
        let mut ws = Arena::new(Region::Arena);
        let tokens = ws.alloc(grid.tokens(), 128, DType::F32).unwrap();
        let image = ws.alloc(side * side, 3, DType::F32).unwrap();
        let begin = ws.mark();
        match encode {
            true => vae.encode(&mut plan, &mut ws, tokens, image, grid).unwrap(),
            false => vae.decode(&mut plan, &mut ws, image, tokens, grid).unwrap(),
        }
        ws.peak() - begin
    })
}

/// With tiles an image takes as much memory as 1024x1024, plus its latents, a tile of the result, and the overlap.
#[test]
fn tiles_bound_the_working_memory() {
    let one = working_bytes(1024, false);
    assert_eq!(working_bytes(1024, true), one);
    for side in [2048, 4096] {
        let (tiled, whole) = (working_bytes(side, true), working_bytes(side, false));
        println!("{side}: {tiled:?} in tiles, {whole:?} without, {one:?} of 1024x1024");
        for (tiled, (whole, one)) in tiled.into_iter().zip(whole.into_iter().zip(one)) {
            assert!(whole > 3 * one && tiled < one + (72 << 20), "{side}: {tiled} {whole} {one}");
        }
    }
}

/// The flag tiles the decoder and, with references, the encoder. An image no larger than a tile does not change.
#[test]
fn the_flag_goes_for_images_and_references() {
    let sandbox = Sandbox::new();
    let stripes = |x: u32, y: u32| [(x / 5) as u8, 90, y as u8];
    sandbox.write_png("wide.png", 1040, 144, stripes);
    sandbox.write_png("small.png", 64, 80, stripes);
    let run = |out: &str, width: &str, reference: &str, flags: &[&str]| {
        let (png, dump) = (format!("{out}.png"), format!("{out}.safetensors"));
        let line = ["x", "--seed", "7", "--steps", "1", "--width", width, "--height", "64", "--reference", reference];
        sandbox.run([&line, &["-o", &png, "--dump", &dump][..], flags].concat()).good();
        let tensor = |name: &str| Shard::open(&sandbox.path(&dump)).unwrap().bytes(name).unwrap().to_vec();
        (Png::read(&sandbox.path(&png)), tensor("reference.1.tokens"), tensor("latents.1"), tensor("image"))
    };
    let whole = run("whole", "1040", "small.png", &[]);
    let tiled = run("tiled", "1040", "small.png", &["--vae-tiling"]);
    assert_eq!((&whole.1, &whole.2), (&tiled.1, &tiled.2), "the reference is small");
    assert_ne!(whole.3, tiled.3);
    assert_eq!((whole.0.text.get("vae-tiling"), tiled.0.text.get("vae-tiling").map(String::as_str)), (None, Some("on")));
    let tiled = run("reference", "64", "wide.png", &["--vae-tiling"]);
    assert_ne!(run("other", "64", "wide.png", &[]).1, tiled.1);
    // Both are tiled, and the plan is smaller.
    run("both", "1040", "wide.png", &["--vae-tiling"]);
    let plan = |flags: &[&str]| {
        let line = ["plan", "--json", "--model", "klein-4b", "--width", "2048", "--height", "2048"];
        sandbox.run([&line[..], flags].concat()).good().json()[0]["working_bytes"].as_u64().unwrap()
    };
    assert!(plan(&["--vae-tiling"]) < plan(&[]));
}
