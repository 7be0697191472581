//! The delta that an adapter adds to a layer's weight: a product of two low-rank matrices (LoRA, Hu et al. 2021) or a Kronecker product
//! (LoKr, Yeh et al. 2023). Deltas stay factored in memory.

use crate::tensor::{Bytes, DType};
use kiln_numerics::merging::{BLOCK, Panels, ScaledDelta};
use rayon::prelude::*;

/// A matrix as the file stores it.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The elements, row by row.
    pub bytes: Bytes,
    /// The elements' type.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
}

impl Matrix {
    /// All values, row by row.
    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.cols];
        self.dtype.decode(&self.bytes, &mut values);
        values
    }

    /// The largest magnitude; infinite if a value is not a number.
    fn largest(&self) -> f64 {
        let magnitude = |value: &f32| if value.is_nan() { f64::INFINITY } else { f64::from(value.abs()) };
        self.values().par_iter().map(magnitude).reduce(|| 0.0, f64::max)
    }
}

/// A factor of a Kronecker product: a matrix, or the product of two.
#[derive(Clone, Debug)]
pub enum KroneckerFactor {
    /// The matrix itself.
    Whole(Matrix),
    /// The product of two matrices, in this order.
    Product(Matrix, Matrix),
}

impl KroneckerFactor {
    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Whole(whole) => [whole.rows, whole.cols],
            Self::Product(a, b) => [a.rows, b.cols],
        }
    }

    /// The inner dimension of a product.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Whole(_) => None,
            Self::Product(a, _) => Some(a.cols),
        }
    }

    pub(super) fn values(&self) -> Vec<f32> {
        match self {
            Self::Whole(whole) => whole.values(),
            Self::Product(a, b) => product(a.values(), &b.values(), a.cols),
        }
    }
}

/// The matrix that is added to the weight of a layer, or to rows of one, before scaling.
#[derive(Clone, Debug)]
pub enum Product {
    /// The product `up down`.
    Lora {
        /// `[rank, in]`.
        down: Matrix,
        /// `[out, rank]`.
        up: Matrix,
    },
    /// The Kronecker product: each element of the first factor times all of the second.
    Kronecker(KroneckerFactor, KroneckerFactor),
}

/// A scaled delta.
#[derive(Clone, Debug)]
pub struct WeightDelta {
    /// The unscaled delta.
    pub product: Product,
    /// The factor.
    pub scale: f32,
}

impl WeightDelta {
    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        match &self.product {
            Product::Lora { down, up } => [up.rows, down.cols],
            Product::Kronecker(w1, w2) => {
                let ([i, j], [p, q]) = (w1.shape(), w2.shape());
                // Saturated values differ from every weight's size, so the caller refuses them.
                [i.saturating_mul(p), j.saturating_mul(q)]
            }
        }
    }

    /// The rank, if it is known from the shapes.
    pub fn rank(&self) -> Option<usize> {
        match &self.product {
            Product::Lora { down, .. } => Some(down.rows),
            Product::Kronecker(w1, w2) => w2.rank().or(w1.rank()),
        }
    }

    /// Whether the values and the factors' values are finite in f32. Large finite factors can have an infinite product.
    pub fn is_finite(&self) -> bool {
        let factor = |factor: &KroneckerFactor| match factor {
            KroneckerFactor::Whole(whole) => whole.largest(),
            KroneckerFactor::Product(a, b) => a.largest() * b.largest() * a.cols as f64,
        };
        let (first, second, inner) = match &self.product {
            Product::Lora { down, up } => (up.largest(), down.largest(), down.rows),
            Product::Kronecker(w1, w2) => (factor(w1), factor(w2), 1),
        };
        let scaled = first * f64::from(self.scale.abs());
        // Infinity times zero is NaN, which is not below the limit either.
        [first, second, scaled, scaled * second * inner as f64].iter().all(|bound| *bound <= f64::from(f32::MAX))
    }

    /// The delta times `strength`, with f32 factors.
    pub(super) fn scaled(&self, strength: f32) -> ScaledDelta {
        let scale = strength * self.scale;
        let times = |mut values: Vec<f32>| {
            values.iter_mut().for_each(|value| *value *= scale);
            values
        };
        match &self.product {
            Product::Lora { down, up } => {
                ScaledDelta::Lora { up: times(up.values()), down: Panels::new(&down.values(), down.rows, down.cols) }
            }
            Product::Kronecker(w1, w2) => {
                let ([_, j], [p, q]) = (w1.shape(), w2.shape());
                ScaledDelta::Kronecker { w1: times(w1.values()), w2: w2.values(), j, p, q }
            }
        }
    }

    /// Adds `strength` times the delta to a matrix of the same shape, in f32.
    ///
    /// # Panics
    /// If the matrix has another number of elements.
    pub fn add_to(&self, strength: f32, to: &mut [f32]) {
        let [rows, cols] = self.shape();
        assert_eq!(to.len(), rows * cols, "the shape of a delta");
        if strength * self.scale == 0.0 || to.is_empty() {
            return;
        }
        let scaled = self.scaled(strength);
        to.par_chunks_mut(BLOCK * cols).enumerate().for_each(|(block, to)| scaled.add_rows(block * BLOCK, to));
    }
}

/// The product of two matrices in f32; `inner` is the number of columns of the first.
fn product(a: Vec<f32>, b: &[f32], inner: usize) -> Vec<f32> {
    let (rows, cols) = (a.len().checked_div(inner).unwrap_or(0), b.len().checked_div(inner).unwrap_or(0));
    let mut out = vec![0.0; rows * cols];
    ScaledDelta::Lora { up: a, down: Panels::new(b, inner, cols) }.add_rows(0, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn matrix(rows: usize, cols: usize, values: &[f32]) -> Matrix {
        assert_eq!(values.len(), rows * cols);
        Matrix { bytes: Bytes::new(Arc::new(DType::F32.encoded(values))), dtype: DType::F32, rows, cols }
    }

    fn added(delta: &WeightDelta, strength: f32) -> Vec<f32> {
        let [rows, cols] = delta.shape();
        let mut to = vec![1.0; rows * cols];
        delta.add_to(strength, &mut to);
        to
    }

    #[test]
    fn a_low_rank_term_is_a_product() {
        let down = matrix(2, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let up = matrix(2, 2, &[1.0, 0.0, 10.0, -1.0]);
        let delta = WeightDelta { product: Product::Lora { down, up }, scale: 0.5 };
        assert_eq!((delta.shape(), delta.rank()), ([2, 3], Some(2)));
        // 1 + 2 * 0.5 * [[1 2 3], [6 15 24]]
        assert_eq!(added(&delta, 2.0), [2.0, 3.0, 4.0, 7.0, 16.0, 25.0]);
        assert_eq!(added(&delta, 0.0), [1.0; 6]);
    }

    #[test]
    fn a_kronecker_term_repeats_its_second_factor() {
        let w1 = KroneckerFactor::Whole(matrix(2, 2, &[1.0, 2.0, 3.0, 4.0]));
        let w2 = KroneckerFactor::Product(matrix(1, 1, &[2.0]), matrix(1, 3, &[1.0, 0.0, -1.0]));
        let delta = WeightDelta { product: Product::Kronecker(w1, w2), scale: 1.0 };
        assert_eq!((delta.shape(), delta.rank()), ([2, 6], Some(1)));
        let want = [2.0, 0.0, -2.0, 4.0, 0.0, -4.0, 6.0, 0.0, -6.0, 8.0, 0.0, -8.0].map(|v| v + 1.0);
        assert_eq!(added(&delta, 1.0), want);
    }

    #[test]
    fn what_is_not_finite_is_noticed() {
        let good = matrix(1, 2, &[1.0, 2.0]);
        let bad = matrix(2, 1, &[f32::NAN, 1.0]);
        let delta = WeightDelta { product: Product::Lora { down: good, up: bad }, scale: 1.0 };
        assert!(!delta.is_finite());
    }
}
