//! FP8 with five exponent and two mantissa bits (e5m2). Weights have one scale or one per row, and are expanded at load.

use super::minifloat::Minifloat;
use super::{Format, ScaleKind};

pub(super) static FORMAT: Format = Format {
    name: "e5m2",
    label: "fp8-e5m2",
    title: "FP8 (E5M2)",
    stored_as: "F8_E5M2",
    declared: "float8_e5m2",
    block: 1,
    block_bytes: 1,
    scales: ScaleKind::TensorOrRows,
    is_quantized: true,
    is_expanded: true,
    target: None,
    holds_results: false,
    mantissa: Some(2),
    largest: E5m2::decode(LARGEST),
    saturates_at: None,
    nan: None,
    decode: |bytes, to| to.iter_mut().zip(bytes).for_each(|(t, &b)| *t = e5m2(b)),
    encode: |values, to| to.iter_mut().zip(values).for_each(|(t, &v)| *t = to_e5m2(v)),
};

type E5m2 = Minifloat<5, 2>;

const NAN: u8 = 0x7f;
const LARGEST: u8 = 0x7b;

static VALUES: [f32; 256] = {
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

/// The value of an e5m2 code.
pub fn e5m2(code: u8) -> f32 {
    VALUES[usize::from(code)]
}

/// The nearest e5m2 code; values beyond 57,344 become 57,344, NaN stays NaN.
pub fn to_e5m2(value: f32) -> u8 {
    if value.is_nan() { NAN } else { E5m2::encode(value, LARGEST) }
}
