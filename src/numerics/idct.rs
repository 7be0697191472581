//! The inverse DCT: the algorithm of Loeffler, Ligtenberg and Moschytz ("Practical fast 1-D DCT algorithms with 11
//! multiplications", ICASSP 1989) in integers, with the constants and roundings of libjpeg's accurate integer IDCT
//! (`JDCT_ISLOW`).
//!
//! Two passes run over eight columns at once. Between them, values keep `PASS1_BITS` fractional bits. If a file needs more than
//! 16 bits, sums wrap and results saturate as in the SIMD code of libjpeg-turbo; no encoder writes such files.

use std::num::Wrapping;

/// The coefficients of a block, row by row, or the samples.
pub type Block = [i16; 64];

/// Fractional bits of the constants.
const CONST_BITS: usize = 13;

/// Fractional bits of the result of the first pass.
const PASS1_BITS: usize = 2;

/// Eight columns at once.
type Lanes = [i16; 8];

/// A positive number in fixed point with [`CONST_BITS`] fractional bits, rounded.
const fn fixed(value: f64) -> i32 {
    (value * (1 << CONST_BITS) as f64 + 0.5) as i32
}

/// A mask of the coefficients outside the first `ROWS` rows and `COLUMNS` columns.
const fn outside<const ROWS: usize, const COLUMNS: usize>() -> Block {
    let (mut mask, mut at) = ([0; 64], 0);
    while at < 64 {
        mask[at] = if at / 8 < ROWS && at % 8 < COLUMNS { 0 } else { -1 };
        at += 1;
    }
    mask
}

/// Whether all coefficients outside the first `ROWS` rows and `COLUMNS` columns are zero.
#[inline(always)]
fn within<const ROWS: usize, const COLUMNS: usize>(coefficients: &Block) -> bool {
    let mask = const { &outside::<ROWS, COLUMNS>() };
    coefficients.iter().zip(mask).fold(0, |all, (c, m)| all | (c & m)) == 0
}

/// Dequantizes the coefficients of a block and writes its 8 x 8 samples to rows that are `stride` apart.
pub fn block(coefficients: &Block, quantizers: &Block, out: &mut [u8], stride: usize) {
    // Most blocks of most images are smooth and have few coefficients.
    if within::<1, 1>(coefficients) {
        let value = coefficients[0].wrapping_mul(quantizers[0]).wrapping_shl(PASS1_BITS as u32);
        let sample = sample(saturated((i32::from(value) + 16) >> 5));
        out.chunks_mut(stride).take(8).for_each(|row| row[..8].fill(sample));
    } else if within::<4, 4>(coefficients) {
        transform::<4>(coefficients, quantizers, out, stride);
    } else {
        transform::<8>(coefficients, quantizers, out, stride);
    }
}

/// Runs both passes for a block whose coefficients are zero outside the first `SIDE` rows and columns.
fn transform<const SIDE: usize>(coefficients: &Block, quantizers: &Block, out: &mut [u8], stride: usize) {
    let mut rows = [[0; 8]; 8];
    let values = coefficients.iter().zip(quantizers).map(|(c, q)| c.wrapping_mul(*q));
    rows.as_flattened_mut().iter_mut().zip(values).take(8 * SIDE).for_each(|(to, value)| *to = value);
    let rows = if within::<1, 8>(coefficients) {
        // The columns are constant. A product that fills 16 bits overflows in this shift but saturates in a pass, as in Pillow.
        [rows[0].map(|value| value.wrapping_shl(PASS1_BITS as u32)); 8]
    } else {
        pass::<{ CONST_BITS - PASS1_BITS }, SIDE, SIDE>(&rows)
    };
    let columns = pass::<{ CONST_BITS + PASS1_BITS + 3 }, SIDE, 8>(&transposed(&rows));
    let mut samples = [[0; 8]; 8];
    let values = columns.as_flattened().iter().map(|&value| sample(value));
    samples.as_flattened_mut().iter_mut().zip(values).for_each(|(to, sample)| *to = sample);
    for (to, row) in out.chunks_mut(stride).zip(transposed_bytes(samples)) {
        to[..8].copy_from_slice(&row);
    }
}

/// Shifts a signed value to the range of samples.
#[inline(always)]
fn sample(value: i16) -> u8 {
    (value.clamp(-128, 127) + 128) as u8
}

#[inline(always)]
fn saturated(value: i32) -> i16 {
    value.clamp(i32::from(i16::MIN), i32::from(i16::MAX)) as i16
}

/// The transposed matrix.
fn transposed(rows: &[Lanes; 8]) -> [Lanes; 8] {
    let mut out = [[0; 8]; 8];
    for (y, row) in out.iter_mut().enumerate() {
        for (to, from) in row.iter_mut().zip(rows) {
            *to = from[y];
        }
    }
    out
}

/// The transposed matrix of bytes, with a row in each 64-bit word: blocks of 1, 2 and 4 bytes are swapped across the diagonal.
#[inline(always)]
fn transposed_bytes(rows: [[u8; 8]; 8]) -> [[u8; 8]; 8] {
    let mut words = rows.map(u64::from_le_bytes);
    for (apart, mask) in [(1, 0x00FF_00FF_00FF_00FF), (2, 0x0000_FFFF_0000_FFFF), (4, 0x0000_0000_FFFF_FFFF)] {
        for i in (0..8).filter(|i| i & apart == 0) {
            let swapped = ((words[i] >> (8 * apart)) ^ words[i + apart]) & mask;
            words[i] ^= swapped << (8 * apart);
            words[i + apart] ^= swapped;
        }
    }
    words.map(u64::to_le_bytes)
}

/// Transforms `LANES` columns whose values are zero below the first `SIDE` rows; the result is rounded by `DESCALE` bits.
#[inline(always)]
fn pass<const DESCALE: usize, const SIDE: usize, const LANES: usize>(rows: &[Lanes; 8]) -> [Lanes; 8] {
    let mut out = [[0; 8]; 8];
    for lane in 0..LANES {
        let column = column::<DESCALE>(std::array::from_fn(|k| if k < SIDE { rows[k][lane] } else { 0 }));
        for (row, value) in out.iter_mut().zip(column) {
            row[lane] = value;
        }
    }
    out
}

/// Transforms one column. The multiplications are pairs of 16-bit factors, for which there is a SIMD instruction.
#[inline(always)]
fn column<const DESCALE: usize>(s: [i16; 8]) -> [i16; 8] {
    let wide = |v: i16| Wrapping(i32::from(v));
    let pair = |a: i16, by_a: i32, b: i16, by_b: i32| wide(a) * Wrapping(by_a) + wide(b) * Wrapping(by_b);

    // Even part: a sum, a difference and a rotation.
    const E: i32 = fixed(0.541_196_100);
    let t0 = wide(s[0].wrapping_add(s[4])) << CONST_BITS;
    let t1 = wide(s[0].wrapping_sub(s[4])) << CONST_BITS;
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

    let half = Wrapping(1 << (DESCALE - 1));
    let descale = |v: Wrapping<i32>| saturated(((v + half) >> DESCALE).0);
    std::array::from_fn(|k| if k < 4 { descale(even[k] + odd[k]) } else { descale(even[7 - k] - odd[7 - k]) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::{FRAC_1_SQRT_2, PI};

    /// The IDCT by definition (ITU T.81, A.3.3).
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
                // The cases go from a single coefficient to all of them.
                if k <= case / 4 { value / (1 + k as i16) } else { 0 }
            });
            let (mut samples, want) = ([0; 64], exact(&coefficients));
            block(&coefficients, &[1; 64], &mut samples, 8);
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
        let quantizers: Block = std::array::from_fn(|k| k as i16 + 1);
        for (side, scale) in [(1, 1500), (1, -300), (1, 7), (2, 100), (4, 60), (4, -9), (5, 20), (8, 3)] {
            let inside = |k: usize| k / 8 < side && k % 8 < side;
            let coefficients: Block = std::array::from_fn(|k| if inside(k) { scale / (1 + k as i16) } else { 0 });
            let (mut short, mut long) = ([0; 64], [0; 64]);
            block(&coefficients, &quantizers, &mut short, 8);
            transform::<8>(&coefficients, &quantizers, &mut long, 8);
            assert_eq!(short, long);
        }
        let row = |k: usize| if k < 8 { 90 - 17 * k as i16 } else { 0 };
        let rows: [Lanes; 8] = std::array::from_fn(|y| std::array::from_fn(|x| row(8 * y + x)));
        assert_eq!(pass::<{ CONST_BITS - PASS1_BITS }, 8, 8>(&rows), [rows[0].map(|value| value << PASS1_BITS); 8]);
    }
}
