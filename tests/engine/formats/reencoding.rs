//! NVFP4 weights re-encoded as e4m3: every element under every block scale, and the scale of the result.

use super::{bytes, cpu, largest, stored_bytes};
use kiln::internals::backend::{Backend, Role};
use kiln::internals::tensor::nvfp4::{BLOCK, encode_block, scale_bytes, scale_offset, tiles_along};
use kiln::internals::tensor::{Arena, DType, Nvfp4Layout, Region, Scale, Scales, SliceScaling, Stored, WeightSlice};

fn scale(value: f32) -> Scale {
    Scale::new(value).unwrap()
}

/// The value of an e4m3 code below NaN's code, as the specification defines it.
fn e4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3), f64::from(code & 7) / 8.0);
    if exponent == 0 { fraction * 2f64.powi(-6) } else { (1.0 + fraction) * 2f64.powi(exponent - 7) }
}

/// The magnitude of an e2m1 code.
fn e2m1(code: u8) -> f64 {
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)]
}

/// The e4m3 code nearest to a magnitude: the even code on a tie, and the last code beyond the range.
fn nearest(magnitude: f64) -> u8 {
    let distance = |code: u8| ((e4m3(code) - magnitude).abs(), code % 2);
    (0..0x7f).min_by(|a, b| distance(*a).partial_cmp(&distance(*b)).unwrap()).unwrap()
}

/// Rows of one block each with all sixteen elements, under these block scales, in tiles with NaN padding.
fn all_elements(scales: &[u8], tensor: Scale) -> WeightSlice {
    let codes: Vec<u8> = (0..8).map(|pair| (2 * pair) << 4 | (2 * pair + 1)).collect();
    let mut tiles = vec![0x7f; scale_bytes(scales.len(), BLOCK)];
    scales.iter().enumerate().for_each(|(row, scale)| tiles[scale_offset(row, 0, 1)] = *scale);
    let scaling = SliceScaling::Blocks16 { scales: bytes(tiles), tensor, layout: Nvfp4Layout::COMFY };
    WeightSlice { bytes: bytes(codes.repeat(scales.len())), dtype: DType::E2m1, rows: scales.len(), scaling }
}

fn rows(part: &WeightSlice, to: Stored) -> Vec<u8> {
    let mut codes = vec![0; part.rows * part.cols()];
    codes.chunks_exact_mut(part.cols()).enumerate().for_each(|(row, out)| part.convert(row, to, out));
    codes
}

/// A scale times a power of two.
fn times(scale: Scale, power: i32) -> Scale {
    Scale::new(scale.get() * 2f32.powi(power)).unwrap()
}

#[test]
fn every_product_is_rounded_to_the_nearest_code() {
    let (scales, tensor) = ((0..0x7f).collect::<Vec<u8>>(), scale(0.000_049_4));
    let part = all_elements(&scales, tensor);
    for power in -16..=6 {
        let codes = rows(&part, Stored::fp8(times(tensor, power)));
        let mut exact = 0;
        for (row, codes) in codes.chunks_exact(BLOCK).enumerate() {
            for (element, &code) in (0..16).zip(codes) {
                let product = e2m1(element) * e4m3(scales[row]) * 2f64.powi(-power);
                // The sign is kept, also of zero.
                assert_eq!(code, nearest(product) | (element & 8) << 4, "{element} times {:#04x} by 2^{power}", scales[row]);
                exact += usize::from(element < 8 && product > 0.0 && e4m3(code) == product);
            }
        }
        // There are 882 products of nonzero magnitudes; 225 have more bits than e4m3, and 50 are out of its range.
        assert!(power != 0 || exact == 607, "{exact}");
    }
}

#[test]
fn the_scale_is_the_smallest_that_keeps_the_largest_product_in_range() {
    let tensor = scale(0.000_049_4);
    let power_of = |part: &WeightSlice| {
        let Some(Stored { dtype: DType::E4m3, scales: Scales::Tensor(scale) }) = part.as_fp8() else { panic!("{part:?}") };
        let power = scale.get() / tensor.get();
        assert_eq!(power.log2().fract(), 0.0, "a power of two");
        f64::from(power)
    };
    for largest in 1..0x7f {
        // The largest scale counts wherever it is, but not in the padding.
        let mut scales = vec![1; 131];
        scales[usize::from(largest) * 37 % 131] = largest;
        let power = power_of(&all_elements(&scales, tensor));
        let product = 6.0 * e4m3(largest);
        assert!(product <= 448.0 * power && product > 448.0 * power / 2.0, "{largest:#04x}: {power}");
    }
    // Quantizers choose the tensor scale so that the largest block scale is 448.
    assert_eq!(power_of(&all_elements(&[3, 0x7e], tensor)), 8.0);
    assert!(all_elements(&[0, 0], tensor).as_fp8().is_some());

    // If the tensor scale leaves no room for the power, there is no such format. Other parts have none either.
    assert_eq!(all_elements(&[0x7e], scale(f32::MAX)).as_fp8(), None);
    let plain = WeightSlice::plain(bytes(vec![0; 32]), DType::Bf16, 1);
    assert_eq!(plain.as_fp8(), None);
    let part = all_elements(&[0x7e], tensor);
    assert!(part.converts_to(Stored::fp8(tensor)) && part.converts_to(Stored::plain(DType::F32)));
    assert!(!part.converts_to(Stored::fp8(scale(0.000_05))) && !part.converts_to(Stored::nvfp4(tensor)));
    assert!(!plain.converts_to(Stored::fp8(tensor)) && !part.converts_to(Stored { dtype: DType::E4m3, scales: Scales::Rows }));
}

/// Normally distributed weights, as the sum of twelve uniform numbers, in a file layout.
fn weights(rows: usize, cols: usize, layout: Nvfp4Layout) -> WeightSlice {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    let values: Vec<f32> = (0..rows * cols).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
    let tensor = scale(largest(&values) / 2688.0);
    let (mut codes, blocks) = (vec![0; rows * cols / 2], cols / BLOCK);
    let mut scales = vec![0; if layout.tiled { scale_bytes(rows, cols) } else { rows * blocks }];
    for (i, (values, codes)) in values.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(BLOCK / 2)).enumerate() {
        let at = if layout.tiled { scale_offset(i / blocks, i % blocks, tiles_along(cols)) } else { i };
        scales[at] = encode_block(values, tensor.get(), codes);
    }
    if !layout.high_first {
        codes.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
    }
    let scaling = SliceScaling::Blocks16 { scales: bytes(scales), tensor, layout };
    WeightSlice { bytes: bytes(codes), dtype: DType::E2m1, rows, scaling }
}

/// Given their distribution, three of four weights or more are exact, and the error of all is 2.2 %, in every file layout.
#[test]
fn most_weights_are_exact() {
    let (count, cols) = (131, 1040);
    let parts =
        [Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT, Nvfp4Layout::MODELOPT_SINGLE].map(|layout| weights(count, cols, layout));
    let to = parts[0].as_fp8().unwrap();
    let codes = rows(&parts[0], to);
    let Scales::Tensor(one) = to.scales else { panic!("{to:?}") };
    let (mut exact, mut error, mut size, mut values) = (0, 0.0, 0.0, vec![0.0; cols]);
    for (row, codes) in codes.chunks_exact(cols).enumerate() {
        parts[0].decode(row, &mut values);
        for (value, code) in values.iter().zip(DType::E4m3.decoded(codes)) {
            let off = f64::from(code * one.get() - value);
            // Both products are rounded to f32.
            exact += usize::from(off.abs() <= f64::from(value.abs()) * 2f64.powi(-22));
            error += off * off;
            size += f64::from(*value).powi(2);
        }
    }
    let (share, error) = (exact as f64 / codes.len() as f64, (error / size).sqrt());
    assert!((0.75..0.82).contains(&share) && (0.020..0.023).contains(&error), "{share} {error}");

    // On a backend: all layouts give the same bytes, and the tensor has this format.
    let (mut be, mut arena) = (cpu(), Arena::new(Region::Weights));
    for part in &parts {
        assert_eq!(part.as_fp8(), Some(to));
        let t = arena.alloc_stored(count, cols, to).unwrap();
        be.upload(t, Role::Linear, std::slice::from_ref(part)).unwrap();
        assert!(stored_bytes(&mut be, t)[0] == codes, "{:?}", part.scaling);
    }
    let other = arena.alloc_stored(count, cols, Stored::fp8(scale(0.01))).unwrap();
    assert!(be.upload(other, Role::Linear, &parts[..1]).is_err());
}
