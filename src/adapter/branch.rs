//! LoRA branches: what adapters add to a weight that is not merged, as one product of two thin matrices.

use super::delta::{KroneckerFactor, Matrix, Product, WeightDelta};
use super::merge::{Adapters, MAX_RANK};
use crate::error::Result;
use crate::names::LayerId;
use crate::tensor::{Arena, DType, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Ranks are padded with zeros to multiples of this, the depth of one tensor core instruction.
const UNIT: usize = 16;

/// A low-rank matrix: the product of `[rows, rank]` and `[rank, cols]`.
struct Thin {
    left: Vec<f32>,
    right: Vec<f32>,
    rank: usize,
}

impl Matrix {
    /// Writes the matrix as a product with the identity, on the smaller side.
    fn with_identity(values: Vec<f32>, [rows, cols]: [usize; 2]) -> Thin {
        let identity = |n: usize| (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect();
        match rows < cols {
            true => Thin { left: identity(rows), right: values, rank: rows },
            false => Thin { left: values, right: identity(cols), rank: cols },
        }
    }
}

impl KroneckerFactor {
    /// The rank of the factor's [`Thin`] form.
    fn thin_rank(&self) -> usize {
        let [rows, cols] = self.shape();
        self.rank().unwrap_or(usize::MAX).min(rows).min(cols)
    }

    fn thin(&self) -> Thin {
        match self {
            Self::Product(a, b) if a.cols == self.thin_rank() => Thin { left: a.values(), right: b.values(), rank: a.cols },
            _ => Matrix::with_identity(self.values(), self.shape()),
        }
    }
}

/// The Kronecker product of two matrices, given with their numbers of columns.
fn kronecker((a, a_cols): (&[f32], usize), (b, b_cols): (&[f32], usize)) -> Vec<f32> {
    let mut out = Vec::with_capacity(a.len() * b.len());
    for a in a.chunks_exact(a_cols) {
        for b in b.chunks_exact(b_cols) {
            a.iter().for_each(|a| out.extend(b.iter().map(|b| a * b)));
        }
    }
    out
}

impl WeightDelta {
    /// The rank of the delta as a product of two matrices. A Kronecker product has the product of its factors' ranks, because `kron(a b, c
    /// d) = kron(a, c) kron(b, d)`.
    pub fn branch_rank(&self) -> usize {
        match &self.product {
            Product::Lora { down, .. } => down.rows,
            Product::Kronecker(w1, w2) => w1.thin_rank().saturating_mul(w2.thin_rank()),
        }
    }

    /// The delta as a product of two matrices, without its scale.
    fn thin(&self) -> Thin {
        match &self.product {
            Product::Lora { down, up } => Thin { left: up.values(), right: down.values(), rank: down.rows },
            Product::Kronecker(w1, w2) => {
                let ([_, j], [_, q], one, two) = (w1.shape(), w2.shape(), w1.thin(), w2.thin());
                Thin {
                    left: kronecker((&one.left, one.rank), (&two.left, two.rank)),
                    right: kronecker((&one.right, j), (&two.right, q)),
                    rank: one.rank * two.rank,
                }
            }
        }
    }
}

impl Adapters {
    /// The rank of a branch's matrices, for deltas with this total rank.
    pub const fn padded(rank: usize) -> usize {
        rank.next_multiple_of(UNIT)
    }

    /// The deltas of a weight as thin products. Each comes with its first column in the branch, its scale, and the rows of the weight that
    /// it is added to.
    fn thin_terms(&self, id: LayerId) -> impl Iterator<Item = (usize, Thin, f32, &[Range<usize>])> {
        self.deltas(id).scan(0, |next, (delta, ranges, strength)| {
            let (first, thin) = (*next, delta.thin());
            *next += thin.rank;
            Some((first, thin, strength * delta.scale, ranges))
        })
    }

    /// Writes the two matrices of a branch as elements of a plain type: `down` is `[rank, in]` and `up` is `[out, rank]`, with a
    /// [padded](Self::padded) rank. The caller passes zeroed buffers.
    ///
    /// # Panics
    /// If the buffers have another shape.
    pub fn write_branch(&self, id: LayerId, rank: usize, dtype: DType, [down, up]: [&mut [u8]; 2]) {
        for (first, thin, scale, ranges) in self.thin_terms(id) {
            let cols = thin.right.len() / thin.rank.max(1);
            let skip = dtype.bytes(first * cols);
            dtype.encode(&thin.right, &mut down[skip..skip + dtype.bytes(thin.rank * cols)]);
            let rows = ranges.iter().flat_map(Clone::clone);
            let mut scaled = vec![0.0; thin.rank];
            for (row, left) in rows.zip(thin.left.chunks_exact(thin.rank)) {
                scaled.iter_mut().zip(left).for_each(|(to, value)| *to = scale * value);
                dtype.encode(&scaled, &mut up[dtype.bytes(row * rank + first)..][..dtype.bytes(thin.rank)]);
            }
            assert!(first + thin.rank <= rank, "a rank of {} in {rank} columns", first + thin.rank);
        }
    }

    /// The two matrices of a branch in f32, row by row: `up` of `[out, rank]` and the transpose of `down`, `[in, rank]`.
    ///
    /// # Panics
    /// If the weight has another shape.
    pub fn factors(&self, id: LayerId, rank: usize, [rows, cols]: [usize; 2]) -> [Vec<f32>; 2] {
        const GRAIN: usize = 64; // rows that are worth a thread
        let [mut up, mut down] = [rows, cols].map(|count| vec![0.0; count * rank]);
        for (first, thin, scale, ranges) in self.thin_terms(id) {
            let own = first..first + thin.rank;
            let mut left = &thin.left[..];
            for range in ranges {
                let of_range = left.split_off(..range.len() * thin.rank).expect("a row of the delta for each of the weight's");
                let to = up[range.start * rank..range.end * rank].par_chunks_exact_mut(rank).with_min_len(GRAIN);
                to.zip(of_range.par_chunks_exact(thin.rank)).for_each(|(to, from)| {
                    to[own.clone()].iter_mut().zip(from).for_each(|(to, value)| *to = scale * value);
                });
            }
            down.par_chunks_exact_mut(rank).with_min_len(GRAIN).enumerate().for_each(|(col, to)| {
                to[own.clone()].iter_mut().zip(thin.right.iter().skip(col).step_by(cols)).for_each(|(to, value)| *to = *value);
            });
        }
        [up, down]
    }

    /// Whether a backend can merge deltas of this total rank in its own memory. `parts` are the stored and the held type of each part. The
    /// host merges weights that are converted on upload, and ranks above `MAX_RANK`.
    pub fn is_added_in_place(rank: usize, mut parts: impl Iterator<Item = [DType; 2]>) -> bool {
        rank <= MAX_RANK && parts.all(|types| types == [DType::Bf16; 2])
    }

    /// Allocates the two matrices of [`factors`](Self::factors).
    pub fn place_factors(region: &mut Arena, rank: usize, [rows, cols]: [usize; 2]) -> Result<[Tensor; 2]> {
        Ok([region.alloc(rows, rank, DType::F32)?, region.alloc(cols, rank, DType::F32)?])
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Adapter, Layer, LayerTarget};
    use super::*;
    use crate::names::LayerRole;
    use crate::tensor::Bytes;
    use std::ops::Range;
    use std::sync::Arc;

    const LAYER: LayerId = LayerRole::ImageIn.only();

    fn matrix(rows: usize, cols: usize) -> Matrix {
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 29 + rows * 7 + cols) % 31) as f32 / 16.0 - 1.0).collect();
        Matrix { bytes: Bytes::new(Arc::new(DType::F32.encoded(&values))), dtype: DType::F32, rows, cols }
    }

    fn whole(rows: usize, cols: usize) -> KroneckerFactor {
        KroneckerFactor::Whole(matrix(rows, cols))
    }

    fn factored(rows: usize, cols: usize, rank: usize) -> KroneckerFactor {
        KroneckerFactor::Product(matrix(rows, rank), matrix(rank, cols))
    }

    fn adapters(rows: Vec<Range<usize>>, cols: usize, products: Vec<Product>) -> Adapters {
        let layers = products.into_iter().map(|product| {
            let target = LayerTarget { id: LAYER, rows: rows.clone(), cols };
            Layer { name: "l".into(), target, delta: WeightDelta { product, scale: 0.5 } }
        });
        let each = layers.map(|layer| {
            let adapter = Adapter { path: "a".into(), layers: vec![layer], unmatched: vec![], digest: String::new(), file: None };
            (adapter, 3.0)
        });
        Adapters(each.collect())
    }

    /// Compares `up down` with the merged deltas.
    fn check(adapters: &Adapters, [rows, cols]: [usize; 2], want_rank: usize) {
        let rank = adapters.rank(LAYER, [rows, cols]).unwrap().unwrap();
        assert_eq!(rank, want_rank);
        let padded = Adapters::padded(rank);
        let (mut down, mut up) = (vec![0; 4 * padded * cols], vec![0; 4 * rows * padded]);
        adapters.write_branch(LAYER, padded, DType::F32, [&mut down, &mut up]);
        let (down, up) = (DType::F32.decoded(&down), DType::F32.decoded(&up));
        let mut want = vec![0.0; rows * cols];
        for (delta, ranges, strength) in adapters.deltas(LAYER) {
            let mut values = vec![0.0; delta.shape().iter().product()];
            delta.add_to(strength, &mut values);
            let rows = ranges.iter().flat_map(Clone::clone);
            for (row, values) in rows.zip(values.chunks_exact(cols)) {
                want[row * cols..][..cols].iter_mut().zip(values).for_each(|(to, value)| *to += value);
            }
        }
        for (i, want) in want.into_iter().enumerate() {
            let (row, col) = (i / cols, i % cols);
            let got: f32 = (0..padded).map(|r| up[row * padded + r] * down[r * cols + col]).sum();
            assert!((got - want).abs() <= 1e-4 * want.abs().max(1.0), "{row} {col}: {got} {want}");
        }
    }

    #[test]
    fn the_matrices_of_a_branch_have_the_product_of_its_terms() {
        let all = |rows: usize| std::iter::once(0..rows).collect::<Vec<_>>();
        let lora = |rows, cols, rank| Product::Lora { down: matrix(rank, cols), up: matrix(rows, rank) };
        check(&adapters(all(24), 12, vec![lora(24, 12, 5)]), [24, 12], 5);
        // Two adapters for some of the rows, with their halves exchanged.
        check(&adapters(vec![12..24, 0..6], 12, vec![lora(18, 12, 17), lora(18, 12, 3)]), [24, 12], 20);
        for (w1, w2, rank) in [
            (whole(4, 3), factored(6, 4, 2), 3 * 2),
            (whole(2, 3), factored(12, 4, 2), 2 * 2),
            (factored(4, 3, 1), factored(6, 4, 2), 2),
            (whole(4, 3), whole(6, 4), 3 * 4),
            (whole(3, 4), whole(8, 3), 3 * 3),
            (factored(4, 3, 2), whole(6, 4), 2 * 4),
            // If the inner dimension is the largest one, the product is not one of thin matrices.
            (whole(4, 3), factored(6, 4, 9), 3 * 4),
        ] {
            check(&adapters(all(24), 12, vec![Product::Kronecker(w1, w2)]), [24, 12], rank);
        }
    }
}
