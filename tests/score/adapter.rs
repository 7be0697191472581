//! The example adapter, with which the model draws a ninth shape.

use crate::engine::{Model, root};
use crate::judge::{Seen, judge};
use crate::render::render;
use crate::report::{Share, line, save_grid};
use crate::settings::number;
use crate::world::{MOON, Prompt, held_out_pair};
use crate::{fixture, moons};
use kiln::internals::adapter::{Adapter, Adapters};
use std::sync::Arc;

/// `count` entries of a list, spread evenly over it.
fn some(all: Vec<Prompt>, count: usize) -> Vec<Prompt> {
    let (length, count) = (all.len(), count.min(all.len()));
    all.into_iter().enumerate().filter(|(i, _)| i * count % length < count).map(|(_, prompt)| prompt).collect()
}

/// Colors, shapes and places of the moons, or of all objects in prompts without moons; and backgrounds.
fn score(name: &str, model: &mut Model, prompts: &[Prompt]) -> [Share; 4] {
    let (mut objects, mut backgrounds, mut images): (Vec<Seen>, Vec<bool>, Vec<_>) = Default::default();
    for (i, prompt) in prompts.iter().enumerate() {
        let image = model.draw(&prompt.text, &[], i as u64);
        let verdict = judge(&image, &prompt.scene);
        let is_moon = |i: usize| prompt.scene.objects[i].shape == MOON;
        let counted = |i: &usize| is_moon(*i) || !(0..verdict.objects.len()).any(is_moon);
        let own: Vec<Seen> = (0..verdict.objects.len()).filter(counted).map(|i| verdict.objects[i].clone()).collect();
        images.push((image, own.iter().all(|seen| seen.shape)));
        objects.extend(own);
        backgrounds.push(verdict.background);
    }
    let column = |of: &dyn Fn(&Seen) -> bool| Share::of(objects.iter().map(of));
    let shares = [column(&|o| o.color), column(&|o| o.shape), column(&|o| o.place), Share::of(backgrounds)];
    println!("{name:<40} {}", line(&shares));
    if prompts.len() > 1 {
        let folder = root().join("target/score");
        std::fs::create_dir_all(&folder).unwrap();
        let cells: Vec<_> = images.iter().map(|(image, right)| (image, *right)).collect();
        save_grid(&folder.join(format!("{}.png", name.replace(' ', "_"))), &cells, 8);
    }
    shares
}

fn beside(adapter: &Adapter, strength: f32) -> Option<Arc<Adapters>> {
    Some(Arc::new(Adapters(vec![(adapter.clone(), strength)])))
}

/// Scores `count` moons and `others` other prompts, each without the adapter and with it.
fn compare(count: usize, others: usize) -> [[Share; 4]; 4] {
    let (mut model, adapter) = Model::and_adapter(&root().join("models/lora/moon.safetensors"));
    let (moons, others) = (some(moons().prompts, count), some(fixture().prompts, others));
    let mut drawn = |name: &str, prompts: &[Prompt], adapters| {
        model.adapters = adapters;
        score(name, &mut model, prompts)
    };
    [
        drawn("moons without it", &moons, None),
        drawn("moons with the adapter", &moons, beside(&adapter, 1.0)),
        drawn("others without it", &others, None),
        drawn("others with the adapter", &others, beside(&adapter, 1.0)),
    ]
}

/// The adapter draws moons that the model alone does not draw.
#[test]
fn the_example_adapter_draws_a_moon() {
    let [before, after, ..] = compare(1, 0);
    assert_eq!((before[1].right, after[1].right), (0, 1));
}

/// Scores all prompts of the example adapter, and as many other prompts, which the adapter must not spoil.
#[test]
#[ignore = "minutes; this is the score of the adapter"]
fn adapter_score() {
    let count = number("KILN_SCORE_LIMIT", usize::MAX).min(moons().prompts.len());
    let [before, after, plain, kept] = compare(count, count);
    assert_eq!(before[1].right, 0, "the model draws moons by itself");
    assert!(after[1].percent() >= 30.0, "too few moons: {:?}", after[1]);
    for (plain, kept) in plain.iter().zip(&kept) {
        assert!(kept.percent() >= plain.percent() - 5.0, "other images are spoiled: {plain:?}, {kept:?}");
    }
}

#[test]
fn moons_are_held_out_and_judged() {
    let prompts = moons().prompts;
    assert_eq!(prompts.len(), 40);
    for prompt in &prompts {
        let moons: Vec<_> = prompt.scene.objects.iter().filter(|object| object.shape == MOON).collect();
        assert!(moons.len() == 1 && prompt.text.contains(MOON), "{}", prompt.text);
        assert!(held_out_pair(&moons[0].color, MOON), "{} is trained", moons[0].color);
        let verdict = judge(&render(&prompt.scene), &prompt.scene);
        assert!(
            verdict.background && verdict.objects.iter().all(|o| o.color && o.shape && o.place),
            "{}: {verdict:?}",
            prompt.text
        );
    }
    // The control: another shape in the moon's place is not a moon.
    for (i, prompt) in prompts.iter().enumerate() {
        let mut other = prompt.scene.clone();
        let moon = other.objects.iter().position(|object| object.shape == MOON).unwrap();
        other.objects[moon].shape = crate::world::SHAPES[i % 8].into();
        assert!(!judge(&render(&other), &prompt.scene).objects[moon].shape, "{}", prompt.text);
    }
}
