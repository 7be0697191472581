//! Compares edits with outputs recorded from diffusers, and with what has to be the same by definition, on the CPU.

use common::editing::{self, editing};
use common::fnv::fnv1a;
use common::modes::hashed;
use common::{Goldens, cpu, run};
use kiln::edit::{Area, Paste, Strength};
use kiln::image::Image;
use kiln::internals::pipeline::{Job, Start};
use kiln::internals::reference::resample::{Filter, resize};
use kiln::internals::sampler::Schedule;
use kiln::internals::tensor::Precision;

#[test]
fn every_edit_equals_diffusers() {
    editing::every_edit_equals_diffusers(&|| Box::new(cpu()));
}

#[test]
fn every_edit_in_bf16_is_at_least_as_close_as_diffusers_in_bf16() {
    editing::every_edit_in_bf16_is_as_close_as_diffusers_in_bf16(&|| Box::new(cpu()));
}

#[test]
fn whole_steps_have_the_sigmas_of_diffusers() {
    let schedules = editing().schedules;
    let mut starts = 0;
    for recorded in &schedules {
        let whole = Schedule::new(recorded.steps, recorded.tokens);
        for steps in 1..=recorded.steps {
            let schedule = whole.clone().begin(steps as f64 / recorded.steps as f64);
            assert_eq!(schedule.steps(), steps);
            for (i, want) in recorded.sigmas[recorded.steps - steps..].iter().enumerate() {
                let got = f64::from(schedule.sigma(i));
                assert!(
                    (got - want).abs() <= 1.2e-7,
                    "{} steps, {} tokens: {got} is not {want}",
                    recorded.steps,
                    recorded.tokens
                );
            }
            starts += 1;
        }
    }
    assert_eq!(starts, 6 * (1 + 2 + 4 + 8 + 28 + 50));
}

#[test]
fn masks_are_resized_as_pillow_resizes_them() {
    let digest = |pixels: &[u8]| format!("{:016x}", fnv1a(pixels.iter().copied()));
    for (i, case) in editing().resized.iter().enumerate() {
        let color: Vec<u8> = (0..3 * case.old.0 * case.old.1).map(|at| hashed(&format!("resized.{i}"), at)).collect();
        let gray: Vec<u8> = color.iter().step_by(3).copied().collect();
        let (old, new) = (case.old, case.new);
        assert_eq!(digest(&resize::<3>(&color, old, new, Filter::Triangle)), case.rgb, "{i}: {old:?} to {new:?}");
        assert_eq!(digest(&resize::<1>(&gray, old, new, Filter::Triangle)), case.gray, "{i}: {old:?} to {new:?}");
    }
}

#[test]
fn images_are_laid_over_each_other_as_by_pillow() {
    for (i, case) in editing().composites.iter().enumerate() {
        let (width, height) = (case.width, case.height);
        let of = |name: &str, channels: usize| -> Vec<u8> {
            (0..channels * width * height).map(|at| hashed(&format!("composite.{i}.{name}"), at)).collect()
        };
        let image = |name: &str| Image { width, height, pixels: of(name, 3) };
        let paste = Paste::new(image("below"), Area { left: 0, top: 0, width, height }, of("opacity", 1));
        assert_eq!(format!("{:016x}", fnv1a(paste.over(image("above")).pixels)), case.fnv1a, "{i}");
    }
}

/// A start that changes nothing gives the bytes of a run without one, and a mask that covers everything those of no mask.
#[test]
fn what_makes_no_difference_changes_no_byte() {
    let goldens = Goldens::named("editing.safetensors");
    let case = editing().cases.into_iter().find(|case| case.name == "img2img").unwrap();
    let mut engine = case.engine(Box::new(cpu()), Precision::Bf16);
    let job = case.job(&goldens);
    let start = job.start.clone().unwrap();
    let mut pixels = |start: Option<Start>| run(&mut engine, &Job { start, record: false, ..job.clone() }).unwrap().image.pixels;
    let whole = Start { strength: Strength::WHOLE, keep: None, ..start.clone() };
    let plain = pixels(None);
    assert_eq!(plain, pixels(Some(whole.clone())), "strength 1 without a mask");
    let partly = Start { keep: None, ..start.clone() };
    let edited = pixels(Some(partly));
    assert_ne!(edited, plain);
    assert_eq!(edited, pixels(Some(start)), "a mask that covers everything");
    // As a reference the init image matters even then.
    assert_ne!(plain, pixels(Some(Start { is_reference: true, ..whole })));
}

/// Several images of a job, or of one engine, have their own noise, and nothing of each other.
#[test]
fn images_of_a_job_do_not_depend_on_each_other() {
    let goldens = Goldens::named("editing.safetensors");
    let case = editing().cases.into_iter().find(|case| case.name == "inpaint_partial").unwrap();
    let mut engine = case.engine(Box::new(cpu()), Precision::Bf16);
    let job = Job { seeds: vec![1, 2, 3], record: false, ..case.job(&goldens) };
    let mut together = Vec::new();
    engine
        .generate(&job, &kiln::progress::Silent, &mut |image| {
            together.push(image.image.pixels);
            Ok(())
        })
        .unwrap();
    assert!(together[0] != together[1] && together[1] != together[2]);
    for (seed, image) in job.seeds.iter().zip(&together) {
        let alone = Job { seeds: vec![*seed], ..job.clone() };
        assert_eq!(run(&mut engine, &alone).unwrap().image.pixels, *image, "seed {seed}");
    }
}

/// A job that finds its init image and its references in the cache gives the bytes of one that encodes them.
#[test]
fn cached_images_change_no_byte() {
    let goldens = Goldens::named("editing.safetensors");
    for name in ["inpaint", "inpaint_reference", "inpaint_kv", "img2img"] {
        let case = editing().cases.into_iter().find(|case| case.name == name).unwrap();
        let job = Job { record: false, ..case.job(&goldens) };
        let mut engine = case.engine(Box::new(cpu()), Precision::Bf16);
        let plain = run(&mut engine, &job).unwrap().image.pixels;
        engine.cache_results(64 << 20, &job).unwrap();
        for _ in 0..2 {
            assert_eq!(run(&mut engine, &job).unwrap().image.pixels, plain, "{name}");
        }
        // A job with this image as a reference, and not as the start, is another one.
        let start = job.start.clone().unwrap();
        let other = Job { start: None, references: vec![start.init], ..job };
        let got = run(&mut engine, &other).unwrap().image.pixels;
        let mut fresh = case.engine(Box::new(cpu()), Precision::Bf16);
        assert_eq!(got, run(&mut fresh, &other).unwrap().image.pixels, "{name}");
    }
}
