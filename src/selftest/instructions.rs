//! Tests single instructions: conversions on all ties, MMAs element by element, and how many places of a sum they keep.

use super::Outcome;
use super::fragments::{BLOCKS, COLS, EMPTY, Layout, Place, ROWS, d, scale_a, scale_b, set};
use crate::backend::cuda::{Cuda, Fragments, LANES, Mma};
use crate::error::Result;
use crate::tensor::DType;
use crate::tensor::formats::{e2m1, e4m3, to_e2m1, to_e4m3};

/// All non-negative values of a format, the values halfway between two of them, the neighbors of all these, and some beyond the range.
fn ties(codes: u8, decode: fn(u8) -> f32) -> Vec<f32> {
    let values: Vec<f32> = (0..codes).map(decode).collect();
    let middles = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let largest = values[values.len() - 1];
    let beyond = [1.03, 1.04, 1.08, 2.0, 1e9].map(|factor| largest * factor);
    let found = values.iter().copied().chain(middles).chain(beyond).flat_map(|v| [v, v.next_up(), v.next_down()]);
    found.chain([f32::INFINITY, f32::NAN]).collect()
}

/// Tests conversion to e4m3.
pub fn convert_e4m3(cuda: &mut Cuda) -> Result<Outcome> {
    converts(cuda, &ties(0x7f, e4m3), |(codes, _)| *codes, |v| to_e4m3(v) & if v.is_nan() { 0x7f } else { 0xff }, 0x7f)
}

/// Tests conversion to e2m1.
pub fn convert_e2m1(cuda: &mut Cuda) -> Result<Outcome> {
    converts(cuda, &ties(8, e2m1), |(_, codes)| *codes, to_e2m1, 0x7)
}

type Codes = ([u8; 2], [u8; 2]);

/// Compares codes of values and of their negatives with the host's. The sign of NaN does not count: `magnitude` masks the other bits.
fn converts(cuda: &mut Cuda, values: &[f32], of: fn(&Codes) -> [u8; 2], encode: fn(f32) -> u8, magnitude: u8) -> Result<Outcome> {
    let found = cuda.convert(values)?;
    for (&value, codes) in values.iter().zip(&found) {
        for (value, got) in [value, -value].into_iter().zip(of(codes)) {
            let (want, mask) = (encode(value), if value.is_nan() { magnitude } else { u8::MAX });
            if got & mask != want & mask {
                return Ok(Outcome::Failed(format!("{value:e} becomes {got:#04x}, not {want:#04x}")));
            }
        }
    }
    Ok(Outcome::passed(format!("{} values", 2 * values.len())))
}

/// The layout of an MMA's operands.
const fn layout(mma: Mma) -> Layout {
    let dtype = match mma {
        Mma::Bf16 => DType::Bf16,
        Mma::E4m3 | Mma::E4m3Scaled => DType::E4m3,
        Mma::Nvf4 { .. } => DType::E2m1,
    };
    Layout { dtype }
}

/// The bits of a value that every format can store.
fn code(dtype: DType, value: f32) -> u32 {
    match dtype {
        DType::E2m1 => to_e2m1(value).into(),
        DType::E4m3 => to_e4m3(value).into(),
        _ => value.to_bits() >> 16,
    }
}

/// A case: the element under test, the fragments, and the result in rows and columns.
struct Case {
    what: String,
    fragments: Fragments,
    want: [[f32; COLS]; ROWS],
}

/// Values that every format has. They tell which row or column of an operand is in a result.
const MARKS: [f32; COLS] = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5];

fn mark(i: usize) -> f32 {
    if i < COLS { MARKS[i] } else { -MARKS[i - COLS] }
}

/// Scale codes that tell which row, or column, and which block a scale belongs to.
const fn mark_a(row: usize, block: usize) -> u8 {
    0x20 + (row * BLOCKS + block) as u8
}

const fn mark_b(col: usize, block: usize) -> u8 {
    0x28 + (col * BLOCKS + block) as u8
}

/// Sets the scales of an MMA that has some, by functions of row or column and block.
fn set_scales(to: &mut Fragments, mma: Mma, a: impl Fn(usize, usize) -> u8, b: impl Fn(usize, usize) -> u8) {
    let Mma::Nvf4 { selectors } = mma else { return };
    for block in 0..BLOCKS {
        (0..ROWS).for_each(|row| set(to, scale_a(selectors[0], row, block), a(row, block).into()));
        (0..COLS).for_each(|col| set(to, scale_b(selectors[1], col, block), b(col, block).into()));
    }
}

/// One element of A or of B is one. The elements of the other operand at the same K are marks.
fn element_cases(mma: Mma) -> Vec<Case> {
    let (layout, mut marked) = (layout(mma), EMPTY);
    set_scales(&mut marked, mma, mark_a, mark_b);
    let scales = |row, col, k| match mma {
        Mma::Nvf4 { .. } => e4m3(mark_a(row, k / 16)) * e4m3(mark_b(col, k / 16)),
        _ => 1.0,
    };
    let code = |value| code(layout.dtype, value);
    let mut cases = Vec::new();
    for k in 0..layout.k() {
        for row in 0..ROWS {
            let (mut fragments, mut want, place) = (marked, [[0.0; COLS]; ROWS], layout.a(row, k));
            set(&mut fragments, place, code(1.0));
            for (col, want) in want[row].iter_mut().enumerate() {
                set(&mut fragments, layout.b(col, k), code(mark(col)));
                *want = mark(col) * scales(row, col, k);
            }
            cases.push(Case { what: format!("a[{row}][{k}] ({place})"), fragments, want });
        }
        for col in 0..COLS {
            let (mut fragments, mut want, place) = (marked, [[0.0; COLS]; ROWS], layout.b(col, k));
            set(&mut fragments, place, code(1.0));
            for (row, want) in want.iter_mut().enumerate() {
                set(&mut fragments, layout.a(row, k), code(mark(row)));
                want[col] = mark(row) * scales(row, col, k);
            }
            cases.push(Case { what: format!("b[{k}][{col}] ({place})"), fragments, want });
        }
    }
    cases
}

/// All elements are one. A single scale of A or of B is one, and the scales of the other operand are marks.
fn scale_cases(mma: Mma) -> Vec<Case> {
    const ONE: u8 = 0x38;
    let Mma::Nvf4 { selectors } = mma else { return Vec::new() };
    let (layout, mut ones) = (layout(mma), EMPTY);
    for k in 0..layout.k() {
        (0..ROWS).for_each(|row| set(&mut ones, layout.a(row, k), code(layout.dtype, 1.0)));
        (0..COLS).for_each(|col| set(&mut ones, layout.b(col, k), code(layout.dtype, 1.0)));
    }
    let one_at = |is: bool| if is { ONE } else { 0 };
    let mut cases = Vec::new();
    for block in 0..BLOCKS {
        for row in 0..ROWS {
            let (mut fragments, mut want) = (ones, [[0.0; COLS]; ROWS]);
            set_scales(&mut fragments, mma, |r, b| one_at((r, b) == (row, block)), mark_b);
            (0..COLS).for_each(|col| want[row][col] = 16.0 * e4m3(mark_b(col, block)));
            let place = scale_a(selectors[0], row, block);
            cases.push(Case { what: format!("scale of a, row {row}, block {block} ({place})"), fragments, want });
        }
        for col in 0..COLS {
            let (mut fragments, mut want) = (ones, [[0.0; COLS]; ROWS]);
            set_scales(&mut fragments, mma, mark_a, |c, b| one_at((c, b) == (col, block)));
            (0..ROWS).for_each(|row| want[row][col] = 16.0 * e4m3(mark_a(row, block)));
            let place = scale_b(selectors[1], col, block);
            cases.push(Case { what: format!("scale of b, column {col}, block {block} ({place})"), fragments, want });
        }
    }
    cases
}

/// Operands of zeros, with accumulators that all differ.
fn accumulator_case() -> Case {
    let (mut fragments, mut want) = (EMPTY, [[0.0; COLS]; ROWS]);
    for (row, want) in want.iter_mut().enumerate() {
        for (col, want) in want.iter_mut().enumerate() {
            *want = (1 + row * COLS + col) as f32;
            set(&mut fragments, d(row, col), want.to_bits());
        }
    }
    Case { what: "zeros".into(), fragments, want }
}

fn value_at(result: &[[f32; 4]; LANES], place: Place) -> f32 {
    result[place.lane][place.register()]
}

/// The first fault in the result of a case.
fn fault(case: &Case, result: &[[f32; 4]; LANES]) -> Option<String> {
    for (row, want) in case.want.iter().enumerate() {
        for (col, want) in want.iter().enumerate() {
            let (place, got) = (d(row, col), value_at(result, d(row, col)));
            if got != *want {
                return Some(format!("{} alone: d[{row}][{col}] ({place}) is {got}, not {want}", case.what));
            }
        }
    }
    None
}

/// Tests every element and every scale of an MMA.
pub fn mma(cuda: &mut Cuda, forms: &[Mma]) -> Result<Outcome> {
    if forms.iter().any(|form| !cuda.has_mma(*form)) {
        return Ok(Outcome::NotHere);
    }
    let mut count = 0;
    for &form in forms {
        let cases: Vec<Case> = [accumulator_case()].into_iter().chain(element_cases(form)).chain(scale_cases(form)).collect();
        let results = cuda.multiply_fragments(form, &cases.iter().map(|case| case.fragments).collect::<Vec<_>>())?;
        if let Some(fault) = cases.iter().zip(&results).find_map(|(case, result)| fault(case, result)) {
            let selectors =
                if let Mma::Nvf4 { selectors: [a, b] } = form { format!("; selectors {a}, {b}") } else { String::new() };
            return Ok(Outcome::Failed(fault + &selectors));
        }
        count += cases.len();
    }
    Ok(Outcome::passed(format!("{count} cases")))
}

/// Splits 2^exponent into two powers of two that this format has. `None` if it is out of range.
fn factors(dtype: DType, exponent: i32) -> Option<[f32; 2]> {
    let (least, most) = match dtype {
        // Subnormal numbers reach farther, but the instructions need not keep them.
        DType::Bf16 => (-60, 60),
        _ => (-9, 8),
    };
    let first = exponent.clamp(least, most);
    let second = exponent - first;
    (least..=most).contains(&second).then(|| [first, second].map(|e| 2f32.powi(e)))
}

/// A case that computes 2^top - 2^top + 2^(top - n). The result is 2^(top - n) if a sum with 2^top keeps that place, and zero if not.
/// `None` if the format cannot express it.
fn sum_case(mma: Mma, n: i32) -> Option<(Fragments, f32)> {
    let (layout, mut fragments) = (layout(mma), EMPTY);
    let Mma::Nvf4 { selectors } = mma else {
        let top = if layout.dtype == DType::Bf16 { 0 } else { 16 };
        let (large, small) = (factors(layout.dtype, top)?, factors(layout.dtype, top - n)?);
        for (k, [a, b]) in [large, [-large[0], large[1]], small].into_iter().enumerate() {
            set(&mut fragments, layout.a(0, k), code(layout.dtype, a));
            set(&mut fragments, layout.b(0, k), code(layout.dtype, b));
        }
        return Some((fragments, 2f32.powi(top - n)));
    };
    // Scales cover the powers of two of e4m3, and elements add two places.
    let top = 16;
    let (large, rest) = (factors(DType::E4m3, top)?, (n - 34).max(0));
    let (small, elements) = (factors(DType::E4m3, top - n + rest)?, [[1.0, 1.0], [0.5, 1.0], [0.5, 0.5]].get(rest as usize)?);
    let blocks = [(large, [1.0, 1.0]), (large, [-1.0, 1.0]), (small, *elements), ([0.0; 2], [0.0; 2])];
    for (block, (scales, [a, b])) in blocks.into_iter().enumerate() {
        set(&mut fragments, scale_a(selectors[0], 0, block), to_e4m3(scales[0]).into());
        set(&mut fragments, scale_b(selectors[1], 0, block), to_e4m3(scales[1]).into());
        set(&mut fragments, layout.a(0, 16 * block), code(layout.dtype, a));
        set(&mut fragments, layout.b(0, 16 * block), code(layout.dtype, b));
    }
    Some((fragments, 2f32.powi(top - n)))
}

/// The binary places that sums keep below the largest term, as published for this MMA (MMA-Sim, arXiv 2511.10909).
const fn places(mma: Mma, capability: (u32, u32)) -> usize {
    match (mma, capability) {
        (Mma::Bf16, (8, _)) => 24,
        (Mma::E4m3, (8, _)) => 13,
        (Mma::Bf16 | Mma::E4m3 | Mma::E4m3Scaled, _) => 25,
        (Mma::Nvf4 { .. }, _) => 35,
    }
}

/// Judges a number of places. Fewer than published would make results worse than the kernels allow for.
pub fn judge_places(found: usize, most: usize, published: usize) -> Outcome {
    let at_least = if found == most { "at least " } else { "" };
    match found {
        _ if found < published => Outcome::Failed(format!("{found} places are kept, {published} are published")),
        _ if found == published => Outcome::passed(format!("{found} places")),
        _ => Outcome::passed(format!("{at_least}{found} places, {published} are published")),
    }
}

/// How many of the powers of two were kept, from the largest on. Each result is its power of two, or zero.
pub fn kept(results: &[(f32, f32)]) -> usize {
    results.iter().take_while(|(got, want)| got == want).count()
}

/// How many places sums of an MMA keep.
pub fn sums(cuda: &mut Cuda, form: Mma) -> Result<Outcome> {
    if !cuda.has_mma(form) {
        return Ok(Outcome::NotHere);
    }
    let cases: Vec<(Fragments, f32)> = (1..=40).map_while(|n| sum_case(form, n)).collect();
    let results = cuda.multiply_fragments(form, &cases.iter().map(|(fragments, _)| *fragments).collect::<Vec<_>>())?;
    let found: Vec<(f32, f32)> =
        results.iter().zip(&cases).map(|(result, (_, want))| (value_at(result, d(0, 0)), *want)).collect();
    Ok(judge_places(kept(&found), found.len(), places(form, cuda.device().capability)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NVF4: Mma = Mma::Nvf4 { selectors: [1, 2] };

    /// All marks differ, and every product of them is exact.
    #[test]
    fn marks_differ() {
        let all = |marks: Vec<f32>, len: usize| {
            let mut marks = marks;
            marks.sort_by(f32::total_cmp);
            marks.dedup();
            assert_eq!(marks.len(), len);
        };
        all(MARKS.to_vec(), COLS);
        all((0..ROWS * BLOCKS).map(|i| e4m3(mark_a(i / BLOCKS, i % BLOCKS))).collect(), ROWS * BLOCKS);
        all((0..COLS * BLOCKS).map(|i| e4m3(mark_b(i / BLOCKS, i % BLOCKS))).collect(), COLS * BLOCKS);
        for value in MARKS {
            assert_eq!((e2m1(to_e2m1(value)), e4m3(to_e4m3(value))), (value, value));
        }
    }

    /// Every element and every scale is under test in one case.
    #[test]
    fn there_is_a_case_for_every_element() {
        let count = |mma| (element_cases(mma).len(), scale_cases(mma).len());
        assert_eq!(count(Mma::Bf16), (24 * 16, 0));
        assert_eq!(count(Mma::E4m3), (24 * 32, 0));
        assert_eq!(count(NVF4), (24 * 64, 24 * 4));
    }

    #[test]
    fn a_wrong_result_is_named_by_lane_and_register() {
        let case = &element_cases(NVF4)[2];
        assert!(case.what.starts_with("a[2][0] (lane 8, register 0, bits 0 to 3)"), "{}", case.what);
        let mut result = [[0.0; 4]; LANES];
        for (row, values) in case.want.iter().enumerate() {
            values.iter().enumerate().for_each(|(col, v)| result[d(row, col).lane][d(row, col).register()] = *v);
        }
        assert_eq!(fault(case, &result), None);
        result[10][1] = 7.0;
        let text = fault(case, &result).unwrap();
        assert!(text.contains("alone: d[2][5] (lane 10, register 1) is 7, not "), "{text}");
    }

    /// The cases go beyond the published places, to detect a place too few and a place too many.
    #[test]
    fn sums_reach_beyond_what_is_published() {
        for (mma, most) in [(Mma::Bf16, 40), (Mma::E4m3, 34), (Mma::E4m3Scaled, 34), (NVF4, 36)] {
            let count = (1..=40).map_while(|n| sum_case(mma, n)).count();
            assert_eq!(count, most, "{mma:?}");
            assert!(places(mma, (12, 0)) < most);
        }
        assert_eq!(kept(&[(0.5, 0.5), (0.25, 0.25), (0.0, 0.125), (0.0, 0.0625)]), 2);
        assert!(matches!(judge_places(12, 34, 13), Outcome::Failed(text) if text == "12 places are kept, 13 are published"));
        assert!(matches!(judge_places(13, 34, 13), Outcome::Passed(text) if text == "13 places"));
        assert!(matches!(judge_places(25, 34, 13), Outcome::Passed(text) if text == "25 places, 13 are published"));
        assert!(matches!(judge_places(34, 34, 13), Outcome::Passed(text) if text.starts_with("at least 34")));
    }

    #[test]
    fn ties_lie_in_the_middle_of_two_codes() {
        let values = ties(8, e2m1);
        for tie in [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] {
            assert!(values.contains(&tie), "{tie}");
        }
        assert!(ties(0x7f, e4m3).contains(&2f32.powi(-10)));
    }
}
