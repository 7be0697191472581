//! Merged adapters: their deltas are added to the weights of a model in f32, before the result is rounded to the type that a backend holds.

use super::{Adapter, WeightDelta};
use crate::error::{Error, Result};
use crate::names::LayerId;
use crate::tensor::{Bytes, DType, WeightSlice};
use kiln_numerics::merging::{BLOCK, Block, ScaledDelta};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The highest total rank of the branches of one weight. Above it the product would cost more than it is worth.
pub const MAX_RANK: usize = 1024;

/// How adapters are applied to a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterMode {
    /// Plain weights are merged. Quantized weights are unchanged, and their low-rank product is computed separately, because rounding to 4
    /// or 8 bits would lose it.
    #[default]
    Auto,
    /// All weights are merged. Quantized ones are expanded first.
    Merge,
    /// Every weight gets a LoRA branch, so that a later job can use other adapters.
    Branch,
}

/// Adapters with their strengths, in the order in which they are applied.
#[derive(Clone, Debug, Default)]
pub struct Adapters(pub Vec<(Adapter, f32)>);

/// One addend of a weight: a delta, the rows of the weight that it is added to, and its strength.
pub(super) type Addend<'a> = (&'a WeightDelta, &'a [Range<usize>], f32);

/// Identifies a set of adapters: the digests of their files and the bits of their strengths. Adapters with a strength of zero are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterSet(Arc<[(String, u32)]>);

impl Adapters {
    /// The identity of this set.
    pub fn id(&self) -> AdapterSet {
        AdapterSet(self.effective().map(|(adapter, strength)| (adapter.digest.clone(), strength.to_bits())).collect())
    }

    /// The adapters whose strength is not zero.
    pub fn effective(&self) -> impl Iterator<Item = (&Adapter, f32)> {
        self.0.iter().filter(|(_, strength)| *strength != 0.0).map(|(adapter, strength)| (adapter, *strength))
    }

    /// The deltas of a weight. Adapters with a strength of zero are left out.
    pub(super) fn deltas(&self, id: LayerId) -> impl Iterator<Item = Addend<'_>> {
        let layers = self.effective().flat_map(|(adapter, strength)| adapter.layers.iter().map(move |layer| (layer, strength)));
        let own = layers.filter(move |(layer, _)| layer.target.id == id);
        own.map(|(layer, strength)| (&layer.delta, &layer.target.rows[..], strength))
    }

    /// The total rank of a weight's deltas; `None` if there are none. Fails if a delta has another shape than the weight, as one for
    /// another model has.
    pub fn rank(&self, id: LayerId, [rows, cols]: [usize; 2]) -> Result<Option<usize>> {
        let mut total = None;
        for (delta, ranges, _) in self.deltas(id) {
            let covered: usize = ranges.iter().map(ExactSizeIterator::len).sum();
            if delta.shape() != [covered, cols] || ranges.iter().any(|range| range.end > rows) {
                let what =
                    format!("an adapter was opened for another model: its `{id}` is not of {rows} rows and {cols} columns");
                return Err(Error::Usage { what, hint: None });
            }
            total = Some(total.unwrap_or(0_usize).saturating_add(delta.branch_rank()));
        }
        Ok(total)
    }

    /// Fails if a file changed since it was opened.
    pub fn verify(&self) -> Result<()> {
        self.0.iter().try_for_each(|(adapter, _)| adapter.verify())
    }
}

/// Merges weights one after the other. A result's memory is reused for the next weight if nobody holds it any longer.
#[derive(Default)]
pub struct Merger {
    memory: Arc<Vec<u8>>,
}

impl Merger {
    /// Merges a weight with all deltas, as elements of a plain type. `parts` are the rows in order, and so are the results.
    ///
    /// # Panics
    /// If a delta has another shape than the weight. [`Adapters::rank`] refuses such deltas.
    pub fn merged(&mut self, adapters: &Adapters, id: LayerId, parts: &[WeightSlice], to: DType) -> Vec<WeightSlice> {
        let cols = parts.first().map_or(0, WeightSlice::cols);
        let (rows, pitch) = (parts.iter().map(|part| part.rows).sum::<usize>(), to.bytes(cols));
        let deltas: Vec<(ScaledDelta, &[Range<usize>])> =
            adapters.deltas(id).map(|(delta, ranges, strength)| (delta.scaled(strength), ranges)).collect();
        let first_rows = parts.iter().scan(0, |next, part| {
            let first = *next;
            *next += part.rows;
            Some((first, part))
        });
        let first_rows: Vec<(usize, &WeightSlice)> = first_rows.collect();
        let bytes = rows * pitch;
        let memory = match Arc::get_mut(&mut self.memory).filter(|memory| memory.len() >= bytes) {
            Some(memory) => memory,
            None => {
                self.memory = Arc::new(Vec::new());
                let memory = Arc::get_mut(&mut self.memory).expect("nobody else has it yet");
                *memory = vec![0; bytes];
                memory
            }
        };
        let blocks = memory[..bytes].par_chunks_mut((BLOCK * pitch).max(1)).enumerate();
        // Each block is decoded, changed and rounded while it is in the cache, so the weight is read and written once.
        blocks.for_each_init(Vec::new, |values, (i, out)| {
            let rows = i * BLOCK..(i * BLOCK + BLOCK).min(rows);
            Block { parts: &first_rows, deltas: &deltas, rows, cols, values, to, out }.merge();
        });
        let all = Bytes::new(self.memory.clone());
        let merged = first_rows.iter().map(|(first, part)| {
            let own = all.slice(first * pitch..(first + part.rows) * pitch).expect("all rows were merged");
            WeightSlice::plain(own, to, part.rows)
        });
        merged.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Layer, LayerTarget, Matrix, Product};
    use super::*;
    use crate::names::LayerRole;

    const LAYER: LayerId = LayerRole::ImageIn.only();

    fn matrix(rows: usize, cols: usize, values: &[f32]) -> Matrix {
        Matrix { bytes: Bytes::new(Arc::new(DType::F32.encoded(values))), dtype: DType::F32, rows, cols }
    }

    /// Ranges, given by their ends.
    fn rows(ends: &[usize]) -> Vec<Range<usize>> {
        ends.chunks_exact(2).map(|ends| ends[0]..ends[1]).collect()
    }

    fn adapter(rows: Vec<Range<usize>>, up: &[f32]) -> Adapter {
        let product = Product::Lora { down: matrix(1, 2, &[1.0, 10.0]), up: matrix(up.len(), 1, up) };
        let target = LayerTarget { id: LAYER, rows, cols: 2 };
        let layers = vec![Layer { name: "l".into(), target, delta: WeightDelta { product, scale: 1.0 } }];
        Adapter { path: "a".into(), layers, unmatched: vec![], digest: String::new(), file: None }
    }

    #[test]
    fn terms_are_added_to_their_rows() {
        let part =
            |values: &[f32]| WeightSlice::plain(Bytes::new(Arc::new(DType::Bf16.encoded(values))), DType::Bf16, values.len() / 2);
        let parts = [part(&[1.0, 2.0]), part(&[3.0, 4.0, 5.0, 6.0, 7.0, 8.0])];
        // Halves that are stored in reverse order, and rows in the middle.
        let adapters =
            Adapters(vec![(adapter(rows(&[2, 4, 0, 2]), &[1.0, 2.0, 3.0, 4.0]), 1.0), (adapter(rows(&[1, 2]), &[1.0]), -2.0)]);
        let merged = |dtype: DType| {
            let merged = Merger::default().merged(&adapters, LAYER, &parts, dtype);
            assert_eq!(merged.iter().map(|part| part.rows).collect::<Vec<_>>(), [1, 3]);
            merged.iter().flat_map(|part| dtype.decoded(&part.bytes)).collect::<Vec<_>>()
        };
        let want = [1.0 + 3.0, 2.0 + 30.0, 3.0 + 4.0 - 2.0, 4.0 + 40.0 - 20.0, 5.0 + 1.0, 6.0 + 10.0, 7.0 + 2.0, 8.0 + 20.0];
        assert_eq!([merged(DType::F32), merged(DType::Bf16)], [want, want]);
        let rank = |adapters: &Adapters, id| adapters.rank(id, [4, 2]).unwrap();
        assert_eq!(rank(&adapters, LAYER), Some(2));
        assert_eq!(rank(&adapters, LayerRole::TextIn.only()), None);
        assert_eq!(rank(&adapters, LayerRole::ImageIn.of_block(0)), None);
        assert!(adapters.rank(LAYER, [3, 2]).is_err() && adapters.rank(LAYER, [4, 3]).is_err());
        // A strength of zero changes nothing.
        let none = Adapters(vec![(adapter(rows(&[0, 4]), &[1.0; 4]), 0.0)]);
        assert_eq!(rank(&none, LAYER), None);
    }

    /// Compares with sums in f64, at sizes that are not multiples of a block.
    #[test]
    fn many_rows_are_merged_block_by_block() {
        let (rows, cols, rank) = (12 * BLOCK + 5, 40, 3);
        let values =
            |count: usize, seed: usize| (0..count).map(|i| ((i * 37 + seed) % 101) as f32 / 64.0 - 0.75).collect::<Vec<_>>();
        let (weight, up, down) = (values(rows * cols, 1), values(rows * rank, 2), values(rank * cols, 3));
        let target = LayerTarget { id: LAYER, rows: vec![50..rows, 0..50], cols };
        let product = Product::Lora { down: matrix(rank, cols, &down), up: matrix(rows, rank, &up) };
        let layers = vec![Layer { name: "l".into(), target, delta: WeightDelta { product, scale: 0.5 } }];
        let adapter = Adapter { path: "a".into(), layers, unmatched: vec![], digest: String::new(), file: None };
        let part = WeightSlice::plain(Bytes::new(Arc::new(DType::F32.encoded(&weight))), DType::F32, rows);
        let (mut merger, adapters) = (Merger::default(), Adapters(vec![(adapter, 1.5)]));
        let first = merger.merged(&adapters, LAYER, std::slice::from_ref(&part), DType::F32);
        // A held result does not change. Its memory is reused afterwards.
        let held = first[0].bytes.to_vec();
        drop(merger.merged(&adapters, LAYER, std::slice::from_ref(&part), DType::Bf16));
        assert_eq!(*held, *first[0].bytes);
        for (i, got) in DType::F32.decoded(&held).into_iter().enumerate() {
            let (row, col) = (i / cols, i % cols);
            let of_delta = if row < 50 { row + rows - 50 } else { row - 50 };
            let sum: f64 = (0..rank).map(|r| f64::from(up[of_delta * rank + r]) * f64::from(down[r * cols + col])).sum();
            let want = f64::from(weight[i]) + 0.75 * sum;
            assert!((f64::from(got) - want).abs() < 1e-6, "{row} {col}: {got} {want}");
        }
    }
}
