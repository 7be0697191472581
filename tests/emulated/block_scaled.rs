//! Checks that the software that replaces block-scaled MMAs on other GPUs (`kernels/ptx/block_scaled_mma.cuh`) computes the same bits as
//! the emulator's instructions.

use common::random::Random;
use kiln_emulator::{DeviceMemory, Launch, entry, finish, launch};
use std::ops::RangeInclusive;

const LANES: usize = 32;
/// Words of a lane: four of A, two of B, the scales of both, and four accumulators.
const WORDS: usize = 12;
const SHAPE: Launch = Launch { grid: [1, 1, 1], threads: LANES as u32, shared: 0, cluster: 1, overlap: 0, capability: 120 };

/// How operands are drawn: the range of scale codes, and the range of the accumulators' f32 exponents.
struct Kind {
    scales: RangeInclusive<u64>,
    exponents: RangeInclusive<u64>,
    /// If set, one in this many scales, e4m3 elements and accumulators is NaN or infinite.
    special: Option<u64>,
}

const KINDS: [Kind; 6] = [
    Kind { scales: 0x00..=0x7e, exponents: 110..=145, special: None },
    Kind { scales: 0x38..=0x38, exponents: 120..=134, special: None },
    // Subnormal scales and accumulators.
    Kind { scales: 0x00..=0x07, exponents: 0..=1, special: None },
    Kind { scales: 0x00..=0x07, exponents: 100..=120, special: None },
    // Accumulators so large that products do not change them.
    Kind { scales: 0x40..=0x7e, exponents: 150..=254, special: None },
    Kind { scales: 0x00..=0x7e, exponents: 110..=145, special: Some(40) },
];

struct Operands<'a> {
    random: &'a mut Random,
    kind: &'a Kind,
}

impl Operands<'_> {
    fn within(&mut self, range: &RangeInclusive<u64>) -> u64 {
        range.start() + self.random.next() % (range.end() - range.start() + 1)
    }

    fn is_special(&mut self) -> bool {
        self.kind.special.is_some_and(|one_in| self.random.next().is_multiple_of(one_in))
    }

    /// Four e4m3 bytes in this range, of either sign if the range has both.
    fn bytes(&mut self, codes: &RangeInclusive<u64>) -> u32 {
        let byte = |_| if self.is_special() { 0x7f } else { self.within(codes) as u8 };
        u32::from_le_bytes([0; 4].map(byte))
    }

    fn accumulator(&mut self) -> u32 {
        let bits = self.random.next() as u32 & 0x807f_ffff;
        match self.is_special() {
            true => [0x7f80_0000, 0xff80_0000, 0x7fc0_0000][self.random.next() as usize % 3],
            false => bits | (self.within(&self.kind.exponents) as u32) << 23,
        }
    }

    /// The words of a lane. Elements are any e2m1 codes, or e4m3 codes. An e4m3 NaN counts as special.
    fn lane(&mut self, e4m3: bool) -> [u32; WORDS] {
        let mut words = [0; WORDS];
        for word in &mut words[..6] {
            *word =
                if e4m3 { self.bytes(&(0..=0x7e)) | self.random.next() as u32 & 0x8080_8080 } else { self.random.next() as u32 };
        }
        let scales = self.kind.scales.clone();
        words[6..8].iter_mut().for_each(|word| *word = self.bytes(&scales));
        words[8..].iter_mut().for_each(|word| *word = self.accumulator());
        words
    }
}

/// Runs a kernel on `count` MMAs of each kind, with `results` fragments per MMA, and compares both results.
fn compare(kernel: &str, e4m3: bool, count: usize, results: usize) {
    let (memory, mut random) = (DeviceMemory::default(), Random::new(1));
    for kind in &KINDS {
        let mut operands = Operands { random: &mut random, kind };
        let words: Vec<u8> = (0..count * LANES).flat_map(|_| operands.lane(e4m3)).flat_map(u32::to_le_bytes).collect();
        let bytes = count * LANES * results * 16;
        let [from, by_instruction, in_software] = [words.len(), bytes, bytes].map(|bytes| memory.allocate(bytes as u64).unwrap());
        memory.write(from, &words).unwrap();
        let params: Vec<u8> = [from, by_instruction, in_software, count as u64].into_iter().flat_map(u64::to_le_bytes).collect();
        launch(entry("block_scaled", kernel).unwrap(), &SHAPE, &params, 0).unwrap();
        finish().unwrap();
        let [instruction, software] = [by_instruction, in_software].map(|at| {
            let mut data = vec![0; bytes];
            memory.read(at, &mut data).unwrap();
            data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect::<Vec<f32>>()
        });
        for (i, (a, b)) in instruction.iter().zip(&software).enumerate() {
            let (lane, register) = (i / (4 * results) % LANES, i % 4);
            assert_eq!(a.to_bits(), b.to_bits(), "{kernel}, lane {lane}, register {register}: {a:e} and {b:e}");
        }
        // The operands are a real test: some sums differ from the accumulator, and special values appear if and only if they are drawn.
        let has = |what: fn(f32) -> bool| instruction.iter().any(|&v| what(v));
        assert_eq!([has(f32::is_nan), has(f32::is_infinite)], [kind.special.is_some(); 2], "{kernel}");
        assert!(has(|v| v != 0.0 && v.is_finite()));
    }
}

#[test]
fn the_stand_in_for_block_scaled_mmas_computes_the_same_bits() {
    needs_emulator!();
    compare("both_nvf4", false, 6, 8);
    compare("both_e4m3", true, 12, 1);
}
