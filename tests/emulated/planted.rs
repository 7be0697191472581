//! Checks that every bug planted in copies of the kernels is found, and that the report names it.

use crate::driver::Gpu;
use crate::runner::Runner;
use common::ops::cases;
use common::random::long;
use kiln::internals::backend::cuda::{Arch, Kernel, KernelChoice};
use kiln_emulator::planted::{BUGS, Expect, Planted, WRONG};

/// How many seeds are tried until a bug is found. Some bugs show only in a certain order of events.
const SEEDS: u64 = 20;
/// How many seeds must find nothing where there is no bug, in a short and in a long run. All cases run with other seeds, too.
const SOUND_SEEDS: [u64; 2] = [1, 8];

/// A bug that an op case finds.
struct Found {
    bug: &'static Planted,
    choice: KernelChoice,
    case: &'static str,
    /// A part of the emulator's report.
    report: &'static str,
}

impl Found {
    fn of(bug: &'static Planted) -> Option<Self> {
        let Expect::Report(case, report) = bug.expect else { return None };
        let kernel = Kernel::ALL.iter().copied().find(|kernel| format!("{kernel:?}") == bug.kernel);
        assert!(kernel.is_some() || bug.kernel.is_empty(), "{}: no kernel is called {}", bug.name, bug.kernel);
        Some(Self { bug, choice: kernel.map_or(KernelChoice::Best, KernelChoice::Only), case, report })
    }

    /// The GPU that the kernel is for.
    fn gpu(&self) -> Gpu {
        if matches!(self.choice, KernelChoice::Only(kernel) if kernel.arch() == Arch::Sm120) {
            Gpu::NATIVE_BLACKWELL
        } else {
            Gpu::HOPPER
        }
    }

    /// How many seeds to try without the bug. A wrong result does not depend on the order of events.
    fn sound_seeds(&self) -> u64 {
        if self.report == WRONG { 1 } else { SOUND_SEEDS[usize::from(long())] }
    }

    /// Tries these many seeds. Returns the first one that makes the case fail, with the emulator's report.
    fn run(&self, bug: Option<&'static str>, seeds: u64) -> Option<(u64, String)> {
        let case = cases::all().into_iter().find(|case| case.name == self.case);
        let case = case.unwrap_or_else(|| panic!("no case is called {:?}", self.case));
        let mut runner = Runner::with_bug(self.gpu(), bug);
        (0..seeds).find_map(|seed| Some((seed, runner.run(self.choice, &case, seed, true).err()?)))
    }
}

/// Checks the bugs that op cases find. The tests of FP8 sums and of the self-test find the others.
#[test]
fn every_planted_bug_is_found_and_named() {
    needs_emulator!();
    let bugs: Vec<Found> = BUGS.iter().filter_map(Found::of).collect();
    let mut wrong = Vec::new();
    // Without a bug nothing may be found.
    let mut sound: Vec<&Found> = Vec::new();
    for found in &bugs {
        match sound.iter_mut().find(|other| (other.choice, other.case) == (found.choice, found.case)) {
            Some(other) if other.sound_seeds() < found.sound_seeds() => *other = found,
            Some(_) => {}
            None => sound.push(found),
        }
    }
    for found in sound {
        let report = found.run(None, found.sound_seeds());
        wrong.extend(report.map(|(seed, message)| format!("no bug, with seed {seed}: {message}")));
    }
    for found in &bugs {
        let name = found.bug.name;
        match found.run(Some(name), SEEDS) {
            Some((seed, message)) if message.contains(found.report) => println!("{name} with seed {seed}: {message}"),
            Some((seed, message)) => wrong.push(format!("{name} is not named, with seed {seed}: {message}")),
            None => wrong.push(format!("{name} is not found")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
