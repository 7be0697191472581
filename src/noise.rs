//! The initial noise: PyTorch's values for the same seed, so that images generated elsewhere can be reproduced.
//!
//! PyTorch has three relevant normal generators, each with a different sequence. The device and the PyTorch version that drew the
//! noise decide which one a seed refers to; [`NoiseKind`] names them. kiln implements all three on the host, so that every backend
//! starts from the same values.

use crate::error::Error;
use crate::sequence::Grid;
use crate::tensor::Precision;
use crate::trace;
use half::bf16;
use rayon::prelude::*;
use std::f64::consts::TAU;
use std::fmt;
use std::str::FromStr;

/// Channels of one latent token.
pub const CHANNELS: usize = 128;

/// Which generator the noise is drawn with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoiseKind {
    /// PyTorch on a CUDA device: Philox. The values depend on how many threads are resident on the device, and so on its model.
    TorchCuda {
        /// Streaming multiprocessors of the device.
        sms: u32,
        /// Maximum number of resident threads per streaming multiprocessor.
        threads: u32,
    },
    /// PyTorch 2.12 and later on the CPU: Mersenne Twister, in f32.
    TorchCpu,
    /// PyTorch up to 2.11 on the CPU, drawing bfloat16: Mersenne Twister with 8-bit uniform variates, rounded after every
    /// operation.
    TorchCpuLegacy,
}

impl NoiseKind {
    /// PyTorch on an H100 or H200 (SXM).
    pub const HOPPER: Self = Self::TorchCuda { sms: 132, threads: 2048 };
}

impl fmt::Display for NoiseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::TorchCuda { .. } => "torch-cuda",
            Self::TorchCpu => "torch-cpu",
            Self::TorchCpuLegacy => "torch-cpu-legacy",
        })
    }
}

impl FromStr for NoiseKind {
    type Err = Error;

    /// Parses a name; `torch-cuda` is [`NoiseKind::HOPPER`].
    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "torch-cuda" => Ok(Self::HOPPER),
            "torch-cpu" => Ok(Self::TorchCpu),
            "torch-cpu-legacy" => Ok(Self::TorchCpuLegacy),
            _ => Err(Error::usage(format!("unknown noise `{name}`"), "use torch-cuda, torch-cpu or torch-cpu-legacy")),
        }
    }
}

/// Draws the noise of one image, row-major `[tokens, CHANNELS]`. In [`Precision::Bf16`] every value is rounded to bfloat16.
pub fn draw(kind: NoiseKind, seed: u64, grid: Grid, precision: Precision) -> Vec<f32> {
    let _span = trace::span("draw noise");
    let tokens = grid.tokens();
    let count = tokens * CHANNELS;
    let stored = |x: f32| if precision == Precision::Bf16 { round(x) } else { x };
    let drawn = match kind {
        NoiseKind::TorchCuda { sms, threads } => cuda_normals(count, seed, 0, resident_threads(sms, threads)),
        NoiseKind::TorchCpu => cpu_normals(count, seed),
        NoiseKind::TorchCpuLegacy => legacy_normals(count, seed),
    };
    by_token(tokens, &drawn, stored)
}

/// Transposes PyTorch's layout `[channels, rows, columns]` to one row per token.
fn by_token(tokens: usize, drawn: &[f32], stored: impl Fn(f32) -> f32 + Sync) -> Vec<f32> {
    // Tokens per run: their rows stay in the cache while channel after channel is written.
    const RUN: usize = 64;
    let mut rows = vec![0.0; tokens * CHANNELS];
    rows.par_chunks_mut(RUN * CHANNELS).enumerate().for_each(|(run, rows)| {
        for channel in 0..CHANNELS {
            let from = &drawn[channel * tokens + run * RUN..];
            let to = rows[channel..].iter_mut().step_by(CHANNELS);
            to.zip(from).for_each(|(to, from)| *to = stored(*from));
        }
    });
    rows
}

/// Rounds to bfloat16.
fn round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// Threads per CTA of PyTorch's random kernels.
const BLOCK: u64 = 256;

/// Number of resident threads of PyTorch's random kernels on a device. At least one CTA, so that impossible values do not lead to
/// a division by zero.
fn resident_threads(sms: u32, threads: u32) -> u64 {
    (u64::from(sms) * (u64::from(threads) / BLOCK)).max(1) * BLOCK
}

/// `torch.randn` on a CUDA device.
///
/// The kernel is launched with one thread per value, but with no more threads than can be resident on the device. Each thread has
/// its own Philox stream, draws four normal variates at a time and writes them a whole grid of threads apart. So the stream and
/// position of a value depend on the size of the device; but since Philox is counter-based, every block can be computed on its own.
///
/// `offset` is the generator's offset: 0 after seeding. A draw advances it by 4 for every four values that one thread has drawn.
fn cuda_normals(count: usize, seed: u64, offset: u64, resident: u64) -> Vec<f32> {
    /// Values that one thread draws at a time.
    const PIECE: usize = 4096;
    let launched = (count as u64).next_multiple_of(BLOCK).clamp(BLOCK, resident) as usize;
    let mut drawn = vec![0.0; count];
    // One transform makes two values, whose distance is the number of threads.
    for (number, pair) in drawn.chunks_mut(2 * launched).enumerate() {
        let (firsts, seconds) = pair.split_at_mut(launched.min(pair.len()));
        // The last pair of rows may have fewer second values, or none.
        let missing = firsts.len().div_ceil(PIECE) - seconds.len().div_ceil(PIECE);
        let seconds = seconds.par_chunks_mut(PIECE).chain((0..missing).into_par_iter().map(|_| Default::default()));
        firsts.par_chunks_mut(PIECE).zip(seconds).enumerate().for_each(|(piece, (firsts, seconds))| {
            for (i, first) in firsts.iter_mut().enumerate() {
                let block = philox(seed, offset / 4 + (number / 2) as u64, (piece * PIECE + i) as u64);
                let [x, y] = if number % 2 == 0 { [block[0], block[1]] } else { [block[2], block[3]] };
                let second;
                [*first, second] = box_muller_cuda(x, y);
                if let Some(to) = seconds.get_mut(i) {
                    *to = second;
                }
            }
        });
    }
    drawn
}

/// The Box-Muller transform (Box and Muller 1958) as in cuRAND: the sine comes first and the uniform variates are never 0. The
/// device code uses fused multiply-add, so this does, too.
fn box_muller_cuda(x: u32, y: u32) -> [f32; 2] {
    const TO_UNIT: f32 = 1.0 / 4_294_967_296.0;
    const TO_ANGLE: f32 = TO_UNIT * TAU as f32;
    let u = (x as f32).mul_add(TO_UNIT, TO_UNIT / 2.0);
    let angle = (y as f32).mul_add(TO_ANGLE, TO_ANGLE / 2.0);
    let radius = (-2.0 * u.ln()).sqrt();
    let (sin, cos) = angle.sin_cos();
    [radius * sin, radius * cos]
}

/// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based generator. The key is the
/// seed and the counter is `(position, stream)`, so any block can be computed without the preceding ones.
fn philox(seed: u64, position: u64, stream: u64) -> [u32; 4] {
    let [mut k0, mut k1] = halves(seed);
    let ([c0, c1], [c2, c3]) = (halves(position), halves(stream));
    let mut c = [c0, c1, c2, c3];
    for _ in 0..10 {
        let [low0, high0] = halves(0xD251_1F53 * u64::from(c[0]));
        let [low1, high1] = halves(0xCD9E_8D57 * u64::from(c[2]));
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c
}

/// Low and high 32 bits.
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// `torch.randn` on the CPU, in f32. PyTorch uses vectorized polynomials for the logarithm, sine and cosine, whose results differ
/// from these by less than 5e-7.
fn cpu_normals(count: usize, seed: u64) -> Vec<f32> {
    let uniform = |bits: u32| (bits & 0x00FF_FFFF) as f32 / 16_777_216.0;
    box_muller_cpu(count, seed, uniform, |u1, u2| {
        let radius = (-2.0 * (1.0 - u1).ln()).sqrt();
        let angle = TAU as f32 * u2;
        let (sin, cos) = angle.sin_cos();
        [radius * cos, radius * sin]
    })
}

/// `torch.randn(dtype=torch.bfloat16)` on the CPU, up to PyTorch 2.11: the uniform variates have 256 distinct values, and every
/// operation is rounded.
fn legacy_normals(count: usize, seed: u64) -> Vec<f32> {
    let uniform = |bits: u32| (bits & 0xFF) as f32 / 256.0;
    box_muller_cpu(count, seed, uniform, |u1, u2| {
        let log = round(round(1.0 - u1).ln());
        let radius = round(round(-2.0 * log).sqrt());
        // PyTorch's constant is a double, so this multiplication alone is not in f32.
        let angle = round((TAU * f64::from(u2)) as f32);
        let (sin, cos) = angle.sin_cos();
        [round(radius * round(cos)), round(radius * round(sin))]
    })
}

/// PyTorch's Box-Muller transform on the CPU. It fills a tensor with uniform variates and then transforms blocks of 16 in place:
/// values `j` and `j + 8` of a block form a pair. `count` must be a multiple of 16, as it always is for whole tokens.
fn box_muller_cpu(count: usize, seed: u64, uniform: impl Fn(u32) -> f32, pair: impl Fn(f32, f32) -> [f32; 2] + Sync) -> Vec<f32> {
    debug_assert_eq!(count % 16, 0, "PyTorch treats an incomplete block differently");
    // The generator is seeded with 32 bits; PyTorch drops the high half of the seed.
    let mut twister = Mt19937::new(seed as u32);
    let mut out: Vec<f32> = (0..count).map(|_| uniform(twister.next())).collect();
    out.par_chunks_exact_mut(16).for_each(|block| {
        for j in 0..8 {
            [block[j], block[j + 8]] = pair(block[j], block[j + 8]);
        }
    });
    out
}

/// The Mersenne Twister (Matsumoto and Nishimura 1998).
struct Mt19937 {
    state: [u32; Self::N],
    used: usize,
}

impl Mt19937 {
    const N: usize = 624;
    const M: usize = 397;

    fn new(seed: u32) -> Self {
        let mut state = [seed; Self::N];
        for j in 1..Self::N {
            let previous = state[j - 1];
            state[j] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(j as u32);
        }
        Self { state, used: Self::N }
    }

    fn next(&mut self) -> u32 {
        if self.used == Self::N {
            self.twist();
        }
        let mut y = self.state[self.used];
        self.used += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9D2C_5680;
        y ^= (y << 15) & 0xEFC6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for j in 0..Self::N {
            let y = (self.state[j] & 0x8000_0000) | (self.state[(j + 1) % Self::N] & 0x7FFF_FFFF);
            let feedback = if y & 1 == 1 { 0x9908_B0DF } else { 0 };
            self.state[j] = self.state[(j + Self::M) % Self::N] ^ (y >> 1) ^ feedback;
        }
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: u64 = 270_336;

    fn cuda_normals(count: usize, seed: u64, offset: u64) -> Vec<f32> {
        super::cuda_normals(count, seed, offset, H200)
    }

    fn assert_close(got: &[f32], want: &[f32], tolerance: f32) {
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= tolerance, "value {i}: {got} is not {want}");
        }
    }

    #[test]
    fn generators_match_their_published_vectors() {
        // Random123's known answers and the C++ standard's 10,000th value.
        assert_eq!(philox(0, 0, 0), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox(u64::MAX, u64::MAX, u64::MAX), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        let mut twister = Mt19937::new(5489);
        assert_eq!((0..10_000).map(|_| twister.next()).last(), Some(4_123_659_995));
    }

    #[test]
    fn cuda_first_values() {
        let seed_0 =
            [-0.924662, -0.425344, -2.643846, 0.145184, -0.120867, -0.579726, -0.622852, -0.328387, -1.074542, -0.363144];
        let seed_42 = [0.194019, 2.161374, -0.172051, 0.849060, -1.924399, 0.652986, -0.649441, -0.817525];
        assert_close(&cuda_normals(1024, 0, 0), &seed_0, 2e-6);
        assert_close(&cuda_normals(1024, 42, 0), &seed_42, 2e-6);
        assert!(draw(NoiseKind::HOPPER, 0, Grid { width: 0, height: 4 }, Precision::F32).is_empty());
    }

    #[test]
    fn cuda_values_beyond_the_first_launch_width() {
        const COUNT: usize = 524_288;
        let at = [0, 256, 65_535, 221_184, 270_335, 270_336, 400_000, 524_287];
        let recorded = [
            (0, [-0.925781, 0.237305, -0.796875, -0.714844, 0.277344, 0.992188, -1.570312, 0.773438]),
            (42, [0.194336, -1.9375, 0.380859, 0.542969, -0.652344, -0.96875, -0.582031, 1.859375]),
        ];
        for (seed, want) in recorded {
            let drawn = cuda_normals(COUNT, seed, 0);
            let got = at.map(|i| round(drawn[i]));
            // Recorded with six decimals, which is finer than bfloat16.
            assert_close(&got, &want, 6e-7);
        }
        // The second f32 draw from the same generator.
        let second = cuda_normals(COUNT, 0, 4);
        assert_close(&[0, 1, 270_336, 524_287].map(|i| second[i]), &[0.180826, -0.552263, -0.153638, 2.232494], 2e-6);
    }

    #[test]
    fn cuda_values_of_several_calls() {
        // Compares each value, with all possible lengths of the last row and of the last pair of rows.
        let launched = 512;
        for count in [1, 511, 513, 1024, 1025, 2047, 2049, 5000, 6 * 512] {
            let drawn = super::cuda_normals(count, 7, 8, launched as u64);
            for (i, value) in drawn.iter().enumerate().filter(|_| count > 511) {
                let (call, slot) = (i / (4 * launched), i / launched % 4);
                let block = philox(7, 2 + call as u64, (i % launched) as u64);
                let pair = &block[slot / 2 * 2..][..2];
                assert_eq!(*value, box_muller_cuda(pair[0], pair[1])[slot % 2], "{i} of {count}");
            }
            assert_eq!(drawn.len(), count);
        }
    }

    #[test]
    fn cuda_noise_depends_on_the_device_only_beyond_its_width() {
        let grid = Grid { width: 64, height: 64 };
        let a100 = NoiseKind::TorchCuda { sms: 108, threads: 2048 };
        let h200 = draw(NoiseKind::HOPPER, 0, grid, Precision::F32);
        let a100 = draw(a100, 0, grid, Precision::F32);
        // The first 54 of 128 channels are drawn by the first 221,184 threads, which both have.
        for (h200, a100) in h200.chunks_exact(CHANNELS).zip(a100.chunks_exact(CHANNELS)) {
            assert_eq!(h200[..54], a100[..54]);
        }
        assert_ne!(h200, a100);
        // A nonexistent device gives some noise rather than a panic.
        assert_eq!(
            draw(NoiseKind::TorchCuda { sms: 0, threads: 7 }, 0, Grid { width: 4, height: 4 }, Precision::F32).len(),
            2048
        );
    }

    #[test]
    fn cpu_first_values() {
        let want = [-1.1258398, -1.1523602, -0.25057858, -0.4338788, 0.84871036, 0.69200915, -0.31601277, -2.1152194];
        assert_close(&cpu_normals(128, 0), &want, 5e-7);
        assert_eq!(cpu_normals(128, 7), cpu_normals(128, 7 | (1 << 32)), "only the low half of the seed counts");
    }

    #[test]
    fn legacy_first_values() {
        let want = [1.4609375, 0.29101562, 0.9609375, 1.5703125, 0.49414062, -1.515625, -0.25, 0.57421875];
        assert_close(&legacy_normals(128, 0), &want, 1e-8);
        let many = legacy_normals(1 << 19, 0);
        assert_eq!(many.iter().fold(0.0f32, |max, x| max.max(x.abs())), 3.328125);
        assert!(many.iter().all(|&x| round(x) == x));
    }

    #[test]
    fn tokens_gather_their_channels() {
        let grid = Grid { width: 5, height: 3 };
        for kind in [NoiseKind::HOPPER, NoiseKind::TorchCpu, NoiseKind::TorchCpuLegacy] {
            let noise = draw(kind, 1, grid, Precision::F32);
            let flat = match kind {
                NoiseKind::TorchCuda { .. } => cuda_normals(15 * CHANNELS, 1, 0),
                NoiseKind::TorchCpu => cpu_normals(15 * CHANNELS, 1),
                NoiseKind::TorchCpuLegacy => legacy_normals(15 * CHANNELS, 1),
            };
            // Channel 7 of the token in row 2, column 4.
            assert_eq!(noise[(2 * 5 + 4) * CHANNELS + 7], flat[7 * 15 + 2 * 5 + 4], "{kind}");
            let rounded: Vec<f32> = noise.iter().map(|&x| round(x)).collect();
            assert_eq!(draw(kind, 1, grid, Precision::Bf16), rounded, "{kind}");
        }
    }

    #[test]
    fn names_round_trip() {
        for kind in [NoiseKind::HOPPER, NoiseKind::TorchCpu, NoiseKind::TorchCpuLegacy] {
            assert_eq!(kind.to_string().parse::<NoiseKind>().unwrap(), kind);
        }
        assert_eq!("Torch-CPU".parse::<NoiseKind>().unwrap_err().exit_code(), 2);
    }
}
