//! Checks the main loop of the Hopper GEMM with policies that no product kernel has yet (`policies.cu`) against f64 loops: FP8 with and
//! without promotion, with f32 results.

#[path = "../../src/backend/cuda/abi.rs"]
#[allow(dead_code)]
pub mod abi;

use abi::{KlGemmRows, KlGemmStream, KlGemmTma, KlOutputRange, KlTileSchedule};
use common::random::Random;
use kiln_emulator::{self as emulator, DeviceMemory, Launch, TensorMap};
use std::mem::offset_of;

/// The seeds of a case. Each seed gives another order of events.
const SEEDS: u64 = 3;

/// What the CTAs of a cluster share. Matches `ClusterMode` in `gemm/tma_config.cuh`.
#[derive(Clone, Copy, PartialEq)]
enum Cluster {
    MulticastA,
    MulticastB,
}

/// An entry point of `policies.cu`, and its tile.
#[derive(Clone, Copy)]
struct Kernel {
    symbol: &'static str,
    block_m: u32,
    block_n: u32,
    cluster: Cluster,
}

impl Kernel {
    /// Rows of the boxes of A.
    fn a_rows(&self) -> u32 {
        if self.cluster == Cluster::MulticastA { self.block_m / abi::KL_SM90_CLUSTER } else { self.block_m }
    }

    /// Columns of the boxes of the output, at most `largest`.
    fn store_cols(&self, largest: u32) -> u32 {
        1 << (self.block_n | largest).trailing_zeros()
    }
}

/// Memory of the emulated GPU, with copies to and from it.
#[derive(Default)]
struct Device(DeviceMemory);

impl Device {
    fn upload(&self, bytes: &[u8]) -> u64 {
        let address = self.0.allocate(bytes.len() as u64).unwrap();
        self.0.write(address, bytes).unwrap();
        address
    }

    /// Allocates memory for results, which holds NaN.
    fn allocate(&self, bytes: usize) -> u64 {
        self.0.allocate(bytes as u64).unwrap()
    }

    /// Downloads values of `N` bytes each, decoded by `value`.
    fn download<const N: usize>(&self, address: u64, count: usize, value: fn([u8; N]) -> f32) -> Vec<f32> {
        let mut bytes = vec![0; count * N];
        self.0.read(address, &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|&bytes| value(bytes)).collect()
    }
}

/// An encoded tensor map.
type Map = [u64; 16];

/// The map of a row-major tensor with boxes that fill the rows of their swizzle. Dimensions are passed last one first.
fn swizzled_map(address: u64, element_bytes: u32, size: &[u32], tile: &[u32]) -> Map {
    let swizzle = tile[0] * element_bytes;
    let (mut map_size, mut map_tile) = ([1; 3], [1; 3]);
    for i in 0..size.len() {
        (map_size[i], map_tile[i]) = (u64::from(size[i]), tile[i]);
    }
    let row = map_size[0] * u64::from(element_bytes);
    let (rank, pitch) = (size.len() as u32, [row, row * map_size[1]]);
    let (size, tile) = (map_size, map_tile);
    emulator::tensor_map(&TensorMap { address, element_bytes, rank, size, pitch, tile, swizzle }).unwrap()
}

/// The work of a kernel: `row_tiles` tiles by `cols` columns over `k_blocks` k-blocks.
struct Problem {
    kernel: Kernel,
    row_tiles: u32,
    cols: u32,
    k_blocks: u32,
    x: Map,
    w: Map,
    out: Map,
    /// The factor of the accumulators.
    alpha: f32,
}

impl Problem {
    /// Runs the kernel with two Stream-K workers that share all tiles, or with one worker that takes whole tiles.
    fn run(&self, device: &Device, stream_k: bool, seed: u64) {
        let Kernel { symbol, block_m, block_n, cluster } = self.kernel;
        let entry = emulator::entry("policies", symbol).unwrap_or_else(|| panic!("no kernel is called {symbol}"));
        let col_tiles = self.cols.div_ceil(block_n);
        let (rows, cols) = match cluster {
            Cluster::MulticastA => (self.row_tiles, col_tiles.div_ceil(abi::KL_SM90_CLUSTER)),
            Cluster::MulticastB => (self.row_tiles.div_ceil(abi::KL_SM90_CLUSTER), col_tiles),
        };
        let tiles = rows * cols;
        let workers = 1 + u32::from(stream_k);
        let ctas = workers * abi::KL_SM90_CLUSTER;

        let mut params = vec![0; entry.param_bytes as usize];
        let mut put = |offset: usize, bytes: &[u8]| params[offset..][..bytes.len()].copy_from_slice(bytes);
        put(offset_of!(KlGemmTma, x), &self.x.map(u64::to_ne_bytes).concat());
        put(offset_of!(KlGemmTma, w), &self.w.map(u64::to_ne_bytes).concat());
        put(offset_of!(KlGemmTma, out), &self.out.map(u64::to_ne_bytes).concat());
        let stream = offset_of!(KlGemmTma, stream);
        let part = stream + offset_of!(KlGemmStream, part);
        let schedule = offset_of!(KlGemmTma, schedule);
        let k_blocks = if stream_k { tiles * self.k_blocks } else { 0 };
        let words = [
            (stream + offset_of!(KlGemmStream, row_tiles), rows),
            (stream + offset_of!(KlGemmStream, col_tiles), cols),
            (part + offset_of!(KlOutputRange, out.cols), self.cols),
            (part + offset_of!(KlOutputRange, tiles), col_tiles),
            (part + offset_of!(KlOutputRange, epilogue), abi::KL_STORE),
            (part + offset_of!(KlOutputRange, w) + offset_of!(KlGemmRows, alpha), self.alpha.to_bits()),
            (offset_of!(KlGemmTma, group), rows),
            (schedule + offset_of!(KlTileSchedule, k_blocks), self.k_blocks),
            (schedule + offset_of!(KlTileSchedule, full_tiles), if stream_k { 0 } else { tiles }),
            (schedule + offset_of!(KlTileSchedule, k_blocks_per_worker), k_blocks / workers),
            (schedule + offset_of!(KlTileSchedule, remainder), k_blocks % workers),
        ];
        words.iter().for_each(|(offset, word)| put(*offset, &word.to_ne_bytes()));
        let partials = device.allocate((ctas * block_m * block_n) as usize * size_of::<f32>());
        let flags = device.upload(&vec![0; (ctas * entry.max_threads / 32) as usize * size_of::<u32>()]);
        put(schedule + offset_of!(KlTileSchedule, partials), &partials.to_ne_bytes());
        put(schedule + offset_of!(KlTileSchedule, flags), &flags.to_ne_bytes());

        let (threads, shared, cluster) = (entry.max_threads, abi::KL_SM90_SHARED_LIMIT, abi::KL_SM90_CLUSTER);
        let launch = Launch { grid: [ctas, 1, 1], threads, shared, cluster, overlap: 0, capability: 90 };
        let outcome = emulator::launch(entry, &launch, &params, seed).and_then(|()| emulator::finish());
        outcome.unwrap_or_else(|message| panic!("{symbol}: {message}"));
    }
}

/// Fails unless the relative L2 error of the results is below `limit`.
fn check(kernel: Kernel, got: &[f32], expected: &[f64], limit: f64) {
    assert_eq!(got.len(), expected.len());
    let difference: f64 = got.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum();
    let error = (difference / expected.iter().map(|v| v * v).sum::<f64>()).sqrt();
    println!("{}: relative error {error:.2e}", kernel.symbol);
    assert!(error < limit, "{}: relative error {error}", kernel.symbol);
}

// ----------------------------------------------------------------------------------------------------------------- FP8

const PROMOTED: [Kernel; 2] = [
    Kernel { symbol: "test_e4m3_promoted_256x128", block_m: 256, block_n: 128, cluster: Cluster::MulticastA },
    Kernel { symbol: "test_e4m3_promoted_128x192", block_m: 128, block_n: 192, cluster: Cluster::MulticastB },
];
const UNPROMOTED: [Kernel; 2] = [
    Kernel { symbol: "test_e4m3_unpromoted_256x128", ..PROMOTED[0] },
    Kernel { symbol: "test_e4m3_unpromoted_128x192", ..PROMOTED[1] },
];

/// The value of an e4m3 code that is not NaN.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    let magnitude = if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Codes of either sign in eight octaves, and subnormal codes.
fn random_codes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| random.next() as u8 & 0x87 | (random.below(9) as u8) << 3).collect()
}

/// alpha x w^T, for e4m3 codes.
fn fp8_gemm(kernel: Kernel, [m, n, k]: [usize; 3], x: &[u8], w: &[u8], alpha: f32, stream_k: bool, seed: u64) -> Vec<f32> {
    let device = Device::default();
    let (x, w) = (device.upload(x), device.upload(w));
    let out = device.allocate(m * n * size_of::<f32>());
    let count = m * n;
    let [m, n, k] = [m, n, k].map(|v| v as u32);
    let problem = Problem {
        kernel,
        row_tiles: m.div_ceil(kernel.block_m),
        cols: n,
        k_blocks: k.div_ceil(128),
        x: swizzled_map(x, 1, &[k, m], &[128, kernel.a_rows()]),
        w: swizzled_map(w, 1, &[k, n], &[128, kernel.block_n / 2]),
        out: swizzled_map(out, 4, &[n, m], &[kernel.store_cols(32), abi::KL_TMA_STORE_ROWS]),
        alpha,
    };
    problem.run(&device, stream_k, seed);
    device.download(out, count, f32::from_ne_bytes)
}

/// Checks sums of 15552, which tensor cores alone get wrong: all operands are 1.125, and K is 12288.
#[test]
fn promotion_keeps_long_sums_exact() {
    needs_emulator!();
    const ONE_AND_AN_EIGHTH: u8 = 0x39;
    let [m, n, k] = [16, 8, 12288];
    let (x, w) = (vec![ONE_AND_AN_EIGHTH; m * k], vec![ONE_AND_AN_EIGHTH; n * k]);
    for (kernels, expected) in [(PROMOTED, 15552.0), (UNPROMOTED, 13115.0)] {
        for kernel in kernels {
            let got = fp8_gemm(kernel, [m, n, k], &x, &w, 1.0, false, 1);
            assert!(got.iter().all(|&v| v == expected), "{}: {} instead of {expected}", kernel.symbol, got[0]);
        }
    }
}

#[test]
fn fp8_gemms_agree_with_f64() {
    needs_emulator!();
    // Ragged in every dimension, with more k-blocks than the pipeline has stages.
    let [m, n, k] = [145, 264, 784];
    let alpha = 0.375;
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let (x, w) = (random_codes(&mut random, m * k), random_codes(&mut random, n * k));
        let values = |codes: &[u8]| codes.iter().map(|&code| e4m3(code)).collect::<Vec<f64>>();
        let (x_values, w_values) = (values(&x), values(&w));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() * f64::from(alpha);
        let expected: Vec<f64> = (0..m * n).map(|i| dot(&x_values[i / n * k..][..k], &w_values[i % n * k..][..k])).collect();
        for (kernels, limit) in [(PROMOTED, 3e-4), (UNPROMOTED, 1e-3)] {
            for kernel in kernels {
                let got = fp8_gemm(kernel, [m, n, k], &x, &w, alpha, random.below(2) == 0, seed);
                check(kernel, &got, &expected, limit);
            }
        }
    }
}
