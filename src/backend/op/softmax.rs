//! The softmax of attention, and when it can skip the row maximum.

use std::f32::consts::LN_2;

/// The softmax of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Softmax {
    /// Softmax to base e, of the scores times `scale`.
    Natural {
        /// Factor of the scores.
        scale: f32,
    },
    /// Softmax to base 2, of unscaled scores: the queries or keys are pre-scaled by log2(e), so the kernel needs no multiplication.
    Base2 {
        /// Upper bound on the scores for any input, which allows a max-free softmax; infinite if none is known.
        bound: f32,
    },
}

impl Softmax {
    /// The factor that turns scores into logits to base e.
    pub const fn natural_scale(self) -> f32 {
        match self {
            Self::Natural { scale } => scale,
            Self::Base2 { .. } => LN_2,
        }
    }

    /// Whether softmax over this many keys can skip the row maximum. Even if every score is as large as the bound, sums of that many
    /// products with values up to 2^11 stay within the range of f32. Even if every score is minus the bound or less, what is flushed to
    /// zero, below 2^-126, is at most 2^-10 of the sum.
    pub fn is_max_free(self, keys: usize) -> bool {
        const LARGEST_EXPONENT: f32 = 127.0;
        const VALUE_EXPONENT: f32 = 11.0;
        let fits = |bound: f32| bound + (keys.max(1) as f32).log2() + VALUE_EXPONENT <= LARGEST_EXPONENT;
        matches!(self, Self::Base2 { bound } if fits(bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_keys_leave_less_room_without_a_maximum() {
        let is_max_free = |bound, keys| Softmax::Base2 { bound }.is_max_free(keys);
        assert!(is_max_free(100.0, 1 << 16) && !is_max_free(100.1, 1 << 16));
        assert!(is_max_free(103.8, 4608) && !is_max_free(103.9, 4608));
        assert!(is_max_free(116.0, 1) && !is_max_free(f32::INFINITY, 1) && !is_max_free(f32::NAN, 1));
        assert!(!Softmax::Natural { scale: 0.1 }.is_max_free(1), "nothing bounds its scores");
    }
}
