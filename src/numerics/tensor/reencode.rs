//! NVFP4 weights as e4m3, for devices whose tensor cores multiply FP8 but not FP4.
//!
//! An element times its block scale has up to six significant bits. e4m3 keeps four, so no choice of scales is exact. The tensor
//! scale is multiplied by a power of two and is the only scale. Then products of elements 0.5, 1, 2 and 4 keep their bits, and so
//! do the others where the block scale has a bit to spare: 76 to 81 % of weights of normal or exponential distribution. Row
//! scales that are not powers of two would round all products, with a larger error.

use super::formats::{E2M1_MAX, E4M3_MAX, e2m1, e4m3};
use super::{DType, Scale};

/// Smaller powers of two are never needed: with the smallest block scale, 2^-9, the largest product is less than 2^-6.
const SMALLEST_POWER: f32 = 1.0 / (1 << 16) as f32;

/// The e4m3 scale for NVFP4 weights: the tensor scale times the smallest power of two that keeps the largest product in range.
/// That product is the block scale with code `largest` times the largest element. `None` if the result is beyond f32.
pub fn reencoded_scale(tensor: Scale, largest: u8) -> Option<Scale> {
    let largest = e4m3(largest) * E2M1_MAX;
    let mut power = SMALLEST_POWER;
    while power * E4M3_MAX < largest {
        power *= 2.0;
    }
    Scale::new(tensor.get() * power).filter(|scale| power_between(tensor, *scale).is_some())
}

/// The factor of the block scales when NVFP4 with the scale `tensor` is stored as e4m3 with `scale`. `None` unless the factor is
/// a power of two, because any other factor would be rounded.
pub fn power_between(tensor: Scale, scale: Scale) -> Option<f32> {
    let power = tensor.get() / scale.get();
    let exact = power.is_normal() && power.to_bits().trailing_zeros() >= f32::MANTISSA_DIGITS - 1;
    (exact && power * scale.get() == tensor.get()).then_some(power)
}

/// Rounds the elements of a block, two per byte, to e4m3. The even column is in the high nibble.
pub fn reencode_block(codes: &[u8], unit: f32, to: &mut [u8]) {
    let mut table = [0; 8];
    DType::E4m3.encode(&std::array::from_fn::<f32, 8, _>(|code| e2m1(code as u8) * unit), &mut table);
    // The highest bit is the sign in both formats.
    let code = |nibble: u8| table[usize::from(nibble & 7)] | (nibble & 8) << 4;
    to.as_chunks_mut().0.iter_mut().zip(codes).for_each(|(pair, &byte)| *pair = [code(byte >> 4), code(byte & 15)]);
}
