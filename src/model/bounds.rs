//! How large the scores of attention can be, from the norms of queries and keys. A normalised head is at most as long as the square
//! root of its size, its norm's weights stretch it, and turning changes no length. So a score is a sum over the pairs of elements
//! that turn together, and none of them counts for more than its share of both lengths times its own weights.

use crate::backend::WeightPart;

/// For what rounding adds to queries and keys, and with room to spare.
const ROUNDING: f32 = 1.02;

/// How much a norm of heads stretches each pair of neighbours, at most. Empty where the weights are not known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stretch(Vec<f32>);

impl Stretch {
    /// Of a norm's weights as they are stored.
    pub fn of(parts: &[WeightPart]) -> Self {
        let values: Vec<f32> = parts.iter().flat_map(|part| part.dtype.decoded(&part.bytes)).collect();
        // What is no number stays: it bounds nothing.
        let larger = |most: f32, v: &f32| if v.is_nan() || v.abs() > most { v.abs() } else { most };
        Self(values.chunks(2).map(|pair| pair.iter().fold(0.0, larger)).collect())
    }

    /// What covers both norms.
    fn or(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| if a > b || a.is_nan() { *a } else { *b }).collect())
    }
}

/// Of the queries and of the keys that meet in a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stretches {
    pub q: Stretch,
    pub k: Stretch,
}

impl Stretches {
    /// What covers both streams.
    pub fn or(&self, other: &Self) -> Self {
        Self { q: self.q.or(&other.q), k: self.k.or(&other.k) }
    }

    /// The largest scaled score of heads that are turned by neighbours.
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

    fn stretch(values: &[f32]) -> Stretch {
        let bytes = DType::Bf16.encoded(values);
        Stretch::of(&[WeightPart { bytes: Bytes::new(Arc::new(bytes)), dtype: DType::Bf16 }])
    }

    #[test]
    fn no_score_is_larger() {
        let q = [0.5, -3.0, 1.0, 0.25, 2.0, 0.0, 1.5, 1.0];
        let k = [2.0, 1.0, 0.5, 4.0, -1.0, 1.0, 0.125, 1.5];
        let d = q.len();
        let bound = Stretches { q: stretch(&q), k: stretch(&k) }.bound(d);
        // Pairs count 3 * 2, 1 * 4, 2 * 1, 1.5 * 1.5: the first one wins.
        assert!((bound - ROUNDING * 6.0 * (d as f32).sqrt()).abs() < 1e-4, "{bound}");
        // All of both lengths in the pair that stretches most, turned so that they meet: that score is the bound, but for rounding.
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
    fn streams_that_meet_count_together_and_what_is_unknown_is_unbounded() {
        let known = Stretches { q: stretch(&[1.0, 2.0, 1.0, 1.0]), k: stretch(&[1.0, 1.0, 3.0, 1.0]) };
        let other = Stretches { q: stretch(&[1.0, 1.0, 4.0, 1.0]), k: stretch(&[1.0, 1.0, 1.0, 1.0]) };
        assert!(other.bound(4) < known.or(&other).bound(4) && known.bound(4) < known.or(&other).bound(4));
        assert_eq!(known.or(&other).bound(4), ROUNDING * 12.0 * 2.0);
        assert_eq!(Stretches::default().bound(4), f32::INFINITY);
        assert_eq!(known.or(&Stretches::default()).bound(4), f32::INFINITY);
        let bad = Stretches { q: stretch(&[f32::NAN, 1.0, 1.0, 1.0]), ..known };
        assert_eq!(bad.bound(4), f32::INFINITY);
    }
}
