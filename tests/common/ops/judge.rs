//! The limits on a result's error, and on the codes of a quantized result.

use super::formats::{self, BLOCK, Codes, Quantized};
use super::stored;
use kiln::internals::tensor::{DType, Scales, Stored, Tensor};

/// Added to every limit, because naive arithmetic may be exact by chance.
const FLOOR: f64 = 1e-6;
/// The relative error of the two f32 divisions that bring a value into the range of its format, and of the scale itself.
const DIVISIONS: f64 = 4.0 / (1 << 24) as f64;

/// The exact result of an op, and the result of naive arithmetic.
pub struct Expected {
    pub exact: Vec<f64>,
    pub naive: Vec<f64>,
    /// For quantized results: the allowed distance from the exact value before rounding, which is twice the largest error of naive
    /// arithmetic.
    pub slack: f64,
}

impl Expected {
    /// Takes the oracle. Naive arithmetic in this format is the same loop in f32, or the oracle rounded once.
    pub fn new(format: Stored, exact: Vec<f64>, naive: impl FnOnce() -> Vec<f32>) -> Self {
        match format.dtype {
            DType::F32 => Self::naive_f32(exact, naive()),
            dtype if dtype.is_quantized() => {
                let error = naive().into_iter().zip(&exact).map(|(n, e)| (f64::from(n) - e).abs()).fold(0.0, f64::max);
                let rounded = formats::dequantize(&formats::quantize(exact.iter().copied(), format), format);
                Self { exact, naive: rounded.into_iter().map(f64::from).collect(), slack: 2.0 * error }
            }
            dtype => {
                let naive = exact.iter().map(|&v| f64::from(stored(v as f32, dtype))).collect();
                Self { exact, naive, slack: 0.0 }
            }
        }
    }

    /// Takes the oracle and naive arithmetic, whose result is rounded to this format.
    pub fn with_naive(format: Stored, exact: Vec<f64>, naive: Vec<f64>) -> Self {
        if !format.dtype.is_quantized() {
            let naive = naive.into_iter().map(|v| f64::from(stored(v as f32, format.dtype))).collect();
            return Self { exact, naive, slack: 0.0 };
        }
        let error = naive.iter().zip(&exact).map(|(n, e)| (n - e).abs()).fold(0.0, f64::max);
        let rounded = formats::dequantize(&formats::quantize(naive.into_iter(), format), format);
        Self { exact, naive: rounded.into_iter().map(f64::from).collect(), slack: 2.0 * error }
    }

    /// How far a value may be from this exact one before it is rounded.
    fn slack_of(&self, value: f64) -> f64 {
        self.slack + value.abs() * DIVISIONS
    }

    /// Takes the oracle and the same loop in f32.
    pub fn naive_f32(exact: Vec<f64>, naive: Vec<f32>) -> Self {
        Self { exact, naive: naive.into_iter().map(f64::from).collect(), slack: 0.0 }
    }
}

/// Relative L2 distance; infinite if any value is NaN.
fn distance(got: impl Iterator<Item = f64>, want: &[f64]) -> f64 {
    let norm: f64 = want.iter().map(|w| w * w).sum();
    let difference: f64 = got.zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let relative = (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
    if difference == 0.0 {
        0.0
    } else if relative.is_nan() {
        f64::INFINITY
    } else {
        relative
    }
}

fn place(out: Tensor, i: usize) -> String {
    format!("[{}, {}] of [{}, {}]", i / out.cols, i % out.cols, out.rows, out.cols)
}

/// Describes what is wrong with the values of a result.
pub fn judge(out: Tensor, got: &[f32], want: &Expected) -> Option<String> {
    assert_eq!(got.len(), want.exact.len(), "the oracle has another shape");
    // Infinities and NaN have no distance.
    if got.iter().zip(&want.exact).all(|(got, want)| f64::from(*got).to_bits() == want.to_bits()) {
        return None;
    }
    if let Some(i) = got.iter().position(|v| v.is_nan()) {
        return Some(format!("{} was not written, or is NaN", place(out, i)));
    }
    let error = distance(got.iter().copied().map(f64::from), &want.exact);
    let naive = distance(want.naive.iter().copied(), &want.exact);
    if error <= 2.0 * naive + FLOOR {
        return None;
    }
    let off = |i: usize| (f64::from(got[i]) - want.exact[i]).abs();
    let worst = (0..got.len()).max_by(|&a, &b| off(a).total_cmp(&off(b)))?;
    let (place, got, exact) = (place(out, worst), got[worst], want.exact[worst]);
    Some(format!("relative error {error:.2e}, naive arithmetic has {naive:.2e}; worst at {place}: {got}, oracle {exact}"))
}

/// Whether a code belongs to a value within these bounds. If all of them have one code, its sign counts even if it is zero.
fn is_code_of(codes: &Codes, code: u8, low: f64, high: f64) -> bool {
    let (first, last, value) = (codes.encode(low), codes.encode(high), codes.decode(code));
    if first == last { code == first } else { codes.decode(first) <= value && value <= codes.decode(last) }
}

/// Describes what is wrong with the codes of a quantized result, whose values are `got`. Each code must belong to the exact value or to one
/// that f32 arithmetic may give in its place. NVFP4 blocks are judged by their stored scale, once that scale has been checked.
pub fn judge_codes(out: Tensor, got: &[f32], stored: &Quantized, want: &Expected) -> Option<String> {
    let format = out.stored();
    let decoded = formats::dequantize(stored, format);
    if let Some(i) = (0..got.len()).find(|&i| got[i].to_bits() != decoded[i].to_bits()) {
        return Some(format!("{} is read as {}, its code says {}", place(out, i), got[i], decoded[i]));
    }
    let codes = Codes::of(out.dtype);
    let slack = |value: f64| want.slack_of(value);
    let unit = |i: usize| match format.scales {
        Scales::Tensor(scale) => scale.get(),
        Scales::Blocks16(tensor) => formats::unit(tensor.get(), stored.scales[i / BLOCK]),
        Scales::Unscaled | Scales::Rows => 1.0,
    };
    if let Scales::Blocks16(tensor) = format.scales {
        for (block, values) in want.exact.chunks(BLOCK).enumerate() {
            let largest = values.iter().fold(0.0_f64, |most, v| v.abs().max(most));
            let [low, high] = [-1.0, 1.0].map(|side| formats::block_scale((largest + side * slack(largest)).max(0.0), tensor));
            let scale = stored.scales[block];
            if scale < low || scale > high {
                let place = place(out, block * BLOCK);
                return Some(format!("the block at {place} has the scale {scale:#04x}, the oracle {low:#04x} to {high:#04x}"));
            }
        }
    }
    let wrong = |&i: &usize| {
        let (unit, exact, code) = (f64::from(unit(i)), want.exact[i], stored.codes[i]);
        let (low, high) = ((exact - slack(exact)) / unit, (exact + slack(exact)) / unit);
        if unit == 0.0 { code != 0 } else { !is_code_of(codes, code, low, high) }
    };
    let i = (0..got.len()).find(wrong)?;
    let exact = want.exact[i];
    Some(format!(
        "{} has the code {:#04x}, {}; oracle {exact}, within {:.1e}",
        place(out, i),
        stored.codes[i],
        got[i],
        slack(exact)
    ))
}

/// Describes what is wrong with the count of values beyond the range of an op's e4m3 results.
pub fn judge_saturated(count: u64, results: &[(Tensor, Expected)]) -> Option<String> {
    /// Halfway from the largest value, 448, to the next one if there were any.
    const LIMIT: f64 = 464.0;
    let (mut least, mut most) = (0, 0);
    for (out, want) in results.iter().filter(|(out, _)| out.dtype == DType::E4m3) {
        let limit = match out.stored().scales {
            Scales::Tensor(scale) => LIMIT * f64::from(scale.get()),
            _ => LIMIT,
        };
        let beyond = |side: f64| want.exact.iter().filter(|v| v.abs() + side * want.slack_of(**v) >= limit).count() as u64;
        least += beyond(-1.0);
        most += beyond(1.0);
    }
    let range = least..=most;
    (!range.contains(&count)).then(|| format!("{count} values are counted as out of range, the oracle has {range:?}"))
}
