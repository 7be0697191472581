//! The whole pipeline of the tiny model, on any backend, against outputs recorded from diffusers.

use super::{Case, Goldens, Make, cases, engine_on, relative_l2, run, unit_image};
use kiln::internals::dump::Record;
use kiln::internals::tensor::Precision;

struct Measured {
    prompt_embeds: f64,
    velocity: f64,
    latents: f64,
    image: f64,
    worst_pixel: f32,
}

fn measure(record: &Record, goldens: &Goldens, case: &Case) -> Measured {
    let golden = |what: &str| goldens.f32(&format!("{}.{what}", case.name));
    let cols = record.prompt_embeds.len() / record.token_ids.len();
    let embeds: Vec<f32> = record.prompt_embeds.chunks_exact(cols).step_by(16).flatten().copied().collect();
    // The first step is `latents.1 = noise + dt * velocity`.
    let grid = (case.width / 16) * (case.height / 16);
    let dt = kiln::internals::sampler::Schedule::new(case.steps, grid).dt(0);
    let velocity: Vec<f32> = record.latents[1].iter().zip(&record.latents[0]).map(|(a, b)| (a - b) / dt).collect();
    let image = unit_image(&record.image);
    let want = goldens.image(&format!("{}.image", case.name));
    Measured {
        prompt_embeds: relative_l2(&embeds, &golden("prompt_embeds")),
        velocity: relative_l2(&velocity, &golden("velocity")),
        latents: relative_l2(record.latents.last().unwrap(), &golden("latents")),
        image: relative_l2(&image, &want),
        worst_pixel: image.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
    }
}

/// Checks every stage in f32 against the reference in f32.
pub fn f32_equals_diffusers(make: Make<'_>) {
    let goldens = Goldens::open();
    for case in cases() {
        let mut engine = engine_on(make(), case.variant(), Precision::F32);
        let record = run(&mut engine, &case.job()).unwrap().record.unwrap();
        assert_eq!(record.token_ids, goldens.ids(&format!("{}.token_ids", case.name)), "{}", case.name);
        let head = goldens.f32(&format!("{}.noise_head", case.name));
        for (got, want) in record.latents[0].iter().zip(&head) {
            assert!((got - want).abs() < 1e-6, "{}: noise {got} {want}", case.name);
        }
        let m = measure(&record, &goldens, &case);
        for (stage, error) in
            [("text features", m.prompt_embeds), ("velocity", m.velocity), ("latents", m.latents), ("image", m.image)]
        {
            println!("{} f32 {stage}: {error:.2e}", case.name);
            assert!(error < 1e-4, "{}: {stage} differ by {error:.2e}", case.name);
        }
        assert!(m.worst_pixel <= 1.0 / 255.0, "{}: a pixel differs by {}", case.name, m.worst_pixel);
    }
}

/// Checks every stage in bf16. Its error against the reference in f32 is at most 1.2 times the error of the reference in bf16.
pub fn bf16_is_as_close_as_diffusers_in_bf16(make: Make<'_>) {
    let goldens = Goldens::open();
    for case in cases() {
        let mut engine = engine_on(make(), case.variant(), Precision::Bf16);
        let record = run(&mut engine, &case.job()).unwrap().record.unwrap();
        let m = measure(&record, &goldens, &case);
        // The limit is the smaller of two errors. One has exact timesteps, which the reference rounds to bf16 and kiln does not.
        let (plain, exact) = (case.bf16_relative_l2, case.bf16_exact_time_relative_l2);
        for (stage, error, plain, exact) in [
            ("text features", m.prompt_embeds, plain.prompt_embeds, exact.prompt_embeds),
            ("velocity", m.velocity, plain.velocity, exact.velocity),
            ("latents", m.latents, plain.latents, exact.latents),
            ("image", m.image, plain.image, exact.image),
        ] {
            println!("{} bf16 {stage}: {error:.2e}, diffusers {plain:.2e}, with exact time {exact:.2e}", case.name);
            assert!(error <= 1.2 * plain.min(exact), "{}: {stage} differ by {error:.2e}", case.name);
        }
    }
}
