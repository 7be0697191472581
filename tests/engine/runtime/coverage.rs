//! The kernels that the small op cases and the self-test launch.

use super::{PLENTY, cuda};
use common::ops;
use common::random::{Random, long, seed};
use common::stand_in::StandIn;
use kiln::internals::backend::cuda::{Cuda, Kernel, KernelChoice};
use kiln::selftest::{self, Extent, Outcome};
use std::sync::Arc;

/// The kernels that no case has launched.
fn missed(cuda: &Cuda) -> Vec<Kernel> {
    cuda.launched().filter(|(_, times)| *times == 0).map(|(kernel, _)| kernel).collect()
}

/// Sanitizers run the small cases only, so these have to launch every kernel.
#[test]
fn the_small_cases_launch_every_kernel() {
    let mut cuda = cuda(&StandIn::new(PLENTY), &Arc::default()).unwrap();
    assert!(cuda.launched().all(|(_, times)| times == 0));
    let mut weights = ops::Weights::default();
    let (cases, mut random) = (ops::cases::all(), Random::new(seed(true)));
    let mut pairs: Vec<_> = KernelChoice::all().flat_map(|choice| cases.iter().map(move |case| (choice, case))).collect();
    pairs.retain(|(choice, case)| ops::is_within(ops::SMALL, &case.name) && ops::tiles::runs_with(*choice, &case.name));
    pairs.sort_by_cached_key(|_| random.next());
    // A short run takes cases until they have launched every kernel. In any order, all cases together launch all kernels.
    let mut pairs = pairs.into_iter();
    while (long() || missed(&cuda).iter().any(|kernel| !kernel.file().starts_with("selftest")))
        && let Some((choice, case)) = pairs.next()
    {
        cuda.set_choice(choice);
        ops::run(&mut cuda, &mut weights, case, false, &mut Vec::new());
    }
    // The self-test launches its own kernels. Their results are zeros on the stand-in, so nothing passes.
    let lines = selftest::run(&mut cuda, &Extent { burst: false, ..Extent::QUICK }, &mut |_| Ok(())).unwrap();
    assert!(lines.iter().all(|line| !matches!(line.outcome, Outcome::Passed(_))), "{lines:?}");
    assert!(missed(&cuda).is_empty(), "never launched: {:?}", missed(&cuda));
}
