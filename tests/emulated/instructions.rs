//! Emulator instructions whose results no product kernel shows by itself, the rules of tensor maps, and launches that never end.

use common::ops::formats::Codes;
use common::random::Random;
use kiln::internals::tensor::DType;
use kiln_emulator::{DeviceMemory, Launch, TensorMap, entry, finish, launch, set_patience, set_step_limit, tensor_map};
use std::ops::Range;
use std::process::Command;
use std::time::Duration;

const MODULE: &str = "instructions";
const SEEDS: u64 = 10;
const THREADS: usize = 64;
const SHAPE: Launch =
    Launch { grid: [1, 1, 1], threads: THREADS as u32, shared: 40 << 10, cluster: 1, overlap: 0, capability: 90 };
const PAIR: Launch = Launch { grid: [2, 1, 1], cluster: 2, ..SHAPE };

/// Runs a kernel with a parameter that begins with these words.
fn run(kernel: &str, shape: &Launch, words: &[u64], seed: u64) -> Result<(), String> {
    let entry = entry(MODULE, kernel).unwrap_or_else(|| panic!("no kernel is called {kernel}"));
    let mut params: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    params.resize(entry.param_bytes as usize, 0);
    launch(entry, shape, &params, seed)?;
    finish()
}

fn read(memory: &DeviceMemory, address: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    memory.read(address, &mut data).unwrap();
    data
}

/// A three-dimensional tensor with different bytes everywhere, and boxes of it.
struct Tensor {
    memory: DeviceMemory,
    bytes: Vec<u8>,
    map: TensorMap,
    out: u64,
}

impl Tensor {
    /// Elements have 2 bytes. Rows and planes are farther apart than they are long.
    fn new(tile: [u32; 3], swizzle: u32) -> Self {
        let memory = DeviceMemory::default();
        let (size, pitch) = ([70, 9, 5], [160, 160 * 10]);
        let bytes: Vec<u8> = (0..pitch[1] * size[2]).map(|i| (i * 7 + i / 251) as u8 | 1).collect();
        let address = memory.allocate(bytes.len() as u64).unwrap();
        memory.write(address, &bytes).unwrap();
        let out = memory.allocate(64 << 10).unwrap();
        Self { memory, bytes, map: TensorMap { address, element_bytes: 2, rank: 3, size, pitch, tile, swizzle }, out }
    }

    fn box_bytes(&self) -> usize {
        self.map.tile.iter().product::<u32>() as usize * 2
    }

    /// The box at these coordinates in the order of shared memory, byte by byte.
    fn expected(&self, origin: [i32; 3]) -> Vec<u8> {
        let [width, height, depth] = self.map.tile.map(|side| side as usize);
        let chunks = (self.map.swizzle as usize / 16).max(1);
        let mut expected = vec![0; self.box_bytes()];
        for (z, y, x) in (0..depth).flat_map(|z| (0..height).flat_map(move |y| (0..width).map(move |x| (z, y, x)))) {
            let at = [x, y, z].into_iter().zip(origin).map(|(i, first)| i64::from(first) + i as i64);
            let at: Vec<u64> =
                at.zip(self.map.size).filter_map(|(i, size)| u64::try_from(i).ok().filter(|&i| i < size)).collect();
            let &[tx, ty, tz] = at.as_slice() else { continue };
            let from = (tz * self.map.pitch[1] + ty * self.map.pitch[0] + 2 * tx) as usize;
            let linear = ((z * height + y) * width + x) * 2;
            let (line, chunk) = (linear / 128, linear / 16 % 8);
            // 16-byte chunks are permuted within the width of the swizzle, differently in each line of 128 bytes.
            let to = line * 128 + (chunk ^ (line % chunks)) * 16 + linear % 16;
            expected[to..to + 2].copy_from_slice(&self.bytes[from..from + 2]);
        }
        expected
    }

    fn check(&self, kernel: &str, shape: &Launch, origin: [i32; 3]) {
        let map = tensor_map(&self.map).unwrap();
        let pair = |low: i32, high: u32| u64::from(low as u32) | u64::from(high) << 32;
        let bytes = self.box_bytes();
        let tail = [0, self.out, pair(origin[0], origin[1] as u32), pair(origin[2], bytes as u32)];
        let words: Vec<u64> = map.into_iter().chain(tail).collect();
        let expected = self.expected(origin).repeat(shape.cluster as usize);
        for seed in 0..SEEDS {
            run(kernel, shape, &words, seed).unwrap();
            let got = read(&self.memory, self.out, expected.len());
            assert!(got == expected, "{kernel}, box {:?} at {origin:?}, swizzle {}", self.map.tile, self.map.swizzle);
        }
    }
}

#[test]
fn boxes_of_three_dimensions_are_copied_with_every_swizzle() {
    needs_emulator!();
    for (swizzle, width) in [(0, 8), (0, 64), (32, 16), (64, 32), (128, 64)] {
        let tensor = Tensor::new([width, 4, 3], swizzle);
        // Boxes inside the tensor; before the first and after the last element of every dimension; entirely outside.
        for origin in [[0, 0, 0], [3, 2, 1], [-5, -1, -2], [66, 7, 4], [-5, 8, -1], [0, -4, 0], [200, 0, 0]] {
            tensor.check("load_3d", &SHAPE, origin);
        }
        tensor.check("load_3d_multicast", &PAIR, [-3, 1, 2]);
    }
}

#[test]
fn bulk_copies_are_copies() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let bytes: Vec<u8> = (0..4096_u32).map(|i| (i * 11 + i / 256) as u8).collect();
    let [from, out] = [4096, 4096].map(|bytes| memory.allocate(bytes).unwrap());
    memory.write(from, &bytes).unwrap();
    for (first, count) in [(0, 16), (16, 4080), (0, 4096)] {
        let mut words = [0_u64; 20];
        words[16..].copy_from_slice(&[from + first, out, 0, count << 32]);
        for seed in 0..SEEDS {
            run("load_bulk", &SHAPE, &words, seed).unwrap();
            assert_eq!(read(&memory, out, count as usize), bytes[first as usize..(first + count) as usize]);
        }
    }
}

#[test]
fn ctas_of_a_cluster_exchange_values() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let bytes = 2 * THREADS * 16;
    let out = memory.allocate(bytes as u64).unwrap();
    let value = |rank: usize, thread: usize| {
        let peer = 1 - rank;
        [thread as f32, peer as f32, 0.5 + (thread * thread + peer) as f32, -1.0]
    };
    let expected: Vec<u8> = (0..2 * THREADS).flat_map(|i| value(i / THREADS, i % THREADS)).flat_map(f32::to_le_bytes).collect();
    for seed in 0..SEEDS {
        run("exchange", &PAIR, &[out], seed).unwrap();
        assert_eq!(read(&memory, out, bytes), expected);
    }
}

#[test]
fn a_barrier_tells_whether_any_predicate_is_true() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let words = (THREADS + 1) * THREADS;
    let out = memory.allocate(4 * words as u64).unwrap();
    let expected: Vec<u8> = (0..words).flat_map(|i| u32::from(i / THREADS < THREADS).to_le_bytes()).collect();
    for seed in 0..SEEDS {
        run("any_thread", &SHAPE, &[out], seed).unwrap();
        assert_eq!(read(&memory, out, 4 * words), expected);
    }
}

/// Values to convert to a format with this many magnitudes: every magnitude, all midpoints between two, their neighbors, values out of
/// range, and random values with f32 exponents in this range. All have both signs.
fn converted_values(codes: &Codes, magnitudes: u8, exponents: Range<u32>) -> Vec<f32> {
    let magnitudes: Vec<f32> = (0..magnitudes).map(|code| codes.decode(code) as f32).collect();
    let middles = magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let mut values: Vec<f32> = magnitudes.iter().copied().chain(middles).flat_map(|v| [v, v.next_up(), v.next_down()]).collect();
    let largest = codes.largest() as f32;
    values.extend([largest * 1.002, largest * 1.1, 2.0 * largest, 1e9, f32::MAX, f32::INFINITY]);
    values.extend([f32::MIN_POSITIVE, f32::from_bits(1)]);
    let mut random = Random::new(1);
    let bits = |_| (exponents.start << 23) + random.next() as u32 % ((exponents.end - exponents.start) << 23);
    values.extend((0..4096).map(bits).map(f32::from_bits));
    values.extend(values.clone().iter().map(|v| -v));
    values
}

/// Converts every code to a value, and values to codes. The instruction and the software that replaces it on older GPUs agree with a
/// search.
#[test]
fn e4m3_is_converted_to_the_nearest_code() {
    needs_emulator!();
    let codes = Codes::of(DType::E4m3);
    // From 2^-14, below half of the smallest code, up to 2^11.
    let mut values = converted_values(codes, 0x7f, 113..138);
    values.extend([464.0, -464.0]);
    let finite = values.len();
    values.extend([f32::NAN, -f32::NAN]);

    let memory = DeviceMemory::default();
    let addresses = [4, 2, 1].map(|bytes| memory.allocate((bytes * values.len()) as u64).unwrap());
    let [from, by_instruction, in_software] = addresses;
    let decoded = memory.allocate(4 * 256).unwrap();
    memory.write(from, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    run("convert_e4m3", &SHAPE, &[from, by_instruction, in_software, decoded, values.len() as u64], 0).unwrap();

    let (pairs, software) = (read(&memory, by_instruction, 2 * values.len()), read(&memory, in_software, values.len()));
    for (i, &v) in values[..finite].iter().enumerate() {
        let [code, negative] = [v, -v].map(|v| codes.encode(f64::from(v)));
        assert_eq!(pairs[2 * i..2 * i + 2], [code, negative], "{v}");
        assert_eq!(software[i], code, "{v}");
    }
    for code in pairs[2 * finite..].iter().chain(&software[finite..]) {
        assert_eq!(code & 0x7f, 0x7f, "NaN");
    }
    for (code, bytes) in read(&memory, decoded, 4 * 256).chunks_exact(4).enumerate() {
        let (got, want) = (f32::from_le_bytes(bytes.try_into().unwrap()), codes.decode(code as u8) as f32);
        assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{code:#04x}: {got}, not {want}");
    }
}

/// Converts e2m1 in the same ways and compares it with the CPU's codes, too. NaN becomes the largest value, without a sign.
#[test]
fn e2m1_is_converted_to_the_nearest_code() {
    needs_emulator!();
    let codes = Codes::of(DType::E2m1);
    // From 2^-4, below half of the smallest code, up to 2^5.
    let mut values = converted_values(codes, 8, 123..132);
    values.extend([f32::NAN, -f32::NAN]);
    let count = values.len();

    let memory = DeviceMemory::default();
    let [from, by_instruction, in_software] = [4, 1, 1].map(|bytes| memory.allocate((bytes * count) as u64).unwrap());
    let decoded = memory.allocate(4 * 16).unwrap();
    memory.write(from, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    run("convert_e2m1", &SHAPE, &[from, by_instruction, in_software, decoded, count as u64], 0).unwrap();

    let (pairs, software) = (read(&memory, by_instruction, count), read(&memory, in_software, count));
    for (i, &v) in values.iter().enumerate() {
        let code = |v: f32| if v.is_nan() { 7 } else { codes.encode(f64::from(v)) };
        let pair = code(v) << 4 | code(-v);
        let mut on_the_cpu = [0];
        DType::E2m1.encode(&[v, -v], &mut on_the_cpu);
        assert_eq!((pairs[i], on_the_cpu[0], software[i]), (pair, pair, code(v)), "{v}");
    }
    for (code, bytes) in read(&memory, decoded, 4 * 16).chunks_exact(4).enumerate() {
        let (got, want) = (f32::from_le_bytes(bytes.try_into().unwrap()), codes.decode(code as u8) as f32);
        assert_eq!(got.to_bits(), want.to_bits(), "{code:#x}: {got}, not {want}");
    }
}

#[test]
fn a_tensor_map_that_the_hardware_refuses_is_refused() {
    needs_emulator!();
    type Change = fn(&mut TensorMap);
    let mistakes: &[(Change, &str)] = &[
        (|map| map.rank = 1, "the rank is 2 or 3, not 1"),
        (|map| map.rank = 4, "the rank is 2 or 3, not 4"),
        (|map| map.element_bytes = 3, "elements have 1, 2, 4 or 8 bytes, not 3"),
        (|map| map.address += 8, "the address is a multiple of 16"),
        (|map| map.address = 0, "the address is a multiple of 16, not 0"),
        (|map| map.size[2] = 0, "sizes are 1 to 2^32, not 0"),
        (|map| map.size[0] = (1 << 32) + 1, "sizes are 1 to 2^32, not 4294967297"),
        (|map| map.tile[1] = 257, "the sides of a box are 1 to 256, not 257"),
        (|map| map.tile[2] = 0, "the sides of a box are 1 to 256, not 0"),
        (|map| map.pitch[0] += 8, "pitches are multiples of 16 below 2^40, not 168"),
        (|map| map.pitch[1] = 1 << 40, "pitches are multiples of 16 below 2^40, not 1099511627776"),
        (|map| map.tile[0] = 12, "the rows of a box are a multiple of 16 bytes, not 24"),
        (|map| map.tile[0] = 128, "the rows of a box fit the swizzle, not 256"),
        (|map| map.swizzle = 16, "the swizzle is 0, 32, 64 or 128 bytes, not 16"),
    ];
    let sound = Tensor::new([64, 4, 3], 128).map;
    tensor_map(&sound).unwrap();
    for (change, message) in mistakes {
        let mut map = sound;
        change(&mut map);
        let refused = tensor_map(&map).expect_err(message);
        assert!(refused.contains(message), "{message}: {refused}");
    }
}

/// The emulator gives up on the kernel. Later launches run as if nothing had happened.
#[test]
fn a_kernel_that_does_not_end_is_an_error() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let out = memory.allocate(4 * (THREADS * (THREADS + 1)) as u64).unwrap();
    memory.fill(out, 0, 4).unwrap();
    set_step_limit(1_000_000);
    for kernel in ["endless_accesses", "endless_yields"] {
        let error = run(kernel, &SHAPE, &[out], 81).unwrap_err();
        let is_named = error.starts_with(kernel) && error.contains("more than 1000000 steps") && error.contains("(seed 81)");
        assert!(is_named, "{error}");
        run("any_thread", &SHAPE, &[out], 0).unwrap();
    }
}

/// The emulator cannot interrupt a loop that does not call it, so it ends the process. The test runs itself in another process.
#[test]
fn a_loop_without_memory_ends_the_process() {
    const CHILD: &str = "KILN_TEST_ENDLESS";
    needs_emulator!();
    if std::env::var_os(CHILD).is_some() {
        // The loop never ends, so any patience will do.
        set_patience(Duration::from_millis(50));
        run("endless_registers", &SHAPE, &[0], 82).unwrap();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture", "instructions::a_loop_without_memory_ends_the_process"]).env(CHILD, "1");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(text.contains("endless_registers does not end, in a loop without accesses to memory (seed 82)"), "{text}");
}
