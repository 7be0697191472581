//! The formats of eight and four bits (OCP 8-bit Floating Point Specification, OCP Microscaling Formats): decoding by table, and
//! encoding to the nearest code, ties to even, where values out of range become the largest one.

/// A small floating-point format: bits of its exponent and of its mantissa.
struct Minifloat<const EXPONENT: u32, const MANTISSA: u32>;

impl<const EXPONENT: u32, const MANTISSA: u32> Minifloat<EXPONENT, MANTISSA> {
    const BIAS: u32 = (1 << (EXPONENT - 1)) - 1;
    const SIGN: u8 = 1 << (EXPONENT + MANTISSA);

    /// The value of a code, which is not one of those for infinity and NaN.
    const fn decode(code: u8) -> f32 {
        let (mantissa, exponent) = (code as u32 & ((1 << MANTISSA) - 1), (code & (Self::SIGN - 1)) as u32 >> MANTISSA);
        let magnitude = if exponent == 0 {
            mantissa as f32 * f32::from_bits((128 - Self::BIAS - MANTISSA) << 23)
        } else {
            f32::from_bits((127 + exponent - Self::BIAS) << 23 | mantissa << (23 - MANTISSA))
        };
        if code & Self::SIGN == 0 { magnitude } else { -magnitude }
    }

    /// The nearest code to a value that is not NaN, at most `largest`. There are no branches, calls or tables, so that the loop
    /// around it is vectorised.
    fn encode(value: f32, largest: u8) -> u8 {
        let most = Self::decode(largest);
        let magnitude = if value.abs() < most { value.abs() } else { most };
        let smallest_normal = f32::from_bits((128 - Self::BIAS) << 23);
        // Next to 2^23 times the smallest subnormal number, f32 are that number apart: the sum is rounded to a multiple of it.
        // The largest of the subnormal numbers rounds up to the code of the smallest normal one.
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

type E4m3 = Minifloat<4, 3>;
type E5m2 = Minifloat<5, 2>;
type E2m1 = Minifloat<2, 1>;

const E4M3_NAN: u8 = 0x7f;
const E4M3_LARGEST: u8 = 0x7e;
const E5M2_NAN: u8 = 0x7f;
const E5M2_LARGEST: u8 = 0x7b;
const E2M1_LARGEST: u8 = 7;

static E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = if code & 0x7f == E4M3_NAN as usize { f32::NAN } else { E4m3::decode(code as u8) };
        code += 1;
    }
    values
};

static E5M2_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = match code & 0x7f {
            0x7c => f32::INFINITY,
            0x7d.. => f32::NAN,
            _ => E5m2::decode(code as u8),
        };
        if code == 0xfc {
            values[code] = f32::NEG_INFINITY;
        }
        code += 1;
    }
    values
};

/// The values of both codes in a byte, that in the high nibble first.
static E2M1_PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [E2m1::decode(byte as u8 >> 4), E2m1::decode(byte as u8 & 15)];
        byte += 1;
    }
    pairs
};

/// The largest value of e4m3.
pub const E4M3_MAX: f32 = E4m3::decode(E4M3_LARGEST);
/// The largest value of e2m1.
pub const E2M1_MAX: f32 = E2m1::decode(E2M1_LARGEST);

/// The value of an e4m3 code.
pub fn e4m3(code: u8) -> f32 {
    E4M3_VALUES[usize::from(code)]
}

/// The nearest e4m3 code; values beyond 448 become 448, NaN stays NaN.
pub fn to_e4m3(value: f32) -> u8 {
    if value.is_nan() { E4M3_NAN } else { E4m3::encode(value, E4M3_LARGEST) }
}

/// The value of an e5m2 code.
pub fn e5m2(code: u8) -> f32 {
    E5M2_VALUES[usize::from(code)]
}

/// The nearest e5m2 code; values beyond 57,344 become 57,344, NaN stays NaN.
pub fn to_e5m2(value: f32) -> u8 {
    if value.is_nan() { E5M2_NAN } else { E5m2::encode(value, E5M2_LARGEST) }
}

/// The value of an e2m1 code, the low four bits.
pub fn e2m1(code: u8) -> f32 {
    E2M1_PAIRS[usize::from(code)][1]
}

/// The values of the two e2m1 codes in a byte, that in the high nibble first.
pub fn e2m1_pair(byte: u8) -> [f32; 2] {
    E2M1_PAIRS[usize::from(byte)]
}

/// The nearest e2m1 code; values beyond 6 become 6. There is no NaN, which has to be kept in the scale.
pub fn to_e2m1(value: f32) -> u8 {
    if value.is_nan() { E2M1_LARGEST } else { E2m1::encode(value, E2M1_LARGEST) }
}
