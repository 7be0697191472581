//! Tests the kernels of compute capability 12.x on another GPU. `tools/gpu_bundle` compiles them with `KL_EMULATE`, which replaces
//! block-scaled MMAs and e2m1 conversions by software and leaves TMA, mbarriers, ldmatrix and everything else to the hardware.

use kiln::error::Error;
use kiln::internals::backend::cuda::driver::{DeviceInfo, Driver};
use kiln::internals::backend::cuda::{self, Cuda, Kernel, KernelChoice, System};
use kiln::internals::backend::{Backend, Gemm, Linear, Op, Role};
use kiln::internals::tensor::nvfp4::{self, scale_offset, tiles_along};
use kiln::internals::tensor::{
    Arena, Bytes, DType, Nvfp4Layout, Region, Scale, Scaling, SliceScaling, Stored, Tensor, WeightSlice,
};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// The folder of the emulated kernels, if they are to be tested.
pub fn kernels() -> Option<PathBuf> {
    std::env::var_os("KILN_EMULATED_KERNELS").map(PathBuf::from)
}

/// This GPU as a GPU of compute capability 12.0, with `sms` SMs or all it has.
pub fn cuda(folder: &Path, sms: Option<u32>) -> Cuda {
    let system = System::open(0).unwrap();
    let own = system.device().clone();
    let multiprocessors = sms.unwrap_or(own.multiprocessors);
    let device = DeviceInfo { capability: (12, 0), shared: DeviceInfo::SM120_SHARED, multiprocessors, ..own };
    let images = |file: &'static str| {
        if !file.ends_with("_sm120") {
            return cuda::built_in(file);
        }
        let path = folder.join(format!("{file}.fatbin"));
        std::fs::read(&path).map(Cow::Owned).map_err(|e| Error::read(&path, e))
    };
    let mut cuda = Cuda::new(Rc::new(system.with_capability(device)), &images, Arc::default()).unwrap();
    cuda.enable_gated(true);
    cuda
}

/// Pseudo-random numbers with the given numbers of bits.
fn noise(seed: u64) -> impl FnMut(u32) -> u64 {
    let mut state = seed;
    move |bits| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> (64 - bits)
    }
}

/// A row of a matrix: its codes, two per byte, and a scale for each block.
struct Row<'a> {
    codes: &'a [u8],
    scales: Vec<u8>,
}

/// e2m1 elements as multiples of one half.
fn halves(code: u8) -> i64 {
    let magnitude = [0, 1, 2, 3, 4, 6, 8, 12][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// A scale as a multiple of an eighth, and the exponent of a power of two.
fn scale_term(code: u8) -> (i64, i32) {
    let (field, mantissa) = (i32::from(code >> 3 & 15), i64::from(code & 7));
    match (field, mantissa) {
        (0, 0) => (0, -126),
        (0, _) => (mantissa, -6),
        _ => (mantissa + 8, field - 7),
    }
}

/// `significand * 2^places`, truncated toward zero.
fn shifted(significand: i128, places: i32) -> i128 {
    if places >= 0 { significand << places } else { significand / (1i128 << (-places).min(120)) }
}

/// The product of two rows by the published rule (MMA-Sim, arXiv 2511.10909). Over 64 of K at a time, block sums are exact. They and the
/// accumulator are aligned to the largest exponent and truncated 35 places below it, and the sum is truncated to f32.
fn product(x: &Row<'_>, w: &Row<'_>) -> f32 {
    let mut sum = 0.0f32;
    for blocks in (0..x.scales.len()).step_by(4) {
        let terms: Vec<(i64, i32)> = (blocks..blocks + 4)
            .map(|block| {
                let bytes = block * 8..block * 8 + 8;
                let pairs = x.codes[bytes.clone()].iter().zip(&w.codes[bytes]);
                let quarters: i64 = pairs.map(|(&a, &b)| halves(a & 15) * halves(b & 15) + halves(a >> 4) * halves(b >> 4)).sum();
                let (a, b) = (scale_term(x.scales[block]), scale_term(w.scales[block]));
                (quarters * a.0 * b.0, a.1 + b.1)
            })
            .collect();
        let field = (sum.to_bits() >> 23 & 255) as i32;
        let exponent = if sum == 0.0 { -126 } else { field.max(1) - 127 };
        let magnitude = i128::from(sum.to_bits() & 0x7f_ffff | if field > 0 { 1 << 23 } else { 0 });
        let accumulator = if sum < 0.0 { -magnitude } else { magnitude };
        let largest = terms.iter().map(|term| term.1).fold(exponent, i32::max);
        let mut total = shifted(accumulator, 35 - 23 + exponent - largest);
        total += terms.iter().map(|&(term, exponent)| shifted(term.into(), 35 - 8 + exponent - largest)).sum::<i128>();
        // Keeps the leading 24 bits.
        let drop = (128 - total.unsigned_abs().leading_zeros() as i32 - 24).max(0);
        sum = (total / (1i128 << drop) * (1i128 << drop)) as f64 as f32 * 2.0f32.powi(largest - 35);
    }
    sum
}

/// Uploads a weight of random codes, and returns the codes and their scales.
fn weight(be: &mut dyn Backend, to: Tensor, scale: Scale, next: &mut impl FnMut(u32) -> u64) -> (Vec<u8>, Vec<u8>) {
    let codes: Vec<u8> = (0..to.rows * to.cols / 2).map(|_| next(8) as u8).collect();
    // From 2^-4 to 2^4.
    let scales: Vec<u8> = (0..nvfp4::scale_bytes(to.rows, to.cols)).map(|_| 0x18 + next(6) as u8).collect();
    let bytes = |bytes: &[u8]| Bytes::new(Arc::new(bytes.to_vec()));
    let scaling = SliceScaling::Blocks16 { scales: bytes(&scales), tensor: scale, layout: Nvfp4Layout::COMFY };
    let part = WeightSlice { scaling, ..WeightSlice::plain(bytes(&codes), DType::E2m1, to.rows) };
    be.upload(to, Role::Linear, &[part]).unwrap();
    (codes, scales)
}

/// Checks NVFP4 products at the sizes of klein 4B. A sample of the results equals the published rule to the bit, and all results equal the
/// naive kernel's except for the rounding of either.
pub fn products_are_exact() {
    let Some(folder) = kernels() else { panic!("KILN_EMULATED_KERNELS names the folder of the kernels") };
    // The number of SMs divides the tiles, so Stream-K shares no tile. It would add in another order.
    for (kernel, [rows, cols, inner], sms) in
        [(Kernel::GemmNvfp4Sm120_256x128, [4608, 3072, 3072], 108), (Kernel::GemmNvfp4Sm120_128x128, [512, 3072, 3072], 96)]
    {
        let mut cuda = cuda(&folder, Some(sms));
        let (mut next, scale) = (noise(7), Scale::power_of_two(-6));
        let (mut region, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        let w = region.alloc_stored(cols, inner, Stored::nvfp4(scale)).unwrap();
        cuda.reserve(Region::Weights, region.peak()).unwrap();
        let (w_codes, w_scales) = weight(&mut cuda, w, scale, &mut next);
        let x = arena.alloc_stored(rows, inner, Stored::nvfp4(scale)).unwrap();
        let [out, naive] = std::array::from_fn(|_| arena.alloc(rows, cols, DType::Bf16).unwrap());
        cuda.reserve(Region::Arena, arena.peak()).unwrap();
        // Sums of a few numbers, so there are values of all magnitudes.
        let values: Vec<f32> = (0..x.len()).map(|_| (next(12) as f32 + next(12) as f32 - 4095.0) / 1024.0).collect();
        cuda.write(x, &values).unwrap();
        let Scaling::Blocks16 { scales, .. } = x.scaling else { unreachable!() };
        let view =
            |offset, rows, cols| Tensor { offset, rows, cols, stride: cols, dtype: DType::U8, scaling: Scaling::Unscaled, ..x };
        let mut download = |view: Tensor| {
            let mut bytes = vec![0; view.len()];
            cuda.read_bytes(view, &mut bytes).unwrap();
            bytes
        };
        let x_codes = download(view(x.offset, rows, inner / 2));
        let x_scales = download(view(scales, 1, nvfp4::scale_bytes(rows, inner)));
        let layer = Linear { input: Stored::nvfp4(scale), ..Linear::new(w, None) };
        let run = |cuda: &mut Cuda, choice, out| {
            cuda.set_choice(choice);
            let start = Instant::now();
            cuda.run(Op::Linear(&[Gemm { out, x, w: &layer }])).unwrap();
            let mut values = vec![0.0; out.len()];
            cuda.read(out, &mut values).unwrap();
            println!("{choice:?}: {rows}x{cols}x{inner} in {:.2} s with the copy", start.elapsed().as_secs_f64());
            values
        };
        let got = run(&mut cuda, KernelChoice::Only(kernel), out);
        let launched: Vec<_> = cuda.launched().filter(|(kernel, times)| kernel.is_gated() && *times > 0).collect();
        assert!(launched.iter().any(|(other, _)| *other == kernel), "{launched:?}");
        let want = run(&mut cuda, KernelChoice::Naive, naive);
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let error = (square(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / square(&mut want.iter().copied())).sqrt();
        // Both are rounded to bf16, each by at most half a unit of its eighth bit.
        assert!(error <= 2.0f64.powi(-8), "{error:.2e} apart from the naive kernel");
        let scales_of = |scales: &[u8], row: usize| {
            let blocks = 0..inner / nvfp4::BLOCK;
            blocks.map(|block| scales[scale_offset(row, block, tiles_along(inner))]).collect()
        };
        let codes_of = |row: usize| row * inner / 2..(row + 1) * inner / 2;
        const SAMPLES: usize = 4096;
        for i in 0..SAMPLES {
            // The corners first.
            let (row, col) = match i {
                0..4 => (i / 2 * (rows - 1), i % 2 * (cols - 1)),
                _ => (next(32) as usize % rows, next(32) as usize % cols),
            };
            let x_row = Row { codes: &x_codes[codes_of(row)], scales: scales_of(&x_scales, row) };
            let sum = product(&x_row, &Row { codes: &w_codes[codes_of(col)], scales: scales_of(&w_scales, col) });
            let expected = half::bf16::from_f32(sum * (scale.get() * scale.get())).to_f32();
            assert_eq!(got[row * cols + col].to_bits(), expected.to_bits(), "{rows}x{cols}x{inner}: [{row}, {col}]");
        }
        println!("{kernel:?}: {SAMPLES} of {} results are exact, all within {error:.1e} of the naive kernel", got.len());
    }
}
