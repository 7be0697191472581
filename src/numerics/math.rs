//! Scalar functions and reductions. The compiler inlines them and vectorizes the loops that call them.

use std::iter::Sum;
use std::ops::AddAssign;

/// `e^x` to about one unit in the last place, without branches or calls: Cody-Waite range reduction and the polynomial of Cephes'
/// `expf`.
#[inline]
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves that integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    // x - n ln 2, with ln 2 in two parts so that the first product is exact.
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    y * f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23))
}

/// `x * sigmoid(x)`.
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Maps a value within -1..1 to 0..255, to be rounded to a byte. The scaling takes two steps, each rounded, as in the reference
/// implementation.
#[inline]
pub fn to_byte(x: f32) -> f32 {
    255.0 * (0.5 * x + 0.5).clamp(0.0, 1.0)
}

/// Number of independent accumulators. They fill one or two vector registers.
const LANES: usize = 16;

/// The sum of `f` over all values, in `LANES` interleaved accumulators: one long chain of dependent additions would be slower
/// and less accurate.
pub fn sum<T: Copy + Default + AddAssign + Sum>(values: &[f32], f: impl Fn(f32) -> T) -> T {
    let mut parts = [T::default(); LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        parts.iter_mut().zip(chunk).for_each(|(part, &v)| *part += f(v));
    }
    parts.iter_mut().zip(rest).for_each(|(part, &v)| *part += f(v));
    parts.into_iter().sum()
}

/// The maximum of the values and `start`. It skips NaN, which still propagates through computations on the values.
pub fn maximum(values: &[f32], start: f32) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut parts = [start; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        parts.iter_mut().zip(chunk).for_each(|(part, &v)| *part = larger(*part, v));
    }
    parts.iter_mut().zip(rest).for_each(|(part, &v)| *part = larger(*part, v));
    parts.into_iter().fold(start, larger)
}

/// The instruction set that GEMMs on this processor use, in the words of compilers. Sums have another order with another one.
pub fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::Arch;
        match Arch::new() {
            Arch::V4(_) => "x86-64-v4",
            Arch::V3(_) => "x86-64-v3",
            _ => "x86-64",
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::env::consts::ARCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -8_700..8_800 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= want * 2.4e-7, "exp({x})");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
        assert!(exp(f32::NAN).is_nan(), "a fault must stay visible");
    }

    #[test]
    fn sums_and_maxima_cover_every_value_once() {
        for len in [0, 1, 15, 16, 17, 100] {
            let values: Vec<f32> = (0..len).map(|i| (i * 7 % 101) as f32).collect();
            assert_eq!(sum(&values, f64::from), values.iter().map(|&v| f64::from(v)).sum::<f64>());
            assert_eq!(maximum(&values, -1.0), values.iter().copied().fold(-1.0, f32::max));
        }
        assert_eq!(maximum(&[f32::NAN, 2.0], f32::NEG_INFINITY), 2.0);
    }
}
