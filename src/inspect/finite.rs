//! Checks every value of a model's files for NaN and infinity, and every matrix for parts that were never written.
//!
//! All threads read the files in order, a window at a time. A branchless loop that the compiler vectorizes first looks for any
//! value in a block that is not finite. Only blocks with such a value are then read again, value by value.

use crate::checkpoint::{Shard, StoredDtype, Weights};
use crate::component::{Component, PerComponent};
use crate::error::{Error, Result};
use crate::progress::{Phase, Progress};
use kiln_numerics::scan::{NonFinite, non_finite};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are read between two progress reports. A disk reads ahead within a window, and Ctrl-C waits for one at most.
const WINDOW: usize = 256 << 20;

/// Bytes that one thread checks at a time; a multiple of every element size, so that no value is cut.
const BLOCK: usize = 1 << 20;

/// The result of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FiniteReport {
    /// Bytes that were read.
    pub bytes: u64,
    /// The number of values.
    pub values: u64,
    /// Tensors with values that are not finite, in order of the parts and then of names.
    pub faults: Vec<NonFiniteTensor>,
}

impl FiniteReport {
    /// The number of values that are not finite.
    pub fn count(&self) -> u64 {
        self.faults.iter().map(|fault| fault.nan + fault.infinite).sum()
    }
}

/// A tensor with values that are not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFiniteTensor {
    /// The part that the tensor belongs to.
    pub part: Component,
    /// The tensor's name in the file.
    pub name: String,
    /// The tensor's dtype, as the header spells it.
    pub dtype: &'static str,
    /// The number of NaNs.
    pub nan: u64,
    /// The number of infinities.
    pub infinite: u64,
    /// The index of the first value that is not finite.
    pub first: u64,
}

/// A block of a tensor's bytes.
struct Block<'a> {
    /// The index of the tensor.
    tensor: usize,
    dtype: &'static StoredDtype,
    bytes: &'a [u8],
    /// The number of values of the tensor before this block.
    before: u64,
}

/// Checks every value in the files of a model, including tensors that no image needs. Fails if a file changes meanwhile, or if
/// `stop` is set.
pub fn scan(weights: &PerComponent<Weights>, stop: &AtomicBool, progress: &dyn Progress) -> Result<FiniteReport> {
    let files = files(weights);
    let entries = || files.iter().flat_map(|(_, shard)| shard.tensors());
    let total = entries().map(|(_, entry)| entry.range.len() as u64).sum();
    progress.begin(Phase::Inspect, total);
    let mut report = FiniteReport { bytes: total, ..FiniteReport::default() };
    for (part, shard) in files {
        // Reads in file order, which suits a disk.
        let mut tensors: Vec<_> = shard.tensors().collect();
        tensors.sort_by_key(|(_, entry)| entry.range.start);
        report.values += tensors.iter().map(|(_, entry)| 8 * entry.range.len() as u64 / entry.dtype.bits).sum::<u64>();
        let bytes: Vec<_> = tensors.iter().filter_map(|(name, _)| shard.bytes(name)).collect();
        let blocks: Vec<Block<'_>> = (bytes.iter().zip(&tensors).enumerate())
            .flat_map(|(tensor, (bytes, (_, entry)))| {
                bytes.chunks(BLOCK).enumerate().map(move |(i, bytes)| Block {
                    tensor,
                    dtype: entry.dtype,
                    bytes,
                    before: (8 * i * BLOCK) as u64 / entry.dtype.bits,
                })
            })
            .collect();
        let mut found = vec![NonFinite::default(); tensors.len()];
        for window in windows(&blocks) {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let counts: Vec<NonFinite> =
                blocks[window.clone()].par_iter().map(|block| non_finite(block.dtype.name, block.bytes)).collect();
            for (block, counts) in blocks[window.clone()].iter().zip(counts) {
                let first = counts.first.map(|first| block.before + first);
                found[block.tensor] = found[block.tensor].then(NonFinite { first, ..counts });
            }
            // Keeps this process's memory use low: the file need not stay mapped.
            shard.release();
            progress.advance(blocks[window].iter().map(|block| block.bytes.len() as u64).sum());
        }
        // Results for a file that changed meanwhile are meaningless.
        shard.verify()?;
        let mut faults: Vec<NonFiniteTensor> = (tensors.iter().zip(found))
            .filter_map(|((name, entry), NonFinite { nan, infinite, first })| {
                let (part, name, dtype) = (part, (*name).to_owned(), entry.dtype.name);
                Some(NonFiniteTensor { part, name, dtype, nan, infinite, first: first? })
            })
            .collect();
        faults.sort_by(|a, b| a.name.cmp(&b.name));
        report.faults.append(&mut faults);
    }
    progress.end();
    Ok(report)
}

/// The files of a model without duplicates: a file may hold several parts.
pub(super) fn files(weights: &PerComponent<Weights>) -> Vec<(Component, &Shard)> {
    let mut seen = BTreeSet::new();
    let all = weights.iter().flat_map(|(part, weights)| weights.shards().iter().map(move |shard| (part, shard)));
    all.filter(|(_, shard)| seen.insert(shard.path())).collect()
}

/// Ranges of blocks, each with about a window's bytes.
fn windows(blocks: &[Block<'_>]) -> Vec<Range<usize>> {
    let (mut ranges, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (i, block) in blocks.iter().enumerate() {
        bytes += block.bytes.len();
        if bytes >= WINDOW || i + 1 == blocks.len() {
            ranges.push(start..i + 1);
            (start, bytes) = (i + 1, 0);
        }
    }
    ranges
}

/// Fails if a weight is zero where no trained weight is: missing parts of an unfinished download read as zeros.
pub fn refuse_unwritten(weights: &PerComponent<Weights>) -> Result<()> {
    weights.iter().try_for_each(|(part, weights)| weights.shards().iter().try_for_each(|shard| shard.check_written(part)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Layout;
    use crate::progress::Silent;
    use crate::tensor::{Bytes, DType};
    use crate::tiny;

    /// The tiny model with other bytes in the file of one part.
    fn changed(dtype: DType, part: Component, change: impl FnOnce(&mut Vec<u8>, &Shard)) -> PerComponent<Weights> {
        let model = tiny::model(Layout::Bfl, dtype).unwrap();
        let mut bytes = model.file(part).to_vec();
        change(&mut bytes, &Shard::from_bytes("x", model.file(part).clone()).unwrap());
        PerComponent::from_fn(|other| match other == part {
            true => {
                let shard = Shard::from_bytes("changed", Bytes::new(std::sync::Arc::new(bytes.clone()))).unwrap();
                Weights::from_shards(part, vec![shard]).unwrap()
            }
            false => model.weights(other).unwrap(),
        })
    }

    #[test]
    fn planted_values_are_found_in_every_part() {
        for (dtype, name, size) in [(DType::Bf16, "BF16", 2), (DType::F16, "F16", 2), (DType::F32, "F32", 4)] {
            for part in Component::ALL {
                let mut want = Vec::new();
                let weights = changed(dtype, part, |bytes, shard| {
                    let (tensor, entry) = shard.tensors().filter(|(_, entry)| entry.range.len() > 8 * size).last().unwrap();
                    for (index, value) in [(3, f32::NAN), (5, f32::INFINITY), (6, f32::NEG_INFINITY)] {
                        let to = entry.range.start + index * size;
                        bytes[to..to + size].copy_from_slice(&dtype.encoded(&[value]));
                    }
                    want.push(NonFiniteTensor { part, name: tensor.into(), dtype: name, nan: 1, infinite: 2, first: 3 });
                });
                let report = scan(&weights, &AtomicBool::new(false), &Silent).unwrap();
                assert_eq!(report.faults, want);
                // The VAE also has an integer of eight bytes.
                assert_eq!((report.count(), report.bytes), (3, (report.values - 1) * size as u64 + 8));
            }
        }
        let whole = changed(DType::Bf16, Component::Vae, |_, _| ());
        assert_eq!(scan(&whole, &AtomicBool::new(false), &Silent).unwrap().faults, []);
        assert!(refuse_unwritten(&whole).is_ok());
        assert!(matches!(scan(&whole, &AtomicBool::new(true), &Silent), Err(Error::Interrupted)));
    }

    #[test]
    fn zeros_in_place_of_a_matrix_are_refused() {
        let name = "double_blocks.0.img_mlp.0.weight";
        let weights =
            changed(DType::Bf16, Component::Transformer, |bytes, shard| bytes[shard.entry(name).unwrap().range.clone()].fill(0));
        let error = refuse_unwritten(&weights).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor `{name}` is all zeros")), "{error}");
    }

    #[test]
    fn windows_cover_all_blocks() {
        let bytes = vec![0; BLOCK];
        let dtype: &'static StoredDtype = &StoredDtype { name: "U8", bits: 8 };
        let blocks: Vec<Block<'_>> =
            (0..2 * WINDOW / BLOCK + 3).map(|_| Block { tensor: 0, dtype, bytes: &bytes, before: 0 }).collect();
        let ranges = windows(&blocks);
        assert_eq!(ranges.iter().map(Range::len).collect::<Vec<_>>(), [WINDOW / BLOCK, WINDOW / BLOCK, 3]);
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start) && windows(&[]).is_empty());
    }
}
