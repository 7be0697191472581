//! Random cases: a generator, the number of cases, and how to reproduce a failure.

use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Whether the user asked for the long versions of the tests.
pub fn long() -> bool {
    std::env::var_os("KILN_TEST_LONG").is_some_and(|value| value == "1")
}

/// The seed of a run: `KILN_TEST_SEED` if it is set, otherwise a new seed or always the same one.
pub fn seed(is_new: bool) -> u64 {
    match std::env::var("KILN_TEST_SEED") {
        Ok(text) => text.parse().expect("KILN_TEST_SEED is a number"),
        Err(_) if is_new => SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 % 1_000_000_000,
        Err(_) => 1,
    }
}

/// Runs `case` many times, each with its own generator. A short run is the same every time. If a case panics, prints its seed, with which
/// the case runs first.
pub fn cases(what: &str, short: u64, long_count: u64, case: impl Fn(&mut Random) + Sync) {
    let (seed, count) = (seed(long()), if long() { long_count } else { short });
    println!("{what}: {count} cases, seed {seed}");
    let start = Instant::now();
    (0..count).into_par_iter().for_each(|index| {
        let run = || case(&mut Random::new(seed.wrapping_add(index)));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            println!(
                "{what}: case {index} of seed {seed} failed; KILN_TEST_SEED={} makes it the first",
                seed.wrapping_add(index)
            );
            resume_unwind(panic);
        }
    });
    println!("{what}: {:.1} s", start.elapsed().as_secs_f64());
}

/// The part of a slow sweep that a run takes: all of it in a long run, about one in `n` in a short one, drawn by a new seed.
pub fn one_in<T>(n: u64, what: &str, sweep: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let seed = seed(true);
    if !long() {
        println!("{what}: one in {n}, KILN_TEST_SEED={seed}");
    }
    let is_drawn = move |index: usize| long() || splitmix(seed, index as u64).is_multiple_of(n);
    sweep.into_iter().enumerate().filter(move |(index, _)| is_drawn(*index)).map(|(_, item)| item)
}

/// The step of SplitMix64.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number `index` of the sequence of a seed, by SplitMix64 (Steele, Lea and Flood 2014), which is good with any seed.
pub fn splitmix(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(GAMMA.wrapping_mul(index + 1));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A sequence of random numbers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Sequences of consecutive seeds must not be shifted copies of each other.
        let mut mixed = Self(seed);
        Self(mixed.next())
    }

    pub fn next(&mut self) -> u64 {
        let number = splitmix(self.0, 0);
        self.0 = self.0.wrapping_add(GAMMA);
        number
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }

    /// A number of any magnitude, often next to a power of two, where arithmetic tends to fail.
    pub fn size(&mut self) -> u64 {
        let power = 1u64 << self.below(64);
        match self.below(4) {
            0 => power,
            1 => power - 1,
            2 => power.wrapping_add(1),
            _ => self.next() >> self.below(64),
        }
    }

    /// Replaces, removes or doubles a few bytes, truncates, or inserts some of `words`.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, words: &[&str]) {
        for _ in 0..=self.below(3) {
            if bytes.len() < 2 {
                break;
            }
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes[at] = self.next() as u8,
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, bytes[at]),
                3 => bytes[at] ^= 1 << self.below(8),
                4 if self.below(8) == 0 => bytes.truncate(at.max(1)),
                _ => drop(bytes.splice(at..at + 1, self.pick(words).bytes())),
            }
        }
    }
}
