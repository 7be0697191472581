//! Linear layers of quantized inputs and weights on the CPU backend.

use super::nvfp4::{part, scales_in_rows};
use super::{Products, bits, bytes, cpu, differences, expanded, f32_bits, float, fp8_vectors, hex, memory};
use super::{named, nvfp4_vectors, scale, shape, stored_bytes};
use kiln::internals::backend::{Backend, Gemm, Linear, Op, Role};
use kiln::internals::tensor::formats::e4m3;
use kiln::internals::tensor::{Arena, DType, Nvfp4Layout, Region, SliceScaling, Stored, WeightSlice};
use serde_json::Value;

/// The result of one run: the stored bytes of the input, its values, and the products in f32 and in bf16.
struct Run {
    stored: Vec<Vec<u8>>,
    x: Vec<f32>,
    y: Vec<f32>,
    y_bf16: Vec<u8>,
}

/// Quantizes the input and multiplies it by the transpose of a weight.
fn run(products: &Products, input: Stored, weight: &WeightSlice) -> Run {
    let [rows, cols] = products.x_shape;
    let (mut cpu, mut arena, mut weights) = (cpu(), Arena::new(Region::Arena), Arena::new(Region::Weights));
    let w = weights.alloc_stored(weight.rows, cols, weight.stored()).unwrap();
    let x = arena.alloc_stored(rows, cols, input).unwrap();
    let y = [DType::F32, DType::Bf16].map(|dtype| arena.alloc(rows, weight.rows, dtype).unwrap());
    cpu.upload(w, Role::Linear, std::slice::from_ref(weight)).unwrap();
    cpu.reserve(Region::Arena, arena.peak()).unwrap();
    cpu.write(x, &DType::Bf16.decoded(&hex(&products.x_bf16_hex))).unwrap();
    let layer = Linear { input, ..Linear::new(w, None) };
    for out in y {
        cpu.run(Op::Linear(&[Gemm { out, x, w: &layer }])).unwrap();
    }
    let stored = stored_bytes(&mut cpu, x);
    let [x, y, rounded] = [x, y[0], y[1]].map(|tensor| {
        let mut values = vec![0.0; tensor.len()];
        cpu.read(tensor, &mut values).unwrap();
        values
    });
    Run { stored, x, y, y_bf16: DType::Bf16.encoded(&rounded) }
}

/// Compares products with the vectors, which are f64 sums of `x` and the expanded weights. The f32 error may be twice a plain
/// loop's, and in bf16 every bit must match.
fn check_products(run: &Run, x: &[f64], weight: &WeightSlice, expected: &Value) {
    let (w, k, label) = (expanded(weight).0, weight.cols(), &expected["label"]);
    let rows: Vec<Vec<f64>> = serde_json::from_value(expected["y_f64"].clone()).unwrap();
    assert_eq!(rows.iter().map(Vec::len).sum::<usize>(), run.y.len(), "{label}");
    let (mut error, mut plain) = (0.0, 0.0);
    for (at, (&expected, &found)) in rows.iter().flatten().zip(&run.y).enumerate() {
        let (row, w) = (at / weight.rows * k, &w[at % weight.rows * k..][..k]);
        let terms = || x[row..][..k].iter().zip(w).map(|(x, &w)| x * f64::from(w));
        let (sum, magnitudes): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
        // Both sums have k products and additions in f64, in different orders.
        assert!((sum - expected).abs() <= k as f64 * f64::EPSILON * magnitudes, "{label}, {at}: {sum}, not {expected}");
        let sum = run.x[row..][..k].iter().zip(w).fold(0.0, |sum, (x, w)| sum + x * w);
        error += (f64::from(found) - expected).powi(2);
        plain += (f64::from(sum) - expected).powi(2);
    }
    assert!(plain > 0.0 && error.sqrt() <= 2.0 * plain.sqrt(), "{label}: {:e}, plain {:e}", error.sqrt(), plain.sqrt());
    assert_eq!(run.y_bf16, memory(expected, "y_bf16_hex"), "{label}");
}

/// W8A8. Inputs are divided by their scale in f32, as in the CUDA kernels; the eager backend multiplies by a reciprocal in bf16.
#[test]
fn fp8_products() {
    let vectors = fp8_vectors();
    let case = named(&vectors.cases, &vectors.linear.weight_case);
    let weight = WeightSlice {
        bytes: bytes(memory(case, "q_from_bf16_cuda_hex")),
        dtype: DType::E4m3,
        rows: shape(case, "shape")[0],
        scaling: SliceScaling::Tensor(scale(case, "weight_scale_f32")),
    };
    assert_eq!(vectors.linear.runs.len(), 3);
    for expected in &vectors.linear.runs {
        let found = run(&vectors.linear, Stored::fp8(scale(expected, "input_scale_f32")), &weight);
        let [codes] = &found.stored[..] else { panic!("{}", expected["label"]) };
        assert_eq!(*codes, memory(expected, "q_cuda_hex"), "{}", expected["label"]);
        let eager = differences(codes, &memory(expected, "q_eager_hex"));
        assert_eq!(expected["n_bytes_different"], eager, "{}", expected["label"]);
        // The vectors expand the input in f64.
        let scale = f64::from(float(expected, "input_scale_f32"));
        let x: Vec<f64> = codes.iter().map(|&code| f64::from(e4m3(code)) * scale).collect();
        check_products(&found, &x, &weight, expected);
    }
}

/// W4A4, with weights in every file layout.
#[test]
fn nvfp4_products() {
    let vectors = nvfp4_vectors();
    let case = named(&vectors.cases, &vectors.gemm.weight_case);
    assert_eq!(vectors.gemm.runs.len(), 3);
    for layout in [Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE] {
        let weight = part(case, layout);
        for expected in &vectors.gemm.runs {
            let found = run(&vectors.gemm, Stored::nvfp4(scale(expected, "input_scale_f32")), &weight);
            let [codes, scales] = &found.stored[..] else { panic!("{}", expected["label"]) };
            // comfy-kitchen pads the rows to a multiple of sixteen.
            let padded = memory(expected, "packed_hi_first_hex");
            assert_eq!(*codes, padded[..codes.len()], "{}", expected["label"]);
            let [rows, cols] = vectors.gemm.x_shape;
            let expected_scales = scales_in_rows(&memory(expected, "act_scale_swizzled_hex"), rows, cols);
            assert_eq!(scales_in_rows(scales, rows, cols), expected_scales, "{}", expected["label"]);
            assert_eq!(bits(&found.x), f32_bits(&memory(expected, "dequant_f32_hex")), "{}", expected["label"]);
            let x: Vec<f64> = found.x.iter().copied().map(f64::from).collect();
            check_products(&found, &x, &weight, expected);
        }
    }
}
