//! Tests when kernels are loaded.

use super::{Model, PLENTY, generate, jobs};
use common::stand_in::StandIn;
use kiln::internals::backend::cuda::Kernel;
use kiln::internals::pipeline::Job;
use kiln::internals::sequence::Pixels;
use std::collections::HashSet;
use std::sync::Arc;

/// Loads only files of kernels that a job needs, and all of them before the first launch.
#[test]
fn kernels_are_found_before_the_first_one_runs() {
    let (model, driver, stop) = (Model::new(), StandIn::new(PLENTY), Arc::default());
    let files: HashSet<&str> = Kernel::ALL.iter().map(|kernel| kernel.file()).collect();
    for (variant, job) in jobs() {
        let mut engine = model.engine(&driver, &stop, variant, false).unwrap();
        let opened = driver.loads.take();
        driver.launches.set(0);
        generate(&mut engine, &job).unwrap();
        let [before, after] = driver.loads.take();
        assert!(
            before > 0 && opened[0] + opened[1] + before < files.len() && after == 0,
            "{opened:?} {before} {after} of {}",
            files.len()
        );
        // A job of another size mostly needs the same files.
        generate(&mut engine, &Job { size: Pixels::new(96, 64).unwrap(), ..job }).unwrap();
        let [_, late] = driver.loads.take();
        assert!(late <= 2, "{late}");
    }
}
