//! The judge on images whose verdicts are known.

use crate::edits::{EditVerdict, Task};
use crate::fixture;
use crate::judge::{Verdict, judge};
use crate::render::{Image, render};
use crate::report::{Share, by_kind, line, tally, tally_edits};
use crate::world::{Edit, Object, Prompt, SIDE, Scene};
use common::random::long;
use rayon::prelude::*;

/// In a short run every fourth prompt or its data, so that each number of objects keeps its share.
fn some<T>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    all.into_iter().step_by(if long() { 1 } else { 4 }).collect()
}

fn prompts() -> Vec<Prompt> {
    some(fixture().prompts)
}

/// In a short run every third edit, equally many of each kind.
fn edits() -> Vec<Edit> {
    fixture().edits.into_iter().step_by(if long() { 1 } else { 3 }).collect()
}

fn judge_all(prompts: &[Prompt], change: impl Fn(usize, Image) -> Image + Sync) -> Vec<Verdict> {
    prompts.par_iter().enumerate().map(|(i, p)| judge(&change(i, render(&p.scene)), &p.scene)).collect()
}

/// Fails unless every column reaches `percent`; prints the prompts that do not pass.
fn all_reach(name: &str, verdicts: &[Verdict], prompts: &[Prompt], percent: f64) {
    let shares = tally(verdicts);
    println!("{name:<28} {}", line(&shares));
    for (v, p) in verdicts.iter().zip(prompts) {
        if !v.background || v.objects.iter().any(|o| !(o.color && o.shape && o.place)) {
            println!("  {}\n    {v:?}", p.text);
        }
    }
    assert!(shares.iter().all(|s| s.percent() >= percent), "{name}: {}", line(&shares));
}

#[test]
fn rendered_images_pass() {
    let prompts = prompts();
    all_reach("true", &judge_all(&prompts, |_, p| p), &prompts, 99.0);
}

/// The verdict does not depend on single pixels.
#[test]
fn blurred_noisy_and_shifted_images_pass() {
    let prompts = prompts();
    all_reach("blurred", &judge_all(&prompts, |_, p| blurred(&p)), &prompts, 97.0);
    all_reach("noisy", &judge_all(&prompts, |i, p| noisy(&p, i as u64)), &prompts, 97.0);
    for (dx, dy) in [(3, 0), (-3, 3)] {
        all_reach(&format!("shifted by {dx}, {dy}"), &judge_all(&prompts, |_, p| shifted(&p, dx, dy)), &prompts, 97.0);
    }
}

#[test]
fn images_of_other_prompts_fail() {
    let prompts = fixture().prompts;
    let of = |n: usize| prompts.iter().filter(move |p| p.scene.objects.len() == n);
    // Each prompt is paired with the image of the next one that has as many objects.
    let pairs: Vec<(&Prompt, &Prompt)> = some((1..=3).flat_map(|n| of(n).zip(of(n).cycle().skip(1))));
    let verdicts: Vec<Verdict> = pairs.par_iter().map(|(a, b)| judge(&render(&b.scene), &a.scene)).collect();
    let shares = tally(&verdicts);
    println!("{:<28} {}", "of the next prompt", line(&shares));
    assert_eq!(shares[3].of, pairs.len());
    assert!(shares.iter().all(|s| s.percent() <= 30.0), "{}", line(&shares));
}

/// Judges images of changed scenes against the original scenes. Returns the columns: colors, shapes, places, backgrounds.
fn after(prompts: &[Prompt], change: impl Fn(&mut Scene) + Sync) -> [Share; 4] {
    let changed = |p: &Prompt| {
        let mut scene = p.scene.clone();
        change(&mut scene);
        judge(&render(&scene), &p.scene)
    };
    // Only the first object is judged, because it is the one that changes.
    let first = |mut v: Verdict| {
        v.objects.truncate(1);
        v
    };
    tally(&prompts.par_iter().map(changed).map(first).collect::<Vec<_>>())
}

/// Another name of a list, one that is clearly different.
fn other<'a>(list: &[&'a str], name: &str) -> &'a str {
    list[(list.iter().position(|n| *n == name).unwrap() + 3) % list.len()]
}

#[test]
fn every_column_can_fail() {
    let prompts = prompts();
    let plain: Vec<Prompt> = prompts.iter().filter(|p| p.scene.background.kind == "plain").cloned().collect();
    let expect = |name: &str, shares: [Share; 4], right: [bool; 4]| {
        println!("{name:<28} {}", line(&shares));
        for (share, right) in shares.iter().zip(right) {
            assert!(if right { share.percent() >= 97.0 } else { share.percent() <= 3.0 }, "{name}: {}", line(&shares));
        }
    };
    let shapes = crate::world::SHAPES;
    expect(
        "another shape",
        after(&prompts, |s| s.objects[0].shape = other(&shapes, &s.objects[0].shape).into()),
        [true, false, true, true],
    );
    // A color that differs clearly from the colors of the objects and of the background.
    let loud = |s: &Scene| {
        let taken: Vec<&str> = s.objects.iter().map(|o| o.color.as_str()).chain([s.background.color.as_str()]).collect();
        *["green", "purple", "cyan", "yellow", "black", "white"]
            .iter()
            .find(|c| !taken.contains(c) && stands_out(c, &taken))
            .unwrap()
    };
    expect("another color", after(&plain, |s| s.objects[0].color = loud(s).into()), [false, true, true, true]);
    let alone: Vec<Prompt> = prompts.iter().filter(|p| p.scene.objects.len() == 1).cloned().collect();
    expect("moved by 31 pixels", after(&alone, |s| moved(&mut s.objects[0])), [true, true, false, true]);
    expect("nothing there", after(&alone, |s| s.objects.clear()), [false, false, false, true]);
    let plain_alone: Vec<Prompt> = plain.iter().filter(|p| p.scene.objects.len() == 1).cloned().collect();
    expect("one object too many", after(&plain_alone, |s| s.objects.push(far_from(s, loud(s)))), [true, true, true, false]);
    expect(
        "the same object twice",
        after(&plain_alone, |s| s.objects.push(far_from(s, &s.objects[0].color))),
        [true, true, true, false],
    );
    expect("another background", after(&plain, |s| s.background.color = loud(s).into()), [true, true, true, false]);
    let mixed: Vec<Prompt> = prompts.iter().filter(|p| p.scene.background.kind != "plain").cloned().collect();
    let swap = |s: &mut Scene| {
        let b = &mut s.background;
        std::mem::swap(&mut b.color, &mut b.color2);
    };
    expect("the background turned round", after(&mixed, swap), [true, true, true, false]);
    let turn = |s: &mut Scene| {
        let turned = if s.background.direction == "vertical" { "horizontal" } else { "vertical" };
        s.background.direction = turned.into();
    };
    expect("the background turned", after(&mixed, turn), [true, true, true, false]);
}

/// Whether a color differs clearly from all others.
fn stands_out(color: &str, others: &[&str]) -> bool {
    others.iter().all(|o| crate::world::distance(crate::world::rgb(color), crate::world::rgb(o)) > 100.0)
}

/// Moves an object inwards, where there is room for it.
fn moved(o: &mut Object) {
    let inwards = |c: f32| if c < 128.0 { 22.0 } else { -22.0 };
    (o.cx, o.cy) = (o.cx + inwards(o.cx), o.cy + inwards(o.cy));
}

/// A small circle away from a scene's only object.
fn far_from(s: &Scene, color: &str) -> Object {
    let away = |c: f32| if c < 128.0 { 225.0 } else { 31.0 };
    let (cx, cy) = (away(s.objects[0].cx), away(s.objects[0].cy));
    Object { shape: "circle".into(), color: color.into(), cx, cy, r: 16.0, ..s.objects[0].clone() }
}

#[test]
fn rendered_edits_pass_and_missing_ones_fail() {
    let edits = edits();
    let tasks: Vec<Task<'_>> = edits.par_iter().map(Task::new).collect();
    // The round trip is the target itself, as with a perfect VAE.
    let all = |result: &(dyn Fn(&Task<'_>) -> Image + Sync)| -> Vec<EditVerdict> {
        tasks.par_iter().map(|t| t.judge(&result(t), &t.target)).collect()
    };
    let made = all(&|t| t.target.clone());
    println!("{:<28} {}", "true edits", line(&tally_edits(&made)));
    made.iter().filter(|v| !v.made || !v.kept).for_each(|v| println!("  {v:?}"));
    assert!(tally_edits(&made).iter().all(|s| s.percent() >= 99.0));
    for (name, change) in [("blurred edits", blurred as fn(&Image) -> Image), ("noisy edits", |p| noisy(p, 1))] {
        let made = all(&|t| change(&t.target));
        let shares = tally_edits(&made);
        println!("{name:<28} {}", line(&shares));
        made.iter().filter(|v| !v.made || !v.kept).for_each(|v| println!("  {v:?}"));
        assert!(shares.iter().all(|s| s.percent() >= 97.0), "{name}");
    }
    // The unchanged reference: everything is kept, and no edit of any kind is made.
    let idle = all(&|t| render(&t.edit.references[0]));
    println!("{:<28} {}", "no edit at all", line(&tally_edits(&idle)));
    assert!(tally_edits(&idle)[1].percent() >= 99.0);
    for (kind, [made, _]) in by_kind(&idle) {
        assert!(made.right <= 1, "{kind}: {made:?}");
    }
    // The edit is made, but the image is ten levels brighter, or another object is missing.
    let brighter = all(&|t| Image(t.target.0.iter().map(|p| p.map(|v| v.saturating_add(10))).collect()));
    println!("{:<28} {}", "the rest brighter", line(&tally_edits(&brighter)));
    let another = |e: &Edit| (0..e.target.objects.len()).find(|i| e.kind == "remove" || Some(*i) != e.object);
    let mut lost = all(&|t| {
        let mut scene = t.edit.target.clone();
        another(t.edit).map(|i| scene.objects.remove(i));
        render(&scene)
    });
    let mut has_another = edits.iter().map(|e| another(e).is_some());
    lost.retain(|_| has_another.next().unwrap());
    println!("{:<28} {}", "another object lost", line(&tally_edits(&lost)));
    assert!(lost.len() > edits.len() / 2);
    for verdicts in [&brighter, &lost] {
        assert!(tally_edits(verdicts)[1].percent() <= 3.0);
    }
}

/// A box blur of 3x3 pixels.
fn blurred(p: &Image) -> Image {
    let mean = |i: usize| {
        let (x, y) = (i % SIDE, i / SIDE);
        let near = |c: usize| [c.saturating_sub(1), c, (c + 1).min(SIDE - 1)];
        let mut sum = [0; 3];
        for pixel in near(y).iter().flat_map(|y| near(x).map(|x| p.0[y * SIDE + x])) {
            (0..3).for_each(|c| sum[c] += u16::from(pixel[c]));
        }
        sum.map(|v| ((v + 4) / 9) as u8)
    };
    Image((0..SIDE * SIDE).map(mean).collect())
}

/// Adds noise with a standard deviation of four levels. The sum of three uniform numbers has a standard deviation of a half.
fn noisy(p: &Image, seed: u64) -> Image {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut add = |v: u8| (f32::from(v) + 8.0 * ((0..3).map(|_| uniform()).sum::<f32>() - 1.5)).round().clamp(0.0, 255.0) as u8;
    Image(p.0.iter().map(|q| q.map(&mut add)).collect())
}

/// Shifts an image and repeats its border.
fn shifted(p: &Image, dx: isize, dy: isize) -> Image {
    let from = |c: usize, d: isize| (c as isize - d).clamp(0, SIDE as isize - 1) as usize;
    Image((0..SIDE * SIDE).map(|i| p.0[from(i / SIDE, dy) * SIDE + from(i % SIDE, dx)]).collect())
}
