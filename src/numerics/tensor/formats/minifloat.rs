//! The formats of eight and four bits (OCP 8-bit Floating Point Specification, OCP Microscaling Formats): decoding by table, and
//! encoding to the nearest code, ties to even. Values out of range become the largest one.

/// A small floating-point format: the bits of its exponent and mantissa.
pub(super) struct Minifloat<const EXPONENT: u32, const MANTISSA: u32>;

impl<const EXPONENT: u32, const MANTISSA: u32> Minifloat<EXPONENT, MANTISSA> {
    const BIAS: u32 = (1 << (EXPONENT - 1)) - 1;
    const SIGN: u8 = 1 << (EXPONENT + MANTISSA);

    /// The value of a code other than infinity and NaN.
    pub(super) const fn decode(code: u8) -> f32 {
        let (mantissa, exponent) = (code as u32 & ((1 << MANTISSA) - 1), (code & (Self::SIGN - 1)) as u32 >> MANTISSA);
        let magnitude = if exponent == 0 {
            mantissa as f32 * f32::from_bits((128 - Self::BIAS - MANTISSA) << 23)
        } else {
            f32::from_bits((127 + exponent - Self::BIAS) << 23 | mantissa << (23 - MANTISSA))
        };
        if code & Self::SIGN == 0 { magnitude } else { -magnitude }
    }

    /// The code nearest to a value that is not NaN, at most `largest`. Without branches, calls or tables, the loop around it is
    /// vectorized.
    pub(super) fn encode(value: f32, largest: u8) -> u8 {
        let most = Self::decode(largest);
        let magnitude = if value.abs() < most { value.abs() } else { most };
        let smallest_normal = f32::from_bits((128 - Self::BIAS) << 23);
        // Near 2^23 times the smallest subnormal number, adjacent f32 differ by that number, so the sum is rounded to a multiple
        // of it. The largest subnormal number rounds up to the code of the smallest normal number.
        let apart = f32::from_bits((151 - Self::BIAS - MANTISSA) << 23);
        let subnormal = (magnitude + apart).to_bits().wrapping_sub(apart.to_bits());
        let (bits, drop) = (magnitude.to_bits(), 23 - MANTISSA);
        let rounded = bits.wrapping_add((1 << (drop - 1)) - 1 + (bits >> drop & 1)) >> drop;
        let normal = rounded.wrapping_sub((127 - Self::BIAS) << MANTISSA);
        let code = if magnitude < smallest_normal { subnormal } else { normal };
        let sign = value.to_bits() >> (31 - EXPONENT - MANTISSA) & u32::from(Self::SIGN);
        (sign | code) as u8
    }
}
