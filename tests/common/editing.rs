//! Init images and masks, on any backend, against outputs recorded from diffusers.

use super::modes::{hashed, test_image};
use super::{Goldens, Make, dev, fixture, opened, relative_l2, run, small_job, tiny_weights, unit_image};
use kiln::edit::Strength;
use kiln::internals::backend::Backend;
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::dump::Record;
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, Job, LoadOptions, Start};
use kiln::internals::sequence::Pixels;
use kiln::internals::tensor::{DType, Precision};
use kiln::internals::tiny;
use kiln::progress::Silent;
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
pub struct Editing {
    pub cases: Vec<Case>,
    pub schedules: Vec<Recorded>,
    pub resized: Vec<Resized>,
    pub composites: Vec<Composite>,
}

/// The noise levels of a whole run.
#[derive(serde::Deserialize)]
pub struct Recorded {
    pub steps: usize,
    pub tokens: usize,
    pub sigmas: Vec<f64>,
}

/// Digests of resized images.
#[derive(serde::Deserialize)]
pub struct Resized {
    pub old: (usize, usize),
    pub new: (usize, usize),
    pub gray: String,
    pub rgb: String,
}

/// The digest of an image laid over another.
#[derive(serde::Deserialize)]
pub struct Composite {
    pub width: usize,
    pub height: usize,
    pub fnv1a: String,
}

#[derive(serde::Deserialize)]
pub struct Case {
    pub name: String,
    kind: String,
    prompt: String,
    width: usize,
    height: usize,
    steps: usize,
    strength: f64,
    seed: u64,
    guidance: f32,
    /// The index of the init image.
    image: usize,
    distilled: bool,
    /// The index and the size of another reference.
    reference: Option<(usize, usize, usize)>,
    is_reference: bool,
    bf16_relative_l2: BTreeMap<String, f64>,
    bf16_exact_time_relative_l2: BTreeMap<String, f64>,
}

pub fn editing() -> Editing {
    serde_json::from_str(&std::fs::read_to_string(fixture("editing.json")).unwrap()).unwrap()
}

impl Case {
    /// Whether each token keeps the init image.
    pub fn keep(&self, goldens: &Goldens) -> Vec<bool> {
        let tokens = self.width / 16 * (self.height / 16);
        let keep: Vec<bool> =
            (0..tokens).map(|i| self.kind != "img2img" && hashed(&format!("mask.{}", self.name), i) >= 128).collect();
        let recorded: Vec<bool> = goldens.bytes(&format!("{}.mask", self.name)).iter().map(|repainted| *repainted == 0).collect();
        assert_eq!(keep, recorded, "{}", self.name);
        keep
    }

    pub fn job(&self, goldens: &Goldens) -> Job {
        let start = Start {
            init: test_image(self.image, self.width, self.height),
            strength: Strength::new(self.strength).unwrap(),
            keep: Some(self.keep(goldens)),
            is_reference: self.is_reference,
            paste: None,
        };
        let dev = self.kind == "dev";
        Job {
            prompt: self.prompt.clone(),
            size: Pixels::new(self.width, self.height).unwrap(),
            steps: self.steps,
            start: Some(start),
            references: self.reference.iter().map(|&(index, width, height)| test_image(index, width, height)).collect(),
            guidance: self.guidance,
            seeds: vec![self.seed],
            record: true,
            padding: if dev { Variant::Dev.spec().padding } else { small_job().padding },
            ..small_job()
        }
    }

    pub fn engine(&self, backend: Box<dyn Backend>, precision: Precision) -> Engine {
        let klein = |variant| {
            let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
            opened(tiny_weights(&model), variant, ModelDefaults::klein())
        };
        let model = match (self.kind.as_str(), self.distilled) {
            ("dev", _) => dev::model(),
            ("kv", _) => klein(Variant::Kv),
            (_, true) => klein(Variant::Distilled),
            (_, false) => klein(Variant::Base),
        };
        Engine::load(backend, model, LoadOptions { precision, references: true, ..LoadOptions::DEFAULT }, &Silent).unwrap()
    }

    /// The relative error of every recorded tensor.
    pub fn errors(&self, record: &Record, goldens: &Goldens) -> BTreeMap<String, f64> {
        let mut errors = BTreeMap::new();
        let golden = |name: &str| goldens.f32(&format!("{}.{name}", self.name));
        let mut compare = |name: &str, got: &[f32], want: &[f32]| {
            errors.insert(name.to_owned(), relative_l2(got, want));
        };
        // These cases have the image of another one.
        let of = if matches!(self.kind.as_str(), "img2img" | "kv") { "inpaint" } else { &self.name };
        compare("init", record.init.as_ref().unwrap(), &goldens.f32(&format!("{of}.init")));
        if self.strength < 1.0 {
            compare("start", &record.latents[0], &golden("start"));
        } else {
            assert_eq!(record.latents[0], record.noise, "{}: pure noise has nothing of the init image", self.name);
        }
        let steps = record.latents.len() - 1;
        (1..=steps).for_each(|i| compare(&format!("latents.{i}"), &record.latents[i], &golden(&format!("latents.{i}"))));
        compare("image", &unit_image(&record.image), &goldens.image(&format!("{}.image", self.name)));
        errors
    }
}

/// Compares every edit in one precision; `allowed` is the error limit of a tensor.
fn compare(make: Make<'_>, precision: Precision, allowed: impl Fn(&Case, &str) -> f64) {
    let (editing, goldens) = (editing(), Goldens::named("editing.safetensors"));
    for case in &editing.cases {
        let record = run(&mut case.engine(make(), precision), &case.job(&goldens)).unwrap().record.unwrap();
        let errors = case.errors(&record, &goldens);
        assert!(case.bf16_relative_l2.keys().all(|name| errors.contains_key(name) || name == "start"), "{errors:?}");
        for (name, error) in errors {
            let allowed = allowed(case, &name);
            println!("{} {} {name}: {error:.2e}, allowed {allowed:.2e}", case.name, precision.name());
            assert!(error <= allowed, "{}: {name} differs by {error:.2e}, allowed {allowed:.2e}", case.name);
        }
        // What is kept is the init image, whatever happened in between.
        let (init, last) = (record.init.unwrap(), record.latents.last().unwrap());
        for (token, _) in case.keep(&goldens).iter().enumerate().filter(|(_, keep)| **keep) {
            assert_eq!(init[128 * token..][..128], last[128 * token..][..128], "{}: token {token}", case.name);
        }
    }
}

/// Checks every edit in f32 against the reference in f32.
pub fn every_edit_equals_diffusers(make: Make<'_>) {
    compare(make, Precision::F32, |_, _| 3e-5);
}

/// Checks every edit in bf16, with the limit of `goldens.rs`.
pub fn every_edit_in_bf16_is_as_close_as_diffusers_in_bf16(make: Make<'_>) {
    compare(make, Precision::Bf16, |case, name| 1.2 * case.bf16_exact_time_relative_l2[name].min(case.bf16_relative_l2[name]));
}
