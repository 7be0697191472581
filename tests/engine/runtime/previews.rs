//! Tests what previews leave alone on a GPU.

use super::{Model, OPTIONS, PLENTY, cuda};
use crate::previews::{Viewer, table};
use common::stand_in::StandIn;
use common::{cases, opened, tiny_weights};
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::pipeline::{Engine, Job};
use kiln::progress::{PreviewKind, Silent};
use std::sync::Arc;
use std::time::Duration;

/// Steps are captured once and replayed, with previews and without, in the same memory.
#[test]
fn previews_leave_graphs_and_memory_alone() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let defaults = ModelDefaults { preview: Some(table()), ..ModelDefaults::klein() };
    let model = opened(tiny_weights(&model.0), Variant::Base, defaults);
    let mut engine = Engine::load(Box::new(cuda(&driver, &stop).unwrap()), model, OPTIONS, &Silent).unwrap();
    let job = Job { steps: 3, record: false, guidance: 4.0, ..cases()[0].job() };
    let mut run = |kind| {
        let (replays, launches) = (driver.replays.get(), driver.launches.get());
        let viewer = Viewer::new(kind, Duration::ZERO);
        engine.generate(&job, &viewer, &mut |_| Ok(())).unwrap();
        let graphs = (driver.replays.get() - replays, driver.held("graph"));
        (graphs, driver.bytes.get().0, driver.launches.get() - launches, viewer.images().len())
    };
    // The first image launches its first step op by op.
    run(None);
    assert_eq!(driver.late_kernels.take(), 0);
    let (graphs, bytes, launches, seen) = run(None);
    assert_eq!(seen, 0);
    let (fast, full) = (run(Some(PreviewKind::Fast)), run(Some(PreviewKind::Full)));
    assert!((fast.0, fast.1) == (graphs, bytes) && (full.0, full.1) == (graphs, bytes), "{graphs:?} {fast:?} {full:?}");
    assert!(fast.2 > launches && full.2 > fast.2 && fast.3 >= 2, "{launches} {fast:?} {full:?}");
    assert_eq!(run(None), (graphs, bytes, launches, 0));
}

/// Kernels of previews are found before the image begins, also if an image without previews came before.
#[test]
fn kernels_of_previews_are_found_before_the_image() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let defaults = ModelDefaults { preview: Some(table()), ..ModelDefaults::klein() };
    let model = opened(tiny_weights(&model.0), Variant::Distilled, defaults);
    let mut engine = Engine::load(Box::new(cuda(&driver, &stop).unwrap()), model, OPTIONS, &Silent).unwrap();
    let job = Job { steps: 3, record: false, ..cases()[0].job() };
    for kind in [None, Some(PreviewKind::Fast), Some(PreviewKind::Full)] {
        driver.launches.set(0);
        engine.generate(&job, &Viewer::new(kind, Duration::ZERO), &mut |_| Ok(())).unwrap();
        assert_eq!(driver.late_kernels.take(), 0, "{kind:?}");
    }
}
