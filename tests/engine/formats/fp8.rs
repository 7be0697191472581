//! FP8 weights: quantizing them, and expanding them from a checkpoint.

use super::{bits, bytes, differences, expanded, f32_bits, fp8_vectors, largest, memory, quantized, scale, shape};
use kiln::internals::tensor::formats::e4m3;
use kiln::internals::tensor::{DType, Scale, SliceScaling, Stored, WeightSlice};

/// The scale is the largest magnitude over 448. A value is divided by it in f32, as the CUDA kernels do, and the eager backend
/// for f32. For bf16 the eager backend multiplies by a reciprocal rounded to bf16, which changes some codes.
#[test]
fn weights_are_quantized_by_division_in_f32() {
    for case in &fp8_vectors().cases {
        let values = DType::Bf16.decoded(&memory(case, "input_bf16_hex"));
        let found = Scale::new(largest(&values) / 448.0).unwrap();
        assert_eq!(found, scale(case, "weight_scale_f32"), "{}", case["name"]);
        let stored = quantized(&values, shape(case, "shape")[1], Stored::fp8(found));
        let [codes] = &stored[..] else { panic!("no scales in memory") };
        assert_eq!(*codes, memory(case, "q_from_bf16_cuda_hex"), "{}", case["name"]);
        assert_eq!(*codes, memory(case, "q_from_f32_eager_hex"), "{}", case["name"]);
        let eager = differences(codes, &memory(case, "q_from_bf16_eager_hex"));
        assert!(eager > 0 && case["n_bytes_bf16eager_vs_cuda"] == eager, "{}: {eager}", case["name"]);
    }
}

/// A weight is the code times the scale in f32, rounded once to bf16. The eager backend rounds the scale to bf16 first.
#[test]
fn weights_are_expanded_with_one_rounding() {
    for case in &fp8_vectors().cases {
        let [rows, cols] = shape(case, "shape");
        let scaling = SliceScaling::Tensor(scale(case, "weight_scale_f32"));
        let codes = memory(case, "q_from_f32_eager_hex");
        let part = WeightSlice { bytes: bytes(codes), dtype: DType::E4m3, rows, scaling };
        assert_eq!(part.cols(), cols);
        let (values, halves) = expanded(&part);
        assert_eq!(bits(&values), f32_bits(&memory(case, "dequant_f32_hex")), "{}", case["name"]);
        assert_eq!(halves, memory(case, "dequant_bf16_cuda_hex"), "{}", case["name"]);
    }
}

/// Rows with row scales, at an odd address, and codes without a scale.
#[test]
fn each_row_has_its_scale() {
    let codes: Vec<u8> = (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f).collect();
    let scales = [0.0123_f32, 3.0, 1e-4];
    let stored: Vec<u8> = [0].into_iter().chain(scales.iter().flat_map(|scale| scale.to_le_bytes())).collect();
    let part = WeightSlice {
        bytes: bytes(codes.repeat(scales.len())),
        dtype: DType::E4m3,
        rows: scales.len(),
        scaling: SliceScaling::Rows(bytes(stored).slice(1..13).unwrap()),
    };
    let expected: Vec<f32> = scales.iter().flat_map(|scale| codes.iter().map(move |&code| e4m3(code) * scale)).collect();
    let (values, halves) = expanded(&part);
    assert_eq!(bits(&values), bits(&expected));
    assert_eq!(halves, DType::Bf16.encoded(&expected));

    let plain: Vec<f32> = codes.iter().map(|&code| e4m3(code)).collect();
    let (values, halves) = expanded(&WeightSlice::plain(bytes(codes), DType::E4m3, 1));
    assert_eq!(bits(&values), bits(&plain));
    // Every e4m3 number is a bf16.
    assert_eq!(bits(&DType::Bf16.decoded(&halves)), bits(&plain));
}
