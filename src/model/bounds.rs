//! An upper bound on the attention scores of a block, from the gains of its qk-norm. The bound allows attention to use a max-free
//! softmax.
//!
//! After RMS normalization and before the gain, a head has an L2 norm of at most the square root of its size. The gain scales it,
//! and RoPE is a rotation, which preserves norms. A score is a sum over the pairs of elements that are rotated together; by the
//! Cauchy-Schwarz inequality the sum is at most the product of both norms times the largest product of the gains of one pair.

use crate::tensor::WeightSlice;
use std::f32::consts::{LOG2_E, SQRT_2};

/// Margin for the rounding of queries and keys to bf16, with some reserve.
const ROUNDING: f32 = 1.02;

/// The largest gain of a head norm for each pair of adjacent elements. Empty if the weights are unknown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NormGain(Vec<f32>);

impl NormGain {
    /// The gain of a norm, from its stored weights.
    pub fn of(parts: &[WeightSlice]) -> Self {
        let mut values = Vec::new();
        for (part, row) in parts.iter().flat_map(|part| (0..part.rows).map(move |row| (part, row))) {
            let first = values.len();
            values.resize(first + part.cols(), 0.0);
            part.decode(row, &mut values[first..]);
        }
        // NaN must propagate, so that the bound becomes infinite.
        let larger = |most: f32, v: &f32| if v.is_nan() || v.abs() > most { v.abs() } else { most };
        Self(values.chunks(2).map(|pair| pair.iter().fold(0.0, larger)).collect())
    }

    /// The length of the vector of these gains.
    fn length(&self) -> f32 {
        self.0.iter().map(|v| v * v).sum::<f32>().sqrt()
    }

    /// The larger of both gains, pair by pair.
    fn or(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| if a > b || a.is_nan() { *a } else { *b }).collect())
    }
}

/// The gains of the query norm and the key norm of a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QkGain {
    pub q: NormGain,
    pub k: NormGain,
}

impl QkGain {
    /// The larger of both gains, for streams that share one attention.
    pub fn or(&self, other: &Self) -> Self {
        Self { q: self.q.or(&other.q), k: self.k.or(&other.k) }
    }

    /// The upper bound on scaled scores, for heads with [interleaved](crate::backend::RopeStyle::Interleaved) RoPE.
    pub fn bound(&self, head_dim: usize) -> f32 {
        ROUNDING * self.exact_bound(head_dim)
    }

    /// The upper bound on base-2 scores of heads that are multiplied by `scale`, the root of log2(e)/sqrt(d), and rounded to
    /// e4m3. A normal number grows by less than 1/17 of itself, from the middle of two codes, 17/16, to 18/16. A subnormal number
    /// grows by at most 2^-10. So a pair of length `a` becomes at most `18/17 a + t` long with `t = sqrt(2) 2^-10`. The sum of
    /// `a` over all pairs is at most the length of the head times the length of its gains.
    pub fn e4m3_bound(&self, head_dim: usize, scale: f32) -> f32 {
        let (growth, t, d) = (18.0 / 17.0, SQRT_2 / 1024.0, head_dim as f32);
        let (exact, lengths) = (self.exact_bound(head_dim), scale * d.sqrt() * (self.q.length() + self.k.length()));
        // Unknown or infinite gains have no meaningful length.
        if exact.is_infinite() { exact } else { growth * growth * LOG2_E * exact + growth * t * lengths + d / 2.0 * t * t }
    }

    /// The bound without rounding.
    fn exact_bound(&self, head_dim: usize) -> f32 {
        let (q, k) = (&self.q.0, &self.k.0);
        if q.len() * 2 != head_dim || k.len() != q.len() {
            return f32::INFINITY;
        }
        let most = q.iter().zip(k).map(|(q, k)| q * k).fold(0.0, |most: f32, v| if v > most { v } else { most });
        if q.iter().chain(k).all(|v| v.is_finite()) { most * (head_dim as f32).sqrt() } else { f32::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::formats::{e4m3, to_e4m3};
    use crate::tensor::{Bytes, DType};
    use std::sync::Arc;

    fn gain(values: &[f32]) -> NormGain {
        let bytes = DType::Bf16.encoded(values);
        NormGain::of(&[WeightSlice::plain(Bytes::new(Arc::new(bytes)), DType::Bf16, 1)])
    }

    #[test]
    fn no_score_exceeds_the_bound() {
        let q = [0.5, -3.0, 1.0, 0.25, 2.0, 0.0, 1.5, 1.0];
        let k = [2.0, 1.0, 0.5, 4.0, -1.0, 1.0, 0.125, 1.5];
        let d = q.len();
        let bound = QkGain { q: gain(&q), k: gain(&k) }.bound(d);
        // The products of the gains are 3 * 2, 1 * 4, 2 * 1 and 1.5 * 1.5; the first is the largest.
        assert!((bound - ROUNDING * 6.0 * (d as f32).sqrt()).abs() < 1e-4, "{bound}");
        // The worst case: both heads are zero outside the pair with the largest gain and parallel in it. Apart from the rounding
        // margin, the score is the bound.
        let length = (d as f32).sqrt();
        assert!(3.0 * length * 2.0 * length / length <= bound);
        let mut worst: f32 = 0.0;
        for seed in 0..2000_u32 {
            let random =
                |i: u32| (seed.wrapping_mul(2_654_435_761).wrapping_add(i.wrapping_mul(40_503)) >> 7 & 1023) as f32 / 512.0 - 1.0;
            let head = |weights: &[f32], first: u32, angle: f32| -> Vec<f32> {
                let x: Vec<f32> = (0..d as u32).map(|i| random(first + i)).collect();
                let rms = (x.iter().map(|v| v * v).sum::<f32>() / d as f32).sqrt().max(1e-6);
                let x: Vec<f32> = x.iter().zip(weights).map(|(v, w)| v / rms * w).collect();
                let (sin, cos) = angle.sin_cos();
                x.chunks(2).flat_map(|p| [p[0] * cos - p[1] * sin, p[0] * sin + p[1] * cos]).collect()
            };
            let (a, b) = (head(&q, 0, random(50) * 3.0), head(&k, 100, random(60) * 3.0));
            worst = worst.max(a.iter().zip(&b).map(|(a, b)| a * b).sum::<f32>().abs() / length);
        }
        assert!(worst <= bound && worst > bound / 8.0, "{worst} of {bound}");
    }

    /// Elements just above the middle of two codes, which round up by the most, and subnormal ones.
    #[test]
    fn no_score_of_rounded_heads_exceeds_their_bound() {
        let d = 8;
        let scale = (LOG2_E / (d as f32).sqrt()).sqrt();
        let round = |v: f32| e4m3(to_e4m3(v));
        for weight in [1.0, 0.01, 30.0] {
            // A head of equal elements: its gain of `weight` makes each `weight * scale`. The scale that makes them the middle of
            // two codes is a little smaller, so they are within the bound.
            let gains = QkGain { q: gain(&[weight; 8]), k: gain(&[weight; 8]) };
            let bound = gains.e4m3_bound(d, scale);
            let element = weight * scale;
            let worst = (0..1000).map(|i| element * (1.0 - i as f32 / 2000.0)).map(round).fold(0.0, f32::max);
            assert!(worst * worst * d as f32 <= bound, "{worst} {bound}");
            assert!(bound <= 1.129 * LOG2_E * gains.bound(d) / ROUNDING + 0.05 * weight + 1e-4, "{bound}");
        }
        // The largest growth of a normal number: slightly more than 1.0625 becomes 1.125. Bf16's margin would not be enough.
        let (q, k) = ([1.07_f32; 8], [1.07_f32; 8]);
        let rounded: f32 = q.iter().zip(&k).map(|(q, k)| round(*q) * round(*k)).sum();
        let exact: f32 = q.iter().zip(&k).map(|(q, k)| q * k).sum();
        assert!(rounded > ROUNDING * exact && rounded <= (18.0_f32 / 17.0).powi(2) * exact, "{rounded} {exact}");
        assert_eq!(QkGain::default().e4m3_bound(4, 1.0), f32::INFINITY);
    }

    #[test]
    fn streams_that_share_attention_share_the_bound_and_unknown_gains_are_unbounded() {
        let known = QkGain { q: gain(&[1.0, 2.0, 1.0, 1.0]), k: gain(&[1.0, 1.0, 3.0, 1.0]) };
        let other = QkGain { q: gain(&[1.0, 1.0, 4.0, 1.0]), k: gain(&[1.0, 1.0, 1.0, 1.0]) };
        assert!(other.bound(4) < known.or(&other).bound(4) && known.bound(4) < known.or(&other).bound(4));
        assert_eq!(known.or(&other).bound(4), ROUNDING * 12.0 * 2.0);
        assert_eq!(QkGain::default().bound(4), f32::INFINITY);
        assert_eq!(known.or(&QkGain::default()).bound(4), f32::INFINITY);
        let bad = QkGain { q: gain(&[f32::NAN, 1.0, 1.0, 1.0]), ..known };
        assert_eq!((bad.bound(4), bad.e4m3_bound(4, 1.0)), (f32::INFINITY, f32::INFINITY));
    }
}
