//! The inverse cosine transform: the algorithm of Loeffler, Ligtenberg and Moschytz ("Practical fast 1-D DCT algorithms with 11
//! multiplications", ICASSP 1989) in integers, with the constants and the roundings of libjpeg's accurate integer transform.
//!
//! Two passes over eight columns at once. Between them values keep [`EXTRA`] bits more than they need. Where a file asks for more
//! than 16 bits, sums wrap and results saturate as they do in the vector code of libjpeg-turbo; no encoder makes such files.

use super::block::Block;
use std::num::Wrapping;

/// The constants have so many bits behind the point.
const CONSTANT: usize = 13;

/// What the first pass keeps for the second.
const EXTRA: usize = 2;

/// Eight columns at once.
type Lanes = [i16; 8];

/// A positive number with [`CONSTANT`] bits behind the point, rounded.
const fn fixed(value: f64) -> i32 {
    (value * (1 << CONSTANT) as f64 + 0.5) as i32
}

/// Dequantises the coefficients of a block and writes its 8 x 8 samples to rows that are `stride` apart.
pub(super) fn block(coefficients: &Block, quantisers: &Block, only_dc: bool, out: &mut [u8], stride: usize) {
    if only_dc {
        let value = coefficients[0].wrapping_mul(quantisers[0]).wrapping_shl(EXTRA as u32);
        let sample = sample(saturated((i32::from(value) + 16) >> 5));
        out.chunks_mut(stride).take(8).for_each(|row| row[..8].fill(sample));
        return;
    }
    let mut rows = [[0; 8]; 8];
    let values = coefficients.iter().zip(quantisers).map(|(c, q)| c.wrapping_mul(*q));
    rows.as_flattened_mut().iter_mut().zip(values).for_each(|(to, value)| *to = value);
    // A block has few coefficients; with all of them in the first row its columns are constant.
    if rows[1..].as_flattened().iter().all(|&v| v == 0) {
        let first = rows[0].map(|v| v.wrapping_shl(EXTRA as u32));
        rows = [first; 8];
    } else {
        rows = pass::<{ CONSTANT - EXTRA }>(&rows);
    }
    let columns = pass::<{ CONSTANT + EXTRA + 3 }>(&transposed(rows));
    for (to, row) in out.chunks_mut(stride).zip(transposed(columns)) {
        let mut samples = [0; 8];
        samples.iter_mut().zip(row).for_each(|(to, value)| *to = sample(value));
        to[..8].copy_from_slice(&samples);
    }
}

/// A value around zero as a sample.
#[inline(always)]
fn sample(value: i16) -> u8 {
    (value.clamp(-128, 127) + 128) as u8
}

#[inline(always)]
fn saturated(value: i32) -> i16 {
    value.clamp(i32::from(i16::MIN), i32::from(i16::MAX)) as i16
}

/// Rows become columns: three times, the upper and the lower half of the rows are interleaved, which vectors are good at.
#[inline(always)]
fn transposed(mut rows: [Lanes; 8]) -> [Lanes; 8] {
    for _ in 0..3 {
        let mut next = [[0; 8]; 8];
        for i in 0..4 {
            let (a, b) = (rows[i], rows[i + 4]);
            next[2 * i] = [a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]];
            next[2 * i + 1] = [a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]];
        }
        rows = next;
    }
    rows
}

/// Transforms the columns; `DOWN` bits are rounded away.
fn pass<const DOWN: usize>(rows: &[Lanes; 8]) -> [Lanes; 8] {
    let mut out = [[0; 8]; 8];
    for lane in 0..8 {
        let column = column::<DOWN>(std::array::from_fn(|k| rows[k][lane]));
        for (row, value) in out.iter_mut().zip(column) {
            row[lane] = value;
        }
    }
    out
}

/// One column. The multiplications are grouped in pairs of 16-bit factors, which compilers know an instruction for.
#[inline(always)]
fn column<const DOWN: usize>(s: [i16; 8]) -> [i16; 8] {
    let wide = |v: i16| Wrapping(i32::from(v));
    let pair = |a: i16, by_a: i32, b: i16, by_b: i32| wide(a) * Wrapping(by_a) + wide(b) * Wrapping(by_b);

    // Even part: a sum, a difference and a rotation.
    const E: i32 = fixed(0.541_196_100);
    let t0 = wide(s[0].wrapping_add(s[4])) << CONSTANT;
    let t1 = wide(s[0].wrapping_sub(s[4])) << CONSTANT;
    let t2 = pair(s[2], E, s[6], E - fixed(1.847_759_065));
    let t3 = pair(s[2], E + fixed(0.765_366_865), s[6], E);
    let even = [t0 + t3, t1 + t2, t1 - t2, t0 - t3];

    // Odd part: the outer and the inner two inputs share a rotation each, and all four share another.
    const OUTER: i32 = -fixed(0.899_976_223);
    const INNER: i32 = -fixed(2.562_915_447);
    const ALL: i32 = fixed(1.175_875_602);
    let [t0, t1, t2, t3] = [s[7], s[5], s[3], s[1]];
    let (z3, z4) = (t0.wrapping_add(t2), t1.wrapping_add(t3));
    let y3 = pair(z3, ALL - fixed(1.961_570_560), z4, ALL);
    let y4 = pair(z3, ALL, z4, ALL - fixed(0.390_180_644));
    let odd = [
        pair(t3, OUTER + fixed(1.501_321_110), t0, OUTER) + y4,
        pair(t2, INNER + fixed(3.072_711_026), t1, INNER) + y3,
        pair(t1, INNER + fixed(2.053_119_869), t2, INNER) + y4,
        pair(t0, OUTER + fixed(0.298_631_336), t3, OUTER) + y3,
    ];

    let half = Wrapping(1 << (DOWN - 1));
    let down = |v: Wrapping<i32>| saturated(((v + half) >> DOWN).0);
    std::array::from_fn(|k| if k < 4 { down(even[k] + odd[k]) } else { down(even[7 - k] - odd[7 - k]) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::{FRAC_1_SQRT_2, PI};

    /// The definition (ITU T.81, A.3.3).
    fn exact(coefficients: &Block) -> [f64; 64] {
        let scale = |k: usize| if k == 0 { FRAC_1_SQRT_2 } else { 1.0 };
        let wave = |x: usize, k: usize| ((2 * x + 1) as f64 * k as f64 * PI / 16.0).cos() * scale(k);
        std::array::from_fn(|at| {
            let (y, x) = (at / 8, at % 8);
            let term = |k: usize| f64::from(coefficients[k]) * wave(y, k / 8) * wave(x, k % 8);
            (0..64).map(term).sum::<f64>() / 4.0 + 128.0
        })
    }

    #[test]
    fn samples_are_those_of_the_definition() {
        let mut state = 1u64;
        let mut off = 0;
        for case in 0..500 {
            let coefficients: Block = std::array::from_fn(|k| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let value = (state >> 33) as i16 % if k == 0 { 1000 } else { 300 };
                // From a single coefficient to all of them.
                if k <= case / 4 { value / (1 + k as i16) } else { 0 }
            });
            let (mut samples, want) = ([0; 64], exact(&coefficients));
            block(&coefficients, &[1; 64], case < 4, &mut samples, 8);
            for (&got, want) in samples.iter().zip(want) {
                let want = want.clamp(0.0, 255.0);
                assert!((f64::from(got) - want).abs() < 0.6, "case {case}: {got}, not {want}");
                off += usize::from((f64::from(got) - want).abs() > 0.5);
            }
        }
        assert!(off < 1000, "{off} of 32000 are rounded the other way");
    }

    #[test]
    fn shortcuts_change_nothing() {
        let quantisers: Block = std::array::from_fn(|k| k as i16 + 1);
        for dc in [-1500, -300, -1, 0, 7, 100, 1500] {
            let coefficients: Block = std::array::from_fn(|k| if k == 0 { dc } else { 0 });
            let (mut short, mut long) = ([0; 64], [0; 64]);
            block(&coefficients, &quantisers, true, &mut short, 8);
            block(&coefficients, &quantisers, false, &mut long, 8);
            assert_eq!(short, long);
        }
        let row: Block = std::array::from_fn(|k| if k < 8 { 40 - 9 * k as i16 } else { 0 });
        let (mut short, mut long) = ([0; 64], [0; 64]);
        block(&row, &[3; 64], false, &mut short, 8);
        let mut rows = [[0; 8]; 8];
        rows.as_flattened_mut().iter_mut().zip(row).for_each(|(to, v)| *to = v * 3);
        let columns = pass::<{ CONSTANT + EXTRA + 3 }>(&transposed(pass::<{ CONSTANT - EXTRA }>(&rows)));
        long.iter_mut().enumerate().for_each(|(at, to)| *to = sample(columns[at % 8][at / 8]));
        assert_eq!(short, long);
    }
}
