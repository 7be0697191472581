//! Quantizes plain weights as the checkpoint writer and `--quantize` do.

use super::nvfp4::{input, scales_in_rows};
use super::{bytes, fp8_vectors, memory, nvfp4_vectors, quantized, scale, shape};
use common::relative_l2;
use kiln::internals::backend::{Backend, Gemm, Linear, Op, Role};
use kiln::internals::tensor::nvfp4::{BLOCK, TILE_ROWS, scale_bytes};
use kiln::internals::tensor::quantize::{encode, encode_nvfp4, encode_scaled, largest_magnitude};
use kiln::internals::tensor::{Arena, DType, Region, Scale, Scales, Stored, WeightSlice};

const PLAIN: [DType; 3] = [DType::Bf16, DType::F32, DType::F16];

fn plain(values: &[f32], dtype: DType, rows: usize) -> WeightSlice {
    WeightSlice::plain(bytes(dtype.encoded(values)), dtype, rows)
}

/// Values of many magnitudes, all of which f16 and bf16 hold.
fn values(count: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let value = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let magnitude = (state >> 24) as f32 / 256.0 * (-((state >> 20 & 15) as f32)).exp2();
        if state >> 19 & 1 == 0 { magnitude } else { -magnitude }
    };
    (0..count).map(value).collect()
}

#[test]
fn fp8_weights_equal_those_of_other_programs() {
    for case in &fp8_vectors().cases {
        let ([rows, _], name) = (shape(case, "shape"), &case["name"]);
        let part = WeightSlice::plain(bytes(memory(case, "input_bf16_hex")), DType::Bf16, rows);
        let found = DType::E4m3.scale_for(largest_magnitude(std::slice::from_ref(&part))).unwrap();
        assert_eq!(found, scale(case, "weight_scale_f32"), "{name}");
        let mut codes = vec![0xaa; part.bytes.len() / 2];
        encode_scaled(&part, 0..rows, DType::E4m3, found, &mut codes);
        assert_eq!(codes, memory(case, "q_from_bf16_cuda_hex"), "{name}");
        // A range of rows has the same bytes as in the whole.
        let (inside, row) = (1..rows - 1, codes.len() / rows);
        let mut some = vec![0xaa; inside.len() * row];
        encode_scaled(&part, inside.clone(), DType::E4m3, found, &mut some);
        assert_eq!(some, codes[inside.start * row..inside.end * row], "{name}");
    }
}

#[test]
fn nvfp4_weights_equal_those_of_other_programs() {
    for case in &nvfp4_vectors().cases {
        let ([rows, cols], values, name) = (shape(case, "padded_shape"), input(case), &case["name"]);
        let part = plain(&values, DType::Bf16, rows);
        let tensor = DType::E2m1.scale_for(largest_magnitude(std::slice::from_ref(&part))).unwrap();
        assert_eq!(tensor, scale(case, "weight_scale_2_f32"), "{name}");
        let (mut codes, mut scales) = (vec![0xaa; rows * cols / 2], vec![0xaa; scale_bytes(rows, cols)]);
        encode_nvfp4(&part, 0..rows, tensor, &mut codes, &mut scales);
        assert_eq!(codes, memory(case, "packed_hi_first_hex"), "{name}");
        assert_eq!(scales, memory(case, "weight_scale_swizzled_hex"), "{name}");
    }
}

/// Row tiles that are quantized separately give the bytes of the whole weight. This holds for every plain type, and for rows
/// longer than one decoding buffer.
#[test]
fn tiles_of_rows_are_quantized_by_themselves() {
    let (rows, cols) = (2 * TILE_ROWS + 5, 1024 + 5 * BLOCK);
    let values = values(rows * cols);
    for dtype in PLAIN {
        let part = plain(&values, dtype, rows);
        let largest = largest_magnitude(std::slice::from_ref(&part));
        assert_eq!(largest, values.iter().fold(0.0, |most, value| value.abs().max(most)), "{dtype:?}");
        let (one, tensor) = (DType::E4m3.scale_for(largest).unwrap(), DType::E2m1.scale_for(largest).unwrap());

        let [fp8] = &quantized(&values, cols, Stored::fp8(one))[..] else { panic!("no scales in memory") };
        let mut codes = vec![0xaa; rows * cols];
        encode_scaled(&part, 0..rows, DType::E4m3, one, &mut codes);
        assert!(codes == *fp8, "{dtype:?}");

        let [nvfp4, tiles] = &quantized(&values, cols, Stored::nvfp4(tensor))[..] else { panic!("no scales") };
        let expected = scales_in_rows(tiles, rows, cols);
        for first in (0..rows).step_by(TILE_ROWS) {
            let range = first..rows.min(first + TILE_ROWS);
            let (mut codes, mut scales) = (vec![0xaa; range.len() * cols / 2], vec![0xaa; scale_bytes(range.len(), cols)]);
            encode_nvfp4(&part, range.clone(), tensor, &mut codes, &mut scales);
            assert!(codes == nvfp4[first * cols / 2..][..codes.len()], "{dtype:?} {range:?}");
            let found = scales_in_rows(&scales, range.len(), cols);
            assert!(found == expected[first * cols / BLOCK..][..found.len()], "{dtype:?} {range:?}");
        }
    }
}

/// Values whose scale underflows are zero in every format. Just above them the scale is the smallest number, which is far from the
/// exact quotient. Such values are clamped, and none becomes NaN.
#[test]
fn values_of_almost_zero() {
    for (bits, is_zero) in [(1, true), (200, true), (300, false), (600, false)] {
        let value = f32::from_bits(bits);
        let part = plain(&[value; 2 * BLOCK], DType::F32, 2);
        let (mut codes, mut scales) = ([0xaa; 2 * BLOCK], [0xaa; 8]);
        assert!(encode(&part, 0..2, Stored { dtype: DType::E4m3, scales: Scales::Rows }, &mut codes, &mut scales));
        let want = if is_zero { (Scale::ONE, 0) } else { (Scale::new(f32::from_bits(1)).unwrap(), codes[0]) };
        assert_eq!(DType::E4m3.scale_for(value), Some(want.0), "{bits}");
        assert_eq!(scales.as_chunks::<4>().0, &[want.0.get().to_le_bytes(); 2], "{bits}");
        assert_eq!((codes, codes[0] == 0, codes[0] < 0x7f), ([want.1; 2 * BLOCK], is_zero, true), "{bits}");

        assert_eq!(DType::E2m1.scale_for(value), Some(Scale::ONE), "{bits}");
        let (mut codes, mut scales) = ([0xaa; BLOCK], vec![0xaa; scale_bytes(2, BLOCK)]);
        encode_nvfp4(&part, 0..2, Scale::ONE, &mut codes, &mut scales);
        assert!(codes == [0; BLOCK] && scales.iter().all(|&scale| scale == 0), "{bits}");
    }
}

#[test]
fn scales_that_there_are_not() {
    for dtype in [DType::E4m3, DType::E2m1] {
        assert_eq!(dtype.scale_for(0.0), Some(Scale::ONE));
        for largest in [f32::NAN, f32::INFINITY] {
            assert_eq!(dtype.scale_for(largest), None, "{largest}");
        }
    }
    assert_eq!(largest_magnitude(&[]), 0.0);
    // A value without a possible scale is found in any part, at any place.
    for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (part, at) in [(0, 0), (1, 3000), (1, 4095)] {
            let mut parts = [vec![1.0; 1024], vec![-2.0; 4096]];
            assert_eq!(largest_magnitude(&parts.each_ref().map(|values| plain(values, DType::F32, 16))), 2.0);
            parts[part][at] = value;
            for dtype in PLAIN {
                assert!(largest_magnitude(&parts.each_ref().map(|values| plain(values, dtype, 16))).is_nan(), "{value}");
            }
        }
    }
}

/// Weights are quantized while they are uploaded. The CPU then multiplies by their values in f32.
#[test]
fn the_cpu_multiplies_by_weights_in_every_format() {
    let (rows, cols) = (130, 96);
    for (dtype, _) in DType::targets() {
        let (mut cpu, mut weights, mut arena) = (common::cpu(), Arena::new(Region::Weights), Arena::new(Region::Arena));
        let quantized = weights.alloc_stored(rows, cols, Stored::by_rows(dtype, Scale::ONE)).unwrap();
        let expanded = weights.alloc(rows, cols, DType::F32).unwrap();
        let [x, by_quantized, by_expanded] = [cols, rows, rows].map(|cols| arena.alloc(3, cols, DType::F32).unwrap());
        cpu.reserve(Region::Arena, arena.peak()).unwrap();
        cpu.write(x, &values(x.len())).unwrap();

        let (exact, mut rounded) = (values(rows * cols), vec![0.0; rows * cols]);
        cpu.upload(quantized, Role::Linear, &[plain(&exact, DType::F32, rows)]).unwrap();
        cpu.read(quantized, &mut rounded).unwrap();
        assert!(rounded != exact && relative_l2(&rounded, &exact) < 0.2, "{dtype:?}");
        cpu.upload(expanded, Role::Linear, &[plain(&rounded, DType::F32, rows)]).unwrap();
        let results = [(quantized, by_quantized), (expanded, by_expanded)].map(|(weight, out)| {
            cpu.run(Op::Linear(&[Gemm { out, x, w: &Linear::new(weight, None) }])).unwrap();
            let mut values = vec![0.0; out.len()];
            cpu.read(out, &mut values).unwrap();
            values
        });
        assert_eq!(results[0], results[1], "{dtype:?}");
    }
}
