//! Plain elements: exact or rounded values, without scales.

use super::{CHUNK, Format, ScaleKind};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// The format of plain elements of `block_bytes` bytes.
const fn plain(name: &'static str, stored_as: &'static str, block_bytes: usize) -> Format {
    Format {
        name,
        label: name,
        title: stored_as,
        stored_as,
        declared: "",
        block: 1,
        block_bytes,
        scales: ScaleKind::None,
        is_quantized: false,
        is_expanded: false,
        target: None,
        holds_results: true,
        mantissa: None,
        largest: f32::MAX,
        saturates_at: None,
        nan: None,
        decode: decode_f32,
        encode: encode_f32,
    }
}

pub(super) static F32: Format = plain("f32", "F32", 4);
pub(super) static BF16: Format =
    Format { mantissa: Some(7), decode: decode_bf16, encode: encode_bf16, ..plain("bf16", "BF16", 2) };
pub(super) static F16: Format = Format { mantissa: Some(10), decode: decode_f16, encode: encode_f16, ..plain("f16", "F16", 2) };
pub(super) static U8: Format = Format { decode: decode_u8, encode: encode_u8, ..plain("u8", "U8", 1) };

fn decode_f32(bytes: &[u8], to: &mut [f32]) {
    to.iter_mut().zip(bytes.as_chunks().0).for_each(|(t, b)| *t = f32::from_le_bytes(*b));
}

fn encode_f32(values: &[f32], to: &mut [u8]) {
    to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(t, v)| *t = v.to_le_bytes());
}

fn decode_f16(bytes: &[u8], to: &mut [f32]) {
    // The processor converts eight at a time, but only from aligned memory.
    let mut block = [f16::ZERO; CHUNK];
    for (to, bytes) in to.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let block = &mut block[..to.len()];
        block.iter_mut().zip(bytes.as_chunks().0).for_each(|(t, b)| *t = f16::from_le_bytes(*b));
        block.convert_to_f32_slice(to);
    }
}

fn encode_f16(values: &[f32], to: &mut [u8]) {
    to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(t, &v)| *t = f16::from_f32(v).to_le_bytes());
}

fn decode_u8(bytes: &[u8], to: &mut [f32]) {
    to.iter_mut().zip(bytes).for_each(|(t, &b)| *t = f32::from(b));
}

fn encode_u8(values: &[f32], to: &mut [u8]) {
    to.iter_mut().zip(values).for_each(|(t, v)| *t = v.round_ties_even() as u8);
}

/// Decodes bfloat16. It is inlined, so it is compiled for the instructions that its caller may use.
#[inline(always)]
pub fn decode_bf16(bytes: &[u8], to: &mut [f32]) {
    let pairs = to.iter_mut().zip(bytes.as_chunks().0);
    pairs.for_each(|(t, b)| *t = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
}

/// Rounds to bfloat16. It is inlined for the same reason as [`decode_bf16`].
#[inline(always)]
pub fn encode_bf16(values: &[f32], to: &mut [u8]) {
    to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(t, &v)| *t = round_bf16(v).to_le_bytes());
}

/// The bits of the nearest bfloat16, ties to even. NaN stays NaN. Without branches, the loop around it is vectorized.
#[inline(always)]
fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn rounding_equals_the_half_crate() {
        let mut state = 1u32;
        for _ in 0..1_000_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state);
            assert_eq!(round_bf16(value), bf16::from_f32(value).to_bits(), "{value}");
        }
        for value in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE] {
            assert_eq!(round_bf16(value), bf16::from_f32(value).to_bits(), "{value}");
        }
    }
}
