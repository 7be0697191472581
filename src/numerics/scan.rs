//! Searches stored values for NaN, infinity and parts that were never written, and measures the quantization error.

use crate::tensor::WeightSlice;
use std::ops::Range;

/// Bytes that are first searched as a whole for non-finite values, and only then one by one. They stay in the L1 cache.
const SPAN: usize = 8 << 10;

/// The numbers of NaNs and infinities among some values, and the index of the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonFinite {
    pub nan: u64,
    pub infinite: u64,
    pub first: Option<u64>,
}

impl NonFinite {
    /// Adds the counts of the values that follow.
    pub fn then(self, later: Self) -> Self {
        Self { nan: self.nan + later.nan, infinite: self.infinite + later.infinite, first: self.first.or(later.first) }
    }
}

/// Counts NaNs and infinities among the values in `bytes`. `dtype` is the name in a safetensors header. A U8 holds two NVFP4
/// elements, and all their codes are finite: only the scales of such a layer, which are separate tensors, can be non-finite.
pub fn non_finite(dtype: &str, bytes: &[u8]) -> NonFinite {
    // A value is not finite if all bits of its exponent are set, and NaN if a bit of its mantissa is as well.
    macro_rules! ieee {
        ($word:ty, $exponent:literal, $mantissa:literal) => {
            search(
                bytes,
                |value| <$word>::from_le_bytes(value) & $exponent == $exponent,
                |value| <$word>::from_le_bytes(value) & $mantissa != 0,
            )
        };
    }
    match dtype {
        "BF16" => ieee!(u16, 0x7F80, 0x007F),
        "F16" => ieee!(u16, 0x7C00, 0x03FF),
        "F32" | "C64" => ieee!(u32, 0x7F80_0000, 0x007F_FFFF),
        "F64" => ieee!(u64, 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
        "F8_E5M2" => ieee!(u8, 0x7C, 0x03),
        // Dtypes with a NaN, or one of each sign, and no infinity.
        "F8_E4M3" => search(bytes, |[code]| code & 0x7F == 0x7F, |_| true),
        "F8_E8M0" => search(bytes, |[code]| code == 0xFF, |_| true),
        "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => search(bytes, |[code]| code == 0x80, |_| true),
        _ => NonFinite::default(),
    }
}

/// Counts NaNs and infinities among values of `N` bytes each.
fn search<const N: usize>(bytes: &[u8], is_special: impl Fn([u8; N]) -> bool, is_nan: impl Fn([u8; N]) -> bool) -> NonFinite {
    let mut sum = NonFinite::default();
    for (i, span) in bytes.as_chunks::<N>().0.chunks(SPAN / N).enumerate() {
        // A loop without a branch is vectorized, at any address.
        if !span.iter().fold(false, |any, value| any | is_special(*value)) {
            continue;
        }
        for (j, value) in span.iter().enumerate().filter(|(_, value)| is_special(**value)) {
            sum.first.get_or_insert((i * (SPAN / N) + j) as u64);
            *(if is_nan(*value) { &mut sum.nan } else { &mut sum.infinite }) += 1;
        }
    }
    sum
}

/// Whether all bytes are zero. Compares words of eight bytes and stops at the first that is not zero.
pub fn all_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|&byte| byte == 0)
}

/// Sums of squares over some rows of a part: of the errors of `stored`, which begins at the first of these rows, and of the values.
pub fn squared_error(part: &WeightSlice, rows: Range<usize>, stored: &WeightSlice) -> (f64, f64) {
    /// Number of parallel sums, as in vector units.
    const LANES: usize = 8;
    let (mut want, mut got) = (vec![0.0_f32; part.cols()], vec![0.0_f32; part.cols()]);
    let (mut errors, mut values) = ([0.0_f64; LANES], [0.0_f64; LANES]);
    for (i, row) in rows.enumerate() {
        part.decode(row, &mut want);
        stored.decode(i, &mut got);
        for (want, got) in want.chunks(LANES).zip(got.chunks(LANES)) {
            for (lane, (&want, &got)) in want.iter().zip(got).enumerate() {
                let (want, got) = (f64::from(want), f64::from(got));
                errors[lane] += (got - want) * (got - want);
                values[lane] += want * want;
            }
        }
    }
    (errors.iter().sum(), values.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use half::{bf16, f16};

    /// Checks every code of every dtype of at most sixteen bits against the types themselves.
    #[test]
    fn every_code_is_judged_as_its_type_does() {
        let wide = |name, is_finite: &dyn Fn(u16) -> bool, is_nan: &dyn Fn(u16) -> bool| {
            for code in 0..=u16::MAX {
                let found = non_finite(name, &code.to_le_bytes());
                let want = NonFinite {
                    nan: u64::from(is_nan(code)),
                    infinite: u64::from(!is_finite(code) && !is_nan(code)),
                    first: (!is_finite(code)).then_some(0),
                };
                assert_eq!(found, want, "{name} {code:#x}");
            }
        };
        wide("BF16", &|code| bf16::from_bits(code).is_finite(), &|code| bf16::from_bits(code).is_nan());
        wide("F16", &|code| f16::from_bits(code).is_finite(), &|code| f16::from_bits(code).is_nan());
        for code in 0..=u8::MAX {
            for (name, value) in [("F8_E4M3", DType::E4m3.decoded(&[code])[0]), ("F8_E5M2", DType::E5m2.decoded(&[code])[0])] {
                let found = non_finite(name, &[code]);
                assert_eq!(
                    (found.nan, found.infinite),
                    (u64::from(value.is_nan()), u64::from(value.is_infinite())),
                    "{name} {code:#x}"
                );
            }
            assert_eq!(non_finite("F8_E8M0", &[code]).nan, u64::from(code == 0xFF));
            assert_eq!(non_finite("F8_E4M3FNUZ", &[code]).nan, u64::from(code == 0x80));
            assert_eq!(non_finite("U8", &[code]), NonFinite::default());
        }
        for (value, nan, infinite) in [(f32::NAN, 1, 0), (f32::NEG_INFINITY, 0, 1), (f32::MAX, 0, 0), (f32::MIN_POSITIVE, 0, 0)] {
            let found = non_finite("F32", &value.to_le_bytes());
            assert_eq!((found.nan, found.infinite), (nan, infinite), "{value}");
            let found = non_finite("F64", &f64::from(value).to_le_bytes());
            assert_eq!((found.nan, found.infinite), (nan, infinite), "{value}");
        }
    }

    /// A value is found at any place, around the ends of spans and at odd addresses. The first one is named.
    #[test]
    fn one_value_is_found_anywhere() {
        let values = 3 * SPAN / 2 + 7;
        for at in [0, 1, SPAN / 2 - 1, SPAN / 2, SPAN / 2 + 1, SPAN - 1, SPAN, values - 1] {
            let mut bytes = vec![0x3F; 2 * values + 1];
            bytes[1 + 2 * at..][..2].copy_from_slice(&[0x80, 0xFF]);
            assert_eq!(non_finite("BF16", &bytes[1..]), NonFinite { nan: 0, infinite: 1, first: Some(at as u64) });
            if at > 0 {
                bytes[1..3].copy_from_slice(&[0x81, 0x7F]);
                assert_eq!(non_finite("BF16", &bytes[1..]), NonFinite { nan: 1, infinite: 1, first: Some(0) });
            }
        }
    }
}
