//! Elements in memory and in files as f32 values: the one place that decodes and encodes them. They are little-endian, as
//! safetensors stores them, and need no alignment.

use super::DType;
use super::minifloat::{e2m1_pair, e4m3, e5m2, to_e2m1, to_e4m3, to_e5m2};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Values that are converted at a time: they stay in the first-level cache.
const BLOCK: usize = 512;

impl DType {
    /// Decodes stored elements, without the scales that may belong to them.
    ///
    /// # Panics
    /// If there are not as many elements as values.
    pub fn decode(self, bytes: &[u8], to: &mut [f32]) {
        assert_eq!(bytes.len(), self.bytes(to.len()), "{self:?} of {} values", to.len());
        match self {
            Self::F32 => to.iter_mut().zip(bytes.as_chunks().0).for_each(|(t, b)| *t = f32::from_le_bytes(*b)),
            Self::Bf16 => decode_bf16(bytes, to),
            Self::F16 => {
                // The processor converts eight at a time, but only what lies aligned.
                let mut block = [f16::ZERO; BLOCK];
                for (to, bytes) in to.chunks_mut(BLOCK).zip(bytes.chunks(self.bytes(BLOCK))) {
                    let block = &mut block[..to.len()];
                    block.iter_mut().zip(bytes.as_chunks().0).for_each(|(t, b)| *t = f16::from_le_bytes(*b));
                    block.convert_to_f32_slice(to);
                }
            }
            Self::U8 => to.iter_mut().zip(bytes).for_each(|(t, &b)| *t = f32::from(b)),
            Self::E4m3 => to.iter_mut().zip(bytes).for_each(|(t, &b)| *t = e4m3(b)),
            Self::E5m2 => to.iter_mut().zip(bytes).for_each(|(t, &b)| *t = e5m2(b)),
            Self::E2m1 => to.as_chunks_mut().0.iter_mut().zip(bytes).for_each(|(t, &b)| *t = e2m1_pair(b)),
        }
    }

    /// Rounds values to this type, to nearest even, and stores them.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn encode(self, values: &[f32], to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes(values.len()), "{self:?} of {} values", values.len());
        match self {
            Self::F32 => to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(t, v)| *t = v.to_le_bytes()),
            Self::Bf16 => encode_bf16(values, to),
            Self::F16 => to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(t, &v)| *t = f16::from_f32(v).to_le_bytes()),
            Self::U8 => to.iter_mut().zip(values).for_each(|(t, v)| *t = v.round_ties_even() as u8),
            Self::E4m3 => to.iter_mut().zip(values).for_each(|(t, &v)| *t = to_e4m3(v)),
            Self::E5m2 => to.iter_mut().zip(values).for_each(|(t, &v)| *t = to_e5m2(v)),
            Self::E2m1 => {
                to.iter_mut().zip(values.as_chunks().0).for_each(|(t, &[even, odd])| *t = to_e2m1(even) << 4 | to_e2m1(odd));
            }
        }
    }

    /// Rounds stored elements to those of another type.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn convert(self, bytes: &[u8], other: Self, to: &mut [u8]) {
        if self == other {
            return to.copy_from_slice(bytes);
        }
        let mut block = [0.0; BLOCK];
        for (bytes, to) in bytes.chunks(self.bytes(BLOCK)).zip(to.chunks_mut(other.bytes(BLOCK))) {
            let block = &mut block[..self.elements(bytes.len())];
            self.decode(bytes, block);
            other.encode(block, to);
        }
    }

    /// All values of stored elements.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn decoded(self, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; self.elements(bytes.len())];
        self.decode(bytes, &mut values);
        values
    }

    /// Values as stored elements.
    ///
    /// # Panics
    /// As [`DType::decode`] does.
    pub fn encoded(self, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes(values.len())];
        self.encode(values, &mut bytes);
        bytes
    }
}

/// Decodes bfloat16. It is inlined, so that it is compiled for the instructions that its caller may use.
#[inline(always)]
pub fn decode_bf16(bytes: &[u8], to: &mut [f32]) {
    let pairs = to.iter_mut().zip(bytes.as_chunks().0);
    pairs.for_each(|(t, b)| *t = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
}

/// Rounds to bfloat16, inlined likewise.
#[inline(always)]
pub fn encode_bf16(values: &[f32], to: &mut [u8]) {
    to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(t, &v)| *t = round_bf16(v).to_le_bytes());
}

/// The bits of the nearest bfloat16, ties to even. There are no branches, so that the loop around it is vectorised; NaN stays
/// NaN.
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

    #[test]
    fn every_half_precision_number_is_decoded_at_any_address() {
        let halves: Vec<u8> = [0].into_iter().chain((0..=u16::MAX).flat_map(u16::to_le_bytes)).collect();
        type Exact = fn(u16) -> f32;
        let types: [(DType, Exact); 2] =
            [(DType::F16, |bits| f16::from_bits(bits).to_f32()), (DType::Bf16, |bits| bf16::from_bits(bits).to_f32())];
        for (dtype, exact) in types {
            for (value, bits) in dtype.decoded(&halves[1..]).into_iter().zip(0..=u16::MAX) {
                let exact = exact(bits);
                assert!(value.to_bits() == exact.to_bits() || value.is_nan() && exact.is_nan(), "{dtype:?} {bits:04x}");
            }
        }
    }

    #[test]
    fn values_survive_every_type_that_holds_them() {
        // More than one block, and not a whole number of them.
        let values: Vec<f32> = (0..3 * BLOCK + 7).map(|i| (i % 256) as f32).collect();
        let types = [DType::F32, DType::Bf16, DType::F16, DType::U8];
        for dtype in types {
            let stored = dtype.encoded(&values);
            assert_eq!(dtype.decoded(&stored), values, "{dtype:?}");
            for other in types {
                let mut converted = vec![0; other.bytes(values.len())];
                dtype.convert(&stored, other, &mut converted);
                assert_eq!(converted, other.encoded(&values), "{dtype:?} to {other:?}");
            }
        }
        assert_eq!(DType::U8.encoded(&[-1.0, 0.5, 1.5, 254.6, 300.0]), [0, 0, 2, 255, 255]);
    }
}
