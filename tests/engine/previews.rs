//! Previews of images while they are denoised, against plain definitions, on the CPU.

use common::random::long;
use common::wrapped::{self, Wrapped};
use common::{cpu, engine_on, opened, run, small_job, tiny_weights};
use kiln::error::Result;
use kiln::image::Image;
use kiln::internals::backend::OpKind;
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::dump::Record;
use kiln::internals::names::Layout;
use kiln::internals::pipeline::{Engine, GeneratedImage, Job, LoadOptions, OpenModel, ReferenceInput, Start};
use kiln::internals::sampler::Schedule;
use kiln::internals::sequence::{Grid, Pixels};
use kiln::internals::tensor::{DType, Precision};
use kiln::internals::tiny;
use kiln::locate::{LocateRequest, locate};
use kiln::progress::{Phase, PreviewKind, Progress, Silent};
use kiln::service::Service;
use kiln::{PreviewTable, Sigmas};
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const STEPS: usize = 4;
/// Longer than the time in which a step has no preview after the last one.
const LONG: Duration = Duration::from_millis(205);

/// Looks at previews. If `pause` is not zero, every step takes at least that long.
pub struct Viewer {
    kind: Option<PreviewKind>,
    pause: Duration,
    /// The steps to look at, however soon they come. Without it the pace decides.
    chosen: Option<Vec<usize>>,
    phase: Mutex<Option<Phase>>,
    /// Steps of the image that have ended.
    done: Mutex<u64>,
    seen: Mutex<Vec<(usize, Image, Instant)>>,
}

impl Viewer {
    pub fn new(kind: Option<PreviewKind>, pause: Duration) -> Self {
        Self { kind, pause, chosen: None, phase: Mutex::default(), done: Mutex::default(), seen: Mutex::default() }
    }

    pub fn images(self) -> Vec<(usize, Image)> {
        self.seen.into_inner().unwrap().into_iter().map(|(step, image, _)| (step, image)).collect()
    }
}

impl Progress for Viewer {
    fn begin(&self, phase: Phase, _total: u64) {
        *self.phase.lock().unwrap() = Some(phase);
        if phase == Phase::Denoise {
            *self.done.lock().unwrap() = 0;
        }
    }

    fn advance(&self, amount: u64) {
        if *self.phase.lock().unwrap() == Some(Phase::Denoise) {
            *self.done.lock().unwrap() += amount;
            std::thread::sleep(self.pause);
        }
    }

    fn wants_preview(&self) -> Option<PreviewKind> {
        self.kind
    }

    fn wants_preview_of(&self, step: usize, steps: usize) -> Option<bool> {
        assert!((1..=steps).contains(&step));
        self.chosen.as_ref().map(|chosen| chosen.contains(&step))
    }

    fn preview(&self, step: usize, image: Image) {
        assert!(self.kind.is_some(), "nobody asked for previews");
        // A step whose values are not finite is an error, and no preview.
        assert!(step as u64 <= *self.done.lock().unwrap(), "step {step} is shown before it is known to be good");
        self.seen.lock().unwrap().push((step, image, Instant::now()));
    }
}

/// A table without any symmetry.
pub fn table() -> PreviewTable {
    PreviewTable(std::array::from_fn(|c| std::array::from_fn(|k| ((7 * c + 3 * k + c * k) % 23) as f32 / 46.0 - 0.25)))
}

fn model(variant: Variant, preview: Option<PreviewTable>) -> OpenModel {
    let model = tiny::model(Layout::Diffusers, DType::Bf16).unwrap();
    opened(tiny_weights(&model), variant, ModelDefaults { max_text_tokens: 64, preview, ..ModelDefaults::klein() })
}

fn engine(variant: Variant) -> Engine {
    let options = LoadOptions { precision: Precision::F32, references: true, ..LoadOptions::DEFAULT };
    Engine::load(Box::new(cpu()), model(variant, Some(table())), options, &Silent).unwrap()
}

/// A size with two different sides.
const WIDE: usize = 96;

/// A few steps.
fn job(width: usize) -> Job {
    Job { size: Pixels::new(width, 64).unwrap(), steps: STEPS, record: true, ..small_job() }
}

/// A job that keeps some tokens of an init image.
fn masked(width: usize) -> Job {
    let job = job(width);
    let grid = job.size.grid();
    let pixels = (0..256 * grid.tokens() * 3).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect::<Vec<f32>>().into();
    let start = Start {
        init: ReferenceInput { grid, pixels },
        strength: kiln::edit::Strength::WHOLE,
        keep: Some((0..grid.tokens()).map(|token| token % 3 != 1).collect()),
        is_reference: false,
        paste: None,
    };
    Job { start: Some(start), ..job }
}

fn generate(engine: &mut Engine, job: &Job, viewer: &Viewer) -> Vec<GeneratedImage> {
    let mut images = Vec::new();
    engine
        .generate(job, viewer, &mut |image| {
            images.push(image);
            Ok(())
        })
        .unwrap();
    images
}

/// The clean latents that every step but the last predicts, from the latents before and after it.
fn predicted(record: &Record, sigmas: &[f32]) -> Vec<Vec<f64>> {
    let clean = |(i, pair): (usize, &[Vec<f32>])| {
        let (sigma, next) = (f64::from(sigmas[i]), f64::from(sigmas[i + 1]));
        let values = pair[0].iter().zip(&pair[1]).map(|(&before, &after)| {
            let velocity = (f64::from(after) - f64::from(before)) / (next - sigma);
            f64::from(before) - sigma * velocity
        });
        let mut clean: Vec<f64> = values.collect();
        for token in (0..clean.len() / 128).filter(|&token| record.keep.as_ref().is_some_and(|keep| keep[token])) {
            let init = &record.init.as_ref().unwrap()[128 * token..][..128];
            clean[128 * token..][..128].iter_mut().zip(init).for_each(|(clean, init)| *clean = f64::from(*init));
        }
        clean
    };
    record.latents.windows(2).take(sigmas.len() - 1).enumerate().map(clean).collect()
}

/// The colors of latents. The pixel at (2x + b, 2y + a) has channel c in column 4c + 2a + b of token (x, y).
fn colors(latents: &[f64], grid: Grid, PreviewTable(rows): &PreviewTable) -> Vec<f64> {
    let mut colors = Vec::new();
    for y in 0..2 * grid.height {
        for x in 0..2 * grid.width {
            let token = &latents[128 * (y / 2 * grid.width + x / 2)..][..128];
            for (k, bias) in rows[32].iter().enumerate() {
                let sum: f64 = (0..32).map(|c| f64::from(rows[c][k]) * token[4 * c + 2 * (y % 2) + x % 2]).sum();
                colors.push(255.0 * ((sum + f64::from(*bias) + 1.0) / 2.0).clamp(0.0, 1.0));
            }
        }
    }
    colors
}

#[test]
fn fast_previews_are_the_colors_of_the_predicted_latents() {
    let guided = Job { guidance: 4.0, ..job(WIDE) };
    for (name, variant, job) in [
        ("plain", Variant::Distilled, job(WIDE)),
        ("guided", Variant::Base, guided),
        ("masked", Variant::Distilled, masked(WIDE)),
    ] {
        let viewer = Viewer::new(Some(PreviewKind::Fast), LONG);
        let image = generate(&mut engine(variant), &job, &viewer).remove(0);
        let (record, seen, grid) = (image.record.unwrap(), viewer.images(), job.size.grid());
        assert_eq!(seen.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4], "{name}");
        let clean = predicted(&record, &job.noise_levels());
        for ((step, preview), clean) in seen.iter().zip(&clean) {
            assert_eq!((preview.width, preview.height), (12, 8), "{name}");
            let want = colors(clean, grid, &table());
            assert_eq!(preview.pixels.len(), want.len());
            for (at, (&got, want)) in preview.pixels.iter().zip(&want).enumerate() {
                assert!((f64::from(got) - want).abs() < 0.51, "{name}, step {step}, value {at}: {got} is not {want}");
            }
        }
        assert!(seen.windows(2).all(|pair| pair[0].1.pixels != pair[1].1.pixels), "{name}: steps look alike");
        assert!(seen[3].1 == image.image, "{name}: the last preview is the image");
    }
}

/// The list of levels that a job shifts to these noise levels.
fn unshifted(levels: &[f32], job: &Job) -> Sigmas {
    let shift = Schedule::new(levels.len(), job.size.grid().tokens()).mu().exp();
    let levels: Vec<f64> = levels.iter().map(|&level| 1.0 / (1.0 + shift * (1.0 / f64::from(level) - 1.0))).collect();
    Sigmas::new(&levels).unwrap()
}

/// A job whose last step begins at the noise level of a step jumps to the clean latents which that step predicts.
#[test]
fn full_previews_are_the_images_of_schedules_that_end_there() {
    let guided = Job { guidance: 4.0, ..job(64) };
    for (variant, job) in [(Variant::Base, guided), (Variant::Distilled, masked(64))] {
        let mut engine = engine(variant);
        let viewer = Viewer::new(Some(PreviewKind::Full), LONG);
        let image = generate(&mut engine, &job, &viewer).remove(0).image;
        let (seen, levels) = (viewer.images(), job.noise_levels());
        assert_eq!(seen.len(), STEPS);
        for (i, (step, preview)) in seen[..STEPS - 1].iter().enumerate() {
            assert_eq!(*step, i + 1);
            let shorter = Job { sigmas: Some(unshifted(&levels[..=i], &job)), record: false, ..job.clone() };
            let same = shorter.noise_levels().iter().zip(&levels).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(same, "{:?} are not {levels:?}", shorter.noise_levels());
            let want = run(&mut engine, &shorter).unwrap().image;
            assert_eq!((preview.width, preview.height), (want.width, want.height));
            let most = preview.pixels.iter().zip(&want.pixels).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(most <= 1, "step {step} is up to {most} levels off");
        }
        assert!(seen[STEPS - 1].1 == image);
    }
}

/// Who looks gets the images of who does not, of every seed, and steps that follow quickly are passed over.
#[test]
fn previews_change_no_byte_and_come_rarely() {
    let job = Job { seeds: vec![1, 2], record: false, ..masked(WIDE) };
    let options = LoadOptions { references: true, ..LoadOptions::DEFAULT };
    let mut engine = Engine::load(Box::new(cpu()), model(Variant::Distilled, Some(table())), options, &Silent).unwrap();
    let mut plain = None;
    for kind in [None, Some(PreviewKind::Fast), Some(PreviewKind::Full)] {
        let viewer = Viewer::new(kind, Duration::ZERO);
        let images: Vec<Image> = generate(&mut engine, &job, &viewer).into_iter().map(|image| image.image).collect();
        let seen = viewer.seen.into_inner().unwrap();
        let finished: Vec<&Image> = seen.iter().filter(|(step, ..)| *step == STEPS).map(|(_, image, _)| image).collect();
        match kind {
            None => assert!(seen.is_empty()),
            Some(_) => assert!(finished == images.iter().collect::<Vec<_>>(), "{kind:?}: the last steps are the images"),
        }
        for pair in seen.windows(2).filter(|pair| pair[1].0 < STEPS) {
            assert!(pair[1].2 - pair[0].2 >= Duration::from_millis(195), "{kind:?}: step {} is early", pair[1].0);
        }
        let plain = plain.get_or_insert_with(|| images.clone());
        assert!(*plain == images, "{kind:?} changes the image");
    }
}

/// The kinds of the ops of a job.
fn ops(preview: Option<PreviewTable>, viewer: &Viewer) -> Result<Vec<OpKind>> {
    let kinds = Rc::<RefCell<Vec<OpKind>>>::default();
    let own = kinds.clone();
    let backend: Wrapped = wrapped::after_op(cpu(), move |_, op, _| {
        own.borrow_mut().push(op.kind());
        Ok(())
    });
    let mut engine = Engine::load(Box::new(backend), model(Variant::Distilled, preview), LoadOptions::DEFAULT, &Silent)?;
    generate(&mut engine, &Job { record: false, ..job(64) }, viewer);
    Ok(kinds.take())
}

#[test]
fn nobody_pays_for_previews_who_does_not_look() {
    let of = |preview: Option<PreviewTable>, kind| ops(preview, &Viewer::new(kind, LONG)).unwrap();
    let count = |ops: &[OpKind], kind| ops.iter().filter(|op| **op == kind).count();
    let silent = of(Some(table()), None);
    assert!(count(&silent, OpKind::Preview) == 0 && count(&silent, OpKind::Euler) == STEPS);
    // Without a table there is no fast preview, and only the image arrives.
    let viewer = Viewer::new(Some(PreviewKind::Fast), LONG);
    assert_eq!(ops(None, &viewer).unwrap(), silent);
    assert_eq!(viewer.images().iter().map(|(step, _)| *step).collect::<Vec<_>>(), [STEPS]);
    // The last step is decoded once.
    let (fast, full) = (of(Some(table()), Some(PreviewKind::Fast)), of(None, Some(PreviewKind::Full)));
    assert!(count(&fast, OpKind::Preview) == STEPS - 1 && count(&fast, OpKind::Pixels) == 1);
    assert!(count(&full, OpKind::Preview) == 0 && count(&full, OpKind::Pixels) == STEPS);
}

/// Steps that the caller chooses have previews, also right after each other, and they are the ones that a patient viewer sees.
#[test]
fn chosen_steps_have_previews() {
    let job = Job { record: false, ..masked(WIDE) };
    let mut engine = engine(Variant::Distilled);
    for kind in [PreviewKind::Fast, PreviewKind::Full] {
        let patient = Viewer::new(Some(kind), LONG);
        let image = generate(&mut engine, &job, &patient).remove(0).image;
        let all = patient.images();
        for chosen in [vec![], vec![2], vec![1, 3], vec![1, 2, 3]] {
            let viewer = Viewer { chosen: Some(chosen.clone()), ..Viewer::new(Some(kind), Duration::ZERO) };
            assert!(generate(&mut engine, &job, &viewer).remove(0).image == image, "{chosen:?}");
            let seen = viewer.images();
            let want: Vec<_> = all.iter().filter(|(step, _)| chosen.contains(step) || *step == STEPS).collect();
            assert!(seen.iter().eq(want), "{kind:?} {chosen:?}: {:?}", seen.iter().map(|(step, _)| step).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_service_passes_previews_on() {
    let (service, ()) = Service::start(|| Ok((engine(Variant::Distilled), ()))).unwrap();
    let viewer = Arc::new(Viewer::new(Some(PreviewKind::Fast), LONG));
    let images = service.submit(Job { record: false, ..job(64) }, viewer.clone()).wait().unwrap();
    let seen = viewer.seen.lock().unwrap();
    assert_eq!(seen.iter().map(|(step, ..)| *step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(seen[3].1 == images[0].image);
}

#[test]
fn models_without_colors_still_have_full_previews() {
    let viewer = Viewer::new(Some(PreviewKind::Full), Duration::ZERO);
    let job = Job { steps: 2, ..small_job() };
    generate(&mut engine_on(Box::new(cpu()), Variant::Distilled, Precision::Bf16), &job, &viewer);
    let sizes: Vec<_> = viewer.images().iter().map(|(step, image)| (*step, image.width, image.height)).collect();
    assert_eq!(sizes, [(1, 64, 64), (2, 64, 64)]);
}

/// FLUX.2's numbers are those that were published.
#[test]
fn the_colors_of_flux2_have_their_checksum() {
    let table = PreviewTable::FLUX2;
    let factors: Vec<String> = table.values()[..96].iter().map(|v| format!("{v:.4}")).collect();
    assert!(common::sha256::hex(factors.join(",").as_bytes()).starts_with("21d045713558dccd"));
    assert!((table.values()[..96].iter().map(|v| f64::from(*v)).sum::<f64>() - 0.2950).abs() < 1e-6);
    assert_eq!(table.0[32], [-0.0329, -0.0718, -0.0851]);
}

/// The mean colors of squares of `side` pixels.
fn shrunk(image: &Image, side: usize) -> Vec<f64> {
    let (width, height) = (image.width / side, image.height / side);
    let mean = |x: usize, y: usize, k: usize| {
        let places = (0..side * side).map(|i| (y * side + i / side) * image.width + x * side + i % side);
        places.map(|at| f64::from(image.pixels[3 * at + k])).sum::<f64>() / (side * side) as f64
    };
    (0..width * height * 3).map(|i| mean(i / 3 % width, i / 3 / width, i % 3)).collect()
}

/// Root of the mean square.
fn rms(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    (values.map(|v| v * v).sum::<f64>() / count).sqrt()
}

/// The fitted colors of the built-in model show its image from the first step on, and come closer to its latents' colors with every step.
#[test]
fn previews_of_the_built_in_model_approach_its_image() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/builtin");
    let found = locate(&LocateRequest { model: Some(folder), ..LocateRequest::default() }).unwrap();
    let model = OpenModel::open(&found, None).unwrap();
    let fitted = model.defaults.preview.clone().unwrap();
    let job = Job::new("a large red star on a plain blue background", 11, &model.defaults, model.variant).unwrap();
    let job = Job { record: true, ..job };
    let mut engine = Engine::load(Box::new(cpu()), model, LoadOptions::DEFAULT, &Silent).unwrap();
    let viewer = Viewer::new(Some(PreviewKind::Fast), LONG);
    let GeneratedImage { image, record, .. } = generate(&mut engine, &job, &viewer).remove(0);
    let seen = viewer.images();
    assert_eq!(seen.len(), STEPS);
    let last: Vec<f64> = record.unwrap().latents[STEPS].iter().map(|&v| v.into()).collect();
    let off = |want: &[f64]| -> Vec<f64> {
        let one = |pixels: &[u8]| rms(pixels.iter().zip(want).map(|(&a, b)| f64::from(a) - b));
        seen[..STEPS - 1].iter().map(|(_, preview)| one(&preview.pixels)).collect()
    };
    let (of_latents, want) = (off(&colors(&last, job.size.grid(), &fitted)), shrunk(&image, 8));
    let (of_image, gray) = (off(&want), rms(want.iter().map(|v| v - 128.0)));
    println!("levels from the last latents: {of_latents:.2?}, from the image: {of_image:.1?}, gray {gray:.1}");
    assert!(of_latents.is_sorted_by(|a, b| a > b), "{of_latents:?}");
    assert!(of_image.iter().all(|off| *off < 0.75 * gray), "{of_image:?}, gray {gray}");
}

/// Over the first prompts of the score, previews come closer to the image with every step, and are always closer than plain gray.
#[test]
fn previews_of_many_prompts_come_closer_to_their_images() {
    // An image takes two seconds.
    let count = if long() { 24 } else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = locate(&LocateRequest { model: Some(root.join("models/builtin")), ..LocateRequest::default() }).unwrap();
    let model = OpenModel::open(&found, None).unwrap();
    let (defaults, variant) = (model.defaults.clone(), model.variant);
    let mut engine = Engine::load(Box::new(cpu()), model, LoadOptions::DEFAULT, &Silent).unwrap();
    let file = std::fs::read(root.join("tests/fixtures/builtin/prompts.json")).unwrap();
    let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let (mut off, mut gray) = ([0.0; STEPS], 0.0);
    for (seed, prompt) in file["prompts"].as_array().unwrap().iter().take(count).enumerate() {
        let job = Job::new(prompt["text"].as_str().unwrap(), seed as u64, &defaults, variant).unwrap();
        let viewer = Viewer::new(Some(PreviewKind::Fast), LONG);
        let want = shrunk(&generate(&mut engine, &job, &viewer).remove(0).image, 8);
        let seen = viewer.images();
        assert_eq!(seen.len(), STEPS);
        for (off, (step, preview)) in off.iter_mut().zip(&seen) {
            let pixels = if *step == STEPS { shrunk(preview, 8) } else { preview.pixels.iter().map(|&v| v.into()).collect() };
            *off += rms(pixels.iter().zip(&want).map(|(a, b)| a - b)) / count as f64;
        }
        gray += rms(want.iter().map(|v| v - 128.0)) / count as f64;
    }
    println!("levels from the image, by step: {off:.2?}, gray {gray:.1}");
    assert!(off.is_sorted_by(|a, b| a > b) && off[0] < gray, "{off:?}, gray {gray}");
}
