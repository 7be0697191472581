//! Weights of linear layers.

use crate::tensor::Tensor;
use std::ops::Range;

/// The most parts a weight can have. The fused projection of a single block has this many.
const MAX_PARTS: usize = 4;

/// The weight of a linear layer: its rows in order, in parts that each have a format. A checkpoint may store the matrices stacked here in
/// different formats, each with its own scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The first `count` are in use.
    parts: [Tensor; MAX_PARTS],
    count: usize,
}

impl Weight {
    /// A weight of one part.
    pub const fn new(tensor: Tensor) -> Self {
        Self { parts: [tensor; MAX_PARTS], count: 1 }
    }

    /// A weight of several parts. `None` if there are no parts, too many, or parts of different widths.
    pub fn stack(tensors: &[Tensor]) -> Option<Self> {
        let (first, fits) = (*tensors.first()?, tensors.len() <= MAX_PARTS);
        if !fits || tensors.iter().any(|t| t.cols != first.cols) {
            return None;
        }
        let mut parts = [first; MAX_PARTS];
        parts[..tensors.len()].copy_from_slice(tensors);
        Some(Self { parts, count: tensors.len() })
    }

    /// The parts in row order.
    pub fn parts(&self) -> &[Tensor] {
        &self.parts[..self.count]
    }

    /// The only part, or `None` if there are several.
    pub fn single(&self) -> Option<Tensor> {
        (self.count == 1).then_some(self.parts[0])
    }

    /// Number of rows: the outputs of the layer.
    pub fn rows(&self) -> usize {
        self.parts().iter().map(|part| part.rows).sum()
    }

    /// Number of columns: the inputs of the layer.
    pub const fn cols(&self) -> usize {
        self.parts[0].cols
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows() * self.cols()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A range of the rows.
    ///
    /// # Panics
    /// If the range does not lie inside the weight: a bug in model code.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows(), "rows {range:?} of {self:?}");
        let mut result = Self { parts: [self.parts[0].rows(0..0); MAX_PARTS], count: 0 };
        let mut first = 0;
        for &part in self.parts() {
            let within = range.start.max(first) - first..range.end.clamp(first, first + part.rows) - first;
            if within.start < within.end {
                result.parts[result.count] = part.rows(within);
                result.count += 1;
            }
            first += part.rows;
        }
        result.count = result.count.max(1);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Arena, DType, Region, Scale, Stored};

    /// Three parts: 128 rows of FP8, 256 of NVFP4, 64 of bf16.
    fn parts() -> [Tensor; 3] {
        let mut arena = Arena::new(Region::Weights);
        let formats = [Stored::fp8(Scale::ONE), Stored::nvfp4(Scale::ONE), Stored::plain(DType::Bf16)];
        let mut rows = [128, 256, 64].into_iter();
        formats.map(|stored| arena.alloc_stored(rows.next().unwrap(), 192, stored).unwrap())
    }

    #[test]
    fn parts_of_one_width_are_stacked() {
        let [fp8, fp4, bf16] = parts();
        let weight = Weight::stack(&parts()).unwrap();
        assert_eq!((weight.parts(), weight.single()), (&parts()[..], None));
        assert_eq!((weight.rows(), weight.cols(), weight.len(), weight.is_empty()), (448, 192, 448 * 192, false));
        assert_eq!(Weight::stack(&[fp4]), Some(Weight::new(fp4)));
        assert_eq!(Weight::new(fp4).single(), Some(fp4));
        assert_eq!(Weight::stack(&[fp8, fp8, fp8, bf16]).map(|weight| weight.parts().len()), Some(4));
        assert_eq!([Weight::stack(&[]), Weight::stack(&[bf16; 5]), Weight::stack(&[fp8, bf16.cols(0..191)])], [None; 3]);
    }

    #[test]
    fn a_slice_has_the_rows_of_its_parts() {
        let ([fp8, fp4, bf16], weight) = (parts(), Weight::stack(&parts()).unwrap());
        let slices = [
            (0..448, vec![fp8, fp4, bf16]),
            (0..128, vec![fp8]),
            (128..384, vec![fp4]),
            (256..384, vec![fp4.rows(128..256)]),
            (3..130, vec![fp8.rows(3..128), fp4.rows(0..2)]),
            (256..385, vec![fp4.rows(128..256), bf16.rows(0..1)]),
            (447..448, vec![bf16.rows(63..64)]),
        ];
        for (range, expected) in slices {
            let slice = weight.slice(range.clone());
            assert_eq!(slice.parts(), expected, "{range:?}");
            assert_eq!((slice.rows(), slice.cols()), (range.len(), 192));
        }
        // Slices of slices, and a slice without rows, which still has a part.
        assert_eq!(weight.slice(64..448).slice(64..320).parts(), [fp4]);
        let empty = weight.slice(448..448);
        assert_eq!((empty.parts().len(), empty.rows(), empty.cols(), empty.is_empty()), (1, 0, 192, true));
        for range in [0..449, 449..449] {
            assert!(std::panic::catch_unwind(|| weight.slice(range)).is_err());
        }
    }
}
