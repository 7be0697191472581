//! NVFP4: the tiles of block scales, quantizing weights, and expanding them in every order in which files store them.

use super::{
    bits, bytes, cpu, differences, expanded, f32_bits, largest, memory, nvfp4_vectors, quantized, scale, shape, stored_bytes,
};
use kiln::internals::backend::Backend;
use kiln::internals::tensor::formats::e4m3;
use kiln::internals::tensor::nvfp4::{self, BLOCK, decode_block, encode_block, scale_bytes, scale_offset, tiles_along};
use kiln::internals::tensor::{Arena, DType, Nvfp4Layout, Region, Scale, SliceScaling, Stored, WeightSlice};
use serde_json::Value;
use std::collections::HashSet;

/// The fourth layout, which no known program writes.
const HIGH_FIRST_PLAIN: Nvfp4Layout = Nvfp4Layout { high_first: true, tiled: false };
const LAYOUTS: [Nvfp4Layout; 4] = [Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE, HIGH_FIRST_PLAIN];

#[test]
fn scales_stand_where_tensor_cores_read_them() {
    // A matrix with 64 blocks per row.
    let tiles = tiles_along(64 * BLOCK);
    assert_eq!(tiles, 16);
    let places = [(0, 1), (32, 0), (64, 0), (96, 3), (1, 0), (127, 3), (0, 4), (128, 0)];
    let offsets = places.map(|(row, block)| scale_offset(row, block, tiles));
    assert_eq!(offsets, [1, 4, 8, 15, 16, 511, 512, 8192]);
}

#[test]
fn every_block_has_a_place_of_its_own() {
    // The size is a number of whole tiles, each of 128 rows by four blocks.
    let shapes = [((1, 16), 512), ((4, 32), 512), ((128, 64), 512), ((129, 65), 2048), ((144, 80), 2048), ((300, 1000), 24_576)];
    for ((rows, cols), size) in shapes {
        assert_eq!(scale_bytes(rows, cols), size, "{rows}x{cols}");
        let (blocks, tiles) = (cols.div_ceil(BLOCK), tiles_along(cols));
        let places = (0..rows).flat_map(|row| (0..blocks).map(move |block| scale_offset(row, block, tiles)));
        let places: HashSet<usize> = places.collect();
        assert_eq!(places.len(), rows * blocks, "{rows}x{cols}");
        assert!(places.into_iter().all(|place| place < size), "{rows}x{cols}");
    }
    assert_eq!([scale_bytes(0, 64), scale_bytes(64, 0)], [0, 0]);
    // All layers of klein consist of whole tiles, so their scales take as many bytes as there are blocks.
    for (rows, cols) in [(128, 64), (27_648, 3072), (4096, 12_288)] {
        assert_eq!(scale_bytes(rows, cols), rows * cols / BLOCK);
    }
}

/// All products of an element and a block scale are exact in bf16, and in f16 as well.
#[test]
fn products_of_elements_and_scales_are_exact_in_bf16() {
    let scales: Vec<u8> = (0..0x7f).collect();
    // Every row has all elements: sixteen codes in eight bytes.
    let codes: Vec<u8> = (0..8).map(|pair| (2 * pair) << 4 | (2 * pair + 1)).collect();
    for tiled in [false, true] {
        let layout = Nvfp4Layout { high_first: true, tiled };
        let mut stored = vec![0; if tiled { scale_bytes(scales.len(), BLOCK) } else { scales.len() }];
        for (row, &scale) in scales.iter().enumerate() {
            stored[if tiled { scale_offset(row, 0, 1) } else { row }] = scale;
            assert_eq!(nvfp4::unit(1.0, scale).to_bits(), e4m3(scale).to_bits());
        }
        let scaling = SliceScaling::Blocks16 { scales: bytes(stored), tensor: Scale::ONE, layout };
        let (rows, dtype) = (scales.len(), DType::E2m1);
        let (values, halves) = expanded(&WeightSlice { bytes: bytes(codes.repeat(rows)), dtype, rows, scaling });
        assert_eq!(bits(&DType::Bf16.decoded(&halves)), bits(&values));
        assert_eq!(bits(&DType::F16.decoded(&DType::F16.encoded(&values))), bits(&values));
        let mut nonzero = 0;
        for (value, (scale, code)) in values.iter().zip(scales.iter().flat_map(|&scale| (0..16).map(move |code| (scale, code)))) {
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8];
            // The product of two numbers of 2 and 4 bits fits into 53 bits.
            let product = f64::from(e4m3(scale)) * if code < 8 { magnitude } else { -magnitude };
            assert_eq!(f64::from(*value).to_bits(), product.to_bits(), "{scale:#04x} times {code}");
            if *value > 0.0 {
                nonzero += 1;
                let significand = value.to_bits() & 0x7f_ffff | 0x80_0000;
                assert!(24 - significand.trailing_zeros() <= 6, "{value}");
                assert!((0.5_f32.powi(10)..=2688.0).contains(value), "{value}");
            }
        }
        assert_eq!(nonzero, 882);
    }
}

/// The values of a case, padded with zeros to the stored number of rows.
pub fn input(case: &Value) -> Vec<f32> {
    let ([rows, cols], [_, stored_cols]) = (shape(case, "padded_shape"), shape(case, "logical_shape"));
    assert_eq!(cols, stored_cols);
    let mut values = DType::Bf16.decoded(&memory(case, "input_bf16_hex"));
    values.resize(rows * cols, 0.0);
    values
}

/// The block scales in an array of tiles, row by row and without the padding.
pub fn scales_in_rows(tiles: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let places = (0..rows).flat_map(|row| (0..cols / BLOCK).map(move |block| (row, block)));
    places.map(|(row, block)| tiles[scale_offset(row, block, tiles_along(cols))]).collect()
}

/// A value is divided by the f32 product of both scales, as in the eager backend. The CUDA kernels multiply by the product's
/// reciprocal instead, which changes some codes. Both are nearest up to the rounding of the quotient.
#[test]
fn weights_are_quantized_by_division_in_f32() {
    for case in &nvfp4_vectors().cases {
        let ([rows, cols], values, name) = (shape(case, "padded_shape"), input(case), &case["name"]);
        let tensor = Scale::new(largest(&values) / (448.0 * 6.0)).unwrap();
        assert_eq!(tensor, scale(case, "weight_scale_2_f32"), "{name}");
        let stored = quantized(&values, cols, Stored::nvfp4(tensor));
        let [codes, tiles] = &stored[..] else { panic!("{name}: no scales") };
        assert_eq!(*codes, memory(case, "packed_hi_first_hex"), "{name}");
        let plain = scales_in_rows(tiles, rows, cols);
        assert_eq!(plain, memory(case, "weight_scale_plain_hex"), "{name}");

        let swizzled = memory(case, "weight_scale_swizzled_hex");
        assert_eq!(scales_in_rows(&swizzled, rows, cols), plain, "{name}");
        let padding = swizzled.iter().filter(|&&scale| scale == 0).count() - plain.iter().filter(|&&scale| scale == 0).count();
        assert_eq!(padding, swizzled.len() - plain.len(), "{name}");

        let cuda = &case["cuda_reciprocal_quantizer"];
        match cuda["packed_bytes_different"].as_u64().unwrap() {
            0 => assert!(cuda["packed_hi_first_hex"].is_null(), "{name}"),
            different => assert_eq!(differences(codes, &memory(cuda, "packed_hi_first_hex")), different, "{name}"),
        }
    }
}

/// A slice of a larger tensor is stored like a separate tensor.
#[test]
fn a_slice_is_quantized_in_place() {
    for case in &nvfp4_vectors().cases {
        let ([rows, cols], values, name) = (shape(case, "padded_shape"), input(case), &case["name"]);
        let (mut cpu, mut arena) = (cpu(), Arena::new(Region::Arena));
        let stored = Stored::nvfp4(scale(case, "weight_scale_2_f32"));
        let whole = arena.alloc_stored(256 + rows, 128 + cols, stored).unwrap();
        let slice = whole.rows(128..128 + rows).cols(64..64 + cols);
        cpu.reserve(Region::Arena, arena.peak()).unwrap();
        cpu.write(slice, &values).unwrap();
        let read = stored_bytes(&mut cpu, slice);
        let [codes, tiles] = &read[..] else { panic!("{name}: no scales") };
        assert_eq!(*codes, memory(case, "packed_hi_first_hex"), "{name}");
        assert_eq!(scales_in_rows(tiles, rows, cols), memory(case, "weight_scale_plain_hex"), "{name}");
        let mut decoded = vec![0.0; values.len()];
        cpu.read(slice, &mut decoded).unwrap();
        let expected = f32_bits(&memory(case, "dequant_f32_hex"));
        assert_eq!(bits(&decoded)[..expected.len()], expected, "{name}");
    }
}

/// A case in the layout of a file.
pub fn part(case: &Value, layout: Nvfp4Layout) -> WeightSlice {
    let codes = memory(case, if layout.high_first { "packed_hi_first_hex" } else { "packed_lo_first_hex" });
    let scales = memory(case, if layout.tiled { "weight_scale_swizzled_hex" } else { "weight_scale_plain_hex" });
    let scaling = SliceScaling::Blocks16 { scales: bytes(scales), tensor: scale(case, "weight_scale_2_f32"), layout };
    WeightSlice { bytes: bytes(codes), dtype: DType::E2m1, rows: shape(case, "padded_shape")[0], scaling }
}

/// A weight is the element times the rounded product of both scales, in f32, rounded once to bf16, as in the CUDA kernels. The
/// eager backend multiplies in bf16.
#[test]
fn weights_are_expanded_from_every_layout() {
    for case in &nvfp4_vectors().cases {
        for layout in LAYOUTS {
            let part = part(case, layout);
            assert_eq!(part.cols(), shape(case, "padded_shape")[1]);
            let (values, halves) = expanded(&part);
            let expected = f32_bits(&memory(case, "dequant_f32_hex"));
            let (found, padding) = values.split_at(expected.len());
            assert_eq!(bits(found), expected, "{} {layout:?}", case["name"]);
            let expected = memory(case, "dequant_bf16_hex");
            assert_eq!(halves[..expected.len()], expected, "{} {layout:?}", case["name"]);
            // Rows that pad to a multiple of sixteen are zero.
            assert!(padding.iter().all(|value| value.to_bits() == 0), "{} {layout:?}", case["name"]);
        }
    }
}

#[test]
fn every_layout_becomes_that_of_a_tensor() {
    for case in &nvfp4_vectors().cases {
        for layout in LAYOUTS {
            let given = part(case, layout);
            let converted = given.in_tensor_layout();
            assert_eq!(given.is_readable_as(given.stored()), layout == Nvfp4Layout::COMFY);
            assert!(converted.is_readable_as(given.stored()), "{} {layout:?}", case["name"]);
            assert_eq!(*converted.bytes, memory(case, "packed_hi_first_hex"), "{} {layout:?}", case["name"]);
            let SliceScaling::Blocks16 { scales, .. } = &converted.scaling else { panic!("{:?}", converted.scaling) };
            assert_eq!(**scales, memory(case, "weight_scale_swizzled_hex"), "{} {layout:?}", case["name"]);
        }
    }
}

/// In these vectors the scales of empty blocks are one, and none is below the smallest e4m3. The weights are equal numbers.
#[test]
fn weights_of_modelopt_are_the_same_numbers() {
    for case in &nvfp4_vectors().cases {
        let ([rows, _], file) = (shape(case, "logical_shape"), &case["modelopt"]);
        let (scales, tensor) = (bytes(memory(file, "weight_scale_plain_hex")), scale(file, "weight_scale_2_f32"));
        let scaling = SliceScaling::Blocks16 { scales, tensor, layout: Nvfp4Layout::MODELOPT };
        let part = WeightSlice { bytes: bytes(memory(file, "packed_hex")), dtype: DType::E2m1, rows, scaling };
        // Equal as numbers, because codes of zero have another sign there.
        assert_eq!(expanded(&part).0, DType::F32.decoded(&memory(case, "dequant_f32_hex")), "{}", case["name"]);
    }
}

#[test]
fn blocks_of_zeros_and_of_values_that_cannot_be_stored() {
    let (mut codes, mut values) = ([0xff; 8], [1.0; BLOCK]);
    // Zeros, and values so small that the scale underflows: no division by zero.
    for value in [0.0, -0.0, 1e-9, -1e-9] {
        assert_eq!((encode_block(&[value; BLOCK], 1.0, &mut codes), codes), (0, [0; 8]), "{value}");
    }
    // A NaN makes its whole block NaN, wherever it is: it must not vanish.
    for at in 0..BLOCK {
        let mut one = [1.0; BLOCK];
        one[at] = -f32::NAN;
        let scale = encode_block(&one, 1.0, &mut codes);
        decode_block(&codes, nvfp4::unit(1.0, scale), &mut values);
        assert!(values.iter().all(|value| value.is_nan()), "{at}: {values:?}");
    }
    // Values out of range saturate in scale and element.
    let mut large = [448.0; BLOCK];
    (large[3], large[4], large[5]) = (f32::INFINITY, -1e9, 2688.0);
    let scale = encode_block(&large, 1.0, &mut codes);
    decode_block(&codes, nvfp4::unit(1.0, scale), &mut values);
    assert_eq!((scale, &values[2..7]), (0x7e, &[448.0, 2688.0, -2688.0, 2688.0, 448.0][..]));
}
