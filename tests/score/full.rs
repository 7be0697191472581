//! The score of a model, or of stored images.

use crate::edits::{EditVerdict, Task};
use crate::engine::{Format, Model, root};
use crate::judge::{Verdict, judge};
use crate::render::{Image, render};
use crate::report::{COLUMNS, GOALS, MUSTS, Share, by_kind, line, save_grid, table, tally, tally_edits};
use crate::settings::number;
use crate::world::{Edit, Fixture, Prompt};
use crate::{fixture, read_images};
use common::random::long;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The source of the images.
pub enum Source {
    /// A model, and the round trips of the edits' targets that it has computed so far.
    Model(Box<Model>, BTreeMap<usize, Image>),
    /// `prompt_000.png` onwards; `edit_000.png` onwards, with `trip_000.png` onwards, the round trips of their targets.
    Folder(PathBuf),
}

impl Source {
    pub fn model(model: Model) -> Self {
        Self::Model(Box::new(model), BTreeMap::new())
    }

    /// The image of a prompt.
    fn prompt(&mut self, i: usize, prompt: &Prompt, seeds: u64) -> Option<Image> {
        match self {
            Self::Model(model, _) => Some(model.draw(&prompt.text, &[], seed(seeds, i))),
            Self::Folder(_) => self.file("prompt", i),
        }
    }

    /// The result of an edit, and the round trip of its target.
    fn edit(&mut self, i: usize, task: &Task<'_>, seeds: u64) -> Option<(Image, Image)> {
        match self {
            Self::Model(model, trips) => {
                let references: Vec<Image> = task.edit.references.iter().map(render).collect();
                let made = model.draw(&task.edit.text, &references, seed(seeds, i));
                Some((made, trips.entry(i).or_insert_with(|| model.round_trip(&task.target)).clone()))
            }
            Self::Folder(_) => Some((self.file("edit", i)?, self.file("trip", i)?)),
        }
    }

    /// The round trip of a prompt's true image.
    fn trip(&mut self, prompt: &Prompt) -> Option<Image> {
        match self {
            Self::Model(model, _) => Some(model.round_trip(&render(&prompt.scene))),
            Self::Folder(_) => None,
        }
    }

    fn file(&self, name: &str, i: usize) -> Option<Image> {
        let Self::Folder(folder) = self else { return None };
        let path = folder.join(format!("{name}_{i:03}.png"));
        path.exists().then(|| read_images(&path).remove(0))
    }

    pub fn what(&self) -> String {
        match self {
            Self::Model(model, _) => model.what.clone(),
            Self::Folder(folder) => format!("images of {}", folder.display()),
        }
    }
}

/// The seed of an image in one of the sets of seeds.
fn seed(set: u64, i: usize) -> u64 {
    1000 * set + i as u64
}

/// The number of prompts and of edits that `KILN_SCORE_LIMIT` allows.
pub fn limit() -> usize {
    number("KILN_SCORE_LIMIT", usize::MAX)
}

/// All images and their verdicts.
#[derive(Default)]
pub struct Score<'a> {
    prompts: Vec<(usize, &'a Prompt, Image, Verdict)>,
    edits: Vec<(usize, &'a Edit, Image, EditVerdict)>,
    /// Round trips of the prompts' true images.
    trips: Vec<Verdict>,
}

impl<'a> Score<'a> {
    /// Generates and judges images of some prompts and edits, spread evenly over all, with one set of seeds.
    pub fn of(source: &mut Source, fixture: &'a Fixture, limits: (usize, usize), seeds: u64) -> Self {
        let Fixture { prompts, edits, .. } = fixture;
        let some = |all: usize, limit: usize| (0..limit.min(all)).map(move |i| i * all / limit.min(all));
        let mut score = Self::default();
        for i in some(prompts.len(), limits.0) {
            let Some(image) = source.prompt(i, &prompts[i], seeds) else { continue };
            let verdict = judge(&image, &prompts[i].scene);
            score.prompts.push((i, &prompts[i], image, verdict));
        }
        for i in some(edits.len(), limits.1) {
            let task = Task::new(&edits[i]);
            let Some((image, trip)) = source.edit(i, &task, seeds) else { continue };
            let verdict = task.judge(&image, &trip);
            score.edits.push((i, &edits[i], image, verdict));
        }
        score
    }

    fn edit_verdicts(&self) -> Vec<EditVerdict> {
        self.edits.iter().map(|e| e.3.clone()).collect()
    }

    pub fn columns(&self) -> [Share; 6] {
        let [a, b, c, d] = tally(&self.prompts.iter().map(|p| p.3.clone()).collect::<Vec<_>>());
        let [e, f] = tally_edits(&self.edit_verdicts());
        [a, b, c, d, e, f]
    }

    /// Checks the VAE's round trips, because a model cannot be better than its VAE, and edits are measured against it.
    fn check_trips(&mut self, source: &mut Source) {
        let trips = self.prompts.iter().filter_map(|(_, prompt, ..)| Some(judge(&source.trip(prompt)?, &prompt.scene)));
        self.trips = trips.collect();
        if self.trips.is_empty() {
            return;
        }
        let shares = tally(&self.trips);
        println!("round trips of true images: {}", line(&shares));
        assert!(shares.iter().all(|share| share.percent() >= 95.0), "the autoencoder loses too much");
    }

    fn json(&self, what: &str, seconds: f64) -> serde_json::Value {
        let columns = self.columns();
        let column =
            |i: usize| json!({ "percent": columns[i].percent(), "share": columns[i], "must": MUSTS[i], "goal": GOALS[i] });
        let prompts = self.prompts.iter().map(|(i, p, _, v)| json!({ "index": i, "text": p.text, "verdict": v }));
        let edits = self.edits.iter().map(|(i, e, _, v)| json!({ "index": i, "text": e.text, "verdict": v }));
        json!({
            "what": what,
            "seconds": seconds,
            "columns": (0..6).map(|i| (COLUMNS[i].to_string(), column(i))).collect::<serde_json::Map<_, _>>(),
            "edits by kind, made and kept": by_kind(&self.edit_verdicts()),
            "round trips of true images": COLUMNS.iter().zip(tally(&self.trips)).collect::<std::collections::BTreeMap<_, _>>(),
            "prompts": prompts.collect::<Vec<_>>(),
            "edits": edits.collect::<Vec<_>>(),
        })
    }

    /// Saves all images: failed ones next to the rendered ones, and for each edit its references, result and target.
    fn save_images(&self, folder: &Path) {
        let right = |v: &Verdict| v.background && v.objects.iter().all(|o| o.color && o.shape && o.place);
        let grid = |name: String, cells: &[(Image, bool)], columns: usize| {
            save_grid(&folder.join(name), &cells.iter().map(|(p, right)| (p, *right)).collect::<Vec<_>>(), columns);
        };
        let drawn: Vec<(Image, bool)> = self.prompts.iter().map(|(_, _, p, v)| (p.clone(), right(v))).collect();
        let beside: Vec<_> = self.prompts.iter().filter(|(_, _, _, v)| !right(v)).collect();
        let missed: Vec<(Image, bool)> =
            beside.iter().flat_map(|(_, p, made, _)| [(made.clone(), false), (render(&p.scene), true)]).collect();
        let blank = Image(vec![[255; 3]; crate::world::SIDE.pow(2)]);
        let edits = self.edits.iter().flat_map(|(_, e, made, v)| {
            let second = e.references.get(1).map_or(blank.clone(), render);
            [(render(&e.references[0]), true), (second, true), (made.clone(), v.made && v.kept), (render(&e.target), true)]
        });
        let pages = |name: &str, cells: &[(Image, bool)]| {
            cells.chunks(40).enumerate().for_each(|(i, page)| grid(format!("{name}_{i}.png"), page, 8));
        };
        pages("prompts", &drawn);
        pages("missed", &missed);
        pages("edits", &edits.collect::<Vec<_>>());
    }
}

/// Scores the built-in model, or what `KILN_SCORE_MODEL` or `KILN_SCORE_IMAGES` names. Writes images and figures to
/// `target/score`.
#[test]
#[ignore = "minutes; this is the score"]
fn full_score() {
    let (fixture, start) = (fixture(), Instant::now());
    let mut source = match std::env::var_os("KILN_SCORE_IMAGES") {
        Some(folder) => Source::Folder(folder.into()),
        None => Source::model(Model::of_score(Format::of_score())),
    };
    let mut score = Score::of(&mut source, &fixture, (limit(), limit()), number("KILN_SCORE_SEED", 0));
    let (columns, what) = (score.columns(), source.what());
    println!("{what}\n{}", table(&columns, &score.edit_verdicts()));
    score.check_trips(&mut source);
    let folder = root().join("target/score");
    std::fs::create_dir_all(&folder).unwrap();
    score.save_images(&folder);
    let json = serde_json::to_string_pretty(&score.json(&what, start.elapsed().as_secs_f64())).unwrap();
    std::fs::write(folder.join("score.json"), json + "\n").unwrap();
    println!("{:.0} s; images and figures are in {}", start.elapsed().as_secs_f64(), folder.display());
    let missed: Vec<&str> = (0..6).filter(|i| columns[*i].percent() < MUSTS[*i]).map(|i| COLUMNS[i]).collect();
    assert!(missed.is_empty(), "below the must: {}", missed.join(", "));
}

/// Scores a sample. Few images are a rough estimate of a percentage, so the limits are lower.
#[test]
fn a_sample_of_the_score() {
    let fixture = fixture();
    let mut source = Source::model(Model::of_score(Format::of_score()));
    let mut score = Score::of(&mut source, &fixture, if long() { (40, 21) } else { (3, 3) }, 0);
    println!("{}\n{}", source.what(), table(&score.columns(), &score.edit_verdicts()));
    score.check_trips(&mut source);
    for (i, share) in score.columns().iter().enumerate() {
        assert!(share.percent() >= 0.75 * MUSTS[i], "{}: {share:?}", COLUMNS[i]);
    }
}

/// The control: an untrained model fails in every column of the same score.
#[test]
fn an_untrained_model_scores_nothing() {
    let fixture = fixture();
    let mut source = Source::model(Model::open(Path::new("tiny"), Format::of_score().precision()));
    let score = Score::of(&mut source, &fixture, (1, 1), 0);
    println!("{}\n{}", source.what(), table(&score.columns(), &score.edit_verdicts()));
    assert_eq!((score.prompts.len(), score.edits.len()), (1, 1));
    for (i, share) in score.columns().iter().enumerate() {
        assert!(share.of > 0 && share.right == 0, "{}: {share:?}", COLUMNS[i]);
    }
}
