//! FP8 with four exponent and three mantissa bits (e4m3): no infinities, at most 448. Weights have one scale or one per row.

use super::minifloat::Minifloat;
use super::{Format, Scale, ScaleKind, Target};

pub(super) static FORMAT: Format = Format {
    name: "e4m3",
    label: "fp8",
    title: "FP8 (E4M3)",
    stored_as: "F8_E4M3",
    declared: "float8_e4m3fn",
    block: 1,
    block_bytes: 1,
    scales: ScaleKind::TensorOrRows,
    is_quantized: true,
    is_expanded: false,
    target: Some(Target {
        file_help: "One byte per weight: e4m3 with one scale per layer, or per row for diffusers",
        load_help: "e4m3 with one scale per row and, in the transformer, e4m3 inputs: half the memory",
        // Precision is the same over fifteen octaves, so a scale only has to keep the largest value in range, and may leave
        // several octaves of headroom. Norms and attention stay far below 448, and SwiGLU results below 3584: FLUX.2's largest
        // are about 160. Values beyond the range are counted and reported.
        input_scales: Some([Scale::ONE, Scale::power_of_two(3)]),
    }),
    holds_results: true,
    mantissa: Some(3),
    largest: E4M3_MAX,
    // Halfway to the value that would come next.
    saturates_at: Some(464.0),
    nan: Some(E4M3_NAN),
    decode: |bytes, to| to.iter_mut().zip(bytes).for_each(|(t, &b)| *t = e4m3(b)),
    encode,
};

type E4m3 = Minifloat<4, 3>;

/// The NaN code without its sign. Kernels that expand codes would take it for a number.
pub const E4M3_NAN: u8 = 0x7f;
const LARGEST: u8 = 0x7e;

static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = if code & 0x7f == E4M3_NAN as usize { f32::NAN } else { E4m3::decode(code as u8) };
        code += 1;
    }
    values
};

/// The largest value of e4m3.
pub const E4M3_MAX: f32 = E4m3::decode(LARGEST);

/// The value of an e4m3 code.
pub fn e4m3(code: u8) -> f32 {
    VALUES[usize::from(code)]
}

/// The nearest e4m3 code; values beyond 448 become 448, NaN stays NaN.
pub fn to_e4m3(value: f32) -> u8 {
    if value.is_nan() { E4M3_NAN } else { E4m3::encode(value, LARGEST) }
}

/// Rounds values to elements.
pub(super) fn encode(values: &[f32], to: &mut [u8]) {
    to.iter_mut().zip(values).for_each(|(t, &v)| *t = to_e4m3(v));
}
