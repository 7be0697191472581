//! Compares every mode of the model with outputs recorded from diffusers, on the CPU.

use common::modes::{self, fnv1a, modes};
use common::{cpu, run};
use kiln::internals::pipeline::Job;
use kiln::internals::sequence::{Grid, Pixels, SequenceLayout};
use kiln::internals::tensor::Precision;

#[test]
fn every_mode_equals_diffusers() {
    modes::every_mode_equals_diffusers(&|| Box::new(cpu()));
}

#[test]
fn every_mode_in_bf16_is_at_least_as_close_as_diffusers_in_bf16() {
    modes::every_mode_in_bf16_is_as_close_as_diffusers_in_bf16(&|| Box::new(cpu()));
}

#[test]
fn guidance_as_an_input_equals_diffusers() {
    modes::guidance_as_an_input_equals_diffusers(&|| Box::new(cpu()));
}

/// Each run rebuilds the KV cache of references: the first job gives the same bytes again after a run with another prompt,
/// seed and size.
#[test]
fn cached_references_do_not_depend_on_the_run_before() {
    let modes = modes();
    let case = modes.cases.iter().find(|c| c.kv).unwrap();
    let mut engine = case.engine(Box::new(cpu()), Precision::Bf16);
    let job = case.job(&modes.images);
    let first = run(&mut engine, &job).unwrap().record.unwrap();
    let other = Job { prompt: "another".into(), seeds: vec![99], size: Pixels::new(64, 96).unwrap(), ..job.clone() };
    run(&mut engine, &other).unwrap();
    let again = run(&mut engine, &job).unwrap().record.unwrap();
    assert_eq!(first.image, again.image);
    assert_eq!(first.latents, again.latents);
}

#[test]
fn the_layout_of_two_large_references_is_the_reference_pipelines() {
    let case = modes().layout;
    let grids: Vec<Grid> = case.prepared.iter().map(|[w, h]| Grid { width: w / 16, height: h / 16 }).collect();
    let plan = SequenceLayout::new(512, Pixels::new(case.width, case.height).unwrap().grid(), &grids).unwrap();
    assert_eq!(plan.tokens() - plan.text().len(), 10_002);
    let ids = plan.ids();
    let checksum = |ids: &[[u32; 4]]| format!("{:016x}", fnv1a(ids.iter().flatten().flat_map(|v| v.to_le_bytes())));
    assert_eq!(checksum(&ids[512..]), case.ids_fnv1a["plain"]["image"]);
    assert_eq!(checksum(&ids), case.ids_fnv1a["plain"]["all"]);
}
