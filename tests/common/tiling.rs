//! The tiled VAE, on any backend, against outputs recorded from diffusers.

use super::modes::hashed;
use super::{Goldens, Make, fixture, relative_l2};
use kiln::internals::backend::{Backend, DryRun};
use kiln::internals::checkpoint::Weights;
use kiln::internals::component::Component;
use kiln::internals::config::{Configs, VaeConfig};
use kiln::internals::model::{Loader, Vae, vae_manifest};
use kiln::internals::sequence::Grid;
use kiln::internals::tensor::{Arena, DType, Precision, Region, Tensor};
use kiln::internals::tiny;
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
struct Tiling {
    tile: usize,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    width: usize,
    height: usize,
    bf16_relative_l2: BTreeMap<String, f64>,
}

impl Case {
    fn grid(&self) -> Grid {
        Grid { width: self.width / 16, height: self.height / 16 }
    }

    /// The tokens to decode.
    fn tokens(&self) -> Vec<f32> {
        let name = format!("{}.tokens", self.name);
        (0..self.grid().tokens() * 128).map(|i| (2.0 * f32::from(hashed(&name, i)) - 255.0) / 128.0).collect()
    }

    /// The image to encode: blocks of 8x8 pixels of one color each.
    fn pixels(&self) -> Vec<f32> {
        let name = format!("{}.image", self.name);
        let pixel = |y: usize, x: usize, c: usize| hashed(&name, ((y / 8) * (self.width / 8) + x / 8) * 3 + c);
        let places = (0..self.height).flat_map(|y| (0..self.width).flat_map(move |x| (0..3).map(move |c| (y, x, c))));
        places.map(|(y, x, c)| 2.0 * (f32::from(pixel(y, x, c)) / 255.0) - 1.0).collect()
    }
}

/// A VAE on a backend.
pub struct OnBackend {
    backend: Box<dyn Backend>,
    vae: Vae,
}

/// A direction of the VAE, with its input.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    Decode(&'a [f32]),
    Encode(&'a [f32]),
}

impl OnBackend {
    pub fn new(mut backend: Box<dyn Backend>, weights: &Weights, config: &VaeConfig, precision: Precision, tiling: bool) -> Self {
        let mut region = Arena::new(Region::Weights);
        backend.reserve(Region::Weights, 16 << 20).unwrap();
        let mut ignore = |_| ();
        let mut loader = Loader::new(backend.as_mut(), &mut region, Some(weights), precision, &mut ignore);
        let vae = Vae::load(&mut loader, config, true).unwrap().with_tiling(tiling);
        Self { backend, vae }
    }

    fn issue(vae: &Vae, be: &mut dyn Backend, work: Work<'_>, grid: Grid) -> (Tensor, u64) {
        let mut ws = Arena::new(Region::Arena);
        let tokens = ws.alloc(grid.tokens(), 128, DType::F32).unwrap();
        let image = ws.alloc(256 * grid.tokens(), 3, DType::F32).unwrap();
        let out = match work {
            Work::Decode(values) => {
                be.write(tokens, values).unwrap();
                vae.decode(be, &mut ws, image, tokens, grid).unwrap();
                image
            }
            Work::Encode(values) => {
                be.write(image, values).unwrap();
                vae.encode(be, &mut ws, tokens, image, grid).unwrap();
                tokens
            }
        };
        (out, ws.peak())
    }

    /// Runs the VAE. Returns the result and the bytes of working memory.
    pub fn run(&mut self, work: Work<'_>, grid: Grid) -> (Vec<f32>, u64) {
        let (_, bytes) = Self::issue(&self.vae, &mut DryRun::new(self.backend.gemm_formats()), work, grid);
        self.backend.reserve(Region::Arena, bytes).unwrap();
        let (out, peak) = Self::issue(&self.vae, self.backend.as_mut(), work, grid);
        assert_eq!(peak, bytes, "a dry run needs as much");
        let mut values = vec![0.0; out.len()];
        self.backend.read(out, &mut values).unwrap();
        (values, bytes)
    }
}

fn tiny_weights() -> Weights {
    tiny::weights_of(Component::Vae, &vae_manifest(&Configs::TINY.vae), DType::Bf16).unwrap()
}

/// Checks tiles against the reference: equal in f32; in bf16 at most 1.2 times as far off as the reference in bf16.
pub fn tiles_equal_those_of_diffusers(make: Make<'_>) {
    let recorded: Tiling = serde_json::from_str(&std::fs::read_to_string(fixture("tiling.json")).unwrap()).unwrap();
    let (goldens, weights) = (Goldens::named("tiling.safetensors"), tiny_weights());
    let config = VaeConfig { tile: recorded.tile, ..Configs::TINY.vae };
    for precision in [Precision::F32, Precision::Bf16] {
        let mut vae = OnBackend::new(make(), &weights, &config, precision, true);
        for case in &recorded.cases {
            let (image, _) = vae.run(Work::Decode(&case.tokens()), case.grid());
            let image: Vec<f32> = image.iter().map(|v| (0.5 * v + 0.5).clamp(0.0, 1.0)).collect();
            let (tokens, _) = vae.run(Work::Encode(&case.pixels()), case.grid());
            let want = goldens.image(&format!("{}.image", case.name));
            let worst = image.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let errors = [
                ("image", relative_l2(&image, &want)),
                ("tokens", relative_l2(&tokens, &goldens.f32(&format!("{}.tokens", case.name)))),
            ];
            for (name, error) in errors {
                let allowed = match precision {
                    Precision::F32 => 1e-4,
                    Precision::Bf16 => 1.2 * case.bf16_relative_l2[name],
                };
                println!("{} {} {name}: {error:.2e}, allowed {allowed:.2e}", case.name, precision.name());
                assert!(error <= allowed, "{}: {name} differs by {error:.2e}, allowed {allowed:.2e}", case.name);
            }
            assert!(precision == Precision::Bf16 || worst <= 1.0 / 255.0, "{}: a pixel differs by {worst}", case.name);
        }
    }
}

/// An image with no side longer than a tile has no tiles: it is the same with and without tiling, to the bit. A larger image is not.
pub fn small_images_have_no_tiles(make: Make<'_>) {
    let (weights, config) = (tiny_weights(), VaeConfig { tile: 96, ..Configs::TINY.vae });
    let values = |count: usize| -> Vec<f32> { (0..count).map(|i| f32::from(hashed("small", i)) / 128.0 - 1.0).collect() };
    let run = |tiling, grid: Grid| {
        let mut vae = OnBackend::new(make(), &weights, &config, Precision::Bf16, tiling);
        let (tokens, pixels) = (values(128 * grid.tokens()), values(768 * grid.tokens()));
        [Work::Decode(&tokens), Work::Encode(&pixels)].map(|work| vae.run(work, grid).0)
    };
    let (small, wide) = (Grid { width: 6, height: 5 }, Grid { width: 7, height: 5 });
    assert!(run(true, small) == run(false, small));
    assert!(run(true, wide).iter().zip(&run(false, wide)).all(|(a, b)| a != b));
}
