//! Generates images through the library.

use crate::render::Image;
use crate::world::SIDE;
use kiln::backend::Backend;
use kiln::backend::cpu::Cpu;
use kiln::backend::cuda::Cuda;
use kiln::config::Variant;
use kiln::locate::{LocateRequest, locate};
use kiln::noise::NoiseKind;
use kiln::pipeline::{Engine, Job, LoadOptions, Noise, OpenModel, ReferenceInput};
use kiln::progress::Silent;
use kiln::sequence::Pixels;
use kiln::tensor::Precision;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const STEPS: usize = 4;

/// The repository: where this was built, or, on another machine, where it is run from.
pub fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    if built.is_dir() { built.into() } else { ".".into() }
}

/// A model ready to draw.
pub struct Model {
    engine: Engine,
    /// Name, precision and variant, for display.
    pub what: String,
}

impl Model {
    /// Opens a folder, or the tiny model by its name. `KILN_SCORE_DEVICE=cuda` runs it on a GPU in bf16, else it runs on the CPU
    /// in f32; `KILN_SCORE_VARIANT=kv` keeps the keys and values of references.
    pub fn open(folder: &Path) -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        let stop = Arc::new(AtomicBool::new(false));
        let (backend, precision): (Box<dyn Backend>, _) = match variable("KILN_SCORE_DEVICE").as_deref() {
            Some("cuda") => (Box::new(Cuda::open(0, stop).unwrap()), Precision::Bf16),
            None | Some("cpu") => (Box::new(Cpu::new(0, stop).unwrap()), Precision::F32),
            Some(other) => panic!("KILN_SCORE_DEVICE is cpu or cuda, not {other}"),
        };
        let variant = match variable("KILN_SCORE_VARIANT").as_deref() {
            None => None,
            Some("kv") => Some(Variant::Kv),
            Some(other) => panic!("KILN_SCORE_VARIANT is kv or not there, not {other}"),
        };
        let found = locate(&LocateRequest { model: Some(folder.into()), ..LocateRequest::default() }).unwrap();
        let model = OpenModel::open(&found, variant).unwrap();
        let options = LoadOptions { precision, references: true, low_memory: false };
        let engine = Engine::load(backend, model, options, &Silent).unwrap();
        let what = format!("{}, {}, {:?}", engine.name(), precision.name(), engine.variant());
        Self { engine, what }
    }

    /// The image of a prompt, with references or without.
    pub fn draw(&mut self, prompt: &str, references: &[Image], seed: u64) -> Image {
        self.run(prompt, references, seed, STEPS, Noise::Drawn(NoiseKind::HOPPER)).0
    }

    /// An image after a round trip through the VAE. A run of zero steps encodes its references and decodes its noise, which here
    /// is the encoded image.
    pub fn round_trip(&mut self, image: &Image) -> Image {
        let noise = Noise::Drawn(NoiseKind::HOPPER);
        let tokens = self.run("", std::slice::from_ref(image), 0, 0, noise).1.remove(0);
        self.run("", &[], 0, 0, Noise::Given(tokens)).0
    }

    /// The image, and the tokens of the references.
    fn run(&mut self, prompt: &str, references: &[Image], seed: u64, steps: usize, noise: Noise) -> (Image, Vec<Vec<f32>>) {
        let size = Pixels::new(SIDE, SIDE).unwrap();
        let values = |p: &Image| p.bytes().iter().map(|v| f32::from(*v) / 127.5 - 1.0).collect();
        let job = Job {
            prompt: prompt.into(),
            size,
            steps,
            negative: String::new(),
            references: references.iter().map(|p| ReferenceInput { grid: size.grid(), pixels: values(p) }).collect(),
            guidance: 1.0,
            seeds: vec![seed],
            noise,
            record: true,
        };
        let mut made = None;
        let mut keep = |output: kiln::pipeline::GeneratedImage| {
            made = Some((Image::from_bytes(&output.image.pixels), output.record.unwrap().references));
            Ok(())
        };
        self.engine.generate(&job, &Silent, &mut keep).unwrap();
        made.unwrap()
    }
}
