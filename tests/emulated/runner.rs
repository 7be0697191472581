//! Runs op cases on an emulated GPU. Each has a seed, which a failure prints.

use crate::driver::{Emulated, Gpu};
use common::fnv::fnv1a;
use common::ops::{self, Case, Weights};
use common::random::{Random, seed};
use kiln::error::Result;
use kiln::internals::backend::cuda::{Cuda, KernelChoice};
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

/// Weight memory for small cases.
const WEIGHT_BYTES: u64 = 32 << 20;

/// The seed of this run: `KILN_TEST_SEED`, or a new one.
pub fn run_seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| seed(true))
}

/// The CUDA backend on an emulated GPU. `bug` names a module whose kernels have a planted bug.
pub fn cuda_with(driver: &Rc<Emulated>, bug: Option<&'static str>) -> Result<Cuda> {
    let image = |file: &'static str| Ok(Cow::Owned(bug.into_iter().chain([file]).collect::<Vec<_>>().join(" ").into_bytes()));
    Cuda::new(driver.clone(), &image, Arc::default())
}

/// A backend, and the weights that its cases have placed so far.
pub struct Runner {
    pub driver: Rc<Emulated>,
    pub cuda: Cuda,
    weights: Weights,
}

impl Runner {
    pub fn new(gpu: Gpu) -> Self {
        Self::with_bug(gpu, None)
    }

    pub fn with_bug(gpu: Gpu, bug: Option<&'static str>) -> Self {
        let driver = Emulated::new(gpu);
        let mut cuda = cuda_with(&driver, bug).unwrap();
        cuda.enable_gated(gpu.native);
        Self { driver, cuda, weights: Weights::with_bytes(WEIGHT_BYTES) }
    }

    /// Runs a case and returns its results, or a description of what is wrong. `verify` compares the results with the oracle.
    pub fn run(
        &mut self,
        choice: KernelChoice,
        case: &Case,
        seed: u64,
        verify: bool,
    ) -> std::result::Result<Vec<Vec<f32>>, String> {
        self.driver.set_seed(seed);
        self.cuda.set_choice(choice);
        let mut faults = Vec::new();
        let run = || ops::run(&mut self.cuda, &mut self.weights, case, verify, &mut faults);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(results) if faults.is_empty() => Ok(results),
            Ok(_) => Err(faults.join("; ")),
            // The rig unwraps the result of every call.
            Err(panic) => Err(match panic.downcast_ref::<String>() {
                Some(text) => text.trim_start_matches("called `Result::unwrap()` on an `Err` value: ").replace("\\n", "\n"),
                None => "a panic without a message".into(),
            }),
        }
    }

    /// Checks a case with a seed derived from the run's seed. An error says how to repeat it.
    pub fn check(&mut self, run_seed: u64, choice: KernelChoice, case: &Case) -> std::result::Result<(), String> {
        let name = fnv1a(format!("{choice:?} {}", case.name).bytes());
        let seed = Random::new(run_seed ^ name).next();
        self.run(choice, case, seed, true).map(drop).map_err(|message| {
            let repeat = format!("KILN_TEST_SEED={run_seed} KILN_TEST_CASE={:?}", case.name);
            format!("{} with {choice:?}: {message}\n  again with {repeat}", case.name)
        })
    }
}
