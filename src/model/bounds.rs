//! An upper bound on the attention scores of a block, from the gains of its qk-norm. With it attention can use a max-free
//! softmax.
//!
//! After RMS normalisation and before the gain, a head has an L2 norm of at most the square root of its size. The gain scales it,
//! and RoPE is a rotation, which preserves norms. A score is a sum over the pairs of elements that are rotated together; by the
//! Cauchy-Schwarz inequality the sum is at most the product of both norms times the largest product of the gains of one pair.

use crate::tensor::WeightPart;

/// Margin for the rounding of queries and keys, with some reserve.
const ROUNDING: f32 = 1.02;

/// Largest gain of a head norm for each pair of adjacent elements. Empty if the weights are not known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NormGain(Vec<f32>);

impl NormGain {
    /// The gain of a norm, from its weights as they are stored.
    pub fn of(parts: &[WeightPart]) -> Self {
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
        let (q, k) = (&self.q.0, &self.k.0);
        if q.len() * 2 != head_dim || k.len() != q.len() {
            return f32::INFINITY;
        }
        let most = q.iter().zip(k).map(|(q, k)| q * k).fold(0.0, |most: f32, v| if v > most { v } else { most });
        if q.iter().chain(k).all(|v| v.is_finite()) { ROUNDING * most * (head_dim as f32).sqrt() } else { f32::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Bytes, DType};
    use std::sync::Arc;

    fn gain(values: &[f32]) -> NormGain {
        let bytes = DType::Bf16.encoded(values);
        NormGain::of(&[WeightPart::plain(Bytes::new(Arc::new(bytes)), DType::Bf16, 1)])
    }

    #[test]
    fn no_score_exceeds_the_bound() {
        let q = [0.5, -3.0, 1.0, 0.25, 2.0, 0.0, 1.5, 1.0];
        let k = [2.0, 1.0, 0.5, 4.0, -1.0, 1.0, 0.125, 1.5];
        let d = q.len();
        let bound = QkGain { q: gain(&q), k: gain(&k) }.bound(d);
        // The products of the gains are 3 * 2, 1 * 4, 2 * 1 and 1.5 * 1.5; the first is the largest.
        assert!((bound - ROUNDING * 6.0 * (d as f32).sqrt()).abs() < 1e-4, "{bound}");
        // The worst case: both heads are zero outside the pair with the largest gain and parallel in it. But for the rounding
        // margin, that score is the bound.
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

    #[test]
    fn streams_that_share_attention_share_the_bound_and_unknown_gains_are_unbounded() {
        let known = QkGain { q: gain(&[1.0, 2.0, 1.0, 1.0]), k: gain(&[1.0, 1.0, 3.0, 1.0]) };
        let other = QkGain { q: gain(&[1.0, 1.0, 4.0, 1.0]), k: gain(&[1.0, 1.0, 1.0, 1.0]) };
        assert!(other.bound(4) < known.or(&other).bound(4) && known.bound(4) < known.or(&other).bound(4));
        assert_eq!(known.or(&other).bound(4), ROUNDING * 12.0 * 2.0);
        assert_eq!(QkGain::default().bound(4), f32::INFINITY);
        assert_eq!(known.or(&QkGain::default()).bound(4), f32::INFINITY);
        let bad = QkGain { q: gain(&[f32::NAN, 1.0, 1.0, 1.0]), ..known };
        assert_eq!(bad.bound(4), f32::INFINITY);
    }
}
