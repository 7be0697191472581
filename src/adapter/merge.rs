//! Adapters that are merged: their terms are added to the weights of a model in f32, before those are rounded to the type that a backend holds.

use super::{Adapter, Term};
use crate::part::Part;
use crate::tensor::{Bytes, DType, WeightPart};
use std::ops::Range;
use std::sync::Arc;

/// How adapters are applied to a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterMode {
    /// Plain weights are merged with what adapters add to them. Quantised ones stay as they are, and the product of what is added is computed
    /// beside theirs, because rounding to so few bits would lose it.
    #[default]
    Auto,
    /// Weights are merged. Those that are quantised are expanded for it.
    Merge,
    /// The product of what is added is computed beside that of every weight, so that a later job can have other adapters.
    Branch,
}

/// Adapters with their strengths, in the order in which they are added.
#[derive(Clone, Debug, Default)]
pub struct Adapters(pub Vec<(Adapter, f32)>);

impl Adapters {
    /// What is added to a weight: terms, the rows that theirs are added to, and strengths. Those without any effect are left out.
    fn terms<'a>(&'a self, part: Part, weight: &'a str) -> impl Iterator<Item = (&'a Term, &'a [Range<usize>], f32)> {
        let layers = self
            .0
            .iter()
            .filter(|(_, strength)| *strength != 0.0)
            .flat_map(|(adapter, strength)| adapter.layers.iter().map(move |layer| (layer, *strength)));
        let own = layers.filter(move |(layer, _)| layer.place.part == part && layer.place.name == weight);
        own.map(|(layer, strength)| (&layer.term, &layer.place.rows[..], strength))
    }

    /// The weight with its terms, in f32; `None` if nothing is added to it. `parts` are its rows in order.
    pub fn merged(&self, part: Part, weight: &str, parts: &[WeightPart]) -> Option<WeightPart> {
        let mut terms = self.terms(part, weight).peekable();
        terms.peek()?;
        let (rows, cols) = (parts.iter().map(|part| part.rows).sum::<usize>(), parts.first()?.cols());
        let mut values = vec![0.0; rows * cols];
        let mut to = values.chunks_exact_mut(cols);
        for part in parts {
            (0..part.rows).zip(&mut to).for_each(|(row, to)| part.decode(row, to));
        }
        for (term, ranges, strength) in terms {
            let mut delta = vec![0.0; term.shape().iter().product()];
            term.add_to(strength, &mut delta);
            let mut delta = &delta[..];
            for range in ranges {
                let (own, rest) = delta.split_at(range.len() * cols);
                let to = &mut values[range.start * cols..range.end * cols];
                to.iter_mut().zip(own).for_each(|(to, delta)| *to += delta);
                delta = rest;
            }
        }
        Some(WeightPart::plain(Bytes::new(Arc::new(DType::F32.encoded(&values))), DType::F32, rows))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Layer, Matrix, Place, Product};
    use super::*;

    fn matrix(rows: usize, cols: usize, values: &[f32]) -> Matrix {
        Matrix { bytes: Bytes::new(Arc::new(DType::F32.encoded(values))), dtype: DType::F32, rows, cols }
    }

    fn adapter(rows: Vec<Range<usize>>, up: &[f32]) -> Adapter {
        let product = Product::LowRank { down: matrix(1, 2, &[1.0, 10.0]), up: matrix(up.len(), 1, up) };
        let place = Place { part: Part::Transformer, name: "w".into(), rows, cols: 2 };
        Adapter {
            path: "a".into(),
            layers: vec![Layer { name: "l".into(), place, term: Term { product, scale: 1.0 } }],
            unmatched: vec![],
            digest: String::new(),
        }
    }

    #[test]
    fn terms_are_added_to_their_rows() {
        let part =
            |values: &[f32]| WeightPart::plain(Bytes::new(Arc::new(DType::Bf16.encoded(values))), DType::Bf16, values.len() / 2);
        let parts = [part(&[1.0, 2.0]), part(&[3.0, 4.0, 5.0, 6.0, 7.0, 8.0])];
        // Halves that are stored the other way round, and rows in the middle.
        let adapters =
            Adapters(vec![(adapter(vec![2..4, 0..2], &[1.0, 2.0, 3.0, 4.0]), 1.0), (adapter(vec![1..2], &[1.0]), -2.0)]);
        let merged = adapters.merged(Part::Transformer, "w", &parts).unwrap();
        let mut values = vec![0.0; 8];
        (0..4).zip(values.chunks_exact_mut(2)).for_each(|(row, to)| merged.decode(row, to));
        assert_eq!(
            values,
            [1.0 + 3.0, 2.0 + 30.0, 3.0 + 4.0 - 2.0, 4.0 + 40.0 - 20.0, 5.0 + 1.0, 6.0 + 10.0, 7.0 + 2.0, 8.0 + 20.0]
        );
        assert!(adapters.merged(Part::Transformer, "other", &parts).is_none());
        assert!(adapters.merged(Part::Vae, "w", &parts).is_none());
        // A strength of zero is no change at all.
        assert!(Adapters(vec![(adapter(vec![0..4], &[1.0; 4]), 0.0)]).merged(Part::Transformer, "w", &parts).is_none());
    }
}
