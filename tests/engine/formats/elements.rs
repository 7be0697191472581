//! Single elements: every code, and rounding to the nearest code.

use super::{float, fp8_vectors, nvfp4_vectors};
use kiln::internals::tensor::formats::{e2m1, e2m1_pair, e4m3, e5m2, to_e2m1, to_e4m3, to_e5m2};
use serde_json::Value;

/// A format: its table of values from the test vectors, and its encoder.
struct Format {
    name: &'static str,
    /// The value of each code, NaN and infinities included.
    values: Vec<f32>,
    decode: fn(u8) -> f32,
    encode: fn(f32) -> u8,
}

impl Format {
    /// The sign bit of a code.
    fn sign(&self) -> u8 {
        (self.values.len() / 2) as u8
    }

    /// The codes of finite magnitudes in ascending order, which is also the order of their values.
    fn magnitudes(&self) -> Vec<u8> {
        (0..self.sign()).take_while(|&code| self.value(code).is_finite()).collect()
    }

    fn value(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }
}

fn formats() -> [Format; 3] {
    let table = |values: Vec<Value>| -> Vec<f32> {
        let value = |value: &Value| match value {
            Value::Null => f32::NAN,
            Value::String(text) => text.parse().unwrap(),
            number => number.as_f64().unwrap() as f32,
        };
        values.iter().map(value).collect()
    };
    let (fp8, fp4) = (fp8_vectors(), nvfp4_vectors());
    [
        Format { name: "e4m3", values: table(fp8.e4m3_decode), decode: e4m3, encode: to_e4m3 },
        Format { name: "e5m2", values: table(fp8.e5m2_decode), decode: e5m2, encode: to_e5m2 },
        Format { name: "e2m1", values: table(fp4.e2m1_decode), decode: e2m1, encode: to_e2m1 },
    ]
}

#[test]
fn every_code_has_its_value_and_comes_back() {
    let counts = formats().map(|format| {
        let mut same = 0;
        for code in 0..=u8::MAX {
            let Some(&value) = format.values.get(usize::from(code)) else { break };
            let decoded = (format.decode)(code);
            let equal = decoded.to_bits() == value.to_bits() || decoded.is_nan() && value.is_nan();
            assert!(equal, "{} {code:#04x}: {decoded}, not {value}", format.name);
            if value.is_finite() {
                assert_eq!((format.encode)(value), code, "{} {value}", format.name);
                same += 1;
            }
        }
        (format.values.len(), same)
    });
    // e4m3 has two codes for NaN, e5m2 six and two infinities, e2m1 neither.
    assert_eq!(counts, [(256, 254), (256, 248), (16, 16)]);
}

#[test]
fn a_byte_holds_two_codes_with_that_in_the_high_nibble_first() {
    for byte in 0..=u8::MAX {
        let pair = [e2m1(byte >> 4), e2m1(byte & 15)];
        assert_eq!(e2m1_pair(byte).map(f32::to_bits), pair.map(f32::to_bits), "{byte:#04x}");
        assert_eq!(e2m1(byte).to_bits(), pair[1].to_bits(), "{byte:#04x}");
    }
}

#[test]
fn values_are_encoded_as_the_vectors_have_them() {
    let (fp8, fp4) = (fp8_vectors(), nvfp4_vectors());
    assert_eq!((fp8.e4m3_encode_tests.len(), fp4.e2m1_encode_tests.len()), (34, 36));
    for test in &fp8.e4m3_encode_tests {
        let code = u8::from_str_radix(test["byte"].as_str().unwrap().strip_prefix("0x").unwrap(), 16).unwrap();
        assert_eq!(to_e4m3(float(test, "x_f32")), code, "{test}");
    }
    for test in &fp4.e2m1_encode_tests {
        assert_eq!(u64::from(to_e2m1(float(test, "x_f32"))), test["code"].as_u64().unwrap(), "{test}");
    }
}

#[test]
fn values_out_of_range_become_the_largest_and_zeros_keep_their_sign() {
    for value in [448.0, 448.0001, 463.999, 464.0, 464.001, 480.0, 1e30, f32::MAX, f32::INFINITY] {
        assert_eq!((to_e4m3(value), to_e4m3(-value)), (0x7e, 0xfe), "{value}");
    }
    for value in [57_344.0, 57_344.01, 61_440.0, 65_536.0, f32::MAX, f32::INFINITY] {
        assert_eq!((to_e5m2(value), to_e5m2(-value)), (0x7b, 0xfb), "{value}");
    }
    for value in [6.0, 6.000_001, 7.0, 8.0, 1e30, f32::MAX, f32::INFINITY] {
        assert_eq!((to_e2m1(value), to_e2m1(-value)), (7, 15), "{value}");
    }
    let smallest = f32::from_bits(1);
    for value in [0.0, smallest, f32::MIN_POSITIVE] {
        assert_eq!([to_e4m3(value), to_e5m2(value), to_e2m1(value)], [0, 0, 0], "{value:e}");
        assert_eq!([to_e4m3(-value), to_e5m2(-value), to_e2m1(-value)], [0x80, 0x80, 8], "{value:e}");
    }
    for nan in [f32::NAN, -f32::NAN] {
        assert!(e4m3(to_e4m3(nan)).is_nan() && e5m2(to_e5m2(nan)).is_nan());
    }
}

/// The mean of two neighbors is a tie and rounds to the even code. The f32 values before and after it do not tie.
#[test]
fn ties_go_to_the_even_code() {
    for format in formats() {
        for pair in format.magnitudes().windows(2) {
            let [low, high] = pair else { unreachable!() };
            // The sum of two neighbors and half of it are exact.
            let tie = (format.value(*low) + format.value(*high)) / 2.0;
            let even = if low.is_multiple_of(2) { low } else { high };
            for (value, code) in [(tie.next_down(), low), (tie, even), (tie.next_up(), high)] {
                assert_eq!((format.encode)(value), *code, "{} {value:e}", format.name);
                assert_eq!((format.encode)(-value), code | format.sign(), "{} -{value:e}", format.name);
            }
        }
    }
}

/// The code nearest to a magnitude, ties to even, found by trying all codes. Values out of range become the largest.
fn nearest(codes: &[(u8, f64)], value: f32) -> u8 {
    let (_, most) = codes[codes.len() - 1];
    let away = |of: f64| (f64::from(value).min(most) - of).abs();
    let nearer = |best: (u8, f64), other: (u8, f64)| {
        let closer = away(other.1) < away(best.1) || away(other.1) == away(best.1) && other.0.is_multiple_of(2);
        if closer { other } else { best }
    };
    codes.iter().copied().reduce(nearer).unwrap().0
}

/// Half a million numbers from zero to infinity, and their negatives.
#[test]
fn every_value_becomes_the_nearest_and_rounding_is_monotone() {
    for format in formats() {
        let codes: Vec<_> = format.magnitudes().into_iter().map(|code| (code, f64::from(format.value(code)))).collect();
        let mut last = 0.0;
        for value in (0..=f32::INFINITY.to_bits()).step_by(4093).map(f32::from_bits) {
            let code = (format.encode)(value);
            assert_eq!(code, nearest(&codes, value), "{} {value:e}", format.name);
            assert_eq!((format.encode)(-value), code | format.sign(), "{} -{value:e}", format.name);
            assert!((format.decode)(code) >= last, "{} {value:e}", format.name);
            last = (format.decode)(code);
        }
        assert_eq!(f64::from(last), codes[codes.len() - 1].1, "{}", format.name);
    }
}
