//! Generates images with the tiny model on an emulated GPU.

use crate::driver::{Emulated, Gpu};
use crate::runner::{cuda_with, run_seed};
use common::dev::model_with;
use common::merging::backend_merges_as_the_host;
use common::random::long;
use common::{cpu, run, short_engine, short_model, small_job};
use kiln::internals::backend::cuda::Cuda;
use kiln::internals::backend::{Backend, Lockstep};
use kiln::internals::config::{ModelDefaults, Variant};
use kiln::internals::pipeline::{Engine, Job, LoadOptions};
use kiln::internals::tokenizer::Padding;
use kiln::progress::Silent;
use kiln::quantize::calibrate::{Calibration, calibrate};
use std::rc::Rc;

const OPTIONS: LoadOptions = LoadOptions::DEFAULT;

/// The CUDA backend on an emulated Hopper, with the seed of this run.
fn hopper() -> (Rc<Emulated>, Cuda) {
    let driver = Emulated::new(Gpu::HOPPER);
    driver.set_seed(run_seed());
    let cuda = cuda_with(&driver, None).unwrap();
    (driver, cuda)
}

/// Every op of an image is within rounding of the CPU backend's result.
#[test]
fn an_image_equals_that_of_the_cpu_op_by_op() {
    needs_emulator!();
    let (driver, cuda) = hopper();
    let backend = Lockstep::new(cpu(), cuda);
    let mut engine = short_engine(Box::new(backend), Variant::Distilled, OPTIONS);
    run(&mut engine, &Job { steps: 2, ..small_job() })
        .unwrap_or_else(|e| panic!("{e}\n  again with KILN_TEST_SEED={}", run_seed()));
    assert!(driver.launches() > 100, "only {} kernels were launched", driver.launches());
}

/// Checks the text encoder of \[dev\] as well: heads without norms, and a row of padding that attends to nothing. A few of its layers are
/// enough.
#[test]
fn an_image_of_dev_equals_that_of_the_cpu_op_by_op() {
    needs_emulator!();
    let backend = Lockstep::new(cpu(), hopper().1);
    let defaults = ModelDefaults { text_layers: Some([1, 2, 3]), max_text_tokens: 192, ..ModelDefaults::klein() };
    let mut engine = Engine::load(Box::new(backend), model_with(defaults), OPTIONS, &Silent).unwrap();
    run(&mut engine, &Job { steps: 1, padding: Padding::Left, guidance: 4.0, ..small_job() })
        .unwrap_or_else(|e| panic!("{e}\n  again with KILN_TEST_SEED={}", run_seed()));
}

/// The calibration observer keeps its values behind the working memory of the stages, and finds what it finds on the CPU.
#[test]
fn calibration_equals_that_of_the_cpu_op_by_op() {
    if !crate::available() || !long() {
        return;
    }
    let found = |backend: Box<dyn Backend>| {
        let calibration = Calibration { prompts: vec!["x".into()], size: small_job().size, steps: 1 };
        let in_block = |name: &str| name.contains("_blocks.");
        calibrate(backend, "here", short_model(Variant::Distilled), &calibration, &in_block, &Silent)
            .unwrap_or_else(|e| panic!("{e}\n  again with KILN_TEST_SEED={}", run_seed()))
    };
    let in_lockstep = found(Box::new(Lockstep::new(cpu(), hopper().1)));
    assert_eq!(in_lockstep, found(Box::new(cpu())));
}

/// The third step replays the second, which was captured. Neither that nor the order of what hardware leaves open changes a bit.
#[test]
fn neither_graphs_nor_seeds_change_an_image() {
    if !crate::available() || !long() {
        return;
    }
    let image = |capture: bool, seed: u64| {
        let driver = Emulated::new(Gpu::HOPPER);
        driver.set_seed(seed);
        let mut cuda = cuda_with(&driver, None).unwrap();
        cuda.set_graph_capture(capture);
        let backend: Box<dyn Backend> = Box::new(cuda);
        let mut engine = short_engine(backend, Variant::Distilled, OPTIONS);
        run(&mut engine, &Job { steps: 3, ..small_job() }).unwrap().image
    };
    let first = image(true, run_seed());
    assert!(first == image(false, run_seed()), "captured steps give another image");
    assert!(first == image(true, run_seed() + 1), "another order gives another image");
}

#[test]
fn adapters_are_merged_as_by_the_host() {
    needs_emulator!();
    backend_merges_as_the_host(&mut hopper().1);
}
