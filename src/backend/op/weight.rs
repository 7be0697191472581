//! Weights of linear layers.

use crate::tensor::Tensor;
use std::ops::Range;

/// The largest number of parts: those of the fused projection of a single block.
const MAX_PARTS: usize = 4;

/// The weight of a linear layer: its rows in order, in parts that have a format of their own. A checkpoint may store the matrices
/// that are stacked here in different formats, and each with its own scale.
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

    /// A weight of several parts, or `None` if they are none, too many, or of different widths.
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
